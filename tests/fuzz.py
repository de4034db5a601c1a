"""Compares random calls of every operation with a reference, row by row:

    python -m tests.fuzz --implementation triton --count 10000 --seed 7 --workers 15

Each program (shapes, dtypes, static options) is compiled once and run on several batches of data. `--count` is the
number of batches of all programs, and `--batches` the number of each. Each worker is a process. If a worker dies, for
example by a read outside of memory, or hangs, it is reported with its program and replaced. Every failure is printed as
one line with the command that reproduces it, and the exit code is then 1. Programs that an implementation refuses are
counted by reason, and others are tried in their place. A worker that takes longer than `--patience`, or that the system
kills, is reported as KILLED: that is no wrong number. With `--interpret` the kernels run on a CPU, in an interpreter.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time

BATCHES = 16
_REFUSED = 19  # of 20 programs, the most that may be refused
_OPS = {
    "v1": "paged_attention_v1",
    "v2": "paged_attention_v2",
    "auto": "paged_attention",
    "write_and_attend": "write_and_attend",
    "ragged": "ragged_paged_attention",
    "single": "ragged_paged_attention",
    "prefix": "prefix_attention",
    "write": "write_to_paged_cache",
    "copy": "copy_blocks",
    "swap": "swap_blocks",
    "mla": "mla_paged_attention",
    "mla_ragged": "ragged_mla_attention",
    "mla_write": "write_to_latent_cache",
}


def main(argv=None):
    """Runs the command line; returns the exit code."""
    args = _arguments(argv)
    if args.worker:
        return _work(args)
    started, answers = time.time(), collections.Counter()
    refusals, wrong = collections.Counter(), []
    for answer in _answers(args):
        answers[answer["outcome"]] += answer.get("batches", 1)
        if answer["outcome"] == "refused":
            refusals[answer["why"]] += 1
        if answer["outcome"] in ("wrong", "died", "killed"):
            wrong.append(answer)
            word = "KILLED" if answer["outcome"] == "killed" else "WRONG"
            print(f"{word} {_again(args, answer)}  # {answer['why']}", flush=True)
    for why, count in refusals.most_common(args.refusals):
        print(f"refused {count:5} x {why}")
    programs, took = sum(answers[outcome] for outcome in ("done", "died", "killed")), time.time() - started
    print(f"seed {args.seed}: {programs} programs, {sum(refusals.values())} refused, {took:.0f} s")
    killed = f", {answers['killed']} killed" if answers["killed"] else ""
    print(f"{answers['passed']} passed, {len(wrong) - answers['killed']} failed{killed}")
    return 1 if wrong else 0


def _arguments(argv):
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--implementation", default="xla", help="xla, triton, mosaic_gpu, or None for the choice")
    parser.add_argument("--count", type=int, default=1000, help="batches to try; default 1000")
    parser.add_argument("--batches", type=int, default=BATCHES, help=f"of each program; default {BATCHES}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ops", default=None, help="only these, with commas between them")
    parser.add_argument("--only", default=None, help="PROGRAM or PROGRAM.BATCH, as a failure's line names it")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the GPU")
    parser.add_argument("--small", action="store_true", help="small shapes, as an interpreter wants them")
    parser.add_argument("--interpret", action="store_true", help="in the implementation's interpreter, on the CPU")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no program after this long")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds that a program may take; default 600")
    parser.add_argument("--refusals", type=int, default=20, help="how many reasons for refusals to list")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _flags(args):
    """The flags that decide what a program is and how it runs."""
    flags = ["--implementation", args.implementation, "--seed", str(args.seed)]
    flags += ["--batches", str(args.batches)] if args.batches != BATCHES else []
    flags += ["--ops", args.ops] if args.ops else []
    return flags + [flag for flag, on in (("--small", args.small), ("--interpret", args.interpret)) if on]


def _again(args, answer):
    """The command that repeats a failure."""
    return f"python -m tests.fuzz {' '.join(_flags(args))} --only {answer['where']}"


class _Programs:
    """Hands out the numbers of the programs to try; several threads may ask."""

    def __init__(self, args):
        self._lock, self._batches, self._end = threading.Lock(), args.batches, time.time() + args.seconds
        self._left = 1 if args.only else args.count
        most = -(-args.count // args.batches) * (1 + _REFUSED)
        self._numbers = iter([int(args.only.split(".")[0])] if args.only else range(most))

    def next(self):
        """The next program's number, or None if enough programs were tried."""
        with self._lock:
            if self._left <= 0 or time.time() > self._end:
                return None
            self._left -= self._batches
            return next(self._numbers, None)

    def refused(self):
        """Makes room for another program in the place of one that was refused."""
        with self._lock:
            self._left += self._batches


