"""As halves_aot.py, with a residual stream that is split by tokens: sums are reduce-scatters, norms compute a device's tokens."""
import os, sys
sys.path.insert(0, os.getcwd())
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from examples import decoder
def install(mesh):
    def split(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("tp"))) if x.shape[0] >= 512 else x
    def whole(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P())) if x.shape[0] >= 512 else x
    add = decoder.Layer._add
    def _add(self, hidden, out, norm, out_norm):
        return add(self, split(hidden), split(out), norm, out_norm)
    decoder.Layer._add = _add
    before = decoder.Layer._before
    def _before(self, norm, hidden):
        return whole(split(before(self, norm, split(hidden))))
    decoder.Layer._before = _before
