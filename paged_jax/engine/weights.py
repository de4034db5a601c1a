"""Checks that the compiled programs of an engine can take other weights in place of those they were compiled for."""

from typing import Any

import jax
import numpy as np


def check_weights(new: Any, old: Any) -> None:
    """Raises if new weights are not of the same tree, shapes, dtypes and shardings as the old ones.

    Args:
      new: the weights that are to be used.
      old: the weights that are used; their arrays may have been donated meanwhile.

    Raises:
      ValueError: they differ, and in which leaf.
    """
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise ValueError(_difference(new, old, "weights"))
    olds = jax.tree.leaves(old)
    for (path, leaf), like in zip(jax.tree_util.tree_flatten_with_path(new)[0], olds, strict=True):
        name = f"weights{jax.tree_util.keystr(path)}"
        for what, of in ("dtype", _dtype), ("shape", np.shape):
            if of(leaf) != of(like):
                raise ValueError(f"{name} must be of {what} {of(like)}, as the engine's is, got {of(leaf)}")
        if not isinstance(like, jax.Array):
            continue
        if not isinstance(leaf, jax.Array):
            raise ValueError(f"{name} must be a JAX array, got {type(leaf).__name__}")
        if leaf.is_deleted():
            raise ValueError(f"{name} has been deleted or donated")
        if not leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim):
            raise ValueError(f"{name} must lie where the engine's does: {like.sharding}, got {leaf.sharding}")


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else type(leaf).__name__


def _difference(new: Any, old: Any, name: str) -> str:
    """Says in which node two trees first differ."""
    news, olds = _children(new), _children(old)
    if type(new) is not type(old) and not (_is_leaf(new) and _is_leaf(old)):
        return f"{name} must be of type {type(old).__name__}, got {type(new).__name__}"
    for key, child in olds.items():
        if key not in news:
            return f"{name}{key} is missing"
        if jax.tree.structure(child) != jax.tree.structure(news[key]):
            return _difference(news[key], child, f"{name}{key}")
    unknown = [key for key in news if key not in olds]
    return f"{name}{unknown[0]} is not known" if unknown else f"{name} must be {jax.tree.structure(old)}, got {new!r}"


def _is_leaf(node: Any) -> bool:
    return jax.tree.structure(node) == jax.tree.structure(0)


def _children(node: Any) -> dict[str, Any]:
    """The children of a node by their keys, in words; none if it is a leaf."""
    children, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda other: other is not node)
    return {jax.tree_util.keystr(path): child for path, child in children if path}
