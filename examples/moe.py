"""A mixture of experts: a router chooses some experts for each token, and only their weights are read.

Source: https://arxiv.org/abs/2101.03961. A token and one of its experts are a pair; a step of T tokens has T * k pairs.
The products of all pairs are computed in one of three ways, which the numbers of pairs and experts choose:

    few for each expert, on Hopper    one kernel reads the matrices of the experts that are used (expert_kernel.py)
    few pairs, elsewhere              each pair gathers its expert's matrices and sums: no other expert is read; on
                                      Hopper, too, if there are so few that hardly two of them have the same expert
    many pairs                        pairs are sorted by expert, and one grouped product multiplies each expert's rows
                                      by its matrix; on Hopper by `ragged_dot_mgpu` of JAX, which skips experts without
                                      rows, elsewhere by XLA

Over a mesh each device computes its share of every pair, and one all-reduce adds the shares up. The devices share out
the columns of every expert, so that all of them read equally much, or the experts, so that each has whole ones.

    hidden ─ router ─ top k ─┬─ gate, up ─ swiglu ─ down ─ weighted sum over k ─ all-reduce ─ + ─
                             └── columns or experts of one device ──┘         shared expert ──┘
"""

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from examples.config import DecoderConfig, ExpertsConfig
from examples.expert_kernel import Activation, compute_in_tiles, fits

_MOST_ROWS = 16  # pairs of an expert, on average, from which on larger tiles are as good
_FEWEST_EXPERTS = 4  # for a pair, so that gathers read few matrices twice; they start before tiles would be made
_TILE = 64  # rows, columns and depth of the grouped kernel's smallest tiles; depth of a part of the router's sums
_MOST_IN_PARTS = 64  # rows of the router whose sums are computed in parts


class Router(nnx.Linear):
    """Scores the experts, and chooses each token's. Products are summed, and scores computed, in float32."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        assert config.experts is not None
        self.config = config.experts
        num_experts = config.experts.num_experts
        super().__init__(config.hidden_size, num_experts, use_bias=self.config.has_bias, param_dtype=dtype, rngs=rngs)
        self.correction = nnx.Param(jnp.zeros(num_experts, jnp.float32)) if config.experts.has_correction else None

    def __call__(
        self, hidden: Float[Array, "num_rows hidden_size"], num_tokens: int | None = None
    ) -> tuple[Int32[Array, "num_tokens k"], Float32[Array, "num_tokens k"]]:
        """Gives the experts and their weights of each token: of all rows, or of the first `num_tokens`."""
        config = self.config
        kernel = self.kernel[...]
        # The tokens are rounded, too: products of float32 would take longer than attention. XLA compiles a product of
        # one row badly, so the rows of padding are left out after it.
        logits = _narrow_product(hidden.astype(kernel.dtype), kernel)[:num_tokens]
        logits = logits if self.bias is None else logits + self.bias[...].astype(jnp.float32)[None]
        # The softmax over all experts, normalised over the chosen ones, is the softmax over these.
        is_plain = config.num_groups == 1 and self.correction is None
        if config.scores == "chosen" or (config.scores == "softmax" and config.are_normalized and is_plain):
            values, experts = top_k(logits, config.num_chosen)
            return experts, jax.nn.softmax(values, axis=-1) * config.scale
        scores = jax.nn.sigmoid(logits) if config.scores == "sigmoid" else jax.nn.softmax(logits, axis=-1)
        ranked = scores if self.correction is None else scores + self.correction[...][None]
        weights, experts = top_k(_in_best_groups(ranked, config), config.num_chosen)
        if self.correction is not None:
            weights = jnp.take_along_axis(scores, experts, axis=-1)
        if config.are_normalized:
            weights /= weights.sum(axis=-1, keepdims=True) + 1e-20
        return experts, weights * config.scale


def _narrow_product(
    rows: Float[Array, "num_rows in"], matrix: Float[Array, "in out"]
) -> Float32[Array, "num_rows out"]:
    """Multiplies by a matrix of few columns. Parts of few rows' sums are computed beside each other, to fill a GPU."""
    precision = "highest" if matrix.dtype == jnp.float32 else None
    options = {"precision": precision, "preferred_element_type": jnp.float32}
    if rows.shape[0] > _MOST_IN_PARTS or matrix.shape[0] % _TILE:
        return jnp.dot(rows, matrix, **options)
    parts = rows.reshape(rows.shape[0], -1, _TILE), matrix.reshape(-1, _TILE, matrix.shape[1])
    return jnp.einsum("rpi,pio->pro", *parts, **options).sum(axis=0)