def _answers(args):
    """Yields the workers' answers. A worker that dies is replaced, and counts as one answer for its program."""
    answers, programs = queue.SimpleQueue(), _Programs(args)

    def tend():
        process = None
        while (number := programs.next()) is not None:
            process = process or _start_worker(args)
            outcomes = set()
            for answer in _asked(process, number, args.patience):
                outcomes.add(answer["outcome"])
                answers.put(answer)
            if "refused" in outcomes:
                programs.refused()
            if "wrong" in outcomes:  # perhaps it read outside of memory, and then it can no longer use the GPU
                _ended(process)
            if outcomes & {"wrong", "died", "killed"}:
                process = None
        if process is not None:
            _ended(process)
        answers.put(None)

    workers = min(args.workers, -(-args.count // args.batches)) or 1
    for _ in range(workers):
        threading.Thread(target=tend, daemon=True).start()
    for _ in range(workers):
        yield from iter(answers.get, None)


def _asked(process, number, patience):
    """Yields a worker's answers for a program; the last one says that the worker is done or that it died."""
    timer, started = threading.Timer(patience, process.kill), time.monotonic()
    timer.start()
    with contextlib.suppress(BrokenPipeError):
        os.write(process.stdin.fileno(), f"{number}\n".encode())
    last = ""
    for line in process.stdout:
        if not line.startswith("{"):
            last = line.strip() or last
            continue
        answer = json.loads(line)
        yield answer
        if answer["outcome"] == "done":
            timer.cancel()
            return
    timer.cancel()
    code, took = _ended(process), time.monotonic() - started
    if code == -signal.SIGKILL:  # no error of the program kills its process like this
        who = f"it took more than {patience:g} s" if took >= patience else "the system did, perhaps for want of memory"
        yield {"outcome": "killed", "where": str(number), "why": f"the process was killed: {who}"}
        return
    yield {"outcome": "died", "where": str(number), "why": f"the process died with exit code {code}: {last[:300]}"}


def _ended(process):
    """Ends a worker, and returns its exit code."""
    with process:  # this closes the worker's pipes, at which it ends, and waits for it
        pass
    return process.returncode


def _start_worker(args):
    """Starts a process that reads numbers of programs, and answers in lines of JSON."""
    threads = str(max(1, (os.cpu_count() or 1) // args.workers))  # for NumPy, which would otherwise take all cores
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "OPENBLAS_NUM_THREADS": threads}
    if args.interpret:
        environment |= {"JAX_PLATFORMS": "cpu"}
        environment |= {"TRITON_INTERPRET": "1"} if args.implementation == "triton" else {}
    command = [sys.executable, "-m", "tests.fuzz", *_flags(args), "--worker"]
    command += ["--only", args.only] if args.only else []
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, **pipes)


def _say(**answer):
    print(json.dumps(answer), flush=True)


def _work(args):
    """Runs as a worker, which tries the programs whose numbers it reads, and reports the result of each."""
    import jax

    from tests import conftest  # noqa: F401  (strict JAX settings)

    for line in sys.stdin:
        _try_program(args, int(line))
        jax.clear_caches()  # some hundred programs for a CPU have more memory mappings than a process may have
        _say(outcome="done")
    return 0


def _try_program(args, number):
    """Compiles a program and compares the results of its batches with the reference."""
    from paged_jax.kernels.problem import Unsupported
    from tests import fuzz_draw

    ops = tuple(args.ops.split(",")) if args.ops else fuzz_draw.OPS
    program = fuzz_draw.program(args.seed, number, ops=ops, small=args.small)
    wanted = range(args.batches)
    if args.only is not None and "." in args.only:
        wanted = [int(args.only.split(".")[1])]
    passed, where = 0, str(number)
    try:
        with _implementation(args) as implementation:
            run = _runner(program, implementation, args.interpret)
            for number_of_batch in wanted:
                where = f"{number}.{number_of_batch}"
                run(fuzz_draw.rng_of(args.seed, number, number_of_batch))
                passed += 1
    except Exception as error:
        words = str(error).split("\n")[0][:300]
        # A refusal is an error whose message begins with the name of the implementation.
        if isinstance(error, Unsupported) or (isinstance(error, NotImplementedError) and "implementation '" in words):
            _say(outcome="refused", why=words, batches=0)
        else:
            _say(outcome="wrong", where=where, why=f"{type(error).__name__}: {words} [{describe(program)}]", batches=0)
    if passed:
        _say(outcome="passed", batches=passed)


def describe(program):
    """Describes a program in one line."""
    from tests.cases import Case

    default, case = Case("fuzz"), program.case
    fields = {name: value for name, value in vars(case).items() if value != getattr(default, name)}
    fields |= {"batch": (program.num_seqs, program.width, program.num_blocks, program.num_tokens, program.longest)}
    if not program.causal:
        fields["causal"] = False
    if program.transform != "none":
        fields["transform"] = program.transform
    return f"{program.op} " + " ".join(f"{name}={value}" for name, value in fields.items())


@contextlib.contextmanager
def _implementation(args):
    """The `implementation` keyword for the operations, with the interpreter switched on if the options ask for it."""
    name = None if args.implementation == "None" else args.implementation
    if not args.interpret:
        yield name
    elif name == "triton":
        from tests import triton_interpreter

        with triton_interpreter.interpreted():
            yield name
    else:
        from tests import mosaic_interpreter

        with mosaic_interpreter.interpreted():
            yield name


def _runner(program, implementation, interpreted):
    """Makes a function that draws a batch, runs the program on it twice, and checks the results."""
    import jax
    import numpy as np

    from tests import fuzz_check, fuzz_data, fuzz_story

    device = jax.devices("cpu" if implementation == "xla" or interpreted else "gpu")[0]
    if program.op == "story":
        return fuzz_story.begin(program, implementation, device, jitted=not interpreted)
    if interpreted:  # the interpreters take arrays, not tracers
        program = dataclasses.replace(program, transform="none")
    vmapped, donated = program.transform.startswith("vmap"), program.transform == "donate"
    call = _call(program, implementation)
    if vmapped:
        pools = 0 if program.transform == "vmap-pools" else None
        axes = {name: pools if name.endswith("_cache") else 0 for name in _names(program)}
        call = jax.vmap(call, in_axes=(None, axes, None))
    if not interpreted:
        call = jax.jit(call, donate_argnums=0 if donated else ())

    def run(rng):
        batches = [fuzz_data.draw(rng, program)]
        if vmapped:
            batches += [fuzz_data.another(rng, program, batches[0], pools=program.transform == "vmap-pools")]
        arrays = fuzz_data.stacked(batches, program) if vmapped else batches[0].arrays
        given = {n: x for n, x in arrays.items() if donated and n.endswith("_cache") and not n.startswith("src_")}
        kept = {n: x for n, x in arrays.items() if n not in given}
        once, again = (
            jax.tree.map(np.array, call(*jax.device_put((given, kept, batches[0].options), device))) for _ in range(2)
        )
        for i, batch in enumerate(batches):
            one, two = (tuple(x[i] for x in results) if vmapped else results for results in (once, again))
            fuzz_check.hold_second_run(program, batch, two, one)
            fuzz_check.check(program, batch, one)

    return run


def _names(program):
    """The names of an attention operation's arrays that may be batched."""
    pools = ["key_cache", "value_cache"] if program.value_size is None else ["latent_cache"]
    names = ["query", *pools, "block_tables", "seq_lens"]
    return [*names, "query_start_loc"] if program.op in ("ragged", "single", "mla_ragged") else names


def _call(program, implementation):
    """Makes the operation a function of the arrays that are donated, of the others, and of array options."""
    import paged_jax
    from tests import fuzz_draw

    case, static = program.case, {"implementation": implementation}
    op = getattr(paged_jax, _OPS[program.op])
    if program.op == "mla_write":
        return lambda given, kept, options: (op(**given, **kept, **options, **static),)
    if program.op in ("copy", "swap", "write"):
        static |= {"layout": case.layout} if program.op == "write" else {}
    else:
        pattern = case.block_sparse
        static |= {"logits_soft_cap": case.logits_soft_cap, "max_seq_len": case.max_seq_len, "return_lse": True}
        if program.value_size is not None:
            static["value_size"] = program.value_size
        else:
            sparse = None if pattern is None else paged_jax.BlockSparse(**pattern._asdict())
            static |= {"layout": case.layout, "sliding_window": case.sliding_window, "block_sparse": sparse}
        if case.scale not in (None, "traced"):
            static["scale"] = case.scale
        if program.op == "v2":
            static |= {"partition_size": case.partition_size, "return_residuals": True}
        if program.op in fuzz_draw.RAGGED_OPS:
            static |= {"causal": program.causal, "max_query_len": program.max_query_len}
    return lambda given, kept, options: op(**given, **kept, **options, **static)


if __name__ == "__main__":
    sys.exit(main())
