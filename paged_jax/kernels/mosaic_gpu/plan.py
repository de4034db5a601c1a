"""Device code: which tiles of K and V are whose.

A (sequence, kv head) is an item, and its tokens are cut into tiles. A segment is a run of tiles of one item, which a
program attends to: all of them, those in a partition of fixed size, or an even share.

Where lengths may be uneven, and are, the tiles of all items are one line, and the programs that run at once have even
stretches of it: segments of one or more items, the first and the last of which may be parts. Where lengths are alike
after all, a program has an item, or an even part of one.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.config import Config

Scalar = Any  # an int32 of the device
_IN_FLIGHT = 64  # lengths
_ALIKE = 16  # lengths are, if none is longer than the mean by more than 1/16 of it
_LEAST = 4  # tiles of a stretch: in a batch of mostly nothing, what is there would be cut too fine


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segment:
    """Some `count` tiles of an item, from `origin` on; of their tokens, the last one sees begin <= t < end.

    They are one of its parts, the one at `place` among the partial results, if they are not the `whole` item, and maybe
    the `last`. `part` counts them; in a stretch it only tells the first, 0, from the others, 1.
    """

    item: Scalar
    seq: Scalar
    head: Scalar
    part: Scalar
    whole: Scalar
    last: Scalar
    place: Scalar
    seq_len: Scalar
    origin: Scalar
    begin: Scalar
    end: Scalar
    count: Scalar

    @property
    def some(self) -> bool:
        """A program has one; it may be empty."""
        return True


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stretch:
    """What a program has still to do: `left` tiles of the line, from one of an item on; and where a part of it goes."""

    seq: Scalar
    head: Scalar
    tile: Scalar
    left: Scalar
    place: Scalar

    @property
    def some(self) -> Scalar:
        """Whether there is any."""
        return self.left > 0


def segment_of(seq_lens_gmem, item: Scalar, part: Scalar, cfg: Config) -> Segment:
    """A part of an item; it may be empty."""
    seq, head = lax.div(item, jnp.int32(cfg.num_kv_heads)), lax.rem(item, jnp.int32(cfg.num_kv_heads))
    seq_len = seq_lens_gmem[seq]
    begin, end = _span(seq_len, cfg)
    if cfg.partition_size:
        begin = lax.max(begin, part * cfg.partition_size)
        end = lax.min(end, (part + 1) * cfg.partition_size)
    origin = _first_run(begin, cfg)
    if cfg.num_parts > 1 and not cfg.partition_size:
        share = tiles(tiles(end - origin, cfg.tokens), cfg.num_parts) * cfg.tokens
        origin += part * share
        end = lax.min(end, origin + share)
    count = tiles(end - origin, cfg.tokens)
    place = item * cfg.num_parts + part
    no = jnp.bool_(False)
    return Segment(item, seq, head, part, no, no, place, seq_len, origin, begin, end, count)


def stretch_of(seq_lens_gmem, program: Scalar, cfg: Config) -> Stretch:
    """A program's stretch."""

    def add(_, seq_len, carry):
        total, longest = carry
        length = _length(seq_len, cfg)
        return total + length, lax.max(longest, length)

    total, longest = _over_lengths(seq_lens_gmem, add, (jnp.int32(0), jnp.int32(0)), cfg)
    alike = _ALIKE * longest * cfg.num_seqs <= (_ALIKE + 1) * total
    of_item = functools.partial(_stretch_of_item, seq_lens_gmem, program, cfg)
    of_line = functools.partial(_stretch_of_line, seq_lens_gmem, program, total * cfg.num_kv_heads, cfg)
    return lax.cond(alike, of_item, of_line)


def _stretch_of_item(seq_lens_gmem, program: Scalar, cfg: Config) -> Stretch:
    """A part of an item, as many for each, or all of it."""
    parts = jnp.int32(cfg.num_parts)
    item, part = lax.div(program, parts), lax.rem(program, parts)
    seq, head = lax.div(item, jnp.int32(cfg.num_kv_heads)), lax.rem(item, jnp.int32(cfg.num_kv_heads))
    length = _length(seq_lens_gmem[seq], cfg)
    share = tiles(length, parts)
    first = lax.min(part * share, length)
    return Stretch(seq, head, first, lax.min(share, length - first), 2 * program)


