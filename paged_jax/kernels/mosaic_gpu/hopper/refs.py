"""References to global and to shared memory."""

from typing import Any, NamedTuple

Ref = Any
"""A reference on the device; on the host, the array or type that it comes from."""

ABSENT: Any = None
"""The value of a field that is not in a call."""


class Lengths(NamedTuple):
    """The lengths of a ragged batch's sequences."""

    seq_lens: Ref  # [num_seqs]
    query_start_loc: Ref  # [num_seqs + 1]; absent if sequence i has just one query, query i


class Partials(NamedTuple):
    """Partial results of a kernel whose rows lie in tiles of 64. Each is the normalised softmax of one split."""

    out: Ref  # [..., 64, elements in a row of out]
    log_sums: Ref  # [..., 64], the binary logarithms of sums of exponentials
