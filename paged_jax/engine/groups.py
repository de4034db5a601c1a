"""Groups of layers with the same sliding window, which share block tables and have pools of one size.

A layer with a window reads the last tokens of a sequence only, so that its blocks for earlier tokens can go to others
while the sequence runs. The layers that see everything must keep theirs. One block table serves all layers of a group,
so layers that keep different blocks need different tables.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from paged_jax._static import integer
from paged_jax.engine.config import EngineConfig


class Group(NamedTuple):
    """The layers of one window.

    Attributes:
      sliding_window: tokens that a query of these layers sees, its own included; None for all.
      layers: which layers they are, in rising order.
      num_blocks: blocks of each layer's cache.
      block_bytes: bytes of one block in all of these layers together.
    """

    sliding_window: int | None
    layers: tuple[int, ...]
    num_blocks: int
    block_bytes: int


def make_groups(caches: Sequence[Any], sliding_windows: Iterable[int | None] | None, longest: int) -> tuple[Group, ...]:
    """Groups layers by their windows.

    Args:
      caches: each layer's cache.
      sliding_windows: each layer's window; None if no layer has one.
      longest: tokens of the longest sequence; a window of this size or more counts as none.

    Returns:
      The groups, the widest window first.

    Raises:
      ValueError: there is no cache; there are more or fewer windows than caches; a window is not positive; caches of
        a group differ in their numbers of blocks, or any caches in their block sizes.
      TypeError: a window is not an integer.
    """
    if not caches:
        raise ValueError("caches must hold a PagedKVCache a layer, got none")
    windows = [None] * len(caches) if sliding_windows is None else list(sliding_windows)
    if len(windows) != len(caches):
        raise ValueError(f"sliding_windows must have one entry for each of {len(caches)} caches, got {len(windows)}")
    layers_of: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        tokens = longest if window is None else integer("sliding_windows", window)
        if tokens < 1:
            raise ValueError(f"sliding_windows must be positive, layer {layer} has {tokens}")
        layers_of.setdefault(min(tokens, longest), []).append(layer)
    groups = []
    for window in sorted(layers_of, reverse=True):
        layers = tuple(layers_of[window])
        first = caches[layers[0]]
        for layer in layers:
            cache = caches[layer]
            if (cache.num_blocks, cache.block_size) != (first.num_blocks, first.block_size):
                raise ValueError(
                    f"all caches must have as many blocks of one size: layer {layer} has {cache.num_blocks} of "
                    f"{cache.block_size}, layer {layers[0]} has {first.num_blocks} of {first.block_size}; only layers "
                    "with different sliding_windows may have different numbers"
                )
        if first.block_size != caches[0].block_size:
            raise ValueError(
                f"all blocks must be of one size: layer {layers[0]} has blocks of {first.block_size} tokens, layer 0 "
                f"of {caches[0].block_size}"
            )
        size = sum(caches[layer].nbytes for layer in layers) // first.num_blocks
        groups.append(Group(window if window < longest else None, layers, first.num_blocks, size))
    return tuple(groups)


def most_blocks(sliding_window: int | None, block_size: int, config: EngineConfig) -> int | None:
    """The most blocks that one sequence ever holds.

    Args:
      sliding_window: the group's window.
      block_size: tokens in a block.
      config: the engine's config.

    Returns:
      The number of blocks that a step's new tokens and the window before the first of them may touch; None without a
      window, where a sequence holds blocks for all of its tokens.
    """
    if sliding_window is None:
        return None
    return _most_touched(sliding_window - 1 + config.max_tokens_per_step, block_size)


def blocks_used(config: EngineConfig, groups: Sequence[Group]) -> list[int]:
    """How many blocks of each group's pools the engine uses.

    Raises:
      ValueError: the config asks for more than there are, or for another number of groups.
    """
    sizes, wanted = [group.num_blocks for group in groups], config.num_blocks
    if wanted is None:
        return sizes
    if isinstance(wanted, int):
        if wanted > max(sizes):
            raise ValueError(f"num_blocks must be at most the caches' {max(sizes)}, got {wanted}")
        return [min(wanted, size) for size in sizes]
    if len(wanted) != len(sizes) or any(count > size for count, size in zip(wanted, sizes, strict=True)):
        raise ValueError(f"num_blocks must be at most the caches' {sizes}, by groups of layers, got {wanted}")
    return list(wanted)


def host_blocks(group: Group, block_size: int, config: EngineConfig) -> int:
    """Returns a group's number of blocks in host memory: at most as many blocks as all running sequences can hold."""
    most = most_blocks(group.sliding_window, block_size, config)
    return config.num_host_blocks if most is None else min(config.num_host_blocks, config.max_num_seqs * most)


def pool_sizes(
    sliding_windows: Iterable[int | None], num_blocks: int, block_size: int, config: EngineConfig
) -> tuple[int, ...]:
    """Chooses how many blocks each layer's cache should have.

    Args:
      sliding_windows: each layer's window, None for layers that see everything.
      num_blocks: blocks of each cache of a layer that sees everything.
      block_size: tokens in a block.
      config: the engine's config.

    Returns:
      For each layer the number of blocks of its cache. Without a window this is `num_blocks`. With one it is the number
      that `max_num_seqs` sequences can hold at the same time, or `num_blocks` if that is less. The prefix cache keeps
      the blocks that running sequences do not need.

    Example:
      >>> from paged_jax.engine import EngineConfig, pool_sizes
      >>> config = EngineConfig(max_model_len=131072, max_num_seqs=1, max_tokens_per_step=512)
      >>> pool_sizes([1024, None], num_blocks=8192, block_size=16, config=config)
      (98, 8192)
    """

    def size(window: int | None) -> int:
        if window is None or window >= config.max_model_len:
            return num_blocks
        # The new tokens of a step are shared out, and may begin a block in each sequence.
        for_each = _most_touched(window - 1, block_size) + 1
        return min(num_blocks, config.max_num_seqs * for_each + -(-config.max_tokens_per_step // block_size))

    return tuple(size(window) for window in sliding_windows)


def _most_touched(num_tokens: int, block_size: int) -> int:
    """The most blocks that a run of tokens touches, over all places in a block where it may begin."""
    return (num_tokens + block_size - 2) // block_size + 1 if num_tokens else 0
