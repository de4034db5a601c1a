"""Launches kernels through jax_triton, or says why they cannot be launched."""

import importlib
import inspect
import threading
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
from jax import Array
from jax.interpreters import partial_eval

from paged_jax.kernels.in_place import apart
from paged_jax.kernels.problem import Device, Unsupported
from paged_jax.kernels.problem import device as device
from paged_jax.kernels.triton.cache_tuning import CopyKernel, WriteKernel
from paged_jax.kernels.triton.ragged_tuning import RaggedReduceKernel
from paged_jax.kernels.triton.tuning import AttentionKernel, ReduceKernel

# All threads share the filters of warnings. Programs that compile side by side launch kernels in threads, and no
# thread may restore a value that another thread has just set.
_filters_lock = threading.Lock()


def missing() -> list[str]:
    """Says which packages are missing; JAX lowers Triton kernels with its CUDA plugin."""
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
    """Raises `Unsupported` if packages are missing, the GPU is too old, or there are `reasons`."""
    reasons = [*missing(), *reasons]
    if gpu.capability < 80:
        reasons.append(f"needs compute capability 8.0 or newer, this GPU has {gpu.capability / 10}")
    elif gpu.capability < 89 and cache_dtype == "float8_e4m3fn":
        reasons.append(f"float8_e4m3fn caches need compute capability 8.9 or newer, this GPU has {gpu.capability / 10}")
    if reasons:
        raise Unsupported("triton", reasons)


def call(
    module: str,
    kernel: str,
    config: AttentionKernel | ReduceKernel | RaggedReduceKernel | WriteKernel | CopyKernel,
    num_programs: int,
    arrays: Sequence[Array],
    scalars: Sequence[int],
    outputs: Sequence[jax.ShapeDtypeStruct],
    gpu: Device,
    in_place: Sequence[Array] = (),
) -> Any:
    """Launches a kernel of `device/` on `arrays`, then `scalars`, then pointers to `outputs`; returns the outputs.

    The arrays `in_place` become the first outputs. After `arrays`, the kernel takes an unused pointer for each of them,
    because jax-triton 0.3 passes an aliased input and its output as two arguments. 0.4 passes both as one argument.
    """
    import jax_triton

    _mend_dce_rule(jax_triton)
    device_code = importlib.import_module(f"paged_jax.kernels.triton.device.{module}")
    takes = inspect.signature(jax_triton.triton_call).parameters
    tuning = config.tuning if isinstance(config, AttentionKernel) else config
    aliased, rest = outputs[: len(in_place)], outputs[len(in_place) :]
    in_place = apart(tuple(in_place))
    keywords: dict[str, Any] = {}
    if "backend_options" in takes:
        keywords["backend_options"] = {"enable_fp_fusion": True}
    if "out_type" in takes:  # jax-triton 0.4 wants aliased outputs last
        inputs = (*arrays, *[arrays[0]] * len(in_place), *scalars, *in_place)
        keywords["out_type"], first_input, first_output = [*rest, *aliased], len(inputs) - len(in_place), len(rest)
    else:
        inputs = (*arrays, *in_place, *scalars)
        keywords["out_shape"], first_input, first_output = [*aliased, *rest], len(arrays), 0
    if in_place:
        keywords["input_output_aliases"] = {first_input + i: first_output + i for i in range(len(in_place))}
    with _filters_lock, warnings.catch_warnings():
        # jax-triton 0.4 warns that it prefers mutable references, which 0.3 does not take.
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        results = jax_triton.triton_call(
            *inputs,
            kernel=getattr(device_code, kernel),
            grid=(num_programs,),
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
            compute_capability=gpu.capability,
            cfg=config,
            **keywords,
        )
    results = [*results[first_output:], *results[:first_output]]
    return [*apart(results[: len(in_place)]), *results[len(in_place) :]]


def _mend_dce_rule(jax_triton: ModuleType) -> None:
    """Replaces the rule for unused results of jax-triton 0.4.1: jax 0.12 passes it one argument more than it takes."""
    primitive = getattr(getattr(jax_triton, "triton_lib", None), "triton_kernel_call_p", None)
    if primitive in partial_eval.dce_rules:
        partial_eval.dce_rules[primitive] = lambda _, *args: ([True] * len(args[-1].invars), args[-1])
