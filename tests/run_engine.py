"""Runs an engine over a mesh, in one or several processes: `python -m tests.run_engine PROCESSES INDEX PORT TP`.

The first process prints, as JSON, the tokens of each request. tests/test_processes.py runs it on CPU devices.
"""

import contextlib
import dataclasses
import json
import sys
from typing import Any, cast
from unittest import mock

import jax
import jax.numpy as jnp

from examples import loop
from examples.checkpoint import load_model
from examples.sharding import make_mesh
from examples.step import make_step
from paged_jax import engine
from paged_jax.engine.sampling import Kind
from tests.engine_model import drawing
from tests.model_folders import short_tiny

PROMPTS = [[1, 5, 9, 3, 7], [2, 4, 8], list(range(1, 30)), [6]]


def params() -> list[engine.SamplingParams]:
    """Gives the parameters of the requests. Two requests have two samples; a step of them all is one program."""
    drawn = engine.SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=3, logprobs=2)
    return [dataclasses.replace(drawn, max_tokens=count, n=n) for count, n in ((9, 1), (6, 2), (3, 1), (6, 2))]


def make_engine(engine_class: type[engine.Engine], tp: int) -> Any:
    """Makes an engine whose pool is so small that requests wait for each other's blocks."""
    mesh = make_mesh({"dp": 1, "tp": tp})
    model, config, _, _ = load_model(short_tiny(), jnp.float32, mesh)
    weights, step = make_step(model)
    caches = loop.make_caches(config, 12, 4, jnp.float32, mesh=mesh)
    sizes = engine.EngineConfig(*(48, 4, 16), decode_rows=(4,), mixed_tokens=(16,), max_logprobs=2, adjustments=False)
    with drawing(Kind.GREEDY, Kind.LOGPROBS):  # an engine warms up with greedy tokens
        return engine_class(cast(engine.Step, step), weights, caches, sizes)


def texts(the_engine: engine.Engine) -> list[Any]:
    """Runs all requests and returns the tokens of all samples."""
    return [[list(c.token_ids) for c in completions] for completions in the_engine.generate(PROMPTS, params())]


def check_that_followers_follow(the_engine: engine.Engine, first: list[Any]) -> None:
    """Cancels a request, has one refused, and lets a step fail in the leader alone: texts stay what they are."""
    cancelled = the_engine.add_request(PROMPTS[2], dataclasses.replace(params()[0], max_tokens=15))
    the_engine.step(), the_engine.step()
    the_engine.cancel(cancelled)
    with contextlib.suppress(ValueError):
        the_engine.add_request([])
    assert texts(the_engine) == first
    the_engine.add_request(PROMPTS[0], params()[0])
    the_engine.step()
    with mock.patch.object(the_engine._runner, "read", side_effect=OSError("lost")), contextlib.suppress(OSError):
        the_engine.step()
    assert the_engine.has_failed
    the_engine.reset()
    assert texts(the_engine) == first


def main(argv: list[str]) -> None:
    """Runs one process."""
    num_processes, index, port, tp = map(int, argv)
    if num_processes > 1:
        jax.distributed.initialize(f"localhost:{port}", num_processes, index)
    the_engine = make_engine(engine.LeadingEngine if index == 0 else engine.Engine, tp)
    if index:
        engine.follow(the_engine, ("localhost", port + 1))
        return
    with the_engine:
        the_engine.wait_for_followers(("localhost", port + 1), num_processes - 1)
        first = texts(the_engine)
        the_engine.reset()
        assert texts(the_engine) == first
        check_that_followers_follow(the_engine, first)
    print(json.dumps(first), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
