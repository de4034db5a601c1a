"""Ragged paged attention as JAX's TPU stacks call it: tpu-inference's v3 kernel, tokamax and their relatives.

The call writes the new tokens' keys and values into one pool and attends to it. The pool holds the key and the value of
a kv head side by side, and GPU kernels read and write it in place, so that a model written for a TPU keeps its cache:

    from paged_jax.compat.rpa import get_kv_cache_shape, ragged_paged_attention

A slot of the pool has ``2 * num_kv_heads`` rows, K of head 0, V of head 0, K of head 1 and so on. The pool has one of
these shapes, in which a row may be padded from head_dim to a multiple of 128 elements, and rows to a multiple of
``packing = 4 // itemsize``. What pads them is neither read nor written.

- ``[num_pages, page_size, 2 * num_kv_heads, head_dim]``
- ``[num_pages, page_size, 2 * num_kv_heads // packing, packing, head_dim]``, which `get_kv_cache_shape` gives

`ragged_paged_attention_hd64` takes the pool of tpu-inference's kernel for heads of 64 elements, where K and V of a head
share a row of 128.
"""

import math
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Float, Int32, Num

from paged_jax import _checks, _dispatch, _validate
from paged_jax._dispatch import Implementation
from paged_jax._operands import Write
from paged_jax.options import Interleaved
from paged_jax.shapes import BLOCK_SIZES, CACHE_DTYPES, QUERY_DTYPES

__all__ = ["TpuTuning", "get_kv_cache_shape", "ragged_paged_attention", "ragged_paged_attention_hd64"]

Queries = Float[Array, "max_num_tokens num_q_heads head_dim"]
NewTokens = Num[Array, "max_num_tokens num_kv_heads head_dim"]
KVCache = Num[Array, "num_pages page_size ..."]

_LANES = 128  # the pools of TPUs pad their rows to a multiple of this many elements


class TpuTuning(TypedDict, total=False):
    """Keywords that tune or debug a TPU kernel. They change no result, so that they are taken and ignored.

    Attributes:
      mask_value: what stands for the logit of a token that is not seen; here such a token has no weight at all.
      skip_kv_mask: a promise about lengths that saves a mask on a TPU; only without `use_causal_mask`.
      chunk_prefill_size, d_block_sizes, p_block_sizes, m_block_sizes: tiles of decode, prefill and mixed rows.
      num_kv_pages_per_block, num_queries_per_block: tiles of older kernels.
      vmem_limit_bytes: memory of a TPU's core.
      debug_mode, disable_bounds_checks, disable_semaphore_checks: what a TPU kernel checks and prints.

    Example:
      >>> from paged_jax.compat.rpa import TpuTuning
      >>> tuning: TpuTuning = {"m_block_sizes": (64, 256, 32, 128), "vmem_limit_bytes": 2**26}
      >>> sorted(tuning)
      ['m_block_sizes', 'vmem_limit_bytes']
    """

    mask_value: float | None
    skip_kv_mask: bool
    chunk_prefill_size: int | None
    d_block_sizes: tuple[int, int, int, int] | None
    p_block_sizes: tuple[int, int, int, int] | None
    m_block_sizes: tuple[int, int, int, int] | None
    num_kv_pages_per_block: int | None
    num_queries_per_block: int | None
    vmem_limit_bytes: int | None
    debug_mode: bool
    disable_bounds_checks: bool
    disable_semaphore_checks: bool


