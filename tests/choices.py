"""Makes the tables in `choices.txt`: what the GPU implementations choose for random problems.

    python -m tests.choices > tests/choices.txt

A wrong choice costs time, and no test of numbers sees it, so a change of any choice must show. The tables have tunings,
counts that follow from them, bytes of shared memory, and which implementation leads. Any machine can make them.
"""

import dataclasses
import hashlib
import random
from pathlib import Path

import jax
import jax.numpy as jnp

from paged_jax import BlockSparse
from paged_jax._operands import Decode, MlaRagged, Prefix, Ragged
from paged_jax.kernels.mosaic_gpu import leads as leads_of
from paged_jax.kernels.mosaic_gpu.decode import choose as decode_choose
from paged_jax.kernels.mosaic_gpu.decode import geometry as decode_geometry
from paged_jax.kernels.mosaic_gpu.decode import refs as decode_refs
from paged_jax.kernels.mosaic_gpu.mla import choose as mla_choose
from paged_jax.kernels.mosaic_gpu.mla import geometry as mla_geometry
from paged_jax.kernels.mosaic_gpu.ragged import choose as ragged_choose
from paged_jax.kernels.mosaic_gpu.ragged import geometry as ragged_geometry
from paged_jax.kernels.mosaic_gpu.ragged import kinds as ragged_kinds
from paged_jax.kernels.mosaic_gpu.ragged import refs as ragged_refs
from paged_jax.kernels.problem import Device, Problem, Unsupported
from paged_jax.kernels.triton import cache_tuning, mla_tuning, ragged_tuning, tuning
from paged_jax.options import AttentionOptions, Interleaved, PerHead
from tests.test_mosaic_gpu_ragged_plan import planned

KEPT = Path(__file__).with_name("choices.txt")
_HOPPER, _OTHERS = (90, 132), ((80, 108), (89, 58), (90, 114), (100, 148))
_PATTERNS = BlockSparse(4, 8, 256, 0), BlockSparse(0, 6, 256, 4), BlockSparse(1, 9, 256, -2)
_NOT_SHOWN = {"attention", "geometry", "problem", "kernel_name", "takes_all"}
_NOT_SHOWN |= {"merges_copies", "splits_of_whole"}  # they follow from `copies`, which is 1 here


def _array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _facts(rng: random.Random, op: str) -> dict:
    """A random call: sizes and options that occur, the more frequent ones more often. Most calls fit a Hopper GPU."""
    facts = _any_facts(rng)
    if rng.random() < 0.85:
        facts |= {
            "query_dtype": rng.choice(("bfloat16", "float16")),
            "device": rng.choice((_HOPPER, _HOPPER, (90, 114))),
        }
        facts["cache_dtype"] = rng.choice((facts["query_dtype"], facts["query_dtype"], "float8_e4m3fn", "int8"))
        more = (80, 96, 112, 512) if facts["cache_dtype"] == facts["query_dtype"] else ()
        facts["head_size"] = rng.choice((64, 128, 128, 192, 256, *more))
        facts["block_size"] = max(8, facts["block_size"])
        facts["group"] = min(facts["group"], 8 if facts["head_size"] == 512 else 64)
        for name in ("k_scale", "v_scale"):
            facts[name] = facts[name] or ("cache" if facts["cache_dtype"] == "int8" else None)
        if op == "decode":
            facts["sparse"] = None
            if facts["layout"] == "vllm":
                facts |= {"block_size": rng.choice((16, 32, 64)), "head_size": rng.choice((64, 128, 256))}
        elif op != "mla":
            facts |= {"layout": rng.choice(("hnd", "nhd")), "head_size": min(facts["head_size"], 256)}
            if op == "prefix":
                facts |= {
                    "k_scale": None,
                    "v_scale": None,
                    "cache_dtype": rng.choice((facts["query_dtype"], "float8_e4m3fn")),
                }
        else:
            facts["cache_dtype"] = facts["query_dtype"]
    facts["num_blocks"] = rng.choice((0, *[9] * 24))
    facts["max_seq_len"] *= rng.choice((0, *[1] * 24))
    if op == "mla":
        facts["value"] = min(facts["value"], facts["latent"])
    return facts


