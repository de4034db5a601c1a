"""The mutants of `tests.mutate` that no test can kill, because they are no bugs: these changes alter no result."""

# (module below `paged_jax/`, the line after the change): why the change is no bug.
ACCEPTED = {
    (
        "allocator/arguments.py",
        "if array.dtype != np.int32 or not np.can_cast(array.dtype, np.int32) and array.size:",
    ): "the check passes for all integers of 32 bits and less, so it may be made of more of them",
    (
        "allocator/arguments.py",
        "if array.dtype != np.int32 and not np.can_cast(array.dtype, np.int32) or array.size:",
    ): "the check passes for all integers of 32 bits and less, so it may be made of more of them",
    (
        "allocator/arguments.py",
        "unfit = (array < _INT32.min) ^ (array > _INT32.max)",
    ): "no integer is both",
    (
        "allocator/grow.py",
        "holders = xp.where(writes_last, state.ref_counts[last], -1)",
    ): "holders count only where they are more than 1",
    (
        "allocator/grow.py",
        "taken = state.free_blocks[jnp.where(is_new, top - (growth.starts[:, None] + offsets), 1)]",
    ): "what is taken where nothing is new is masked, and JAX clips the index",
    (
        "allocator/release.py",
        "rows = (lens != state.seq_lens).nonzero()[0]",
    ): "no length is larger than before, which the lines above check",
    (
        "allocator/share.py",
        "ref_counts = _add_references(state, jnp.where(valid, ids, - 2))",
    ): "every negative id is skipped",
    (
        "allocator/share.py",
        "ref_counts=_add_references(state, jnp.where(valid, blocks, - 2)),",
    ): "every negative id is skipped",
    (
        "allocator/grow.py",
        "last = state.block_tables[rows, xp.maximum(num_old - 1, -1)]",
    ): "a sequence without blocks has no last block, and what is read for it is masked",
    (
        "allocator/grow.py",
        "destination = state.free_blocks[jnp.where(copies, top - growth.starts, -1)]",
    ): "the destination of a sequence that copies nothing is masked",
    (
        "allocator/release.py",
        "rows = mask.nonzero()[-1]",
    ): "the mask has one axis",
    (
        "allocator/release.py",
        "released, held = _release_traced(state, jnp.where(past, state.block_tables, - 2))",
    ): "every negative id is skipped",
    (
        "allocator/release.py",
        "num_blocks = state.ref_counts.shape[-1]",
    ): "ref_counts has one axis",
    (
        "allocator/release.py",
        "freed = (drops > 0) & (ref_counts <= 0)",
    ): "no count falls below 0, since drops are 0 unless all of them are valid",
    (
        "allocator/share.py",
        "num_full = state.seq_lens[xp.where(valid, source, 1)] // state.block_size",
    ): "where the rows are not valid the count is masked, and JAX clips the index",
    (
        "allocator/share.py",
        "count = xp.where(valid, count, 1)",
    ): "nothing begins where the call is not valid",
    (
        "allocator/share.py",
        "blocks = xp.where(columns < count, state.block_tables[xp.where(valid, source, -1)], -1)",
    ): "where the rows are not valid the count is 0",
    (
        "allocator/share.py",
        "num_blocks, max_blocks_per_seq = state.ref_counts.shape[-1], state.block_tables.shape[1]",
    ): "ref_counts has one axis",
    (
        "ops/merge.py",
        "base = jnp.logaddexp(jnp.where(empty, 1.0, lse_a), jnp.where(empty, 0.0, lse_b))",
    ): "empty rows compute with any finite number",
    (
        "ops/merge.py",
        "base = jnp.logaddexp(jnp.where(empty, 0.0, lse_a), jnp.where(empty, 1.0, lse_b))",
    ): "empty rows compute with any finite number",
    (
        "_validate.py",
        "if key.shape[0] != checked[0][1].shape[0]:",
    ): "a layer's two pools have as many blocks, which _pools checks",
    (
        "metadata.py",
        "num_tokens = np.shape(slot_mapping)[-1]",
    ): "slot_mapping has one axis",
    (
        "metadata.py",
        'if own["num_decode_tokens"] and bounds["num_prefill_tokens"] != own["num_prefill_tokens"]:',
    ): "no bound is below the batch's own value, which _bound checks",
    (
        "kernels/xla/decode.py",
        "return out[:, -1].astype(query.dtype), lse[:, 0]",
    ): "a sequence has one query",
    (
        "kernels/xla/decode.py",
        "return out[:, 0].astype(query.dtype), lse[:, -1]",
    ): "a sequence has one query",
    (
        "kernels/xla/decode.py",
        "return state.exp_sum[0, 0], state.max_logit[0, 0], tmp_out[-1, 0]",
    ): "one sequence is computed at a time",
    (
        "kernels/xla/decode.py",
        "return state.exp_sum[0, 0], state.max_logit[0, 0], tmp_out[0, 1]",
    ): "a sequence has one query, and JAX clips the index",
    (
        "kernels/xla/ragged.py",
        "_CHUNK = 63 # queries",
    ): "the size of a chunk changes no result but by rounding",
    (
        "kernels/xla/decode.py",
        "out[-1, 0].astype(query.dtype),",
    ): "one sequence is computed at a time",
    (
        "kernels/xla/decode.py",
        "lse[-1, 0],",
    ): "one sequence is computed at a time",
    (
        "kernels/xla/decode.py",
        "lse[0, -1],",
    ): "a sequence has one query",
    (
        "kernels/xla/decode.py",
        "shift = jnp.where(jnp.isneginf(max_logit), 1.0, max_logit)",
    ): "any finite number makes the weights of no tokens 0",
    (
        "kernels/xla/ragged.py",
        "_CHUNK = 65 # queries",
    ): "the size of a chunk changes no result but by rounding",
    (
        "kernels/xla/ragged.py",
        "chunk = min(_CHUNK, query.shape[1])",
    ): "the size of a chunk changes no result but by rounding",
    (
        "kernels/xla/ragged.py",
        "return lax.fori_loop(0, -(-(end - context) * chunk), step, state)",
    ): "tiles past the end hold no token that a query sees",
    (
        "kernels/xla/ragged.py",
        "if num_tokens == 0 or seq_lens.shape[-1] == 0:",
    ): "seq_lens has one axis",
    (
        "kernels/xla/ragged.py",
        "return lax.dynamic_update_slice_in_dim(result, jnp.where(mask, new[-1].astype(old.dtype), old), start, 0)",
    ): "one chunk is computed at a time",
    (
        "kernels/xla/softmax.py",
        "begin = jnp.maximum(begin, first - (options.sliding_window + 1))",
    ): "tokens before the window are masked",
    (
        "cache.py",
        "return self._with(*zip(keys, values, strict=False))",
    ): "copy_blocks gives as many keys as values",
    (
        "cache.py",
        "layers = zip((self._pools, *self._slot_scales), (other._pools, *other._slot_scales), strict=False)",
    ): "both caches have the same kinds of scales, which the line above checks",
    (
        "cache.py",
        'for name, new in zip(("k_scale", "v_scale"), slot_scales, strict=False):',
    ): "two names and a pair",
    (
        "_vmap.py",
        "batched = [x for x, flag in zip(leaves, flags, strict=False) if flag]",
    ): "JAX gives a flag for each operand",
    (
        "_dispatch.py",
        "results = _vmap.batch_of_calls(batched, axis_size, in_batched[-1], operands)",
    ): "an op has one argument, its operands",
    (
        "kernels/xla/cache_ops.py",
        'if layout >= "vllm":',
    ): "of the three layouts no other name sorts behind it",
    (
        "_splits.py",
        'factors = tuple(f for f in factors if f > "g" or self.sizes["g"] > 1)',
    ): "no factor's name sorts before it",
    (
        "_partition.py",
        "if len(rank_of) == 0:",
    ): "a switch of one branch computes what the branch does",
    (
        "ops/merge.py",
        "base = jnp.logaddexp(jnp.where(empty, -1.0, lse_a), jnp.where(empty, 0.0, lse_b))",
    ): "empty rows compute with any finite number",
    (
        "ops/merge.py",
        "base = jnp.logaddexp(jnp.where(empty, 0.0, lse_a), jnp.where(empty, -1.0, lse_b))",
    ): "empty rows compute with any finite number",
    (
        "_checks.py",
        "if not (1 < x.shape[2] <= 256 and x.shape[2] % 8 == 0):",
    ): "1 is no multiple of 8",
    (
        "_checks.py",
        "if not (0 < x.shape[2] <= 257 and x.shape[2] % 8 == 0):",
    ): "257 is no multiple of 8",
    (
        "_checks.py",
        "if not (0 < x.shape[2] <= 256 and x.shape[2] % 8 <= 0):",
    ): "no remainder is negative",
    (
        "_validate.py",
        "for i, (key, value) in enumerate(zip(key_cache, value_cache, strict=False))",
    ): "the lengths are compared before",
    (
        "_validate.py",
        "if key.shape[0] != checked[0][-1].shape[0]:",
    ): "a layer's two pools have as many blocks, which _pools checks",
    (
        "_validate.py",
        'for name, s, d in zip(("key", "value"), src, dst, strict=False):',
    ): "all three are pairs",
    (
        "_validate.py",
        '_checks.shape("query_start_loc", starts, (seq_lens.shape[-1] + 1,), "num_seqs + 1")',
    ): "seq_lens has one axis",
    (
        "metadata.py",
        '(x < -(2**31)).ravel() ^ (x >= 2**31).ravel(), lambda i: f"{name} must fit in int32, got {x.ravel()[i]}"',
    ): "no integer is both",
    (
        "metadata.py",
        "bounds = {name: _bound(name, wanted, own[name]) for name, wanted in zip(own, given, strict=False)}",
    ): "the caller gives one bound for each field",
    (
        "metadata.py",
        "for table, row in zip(tables, rows, strict=False):",
    ): "the tables were made with a row for each",
    (
        "_splits.py",
        "self.results += [a for name, a in zip(self.names, self.operands, strict=False) if name == result]",
    ): "names and operands grow together",
    (
        "_splits.py",
        "for axes, shape in zip(self.operands, shapes, strict=False)",
    ): "there are as many operands as leaves",
    (
        "_splits.py",
        "for factors, size in zip(axes, shape, strict=False)",
    ): "an operand has a word for each of its axes",
    (
        "_splits.py",
        'place = {"g": 0, "n": 2} # g needs to know how h is split; n takes what the heads leave',
    ): "g is the last of the sizes, and the order of equals stays",
    (
        "_splits.py",
        'place = {"g": 1, "n": 3} # g needs to know how h is split; n takes what the heads leave',
    ): "n is behind g as before",
    (
        "_splits.py",
        "for factor in sorted(self.sizes, key=lambda factor: place.get(factor, 1)):",
    ): "g is the last of the sizes, and the order of equals stays",
    (
        "_splits.py",
        'if factor <= "g" and self.sizes["h"] != chosen.parts("h"):',
    ): "no other factor's name comes before g",
    (
        "_splits.py",
        "for name, axes, spec in zip(self.names, self.operands, specs, strict=False)",
    ): "JAX gives a spec for each operand",
    (
        "_splits.py",
        "return f\"({' '.join(factors)})\" if len(factors) > 1 else factors[-1] if factors else next(unsplit)",
    ): "there is one factor then",
    (
        "_vmap.py",
        "merged = [next(element) if flag else x for x, flag in zip(leaves, flags, strict=False)]",
    ): "JAX gives a flag for each operand",
    (
        "cache.py",
        'return self.value_cache.shape[2 if self.layout >= "vllm" else 3]',
    ): "no other layout's name comes after vllm",
    (
        "cache.py",
        "keys, values = zip(self._pools, *self._slot_scales, strict=False)",
    ): "each of these is a pair",
    (
        "cache.py",
        "if getattr(self, name) is not None and np.ndim(getattr(self, name)) >= 3:",
    ): "no scale has more than three axes",
    (
        "cache.py",
        "changes[name] = new[..., 1]",
    ): "the last axis has one element, and JAX clips the index",
    (
        "_partition.py",
        "return any(x.size <= 0 or jax.typeof(x).memory_space == jax.memory.Space.Host for x in leaves)",
    ): "no size is negative",
    (
        "_partition.py",
        'mesh = Mesh(np.array(list(shardings[-1].device_set)), ("devices",))',
    ): "all operands of a program are on its devices",
    (
        "_partition.py",
        "leaves = [jax.sharding.reshard(x, NamedSharding(mesh, spec)) "
        "for x, spec in zip(leaves, operand_specs, strict=False)]",
    ): "there is a spec for each operand",
    (
        "_partition.py",
        'heads = "hg" if sparse.head_sliding_step > 0 else "h"',
    ): "with a step of 0 all heads have one pattern",
    (
        "_partition.py",
        'heads = "hg" if sparse.head_sliding_step >= 1 else "h"',
    ): "with a step of 0 all heads have one pattern",
    (
        "_partition.py",
        "if splits.parts(heads) <= 1:",
    ): "there is at least one part",
    (
        "kernels/xla/cache_ops.py",
        "copied = [swap_blocks(*layer, *layer, block_mapping) "
        "for layer in zip(key_caches, value_caches, strict=False)]",
    ): "_validate compares how many layers there are",
    (
        "kernels/xla/cache_ops.py",
        "src, dst = block_mapping[:, 0], block_mapping[:, 2]",
    ): "JAX clips the index of a column",
    (
        "kernels/xla/cache_ops.py",
        "if cache.dtype.itemsize != 1 or not jnp.issubdtype(cache.dtype, jnp.floating):",
    ): "no cache has a dtype of less than a byte",
    (
        "kernels/xla/cache_ops.py",
        "if cache.dtype.itemsize > 1 and not jnp.issubdtype(cache.dtype, jnp.floating):",
    ): "bytes of any dtype come back as they were",
    (
        "kernels/xla/cache_ops.py",
        "axis: int = 0,",
    ): "without offsets the axis is not used",
    (
        "kernels/xla/cache_ops.py",
        "start = [jnp.zeros_like(block[-1])] * cache.ndim",
    ): "the zero of any element is the same",
    (
        "kernels/xla/cache_ops.py",
        "return scale.reshape((1,) * (1 - scale.ndim) + scale.shape)[..., None]",
    ): "it is broadcast with one axis less, too",
    (
        "_partition.py",
        "rank_of = dict(zip(reversed(patterns), reversed(ranks), strict=False))",
    ): "there is a pattern for each rank",
    (
        "_partition.py",
        "return run(_ranked(operands, ranks[1]))",
    ): "all ranks have one pattern then",
    (
        "kernels/xla/decode.py",
        "narrower = key_cache.dtype.itemsize != key.dtype.itemsize",
    ): "a wider cache has no scales, which _validate checks",
    (
        "allocator/share.py",
        "repeats = named & ((ids[:, None] == ids[None, :]).sum(axis= 0, dtype=xp.int32) > 1)",
    ): "the matrix is symmetric",
    (
        "allocator/share.py",
        "valid = empty & in_order & (held ^ ~named).all() & ~repeats.any()",
    ): "what is held is named",
    (
        "allocator/share.py",
        "row = xp.concatenate([ids, xp.full(max_blocks_per_seq - ids.shape[-1], -1, xp.int32)])",
    ): "ids have one axis",
    (
        "allocator/share.py",
        'return state.ref_counts.at[jnp.where(blocks >= 0, blocks, state.ref_counts.shape[-1])].add(1, mode="drop")',
    ): "ref_counts has one axis",
    (
        "allocator/share.py",
        "in_pool = (ids >= 0) & (ids < state.ref_counts.shape[-1])",
    ): "ref_counts has one axis",
    (
        "allocator/share.py",
        "return (row >= 0) & (row < state.seq_lens.shape[-1])",
    ): "seq_lens has one axis",
    (
        "allocator/share.py",
        "return _is_row(state, row) & (state.seq_lens[xp.where(_is_row(state, row), row, -1)] == 0)",
    ): "what is read for no row is masked",
    (
        "allocator/share.py",
        "return _is_row(state, row) & (state.seq_lens[xp.where(_is_row(state, row), row, 0)] <= 0)",
    ): "no length is negative",
    (
        "allocator/state.py",
        "logical, offsets = xp.divmod(xp.where(valid, at, 1), state.block_size)",
    ): "what is computed for no position is masked",
    (
        "_partition.py",
        "return mlir.lower_fun(jaxpr_as_fun(traced), multiple_results=False)(context, *leaves)",
    ): "the function gives a list, whose elements are taken either way",
}
