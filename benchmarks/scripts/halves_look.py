"""Says what the schedule of a compiled step puts beside its all-reduces: python halves_look.py HLO [full]"""
import re, sys
text = open(sys.argv[1]).read()
entry = text[text.rindex("\nENTRY "):]
comps = {m[1]: m[2] for m in re.finditer(r"\n%?([\w.\-]+) (?:\([^\n]*)?\{\n(.*?)\n\}", text, re.S)}
def dots(line):
    m = re.search(r"calls=%?([\w.\-]+)", line)
    body = comps.get(m[1], "") if m else ""
    return bool(re.search(r" dot\(|custom-call.*cublas", body))
open_, seq = {}, []
for line in entry.splitlines():
    m = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)", line)
    if not m: continue
    name, shape, op, rest = m.groups()
    kind = None
    if op in ("async-start", "async-done"):
        callee = re.search(r"calls=%?([\w.\-]+)", line)
        what = re.sub(r"-(start|done).*", "", name)
        op = what + op[5:]
    if op.endswith("-start") or op in ("all-reduce", "reduce-scatter", "all-gather"): kind = "COMM " + op
    elif op.endswith("-done"): kind = "COMM " + op
    elif "cublas" in line or dots(line) or "__triton_gemm" in line or "nested_gemm" in line: kind = "gemm"
    elif op == "custom-call": kind = "call " + (re.search(r'custom_call_target="([^"]*)"', line) or [0, "?"])[1]
    elif op == "fusion": kind = "fusion"
    elif op in ("parameter", "constant", "get-tuple-element", "bitcast", "tuple"): continue
    else: kind = op
    seq.append((name, shape[:60], kind, rest))
inside, running = {}, []
for name, shape, kind, rest in seq:
    mark = ""
    if kind.endswith("-start"):
        running.append(name); inside[name] = []
        mark = " <<"
    elif kind.endswith("-done"):
        which = re.search(r"%?([\w.\-]+)\)", rest.split(",")[0] + ")")[1]
        which = which if which in running else next((r for r in running if r in rest), None)
        if which: running.remove(which)
        mark = f" >> {which}: gemms {sum(k == 'gemm' for k in inside.get(which, []))}, others {sum(k != 'gemm' for k in inside.get(which, []))}"
    else:
        for r in running: inside[r].append(kind)
    if len(sys.argv) > 2: print(f"{'  ' * len(running)}{kind:28s} {name:34s} {shape}{mark}")
print("collectives in entry", sum(k.startswith("COMM") and not k.endswith("done") for *_, k, _ in seq), "gemms", sum(k == "gemm" for *_, k, _ in seq))
for r, ks in inside.items(): print(r, "gemms", sum(k == "gemm" for k in ks), "others", len([k for k in ks if k != "gemm" and not k.startswith('COMM')]))
