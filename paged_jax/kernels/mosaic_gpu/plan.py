"""Device code: which tiles of K and V are whose.

A (sequence, kv head) is an item, and its tokens are cut into tiles. A segment is a run of tiles of one item: all of
them, those in a partition of fixed size, or an even share. A program attends to one, or in turns to two.

Where lengths may be uneven, items have parts in proportion to their lengths. There are `num_parts` programs for each,
and spare ones; the parts past those, of long items, are further ones: a list that programs take turns in when their own
part is done, those first that have none. Where lengths are alike the list is empty.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.config import Config

Scalar = Any  # an int32 of the device, or float32
_IN_FLIGHT = 64  # lengths
_LEAST_TILES = 4  # of a part


@dataclass(frozen=True)
class Lengths:
    """What the lengths of a batch say about how items are cut.

    Attributes:
      quarters: float32, of a part, for each token. An item has as many parts as that makes, up to a quarter too large.
      further: whether an item has more parts than programs.
    """

    quarters: Scalar
    further: Scalar


ALIKE = Lengths(0.0, False)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segment:
    """Some `count` tiles of an item, from `origin` on; of their tokens, the last one sees begin <= t < end.

    They are one of its `parts`, or nothing if `part` is not below that. Its further parts are from `first_further` on
    in their list; unknown for a program's own.
    """

    item: Scalar
    seq: Scalar
    head: Scalar
    part: Scalar
    parts: Scalar
    first_further: Scalar
    seq_len: Scalar
    origin: Scalar
    begin: Scalar
    end: Scalar
    count: Scalar


def lengths_of(seq_lens_gmem, cfg: Config) -> Lengths:
    """From all lengths, if the config wants to know."""
    if not cfg.mean_parts:
        return ALIKE

    def add(_, seq_len, carry):
        total, longest = carry
        seen = _seen(seq_len, cfg)
        return total + seen, lax.max(longest, seen)

    total, longest = _over_lengths(seq_lens_gmem, add, (jnp.int32(0), jnp.int32(0)), cfg)
    # In a batch of mostly nothing, what is there would be cut too fine.
    least = _LEAST_TILES * cfg.tokens * cfg.mean_parts
    mean = lax.max(total.astype(jnp.float32) / cfg.num_seqs, jnp.float32(least))
    quarters = 4 * cfg.mean_parts / mean
    return Lengths(quarters, _parts_of(longest, quarters, cfg) > cfg.num_parts)


def segment_of(
    seq_lens_gmem, lengths: Lengths, item: Scalar, part: Scalar, cfg: Config, first_further: Scalar = 0
) -> Segment:
    """A part of an item; it may be empty."""
    seq, head = lax.div(item, jnp.int32(cfg.num_kv_heads)), lax.rem(item, jnp.int32(cfg.num_kv_heads))
    seq_len = seq_lens_gmem[seq]
    parts = _parts_of(seq_len, lengths.quarters, cfg)
    begin, end = jnp.int32(0), lax.min(seq_len, jnp.int32(cfg.max_seq_len))
    if cfg.sliding_window is not None:
        begin = lax.max(seq_len - cfg.sliding_window, jnp.int32(0))
    if cfg.partition_size:
        begin = lax.max(begin, part * cfg.partition_size)
        end = lax.min(end, (part + 1) * cfg.partition_size)
    origin = lax.div(begin, jnp.int32(cfg.run)) * cfg.run
    if (cfg.num_parts > 1 or cfg.mean_parts) and not cfg.partition_size:
        share = tiles(tiles(end - origin, cfg.tokens), parts) * cfg.tokens
        origin += part * share
        end = lax.min(end, origin + share)
    count = tiles(end - origin, cfg.tokens)
    return Segment(item, seq, head, part, parts, jnp.int32(first_further), seq_len, origin, begin, end, count)


def first_turn(seq_lens_gmem, lengths: Lengths, own: Segment, cfg: Config) -> tuple[Scalar, Scalar]:
    """The first of the further parts that a program takes, and how many there are."""

    def add(seq, seq_len, carry):
        count, before, idle = carry
        excess = _parts_of(seq_len, lengths.quarters, cfg) - cfg.num_parts
        more, less = (lax.max(x, jnp.int32(0)) * cfg.num_kv_heads for x in (excess, -excess))
        return count + more, before + jnp.where(seq < own.seq, less, 0), idle + less

    def turn():
        zero = jnp.int32(0)
        count, before, idle = _over_lengths(seq_lens_gmem, add, (zero, zero, zero), cfg)
        before += own.head * lax.max(cfg.num_parts - own.parts, zero) + lax.max(own.part - own.parts, zero)
        busy_before = own.item * cfg.num_parts + own.part - before
        turn = cfg.spare + jnp.where(own.part < own.parts, idle + busy_before, before)
        program = own.part * cfg.items + own.item
        return jnp.where(program < cfg.own_parts, turn, program - cfg.own_parts), count

    return lax.cond(lengths.further, turn, lambda: (jnp.int32(0), jnp.int32(0)))


def further_segment(seq_lens_gmem, lengths: Lengths, number: Scalar, cfg: Config) -> Segment:
    """The further part of a number."""

    def find(seq, seq_len, carry):
        first, found, found_first, found_more = carry
        more = lax.max(_parts_of(seq_len, lengths.quarters, cfg) - cfg.num_parts, jnp.int32(0))
        following = first + more * cfg.num_kv_heads
        here = (first <= number) & (number < following)
        found, found_first, found_more = (
            jnp.where(here, x, y) for x, y in ((seq, found), (first, found_first), (more, found_more))
        )
        return following, found, found_first, found_more

    zero = jnp.int32(0)
    _, seq, first, more = _over_lengths(seq_lens_gmem, find, (zero, zero, zero, zero + 1), cfg)
    head = lax.div(number - first, more)
    first += head * more
    part = cfg.num_parts + number - first
    return segment_of(seq_lens_gmem, lengths, seq * cfg.num_kv_heads + head, part, cfg, first)


def place(segment: Segment, part: Scalar, cfg: Config) -> Scalar:
    """Where the partial result of a part of the segment's item is."""
    if not cfg.mean_parts:
        return segment.item * cfg.num_parts + part
    further = cfg.own_parts + segment.first_further + part - cfg.num_parts
    return jnp.where(part < cfg.num_parts, segment.item * cfg.num_parts + part, further)


