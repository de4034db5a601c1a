"""What the kernels are compiled for: a frozen config, and the shared memory that it takes."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from paged_jax.options import Layout


@dataclass(frozen=True)
class Config:
    """Everything static that the kernels are compiled for.

    Attributes:
      num_seqs, num_heads, num_kv_heads, head_size, block_size, layout, max_seq_len: of the call, but for `fold`.
      dtype, cache_dtype: of the query, which the output has too, and of the caches.
      fold: kv heads that are attended to together, as one of `num_kv_heads` that has all their query heads. In memory
        their tokens of a block are neighbours: a larger copy.
      num_parts: parts of each (sequence, kv head), or at most: of its partitions.
      stretches: of the line of all items' tiles, if lengths may be uneven, or 0. There are `num_parts` programs an item
        all the same, for lengths that are alike after all; no more stretches than that.
      partition_size: tokens of a part, or 0: an even share.
      merge: where parts are made one: nowhere, in the "cluster" that they run in, or in a "kernel" of its own.
      k_scale, v_scale: "none", "scalar", "head" or "slot".
      num_blocks: of the caches, if new tokens are written on the way, else 0.
      programs: that each multiprocessor has room for.
      tile: rows of K and V in one step of the loop: tokens of each folded head.
      slots: tiles in the rings of K and of V.
    """

    num_seqs: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: str
    cache_dtype: str
    layout: Layout
    max_seq_len: int
    num_parts: int = 1
    stretches: int = 0
    partition_size: int = 0
    merge: Literal["none", "cluster", "kernel"] = "none"
    k_scale: str = "none"
    v_scale: str = "none"
    alibi: bool = False
    sinks: bool = False
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    num_blocks: int = 0
    fold: int = 1
    programs: int = 2
    tile: int = 64
    slots: int = 2

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def narrow(self) -> bool:
        """Whether caches are of 8 bits."""
        return jnp.dtype(self.cache_dtype).itemsize == 1

    @property
    def in_registers(self) -> bool:
        """Whether tiles go through registers to the products."""
        return self.narrow or self.layout == "vllm"

    @property
    def operand_dtype(self) -> str:
        """Of the matrix products: float16 holds what 8 bits can say, and Hopper converts float8 to nothing else."""
        return "float16" if self.narrow else self.dtype

    @property
    def columns(self) -> int:
        """Query rows of one window: from a multiple of 8 on, as a copy into swizzled tiles demands, for any item."""
        return 8 if 8 % self.group == 0 else -(-self.group // 8) * 8 + (8 if self.group % 8 else 0)

    @property
    def rows(self) -> int:
        """Rows of all queries, padded (for a few odd shapes) to whole windows."""
        return max(-(-self.num_seqs * self.num_heads // 8) * 8, self.columns)

    @property
    def padded_head_size(self) -> int:
        """Rows of the second product, of which wgmma takes 64 at once."""
        return -(-self.head_size // 64) * 64

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """(first, size) of the runs of head_size that V and O^T lie in; a second one is the last 64, and overlaps."""
        if self.head_size % 64 == 0:
            return ((0, self.head_size),)
        return (0, self.head_size // 64 * 64), (self.head_size - 64, 64)

    @property
    def merging_programs(self) -> int:
        """Programs that merge an item's parts: each its blocks of O^T, or one all that overlap."""
        most = len(self.out_blocks) if len(self.pieces) == 1 else 1
        return min(most, self.num_parts) if self.merge == "cluster" else most

    def merging_program(self, block: int) -> int:
        return block % self.merging_programs

    @property
    def tokens(self) -> int:
        """Of each head in a tile."""
        return self.tile // self.fold

    @property
    def run(self) -> int:
        """Neighbouring tokens of a tile that are in one block: one copy, of all folded heads."""
        return min(self.block_size, self.tokens)

    @property
    def pages(self) -> tuple[int, int]:
        """In layout "vllm", the shape in which a copy takes what it copies."""
        return self.fold * self.block_size * self.head_size // 128, 128

    @property
    def items(self) -> int:
        return self.num_seqs * self.num_kv_heads

    @property
    def whole_items(self) -> bool:
        """Whether items may be in one part, of which the decode kernel writes the results."""
        return self.merge == "none" or self.stretches > 0

    @property
    def most_seen(self) -> int:
        """Tokens of a sequence that its last one sees, at most."""
        return self.max_seq_len if self.sliding_window is None else min(self.max_seq_len, self.sliding_window)

    @property
    def places(self) -> int:
        """Of partial results: two of a program that has a stretch, its first part and its last."""
        return self.items * self.num_parts * (2 if self.stretches else 1)

    @property
    def out_blocks(self) -> tuple[int, ...]:
        """The first elements of the blocks of 64 that O^T is cut into; the last one may overlap with the one before."""
        return tuple(first + i for first, size in self.pieces for i in range(0, size, 64))


