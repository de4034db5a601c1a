"""One step of a decoder as a plain function of arrays: `step(weights, caches, batch) -> (logits, caches)`.

A step takes new tokens of many sequences. The new tokens of a sequence are a prompt, a chunk of one, or one token that
was drawn. An engine needs to know no more than this of a model. The weights are plain dicts of arrays, because a call
of a jitted function with an `nnx.State` of hundreds of arrays takes milliseconds of the host's time.

    model ──► make_step ──► weights, step            jax.jit(step, donate_argnums=1)(weights, caches, batch)

A batch is `paged_jax.engine.Batch`.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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


def xla_options(
    num_tokens: int,
    *,
    weights: Any = None,
    mesh: Mesh | None = None,
    peers: "PeerSum | None" = None,
) -> dict[str, Any]:
    """XLA's options for a step of this many tokens, for `jax.jit(step, compiler_options=...)`.

    With Triton, XLA splits the sums of a product over programs, and the next kernel adds up what they leave. That pays
    for few rows. From 64 rows on, up to the 512 that were measured, cuBLAS was as fast or faster: it can add to the
    residual stream too. XLA tries cuBLAS's kernels out, and has been misled where other programs compiled meanwhile. So
    cuBLAS chooses by itself where its choice was as good: for 64 to 127 and for 256 to 511 rows (benchmarks/LOG.md,
    "Steps of 64 to 512 rows"). For cuBLAS, XLA would join matrices that multiply the same input in each step, such as
    q_proj and kv_a_proj of latent attention: that reads and writes them once more.
    """
    by_xla = peers is None or num_tokens > peers.most_rows
    options = all_reduce_options(weights, mesh) if by_xla and num_tokens <= _MOST_DECODES else {}
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
) -> tuple[Weights, Step]:
    """Separates a decoder into its weights and the function that runs a step with them.

    Args:
        model: the decoder.
        implementation: the implementation of the paged ops, None for the library's choice.
        peers: adds up the devices' parts of decode steps (`examples.sharding.peer_sum`); None to leave that to XLA.

    Returns:
        The weights, nested dicts of the model's arrays and the table of `peers`, and `step(weights, caches, batch) ->
        (logits, caches)`. The caller jits the step and donates its caches. Logits are f32 `[num_rows, vocab_size]`, or
        `[num_tokens, vocab_size]` if the batch has no `logit_rows`.
    """
    graphdef, state = nnx.split(model)

    def step(weights: Weights, caches: Caches, batch: Batch):
        parameters = {name: value for name, value in weights.items() if name != _PEERS}
        model = nnx.merge(graphdef, parameters)  # only while JAX traces: the compiled step has no trace of it
        if batch.windows:  # layers with different windows have different tables and slots
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


def _most_rows(batch: Batch) -> int:
    return max(len(batch.token_ids), 0 if batch.logit_rows is None else len(batch.logit_rows))


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
) -> tuple[Weights, Step]:
    """Does what `make_step` does for a model that has no weights yet.

    Args:
        config: the decoder's config.
        dtype: the dtype of the weights.
        implementation: the implementation of the paged ops, None for the library's choice.
        peers: as for `make_step`.

    Returns:
        The weights with a `jax.ShapeDtypeStruct` in place of each array of the model, and the step.
    """
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype))
    return make_step(model, implementation=implementation, peers=peers)
