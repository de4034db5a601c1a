"""The merge of a group of rows."""

from functools import partial

import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax


def merge_rows(refs, group, kind):
    for i in range(kind.geometry.merged_rows):
        row = group.number * kind.geometry.merged_rows + i
        pl.when(row < group.num_rows)(partial(_merge_row, refs, group, row, kind))


def _merge_row(refs, group, row, kind):
    """Merges one row. On a GPU, several threads merge it."""
    geometry, problem, partials = kind.geometry, kind.geometry.problem, refs.partials
    token, head = row // problem.num_heads, row % problem.num_heads
    tile, of_tile = token // kind.tokens, token % kind.tokens
    kv_head, together = head // problem.group, group.heads_together
    first_head = kv_head // together * together
    heads = jnp.minimum(together, problem.num_kv_heads - first_head)
    item = first_head * group.query_tiles + (group.query_tiles - 1 - tile) * heads + kv_head - first_head
    first = group.first_partial + item * group.splits
    index = of_tile // geometry.half_tokens, of_tile % geometry.half_tokens * problem.group + head % problem.group

    def add(number, state):
        top, total, out = state
        log_sum = partials.log_sums[first + number, *index]
        new_top = jnp.maximum(top, log_sum)
        rescale, weight = jnp.exp2(top - new_top), jnp.exp2(log_sum - new_top)
        return new_top, total * rescale + weight, out * rescale + partials.out[first + number, *index] * weight

    zeros = jnp.zeros(problem.head_size, jnp.float32)
    top, total, out = lax.fori_loop(0, group.splits, add, (jnp.float32(-1e30), jnp.float32(0), zeros))
    norm, base = total, top
    if problem.per_head.sinks:
        sink = refs.sinks[head] * np.float32(np.log2(np.e))
        base = jnp.maximum(top, sink)
        norm = total * jnp.exp2(top - base) + jnp.exp2(sink - base)
        out = out * jnp.exp2(top - base)
    norm = jnp.where(total != 0, norm, 1.0)
    refs.out[group.first_token + token, head] = (out / norm).astype(refs.out.dtype)
    log_sum = (base + jnp.log2(norm)) / np.float32(np.log2(np.e))
    refs.lse[group.first_token + token, head] = jnp.where(total != 0, log_sum, -jnp.inf)
