"""Which config a call gets, or why none: a pure function of shapes, dtypes and the device, which `device` asks for."""

from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from paged_jax.kernels.mosaic_gpu.config import Config, shared_memory
from paged_jax.kernels.problem import Unsupported
from paged_jax.options import AttentionOptions, block_axis, head_axis

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


def device() -> Device:
    """The GPU that the program is for: the first local one."""
    try:
        gpu = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return Device()
    capability = gpu.compute_capability.replace(".", "")
    return Device(int(capability), gpu.core_count) if capability.isdigit() else Device(0)


def check(query: Array, key_cache: Array, value_cache: Array, options: AttentionOptions, gpu: Device) -> None:
    """Raises Unsupported with everything that stands in the way."""
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
        raise Unsupported("mosaic_gpu", reasons)


def check_write(query: Array, key_cache: Array, options: AttentionOptions) -> None:
    """Raises Unsupported for tokens that the decode kernel cannot write, too."""
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
        raise Unsupported("mosaic_gpu", reasons)


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
    """The config of a decode call; raises Unsupported for what the kernels cannot do."""
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
            raise Unsupported("mosaic_gpu", [f"lacks {num_parts} partitions, takes up to {_MAX_PARTITIONS}"])
        return _tiled(replace(cfg, num_parts=num_parts, merge="kernel"))
    return _in_parts(_folded(cfg, gpu), gpu) if split == "even" else _tiled(cfg)


def _folded(cfg: Config, gpu: Device) -> Config:
    """With kv heads folded as far as that takes no more columns, and leaves two waves, or one where lengths are known.

    Larger copies are 1% faster (benchmarks/LOG.md), but items are longer: uneven ones must be cut then.
    """
    plain = cfg.k_scale in ("none", "scalar") and cfg.v_scale in ("none", "scalar") and not cfg.num_blocks
    if cfg.layout == "nhd" or len(cfg.pieces) > 1 or not plain:
        return cfg
    for fold in (2, 4):
        fits = fold * cfg.block_size <= 64 and 8 % (2 * cfg.group) == 0 and cfg.num_kv_heads % 2 == 0
        waves = cfg.items / 2 / (2 * gpu.num_multiprocessors)
        if fits and (waves >= 1.8 or (0.93 <= waves <= 1 and _worth_a_look(cfg, 2 * waves))):
            cfg = replace(cfg, num_kv_heads=cfg.num_kv_heads // 2, fold=fold)
    return cfg


def _in_parts(cfg: Config, gpu: Device) -> Config:
    """In so many parts that every multiprocessor has its fill; in a cluster where parts are short, and programs few.

    Or in even stretches, one for each program that runs at once, if lengths may be uneven and that is worth it.
    """
    items = max(1, cfg.items)
    parts = min(_MAX_CLUSTER, gpu.num_multiprocessors // items, -(-cfg.max_seq_len // 128))
    if parts > 1 and cfg.max_seq_len <= parts * _SHORT:
        return _tiled(replace(cfg, num_parts=parts, merge="cluster"))
    tiled = _tiled(replace(cfg, merge="kernel"))
    tiles = max(1, -(-cfg.max_seq_len // tiled.tokens))

    def parts_for(at_once: int) -> int:  # with tiles to spare in none of them
        share = -(-tiles // max(1, min(at_once // items, tiles)))
        return -(-tiles // share)

    one = gpu.num_multiprocessors
    at_once = all_ = tiled.programs * one
    if one >= parts_for(one) * items >= 0.9 * one:
        at_once = one
        parts = parts_for(one)  # one program on each multiprocessor reads as fast as two, and leaves less to merge
    elif items > all_ or (2 * items > one and _item_time(cfg) > 100):
        parts = min(_parts_in_waves(cfg, all_), tiles)
    else:
        parts = parts_for(all_)
    waves = items / all_
    alone = parts == 1 and waves > 2 and not cfg.in_registers
    most_programs = 1 if alone and cfg.head_size * jnp.dtype(cfg.dtype).itemsize >= 256 else 2
    fits = items * (1 + tiles) < 2**26 and items * parts < 2**15  # so that nothing overflows
    if cfg.num_seqs > 1 and fits and (parts > 1 or _worth_a_look(cfg, waves)):
        stretches = min(at_once, most_programs * one, items * parts)
        return _tiled(replace(cfg, num_parts=parts, stretches=stretches, merge="kernel"), most_programs)
    return replace(tiled, num_parts=parts) if parts > 1 else _tiled(cfg, most_programs)


def _worth_a_look(cfg: Config, waves: float) -> bool:
    """Whether items may be so long that it pays to look at lengths."""
    # Microseconds: of a merge that may find nothing to do, and in each wave of the lengths' sum.
    cost = 1.5 + 0.5 * max(1, waves) * -(-cfg.num_seqs // 64)
    return _item_time(cfg) > 40 * cost


def _parts_in_waves(cfg: Config, at_once: int) -> int:
    """Parts where they cannot fill all multiprocessors evenly: shorter programs leave less idle in the last wave.

    The costs in microseconds are measured (benchmarks/LOG.md): of starting a wave, of a last wave that is not full,
    and of the merge.
    """

    def cost(parts: int) -> float:
        waves = cfg.items * parts / at_once
        last = waves % 1
        idle = 0.0 if last == 0 or last >= 0.85 else 0.08 if 0.5 < waves < 1 else 0.11 if last >= 0.45 else 0.2
        return 1.6 * waves + idle * _item_time(cfg) / parts + (1.5 + 0.25 * parts if parts > 1 else 0.0)

    return min(range(1, 7 if 2 * cfg.items < at_once else 5), key=cost)


def _item_time(cfg: Config) -> float:
    """Microseconds of one program for the longest item there can be, if all multiprocessors have two."""
    return 2 * cfg.most_seen * cfg.fold * cfg.head_size * jnp.dtype(cfg.cache_dtype).itemsize / 17e3


def _tiled(cfg: Config, most_programs: int = 2) -> Config:
    """With `tile`, `slots` and `programs`.

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
            chosen = replace(cfg, programs=programs, tile=tile, slots=slots)
            if shared_memory(chosen) <= room:
                return chosen
    raise Unsupported("mosaic_gpu", [f"has no tiling that fits in shared memory for {cfg}"])


def _scale_kind(scale: Array | None) -> str:
    return "none" if scale is None else ("scalar", "head", "", "slot")[scale.ndim]
