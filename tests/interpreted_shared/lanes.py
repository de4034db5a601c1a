"""The softmax's operations on the rows of a warpgroup, which are those of the ragged kernel."""

from tests.interpreted_ptx.lanes import exponentials as exponentials
from tests.interpreted_ptx.lanes import in_each_lane as in_each_lane
from tests.interpreted_ptx.lanes import raised as raised
from tests.interpreted_ptx.lanes import rescaled as rescaled
from tests.interpreted_ptx.lanes import settle as settle
from tests.interpreted_ptx.lanes import sum_of_lanes as sum_of_lanes
from tests.interpreted_ptx.lanes import sums as sums
