"""Computes every operation in float64 NumPy, one query and one head at a time.

This file follows the specification of the operations alone: it imports nothing of the library, copies no code of it,
and is as simple as possible. Arguments are the arrays that the operations take (with the bfloat16 and float8 of
ml_dtypes); results are float64.
"""

import ml_dtypes
import numpy as np

NEGATIVE_INFINITY = float("-inf")


def element(cache, block, offset, layout, which):
    """Reads the vectors of a slot, or of several slots, from a cache: `[..., num_kv_heads, head_size]`."""
    if layout == "hnd":
        return cache[block, :, offset, :]
    if layout == "nhd":
        return cache[block, offset, :, :]
    if which == "value":
        return cache[block, :, :, offset]
    split = cache[block, :, :, offset, :]
    return split.reshape(*split.shape[:-2], -1)


def set_element(cache, block, offset, layout, which, vectors):
    """Stores the vectors `[..., num_kv_heads, head_size]` of a slot, or of several slots, in a cache, in place."""
    if layout == "hnd":
        cache[block, :, offset, :] = vectors
    elif layout == "nhd":
        cache[block, offset, :, :] = vectors
    elif which == "value":
        cache[block, :, :, offset] = vectors
    else:
        num_kv_heads, groups, x = cache.shape[1], cache.shape[2], cache.shape[4]
        cache[block, :, :, offset, :] = vectors.reshape(*vectors.shape[:-2], num_kv_heads, groups, x)


def cache_dims(key_cache, layout):
    """`(num_blocks, num_kv_heads, block_size, head_size)` of a key cache."""
    if layout == "hnd":
        num_blocks, num_kv_heads, block_size, head_size = key_cache.shape
    elif layout == "nhd":
        num_blocks, block_size, num_kv_heads, head_size = key_cache.shape
    else:
        num_blocks, num_kv_heads, groups, block_size, x = key_cache.shape
        head_size = groups * x
    return num_blocks, num_kv_heads, block_size, head_size


def scale_at(scale, block, offset):
    """The dequantisation factors of slots, which multiply vectors `[..., num_kv_heads, head_size]`."""
    scale = np.asarray(1.0 if scale is None else scale, np.float64)
    if scale.ndim == 3:
        scale = scale[block, :, offset]
    return scale[..., None]


