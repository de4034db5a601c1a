"""Tests the defaults of the server's options, and that each option reaches what it is for; nothing is compiled."""

import contextlib
import shlex
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from examples import serve
from examples.checkpoint import load_model
from examples.command_line import TINY, choose_dtype
from examples.server import http
from examples.server.api import MAX_LOGPROBS
from examples.server.middleware import LOOPBACK, Access
from examples.step import xla_options
from paged_jax import engine

DEFAULTS = {
    "model": str(TINY),
    "host": "127.0.0.1",
    "port": 8000,
    "max_model_len": None,
    "max_num_seqs": 16,
    "max_tokens_per_step": 256,
    "between_tokens_ms": None,
    "max_queued": 256,
    "dtype": "auto",
    "kv_cache_dtype": "auto",
    "k_scale": None,
    "v_scale": None,
    "block_size": 16,
    "implementation": None,
    "split_experts": "columns",
    "custom_all_reduce": True,
    "no_compilation_cache": False,
    "num_blocks": None,
    "host_blocks": 0,
    "speculate": 0,
    "shared_prefixes": 0,
    "mesh": None,
    "processes": 1,
    "process": 0,
    "coordinator": "localhost:8100",
    "served_model_name": None,
    "chat_template": None,
    "tool_call_parser": None,
    "api_key": [],
    "cors_origins": [],
    "allowed_hosts": None,
    "access_log": False,
    "drain_seconds": 60,
    "step_seconds": 120.0,
}


def test_defaults():
    assert vars(serve.parse([])) == DEFAULTS
    assert (serve.MEMORY_SHARE, serve.HOST_SHARE, serve.MEASURED_LEN, serve.BACKLOG) == (0.85, 0.5, 1024, 2048)


def test_the_least_and_the_most_that_options_may_be():
    least = {"max_queued": 0, "port": 65535, "drain_seconds": 1, "host_blocks": 0, "max_model_len": 1, "num_blocks": 1}
    least |= {"max_num_seqs": 1, "max_tokens_per_step": 1}
    options = serve.parse([f"--{name.replace('_', '-')}={value}" for name, value in least.items()])
    assert {name: getattr(options, name) for name in least} == least
    assert serve.parse(["--processes", "3", "--process", "2", "--coordinator", "h:1"]).process == 2


class MadeUpEngine:
    """Notes how it is made."""

    made: list = []  # noqa: RUF012
    max_num_seqs = 4

    def __init__(self, step, weights, caches, config, **options):
        self.arguments, self.config, self.options = (step, weights, caches), config, options
        self.made.append(self)

    def check(self, prompt, params):
        return 41


class MadeUpLeader(MadeUpEngine):
    """Notes whom it waits for."""

    is_open = False

    def wait_for_followers(self, address, count):
        self.waited = address, count

    def __enter__(self):
        self.is_open = True

    def __exit__(self, *_):
        self.is_open = False


@pytest.fixture
def noted(monkeypatch):
    """What `serve.make_server` calls, by name: nothing of it is done."""
    tiny, calls = load_model(TINY, jnp.float32), {}

    def note(module, name, result):
        def called(*arguments, **options):
            calls.setdefault(name, []).append((arguments, options))
            return result

        monkeypatch.setattr(module, name, called)

    note(serve, "load_model", tiny)
    note(serve, "peer_sum", "peers")
    note(serve, "make_step", ("weights", "step"))
    note(serve, "use_compilation_cache", None)
    note(serve.loop, "make_programs", None)
    note(serve.loop, "make_caches", "caches")
    note(jax.distributed, "initialize", None)
    note(serve.engine, "follow", None)
    monkeypatch.setattr(serve.engine, "Engine", MadeUpEngine)
    monkeypatch.setattr(serve.engine, "LeadingEngine", MadeUpLeader)
    monkeypatch.setattr(MadeUpEngine, "made", [])
    return SimpleNamespace(model=tiny[0], config=tiny[1], tokenizer=tiny[2], eos=tiny[3], calls=calls)


