"""Times the all-reduce, residual and RMS norm of a decode step, and nothing else: `bench_scale --part all-reduce`.

A program is a chain of `CHAIN` reductions; each of them reduces the norm that the previous one gave. Times are of one
reduction, by the wall clock of many programs in a row and by CUPTI (scale_trace.py). Before the timing, results of
random parts are compared with float64, and their bits are compared between devices and between runs.
"""

import functools
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.scale_steps import VARIANTS, put
from benchmarks.scale_trace import trace
from examples import all_reduce
from examples.sharding import make_mesh

CHAIN = 32
SHAPES = (2, 4096), (16, 4096), (64, 4096), (128, 4096), (256, 4096), (64, 8192)
_CALLS = 8  # programs in a row
_EPSILON = 1e-5


def run(add: Callable[[str, str, Callable[[], dict[str, Any]]], None], sizes: Sequence[int], variants: Sequence[str]):
    """Adds a row for each number of GPUs, way to reduce and shape. The way "called" is our kernel."""
    for size in sizes:
        mesh = make_mesh({"dp": 1, "tp": size})
        for how in variants:
            for rows, hidden_size in SHAPES:
                measure = functools.partial(_measure, mesh, rows, hidden_size, how)
                add(f"all_reduce/tp={size}/{rows}x{hidden_size}", how, measure)


def sum_norm(part: jax.Array, residual: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same as `examples.all_reduce.sum_norm`, by XLA."""
    total = residual + jax.lax.psum(part, "tp")
    wide = total.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return total, (wide * jax.lax.rsqrt(mean + _EPSILON) * scale.astype(jnp.float32)[None]).astype(jnp.bfloat16)


def _reduce(mesh: Mesh, hidden_size: int, how: str, chain: int) -> tuple[Any, jax.Array]:
    """Makes a function of parts [tp, rows, hidden_size], residual, scale and a table that reduces `chain` times.

    The function returns the sums and the norms of each device, [tp, rows, hidden_size]. The table comes with it.
    """
    size = mesh.shape["tp"]
    lacks = all_reduce.lacks(mesh, hidden_size, jnp.bfloat16)
    if how == "called" and lacks is not None:
        raise NotImplementedError(lacks)
    called = how == "called"
    table = (
        all_reduce.PeerSum.over(mesh, hidden_size).table if called else put(np.zeros((size, 1), np.int32), mesh, "tp")
    )

    def on_device(part, residual, scale, table):
        part = part[0]
        residual += jax.lax.psum(part[:1, :1], "tp") * 0  # so that all devices begin together
        for _ in range(chain):
            if called:
                given = part, residual, scale, table[0]
                residual, part = all_reduce.sum_norm(*given, num_devices=size, epsilon=_EPSILON)
            else:
                residual, part = sum_norm(part, residual, scale)
        return residual[None], part[None]

    specs = P("tp"), P(), P(), P("tp")
    split = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=(P("tp"), P("tp")), check_vma=False)
    return jax.jit(split), table


def check(mesh: Mesh, rows: int, hidden_size: int, how: str) -> dict[str, Any]:
    """Compares results with float64, and their bits between devices and between runs."""
    (reduce, table), random = _reduce(mesh, hidden_size, how, 1), np.random.default_rng(0)
    on_all = jax.jit(lambda made: made, out_shardings=NamedSharding(mesh, P()))
    errors, same, digest = [], True, 0
    for _ in range(3):
        part, residual = (random.standard_normal((n, rows, hidden_size)) for n in (mesh.shape["tp"], 1))
        part[:, :, : hidden_size // 4] = -0.0  # the kernel may not send -0 as it is
        scale = random.standard_normal(hidden_size)
        arrays = [x.astype(jnp.bfloat16) for x in (part, residual[0], scale)]
        given = [put(x, mesh, *axes) for x, axes in zip(arrays, (["tp"], [], []), strict=True)]
        runs = [[np.asarray(x).view(np.uint16) for x in on_all(reduce(*given, table))] for _ in range(3)]
        same &= all((x == runs[0][i][:1]).all() for made in runs for i, x in enumerate(made))
        digest = functools.reduce(lambda crc, x: zlib.crc32(x.tobytes(), crc), runs[0], digest)
        part, residual, scale = (x.astype(np.float64) for x in arrays)
        total = residual + part.sum(axis=0)
        normed = total / np.sqrt((total * total).mean(axis=-1, keepdims=True) + _EPSILON) * scale
        for wanted, x in zip((total, normed), runs[0], strict=True):
            found = x[0].view(jnp.bfloat16).astype(np.float64)
            errors.append(float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted)))
    return {"error": max(errors), "same_bits": bool(same), "digest": digest}


def _measure(mesh: Mesh, rows: int, hidden_size: int, how: str) -> dict[str, Any]:
    """Checks the results, times the chain, and traces it. Returns the fields of a row."""
    checked = check(mesh, rows, hidden_size, how)
    shape = mesh.shape["tp"], rows, hidden_size
    part = put(np.ones(shape, jnp.bfloat16), mesh, "tp")
    residual, scale = (put(np.ones(size, jnp.bfloat16), mesh) for size in (shape[1:], hidden_size))
    reduce, table = _reduce(mesh, hidden_size, how, CHAIN)
    call = reduce.lower(part, residual, scale, table).compile(VARIANTS[how] or {})

    def calls():
        out = part
        for _ in range(_CALLS):
            _, out = call(out, residual, scale, table)
        return out

    times = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(calls())
        times.append(1e6 * (time.perf_counter() - began) / _CALLS / CHAIN)
    found = trace(calls, _CALLS)
    of_program = ("traced_us", "kernels_us", "pauses_us", "num_kernels", "num_pauses", "num_all_reduces")
    found |= {name: found[name] / CHAIN for name in of_program if name in found}
    return checked | {"us": min(times[1:]), "bytes": 2 * rows * hidden_size} | found
