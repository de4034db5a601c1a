"""Products with accumulators that stay in registers, which are those of the ragged kernel."""

from tests.interpreted_ptx.products import accumulate as accumulate
from tests.interpreted_ptx.products import score_and_accumulate as score_and_accumulate
