"""The cases that the benchmarks time: real models' shapes for decode and for ragged batches, and random ones."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Shapes:
    """The shapes for which an engine compiles its programs, and to which it pads its batches.

    Attributes:
      num_tokens, num_seqs, max_blocks_per_seq, num_blocks: as the ops define them.
    """

    num_tokens: int
    num_seqs: int
    max_blocks_per_seq: int
    num_blocks: int


@dataclass(frozen=True)
class Case:
    """One attention call.

    Attributes:
      name: the model and the batch, as the command line names them.
      seq_lens: the number of tokens of each sequence.
      query_lens: in a ragged case, how many of each sequence's last tokens have queries; None in decode, where it is
        one.
      sliding_window: the window in tokens, or None.
      num_heads, num_kv_heads, head_size, block_size: as the ops define them.
      cache_dtype: the dtype of both caches; queries are bfloat16.
      layout: the layout of both caches.
      shapes: in a ragged case, the shapes to which the batch is padded; None for arrays that are just large enough.
    """

    name: str
    seq_lens: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_size: int = 128
    block_size: int = 16
    cache_dtype: str = "bfloat16"
    layout: Literal["hnd", "nhd", "vllm"] = "hnd"
    query_lens: tuple[int, ...] | None = None
    sliding_window: int | None = None
    shapes: Shapes | None = None

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def num_queries(self) -> tuple[int, ...]:
        """How many queries each sequence has."""
        return self.query_lens or (1,) * self.num_seqs

    @property
    def blocks_per_seq(self) -> tuple[int, ...]:
        """How many blocks each sequence fills; the last one may be filled in part."""
        return tuple(-(-length // self.block_size) for length in self.seq_lens)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of all sequences, which decode must read."""
        token = 2 * self.num_kv_heads * self.head_size * jnp.dtype(self.cache_dtype).itemsize
        return sum(self.seq_lens) * token

    @property
    def seen_flops(self) -> int:
        """Operations of a ragged case: 4 * num_heads * head_size for each pair of a query and a token that it sees."""
        window = self.sliding_window or max(self.seq_lens)
        pairs = 0
        for length, queries in zip(self.seq_lens, self.num_queries, strict=True):
            first = length - queries + 1  # how many tokens the first query sees without a window
            short = range(first, min(length, window) + 1)  # the same for each query that the window does not restrict
            pairs += (short.start + short.stop - 1) * len(short) // 2 + window * (queries - len(short))
        return 4 * self.num_heads * self.head_size * pairs


