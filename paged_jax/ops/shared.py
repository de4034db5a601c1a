"""Attention to shared prefixes and to the tokens behind them, in one ragged batch. Engines use it; it is not public."""

import dataclasses
from typing import Any, cast

import jax.numpy as jnp
from jax import Array

from paged_jax import _dispatch, _validate
from paged_jax.options import Options
from paged_jax.shapes import BlockTables, Cache, Query, QueryStartLoc, SeqLens

_COPIES = 2  # rows of the batch for each query: one sees a prefix, the other one its own tokens


def attend_in_one_call(
    query: Query,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    query_start_loc: QueryStartLoc,
    *,
    implementation: Any = None,
    **options: Any,
) -> Array | None:
    """Attends to a ragged batch that has two rows for each query, and merges the results of a query's rows.

    Args:
      query: [num_queries, num_heads, head_size]. Row i of the batch is query ``i % num_queries``, and the last
        num_queries sequences of the batch have the second row of one query each.
      key_cache, value_cache: as in `ragged_paged_attention`.
      block_tables, seq_lens, query_start_loc: of the batch's sequences. A query sees all tokens of its sequence.
      implementation, options: as in `ragged_paged_attention`.

    Returns:
      out, of query's shape and dtype; None where separate calls are faster, or no implementation here does it in one.
    """
    rows = jnp.concatenate([query] * _COPIES)  # for the checks only: XLA removes it
    operands = _validate.ragged_operands(
        rows, key_cache, value_cache, block_tables, seq_lens, query_start_loc, False, cast(Options, options)
    )
    longest = min(operands.options.max_query_len, query.shape[0])  # no sequence has a query twice
    of_copies = dataclasses.replace(operands.options, copies=_COPIES, max_query_len=longest)
    operands = operands._replace(query=query, options=of_copies)
    if not _dispatch.merges_copies(operands, implementation):
        return None
    results = _dispatch.call("ragged_paged_attention", operands, implementation=implementation, unwanted=(1,))
    return results[0]
