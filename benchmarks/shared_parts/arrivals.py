import os, dataclasses, functools, time
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE","false")
import lane_arrive
import jax, jax.numpy as jnp, numpy as np
from benchmarks import bench_shared_prefix as b, timing
from benchmarks.flashinfer_cascade import Sizes
from paged_jax.kernels.mosaic_gpu import ops
from paged_jax.kernels.mosaic_gpu.ragged import call as ragged
from paged_jax.kernels.mosaic_gpu.decode.shared import call, choose, kernel
from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.shared.refs import Parts
real=choose.tune; new=ops.attend_to_copies
def tune(p,g):
    parts=real(p,g); f=lambda geo: Geometry(geo.problem, dataclasses.replace(geo.tuning, tile=64, stages=2)); return Parts(f(parts.own),f(parts.prefix))
choose.tune=tune
H=(32,8,128)
query,cache,sets=b.make(Sizes(64,1,8192,512,H,4))
want=np.asarray(b.row_by_row(query,cache,*sets[0]),np.float32)
def alt(**f): return [(a,dataclasses.replace(p,**{k:jnp.full_like(getattr(p,k),x) for k,x in f.items()}).joined()) for a,p in sets]
t0=time.time()
def go(label,fn,s,check=False):
    for on in (False,True):
        lane_arrive.use(on); jax.clear_caches()
        f=functools.partial(jax.jit(fn),query,cache)
        try:
            err=float(np.abs(np.asarray(f(*sets[0]),np.float32)-want).max()) if check else None
            t=timing.time_calls(f,s,seconds=0.03)
            print(label,"lane" if on else "warp","us",round(t.us,2),"err",err,[(n[:12],round(u,1)) for n,u in t.kernels if u>0.3],round(time.time()-t0),flush=True)
        except Exception as e: print(label,on,"failed",str(e)[:200],flush=True)
go("own 512",b.own,sets); go("own 16",b.own,alt(own_lens=16)); go("rows",b.row_by_row,sets,True)
go("shared",b.shared,sets,True); go("shared no prefix",b.shared,alt(lens=0)); go("shared own 1",b.shared,alt(own_lens=1))
ops.attend_to_copies=ragged.ragged_paged_attention
go("ragged one call",b.shared,sets,True)
