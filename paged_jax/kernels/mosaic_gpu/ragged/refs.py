"""The references that the ragged kernel gets: inputs and outputs in global memory, scratch in shared memory.

Fields are `ABSENT` for what a call does not have. The order of fields is the order in which shared memory is laid out.
"""

import enum
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from paged_jax.kernels.mosaic_gpu.hopper.limits import WARPGROUP, WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.memory import array_bytes, transforms
from paged_jax.kernels.mosaic_gpu.hopper.refs import ABSENT, Ref
from paged_jax.kernels.mosaic_gpu.ragged.geometry import THIN_SHARES, Geometry, ItemKind

ITEM_STAGES = 2  # work items that are described: the one that is computed and the next one
_ITEM_FIELDS = 16  # int32 that describe a work item: those of `ragged_plan.Item`, and how many tiles came before
_OTHER_MEMORY = 12 * 1024  # bytes of barriers, of padding, and of what reductions take


class Counted(enum.IntEnum):
    """What is counted of each sequence, for each kind of work items."""

    ITEMS = 0  # items, with each split of an item as one
    PARTIALS = 1  # partial results of split items
    MERGES = 2  # groups of `Geometry.merged_rows` rows of split items


class Signal(enum.IntEnum):
    """What a computing warpgroup waits for but for tiles: each member is the first of its barriers in `signals`."""

    TURN = 0  # the matrix units are a warpgroup's own; one for each computing warpgroup
    ITEM = TURN + 2  # an item is described; one a stage of items
    QUERY = ITEM + ITEM_STAGES  # an item's query is there; one a stage of queries, of which there are as many at most
    QUERY_DONE = QUERY + ITEM_STAGES  # keys of all tiles have met a thin item's query; one a stage of items
    HANDED_OVER = QUERY_DONE + ITEM_STAGES  # a warpgroup has handed its softmax of a thin item to the other


class Counts(NamedTuple):
    """What was counted of the batch: arrays on the host, references on the device.

    Attributes:
      table: i32 [2 * len(Counted), num_seqs + 2 or more]: a row for each of `Counted`, for wide items and then for thin
        ones. Column i counts what the first i sequences of the order have, of num_seqs and the padding.
      order: i32 [num_seqs + 1 or more]: where `Geometry.orders_sequences`, the sequences, those with the most costly
        items first. Sequence num_seqs is the padding.
      wide_programs: i32 [1]: programs that begin with wide items.
    """

    table: Ref
    order: Ref
    wide_programs: Ref


class Lengths(NamedTuple):
    """The lengths of the batch's sequences."""

    seq_lens: Ref  # [num_seqs]
    query_start_loc: Ref  # [num_seqs + 1]


class Inputs(NamedTuple):
    """What the ragged kernel reads, and the claims that it writes; what is absent is any array of one element."""

    query: Ref  # [num_tokens, num_heads, head_size]
    key_cache: Ref
    value_cache: Ref
    block_tables: Ref  # [num_seqs, max_blocks_per_seq]
    lengths: Lengths
    claimed: Ref  # [2], the wide and the thin items that programs have claimed
    counts: Counts  # where XLA counts
    options: Any  # `OptionArrays` of references, each to an array of at least one axis
    new_key: Ref = ABSENT  # [num_tokens, num_kv_heads, head_size], in `prefix_attention`
    new_value: Ref = ABSENT


class Partials(NamedTuple):
    """Partial results of split items of one kind, each the softmax of one split, normalised."""

    out: Ref  # [num_partials, halves, WGMMA_ROWS, head_size]
    log_sums: Ref  # [num_partials, halves, WGMMA_ROWS], of base 2


class Outputs(NamedTuple):
    """What the ragged kernel writes."""

    out: Ref  # [num_tokens, num_heads, head_size]
    lse: Ref  # [num_tokens, num_heads]
    counts: Counts  # if the kernel counts: what the kernel that merges needs of it
    wide_partials: Partials
    thin_partials: Partials

    def partials(self, kind: ItemKind) -> Partials:
        """The partial results of a kind of items."""
        return self.wide_partials if kind.is_wide else self.thin_partials


class TileBarriers(NamedTuple):
    """The barriers of the tiles of one kind of items, which counts the tiles in its rings from 0."""

    keys_consumed: Ref  # one a stage
    keys_ready: Ref
    values_copied: Ref  # a tile of V has arrived, some of whose rows are to be zeroed
    raw_keys_ready: Ref  # one a raw stage: a tile has arrived that is to be converted
    raw_values_ready: Ref
    values_consumed: Ref
    values_ready: Ref


