"""In the interpreter, these functions on whole arrays replace `paged_jax/kernels/mosaic_gpu/decode/ptx/`."""
