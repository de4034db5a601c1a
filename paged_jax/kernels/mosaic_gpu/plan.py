"""Device code: which tiles of K and V are whose.

A (sequence, kv head) is an item, its tokens are cut into tiles, and a run of tiles of one item is a segment. Unsplit or
in partitions a program has one segment. In even parts all tiles of all items, in that order, are one line of work;
program p takes the p-th of `num_parts` equal stretches of it, which it finds from seq_lens alone.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.config import Config

Scalar = Any  # an int32 of the device


@dataclass(frozen=True)
class Extent:
    """The tokens begin <= t < end of a sequence, or of a partition of it; tiles start at `origin` <= begin."""

    origin: Scalar
    begin: Scalar
    end: Scalar

    def tiles(self, cfg: Config) -> Scalar:
        return lax.max(lax.div(self.end - self.origin + (cfg.tile - 1), jnp.int32(cfg.tile)), jnp.int32(0))


@dataclass(frozen=True)
class Segment:
    """The tiles first ... first + count - 1 of the `tiles` of an item, or of one partition of it."""

    seq: Scalar
    head: Scalar
    part: Scalar  # where a partial result of it goes
    seq_len: Scalar
    extent: Extent
    first: Scalar
    count: Scalar
    tiles: Scalar

    @property
    def whole(self) -> Scalar:
        return (self.first == 0) & (self.count == self.tiles)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["tile", "seq", "base"], meta_fields=[])
@dataclass(frozen=True)
class Cursor:
    """A tile in the line of work, its sequence, and the first tile of that sequence."""

    tile: Scalar
    seq: Scalar
    base: Scalar


def extent_of(seq_len: Scalar, cfg: Config, partition: Scalar | None = None) -> Extent:
    """The tokens that the last one of a sequence sees."""
    begin, end = jnp.int32(0), lax.min(seq_len, jnp.int32(cfg.max_seq_len))
    if cfg.sliding_window is not None:
        begin = lax.max(seq_len - cfg.sliding_window, jnp.int32(0))
    if partition is not None:
        begin = lax.max(begin, partition * cfg.partition_size)
        end = lax.min(end, (partition + 1) * cfg.partition_size)
    return Extent(lax.div(begin, jnp.int32(cfg.run)) * cfg.run, begin, end)


def for_segments(seq_lens_gmem, program: Scalar, work, cfg: Config, body: Callable) -> Scalar:
    """Calls body(segment, tiles of the program before it) for each of a program's segments; returns all its tiles.

    `work` is what `stretch_of` gave for even parts, else None.
    """
    if work is None:
        parted = cfg.split == "partitions"
        item, partition = _divide(program, cfg.num_parts) if parted else (program, None)
        segment = segment_of(seq_lens_gmem, item, partition, cfg)
        body(segment, jnp.int32(0))
        return segment.count
    cursor, end, _ = work
    begin = cursor.tile

    def step(cursor):
        segment = segment_at(seq_lens_gmem, cursor, end, program, cfg)
        body(segment, cursor.tile - begin)
        tile, over = cursor.tile + segment.count, cursor.base + segment.tiles * cfg.num_kv_heads
        done = tile >= over
        return Cursor(tile, jnp.where(done, cursor.seq + 1, cursor.seq), jnp.where(done, over, cursor.base))

    lax.while_loop(lambda cursor: cursor.tile < end, step, cursor)
    return end - begin


def segment_of(seq_lens_gmem, item: Scalar, partition: Scalar | None, cfg: Config) -> Segment:
    """All tiles of an item, or of one partition of it."""
    seq, head = _divide(item, cfg.num_kv_heads)
    seq_len = seq_lens_gmem[seq]
    extent = extent_of(seq_len, cfg, partition)
    tiles = extent.tiles(cfg)
    part = item if partition is None else item * cfg.num_parts + partition
    return Segment(seq, head, part, seq_len, extent, jnp.int32(0), tiles, tiles)


def segment_at(seq_lens_gmem, cursor: Cursor, end: Scalar, program: Scalar, cfg: Config) -> Segment:
    """The segment from a tile in the line of work to the end of its item or of the stretch."""
    seq_len = seq_lens_gmem[cursor.seq]
    tiles = tiles_of(seq_len, cfg)
    past = cursor.tile - cursor.base
    head, first = lax.div(past, tiles), lax.rem(past, tiles)
    count = lax.min(tiles - first, end - cursor.tile)
    part = part_of(program, first == 0)
    return Segment(cursor.seq, head, part, seq_len, extent_of(seq_len, cfg), first, count, tiles)


def part_of(program: Scalar, owner: Scalar) -> Scalar:
    """Where a program's partial result goes: it has one of an item that starts in its stretch, one of one before."""
    return 2 * program + owner.astype(jnp.int32)