def ragged_paged_attention(
    queries: Queries,
    keys: NewTokens,
    values: NewTokens,
    kv_cache: KVCache,
    kv_lens: Int32[Array, "max_num_seqs"],
    page_indices: Int32[Array, "max_num_seqs*pages_per_seq"],
    cu_q_lens: Int32[Array, "max_num_seqs+1"],
    distribution: Int32[Array, "3"],
    attention_sink: Float[Array, "num_q_heads"] | None = None,
    *,
    use_causal_mask: bool = True,
    update_kv_cache: bool = True,
    sm_scale: Float[Array, ""] | float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    out_dtype: DTypeLike | None = None,
    q_scale: float | None = None,
    k_scale: Float[Array, "..."] | float | None = None,
    v_scale: Float[Array, "..."] | float | None = None,
    max_seq_len: int | None = None,
    max_query_len: int | None = None,
    implementation: Implementation | None = None,
    **tuning: Unpack[TpuTuning],
) -> tuple[Queries, KVCache]:
    """Writes new tokens into one pool of keys and values, and attends to it: prefill, decode, or a mix.

    Query j of sequence s is at position ``kv_lens[s] - q_len + j`` and sees the tokens up to that position.

    Args:
      queries: [max_num_tokens, num_q_heads, head_dim], float16, bfloat16 or float32: all sequences' new tokens, one
        sequence after the other. Rows past ``cu_q_lens[distribution[2]]`` are padding; their results are 0.
      keys, values: [max_num_tokens, num_kv_heads, head_dim]: the new tokens. Those of the pool's dtype are stored as
        they are. Wider ones are quantised: divided by k_scale and v_scale, rounded and saturated.
      kv_cache: the pool; the module's documentation gives its shapes. float16, bfloat16, float32, float8_e4m3fn,
        float8_e5m2 or int8. page_size is a power of two up to 256.
      kv_lens: i32 [max_num_seqs], tokens of each sequence, the new ones included.
      page_indices: i32 [max_num_seqs * pages_per_seq] or [max_num_seqs, pages_per_seq]: the pages of each sequence;
        those past its last used page are not read.
      cu_q_lens: i32 [max_num_seqs + 1], exclusive prefix sum of the query lengths.
      distribution: i32 [3]; ``distribution[2]`` is the number of sequences. What `kv_lens`, `page_indices` and
        `cu_q_lens` hold of later ones is not read. The other two tell a TPU kernel which rows are decode and prefill;
        here no result depends on them.
      attention_sink: f32 [num_q_heads]; a logit that joins the softmax's denominator and has no value.
      use_causal_mask: with False each query sees all tokens of its sequence; sliding_window must then be None.
      update_kv_cache: with False `keys` and `values` are not used: the pool holds the new tokens already, as where
        layers share their cache.
      sm_scale: f32 scalar, factor of the logits. May be traced.
      sliding_window: in tokens; a query at position i sees the positions t > i - sliding_window.
      soft_cap: logits become ``cap * tanh(logit / cap)``.
      out_dtype: the dtype of the result; None for the queries'. All sums are float32.
      q_scale: quantises the queries to the pool's dtype: they are divided by it, saturated and rounded, and logits are
        multiplied by it. This costs accuracy and gains no speed here.
      k_scale, v_scale: f32 scalar or [num_kv_heads], factors of the pool's keys and values; int8 needs both.
      max_seq_len, max_query_len, implementation: see `paged_jax.options.Options` and `paged_jax.ops`.
      **tuning: keywords that tune a TPU kernel, ignored: `TpuTuning`.

    Returns:
      ``(out, kv_cache)``: out [max_num_tokens, num_q_heads, head_dim], and the pool that holds the new tokens.

    Raises:
      ValueError, TypeError: a shape, dtype or option is wrong, or a keyword is unknown.
      NotImplementedError: `implementation` cannot do the call.

    Aliasing: donate kv_cache to update it in place; otherwise it is copied first. vmap: one call after the other.
    Sharding: query heads and rows of the pool may be split alike, unless rows are padded.
    Source: tpu-inference's ragged_paged_attention, v3.

    Example:
      A prompt of 3 tokens goes to page 5, and the 20th token of another sequence to page 2.

      >>> import jax.numpy as jnp
      >>> from paged_jax.compat.rpa import get_kv_cache_shape, ragged_paged_attention
      >>> kv_cache = jnp.zeros(get_kv_cache_shape(8, 16, 2, 128, jnp.bfloat16), jnp.bfloat16)
      >>> queries, keys = jnp.ones((4, 8, 128), jnp.bfloat16), jnp.ones((4, 2, 128), jnp.bfloat16)
      >>> kv_lens, page_indices = jnp.array([3, 20], jnp.int32), jnp.array([5, -1, 7, 2], jnp.int32)
      >>> cu_q_lens, distribution = jnp.array([0, 3, 4], jnp.int32), jnp.array([0, 0, 2], jnp.int32)
      >>> step = kv_lens, page_indices, cu_q_lens, distribution
      >>> out, kv_cache = ragged_paged_attention(queries, keys, keys, kv_cache, *step, sm_scale=128**-0.5)
      >>> out.shape, kv_cache.shape, kv_cache[2, 3, 0, 0, 0]
      ((4, 8, 128), (8, 16, 2, 2, 128), Array(1, dtype=bfloat16))
    """
    _check_tuning(tuning, use_causal_mask)
    pool, layout = _check_arrays(queries, keys, values, kv_cache)
    block_tables, seq_lens, query_start_loc = _batch(kv_lens, page_indices, cu_q_lens, distribution)
    if _checks.flag("update_kv_cache", update_kv_cache):
        slots = _slots(block_tables, seq_lens, query_start_loc, queries.shape[0], pool.shape[1])
        pool = _write(keys, values, pool, slots, layout, k_scale, v_scale, implementation)
    if q_scale is not None:
        queries, sm_scale = _quantised(queries, q_scale, pool.dtype), sm_scale * q_scale
    options: Any = {
        "scale": sm_scale,
        "sliding_window": sliding_window,
        "logits_soft_cap": soft_cap,
        "sinks": attention_sink,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "max_seq_len": max_seq_len,
        "max_query_len": max_query_len,
        "layout": layout,
    }
    operands = _validate.interleaved_operands(
        queries, pool, block_tables, seq_lens, query_start_loc, use_causal_mask, options
    )
    out, _ = _dispatch.call("ragged_paged_attention", operands, implementation=implementation, unwanted=(1,))
    return out if out_dtype is None else out.astype(out_dtype), _as_given(pool, kv_cache.shape)


