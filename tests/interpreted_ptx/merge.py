"""The merge of a split item, and of the rows of a query."""

import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.kernels.mosaic_gpu.ragged.kinds import kinds_of


def merge_item(refs, rows, kind):
    @pl.loop(0, rows.num_tokens * kind.geometry.problem.group)
    def merge_row(row):
        """Merges one row. On a GPU, several threads merge it."""
        problem = kind.geometry.problem
        empty = jnp.float32(-1e30), jnp.float32(0), jnp.zeros(problem.head_size, jnp.float32)
        state = _add(empty, rows.splits, rows.first_partial, (rows.band, row), refs.partials)
        head = rows.kv_head * problem.group + row % problem.group
        _store(state, refs, rows.first_token + row // problem.group, head, problem)


def merge_copies(refs, number, copies, geometry):
    for i in range(geometry.merged_rows):
        row = number * geometry.merged_rows + i
        query, head = row // geometry.problem.num_heads, row % geometry.problem.num_heads
        state = jnp.float32(-1e30), jnp.float32(0), jnp.zeros(geometry.problem.head_size, jnp.float32)
        for copy in copies:
            for kind, partials in zip(kinds_of(geometry), (refs.wide_partials, refs.thin_partials), strict=True):
                if kind.may_exist:
                    splits = jnp.where(copy.is_wide == int(kind.is_wide), copy.splits, 0)
                    state = _add(state, splits, *_place(copy.token, head, copy, kind), partials)
        _store(state, refs, query, head, geometry.problem)


def _place(token, head, copy, kind):
    """The first partial result of the item of a token and a head, and the indices of their row in it."""
    geometry, problem = kind.geometry, kind.geometry.problem
    tile, of_tile = token // kind.tokens, token % kind.tokens
    kv_head, together = head // problem.group, copy.heads_together
    first_head = kv_head // together * together
    heads = jnp.minimum(together, problem.num_kv_heads - first_head)
    item = first_head * copy.query_tiles + (copy.query_tiles - 1 - tile) * heads + kv_head - first_head
    index = of_tile // geometry.band_tokens, of_tile % geometry.band_tokens * problem.group + head % problem.group
    return copy.first_partial + item * copy.splits, index


def _add(state, splits, first, index, partials):
    """Adds the partial results of a row to a softmax."""

    def add(number, state):
        top, total, out = state
        log_sum = partials.log_sums[first + number, *index]
        new_top = jnp.maximum(top, log_sum)
        rescale, weight = jnp.exp2(top - new_top), jnp.exp2(log_sum - new_top)
        return new_top, total * rescale + weight, out * rescale + partials.out[first + number, *index] * weight

    return lax.fori_loop(0, splits, add, state)


def _store(state, refs, token, head, problem):
    """Stores a row."""
    top, total, out = state
    norm, base = total, top
    if problem.per_head.sinks:
        sink = refs.sinks[head] * np.float32(np.log2(np.e))
        base = jnp.maximum(top, sink)
        norm = total * jnp.exp2(top - base) + jnp.exp2(sink - base)
        out = out * jnp.exp2(top - base)
    norm = jnp.where(total != 0, norm, 1.0)
    refs.out[token, head] = (out / norm).astype(refs.out.dtype)
    log_sum = (base + jnp.log2(norm)) / np.float32(np.log2(np.e))
    refs.lse[token, head] = jnp.where(total != 0, log_sum, -jnp.inf)
