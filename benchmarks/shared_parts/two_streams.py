import os, dataclasses, functools, time
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE","false")
import jax, jax.numpy as jnp, numpy as np
from benchmarks import bench_shared_prefix as b, timing
from benchmarks.flashinfer_cascade import Sizes
from paged_jax.kernels.mosaic_gpu.decode.shared import call, choose, kernel, merge
from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.shared.refs import Parts
real=choose.tune
def set_variant(own, pre, regs, q=None, inflight=4):
    kernel._REGISTERS=regs; merge._IN_FLIGHT=inflight
    def tune(p,g):
        parts=real(p,g); f=lambda geo,s,**k: Geometry(geo.problem, dataclasses.replace(geo.tuning, tile=s[0], stages=s[1],**k))
        return Parts(f(parts.own,own), f(parts.prefix,pre,**({"queues":q} if q else {})), parts.num_programs)
    choose.tune=tune
H=(32,8,128)
def alt(**f): return [(a,dataclasses.replace(p,**{k:jnp.full_like(getattr(p,k),x) for k,x in f.items()}).joined()) for a,p in sets]
t0=time.time()
def case(name,*a):
    global query,cache,sets,want,base
    query,cache,sets=b.make(Sizes(*a)); want=np.asarray(b.row_by_row(query,cache,*sets[0]),np.float32)
    base=timing.time_calls(functools.partial(jax.jit(b.own),query,cache),sets); print(name,"own",round(base.us,1))
def go(label,v,sets_):
    try:
        set_variant(*v); jax.clear_caches()
        f=functools.partial(jax.jit(b.shared),query,cache)
        err=float(np.abs(np.asarray(f(*sets[0]),np.float32)-want).max()) if sets_ is sets else None
        t=timing.time_calls(f,sets_)
        print(label,v,"us",round(t.us,2),"ratio",round(t.us/base.us,3),"err",err,[(n[:12],round(u,1)) for n,u in t.kernels if u>0.3],round(time.time()-t0),flush=True)
    except Exception as e: print(label,v,"failed",str(e)[:150])
case("one",64,1,8192,512,H,4)
R=(128,128,176,80)
A=((64,2),(64,2),R)
go("full",A,sets); go("no prefix",A,alt(lens=0)); go("own 1",A,alt(own_lens=1)); go("none",A,alt(lens=0,own_lens=1))
go("full",((64,2),(64,2),(120,120,192,80)),sets); go("full 1 in flight",((64,2),(64,2),R,None,1),sets)
go("full 2 in flight",((64,2),(64,2),R,None,2),sets)
case("four",64,4,8192,512,H,4); go("four",A,sets)
case("16",16,1,8192,512,H,8); go("16",A,sets)
case("32x2048",32,1,8192,2048,H,3); go("32x2048",A,sets)
