"""Makes the table in `split_tables.txt`: how each op's operands may be split, and how they are, under some shardings.

python -m tests.split_tables > tests/split_tables.txt
"""

import contextlib
import itertools
from pathlib import Path
from unittest import mock

import jax
from jax.sharding import PartitionSpec as P

import paged_jax
from paged_jax import BlockSparse, _dispatch, _splits
from paged_jax.compat import rpa
from tests.every_op import BLOCK_SIZE, HEAD_SIZE, NUM_BLOCKS, NUM_HEADS, NUM_KV_HEADS, NUM_SEQS, OPS, bind

KEPT = Path(__file__).with_name("split_tables.txt")
_SIZES = {"a": 2, "b": 2, "c": 4, "d": 3, "e": 2}


_BY_SEQUENCE = (
    "query",
    "latent_query",
    "block_tables",
    "seq_lens",
    "last_key",
    "last_value",
    "last_slots",
    "query_start_loc",
)


class _Asked(Exception):
    """Raised with the operands of a call."""


def _array(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def _scale(kind, num_kv_heads=NUM_KV_HEADS):
    return {
        "cache": _array(),
        "head": _array(num_kv_heads),
        "slot": _array(NUM_BLOCKS, num_kv_heads, BLOCK_SIZE),
    }[kind]


_OPTIONS = {
    "paged_attention": [
        {},
        {"k_scale": "cache", "v_scale": "slot", "sinks": _array(NUM_HEADS)},
        {"layout": "nhd", "k_scale": "head"},
        {"layout": "vllm", "sliding_window": 3},
        {"block_sparse": BlockSparse(1, 4, 4)},
        {"alibi_slopes": _array(NUM_HEADS)},
        {"num_kv_heads": 1},
    ],
    "write_and_attend": [{}, {"k_scale": "slot", "v_scale": "slot"}, {"sliding_window": 3}],
    "ragged_paged_attention": [{}, {"layout": "nhd", "sinks": _array(NUM_HEADS)}, {"num_kv_heads": 1}],
    "write_to_paged_cache": [
        {},
        {"dtype": "int8", "k_scale": "head", "v_scale": "slot"},
        {"layout": "vllm"},
        {"layout": "nhd"},
    ],
}
# The mesh axes of kv heads, of blocks, of query heads, and of sequences.
_SHARDINGS = [
    ((), (), (), ()),
    (("a",), (), ("a",), ("d",)),
    ((), ("a",), (), ("d",)),
    ((), ("a",), ("b",), ("a",)),
    (("a",), (), ("a", "b"), ()),
    (("c",), (), ("c",), ()),
    (("a",), ("d",), (), ("d",)),
    ((), ("c", "a"), (), ()),
    ((), (), ("a",), ("d",)),
    (("a",), (), ("b", "e"), ()),
]


def _operands(op: str, options: dict):
    """The operands of a call, as shapes, and its static keywords."""
    options = dict(options)
    dtype = options.pop("dtype", "float32")
    kv_heads, layout = options.pop("num_kv_heads", NUM_KV_HEADS), options.get("layout", "hnd")
    named = {name: _scale(options.pop(name), kv_heads) for name in ("k_scale", "v_scale") if name in options}
    named |= {name: options.pop(name) for name in ("sinks", "alibi_slopes") if name in options}
    names, own, _ = OPS[op]
    all_arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in bind(op)[1]]
    for i, name in enumerate(names):
        if name in _BY_SEQUENCE:
            more = NUM_SEQS if name == "query_start_loc" else all_arrays[i].shape[0]
            shape = all_arrays[i].shape[0] + more, *all_arrays[i].shape[1:]
            all_arrays[i] = jax.ShapeDtypeStruct(shape, all_arrays[i].dtype)
    arrays = all_arrays[: len(names)]
    if op in _OPTIONS:
        pools = {
            "hnd": ((NUM_BLOCKS, kv_heads, BLOCK_SIZE, HEAD_SIZE),) * 2,
            "nhd": ((NUM_BLOCKS, BLOCK_SIZE, kv_heads, HEAD_SIZE),) * 2,
            "vllm": (
                (NUM_BLOCKS, kv_heads, HEAD_SIZE // 4, BLOCK_SIZE, 4),
                (NUM_BLOCKS, kv_heads, HEAD_SIZE, BLOCK_SIZE),
            ),
        }[layout]
        for i, name in enumerate(names):
            if name in ("key_cache", "value_cache"):
                arrays[i] = jax.ShapeDtypeStruct(pools[name == "value_cache"], dtype)
            elif "key" in name or "value" in name:
                arrays[i] = _array(arrays[i].shape[0], kv_heads, HEAD_SIZE)
    else:
        named = dict(zip(own, all_arrays[len(names) :], strict=True))

    static = OPS[op][2] | options
    return _asked(lambda arrays, named: getattr(paged_jax, op)(*arrays, **named, **static), arrays, named)


def _rpa_operands(update: bool, pool_shape: tuple[int, ...]):
    """The operands of a read, or of a write, of an `Interleaved` pool, and static keywords."""
    tokens, new = _array(8, NUM_HEADS, HEAD_SIZE), _array(8, NUM_KV_HEADS, HEAD_SIZE)
    lens, pages, starts, three = (jax.ShapeDtypeStruct((n,), "int32") for n in (3, 12, 4, 3))
    arrays = tokens, new, new, jax.ShapeDtypeStruct(pool_shape, "int8"), lens, pages, starts, three
    options = {"k_scale": 1.0, "v_scale": 1.0, "update_kv_cache": update}
    return _asked(lambda *x: rpa.ragged_paged_attention(*x, **options), *arrays)


def _asked(function, *arguments):
    """The operands and the static keywords of the first call that a function makes."""
    found = []

    def ask(op, operands, *, implementation=None, unwanted=(), **static):
        found.append((op, operands, static))
        raise _Asked

    with mock.patch.object(_dispatch, "call", ask), contextlib.suppress(_Asked):
        jax.eval_shape(function, *arguments)
    return found[0]


def _spec(name: str, axes, sharding) -> P:
    """The sharding of an operand: its heads, blocks and sequences over the mesh axes of these."""
    kv_heads, blocks, heads, seqs = sharding
    of_factor = {"h": kv_heads, "b": blocks, "n": seqs, "g": ()}
    entries = []
    for factors in axes:
        if name in ("query", "sinks", "alibi_slopes") and "g" in factors:
            entries.append(heads or None)
        else:
            entries.append(next((of_factor[f] for f in factors if f in of_factor), ()) or None)
    return P(*entries)


def _lines(title: str, op: str, operands, static: dict):
    """The lines of a call."""
    axes = _splits.CallAxes(op, operands, static)
    rule, sizes = axes.shardy_rule()
    yield f"{title}: {rule} {sizes}"
    yield f"    sources {' '.join(','.join(map(str, x)) for x in axes.sources)}"
    for sharding in _SHARDINGS:
        specs = [_spec(name, x, sharding) for name, x in zip(axes.names, axes.operands, strict=True)]
        chosen = axes.choose(specs, _SIZES)
        results = ", ".join(" ".join("".join(x or "-") for x in spec) for spec in chosen.specs(axes.results))
        yield f"    {' '.join(''.join(x) or '-' for x in sharding)}: {chosen.axes} {results}"


def table() -> str:
    """The table's lines."""
    lines = []
    for op in OPS:
        for options in _OPTIONS.get(op, [{}]):
            shown = {name: getattr(x, "shape", x) for name, x in options.items()}
            lines += _lines(f"{op} {shown}", *_operands(op, options))
    for rows, update in itertools.product((2 * NUM_KV_HEADS, 2 * NUM_KV_HEADS + 4), (False, True)):
        made = _rpa_operands(update, (NUM_BLOCKS, BLOCK_SIZE, rows, HEAD_SIZE))
        lines += _lines(f"rpa of {rows} rows", *made)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
