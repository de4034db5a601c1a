"""Context parallelism: runs an op on pools whose blocks are split over the devices of a mesh axis.

A device has some of the blocks of every sequence, whichever these are. It attends to them as if they were a sequence of
their own, and the devices merge their results by lse. Nothing else is exchanged, and no device sees another one's pool:

    block_tables, seq_lens ──► own blocks, in their order ──► the op on them ──► out, lse ──┐
                                                                                             ├─► sums over all devices
    the same on every other device ─────────────────────────────────────────────────────────┘

Prompts attend in two parts. All queries see every token before this step, so that each device attends to its own blocks
without a mask. The new tokens are few: every device gets all of their keys and values, and computes the causal part by
itself. `prefix_attention` takes them as arrays. No op takes latents beside a cache, so that every device stores the new
ones in a small pool of their own.

Only a sequence's last block may be partly filled, and it comes last on the device that has it. So a device's own
blocks form an ordinary sequence. But its tokens are not neighbours, so options about distances (ALiBi, windows,
block-sparse patterns) have no meaning there: `_splits.py` does not split blocks with these.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from paged_jax._operands import Copy, Decode, MlaRagged, Prefix, Ragged, Swap, Write, WriteAndAttend, WriteLatent
from paged_jax._states import merge_states
from paged_jax.options import AttentionOptions, block_axis

_BLOCK_SIZE = 16  # tokens of a block of a pool that is not read; every kernel takes it

# Runs an op on a device's part: its name, its operands and its static keywords.
type RunLocal = Callable[[str, Any, Mapping[str, Any]], Any]


def run(op: str, operands: Any, static: Mapping[str, Any], axes: tuple[str, ...], run_local: RunLocal) -> Any:
    """Computes an op on a device's part of the blocks, and merges the results of all devices.

    Args:
      op: the op's name.
      operands: its operands. Pools, and scales for each slot, have the device's blocks only.
      static: its static keywords.
      axes: the mesh axes over which blocks are split, the outermost first.
      run_local: runs an op on arrays of one device.

    Returns:
      The op's results. Those of attention are the same on every device; pools have the device's blocks.
    """
    return _RUN[op](op, operands, static, axes, run_local)


def _attend(op: str, operands: Any, static: Mapping[str, Any], axes: tuple[str, ...], run_local: RunLocal) -> Any:
    tables, lens = _own_blocks(operands.block_tables, operands.seq_lens, operands, axes)
    own = operands._replace(block_tables=tables, seq_lens=lens, options=_without_sinks(operands.options))
    return _merged(run_local(op, own, static), axes, operands.options.per_head.sinks)


def _write_and_attend(
    op: str, operands: WriteAndAttend, static: Mapping[str, Any], axes: tuple[str, ...], run_local: RunLocal
) -> Any:
    options = operands.options
    key_cache, value_cache, slots = operands.key_cache, operands.value_cache, operands.slot_mapping
    scales = options.k_scale, options.v_scale
    if key_cache.dtype.itemsize >= operands.key.dtype.itemsize:  # such a cache holds keys and values as they are
        scales = None, None
    new = Write(operands.key, operands.value, key_cache, value_cache, slots, *scales)
    key_cache, value_cache = _write("write_to_paged_cache", new, {"layout": options.layout}, axes, run_local)
    seen = Decode(operands.query, key_cache, value_cache, operands.block_tables, operands.seq_lens, options)
    return *_attend("paged_attention", seen, static, axes, run_local), key_cache, value_cache


def _ragged(op: str, operands: Ragged, static: Mapping[str, Any], axes: tuple[str, ...], run_local: RunLocal) -> Any:
    if not operands.options.causal:
        return _attend(op, operands, static, axes, run_local)
    key, value = (_new_tokens(operands, cache, axes) for cache in ("key", "value"))
    with_new_tokens = Prefix(key=key, value=value, **operands._asdict())
    return _prefix("prefix_attention", with_new_tokens, static, axes, run_local)


def _prefix(op: str, operands: Prefix, static: Mapping[str, Any], axes: tuple[str, ...], run_local: RunLocal) -> Any:
    cached = Ragged(**{name: getattr(operands, name) for name in Ragged._fields})
    seen_before = _attend_to_context("ragged_paged_attention", cached, static, axes, run_local)
    query_lens = jnp.diff(operands.query_start_loc)
    return merge_states(*seen_before, *run_local(op, _without_context(operands, query_lens), static))


def _ragged_mla(
    op: str, operands: MlaRagged, static: Mapping[str, Any], axes: tuple[str, ...], run_local: RunLocal
) -> Any:
    if not operands.options.causal:
        return _attend(op, operands, static, axes, run_local)
    seen_before = _attend_to_context(op, operands, static, axes, run_local)
    return merge_states(*seen_before, *run_local(op, _packed(operands, axes), static))


def _attend_to_context(
    op: str, operands: Any, static: Mapping[str, Any], axes: tuple[str, ...], run_local: RunLocal
) -> Any:
    """Attends to the tokens before this step, which all queries see. Sinks count beside the new tokens."""
    context_lens = operands.seq_lens - jnp.diff(operands.query_start_loc)
    tables, lens = _own_blocks(operands.block_tables, context_lens, operands, axes)
    options = dataclasses.replace(_without_sinks(operands.options), causal=False)
    own = operands._replace(block_tables=tables, seq_lens=lens, options=options)
    return _merged(run_local(op, own, static), axes)


def _without_context(operands: Prefix, query_lens: Array) -> Prefix:
    """Gives operands of the new tokens alone, with an unread pool: results then depend on no device's own pool."""
    query, key = operands.query, operands.key
    pool = jnp.zeros((1, key.shape[1], _BLOCK_SIZE, key.shape[2]), query.dtype)
    options = dataclasses.replace(
        operands.options, k_scale=None, v_scale=None, layout="hnd", max_seq_len=max(query.shape[0], 1)
    )
    table = jnp.zeros((query_lens.shape[0], 1), jnp.int32)
    return operands._replace(key_cache=pool, value_cache=pool, block_tables=table, seq_lens=query_lens, options=options)


