"""What the kernels are compiled for: the device, a frozen config, and the shared memory that a config takes.

A config is chosen by a pure function of shapes, dtypes and the device, which only `device` asks for.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array

from paged_jax.options import AttentionOptions, Layout, block_axis, head_axis

_MAX_GROUP = 64
_MAX_CLUSTER = 8
_SHORT = 4  # tiles of a part that take less time than another launch
_SHARED_MEMORY = 227 * 1024  # that one program may have
_MULTIPROCESSOR = 228 * 1024  # that all programs on a multiprocessor share, each with 1 KiB more for the system


@dataclass(frozen=True)
class Device:
    """What configs depend on; the default where there is no GPU to ask."""

    capability: int = 90
    num_multiprocessors: int = 132


@dataclass(frozen=True)
class Config:
    """Everything static that the kernels are compiled for.

    Attributes:
      num_seqs, num_heads, num_kv_heads, head_size, block_size, dtype, layout, max_seq_len: of the call.
      num_parts: programs that each (sequence, kv head) is split over.
      partition_size: tokens of a part, or 0: an even share.
      merge: where parts are made one: nowhere, in the "cluster" that they run in, or in a "kernel" of its own.
      k_scale, v_scale: "none", "scalar" or "head".
      tile: tokens of K and V in one step of the loop.
      slots: tiles in the rings of K and of V.
    """

    num_seqs: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: str
    layout: Layout
    max_seq_len: int
    num_parts: int = 1
    partition_size: int = 0
    merge: Literal["none", "cluster", "kernel"] = "none"
    k_scale: str = "none"
    v_scale: str = "none"
    alibi: bool = False
    sinks: bool = False
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    tile: int = 128
    slots: int = 3

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

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
    def run(self) -> int:
        """Neighbouring tokens of a tile that are in one block: one copy."""
        return min(self.block_size, self.tile)

    @property
    def items(self) -> int:
        return self.num_seqs * self.num_kv_heads

    @property
    def out_blocks(self) -> tuple[int, ...]:
        """The first elements of the blocks of 64 that O^T is cut into; the last one may overlap with the one before."""
        return tuple(first + i for first, size in self.pieces for i in range(0, size, 64))


def scratch(cfg: Config) -> dict[str, Any]:
    """Shared memory and barriers of the decode kernel, by name."""
    dtype, d = jnp.dtype(cfg.dtype), cfg.head_size

    def swizzled(shape, bytes_):
        transforms = (
            plgpu.TilingTransform((8, bytes_ // dtype.itemsize)),  # pyright: ignore[reportAbstractUsage]
            plgpu.SwizzleTransform(bytes_),  # pyright: ignore[reportAbstractUsage]
        )
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    swizzle = 128 if d % 64 == 0 else 64 if d % 32 == 0 else 32
    runs = cfg.tile // cfg.run
    consumed = plgpu.Barrier(num_barriers=cfg.slots)
    merging = {}
    if cfg.merge != "none":
        merging["part_smem"] = plgpu.SMEM((cfg.padded_head_size, cfg.columns), jnp.float32)
    if cfg.merge == "cluster":
        merging |= {**merge_scratch(cfg), "cluster_done": plgpu.ClusterBarrier(collective_axes=("part",))}
    return {
        "q_smem": swizzled((cfg.columns, d), swizzle),
        "k_smem": swizzled((cfg.slots, cfg.tile, d), swizzle),
        "v_smem": tuple(swizzled((cfg.slots, cfg.tile, size), swizzle) for _, size in cfg.pieces),
        "p_smem": swizzled((cfg.columns, cfg.tile), swizzle),
        "out_smem": tuple(plgpu.SMEM((cfg.columns, size), dtype) for _, size in cfg.pieces),
        "sum_smem": plgpu.SMEM((cfg.columns,), jnp.float32),
        "max_smem": plgpu.SMEM((cfg.columns,), jnp.float32),
        "q_ready": plgpu.Barrier(),
        "k_ready": plgpu.Barrier(num_barriers=cfg.slots, num_arrivals=runs),
        "v_ready": plgpu.Barrier(num_barriers=cfg.slots, num_arrivals=runs * len(cfg.pieces)),
        "k_consumed": consumed,
        "v_consumed": consumed,
        **merging,
    }


def merge_scratch(cfg: Config) -> dict[str, Any]:
    """Shared memory through which merged results go."""
    return {
        "block_smem": plgpu.SMEM((cfg.columns, 64), jnp.dtype(cfg.dtype)),
        "lse_smem": plgpu.SMEM((cfg.columns,), jnp.float32),
    }


def shared_memory(cfg: Config) -> int:
    """Bytes of `scratch`, and 2 KiB for barriers, padding and what reductions across warps take."""
    buffers = jax.tree.leaves(list(scratch(cfg).values()))
    arrays = [x for x in buffers if not isinstance(x, plgpu.Barrier | plgpu.ClusterBarrier)]
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays) + 2048


def device() -> Device:
    """The GPU that the program is for: the first local one."""
    try:
        gpu = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return Device()
    capability = gpu.compute_capability.replace(".", "")
    return Device(int(capability), gpu.core_count) if capability.isdigit() else Device(0)


def check(query: Array, key_cache: Array, value_cache: Array, options: AttentionOptions, gpu: Device) -> None:
    """Raises NotImplementedError with everything that stands in the way."""
    head_size, num_heads = query.shape[2], query.shape[1]
    block_size = value_cache.shape[block_axis(options.layout)]
    group = num_heads // value_cache.shape[head_axis(options.layout)]
    reasons = []
    if gpu.capability != 90:
        reasons.append(f"needs compute capability 9.0, this GPU has {gpu.capability / 10}")
    if query.dtype not in (jnp.float16, jnp.bfloat16):
        reasons.append(f"lacks queries of {query.dtype}, takes float16 and bfloat16")
    if key_cache.dtype != query.dtype:
        reasons.append(f"lacks caches of {key_cache.dtype} for queries of {query.dtype}")
    if head_size % 16 or head_size < 64:
        reasons.append(f"lacks head_size {head_size}, takes multiples of 16 from 64 on")
    if block_size < 8:
        reasons.append(f"lacks block_size {block_size}, takes 8 and more")
    if group > _MAX_GROUP:
        reasons.append(f"lacks groups of {group} query heads, takes up to {_MAX_GROUP}")
    if options.layout == "vllm":
        reasons.append("lacks layout 'vllm'")
    if options.block_sparse is not None:
        reasons.append("lacks block_sparse")
    for name, scale in (("k_scale", options.k_scale), ("v_scale", options.v_scale)):
        if scale is not None and scale.ndim == 3:
            reasons.append(f"lacks a {name} for each slot")
    if reasons:
        raise NotImplementedError(f"implementation 'mosaic_gpu' {'; '.join(reasons)}")


def config(
    query: Array,
    key_cache: Array,
    value_cache: Array,
    options: AttentionOptions,
    gpu: Device,
    split: Literal["none", "partitions", "even"],
    partition_size: int = 0,
) -> Config:
    """The config of a decode call; raises NotImplementedError for what the kernels cannot do."""
    check(query, key_cache, value_cache, options, gpu)
    num_seqs, num_heads, head_size = query.shape
    cfg = Config(
        num_seqs=num_seqs,
        num_heads=num_heads,
        num_kv_heads=value_cache.shape[head_axis(options.layout)],
        head_size=head_size,
        block_size=value_cache.shape[block_axis(options.layout)],
        dtype=query.dtype.name,
        layout=options.layout,
        max_seq_len=options.max_seq_len,
        partition_size=partition_size,
        k_scale=_scale_kind(options.k_scale),
        v_scale=_scale_kind(options.v_scale),
        alibi=options.alibi_slopes is not None,
        sinks=options.sinks is not None,
        # A larger window would overflow where it is taken from a position.
        sliding_window=None if options.sliding_window is None else min(options.sliding_window, 2**30),
        logits_soft_cap=options.logits_soft_cap,
    )
    if split == "partitions":
        cfg = replace(cfg, num_parts=-(-options.max_seq_len // partition_size), merge="kernel")
    cfg, programs = _tiling(cfg, gpu)
    return _even_parts(cfg, programs * gpu.num_multiprocessors) if split == "even" else cfg


def _even_parts(cfg: Config, programs: int) -> Config:
    """Parts for up to so many programs at once; few enough for a cluster if they stay short."""
    tiles = -(-cfg.max_seq_len // cfg.tile)
    parts = max(1, min(programs // max(1, cfg.items), tiles))
    if parts > _MAX_CLUSTER and tiles <= _MAX_CLUSTER * _SHORT:
        parts = _MAX_CLUSTER
    merge = "none" if parts == 1 else "cluster" if parts <= _MAX_CLUSTER else "kernel"
    return replace(cfg, num_parts=parts, merge=merge)


def _tiling(cfg: Config, gpu: Device) -> tuple[Config, int]:
    """`tile` and `slots`, and how many programs a multiprocessor then has: two if that leaves tiles in flight."""
    longest = cfg.partition_size or cfg.max_seq_len
    few = 2 * longest * cfg.items <= 128 * gpu.num_multiprocessors
    tile = 64 if longest <= 64 or few or cfg.columns > 32 else 128
    for programs, room, size, slots in (
        (2, _MULTIPROCESSOR // 2 - 1024, tile, 4),
        (2, _MULTIPROCESSOR // 2 - 1024, tile, 3),
        (2, _MULTIPROCESSOR // 2 - 1024, 64, 4),
        (2, _MULTIPROCESSOR // 2 - 1024, 64, 3),
        (1, _SHARED_MEMORY, 64, 4),
        (1, _SHARED_MEMORY, 64, 2),
    ):
        chosen = replace(cfg, tile=size, slots=slots)
        if shared_memory(chosen) <= room:
            return chosen, programs
    raise AssertionError(f"no tiling fits in shared memory: {cfg}")


def _scale_kind(scale: Array | None) -> str:
    return "none" if scale is None else "head" if scale.ndim else "scalar"