def tiles_of(seq_len: Scalar, cfg: Config) -> Scalar:
    """Tiles of one item in the line of work; an empty sequence has one, masked, that writes its zeros."""
    return lax.max(extent_of(seq_len, cfg).tiles(cfg), jnp.int32(1))


def stretch_of(seq_lens_gmem, program: Scalar, cfg: Config, last: bool = False) -> tuple[Cursor, Scalar, Scalar]:
    """The cursor at a program's first (or last) tile, the end of its stretch, and the length of the whole line."""
    unroll = min(cfg.unroll, cfg.num_seqs)

    def over_seqs(body, init):
        def step(i, carry):
            lens = [seq_lens_gmem[lax.min(i * unroll + j, cfg.num_seqs - 1)] for j in range(unroll)]
            for j, seq_len in enumerate(lens):
                seq = i * unroll + j
                carry = body(seq, jnp.where(seq < cfg.num_seqs, tiles_of(seq_len, cfg) * cfg.num_kv_heads, 0), carry)
            return carry

        return lax.fori_loop(0, -(-cfg.num_seqs // unroll), step, init)

    total = over_seqs(lambda _, tiles, sum_: sum_ + tiles, jnp.int32(0))
    share, rest = _divide(total, cfg.num_parts)
    begin = program * share + lax.min(program, rest)
    end = begin + share + (program < rest).astype(jnp.int32)
    tile = end - 1 if last else begin

    def find(seq, tiles, carry):
        running, found, base = carry
        running += tiles
        past = (running <= tile) & (tiles > 0)
        return running, jnp.where(past, seq + 1, found), jnp.where(past, running, base)

    _, seq, base = over_seqs(find, (jnp.int32(0),) * 3)
    return Cursor(tile, lax.min(seq, jnp.int32(cfg.num_seqs - 1)), base), end, total


def program_of(tile: Scalar, total: Scalar, cfg: Config) -> Scalar:
    """The program whose stretch has the tile."""
    share, rest = _divide(total, cfg.num_parts)
    longer = rest * (share + 1)
    behind = rest + lax.div(tile - longer, lax.max(share, jnp.int32(1)))
    return jnp.where(tile < longer, lax.div(tile, share + 1), behind)


def window(segment: Segment, cfg: Config) -> tuple[Scalar, Scalar]:
    """The first row of an item's window of the `rows` query rows, and where its own begin in the window."""
    own = first_row(segment, cfg)
    row = lax.min(lax.div(own, jnp.int32(8)) * 8, jnp.int32(cfg.rows - cfg.columns))
    return pl.multiple_of(row, 8), own - row


def first_row(segment: Segment, cfg: Config) -> Scalar:
    """The first of an item's own query rows."""
    return (segment.seq * cfg.num_kv_heads + segment.head) * cfg.group


def _divide(x: Scalar, by: int) -> tuple[Scalar, Scalar]:
    return lax.div(x, jnp.int32(by)), lax.rem(x, jnp.int32(by))
