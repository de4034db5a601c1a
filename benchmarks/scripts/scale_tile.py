"""Compares one sequence's attention (a query tile that its copy fills with zeros) with XLA's. Run in the root of a tree."""
import os, sys
sys.path.insert(0, os.getcwd())
import numpy as np, jax, jax.numpy as jnp
import paged_jax
for seqs, heads, kv, hd, dtype in [(1,4,1,128,"bfloat16"),(1,4,1,64,"float16"),(1,5,1,128,"bfloat16"),(1,3,1,80,"bfloat16"),(1,2,1,256,"bfloat16"),(2,2,1,128,"bfloat16"),(1,1,1,128,"bfloat16"),(1,8,1,128,"bfloat16"),(3,2,1,128,"bfloat16")]:
    r = np.random.default_rng(0); n = 70
    a = lambda *s: jnp.asarray(r.standard_normal(s), dtype)
    k, v = a(seqs*n, kv, 16, hd), a(seqs*n, kv, 16, hd)
    t = jnp.asarray(r.permutation(seqs*n).reshape(seqs, n), jnp.int32); lens = jnp.asarray(r.integers(900, 1100, seqs), jnp.int32)
    q, nk, nv = a(seqs, heads, hd), a(seqs, kv, hd), a(seqs, kv, hd)
    slots = t[jnp.arange(seqs), (lens-1)//16]*16 + (lens-1)%16
    for op in ("attend", "write"):
        res = []
        for impl in ("mosaic_gpu", "xla"):
            if op == "attend": f = lambda: paged_jax.paged_attention(q, k, v, t, lens, implementation=impl)
            else: f = lambda: paged_jax.write_and_attend(q, nk, nv, k, v, t, lens, slots, implementation=impl)[0]
            try: res.append(np.asarray(jax.jit(f)(), np.float32))
            except Exception as e: res.append(str(e)[:200])
        if any(isinstance(x, str) for x in res): print("TILE", seqs, heads, kv, hd, op, [x if isinstance(x,str) else "ok" for x in res]); continue
        err = float(np.abs(res[0]-res[1]).max() / np.abs(res[1]).max())
        print("TILE", seqs, heads, kv, hd, op, "err", round(err, 5), "OK" if err < 0.02 else "BAD", flush=True)
