"""The bugs that `tests.mutants` makes on purpose, except those in the other files `mutants_of_*.py`."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """A bug that is made on purpose.

    Attributes:
      name: the bug in a few words.
      file: the file to change, below `paged_jax/`, or one of `examples/`.
      old: source that occurs exactly once in the file.
      new: the source that replaces it.
      tests: arguments for pytest, or "interpret" and the names of some cases of test_triton.py's
        `test_in_the_interpreter`, which then run alone.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTANTS = [
    Mutant(
        "xla: tp_rank times kv heads",
        "kernels/xla/softmax.py",
        "(sparse.tp_rank * num_heads + head)",
        "(sparse.tp_rank * num_kv_heads + head)",
        "tests/test_decode.py -k sparse",
    ),
    Mutant(
        "xla: tp_rank times heads where kv heads step",
        "kernels/xla/softmax.py",
        "(sparse.tp_rank * num_kv_heads + head // group)",
        "(sparse.tp_rank * num_heads + head // group)",
        "tests/test_decode.py -k sparse",
    ),
    Mutant(
        "xla: a scale of 0 makes 0 / 0",
        "kernels/xla/cache_ops.py",
        "x = jnp.where(x == 0, x, x / lax.optimization_barrier(jnp.broadcast_to(scale, x.shape)))",
        "x = x / lax.optimization_barrier(jnp.broadcast_to(scale, x.shape))",
        "tests/test_cache_ops.py -k write",
    ),
    Mutant(
        "xla: a negative slot counts from the end",
        "kernels/xla/cache_ops.py",
        "jnp.where(slots < 0, num_blocks, slots // block_size)",
        "slots // block_size",
        "tests/test_cache_ops.py -k write",
    ),
    Mutant(
        "xla: swaps take negative destinations",
        "kernels/xla/cache_ops.py",
        "(src < src_key_cache.shape[0]) & (dst >= 0)",
        "(src < src_key_cache.shape[0])",
        "tests/test_block_ops.py -k 'copy or swap'",
    ),
    Mutant(
        "xla: swaps copy nothing",
        "kernels/xla/cache_ops.py",
        "    dst = jnp.where(valid, dst, dst_key_cache.shape[0])",
        "    dst = jnp.where(valid & (dst < 0), dst, dst_key_cache.shape[0])",
        "tests/test_block_ops.py -k swap",
    ),
    Mutant(
        "xla: unattended values reach the product",
        "kernels/xla/softmax.py",
        "value = jnp.where(seen[:, :, None, None], value, 0.0)",
        "value = jnp.where(seen[:, :, None, None] | True, value, 0.0)",
        "tests/test_decode.py -k 'test_decode and hnd'",
    ),
    Mutant(
        "xla: the window is one token wider",
        "kernels/xla/softmax.py",
        "visible &= at - t < options.sliding_window",
        "visible &= at - t <= options.sliding_window",
        "tests/test_decode.py -k window",
    ),
    Mutant(
        "xla: max_seq_len does not bound cached tokens of a prefix",
        "kernels/xla/ragged.py",
        "cached = jnp.minimum(context, options.max_seq_len)",
        "cached = context",
        "tests/test_xla.py -k max_seq_len",
    ),
    Mutant(
        "merge in the dtype of out",
        "_states.py",
        "weight_a * out_a.astype(jnp.float32) + weight_b * out_b.astype(jnp.float32)",
        "weight_a.astype(out_a.dtype) * out_a + weight_b.astype(out_a.dtype) * out_b",
        "tests/test_merge.py",
    ),
    Mutant(
        "merge: an empty side weighs something",
        "_states.py",
        "lse = jnp.where(empty, -jnp.inf, base)",
        "lse = base",
        "tests/test_merge.py",
    ),
    Mutant(
        "vmap: options that are batched are folded",
        "_vmap.py",
        "if any(jax.tree.leaves(in_batched.options)) or",
        "if",
        "tests/test_transforms.py -k vmap",
    ),
    Mutant(
        "vmap: pools that are batched alone are folded",
        "_vmap.py",
        "any(jax.tree.leaves(in_batched.options)) or len(batched_pools) > 1",
        "any(jax.tree.leaves(in_batched.options))",
        "tests/test_transforms.py -k vmap",
    ),
    Mutant(
        "vmap: batched pools share their scales of slots",
        "_vmap.py",
        "return not (True in batched_pools and any(scale is not None and scale.ndim == 3 for scale in scales))",
        "return True",
        "tests/test_transforms.py -k vmap",
    ),
    Mutant(
        "the choice never picks a kernel",
        "_dispatch.py",
        "    for name in _on_cuda(op, operands):",
        "    for name in _on_cuda(op, operands)[:0]:",
        "tests/test_selection.py tests/test_transforms.py -k 'which or lowers_for_cuda'",
    ),
    Mutant(
        "every NotImplementedError falls through",
        "_dispatch.py",
        "        except Unsupported as refusal:",
        "        except NotImplementedError as refusal:",
        "tests/test_selection.py",
    ),
    Mutant(
        "the leader is not tried first",
        "_dispatch.py",
        "return leads is None or not leads(op, operands), name not in _FOR_EVERY_GPU",
        "return True, name not in _FOR_EVERY_GPU",
        "tests/test_selection.py",
    ),
    Mutant(
        "row counts of query and seq_lens may differ",
        "_validate.py",
        '    query = _checks.tokens("query", query, "num_seqs")\n    pool',
        '    query = _checks.tokens("query", query, "num_seqs")[: len(seq_lens)]\n    pool',
        "tests/test_validation.py -k decode",
    ),
    Mutant(
        "metadata: a float table passes",
        "metadata.py",
        "def check_metadata(",
        "def check_metadata(*_, **__):\n    return None\n\n\ndef _unused(",
        "tests/test_metadata.py",
    ),
    Mutant(
        "splits: heads and sequences over one mesh axis",
        "_splits.py",
        "free = tuple(axis for axis in wanted if axis not in chosen.of(together))",
        "free = tuple(wanted)",
        "tests/test_splits.py",
    ),
    Mutant(
        "lowered: parts are traced within the mesh",
        "_lowered.py",
        "return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))",
        "return jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh())",
        "tests/test_set_mesh.py -k 'Explicit-Explicit-paged_attention_v1'",
    ),
    Mutant(
        "dispatch: results that nobody asked for",
        "_dispatch.py",
        "None if place in unwanted else x for",
        "x for",
        "tests/test_flags.py -k 'debug and paged_attention_v1'",
    ),
    Mutant(
        "indices: small numbers of 64 bits wrap around",
        "_checks.py",
        "values[(values < -(2**31)) | (values >= 2**31)]",
        "values[values >= 2**31]",
        "tests/test_index_dtypes.py -k fit",
    ),
    Mutant(
        "write: scales divide what goes into a cache that is as wide",
        "_validate.py",
        "if pool.key_cache.dtype.itemsize >= key.dtype.itemsize:",
        "if pool.key_cache.dtype.itemsize > key.dtype.itemsize:",
        "tests/test_wide_scales.py -k float16",
    ),
    Mutant(
        "merge: an infinite lse is a number",
        "_states.py",
        "jnp.where(jnp.isposinf(x), -jnp.inf, x)",
        "jnp.where(jnp.isnan(x), -jnp.inf, x)",
        "tests/test_merge.py -k infinite",
    ),
    Mutant(
        "copy: XLA sees that there is one pair",
        "kernels/xla/cache_ops.py",
        "block = lax.optimization_barrier(block)",
        "block = block + 0",
        "tests/test_memory.py -k pairs_are_known",
    ),
    Mutant(
        "sampling: logits are divided by temperatures whose inverse is 0",
        "engine/sampling.py",
        "jnp.minimum(draws.temperature, _HOTTEST)",
        "jnp.minimum(draws.temperature, 1e39)",
        "tests/test_engine_parts.py -k huge",
    ),
    Mutant(
        "prefix_attention stops at the end of the table",
        "_validate.py",
        "block_tables.shape[1] * pool.block_size + new_tokens",
        "block_tables.shape[1] * pool.block_size",
        "tests/test_ragged.py -k contexts_alone",
    ),
    Mutant(
        "splits: the rows of a call that writes are split",
        "_splits.py",
        '"write_and_attend": _Rule("b h g"',
        '"write_and_attend": _Rule("b n h g"',
        "tests/test_splits.py -k writes",
    ),
    Mutant(
        "context parallel: sinks count on the devices alone that have tokens of a row",
        "_context_parallel.py",
        "total += jnp.where(is_empty, 0.0,",
        "total += jnp.where(jnp.isneginf(lse), 0.0,",
        "tests/test_context_parallel.py -k first_device",
    ),
    Mutant(
        "context parallel: max_seq_len does not hold",
        "_context_parallel.py",
        "    seq_lens = jnp.minimum(seq_lens, operands.options.max_seq_len)\n",
        "",
        "tests/test_context_parallel.py -k two_axes",
    ),
    Mutant(
        "context parallel: latents of short prompts find no block",
        "_context_parallel.py",
        "most = num_tokens // block_size + query_lens.shape[0]",
        "most = num_tokens // block_size + 1",
        "tests/test_context_parallel.py -k short_prompts",
    ),
    Mutant(
        "dispatch: parts of a call are asked of the implementation that it names",
        "_dispatch.py",
        'asked = implementation if name == op or implementation == "xla" else None',
        "asked = implementation",
        "tests/test_context_parallel.py -k by_name",
    ),
    Mutant(
        "allocator: a refused retain gives references",
        "allocator/share.py",
        "ref_counts = _add_references(state, jnp.where(valid, ids, -1))",
        "ref_counts = _add_references(state, ids)",
        "tests/test_allocator_edges.py -k flag",
    ),
    Mutant(
        "compat: tokens past the table overwrite its last page",
        "compat/rpa.py",
        " & (column < width) & (block >= 0)",
        " & (block >= 0)",
        "tests/test_compat_rpa.py -k past_the_table",
    ),
    Mutant(
        "a pool of 2**31 slots is refused",
        "shapes.py",
        "if num_blocks * block_size > 2**31:",
        "if num_blocks * block_size >= 2**31:",
        "tests/test_validation.py -k slots_fit",
    ),
    Mutant(
        "a cache of latents that is swapped to gets the other one's scale",
        "latent_cache.py",
        "return dataclasses.replace(other, latent_cache=swapped)",
        "return dataclasses.replace(self, latent_cache=swapped)",
        "tests/test_mla.py -k methods_are_their_ops",
    ),
    Mutant(
        "partition: a swap follows its source",
        "_splits.py",
        'pools = [x for x in having if "cache" in x[0] and not x[0].startswith("src")]',
        'pools = [x for x in having if "cache" in x[0]]',
        "tests/test_partition_unlike.py -k destination",
    ),
    Mutant(
        "vmap: values' scales of slots are those of the first pool",
        "_vmap.py",
        "any(scale is not None and scale.ndim == 3 for scale in scales)",
        "any(scale is not None and scale.ndim == 3 for scale in scales[:1])",
        "tests/test_transforms.py -k share_scales",
    ),
    Mutant(
        "selection: a new reason beside an old one is not told",
        "_selection.py",
        "if not each <= _said:",
        "if not each & _said:",
        "tests/test_selection.py -k once_a_reason",
    ),
    Mutant(
        "rpa: queries beyond float8 are not saturated",
        "compat/rpa.py",
        "divided = jnp.clip(queries / q_scale, float(limits.min), float(limits.max))",
        "divided = queries / q_scale",
        "tests/test_compat_rpa.py -k q-scale",
    ),
    Mutant(
        "xla: a window begins with the last query of a chunk",
        "kernels/xla/softmax.py",
        "first = jnp.where(query_positions < 0, _NEVER, query_positions).min(1)",
        "first = jnp.where(query_positions < 0, -1, query_positions).max(1)",
        "tests/test_ragged.py -k long-window",
    ),
    Mutant(
        "blocks: a device takes the next one's first block",
        "_context_parallel.py",
        "return jnp.where((local >= 0) & (local < cache.shape[0]), local, -1)",
        "return jnp.where((local >= 0) & (local <= cache.shape[0]), local, -1)",
        "tests/test_context_parallel.py -k 'contexts_without or copies_go'",
    ),
    Mutant(
        "blocks: a copy of a block past the pool clears its destination",
        "_context_parallel.py",
        "return (blocks >= 0) & (blocks < cache.shape[0] * lax.axis_size(axes))",
        "return (blocks >= 0) & (blocks <= cache.shape[0] * lax.axis_size(axes))",
        "tests/test_context_parallel.py -k copies_go",
    ),
    Mutant(
        "vmap: a split batch gathers the heads",
        "_partition.py",
        "P(None, *sharding.spec[1:])",
        "P(None)",
        "tests/test_vmap.py -k 'gathers_no_heads and copy'",
    ),
    Mutant(
        "rpa: a pool's padding counts as kv heads",
        "options.py",
        "return (size - layout.padding) // 2 if isinstance(layout, Interleaved) else size",
        "return size // 2 if isinstance(layout, Interleaved) else size",
        "tests/test_compat_rpa.py -k 'small and padded-rows'",
    ),
    Mutant(
        "metadata: slot 0 may be written twice",
        "metadata.py",
        "(in_order[1:] == in_order[:-1]) & (in_order[1:] >= 0)",
        "(in_order[1:] == in_order[:-1]) & (in_order[1:] > 0)",
        "tests/test_metadata.py -k twice",
    ),
    Mutant(
        "export: caches of latents are not registered",
        "_export.py",
        "for _class in (AllocatorState, AttentionMetadata, AttentionOptions, PagedKVCache, PagedLatentCache):",
        "for _class in (AllocatorState, AttentionMetadata, AttentionOptions, PagedKVCache):",
        "tests/test_export.py -k latents",
    ),
]
