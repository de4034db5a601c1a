"""Functions on whole arrays that replace those of `paged_jax/kernels/mosaic_gpu/mla/ptx/` in the interpreter."""
