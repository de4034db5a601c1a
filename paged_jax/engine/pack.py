"""Fills the array in which a step travels to the device, from a plan; `StepShape.unpack` (batch.py) is the inverse."""

import numpy as np

from paged_jax.engine.batch import StepShape
from paged_jax.engine.plan import Plan
from paged_jax.engine.sampling import Kind
from paged_jax.engine.seats import PARAMS


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
    rows, samples = plan.rows, plan.samples
    num_rows, num_samples = len(rows), len(samples)
    if not num_rows:
        return packed
    starts, ids = parts["query_start_loc"], parts["token_ids"]
    np.cumsum(rows.counts, out=starts[1 : num_rows + 1])
    starts[num_rows + 1 :] = starts[num_rows]
    ids[starts[1 : num_rows + 1] - 1] = -1 - rows.seats  # the device takes its own copy of each row's last token
    for row in (~rows.are_drawn | (rows.counts > 1)).nonzero()[0].tolist():
        draft, end, count = rows.drafts.get(row, ()), int(rows.ends[row]), int(rows.counts[row])
        known = [*rows.sequences[row].tokens[end - count : end - len(draft)], *draft]
        assert len(known) == count or (len(known) == count - 1 and rows.are_drawn[row]), "nobody knows the last token"
        ids[starts[row] : starts[row] + len(known)] = known
    parts["seq_lens"][:num_rows] = rows.ends
    parts["row_seats"][:num_rows] = rows.seats
    parts["row_blocks"][:, :num_rows] = plan.row_blocks
    if shape.num_prefixes:
        ends = np.cumsum([num_rows for num_rows, _ in plan.prefixes])
        parts["prefix_starts"][1:] = ends[-1]
        parts["prefix_starts"][1 : len(ends) + 1] = ends
        parts["prefix_lens"][: len(ends)] = [num_tokens for _, num_tokens in plan.prefixes]
    logit_rows = starts[samples.rows + 1] - 1 - (rows.ends[samples.rows] - samples.positions)
    parts["logit_rows"][:num_samples] = logit_rows
    parts["seats"][:num_samples] = samples.seats
    if kind > Kind.GREEDY:  # greedy steps leave the sampling parameters 0
        for name, values in zip(PARAMS, samples.params, strict=True):
            parts[name][:num_samples] = values
        parts["position"][:num_samples] = samples.positions
        parts["scored"][:num_samples] = -1
    for i, score in enumerate(plan.scores, num_samples):
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
    row_len = min(context_len, -(-shape.num_tokens // max(shape.num_prompts, 1)) if shape.is_verify else context_len)
    starts = rows if shape.is_decode else np.minimum(np.minimum(rows, shape.num_prompts) * row_len, shape.num_tokens)
    counts = np.diff(starts)
    if shape.num_prefixes:  # all rows share one prefix, which is as long as it can be
        parts["prefix_starts"][1:], parts["prefix_lens"][0] = (
            shape.num_rows,
            (context_len - 1) // block_size * block_size,
        )
    parts["query_start_loc"][:] = starts
    parts["seq_lens"][:] = np.where(counts > 0, context_len, 0) if shape.is_decode or shape.is_verify else counts
    parts["logit_rows"][:] = 0 if shape.is_verify else np.where(counts > 0, starts[1:] - 1, 0)
    return packed
