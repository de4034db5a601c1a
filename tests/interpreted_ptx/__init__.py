"""Functions on whole arrays that replace those of `paged_jax/kernels/mosaic_gpu/ragged/ptx/` in the interpreter."""
