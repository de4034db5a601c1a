"""Draws random calls for `tests.fuzz`, from all that the operations support and with options in all combinations.

A `Program` has everything that one compilation fixes: shapes, dtypes and static options. A `Batch` is one set of data
for it: lengths, tables, contents. Both depend only on a seed and a number, so that each can be drawn again.
"""

from dataclasses import dataclass, replace

import numpy as np

from tests import inputs
from tests.cases import CACHE_DTYPES, LAYOUTS, Case, Sparse

DECODE_OPS = ("v1", "v2", "auto", "write_and_attend")
RAGGED_OPS = ("ragged", "single", "prefix", "mla_ragged")
CACHE_OPS = ("write", "copy", "swap", "story")
OPS = (*DECODE_OPS, *RAGGED_OPS, *CACHE_OPS, "mla", "mla_write")
_WEIGHTS = np.array([3, 4, 4, 3, 5, 2, 3, 2, 2, 1, 1, 1, 2, 1], float)  # of OPS, in order
LATENT_OPS = {"mla": "auto", "mla_ragged": "ragged", "mla_write": "write"}
"""The ops on latents, and the ops whose programs and data they share, with keys as latents."""

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LONGEST = 70_000
# With these limits the oracle takes seconds and not minutes: the most elements of K and products of q and k in a batch.
_ELEMENTS = 2**22
_PRODUCTS = 2**28


@dataclass(frozen=True)
class Program:
    """Everything that one compilation fixes.

    Attributes:
      number: which program of its seed this is.
      op: one of `OPS`. "single" is ragged attention with no more rows than sequences, which have one query or none.
      case: dimensions and options; its lengths are only bounds, and every `Batch` has its own.
      num_seqs, width: rows and columns of the block tables.
      num_blocks: blocks of the pools.
      num_tokens: tokens of the ragged queries.
      longest: the largest number of tokens of a sequence.
      causal, max_query_len: the options of ragged attention.
      transform: "none", "vmap" over queries and tables, "vmap-pools" over everything, or "donate".
      value_size: elements of a latent that are its value; None in the ops on keys and values.
    """

    number: int
    op: str
    case: Case
    num_seqs: int
    width: int
    num_blocks: int
    num_tokens: int
    longest: int
    causal: bool = True
    transform: str = "none"
    max_query_len: int | None = None
    value_size: int | None = None


def rng_of(seed, *numbers):
    """Makes the random generator of one program, or of one of its batches."""
    return np.random.default_rng([seed, *numbers])


