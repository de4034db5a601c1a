"""All-reduce, residual and RMS norm in one kernel, over the memory of the other GPUs (Pallas Mosaic GPU, Hopper).

A decode step reduces some rows of the residual stream after each attention and each MLP. They are few bytes, so latency
is all that counts: one kernel sends, sums, adds and norms, and needs one trip from GPU to GPU. It writes to addresses
that Python passes in a table (`PeerSum`): JAX lets GPUs of one process reach each other's memory. With Pallas's own
references to other devices XLA would launch a barrier and copy metadata at each call.

The step's first sum, of the embedding, is XLA's: no device runs a program with XLA's all-reduces for the first time
before all devices have loaded it, and to load a kernel on which another GPU waits may block.

    few rows     a device's part --> inbox[turn][this rank] of every device, its own included
                 inbox[turn][0] + inbox[turn][1] + ... + residual --> sum --> norm

    many rows    a device's part --> inbox[turn][this rank] of the row's owner
                 the owner: inbox[turn][0] + inbox[turn][1] + ... + residual --> inbox[turn][N] of every device
                 inbox[turn][N] --> sum --> norm

Of many rows the bytes are what takes the time, so each device adds up a part of the rows, and rows travel twice
(`by_owner`).

Grid: a program of one warpgroup for each row. Its threads load, send, wait, sum and norm 16 bytes at a time; shared
memory is only for the sum of squares.

Each device has an inbox of two turns, each with a place for every rank's part of each row, and one for the sum. It is
full of `_EMPTY`, a word that is never sent: two bfloat16 of -0, for which a program sends +0. A thread reads its words
of the row until none of them is `_EMPTY`, then empties them for the turn after next. All devices sum in the order of
ranks, in float32, or take the owner's sum: they get the same bits, in every run.

**No device waits in vain**, if all devices run the same calls in the same order, as they do for XLA's all-reduces. A
program sends its whole row before it waits. All programs of a call run at the same time: there are at most `MOST_ROWS`,
a multiprocessor holds two, and kernels beside this one wait for nobody. So the parts that a program waits for are sent
as soon as the other device begins this call, and an owner has them then. A process in which a call was broken off
cannot go on: its devices may count different turns.

**No word is overwritten before it is read, and no empty word overwrites another.** Let a device send for call n + 2 of
a row. It has ended call n + 1, so it or the row's owner had the receiver's part for that call. So the receiver had
begun n + 1 and ended n, in which it read and emptied the words of that turn. Calls of other rows take other words and
count their own turns.

**No word is read before it is whole.** Each word of 32 bits is stored and loaded as one, and says by itself whether it
has arrived. So no flag follows the data, and no fence. `tests/test_all_reduce.py` runs a model of this protocol.

Bytes: of few rows, a device sends each row to N devices. 16 rows of 4096 on eight GPUs are 0.9 MiB over NVLink. Of many
rows it sends 2 (N - 1) / N of them: 64 rows of 4096 are as much.
"""

import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float, Int32

from examples.norms import RMSNorm

MOST_ROWS = 128  # of a call: all of its programs must be resident, and of more rows XLA's two-shot kernel sends less
_TURNS = 2
_EMPTY = 0x80008000
_WARPGROUP = 128
_FEW_ROWS = 8  # up to so many rows, products are split over the programs of a GPU
_SPLITS = 4
_CHUNK = 8  # elements of 16 bytes, which a thread loads or stores at a time
_STEP = 2 * _CHUNK * _WARPGROUP  # bytes from a thread's chunk to its next one
_IN_FLIGHT = 16  # chunks that a thread waits for at a time
_MOST_SENT = 3 << 19  # bytes that a device may send to all others; of more, it sends each row to its owner
MULTIPLE = _WARPGROUP * _CHUNK  # hidden_size must be a multiple of it


def by_owner(num_devices: int, rows: int, hidden_size: int) -> bool:
    """Whether a row's owner adds it up for all devices, because of so many rows each device would send too much."""
    return num_devices * rows * hidden_size * 2 > _MOST_SENT


