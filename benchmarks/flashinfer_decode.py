"""FlashInfer's side of `benchmarks.peers.FlashInfer`: times its paged decode kernels in a process without JAX.

The process reads one line of JSON, ``{"contenders": [...], "cases": [...]}``, and compiles. After a second line it
times, and writes a line of JSON for each contender and case. There are two contenders:

    flashinfer       `BatchDecodeWithPagedKVCacheWrapper`, the better of its CUDA-core and its tensor-core kernel. Its
                     `plan`, which runs on the host before every step, is not counted.
    flashinfer-xqa   `trtllm_batch_decode_with_kv_cache` with the backend "xqa": TensorRT-LLM's kernels, which take
                     block tables as they are and need no plan. On Hopper an e4m3 cache gets a kernel of its own, which
                     rounds queries and weights to e4m3 too.

Each kernel is timed by two clocks, the sum of its kernels' times by CUPTI and the time of one call within a CUDA graph
of many, and the better of the two counts. Each result is checked before it is timed.
"""

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_WORKSPACE_BYTES = 512 << 20
TOLERANCE = 2e-2  # relative error of a result, of the norm
E4M3_TOLERANCE = 1e-1  # the same where products are in e4m3, whose 3 bits of mantissa err by 2.6% on average
XQA_BLOCK_SIZES = (16, 32, 64, 128)

Run = Callable[[int, bool], None]  # the number of the call, whether it may start before the call before it has ended


def main() -> None:
    # The compilers print to stdout: from here on that goes to stderr, and only results go to what was stdout.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    wanted = json.loads(sys.stdin.readline())
    contenders, cases = wanted["contenders"], wanted["cases"]
    reason = None
    try:
        import torch

        _compile(contenders, cases)
    except Exception as error:
        reason = _first_line(error)
    sys.stdin.readline()
    for case in cases:
        for contender in contenders:
            answer: dict[str, Any] = {"absent": reason}
            if reason is None:
                try:
                    answer = _time_case(contender, case)
                except Exception as error:
                    answer = {"absent": _first_line(error)}
                torch.cuda.empty_cache()
            results.write(json.dumps({"contender": contender, "name": case["name"], **answer}) + "\n")
            results.flush()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def refusal(contender: str, case: dict) -> str | None:
    """Says why a contender cannot do a case, as far as that is known before it is tried; None if it may."""
    if case["layout"] not in ("hnd", "nhd"):
        return f"no layout {case['layout']}"
    if contender == "flashinfer-xqa":
        if case["block_size"] not in XQA_BLOCK_SIZES:
            return f"no block size {case['block_size']}"
        if case["cache_dtype"] not in ("bfloat16", "int8", "float8_e4m3fn"):
            return f"no {case['cache_dtype']} cache for bfloat16 queries"
        if case["num_heads"] // case["num_kv_heads"] > 32:
            return "no groups of more than 32 query heads"
    return None


