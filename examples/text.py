"""Turns tokens into text as they come, and writes the texts of many prompts to stdout in order."""

import json
import sys
from collections.abc import Sequence

from tokenizers import Tokenizer


class Detokenizer:
    """Turns the tokens that follow a prompt into text as they come, never half a character.

    What a token spells may depend on its neighbours. So the detokenizer decodes the last few tokens twice, with the new
    ones and without them; what the former has more is the new text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]):
        self.tokenizer = tokenizer
        self.ids = list(prompt_ids[-5:])
        self.num_read = len(self.ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these tokens complete; bytes of an unfinished character wait for the rest of it."""
        return "".join(self._push(token_id) for token_id in token_ids)

    def _push(self, token_id: int) -> str:
        self.ids.append(token_id)
        text = self._new_text()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self.ids, self.num_read = self.ids[self.num_read :], len(self.ids) - self.num_read
        return text

    def flush(self) -> str:
        """Returns what still waits at the end, with replacement characters for bytes that spell nothing."""
        text = self._new_text()
        self.num_read = len(self.ids)
        return text

    def _new_text(self) -> str:
        before = self.tokenizer.decode(self.ids[: self.num_read])
        return self.tokenizer.decode(self.ids)[len(before) :]


class Writer:
    """Writes results to stdout in the order of the prompts, each as soon as it is its turn."""

    def __init__(self, tokenizer: Tokenizer, prompts: list[str], prompt_ids: list[list[int]], as_json: bool):
        self.as_json = as_json
        self.prompts = prompts
        self.detokenizers = [Detokenizer(tokenizer, ids) for ids in prompt_ids]
        self.texts = ["" for _ in prompts]
        self.num_read = [0 for _ in prompts]  # tokens that are in the texts
        self.turn = 0
        self.num_written = 0  # characters of the prompt whose turn it is, and of its text

    def update(self, results: list[tuple[list[int], str]]) -> None:
        """Takes all tokens so far of every prompt, a stop token included, and the finish reason or "running"."""
        for i, (token_ids, finish_reason) in enumerate(results):
            new_ids = token_ids[self.num_read[i] : -1 if finish_reason == "stop" else None]
            self.num_read[i] = len(token_ids)
            self.texts[i] += self.detokenizers[i].push(new_ids)
            if finish_reason != "running":
                self.texts[i] += self.detokenizers[i].flush()
        while self.turn < len(results) and self._write(self.turn, *results[self.turn]):
            self.turn, self.num_written = self.turn + 1, 0
        sys.stdout.flush()

    def _write(self, i: int, token_ids: list[int], finish_reason: str) -> bool:
        """Writes what is new of prompt i, and tells whether that was its end."""
        is_end = finish_reason != "running"
        if not self.as_json:
            text = ("\n" if i > 0 else "") + self.prompts[i] + self.texts[i] + ("\n" if is_end else "")
            sys.stdout.write(text[self.num_written :])
            self.num_written = len(text)
        elif is_end:
            values = self.prompts[i], token_ids, self.texts[i], finish_reason
            result = dict(zip(("prompt", "token_ids", "text", "finish_reason"), values, strict=True))
            sys.stdout.write(json.dumps(result) + "\n")
        return is_end
