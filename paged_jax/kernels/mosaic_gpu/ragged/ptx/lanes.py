"""The operations of `hopper/lanes.py` that the ragged kernel uses. The tests replace them in this file."""

from paged_jax.kernels.mosaic_gpu.hopper.lanes import exponentials as exponentials
from paged_jax.kernels.mosaic_gpu.hopper.lanes import in_each_lane as in_each_lane
from paged_jax.kernels.mosaic_gpu.hopper.lanes import masked as masked
from paged_jax.kernels.mosaic_gpu.hopper.lanes import raised as raised
from paged_jax.kernels.mosaic_gpu.hopper.lanes import rescaled as rescaled
from paged_jax.kernels.mosaic_gpu.hopper.lanes import row_numbers as row_numbers
from paged_jax.kernels.mosaic_gpu.hopper.lanes import settle as settle
from paged_jax.kernels.mosaic_gpu.hopper.lanes import side_by_side as side_by_side
from paged_jax.kernels.mosaic_gpu.hopper.lanes import sum_of_lanes as sum_of_lanes
from paged_jax.kernels.mosaic_gpu.hopper.lanes import sums as sums
