"""Prefetches into L2 by the computing warpgroups, which have nothing to do until the first item is described.

The loading warpgroup counts the batch before it asks for tiles, and memory would be idle meanwhile. If a batch is
small, it has no wide items, few sequences, and items that all begin at once. Then a warp can guess in a few
instructions which item the program takes: it counts with one lane for each sequence, and with the first of the
candidate shares in `shares.py`. If the guess is wrong, another program finds these tiles in L2.

They also load the call's factors into L1, because a load that follows the copies of the first tiles would wait for
these (benchmarks/LOG.md, "Factors wait in L1").
"""

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar, at_most
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARP
from paged_jax.kernels.mosaic_gpu.ragged.arithmetic import quotient
from paged_jax.kernels.mosaic_gpu.ragged.count import costs, sequences_of
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import ItemKind, kinds_there
from paged_jax.kernels.mosaic_gpu.ragged.ptx import ahead, scan, warps
from paged_jax.kernels.mosaic_gpu.ragged.refs import Ref, Refs, factor_sizes, sizes_of_factors
from paged_jax.kernels.mosaic_gpu.ragged.sequence import Sequence, most_tiles, query_tiles, splits_of
from paged_jax.kernels.problem import OptionArrays

_MOST_COST, _MOST_SPLITS = 1 << 24, 1 << 8  # sums over sequences must not overflow; larger batches are not small


def prefetch(refs: Refs, geometry: Geometry) -> None:
    """Prefetches the first queries, tiles of the program's first item, and the block tables; loads factors into L1."""
    inputs, problem, program = refs.inputs_gmem, geometry.problem, lax.axis_index("program")
    is_plain = not (problem.prefix or problem.interleaved or geometry.merges_copies)
    sees_all = problem.block_sparse is None and problem.sliding_window is None
    guesses = is_plain and sees_all and geometry.tuning.counts_in_kernel
    factors = [(ahead.load_factors(gmem), gmem) for gmem in _factors(inputs.options, geometry)]
    # What is loaded here arrives together with what the next function loads.
    sequences = sequences_of(scan.iota() & (WARP - 1), refs, geometry) if guesses else None
    ahead.prefetch_queries(inputs.query, inputs.lengths.query_start_loc, program)
    if sequences is not None:
        _prefetch_item(program, sequences, refs, kinds_there(geometry))
    ahead.prefetch_tables(inputs.block_tables, inputs.lengths, program, problem.block_size)
    for words, gmem in factors:
        ahead.wait_for_factors(words, gmem)


def _factors(options_gmem: OptionArrays, geometry: Geometry) -> list[Ref]:
    """The factors that computing warpgroups read from global memory."""
    problem, names = geometry.problem, set(sizes_of_factors(geometry.problem)) - set(factor_sizes(geometry))
    of_call = [getattr(options_gmem, name) for name in sorted(names)]
    of_heads = zip(options_gmem.per_head, problem.per_head, strict=True)
    return of_call + [factors for factors, are_there in of_heads if are_there]


def _prefetch_item(program: Scalar, sequences: Sequence, refs: Refs, kinds: tuple[ItemKind, ...]) -> None:
    """Prefetches tiles of the program's first item, if the batch is small. Each warp has the first sequences."""
    inputs, geometry, (*wide, thin) = refs.inputs_gmem, kinds[0].geometry, kinds
    num_seqs, programs = geometry.problem.num_seqs, geometry.tuning.num_programs
    splits = _splits(sequences, thin)
    of_thin = query_tiles(sequences, thin)
    items = lax.min(of_thin, jnp.ones_like(of_thin)) * splits * geometry.problem.num_kv_heads
    ends = warps.sums_of_warp(items)
    not_small = (of_thin > 1).astype(jnp.int32)
    for kind in wide:
        not_small += (query_tiles(sequences, kind) > 0).astype(jnp.int32)
    is_small = (warps.count_of_warp(not_small) == 0) & (warps.lane_of(ends, WARP - 1) <= programs)
    if num_seqs > WARP:
        starts_gmem = inputs.lengths.query_start_loc
        is_small &= starts_gmem[WARP] == starts_gmem[num_seqs]
    lane = warps.count_of_warp((ends <= program).astype(jnp.int32))

    @pl.when(is_small & (lane < WARP))
    def prefetch():
        of_sequences = splits, ends - items, most_tiles(sequences, thin), sequences.seq_len
        num_splits, before, tiles, seq_len = (warps.lane_of(x, lane) for x in of_sequences)
        kv_head = quotient(program - before, num_splits, thin)
        tiles_each = quotient(tiles + num_splits - 1, num_splits, thin)
        first_tile = (program - before - kv_head * num_splits) * tiles_each
        num_tiles = lax.min(tiles_each, tiles - first_tile)
        end = at_most(seq_len, geometry.problem.max_seq_len)
        first = ahead.Tiles(lane, kv_head, first_tile * thin.tile, num_tiles, end)
        ahead.prefetch_tiles(inputs.key_cache, inputs.value_cache, inputs.block_tables, first, thin)


def _splits(sequences: Sequence, kind: ItemKind) -> Array:
    """The number of splits of each sequence's items, if a split costs an even share of all work."""
    total = warps.sum_of_warp(at_most(costs(sequences, kind).astype(jnp.int32), _MOST_COST)).astype(jnp.float32)
    share = total * (1 / kind.geometry.tuning.num_programs) + 1
    return at_most(splits_of(sequences, lax.max(share, jnp.full_like(share, kind.least_split)), kind), _MOST_SPLITS)
