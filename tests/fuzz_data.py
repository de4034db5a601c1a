"""Draws data for a program of `tests.fuzz_draw`, with poison wherever the operations must not read."""

from dataclasses import replace

import numpy as np

from tests import inputs, oracle
from tests.fuzz_draw import LATENT_OPS, RAGGED_OPS, Batch, lengths, query_lengths

ABSURD = inputs.ABSURD_IDS


def draw(rng, program):
    """Draws one set of data for a program."""
    if program.op in LATENT_OPS:
        return _of_latents(draw(rng, replace(program, op=LATENT_OPS[program.op])), program.op)
    if program.op == "write":
        return _for_writes(rng, program)
    if program.op in ("copy", "swap"):
        return _for_copies(rng, program)
    return _for_attention(rng, program)


def _of_latents(batch, op):
    """The same batch with keys as latents: they have no axis of heads, and there are no values beside them."""
    arrays = {name: x for name, x in batch.arrays.items() if not name.startswith(("key", "value"))}
    arrays["latent_cache"] = batch.arrays["key_cache"][:, :, 0]
    if op == "mla_write":
        arrays["latent"] = batch.arrays["key"][:, 0]
    renamed = {"k_scale": "scale" if op == "mla_write" else "latent_scale"}
    options = {renamed.get(name, name): x for name, x in batch.options.items() if name != "v_scale"}
    return replace(batch, arrays=arrays, options=options)


def _for_attention(rng, program):
    """Draws sequences in a pool of poison."""
    case = program.case
    seq_lens = lengths(rng, program)
    tables = _tables(rng, program, seq_lens)
    scales = {f"{w}_scale": inputs.make_scale(rng, case, getattr(case, f"{w}_scale"), program.num_blocks) for w in "kv"}
    ragged = program.op in RAGGED_OPS
    query_lens = query_lengths(rng, program, seq_lens) if ragged else [1] * len(seq_lens)
    arrays = {"query": _queries(rng, case, program.num_tokens if ragged else program.num_seqs, sum(query_lens), ragged)}
    if program.op in ("prefix", "write_and_attend"):
        arrays |= {which: _new(rng, case, len(arrays["query"]), which) for which in ("key", "value")}
    shown = {}
    for which in ("key", "value"):
        cached = seq_lens
        if program.op == "prefix":
            cached = [length - count for length, count in zip(seq_lens, query_lens, strict=True)]
        if program.op == "write_and_attend":
            cached = [max(0, length - 1) for length in seq_lens]
        name = f"{which[0]}_scale"
        arrays[f"{which}_cache"], shown[name] = _cache(rng, program, tables, cached, which, scales[name])
    arrays |= {"block_tables": tables, "seq_lens": np.array(seq_lens, np.int32)}
    if ragged:
        arrays["query_start_loc"] = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    if program.op == "write_and_attend":
        arrays["slot_mapping"] = _last_slots(rng, program, tables, seq_lens, scales, shown)
        _remove_ties(arrays, case, scales)
    options, _ = inputs.make_options(rng, case)
    options |= {name: scale for name, scale in shown.items() if scale is not None}
    return Batch(seq_lens, query_lens, arrays, options)


