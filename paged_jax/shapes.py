"""The arrays of the ops as jaxtyping words, one name each: the vocabulary that ops and implementations share."""

from jax import Array
from jaxtyping import Float, Float32, Int32, Num

Query = Float[Array, "num_seqs num_heads head_size"]
RaggedQuery = Float[Array, "num_tokens num_heads head_size"]
NewTokens = Float[Array, "num_tokens num_kv_heads head_size"]  # keys or values

Cache = Num[Array, "num_blocks ..."]  # `paged_jax.cache` gives the layouts
SourceCache = Num[Array, "num_source_blocks ..."]
CacheScale = Float[Array, "..."] | None

BlockTables = Int32[Array, "num_seqs max_blocks_per_seq"]
SeqLens = Int32[Array, "num_seqs"]
QueryStartLoc = Int32[Array, "num_seqs+1"]
SlotMapping = Int32[Array, "num_tokens"]
BlockMapping = Int32[Array, "num_pairs 2"]

Lse = Float32[Array, "num_seqs num_heads"]
RaggedLse = Float32[Array, "num_tokens num_heads"]
Residual = Float32[Array, "num_seqs num_heads max_num_partitions"]
TmpOut = Float32[Array, "num_seqs num_heads max_num_partitions head_size"]
