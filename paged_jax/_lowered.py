"""Keeps what JAX lowers a function to, for programs that call it many times."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.interpreters import mlir
from jax.sharding import AbstractMesh


def without_mesh() -> AbstractContextManager[Any]:
    """Within this, arrays have types without a mesh, whatever `jax.set_mesh` says around it.

    XLA calls back for a device's part of an op, which has no shardings to name. Where types name Explicit axes, JAX
    would lower each of its operations with one.
    """
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def shapes_of(arrays: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
    """The arrays' types without a mesh."""
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]


class LoweredOnce:
    """A function of arrays that is lowered once for each platform, however often it is called.

    JAX itself keeps the lowering of a jitted function within a program. But it lowers each call of a
    `custom_partitioning` as a program of its own, which takes 4.2 s for ragged attention on Hopper (benchmarks/LOG.md,
    "Ops and programs over two GPUs"). The calls must all have arrays of the same shapes. A function that asks for its
    device's number on a mesh is lowered anew in each program.

    Args:
        run: a jitted function.
    """

    def __init__(self, run: Callable):
        self._run = run
        self._modules: dict[tuple[str, ...], bytes] = {}  # MLIR bytecode by platforms

    def __call__(self, *arrays: jax.Array) -> Any:
        """Calls the function."""
        with without_mesh():
            traced, results = jax.make_jaxpr(self._run, return_shape=True)(*shapes_of(arrays))
        if traced.effects:  # the number of a device on a mesh axis
            return self._run(*arrays)
        return jax.tree.unflatten(jax.tree.structure(results), _lowered_p.bind(*arrays, traced=traced, kept=self))

    def module(self, traced: Any, platforms: tuple[str, ...]) -> bytes:
        """The bytecode of a module whose `main` is the traced function, lowered for these platforms."""
        if platforms not in self._modules:
            with without_mesh():
                run = jax.jit(jaxpr_as_fun(traced), keep_unused=True)  # the call passes all arguments
                lowered = run.trace(*traced.in_avals).lower(lowering_platforms=platforms)
            module: Any = lowered.compiler_ir("stablehlo")
            self._modules[platforms] = mlir.module_to_bytecode(module)
        return self._modules[platforms]


_lowered_p = Primitive("paged_jax_lowered")
_lowered_p.multiple_results = True
_lowered_p.is_high = lambda *_, **__: False  # JAX need not look inside: `module` traces `traced` again
_lowered_p.def_impl(lambda *arrays, traced, kept: jaxpr_as_fun(traced)(*arrays))
_lowered_p.def_abstract_eval(lambda *arrays, traced, kept: traced.out_avals)


def _lower(context: Any, *arrays: Any, traced: Any, kept: LoweredOnce) -> Any:
    program = context.module_context
    with program.context:
        module = ir.Module.parse(kept.module(traced, tuple(program.platforms)))
    main: Any = ir.SymbolTable(module.operation)["main"]
    types = main.type.results  # asked for now, as the next line takes the module apart
    name = mlir.merge_mlir_modules(program.module, "paged_jax_part", module, dst_symtab=program.symbol_table)
    return func.CallOp(types, ir.FlatSymbolRefAttr.get(name), list(arrays)).results


mlir.register_lowering(_lowered_p, _lower)
