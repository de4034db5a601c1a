"""Splits a decoder over a mesh of GPUs: a table of its matrices, and the shardings that follow from it.

Tensor parallelism (https://arxiv.org/abs/1909.08053): the mesh axis "tp" splits the heads, the width of the MLP and the
vocabulary. XLA derives everything else from the shardings of the weights and the caches: there is one all-reduce after
the attention and one after the MLP of each layer, and one for the embedding; and of the logits the devices exchange
only the likeliest token of each part of the vocabulary. In decode steps a kernel (all_reduce.py) reduces all but the
first of these sums, and does the norms after them, where the model and the GPUs allow it (`peer_sum`).

    hidden ─ qkv ─ attend ─ o ─ all-reduce ─ gate_up ─ down ─ all-reduce ─ ... ─ lm_head ─ argmax ─ all-gather
             └── a device's heads ─┘         └ a device's columns ┘        └ its tokens' logits ┘

The mesh axis "dcp" splits the blocks of the caches (context parallelism), for contexts that the memory of the others
cannot hold: each device attends to its own blocks, and they merge the results. Its devices have the same weights.

The mesh axis "dp" is for whole copies of the model: `replicas` makes a mesh for each, and each has its own requests.
"""

import dataclasses
import logging
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from examples.config import DecoderConfig
from examples.moe import expert_spec

if TYPE_CHECKING:
    from examples.all_reduce import PeerSum

# The axis of each parameter that "tp" splits. Every device has a copy of all other parameters: norms and most biases.
PARAMETERS = {
    "embed_tokens.embedding": P("tp", None),  # by token: the logits of tied embeddings are split as well
    "attention.qkv_proj.kernel": P(None, "tp"),
    "attention.qkv_proj.bias": P("tp"),
    "attention.o_proj.kernel": P("tp", None),
    "mlp.gate_up_proj.kernel": P(None, "tp"),
    "mlp.gate_up_proj.bias": P("tp"),
    "mlp.up_proj.kernel": P(None, "tp"),
    "mlp.up_proj.bias": P("tp"),
    "mlp.down_proj.kernel": P("tp", None),
    "mlp.shared.gate_up_proj.kernel": P(None, "tp"),
    "mlp.shared.gate_up_proj.bias": P("tp"),
    "mlp.shared.down_proj.kernel": P("tp", None),
    "attention.sinks": P("tp"),
    "attention.q_proj.kernel": P(None, "tp"),
    "attention.q_b_proj.kernel": P(None, "tp"),
    "attention.k_up": P("tp"),
    "attention.v_up": P("tp"),
    "lm_head.kernel": P(None, "tp"),
}
AXES = "dp", "dcp", "tp"  # of a mesh
POOL = P("dcp", "tp")  # blocks and kv heads, of caches in the layout "hnd"
LATENT_POOL = P("dcp")  # blocks of latents, which all heads share
KV_SCALE = P("tp")

# What XLA records into command buffers by default, and collectives.
COMMANDS = "CONDITIONAL,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,FUSION,COLLECTIVES"
_BYTES_OF_RECORDED = 300 << 20  # of weights that a GPU reads, on average, between two all-reduces


class MeshError(ValueError):
    """Says in one line that there are too few devices for a mesh, or that a model cannot be split over it."""


def parse_mesh(text: str) -> dict[str, int]:
    """Reads how many devices each mesh axis has from a text such as "tp=2" or "dp=2,dcp=2,tp=2".

    Raises:
        MeshError: it says something else.
    """
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in sizes or not re.fullmatch(r"[1-9]\d{0,5}", size):
            raise MeshError(f'a mesh is written as "tp=2" or "dp=2,tp=4", got {text!r}')
        sizes[name] = int(size)
    return sizes


