"""Host side: what the kernels can do, which config they get, and the calls through jax_triton.

A config (`config.py`) is chosen by a pure function of shapes, dtypes and the device, and handed to the device code
whole, as its one compile-time argument. This is the only place that asks for the device.
"""

import importlib
import inspect
import warnings
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.interpreters import partial_eval

from paged_jax.kernels.problem import Unsupported
from paged_jax.kernels.triton.config import Config as Config
from paged_jax.kernels.triton.config import CopyConfig as CopyConfig
from paged_jax.kernels.triton.config import Device as Device
from paged_jax.kernels.triton.config import Quantisation as Quantisation
from paged_jax.kernels.triton.config import WriteConfig as WriteConfig
from paged_jax.kernels.triton.config import power_of_two as power_of_two
from paged_jax.options import AttentionOptions, block_axis, head_axis

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_EIGHT_BITS = (*_FLOAT8, "int8")
_MAX_HEADS = 64  # of a group, in one program


def device() -> Device:
    """The GPU that the program is for: the first local one."""
    try:
        gpu = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return Device()
    capability = gpu.compute_capability.replace(".", "")
    return Device(int(capability), gpu.core_count) if capability.isdigit() else Device()  # an AMD GPU's is no number


def missing() -> list[str]:
    """What is not installed. Without JAX's CUDA plugin there is nothing to lower a Triton kernel with."""
    reasons = []
    if not hasattr(importlib.import_module("jaxlib.gpu_triton"), "TritonKernel"):
        reasons.append("needs JAX's CUDA plugin: pip install 'jax[cuda13]'")
    try:
        importlib.import_module("jax_triton")
        importlib.import_module("triton")
    except ImportError:
        reasons.append("needs jax-triton: pip install jax-triton")
    return reasons


def check(gpu: Device, cache_dtype: str, reasons: Sequence[str] = ()) -> None:
    """Raises Unsupported with everything that stands in the way, `reasons` included."""
    reasons = [*missing(), *reasons]
    if gpu.capability < 80:
        reasons.append(f"needs compute capability 8.0 or newer, this GPU has {gpu.capability / 10}")
    elif gpu.capability < 89 and cache_dtype == "float8_e4m3fn":
        reasons.append(f"float8_e4m3fn caches need compute capability 8.9 or newer, this GPU has {gpu.capability / 10}")
    if reasons:
        raise Unsupported("triton", reasons)


