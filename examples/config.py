"""The `DecoderConfig` that decoder.py takes: everything in which the supported models differ, as data.

families.py reads it from the config.json of a model folder.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from examples.rope import Rope

type Split = Literal["columns", "experts"]


class CheckpointError(ValueError):
    """Says why a model folder cannot be used, in one line that can be shown to users."""


@dataclass(frozen=True)
class LayerConfig:
    """The options in which layers may differ.

    Args:
        rope: rotary positions, or None for none.
        sliding_window: how many tokens a token sees, itself included, or None for all.
        has_experts: whether the MLP is a mixture of experts.
    """

    rope: Rope | None = None
    sliding_window: int | None = None
    has_experts: bool = False


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts: MLPs from which a router chooses some for each token.

    Args:
        num_experts: experts in a layer.
        num_chosen: experts that compute a token.
        intermediate_size: width inside an expert.
        scores: what the router makes of its logits: the "softmax" or the "sigmoid" over all experts, or the softmax
            over the logits of the "chosen" experts.
        are_normalized: whether the scores of a token's experts are divided by their sum.
        scale: a factor of the scores.
        num_groups, num_chosen_groups: the experts lie in groups; a token's experts come from the best groups only.
        group_score: a group's score is its "best" expert's, or the sum of its "best_two".
        has_correction: whether a learned number is added to each expert's score for the choice alone.
        has_bias: whether the router and the experts have biases.
        shared_size: width inside an MLP that computes every token beside the experts; 0 for none.
        swiglu_limit: if given, gates are cut off above it and the other half on both sides of it, as in gpt-oss, which
            also adds 1 to that half and multiplies gates by `swiglu_alpha` in the sigmoid.
        split: what a mesh's devices share out: the "columns" of every expert, or the "experts".
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    scores: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    are_normalized: bool = False
    scale: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: Literal["best", "best_two"] = "best"
    has_correction: bool = False
    has_bias: bool = False
    shared_size: int = 0
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.0
    split: Split = "columns"


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek): the cache holds one compressed vector for each token.

    Args:
        query_rank: width of the compressed queries, or None if queries are not compressed.
        kv_rank: width of the compressed keys and values.
        nope_size: numbers of a head's query and key that are not rotated.
        rope_size: numbers that are; all heads share the key's.
        value_size: numbers of a head's value.
    """

    query_rank: int | None
    kv_rank: int
    nope_size: int
    rope_size: int
    value_size: int


@dataclass(frozen=True)
class DecoderConfig:
    """Everything in which the supported decoders differ.

    Args:
        family: a key of names.py, which knows what the tensors of a folder are called.
        vocab_size: tokens in the vocabulary.
        embedding_size: width of a token's embedding; projected to and from `hidden_size` where they differ.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP.
        num_heads, num_kv_heads, head_size: sizes of the attention.
        max_position_embeddings: positions the model can be used for; learned positions end there, RoPE does not.
        norm_eps: added to the variance in every norm.
        layers: what differs between layers.
        qkv_bias, o_bias, mlp_bias: whether these linear layers have a bias.
        tie_embeddings: whether the logits use the token embedding's matrix.
        norm: LayerNorm or RMSNorm.
        norm_offset: a constant that every norm adds to its scale.
        norm_place: whether a layer's norms stand "before" attention and MLP, "after" them (OLMo 2), "around" them
            (Gemma, GLM-4), or after each sum with the residual stream ("after_sum", OPT-350m).
        final_norm: whether there is one more norm before the logits.
        qk_norm: whether queries and keys are normed: each "head", or "all" heads together (OLMo 2).
        has_learned_positions: whether there is an embedding of positions (OPT).
        activation: the MLP's; an MLP with "relu" has two matrices, all others have a gate beside them.
        attention_scale: factor of the attention's logits; None for `head_size ** -0.5`.
        attention_soft_cap: bound of the attention's logits (tanh), or None.
        has_sinks: whether each head has a learned logit without a value (gpt-oss).
        embedding_scale: factor of the embeddings.
        residual_scale: factor of what attention and MLP add to the residual stream.
        logits_scale: factor of the logits.
        logits_soft_cap: bound of the logits (tanh), or None.
        experts: the layers' mixture of experts, or None.
        latent: multi-head latent attention in place of keys and values of each head, or None.
        num_parts: how many devices share each layer (sharding.py). Joined matrices hold one device's columns after the
            other's.
        num_shards: how many devices share the blocks of each cache.
    """

    family: str
    vocab_size: int
    embedding_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    norm_eps: float
    layers: tuple[LayerConfig, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False
    norm: Literal["layer", "rms"] = "rms"
    norm_offset: float = 0.0
    norm_place: Literal["before", "after", "around", "after_sum"] = "before"
    final_norm: bool = True
    qk_norm: Literal["head", "all"] | None = None
    has_learned_positions: bool = False
    activation: Literal["relu", "silu", "gelu_pytorch_tanh"] = "silu"
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    has_sinks: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    num_parts: int = 1
    num_shards: int = 1

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.layers)

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """Each layer's window, None for a layer that sees everything."""
        return tuple(layer.sliding_window for layer in self.layers)


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
