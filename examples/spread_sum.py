"""Sums of prompts over several GPUs whose residual stream and norms are spread over the GPUs by tokens.

Of an all-reduce each GPU first has the sums of its own tokens, and then sends them to all. Between the two it adds its
tokens' residual and norms them: XLA would have each GPU do so for all tokens.

    a part --> reduce-scatter --> + residual --> norm --> all-gather --> the next product

With `by_copies` both are exchanges of each GPU with each (all-to-all). XLA can copy these without a program on an SM
(`xla_gpu_use_memcpy_local_p2p`), if the GPUs are in one process: the products that run meanwhile keep theirs.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from examples.norms import RMSNorm

LEAST = 16  # rows of a device; fewer are summed by XLA on every device


@dataclasses.dataclass(frozen=True, eq=False)
class SpreadSum:
    """Adds up the devices' parts of many tokens, as `examples.all_reduce.PeerSum` does of few, and for its models.

    Attributes:
        mesh: the devices.
        by_copies: whether all exchanges are all-to-all.
    """

    mesh: Mesh
    by_copies: bool = False

    def __call__(
        self,
        x: Float[Array, "rows k"],
        linear: nnx.Linear,
        residual: Float[Array, "rows hidden_size"],
        norm: RMSNorm,
    ) -> tuple[Float[Array, "rows hidden_size"], Float[Array, "rows hidden_size"]]:
        """Computes residual + linear(x), summed over the devices and spread over them by rows, and its norm.

        Args:
            x: split by columns.
            linear: a layer without a bias whose kernel is split by rows.
            residual: the residual stream, spread or on every device.
            norm: a norm without an offset.
        """
        assert norm.scale is not None
        size = self.mesh.shape["tp"]
        if x.shape[0] % size or x.shape[0] < LEAST * size:
            total = residual + linear(x)
            return total, norm(total).astype(total.dtype)
        return self._add(x, linear.kernel[...], residual, norm.scale[...], epsilon=norm.epsilon)

    @functools.cached_property
    def _add(self) -> Any:
        size = self.mesh.shape["tp"]

        def to_all(array):
            if not self.by_copies:
                return lax.all_gather(array, "tp", axis=0, tiled=True)
            copies = lax.all_to_all(jnp.broadcast_to(array, (size, *array.shape)), "tp", 0, 0)
            return copies.reshape(-1, array.shape[-1])

        def sum_own(part):
            if not self.by_copies:
                return lax.psum_scatter(part, "tp", scatter_dimension=0, tiled=True).astype(jnp.float32)
            parts = lax.all_to_all(part.reshape(size, -1, part.shape[-1]), "tp", 0, 0)
            return parts.astype(jnp.float32).sum(axis=0)

        def on_device(x, kernel, residual, scale, *, epsilon):
            total = (residual.astype(jnp.float32) + sum_own(jnp.dot(x, kernel))).astype(x.dtype)
            of_norm = total.astype(jnp.float32)
            mean = jnp.mean(of_norm * of_norm, axis=-1, keepdims=True)
            normed = of_norm * lax.rsqrt(mean + epsilon) * scale.astype(jnp.float32)[None]
            return total, to_all(normed.astype(x.dtype))

        def add(x, kernel, residual, scale, *, epsilon):
            specs = P(None, "tp"), P("tp", None), P("tp"), P()
            call = functools.partial(on_device, epsilon=epsilon)
            split = jax.shard_map(call, mesh=self.mesh, in_specs=specs, out_specs=(P("tp"), P()), check_vma=False)
            return split(x, kernel, residual, scale)

        return jax.jit(add, static_argnames="epsilon")
