"""Tests models over a mesh of CPU devices: they give the tokens of one device, and exchange nothing unneeded."""

import dataclasses
import logging
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples import checkpoint, generate, loop, tensors
from examples.families import load_config
from examples.sharding import MeshError, make_mesh, parse_mesh, replicas, split_config
from tests.model_folders import folder, reference, short

COLLECTIVE = re.compile(
    r"= \(?\w+\[([\d,]*)\]\S* "
    r"(all-gather|all-reduce|name-permute|all-to-all|reduce-scatter|name-broadcast)(?:-start)?\("
)


def load(name, tp):
    mesh = None if tp == 1 else make_mesh({"dp": 1, "tp": tp}, jax.devices("cpu"))
    model, config, _, _ = checkpoint.load_model(folder(name), jnp.float32, mesh)
    return model, config, mesh


def run(name, tp, prompts):
    """The tokens that a model writes, its compiled decode step, and its config."""
    model, config, mesh = load(name, tp)
    request = loop.make_request(prompts, max_new_tokens=8, max_position_embeddings=config.max_position_embeddings)
    programs = loop.make_programs(model)
    generation = programs.prefill(programs.weights, loop.make_caches(config, 512, 4, jnp.float32, mesh=mesh), request)
    decode = programs.decode.lower(programs.weights, generation, request).compile()
    while bool(loop.is_running(generation)):
        generation = decode(programs.weights, generation, request)
    return loop.outputs(generation), decode, config


# OPT ties its embeddings. llama has biases, and fewer kv heads than there are devices. DeepSeek splits the heads of its
# latent attention, and has shared experts.
@pytest.mark.slow_on_cpu
@pytest.mark.parametrize(
    ("name", "tp", "num_prompts"),
    [
        ("llama", 4, 2),
        pytest.param("opt_post_norm", 2, 1, marks=pytest.mark.slow),
        pytest.param("deepseek_v2_lite", 4, 2, marks=pytest.mark.slow),
    ],
)
def test_a_split_model_writes_the_same_tokens(name, tp, num_prompts):
    """They are transformers'."""
    found = reference(name)
    texts, decode, config = run(name, tp, found.prompts[:num_prompts])
    assert texts == [(tokens[:8], "length") for tokens in found.tokens[:num_prompts]]
    exchanged = [(name, shape) for shape, name in COLLECTIVE.findall(decode.as_text())]
    # One all-reduce for the embedding, one after each attention and one after each MLP; then the likeliest token of
    # each part of the vocabulary and its logit.
    # XLA may join the experts' all-reduce and the MLP's beside them.
    num_all_reduces = [name for name, _ in exchanged].count("all-reduce")
    has_shared = config.experts is not None and config.experts.shared_size > 0
    assert num_all_reduces == 1 + 2 * config.num_layers or (has_shared and num_all_reduces <= 2 + 2 * config.num_layers)
    others = [(name, math.prod(map(int, shape.split(",")))) for name, shape in exchanged if name != "all-reduce"]
    assert others == [("all-gather", num_prompts * tp)] * 2
    if config.latent is not None:  # every device has all latents
        return
    pool = 512 * config.num_kv_heads * 4 * config.head_size * 4 // tp
    assert decode.memory_analysis().temp_size_in_bytes < pool / 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize(("split", "num_tokens"), [("columns", 1), ("experts", 9)])
