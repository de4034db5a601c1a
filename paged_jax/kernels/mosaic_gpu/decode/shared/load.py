"""The loading warpgroup: two of its warps copy tiles of own tokens, the other two those of prefixes.

A warp goes from tile to tile, also from an item's last tile to the next item's first one. So it reads the next tile's
row of the block table while it waits for a stage, and memory is never idle between two items.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.decode import plan as decode_plan
from paged_jax.kernels.mosaic_gpu.decode import refs as of_decode
from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.load import copy_runs, drain_rings, sources_of
from paged_jax.kernels.mosaic_gpu.decode.shared import plan
from paged_jax.kernels.mosaic_gpu.decode.shared.refs import Parts, PrefixRefs
from paged_jax.kernels.mosaic_gpu.decode.tiles.plain import PlainTiles
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar, at_least, at_most, cdiv
from paged_jax.kernels.mosaic_gpu.hopper.refs import Lengths

_WARPS_OF_PREFIXES = 2


class _Tile(NamedTuple):
    """The next tile of a part, and what follows it."""

    seq: Scalar
    kv_head: Scalar
    tile: Scalar  # of its sequence
    seq_len: Scalar
    other: Any  # the next sequence's length, or the place in a line of prefixes


def load(own: Sequence[of_decode.Refs], prefix: PrefixRefs, prefixes: Lengths, parts: Parts) -> None:
    """Loads the program's share of one part. The last two warps have half of the runs of a prefix's tiles each."""
    warp = lax.axis_index("warp")
    for stream, refs in enumerate(own):
        pl.when(warp == stream)(functools.partial(_load_own_tokens, stream, refs, parts))
    first = len(own)
    pl.when(warp >= first)(lambda: _load_prefixes(warp - first, prefix, prefixes, parts.prefix))


def _load_own_tokens(stream: int, refs: of_decode.Refs, parts: Parts) -> None:
    """Loads a share of own tokens."""
    lens_gmem, geometry = refs.inputs_gmem.seq_lens, parts.own
    share, kv_head = plan.own_share(jnp.int32(stream), geometry.problem, parts.num_programs)

    def len_of(seq):
        return _seen(lens_gmem[at_most(seq, geometry.problem.num_seqs - 1)], geometry)

    def following(tile: _Tile) -> _Tile:
        ends = tile.tile + 1 >= cdiv(tile.seq_len, geometry.tile_tokens)
        seq = tile.seq + ends.astype(jnp.int32)
        seq_len = jnp.where(ends, tile.other, tile.seq_len)
        return _Tile(seq, kv_head, jnp.where(ends, 0, tile.tile + 1), seq_len, len_of(seq + 1))

    queue = decode_plan.queue_of(lens_gmem, share, parts.own_line)
    first = _Tile(queue.seq, kv_head, queue.tile, len_of(queue.seq), len_of(queue.seq + 1))
    _load_tiles(range(geometry.runs_per_tile), queue.tiles_left, first, following, refs, geometry)


def _load_prefixes(warp: Scalar, refs: PrefixRefs, prefixes: Lengths, geometry: Geometry) -> None:
    """Loads a share of the prefixes."""
    program, line = lax.axis_index("program"), plan.line_of(prefixes, geometry)
    place, end = plan.share_of(program, line, geometry)

    def tile_at(place: Scalar) -> _Tile:
        split = plan.split_at(place, program, prefixes, line, geometry).split
        tile = lax.div(split.origin, jnp.int32(geometry.tile_tokens))
        return _Tile(split.item.seq, split.item.kv_head, tile, split.seq_len, place)

    def following(tile: _Tile) -> _Tile:
        place, next_tile = tile.other + 1, tile.tile + 1
        same = _Tile(tile.seq, tile.kv_head, next_tile, tile.seq_len, place)
        item_ends = next_tile * geometry.tile_tokens >= tile.seq_len
        return lax.cond(item_ends, lambda: tile_at(place), lambda: same)

    own, rest = divmod(geometry.runs_per_tile, _WARPS_OF_PREFIXES)

    def load_runs(runs: Sequence[Scalar]):
        _load_tiles(runs, end - place, tile_at(place), following, refs, geometry)

    if rest:  # one warp loads all of them
        pl.when(warp == 0)(lambda: load_runs(range(geometry.runs_per_tile)))
    else:
        load_runs([warp * own + i for i in range(own)])


def _load_tiles(
    runs: Sequence[Scalar],
    count: Scalar,
    first: _Tile,
    following: Callable[[_Tile], _Tile],
    refs: Any,
    geometry: Geometry,
) -> None:
    """Loads runs of `count` tiles, and waits until all of them are read. An empty sequence's tile is none."""
    size, tiles = geometry.run_tokens, PlainTiles(geometry)

    def sources(tile: _Tile):
        last = at_least(lax.div(tile.seq_len - 1, jnp.int32(size)) * size, 0)
        first_token, seq = tile.tile * geometry.tile_tokens, at_most(tile.seq, geometry.problem.num_seqs - 1)
        return sources_of(runs, seq, first_token, last, tile.seq_len, refs, geometry)

    def load_tile(_, carry):
        tile, own_sources, number = carry
        after = following(tile)
        next_sources = sources(after)  # these loads overlap with the wait for a stage
        is_there = tile.seq_len > 0
        pl.when(is_there)(lambda: copy_runs(runs, own_sources, tile.kv_head, number, refs, geometry, tiles))
        return after, next_sources, number + is_there.astype(jnp.int32)

    _, _, number = lax.fori_loop(0, count, load_tile, (first, sources(first), jnp.int32(0)))
    drain_rings(number, refs, geometry)


def _seen(seq_len: Scalar, geometry: Geometry) -> Scalar:
    """The tokens of a sequence that its query sees."""
    return at_most(at_least(seq_len, 0), geometry.problem.max_seq_len)
