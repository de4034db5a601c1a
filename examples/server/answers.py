"""Makes OpenAI's answers: the objects of /v1/completions and /v1/chat/completions, whole or in chunks."""

import math
import time
import uuid
from collections.abc import Sequence
from typing import Any

from examples.server.api import Wanted
from examples.server.fields import ApiError
from examples.server.logprobs import Scored, TextOffsets, completion_logprobs
from examples.server.tokens import TokenTexts
from paged_jax import engine

_LEAST_LOGPROB = -9999.0  # JSON has no -inf


class Answer:
    """Builds the objects of one answer.

    Args:
        is_chat: whether the answer is a message.
        model: the model's name.
        tokens: the texts of tokens, for log-probabilities.
        wanted: what was asked for.
        prompts: the tokens of each prompt. Choice i answers prompt i // n.
        echoes: a text for each prompt that is put before its choices, or nothing.
    """

    def __init__(
        self,
        is_chat: bool,
        model: str,
        tokens: TokenTexts,
        wanted: Wanted,
        prompts: Sequence[Sequence[int]],
        echoes: Sequence[str] = (),
    ):
        self.is_chat, self._tokens, self._wanted = is_chat, tokens, wanted
        self._prompts, self._echoes = prompts, echoes
        self._num_output_tokens = 0
        self._num_cached = [0 for _ in prompts]  # tokens of each prompt that the engine had computed before
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._offsets: dict[int, TextOffsets] = {}  # of each choice's text so far, for the log-probabilities

    @property
    def num_choices(self) -> int:
        """How many choices the answer has."""
        return len(self._prompts) * self._wanted.params["n"]

    def echo(self, index: int) -> str:
        """The text before the choice's own."""
        num_samples: int = self._wanted.params["n"]
        return self._echoes[index // num_samples] if self._echoes else ""

    def count(self, index: int, delta: engine.Delta) -> None:
        """Counts the tokens of a choice's delta for the usage, whether the client gets to see it or not."""
        self._num_output_tokens += 0 if self._wanted.has_no_output else len(delta.token_ids)
        prompt = index // self._wanted.params["n"]
        self._num_cached[prompt] = max(self._num_cached[prompt], delta.num_cached_tokens)

    def whole(self, choices: Sequence[Sequence[engine.Delta]]) -> dict[str, Any]:
        """Makes an answer that is not streamed of all deltas of each choice, which it counts.

        Raises:
            ApiError: a log-probability is no number.
        """
        built = []
        for index, deltas in enumerate(choices):
            for delta in deltas:
                self.count(index, delta)
            choice = self._choice(index, deltas)
            text = self._text(deltas)
            if self.is_chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = self.echo(index) + text
            built.append(choice)
        name = "chat.completion" if self.is_chat else "text_completion"
        return self._head | {"object": name, "choices": built, "usage": self.usage()}

    def opening(self, index: int) -> dict[str, Any]:
        """Makes the first chunk of a choice of a streamed answer: a message's role, or the echoed prompt."""
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None}
        if self.is_chat:
            choice["delta"] = {"role": "assistant", "content": ""}
        else:
            choice["text"] = self.echo(index)
        return self._chunk([choice])

    def chunk(self, index: int, delta: engine.Delta) -> dict[str, Any]:
        """Makes a chunk of a streamed answer.

        Raises:
            ApiError: a log-probability is no number.
        """
        choice = self._choice(index, [delta])
        text = self._text([delta])
        choice |= {"delta": {"content": text}} if self.is_chat else {"text": text}
        return self._chunk([choice])

    def usage_chunk(self) -> dict[str, Any]:
        """Makes the last chunk of a streamed answer, for clients that ask for the usage."""
        return self._chunk([]) | {"usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Counts the tokens of the prompts and of the answer so far."""
        num_prompt_tokens = sum(map(len, self._prompts))
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_output_tokens,
            "total_tokens": num_prompt_tokens + self._num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached)},
        }

    def _chunk(self, choices: list[dict]) -> dict[str, Any]:
        name = "chat.completion.chunk" if self.is_chat else "text_completion"
        return self._head | {"object": name, "choices": choices}

    def _text(self, deltas: Sequence[engine.Delta]) -> str:
        return "" if self._wanted.has_no_output else "".join(delta.text for delta in deltas)

    def _choice(self, index: int, deltas: Sequence[engine.Delta]) -> dict[str, Any]:
        """The fields that a choice has in every form of an answer."""
        scored = [] if self._wanted.has_no_output else [_scored(item) for delta in deltas for item in delta.logprobs]
        reason = deltas[-1].finish_reason
        reason = "length" if reason and self._wanted.has_no_output else reason
        return {"index": index, "logprobs": self._logprobs(index, scored), "finish_reason": reason}

    def _logprobs(self, index: int, scored: Sequence[Scored]) -> dict[str, Any] | None:
        if not scored:
            return None
        if self.is_chat:
            content = [
                self._chat_token(item.token_id, item.logprob)
                | {"top_logprobs": [self._chat_token(*pair) for pair in item.top]}
                for item in scored
            ]
            return {"content": content, "refusal": None}
        if index not in self._offsets:
            hides = self._wanted.params["skip_special_tokens"]
            self._offsets[index] = TextOffsets(self._tokens, len(self.echo(index)), hides)
        return completion_logprobs(scored, self._tokens, self._offsets[index])

    def _chat_token(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        token_bytes = list(self._tokens.bytes(token_id))
        return {"token": self._tokens.text(token_id), "logprob": logprob, "bytes": token_bytes}


def _scored(item: engine.TokenLogprob) -> Scored:
    """A token's log-probabilities as JSON can hold them."""
    top = tuple((token_id, _finite(logprob)) for token_id, logprob in item.top)
    return Scored(item.token_id, _finite(item.logprob), top)


def _finite(logprob: float) -> float:
    if math.isnan(logprob):
        message = "the model gave a log-probability that is no number"
        raise ApiError(message, status=500, kind="server_error")
    return max(logprob, _LEAST_LOGPROB)
