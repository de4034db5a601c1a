"""What an engine is told when it is made: the shapes that it compiles, and how it shares out blocks."""

import dataclasses
import itertools
from typing import Literal

type Preemption = Literal["cheaper", "recompute", "swap"]


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes and policies of an engine; all of them are checked when the config is made.

    The first group decides what is compiled: `Engine.reset` cannot change it.

    Attributes:
      max_model_len: positions of the model, in tokens: the most of a sequence that is ever in the cache.
      max_num_seqs: sequences that run at the same time.
      max_tokens_per_step: the token budget: new tokens of one step, decode and prefill together; at least max_num_seqs,
        so that a running sequence always gets its token.
      max_prompts_per_step: pieces of prompts of more than one token that one step computes; a model can have attention
        look for them in so many rows only.
      decode_rows: compiled numbers of rows of a step in which every sequence has one new token; rising, the last is
        max_num_seqs. Empty for a choice by the engine.
      mixed_tokens: compiled numbers of tokens of every other step; rising, the last is max_tokens_per_step. Empty for a
        choice by the engine.
      max_logprobs: most likely tokens that a request may ask the log-probabilities of; None for no log-probabilities at
        all, and a third fewer programs.
      num_host_blocks: blocks in pinned host memory that preempted sequences can be swapped to; 0 for no swapping.

      num_blocks: blocks of the caches that the engine uses; None for all.
      prefix_caching: whether full blocks are kept for requests that begin alike.
      preemption: what happens to a sequence that has to give up its blocks: "swap" while the host has room,
        "recompute", or the "cheaper" of both by the two rates below.
      recompute_tokens_per_second: at what rate the model computes prompts. The default is a round number for a model of
        8 billion parameters on one H200: give your own model's.
      swap_bytes_per_second: at what rate blocks move between device and host; the default is a round number too.
    """

    max_model_len: int
    max_num_seqs: int = 64
    max_tokens_per_step: int = 512
    max_prompts_per_step: int = 32
    decode_rows: tuple[int, ...] = ()
    mixed_tokens: tuple[int, ...] = ()
    max_logprobs: int | None = None
    num_host_blocks: int = 0

    num_blocks: int | None = None
    prefix_caching: bool = True
    preemption: Preemption = "cheaper"
    recompute_tokens_per_second: float = 40_000.0
    swap_bytes_per_second: float = 20e9

    def __post_init__(self):
        for name in ("max_model_len", "max_num_seqs", "max_tokens_per_step", "max_prompts_per_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.max_tokens_per_step < self.max_num_seqs:
            raise ValueError(
                f"max_tokens_per_step must be at least max_num_seqs = {self.max_num_seqs}, "
                f"got {self.max_tokens_per_step}"
            )
        object.__setattr__(self, "max_prompts_per_step", min(self.max_prompts_per_step, self.max_num_seqs))
        for name in ("max_logprobs", "num_host_blocks"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ValueError(f"num_blocks must be positive, got {self.num_blocks}")
        if self.preemption not in ("cheaper", "recompute", "swap"):
            raise ValueError(f'preemption must be "cheaper", "recompute" or "swap", got {self.preemption!r}')
        for name, largest in (("decode_rows", self.max_num_seqs), ("mixed_tokens", self.max_tokens_per_step)):
            sizes = tuple(getattr(self, name)) or _ladder(largest)
            if sizes[-1] != largest or sizes[0] < 1 or any(a >= b for a, b in itertools.pairwise(sizes)):
                raise ValueError(f"{name} must rise from 1 or more to {largest}, got {sizes}")
            object.__setattr__(self, name, sizes)

    @property
    def compiled(self) -> tuple:
        """The fields that decide what is compiled."""
        return (
            self.max_model_len,
            self.max_num_seqs,
            self.max_tokens_per_step,
            self.max_prompts_per_step,
            self.decode_rows,
            self.mixed_tokens,
            self.max_logprobs,
            self.num_host_blocks,
        )


def _ladder(largest: int) -> tuple[int, ...]:
    """Up to three sizes a factor of four apart: few programs, and a step is padded by less than that."""
    sizes = [largest]
    while sizes[0] > 16 and len(sizes) < 3:
        sizes.insert(0, -(-sizes[0] // 4))
    return tuple(sizes)