def top_k(
    scores: Float32[Array, "num_tokens num_experts"], k: int
) -> tuple[Float32[Array, "num_tokens k"], Int32[Array, "num_tokens k"]]:
    """Does what `jax.lax.top_k` does by counting larger scores, which takes less time than XLA's sort."""
    ids, places = (jnp.arange(n, dtype=jnp.int32) for n in (scores.shape[1], k))
    one, other = scores[:, :, None], scores[:, None, :]
    place = jnp.sum((other > one) | ((other == one) & (ids[None, :] < ids[:, None])[None]), axis=2)
    is_there = place[:, None, :] == places[None, :, None]
    values = jnp.sum(jnp.where(is_there, scores[:, None, :], 0), axis=2)
    return values, jnp.sum(jnp.where(is_there, ids[None, None, :], 0), axis=2)


def _in_best_groups(scores: Array, config: ExpertsConfig) -> Array:
    """Puts the scores of experts outside a token's best groups to -inf."""
    if config.num_groups == 1:
        return scores
    groups = scores.reshape(scores.shape[0], config.num_groups, -1)
    best, _ = jax.lax.top_k(groups, 1 if config.group_score == "best" else 2)
    _, chosen = jax.lax.top_k(best.sum(axis=-1), config.num_chosen_groups)
    is_chosen = jax.nn.one_hot(chosen, config.num_groups, dtype=bool).any(axis=1)
    return jnp.where(is_chosen[:, :, None], groups, -jnp.inf).reshape(scores.shape)


class Experts(nnx.Module):
    """The matrices of a layer's experts, `[num_experts, out, in]`; see the module's docstring.

    Args:
        config: the decoder's config.
        rngs: keys for random initial weights.
        dtype: of the weights.
        mesh: the devices that share the model, None for one device.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike, mesh: Mesh | None):
        assert config.experts is not None
        self.config, self.mesh = config.experts, mesh
        is_split = self.config.split == "columns"
        self.num_parts = config.num_parts if is_split else 1  # into which the columns are joined
        num_experts, size, hidden_size = self.config.num_experts, self.config.intermediate_size, config.hidden_size
        init = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2, batch_axis=0)
        self.gate_up = nnx.Param(init(rngs.params(), (num_experts, 2 * size, hidden_size), dtype))
        self.down = nnx.Param(init(rngs.params(), (num_experts, hidden_size, size), dtype))
        has_bias = self.config.has_bias
        self.gate_up_bias = nnx.Param(jnp.zeros((num_experts, 2 * size), dtype)) if has_bias else None
        self.down_bias = nnx.Param(jnp.zeros((num_experts, hidden_size), dtype)) if has_bias else None

    def __call__(self, hidden: Array, experts: Array, weights: Array) -> Float32[Array, "num_tokens hidden_size"]:
        """Computes the weighted sum of each token's experts.

        Args:
            hidden: `[num_tokens, hidden_size]`.
            experts: i32 `[num_tokens, k]`.
            weights: f32 `[num_tokens, k]`.
        """
        parameters = {
            name: parameter[...]
            for name in ("gate_up", "down", "gate_up_bias", "down_bias")
            if (parameter := getattr(self, name)) is not None
        }
        compute = partial(compute_experts, config=self.config)
        if self.mesh is None or self.mesh.shape["tp"] == 1:
            return compute(hidden, experts, weights, parameters)

        def share(hidden, experts, weights, parameters):
            part = jax.lax.axis_index("tp")
            out = compute(hidden, experts, weights, parameters, part=part)
            return jax.lax.psum(out, "tp")

        specs = {name: expert_spec(name, self.config) for name in parameters}
        # The grouped kernel does not say over which axes of the mesh its result varies.
        run = jax.shard_map(share, mesh=self.mesh, in_specs=(P(), P(), P(), specs), out_specs=P(), check_vma=False)
        return run(hidden, experts, weights, parameters)


def expert_spec(name: str, config: ExpertsConfig) -> P:
    """Says along which axis a mesh's "tp" splits a parameter of `Experts`."""
    if config.split == "experts":
        return P("tp")
    return {"gate_up": P(None, "tp"), "gate_up_bias": P(None, "tp"), "down": P(None, None, "tp"), "down_bias": P()}[
        name
    ]


