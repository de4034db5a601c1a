"""Computes the operations without paging in the precision that they have; its errors are the yardstick for theirs.

Tokens are gathered into dense arrays, arithmetic is float32, and the softmax is over whole rows. The weights that
multiply the values are rounded to the queries' dtype, and results to the dtype that they have in the operations. The
error of an operation, compared with the float64 oracle, may be at most twice the error of this computation, plus 1e-5.
It is written in NumPy, because XLA would have to compile every case.
"""

import jax.numpy as jnp
import numpy as np


def assert_close(actual, exact, yardstick, what, size_of_terms=0.0):
    """Checks the error criterion in each row: `actual` errs by at most twice the error of `yardstick`, plus 1e-5.

    A row is a sequence or a token, with all of its heads. With one bound for all rows, a long sequence, whose results
    are small, could have the error of a short one. In some rows the yardstick has hardly any error by luck, for
    example if one weight is 1 and the others are 0. So a row's error relative to its size counts as at least the
    median of all rows' errors, and as at least one rounding of the largest value to the dtype of `actual`. For results
    below 1 the 1e-5 shrinks with them, and rows of exact zeros must be zeros. It does not shrink below
    `size_of_terms`, for results that are small because larger terms cancel, as the maximum and the logarithm that add
    up to lse. Infinities must be where the oracle has them, and there must be no NaN.
    """
    rounding = float(jnp.finfo(np.asarray(actual).dtype).eps) / 2
    actual, yardstick = np.asarray(actual).astype(np.float64), np.asarray(yardstick).astype(np.float64)
    assert actual.shape == exact.shape, f"{what}: shape {actual.shape}, expected {exact.shape}"
    assert not np.isnan(actual).any(), f"{what}: {np.isnan(actual).sum()} of {actual.size} values are NaN"
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(actual[~finite], exact[~finite], err_msg=f"{what}: infinities")
    if not finite.any():
        return
    wanted = np.where(finite, exact, 0).reshape(len(exact), -1)
    exact = np.where(finite, exact, 0)
    errors, rough = (np.where(finite, np.abs(x - exact), 0).reshape(wanted.shape) for x in (actual, yardstick))
    floor = 1e-5 * min(1, max(size_of_terms, np.abs(wanted).max())) * (wanted != 0).any(axis=1)
    size, slack = np.abs(wanted).max(axis=1), rough.max(axis=1)
    typical = max(rounding, np.median(slack[size > 0] / size[size > 0]) if size.any() else 0)
    # Sums are in float32: an error of a few units in the last place of the row's largest value is always allowed.
    bounds = 2 * np.maximum(slack, typical * size) + floor + 4 * np.finfo(np.float32).eps * size
    off = errors > bounds[:, None]
    if not off.any():
        return
    row = int(off.any(axis=1).argmax())
    at = tuple(map(int, np.unravel_index(errors[row].argmax(), exact.shape[1:])))
    raise AssertionError(
        f"{what}: error {errors[row].max():.3g} > {bounds[row]:.3g} at {(row, *at)}: {actual[(row, *at)]:.6g}, not "
        f"{exact[(row, *at)]:.6g}; {off.sum()} of {errors.size} values in {off.any(axis=1).sum()} rows are off"
    )


