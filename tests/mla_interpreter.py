"""Runs the MLA kernel of Mosaic GPU without a GPU, in Pallas's interpreter, with substitutes for what it lacks."""

from functools import partial
from unittest import mock

import jax
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from paged_jax.kernels import problem
from paged_jax.kernels.mosaic_gpu.mla import call, merge, ptx
from paged_jax.kernels.problem import Device
from tests import interpreted_mla, ragged_interpreter

SMALL_GPU = Device(90, 4)


def run(function, *, device=SMALL_GPU, **arrays):
    """Replaces the fixture `run` of the tests of every implementation."""
    patches = [
        *ragged_interpreter.substitutes(ptx, interpreted_mla),
        mock.patch.object(merge, "_PROGRAMS", 6),  # so that a program of the merge merges several parts
        mock.patch.object(problem, "device", return_value=device),
    ]

    def eagerly(op, operands, *, implementation=None, unwanted=(), **static):
        kernel = jax.jit(partial(getattr(call, op), **static))
        with ragged_interpreter.interpreting():
            return jax.block_until_ready(kernel(*operands))

    with mock.patch("paged_jax._dispatch.call", eagerly):
        for patch in patches:
            patch.start()
        try:
            return jax.tree.map(np.asarray, function(**arrays, implementation="mosaic_gpu"))
        except Exception:
            interpret_pallas_call.reset_gpu_interpret_mode_state()
            raise
        finally:
            for patch in patches:
                patch.stop()
