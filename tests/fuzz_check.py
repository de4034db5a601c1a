"""Compares one call's results with a reference, row by row, and so decides what `tests.fuzz` calls wrong.

The reference computes `tests/oracle.py`'s definition over whole arrays, so that contexts of 70,000 tokens take seconds;
`test_fuzz.py` compares the reference with the oracle. In float64 the reference gives the right results. In float32,
with weights and results rounded as the kernels round them, it gives the error that `plain.assert_close` allows,
separately for each row (the heads of one query token). That error is at least the effect of one rounding of each logit
for float32 queries, where little else is rounded, and for heads of more than 256 elements, whose logits are sums of
many products: the error of a sum depends on the order of its terms.
"""

import numpy as np

from tests import inputs, oracle, plain
from tests.fuzz_draw import RAGGED_OPS

NOTHING = -np.inf
_WRITTEN_LATENTS = "latent", "latent_cache", "slot_mapping"


class Wrong(AssertionError):
    """Raised for a result that differs from the reference by more than it may."""


def references(program, batch):
    """Gives `(out, lse)` twice: in float64, and with the rounding errors that the operations may have."""
    return [_reference(program, batch, exact) for exact in (True, False)]


def _reference(program, batch, exact):
    case, arrays = program.case, batch.arrays
    options = batch.options | {"scale": batch.options.get("scale", case.scale)}
    query = arrays["query"]
    out = np.zeros((*query.shape[:2], program.value_size or query.shape[2]))
    lse = np.full(query.shape[:2], NOTHING)
    bound = program.width * case.block_size + (len(query) if program.op == "prefix" else 0)
    if case.max_seq_len is not None:
        bound = min(bound, case.max_seq_len)
    first = 0
    for row, (seq_len, count) in enumerate(zip(batch.seq_lens, batch.query_lens, strict=True)):
        rows = slice(first, first + count)
        first += count
        if not count:
            continue
        keys, values = (_tokens(program, batch, row, rows, which) for which in ("key", "value"))
        if keys is None:
            continue
        positions = np.arange(seq_len - count, seq_len)
        seen = slice(0, min(seq_len, bound))
        out[rows], lse[rows] = attend(
            query[rows], keys[seen], values[seen], positions, case, options, program.causal, exact
        )
    return out, lse


def _tokens(program, batch, row, rows, which):
    """All keys or values of a sequence in float64: from the cache and, for some operations, from the new tokens."""
    case, arrays, length = program.case, batch.arrays, batch.seq_lens[row]
    if length == 0:
        return None
    if program.value_size is not None:
        pool, scale = arrays["latent_cache"][:, :, None], batch.options.get("latent_scale")
        latents = oracle.gather(pool, arrays["block_tables"][row], length, "nhd", "key", case.block_size, scale)
        return latents if which == "key" else latents[..., : program.value_size]
    cached = length
    if program.op == "prefix":
        cached = length - batch.query_lens[row]
    elif program.op == "write_and_attend":
        cached = length - 1
    scale = batch.options.get(f"{which[0]}_scale")
    found = []
    if cached:
        table, cache = arrays["block_tables"][row], arrays[f"{which}_cache"]
        found.append(oracle.gather(cache, table, cached, case.layout, which, case.block_size, scale))
    if program.op == "prefix":
        found.append(arrays[which][rows].astype(np.float64))
    elif program.op == "write_and_attend":
        found.append(_stored(program, batch, row, which, scale))
    return np.concatenate(found)


def _stored(program, batch, row, which, scale):
    """A new token's key or value after it was quantised and dequantised, [1, num_kv_heads, head_size]."""
    case, cache = program.case, batch.arrays[f"{which}_cache"]
    block, offset = divmod(int(batch.arrays["slot_mapping"][row]), case.block_size)
    new = batch.arrays[which][row].astype(np.float64)
    factor = oracle.scale_at(scale, block, offset)
    narrower = cache.dtype.itemsize < inputs.dtype_of(case.dtype).itemsize
    code = oracle.quantise(new, factor if narrower else 1.0, cache.dtype)
    return (factor * code.astype(np.float64))[None]


