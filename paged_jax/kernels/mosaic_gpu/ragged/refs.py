"""The references that the ragged kernel gets: inputs and outputs in global memory, scratch in shared memory.

A field is `ABSENT` if the call does not have it. Shared memory is laid out in the order of the fields.
"""

import enum
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from paged_jax.kernels.mosaic_gpu.hopper.limits import WARP, WARPGROUP, WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.memory import program_bytes, transforms
from paged_jax.kernels.mosaic_gpu.hopper.refs import ABSENT, Lengths, Partials, Ref
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import ItemKind, kinds_of, kinds_there
from paged_jax.kernels.problem import Granularity, Problem

ITEM_STAGES = 2  # descriptions in shared memory: one of the item that is computed, and one of the next item
_ITEM_FIELDS = 20  # integers in a description: the fields of `plan.Item`, and the number of earlier tiles
_MAXIMA, _SUMS, _LSE = range(3)  # rows of `Scratch.of_rows`, the last one for the first computing warpgroup
_WIDE_PROGRAMS, _ORDER = 4, 8  # places in `Scratch.integers`; the first ones are `drawn`


class Counted(enum.IntEnum):
    """The counts of each sequence, for each kind of work items. The table holds sums of all of them but `SPLITS`."""

    ITEMS = 0  # items; each split counts as one
    PARTIALS = 1  # partial results of split items
    SPLITS = 2  # splits of each item


class Signal(enum.IntEnum):
    """The index of each signal's first barrier in `Scratch.signals`. Computing warpgroups wait for these signals."""

    TURN = 0  # the warpgroup may use the matrix units; a barrier for each of two computing warpgroups, unused by three
    ITEM = TURN + 2  # an item is described; one barrier for each stage of items
    QUERY = ITEM + ITEM_STAGES  # an item's query has arrived; one barrier for each of up to ITEM_STAGES queries
    QUERY_DONE = QUERY + ITEM_STAGES  # no product needs a thin item's query any more; a barrier for each stage of items
    HANDED_OVER = QUERY_DONE + ITEM_STAGES  # a warpgroup has handed its softmax of a thin item to the other
    STORED = HANDED_OVER + 1  # the results of a thin item are stored, if warpgroups read queries


class Counts(NamedTuple):
    """The counts of the batch: arrays on the host, references on the device.

    Attributes:
      table: i32 [2 * len(Counted), >= num_seqs + 2], of the sequences in order: exclusive prefix sums, and splits.
        Rows are the members of `Counted` for wide items, and then for thin ones.
      order: i32 [>= num_seqs]: the sequences, those with the costliest items first, and those without queries last. If
        only the first 128 have queries, only these are there. Not read unless `Geometry.orders_sequences`.
      wide_programs: i32 [1]: the number of programs that begin with wide items.
    """

    table: Ref
    order: Ref
    wide_programs: Ref


class Inputs(NamedTuple):
    """The arrays that the ragged kernel reads, and its counters. Absent options have any value."""

    query: Ref  # [num_queries, num_heads, head_size]
    key_cache: Ref
    value_cache: Ref
    block_tables: Ref  # [num_seqs, max_blocks_per_seq]
    lengths: Lengths
    counters: Ref  # [`num_counters`], 0 at first: of claimed items, and of stored partial results of items
    counts: Counts  # the batch's counts, if XLA has counted them
    options: Any  # `OptionArrays` of references; each array has one axis or more
    new_key: Ref = ABSENT  # [num_tokens, num_kv_heads, head_size], in `prefix_attention`
    new_value: Ref = ABSENT


class Outputs(NamedTuple):
    """The arrays that the ragged kernel writes."""

    out: Ref  # [num_queries, num_heads, head_size]; if each query has several rows, only the merge kernel writes it
    lse: Ref  # [num_queries, num_heads]
    counts: Counts  # for the merge kernel, if there is one and this kernel counts
    wide_partials: Partials
    thin_partials: Partials

    def partials(self, kind: ItemKind) -> Partials:
        """The partial results of one kind of items."""
        return self.wide_partials if kind.is_wide else self.thin_partials


