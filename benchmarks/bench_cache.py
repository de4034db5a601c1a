"""Times cache writes, block copies and decode that writes: `python -m benchmarks.bench_cache --out FILE`.

The ceiling of writes and copies is a plain copy, whose bytes read and bytes written both count. Their peers are XLA's
scatters. Decode that writes is compared with attention alone, and with the two ops one after the other. All caches are
donated: each call takes the caches that the previous call returned.
"""

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import paged_jax
from benchmarks import cases, harness, timing
from benchmarks import inputs as inputs_lib
from benchmarks.cases import Case
from benchmarks.inputs import Inputs

_POOL_BYTES = 4 << 30  # bytes of both caches, so that a call finds none of its blocks in L2
_NEW_BYTES = 256 << 20  # bytes of all calls' new tokens, so that a call finds few of its own in L2
_PROMPTS = 4096  # a write of this many new tokens or more writes whole prompts
_BLOCK = Case("", (16,), 8, 8)  # the block of all writes and copies: 16 tokens with 8 kv heads of 128
_DECODE = (
    "llama3-8b-64x4096",
    "llama3-70b-32x8192",
    "llama3-8b-1x32768",
    "llama3-8b-8x8192",
    "llama3-8b-1x512",
)
_OURS = (("auto", "implementation", None), ("xla", "peer", "xla"))