def _stretch_of_line(seq_lens_gmem, program: Scalar, total: Scalar, cfg: Config) -> Stretch:
    """Of the line of all `total` tiles; nothing for programs that there are no more stretches for."""
    stretches, zero = jnp.int32(cfg.stretches), jnp.int32(0)
    size, rest = lax.div(total, stretches), lax.rem(total, stretches)

    def cut(number):
        number = lax.min(number, stretches)
        even = number * size + lax.div(number * rest, stretches)
        return jnp.where(size < _LEAST, lax.min(number * _LEAST, total), even)

    def search(seq, seq_len, carry):
        after, (found, before) = carry[0] + _length(seq_len, cfg) * cfg.num_kv_heads, carry[1]
        past = first >= after
        return after, (jnp.where(past, seq + 1, found), jnp.where(past, after, before))

    first, end = cut(program), cut(program + 1)
    _, (seq, before) = _over_lengths(seq_lens_gmem, search, (zero, (zero, zero)), cfg)
    length = _length(seq_lens_gmem[lax.min(seq, jnp.int32(cfg.num_seqs - 1))], cfg)
    head, tile = lax.div(first - before, length), lax.rem(first - before, length)
    return Stretch(seq, head, tile, end - first, 2 * program)


def next_segment(seq_lens_gmem, stretch: Stretch, cfg: Config) -> Segment:
    """The first segment of a stretch, which must not be empty."""
    seq_len = seq_lens_gmem[stretch.seq]
    length = _length(seq_len, cfg)
    num_tiles = lax.min(length - stretch.tile, stretch.left)
    begin, end = _span(seq_len, cfg)
    origin = _first_run(begin, cfg) + stretch.tile * cfg.tokens
    end = lax.min(end, origin + num_tiles * cfg.tokens)
    item, part = stretch.seq * cfg.num_kv_heads + stretch.head, jnp.where(stretch.tile == 0, 0, 1)
    last = stretch.tile + num_tiles == length
    whole = last & (stretch.tile == 0)
    count = tiles(end - origin, cfg.tokens)
    return Segment(
        item, stretch.seq, stretch.head, part, whole, last, stretch.place, seq_len, origin, begin, end, count
    )


def after_segment(seq_lens_gmem, stretch: Stretch, cfg: Config) -> Stretch:
    """A stretch without its first segment."""
    length = _length(seq_lens_gmem[stretch.seq], cfg)
    left, past = stretch.tile + stretch.left - length, stretch.head + 1 == cfg.num_kv_heads
    seq, head = stretch.seq + past.astype(jnp.int32), jnp.where(past, 0, stretch.head + 1)
    return Stretch(seq, head, jnp.int32(0), left, stretch.place | 1)


def place_of(first: Scalar, number: Scalar, cfg: Config) -> Scalar:
    """Where the part of a number is, of an item whose first one is at `first`."""
    if not cfg.stretches:
        return first + number
    return jnp.where(number == 0, first, (lax.div(first, jnp.int32(2)) + number) * 2)


def window(segment: Segment | Stretch, cfg: Config) -> tuple[Scalar, Scalar]:
    """The first row of an item's window of the `rows` query rows, and where its own begin in the window."""
    own = first_row(segment, cfg)
    row = lax.min(lax.div(own, jnp.int32(8)) * 8, jnp.int32(cfg.rows - cfg.columns))
    return pl.multiple_of(row, 8), own - row


def first_row(segment: Segment | Stretch, cfg: Config) -> Scalar:
    """The first of an item's own query rows."""
    return (segment.seq * cfg.num_kv_heads + segment.head) * cfg.group


def tiles(count: Scalar, size: Scalar | int) -> Scalar:
    return lax.max(lax.div(count + (size - 1), jnp.int32(size)), jnp.int32(0))


def num_partitions(seq_len: Scalar, cfg: Config) -> Scalar:
    """Parts of an item that are not empty, or all."""
    if not cfg.partition_size:
        return jnp.int32(cfg.num_parts)
    return tiles(lax.min(seq_len, jnp.int32(cfg.max_seq_len)), cfg.partition_size)


def _span(seq_len: Scalar, cfg: Config) -> tuple[Scalar, Scalar]:
    """The tokens that the last one sees: begin <= t < end."""
    begin, end = jnp.int32(0), lax.min(seq_len, jnp.int32(cfg.max_seq_len))
    if cfg.sliding_window is not None:
        begin = lax.max(seq_len - cfg.sliding_window, jnp.int32(0))
    return begin, end


def _first_run(begin: Scalar, cfg: Config) -> Scalar:
    return lax.div(begin, jnp.int32(cfg.run)) * cfg.run


def _length(seq_len: Scalar, cfg: Config) -> Scalar:
    """Tiles of an item in the line: one if there are none, so that someone writes its result."""
    begin, end = _span(seq_len, cfg)
    return lax.max(tiles(end - _first_run(begin, cfg), cfg.tokens), jnp.int32(1))


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
