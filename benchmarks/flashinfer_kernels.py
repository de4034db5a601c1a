"""FlashInfer's paged kernels: for each contender the cases that it refuses, its compiled modules, and its calls.

Functions take a case as `benchmarks.peers.TorchPeers` sends it. These are the contenders:

    flashinfer         `BatchDecodeWithPagedKVCacheWrapper`: its CUDA-core and its tensor-core kernel.
    flashinfer-xqa     `trtllm_batch_decode_with_kv_cache` with the backend "xqa": TensorRT-LLM's kernels, which take
                       block tables unchanged and need no plan. On Hopper an e4m3 cache gets a kernel of its own,
                       which also rounds queries and weights to e4m3.
    flashinfer-fa2     `BatchPrefillWithPagedKVCacheWrapper` with the backend "fa2", for any number of queries.
    flashinfer-fa3     The same with the backend "fa3", which is for Hopper. Each call first makes a list of slots from
                       the block tables, in a kernel of its own; the time of that kernel counts.
    flashinfer-batch   `BatchAttention`: persistent programs, which share sequences of many queries and of few.
    flashinfer-pod     `BatchPODWithPagedKVCacheWrapper`: POD attention, one launch for prompts and single queries.

All except XQA have a `plan` that runs on the host before every step. The time of the plan is not counted.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

CONTENDERS = (
    "flashinfer",
    "flashinfer-xqa",
    "flashinfer-fa2",
    "flashinfer-fa3",
    "flashinfer-batch",
    "flashinfer-pod",
)
_WORKSPACE_BYTES = 512 << 20
TOLERANCE = 2e-2  # a result's largest error, relative to its norm
E4M3_TOLERANCE = 1e-1  # the same for products in e4m3, whose 3 bits of mantissa err by 2.6% on average
XQA_BLOCK_SIZES = (16, 32, 64, 128)
_DECODE = ("flashinfer", "flashinfer-xqa")

# A timed function. It takes the number of the call, and whether the call may start before the previous one has ended.
# It returns pairs: an index that picks rows of queries, and the outputs of these rows.
type Run = Callable[[int, bool], list[tuple[Any, Any]]]


@dataclass(frozen=True)
class Way:
    """A kernel that a contender may use.

    Attributes:
      name: its name among the contender's kernels; empty if there is only one.
      prepare: makes the plan, and returns the function that is timed.
      tolerance: the largest relative error that its results may have.
    """

    name: str
    prepare: Callable[[], Run]
    tolerance: float = TOLERANCE


@dataclass(frozen=True)
class Arrays:
    """A case's arrays on the GPU.

    Attributes:
      pools: key pools and value pools. Calls rotate through them, so that no call finds its keys in L2.
      indices: i32, the block ids of all sequences, one sequence after the other.
      query, out: bf16 [num_tokens, num_heads, head_size].
    """

    pools: tuple[Sequence[Any], Sequence[Any]]
    indices: Any
    query: Any
    out: Any

    def pair(self, call: int) -> tuple[Any, Any]:
        """The key pool and the value pool of a call."""
        keys, values = self.pools
        return keys[call % len(keys)], values[call % len(values)]


def refusal(contender: str, case: dict) -> str | None:
    """The reason why a contender cannot do a case, if that is known before the case is tried; otherwise None."""
    if case["layout"] not in ("hnd", "nhd"):
        return f"no layout {case['layout']}"
    group, most = case["num_heads"] // case["num_kv_heads"], max(case["query_lens"])
    if contender != "flashinfer-xqa":
        if case["head_size"].bit_count() > 1:  # lanes that share a head are a power of two
            return f"no heads of {case['head_size']}"
        if case["cache_dtype"] == "int8":
            return "no int8 cache for bfloat16 queries"
    if contender in _DECODE and most > 1:
        return "takes one query a sequence"
    if contender in (*_DECODE, "flashinfer-batch") and case["sliding_window"] is not None:
        return "no window" if contender == "flashinfer-batch" else "not tried with a window"
    if contender == "flashinfer-fa3" and case["cache_dtype"] != "bfloat16":
        return f"no {case['cache_dtype']} cache for bfloat16 queries"
    if contender == "flashinfer-pod":
        if case["cache_dtype"] != "bfloat16":
            return f"not tried with {case['cache_dtype']} caches"
        if most == 1 or min(case["query_lens"]) > 1:
            return "takes prompts and single queries together"
        if group > 16:
            return "no groups of more than 16 query heads"
    if contender == "flashinfer-xqa":
        if case["block_size"] not in XQA_BLOCK_SIZES:
            return f"no block size {case['block_size']}"
        if case["cache_dtype"] not in ("bfloat16", "int8", "float8_e4m3fn"):
            return f"no {case['cache_dtype']} cache for bfloat16 queries"
        if group > 32:
            return "no groups of more than 32 query heads"
    return None


def own_case(contender: str, case: dict) -> dict:
    """The case itself: all contenders take the case's blocks and layout."""
    return case