def make_mesh(sizes: dict[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """Makes a mesh with the axes "dp", "dcp" and "tp" over the first devices of all processes together.

    Raises:
        MeshError: there are fewer devices.
    """
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    devices, wanted = jax.devices() if devices is None else devices, math.prod(shape)
    if len(devices) < wanted:
        raise MeshError(f"a mesh of {wanted} devices needs as many, there are {len(devices)}")
    return Mesh(np.array(devices[:wanted]).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def replicas(mesh: Mesh) -> list[Mesh]:
    """Gives the meshes of the model's copies, one for each place along "dp"."""
    return [Mesh(row[None], mesh.axis_names, axis_types=mesh.axis_types) for row in mesh.devices]


def split_config(config: DecoderConfig, mesh: Mesh | None) -> DecoderConfig:
    """Gives the config of a decoder that is split over a mesh, which differs in `num_parts`, `num_shards` and
    `num_kv_heads`.

    If there are more devices than kv heads, several devices have a copy of the same kv head.

    Raises:
        MeshError: heads or columns cannot be dealt out evenly.
    """
    if mesh is None:
        return config
    tp = mesh.shape["tp"]
    num_kv_heads = max(config.num_kv_heads, tp)
    sizes = {"num_heads": config.num_heads, "intermediate_size": config.intermediate_size}
    if (experts := config.experts) is not None:
        is_split = experts.split == "columns"
        sizes["experts' width" if is_split else "experts"] = (
            experts.intermediate_size if is_split else experts.num_experts
        )
        sizes["shared experts' width"] = experts.shared_size
    for name, size in sizes.items():
        if size % tp:
            raise MeshError(f"tp={tp} does not divide the model's {name} {size}")
    if num_kv_heads % tp or num_kv_heads % config.num_kv_heads:
        raise MeshError(f"tp={tp} neither divides the model's num_kv_heads {config.num_kv_heads} nor is a multiple")
    if config.qk_norm == "all" and num_kv_heads != config.num_kv_heads:
        raise MeshError(
            f"tp={tp} is more than the model's num_kv_heads {config.num_kv_heads}, which are normed together"
        )
    return dataclasses.replace(config, num_kv_heads=num_kv_heads, num_parts=tp, num_shards=mesh.shape["dcp"])


def sharding_of(
    path: Sequence[Any], shape: tuple[int, ...], mesh: Mesh | None, config: DecoderConfig | None = None
) -> Sharding:
    """Gives the sharding of a parameter.

    Args:
        path: the parameter's path, such as ("layers", 3, "attention", "qkv_proj", "kernel").
        shape: the shape of the whole parameter.
        mesh: the model's mesh, or None for JAX's default device.
        config: the decoder's config, if it has a mixture of experts.
    """
    if mesh is None:
        return SingleDeviceSharding(jax.config.jax_default_device or jax.local_devices()[0])
    spec = _spec_of(path, config)
    parts = [1 if axis is None else mesh.shape[axis] for axis in spec]
    divides = all(size % n == 0 for size, n in zip(shape, parts, strict=False))
    return NamedSharding(mesh, spec if divides else P())  # a vocabulary may not divide evenly


def _spec_of(path: Sequence[Any], config: DecoderConfig | None = None) -> P:
    if config is not None and config.experts is not None and path[-2] == "experts":
        return expert_spec(path[-1], config.experts)
    names = ".".join(str(part) for part in path if not isinstance(part, int)).removeprefix("layers.")
    return PARAMETERS.get(names, P())


def all_reduce_options(weights: Any, mesh: Mesh | None) -> dict[str, Any]:
    """XLA's options for decode steps of a large model over a mesh: NCCL's all-reduces, in command buffers.

    By default XLA reduces with kernels of its own, which it launches one by one between command buffers: a pause of 12
    us each. With NCCL's recorded instead, a step of Llama-3-70B on two H200 became 4% shorter, but one of Llama-3-8B
    45% longer. So this is for models that give a GPU many bytes to read between two all-reduces (benchmarks/LOG.md,
    "All-reduces in command buffers").

    Args:
        weights: the model's weights, nested dicts of arrays or of their shapes and dtypes.
        mesh: the model's mesh, or None for one device.
    """
    if mesh is None or mesh.size == 1:
        return {}
    leaves = jax.tree_util.tree_leaves_with_path(weights)
    num_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for _, x in leaves)
    # A matrix whose rows are split over the devices leaves sums to be reduced; so does the embedding.
    paths = [[key.key for key in path] for path, _ in leaves]
    num_all_reduces = sum(_spec_of(path) == P("tp", None) or path[-2:] == ["experts", "down"] for path in paths)
    if num_bytes < num_all_reduces * _BYTES_OF_RECORDED * mesh.size:
        return {}
    return {"xla_gpu_experimental_use_collective_kernels": "", "xla_gpu_enable_command_buffer": COMMANDS}


def peer_sum(config: DecoderConfig, dtype: DTypeLike, mesh: Mesh | None, is_wanted: bool = True) -> "PeerSum | None":
    """Gives what adds up the devices' parts of a decode step, with residual and norm in one kernel (all_reduce.py).

    Args:
        config: the decoder's config, split over the mesh.
        dtype: the dtype of its weights.
        mesh: its mesh, or None for one device.
        is_wanted: False to leave it to XLA.

    Returns:
        The argument `peers` of `make_step` and of `xla_options`, or None where XLA has to reduce. The logger of this
        module then says why, as a warning on GPUs.
    """
    if mesh is None or mesh.size == 1 or not is_wanted:
        return None
    from examples import all_reduce  # which imports Pallas

    lacks = all_reduce.lacks(mesh, config.hidden_size, dtype) or _unlike(config)
    if lacks is not None:
        level = logging.WARNING if mesh.devices.flat[0].platform == "gpu" else logging.INFO
        logging.getLogger(__name__).log(level, "XLA reduces the decode steps: %s", lacks)
        return None
    return all_reduce.PeerSum.over(mesh, config.hidden_size)


def _unlike(config: DecoderConfig) -> str | None:
    """Says in what a model differs from those whose layers the kernel can sum and norm; None for nothing."""
    differs = {
        "other norms": (config.norm, config.norm_place, config.norm_offset) != ("rms", "before", 0)
        or not config.final_norm,
        "a residual scale": config.residual_scale != 1,
        "biases": config.o_bias or config.mlp_bias,
        "latent attention": config.latent is not None,
        "experts": any(layer.has_experts for layer in config.layers),
    }
    has = [name for name, is_so in differs.items() if is_so]
    return f"the model has {', '.join(has)}" if has else None


def on_mesh[T](make: Callable[[], tuple[T, ...]], mesh: Mesh | None) -> tuple[T, ...]:
    """Makes caches, one for each layer, directly on the devices of a mesh: no device ever holds a whole pool."""
    if mesh is None:
        return make()

    def sharding(x: jax.ShapeDtypeStruct) -> NamedSharding:
        return NamedSharding(mesh, {4: POOL, 3: LATENT_POOL, 1: KV_SCALE}.get(x.ndim, P()))

    return jax.jit(make, out_shardings=jax.tree.map(sharding, jax.eval_shape(make)))()
