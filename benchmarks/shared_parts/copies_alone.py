import os, dataclasses, functools, time
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE","false")
import jax, jax.numpy as jnp, numpy as np
from jax import lax
import jax.experimental.pallas.mosaic_gpu as plgpu
from benchmarks import bench_shared_prefix as b, timing
from benchmarks.flashinfer_cascade import Sizes
from paged_jax.kernels.mosaic_gpu.decode.shared import call, choose, kernel, softmax as ps
from paged_jax.kernels.mosaic_gpu.decode import softmax as ds, plan as dplan, kernel as dk
from paged_jax.kernels.mosaic_gpu.hopper.registers import layout
from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.shared.refs import Parts
real=choose.tune
def set_variant(own, pre):
    def tune(p,g):
        parts=real(p,g); f=lambda geo,s: Geometry(geo.problem, dataclasses.replace(geo.tuning, tile=s[0], stages=s[1]))
        return Parts(f(parts.own,own), f(parts.prefix,pre))
    choose.tune=tune
real_own, real_pre = ds.attend, ps.attend
def own_copies(split,end,tiles_before,first,query_smem,to_logits,refs,geometry,tiles):
    def tile(i,state):
        st=lax.rem(tiles_before+i, jnp.int32(geometry.tuning.stages))
        for r in (refs.smem.keys,refs.smem.values):
            plgpu.barrier_wait(r.ready.at[st]); plgpu.barrier_arrive(r.consumed.at[st])
        return state
    lax.fori_loop(0,split.num_tiles,lambda i,c: (tile(i,0),c)[1],jnp.int32(0))
    return first
def pre_copies(split,tiles_before,factor,refs,geometry):
    def tile(i,c):
        st=lax.rem(tiles_before+i, jnp.int32(geometry.tuning.stages))
        for r in (refs.smem.keys,refs.smem.values):
            plgpu.barrier_wait(r.ready.at[st]); plgpu.barrier_arrive(r.consumed.at[st])
        return c
    lax.fori_loop(0,split.num_tiles,tile,jnp.int32(0))
    rows=jnp.zeros((64,),jnp.float32)
    return ps.State(layout(jnp.zeros((64,128),jnp.float32)), layout(rows,1), layout(rows+1,1))
H=(32,8,128)
s=Sizes(64,1,8192,512,H,4)
query,cache,sets=b.make(s)
def alt(**f): return [(a,dataclasses.replace(p,**{k:jnp.full_like(getattr(p,k),x) for k,x in f.items()}).joined()) for a,p in sets]
noprefix, own1 = alt(lens=0), alt(own_lens=1)
t0=time.time()
base=timing.time_calls(functools.partial(jax.jit(b.own),query,cache),sets)
print("own",round(base.us,1),[(n[:18],round(u,1)) for n,u in base.kernels if u>0.3],flush=True)
want=np.asarray(b.row_by_row(query,cache,*sets[0]),np.float32)
def go(label, v, sets_=sets, own=False, pre=False):
    set_variant(*v); jax.clear_caches(); ds.attend = own_copies if own else real_own; ps.attend = pre_copies if pre else real_pre
    f=functools.partial(jax.jit(b.shared),query,cache)
    t=timing.time_calls(f,sets_)
    err=float(np.abs(np.asarray(f(*sets[0]),np.float32)-want).max()) if sets_ is sets and not (own or pre) else None
    print(label,v,"us",round(t.us,2),"ratio",round(t.us/base.us,3),"err",err,[(n[:12],round(u,1)) for n,u in t.kernels if u>0.3],round(time.time()-t0),flush=True)
A=((64,3),(64,3))
go("full",A); go("no prefix",A,noprefix); go("own 1",A,own1); go("own copies",A,own=True); go("pre copies",A,pre=True); go("both copies",A,own=True,pre=True); go("no prefix, own copies",A,noprefix,own=True)
for v in (((64,2),(64,2)),((64,3),(64,2)),((64,2),(64,3)),((64,4),(64,2)),((128,2),(64,2)),((64,2),(64,4))):
    go("full",v)
for v in (((64,2),(64,2)),((64,4),(64,2)),((128,2),(64,2))): go("no prefix",v,noprefix)
s=Sizes(64,4,8192,512,H,4)
query,cache,sets=b.make(s); want=np.asarray(b.row_by_row(query,cache,*sets[0]),np.float32)
for v in (A,((64,2),(64,2)),((64,3),(64,2))): go("four",v)