def _tables(rng, program, seq_lens):
    """Draws block tables: shuffled blocks for each sequence's tokens, and absurd ids after them."""
    free = list(rng.permutation(program.num_blocks))
    tables = rng.choice(ABSURD, (program.num_seqs, program.width)).astype(np.int32)
    for row, length in enumerate(seq_lens):
        for column in range(-(-length // program.case.block_size)):
            tables[row, column] = free.pop()
    return tables


def _queries(rng, case, rows, used, ragged):
    query = _normal(rng, (rows, case.num_heads, case.head_size)).astype(inputs.dtype_of(case.dtype))
    if ragged:
        query[used:] = np.nan
    return query


def _new(rng, case, rows, which):
    return _vectors(rng, case, rows, which).astype(inputs.dtype_of(case.dtype))


def _cache(rng, program, tables, cached, which, scale):
    """Draws a pool of poison that holds the sequences' cached tokens, and the scales of these tokens."""
    case = program.case
    dtype = inputs.dtype_of(case.cache_dtype or case.dtype)
    dims = (program.num_blocks, case.num_kv_heads, case.block_size, case.head_size)
    shape = inputs.cache_shapes(case.layout, *dims, dtype)[which == "value"]
    cache = poison(rng, shape, dtype)
    shown = scale
    if scale is not None and scale.ndim == 3:
        shown = np.full_like(scale, np.nan)
    for row, length in enumerate(cached):
        if not length:
            continue
        tokens = np.arange(length)
        blocks, offsets = tables[row, tokens // case.block_size], tokens % case.block_size
        vectors = _vectors(rng, case, length, which)
        factor = 1.0 if scale is None else np.abs(oracle.scale_at(scale, blocks, offsets))
        store(cache, blocks, offsets, case.layout, which, oracle.quantise(vectors, factor, dtype))
        if shown is not scale:
            shown[blocks, :, offsets] = scale[blocks, :, offsets]
    return cache, shown


def _vectors(rng, case, length, which):
    shape = (length, case.num_kv_heads, case.head_size)
    return np.ones(shape) if case.logits == "equal" and which == "key" else _normal(rng, shape)


def _normal(rng, shape):
    return rng.standard_normal(shape, np.float32)  # float32 takes half the time of float64


def poison(rng, shape, dtype):
    """Does what `inputs.poison` does, by repeating a small array: to draw all of it would take too long."""
    return np.resize(inputs.poison(rng, (4099,), dtype), shape)


def store(cache, blocks, offsets, layout, which, vectors):
    """Stores tokens' vectors [n, num_kv_heads, head_size] in their slots."""
    if layout == "hnd":
        cache[blocks, :, offsets, :] = vectors
    elif layout == "nhd":
        cache[blocks, offsets, :, :] = vectors
    elif which == "value":
        cache[blocks, :, :, offsets] = vectors
    else:
        x = cache.shape[4]
        cache[blocks, :, :, offsets, :] = vectors.reshape(*vectors.shape[:2], -1, x)


def _last_slots(rng, program, tables, seq_lens, scales, shown):
    """Draws the slot of each sequence's last token; for empty sequences, a slot that is negative or past the pool.

    Only empty sequences have no real slot: any other row without one would need its last token in the cache already.
    """
    size = program.case.block_size
    slots = np.empty(program.num_seqs, np.int32)
    for row, length in enumerate(seq_lens):
        if length == 0:
            slots[row] = rng.choice([-1, -(2**31), 2**31 - 1, program.num_blocks * size])
            continue
        block, offset = tables[row, (length - 1) // size], (length - 1) % size
        slots[row] = block * size + offset
        for name, scale in scales.items():
            if scale is not None and scale.ndim == 3:
                shown[name][block, :, offset] = scale[block, :, offset]
    return slots


def _for_writes(rng, program):
    """Draws new tokens, pools of random bits, and slots: some negative, some past the pool, none twice."""
    case, size = program.case, program.num_blocks * program.case.block_size
    count = program.num_seqs
    dtype = inputs.dtype_of(case.cache_dtype or case.dtype)
    dims = (program.num_blocks, case.num_kv_heads, case.block_size, case.head_size)
    shapes = inputs.cache_shapes(case.layout, *dims, dtype)
    caches = [random_bits(rng, shape, dtype) for shape in shapes]
    slots = rng.permutation(size)[:count].astype(np.int32)
    slots = np.concatenate([slots, np.full(count - len(slots), -1, np.int32)])
    skipped = rng.random(count) < 0.2
    slots[skipped] = rng.choice([-1, -5, size, 2**31 - 1, -(2**31)], int(skipped.sum()))
    arrays = {which: _new(rng, case, count, which) for which in ("key", "value")}
    arrays |= {"key_cache": caches[0], "value_cache": caches[1], "slot_mapping": slots}
    options = {}
    for name in ("k_scale", "v_scale"):
        scale = inputs.make_scale(rng, case, getattr(case, name), program.num_blocks)
        if scale is not None:
            options[name] = scale
    _remove_ties(arrays, case, options)
    return Batch([], [], arrays, options)


def _remove_ties(arrays, case, scales):
    """Replaces, in new tokens that are quantised, the elements that two exact quantisers may round differently."""
    for which in ("key", "value"):
        cache = arrays[f"{which}_cache"]
        if cache.dtype.itemsize < inputs.dtype_of(case.dtype).itemsize:
            slots = np.clip(arrays["slot_mapping"], 0, len(cache) * case.block_size - 1)
            factor = oracle.scale_at(scales.get(f"{which[0]}_scale"), *np.divmod(slots, case.block_size))
            arrays[which] = without_ties(arrays[which], factor, cache.dtype)


def without_ties(values, scale, dtype):
    """Replaces by 0 the elements of new tokens that two exact quantisers may round differently.

    An op divides in float32. A quotient that is only near the middle between two codes may then become a tie, so that
    the op's code differs from the reference's, and all later results would differ too.

    Args:
        values: [n, num_kv_heads, head_size].
        scale: factors that multiply codes, in a shape that broadcasts to the values' shape.
        dtype: of the codes.
    """
    codes = [oracle.quantise(values.astype(np.float64) * (1 + error), scale, dtype) for error in (-1e-6, 1e-6)]
    return np.where(codes[0] == codes[1], values, np.zeros_like(values))


def _for_copies(rng, program):
    """Draws pools of random bits and pairs of blocks: chains, negative ids, ids past the pool; no destination twice."""
    case, count, swap = program.case, program.num_blocks, program.op == "swap"
    dtype = inputs.dtype_of(case.cache_dtype or case.dtype)
    others = count + int(program.width) if swap else count

    def pools(n):
        shapes = inputs.cache_shapes(case.layout, n, case.num_kv_heads, case.block_size, case.head_size, dtype)
        return [random_bits(rng, shape, dtype) for shape in shapes]

    num_pairs = program.num_seqs
    pairs = np.full((num_pairs, 2), -1, np.int32)
    used = min(num_pairs, others)
    pairs[:used, 1] = rng.permutation(others)[:used]
    pairs[:used, 0] = rng.integers(0, count, used)
    skipped = rng.random(num_pairs) < 0.2
    pairs[skipped, int(rng.integers(2))] = rng.choice([-1, 2**31 - 1, -(2**31), max(count, others)])
    if swap:
        names = ("src_key_cache", "src_value_cache", "dst_key_cache", "dst_value_cache")
        arrays = dict(zip(names, [*pools(count), *pools(others)], strict=True))
    else:
        arrays = dict(zip(("key_cache", "value_cache"), pools(count), strict=True))
    return Batch([], [], arrays | {"block_mapping": pairs}, {})


def random_bits(rng, shape, dtype):
    """Draws an array of arbitrary bit patterns, NaN payloads included."""
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8).view(dtype)


def another(rng, program, batch, *, pools):
    """Draws a second batch for `vmap`: the sequences in another order, other queries and, if `pools`, other blocks."""
    arrays, order = dict(batch.arrays), rng.permutation(len(batch.seq_lens))
    seq_lens, query_lens = ([lens[row] for row in order] for lens in (batch.seq_lens, batch.query_lens))
    ragged = program.op in RAGGED_OPS
    arrays["query"] = _queries(rng, program.case, len(arrays["query"]), sum(query_lens), ragged)
    tables = arrays["block_tables"][order]
    if pools:
        places = rng.permutation(program.num_blocks).astype(np.int32)
        for row, length in enumerate(seq_lens):
            used = slice(0, -(-length // program.case.block_size))
            tables[row, used] = places[tables[row, used]]
        for name in [name for name in arrays if name.endswith("_cache")]:
            moved = np.empty_like(arrays[name])
            moved[places] = arrays[name]
            arrays[name] = moved
    arrays |= {"block_tables": tables, "seq_lens": np.array(seq_lens, np.int32)}
    if ragged:
        arrays["query_start_loc"] = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    return Batch(seq_lens, query_lens, arrays, batch.options)


def stacked(batches, program):
    """Stacks the arrays of several batches for `vmap`, except pools that the batches share."""
    first, shared = batches[0].arrays, program.transform == "vmap"
    return {
        name: x if shared and name.endswith("_cache") else np.stack([batch.arrays[name] for batch in batches])
        for name, x in first.items()
    }
