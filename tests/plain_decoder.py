"""The decoder of examples/decoder.py in plain NumPy: every product and every norm is written out."""

from typing import Any

import numpy as np

from examples.config import DecoderConfig, ExpertsConfig, LayerConfig
from examples.rope import Rope

type Weights = dict[str, Any]


def logits_of(config: DecoderConfig, weights: Weights, ids: np.ndarray) -> np.ndarray:
    """Gives the logits that follow each token of one text, in float64."""
    hidden = weights["embed_tokens"]["embedding"][ids] * config.embedding_scale
    if "project_in" in weights:
        hidden = linear(weights["project_in"], hidden)
    if config.has_learned_positions:
        hidden = hidden + weights["embed_positions"]["embedding"][2 : 2 + len(ids)]
    for number, layer in enumerate(config.layers):
        hidden = layer_of(config, layer, weights["layers"][number], hidden)
    if config.final_norm:
        hidden = norm(config, weights["final_norm"], hidden)
    if "project_out" in weights:
        hidden = linear(weights["project_out"], hidden)
    head = weights["embed_tokens"]["embedding"].T if config.tie_embeddings else weights["lm_head"]["kernel"]
    logits = hidden @ head * config.logits_scale
    cap = config.logits_soft_cap
    return logits if cap is None else cap * np.tanh(logits / cap)


def layer_of(config: DecoderConfig, layer: LayerConfig, weights: Weights, hidden: np.ndarray) -> np.ndarray:
    """Attention and MLP, each with its norms and its residual."""
    attend = attention if config.latent is None else latent_attention
    mixes = layer.has_experts and config.experts is not None
    for name, block in (("attention", attend), ("mlp", mixture if mixes else mlp)):
        is_first = config.norm_place in ("before", "around")
        out = block(config, layer, weights[name], norm(config, weights[f"{name}_norm"], hidden) if is_first else hidden)
        if config.norm_place in ("after", "around"):
            out = norm(config, weights[f"{name}_out_norm"], out)
        hidden = hidden + out * config.residual_scale
        if config.norm_place == "after_sum":
            hidden = norm(config, weights[f"{name}_norm"], hidden)
    return hidden


def linear(weights: Weights, x: np.ndarray) -> np.ndarray:
    return x @ weights["kernel"] + weights.get("bias", 0)


def norm(config: DecoderConfig, weights: Weights, x: np.ndarray, eps: float | None = None) -> np.ndarray:
    """LayerNorm or RMSNorm of the last axis."""
    eps = config.norm_eps if eps is None else eps
    if config.norm == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return x * (weights["scale"] + config.norm_offset) + weights.get("bias", 0)


