"""Makes the poisoned inputs of a case: everything that the operations must not read is NaN, infinite or out of range.

Blocks are shuffled through the pool. Unmapped blocks, slots past seq_len, their scales and padding rows hold
NaN or infinity (the largest code for int8); table entries past the last used one hold absurd ids. So do the entries of
blocks that lie behind a sliding window: they may name a poisoned block.
"""

import zlib
from types import SimpleNamespace

import ml_dtypes
import numpy as np

from tests import oracle

# 1 is the id of a real block, which belongs to another sequence.
ABSURD_IDS = np.array([-1, 2**31 - 1, -(2**31), 1, 10**6, -7], np.int32)


def dtype_of(name):
    """The NumPy or ml_dtypes dtype with this name."""
    return np.dtype(getattr(ml_dtypes, name, name))


def rng_of(name):
    """Makes a random generator whose seed depends on a name alone."""
    return np.random.default_rng(zlib.crc32(str(name).encode()))


def poison(rng, shape, dtype):
    """Makes an array of NaN and, if the dtype has it, infinity; an int8 array holds the largest code."""
    if dtype == np.int8:
        return np.full(shape, 127, np.int8)
    array = np.full(shape, np.nan, dtype)
    if np.isinf(np.array(np.inf, np.float32).astype(dtype)):
        array[rng.random(shape) < 0.5] = np.inf
    return array


