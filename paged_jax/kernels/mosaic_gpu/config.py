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
_MAX_PARTITIONS = 65535  # in the y direction of a grid
_SHORT = 256  # tokens of a part that take less time than another launch
_TILE = 32 * 1024
_IN_FLIGHT = 128 * 1024
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
      num_seqs, num_heads, num_kv_heads, head_size, block_size, layout, max_seq_len: of the call, but for `fold`.
      dtype, cache_dtype: of the query, which the output has too, and of the caches.
      fold: kv heads that are attended to together, as one of `num_kv_heads` that has all their query heads. In memory
        their tokens of a block are neighbours: a larger copy.
      num_parts: programs that each (sequence, kv head) is split over, at most.
      mean_parts: parts of an item of mean length, where others have more or fewer, or 0: all have `num_parts`.
      partition_size: tokens of a part, or 0: an even share.
      merge: where parts are made one: nowhere, in the "cluster" that they run in, or in a "kernel" of its own.
      k_scale, v_scale: "none", "scalar", "head" or "slot".
      num_blocks: of the caches, if new tokens are written on the way, else 0.
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
    mean_parts: int = 0
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
    if cfg.merge == "none":
        buffers["out_smem"] = tuple(plgpu.SMEM((cfg.columns, size), jnp.dtype(cfg.dtype)) for _, size in cfg.pieces)
    else:
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
    narrow = key_cache.dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8)
    if key_cache.dtype != query.dtype and not narrow:
        reasons.append(f"lacks caches of {key_cache.dtype} for queries of {query.dtype}")
    if head_size % 16 or head_size < 64:
        reasons.append(f"lacks head_size {head_size}, takes multiples of 16 from 64 on")
    elif narrow and head_size % 64:
        reasons.append(f"lacks head_size {head_size} for caches of {key_cache.dtype}, takes multiples of 64")
    if block_size < 8:
        reasons.append(f"lacks block_size {block_size}, takes 8 and more")
    if group > _MAX_GROUP:
        reasons.append(f"lacks groups of {group} query heads, takes up to {_MAX_GROUP}")
    if options.layout == "vllm":
        if narrow:
            reasons.append(f"lacks layout 'vllm' for caches of {key_cache.dtype}")
        if head_size % 64:
            reasons.append(f"lacks head_size {head_size} in layout 'vllm', takes multiples of 64")
        if block_size > 64:
            reasons.append(f"lacks block_size {block_size} in layout 'vllm', takes up to 64")
    if options.block_sparse is not None:
        reasons.append("lacks block_sparse")
    if reasons:
        raise NotImplementedError(f"implementation 'mosaic_gpu' {'; '.join(reasons)}")