def compute_experts(
    hidden: Float[Array, "num_tokens hidden_size"],
    experts: Int32[Array, "num_tokens k"],
    weights: Float32[Array, "num_tokens k"],
    parameters: dict[str, Array],
    *,
    config: ExpertsConfig,
    part: Array | None = None,
) -> Float32[Array, "num_tokens hidden_size"]:
    """Computes what one device adds to the weighted sum of each token's experts.

    Args:
        hidden, experts, weights: see `Experts`.
        parameters: this device's share of the experts' matrices and biases.
        config: the mixture.
        part: i32 `[]`, which of the mesh's devices this is; None for the only one.
    """
    num_tokens, num_chosen = experts.shape
    num_local = parameters["down"].shape[0]
    if part is not None and config.split == "experts":
        experts = experts - part * num_local
        is_local = (experts >= 0) & (experts < num_local)
        weights = jnp.where(is_local, weights, 0)
        experts = jnp.where(is_local, experts, num_local)  # sorted behind all others
    pairs = experts.reshape(-1)
    are_all_here = part is None or config.split == "columns"  # else gathers read matrices for the others' pairs
    is_sparse = are_all_here and pairs.shape[0] * _FEWEST_EXPERTS <= num_local
    is_few = not is_sparse and pairs.shape[0] <= _MOST_ROWS * num_local
    if _is_hopper() and is_few and fits(parameters["gate_up"], parameters["down"]):
        biases = dict(parameters)
        if "down_bias" in parameters and part is not None and config.split == "columns":
            biases["down_bias"] = jnp.where(part == 0, parameters["down_bias"], 0)
        return compute_in_tiles(hidden, experts, weights, biases, _activation(config))
    product, order = _few_pairs(pairs, num_local), None
    if pairs.shape[0] > num_local:
        order = jnp.argsort(pairs, stable=True)
        product = _many_pairs(pairs[order], num_local)
    token = jnp.arange(num_tokens * num_chosen) // num_chosen
    token = token if order is None else token[order]
    which = jnp.minimum(pairs if order is None else pairs[order], num_local - 1)

    gate_up = product(hidden[token], parameters["gate_up"])
    if "gate_up_bias" in parameters:
        gate_up += parameters["gate_up_bias"][which].astype(jnp.float32)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    out = product(_swiglu(gate, up, config).astype(hidden.dtype), parameters["down"])
    if "down_bias" in parameters:
        bias = parameters["down_bias"][which].astype(jnp.float32)
        # Where devices share out columns, one of them adds the bias.
        out += bias if part is None or config.split == "experts" else jnp.where(part == 0, bias, 0)
    if order is None:
        return jnp.sum(out.reshape(num_tokens, num_chosen, -1) * weights[:, :, None], axis=1)
    factor = weights.reshape(-1)[order][:, None]
    scaled = jnp.where(factor != 0, out * factor, 0)  # the rows of pairs that are not local hold anything
    return jnp.zeros((num_tokens, out.shape[1]), jnp.float32).at[token].add(scaled)


type Product = Callable[[Array, Array], Float32[Array, "num_pairs out"]]


def _few_pairs(pairs: Int32[Array, " num_pairs"], num_experts: int) -> Product:
    """Makes the product of each row `[num_pairs, in]` with the matrix of its expert `[num_experts, out, in]`."""

    def product(rows: Array, matrices: Array) -> Array:
        chosen = matrices[jnp.minimum(pairs, num_experts - 1)]
        # A sum instead of a matrix product, so that XLA can gather inside the kernel that sums.
        return jnp.sum(chosen.astype(jnp.float32) * rows[:, None, :].astype(jnp.float32), axis=-1)

    return product


