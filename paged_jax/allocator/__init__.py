"""A functional block allocator: which blocks of the paged KV cache belong to which sequence.

The state is an immutable pytree and every function returns a new one. The same functions run on NumPy arrays on the
host and on JAX arrays or tracers inside `jit`, `scan`, `while_loop` and `vmap`: the type of the state's leaves picks
the form, and both give bit-equal states. The decisions (which sequence grows, which one copies, which ids come next)
are written once, over `xp`, which is `numpy` or `jax.numpy`. Only the updates of the arrays are written twice: on the
host they touch just the blocks concerned and raise errors; in a traced program they have static shapes and report
errors in `ok`, `bad_free` and `bad_share`.

Free blocks are a stack. A block's reference count is the number of block table entries that name it, plus the
references that `retain` added; a block that has several references is copied before a sequence writes to it
(copy-on-write).

- state.py      the state, how it is made, and the slots of tokens
- grow.py       append_tokens, count_new_blocks: blocks go from the stack to sequences, shared blocks are copied
- share.py      fork, share, adopt, retain: blocks gain references
- release.py    truncate, release_before, free, free_blocks: blocks lose references and return to the stack
- arguments.py  turns arguments of any kind into int32 or bool arrays of the state's form

Counts, ids and masks may be lists, NumPy or JAX arrays; a host state stays on the host unless an argument is a tracer.
Concrete integers that do not fit in int32 raise ValueError; traced ones become the nearest integer that fits, so that
they stay out of range.
"""

from paged_jax.allocator.grow import OutOfBlocks, append_tokens, count_new_blocks
from paged_jax.allocator.release import free, free_blocks, release_before, truncate
from paged_jax.allocator.share import adopt, fork, retain, share
from paged_jax.allocator.state import AllocatorState, create, slots

__all__ = [
    "AllocatorState",
    "OutOfBlocks",
    "adopt",
    "append_tokens",
    "count_new_blocks",
    "create",
    "fork",
    "free",
    "free_blocks",
    "release_before",
    "retain",
    "share",
    "slots",
    "truncate",
]
