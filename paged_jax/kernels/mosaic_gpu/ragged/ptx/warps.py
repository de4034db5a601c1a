"""What the lanes of each warp have: values that are computed side by side, and sums over lanes, in PTX."""

import functools
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from paged_jax.kernels.mosaic_gpu.hopper.inline import (
    SCALAR,
    add,
    address,
    div,
    element,
    i32,
    inline,
    mul,
    rem,
    thread_index_read_again,
)
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARP, WARPGROUP
from paged_jax.kernels.mosaic_gpu.hopper.threads import LAYOUT, of_threads
from paged_jax.kernels.mosaic_gpu.hopper.threads import lane_of as lane_of
from paged_jax.kernels.mosaic_gpu.hopper.threads import sums_of_warp as sums_of_warp
from paged_jax.kernels.mosaic_gpu.ragged.ptx.scan import integer_sum_of_warp, iota, store_word
from paged_jax.kernels.mosaic_gpu.ragged.refs import Ref

_WARPS = WARPGROUP // WARP


def totals_in_lanes(arrays: list[Array], sums_smem: Ref, first: int) -> Array:
    """Sums each array of integers over all threads: lane i of each warp gets the sum of array i, as float32.

    Lanes past the last array get its sum, too. The sums of warps take the rows of `sums_smem` from `first` on; no other
    array may use these rows.
    """
    columns, count = sums_smem.shape[1], len(arrays)
    assert columns == _WARPS

    @inline(plgpu.RefType(), *[LAYOUT] * count, returns=(WARPGROUP,), dtype="float32", layout=LAYOUT)
    def compute(_, sums_smem, *arrays):
        base, index = address(sums_smem), thread_index_read_again()
        lane = rem(index, WARP)
        is_first = arith.cmpi(arith.CmpIPredicate.eq, lane, i32(0))
        own = add(base, mul(add(div(index, WARP), i32(first * columns)), 4))
        for row, x in enumerate(arrays):
            store_word(add(own, i32(4 * columns * row)), integer_sum_of_warp(element(x.registers.item(), 0)), is_first)
        mgpu.warpgroup_barrier()
        row = add(arith.minsi(lane, i32(count - 1)), i32(first))
        word = ir.IntegerType.get_signless(32)
        words = llvm.StructType.get_literal([word] * _WARPS)
        code = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
        at = add(base, mul(row, 4 * columns))
        loaded = llvm.inline_asm(words, [at], code, "=r,=r,=r,=r,r,~{memory}", has_side_effects=True)
        total = functools.reduce(add, [llvm.extractvalue(word, loaded, [i]) for i in range(_WARPS)])
        return of_threads(arith.sitofp(ir.F32Type.get(), total))

    return compute(sums_smem, *arrays)


def in_lanes(values: list[Any]) -> Any:
    """Lane i of each warp gets value i; lanes past the last value get it, too."""
    lane, result = iota() & (WARP - 1), values[0]
    for i, value in enumerate(values[1:], 1):
        if value is not values[i - 1]:
            result = jnp.where(lane >= i, value, result)
    return result


def of_lanes(values: Array, count: int) -> list[Scalar]:
    """The float32 of each of the first `count` lanes. All warps must have the same."""

    def of_lane(lane: int):
        @inline(LAYOUT, returns=(), dtype="float32", layout=SCALAR)
        def get(_, values):
            value = element(values.registers.item(), 0)
            code = f"shfl.sync.idx.b32 $0, $1, {lane}, 31, 0xffffffff;"
            value = llvm.inline_asm(value.type, [value], code, "=f,f", has_side_effects=True)
            return mgpu.FragmentedArray.splat(value, ())

        return get(values)

    return [of_lane(lane) for lane in range(count)]


def votes(conditions: Array) -> Scalar:
    """An integer whose bit i tells whether the integer of lane i is not 0. All warps must have the same."""

    @inline(LAYOUT, returns=(), dtype="int32", layout=SCALAR)
    def vote(_, conditions):
        value = element(conditions.registers.item(), 0)
        code = """{ .reg .pred holds; setp.ne.b32 holds, $1, 0;
        vote.sync.ballot.b32 $0, holds, 0xffffffff; }"""
        bits = llvm.inline_asm(value.type, [value], code, "=r,r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(bits, (), is_signed=True)

    return vote(conditions)


def sum_of_warp(values: Array) -> Array:
    """The sum of integers over the lanes of each warp."""

    @inline(LAYOUT, returns=(WARPGROUP,), dtype="int32", layout=LAYOUT)
    def compute(_, values):
        return of_threads(integer_sum_of_warp(element(values.registers.item(), 0)))

    return compute(values)


def count_of_warp(conditions: Array) -> Scalar:
    """The number of a warp's lanes whose integer is not 0. All warps must have the same."""

    @inline(LAYOUT, returns=(), dtype="int32", layout=SCALAR)
    def count(_, conditions):
        value = element(conditions.registers.item(), 0)
        code = """{ .reg .pred holds; .reg .b32 bits; setp.ne.b32 holds, $1, 0;
        vote.sync.ballot.b32 bits, holds, 0xffffffff; popc.b32 $0, bits; }"""
        number = llvm.inline_asm(value.type, [value], code, "=r,r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(number, (), is_signed=True)

    return count(conditions)