class TileBarriers(NamedTuple):
    """The barriers for tiles of one kind of items. Each kind numbers its tiles from 0."""

    keys_consumed: Ref  # a barrier for each stage
    keys_ready: Ref
    values_copied: Ref  # a tile of V has arrived, and some of its rows must be zeroed
    raw_ready: Ref  # a barrier for each raw stage: a tile has arrived and can be converted
    values_consumed: Ref
    values_ready: Ref


class TileRing(NamedTuple):
    """A ring of tiles of K or of V. Wide and thin items share its memory and have separate barriers."""

    consumed: Ref  # barriers of wide items
    ready: Ref
    slot_scales: Ref  # [stages * tile], if each slot of the cache has a scale
    tiles: Ref  # [stages, tile, head_size]


class ItemRing(NamedTuple):
    """A ring of descriptions of work items, from the loading warpgroup to the computing ones."""

    consumed: Ref
    fields: Ref  # [stages, fields of an item]


class QueryRing(NamedTuple):
    """A ring of items' queries. Results overwrite them on their way to global memory."""

    consumed: Ref  # ABSENT if computing warpgroups read the queries
    rows: Ref  # [stages, bands, WGMMA_ROWS, head_size]; queries that are copied and divided arrive as bits of bfloat16
    divisors: Ref  # [2, WGMMA_ROWS], of query rows that computing warpgroups have read and divided


class RawTiles(NamedTuple):
    """Tiles of a cache of 8 bits before their conversion. Wide and thin items share their memory."""

    ready: Ref  # barriers of wide items
    rows: Ref  # [tokens of all raw tiles, head_size]


class Scratch(NamedTuple):
    """Shared memory and barriers of a program."""

    # Every array begins at a multiple of 1 KiB. So small ones are parts of `integers`, `floats` and `of_rows`.
    integers: Ref  # `drawn`, and `wide_programs` and `order` if the kernel counts
    floats: Ref  # `ordered_by` and `factors`, if there is one of them
    counted: Ref  # if the kernel counts: each warp's sums of costs, then of items by `ItemKind.shares`
    items: ItemRing
    keys: TileRing
    values_copied: Ref  # barrier of wide items
    of_rows: Ref  # [`_LSE` + computing warpgroups, WGMMA_ROWS]: `maxima`, `sums`, and each warpgroup's lse
    query: QueryRing
    raw: RawTiles
    signals: Ref  # barriers, indexed by `Signal`; the phases of one array take one register
    table: Ref  # as in `Counts`, if the kernel counts
    thin: TileBarriers
    values: TileRing

    @property
    def drawn(self) -> Ref:
        """Old values of counters: of the loading warpgroup, and then of each computing one."""
        return self.integers.at[pl.ds(0, _WIDE_PROGRAMS)]

    @property
    def wide_programs(self) -> Ref:
        """As in `Counts`, if the kernel counts."""
        return self.integers.at[pl.ds(_WIDE_PROGRAMS, 1)]

    @property
    def order(self) -> Ref:
        """As in `Counts`, if the kernel counts and there is an order."""
        count = self.integers.shape[0] - _ORDER
        return self.integers.at[pl.ds(_ORDER, count)] if count else ABSENT

    @property
    def ordered_by(self) -> Ref:
        """The sort keys of sequences, [WARPGROUP], if the kernel orders them."""
        return self.floats.at[pl.ds(0, WARPGROUP)]

    def factors(self, first: int, size: int) -> Ref:
        """Some factors of the whole call over 8 bits, of all that `factor_sizes` names."""
        return self.floats.at[pl.ds(WARPGROUP + first, size)]

    @property
    def maxima(self) -> Ref:
        """The maxima of a handed-over softmax, [WGMMA_ROWS]."""
        return self.of_rows.at[_MAXIMA]

    @property
    def sums(self) -> Ref:
        """The sums of a handed-over softmax, [WGMMA_ROWS]."""
        return self.of_rows.at[_SUMS]

    def lse_of(self, warpgroup: Any) -> Ref:
        """A computing warpgroup's own memory for lse, [WGMMA_ROWS]."""
        return self.of_rows.at[_LSE + warpgroup]

    def signal(self, signal: Signal, index: Any = 0) -> Ref:
        """Barrier number `index` of a signal."""
        return self.signals.at[signal + index]

    def barriers(self, kind: ItemKind) -> TileBarriers:
        """The barriers for tiles of one kind of items."""
        if not kind.is_wide:
            return self.thin
        return TileBarriers(
            self.keys.consumed,
            self.keys.ready,
            self.values_copied,
            self.raw.ready,
            self.values.consumed,
            self.values.ready,
        )


