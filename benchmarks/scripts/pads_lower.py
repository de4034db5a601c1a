"""Lowers the cases of request pads-1: PYTHONPATH=. python pads_lower.py FOLDER/NAME, in a checkout."""
import os, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
from benchmarks import bench_decode, bench_commits, cases
from benchmarks.cases import Case

def lens(n, low, high, seed):
    import numpy as np
    return tuple(int(x) for x in np.random.default_rng(seed).integers(low, high + 1, n))

own = [
    Case("qwen2-7b-1x512", (512,), 28, 4),
    Case("qwen2-7b-1x8192", (8192,), 28, 4),
    Case("qwen2-7b-8x1024", (1024,) * 8, 28, 4),
    Case("qwen2-7b-64x512", (512,) * 64, 28, 4),
    Case("qwen2-7b-64xuneven", lens(64, 100, 4000, 0), 28, 4),
    Case("qwen2-7b-64x1024-e4m3", (1024,) * 64, 28, 4, cache_dtype="float8_e4m3fn"),
    Case("qwen2-7b-64x1024-vllm", (1024,) * 64, 28, 4, layout="vllm"),
    Case("glm-12-per-kv-16x1024", (1024,) * 16, 96, 8),
    Case("starcoder2-7b-9-per-kv-8x1024", (1024,) * 8, 36, 4),
    Case("gemma-3-270m-4x512-hd256", (512,) * 4, 4, 1, 256),
    Case("odd-items-3x700", (700,) * 3, 3, 3),
]
named = "llama3-8b-1x512,llama3-8b-4x1024,llama3-8b-8xskewed,llama3-8b-64x4096,opt-125m-256x1024,llama2-7b-32x2048,mqa-64x8192"
drawn = cases.random_decode(60, 12)
numbers = (2, 4, 8, 9, 11, 18, 24, 31, 35, 38, 45, 49, 58, 0, 17, 22, 46)
some = [*own, *cases.select(bench_decode.BENCHMARK.cases, named.split(",")), *(drawn[n] for n in numbers)]
bench_commits.lower(Path(sys.argv[1]), "decode", some, "mosaic_gpu")
