"""Tests that the examples read config.json as transformers does, and refuse configs in one clear line."""

import json
import math

import pytest

from examples.checkpoint import CheckpointError
from examples.common_fields import read_rope
from examples.families import load_config, parse_config
from examples.fields import IGNORED, Fields
from examples.rope import LinearScaling, Llama3Scaling, LongRopeScaling, Rope, YarnScaling
from tests import model_folders
from tests.model_folders import copy as copy
from tests.model_folders import edit, refuse

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OLD = "original_max_position_embeddings"
MODELS = model_folders.NAMES
DEFAULTS = json.loads((model_folders.DATA / "real" / "defaults.json").read_text())
# Fields that transformers does not read in these models either, and fields that another field decides.
WITHOUT_EFFECT = {
    ("deepseek_v2", "head_dim"),
    ("deepseek_v2", "num_key_value_heads"),
    ("deepseek_v2", "qk_head_dim"),
    ("deepseek_v3", "head_dim"),
    ("deepseek_v3", "num_key_value_heads"),
    ("deepseek_v3", "num_nextn_predict_layers"),
    ("deepseek_v3", "qk_head_dim"),
    ("gemma3_text", "_sliding_window_pattern"),
    ("gemma2", "hidden_act"),
    ("gpt_oss", "experts_per_token"),
    ("gpt_oss", "initial_context_length"),
    ("phi3", "rope_parameters.original_max_position_embeddings"),
    ("qwen3_moe", "max_window_layers"),
}


@pytest.mark.parametrize("name", MODELS)
def test_older_files_mean_the_same(name):
    """tests/data/make_models.py has checked that they mean the same to transformers."""
    assert parse_config(model_folders.older(name)) == parse_config(model_folders.reference(name).config)


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_is_left_out_is_what_transformers_takes(name):
    """Sizes that every file has must be given; tests/data/make_defaults.py asked transformers for all others."""

    def outcome(config):
        try:
            return parse_config(config)
        except CheckpointError as error:
            return str(error)

    raw, refused = model_folders.reference(name).config, set()
    for field in raw.keys() - IGNORED:
        without = {key: value for key, value in raw.items() if key != field}
        if (found := outcome(without)) == f"config.json has no {field}":
            refused.add(field)
        elif field in DEFAULTS[name]:
            assert found == outcome(without | {field: DEFAULTS[name][field]}), field
    sizes = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"}
    sizes |= {"ffn_dim"} if raw["model_type"] == "opt" else {"intermediate_size", "max_position_embeddings"}
    assert refused == sizes | ({"num_experts_per_tok"} if raw["model_type"] == "deepseek_v2" else set())


@pytest.mark.parametrize(
    "flag",
    ["attention_bias", "mlp_bias", "qkv_bias", "use_bidirectional_attention", "use_mrope", "use_sliding_window"],
)
def test_what_a_family_does_not_have_may_be_turned_off(flag):
    raw = model_folders.reference("phi3").config
    assert parse_config(raw | {flag: False}) == parse_config(raw)
    with pytest.raises(CheckpointError, match=f"not supported here: {flag}"):
        parse_config(raw | {flag: True})


def test_a_file_without_a_base(copy):
    oldest = dict(rope_parameters=..., rope_scaling=dict(type="default"))  # without rope_theta it is 10000
    assert load_config(copy("mistral", **oldest)) == load_config(model_folders.folder("mistral"))


def changed(value):
    """Other values of a field's type. At least one of them should change what a model computes."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value / 2 if isinstance(value, float) else 2 * value + 2]
    if isinstance(value, list):
        return [[*value[:-1], other] for other in [*changed(value[-1]), 0]]
    return ["full_attention" if value == "sliding_attention" else "other"] if isinstance(value, str) else [3]


def variations(raw):
    """Files that differ in one field each, with the field's name; fields of rope parameters are fields too."""
    for field, value in raw.items():
        if isinstance(value, dict):
            yield from ((f"{field}.{inner}", raw | {field: other}) for inner, other in variations(value))
        else:
            yield from ((field, raw | {field: other}) for other in changed(value))


def test_no_field_is_without_effect():
    """Every field that is not ignored on purpose changes some model's config where it is changed, or is refused.

    A field that is read and then forgotten would have no effect in any file of its family.
    """
    effects: dict[tuple[str, str], bool] = {}
    for name in MODELS:
        for raw in (model_folders.reference(name).config, model_folders.older(name)):
            config = parse_config(raw)
            for field, other in variations(raw):
                try:
                    differs = parse_config(other) != config
                except CheckpointError:
                    differs = True
                key = raw["model_type"], field
                effects[key] = effects.get(key, False) or differs
    without = {key for key, differs in effects.items() if not differs and key[1] not in IGNORED}
    assert without == WITHOUT_EFFECT


