"""How do I check several guessed tokens in one step, and take back those that were wrong?

Append the guesses, attend with all of them in one call of `attend_ragged`, and `truncate` each sequence after its last
right guess. The blocks past it are free again, and the next tokens overwrite the wrong ones.

    python -m examples.howto.speculative_tokens
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax import PagedKVCache, allocator

HEADS, HEAD_SIZE, BLOCK_SIZE = 2, 16, 4


@partial(jax.jit, static_argnames="max_query_len")
def attend(new, cache, slots, tables, seq_lens, query_start_loc, max_query_len):
    """Writes new tokens and attends; queries, keys and values are all `new` here.

    A kernel that knows how few tokens a sequence has at most (`max_query_len`) is faster.
    """
    cache = cache.write(new, new, slots)
    return cache.attend_ragged(new, tables, seq_lens, query_start_loc, max_query_len=max_query_len), cache


def main():
    cache = PagedKVCache.create(16, BLOCK_SIZE, HEADS, HEAD_SIZE, dtype=jnp.float32)
    blocks = allocator.create(num_blocks=16, block_size=BLOCK_SIZE, max_num_seqs=2, max_blocks_per_seq=6)
    rng = np.random.default_rng(0)
    texts = [np.zeros((0, HEADS, HEAD_SIZE), np.float32) for _ in range(2)]

    def run(blocks, cache, pieces):
        """Appends tokens to each sequence and attends with them; returns the results of each sequence."""
        lens = np.array([len(piece) for piece in pieces])
        before = blocks.seq_lens
        blocks, _, _ = allocator.append_tokens(blocks, lens)
        rows = np.repeat([0, 1], lens)
        positions = np.concatenate([np.arange(start, start + n) for start, n in zip(before, lens, strict=True)])
        slots = allocator.slots(blocks, rows, positions)
        start = np.array([0, *np.cumsum(lens)], np.int32)
        new = np.concatenate(pieces)
        out, cache = attend(new, cache, slots, blocks.block_tables, blocks.seq_lens, start, int(lens.max()))
        return blocks, cache, np.split(np.asarray(out), start[1:-1])

    def draw(*lens):
        return [rng.normal(size=(n, HEADS, HEAD_SIZE)).astype(np.float32) for n in lens]

    prompts = draw(6, 3)
    blocks, cache, _ = run(blocks, cache, prompts)
    texts = [np.concatenate(pair) for pair in zip(texts, prompts, strict=True)]

    guesses, accepted = draw(5, 5), [1, 4]  # a model would compare its own choice with each guess
    blocks, cache, _ = run(blocks, cache, guesses)
    held = blocks.ref_counts.sum()
    blocks = allocator.truncate(blocks, [len(text) + n for text, n in zip(texts, accepted, strict=True)])
    texts = [np.concatenate([text, guess[:n]]) for text, guess, n in zip(texts, guesses, accepted, strict=True)]
    print(f"accepted {accepted} of 5 guesses; blocks {held} -> {blocks.ref_counts.sum()}")

    last = draw(1, 1)
    blocks, cache, outs = run(blocks, cache, last)
    for row, (text, token, out) in enumerate(zip(texts, last, outs, strict=True)):
        whole = np.concatenate([text, token])
        expected = jax.nn.dot_product_attention(token, whole, whole)
        print(
            f"sequence {row} has {len(whole)} tokens, wrong guesses forgotten:",
            bool(np.abs(out - expected).max() < 1e-5),
        )


if __name__ == "__main__":
    main()