def rotated(rope: Rope | None, heads: np.ndarray) -> np.ndarray:
    """Turns each pair of the first numbers of `heads`, `[num_tokens, num_heads, size]`, by its angle."""
    if rope is None:
        return heads
    out, size = heads.copy(), rope.size or heads.shape[2]
    for pair in range(size // 2):
        first, second = (2 * pair, 2 * pair + 1) if rope.is_interleaved else (pair, pair + size // 2)
        for position in range(len(heads)):
            angle = position * rope.theta ** (-2 * pair / size)
            x, y = heads[position, :, first], heads[position, :, second]
            out[position, :, first] = x * np.cos(angle) - y * np.sin(angle)
            out[position, :, second] = x * np.sin(angle) + y * np.cos(angle)
    return out


def attended(config: DecoderConfig, layer: LayerConfig, scale: float, query, key, value, sinks=None) -> np.ndarray:
    """Sums the values that each head of each token sees, `[num_tokens, num_heads * value_size]`."""
    num_tokens, num_heads, _ = query.shape
    out = np.zeros((num_tokens, num_heads, value.shape[2]))
    for token, head in np.ndindex(num_tokens, num_heads):
        first = 0 if layer.sliding_window is None else max(token + 1 - layer.sliding_window, 0)
        kv_head = head * key.shape[1] // num_heads
        logits = scale * key[first : token + 1, kv_head] @ query[token, head]
        if (cap := config.attention_soft_cap) is not None:
            logits = cap * np.tanh(logits / cap)
        weights = np.exp(logits)
        total = weights.sum() + (0 if sinks is None else np.exp(sinks[head]))
        out[token, head] = weights @ value[first : token + 1, kv_head] / total
    return out.reshape(num_tokens, -1)


def attention(config: DecoderConfig, layer: LayerConfig, weights: Weights, x: np.ndarray) -> np.ndarray:
    """Grouped-query attention."""
    sizes = np.array([config.num_heads, config.num_kv_heads, config.num_kv_heads]) * config.head_size
    parts = dict(zip("qkv", np.split(linear(weights["qkv_proj"], x), sizes.cumsum()[:2], axis=1), strict=True))
    heads = {name: part.reshape(len(x), -1, config.head_size) for name, part in parts.items()}
    for name in "qk":
        if config.qk_norm == "head":
            heads[name] = norm(config, weights[f"{name}_norm"], heads[name])
        elif config.qk_norm == "all":
            heads[name] = norm(config, weights[f"{name}_norm"], parts[name]).reshape(heads[name].shape)
        heads[name] = rotated(layer.rope, heads[name])
    scale = config.attention_scale or config.head_size**-0.5
    return linear(weights["o_proj"], attended(config, layer, scale, *heads.values(), weights.get("sinks")))


def latent_attention(config: DecoderConfig, layer: LayerConfig, weights: Weights, x: np.ndarray) -> np.ndarray:
    """Multi-head latent attention with the keys and values of every head, which decoder.py never computes."""
    sizes = config.latent
    assert sizes is not None
    if sizes.query_rank is None:
        query = linear(weights["q_proj"], x)
    else:
        query = linear(weights["q_b_proj"], norm(config, weights["q_a_norm"], linear(weights["q_a_proj"], x), 1e-6))
    query = query.reshape(len(x), config.num_heads, -1)
    query = np.concatenate([query[..., : sizes.nope_size], rotated(layer.rope, query[..., sizes.nope_size :])], axis=2)
    both = linear(weights["kv_a_proj"], x)
    compressed = norm(config, weights["kv_a_norm"], both[:, : sizes.kv_rank], 1e-6)
    shared = rotated(layer.rope, both[:, None, sizes.kv_rank :]).repeat(config.num_heads, axis=1)
    key = np.concatenate([np.einsum("tr,hnr->thn", compressed, weights["k_up"]), shared], axis=2)
    value = np.einsum("tr,hvr->thv", compressed, weights["v_up"])
    scale = config.attention_scale or (sizes.nope_size + sizes.rope_size) ** -0.5
    return linear(weights["o_proj"], attended(config, layer, scale, query, key, value))


def mlp(config: DecoderConfig, layer: LayerConfig, weights: Weights, x: np.ndarray) -> np.ndarray:
    """Two matrices with a ReLU between them, or a gated unit."""
    if config.activation == "relu":
        return linear(weights["down_proj"], np.maximum(linear(weights["up_proj"], x), 0))
    gate, up = np.split(linear(weights["gate_up_proj"], x), 2, axis=1)
    return linear(weights["down_proj"], activated(config, gate) * up)


def activated(config: DecoderConfig, x: np.ndarray) -> np.ndarray:
    if config.activation == "silu":
        return x / (1 + np.exp(-x))
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def mixture(config: DecoderConfig, layer: LayerConfig, weights: Weights, x: np.ndarray) -> np.ndarray:
    """A mixture of experts, one token and one expert at a time."""
    experts, parts = config.experts, weights["experts"]
    assert experts is not None
    out = mlp(config, layer, weights["shared"], x) if experts.shared_size else np.zeros_like(x)
    for token, row in enumerate(x):
        logits, correction = linear(weights["router"], row), weights["router"].get("correction", 0)
        for expert, factor in zip(*routed(experts, logits, correction), strict=True):
            gate, up = np.split(parts["gate_up"][expert] @ row + parts.get("gate_up_bias", {expert: 0})[expert], 2)
            inner = up * gate / (1 + np.exp(-gate))
            if (limit := experts.swiglu_limit) is not None:
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
                inner = (up + 1) * gate / (1 + np.exp(-experts.swiglu_alpha * gate))
            out[token] += factor * (parts["down"][expert] @ inner + parts.get("down_bias", {expert: 0})[expert])
    return out


def routed(config: ExpertsConfig, logits: np.ndarray, correction: Any) -> tuple[np.ndarray, np.ndarray]:
    """A token's experts and their weights."""
    softmax = np.exp(logits) / np.exp(logits).sum()
    scores = 1 / (1 + np.exp(-logits)) if config.scores == "sigmoid" else softmax
    ranked = scores + correction
    groups = np.sort(ranked.reshape(config.num_groups, -1))
    of_groups = groups[:, -1] if config.group_score == "best" else groups[:, -2:].sum(axis=1)
    best = np.argsort(-of_groups)[: config.num_chosen_groups]
    is_in_best = np.isin(np.arange(config.num_groups), best).repeat(groups.shape[1])
    experts = np.argsort(np.where(is_in_best, -ranked, np.inf))[: config.num_chosen]
    weights = scores[experts]
    if config.are_normalized or config.scores == "chosen":
        weights = weights / weights.sum()
    return experts, weights * config.scale