def transforms(head_size: int, dtype: Any) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """How rows of head_size lie in shared memory: as wgmma wants it, and free of bank conflicts."""
    row = head_size * dtype.itemsize
    swizzle = 128 if row % 128 == 0 else 64 if row % 64 == 0 else 32
    tiling = plgpu.TilingTransform((8, swizzle // dtype.itemsize))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


def scratch(cfg: Config) -> dict[str, Any]:
    """Shared memory and barriers of the decode kernel, by name."""
    d = cfg.head_size

    def swizzled(shape, dtype):
        return plgpu.SMEM(shape, jnp.dtype(dtype), transforms=transforms(d, jnp.dtype(dtype)))

    runs = cfg.tokens // cfg.run
    k_runs, v_runs = (runs * (2 if kind == "slot" else 1) for kind in (cfg.k_scale, cfg.v_scale))
    consumed = plgpu.Barrier(num_barriers=cfg.slots)
    buffers = {
        "q_smem": swizzled((cfg.columns, d), cfg.dtype),
        "k_smem": swizzled((cfg.slots, cfg.tile, d), cfg.cache_dtype),
        "v_smem": tuple(swizzled((cfg.slots, cfg.tile, size), cfg.cache_dtype) for _, size in cfg.pieces),
        "p_smem": swizzled((cfg.columns, cfg.tile), cfg.operand_dtype),
        "sum_smem": plgpu.SMEM((cfg.columns,), jnp.float32),
        "max_smem": plgpu.SMEM((cfg.columns,), jnp.float32),
        "q_ready": plgpu.Barrier(num_arrivals=3 if cfg.num_blocks else 1),
        "k_ready": plgpu.Barrier(num_barriers=cfg.slots, num_arrivals=k_runs),
        "v_ready": plgpu.Barrier(num_barriers=cfg.slots, num_arrivals=runs * len(cfg.pieces) + v_runs - runs),
        "k_consumed": consumed,
        "v_consumed": consumed,
    }
    if cfg.layout == "vllm":
        ring = plgpu.SMEM((cfg.slots, runs, *cfg.pages), jnp.dtype(cfg.cache_dtype))
        buffers |= {"k_smem": ring, "v_smem": (ring,)}
    if cfg.whole_items:
        buffers["out_smem"] = tuple(plgpu.SMEM((cfg.columns, size), jnp.dtype(cfg.dtype)) for _, size in cfg.pieces)
    if cfg.merge != "none":
        buffers["part_smem"] = plgpu.SMEM((cfg.padded_head_size, cfg.columns), jnp.float32)
    if cfg.merge == "cluster":
        buffers |= {**merge_scratch(cfg), "cluster_done": plgpu.ClusterBarrier(collective_axes=("part",))}
    if cfg.num_blocks:
        buffers["key_smem"] = buffers["value_smem"] = plgpu.SMEM((d,), jnp.dtype(cfg.dtype))
    if cfg.narrow:
        buffers["operand_smem"] = swizzled((cfg.columns, d), cfg.operand_dtype)
    for name in ("k_scale", "v_scale"):
        if getattr(cfg, name) == "slot":
            # Copies go to multiples of 128 bytes.
            buffers[f"{name}_smem"] = plgpu.SMEM((cfg.slots, runs, max(cfg.run, 32)), jnp.float32)
    return buffers


def merge_scratch(cfg: Config) -> dict[str, Any]:
    """Shared memory through which merged results go."""
    return {
        "block_smem": plgpu.SMEM((cfg.columns, 64), jnp.dtype(cfg.dtype)),
        "lse_smem": plgpu.SMEM((cfg.columns,), jnp.float32),
    }


def shared_memory(cfg: Config) -> int:
    """Bytes of `scratch`, and 4 KiB for barriers, padding and what reductions across warps take."""
    buffers = jax.tree.leaves(list(scratch(cfg).values()))
    arrays = [x for x in buffers if not isinstance(x, plgpu.Barrier | plgpu.ClusterBarrier)]
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays) + 4096
