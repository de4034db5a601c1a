"""Sorts of a batch's sequences by the cost of their items, in PTX. Each thread of a warpgroup has one sequence of 128.

Up to 128 values are compared with each other. More are counted by classes, because each thread would compare several of
them with all others, and no tile is loaded meanwhile.
"""

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from paged_jax.kernels.mosaic_gpu.hopper.inline import (
    SCALAR,
    add,
    address,
    assembly,
    div,
    element,
    i32,
    inline,
    less,
    mul,
    rem,
    thread_index_read_again,
)
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARP, WARPGROUP
from paged_jax.kernels.mosaic_gpu.hopper.threads import LAYOUT, of_threads
from paged_jax.kernels.mosaic_gpu.ragged.ptx.scan import load, load_word, meet, store, store_word, sums_before
from paged_jax.kernels.mosaic_gpu.ragged.refs import Ref

_WARPS = WARPGROUP // WARP
_LARGEST = (1 << 22) - 1  # larger values are sorted like this one; the other bits hold the index
_AT_ONCE = 16  # values that `_number_larger` loads in one step of its loop
_MOST_VALUES = 4 * WARPGROUP  # that are sorted by class
_CLASSES = WARPGROUP // _WARPS  # each has a thread for each warp
_DROPPED_BITS = 21  # of a float32, below the exponent and two bits of the mantissa: a class is a quarter of an octave
_FOUR = 0x40800000 >> _DROPPED_BITS  # begins the last class but one, which also has all smaller values


def places_largest_first(values: Array, values_smem: Ref, count: Scalar) -> Array:
    """The place of each value >= 0 in an order with the largest value first, and equal values by index.

    Values of 2 ** 22 and more count as equal. All values from index `count` on must be 0, which is a multiple of 32.
    """

    @inline(plgpu.RefType(), LAYOUT, SCALAR, returns=(WARPGROUP,), dtype="int32", layout=LAYOUT)
    def compute(_, values_smem, values, count):
        compared = count.registers.item()
        index, base = thread_index_read_again(), address(values_smem)
        value = arith.minsi(element(values.registers.item(), 0), i32(_LARGEST))
        # The index makes values unique: of two equal ones, the smaller index comes first.
        unique = arith.subi(mul(value, WARPGROUP), index)
        store_word(add(base, mul(index, 4)), unique)
        mgpu.warpgroup_barrier()
        place = _number_larger(unique, base, compared)
        return of_threads(arith.select(less(index, compared), place, index))  # the others keep their places

    return compute(values_smem, values, count)


