"""Tests the example decoder against transformers' results with the same checkpoints (tests/data/make_models.py)."""

import functools
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples import generate, loop
from examples.attend import causal_attend, prefill_attend
from examples.checkpoint import load_model
from examples.decoder import Decoder
from examples.families import load_config, parse_config
from examples.norms import RMSNorm
from examples.step import make_abstract_step, make_step, xla_options
from paged_jax import allocator
from paged_jax.engine import Batch
from tests.model_folders import NAMES, folder, reference

# Programs over a paged cache are compiled and run for a model of each family of attention; what else differs between
# models is the same with and without a cache.
WITH_PROGRAMS = ["opt_pre_norm", "gemma2", "gpt_oss", "deepseek_v2_lite"]


@functools.cache
def load(name):
    """A model, its prompts, and the tokens and logits that transformers gave for them."""
    model, config, _, _ = load_model(folder(name), jnp.float32)
    found = reference(name)
    if found.longest is not None:
        model.limit(found.longest)
    prompts = [np.array(prompt, np.int32) for prompt in found.prompts]
    tokens = np.array(found.tokens, np.int32)
    return SimpleNamespace(
        model=model,
        config=config,
        prompts=prompts,
        tokens=tokens,
        sequences=[np.concatenate(pair) for pair in zip(prompts, tokens, strict=True)],
        logits=np.array(found.logits, np.float32),
    )


@pytest.fixture(scope="module", params=["gemma2", "deepseek_v2_lite"])
def case(request):
    return load(request.param)


def check_logits(case, logits):
    """Compares logits at every position of all sequences, in their order, with transformers' tokens and logits."""
    starts = np.cumsum([0] + [len(sequence) for sequence in case.sequences])
    for prompt, tokens, start, end in zip(case.prompts, case.tokens, starts, starts[1:], strict=False):
        assert logits[start + len(prompt) - 1 : end - 1].argmax(-1).tolist() == tokens.tolist()
    theirs = logits[[starts[-2] + len(case.prompts[-1]) - 1, -1]]
    np.testing.assert_allclose(theirs, case.logits, rtol=0, atol=1e-4)


@partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def run_causal(graphdef, state, token_ids):
    model = nnx.merge(graphdef, state)

    def run(token_ids):
        positions = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
        hidden, _ = model(token_ids, positions, (None,) * model.config.num_layers, causal_attend())
        return model.logits(hidden)

    return jax.lax.map(run, token_ids)


LIKE_LLAMAS = "qwen2_dynamic", "qwen2_linear", "qwen2_longrope", "qwen2_yarn"  # the same kinds of positions


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LIKE_LLAMAS)) for n in NAMES])
def test_logits_without_a_cache(name):
    case = load(name)
    longest = max(map(len, case.sequences))
    # No token attends to the padding on its right.
    padded = [np.pad(sequence, (0, longest - len(sequence))) for sequence in case.sequences]
    ours = np.asarray(run_causal(*nnx.split(case.model), np.stack(padded)))
    assert ours.dtype == np.float32
    check_logits(case, np.concatenate([x[: len(y)] for x, y in zip(ours, case.sequences, strict=True)]))


@pytest.mark.sampled(1)
def test_logits_of_a_ragged_prefill(case):
    """The batch holds all sequences and padding, the cache held NaN, and the logits of all positions are compared."""
    block_size, lens = 8, np.array([len(sequence) for sequence in case.sequences], np.int32)
    num_tokens, num_padding = int(lens.sum()), 5
    blocks = allocator.create(40, block_size, len(lens), 8)
    blocks, _, _ = allocator.append_tokens(blocks, lens)
    query_start_loc = np.concatenate([[0], lens.cumsum()]).astype(np.int32)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lens])
    slots = allocator.slots(blocks, np.repeat(np.arange(len(lens), dtype=np.int32), lens), positions)

    def pad(values, value):
        return np.pad(values, (0, num_padding), constant_values=value)

    cache = loop.make_cache(case.config, 40, block_size, jnp.float32)
    caches = (jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), cache),) * case.config.num_layers
    graphdef, state = nnx.split(case.model)

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(state, caches, token_ids, positions, slot_mapping):
        model = nnx.merge(graphdef, state)
        attend = prefill_attend(blocks.block_tables, blocks.seq_lens, query_start_loc, slot_mapping)
        hidden, _ = model(token_ids, positions, caches, attend)
        return model.logits(hidden)

    token_ids = pad(np.concatenate(case.sequences), 0)
    logits = np.asarray(run(state, caches, token_ids, pad(positions, 0), pad(slots, -1)))[:num_tokens]
    check_logits(case, logits)