def lacks(mesh: Mesh | None, hidden_size: int, dtype: Any) -> str | None:
    """Says why the kernel cannot reduce over the mesh axis "tp"; None if it can."""
    if mesh is None or mesh.shape["tp"] == 1:
        return "there is one device"
    if jnp.dtype(dtype) != jnp.bfloat16 or hidden_size % MULTIPLE:
        return f"it takes bfloat16 rows of a multiple of {MULTIPLE}, got {jnp.dtype(dtype).name} of {hidden_size}"
    devices = list(mesh.devices.flat)
    if mesh.shape["tp"] != len(devices):
        return "the mesh has another axis"
    if any(getattr(device, "compute_capability", "") != "9.0" for device in devices):
        return "a device is no Hopper GPU"
    if len({device.process_index for device in devices}) > 1:
        return "the GPUs belong to several processes"
    return None if _reach_each_other(tuple(device.local_hardware_id for device in devices)) else "no peer memory"


@functools.cache
def _reach_each_other(ordinals: tuple[int, ...]) -> bool:
    """Whether each of these GPUs reads and writes the memory of the others. JAX enables that wherever it can be."""
    driver, can = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    pairs = [(a, b) for a in ordinals for b in ordinals if a != b]
    return all(driver.cuDeviceCanAccessPeer(ctypes.byref(can), *pair) == 0 and can.value == 1 for pair in pairs)


@dataclasses.dataclass(frozen=True, eq=False)
class PeerSum:
    """The inboxes of a mesh's devices, and their addresses. Programs with these addresses need it.

    Attributes:
        mesh: the devices.
        inbox: u32 `[tp, words]`, which only the kernels read and write, by its addresses.
        table: i32 `[tp, 2 + 2 * tp]`, split over the devices: for each its rank, 0, and the addresses of all inboxes,
            low halves first.
        most_rows: of a call.
    """

    mesh: Mesh
    inbox: Any
    table: Any
    most_rows: int = MOST_ROWS

    @classmethod
    @functools.cache  # programs hold the addresses, so that an inbox must live as long as the process
    def over(cls, mesh: Mesh, hidden_size: int) -> "PeerSum":
        """Makes empty inboxes for rows of `hidden_size` bfloat16 on the devices of a mesh, once."""
        size = mesh.shape["tp"]
        words = _TURNS * (size + 1) * MOST_ROWS * hidden_size // 2 + MOST_ROWS
        make = jax.jit(lambda: jnp.full((size, words), _EMPTY, jnp.uint32), out_shardings=NamedSharding(mesh, P("tp")))
        inbox = jax.block_until_ready(make())
        at = {shard.device: shard.data.unsafe_buffer_pointer() for shard in inbox.addressable_shards}
        addresses = np.array([at[device] for device in mesh.devices.flat], np.int64)
        ranks = np.arange(size, dtype=np.int32)
        columns = [ranks, np.zeros_like(ranks), *np.broadcast_to(addresses.view(np.int32), (size, 2 * size)).T]
        return cls(mesh, inbox, jax.device_put(np.stack(columns, axis=1), NamedSharding(mesh, P("tp"))))

    def __call__(
        self,
        x: Float[Array, "rows k"],
        linear: nnx.Linear,
        residual: Float[Array, "rows hidden_size"],
        norm: RMSNorm,
    ) -> tuple[Float[Array, "rows hidden_size"], Float[Array, "rows hidden_size"]]:
        """Computes residual + linear(x), summed over the devices, and its norm, both in bfloat16.

        Args:
            x: bf16, split by columns.
            linear: a layer without a bias whose kernel is split by rows.
            residual: bf16, the same on every device.
            norm: a norm without an offset.
        """
        assert norm.scale is not None
        return self._add(x, linear.kernel[...], residual, norm.scale[...], epsilon=norm.epsilon)

    @functools.cached_property
    def _add(self) -> Any:
        """The computation over the mesh, which JAX traces and lowers once for layers of the same shapes."""
        size = self.mesh.shape["tp"]

        def add(x, kernel, residual, scale, *, epsilon):
            def on_device(x, kernel, residual, scale, table):
                return sum_norm(_product(x, kernel), residual, scale, table[0], num_devices=size, epsilon=epsilon)

            specs = P(None, "tp"), P("tp", None), P(), P(), P("tp")
            split = jax.shard_map(on_device, mesh=self.mesh, in_specs=specs, out_specs=(P(), P()), check_vma=False)
            return split(x, kernel, residual, scale, self.table)

        return jax.jit(add, static_argnames="epsilon")


