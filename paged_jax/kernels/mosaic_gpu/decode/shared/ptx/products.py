"""The products of `hopper/products.py` that attention to prefixes uses. The tests replace them in this file."""

from paged_jax.kernels.mosaic_gpu.hopper.products import accumulate as accumulate
from paged_jax.kernels.mosaic_gpu.hopper.products import score_and_accumulate as score_and_accumulate