def program(seed, number, *, ops=OPS, small=False):
    """Draws the program with this number; if `small`, one that an interpreter can run."""
    rng = rng_of(seed, number)
    weights = np.array([_WEIGHTS[OPS.index(op)] for op in ops])
    op = str(rng.choice(ops, p=weights / weights.sum()))
    case = _dimensions(rng, op, small)
    case, value_size = _options(rng, case, op), None
    if op in LATENT_OPS:
        case, value_size = _latents(rng, case, small)
    budget = _ELEMENTS // (16 if small else 1)
    limit = max(8, budget // (case.num_kv_heads * case.head_size))
    num_seqs = int(rng.choice([1, 2, 3, 5] if small else [1, 1, 2, 3, 3, 5, 8, 17, 40, 140]))
    longest = min(limit if rng.random() < 0.15 else max(1, limit // num_seqs), 300 if small else LONGEST)
    longest = int(min(longest, np.exp(rng.uniform(0, np.log(longest + 1))) + 16))
    width = -(-longest // case.block_size) + int(rng.integers(0, 3))
    num_blocks = min(num_seqs * width, -(-max(limit, longest) // case.block_size) + num_seqs) + int(rng.integers(1, 4))
    num_tokens = 0
    if op in RAGGED_OPS:
        most = max(4, _PRODUCTS // (longest * case.num_heads * case.head_size))
        num_tokens = int(min(most, np.exp(rng.uniform(0, np.log(40 if small else 1500)))) + 1)
    if case.max_seq_len is not None:
        case = replace(case, max_seq_len=int(rng.integers(0, width * case.block_size + 2)))
    causal = op not in RAGGED_OPS or rng.random() > 0.15
    if not causal:
        case = replace(case, alibi=False, sliding_window=None, block_sparse=None)
    transform = _transform(rng, op, num_seqs, case)
    bounds = [None, None, 1, 3, int(rng.integers(1, 20)), num_tokens + 1]
    bound = bounds[rng.integers(len(bounds))] if op in RAGGED_OPS else None
    if op == "single":
        bound, num_tokens = 1, int(rng.integers(1, num_seqs + 1))
    return Program(
        number, op, case, num_seqs, width, num_blocks, num_tokens, longest, causal, transform, bound, value_size
    )


def _latents(rng, case, small):
    """Makes a case one of latents, and draws the size of their values."""
    sizes = [16 * int(rng.integers(1, 9))] if small else [576, 576, 576, 64, 320, 1024, 16 * int(rng.integers(1, 65))]
    latent_size, num_heads = int(rng.choice(sizes)), int(rng.choice([1, 2, 5, 8, 16, 33, 64, 128, 130]))
    value_size = 512 if latent_size == 576 and rng.random() < 0.7 else 16 * int(rng.integers(1, latent_size // 16 + 1))
    latents = replace(
        case,
        num_heads=min(num_heads, 16) if small else num_heads,
        num_kv_heads=1,
        head_size=latent_size,
        layout="nhd",
        scale=0.1 if case.scale is None else case.scale,
        alibi=False,
        sliding_window=None,
        block_sparse=None,
        k_scale=None if case.k_scale is None else "scalar",
        v_scale=None,
    )
    return latents, value_size


def _transform(rng, op, num_seqs, case):
    if op in ("v1", "v2", "auto", "ragged", "single", "mla", "mla_ragged") and num_seqs <= 8:
        chosen = str(rng.choice(["none", "none", "none", "vmap", "vmap-pools"]))
        # If each slot has its own scale, two pools would need two arrays of scales.
        return "vmap" if chosen == "vmap-pools" and "slot" in (case.k_scale, case.v_scale) else chosen
    if op in ("write_and_attend", "write", "copy", "swap", "mla_write"):
        return str(rng.choice(["none", "donate"]))
    return "none"


def _dimensions(rng, op, small):
    """Draws heads, sizes, dtypes and layout."""
    num_kv_heads = int(rng.choice([1, 1, 2, 2, 3, 4, 8]))
    group = int(rng.choice([1, 1, 2, 3, 4, 4, 5, 7, 8, 12, 16, 33, 64, 71]))
    group = min(group, 8) if small or num_kv_heads > 4 else group
    sizes = [64, 64, 64, 128, 128, 128, 32, 80, 96, 112, 120, 192, 256, 512]
    head_size = int(rng.choice(sizes)) if rng.random() < 0.8 else 8 * int(rng.integers(1, 65))
    head_size = min(head_size, 128) if small else head_size
    dtype = str(rng.choice(["float16", "bfloat16", "bfloat16", "float32"]))
    cache_dtype = None if rng.random() < 0.45 else str(rng.choice(CACHE_DTYPES))
    layout = str(rng.choice(LAYOUTS))
    itemsize = inputs.dtype_of(cache_dtype or dtype).itemsize
    if layout == "vllm":
        head_size = max(16 // itemsize, head_size // (16 // itemsize) * (16 // itemsize))
    return Case(
        "fuzz",
        num_kv_heads * group,
        num_kv_heads,
        head_size,
        int(rng.choice([*BLOCK_SIZES, 16, 16, 16, 32, 64])),
        dtype,
        cache_dtype,
        layout,
    )


def _options(rng, case, op):
    """Draws options. Each of them occurs in a quarter of the programs, independently of the others."""

    def maybe(*values):
        return values[int(rng.integers(len(values)))] if rng.random() < 0.25 else None

    granularities = ["scalar", "head", "slot"]
    eight_bit = inputs.dtype_of(case.cache_dtype or case.dtype).itemsize == 1
    scaled = case.cache_dtype == "int8" or rng.random() < (0.6 if eight_bit else 0.15)
    if op in ("write", "story", "mla_write") and not _narrower(case):
        scaled = False
    both = scaled and (case.cache_dtype == "int8" or rng.random() < 0.7)
    window = maybe(1, 2, 17, 64, 129, 1000, 2**31 - 1)
    sparse = None
    if rng.random() < 0.25:
        sparse = Sparse(
            int(rng.integers(0, 5)),
            int(rng.integers(0, 9)),
            case.block_size * int(rng.choice([1, 1, 2, 3, 4])),
            int(rng.integers(-2, 3)),
            int(rng.integers(0, 4)),
        )
    return replace(
        case,
        partition_size=case.block_size * int(rng.choice([1, 2, 3, 4, 8, 32])),
        scale=maybe("traced", 0.05, -0.3, 1.0),
        alibi=rng.random() < 0.25,
        sliding_window=None if window is None else int(window),
        logits_soft_cap=maybe(0.5, 5.0, 30.0, 1e6),
        sinks=rng.random() < 0.25,
        block_sparse=sparse,
        k_scale=str(rng.choice(granularities)) if scaled else None,
        v_scale=str(rng.choice(granularities)) if both or (not scaled and case.cache_dtype == "int8") else None,
        scale_size=float(rng.choice([1.0, 1.0, 1.0, -1.0, 1e-3])),
        max_seq_len=maybe(0),  # the function `program` draws the bound
        logits="equal" if rng.random() < 0.05 else "random",
    )


def _narrower(case):
    return inputs.dtype_of(case.cache_dtype or case.dtype).itemsize < inputs.dtype_of(case.dtype).itemsize


@dataclass
class Batch:
    """One set of data for a program: NumPy arrays by the operation's argument names, and what checks need.

    Attributes:
      seq_lens, query_lens: the lengths of each sequence, as lists of int.
      arrays: positional arrays of the operation, by name.
      options: array options, by name.
    """

    seq_lens: list
    query_lens: list
    arrays: dict
    options: dict


def lengths(rng, program):
    """Draws lengths at and near the boundaries of blocks, partitions and tables, for which the pool has room."""
    case, room = program.case, program.num_blocks
    around = (0, 1, case.block_size, case.partition_size, 64, 128, program.longest)
    found = []
    for _ in range(program.num_seqs):
        if rng.random() < 0.5:
            length = int(rng.choice(around)) + int(rng.integers(-1, 2))
        else:
            length = int(rng.integers(0, program.longest + 1))
        length = max(0, min(length, program.longest, room * case.block_size))
        room -= -(-length // case.block_size)
        found.append(length)
    rng.shuffle(found)
    return found


def query_lengths(rng, program, seq_lens):
    """Draws how many of each sequence's tokens are queries: none, one, some or all, until the rows are used up.

    Where there is a bound, one sequence of some batches takes no notice of it.
    """
    left, found, most = program.num_tokens, [], program.max_query_len
    careless = int(rng.integers(len(seq_lens))) if most is not None and rng.random() < 0.15 else None
    for row, length in enumerate(seq_lens):
        wanted = int(rng.choice([0, 1, 1, 5, 16, 17, 64, 10**6]))
        wanted = min(wanted, length, left, left if most is None or row == careless else most)
        left -= wanted
        found.append(wanted)
    return found
