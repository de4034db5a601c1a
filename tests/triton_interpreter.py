"""Runs and compiles the Triton kernels without a GPU, with functions that replace `jax_triton.triton_call`.

`interpreted()` runs every launch in Triton's interpreter, on NumPy memory; `run_triton.py` does so with the cases of
the tests. `recorded(launches)` only records launches, and `compiled(launch, capability)` compiles a launch to a cubin.
None needs jax_triton; some of its versions can only be imported with a JAX for GPUs.
"""

import contextlib
import dataclasses
import importlib
import sys
import types
import warnings
from unittest import mock

import jax.numpy as jnp
import numpy as np

from paged_jax import _dispatch
from paged_jax.kernels.problem import Device
from paged_jax.kernels.triton import cache_tuning, launch, mla_tuning, tuning
from tests.triton_arithmetic import arithmetic_mended

_TYPES = {
    "bfloat16": "bf16",
    "float32": "fp32",
    "float16": "fp16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int32": "i32",
    "int64": "i64",
    "int8": "i8",
}


@dataclasses.dataclass
class Launch:
    """One call of `triton_call`: a signature, a config and a grid."""

    kernel: object
    inputs: tuple
    outputs: list
    config: object
    grid: tuple
    aliases: dict


@contextlib.contextmanager
def standing_in(triton_call, device=None):
    """Replaces jax_triton's function by `triton_call(launch) -> outputs`, and makes every op call it without jit."""

    def call(*inputs, kernel, out_type, grid, cfg, input_output_aliases=None, **_):
        return triton_call(Launch(kernel, inputs, out_type, cfg, grid, input_output_aliases or {}))

    package = importlib.import_module("paged_jax.kernels.triton")
    device_code = [
        f"{package.__name__}.device.{file}" for file in ("attend", "latent", "items", "reduce", "write", "copy")
    ]
    for name in ("triton.compiler", *device_code):
        importlib.import_module(name)  # imported here, because imports under the patched sys.modules are lost

    def eagerly(op, operands, *, implementation=None, unwanted=(), **static):
        return getattr(package, op)(*operands, **static)

    module = types.ModuleType("jax_triton")
    module.triton_call = call
    with (
        mock.patch.dict(sys.modules, {"jax_triton": module}),
        mock.patch.object(_dispatch, "call", eagerly),
        mock.patch.object(launch, "missing", return_value=[]),
        mock.patch.object(launch, "device", return_value=device or Device()),
    ):
        yield


def recorded(launches, device=None):
    """Records the launches; each returns zeros."""

    def record(made):
        launches.append(made)
        return [jnp.zeros(x.shape, x.dtype) for x in made.outputs]

    return standing_in(record, device)


@contextlib.contextmanager
def interpreted(device=None):
    """Runs the launches in Triton's interpreter."""

    def run(made):
        outputs = {o: fenced(made.inputs[i]) for i, o in made.aliases.items()}
        inputs = [
            Memory(outputs[made.aliases[i]]) if i in made.aliases else x if isinstance(x, int) else Memory(fenced(x))
            for i, x in enumerate(made.inputs)
        ]
        fresh = []
        for o, x in enumerate(made.outputs):
            if o not in outputs:  # outputs start as bytes 0xff, which are NaN, to reveal elements that are not written
                size = int(np.prod(x.shape)) * x.dtype.itemsize
                outputs[o] = fenced(np.full(size, 0xFF, np.uint8).view(x.dtype).reshape(x.shape))
                fresh.append(Memory(outputs[o]))
        made.kernel[made.grid](*inputs, *fresh, cfg=made.config)
        for o, x in outputs.items():
            assert fence_stands(x), f"the kernel wrote outside of its output {o}, {x.dtype} {x.shape}"
        return [jnp.asarray(outputs[o]) for o in range(len(made.outputs))]

    # The interpreter lacks instructions of the GPU, and rounds float8 differently.
    def by_hand(*args, original=cache_tuning.quantisation, **keywords):
        return dataclasses.replace(original(*args, **keywords), native=False)

    def converted(*args, original=tuning.attention, **keywords):
        return dataclasses.replace(original(*args, **keywords), staged_values=False)

    with (
        arithmetic_mended(),
        standing_in(run, device),
        mock.patch.object(cache_tuning, "quantisation", by_hand),
        mock.patch.object(tuning, "attention", converted),
    ):
        yield


_FENCE = 2**20


def fenced(x):
    """Copies an array between bytes 0xff. Reads of these bytes give NaN, and `fence_stands` finds writes to them."""
    x = np.asarray(x)
    memory = np.full(2 * _FENCE + x.nbytes, 0xFF, np.uint8)
    inside = memory[_FENCE : _FENCE + x.nbytes].view(x.dtype).reshape(x.shape)
    inside[...] = x
    return inside


def fence_stands(x):
    """Whether the bytes around an array of `fenced` are unchanged."""
    memory = x
    while memory.base is not None:
        memory = memory.base
    return bool((memory[:_FENCE] == 0xFF).all() and (memory[-_FENCE:] == 0xFF).all())


class Memory:
    """A NumPy array with the methods that Triton's interpreter calls on a tensor."""

    def __init__(self, array):
        self.array, self.dtype = array, _TYPES[array.dtype.name]

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    cpu = untyped_storage

    def new_empty(self, *_, **__):
        return self

    def set_(self, *_):
        pass

    copy_ = set_

    def storage_offset(self):
        return 0

    size = stride = storage_offset


def signature(made):
    """The argument types by position, as in jax_triton; scalars of 1 are compile-time constants."""
    aliased = set(made.aliases.values())
    pointers = [x for o, x in enumerate(made.outputs) if o not in aliased]
    types = ["i32" if isinstance(x, int) else "*" + _TYPES[x.dtype.name] for x in (*made.inputs, *pointers)]
    ones = {i for i, x in enumerate(made.inputs) if isinstance(x, int) and x == 1}
    return tuple("constexpr" if i in ones else type_ for i, type_ in enumerate(types))


def source_of(made):
    """A launch's kernel as Triton's compiler takes it, and the compiler's options."""
    from triton.compiler import ASTSource

    names, types = made.kernel.arg_names, signature(made)
    constants = {names[i]: 1 for i, type_ in enumerate(types) if type_ == "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, type_ in enumerate(types) if type_.startswith("*")}
    source = ASTSource(
        made.kernel,
        dict(zip(names, (*types, "constexpr"), strict=True)),
        constexprs={**constants, "cfg": made.config},
        attrs=aligned,
    )
    chosen = made.config.tuning if isinstance(made.config, tuning.AttentionKernel) else made.config
    return source, {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages, "enable_fp_fusion": True}


def compiled(made, capability):
    """Compiles a launch for this compute capability, without a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget

    source, options = source_of(made)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Triton's own code gives warnings
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@contextlib.contextmanager
def short_splits(tile=16):
    """Makes ragged attention split contexts of a few tiles; raises an error if a launch splits none."""

    def shorter(original):
        return lambda *args, **keywords: dataclasses.replace(original(*args, **keywords), least_split=1, tile=tile)

    def call(module, kernel, *args, original=launch.call, **keywords):
        results = original(module, kernel, *args, **keywords)
        if kernel in ("ragged_kernel", "latent_kernel"):
            exp_sums = np.asarray(results[3])
            assert not np.isnan(exp_sums).all(), "no context was split"
        return results

    with (
        mock.patch.object(tuning, "attention", shorter(tuning.attention)),
        mock.patch.object(mla_tuning, "tuning_of", shorter(mla_tuning.tuning_of)),
        mock.patch.object(launch, "call", call),
    ):
        yield
