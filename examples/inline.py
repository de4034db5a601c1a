"""PTX and integers inside a Mosaic GPU kernel, for what Pallas has no words for."""

import functools
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm


def assembly(code: str, constraints: str, *operands: Any, returns: Any = None, results: int = 0) -> list[Any]:
    """Inserts PTX with side effects, whose results all have one type; the compiler keeps its order."""
    kind = llvm.StructType.get_literal([returns] * results) if results > 1 else returns
    result = llvm.inline_asm(kind, operands, code, constraints + ",~{memory}", has_side_effects=True)
    if results < 2:
        return [result][:results]
    return [llvm.extractvalue(returns, result, [i]) for i in range(results)]


def plus(*addends: Any) -> Any:
    """The sum of integers."""
    return functools.reduce(arith.addi, addends)


def scaled(x: Any, size: int) -> Any:
    """x * size in 64 bits, of an x of 32 bits."""
    return arith.muli(arith.extui(integer(64), x), i64(size))


def i32(n: int) -> Any:
    """A constant of 32 bits."""
    return mgpu.c(n, integer(32))


def i64(n: int) -> Any:
    """A constant of 64 bits."""
    return mgpu.c(n, integer(64))


def integer(bits: int) -> Any:
    """An integer's type."""
    return ir.IntegerType.get_signless(bits)
