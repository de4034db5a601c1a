"""Times multi-head latent attention by FlashMLA and by FlashAttention 3, as vLLM ships both, in PyTorch's process.

`python -m benchmarks.mla_peers CASE ...` prints a line of JSON for each case and peer. A peer is timed in a CUDA graph
of many calls, which take block tables in turn. The schedule is made before the calls, and its time is not counted: vLLM
makes it once in a step, for all layers. The libraries are in vLLM's wheel: install `vllm`, or extract
`vllm/_flashmla_C.abi3.so` and `vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so` from the wheel into a folder on Python's path.
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.mla_cases import BLOCK_SIZE, BY_NAME, LATENT_SIZE, SCALE, VALUE_SIZE, Case

_CALLS = 16  # calls in a graph


def main(names: list[str]) -> None:
    """Times both peers on the named cases."""
    import torch

    for name in names:
        case = BY_NAME[name]
        arrays = _Arrays(case)
        for peer, ways in (("flash-mla", [_flash_mla]), ("vllm-fa3", [_fa3(0), _fa3(1)])):
            row = {"case": name, "contender": peer, "kind": "peer"}
            try:
                times = []
                for way in ways:
                    run = way(arrays)
                    out = run(0)
                    torch.cuda.synchronize()
                    wanted = arrays.expected()
                    error = float((out[:4].float() - wanted).norm() / wanted.norm())
                    if not error < 2e-2:
                        raise ValueError(f"relative error {error:.2g}")
                    times.append(_time(run))
                row |= {"us": min(times), "error": error}
            except Exception as error:
                row["reason"] = f"{type(error).__name__}: {error}".splitlines()[0]
            print(json.dumps(row), flush=True)
        del arrays
        torch.cuda.empty_cache()


class _Arrays:
    """The arrays of a case, on the GPU."""

    def __init__(self, case: Case):
        import torch

        generator = torch.Generator("cuda").manual_seed(0)
        tables, num_blocks = case.tables()
        self.case, num_seqs = case, len(case.lengths)

        def normal(*shape: int) -> Any:
            return torch.randn(shape, dtype=torch.bfloat16, device="cuda", generator=generator)

        self.query = normal(num_seqs, case.num_queries, case.num_heads, LATENT_SIZE)
        self.cache = normal(num_blocks, BLOCK_SIZE, 1, LATENT_SIZE)
        self.tables = torch.tensor(tables, device="cuda")
        self.lengths = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")

    def expected(self) -> Any:
        """Attention of the first four sequences, in float32: [4, num_queries, num_heads, VALUE_SIZE]."""
        import torch

        results = []
        for i, length in enumerate(self.case.lengths[:4]):
            latents = self.cache[self.tables[0, i].long()].reshape(-1, LATENT_SIZE)[:length].float()
            logits = self.query[i].float() @ latents.T * SCALE
            last = length - self.case.num_queries + torch.arange(self.case.num_queries, device="cuda")
            seen = torch.arange(length, device="cuda")[None, :] <= last[:, None]
            logits = logits.masked_fill(~seen[:, None], float("-inf"))
            results.append(torch.softmax(logits, -1) @ latents[:, :VALUE_SIZE])
        return torch.stack(results)


def _flash_mla(arrays: _Arrays) -> Callable[[int], Any]:
    library = _library("_flashmla_C", "_flashmla_C.abi3.so")
    common = arrays.query, arrays.cache, VALUE_SIZE, arrays.lengths
    *_, schedule, num_splits = library.dense_decode_fwd(*common, arrays.tables[0], SCALE, True, None, None, None)

    def run(call: int) -> Any:
        table = arrays.tables[call % len(arrays.tables)]
        return library.dense_decode_fwd(*common, table, SCALE, True, schedule, num_splits, None)[0]

    return run


def _fa3(num_splits: int) -> Callable[[_Arrays], Callable[[int], Any]]:
    def way(arrays: _Arrays) -> Callable[[int], Any]:
        import torch

        library = _library("_vllm_fa3_C", "vllm_flash_attn/_vllm_fa3_C.abi3.so")
        case, num_seqs, longest = arrays.case, len(arrays.case.lengths), max(arrays.case.lengths)
        rope = LATENT_SIZE - VALUE_SIZE
        query = arrays.query.reshape(-1, case.num_heads, LATENT_SIZE)
        of_value, of_rope = query[..., :VALUE_SIZE].contiguous(), query[..., VALUE_SIZE:].contiguous()
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * case.num_queries
        metadata = library.get_scheduler_metadata(
            num_seqs, case.num_queries, longest, case.num_heads, 1, rope, VALUE_SIZE, torch.bfloat16, arrays.lengths,
            starts, *(None,) * 4, BLOCK_SIZE, 0, True, -1, -1, False, num_splits, None, 0,
        )  # fmt: skip

        def run(call: int) -> Any:
            out = library.fwd(
                of_rope, arrays.cache[..., VALUE_SIZE:], arrays.cache[..., :VALUE_SIZE], None, None, of_value, None,
                starts, *(None,) * 3, arrays.lengths, case.num_queries, longest,
                arrays.tables[call % len(arrays.tables)], *(None,) * 8, SCALE, True, -1, -1, 0.0, True, metadata,
                num_splits, None, 0, None, 1, 0, None,
            )  # fmt: skip
            return out[0].reshape(num_seqs, case.num_queries, case.num_heads, VALUE_SIZE)

        return run

    return way


def _library(name: str, file: str) -> Any:
    """The functions of a library in vLLM's folder on Python's path."""
    import torch

    for folder in sys.path:
        if (path := Path(folder, "vllm", file)).exists():
            torch.ops.load_library(str(path))
            return getattr(torch.ops, name)
    raise ImportError(f"no vllm/{file} on Python's path")


def _time(run: Callable[[int], Any]) -> float:
    """Microseconds of a call: the median over replays of a graph of many calls."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(_CALLS):
            run(call)
    times = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / _CALLS)
    return statistics.median(times[2:])


if __name__ == "__main__":
    main(sys.argv[1:])
