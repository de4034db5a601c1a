"""Attention as all XLA ops compute it: an online softmax over tiles of K and V.

A tile holds consecutive tokens of each of `n` sequences. All arithmetic is in float32, for inputs of any dtype. The
loop over tiles is a `while_loop`, so no array ever holds the logits of a whole context, or a gathered copy of it. The
work depends on the lengths, not on the table's width.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Float32, Int32, Num

from paged_jax.options import AttentionOptions, Interleaved, PerHead, block_axis, num_kv_heads

_TILE = 256  # tokens of a tile: enough to amortise a gather, and few enough to keep its logits in the CPU's caches
_NEVER = 2**31 - 1


class Softmax(NamedTuple):
    """An unfinished softmax for `n` sequences of `q` queries each: the sums so far, relative to `max_logit`."""

    weighted: Float32[Array, "n q h v"]
    exp_sum: Float32[Array, "n q h"]
    max_logit: Float32[Array, "n q h"]


def empty(query: Num[Array, "n q h d"], value_size: int | None = None) -> Softmax:
    """The softmax over no token; `value_size` is the queries' head_size if it is None."""
    zeros = jnp.zeros(query.shape[:3], jnp.float32)
    weighted = jnp.zeros((*query.shape[:3], query.shape[3] if value_size is None else value_size), jnp.float32)
    return Softmax(weighted, zeros, jnp.full_like(zeros, -jnp.inf))


class Tile(NamedTuple):
    """Keys and values at `positions`; the scales broadcast against ``[n, t, kv_heads]``, or are None."""

    key: Num[Array, "n t g d"]
    value: Num[Array, "n t g v"]
    positions: Int32[Array, "t"]
    k_scale: Float[Array, "#n #t #g"] | None = None
    v_scale: Float[Array, "#n #t #g"] | None = None


