"""The batch that a model is given in each step, and the one int32 array in which it travels to the device.

The host packs all numbers of a step into one array, because every transfer has a cost that does not depend on its
size. Block tables are large and hardly change: the device keeps one for each seat, and a step brings the block of each
row's last token only. The runner sends all other changes before the step. Positions and slots are not sent either: the
device computes them from the lengths and the block tables. The sampling parameters (`Draws`) come last in the array, so
that the program that runs the model can hand them to the program that draws tokens as one slice.
"""

import dataclasses
import functools
import itertools
import json
import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import export
from jaxtyping import Array, Float32, Int32

from paged_jax.cache import PagedKVCache
from paged_jax.engine.shared_prefixes import SharedPrefixes
from paged_jax.latent_cache import PagedLatentCache
from paged_jax.metadata import AttentionMetadata

type Cache = PagedKVCache | PagedLatentCache
type Caches = tuple[Cache, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """The new tokens of a step, row after row. Every step takes a batch, in an engine or in a loop without one.

    A row is the new tokens of one sequence: one token if the sequence decodes, or else a chunk of its prompt (after a
    preemption, of its output too). Rows with more than one token come first. Rows of padding have no tokens and come
    last. An engine gives every field; a caller without one may leave out those that have a default.

    In an engine whose layers have different sliding windows (`Engine`'s `sliding_windows`), layers of one window share
    tables and slots, and each group of layers has its own: `for_window` gives the batch that a group sees.

    Attributes:
      token_ids: i32 [num_tokens]; tokens at or past `query_start_loc[-1]` are padding.
      positions: i32 [num_tokens], each token's place in its sequence, from 0; 0 for padding.
      slot_mapping: i32 [num_tokens], the slot that each token's key and value are written to; -1 for padding. With
        `windows` one such array for each group.
      block_tables: i32 [num_seqs, max_blocks_per_seq]; they already list the blocks of the new tokens. Entries behind
        a row's last block may hold anything, and so may entries of blocks outside all new tokens' windows. With
        `windows` one such array for each group.
      seq_lens: i32 [num_seqs], tokens of each sequence, the new ones included; 0 for padding.
      query_start_loc: i32 [num_seqs + 1], where each row's new tokens start; None only if `is_decode`.
      logit_rows: i32 [num_rows], the tokens whose logits are wanted; an engine's are [num_seqs], or [num_tokens] in a
        step that verifies drafts. Several entries may name one token; entries of padding name token 0. None for all
        tokens.
      is_decode: whether token i is the one new token of row i, and no row reads a slot that another row writes
        (static): a model may then write and attend in one op.
      num_prompts: how many rows, counted from the first, may have more than one token (static); 0 if `is_decode`, None
        if that is not known.
      windows: the sliding window of each group of layers, None for the layers that see everything (static); empty if
        all layers share tables and slots.
      prefixes: `SharedPrefixes` of a decode batch whose rows share any, which an engine with `max_shared_prefixes`
        gives. A model may use it in layers of full attention, or ignore it.

    Example:
      Two sequences decode: tokens 7 and 9 are at positions 4 and 0.

      >>> import jax.numpy as jnp
      >>> from paged_jax.engine import Batch
      >>> i32 = lambda *numbers: jnp.array(numbers, jnp.int32)
      >>> batch = Batch(
      ...     token_ids=i32(7, 9), positions=i32(4, 0), slot_mapping=i32(20, 8), block_tables=i32([2, 5], [2, -1]),
      ...     seq_lens=i32(5, 1), query_start_loc=i32(0, 1, 2), logit_rows=i32(0, 1), is_decode=True, num_prompts=0,
      ... )
      >>> batch.attention_metadata(block_size=4).context_lens
      Array([4, 0], dtype=int32)
    """

    # Any: a transformation may put other leaves than arrays here (specs, shapes, axes).
    token_ids: Any
    positions: Any
    slot_mapping: Any
    block_tables: Any
    seq_lens: Any
    query_start_loc: Any = None
    logit_rows: Any = None
    is_decode: bool = dataclasses.field(default=False, metadata={"static": True})
    num_prompts: int | None = dataclasses.field(default=None, metadata={"static": True})
    windows: tuple[int | None, ...] = dataclasses.field(default=(), metadata={"static": True})
    prefixes: SharedPrefixes | None = None

    def for_window(self, sliding_window: int | None) -> "Batch":
        """Gives the batch as the layers of one window see it: with their group's tables and slots alone.

        Args:
          sliding_window: the layers' window, None for layers that see everything. A window that no sequence outgrows
            counts as none.

        Returns:
          A batch without `windows`; the batch itself, if it has none.

        Raises:
          ValueError: no group has this window.
        """
        if not self.windows:
            return self
        window = sliding_window if sliding_window in self.windows else None
        if window not in self.windows:
            raise ValueError(f"sliding_window must be one of the engine's {self.windows}, got {sliding_window}")
        group = self.windows.index(window)
        slots, tables = self.slot_mapping[group], self.block_tables[group]
        return dataclasses.replace(self, slot_mapping=slots, block_tables=tables, windows=())

    def attention_metadata(self, block_size: int) -> AttentionMetadata:
        """Gives the same batch to a model that is written for `AttentionMetadata`.

        Args:
          block_size: tokens in a block.

        Returns:
          The metadata. The rows of a decode batch count as decodes, all rows of any other batch as prefills.

        Raises:
          ValueError: the batch has `windows`, or it has no `query_start_loc`, and `is_decode` is False.
        """
        if self.windows:
            raise ValueError("each group of layers has tables of its own: take the batch that for_window gives")
        num_seqs, num_tokens = self.seq_lens.shape[0], self.token_ids.shape[0]
        longest = self.block_tables.shape[1] * block_size
        start = jnp.zeros(1, jnp.int32)
        query_start_loc = self.query_start_loc
        if query_start_loc is None:
            if not self.is_decode:
                raise ValueError("a batch must have query_start_loc unless is_decode is True, got None")
            query_start_loc = jnp.concatenate([start, jnp.cumsum(self.seq_lens > 0, dtype=jnp.int32)])
        query_lens = jnp.diff(query_start_loc)
        return AttentionMetadata(
            slot_mapping=self.slot_mapping,
            seq_lens=self.seq_lens,
            query_start_loc=query_start_loc,
            seq_start_loc=jnp.concatenate([start, jnp.cumsum(self.seq_lens, dtype=jnp.int32)]),
            context_lens=self.seq_lens - query_lens,
            block_tables=self.block_tables,
            num_prefills=0 if self.is_decode else num_seqs,
            num_prefill_tokens=0 if self.is_decode else num_tokens,
            num_decode_tokens=num_tokens if self.is_decode else 0,
            max_query_len=1 if self.is_decode else num_tokens,
            max_prefill_seq_len=0 if self.is_decode else longest,
            max_decode_seq_len=longest if self.is_decode else 0,
        )


# This lets `jax.export` serialise a step that takes a batch.
export.register_pytree_node_serialization(
    Batch,
    serialized_name="paged_jax.engine.Batch",
    serialize_auxdata=lambda static: json.dumps(static).encode(),
    deserialize_auxdata=lambda data: tuple(tuple(x) if isinstance(x, list) else x for x in json.loads(data)),
)


class Step(Protocol):
    """The function that a model offers to an engine; the engine jits it.

    Unless `batch.is_decode`, a step must in every layer write the keys and values of all new tokens before it attends,
    because a sequence may read blocks that another sequence writes in the same step.

    Example:
      A model of one layer without weights, whose queries, keys and values are its tokens' ids.

      >>> import jax.numpy as jnp
      >>> def step(weights, caches, batch):
      ...     (cache,) = caches
      ...     x = jnp.broadcast_to(batch.token_ids[:, None, None], (batch.token_ids.size, 1, 8)).astype(cache.dtype)
      ...     cache = cache.write(x, x, batch.slot_mapping)
      ...     out = cache.attend_ragged(x, batch.block_tables, batch.seq_lens, batch.query_start_loc)
      ...     return out[batch.logit_rows, 0].astype(jnp.float32), (cache,)
    """

    def __call__(
        self, weights: Any, caches: Caches, batch: Batch, /
    ) -> tuple[Float32[Array, "num_logits vocab_size"], Caches]:
        """Runs the model over the new tokens.

        Args:
          weights: any pytree of arrays; dicts and tuples cost the host least.
          caches: one for each layer; the engine donates them.
          batch: the new tokens.

        Returns:
          The logits that follow the tokens `batch.logit_rows`, f32 [num_logits, vocab_size], and the caches.
        """
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draws:
    """How the next tokens are drawn. Every array has one entry for each of the batch's `logit_rows`.

    Attributes:
      seats: i32, the seat whose last token is replaced by the drawn one; out of range for padding.
      temperature, top_p: f32, as in `SamplingParams`.
      top_k: i32, as in `SamplingParams`.
      seed_high, seed_low: i32, the upper and the lower 32 bits of the seed.
      index: i32, the index of the sample in its request.
      position: i32, the position of the token that is drawn.
      scored: i32, the token whose log-probability is wanted; -1 for the drawn one's.
    """

    seats: Any
    temperature: Any
    top_k: Any
    top_p: Any
    seed_high: Any
    seed_low: Any
    index: Any
    position: Any
    scored: Any

    @staticmethod
    def size(num_rows: int) -> int:
        """How many elements the packed array of `num_rows` rows has."""
        return num_rows * len(_DRAWS)

    @staticmethod
    def unpack(packed: Int32[Array, " size"]) -> "Draws":
        """Splits a packed array into its fields, on the device."""
        parts = dict(zip(_DRAWS, packed.reshape(len(_DRAWS), -1), strict=True))
        for name in FLOATS:
            parts[name] = jax.lax.bitcast_convert_type(parts[name], jnp.float32)
        return Draws(**parts)


_DRAWS = tuple(field.name for field in dataclasses.fields(Draws))
FLOATS = "temperature", "top_p"  # the fields of `Draws` that are f32; the packed array holds their bits as int32


class StepShape(NamedTuple):
    """The static sizes for which a step is compiled.

    Attributes:
      num_tokens, num_rows: tokens and rows of the batch, padding included.
      max_blocks_per_seq: columns of the block tables.
      is_decode, num_prompts: as in `Batch`.
      num_groups: how many groups of layers there are. Each group has its own block tables.
      is_verify: whether the logits of as many places as there are tokens are wanted, to verify drafts.
      num_prefixes: how many shared prefixes there may be.

    Example:
      >>> from paged_jax.engine import StepShape
      >>> StepShape(num_tokens=8, num_rows=8, max_blocks_per_seq=4, is_decode=True, num_prompts=0).is_decode
      True
    """

    num_tokens: int
    num_rows: int
    max_blocks_per_seq: int
    is_decode: bool
    num_prompts: int
    num_groups: int = 1
    is_verify: bool = False
    num_prefixes: int = 0

    @property
    def num_logits(self) -> int:
        """How many tokens' logits are wanted, padding included."""
        return self.num_tokens if self.is_verify else self.num_rows

    @property
    def size(self) -> int:
        """How many elements the packed array has."""
        return _layout(self)[-1][1].stop

    def split(self, packed: Any) -> dict[str, Any]:
        """Splits the packed array, i32 [size], into its fields: views of a NumPy array, slices of a traced one."""
        return {name: packed[part].reshape(shape) for name, part, shape in _layout(self)}

    def unpack(
        self,
        packed: Int32[Array, " size"],
        last_tokens: Int32[Array, " num_seats"],
        tables: tuple[Int32[Array, "num_seats max_blocks_per_seq"], ...],
        block_size: int,
        windows: tuple[int | None, ...],
    ) -> tuple[Batch, Int32[Array, " num_draws"], tuple[Int32[Array, "num_seats max_blocks_per_seq"], ...]]:
        """Makes a batch of the packed array, on the device.

        Args:
          packed: i32 [size]; a negative token id ``-1 - seat`` stands for that seat's last token.
          last_tokens: i32 [num_seats], the last token that was drawn for each seat.
          tables: for each group i32 [num_seats, max_blocks_per_seq], each seat's block table, without the blocks of
            the rows' last tokens.
          block_size: tokens in a block.
          windows: the groups' sliding windows.

        Returns:
          The batch, the packed `Draws` that say how to draw from its logits, and the tables with those blocks.
        """
        parts = self.split(packed)
        ids, seats, lens = parts["token_ids"], parts["row_seats"], parts["seq_lens"]
        start, logit_rows = parts["query_start_loc"], parts["logit_rows"]
        ids = jnp.where(ids < 0, last_tokens[jnp.maximum(-1 - ids, 0)], ids)
        token = jnp.arange(self.num_tokens, dtype=jnp.int32)
        if self.is_decode:
            row, positions, is_token = token, lens - 1, lens > 0
        else:
            row = jnp.searchsorted(start[1:], token, side="right").astype(jnp.int32)
            is_token = row < self.num_rows
            row = jnp.where(is_token, row, 0)
            positions = lens[row] - start[row + 1] + token
        positions = jnp.where(is_token, positions, 0)
        columns = (lens - 1) // block_size
        all_tables = tuple(
            table.at[seats, columns].set(blocks, mode="drop")
            for table, blocks in zip(tables, parts["row_blocks"], strict=True)
        )
        rows = tuple(table.at[seats].get(mode="clip") for table in all_tables)
        found = (table[row, positions // block_size] * block_size + positions % block_size for table in rows)
        slots = tuple(jnp.where(is_token, slot, -1) for slot in found)
        is_one = len(windows) == 1
        batch = Batch(
            ids,
            positions,
            slots[0] if is_one else slots,
            rows[0] if is_one else rows,
            lens,
            start,
            logit_rows,
            is_decode=self.is_decode,
            num_prompts=self.num_prompts,
            windows=() if is_one else windows,
            prefixes=self._prefixes(parts, rows[0], block_size) if self.num_prefixes else None,
        )
        return batch, packed[self.size - Draws.size(self.num_logits) :], all_tables

    def _prefixes(self, parts: dict[str, Any], tables: Any, block_size: int) -> SharedPrefixes:
        """The shared prefixes, whose blocks are the first ones of their first rows' tables."""
        starts, prefix_lens, lens = parts["prefix_starts"], parts["prefix_lens"], parts["seq_lens"]
        row = jnp.arange(self.num_rows, dtype=jnp.int32)
        prefix = jnp.searchsorted(starts[1:], row, side="right")
        skipped = jnp.where(row < starts[-1], prefix_lens.at[prefix].get(mode="clip"), 0)
        columns = jnp.arange(tables.shape[1], dtype=jnp.int32)[None] + skipped[:, None] // block_size
        own_tables = jnp.take_along_axis(tables, jnp.minimum(columns, tables.shape[1] - 1), axis=1)
        first = jnp.minimum(starts[:-1], self.num_rows - 1)
        return SharedPrefixes(tables[first], prefix_lens, starts, own_tables, lens - skipped).joined()


@functools.lru_cache(maxsize=1024)
def _layout(shape: StepShape) -> tuple[tuple[str, slice, tuple[int, ...]], ...]:
    """The arrays that are packed into one, in their order: their names, their places and their shapes."""
    rows = (shape.num_rows,)
    shapes = {
        "token_ids": (shape.num_tokens,),
        "row_seats": rows,
        "row_blocks": (shape.num_groups, shape.num_rows),
        "seq_lens": rows,
        "query_start_loc": (shape.num_rows + 1,),
        "logit_rows": (shape.num_logits,),
        "prefix_starts": (shape.num_prefixes + 1,),
        "prefix_lens": (shape.num_prefixes,),
        **dict.fromkeys(_DRAWS, (shape.num_logits,)),
    }
    ends = list(itertools.accumulate(map(math.prod, shapes.values()), initial=0))
    return tuple((name, slice(*ends[i : i + 2]), shapes[name]) for i, name in enumerate(shapes))
