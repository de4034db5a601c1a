"""What Hopper prescribes: facts of the GPU, which no kernel chooses."""

CAPABILITY = 90
"""Compute capability 9.0, times ten."""

WARP, WARPGROUP = 32, 128
"""Threads."""

WGMMA_ROWS = 64
"""Rows of the left operand that one wgmma instruction multiplies; Hopper has no other number."""

QUERY_ROWS = 8
"""A copy into swizzled shared memory starts at a multiple of 8 rows and takes a multiple of 8."""

LARGEST_CLUSTER = 8
"""Programs of a cluster; CUDA promises no more."""

PROGRAM_MEMORY = 227 * 1024
"""Bytes of shared memory that one program may have."""

MULTIPROCESSOR_MEMORY = 228 * 1024
"""Bytes of shared memory that all programs of a multiprocessor have together."""

SYSTEM_MEMORY = 1024
"""Bytes of shared memory that the system reserves for each program."""
