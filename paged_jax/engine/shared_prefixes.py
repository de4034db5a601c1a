"""The prefixes that rows of a decode step share, as a model is given them, and attention that reads each once."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jaxtyping import Array

from paged_jax.cache import PagedKVCache
from paged_jax.ops import merge_attention_states
from paged_jax.ops.shared import attend_in_one_call


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedPrefixes:
    """Prefixes that rows of a decode batch share, so that each is read once for all of its rows.

    Attributes:
      tables: i32 [num_prefixes, max_blocks_per_seq], the blocks of each prefix.
      lens: i32 [num_prefixes], tokens of each prefix; 0 for padding.
      start_loc: i32 [num_prefixes + 1], where the rows of each prefix start; later rows share none.
      own_tables: i32 [num_seqs, max_blocks_per_seq], each row's blocks behind its prefix.
      own_lens: i32 [num_seqs], each row's tokens behind its prefix, the new one included.
      batch: the tables, lengths and starts of a ragged batch of the prefixes and then of all rows, which `joined` adds.

    Example:
      Two sequences of 6 and 7 tokens share block 2.

      >>> import jax.numpy as jnp
      >>> from paged_jax import PagedKVCache
      >>> from paged_jax.engine import SharedPrefixes
      >>> i32 = lambda *numbers: jnp.array(numbers, jnp.int32)
      >>> shared = SharedPrefixes(
      ...     tables=i32([2, 0]), lens=i32(4), start_loc=i32(0, 2), own_tables=i32([5, 0], [6, 0]), own_lens=i32(2, 3)
      ... )
      >>> cache = PagedKVCache.create(num_blocks=8, block_size=4, num_kv_heads=1, head_size=8)
      >>> shared.attend(jnp.ones((2, 1, 8), jnp.bfloat16), cache).shape
      (2, 1, 8)
    """

    tables: Any
    lens: Any
    start_loc: Any
    own_tables: Any
    own_lens: Any
    batch: Any = None

    def joined(self) -> "SharedPrefixes":
        """Adds `batch`, with which one call can attend to everything; that is faster on Hopper GPUs.

        The batch has the rows of the decode batch twice. A sequence for each prefix has the prefix's rows as queries, a
        sequence without tokens has the rows that share none, and a sequence for each row has its own tokens. A step
        makes it once for all layers.

        Returns:
          The same prefixes, with `batch`.
        """
        width = max(self.tables.shape[1], self.own_tables.shape[1])
        tables = [jnp.pad(table, ((0, 0), (0, width - table.shape[1]))) for table in (self.tables, self.own_tables)]
        none, num_seqs = jnp.zeros((1, width), jnp.int32), self.own_lens.shape[0]
        rows = jnp.arange(num_seqs, 2 * num_seqs + 1, dtype=jnp.int32)
        batch = (
            jnp.concatenate([tables[0], none, tables[1]]),
            jnp.concatenate([self.lens, none[0, :1], self.own_lens]),
            jnp.concatenate([self.start_loc, rows]),
        )
        return dataclasses.replace(self, batch=batch)

    def attend(self, query: Any, cache: PagedKVCache, **options: Any) -> Array:
        """Attends to the prefixes with all their rows, and to each row's own tokens, and merges both.

        Args:
          query: [num_seqs, num_heads, head_size].
          cache: a layer's cache, which holds the new tokens already.
          options: of the attention ops, except options that look at positions or change the softmax: sliding
            windows, ALiBi, sinks and block-sparse patterns.

        Returns:
          The result of `cache.attend` with the whole tables, up to rounding.
        """
        if self.batch is not None and (out := self._attend_in_one_call(query, cache, options)) is not None:
            return out
        options |= {"return_lse": True}
        prefix = cache.attend_ragged(query, self.tables, self.lens, self.start_loc, causal=False, **options)
        own = cache.attend(query, self.own_tables, self.own_lens, **options)
        return merge_attention_states(*prefix, *own)[0]

    def _attend_in_one_call(self, query: Any, cache: PagedKVCache, options: dict[str, Any]) -> Array | None:
        """Attends to `batch`; None where the two calls of `attend` are faster."""
        contract = {"k_scale": cache.k_scale, "v_scale": cache.v_scale, "layout": cache.layout}
        return attend_in_one_call(query, cache.key_cache, cache.value_cache, *self.batch, **options, **contract)


# This lets `jax.export` serialise a step that takes a batch with prefixes.
export.register_pytree_node_serialization(
    SharedPrefixes,
    serialized_name="paged_jax.engine.SharedPrefixes",
    serialize_auxdata=lambda _: b"",
    deserialize_auxdata=lambda _: (),
)