def paged_tokens(case, batches, block_size):
    """Runs one compiled program on batches of prompts; returns their greedy tokens, and why they ended."""
    programs = loop.make_programs(case.model)
    requests = [
        loop.make_request(
            prompts,
            max_new_tokens=case.tokens.shape[1],
            max_position_embeddings=case.config.max_position_embeddings,
        )
        for prompts in batches
    ]
    caches = [loop.make_caches(case.config, 40, block_size, jnp.float32) for _ in batches]
    # Models as small as these compile for longer than they run.
    generate = programs.generate.lower(programs.weights, caches[0], requests[0]).compile(
        {"xla_backend_optimization_level": 0}
    )
    for request, cache in zip(requests, caches, strict=True):
        yield from loop.outputs(generate(programs.weights, cache, request))


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("name", WITH_PROGRAMS[:-1])  # test_mesh.py and test_engine_latents.py run the last one
def test_greedy_tokens_of_a_batch(name):
    """Prompts of 3, 11, 16 and 21 tokens in blocks of 4 end within a block and at the end of one."""
    case = load(name)
    expected = [(tokens.tolist(), "length") for tokens in case.tokens]
    assert list(paged_tokens(case, [case.prompts], block_size=4)) == expected


@pytest.mark.slow_on_cpu
def test_the_command_line_runs_a_folder(capsys):
    """The prompts and answers of this model are short enough for its short list of factors."""
    name = "llama_longrope"
    found = reference(name)
    texts = ["".join(chr(31 + token) for token in prompt) for prompt in (found.prompts[3], found.tokens[3])]
    argv = [
        "--model",
        str(folder(name)),
        "--no-compilation-cache",
        f"--max-new-tokens={len(found.tokens[3])}",
        "--json",
    ]
    assert generate.main([*argv, f"--prompt={texts[0]}"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == texts[1]


@pytest.mark.slow_on_cpu
def test_a_decode_step_is_a_ragged_step_of_one_token_a_sequence():
    """Logits and caches must be equal. The cache holds each prompt but its last token, and a row is padding.

    The ragged step has each row of logits several times, so that there are more of them than tokens.
    """
    case = load("deepseek_v2_lite")
    weights, step = make_step(case.model)
    lens = np.array([len(prompt) for prompt in case.prompts] + [0], np.int32)
    blocks = allocator.create(40, 8, len(lens), 8)
    blocks, _, _ = allocator.append_tokens(blocks, lens)
    cache = loop.make_cache(case.config, 40, 8, jnp.float32)
    ends = np.maximum(lens.cumsum() - 1, 0)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lens])
    rows = np.repeat(np.arange(len(lens), dtype=np.int32), lens)
    prompts = Batch(
        token_ids=np.concatenate(case.prompts),
        positions=positions,
        slot_mapping=np.asarray(allocator.slots(blocks, rows, positions)),
        block_tables=blocks.block_tables,
        seq_lens=blocks.seq_lens,
        query_start_loc=np.concatenate([[0], lens.cumsum()]).astype(np.int32),
        logit_rows=np.resize(ends, lens.sum() + len(lens)).astype(np.int32),
    )
    is_last = np.append(positions[1:] <= positions[:-1], True)
    assert is_last.sum() == len(case.prompts)
    run = jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})
    expected, full = run(weights, (cache,) * case.config.num_layers, prompts)
    without = replace(prompts, slot_mapping=np.where(is_last, -1, prompts.slot_mapping).astype(np.int32))
    _, caches = run(weights, (cache,) * case.config.num_layers, without)
    last = Batch(
        token_ids=np.append(prompts.token_ids[is_last], np.int32(0)),
        positions=np.append(positions[is_last], np.int32(0)),
        slot_mapping=np.append(prompts.slot_mapping[is_last], np.int32(-1)),
        block_tables=blocks.block_tables,
        seq_lens=blocks.seq_lens,
        is_decode=True,
    )
    logits, caches = run(weights, caches, last)

    def assert_close(actual, wanted):
        """The two sum in different orders. A change of each weight's last bit changes logits by a share of 5e-6."""
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())

    assert_close(logits[:-1], expected[: len(lens) - 1])
    np.testing.assert_array_equal(expected, np.resize(expected[: len(lens)], expected.shape))
    jax.tree.map(assert_close, caches, full)


@pytest.mark.parametrize("is_decode", [True, False])
def test_a_step_on_a_gpu_reads_each_matrix_once_and_as_it_lies(is_decode):
    """There are four products in each layer and one for the logits; no weight is transposed, cast or joined before."""
    config = replace(load_config(folder("llama")), vocab_size=97, tie_embeddings=False)
    weights, step = make_abstract_step(config, jnp.bfloat16, implementation="xla")
    caches = jax.eval_shape(lambda: loop.make_caches(config, 40, 8, jnp.bfloat16))
    batch = Batch(*(np.zeros(n, np.int32) for n in (3, 3, 3, (3, 5), 3, 4, 3)), is_decode=is_decode)
    lowered = jax.jit(step).trace(weights, caches, batch).lower(lowering_platforms=("cuda",)).as_text()
    matrices = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(weights) if path[-1].key == "kernel"]
    assert len(matrices) == 4 * config.num_layers + 1
    for shape in {leaf.shape for leaf in matrices}:
        tensor_type = f"tensor<{'x'.join(map(str, shape))}xbf16>"
        uses = [line for line in lowered.splitlines() if f"{tensor_type}," in line and " = stablehlo." in line]
        uses += [line for line in lowered.splitlines() if f"{tensor_type})" in line and " = stablehlo." in line]
        assert len(uses) == sum(leaf.shape == shape for leaf in matrices), uses
        assert all("stablehlo.dot_general" in line for line in uses)


