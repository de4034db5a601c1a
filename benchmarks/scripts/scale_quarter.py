"""Steps of models over GPUs with a process for each. Run in the root of a tree:
    python scale_quarter.py OUT.json 2 quarter     two GPUs, models with a quarter of heads, columns, vocabulary: the local shapes of eight
    python scale_quarter.py OUT.json 8 whole       eight GPUs, the true models
Environment: STEPS=64 (so many steps in a row, not 16), MODELS=llama3-8b, BATCHES=1,64, NOTRACE=1. Prints HOST lines: the us
of a step until the calls return, and until all is done."""
import dataclasses, os, sys, time
from pathlib import Path
sys.path.insert(0, os.getcwd())
import jax
from benchmarks import bench_scale, scale_processes, scale_steps
from examples.server.processes import wait

if steps := os.environ.get("STEPS"):
    bench_scale.STEPS = scale_steps.STEPS = int(steps)
if os.environ.get("NOTRACE"):
    bench_scale.trace = lambda run, steps: {}

def best_us(run, state, iterations, repeats=5):
    state = jax.block_until_ready(run(state))
    times, hosts = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        state = run(state)
        hosts.append(time.perf_counter() - began)
        state = jax.block_until_ready(state)
        times.append(time.perf_counter() - began)
    if not jax.process_index():
        print("HOST", iterations, "steps: us until the calls return", *(round(1e6 * t / iterations) for t in hosts), "until all is done", *(round(1e6 * t / iterations) for t in times), flush=True)
    return 1e6 * min(times) / iterations, state

bench_scale.best_us = best_us

def quarter(c):
    return dataclasses.replace(c, num_heads=c.num_heads // 4, num_kv_heads=c.num_kv_heads // 4,
        intermediate_size=c.intermediate_size // 4, vocab_size=c.vocab_size // 4)

out, size, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if not scale_processes.join():
    sys.exit(wait(scale_processes.start([sys.executable, *sys.argv], size, PYTHONPATH=os.getcwd())))
report = bench_scale.Report("models", Path(out))
for name in os.environ.get("MODELS", "llama3-8b,llama3-70b").split(","):
    config = scale_steps.MODELS[name]
    of = {name + "-quarter": quarter(config)} if how == "quarter" else {name: config}
    batches = [int(n) for n in os.environ.get("BATCHES", "1,64").split(",")]
    bench_scale.run_models(report, of, [size], batches, 1024, 0, ["called"])