def check_write(query: Array, key_cache: Array, options: AttentionOptions) -> None:
    """Raises NotImplementedError for tokens that the decode kernel cannot write, too."""
    reasons = []
    if key_cache.dtype != query.dtype:
        reasons.append(f"lacks writes of {query.dtype} into caches of {key_cache.dtype}")
    if options.layout == "vllm":
        reasons.append("lacks writes into layout 'vllm'")
    if query.shape[2] % 64:
        reasons.append(f"lacks writes of head_size {query.shape[2]}, takes multiples of 64")
    if any(scale is not None and scale.ndim == 3 for scale in (options.k_scale, options.v_scale)):
        reasons.append("lacks writes with scales for each slot")
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
    *,
    write: bool = False,
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
        cache_dtype=key_cache.dtype.name,
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
        num_blocks=key_cache.shape[0] if write else 0,
    )
    if split == "partitions":
        num_parts = -(-options.max_seq_len // partition_size)
        if num_parts > _MAX_PARTITIONS:
            lacks = f"lacks {num_parts} partitions, takes up to {_MAX_PARTITIONS}"
            raise NotImplementedError(f"implementation 'mosaic_gpu' {lacks}")
        return _tiled(replace(cfg, num_parts=num_parts, merge="kernel"))[0]
    return _in_even_parts(_folded(cfg, gpu), gpu) if split == "even" else _tiled(cfg)[0]


def _folded(cfg: Config, gpu: Device) -> Config:
    """With kv heads folded as far as that takes no more columns, and leaves two waves: lengths are rarely even.

    Larger copies are 1% faster (benchmarks/LOG.md).
    """
    plain = cfg.k_scale in ("none", "scalar") and cfg.v_scale in ("none", "scalar") and not cfg.num_blocks
    if cfg.layout == "nhd" or len(cfg.pieces) > 1 or not plain:
        return cfg
    for fold in (4, 2):
        fits = fold * cfg.block_size <= 64 and 8 % (fold * cfg.group) == 0 and cfg.num_kv_heads % fold == 0
        if fits and cfg.items >= 3.6 * fold * gpu.num_multiprocessors:
            return replace(cfg, num_kv_heads=cfg.num_kv_heads // fold, fold=fold)
    return cfg


def _in_even_parts(cfg: Config, gpu: Device) -> Config:
    """In so many parts that every multiprocessor has its fill; in a cluster where parts are short, and programs few."""
    items = max(1, cfg.items)
    parts = min(_MAX_CLUSTER, gpu.num_multiprocessors // items, -(-cfg.max_seq_len // 128))
    if parts > 1 and cfg.max_seq_len <= parts * _SHORT:
        return _tiled(replace(cfg, num_parts=parts, merge="cluster"))[0]
    tiled, programs = _tiled(replace(cfg, merge="kernel"))
    tiles = max(1, -(-cfg.max_seq_len // tiled.tokens))

    def parts_for(at_once: int) -> int:  # with tiles to spare in none of them
        share = -(-tiles // max(1, min(at_once // items, tiles)))
        return -(-tiles // share)

    one, all_ = gpu.num_multiprocessors, programs * gpu.num_multiprocessors
    if items > all_:
        parts = min(_parts_in_waves(cfg, all_), tiles)
    else:  # one program on each multiprocessor reads as fast as two, and leaves less to merge
        parts = parts_for(one) if parts_for(one) * items >= 0.9 * one else parts_for(all_)
    # All at once: where programs wait for others to end, multiprocessors fill unevenly, and lose more than this gains.
    most = min(cfg.num_seqs * parts, all_ // items, tiles)
    if most > parts and (parts > 1 or _item_time(cfg) > 100):
        return replace(tiled, num_parts=most, mean_parts=parts)
    if parts > 1:
        return replace(tiled, num_parts=parts)
    # In many waves lengths even out sooner if a program has the multiprocessor.
    alone = items > 2 * all_ and not cfg.in_registers and cfg.head_size * jnp.dtype(cfg.dtype).itemsize >= 256
    return _tiled(cfg, 1 if alone else 2)[0]


def _parts_in_waves(cfg: Config, at_once: int) -> int:
    """Parts where there are more items than programs at once: shorter programs leave less idle in the last wave.

    The costs in microseconds are measured (benchmarks/LOG.md): of starting a wave, of a last wave that is not full,
    and of the merge.
    """

    def cost(parts: int) -> float:
        waves = cfg.items * parts / at_once
        idle = 0.2 if 0 < waves % 1 < 0.85 else 0.0
        return 1.6 * waves + idle * _item_time(cfg) / parts + (2.5 if parts > 1 else 0.0)

    return min((1, 2, 3, 4), key=cost)


def _item_time(cfg: Config) -> float:
    """Microseconds of one program for the longest item there can be, if all multiprocessors have two."""
    return 2 * cfg.max_seq_len * cfg.fold * cfg.head_size * jnp.dtype(cfg.cache_dtype).itemsize / 17e3


def _tiled(cfg: Config, most_programs: int = 2) -> tuple[Config, int]:
    """With `tile` and `slots`; and how many programs a multiprocessor then has.

    As measured (benchmarks/LOG.md): tiles of 32 KiB of K and V, or 64 KiB if a program has the multiprocessor, or one
    tile is all there is to read; and 128 KiB of them in flight on a multiprocessor.
    """
    longest = cfg.fold * (cfg.partition_size or -(-cfg.max_seq_len // cfg.num_parts))
    for programs, tile in ((2, 128), (2, 64), (1, 128), (1, 64)):
        if programs > most_programs:
            continue
        tile_bytes = 2 * tile * cfg.head_size * jnp.dtype(cfg.cache_dtype).itemsize
        largest = _IN_FLIGHT // programs if longest <= tile else _TILE * (3 - programs)
        if tile == 128 and (longest <= 64 or cfg.columns > 32 or tile_bytes > largest):
            continue
        # Two programs have 128 registers a thread.
        crowded = cfg.columns > 8 or cfg.head_size > 128 or tile * cfg.head_size > 8192
        if cfg.in_registers and programs == 2 and crowded:
            continue
        room = _SHARED_MEMORY if programs == 1 else _MULTIPROCESSOR // 2 - 1024
        most = min(8, _IN_FLIGHT // programs // tile_bytes, -(-longest // tile))
        least = 1 if (programs, tile) == (1, 64) or longest <= tile else 2
        for slots in range(max(most, least), least - 1, -1):
            chosen = replace(cfg, tile=tile, slots=slots)
            if shared_memory(chosen) <= room:
                return chosen, programs
    raise NotImplementedError(f"implementation 'mosaic_gpu' has no tiling that fits in shared memory for {cfg}")


def _scale_kind(scale: Array | None) -> str:
    return "none" if scale is None else ("scalar", "head", "", "slot")[scale.ndim]
