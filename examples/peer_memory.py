"""Memory that several GPUs of one host read and write at its addresses, whether one process has these GPUs or several.

JAX lets the GPUs of one process reach each other's memory, so that an ordinary array will do. The GPUs of another
process need a mapping: a process allocates memory by CUDA's driver, and gives the others a handle of it, from which
they get an address of their own. JAX offers neither.

    this process     allocate, fill, cuIpcGetMemHandle ──► 64 bytes ──┐
                                                                      gather over the mesh
    this process     an address  ◄── cuIpcOpenMemHandle ◄── 64 bytes ─┘

All processes call the functions of this file in the same order, as they run programs over the mesh.
"""

import contextlib
import ctypes
import functools
import hashlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

_HANDLE_BYTES = 64
_PAGE = 2 << 20  # bytes; CUDA puts smaller allocations into one mapping with others
_LAZY_ENABLE_PEER_ACCESS = 1
_MESSAGE_BYTES = 128


class PeerMemoryError(OSError):
    """Says in a few words why the GPUs cannot share memory. All processes get the same error."""


class _Handle(ctypes.Structure):
    _fields_ = (("content", ctypes.c_ubyte * _HANDLE_BYTES),)


def reach_each_other(mesh: Mesh) -> bool:
    """Whether each GPU of this process's mesh reads and writes the memory of the others, which JAX then enables."""
    return _reach_each_other(tuple(device.local_hardware_id for device in mesh.devices.flat))


@functools.cache
def _reach_each_other(ordinals: tuple[int, ...]) -> bool:
    driver, can = _driver(), ctypes.c_int()
    pairs = [(a, b) for a in ordinals for b in ordinals if a != b]
    return all(driver.cuDeviceCanAccessPeer(ctypes.byref(can), *pair) == 0 and can.value == 1 for pair in pairs)


def of_one_process(mesh: Mesh, words: int, word: int) -> tuple[int, ...]:
    """Gives the address of `words` words of 32 bits on each device of a mesh, which all begin as `word`."""
    at = {shard.device: shard.data.unsafe_buffer_pointer() for shard in _full(mesh, words, word).addressable_shards}
    return tuple(at[device] for device in mesh.devices.flat)


@functools.cache  # the array lives as long as the process, since programs hold its addresses
def _full(mesh: Mesh, words: int, word: int) -> jax.Array:
    shape, sharding = (mesh.size, words), NamedSharding(mesh, P("tp"))
    return jax.block_until_ready(jax.jit(lambda: jnp.full(shape, word, jnp.uint32), out_shardings=sharding)())


@functools.cache  # nothing frees the memory before the process ends
def of_processes(mesh: Mesh, words: int, word: int) -> tuple[int, ...]:
    """Does the same where each device of the mesh belongs to a process of its own, with addresses for this process.

    Raises:
        PeerMemoryError: the processes cannot share memory.
    """
    (device,) = mesh.local_devices
    ordinal, rank = device.local_hardware_id, list(mesh.devices.flat).index(device)
    if len(set(_gather(mesh, _host()))) > 1:
        raise PeerMemoryError("the processes are on different hosts")
    with _agreement(mesh):  # when it ends, all processes have filled their memory
        mine, handle = _allocate(ordinal, words, word)
    handles = _gather(mesh, handle)
    with _agreement(mesh):
        addresses = tuple(mine if i == rank else _open(ordinal, other) for i, other in enumerate(handles))
    return addresses


def _allocate(ordinal: int, words: int, word: int) -> tuple[int, bytes]:
    """Allocates memory on a GPU and fills it. Returns its address and its handle."""
    address, handle = ctypes.c_uint64(), _Handle()
    num_bytes = -(-4 * words // _PAGE) * _PAGE
    with _context(ordinal):
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        _call("cuMemsetD32_v2", address, ctypes.c_uint(word), ctypes.c_size_t(words))
        _call("cuCtxSynchronize")
        _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return address.value, bytes(handle.content)


def _open(ordinal: int, content: bytes) -> int:
    """Maps another process's memory for a GPU of this one. Returns its address here."""
    address, handle = ctypes.c_uint64(), _Handle.from_buffer_copy(content)
    with _context(ordinal):
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS))
    return address.value


@contextlib.contextmanager
def _context(ordinal: int) -> Iterator[None]:
    """Makes a GPU's primary context, which JAX uses too, the thread's current one."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call("cuCtxPushCurrent_v2", context)
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(context))


def _call(name: str, *arguments: Any) -> None:
    """Calls CUDA's driver."""
    if status := getattr(_driver(), name)(*arguments):
        raise PeerMemoryError(f"{name} gave error {status}")


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@contextlib.contextmanager
def _agreement(mesh: Mesh) -> Iterator[None]:
    """Raises in all processes what is raised in one of them, so that none waits for another one's program."""
    problem = ""
    try:
        yield
    except OSError as error:
        problem = str(error)
    for i, message in enumerate(_gather(mesh, problem.encode().ljust(_MESSAGE_BYTES))):
        if found := message.decode().strip():
            raise PeerMemoryError(f"{found}, on device {i}")


def _gather(mesh: Mesh, content: bytes) -> list[bytes]:
    """Gives the bytes that each process has; they are equally many. None returns before all processes have called."""
    mine = np.frombuffer(content, np.uint8)[None]
    shape = mesh.size, len(content)
    rows = jax.make_array_from_callback(shape, NamedSharding(mesh, P("tp")), lambda _: mine)
    rows = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(rows)
    return [row.tobytes() for row in np.asarray(rows)]


def _host() -> bytes:
    """A digest of this host's name and start."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    started = boot.read_text() if boot.exists() else ""
    return hashlib.sha256(f"{socket.gethostname()} {started}".encode()).digest()
