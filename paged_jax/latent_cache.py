"""One layer's paged cache of latents, with methods that call the ops of multi-head latent attention on it."""

import dataclasses
from typing import Any, Literal, Self, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from paged_jax import cache_ops, ops
from paged_jax._dispatch import Implementation
from paged_jax.options import LatentQueryOptions
from paged_jax.shapes import (
    BlockMapping,
    BlockTables,
    LatentOut,
    LatentQuery,
    Latents,
    Lse,
    QueryStartLoc,
    RaggedLatentOut,
    RaggedLatentQuery,
    RaggedLse,
    SeqLens,
    SlotMapping,
    check_blocks,
    check_cache_dtype,
    check_latent_size,
    copied_scale,
    size,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedLatentCache:
    """The latents of one layer (DeepSeek's multi-head latent attention), and their scale; make it with `create`.

    Attributes:
      latent_cache: the pool, [num_blocks, block_size, latent_size]: a vector a token, the compressed latent beside the
        rotated key.
      latent_scale: f32 [], the dequantisation factor, or None for 1.

    Each method names the op that it calls with this pool and scale, and takes the other arguments of that op. Methods
    that write return a new cache.

    Example:
      Twenty tokens are written to blocks 5 and 2, and a query of 16 heads attends to them.

      >>> import jax.numpy as jnp
      >>> from paged_jax import PagedLatentCache
      >>> cache = PagedLatentCache.create(8, 16, 576, dtype=jnp.float8_e4m3fn, latent_scale=0.5)
      >>> latent, slots = jnp.ones((20, 576), jnp.bfloat16), jnp.arange(20, dtype=jnp.int32)
      >>> cache = cache.write(latent, jnp.where(slots < 16, 5 * 16 + slots, 2 * 16 + slots - 16))
      >>> query, block_tables = jnp.ones((1, 16, 576), jnp.bfloat16), jnp.array([[5, 2]], jnp.int32)
      >>> cache.attend(query, block_tables, jnp.array([20], jnp.int32), value_size=512, scale=0.1)[0, 0, :2]
      Array([1, 1], dtype=bfloat16)
    """

    # Any: a transformation may put other leaves than arrays here (specs, shapes, axes).
    latent_cache: Any
    latent_scale: Any = None

    @classmethod
    def create(
        cls,
        num_blocks: int,
        block_size: int,
        latent_size: int,
        *,
        dtype: DTypeLike = jnp.bfloat16,
        latent_scale: ArrayLike | None = None,
    ) -> Self:
        """Makes a cache of zeros.

        Args:
          num_blocks: blocks in the pool.
          block_size: tokens in a block, a power of two up to 256.
          latent_size: elements of a vector, a multiple of 16 up to 1024.
          dtype: the dtype of the pool: float16, bfloat16, float32, float8_e4m3fn, float8_e5m2 or int8.
          latent_scale: [], copied as float32; None for 1.

        Returns:
          The cache, on JAX's default device.

        Raises:
          ValueError, TypeError: a size, dtype or scale is not among those above, or int32 cannot count slots.
        """
        num_blocks, block_size = check_blocks(num_blocks, block_size)
        latent_size = size("latent_size", latent_size)
        check_latent_size(latent_size)
        shape = num_blocks, block_size, latent_size
        return cls(jnp.zeros(shape, check_cache_dtype(dtype)), copied_scale("latent_scale", latent_scale, ((),)))

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self.latent_cache.shape[0]

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.latent_cache.shape[1]

    @property
    def latent_size(self) -> int:
        """Elements of a token's vector."""
        return self.latent_cache.shape[2]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the pool."""
        return self.latent_cache.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the pool; the scale is not counted."""
        return self.latent_cache.size * self.dtype.itemsize

    def write(
        self, latent: Latents, slot_mapping: SlotMapping, *, implementation: Implementation | None = None
    ) -> Self:
        """Writes new tokens to their slots: `write_to_latent_cache`.

        Returns:
          The cache that holds the new tokens.
        """
        written = cache_ops.write_to_latent_cache(
            latent, self.latent_cache, slot_mapping, scale=self.latent_scale, implementation=implementation
        )
        return dataclasses.replace(self, latent_cache=written)

    # fmt: off
    @overload
    def attend(
        self, query: LatentQuery, block_tables: BlockTables, seq_lens: SeqLens, *, value_size: int, scale: Any,
        return_lse: Literal[False] = False, implementation: Implementation | None = None,
        **options: Unpack[LatentQueryOptions],
    ) -> LatentOut: ...
    @overload
    def attend(
        self, query: LatentQuery, block_tables: BlockTables, seq_lens: SeqLens, *, value_size: int, scale: Any,
        return_lse: Literal[True], implementation: Implementation | None = None, **options: Unpack[LatentQueryOptions],
    ) -> tuple[LatentOut, Lse]: ...
    # fmt: on
    def attend(
        self,
        query: LatentQuery,
        block_tables: BlockTables,
        seq_lens: SeqLens,
        *,
        value_size: int,
        scale: Any,
        return_lse: bool = False,
        implementation: Implementation | None = None,
        **options: Unpack[LatentQueryOptions],
    ) -> LatentOut | tuple[LatentOut, Lse]:
        """Decode attention over this cache: `mla_paged_attention`.

        Returns:
          out, or with return_lse ``(out, lse)``.
        """
        arrays = query, self.latent_cache, block_tables, seq_lens
        flags: Any = {"return_lse": return_lse, "implementation": implementation}
        return ops.mla_paged_attention(
            *arrays, value_size=value_size, scale=scale, **flags, **options, **self._contract
        )

    # fmt: off
    @overload
    def attend_ragged(
        self, query: RaggedLatentQuery, block_tables: BlockTables, seq_lens: SeqLens, query_start_loc: QueryStartLoc, *,
        value_size: int, scale: Any, causal: bool = True, return_lse: Literal[False] = False,
        implementation: Implementation | None = None, **options: Unpack[LatentQueryOptions],
    ) -> RaggedLatentOut: ...
    @overload
    def attend_ragged(
        self, query: RaggedLatentQuery, block_tables: BlockTables, seq_lens: SeqLens, query_start_loc: QueryStartLoc, *,
        value_size: int, scale: Any, causal: bool = True, return_lse: Literal[True],
        implementation: Implementation | None = None, **options: Unpack[LatentQueryOptions],
    ) -> tuple[RaggedLatentOut, RaggedLse]: ...
    # fmt: on
    def attend_ragged(
        self,
        query: RaggedLatentQuery,
        block_tables: BlockTables,
        seq_lens: SeqLens,
        query_start_loc: QueryStartLoc,
        *,
        value_size: int,
        scale: Any,
        causal: bool = True,
        return_lse: bool = False,
        implementation: Implementation | None = None,
        **options: Unpack[LatentQueryOptions],
    ) -> RaggedLatentOut | tuple[RaggedLatentOut, RaggedLse]:
        """Attention of ragged queries over this cache: `ragged_mla_attention`.

        Returns:
          out, or with return_lse ``(out, lse)``.
        """
        arrays = query, self.latent_cache, block_tables, seq_lens, query_start_loc
        flags: Any = {"causal": causal, "return_lse": return_lse, "implementation": implementation}
        return ops.ragged_mla_attention(
            *arrays, value_size=value_size, scale=scale, **flags, **options, **self._contract
        )

    def copy_blocks(self, block_mapping: BlockMapping, *, implementation: Implementation | None = None) -> Self:
        """Copies whole blocks within this cache: `copy_blocks`.

        Returns:
          The cache with the copies.
        """
        copied, _ = cache_ops.copy_blocks(self.latent_cache, None, block_mapping, implementation=implementation)
        return dataclasses.replace(self, latent_cache=copied)

    def swap_blocks_to(
        self, other: Self, block_mapping: BlockMapping, *, implementation: Implementation | None = None
    ) -> Self:
        """Copies whole blocks to another cache: `swap_blocks`.

        Args:
          other: the cache to write, of this one's dtype and block shape; its number of blocks may differ. Its scale
            must be equal, which is not checked.
          block_mapping: i32 [num_pairs, 2], (block of this cache, block of `other`); negative pairs are skipped.
          implementation: see `paged_jax.ops`.

        Returns:
          `other` with the copied blocks.

        Raises:
          ValueError, TypeError: the caches do not match, or a shape or dtype is wrong.
        """
        if (self.latent_scale is None) != (other.latent_scale is None):
            mine, others = ("no scale" if x.latent_scale is None else "a scale" for x in (self, other))
            raise ValueError(f"other must have {mine}, as this cache has, got one with {others}")
        pools = self.latent_cache, None, other.latent_cache, None
        swapped, _ = cache_ops.swap_blocks(*pools, block_mapping, implementation=implementation)
        return dataclasses.replace(other, latent_cache=swapped)

    @property
    def _contract(self) -> dict[str, Any]:
        """The keywords about this cache; the ops that move whole blocks take none of them."""
        return {"latent_scale": self.latent_scale}