def _product(x: Array, kernel: Array) -> Array:
    """A device's part. Of few rows it is in addends, which XLA would add up in a kernel of its own."""
    (rows, size), (_, hidden_size) = x.shape, kernel.shape
    if rows > _FEW_ROWS or size % _SPLITS:
        return jnp.dot(x, kernel)
    x, kernel = x.reshape(rows, _SPLITS, -1), kernel.reshape(_SPLITS, -1, hidden_size)
    return jnp.einsum("rsk,skh->srh", x, kernel, preferred_element_type=jnp.float32)


@functools.partial(jax.jit, static_argnames=("num_devices", "epsilon"))  # lowered once for all layers
def sum_norm(
    part: Float[Array, "rows hidden_size"] | Float[Array, "addends rows hidden_size"],
    residual: Float[Array, "rows hidden_size"],
    scale: Float[Array, " hidden_size"],
    table: Int32[Array, " columns"],
    *,
    num_devices: int,
    epsilon: float,
) -> tuple[Array, Array]:
    """The kernel's call on one device; see `PeerSum`. `part` may be in f32 addends; `table` is the device's row."""
    rows, hidden_size = part.shape[-2:]
    out = jax.ShapeDtypeStruct((rows, hidden_size), jnp.bfloat16)
    layout = plgpu.Layout.WG_STRIDED((hidden_size,), vec_size=_CHUNK)
    exchange = functools.partial(_exchange, num_devices=num_devices, by_owner=by_owner(num_devices, rows, hidden_size))

    def kernel(part_gmem, residual_gmem, scale_gmem, table_gmem, total_gmem, normed_gmem):
        def load(ref, at):
            return plgpu.load(ref.at[at], layout=layout, optimized=False)

        row = lax.axis_index("row")
        addends = [load(part_gmem, (i, row)) for i in range(part.shape[0])] if part.ndim == 3 else []
        mine = functools.reduce(jnp.add, addends).astype(jnp.bfloat16) if addends else load(part_gmem, row)
        residual, scale = load(residual_gmem, row), load(scale_gmem, slice(None))  # which need not wait for others
        total = exchange(mine, residual, table_gmem, row)
        total_gmem[row] = total
        total = total.astype(jnp.float32)
        mean = jnp.sum(total * total) * (1 / hidden_size)
        normed_gmem[row] = (total * lax.rsqrt(mean + epsilon) * scale.astype(jnp.float32)).astype(jnp.bfloat16)

    call = plgpu.kernel(kernel, out_type=(out, out), grid=(rows,), grid_names=("row",), kernel_name="all_reduce_norm")
    return call(part, residual, scale, table)


def _exchange(part: Array, residual: Array, table_gmem: Any, row: Any, *, num_devices: int, by_owner: bool) -> Array:
    """Sends a row of this device's part, and returns the sum of all devices' parts and the residual, in bfloat16."""
    (hidden_size,) = part.shape
    layout = plgpu.Layout.WG_STRIDED((hidden_size,), vec_size=_CHUNK)

    @plgpu.inline_mgpu(
        arg_types=(layout, layout, plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct((hidden_size,), jnp.dtype(jnp.bfloat16), layout=layout),
    )
    def exchange(_, part, residual, table_gmem, row):
        (row,) = row.registers.flat
        inbox = _Inbox.of(table_gmem, num_devices, hidden_size)
        count_at = _plus(inbox.mine, _bytes(row, 4, inbox.turn_bytes * _TURNS))
        count = _load(count_at)
        turn = arith.andi(count, _i32(_TURNS - 1))
        thread = arith.remui(mgpu.thread_idx(), _i32(_WARPGROUP))
        at = _plus(_bytes(turn, inbox.turn_bytes), _bytes(row, 2 * hidden_size))
        at = _plus(at, _bytes(thread, 2 * _CHUNK))
        reduce = _by_owner if by_owner else _by_all
        totals = reduce(inbox, at, row, list(part.registers.flat), list(residual.registers.flat))
        mgpu.warpgroup_barrier()  # all threads have read the count
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, thread, _i32(0))):
            _assembly("st.relaxed.sys.global.b32 [$0], $1;", "l,r", count_at, arith.addi(count, _i32(1)))
        registers = np.empty(len(totals), object)
        registers[:] = totals
        return mgpu.FragmentedArray(_registers=registers, _layout=part.layout, _is_signed=None)

    return exchange(part, residual, table_gmem, row)  # pyright: ignore[reportCallIssue]


