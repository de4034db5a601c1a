"""How do I ship a compiled step without its Python code?

`jax.export` turns a jitted function, here a decode step for CPU and for NVIDIA GPUs, into bytes. A program can read
these bytes and run the step without the model's code. No GPU is needed to write them.

    python -m examples.howto.export_and_reload
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from paged_jax import PagedKVCache, allocator

NUM_SEQS, HEADS, KV_HEADS, HEAD_SIZE = 2, 4, 2, 32


@jax.jit
def decode(query, key, value, cache, block_tables, seq_lens, slots):
    """One new token a sequence; `implementation="xla"` runs everywhere."""
    return cache.write_and_attend(query, key, value, block_tables, seq_lens, slots, implementation="xla")


def main():
    cache = PagedKVCache.create(8, 16, KV_HEADS, HEAD_SIZE, dtype=jnp.float32)
    blocks = allocator.create(num_blocks=8, block_size=16, max_num_seqs=NUM_SEQS, max_blocks_per_seq=4)
    blocks, _, _ = allocator.append_tokens(blocks, [1, 1])
    keys = jax.random.split(jax.random.key(0), 3)
    new = [
        jax.random.normal(k, (NUM_SEQS, n, HEAD_SIZE)) for k, n in zip(keys, (HEADS, KV_HEADS, KV_HEADS), strict=True)
    ]
    slots = allocator.slots(blocks, [0, 1], [0, 0])
    arguments = (*new, cache, blocks.block_tables, blocks.seq_lens, slots)

    exported = export.export(decode, platforms=("cpu", "cuda"))(*arguments)
    written = exported.serialize()
    print("platforms:", ", ".join(exported.platforms), "- a few thousand bytes:", 1000 < len(written) < 1_000_000)

    reloaded = export.deserialize(written)
    expected, result = decode(*arguments), reloaded.call(*arguments)
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(result), strict=True)
    print("bit for bit the same:", all(np.array_equal(a, b) for a, b in pairs))


if __name__ == "__main__":
    main()
