"""How do I see where a step's time goes?

Compile first, then record a few steps with `jax.profiler.trace`, and look at the trace with XProf or Perfetto
(https://ui.perfetto.dev). `jax.named_scope` names a part of a step, so that you can find it in the trace. Wait for the
result before you read the clock: a call of a jitted function returns before the device is done.

    python -m examples.howto.profile_a_step [FOLDER]
"""

import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax import PagedKVCache, allocator

NUM_SEQS, HEADS, HEAD_SIZE, CONTEXT = 8, 8, 64, 256


def main(folder=None):
    cache = PagedKVCache.create(256, 16, HEADS, HEAD_SIZE, dtype=jnp.float32)
    blocks = allocator.create(num_blocks=256, block_size=16, max_num_seqs=NUM_SEQS, max_blocks_per_seq=32)
    blocks, _, _ = allocator.append_tokens(blocks, [CONTEXT] * NUM_SEQS)
    new = jnp.ones((NUM_SEQS, HEADS, HEAD_SIZE))
    slots = allocator.slots(blocks, np.arange(NUM_SEQS), blocks.seq_lens - 1)

    @jax.jit
    def step(new, cache):
        with jax.named_scope("project"):
            query = jnp.einsum("shd,de->she", new, jnp.eye(HEAD_SIZE))
        with jax.named_scope("attend"):
            where = (jnp.asarray(x) for x in (blocks.block_tables, blocks.seq_lens, slots))
            return cache.write_and_attend(query, new, new, *where)

    compiled = step.lower(new, cache).compile()  # the time to compile must not count as a step's
    jax.block_until_ready(compiled(new, cache))
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(folder or scratch)
        with jax.profiler.trace(str(target), create_perfetto_trace=True):
            began = time.perf_counter()
            for _ in range(3):
                out, cache = compiled(new, cache)
            jax.block_until_ready(out)
            seconds = (time.perf_counter() - began) / 3
        traces = [path.name for path in target.rglob("*") if path.is_file()]
        print(f"a step takes {1e6 * seconds:.0f} us")
        print("there is a trace for Perfetto:", "perfetto_trace.json.gz" in traces)


if __name__ == "__main__":
    main(*sys.argv[1:])