YARN, LONG = {"rope_type": "yarn", OLD: 32}, {"rope_type": "longrope", OLD: 32}
LISTS = {"short_factor": [1.5, 2], "long_factor": [3, 4.5]}


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({}, None),
        ({"rope_type": "default", "factor": 3.0}, None),
        ({"rope_type": "dynamic", "factor": 3.0}, None),
        ({"rope_type": "linear", "factor": 3}, LinearScaling(3.0)),
        ({"rope_type": "llama3", OLD: 32} | LLAMA3, Llama3Scaling(8.0, 1.0, 4.0, 32)),
        (YARN, YarnScaling(4.0, 32, 0.1 * math.log(4) + 1, 32.0, 1.0, True)),
        (YARN | {"factor": 2.0}, YarnScaling(2.0, 32, 0.1 * math.log(2) + 1)),
        (YARN | {"factor": 0.5, "truncate": False}, YarnScaling(0.5, 32, 1.0, truncate=False)),
        (YARN | {"attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2}, YarnScaling(4.0, 32, 1.5, 16.0, 2.0)),
        (YARN | {"mscale": 2.0}, YarnScaling(4.0, 32, 0.1 * math.log(4) + 1)),
        (YARN | {"mscale_all_dim": 2.0}, YarnScaling(4.0, 32, 0.1 * math.log(4) + 1)),
        (
            YARN | {"mscale": 2.0, "mscale_all_dim": 0.5},
            YarnScaling(4.0, 32, (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
        ),
        (LONG | LISTS, LongRopeScaling((1.5, 2.0), (3.0, 4.5), 32, math.sqrt(1 + math.log(4) / math.log(32)))),
        (LONG | LISTS | {"factor": 1.0}, LongRopeScaling((1.5, 2.0), (3.0, 4.5), 32, 1.0)),
        (LONG | LISTS | {"attention_factor": 1.25}, LongRopeScaling((1.5, 2.0), (3.0, 4.5), 32, 1.25)),
    ],
)
def test_every_field_of_a_rope(rope, scaling):
    """A field that is left out has the default that transformers gives it, in `modeling_rope_utils`."""
    fields = Fields({"max_position_embeddings": 128, "rope_parameters": rope})
    assert read_rope(fields, 4) == Rope(10000.0, scaling)
    assert read_rope(fields, 4, theta=7.0, is_interleaved=True) == Rope(7.0, scaling, None, True)
    inner = rope | {"rope_theta": 5.0}
    assert read_rope(Fields(fields.raw | {"rope_parameters": inner}), 4, theta=7.0) == Rope(5.0, scaling)
    if "short_factor" not in rope:
        partly = Fields(fields.raw | {"rope_parameters": rope | {"partial_rotary_factor": 0.5}})
        assert read_rope(partly, 16, partial=1.0) == Rope(10000.0, scaling, 8)


def test_rope_scaling_goes_before_rope_parameters(copy):
    scaling = json.loads((model_folders.folder("llama") / "config.json").read_text())["rope_parameters"]
    both = dict(rope_parameters=dict(rope_type="default", rope_theta=5.0), rope_scaling=scaling)
    assert load_config(copy("llama", **both)) == load_config(model_folders.folder("llama"))


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [({OLD: 32}, {OLD: 16}, 16), ({}, {OLD: 16}, 16), ({OLD: 32}, {}, 32), ({}, {}, 128)],
)
def test_where_the_trained_context_is_found(inner, outer, expected, copy):
    rope = dict(rope_type="llama3", **LLAMA3, **inner)
    scaling = load_config(copy("llama", rope_parameters=rope, **outer)).layers[0].rope.scaling
    assert scaling.original_max_position_embeddings == expected


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("llama", {}, (None, None)),
        ("llama", {"layer_types": ["full_attention"] * 2}, (None, None)),
        ("mistral", {}, (6, 6)),
        ("mistral", {"sliding_window": None}, (None, None)),
        ("mistral", {"sliding_window": ...}, (4096, 4096)),
        ("qwen2", {}, (None, 9)),
        ("qwen2", {"layer_types": ..., "max_window_layers": 0}, (9, 9)),
        ("qwen2", {"layer_types": ..., "max_window_layers": ...}, (None, None)),
        ("qwen2", {"layer_types": ["sliding_attention", "full_attention"]}, (9, None)),
        ("qwen2", {"layer_types": ..., "use_sliding_window": False}, (None, None)),
        ("qwen3", {"sliding_window": 5}, (None, 5)),
        ("qwen3", {"sliding_window": 5, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, (5, 5)),
    ],
)
def test_sliding_windows(name, changes, expected, copy):
    assert tuple(layer.sliding_window for layer in load_config(copy(name, **changes)).layers) == expected


