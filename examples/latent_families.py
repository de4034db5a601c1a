"""Readers of the families with multi-head latent attention, for families.py."""

import dataclasses
from typing import Any

from examples.common_fields import read_base, read_rope, with_experts, yarn_factor
from examples.config import DecoderConfig, ExpertsConfig, LatentConfig
from examples.fields import Fields
from examples.rope import YarnScaling


def deepseek_v2(fields: Fields) -> DecoderConfig:
    """Reads DeepSeek V2, whose first layers have no experts."""
    method = fields.only("topk_method", "greedy", "group_limited_greedy")
    fields.only("scoring_func", "softmax")
    fields.only("norm_topk_prob", False)
    fields.same("n_routed_experts", "num_experts")
    num_groups, num_chosen_groups = fields.optional_size("n_group"), fields.optional_size("topk_group")
    has_groups = method != "greedy" and num_groups is not None and num_chosen_groups is not None
    return _deepseek(
        fields,
        dense=fields.count("first_k_dense_replace", 0),
        mlp_bias=fields.flag("mlp_bias", False),
        num_experts=fields.size("n_routed_experts", 64),
        intermediate_size=fields.size("moe_intermediate_size", 1407),
        shared=fields.size("n_shared_experts", 2),
        scale=fields.number("routed_scaling_factor", 1.0),
        num_groups=num_groups if has_groups else 1,
        num_chosen_groups=num_chosen_groups if has_groups else 1,
    )


def deepseek_v3(fields: Fields) -> DecoderConfig:
    """Reads DeepSeek V3 and Kimi K2, which choose experts by groups and corrected scores."""
    fields.only("topk_method", "noaux_tc")
    fields.only("scoring_func", "sigmoid")
    fields.same("n_routed_experts", "num_local_experts")
    fields.ignore("num_nextn_predict_layers", "num_mtp_layers")
    return _deepseek(
        fields,
        dense=fields.count("first_k_dense_replace", 3),
        is_interleaved=fields.flag("rope_interleave", True),
        num_experts=fields.size("n_routed_experts", 256),
        intermediate_size=fields.size("moe_intermediate_size", 2048),
        shared=fields.size("n_shared_experts", 1),
        scores="sigmoid",
        are_normalized=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 2.5),
        num_groups=fields.size("n_group", 8),
        num_chosen_groups=fields.size("topk_group", 4),
        group_score="best_two",
        has_correction=True,
    )


def _deepseek(
    fields: Fields, *, dense: int, shared: int, mlp_bias: bool = False, is_interleaved: bool = True, **experts: Any
) -> DecoderConfig:
    fields.only("moe_layer_freq", 1)
    fields.ignore("head_dim", "qk_head_dim")
    bias = fields.flag("attention_bias", False)
    latent = LatentConfig(
        fields.optional_size("q_lora_rank", 1536),
        fields.size("kv_lora_rank", 512),
        fields.size("qk_nope_head_dim", 128),
        fields.size("qk_rope_head_dim", 64),
        fields.size("v_head_dim", 128),
    )
    rope = read_rope(fields, latent.rope_size, is_interleaved=is_interleaved)
    scale = (latent.nope_size + latent.rope_size) ** -0.5
    found = fields.raw.get("rope_scaling") or fields.raw.get("rope_parameters") or {}
    if isinstance(rope.scaling, YarnScaling) and (mscale := found.get("mscale_all_dim")):
        scale *= yarn_factor(rope.scaling.factor, mscale) ** 2
    config = read_base(
        fields,
        "deepseek",
        rope=rope,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=mlp_bias,
        attention_scale=scale,
        latent=latent,
    )
    config = dataclasses.replace(config, head_size=latent.rope_size, num_kv_heads=config.num_heads)
    chosen = fields.size("num_experts_per_tok", None if "scores" not in experts else 8)
    mixture = ExpertsConfig(num_chosen=chosen, shared_size=shared * experts["intermediate_size"], **experts)
    return with_experts(config, mixture, [i >= dense for i in range(config.num_layers)])
