"""Reads from a config.json what several families have in common: sizes, RoPE, and each layer's window."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from examples.config import CheckpointError, DecoderConfig, ExpertsConfig, LayerConfig
from examples.fields import Fields
from examples.rope import LinearScaling, Llama3Scaling, LongRopeScaling, Rope, YarnScaling

ROPE_TYPES = "default", "linear", "dynamic", "yarn", "llama3", "longrope"


def read_base(
    fields: Fields,
    family: str,
    *,
    windows: Sequence[int | None] | None = None,
    rope: Rope | None = None,
    num_kv_heads: int | None = None,
    head_size: int | None = None,
    norm_eps: float = 1e-6,
    tie_embeddings: bool = False,
    activation_field: str = "hidden_act",
    **different: Any,
) -> DecoderConfig:
    """Reads what Llama's descendants have in common.

    Args:
        fields: the config.json.
        family: see `DecoderConfig`.
        windows: each layer's window; None for full attention everywhere.
        rope: the rotation, if it is not Llama's.
        num_kv_heads, head_size, norm_eps, tie_embeddings: the family's defaults. Without one there are as many key
            heads as query heads, and heads share out the hidden size.
        activation_field: the field that names the MLP's activation.
        different: fields of `DecoderConfig` in which the family differs from Llama.
    """
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    head_size = fields.size("head_dim", head_size or hidden_size // num_heads)
    # A null stands for as many key heads as query heads; only a missing field has the family's default.
    kv_heads_default = num_heads if "num_key_value_heads" in fields else num_kv_heads or num_heads
    rope = rope or read_rope(fields, head_size)
    layers = tuple(LayerConfig(rope, window) for window in windows or one_window(fields, None))
    different.setdefault("activation", "silu")
    fields.only(activation_field, different["activation"])
    return DecoderConfig(
        **{
            "family": family,
            "vocab_size": fields.size("vocab_size"),
            "embedding_size": hidden_size,
            "hidden_size": hidden_size,
            "intermediate_size": fields.size("intermediate_size"),
            "num_heads": num_heads,
            "num_kv_heads": fields.size("num_key_value_heads", kv_heads_default),
            "head_size": head_size,
            "max_position_embeddings": fields.size("max_position_embeddings"),
            "norm_eps": fields.number("rms_norm_eps", norm_eps),
            "layers": layers,
            "tie_embeddings": fields.flag("tie_word_embeddings", tie_embeddings),
        }
        | different
    )


def with_experts(config: DecoderConfig, experts: ExpertsConfig, layers: Sequence[bool] | None = None) -> DecoderConfig:
    """Gives these layers, or all, a mixture of experts."""
    if experts.num_chosen > experts.num_experts:
        raise CheckpointError(f"a token cannot have {experts.num_chosen} of {experts.num_experts} experts")
    if experts.num_groups > 1:
        _check_groups(experts)
    marks = zip(config.layers, layers or (True,) * config.num_layers, strict=True)
    return dataclasses.replace(
        config,
        experts=experts,
        layers=tuple(dataclasses.replace(layer, has_experts=has) for layer, has in marks),
    )


def _check_groups(experts: ExpertsConfig) -> None:
    """Refuses groups of different sizes, and a choice of groups that have too few experts."""
    size, rest = divmod(experts.num_experts, experts.num_groups)
    if rest:
        raise CheckpointError(
            f"{experts.num_experts} experts cannot be in {experts.num_groups} groups of the same size"
        )
    if experts.group_score == "best_two" and size < 2:
        raise CheckpointError(f"a group's score is the sum of the best two of {size} experts in a group")
    if (best := experts.num_chosen_groups) > experts.num_groups:
        raise CheckpointError(f"a token cannot have experts of {best} of {experts.num_groups} groups")
    if experts.num_chosen > best * size:
        few = f"the {best * size} experts in {best} of {experts.num_groups} groups"
        raise CheckpointError(f"a token cannot have {experts.num_chosen} of {few}")


def read_rope(
    fields: Fields,
    head_size: int,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    is_interleaved: bool = False,
    default: dict[str, Any] | None = None,
) -> Rope:
    """Reads RoPE from transformers 5's `rope_parameters`, or from the older `rope_theta` and `rope_scaling`.

    Args:
        fields: the config.json.
        head_size: elements of a head; RoPE may rotate a part of them.
        theta: the family's base, if the file gives none.
        partial: the part of each head that is rotated if the file gives none; None if the family rotates all.
        is_interleaved: whether neighbours are a pair.
        default: the family's parameters, if the file gives none.
    """
    found = [fields.get("rope_scaling"), fields.get("rope_parameters")]
    rope = found[0] or found[1] or default or {}  # if both are given, transformers takes the first
    if not isinstance(rope, dict):
        raise CheckpointError(f"config.json has rope parameters {rope!r}; expected an object")
    if any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError(f"rope_parameters per layer type ({', '.join(rope)}) are not supported")
    outer = {key: fields.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    outer = {key: value for key, value in outer.items() if value is not None}
    inner = Fields({"rope_theta": theta} | outer | rope)
    return rope_of(inner, fields, head_size, partial=partial, is_interleaved=is_interleaved)


def rope_of(
    inner: Fields, fields: Fields, head_size: int, *, partial: float | None = None, is_interleaved: bool = False
) -> Rope:
    """Reads one set of rope parameters.

    Args:
        inner: the parameters.
        fields: the config.json around them, which may hold the trained context too.
        head_size, partial, is_interleaved: see `read_rope`.
    """
    size = head_size
    if partial is None:
        inner.only("partial_rotary_factor", 1.0, 1)
    else:
        size = int(head_size * inner.number("partial_rotary_factor", partial))
    if size % 2 or not 0 < size <= head_size:
        raise CheckpointError(f"RoPE cannot rotate {size} of a head's {head_size} numbers; expected an even part")
    rope_type = inner.get("rope_type", inner.get("type", "default"))
    inner.ignore("type")
    if rope_type not in ROPE_TYPES:
        raise CheckpointError(
            f"rope type {rope_type!r} is not supported; supported: {', '.join(map(repr, ROPE_TYPES))}"
        )
    longest = fields.size("max_position_embeddings")
    # Where a file gives the trained context twice, transformers takes the outer one.
    trained = inner.size("original_max_position_embeddings", longest)
    trained = fields.size("original_max_position_embeddings", trained)
    rope = Rope(inner.number("rope_theta"), None, None if size == head_size else size, is_interleaved)
    scaling = None
    if rope_type == "linear":
        scaling = LinearScaling(inner.number("factor"))
    elif rope_type == "dynamic":
        inner.number("factor")  # it has no effect up to `max_position_embeddings`, where the decoder ends
    elif rope_type == "llama3":
        scaling = Llama3Scaling(
            inner.number("factor"), inner.number("low_freq_factor"), inner.number("high_freq_factor"), trained
        )
    elif rope_type == "yarn":
        scaling = _yarn(inner, longest, trained)
    elif rope_type == "longrope":
        scaling = _longrope(inner, longest, trained, size)
    elif rope_type == "default":
        inner.ignore("factor")
    inner.refuse_unread(())
    return Rope(rope.theta, scaling, rope.size, is_interleaved)


def yarn_factor(factor: float, mscale: float = 1.0) -> float:
    """The factor by which YaRN multiplies queries and keys if positions are stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(inner: Fields, longest: int, trained: int) -> YarnScaling:
    factor = inner.optional_number("factor") or longest / trained
    mscale, mscale_all_dim = inner.optional_number("mscale"), inner.optional_number("mscale_all_dim")
    if (attention := inner.optional_number("attention_factor")) is None:
        attention = yarn_factor(factor)
        if mscale and mscale_all_dim:
            attention = yarn_factor(factor, mscale) / yarn_factor(factor, mscale_all_dim)
    return YarnScaling(
        factor,
        trained,
        attention,
        inner.optional_number("beta_fast") or 32.0,
        inner.optional_number("beta_slow") or 1.0,
        inner.flag("truncate", True),
    )


