"""Tests the server's command line: what it refuses, its help, and the caches that it makes."""

import socket

import jax
import jax.numpy as jnp
import pytest

from examples import serve
from examples.checkpoint import load_model
from examples.command_line import TINY, CommandError
from paged_jax.engine import EngineConfig, StepShape
from tests.conftest import has_gpu


@pytest.fixture(scope="module")
def tiny():
    return load_model(TINY, jnp.float32)


@pytest.mark.parametrize(
    ("arguments", "dtype", "k_scale", "v_scale"),
    [
        (["--kv-cache-dtype", "int8"], "int8", None, None),
        (["--kv-cache-dtype", "int8", "--v-scale", "0.5"], "int8", None, 0.5),
        (["--kv-cache-dtype", "float8_e4m3fn"], "float8_e4m3fn", 1.0, 1.0),
        (["--dtype", "bfloat16"], "bfloat16", ..., ...),
    ],
)
def test_caches_as_asked_for(tiny, arguments, dtype, k_scale, v_scale):
    """Scales are given, 1 for float8, or measured for each head; an ellipsis stands for no scale."""
    decoder, config, tokenizer, _ = tiny
    options = serve.parse(["--max-num-seqs", "2", "--block-size", "32", *arguments])
    caches = serve.make_caches(options, decoder, config, tokenizer, "bfloat16" if k_scale is ... else "float32")
    assert len(caches) == config.num_layers
    for cache in caches:
        assert (cache.dtype, cache.num_blocks, cache.block_size) == (jnp.dtype(dtype), 2 * 512 // 32, 32)
        for expected, scale in ((k_scale, cache.k_scale), (v_scale, cache.v_scale)):
            if expected is ...:
                assert scale is None
            elif expected is None:
                assert scale.shape == (config.num_kv_heads,)
                assert 0.001 < scale.min() <= scale.max() < 1
            else:
                assert scale == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "--port must be from 0 to 65535, got 70000"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be 1 or more"),
        (["--max-tokens-per-step", "3"], "--max-tokens-per-step must be --max-num-seqs or more"),
        (["--k-scale", "0.1"], "--k-scale needs --kv-cache-dtype to be one of"),
        (["--model", "/no/such/folder"], "is no folder"),
        (["--nonsense"], "unrecognized arguments"),
        (["--max-tokens-per-step", "99999999999"], "--max-num-seqs or more, and below 2**24, got 99999999999"),
        (["--max-model-len", "0"], "--max-model-len must be 1 or more, got 0"),
        (["--step-seconds", "0"], "--step-seconds must be above 0, got 0.0"),
        (["--between-tokens-ms", "0"], "--between-tokens-ms must be above 0, got 0.0"),
        (["--between-tokens-ms", "9", "--processes", "2"], "--between-tokens-ms must be left out where several"),
        (["--tool-call-parser", "xml"], "invalid choice: 'xml'"),
        (["--api-key", ""], "--api-key must be texts without spaces around them"),
        (["--cors-origins", " x"], "--cors-origins must be texts without spaces around them"),
        (["--chat-template", "/no/such/file"], "/no/such/file cannot be read: No such file"),
        (["--kv-cache-dtype", "int8", "--v-scale", "nan"], "--v-scale must be above 0 and finite, got nan"),
        (["--kv-cache-dtype", "int8", "--k-scale", "0"], "--k-scale must be above 0 and finite, got 0.0"),
        (["--port", "65536"], "--port must be from 0 to 65535, got 65536"),
        (["--max-queued", "-1"], "--max-queued must be 0 or more"),
        (["--host-blocks", "-1"], "--host-blocks must be 0 or more"),
        (["--speculate", "-1"], "--speculate must be 0 or more"),
        (["--shared-prefixes", "-1"], "--shared-prefixes must be 0 or more"),
        (["--drain-seconds", "0"], "--drain-seconds must be 1 or more"),
        (["--processes", "0"], "--processes must be 1 or more"),
        (["--process", "1"], "--process must be from 0 to one less than --processes, got 1"),
        (["--coordinator", "localhost"], "--coordinator must be HOST:PORT, got localhost"),
        (["--num-blocks", "0"], "--num-blocks must be 1 or more"),
        (["--block-size", "5"], "--block-size must be one of "),
        (["--between-tokens-ms", "inf"], "--between-tokens-ms must be above 0, got inf"),
        (["--served-model-name", "x", ""], "--served-model-name must be texts without spaces around them"),
        (["--allowed-hosts", "x "], "--allowed-hosts must be texts without spaces around them"),
    ],
)
def test_a_wrong_command_line(capsys, arguments, message):
    assert serve.main(["--port", "0", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("serve: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_an_implementation_for_other_machines(capsys):
    assert serve.main(["--port", "0", "--implementation", "triton"]) == 2
    assert capsys.readouterr().err == "serve: --implementation triton needs an NVIDIA GPU\n"


@pytest.mark.parametrize("error", [MemoryError, jax.errors.JaxRuntimeError])
def test_too_little_memory_is_one_line(capsys, monkeypatch, error):
    def make_server(*_):
        raise error("RESOURCE_EXHAUSTED:\nout of memory")

    monkeypatch.setattr(serve, "make_server", make_server)
    assert serve.main(["--port", "0"]) == 2
    assert capsys.readouterr().err == "serve: RESOURCE_EXHAUSTED: out of memory\n"


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as exit_:
        serve.main(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for word in (
        "curl",
        "openai.OpenAI",
        "--kv-cache-dtype",
        "--num-blocks",
        "SIGTERM",
        "--api-key",
        "/tokenize",
        "guided_regex",
    ):
        assert word in text


@pytest.mark.parametrize(("host", "url"), [("127.0.0.1", "http://127.0.0.1:"), ("::1", "http://[::1]:")])
def test_it_listens_at_addresses_of_both_kinds(host, url):
    try:
        listener = serve.bind(host, 0)
    except CommandError:
        if ":" not in host:
            raise
        pytest.skip("this machine has no IPv6")
    with listener:
        port = listener.getsockname()[1]
        assert serve.url_of(listener) == f"{url}{port}/v1"
        listener.listen()
        socket.create_connection((host, port)).close()


def test_an_address_that_is_taken():
    with serve.bind("127.0.0.1", 0) as listener:
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR), "a server may start again at once"
        listener.listen()
        with pytest.raises(CommandError, match=r"cannot listen at 127\.0\.0\.1"):
            serve.bind("127.0.0.1", listener.getsockname()[1])


def test_an_engine_that_cannot_be_used_again_is_told_of(capsys):
    """The exit code tells the process that starts servers to start another one."""

    class Broken:
        is_alive, broken = False, "the engine failed and cannot be reset: no memory"

    class Well:
        is_alive, broken = False, None

    assert serve.end(Broken()) == 1
    assert capsys.readouterr().err == "serve: the engine failed and cannot be reset: no memory\n"
    assert (serve.end(Well()), capsys.readouterr().err) == (0, "")


@pytest.mark.parametrize(("milliseconds", "most"), [("20", 64), ("19.9", 16), ("500", 256), ("1", 16)])
def test_prompts_hold_up_running_texts_for_as_long_as_asked(capsys, milliseconds, most):
    """The server takes the largest step size that is fast enough; the times of decode steps do not matter."""

    def shape(num_tokens, **more):
        return StepShape(num_tokens, 4, 2, **{"is_decode": False, "num_prompts": 2} | more)

    class Measured:
        config = EngineConfig(max_model_len=512, max_num_seqs=16, max_tokens_per_step=256)

        def measure_steps(self, context_len):
            assert context_len == 512
            times = {shape(16): 5e-3, shape(64): 20e-3, shape(256): 80e-3}
            return times | {shape(128, is_decode=True): 1e-3, shape(200, is_verify=True): 1e-3}

        def reset(self, config):
            self.config = config

    the_engine = Measured()
    serve.keep_up(serve.parse([]), the_engine)
    assert the_engine.config.max_tokens_beside_decodes is None
    serve.keep_up(serve.parse(["--between-tokens-ms", milliseconds]), the_engine)
    assert the_engine.config.max_tokens_beside_decodes == most
    assert the_engine.config.between_tokens_seconds == float(milliseconds) / 1e3
    assert f"{most} tokens" in capsys.readouterr().err
