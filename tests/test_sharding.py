"""Tests what examples/sharding.py decides, without devices: splits of configs, who adds up, XLA's options."""

import dataclasses
import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from examples import all_reduce, peer_memory
from examples.config import DecoderConfig, ExpertsConfig, LatentConfig, LayerConfig
from examples.decoder import Decoder
from examples.families import parse_config
from examples.rope import YarnScaling
from examples.sharding import (
    COMMANDS,
    MeshError,
    all_reduce_options,
    make_mesh,
    on_mesh,
    parse_mesh,
    peer_sum,
    sharding_of,
    split_config,
)
from paged_jax import PagedKVCache, PagedLatentCache
from tests.model_folders import reference

SIZES = dict(vocab_size=64, embedding_size=32, hidden_size=32, intermediate_size=48, num_heads=12, num_kv_heads=4)
CONFIG = DecoderConfig(
    "llama", **SIZES, head_size=8, max_position_embeddings=64, norm_eps=1e-5, layers=(LayerConfig(),)
)
EXPERTS = ExpertsConfig(num_experts=6, num_chosen=2, intermediate_size=8, shared_size=12)


def mesh_of(tp, dcp=1, platform="cpu", **different):
    """A mesh of made-up devices; one of them may be different."""
    how = {"platform": platform, "compute_capability": "9.0", "process_index": 0}
    devices = [SimpleNamespace(**how, local_hardware_id=i) for i in range(tp * dcp)]
    vars(devices[-1]).update(different)
    shape = {"dp": 1, "dcp": dcp, "tp": tp}
    return SimpleNamespace(shape=shape, size=tp * dcp, devices=np.array(devices).reshape(1, dcp, tp))


def test_a_config_over_a_mesh():
    for tp, dcp, num_kv_heads in ((1, 3, 4), (2, 1, 4), (4, 2, 4), (12, 5, 12)):
        expected = dataclasses.replace(CONFIG, num_parts=tp, num_shards=dcp, num_kv_heads=num_kv_heads)
        assert split_config(CONFIG, mesh_of(tp, dcp)) == expected
    assert split_config(CONFIG, None) is CONFIG


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({}, 5, "tp=5 does not divide the model's num_heads 12"),
        ({"intermediate_size": 47}, 2, "tp=2 does not divide the model's intermediate_size 47"),
        ({"experts": EXPERTS}, 6, "tp=6 does not divide the model's experts' width 8"),
        ({"experts": dataclasses.replace(EXPERTS, split="experts")}, 4, "the model's experts 6"),
        ({"experts": dataclasses.replace(EXPERTS, shared_size=6)}, 4, "the model's shared experts' width 6"),
        ({}, 3, "tp=3 neither divides the model's num_kv_heads 4 nor is a multiple"),
        ({}, 6, "tp=6 neither divides the model's num_kv_heads 4 nor is a multiple"),
        ({"qk_norm": "all"}, 12, "tp=12 is more than the model's num_kv_heads 4, which are normed together"),
    ],
)
def test_what_cannot_be_dealt_out(changes, tp, message):
    with pytest.raises(MeshError, match=message):
        split_config(dataclasses.replace(CONFIG, **changes), mesh_of(tp))


def test_a_mesh_in_words():
    assert parse_mesh("tp=2") == {"dp": 1, "dcp": 1, "tp": 2}
    assert parse_mesh("tp=999999,dp=3,dcp=4") == {"dp": 3, "dcp": 4, "tp": 999999}
    for wrong in ("tp=1000000", "tp=02", "tp=2;dp=2", "tp=2,,dp=2", "TP=2"):
        with pytest.raises(MeshError, match="a mesh is written as"):
            parse_mesh(wrong)