def attend(query, keys, values, positions, case, options, causal, exact):
    """Attention of queries [n, num_heads, d] at `positions` to all tokens [t, num_kv_heads, d]: out and lse."""
    real = np.float64 if exact else np.float32
    num_queries, num_heads, _ = query.shape
    group = num_heads // case.num_kv_heads
    out, lse = np.zeros((num_queries, num_heads, values.shape[2])), np.full((num_queries, num_heads), NOTHING)
    for kv_head in range(case.num_kv_heads):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        k, v = keys[:, kv_head].astype(real), values[:, kv_head].astype(real)
        step = max(1, 2**25 // max(1, len(k) * group))  # so many queries at once that their logits take little memory
        for first in range(0, num_queries, step):
            rows = slice(first, first + step)
            q = query[rows, heads].astype(real)
            logits = _logits(q, k, positions[rows], kv_head, case, options, causal, real)
            doubtful = not exact and (query.dtype == np.float32 or case.head_size > 256)
            doubts = _doubts(q, k, case, options) if doubtful else None
            out[rows, heads], lse[rows, heads] = _softmax(logits, v, heads, query.dtype, options, exact, doubts)
    return out, lse


def _doubts(q, k, case, options):
    """How far one rounding of its largest partial sum may move each logit, [n, group, t]."""
    scale = options["scale"]
    size = np.abs(q).reshape(-1, case.head_size) @ np.abs(k).T * abs(case.head_size**-0.5 if scale is None else scale)
    return size.reshape(*q.shape[:2], len(k)) * np.finfo(np.float32).eps / 2


def _logits(q, k, positions, kv_head, case, options, causal, real):
    """The logits of a kv head, [n, group, t]; -inf where a query does not attend."""
    scale = options["scale"]
    scale = real(case.head_size**-0.5 if scale is None else scale)
    group = case.num_heads // case.num_kv_heads
    logits = (q.reshape(len(positions) * group, case.head_size) @ k.T).reshape(*q.shape[:2], len(k)) * scale
    if case.logits_soft_cap is not None:
        logits = real(case.logits_soft_cap) * np.tanh(logits / real(case.logits_soft_cap))
    token, at = np.arange(len(k)), positions[:, None, None]
    if "alibi_slopes" in options:
        slopes = options["alibi_slopes"][kv_head * group : (kv_head + 1) * group].astype(real)
        logits = logits + slopes[None, :, None] * (token - at).astype(real)
    seen = (token <= at) if causal else np.ones((len(positions), 1, len(k)), bool)
    if case.sliding_window is not None:
        seen = seen & (token > at - case.sliding_window)
    if case.block_sparse is not None and case.block_sparse.vert_stride > 1:
        seen = seen & _pattern(token, at, kv_head, group, case)
    return np.where(seen, logits, NOTHING)


def _pattern(token, at, kv_head, group, case):
    pattern = case.block_sparse
    heads = kv_head * group + np.arange(group)
    if pattern.head_sliding_step >= 0:
        offset = (pattern.tp_rank * case.num_heads + heads) * pattern.head_sliding_step + 1
    else:
        offset = np.full(group, (pattern.tp_rank * case.num_kv_heads + kv_head) * -pattern.head_sliding_step + 1)
    block = token // pattern.block_size
    local = block > at // pattern.block_size - pattern.local_blocks
    return local | ((block + offset[None, :, None]) % pattern.vert_stride == 0)


def _softmax(logits, values, heads, dtype, options, exact, doubts):
    """Out and lse of logits [n, group, t]; with `doubts`, as far off as these errors of the logits make them."""
    top = logits.max(-1, initial=NOTHING)
    weights = np.exp(logits - np.where(np.isfinite(top), top, 0)[..., None])
    total = weights.sum(-1)
    if not exact and dtype != np.float32:  # the products take weights in the queries' precision
        weights = weights.astype(dtype).astype(np.float32)
    mean = (weights.reshape(total.size, len(values)) @ values).reshape(*total.shape, values.shape[1])
    mean = mean / np.where(total > 0, total, 1)[..., None]
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, top + np.log(total), NOTHING)
    if doubts is not None:  # the roundings are independent, so their squares add up
        moved = (np.where(weights > 0, weights * doubts, 0) / np.where(total > 0, total, 1)[..., None]) ** 2
        terms = [(moved.reshape(total.size, -1) @ values**n).reshape(mean.shape) for n in (0, 1, 2)]
        mean = mean + np.sqrt(np.maximum(terms[2] - 2 * mean * terms[1] + mean**2 * terms[0], 0))
        lse = lse + np.sqrt(moved.sum(-1))
    if "sinks" in options:
        sunk = np.logaddexp(lse, options["sinks"][heads].astype(lse.dtype))
        mean = np.where(total > 0, np.exp(np.where(total > 0, lse - sunk, 0)), 0)[..., None] * mean
        lse = np.where(total > 0, sunk, NOTHING)
    return (mean if exact else mean.astype(dtype).astype(np.float32)), lse


