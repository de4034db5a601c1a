"""Fills the array in which a step travels to the device, from a plan; `StepShape.unpack` (batch.py) is the inverse."""

from typing import Any

import numpy as np

from paged_jax.engine.batch import FLOATS, StepShape
from paged_jax.engine.plan import Plan
from paged_jax.engine.sampling import Kind


def pack(plan: Plan, shape: StepShape, num_seats: int, kind: Kind) -> np.ndarray:
    """Packs a plan into a new array, since the last step's array may still be on its way to the device.

    Args:
      plan: the step's plan; without rows, the array is padding alone.
      shape: the shape for which the program is compiled, in which the plan fits.
      num_seats: how many seats there are; padding has this number, which no seat has.
      kind: what the program that draws tokens can do.

    Returns:
      i32 [shape.size].
    """
    packed = np.zeros(shape.size, np.int32)
    parts = shape.split(packed)
    parts["seats"][:] = num_seats
    parts["row_seats"][:] = num_seats
    if not plan.chunks:
        return packed
    num_rows, ids = len(plan.chunks), []
    for sequence, seat, first, count, draft in plan.chunks:
        known = sequence.tokens[first : first + count - len(draft)]
        ids += [*known, *draft]
        if len(known) + len(draft) < count:  # the host has not read the last token yet: the device takes its own copy
            ids.append(-1 - seat)
    seats, firsts, counts = (np.array([chunk[i] for chunk in plan.chunks]) for i in (1, 2, 3))
    parts["token_ids"][: len(ids)] = ids
    parts["seq_lens"][:num_rows] = firsts + counts
    starts = parts["query_start_loc"]
    starts[1 : num_rows + 1] = np.cumsum(counts)
    starts[num_rows + 1 :] = len(ids)
    parts["row_seats"][:num_rows] = seats
    parts["row_blocks"][:, :num_rows] = plan.row_blocks
    if shape.num_prefixes:
        ends = np.cumsum([num_rows for num_rows, _ in plan.prefixes])
        parts["prefix_starts"][1:] = ends[-1]
        parts["prefix_starts"][1 : len(ends) + 1] = ends
        parts["prefix_lens"][: len(ends)] = [num_tokens for _, num_tokens in plan.prefixes]
    if plan.samples:
        sequences, draw_seats, rows, positions, _ = zip(*plan.samples, strict=True)
        rows = np.array(rows)
        parts["logit_rows"][: len(rows)] = starts[rows] + np.array(positions) - 1 - firsts[rows]
        parts["seats"][: len(rows)] = draw_seats
        if kind > Kind.GREEDY:
            _pack_params(parts, sequences, positions)
    for i, score in enumerate(plan.scores, len(plan.samples)):
        parts["logit_rows"][i] = starts[score.row] + score.offset
        parts["scored"][i] = score.sequence.tokens[score.position]
    return packed


def pack_made_up(
    shape: StepShape, context_len: int, num_blocks: list[int], num_seats: int, block_size: int
) -> np.ndarray:
    """Packs a made-up step that fills a shape, for measuring.

    Args:
      shape: the shape to fill.
      context_len: tokens of each sequence, the new ones included.
      num_blocks: blocks of each group's pools.
      num_seats: how many seats there are; the drawn tokens belong to none of them.
      block_size: tokens in a block.

    Returns:
      i32 [shape.size].
    """
    packed = np.zeros(shape.size, np.int32)
    parts = shape.split(packed)
    rng = np.random.default_rng(0)
    parts["row_seats"][:] = np.arange(shape.num_rows)
    parts["row_blocks"][:] = [rng.integers(0, count, shape.num_rows) for count in num_blocks]
    parts["seats"][:] = num_seats
    rows = np.arange(shape.num_rows + 1)
    row_len = min(context_len, -(-shape.num_tokens // shape.num_rows) if shape.is_verify else context_len)
    starts = rows if shape.is_decode else np.minimum(np.minimum(rows, shape.num_prompts) * row_len, shape.num_tokens)
    counts = np.diff(starts)
    if shape.num_prefixes:  # all rows share one prefix, which is as long as it can be
        parts["prefix_starts"][1:], parts["prefix_lens"][0] = (
            shape.num_rows,
            (context_len - 1) // block_size * block_size,
        )
    parts["query_start_loc"][:] = starts
    parts["seq_lens"][:] = np.where(counts > 0, context_len, 0) if shape.is_decode or shape.is_verify else counts
    parts["logit_rows"][:] = rows[:-1] * 0 if shape.is_verify else np.where(counts > 0, starts[1:] - 1, 0)
    return packed


def _pack_params(parts: dict[str, np.ndarray], sequences: Any, positions: Any) -> None:
    """Fills in the sampling parameters; greedy steps leave them 0."""
    params = [sequence.params for sequence in sequences]
    seeds = np.array([sequence.seed for sequence in sequences], np.uint64)
    values = {
        "temperature": [p.temperature for p in params],
        "top_k": [p.top_k for p in params],
        "top_p": [p.top_p for p in params],
        "seed_high": (seeds >> np.uint64(32)).astype(np.uint32).view(np.int32),
        "seed_low": (seeds & np.uint64(2**32 - 1)).astype(np.uint32).view(np.int32),
        "index": [sequence.index for sequence in sequences],
        "position": positions,
        "scored": -1,
    }
    for name, value in values.items():
        part = parts[name].view(np.float32) if name in FLOATS else parts[name]
        part[: len(sequences)] = value
