"""How do I let several continuations share one prompt?

`allocator.fork` shares a sequence's blocks. When several sequences are about to write to a block that they share,
`append_tokens` gives all but one of them a new block and says what to copy there; `copy_blocks` makes these copies.

    python -m examples.howto.fork_and_copy_on_write
"""

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax import PagedKVCache, allocator

KV_HEADS, HEAD_SIZE, PROMPT = 2, 16, 6


def main():
    cache = PagedKVCache.create(8, 4, KV_HEADS, HEAD_SIZE, dtype=jnp.float32)
    blocks = allocator.create(num_blocks=8, block_size=4, max_num_seqs=3, max_blocks_per_seq=4)
    prompt, new, query = (
        jax.random.normal(key, (n, KV_HEADS, HEAD_SIZE))
        for key, n in zip(jax.random.split(jax.random.key(0), 3), (PROMPT, 3, 3), strict=True)
    )

    blocks, _, _ = allocator.append_tokens(blocks, [PROMPT, 0, 0])  # one prompt: a full block and a half
    slots = allocator.slots(blocks, [0] * PROMPT, np.arange(PROMPT))
    cache = cache.write(prompt, prompt, jnp.asarray(slots))
    for child in (1, 2):
        blocks = allocator.fork(blocks, parent=0, child=child)  # no block is taken, nothing is copied
    print("blocks of three sequences:", np.unique(blocks.block_tables[blocks.block_tables >= 0]).size)

    blocks, block_mapping, _ = allocator.append_tokens(blocks, [1, 1, 1])  # each writes a token of its own
    print("copied (source, destination):", block_mapping[block_mapping[:, 0] >= 0].tolist())
    cache = cache.copy_blocks(jnp.asarray(block_mapping))
    slots = allocator.slots(blocks, [0, 1, 2], blocks.seq_lens - 1)
    cache = cache.write(new, new, jnp.asarray(slots))
    out = cache.attend(query, jnp.asarray(blocks.block_tables), jnp.asarray(blocks.seq_lens))
    print("blocks of three sequences:", np.unique(blocks.block_tables[blocks.block_tables >= 0]).size)

    for row in range(3):
        own = jnp.concatenate([prompt, new[row][None]])
        expected = jax.nn.dot_product_attention(query[row][None], own, own)[0]
        print(f"sequence {row} sees its own tokens:", bool(jnp.abs(out[row] - expected).max() < 1e-5))


if __name__ == "__main__":
    main()
