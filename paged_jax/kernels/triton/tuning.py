"""Chooses the Triton kernels of attention, by pure functions of a call's facts and of the device.

`ragged_tuning.py` adds the choices of ragged attention, and `cache_tuning.py` has the cache ops.

A kernel takes one compile-time argument, which holds the facts (`kernels/problem.py`), the choices, and values that
follow from both. It does not depend on the sizes of a batch, because Triton would compile again for each size.
"""

import math
from dataclasses import dataclass, replace

import jax.numpy as jnp

from paged_jax.kernels.problem import Attention, Device, Granularity, Problem
from paged_jax.kernels.triton.cache_tuning import Quantisation
from paged_jax.kernels.triton.integers import cdiv, power_of_two

# Shared memory that one program may have, in KiB, by compute capability. Other GPUs have the least, or more.
_SHARED_MEMORY = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}
_LEAST_SHARED_MEMORY = 99

_EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "int8")
_MAX_HEADS = 64  # heads of a group in one program
_MAX_ROW_ELEMENTS = 16384  # elements of all rows of one program: 128 registers of each of 128 threads
_LARGEST_RANKED = 128  # the most sequences that a program ranks by length


def shared_memory(gpu: Device) -> int:
    """Bytes of shared memory that one program may have."""
    return 1024 * _SHARED_MEMORY.get(gpu.capability, _LEAST_SHARED_MEMORY)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The choices of an attention kernel.

    Attributes:
      heads: query heads of one program, all of one kv head's group.
      queries: query tokens of one program; 1 in decode.
      width: elements of a vector in registers, a power of two >= head_size.
      tile: tokens of K and V in one step of the loop, a power of two.
      compute_dtype: the dtype of the operands of the matrix products.
      staged_values: whether 8-bit values are converted in registers and go through shared memory a second time.
      partition_size: tokens of a partition; None if splits have even shares of each context.
      final: whether contexts have one split, so that no reduce follows.
      ranked: a power of two >= num_seqs if the longest sequences start first, otherwise 0.
      scan: how many sequences of a ragged batch are read at once, to cut the batch into items.
      plan: how many items one program of `plan_kernel` finds.
      least_split: tiles of the shortest split that ragged attention makes.
      write: how decode quantises the new tokens that it writes, or None if it writes none.
      num_warps, num_stages: arguments of Triton's compiler.
    """

    heads: int
    queries: int
    width: int
    tile: int
    compute_dtype: str
    staged_values: bool
    partition_size: int | None = None
    final: bool = True
    ranked: int = 0
    scan: int = 128
    plan: int = 32
    least_split: int = 4
    write: Quantisation | None = None
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self):
        for name, least in (("tile", 16), ("width", 16), ("num_warps", 1)):
            value = getattr(self, name)
            if value < least or value != power_of_two(value):
                raise ValueError(f"{name} must be a power of two >= {least}, got {value}")
        if self.partition_size is not None and self.final:
            raise ValueError("partitions are not final: a reduce follows")
        if self.ranked and not self.final:
            raise ValueError("only unsplit sequences are ranked")

    @property
    def rows(self) -> int:
        """Rows of the matrix products, which are heads times queries, padded."""
        return max(16, power_of_two(self.heads * self.queries))


@dataclass(frozen=True)
class AttentionKernel:
    """The compile-time argument of an attention kernel.

    Attributes:
      problem: the call's facts.
      tuning: the choices.
      prefix: whether the new tokens' keys and values are arguments beside the caches.
    """

    problem: Attention
    tuning: Tuning
    prefix: bool = False

    @property
    def head_tiles(self) -> int:
        """How many programs share the heads of a group."""
        return cdiv(self.problem.group, self.tuning.heads)

    @property
    def normalise_query(self) -> bool:
        """Whether each query is divided by a power of two, to fit in the smaller range of float16."""
        return self.problem.query_dtype == "bfloat16" and self.tuning.compute_dtype == "float16"

    @property
    def run(self) -> int:
        """How many neighbouring tokens of a tile are always in one block."""
        return min(self.problem.block_size, self.tuning.tile)

    @property
    def whole_tiles(self) -> bool:
        """Whether tiles whose tokens are visible to all rows have a loop of their own, without masks."""
        masked = self.problem.sliding_window is not None or self.problem.block_sparse is not None
        # With few rows the loop waits for memory, so a second loop would gain nothing and take registers.
        return not masked and (self.tuning.rows > 16 or self.problem.layout == "vllm")

    @property
    def late_factor(self) -> bool:
        """Whether the exponential applies the factor from products to logits, where it costs nothing."""
        one_factor = not self.prefix or self.problem.k_scale in (Granularity.NONE, Granularity.SLOT)
        return one_factor and self.problem.scaled_products and self.tuning.compute_dtype != "float32"

    @property
    def patterns(self) -> int:
        """How many different block-sparse patterns one program's heads have."""
        sparse = self.problem.block_sparse
        if sparse is None or sparse.head_sliding_step <= 0:
            return 1  # all heads of a kv head have the same pattern
        return min(self.tuning.heads, sparse.vert_stride // math.gcd(sparse.head_sliding_step, sparse.vert_stride))

    @property
    def one_pattern(self) -> bool:
        """Whether all rows of a program have one position and one block-sparse pattern."""
        return self.tuning.queries == 1 and self.patterns == 1

    @property
    def opaque_range(self) -> bool:
        """Whether `device.tiles.numbers` hides from LLVM how the tokens' numbers are computed."""
        by_slot = Granularity.SLOT in (self.problem.k_scale, self.problem.v_scale)
        return self.problem.block_sparse is not None or by_slot


@dataclass(frozen=True, kw_only=True)
class ReduceKernel:
    """The compile-time argument of the kernel that reduces splits.

    Attributes:
      problem: the call's facts.
      partition_size: as in `Tuning`.
      width: as in `Tuning`.
      splits: how many splits are read at once.
      parts: programs that share a head's output.
      num_warps, num_stages: arguments of Triton's compiler.
    """

    problem: Attention
    partition_size: int | None
    width: int
    splits: int = 16
    parts: int = 1
    num_warps: int
    num_stages: int


def refusals(problem: Attention) -> list[str]:
    """Reasons to refuse a call on every device."""
    sparse, heads = problem.block_sparse, problem.num_heads
    if sparse is None or sparse.vert_stride * (heads + 2) < 1 << 31:  # the kernels compute with integers up to this
        return []
    return [f"lacks a vert_stride of {sparse.vert_stride} for {heads} heads, beyond 32 bits"]


def attention(problem: Problem, gpu: Device, *, queries_per_seq: int = 1, prefix: bool = False) -> Tuning:
    """Chooses the tuning for up to `queries_per_seq` query tokens of one sequence in a program; 1 is decode."""
    width = max(16, power_of_two(problem.head_size))
    heads = cdiv(problem.group, cdiv(problem.group, min(_MAX_HEADS, _MAX_ROW_ELEMENTS // width)))
    compute = compute_dtype(problem, prefix)
    if queries_per_seq == 1:
        rows, tile, num_warps, num_stages = _decode_tiling(problem, heads, width, gpu)
    else:
        rows, tile, num_warps, num_stages = _ragged_tiling(problem, queries_per_seq * heads, width, gpu)
    if compute == "float32":  # without matrix units, larger products would spill registers
        rows, num_warps = max(min(rows, 32), power_of_two(heads)), 4
        tile = min(tile, 32 if width <= 128 else 16)

    def fits(tile, num_stages):  # an upper bound: the queries, the tiles in flight, and one converted tile
        itemsize, compute_itemsize = problem.cache_itemsize, jnp.dtype(compute).itemsize
        in_flight = (num_stages - 1) // (2 if queries_per_seq == 1 else 1)
        in_flight = max(in_flight, 1) * itemsize + prefix * compute_itemsize
        converted = compute_itemsize if compute_itemsize != itemsize else 0
        needed = rows * (width + tile) * compute_itemsize + 2 * tile * width * (in_flight + converted) + 4096
        return needed <= shared_memory(gpu)

    while not fits(tile, num_stages) and (tile > 16 or num_stages > 1):
        tile, num_stages = (tile // 2, num_stages) if tile > 16 else (tile, num_stages - 1)
    return Tuning(
        heads=heads,
        queries=1 if queries_per_seq == 1 else rows // heads,
        width=width,
        tile=tile,
        compute_dtype=compute,
        staged_values=queries_per_seq == 1 and compute == "float16" and problem.cache_itemsize == 1,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def _decode_tiling(problem: Problem, heads: int, width: int, gpu: Device) -> tuple[int, int, int, int]:
    """Chooses `rows`, `tile`, `num_warps` and `num_stages` (benchmarks/LOG.md, "Tiles and stages of decode").

    Many small programs are fastest. Groups of 8 to 15 get larger tiles. If arithmetic takes long, a second tile is in
    flight, which takes two more stages, because block tables are read first.
    """
    small = shared_memory(gpu) < 128 * 1024
    tile_bytes = (32768 if 8 <= problem.group < 16 else 16384) // (2 if small else 1)
    tile = min(128, max(16, tile_bytes // (width * problem.cache_itemsize)))
    num_stages = 5 if problem.group >= 16 or problem.cache_itemsize == 1 else 3
    return max(16, power_of_two(heads)), tile, 4, num_stages


def _ragged_tiling(problem: Problem, rows: int, width: int, gpu: Device) -> tuple[int, int, int, int]:
    """Chooses `rows`, `tile`, `num_warps` and `num_stages` for a program that may have up to `rows` rows."""
    small = shared_memory(gpu) < 128 * 1024
    # Hopper and data-center Blackwell have matrix units for whole tiles, which two groups of four warps share.
    large = gpu.capability // 10 in (9, 10)
    most = (256 if large and problem.cache_itemsize > 1 else 128) if width <= 128 else 64
    if width > 256 and small:  # more queries leave no shared memory for tiles
        most = 32
    rows = min(most, max(16, power_of_two(rows)))
    tile = (64 if width <= 128 else 32) // (2 if small else 1)
    return rows, tile, 8 if rows * width > (16384 if large else 8192) else 4, 3


def compute_dtype(problem: Attention, prefix: bool) -> str:
    """The narrowest dtype that holds both operands. 8-bit caches fit into float16 exactly, and convert fastest."""
    if problem.query_dtype == "float32":
        return "float32"
    if problem.cache_dtype in _EIGHT_BITS:
        return problem.query_dtype if prefix else "float16"
    return problem.query_dtype if problem.query_dtype == problem.cache_dtype else "float32"


def automatic(problem: Problem, gpu: Device) -> tuple[Tuning, int]:
    """Chooses a tuning for decode, and the number of splits, by the sizes of the call."""
    tuning = attention(problem, gpu)
    splits = num_splits(problem, tuning, gpu)
    if splits > 1 and problem.max_seq_len <= splits * tuning.tile:  # smaller tiles fill more of the GPU
        tuning = replace(tuning, tile=max(min(tuning.tile, 32), tuning.tile // 2))
        splits = num_splits(problem, tuning, gpu)
    if splits > 1:
        return replace(tuning, final=False), splits
    return replace(tuning, ranked=ranked(problem, tuning, gpu)), 1


def num_splits(problem: Problem, tuning: Tuning, gpu: Device) -> int:
    """Chooses the number of splits of each context, so that every multiprocessor has enough programs."""
    programs = max(problem.num_seqs, 1) * problem.num_kv_heads * cdiv(problem.group, tuning.heads)
    # How many programs fit on a multiprocessor. Programs with block-sparse patterns need more registers.
    at_once = 2 if problem.group >= 8 else 4 if problem.block_sparse is None else 3
    target = gpu.num_multiprocessors * at_once
    return max(1, min(target // programs, cdiv(problem.max_seq_len, tuning.tile)))


def ranked(problem: Problem, tuning: Tuning, gpu: Device) -> int:
    """Chooses `Tuning.ranked` for sequences that are not split: ranking pays if they take more than one wave."""
    programs = problem.num_seqs * problem.num_kv_heads * cdiv(problem.group, tuning.heads)
    waves = programs > gpu.num_multiprocessors
    return power_of_two(problem.num_seqs) if waves and 2 <= problem.num_seqs <= _LARGEST_RANKED else 0


def reduce(problem: Problem, tuning: Tuning, num_splits: int, gpu: Device) -> ReduceKernel:
    """Chooses the reduce. If rows are few, they are cut into parts; all loads of a row are in flight at once.

    For partitions the reduce is always the same, so that a row's rounding does not depend on the batch.
    """
    kernel = ReduceKernel(
        problem=problem.attention,
        partition_size=tuning.partition_size,
        width=tuning.width,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    if tuning.partition_size is not None:
        return kernel
    rows = problem.num_seqs * problem.num_heads
    parts = min(tuning.width // 16, power_of_two(gpu.num_multiprocessors // rows))
    splits = min(64, power_of_two(num_splits))
    return replace(kernel, num_warps=max(1, min(4, splits * tuning.width // parts // 512)), splits=splits, parts=parts)
