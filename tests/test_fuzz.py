"""Runs `tests.fuzz` for a short time with a seed of the day, and compares its reference with the oracle.

The line of a failure names the command that repeats it.
"""

import contextlib
import dataclasses
import datetime
import json

import numpy as np
import pytest

from tests import fuzz, fuzz_check, fuzz_data, fuzz_draw, inputs, oracle, plain
from tests.cases import Case

TODAY = datetime.date.today().toordinal()

# NumPy warns like this if arithmetic meets the poison, which is NaN.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def passed(capsys):
    """Reads from the last line how many batches have passed."""
    return int(capsys.readouterr().out.splitlines()[-1].split()[0])


def test_xla(capsys):
    flags = ["--implementation", "xla", "--small", "--count", "16", "--batches", "4", "--seed", str(TODAY)]
    code = fuzz.main(flags)
    with capsys.disabled():
        print(f"\n{' '.join(flags)}")
    assert code == 0, capsys.readouterr().out
    assert passed(capsys) == 16


@pytest.mark.slow_on_cpu
def test_in_the_interpreter(capsys):
    """GPUs run such programs of Hopper's kernels; each takes eight seconds here."""
    count = 2
    flags = ["--implementation", "triton", "--interpret", "--small", "--count", str(count), "--batches", "1"]
    flags += ["--seed", str(TODAY), "--ops", "v1,v2,auto,write_and_attend,ragged,prefix,mla,mla_ragged"]
    code = fuzz.main(flags)
    with capsys.disabled():
        print(f"\n{' '.join(flags)}")
    assert code == 0, capsys.readouterr().out
    assert passed(capsys) == count


def test_a_wrong_result_is_found(monkeypatch, capsys):
    """If the oracle's pattern starts one block too late, the run reports it in a line that repeats the failure."""
    real = fuzz_check._pattern
    monkeypatch.setattr(fuzz_check, "_pattern", lambda token, *rest: real(token + 1, *rest))
    program = next(n for n in range(100) if _is_sparse(fuzz_draw.program(5, n, ops=("v1",), small=True)))
    args = fuzz._arguments(["--small", "--seed", "5", "--only", str(program), "--ops", "v1"])
    fuzz._try_program(args, program)
    answer = json.loads(capsys.readouterr().out.splitlines()[0])
    assert answer["outcome"] == "wrong", answer
    assert fuzz._again(args, answer).endswith(f"--seed 5 --ops v1 --small --only {program}.0")
    with pytest.raises(fuzz_check.Wrong, match="1 bytes differ"):
        fuzz_check.hold_bits(np.array([1, 2], np.int8), np.array([1, 3], np.int8), "cache")


def test_only_what_is_promised_is_compared():
    """Rows 1 to 3 are three queries of one sequence; the call's bound on queries is one or three; row 5 is padding."""
    drawn, batch = fuzz_draw.program(5, 0, ops=("single",)), fuzz_draw.Batch([4, 5, 6], [1, 3, 1], {}, {})
    right = np.ones((6, 1, 8), np.float32), np.ones((6, 1), np.float32)
    for x in right:
        x[5] = 0

    def is_right(said, *changed):
        program = dataclasses.replace(drawn, max_query_len=said)
        results = tuple(x.copy() for x in right)
        for x in results:
            x[list(changed)] = 7
        with contextlib.suppress(AssertionError):
            fuzz_check.hold_second_run(program, batch, results, right)
            fuzz_check._check_ragged(program, batch, results, right, right)
            return True
        return False

    assert is_right(1, 1, 2, 3, 5)
    assert is_right(3)
    for said, row in ((1, 0), (1, 4), (3, 1), (3, 5)):
        assert not is_right(said, row), (said, row)


def _is_sparse(program):
    pattern = program.case.block_sparse
    return pattern is not None and pattern.vert_stride > 1 and pattern.local_blocks < 2 and program.longest > 100


