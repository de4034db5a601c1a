"""Every op as a function of small arrays, for the tests that hold for all ops."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import paged_jax

NUM_SEQS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, NUM_BLOCKS, WIDTH = 3, 4, 2, 16, 4, 16, 4
QUERY_START_LOC = np.array([0, 2, 2, 7], np.int32)
NUM_TOKENS = 8  # one of them padding
LATENT_SIZE = 32
POOLS = ("key_cache", "value_cache", "latent_cache")


def _arrays():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    pool = (NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE)
    tables = rng.permutation(NUM_BLOCKS)[: NUM_SEQS * WIDTH].reshape(NUM_SEQS, WIDTH).astype(np.int32)
    return {
        "query": normal(NUM_SEQS, NUM_HEADS, HEAD_SIZE),
        "tokens": normal(NUM_TOKENS, NUM_HEADS, HEAD_SIZE),
        "key": normal(NUM_TOKENS, NUM_KV_HEADS, HEAD_SIZE),
        "value": normal(NUM_TOKENS, NUM_KV_HEADS, HEAD_SIZE),
        "key_cache": normal(*pool),
        "value_cache": normal(*pool),
        "block_tables": tables,
        "seq_lens": np.array([5, 0, 16], np.int32),
        "last_key": normal(NUM_SEQS, NUM_KV_HEADS, HEAD_SIZE),
        "last_value": normal(NUM_SEQS, NUM_KV_HEADS, HEAD_SIZE),
        "last_slots": np.array([tables[0, 1] * BLOCK_SIZE, -1, tables[2, 3] * BLOCK_SIZE + 3], np.int32),
        "query_start_loc": QUERY_START_LOC,
        "slot_mapping": np.array([3, -1, 40, 41, 7, 63, 64, 0], np.int32),
        "block_mapping": np.array([[0, 5], [5, 6], [-1, 3]], np.int32),
        "alibi_slopes": np.array([0.1, 0.2, 0.3, 0.4], np.float32),
        "k_scale": np.array([0.5, 2.0], np.float32),
        "latent_query": normal(NUM_SEQS, NUM_HEADS, LATENT_SIZE),
        "latent_tokens": normal(NUM_TOKENS, NUM_HEADS, LATENT_SIZE),
        "latent": normal(NUM_TOKENS, LATENT_SIZE),
        "latent_cache": normal(NUM_BLOCKS, BLOCK_SIZE, LATENT_SIZE),
        "sinks": normal(NUM_HEADS),
    }


ARRAYS = _arrays()
DECODE = ("query", "key_cache", "value_cache", "block_tables", "seq_lens")
RAGGED = ("tokens", *DECODE[1:], "query_start_loc")
OPTIONS = ("alibi_slopes", "k_scale")
LATENT = ("latent_query", "latent_cache", "block_tables", "seq_lens")
LATENT_STATIC = {"value_size": 16, "scale": 0.2, "return_lse": True}
# op: the names of its positional arrays, of its array options, and its static keywords
OPS = {
    "paged_attention_v1": (DECODE, OPTIONS, {}),
    "paged_attention_v2": (DECODE, OPTIONS, {"partition_size": 8, "return_residuals": True}),
    "paged_attention": (DECODE, (), {"return_lse": True}),
    "write_and_attend": (("query", "last_key", "last_value", *DECODE[1:], "last_slots"), ("alibi_slopes",), {}),
    "ragged_paged_attention": (RAGGED, OPTIONS, {}),
    "prefix_attention": (("tokens", "key", "value", *RAGGED[1:]), (), {}),
    "write_to_paged_cache": (("key", "value", "key_cache", "value_cache", "slot_mapping"), (), {}),
    "copy_blocks": (("key_cache", "value_cache", "block_mapping"), (), {}),
    "swap_blocks": (("key_cache", "value_cache", "value_cache", "key_cache", "block_mapping"), (), {}),
    "mla_paged_attention": (LATENT, ("sinks",), LATENT_STATIC),
    "ragged_mla_attention": (("latent_tokens", *LATENT[1:], "query_start_loc"), ("sinks",), LATENT_STATIC),
    "write_to_latent_cache": (("latent", "latent_cache", "slot_mapping"), (), {}),
}

LATENT_OPS = [op for op in OPS if "latent_cache" in OPS[op][0]]
DECODE_OPS = [op for op in OPS if OPS[op][0] in (DECODE, LATENT)]
# XLA, which is what CPUs run, takes `paged_attention` for v1: whatever compiles every op leaves it out.
COMPILED_OPS = [op for op in OPS if op != "paged_attention"]
WRITING_OPS = ["write_to_paged_cache", "write_and_attend", "copy_blocks", "swap_blocks", "write_to_latent_cache"]


def bind(op, **changes):
    """Makes the op a function of all its arrays, with other static keywords if they are given; gives both."""
    names, options, static = OPS[op]
    static = static | changes

    def fun(*arrays):
        keywords = dict(zip(options, arrays[len(names) :], strict=True))
        return getattr(paged_jax, op)(*arrays[: len(names)], **keywords, **static)

    return fun, [jnp.asarray(ARRAYS[n]) for n in (*names, *options)]


@functools.cache
def expected(op):
    """Returns the jitted op's results."""
    fun, arrays = bind(op)
    return jax.tree.map(np.asarray, jax.jit(fun)(*arrays))


def assert_equal(actual, wanted, atol=1e-6):
    """Compares pytrees of arrays, up to rounding."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=1e-5), actual, wanted)


def assert_same_program(one, other, *arrays):
    """Checks that two functions of these arrays are traced to the same program, which is not compiled."""
    assert str(jax.make_jaxpr(one)(*arrays)) == str(jax.make_jaxpr(other)(*arrays))


def bind_sharded(op):
    """`bind` over two devices that share the kv heads; ops on latents share the query heads."""
    fun, arrays = bind(op)
    names = (*OPS[op][0], *OPS[op][1])
    heads_axis = {"block_tables": None, "seq_lens": None, "query_start_loc": None, "slot_mapping": None}
    heads_axis |= {"block_mapping": None, "last_slots": None, "alibi_slopes": 0, "k_scale": 0, "sinks": 0}
    heads_axis |= {"latent": None, "latent_cache": None}
    specs = [P() if (a := heads_axis.get(n, 1)) is None else P(*[None] * a, "x") for n in names]
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices("cpu")[:2])
    results = P() if op == "write_to_latent_cache" else P(None, "x")
    sharded = jax.shard_map(fun, mesh=mesh, in_specs=tuple(specs), out_specs=results)
    return sharded, [jax.device_put(x, jax.NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]


def pool_copies(compiled, pools):
    """Finds the copies of a whole pool in a compiled program."""
    shapes = {f"f32[{','.join(map(str, x.shape))}]" for x in pools}
    return [
        line
        for line in compiled.as_text().splitlines()
        if (m := re.search(r"= (\S+?)(\{\S*\})? copy(-start)?\(", line)) and m.group(1) in shapes
    ]


def pools_written(op):
    """The indices of the pools that the op updates among its arrays; swap_blocks only reads its first two."""
    return [i for i, n in enumerate(OPS[op][0]) if n in POOLS][-2:]


def is_pool(op, i):
    """Whether the op's array `i` is a pool."""
    names = OPS[op][0]
    return i < len(names) and names[i] in POOLS