class Refs(NamedTuple):
    """All references of the ragged kernel."""

    inputs_gmem: Inputs
    outputs_gmem: Outputs
    smem: Scratch


def outputs(geometry: Geometry) -> Outputs:
    """The types of the arrays that the kernel writes."""
    problem, f32 = geometry.problem, jnp.float32
    counts = Counts(ABSENT, ABSENT, ABSENT)
    if geometry.merges_copies and geometry.tuning.counts_in_kernel:
        table = jax.ShapeDtypeStruct((2 * len(Counted), geometry.count_columns), jnp.int32)
        counts = Counts(table, ABSENT, ABSENT)

    def partials(kind: ItemKind) -> Partials:
        rows = max(kind.num_partials, 1), kind.bands, WGMMA_ROWS
        return Partials(jax.ShapeDtypeStruct((*rows, problem.head_size), f32), jax.ShapeDtypeStruct(rows, f32))

    return Outputs(
        jax.ShapeDtypeStruct((problem.num_queries, problem.num_heads, problem.head_size), problem.query_dtype),
        jax.ShapeDtypeStruct((problem.num_queries, problem.num_heads), f32),
        counts,
        *(partials(kind) for kind in kinds_of(geometry)),
    )


def scratch(geometry: Geometry) -> Scratch:
    """The shared memory and the barriers of a program."""
    wide, thin = (_barriers(kind) for kind in kinds_of(geometry))
    queries, computing = geometry.tuning.queries, geometry.tuning.computing_warpgroups
    reads_queries, factors = geometry.reads_own_queries, sum(factor_sizes(geometry).values())
    table, counted, columns = _counts(geometry)
    keys, values = (_ring(scaled, geometry) for scaled in (geometry.scales_key_slots, geometry.scales_value_slots))
    raw = ABSENT
    if geometry.converts_tiles:
        tokens = geometry.tuning.raw_tiles * geometry.tuning.tile
        raw = plgpu.SMEM((tokens, geometry.problem.head_size), jnp.dtype(geometry.problem.cache_dtype))
    return Scratch(
        integers=plgpu.SMEM((_ORDER + columns,), jnp.int32),
        floats=plgpu.SMEM((WARPGROUP + factors,), jnp.float32) if columns or factors else ABSENT,
        counted=counted,
        items=ItemRing(
            consumed=plgpu.Barrier(num_arrivals=computing, num_barriers=ITEM_STAGES),
            fields=plgpu.SMEM((ITEM_STAGES, _ITEM_FIELDS), jnp.int32),
        ),
        keys=keys._replace(consumed=wide.keys_consumed, ready=wide.keys_ready),
        values_copied=wide.values_copied,
        of_rows=plgpu.SMEM((_LSE + computing, WGMMA_ROWS), jnp.float32),
        query=QueryRing(
            consumed=ABSENT if reads_queries else plgpu.Barrier(num_arrivals=computing, num_barriers=queries),
            rows=_swizzled((queries, computing, WGMMA_ROWS, geometry.problem.head_size), geometry),
            divisors=plgpu.SMEM((2, WGMMA_ROWS), jnp.float32) if reads_queries else ABSENT,
        ),
        raw=RawTiles(wide.raw_ready, raw),
        signals=plgpu.Barrier(num_barriers=Signal.STORED + reads_queries),
        table=table,
        thin=thin,
        values=values._replace(consumed=wide.values_consumed, ready=wide.values_ready),
    )


