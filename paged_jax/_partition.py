"""Runs an op on sharded operands: each device works on the heads and sequences that are in its own memory.

XLA would gather all operands of a kernel on every device, because a kernel is a custom call that XLA cannot split.
`_splits.py` decides which axes of an op's operands and results are split. This module makes JAX split them:

- Under plain `jit` on a mesh with Auto axes, the op is a `custom_partitioning`. Once XLA has propagated shardings
  through the whole program, it calls `partition` for each call of the op. Layers that are split alike are lowered once.
- On a mesh with Explicit axes, the types of the operands say how they are sharded, and a `shard_map` around the op
  follows them, also inside a `shard_map` over the mesh's other axes.
- Inside any other `shard_map` the operands are a device's part already. (If it is over some axes of a mesh only and the
  others are Auto, XLA gathers along these what a kernel reads.)

The devices exchange nothing inside an op, unless the blocks of its pools are split: then they merge their results
(`_context_parallel.py`). Operands that are split along another axis (tokens of a block, elements of a head) are
resharded by JAX before it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, ManualAxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from paged_jax import _context_parallel
from paged_jax._context_parallel import RunLocal
from paged_jax._lowered import LoweredOnce, shapes_of, without_mesh
from paged_jax._splits import CallAxes, Splits
from paged_jax.options import num_kv_heads

# Makes the function that computes a device's part of a call, from how the call is split.
type RunPart = Callable[[Splits], Callable]


def split(op: str, run: RunLocal, operands: Any, static: Mapping[str, Any]) -> Any:
    """Computes `run(op, operands, static)`, on every device for its own part; `run` is traced for a part's shapes."""
    leaves, tree = jax.tree.flatten(operands)
    is_part = bool(jax.sharding.get_abstract_mesh().manual_axes)
    if not is_part and _stays_whole(leaves):
        return run(op, operands, static)
    axes, mesh = CallAxes(op, operands, static), _explicit_mesh(leaves)
    if is_part and mesh is None:
        return _part_of(run)(op, operands, static)
    run = run if mesh is None else _part_of(run)
    run_on_blocks = _lowered_once(run) if mesh is None else run
    result_tree = None  # known once `run` was traced

    def run_part(splits: Splits) -> Callable:
        def run_flat(*leaves):
            nonlocal result_tree
            part, blocks = jax.tree.unflatten(tree, leaves), splits.of("b")
            if blocks:
                results = _context_parallel.run(op, part, static, blocks, run_on_blocks)
            else:
                results = _with_rank(lambda part: run(op, part, static), part, splits)
            flat, result_tree = jax.tree.flatten(results)
            return tuple(flat)

        return jax.jit(run_flat)  # jit hides the constants that `run` needs, which `custom_partitioning` refuses

    results = _split_by_xla(axes, run_part, leaves) if mesh is None else _split_by_types(axes, run_part, mesh, leaves)
    assert result_tree is not None
    return jax.tree.unflatten(result_tree, results)


def whole_batch(x: jax.Array) -> jax.Array:
    """Gathers the first axis of an array, the batch of calls, on every device, if its type says that it is split."""
    sharding = jax.typeof(x).sharding
    if sharding.spec[:1] in ((), (None,)):
        return x
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, P(None, *sharding.spec[1:])))


def types_split_rows(in_batched: Any, operands: Any) -> bool:
    """Whether a batch of operands cannot be merged with their first axis, since the types say that it is split."""
    split = jax.tree.map(lambda x, batched: jax.typeof(x).sharding.spec[batched:][:1] != (None,), operands, in_batched)
    return any(jax.tree.leaves(split._replace(options=None)))


def _stays_whole(leaves: Sequence[jax.Array]) -> bool:
    """Whether the op is never split: an operand is empty, or is in host memory."""
    return any(x.size == 0 or jax.typeof(x).memory_space == jax.memory.Space.Host for x in leaves)


