"""Text generation as compiled programs, which take prompts, return token ids and allocate blocks inside.

`generate` is one program: it writes all prompts to the paged cache, then decodes in a `lax.while_loop` until
every sequence has finished; the host sees nothing in between. `prefill` and `decode` are its two halves, for callers
who want each token as soon as it is drawn. All state is in one immutable `Generation`. The caches in it are one
cache for each layer, never stacked; they are donated to every program, which updates them in place.

       Request ──► prefill ──► Generation ──► decode ──► Generation ──► decode ──► ...

      append_tokens: all prompts            append_tokens: 1 to each running sequence
      flat ragged tokens ► last logits      one token of each sequence ► its logits
      ► sample                              ► sample ► stop token? long enough? out of blocks?
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float32, Int32

from examples.config import DecoderConfig
from examples.decoder import Decoder
from examples.sampling import greedy, sample
from examples.sharding import on_mesh
from examples.step import Step, Weights, make_step
from paged_jax import Implementation, PagedKVCache, PagedLatentCache, allocator
from paged_jax.engine import Batch

if TYPE_CHECKING:
    from examples.all_reduce import PeerSum

RUNNING, STOP, LENGTH, BLOCKS = range(4)
FINISH_REASONS = ("running", "stop", "length", "blocks")

PROMPT_MULTIPLE = 64  # prompts are padded to a multiple of this, so that most lengths share a compiled program
HEADROOM = 1.25  # int8 scales fit keys and values this much larger than the prompts' largest

type Cache = PagedKVCache | PagedLatentCache
type Scales = Sequence[tuple[ArrayLike | None, ArrayLike | None]]


class Sampling(NamedTuple):
    """How tokens are drawn (sampling.py); only a change between temperature 0 and others compiles again."""

    temperature: ArrayLike = 0.0
    top_k: ArrayLike = 0
    top_p: ArrayLike = 1.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Request:
    """A batch of prompts, and how to continue them; `make_request` builds it.

    Attributes:
        token_ids: i32 `[num_tokens]`, the prompts one after the other, then padding.
        prompt_lens: i32 `[num_seqs]`, tokens of each prompt.
        max_output_lens: i32 `[num_seqs]`, the largest number of new tokens of each sequence.
        stop_token_ids: i32 `[num_stop_tokens]`, tokens that end a sequence.
        sampling: f32, i32 and f32 scalars.
        key: a JAX random key.
        max_seq_len: upper bound of the sequences' lengths in tokens (static).
        max_new_tokens: tokens for which the output has room (static).
        is_greedy: whether the temperature is 0, so that the programs draw no random numbers (static).
    """

    token_ids: Int32[Array, " num_tokens"]
    prompt_lens: Int32[Array, " num_seqs"]
    max_output_lens: Int32[Array, " num_seqs"]
    stop_token_ids: Int32[Array, " num_stop_tokens"]
    sampling: Sampling
    key: Array
    max_seq_len: int = field(metadata={"static": True})
    max_new_tokens: int = field(metadata={"static": True})
    is_greedy: bool = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Generation:
    """The state of a batch after some steps.

    Attributes:
        allocator: which blocks hold which sequence.
        caches: one for each layer.
        token_ids: i32 `[num_seqs]`, the last token of each sequence, which is not in the cache yet.
        output_ids: i32 `[num_seqs, max_new_tokens]`, the new tokens, a stop token included.
        output_lens: i32 `[num_seqs]`, the number of new tokens.
        finish: i32 `[num_seqs]`, index into FINISH_REASONS.
        step: i32 `[]`, the number of steps so far, prefill included.
    """

    allocator: allocator.AllocatorState
    caches: tuple[Cache, ...]
    token_ids: Int32[Array, " num_seqs"]
    output_ids: Int32[Array, "num_seqs max_new_tokens"]
    output_lens: Int32[Array, " num_seqs"]
    finish: Int32[Array, " num_seqs"]
    step: Int32[Array, ""]


class Programs(NamedTuple):
    """A model's jitted functions; each takes `weights` first and has its caches donated.

    Attributes:
        weights: the model's arrays, in nested plain dicts (step.py).
        generate: `(weights, caches, request) -> Generation`; it runs until every sequence has finished.
        prefill: `(weights, caches, request) -> Generation`; it writes the prompts and draws each first token.
        decode: `(weights, generation, request) -> Generation`; it adds one token to each running sequence.
    """

    weights: Weights
    generate: Any
    prefill: Any
    decode: Any


def make_request(
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    max_position_embeddings: int,
    stop_token_ids: Sequence[int] = (),
    sampling: Sampling = Sampling(),  # noqa: B008 (immutable)
    seed: int = 0,
) -> Request:
    """Packs prompts for the programs, padded so that prompts of similar lengths share one compilation.

    Args:
        prompts: token ids of each prompt, at least one and at most `max_position_embeddings` each.
        max_new_tokens: the largest number of tokens to generate; fewer if the model's positions end before.
        max_position_embeddings: positions the model has.
        stop_token_ids: tokens that end a sequence.
        sampling: how tokens are drawn.
        seed: the seed of the draws.

    Returns:
        The request, on JAX's default device.
    """
    lens = np.array([len(prompt) for prompt in prompts], np.int32)
    token_ids = np.zeros(_round_up(int(lens.sum())), np.int32)
    token_ids[: lens.sum()] = np.concatenate([np.asarray(prompt, np.int32) for prompt in prompts])
    # A sequence's last token is never fed back, so that it needs no position.
    room = max_position_embeddings - lens + 1
    max_new_tokens = min(max_new_tokens, int(room.max()))
    return Request(
        token_ids=jnp.asarray(token_ids),
        prompt_lens=jnp.asarray(lens),
        max_output_lens=jnp.asarray(np.minimum(max_new_tokens, room), jnp.int32),
        stop_token_ids=jnp.array(stop_token_ids, jnp.int32),
        sampling=Sampling(jnp.float32(sampling.temperature), jnp.int32(sampling.top_k), jnp.float32(sampling.top_p)),
        key=jax.random.key(seed),
        max_seq_len=min(_round_up(int(lens.max())) + max_new_tokens, max_position_embeddings),
        max_new_tokens=max_new_tokens,
        is_greedy=bool(np.asarray(sampling.temperature) == 0),
    )


def make_caches(
    config: DecoderConfig,
    num_blocks: int | Sequence[int],
    block_size: int,
    dtype: DTypeLike,
    *,
    scales: Scales | None = None,
    mesh: Mesh | None = None,
) -> tuple[Cache, ...]:
    """Makes an empty cache for each layer.

    Args:
        config: the decoder's config.
        num_blocks: blocks in each layer's pool, or a number for each layer, which is what an engine can use whose
            layers have sliding windows (`paged_jax.engine.pool_sizes`). They are rounded up to multiples of
            `config.num_shards`.
        block_size: tokens in a block.
        dtype: the dtype of the caches.
        scales: k_scale and v_scale of each layer, for a quantised cache; None for no scales.
        mesh: the devices that share the model, None for JAX's default device.
    """
    counts = [num_blocks] * config.num_layers if isinstance(num_blocks, int) else num_blocks
    counts = [-(-count // config.num_shards) * config.num_shards for count in counts]

    def make():
        pairs = scales or [(None, None)] * config.num_layers
        return tuple(
            make_cache(config, count, block_size, dtype, *pair) for count, pair in zip(counts, pairs, strict=True)
        )

    return on_mesh(make, mesh)


def make_cache(
    config: DecoderConfig,
    num_blocks: int,
    block_size: int,
    dtype: DTypeLike,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
) -> Cache:
    """Makes an empty cache for one layer; latents have one scale, `k_scale`. See `make_caches`."""
    if (latent := config.latent) is not None:
        size = latent.kv_rank + latent.rope_size
        return PagedLatentCache.create(num_blocks, block_size, size, dtype=dtype, latent_scale=k_scale)
    sizes = num_blocks, block_size, config.num_kv_heads, config.head_size
    return PagedKVCache.create(*sizes, dtype=dtype, k_scale=k_scale, v_scale=v_scale)


def measure_scales(
    programs: Programs,
    config: DecoderConfig,
    request: Request,
    block_size: int,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
) -> Scales:
    """Finds scales for an int8 cache from the prompts' keys and values, with room for somewhat larger ones.

    Args:
        programs: the model's functions; `prefill` runs once.
        config: the decoder's config.
        request: the prompts.
        block_size: tokens in a block.
        dtype: the dtype of a cache that is not quantised.
        mesh: the devices that share the model, None for JAX's default device.

    Returns:
        k_scale and v_scale of each layer, f32 `[num_kv_heads]` each, or `[]` for latents.
    """
    num_blocks = int((-(-np.asarray(request.prompt_lens) // block_size)).sum())
    caches = make_caches(config, num_blocks, block_size, dtype, mesh=mesh)  # zeros do not change the largest values
    caches = programs.prefill(programs.weights, caches, request).caches

    @jax.jit
    def scale(pool):
        axes = (0, 2, 3) if pool.ndim == 4 else None  # latents have no heads
        largest = HEADROOM * jnp.abs(pool.astype(jnp.float32)).max(axis=axes)
        return jnp.where(largest > 0, largest / jnp.iinfo(jnp.int8).max, 1)

    pools = [
        (cache.latent_cache,) * 2 if isinstance(cache, PagedLatentCache) else (cache.key_cache, cache.value_cache)
        for cache in caches
    ]
    return [(scale(keys), scale(values)) for keys, values in pools]


def make_programs(
    model: Decoder, *, implementation: Implementation | None = None, peers: "PeerSum | None" = None
) -> Programs:
    """Builds the jitted functions that run a model; nothing is compiled before they are called.

    Args:
        model: the decoder. The programs keep its present arrays.
        implementation: the implementation of the paged ops, `None` for the library's choice.
        peers: as for `make_step`.
    """
    weights, step = make_step(model, implementation=implementation, peers=peers)

    def prefill(weights, caches, request):
        return _prefill(step, weights, caches, request, model.config.num_shards)

    def decode(weights, generation, request):
        return _decode(step, weights, generation, request)

    def generate(weights, caches, request):
        generation = prefill(weights, caches, request)
        return jax.lax.while_loop(is_running, lambda state: decode(weights, state, request), generation)

    return Programs(
        weights,
        generate=jax.jit(generate, donate_argnums=1),
        prefill=jax.jit(prefill, donate_argnums=1),
        decode=jax.jit(decode, donate_argnums=1),
    )


def is_running(generation: Generation) -> Bool[Array, ""]:
    """Says whether any sequence has not finished; bool `[]`."""
    return (generation.finish == RUNNING).any()


def outputs(generation: Generation) -> list[tuple[list[int], str]]:
    """Brings the new tokens of each sequence to the host, with why it finished ("running" if it has not)."""
    ids, lens, finish = jax.device_get((generation.output_ids, generation.output_lens, generation.finish))
    return [(ids[i, : lens[i]].tolist(), FINISH_REASONS[finish[i]]) for i in range(len(lens))]


def _prefill(step: Step, weights: Weights, caches, request: Request, num_shards: int) -> Generation:
    """Gives every prompt its blocks, writes all prompts in one step, and draws each first token."""
    num_seqs, num_tokens = request.prompt_lens.shape[0], request.token_ids.shape[0]
    num_blocks, block_size = caches[0].num_blocks, caches[0].block_size
    max_blocks_per_seq = -(-request.max_seq_len // block_size)
    blocks = allocator.create(num_blocks, block_size, num_seqs, max_blocks_per_seq, num_shards=num_shards, xp=jnp)
    blocks, _, ok = allocator.append_tokens(blocks, request.prompt_lens)

    query_start_loc = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(blocks.seq_lens, dtype=jnp.int32)])
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    seq_ids = jnp.searchsorted(query_start_loc[1:], token, side="right").astype(jnp.int32)
    positions = token - query_start_loc[seq_ids]
    is_token = seq_ids < num_seqs  # all other tokens are padding
    slot_mapping = jnp.asarray(allocator.slots(blocks, jnp.where(is_token, seq_ids, -1), positions))
    batch = Batch(
        request.token_ids,
        jnp.where(is_token, positions, 0),
        slot_mapping,
        blocks.block_tables,
        blocks.seq_lens,
        query_start_loc,
        logit_rows=jnp.maximum(query_start_loc[1:] - 1, 0),
    )
    logits, caches = step(weights, caches, batch)

    generation = Generation(
        allocator=blocks,
        caches=caches,
        token_ids=jnp.zeros(num_seqs, jnp.int32),
        output_ids=jnp.zeros((num_seqs, request.max_new_tokens), jnp.int32),
        output_lens=jnp.zeros(num_seqs, jnp.int32),
        finish=jnp.full(num_seqs, jnp.where(ok, RUNNING, BLOCKS), jnp.int32),
        step=jnp.int32(0),
    )
    return _add_tokens(generation, logits, request)


def _decode(step: Step, weights: Weights, generation: Generation, request: Request) -> Generation:
    """Writes the last token of each running sequence, and draws the next one."""
    running = generation.finish == RUNNING
    blocks, _, ok = allocator.append_tokens(generation.allocator, running.astype(jnp.int32))
    # If there are too few blocks, no sequence goes on. Rows that do not go on are computed without reading or writing.
    active = running & ok
    seq_ids = jnp.where(active, jnp.arange(active.shape[0], dtype=jnp.int32), -1)
    seq_lens = jnp.where(active, blocks.seq_lens, 0)
    positions = jnp.maximum(seq_lens - 1, 0)
    slot_mapping = jnp.asarray(allocator.slots(blocks, seq_ids, positions))
    batch = Batch(generation.token_ids, positions, slot_mapping, blocks.block_tables, seq_lens, is_decode=True)
    logits, caches = step(weights, generation.caches, batch)
    finish = jnp.where(running & ~ok, BLOCKS, generation.finish)
    generation = replace(generation, allocator=blocks, caches=caches, finish=finish)
    return _add_tokens(generation, logits, request)


def _add_tokens(generation: Generation, logits: Float32[Array, "num_seqs vocab_size"], request):
    """Draws a token for each running sequence, and finishes the sequences for which it is the last one."""
    running = generation.finish == RUNNING
    if request.is_greedy:
        token_ids = greedy(logits)
    else:
        key = jax.random.fold_in(request.key, generation.step)
        token_ids = sample(logits, key, **request.sampling._asdict())
    rows = jnp.arange(running.shape[0], dtype=jnp.int32)
    columns = jnp.where(running, generation.output_lens, request.max_new_tokens)  # past the end: dropped
    output_lens = generation.output_lens + running.astype(jnp.int32)
    is_stop = (token_ids[:, None] == request.stop_token_ids[None, :]).any(axis=1)
    finish = jnp.where(output_lens >= request.max_output_lens, LENGTH, RUNNING)
    finish = jnp.where(is_stop, STOP, finish)
    return replace(
        generation,
        token_ids=token_ids,
        output_ids=generation.output_ids.at[rows, columns].set(token_ids, mode="drop"),
        output_lens=output_lens,
        finish=jnp.where(running, finish, generation.finish).astype(jnp.int32),
        step=generation.step + 1,
    )


def _round_up(num_tokens: int) -> int:
    return -(-num_tokens // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