def with_factors_in_smem(refs: Refs, geometry: Geometry) -> Refs:
    """References that read the factors of the whole call in shared memory."""
    options, first = refs.inputs_gmem.options, 0
    for name, size in factor_sizes(geometry).items():
        options = options._replace(**{name: refs.smem.factors(first, size)})
        first += size
    return refs._replace(inputs_gmem=refs.inputs_gmem._replace(options=options))


def factor_sizes(geometry: Geometry) -> dict[str, int]:
    """How many factors of the whole call each of these options has, if the kernel keeps them in shared memory.

    Over 16 bits, long contexts would take 1% to 4% longer with that, and over 8 bits heads of 64 would take 2% longer.
    """
    return sizes_of_factors(geometry.problem) if geometry.reads_own_queries else {}


def sizes_of_factors(problem: Problem) -> dict[str, int]:
    """How many factors `scale` and the scales of caches or heads have. Scales of slots are left out."""
    sizes = {Granularity.CACHE: 1, Granularity.HEAD: problem.num_kv_heads}
    options = {"scale": Granularity.CACHE, "k_scale": problem.k_scale, "v_scale": problem.v_scale}
    return {name: sizes[granularity] for name, granularity in options.items() if granularity in sizes}


def _barriers(kind: ItemKind) -> TileBarriers:
    """The barriers of one kind. A tile is ready when it and its scales have arrived; every reader consumes it once."""
    if not kind.may_exist:
        return TileBarriers(*[ABSENT] * len(TileBarriers._fields))
    geometry, runs, arrivals = kind.geometry, kind.runs_per_tile, kind.arrivals_per_tile
    consumed = plgpu.Barrier(num_arrivals=kind.bands, num_barriers=kind.stages)
    raw_ready = copied = ABSENT
    if geometry.converts_tiles:
        raw_ready = plgpu.Barrier(num_arrivals=runs, num_barriers=kind.raw_stages)
    elif not kind.zeroes_when_read:
        copied = plgpu.Barrier(num_arrivals=runs)
    return TileBarriers(
        keys_consumed=consumed,
        keys_ready=plgpu.Barrier(num_arrivals=arrivals + geometry.scales_key_slots, num_barriers=kind.stages),
        values_copied=copied,
        raw_ready=raw_ready,
        values_consumed=consumed,
        values_ready=plgpu.Barrier(num_arrivals=arrivals + geometry.scales_value_slots, num_barriers=kind.stages),
    )


def _ring(scales_slots: bool, geometry: Geometry) -> TileRing:
    """A ring of tiles, without its barriers."""
    tuning = geometry.tuning
    scales = plgpu.SMEM((tuning.stages * tuning.tile,), jnp.float32) if scales_slots else ABSENT
    tiles = _swizzled((tuning.stages, tuning.tile, geometry.problem.head_size), geometry)
    return TileRing(consumed=ABSENT, ready=ABSENT, slot_scales=scales, tiles=tiles)


def _counts(geometry: Geometry) -> tuple[Ref, Ref, int]:
    """Shared memory for the table of counts and for prefix sums of costs, and the length of the order."""
    if not geometry.tuning.counts_in_kernel:
        return ABSENT, ABSENT, 0
    columns = geometry.count_columns
    warps = WARPGROUP // WARP
    table = plgpu.SMEM((2 * len(Counted), columns + 1 + warps), jnp.int32)
    rows = 1 + sum(1 + len(kind.shares) for kind in kinds_there(geometry))
    counted = plgpu.SMEM((rows, warps), jnp.float32)
    return table, counted, columns if geometry.orders_sequences else 0


def _swizzled(shape: tuple[int, ...], geometry: Geometry) -> Ref:
    """Shared memory in the layout of wgmma's operands, free of bank conflicts."""
    dtype = geometry.operand_dtype
    return plgpu.SMEM(shape, jnp.dtype(dtype), transforms=transforms(geometry.problem.head_size, dtype))


def shared_memory_bytes(geometry: Geometry) -> int:
    """Bytes of shared memory that a program takes."""
    return program_bytes(scratch(geometry))
