"""Writes the texts of many prompts to stdout in order, as their tokens are drawn."""

import json
import sys

from tokenizers import Tokenizer

from paged_jax.engine import TextStream


class Writer:
    """Writes the results of many prompts to stdout, in their order and without needless delay."""

    def __init__(self, tokenizer: Tokenizer, prompts: list[str], prompt_ids: list[list[int]], as_json: bool):
        self.as_json = as_json
        self.prompts = prompts
        self.streams = [TextStream(tokenizer, ids) for ids in prompt_ids]
        self.texts = ["" for _ in prompts]
        self.num_read = [0 for _ in prompts]  # how many tokens are in each text
        self.turn = 0  # the prompt whose text is being written
        self.num_written = 0  # how many characters of that prompt and its text are written

    def update(self, results: list[tuple[list[int], str]]) -> None:
        """Takes all tokens so far of every prompt, a stop token included, and its finish reason or "running"."""
        for i, (token_ids, finish_reason) in enumerate(results):
            new_ids = token_ids[self.num_read[i] : -1 if finish_reason == "stop" else None]
            self.num_read[i] = len(token_ids)
            self.texts[i] += "".join(map(self.streams[i].push, new_ids))
            if finish_reason != "running":
                self.texts[i] += self.streams[i].flush()
        while self.turn < len(results) and self._write(self.turn, *results[self.turn]):
            self.turn, self.num_written = self.turn + 1, 0
        sys.stdout.flush()

    def _write(self, i: int, token_ids: list[int], finish_reason: str) -> bool:
        """Writes the new text of prompt i, and says whether the text is finished."""
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
