"""Where an op runs when its operands are sharded: each device works on the heads and sequences that lie there.

A kernel is a custom call, and XLA would gather all of a custom call's operands on every device. Here stands, for every
op, which axes of its operands and results are split alike. Plain `jit` on meshes with Auto axes asks for it through
`custom_partitioning`, when XLA has propagated shardings through the whole program; where axes are Explicit the types
of the operands say how they are sharded, and a `shard_map` around the op follows them. Nothing is ever exchanged
between devices inside an op: what it cannot split (blocks, tokens of a block, elements of a head) JAX reshards before.

An array's axes are written as one word each, as in einsum:

- h: kv heads. The pools decide over which mesh axes they are split: they are too large to move.
- q: query heads, "(h g)". They are split as the kv heads are. Where a device has a single kv head, the g heads of its
  group can be split further: over a mesh axis over which the pools are replicated.
- n: sequences, of ops that only read the pools. A step that writes has to write every row in every copy of a pool.
- .: what is not split.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, ManualAxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from paged_jax.options import head_axis

_OPERANDS = {
    "query": "n q .",
    "key": ". h .",
    "value": ". h .",
    "block_tables": "n .",
    "seq_lens": "n",
    "query_start_loc": ".",
    "slot_mapping": ".",
    "block_mapping": ". .",
    "scale": "",
    "per_head": "q",
}
_POOLS = {
    "hnd": {"key_cache": ". h . .", "value_cache": ". h . ."},
    "nhd": {"key_cache": ". . h .", "value_cache": ". . h ."},
    "vllm": {"key_cache": ". h . . .", "value_cache": ". h . ."},
}
_SCALES = {0: "", 1: "h", 3: ". h ."}  # by rank


class _Rule(NamedTuple):
    """What an op is split over, and its results: their axes, or the name of the operands that they are like."""

    splits: str
    results: tuple[str, ...]


_RULES = {
    "paged_attention": _Rule("n h g", ("n q .", "n q")),
    "paged_attention_v1": _Rule("n h g", ("n q .", "n q")),
    "paged_attention_v2": _Rule("n h g", ("n q .", "n q", "n q .", "n q .", "n q . .")),
    "write_and_attend": _Rule("h g", ("n q .", "n q", "key_cache", "value_cache")),
    "ragged_paged_attention": _Rule("h g", ("n q .", "n q")),
    "prefix_attention": _Rule("h g", ("n q .", "n q")),
    "write_to_paged_cache": _Rule("h", ("key_cache", "value_cache")),
    # These two move whole blocks of any layout: every axis but that of the blocks can be split.
    "copy_blocks": _Rule("any", ("key_caches", "value_caches")),
    "swap_blocks": _Rule("any", ("dst_key_cache", "dst_value_cache")),
}


def split(op: str, run: Callable, operands: Any, static: Mapping[str, Any]) -> Any:
    """`run(operands)` on every device for what lies there; `run` is traced for the shapes of a device's part."""
    leaves, tree = jax.tree.flatten(operands)
    if jax.sharding.get_abstract_mesh().manual_axes:
        return _part_of(run)(operands)  # inside a `shard_map` the operands are a device's part already
    if _stays_whole(leaves):
        return run(operands)
    problem = _Problem(op, operands, static)
    result_tree = None  # known once the op was traced

    def run_part(run: Callable, splits: _Splits) -> Callable:
        def run_flat(*leaves):
            nonlocal result_tree
            results = _for_each_rank(run, jax.tree.unflatten(tree, leaves), splits)
            flat, result_tree = jax.tree.flatten(results)
            return tuple(flat)

        return jax.jit(run_flat)  # which keeps the constants that `run` needs: `custom_partitioning` refuses them

    mesh = _explicit_mesh(leaves)
    if mesh is None:
        results = _split_by_xla(problem, functools.partial(run_part, run))(*leaves)
    else:
        results = _split_by_types(problem, functools.partial(run_part, _part_of(run)), mesh, leaves)
    assert result_tree is not None
    return jax.tree.unflatten(result_tree, results)