def _any_facts(rng: random.Random) -> dict:
    pick, head_sizes = rng.choice, (64, 64, 128, 128, 128, 80, 96, 112, 192, 256, 512, 120, 16, 40)
    query_dtype = pick(("bfloat16", "bfloat16", "float16", "float32"))
    cache_dtype = pick((query_dtype, query_dtype, "float8_e4m3fn", "float8_e5m2", "int8"))
    scales = pick((None, "cache", "head", "slot"))
    return {
        "head_size": pick(head_sizes), "group": pick((1, 1, 2, 4, 4, 5, 7, 8, 8, 12, 16, 24, 64)),
        "kv_heads": pick((1, 2, 4, 8, 8, 16)), "block_size": pick((16, 16, 16, 1, 8, 32, 64, 128, 256)),
        "layout": pick(("hnd", "hnd", "nhd", "vllm")), "query_dtype": query_dtype, "cache_dtype": cache_dtype,
        "k_scale": scales or ("cache" if cache_dtype == "int8" else None),
        "v_scale": pick((scales, scales, "cache")) or ("cache" if cache_dtype == "int8" else None),
        "num_seqs": pick((1, 2, 3, 8, 16, 32, 33, 64, 100, 128, 200, 256, 600)),
        "max_seq_len": pick((100, 500, 1000, 2048, 4096, 8192, 20000, 131072)),
        "queries": pick((1, 1, 2, 4, 5, 16, 100, 1000)), "window": pick((None, None, None, 128, 1024)),
        "soft_cap": pick((None, None, 30.0)), "alibi": pick((False, False, True)), "causal": pick((True, True, False)),
        "sparse": pick((None, None, None, *_PATTERNS)),
        "device": pick((_HOPPER, _HOPPER, _HOPPER, *_OTHERS)), "most_queries": rng.random(),
        "value": pick((512, 512, 512, 256, 128)), "latent": pick((576, 576, 576, 512, 640, 320)),
    }  # fmt: skip


def _scale(kind, facts, num_blocks):
    shapes = {"cache": (), "head": (facts["kv_heads"],), "slot": (num_blocks, facts["kv_heads"], facts["block_size"])}
    return None if kind is None else _array("float32", *shapes[kind])


