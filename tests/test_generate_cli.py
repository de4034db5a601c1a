"""The command line of examples/generate.py, and examples/text.py, which turns its tokens into text."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples import generate, loop, text
from examples.checkpoint import load_model, save_model
from examples.decoder import Decoder
from examples.families import load_config
from paged_jax.engine import TextStream
from tests.conftest import has_gpu


@pytest.fixture(scope="module")
def tokenizer():
    return load_model(generate.TINY, jnp.float32)[2]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder with a one-layer model of random weights: it compiles fast, and may write bytes that are no text."""
    folder = tmp_path_factory.mktemp("small")
    config = json.loads((generate.TINY / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(generate.TINY / "tokenizer.json", folder)
    config = load_config(folder)
    save_model(folder, Decoder(config, rngs=nnx.Rngs(1)), config)
    return folder


def decoded_in_pieces(tokenizer, prompt_ids, token_ids):
    stream = TextStream(tokenizer, prompt_ids)
    return [*map(stream.push, token_ids), stream.flush()]


def test_streamed_text_never_holds_half_a_character(tokenizer):
    written = "naïve “quotes” – 漢字 🐍 e\u0301\n"
    pieces = decoded_in_pieces(tokenizer, "é ".encode(), written.encode())
    assert pieces == [piece for char in written for piece in [""] * (len(char.encode()) - 1) + [char]] + [""]


def test_streamed_bytes_that_are_no_text_come_out_as_replacement_characters(tokenizer):
    assert decoded_in_pieces(tokenizer, b"ab", b"\xff\xe6\xbc")[-1].startswith("\N{REPLACEMENT CHARACTER}")
    random = np.random.default_rng(0)
    for _ in range(20):
        token_ids = random.integers(0, 256, 50).tolist()
        written = "".join(decoded_in_pieces(tokenizer, list(b"prompt"), token_ids))
        assert written == tokenizer.decode(token_ids) == bytes(token_ids).decode(errors="replace")


@pytest.mark.parametrize("as_json", [False, True])
def test_writing_piecewise_writes_the_same(tokenizer, capsys, as_json):
    """Prompts are written in their order even if a later one finishes first."""
    prompts = ["One é", "Two", "Three"]
    prompt_ids = [list(prompt.encode()) for prompt in prompts]
    finals = [(list("漢字.".encode()), "length"), ([*b"2", 256], "stop"), (list(b"\xe6!\xe6"), "blocks")]

    def written(*states):
        writer = text.Writer(tokenizer, prompts, prompt_ids, as_json)
        outs = []
        for state in states:
            writer.update(state)
            outs.append(capsys.readouterr().out)
        return outs

    [at_once] = written(finals)
    steps = [[(ids[:n], reason if n >= len(ids) else "running") for ids, reason in finals] for n in range(1, 8)]
    pieces = written(*steps)
    assert "".join(pieces) == at_once
    assert "Two" not in "".join(pieces[:6])
    if not as_json:
        assert at_once == "One é漢字.\n\nTwo2\n\nThree\ufffd!\ufffd\n"
        assert pieces[:3] == ["One é", "", "漢"]


@pytest.fixture(scope="module")
def json_run(small):
    return f"--model={small} --prompt Hello --prompt é --temperature 1 --seed 5 --max-new-tokens 24 --json".split()


def test_json_has_one_object_a_prompt_and_streaming_changes_nothing(json_run, small, capsys):
    assert generate.main(json_run) == 0
    out, err = capsys.readouterr()
    tokenizer = load_model(small, jnp.float32)[2]
    results = [json.loads(line) for line in out.splitlines()]
    assert [result["prompt"] for result in results] == ["Hello", "é"]
    for result in results:
        assert list(result) == ["prompt", "token_ids", "text", "finish_reason"]
        assert result["finish_reason"] in ("stop", "length")
        assert (len(result["token_ids"]) == 24) or result["finish_reason"] == "stop"
        assert result["text"] == tokenizer.decode(result["token_ids"], skip_special_tokens=True)
    summary = r"\d+ tokens in .* tokens/s .*; \d+ of \d+ blocks used, cache waste \d+\.\d% .*\n"
    assert re.fullmatch(summary, err)

    assert generate.main([*json_run, "--stream"]) == 0
    streamed, err = capsys.readouterr()
    assert streamed == out
    assert re.fullmatch(summary, err)


UNSET = "TERM", "PYTHONPATH", "JAX_COMPILATION_CACHE_DIR"


@pytest.mark.slow_on_cpu
def test_a_bare_run_of_the_script(tmp_path):
    """The README's first command, from elsewhere, with no terminal, no stdin, and warnings as errors."""
    script = Path(generate.__file__)
    environment = {name: value for name, value in os.environ.items() if name not in UNSET}
    environment |= {"CI": "true", "PYTHONPATH": str(script.parents[1]), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    if not has_gpu():  # JAX's CUDA plugin, which the tests lower with, says at length that it finds no CUDA
        environment["JAX_PLATFORMS"] = "cpu"
    # jax-triton leaves a temporary folder to the end of the process.
    warnings = ["-W", "error", "-W", "ignore:Implicitly cleaning up:ResourceWarning"]
    command = [sys.executable, *warnings, str(script), "--max-new-tokens", "8"]
    options = {"cwd": tmp_path, "env": environment, "stdin": subprocess.DEVNULL, "timeout": 600}
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False, **options)
    assert (done.returncode, len(done.stderr.splitlines())) == (0, 1), done.stderr
    assert done.stderr.startswith("8 tokens in ")
    assert done.stdout.startswith(generate.DEFAULT_PROMPT)
    assert list((tmp_path / "cache" / "paged_jax").glob("jit_generate-*-cache"))


def test_no_cache_folder_is_no_error(monkeypatch, tmp_path):
    """A folder that cannot be made is not used either, and a folder that is chosen already stays."""
    (tmp_path / "file").touch()
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        generate.use_compilation_cache()
        assert jax.config.jax_compilation_cache_dir is None
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        generate.use_compilation_cache()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "paged_jax")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
        generate.use_compilation_cache()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "paged_jax")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(scope="module")
