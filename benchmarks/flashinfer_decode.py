"""FlashInfer's side of `benchmarks.peers.FlashInfer`: times its paged decode kernels in a process without JAX.

Reads one line of JSON with all cases, compiles, waits for a second line, then times and writes a line for each
case. Each case takes the better of the CUDA-core and the tensor-core kernel, and for each of them the better of two
clocks: the sum of its kernels' times by CUPTI, and the time of one call within a CUDA graph of many. `plan`, which
runs on the host before every step, is not counted.
"""

import json
import os
import statistics
import sys
from typing import Any

_WORKSPACE_BYTES = 512 << 20


def main() -> None:
    # Whatever the compilers print goes to stderr; stdout carries results only.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    cases = json.loads(sys.stdin.readline())
    reason = None
    try:
        import torch

        _compile(cases)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    sys.stdin.readline()
    workspace = None
    for case in cases:
        answer: dict[str, Any] = {"absent": reason}
        if reason is None:
            try:
                if workspace is None:
                    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
                answer = _time_case(case, workspace)
            except Exception as error:
                answer = {"absent": f"{type(error).__name__}: {error}".splitlines()[0]}
            torch.cuda.empty_cache()
        results.write(json.dumps({"name": case["name"], **answer}) + "\n")
        results.flush()


def _dtypes(case: dict) -> tuple:
    import torch

    return torch.bfloat16, getattr(torch, case["cache_dtype"])


def _compile(cases: list[dict]) -> None:
    """Builds all modules side by side; if that fails, `plan` builds them one by one."""
    import torch
    from flashinfer import jit

    specs = {}
    for case in cases:
        query_dtype, cache_dtype = _dtypes(case)
        head_size = case["head_size"]
        shared = (query_dtype, cache_dtype, query_dtype, torch.int32, head_size, head_size, 0, False, False)
        specs[head_size, cache_dtype] = (shared, (*shared, False))
    try:
        modules = [jit.gen_batch_decode_module(*decode) for decode, _ in specs.values()]
        modules += [jit.gen_batch_prefill_module("fa2", *prefill) for _, prefill in specs.values()]
        jit.build_jit_specs(modules)
    except Exception as error:
        print(f"flashinfer: could not build ahead: {error}", file=sys.stderr)


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


def _time_case(case: dict, workspace: Any) -> dict[str, Any]:
    import flashinfer
    import torch

    if case["layout"] not in ("hnd", "nhd"):
        return {"absent": f"no layout {case['layout']}"}
    block_size, copies = case["block_size"], case["copies"]
    lens = torch.tensor(case["seq_lens"], dtype=torch.int32)
    blocks = (lens + block_size - 1) // block_size
    per_call = int(blocks.sum())
    indptr = torch.zeros(len(lens) + 1, dtype=torch.int32)
    indptr[1:] = torch.cumsum(blocks, 0)
    indices = torch.randperm(per_call, dtype=torch.int64).to(torch.int32)
    last = lens - (blocks - 1) * block_size
    # Calls rotate through copies of the pool, under one plan.
    pools = [_pool(copies * per_call, case).split(per_call) for _ in range(2)]
    query = torch.randn(len(lens), case["num_heads"], case["head_size"], dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(query)
    found, failed = {}, []
    for tensor_cores in (False, True):
        kind = "tensor cores" if tensor_cores else "CUDA cores"
        try:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, case["layout"].upper(), use_tensor_cores=tensor_cores
            )
            wrapper.plan(
                indptr,
                indices.cuda(),
                last,
                case["num_heads"],
                case["num_kv_heads"],
                case["head_size"],
                block_size,
                q_data_type=_dtypes(case)[0],
                kv_data_type=_dtypes(case)[1],
            )

            def run(i, enable_pdl, wrapper=wrapper):
                wrapper.run(query, (pools[0][i % copies], pools[1][i % copies]), out=out, enable_pdl=enable_pdl)

            run(0, False)
            _check(case, query, pools, indptr, indices, out)
            for clock in (_by_kernels, _by_graph):
                try:
                    found[f"{kind}, {clock.__doc__}"] = clock(run, max(24, copies))
                except Exception as error:
                    failed.append(f"{kind}, {clock.__doc__}: {error}".splitlines()[0])
        except Exception as error:
            failed.append(f"{kind}: {error}".splitlines()[0])
    if not found:
        return {"absent": "; ".join(failed)}
    how = min(found, key=lambda name: found[name])
    return {"us": found[how], "how": f"FlashInfer {flashinfer.__version__}, {how}", "all": found, "failed": failed}


def _check(case, query, pools, indptr, indices, out) -> None:
    """Raises unless the first and the last row are right."""
    import torch

    for row in (0, len(case["seq_lens"]) - 1):
        own = indices[int(indptr[row]) : int(indptr[row + 1])].long().cuda()
        key, value = (pool[0][own].float() for pool in pools)
        if case["layout"] == "hnd":
            key, value = key.transpose(1, 2), value.transpose(1, 2)
        key, value = (x.flatten(0, 1)[: case["seq_lens"][row]].transpose(0, 1) for x in (key, value))
        grouped = query[row].float().view(case["num_kv_heads"], -1, case["head_size"])
        weights = torch.softmax(grouped @ key.transpose(1, 2) * case["head_size"] ** -0.5, -1)
        expected = (weights @ value).flatten(0, 1)
        error = float((out[row].float() - expected).norm() / expected.norm())
        if not error < 2e-2:
            raise ValueError(f"wrong result, relative error {error:.2g}")


def _by_kernels(run, num_calls: int) -> float:
    """sum of kernels"""
    import torch
    from torch.autograd import DeviceType

    for i in range(num_calls):
        run(i, False)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for i in range(num_calls):
            run(i, False)
        torch.cuda.synchronize()
    kernels = [
        event.time_range
        for event in profile.events() or []
        if event.device_type == DeviceType.CUDA and "Kernel" in event.name
    ]
    if not kernels or len(kernels) % num_calls:
        raise RuntimeError(f"the profiler saw {len(kernels)} kernels in {num_calls} calls")
    kernels.sort(key=lambda span: span.start)
    per_call = len(kernels) // num_calls
    sums = [sum(k.elapsed_us() for k in kernels[i : i + per_call]) for i in range(0, len(kernels), per_call)]
    return statistics.median(sums[num_calls // 4 :])


def _by_graph(run, num_calls: int) -> float:
    """CUDA graph"""
    import torch

    run(0, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(num_calls):
            run(i, True)
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
