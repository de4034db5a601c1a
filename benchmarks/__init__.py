"""Benchmarks of paged_jax on a GPU, beside its peers; README.md here says which command makes which result."""
