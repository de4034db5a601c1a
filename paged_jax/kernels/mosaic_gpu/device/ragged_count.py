"""Counting work items in the kernel: each program's loading warpgroup adds up the whole batch, a thread a sequence.

Where sequences are few enough this takes about a microsecond, less than launching a kernel for it. Program 0 leaves
what it found in memory, for the kernel that merges. More sequences are counted by XLA (`ragged_plan.plan`).
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.device import ragged_plan as plan
from paged_jax.kernels.mosaic_gpu.device import ragged_scan as scan
from paged_jax.kernels.mosaic_gpu.device.ragged_plan import Row, Work
from paged_jax.kernels.mosaic_gpu.ragged_tuning import COUNTED, THREADS, Config


def work(refs, cfg: Config) -> Work:
    """What there is to do, in shared memory where the kernel counts."""
    if not cfg.counts_in_kernel:
        return Work(refs.table_gmem, refs.per_split_gmem, refs.of_wide_gmem)
    chunks = range(0, cfg.counted, THREADS)
    for first in chunks:
        rows = _rows(first, refs, cfg)
        costs = {row: plan.costs_of(rows, line, cfg) for row, line in enumerate(cfg.lines)}
        scan.sums_before(costs, refs.costs_smem, first)
    per_split, of_wide = plan.shares(refs.costs_smem[0, cfg.counted], refs.costs_smem[1, cfg.counted], cfg)
    for first in chunks:
        rows = _rows(first, refs, cfg)
        counts = {row: x for line in cfg.lines for row, x in plan.counts_of(rows, per_split, line, cfg).items()}
        scan.sums_before(counts, refs.table_smem, first)
    refs.per_split_smem[0] = per_split
    refs.of_wide_smem[0] = of_wide
    if any(cfg.places):
        pl.when(lax.axis_index("program") == 0)(lambda: _leave(per_split, refs, cfg))
    return Work(refs.table_smem, refs.per_split_smem, refs.of_wide_smem)


def _leave(per_split, refs, cfg: Config) -> None:
    """Leaves what was counted in memory."""
    refs.per_split_gmem[0] = per_split
    for what in range(2 * COUNTED):
        for first in range(0, cfg.counted, THREADS):
            columns = pl.ds(first, THREADS)
            counted = plgpu.load(refs.table_smem.at[what, columns], layout=scan.LAYOUT)
            refs.table_gmem[what, columns] = counted


def _rows(first: int, refs, cfg: Config) -> Row:
    """The sequences from `first` on, one a thread; past the last one they are that of the padding, and empty ones."""
    num_seqs = cfg.problem.num_seqs
    seq = scan.iota() + first
    start = scan.gather(refs.query_start_loc_gmem, first, num_seqs)
    end = scan.gather(refs.query_start_loc_gmem, first + 1, num_seqs)
    seq_len = scan.gather(refs.seq_lens_gmem, first, num_seqs - 1)
    end = jnp.where(seq == num_seqs, cfg.problem.num_tokens, end)
    queries = jnp.where(seq > num_seqs, 0, lax.max(end - start, jnp.zeros_like(start)))
    return Row(start, queries, jnp.where(seq < num_seqs, seq_len, 0))
