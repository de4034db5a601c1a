"""Chooses the `Tuning` of decode by pure functions of `Problem` and `Device`, or refuses with every reason.

Times are in microseconds on an H200. Each constant names the heading of benchmarks/LOG.md with its measurement.
"""

from collections.abc import Iterator
from dataclasses import replace

import jax.experimental.pallas as pl
import jax.numpy as jnp

from paged_jax.kernels.mosaic_gpu.decode import tiles
from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.refs import shared_memory_bytes
from paged_jax.kernels.mosaic_gpu.decode.tuning import Merge, Tuning
from paged_jax.kernels.mosaic_gpu.hopper import refuse
from paged_jax.kernels.mosaic_gpu.hopper.limits import (
    LARGEST_CLUSTER,
    MULTIPROCESSOR_MEMORY,
    PROGRAM_MEMORY,
    SYSTEM_MEMORY,
)
from paged_jax.kernels.mosaic_gpu.hopper.refuse import NAME, check
from paged_jax.kernels.problem import Device, Granularity, Problem, Unsupported

_KIB = 1024

_LEAST_HEAD_SIZE, _LARGEST_HEAD_SIZE = 64, 256
_WIDE_HEAD_SIZE, _LARGEST_WIDE_GROUP = 512, 8
"""The one larger head size, and its largest group: registers spill with larger ones."""

# Measured: LOG, "Fewer bytes in flight".
_TILE_BYTES = 32 * _KIB  # most bytes of a tile of K plus one of V; twice as many if a multiprocessor has one program
_BYTES_IN_FLIGHT = 128 * _KIB  # most bytes of the rings of all programs of a multiprocessor
_MOST_STAGES = 8

# Measured: LOG, "Fewer bytes in flight of 8 bits".
_BYTES_IN_FLIGHT_OF_8_BITS = 64 * _KIB

# Measured: LOG, "Clusters".
_CLUSTER_SPLIT_TOKENS = 272  # the longest split that takes less time than the launch of a merge kernel
_LEAST_SPLIT_TOKENS = 128  # the shortest split in a cluster

# Measured: LOG, "Folded kv heads".
_FOLDED_WAVES = 1.8  # fold if the folded items fill 1.8 waves or more, so that uneven lengths average out
_FOLDED_ONE_WAVE = 0.93, 1  # fold for queues if the folded items fill 93 to 100% of one wave

# Measured: LOG, "Queues cost a look and a merge" and "Splitting".
_MERGE_LAUNCH_TIME = 1.5  # the launch of a merge kernel, even if it has nothing to merge
_LENGTHS_TIME = 0.5  # each wave reads the lengths: the time for 64 of them
_LENGTHS_AT_ONCE = 64
_MULTIPROCESSOR_BYTES_PER_US = 17e3  # the rate at which two programs on each multiprocessor read

# Measured: LOG, "Queues where splits do not fill the GPU".
# Queues pay if an item takes this many times longer than a merge and reading the lengths.
_WORTH_A_LOOK = 40
_WORTH_A_LOOK_IF_IDLE = 20  # if the last wave of items would leave multiprocessors idle
_WORTH_A_LOOK_OF_8_BITS = 13  # over 8 bits, because one program alone computes too slowly there
_NEARLY_FULL = 0.9  # programs that fill 90% of their waves count as filling the GPU
_LONG_ITEM_TIME, _LONG_ITEM_TIME_OF_8_BITS = 100, 50  # shorter items keep their splits if all splits run at once
_MOST_WAVES = 4  # more waves of splits never stay: each one starts programs and reads all lengths


def unsplit(problem: Problem, gpu: Device) -> Tuning:
    """The tuning of v1: one split for each item.

    Raises:
      Unsupported: the kernels cannot do what the problem asks for.
    """
    check(refusals(problem, gpu))
    return _tiled(problem, Tuning())


def in_partitions(problem: Problem, gpu: Device) -> Tuning:
    """The tuning of v2: a split for each partition. Only the number of partitions depends on the batch.

    Raises:
      Unsupported: the kernels cannot do what the problem asks for.
    """
    check(refusals(problem, gpu))
    assert problem.partition_size is not None
    splits = max(1, pl.cdiv(problem.max_seq_len, problem.partition_size))
    return _tiled(problem, Tuning(splits=splits, merge=Merge.KERNEL))


