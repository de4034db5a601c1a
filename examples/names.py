"""The names of the tensors in a model folder: for each parameter of the decoder, the tensors that make it up."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from examples.config import DecoderConfig


class Source(NamedTuple):
    """Rows of a tensor in a folder, which are some or all of it.

    Attributes:
        name: the tensor's name.
        size: how many rows there are.
        start: the first of them in the tensor.
        step: from one row to the next in the tensor.
        expert: the index of one matrix in a tensor that holds all experts' matrices, `[num_experts, in, out]`, whose
            rows are its columns; None for a tensor `[rows, ...]`.
        rows: rows of the whole tensor; None if the sources of one parameter are all of it.
    """

    name: str
    size: int
    start: int = 0
    step: int = 1
    expert: int | None = None
    rows: int | None = None


# For each module of the decoder, the module in the folder that holds its weights, or several that lie side by side; *
# is the number of the layer.
LLAMA: dict[str, str | tuple[str, ...]] = {
    "embed_tokens": "model.embed_tokens",
    "layers.*.attention_norm": "model.layers.*.input_layernorm",
    "layers.*.attention": "model.layers.*.self_attn",
    "layers.*.attention.qkv_proj": (
        "model.layers.*.self_attn.q_proj",
        "model.layers.*.self_attn.k_proj",
        "model.layers.*.self_attn.v_proj",
    ),
    "layers.*.attention.o_proj": "model.layers.*.self_attn.o_proj",
    "layers.*.attention.q_norm": "model.layers.*.self_attn.q_norm",
    "layers.*.attention.k_norm": "model.layers.*.self_attn.k_norm",
    "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp.gate_up_proj": ("model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"),
    "layers.*.mlp.down_proj": "model.layers.*.mlp.down_proj",
    "layers.*.mlp.router": "model.layers.*.mlp.gate",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
}
FUSED_MLP = {"layers.*.mlp.gate_up_proj": "model.layers.*.mlp.gate_up_proj"}
MODULES: dict[str, dict[str, str | tuple[str, ...]]] = {
    "opt": {
        "embed_tokens": "model.decoder.embed_tokens",
        "embed_positions": "model.decoder.embed_positions",
        "project_in": "model.decoder.project_in",
        "project_out": "model.decoder.project_out",
        "layers.*.attention_norm": "model.decoder.layers.*.self_attn_layer_norm",
        "layers.*.attention.qkv_proj": (
            "model.decoder.layers.*.self_attn.q_proj",
            "model.decoder.layers.*.self_attn.k_proj",
            "model.decoder.layers.*.self_attn.v_proj",
        ),
        "layers.*.attention.o_proj": "model.decoder.layers.*.self_attn.out_proj",
        "layers.*.mlp_norm": "model.decoder.layers.*.final_layer_norm",
        "layers.*.mlp.up_proj": "model.decoder.layers.*.fc1",
        "layers.*.mlp.down_proj": "model.decoder.layers.*.fc2",
        "final_norm": "model.decoder.final_layer_norm",
        "lm_head": "lm_head",
    },
    "llama": LLAMA,
    "gemma": LLAMA
    | {
        "layers.*.attention_out_norm": "model.layers.*.post_attention_layernorm",
        "layers.*.mlp_norm": "model.layers.*.pre_feedforward_layernorm",
        "layers.*.mlp_out_norm": "model.layers.*.post_feedforward_layernorm",
    },
    "olmo2": LLAMA
    | {
        "layers.*.attention_out_norm": "model.layers.*.post_attention_layernorm",
        "layers.*.mlp_out_norm": "model.layers.*.post_feedforward_layernorm",
    },
    "glm4": LLAMA
    | FUSED_MLP
    | {
        "layers.*.attention_out_norm": "model.layers.*.post_self_attn_layernorm",
        "layers.*.mlp_out_norm": "model.layers.*.post_mlp_layernorm",
    },
    "phi3": LLAMA | FUSED_MLP | {"layers.*.attention.qkv_proj": "model.layers.*.self_attn.qkv_proj"},
    "qwen3_moe": LLAMA,
    "mixtral": LLAMA | {"layers.*.mlp.router": "model.layers.*.block_sparse_moe.gate"},
    "gpt_oss": LLAMA | {"layers.*.mlp.router": "model.layers.*.mlp.router"},
    "deepseek": LLAMA
    | {
        "layers.*.attention.q_proj": "model.layers.*.self_attn.q_proj",
        "layers.*.attention.q_a_proj": "model.layers.*.self_attn.q_a_proj",
        "layers.*.attention.q_a_norm": "model.layers.*.self_attn.q_a_layernorm",
        "layers.*.attention.q_b_proj": "model.layers.*.self_attn.q_b_proj",
        "layers.*.attention.kv_a_proj": "model.layers.*.self_attn.kv_a_proj_with_mqa",
        "layers.*.attention.kv_a_norm": "model.layers.*.self_attn.kv_a_layernorm",
        "layers.*.mlp.shared.gate_up_proj": (
            "model.layers.*.mlp.shared_experts.gate_proj",
            "model.layers.*.mlp.shared_experts.up_proj",
        ),
        "layers.*.mlp.shared.down_proj": "model.layers.*.mlp.shared_experts.down_proj",
    },
}
# The tensors of experts: one for each expert (* is the layer, # the expert) of gates, the other half, and the way down;
# or one for all experts, whose columns are gates and the other half by turns, and one for the way down.
EXPERTS: dict[str, tuple[str, ...]] = {
    "qwen3_moe": tuple(f"model.layers.*.mlp.experts.#.{name}_proj.weight" for name in ("gate", "up", "down")),
    "deepseek": tuple(f"model.layers.*.mlp.experts.#.{name}_proj.weight" for name in ("gate", "up", "down")),
    "mixtral": tuple(f"model.layers.*.block_sparse_moe.experts.#.{name}.weight" for name in ("w1", "w3", "w2")),
    "gpt_oss": ("model.layers.*.mlp.experts.gate_up_proj", "model.layers.*.mlp.experts.down_proj"),
}

# The folder's name for each Flax parameter. A kernel is [in, out] in Flax and [out, in] in the folder.
PARAMETERS = {
    "embedding": "weight",
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "sinks": "sinks",
    "correction": "e_score_correction_bias",
}


def is_stack(path: Sequence[Any]) -> bool:
    """Says whether a parameter is a stack of matrices: one for each expert, or for each head of latent attention."""
    return path[-2] == "experts" or path[-1] in ("k_up", "v_up")


def sources_of(path: Sequence[Any], size: int, config: DecoderConfig) -> list[list[Source]]:
    """Lists the tensors that make up one parameter.

    Args:
        path: the parameter's path, such as ("layers", 3, "attention", "qkv_proj", "kernel").
        size: rows of the whole parameter, or of each of its matrices if it is a stack of them. The rows of a kernel
            are its columns in Flax.
        config: the decoder's config.

    Returns:
        A list of sources, whose rows follow one another, for each matrix of a stack; one list if there is no stack.
    """
    module = ".".join("*" if isinstance(part, int) else part for part in path[:-1])
    layer = next((str(part) for part in path if isinstance(part, int)), "")
    if module.endswith("mlp.experts"):
        names = [name.replace("*", layer) for name in EXPERTS[config.family]]
        assert config.experts is not None
        return [_expert_sources(names, str(path[-1]), size, expert) for expert in range(config.experts.num_experts)]
    if path[-1] in ("k_up", "v_up"):
        return _latent_sources(str(path[-1]), layer, config)
    modules = MODULES[config.family][module]
    names = [modules] if isinstance(modules, str) else modules
    names = [f"{name.replace('*', layer)}.{PARAMETERS[str(path[-1])]}" for name in names]
    sizes = [size]
    if module.endswith("qkv_proj"):
        sizes = [num_heads * config.head_size for num_heads in (config.num_heads, *[config.num_kv_heads] * 2)]
    elif module.endswith("gate_up_proj"):
        sizes = [size // 2] * 2
    if len(names) == len(sizes):
        return [[Source(name, size) for name, size in zip(names, sizes, strict=True)]]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]  # in one tensor that holds all of them
    return [[Source(names[0], size, start) for size, start in zip(sizes, starts, strict=True)]]


def _latent_sources(parameter: str, layer: str, config: DecoderConfig) -> list[list[Source]]:
    """Each head's rows of one matrix: those that make keys of latents, then those that make values."""
    assert config.latent is not None
    key, value = config.latent.nope_size, config.latent.value_size
    name, rows = f"model.layers.{layer}.self_attn.kv_b_proj.weight", config.num_heads * (key + value)
    size, first = (key, 0) if parameter == "k_up" else (value, key)
    return [[Source(name, size, head * (key + value) + first, rows=rows)] for head in range(config.num_heads)]


def _expert_sources(names: list[str], parameter: str, size: int, expert: int) -> list[Source]:
    is_down = parameter.startswith("down")
    if len(names) == 3:
        gate, up, down = (name.replace("#", str(expert)) for name in names)
        return [Source(down, size)] if is_down else [Source(gate, size // 2), Source(up, size // 2)]
    name = names[is_down] + ("_bias" if parameter.endswith("bias") else "")
    if is_down:
        return [Source(name, size, expert=expert)]
    return [Source(name, size // 2, start, 2, expert) for start in (0, 1)]


def shapes_of(sources: list[list[Source]], others: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Gives the shapes of the tensors that hold these sources.

    Args:
        sources: see `sources_of`.
        others: the sizes of a row, none for a vector.
    """
    sizes: dict[str, int] = {}
    for source in sources[0] if sources[0][0].expert is not None else [s for matrix in sources for s in matrix]:
        sizes[source.name] = source.rows or sizes.get(source.name, 0) + source.size
    if sources[0][0].expert is not None:
        return {name: (len(sources), *others, size) for name, size in sizes.items()}
    return {name: (size, *others) for name, size in sizes.items()}
