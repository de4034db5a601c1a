"""The `attend` callables, which connect a decoder to the cache of its keys and values.

A decoder (decoder.py) calls `attend(query, key, value, cache, **options) -> (out, cache)` once in each layer, and
does nothing else with caches; the options are as in the library's attention ops. Each function here returns such a
callable for one step:

    prefill_attend   writes the new tokens to the paged cache, then attends with ragged rows of any length
    mixed_attend     does the same with two attention ops: one for prompts, one for rows of one new token
    decode_attend    writes one token for each sequence and attends, in one op
    by_window        lets each layer use the tables and slots of its sliding window
    causal_attend    attends within one sequence, in plain jnp without a cache: for training and for comparison
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from examples.decoder import Attend
from paged_jax import Implementation
from paged_jax.engine import SharedPrefixes


def prefill_attend(
    block_tables: Int32[Array, "num_seqs max_blocks_per_seq"],
    seq_lens: Int32[Array, " num_seqs"],
    query_start_loc: Int32[Array, " num_seqs+1"],
    slot_mapping: Int32[Array, " num_tokens"],
    *,
    implementation: Implementation | None = None,
) -> Attend:
    """Builds the attention of a ragged batch of new tokens, which writes them to the cache first.

    Args:
        block_tables: i32 `[num_seqs, max_blocks_per_seq]`; they already list the blocks of the new tokens.
        seq_lens: i32 `[num_seqs]`, tokens of each sequence, the new ones included.
        query_start_loc: i32 `[num_seqs + 1]`, where each sequence's new tokens start.
        slot_mapping: i32 `[num_tokens]`, the slot of each new token; negative for padding.
        implementation: the implementation of the ops, `None` for the library's choice.

    Returns:
        An `attend` callable over `PagedKVCache`, or over `PagedLatentCache` where the model has latents.
    """

    def attend(query, key, value, cache, **options):
        writer = None if implementation == "mosaic_gpu" else implementation  # Mosaic GPU has no op that only writes
        cache = cache.write(*_written(key, value), slot_mapping, implementation=writer)
        options["implementation"] = implementation
        return cache.attend_ragged(query, block_tables, seq_lens, query_start_loc, **options), cache

    return attend


def mixed_attend(
    block_tables: Int32[Array, "num_seqs max_blocks_per_seq"],
    seq_lens: Int32[Array, " num_seqs"],
    query_start_loc: Int32[Array, " num_seqs+1"],
    slot_mapping: Int32[Array, " num_tokens"],
    num_prompts: int,
    *,
    implementation: Implementation | None = None,
) -> Attend:
    """Builds the attention of a ragged batch that uses the decode op for rows of one new token.

    `paged_attention` takes the rows of one new token that come after all longer rows. `ragged_paged_attention` takes
    the rows before them: it is faster the fewer rows it is given. To each op the rows of the other are empty.

    Args:
        block_tables, seq_lens, query_start_loc, slot_mapping, implementation: see `prefill_attend`.
        num_prompts: how many rows, counted from the first, may have more than one new token (static).

    Returns:
        An `attend` callable over `PagedKVCache`, or over `PagedLatentCache` where the model has latents.
    """
    rows = jnp.arange(seq_lens.shape[0], dtype=jnp.int32)
    query_lens = jnp.diff(query_start_loc)
    num_ragged = jnp.max(jnp.where(query_lens > 1, rows + 1, 0))
    ragged_start_loc = jnp.minimum(query_start_loc, query_start_loc[num_ragged])[: num_prompts + 1]
    ragged_lens = jnp.where(rows < num_ragged, seq_lens, 0)[:num_prompts]
    is_decode = (rows >= num_ragged) & (query_lens == 1)
    decode_lens = jnp.where(is_decode, seq_lens, 0)
    decode_tokens = jnp.where(is_decode, query_start_loc[:-1], slot_mapping.shape[0])  # out of range for the others
    attend_ragged = prefill_attend(
        block_tables[:num_prompts], ragged_lens, ragged_start_loc, slot_mapping, implementation=implementation
    )

    def attend(query, key, value, cache, **options):
        out, cache = attend_ragged(query, key, value, cache, **options)
        decoding = query.at[decode_tokens].get(mode="clip")
        decoded = cache.attend(decoding, block_tables, decode_lens, **options, implementation=implementation)
        return out.at[decode_tokens].set(decoded, mode="drop"), cache

    return attend


def decode_attend(
    block_tables: Int32[Array, "num_seqs max_blocks_per_seq"],
    seq_lens: Int32[Array, " num_seqs"],
    slot_mapping: Int32[Array, " num_seqs"],
    *,
    prefixes: SharedPrefixes | None = None,
    implementation: Implementation | None = None,
) -> Attend:
    """Builds the attention of one new token for each sequence, which also writes the tokens to the cache.

    Args:
        block_tables: i32 `[num_seqs, max_blocks_per_seq]`; they already list the blocks of the new tokens.
        seq_lens: i32 `[num_seqs]`, tokens of each sequence, the new one included; 0 for a row of padding.
        slot_mapping: i32 `[num_seqs]`, the slot of each new token; negative for a row of padding.
        prefixes: prefixes that rows share, which layers of full attention read once.
        implementation: the implementation of the ops, `None` for the library's choice.

    Returns:
        An `attend` callable over `PagedKVCache`, or over `PagedLatentCache` where the model has latents.
    """

    def attend(query, key, value, cache, **options):
        is_full = not any(options.get(name) is not None for name in ("sliding_window", "alibi_slopes", "sinks"))
        options["implementation"] = implementation
        if prefixes is not None and value is not None and is_full:
            writer = None if implementation == "mosaic_gpu" else implementation
            cache = cache.write(key, value, slot_mapping, implementation=writer)
            return prefixes.attend(query, cache, **options), cache
        if value is None:
            cache = cache.write(key, slot_mapping, implementation=implementation)
            return cache.attend(query, block_tables, seq_lens, **options), cache
        return cache.write_and_attend(query, key, value, block_tables, seq_lens, slot_mapping, **options)

    return attend


def by_window(attends: Mapping[int | None, Attend]) -> Attend:
    """Builds an `attend` that leaves each layer to the one for its sliding window.

    Args:
        attends: by the layers' windows, None for layers that see everything.

    Returns:
        An `attend` callable over the caches that these take.
    """

    def attend(query, key, value, cache, **options):
        return attends[options.get("sliding_window")](query, key, value, cache, **options)

    return attend


def causal_attend() -> Attend:
    """Builds the causal attention of one whole sequence to itself. It has no cache and can be differentiated.

    Returns:
        An `attend` callable that returns its cache (usually `None`) unchanged.
    """

    def attend(
        query,
        key,
        value,
        cache,
        *,
        scale,
        sliding_window=None,
        logits_soft_cap=None,
        alibi_slopes=None,
        sinks=None,
        value_size=None,
    ):
        if value is None:
            key, value = key[:, None, :], key[:, None, :value_size]
        num_tokens, num_heads, head_size = query.shape
        num_kv_heads = key.shape[1]
        query = query.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_size)
        logits = jnp.einsum("qhgd,khd->hgqk", query, key, preferred_element_type=jnp.float32) * scale
        if logits_soft_cap is not None:
            logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
        distance = jnp.arange(num_tokens)[:, None] - jnp.arange(num_tokens)[None, :]
        if alibi_slopes is not None:
            logits -= alibi_slopes.reshape(num_kv_heads, -1, 1, 1) * distance.astype(logits.dtype)[None, None]
        seen = distance >= 0
        if sliding_window is not None:
            seen &= distance < sliding_window
        logits = jnp.where(seen[None, None], logits, -jnp.inf)
        if sinks is not None:  # each is one more logit of the softmax, and its value is 0
            sinks = jnp.broadcast_to(sinks.reshape(num_kv_heads, -1, 1, 1), (*logits.shape[:-1], 1))
            logits = jnp.concatenate([logits, sinks.astype(logits.dtype)], axis=-1)
        weights = jax.nn.softmax(logits, axis=-1)[..., :num_tokens]
        out = jnp.einsum("hgqk,khd->qhgd", weights.astype(value.dtype), value)
        return out.reshape(num_tokens, num_heads, -1), cache

    return attend


def _written(key, value) -> tuple:
    """The arrays that a cache's `write` takes: keys and values, or latents alone."""
    return (key,) if value is None else (key, value)
