"""Runs the ragged Mosaic GPU kernels without a GPU, in Pallas's interpreter, with substitutes for what it lacks."""

import contextlib
import importlib
import inspect
import pkgutil
from dataclasses import replace
from functools import partial
from unittest import mock

import jax
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call, params, shared_memory

from paged_jax.kernels import mosaic_gpu, problem
from paged_jax.kernels.mosaic_gpu.ragged import call as ragged
from paged_jax.kernels.mosaic_gpu.ragged import choose, ptx
from paged_jax.kernels.problem import Device
from tests import interpreted_ptx

SMALL_GPU = Device(90, 2)


@contextlib.contextmanager
def interpreting(detect_races=True):
    """Makes Pallas interpret Mosaic GPU kernels, and pass NumPy's values to Python: JAX's arrays take twice as long."""

    def pass_values(*args, callback, **_):
        return jax.tree.map(np.asarray, callback(*(np.array(x)[()] for x in args)))

    def to_int(x):
        return x if isinstance(x, jax.core.Tracer) else int(x)

    with (
        mock.patch.object(callback, "io_callback_impl", pass_values),
        mock.patch.object(shared_memory, "_to_int", to_int, create=True),  # JAX's function refuses NumPy's integers
        params.force_gpu_interpret_mode(params.InterpretGPUParams(detect_races=detect_races)),
    ):
        yield


def substitutes(ptx, interpreted):
    """Patches that replace functions in a kernel's folder `ptx/` by functions of the same names in `interpreted`."""
    for file in pkgutil.iter_modules(interpreted.__path__):
        real, ours = (importlib.import_module(f"{folder.__name__}.{file.name}") for folder in (ptx, interpreted))
        functions = {name: x for name, x in inspect.getmembers(ours, inspect.isfunction) if name in vars(real)}
        yield mock.patch.multiple(real, **{n: x for n, x in functions.items() if x.__module__.startswith("tests.")})


def call(op, operands, device=SMALL_GPU, **tuning):
    """Runs the implementation's function in the interpreter, with some fields of its tuning changed."""

    def tune(*args, tune=choose.tune, **kwargs):
        return replace(tune(*args, **kwargs), merge_programs=2, **tuning)

    patches = (
        mock.patch.object(problem, "device", return_value=device),
        mock.patch.object(choose, "tune", tune),
        *substitutes(ptx, interpreted_ptx),
        interpreting(),
    )
    try:
        for patch in patches:
            patch.__enter__()
        function = getattr(ragged, op, None) or getattr(mosaic_gpu, op)  # the package may give an op to another kernel
        return jax.tree.map(np.asarray, jax.jit(partial(function))(*operands))
    except Exception:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
        raise
    finally:
        for patch in reversed(patches):
            patch.__exit__(None, None, None)
