"""PyTorch's side of the benchmarks with neither a GPU nor PyTorch: stand-ins attend, in NumPy, as they are told.

A stand-in knows the arguments of FlashInfer 0.5.3, or of vLLM 0.33's FlashAttention 3, by name and order. Its result is
right only if it is told right.
"""

import dataclasses
import sys
import types

import numpy as np
import pytest

from benchmarks import bench_decode, cases, flashinfer_kernels, peers, torch_process, vllm_kernels

CASE = cases.Case("a", (40, 17, 64, 33), 4, 2, 8, query_lens=(1, 17, 5, 1))
CONTENDERS = ("flashinfer-fa2", "flashinfer-fa3", "flashinfer-batch", "flashinfer-pod")


class Tensor(np.ndarray):
    """The part of PyTorch's tensors that the benchmarks use."""

    device = "cpu"

    def cuda(self):
        return self

    def to(self, device):
        return self

    def long(self):
        return self.astype(np.int64)

    def float(self):
        return self.astype(np.float32)

    def transpose(self, a, b):
        return self.swapaxes(a, b)

    def flatten(self, start, end):
        return self.reshape(*self.shape[:start], -1, *self.shape[end + 1 :])

    def unflatten(self, axis, sizes):
        return self.reshape(*self.shape[:axis], *sizes, *self.shape[axis + 1 :])

    def masked_fill(self, mask, value):
        return np.where(mask, value, self).view(Tensor)

    def norm(self):
        return np.linalg.norm(self)


def of(x):
    return np.asarray(x).view(Tensor)


def softmax(x, axis):
    weights = np.exp(x - x.max(axis=axis, keepdims=True))
    return of(weights / weights.sum(axis=axis, keepdims=True))


TORCH = {
    "uint8": np.uint8, "int32": np.int32, "float32": np.float32, "bfloat16": np.float32,
    "tensor": lambda values, dtype, device=None: of(np.array(values, dtype)),
    "zeros": lambda shape, dtype, device: of(np.zeros(shape, dtype)),
    "empty": lambda shape, dtype, device: of(np.zeros(shape, dtype)),
    "cat": lambda tensors: of(np.concatenate(tensors)),
    "full_like": lambda x, value: of(np.full_like(x, value)),
    "linspace": lambda first, last, count: of(np.linspace(first, last, count)),
    "arange": lambda count, device: of(np.arange(count)),
    "einsum": lambda formula, *operands: of(np.einsum(formula, *operands)),
    "softmax": softmax,
}  # fmt: skip


def attend(layout, query, starts, tables, pools, window_left=-1):
    """Attends to the blocks of each row, whose queries are its last tokens."""
    first, ids, last = tables
    out = np.empty_like(query)
    for row in range(len(last)):
        own = ids[first[row] : first[row + 1]]
        key, value = (pool[own] if layout == "NHD" else pool[own].swapaxes(1, 2) for pool in pools)
        length = (len(own) - 1) * key.shape[1] + last[row]
        key, value = (x.reshape(-1, *x.shape[2:])[:length] for x in (key, value))
        group = query.shape[1] // key.shape[1]
        for i in range(starts[row], starts[row + 1]):
            position = length - starts[row + 1] + i
            low = 0 if window_left < 0 else max(0, position - window_left)
            for head in range(query.shape[1]):
                seen = slice(low, position + 1), head // group
                weights = softmax(key[seen] @ query[i, head] * query.shape[2] ** -0.5, 0)
                out[i, head] = weights @ value[seen]
    return of(out)


class Decode:
    def __init__(self, float_workspace_buffer, kv_layout, *, use_tensor_cores):
        self.layout = kv_layout

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
        q_data_type, kv_data_type,
    ):  # fmt: skip
        assert (num_qo_heads, num_kv_heads, head_dim, page_size) == (4, 2, 8, 16)
        self.tables = indptr, indices, last_page_len

    def run(self, q, paged_kv_cache, *, out, enable_pdl):
        out[:] = attend(self.layout, q, range(len(q) + 1), self.tables, paged_kv_cache)


class Prefill:
    def __init__(self, float_workspace_buffer, kv_layout, *, backend):
        assert backend in ("fa2", "fa3")
        self.layout = kv_layout

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, *, causal, window_left, q_data_type, kv_data_type,
    ):  # fmt: skip
        assert (num_qo_heads, num_kv_heads, head_dim_qk, page_size, causal) == (4, 2, 8, 16, True)
        self.starts, self.tables = qo_indptr, (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self.window_left = window_left

    def run(self, q, paged_kv_cache, *, out, enable_pdl):
        out[:] = attend(self.layout, q, self.starts, self.tables, paged_kv_cache, self.window_left)


class Batch:
    def __init__(self, kv_layout):
        self.layout = kv_layout

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo,
        page_size, *, causal, q_data_type, kv_data_type,
    ):  # fmt: skip
        assert (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size, causal) == (4, 2, 8, 8, 16, True)
        last = (kv_len_arr - 1) % page_size + 1
        self.starts, self.tables = qo_indptr, (kv_indptr, kv_indices, last)

    def run(self, q, kv_cache, out, lse):
        assert lse.shape == q.shape[:2]
        out[:] = attend(self.layout, q, self.starts, self.tables, kv_cache)


