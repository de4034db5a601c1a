"""Times calls by CUPTI, as the device time of all their kernels, and measures the ceilings for such times.

The read ceiling and the copy ceiling are times of kernels in this file, which read or copy a buffer 16 bytes at a time
and do nothing else. They need CuPy.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.report import first_line

_KERNELS = r"""
extern "C" __global__ void __launch_bounds__(512) read(const uint4* __restrict__ data, long long n, unsigned* out) {
  unsigned sum = 0;
  const long long step = (long long)gridDim.x * 512 * UNROLL;
  for (long long i = (long long)blockIdx.x * 512 * UNROLL + threadIdx.x; i < n; i += step) {
    uint4 v[UNROLL] = {};
    if (i + (UNROLL - 1) * 512 < n) {
      #pragma unroll
      for (int u = 0; u < UNROLL; ++u) v[u] = __ldg(data + i + u * 512);
    } else {
      #pragma unroll
      for (int u = 0; u < UNROLL; ++u) if (i + u * 512 < n) v[u] = __ldg(data + i + u * 512);
    }
    #pragma unroll
    for (int u = 0; u < UNROLL; ++u) sum ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  if (sum == 0x9e3779b9u) *out = sum;  // keeps the loads; hardly ever stores
}
extern "C" __global__ void __launch_bounds__(512) copy(const uint4* __restrict__ data, long long n, uint4* out) {
  const long long step = (long long)gridDim.x * 512 * UNROLL;
  for (long long i = (long long)blockIdx.x * 512 * UNROLL + threadIdx.x; i < n; i += step) {
    uint4 v[UNROLL];
    #pragma unroll
    for (int u = 0; u < UNROLL; ++u) if (i + u * 512 < n) v[u] = __ldg(data + i + u * 512);
    #pragma unroll
    for (int u = 0; u < UNROLL; ++u) if (i + u * 512 < n) out[i + u * 512] = v[u];
  }
}
extern "C" __global__ void fill(unsigned* data, long long n) {
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
    unsigned x = (unsigned)i * 0x9e3779b9u; x ^= x >> 16; x *= 0x85ebca6bu; x ^= x >> 13; data[i] = x;
  }
}
"""
SECONDS = 0.1
"""About how long one sample of a time lasts."""

_SAMPLES = 2  # of each time

PAUSE = 0.03
"""Seconds before a call that should have the full clock rate."""

_RESTED_CALLS = 4
_LEAST = 1 << 30  # least bytes of the largest read, so that memory limits its rate
_LARGE = 8 << 30  # bytes of the largest read, and of the copy's source and destination together


@dataclass(frozen=True)
class Timing:
    """Device time of one call.

    Attributes:
      us: the median over all calls, in microseconds. A call's time is the sum of its kernels' times.
      min_us: the fastest call's time.
      calls: how many calls were timed.
      kernels: name and median microseconds of each kernel of a call; empty if calls launch different kernels.
      rested_us: the median over some calls that each follow a pause, if it was asked for.
    """

    us: float
    min_us: float
    calls: int
    kernels: tuple[tuple[str, float], ...]
    rested_us: float | None = None


@dataclass(frozen=True)
class Ceiling:
    """A speed that no kernel can beat.

    Attributes:
      unit: the unit of `rate`, "GB/s" or "TFLOP/s".
      rate: the rate that a large problem reaches; None if it could not be measured.
      us: microseconds for each measured amount of work, in bytes; empty if the size does not matter.
      note: how the ceiling was measured, or why it was not.
    """

    unit: str
    rate: float | None
    us: dict[int, float]
    note: str

    def time(self, work: int) -> float | None:
        """The fewest microseconds for `work` (bytes or operations), as measured at this size, or by the rate."""
        if work in self.us:
            return self.us[work]
        return None if self.rate is None else work / self.rate / (1e3 if self.unit == "GB/s" else 1e6)


class _Launches:
    """Looks like a jitted function to `profiler.measure`, which would otherwise jit `run` as one program."""

    def __init__(self, run: Callable[[], Any]):
        self.run = run

    def __call__(self):
        return self.run()

    def trace(self):
        raise NotImplementedError

    def lower(self):
        raise NotImplementedError


def kernel_times(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """Name and microseconds of every kernel that `run` launches, in order. `run` is called twice, first to warm up.

    This clock sees only kernels, not other copies and memsets.
    """
    from jax.experimental.mosaic.gpu import profiler

    _, kernels = profiler.measure(_Launches(run), aggregate=False)()
    if not kernels:
        raise RuntimeError("CUPTI saw no kernel")
    return [(str(name), float(ms) * 1e3) for name, ms in kernels]


def time_calls(fn: Callable, argsets: Sequence[tuple], *, seconds: float = SECONDS, rested: bool = False) -> Timing:
    """Times `fn(*args)`; calls take `argsets` in turn.

    Args:
      fn: a compiled function that launches the same kernels for each of the argsets.
      argsets: sets of arguments, which together do not fit in L2.
      seconds: about how long one of two samples lasts; CUPTI is started for each.
      rested: whether to also time calls after pauses.
    """
    jax.block_until_ready(fn(*argsets[0]))
    start = time.perf_counter()
    jax.block_until_ready(fn(*argsets[-1]))
    once = time.perf_counter() - start
    num_calls = min(max(4, int(seconds / once)), max(32, len(argsets)))
    # The clock rates of an idle GPU take a while to rise.
    start = time.perf_counter()
    while time.perf_counter() - start < 0.05:
        jax.block_until_ready(fn(*argsets[0]))

    def run():
        out = None
        for i in range(num_calls):
            out = fn(*argsets[i % len(argsets)])
        return out

    times, parts = [], []
    for _ in range(_SAMPLES):
        kernels = kernel_times(run)
        if len(kernels) % num_calls:
            times.append(sum(us for _, us in kernels) / num_calls)
            continue
        per_call = len(kernels) // num_calls
        calls = [kernels[i : i + per_call] for i in range(0, len(kernels), per_call)][num_calls // 4 :]
        times += [sum(us for _, us in call) for call in calls]
        parts += calls
    same = bool(parts) and all([n for n, _ in call] == [n for n, _ in parts[0]] for call in parts)
    medians = [statistics.median(call[i][1] for call in parts) for i in range(len(parts[0]))] if same else []
    names = [name for name, _ in parts[0]] if same else []
    parts = tuple(zip(names, medians, strict=True))
    rested_us = _time_rested(fn, argsets) if rested else None
    return Timing(statistics.median(times), min(times), len(times), parts, rested_us)


def _time_rested(fn: Callable, argsets: Sequence[tuple]) -> float:
    """The median device time in microseconds of calls that each follow a pause.

    In a row of calls that use all matrix units, a GPU reaches its power limit and lowers its clock rate. One call after
    a pause has the full clock rate.
    """

    def run():
        for i in range(_RESTED_CALLS):
            time.sleep(PAUSE)
            jax.block_until_ready(fn(*argsets[i % len(argsets)]))

    kernels = kernel_times(run)
    per_call, rest = divmod(len(kernels), _RESTED_CALLS)
    if rest:
        raise RuntimeError(f"CUPTI saw {len(kernels)} kernels in {_RESTED_CALLS} calls")
    calls = [kernels[i : i + per_call] for i in range(0, len(kernels), per_call)]
    return statistics.median(sum(us for _, us in call) for call in calls)


def read_ceiling(sizes: Iterable[int]) -> Ceiling:
    """Times the read kernel on buffers of these sizes in bytes and on one of up to 8 GiB, each with its best launch."""
    try:
        best = _read_times(sizes)
    except Exception as error:  # without CuPy or memory there are no shares, but times are still worth having
        return Ceiling("GB/s", None, {}, first_line(error))
    return Ceiling("GB/s", max(best) / best[max(best)] / 1e3, best, "16-byte loads, best of 9 launches per size")


def copy_ceiling() -> Ceiling:
    """Times the copy kernel on a buffer of up to 4 GiB with its best launch. Bytes read and bytes written count."""
    try:
        size, us = _copy_time()
    except Exception as error:  # without CuPy or memory there is no share, as in read_ceiling
        return Ceiling("GB/s", None, {}, first_line(error))
    return Ceiling("GB/s", 2 * size / us / 1e3, {}, f"copies {size >> 20} MiB by 16 bytes, best of 9 launches")


def _copy_time() -> tuple[int, float]:
    """Returns a number of bytes, and the microseconds in which they are copied."""
    import cupy

    size = min(_LARGE // 2, cupy.cuda.Device().mem_info[0] // 4) >> 21 << 21
    source, destination = cupy.zeros(size, cupy.uint8), cupy.empty(size, cupy.uint8)
    multiprocessors = cupy.cuda.Device().attributes["MultiProcessorCount"]
    cupy.RawKernel(_KERNELS, "fill", ("-DUNROLL=1",))((8 * multiprocessors,), (512,), (source, np.int64(size // 4)))
    launches = [
        (cupy.RawKernel(_KERNELS, "copy", (f"-DUNROLL={unroll}",)), blocks * multiprocessors)
        for unroll in (1, 4, 8)
        for blocks in (1, 2, 4)
    ]
    repeats = 6

    def run():
        for kernel, blocks in launches:
            for _ in range(repeats):
                kernel((blocks,), (512,), (source, np.int64(size // 16), destination))
        cupy.cuda.Device().synchronize()

    times = [us for name, us in kernel_times(run) if name == "copy"]
    if len(times) != len(launches) * repeats:
        raise RuntimeError(f"CUPTI saw {len(times)} kernels of {len(launches) * repeats}")
    best = float(np.median(np.reshape(times, (len(launches), repeats)), axis=1).min())
    del source, destination
    cupy.get_default_memory_pool().free_all_blocks()
    return size, best


def _read_times(sizes: Iterable[int]) -> dict[int, float]:
    import cupy

    free = cupy.cuda.Device().mem_info[0]
    large = min(_LARGE, free // 2) >> 21 << 21
    if large < _LEAST:
        raise RuntimeError(f"only {free >> 20} MiB are free: what half of them hold may be read from L2")
    buffer = cupy.empty(large, cupy.uint8)
    multiprocessors = cupy.cuda.Device().attributes["MultiProcessorCount"]
    cupy.RawKernel(_KERNELS, "fill", ("-DUNROLL=1",))((8 * multiprocessors,), (512,), (buffer, np.int64(large // 4)))
    sink = cupy.zeros(1, cupy.uint32)
    reads = [cupy.RawKernel(_KERNELS, "read", (f"-DUNROLL={unroll}",)) for unroll in (1, 4, 8)]
    launches = [(read, blocks * multiprocessors) for read in reads for blocks in (1, 2, 4)]
    sizes = sorted({size for size in sizes if size <= large} | {large})
    repeats = 12

    def run():
        offset = 0  # each call reads the next bytes of the buffer, so that none finds its bytes in L2
        for size in sizes:
            for kernel, blocks in launches:
                for _ in range(repeats):
                    offset = offset if offset + size <= large else 0
                    kernel((blocks,), (512,), (buffer[offset:], np.int64(size // 16), sink))
                    offset = (offset + size + 255) // 256 * 256
        cupy.cuda.Device().synchronize()

    times = [us for name, us in kernel_times(run) if name == "read"]
    if len(times) != len(sizes) * len(launches) * repeats:
        raise RuntimeError(f"CUPTI saw {len(times)} kernels of {len(sizes) * len(launches) * repeats}")
    medians = np.median(np.reshape(times, (len(sizes), len(launches), repeats)), axis=2).min(axis=1)
    best = dict(zip(sizes, map(float, medians), strict=True))
    del buffer
    cupy.get_default_memory_pool().free_all_blocks()
    return best


def matmul_ceiling(size: int = 8192) -> Ceiling:
    """Times XLA's product of two random bfloat16 matrices with `size` rows and columns, after pauses.

    Without pauses such products reach the GPU's power limit, and a kernel below that limit could beat their rate.
    """
    a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in jax.random.split(jax.random.key(0)))
    operations, multiply = 2 * math.pow(size, 3) / 1e6, jax.jit(jnp.matmul)
    timing = time_calls(multiply, [(a, b)], rested=True)
    note = f"XLA's bfloat16 product of {size}^3 after a pause; in a row {operations / timing.us:.0f} TFLOP/s"
    return Ceiling("TFLOP/s", operations / (timing.rested_us or timing.us), {}, note)
