"""Reads a Hugging Face config.json into the `DecoderConfig` that decoder.py takes, or says why it cannot."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

# The `architectures` that are supported, each with its `model_type`, which files without `architectures` must have.
MODEL_TYPES = {
    "OPTForCausalLM": "opt",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# What transformers assumes if a file leaves these fields out. A null in a file means as many key heads as query heads,
# or no window.
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
}


class CheckpointError(ValueError):
    """Says why a model folder cannot be used, in one line that can be shown to users."""


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling of RoPE: wavelengths longer than the trained context become `factor` times longer.

    Source: https://arxiv.org/abs/2407.21783, section 3.4, and the `rope_type: llama3` of transformers.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding over the whole head: its base, and its scaling or None."""

    theta: float
    scaling: Llama3Scaling | None = None


@dataclass(frozen=True)
class DecoderConfig:
    """Everything in which the supported decoders differ.

    Args:
        family: "opt" (LayerNorm, two-layer ReLU MLP) or "llama" (RMSNorm, SwiGLU).
        vocab_size: tokens in the vocabulary.
        embedding_size: width of a token's embedding; projected to and from `hidden_size` where they differ.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP.
        num_layers, num_heads, num_kv_heads, head_size: sizes of the attention.
        max_position_embeddings: positions the model was trained for; learned positions end there, RoPE does not.
        norm_eps: added to the variance in every norm.
        pre_norm: whether norms come before attention and MLP; in OPT-350m they come after.
        final_norm: whether there is one more norm before the logits.
        qk_norm: whether there is an RMSNorm of each head's query and key (Qwen3).
        qkv_bias, o_bias, mlp_bias: whether these linear layers have a bias.
        tie_embeddings: whether the logits use the token embedding's matrix.
        rope: rotary positions, or None for OPT's learned ones.
        sliding_windows: each layer's window in tokens, or None for full attention.
        num_parts: how many devices share each layer (sharding.py). Joined matrices hold one device's columns after the
            other's.
    """

    family: Literal["opt", "llama"]
    vocab_size: int
    embedding_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    norm_eps: float
    pre_norm: bool
    final_norm: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tie_embeddings: bool
    rope: Rope | None
    sliding_windows: tuple[int | None, ...]
    num_parts: int = 1


def load_config(folder: str | Path) -> DecoderConfig:
    """Reads `config.json` of a model folder, with the meaning that transformers gives it.

    Sizes must be in the file, except OPT's `max_position_embeddings` and `word_embed_proj_dim`, the number of key heads
    and `head_dim`. Everything else that is left out has transformers' default.

    Args:
        folder: a folder in Hugging Face's format.

    Returns:
        The decoder's config.

    Raises:
        CheckpointError: the file is missing or broken, or asks for something that decoder.py does not have.
    """
    raw = read_json(Path(folder) / "config.json")
    architectures = raw.get("architectures") or [str(raw.get("model_type"))]
    if not isinstance(architectures, list) or not isinstance(found := architectures[0], str):
        raise CheckpointError(f"config.json has architectures {architectures!r}; expected a list of names")
    model_type = MODEL_TYPES.get(found, found)
    if model_type not in MODEL_TYPES.values():
        raise CheckpointError(f"architecture {found!r} is not supported; supported: {', '.join(MODEL_TYPES)}")
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise CheckpointError(f"quantized weights ({method}) are not supported; float32, float16, bfloat16 are")
    raw = DEFAULTS.get(model_type, {}) | raw
    config = _opt(raw) if model_type == "opt" else _llama(raw, model_type)
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads {config.num_heads} is no multiple of num_key_value_heads {config.num_kv_heads}"
        )
    return config