def quiet_run(small):
    return f"--model={small} --temperature 1 --seed 5 --max-new-tokens 8 --json".split()


def test_prompts_from_files_and_stdin(tmp_path, monkeypatch):
    """A line ends with a line feed, not with what else Python's `splitlines` takes for an end."""
    (tmp_path / "lines").write_bytes("One é\r\n\nTwo\x0cor\x85three\u2028\n".encode())
    (tmp_path / "strings.jsonl").write_text('"two\\nlines"\n"x\u2028y"\n')
    files = [f"--prompt-file={tmp_path / name}" for name in ("lines", "strings.jsonl")]
    assert generate.parse([*files, "--prompt=Zero"]).prompt == [
        "Zero",
        "One é",
        "Two\x0cor\x85three\u2028",
        "two\nlines",
        "x\u2028y",
    ]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"From stdin")))
    assert generate.parse(["--prompt-file=-"]).prompt == ["From stdin"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty", b"\n \n", "holds no prompt"),
        ("bytes", b"\xff", "is not valid UTF-8"),
        ("missing", None, "cannot be read: "),
        ("x.jsonl", b'"a"\n{"prompt": "b"}', "line 2: expected a JSON string"),
        ("x.jsonl", b'"a', "line 1: expected a JSON string"),
    ],
)
def test_files_without_prompts_are_one_line_and_exit_code_2(name, content, message, tmp_path, capsys):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert message in error_of([f"--prompt-file={tmp_path / name}"], capsys)


@pytest.mark.slow_on_cpu
def test_a_cache_of_8_bits(quiet_run, capsys):
    """The library's tests compare what each dtype holds; scales reach the caches in the next test."""
    argv = [*quiet_run, "--temperature=0", "--prompt=Hello", "--kv-cache-dtype=float8_e4m3fn", "--k-scale=0.5"]
    assert generate.main(argv) == 0
    out = json.loads(capsys.readouterr().out)
    assert len(out["token_ids"]) == 8 or out["finish_reason"] == "stop"


def test_given_scales_reach_the_caches(small):
    """int8 measures the scales that are not given; float8 takes 1 for them, and other caches have none."""
    config = load_config(small)
    model = load_model(small, jnp.float32)[0]
    programs = loop.make_programs(model)
    request = loop.make_request([[1, 2, 3]], max_new_tokens=4, max_position_embeddings=512)

    def scales(arguments):
        caches = generate.make_caches(generate.parse(arguments.split()), config, programs, request, "float32", None)
        assert caches[0].dtype.name == arguments.split()[1]
        return [(cache.k_scale, cache.v_scale) for cache in caches]

    assert scales("--kv-cache-dtype float32") == [(None, None)]
    assert scales("--kv-cache-dtype float8_e5m2 --v-scale 0.5") == [(1.0, 0.5)]
    assert scales("--kv-cache-dtype int8 --k-scale 2 --v-scale 0.5") == [(2.0, 0.5)]
    for k_scale, v_scale in scales("--kv-cache-dtype int8 --k-scale 2"):
        assert k_scale == 2
        assert v_scale.shape == (config.num_kv_heads,)
        assert (np.asarray(v_scale) < 1).all()


@pytest.mark.slow
def test_a_cut_text_is_told_of(quiet_run, capsys):
    def notes(arguments):
        assert generate.main([*quiet_run, *arguments.split()]) == 0
        *lines, summary = capsys.readouterr().err.splitlines()
        assert " tokens in " in summary
        return lines

    blocks = "--block-size=4 --num-blocks=2 --prompt=12345 --temperature=0"
    assert notes(blocks) == [
        "note: the text was cut after 4 of 8 tokens: the cache has no free block left; --num-blocks gives it more"
    ]
    positions = f"--prompt={'x' * 508} --prompt=x --temperature=0"
    assert notes(positions) == [
        "note: the text of prompt 1 was cut after 5 of 8 tokens: the model has no more than 512 positions"
    ]