def _uniform(count: int, low: int, high: int) -> tuple[int, ...]:
    """`count` lengths from `low` to `high` in even steps and mixed order. `count` must not be a multiple of 37."""
    return tuple(low + (high - low) * (37 * i % count) // (count - 1) for i in range(count))


# 64 lengths in mixed order: 1024 half of them, 2048 a quarter, and so on up to 16384.
_skewed = tuple(16384 >> (37 * i % 64 // 4).bit_length() for i in range(64))

_gqa = Case("llama3-8b-64x4096", (4096,) * 64, 32, 8)

DECODE = (
    Case("llama2-7b-32x2048", (2048,) * 32, 32, 32),
    Case("llama2-7b-32x8192", (8192,) * 32, 32, 32),
    Case("llama2-7b-32x32768", (32768,) * 32, 32, 32),
    Case("llama3-8b-1x32768", (32768,), 32, 8),
    Case("llama3-8b-8x8192", (8192,) * 8, 32, 8),
    _gqa,
    Case("llama3-8b-256x2048", (2048,) * 256, 32, 8),
    Case("llama3-70b-32x8192", (8192,) * 32, 64, 8),
    Case("llama3-70b-128xragged", _uniform(128, 512, 4096), 64, 8),
    Case("llama3-8b-64xskewed", _skewed, 32, 8),
    Case("llama3-8b-8xskewed", (16384, 1024, 1024, 2048, 512, 1024, 4096, 1024), 32, 8),
    Case("llama3-8b-4xskewed", (32768, 1024, 1024, 2048), 32, 8),
    Case("llama2-7b-32xskewed", tuple(length // 2 for length in _skewed[:32]), 32, 32),
    Case("llama3-8b-10xuniform", _uniform(10, 100, 16384), 32, 8),
    Case("llama3-8b-12xjittered", _uniform(12, 6554, 9830), 32, 8),
    Case("llama3-8b-24xuniform", _uniform(24, 100, 16384), 32, 8),
    Case("llama3-8b-64xuniform", _uniform(64, 64, 8192), 32, 8),
    Case("mqa-64x8192", (8192,) * 64, 32, 1),
    Case("opt-125m-256x1024", (1024,) * 256, 12, 12, 64),
    Case("llama3-8b-1x512", (512,), 32, 8),
    Case("llama3-8b-4x1024", (1024,) * 4, 32, 8),
    replace(_gqa, name=f"{_gqa.name}-e4m3", cache_dtype="float8_e4m3fn"),
    replace(_gqa, name=f"{_gqa.name}-nhd", layout="nhd"),
    replace(_gqa, name=f"{_gqa.name}-vllm", layout="vllm"),
)


def _ragged(name: str, *rows: tuple[int, int, int], **changes: Any) -> Case:
    """Makes a case of Llama-3-8B's shape from rows of (count, tokens, queries)."""
    seq_lens = tuple(length for count, length, _ in rows for _ in range(count))
    query_lens = tuple(queries for count, _, queries in rows for _ in range(count))
    return replace(Case(name, seq_lens, 32, 8, query_lens=query_lens), **changes)


RAGGED = (
    _ragged("64x4096-1", (64, 4096, 1)),
    _ragged("64x4096-4", (64, 4096, 4)),
    _ragged("64x4096-16", (64, 4096, 16)),
    _ragged("1x32768-1", (1, 32768, 1)),
    _ragged("1x32768-5", (1, 32768, 5)),
    _ragged("8x8192-5", (8, 8192, 5)),
    _ragged("63-decodes-and-2048", (63, 4096, 1), (1, 4096, 2048)),
    _ragged("63-decodes-and-512", (63, 4096, 1), (1, 8192, 512)),
    _ragged("chunk-512-of-32768", (1, 32768, 512)),
    _ragged("prefill-8x8192", (8, 8192, 8192)),
    _ragged("prefill-32x512", (32, 512, 512)),
    _ragged("prefill-8x8192-window-1024", (8, 8192, 8192), sliding_window=1024),
    _ragged("prefill-24-ragged", *((1, n, n) for n in _uniform(24, 100, 4000))),
    _ragged("prefill-8x8192-e4m3", (8, 8192, 8192), cache_dtype="float8_e4m3fn"),
    _ragged("prefill-8x4096-heads-of-64", (8, 4096, 4096), num_heads=64, head_size=64),
    _ragged("prefill-8x4096-heads-of-256", (8, 4096, 4096), num_heads=16, head_size=256),
)

MORE_RAGGED = (
    _ragged("64x4096-1-e4m3", (64, 4096, 1), cache_dtype="float8_e4m3fn"),
    _ragged("chunk-512-of-32768-e4m3", (1, 32768, 512), cache_dtype="float8_e4m3fn"),
    _ragged("prefill-1x32768", (1, 32768, 32768)),
    _ragged("prefill-32x512-e4m3", (32, 512, 512), cache_dtype="float8_e4m3fn"),
    _ragged("prefill-1x32768-e4m3", (1, 32768, 32768), cache_dtype="float8_e4m3fn"),
    _ragged("prefill-4x4096-mha", (4, 4096, 4096), num_kv_heads=32),
)
"""Batches whose only peer is vLLM's FlashAttention 3."""

MORE_DECODE = (
    Case("falcon-7b-64x2048", (2048,) * 64, 71, 1, 64),
    Case("gpt-oss-64x4096", (4096,) * 64, 64, 8, 64),
    Case("phi3-mini-32x2048", (2048,) * 32, 32, 32, 96),
    Case("qwen2-7b-32x4096", (4096,) * 32, 28, 4),
    Case("qwen2-7b-100xuniform", _uniform(100, 100, 9000), 28, 4),
    Case("llama3-70b-tp8-32x2048", (2048,) * 32, 8, 1),
    Case("llama3-70b-tp8-2x16384", (16384,) * 2, 8, 1),
    Case("llama3-8b-1x32768-e4m3", (32768,), 32, 8, cache_dtype="float8_e4m3fn"),
    Case("llama3-8b-64x4096-e5m2", (4096,) * 64, 32, 8, cache_dtype="float8_e5m2"),
    Case("llama3-8b-64x4096-int8", (4096,) * 64, 32, 8, cache_dtype="int8"),
    Case("llama3-8b-64x4096-vllm-e4m3", (4096,) * 64, 32, 8, cache_dtype="float8_e4m3fn", layout="vllm"),
)
"""Models and caches that `DECODE` lacks, for `bench_choice`. gpt-oss has no sinks here."""


def random_decode(count: int, seed: int = 0) -> tuple[Case, ...]:
    """Draws decode cases that nobody tuned for: heads, groups, head sizes, dtypes, layouts, and lengths.

    Args:
      count: how many cases.
      seed: the generator's seed; the first cases of a seed are the same for every count.
    """
    rng = np.random.default_rng(seed)
    drawn = []
    while len(drawn) < count:
        num_kv_heads = int(rng.choice((1, 2, 4, 8, 8, 16, 32)))
        group = int(rng.choice((1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 12, 16, 24)))
        head_size = int(rng.choice((64, 64, 80, 96, 112, 128, 128, 128, 192, 256)))
        cache_dtype = str(rng.choice(("bfloat16", "bfloat16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")))
        layout: Any = str(rng.choice(("hnd", "hnd", "hnd", "nhd")))
        num_seqs, mean = round(2 ** rng.uniform(0, 8)), round(2 ** rng.uniform(8, 15))
        spread = float(rng.choice((0, 0, 0.2, 0.95)))  # lengths are within mean * (1 +- spread)
        seq_lens = tuple(int(n) for n in rng.integers(int(mean * (1 - spread)), int(mean * (1 + spread)) + 1, num_seqs))
        heads = f"{group * num_kv_heads}-{num_kv_heads}x{head_size}"
        name = f"{len(drawn)}-{heads}-{cache_dtype}-{layout}-{num_seqs}x{mean}" + (f"+-{spread:.0%}" if spread else "")
        case = Case(name, seq_lens, group * num_kv_heads, num_kv_heads, head_size, 16, cache_dtype, layout)
        if group * num_kv_heads <= 128 and 2 << 20 <= case.kv_bytes <= 2 << 30:
            drawn.append(case)
    return tuple(drawn)


_MOST_TOKENS = 65536  # the longest context
_MOST_BYTES = 2 << 30  # the most bytes of all keys and values of a batch
_POOL_BYTES = 4 << 30
_SOME_HEADS = ((64, 8, 128), (28, 4, 128), (40, 8, 128), (16, 16, 128), (64, 8, 64), (32, 8, 80), (16, 8, 256))
_BATCHES = 5  # batches of each engine


def random_ragged(count: int, seed: int = 0) -> tuple[Case, ...]:
    """Draws batches that nobody tuned for, composed as by engines: five batches of each engine.

    An engine has a model's heads (in two of three engines 32 query heads and 8 kv heads of 128), caches (one engine of
    four has float8_e4m3fn), a token budget of 512 to 8192, and room for 16 to 256 sequences of up to 65536 tokens. It
    pads each batch to this room, and to the whole, a quarter or a sixteenth of its token budget, so that few programs
    serve all batches. Up to four rows are chunks of prompts, which mostly fill the budget. The other rows decode one
    token each. In some batches they also check up to seven drafted tokens.

    Args:
      count: how many batches.
      seed: the generator's seed; the first cases of a seed are the same for every count.
    """
    rng = np.random.default_rng(seed)
    budgets, places = rng.permutation((512, 1024, 2048, 4096, 8192)), rng.permutation((16, 64, 256))
    drawn: list[Case] = []
    for number in range(-(-count // _BATCHES)):
        heads = _SOME_HEADS[rng.integers(len(_SOME_HEADS))] if number % 3 == 2 else (32, 8, 128)
        engine = Case("", (1,), *heads, cache_dtype="float8_e4m3fn" if number % 4 == 3 else "bfloat16")
        shapes = Shapes(
            num_tokens=int(budgets[number % 5]),
            num_seqs=int(places[(number + number // 3) % 3]),
            max_blocks_per_seq=_MOST_TOKENS // engine.block_size,
            num_blocks=1 << (_POOL_BYTES // (engine.kv_bytes * engine.block_size)).bit_length() - 1,
        )
        drawn += [_random_batch(replace(engine, shapes=shapes), len(drawn) + i, rng) for i in range(_BATCHES)]
    return tuple(drawn[:count])


def _random_batch(engine: Case, number: int, rng: np.random.Generator) -> Case:
    """Draws a batch of an engine. `engine` is a case of one token with the engine's shapes."""
    assert engine.shapes is not None
    budget = engine.shapes.num_tokens
    num_rows = round(engine.shapes.num_seqs ** math.sqrt(rng.uniform()))  # engines are often nearly full
    num_prompts = min(int(rng.choice((0, 0, 1, 1, 2, 4))), num_rows)
    drafted = rng.random() < 0.3
    query_lens = [1] * num_rows
    left = budget - num_rows  # tokens of the budget
    for row in range(num_prompts, num_rows):
        more = min(int(rng.integers(8)), left) if drafted else 0
        query_lens[row] += more
        left -= more
    for row in range(num_prompts):
        more = left if rng.random() < 0.7 else int(rng.integers(left + 1))
        query_lens[row] += more
        left -= more
    most = min(_MOST_TOKENS, _MOST_BYTES // engine.kv_bytes // num_rows)  # the longest mean context
    mean, spread = 2 ** rng.uniform(np.log2(max(256, most / 64)), np.log2(most)), rng.uniform()
    contexts = mean * rng.uniform(1 - spread, 1 + spread, num_rows)
    contexts *= min(1, most * num_rows / contexts.sum())
    seq_lens = [min(max(int(n), q), _MOST_TOKENS) for n, q in zip(contexts, query_lens, strict=True)]
    order = rng.permutation(num_rows)
    num_tokens = sum(query_lens)
    padded = next(size for size in (budget // 16, budget // 4, budget) if size >= num_tokens)
    rows = f"{num_prompts}-prompts-{num_rows - num_prompts}-{'drafts' if drafted else 'decodes'}"
    heads = f"{engine.num_heads}-{engine.num_kv_heads}x{engine.head_size}-{engine.cache_dtype}"
    return replace(
        engine,
        name=f"{number}-{heads}-{rows}-{num_tokens}-queries-mean-{round(mean)}",
        seq_lens=tuple(seq_lens[i] for i in order),
        query_lens=tuple(query_lens[i] for i in order),
        shapes=replace(engine.shapes, num_tokens=padded),
    )


def with_blocks(cases: Iterable[Case], block_sizes: Iterable[int] | None) -> tuple[Case, ...]:
    """The cases, once with blocks of each of these sizes; without sizes, the unchanged cases."""
    cases = tuple(cases)
    return tuple(with_blocks_of(case, n) for n in block_sizes for case in cases) if block_sizes else cases


def with_blocks_of(case: Case, block_size: int) -> Case:
    """The case with blocks of another size, which is added to its name. An engine's pool still holds as many tokens."""
    shapes = case.shapes
    if shapes is not None:
        blocks, num_blocks = (n * case.block_size // block_size for n in (shapes.max_blocks_per_seq, shapes.num_blocks))
        shapes = replace(shapes, max_blocks_per_seq=blocks, num_blocks=num_blocks)
    return replace(case, name=f"{case.name}-blocks-of-{block_size}", block_size=block_size, shapes=shapes)


def select(cases: Sequence[Case], names: Iterable[str] | None) -> tuple[Case, ...]:
    """The cases with these names, in the order of `cases`; all cases if `names` is None.

    Raises:
      ValueError: no case has one of the names.
    """
    if names is None:
        return tuple(cases)
    wanted = set(names)
    if unknown := wanted - {case.name for case in cases}:
        raise ValueError(f"no case is named {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in cases)}")
    return tuple(case for case in cases if case.name in wanted)
