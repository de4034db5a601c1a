"""Benchmarks of paged_jax on a GPU, beside its peers: `python -m benchmarks.bench_decode`, `.bench_prefill`."""
