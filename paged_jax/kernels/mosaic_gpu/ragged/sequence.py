"""A sequence of a ragged batch, and how its query tokens are cut into wide and thin query tiles.

Functions take one sequence, with scalars as fields, or all sequences, with arrays as fields.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar, at_least, cdiv, div
from paged_jax.kernels.mosaic_gpu.hopper.refs import Lengths
from paged_jax.kernels.mosaic_gpu.ragged import pattern as patterns
from paged_jax.kernels.mosaic_gpu.ragged.arithmetic import quotient, reciprocal, truncated
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import ItemKind
from paged_jax.kernels.problem import Problem

_FEW_WAVES = 8  # more waves of items leave little idle at their end


class Sequence(NamedTuple):
    """A sequence of the batch."""

    first_token: Any  # its first row of the query
    query_len: Any  # the number of its rows
    seq_len: Any  # its length in tokens


def sequence_of(index: Scalar, lengths_gmem: Lengths, problem: Problem) -> Sequence:
    """The sequence of this index; indices from num_seqs on are of empty sequences."""
    num_seqs, starts_gmem = problem.num_seqs, lengths_gmem.query_start_loc
    start = starts_gmem[lax.min(index, jnp.int32(num_seqs))]
    end = starts_gmem[lax.min(index + 1, jnp.int32(num_seqs))]
    seq_len = lengths_gmem.seq_lens[lax.min(index, jnp.int32(num_seqs - 1))]
    return Sequence(start, at_least(end - start, 0), jnp.where(index < num_seqs, seq_len, 0))


def existing(index: Scalar, lengths_gmem: Lengths) -> Sequence:
    """The sequence of this index, which has queries."""
    starts_gmem = lengths_gmem.query_start_loc
    start = starts_gmem[index]
    return Sequence(start, starts_gmem[index + 1] - start, lengths_gmem.seq_lens[index])


def query_tiles(sequence: Sequence, kind: ItemKind) -> Any:
    """The number of a sequence's query tiles of this kind.

    A sequence has any number of wide query tiles, and then at most one thin one. But if the batch has thin items only,
    a sequence has any number of thin query tiles.
    """
    if kind.takes_all:
        return cdiv(sequence.query_len, kind.tokens)
    band, whole = kind.geometry.band_tokens, _whole_tiles(sequence, kind.geometry)
    left_over = sequence.query_len - whole * kind.geometry.wide_tokens
    if kind.is_wide:
        return whole + (left_over > band).astype(jnp.int32)
    return ((left_over > 0) & (left_over <= band)).astype(jnp.int32)


def heads_together(query_tiles: Any, num_items: Any, kind: ItemKind) -> Any:
    """The number of kv heads whose items alternate; `num_items` is of all sequences.

    As few heads as have items for two waves of programs, or for one if the batch has many waves: few heads are then in
    L2 at a time, and the last ones still end with short items. But if fewer heads than these would be left over, all
    heads alternate. The heads that are left would have few items, and a long one of these would end last.
    """
    num_kv_heads, programs = kind.geometry.problem.num_kv_heads, kind.geometry.tuning.num_programs
    if not kind.may_divide_heads:
        return jnp.int32(num_kv_heads)
    items = jnp.where(num_items <= _FEW_WAVES * programs, 2 * programs, programs)
    filling = at_least(quotient(items, at_least(query_tiles, 1), kind), 1)
    return jnp.where(filling * 2 > num_kv_heads, jnp.int32(num_kv_heads), filling)


def first_query(sequence: Sequence, kind: ItemKind) -> Any:
    """The index, in its sequence, of the first query token that is in an item of this kind."""
    if kind.has_several:
        return jnp.int32(0)
    return _whole_tiles(sequence, kind.geometry) * kind.geometry.wide_tokens


def num_queries(sequence: Sequence, kind: ItemKind) -> Any:
    """The number of a sequence's query tokens in items of this kind."""
    if kind.takes_all:
        return sequence.query_len
    band = kind.geometry.band_tokens
    in_whole_tiles = _whole_tiles(sequence, kind.geometry) * kind.geometry.wide_tokens
    left_over = sequence.query_len - in_whole_tiles
    if kind.is_wide:
        return jnp.where(left_over > band, sequence.query_len, in_whole_tiles)
    return jnp.where(left_over <= band, left_over, 0)


def splits_of(sequence: Sequence, share: Any, kind: ItemKind) -> Any:
    """The number of splits of each of a sequence's items, so that a split costs about `share`."""
    cost = (most_tiles(sequence, kind) * kind.tile_cost).astype(jnp.float32)
    return at_least(truncated(cost * reciprocal(share, kind.geometry) + kind.rounded, kind.geometry), 1)


def most_tiles(sequence: Sequence, kind: ItemKind) -> Any:
    """The number of tiles that a sequence's last item sees; an estimate if there is a block-sparse pattern."""
    problem, prefix = kind.geometry.problem, kind.geometry.problem.prefix
    most = problem.max_seq_len
    if problem.sliding_window is not None:
        most = min(most, problem.sliding_window + kind.tokens)
    tokens = patterns.most_ranked(-at_least(-sequence.seq_len, -most), kind)
    return cdiv(tokens, kind.tile) + (1 if prefix else 0)


def values_end(sequence: Sequence, problem: Problem) -> Scalar:
    """The number of tokens that have keys and values, in the cache or beside it."""
    return at_least(lax.min(sequence.seq_len, jnp.int32(problem.max_seq_len)), 0)


def context_len(sequence: Sequence, geometry: Geometry) -> Scalar:
    """The number of tokens in the cache."""
    if not geometry.problem.prefix:
        return values_end(sequence, geometry.problem)
    return at_least(lax.min(sequence.seq_len - sequence.query_len, jnp.int32(geometry.problem.max_seq_len)), 0)


def visible(sequence: Sequence, position: Scalar, num_tokens: Scalar, problem: Problem) -> tuple[Scalar, Scalar]:
    """The tokens that any of `num_tokens` queries from `position` on sees: begin <= token < end."""
    end = values_end(sequence, problem)
    begin = jnp.int32(0)
    if problem.causal:
        end = lax.min(end, position + num_tokens)
    if problem.sliding_window is not None:
        begin = at_least(position - (problem.sliding_window - 1), 0)
    return lax.min(begin, at_least(end, 0)), at_least(end, 0)


def _whole_tiles(sequence: Sequence, geometry: Geometry) -> Any:
    """The number of query tiles that fill a wide item."""
    return div(sequence.query_len, geometry.wide_tokens)