def version() -> str:
    """The name and the version of the timed library."""
    import flashinfer

    return f"FlashInfer {flashinfer.__version__}"


def block_counts(case: dict) -> list[int]:
    """How many blocks each sequence takes; the last block may be filled in part."""
    return [-(-length // case["block_size"]) for length in case["seq_lens"]]


def starts(counts: Iterable[int]) -> list[int]:
    """The starts of neighbouring ranges of these lengths, and the end of the last one."""
    found = [0]
    for count in counts:
        found.append(found[-1] + count)
    return found


def padded_table(case: dict, indices: Sequence[int]) -> list[list[int]]:
    """Rows of block ids, one for each sequence. They are padded with 0 to the width of the longest.

    Args:
      case: the case.
      indices: the block ids of all sequences, one sequence after the other.
    """
    counts = block_counts(case)
    first = starts(counts)
    return [[*indices[first[i] : first[i + 1]], *[0] * (max(counts) - counts[i])] for i in range(len(counts))]


def modules(contenders: Sequence[str], cases: Iterable[dict]) -> list[Any]:
    """The modules to build for the cases, each module once."""
    import torch
    from flashinfer import jit
    from flashinfer.jit.xqa import gen_xqa_module

    makers: dict[Any, Callable[[], Any]] = {}
    for case in cases:
        query_dtype, cache_dtype = dtypes(case)
        size, group = case["head_size"], case["num_heads"] // case["num_kv_heads"]
        window = case["sliding_window"] is not None
        of_heads = (query_dtype, cache_dtype, query_dtype, torch.int32, size, size, 0)
        shared = (*of_heads, window, False)
        pod = (query_dtype, cache_dtype, query_dtype, size, 0, window, False, False, torch.int32, 0, window, False)
        xqa = (query_dtype, cache_dtype, case["block_size"], size, group, False, query_dtype)
        decode = ("decode", jit.gen_batch_decode_module, shared)
        fa2, fa3 = (("prefill", jit.gen_batch_prefill_module, (name, *shared, False)) for name in ("fa2", "fa3"))
        needed = {
            "flashinfer": (decode, fa2),
            "flashinfer-xqa": (("xqa", gen_xqa_module, xqa),),
            "flashinfer-fa2": (fa2,),
            "flashinfer-fa3": (fa3,),
            "flashinfer-batch": (("batch", jit.gen_batch_attention_module, (*of_heads, False, False)),),
            "flashinfer-pod": (fa2, ("pod", jit.gen_batch_pod_module, pod)),
        }
        for contender in contenders:
            if refusal(contender, case) is None:
                for name, make, args in needed[contender]:
                    makers[name, args] = lambda make=make, args=args: make(*args)
    return [make() for make in makers.values()]


def dtypes(case: dict) -> tuple:
    """The dtypes of the queries and of the caches."""
    import torch

    return torch.bfloat16, getattr(torch, case["cache_dtype"])


def ways(contender: str, case: dict, arrays: Arrays) -> Iterator[Way]:
    """The kernels that a contender has for a case."""
    if contender == "flashinfer":
        yield Way("CUDA cores", lambda: _decode(case, arrays, tensor_cores=False))
        yield Way("tensor cores", lambda: _decode(case, arrays, tensor_cores=True))
    elif contender == "flashinfer-xqa" and case["cache_dtype"] == "float8_e4m3fn":
        yield Way("XQA, products in e4m3", lambda: _xqa(case, arrays), E4M3_TOLERANCE)
    elif contender == "flashinfer-xqa":
        yield Way("XQA", lambda: _xqa(case, arrays))
    elif contender == "flashinfer-batch":
        yield Way("BatchAttention", lambda: _batch(case, arrays))
    elif contender == "flashinfer-pod":
        yield Way("POD", lambda: _pod(case, arrays))
    else:
        backend = contender.removeprefix("flashinfer-")
        yield Way(backend, lambda: _prefill(case, arrays, backend))


def _i32(values: Iterable[int]) -> Any:
    import torch

    return torch.tensor(list(values), dtype=torch.int32)


def _workspace() -> Any:
    import torch

    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _tables(case: dict, arrays: Arrays, seqs: Sequence[int]) -> tuple[Any, Any, Any]:
    """Some sequences' block tables as plans take them: starts, all block ids, and the tokens in each last block."""
    import torch

    counts, size = block_counts(case), case["block_size"]
    first = starts(counts)
    ids = torch.cat([arrays.indices[first[i] : first[i + 1]] for i in seqs]).cuda()
    last = _i32(case["seq_lens"][i] - (counts[i] - 1) * size for i in seqs)
    return _i32(starts(counts[i] for i in seqs)), ids, last


def _heads(case: dict) -> tuple[int, int, int]:
    return case["num_heads"], case["num_kv_heads"], case["head_size"]


def _options(case: dict) -> dict[str, Any]:
    """The keywords that all plans take."""
    query_dtype, cache_dtype = dtypes(case)
    return {"q_data_type": query_dtype, "kv_data_type": cache_dtype}


def _window_left(case: dict) -> int:
    """How many tokens before its own token a query sees; -1 for all."""
    return -1 if case["sliding_window"] is None else case["sliding_window"] - 1


def _everyone(case: dict) -> range:
    return range(len(case["seq_lens"]))


def _run_wrapper(wrapper: Any, arrays: Arrays, call: int, enable_pdl: bool) -> list[tuple[Any, Any]]:
    """Calls a wrapper that has made its plan. With wrapper and arrays bound, this is a `Run`."""
    wrapper.run(arrays.query, arrays.pair(call), out=arrays.out, enable_pdl=enable_pdl)
    return [(slice(None), arrays.out)]


def _decode(case: dict, arrays: Arrays, tensor_cores: bool) -> Run:
    import flashinfer

    layout = case["layout"].upper()
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(), layout, use_tensor_cores=tensor_cores)
    wrapper.plan(*_tables(case, arrays, _everyone(case)), *_heads(case), case["block_size"], **_options(case))
    return functools.partial(_run_wrapper, wrapper, arrays)


def _xqa(case: dict, arrays: Arrays) -> Run:
    import torch
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    table = torch.tensor(padded_table(case, arrays.indices.tolist()), dtype=torch.int32, device="cuda")
    seq_lens = _i32(case["seq_lens"]).cuda()
    workspace = _workspace()  # its first 8 MiB are semaphores, which must be 0 at first, and which calls leave at 0

    def run(call: int, enable_pdl: bool) -> list[tuple[Any, Any]]:
        trtllm_batch_decode_with_kv_cache(
            arrays.query,
            arrays.pair(call),
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
        return [(slice(None), arrays.out)]

    return run


def _prefill(case: dict, arrays: Arrays, backend: str) -> Run:
    import flashinfer

    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(), case["layout"].upper(), backend=backend)
    tables = _tables(case, arrays, _everyone(case))
    options = {"causal": True, "window_left": _window_left(case), **_options(case)}
    wrapper.plan(_i32(starts(case["query_lens"])), *tables, *_heads(case), case["block_size"], **options)
    return functools.partial(_run_wrapper, wrapper, arrays)


def _batch(case: dict, arrays: Arrays) -> Run:
    import flashinfer
    import torch

    wrapper = flashinfer.BatchAttention(case["layout"].upper())
    first, ids, _ = _tables(case, arrays, _everyone(case))
    num_heads, num_kv_heads, size = _heads(case)
    heads = num_heads, num_kv_heads, size, size, case["block_size"]
    lens = _i32(starts(case["query_lens"])), first, ids, _i32(case["seq_lens"])
    wrapper.plan(*(x.cuda() for x in lens), *heads, causal=True, **_options(case))
    lse = torch.empty(arrays.query.shape[:2], dtype=torch.float32, device="cuda")

    def run(call: int, enable_pdl: bool) -> list[tuple[Any, Any]]:
        wrapper.run(arrays.query, arrays.pair(call), arrays.out, lse)
        return [(slice(None), arrays.out)]

    return run


def _pod(case: dict, arrays: Arrays) -> Run:
    import flashinfer

    query_lens = case["query_lens"]
    first = starts(query_lens)
    plans, rows = [], []
    for single in (False, True):  # prompts are planned first
        seqs = [i for i in _everyone(case) if (query_lens[i] == 1) is single]
        plans += [_i32(starts(query_lens[i] for i in seqs)), *_tables(case, arrays, seqs)]
        rows.append(_i32(row for i in seqs for row in range(first[i], first[i + 1])).long().cuda())
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(_workspace(), case["layout"].upper())
    wrapper.plan(*plans, *_heads(case), case["block_size"], window_left=_window_left(case), **_options(case))
    prompts, singles = (arrays.query[index] for index in rows)

    def run(call: int, enable_pdl: bool) -> list[tuple[Any, Any]]:
        pools = arrays.pair(call)
        outs = wrapper.run(prompts, pools, singles, pools, causal_p=True, enable_pdl=enable_pdl)
        return list(zip(rows, outs, strict=True))

    return run
