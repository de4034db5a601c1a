"""Device code: which tiles of K and V are whose.

A (sequence, kv head) is an item, and its tokens are cut into tiles. A program attends to one segment: a run of tiles of
one item, which is all of them, those in a partition of fixed size, or an even share, of which longer items may have
more.
"""

from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.config import Config

Scalar = Any  # an int32 of the device
_IN_FLIGHT = 32  # lengths


@dataclass(frozen=True)
class Segment:
    """Some `count` tiles of an item, from `origin` on; of their tokens, the last one sees begin <= t < end.

    They are one of its `parts`, or nothing if `part` is not below that.
    """

    item: Scalar
    seq: Scalar
    head: Scalar
    part: Scalar
    parts: Scalar
    seq_len: Scalar
    origin: Scalar
    begin: Scalar
    end: Scalar
    count: Scalar


def segment_of(seq_lens_gmem, item: Scalar, part: Scalar, cfg: Config) -> Segment:
    """The part of an item that a program attends to; it may be empty."""
    seq, head = lax.div(item, jnp.int32(cfg.num_kv_heads)), lax.rem(item, jnp.int32(cfg.num_kv_heads))
    seq_len = seq_lens_gmem[seq]
    parts = _parts_of(seq_lens_gmem, seq_len, cfg)
    begin, end = jnp.int32(0), lax.min(seq_len, jnp.int32(cfg.max_seq_len))
    if cfg.sliding_window is not None:
        begin = lax.max(seq_len - cfg.sliding_window, jnp.int32(0))
    if cfg.partition_size:
        begin = lax.max(begin, part * cfg.partition_size)
        end = lax.min(end, (part + 1) * cfg.partition_size)
    origin = lax.div(begin, jnp.int32(cfg.run)) * cfg.run
    if cfg.num_parts > 1 and not cfg.partition_size:
        share = tiles(tiles(end - origin, cfg.tokens), parts) * cfg.tokens
        origin += part * share
        end = lax.min(end, origin + share)
    return Segment(item, seq, head, part, parts, seq_len, origin, begin, end, tiles(end - origin, cfg.tokens))


def _parts_of(seq_lens_gmem, seq_len: Scalar, cfg: Config) -> Scalar:
    """How many parts an item has: if lengths are uneven, in proportion to its own."""

    def seen(seq_len):
        most = cfg.max_seq_len if cfg.sliding_window is None else min(cfg.max_seq_len, cfg.sliding_window)
        return lax.max(lax.min(seq_len, jnp.int32(most)), jnp.int32(0))

    if cfg.partition_size:
        return tiles(lax.min(seq_len, jnp.int32(cfg.max_seq_len)), cfg.partition_size)
    if not cfg.mean_parts:
        return jnp.int32(cfg.num_parts)
    # Many loads in flight: each program waits for them.
    whole, rest = divmod(cfg.num_seqs, _IN_FLIGHT)

    def add(first, count: int, total):
        return sum((seen(seq_lens_gmem[first + i]) for i in range(count)), total)

    total = lax.fori_loop(0, whole, lambda i, total: add(i * _IN_FLIGHT, _IN_FLIGHT, total), jnp.int32(0))
    total = add(whole * _IN_FLIGHT, rest, total)
    mean = total.astype(jnp.float32) / cfg.num_seqs
    parts = seen(seq_len).astype(jnp.float32) * cfg.mean_parts / lax.max(mean, jnp.float32(1)) + 0.5
    return lax.max(lax.min(parts.astype(jnp.int32), jnp.int32(cfg.num_parts)), jnp.int32(1))


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
