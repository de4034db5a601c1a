"""What Hopper prescribes."""

WGMMA_ROWS = 64
"""Rows of the left operand that one wgmma instruction multiplies; Hopper has no other number."""

QUERY_ROWS = 8
"""A copy into swizzled shared memory starts at a multiple of 8 rows and takes a multiple of 8."""

LARGEST_CLUSTER = 8
"""Programs of a cluster; CUDA promises no more."""
