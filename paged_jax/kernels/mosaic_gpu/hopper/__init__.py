"""Code that all Hopper kernels share. It imports none of them."""
