"""Measures the most that one GPU can do: `python -m benchmarks.bench_ceilings --out FILE`.

README.md and LOG.md compare ops with kernels that only move bytes, and with a product. This measures all of these:

    read           16-byte loads of contiguous memory: the ceiling of decode, at each size
    pages          the same loads in pages of 4 KiB, whose ids come from a table, in order and shuffled: the least cost
                   of a kernel that finds its keys and values through a block table
    copy           16-byte loads and stores: the ceiling of cache operations
    vllm-writes    256 new tokens into layout `vllm`, K alone, V alone and both: no write of few tokens can be faster in
                   this layout, because each element of V goes to a sector of its own
    product        a product of two bfloat16 matrices by XLA: the ceiling of prefill

The kernels of `pages` and `vllm-writes` are checked before they are timed. All except `product` need CuPy.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness, timing

MIB = 1 << 20
READ_BYTES = tuple(n * MIB for n in (2, 16, 64, 128, 256, 512, 1024, 2048, 8192))
PAGE_BYTES = 4096  # a page has the tokens of one kv head: 16 tokens of 128 elements in bfloat16
PAGED_BYTES = tuple(n * MIB for n in (2, 16, 128, 256, 1024))
_BUFFER_BYTES = 8 << 30  # calls go through this many bytes, so that no call finds its bytes in L2
_THREADS = 256

# The sizes of the new tokens of `vllm-writes` and of their caches, in bfloat16. `PagedKVCache` says what X is.
NUM_TOKENS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, X = 256, 8, 128, 16, 8
_VLLM_BLOCKS = 65536  # 2 GiB of K and as much of V

_READ_PAGES = r"""
extern "C" __global__ void __launch_bounds__(256)
read_pages(const uint4* __restrict__ data, const int* __restrict__ pages, long long n, unsigned* out) {
  unsigned sum = 0;
  for (long long p = (long long)blockIdx.x * UNROLL; p < n; p += (long long)gridDim.x * UNROLL) {
    uint4 v[UNROLL] = {};
    #pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (p + u < n) v[u] = __ldg(data + (long long)pages[p + u] * 256 + threadIdx.x);
    #pragma unroll
    for (int u = 0; u < UNROLL; ++u) sum ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  if (CHECKED) atomicXor(out, sum);
  else if (sum == 0x9e3779b9u) *out = sum;  // keeps the loads; hardly ever stores
}
"""

_WRITE_VLLM = r"""
// A thread block writes one token: KEY 16-byte pieces of K, and single elements of V, each into a sector of its own.
extern "C" __global__ void __launch_bounds__(256)
write_vllm(const unsigned short* __restrict__ key, const unsigned short* __restrict__ value,
           const int* __restrict__ slots, unsigned short* key_cache, unsigned short* value_cache) {
  const int token = blockIdx.x, elements = NUM_KV_HEADS * HEAD_SIZE;
  const long long block = slots[token] / BLOCK_SIZE;
  const int offset = slots[token] % BLOCK_SIZE;
  if (WRITES_K)
    for (int i = threadIdx.x; i < elements / 8; i += blockDim.x)
      reinterpret_cast<uint4*>(key_cache)[(block * (elements / 8) + i) * BLOCK_SIZE + offset] =
          __ldg(reinterpret_cast<const uint4*>(key) + (long long)token * (elements / 8) + i);
  if (WRITES_V)
    for (int i = threadIdx.x; i < elements; i += blockDim.x)
      value_cache[(block * elements + i) * BLOCK_SIZE + offset] = __ldg(value + (long long)token * elements + i);
}
"""


def row(case: str, work: int, us: float, unit: str = "GB/s", **more: Any) -> dict[str, Any]:
    """A row of the report: bytes or operations, the time in microseconds and the rate."""
    return {"case": case, "work": work, "us": us, "rate": work / us / (1e3 if unit == "GB/s" else 1e6), **more}


def fastest(times: Sequence[float], shape: tuple[int, int, int]) -> list[float]:
    """The fastest launch's median time for each size. `times` is the flattened array [sizes, launches, repeats].

    Raises:
      RuntimeError: the number of times does not fit the shape.
    """
    if len(times) != np.prod(shape):
        raise RuntimeError(f"CUPTI saw {len(times)} kernels of {np.prod(shape)}")
    return [float(us) for us in np.median(np.reshape(times, shape), axis=2).min(axis=1)]


def page_tables(num_pages: int, shuffled: bool, seed: int = 0) -> np.ndarray:
    """The ids of all pages of the buffer, i32 [num_pages]. Each call reads the next pages."""
    ids = np.arange(num_pages, dtype=np.int32)
    return np.random.default_rng(seed).permutation(ids) if shuffled else ids


def read_starts(total: int, lengths: Sequence[int]) -> Iterator[int]:
    """Yields where each read starts: reads follow one another up to `total`, then begin at 0 again."""
    start = 0
    for length in lengths:
        start = start if start + length <= total else 0
        yield start
        start += length


def written_vllm(
    key: np.ndarray, value: np.ndarray, slots: np.ndarray, num_blocks: int
) -> tuple[np.ndarray, np.ndarray]:
    """The caches that `write_vllm` must leave if they were zeros before.

    Args:
      key, value: u16 [num_tokens, NUM_KV_HEADS, HEAD_SIZE], the bits of bfloat16.
      slots: i32 [num_tokens].
      num_blocks: blocks of the caches.

    Returns:
      K, u16 [num_blocks, NUM_KV_HEADS, HEAD_SIZE // X, BLOCK_SIZE, X], and V, u16
      [num_blocks, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE].
    """
    blocks, offsets = np.divmod(slots, BLOCK_SIZE)
    key_cache = np.zeros((num_blocks, NUM_KV_HEADS, HEAD_SIZE // X, BLOCK_SIZE, X), np.uint16)
    value_cache = np.zeros((num_blocks, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE), np.uint16)
    key_cache[blocks, :, :, offsets] = key.reshape(len(slots), NUM_KV_HEADS, HEAD_SIZE // X, X)
    value_cache[blocks, :, :, offsets] = value
    return key_cache, value_cache


def read_rows() -> list[dict[str, Any]]:
    """Reads of contiguous memory, at each size."""
    ceiling = timing.read_ceiling(READ_BYTES)
    if ceiling.rate is None:
        raise RuntimeError(ceiling.note)
    return [row(f"read-{size // MIB}MiB", size, us, note=ceiling.note) for size, us in ceiling.us.items()]


def page_rows() -> list[dict[str, Any]]:
    """Reads of pages in order and shuffled, at each size."""
    import cupy

    multiprocessors = cupy.cuda.Device().attributes["MultiProcessorCount"]
    size = min(_BUFFER_BYTES, cupy.cuda.Device().mem_info[0] // 2) // PAGE_BYTES * PAGE_BYTES
    data = cupy.arange(size // 4, dtype=cupy.uint32) * cupy.uint32(0x9E3779B9)
    sink = cupy.zeros(1, cupy.uint32)

    def kernel(unroll: int, checked: bool) -> Any:
        return cupy.RawKernel(_READ_PAGES, "read_pages", _defines(UNROLL=unroll, CHECKED=int(checked)))

    unrolls = 1, 2, 4, 8
    checked, reads = ([kernel(unroll, check) for unroll in unrolls] for check in (True, False))
    launches = [(read, blocks * multiprocessors) for read in reads for blocks in (2, 4, 8)]
    found, repeats = [], 12
    lengths = [bytes_ // PAGE_BYTES for bytes_ in PAGED_BYTES if bytes_ <= size]
    for order in ("in order", "shuffled"):
        host = page_tables(size // PAGE_BYTES, order == "shuffled")
        pages = cupy.asarray(host)
        wanted = np.bitwise_xor.reduce(cupy.asnumpy(data.reshape(-1, PAGE_BYTES // 4)[pages[: lengths[0]]]), axis=None)
        for read in checked:
            sink.fill(0)
            read((2 * multiprocessors,), (_THREADS,), (data, pages, np.int64(lengths[0]), sink))
            if int(sink[0]) != int(wanted):
                raise ValueError("wrong result: the kernel read other pages than the table names")
        order_of_calls = [n for n in lengths for _ in range(len(launches) * repeats)]
        starts = list(read_starts(len(host), order_of_calls))

        def run(pages=pages, starts=starts):
            call = iter(starts)
            for length in lengths:
                for read, blocks in launches:
                    for _ in range(repeats):
                        read((blocks,), (_THREADS,), (data, pages[next(call) :], np.int64(length), sink))
            cupy.cuda.Device().synchronize()

        times = [us for name, us in timing.kernel_times(run) if name == "read_pages"]
        for length, us in zip(lengths, fastest(times, (len(lengths), len(launches), repeats)), strict=True):
            moved = length * PAGE_BYTES
            found.append(row(f"pages-{order.replace(' ', '-')}-{moved // MIB}MiB", moved, us))
    return found


def copy_rows() -> list[dict[str, Any]]:
    """A copy of contiguous memory; bytes read and written both count."""
    ceiling = timing.copy_ceiling()
    if ceiling.rate is None:
        raise RuntimeError(ceiling.note)
    return [{"case": "copy", "rate": ceiling.rate, "note": ceiling.note}]


def vllm_write_rows() -> list[dict[str, Any]]:
    """Writes of new tokens into random slots in layout `vllm`; calls take sets of slots in turn."""
    import cupy

    rng = np.random.default_rng(0)
    key, value = (rng.integers(1, 1 << 16, (NUM_TOKENS, NUM_KV_HEADS, HEAD_SIZE)).astype(np.uint16) for _ in range(2))
    num_slots = _VLLM_BLOCKS * BLOCK_SIZE
    slots = [rng.choice(num_slots, NUM_TOKENS, replace=False).astype(np.int32) for _ in range(16)]
    tokens = cupy.asarray(key), cupy.asarray(value)
    on_gpu = [cupy.asarray(x) for x in slots]
    caches = [cupy.zeros((_VLLM_BLOCKS, NUM_KV_HEADS * HEAD_SIZE * BLOCK_SIZE), cupy.uint16) for _ in "kv"]
    sizes = {"NUM_KV_HEADS": NUM_KV_HEADS, "HEAD_SIZE": HEAD_SIZE, "BLOCK_SIZE": BLOCK_SIZE}
    found = []
    for name, writes in {"k": (1, 0), "v": (0, 1), "both": (1, 1)}.items():
        defines = _defines(**sizes, WRITES_K=writes[0], WRITES_V=writes[1])
        kernel = cupy.RawKernel(_WRITE_VLLM, "write_vllm", defines)
        for cache in caches:
            cache.fill(0)
        kernel((NUM_TOKENS,), (_THREADS,), (*tokens, on_gpu[0], *caches))
        blocks, places = np.unique(slots[0] // BLOCK_SIZE, return_inverse=True)
        expected = written_vllm(key, value, places * BLOCK_SIZE + slots[0] % BLOCK_SIZE, len(blocks))
        for cache, exact, written in zip(caches, expected, writes, strict=True):
            there = cupy.asnumpy(cache[cupy.asarray(blocks)]).reshape(exact.shape)
            if not np.array_equal(there, exact if written else np.zeros_like(exact)):
                raise ValueError("wrong result: the slots do not hold the tokens")

        def run(kernel=kernel):
            for call in range(64):
                kernel((NUM_TOKENS,), (_THREADS,), (*tokens, on_gpu[call % len(on_gpu)], *caches))
            cupy.cuda.Device().synchronize()

        times = [us for kernel_name, us in timing.kernel_times(run) if kernel_name == "write_vllm"]
        work = sum(writes) * NUM_TOKENS * NUM_KV_HEADS * HEAD_SIZE * 2 * 2
        found.append(row(f"vllm-writes-{name}", work, statistics.median(times[16:])))
    return found


def _defines(**values: int) -> tuple[str, ...]:
    """The compiler's options for these macros."""
    return tuple(f"-D{name}={value}" for name, value in values.items())


def product_rows() -> list[dict[str, Any]]:
    """XLA's product of two large matrices."""
    ceiling = timing.matmul_ceiling()
    return [{"case": "product", "rate": ceiling.rate, "unit": ceiling.unit, "note": ceiling.note}]


WORKS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "read": read_rows,
    "pages": page_rows,
    "copy": copy_rows,
    "vllm-writes": vllm_write_rows,
    "product": product_rows,
}


def run(works: dict[str, Callable[[], list[dict[str, Any]]]], out: Path | None = None) -> dict[str, Any]:
    """Runs every measurement, and returns what it writes to `out`. If one fails, its row has the reason."""
    rows: list[dict[str, Any]] = []
    report = {"op": "ceilings", **harness.environment(), "rows": rows}
    for name, measure in works.items():
        try:
            found = measure()
        except Exception as error:  # CuPy or memory is missing: the other works still count
            found = [{"case": name, "failed": harness.first_line(error)}]
        rows += found
        for line in found:
            print(_line(line), flush=True)
        harness.write(report, out)
    return report


def _line(line: dict[str, Any]) -> str:
    if "failed" in line:
        return f"{line['case']:28} {line['failed']}"
    us = f"{line['us']:9.1f} us" if "us" in line else f"{'':12}"
    return f"{line['case']:28} {us} {line['rate']:8.1f} {line.get('unit', 'GB/s')}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code, 2 where there is no GPU."""
    what = "What one GPU can do at all."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_ceilings", description=what)
    parser.add_argument("--works", type=lambda text: text.split(","), help=f"of {','.join(WORKS)}; default all")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    chosen = list(WORKS) if args.works is None else args.works
    harness.check_names(parser, "work", chosen, WORKS)
    if not harness.has_gpu("ceilings"):
        return 2
    run({name: WORKS[name] for name in chosen}, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