def add_tile(
    state: Softmax,
    query: Num[Array, "n q h d"],
    query_positions: Int32[Array, "n q"],
    tile: Tile,
    end: Int32[Array, "n"],
    options: AttentionOptions,
) -> Softmax:
    """Adds a tile's tokens before `end` to the softmax; a query at position -1 sees no token."""
    n, q, h, d = query.shape
    g = tile.key.shape[2]
    grouped = query.astype(jnp.float32).reshape(n, q, g, h // g, d)
    key = tile.key.astype(jnp.float32)
    logits = jnp.einsum("nqgrd,ntgd->nqgrt", grouped, key, precision=lax.Precision.HIGHEST)
    # The two factors are multiplied first, because logits times one of them may be beyond float32.
    factor = options.scale if tile.k_scale is None else _over_logits(tile.k_scale * options.scale)
    logits = (logits * factor).reshape(n, q, h, tile.positions.size)
    if options.logits_soft_cap is not None:
        logits = options.logits_soft_cap * jnp.tanh(logits / options.logits_soft_cap)
    if (slopes := options.per_head.alibi_slopes) is not None:
        distance = tile.positions[None, None, :] - query_positions[:, :, None]
        logits = logits + slopes[None, None, :, None] * distance[:, :, None, :].astype(jnp.float32)
    visible = _visible(query_positions, tile.positions, end, h, g, options)
    logits = jnp.where(visible, logits, -jnp.inf)

    max_logit = jnp.maximum(state.max_logit, logits.max(-1))
    # A row that has seen no token has no maximum. Any finite number in its place makes exponentials 0 instead of NaN.
    shift = jnp.where(jnp.isneginf(max_logit), 0.0, max_logit)
    keep = jnp.exp(state.max_logit - shift)
    weights = jnp.exp(logits - shift[..., None])
    exp_sum = state.exp_sum * keep + weights.sum(-1)

    # Slots that no query sees may hold NaN. Because 0 * NaN is NaN, such values must not reach the product.
    seen = visible.any(axis=(1, 2))
    value = tile.value.astype(jnp.float32)
    if tile.v_scale is not None:
        value = value * tile.v_scale[..., None]
    value = jnp.where(seen[:, :, None, None], value, 0.0)
    weights = weights.reshape(n, q, g, h // g, tile.positions.size)
    weighted = jnp.einsum("nqgrt,ntgd->nqgrd", weights, value, precision=lax.Precision.HIGHEST)
    weighted = weighted.reshape(state.weighted.shape)
    return Softmax(state.weighted * keep[..., None] + weighted, exp_sum, max_logit)


def add_cached(
    state: Softmax,
    query: Num[Array, "n q h d"],
    query_positions: Int32[Array, "n q"],
    key_cache: Num[Array, "num_blocks ..."],
    value_cache: Num[Array, "num_blocks ..."] | None,
    block_tables: Int32[Array, "n w"],
    end: Int32[Array, "n"],
    options: AttentionOptions,
    *,
    origin: Int32[Array, ""] | int = 0,
    tile: int | None = None,
) -> Softmax:
    """Adds the cached tokens in ``[origin, end)`` of each sequence that its queries may see.

    `origin` and `tile` are multiples of the block size. About 256 tokens are gathered at a time, but no more than
    `tile` or, without it, the tokens of one row of the block tables. Without `value_cache`, a value is the first
    elements of its key.
    """
    if block_tables.shape[1] == 0 or key_cache.shape[0] == 0:
        return state
    block_size = key_cache.shape[block_axis(options.layout)]
    columns = max(1, min(_TILE // block_size, block_tables.shape[1] if tile is None else tile // block_size))
    width = columns * block_size

    def step(i, state):
        column = origin // block_size + i * columns + jnp.arange(columns, dtype=jnp.int32)
        used = column[None, :] * block_size < end[:, None]
        # Entries past the sequence may hold anything, so they are replaced before they are used.
        blocks = jnp.where(used, jnp.take(block_tables, column, axis=1, mode="clip"), 0)
        positions = origin + i * width + jnp.arange(width, dtype=jnp.int32)
        if value_cache is None:
            gathered = _gather_latents(key_cache, state.weighted.shape[3], blocks, positions, options)
        else:
            gathered = _gather(key_cache, value_cache, blocks, positions, query.shape[3], options)
        return add_tile(state, query, query_positions, gathered, end, options)

    begin = jnp.full_like(end, origin)
    if options.sliding_window is not None:
        # Queries at position -1 are padding and see no token.
        first = jnp.where(query_positions < 0, _NEVER, query_positions).min(1)
        begin = jnp.maximum(begin, first - (options.sliding_window - 1))
    nonempty = begin < end
    first_tile = jnp.where(nonempty, (begin - origin) // width, _NEVER).min(initial=_NEVER)
    last_tile = jnp.where(nonempty, -(-(end - origin) // width), 0).max(initial=0)
    return lax.fori_loop(first_tile, last_tile, step, state)


def finish(state: Softmax, per_head: PerHead | None) -> tuple[Float32[Array, "n q h v"], Float32[Array, "n q h"]]:
    """Adds the options of `per_head` that join sums, and normalises. A row without tokens has out 0 and lse -inf."""
    max_logit, exp_sum = state.max_logit, state.exp_sum
    seen = exp_sum != 0  # NaN counts as seen: it must reach the result
    if per_head is not None and (sinks := per_head.sinks) is not None:
        top = jnp.maximum(max_logit, sinks[None, None, :])
        keep = jnp.exp(max_logit - top)
        exp_sum = exp_sum * keep + jnp.exp(sinks[None, None, :] - top)
        state, max_logit = state._replace(weighted=state.weighted * keep[..., None]), top
    denominator = jnp.where(seen, exp_sum, 1.0)
    out = jnp.where(seen[..., None], state.weighted / denominator[..., None], 0.0)
    return out, jnp.where(seen, max_logit + jnp.log(denominator), -jnp.inf)


def _over_logits(scale: Float[Array, "n t g"]) -> Float[Array, "n 1 g 1 t"]:
    return scale.transpose(0, 2, 1)[:, None, :, None, :]


def _gather(
    key_cache: Array,
    value_cache: Array,
    blocks: Int32[Array, "n c"],
    positions: Array,
    head_size: int,
    options: AttentionOptions,
) -> Tile:
    """Gathers the named blocks of both caches, of any layout, as a tile."""

    def tokens(cache, order):  # `order` brings a gathered cache to [n, blocks, offset, kv heads, ...]
        gathered = _take(cache, blocks).transpose(order)
        return gathered.reshape(blocks.shape[0], positions.size, *gathered.shape[3:])

    def scales(scale):
        if scale is None or scale.ndim == 3:
            return None if scale is None else tokens(scale, (0, 1, 3, 2))
        return jnp.broadcast_to(scale, (1, 1, scale.size))

    match options.layout:
        case "hnd":
            key, value = tokens(key_cache, (0, 1, 3, 2, 4)), tokens(value_cache, (0, 1, 3, 2, 4))
        case "nhd":
            key, value = tokens(key_cache, (0, 1, 2, 3, 4)), tokens(value_cache, (0, 1, 2, 3, 4))
        case "vllm":
            key, value = tokens(key_cache, (0, 1, 4, 2, 3, 5)), tokens(value_cache, (0, 1, 4, 2, 3))
            key = key.reshape(value.shape)
        case Interleaved():
            rows = 2 * num_kv_heads(key_cache, options.layout)
            pairs = tokens(key_cache, (0, 1, 2, 3, 4))[:, :, :rows, :head_size]
            key, value = pairs[:, :, ::2], pairs[:, :, 1::2]
    return Tile(key, value, positions, scales(options.k_scale), scales(options.v_scale))


def _gather_latents(
    cache: Num[Array, "num_blocks block_size latent_size"],
    value_size: int,
    blocks: Int32[Array, "n c"],
    positions: Array,
    options: AttentionOptions,
) -> Tile:
    """Gathers the named blocks of a latent cache as a tile, whose values are the first elements of its keys."""
    latents = _take(cache, blocks).reshape(blocks.shape[0], positions.size, 1, cache.shape[2])
    k_scale, v_scale = (
        None if scale is None else scale.reshape(1, 1, 1) for scale in (options.k_scale, options.v_scale)
    )
    return Tile(latents, latents[..., :value_size], positions, k_scale, v_scale)


def _take(cache: Num[Array, "num_blocks ..."], blocks: Int32[Array, "n c"]) -> Num[Array, "n c ..."]:
    """Gathers the named blocks.

    It gathers bytes, because XLA's CPU backend would convert a whole float8 pool to float16 before the loop. The
    barrier ties the bytes to these blocks; without it, XLA would convert the whole pool to bytes before the loop.
    """
    if cache.dtype.itemsize > 1 or not jnp.issubdtype(cache.dtype, jnp.floating):
        return jnp.take(cache, blocks, axis=0, mode="clip")
    source = lax.bitcast_convert_type(lax.optimization_barrier((cache, blocks))[0], jnp.uint8)
    return lax.bitcast_convert_type(jnp.take(source, blocks, axis=0, mode="clip"), cache.dtype)


def _visible(
    query_positions: Int32[Array, "n q"],
    positions: Int32[Array, "t"],
    end: Int32[Array, "n"],
    num_heads: int,
    num_kv_heads: int,
    options: AttentionOptions,
) -> Bool[Array, "n q #h t"]:
    at, t = query_positions[:, :, None], positions[None, None, :]
    visible = ((t <= at) if options.causal else (at >= 0)) & (t < end[:, None, None])
    if options.sliding_window is not None:
        visible &= at - t < options.sliding_window
    visible = visible[:, :, None, :]
    if (sparse := options.block_sparse) is not None:
        group, heads = num_heads // num_kv_heads, range(num_heads)
        # The offsets may be beyond int32, so they are Python integers until they are taken modulo the stride.
        if sparse.head_sliding_step >= 0:
            offsets = [(sparse.tp_rank * num_heads + head) * sparse.head_sliding_step + 1 for head in heads]
        else:
            offsets = [
                (sparse.tp_rank * num_kv_heads + head // group) * -sparse.head_sliding_step + 1 for head in heads
            ]
        first = jnp.array([-offset % sparse.vert_stride for offset in offsets], jnp.int32)
        block = (positions // sparse.block_size)[None, None, None, :]
        local = block > (query_positions // sparse.block_size)[:, :, None, None] - sparse.local_blocks
        visible &= local | (block % sparse.vert_stride == first[None, None, :, None])
    return visible