def test_devices_share_out_experts(name, split, num_tokens):
    """A layer's mixture on two devices is the mixture on one, for few pairs and for many."""
    config = load_config(folder(name))
    config = dataclasses.replace(config, experts=dataclasses.replace(config.experts, split=split))
    mesh = make_mesh({"dp": 1, "tp": 2}, jax.devices("cpu"))
    hidden = jax.random.normal(jax.random.key(0), (num_tokens, config.hidden_size))
    results = []
    for devices in (None, mesh):
        model = checkpoint.load_weights(folder(name), config, jnp.float32, devices)
        graphdef, state = nnx.split(model.layers[-1].mlp)
        run = jax.jit(lambda state, hidden, graphdef=graphdef: nnx.merge(graphdef, state)(hidden))
        results.append((run(state, hidden), state))
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-4, atol=1e-5)
    parameter = results[1][1]["experts"]["down"][...]
    axis = 0 if split == "experts" else 2
    assert {shard.data.shape[axis] for shard in parameter.addressable_shards} == {parameter.shape[axis] // 2}


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_every_device_reads_its_part_of_the_files_alone(name, monkeypatch):
    sizes = []
    read = tensors.Tensor.read

    def recording(tensor, *index):
        array = read(tensor, *index)
        sizes.append((array.size, int(np.prod(tensor.shape))))
        return array

    monkeypatch.setattr(tensors.Tensor, "read", recording)
    model, _, _ = load(name, 2)
    split = [part for part, whole in sizes if part < whole]
    assert max(part for part, whole in sizes if part == whole) < max(whole for _, whole in sizes)
    assert len(split) > len(sizes) / 2
    kernel = model.layers[0].attention.qkv_proj.kernel[...]
    assert {shard.data.shape[1] for shard in kernel.addressable_shards} == {kernel.shape[1] // 2}


def test_parts_of_joined_matrices_lie_with_their_heads():
    whole, config, _ = load("llama", 1)
    split, split_config, _ = load("llama", 4)
    assert (config.num_kv_heads, split_config.num_kv_heads) == (2, 4)
    d, columns = config.head_size, np.asarray(whole.layers[1].attention.qkv_proj.kernel[...])
    query, key, value = np.split(columns, [config.num_heads * d, (config.num_heads + config.num_kv_heads) * d], axis=1)
    parts = np.split(np.asarray(split.layers[1].attention.qkv_proj.kernel[...]), 4, axis=1)
    for i, part in enumerate(parts):
        heads = query[:, i * d : (i + 1) * d], key[:, i // 2 * d :][:, :d], value[:, i // 2 * d :][:, :d]
        np.testing.assert_array_equal(part, np.concatenate(heads, axis=1))


@pytest.mark.slow
def test_generate_over_a_mesh_of_several_copies(capsys, caplog, monkeypatch):
    """Two copies share out the prompts, and draw with different seeds; there is no prompt for a third."""
    seeds, make_request = [], loop.make_request
    monkeypatch.setattr(
        loop, "make_request", lambda *args, seed, **kw: seeds.append(seed) or make_request(*args, seed=seed, **kw)
    )
    caplog.set_level(logging.INFO, "examples.sharding")
    argv = ["--model", str(short("mistral")), "--no-compilation-cache", "--max-new-tokens=4", "--json"]
    argv += ["--kv-cache-dtype=int8", "--k-scale=0.01", "--v-scale=0.01", "--prompt=The for", "--prompt=A class is"]
    assert generate.main(argv) == 0
    wanted = capsys.readouterr().out
    assert generate.main([*argv, "--mesh=dp=3,tp=2"]) == 0
    assert seeds == [0, 0, 1]
    assert "XLA reduces the decode steps" in caplog.text  # CPUs lack the kernel
    assert capsys.readouterr().out == wanted


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize(
    ("name", "sizes"), [("llama", "dcp=2,tp=2"), pytest.param("deepseek_v2", "dcp=2", marks=pytest.mark.slow)]
)
def test_contexts_are_split_over_devices(name, sizes, capsys, caplog):
    """Prompts that fill several blocks, which lie on devices in turn. Nobody asks whether a kernel could reduce."""
    caplog.set_level(logging.INFO, "examples.sharding")
    argv = ["--model", str(short(name)), "--no-compilation-cache", "--max-new-tokens=12", "--json"]
    argv += ["--block-size=4", "--prompt=The for statement is a loop over", "--prompt=A class"]
    assert generate.main(argv) == 0
    wanted = capsys.readouterr().out
    assert generate.main([*argv, f"--mesh={sizes}", "--no-custom-all-reduce"]) == 0
    assert capsys.readouterr().out == wanted
    assert not caplog.records


def test_replicas_share_no_device():
    meshes = replicas(make_mesh(parse_mesh("dp=2,tp=4"), jax.devices("cpu")))
    devices = [device for mesh in meshes for device in mesh.devices.flat]
    assert [mesh.shape["tp"] for mesh in meshes] == [4, 4]
    assert len(set(devices)) == len(devices) == 8


@pytest.mark.parametrize("text", ["", "tp", "tp=0", "tp=-1", "ep=2", "tp=2,", "tp=two"])
def test_what_is_no_mesh(text):
    with pytest.raises(MeshError, match="a mesh is written as"):
        parse_mesh(text)


def test_what_a_model_cannot_be_split_over():
    with pytest.raises(MeshError, match="needs as many, there are"):
        make_mesh({"dp": 1, "tp": 1000})
    mesh = make_mesh({"dp": 1, "tp": 8}, jax.devices("cpu"))
    with pytest.raises(MeshError, match="tp=8 does not divide the model's num_heads 4"):
        split_config(load_config(folder("llama")), mesh)
