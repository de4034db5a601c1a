"""Tests the options of examples/generate.py, what it says at the end, and requests and XLA's options in whole."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from examples import generate, loop, step
from examples.command_line import TINY, CommandError
from examples.families import parse_config
from examples.sharding import COMMANDS
from examples.step import xla_options
from tests.model_folders import reference

DEFAULTS = {
    "model": str(TINY),
    "prompt": ['The "for" statement'],
    "prompt_file": None,
    "max_new_tokens": 128,
    "stream": False,
    "json": False,
    "temperature": 0.6,
    "top_k": 0,
    "top_p": 1.0,
    "seed": 0,
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
    "mesh": None,
}
CONFIG = SimpleNamespace(vocab_size=4, max_position_embeddings=5)


def test_defaults():
    assert vars(generate.parse([])) == DEFAULTS
    assert vars(generate.parse(["--model", "m"])) == DEFAULTS | {"model": "m", "temperature": 0.0}


@pytest.mark.parametrize(
    ("name", "least", "most", "wrong"),
    [
        ("max_new_tokens", 1, 2**31 - 1, (0, 2**31)),
        ("temperature", 0.0, 1e300, (-0.1, "inf", "nan")),
        ("top_k", 0, 2**31 - 1, (-1, 2**31)),
        ("top_p", 1e-9, 1.0, (0.0, 1.1, "nan")),
        ("seed", 0, 2**32 - 1, (-1, 2**32)),
        ("num_blocks", 1, 10**9, (0,)),
    ],
)
def test_an_option_may_have_its_bounds_and_nothing_beyond(name, least, most, wrong):
    flag = "--" + name.replace("_", "-")
    for value in (least, most):
        assert getattr(generate.parse([f"{flag}={value}"]), name) == value
    for value in wrong:
        with pytest.raises(CommandError, match=f"{flag} must be"):
            generate.parse([f"{flag}={value}"])


@pytest.fixture
def noted(monkeypatch):
    """Runs `generate` with options over a model that writes two tokens for each prompt; gives what it calls."""
    calls, outcomes = {}, []
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "d": 3}, unk_token="d"))
    tokenizer.decoder = decoders.Fuse()
    config = SimpleNamespace(vocab_size=4, max_position_embeddings=6)

    class Model:
        def limit(self, longest):
            calls.setdefault("limit", []).append(longest)

    def note(module, name, result):
        def called(*arguments, **options):
            calls.setdefault(name, []).append((arguments, options))
            return result(len(calls[name]) - 1) if callable(result) else result

        monkeypatch.setattr(module, name, called)

    def outputs(state):
        count = calls["make_request"][state][0][0]
        outcomes.append(state)
        ends = "length" if outcomes.count(state) == 2 else "running"
        return [([state, i][: outcomes.count(state)], ends) for i in range(len(count))]

    def compile_programs(options, *_):
        programs = [lambda *arguments: calls.setdefault("runs", []).append(arguments) or arguments[1]] * 2
        return programs

    real = loop.make_request
    note(generate, "load_model", (Model(), config, tokenizer, (3, 9)))
    note(generate, "use_compilation_cache", None)
    note(generate, "peer_sum", lambda i: f"peers {i}")
    note(generate, "make_caches", lambda i: i)
    note(generate, "summarize", "the summary")
    note(loop, "make_programs", lambda i: SimpleNamespace(weights=f"weights {i}"))
    note(loop, "make_request", lambda i: real(*calls["make_request"][i][0], **calls["make_request"][i][1]))
    monkeypatch.setattr(loop, "outputs", outputs)
    monkeypatch.setattr(generate, "compile_programs", compile_programs)
    return calls


def test_every_option_is_used(noted, capsys):
    arguments = "--model m --prompt a --prompt b --prompt c --max-new-tokens 9 --temperature 0.5 --top-k 7 --top-p 0.25"
    arguments += " --seed 11 --dtype bfloat16 --implementation xla --split-experts experts --no-custom-all-reduce"
    assert generate.main([*arguments.split(), "--no-compilation-cache", "--mesh=dp=2"]) == 0
    (first, how), (second, _) = noted["load_model"]
    assert (first[:2], second[:2], how) == (("m", "bfloat16"), ("m", "bfloat16"), {"split_experts": "experts"})
    assert first[2].devices.flat[0] != second[2].devices.flat[0]
    assert "use_compilation_cache" not in noted
    assert noted["limit"] == [1 + 9] * 2
    common = {"max_new_tokens": 9, "max_position_embeddings": 6, "stop_token_ids": (3, 9)}
    common |= {"sampling": loop.Sampling(0.5, 7, 0.25)}
    assert noted["make_request"] == [(([[0], [2]],), common | {"seed": 11}), (([[1]],), common | {"seed": 12})]
    config = noted["peer_sum"][0][0][0]
    assert noted["peer_sum"] == [((config, "bfloat16", mesh, False), {}) for mesh in (first[2], second[2])]
    assert [options for _, options in noted["make_programs"]] == [
        {"implementation": "xla", "peers": f"peers {i}"} for i in range(2)
    ]
    assert [arguments[3:] for arguments, _ in noted["make_caches"]] == [
        (noted["make_caches"][i][0][3], "bfloat16", (first, second)[i][2]) for i in range(2)
    ]
    assert [run[:2] for run in noted["runs"]] == [("weights 0", 0), ("weights 1", 1)] * 2
    out, err = capsys.readouterr()
    assert out == "aaa\n\nbba\n\ncab\n"
    cut = "the text of prompt {} was cut after 2 of 9 tokens: the model has no more than 6 positions"
    assert err == "".join(f"note: {cut.format(i)}\n" for i in (1, 2, 3)) + "the summary\n"


def test_the_json_of_a_prompt(noted, capsys):
    assert generate.main(["--model", "m", "--prompt", "b", "--json", "--max-new-tokens", "2"]) == 0
    out, err = capsys.readouterr()
    assert out == '{"prompt": "b", "token_ids": [0, 0], "text": "aa", "finish_reason": "length"}\n'
    assert err == "the summary\n"
    assert noted["use_compilation_cache"] == [((), {})]
    assert noted["make_request"][0][1]["sampling"] == loop.Sampling(0.0, 0, 1.0)
    assert [arguments[3] for arguments, _ in noted["peer_sum"]] == [True]


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (BrokenPipeError(), 1), (OSError("full"), 2)])
def test_exit_codes(monkeypatch, capsys, error, code):
    def run(options):
        raise error

    monkeypatch.setattr(generate, "run", run)
    monkeypatch.setattr(generate, "discard_stdout", lambda: None)
    assert generate.main([]) == code
    assert capsys.readouterr() == ("", "error: full\n" if code == 2 else "")


def test_prompts_as_tokens():
    """A prompt may have as many tokens as there are positions, and any token of the vocabulary."""
    tokenizer = SimpleNamespace(encode=lambda text: SimpleNamespace(ids=[int(letter) for letter in text]))
    assert generate.encode(tokenizer, ["33333", "0"], CONFIG) == [[3] * 5, [0]]
    for prompts, message in [
        (["4"], "the prompt has token 4; the model's vocabulary has 4"),
        (["0", "000000"], "prompt 2 has 6 tokens; the model has 5 positions"),
        (["", "0"], "prompt 1 is empty"),
        (["\ud800"], "the prompt is not valid UTF-8"),
    ]:
        with pytest.raises(CommandError, match=message):
            generate.encode(tokenizer, prompts, CONFIG)


@pytest.mark.parametrize(("num_blocks", "expected"), [(None, 2 + 2), (3, 3), (5, 5)])
def test_how_many_blocks_prompts_need(num_blocks, expected):
    """Texts of 6 and 9 tokens, whose last one is never in the cache, in blocks of 4; the prompts have 4 and 8."""
    request = SimpleNamespace(prompt_lens=np.array([4, 8]), max_output_lens=np.array([2, 1]))
    options = SimpleNamespace(num_blocks=num_blocks, block_size=4)
    assert generate.choose_num_blocks(options, request) == expected
    with pytest.raises(CommandError, match="the prompts need 3 blocks of 4 tokens, --num-blocks gives 2"):
        generate.choose_num_blocks(SimpleNamespace(num_blocks=2, block_size=4), request)


def test_the_summary():
    """Two copies: of 10 and 6 blocks of 4, 7 and 2 are free; 25 of the 28 slots in the others hold tokens."""
    states = [
        SimpleNamespace(ref_counts=np.zeros(10), num_free=7, seq_lens=np.array([9, 2]), block_size=4),
        SimpleNamespace(ref_counts=np.zeros(6), num_free=2, seq_lens=np.array([14, 0]), block_size=4),
    ]
    found = generate.summarize([SimpleNamespace(allocator=state) for state in states], 30, 4.0, 2.25)
    assert found == (
        "30 tokens in 4.00 s: 7.5 tokens/s (and 2.2 s to compile); 7 of 16 blocks used, "
        "cache waste 10.7% of their 28 slots"
    )


def test_notices():
    results = [([1, 2], "blocks"), ([1, 2], "length"), ([1, 2, 3], "length"), ([1], "stop")]
    cut = "the text of prompt {} was cut after 2 of 3 tokens: "
    assert generate.notices(results, 3, CONFIG) == [
        cut.format(1) + "the cache has no free block left; --num-blocks gives it more",
        cut.format(2) + "the model has no more than 5 positions",
    ]
    assert generate.notices(results[:1], 3, CONFIG)[0].startswith("the text was cut after 2 of 3 tokens: ")


def test_a_request_in_whole():
    """Prompts are padded to 64 tokens; a sequence ends where the model's positions do, its last token beyond them."""
    request = loop.make_request(
        [[5, 6, 7], [8]],
        max_new_tokens=9,
        max_position_embeddings=10,
        stop_token_ids=[3],
        sampling=loop.Sampling(0.5, 2, 0.25),
        seed=4,
    )
    assert request.token_ids.tolist() == [5, 6, 7, 8] + [0] * 60
    assert request.prompt_lens.tolist() == [3, 1]
    assert request.max_output_lens.tolist() == [8, 9]
    assert (request.max_new_tokens, request.max_seq_len, request.is_greedy) == (9, 10, False)
    assert request.stop_token_ids.tolist() == [3]
    assert [float(x) for x in request.sampling] == [0.5, 2, 0.25]
    assert jax.random.key_data(request.key).tolist() == jax.random.key_data(jax.random.key(4)).tolist()
    plain = loop.make_request([[1] * 65], max_new_tokens=7, max_position_embeddings=1000)
    assert (plain.token_ids.shape, plain.max_seq_len, plain.is_greedy) == ((128,), 128 + 7, True)
    assert plain.max_output_lens.tolist() == [7]
    assert loop.make_request([[1] * 9], max_new_tokens=7, max_position_embeddings=10).max_new_tokens == 2