def gather(cache, table, length, layout, which, block_size, scale=None):
    """Reads a sequence's first `length` tokens, dequantised: float64 `[length, num_kv_heads, head_size]`.

    Entries of the table behind a sliding window may hold anything: their tokens are read from any block.
    """
    if length == 0:
        return None
    tokens = np.arange(length)
    blocks, offsets = np.clip(np.asarray(table)[tokens // block_size], 0, len(cache) - 1), tokens % block_size
    vectors = element(cache, blocks, offsets, layout, which).astype(np.float64)
    return scale_at(scale, blocks, offsets) * vectors


def sparse_mask(tokens, seq_len, head, num_heads, num_kv_heads, pattern):
    """Which of `tokens` a query at `seq_len - 1` attends to by the block-sparse pattern."""
    group = num_heads // num_kv_heads
    key_block, query_block = tokens // pattern.block_size, (seq_len - 1) // pattern.block_size
    step = pattern.head_sliding_step
    if step >= 0:
        offset = (pattern.tp_rank * num_heads + head) * step + 1
    else:
        offset = (pattern.tp_rank * num_kv_heads + head // group) * -step + 1
    return ((key_block + offset) % pattern.vert_stride == 0) | (key_block > query_block - pattern.local_blocks)


def head_logits(query, keys, head, num_heads, options, seq_len=None):
    """One head's logits over its tokens, -inf where it does not attend: float64 `[len(keys)]`.

    The query is at position `seq_len - 1`; without `seq_len` it is the query of the last token.
    """
    num_tokens, num_kv_heads, head_size = keys.shape
    tokens, seq_len = np.arange(num_tokens), num_tokens if seq_len is None else seq_len
    scale = options.get("scale")
    scale = head_size**-0.5 if scale is None else float(np.asarray(scale, np.float64))
    seen = np.ones(num_tokens, bool)
    window = options.get("sliding_window")
    if window is not None:
        seen &= tokens > seq_len - 1 - window
    pattern = options.get("block_sparse")
    if pattern is not None and pattern.vert_stride > 1:
        seen &= sparse_mask(tokens, seq_len, head, num_heads, num_kv_heads, pattern)
    logits = np.full(num_tokens, NEGATIVE_INFINITY)
    logits[seen] = scale * (keys[seen, head // (num_heads // num_kv_heads)] @ query)
    cap = options.get("logits_soft_cap")
    if cap is not None:
        logits[seen] = cap * np.tanh(logits[seen] / cap)
    slopes = options.get("alibi_slopes")
    if slopes is not None:
        logits[seen] += float(slopes[head]) * (tokens[seen] - seq_len + 1)
    return logits


def weighted(logits, values):
    """The softmax of one head over some tokens: `(sum of exp(logit - max), max, weighted mean of the values)`."""
    maximum = logits.max(initial=NEGATIVE_INFINITY)
    if maximum == NEGATIVE_INFINITY:
        return 0.0, NEGATIVE_INFINITY, np.zeros(values.shape[-1])
    seen = logits > NEGATIVE_INFINITY
    weights = np.exp(logits[seen] - maximum)
    return weights.sum(), maximum, weights @ values[seen] / weights.sum()


def attend(query, keys, values, options, seq_len=None):
    """The attention of one query token to all tokens that it may see.

    Args:
      query: `[num_heads, head_size]`.
      keys, values: float64 `[num_tokens, num_kv_heads, head_size]`, or None when there are none.
      options: a dict of the operations' options.
      seq_len: the query's position plus 1; the number of tokens if None.

    Returns:
      out `[num_heads, head_size]` and lse `[num_heads]`.
    """
    num_heads, head_size = query.shape
    lse = np.full(num_heads, NEGATIVE_INFINITY)
    if keys is None:
        return np.zeros((num_heads, head_size)), lse
    out = np.zeros((num_heads, values.shape[-1]))
    group = num_heads // keys.shape[1]
    sinks = options.get("sinks")
    for head in range(num_heads):
        logits = head_logits(query[head].astype(np.float64), keys, head, num_heads, options, seq_len)
        total, maximum, mean = weighted(logits, values[:, head // group])
        parts = [] if total == 0 else [maximum + np.log(total)]
        if sinks is not None and parts:  # a query that sees no token has lse -inf, with a sink too
            parts.append(float(sinks[head]))
        lse[head] = np.logaddexp.reduce(parts) if parts else NEGATIVE_INFINITY
        out[head] = mean * np.exp(maximum + np.log(total) - lse[head]) if total else 0.0
    return out, lse


def decode(query, key_cache, value_cache, block_tables, seq_lens, *, layout="hnd", **options):
    """`paged_attention_v1`: out `[num_seqs, num_heads, head_size]`, lse `[num_seqs, num_heads]`."""
    block_size = cache_dims(key_cache, layout)[2]
    out, lse = [], []
    for row, table, seq_len in zip(query, block_tables, seq_lens, strict=True):
        keys = gather(key_cache, table, seq_len, layout, "key", block_size, options.get("k_scale"))
        values = gather(value_cache, table, seq_len, layout, "value", block_size, options.get("v_scale"))
        row_out, row_lse = attend(row, keys, values, options)
        out.append(row_out)
        lse.append(row_lse)
    return np.stack(out), np.stack(lse)


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
    """`paged_attention_v2`'s residuals `(exp_sums, max_logits, tmp_out)`; they leave sinks out."""
    block_size = cache_dims(key_cache, layout)[2]
    num_seqs, num_heads, head_size = query.shape
    exp_sums = np.zeros((num_seqs, num_heads, num_partitions))
    max_logits = np.full(exp_sums.shape, NEGATIVE_INFINITY)
    tmp_out = np.zeros((*exp_sums.shape, head_size))
    for s, seq_len in enumerate(seq_lens):
        if seq_len == 0:
            continue
        keys = gather(key_cache, block_tables[s], seq_len, layout, "key", block_size, options.get("k_scale"))
        values = gather(value_cache, block_tables[s], seq_len, layout, "value", block_size, options.get("v_scale"))
        group = num_heads // keys.shape[1]
        for h in range(num_heads):
            logits = head_logits(query[s, h].astype(np.float64), keys, h, num_heads, options)
            for p, start in enumerate(range(0, seq_len, partition_size)):
                part = slice(start, start + partition_size)
                exp_sums[s, h, p], max_logits[s, h, p], tmp_out[s, h, p] = weighted(
                    logits[part], values[part, h // group]
                )
    return exp_sums, max_logits, tmp_out


def reduce_partitions(exp_sums, max_logits, tmp_out):
    """Reduces residuals over the partitions, without sinks: out `[..., head_size]`."""
    maximum = max_logits.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        weights = np.where(exp_sums > 0, exp_sums * np.exp(max_logits - maximum), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    return (weights[..., None] * tmp_out).sum(axis=-2) / np.where(total > 0, total, 1.0)


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
    causal=True,
    max_seq_len=None,
    **options,
):
    """`ragged_paged_attention`, and `prefix_attention` when `new` is the pair `(key, value)`.

    If not `causal`, every query sees all tokens of its sequence. No query sees tokens at or past `max_seq_len`.

    Returns:
      out `[num_tokens, num_heads, head_size]` (0 at padding) and lse `[num_tokens, num_heads]` (-inf there).
    """
    block_size = cache_dims(key_cache, layout)[2]
    out = np.zeros(query.shape)
    lse = np.full(query.shape[:2], NEGATIVE_INFINITY)
    for s, seq_len in enumerate(seq_lens):
        start, stop = int(query_start_loc[s]), int(query_start_loc[s + 1])
        context_len = int(seq_len) - (stop - start)
        if stop == start:
            continue
        length = int(seq_len) if new is None else context_len
        keys = gather(key_cache, block_tables[s], length, layout, "key", block_size, options.get("k_scale"))
        values = gather(value_cache, block_tables[s], length, layout, "value", block_size, options.get("v_scale"))
        if new is not None:
            new_keys, new_values = (array[start:stop].astype(np.float64) for array in new)
            keys = new_keys if keys is None else np.concatenate([keys, new_keys])
            values = new_values if values is None else np.concatenate([values, new_values])
        for j in range(stop - start):
            position = context_len + j
            seen = position + 1 if causal else int(seq_len)
            seen = seen if max_seq_len is None else min(seen, max_seq_len)
            results = attend(query[start + j], keys[:seen], values[:seen], options, position + 1)
            out[start + j], lse[start + j] = results
    return out, lse


def prefix(query, key, value, key_cache, value_cache, block_tables, seq_lens, query_start_loc, **options):
    """`prefix_attention`: out and lse as in `ragged`."""
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
    causal=True,
    max_seq_len=None,
    **options,
):
    """`ragged_mla_attention`, and `mla_paged_attention` without `query_start_loc`: out and lse.

    Keys are the latents, values their first `value_size` elements; all query heads share them.
    """
    starts = np.arange(len(seq_lens) + 1) if query_start_loc is None else query_start_loc
    block_size = latent_cache.shape[1]
    out, lse = np.zeros((*query.shape[:2], value_size)), np.full(query.shape[:2], NEGATIVE_INFINITY)
    for s, seq_len in enumerate(seq_lens):
        if seq_len == 0:
            continue
        tokens = np.arange(seq_len)
        slots = np.asarray(block_tables[s])[tokens // block_size], tokens % block_size
        latents = scale_at(latent_scale, *slots) * latent_cache[slots].astype(np.float64)[:, None]
        for row in range(int(starts[s]), int(starts[s + 1])):
            seen = int(seq_len) - int(starts[s + 1]) + row + 1 if causal else int(seq_len)
            seen = seen if max_seq_len is None else min(seen, max_seq_len)
            keys = latents[:seen]
            out[row], lse[row] = attend(query[row], keys, keys[..., :value_size], options)
    return out, lse


def merge(out_a, lse_a, out_b, lse_b):
    """`merge_attention_states`: `(out, lse)` of the union of two disjoint sets of tokens."""
    lse_a, lse_b = np.asarray(lse_a, np.float64), np.asarray(lse_b, np.float64)
    with np.errstate(invalid="ignore"):
        lse = np.logaddexp(lse_a, lse_b)
    empty = lse == NEGATIVE_INFINITY
    base = np.where(empty, 0.0, lse)
    weight_a, weight_b = np.exp(lse_a - base)[..., None], np.exp(lse_b - base)[..., None]
    return weight_a * np.asarray(out_a, np.float64) + weight_b * np.asarray(out_b, np.float64), lse


def largest(dtype):
    """The largest finite value of a cache's dtype."""
    dtype = np.dtype(dtype)
    return 127.0 if dtype == np.int8 else float(ml_dtypes.finfo(dtype).max)


def smallest(dtype):
    """The most negative finite value of a cache's dtype, -128 for int8."""
    dtype = np.dtype(dtype)
    return -128.0 if dtype == np.int8 else float(ml_dtypes.finfo(dtype).min)


def quantise(values, scale, dtype):
    """`values / scale`, saturated to the finite range of `dtype`, rounded to nearest even; 0 stays 0."""
    values = np.asarray(values, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = np.where(values == 0, values, values / scale)
    quotient = np.clip(quotient, smallest(dtype), largest(dtype))
    return (np.rint(quotient) if np.dtype(dtype) == np.int8 else quotient).astype(dtype)


def write(key, value, key_cache, value_cache, slot_mapping, *, layout="hnd", k_scale=None, v_scale=None):
    """`write_to_paged_cache`: new `(key_cache, value_cache)`; if several tokens have one slot, the last one stays."""
    num_blocks, _, block_size, _ = cache_dims(key_cache, layout)
    key_cache, value_cache = key_cache.copy(), value_cache.copy()
    for token, slot in enumerate(slot_mapping):
        if not 0 <= slot < num_blocks * block_size:
            continue
        block, offset = divmod(int(slot), block_size)
        for cache, which, new, scale in (
            (key_cache, "key", key, k_scale),
            (value_cache, "value", value, v_scale),
        ):
            code = quantise(new[token], scale_at(scale, block, offset), cache.dtype)
            set_element(cache, block, offset, layout, which, code)
    return key_cache, value_cache


def write_latent(latents, latent_cache, slot_mapping, *, scale=None):
    """`write_to_latent_cache`: the new cache; if several tokens have one slot, the last one stays."""
    latent_cache = latent_cache.copy()
    num_blocks, block_size, _ = latent_cache.shape
    for token, slot in enumerate(slot_mapping):
        if 0 <= slot < num_blocks * block_size:
            code = quantise(latents[token], 1.0 if scale is None else np.float64(scale), latent_cache.dtype)
            latent_cache[divmod(int(slot), block_size)] = code
    return latent_cache


def swap(source, destination, block_mapping):
    """`swap_blocks` of one cache: `destination` with the mapped blocks of `source`."""
    result = destination.copy()
    for from_block, to_block in block_mapping:
        if 0 <= from_block < len(source) and 0 <= to_block < len(destination):
            result[to_block] = source[from_block]
    return result


def copy(cache, block_mapping):
    """`copy_blocks` of one cache: every source is read before any destination is written."""
    return swap(cache, cache, block_mapping)
