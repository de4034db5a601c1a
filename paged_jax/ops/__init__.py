"""The public attention ops. Each one checks its arguments and passes them to an implementation; none does arithmetic.

Attention ops share the keywords of `paged_jax.options.Options` (in multi-head latent attention,
`paged_jax.options.LatentOptions`), and these two:

- return_lse: whether to return the log-sum-exp of the logits too, f32 [..., num_heads]. Sinks are part of it; it is
  -inf where a query sees no token.
- implementation: the name of an implementation (`paged_jax.Implementation`). With None, the first one that can take the
  call is chosen when the call is lowered. `which_implementation` says which one that is, and the logger `paged_jax`
  warns if it is XLA on a GPU.

Lengths, tables, slots and pairs are int32. NumPy arrays of them may have any integer dtype if their values fit.

A scale is a factor of what a cache holds, whatever the cache's dtype: attention multiplies by it. A write divides by it
if the cache's dtype has fewer bytes than the new tokens', and otherwise stores these as they are.

Every op, also in `paged_jax.cache_ops`, raises ValueError or TypeError at trace time for a wrong shape, dtype or
option, NotImplementedError with every reason if `implementation` cannot do the call, and TypeError when it is
differentiated, since the ops are for inference only (`merge_attention_states`, which is plain arithmetic, has a
gradient). All of them work under jit, vmap, scan, shard_map and jax.export (which has to be told not to check Triton
kernels: "Good to know" in examples/README.md).

On sharded arrays, under plain jit too, each device computes its own part of an op, and the devices exchange nothing.
Heads and kv heads may be split over the same mesh axes. In decode ops that only read the caches, sequences may be split
as well. The query's heads follow the caches' sharding; where each device holds a single kv head, the query heads of
that kv head may also be split, over a mesh axis over which the caches are replicated. A latent cache has no heads:
each device holds all of it, and query heads are split. JAX changes any other sharding to one of these first, at the
cost of moving the arrays. In an exported program XLA gathers the sharded operands of an op; export a `shard_map` around
it instead.
"""

from paged_jax.ops.decode import paged_attention as paged_attention
from paged_jax.ops.decode import paged_attention_v1 as paged_attention_v1
from paged_jax.ops.decode import paged_attention_v2 as paged_attention_v2
from paged_jax.ops.fused import write_and_attend as write_and_attend
from paged_jax.ops.merge import merge_attention_states as merge_attention_states
from paged_jax.ops.mla import mla_paged_attention as mla_paged_attention
from paged_jax.ops.mla import ragged_mla_attention as ragged_mla_attention
from paged_jax.ops.ragged import prefix_attention as prefix_attention
from paged_jax.ops.ragged import ragged_paged_attention as ragged_paged_attention