def read_json(path: Path) -> dict[str, Any]:
    """Reads the object in a JSON file.

    Raises:
        CheckpointError: there is no such file, or it holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return content


def _opt(raw: dict[str, Any]) -> DecoderConfig:
    _only(raw, "activation_function", "relu")
    _only(raw, "layer_norm_elementwise_affine", True)
    hidden_size, num_heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
    if hidden_size % num_heads:
        raise CheckpointError(f"hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}")
    num_layers = _size(raw, "num_hidden_layers")
    bias = _flag(raw, "enable_bias", True)
    pre_norm = _flag(raw, "do_layer_norm_before", True)
    return DecoderConfig(
        family="opt",
        vocab_size=_size(raw, "vocab_size"),
        embedding_size=_size(raw, "word_embed_proj_dim", hidden_size),
        hidden_size=hidden_size,
        intermediate_size=_size(raw, "ffn_dim"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=hidden_size // num_heads,
        max_position_embeddings=_size(raw, "max_position_embeddings", 2048),
        norm_eps=1e-5,
        pre_norm=pre_norm,
        final_norm=pre_norm and not _flag(raw, "_remove_final_layer_norm", False),
        qk_norm=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        tie_embeddings=_flag(raw, "tie_word_embeddings", True),
        rope=None,
        sliding_windows=(None,) * num_layers,
    )


def _llama(raw: dict[str, Any], model_type: str) -> DecoderConfig:
    _only(raw, "hidden_act", "silu")
    hidden_size, num_heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
    num_layers = _size(raw, "num_hidden_layers")
    # Qwen2 always has biases on q, k and v; Mistral's config cannot ask for any.
    attention_bias = model_type in ("llama", "qwen3") and _flag(raw, "attention_bias", False)
    return DecoderConfig(
        family="llama",
        vocab_size=_size(raw, "vocab_size"),
        embedding_size=hidden_size,
        hidden_size=hidden_size,
        intermediate_size=_size(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_size(raw, "num_key_value_heads", num_heads),
        head_size=_size(raw, "head_dim", hidden_size // num_heads),
        max_position_embeddings=_size(raw, "max_position_embeddings"),
        norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        pre_norm=True,
        final_norm=True,
        qk_norm=model_type == "qwen3",
        qkv_bias=attention_bias or model_type == "qwen2",
        o_bias=attention_bias,
        mlp_bias=model_type == "llama" and _flag(raw, "mlp_bias", False),
        tie_embeddings=_flag(raw, "tie_word_embeddings", False),
        rope=_rope(raw),
        sliding_windows=_sliding_windows(raw, model_type, num_layers),
    )


def _rope(raw: dict[str, Any]) -> Rope:
    """Reads RoPE from transformers 5's `rope_parameters`, or from the older `rope_theta` and `rope_scaling`."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}  # if both are given, transformers takes this one
    if not isinstance(rope, dict):
        raise CheckpointError(f"config.json has rope parameters {rope!r}; expected an object")
    if any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError(f"rope_parameters per layer type ({', '.join(rope)}) are not supported")
    outer = {key: raw[key] for key in ("rope_theta", "partial_rotary_factor") if raw.get(key) is not None}
    rope = {"rope_theta": 10000.0} | outer | rope
    _only(rope, "partial_rotary_factor", 1.0)
    theta = _number(rope, "rope_theta")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "default":
        return Rope(theta)
    if rope_type != "llama3":
        raise CheckpointError(f"rope type {rope_type!r} is not supported; supported: 'default', 'llama3'")
    factor, low, high = (_number(rope, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = _size(raw | rope, "original_max_position_embeddings", _size(raw, "max_position_embeddings"))
    return Rope(theta, Llama3Scaling(factor, low, high, trained))


def _sliding_windows(raw: dict[str, Any], model_type: str, num_layers: int) -> tuple[int | None, ...]:
    """Reads each layer's window: Mistral has one for all, Qwen `layer_types` or (in old files) `max_window_layers`."""
    window = None
    if model_type == "mistral" or (model_type.startswith("qwen") and _flag(raw, "use_sliding_window", False)):
        window = None if raw.get("sliding_window") is None else _size(raw, "sliding_window")
    first = raw.get("max_window_layers", 28) if model_type.startswith("qwen") else 0
    if type(first) is not int:
        raise CheckpointError(f"config.json has max_window_layers {first!r}; expected an integer")
    windows = tuple(window if layer >= first else None for layer in range(num_layers))

    layer_types = raw.get("layer_types")
    if layer_types is None:
        return windows
    if not isinstance(layer_types, list) or not all(isinstance(layer_type, str) for layer_type in layer_types):
        raise CheckpointError(f"config.json has layer_types {layer_types!r}; expected a list of names")
    if len(layer_types) != num_layers:
        raise CheckpointError(f"layer_types has {len(layer_types)} entries for {num_layers} layers")
    kinds: dict[str, int | None] = {"full_attention": None}
    if window is not None:
        kinds["sliding_attention"] = window
    if unknown := set(layer_types) - set(kinds):
        raise CheckpointError(
            f"layer type {min(unknown)!r} is not supported here; supported: {', '.join(map(repr, kinds))}"
        )
    typed = tuple(kinds[layer_type] for layer_type in layer_types)
    if not model_type.startswith("qwen") and typed != windows:
        raise CheckpointError(f"layer_types that mix windows are not supported in a {model_type} model")
    return typed


def _only(raw: dict[str, Any], key: str, supported: Any) -> None:
    if (found := raw.get(key, supported)) != supported:
        raise CheckpointError(f"{key} {found!r} is not supported; supported: {supported!r}")


def _size(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"config.json has no {key}")
    if type(value) is not int or not 0 < value < 2**31:
        raise CheckpointError(f"config.json has {key} {value!r}; expected a positive integer below 2**31")
    return value


def _flag(raw: dict[str, Any], key: str, default: bool) -> bool:
    if not isinstance(value := raw.get(key, default), bool):
        raise CheckpointError(f"config.json has {key} {value!r}; expected true or false")
    return value


def _number(raw: dict[str, Any], key: str, default: float | None = None) -> float:
    if (value := raw.get(key, default)) is None and key not in raw:
        raise CheckpointError(f"config.json has no {key}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise CheckpointError(f"config.json has {key} {value!r}; expected a positive, finite number")
    return float(value)