def types_split_rows(in_batched: Any, operands: Any) -> bool:
    """Whether types forbid that a batch of operands and its elements' first axis become one axis."""
    split = jax.tree.map(lambda x, batched: jax.typeof(x).sharding.spec[batched:][:1] != (None,), operands, in_batched)
    return any(jax.tree.leaves(split._replace(options=None)))


def _stays_whole(leaves: Sequence[jax.Array]) -> bool:
    """Whether nothing can be split; pools on the host are the memories' affair."""
    return any(x.size == 0 or jax.typeof(x).memory_space == jax.memory.Space.Host for x in leaves)


class _Splits(NamedTuple):
    """Over which mesh axes an op's factors are split, by the factor's name, and the sizes of the mesh's axes."""

    axes: dict[str, tuple[str, ...]]
    sizes: Mapping[str, int]

    def of(self, factors: Iterable[str]) -> tuple[str, ...]:
        """The mesh axes of these factors, the outermost first."""
        return tuple(axis for factor in factors for axis in self.axes.get(factor, ()))

    def parts(self, factors: Iterable[str]) -> int:
        """Into how many parts these factors together are split."""
        return math.prod(self.sizes[axis] for axis in self.of(factors))


class _Problem:
    """A call's operands and results as lists of factors, one list an axis.

    `names`, `operands` and `results` are in the order of the flat arrays. An axis that is not split has no factors.
    """

    def __init__(self, op: str, operands: Any, static: Mapping[str, Any]):
        rule = _RULES[op]
        options = getattr(operands, "options", None)
        layout = static.get("layout", "hnd") if options is None else options.layout
        self.names: list[str] = []
        self.shapes: list[tuple[int, ...]] = []
        self.operands: list[list[tuple[str, ...]]] = []
        for path, x in jax.tree_util.tree_leaves_with_path(operands):
            field, *inner = (str(getattr(key, "name", getattr(key, "idx", ""))) for key in path)
            name = inner[0] if field == "options" else field
            if rule.splits == "any" and "cache" in name:
                pool = "_".join((name.removeprefix("src_").removeprefix("dst_"), *inner))
                axes = [(), *((f"{pool}_{axis}",) for axis in range(1, x.ndim))]
            else:
                words = _SCALES[x.ndim] if name in ("k_scale", "v_scale") else (_OPERANDS | _POOLS[layout])[name]
                axes = _factors(words, rule.splits)
            self.names.append(name)
            self.shapes.append(x.shape)
            self.operands.append(axes)
        self.results: list[list[tuple[str, ...]]] = []
        for result in rule.results:
            alike = [axes for name, axes in zip(self.names, self.operands, strict=True) if name == result]
            self.results += alike if hasattr(operands, result) else [_factors(result, rule.splits)]
        self.sizes = {
            axes[0]: size
            for operand, shape in zip(self.operands, self.shapes, strict=True)
            for axes, size in zip(operand, shape, strict=True)
            if len(axes) == 1
        }
        if "query" in self.names and "h" in self.sizes:
            self.sizes["g"] = self.shapes[self.names.index("query")][1] // self.sizes["h"]

    def choose(self, specs: Sequence[P], sizes: Mapping[str, int]) -> _Splits:
        """The mesh axes of every factor, given the operands' shardings."""
        chosen = _Splits({}, sizes)
        for factor in sorted(self.sizes, key=lambda factor: (factor == "n", factor == "g")):
            found = next(filter(None, self._asked_for(factor, specs, chosen)), ())
            # The others of an array's axes may be split over the same mesh axes only if they lie in other arrays.
            neighbours = {f for axes in self.operands if factor in _flat(axes) for f in _flat(axes)}
            free = tuple(axis for axis in found if axis not in chosen.of(neighbours))
            fits = self.sizes[factor] % math.prod(sizes[axis] for axis in free) == 0
            chosen.axes[factor] = free if fits else ()
        return chosen

    def _asked_for(self, factor: str, specs: Sequence[P], chosen: _Splits) -> Iterable[tuple[str, ...]]:
        """What the operands that decide on a factor say: the pools, where they have it."""
        if factor == "g" and self.sizes["h"] != chosen.parts("h"):
            return  # a device has several kv heads: a part of every group would not be adjacent heads
        having = [
            (name, spec[axis] if axis < len(spec) else None, factors)
            for name, operand, spec in zip(self.names, self.operands, specs, strict=True)
            for axis, factors in enumerate(operand)
            if factor in factors
        ]
        pools = [x for x in having if "cache" in x[0] and not x[0].startswith("src")]
        for _, axes, factors in pools or having:
            axes = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
            outer = chosen.of(factors[: factors.index(factor)])
            if axes[: len(outer)] == outer:
                yield axes[len(outer) :]

    def specs(self, arrays: list[list[tuple[str, ...]]], splits: _Splits) -> list[P]:
        """How arrays with these factors are sharded."""
        return [P(*(splits.of(factors) or None for factors in axes)) for axes in arrays]

    def rule(self) -> tuple[str, dict[str, Any]]:
        """The same for Shardy, and the sizes that it cannot see."""
        unshared = (f"whole{i}" for i in range(10**9))

        def word(factors: tuple[str, ...]) -> str:
            factors = tuple(f for f in factors if f != "g" or self.sizes["g"] > 1)
            return f"({' '.join(factors)})" if len(factors) > 1 else factors[0] if factors else next(unshared)

        sides = (", ".join(" ".join(map(word, axes)) for axes in side) for side in (self.operands, self.results))
        return " -> ".join(sides), {"g": self.sizes["g"]} if self.sizes.get("g", 1) > 1 else {}