def test_new_tokens_have_no_quotient_that_may_be_rounded_apart():
    """bfloat16 -0.283203125 over this scale is near -10.5, and in float32 exactly -10.5: the codes are -11 and -10."""
    scale = np.float32(0.026971726)
    values = np.array([[[-0.283203125, 0.25, 0.0]]], inputs.dtype_of("bfloat16"))
    assert abs(float(values[0, 0, 0]) / float(scale) + 10.5) < 1e-6
    kept = fuzz_data.without_ties(values, scale, np.dtype(np.int8))
    np.testing.assert_array_equal(kept.astype(np.float64), [[[0.0, 0.25, 0.0]]])


@pytest.mark.parametrize(
    ("op", "scale"), [("mla", "latent_scale"), ("mla_ragged", "latent_scale"), ("mla_write", "scale")]
)
def test_latents_have_one_scale(op, scale):
    """Latents in int8 have one scale, too, although int8 keys and values always have one each."""
    drawn = (fuzz_draw.program(11, number, ops=(op,), small=True) for number in range(60))
    program = next(program for program in drawn if program.case.cache_dtype == "int8")
    options = fuzz_data.draw(fuzz_draw.rng_of(11), program).options
    assert {name for name in options if "scale" in name} - {"scale"} | {scale} == {scale}


@pytest.mark.parametrize("op", ["auto", "ragged", "single", "prefix", "mla", "mla_ragged"])
def test_the_reference_is_the_oracles(op):
    compared = 0
    for number in range(40):
        program = fuzz_draw.program(11, number, ops=(op,), small=True)
        if program.case.max_seq_len is not None or not program.causal or program.num_tokens * program.longest > 4000:
            continue
        batch = fuzz_data.draw(fuzz_draw.rng_of(11, number), program)
        flags = {name: getattr(program.case, name) for name in ("sliding_window", "logits_soft_cap", "block_sparse")}
        flags |= {"scale": program.case.scale} if program.case.scale not in (None, "traced") else {}
        run = {"auto": oracle.decode, "ragged": oracle.ragged, "single": oracle.ragged, "prefix": oracle.prefix}
        flags |= {"layout": program.case.layout}
        if program.value_size is not None:
            flags = {name: flags[name] for name in ("logits_soft_cap", "scale") if name in flags}
            flags["value_size"] = program.value_size
        expected = run.get(op, oracle.latent)(**batch.arrays, **batch.options, **flags)
        for got, exact in zip(fuzz_check.references(program, batch)[0], expected, strict=True):
            np.testing.assert_allclose(got, exact, rtol=1e-9, atol=1e-12, err_msg=fuzz.describe(program))
        compared += 1
    assert compared >= 8


def test_what_the_order_of_a_sum_changes_is_allowed(monkeypatch):
    """Logits of a size at which their own roundings decide: moved by one rounding each they are right, by ten wrong."""
    case = Case("large logits", num_heads=1, num_kv_heads=1, head_size=80)
    rng = np.random.default_rng(0)
    query, keys, values = (rng.standard_normal((n, 1, 80), np.float32) for n in (64, 40, 40))
    signs = rng.choice([-1.0, 1.0], (64, 1, 40))

    def attend(exact, roundings=0.0):
        def moved(q, k, *rest):
            return logits(q, k, *rest) + roundings * signs * fuzz_check._doubts(q, k, case, options)

        options = {"scale": 1.0}
        monkeypatch.setattr(fuzz_check, "_logits", moved if roundings else logits)
        return fuzz_check.attend(query, keys, 40 * values, np.full(64, 39), case, options, True, exact)[0]

    logits = fuzz_check._logits
    exact, rough = attend(True), attend(False)
    plain.assert_close(attend(True, 1).astype(np.float32), exact, rough, "out")
    with pytest.raises(AssertionError, match="out: error"):
        plain.assert_close(attend(True, 10).astype(np.float32), exact, rough, "out")


