"""The operands of each op: its arrays by name and in the op's order, then its options or scales.

`_validate` makes them, and `_dispatch` calls an implementation's function with their fields. They are pytrees, so that
facts about operands (which of them are batched, how they are sharded) can be held in the same types, under the same
names.
"""

from typing import NamedTuple

from paged_jax.options import AttentionOptions
from paged_jax.shapes import (
    BlockMapping,
    BlockTables,
    Cache,
    CacheScale,
    LatentCache,
    LatentQuery,
    Latents,
    NewTokens,
    Query,
    QueryStartLoc,
    RaggedLatentQuery,
    RaggedQuery,
    SeqLens,
    SlotMapping,
    SourceCache,
)


class Decode(NamedTuple):
    """The operands of `paged_attention`, `paged_attention_v1` and `paged_attention_v2`."""

    query: Query
    key_cache: Cache
    value_cache: Cache
    block_tables: BlockTables
    seq_lens: SeqLens
    options: AttentionOptions


class WriteAndAttend(NamedTuple):
    """The operands of `write_and_attend`."""

    query: Query
    key: NewTokens
    value: NewTokens
    key_cache: Cache
    value_cache: Cache
    block_tables: BlockTables
    seq_lens: SeqLens
    slot_mapping: SlotMapping
    options: AttentionOptions


class Ragged(NamedTuple):
    """The operands of `ragged_paged_attention`."""

    query: RaggedQuery
    key_cache: Cache
    value_cache: Cache
    block_tables: BlockTables
    seq_lens: SeqLens
    query_start_loc: QueryStartLoc
    options: AttentionOptions


class Prefix(NamedTuple):
    """The operands of `prefix_attention`."""

    query: RaggedQuery
    key: NewTokens
    value: NewTokens
    key_cache: Cache
    value_cache: Cache
    block_tables: BlockTables
    seq_lens: SeqLens
    query_start_loc: QueryStartLoc
    options: AttentionOptions


class MlaDecode(NamedTuple):
    """The operands of `mla_paged_attention`."""

    query: LatentQuery
    latent_cache: LatentCache
    block_tables: BlockTables
    seq_lens: SeqLens
    options: AttentionOptions


class MlaRagged(NamedTuple):
    """The operands of `ragged_mla_attention`."""

    query: RaggedLatentQuery
    latent_cache: LatentCache
    block_tables: BlockTables
    seq_lens: SeqLens
    query_start_loc: QueryStartLoc
    options: AttentionOptions


class WriteLatent(NamedTuple):
    """The operands of `write_to_latent_cache`."""

    latent: Latents
    latent_cache: LatentCache
    slot_mapping: SlotMapping
    scale: CacheScale


class Write(NamedTuple):
    """The operands of `write_to_paged_cache`; `value_cache` is None where one pool holds keys and values."""

    key: NewTokens
    value: NewTokens
    key_cache: Cache
    value_cache: Cache | None
    slot_mapping: SlotMapping
    k_scale: CacheScale
    v_scale: CacheScale


class Copy(NamedTuple):
    """The operands of `copy_blocks`: the pools of every layer. Layers of latents have no value caches, but None."""

    key_caches: tuple[Cache, ...]
    value_caches: tuple[Cache | None, ...]
    block_mapping: BlockMapping


class Swap(NamedTuple):
    """The operands of `swap_blocks`. Caches of latents are key caches, whose value caches are None."""

    src_key_cache: SourceCache
    src_value_cache: SourceCache | None
    dst_key_cache: Cache
    dst_value_cache: Cache | None
    block_mapping: BlockMapping