@pytest.mark.parametrize(
    ("mesh", "hidden_size", "dtype", "expected"),
    [
        (None, 1024, "bfloat16", "there is one device"),
        (mesh_of(1, 2), 1024, "bfloat16", "there is one device"),
        (mesh_of(2), 1024, "float16", "it takes bfloat16 rows of a multiple of 1024, got float16 of 1024"),
        (mesh_of(2), 1536, "bfloat16", "it takes bfloat16 rows of a multiple of 1024, got bfloat16 of 1536"),
        (mesh_of(2, 2), 1024, "bfloat16", "the mesh has another axis"),
        (mesh_of(2, compute_capability="10.0"), 1024, "bfloat16", "a device is no Hopper GPU"),
        (mesh_of(3, process_index=1), 1024, "bfloat16", "a process has some of several GPUs"),
        (mesh_of(2, process_index=1), 1024, "bfloat16", "only rows of 2048 here"),
        (mesh_of(2, process_index=1), 2048, "bfloat16", None),
        (mesh_of(2), 2048, "bfloat16", None),
        (mesh_of(4), 2048, "bfloat16", "no peer memory"),
    ],
)
def test_what_the_kernel_lacks(monkeypatch, mesh, hidden_size, dtype, expected):
    def of_processes(mesh, words, word):
        if words != 2 * 3 * 128 * 2048 // 2 + 128 or word != 0x80008000:
            raise peer_memory.PeerMemoryError("only rows of 2048 here")

    monkeypatch.setattr(peer_memory, "_reach_each_other", lambda ordinals: ordinals == (0, 1))
    monkeypatch.setattr(peer_memory, "of_processes", of_processes)
    assert all_reduce.lacks(mesh, hidden_size, dtype) == expected