def test_an_lse_near_0_may_be_off_by_what_its_terms_are():
    """The maximum is 1 and the logarithm of the sum almost -1; one of them was rounded to float32 a unit off."""
    exact = np.array([[-0.00709444]])
    for error, holds in ((1.2e-7, True), (3e-5, False)):
        with contextlib.nullcontext() if holds else pytest.raises(AssertionError, match="lse: error"):
            fuzz_check.hold_results([exact, exact + error], [exact, exact], [exact, exact])


@pytest.mark.slow
def test_a_worker_that_dies_is_reported_and_replaced(monkeypatch, capsys):
    """If a worker dies, as after a read outside of memory, its program is reported, and the others are still tried."""
    workers = started(monkeypatch, first="import sys; print('last words'); sys.exit(9)")
    assert fuzz.main(["--small", "--count", "16", "--batches", "8", "--ops", "copy"]) == 1
    *_, wrong, _, totals = capsys.readouterr().out.splitlines()
    again = "--batches 8 --ops copy --small --only 0"
    assert wrong.endswith(f"{again}  # the process died with exit code 9: last words")
    assert totals == "8 passed, 1 failed"
    assert len(workers) == 2


@pytest.mark.slow
def test_a_worker_with_a_wrong_result_is_replaced(monkeypatch, capsys):
    """The error may be a read outside of memory; all later GPU work of such a process fails."""
    answers = """print('{"outcome": "wrong", "where": "0.3", "why": "x"}\\n{"outcome": "done"}')"""
    workers = started(monkeypatch, first=f"import sys; {answers}; sys.stdout.flush(); sys.stdin.read()")
    assert fuzz.main(["--small", "--count", "16", "--batches", "8", "--ops", "copy"]) == 1
    *_, totals = capsys.readouterr().out.splitlines()
    assert totals == "8 passed, 1 failed"
    assert len(workers) == 2


def test_a_worker_that_hangs_is_killed(monkeypatch, capsys):
    started(monkeypatch, first="import time; time.sleep(100)")
    assert fuzz.main(["--small", "--count", "8", "--batches", "8", "--ops", "copy", "--patience", "0.1"]) == 1
    *_, killed, _, totals = capsys.readouterr().out.splitlines()
    assert killed.startswith("KILLED ")
    assert killed.endswith("--only 0  # the process was killed: it took more than 0.1 s")
    assert totals == "0 passed, 0 failed, 1 killed"


def test_a_worker_that_the_system_kills_has_no_wrong_number(monkeypatch, capsys):
    started(monkeypatch, first="import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert fuzz.main(["--small", "--count", "8", "--batches", "8", "--ops", "copy"]) == 1
    *_, killed, _, totals = capsys.readouterr().out.splitlines()
    assert killed.endswith("--only 0  # the process was killed: the system did, perhaps for want of memory")
    assert "WRONG" not in killed
    assert totals == "0 passed, 0 failed, 1 killed"


def started(monkeypatch, first):
    """A list of the workers' commands; the first worker runs a script instead of its command."""
    commands, real = [], fuzz.subprocess.Popen

    def popen(command, **keywords):
        commands.append(command)
        return real(command if len(commands) > 1 else [command[0], "-c", first], **keywords)

    monkeypatch.setattr(fuzz.subprocess, "Popen", popen)
    return commands


@pytest.mark.slow
def test_others_are_tried_in_the_place_of_programs_that_are_refused(capsys):
    """Mosaic GPU has no such op, so no program is left at the end."""
    flags = ["--implementation", "mosaic_gpu", "--interpret", "--small", "--ops", "copy"]
    assert fuzz.main([*flags, "--count", "2", "--batches", "1"]) == 0
    *_, programs, totals = capsys.readouterr().out.splitlines()
    assert programs.startswith("seed 0: 40 programs, 40 refused, ")
    assert totals == "0 passed, 0 failed"
