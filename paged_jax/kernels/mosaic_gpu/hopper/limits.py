"""Limits that Hopper sets."""

CAPABILITY = 90
"""Compute capability 9.0, times ten."""

WARP, WARPGROUP = 32, 128
"""The number of threads of a warp, and of a warpgroup."""

WGMMA_ROWS = 64
"""Rows of the left operand of a wgmma instruction (M)."""

QUERY_ROWS = 8
"""A copy into swizzled shared memory takes a multiple of 8 rows, and begins at a multiple of 8."""

LARGEST_CLUSTER = 8
"""The most programs of a cluster that CUDA guarantees."""

PROGRAM_MEMORY = 227 * 1024
"""Bytes of shared memory that one program may have."""

MULTIPROCESSOR_MEMORY = 228 * 1024
"""Bytes of shared memory that all programs of a multiprocessor have together."""

SYSTEM_MEMORY = 1024
"""Bytes of shared memory that the system reserves for each program."""