@dataclasses.dataclass(frozen=True)
class Write:
    """A write of `tokens` new bfloat16 tokens: decode tokens go to random slots, prompt tokens to random blocks."""

    tokens: int
    layout: Any = "hnd"
    cache_dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"write-{self.tokens}-{self.layout}-{self.cache_dtype}"

    @property
    def work(self) -> int:
        """Bytes read and written."""
        elements = 2 * self.tokens * _BLOCK.num_kv_heads * _BLOCK.head_size
        return elements * (2 + jnp.dtype(self.cache_dtype).itemsize)


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy of `pairs` random blocks to as many others."""

    pairs: int

    @property
    def name(self) -> str:
        return f"copy-{self.pairs}"

    @property
    def work(self) -> int:
        """Bytes read and written."""
        return 2 * self.pairs * 2 * _BLOCK.block_size * _BLOCK.num_kv_heads * _BLOCK.head_size * 2


@dataclasses.dataclass(frozen=True)
class Fused:
    """A decode step that also writes its tokens."""

    case: Case

    @property
    def name(self) -> str:
        return f"decode-{self.case.name}"

    @property
    def work(self) -> int:
        """Bytes that attention reads."""
        return self.case.kv_bytes


Work = Write | Copy | Fused

WORKS: tuple[Work, ...] = (
    *(Write(n, "hnd", dtype) for dtype in ("bfloat16", "float8_e4m3fn") for n in (1, 16, 64, 256, 4096, 16384, 65536)),
    *(Write(n, layout) for layout in ("nhd", "vllm") for n in (256, 16384)),
    *(Copy(n) for n in (16, 256, 4096)),
    *(Fused(case) for case in cases.select(cases.DECODE, _DECODE)),
)


class Contender(NamedTuple):
    """One way to do a write, a copy or a decode step.

    Attributes:
      name, kind: as in the report.
      step: the function to compile and time, ``step(caches, *args) -> (out, caches)``.
      argsets: the arguments besides the caches; calls rotate through them.
      check: raises ValueError if ``(out, caches)`` of the first argset is wrong.
    """

    name: str
    kind: str
    step: Callable
    argsets: list[tuple]
    check: Callable[[Any, tuple[Array, Array]], None]


class Threaded:
    """A compiled step as a function of its arguments alone. It keeps the caches, and donates them to each call."""

    def __init__(self, compiled: Callable, caches: tuple[Array, Array]):
        self.compiled, self.caches = compiled, caches

    def __call__(self, *args: Array) -> tuple:
        out, self.caches = self.compiled(self.caches, *args)
        return out, self.caches


def write_contenders(work: Write, inputs: Inputs) -> Iterator[Contender]:
    """Yields our write and XLA's write, into the same slots."""
    rng = np.random.default_rng(0)
    num_slots = inputs.key_cache.shape[0] * _BLOCK.block_size
    shape = (work.tokens, _BLOCK.num_kv_heads, _BLOCK.head_size)
    keys = jax.random.split(jax.random.key(1), min(16, max(2, math.ceil(_NEW_BYTES / (4 * math.prod(shape))))))
    draws = [jax.random.normal(key, (2, *shape), jnp.bfloat16) for key in keys]
    slots = [jnp.asarray(_slots(work.tokens, num_slots, rng), jnp.int32) for _ in draws]
    scales = inputs.k_scale, inputs.v_scale
    argsets = [(draw[0], draw[1], slot, *scales) for draw, slot in zip(draws, slots, strict=True)]

    def step(implementation, caches, key, value, slot_mapping, k_scale, v_scale):
        options = {"layout": work.layout, "k_scale": k_scale, "v_scale": v_scale, "implementation": implementation}
        return (), paged_jax.write_to_paged_cache(key, value, caches[0], caches[1], slot_mapping, **options)

    before = inputs.key_cache, inputs.value_cache
    expected = jax.jit(functools.partial(step, "xla"))(before, *argsets[0])[1]

    def check(_, caches):
        _same(caches, expected)
        for new, cache, scale, is_key in zip(argsets[0][:2], caches, scales, (True, False), strict=True):
            written = inputs_lib.tokens(cache[slots[0] // _BLOCK.block_size], work.layout, is_key=is_key)
            written = written.reshape(work.tokens, _BLOCK.block_size, *shape[1:])
            written = written[jnp.arange(work.tokens), slots[0] % _BLOCK.block_size]
            exact = np.asarray(new).astype(np.float32) / (1.0 if scale is None else float(scale))
            if np.asarray(written).tobytes() != exact.astype(cache.dtype).tobytes():
                raise ValueError("wrong result: the slots do not hold the tokens")

    for name, kind, implementation in _OURS:
        yield Contender(name, kind, functools.partial(step, implementation), argsets, check)


def _slots(tokens: int, num_slots: int, rng: np.random.Generator) -> np.ndarray:
    """Draws the slots of new tokens: single slots for tokens of decode, shuffled whole blocks for tokens of prompts."""
    if tokens < _PROMPTS:
        return rng.choice(num_slots, tokens, replace=False)
    blocks = rng.choice(num_slots // _BLOCK.block_size, tokens // _BLOCK.block_size, replace=False)
    return (blocks[:, None] * _BLOCK.block_size + np.arange(_BLOCK.block_size)).reshape(-1)


def copy_contenders(work: Copy, inputs: Inputs) -> Iterator[Contender]:
    """Yields our copy and XLA's copy, of the same random blocks."""
    rng = np.random.default_rng(0)
    draws = [rng.choice(inputs.key_cache.shape[0], (work.pairs, 2), replace=False) for _ in range(4)]
    mappings = [jnp.asarray(draw, jnp.int32) for draw in draws]
    source, destination = mappings[0].T
    key_cache, value_cache = (x.at[destination].set(x[source]) for x in (inputs.key_cache, inputs.value_cache))

    def step(implementation, caches, mapping):
        return (), paged_jax.copy_blocks(caches[0], caches[1], mapping, implementation=implementation)

    for name, kind, implementation in _OURS:
        check = functools.partial(_check_caches, expected=(key_cache, value_cache))
        yield Contender(name, kind, functools.partial(step, implementation), [(m,) for m in mappings], check)


def fused_contenders(work: Fused, inputs: Inputs) -> Iterator[Contender]:
    """Yields the op that writes and attends, attention alone, and the two ops one after the other."""
    case = work.case
    new = jax.random.normal(jax.random.key(1), (2, case.num_seqs, case.num_kv_heads, case.head_size), jnp.bfloat16)
    last = inputs.seq_lens - 1
    argsets = []
    for table in inputs.block_tables:
        blocks = jnp.take_along_axis(table, last[:, None] // case.block_size, axis=1)[:, 0]
        slots = blocks * case.block_size + last % case.block_size
        argsets.append((inputs.query, new[0], new[1], table, inputs.seq_lens, slots))
    fused_op, attend, write_op = (
        functools.partial(op, layout=case.layout)
        for op in (paged_jax.write_and_attend, paged_jax.paged_attention, paged_jax.write_to_paged_cache)
    )

    def write(caches, key, value, slots, implementation=None):
        return write_op(key, value, *caches, slots, implementation=implementation)

    def fused(caches, query, key, value, table, seq_lens, slots):
        out, *caches = fused_op(query, key, value, *caches, table, seq_lens, slots)
        return out, tuple(caches)

    def alone(caches, query, key, value, table, seq_lens, slots):
        return attend(query, *caches, table, seq_lens), caches

    def in_turn(caches, query, key, value, table, seq_lens, slots):
        caches = write(caches, key, value, slots)
        return attend(query, *caches, table, seq_lens), caches

    before = inputs.key_cache, inputs.value_cache
    after = jax.jit(functools.partial(write, implementation="xla"))(before, *new, argsets[0][-1])
    for name, kind, step, caches in (
        ("auto", "implementation", fused, after),
        ("attention alone", "peer", alone, before),
        ("write, then attention", "peer", in_turn, after),
    ):
        there = dataclasses.replace(inputs, key_cache=caches[0], value_cache=caches[1])
        index, truth = inputs_lib.truth(case, there)
        check = functools.partial(_check_attention, index=index, truth=truth, expected=caches)
        yield Contender(name, kind, step, argsets, check)


def _check_caches(_: Any, caches: tuple[Array, Array], expected: tuple[Array, Array]) -> None:
    _same(caches, expected)


def _check_attention(out: Array, caches: tuple[Array, Array], index, truth, expected) -> None:
    _same(caches, expected)
    error = np.linalg.norm(np.asarray(out[index]).astype(np.float32) - truth) / np.linalg.norm(truth)
    if not error <= harness.TOLERANCE:
        raise ValueError(f"wrong result, relative error {error:.2g}")


def _same(caches: tuple[Array, Array], expected: tuple[Array, Array]) -> None:
    for name, cache, wanted in zip(("key", "value"), caches, expected, strict=True):
        if not bool(_same_bits(cache, wanted)):
            raise ValueError(f"wrong result: the {name} cache differs")


@jax.jit
def _same_bits(a: Array, b: Array) -> Array:
    unsigned = jnp.uint8 if a.dtype.itemsize == 1 else jnp.uint16
    a, b = (jax.lax.bitcast_convert_type(x, unsigned) for x in (a, b))
    return jnp.all(a == b)


def _time_one(contender: Contender, before: tuple[Array, Array], timer) -> dict[str, Any]:
    compiled = jax.jit(contender.step, donate_argnums=0).lower(before, *contender.argsets[0]).compile()
    memory = compiled.memory_analysis()
    run = Threaded(compiled, jax.tree.map(jnp.copy, before))
    contender.check(*run(*contender.argsets[0]))
    answer = harness.answer_of(timer(run, contender.argsets))
    return answer if memory is None else answer | {"scratch_bytes": memory.temp_size_in_bytes}


def run(
    works: Sequence[Work],
    *,
    out: Path | None = None,
    pool_bytes: int = _POOL_BYTES,
    ceiling: Callable[[], timing.Ceiling] = timing.copy_ceiling,
    timer: Callable[..., timing.Timing] = timing.time_calls,
) -> dict[str, Any]:
    """Times every work with every contender. Returns the report that it writes to `out`."""
    measured = ceiling()
    print(f"ceiling: {measured.rate and round(measured.rate)} {measured.unit} ({measured.note})", flush=True)
    rows: list[dict[str, Any]] = []
    report = {"op": "cache", **harness.environment(), "ceiling": dataclasses.asdict(measured), "rows": rows}
    for work in works:
        try:
            for contender, before in _contenders(work, pool_bytes):
                try:
                    answer = _time_one(contender, before, timer)
                except Exception as error:  # the other contenders' rows still count
                    answer = {"failed": harness.first_line(error)}
                held_against = None if isinstance(work, Fused) else measured
                rows.append(harness.row_of(work.name, work.work, contender.name, contender.kind, answer, held_against))
                harness.print_row(rows[-1])
        except Exception as error:  # mostly because memory ran out: the next work may fit
            print(f"{work.name}: {harness.first_line(error)}", flush=True)
            failed = {"failed": harness.first_line(error)}
            rows.append(harness.row_of(work.name, work.work, "auto", "implementation", failed, None))
        harness.save(report, out)
    return report


def _contenders(work: Work, pool_bytes: int) -> Iterator[tuple[Contender, tuple[Array, Array]]]:
    """Yields each contender of a work with the caches that it starts from."""
    match work:
        case Write():
            shape = dataclasses.replace(_BLOCK, layout=work.layout, cache_dtype=work.cache_dtype)
            build = functools.partial(write_contenders, work)
        case Copy():
            shape, build = _BLOCK, functools.partial(copy_contenders, work)
        case Fused():
            shape, build = work.case, functools.partial(fused_contenders, work)
    inputs = inputs_lib.make(shape, pool_bytes=pool_bytes)
    for contender in build(inputs):
        yield contender, (inputs.key_cache, inputs.value_cache)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code, 2 where there is no GPU."""
    names = {work.name: work for work in WORKS}
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_cache",
        description=f"Device time of cache operations. Cases: {', '.join(names)}.",
    )
    parser.add_argument("--cases", type=lambda text: text.split(","), help="names with commas between; default all")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    chosen = list(names) if args.cases is None else args.cases
    harness.check_names(parser, "case", chosen, names)
    if not harness.has_gpu("cache"):
        return 2
    run([names[name] for name in chosen], out=args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