def window(segment: Segment, cfg: Config) -> tuple[Scalar, Scalar]:
    """The first row of an item's window of the `rows` query rows, and where its own begin in the window."""
    own = first_row(segment, cfg)
    row = lax.min(lax.div(own, jnp.int32(8)) * 8, jnp.int32(cfg.rows - cfg.columns))
    return pl.multiple_of(row, 8), own - row


def first_row(segment: Segment, cfg: Config) -> Scalar:
    """The first of an item's own query rows."""
    return (segment.seq * cfg.num_kv_heads + segment.head) * cfg.group


def tiles(count: Scalar, size: Scalar | int) -> Scalar:
    return lax.max(lax.div(count + (size - 1), jnp.int32(size)), jnp.int32(0))


def _parts_of(seq_len: Scalar, quarters: Scalar, cfg: Config) -> Scalar:
    """How many parts an item has."""
    if cfg.partition_size:
        return tiles(lax.min(seq_len, jnp.int32(cfg.max_seq_len)), cfg.partition_size)
    if not cfg.mean_parts:
        return jnp.int32(cfg.num_parts)
    # One multiplication, nothing that could be contracted: the same in every place that asks.
    of_length = (_seen(seq_len, cfg).astype(jnp.float32) * quarters).astype(jnp.int32)
    return lax.max(lax.div(of_length + 3, jnp.int32(4)), jnp.int32(1))


def _seen(seq_len: Scalar, cfg: Config) -> Scalar:
    return lax.max(lax.min(seq_len, jnp.int32(cfg.most_seen)), jnp.int32(0))


def _over_lengths(seq_lens_gmem, step, carry, cfg: Config):
    """`step` over all lengths in order; many loads are in flight, as each program waits for them."""
    whole, rest = divmod(cfg.num_seqs, _IN_FLIGHT)

    def some(first, count: int, carry):
        for i, seq_len in enumerate([seq_lens_gmem[first + i] for i in range(count)]):
            carry = step(first + i, seq_len, carry)
        return carry

    if whole:
        carry = lax.fori_loop(0, whole, lambda i, carry: some(i * _IN_FLIGHT, _IN_FLIGHT, carry), carry)
    return some(whole * _IN_FLIGHT, rest, carry)
