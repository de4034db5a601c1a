"""A warpgroup in NumPy: it runs functions of `hopper.inline` in MLIR and PTX, which Pallas's interpreter cannot run.

The function is traced to MLIR, as for a GPU. Then each operation runs for 128 threads at once: a value is an array with
an element for each thread. Shared and global memory are arrays of bytes. An access fails if it is outside them, if it
reads what was never written, or if another thread wrote the same word and no barrier stands between the two.
"""

import contextlib
import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax._src.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, llvm

from paged_jax.kernels.mosaic_gpu.hopper import inline
from tests.test_mosaic_gpu_narrow import array_of, registers_of
from tests.warpgroup_code import GLOBAL, SHARED, THREAD, THREADS, Run

_ROWS = [THREAD // 32 * 16 + THREAD % 32 // 4 + 8 * h for h in range(2)]  # of each thread, of an array [64]
_FIRST = {GLOBAL: 1 << 33, SHARED: 1024}  # addresses in global memory need 64 bits
_SIZE = {GLOBAL: 1 << 22, SHARED: 1 << 19}
# Who used a word. A number below THREADS is the one thread that did. `_SEVERAL`: threads of several warps. `_UNSYNCED +
# w`: several threads of warp w. `_SYNCED + w`: threads of warp w, before a barrier of the warp.
_NOBODY, _SEVERAL, _UNSYNCED, _SYNCED = -1, -2, 200, 300


class Memory:
    """The bytes of an address space, and who wrote and read which word since the last barrier."""

    def __init__(self, space: int):
        self.first, self.bytes = _FIRST[space], np.full(_SIZE[space], 0xFF, np.uint8)
        self.written = np.zeros(_SIZE[space], bool)
        self.writer, self.reader = (np.full(_SIZE[space] // 4, _NOBODY, np.int16) for _ in range(2))
        self.used = 16

    def places(self, address, size: int, where) -> tuple[Any, Any]:
        """The threads that take part, and the byte indices [threads, size] of their accesses."""
        threads = THREAD[where]
        start = np.broadcast_to(address, THREADS)[where].astype(np.int64) - self.first
        assert (start % size == 0).all(), "an access is not aligned"
        places = start[:, None] + np.arange(size)
        assert not places.size or (places.min() >= 0 and places.max() < self.used), "an access outside the arrays"
        return threads, places

    def load(self, address, size: int, where):
        """Loads `size` bytes for each thread: [128, size]; zeros for threads that take no part."""
        threads, places = self.places(address, size, where)
        assert self.written[places].all(), "reads what was never written"
        for words in places[:, ::4].T // 4:
            assert _may_use(self.writer[words], threads).all(), "reads what another thread just wrote"
            for warp in range(THREADS // 32):
                mine, own = words[threads // 32 == warp], threads[threads // 32 == warp]
                old = self.reader[mine]
                alone = (old == _NOBODY) | (old == own) | (old == _SYNCED + warp)
                of_warp = (old == _UNSYNCED + warp) | ((old >= 0) & (old < THREADS) & (old // 32 == warp))
                self.reader[mine] = np.where(alone, own, np.where(of_warp, _UNSYNCED + warp, _SEVERAL))
                again = self.reader[mine]
                self.reader[mine[(again >= 0) & (again < THREADS) & (again != own)]] = _UNSYNCED + warp
        result = np.zeros((THREADS, size), np.uint8)
        result[where] = self.bytes[places]
        return result

    def store(self, address, data, where):
        """Stores each thread's bytes [128, size]."""
        threads, places = self.places(address, data.shape[1], where)
        for words in places[:, ::4].T // 4:
            assert len(np.unique(words)) == len(words), "two threads write one word"
            for other in (self.writer[words], self.reader[words]):
                assert _may_use(other, threads).all(), "writes what another thread just used"
            self.writer[words] = threads
        self.bytes[places], self.written[places] = data[where], True

    def load_by_all(self, address: int, size: int):
        """All threads read these bytes."""
        words = slice((address - self.first) // 4, (address - self.first + size) // 4)
        assert (self.writer[words] == _NOBODY).all(), "some threads may read too early"
        self.reader[words] = _SEVERAL

    def barrier(self, *, of_warps: bool = False):
        """Ends the conflicts between all threads, or those between threads of a warp."""
        for users in (self.writer, self.reader):
            if not of_warps:
                users[:] = _NOBODY
                continue
            threads, warps = (users >= 0) & (users < THREADS), (users >= _UNSYNCED) & (users < _SYNCED)
            users[threads] = _SYNCED + users[threads] // 32
            users[warps] += _SYNCED - _UNSYNCED


def _may_use(other, threads):
    return (other == _NOBODY) | (other == threads) | (other == _SYNCED + threads // 32)


@dataclass(frozen=True)
class Ref:
    """An array in memory."""

    gpu: "Warpgroup"
    space: int
    address: int
    shape: tuple[int, ...]
    dtype: Any

    def get(self) -> np.ndarray:
        """The array's present values."""
        memory = self.gpu.memories[self.space]
        size = int(np.prod(self.shape)) * self.dtype.itemsize
        data = memory.bytes[self.address - memory.first :][:size]
        return data.view(self.dtype).reshape(self.shape)

    def __getitem__(self, index):
        """A read of the whole array by all threads, which must have met since its last write."""
        self.gpu.memories[self.space].load_by_all(self.address, self.get().nbytes)
        return self.get()[index]


class Traced(NamedTuple):
    """A reference while its function is traced."""

    type: Any
    address: Any


class Warpgroup:
    """Memory, and what runs functions on it. Within `running()`, calls of `inline` functions run here."""

    def __init__(self):
        self.memories = {space: Memory(space) for space in (GLOBAL, SHARED)}
        self.copies, self.is_fenced, self.prefetched = [], True, []
        self.first_thread = 2 * THREADS  # the index, in the program, of the warpgroup's first thread
        self.bulk_prefetches = []  # the address and the number of bytes of each
        self.orders = []  # the memory orders of atomic additions
        self.lanes_may_differ = False  # whether a function may return a scalar that has another value in each thread

    def put(self, array, space: int = GLOBAL) -> Ref:
        """Copies an array into memory."""
        ref = self.empty(np.shape(array), np.asarray(array).dtype, space)
        memory, data = self.memories[space], np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        start = ref.address - memory.first
        memory.bytes[start:][: data.size], memory.written[start:][: data.size] = data, True
        return ref

    def empty(self, shape, dtype, space: int = GLOBAL) -> Ref:
        """An array that nobody has written yet. Nobody may access the 64 bytes behind it."""
        memory, dtype = self.memories[space], np.dtype(dtype)
        start = memory.used + 64
        memory.used = start + -(-int(np.prod(shape)) * dtype.itemsize // 16) * 16
        return Ref(self, space, memory.first + start, tuple(shape), dtype)

    @contextlib.contextmanager
    def running(self):
        """Runs calls of `inline` functions here."""

        def inline_mgpu(*, arg_types, return_type=None):
            del arg_types, return_type
            return lambda body: lambda *args: self.call(body, args)

        barrier = functools.partial(_comment, "barrier of a warpgroup")
        with (
            np.errstate(all="ignore"),
            mock.patch.object(inline, "plgpu", SimpleNamespace(**vars(plgpu) | {"inline_mgpu": inline_mgpu})),
            mock.patch.object(mgpu.utils, "memref_ptr", lambda ref: ref.address),
            mock.patch.object(mgpu, "thread_idx", _thread_idx),
            mock.patch.object(mgpu.utils, "warpgroup_barrier", barrier),
            mock.patch.object(mgpu, "warpgroup_barrier", barrier),
            mock.patch.object(mgpu.utils, "warp_barrier", functools.partial(_comment, "barrier of a warp")),
        ):
            yield self

    def call(self, body, arguments):
        """Traces a function to MLIR and runs it; the arguments are references and arrays."""
        with mlir.make_ir_context() as context, ir.Location.unknown(context):
            module = ir.Module.create()
            leaves = [_leaves(x) for x in arguments]
            with ir.InsertionPoint(module.body):
                types = [_type(x) for leaf in leaves for x in leaf]
                made = func.FuncOp("traced", ir.FunctionType.get(types, []))
                block = made.add_entry_block()
            values, results = dict(zip(block.arguments, [x for leaf in leaves for x in leaf], strict=True)), None
            with ir.InsertionPoint(block):
                given = iter(block.arguments)
                traced = [_argument(x, [next(given) for _ in leaf]) for x, leaf in zip(arguments, leaves, strict=True)]
                results = body(None, *traced)
                func.ReturnOp([])
            assert module.operation.verify()
            run = Run(self, values)
            run.block(block, np.ones(THREADS, bool))
            return None if results is None else _result(results, run)


class OfWarps(NamedTuple):
    """A scalar that has another value in each warp."""

    values: Any


class OfThreads(NamedTuple):
    """A scalar that has another value in each thread."""

    values: Any


class InLayout(NamedTuple):
    """An array in the registers of a layout."""

    array: np.ndarray
    layout: Any

    @property
    def shape(self):
        return self.array.shape

    @property
    def ndim(self):
        return self.array.ndim


class OfLanes(NamedTuple):
    """A result [64] in registers of rows. The four lanes of a row have different values of it."""

    registers: list
    layout: Any = mgpu.WGMMA_ROW_LAYOUT
    ndim: int = 1


def _leaves(x) -> list:
    if isinstance(x, Ref):
        return [np.asarray(x.address, np.int64 if x.space == GLOBAL else np.int32)]
    if isinstance(x, OfLanes):
        return x.registers
    if isinstance(x, InLayout) and x.layout == mgpu.WGMMA_ROW_LAYOUT:
        return [np.asarray(x.array)[rows][:, None] for rows in _ROWS]
    if isinstance(x, InLayout):
        return list(registers_of(x.array, x.layout))
    if isinstance(x, OfWarps):
        return [np.repeat(np.array(x.values, np.int32), 32)]
    if isinstance(x, OfThreads):
        return [np.array(x.values, np.int32)]
    x = np.asarray(x)
    return [x if x.ndim == 0 else x.reshape(THREADS, 1)]


def _type(x):
    element = mlir.dtype_to_ir_type(np.dtype(x.dtype))
    return ir.VectorType.get(x.shape[1:], element) if x.ndim == 2 else element


def _argument(x, values):
    if isinstance(x, Ref):
        space = ir.Attribute.parse("#gpu.address_space<workgroup>") if x.space == SHARED else None
        type_ = ir.MemRefType.get(x.shape, mlir.dtype_to_ir_type(x.dtype), memory_space=space)
        bits = llvm.PointerType.get(x.space)
        return Traced(type_, llvm.inttoptr(bits, values[0]))
    registers = np.empty(len(values), object)
    registers[:] = values
    if isinstance(x, InLayout | OfLanes):
        registers = registers.reshape(2, 1) if x.ndim == 1 else registers
        return SimpleNamespace(registers=registers, layout=x.layout, shape=getattr(x, "shape", (64,)), ndim=x.ndim)
    is_scalar = isinstance(x, OfWarps | OfThreads) or np.ndim(x) == 0
    return SimpleNamespace(registers=registers.reshape(() if is_scalar else 1), ndim=0 if is_scalar else 1)


def _result(found, run):
    registers = [run.values[x] for x in found.registers.flat]
    if found.layout == mgpu.WGSplatFragLayout(()):
        values = np.unique(registers[0])
        if values.size == 1:
            return values[0]
        assert run.gpu.lanes_may_differ, "a scalar has several values"
        return OfThreads(registers[0])
    if found.layout == mgpu.WGMMA_ROW_LAYOUT:
        return _of_rows(registers)
    if isinstance(found.layout, mgpu.WGStridedFragLayout):
        return registers[0][:, 0]
    return array_of(np.array([*registers, None], object)[:-1], found.layout, found.shape)


def _of_rows(registers):
    """The array [64] of a lane's two rows, if all four lanes of a row have the same value."""
    result = np.empty(64, registers[0].dtype)
    for rows, register in zip(_ROWS, registers, strict=True):
        result[rows] = register[:, 0]
    agree = all((result[rows] == register[:, 0]).all() for rows, register in zip(_ROWS, registers, strict=True))
    return result if agree else OfLanes(registers)


def _thread_idx():
    word = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(word, [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True)


def _comment(text: str) -> None:
    llvm.inline_asm(None, [], f"// {text}", "", has_side_effects=True)