def _longrope(inner: Fields, longest: int, trained: int, size: int) -> LongRopeScaling:
    factor = inner.optional_number("factor") or longest / trained
    if (attention := inner.optional_number("attention_factor")) is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    short, long = inner.numbers("short_factor", size // 2), inner.numbers("long_factor", size // 2)
    return LongRopeScaling(short, long, trained, attention)


def head_size_of(fields: Fields) -> int:
    """Reads a head's size; without one, heads share out the hidden size."""
    return fields.size("head_dim", fields.size("hidden_size") // fields.size("num_attention_heads"))


def alternating(fields: Fields, period: int) -> list[str]:
    """Every layer has a window, except each `period`-th."""
    num_layers = fields.size("num_hidden_layers")
    return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)]


def layer_types_of(fields: Fields, default: list[str]) -> list[str]:
    """Reads `layer_types`: what kind of attention each layer has."""
    layer_types = fields.get("layer_types")
    if layer_types is None:
        return default
    if not isinstance(layer_types, list) or not all(isinstance(layer_type, str) for layer_type in layer_types):
        raise CheckpointError(f"config.json has layer_types {layer_types!r}; expected a list of names")
    if len(layer_types) != len(default):
        raise CheckpointError(f"layer_types has {len(layer_types)} entries for {len(default)} layers")
    return layer_types


def typed_windows(fields: Fields, window: int | None, default: list[str]) -> tuple[int | None, ...]:
    """Gives each layer's window where `layer_types` says which layers have it."""
    layer_types = layer_types_of(fields, default)
    kinds: dict[str, int | None] = {"full_attention": None}
    if window is not None:
        kinds["sliding_attention"] = window
    if unknown := set(layer_types) - set(kinds):
        raise CheckpointError(
            f"layer type {min(unknown)!r} is not supported here; supported: {', '.join(map(repr, kinds))}"
        )
    return tuple(kinds[layer_type] for layer_type in layer_types)


def one_window(fields: Fields, window: int | None) -> tuple[int | None, ...]:
    """Gives each layer the same window; `layer_types`, which transformers does not read here, must not disagree."""
    kind = "full_attention" if window is None else "sliding_attention"
    windows = (window,) * fields.size("num_hidden_layers")
    if typed_windows(fields, window, [kind] * len(windows)) != windows:
        raise CheckpointError("layer_types that mix windows are not supported in a model whose layers share one")
    return windows


def qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    """Qwen's layers from `max_window_layers` on have the window, unless `layer_types` says otherwise."""
    window, first = fields.optional_size("sliding_window", 4096), fields.count("max_window_layers", 28)
    if not fields.flag("use_sliding_window", False):
        window = None
    num_layers = fields.size("num_hidden_layers")
    kinds = ["full_attention" if window is None or i < first else "sliding_attention" for i in range(num_layers)]
    return typed_windows(fields, window, kinds)
