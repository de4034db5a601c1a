"""Multi-head latent attention over a paged cache of latents. `paged_jax.ops` says what holds for every op."""

from typing import Literal, Unpack, overload

from jax import Array
from jaxtyping import Float

from paged_jax import _checks, _dispatch, _validate_latent
from paged_jax._dispatch import Implementation
from paged_jax.options import LatentOptions
from paged_jax.shapes import (
    BlockTables,
    LatentCache,
    LatentOut,
    LatentQuery,
    Lse,
    QueryStartLoc,
    RaggedLatentOut,
    RaggedLatentQuery,
    RaggedLse,
    SeqLens,
)

Scale = Float[Array, ""] | float


# fmt: off
@overload
def mla_paged_attention(
    query: LatentQuery, latent_cache: LatentCache, block_tables: BlockTables, seq_lens: SeqLens, *, value_size: int,
    scale: Scale, return_lse: Literal[False] = False, implementation: Implementation | None = None,
    **options: Unpack[LatentOptions],
) -> LatentOut: ...
@overload
def mla_paged_attention(
    query: LatentQuery, latent_cache: LatentCache, block_tables: BlockTables, seq_lens: SeqLens, *, value_size: int,
    scale: Scale, return_lse: Literal[True], implementation: Implementation | None = None,
    **options: Unpack[LatentOptions],
) -> tuple[LatentOut, Lse]: ...
# fmt: on
def mla_paged_attention(
    query: LatentQuery,
    latent_cache: LatentCache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    *,
    value_size: int,
    scale: Scale,
    return_lse: bool = False,
    implementation: Implementation | None = None,
    **options: Unpack[LatentOptions],
) -> LatentOut | tuple[LatentOut, Lse]:
    """Decode attention over a paged cache of latents: multi-head latent attention (MLA), with absorbed queries.

    It is attention with one kv head. A token's latent is its key, and the first `value_size` elements of the latent are
    its value.

    Args:
      query: [num_seqs, num_heads, latent_size], float16, bfloat16 or float32: one new token a sequence, whose latent is
        already in the cache. In DeepSeek's models it is ``q_nope @ W_UK`` beside the rotated ``q_rope``.
      latent_cache: [num_blocks, block_size, latent_size], of one of query's dtypes, float8_e4m3fn, float8_e5m2 or int8.
        Slots and blocks that no sequence uses may hold anything, NaN included. latent_size is a multiple of 16 up to
        1024, in DeepSeek's models 576 = 512 of the compressed latent + 64 of the rotated key.
      block_tables: i32 [num_seqs, max_blocks_per_seq]; entries at or past ceil(seq_len / block_size) are not read.
      seq_lens: i32 [num_seqs], tokens of each sequence, the new one included. Where it is 0, out is 0 and lse -inf.
      value_size: elements of a value, a multiple of 16 up to latent_size.
      scale: f32 scalar, factor of the logits; may be traced. It has no default, because the models' factor follows from
        the size of heads before the absorption.
      return_lse, implementation: see `paged_jax.ops`.
      **options: `latent_scale`, `sinks`, `logits_soft_cap`, `max_seq_len`: see `paged_jax.options.LatentOptions`.

    Returns:
      out: [num_seqs, num_heads, value_size], of query's dtype, accumulated in float32; the caller applies ``W_UV``.
      With return_lse ``(out, lse)``, where lse is f32 [num_seqs, num_heads].

    Raises:
      ValueError, TypeError: a shape, dtype or option is wrong.
      NotImplementedError: `implementation` cannot do the call.

    Aliasing: none, the cache is only read, in place. vmap: a batch of calls becomes one call with more sequences.
    Sharding: query heads may be split, sequences, and blocks: each device attends to its own blocks, and the devices
    merge their results. If blocks are not split, the cache is whole on each device.
    Bits: two calls on the same arrays give the same. GPU kernels share the tokens of a batch evenly, so that a row's
    bits depend on the batch; calls for one sequence at a time (`jax.lax.map`) give bits that do not.
    Source: DeepSeek-V2 (arXiv:2405.04434); FlashMLA.

    Example:
      The batch is one sequence of 20 tokens, which are in blocks 5 and 2.

      >>> import jax.numpy as jnp
      >>> from paged_jax import PagedLatentCache, mla_paged_attention
      >>> cache = PagedLatentCache.create(num_blocks=8, block_size=16, latent_size=576)
      >>> query = jnp.ones((1, 16, 576), jnp.bfloat16)
      >>> block_tables, seq_lens = jnp.array([[5, 2, -1, -1]], jnp.int32), jnp.array([20], jnp.int32)
      >>> arrays = query, cache.latent_cache, block_tables, seq_lens
      >>> mla_paged_attention(*arrays, value_size=512, scale=192**-0.5).shape
      (1, 16, 512)
    """
    operands = _validate_latent.decode_operands(query, latent_cache, block_tables, seq_lens, scale, options)
    value_size = _validate_latent.value_size(value_size, operands.query.shape[2])
    return_lse = _checks.flag("return_lse", return_lse)
    unwanted = () if return_lse else (1,)
    out, lse = _dispatch.call(
        "mla_paged_attention", operands, implementation=implementation, unwanted=unwanted, value_size=value_size
    )
    return (out, lse) if return_lse else out