def dense(cache, table, length, layout, which, scale):
    """Gathers a sequence's tokens, dequantised in float32: `[num_kv_heads, length, head_size]`.

    Where a table's entries behind a sliding window lead to poison, or to no block, the tokens become 0.
    """
    if layout == "nhd":
        cache = cache.swapaxes(1, 2)
    elif layout == "vllm" and which == "value":
        cache = cache.swapaxes(2, 3)
    elif layout == "vllm":
        blocks, heads, groups, block_size, x = cache.shape
        cache = cache.swapaxes(2, 3).reshape(blocks, heads, block_size, groups * x)
    used = np.clip(table[: -(-length // cache.shape[2])], 0, len(cache) - 1)
    tokens = cache[used].astype(np.float32)
    tokens = np.where(np.isfinite(tokens), tokens, np.float32(0))
    if scale is not None:
        scale = np.asarray(scale, np.float32)
        factor = scale[used][..., None] if scale.ndim == 3 else scale.reshape(1, -1, 1, 1)
        tokens = tokens * np.where(np.isfinite(factor), factor, np.float32(0))
    tokens = tokens.swapaxes(0, 1).reshape(tokens.shape[1], -1, tokens.shape[3])
    return tokens[:, :length]


def visible(positions, length, num_heads, num_kv_heads, options):
    """Which tokens each query sees: bool `[num_heads, num_queries, length]`."""
    query, token = positions[None, :, None], np.arange(length)[None, None, :]
    before = token <= query if options.get("causal", True) else np.ones_like(token <= query)
    mask = np.broadcast_to(before, (num_heads, len(positions), length))
    if options.get("sliding_window") is not None:
        mask = mask & (query - token < options["sliding_window"])
    pattern = options.get("block_sparse")
    if pattern is not None and pattern.vert_stride > 1:
        heads = np.arange(num_heads)
        if pattern.head_sliding_step >= 0:
            shift = (heads + pattern.tp_rank * num_heads) * pattern.head_sliding_step
        else:
            groups = heads // (num_heads // num_kv_heads)
            shift = (groups + pattern.tp_rank * num_kv_heads) * abs(pattern.head_sliding_step)
        column = token // pattern.block_size
        strided = (column + shift[:, None, None] + 1) % pattern.vert_stride == 0
        local = query // pattern.block_size - column < pattern.local_blocks
        mask = mask & (strided | local)
    return mask


def logits_of(query, keys, positions, options):
    """The masked float32 logits `[num_heads, num_queries, length]` of queries `[num_queries, num_heads, d]`."""
    num_queries, num_heads, head_size = query.shape
    num_kv_heads, length, _ = keys.shape
    scale = options.get("scale")
    scale = np.float32(head_size**-0.5 if scale is None else scale)
    heads = query.astype(np.float32).swapaxes(0, 1)
    heads = heads.reshape(num_kv_heads, num_heads // num_kv_heads * num_queries, head_size)
    logits = (heads @ keys.swapaxes(1, 2)).reshape(num_heads, num_queries, length) * scale
    if options.get("logits_soft_cap") is not None:
        cap = np.float32(options["logits_soft_cap"])
        logits = np.tanh(logits / cap) * cap
    if options.get("alibi_slopes") is not None:
        distance = (np.arange(length)[None, :] - positions[:, None]).astype(np.float32)
        logits = logits + np.asarray(options["alibi_slopes"], np.float32)[:, None, None] * distance[None]
    return np.where(visible(positions, length, num_heads, num_kv_heads, options), logits, np.float32("-inf"))


def softmax_parts(logits, values, dtype):
    """The softmax along the last axis: `(exp_sums, max_logits, normalised out)`; all logits may be -inf.

    The weights are rounded to `dtype` before they multiply the values, as in the kernels.
    """
    num_heads, num_queries, length = logits.shape
    maximum = logits.max(axis=-1)
    weights = np.exp(logits - np.where(np.isfinite(maximum), maximum, np.float32(0))[..., None])
    total = weights.sum(axis=-1)
    weights = weights.astype(dtype).astype(np.float32)
    packed = weights.reshape(values.shape[0], -1, length) @ values
    out = packed.reshape(num_heads, num_queries, -1) / np.where(total > 0, total, np.float32(1))[..., None]
    return total, maximum, out


def attention(query, keys, values, positions, options):
    """Attention: out `[num_queries, num_heads, d]` in the query's dtype, lse float32 `[num_queries, num_heads]`."""
    total, maximum, out = softmax_parts(logits_of(query, keys, positions, options), values, query.dtype)
    with np.errstate(divide="ignore"):
        lse = maximum + np.log(total)
    if options.get("sinks") is not None:
        sinks = np.asarray(options["sinks"], np.float32)[:, None]
        with_sink = np.logaddexp(lse, sinks)
        out, lse = out * np.exp(lse - with_sink)[..., None], with_sink
    return out.swapaxes(0, 1).astype(query.dtype), lse.swapaxes(0, 1)


def decode(query, key_cache, value_cache, block_tables, seq_lens, *, layout="hnd", **options):
    """`paged_attention_v1` with its lse."""
    out = np.zeros_like(query)
    lse = np.full(query.shape[:2], -np.inf, np.float32)
    for s, seq_len in enumerate(seq_lens):
        if seq_len:
            keys = dense(key_cache, block_tables[s], seq_len, layout, "key", options.get("k_scale"))
            values = dense(value_cache, block_tables[s], seq_len, layout, "value", options.get("v_scale"))
            positions = np.array([seq_len - 1])
            out[s : s + 1], lse[s : s + 1] = attention(query[s : s + 1], keys, values, positions, options)
    return out, lse


def residuals(
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    *,
    partition_size,
    num_partitions,
    layout="hnd",
    **options,
):
    """`paged_attention_v2`'s `(exp_sums, max_logits, tmp_out)`; tmp_out rounded to the query's dtype."""
    num_seqs, num_heads, head_size = query.shape
    exp_sums = np.zeros((num_seqs, num_heads, num_partitions), np.float32)
    max_logits = np.full_like(exp_sums, -np.inf)
    tmp_out = np.zeros((*exp_sums.shape, head_size), query.dtype)
    for s, seq_len in enumerate(seq_lens):
        if not seq_len:
            continue
        keys = dense(key_cache, block_tables[s], seq_len, layout, "key", options.get("k_scale"))
        values = dense(value_cache, block_tables[s], seq_len, layout, "value", options.get("v_scale"))
        logits = logits_of(query[s : s + 1], keys, np.array([seq_len - 1]), options)
        for p in range(-(-seq_len // partition_size)):
            part = slice(p * partition_size, (p + 1) * partition_size)
            total, maximum, out = softmax_parts(logits[..., part], values[:, part], query.dtype)
            exp_sums[s, :, p], max_logits[s, :, p] = total[:, 0], maximum[:, 0]
            tmp_out[s, :, p] = out[:, 0].astype(query.dtype)
    return exp_sums, max_logits, tmp_out


def ragged(
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    query_start_loc,
    *,
    layout="hnd",
    new=None,
    **options,
):
    """`ragged_paged_attention`, and `prefix_attention` when `new` is the pair `(key, value)`, with lse."""
    out = np.zeros_like(query)
    lse = np.full(query.shape[:2], -np.inf, np.float32)
    for s, seq_len in enumerate(seq_lens):
        rows = slice(int(query_start_loc[s]), int(query_start_loc[s + 1]))
        num_queries = rows.stop - rows.start
        if num_queries == 0:
            continue
        context_len = int(seq_len) - num_queries
        length = int(seq_len) if new is None else context_len
        keys = dense(key_cache, block_tables[s], length, layout, "key", options.get("k_scale"))
        values = dense(value_cache, block_tables[s], length, layout, "value", options.get("v_scale"))
        if new is not None:
            new_keys, new_values = (array[rows].astype(np.float32).swapaxes(0, 1) for array in new)
            keys, values = (
                np.concatenate([keys, new_keys], axis=1),
                np.concatenate([values, new_values], axis=1),
            )
        positions = context_len + np.arange(num_queries)
        out[rows], lse[rows] = attention(query[rows], keys, values, positions, options)
    return out, lse


def prefix(query, key, value, key_cache, value_cache, block_tables, seq_lens, query_start_loc, **options):
    """`prefix_attention` with its lse."""
    return ragged(query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, new=(key, value), **options)


def latent(
    query,
    latent_cache,
    block_tables,
    seq_lens,
    query_start_loc=None,
    *,
    value_size,
    latent_scale=None,
    max_seq_len=None,
    **options,
):
    """`ragged_mla_attention`, and `mla_paged_attention` without `query_start_loc`, with lse."""
    starts = np.arange(len(seq_lens) + 1) if query_start_loc is None else query_start_loc
    out = np.zeros((*query.shape[:2], value_size), query.dtype)
    lse = np.full(query.shape[:2], -np.inf, np.float32)
    for s, seq_len in enumerate(seq_lens):
        rows = slice(int(starts[s]), int(starts[s + 1]))
        num_queries = rows.stop - rows.start
        if num_queries == 0 or seq_len == 0:
            continue
        length = int(seq_len) if max_seq_len is None else min(int(seq_len), max_seq_len)
        keys = dense(latent_cache[:, :, None], block_tables[s], length, "nhd", "key", latent_scale)
        positions = int(seq_len) - num_queries + np.arange(num_queries)
        out[rows], lse[rows] = attention(query[rows], keys, keys[..., :value_size], positions, options)
    return out, lse


def merge(out_a, lse_a, out_b, lse_b):
    """`merge_attention_states` in float32, out rounded to its dtype."""
    with np.errstate(invalid="ignore"):
        lse = np.logaddexp(lse_a, lse_b)
    top = np.maximum(lse_a, lse_b)
    weight_a, weight_b = (np.exp(x - np.where(np.isfinite(top), top, np.float32(0)))[..., None] for x in (lse_a, lse_b))
    out = weight_a * out_a.astype(np.float32) + weight_b * out_b.astype(np.float32)
    total = weight_a + weight_b
    return (out / np.where(total == 0, np.float32(1), total)).astype(out_a.dtype), lse
