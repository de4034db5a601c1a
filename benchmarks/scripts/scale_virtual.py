"""Eight virtual devices on two GPUs of one process: each GPU runs the programs of four of them in one kernel.
Checks sums, norms and bits against numpy, and times a chain of 32 all-reduces. Run in the root of a tree: python scale_virtual.py OUT.json [GPUS] [VIRTUAL]"""
import functools, json, os, sys, time
sys.path.insert(0, os.getcwd())
import jax, jax.numpy as jnp, numpy as np
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from examples import all_reduce, peer_memory
from examples.exchange import CHUNK, EMPTY, exchange, total
from examples.sharding import make_mesh
from benchmarks.scale_trace import trace

GPUS, V = (int(x) for x in (sys.argv[2:4] if len(sys.argv) > 3 else (2, 4)))
N, CHAIN, EPS = GPUS * V, 32, 1e-5

def reduce_kernel(part, residual, scale, table):
    """part [V, rows, h], residual [V, rows, h], table [V, columns]"""
    _, rows, h = part.shape
    programs = all_reduce.programs_of(rows, h)
    columns, sizes = h // programs, (N, h)
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=CHUNK)
    travel = functools.partial(exchange, sizes=sizes, by_owner=all_reduce.by_owner(N, rows, h))
    def kernel(part_gmem, residual_gmem, scale_gmem, table_gmem, total_gmem, normed_gmem, shared):
        v, row, of_row = lax.axis_index("v"), lax.axis_index("row"), lax.axis_index("program")
        at = pl.ds(of_row * columns, columns)
        load = lambda ref, *where: plgpu.load(ref.at[(*where, at)], layout=layout, optimized=False)
        mine, res, sc = load(part_gmem, v, row), load(residual_gmem, v, row), load(scale_gmem)
        mine_table = table_gmem.at[v]
        sums = travel(mine, res, mine_table, row, of_row)
        total_gmem[v, row, at] = sums
        sums = sums.astype(jnp.float32)
        squares = total(jnp.sum(sums * sums), mine_table, row, of_row, shared, sizes=sizes)
        normed_gmem[v, row, at] = (sums * lax.rsqrt(squares * (1 / h) + EPS) * sc.astype(jnp.float32)).astype(jnp.bfloat16)
    out = jax.ShapeDtypeStruct(part.shape, jnp.bfloat16)
    return plgpu.kernel(kernel, out_type=(out, out), scratch_types=(plgpu.SMEM((programs,), jnp.float32),), grid=(V, rows), grid_names=("v", "row"),
        cluster=(programs,), cluster_names=("program",), kernel_name="all_reduce_norm")(part, residual, scale, table)

mesh = make_mesh({"tp": GPUS})
print("lacks", all_reduce.lacks(mesh, 8192, jnp.bfloat16))
sharded, whole = NamedSharding(mesh, P("tp")), NamedSharding(mesh, P())
results = []
for rows, h in ((64, 8192), (64, 4096), (37, 5120), (16, 4096), (2, 4096)):
    words = 2 * (N + 1) * 128 * h // 2 + 128
    words += -words % 64
    bases = peer_memory.of_one_process(mesh, words * V, EMPTY)
    addresses = np.array([b + 4 * words * v for b in bases for v in range(V)], np.int64).view(np.int32)
    table = np.concatenate([np.arange(N, dtype=np.int32)[:, None], np.zeros((N, 1), np.int32), np.tile(addresses, (N, 1))], 1)
    table = jax.device_put(table, sharded)
    def make(chain):
        def on_device(part, residual, scale, table):
            residual += jax.lax.psum(part[:1, :1, :1], "tp") * 0
            for _ in range(chain):
                residual, part = reduce_kernel(part, residual, scale, table)
            return residual, part
        return jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=(P("tp"), P("tp"), P(), P("tp")), out_specs=(P("tp"), P("tp")), check_vma=False))
    one, many = make(1), make(CHAIN)
    r = np.random.default_rng(rows)
    ok, worst = True, 0.0
    for _ in range(3):
        part, res, scale = r.standard_normal((N, rows, h)), r.standard_normal((rows, h)), r.standard_normal(h)
        part[:, :, : h // 4] = -0.0
        a = [jnp.asarray(x, jnp.bfloat16) for x in (part, np.broadcast_to(res, (N, rows, h)), scale)]
        given = jax.device_put(a[0], sharded), jax.device_put(a[1], sharded), jax.device_put(a[2], whole), table
        for _ in range(3):
            got = [np.asarray(x).view(np.uint16) for x in one(*given)]
            ok &= all((x == x[:1]).all() for x in got)
        p, q, s = (np.asarray(x.astype(jnp.float32), np.float64) for x in a)
        t = q[0] + p.sum(0); n = t / np.sqrt((t * t).mean(-1, keepdims=True) + EPS) * s
        worst = max(worst, *(float(np.linalg.norm(g[0].view(jnp.bfloat16).astype(np.float64) - w) / np.linalg.norm(w)) for g, w in zip(got, (t, n))))
    call = many.lower(*given).compile()
    def calls():
        out = given[0]
        for _ in range(8): _, out = call(out, *given[1:])
        return out
    jax.block_until_ready(calls()); times = []
    for _ in range(5):
        began = time.perf_counter(); jax.block_until_ready(calls()); times.append(time.perf_counter() - began)
    row = {"rows": rows, "hidden": h, "virtual": N, "same_bits": bool(ok), "error": worst, "us": 1e6 * min(times) / 8 / CHAIN}
    try: row |= {k: v for k, v in trace(calls, 8).items() if k in ("all_reduce_us", "waits_us", "moves_us", "skew_us")}
    except Exception as e: row["trace_failed"] = str(e)[:100]
    results.append(row); print("VIRTUAL", row, flush=True)
    open(sys.argv[1], "w").write(json.dumps(results, indent=1))
