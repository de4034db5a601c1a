"""The options of attention calls: the keywords that the ops take, and the validated form that implementations take."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypedDict

import jax
from jax import Array
from jaxtyping import Float

Layout = Literal["hnd", "nhd", "vllm"]
"""How one layer's pool of blocks lies in memory; `PagedKVCache` gives the shapes."""


@dataclass(frozen=True)
class Interleaved:
    """The layout of one pool [num_blocks, block_size, rows, row_size] that holds a layer's keys and its values.

    Row ``2 * h`` of a slot is the key of kv head h, and row ``2 * h + 1`` is its value. Ops that only read take the
    pool as key cache and as value cache. The write takes it as key cache, with None for the value cache, because its
    result can alias one operand only. `paged_jax.compat.rpa` makes such calls.

    Attributes:
      padding: the last rows of a slot that hold nothing. No op reads or writes them, nor what follows a head's elements
        in a longer row.
    """

    padding: int = 0


def head_axis(layout: Layout | Interleaved) -> int:
    """Which axis of both caches holds the kv heads; in an `Interleaved` pool it holds the rows of a slot."""
    return 1 if layout in ("hnd", "vllm") else 2


def block_axis(layout: Layout | Interleaved) -> int:
    """Which axis of the value cache holds the tokens of a block."""
    return 1 if isinstance(layout, Interleaved) else {"hnd": 2, "nhd": 1, "vllm": 3}[layout]


def num_kv_heads(cache: Any, layout: Layout | Interleaved) -> int:
    """How many kv heads a key cache or a value cache of this layout has."""
    size = cache.shape[head_axis(layout)]
    return (size - layout.padding) // 2 if isinstance(layout, Interleaved) else size


@dataclass(frozen=True)
class BlockSparse:
    """vLLM's block-sparse attention: local blocks plus every `vert_stride`-th block, shifted per head.

    A query in sparse block ``qb`` attends to sparse block ``kb`` of its sequence if and only if
    ``(kb + offset) % vert_stride == 0 or kb > qb - local_blocks``. The ``offset`` is
    ``(tp_rank * num_heads + head) * head_sliding_step + 1`` if `head_sliding_step` >= 0, and otherwise
    ``(tp_rank * num_kv_heads + kv_head) * -head_sliding_step + 1``. A `vert_stride` <= 1 turns the option off.

    Attributes:
      local_blocks: how many sparse blocks, up to the query's own, are always attended to.
      vert_stride: distance between the earlier blocks that are attended to, in sparse blocks.
      block_size: tokens in a sparse block, a multiple of the cache's block size.
      head_sliding_step: shift of the pattern from head to head (negative: from kv head to kv head).
      tp_rank: rank of this shard if the heads are split over devices.

    Example:
      Each query sees the last two blocks of 64 tokens, its own included, and one in eight of those before.

      >>> from paged_jax import BlockSparse
      >>> BlockSparse(local_blocks=2, vert_stride=8)
      BlockSparse(local_blocks=2, vert_stride=8, block_size=64, head_sliding_step=0, tp_rank=0)
    """

    local_blocks: int
    vert_stride: int
    block_size: int = 64
    head_sliding_step: int = 0
    tp_rank: int = 0


class QueryOptions(TypedDict, total=False):
    """The keywords of every attention op that do not describe the cache.

    Every keyword is None by default. With None `scale`, `max_seq_len` and `max_query_len` have the values named below,
    and every other option is off. Where nothing else is said, arrays may be traced, and numbers are static.

    Attributes:
      scale: f32 scalar, factor of the logits; None for ``head_size ** -0.5``. May be traced.
      alibi_slopes: f32 [num_heads]; adds ``slope * (key position - query position)`` to the logits.
      sliding_window: in tokens; a query at position i sees the positions t > i - sliding_window. Table entries of
        blocks that no query's window reaches are not read, so that they may be released (`allocator.release_before`).
      logits_soft_cap: up to 1e30; logits become ``cap * tanh(logit / cap)``, before ALiBi is added.
      sinks: f32 [num_heads]; a learned logit per head that joins the softmax's denominator and has no value.
      block_sparse: see `BlockSparse`; GPU kernels do not read the blocks that are not attended to.
      max_seq_len: upper bound of `seq_lens`, in tokens. None, or a larger number than this, stands for
        max_blocks_per_seq * block_size (for `prefix_attention` plus num_tokens). No query attends to tokens past it.
      max_query_len: in ragged ops an upper bound of the query lengths. None, or a larger number than this, stands for
        num_tokens. GPU kernels can be faster if they know that it is small. If a sequence has more queries, its results
        and those of padding may be anything. To the other ops, whose sequences have one query each, it says nothing.
    """

    scale: Float[Array, ""] | float | None
    alibi_slopes: Float[Array, "num_heads"] | None
    sliding_window: int | None
    logits_soft_cap: float | None
    sinks: Float[Array, "num_heads"] | None
    block_sparse: BlockSparse | None
    max_seq_len: int | None
    max_query_len: int | None


