"""The requests of bench_serving.py: workloads of random lengths, of fixed ones, and of ShareGPT's conversations.

Token ids are random, so no two prompts share a block, unless `is_shared`. Published results of engines use these
workloads:

    mixed       prompts of 128 to 1024 tokens, answers of 32 to 256
    1000x1000   every prompt has 1000 tokens, every answer 1000
    2048x128    every prompt has 2048 tokens, every answer 128
    sharegpt    the lengths of sharegpt_lengths.json, which says where they come from
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Request(NamedTuple):
    """A prompt's token ids, how many tokens to generate, and when the request comes, in seconds from the beginning."""

    prompt: list[int]
    max_tokens: int
    arrival: float


@dataclasses.dataclass(frozen=True)
class Workload:
    """How long prompts and answers are.

    Attributes:
        prompt_lens, output_lens: the fewest and the most tokens; all lengths between them are equally likely.
        table: pairs (prompt, answer) of lengths, which requests take in turn; None for random lengths.
    """

    prompt_lens: tuple[int, int]
    output_lens: tuple[int, int]
    table: tuple[tuple[int, int], ...] | None = None

    @property
    def longest(self) -> int:
        """The most tokens of a prompt and its answer."""
        if self.table is not None:
            return max(map(sum, self.table))
        return self.prompt_lens[1] + self.output_lens[1]

    @property
    def context(self) -> int:
        """About the mean number of a sequence's tokens over its steps."""
        prompt, output = np.mean(self.table or (self.prompt_lens, self.output_lens), axis=0 if self.table else 1)
        return round(float(prompt + output / 2))

    def lengths(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The lengths of prompts and of answers, i64 [count] each."""
        if self.table is not None:
            prompts, outputs = np.resize(np.asarray(self.table), (count, 2)).T
            return prompts, outputs
        prompts = rng.integers(*self.prompt_lens, count, endpoint=True)
        return prompts, rng.integers(*self.output_lens, count, endpoint=True)


@functools.cache
def workload(name: str) -> Workload:
    """The workload of this name, one of `WORKLOADS`."""
    if name == "mixed":
        return Workload((128, 1024), (32, 256))
    if name == "sharegpt":
        table = json.loads(Path(__file__).with_name("sharegpt_lengths.json").read_text("utf-8"))["lengths"]
        prompts, outputs = zip(*table, strict=True)
        ends = (min(prompts), max(prompts)), (min(outputs), max(outputs))
        return Workload(*ends, tuple((prompt, output) for prompt, output in table))
    prompt, output = map(int, name.split("x"))
    return Workload((prompt, prompt), (output, output))


WORKLOADS = "mixed", "1000x1000", "2048x128", "sharegpt"


def make_requests(
    of: Workload, count: int, vocab_size: int, *, is_shared: bool = False, rate: float | None = None
) -> list[Request]:
    """Random requests, always the same ones.

    Args:
        of: their lengths.
        count: how many requests.
        vocab_size: token ids are below this.
        is_shared: whether the first half of each prompt is the beginning of one text.
        rate: requests a second, in a Poisson process; None for all at once.
    """
    rng = np.random.default_rng(0)
    prompt_lens, output_lens = of.lengths(count, rng)
    arrivals = np.zeros(count) if rate is None else np.cumsum(rng.exponential(1 / rate, count))
    text = rng.integers(0, vocab_size, of.prompt_lens[1])
    requests = []
    for prompt_len, output_len, arrival in zip(prompt_lens, output_lens, arrivals, strict=True):
        prompt = rng.integers(0, vocab_size, prompt_len)
        if is_shared:
            prompt[: prompt_len // 2] = text[: prompt_len // 2]
        requests.append(Request(prompt.tolist(), int(output_len), float(arrival)))
    return requests
