"""The facts of a call, from which both GPU implementations make their choices.

`Pool`, `Attention` and `Problem` hold everything that is static in a call; each adds fields to the one before. They
never hold a choice: an implementation's choices for a `Problem` on a `Device` are its `Tuning`.
"""

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array

from paged_jax.options import AttentionOptions, BlockSparse, Interleaved, Layout, PerHead, block_axis, num_kv_heads

LONGEST_CONTEXT = 2**30
"""No context has more tokens. Windows and partitions are cut to this, because sums of positions would overflow."""


class Unsupported(NotImplementedError):
    """Raised by an implementation that cannot do a call. After this error only, the next implementation is tried.

    Args:
      implementation: the implementation's name, as users pass it.
      reasons: all reasons, each a phrase such as "lacks block_sparse".
    """

    def __init__(self, implementation: str, reasons: Sequence[str]):
        super().__init__(f"implementation {implementation!r} {'; '.join(reasons)}")
        self.implementation = implementation
        self.reasons = tuple(reasons)


class Granularity(enum.StrEnum):
    """The granularity of a cache's dequantisation factors."""

    NONE = "none"
    CACHE = "cache"  # one factor for the whole cache
    HEAD = "head"  # one for each kv head
    SLOT = "slot"  # one for each slot of each kv head

    @classmethod
    def of(cls, scale: Array | None) -> Self:
        """The granularity of a scale: [], [num_kv_heads], [num_blocks, num_kv_heads, block_size], or None."""
        return cls("none" if scale is None else {0: "cache", 1: "head", 3: "slot"}[scale.ndim])


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The facts of one layer's pools, without the number of their blocks.

    Attributes:
      num_kv_heads, head_size, block_size, layout: see `paged_jax.cache`.
      cache_dtype: the name of both caches' dtype.
      k_scale, v_scale: the granularities of the dequantisation factors.
      rows, row_size: rows of a slot, and elements of a row with padding, if the layout is `Interleaved`; otherwise 0.
    """

    num_kv_heads: int
    head_size: int
    block_size: int
    layout: Layout | Interleaved
    cache_dtype: str
    k_scale: Granularity
    v_scale: Granularity
    rows: int = 0
    row_size: int = 0

    @property
    def cache_itemsize(self) -> int:
        """Bytes of an element of the caches."""
        return jnp.dtype(self.cache_dtype).itemsize

    @property
    def key_x(self) -> int:
        """Neighbouring elements of a key in layout "vllm", which are 16 bytes."""
        return 16 // self.cache_itemsize

    @property
    def interleaved(self) -> bool:
        """Whether one pool holds keys and values."""
        return isinstance(self.layout, Interleaved)

    @property
    def has_pairs(self) -> bool:
        """Whether one pool holds each key beside its value, without padding."""
        return self.interleaved and (self.rows, self.row_size) == (2 * self.num_kv_heads, self.head_size)

    @classmethod
    def of(
        cls,
        value_cache: Array,
        head_size: int,
        layout: Layout | Interleaved,
        k_scale: Array | None,
        v_scale: Array | None,
    ) -> "Pool":
        """The facts of caches of keys and values, or of an `Interleaved` pool, which is then `value_cache`."""
        rows, row_size = value_cache.shape[2:] if isinstance(layout, Interleaved) else (0, 0)
        return Pool(
            num_kv_heads=num_kv_heads(value_cache, layout),
            head_size=head_size,
            block_size=value_cache.shape[block_axis(layout)],
            layout=layout,
            cache_dtype=value_cache.dtype.name,
            k_scale=Granularity.of(k_scale),
            v_scale=Granularity.of(v_scale),
            rows=rows,
            row_size=row_size,
        )

    @classmethod
    def of_latents(cls, latent_cache: Array, head_size: int, scale: Array | None) -> "Pool":
        """The facts of a latent cache, which has one kv head. The first `head_size` elements are the value."""
        return Pool.of(latent_cache[:, :, None], head_size, "nhd", scale, scale)


@dataclass(frozen=True, kw_only=True)
class Attention(Pool):
    """The facts of an attention call, without the sizes of its batch. Triton's kernels are compiled for these.

    Attributes:
      num_heads: query heads.
      query_dtype: the name of the dtype of the queries and of the output.
      per_head: whether the call has each of the options with one value for each head.
      sliding_window, logits_soft_cap, block_sparse, causal: as in `paged_jax.options.AttentionOptions`.
      latent_size: elements of a latent, whose first `head_size` elements are the value; None if the cache is no latent
        cache. A latent cache has one kv head.
    """

    num_heads: int
    query_dtype: str
    per_head: PerHead
    sliding_window: int | None
    logits_soft_cap: float | None
    block_sparse: BlockSparse | None
    causal: bool
    latent_size: int | None = None

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scaled_products(self) -> bool:
        """Whether a query's logits are just its products with the keys times one factor."""
        return self.logits_soft_cap is None and not any(self.per_head.in_logits)


