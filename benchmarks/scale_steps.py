"""Steps of whole models over a mesh, for `bench_scale`: random weights, empty caches, and the programs that take them.

Weights are made on the devices, shard by shard, because a whole model may not fit on one device.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import models
from benchmarks.model_steps import State, advance, prompts
from benchmarks.models import BLOCK_SIZE as BLOCK_SIZE
from benchmarks.models import make_tables
from examples.config import DecoderConfig
from examples.loop import make_caches
from examples.sampling import greedy
from examples.sharding import COMMANDS, POOL, peer_sum, sharding_of
from examples.spread_sum import SpreadSum
from examples.step import make_abstract_step, xla_options
from paged_jax.engine import Batch

STEPS = 16  # decode steps in a row
_RECORDED = {"xla_gpu_enable_command_buffer": COMMANDS}
_NCCL = {"xla_gpu_experimental_use_collective_kernels": ""}
VARIANTS: dict[str, dict[str, str] | None] = {
    "called": None,
    "xla": {},
    "xla-recorded": _RECORDED,
    "nccl": _NCCL,
    "nccl-recorded": _NCCL | _RECORDED,
}
"""How decode steps reduce: as the examples do ("called"), or by XLA's or NCCL's all-reduces, recorded or not."""

PIECES: dict[str, dict[str, Any]] = {
    "queued": {"xla_gpu_experimental_parallel_collective_overlap_limit": 2},
    "triton": {"xla_gpu_enable_triton_gemm": True, "xla_gpu_cublas_fallback": False},
    "spread": {},
    "copied": {"xla_gpu_use_memcpy_local_p2p": True},
    "symmetric": {"xla_gpu_experimental_enable_nccl_symmetric_buffers": True},
}
"""How steps of prompts in pieces may run, beside `xla_options`: an all-reduce is queued behind another one; Triton's
products take the place of cuBLAS's, whose programs seem to wait where an all-reduce has their SM; the residual stream
is spread over the GPUs, with reduce-scatters or with copies (spread_sum.py); or NCCL's memory is seen by all GPUs."""

MODELS = {name: models.MODELS[name] for name in ("llama3-8b", "llama3-70b")}


def put(array: Any, mesh: Mesh, *axes: str) -> jax.Array:
    """Puts an array on a mesh's devices, split by these axes. All processes of the mesh have this array."""
    array, sharding = np.asarray(array), NamedSharding(mesh, P(*axes))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def make_weights(shapes: Any, mesh: Mesh) -> Any:
    """Makes random weights on the devices shard by shard, normal with deviation 1/50 (norms: 1)."""

    @functools.cache
    def normal(shape, dtype, sharding):
        return jax.jit(lambda key: (jax.random.normal(key, shape, dtype) * 0.02).astype(dtype), out_shardings=sharding)

    def make(path, leaf):
        if isinstance(leaf, jax.Array):  # the table of `Model.peers`
            return leaf
        names = [getattr(key, "key", None) for key in path]
        sharding = sharding_of(names, leaf.shape, mesh)
        if names[-1] == "scale":
            return put(np.ones(leaf.shape, leaf.dtype), mesh)
        number = zlib.crc32(jax.tree_util.keystr(path).encode()) % 2**31
        return normal(leaf.shape, leaf.dtype, sharding)(jax.random.key(number, impl="rbg"))

    return jax.tree_util.tree_map_with_path(make, shapes)


