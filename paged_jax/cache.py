"""One layer's paged KV cache, with methods that call the ops on it."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Self, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from paged_jax import cache_ops, ops
from paged_jax._dispatch import Implementation
from paged_jax.options import Layout, QueryOptions, block_axis, head_axis
from paged_jax.shapes import (
    BlockMapping,
    BlockTables,
    Lse,
    NewTokens,
    Query,
    QueryStartLoc,
    RaggedLse,
    RaggedQuery,
    SeqLens,
    SlotMapping,
    cache_shapes,
    check_sizes,
    copied_scale,
)


class Contract(TypedDict):
    """The keywords about a cache that `write_to_paged_cache` and the attention ops take, besides its pools."""

    k_scale: Any
    v_scale: Any
    layout: Layout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKVCache:
    """The key and value pools of one layer, and the scales they were quantised with; make it with `create`.

    Attributes:
      key_cache, value_cache: the pools, of one dtype, in the shapes that `layout` gives:
        "hnd": both [num_blocks, num_kv_heads, block_size, head_size];
        "nhd": both [num_blocks, block_size, num_kv_heads, head_size];
        "vllm": key [num_blocks, num_kv_heads, head_size // x, block_size, x] with x = 16 // itemsize, value
          [num_blocks, num_kv_heads, head_size, block_size].
      k_scale, v_scale: f32 [], [num_kv_heads] or [num_blocks, num_kv_heads, block_size], or None for 1: factors of
        what the pools hold, by which a write divides if the pools' dtype has fewer bytes than what it writes.
      layout: one of the three above (static).

    Each method names the op that it calls with these pools, layout and scales, and takes the other arguments of that
    op. Methods that write return a new cache.

    Example:
      Twenty tokens are written to blocks 5 and 2, and a query attends to them.

      >>> import jax.numpy as jnp
      >>> from paged_jax import PagedKVCache
      >>> sizes = {"num_blocks": 8, "block_size": 16, "num_kv_heads": 2, "head_size": 64}
      >>> cache = PagedKVCache.create(**sizes, dtype=jnp.int8, layout="nhd", k_scale=0.1, v_scale=0.1)
      >>> key, slots = jnp.ones((20, 2, 64), jnp.bfloat16), jnp.arange(20, dtype=jnp.int32)
      >>> cache = cache.write(key, key, jnp.where(slots < 16, 5 * 16 + slots, 2 * 16 + slots - 16))
      >>> query, block_tables = jnp.ones((1, 8, 64), jnp.bfloat16), jnp.array([[5, 2]], jnp.int32)
      >>> cache.attend(query, block_tables, jnp.array([20], jnp.int32))[0, 0, :2]
      Array([1, 1], dtype=bfloat16)
    """

    # Any: a transformation may put other leaves than arrays here (specs, shapes, axes).
    key_cache: Any
    value_cache: Any
    k_scale: Any = None
    v_scale: Any = None
    layout: Layout = dataclasses.field(default="hnd", metadata={"static": True})

    @classmethod
    def create(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        *,
        dtype: DTypeLike = jnp.bfloat16,
        layout: Layout = "hnd",
        k_scale: ArrayLike | None = None,
        v_scale: ArrayLike | None = None,
    ) -> Self:
        """Makes a cache of zeros.

        Args:
          num_blocks: blocks in each pool.
          block_size: tokens in a block, a power of two up to 256.
          num_kv_heads: key and value heads.
          head_size: elements of a head, a multiple of 8 up to 512; for "vllm" also of x = 16 // itemsize.
          dtype: the dtype of both pools: float16, bfloat16, float32, float8_e4m3fn, float8_e5m2 or int8.
          layout: "hnd", "nhd" or "vllm".
          k_scale, v_scale: [], [num_kv_heads] or [num_blocks, num_kv_heads, block_size], copied as float32; None for 1.

        Returns:
          The cache, on JAX's default device.

        Raises:
          ValueError, TypeError: a size, dtype, layout or scale is not among those above, or int32 cannot count slots.
        """
        num_blocks, block_size, num_kv_heads, head_size = check_sizes(num_blocks, block_size, num_kv_heads, head_size)
        key_shape, value_shape = cache_shapes(num_blocks, block_size, num_kv_heads, head_size, dtype, layout)
        scale_shapes = ((), (num_kv_heads,), (num_blocks, num_kv_heads, block_size))
        k_scale = copied_scale("k_scale", k_scale, scale_shapes)
        v_scale = copied_scale("v_scale", v_scale, scale_shapes)
        return cls(jnp.zeros(key_shape, dtype), jnp.zeros(value_shape, dtype), k_scale, v_scale, layout)

    @property
    def num_blocks(self) -> int:
        """Blocks in each pool."""
        return self.value_cache.shape[0]

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.value_cache.shape[block_axis(self.layout)]

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        return self.value_cache.shape[head_axis(self.layout)]

    @property
    def head_size(self) -> int:
        """Elements of a head."""
        return self.value_cache.shape[2 if self.layout == "vllm" else 3]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of both pools."""
        return self.value_cache.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of both pools; scales are not counted."""
        return (self.key_cache.size + self.value_cache.size) * self.dtype.itemsize

    def partition_spec(self, axis_name: str) -> Self:
        """Makes the `PartitionSpec`s that split this cache's kv heads over a mesh axis.

        Args:
          axis_name: the mesh axis; its size must divide num_kv_heads.

        Returns:
          A `PagedKVCache` of the same structure whose leaves are `PartitionSpec`s. A scale for the whole cache is
          replicated; every other array is split along its axis of kv heads.
        """
        pool = PartitionSpec(*[None] * head_axis(self.layout), axis_name)
        # A scale is [], [num_kv_heads] or [num_blocks, num_kv_heads, block_size].
        scale = {0: PartitionSpec(), 1: PartitionSpec(axis_name), 3: PartitionSpec(None, axis_name)}
        k_scale, v_scale = (None if s is None else scale[np.ndim(s)] for s in (self.k_scale, self.v_scale))
        return dataclasses.replace(self, key_cache=pool, value_cache=pool, k_scale=k_scale, v_scale=v_scale)

    def write(
        self,
        key: NewTokens,
        value: NewTokens,
        slot_mapping: SlotMapping,
        *,
        implementation: Implementation | None = None,
    ) -> Self:
        """Writes new tokens to their slots: `write_to_paged_cache`.

        Returns:
          The cache that holds the new tokens.
        """
        pools = cache_ops.write_to_paged_cache(
            key, value, *self._pools, slot_mapping, **self._contract, implementation=implementation
        )
        return self._with(pools)

    # fmt: off
    @overload
    def attend(
        self, query: Query, block_tables: BlockTables, seq_lens: SeqLens, *, return_lse: Literal[False] = False,
        implementation: Implementation | None = None, **options: Unpack[QueryOptions],
    ) -> Query: ...
    @overload
    def attend(
        self, query: Query, block_tables: BlockTables, seq_lens: SeqLens, *, return_lse: Literal[True],
        implementation: Implementation | None = None, **options: Unpack[QueryOptions],
    ) -> tuple[Query, Lse]: ...
    # fmt: on
    def attend(
        self,
        query: Query,
        block_tables: BlockTables,
        seq_lens: SeqLens,
        *,
        return_lse: bool = False,
        implementation: Implementation | None = None,
        **options: Unpack[QueryOptions],
    ) -> Query | tuple[Query, Lse]:
        """Decode attention over this cache: `paged_attention`.

        Returns:
          out, or with return_lse ``(out, lse)``.
        """
        arrays = query, *self._pools, block_tables, seq_lens
        flags: Any = {"return_lse": return_lse, "implementation": implementation}
        return ops.paged_attention(*arrays, **flags, **options, **self._contract)

    # fmt: off
    @overload
    def write_and_attend(
        self, query: Query, key: NewTokens, value: NewTokens, block_tables: BlockTables, seq_lens: SeqLens,
        slot_mapping: SlotMapping, *, return_lse: Literal[False] = False, implementation: Implementation | None = None,
        **options: Unpack[QueryOptions],
    ) -> tuple[Query, Self]: ...
    @overload
    def write_and_attend(
        self, query: Query, key: NewTokens, value: NewTokens, block_tables: BlockTables, seq_lens: SeqLens,
        slot_mapping: SlotMapping, *, return_lse: Literal[True], implementation: Implementation | None = None,
        **options: Unpack[QueryOptions],
    ) -> tuple[Query, Lse, Self]: ...
    # fmt: on
    def write_and_attend(
        self,
        query: Query,
        key: NewTokens,
        value: NewTokens,
        block_tables: BlockTables,
        seq_lens: SeqLens,
        slot_mapping: SlotMapping,
        *,
        return_lse: bool = False,
        implementation: Implementation | None = None,
        **options: Unpack[QueryOptions],
    ) -> tuple[Query, Self] | tuple[Query, Lse, Self]:
        """Writes one new token for each sequence and computes decode attention: `write_and_attend`.

        Returns:
          ``(out, cache)``, or with return_lse ``(out, lse, cache)``.
        """
        arrays = query, key, value, *self._pools, block_tables, seq_lens, slot_mapping
        flags: Any = {"return_lse": return_lse, "implementation": implementation}
        *results, key_cache, value_cache = ops.write_and_attend(*arrays, **flags, **options, **self._contract)
        return *results, self._with((key_cache, value_cache))

    # fmt: off
    @overload
    def attend_ragged(
        self, query: RaggedQuery, block_tables: BlockTables, seq_lens: SeqLens, query_start_loc: QueryStartLoc, *,
        causal: bool = True, return_lse: Literal[False] = False, implementation: Implementation | None = None,
        **options: Unpack[QueryOptions],
    ) -> RaggedQuery: ...
    @overload
    def attend_ragged(
        self, query: RaggedQuery, block_tables: BlockTables, seq_lens: SeqLens, query_start_loc: QueryStartLoc, *,
        causal: bool = True, return_lse: Literal[True], implementation: Implementation | None = None,
        **options: Unpack[QueryOptions],
    ) -> tuple[RaggedQuery, RaggedLse]: ...
    # fmt: on
    def attend_ragged(
        self,
        query: RaggedQuery,
        block_tables: BlockTables,
        seq_lens: SeqLens,
        query_start_loc: QueryStartLoc,
        *,
        causal: bool = True,
        return_lse: bool = False,
        implementation: Implementation | None = None,
        **options: Unpack[QueryOptions],
    ) -> RaggedQuery | tuple[RaggedQuery, RaggedLse]:
        """Attention of ragged queries over this cache: `ragged_paged_attention`.

        Returns:
          out, or with return_lse ``(out, lse)``.
        """
        arrays = query, *self._pools, block_tables, seq_lens, query_start_loc
        flags: Any = {"causal": causal, "return_lse": return_lse, "implementation": implementation}
        return ops.ragged_paged_attention(*arrays, **flags, **options, **self._contract)

    # fmt: off
    @overload
    def attend_prefix(
        self, query: RaggedQuery, key: NewTokens, value: NewTokens, block_tables: BlockTables, seq_lens: SeqLens,
        query_start_loc: QueryStartLoc, *, causal: bool = True, return_lse: Literal[False] = False,
        implementation: Implementation | None = None, **options: Unpack[QueryOptions],
    ) -> RaggedQuery: ...
    @overload
    def attend_prefix(
        self, query: RaggedQuery, key: NewTokens, value: NewTokens, block_tables: BlockTables, seq_lens: SeqLens,
        query_start_loc: QueryStartLoc, *, causal: bool = True, return_lse: Literal[True],
        implementation: Implementation | None = None, **options: Unpack[QueryOptions],
    ) -> tuple[RaggedQuery, RaggedLse]: ...
    # fmt: on
    def attend_prefix(
        self,
        query: RaggedQuery,
        key: NewTokens,
        value: NewTokens,
        block_tables: BlockTables,
        seq_lens: SeqLens,
        query_start_loc: QueryStartLoc,
        *,
        causal: bool = True,
        return_lse: bool = False,
        implementation: Implementation | None = None,
        **options: Unpack[QueryOptions],
    ) -> RaggedQuery | tuple[RaggedQuery, RaggedLse]:
        """Attention of ragged queries over a context in this cache and new tokens: `prefix_attention`.

        Returns:
          out, or with return_lse ``(out, lse)``.
        """
        arrays = query, key, value, *self._pools, block_tables, seq_lens, query_start_loc
        flags: Any = {"causal": causal, "return_lse": return_lse, "implementation": implementation}
        return ops.prefix_attention(*arrays, **flags, **options, **self._contract)

    def copy_blocks(self, block_mapping: BlockMapping, *, implementation: Implementation | None = None) -> Self:
        """Copies whole blocks within this cache, with their scales if each slot has its own: `copy_blocks`.

        Returns:
          The cache with the copies.
        """
        keys, values = zip(self._pools, *self._slot_scales, strict=True)
        keys, values = cache_ops.copy_blocks(keys, values, block_mapping, implementation=implementation)
        return self._with(*zip(keys, values, strict=True))

    def swap_blocks_to(
        self, other: Self, block_mapping: BlockMapping, *, implementation: Implementation | None = None
    ) -> Self:
        """Copies whole blocks to another cache, with their scales if each slot has its own: `swap_blocks`.

        Args:
          other: the cache to write, of this one's layout, dtype, block shape and granularities of scales; its number of
            blocks may differ. Scales for the cache or a head are not copied; they must be equal, which is not checked.
          block_mapping: i32 [num_pairs, 2], (block of this cache, block of `other`); negative pairs are skipped.
          implementation: see `paged_jax.ops`.

        Returns:
          `other` with the copied blocks.

        Raises:
          ValueError, TypeError: the caches do not match, or a shape or dtype is wrong.
        """
        mine, others = self._form, other._form
        if mine != others:
            raise ValueError(f"other must have this cache's layout and granularities of scales {mine}, got {others}")
        layers = zip((self._pools, *self._slot_scales), (other._pools, *other._slot_scales), strict=True)
        swapped = [
            cache_ops.swap_blocks(*src, *dst, block_mapping, implementation=implementation) for src, dst in layers
        ]
        return other._with(*swapped)

    @property
    def _pools(self) -> tuple[Array, Array]:
        return self.key_cache, self.value_cache

    @property
    def _contract(self) -> Contract:
        """The keywords about this cache; the ops that move whole blocks take none of them."""
        return {"k_scale": self.k_scale, "v_scale": self.v_scale, "layout": self.layout}

    @property
    def _form(self) -> tuple:
        """The layout and the ranks of the scales, which two caches must share if blocks are to move between them."""
        return self.layout, *(None if scale is None else np.ndim(scale) for scale in (self.k_scale, self.v_scale))

    @property
    def _slot_scales(self) -> list[tuple[Array, Array]]:
        """The scales that have a value for each slot, as pools [num_blocks, num_kv_heads, block_size, 1] of one layer.

        In this form the ops that move blocks can move the scales too. Those ops take two pools for a layer: if only one
        of k_scale and v_scale has a value for each slot, it stands for both pools. The list is empty if neither has.
        """
        scales = [s[..., None] for s in (self.k_scale, self.v_scale) if s is not None and np.ndim(s) == 3]
        return [(scales[0], scales[-1])] if scales else []

    def _with(self, pools: Sequence[Array], slot_scales: tuple[Array, Array] | None = None) -> Self:
        """This cache with new pools and, if they are given, new scales for each slot (see `_slot_scales`)."""
        changes: dict[str, Any] = dict(zip(("key_cache", "value_cache"), pools, strict=True))
        if slot_scales is not None:
            for name, new in zip(("k_scale", "v_scale"), slot_scales, strict=True):
                if getattr(self, name) is not None and np.ndim(getattr(self, name)) == 3:
                    changes[name] = new[..., 0]
        return dataclasses.replace(self, **changes)
