"""PyTorch's side of `benchmarks.peers.TorchPeers`: times peers' paged kernels in a process without JAX.

The process reads one line of JSON, ``{"contenders": [...], "cases": [...]}``, and compiles their kernels. When it has
read a second line, it times the kernels, and writes a line of JSON for each contender and case. The contenders are in
`benchmarks.flashinfer_kernels` and `benchmarks.vllm_kernels`. If a contender has several ways of doing a case, the
fastest one counts.

Each way is timed by two clocks: the sum of its kernels' times by CUPTI, and the time of one call within a CUDA graph of
many calls. The lower time counts. By the first clock it is also timed after pauses, as in `timing.time_calls`; the
fastest way counts there, too. A case may set other "seconds" of a measurement, and "rested" to false, which leaves out
the calls after pauses. Each result is checked before it is timed.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import flashinfer_kernels, vllm_kernels
from benchmarks.flashinfer_kernels import Arrays, Run, block_counts, dtypes, starts
from benchmarks.report import first_line

_SECONDS = 0.1  # about how long one measurement lasts, if a case does not say so
_RESTED_CALLS, _PAUSE = 4, 0.03  # as in `timing`, which needs JAX
_CHECKED = 16  # how many queries of a sequence are checked


def main() -> None:
    # The compilers print to stdout. From here on, their text goes to stderr, and only results go to the real stdout.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    wanted = json.loads(sys.stdin.readline())
    contenders, cases = wanted["contenders"], wanted["cases"]
    reason = None
    try:
        import torch

        for library in (flashinfer_kernels, vllm_kernels):
            if own := [name for name in contenders if name in library.CONTENDERS]:
                _compile(library.modules(own, cases))
    except Exception as error:
        reason = first_line(error)
    sys.stdin.readline()
    for contender in contenders:  # if one breaks the process, earlier answers are kept
        for case in cases:
            answer: dict[str, Any] = {"absent": reason}
            if reason is None:
                try:
                    answer = _time_case(contender, case)
                except Exception as error:
                    answer = {"absent": first_line(error)}
                torch.cuda.empty_cache()
            results.write(json.dumps({"contender": contender, "name": case["name"], **answer}) + "\n")
            results.flush()


def module_of(contender: str) -> Any:
    """The module that knows a contender."""
    return vllm_kernels if contender in vllm_kernels.CONTENDERS else flashinfer_kernels


def _compile(specs: Sequence[Any]) -> None:
    """Builds all modules side by side. If one of them fails, builds each one alone, so that the others succeed."""
    if not specs:
        return
    from flashinfer import jit

    try:
        jit.build_jit_specs(specs)
    except Exception as error:
        print(f"flashinfer: could not build all: {first_line(error)}", file=sys.stderr)
        for spec in specs:
            try:
                jit.build_jit_specs([spec])
            except Exception as error:
                print(f"flashinfer: could not build {spec.name}: {first_line(error)}", file=sys.stderr)


def _arrays(case: dict) -> Arrays:
    import torch

    per_call = sum(block_counts(case))
    shape = sum(case["query_lens"]), case["num_heads"], case["head_size"]
    query = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    keys, values = (_pool(case["copies"] * per_call, case).split(per_call) for _ in range(2))
    indices = torch.randperm(per_call, dtype=torch.int64).to(torch.int32)
    return Arrays((keys, values), indices, query, torch.empty_like(query))


def _pool(num_blocks: int, case: dict) -> Any:
    import torch

    block = {
        "hnd": (case["num_kv_heads"], case["block_size"], case["head_size"]),
        "nhd": (case["block_size"], case["num_kv_heads"], case["head_size"]),
    }[case["layout"]]
    pool = torch.empty((num_blocks, *block), dtype=dtypes(case)[1], device="cuda")
    step = max(1, (1 << 26) // (block[0] * block[1] * block[2]))
    for start in range(0, num_blocks, step):
        part = pool[start : start + step]
        part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device="cuda").to(part.dtype))
    return pool


def _time_case(contender: str, case: dict) -> dict[str, Any]:
    kernels = module_of(contender)
    if reason := kernels.refusal(contender, case):
        return {"absent": reason}
    case = kernels.own_case(contender, case)
    arrays = _arrays(case)
    clocks = {"sum of kernels": by_kernels, "CUDA graph": by_graph}
    found, rested, errors, failed = {}, [], {}, []
    for way in kernels.ways(contender, case, arrays):
        try:
            run = way.prepare()
            arrays.out.fill_(float("nan"))
            errors[way.name] = _relative_error(case, arrays, run(0, False))
            if not errors[way.name] < way.tolerance:
                raise ValueError(f"wrong result, relative error {errors[way.name]:.2g}")
            num_calls = _num_calls(case, run)
            for name, clock in clocks.items():
                try:
                    found[f"{way.name}, {name}"] = clock(run, num_calls)
                except Exception as error:
                    failed.append(f"{way.name}, {name}: {error}".splitlines()[0])
            if case.get("rested", True):
                rested.append(by_kernels(run, _RESTED_CALLS, pause=_PAUSE))
        except Exception as error:
            failed.append(f"{way.name}: {error}".splitlines()[0])
    if not found:
        return {"absent": "; ".join(failed)}
    how = min(found, key=lambda name: found[name])
    return {
        "us": found[how],
        **({"rested_us": min(rested)} if rested else {}),
        "how": f"{kernels.version()}, {how}",
        "relative_error": errors[how.rpartition(",")[0]],
        "all": found,
        "failed": failed,
    }


def _relative_error(case: dict, arrays: Arrays, outputs: Iterable[tuple[Any, Any]]) -> float:
    """The largest error in the first, the middle and the last sequence, over some of their queries."""
    import torch

    out = torch.full_like(arrays.out, float("nan"))
    for rows, part in outputs:
        out[rows] = part
    blocks, queries = (starts(counts) for counts in (block_counts(case), case["query_lens"]))
    errors = []
    for seq in sorted({0, len(case["seq_lens"]) // 2, len(case["seq_lens"]) - 1}):
        length, num_queries = case["seq_lens"][seq], case["query_lens"][seq]
        own = arrays.indices[blocks[seq] : blocks[seq + 1]].long().to(out.device)
        key, value = (pool[0][own].float() for pool in arrays.pools)
        if case["layout"] == "hnd":
            key, value = key.transpose(1, 2), value.transpose(1, 2)
        key, value = (x.flatten(0, 1)[:length].transpose(0, 1) for x in (key, value))  # [kv heads, tokens, head size]
        chosen = torch.linspace(0, num_queries - 1, min(_CHECKED, num_queries)).long().to(out.device)
        rows, seen = queries[seq] + chosen, length - num_queries + chosen
        query = arrays.query[rows].float().unflatten(1, (case["num_kv_heads"], -1))
        distance = seen[:, None] - torch.arange(length, device=out.device)
        hidden = (distance < 0) | (distance >= (case["sliding_window"] or length))
        logits = torch.einsum("nkgd,ktd->nkgt", query, key) * case["head_size"] ** -0.5
        weights = torch.softmax(logits.masked_fill(hidden[:, None, None], float("-inf")), -1)
        expected = torch.einsum("nkgt,ktd->nkgd", weights, value).flatten(1, 2)
        errors.append(float((out[rows].float() - expected).norm() / expected.norm()))
    return max(errors, key=lambda error: (error != error, error))  # NaN counts as the largest


def _num_calls(case: dict, run: Run) -> int:
    """Chooses the number of calls of a measurement: as many as fit into its time, within bounds."""
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    run(1, False)
    torch.cuda.synchronize()
    return max(6, min(int(case.get("seconds", _SECONDS) / (time.perf_counter() - start)), max(24, case["copies"])))


def sums_by_call(kernels: Iterable[tuple[str, float, float]], num_calls: int) -> list[float]:
    """Microseconds of each call: the sum over its kernels.

    Args:
      kernels: name, start and duration in microseconds of everything on the GPU. Copies and memsets are left out.
      num_calls: how many calls launched them. All calls launch the same number of kernels.

    Raises:
      RuntimeError: the calls did not launch the same number of kernels.
    """
    ours = sorted((start, us) for name, start, us in kernels if "kernel" in name.lower())
    if not ours or len(ours) % num_calls:
        raise RuntimeError(f"the profiler saw {len(ours)} kernels in {num_calls} calls")
    per_call = len(ours) // num_calls
    return [sum(us for _, us in ours[i : i + per_call]) for i in range(0, len(ours), per_call)]


def by_kernels(run: Run, num_calls: int, pause: float = 0) -> float:
    """The microseconds of a call: the median, over calls with pauses between them, of the sum of its kernels' times."""
    import torch
    from torch.autograd import DeviceType

    for call in range(num_calls):
        run(call, False)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for call in range(num_calls):
            if pause:
                torch.cuda.synchronize()
                time.sleep(pause)
            run(call, False)
        torch.cuda.synchronize()
    kernels = [
        (event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in profile.events() or []
        if event.device_type == DeviceType.CUDA
    ]
    return statistics.median(sums_by_call(kernels, num_calls)[num_calls // 4 :])


def by_graph(run: Run, num_calls: int) -> float:
    """The microseconds of a call within a CUDA graph of `num_calls` calls: the median over launches of the graph."""
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
