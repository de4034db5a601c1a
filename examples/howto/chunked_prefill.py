"""How do I compute a long prompt in chunks, together with sequences that decode?

`attend_ragged` takes rows of any length: chunks of prompts and single tokens in one call. `build_metadata`
says where each row's tokens are. Here two prompts of 484 tokens share steps of at most 512.

    python -m examples.howto.chunked_prefill
"""

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax import PagedKVCache, allocator, build_metadata

BUDGET, PROMPT, HEADS, KV_HEADS, HEAD_SIZE = 512, 484, 4, 2, 32


@jax.jit
def attend(query, key, value, cache, metadata):
    cache = cache.write(key, value, metadata.slot_mapping)
    arrays = query, metadata.block_tables, metadata.seq_lens, metadata.query_start_loc
    return cache.attend_ragged(*arrays, max_query_len=metadata.max_query_len), cache


def main():
    keys = jax.random.split(jax.random.key(0), 3)
    heads = HEADS, KV_HEADS, KV_HEADS
    # Queries, keys and values, as a model would compute them: [sequence, position, heads, head_size].
    tokens = [jax.random.normal(key, (2, PROMPT + 2, n, HEAD_SIZE)) for key, n in zip(keys, heads, strict=True)]
    cache = PagedKVCache.create(128, 16, KV_HEADS, HEAD_SIZE, dtype=jnp.float32)
    blocks = allocator.create(num_blocks=128, block_size=16, max_num_seqs=2, max_blocks_per_seq=32)
    outs = [[], []]

    while True:
        done = blocks.seq_lens
        lens = np.where(done >= PROMPT, 1, 0)  # a sequence that decodes gets its token in every step
        for row in range(2):
            if done[row] < PROMPT:
                lens[row] = min(PROMPT - done[row], BUDGET - lens.sum())
        if done.min() > PROMPT:
            break
        order = np.argsort(lens == 1, kind="stable")  # chunks of prompts first, then single tokens
        blocks, _, _ = allocator.append_tokens(blocks, lens)
        metadata = build_metadata(blocks.block_tables[order], blocks.seq_lens[order], lens[order], 16)
        print("tokens of each sequence in this step:", lens.tolist())
        rows = [x[np.repeat(order, lens[order]), np.concatenate([np.arange(d, d + n) for d, n in
                zip(done[order], lens[order], strict=True)])] for x in tokens]  # fmt: skip
        out, cache = attend(*rows, cache, metadata)
        for row, piece in zip(order, np.split(np.asarray(out), np.cumsum(lens[order])[:-1]), strict=True):
            outs[row].append(piece)

    for row in range(2):
        query, key, value = (x[row, : blocks.seq_lens[row]] for x in tokens)
        whole = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        error = np.abs(np.concatenate(outs[row]) - whole).max()
        print(f"sequence {row}: as computed at once, within {error:.0e}:", bool(error < 1e-5))


if __name__ == "__main__":
    main()
