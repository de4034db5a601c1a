"""The experts of few tokens in two kernels (Triton, NVIDIA GPUs from Ampere on).

    gated    hidden of a token [in]   x  gate, up of its expert [units, in]   + bias, swiglu   --> units of the pair
    summed   units of all pairs [in]  x  down of each expert [out, in]        + bias, weights  --> sum of the token

A pair is a token and one of its experts. Experts' matrices are read where they are. Their reads take all the time, so
no tensor core is used: a thread loads 8 inputs of a row at once, and sums are computed in float32.

Grid: a program for each few rows of a pair's gate and up, or of a token's outputs. A program adds up all pairs of its
token, in their order, so each run gives the same bits. A warp has rows of its own, whose inputs its lanes share out.
Programs of pairs without an expert end at once.

Roofline: the bytes of the matrices of each pair's expert.
"""

import inspect
from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.interpreters import partial_eval
from jaxtyping import Array, BFloat16, Float32, Int32

from examples.config import ExpertsConfig

_WARPS = 4  # of a program
_ROWS = 2  # of a warp in `gated`, which multiplies both by the same inputs; 1 in `summed`
_DEPTH = 256  # inputs that a warp loads at once, 8 in each lane
_MOST_INPUTS = 2048  # of rows that were faster so than by XLA; those of 2880 were not


@dataclass(frozen=True)
class Kernel:
    """What a kernel is compiled for.

    Attributes:
        num_experts, num_chosen: on this device, and of a token.
        in_size, out_size: columns of a matrix, and rows; of `gate_up`, rows of a half.
        has_bias: whether there are biases.
        limit, alpha: `swiglu_limit` and `swiglu_alpha` of the config.
        rows, depth: rows of a program, and inputs that it loads at once.
        num_warps, num_stages: as Triton takes them.
    """

    num_experts: int
    num_chosen: int
    in_size: int
    out_size: int
    has_bias: bool
    limit: float | None
    alpha: float
    rows: int
    depth: int = _DEPTH
    num_warps: int = _WARPS
    num_stages: int = 1


def is_recorded() -> bool:
    """Says whether XLA's command buffers record the kernels. jax-triton 0.3's are launched one by one, by the host."""
    import jax_triton

    return "out_type" in inspect.signature(jax_triton.triton_call).parameters


def fits(*matrices: Array | jax.ShapeDtypeStruct) -> bool:
    """Says whether the kernels take these matrices: bfloat16, in whole loads and programs, with rows not too long."""
    are_whole = not any(size % (_ROWS * _WARPS) for x in matrices for size in x.shape[1:])
    return are_whole and all(x.dtype == jnp.bfloat16 and x.shape[2] <= _MOST_INPUTS for x in matrices)


@jax.jit(static_argnames="config")  # so that all layers share what it is lowered to
def compute_pairs(
    hidden: BFloat16[Array, "num_rows hidden_size"],
    experts: Int32[Array, "num_tokens k"],
    weights: Float32[Array, "num_tokens k"],
    parameters: dict[str, Array],
    config: ExpertsConfig,
) -> Float32[Array, "num_tokens hidden_size"]:
    """Computes the weighted sum of each token's experts; see `moe.compute_experts`.

    Args:
        hidden, weights: see `moe.compute_experts`.
        experts: i32 `[num_tokens, k]`, from `num_experts` on for none.
        parameters: the experts' matrices and biases.
        config: the mixture.
    """
    (num_tokens, num_chosen), (num_experts, hidden_size, size) = experts.shape, parameters["down"].shape
    biases = [parameters.get(name, weights) for name in ("gate_up_bias", "down_bias")]  # an absent one is not read
    facts = {"num_experts": num_experts, "num_chosen": num_chosen, "has_bias": "down_bias" in parameters}
    facts |= {"limit": config.swiglu_limit, "alpha": config.swiglu_alpha}
    gated = Kernel(in_size=hidden_size, out_size=size, rows=_ROWS * _WARPS, **facts)
    summed = Kernel(in_size=size, out_size=hidden_size, rows=_WARPS, **facts)
    units = jax.ShapeDtypeStruct((experts.size, size), jnp.bfloat16)
    units = _launch(gated_kernel, gated, (hidden, experts, parameters["gate_up"], biases[0]), units)
    out = jax.ShapeDtypeStruct((num_tokens, hidden_size), jnp.float32)
    return _launch(summed_kernel, summed, (units, experts, weights, parameters["down"], biases[1]), out)