def cache_shapes(layout, num_blocks, num_kv_heads, block_size, head_size, dtype):
    """Gives the shapes of the key cache and of the value cache in a layout."""
    if layout == "hnd":
        shape = (num_blocks, num_kv_heads, block_size, head_size)
    elif layout == "nhd":
        shape = (num_blocks, block_size, num_kv_heads, head_size)
    else:
        x = 16 // dtype.itemsize
        key_shape = (num_blocks, num_kv_heads, head_size // x, block_size, x)
        return key_shape, (num_blocks, num_kv_heads, head_size, block_size)
    return shape, shape


def first_columns(case):
    """The table column of the first block of each sequence that some query's sliding window reaches."""
    query_lens = case.query_lens or [1] * len(case.seq_lens)
    if case.sliding_window is None:
        return [0] * len(case.seq_lens)
    return [
        max(0, length - max(count, 1) + 1 - case.sliding_window) // case.block_size
        for length, count in zip(case.seq_lens, query_lens, strict=True)
    ]


def make_tables(rng, case):
    """Makes block tables, with absurd ids around each sequence's blocks, and gives the pool's number of blocks."""
    num_seqs = len(case.seq_lens)
    needed = [-(-length // case.block_size) for length in case.seq_lens]
    num_blocks = sum(needed) + 3
    free = list(rng.permutation(num_blocks))
    width = max(needed) + case.spare_columns
    tables = np.resize(ABSURD_IDS, (num_seqs, max(width, 1)))
    for row, count in enumerate(needed):
        for column in range(count):
            shared = row > 0 and column < case.shared_blocks
            tables[row, column] = tables[0, column] if shared else free.pop()
    behind = np.array([-1, 2**31 - 1, free.pop(), -(2**31)], np.int32)  # no sequence has the third one
    for row, first in enumerate(first_columns(case)):
        tables[row, :first] = np.resize(behind, first)
    return tables, num_blocks


def make_scale(rng, case, granularity, num_blocks):
    """Makes a dequantisation factor of the named shape, typical for the cache's dtype; gives None for None."""
    if granularity is None:
        return None
    shapes = {
        "scalar": (),
        "head": (case.num_kv_heads,),
        "slot": (num_blocks, case.num_kv_heads, case.block_size),
    }
    typical = 0.03 if case.cache_dtype == "int8" else 0.7
    return np.asarray(case.scale_size * typical * rng.uniform(0.5, 2.0, shapes[granularity]), np.float32)


def token_vectors(rng, case, length, which):
    """Draws a sequence's keys or values before quantisation, float64 `[length, num_kv_heads, head_size]`."""
    shape = (length, case.num_kv_heads, case.head_size)
    if case.logits == "huge" and which == "key":
        # With queries of 32 and head_size 64 all logits are exactly -100352, 0 or 100352.
        return np.broadcast_to(rng.choice([-49.0, 0.0, 49.0], (length, case.num_kv_heads, 1)), shape)
    if case.logits == "equal" and which == "key":
        return np.ones(shape)
    if case.logits == "near-overflow" and which == "value":
        return rng.uniform(3e4, 6e4, shape)
    return rng.standard_normal(shape)


def fill(case, cache, table, first, vectors, which, scale, poisoned_scale):
    """Quantises a sequence's tokens from `first` on into its slots, and replaces these slots' poisoned scales."""
    tokens, vectors = np.arange(first, len(vectors)), vectors[first:]
    blocks, offsets = table[tokens // case.block_size], tokens % case.block_size
    factor = 1.0 if scale is None else oracle.scale_at(scale, blocks, offsets) / case.scale_size
    oracle.set_element(cache, blocks, offsets, case.layout, which, oracle.quantise(vectors, factor, cache.dtype))
    if poisoned_scale is not None and poisoned_scale.ndim == 3:
        poisoned_scale[blocks, :, offsets] = scale[blocks, :, offsets]


def make_cache(rng, case, tables, num_blocks):
    """Makes `key_cache`, `value_cache`, `k_scale` and `v_scale`, with poison in every slot that holds no token."""
    dtype = dtype_of(case.cache_dtype or case.dtype)
    dims = (num_blocks, case.num_kv_heads, case.block_size, case.head_size)
    result = {}
    shapes = cache_shapes(case.layout, *dims, dtype)
    for which, shape, granularity in zip(("key", "value"), shapes, (case.k_scale, case.v_scale), strict=True):
        cache = poison(rng, shape, dtype)
        scale = make_scale(rng, case, granularity, num_blocks)
        poisoned = np.full_like(scale, np.nan) if granularity == "slot" else scale
        for row, length in enumerate(case.seq_lens):
            first = first_columns(case)[row] * case.block_size
            fill(case, cache, tables[row], first, token_vectors(rng, case, length, which), which, scale, poisoned)
        result[f"{which}_cache"], result[f"{which[0]}_scale"] = cache, poisoned
    return result


def make_queries(rng, case, num_rows):
    """Makes queries in the case's dtype; with the keys they give the logits that the case names."""
    shape = (num_rows, case.num_heads, case.head_size)
    queries = np.full(shape, 32.0) if case.logits == "huge" else rng.standard_normal(shape)
    return queries.astype(dtype_of(case.dtype))


def make_options(rng, case):
    """Makes the options in two dicts: those that are arrays or may be traced, and those that are static."""
    arrays = {}
    if case.alibi:
        arrays["alibi_slopes"] = (0.5 ** np.linspace(1, 8, case.num_heads)).astype(np.float32)
    if case.sinks:
        arrays["sinks"] = (2 * rng.standard_normal(case.num_heads)).astype(np.float32)
    static = {
        "sliding_window": case.sliding_window,
        "logits_soft_cap": case.logits_soft_cap,
        "block_sparse": case.block_sparse,
        "layout": case.layout,
    }
    if case.scale == "traced":
        arrays["scale"] = np.float32(0.21)
    elif case.scale is not None:
        static["scale"] = case.scale
    return arrays, static


def hide_new_tokens(case, rng, tables, cache, which, context_lens):
    """Copies a cache and poisons the new tokens' slots, which prefix attention must not read."""
    hidden = cache.copy()
    kept = {
        (tables[row, token // case.block_size], token % case.block_size)
        for row, length in enumerate(context_lens)
        for token in range(length)
    }
    for row, (first, last) in enumerate(zip(context_lens, case.seq_lens, strict=True)):
        for token in range(first, last):
            slot = (tables[row, token // case.block_size], token % case.block_size)
            if slot not in kept:
                vectors = poison(rng, (case.num_kv_heads, case.head_size), cache.dtype)
                oracle.set_element(hidden, *slot, case.layout, which, vectors)
    return hidden


def make(case):
    """Makes the inputs of a case, as a namespace of NumPy arrays.

    Returns:
      `decode`, `ragged`, `prefix`: the positional arrays of each operation by name (ragged and prefix are
      None without `query_lens`); `arrays`: array options; `static`: static options as the oracle takes
      them (a `Sparse` for block_sparse); `max_seq_len` of the case; `num_rows`: ragged rows that are
      not padding.
    """
    rng = rng_of(case.name)
    tables, num_blocks = make_tables(rng, case)
    cache = make_cache(rng, case, tables, num_blocks)
    arrays, static = make_options(rng, case)
    for name in ("k_scale", "v_scale"):
        scale = cache.pop(name)
        if scale is not None:
            arrays[name] = scale
    step = {"block_tables": tables, "seq_lens": np.array(case.seq_lens, np.int32)}
    made = SimpleNamespace(arrays=arrays, static=static, ragged=None, prefix=None, num_rows=0)
    made.decode = {"query": make_queries(rng, case, len(case.seq_lens)), **cache, **step}
    if case.query_lens is None:
        return made
    step["query_start_loc"] = np.concatenate([[0], np.cumsum(case.query_lens)]).astype(np.int32)
    made.num_rows = sum(case.query_lens)
    query = make_queries(rng, case, made.num_rows + case.padding)
    query[made.num_rows :] = np.nan
    made.ragged = {"query": query, **cache, **step}
    context_lens = np.subtract(case.seq_lens, case.query_lens)
    new = {}
    for which in ("key", "value"):
        vectors = token_vectors(rng, case, len(query), which).astype(query.dtype)
        vectors[made.num_rows :] = np.nan
        new[which] = vectors
    hidden = {
        f"{which}_cache": hide_new_tokens(case, rng, tables, cache[f"{which}_cache"], which, context_lens)
        for which in ("key", "value")
    }
    made.prefix = {"query": query, **new, **hidden, **step}
    return made