def _explicit_mesh(leaves: Sequence[jax.Array]) -> AbstractMesh | None:
    """The mesh that has Explicit axes and is in the operands' types, or None."""
    for x in leaves:
        mesh = jax.typeof(x).sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def _split_by_xla(axes: CallAxes, run_part: RunPart, leaves: Sequence[jax.Array]) -> Any:
    """Splits an op on a mesh with Auto axes: XLA calls `partition` once it knows how the operands are sharded."""
    whole = custom_partitioning(run_part(Splits({}, {})))
    parts: dict[tuple, LoweredOnce] = {}  # by how the operands are sharded

    def partition(mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> tuple:
        del results
        shardings = [x.sharding for x in operands]
        if all(isinstance(s, NamedSharding) for s in shardings):
            splits = axes.choose([s.spec for s in shardings], mesh.shape)
        else:  # no mesh is known: every device computes the whole op
            mesh = Mesh(np.array(list(shardings[0].device_set)), ("devices",))
            splits = axes.choose([P()] * len(shardings), mesh.shape)
        operand_shardings, result_shardings = (
            tuple(NamedSharding(mesh, spec) for spec in splits.specs(arrays))
            for arrays in (axes.operands, axes.results)
        )
        if operand_shardings not in parts:
            parts[operand_shardings] = LoweredOnce(run_part(splits))
        return mesh, parts[operand_shardings], result_shardings, operand_shardings

    rule, sizes = axes.shardy_rule()
    whole.def_partition(partition, sharding_rule=rule, **sizes)
    with without_mesh():
        traced = jax.make_jaxpr(whole)(*shapes_of(leaves))
    return _op_p.bind(*leaves, traced=traced, sources=tuple(axes.sources))


def _split_by_types(axes: CallAxes, run_part: RunPart, mesh: AbstractMesh, leaves: Sequence[jax.Array]) -> Any:
    """Splits an op on a mesh with Explicit axes, with a `shard_map`: the operands' types say how they are sharded."""
    splits = axes.choose([jax.typeof(x).sharding.spec for x in leaves], mesh.shape)
    operand_specs, result_specs = (tuple(splits.specs(arrays)) for arrays in (axes.operands, axes.results))
    leaves = [jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(leaves, operand_specs, strict=True)]
    split_over = set()  # which means all axes of the mesh
    if AxisType.Manual in mesh.axis_types:  # a `shard_map` around this one has split some axes already
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        split_over = {name for name, kind in kinds if kind is AxisType.Explicit}
    on_each = functools.partial(jax.shard_map, mesh=mesh, axis_names=split_over)
    return on_each(run_part(splits), in_specs=operand_specs, out_specs=result_specs)(*leaves)


def _lowered_once(run: RunLocal) -> RunLocal:
    """Makes `run` a function that is lowered once for all calls of an op with the same shapes and static keywords."""
    kept: dict[tuple, LoweredOnce] = {}

    def run_once(op: str, operands: Any, static: Mapping[str, Any]) -> Any:
        leaves, tree = jax.tree.flatten(operands)
        key = op, tree, tuple(sorted(static.items())), *((x.shape, x.dtype) for x in leaves)
        if key not in kept:
            kept[key] = LoweredOnce(jax.jit(lambda *leaves: run(op, jax.tree.unflatten(tree, leaves), static)))
        return kept[key](*leaves)

    return run_once


def _part_of(run: RunLocal) -> RunLocal:
    """Makes `run` a function that can be called inside a `shard_map`, on a device's part.

    There an array's type lists the mesh axes over which its values vary from device to device. JAX cannot see into a
    kernel, so `run` is traced without such types; a result then gets the mesh axes of all operands that it depends on.
    """

    def run_part(op: str, operands: Any, static: Mapping[str, Any]) -> Any:
        axes = CallAxes(op, operands, static)
        leaves, tree = jax.tree.flatten(operands)
        types = (jax.typeof(x) for x in leaves)
        parts = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in types]
        run_traced = jax.make_jaxpr(lambda part: run(op, part, static), return_shape=True)
        traced, results = run_traced(jax.tree.unflatten(tree, parts))
        flat = _op_p.bind(*leaves, traced=traced, sources=tuple(axes.sources))
        return jax.tree.unflatten(jax.tree.structure(results), flat)

    return run_part


