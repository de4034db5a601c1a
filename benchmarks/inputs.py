"""Draws a case's inputs in shuffled blocks of a pool larger than L2, and computes some rows of its true output."""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.cases import Case
from paged_jax import PagedKVCache

POOL_BYTES = 2 << 30  # bytes of keys and values together, far more than any L2 holds
_MAX_TABLES = 128  # block tables that calls rotate through
_CHUNK = 1 << 24  # random numbers that are drawn at a time


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """A case's arrays on the device, padded to the case's shapes if it has any.

    Attributes:
      query: bf16 [num_seqs or num_tokens, num_heads, head_size].
      key_cache, value_cache: the pools, in the case's layout.
      block_tables: several i32 [num_seqs, max_blocks_per_seq] that share no block. Calls take them in turn, so that a
        small case does not find its keys and values in L2. Unused entries are 0.
      seq_lens: i32 [num_seqs].
      query_start_loc: i32 [num_seqs + 1], where each sequence's queries start.
      k_scale, v_scale: f32 [] for 8-bit caches; otherwise None.
    """

    query: Array
    key_cache: Array
    value_cache: Array
    block_tables: tuple[Array, ...]
    seq_lens: Array
    query_start_loc: Array
    k_scale: Array | None
    v_scale: Array | None


def make(case: Case, *, pool_bytes: int = POOL_BYTES, memory: int | None = None, seed: int = 0) -> Inputs:
    """Draws the inputs of a case.

    Args:
      case: the case to draw.
      pool_bytes: the least size of both pools together.
      memory: how many bytes the device has for arrays; None for no limit.
      seed: the seed of all random numbers.

    Raises:
      MemoryError: the case does not fit into the device's memory.
      ValueError: the case has an engine's shapes, and needs more blocks than the engine has.
    """
    num_tables, per_table = rotations(case, pool_bytes), sum(case.blocks_per_seq)
    if case.shapes is not None:
        num_tables = min(num_tables, case.shapes.num_blocks // per_table, _MAX_TABLES // 4)  # engines' tables are large
        if num_tables == 0:
            raise ValueError(f"needs {per_table} blocks, the engine has {case.shapes.num_blocks}")
    if memory is not None:
        # A peer needs two more copies of the keys and values: its own pool, and its intermediate results.
        if (num_tables + 2) * case.kv_bytes > memory:
            num_tables = 1
        if 1.2 * case.kv_bytes > memory:
            raise MemoryError(f"keys and values need {case.kv_bytes / 1e9:.1f} GB, the device has {memory / 1e9:.1f}")
    key_pool, key_query = jax.random.split(jax.random.key(seed))
    needed = num_tables * per_table
    key_cache, value_cache, num_blocks = _pools(case, needed, pool_bytes, key_pool)
    order = np.random.default_rng(seed).permutation(num_blocks)[:needed]
    tables = [_table(case, part) for part in np.split(order, num_tables)]
    query_lens, seq_lens = (np.asarray(x, np.int32) for x in (case.num_queries, case.seq_lens))
    num_tokens = int(query_lens.sum())
    if case.shapes is not None:
        num_tokens = case.shapes.num_tokens
        query_lens, seq_lens = (np.pad(x, (0, case.shapes.num_seqs - case.num_seqs)) for x in (query_lens, seq_lens))
    scales = (0.5, 2.0) if jnp.dtype(case.cache_dtype).itemsize < 2 else (None, None)
    k_scale, v_scale = (None if s is None else jnp.float32(s) for s in scales)
    return Inputs(
        query=jax.random.normal(key_query, (num_tokens, case.num_heads, case.head_size), jnp.bfloat16),
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=tuple(jnp.asarray(table) for table in tables),
        seq_lens=jnp.asarray(seq_lens),
        query_start_loc=jnp.asarray(np.concatenate([[0], np.cumsum(query_lens)]), jnp.int32),
        k_scale=k_scale,
        v_scale=v_scale,
    )


def rotations(case: Case, pool_bytes: int = POOL_BYTES) -> int:
    """How many block tables the calls of a case rotate through. Each table has blocks of its own."""
    return min(max(2, math.ceil(pool_bytes / case.kv_bytes)), _MAX_TABLES)


def _table(case: Case, blocks: np.ndarray) -> np.ndarray:
    shape = case.num_seqs, max(case.blocks_per_seq)
    if case.shapes is not None:
        shape = case.shapes.num_seqs, case.shapes.max_blocks_per_seq
    table = np.zeros(shape, np.int32)
    for row, own in zip(table, np.split(blocks, np.cumsum(case.blocks_per_seq)[:-1]), strict=False):
        row[: len(own)] = own
    return table


def _pools(case: Case, needed: int, pool_bytes: int, key: Array) -> tuple[Array, Array, int]:
    """Draws random pools of an engine's size, or of at least `needed` blocks and `pool_bytes`. Counts their blocks."""
    elements = case.block_size * case.num_kv_heads * case.head_size
    itemsize = jnp.dtype(case.cache_dtype).itemsize
    chunk = max(1, min(needed, _CHUNK // elements))
    chunks = math.ceil(max(needed, pool_bytes / (2 * elements * itemsize)) / chunk)
    if case.shapes is not None:
        chunk = math.gcd(case.shapes.num_blocks, 512)  # this divides the number of blocks
        chunks = case.shapes.num_blocks // chunk
    create = functools.partial(
        PagedKVCache.create,
        chunk,
        case.block_size,
        case.num_kv_heads,
        case.head_size,
        dtype=case.cache_dtype,
        layout=case.layout,
    )
    piece = jax.eval_shape(create)

    key_k, key_v = jax.random.split(key)
    shapes = (piece.key_cache.shape, piece.value_cache.shape)
    pools = [_draw(key, chunks, shape, case.cache_dtype) for key, shape in zip((key_k, key_v), shapes, strict=True)]
    return pools[0], pools[1], chunks * chunk


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _draw(key: Array, chunks: int, shape: tuple[int, ...], dtype: str) -> Array:
    """Draws a pool of this many chunks, each of this shape."""

    def some(key):
        return jax.random.normal(key, (math.prod(shape),), jnp.float32).astype(dtype)

    # The random bits of a whole pool would need several times its memory, so they are drawn chunk by chunk.
    return jax.lax.map(some, jax.random.split(key, chunks)).reshape(chunks * shape[0], *shape[1:])


def tokens(blocks: Array, layout: str, *, is_key: bool) -> Array:
    """Reorders gathered blocks [..., num_blocks, *block] to tokens [..., num_tokens, num_kv_heads, head_size]."""
    if layout == "nhd":
        out = blocks
    elif layout == "hnd":
        out = jnp.swapaxes(blocks, -3, -2)
    elif is_key:
        out = jnp.moveaxis(blocks, -2, -4)
        out = out.reshape(*out.shape[:-2], -1)
    else:
        out = jnp.moveaxis(blocks, -1, -3)
    return out.reshape(*out.shape[:-4], -1, *out.shape[-2:])


def truth(case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Computes some rows of the output for the first block table, by the plain formula in float32.

    Returns:
      The rows' indices in the output, i32 [n], and the rows, f32 [n, num_heads, head_size].
    """
    starts = np.asarray(inputs.query_start_loc)
    indices, rows = [], []
    for seq in sorted({0, case.num_seqs // 2, case.num_seqs - 1}):
        first = case.seq_lens[seq] - case.num_queries[seq]
        positions = np.linspace(first, case.seq_lens[seq] - 1, 16).astype(np.int32)  # few queries: some occur twice
        index = starts[seq] + positions - first
        table = inputs.block_tables[0][seq]
        scales = [jnp.float32(1) if s is None else s for s in (inputs.k_scale, inputs.v_scale)]
        seen = jnp.asarray(positions, jnp.int32)
        query, key_cache, value_cache = inputs.query[index], inputs.key_cache, inputs.value_cache
        window = np.int32(case.sliding_window or case.seq_lens[seq])
        out = _attend(query, key_cache, value_cache, table, seen, *scales, layout=case.layout, window=window)
        indices.append(index)
        rows.append(np.asarray(out))
    return np.concatenate(indices), np.concatenate(rows)


@functools.partial(jax.jit, static_argnames="layout")
def _attend(query, key_cache, value_cache, table, positions, k_scale, v_scale, layout, window):
    exactly = functools.partial(jnp.einsum, precision="highest")
    key = tokens(key_cache[table], layout, is_key=True).astype(jnp.float32) * k_scale
    value = tokens(value_cache[table], layout, is_key=False).astype(jnp.float32) * v_scale
    num_rows, num_heads, head_size = query.shape
    query = query.astype(jnp.float32).reshape(num_rows, key.shape[1], -1, head_size)
    logits = exactly("nkgd,tkd->nkgt", query, key) * jnp.float32(head_size**-0.5)
    distance = positions[:, None] - jnp.arange(key.shape[0], dtype=jnp.int32)[None, :]
    seen = (distance >= 0) & (distance < window)
    weights = jax.nn.softmax(jnp.where(seen[:, None, None, :], logits, -jnp.inf), axis=-1)
    return exactly("nkgt,tkd->nkgd", weights, value).reshape(num_rows, num_heads, head_size)
