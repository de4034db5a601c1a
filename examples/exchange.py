"""How a row travels between GPUs and comes back as a sum, inside a kernel (`all_reduce.py`; Mosaic GPU, Hopper).

    few rows     a device's part --> inbox[turn][this rank] of every device, its own included
                 inbox[turn][0] + inbox[turn][1] + ... + residual --> sum

    many rows    a piece of a device's part --> inbox[turn][this rank] of the piece's owner
                 the owner: inbox[turn][0] + inbox[turn][1] + ... + residual --> inbox[turn][N] of every device
                 inbox[turn][N] --> sum

Of many rows the bytes are what takes the time, so each device adds up a part of them, and they travel twice. The pieces
are 2 KiB, a chunk of each thread, and neighbours have different owners. So all programs of all devices add up alike.

Each device has an inbox of two turns, each with a place for every rank's part of each row, and one for the sum. It is
full of `EMPTY`, a word that is never sent: two bfloat16 of -0, for which a program sends +0. A thread reads its words
of the row until none of them is `EMPTY`, then empties them for the turn after next. All devices sum in the order of
ranks, in float32, or take the owner's sum: they get the same bits, in every run.

**No device waits in vain**, if all devices run the same calls in the same order, as they do for XLA's all-reduces. A
program sends all of its columns before it waits. All programs of a call run at the same time: there are at most
`MOST_ROWS`, one for each multiprocessor, and kernels beside this one wait for nobody. So the columns that a program
waits for are sent as soon as the other device begins this call, and owners have them then. A process in which a call
was broken off cannot go on: its devices may count different turns.

**No word is overwritten before it is read, and no empty word overwrites another.** Let a device send for call n + 2 of
a row. It has ended call n + 1, so it or a piece's owner had the receiver's part for that call. So the receiver had
begun n + 1 and ended n, in which it read and emptied the words of that turn. Calls of other rows take other words and
count their own turns. A row's programs read one count, and the first of them raises it when all have read it.

**No word is read before it is whole.** Each word of 32 bits is stored and loaded as one, and says by itself whether it
has arrived. So no flag follows the data, and no fence. `tests/test_all_reduce.py` runs a model of this protocol.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array

MOST_ROWS = 128  # of a call: all of its programs must be resident, and of more rows XLA's two-shot kernel sends less
TURNS = 2
EMPTY = 0x80008000
CHUNK = 8  # elements of 16 bytes, which a thread loads or stores at a time
WARPGROUP = 128
_STEP = 2 * CHUNK * WARPGROUP  # bytes from a thread's chunk to its next one
_IN_FLIGHT = 16  # chunks that a thread waits for at a time


def exchange(
    part: Array, residual: Array, table_gmem: Any, row: Any, of_row: Any, *, sizes: tuple[int, int], by_owner: bool
) -> Array:
    """Sends a program's part of a row, and returns the sum of all devices' and the residual, in bfloat16.

    Args:
        part, residual: `[columns]`.
        table_gmem: the device's row of `PeerSum.table`.
        row: the row.
        of_row: which of its programs this one is.
        sizes: the number of devices, and of all columns.
        by_owner: whether a piece's owner adds it up.
    """
    layout = plgpu.Layout.WG_STRIDED(part.shape, vec_size=CHUNK)
    num_devices, hidden_size = sizes

    @plgpu.inline_mgpu(
        arg_types=(layout, layout, plgpu.RefType(), *[plgpu.Layout.WG_SPLAT(())] * 2),
        return_type=plgpu.ShapeDtypeStruct(part.shape, jnp.dtype(jnp.bfloat16), layout=layout),
    )
    def travel(_, columns, residual, table_gmem, row, of_row):
        (row,), (of_row,) = row.registers.flat, of_row.registers.flat
        inbox = _Inbox.of(table_gmem, num_devices, hidden_size)
        turn = arith.andi(_load(inbox.count_of(row)), _i32(TURNS - 1))
        thread = arith.remui(mgpu.thread_idx(), _i32(WARPGROUP))
        at = _plus(_scaled(turn, inbox.turn_bytes), _scaled(row, 2 * hidden_size), _scaled(thread, 2 * CHUNK))
        at = _plus(at, _scaled(of_row, 2 * part.shape[0]))
        parts = list(columns.registers.flat), list(residual.registers.flat)
        number = _plus(arith.muli(row, _i32(hidden_size // part.shape[0])), of_row)
        totals = _by_owner(inbox, at, number, *parts) if by_owner else _by_all(inbox, at, *parts)
        registers = np.empty(len(totals), object)
        registers[:] = totals
        return mgpu.FragmentedArray(_registers=registers, _layout=columns.layout, _is_signed=None)

    return travel(part, residual, table_gmem, row, of_row)  # pyright: ignore[reportCallIssue]


def total(x: Any, table_gmem: Any, row: Any, of_row: Any, shared: Any, *, sizes: tuple[int, int]) -> Any:
    """Adds up a number of each of a row's programs, and ends the row's turn.

    The programs are a cluster. All of them run, since Mosaic GPU's kernels begin with a barrier of the cluster.

    Args:
        x: f32, the program's number.
        table_gmem, row, of_row, sizes: see `exchange`.
        shared: f32 `[programs]` in shared memory.
    """
    (programs,) = shared.shape

    @plgpu.inline_mgpu(
        arg_types=(*[plgpu.Layout.WG_SPLAT(())] * 3, plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.float32), layout=plgpu.Layout.WG_SPLAT(())),
    )
    def add(_, x, row, of_row, table_gmem, shared):
        (number,), (row,), (of_row,) = x.registers.flat, row.registers.flat, of_row.registers.flat
        thread = arith.remui(mgpu.thread_idx(), _i32(WARPGROUP))
        begin = llvm.ptrtoint(_integer(32), mgpu.utils.memref_ptr(shared))
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, thread, _i32(programs))):
            at = arith.addi(begin, arith.muli(of_row, _i32(4)))
            code = "{ .reg .b32 to; mapa.shared::cluster.u32 to, $0, $1; st.shared::cluster.f32 [to], $2; }"
            _assembly(code, "r,r,f", at, thread, number)
        _assembly("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;", "")
        f32 = ir.F32Type.get()
        found = [
            _assembly(f"ld.shared.f32 $0, [$1+{4 * i}];", "=f,r", begin, returns=f32, results=1)[0]
            for i in range(programs)
        ]
        inbox = _Inbox.of(table_gmem, *sizes)
        is_first = arith.cmpi(arith.CmpIPredicate.eq, arith.ori(thread, of_row), _i32(0))
        with mgpu.when(is_first):  # all of the row's programs have read the count
            count_at = inbox.count_of(row)
            _assembly("st.relaxed.sys.global.b32 [$0], $1;", "l,r", count_at, arith.addi(_load(count_at), _i32(1)))
        return mgpu.FragmentedArray.splat(functools.reduce(arith.addf, found), (), x.layout)

    return add(x, row, of_row, table_gmem, shared)  # pyright: ignore[reportCallIssue]


def _by_all(inbox: "_Inbox", at: Any, part: Sequence[Any], residual: Sequence[Any]) -> list[Any]:
    """Every device sends its part to all, and adds up all parts."""
    for address in inbox.addresses:
        _send(part, _plus(address, at, _scaled(inbox.rank, inbox.rank_bytes)))
    return _add_up(inbox, _plus(inbox.mine, at), residual, _STEP)


def _by_owner(inbox: "_Inbox", at: Any, number: Any, part: Sequence[Any], residual: Sequence[Any]) -> list[Any]:
    """Every device sends each piece of its part to the piece's owner, which adds it up and sends the sum to all.

    Owners take turns, piece by piece and program by program; `number` counts the programs.
    """
    num_devices, begin = len(inbox.addresses), _plus(inbox.mine, at)
    devices, sums_at = _i32(num_devices), num_devices * inbox.rank_bytes
    first_owner = arith.remui(arith.muli(number, _i32(len(part))), devices)
    for i, chunk in enumerate(part):
        address = inbox.address_of(arith.remui(_plus(first_owner, _i32(i)), devices))
        _send([chunk], _plus(address, at, _scaled(inbox.rank, inbox.rank_bytes), _i64(i * _STEP)))
    mine = arith.remui(arith.subi(_plus(inbox.rank, devices), first_owner), devices)  # this device's first piece

    def add_up(first: int, end: int) -> None:
        """Adds up this device's pieces `mine + first`, `mine + first + num_devices`, ... before `mine + end`."""
        firsts = range(first, end, num_devices)
        added = [_chosen(mine, residual[i : i + num_devices]) for i in firsts]
        to = _plus(at, _scaled(mine, _STEP), _i64(first * _STEP))
        totals = _add_up(inbox, _plus(inbox.mine, to), added, num_devices * _STEP)
        for address in inbox.addresses:
            _send(totals, _plus(address, to, _i64(sums_at)), num_devices * _STEP)

    whole = len(part) // num_devices * num_devices
    if whole:
        add_up(0, whole)
    if whole < len(part):
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, mine, _i32(len(part) - whole))):
            add_up(whole, len(part))
    return [_bfloats(words) for words in _take(begin, [sums_at + i * _STEP for i in range(len(part))])]


