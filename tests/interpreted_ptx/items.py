"""Counters of work items, and descriptions of items."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
from jax.experimental import io_callback


def number_after(number, unclaimed, kind, refs):
    """Program p takes every num_programs-th number from unclaimed + p on. Claims of concurrent threads would race."""
    step = kind.geometry.tuning.num_programs
    return jnp.where(number < unclaimed, unclaimed + lax.axis_index("program"), number + step)


def stored_before(counter, warpgroup, refs):
    """Counts on the host, because the detector of races knows no atomics."""
    counters_gmem = refs.inputs_gmem.counters
    after_stores = counters_gmem[0]  # the interpreter reads it after this thread's stores
    count = partial(_count, counters_gmem.shape[0])
    return io_callback(count, jax.ShapeDtypeStruct((), jnp.int32), counter, warpgroup, after_stores)


def _count(num_counters, counter, warpgroup, _):
    """Increases a counter; the thread then sees what other threads did before they increased it."""
    assert 2 <= counter < num_counters, "the first two counters are of claims"
    memory = gpu_callbacks._get_shared_memory()
    with memory.lock:
        counted = vars(memory).setdefault("counted", {}).setdefault(int(counter), [])
        if memory.detect_races:
            own = memory.clocks[shared_memory.Warpgroup(0, 0, 0, warpgroup)]
            for earlier in counted:
                own.update(earlier)
        counted.append(own.copy() if memory.detect_races else None)
        return np.int32(len(counted) - 1)


def store_fields(fields_smem, row, values):
    for i, value in enumerate(values):
        fields_smem[row, i] = value