def ragged_paged_attention_hd64(
    queries: Queries,
    keys: NewTokens,
    values: NewTokens,
    kv_cache: KVCache,
    kv_lens: Int32[Array, "max_num_seqs"],
    page_indices: Int32[Array, "max_num_seqs*pages_per_seq"],
    cu_q_lens: Int32[Array, "max_num_seqs+1"],
    distribution: Int32[Array, "3"],
    attention_sink: Float[Array, "num_q_heads"] | None = None,
    **options: Any,
) -> tuple[Queries, KVCache]:
    """Does what `ragged_paged_attention` does, for heads of 64 elements and the pool of tpu-inference's hd64 kernel.

    A row of that pool holds the key of a kv head in its first 64 elements and its value in the others.

    Args:
      queries, keys, values: as in `ragged_paged_attention`, with a head_dim of 64.
      kv_cache: ``[num_pages, page_size, num_kv_heads // packing, packing, 128]``, num_kv_heads rounded up to a multiple
        of ``packing = 4 // itemsize``, or ``[num_pages, page_size, num_kv_heads, 128]``.
      kv_lens, page_indices, cu_q_lens, distribution, attention_sink: as in `ragged_paged_attention`.
      **options: the keywords of `ragged_paged_attention`.

    Returns:
      ``(out, kv_cache)``, as `ragged_paged_attention` does.

    Raises:
      ValueError, TypeError: a shape, dtype or option is wrong, or a keyword is unknown.
      NotImplementedError: `implementation` cannot do the call.

    Aliasing: donate kv_cache to update it in place; otherwise it is copied first. vmap: one call after the other.
    Sharding: query heads and rows of the pool may be split alike, unless rows are padded.
    Source: tpu-inference's ragged_paged_attention_hd64.

    Example:
      >>> import jax.numpy as jnp
      >>> from paged_jax.compat.rpa import ragged_paged_attention_hd64
      >>> kv_cache = jnp.zeros((8, 16, 1, 2, 128), jnp.bfloat16)
      >>> queries, keys = jnp.ones((3, 8, 64), jnp.bfloat16), jnp.ones((3, 2, 64), jnp.bfloat16)
      >>> step = jnp.array([3], jnp.int32), jnp.array([5], jnp.int32), jnp.array([0, 3]), jnp.array([0, 0, 1])
      >>> out, kv_cache = ragged_paged_attention_hd64(queries, keys, keys, kv_cache, *step, sm_scale=0.125)
      >>> out.shape, kv_cache[5, :4, 0, 0, 0]
      ((3, 8, 64), Array([1, 1, 1, 0], dtype=bfloat16))
    """
    if np.ndim(kv_cache) not in (4, 5) or kv_cache.shape[-1] != _LANES:
        shapes = "[num_pages, page_size, num_kv_heads, 128] or [.., num_kv_heads // packing, packing, 128]"
        raise ValueError(f"kv_cache must have shape {shapes}, got {np.shape(kv_cache)}")
    if np.ndim(queries) != 3 or queries.shape[2] != _LANES // 2:
        raise ValueError(f"queries must have shape [max_num_tokens, num_q_heads, 64], got {np.shape(queries)}")
    pool = jnp.asarray(kv_cache).reshape(*kv_cache.shape[:2], -1, _LANES // 2)
    step = kv_lens, page_indices, cu_q_lens, distribution, attention_sink
    out, pool = ragged_paged_attention(queries, keys, values, pool, *step, **options)
    return out, _as_given(pool, kv_cache.shape)


def get_kv_cache_shape(
    total_num_pages: int, page_size: int, actual_num_kv_heads: int, actual_head_dim: int, kv_dtype: DTypeLike
) -> tuple[int, int, int, int, int]:
    """Gives the shape of the pool that tpu-inference's v3 kernel takes, padded as a TPU needs it.

    Args:
      total_num_pages: pages of the pool.
      page_size: tokens of a page.
      actual_num_kv_heads: key and value heads.
      actual_head_dim: elements of a head.
      kv_dtype: the pool's dtype.

    Returns:
      ``(total_num_pages, page_size, rows // packing, packing, head_dim)``, where packing is 4 // itemsize, rows is
      2 * actual_num_kv_heads rounded up to a multiple of it, and head_dim is rounded up to a multiple of 128.

    Example:
      >>> import jax.numpy as jnp
      >>> from paged_jax.compat.rpa import get_kv_cache_shape
      >>> get_kv_cache_shape(1000, 16, 8, 80, jnp.bfloat16)
      (1000, 16, 8, 2, 128)
    """
    packing = _packing(jnp.dtype(kv_dtype))
    rows = _aligned(2 * actual_num_kv_heads, packing)
    return total_num_pages, page_size, rows // packing, packing, _aligned(actual_head_dim, _LANES)


def _packing(dtype: Any) -> int:
    """How many elements a TPU packs in 32 bits."""
    return max(1, 4 // dtype.itemsize)


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to


def _check_tuning(tuning: TpuTuning, use_causal_mask: bool) -> None:
    if unknown := tuning.keys() - TpuTuning.__annotations__.keys():
        ignored = ", ".join(TpuTuning.__annotations__)
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}; keywords that are taken and ignored: {ignored}")
    if tuning.get("skip_kv_mask") and use_causal_mask:
        raise ValueError("skip_kv_mask must be False with use_causal_mask=True, got True")


def _check_arrays(queries: Any, keys: Any, values: Any, kv_cache: Any) -> tuple[Array, Interleaved]:
    """Checks the tokens and the pool; gives the pool with one axis of rows, and its layout."""
    queries = _checks.array("queries", queries, "max_num_tokens, num_q_heads, head_dim", QUERY_DTYPES)
    _checks.head_size("head_dim", queries.shape[2])
    if np.ndim(kv_cache) not in (4, 5):
        raise ValueError(
            "kv_cache must have shape [num_pages, page_size, 2 * num_kv_heads, head_dim] or "
            f"[num_pages, page_size, 2 * num_kv_heads // packing, packing, head_dim], got {np.shape(kv_cache)}"
        )
    kv_cache = _checks.typed("kv_cache", kv_cache, CACHE_DTYPES)
    dims, dtypes = "max_num_tokens, num_kv_heads, head_dim", {*QUERY_DTYPES, kv_cache.dtype.name}
    keys, values = (_checks.array(n, x, dims, sorted(dtypes)) for n, x in (("keys", keys), ("values", values)))
    num_kv_heads, head_dim = keys.shape[1], queries.shape[2]
    _checks.shape("keys", keys, (queries.shape[0], num_kv_heads, head_dim), dims)
    _checks.shape("values", values, keys.shape, dims)
    if values.dtype != keys.dtype:
        raise TypeError(f"values must have keys' dtype {keys.dtype}, got {values.dtype}")
    if kv_cache.shape[1] not in BLOCK_SIZES:
        raise ValueError(f"page_size must be one of {BLOCK_SIZES}, got {kv_cache.shape[1]}")
    if jax.typeof(kv_cache).memory_space == jax.memory.Space.Host:
        raise ValueError("kv_cache must be in device memory, got one in host memory")
    rows, row_size = math.prod(kv_cache.shape[2:-1]), kv_cache.shape[-1]
    padding = rows - 2 * num_kv_heads
    if padding % 2 or not 0 <= padding < 2 * _packing(kv_cache.dtype):
        raise ValueError(
            f"kv_cache must have 2 * num_kv_heads = {2 * num_kv_heads} rows a slot, or as many as are a multiple of "
            f"packing, got {rows} in shape {kv_cache.shape}"
        )
    if row_size not in (head_dim, _aligned(head_dim, _LANES)):
        raise ValueError(
            f"kv_cache must have head_dim = {head_dim} elements a row, or the next multiple of {_LANES}, "
            f"got shape {kv_cache.shape}"
        )
    return kv_cache.reshape(*kv_cache.shape[:2], rows, row_size), Interleaved(padding)


def _as_given(pool: Array, shape: tuple[int, ...]) -> Array:
    """Reshapes a pool to the shape in which it came."""
    pool = pool.reshape(shape)
    if shape[-2] > 1:
        return pool
    # XLA's CPU backend would take the new axis of one element for the outermost one in memory, and copy the pool twice.
    return with_layout_constraint(pool, Layout(tuple(range(len(shape)))))


def _batch(kv_lens: Any, page_indices: Any, cu_q_lens: Any, distribution: Any) -> tuple[Array, Array, Array]:
    """Gives block_tables, seq_lens and query_start_loc in this library's form; unused rows have no token."""
    seq_lens = _checks.indices("kv_lens", kv_lens, "max_num_seqs")
    num_rows = seq_lens.shape[0]
    starts = _checks.indices("cu_q_lens", cu_q_lens, "max_num_seqs + 1")
    _checks.shape("cu_q_lens", starts, (num_rows + 1,), "max_num_seqs + 1")
    distribution = _checks.indices("distribution", distribution, "3")
    _checks.shape("distribution", distribution, (3,), "3")
    pages = _checks.typed("page_indices", page_indices, ("int32",))
    if pages.ndim not in (1, 2) or pages.shape[0] % max(num_rows, 1) or pages.shape[:-1] not in ((), (num_rows,)):
        raise ValueError(
            f"page_indices must have shape [max_num_seqs * pages_per_seq] or [max_num_seqs, pages_per_seq], "
            f"max_num_seqs is {num_rows}, got {pages.shape}"
        )
    block_tables = pages.reshape(num_rows, pages.size // max(num_rows, 1))
    num_seqs = jnp.clip(distribution[2], 0, num_rows)
    row = jnp.arange(num_rows + 1, dtype=jnp.int32)
    seq_lens = jnp.where(row[:-1] < num_seqs, seq_lens, 0)
    return block_tables, seq_lens, jnp.where(row < num_seqs, starts, starts[num_seqs])


def _slots(
    block_tables: Array, seq_lens: Array, query_start_loc: Array, num_tokens: int, block_size: int
) -> Int32[Array, "max_num_tokens"]:
    """The slot of each new token, -1 for padding."""
    num_seqs, width = block_tables.shape
    if 0 in (num_seqs, width):
        return jnp.full((num_tokens,), -1, jnp.int32)
    token, ends = jnp.arange(num_tokens, dtype=jnp.int32), query_start_loc[1:]
    seq = (ends[None, :] <= token[:, None]).sum(axis=1, dtype=jnp.int32)  # one fused kernel, unlike a binary search
    position = token + jnp.take(seq_lens - ends, seq, mode="clip")
    column = position // block_size
    block = block_tables.at[seq, column].get(mode="clip")
    valid = (seq < num_seqs) & (token >= query_start_loc[0]) & (position >= 0) & (column < width) & (block >= 0)
    return jnp.where(valid, block * block_size + position % block_size, -1)


def _write(
    keys: Any,
    values: Any,
    pool: Array,
    slots: Array,
    layout: Interleaved,
    k_scale: Any,
    v_scale: Any,
    implementation: Implementation | None,
) -> Array:
    """Puts the new tokens into the pool, quantised if they are wider than its elements."""
    keys, values = jnp.asarray(keys), jnp.asarray(values)
    scales = _validate.interleaved_scales(pool, layout, k_scale, v_scale)
    if keys.dtype.itemsize <= pool.dtype.itemsize:
        scales = None, None
    operands = Write(keys, values, pool, None, slots, *scales)
    pool, _ = _dispatch.call("write_to_paged_cache", operands, implementation=implementation, layout=layout)
    return pool


def _quantised(queries: Any, q_scale: float, dtype: Any) -> Array:
    """The queries divided by `q_scale` and rounded to `dtype`, in their own dtype."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"q_scale must be None for a pool of {dtype}, got {q_scale!r}")
    queries, limits = jnp.asarray(queries), jnp.finfo(dtype)
    divided = jnp.clip(queries / q_scale, float(limits.min), float(limits.max))
    # The barrier keeps XLA from dropping both casts, which it may where it is allowed excess precision.
    return jax.lax.optimization_barrier(divided.astype(dtype)).astype(queries.dtype)