def balanced(problem: Problem, gpu: Device) -> Tuning:
    """The fastest tuning: enough splits to keep the GPU busy, in queues if lengths may be uneven.

    Raises:
      Unsupported: the kernels cannot do what the problem asks for.
    """
    check([*refusals(problem, gpu), *(_write_refusals(problem) if problem.writes_tokens else ())])
    return _split(problem, _folded(problem, Tuning(), gpu), gpu)


def refusals(problem: Problem, gpu: Device) -> list[str]:
    """Reasons to refuse an attention call."""
    eight_bit = problem.cache_itemsize == 1
    reasons = refuse.refusals(problem, gpu)
    if problem.head_size == _WIDE_HEAD_SIZE:
        reasons += _wide_refusals(problem)
    elif problem.head_size % 16 or not _LEAST_HEAD_SIZE <= problem.head_size <= _LARGEST_HEAD_SIZE:
        takes = f"takes multiples of 16 from {_LEAST_HEAD_SIZE} to {_LARGEST_HEAD_SIZE}, and {_WIDE_HEAD_SIZE}"
        reasons.append(f"lacks head_size {problem.head_size}, {takes}")
    elif eight_bit and problem.head_size % 64:
        reasons.append(
            f"lacks head_size {problem.head_size} for caches of {problem.cache_dtype}, takes multiples of 64"
        )
    if problem.layout == "vllm":
        if eight_bit and problem.block_size < 16:  # `ldmatrix` reads rows of 16 bytes: 16 neighbouring tokens
            words = f"in layout 'vllm' for caches of {problem.cache_dtype}, takes 16 and more"
            reasons.append(f"lacks block_size {problem.block_size} {words}")
        if problem.head_size % 64:
            reasons.append(f"lacks head_size {problem.head_size} in layout 'vllm', takes multiples of 64")
        if problem.block_size > 64:
            reasons.append(f"lacks block_size {problem.block_size} in layout 'vllm', takes up to 64")
    if problem.block_sparse is not None:
        reasons.append("lacks block_sparse")
    return reasons


def _wide_refusals(problem: Problem) -> list[str]:
    """Reasons to refuse the largest heads."""
    reasons, size = [], problem.head_size
    if problem.cache_itemsize == 1:
        reasons.append(f"lacks head_size {size} for caches of {problem.cache_dtype}")
    if problem.layout == "vllm":
        reasons.append(f"lacks head_size {size} in layout 'vllm'")
    if problem.writes_tokens:
        reasons.append(f"lacks writes of head_size {size}")
    if problem.group > _LARGEST_WIDE_GROUP:
        group = f"groups of {problem.group}"
        reasons.append(f"lacks head_size {size} in {group}, takes groups of up to {_LARGEST_WIDE_GROUP}")
    return reasons


def _write_refusals(problem: Problem) -> list[str]:
    """Further reasons to refuse writes of new tokens."""
    reasons = []
    if problem.cache_dtype != problem.query_dtype:
        reasons.append(f"lacks writes of {problem.query_dtype} into caches of {problem.cache_dtype}")
    if problem.layout == "vllm":
        reasons.append("lacks writes into layout 'vllm'")
    if problem.head_size % 64:
        reasons.append(f"lacks writes of head_size {problem.head_size}, takes multiples of 64")
    if Granularity.SLOT in (problem.k_scale, problem.v_scale):
        reasons.append("lacks writes with scales for each slot")
    if problem.num_seqs * problem.max_seq_len * problem.num_blocks == 0:
        reasons.append("lacks writes without a context or a pool")
    return reasons


