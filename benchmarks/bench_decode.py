"""Times decode attention beside its peers and a read of its keys and values: `python -m benchmarks.bench_decode`."""

import functools
import operator
import sys
from collections.abc import Sequence
from typing import get_args

import jax
import jax.numpy as jnp

import paged_jax
from benchmarks import cases, harness, peers, timing
from benchmarks.inputs import Inputs

_IMPLEMENTATIONS = get_args(paged_jax.Implementation)


def implementation(name: str) -> peers.Build:
    """Makes a contender of ours from its name on the command line.

    Args:
      name: "auto", "v1", "v2", "v2/<partition_size>" or "ragged", which gives `ragged_paged_attention` a query for each
        sequence. ":<implementation>" may follow; an implementation alone means "auto:<implementation>".

    Raises:
      ValueError: the name is not of this form.
    """
    variant, _, chosen = (f"auto:{name}" if name in _IMPLEMENTATIONS else name).partition(":")
    op_name, slash, size = variant.partition("/")
    ops = {
        "auto": paged_jax.paged_attention,
        "v1": paged_jax.paged_attention_v1,
        "v2": paged_jax.paged_attention_v2,
        "ragged": _ragged,
    }
    if op_name not in ops or (chosen and chosen not in _IMPLEMENTATIONS) or (slash and not size.isdigit()):
        raise ValueError(f"no implementation is named {name}; take for example auto, v1, v2/1024 or v1:triton")
    if slash and op_name != "v2":
        raise ValueError(f"only v2 has a partition size, got {name}")
    op = functools.partial(ops[op_name], implementation=chosen or None)
    if slash:
        op = functools.partial(op, partition_size=int(size))

    def build(case: cases.Case, inputs: Inputs) -> list[peers.Candidate]:
        @jax.jit
        def attend(query, key_cache, value_cache, block_tables, seq_lens, k_scale, v_scale):
            pools = query, key_cache, value_cache
            return op(*pools, block_tables, seq_lens, layout=case.layout, k_scale=k_scale, v_scale=v_scale)

        pools = inputs.query, inputs.key_cache, inputs.value_cache
        rest = inputs.seq_lens, inputs.k_scale, inputs.v_scale
        return [peers.Candidate("", attend, [(*pools, table, *rest) for table in inputs.block_tables])]

    return build


def _ragged(query, key_cache, value_cache, block_tables, seq_lens, **options):
    starts = jnp.arange(len(seq_lens) + 1, dtype=jnp.int32)
    return paged_jax.ragged_paged_attention(query, key_cache, value_cache, block_tables, seq_lens, starts, **options)


BENCHMARK = harness.Benchmark(
    op="decode",
    cases=cases.DECODE,
    work=operator.attrgetter("kv_bytes"),
    ceiling=timing.read_ceiling,
    implementation=implementation,
    peers=peers.DECODE,
    elsewhere=peers.TORCH,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    return harness.main(BENCHMARK, argv)


if __name__ == "__main__":
    sys.exit(main())