def _factors(words: str, splits: str) -> list[tuple[str, ...]]:
    """The factors of each axis, the outermost first."""
    each = {"q": ("h", "g"), "h": ("h",), "n": ("n",), ".": ()}
    return [tuple(f for f in each[word] if f in splits) for word in words.split()]


def _flat(axes: list[tuple[str, ...]]) -> set[str]:
    return {factor for factors in axes for factor in factors}


def _split_by_xla(problem: _Problem, run_part: Callable[[_Splits], Callable]) -> Callable:
    """Meshes with Auto axes: XLA asks how to split the op once it knows how its operands are sharded."""
    whole = custom_partitioning(run_part(_Splits({}, {})))

    def partition(mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> tuple:
        del results
        shardings = [x.sharding for x in operands]
        if all(isinstance(s, NamedSharding) for s in shardings):
            splits = problem.choose([s.spec for s in shardings], mesh.shape)
        else:  # no mesh is known
            mesh = Mesh(np.array(list(shardings[0].device_set)), ("devices",))
            splits = problem.choose([P()] * len(shardings), mesh.shape)
        operand_shardings, result_shardings = (
            tuple(NamedSharding(mesh, spec) for spec in problem.specs(arrays, splits))
            for arrays in (problem.operands, problem.results)
        )
        return mesh, run_part(splits), result_shardings, operand_shardings

    rule, sizes = problem.rule()
    whole.def_partition(partition, sharding_rule=rule, **sizes)
    return lambda *leaves: _op_p.bind(*leaves, traced=jax.make_jaxpr(whole)(*leaves))


def _part_of(run: Callable) -> Callable:
    """`run` inside a `shard_map`: its results vary over every mesh axis that one of its operands varies over.

    JAX keeps track of that in the arrays' types, and cannot see into a kernel: `run` is traced without such types.
    """

    def run_part(operands: Any) -> Any:
        leaves, tree = jax.tree.flatten(operands)
        types = (jax.typeof(x) for x in leaves)
        parts = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in types]
        traced, results = jax.make_jaxpr(run, return_shape=True)(jax.tree.unflatten(tree, parts))
        return jax.tree.unflatten(jax.tree.structure(results), _op_p.bind(*leaves, traced=traced))

    return run_part


# An op that was traced already: its types are what `traced` says, whatever mesh axes its operands vary over.