def _folded(problem: Problem, tuning: Tuning, gpu: Device) -> Tuning:
    """Folds kv heads if that adds no columns and leaves enough programs.

    Folded items take longer, so they must fill nearly one wave, which queues cut evenly, or `_FOLDED_WAVES`, where
    uneven lengths average out. Several waves gain 1% from larger copies, and so they are folded only if one copy brings
    all heads.
    """
    one_scale = {problem.k_scale, problem.v_scale} <= {Granularity.NONE, Granularity.CACHE}
    one_slice = problem.head_size % 64 == 0
    if not one_slice or not one_scale or problem.writes_tokens:
        return tuning
    unfolded, at_once = tuning, 2 * gpu.num_multiprocessors
    for fold in (2, 4):
        half = Geometry(problem, replace(unfolded, fold=fold // 2))
        if 8 % (2 * half.heads_per_item) or half.items_per_seq % 2:
            break
        folded = replace(unfolded, fold=fold)
        waves = half.num_items / 2 / at_once
        least, most = _FOLDED_ONE_WAVE
        one_wave = least <= waves <= most and _worth_a_look(half, at_once)
        one_copy = Geometry(problem, folded).copies_per_run == 1 and not problem.interleaved
        if (one_wave and (one_copy or problem.layout != "vllm")) or (waves >= _FOLDED_WAVES and one_copy):
            tuning = folded
    return tuning


def _split(problem: Problem, tuning: Tuning, gpu: Device) -> Tuning:
    """Splits items so that they fill every multiprocessor.

    Short and few splits form clusters. If lengths may be uneven and items are long, there is a queue for each program
    that runs at once.
    """
    geometry = Geometry(problem, tuning)
    num_items, one_each = max(1, geometry.num_items), 2 * gpu.num_multiprocessors
    in_cluster = min(LARGEST_CLUSTER, one_each // num_items, pl.cdiv(problem.max_seq_len, _LEAST_SPLIT_TOKENS))
    if in_cluster > 1 and problem.max_seq_len <= in_cluster * _CLUSTER_SPLIT_TOKENS:
        return _tiled(problem, replace(tuning, splits=in_cluster, merge=Merge.CLUSTER))
    merged = _tiled(problem, replace(tuning, merge=Merge.KERNEL))
    num_tiles = max(1, pl.cdiv(problem.max_seq_len, Geometry(problem, merged).tile_tokens))
    splits, at_once = _splits(geometry, num_tiles, merged.programs, gpu)

    # The first bound keeps products in `plan.py` in 32 bits; the second one limits the grid and the partial results.
    in_bounds = num_items * (1 + num_tiles) < 2**26 and num_items * splits < 2**15
    if problem.num_seqs > 1 and in_bounds and (splits > 1 or _worth_a_look(geometry, at_once)):
        return _queued(problem, tuning, splits, at_once, gpu)
    if splits > 1:
        return replace(merged, splits=splits)
    return _tiled(problem, tuning, _most_programs(geometry, at_once))


def _queued(problem: Problem, tuning: Tuning, splits: int, at_once: int, gpu: Device) -> Tuning:
    """Gives the batch a queue for each program that runs at once.

    If lengths turn out to be alike, splits may take less time than queues. So splits stay if they fill their waves, or
    if items are short and all splits run at once. Over 8 bits, splits that take several waves never stay; over 16 bits,
    those that take more than `_MOST_WAVES`.
    """
    geometry, eight_bit = Geometry(problem, tuning), problem.cache_itemsize == 1

    def with_queues(of_alike_lengths: int, most_programs: int) -> Tuning:
        untiled = replace(tuning, splits=of_alike_lengths, queues=at_once, merge=Merge.KERNEL)
        tiled = _tiled(problem, untiled, most_programs)
        return replace(tiled, queues=min(at_once, tiled.programs * gpu.num_multiprocessors))

    kept = with_queues(splits, _most_programs(geometry, at_once))
    num_splits = splits * geometry.num_items
    one_wave = num_splits <= kept.queues
    short = _item_time(geometry) <= (_LONG_ITEM_TIME_OF_8_BITS if eight_bit else _LONG_ITEM_TIME)
    fills = _fills(num_splits, kept.queues)
    few_waves = num_splits <= _MOST_WAVES * kept.queues
    if (one_wave and (short or fills)) or (fills and few_waves and not eight_bit):
        return replace(kept, queues=min(num_splits, kept.queues))
    return with_queues(0, 2)


def _most_programs(geometry: Geometry, at_once: int) -> int:
    """The most programs of a multiprocessor: one, with larger tiles, if many items have wide rows; otherwise two."""
    problem = geometry.problem
    wide_rows = problem.head_size * jnp.dtype(problem.query_dtype).itemsize >= 256
    many_items = geometry.num_items > 2 * at_once
    return 1 if many_items and wide_rows and not tiles.class_of(problem).in_registers else 2


def _fills(programs: int, at_once: int) -> bool:
    """Whether programs nearly fill all of their waves, including the last one."""
    return programs >= _NEARLY_FULL * pl.cdiv(programs, at_once) * at_once


def _splits(geometry: Geometry, num_tiles: int, programs: int, gpu: Device) -> tuple[int, int]:
    """Returns the splits of each item and the programs that run at once; `programs` fit on a multiprocessor."""
    num_items, one_each = max(1, geometry.num_items), gpu.num_multiprocessors

    def splits_for(at_once: int) -> int:  # the splits of an item that run at once, or fewer if none gets longer
        tiles_each = pl.cdiv(num_tiles, max(1, min(at_once // num_items, num_tiles)))
        return pl.cdiv(num_tiles, tiles_each)

    # One program on each multiprocessor reads at the rate of two programs, and leaves fewer partial results to merge.
    # But it computes more slowly, which delays tiles that pass through registers (LOG, "Groups that do not fill query
    # tiles").
    reads_as_fast = not tiles.class_of(geometry.problem).in_registers
    if reads_as_fast and one_each >= splits_for(one_each) * num_items >= _NEARLY_FULL * one_each:
        return splits_for(one_each), one_each
    return splits_for(programs * one_each), programs * one_each


def _worth_a_look(geometry: Geometry, at_once: int) -> bool:
    """Whether items may be so long that reading the batch's lengths pays. `at_once` programs run at once."""
    num_items = geometry.num_items
    if geometry.problem.cache_itemsize == 1:
        worth = _WORTH_A_LOOK_OF_8_BITS
    else:
        worth = _WORTH_A_LOOK if _fills(num_items, at_once) else _WORTH_A_LOOK_IF_IDLE
    # An upper bound: queues without splits take one wave, and read the lengths once.
    looks = max(1, num_items / at_once) * pl.cdiv(geometry.problem.num_seqs, _LENGTHS_AT_ONCE)
    return _item_time(geometry) > worth * (_MERGE_LAUNCH_TIME + _LENGTHS_TIME * looks)


def _item_time(geometry: Geometry) -> float:
    """Microseconds that one program needs for the longest possible item, with two programs on each multiprocessor."""
    head_bytes = geometry.problem.head_size * geometry.problem.cache_itemsize
    return 2 * geometry.most_visible_tokens * geometry.tuning.fold * head_bytes / _MULTIPROCESSOR_BYTES_PER_US


def _tiled(problem: Problem, tuning: Tuning, most_programs: int = 2) -> Tuning:
    """Chooses `tile`, `stages` and `programs`: the first candidate that fits into shared memory."""
    for candidate, room in _tilings(problem, tuning, most_programs):
        if shared_memory_bytes(Geometry(problem, candidate)) <= room:
            return candidate
    raise Unsupported(NAME, [f"has no tiling that fits in shared memory for {problem} and {tuning}"])


def _tilings(problem: Problem, tuning: Tuning, most_programs: int) -> Iterator[tuple[Tuning, int]]:
    """Candidate tunings, best first, each with the bytes of shared memory that it may use.

    A tile has 64 or 128 rows. With 128, a tile of K plus one of V take at most `_TILE_BYTES`, or twice that if a
    multiprocessor has one program. If one tile holds the whole split, the limit is the program's share of
    `_BYTES_IN_FLIGHT`. Rings have as many stages as may be in flight. They have at least two stages, except if a split
    has one tile or two tiles do not fit.
    """
    tile_class, columns = tiles.class_of(problem), Geometry(problem, tuning).columns
    in_flight = _BYTES_IN_FLIGHT_OF_8_BITS if problem.cache_itemsize == 1 else _BYTES_IN_FLIGHT
    longest_split = tuning.fold * (problem.partition_size or pl.cdiv(problem.max_seq_len, max(1, tuning.splits)))
    for programs, tile in ((2, 128), (2, 64), (1, 128), (1, 64)):
        tile_bytes = 2 * tile * problem.head_size * problem.cache_itemsize
        one_tile = longest_split <= tile
        largest = _BYTES_IN_FLIGHT // programs if one_tile else _TILE_BYTES * (3 - programs)
        if programs > most_programs or (tile == 128 and (longest_split <= 64 or columns > 32 or tile_bytes > largest)):
            continue
        # If two programs share a multiprocessor, each thread has 128 registers. A larger tile in registers, or more
        # columns, would not fit into these.
        crowded = columns > 8 or problem.head_size > 128 or tile * problem.head_size > 8192
        if tile_class.in_registers and programs == 2 and crowded:
            continue
        room = PROGRAM_MEMORY if programs == 1 else MULTIPROCESSOR_MEMORY // 2 - SYSTEM_MEMORY
        most = min(_MOST_STAGES, in_flight // programs // tile_bytes, pl.cdiv(longest_split, tile))
        least = 1 if (programs, tile) == (1, 64) or one_tile else 2
        for stages in range(max(most, least), least - 1, -1):
            yield replace(tuning, programs=programs, tile=tile, stages=stages), room
