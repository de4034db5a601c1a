"""Which tokens a block-sparse pattern leaves to a work item of ragged attention, and the numbers that they have.

A query sees the last `local_blocks` sparse blocks and, before them, the stripes of its head: one sparse block in
`vert_stride`. An item's tokens are the stripes of all its heads and, from its first query's local blocks on, all
tokens. Two heads' stripes, one in six, before four near blocks:

    sparse blocks    . . S S . . . . S S . . . . S S N N N N
    numbers              0 1         2 3         4 5 6 7 8 9        (times the tokens of a sparse block)

The numbers of an item's tokens have no gaps and go up with the tokens, so that a tile of neighbours by number has no
other tokens. Stripes are counted from before the first token on, so that the first number is not always 0. Without a
pattern a token's number is its position.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar, at_least, cdiv
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry, ItemKind
from paged_jax.options import BlockSparse


class Pattern(NamedTuple):
    """What the numbers of an item's tokens follow from."""

    offset: Scalar  # of the group's last head, modulo `vert_stride`: (block + offset) % vert_stride is 0 in its stripes
    far_end: Scalar  # lower numbers are of stripes
    near: Scalar  # the token that has the number `far_end`: from there on, all tokens have numbers


def pattern_of(kv_head: Scalar, position: Scalar, begin: Scalar, end: Scalar, geometry: Geometry) -> Pattern | None:
    """The pattern of an item, if there is one: its first query is at `position`, and it sees begin <= token < end."""
    if geometry.problem.block_sparse is None:
        return None
    sparse = _sparse(geometry)
    size, near = jnp.int32(sparse.block_size), cdiv(end, sparse.block_size)
    if sparse.local_blocks > 0:
        near = lax.min(near, lax.div(position, size) - (sparse.local_blocks - 1))
    near = lax.max(near, lax.div(begin, size))
    offset = _offset(kv_head, geometry)
    return Pattern(offset, _stripes_before(near, offset, geometry) * size, near * size)


def number_of(token: Scalar, pattern: Pattern | None, geometry: Geometry) -> Scalar:
    """The number of a token, or of the first one behind it that has a number."""
    if pattern is None:
        return token
    size = jnp.int32(_sparse(geometry).block_size)
    block = lax.div(token, size)
    before, following = (_stripes_before(b, pattern.offset, geometry) for b in (block, block + 1))
    far = before * size + jnp.where(following > before, lax.rem(token, size), 0)
    return jnp.where(token < pattern.near, far, pattern.far_end + (token - pattern.near))


def token_of(number: Scalar, pattern: Pattern | None, geometry: Geometry) -> Scalar:
    """The token of a number, by its position."""
    if pattern is None:
        return number
    sparse, stripes = _sparse(geometry), geometry.stripes
    size, count = jnp.int32(sparse.block_size), jnp.int32(len(stripes))
    stripe = lax.div(number, size)
    block = lax.div(stripe, count) * sparse.vert_stride + _element(stripes, lax.rem(stripe, count)) - pattern.offset
    far = block * size + lax.rem(number, size)
    return jnp.where(number < pattern.far_end, far, pattern.near + (number - pattern.far_end))


def stripes_of_rows(head: Array, kv_head: Scalar, geometry: Geometry) -> Any:
    """For rows of these heads of a group, the number modulo `vert_stride` of the sparse blocks in their stripes."""
    sparse, group = _sparse(geometry), geometry.problem.group
    first = sparse.vert_stride - _offset(kv_head, geometry)
    behind = (group - 1 - head) * (max(sparse.head_sliding_step, 0) % sparse.vert_stride)
    return lax.rem(first + behind, jnp.full_like(head, sparse.vert_stride))


def shows(token: Scalar, position: Array, stripes: Array, geometry: Geometry) -> Array:
    """To which rows, at these positions and with these `stripes_of_rows`, the pattern shows a token's sparse block."""
    sparse = _sparse(geometry)
    block = lax.div(token, jnp.int32(sparse.block_size))
    is_stripe = lax.rem(block, jnp.int32(sparse.vert_stride)) == stripes
    return is_stripe | (block > lax.div(position, jnp.full_like(position, sparse.block_size)) - sparse.local_blocks)


def hides_nothing(
    pattern: Pattern, first_number: Scalar, first_token: Scalar, last_position: Scalar, kind: ItemKind
) -> Scalar:
    """Whether the pattern shows all tokens of a tile to all rows; `last_position` is that of the last row."""
    sparse = _sparse(kind.geometry)
    block, last_block = (lax.div(x, jnp.int32(sparse.block_size)) for x in (first_token, last_position))
    whole = block > last_block - sparse.local_blocks
    if len(kind.geometry.stripes) == 1:  # then all heads see the same stripes
        whole |= first_number + kind.tile <= pattern.far_end
    return whole


def most_numbers(tokens: Any, kind: ItemKind) -> Any:
    """About how many of so many tokens have numbers, of an item whose queries are the last ones; not more than all."""
    problem = kind.geometry.problem
    if problem.block_sparse is None:
        return tokens
    sparse = _sparse(kind.geometry)
    size = sparse.block_size
    far = at_least(tokens - (min(sparse.local_blocks * size, problem.max_seq_len) + kind.tokens), 0)
    stripes = cdiv(cdiv(far, size), sparse.vert_stride) * len(kind.geometry.stripes)
    return tokens - at_least(far - stripes * size, 0)


def _offset(kv_head: Scalar, geometry: Geometry) -> Scalar:
    """`Pattern.offset`."""
    problem, sparse = geometry.problem, _sparse(geometry)
    step, stride = sparse.head_sliding_step, sparse.vert_stride
    if step >= 0:
        of_kv_head, first = problem.group * step, (sparse.tp_rank * problem.num_heads + problem.group - 1) * step + 1
    else:
        of_kv_head, first = -step, sparse.tp_rank * problem.num_kv_heads * -step + 1
    return lax.rem(kv_head * (of_kv_head % stride) + first % stride, jnp.int32(stride))


def _stripes_before(block: Scalar, offset: Scalar, geometry: Geometry) -> Scalar:
    """How many stripes of all heads there are before a sparse block."""
    stripes, stride = geometry.stripes, jnp.int32(_sparse(geometry).vert_stride)
    left_over = lax.rem(block + offset, stride)
    count = lax.div(block + offset, stride) * len(stripes)
    for stripe in stripes:
        count += (left_over > stripe).astype(jnp.int32)
    return count


def _sparse(geometry: Geometry) -> BlockSparse:
    """The pattern as the caller gave it, where there is one."""
    assert geometry.problem.block_sparse is not None
    return geometry.problem.block_sparse


def _element(values: tuple[int, ...], index: Scalar) -> Scalar:
    """The constant at this index."""
    step = values[min(1, len(values) - 1)]
    if values == tuple(i * step for i in range(len(values))):
        return index * step
    value = jnp.int32(values[0])
    for i, other in enumerate(values):
        value = jnp.where(index == i, other, value)
    return value
