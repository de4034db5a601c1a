"""Generation end to end: examples/loop.py, attend.py and generate.py against the same model without any cache."""

import dataclasses
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

from examples import generate, loop
from examples.attend import causal_attend
from examples.checkpoint import load_model, save_model
from examples.config import load_config
from examples.decoder import Decoder

# One shape for almost everything: three prompts of 64 tokens at most, 21 blocks of 8 slots.
PROMPTS = ["The assert statement ", "x", "In Python, a list is"]
BLOCK_SIZE, NUM_BLOCKS, MAX_NEW_TOKENS = 8, 21, 40


@pytest.fixture(scope="module")
def tiny():
    model, config, tokenizer, eos_token_ids = load_model(generate.TINY, jnp.float32)
    assert eos_token_ids == (256,)
    return model, config, tokenizer


@pytest.fixture(scope="module")
def programs(tiny):
    return loop.make_programs(tiny[0])


@pytest.fixture(scope="module")
def no_cache(tiny):
    """Greedy generation by running the model over the whole text again for every token."""
    model, config, _ = tiny
    positions = jnp.arange(128, dtype=jnp.int32)

    @jax.jit
    def next_token(token_ids, num_tokens):
        hidden, _ = model(token_ids, positions, (None,) * config.num_layers, causal_attend())
        return jnp.argmax(model.logits(hidden[num_tokens - 1][None]))

    def continue_prompt(prompt_ids, num_new):
        ids = list(prompt_ids)
        for _ in range(num_new):
            padded = np.zeros(128, np.int32)
            padded[: len(ids)] = ids
            ids.append(int(next_token(padded, np.int32(len(ids)))))
        return ids[len(prompt_ids) :]

    return continue_prompt


@pytest.fixture(scope="module")
def expected(no_cache):
    """What follows PROMPTS without a cache."""
    return [no_cache(text.encode(), MAX_NEW_TOKENS) for text in PROMPTS]


def make_request(prompts, *, stop=300, **options):
    """A request of the one shape; 300 is no token of the vocabulary."""
    token_ids = [list(text.encode()) for text in prompts]
    options = {"max_position_embeddings": 512, "max_new_tokens": MAX_NEW_TOKENS} | options
    return loop.make_request(token_ids, stop_token_ids=[stop], **options)


def make_caches(config, num_blocks=NUM_BLOCKS):
    """Poisoned: whatever is read without having been written shows."""
    caches = loop.make_caches(config, num_blocks, BLOCK_SIZE, jnp.float32)
    return jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), caches)


def generation_of(tiny, programs, request):
    return programs.generate(programs.weights, make_caches(tiny[1]), request)


