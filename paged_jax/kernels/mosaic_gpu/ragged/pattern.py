"""The tokens that a work item of ragged attention sees under a block-sparse pattern, and their ranks.

A query sees the last `local_blocks` sparse blocks. Before them it sees the stripes of its head, one sparse block in
each `vert_stride`. An item's tokens are the stripes of all its heads, and all tokens from its first query's local
blocks on. An example with two heads, a stride of six, and four near blocks (N):

    sparse blocks    . . S S . . . . S S . . . . S S N N N N
    ranks                0 1         2 3         4 5 6 7 8 9        (times the tokens of a sparse block)

A token's rank is the number of the item's tokens before it. Ranks have no gaps, so a tile of consecutive ranks holds
no tokens that the item does not see. The count starts up to one stride before the sequence's first token, so the first
rank may be above 0. Without a pattern, a token's rank is its position.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar, at_least, cdiv
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import ItemKind
from paged_jax.options import BlockSparse


class Pattern(NamedTuple):
    """The facts from which the ranks of an item's tokens follow."""

    offset: Scalar  # (block + offset) % vert_stride is 0 in the stripes of the group's last head
    far_end: Scalar  # tokens of lower rank are in stripes
    near: Scalar  # the token of rank `far_end`; all tokens from here on have ranks


def pattern_of(kv_head: Scalar, position: Scalar, begin: Scalar, end: Scalar, geometry: Geometry) -> Pattern | None:
    """The pattern of an item that sees begin <= token < end, or None. The item's first query is at `position`."""
    if geometry.problem.block_sparse is None:
        return None
    sparse = _sparse(geometry)
    size, near = jnp.int32(sparse.block_size), cdiv(end, sparse.block_size)
    if sparse.local_blocks > 0:
        near = lax.min(near, lax.div(position, size) - (sparse.local_blocks - 1))
    near = lax.max(near, lax.div(begin, size))
    offset = _offset(kv_head, geometry)
    return Pattern(offset, _stripes_before(near, offset, geometry) * size, near * size)


def rank_of(token: Scalar, pattern: Pattern | None, geometry: Geometry) -> Scalar:
    """The rank of a token, or of the next token that has a rank."""
    if pattern is None:
        return token
    size = jnp.int32(_sparse(geometry).block_size)
    block = lax.div(token, size)
    before, following = (_stripes_before(b, pattern.offset, geometry) for b in (block, block + 1))
    far = before * size + jnp.where(following > before, lax.rem(token, size), 0)
    return jnp.where(token < pattern.near, far, pattern.far_end + (token - pattern.near))


def token_of(rank: Scalar, pattern: Pattern | None, geometry: Geometry) -> Scalar:
    """The position of the token of this rank."""
    if pattern is None:
        return rank
    sparse, stripes = _sparse(geometry), geometry.stripes
    size, count = jnp.int32(sparse.block_size), jnp.int32(len(stripes))
    stripe = lax.div(rank, size)
    block = lax.div(stripe, count) * sparse.vert_stride + _element(stripes, lax.rem(stripe, count)) - pattern.offset
    far = block * size + lax.rem(rank, size)
    return jnp.where(rank < pattern.far_end, far, pattern.near + (rank - pattern.far_end))


def stripes_of_rows(head: Array, kv_head: Scalar, geometry: Geometry) -> Any:
    """The residue, modulo `vert_stride`, of the sparse blocks in the stripes of each row's head."""
    sparse, group = _sparse(geometry), geometry.problem.group
    first = sparse.vert_stride - _offset(kv_head, geometry)
    behind = (group - 1 - head) * (max(sparse.head_sliding_step, 0) % sparse.vert_stride)
    return lax.rem(first + behind, jnp.full_like(head, sparse.vert_stride))


def shows(token: Scalar, position: Array, stripes: Array, geometry: Geometry) -> Array:
    """Whether the pattern shows a token's sparse block to each row; `stripes` comes from `stripes_of_rows`."""
    sparse = _sparse(geometry)
    block = lax.div(token, jnp.int32(sparse.block_size))
    is_stripe = lax.rem(block, jnp.int32(sparse.vert_stride)) == stripes
    return is_stripe | (block > lax.div(position, jnp.full_like(position, sparse.block_size)) - sparse.local_blocks)


def hides_nothing(
    pattern: Pattern, first_rank: Scalar, first_token: Scalar, last_position: Scalar, kind: ItemKind
) -> Scalar:
    """Whether the pattern shows all tokens of a tile to all rows; the last row is at `last_position`."""
    sparse = _sparse(kind.geometry)
    block, last_block = (lax.div(x, jnp.int32(sparse.block_size)) for x in (first_token, last_position))
    whole = block > last_block - sparse.local_blocks
    if len(kind.geometry.stripes) == 1:  # then all heads see the same stripes
        whole |= first_rank + kind.tile <= pattern.far_end
    return whole


def most_ranked(tokens: Any, kind: ItemKind) -> Any:
    """Estimates how many of the first `tokens` tokens a sequence's last item sees; never more than `tokens`."""
    problem = kind.geometry.problem
    if problem.block_sparse is None:
        return tokens
    sparse = _sparse(kind.geometry)
    size = sparse.block_size
    far = at_least(tokens - (min(sparse.local_blocks * size, problem.max_seq_len) + kind.tokens), 0)
    stripes = cdiv(cdiv(far, size), sparse.vert_stride) * len(kind.geometry.stripes)
    return tokens - at_least(far - stripes * size, 0)


def _offset(kv_head: Scalar, geometry: Geometry) -> Scalar:
    """Computes `Pattern.offset`."""
    problem, sparse = geometry.problem, _sparse(geometry)
    step, stride = sparse.head_sliding_step, sparse.vert_stride
    if step >= 0:
        of_kv_head, first = problem.group * step, (sparse.tp_rank * problem.num_heads + problem.group - 1) * step + 1
    else:
        of_kv_head, first = -step, sparse.tp_rank * problem.num_kv_heads * -step + 1
    return lax.rem(kv_head * (of_kv_head % stride) + first % stride, jnp.int32(stride))


def _stripes_before(block: Scalar, offset: Scalar, geometry: Geometry) -> Scalar:
    """The number of stripes before a sparse block, over all heads of the group."""
    stripes, stride = geometry.stripes, jnp.int32(_sparse(geometry).vert_stride)
    left_over = lax.rem(block + offset, stride)
    count = lax.div(block + offset, stride) * len(stripes)
    for stripe in stripes:
        count += (left_over > stripe).astype(jnp.int32)
    return count


def _sparse(geometry: Geometry) -> BlockSparse:
    """The pattern as the caller gave it; there must be one."""
    assert geometry.problem.block_sparse is not None
    return geometry.problem.block_sparse


def _element(values: tuple[int, ...], index: Scalar) -> Scalar:
    """values[index], for an index on the device."""
    step = values[min(1, len(values) - 1)]
    if values == tuple(i * step for i in range(len(values))):
        return index * step
    value = jnp.int32(values[0])
    for i, other in enumerate(values):
        value = jnp.where(index == i, other, value)
    return value