class TileRing(NamedTuple):
    """A ring of tiles of one cache: wide and thin items share its memory, and each kind has barriers of its own."""

    consumed: Ref  # barriers of wide items
    ready: Ref
    slot_scales: Ref  # [stages * tile], if each slot has a scale
    tiles: Ref  # [stages, tile, head_size]


class ItemRing(NamedTuple):
    """A ring of work items, which the loading warpgroup describes to the computing ones."""

    consumed: Ref
    fields: Ref  # [stages, fields of an item]


class QueryRing(NamedTuple):
    """A ring of items' queries, which is also where results leave from."""

    consumed: Ref
    rows: Ref  # [stages, 2, WGMMA_ROWS, head_size]; queries that are to be divided come as the bits of bfloat16


class RawTiles(NamedTuple):
    """Tiles of a cache of 8 bits, before they are converted; both kinds of items share their memory."""

    ready: Ref  # barrier of wide items
    rows: Ref  # [tokens, head_size]


class Scratch(NamedTuple):
    """Shared memory and barriers of a program."""

    claimed: Ref  # [1], the number of the item that was claimed last
    counted: Ref  # of all sequences before each, where the kernel counts: what items cost, and then how many there are
    items: ItemRing
    keys: TileRing
    ordered_by: Ref  # [WARPGROUP], where the kernel counts and orders sequences
    values_copied: Ref  # barrier of wide items
    lse: Ref  # [2, WGMMA_ROWS]
    maxima: Ref  # [WGMMA_ROWS], of a softmax that is handed over
    order: Ref  # as in `Counts`, where the kernel counts
    wide_programs: Ref  # as in `Counts`, where the kernel counts
    query: QueryRing
    raw_keys: RawTiles
    raw_values: RawTiles
    signals: Ref  # barriers, as `Signal` says: in one array, so that all their phases take one register
    sums: Ref  # [WGMMA_ROWS], of a softmax that is handed over
    table: Ref  # as in `Counts`, where the kernel counts
    thin: TileBarriers
    values: TileRing

    def signal(self, signal: Signal, index: Any = 0) -> Ref:
        """A barrier of a signal."""
        return self.signals.at[signal + index]

    def barriers(self, kind: ItemKind) -> TileBarriers:
        """The barriers of the tiles of a kind of items."""
        if not kind.is_wide:
            return self.thin
        return TileBarriers(
            self.keys.consumed,
            self.keys.ready,
            self.values_copied,
            self.raw_keys.ready,
            self.raw_values.ready,
            self.values.consumed,
            self.values.ready,
        )


class Refs(NamedTuple):
    """All references of the ragged kernel."""

    inputs_gmem: Inputs
    outputs_gmem: Outputs
    smem: Scratch


def outputs(geometry: Geometry) -> Outputs:
    """What the kernel writes."""
    problem, f32 = geometry.problem, jnp.float32
    counts = Counts(ABSENT, ABSENT, ABSENT)
    if geometry.tuning.counts_in_kernel:
        table = jax.ShapeDtypeStruct((2 * len(Counted), geometry.count_columns), jnp.int32)
        order = jax.ShapeDtypeStruct((WARPGROUP,), jnp.int32) if geometry.orders_sequences else ABSENT
        counts = Counts(table, order, ABSENT)

    def partials(kind: ItemKind) -> Partials:
        rows = max(kind.num_partials, 1), kind.halves, WGMMA_ROWS
        return Partials(jax.ShapeDtypeStruct((*rows, problem.head_size), f32), jax.ShapeDtypeStruct(rows, f32))

    return Outputs(
        jax.ShapeDtypeStruct((problem.num_tokens, problem.num_heads, problem.head_size), problem.query_dtype),
        jax.ShapeDtypeStruct((problem.num_tokens, problem.num_heads), f32),
        counts,
        *(partials(kind) for kind in geometry.kinds),
    )