def test_paged_generation_equals_generation_without_a_cache(tiny, programs, expected):
    generation = generation_of(tiny, programs, make_request(PROMPTS))
    assert loop.outputs(generation) == [(ids, "length") for ids in expected]
    prompt_lens = np.array([len(text) for text in PROMPTS])
    seq_lens = prompt_lens + MAX_NEW_TOKENS - 1  # the last token never enters the cache
    assert generation.allocator.seq_lens.tolist() == seq_lens.tolist()
    assert int(generation.allocator.num_free) == NUM_BLOCKS - (-(-seq_lens // BLOCK_SIZE)).sum()
    assert not generation.allocator.bad_free


def test_each_prompt_alone_gives_the_same(tiny, expected):
    programs = loop.make_programs(tiny[0])
    for text, ids in zip(PROMPTS, expected, strict=True):
        assert loop.outputs(generation_of(tiny, programs, make_request([text]))) == [(ids, "length")]
    assert programs.generate._cache_size() == 1


def test_a_stop_token_ends_its_sequence_and_no_other(tiny, programs, expected):
    def cut(ids, stop):
        return (ids[: ids.index(stop) + 1], "stop") if stop in ids else (ids, "length")

    # A token that ends some sequences early and others later or never.
    lengths = {stop: [len(cut(ids, stop)[0]) for ids in expected] for ids in expected for stop in ids}
    stop = max(lengths, key=lambda token: np.ptp(lengths[token]))
    assert np.ptp(lengths[stop]) > 3
    generation = generation_of(tiny, programs, make_request(PROMPTS, stop=stop))
    assert loop.outputs(generation) == [cut(ids, stop) for ids in expected]
    cached = [len(text) + n - 1 for text, n in zip(PROMPTS, lengths[stop], strict=True)]
    assert generation.allocator.seq_lens.tolist() == cached  # finished sequences took no more slots


def test_running_out_of_blocks_ends_all_that_still_run(tiny, programs, no_cache):
    prompts = ["The try statement spec", "Class definitions are", "A mapping object maps"]
    lens = np.array([len(text) for text in prompts])
    num_cached = max(n for n in range(99) if (-(-(lens + n) // BLOCK_SIZE)).sum() <= NUM_BLOCKS)
    assert 0 < num_cached < MAX_NEW_TOKENS - 1
    generation = generation_of(tiny, programs, make_request(prompts))
    expected = [(no_cache(text.encode(), num_cached + 1), "blocks") for text in prompts]
    assert loop.outputs(generation) == expected
    assert (generation.allocator.seq_lens == lens + num_cached).all()


def test_no_room_is_made_for_tokens_past_the_last_position():
    request = make_request(PROMPTS, max_new_tokens=2**31 - 1)
    assert request.max_new_tokens == 512 - min(map(len, PROMPTS)) + 1 == request.max_output_lens.max()


def test_the_last_position_ends_a_sequence(tiny, programs, expected):
    request = make_request(PROMPTS)
    short = make_request(PROMPTS, max_position_embeddings=50)
    assert short.max_seq_len == 50
    request = dataclasses.replace(request, max_output_lens=short.max_output_lens)  # of the compiled shape
    cut = [(ids[: 50 - len(text) + 1], "length") for text, ids in zip(PROMPTS, expected, strict=True)]
    assert [len(ids) for ids, _ in cut] == [30, 40, 31]
    assert loop.outputs(generation_of(tiny, programs, request)) == cut


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_step_by_step_gives_the_same_tokens(tiny, programs, temperature):
    sampling = loop.Sampling(temperature, top_k=20, top_p=0.95)
    request = make_request(PROMPTS, sampling=sampling, seed=3, stop=ord("s"))
    at_once = loop.outputs(generation_of(tiny, programs, request))
    generation = programs.prefill(programs.weights, make_caches(tiny[1]), request)
    seen = [[] for _ in PROMPTS]
    while True:
        for tokens, (ids, _) in zip(seen, loop.outputs(generation), strict=True):
            assert len(ids) - len(tokens) in (0, 1)
            tokens += ids[len(tokens) :]
        if not loop.is_running(generation):
            break
        generation = programs.decode(programs.weights, generation, request)
    assert loop.outputs(generation) == at_once
    assert seen == [ids for ids, _ in at_once]


def test_a_greedy_program_draws_no_random_numbers(tiny, programs):
    def lowered(temperature):
        request = make_request(PROMPTS, sampling=loop.Sampling(temperature))
        return programs.generate.lower(programs.weights, make_caches(tiny[1]), request).as_text()

    assert "threefry" in lowered(1.0)
    assert "threefry" not in lowered(0.0)


def test_every_step_and_every_seed_draws_anew(tiny, programs):
    def tokens(seed):
        sampling = loop.Sampling(temperature=1e6)  # all tokens alike, so that only the random numbers decide
        request = make_request(PROMPTS, sampling=sampling, seed=seed)
        return [ids for ids, _ in loop.outputs(generation_of(tiny, programs, request))]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
    assert all(len(set(ids)) > 30 for ids in tokens(1))
    assert len(set(map(tuple, tokens(1)))) == len(PROMPTS)


def test_compiled_once_for_varying_lengths_and_options(tiny, programs):
    """Once for greedy requests, and once for all others."""
    generation_of(tiny, programs, make_request(PROMPTS))
    generation_of(tiny, programs, make_request(PROMPTS, sampling=loop.Sampling(1.0)))
    before = programs.generate._cache_size()
    for lens in (1, 1, 1), (7, 8, 9), (30, 2, 32), (2, 61, 1):
        sampling = loop.Sampling(0.5 * lens[0], lens[1], 0.9)
        request = make_request(["a" * n for n in lens], sampling=sampling, seed=lens[2], stop=lens[0])
        results = loop.outputs(generation_of(tiny, programs, request))
        assert all(ids for ids, _ in results)
    assert programs.generate._cache_size() == before == 2


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder with a two-layer model of random weights: quick to compile, and free with bytes that are no text."""
    folder = tmp_path_factory.mktemp("small")
    config = json.loads((generate.TINY / "config.json").read_text()) | {"num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(generate.TINY / "tokenizer.json", folder)
    config = load_config(folder)
    save_model(folder, Decoder(config, rngs=nnx.Rngs(1)), config)
    return folder


@pytest.mark.parametrize("name", ["generate", "decode"])
def test_every_pool_is_aliased_and_none_copied(small, name):
    """A second copy of a pool would show as bytes that alias nothing, as temporaries, or as an instruction."""
    num_blocks = 4096
    model, config, _, _ = load_model(small, jnp.float32)
    programs = loop.make_programs(model)
    request = make_request(PROMPTS)
    caches = jax.eval_shape(lambda: loop.make_caches(config, num_blocks, BLOCK_SIZE, jnp.float32))
    arguments = [programs.weights, caches, request]
    if name == "decode":
        arguments[1] = jax.eval_shape(programs.prefill, *arguments)
    compiled = getattr(programs, name).lower(*arguments).compile()

    pools = [pool for cache in caches for pool in (cache.key_cache, cache.value_cache)]
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(pool.size * pool.dtype.itemsize for pool in pools)
    assert memory.temp_size_in_bytes < pools[0].size * pools[0].dtype.itemsize
    shape = re.escape(f"f32[{','.join(map(str, pools[0].shape))}]")
    hlo = compiled.as_text()
    assert re.search(rf"= {shape}\S* (fusion|scatter)\(", hlo), "the pools are not where this test looks for them"
    assert not re.search(rf"= {shape}\S* (copy|copy-start|transpose|concatenate)\(", hlo)


def decoded_in_pieces(tokenizer, prompt_ids, token_ids):
    detokenizer = generate.Detokenizer(tokenizer, prompt_ids)
    pieces = [detokenizer.push([token_id]) for token_id in token_ids]
    return [*pieces, detokenizer.flush()]


def test_streamed_text_never_holds_half_a_character(tiny):
    text = "naïve “quotes” – 漢字 🐍 e\u0301\n"
    pieces = decoded_in_pieces(tiny[2], "é ".encode(), text.encode())
    assert pieces == [piece for char in text for piece in [""] * (len(char.encode()) - 1) + [char]] + [""]


def test_streamed_bytes_that_are_no_text_come_out_as_replacement_characters(tiny):
    assert decoded_in_pieces(tiny[2], b"ab", b"\xff\xe6\xbc")[-1].startswith("\N{REPLACEMENT CHARACTER}")
    random = np.random.default_rng(0)
    for _ in range(20):
        token_ids = random.integers(0, 256, 50).tolist()
        text = "".join(decoded_in_pieces(tiny[2], list(b"prompt"), token_ids))
        assert text == tiny[2].decode(token_ids) == bytes(token_ids).decode(errors="replace")


@pytest.mark.parametrize("as_json", [False, True])
def test_writing_piecewise_writes_the_same(tiny, capsys, as_json):
    """Prompts are written in their order even if a later one finishes first."""
    prompts = ["One é", "Two", "Three"]
    prompt_ids = [list(text.encode()) for text in prompts]
    finals = [(list("漢字.".encode()), "length"), ([*b"2", 256], "stop"), (list(b"\xe6!\xe6"), "blocks")]

    def written(*states):
        writer = generate.Writer(tiny[2], prompts, prompt_ids, as_json)
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


def test_a_bare_run_of_the_script(tmp_path):
    """The README's first command, from elsewhere, with no terminal, no stdin, and warnings as errors."""
    script = Path(generate.__file__)
    environment = {name: value for name, value in os.environ.items() if name not in ("TERM", "PYTHONPATH")}
    environment |= {"CI": "true", "PYTHONPATH": str(script.parents[1])}
    command = [sys.executable, "-W", "error", str(script), "--max-new-tokens", "8"]
    options = {"cwd": tmp_path, "env": environment, "stdin": subprocess.DEVNULL, "timeout": 120}
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False, **options)
    assert (done.returncode, len(done.stderr.splitlines())) == (0, 1), done.stderr
    assert done.stderr.startswith("8 tokens in ")
    assert done.stdout.startswith(generate.DEFAULT_PROMPT)


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
    "--dtype=int8": "argument --dtype: invalid choice: 'int8'",
    "--implementation=cuda": "argument --implementation: invalid choice: 'cuda'",
    "--temp=1": "unrecognized arguments: --temp=1",
    "--model=": "the model's name is empty",
    "--model=/nowhere/at/all": "/nowhere/at/all is no folder",
}


def error_of(arguments, capsys):
    """The one line that such a run writes."""
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
