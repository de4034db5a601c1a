"""Chooses the kernels of a ragged attention call, and the number of programs that any lengths may need.

`tuning.py` chooses the tiles of queries and tokens, as in decode.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from paged_jax.kernels.problem import Device, Problem
from paged_jax.kernels.triton import tuning
from paged_jax.kernels.triton.integers import cdiv, power_of_two
from paged_jax.kernels.triton.tuning import AttentionKernel, Tuning

ITEM_FIELDS = 8  # int32 numbers that describe an item; `device/items.py` uses seven of them


@dataclass(frozen=True, kw_only=True)
class RaggedReduceKernel:
    """The compile-time argument of the kernel that reduces a ragged batch's splits.

    Attributes:
      attention: the kernel that computes the splits.
      rows: rows of a tile of queries that one program reduces.
      splits: how many splits are read at once.
      parts: programs that share a row's output.
      num_warps, num_stages: arguments of Triton's compiler.
    """

    attention: AttentionKernel
    rows: int
    splits: int
    parts: int = 1
    num_warps: int = 1
    num_stages: int = 1

    @property
    def groups(self) -> int:
        """How many programs share a tile's rows."""
        return self.attention.tuning.rows // self.rows


@dataclass(frozen=True)
class Grid:
    """Upper bounds of the programs of a ragged batch. `device/items.py` computes how many the batch needs.

    Attributes:
      tiles: tiles of queries, including tiles of padding rows.
      at_once: items of each tile of heads that run at once; 0 if no context is split.
    """

    tiles: int
    at_once: int

    @property
    def items(self) -> int:
        """The largest number of items: a first split of each tile of queries, and fewer than `at_once` other splits."""
        return self.tiles + self.at_once

    @property
    def split_tiles(self) -> int:
        """The largest number of tiles that have several splits."""
        return min(self.tiles, self.at_once)

    @property
    def partials(self) -> int:
        """The largest number of splits in tiles with several splits: at most half of them are first splits."""
        return 2 * self.at_once


def tune(problem: Problem, gpu: Device) -> tuple[AttentionKernel, Grid]:
    """Chooses the kernel of a ragged attention call and its grid."""
    # This mean gives small tiles to decode batches, and large ones to prompts. It is at least 2, because 1 means
    # decode.
    queries_per_seq = max(2, cdiv(problem.num_tokens, max(problem.num_seqs, 1)))
    tuned = tuning.attention(problem, gpu, queries_per_seq=queries_per_seq, prefix=problem.prefix)
    tuned, grid = shared(problem, tuned, gpu)
    return AttentionKernel(problem.attention, tuned, problem.prefix), grid


def shared(problem: Problem, tuned: Tuning, gpu: Device) -> tuple[Tuning, Grid]:
    """Chooses whether contexts are split, and gives the grid."""
    head_tiles = problem.num_kv_heads * AttentionKernel(problem.attention, tuned).head_tiles
    at_once = gpu.num_multiprocessors * _programs_at_once(tuned) // head_tiles
    # If full tiles of queries fill the GPU, splits gain nothing: LOG, "Contexts split".
    filled = problem.num_tokens // tuned.queries >= at_once
    scan = 32 if problem.num_seqs < 32 else 128
    if filled or at_once < 2 or cdiv(problem.max_seq_len, tuned.tile) < 2 * tuned.least_split:
        tiles = problem.num_tokens // tuned.queries + problem.num_seqs + 1  # the last tiles are for padding rows
        return tuned, Grid(tiles, 0)
    # Each sequence, and the padding rows, may have one nearly empty tile.
    tiles = (problem.num_tokens + (problem.num_seqs + 1) * (tuned.queries - 1)) // tuned.queries
    return replace(tuned, final=False, scan=scan), Grid(min(problem.num_tokens, tiles), at_once)


def result_shapes(out: jax.ShapeDtypeStruct, kernel: AttentionKernel, grid: Grid) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes of the kernel's results: out, lse, and tmp_out, exp_sums and max_logits of splits, if any."""
    lse = jax.ShapeDtypeStruct(out.shape[:2], jnp.float32)
    residual = grid.partials, kernel.problem.num_kv_heads * kernel.head_tiles, kernel.tuning.rows
    if kernel.tuning.final:
        residual = 1, 1, 1
    tmp_out = jax.ShapeDtypeStruct((*residual, 1 if kernel.tuning.final else out.shape[2]), jnp.float32)
    return out, lse, tmp_out, *[jax.ShapeDtypeStruct(residual, jnp.float32)] * 2


def _programs_at_once(tuned: Tuning) -> int:
    """How many programs a multiprocessor runs at once, by their registers (benchmarks/LOG.md, "Contexts split")."""
    return max(1, (4 if tuned.rows <= 16 else 2) * 4 // tuned.num_warps)


def reduce(kernel: AttentionKernel, grid: Grid, gpu: Device) -> RaggedReduceKernel:
    """Chooses the reduce: a warp takes one row, several rows if there are many, or a part of a row if there are few.

    Each thread has up to 32 elements in flight. A warp loads as many splits at a time as a tile has on average, if they
    fit into these.
    """
    tuned = kernel.tuning
    all_rows = grid.split_tiles * kernel.problem.num_kv_heads * kernel.head_tiles * tuned.rows
    rows = min(8, power_of_two(cdiv(all_rows, 16 * gpu.num_multiprocessors)))
    parts = min(tuned.width // 16, power_of_two(8 * gpu.num_multiprocessors // all_rows))
    splits = min(power_of_two(cdiv(2 * grid.at_once, grid.split_tiles)), 1024 * parts // (rows * tuned.width))
    return RaggedReduceKernel(attention=kernel, rows=rows, splits=max(1, splits), parts=parts)