def hold_bits(actual, expected, what):
    """Raises `Wrong` unless every byte is the expected one."""
    actual = np.asarray(actual)
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise Wrong(f"{what}: {actual.dtype} {actual.shape}, expected {expected.dtype} {expected.shape}")
    different = np.argwhere(actual.view(np.uint8) != expected.view(np.uint8))
    if different.size:
        raise Wrong(f"{what}: {len(different)} bytes differ, first at {different[0].tolist()}")


def hold_results(results, exact, rough, whose=""):
    """Compares out and lse with the references."""
    for got, right, yardstick, what, terms in zip(results, exact, rough, ("out", "lse"), (0, 1), strict=True):
        plain.assert_close(got, right, yardstick, what + whose, size_of_terms=terms)


def hold_writes(caches, arrays, layout, scales):
    """Compares written caches with the oracle's, byte for byte."""
    expected = oracle.write(**arrays, layout=layout, **scales)
    for got, exact, which in zip(caches, expected, ("key", "value"), strict=True):
        hold_bits(np.asarray(got), exact, f"{which} cache")


def hold_second_run(program, batch, second, first):
    """Raises `Wrong` unless a second run gave the same bytes wherever the op promises any."""
    rows = _rows_kept(program, batch)
    for one, two in zip(first, second, strict=True):
        hold_bits(np.asarray(two)[rows], np.asarray(one)[rows], "the second run")


def check(program, batch, results):
    """Checks all results of an operation."""
    arrays, options, layout = batch.arrays, batch.options, program.case.layout
    if program.op in ("copy", "swap"):
        source = ("key_cache", "value_cache") if program.op == "copy" else ("src_key_cache", "src_value_cache")
        target = source if program.op == "copy" else ("dst_key_cache", "dst_value_cache")
        for got, s, t in zip(results, source, target, strict=True):
            hold_bits(got, oracle.swap(arrays[s], arrays[t], arrays["block_mapping"]), t)
        return
    if program.op == "write":
        hold_writes(results, arrays, layout, options)
        return
    if program.op == "mla_write":
        hold_bits(results[0], oracle.write_latent(*(arrays[name] for name in _WRITTEN_LATENTS), **options), "the cache")
        return
    exact, rough = references(program, batch)
    if program.op in RAGGED_OPS:
        _check_ragged(program, batch, results[:2], exact, rough)
        return
    hold_results(results[:2], exact, rough)
    if program.op == "v2":
        _check_residuals(program, results, exact)
    if program.op == "write_and_attend":
        _check_caches(program, batch, results[2:])


def _check_ragged(program, batch, results, exact, rough):
    rows = _rows_kept(program, batch)
    hold_results(*([np.asarray(x)[rows] for x in arrays] for arrays in (results, exact, rough)))
    if isinstance(rows, slice) and np.asarray(results[0])[sum(batch.query_lens) :].astype(np.float32).any():
        raise Wrong("padding rows are not 0")


def _rows_kept(program, batch):
    """The rows to compare: without padding and a sequence's rows if it has more queries than `max_query_len` says."""
    query_lens = np.array(batch.query_lens, int)
    if program.op not in RAGGED_OPS or program.max_query_len is None or (query_lens <= program.max_query_len).all():
        return slice(None)
    return np.flatnonzero(np.repeat(query_lens <= program.max_query_len, query_lens))


def _check_residuals(program, results, exact):
    """Checks that the partitions reduce to the result; the test suite compares each of them with the oracle."""
    _, _, exp_sums, max_logits, tmp_out = (np.asarray(x).astype(np.float64) for x in results)
    if not exp_sums.size:
        return
    empty = exp_sums == 0
    if not ((max_logits[empty] == NOTHING).all() and (tmp_out[empty] == 0).all()):
        raise Wrong("an empty partition's residuals are not 0, -inf and 0")
    if program.case.sinks:
        return
    got = np.asarray(results[0]).astype(np.float64)
    reduced = oracle.reduce_partitions(exp_sums, max_logits, tmp_out)
    # The reduce is in float32, and out has been rounded to its own dtype.
    unit = {"float32": 2.0**-20, "float16": 2.0**-10, "bfloat16": 2.0**-7}[program.case.dtype]
    if np.abs(reduced - got).max(initial=0) > unit * np.abs(tmp_out).max(initial=0) + 1e-6:
        raise Wrong("the residuals do not reduce to out")


def _check_caches(program, batch, caches):
    arrays, case = batch.arrays, program.case
    narrower = arrays["key_cache"].dtype.itemsize < inputs.dtype_of(case.dtype).itemsize
    scales = {name: batch.options.get(name) for name in ("k_scale", "v_scale")} if narrower else {}
    names = ("key", "value", "key_cache", "value_cache", "slot_mapping")
    hold_writes(caches, {name: arrays[name] for name in names}, case.layout, scales)
