"""The named cases on which the attention operations are tested, and the shapes of real models.

Each case costs a compile, so the cases are a covering set: every value of every option, every dtype, block size, head
size and group size, every scale shape and every pair (layout, cache dtype) occurs, and options occur both alone and in
combination. `test_decode.py` runs all cases, `test_ragged.py` those with `query_lens`.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

LAYOUTS = ("hnd", "nhd", "vllm")
CACHE_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")


class Sparse(NamedTuple):
    """The fields of the library's BlockSparse; the oracle must not import the library's own."""

    local_blocks: int
    vert_stride: int
    block_size: int = 64
    head_sliding_step: int = 0
    tp_rank: int = 0


@dataclass(frozen=True)
class Case:
    """Dimensions and options of one call of an attention operation.

    `query_lens` has one entry for each of `seq_lens`; with None there is no ragged test. `k_scale` and `v_scale` name
    a shape: "scalar", "head" or "slot". `scale` may be "traced": passed as a jit argument. `logits` names one of the
    contents that `inputs.py` makes: "random", "huge", "equal", "near-overflow" (of the values). `spare_columns` widens
    the block table. An int8 cache always has scales: "scalar" ones if none are named.
    """

    name: str
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    block_size: int = 16
    dtype: str = "float32"
    cache_dtype: str | None = None
    layout: str = "hnd"
    seq_lens: tuple[int, ...] = (37, 0, 130, 1, 64, 90)
    query_lens: tuple[int, ...] | None = (5, 0, 33, 1, 64, 1)
    partition_size: int = 64
    scale: float | str | None = None
    alibi: bool = False
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    sinks: bool = False
    block_sparse: Sparse | None = None
    k_scale: str | None = None
    v_scale: str | None = None
    scale_size: float = 1.0
    max_seq_len: int | None = None
    logits: str = "random"
    shared_blocks: int = 0
    spare_columns: int = 2
    padding: int = 3

    def __post_init__(self):
        if self.cache_dtype == "int8":
            object.__setattr__(self, "k_scale", self.k_scale or "scalar")
            object.__setattr__(self, "v_scale", self.v_scale or "scalar")

    def __str__(self):
        return self.name


def _pairs():
    """Cases of every pair (layout, cache dtype), each with its own dimensions and options."""
    both = {"k_scale": "head", "v_scale": "head"}
    slot = {"k_scale": "slot", "v_scale": "slot"}
    scalar = {"k_scale": "scalar", "v_scale": "scalar"}
    far = Sparse(1, 3, 16, -2)
    return [
        Case("hnd-float32", 8, 2, 64, 16),
        Case("hnd-float16", 10, 2, 80, 8, "float16", alibi=True),
        Case("hnd-bfloat16", 8, 2, 128, 32, "bfloat16", sliding_window=40),
        Case("hnd-e4m3", 4, 4, 96, 4, "bfloat16", "float8_e4m3fn", **scalar),
        Case("hnd-e5m2", 4, 2, 120, 16, "float16", "float8_e5m2", logits_soft_cap=3.0, **both),
        Case("hnd-int8", 4, 4, 8, 2, "float32", "int8", **slot),
        Case("nhd-float32", 6, 1, 256, 64, layout="nhd", sinks=True),
        Case("nhd-float16", 7, 1, 192, 1, "float16", layout="nhd", sliding_window=70),
        Case("nhd-bfloat16", 12, 1, 32, 128, "bfloat16", layout="nhd", partition_size=128, alibi=True),
        Case("nhd-e4m3", 4, 2, 8, 16, "float32", "float8_e4m3fn", "nhd", sliding_window=17),
        Case("nhd-e5m2", 10, 2, 64, 32, "bfloat16", "float8_e5m2", "nhd", sinks=True, **slot),
        Case("nhd-int8", 7, 1, 112, 8, "float16", "int8", "nhd", alibi=True, **both),
        Case("vllm-float32", 4, 2, 120, 256, layout="vllm", partition_size=256, spare_columns=1),
        Case("vllm-float16", 14, 2, 112, 16, "float16", layout="vllm", alibi=True, sinks=True),
        Case("vllm-bfloat16", 4, 2, 80, 16, "bfloat16", layout="vllm", block_sparse=far),
        Case("vllm-e4m3", 5, 1, 96, 32, "float16", "float8_e4m3fn", "vllm", **both),
        Case("vllm-e5m2", 4, 2, 192, 4, "float32", "float8_e5m2", "vllm", sliding_window=33, **scalar),
        Case("vllm-int8", 12, 1, 256, 16, "bfloat16", "int8", "vllm", **slot),
        Case("heads-of-328-int8", 3, 1, 328, 8, "float16", "int8", "nhd", seq_lens=(37, 9), query_lens=(3, 9), **both),
    ]


def _options():
    """Cases of each option alone on float32, where rounding hides no error, and then of several together."""
    return [
        Case("alibi", alibi=True),
        Case("window-1", sliding_window=1),
        Case("window-of-everything", sliding_window=1000, query_lens=None),
        Case("soft-cap", logits_soft_cap=1.5),
        # The cap is so large that it changes nothing, unless the formula loses digits.
        Case("soft-cap-far-away", 4, 2, 64, 16, "bfloat16", logits_soft_cap=1e6, query_lens=(5, 0, 33, 1, 64, 1)),
        Case("sinks", sinks=True),
        Case("scale", scale=0.3, query_lens=None),
        Case("scale-traced", scale="traced"),
        Case("sparse", block_sparse=Sparse(1, 3, 16)),
        Case("sparse-step", 6, 1, block_size=8, block_sparse=Sparse(2, 4, 16, 2, 1)),  # two patterns of six heads
        Case("sparse-negative-step", 8, 4, block_size=8, block_sparse=Sparse(1, 3, 8, -1, 1)),
        Case("sparse-off", block_sparse=Sparse(1, 1, 16, 1), query_lens=None),
        Case("sparse-large-blocks", block_size=8, block_sparse=Sparse(1, 2)),
        Case("max-seq-len", max_seq_len=130),
        Case("small-partitions", block_size=8, partition_size=8, query_lens=None),
        Case(
            "sparse-vllm-int8",
            8,
            2,
            64,
            16,
            "float32",
            "int8",
            "vllm",
            block_sparse=Sparse(1, 3, 16),
            k_scale="head",
            v_scale="slot",
        ),
        Case("sparse-vllm-e4m3", 4, 4, 128, 16, "float32", "float8_e4m3fn", "vllm", block_sparse=Sparse(1, 3, 16, -2)),
        Case("sparse-vllm-bfloat16", 4, 2, 80, 16, "float16", "bfloat16", "vllm", block_sparse=Sparse(1, 3, 16, -2)),
        Case("scales-of-two-shapes", cache_dtype="int8", k_scale="slot", v_scale="scalar"),
        Case("scales-of-two-shapes-2", cache_dtype="float8_e4m3fn", k_scale="scalar", v_scale="head"),
        Case("scale-on-a-wide-cache", k_scale="head", v_scale="head"),
        Case("query-bfloat16-cache-float32", 4, 2, 32, dtype="bfloat16", cache_dtype="float32"),
        Case("query-float32-cache-bfloat16", cache_dtype="bfloat16", layout="vllm"),
        Case("query-float16-cache-bfloat16", dtype="float16", cache_dtype="bfloat16", query_lens=None),
        Case(
            "everything",
            8,
            2,
            64,
            8,
            "bfloat16",
            "float8_e4m3fn",
            "nhd",
            scale="traced",
            alibi=True,
            sliding_window=60,
            logits_soft_cap=4.0,
            sinks=True,
            block_sparse=Sparse(2, 3, 8, 1),
            k_scale="slot",
            v_scale="head",
            max_seq_len=136,
        ),
    ]


def _farthest():
    """Cases with as many options at once as there can be, for both float8 dtypes."""
    corner = Case(
        "farthest-corner",
        14,
        2,
        112,
        8,
        "bfloat16",
        "float8_e4m3fn",
        "vllm",
        alibi=True,
        block_sparse=Sparse(2, 3, 16, -1, 1),
        k_scale="head",
        v_scale="head",
    )
    return [corner, replace(corner, name="farthest-corner-e5m2", dtype="float16", cache_dtype="float8_e5m2")]


def _edges():
    """Cases at the edges of the specification: lengths, magnitudes, shared blocks."""
    return [
        Case("all-empty", seq_lens=(0, 0, 0), query_lens=(0, 0, 0), sinks=True),
        Case("one-sequence", seq_lens=(80,), query_lens=(80,), spare_columns=0, padding=0),
        Case("one-query", 4, 2, 64, 16, "bfloat16", seq_lens=(37,), query_lens=(1,), padding=0),
        Case("context-without-query", seq_lens=(20, 33, 48), query_lens=(0, 3, 0), padding=5),
        Case("long", 2, 1, 16, 16, seq_lens=(700, 3, 513, 0), query_lens=(130, 3, 1, 0), partition_size=256),
        # XLA begins with token 256 for all sequences, because of the first queries alone.
        Case(
            "long-window",
            2,
            1,
            16,
            32,
            layout="nhd",
            seq_lens=(790, 800),
            query_lens=(1, 70),
            sliding_window=260,
        ),
        Case("shared-blocks", seq_lens=(70, 64, 90), query_lens=(6, 1, 26), shared_blocks=4),
        Case("huge-logits", head_size=64, dtype="bfloat16", scale=1.0, logits="huge", sinks=True),
        Case(
            "huge-logits-capped",
            head_size=64,
            scale=1.0,
            logits="huge",
            logits_soft_cap=30.0,
            query_lens=None,
        ),
        # Many tiles in one pass, with logits far from 0, show rounding errors that add up from tile to tile.
        Case("long-large-logits", 1, 1, 64, 16, "float16", seq_lens=(9000,), query_lens=None, scale=2.0),
        Case("scale-negative", dtype="float16", scale=-0.3),
        Case("scale-negative-bfloat16", 8, 2, 64, dtype="bfloat16", cache_dtype="float8_e4m3fn", scale=-0.3),
        Case("values-near-overflow", dtype="float16", logits="near-overflow"),
        Case("tiny-scales", cache_dtype="int8", k_scale="head", v_scale="slot", scale_size=1e-6),
        Case(
            "large-scales",
            cache_dtype="float8_e5m2",
            k_scale="slot",
            v_scale="head",
            scale_size=1e4,
            scale=1e-5,
        ),
        Case(
            "equal-logits-over-100k",
            1,
            1,
            8,
            256,
            "bfloat16",
            seq_lens=(100_000,),
            query_lens=None,
            partition_size=512,
            logits="equal",
        ),
    ]


CASES = [*_pairs(), *_options(), *_farthest(), *_edges()]

# Attention shapes of real models, with contexts and pools cut down to what a test can hold.
MODELS = [
    Case("opt-125m", 12, 12, 64, 16, "float16", layout="vllm", seq_lens=(204,), query_lens=(204,)),
    Case("opt-30b", 56, 56, 128, 16, "float16", layout="vllm", seq_lens=(204,), query_lens=None),
    Case("llama-3-8b", 32, 8, 128, 16, "bfloat16", seq_lens=(150, 33), query_lens=(1, 33)),
    Case("mistral-7b", 32, 8, 128, 16, "bfloat16", seq_lens=(90, 33), sliding_window=64, query_lens=None),
    Case("qwen2-7b", 28, 4, 128, 16, "bfloat16", seq_lens=(150, 33), query_lens=None),
    Case("gemma-2-9b", 16, 8, 256, 16, "bfloat16", seq_lens=(99, 20), logits_soft_cap=50.0, query_lens=None),
    Case("gemma-4-31b", 8, 1, 512, 16, "bfloat16", seq_lens=(99, 20), query_lens=(1, 20)),
    Case(
        "gpt-oss-20b",
        64,
        8,
        64,
        16,
        "bfloat16",
        seq_lens=(150, 9),
        sinks=True,
        sliding_window=128,
        query_lens=None,
    ),
    Case(
        "phi-3-small",
        32,
        8,
        128,
        32,
        "bfloat16",
        seq_lens=(150,),
        block_sparse=Sparse(1, 8, 64, 1),
        query_lens=(9,),
    ),
]

DECODE_CASES = [*CASES, *MODELS]
RAGGED_CASES = [case for case in DECODE_CASES if case.query_lens is not None]