def scratch(geometry: Geometry) -> Scratch:
    """The shared memory and the barriers of a program."""
    wide, thin = (_barriers(kind) for kind in geometry.kinds)
    queries, rows = geometry.tuning.queries, plgpu.SMEM((WGMMA_ROWS,), jnp.float32)
    counts, counted, ordered_by = _counts(geometry)
    keys, values = (_ring(scaled, geometry) for scaled in (geometry.scales_key_slots, geometry.scales_value_slots))
    raw = ABSENT
    if geometry.converts_tiles:
        raw = plgpu.SMEM((geometry.tuning.tile, geometry.problem.head_size), jnp.dtype(geometry.problem.cache_dtype))
    return Scratch(
        claimed=plgpu.SMEM((1,), jnp.int32),
        counted=counted,
        items=ItemRing(
            consumed=plgpu.Barrier(num_arrivals=2, num_barriers=ITEM_STAGES),
            fields=plgpu.SMEM((ITEM_STAGES, _ITEM_FIELDS), jnp.int32),
        ),
        keys=keys._replace(consumed=wide.keys_consumed, ready=wide.keys_ready),
        values_copied=wide.values_copied,
        lse=plgpu.SMEM((2, WGMMA_ROWS), jnp.float32),
        maxima=rows,
        order=counts.order,
        ordered_by=ordered_by,
        wide_programs=counts.wide_programs,
        query=QueryRing(
            consumed=plgpu.Barrier(num_arrivals=2, num_barriers=queries),
            rows=_swizzled((queries, 2, WGMMA_ROWS, geometry.problem.head_size), geometry),
        ),
        raw_keys=RawTiles(wide.raw_keys_ready, raw),
        raw_values=RawTiles(wide.raw_values_ready, raw),
        signals=plgpu.Barrier(num_barriers=Signal.HANDED_OVER + 1),
        sums=rows,
        table=counts.table,
        thin=thin,
        values=values._replace(consumed=wide.values_consumed, ready=wide.values_ready),
    )


def _barriers(kind: ItemKind) -> TileBarriers:
    """A tile is ready when it has arrived, and its scales have; each warpgroup that reads it consumes it."""
    if not kind.may_exist:
        return TileBarriers(*[ABSENT] * len(TileBarriers._fields))
    geometry, runs, arrivals = kind.geometry, kind.runs_per_tile, kind.arrivals_per_tile
    consumed = plgpu.Barrier(num_arrivals=kind.halves, num_barriers=kind.stages)
    raw_ready = copied = ABSENT
    if geometry.converts_tiles:
        raw_ready = plgpu.Barrier(num_arrivals=runs, num_barriers=kind.raw_stages)
    else:
        copied = plgpu.Barrier(num_arrivals=runs)
    return TileBarriers(
        keys_consumed=consumed,
        keys_ready=plgpu.Barrier(num_arrivals=arrivals + geometry.scales_key_slots, num_barriers=kind.stages),
        values_copied=copied,
        raw_keys_ready=raw_ready,
        raw_values_ready=raw_ready,
        values_consumed=consumed,
        values_ready=plgpu.Barrier(num_arrivals=arrivals + geometry.scales_value_slots, num_barriers=kind.stages),
    )


def _ring(scales_slots: bool, geometry: Geometry) -> TileRing:
    """The shared memory of the ring of a cache, without barriers."""
    tuning = geometry.tuning
    scales = plgpu.SMEM((tuning.stages * tuning.tile,), jnp.float32) if scales_slots else ABSENT
    tiles = _swizzled((tuning.stages, tuning.tile, geometry.problem.head_size), geometry)
    return TileRing(consumed=ABSENT, ready=ABSENT, slot_scales=scales, tiles=tiles)


def _counts(geometry: Geometry) -> tuple[Counts, Ref, Ref]:
    """Shared memory for what the kernel counts, what it adds up before that, and what it orders sequences by."""
    if not geometry.tuning.counts_in_kernel:
        return Counts(ABSENT, ABSENT, ABSENT), ABSENT, ABSENT
    columns = geometry.count_columns
    table = plgpu.SMEM((2 * len(Counted), columns + 1), jnp.int32)
    counted = plgpu.SMEM((max(len(geometry.kinds), len(THIN_SHARES)), columns + 1), jnp.float32)
    order = plgpu.SMEM((WARPGROUP,), jnp.int32) if geometry.orders_sequences else ABSENT
    return Counts(table, order, plgpu.SMEM((1,), jnp.int32)), counted, order


def _swizzled(shape: tuple[int, ...], geometry: Geometry) -> Ref:
    """Shared memory in which wgmma finds its operands, free of bank conflicts."""
    dtype = geometry.operand_dtype
    return plgpu.SMEM(shape, jnp.dtype(dtype), transforms=transforms(geometry.problem.head_size, dtype))


def shared_memory_bytes(geometry: Geometry) -> int:
    """Bytes of shared memory that a program takes."""
    return array_bytes(scratch(geometry)) + _OTHER_MEMORY
