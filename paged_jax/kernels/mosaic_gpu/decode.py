"""Decode, one query a sequence: v1 unsplit, v2 in fixed partitions; in even parts if chosen here, or as it writes."""

from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import Array

from paged_jax.kernels.mosaic_gpu import choice
from paged_jax.kernels.mosaic_gpu.attend import attend
from paged_jax.kernels.mosaic_gpu.config import Config
from paged_jax.kernels.mosaic_gpu.reduce import reduce
from paged_jax.kernels.problem import Unsupported
from paged_jax.options import AttentionOptions, head_axis
from paged_jax.shapes import BlockTables, Cache, Lse, NewTokens, Query, Residual, SeqLens, SlotMapping, TmpOut

_LONGEST = 256  # of a block: partitions hold whole ones
_GROUPS = (*range(1, 9), 16)  # of query heads, for which these kernels are faster than Triton's


def leads(op: str, operands: Any) -> bool:
    """Whether these kernels are the fastest of ours, where they can: in decode, by group (benchmarks/LOG.md)."""
    if op not in ("paged_attention_v1", "paged_attention_v2", "paged_attention", "write_and_attend"):
        return False
    num_kv_heads = operands.value_cache.shape[head_axis(operands.options.layout)]
    return operands.query.shape[-2] in [group * num_kv_heads for group in _GROUPS]


def paged_attention_v1(
    query: Query,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    options: AttentionOptions,
) -> tuple[Query, Lse]:
    cfg = choice.config(query, key_cache, value_cache, options, choice.device(), "none")
    if _nothing_to_attend(key_cache, cfg):
        return _unseen(query)
    return _attend(query, key_cache, value_cache, block_tables, seq_lens, options, cfg)[:2]


def paged_attention(
    query: Query,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    options: AttentionOptions,
) -> tuple[Query, Lse]:
    cfg = choice.config(query, key_cache, value_cache, options, choice.device(), "even")
    if _nothing_to_attend(key_cache, cfg):
        return _unseen(query)
    return _attend(query, key_cache, value_cache, block_tables, seq_lens, options, cfg)[:2]


def write_and_attend(
    query: Query,
    key: NewTokens,
    value: NewTokens,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    slot_mapping: SlotMapping,
    options: AttentionOptions,
) -> tuple[Query, Lse, Cache, Cache]:
    choice.check_write(query, key_cache, options)
    cfg = choice.config(query, key_cache, value_cache, options, choice.device(), "even", write=True)
    if _nothing_to_attend(key_cache, cfg):
        raise Unsupported("mosaic_gpu", ["lacks writes without a context or a pool"])

    def run(refs):
        keys, values, out_ref, lse_ref = refs
        new = key, value, slot_mapping
        out_ref[...], lse_ref[...], _ = _attend(query, keys, values, block_tables, seq_lens, options, cfg, *new)

    unwritten = jnp.zeros_like(query), jnp.zeros(query.shape[:2], jnp.float32)  # which XLA drops
    key_cache, value_cache, out, lse = pl.run_state(run)((key_cache, value_cache, *unwritten))
    return out, lse, key_cache, value_cache


def paged_attention_v2(
    query: Query,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    options: AttentionOptions,
    *,
    partition_size: int,
) -> tuple[Query, Lse, Residual, Residual, TmpOut]:
    # One longer than every context would overflow, and holds no more than the contexts do.
    partition_size = min(partition_size, max(1, -(-options.max_seq_len // _LONGEST)) * _LONGEST)
    cfg = choice.config(query, key_cache, value_cache, options, choice.device(), "partitions", partition_size)
    residual = *query.shape[:2], cfg.num_parts
    if _nothing_to_attend(key_cache, cfg):
        zeros = jnp.zeros(residual, jnp.float32)
        return *_unseen(query), zeros, zeros - jnp.inf, jnp.zeros((*residual, cfg.head_size), jnp.float32)
    out, lse, parts = _attend(query, key_cache, value_cache, block_tables, seq_lens, options, cfg)
    tmp_out = _of_heads(parts["parts"], cfg)
    first = cfg.pieces[0][1]  # of what follows, the last rows are new
    tmp_out = jnp.concatenate([tmp_out[..., :first], tmp_out[..., tmp_out.shape[-1] - cfg.head_size + first :]], -1)
    return out, lse, _of_heads(parts["sums"], cfg), _of_heads(parts["maxima"], cfg), tmp_out


def _of_heads(x: Array, cfg: Config) -> Array:
    """[items * num_parts, ..., columns] -> [num_seqs, num_heads, num_parts, ...]; XLA drops it where it is not used."""
    x = x.reshape(cfg.items, cfg.num_parts, *x.shape[1:])
    item = np.arange(cfg.items)[:, None]
    window = np.minimum(item * cfg.group // 8 * 8, cfg.rows - cfg.columns)  # as in `plan.window`
    columns = jnp.asarray(item * cfg.group - window + np.arange(cfg.group))
    x = jnp.take_along_axis(x, columns.reshape(cfg.items, *[1] * (x.ndim - 2), cfg.group), axis=-1)
    return jnp.moveaxis(x, -1, 1).reshape(cfg.num_seqs, cfg.num_heads, *x.shape[1:-1])


def _attend(
    query: Query,
    key_cache: Any,
    value_cache: Any,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    options: AttentionOptions,
    cfg: Config,
    *new: Array,
) -> tuple[Query, Lse, dict[str, Array]]:
    """out, lse and the parts that they were merged from. With the `new` tokens, the caches are references."""
    num_rows = cfg.num_seqs * cfg.num_heads
    rows = jnp.pad(query.reshape(num_rows, cfg.head_size), ((0, cfg.rows - num_rows), (0, 0)))
    if cfg.fold > 1 or cfg.layout == "vllm":
        run = cfg.pages if cfg.layout == "vllm" else (cfg.fold * cfg.block_size, cfg.head_size)
        runs = key_cache.shape[0], cfg.num_kv_heads, *run
        key_cache, value_cache = key_cache.reshape(runs), value_cache.reshape(runs)
    arrays = options.scale, options.alibi_slopes, options.sinks, options.k_scale, options.v_scale
    of_options = [_or_any(x, options) for x in arrays]
    results = attend(cfg, rows, key_cache, value_cache, block_tables, seq_lens, *of_options, *new)
    if cfg.merge == "kernel":
        out, lse = reduce(cfg, seq_lens, of_options[2], results)
    else:
        out, lse = results["out"], results["lse"]
    return out.reshape(query.shape), lse.reshape(query.shape[:2]), results


def _or_any(x: Array | None, options: AttentionOptions) -> Array:
    """`x`, a scalar as a vector; `scale` stands in for what is absent, which is not read."""
    return jnp.atleast_1d(options.scale if x is None else x)


def _nothing_to_attend(key_cache: Cache, cfg: Config) -> bool:
    return cfg.num_seqs * cfg.max_seq_len * key_cache.shape[0] == 0


def _unseen(query: Query) -> tuple[Query, Lse]:
    return jnp.zeros(query.shape, query.dtype), jnp.full(query.shape[:2], -jnp.inf, jnp.float32)