def _operands(facts: dict, op: str):
    """The operands of a call, as shapes."""
    size, kv_heads, block = facts["head_size"], facts["kv_heads"], facts["block_size"]
    num_seqs, num_heads = facts["num_seqs"], facts["kv_heads"] * facts["group"]
    tokens = num_seqs if op == "decode" else num_seqs * facts["queries"]
    width = -(-facts["max_seq_len"] // block)
    num_blocks, x = facts["num_blocks"], 16 // jnp.dtype(facts["cache_dtype"]).itemsize
    key_shape = value_shape = (num_blocks, kv_heads, block, size)
    if facts["layout"] == "nhd":
        key_shape = value_shape = (num_blocks, block, kv_heads, size)
    elif facts["layout"] == "vllm":
        key_shape, value_shape = (num_blocks, kv_heads, size // x, block, x), (num_blocks, kv_heads, size, block)
    elif facts["layout"] != "hnd":
        key_shape = value_shape = (num_blocks, block, 2 * kv_heads, size)
    query = _array(facts["query_dtype"], tokens, num_heads, size)
    caches = [_array(facts["cache_dtype"], *shape) for shape in (key_shape, value_shape)]
    lens = _array("int32", num_seqs, width), _array("int32", num_seqs)
    latent = op == "mla"
    options = AttentionOptions(
        scale=_array("float32"),
        per_head=PerHead(alibi_slopes=_array("float32", num_heads) if facts["alibi"] and not latent else None),
        k_scale=_scale(facts["k_scale"], facts, num_blocks),
        v_scale=_scale(facts["v_scale"], facts, num_blocks),
        layout=facts["layout"],
        max_seq_len=facts["max_seq_len"],
        max_query_len=1 if op == "decode" else max(1, int(tokens * facts["most_queries"])),
        sliding_window=None if latent else facts["window"],
        logits_soft_cap=facts["soft_cap"],
        block_sparse=None if latent else facts["sparse"],
        causal=True if op == "decode" else facts["causal"],
    )
    if op == "decode":
        return Decode(query, *caches, *lens, options)
    starts = _array("int32", num_seqs + 1)
    if latent:
        query = _array(facts["query_dtype"], tokens, num_heads, facts["latent"])
        cache = _array(facts["cache_dtype"], num_blocks, block, facts["latent"])
        scale = None if options.k_scale is None else _array("float32")
        options = dataclasses.replace(options, k_scale=scale, v_scale=scale, layout="nhd")
        return MlaRagged(query, cache, *lens, starts, options)
    if op == "prefix":
        new = [_array(facts["query_dtype"], tokens, kv_heads, size)] * 2
        return Prefix(query, *new, *caches, *lens, starts, options)
    return Ragged(query, *caches, *lens, starts, options)


def _shown(x) -> str:
    """Fields and properties of a choice that are numbers, flags or words, without their names where they are plain."""
    names = [f.name for f in dataclasses.fields(x)] if dataclasses.is_dataclass(x) else []
    names += [name for name in dir(type(x)) if isinstance(getattr(type(x), name), property)]
    words = []
    for name in names:
        if name in _NOT_SHOWN or name.startswith("_"):
            continue
        value = getattr(x, name)
        if isinstance(value, bool | None):
            value = "-+."[0 if value is False else 1 if value else 2]
        elif dataclasses.is_dataclass(value):
            continue
        words.append(str(value).replace(" ", "").replace("Slice(first=", "(").replace("size=", ""))
    return " ".join(words)


def _first_of(choose, *arguments) -> str:
    """What a function chooses, or why it refuses."""
    try:
        return choose(*arguments)
    except Unsupported as refusal:
        return f"refused: {'; '.join(refusal.reasons)}"


def _decode_on_hopper(problem: Problem, gpu: Device) -> str:
    words = []
    for choose in (decode_choose.balanced, decode_choose.in_partitions, decode_choose.unsplit):
        partition = 512 if choose is decode_choose.in_partitions else None
        problem = dataclasses.replace(problem, partition_size=partition)
        made = decode_geometry.Geometry(problem, choose(problem, gpu))
        words.append(f"{_shown(made.tuning)} {decode_refs.shared_memory_bytes(made)}")
        if choose is decode_choose.balanced:
            words.append(_shown(made))
    return " | ".join(words)


def _writes_on_hopper(problem: Problem, gpu: Device) -> str:
    made = dataclasses.replace(problem, writes_tokens=True, cache_dtype=problem.query_dtype)
    if problem.layout == "vllm":
        made = dataclasses.replace(made, layout="nhd")
    return _shown(decode_choose.balanced(made, gpu))


def _decode_of_triton(problem: Problem, gpu: Device) -> str:
    reasons = tuning.refusals(problem)
    chosen, splits = tuning.automatic(problem, gpu)
    kernel = tuning.AttentionKernel(problem.attention, chosen)
    words = [*reasons, _shown(chosen), str(splits), _shown(kernel)]
    if not chosen.final:
        words.append(_shown(tuning.reduce(problem, chosen, splits, gpu)))
    return " | ".join(words)


def _ragged_on_hopper(problem: Problem, gpu: Device) -> str:
    made = ragged_geometry.Geometry(problem, ragged_choose.tune(problem, gpu))
    kinds = [_shown(kind) for kind in ragged_kinds.kinds_there(made)]
    return " | ".join([_shown(made.tuning), str(ragged_refs.shared_memory_bytes(made)), _shown(made), *kinds])


def _ragged_of_triton(problem: Problem, gpu: Device, tune=ragged_tuning.tune) -> str:
    kernel, grid = tune(problem, gpu)
    words = [_shown(kernel.tuning), _shown(kernel), _shown(grid)]
    out = _array(problem.query_dtype, problem.num_tokens, problem.num_heads, problem.head_size)
    words.append(" ".join(str(x.shape) for x in ragged_tuning.result_shapes(out, kernel, grid)[2:]))
    if not kernel.tuning.final:
        words.append(_shown(ragged_tuning.reduce(kernel, grid, gpu)))
    return " | ".join(words)


def _mla_on_hopper(problem: Problem, gpu: Device) -> str:
    chosen = mla_choose.tune(problem, gpu)
    return f"{_shown(chosen)} | {_shown(mla_geometry.Geometry(problem, chosen, one_query=problem.max_query_len == 1))}"


def _mla_of_triton(problem: Problem, gpu: Device) -> str:
    return _ragged_of_triton(problem, gpu, mla_tuning.tune)


def _write_of_triton(problem: Problem, gpu: Device) -> str:
    return _shown_write(cache_tuning.write(problem.query_dtype, problem.num_tokens, problem, gpu))


def _shown_write(kernel) -> str:
    return f"{_shown(kernel)} | {_shown(kernel.quantisation)}"


# For each op: how many problems are shown, how many more have a digest for every 20 of them, and who chooses.
_TABLES = {
    "decode": (60, 300, {"hopper": _decode_on_hopper, "writes": _writes_on_hopper, "triton": _decode_of_triton}),
    "ragged": (50, 120, {"hopper": _ragged_on_hopper, "triton": _ragged_of_triton, "write": _write_of_triton}),
    "prefix": (20, 40, {"hopper": _ragged_on_hopper, "triton": _ragged_of_triton}),
    "mla": (40, 80, {"hopper": _mla_on_hopper, "triton": _mla_of_triton}),
}
_OPS = {"decode": "paged_attention", "ragged": "ragged_paged_attention", "prefix": "prefix_attention"}


def _lines(op: str, number: int, choosers: dict):
    """The lines of one problem."""
    rng = random.Random(f"{op} {number}")
    facts = _facts(rng, op)
    if facts["layout"] == "nhd" and op == "ragged" and number % 2:
        facts["layout"] = Interleaved()
    gpu, operands = Device(*facts.pop("device")), _operands(facts, op)
    caches = operands[1:4] if op != "prefix" else operands[3:6]
    if op == "mla":
        found = []
        jax.eval_shape(lambda x: found.append(Problem.of_latents(*x[:3], x.options, facts["value"])), operands)
        problem = found[0]
    else:
        problem = Problem.of_call(operands.query, *caches, operands.options, prefix=op == "prefix")
    yield f"{op} {number}: {' '.join(map(str, facts.values()))} on {gpu.capability} {gpu.num_multiprocessors}"
    if op in _OPS:
        yield f"    leads {leads_of(_OPS[op], operands)}"
    for name, choose in choosers.items():
        yield f"    {name} {_first_of(choose, problem, gpu)}"


_BATCHES = [  # query lengths, lengths, window, options
    ([1] * 5, [20000, 300, 300, 300, 5000], None, {}),
    ([512, 700, 1, 1, 1], [512, 700, 4000, 9000, 100], None, {}),
    ([100, 1, 1], [6000, 6000, 6000], 1000, {}),
    ([64, 65, 129], [5000, 5000, 5000], None, {"block_sparse": BlockSparse(4, 8, 64, 1)}),
]


def _plans():
    """How ragged batches are cut into items on Hopper: per kind, the sums of items and partial results, and splits."""
    for i, (query_lens, seq_lens, window, options) in enumerate([*_BATCHES, _BATCHES[-2]]):
        prefix = i == len(_BATCHES)
        made = planned(query_lens, seq_lens, 8, 2, 128, window, table_width=1300, prefix=prefix, options=options)
        _, counts, _ = made
        yield f"plan {i}: programs for wide items {int(counts.wide_programs[0])}, order {counts.order.tolist()}"
        for row in counts.table.tolist():
            yield f"    {' '.join(map(str, row[: len(seq_lens) + 2]))}"


def table() -> str:
    """The tables of all ops."""
    lines = [*_plans()]
    for op, (shown, hidden, choosers) in _TABLES.items():
        lines += [line for i in range(shown) for line in _lines(op, i, choosers)]
        for first in range(shown, shown + hidden, 20):
            more = "\n".join(line for i in range(first, first + 20) for line in _lines(op, i, choosers))
            digest = hashlib.sha256(more.encode()).hexdigest()[:16]
            lines.append(f"{op} {first} to {first + 19}: {digest}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