@dataclass(frozen=True, kw_only=True)
class Problem(Attention):
    """Everything that is static in a call of an attention op.

    Attributes:
      num_seqs: rows of the block tables.
      num_tokens: rows of the batch, `copies` for each row of the query; in decode at most num_seqs.
      num_blocks: blocks in each cache.
      max_blocks_per_seq: columns of the block tables.
      max_seq_len: upper bound of the lengths, in tokens.
      max_query_len: upper bound of the query lengths.
      prefix: whether the call has new tokens' keys and values in arrays beside the caches.
      writes_tokens: whether the call writes its new tokens into the caches.
      partition_size: tokens of each partition in v2; None in the other ops.
      copies: rows of the batch for each row of the query, as in `paged_jax.options.AttentionOptions`.
    """

    num_seqs: int
    num_tokens: int
    num_blocks: int
    max_blocks_per_seq: int
    max_seq_len: int
    max_query_len: int
    prefix: bool = False
    writes_tokens: bool = False
    partition_size: int | None = None
    copies: int = 1

    @classmethod
    def of_call(
        cls,
        query: Array,
        key_cache: Array,
        value_cache: Array,
        block_tables: Array,
        options: AttentionOptions,
        *,
        prefix: bool = False,
        writes_tokens: bool = False,
        partition_size: int | None = None,
    ) -> "Problem":
        """The facts of a call, from its validated arrays and options."""
        pool = Pool.of(value_cache, query.shape[2], options.layout, options.k_scale, options.v_scale)
        made = cls._of(pool, query, value_cache.shape[0], block_tables, options)
        return dataclasses.replace(made, prefix=prefix, writes_tokens=writes_tokens, partition_size=partition_size)

    @classmethod
    def of_latents(
        cls, query: Array, latent_cache: Array, block_tables: Array, options: AttentionOptions, value_size: int
    ) -> "Problem":
        """The facts of a call of multi-head latent attention, from its validated arrays and options."""
        pool = Pool.of_latents(latent_cache, value_size, options.k_scale)
        made = cls._of(pool, query, latent_cache.shape[0], block_tables, options)
        return dataclasses.replace(made, latent_size=latent_cache.shape[2])

    @classmethod
    def _of(
        cls, pool: Pool, query: Array, num_blocks: int, block_tables: Array, options: AttentionOptions
    ) -> "Problem":
        num_tokens, num_heads, _ = query.shape
        window = options.sliding_window
        return Problem(
            **vars(pool),
            num_heads=num_heads,
            query_dtype=query.dtype.name,
            per_head=PerHead(*(array is not None for array in options.per_head)),
            sliding_window=None if window is None else min(window, LONGEST_CONTEXT),
            logits_soft_cap=options.logits_soft_cap,
            block_sparse=options.block_sparse,
            causal=options.causal,
            num_seqs=block_tables.shape[0],
            num_tokens=num_tokens * options.copies,
            num_blocks=num_blocks,
            max_blocks_per_seq=block_tables.shape[1],
            max_seq_len=options.max_seq_len,
            max_query_len=options.max_query_len,
            copies=options.copies,
        )

    @property
    def num_queries(self) -> int:
        """Rows of the query."""
        return self.num_tokens // self.copies

    @property
    def attention(self) -> Attention:
        """The facts that do not depend on a batch's sizes, so that a kernel compiled for them serves all sizes."""
        return Attention(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Attention)})


@dataclass(frozen=True)
class Device:
    """The facts of a GPU on which choices depend. The default is an H200, for machines without a GPU.

    Attributes:
      capability: compute capability times ten, 90 for 9.0; 0 for GPUs of other vendors.
      num_multiprocessors: streaming multiprocessors.
    """

    capability: int = 90
    num_multiprocessors: int = 132


def device() -> Device:
    """Returns the GPU for which the program is compiled: the first local one. Tests replace this function."""
    try:
        gpu = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return Device()
    capability = gpu.compute_capability.replace(".", "")
    return Device(int(capability) if capability.isdigit() else 0, gpu.core_count)


class OptionArrays(NamedTuple):
    """The options that are arrays, in the order in which kernels take them."""

    scale: Array
    per_head: PerHead
    k_scale: Array
    v_scale: Array

    @classmethod
    def of(cls, options: AttentionOptions) -> "OptionArrays":
        """The arrays of a call. `scale` takes the place of absent arrays, which no kernel reads."""

        def or_scale(array: Array | None) -> Array:
            return options.scale if array is None else array

        per_head = PerHead(*map(or_scale, options.per_head))
        return OptionArrays(options.scale, per_head, or_scale(options.k_scale), or_scale(options.v_scale))

    @property
    def flat(self) -> list[Array]:
        """All arrays, one after the other."""
        return jax.tree.leaves(self)
