"""What the kernels are compiled for: the device, and a frozen dataclass for each kind of kernel."""

import math
from dataclasses import dataclass

from paged_jax.options import BlockSparse, Layout

# Shared memory that one program may have, KiB; other capabilities get the least of these.
_SHARED_MEMORY = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}
_LEAST_SHARED_MEMORY = 99


@dataclass(frozen=True)
class Device:
    """What configs depend on; the default where there is no GPU to ask."""

    capability: int = 90
    num_multiprocessors: int = 132

    @property
    def shared_memory(self) -> int:
        """Bytes that one program may have."""
        return 1024 * _SHARED_MEMORY.get(self.capability, _LEAST_SHARED_MEMORY)


@dataclass(frozen=True)
class Quantisation:
    """How a write makes what a cache holds of new keys and values.

    Attributes:
      k_scale, v_scale: what they are divided by: "none", "scalar", "head" or "slot".
      cache_dtype: what they become.
      narrower: whether that has less room, in bytes or in range, so that they are clipped.
      smallest, largest: finite values of it.
      native: whether it is a float8 that the GPU has an instruction for.
    """

    k_scale: str
    v_scale: str
    cache_dtype: str
    narrower: bool
    smallest: float
    largest: float
    native: bool


@dataclass(frozen=True)
class Config:
    """Everything static that an attention kernel is compiled for.

    Attributes:
      num_heads, num_kv_heads, head_size, block_size, layout: of the call.
      key_x, value_x: neighbouring elements of a vector in layout "vllm".
      heads, head_tiles: query heads of one program, and programs that a kv head's group takes.
      queries: query tokens of one program.
      rows: heads * queries, rounded up to what a matrix product takes.
      tile: tokens of K and V in one step of the loop.
      compute_dtype: of the operands of the matrix products.
      normalise_query: whether a power of two is taken out of each query, to fit in the narrower range of float16.
      k_scale, v_scale: "none", "scalar", "head" or "slot".
      partition_size: tokens of a split, or None: an even share of each context.
      final: whether there is one split, so that no reduce follows.
      ranked: 0, or a power of two >= num_seqs to have the longest sequences start first.
      prefix: whether the new tokens' keys and values are given.
      reduce_splits, reduce_parts: splits that the reduce reads at once, and programs that share a head's output.
      write: how decode writes the last tokens, or None.
      staged_values: whether 8-bit values are converted on their way from one place in shared memory to another.
      num_warps, num_stages: for Triton.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    layout: Layout
    key_x: int
    value_x: int
    heads: int
    head_tiles: int
    queries: int
    rows: int
    tile: int
    compute_dtype: str
    normalise_query: bool
    k_scale: str
    v_scale: str
    alibi: bool
    sinks: bool
    sliding_window: int | None
    logits_soft_cap: float | None
    block_sparse: BlockSparse | None
    partition_size: int | None = None
    final: bool = True
    ranked: int = 0
    prefix: bool = False
    reduce_splits: int = 16
    reduce_parts: int = 1
    write: Quantisation | None = None
    staged_values: bool = False
    num_warps: int = 4
    num_stages: int = 3

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def padded_head_size(self) -> int:
        return max(16, power_of_two(self.head_size))

    @property
    def run(self) -> int:
        """Neighbouring tokens of a tile that are sure to be in one block."""
        return min(self.block_size, self.tile)

    @property
    def whole_tiles(self) -> bool:
        """Whether tiles that every row sees whole have a loop of their own, without masks."""
        masked = self.sliding_window is not None or self.block_sparse is not None
        return not masked and (self.queries > 1 or self.layout == "vllm")

    @property
    def patterns(self) -> int:
        """Rows of the block-sparse pattern that one program's heads have between them: each sees other far blocks."""
        if self.block_sparse is None or self.block_sparse.head_sliding_step <= 0:
            return 1  # the same for every head of a kv head
        stride, step = self.block_sparse.vert_stride, self.block_sparse.head_sliding_step
        return min(self.heads, stride // math.gcd(step, stride))

    @property
    def opaque_range(self) -> bool:
        """Whether LLVM must not see what tokens are numbered from: `tiles._range`."""
        return self.block_sparse is not None or "slot" in (self.k_scale, self.v_scale)

    @property
    def late_factor(self) -> bool:
        """Whether logits stay products of q and k up to the exponential, which takes the factor in for free."""
        one_factor = not self.prefix or self.k_scale in ("none", "slot")
        natural = self.alibi or self.logits_soft_cap is not None or self.compute_dtype == "float32"
        return one_factor and not natural


@dataclass(frozen=True)
class WriteConfig:
    """Everything static that the write kernel is compiled for; `tokens` of one program, the rest as in `Config`."""

    num_kv_heads: int
    head_size: int
    block_size: int
    layout: Layout
    key_x: int
    value_x: int
    tokens: int
    write: Quantisation
    num_warps: int = 4
    num_stages: int = 1

    @property
    def padded_head_size(self) -> int:
        return power_of_two(self.head_size)


@dataclass(frozen=True)
class CopyConfig:
    """Everything static that the kernels of block copies are compiled for.

    Attributes:
      key_words, value_words: 8-byte words of a block of each cache.
      within: whether sources and destinations are in the same pools.
      chunk: words of each that one program copies.
      scan: pairs that are looked at together.
      num_warps, num_stages: for Triton.
    """

    key_words: int
    value_words: int
    within: bool
    chunk: int = 512
    scan: int = 1024
    num_warps: int = 4
    num_stages: int = 1

    @property
    def chunks(self) -> int:
        """Programs that a pair takes."""
        return -(-max(self.key_words, self.value_words) // self.chunk)


def power_of_two(n: int) -> int:
    """The least power of two >= n."""
    return 1 << max(n - 1, 0).bit_length()
