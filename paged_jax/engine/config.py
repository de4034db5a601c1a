"""The configuration of an engine: the shapes that it compiles, and its policies for blocks."""

import dataclasses
import itertools
from typing import Any, Literal

from paged_jax._static import integer

type Preemption = Literal["cheaper", "recompute", "swap"]

_MOST_VERIFIED = 256  # tokens of a step that verifies drafts, if the engine chooses: more of them never pay


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes and policies of an engine. A config with a value out of range is refused with a ValueError.

    The fields of the first group decide what is compiled, and `Engine.reset` cannot change them.

    Attributes:
      max_model_len: the most tokens of one sequence that the cache ever holds, at most the model's positions.
      max_num_seqs: how many sequences can run at the same time.
      max_tokens_per_step: the token budget, which bounds the new tokens of one step, decode and prefill together. It is
        at least max_num_seqs, so that every running sequence gets its token in every step.
      max_prompts_per_step: how many chunks of more than one token a step may compute; at most max_num_seqs, to which a
        larger number is lowered. They are the first rows of the batch, so that a model needs its attention for prompts
        in that many rows only.
      decode_rows: the numbers of rows for which decode steps are compiled, in which every sequence has one new token.
        They rise, and the last is max_num_seqs. If it is empty, the engine chooses.
      mixed_tokens: the numbers of tokens for which all other steps are compiled. They rise, and the last is
        max_tokens_per_step. If it is empty, the engine chooses.
      max_logprobs: the largest `SamplingParams.logprobs` that a request may ask for. With None no request can ask for
        log-probabilities, and fewer programs are compiled.
      adjustments: whether requests may have penalties, biases, `min_tokens`, `min_p` and masks. With False fewer
        programs are compiled, and the engine keeps no counts of tokens, which are 2 * max_num_seqs * vocab_size bytes
        on the device.
      num_host_blocks: blocks in pinned host memory, to which preempted sequences can be swapped; 0 for no swapping.
        Layers with a sliding window have no more than `max_num_seqs` sequences can hold.
      verify_tokens: the numbers of tokens for which steps that verify drafts are compiled. They rise, to
        max_tokens_per_step at most. If it is empty, the engine chooses them if there is speculation.
      max_shared_prefixes: how many prefixes a decode step may read once for all sequences that share them; 0 for none.
        The model's step must use `Batch.prefixes`. Layers with sliding windows that the engine knows have none.

      num_blocks: how many blocks of the caches the engine uses; None for all. Where layers have different sliding
        windows, one number for each group of layers (the widest window first), or one for all.
      max_tokens_beside_decodes: the token budget of a step that draws tokens of running sequences and also computes
        prompts, which hold those sequences up. With fewer tokens the time between two tokens of a sequence is shorter,
        and first tokens come later; `Engine.measure_steps` says how long steps take. One token of a prompt is always
        computed. None for max_tokens_per_step.
      between_tokens_seconds: the time between two tokens of a sequence that 99 of 100 should not exceed. After each
        step the engine then chooses `max_tokens_beside_decodes` anew, from the times of its steps; it begins with the
        given one. Several processes cannot share a model then, since their steps would differ. None for no bound.
      prefix_caching: whether full blocks are kept for later requests that begin alike.
      preemption: what happens to a sequence that has to give up its blocks: "swap" moves them to the host while there
        is room, "recompute" computes them again later, and "cheaper" takes whichever the two rates below make cheaper.
      recompute_tokens_per_second: the rate at which the model computes prompts. The default is a round number for a
        model of 8 billion parameters on one H200; give your own model's.
      swap_bytes_per_second: the rate at which blocks move between device and host. The default is a round number too.
      max_draft_tokens: how many tokens of a sequence a step may verify, beside the one that it draws anyway; 0 for no
        speculation. See `Proposer`.
      free_tokens_per_step: up to how many tokens a step takes hardly longer than for one, because it reads the weights
        for most of its time. Drafts are weighed with it. The default is a round number for 16-bit weights on one H200.
      least_shared_tokens: how many tokens a decode step must not read again, so that shared prefixes are read apart. To
        read them apart costs up to two more kernels in each layer. The default is a round number for 8 kv heads of 128
        16-bit elements on one H200.

    Example:
      >>> from paged_jax.engine import EngineConfig
      >>> EngineConfig(max_model_len=512, max_num_seqs=8).max_prompts_per_step
      8
    """

    max_model_len: int
    max_num_seqs: int = 64
    max_tokens_per_step: int = 512
    max_prompts_per_step: int = 32
    decode_rows: tuple[int, ...] = ()
    mixed_tokens: tuple[int, ...] = ()
    max_logprobs: int | None = None
    adjustments: bool = True
    num_host_blocks: int = 0
    verify_tokens: tuple[int, ...] = ()
    max_shared_prefixes: int = 0

    num_blocks: int | tuple[int, ...] | None = None
    max_tokens_beside_decodes: int | None = None
    between_tokens_seconds: float | None = None
    prefix_caching: bool = True
    preemption: Preemption = "cheaper"
    recompute_tokens_per_second: float = 40_000.0
    swap_bytes_per_second: float = 20e9
    max_draft_tokens: int = 0
    free_tokens_per_step: int = 128
    least_shared_tokens: int = 16_384

    def __post_init__(self):
        positive = "max_model_len", "max_num_seqs", "max_tokens_per_step", "max_prompts_per_step"
        positive = *positive, "free_tokens_per_step", "least_shared_tokens"
        optional = "max_logprobs", "max_tokens_beside_decodes"
        for name in (*positive, *optional, "num_host_blocks", "max_draft_tokens", "max_shared_prefixes"):
            value = getattr(self, name)
            if value is not None or name not in optional:
                object.__setattr__(self, name, integer(name, value))
        if not isinstance(self.adjustments, bool):
            raise TypeError(f"adjustments must be a bool, got {type(self.adjustments).__name__}")
        object.__setattr__(self, "num_blocks", _read_num_blocks(self.num_blocks))
        for name in (*positive, "max_tokens_beside_decodes"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.max_tokens_per_step < self.max_num_seqs:
            raise ValueError(
                f"max_tokens_per_step must be at least max_num_seqs = {self.max_num_seqs}, "
                f"got {self.max_tokens_per_step}"
            )
        object.__setattr__(self, "max_prompts_per_step", min(self.max_prompts_per_step, self.max_num_seqs))
        for name in ("max_logprobs", "num_host_blocks", "max_draft_tokens", "max_shared_prefixes"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("recompute_tokens_per_second", "swap_bytes_per_second"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.between_tokens_seconds is not None and not self.between_tokens_seconds > 0:
            raise ValueError(f"between_tokens_seconds must be positive, got {self.between_tokens_seconds}")
        if self.preemption not in ("cheaper", "recompute", "swap"):
            raise ValueError(f'preemption must be "cheaper", "recompute" or "swap", got {self.preemption!r}')
        for name, largest in (("decode_rows", self.max_num_seqs), ("mixed_tokens", self.max_tokens_per_step)):
            sizes = tuple(integer(name, size) for size in getattr(self, name)) or _ladder(largest)
            if sizes[-1] != largest or sizes[0] < 1 or any(a >= b for a, b in itertools.pairwise(sizes)):
                raise ValueError(f"{name} must rise from 1 or more to {largest}, got {sizes}")
            object.__setattr__(self, name, sizes)

        self._check_verify_tokens()

    def _check_verify_tokens(self) -> None:
        """Checks `verify_tokens`, and chooses them if there are none."""
        sizes = tuple(self.verify_tokens)
        if self.max_draft_tokens and not sizes:
            most = self.max_num_seqs * (1 + self.max_draft_tokens)
            sizes = _ladder(min(most, _MOST_VERIFIED, self.max_tokens_per_step))
        if not all(isinstance(size, int) for size in sizes):
            raise TypeError(f"verify_tokens must hold ints, got {sizes}")
        rising = (0, *sizes, self.max_tokens_per_step + 1)
        if not all(a < b for a, b in itertools.pairwise(rising)):
            raise ValueError(f"verify_tokens must rise to {self.max_tokens_per_step} at most, got {sizes}")
        object.__setattr__(self, "verify_tokens", sizes)

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
            self.adjustments,
            self.num_host_blocks,
            self.verify_tokens,
            self.max_shared_prefixes,
        )


def _read_num_blocks(num_blocks: Any) -> int | tuple[int, ...] | None:
    if num_blocks is None:
        return None
    is_one = not isinstance(num_blocks, list | tuple)
    counts = tuple(integer("num_blocks", count) for count in ((num_blocks,) if is_one else num_blocks))
    if not counts or min(counts) < 1:
        raise ValueError(f"num_blocks must be positive, got {num_blocks}")
    return counts[0] if is_one else counts


def _ladder(largest: int) -> tuple[int, ...]:
    """Up to three sizes, each four times the one before: few programs, and padding makes no step four times larger."""
    sizes = [largest]
    while sizes[0] > 16 and len(sizes) < 3:
        sizes.insert(0, -(-sizes[0] // 4))
    return tuple(sizes)