# This primitive runs an op that JAX has traced. Its results have the shapes and dtypes of `traced`. Each varies over
# the mesh axes of all operands whose indices are in its `sources`.

_op_p = Primitive("paged_jax_op")
_op_p.multiple_results = True
_op_p.def_impl(lambda *leaves, traced, sources: jaxpr_as_fun(traced)(*leaves))
_op_p.is_high = lambda *_, **__: False  # JAX need not look inside: `_lower` traces `traced` again


@_op_p.def_abstract_eval
def _(*operands: Any, traced: Any, sources: tuple[tuple[int, ...], ...]) -> list[Any]:
    mesh = next((x.sharding.mesh for x in operands if x.manual_axis_type.varying), None)
    if mesh is None:
        return traced.out_avals

    def typed(result: Any, places: tuple[int, ...]) -> Any:
        varying = frozenset().union(*(operands[i].manual_axis_type.varying for i in places))
        sharding = NamedSharding(mesh, result.sharding.spec)
        return result.update(sharding=sharding, manual_axis_type=ManualAxisType(varying=varying))

    return [typed(result, places) for result, places in zip(traced.out_avals, sources, strict=True)]


def _lower(context: Any, *leaves: Any, traced: Any, sources: tuple[tuple[int, ...], ...]) -> Any:
    del sources
    if context.module_context.lowering_parameters.for_export:
        # `partition` is a Python function and cannot be serialised. An exported op is therefore split by XLA alone.
        traced = next((e.params["call"] for e in traced.eqns if e.primitive.name == "custom_partitioning"), traced)
    context = context.replace(avals_in=traced.in_avals, avals_out=traced.out_avals)
    return mlir.lower_fun(jaxpr_as_fun(traced), multiple_results=True)(context, *leaves)


mlir.register_lowering(_op_p, _lower)


def _with_rank(run: Callable, operands: Any, splits: Splits) -> Any:
    """Computes `run(operands)` on a device's part, with the block-sparse pattern of that device's heads.

    The pattern depends on `tp_rank`, which is static, while the number of the device is known only when the program
    runs. So every pattern that differs is a branch of a `switch`. If the heads of a device shift the pattern by a
    multiple of its stride, all devices have the same pattern and there is no switch.
    """
    options = getattr(operands, "options", None)
    sparse = None if options is None else options.block_sparse
    if options is None or sparse is None:
        return run(operands)
    heads = "hg" if sparse.head_sliding_step >= 0 else "h"
    if splits.parts(heads) == 1:
        return run(operands)
    num_heads = operands.query.shape[1]
    kv_heads = num_kv_heads(operands.key_cache, options.layout)
    shift = (num_heads if heads == "hg" else kv_heads) * abs(sparse.head_sliding_step)
    num_parts = splits.parts(heads)
    ranks = [sparse.tp_rank * num_parts + part for part in range(num_parts)]
    patterns = [rank * shift % sparse.vert_stride for rank in ranks]  # devices with equal numbers have equal patterns
    rank_of = dict(zip(reversed(patterns), reversed(ranks), strict=True))
    if len(rank_of) == 1:
        return run(_ranked(operands, ranks[0]))
    branches = [lambda x, rank=rank: run(_ranked(x, rank)) for rank in rank_of.values()]
    branch_of_part = jax.numpy.array([list(rank_of).index(pattern) for pattern in patterns], "int32")
    return jax.lax.switch(branch_of_part[jax.lax.axis_index(splits.of(heads))], branches, operands)


def _ranked(operands: Any, rank: int) -> Any:
    """The same operands, with the block-sparse option of the shard with this rank."""
    sparse = dataclasses.replace(operands.options.block_sparse, tp_rank=rank)
    return operands._replace(options=dataclasses.replace(operands.options, block_sparse=sparse))