def test_other_config_fields(copy):
    assert load_config(model_folders.folder("opt_pre_norm")).final_norm
    assert (
        load_config(model_folders.folder("opt_pre_norm")).norm_eps == 1e-5
    )  # torch's default, which config.json does not name
    config = load_config(copy("mistral", rms_norm_eps=1e-3, num_key_value_heads=None))
    assert config.norm_eps == 1e-3
    assert config.num_kv_heads == config.num_heads != 8, "8 is what a mistral has where the field is missing"
    assert not load_config(model_folders.folder("opt_post_norm")).final_norm
    assert not load_config(copy("opt_pre_norm", _remove_final_layer_norm=True)).final_norm
    config = load_config(copy("llama", architectures=..., head_dim=None, num_key_value_heads=None))
    assert (config.head_size, config.num_kv_heads) == (8, 4)
    assert (
        load_config(copy("qwen2", num_key_value_heads=..., num_attention_heads=32, hidden_size=64)).num_kv_heads == 32
    )
    assert load_config(copy("qwen3", head_dim=...)).head_size == 128


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"architectures": ["FalconForCausalLM"]}, "'FalconForCausalLM' is not supported; supported: OPT"),
        ("llama", {"architectures": ..., "model_type": ...}, "architecture 'None' is not supported"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: 'silu'"),
        ("opt_pre_norm", {"activation_function": "gelu"}, "activation_function 'gelu' .*: 'relu'"),
        ("opt_pre_norm", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine False"),
        ("opt_pre_norm", {"num_attention_heads": 5}, "hidden_size 32 is no multiple of num_attention_heads 5"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ("llama", {"hidden_size": ...}, "config.json has no hidden_size"),
        ("llama", {"vocab_size": "96"}, "vocab_size '96'; expected a positive integer"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, r"quantized weights \(gptq\)"),
        ("llama", {"rope_parameters": {"rope_type": "axial"}}, "rope type 'axial' .*: 'default', 'linear'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mrope": [1]}}, "not supported here: mrope"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "short_factor None; expected 8 positive numbers"),
        ("glm4", {"rope_parameters": {"partial_rotary_factor": 2.0}}, "cannot rotate 32 of a head's 16 numbers"),
        ("llama", {"alibi": True, "clip_qkv": 8}, "fields that are not supported here: alibi, clip_qkv"),
        ("mixtral", {"num_experts": 5}, "num_local_experts 4 and num_experts 5, which are one"),
        ("mixtral", {"num_experts_per_tok": 5}, "a token cannot have 5 of 4 experts"),
        ("deepseek_v2", {"topk_group": 1}, "a token cannot have 3 of the 2 experts in 1 of 4 groups"),
        ("deepseek_v3", {"topk_group": 5}, "a token cannot have experts of 5 of 4 groups"),
        ("deepseek_v2", {"n_group": 5}, "8 experts cannot be in 5 groups of the same size"),
        ("deepseek_v3", {"n_group": 8, "topk_group": 8}, "the best two of 1 experts in a group"),
        ("gemma3", {"rope_parameters": {"rope_theta": 5.0}}, "expected one set per layer type"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers \[1\]; expected one for each of 3 layers"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers 3; expected a list"),
        ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "config.json has no factor"),
        ("llama", {"rope_parameters": {"full_attention": {}}}, r"per layer type \(full_attention\)"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ("mistral", {"sliding_window": 0}, "sliding_window 0; expected a positive integer"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types that mix"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ("qwen2", {"use_sliding_window": False}, "layer type 'sliding_attention' is not supported here"),
        ("llama", {"rope_scaling": {"type": "yarn_2"}}, "rope type 'yarn_2'"),
        ("llama", {"architectures": "LlamaForCausalLM"}, "architectures 'LlamaForCausalLM'; expected a list"),
        ("llama", {"architectures": [["a"]]}, "expected a list of names"),
        ("llama", {"quantization_config": "awq"}, r"quantized weights \(awq\)"),
        ("llama", {"rope_scaling": "linear"}, "rope parameters 'linear'; expected an object"),
        ("llama", {"rope_parameters": {"rope_theta": "x"}}, "rope_theta 'x'; expected a positive, finite number"),
        ("mistral", {"rope_parameters": ..., "rope_theta": 0}, "rope_theta 0; expected a positive"),
        ("mistral", {"rope_parameters": ..., "rope_theta": math.inf}, "rope_theta inf"),
        ("mistral", {"rope_parameters": ..., "rope_theta": 10**400}, "rope_theta 1000"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", **LLAMA3, "factor": "8"}}, "factor '8'; expected"),
        ("llama", {"rms_norm_eps": "a"}, "rms_norm_eps 'a'"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps None"),
        ("llama", {"num_key_value_heads": True}, "num_key_value_heads True; expected a positive integer"),
        ("llama", {"max_position_embeddings": 2**40}, "max_position_embeddings 1099511627776"),
        ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings 'false'; expected true or false"),
        ("opt_pre_norm", {"enable_bias": None}, "enable_bias None; expected true or false"),
        ("qwen2", {"max_window_layers": None}, "max_window_layers None; expected an integer"),
        ("qwen2", {"layer_types": [{}, {}]}, "layer_types .*; expected a list of names"),
        ("qwen2", {"layer_types": "full"}, "layer_types 'full'; expected a list of names"),
    ],
)
def test_refused_configs(name, changes, message, copy):
    refuse(copy(name, **changes), message)


@pytest.mark.parametrize("ids", ["2", 2.5, True, ["a"], 99999999999, -99999999999, [[1]]])
def test_refused_eos_token_ids(ids, copy):
    folder = copy("llama")
    edit(folder / "generation_config.json", {"eos_token_id": ids})
    refuse(folder, "generation_config.json has eos_token_id .*; expected token ids")
