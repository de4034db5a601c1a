"""The bugs that `tests.mutants` makes on purpose."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """A bug that is made on purpose.

    Attributes:
      name: the bug in a few words.
      file: the file to change, below `paged_jax/`.
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
        "triton: tp_rank times kv heads",
        "kernels/triton/device/schedule.py",
        "(sparse.tp_rank * cfg.problem.num_heads * step + 1)",
        "(sparse.tp_rank * cfg.problem.num_kv_heads * step + 1)",
        "interpret sparse-step",
    ),
    Mutant(
        "triton: tp_rank times heads where kv heads step",
        "kernels/triton/device/schedule.py",
        "(sparse.tp_rank * cfg.problem.num_kv_heads * step + 1)",
        "(sparse.tp_rank * cfg.problem.num_heads * step + 1)",
        "interpret sparse-negative-step",
    ),
    Mutant(
        "triton: decode writes tokens of negative slots",
        "kernels/triton/device/attend.py",
        "given = (slot >= 0) & (slot // problem.block_size < new.num_blocks)",
        "given = slot // problem.block_size < new.num_blocks",
        "interpret fused-hnd-bfloat16 fused-nhd-e5m2 fused-vllm-int8 fused-unsplit fused-large-group",
    ),
    Mutant(
        "triton: decode writes tokens of slots past the pool",
        "kernels/triton/device/attend.py",
        "given = (slot >= 0) & (slot // problem.block_size < new.num_blocks)",
        "given = slot >= 0",
        "interpret fused-hnd-bfloat16 fused-nhd-e5m2 fused-vllm-int8 fused-unsplit fused-large-group",
    ),
    Mutant(
        "mosaic_gpu: writes tokens of negative slots",
        "kernels/mosaic_gpu/device/write.py",
        "has_slot = (slot >= 0) & (slot <",
        "has_slot = (slot > -2**31) & (slot <",
        "tests/test_mosaic_gpu_write.py -k interpreter",
    ),
    Mutant(
        "mosaic_gpu: writes tokens of slots past the pool",
        "kernels/mosaic_gpu/device/write.py",
        "(slot < problem.num_blocks * problem.block_size)",
        "(slot < problem.num_blocks * problem.block_size + problem.block_size)",
        "tests/test_mosaic_gpu_write.py -k interpreter",
    ),
    Mutant(
        "mosaic_gpu: a token that no program attends to is not written",
        "kernels/mosaic_gpu/device/write.py",
        "return NewToken(slot, is_seen, is_seen | is_unseen)",
        "return NewToken(slot, is_seen, is_seen)",
        "tests/test_mosaic_gpu_write.py -k interpreter",
    ),
    Mutant(
        "triton: the write drops the last token of a tile",
        "kernels/triton/device/write.py",
        "given = tokens < num_tokens",
        "given = (tokens < num_tokens) & (tokens % cfg.tokens != cfg.tokens - 1)",
        "interpret write-hnd-int8",
    ),
    Mutant(
        "triton: the write takes negative slots",
        "kernels/triton/device/write.py",
        "valid = (slot >= 0) & (slot // pool.block_size < num_blocks)",
        "valid = slot // pool.block_size < num_blocks",
        "interpret write-hnd-int8",
    ),
    Mutant(
        "triton: sequences of one length have one rank",
        "kernels/triton/device/schedule.py",
        "| ((lens[None, :] == lens[:, None]) & (ids[None, :] < ids[:, None]))",
        "",
        "interpret ranked",
    ),
    Mutant(
        "triton: ragged looks at 128 sequences",
        "kernels/triton/device/pieces.py",
        "for first in range(0, num_seqs + 1, 128):",
        "for first in range(0, 128, 128):",
        "interpret many-sequences",
    ),
    Mutant(
        "triton: sparse blocks that nobody attends to are read",
        "kernels/triton/device/tiles.py",
        "            wanted = wanted & (tokens >= stretch.begin) & (tokens < stretch.end)\n            inner",
        "            wanted = (tokens >= stretch.begin) & (tokens < stretch.end)\n            inner",
        "interpret sparse-step sparse-negative-step everything",
    ),
    Mutant(
        "triton: a negative scale of values counts as its size",
        "kernels/triton/device/tiles.py",
        "weights *= (v_factor / peak)[None, :]",
        "weights *= (tl.abs(v_factor) / peak)[None, :]",
        "interpret scales-of-any-sign",
    ),
    Mutant(
        "triton: scales that are all 0 divide by 0",
        "kernels/triton/device/tiles.py",
        "            peak = tl.where(peak > 0, peak, 1.0)\n",
        "",
        "interpret scales-of-any-sign",
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
        "block = jnp.where(slot_mapping < 0, num_blocks, slot_mapping // block_size)",
        "block = slot_mapping // block_size",
        "tests/test_cache_ops.py -k write",
    ),
    Mutant(
        "xla: swaps take negative destinations",
        "kernels/xla/cache_ops.py",
        "(src < src_key_cache.shape[0]) & (dst >= 0)",
        "(src < src_key_cache.shape[0])",
        "tests/test_cache_ops.py -k 'copy or swap'",
    ),
    Mutant(
        "xla: swaps copy nothing",
        "kernels/xla/cache_ops.py",
        "    dst = jnp.where(valid, dst, dst_key_cache.shape[0])",
        "    dst = jnp.where(valid & (dst < 0), dst, dst_key_cache.shape[0])",
        "tests/test_cache_ops.py -k swap",
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
        "ops/merge.py",
        "weight_a * out_a.astype(jnp.float32) + weight_b * out_b.astype(jnp.float32)",
        "weight_a.astype(out_a.dtype) * out_a + weight_b.astype(out_a.dtype) * out_b",
        "tests/test_merge.py",
    ),
    Mutant(
        "merge: an empty side weighs something",
        "ops/merge.py",
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
        "or in_batched.key_cache != in_batched.value_cache",
        "",
        "tests/test_transforms.py -k vmap",
    ),
    Mutant(
        "vmap: batched pools share their scales of slots",
        "_vmap.py",
        "return not (in_batched.key_cache and any(scale is not None and scale.ndim == 3 for scale in scales))",
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
        "triton: offsets in nhd are in 32 bits",
        "kernels/triton/device/tiles.py",
        "start = ((blocks * pool.block_size + offsets) * pool.num_kv_heads + kv_head) * pool.head_size",
        "start = ((blocks.to(tl.int32) * pool.block_size + offsets) * pool.num_kv_heads + kv_head) * pool.head_size",
        "interpret offsets",
    ),
    Mutant(
        "metadata: a float table passes",
        "metadata.py",
        "def check_metadata(",
        "def check_metadata(*_, **__):\n    return None\n\n\ndef _unused(",
        "tests/test_metadata.py",
    ),
    Mutant(
        "mosaic_gpu: a row of padding that decode runs sees its sequence",
        "kernels/mosaic_gpu/ops.py",
        "jnp.where(query_start_loc[1] > query_start_loc[0], seq_lens, 0)",
        "seq_lens",
        "tests/test_mosaic_gpu_ops.py -k interpreter",
    ),
    Mutant(
        "mosaic_gpu: two tokens of two sequences are taken for decode",
        "kernels/mosaic_gpu/ops.py",
        "query.shape[0] == seq_lens.shape[0] == 1",
        "query.shape[0] == seq_lens.shape[0]",
        "tests/test_mosaic_gpu_ops.py -k which_kernel",
    ),
    Mutant(
        "mosaic_gpu: one query with a pattern is taken for decode",
        "kernels/mosaic_gpu/ops.py",
        "return not tuning.refusals(problem, Device())",
        "return True",
        "tests/test_mosaic_gpu_ops.py -k lead",
    ),
    Mutant(
        "mosaic_gpu: over 8 bits, too, one program on each multiprocessor is enough",
        "kernels/mosaic_gpu/tuning.py",
        "reads_as_fast = not tiles.kind(geometry.problem).in_registers",
        "reads_as_fast = True",
        "tests/test_mosaic_gpu_choice.py -k twice",
    ),
    Mutant(
        "mosaic_gpu: all heads of a query tile are those of its first item",
        "kernels/mosaic_gpu/device/plan.py",
        "lax.rem(index, sharing) * geometry.heads_per_item, index",
        "lax.rem(index, sharing), index",
        "tests/test_mosaic_gpu.py -k 'in_the_interpreter and plain'",
    ),
    Mutant(
        "mosaic_gpu: heads of 64 lead in groups, too",
        "kernels/mosaic_gpu/decode.py",
        "return group == 1 or (outside and group <= _LARGEST_GROUP_OF_64)",
        "return True",
        "tests/test_mosaic_gpu_choice.py -k sizes",
    ),
    Mutant(
        "mosaic_gpu: the cost of a long prompt overflows",
        "kernels/mosaic_gpu/device/ragged_count.py",
        "return items * of_item.astype(jnp.float32)",
        "return (items.astype(jnp.int32) * of_item).astype(jnp.float32)",
        "tests/test_mosaic_gpu_ragged.py -k overflow",
    ),
    Mutant(
        "mosaic_gpu: items are split into more than there is room for",
        "kernels/mosaic_gpu/device/ragged_sequence.py",
        "_ROUNDED_UP = 0.874",
        "_ROUNDED_UP = 9.874",
        "tests/test_mosaic_gpu_ragged.py -k cover",
    ),
    Mutant(
        "mosaic_gpu: a sparse block more is local",
        "kernels/mosaic_gpu/device/ragged_pattern.py",
        "return is_stripe | (block > lax.div",
        "return is_stripe | (block >= lax.div",
        "tests/test_mosaic_gpu_sparse.py -k interpreter",
    ),
    Mutant(
        "mosaic_gpu: stripes of the group's heads the other way round",
        "kernels/mosaic_gpu/device/ragged_pattern.py",
        "behind = (group - 1 - head) *",
        "behind = head *",
        "tests/test_mosaic_gpu_sparse.py -k interpreter",
    ),
    Mutant(
        "mosaic_gpu: far tiles have no mask",
        "kernels/mosaic_gpu/device/ragged_pattern.py",
        "    if len(kind.geometry.stripes) == 1:  # then",
        "    if True:  # then",
        "tests/test_mosaic_gpu_sparse.py -k mask",
    ),
    Mutant(
        "mosaic_gpu: tp_rank times kv heads",
        "kernels/mosaic_gpu/device/ragged_pattern.py",
        "(sparse.tp_rank * problem.num_heads + problem.group - 1)",
        "(sparse.tp_rank * problem.num_kv_heads + problem.group - 1)",
        "tests/test_mosaic_gpu_sparse.py -k attends_to",
    ),
    Mutant(
        "mosaic_gpu: near blocks begin one too late",
        "kernels/mosaic_gpu/device/ragged_pattern.py",
        "- (sparse.local_blocks - 1))",
        "- (sparse.local_blocks - 2))",
        "tests/test_mosaic_gpu_sparse.py -k attends_to",
    ),
    Mutant(
        "mosaic_gpu: blocks before the window are read",
        "kernels/mosaic_gpu/device/ragged_load_tiles.py",
        "        return lax.max(token, lax.div(self.item.begin, size) * size)",
        "        return token",
        "tests/test_mosaic_gpu_sparse.py -k attends_to",
    ),
    Mutant(
        "mosaic_gpu: stripes only, and V behind them is not zeroed",
        "kernels/mosaic_gpu/device/ragged_plan.py",
        "context.end if kind.geometry.sees_stripes_only else sequences",
        "sequences",
        'tests/test_mosaic_gpu_sparse.py -k "interpreter and stripes"',
    ),
    Mutant(
        "mosaic_gpu: a stride beyond 32 bits is taken",
        "kernels/mosaic_gpu/ragged_tuning.py",
        "problem.num_heads >= 1 << 31",
        "problem.num_heads >= 1 << 63",
        "tests/test_mosaic_gpu_sparse.py -k strides",
    ),
    Mutant(
        "mosaic_gpu: V without values is not zeroed",
        "kernels/mosaic_gpu/device/ragged_load_tiles.py",
        "partly = (tile.kept.end < self.kind.tile) | (tile.kept.begin > 0)",
        "partly = tile.kept.begin > 0",
        "tests/test_mosaic_gpu_ragged.py -k interpreter",
    ),
    Mutant(
        "mosaic_gpu: the window of ragged attention is one too wide",
        "kernels/mosaic_gpu/device/ragged_softmax.py",
        "seen &= token > _side_by_side(before, kind)",
        "seen &= token >= _side_by_side(before, kind)",
        "tests/test_mosaic_gpu_ragged.py -k short-window",
    ),
    Mutant(
        "mosaic_gpu: a split's sums have no logarithm of e",
        "kernels/mosaic_gpu/device/ragged_results.py",
        "maxima * LOG2E + jnp.log2(divisor)",
        "maxima + jnp.log2(divisor)",
        "tests/test_mosaic_gpu_ragged.py -k interpreter",
    ),
    Mutant(
        "mosaic_gpu: Triton's kernel is not first for one pattern of a group",
        "kernels/mosaic_gpu/ragged.py",
        "return has_groups and max(options.block_sparse.head_sliding_step, 0) % options.block_sparse.vert_stride > 0",
        "return True",
        "tests/test_mosaic_gpu_sparse.py -k leads",
    ),
]
