"""Calls of `paged_jax.compat.rpa`, what they must return, and a check of an implementation against it.

The parameters are those of tpu-inference's own tests (of its v3 kernel and its hd64 kernel), and a few more. The
results follow from the definition alone: NumPy in float64 writes the new tokens one by one and attends sequence by
sequence. Everything that the call must not read is poison, and absurd ids stand where no page is.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from paged_jax.compat import rpa
from tests import inputs, plain

_SEED = 1234


def _drawn(num_seqs, most_queries=100, most_context=50):
    """Random (query length, length) pairs, as the tests of tpu-inference draw them."""
    rng = np.random.default_rng(_SEED)
    q_lens = rng.integers(1, most_queries, num_seqs)
    return tuple(zip(q_lens.tolist(), (q_lens + rng.integers(0, most_context, num_seqs)).tolist(), strict=True))


@dataclass(frozen=True)
class Case:
    """One call. `lens` has (query length, length) pairs; `axes` 4 or 5 are those of the pool.

    Without `kv_dtype` the pool has the queries' dtype; `pool` is "v3", "hd64", or "plain", which is not padded.
    """

    name: str
    lens: tuple
    num_heads: tuple = (32, 8)
    head_dim: int = 128
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    page_size: int = 16
    pool: str = "v3"
    axes: int = 5
    new_dtype: str | None = None
    sink: bool = False
    options: tuple = ()

    def __str__(self):
        return self.name


THREE = ((192, 328), (128, 180), (64, 255))
_LENGTHS = (18, 129, 597, 122, 64, 322, 463, 181, 1107, 123, 31, 18, 1229, 229, 87, 1328)
DECODES = tuple((1, length) for length in _LENGTHS)
_PREFILL_LENS = (5, 15, 120, 100, 21, 32, 251, 40, 64, 99, 10, 5, 3, 120, 9, 2)
_MIXED_LENS = (5, 1, 120, 1, 1, 32, 251, 1, 1, 99, 1, 5, 3, 117, 1, 1)
PREFILLS, MIXED = (tuple(zip(q, _LENGTHS, strict=True)) for q in (_PREFILL_LENS, _MIXED_LENS))
_FLOATS = ("float32", "bfloat16")
_EIGHT_BITS = ("float8_e5m2", "float8_e4m3fn")
_HALF = (("k_scale", 0.5), ("v_scale", 0.5))


def _grid():
    for dtype in _FLOATS:
        for causal in (True, False):
            yield Case(f"basic-{dtype}-causal-{causal}", THREE, dtype=dtype, options=(("use_causal_mask", causal),))
        for name, lens in (("decodes", DECODES), ("prefills", PREFILLS), ("mixed", MIXED)):
            yield Case(f"{name}-{dtype}", lens, dtype=dtype)
            yield Case(f"{name}-hd64-{dtype}", lens, head_dim=64, dtype=dtype, pool="hd64", sink=True)
        for num_seqs in (1, 17):
            for heads in ((32, 8), (12, 2), (5, 1), (3, 3)):
                for head_dim in (80, 240):
                    name = f"complex-{dtype}-{num_seqs}-{heads[0]}x{heads[1]}-{head_dim}"
                    yield Case(name, _drawn(num_seqs), heads, head_dim, dtype)
                name = f"complex-hd64-{dtype}-{num_seqs}-{heads[0]}x{heads[1]}"
                yield Case(name, _drawn(num_seqs), heads, 64, dtype, pool="hd64")
    for kv_dtype in _EIGHT_BITS:
        for scales in (_HALF, ()):
            name = f"{kv_dtype}-scales-{bool(scales)}"
            yield Case(f"quantised-{name}", THREE, kv_dtype=kv_dtype, options=scales)
            yield Case(f"quantised-hd64-{name}", THREE, (8, 1), 64, kv_dtype=kv_dtype, pool="hd64", options=scales)
            yield Case(f"q-scale-{name}", THREE, kv_dtype=kv_dtype, options=(("q_scale", 0.5), *scales))
    for window in (None, 5, 128):
        options = (("sliding_window", window),)
        yield Case(f"window-{window}", _drawn(5), (4, 4), dtype="float32", options=options)
        yield Case(f"window-hd64-{window}", _drawn(5), (4, 4), 64, "float32", pool="hd64", sink=True, options=options)
    for cap in (None, 50.0):
        yield Case(f"soft-cap-{cap}", _drawn(2), (16, 2), dtype="float32", options=(("soft_cap", cap),))


GRID = list(_grid())
_SHORT = ((1, 18), (5, 5), (9, 40), (1, 64), (3, 33))
SMALL = [
    Case("plain-bfloat16", _SHORT, (4, 2), 64, pool="plain", axes=4, options=(("sm_scale", 0.2),)),
    Case("plain-packed", _SHORT, (6, 2), 72, page_size=8, pool="plain", options=(("sm_scale", 0.2),)),
    Case("padded-lanes", _SHORT, (4, 2), 80, "float32", page_size=4, sink=True, options=(("soft_cap", 3.0),)),
    Case("padded-rows", _SHORT, (5, 1), 16, kv_dtype="float8_e4m3fn", page_size=8, options=_HALF),
    Case("padded-hd64", _SHORT, (6, 3), 64, pool="hd64", sink=True, options=(("sliding_window", 7),)),
    Case("padded-hd64-e5m2", _SHORT, (5, 5), 64, kv_dtype="float8_e5m2", pool="hd64", axes=4),
    Case("new-tokens-wider", _SHORT, (4, 2), 32, kv_dtype="int8", new_dtype="bfloat16", options=_HALF),
    Case("not-updated", _SHORT, (4, 2), 128, options=(("update_kv_cache", False),)),
    Case("all-of-it", _SHORT, (4, 2), 128, "float16", page_size=1, options=(("use_causal_mask", False),)),
    # Some queries are beyond the range of the pool's dtype.
    Case("q-scale", _SHORT, (4, 2), 32, kv_dtype="float8_e4m3fn", options=(("q_scale", 2**-8), ("k_scale", 2.0))),
    Case("no-sequence", (), (4, 2), 32),
]
# What the Mosaic GPU kernels take, ragged and, with one query a sequence, decode.
_WIDE, _ONE_EACH = ((1, 37), (40, 130), (20, 70)), ((1, 37), (1, 130), (1, 1), (1, 70))
_BOUND = ("max_query_len", 1)
HOPPER = [
    Case("hopper-ragged", _WIDE, (4, 2), 64),
    Case("hopper-ragged-8-bits", _WIDE, (2, 1), 64, kv_dtype="float8_e4m3fn", options=_HALF),
    Case("hopper-decode", _ONE_EACH, (8, 2), 64, options=(_BOUND,)),
    Case("hopper-decode-8-bits", _ONE_EACH, (4, 2), 64, kv_dtype="int8", page_size=32, options=(_BOUND, *_HALF)),
    Case("hopper-decode-pairs", _ONE_EACH, (4, 2), kv_dtype="float8_e4m3fn", page_size=32, options=(_BOUND, *_HALF)),
    Case("hopper-decode-hd64", _ONE_EACH, (6, 3), 64, "float16", pool="hd64", sink=True, options=(_BOUND,)),
]
BY_NAME = {case.name: case for case in (*GRID, *SMALL, *HOPPER)}


def pool_shape(case, num_pages, dtype):
    """The shape of a case's pool, and its number of rows and their size."""
    num_kv_heads, packing = case.num_heads[1], max(1, 4 // dtype.itemsize)
    if case.pool == "hd64":
        rows = -(-num_kv_heads // packing) * packing
        shape = (rows, 128) if case.axes == 4 else (rows // packing, packing, 128)
        return (num_pages, case.page_size, *shape), 2 * rows, 64
    rows, size = 2 * num_kv_heads, case.head_dim
    if case.pool == "v3":
        rows, size = -(-rows // packing) * packing, -(-size // 128) * 128
    shape = (rows, size) if case.axes == 4 else (rows // packing, packing, size)
    return (num_pages, case.page_size, *shape), rows, size


@dataclass
class Made:
    """The arrays of a case, in the call's order, and what the call must return.

    Attributes:
      arrays: the call's positional arrays.
      options: its keywords.
      out: float64, of all rows; `rough` is what the same arithmetic gives in the precision of the call.
      pool: the pool afterwards.
    """

    arrays: tuple
    options: dict
    out: np.ndarray
    rough: np.ndarray
    pool: np.ndarray


def make(case):
    """Makes a case's arrays and results."""
    rng = inputs.rng_of(case.name)
    dtype = inputs.dtype_of(case.dtype)
    kv_dtype = inputs.dtype_of(case.kv_dtype or case.dtype)
    options, (num_q_heads, num_kv_heads) = dict(case.options), case.num_heads
    num_rows, num_tokens = len(case.lens) + 2, sum(q for q, _ in case.lens) + 2
    kv_lens = np.array([length for _, length in case.lens] + [10**6, -5], np.int32)
    starts = np.concatenate([[0], np.cumsum([q for q, _ in case.lens])]).astype(int)
    cu_q_lens = np.array([*starts, 0, 10**6], np.int32)
    needed = [-(-length // case.page_size) for _, length in case.lens]
    width, num_pages = max([1, *needed]) + 1, sum(needed) + 3
    pages, free = np.resize(inputs.ABSURD_IDS, (num_rows, width)), list(rng.permutation(num_pages))
    for row, count in enumerate(needed):
        pages[row, :count] = [free.pop() for _ in range(count)]
    new = inputs.dtype_of(case.new_dtype) if case.new_dtype else kv_dtype

    def tokens(heads, dtype):
        drawn = rng.standard_normal((num_tokens, heads, case.head_dim)).astype(dtype)
        return np.concatenate([drawn[: starts[-1]], inputs.poison(rng, (2, heads, case.head_dim), dtype)])

    queries, keys, values = tokens(num_q_heads, dtype), tokens(num_kv_heads, new), tokens(num_kv_heads, new)
    shape, rows, row_size = pool_shape(case, num_pages, kv_dtype)
    pool = inputs.poison(rng, (num_pages, case.page_size, rows, row_size), kv_dtype)
    written, slots = not options.get("update_kv_cache", True), []
    for row, (q_len, length) in enumerate(case.lens):
        for t in range(length):
            slot = pages[row, t // case.page_size], t % case.page_size
            if t < length - q_len or written:
                old = rng.standard_normal((2 * num_kv_heads, case.head_dim)) * (20 if kv_dtype == np.int8 else 1)
                pool[(*slot, slice(2 * num_kv_heads), slice(case.head_dim))] = old.astype(kv_dtype)
            else:
                slots.append((starts[row] + t - length + q_len, *slot))
    before = pool.copy()
    for token, page, offset in slots if not written else ():
        for head in range(num_kv_heads):
            for half, vectors, name in ((0, keys, "k_scale"), (1, values, "v_scale")):
                vector = vectors[token, head]
                if new.itemsize > kv_dtype.itemsize:
                    vector = _narrowed(vector, options.get(name, 1.0), kv_dtype)
                pool[page, offset, 2 * head + half, : case.head_dim] = vector
    sink = rng.standard_normal(num_q_heads).astype(np.float32) if case.sink else None
    distribution = np.array([0, 0, len(case.lens)], np.int32)
    step = kv_lens, pages.reshape(-1), cu_q_lens, distribution
    arrays = (queries, keys, values, before.reshape(shape), *step, *([] if sink is None else [sink]))
    exact, rough = (_attention(case, queries, pool, pages, starts, sink, dtype) for dtype in (np.float64, np.float32))
    return Made(arrays, options, exact, rough.astype(dtype), pool.reshape(shape))


def _narrowed(vector, scale, dtype):
    divided = vector.astype(np.float32) / np.float32(scale)
    if dtype == np.int8:
        return np.clip(np.rint(divided), -128, 127).astype(dtype)
    limits = jnp.finfo(dtype)
    return np.clip(divided, float(limits.min), float(limits.max)).astype(dtype)


def _logits(query, keys):
    return np.einsum("qgrd,kgd->grqk", query, keys, optimize=True)


def _logits_in_order(query, keys):
    """Adds the products one by one, as XLA's unoptimised code does: with large logits BLAS errs far less."""
    by_element = zip(np.moveaxis(query, -1, 0), np.moveaxis(keys, -1, 0), strict=True)
    return sum(q.transpose(1, 2, 0)[..., None] * k.T[:, None, None] for q, k in by_element)


def _attention(case, queries, pool, pages, starts, sink, dtype):
    """Attention by the definition, in float64, or roughly: in float32, with weights rounded to the queries' dtype."""
    options, (num_q_heads, num_kv_heads) = dict(case.options), case.num_heads
    group, out = num_q_heads // num_kv_heads, np.zeros(queries.shape, dtype)
    q_scale, scale = options.get("q_scale"), options.get("sm_scale", 1.0) * options.get("k_scale", 1.0)
    if q_scale is not None:
        divided = (queries.astype(np.float32) / q_scale).astype(queries.dtype)
        queries, scale = _narrowed(divided, 1.0, pool.dtype), scale * q_scale
    for row, (q_len, length) in enumerate(case.lens):
        held = pool[pages[row, : -(-length // case.page_size)]]
        held = held.reshape(-1, *held.shape[2:])[:length, : 2 * num_kv_heads, : case.head_dim].astype(dtype)
        rows = slice(starts[row], starts[row + 1])
        query = queries[rows].astype(dtype).reshape(q_len, num_kv_heads, group, case.head_dim)
        in_order = dtype is np.float32 and case.dtype == "float32"
        logits = (_logits_in_order if in_order else _logits)(query, held[:, 0::2]) * dtype(scale)
        if options.get("soft_cap") is not None:
            logits = dtype(options["soft_cap"]) * np.tanh(logits / dtype(options["soft_cap"]))
        at, token = (length - q_len) + np.arange(q_len)[:, None], np.arange(length)[None, :]
        if options.get("use_causal_mask", True):
            window = options.get("sliding_window") or length
            logits = np.where((token <= at) & (at - token < window), logits, -np.inf)
        top = logits.max(axis=-1, keepdims=True)
        weights = np.exp(logits - top)
        total = weights.sum(axis=-1, keepdims=True)
        if sink is not None:
            total = total + np.exp(sink.astype(dtype).reshape(num_kv_heads, group, 1, 1) - top)
        if dtype == np.float32:
            weights = weights.astype(inputs.dtype_of(case.dtype)).astype(dtype)
        weighted = np.einsum("grqk,kgd->qgrd", weights, held[:, 1::2], optimize=True)
        weighted = weighted / total[..., 0].transpose(2, 0, 1)[..., None]
        out[rows] = weighted.reshape(q_len, num_q_heads, case.head_dim) * dtype(options.get("v_scale", 1.0))
    return out


def function(case):
    """The function that a case calls."""
    return rpa.ragged_paged_attention_hd64 if case.pool == "hd64" else rpa.ragged_paged_attention


def hold(case, run):
    """Checks `run(function, *arrays, **options)` of a case, which returns NumPy arrays, against the definition."""
    made = make(case)
    out, pool = run(function(case), *made.arrays, **made.options)
    plain.assert_close(out, made.out, made.rough, case.name)
    assert pool.shape == made.pool.shape
    assert pool.dtype == made.pool.dtype
    np.testing.assert_array_equal(pool.view(np.uint8), made.pool.view(np.uint8))  # poison too
