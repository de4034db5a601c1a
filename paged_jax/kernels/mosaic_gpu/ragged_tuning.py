"""What is chosen for a call of ragged attention, the shared memory that it takes, and what the kernels cannot do."""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from paged_jax.kernels.mosaic_gpu.device.tiles.plain import transforms
from paged_jax.kernels.problem import Device, Problem, ScaleKind, Unsupported

ROWS = 64  # of one warpgroup: M of wgmma
_MAX_GROUP = ROWS
_MIN_HEAD_SIZE, _MAX_HEAD_SIZE = 16, 256
_SHARED_MEMORY = 227 * 1024  # that one program may have
_OTHER = 12288  # bytes of barriers, of what aligns the buffers and of what reductions take
ITEM_FIELDS = 16  # int32 that describe a work item in the queue
COUNTED = 3  # numbers that are counted of a sequence
QUEUE = 2  # work items that are described, and whose queries are in shared memory
THREADS = 128  # of a warpgroup
_MOST_REGISTERS = 200  # of a thread that computes, for O, S and P
_MOST_COUNTED = 4 * THREADS  # sequences that the kernel counts, in shared memory


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What was chosen for a problem on a device.

    Attributes:
      num_programs: thread blocks, one a multiprocessor, which take work items until none is left.
      tile: tokens of K and of V in one step of wide items.
      thin_tile: the same of thin items; it divides `tile`.
      stages: tiles in the rings of K and of V, an even number.
      queries: places for items' queries.
      registers: of a thread that computes, and of one that loads.
      least_split: cost of an item below which it is not split; a tile of 64 tokens costs 1, in wide items 2.
      claim: how programs share the work items: "stride", each takes every n-th; or "queue", each takes the next.
      merge_programs: thread blocks that merge the parts of split contexts.
    """

    num_programs: int
    tile: int = 128
    thin_tile: int = 128
    stages: int = 2
    queries: int = 2
    registers: tuple[int, int] = (232, 40)  # 65536 of a multiprocessor, for 3 warpgroups of 128
    least_split: int = 16
    claim: str = "queue"
    merge_programs: int = 264


@dataclass(frozen=True, kw_only=True)
class Line:
    """Wide or thin items, one after the other.

    Attributes:
      wide: which.
      tokens: query tokens of an item, at most.
      tile: tokens of K and of V in one step.
      stages: tiles in the rings of K and of V.
      block_size: tokens of a block of the cache.
      raw_stages: tiles of K and of V in shared memory that are not what the products take yet.
    """

    wide: bool
    tokens: int
    tile: int
    stages: int
    block_size: int
    raw_stages: int

    @property
    def run(self) -> int:
        """Neighbouring tokens of a tile that are in one block: one copy."""
        return min(self.block_size, self.tile)

    @property
    def runs(self) -> int:
        """Runs of a tile."""
        return self.tile // self.run

    @property
    def tile_cost(self) -> int:
        """What a tile costs."""
        return self.tile // 64 * (2 if self.wide else 1)

    @property
    def item_cost(self) -> int:
        """What an item costs beside its tiles."""
        return 2


@dataclass(frozen=True, kw_only=True)
class Config:
    """A problem and its tuning: all that the kernels are compiled for.

    Attributes:
      problem, tuning: the facts and the choices.
      prefix: whether the new tokens' keys and values come from arrays of their own.
    """

    problem: Problem
    tuning: Tuning
    prefix: bool

    @property
    def converts(self) -> bool:
        """Whether tiles become what the products take only in shared memory: caches of 8 bits."""
        return self.problem.cache_itemsize == 1

    @property
    def slot_scales(self) -> tuple[str, ...]:
        """Of "k" and "v", which have a scale for each slot."""
        kinds = {"k": self.problem.k_scale, "v": self.problem.v_scale}
        return tuple(name for name, kind in kinds.items() if kind is ScaleKind.SLOT)

    @property
    def signed_weights(self) -> bool:
        """Whether weights may be negative: scales of values may be."""
        return "v" in self.slot_scales or (self.prefix and self.problem.v_scale is not ScaleKind.NONE)

    @property
    def half(self) -> int:
        """Query tokens of one warpgroup: with all heads of a group as its rows."""
        return ROWS // self.problem.group

    @property
    def lines(self) -> tuple[Line, Line]:
        """The wide and the thin items."""
        tuning, size = self.tuning, self.problem.block_size
        pieces = tuning.tile // tuning.thin_tile
        wide = Line(
            wide=True, tokens=2 * self.half, tile=tuning.tile, stages=tuning.stages, block_size=size, raw_stages=1
        )
        thin = replace(
            wide,
            wide=False,
            tokens=self.half,
            tile=tuning.thin_tile,
            stages=tuning.stages * pieces,
            raw_stages=pieces,
        )
        return wide, thin

    @property
    def counts_in_kernel(self) -> bool:
        """Whether each program counts the work, or XLA does before."""
        return self.counted <= _MOST_COUNTED

    @property
    def counted(self) -> int:
        """Columns of what is counted: the sequences, that of the padding and the end, for whole warpgroups."""
        return -(-(self.problem.num_seqs + 2) // THREADS) * THREADS

    @property
    def merged_rows(self) -> int:
        """Rows that a warpgroup merges at once, 4 elements a thread."""
        return 128 // (self.problem.head_size // 4)

    @property
    def places(self) -> tuple[int, int]:
        """Room for the parts of split wide items and of split thin ones.

        A split item costs more than an even share of all work, which is cut into pieces of at least that size: there
        are at most as many of these as programs, and one more piece for each item that is cut.
        """
        wide, thin = (self._most_splits(line) for line in self.lines)
        most = 2 * self.tuning.num_programs
        items = self.problem.num_seqs * self.problem.num_kv_heads
        has_wide = self.problem.num_tokens > self.half
        return most if wide > 1 and has_wide else 0, min(most, items * thin) if thin > 1 else 0

    def splits(self, line: Line) -> bool:
        """Whether items of a line may be split."""
        return self.places[0 if line.wide else 1] > 0

    def _most_splits(self, line: Line) -> int:
        """Splits that an item may have."""
        cost = (-(-self.problem.max_seq_len // line.tile) + (1 if self.prefix else 0)) * line.tile_cost
        return -(-cost // self.tuning.least_split)


def reasons(problem: Problem, device: Device) -> list[str]:
    """All that stands in the way of these kernels."""
    found = []
    if device.capability != 90:
        found.append(f"needs compute capability 9.0, this GPU has {device.capability / 10}")
    if problem.query_dtype not in ("float16", "bfloat16"):
        found.append(f"lacks queries of {problem.query_dtype}, takes float16 and bfloat16")
    if problem.cache_dtype != problem.query_dtype and problem.cache_itemsize > 1:
        wanted = f"caches of {problem.cache_dtype} for queries of {problem.query_dtype}"
        found.append(f"lacks ragged attention over {wanted}")
    if problem.head_size % 16 or not _MIN_HEAD_SIZE <= problem.head_size <= _MAX_HEAD_SIZE:
        takes = f"takes multiples of 16 from {_MIN_HEAD_SIZE} to {_MAX_HEAD_SIZE}"
        found.append(f"lacks head_size {problem.head_size} in ragged attention, {takes}")
    if problem.block_size < 8:
        found.append(f"lacks block_size {problem.block_size}, takes 8 and more")
    if problem.group > _MAX_GROUP:
        found.append(f"lacks groups of {problem.group} query heads, takes up to {_MAX_GROUP}")
    if problem.layout == "vllm":
        found.append("lacks layout 'vllm' in ragged attention")
    if problem.block_sparse is not None:
        found.append("lacks block_sparse in ragged attention")
    if problem.v_scale is ScaleKind.SLOT and problem.query_dtype == "float16":
        found.append("lacks v_scale for each slot in ragged attention of float16, which may not hold its products")
    return found


def tune(problem: Problem, device: Device, *, prefix: bool) -> Config:
    """The choices for a problem.

    Raises:
      Unsupported: these kernels cannot do it, with every reason.
    """
    found = reasons(problem, device)
    if prefix and problem.query_dtype == "float16" and problem.v_scale != ScaleKind.NONE:
        found.append("lacks prefix_attention of float16 with v_scale, whose inverse float16 may not hold")
    if prefix and ScaleKind.SLOT in (problem.k_scale, problem.v_scale):
        found.append("lacks prefix_attention with scales for each slot")
    if prefix and problem.max_blocks_per_seq * problem.num_blocks == 0:
        found.append("lacks prefix_attention without a cache")
    if found:
        raise Unsupported("mosaic_gpu", found)
    for tile, stages, queries in ((128, 4, 2), (128, 2, 2), (128, 2, 1), (64, 4, 2), (64, 2, 2), (64, 2, 1)):
        if problem.head_size / 2 + tile > _MOST_REGISTERS:
            continue
        tuning = Tuning(
            num_programs=device.num_multiprocessors, tile=tile, thin_tile=tile, stages=stages, queries=queries
        )
        cfg = Config(problem=problem, tuning=tuning, prefix=prefix)
        if shared_memory(cfg) <= _SHARED_MEMORY:
            return cfg
    what = f"head_size {problem.head_size} with caches of {problem.cache_dtype}"
    raise Unsupported("mosaic_gpu", [f"lacks {what} in ragged attention: no tile fits in shared memory"])


def scratch(cfg: Config) -> dict[str, Any]:
    """Shared memory and barriers of the attending kernel, by name."""
    problem, tuning = cfg.problem, cfg.tuning
    d, dtype, stages = problem.head_size, jnp.dtype(problem.query_dtype), tuning.stages

    def swizzled(shape, dtype):
        return plgpu.SMEM(shape, jnp.dtype(dtype), transforms=transforms(d, dtype))

    wide, thin = cfg.lines
    optional = {}
    if cfg.converts:
        raw = plgpu.SMEM((tuning.tile, d), jnp.dtype(problem.cache_dtype))
        optional = {"raw_k_smem": raw, "raw_v_smem": raw}
        for name, line in (("", wide), ("thin_", thin)):
            arrived = plgpu.Barrier(num_arrivals=line.runs, num_barriers=line.raw_stages)
            optional |= {f"{name}raw_k_ready": arrived, f"{name}raw_v_ready": arrived}
    for name in cfg.slot_scales:
        optional[f"{name}_slots_smem"] = plgpu.SMEM((stages * tuning.tile,), jnp.float32)
    if not cfg.converts:
        optional |= {
            "landed": plgpu.Barrier(num_arrivals=wide.runs),
            "thin_landed": plgpu.Barrier(num_arrivals=thin.runs),
        }

    def ready(line, name):
        arrivals = line.runs + (1 if name in cfg.slot_scales else 0)
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=line.stages)

    def consumed(line):
        return plgpu.Barrier(num_arrivals=2 if line.wide else 1, num_barriers=line.stages)

    if cfg.counts_in_kernel:
        optional |= {
            "table_smem": plgpu.SMEM((2 * COUNTED, cfg.counted + 1), jnp.int32),
            "costs_smem": plgpu.SMEM((2, cfg.counted + 1), jnp.float32),
            "per_split_smem": plgpu.SMEM((1,), jnp.float32),
            "of_wide_smem": plgpu.SMEM((1,), jnp.int32),
        }
    return {
        **optional,
        "q_smem": swizzled((tuning.queries, 2, ROWS, d), dtype),
        "k_smem": swizzled((stages, tuning.tile, d), dtype),
        "v_smem": swizzled((stages, tuning.tile, d), dtype),
        "lse_smem": plgpu.SMEM((2, ROWS), jnp.float32),
        "maxima_smem": plgpu.SMEM((ROWS,), jnp.float32),
        "sums_smem": plgpu.SMEM((ROWS,), jnp.float32),
        "items_smem": plgpu.SMEM((QUEUE, ITEM_FIELDS), jnp.int32),
        "claim_smem": plgpu.SMEM((1,), jnp.int32),
        "item_ready": plgpu.Barrier(num_barriers=QUEUE),
        "item_consumed": plgpu.Barrier(num_arrivals=2, num_barriers=QUEUE),
        "q_ready": plgpu.Barrier(num_barriers=tuning.queries),
        "q_consumed": plgpu.Barrier(num_arrivals=2, num_barriers=tuning.queries),
        "k_ready": ready(wide, "k"),
        "v_ready": ready(wide, "v"),
        "k_consumed": consumed(wide),
        "v_consumed": consumed(wide),
        "thin_k_ready": ready(thin, "k"),
        "thin_v_ready": ready(thin, "v"),
        "thin_k_consumed": consumed(thin),
        "thin_v_consumed": consumed(thin),
        "tiles_done": plgpu.Barrier(),
        "handed_over": plgpu.Barrier(),
        "turn": plgpu.Barrier(num_barriers=2),  # of each warpgroup, at the matrix units
    }


def shared_memory(cfg: Config) -> int:
    """Bytes of `scratch`, and what comes with it."""
    buffers = jax.tree.leaves(list(scratch(cfg).values()))
    arrays = [x for x in buffers if not isinstance(x, plgpu.Barrier)]
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays) + _OTHER
