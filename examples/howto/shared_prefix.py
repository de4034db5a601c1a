"""How do I read the prefix that many sequences share only once?

Attention over disjoint sets of tokens can be merged (cascade attention). First the queries of all sequences attend to
the prefix as one sequence, with `causal=False` because each of them sees all of it. Then each attends to its own
tokens. `merge_attention_states` merges the two results.

    python -m examples.howto.shared_prefix
"""

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax import PagedKVCache, allocator, merge_attention_states

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, PREFIX, TEXTS = 4, 2, 32, 16, 128, 8


def main():
    keys = jax.random.split(jax.random.key(0), 5)
    key, value = (jax.random.normal(k, (PREFIX, KV_HEADS, HEAD_SIZE)) for k in keys[:2])
    # Three tokens of each sequence.
    own_key, own_value = (jax.random.normal(k, (TEXTS * 3, KV_HEADS, HEAD_SIZE)) for k in keys[2:4])
    query = jax.random.normal(keys[4], (TEXTS, HEADS, HEAD_SIZE))

    cache = PagedKVCache.create(32, BLOCK_SIZE, KV_HEADS, HEAD_SIZE, dtype=jnp.float32)
    blocks = allocator.create(num_blocks=32, block_size=BLOCK_SIZE, max_num_seqs=TEXTS, max_blocks_per_seq=12)
    blocks, _, _ = allocator.append_tokens(blocks, [PREFIX] + [0] * (TEXTS - 1))
    slots = allocator.slots(blocks, [0] * PREFIX, np.arange(PREFIX))
    cache = cache.write(key, value, jnp.asarray(slots))
    for text in range(1, TEXTS):
        blocks = allocator.fork(blocks, parent=0, child=text)  # full blocks: nothing will be copied
    blocks, _, _ = allocator.append_tokens(blocks, [3] * TEXTS)
    rows, positions = np.repeat(np.arange(TEXTS), 3), np.tile(PREFIX + np.arange(3), TEXTS)
    cache = cache.write(own_key, own_value, jnp.asarray(allocator.slots(blocks, rows, positions)))
    tables, shared = jnp.asarray(blocks.block_tables), PREFIX // BLOCK_SIZE

    # The queries of all sequences are one row here, so that the prefix is read once.
    first = cache.attend_ragged(
        query, tables[:1], jnp.array([PREFIX]), jnp.array([0, TEXTS]), causal=False, return_lse=True
    )
    # Each sequence attends to its own tokens.
    second = cache.attend(query, tables[:, shared:], jnp.full(TEXTS, 3), return_lse=True)
    out, _ = merge_attention_states(*first, *second)

    whole = cache.attend(query, tables, jnp.asarray(blocks.seq_lens))
    print(f"blocks read: {shared + TEXTS} instead of {TEXTS * (shared + 1)}")
    print("the same as each text by itself:", bool(jnp.abs(out - whole).max() < 1e-5))


if __name__ == "__main__":
    main()