ERRORS = {
    "--prompt=": "the prompt is empty",
    "--prompt=a --prompt=": "prompt 2 is empty",
    "--prompt=\udcff": "the prompt is not valid UTF-8",
    "--prompt=" + "x" * 513: "the prompt has 513 tokens; the model has 512 positions",
    "--prompt=12345678 --prompt=9 --block-size=4 --num-blocks=2": (
        "the prompts need 3 blocks of 4 tokens, --num-blocks gives 2"
    ),
    "--max-new-tokens=0": "--max-new-tokens must be 1 or more, and below 2**31, got 0",
    "--max-new-tokens=2147483648": "--max-new-tokens must be 1 or more, and below 2**31, got 2147483648",
    "--temperature=-0.5": "--temperature must be 0 or more, got -0.5",
    "--temperature=nan": "--temperature must be 0 or more, got nan",
    "--temperature=warm": "argument --temperature: invalid float value: 'warm'",
    "--top-k=-1": "--top-k must be 0 or more, got -1",
    "--top-p=0": "--top-p must be above 0 and at most 1, got 0.0",
    "--top-p=1.5": "--top-p must be above 0 and at most 1, got 1.5",
    "--seed=-1": "--seed must be from 0 to 2**32 - 1, got -1",
    "--block-size=12": "--block-size must be one of 1, 2, 4, 8, 16, 32, 64, 128, 256, got 12",
    "--num-blocks=0": "--num-blocks must be 1 or more, got 0",
    "--num-blocks=1000000000": "num_blocks * block_size must be at most 2**31",
    "--k-scale=0.5": "--k-scale needs --kv-cache-dtype to be one of float8_e4m3fn, float8_e5m2, int8",
    "--kv-cache-dtype=int8 --v-scale=0": "--v-scale must be above 0 and finite, got 0.0",
    "--kv-cache-dtype=int4": "argument --kv-cache-dtype: invalid choice: 'int4'",
    "--dtype=int8": "argument --dtype: invalid choice: 'int8'",
    "--implementation=cuda": "argument --implementation: invalid choice: 'cuda'",
    "--temp=1": "unrecognized arguments: --temp=1",
    "--model=": "the model's name is empty",
    "--model=/nowhere/at/all": "/nowhere/at/all is no folder",
}


def error_of(arguments, capsys):
    """Runs the command line, which fails, and returns the one line that it writes."""
    assert generate.main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err[:7], err.count("\n")) == ("", "error: ", 1)
    return err


@pytest.mark.parametrize("arguments", ERRORS, ids=lambda arguments: ascii(arguments[:40]))
def test_what_cannot_be_done_is_one_line_and_exit_code_2(capsys, arguments):
    assert error_of(arguments.split(), capsys).startswith(f"error: {ERRORS[arguments]}")


def test_unusable_models_are_one_line_and_exit_code_2(small, tmp_path, capsys):
    def error():
        return error_of(["--model", str(tmp_path)], capsys)

    assert "has no config.json" in error()
    shutil.copytree(small, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    assert "has no model.safetensors" in error()
    (tmp_path / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in error()
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    assert "'BertModel' is not supported" in error()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there it may well work")
def test_an_implementation_for_other_machines_is_one_line_and_exit_code_2(json_run, capsys):
    assert "triton" in error_of([*json_run, "--implementation", "triton"], capsys)


def test_only_the_tiny_model_is_not_greedy_by_default():
    temperatures = [generate.parse(argv.split()).temperature for argv in ("", "--model=x", "--temperature=0")]
    assert temperatures == [0.6, 0, 0]


@pytest.mark.parametrize("error", [RuntimeError("no such\nbackend"), AssertionError()])
def test_no_device_is_one_line_and_exit_code_2(error, monkeypatch, capsys):
    def fail():
        raise error

    monkeypatch.setattr(jax, "default_backend", fail)
    assert "JAX finds no device: " in error_of(["--dtype", "float32"], capsys)


def test_closed_and_full_and_ascii_streams(json_run, monkeypatch, capsys, tmp_path):
    for name, num_results in ("stderr", 2), ("stdout", 0):
        monkeypatch.setattr(sys, name, None)
        assert generate.main(json_run) == 0
        getattr(sys, name).close()
        monkeypatch.undo()
        assert len(capsys.readouterr().out.splitlines()) == num_results

    with open(tmp_path / "out", "w", encoding="ascii") as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert generate.main(json_run[:-1]) == 0
    monkeypatch.undo()
    assert "\n\n\\xe9" in (tmp_path / "out").read_text()
    capsys.readouterr()

    if Path("/dev/full").exists():
        with open("/dev/full", "w") as file:
            monkeypatch.setattr(sys, "stdout", file)
            assert generate.main(json_run) == 2
        monkeypatch.undo()
        assert re.fullmatch(r"error: .*No space left.*\n", capsys.readouterr().err)