def _by_all(inbox: "_Inbox", at: Any, row: Any, part: Sequence[Any], residual: Sequence[Any]) -> list[Any]:
    """Every device sends its part to all, and adds up all parts."""
    for address in inbox.addresses:
        _send(part, _plus(_plus(address, at), _bytes(inbox.rank, inbox.rank_bytes)))
    return _add_up(inbox, _plus(inbox.mine, at), residual)


def _by_owner(inbox: "_Inbox", at: Any, row: Any, part: Sequence[Any], residual: Sequence[Any]) -> list[Any]:
    """Every device sends its part to the row's owner, which adds up all parts and sends the sum to all."""
    num_devices = len(inbox.addresses)
    owner, begin = arith.remui(row, _i32(num_devices)), _plus(inbox.mine, at)
    address = inbox.address_of(owner)
    _send(part, _plus(_plus(address, at), _bytes(inbox.rank, inbox.rank_bytes)))
    sums_at = num_devices * inbox.rank_bytes
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, owner, inbox.rank)):
        totals = _add_up(inbox, begin, residual)
        for address in inbox.addresses:
            _send(totals, _plus(_plus(address, at), _i64(sums_at)))
    offsets = [sums_at + i * _STEP for i in range(len(part))]
    return [_bfloats(words) for words in _take(begin, offsets)]


def _send(chunks: Sequence[Any], to: Any) -> None:
    """Stores a thread's chunks of a row."""
    for i, chunk in enumerate(chunks):
        _store(to, i * _STEP, [_unlike_empty(word) for word in _words(chunk)])


