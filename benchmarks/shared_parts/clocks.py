import os, dataclasses, functools, time
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE","false")
import jax, jax.numpy as jnp, numpy as np
from benchmarks import bench_shared_prefix as b, timing
from benchmarks.flashinfer_cascade import Sizes
from paged_jax.kernels.mosaic_gpu.decode.shared import call, choose, kernel
from paged_jax.kernels.mosaic_gpu.decode.shared.call import *
from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.shared.refs import Parts
from paged_jax.options import AttentionOptions, PerHead
real=choose.tune
def set_variant(own, pre, q):
    def tune(p,g):
        parts=real(p,g); f=lambda geo,s,**k: Geometry(geo.problem, dataclasses.replace(geo.tuning, tile=s[0], stages=s[1],**k))
        return Parts(f(parts.own,own), f(parts.prefix,pre,queues=q), parts.num_programs)
    choose.tune=tune
H=(32,8,128)
s=Sizes(64,1,8192,512,H,4)
query,cache,sets=b.make(s)
def alt(**f): return [(a,dataclasses.replace(p,**{k:jnp.full_like(getattr(p,k),x) for k,x in f.items()}).joined()) for a,p in sets]
noprefix, own1, none = alt(lens=0), alt(own_lens=1), alt(lens=0,own_lens=1)
o=AttentionOptions(scale=jnp.float32(0.088), per_head=PerHead(None,None), k_scale=None, v_scale=None, layout="hnd", max_seq_len=8192, max_query_len=64, sliding_window=None, logits_soft_cap=None, block_sparse=None, causal=False, copies=2)
def raw(query,kc,vc,bt,sl,qs):
    problem = Problem.of_call(query, kc, vc, bt, o); parts = choose.tune(problem, facts.device())
    vectors = jax.tree.map(jnp.atleast_1d, OptionArrays.of(o))
    return attend(parts, Inputs(query, decode.query_tiles(query, parts.own), kc, vc, bt, sl, qs, vectors)).marks
def go(label,v,sets_):
    set_variant(*v); jax.clear_caches()
    f=functools.partial(jax.jit(b.shared),query,cache)
    t=timing.time_calls(f,sets_)
    print(label,v,"us",round(t.us,2),[(n[:12],round(u,1)) for n,u in t.kernels if u>0.3],flush=True)
    g=jax.jit(raw)
    for a,p in sets_: m=g(query,cache.key_cache,cache.value_cache,*p.batch)
    ms=[np.asarray(g(query,cache.key_cache,cache.value_cache,*p.batch)).astype(np.uint32).astype(np.int64) for a,p in sets_[:2]]
    m=ms[1]; t0=m[:,0].min(); r=(m-t0)/1e3
    for k in (0,1,2,3,4,5,6,9,10,11,12,13,18,19,20,21):
        x=r[:,k][(r[:,k]>=0)&(r[:,k]<1000)]
        if len(x): print("   ",k,"n",len(x),"min %.1f mean %.1f p90 %.1f max %.1f"%(x.min(),x.mean(),np.quantile(x,.9),x.max()),flush=True)
A=((64,3),(64,2))
go("full",(*A,16),sets); go("full",(*A,8),sets); go("no prefix",(*A,16),noprefix); go("own 1",(*A,16),own1); go("none",(*A,16),none)