class Pod:
    def __init__(self, float_workspace_buffer, kv_layout):
        self.layout = kv_layout

    def plan(
        self, qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p, qo_indptr_d, kv_indptr_d, kv_indices_d,
        last_page_len_d, num_qo_heads, num_kv_heads, head_dim, page_size, *, window_left, q_data_type, kv_data_type,
    ):  # fmt: skip
        assert (num_qo_heads, num_kv_heads, head_dim, page_size) == (4, 2, 8, 16)
        assert set(np.diff(qo_indptr_d)) == {1}, "rows of one query each decode"
        self.prompts = qo_indptr_p, (kv_indptr_p, kv_indices_p, last_page_len_p)
        self.singles = qo_indptr_d, (kv_indptr_d, kv_indices_d, last_page_len_d)
        self.window_left = window_left

    def run(self, q_p, paged_kv_cache_p, q_d, paged_kv_cache_d, *, causal_p, enable_pdl):
        assert causal_p
        return (
            attend(self.layout, q_p, *self.prompts, paged_kv_cache_p, self.window_left),
            attend(self.layout, q_d, *self.singles, paged_kv_cache_d, self.window_left),
        )


class Fa3:
    """vLLM's library. It wants the metadata to be made for the arguments that a call gives."""

    def get_scheduler_metadata(
        self, batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, headdim_v, qkv_dtype,
        cache_seqlens, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, cache_leftpad, page_size,
        max_seqlen_k_new, causal, window_left, window_right, has_softcap, num_splits, pack_gqa, sm_margin,
    ):  # fmt: skip
        assert (batch_size, num_heads_q, num_heads_kv, headdim, headdim_v) == (4, 4, 2, 8, 8)
        assert {cu_seqlens_k, cu_seqlens_k_new, seqused_q, cache_leftpad, pack_gqa} == {None}
        assert (max_seqlen_k_new, has_softcap, sm_margin) == (0, False, 0)
        return max_seqlen_q, max_seqlen_k, page_size, causal, window_left, window_right, num_splits

    def fwd(
        self, q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
        max_seqlen_q, max_seqlen_k, block_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary,
        q_descale, k_descale, v_descale, softmax_scale, causal, window_left, window_right, softcap, rotary_interleaved,
        scheduler_metadata, num_splits, pack_gqa, sm_margin, s_aux, cp_world_size, cp_rank, cp_tot_seqused_k,
    ):  # fmt: skip
        assert {k_new, v_new, q_v, cu_seqlens_k, cu_seqlens_k_new, seqused_q, kv_batch_idx, leftpad_k} == {None}
        assert {rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale, pack_gqa, s_aux} == {None}
        assert (softmax_scale, softcap, sm_margin) == (8**-0.5, 0, 0)
        assert (cp_world_size, cp_rank, cp_tot_seqused_k) == (1, 0, None)
        page, told = k.shape[1], (max_seqlen_q, max_seqlen_k, k.shape[1], causal, window_left, window_right, num_splits)
        assert scheduler_metadata == told
        assert (causal, window_right) == (True, 0)
        assert max_seqlen_q == np.diff(cu_seqlens_q).max()
        assert max_seqlen_k == seqused_k.max()
        counts = -(-seqused_k // page)
        ids = np.concatenate([row[:count] for row, count in zip(block_table, counts, strict=True)])
        tables = np.concatenate([[0], np.cumsum(counts)]), ids, (seqused_k - 1) % page + 1
        out[:] = attend("NHD", q, cu_seqlens_q, tables, (k, v), window_left)


@pytest.fixture
def stand_ins(monkeypatch):
    torch, flashinfer = types.ModuleType("torch"), types.ModuleType("flashinfer")
    vars(torch).update(TORCH)
    vars(flashinfer).update(
        BatchDecodeWithPagedKVCacheWrapper=Decode,
        BatchPrefillWithPagedKVCacheWrapper=Prefill,
        BatchAttention=Batch,
        BatchPODWithPagedKVCacheWrapper=Pod,
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setattr(vllm_kernels, "_library", Fa3)


def drawn(case):
    """A case's arrays for two calls, with as many pools."""
    rng = np.random.default_rng(0)
    blocks = sum(flashinfer_kernels.block_counts(case))
    size = case["block_size"]
    block = (size, 2, 8) if case["layout"] == "nhd" else (2, size, 8)
    keys, values = ([of(rng.standard_normal((blocks, *block), np.float32)) for _ in range(2)] for _ in "kv")
    query = of(rng.standard_normal((sum(case["query_lens"]), 4, 8), np.float32))
    return flashinfer_kernels.Arrays((keys, values), of(rng.permutation(blocks)), query, np.full_like(query, np.nan))


@pytest.mark.parametrize("layout", ["hnd", "nhd"])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("contender", ["flashinfer", *CONTENDERS, *vllm_kernels.CONTENDERS])
def test_kernels_are_told_right(contender, window, layout, stand_ins):
    case = peers.TorchPeers.message(CASE) | {"sliding_window": window, "layout": layout}
    if contender == "flashinfer":
        case["query_lens"] = (1,) * 4
    kernels = torch_process.module_of(contender)
    case = kernels.own_case(contender, case)
    if kernels.refusal(contender, case):
        assert window is not None
        assert contender in ("flashinfer", "flashinfer-batch")
        return
    arrays = drawn(case)
    assert all(pool is pools[1] for pool, pools in zip(arrays.pair(3), arrays.pools, strict=True))
    tried = 0
    for way in kernels.ways(contender, case, arrays):
        run = way.prepare()
        # The second call is given the second pools, which hold something else.
        assert torch_process._relative_error(case, arrays, run(1, False)) > 0.1
        outputs = run(0, False)
        assert torch_process._relative_error(case, arrays, outputs) < 1e-5
        rows, part = outputs[-1]
        part[-1] = np.nan  # a row that is not written
        assert np.isnan(torch_process._relative_error(case, arrays, [*outputs[:-1], (rows, part)]))
        tried += 1
    assert tried == (2 if contender in ("flashinfer", *vllm_kernels.CONTENDERS) else 1)


@pytest.mark.parametrize("contender", vllm_kernels.CONTENDERS)
def test_fa3_is_a_peer_of_decode(contender, stand_ins):
    assert contender in bench_decode.BENCHMARK.elsewhere
    case = vllm_kernels.own_case(contender, peers.TorchPeers.message(dataclasses.replace(CASE, query_lens=None)))
    assert vllm_kernels.refusal(contender, case) is None
    arrays = drawn(case)
    ways = list(vllm_kernels.ways(contender, case, arrays))
    assert [way.name for way in ways] == ["whole contexts", "splits"]
    for way in ways:
        assert torch_process._relative_error(case, arrays, way.prepare()(0, False)) < 1e-5


def test_fa3_takes_pages_of_its_own():
    case = peers.TorchPeers.message(CASE)
    assert vllm_kernels.own_case("vllm-fa3", case) == case | {"layout": "nhd"}
    assert vllm_kernels.own_case("vllm-fa3-128", case) == case | {"layout": "nhd", "block_size": 128}
    assert vllm_kernels.refusal("vllm-fa3", case | {"cache_dtype": "int8"}) == "no int8 cache"
    assert vllm_kernels.refusal("vllm-fa3", case | {"head_size": 264}) == "no heads of 264"


def test_without_vllm_fa3_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    vllm_kernels._library.cache_clear()
    with pytest.raises(ImportError, match="no vllm/vllm_flash_attn"):
        vllm_kernels._library()


def test_one_wrong_query_among_many_is_seen(stand_ins):
    case = peers.TorchPeers.message(CASE)
    arrays = drawn(case)
    (way,) = flashinfer_kernels.ways("flashinfer-fa2", case, arrays)
    ((rows, out),) = way.prepare()(0, False)
    out[0] = 0  # the first sequence's only query
    assert torch_process._relative_error(case, arrays, [(rows, out)]) == pytest.approx(1)


def test_each_module_is_built_once(monkeypatch):
    """Cases that differ in their lengths only share their modules; a window, other heads or another cache do not."""
    made = []
    torch, jit, xqa = types.ModuleType("torch"), types.ModuleType("jit"), types.ModuleType("xqa")
    vars(torch).update(int32="i32", bfloat16="bf16", float8_e4m3fn="e4m3")
    for name in ("decode", "prefill", "attention", "pod"):
        setattr(jit, f"gen_batch_{name}_module", lambda *args, name=name: made.append((name, args)))
    xqa.gen_xqa_module = lambda *args: made.append(("xqa", args))
    flashinfer = types.ModuleType("flashinfer")
    flashinfer.jit = jit
    modules = {"torch": torch, "flashinfer": flashinfer, "flashinfer.jit": jit, "flashinfer.jit.xqa": xqa}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    flashinfer_kernels.modules(CONTENDERS, [peers.TorchPeers.message(case) for case in cases.RAGGED])
    assert len(set(made)) == len(made)
    fa2, fa3 = ([args for name, args in made if name == "prefill" and args[0] == backend] for backend in ("fa2", "fa3"))
    heads = [(128, False), (128, True), (64, False), (256, False)]  # and whether there is a window
    assert sorted((args[5], args[8]) for args in fa3) == sorted(heads)
    assert sorted((args[5], args[8]) for args in fa2) == sorted([*heads, (128, False)])
    assert sorted((args[1], args[4]) for name, args in made if name == "attention") == [
        ("bf16", 64), ("bf16", 128), ("bf16", 256), ("e4m3", 128)
    ]  # fmt: skip
    assert [args[:4] for name, args in made if name == "pod"] == [("bf16", "bf16", "bf16", 128)]