def _many_pairs(pairs: Int32[Array, " num_pairs"], num_experts: int) -> Product:
    """Makes the same product for pairs that are sorted by expert."""
    ends = jnp.searchsorted(pairs, jnp.arange(num_experts), side="right", method="compare_all").astype(jnp.int32)
    group_sizes = jnp.diff(ends, prepend=jnp.int32(0))

    def product(rows: Array, matrices: Array) -> Array:
        if _is_hopper() and fits_kernel(rows, matrices):
            return grouped_kernel(rows, matrices, group_sizes)
        numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
        return jax.lax.ragged_dot_general(rows, matrices, group_sizes, numbers, preferred_element_type=jnp.float32)

    return product


def _is_hopper() -> bool:
    return jax.default_backend() == "gpu" and jax.devices()[0].compute_capability == "9.0"


def fits_kernel(rows: Array, matrices: Array) -> bool:
    """Says whether `grouped_kernel` takes these arrays: 16-bit numbers in whole tiles."""
    is_16_bit = rows.dtype == matrices.dtype and rows.dtype in (jnp.bfloat16, jnp.float16)
    return is_16_bit and rows.shape[0] >= _TILE and not any(size % _TILE for size in matrices.shape[1:])


@jax.jit  # so that all layers share what it is lowered to: lowering it takes seconds
def grouped_kernel(rows: Array, matrices: Array, group_sizes: Int32[Array, " num_experts"]) -> Float32[Array, "m out"]:
    """Multiplies each group of rows by its expert's matrix, with JAX's kernel for Hopper.

    Args:
        rows: `[num_rows, in]`, sorted by group. Those past the last group get any numbers.
        matrices: `[num_experts, out, in]`.
        group_sizes: i32 `[num_experts]`.
    """
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    width = next(width for width in (2 * _TILE, _TILE) if matrices.shape[1] % width == 0)
    out = ragged_dot(
        rows,
        matrices,
        group_sizes=group_sizes,
        block_m=_TILE,
        block_n=width,
        block_k=_TILE,
        max_concurrent_steps=4,
        grid_block_n=1,
        transpose_rhs=True,
    )
    return out.astype(jnp.float32)


def _swiglu(gate: Float32[Array, "..."], up: Float32[Array, "..."], config: ExpertsConfig) -> Float32[Array, "..."]:
    """Computes SwiGLU, or the variant of gpt-oss."""
    if (limit := config.swiglu_limit) is None:
        return gate * up / (1 + jnp.exp(-gate))
    gate, up = jnp.minimum(gate, limit), jnp.maximum(jnp.minimum(up, limit), -limit)
    return gate * (up + 1) / (1 + jnp.exp(-config.swiglu_alpha * gate))


@cache  # programs are compiled once for each activation, which they tell apart by its identity
def _activation(config: ExpertsConfig) -> Activation:
    return partial(_swiglu, config=config)


class MixtureOfExperts(nnx.Module):
    """The router, the experts, and the MLP that computes every token beside them.

    Args:
        config: the decoder's config.
        shared: the MLP of every token, or None.
        rngs, dtype, mesh: see `Experts`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        shared: nnx.Module | None,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        mesh: Mesh | None,
    ):
        self.router = Router(config, rngs=rngs, dtype=dtype)
        self.experts = Experts(config, rngs=rngs, dtype=dtype, mesh=mesh)
        self.shared = shared
        self.dtype = dtype

    def __call__(self, hidden: Array, num_tokens: int | None = None) -> Array:
        """Computes `[num_tokens, hidden_size]`; rows from `num_tokens` on are padding, whose experts cost nothing."""
        hidden = hidden.astype(self.dtype)
        experts, weights = self.router(hidden, num_tokens)
        out = self.experts(hidden[:num_tokens], experts, weights)
        out = jnp.pad(out, ((0, hidden.shape[0] - out.shape[0]), (0, 0))).astype(self.dtype)
        return out if self.shared is None else out + self.shared(hidden)  # pyright: ignore[reportCallIssue]