_op_p = Primitive("paged_jax_op")
_op_p.multiple_results = True
_op_p.def_impl(lambda *leaves, traced: jaxpr_as_fun(traced)(*leaves))
_op_p.is_high = lambda *_, **__: False  # what is inside is traced once more when it is lowered


@_op_p.def_abstract_eval
def _(*operands: Any, traced: Any) -> list[Any]:
    varying = frozenset().union(*(x.manual_axis_type.varying for x in operands))
    if not varying:
        return traced.out_avals
    mesh = next(x.sharding.mesh for x in operands if x.manual_axis_type.varying)
    types = {"manual_axis_type": ManualAxisType(varying=varying)}
    return [x.update(sharding=NamedSharding(mesh, x.sharding.spec), **types) for x in traced.out_avals]


def _lower(context: Any, *leaves: Any, traced: Any) -> Any:
    if context.module_context.lowering_parameters.for_export:
        # Python is asked how to split an op, so that this cannot be serialised: it is left to XLA.
        traced = next((e.params["call"] for e in traced.eqns if e.primitive.name == "custom_partitioning"), traced)
    context = context.replace(avals_in=traced.in_avals, avals_out=traced.out_avals)
    return mlir.lower_fun(jaxpr_as_fun(traced), multiple_results=True)(context, *leaves)


mlir.register_lowering(_op_p, _lower)


def _explicit_mesh(leaves: Sequence[jax.Array]) -> AbstractMesh | None:
    """The mesh whose Explicit axes are in the operands' types, if there is one."""
    for x in leaves:
        mesh = jax.typeof(x).sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def _split_by_types(
    problem: _Problem, run_part: Callable[[_Splits], Callable], mesh: AbstractMesh, leaves: Sequence[jax.Array]
) -> Any:
    """Meshes with Explicit axes: the operands' types say how they are sharded."""
    splits = problem.choose([jax.typeof(x).sharding.spec for x in leaves], mesh.shape)
    operand_specs, result_specs = (
        tuple(problem.specs(arrays, splits)) for arrays in (problem.operands, problem.results)
    )
    leaves = [jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(leaves, operand_specs, strict=True)]
    return jax.shard_map(run_part(splits), mesh=mesh, in_specs=operand_specs, out_specs=result_specs)(*leaves)


def _for_each_rank(run: Callable, operands: Any, splits: _Splits) -> Any:
    """`run(operands)` on a device's part, whose block-sparse pattern is that of its heads.

    The rank is a static option, the device's number is not: one branch for every pattern that differs. There is one
    only where the heads of a device shift the pattern by a multiple of its stride.
    """
    options = getattr(operands, "options", None)
    sparse = None if options is None else options.block_sparse
    if options is None or sparse is None:
        return run(operands)
    heads = "hg" if sparse.head_sliding_step >= 0 else "h"
    if splits.parts(heads) == 1:
        return run(operands)
    num_heads = operands.query.shape[1]
    num_kv_heads = operands.key_cache.shape[head_axis(options.layout)]
    shift = (num_heads if heads == "hg" else num_kv_heads) * abs(sparse.head_sliding_step)
    ranks = [sparse.tp_rank * splits.parts(heads) + part for part in range(splits.parts(heads))]
    patterns = {rank * shift % sparse.vert_stride: rank for rank in reversed(ranks)}

    if len(patterns) == 1:
        return run(_ranked(operands, ranks[0]))
    branches = [lambda x, rank=rank: run(_ranked(x, rank)) for rank in patterns.values()]
    order = list(patterns)
    branch_of_part = jax.numpy.array([order.index(rank * shift % sparse.vert_stride) for rank in ranks], "int32")
    return jax.lax.switch(branch_of_part[jax.lax.axis_index(splits.of(heads))], branches, operands)


def _ranked(operands: Any, rank: int) -> Any:
    """The operands of the shard with this rank."""
    sparse = dataclasses.replace(operands.options.block_sparse, tp_rank=rank)
    return operands._replace(options=dataclasses.replace(operands.options, block_sparse=sparse))
