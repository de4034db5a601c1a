"""Models the time of ragged attention on an H200, by simulating the programs that claim the items of a plan. No GPU.

    python -m benchmarks.plan_model --random 131 --numbers 46,20
    python -m benchmarks.plan_model --random 135 --beside benchmarks/results/FILE

The kernel's own functions make the plan: how items are split, their order, and how many programs begin with wide ones.
But more than 128 sequences are sorted exactly, and in the kernel by classes of cost. So a rule of `ragged/shares.py`
can be judged on hundreds of drawn batches before it is timed on a few. The costs were fitted to 57 timings of heads of
128 over 16 bits, whose wide items have two bands, and were within 5% of these on the mean (benchmarks/LOG.md, "The
longest first"); other batches are left out. They were not fitted again when programs came to claim items of the other
kind as late as in the kernel, nor when wide items came to be claimed late. The model knows nothing of memory but a
bound: at times all programs read at once, and take longer. So it flatters plans that leave many thin items to the end.
"""

import argparse
import dataclasses
import functools
import heapq
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import bench_commits, cases, harness, inputs
from benchmarks.cases import Case
from paged_jax import _validate
from paged_jax.kernels.mosaic_gpu.hopper.refs import Lengths
from paged_jax.kernels.mosaic_gpu.ragged import choose, count, plan
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import kinds_there
from paged_jax.kernels.mosaic_gpu.ragged.refs import Counted
from paged_jax.kernels.problem import Problem

_TILE = 128  # tokens of a tile whose cost was fitted
_START = 11.1  # us before the first items' tiles arrive and after the last results
_BYTES_A_US = 4.4e6  # at which an H200 reads
_CLAIMED_AFTER, _CLAIMED_BEFORE = 3.0, 5.0  # us after the start of an item that is claimed early, and before its end


class _Costs(NamedTuple):
    """Costs of an item in us."""

    tile: float
    item: float  # beside its tiles
    split: float  # more if it is split


_WIDE, _THIN = _Costs(1.5, 3.7, 4.6), _Costs(1.3, 2.7, 0.7)


class Plan(NamedTuple):
    """The items of a batch, in the order in which programs claim them.

    Attributes:
      wide: us that each wide item takes.
      thin: us that each thin item takes.
      begin_wide: the number of programs that begin with wide items.
      programs: the number of programs.
    """

    wide: Sequence[float]
    thin: Sequence[float]
    begin_wide: int
    programs: int


def plan_of(case: Case) -> Plan:
    """The kernel's plan of a batch, with the modelled cost of each item."""
    abstract = jax.eval_shape(functools.partial(inputs.make, case))
    arrays = abstract.query, abstract.key_cache, abstract.value_cache, abstract.block_tables[0]
    lengths = abstract.seq_lens, abstract.query_start_loc
    operands = jax.eval_shape(lambda *x: _validate.ragged_operands(*x, causal=True, options={}), *arrays, *lengths)
    caches = operands.key_cache, operands.value_cache, operands.block_tables
    problem = Problem.of_call(operands.query, *caches, operands.options, prefix=False)
    tuning = dataclasses.replace(choose.tune(problem, bench_commits.HOPPER), counts_in_kernel=False)
    geometry, padding = Geometry(problem, tuning), [0] * (problem.num_seqs - case.num_seqs)
    starts = jnp.asarray(np.cumsum([0, *(case.query_lens or ()), *padding]), jnp.int32)
    seq_lens = jnp.asarray([*case.seq_lens, *padding], jnp.int32)
    counts = jax.jit(functools.partial(count.count_before_kernel, geometry=geometry))(starts, seq_lens)
    us: dict[bool, list[float]] = {True: [], False: []}
    for kind in kinds_there(geometry):
        find = functools.partial(plan.find, counts=counts, lengths_gmem=Lengths(seq_lens, starts), kind=kind)
        numbers = jnp.arange(int(count.total(Counted.ITEMS, kind, counts)), dtype=jnp.int32)
        items, costs = jax.jit(jax.vmap(find))(numbers), _WIDE if kind.is_wide else _THIN
        of_tiles = costs.tile * kind.tile / _TILE * np.asarray(items.num_tiles)
        us[kind.is_wide] = list(of_tiles + costs.item + costs.split * (np.asarray(items.splits) > 1))
    return Plan(us[True], us[False], int(counts.wide_programs[0]), tuning.num_programs)


def modelled_us(of: Plan) -> float:
    """The time at which the last program of a plan is done; each begins with an item of its own, and claims others.

    A program claims its next item shortly before the end of its present one, but soon after the start of a wide one if
    there are thin items. When no item of the kind that it began with is left, it ends its last one, and then claims
    items of the other kind.
    """
    kinds, done = (of.thin, of.wide), 0.0
    following = [of.programs - of.begin_wide, of.begin_wide]  # the number of the next item of each kind
    claims: list[tuple[float, int, int, int, float]] = []  # time, program, its first kind and its kind now, when free

    def begin(at: float, program: int, first: int, kind: int, number: int) -> None:
        nonlocal done
        us = kinds[kind][number]
        is_early = kind and len(of.thin) > 0
        claimed = min(_CLAIMED_AFTER, us / 2) if is_early else max(us / 2, us - _CLAIMED_BEFORE)
        heapq.heappush(claims, (at + claimed, program, first, kind, at + us))
        done = max(done, at + us)

    for program in range(of.programs):
        kind = int(program < of.begin_wide)
        number = program if kind else program - of.begin_wide
        if number < len(kinds[kind]):
            begin(_START, program, kind, kind, number)
        else:
            heapq.heappush(claims, (_START, program, kind, kind, _START))
    while claims:
        at, program, first, kind, free = heapq.heappop(claims)
        if following[kind] >= len(kinds[kind]) and at < free:
            heapq.heappush(claims, (free, program, first, kind, free))
            continue
        for wanted in dict.fromkeys((kind, 1 - first)):
            if following[wanted] < len(kinds[wanted]):
                following[wanted] += 1
                begin(free, program, first, wanted, following[wanted] - 1)
                break
    return done


def modelled(case: Case) -> float:
    """The modelled time of a batch in us."""
    return max(modelled_us(plan_of(case)), _START + case.kv_bytes / _BYTES_A_US)


def fitted(some: Sequence[Case]) -> Iterator[tuple[int, Case]]:
    """The cases for whose heads and caches the costs were fitted, with their numbers."""
    for number, case in enumerate(some):
        if case.head_size == 128 and case.cache_dtype == "bfloat16":
            yield number, case


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the modelled times of drawn batches, beside measured ones if there are any."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_model", description=__doc__)
    parser.add_argument("--random", metavar="SEED", type=int, required=True, help="of `cases.random_ragged`")
    parser.add_argument("--numbers", type=harness.numbers, help="of 60 drawn batches; default all")
    parser.add_argument("--block-size", type=int, default=128, help="default 128")
    parser.add_argument("--beside", type=Path, help="a result of `bench_choice` with these batches")
    args = parser.parse_args(argv)
    measured = {}
    if args.beside:
        rows = json.loads(args.beside.read_text())["rows"]
        measured = {row["case"]: row["us"] for row in rows if row["kind"] == "implementation" and "us" in row}
    for number, case in fitted(cases.with_blocks(cases.random_ragged(60, args.random), [args.block_size])):
        if args.numbers is None or number in args.numbers:
            beside = f", measured {measured[case.name]:.1f}" if case.name in measured else ""
            print(f"{case.name}: {modelled(case):.1f} us{beside}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
