"""Every op in a loop over stacked arrays, as in a scan over the layers of a model.

XLA fuses a kernel with the slices that it reads and writes of a loop's arrays. A kernel that works in place then has
two buffers for what should be one array (`paged_jax.kernels.in_place`).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax

LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 3, 8, 2, 64, 16
# Lengths so uneven that decode has queues, and so long that contexts are split.
SEQ_LENS = np.array([4000, 30, 700, 1, *[40] * 60], np.int32)
WIDTH = 4096 // BLOCK_SIZE
NUM_BLOCKS = 512
QUERY_LENS = np.array([5, 30, 300, 1, *[1] * 60], np.int32)
DECODE = ("query", "key_cache", "value_cache", "block_tables", "seq_lens")
RAGGED = ("tokens", *DECODE[1:], "query_start_loc")
OPS = {
    "paged_attention_v1": DECODE,
    "paged_attention_v2": DECODE,
    "paged_attention": DECODE,
    "write_and_attend": ("query", "last_key", "last_value", *DECODE[1:], "last_slots"),
    "ragged_paged_attention": RAGGED,
    "prefix_attention": ("tokens", "key", "value", *RAGGED[1:]),
    "write_to_paged_cache": ("key", "value", "key_cache", "value_cache", "slot_mapping"),
    "copy_blocks": ("key_cache", "value_cache", "block_mapping"),
    "swap_blocks": ("key_cache", "value_cache", "value_cache", "key_cache", "block_mapping"),
}
CACHE_OPS = ("write_to_paged_cache", "copy_blocks", "swap_blocks")
STATIC = {"paged_attention_v2": {"partition_size": 512}}
pytestmark = pytest.mark.gpu
ON_A_GPU = [(op, name) for op in OPS for name in (None, "triton")]
ON_A_GPU += [(op, "mosaic_gpu") for op in ("ragged_paged_attention", "prefix_attention")]


@functools.cache
def arrays():
    """The arguments by name: a layer's floats each [LAYERS, ...], integers for all layers."""
    rng = np.random.default_rng(0)
    num_seqs, num_tokens = len(SEQ_LENS), int(QUERY_LENS.sum())

    def normal(*shape):
        return jnp.asarray(rng.standard_normal((LAYERS, *shape), np.float32), jnp.bfloat16)

    tables = rng.integers(num_seqs, NUM_BLOCKS, (num_seqs, WIDTH)).astype(np.int32)
    tables[np.arange(num_seqs), (SEQ_LENS - 1) // BLOCK_SIZE] = np.arange(num_seqs)  # no other sequence's
    last = tables[np.arange(num_seqs), (SEQ_LENS - 1) // BLOCK_SIZE] * BLOCK_SIZE + (SEQ_LENS - 1) % BLOCK_SIZE
    slots = rng.permutation(NUM_BLOCKS * BLOCK_SIZE)[:num_tokens].astype(np.int32)
    pool = NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE
    return {
        "query": normal(num_seqs, NUM_HEADS, HEAD_SIZE),
        "tokens": normal(num_tokens, NUM_HEADS, HEAD_SIZE),
        "key": normal(num_tokens, NUM_KV_HEADS, HEAD_SIZE),
        "value": normal(num_tokens, NUM_KV_HEADS, HEAD_SIZE),
        "last_key": normal(num_seqs, NUM_KV_HEADS, HEAD_SIZE),
        "last_value": normal(num_seqs, NUM_KV_HEADS, HEAD_SIZE),
        "key_cache": normal(*pool),
        "value_cache": normal(*pool),
        # float32, because a conversion would stand between the kernels and the slices.
        "sinks": normal(NUM_HEADS).astype(jnp.float32),
        "alibi_slopes": normal(NUM_HEADS).astype(jnp.float32),
        "block_tables": jnp.asarray(tables),
        "seq_lens": jnp.asarray(SEQ_LENS),
        "last_slots": jnp.asarray(np.where(np.arange(num_seqs) % 7 == 6, -1, last)),
        "query_start_loc": jnp.asarray(np.concatenate([[0], np.cumsum(QUERY_LENS)]), jnp.int32),
        "slot_mapping": jnp.asarray(np.where(np.arange(num_tokens) % 5 == 4, -1, slots)),
        "block_mapping": jnp.asarray([[0, 5], [7, 6], [-1, 3]], jnp.int32),
    }


def of_layers(op, implementation, options=()):
    """The op as a function of one layer's stacked arguments, and these arguments; `options` are keywords among them."""
    names, given = OPS[op], arrays()
    is_stacked = [given[name].dtype != jnp.int32 for name in names]
    stacked = [given[name] for name, flag in zip(names, is_stacked, strict=True) if flag]

    def fun(layer):
        layer = iter(layer)
        call = [next(layer) if flag else given[name] for name, flag in zip(names, is_stacked, strict=True)]
        keywords = STATIC.get(op, {}) | dict(zip(options, layer, strict=True))
        return getattr(paged_jax, op)(*call, implementation=implementation, **keywords)

    return fun, stacked + [given[name] for name in options]


@pytest.mark.parametrize(
    ("op", "implementation", "options"),
    [(*x, ()) for x in ON_A_GPU] + [(*x, ("sinks", "alibi_slopes")) for x in ON_A_GPU if x[0] not in CACHE_OPS],
)
def test_a_loop_over_layers_has_the_bits_of_each_layer_alone(op, implementation, options):
    fun, stacked = of_layers(op, implementation, options)
    alone = jax.jit(fun)
    wanted = [jax.tree.map(np.asarray, alone([x[i] for x in stacked])) for i in range(LAYERS)]
    looped = jax.tree.map(np.asarray, jax.jit(functools.partial(jax.lax.map, fun))(stacked))
    for i in range(LAYERS):
        jax.tree.map(
            lambda actual, expected, i=i: np.testing.assert_array_equal(actual[i], expected), looped, wanted[i]
        )


@pytest.mark.parametrize(("op", "implementation"), [x for x in ON_A_GPU if "write" in x[0] or "blocks" in x[0]])
def test_a_loop_carries_stacked_pools(op, implementation):
    """Each iteration takes its layer's pools out of the stack and puts the written ones back."""
    fun, stacked = of_layers(op, implementation)
    wanted = [jax.tree.map(np.asarray, jax.jit(fun)([x[i] for x in stacked])) for i in range(LAYERS)]

    @jax.jit
    def run(stacked):
        def iteration(i, stacked):
            results = jax.tree.leaves(fun([x[i] for x in stacked]))[-2:]
            *rest, keys, values = stacked
            return [*rest, keys.at[i].set(results[0]), values.at[i].set(results[1])]

        return jax.lax.fori_loop(0, LAYERS, iteration, stacked)[-2:]

    for actual, *expected in zip(run(stacked), *[jax.tree.leaves(x)[-2:] for x in wanted], strict=True):
        np.testing.assert_array_equal(np.asarray(actual), np.stack(expected))
