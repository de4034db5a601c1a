"""One step of a decoder as a plain function of arrays: `step(weights, caches, batch) -> (logits, caches)`.

A step takes new tokens of many sequences. The new tokens of a sequence are a prompt, a chunk of one, or one token that
was drawn. An engine needs to know no more than this of a model. The weights are plain dicts of arrays, because a call
of a jitted function with an `nnx.State` of hundreds of arrays takes milliseconds of the host's time.

    model ──► make_step ──► weights, step            jax.jit(step, donate_argnums=1)(weights, caches, batch)

A batch is `paged_jax.engine.Batch`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float32

from examples.attend import by_window, decode_attend, mixed_attend, prefill_attend
from examples.config import DecoderConfig
from examples.decoder import Attend, Decoder
from examples.sharding import all_reduce_options
from paged_jax import Implementation, PagedKVCache, PagedLatentCache
from paged_jax.engine import Batch

if TYPE_CHECKING:
    from examples.all_reduce import PeerSum
    from examples.spread_sum import SpreadSum

type Weights = dict[Any, Any]
type Caches = tuple[PagedKVCache | PagedLatentCache, ...]

_PEERS = "peers"  # the name among the weights of the table that finds the other GPUs' memory
_MOST_DECODES = 256  # tokens of a step that is taken for one of decode
_LEAST_IN_PIECE = 2048  # tokens
_TILE = 128  # rows of a product that a program computes: pieces end between tiles
# While one piece's sums travel, another piece's products run; and no piece waits for another to travel together.
_IN_PIECES = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_all_reduce_combine_threshold_bytes": 0,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 0,
    "xla_gpu_all_gather_combine_threshold_bytes": 0,
}


def xla_options(
    num_tokens: int,
    *,
    weights: Any = None,
    mesh: Mesh | None = None,
    peers: "PeerSum | None" = None,
    pieces: int = 1,
) -> dict[str, Any]:
    """XLA's options for a step of this many tokens, for `jax.jit(step, compiler_options=...)`.

    With Triton, XLA splits the sums of a product over programs, and the next kernel adds up what they leave. That pays
    for few rows. From 64 rows on, up to the 512 that were measured, cuBLAS was as fast or faster: it can add to the
    residual stream too. XLA tries cuBLAS's kernels out, and has been misled where other programs compiled meanwhile. So
    cuBLAS chooses by itself where its choice was as good: for 64 to 127 and for 256 to 511 rows (benchmarks/LOG.md,
    "Steps of 64 to 512 rows"). For cuBLAS, XLA would join matrices that multiply the same input in each step, such as
    q_proj and kv_a_proj of latent attention: that reads and writes them once more.

    `pieces` is the argument of `make_step`. XLA overlaps them with options that not all backends know.
    """
    by_xla = peers is None or num_tokens > peers.most_rows
    options = all_reduce_options(weights, mesh) if by_xla and num_tokens <= _MOST_DECODES else {}
    if mesh is not None and mesh.devices.flat[0].platform == "gpu" and len(_bounds(num_tokens, pieces)) > 2:
        options |= _IN_PIECES
    if num_tokens < 64:
        return options
    without_trials = num_tokens < 128 or 256 <= num_tokens < 512
    options |= {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
    return options | ({"xla_gpu_autotune_level": 0} if without_trials else {})


type Step = Callable[[Weights, Caches, Batch], tuple[Float32[Array, "num_rows vocab_size"], Caches]]


def make_step(
    model: Decoder,
    *,
    implementation: Implementation | None = None,
    peers: "PeerSum | None" = None,
    pieces: int = 1,
    spread: "SpreadSum | None" = None,
) -> tuple[Weights, Step]:
    """Separates a decoder into its weights and the function that runs a step with them.

    Args:
        model: the decoder.
        implementation: the implementation of the paged ops, None for the library's choice.
        peers: adds up the devices' parts of decode steps (`examples.sharding.peer_sum`); None to leave that to XLA.
        pieces: into how many pieces several devices cut a step of many tokens, so that the sums of one travel while
            another is computed. If more than one, no row of a batch may read a slot that a later row writes.
        spread: adds up the pieces (`examples.spread_sum`); None to leave that to XLA.

    Returns:
        The weights, nested dicts of the model's arrays and the table of `peers`, and `step(weights, caches, batch) ->
        (logits, caches)`. The caller jits the step and donates its caches. Logits are f32 `[num_rows, vocab_size]`, or
        `[num_tokens, vocab_size]` if the batch has no `logit_rows`.
    """
    graphdef, state = nnx.split(model)

    def step(weights: Weights, caches: Caches, batch: Batch):
        parameters = {name: value for name, value in weights.items() if name != _PEERS}
        model = nnx.merge(graphdef, parameters)  # only while JAX traces: the compiled step has no trace of it
        is_whole = batch.is_decode or model.config.num_parts == 1
        bounds = _bounds(len(batch.token_ids), 1 if is_whole else pieces)
        if len(bounds) > 2 or (spread is not None and not is_whole):
            return _run_pieces(model, caches, batch, bounds, implementation, spread)
        attend = _attend_by_window(model, batch, implementation)
        adder, logit_rows = None, batch.logit_rows
        if peers is not None and _most_rows(batch) <= peers.most_rows:
            adder = dataclasses.replace(peers, table=weights[_PEERS])
        hidden, caches = model(batch.token_ids, batch.positions, caches, attend, logit_rows, adder)
        return model.logits(hidden, is_normed=adder is not None), caches

    return nnx.to_pure_dict(state) | ({} if peers is None else {_PEERS: peers.table}), step


def _bounds(num_tokens: int, pieces: int) -> list[int]:
    """Where the pieces of a step begin, and the last one's end. A step of few tokens has fewer pieces."""
    pieces = max(1, min(pieces, num_tokens // _LEAST_IN_PIECE))
    return [num_tokens * i // pieces // _TILE * _TILE for i in range(pieces)] + [num_tokens]


def _run_pieces(
    model: Decoder,
    caches: Caches,
    batch: Batch,
    bounds: Sequence[int],
    implementation: Implementation | None,
    spread: "SpreadSum | None",
):
    """Runs a step as one program for each piece of the tokens, which XLA interleaves.

    In every layer a piece attends to a cache that all pieces before it have written. So a row may lie in several.
    """
    found = []
    for piece in itertools.pairwise(bounds):
        part = _piece_of(batch, *piece)
        attend = _in_order(_attend_by_window(model, part, implementation))
        hidden, caches = model(part.token_ids, part.positions, caches, attend, part.logit_rows, spread)
        found.append(hidden)
    if batch.logit_rows is None:
        return model.logits(jnp.concatenate(found), is_normed=spread is not None), caches
    hidden = found[0]
    for begin, of_piece in zip(bounds[1:-1], found[1:], strict=True):
        hidden = jnp.where((batch.logit_rows >= begin)[:, None], of_piece, hidden)
    return model.logits(hidden, is_normed=spread is not None), caches


def _in_order(attend: Attend) -> Attend:
    """Makes the next piece's write to a cache wait for a piece's attention; or else XLA may copy the pool for it."""

    def attend_before_next(query, key, value, cache, **options):
        return jax.lax.optimization_barrier(attend(query, key, value, cache, **options))

    return attend_before_next


def _piece_of(batch: Batch, begin: int, end: int) -> Batch:
    """The tokens of a batch from `begin` to `end`. All rows stay; those without a token there have none."""
    if (starts := batch.query_start_loc) is None:
        raise ValueError("a batch must have query_start_loc unless is_decode is True, got None")
    take = functools.partial(jax.tree.map, lambda array: array[begin:end])
    rows = batch.logit_rows
    return dataclasses.replace(
        batch,
        token_ids=take(batch.token_ids),
        positions=take(batch.positions),
        slot_mapping=take(batch.slot_mapping),
        seq_lens=batch.seq_lens - jnp.diff(jnp.maximum(starts, end)),  # which no later token's key is part of
        query_start_loc=jnp.clip(starts, begin, end) - begin,
        logit_rows=None if rows is None else jnp.clip(rows, begin, end - 1) - begin,
    )


def _most_rows(batch: Batch) -> int:
    return max(len(batch.token_ids), 0 if batch.logit_rows is None else len(batch.logit_rows))


def _attend_by_window(model: Decoder, batch: Batch, implementation: Implementation | None) -> Attend:
    if not batch.windows:
        return _attend_to(batch, implementation)
    windows = set(model.config.sliding_windows)  # layers with different windows have different tables and slots
    return by_window({window: _attend_to(batch.for_window(window), implementation) for window in windows})


def _attend_to(batch: Batch, implementation: Implementation | None) -> Attend:
    """The attention of a batch's new tokens, for layers that share its tables and slots."""
    tables, lens, slots = batch.block_tables, batch.seq_lens, batch.slot_mapping
    if batch.is_decode:
        return decode_attend(tables, lens, slots, prefixes=batch.prefixes, implementation=implementation)
    if batch.query_start_loc is None:
        raise ValueError("a batch must have query_start_loc unless is_decode is True, got None")
    where = tables, lens, batch.query_start_loc, slots
    if batch.num_prompts is None:
        return prefill_attend(*where, implementation=implementation)
    return mixed_attend(*where, batch.num_prompts, implementation=implementation)


def make_abstract_step(
    config: DecoderConfig,
    dtype: DTypeLike,
    *,
    implementation: Implementation | None = None,
    peers: "PeerSum | None" = None,
    pieces: int = 1,
    spread: "SpreadSum | None" = None,
) -> tuple[Weights, Step]:
    """Does what `make_step` does for a model that has no weights yet.

    Args:
        config: the decoder's config.
        dtype: the dtype of the weights.
        implementation: the implementation of the paged ops, None for the library's choice.
        peers, pieces, spread: as for `make_step`.

    Returns:
        The weights with a `jax.ShapeDtypeStruct` in place of each array of the model, and the step.
    """
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype))
    return make_step(model, implementation=implementation, peers=peers, pieces=pieces, spread=spread)