def abstract_weights(shapes: Any, mesh: Mesh) -> Any:
    """The weights' shapes, dtypes and shardings."""

    def place(path, leaf):
        if isinstance(leaf, jax.Array):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        sharding = sharding_of([getattr(key, "key", None) for key in path], leaf.shape, mesh)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place, shapes)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model over a mesh: its step, the shapes of its weights, and the programs that the benchmark runs.

    Attributes:
        config: the model's config, split over the mesh.
        mesh: the devices.
        context: tokens of each sequence.
        how: a name in `VARIANTS`.
        pieces: into how many pieces a step of prompts is cut (`make_step`).
        prompts_by: names in `PIECES`.
    """

    config: DecoderConfig
    mesh: Mesh
    context: int
    how: str = "called"
    pieces: int = 1
    prompts_by: tuple[str, ...] = ()

    @functools.cached_property
    def peers(self) -> Any:
        """The kernel that adds up the devices' parts in decode steps; None if XLA adds them up."""
        return peer_sum(self.config, jnp.bfloat16, self.mesh, True) if VARIANTS[self.how] is None else None

    @functools.cached_property
    def parts(self) -> tuple[Any, Callable]:
        """The weights' shapes, and the step."""
        spread = None
        if {"spread", "copied"} & set(self.prompts_by):
            spread = SpreadSum(self.mesh, by_copies="copied" in self.prompts_by)
        return make_abstract_step(self.config, jnp.bfloat16, peers=self.peers, pieces=self.pieces, spread=spread)

    def options(self, num_seqs: int) -> dict[str, Any]:
        """XLA's options for decode steps."""
        if (options := VARIANTS[self.how]) is not None:
            return options | xla_options(num_seqs)
        return xla_options(num_seqs, weights=self.parts[0], mesh=self.mesh, peers=self.peers)

    def tables(self, num_seqs: int) -> np.ndarray:
        """Block tables of shuffled blocks."""
        return make_tables(num_seqs, self.context + STEPS)

    def caches(self, num_seqs: int) -> Any:
        """Empty caches."""
        num_blocks = self.tables(num_seqs).size
        return make_caches(self.config, num_blocks, BLOCK_SIZE, jnp.bfloat16, mesh=self.mesh)

    def start(self, num_seqs: int) -> tuple[jax.Array, jax.Array]:
        """Tokens and positions at which decode starts: half of the steps come before the context length is reached."""
        tokens = np.arange(num_seqs, dtype=np.int32) + 7
        positions = np.full(num_seqs, self.context - STEPS // 2, np.int32)
        return put(tokens, self.mesh), put(positions, self.mesh)

    def prompts(self, num_seqs: int) -> Batch:
        """A batch of whole prompts."""
        return prompts(self.tables(num_seqs), self.context)

    def lower(self, phase: str, num_seqs: int) -> jax.stages.Lowered:
        """Lowers the program of a step, which updates its caches in place."""
        shapes, step = self.parts
        weights, tables = abstract_weights(shapes, self.mesh), self.tables(num_seqs)
        state = self._abstract_state(num_seqs)
        at = jax.tree.map(lambda x: x.sharding, state)
        if phase == "decode":
            call, options = functools.partial(advance, step), self.options(num_seqs)
            call = jax.jit(call, donate_argnums=1, out_shardings=at, compiler_options=options)
            return call.lower(weights, state, tables)
        on_all, batch = NamedSharding(self.mesh, P()), self.prompts(num_seqs)

        def prefill(weights, caches, batch):
            logits, caches = step(weights, caches, batch)
            return greedy(logits), caches

        options = xla_options(len(batch.token_ids), weights=shapes, mesh=self.mesh, pieces=self.pieces)
        if self.mesh.devices.flat[0].platform == "gpu":
            options = functools.reduce(lambda a, name: a | PIECES[name], self.prompts_by, options)
        at = on_all, at.caches
        call = jax.jit(prefill, donate_argnums=1, out_shardings=at, compiler_options=options)
        return call.lower(weights, state.caches, batch)

    def _abstract_state(self, num_seqs: int) -> State:
        ids = jax.ShapeDtypeStruct((num_seqs,), jnp.int32, sharding=NamedSharding(self.mesh, P()))
        sizes = self.tables(num_seqs).size, BLOCK_SIZE, jnp.bfloat16
        caches = jax.eval_shape(lambda: make_caches(self.config, *sizes))
        pool = NamedSharding(self.mesh, POOL)
        caches = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=pool), caches)
        return State(ids, ids, caches)

    def floor_bytes(self, num_seqs: int) -> int:
        """Bytes that a device must read in a step: its shards of the weights, of the keys and of the values."""
        shapes, _ = self.parts
        return models.floor_bytes(self.config, shapes, num_seqs, self.context) // self.mesh.shape["tp"]
