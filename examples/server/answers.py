"""Makes OpenAI's answers: the objects of /v1/completions and /v1/chat/completions, whole or in chunks."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from paged_jax import engine

_LEAST_LOGPROB = -9999.0  # JSON has no -inf


class Answer:
    """Builds the objects of one answer.

    Args:
        is_chat: whether the answer is a message.
        model: the model's name.
        tokenizer: turns token ids into text, for log-probabilities.
        num_prompt_tokens: tokens of all prompts together.
    """

    def __init__(self, is_chat: bool, model: str, tokenizer: Tokenizer, num_prompt_tokens: int):
        self.is_chat, self._tokenizer = is_chat, tokenizer
        self._num_prompt_tokens, self._num_output_tokens = num_prompt_tokens, 0
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._offsets: dict[int, int] = {}  # the length so far of each choice's text, for the log-probabilities

    def whole(self, choices: Sequence[Sequence[engine.Delta]], echoes: Sequence[str] = ()) -> dict[str, Any]:
        """Makes an answer that is not streamed.

        Args:
            choices: all deltas of each choice.
            echoes: a text for each choice that is put before its own, or nothing.
        """
        built = []
        for index, deltas in enumerate(choices):
            self._num_output_tokens += sum(len(delta.token_ids) for delta in deltas)
            text = "".join(delta.text for delta in deltas)
            logprobs = self._logprobs(index, [item for delta in deltas for item in delta.logprobs])
            choice = {"index": index, "logprobs": logprobs, "finish_reason": deltas[-1].finish_reason}
            if self.is_chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = (echoes[index] if echoes else "") + text
            built.append(choice)
        name = "chat.completion" if self.is_chat else "text_completion"
        return self._head | {"object": name, "choices": built, "usage": self.usage()}

    def chunk(self, index: int, text: str, delta: engine.Delta | None = None, *, is_first: bool = False) -> dict:
        """Makes a chunk of a streamed answer.

        Args:
            index: the index of the choice.
            text: the new text.
            delta: the delta that the text comes from, if it comes from the model.
            is_first: whether this is the first chunk of its choice.
        """
        logprobs, finish_reason = None, None
        if delta is not None:
            self._num_output_tokens += len(delta.token_ids)
            logprobs, finish_reason = self._logprobs(index, delta.logprobs), delta.finish_reason
        choice: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": finish_reason}
        if self.is_chat:
            choice["delta"] = ({"role": "assistant"} if is_first else {}) | {"content": text}
        else:
            choice["text"] = text
        return self._chunk([choice])

    def usage_chunk(self) -> dict[str, Any]:
        """Makes the last chunk of a streamed answer, for clients that ask for the usage."""
        return self._chunk([]) | {"usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Counts the tokens of the prompts and of the answer so far."""
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_output_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_output_tokens,
        }

    def _chunk(self, choices: list[dict]) -> dict[str, Any]:
        name = "chat.completion.chunk" if self.is_chat else "text_completion"
        return self._head | {"object": name, "choices": choices}

    def _logprobs(self, index: int, items: Sequence[engine.TokenLogprob]) -> dict[str, Any] | None:
        if not items:
            return None
        if self.is_chat:
            content = [
                self._chat_token(item.token_id, item.logprob)
                | {"top_logprobs": [self._chat_token(*pair) for pair in item.top]}
                for item in items
            ]
            return {"content": content, "refusal": None}
        tokens, offsets = [self._token(item.token_id) for item in items], []
        for token in tokens:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [max(item.logprob, _LEAST_LOGPROB) for item in items],
            "top_logprobs": [
                {self._token(token_id): max(logprob, _LEAST_LOGPROB) for token_id, logprob in item.top}
                for item in items
            ],
            "text_offset": offsets,
        }

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self._token(token_id)
        # A part of a character decodes to the replacement character, from which its bytes cannot be told.
        token_bytes = None if "\ufffd" in token else list(token.encode())
        return {"token": token, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": token_bytes}

    def _token(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)
