"""All-reduce, residual and RMS norm in one kernel, over the memory of the other GPUs (Pallas Mosaic GPU, Hopper).

A decode step reduces some rows of the residual stream after each attention and each MLP. They are few bytes, so latency
is all that counts: one kernel sends, sums, adds and norms, and needs one trip from GPU to GPU. It writes to addresses
that Python passes in a table (`PeerSum`), of memory that all GPUs reach (peer_memory.py): one process has all of them,
or each has a process of its own. With Pallas's own references to other devices XLA would launch a barrier and copy
metadata at each call.

The step's first sum, of the embedding, is XLA's: no device of a process runs a program with XLA's all-reduces for the
first time before all of its devices have loaded it, and to load a kernel on which another GPU waits may block. Between
processes nothing more is needed: to load a kernel may wait for earlier kernels of the same GPU, but these wait only for
kernels that come as early in the other processes.

Grid: a program of one warpgroup for each row, or a cluster of up to eight for each of few rows, since one
multiprocessor loads 128 KiB of addends in no less than a microsecond. Threads load, send, wait, sum and norm 16 bytes
at a time. Through shared memory the programs of a row exchange their sums of squares.

Bytes: of few rows, a device sends each row to N devices. 16 rows of 4096 on eight GPUs are 0.9 MiB over NVLink. Of many
rows it sends 2 (N - 1) / N of them: 64 rows of 4096 are as much.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int32

from examples import peer_memory
from examples.exchange import CHUNK, EMPTY, MOST_ROWS, TURNS, WARPGROUP, exchange, total
from examples.norms import RMSNorm
from examples.products import addends

_FEW_ROWS = 8  # up to so many rows, products are split over the programs of a GPU
_SPLITS = 4
_MOST_SENT = 3 << 19  # bytes that a device may send to all others; of more, it sends each row to its owner
MULTIPLE = WARPGROUP * CHUNK  # hidden_size must be a multiple of it


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
    if (num_processes := _num_processes(mesh)) == 1:
        return None if peer_memory.reach_each_other(mesh) else "no peer memory"
    if num_processes < len(devices):
        return "a process has some of several GPUs"
    try:
        peer_memory.of_processes(mesh, _words(mesh, hidden_size), EMPTY)
    except peer_memory.PeerMemoryError as error:
        return str(error)
    return None


def _num_processes(mesh: Mesh) -> int:
    return len({device.process_index for device in mesh.devices.flat})


def _words(mesh: Mesh, hidden_size: int) -> int:
    """The words of a device's inbox for rows of `hidden_size` bfloat16."""
    return TURNS * (mesh.shape["tp"] + 1) * MOST_ROWS * hidden_size // 2 + MOST_ROWS


@dataclasses.dataclass(frozen=True, eq=False)
class PeerSum:
    """The addresses of the inboxes of a mesh's devices, which only the kernels read and write.

    Attributes:
        mesh: the devices.
        table: i32 `[tp, 2 + 2 * tp]`, split over the devices: for each its rank, 0, and the addresses of all inboxes,
            low halves first. Processes have addresses of their own.
        most_rows: of a call.
    """

    mesh: Mesh
    table: Any
    most_rows: int = MOST_ROWS

    @classmethod
    @functools.cache
    def over(cls, mesh: Mesh, hidden_size: int) -> "PeerSum":
        """Makes empty inboxes for rows of `hidden_size` bfloat16 on the devices of a mesh, once."""
        size = mesh.shape["tp"]
        make = peer_memory.of_one_process if _num_processes(mesh) == 1 else peer_memory.of_processes
        addresses = np.array(make(mesh, _words(mesh, hidden_size), EMPTY), np.int64).view(np.int32)
        ranks = np.arange(size, dtype=np.int32)[:, None]
        # Of this table the devices of a process take their own rows.
        table = np.hstack([ranks, np.zeros_like(ranks), np.tile(addresses, (size, 1))])
        sharding = NamedSharding(mesh, P("tp"))
        return cls(mesh, jax.make_array_from_callback(table.shape, sharding, lambda index: table[index]))

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
    rows, size = x.shape
    return jnp.dot(x, kernel) if rows > _FEW_ROWS or size % _SPLITS else addends(x, kernel, _SPLITS)


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
    """The kernel's call on one device; see `PeerSum`.

    Args:
        part: the device's part, which may be in f32 addends.
        residual, scale: the same on every device.
        table: the device's row.
        num_devices, epsilon: sizes.
    """
    rows, hidden_size = part.shape[-2:]
    programs = programs_of(rows, hidden_size)
    columns, sizes = hidden_size // programs, (num_devices, hidden_size)
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=CHUNK)
    travel = functools.partial(exchange, sizes=sizes, by_owner=by_owner(num_devices, rows, hidden_size))

    def kernel(part_gmem, residual_gmem, scale_gmem, table_gmem, total_gmem, normed_gmem, shared):
        row, of_row = lax.axis_index("row"), lax.axis_index("program")
        at = pl.ds(of_row * columns, columns)

        def load(ref, *rows):
            return plgpu.load(ref.at[(*rows, at)], layout=layout, optimized=False)

        addends = [load(part_gmem, i, row) for i in range(part.shape[0])] if part.ndim == 3 else []
        mine = functools.reduce(jnp.add, addends).astype(jnp.bfloat16) if addends else load(part_gmem, row)
        residual, scale = load(residual_gmem, row), load(scale_gmem)  # which need not wait for others
        sums = travel(mine, residual, table_gmem, row, of_row)
        total_gmem[row, at] = sums
        sums = sums.astype(jnp.float32)
        squares = total(jnp.sum(sums * sums), table_gmem, row, of_row, shared, sizes=sizes)
        factor = lax.rsqrt(squares * (1 / hidden_size) + epsilon)
        normed_gmem[row, at] = (sums * factor * scale.astype(jnp.float32)).astype(jnp.bfloat16)

    out = jax.ShapeDtypeStruct((rows, hidden_size), jnp.bfloat16)
    made = plgpu.kernel(
        kernel,
        out_type=(out, out),
        scratch_types=(plgpu.SMEM((programs,), jnp.float32),),
        grid=(rows,),
        grid_names=("row",),
        cluster=(programs,),
        cluster_names=("program",),
        kernel_name="all_reduce_norm",
    )
    return made(part, residual, scale, table)


def programs_of(rows: int, hidden_size: int) -> int:
    """How many programs share a row. Of many rows each has one, since clusters start later than single programs."""
    most = 8 if rows <= _FEW_ROWS else 1
    return next(n for n in (8, 4, 2, 1) if n <= most and hidden_size % (n * MULTIPLE) == 0)