class Options(QueryOptions, total=False):
    """The keywords that every attention op takes: `QueryOptions`, and these about the cache.

    Attributes:
      k_scale, v_scale: f32 scalar, [num_kv_heads] or [num_blocks, num_kv_heads, block_size]; factors of what the caches
        hold, whatever their dtype, None for 1; int8 caches need both. May be traced.
      layout: the layout of both caches, default "hnd"; `PagedKVCache` gives the shapes.
    """

    k_scale: Float[Array, "..."] | float | None
    v_scale: Float[Array, "..."] | float | None
    layout: Layout


class LatentQueryOptions(TypedDict, total=False):
    """The keywords of the ops of multi-head latent attention that may be left out and do not describe the cache.

    Attributes:
      sinks, logits_soft_cap, max_seq_len, max_query_len: see `QueryOptions`.
    """

    sinks: Float[Array, "num_heads"] | None
    logits_soft_cap: float | None
    max_seq_len: int | None
    max_query_len: int | None


class LatentOptions(LatentQueryOptions, total=False):
    """The keywords of the ops of multi-head latent attention that may be left out.

    Attributes:
      latent_scale: f32 scalar, the cache's dequantisation factor, None for 1; int8 caches need one. May be traced.
    """

    latent_scale: Float[Array, ""] | float | None


class PerHead(NamedTuple):
    """The options that have a value for each query head, in the order in which kernels take them.

    Declare a new one that changes logits here and in `QueryOptions`: its check, its fact in `kernels.problem.Problem`
    and its place among the kernels' arrays follow from these two. One that joins the sum of a head's softmax, as sinks
    do, needs no field: kernels/README.md says how it becomes part of `sinks`.

    Attributes:
      alibi_slopes, sinks: in `AttentionOptions`, f32 [num_heads] arrays or None; in `kernels.problem.Problem`, whether
        the call has such an array; in device code, references to the arrays.
    """

    alibi_slopes: Any = None
    sinks: Any = None

    @property
    def in_logits(self) -> "PerHead":
        """The options that change a head's logits; the others are None here."""
        return self._replace(sinks=None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionOptions:
    """The validated options of one attention call, a pytree: arrays are its leaves, everything else is static.

    The ops of multi-head latent attention take the same options: both scales are latent_scale, and `layout` is "nhd".

    Attributes:
      scale: f32 [], factor of the logits.
      per_head: the options that are f32 [num_heads].
      k_scale, v_scale: f32 [], [num_kv_heads] or [num_blocks, num_kv_heads, block_size], or None.
      layout: the layout of both caches.
      max_seq_len: upper bound of `seq_lens`, in tokens.
      max_query_len: upper bound of the query lengths: at most num_tokens in ragged ops, and 1 in the others.
      sliding_window: in tokens, or None.
      logits_soft_cap: cap of ``cap * tanh(logit / cap)``, or None.
      block_sparse: the pattern, whose `vert_stride` is above 1, or None.
      causal: whether a query sees only the tokens up to its own position; if not, it sees all of its sequence's.
      copies: rows of a ragged batch for each row of the query: 1 in public ops, or 2, and then the results of a query's
        rows are merged. Row i of the batch is query ``i % num_queries``. The last sequences of the batch, one for each
        query in order, have the second rows as their only queries.
    """

    scale: Array
    per_head: PerHead
    k_scale: Array | None
    v_scale: Array | None
    layout: Layout | Interleaved = field(metadata={"static": True})
    max_seq_len: int = field(metadata={"static": True})
    max_query_len: int = field(metadata={"static": True})
    sliding_window: int | None = field(metadata={"static": True})
    logits_soft_cap: float | None = field(metadata={"static": True})
    block_sparse: BlockSparse | None = field(metadata={"static": True})
    causal: bool = field(default=True, metadata={"static": True})
    copies: int = field(default=1, metadata={"static": True})