def _send(chunks: Sequence[Any], to: Any, step: int = _STEP) -> None:
    """Stores a thread's chunks, `step` bytes apart."""
    for i, chunk in enumerate(chunks):
        _store(to, i * step, [_unlike_empty(word) for word in _words(chunk)])


def _add_up(inbox: "_Inbox", begin: Any, residual: Sequence[Any], step: int) -> list[Any]:
    """Waits for a thread's chunks of all devices' parts, `step` bytes apart.

    Returns their sums and the residual's, in bfloat16.
    """
    num_devices, totals = len(inbox.addresses), []
    group = max(1, _IN_FLIGHT // num_devices)
    for first in range(0, len(residual), group):
        columns = range(first, min(first + group, len(residual)))
        arrived = _take(begin, [r * inbox.rank_bytes + i * step for i in columns for r in range(num_devices)])
        for i in columns:
            parts = [_wide(_bfloats(words)) for words in arrived[(i - first) * num_devices :][:num_devices]]
            total = arith.addf(_wide(residual[i]), functools.reduce(arith.addf, parts))
            totals.append(arith.truncf(ir.VectorType.get((CHUNK,), ir.BF16Type.get()), total))
    return totals


def _take(begin: Any, offsets: list[int]) -> list[list[Any]]:
    """Waits for the words of 16 bytes at each offset, and empties them for the turn after next."""
    arrived = _wait_for(begin, offsets)
    for offset in offsets:
        _store(begin, offset, [_i32(EMPTY - 2**32)] * 4)
    return arrived


class _Inbox(NamedTuple):
    """This device's rank, the addresses of all inboxes and of its own, and sizes in bytes."""

    rank: Any
    addresses: list[Any]
    mine: Any
    rank_bytes: int
    turn_bytes: int

    @classmethod
    def of(cls, table_gmem: Any, num_devices: int, hidden_size: int) -> "_Inbox":
        table = llvm.ptrtoint(_integer(64), mgpu.utils.memref_ptr(table_gmem))
        rank = _load(table)
        addresses = [_load(_plus(table, _i64(8 + 8 * i)), 64) for i in range(num_devices)]
        rank_bytes = MOST_ROWS * hidden_size * 2
        inbox = cls(rank, addresses, None, rank_bytes, (num_devices + 1) * rank_bytes)
        return inbox._replace(mine=inbox.address_of(rank))

    def count_of(self, row: Any) -> Any:
        """The address of how often the row was sent."""
        return _plus(self.mine, _scaled(row, 4), _i64(self.turn_bytes * TURNS))

    def address_of(self, rank: Any) -> Any:
        """The address of a device's inbox."""
        return _chosen(rank, self.addresses)


def _chosen(index: Any, of: Sequence[Any]) -> Any:
    """One of some values; the last one if the index is not less than their number."""
    found = of[-1]
    for i, value in enumerate(of[:-1]):
        found = arith.select(arith.cmpi(arith.CmpIPredicate.eq, index, _i32(i)), value, found)
    return found


def _wait_for(begin: Any, offsets: list[int]) -> list[list[Any]]:
    """Reads 16 bytes at each offset again and again until no word is `EMPTY`. Returns the words."""
    count = 4 * len(offsets)
    loads, checks = [], []
    for i, offset in enumerate(offsets):
        words = [f"${4 * i + j}" for j in range(4)]
        loads.append(f"ld.relaxed.sys.global.v4.b32 {{{', '.join(words)}}}, [${count}+{offset}];")
        checks += [f"setp.eq.or.b32 empty, {word}, {EMPTY:#x}, empty;" for word in words]
    checks[0] = f"setp.eq.b32 empty, $0, {EMPTY:#x};"
    code = ["{", ".reg .pred empty;", "again:", *loads, *checks, "@empty bra again;", "}"]
    result = _assembly("\n".join(code), ",".join(["=&r"] * count + ["l"]), begin, returns=_integer(32), results=count)
    return [result[4 * i : 4 * i + 4] for i in range(len(offsets))]


def _words(register: Any) -> list[Any]:
    """The four words of eight bfloat16."""
    words = vector.bitcast(ir.VectorType.get((4,), _integer(32)), register)
    return [vector.extract(words, [], [i]) for i in range(4)]


def _bfloats(words: list[Any]) -> Any:
    """The bfloat16 of four words."""
    halves = vector.from_elements(ir.VectorType.get((4,), _integer(32)), words)
    return vector.bitcast(ir.VectorType.get((CHUNK,), ir.BF16Type.get()), halves)


def _wide(halves: Any) -> Any:
    return arith.extf(ir.VectorType.get((CHUNK,), ir.F32Type.get()), halves)


def _unlike_empty(word: Any) -> Any:
    """A word with the same two numbers that is not `EMPTY`."""
    is_empty = arith.cmpi(arith.CmpIPredicate.eq, word, _i32(EMPTY - 2**32))
    return arith.select(is_empty, _i32(0), word)


def _store(address: Any, offset: int, words: list[Any]) -> None:
    """Stores 16 bytes; each word is stored as a whole, for the other devices too."""
    _assembly(f"st.relaxed.sys.global.v4.b32 [$0+{offset}], {{$1, $2, $3, $4}};", "l,r,r,r,r", address, *words)


def _load(address: Any, bits: int = 32) -> Any:
    constraint = {32: "r", 64: "l"}[bits]
    code = f"ld.relaxed.sys.global.b{bits} $0, [$1];"
    return _assembly(code, f"={constraint},l", address, returns=_integer(bits), results=1)[0]


def _assembly(code: str, constraints: str, *operands: Any, returns: Any = None, results: int = 0) -> list[Any]:
    """Inserts PTX with side effects, whose results all have one type; the compiler keeps its order."""
    kind = llvm.StructType.get_literal([returns] * results) if results > 1 else returns
    result = llvm.inline_asm(kind, operands, code, constraints + ",~{memory}", has_side_effects=True)
    if results < 2:
        return [result][:results]
    return [llvm.extractvalue(returns, result, [i]) for i in range(results)]


def _plus(*addends: Any) -> Any:
    """The sum of integers."""
    return functools.reduce(arith.addi, addends)


def _scaled(x: Any, size: int) -> Any:
    """x * size in 64 bits, of an x of 32 bits."""
    return arith.muli(arith.extui(_integer(64), x), _i64(size))


def _i32(n: int) -> Any:
    """A constant of 32 bits."""
    return mgpu.c(n, _integer(32))


def _i64(n: int) -> Any:
    """A constant of 64 bits."""
    return mgpu.c(n, _integer(64))


def _integer(bits: int) -> Any:
    """An integer's type."""
    return ir.IntegerType.get_signless(bits)