def _add_up(inbox: "_Inbox", begin: Any, residual: Sequence[Any]) -> list[Any]:
    """Waits for a thread's chunks of all devices' parts. Returns their sums and the residual's, in bfloat16."""
    num_devices, totals = len(inbox.addresses), []
    group = max(1, _IN_FLIGHT // num_devices)
    for first in range(0, len(residual), group):
        columns = range(first, min(first + group, len(residual)))
        arrived = _take(begin, [r * inbox.rank_bytes + i * _STEP for i in columns for r in range(num_devices)])
        for i in columns:
            parts = [_wide(_bfloats(words)) for words in arrived[(i - first) * num_devices :][:num_devices]]
            total = arith.addf(_wide(residual[i]), functools.reduce(arith.addf, parts))
            totals.append(arith.truncf(ir.VectorType.get((_CHUNK,), ir.BF16Type.get()), total))
    return totals


def _take(begin: Any, offsets: list[int]) -> list[list[Any]]:
    """Waits for the words of 16 bytes at each offset, and empties them for the turn after next."""
    arrived = _wait_for(begin, offsets)
    for offset in offsets:
        _store(begin, offset, [_i32(_EMPTY - 2**32)] * 4)
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
        table = llvm.ptrtoint(_type(64), mgpu.utils.memref_ptr(table_gmem))
        rank = _load(table)
        addresses = [_load(_plus(table, _i64(8 + 8 * i)), 64) for i in range(num_devices)]
        rank_bytes = MOST_ROWS * hidden_size * 2
        inbox = cls(rank, addresses, None, rank_bytes, (num_devices + 1) * rank_bytes)
        return inbox._replace(mine=inbox.address_of(rank))

    def address_of(self, rank: Any) -> Any:
        """The address of a device's inbox."""
        found = self.addresses[0]
        for i, address in enumerate(self.addresses[1:], start=1):
            found = arith.select(arith.cmpi(arith.CmpIPredicate.eq, rank, _i32(i)), address, found)
        return found


def _wait_for(begin: Any, offsets: list[int]) -> list[list[Any]]:
    """Reads 16 bytes at each offset again and again until no word is `_EMPTY`. Returns the words."""
    count = 4 * len(offsets)
    loads, checks = [], []
    for i, offset in enumerate(offsets):
        words = [f"${4 * i + j}" for j in range(4)]
        loads.append(f"ld.relaxed.sys.global.v4.b32 {{{', '.join(words)}}}, [${count}+{offset}];")
        checks += [f"setp.eq.or.b32 empty, {word}, {_EMPTY:#x}, empty;" for word in words]
    checks[0] = f"setp.eq.b32 empty, $0, {_EMPTY:#x};"
    code = ["{", ".reg .pred empty;", "again:", *loads, *checks, "@empty bra again;", "}"]
    result = _assembly("\n".join(code), ",".join(["=&r"] * count + ["l"]), begin, returns=_type(32), results=count)
    return [result[4 * i : 4 * i + 4] for i in range(len(offsets))]


def _words(register: Any) -> list[Any]:
    """The four words of eight bfloat16."""
    words = vector.bitcast(ir.VectorType.get((4,), _type(32)), register)
    return [vector.extract(words, [], [i]) for i in range(4)]


def _bfloats(words: list[Any]) -> Any:
    """The bfloat16 of four words."""
    halves = vector.from_elements(ir.VectorType.get((4,), _type(32)), words)
    return vector.bitcast(ir.VectorType.get((_CHUNK,), ir.BF16Type.get()), halves)


def _wide(halves: Any) -> Any:
    return arith.extf(ir.VectorType.get((_CHUNK,), ir.F32Type.get()), halves)


def _unlike_empty(word: Any) -> Any:
    """A word with the same two numbers that is not `_EMPTY`."""
    is_empty = arith.cmpi(arith.CmpIPredicate.eq, word, _i32(_EMPTY - 2**32))
    return arith.select(is_empty, _i32(0), word)


def _store(address: Any, offset: int, words: list[Any]) -> None:
    """Stores 16 bytes; each word is stored as a whole, for the other devices too."""
    _assembly(f"st.relaxed.sys.global.v4.b32 [$0+{offset}], {{$1, $2, $3, $4}};", "l,r,r,r,r", address, *words)


def _load(address: Any, bits: int = 32) -> Any:
    constraint = {32: "r", 64: "l"}[bits]
    code = f"ld.relaxed.sys.global.b{bits} $0, [$1];"
    return _assembly(code, f"={constraint},l", address, returns=_type(bits), results=1)[0]


def _assembly(code: str, constraints: str, *operands: Any, returns: Any = None, results: int = 0) -> list[Any]:
    """Inserts PTX with side effects, whose results all have one type; the compiler keeps its order."""
    kind = llvm.StructType.get_literal([returns] * results) if results > 1 else returns
    result = llvm.inline_asm(kind, operands, code, constraints + ",~{memory}", has_side_effects=True)
    if results < 2:
        return [result][:results]
    return [llvm.extractvalue(returns, result, [i]) for i in range(results)]


def _bytes(x: Any, size: int, base: int = 0) -> Any:
    """base + x * size in 64 bits."""
    return _plus(arith.muli(arith.extui(_type(64), x), _i64(size)), _i64(base))


def _plus(x: Any, y: Any) -> Any:
    return arith.addi(x, y)


def _i32(n: int) -> Any:
    return mgpu.c(n, _type(32))


def _i64(n: int) -> Any:
    return mgpu.c(n, _type(64))


def _type(bits: int) -> Any:
    return ir.IntegerType.get_signless(bits)
