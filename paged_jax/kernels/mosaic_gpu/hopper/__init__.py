"""What all kernels for Hopper share, and nothing that only one of them has."""
