"""The mutants of `tests.mutate` that no test can kill, because they are no bugs: these changes alter no result."""

# By module below `paged_jax/`, and by the reason why they are no bugs: the lines after a change.
_REASONS = {
    "allocator/arguments.py": {
        "the check passes for all integers of 32 bits and less, so it may be made of more of them": [
            "if array.dtype != np.int32 or not np.can_cast(array.dtype, np.int32) and array.size:",
            "if array.dtype != np.int32 and not np.can_cast(array.dtype, np.int32) or array.size:",
        ],
        "no integer is both": [
            "unfit = (array < _INT32.min) ^ (array > _INT32.max)",
        ],
    },
    "allocator/grow.py": {
        "holders count only where they are more than 1": [
            "holders = xp.where(writes_last, state.ref_counts[last], -1)",
        ],
        "what is taken where nothing is new is masked, and JAX clips the index": [
            "taken = state.free_blocks[jnp.where(is_new, top - (growth.starts[:, None] + offsets), 1)]",
        ],
        "a sequence without blocks has no last block, and what is read for it is masked": [
            "last = state.block_tables[rows, xp.maximum(num_old - 1, -1)]",
        ],
        "the destination of a sequence that copies nothing is masked": [
            "destination = state.free_blocks[jnp.where(copies, top - growth.starts, -1)]",
        ],
    },
    "allocator/release.py": {
        "no length is larger than before, which the lines above check": [
            "rows = (lens != state.seq_lens).nonzero()[0]",
        ],
        "the mask has one axis": [
            "rows = mask.nonzero()[-1]",
        ],
        "every negative id is skipped": [
            "released, held = _release_traced(state, jnp.where(past, state.block_tables, - 2))",
        ],
        "ref_counts has one axis": [
            "num_blocks = state.ref_counts.shape[-1]",
        ],
        "no count falls below 0, since drops are 0 unless all of them are valid": [
            "freed = (drops > 0) & (ref_counts <= 0)",
        ],
    },
    "allocator/share.py": {
        "every negative id is skipped": [
            "ref_counts = _add_references(state, jnp.where(valid, ids, - 2))",
            "ref_counts=_add_references(state, jnp.where(valid, blocks, - 2)),",
        ],
        "where the rows are not valid the count is masked, and JAX clips the index": [
            "num_full = state.seq_lens[xp.where(valid, source, 1)] // state.block_size",
        ],
        "nothing begins where the call is not valid": [
            "count = xp.where(valid, count, 1)",
        ],
        "where the rows are not valid the count is 0": [
            "blocks = xp.where(columns < count, state.block_tables[xp.where(valid, source, -1)], -1)",
        ],
        "ref_counts has one axis": [
            "num_blocks, max_blocks_per_seq = state.ref_counts.shape[-1], state.block_tables.shape[1]",
            "return state.ref_counts.at[jnp.where(blocks >= 0, blocks, state.ref_counts.shape[-1])]"
            '.add(1, mode="drop")',
            "in_pool = (ids >= 0) & (ids < state.ref_counts.shape[-1])",
        ],
        "the matrix is symmetric": [
            "repeats = named & ((ids[:, None] == ids[None, :]).sum(axis= 0, dtype=xp.int32) > 1)",
        ],
        "what is held is named": [
            "valid = empty & in_order & (held ^ ~named).all() & ~repeats.any()",
        ],
        "ids have one axis": [
            "row = xp.concatenate([ids, xp.full(max_blocks_per_seq - ids.shape[-1], -1, xp.int32)])",
        ],
        "seq_lens has one axis": [
            "return (row >= 0) & (row < state.seq_lens.shape[-1])",
        ],
        "what is read for no row is masked": [
            "return _is_row(state, row) & (state.seq_lens[xp.where(_is_row(state, row), row, -1)] == 0)",
        ],
        "no length is negative": [
            "return _is_row(state, row) & (state.seq_lens[xp.where(_is_row(state, row), row, 0)] <= 0)",
        ],
    },
    "ops/merge.py": {
        "empty rows compute with any finite number": [
            "base = jnp.logaddexp(jnp.where(empty, 1.0, lse_a), jnp.where(empty, 0.0, lse_b))",
            "base = jnp.logaddexp(jnp.where(empty, 0.0, lse_a), jnp.where(empty, 1.0, lse_b))",
            "base = jnp.logaddexp(jnp.where(empty, -1.0, lse_a), jnp.where(empty, 0.0, lse_b))",
            "base = jnp.logaddexp(jnp.where(empty, 0.0, lse_a), jnp.where(empty, -1.0, lse_b))",
        ],
    },
    "_validate.py": {
        "a layer's two pools have as many blocks, which _pools checks": [
            "if key.shape[0] != checked[0][1].shape[0]:",
            "if key.shape[0] != checked[0][-1].shape[0]:",
        ],
        "the lengths are compared before": [
            "for i, (key, value) in enumerate(zip(key_cache, value_cache, strict=False))",
        ],
        "all three are pairs": [
            'for name, s, d in zip(("key", "value"), src, dst, strict=False):',
        ],
        "seq_lens has one axis": [
            '_checks.shape("query_start_loc", starts, (seq_lens.shape[-1] + 1,), "num_seqs + 1")',
        ],
    },
    "metadata.py": {
        "slot_mapping has one axis": [
            "num_tokens = np.shape(slot_mapping)[-1]",
        ],
        "no bound is below the batch's own value, which _bound checks": [
            'if own["num_decode_tokens"] and bounds["num_prefill_tokens"] != own["num_prefill_tokens"]:',
        ],
        "no integer is both": [
            "unfit = np.atleast_1d((x < -(2**31)) ^ (x >= 2**31))",
        ],
        "the caller gives one bound for each field": [
            "bounds = {name: _bound(name, wanted, own[name]) for name, wanted in zip(own, given, strict=False)}",
        ],
        "the tables were made with a row for each": [
            "for table, row in zip(tables, rows, strict=False):",
        ],
    },
    "kernels/xla/decode.py": {
        "a sequence has one query": [
            "return out[:, -1].astype(query.dtype), lse[:, 0]",
            "return out[:, 0].astype(query.dtype), lse[:, -1]",
            "lse[0, -1],",
            "return state.exp_sum[0, -1], state.max_logit[0, 0], tmp_out[0, 0]",
            "out[0, -1].astype(query.dtype),",
        ],
        "one sequence is computed at a time": [
            "return state.exp_sum[0, 0], state.max_logit[0, 0], tmp_out[-1, 0]",
            "out[-1, 0].astype(query.dtype),",
            "lse[-1, 0],",
            "return state.exp_sum[0, 0], state.max_logit[-1, 0], tmp_out[0, 0]",
        ],
        "a sequence has one query, and JAX clips the index": [
            "return state.exp_sum[0, 0], state.max_logit[0, 0], tmp_out[0, 1]",
            "return out[:, 1].astype(query.dtype), lse[:, 0]",
            "return out[:, 0].astype(query.dtype), lse[:, 1]",
            "return state.exp_sum[0, 0], state.max_logit[0, 1], tmp_out[0, 0]",
        ],
        "any finite number makes the weights of no tokens 0": [
            "shift = jnp.where(jnp.isneginf(max_logit), 1.0, max_logit)",
            "shift = jnp.where(jnp.isneginf(max_logit), -1.0, max_logit)",
        ],
        "a wider cache has no scales, which _validate checks": [
            "narrower = key_cache.dtype.itemsize != key.dtype.itemsize",
        ],
        "one sequence is computed at a time, and JAX clips the index": [
            "return state.exp_sum[1, 0], state.max_logit[0, 0], tmp_out[0, 0]",
            "return state.exp_sum[0, 0], state.max_logit[0, 0], tmp_out[1, 0]",
            "out[1, 0].astype(query.dtype),",
            "lse[1, 0],",
        ],
    },
    "kernels/xla/ragged.py": {
        "the size of a chunk changes no result but by rounding": [
            "_CHUNK = 63 # queries",
            "_CHUNK = 65 # queries",
            "chunk = min(_CHUNK, query.shape[1])",
            "chunk = min(_CHUNK, query.shape[-1])",
        ],
        "tiles past the end hold no token that a query sees": [
            "return lax.fori_loop(0, -(-(end - context) * chunk), step, state)",
            "return lax.fori_loop(0, -(-(end + context) // chunk), step, state)",
        ],
        "seq_lens has one axis": [
            "if num_tokens == 0 or seq_lens.shape[-1] == 0:",
        ],
        "one chunk is computed at a time": [
            "return lax.dynamic_update_slice_in_dim(result, jnp.where(mask, new[-1].astype(old.dtype), old), start, 0)",
        ],
        "there are never fewer than 0": [
            "if num_tokens <= 0 or seq_lens.shape[0] == 0:",
        ],
        "rows that are not the sequence's own are dropped": [
            "positions = jnp.where(own, context_len + rows if options.causal else 0, 1)",
            "positions = jnp.where(own, context_len + rows if options.causal else 0, - 2)",
        ],
    },
    "kernels/xla/softmax.py": {
        "tokens before the window are masked": [
            "begin = jnp.maximum(begin, first - (options.sliding_window + 1))",
            "_NEVER = 1**31 - 1",
            "_NEVER = 2*31 - 1",
            "first = jnp.where(query_positions < -1, _NEVER, query_positions).min(1)",
            "begin = jnp.maximum(begin, first - (options.sliding_window - 0))",
        ],
        "tiles past the end hold no token that a query sees": [
            "last_tile = jnp.where(nonempty, -(-(end + origin) // width), 0).max(initial=0)",
        ],
        "no tile comes before the first one": [
            "last_tile = jnp.where(nonempty, -(-(end - origin) // width), -1).max(initial=0)",
            "last_tile = jnp.where(nonempty, -(-(end - origin) // width), 0).max(initial= -1)",
        ],
        "queries at -1 are padding, or of sequences without tokens": [
            "visible = ((t <= at) if options.causal else (at >= -1)) & (t < end[:, None, None])",
        ],
        "with a step of 0 all heads have one pattern": [
            "if sparse.head_sliding_step > 0:",
            "if sparse.head_sliding_step >= 1:",
        ],
        "without tokens out and lse do not depend on it": [
            "denominator = jnp.where(seen, exp_sum, 2.0)",
        ],
        "the size of a tile changes no result but by rounding": [
            "_TILE = 255 # tokens: large enough to amortise a gather, small enough to keep [heads, tokens] logits in a "
            "cache",
            "columns = max(2, min(_TILE // block_size, block_tables.shape[1] if tile is None else tile // block_size))",
            "columns = max(1, min(_TILE % block_size, block_tables.shape[1] if tile is None else tile // block_size))",
        ],
        "any finite number makes the weights of no tokens 0": [
            "shift = jnp.where(jnp.isneginf(max_logit), -1.0, max_logit)",
        ],
        "its weights are 0, so it may be any finite number": [
            "value = jnp.where(seen[:, :, None, None], value, 1.0)",
        ],
        "there are never fewer than 0": [
            "if block_tables.shape[1] <= 0 or value_cache.shape[0] == 0:",
        ],
        "tokens past the end are masked, and JAX clips the index of their blocks": [
            "used = column[None, :] // block_size < end[:, None]",
            "used = column[None, :] * block_size <= end[:, None]",
            'blocks = jnp.where(used, jnp.take(block_tables, column, axis=1, mode="clip"), 1)',
        ],
    },
    "cache.py": {
        "copy_blocks gives as many keys as values": [
            "return self._with(*zip(keys, values, strict=False))",
        ],
        "both caches have the same kinds of scales, which the line above checks": [
            "layers = zip((self._pools, *self._slot_scales), (other._pools, *other._slot_scales), strict=False)",
        ],
        "two names and a pair": [
            'for name, new in zip(("k_scale", "v_scale"), slot_scales, strict=False):',
        ],
        "no other layout's name comes after vllm": [
            'return self.value_cache.shape[2 if self.layout >= "vllm" else 3]',
        ],
        "each of these is a pair": [
            "keys, values = zip(self._pools, *self._slot_scales, strict=False)",
        ],
        "no scale has more than three axes": [
            "if getattr(self, name) is not None and np.ndim(getattr(self, name)) >= 3:",
        ],
        "the last axis has one element, and JAX clips the index": [
            "changes[name] = new[..., 1]",
        ],
    },
    "_vmap.py": {
        "JAX gives a flag for each operand": [
            "batched = [x for x, flag in zip(leaves, flags, strict=False) if flag]",
            "merged = [next(element) if flag else x for x, flag in zip(leaves, flags, strict=False)]",
        ],
    },
    "_dispatch.py": {
        "an op has one argument, its operands": [
            "results = _vmap.batch_of_calls(batched, axis_size, in_batched[-1], operands)",
        ],
    },
    "kernels/xla/cache_ops.py": {
        "of the three layouts no other name sorts behind it": [
            'if layout >= "vllm":',
        ],
        "_validate compares how many layers there are": [
            "copied = [swap_blocks(*layer, *layer, block_mapping) "
            "for layer in zip(key_caches, value_caches, strict=False)]",
        ],
        "JAX clips the index of a column": [
            "src, dst = block_mapping[:, 0], block_mapping[:, 2]",
        ],
        "no cache has a dtype of less than a byte": [
            "if cache.dtype.itemsize != 1 or not jnp.issubdtype(cache.dtype, jnp.floating):",
        ],
        "bytes of any dtype come back as they were": [
            "if cache.dtype.itemsize > 1 and not jnp.issubdtype(cache.dtype, jnp.floating):",
        ],
        "without offsets the axis is not used": [
            "axis: int = 0,",
        ],
        "the zero of any element is the same": [
            "start = [jnp.zeros_like(block[-1])] * cache.ndim",
        ],
        "it is broadcast with one axis less, too": [
            "return scale.reshape((1,) * (1 - scale.ndim) + scale.shape)[..., None]",
        ],
    },
    "_splits.py": {
        "no factor's name sorts before it": [
            'factors = tuple(f for f in factors if f > "g" or self.sizes["g"] > 1)',
        ],
        "names and operands grow together": [
            "self.results += [a for name, a in zip(self.names, self.operands, strict=False) if name == result]",
        ],
        "there are as many operands as leaves": [
            "for axes, shape in zip(self.operands, shapes, strict=False)",
        ],
        "an operand has a word for each of its axes": [
            "for factors, size in zip(axes, shape, strict=False)",
        ],
        "g is the last of the sizes, and the order of equals stays": [
            'place = {"g": 0, "n": 2} # g needs to know how h is split; n takes what the heads leave',
            "for factor in sorted(self.sizes, key=lambda factor: place.get(factor, 1)):",
        ],
        "n is behind g as before": [
            'place = {"g": 1, "n": 3} # g needs to know how h is split; n takes what the heads leave',
        ],
        "no other factor's name comes before g": [
            'if factor <= "g" and self.sizes["h"] != chosen.parts("h"):',
        ],
        "JAX gives a spec for each operand": [
            "for name, axes, spec in zip(self.names, self.operands, specs, strict=False)",
        ],
        "there is one factor then": [
            "return f\"({' '.join(factors)})\" if len(factors) > 1 else factors[-1] if factors else next(unsplit)",
        ],
    },
    "_partition.py": {
        "a switch of one branch computes what the branch does": [
            "if len(rank_of) == 0:",
        ],
        "no size is negative": [
            "return any(x.size <= 0 or jax.typeof(x).memory_space == jax.memory.Space.Host for x in leaves)",
        ],
        "all operands of a program are on its devices": [
            'mesh = Mesh(np.array(list(shardings[-1].device_set)), ("devices",))',
        ],
        "there is a spec for each operand": [
            "leaves = [jax.sharding.reshard(x, NamedSharding(mesh, spec)) "
            "for x, spec in zip(leaves, operand_specs, strict=False)]",
        ],
        "with a step of 0 all heads have one pattern": [
            'heads = "hg" if sparse.head_sliding_step > 0 else "h"',
            'heads = "hg" if sparse.head_sliding_step >= 1 else "h"',
        ],
        "there is at least one part": [
            "if splits.parts(heads) <= 1:",
        ],
        "there is a pattern for each rank": [
            "rank_of = dict(zip(reversed(patterns), reversed(ranks), strict=False))",
        ],
        "all ranks have one pattern then": [
            "return run(_ranked(operands, ranks[1]))",
        ],
        "the function gives a list, whose elements are taken either way": [
            "return mlir.lower_fun(jaxpr_as_fun(traced), multiple_results=False)(context, *leaves)",
        ],
    },
    "_checks.py": {
        "1 is no multiple of 8": [
            "if not (1 < x.shape[2] <= 256 and x.shape[2] % 8 == 0):",
        ],
        "257 is no multiple of 8": [
            "if not (0 < x.shape[2] <= 257 and x.shape[2] % 8 == 0):",
        ],
        "no remainder is negative": [
            "if not (0 < x.shape[2] <= 256 and x.shape[2] % 8 <= 0):",
        ],
    },
    "allocator/state.py": {
        "what is computed for no position is masked": [
            "logical, offsets = xp.divmod(xp.where(valid, at, 1), state.block_size)",
        ],
    },
}

ACCEPTED = {
    (module, line): reason
    for module, reasons in _REASONS.items()
    for reason, lines in reasons.items()
    for line in lines
}
"""Why the change is no bug, by the module and the line after the change."""
