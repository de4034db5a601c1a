"""One step of a decoder as a plain function of arrays: `step(weights, caches, batch) -> (logits, caches)`.

A step takes new tokens of many sequences. The new tokens of a sequence are a prompt, a chunk of one, or one token that
was drawn. An engine needs to know no more than this of a model. The weights are plain dicts of arrays, because a call
of a jitted function with an `nnx.State` of hundreds of arrays takes milliseconds of the host's time.

    model ──► make_step ──► weights, step            jax.jit(step, donate_argnums=1)(weights, caches, batch)

A batch is `paged_jax.engine.Batch`, or any pytree with its attributes.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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

type Weights = dict[Any, Any]
type Caches = tuple[PagedKVCache | PagedLatentCache, ...]

_PEERS = "peers"  # the name among the weights of the table that finds the other GPUs' memory
_MOST_DECODES = 256  # tokens of a step that is taken for one of decode
_LEAST_HALVED = 4096  # tokens of a step that may run in halves
# While one half's sums travel, the other half's products run; and no half waits for the other to travel together.
_HALVED = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_all_reduce_combine_threshold_bytes": 0,
    "xla_gpu_dot_merger_threshold_mb": 0,
}


def xla_options(
    num_tokens: int,
    *,
    weights: Any = None,
    mesh: Mesh | None = None,
    peers: "PeerSum | None" = None,
    halves: bool = False,
) -> dict[str, Any]:
    """XLA's options for a step of this many tokens, for `jax.jit(step, compiler_options=...)`.

    With Triton, XLA splits the sums of a product over programs, and the next kernel adds up what they leave. That pays
    for few rows. From 64 rows on, up to the 512 that were measured, cuBLAS was as fast or faster: it can add to the
    residual stream too. XLA tries cuBLAS's kernels out, and has been misled where other programs compiled meanwhile. So
    cuBLAS chooses by itself where its choice was as good: for 64 to 127 and for 256 to 511 rows (benchmarks/LOG.md,
    "Steps of 64 to 512 rows"). For cuBLAS, XLA would join matrices that multiply the same input in each step, such as
    q_proj and kv_a_proj of latent attention: that reads and writes them once more.

    `halves` is the argument of `make_step`. XLA overlaps the halves with options that not all backends know.
    """
    by_xla = peers is None or num_tokens > peers.most_rows
    options = all_reduce_options(weights, mesh) if by_xla and num_tokens <= _MOST_DECODES else {}
    if halves and num_tokens >= _LEAST_HALVED and mesh is not None and mesh.devices.flat[0].platform == "gpu":
        options |= _HALVED
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
    halves: bool = False,
) -> tuple[Weights, Step]:
    """Separates a decoder into its weights and the function that runs a step with them.

    Args:
        model: the decoder.
        implementation: the implementation of the paged ops, None for the library's choice.
        peers: adds up the devices' parts of decode steps (`examples.sharding.peer_sum`); None to leave that to XLA.
        halves: whether several devices run steps of many prompts in two halves, so that the sums of one travel while
            the other is computed. No row of a batch may then read a slot that a later row writes.

    Returns:
        The weights, nested dicts of the model's arrays and the table of `peers`, and `step(weights, caches, batch) ->
        (logits, caches)`. The caller jits the step and donates its caches. Logits are f32 `[num_rows, vocab_size]`, or
        `[num_tokens, vocab_size]` if the batch has no `logit_rows`.
    """
    graphdef, state = nnx.split(model)

    def step(weights: Weights, caches: Caches, batch: Batch):
        parameters = {name: value for name, value in weights.items() if name != _PEERS}
        model = nnx.merge(graphdef, parameters)  # only while JAX traces: the compiled step has no trace of it
        if halves and model.config.num_parts > 1 and _can_be_halved(batch):
            return _run_halves(model, caches, batch, implementation)
        if getattr(batch, "windows", ()):  # layers with different windows have different tables and slots
            windows = set(model.config.sliding_windows)
            attend = by_window({window: _attend_to(batch.for_window(window), implementation) for window in windows})
        else:
            attend = _attend_to(batch, implementation)
        adder, logit_rows = None, batch.logit_rows
        if peers is not None and _most_rows(batch) <= peers.most_rows:
            adder = dataclasses.replace(peers, table=weights[_PEERS])
        hidden, caches = model(batch.token_ids, batch.positions, caches, attend, logit_rows, adder)
        return model.logits(hidden, is_normed=adder is not None), caches

    return nnx.to_pure_dict(state) | ({} if peers is None else {_PEERS: peers.table}), step


def _can_be_halved(batch: Batch) -> bool:
    is_large = not batch.is_decode and len(batch.token_ids) >= _LEAST_HALVED
    return is_large and batch.query_start_loc is not None and not getattr(batch, "windows", ())


def _run_halves(model: Decoder, caches: Caches, batch: Batch, implementation: Implementation | None):
    """Runs a step as two programs in one, over the first half of the tokens and over the others."""
    num_tokens, middle, found = len(batch.token_ids), len(batch.token_ids) // 2, []
    starts, wanted = batch.query_start_loc, batch.logit_rows
    for begin, end in (0, middle), (middle, num_tokens):
        its_starts = jnp.clip(starts, begin, end)
        still_to_come = jnp.diff(starts) - jnp.diff(its_starts) if begin == 0 else 0
        half = dataclasses.replace(
            batch,
            token_ids=batch.token_ids[begin:end],
            positions=batch.positions[begin:end],
            slot_mapping=batch.slot_mapping[begin:end],
            seq_lens=batch.seq_lens - still_to_come,
            query_start_loc=its_starts - begin,
        )
        attend = _attend_to(half, implementation)
        rows = None if wanted is None else jnp.clip(wanted, begin, end - 1) - begin
        hidden, caches = model(half.token_ids, half.positions, caches, attend, rows)
        found.append(hidden)
    hidden = jnp.concatenate(found) if wanted is None else jnp.where((wanted < middle)[:, None], *found)
    return model.logits(hidden), caches


def _most_rows(batch: Batch) -> int:
    return max(len(batch.token_ids), 0 if batch.logit_rows is None else len(batch.logit_rows))


def _attend_to(batch: Batch, implementation: Implementation | None) -> Attend:
    """The attention of a batch's new tokens, for layers that share its tables and slots."""
    tables, lens, slots = batch.block_tables, batch.seq_lens, batch.slot_mapping
    if batch.is_decode:
        prefixes = getattr(batch, "prefixes", None)
        return decode_attend(tables, lens, slots, prefixes=prefixes, implementation=implementation)
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
    halves: bool = False,
) -> tuple[Weights, Step]:
    """Does what `make_step` does for a model that has no weights yet.

    Args:
        config: the decoder's config.
        dtype: the dtype of the weights.
        implementation: the implementation of the paged ops, None for the library's choice.
        peers, halves: as for `make_step`.

    Returns:
        The weights with a `jax.ShapeDtypeStruct` in place of each array of the model, and the step.
    """
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype))
    return make_step(model, implementation=implementation, peers=peers, halves=halves)