def attention_config(
    query: Array,
    key_cache: Array,
    value_cache: Array,
    options: AttentionOptions,
    gpu: Device,
    *,
    queries_per_seq: int = 1,
    prefix: bool = False,
) -> Config:
    """The config for up to `queries_per_seq` query tokens of one sequence in a program; 1 is decode."""
    num_heads, head_size = query.shape[1:]
    num_kv_heads = value_cache.shape[head_axis(options.layout)]
    group, itemsize = num_heads // num_kv_heads, key_cache.dtype.itemsize
    head_tiles = -(-group // _MAX_HEADS)
    heads = -(-group // head_tiles)
    compute = compute_dtype(query.dtype.name, key_cache.dtype.name, prefix)
    check(gpu, key_cache.dtype.name)
    rows, tile, num_warps, num_stages = _tiling(
        group, heads, queries_per_seq, max(16, power_of_two(head_size)), itemsize, compute, gpu, prefix
    )
    return Config(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=value_cache.shape[block_axis(options.layout)],
        layout=options.layout,
        key_x=16 // itemsize,
        value_x=1,
        heads=heads,
        head_tiles=head_tiles,
        queries=1 if queries_per_seq == 1 else rows // heads,
        rows=rows,
        tile=tile,
        compute_dtype=compute,
        normalise_query=query.dtype.name == "bfloat16" and compute == "float16",
        k_scale=scale_kind(options.k_scale),
        v_scale=scale_kind(options.v_scale),
        alibi=options.alibi_slopes is not None,
        sinks=options.sinks is not None,
        # A larger window would overflow where it is taken from a position.
        sliding_window=None if options.sliding_window is None else min(options.sliding_window, 2**30),
        logits_soft_cap=options.logits_soft_cap,
        block_sparse=options.block_sparse,
        prefix=prefix,
        staged_values=queries_per_seq == 1 and compute == "float16" and itemsize == 1,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def quantisation(
    dtype: Any, cache_dtype: Any, k_scale: Array | None, v_scale: Array | None, gpu: Device
) -> Quantisation:
    """How keys and values of `dtype` get into a cache."""
    limits = jnp.iinfo(cache_dtype) if jnp.issubdtype(cache_dtype, jnp.integer) else jnp.finfo(cache_dtype)
    return Quantisation(
        k_scale=scale_kind(k_scale),
        v_scale=scale_kind(v_scale),
        cache_dtype=cache_dtype.name,
        narrower=cache_dtype.itemsize < dtype.itemsize or (cache_dtype, dtype) == (jnp.float16, jnp.bfloat16),
        smallest=float(limits.min),
        largest=float(limits.max),
        native=cache_dtype.name in _FLOAT8 and gpu.capability >= 89,
    )


def _tiling(
    group: int,
    heads: int,
    queries_per_seq: int,
    head_size: int,
    itemsize: int,
    compute_dtype: str,
    gpu: Device,
    prefix: bool,
) -> tuple[int, int, int, int]:
    """`rows`, `tile`, `num_warps` and `num_stages` for a padded head size and the cache's item size."""
    small = gpu.shared_memory < 128 * 1024
    num_warps, num_stages = 4, 3
    if queries_per_seq == 1:
        rows = max(16, power_of_two(heads))
        # As measured (benchmarks/LOG.md): many small programs, larger tiles for groups of 8, and a second tile in
        # flight (which takes two more stages, as block tables are read first) where arithmetic is dear.
        tile_bytes = (32768 if 8 <= group < 16 else 16384) // (2 if small else 1)
        tile = min(128, max(16, tile_bytes // (head_size * itemsize)))
        num_stages = 5 if group >= 16 or itemsize == 1 else 3
    else:
        # Hopper and data-center Blackwell have matrix units for whole tiles, which two groups of four warps share.
        large = gpu.capability // 10 in (9, 10)
        most = (256 if large and itemsize > 1 else 128) if head_size <= 128 else 64
        rows = min(most, max(16, power_of_two(queries_per_seq * heads)))
        tile = (64 if head_size <= 128 else 32) // (2 if small else 1)
        if rows * head_size > (16384 if large else 8192):
            num_warps = 8
    if compute_dtype == "float32":  # plain cores: smaller products, or registers spill
        rows, num_warps = max(min(rows, 32), power_of_two(heads)), 4
        tile = min(tile, 32 if head_size <= 128 else 16)

    compute_itemsize = jnp.dtype(compute_dtype).itemsize
    while True:  # at most the queries, the tiles in flight, and a tile converted for the products
        in_flight = (num_stages - 1) // (2 if queries_per_seq == 1 else 1)
        in_flight = max(in_flight, 1) * itemsize + prefix * compute_itemsize
        converted = compute_itemsize if compute_itemsize != itemsize else 0
        needed = rows * (head_size + tile) * compute_itemsize + 2 * tile * head_size * (in_flight + converted) + 4096
        if needed <= gpu.shared_memory or (tile == 16 and num_stages == 1):
            return rows, tile, num_warps, num_stages
        tile, num_stages = (tile // 2, num_stages) if tile > 16 else (tile, num_stages - 1)


def compute_dtype(query: str, cache: str, prefix: bool) -> str:
    """The narrowest dtype that holds what is multiplied: 8-bit caches fit in float16, exactly, and convert fastest."""
    if query == "float32":
        return "float32"
    if cache in _EIGHT_BITS:
        return query if prefix else "float16"
    return query if query == cache else "float32"


def num_splits(config: Config, num_seqs: int, max_seq_len: int, gpu: Device) -> int:
    """Into how many programs each context is split, so that every multiprocessor has its fill."""
    programs = num_seqs * config.num_kv_heads * config.head_tiles
    target = gpu.num_multiprocessors * (2 if config.group >= 8 else 4)
    return max(1, min(target // programs, -(-max_seq_len // config.tile)))


def reduce_config(config: Config, num_seqs: int, num_splits: int, gpu: Device) -> Config:
    """The config of the reduce that follows: few rows are cut in parts, and a row's loads are in flight at once.

    In partitions it is always the same: a row's result must not depend, by rounding, on what else there is.
    """
    if config.partition_size is not None:
        return config
    parts = min(config.padded_head_size // 16, power_of_two(gpu.num_multiprocessors // (num_seqs * config.num_heads)))
    splits = min(64, power_of_two(num_splits))
    num_warps = max(1, min(4, splits * config.padded_head_size // parts // 512))
    return replace(config, num_warps=num_warps, reduce_splits=splits, reduce_parts=parts)


def ranked(config: Config, num_seqs: int, gpu: Device) -> int:
    """`Config.ranked` for unsplit sequences: worth it where they come in more than one wave."""
    waves = num_seqs * config.num_kv_heads * config.head_tiles > gpu.num_multiprocessors
    return power_of_two(num_seqs) if waves and 2 <= num_seqs <= 128 else 0


def call(
    module: str,
    kernel: str,
    config: Config | WriteConfig | CopyConfig,
    num_programs: int,
    arrays: Sequence[Array],
    scalars: Sequence[int],
    outputs: Sequence[jax.ShapeDtypeStruct],
    gpu: Device,
    in_place: Sequence[Array] = (),
) -> Any:
    """Launches a kernel on `arrays`, then `scalars`, then pointers to `outputs`; returns the outputs.

    The arrays `in_place` become the first outputs. Their kernel takes as many pointers that it does not use after
    `arrays`: jax-triton 0.3 passes an aliased input and its output, each in its place, 0.4 passes the two as one.
    """
    import jax_triton

    _mend_dce_rule(jax_triton)
    device_code = importlib.import_module(f"paged_jax.kernels.triton.{module}")
    takes = inspect.signature(jax_triton.triton_call).parameters
    aliased, rest = outputs[: len(in_place)], outputs[len(in_place) :]
    keywords: dict[str, Any] = {}
    if "backend_options" in takes:
        keywords["backend_options"] = {"enable_fp_fusion": True}
    if "out_type" in takes:  # 0.4, which wants aliased outputs last
        inputs = (*arrays, *[arrays[0]] * len(in_place), *scalars, *in_place)
        keywords["out_type"], first_input, first_output = [*rest, *aliased], len(inputs) - len(in_place), len(rest)
    else:
        inputs = (*arrays, *in_place, *scalars)
        keywords["out_shape"], first_input, first_output = [*aliased, *rest], len(arrays), 0
    if in_place:
        keywords["input_output_aliases"] = {first_input + i: first_output + i for i in range(len(in_place))}
    with warnings.catch_warnings():
        # 0.4 wants mutable references instead, which 0.3 has not.
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        results = jax_triton.triton_call(
            *inputs,
            kernel=getattr(device_code, kernel),
            grid=(num_programs,),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            compute_capability=gpu.capability,
            cfg=config,
            **keywords,
        )
    return [*results[first_output:], *results[:first_output]]


def _mend_dce_rule(jax_triton: ModuleType) -> None:
    """jax-triton 0.4.1's rule for unused results lacks an argument of jax 0.12's; the same, for any arguments."""
    primitive = getattr(getattr(jax_triton, "triton_lib", None), "triton_kernel_call_p", None)
    if primitive in partial_eval.dce_rules:
        partial_eval.dce_rules[primitive] = lambda _, *args: ([True] * len(args[-1].invars), args[-1])


def option_arrays(options: AttentionOptions) -> tuple[Array, ...]:
    """scale, alibi_slopes, sinks, k_scale, v_scale; `scale` stands in for what is absent, which is not read."""
    arrays = options.scale, options.alibi_slopes, options.sinks, options.k_scale, options.v_scale
    return tuple(options.scale if x is None else x for x in arrays)


def scale_kind(scale: Array | None) -> str:
    return "none" if scale is None else {0: "scalar", 1: "head", 3: "slot"}[scale.ndim]
