"""Reads a Hugging Face config.json into the `DecoderConfig` that decoder.py takes, or says why it cannot.

Each family of models is one short function, listed in `READERS`, which gives a config the meaning that transformers
gives it. Most families differ from Llama in few fields, so most readers call `read_base` and name the differences. A
reader must read every field that changes a number: what it leaves unread is refused by name. To add a family, write
its reader, name its tensors in names.py, and give tests/data/make_models.py a tiny config of it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from examples.common_fields import (
    alternating,
    head_size_of,
    layer_types_of,
    one_window,
    qwen_windows,
    read_base,
    read_rope,
    rope_of,
    typed_windows,
    with_experts,
)
from examples.config import (
    CheckpointError,
    DecoderConfig,
    ExpertsConfig,
    LayerConfig,
    read_json,
)
from examples.fields import Fields
from examples.latent_families import deepseek_v2, deepseek_v3
from examples.rope import Rope

# Flags that some files turn off although their families do not have them.
OFF = "attention_bias", "mlp_bias", "qkv_bias", "use_bidirectional_attention", "use_mrope", "use_sliding_window"


def load_config(folder: str | Path) -> DecoderConfig:
    """Reads `config.json` of a model folder, with the meaning that transformers gives it.

    Both shapes of the file are read: the one that transformers 5 writes (`rope_parameters`, `layer_types`), and the
    older one. Sizes must be in the file, except those for which transformers' default is the family's only value in
    use. Everything else that is left out has transformers' default.

    Args:
        folder: a folder in Hugging Face's format.

    Returns:
        The decoder's config.

    Raises:
        CheckpointError: the file is missing or broken, or asks for something that decoder.py does not have.
    """
    return parse_config(read_json(Path(folder) / "config.json"))


def parse_config(raw: dict[str, Any]) -> DecoderConfig:
    """Reads the object in a config.json; see `load_config`."""
    architectures = raw.get("architectures") or [str(raw.get("model_type"))]
    if not isinstance(architectures, list) or not isinstance(found := architectures[0], str):
        raise CheckpointError(f"config.json has architectures {architectures!r}; expected a list of names")
    names = {model_type: name for name, (model_type, _) in READERS.items()}
    if (name := names.get(found, found)) not in READERS:
        raise CheckpointError(f"architecture {found!r} is not supported; supported: {', '.join(READERS)}")
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        if (name, method) != ("GptOssForCausalLM", "mxfp4"):  # tensors.py widens these
            raise CheckpointError(f"quantized weights ({method}) are not supported; float32, float16, bfloat16 are")
    fields = Fields({key: value for key, value in raw.items() if key != "quantization_config"})
    config = READERS[name][1](fields)
    for key in OFF:
        if raw.get(key) is False:
            fields.ignore(key)
    fields.refuse_unread()
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads {config.num_heads} is no multiple of num_key_value_heads {config.num_kv_heads}"
        )
    return config


def _opt(fields: Fields) -> DecoderConfig:
    fields.only("activation_function", "relu")
    fields.only("layer_norm_elementwise_affine", True)
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if hidden_size % num_heads:
        raise CheckpointError(f"hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}")
    bias = fields.flag("enable_bias", True)
    is_before = fields.flag("do_layer_norm_before", True)
    return DecoderConfig(
        family="opt",
        vocab_size=fields.size("vocab_size"),
        embedding_size=fields.size("word_embed_proj_dim", hidden_size),
        hidden_size=hidden_size,
        intermediate_size=fields.size("ffn_dim"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=hidden_size // num_heads,
        max_position_embeddings=fields.size("max_position_embeddings", 2048),
        norm_eps=1e-5,
        layers=(LayerConfig(),) * fields.size("num_hidden_layers"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        norm="layer",
        norm_place="before" if is_before else "after_sum",
        final_norm=not fields.flag("_remove_final_layer_norm", False) and is_before,
        has_learned_positions=True,
        activation="relu",
    )


def _llama(fields: Fields) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    fields.only("rope_interleaved", False)  # SmolLM2's files have it
    fields.ignore("is_llama_config")
    return read_base(fields, "llama", qkv_bias=bias, o_bias=bias, mlp_bias=fields.flag("mlp_bias", False))


def _mistral(fields: Fields) -> DecoderConfig:
    windows = one_window(fields, fields.optional_size("sliding_window", 4096))
    return read_base(fields, "llama", windows=windows, num_kv_heads=8)


def _qwen2(fields: Fields) -> DecoderConfig:
    return read_base(fields, "llama", windows=qwen_windows(fields), num_kv_heads=32, qkv_bias=True)


def _qwen3(fields: Fields) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    return read_base(
        fields,
        "llama",
        windows=qwen_windows(fields),
        num_kv_heads=32,
        head_size=128,
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
    )


def _qwen3_moe(fields: Fields) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    is_windowed, window = fields.flag("use_sliding_window", False), fields.optional_size("sliding_window", 4096)
    fields.ignore("max_window_layers")
    fields.same("num_experts", "num_local_experts")
    experts = ExpertsConfig(
        fields.size("num_experts", 128),
        fields.size("num_experts_per_tok", 8),
        fields.size("moe_intermediate_size", 768),
        are_normalized=fields.flag("norm_topk_prob", False),
    )
    dense, step = fields.get("mlp_only_layers") or [], fields.size("decoder_sparse_step", 1)
    if not isinstance(dense, list):
        raise CheckpointError(f"config.json has mlp_only_layers {dense!r}; expected a list of layers")
    config = read_base(
        fields,
        "qwen3_moe",
        windows=one_window(fields, window if is_windowed else None),
        num_kv_heads=4,
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
    )
    return with_experts(config, experts, [i not in dense and (i + 1) % step == 0 for i in range(config.num_layers)])


def _mixtral(fields: Fields) -> DecoderConfig:
    fields.same("num_local_experts", "num_experts")
    experts = ExpertsConfig(
        fields.size("num_local_experts", 8),
        fields.size("num_experts_per_tok", 2),
        fields.size("intermediate_size"),
        are_normalized=True,
    )
    windows = one_window(fields, fields.optional_size("sliding_window"))
    rope = read_rope(fields, head_size_of(fields), theta=1e6)
    config = read_base(fields, "mixtral", windows=windows, rope=rope, num_kv_heads=8, norm_eps=1e-5)
    return with_experts(config, experts)


def _gpt_oss(fields: Fields) -> DecoderConfig:
    yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
    bias, window = fields.flag("attention_bias", True), fields.optional_size("sliding_window", 128)
    fields.same("num_local_experts", "num_experts")
    fields.ignore("initial_context_length", "experts_per_token")  # transformers reads neither
    experts = ExpertsConfig(
        fields.size("num_local_experts", 128),
        fields.size("num_experts_per_tok", 4),
        fields.size("intermediate_size"),
        scores="chosen",
        has_bias=True,
        swiglu_limit=fields.number("swiglu_limit", 7.0),
        swiglu_alpha=fields.number("swiglu_alpha", 1.702),
    )
    config = read_base(
        fields,
        "gpt_oss",
        windows=typed_windows(fields, window, alternating(fields, 2)),
        rope=read_rope(fields, fields.size("head_dim", 64), theta=150000.0, default=yarn),
        num_kv_heads=8,
        head_size=64,
        norm_eps=1e-5,
        qkv_bias=bias,
        o_bias=bias,
        has_sinks=True,
    )
    return with_experts(config, experts)


def _gemma2(fields: Fields) -> DecoderConfig:
    window = fields.optional_size("sliding_window", 4096)
    windows = typed_windows(fields, window, alternating(fields, 2))
    fields.ignore("hidden_act")  # transformers reads hidden_activation
    return _gemma(fields, windows, attention_soft_cap=fields.optional_number("attn_logit_softcapping", 50.0), cap=30.0)


def _gemma3(fields: Fields) -> DecoderConfig:
    fields.only("attn_logit_softcapping", None)
    window, pattern = fields.optional_size("sliding_window", 4096), fields.size("sliding_window_pattern", 6)
    fields.ignore("_sliding_window_pattern")
    windows = typed_windows(fields, window, alternating(fields, pattern))
    config = _gemma(fields, windows, rope=Rope(0.0), qk_norm="head", cap=None)
    ropes = _gemma3_ropes(fields, config.head_size)
    kinds = layer_types_of(fields, alternating(fields, pattern))
    layers = tuple(LayerConfig(ropes[kind], window) for kind, window in zip(kinds, windows, strict=True))
    return dataclasses.replace(config, layers=layers)


def _gemma(fields: Fields, windows: Sequence[int | None], *, cap: float | None, **different: Any) -> DecoderConfig:
    fields.only("use_bidirectional_attention", None, False)
    bias = fields.flag("attention_bias", False)
    return read_base(
        fields,
        "gemma",
        windows=windows,
        num_kv_heads=4,
        head_size=256,
        tie_embeddings=True,
        activation_field="hidden_activation",
        qkv_bias=bias,
        o_bias=bias,
        norm_offset=1.0,
        norm_place="around",
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=fields.size("hidden_size") ** 0.5,
        logits_soft_cap=fields.optional_number("final_logit_softcapping", cap),
        activation="gelu_pytorch_tanh",
        **different,
    )


def _gemma3_ropes(fields: Fields, head_size: int) -> dict[str, Rope]:
    """Windowed layers have a base of their own; a scaling in the older shape is for full layers alone."""
    found = fields.get("rope_parameters") or {}
    scaling = fields.get("rope_scaling") or {}
    kinds = {"full_attention": ("rope_theta", 1e6), "sliding_attention": ("rope_local_base_freq", 10000.0)}
    if not isinstance(found, dict) or not isinstance(scaling, dict) or found.keys() - kinds.keys():
        raise CheckpointError(f"config.json has rope parameters {found or scaling!r}; expected one set per layer type")
    ropes = {}
    for kind, (key, default) in kinds.items():
        theta = fields.number(key, default)
        inner = {"rope_theta": theta} | (found.get(kind) or {}) | (scaling if kind == "full_attention" else {})
        ropes[kind] = rope_of(Fields(inner), fields, head_size)
    return ropes


def _phi3(fields: Fields) -> DecoderConfig:
    head_size = head_size_of(fields)
    for key in ("rope_scaling", "rope_parameters"):  # the oldest files call longrope "su" or "yarn"
        if isinstance(rope := fields.raw.get(key), dict) and rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
            fields.raw[key] = rope | {"rope_type": "longrope"}
    fields.raw.setdefault("original_max_position_embeddings", 4096)
    return read_base(
        fields,
        "phi3",
        windows=one_window(fields, fields.optional_size("sliding_window")),
        rope=read_rope(fields, head_size, partial=1.0),
        norm_eps=1e-5,
    )


def _olmo2(fields: Fields) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    return read_base(fields, "olmo2", norm_eps=1e-5, norm_place="after", qk_norm="all", qkv_bias=bias, o_bias=bias)


def _smollm3(fields: Fields) -> DecoderConfig:
    bias, interval = fields.flag("attention_bias", False), fields.size("no_rope_layer_interval", 4)
    is_windowed, window = fields.flag("use_sliding_window", False), fields.optional_size("sliding_window")
    fields.ignore("max_window_layers")
    num_layers = fields.size("num_hidden_layers")
    rotated = fields.get("no_rope_layers")
    if rotated is None:
        rotated = [int((i + 1) % interval != 0) for i in range(num_layers)]
    if not isinstance(rotated, list) or len(rotated) != num_layers:
        raise CheckpointError(
            f"config.json has no_rope_layers {rotated!r}; expected one for each of {num_layers} layers"
        )
    kinds = ["sliding_attention" if is_windowed and window and not has else "full_attention" for has in rotated]
    config = read_base(
        fields,
        "llama",
        windows=typed_windows(fields, window if is_windowed else None, kinds),
        rope=read_rope(fields, head_size_of(fields), theta=2e6),
        num_kv_heads=4,
        tie_embeddings=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
    layers = zip(config.layers, rotated, strict=True)
    return dataclasses.replace(
        config, layers=tuple(layer if has else LayerConfig(None, layer.sliding_window) for layer, has in layers)
    )


def _granite(fields: Fields) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    return read_base(
        fields,
        "llama",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logits_scale=1 / fields.number("logits_scaling", 1.0),
    )


def _glm4(fields: Fields) -> DecoderConfig:
    head_size = fields.size("head_dim", 128)
    return read_base(
        fields,
        "glm4",
        rope=read_rope(fields, head_size, partial=0.5, is_interleaved=True),
        num_kv_heads=2,
        head_size=head_size,
        norm_eps=1.5625e-7,
        norm_place="around",
        qkv_bias=fields.flag("attention_bias", True),
    )


# The `architectures` that are supported, each with its `model_type`, which files without `architectures` must have.
READERS: dict[str, tuple[str, Callable[[Fields], DecoderConfig]]] = {
    "OPTForCausalLM": ("opt", _opt),
    "LlamaForCausalLM": ("llama", _llama),
    "MistralForCausalLM": ("mistral", _mistral),
    "Qwen2ForCausalLM": ("qwen2", _qwen2),
    "Qwen3ForCausalLM": ("qwen3", _qwen3),
    "Qwen3MoeForCausalLM": ("qwen3_moe", _qwen3_moe),
    "MixtralForCausalLM": ("mixtral", _mixtral),
    "GptOssForCausalLM": ("gpt_oss", _gpt_oss),
    "Gemma2ForCausalLM": ("gemma2", _gemma2),
    "Gemma3ForCausalLM": ("gemma3_text", _gemma3),
    "Phi3ForCausalLM": ("phi3", _phi3),
    "Olmo2ForCausalLM": ("olmo2", _olmo2),
    "SmolLM3ForCausalLM": ("smollm3", _smollm3),
    "GraniteForCausalLM": ("granite", _granite),
    "Glm4ForCausalLM": ("glm4", _glm4),
    "DeepseekV2ForCausalLM": ("deepseek_v2", deepseek_v2),
    "DeepseekV3ForCausalLM": ("deepseek_v3", deepseek_v3),
}
