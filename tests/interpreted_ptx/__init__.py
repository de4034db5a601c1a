"""What the interpreter runs in place of `paged_jax/kernels/mosaic_gpu/ragged/ptx/`: the same names, on whole arrays."""
