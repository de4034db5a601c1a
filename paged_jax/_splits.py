"""Decides over which mesh axes each axis of an op's operands and results is split.

An axis is described by its factors, the outermost first. Arrays that share a factor, as h below, are split alike along
it; the word is Shardy's. In the tables here one word stands for the factors of one axis:

- h: kv heads. The pools decide over which mesh axes h is split, because they are too large to move.
- p: rows of an `Interleaved` pool, which have two factors: the kv head h and t, which tells keys from values and is not
  split.
- q: query heads, which have two factors: the kv head h and the place g in its group. h is split as the kv heads are. If
  each device has a single kv head, g can be split too, over a mesh axis over which the pools are replicated.
- b: blocks of the pools. Every device attends to its own blocks, and then they merge (`_context_parallel.py`). They
  are split in ops without options about distances, for which own blocks would have to be neighbours.
- n: sequences. They are split in ops that only read the pools. An op that writes cannot be split like this, since every
  copy of a pool has to get every row.
- .: an axis that is not split. It has no factors.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from paged_jax.options import Interleaved, Layout

type Factors = tuple[str, ...]  # of one axis
type Axes = list[Factors]  # of one array

_FACTORS: dict[str, Factors] = {"b": ("b",), "h": ("h",), "p": ("h", "t"), "q": ("h", "g"), "n": ("n",), ".": ()}
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
    "latent": ". .",
    "latent_cache": "b . .",
}
_POOLS = {
    "hnd": {"key_cache": "b h . .", "value_cache": "b h . ."},
    "nhd": {"key_cache": "b . h .", "value_cache": "b . h ."},
    "vllm": {"key_cache": "b h . . .", "value_cache": "b h . ."},
    Interleaved(): {"key_cache": "b . p .", "value_cache": "b . p ."},
}
_SCALES = {0: "", 1: "h", 3: "b h ."}  # k_scale and v_scale, by their number of axes


class _Rule(NamedTuple):
    """How an op may be split.

    Attributes:
      factors: the factors that may be split; "any" for ops that move whole blocks: they may be split along every axis
        of a block.
      results: for each result the words of its axes, or the name of the operands whose axes it has.
    """

    factors: str
    results: tuple[str, ...]


_RULES = {
    "paged_attention": _Rule("b n h g", ("n q .", "n q")),
    "paged_attention_v1": _Rule("b n h g", ("n q .", "n q")),
    "paged_attention_v2": _Rule("n h g", ("n q .", "n q", "n q .", "n q .", "n q . .")),
    "write_and_attend": _Rule("b h g", ("n q .", "n q", "key_cache", "value_cache")),
    "ragged_paged_attention": _Rule("b h g t", ("n q .", "n q")),
    "prefix_attention": _Rule("b h g", ("n q .", "n q")),
    # One latent serves all heads: `h`, which has one element, is no factor, and `g` counts all query heads.
    "mla_paged_attention": _Rule("b n g", ("n q .", "n q")),
    "ragged_mla_attention": _Rule("b g", ("n q .", "n q")),
    "write_to_latent_cache": _Rule("b", ("latent_cache",)),
    "write_to_paged_cache": _Rule("b h t", ("key_cache", "value_cache")),
    "copy_blocks": _Rule("any b", ("key_caches", "value_caches")),
    "swap_blocks": _Rule("any", ("dst_key_cache", "dst_value_cache")),
}


class Splits(NamedTuple):
    """How a call is split.

    Attributes:
      axes: the mesh axes over which each factor is split, the outermost first.
      sizes: the sizes of the mesh's axes.
    """

    axes: dict[str, tuple[str, ...]]
    sizes: Mapping[str, int]

    def of(self, factors: Iterable[str]) -> tuple[str, ...]:
        """The mesh axes of these factors, the outermost first."""
        return tuple(axis for factor in factors for axis in self.axes.get(factor, ()))

    def parts(self, factors: Iterable[str]) -> int:
        """Into how many parts these factors together are split."""
        return math.prod(self.sizes[axis] for axis in self.of(factors))

    def specs(self, arrays: Sequence[Axes]) -> list[P]:
        """The `PartitionSpec`s of arrays with these axes."""
        return [P(*(self.of(factors) or None for factors in axes)) for axes in arrays]


class CallAxes:
    """The factors of every axis of a call's operands and results, and how many elements each factor has.

    Attributes:
      names: the name of each flat operand. Leaves of one field have the same name.
      operands: the axes of each flat operand.
      results: the axes of each flat result.
      sources: for each flat result, the places of the flat operands that it depends on.
      sizes: how many elements each factor has.
    """

    def __init__(self, op: str, operands: Any, static: Mapping[str, Any]):
        rule = _RULES[op]
        options = getattr(operands, "options", None)
        if options is not None and _depends_on_distances(options):
            rule = rule._replace(factors=rule.factors.removeprefix("b "))
        layout = static.get("layout", "hnd") if options is None else options.layout
        if isinstance(layout, Interleaved):
            rule = rule._replace(factors=rule.factors.removeprefix("b "))
            if layout.padding:  # a part's rows would not lie as the whole's do
                rule = rule._replace(factors="")
            layout = Interleaved()
        leaves = jax.tree_util.tree_leaves_with_path(operands)
        self.names, self.operands = [], []
        for path, x in leaves:
            name, axes = _operand(path, x.ndim, rule, layout)
            self.names.append(name)
            self.operands.append(axes)
        self.results: list[Axes] = []
        self.sources: list[tuple[int, ...]] = []
        for result in rule.results:
            if not hasattr(operands, result):
                self.results.append(_axes(result, rule))
                self.sources.append(tuple(range(len(leaves))))
                continue
            pools = [i for i, name in enumerate(self.names) if name == result]
            self.results += [self.operands[i] for i in pools]
            self.sources += [self._sources_of_pool(i, result) for i in pools]
        shapes = [x.shape for _, x in leaves]
        self.sizes: dict[str, int] = {
            factors[0]: size
            for axes, shape in zip(self.operands, shapes, strict=True)
            for factors, size in zip(axes, shape, strict=True)
            if len(factors) == 1
        }
        for axes, shape in zip(self.operands, shapes, strict=True):
            if _FACTORS["p"] in axes:
                self.sizes |= {"h": shape[axes.index(_FACTORS["p"])] // 2, "t": 2}
        if "query" in self.names and "h" in self.sizes:
            self.sizes["g"] = shapes[self.names.index("query")][1] // self.sizes["h"]

    def _sources_of_pool(self, pool: int, name: str) -> tuple[int, ...]:
        """The operands that a written pool depends on: itself, the new elements, their slots or blocks, and scales."""
        halves = [half for half in ("key", "value", "latent") if half in name]
        if name == "key_cache" and "value_cache" not in self.names:  # one pool, which gets both
            halves.append("value")
        written = {"scale", "slot_mapping", "block_mapping"}
        for half in halves:
            written |= {half, f"{half[0]}_scale", f"src_{half}_cache"}
        return tuple(i for i, other in enumerate(self.names) if i == pool or other in written)

    def choose(self, specs: Sequence[P], sizes: Mapping[str, int]) -> Splits:
        """Chooses the mesh axes of every factor, given the operands' shardings and the sizes of the mesh's axes."""
        chosen = Splits({}, sizes)
        place = {"g": 1, "n": 2}  # g needs to know how h is split; n takes what the heads leave
        for factor in sorted(self.sizes, key=lambda factor: place.get(factor, 0)):
            if factor == "t":
                continue
            wanted = next(filter(None, self._wanted(factor, specs, chosen)), ())
            # No array may have two axes that are split over one mesh axis. Devices that share a sequence's blocks must
            # have the same sequences and heads.
            together = {f for axes in self.operands if factor in _flat(axes) for f in _flat(axes)} | {"b"}
            free = tuple(axis for axis in wanted if axis not in chosen.of(together))
            divides = self.sizes[factor] % math.prod(sizes[axis] for axis in free) == 0
            chosen.axes[factor] = free if divides else ()
        return chosen

    def _wanted(self, factor: str, specs: Sequence[P], chosen: Splits) -> Iterator[tuple[str, ...]]:
        """Over which mesh axes the factor is split now: in the pools that have it, or else in the other operands."""
        if factor == "g" and self.sizes.get("h", 1) != chosen.parts("h"):
            return  # a device has several kv heads: parts of their groups are not neighbouring query heads
        having = [
            (name, spec[i] if i < len(spec) else None, factors)
            for name, axes, spec in zip(self.names, self.operands, specs, strict=True)
            for i, factors in enumerate(axes)
            if factor in factors
        ]
        pools = [x for x in having if "cache" in x[0] and not x[0].startswith("src")]
        for _, mesh_axes, factors in pools or having:
            mesh_axes = mesh_axes if isinstance(mesh_axes, tuple) else () if mesh_axes is None else (mesh_axes,)
            outer = chosen.of(factors[: factors.index(factor)])
            if mesh_axes[: len(outer)] == outer:
                yield mesh_axes[len(outer) :]

    def shardy_rule(self) -> tuple[str, dict[str, Any]]:
        """The call's rule in Shardy's notation, and the sizes of factors that are no axis by themselves."""
        unsplit = (f"whole{i}" for i in itertools.count())

        def word(factors: Factors) -> str:
            if len(factors) > 1:  # Shardy refuses factors of one element beside others
                factors = tuple(f for f in factors if self.sizes[f] > 1) or factors[:1]
            return f"({' '.join(factors)})" if len(factors) > 1 else factors[0] if factors else next(unsplit)

        sides = [", ".join(" ".join(map(word, axes)) for axes in side) for side in (self.operands, self.results)]
        alone = {word(factors) for axes in (*self.operands, *self.results) for factors in axes if factors}
        together = {f for words in alone if words.startswith("(") for f in words.strip("()").split()}
        return " -> ".join(sides), {factor: self.sizes[factor] for factor in sorted(together - alone)}


def _operand(path: Sequence[Any], num_axes: int, rule: _Rule, layout: Layout | Interleaved) -> tuple[str, Axes]:
    """The name and the axes of the operand at this path in the op's operands."""
    field, *inner = (str(getattr(key, "name", getattr(key, "idx", ""))) for key in path)
    name = inner[0] if field == "options" else field
    if rule.factors.startswith("any") and "cache" in name:
        # Each axis is a factor of its own, which the source and the destination of a swap share.
        pool = "_".join((name.removeprefix("src_").removeprefix("dst_"), *inner))
        return name, [*_axes("b", rule), *((f"{pool}_{axis}",) for axis in range(1, num_axes))]
    words = _SCALES[num_axes] if name in ("k_scale", "v_scale") else (_OPERANDS | _POOLS[layout])[name]
    return name, _axes(words, rule)


def _depends_on_distances(options: Any) -> bool:
    """Whether the options look at how far apart two tokens are."""
    return any(x is not None for x in (options.per_head.alibi_slopes, options.sliding_window, options.block_sparse))


def _axes(words: str, rule: _Rule) -> Axes:
    """The axes of an array, without the factors that the op does not split."""
    return [tuple(f for f in _FACTORS[word] if f in rule.factors) for word in words.split()]


def _flat(axes: Axes) -> set[str]:
    return {factor for factors in axes for factor in factors}
