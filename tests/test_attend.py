"""Tests the callables of examples/attend.py: two ops are one op, options and implementations, and causal attention."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from examples.attend import causal_attend, decode_attend, mixed_attend, prefill_attend
from paged_jax import PagedKVCache, allocator

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 8, 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("query_lens", "num_prompts"),
    [
        ([5, 3, 1, 1, 1, 0], 2),
        ([5, 3, 1, 1, 1, 0], 4),
        ([1, 1, 1, 1, 1, 1], 1),
        ([4, 2, 7, 0, 0, 0], 6),
        ([1, 4, 1, 0, 1, 0], 3),
        ([0, 0, 0, 0, 0, 0], 2),
    ],
    ids=["mixed", "fewer", "decode", "prompts", "in no order", "nothing"],
)
def test_two_ops_are_the_one(query_lens, num_prompts):
    rng = np.random.default_rng(0)
    query_lens = np.array(query_lens, np.int32)
    context_lens = np.where(query_lens > 0, rng.integers(0, 9, 6), 0).astype(np.int32)
    seq_lens = context_lens + query_lens
    blocks, _, _ = allocator.append_tokens(allocator.create(40, BLOCK_SIZE, 6, 5), seq_lens)
    starts = np.concatenate([[0], query_lens.cumsum()]).astype(np.int32)
    num_tokens = int(starts[-1])
    num_padding = 16 - num_tokens  # so that the cases share a program
    rows = np.repeat(np.arange(6, dtype=np.int32), query_lens)
    positions = np.arange(num_tokens, dtype=np.int32) - starts[rows] + context_lens[rows]
    slots = np.append(allocator.slots(blocks, rows, positions), np.full(num_padding, -1)).astype(np.int32)
    shape = 40, KV_HEADS, BLOCK_SIZE, HEAD_SIZE
    cache = PagedKVCache(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2)))
    new = [
        jnp.asarray(rng.normal(size=(num_tokens + num_padding, n, HEAD_SIZE)), jnp.float32)
        for n in (HEADS, KV_HEADS, KV_HEADS)
    ]
    where = blocks.block_tables, seq_lens, starts, slots
    one, one_cache = prefill_attend(*where)(*new, cache, scale=0.3, sliding_window=None)
    two, two_cache = mixed_attend(*where, num_prompts)(*new, cache, scale=0.3, sliding_window=None)
    np.testing.assert_allclose(two, one, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(two_cache.key_cache, one_cache.key_cache)
    assert not np.asarray(two)[num_tokens:].any(), "padding comes out 0"
    assert bool(np.asarray(two)[:num_tokens].any()) == (num_tokens > 0)


class Recorder:
    """A cache that notes how it is used: each method, and the implementation and options that it is given."""

    def __init__(self):
        self.calls = []

    def write(self, *arrays, implementation):
        self.calls.append(("write", len(arrays), implementation))
        return self

    def _attend(self, name, *arrays, implementation, **options):
        self.calls.append((name, sorted(options), implementation))
        return arrays[0]

    def attend(self, *arrays, **options):
        return self._attend("attend", *arrays, **options)

    def attend_ragged(self, *arrays, **options):
        return self._attend("attend_ragged", *arrays, **options)

    def write_and_attend(self, *arrays, **options):
        return self._attend("write_and_attend", *arrays, **options), self


WHERE = np.zeros((2, 3), np.int32), np.ones(2, np.int32), np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32)
NEW = tuple(jnp.zeros((2, heads, HEAD_SIZE)) for heads in (HEADS, KV_HEADS, KV_HEADS))


@pytest.mark.parametrize("implementation", [None, "xla", "triton", "mosaic_gpu"])
def test_every_op_runs_in_the_implementation_that_is_asked_for(implementation):
    """But Mosaic GPU has no op that only writes keys and values. Latents come without values."""
    tables, lens, _, slots = WHERE
    writer = None if implementation == "mosaic_gpu" else implementation
    ways = {
        "prefill": prefill_attend(*WHERE, implementation=implementation),
        "mixed": mixed_attend(*WHERE, 1, implementation=implementation),
        "decode": decode_attend(tables, lens, slots, implementation=implementation),
    }
    ops = {"prefill": ["attend_ragged"], "mixed": ["attend_ragged", "attend"]}
    for name, way in ways.items():
        for new in (NEW, (*NEW[:2], None)):
            cache, has_values = Recorder(), new[2] is not None
            out, after = way(*new, cache, scale=0.3, sliding_window=5)
            assert (out.shape, after) == (NEW[0].shape, cache)
            calls = [("write", 3 if has_values else 2, writer)]
            if name == "decode":
                calls = [] if has_values else [("write", 2, implementation)]
            wanted = ops.get(name, ["write_and_attend" if has_values else "attend"])
            calls += [(op, ["scale", "sliding_window"], implementation) for op in wanted]
            assert cache.calls == calls, name


@pytest.mark.parametrize("implementation", [None, "mosaic_gpu", "triton"])
@pytest.mark.parametrize("option", [None, "sliding_window", "alibi_slopes", "sinks", "logits_soft_cap"])
def test_which_layers_read_shared_prefixes_once(option, implementation):
    """Those of keys and values that look at no positions and have a plain softmax; an option may be None."""
    tables, lens, _, slots = WHERE
    used = []
    prefixes = SimpleNamespace(attend=lambda query, cache, **options: used.append(options) or query)
    way = decode_attend(tables, lens, slots, prefixes=prefixes, implementation=implementation)
    options = {"scale": 0.3, "sliding_window": None} | ({} if option is None else {option: 1.0})
    cache = Recorder()
    way(*NEW, cache, **options)
    if option in (None, "logits_soft_cap"):
        assert used == [options | {"implementation": implementation}]
        assert cache.calls == [("write", 3, None if implementation == "mosaic_gpu" else implementation)]
    else:
        assert cache.calls == [("write_and_attend", sorted(options), implementation)]
    way(*NEW[:2], None, cache, **options)
    assert [call[0] for call in cache.calls[1:]] == ["write", "attend"]
    assert len(used) == (option in (None, "logits_soft_cap"))


@pytest.mark.parametrize("option", [None, "sliding_window", "logits_soft_cap", "alibi_slopes", "sinks", "latents"])
def test_attention_without_a_cache(option):
    """Every option of it, against sums over one query and one head at a time."""
    rng = np.random.default_rng(0)
    num_tokens, value_size = 6, HEAD_SIZE // 2
    query, key, value = (rng.normal(size=(num_tokens, heads, HEAD_SIZE)) for heads in (HEADS, KV_HEADS, KV_HEADS))
    per_head = rng.normal(size=HEADS)
    if option == "latents":
        key, value = key[:, :1], key[:, :1, :value_size]
    values: dict[str, Any] = {"sliding_window": 3, "logits_soft_cap": 0.7, "latents": value_size}
    wanted = values.get(option, jnp.float32(per_head))
    options = {} if option is None else {"value_size" if option == "latents" else option: wanted}
    new = (query, key[:, 0], None) if option == "latents" else (query, key, value)
    new = [None if x is None else jnp.float32(x) for x in new]
    out, cache = causal_attend()(*new, "untouched", scale=0.3, **options)
    assert cache == "untouched"
    for token, head in np.ndindex(num_tokens, HEADS):
        kv_head = head * key.shape[1] // HEADS
        first = max(token - 2, 0) if option == "sliding_window" else 0
        logits = 0.3 * key[first : token + 1, kv_head] @ query[token, head]
        if option == "logits_soft_cap":
            logits = 0.7 * np.tanh(logits / 0.7)
        if option == "alibi_slopes":
            logits -= per_head[head] * np.arange(token, -1, -1)
        weights = np.exp(logits)
        total = weights.sum() + (np.exp(per_head[head]) if option == "sinks" else 0)
        expected = weights @ value[first : token + 1, kv_head] / total
        np.testing.assert_allclose(out[token, head], expected, rtol=1e-4, atol=1e-5)
