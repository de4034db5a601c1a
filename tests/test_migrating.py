"""Tests examples/MIGRATING.md: its tables have every argument, and its functions give what the calls give."""

import inspect
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import inputs, oracle, plain
from tests.cases import Case, Sparse

GUIDE = (Path(__file__).parents[1] / "examples" / "MIGRATING.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", GUIDE, re.MULTILINE | re.DOTALL))
JAX, VLLM, FLASHINFER, CUDNN = SECTIONS.values()

VLLM_V2 = [
    "out",
    "exp_sums",
    "max_logits",
    "tmp_out",
    "query",
    "key_cache",
    "value_cache",
    "num_kv_heads",
    "scale",
    "block_tables",
    "seq_lens",
    "block_size",
    "max_seq_len",
    "alibi_slopes",
    "kv_cache_dtype",
    "k_scale",
    "v_scale",
    "tp_rank",
    "blocksparse_local_blocks",
    "blocksparse_vert_stride",
    "blocksparse_block_size",
    "blocksparse_head_sliding_step",
]
# The arguments of plan and run that change the result or describe it; flashinfer is not installed here.
FLASHINFER_CALLS = [
    "qo_indptr",
    "paged_kv_indptr",
    "paged_kv_indices",
    "paged_kv_last_page_len",
    "num_qo_heads",
    "num_kv_heads",
    "head_dim_qk",
    "page_size",
    "causal",
    "sm_scale",
    "window_left",
    "logits_soft_cap",
    "q_data_type",
    "kv_data_type",
    "pos_encoding_mode",
    "rope_scale",
    "rope_theta",
    "q",
    "paged_kv_cache",
    "k_scale",
    "v_scale",
    "return_lse",
    "indptr",
    "indices",
    "last_page_len",
    "head_dim",
]


def names_in(section):
    """The names in the first column of a section's table."""
    rows = re.findall(r"^\| (.*?) \| .* \|$", section, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def functions():
    names = {}
    for code in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL):
        exec(compile(code, "MIGRATING.md", "exec"), names)
    return names


def jax_op():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import paged_attention
    return paged_attention


def test_tables_have_every_argument():
    assert names_in(JAX) == set(inspect.signature(jax_op().paged_attention).parameters)
    assert names_in(VLLM) == set(VLLM_V2)
    assert names_in(FLASHINFER) == set(FLASHINFER_CALLS)
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    assert names_in(CUDNN) == set(inspect.signature(cudnn.paged_attention).parameters)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_jax_s_op_gives_the_same(cap):
    case = Case("from-jax", 8, 2, 64, 16, "float32", seq_lens=(37, 1, 64), query_lens=None, padding=0)
    made = inputs.make(case)
    query, key_cache, value_cache, tables, lengths = made.decode.values()
    # Their op reads whole tables: no poison, and ids that exist.
    key_cache, value_cache = (
        np.nan_to_num(key_cache, posinf=0, neginf=0),
        np.nan_to_num(value_cache, posinf=0, neginf=0),
    )
    used = np.arange(tables.shape[1]) * 16 < lengths[:, None]
    tables = np.where(used, tables, 0).astype(np.int32)
    k_pages, v_pages = (jnp.swapaxes(x, 0, 1) for x in (key_cache, value_cache))
    ours = functions()["paged_attention"](query, k_pages, v_pages, tables, lengths, attn_logits_soft_cap=cap)

    def dense(pages):  # [num_seqs, tokens, num_kv_heads, head_size]
        return jnp.swapaxes(pages[:, tables].reshape(2, len(lengths), -1, 64), 0, 1).swapaxes(1, 2)

    reference = jax.jit(jax_op().paged_attention_reference, static_argnames="attn_logits_soft_cap")
    theirs = reference(query, dense(k_pages), dense(v_pages), lengths, attn_logits_soft_cap=cap)
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_vllm_s_call():
    case = Case(
        "from-vllm", 8, 2, 64, 16, "bfloat16", layout="vllm", seq_lens=(70, 200, 9), query_lens=None, alibi=True,
        block_sparse=Sparse(2, 3, 32, 1), scale=0.2, k_scale="scalar", v_scale="scalar",
    )  # fmt: skip
    made = inputs.make(case)
    query, key_cache, value_cache, tables, seq_lens = map(jnp.asarray, made.decode.values())
    sparse = made.static["block_sparse"]
    out, exp_sums, *_ = functions()["paged_attention_v2"](
        query, key_cache, value_cache, 0.2, tables, seq_lens, made.arrays["alibi_slopes"], made.arrays["k_scale"],
        made.arrays["v_scale"], sparse.tp_rank, sparse.local_blocks, sparse.vert_stride, sparse.block_size,
        sparse.head_sliding_step,
    )  # fmt: skip
    options = made.arrays | made.static
    exact, rough = (module.decode(**made.decode, **options)[0] for module in (oracle, plain))
    plain.assert_close(out, exact, rough, "out")
    assert exp_sums.shape[:2] == query.shape[:2]


def ragged(case):
    made = inputs.make(case)
    exact, rough = (module.ragged(**made.ragged, **made.arrays, **made.static)[0] for module in (oracle, plain))
    return made, exact, rough


def test_flashinfer_s_wrapper():
    case = Case(
        "from-flashinfer", 8, 2, 64, 16, "bfloat16", layout="nhd", seq_lens=(37, 16, 70), query_lens=(5, 1, 20),
        padding=0, scale=0.2, sliding_window=30, logits_soft_cap=3.0,
    )  # fmt: skip
    made, exact, rough = ragged(case)
    query, key_cache, value_cache, tables, seq_lens, starts = made.ragged.values()
    counts = -(-seq_lens // 16)
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    indices = np.concatenate([row[:count] for row, count in zip(tables, counts, strict=True)])
    last = (seq_lens - 1) % 16 + 1
    out = functions()["batch_prefill"](
        query, (key_cache, value_cache), starts, indptr, indices, last, True, 0.2, 29, 3.0
    )  # fmt: skip
    plain.assert_close(out, exact, rough, "out")


@pytest.mark.parametrize("query_lens", [(1, 1), (37, 16)], ids=["single", "prompts"])
def test_cudnn_s_call(query_lens):
    case = Case(
        f"from-cudnn-{query_lens}", 8, 2, 64, 16, "bfloat16", layout="nhd", seq_lens=(37, 16), query_lens=query_lens,
        padding=0, scale=0.2,
    )  # fmt: skip
    made, exact, rough = ragged(case)
    query, key_cache, value_cache, tables, seq_lens, starts = made.ragged.values()
    padded = np.zeros((2, max(query_lens), *query.shape[1:]), query.dtype)
    for s, n in enumerate(query_lens):
        padded[s, :n] = query[starts[s] : starts[s] + n]
    out = functions()["cudnn_paged_attention"](
        padded, key_cache, value_cache, np.array(query_lens), seq_lens, tables[:, None, :, None], 0.2
    )
    plain.assert_close(out, exact, rough, "out")