def places_by_class(parts: list[Array], sums_smem: Ref) -> list[Array]:
    """The place of each value in an order with the class of the largest values first, for each part.

    The first class begins at 768, the others at 640, 512, 448, ... 8, 7, 6, 5, and 0. Negative values are the last
    class. Values of one class have places by warp, then by part, then by lane. Rows 0 and 1 of `sums_smem` are
    overwritten.
    """
    columns = sums_smem.shape[1]

    @inline(plgpu.RefType())
    def clear(_, sums_smem):
        index = thread_index_read_again()
        cell = add(mul(rem(index, WARP), _WARPS), div(index, WARP))  # lane i: class i of its warp
        store_word(add(address(sums_smem), mul(cell, 4)), i32(0))
        mgpu.utils.warp_barrier()

    @inline(plgpu.RefType(), LAYOUT, returns=(WARPGROUP,), dtype="int32", layout=LAYOUT)
    def count(_, sums_smem, values):
        value = element(values.registers.item(), 0)
        bits = arith.bitcast(value.type, arith.sitofp(ir.F32Type.get(), value))
        larger = arith.subi(i32(_FOUR + _CLASSES - 2), arith.shrui(bits, i32(_DROPPED_BITS)))
        of_class = arith.maxsi(arith.minsi(larger, i32(_CLASSES - 2)), i32(0))
        of_class = arith.select(less(value, i32(0)), i32(_CLASSES - 1), of_class)
        cell = add(mul(of_class, _WARPS), div(thread_index_read_again(), WARP))
        at = add(address(sums_smem), mul(cell, 4))
        before = load_word(at)
        words = llvm.StructType.get_literal([cell.type] * 2)
        code = """{ .reg .b32 peers, lower; match.any.sync.b32 peers, $2, 0xffffffff; popc.b32 $1, peers;
        mov.u32 lower, %lanemask_lt; and.b32 peers, peers, lower; popc.b32 $0, peers; }"""
        found = llvm.inline_asm(words, [cell], code, "=&r,=&r,r", has_side_effects=True)
        earlier, peers = (llvm.extractvalue(cell.type, found, [i]) for i in range(2))
        mgpu.utils.warp_barrier()  # all lanes have read what the first of their class writes
        store_word(at, add(before, peers), arith.cmpi(arith.CmpIPredicate.eq, earlier, i32(0)))
        mgpu.utils.warp_barrier()
        return of_threads(add(mul(cell, _MOST_VALUES), add(before, earlier)))

    @inline(plgpu.RefType(), LAYOUT, returns=(WARPGROUP,), dtype="int32", layout=LAYOUT)
    def place(_, sums_smem, counted):
        own = element(counted.registers.item(), 0)
        column = add(div(own, _MOST_VALUES), i32(columns))
        return of_threads(add(load_word(add(address(sums_smem), mul(column, 4))), rem(own, _MOST_VALUES)))

    clear(sums_smem)
    counted = [count(sums_smem, values) for values in parts]
    meet()
    sums_before({1: load(sums_smem, 0, 0)}, sums_smem, 0, packs=False)
    places = [place(sums_smem, x) for x in counted]
    meet()
    return places


def keep(arrays: dict[int, Array], arrays_smem: Ref, order_smem: Ref) -> None:
    """Stores each thread's elements in its own column of the rows of `arrays_smem`, and its index in `order_smem`."""
    store(arrays, arrays_smem, 0)

    @inline(plgpu.RefType())
    def store_order(_, order_smem):
        index = thread_index_read_again()
        store_word(add(address(order_smem), mul(index, 4)), index)

    store_order(order_smem)


def moved(
    parts: list[dict[int, Array]], places: list[Array], arrays_smem: Ref, order_smem: Ref
) -> list[dict[int, Array]]:
    """Moves each thread's elements to the thread at their place, through the rows of `arrays_smem` that are the keys.

    Each part has 128 elements of each row. Stores in `order_smem` the index of the elements that each place gets.
    """
    columns, rows = arrays_smem.shape[1], list(parts[0])

    @inline(plgpu.RefType(), plgpu.RefType(), SCALAR, LAYOUT, *[LAYOUT] * len(rows))
    def put(_, arrays_smem, order_smem, first, places, *arrays):
        place = mul(element(places.registers.item(), 0), 4)
        store_word(add(address(order_smem), place), add(thread_index_read_again(), first.registers.item()))
        for row, x in zip(rows, arrays, strict=True):
            store_word(add(address(arrays_smem), add(place, i32(4 * row * columns))), element(x.registers.item(), 0))

    for i, (part, place) in enumerate(zip(parts, places, strict=True)):
        put(arrays_smem, order_smem, jnp.int32(i * WARPGROUP), place, *part.values())
    meet()
    return [{row: load(arrays_smem, row, i * WARPGROUP) for row in rows} for i in range(len(parts))]


def _number_larger(value, base, count):
    """Counts those of the `count` integers at address `base` that are larger than `value`.

    It adds up the sign bits of differences, which cannot overflow. Comparisons would share a predicate register, and
    each would wait 20 cycles for the one before (benchmarks/LOG.md, "The longest first").
    """
    loop = scf.ForOp(i32(0), count, i32(_AT_ONCE), [i32(0)])
    with ir.InsertionPoint(loop.body):
        assembly('.pragma "nounroll";', "")
        first = add(base, mul(loop.induction_variable, 4))
        [number] = loop.inner_iter_args
        for i in range(_AT_ONCE):
            number = add(number, arith.shrui(arith.subi(value, load_word(add(first, i32(4 * i)))), i32(31)))
        scf.yield_([number])
    return loop.result
