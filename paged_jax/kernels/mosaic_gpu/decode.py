"""Decode, one query a sequence: v1 unsplit, v2 in fixed partitions, the automatic choice in even parts."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from paged_jax.kernels.mosaic_gpu import config
from paged_jax.kernels.mosaic_gpu.attend import attend
from paged_jax.kernels.mosaic_gpu.config import Config
from paged_jax.kernels.mosaic_gpu.reduce import reduce
from paged_jax.options import AttentionOptions
from paged_jax.shapes import BlockTables, Cache, Lse, Query, Residual, SeqLens, TmpOut


def paged_attention_v1(
    query: Query,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    options: AttentionOptions,
) -> tuple[Query, Lse]:
    cfg = config.config(query, key_cache, value_cache, options, config.device(), "none")
    if _nothing_to_attend(key_cache, cfg):
        return _unseen(query)
    results = _attend(query, key_cache, value_cache, block_tables, seq_lens, options, cfg)
    return _shaped(query, results["out"], results["lse"])


def paged_attention(
    query: Query,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    options: AttentionOptions,
) -> tuple[Query, Lse]:
    cfg = config.config(query, key_cache, value_cache, options, config.device(), "even")
    if _nothing_to_attend(key_cache, cfg):
        return _unseen(query)
    results = _attend(query, key_cache, value_cache, block_tables, seq_lens, options, cfg)
    return _shaped(query, *reduce(cfg, seq_lens, _or_any(options.sinks, options), results))


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
    cfg = config.config(query, key_cache, value_cache, options, config.device(), "partitions", partition_size)
    residual = *query.shape[:2], cfg.num_parts
    if _nothing_to_attend(key_cache, cfg):
        zeros = jnp.zeros(residual, jnp.float32)
        return *_unseen(query), zeros, zeros - jnp.inf, jnp.zeros((*residual, cfg.head_size), jnp.float32)
    results = _attend(query, key_cache, value_cache, block_tables, seq_lens, options, cfg)
    out, lse = _shaped(query, *reduce(cfg, seq_lens, _or_any(options.sinks, options), results))
    exp_sums, max_logits = results["exp_sums"].reshape(residual), results["max_logits"].reshape(residual)
    return out, lse, exp_sums, max_logits, _tmp_out(results["parts"], cfg)


def _tmp_out(parts: Array, cfg: Config) -> TmpOut:
    """The partial outputs as callers know them; XLA drops this where they are not asked for."""
    item = np.arange(cfg.items)[:, None]
    window = np.minimum(item * cfg.group // 8 * 8, cfg.rows - cfg.columns)  # as in `plan.window`
    columns = item * cfg.group - window + np.arange(cfg.group)
    outs = parts.reshape(cfg.items, cfg.num_parts, -1, cfg.columns)[:, :, : cfg.padded_head_size]
    first = cfg.pieces[0][1]  # of what follows, the last rows are new
    outs = jnp.concatenate([outs[:, :, :first], outs[:, :, cfg.padded_head_size - cfg.head_size + first :]], axis=2)
    outs = jnp.take_along_axis(outs, jnp.asarray(columns)[:, None, None, :], axis=3)
    return outs.transpose(0, 3, 1, 2).reshape(cfg.num_seqs, cfg.num_heads, cfg.num_parts, cfg.head_size)


def _attend(
    query: Query,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    options: AttentionOptions,
    cfg: Config,
) -> dict[str, Array]:
    num_rows = cfg.num_seqs * cfg.num_heads
    rows = jnp.pad(query.reshape(num_rows, cfg.head_size), ((0, cfg.rows - num_rows), (0, 0)))
    arrays = options.scale, options.alibi_slopes, options.sinks, options.k_scale, options.v_scale
    of_options = [_or_any(x, options) for x in arrays]
    return attend(cfg, rows, key_cache, value_cache, block_tables, seq_lens, *of_options)


def _or_any(x: Array | None, options: AttentionOptions) -> Array:
    """`x`, a scalar as a vector; `scale` stands in for what is absent, which is not read."""
    return jnp.atleast_1d(options.scale if x is None else x)


def _shaped(query: Query, out: Array, lse: Array) -> tuple[Query, Lse]:
    num_seqs, num_heads, _ = query.shape
    return out[: num_seqs * num_heads].reshape(query.shape), lse[: num_seqs * num_heads].reshape(num_seqs, num_heads)


def _nothing_to_attend(key_cache: Cache, cfg: Config) -> bool:
    return cfg.num_seqs * cfg.max_seq_len * key_cache.shape[0] == 0


def _unseen(query: Query) -> tuple[Query, Lse]:
    return jnp.zeros(query.shape, query.dtype), jnp.full(query.shape[:2], -jnp.inf, jnp.float32)