def test_devices_share_out_the_blocks_of_every_cache_evenly():
    config = replace(parse_config(reference("gemma3").config), num_shards=3)
    for asked, counts in ((7, [9] * config.num_layers), ([*range(4, 4 + config.num_layers)], None)):
        caches = jax.eval_shape(lambda asked=asked: loop.make_caches(config, asked, 4, "float32"))
        counts = [-(-count // 3) * 3 for count in asked] if counts is None else counts
        assert [cache.num_blocks for cache in caches] == counts


def test_a_step_has_as_many_rows_as_tokens_or_logits():
    for num_rows, most in ((None, 2), (1, 2), (5, 5)):
        rows = None if num_rows is None else [0] * num_rows
        assert step._most_rows(SimpleNamespace(token_ids=[0, 0], logit_rows=rows)) == most


def test_keys_that_are_all_zero_have_a_scale():
    """Not 0, by which nothing can be divided."""
    programs = SimpleNamespace(weights=None, prefill=lambda weights, caches, request: SimpleNamespace(caches=caches))
    request = SimpleNamespace(prompt_lens=np.array([3, 5]))
    config = SimpleNamespace(num_layers=1, num_shards=1, latent=None, num_kv_heads=2, head_size=8)
    ((keys, values),) = loop.measure_scales(programs, config, request, 4, np.float32)
    assert keys.tolist() == values.tolist() == [1, 1]


def test_xla_s_options_for_every_size():
    """cuBLAS from 64 rows on; it chooses by itself from 64 to 127 and from 256 to 511."""
    by_cublas = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
    untried = by_cublas | {"xla_gpu_autotune_level": 0}
    sizes = {1: {}, 63: {}, 64: untried, 127: untried, 128: by_cublas, 255: by_cublas, 256: untried}
    assert {size: xla_options(size) for size in sizes} == sizes
    assert {size: xla_options(size) for size in (511, 512, 4096)} == {511: untried, 512: by_cublas, 4096: by_cublas}
    # A large model on two GPUs: NCCL's all-reduces are recorded in decode steps, which the kernel does not reduce.
    leaf = jax.ShapeDtypeStruct((1 << 20, 1 << 10), np.float16)
    recorded = {"xla_gpu_experimental_use_collective_kernels": "", "xla_gpu_enable_command_buffer": COMMANDS}
    device = SimpleNamespace(platform="gpu")
    mesh = SimpleNamespace(size=2, devices=np.array([device, device]))
    many = {"weights": {"embed_tokens": {"embedding": leaf}}, "mesh": mesh}
    peers = SimpleNamespace(most_rows=128)
    assert xla_options(1, **many) == recorded
    assert xla_options(129, **many, peers=peers) == recorded | by_cublas
    assert xla_options(256, **many) == recorded | untried
    assert xla_options(257, **many) == untried
    assert xla_options(128, **many, peers=peers) == by_cublas
    assert xla_options(1, **many | {"mesh": SimpleNamespace(size=1, devices=mesh.devices)}) == {}
    names = ("all_reduce", "reduce_scatter", "all_gather")
    overlap = {f"xla_gpu_{name}_combine_threshold_bytes": 0 for name in names}
    overlap |= {"xla_gpu_enable_latency_hiding_scheduler": True}
    assert xla_options(4096, mesh=mesh, weights={}, pieces=2) == by_cublas | overlap
    assert xla_options(4095, mesh=mesh, weights={}, pieces=2) == by_cublas
    assert xla_options(4096, pieces=2) == by_cublas
