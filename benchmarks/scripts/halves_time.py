"""Predicts the ms of a scheduled step of prompts: compute in order on one stream, all-reduces on another.
python halves_time.py HLO [SLOWER]   GEMMs and other kernels take SLOWER times as long while an all-reduce runs (default 1.15)"""
from pathlib import Path
import re, sys
sys.path.insert(0, str(Path(__file__).parent))
SLOW = float(sys.argv[2]) if len(sys.argv) > 2 else 1.15
AR_SLOW = 1.05
import os
PERSISTENT = os.environ.get("PERSISTENT"); RATE = float(os.environ.get("RATE", 790))  # TFLOP/s of products
RING = float(os.environ.get("RING", 1.75))  # 2 (n - 1) / n
text = open(sys.argv[1]).read()
entry = text[text.rindex("\nENTRY "):]
SIZE = {"bf16": 2, "f32": 4, "s32": 4, "pred": 1, "s8": 1, "u32": 4, "u8": 1}
def shapes(s): return [(SIZE.get(d, 4), [int(x) for x in n.split(",") if x]) for d, n in re.findall(r"\b(bf16|f32|s32|pred|s8|u32|u8)\[([\d,]*)\]", s)]
def num(x):
    p = 1
    for n in x[1]: p *= n
    return p
def nbytes(l): return sum(num(x) * x[0] for x in l)
def ar(b, kind="all-reduce"):
    half = "gather" in kind or "scatter" in kind or "to-all" in kind
    return (12 if half else 20) + (b * (0.5 if half else 1.0) * RING / 345e3 if b > 1e6 else 0)
def largest(l): return max((num(x) * x[0] for x in l), default=0)
of, when = {}, []
t, comm_free, ready, log, gaps = 0.0, 0.0, {}, [], []
busy = []  # intervals of comm
compute = comm = exposed = 0.0
def run(us):
    """advances compute by work us, slower beside comm"""
    global t, compute
    compute += us
    while us > 1e-9:
        cur = next(((a, b) for a, b in busy if a <= t < b), None)
        nxt = min((a for a, b in busy if a > t), default=1e18)
        if cur: d = min(us * SLOW, cur[1] - t); us -= d / SLOW; t += d
        else: d = min(us, nxt - t); us -= d; t += d
for line in entry.splitlines():
    m = re.match(r"\s*(?:ROOT )?%?([\w.\-#]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)", line)
    if not m: continue
    name, shape, op, args = m.groups()
    of[name] = shapes(shape)
    ops = [of.get(a.split("#")[0], []) if "#" not in a else of.get(a.split("#")[0], [])[int(a.split("#")[1]) : int(a.split("#")[1]) + 1] for a in re.findall(r"%([\w.\-]+(?:#\d+)?)", args)]
    if op in ("parameter", "constant", "get-tuple-element", "bitcast", "tuple"):
        if op == "get-tuple-element":
            i = int(re.search(r"index=(\d+)", line)[1]); of[name] = [ops[0][i]] if ops and i < len(ops[0]) else of[name]
        continue
    if op.endswith("-start"):
        b = largest(of[name])
        d = ar(b, name) * AR_SLOW; comm += ar(b, name)
        begin = max(t + 3, comm_free); comm_free = begin + d; ready[name] = comm_free; busy.append((begin, comm_free))
        busy = [x for x in busy if x[1] > t]
    elif op.endswith("-done"):
        src = re.findall(r"%([\w.\-]+)", args)[0]
        of[name] = of[src][-1:]
        end = ready.get(src, t)
        if end > t: exposed += end - t; t = end
        t += 3
    elif op in ("all-reduce", "all-gather", "reduce-scatter"):
        d = ar(max(largest(of[name]), largest([x for o in ops for x in o])), op); comm += d; begin = max(t, comm_free); exposed += begin + d - t; t = comm_free = begin + d + 3
    elif "cublas" in line:
        out = of[name][0][1]; 
        k = next((x[0][1][-1] if len(x[0][1]) == 2 else 1) for x in ops if x)
        m_, n = out[0], out[-1]
        tiles = -(-m_ // 128) * -(-n // 128)
        flop = 2 * m_ * n * k
        waves = tiles / 132
        eff = waves / (-(-tiles // 132)) if tiles < 132 * 4 else 1
        us = max(flop / (RATE * 1e6) / max(eff, 0.85), k * n * 2 / 4e6)
        end = next((b for a, b in busy if a <= t < b), None)
        while end is not None and any(abs(a - end) < 5 for a, b in busy): end = next(b for a, b in busy if abs(a - end) < 5)
        if PERSISTENT and end is not None and us > 8:  # the programs that find no SM start when others end
            compute += us; t = min(end, t + us) + us
        else: run(us)
    elif op == "custom-call":
        b = of[name]
        if "attend" in line or (b and len(b[0][1]) == 3): run(43 * b[0][1][0] / 8192 if b[0][1] and b[0][1][0] < 100000 else 3)
        else: run(2.6)
    else:
        small = [x for o in ops for x in o]
        big = nbytes(of[name]) + sum(min(nbytes([x]), nbytes(of[name]) * 2) for x in small)
        run(max(2.0, big / 3.9e6) + 1)
print(f"{sys.argv[1].split('/')[-1]:24s} total {t / 1e3:7.2f} ms: compute {compute / 1e3:.2f}, collectives {comm / 1e3:.2f}, exposed {exposed / 1e3:.2f}")
