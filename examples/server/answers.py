"""Makes OpenAI's answers: the objects of /v1/completions and /v1/chat/completions, whole or in chunks."""

import math
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from examples.server.api import Wanted
from examples.server.fields import ApiError
from examples.server.logprobs import Scored, TextOffsets, completion_logprobs, prompt_offsets
from examples.server.tokens import TokenTexts
from examples.server.tools import ToolCall, ToolCallParser, call_object
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
        make_parser: makes the parser that finds calls of tools in a choice's text; None where there are no tools.
    """

    def __init__(
        self,
        is_chat: bool,
        model: str,
        tokens: TokenTexts,
        wanted: Wanted,
        prompts: Sequence[Sequence[int]],
        echoes: Sequence[str] = (),
        make_parser: Callable[[], ToolCallParser] | None = None,
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
        self._offsets: dict[int, TextOffsets] = {}  # of the tokens of each choice, for log-probabilities
        self._prompt_scores: dict[int, Sequence[Scored]] = {}  # of the tokens of each prompt
        self._begun: set[int] = set()  # choices that have a chunk
        self._parsers = {i: make_parser() for i in range(self.num_choices)} if make_parser is not None else {}

    @property
    def num_choices(self) -> int:
        """How many choices the answer has."""
        return len(self._prompts) * self._wanted.params["n"]

    @property
    def is_scored(self) -> bool:
        """Whether the log-probabilities of the prompts' tokens are wanted, which come with the first new token."""
        return self._wanted.params.get("prompt_logprobs") is not None

    def echo(self, index: int) -> str:
        """The text before the choice's own."""
        return self._echoes[self._prompt_of(index)] if self._echoes else ""

    def _prompt_of(self, index: int) -> int:
        return index // self._wanted.params["n"]

    def count(self, index: int, delta: engine.Delta) -> None:
        """Counts the tokens of a choice's delta for the usage, whether the client gets to see it or not."""
        self._num_output_tokens += 0 if self._wanted.has_no_output else len(delta.token_ids)
        prompt = self._prompt_of(index)
        self._num_cached[prompt] = max(self._num_cached[prompt], delta.num_cached_tokens)
        if self.is_scored and prompt not in self._prompt_scores:  # the first sample's delta comes first
            scores = [_scored(item) for item in delta.prompt_logprobs]
            self._prompt_scores[prompt] = [Scored(self._prompts[prompt][0], None), *scores]

    def whole(self, choices: Sequence[Sequence[engine.Delta]]) -> dict[str, Any]:
        """Makes an answer that is not streamed from all deltas of each choice, and counts their tokens.

        Raises:
            ApiError: a log-probability is no number, or the choice's grammar has failed.
        """
        built = []
        for index, deltas in enumerate(choices):
            for delta in deltas:
                self.count(index, delta)
            choice = self._choice(index, deltas)
            text = self._text(deltas)
            if self.is_chat:
                content, calls = self._take_calls(index, text, choice)
                choice["message"] = {
                    "role": "assistant",
                    "content": content or (None if calls else ""),
                    "refusal": None,
                }
                choice["message"] |= {"tool_calls": [call_object(call) for call in calls]} if calls else {}
            else:
                choice["text"] = self.echo(index) + text
            built.append(choice)
        name = "chat.completion" if self.is_chat else "text_completion"
        return self._head | {"object": name, "choices": built, "usage": self.usage()}

    def opening(self, index: int) -> dict[str, Any]:
        """Makes a chunk before the first delta of a choice: a message's role, or the echoed prompt."""
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None}
        if self.is_chat:
            choice["delta"] = {"role": "assistant", "content": ""}
        else:
            choice["text"] = self.echo(index)
        return self._chunk([choice])

    def chunk(self, index: int, delta: engine.Delta) -> dict[str, Any]:
        """Makes a chunk of a streamed answer.

        Raises:
            ApiError: a log-probability is no number, or the choice's grammar has failed.
        """
        choice = self._choice(index, [delta])
        text = (self.echo(index) if self.is_scored and index not in self._begun else "") + self._text([delta])
        self._begun.add(index)
        if not self.is_chat:
            return self._chunk([choice | {"text": text}])
        content, calls = self._take_calls(index, text, choice)
        delta_object: dict[str, Any] = {"content": content} if content or not calls else {}
        if calls:
            first = self._parsers[index].num_calls - len(calls)
            delta_object["tool_calls"] = [{"index": i} | call_object(call) for i, call in enumerate(calls, first)]
        return self._chunk([choice | {"delta": delta_object}])

    def _take_calls(self, index: int, text: str, choice: dict[str, Any]) -> tuple[str, list[ToolCall]]:
        """Splits a choice's next text into plain text and calls of tools; a call changes its finish reason."""
        parser = self._parsers.get(index)
        if parser is None:
            return text, []
        content, calls = parser.push(text, is_last=choice["finish_reason"] is not None)
        if choice["finish_reason"] == "stop" and parser.num_calls:
            choice["finish_reason"] = "tool_calls"
        return content, calls

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
        if deltas[-1].finish_reason == "error":
            message = f"the answer cannot go on: {deltas[-1].stop_reason}"
            raise ApiError(message, status=500, kind="server_error")
        scored = [] if self._wanted.has_no_output else [_scored(item) for delta in deltas for item in delta.logprobs]
        reason = "length" if self._wanted.has_no_output else deltas[-1].finish_reason  # the one token is left out
        return {"index": index, "logprobs": self._logprobs(index, scored), "finish_reason": reason}

    def _logprobs(self, index: int, scored: Sequence[Scored]) -> dict[str, Any] | None:
        if not self.is_chat:
            return self._completion_logprobs(index, scored)
        if scored:
            content = [
                self._chat_token(item.token_id, item.logprob)
                | {"top_logprobs": [self._chat_token(*pair) for pair in item.top]}
                for item in scored
            ]
            return {"content": content, "refusal": None}
        return None

    def _completion_logprobs(self, index: int, scored: Sequence[Scored]) -> dict[str, Any] | None:
        before: Sequence[Scored] = ()
        if index not in self._offsets:
            before = self._prompt_scores.get(self._prompt_of(index), ())
            hides = self._wanted.params["skip_special_tokens"]
            self._offsets[index] = TextOffsets(self._tokens, len(self.echo(index)), hides)
        if not before and not scored:
            return None
        offsets = prompt_offsets(self._tokens, self.echo(index), [item.token_id for item in before])
        offsets += [self._offsets[index].take(item.token_id) for item in scored]
        return completion_logprobs([*before, *scored], self._tokens, offsets)

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
