"""Registers this library's pytrees, so that `jax.export` can serialise functions that take or return them."""

import dataclasses
import json

from jax import export

from paged_jax.allocator import AllocatorState
from paged_jax.cache import PagedKVCache
from paged_jax.latent_cache import PagedLatentCache
from paged_jax.metadata import AttentionMetadata
from paged_jax.options import AttentionOptions, BlockSparse, PerHead


def _to_bytes(static: tuple) -> bytes:
    """Writes a pytree's static fields as JSON: numbers, strings and `BlockSparse`s."""
    return json.dumps([dataclasses.asdict(x) if isinstance(x, BlockSparse) else x for x in static]).encode()


def _from_bytes(data: bytes | bytearray) -> tuple:
    return tuple(BlockSparse(**x) if isinstance(x, dict) else x for x in json.loads(data))


for _class in (AllocatorState, AttentionMetadata, AttentionOptions, PagedKVCache, PagedLatentCache):
    export.register_pytree_node_serialization(
        _class,
        serialized_name=f"paged_jax.{_class.__name__}",
        serialize_auxdata=_to_bytes,
        deserialize_auxdata=_from_bytes,
    )
export.register_namedtuple_serialization(PerHead, serialized_name="paged_jax.PerHead")
