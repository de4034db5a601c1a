"""The public attention ops: what they take and return. Checks, then dispatch; no arithmetic.

Attention ops share the keywords of `paged_jax.options.Options`, and these two:

- return_lse: also return the log-sum-exp of the logits, f32 [..., num_heads], sinks included; -inf where a query
  sees no token.
- implementation: the name of one (`paged_jax.Implementation`); None takes the first that can, chosen when the call is
  lowered. `which_implementation` tells which one that is, and the logger `paged_jax` warns where it is XLA on a GPU.

Every op, those of `paged_jax.cache_ops` too, raises ValueError or TypeError at trace time for a wrong shape, dtype or
option, NotImplementedError if the implementation asked for lacks an option, and TypeError when differentiated: they
are for inference only. All of them work under jit, vmap, scan, shard_map and jax.export (which has to be told to go
without a check of Triton kernels, see README.md).

On sharded arrays an op runs where they lie, under plain jit too, and devices exchange nothing: heads and kv heads may
be split alike, and sequences of ops that decode and only read the caches. Query heads follow the caches; where a cache
is whole on every device, so that one kv head serves several, the query heads of a single kv head may be split. Any
other sharding is changed to one of these by JAX, which costs what moving the arrays costs. An exported program leaves
an op to XLA, which gathers what is sharded for a kernel; export a `shard_map` around it instead.
"""

from paged_jax.ops.decode import paged_attention as paged_attention
from paged_jax.ops.decode import paged_attention_v1 as paged_attention_v1
from paged_jax.ops.decode import paged_attention_v2 as paged_attention_v2
from paged_jax.ops.fused import write_and_attend as write_and_attend
from paged_jax.ops.merge import merge_attention_states as merge_attention_states
from paged_jax.ops.ragged import prefix_attention as prefix_attention
from paged_jax.ops.ragged import ragged_paged_attention as ragged_paged_attention