def test_few_rows_are_split_where_they_can_be():
    """Products of eight rows are in four addends, if the depth can be split in four."""
    for rows, size, addends in ((8, 8, (4,)), (9, 8, ()), (8, 6, ())):
        x, kernel = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, size), (size, 16)))
        assert jax.eval_shape(all_reduce._product, x, kernel).shape == (*addends, rows, 16)
    most = 3 << 19  # bytes
    assert not all_reduce.by_owner(2, 64, most // 2 // 64 // 2)
    assert all_reduce.by_owner(2, 64, most // 2 // 64 // 2 + 1)


UNLIKE = [
    ({"norm": "layer"}, "other norms"),
    ({"norm_place": "after"}, "other norms"),
    ({"norm_offset": 1.0}, "other norms"),
    ({"final_norm": False}, "other norms"),
    ({"residual_scale": 0.5}, "a residual scale"),
    ({"o_bias": True}, "biases"),
    ({"mlp_bias": True}, "biases"),
    ({"latent": LatentConfig(None, 8, 4, 4, 4)}, "latent attention"),
    ({"layers": (LayerConfig(), LayerConfig(has_experts=True))}, "experts"),
]


def test_who_adds_up_decode_steps(monkeypatch, caplog):
    """XLA does, and the log says why, unless the kernel can and is wanted."""
    caplog.set_level(logging.INFO, "examples.sharding")
    lacking = []
    monkeypatch.setattr(all_reduce, "lacks", lambda mesh, hidden_size, dtype: lacking[0] if lacking else None)
    monkeypatch.setattr(all_reduce.PeerSum, "over", lambda mesh, hidden_size: ("peers", mesh.size, hidden_size))

    def ask(config=CONFIG, mesh=None, is_wanted=True):
        caplog.clear()
        found = peer_sum(config, jnp.bfloat16, mesh, is_wanted)
        return found, [(record.levelname, record.getMessage()) for record in caplog.records]

    gpus = {n: mesh_of(n, platform="gpu") for n in (1, 2, 4, 8)}
    assert ask() == ask(mesh=gpus[1]) == ask(mesh=gpus[2], is_wanted=False) == (None, [])
    assert ask(mesh=gpus[2]) == (("peers", 2, 32), [])
    assert ask(mesh=gpus[4]) == (("peers", 4, 32), [])
    assert ask(mesh=gpus[8]) == (("peers", 8, 32), [])
    why = "XLA reduces the decode steps: "
    for changes, word in UNLIKE:
        config = dataclasses.replace(CONFIG, **changes)
        assert ask(config, gpus[2]) == (None, [("WARNING", f"{why}the model has {word}")])
    both = dataclasses.replace(CONFIG, o_bias=True, residual_scale=2.0)
    assert ask(both, gpus[2])[1] == [("WARNING", why + "the model has a residual scale, biases")]
    lacking.append("it sleeps")
    assert ask(both, gpus[2]) == (None, [("WARNING", why + "it sleeps")])
    assert ask(mesh=mesh_of(2)) == (None, [("INFO", why + "it sleeps")])


def test_which_models_have_recorded_all_reduces():
    """Those that give each GPU 300 MiB or more to read for each sum: of embeddings, outputs, ways down and experts."""

    def weights(num_bytes):
        """Four sums; the rest of the bytes lies in a matrix that leaves none."""
        small = jax.ShapeDtypeStruct((1, 1), jnp.bfloat16)
        layer = {"attention": {"o_proj": {"kernel": small}}, "mlp": {"down_proj": {"kernel": small}}}
        other = {
            "mlp": {
                "experts": {"down": small},
                "gate_up_proj": {"kernel": jax.ShapeDtypeStruct((1, num_bytes // 2 - 4), jnp.bfloat16)},
            }
        }
        return {"embed_tokens": {"embedding": small}, "layers": {0: layer, 1: other}}

    least = 4 * (300 << 20) * 2
    recorded = {"xla_gpu_experimental_use_collective_kernels": "", "xla_gpu_enable_command_buffer": COMMANDS}
    assert all_reduce_options(weights(least), mesh_of(2)) == recorded
    assert all_reduce_options(weights(least - 2), mesh_of(2)) == {}
    assert all_reduce_options(weights(2 * least - 2), mesh_of(4)) == {}
    assert all_reduce_options(weights(least), mesh_of(1)) == all_reduce_options(weights(least), None) == {}
    assert COMMANDS.endswith(",COLLECTIVES")


def test_a_ramp_of_yarn_may_have_no_length():
    """Where all pairs turn less than once in the trained context, all but the first are slowed down."""
    frequencies, factor = YarnScaling(8.0, 6, 1.5).frequencies(100.0, 8, 48)
    np.testing.assert_allclose(frequencies, 100.0 ** -np.array([0, 0.25, 0.5, 0.75]) * [1, 1 / 8, 1 / 8, 1 / 8])
    assert factor == 1.5


WHOLE = {"embed_positions", "project_in", "project_out", "router", "kv_a_proj", "q_a_proj"}  # modules, beside norms


def split_axis(module, name):
    """The axis of a parameter that devices share out, None for a parameter that each of them has."""
    if module in WHOLE or module.endswith("norm") or (name == "bias" and module in ("o_proj", "down_proj")):
        return None
    if module == "experts":
        return {"gate_up": 1, "gate_up_bias": 1, "down": 2, "down_bias": None}[name]
    return 1 if name == "kernel" and module not in ("o_proj", "down_proj") else 0


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "gpt_oss", "llama", "opt_pre_norm", "opt_post_norm"])
def test_what_each_device_has_of_a_model(name):
    """Everything that is large is shared out, along the heads, the width of the MLP or the vocabulary."""
    config = parse_config(reference(name).config)
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    mesh = make_mesh({"tp": 2}, jax.devices("cpu"))
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        module = path[-2] if isinstance(path[-2], str) else path[-3]
        shape = tuple(2 * size for size in parameter.shape)
        spec = sharding_of(path, shape, mesh, config).spec
        axis = split_axis(module, path[-1])
        assert spec.index("tp") == axis if axis is not None else "tp" not in spec, path
        if axis is not None:
            uneven = tuple(size + (i == axis) for i, size in enumerate(shape))
            assert "tp" not in sharding_of(path, uneven, mesh, config).spec, "it cannot be dealt out"
    if config.experts is not None:
        by_experts = dataclasses.replace(config, experts=dataclasses.replace(config.experts, split="experts"))
        path = "layers", 1, "mlp", "experts", "down"
        assert sharding_of(path, (4, 8, 8), mesh, by_experts).spec == P("tp")


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (lambda: PagedLatentCache.create(4, 8, 32, dtype="int8", latent_scale=0.5), {3: (2, 8, 32), 0: ()}),
        (
            lambda: PagedKVCache.create(4, 8, 2, 16, dtype="int8", k_scale=np.ones(2), v_scale=np.ones(2)),
            {4: (2, 1, 8, 16), 1: (1,)},
        ),
    ],
    ids=["latents", "keys and values"],
)
def test_what_each_device_has_of_a_cache(make, shapes):
    mesh = make_mesh({"dcp": 2, "tp": 2}, jax.devices("cpu"))
    (cache,) = on_mesh(lambda: (make(),), mesh)
    found = [(x.ndim, x.addressable_shards[0].data.shape) for x in jax.tree.leaves(cache)]
    assert set(found) == set(shapes.items())


def test_a_model_without_a_mesh_is_on_the_default_device():
    first, second = jax.devices("cpu")[:2]
    assert sharding_of(("lm_head", "kernel"), (8, 8), None).device_set == {first}
    with jax.default_device(second):
        assert sharding_of(("lm_head", "kernel"), (8, 8), None).device_set == {second}