def test_every_option_is_used(noted, tmp_path):
    template = tmp_path / "template"
    template.write_text("a template")
    options = serve.parse(
        shlex.split(
            "--max-model-len 100 --max-num-seqs 3 --max-tokens-per-step 50 --max-queued 5 --dtype bfloat16 "
            "--kv-cache-dtype float8_e5m2 --k-scale 0.5 --v-scale 0.25 --block-size 32 --implementation xla "
            "--split-experts experts --no-custom-all-reduce --no-compilation-cache --num-blocks 7 --host-blocks 2 "
            "--speculate 6 --shared-prefixes 4 --served-model-name p q --tool-call-parser llama3 --api-key k l "
            f"--cors-origins http://o --allowed-hosts h --access-log --step-seconds 7 --chat-template {template}"
        )
    )
    server, config = serve.make_server(options), noted.config
    (the_engine,) = MadeUpEngine.made
    calls = {name: found for name, (found,) in noted.calls.items()}
    assert calls["load_model"] == ((TINY, "bfloat16", None), {"split_experts": "experts"})
    assert calls["peer_sum"] == ((config, "bfloat16", None, False), {})
    assert calls["make_step"] == ((noted.model,), {"implementation": "xla", "peers": "peers"})
    scales = [(0.5, 0.25)] * config.num_layers
    made = (config, (7,) * config.num_layers, 32, "float8_e5m2"), {"scales": scales, "mesh": None}
    assert calls["make_caches"] == made
    assert "use_compilation_cache" not in calls
    assert the_engine.arguments == ("step", "weights", "caches")
    assert the_engine.config == engine.EngineConfig(
        max_model_len=100,
        max_num_seqs=3,
        max_tokens_per_step=50,
        max_logprobs=MAX_LOGPROBS,
        num_host_blocks=2,
        max_draft_tokens=6,
        max_shared_prefixes=4,
    )
    compiler_options = the_engine.options.pop("compiler_options")
    peers = SimpleNamespace(most_rows=128)
    assert compiler_options.keywords == {"weights": "weights", "mesh": None, "peers": "peers"}
    assert compiler_options.func(256, peers=peers) == xla_options(256, peers=peers) != {}
    assert the_engine.options == {
        "sliding_windows": config.sliding_windows,
        "tokenizer": noted.tokenizer,
        "show_progress": True,
    }
    assert noted.model.config.max_position_embeddings == 100
    worker, model = server.worker, server._model
    assert (worker._engine, worker._max_unfinished, worker._step_seconds) == (the_engine, 4 + 5, 7)
    assert (model.names, model.tool_format, model.max_model_len) == (("p", "q"), "llama3", 40)
    assert (model.tokenizer, model.eos_token_ids, model.vocab_size) == (noted.tokenizer, noted.eos, config.vocab_size)
    assert model.template.render([]) == "a template"
    assert server._access == Access(("k", "l"), ("h",), ("http://o",), True)


def test_no_option_is_needed(noted):
    server = serve.make_server(serve.parse([]))
    (the_engine,) = MadeUpEngine.made
    assert noted.calls["use_compilation_cache"] == [((), {})]
    assert noted.calls["peer_sum"][0][0][3] is True
    assert the_engine.config == engine.EngineConfig(
        noted.config.max_position_embeddings, 16, 256, max_logprobs=MAX_LOGPROBS
    )
    assert (server.name, server._model.names, server._model.tool_format) == ("tiny", ("tiny",), None)
    assert (server.worker._max_unfinished, server.worker._step_seconds) == (4 + 256, 120)
    assert server._access == Access((), (LOOPBACK,), (), False)
    ((*_, block_size, dtype), options) = noted.calls["make_caches"][0]
    assert (block_size, dtype, options) == (16, choose_dtype(serve.parse([])), {"scales": None, "mesh": None})


def test_several_processes(noted):
    """The first one leads, and closes its engine at the end; each other one follows it at the second port."""
    several = ["--processes", "3", "--coordinator", "host:77", "--num-blocks", "9", "--process"]
    with contextlib.ExitStack() as until_end:
        assert serve.make_server(serve.parse([*several, "0"]), until_end) is not None
        (leader,) = MadeUpEngine.made
        assert (type(leader), leader.waited, leader.is_open) == (MadeUpLeader, (("host", 78), 2), True)
        assert leader.options["show_progress"]
    assert not leader.is_open
    assert serve.make_server(serve.parse([*several, "2"])) is None
    _, follower = MadeUpEngine.made
    assert type(follower) is MadeUpEngine
    assert not follower.options["show_progress"]
    assert noted.calls["follow"] == [((follower, ("host", 78)), {})]
    assert [arguments for arguments, _ in noted.calls["initialize"]] == [("host:77", 3, 0), ("host:77", 3, 2)]


@pytest.mark.parametrize(("error", "code"), [(None, 0), (KeyboardInterrupt(), 130)])
def test_the_program(monkeypatch, capsys, error, code):
    seen = []

    class Http:
        def run(self, sockets):
            (self.socket,) = sockets
            seen.append(self.socket.getsockname()[0])
            if error is not None:
                raise error

    def make_http_server(server, drain_seconds):
        seen.extend([server.name, drain_seconds])
        return Http()

    worker = SimpleNamespace(is_alive=False, broken=None)
    monkeypatch.setattr(serve, "make_server", lambda options, until_end: SimpleNamespace(name="m", worker=worker))
    monkeypatch.setattr(serve, "make_http_server", make_http_server)
    assert serve.main(["--port", "0", "--drain-seconds", "9"]) == code
    assert seen == ["m", 9, "127.0.0.1"]
    assert capsys.readouterr().err.startswith("Serving m at http://127.0.0.1:")


def test_the_http_server():
    """Uvicorn writes no log of its own; an engine that cannot be used again ends it."""
    server = SimpleNamespace(worker=SimpleNamespace(on_broken=None), app=lambda: "app")
    made = serve.make_http_server(server, 9)
    config = made.config
    assert (config.app, config.http, config.backlog) == ("app", http.Protocol, 2048)
    assert (config.access_log, config.log_level, http.HEAD_SECONDS) == (False, "warning", 30)
    assert not made.should_exit
    server.worker.on_broken()
    assert made.should_exit


@pytest.mark.parametrize(("backend", "expected"), [("cpu", "float32"), ("gpu", "bfloat16")])
def test_the_dtype_depends_on_the_device(monkeypatch, backend, expected):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert choose_dtype(serve.parse([])) == expected
    assert choose_dtype(serve.parse(["--dtype", "float16"])) == "float16"