def _launch(kernel, cfg: Kernel, arrays: tuple[Array, ...], result: jax.ShapeDtypeStruct) -> Array:
    """Runs a kernel with a program for each few rows of the result."""
    import jax_triton

    _mend_dce_rule(jax_triton)
    (out,) = jax_triton.triton_call(
        *arrays,
        kernel=kernel,
        out_type=[result],
        grid=(result.size // cfg.rows,),
        num_warps=cfg.num_warps,
        num_stages=cfg.num_stages,
        backend_options={"enable_fp_fusion": True},
        cfg=cfg,
    )
    return out


def _mend_dce_rule(jax_triton) -> None:
    """Replaces the rule for unused results of jax-triton 0.4.1: jax 0.12 passes it one argument more than it takes."""
    primitive = getattr(getattr(jax_triton, "triton_lib", None), "triton_kernel_call_p", None)
    if primitive in partial_eval.dce_rules:
        partial_eval.dce_rules[primitive] = lambda _, *args: ([True] * len(args[-1].invars), args[-1])


@triton.jit
@no_type_check
def gated_kernel(hidden, experts, gate_up, bias, units, cfg: tl.constexpr):
    """Computes some units of a pair."""
    in_size: tl.constexpr = cfg.in_size
    depth: tl.constexpr = cfg.depth
    first = tl.program_id(0) * cfg.rows
    pair = first // cfg.out_size
    rows = first % cfg.out_size + tl.arange(0, cfg.rows)
    expert = tl.load(experts + pair).to(tl.int64)
    if expert < cfg.num_experts:
        gate_rows, up_rows = 2 * expert * cfg.out_size + rows, (2 * expert + 1) * cfg.out_size + rows
        row = hidden + pair // cfg.num_chosen * in_size + 0 * rows[:, None]
        gates = tl.full([cfg.rows, cfg.depth], 0, tl.float32)
        ups = tl.full([cfg.rows, cfg.depth], 0, tl.float32)
        for start in tl.static_range(0, in_size, depth):
            gate = _load(gate_up + gate_rows[:, None] * in_size, start, in_size, cfg)
            up = _load(gate_up + up_rows[:, None] * in_size, start, in_size, cfg)
            x = _load(row, start, in_size, cfg)
            gates += gate * x
            ups += up * x
        gate, up = tl.sum(gates, axis=1), tl.sum(ups, axis=1)
        if cfg.has_bias:
            gate += tl.load(bias + gate_rows).to(tl.float32)
            up += tl.load(bias + up_rows).to(tl.float32)
        if cfg.limit is not None:
            gate = tl.minimum(gate, cfg.limit)
            up = tl.maximum(tl.minimum(up, cfg.limit), -cfg.limit) + 1
        made = gate * up / (1 + tl.exp(-cfg.alpha * gate))
        tl.store(units + pair * cfg.out_size + rows, made.to(tl.bfloat16))


@triton.jit
@no_type_check
def summed_kernel(units, experts, weights, down, bias, out, cfg: tl.constexpr):
    """Computes some outputs of a token."""
    in_size: tl.constexpr = cfg.in_size
    depth: tl.constexpr = cfg.depth
    num_chosen: tl.constexpr = cfg.num_chosen
    first = tl.program_id(0) * cfg.rows
    token = first // cfg.out_size
    rows = first % cfg.out_size + tl.arange(0, cfg.rows)
    sums = tl.full([cfg.rows, cfg.depth], 0, tl.float32)
    biases = tl.full([cfg.rows], 0, tl.float32)
    for i in tl.static_range(num_chosen):
        pair = token * num_chosen + i
        expert, weight = tl.load(experts + pair).to(tl.int64), tl.load(weights + pair)
        is_here = expert < cfg.num_experts
        end = tl.where(is_here, in_size, 0)
        expert_rows = expert * cfg.out_size + rows
        row = units + pair * in_size + 0 * rows[:, None]
        for start in tl.static_range(0, in_size, depth):
            values = _load(down + expert_rows[:, None] * in_size, start, end, cfg)
            sums += values * (_load(row, start, end, cfg) * weight)
        if cfg.has_bias:
            mask = rows < tl.where(is_here, cfg.out_size, 0)
            biases += weight * tl.load(bias + expert_rows, mask=mask, other=0).to(tl.float32)
    tl.store(out + token * cfg.out_size + rows, tl.sum(sums, axis=1) + biases)


@triton.jit
@no_type_check
def _load(rows, start, end, cfg: tl.constexpr):
    """Loads inputs of rows; zeros from `end` on."""
    inputs = start + tl.arange(0, cfg.depth)[None, :]
    return tl.load(rows + inputs, mask=inputs < end, other=0).to(tl.float32)