def test_one_token_is_computed_beside_a_row_of_padding():
    """Every product in the layers has two rows, and attention gets one."""
    config = replace(load_config(folder("llama")), tie_embeddings=False)
    weights, step = make_abstract_step(config, jnp.bfloat16, implementation="xla")
    caches = jax.eval_shape(lambda: loop.make_caches(config, 40, 8, jnp.bfloat16))
    batch = Batch(*(np.zeros(n, np.int32) for n in (1, 1, 1, (1, 5), 1)), is_decode=True)
    logits, _ = jax.eval_shape(step, weights, caches, batch)
    assert logits.shape == (1, config.vocab_size)
    products = [eqn for eqn in jax.make_jaxpr(step)(weights, caches, batch).eqns if eqn.primitive.name == "dot_general"]
    assert [eqn.invars[0].aval.shape[0] for eqn in products] == [2] * (4 * config.num_layers) + [1]


KEPT_IN_BFLOAT16 = ["deepseek_v3", "gemma2", "gpt_oss", "granite", "olmo2", "opt_post_norm"]


def products_of(jaxpr):
    """The products of matrices in a program and in the functions that it calls."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("dot_general", "ragged_dot_general"):
            yield eqn
        for inner in eqn.params.values():
            if hasattr(inner, "jaxpr"):
                yield from products_of(inner.jaxpr)


@pytest.mark.parametrize("name", KEPT_IN_BFLOAT16)
def test_a_model_of_bfloat16_computes_in_it(name):
    """The residual stream, what `attend` gets, and the factors of all products; but sinks and logits are float32."""
    config = parse_config(reference(name).config)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)))
    given = []

    def attend(query, key, value, cache, *, sinks=None, value_size=None, **_):
        given.append({x.dtype for x in (query, key, value) if x is not None})
        assert sinks is None or sinks.dtype == jnp.float32
        return query[..., :value_size], cache

    def run(state, ids):
        model = nnx.merge(graphdef, state)
        hidden, _ = model(ids, ids, (None,) * config.num_layers, attend)
        return hidden, model.logits(hidden)

    program = jax.make_jaxpr(run)(state, np.zeros(3, np.int32))
    assert [out.dtype for out in program.out_avals] == [jnp.bfloat16, jnp.float32]
    assert given == [{jnp.dtype(jnp.bfloat16)}] * config.num_layers
    *products, last = products_of(program.jaxpr)
    assert {x.aval.dtype for eqn in (*products, last) for x in eqn.invars[:2]} == {jnp.dtype(jnp.bfloat16)}
    assert last.outvars[0].aval == jax.core.ShapedArray((3, config.vocab_size), jnp.float32), "logits are not rounded"


def test_the_norm_is_flax_s():
    x = 3 * jax.random.normal(jax.random.key(0), (5, 48), jnp.bfloat16)
    norm, flax = (
        norm(48, epsilon=1e-5, dtype=jnp.float32, param_dtype=jnp.bfloat16, use_fast_variance=False, rngs=nnx.Rngs(0))
        for norm in (RMSNorm, nnx.RMSNorm)
    )
    norm.scale = flax.scale = nnx.Param(jax.random.normal(jax.random.key(1), (48,), jnp.bfloat16))
    assert norm(x).dtype == jnp.float32
    np.testing.assert_allclose(norm(x), flax(x), rtol=1e-6)


@pytest.mark.parametrize(
    ("num_tokens", "has_options"), [(1, False), (64, True), (128, True), (256, True), (2048, True)]
)
def test_xla_knows_the_options(num_tokens, has_options):
    """XLA refuses to compile with an option that it does not know."""
    options = xla_options(num_tokens)
    assert bool(options) == has_options
    assert jax.jit(jnp.negative, compiler_options=options)(1.0) == -1


@pytest.mark.slow_on_cpu
def test_xla_takes_the_options_for_all_reduces(tmp_path):
    """A list of XLA's can be emptied and another one replaced, for one program."""
    code = """if True:
        import jax, jax.numpy as jnp
        from examples.sharding import all_reduce_options, make_mesh
        weights = {"embed_tokens": {"embedding": jax.ShapeDtypeStruct((1 << 20, 1 << 10), jnp.bfloat16)}}
        options = all_reduce_options(weights, make_mesh({"dp": 1, "tp": 2}))
        jax.jit(lambda x: -x, compiler_options=options)(1.0)"""
    flags = f"--xla_force_host_platform_device_count=2 --xla_dump_to={tmp_path}"
    flags += " --xla_gpu_experimental_use_collective_kernels=ALL_GATHER"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=600)
    options = "".join(path.read_text() for path in tmp_path.glob("*lambda*debug_options"))
    assert "xla_gpu_enable_command_buffer: COLLECTIVES" in options
    assert "use_collective_kernels" not in options