def _write(op: str, operands: Write, static: Mapping[str, Any], axes: tuple[str, ...], run_local: RunLocal) -> Any:
    block_size = operands.key_cache.shape[block_axis(static["layout"])]
    slots = _own_slots(operands.slot_mapping, operands.key_cache, block_size, axes)
    return run_local(op, operands._replace(slot_mapping=slots), static)


def _write_latents(
    op: str, operands: WriteLatent, static: Mapping[str, Any], axes: tuple[str, ...], run_local: RunLocal
) -> Any:
    slots = _own_slots(operands.slot_mapping, operands.latent_cache, operands.latent_cache.shape[1], axes)
    return run_local(op, operands._replace(slot_mapping=slots), static)


def _own_slots(slots: Array, cache: Array, block_size: int, axes: tuple[str, ...]) -> Array:
    """The slots within the device's part of the pool; -1 for the slots of other devices and for padding."""
    block = _own(slots // block_size, cache, axes)
    return jnp.where(block < 0, -1, block * block_size + slots % block_size)


def _copy(op: str, operands: Copy, static: Mapping[str, Any], axes: tuple[str, ...], run_local: RunLocal) -> Any:
    """Copies blocks between devices too: each gets all copied blocks, and stores its own."""
    num_pairs = operands.block_mapping.shape[0]

    def layer(key_cache: Array, value_cache: Array | None) -> tuple[Array, Array | None]:
        source, destination = (_own(operands.block_mapping[:, i], key_cache, axes) for i in range(2))
        given = _everywhere(operands.block_mapping[:, 0], key_cache, axes)
        keys = _exchanged(key_cache, source, axes)
        values = None if value_cache is None else _exchanged(value_cache, source, axes)
        number = jnp.where(given & (destination >= 0), jnp.arange(num_pairs, dtype=jnp.int32), -1)
        mapping = jnp.stack([number, destination], axis=1)
        return run_local("swap_blocks", Swap(keys, values, key_cache, value_cache, mapping), static)

    if num_pairs == 0:
        return operands.key_caches, operands.value_caches
    layers = [layer(*pools) for pools in zip(operands.key_caches, operands.value_caches, strict=True)]
    return tuple(key for key, _ in layers), tuple(value for _, value in layers)


_RUN: dict[str, Callable] = {
    "paged_attention": _attend,
    "paged_attention_v1": _attend,
    "write_and_attend": _write_and_attend,
    "ragged_paged_attention": _ragged,
    "prefix_attention": _prefix,
    "mla_paged_attention": _attend,
    "ragged_mla_attention": _ragged_mla,
    "write_to_paged_cache": _write,
    "write_to_latent_cache": _write_latents,
    "copy_blocks": _copy,
}


def _own(blocks: Array, cache: Array, axes: tuple[str, ...]) -> Array:
    """The blocks' ids within the device's part of the pool; -1 for the blocks of other devices."""
    local = blocks - lax.axis_index(axes) * jnp.int32(cache.shape[0])
    return jnp.where((local >= 0) & (local < cache.shape[0]), local, -1)


def _everywhere(blocks: Array, cache: Array, axes: tuple[str, ...]) -> Array:
    """Whether some device has these blocks."""
    return (blocks >= 0) & (blocks < cache.shape[0] * lax.axis_size(axes))


def _own_blocks(block_tables: Array, seq_lens: Array, operands: Any, axes: tuple[str, ...]) -> tuple[Array, Array]:
    """The table and the lengths of the sequences that the device's own blocks make up."""
    cache, block_size, (num_seqs, width) = _pool(operands), _block_size(operands), block_tables.shape
    seq_lens = jnp.minimum(seq_lens, operands.options.max_seq_len)
    starts = jnp.arange(width, dtype=jnp.int32) * block_size
    lens = jnp.clip(seq_lens[:, None] - starts[None], 0, block_size)  # tokens in each block
    local = jnp.where(lens > 0, _own(block_tables, cache, axes), -1)
    column = jnp.where(local < 0, width, jnp.cumsum(local >= 0, axis=1, dtype=jnp.int32) - 1)
    rows = jnp.arange(num_seqs, dtype=jnp.int32)[:, None]
    own = jnp.zeros_like(block_tables).at[rows, column].set(local, mode="drop")
    return own, jnp.where(local < 0, 0, lens).sum(axis=1, dtype=jnp.int32)


def _without_sinks(options: AttentionOptions) -> AttentionOptions:
    """The options of one device's part: sinks count once, when the parts are merged."""
    return dataclasses.replace(options, per_head=options.per_head._replace(sinks=None))


def _merged(partial: tuple[Array, Array], axes: tuple[str, ...], sinks: Array | None = None) -> tuple[Array, Array]:
    """Joins attention to the devices' tokens, and the heads' sinks; a device without tokens of a row has lse -inf."""
    out, lse = partial
    top = lax.pmax(lse, axes)
    is_empty = jnp.isneginf(top)  # such a row stays empty, whatever its sinks are
    if sinks is not None:
        top = jnp.maximum(top, sinks[None].astype(top.dtype))
    top = jnp.where(is_empty, 0.0, top)
    weight = jnp.exp(lse - top)
    summed, total = lax.psum((out.astype(jnp.float32) * weight[..., None], weight), axes)
    if sinks is not None:
        total += jnp.where(is_empty, 0.0, jnp.exp(sinks[None].astype(top.dtype) - top))
    out = (summed / jnp.where(total == 0, 1.0, total)[..., None]).astype(out.dtype)
    return out, top + jnp.log(total)


def _new_tokens(operands: Ragged, which: str, axes: tuple[str, ...]) -> Array:
    """The keys or the values of all new tokens, [num_tokens, num_kv_heads, head_size], of query's dtype."""
    options, query, cache = operands.options, operands.query, getattr(operands, f"{which}_cache")
    block, offset = _new_slots(operands, cache, axes)
    at = jnp.maximum(block, 0)
    taken = cache[(at, *[slice(None)] * (block_axis(options.layout) - 1), offset)]
    taken = taken.reshape(query.shape[0], -1, query.shape[-1]).astype(jnp.float32)
    scale = options.k_scale if which == "key" else options.v_scale
    if scale is not None:
        scale = scale[at, :, offset] if scale.ndim == 3 else scale.reshape(1, -1)
        taken = taken * scale[..., None]
    return lax.psum(jnp.where((block >= 0)[:, None, None], taken, 0.0).astype(query.dtype), axes)


def _new_slots(operands: Ragged | MlaRagged, cache: Array, axes: tuple[str, ...]) -> tuple[Array, Array]:
    """For each new token its block in the device's part, or -1 if it has none there, and its offset in the block."""
    starts, table = operands.query_start_loc, operands.block_tables
    block_size, tokens = _block_size(operands), jnp.arange(operands.query.shape[0], dtype=jnp.int32)
    row = _rows_of(starts, tokens)
    position = operands.seq_lens[row] - starts[row + 1] + tokens
    block = table.at[row, position // block_size].get(mode="fill", fill_value=-1)
    return _own(jnp.where(tokens < starts[-1], block, -1), cache, axes), position % block_size


def _rows_of(starts: Array, tokens: Array) -> Array:
    """The sequence of each new token."""
    row = jnp.searchsorted(starts[1:], tokens, side="right").astype(jnp.int32)
    return jnp.minimum(row, starts.shape[0] - 2)


def _packed(operands: MlaRagged, axes: tuple[str, ...]) -> MlaRagged:
    """The new tokens alone: every device gets their latents, in a pool of their own with a table of its own."""
    cache, starts, num_tokens = operands.latent_cache, operands.query_start_loc, operands.query.shape[0]
    block_size, query_lens = cache.shape[1], jnp.diff(starts)
    num_blocks = -(-query_lens // block_size)
    first = jnp.cumsum(num_blocks) - num_blocks
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    row = _rows_of(starts, tokens)
    most = num_tokens // block_size + query_lens.shape[0]
    place = jnp.where(tokens < starts[-1], first[row] * block_size + tokens - starts[row], most * block_size)
    block, offset = _new_slots(operands, cache, axes)
    taken = lax.psum(jnp.where((block >= 0)[:, None], _bits(cache)[jnp.maximum(block, 0), offset], 0), axes)
    pool = jnp.zeros((most * block_size, cache.shape[2]), taken.dtype).at[place].set(taken, mode="drop")
    pool = lax.bitcast_convert_type(pool, cache.dtype).reshape(most, *cache.shape[1:])
    width = -(-max(num_tokens, 1) // block_size)
    table = jnp.minimum(first[:, None] + jnp.arange(width, dtype=jnp.int32)[None], max(most - 1, 0))
    options = dataclasses.replace(operands.options, max_seq_len=max(num_tokens, 1))
    return operands._replace(latent_cache=pool, block_tables=table, seq_lens=query_lens, options=options)


def _exchanged(cache: Array, block: Array, axes: tuple[str, ...]) -> Array:
    """These blocks, each from the device that has it, bit for bit; `block` is -1 on the others."""
    taken = jnp.take(_bits(cache), jnp.maximum(block, 0), axis=0, mode="clip")
    mine = (block >= 0).reshape(-1, *(1,) * (cache.ndim - 1))
    return lax.bitcast_convert_type(lax.psum(jnp.where(mine, taken, jnp.zeros_like(taken)), axes), cache.dtype)


def _bits(x: Array) -> Array:
    """The elements as unsigned integers: sums of these with zeros keep every bit, those of NaN too."""
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _pool(operands: Any) -> Array:
    """The pool of keys or of latents."""
    return operands.latent_cache if hasattr(operands, "latent_cache") else operands.key_cache


def _block_size(operands: Any) -> int:
    """How many tokens a block has."""
    is_latent = hasattr(operands, "latent_cache")
    return _pool(operands).shape[1 if is_latent else block_axis(operands.options.layout)]