def block_counts(case: dict) -> list[int]:
    """Blocks that each sequence fills, the last perhaps in part."""
    return [-(-length // case["block_size"]) for length in case["seq_lens"]]


def padded_table(case: dict, indices: Sequence[int]) -> list[list[int]]:
    """Rows of block ids, one for each sequence and as wide as the longest needs; what is left of a row is 0.

    Args:
      case: as `benchmarks.peers.FlashInfer` sends it.
      indices: block ids of all sequences, one after the other.
    """
    counts = block_counts(case)
    rows, start = [], 0
    for count in counts:
        rows.append([*indices[start : start + count], *[0] * (max(counts) - count)])
        start += count
    return rows


def _dtypes(case: dict) -> tuple:
    import torch

    return torch.bfloat16, getattr(torch, case["cache_dtype"])


def _compile(contenders: Sequence[str], cases: Iterable[dict]) -> None:
    """Builds all modules side by side; if that fails, the first call of each kernel builds its own."""
    import torch
    from flashinfer import jit
    from flashinfer.jit.xqa import gen_xqa_module

    specs = {}
    for case in cases:
        query_dtype, cache_dtype = _dtypes(case)
        head_size, group = case["head_size"], case["num_heads"] // case["num_kv_heads"]
        shared = (query_dtype, cache_dtype, query_dtype, torch.int32, head_size, head_size, 0, False, False)
        if "flashinfer" in contenders and refusal("flashinfer", case) is None:
            specs["decode", shared] = lambda shared=shared: jit.gen_batch_decode_module(*shared)
            specs["prefill", shared] = lambda shared=shared: jit.gen_batch_prefill_module("fa2", *shared, False)
        if "flashinfer-xqa" in contenders and refusal("flashinfer-xqa", case) is None:
            xqa = (query_dtype, cache_dtype, case["block_size"], head_size, group, False, query_dtype)
            specs["xqa", xqa] = lambda xqa=xqa: gen_xqa_module(*xqa)
    try:
        jit.build_jit_specs([make() for make in specs.values()])
    except Exception as error:
        print(f"flashinfer: could not build ahead: {error}", file=sys.stderr)


@dataclass(frozen=True)
class _Arrays:
    """A case's arrays on the GPU.

    Attributes:
      pools: key pools and value pools, as many of each as calls rotate through, so that none finds its keys in L2.
      indices: i32, block ids of all sequences, one after the other.
      query, out: bf16 [num_seqs, num_heads, head_size].
    """

    pools: tuple[Sequence[Any], Sequence[Any]]
    indices: Any
    query: Any
    out: Any


def _arrays(case: dict) -> _Arrays:
    import torch

    per_call = sum(block_counts(case))
    query = torch.randn(len(case["seq_lens"]), case["num_heads"], case["head_size"], dtype=torch.bfloat16).cuda()
    keys, values = (_pool(case["copies"] * per_call, case).split(per_call) for _ in range(2))
    indices = torch.randperm(per_call, dtype=torch.int64).to(torch.int32)
    return _Arrays((keys, values), indices, query, torch.empty_like(query))


def _pool(num_blocks: int, case: dict) -> Any:
    import torch

    block = {
        "hnd": (case["num_kv_heads"], case["block_size"], case["head_size"]),
        "nhd": (case["block_size"], case["num_kv_heads"], case["head_size"]),
    }[case["layout"]]
    pool = torch.empty((num_blocks, *block), dtype=_dtypes(case)[1], device="cuda")
    step = max(1, (1 << 26) // (block[0] * block[1] * block[2]))
    for start in range(0, num_blocks, step):
        part = pool[start : start + step]
        part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device="cuda").to(part.dtype))
    return pool


def _ways(contender: str, case: dict, arrays: _Arrays) -> Iterator[tuple[str, float, Callable[[], Run]]]:
    """The kernels that a contender has: what each is called, how far it may err, and a function that prepares it."""
    if contender == "flashinfer":
        for tensor_cores in (False, True):
            name = "tensor cores" if tensor_cores else "CUDA cores"
            yield name, TOLERANCE, lambda tensor_cores=tensor_cores: _planned(case, arrays, tensor_cores)
    elif case["cache_dtype"] == "float8_e4m3fn":
        yield "XQA, products in e4m3", E4M3_TOLERANCE, lambda: _xqa(case, arrays)
    else:
        yield "XQA", TOLERANCE, lambda: _xqa(case, arrays)


def _planned(case: dict, arrays: _Arrays, tensor_cores: bool) -> Run:
    import flashinfer
    import torch

    counts, lens = (torch.tensor(x, dtype=torch.int32) for x in (block_counts(case), case["seq_lens"]))
    indptr = torch.zeros(len(lens) + 1, dtype=torch.int32)
    indptr[1:] = torch.cumsum(counts, 0)
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, case["layout"].upper(), use_tensor_cores=tensor_cores
    )
    wrapper.plan(
        indptr,
        arrays.indices.cuda(),
        lens - (counts - 1) * case["block_size"],  # tokens in each sequence's last block
        case["num_heads"],
        case["num_kv_heads"],
        case["head_size"],
        case["block_size"],
        q_data_type=_dtypes(case)[0],
        kv_data_type=_dtypes(case)[1],
    )

    def run(call: int, enable_pdl: bool) -> None:
        keys, values = (pool[call % case["copies"]] for pool in arrays.pools)
        wrapper.run(arrays.query, (keys, values), out=arrays.out, enable_pdl=enable_pdl)

    return run


