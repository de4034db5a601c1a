"""FlashAttention 3 as vLLM ships it, over paged caches: the cases that it refuses, and its calls.

Functions take a case as `benchmarks.peers.TorchPeers` sends it. These are the contenders:

    vllm-fa3           Pages of the case's block size, which FlashAttention copies by `cp.async`.
    vllm-fa3-128       Pages of 128 tokens, which FlashAttention copies by TMA.

Its caches have the layout "nhd". Queries get the caches' dtype, as in vLLM. If queries are few, each contender has two
ways: contexts are not split, or FlashAttention chooses the splits. The scheduler's metadata is made before the calls,
and its time is not counted: vLLM makes it once in a step, for all layers.

The kernels are in vLLM's wheel: install `vllm`, or extract `vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so` from it into a
folder on Python's path.
"""

import functools
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.flashinfer_kernels import E4M3_TOLERANCE, TOLERANCE, Arrays, Run, Way, padded_table, starts

CONTENDERS = "vllm-fa3", "vllm-fa3-128"
_LIBRARY = "vllm_flash_attn/_vllm_fa3_C.abi3.so"
_FEW_QUERIES = 64  # up to this many queries a sequence, contexts may be split
_PAGE_OF_TMA = 128


def refusal(contender: str, case: dict) -> str | None:
    """The reason why a contender cannot do a case, or None."""
    if case["cache_dtype"] not in ("bfloat16", "float8_e4m3fn"):
        return f"no {case['cache_dtype']} cache"
    if case["head_size"] > 256:
        return f"no heads of {case['head_size']}"
    return None


def own_case(contender: str, case: dict) -> dict:
    """The case with the pages and the layout that the contender takes."""
    block_size = _PAGE_OF_TMA if contender == "vllm-fa3-128" else case["block_size"]
    return {**case, "layout": "nhd", "block_size": block_size}


def modules(contenders: Sequence[str], cases: Iterable[dict]) -> list[Any]:
    """Returns nothing to compile: the wheel has compiled kernels."""
    return []


def version() -> str:
    """The name and the version of the timed library."""
    try:
        return f"vLLM {importlib.metadata.version('vllm')}'s FA3"
    except importlib.metadata.PackageNotFoundError:
        return "vLLM's FA3"


def ways(contender: str, case: dict, arrays: Arrays) -> Iterator[Way]:
    """The ways that a contender has for a case."""
    tolerance = TOLERANCE if case["cache_dtype"] == "bfloat16" else E4M3_TOLERANCE
    yield Way("whole contexts", lambda: _fa3(case, arrays, num_splits=1), tolerance)
    if min(case["query_lens"]) <= _FEW_QUERIES:
        yield Way("splits", lambda: _fa3(case, arrays, num_splits=0), tolerance)


@functools.cache
def _library() -> Any:
    """The library's functions.

    Raises:
      ImportError: vLLM is not installed, or its wheel has no FlashAttention 3.
    """
    found = importlib.util.find_spec("vllm")
    for folder in (found and found.submodule_search_locations) or ():
        if (path := Path(folder, _LIBRARY)).exists():
            import torch

            torch.ops.load_library(str(path))
            return torch.ops._vllm_fa3_C
    raise ImportError(f"no vllm/{_LIBRARY} on Python's path")


def _fa3(case: dict, arrays: Arrays, num_splits: int) -> Run:
    import torch

    library = _library()
    num_seqs, num_heads, num_kv_heads = len(case["seq_lens"]), case["num_heads"], case["num_kv_heads"]
    table = torch.tensor(padded_table(case, arrays.indices.tolist()), dtype=torch.int32, device="cuda")
    seq_lens = torch.tensor(list(case["seq_lens"]), dtype=torch.int32, device="cuda")
    query_start_loc = torch.tensor(starts(case["query_lens"]), dtype=torch.int32, device="cuda")
    most_queries, longest = max(case["query_lens"]), max(case["seq_lens"])
    window = -1 if case["sliding_window"] is None else case["sliding_window"] - 1
    dtype = getattr(torch, case["cache_dtype"])
    query, factors = arrays.query, (None,) * 3
    if case["cache_dtype"] != "bfloat16":
        query, factors = query.to(dtype), (torch.ones((num_seqs, num_kv_heads), device="cuda"),) * 3
    metadata = library.get_scheduler_metadata(
        num_seqs,
        most_queries,
        longest,
        num_heads,
        num_kv_heads,
        case["head_size"],
        case["head_size"],  # the size of values
        dtype,
        seq_lens,
        query_start_loc,
        *(None,) * 4,  # starts of keys and of new keys, used queries, padding on the left
        case["block_size"],
        0,  # new keys
        True,  # causal
        window,
        0,  # no token behind the query's own
        False,  # soft cap
        num_splits,
        None,  # whether heads of a group are packed: FlashAttention chooses
        0,  # multiprocessors left free
    )

    def run(call: int, enable_pdl: bool) -> list[tuple[Any, Any]]:
        library.fwd(
            query,
            *arrays.pair(call),
            *(None,) * 3,  # new keys, new values, values of queries
            arrays.out,
            query_start_loc,
            *(None,) * 3,  # starts of keys and of new keys, used queries
            seq_lens,
            most_queries,
            longest,
            table,
            *(None,) * 5,  # the batch's index, padding on the left, rotation
            *factors,
            case["head_size"] ** -0.5,
            True,  # causal
            window,
            0,
            0.0,  # soft cap
            True,  # interleaved rotation
            metadata,
            num_splits,
            None,
            0,
            None,  # sinks
            1,  # processes that share the context, this one's number and the lengths of all
            0,
            None,
        )
        return [(slice(None), arrays.out)]

    return run