# fmt: off
@overload
def ragged_mla_attention(
    query: RaggedLatentQuery, latent_cache: LatentCache, block_tables: BlockTables, seq_lens: SeqLens,
    query_start_loc: QueryStartLoc, *, value_size: int, scale: Scale, causal: bool = True,
    return_lse: Literal[False] = False, implementation: Implementation | None = None, **options: Unpack[LatentOptions],
) -> RaggedLatentOut: ...
@overload
def ragged_mla_attention(
    query: RaggedLatentQuery, latent_cache: LatentCache, block_tables: BlockTables, seq_lens: SeqLens,
    query_start_loc: QueryStartLoc, *, value_size: int, scale: Scale, causal: bool = True, return_lse: Literal[True],
    implementation: Implementation | None = None, **options: Unpack[LatentOptions],
) -> tuple[RaggedLatentOut, RaggedLse]: ...
# fmt: on
def ragged_mla_attention(
    query: RaggedLatentQuery,
    latent_cache: LatentCache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    query_start_loc: QueryStartLoc,
    *,
    value_size: int,
    scale: Scale,
    causal: bool = True,
    return_lse: bool = False,
    implementation: Implementation | None = None,
    **options: Unpack[LatentOptions],
) -> RaggedLatentOut | tuple[RaggedLatentOut, RaggedLse]:
    """Multi-head latent attention of ragged queries: any number of queries a sequence.

    Query j of sequence s is at position ``seq_lens[s] - query_len + j`` and sees the tokens up to that position.

    Args:
      query: [num_tokens, num_heads, latent_size], float16, bfloat16 or float32: all sequences' new tokens, one sequence
        after the other. Their latents are already in the cache. Rows past query_start_loc[-1] are padding; their
        results are 0.
      latent_cache: [num_blocks, block_size, latent_size], of one of query's dtypes, float8_e4m3fn, float8_e5m2 or int8.
        Slots and blocks that no sequence uses may hold anything, NaN included.
      block_tables: i32 [num_seqs, max_blocks_per_seq]; entries at or past ceil(seq_len / block_size) are not read.
      seq_lens: i32 [num_seqs], tokens of each sequence, the new ones included.
      query_start_loc: i32 [num_seqs + 1], exclusive prefix sum of the query lengths; a length may be 0.
      value_size: elements of a value, a multiple of 16 up to latent_size.
      scale: f32 scalar, factor of the logits; may be traced. It has no default.
      causal: whether each query sees only the tokens up to its own position. With False it sees all tokens of its
        sequence, as where a batch reads a shared prefix once (see `merge_attention_states`).
      return_lse, implementation: see `paged_jax.ops`.
      **options: `latent_scale`, `sinks`, `logits_soft_cap`, `max_seq_len`, `max_query_len`: see
        `paged_jax.options.LatentOptions`.

    Returns:
      out: [num_tokens, num_heads, value_size], of query's dtype, accumulated in float32; with return_lse
      ``(out, lse)``, where lse is f32 [num_tokens, num_heads].

    Raises:
      ValueError, TypeError: a shape, dtype or option is wrong.
      NotImplementedError: `implementation` cannot do the call.

    Aliasing: none, the cache is only read, in place. vmap: one call after the other. Sharding: query heads may be
    split, and blocks, as for `mla_paged_attention`. Source: DeepSeek-V2 (arXiv:2405.04434); FlashMLA.

    Example:
      The batch holds a prompt of 3 tokens, and one new token of a sequence of 20.

      >>> import jax.numpy as jnp
      >>> from paged_jax import PagedLatentCache, ragged_mla_attention
      >>> cache = PagedLatentCache.create(num_blocks=8, block_size=16, latent_size=576)
      >>> query, block_tables = jnp.ones((4, 16, 576), jnp.bfloat16), jnp.array([[0, -1], [5, 2]], jnp.int32)
      >>> seq_lens, query_start_loc = jnp.array([3, 20], jnp.int32), jnp.array([0, 3, 4], jnp.int32)
      >>> arrays = query, cache.latent_cache, block_tables, seq_lens, query_start_loc
      >>> ragged_mla_attention(*arrays, value_size=512, scale=192**-0.5).shape
      (4, 16, 512)
    """
    operands = _validate_latent.ragged_operands(
        query, latent_cache, block_tables, seq_lens, query_start_loc, scale, causal, options
    )
    value_size = _validate_latent.value_size(value_size, operands.query.shape[2])
    return_lse = _checks.flag("return_lse", return_lse)
    unwanted = () if return_lse else (1,)
    out, lse = _dispatch.call(
        "ragged_mla_attention", operands, implementation=implementation, unwanted=unwanted, value_size=value_size
    )
    return (out, lse) if return_lse else out