def _xqa(case: dict, arrays: _Arrays) -> Run:
    import torch
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    table = torch.tensor(padded_table(case, arrays.indices.tolist()), dtype=torch.int32, device="cuda")
    seq_lens = torch.tensor(case["seq_lens"], dtype=torch.int32, device="cuda")
    # Its first 8 MiB are semaphores, which must be 0 at first and which every call leaves at 0.
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def run(call: int, enable_pdl: bool) -> None:
        trtllm_batch_decode_with_kv_cache(
            arrays.query,
            (arrays.pools[0][call % case["copies"]], arrays.pools[1][call % case["copies"]]),
            workspace,
            table,
            seq_lens,
            max(case["seq_lens"]),
            bmm1_scale=case["head_size"] ** -0.5,
            bmm2_scale=1.0,
            out=arrays.out,
            kv_layout=case["layout"].upper(),
            enable_pdl=enable_pdl,
            backend="xqa",
        )

    return run


def _time_case(contender: str, case: dict) -> dict[str, Any]:
    import flashinfer

    if reason := refusal(contender, case):
        return {"absent": reason}
    arrays = _arrays(case)
    found, errors, failed = {}, {}, []
    for name, tolerance, prepare in _ways(contender, case, arrays):
        try:
            run = prepare()
            arrays.out.fill_(float("nan"))
            run(0, False)
            errors[name] = _relative_error(case, arrays)
            if not errors[name] < tolerance:
                raise ValueError(f"wrong result, relative error {errors[name]:.2g}")
            for clock in (_by_kernels, _by_graph):
                try:
                    found[f"{name}, {clock.__doc__}"] = clock(run, max(24, case["copies"]))
                except Exception as error:
                    failed.append(f"{name}, {clock.__doc__}: {error}".splitlines()[0])
        except Exception as error:
            failed.append(f"{name}: {error}".splitlines()[0])
    if not found:
        return {"absent": "; ".join(failed)}
    how = min(found, key=lambda name: found[name])
    return {
        "us": found[how],
        "how": f"FlashInfer {flashinfer.__version__}, {how}",
        "relative_error": errors[how.rpartition(",")[0]],
        "all": found,
        "failed": failed,
    }


def _relative_error(case: dict, arrays: _Arrays) -> float:
    """The larger of the first and the last row's errors."""
    import torch

    ends = torch.cumsum(torch.tensor([0, *block_counts(case)]), 0).tolist()
    errors = []
    for row in (0, len(case["seq_lens"]) - 1):
        own = arrays.indices[ends[row] : ends[row + 1]].long().cuda()
        key, value = (pool[0][own].float() for pool in arrays.pools)
        if case["layout"] == "hnd":
            key, value = key.transpose(1, 2), value.transpose(1, 2)
        key, value = (x.flatten(0, 1)[: case["seq_lens"][row]].transpose(0, 1) for x in (key, value))
        grouped = arrays.query[row].float().view(case["num_kv_heads"], -1, case["head_size"])
        weights = torch.softmax(grouped @ key.transpose(1, 2) * case["head_size"] ** -0.5, -1)
        expected = (weights @ value).flatten(0, 1)
        errors.append(float((arrays.out[row].float() - expected).norm() / expected.norm()))
    return max(errors, key=lambda error: (error != error, error))  # NaN is the largest


def sums_by_call(kernels: Iterable[tuple[str, float, float]], num_calls: int) -> list[float]:
    """Microseconds of each call: the sum over its kernels.

    Args:
      kernels: name, start and duration in microseconds of what ran on the GPU; copies and memsets are left out.
      num_calls: how many calls launched them, as many kernels each.

    Raises:
      RuntimeError: calls did not launch as many kernels each.
    """
    ours = sorted((start, us) for name, start, us in kernels if "kernel" in name.lower())
    if not ours or len(ours) % num_calls:
        raise RuntimeError(f"the profiler saw {len(ours)} kernels in {num_calls} calls")
    per_call = len(ours) // num_calls
    return [sum(us for _, us in ours[i : i + per_call]) for i in range(0, len(ours), per_call)]


def _by_kernels(run: Run, num_calls: int) -> float:
    """sum of kernels"""
    import torch
    from torch.autograd import DeviceType

    for call in range(num_calls):
        run(call, False)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for call in range(num_calls):
            run(call, False)
        torch.cuda.synchronize()
    kernels = [
        (event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in profile.events() or []
        if event.device_type == DeviceType.CUDA
    ]
    return statistics.median(sums_by_call(kernels, num_calls)[num_calls // 4 :])


def _by_graph(run: Run, num_calls: int) -> float:
    """CUDA graph"""
    import torch

    run(0, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(num_calls):
            run(call, True)
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / num_calls)
    return statistics.median(times[3:])


if __name__ == "__main__":
    main()
