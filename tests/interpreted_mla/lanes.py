"""The operations of `hopper/lanes.py` that the MLA kernel uses."""

import jax.experimental.pallas as pl

from tests.interpreted_ptx.lanes import exponentials as exponentials
from tests.interpreted_ptx.lanes import raised as raised
from tests.interpreted_ptx.lanes import rescaled as rescaled
from tests.interpreted_ptx.lanes import row_numbers as row_numbers
from tests.interpreted_ptx.lanes import settle as settle
from tests.interpreted_ptx.lanes import sum_of_lanes as sum_of_lanes
from tests.interpreted_ptx.lanes import sums as sums


def loaded(values_gmem, first):
    return values_gmem[pl.ds(first, 64)]
