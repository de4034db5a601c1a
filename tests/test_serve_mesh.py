"""Tests the server with two copies of the model, each of them split over two devices."""

import concurrent.futures
import logging

import pytest

from examples import serve
from paged_jax.engine.sampling import Kind
from tests.engine_model import drawing
from tests.http_server import GOOD, NUM_BLOCKS, Running, wait_for

PROMPTS = ["The assert statement ", "A list is ", "In Python ", "x"]
FEW_PROGRAMS = "--max-num-seqs", "2", "--max-tokens-per-step", "8"  # a program takes seconds to compile


@pytest.mark.slow
def test_copies_of_a_split_model_answer_as_one_does(caplog):
    caplog.set_level(logging.INFO, "examples.sharding")
    with (
        drawing(Kind.GREEDY),
        Running(*FEW_PROGRAMS) as one,
        Running(*FEW_PROGRAMS, "--mesh", "dp=2,tp=2") as copies,
    ):
        assert "XLA reduces the decode steps" in caplog.text  # CPUs lack the kernel
        texts, metrics = zip(*map(ask, (one, copies)), strict=True)
    assert texts[0] == texts[1]
    assert [values["paged_jax_free_blocks"] + values["paged_jax_cached_blocks"] for values in metrics] == [
        NUM_BLOCKS,
        2 * NUM_BLOCKS,
    ]
    parts = [replica.engine.stats().num_output_tokens for replica in copies.engine._replicas]
    assert min(parts) > 0, f"one of the copies did nothing: {parts}"


def ask(running):
    """The greedy texts that follow some prompts, and then all metrics. No text ends before all requests have come."""

    def answer(prompt):
        content = GOOD | {"prompt": prompt, "max_tokens": 16, "temperature": 0}
        return running.post("/v1/completions", json=content).json()["choices"][0]["text"]

    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as clients:
        with running.held():
            texts = clients.map(answer, PROMPTS)
            wait_for(lambda: running.worker._unfinished == len(PROMPTS))
        texts = list(texts)
    wait_for(lambda: not running.engine.has_work)
    lines = running.get("/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return texts, {name: float(value) for name, value in values.items()}


def test_a_mesh_that_cannot_be(capsys):
    assert serve.main(["--port", "0", "--mesh", "dp=100"]) == 2
    assert "a mesh of 100 devices needs as many" in capsys.readouterr().err
    assert serve.main(["--port", "0", "--mesh", "dp=2", "--processes", "2"]) == 2
    assert "--processes must be 1 with copies of the model (dp), got 2" in capsys.readouterr().err
