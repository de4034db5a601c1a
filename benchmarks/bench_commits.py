"""Times an op of several commits beside each other, in one process and on the same arrays.

    python -m benchmarks.bench_commits lower FOLDER/before --cases 8x8192-5,prefill-32x512
    python -m benchmarks.bench_commits lower FOLDER/after --cases 8x8192-5,prefill-32x512
    python -m benchmarks.bench_commits time FOLDER --names before,after --out FILE

Run the first command in the checkout of one commit, and the second one in the checkout of another, with the same JAX.
They lower each case's program and write it to a file, for which they need no GPU. Run the third command in any checkout
on a GPU: it compiles the programs, checks their results, and times for each case one program after the other. With
`--random SEED --numbers 0,3` the cases are the first and the fourth that a seed draws (`cases.random_ragged`,
`cases.random_decode`).
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax import export

from benchmarks import bench_decode, bench_ragged, cases, harness, inputs, measure, peers
from benchmarks.cases import Case, Shapes
from paged_jax.kernels import problem as facts

BENCHMARKS = {"decode": bench_decode.BENCHMARK, "ragged": bench_ragged.BENCHMARK}
_RANDOM = {"decode": cases.random_decode, "ragged": cases.random_ragged}
HOPPER = facts.Device(90, 132)  # the GPU for which programs are lowered where there is none: an H100 or an H200
# JAX exports these calls only if it is told to: it does not promise that another version understands them.
_CALLS = "mosaic_gpu_v2", "triton_kernel_call", "triton_kernel_call_ffi"
_DRAWN = 60  # cases of a seed
_LIST = "programs.json"  # of a commit: the op, the commit, and each case with the name of its program's file


def lower(
    folder: Path, op: str, some: Sequence[Case], implementation: str, *, platform: str = "cuda", **how: Any
) -> None:
    """Writes the programs of some cases into a folder, one for all cases that share it. `how` is for `inputs.make`."""
    folder.mkdir(parents=True, exist_ok=True)
    build, files, listed = BENCHMARKS[op].implementation(implementation), {}, []
    made_up = mock.patch.object(facts, "device", return_value=HOPPER)
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in _CALLS]
    for case in some:
        key = measure.program_key(case)
        if key not in files:
            files[key] = f"{len(files)}.bin"
            abstract = jax.eval_shape(functools.partial(inputs.make, case, **how))
            with contextlib.nullcontext() if jax.default_backend() == "gpu" else made_up:
                (candidate,) = measure.abstract(build, case, abstract)
                call: Any = candidate.fn
                made = export.export(call, platforms=[platform], disabled_checks=checks)(*candidate.argsets[0])
            (folder / files[key]).write_bytes(made.serialize())
            print(f"{folder.name}: {case.name}", flush=True)
        listed.append({"case": dataclasses.asdict(case), "file": files[key]})
    commit = harness.environment()["commit"]
    (folder / _LIST).write_text(json.dumps({"op": op, "commit": commit, "programs": listed}) + "\n")


def read(folder: Path) -> tuple[str, str, dict[Case, str]]:
    """The op, the commit and the files of a folder that `lower` has written."""
    found = json.loads((folder / _LIST).read_text())
    return found["op"], found["commit"], {_case(row["case"]): row["file"] for row in found["programs"]}


def _case(fields: dict[str, Any]) -> Case:
    """A case from its fields, in which JSON has made tuples lists."""
    made: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
    if made["shapes"] is not None:
        made["shapes"] = Shapes(**made["shapes"])
    return Case(**made)


def lowered(folder: Path, name: str) -> peers.Build:
    """Makes a contender from the name of a commit's folder."""
    return functools.partial(_candidates, folder / name)


def _candidates(folder: Path, case: Case, arrays: inputs.Inputs) -> list[peers.Candidate]:
    # This import says where the kernels' runtime is, without which XLA cannot compile their programs.
    import jax.experimental.mosaic.gpu

    op, _, files = read(folder)
    if case not in files:
        raise peers.Absent("not lowered")
    program = export.deserialize(bytearray((folder / files[case]).read_bytes()))
    (candidate,) = BENCHMARKS[op].implementation("auto")(case, arrays)
    return [candidate._replace(fn=jax.jit(program.call))]


def time(folder: Path, names: Sequence[str], beside: Sequence[str], **how: Any) -> dict[str, Any]:
    """Times the programs of all commits; returns the report. `how` has further arguments of `harness.run`."""
    read_all = {name: read(folder / name) for name in names}
    op = read_all[names[0]][0]
    some = list(dict.fromkeys(case for *_, files in read_all.values() for case in files))
    benchmark = dataclasses.replace(BENCHMARKS[op], implementation=functools.partial(lowered, folder))
    commits = {name: commit for name, (_, commit, _) in read_all.items()}
    return harness.run(benchmark, some, names, beside, notes=lambda: {"commits": commits}, **how)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code, 2 where there is no GPU to time on."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_commits")
    commands = parser.add_subparsers(dest="command", required=True)
    lowers = commands.add_parser("lower", help="write this checkout's programs")
    lowers.add_argument("folder", type=Path, help="the folder; its name is the contender's")
    lowers.add_argument("--op", choices=list(BENCHMARKS), default="ragged")
    lowers.add_argument(
        "--cases", type=lambda text: text.split(","), help="names with commas between them; default all"
    )
    lowers.add_argument(
        "--random", metavar="SEED", type=int, help=f"{_DRAWN} cases that this seed draws, in place of --cases"
    )
    lowers.add_argument(
        "--numbers", type=harness.numbers, default=range(_DRAWN), help="of the drawn cases; default all"
    )
    lowers.add_argument("--block-sizes", type=harness.numbers, help="of each case, such as 16,128; default its own")
    lowers.add_argument("--implementation", default="mosaic_gpu", help="default mosaic_gpu; auto wants a GPU")
    times = commands.add_parser("time", help="time the programs of several checkouts")
    times.add_argument("folder", type=Path, help="the folder of their folders")
    times.add_argument("--names", type=lambda text: text.split(","), required=True, help="with commas between them")
    times.add_argument("--peers", type=lambda text: text.split(","), default=[], help="such as vllm-fa3; default none")
    times.add_argument("--processes", type=int, default=1, help="how many compile side by side; default 1")
    times.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    if args.command == "lower":
        some = cases.select(BENCHMARKS[args.op].cases, args.cases)
        if args.random is not None:
            drawn = _RANDOM[args.op](_DRAWN, args.random)
            some = [drawn[number] for number in args.numbers]
        lower(args.folder, args.op, cases.with_blocks(some, args.block_sizes), args.implementation)
        return 0
    if not harness.has_gpu("commits", args.processes):
        return 2
    time(args.folder, args.names, args.peers, out=args.out, processes=args.processes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
