"""The types that pyright must find for every op's results; pyright checks this file."""

from typing import assert_type

from jax import Array

from paged_jax import (
    PagedKVCache,
    PagedLatentCache,
    copy_blocks,
    merge_attention_states,
    mla_paged_attention,
    paged_attention,
    paged_attention_v1,
    paged_attention_v2,
    prefix_attention,
    ragged_mla_attention,
    ragged_paged_attention,
    swap_blocks,
    write_and_attend,
    write_to_latent_cache,
    write_to_paged_cache,
)


def decode(x: Array, *, flag: bool) -> None:
    assert_type(paged_attention(x, x, x, x, x), Array)
    assert_type(paged_attention(x, x, x, x, x, return_lse=True, layout="nhd"), tuple[Array, Array])
    assert_type(paged_attention(x, x, x, x, x, return_lse=flag), Array | tuple[Array, Array])
    assert_type(paged_attention_v1(x, x, x, x, x), Array)
    assert_type(paged_attention_v1(x, x, x, x, x, return_lse=True), tuple[Array, Array])
    assert_type(paged_attention_v2(x, x, x, x, x), Array)
    assert_type(paged_attention_v2(x, x, x, x, x, return_lse=True), tuple[Array, Array])
    assert_type(paged_attention_v2(x, x, x, x, x, return_residuals=True), tuple[Array, Array, Array, Array])
    every = paged_attention_v2(x, x, x, x, x, return_residuals=True, return_lse=True)
    assert_type(every, tuple[Array, Array, Array, Array, Array])
    assert_type(write_and_attend(x, x, x, x, x, x, x, x), tuple[Array, Array, Array])
    assert_type(write_and_attend(x, x, x, x, x, x, x, x, return_lse=True), tuple[Array, Array, Array, Array])


def ragged(x: Array) -> None:
    assert_type(ragged_paged_attention(x, x, x, x, x, x, causal=False), Array)
    assert_type(ragged_paged_attention(x, x, x, x, x, x, return_lse=True), tuple[Array, Array])
    assert_type(prefix_attention(x, x, x, x, x, x, x, x), Array)
    assert_type(prefix_attention(x, x, x, x, x, x, x, x, return_lse=True), tuple[Array, Array])
    assert_type(merge_attention_states(x, x, x, x), tuple[Array, Array])


def cache_ops(x: Array, layers: list[Array]) -> None:
    assert_type(write_to_paged_cache(x, x, x, x, x), tuple[Array, Array])
    assert_type(copy_blocks(x, x, x), tuple[Array, Array])
    assert_type(copy_blocks(layers, layers, x), tuple[list[Array], list[Array]])
    assert_type(copy_blocks(layers, None, x), tuple[list[Array], None])
    assert_type(swap_blocks(x, x, x, x, x), tuple[Array, Array])
    assert_type(swap_blocks(x, None, x, None, x), tuple[Array, None])


def latents(cache: PagedLatentCache, x: Array) -> None:
    assert_type(mla_paged_attention(x, x, x, x, value_size=16, scale=x), Array)
    assert_type(mla_paged_attention(x, x, x, x, value_size=16, scale=1, return_lse=True), tuple[Array, Array])
    assert_type(ragged_mla_attention(x, x, x, x, x, value_size=16, scale=1, causal=False), Array)
    assert_type(ragged_mla_attention(x, x, x, x, x, value_size=16, scale=1, return_lse=True), tuple[Array, Array])
    assert_type(write_to_latent_cache(x, x, x), Array)
    assert_type(cache.write(x, x), PagedLatentCache)
    assert_type(cache.attend(x, x, x, value_size=16, scale=1), Array)
    assert_type(cache.attend_ragged(x, x, x, x, value_size=16, scale=1, return_lse=True), tuple[Array, Array])
    assert_type(cache.copy_blocks(x), PagedLatentCache)
    assert_type(cache.swap_blocks_to(cache, x), PagedLatentCache)


def methods(cache: PagedKVCache, x: Array) -> None:
    assert_type(cache.write(x, x, x), PagedKVCache)
    assert_type(cache.attend(x, x, x), Array)
    assert_type(cache.attend(x, x, x, return_lse=True), tuple[Array, Array])
    assert_type(cache.write_and_attend(x, x, x, x, x, x), tuple[Array, PagedKVCache])
    assert_type(cache.write_and_attend(x, x, x, x, x, x, return_lse=True), tuple[Array, Array, PagedKVCache])
    assert_type(cache.attend_ragged(x, x, x, x), Array)
    assert_type(cache.attend_ragged(x, x, x, x, return_lse=True), tuple[Array, Array])
    assert_type(cache.attend_prefix(x, x, x, x, x, x), Array)
    assert_type(cache.attend_prefix(x, x, x, x, x, x, return_lse=True), tuple[Array, Array])
    assert_type(cache.copy_blocks(x), PagedKVCache)
    assert_type(cache.swap_blocks_to(cache, x), PagedKVCache)
