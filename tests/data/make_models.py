"""Writes what transformers computes with tiny models, whose weights tests/model_weights.py draws.

    python -m tests.data.make_models [NAME ...]      # Python 3.12, torch 2.14 (CPU), transformers 5.24

Each model gets one file, NAME.json:

    made_with   versions
    config      config.json as `save_pretrained` writes it
    older       changes that make an older file of it, as the hub has them; null removes a field
    seed        of the weights, the first one whose greedy tokens vary and win clearly
    tensors     name and shape of each tensor that `save_pretrained` writes
    longest     tokens for which the decoder is set up, where that is not all that the model can read
    prompts     token ids, four prompts
    tokens      each prompt continued greedily by NEW_TOKENS
    logits      of the last prompt's last token and of its last new token, to 5 decimals
"""

import itertools
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers as tf
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.model_weights import draw_tensors

HERE = Path(__file__).parent
VOCAB_SIZE = 96  # token 0 ends a text, token i is the character 31 + i
NEW_TOKENS = 12
PROMPT_LENGTHS = 3, 11, 16, 21
MIN_GAP = 5e-3  # least difference of the first and the second logit wherever a token is chosen
MIN_DISTINCT = 12  # least number of different tokens in all answers

COMMON = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=0,
)
LLAMA = COMMON | dict(intermediate_size=48, num_key_value_heads=2)
# Of the wavelengths 6, 20, 63, ... the first is kept, the second is blended and the others are stretched.
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
YARN = dict(factor=4.0, original_max_position_embeddings=32, beta_fast=4.0, beta_slow=0.5)
LONGROPE = dict(short_factor=[1.0, 1.3, 1.6, 2.0], long_factor=[1.5, 2.0, 4.0, 8.0])
SCALINGS = {
    "linear": dict(factor=3.0),
    "dynamic": dict(factor=2.0),
    "yarn": YARN,
    "llama3": LLAMA3,
    "longrope": LONGROPE | dict(factor=4.0, original_max_position_embeddings=64),
}
DEEPSEEK = COMMON | dict(
    intermediate_size=48,
    num_key_value_heads=4,
    kv_lora_rank=16,
    qk_rope_head_dim=16,
    qk_nope_head_dim=8,
    v_head_dim=12,
    moe_intermediate_size=24,
    n_routed_experts=8,
    num_experts_per_tok=3,
    first_k_dense_replace=1,
    attention_bias=True,
    rms_norm_eps=1e-3,
    rope_parameters=dict(rope_type="yarn", rope_theta=1000.0, **YARN, mscale=1.2, mscale_all_dim=0.7),
)
NO_ROPE = dict(rope_parameters=None)


def older_rope(rope: dict, theta: float | None = None, **others) -> dict:
    """Changes from `rope_parameters` to `rope_scaling` and `rope_theta`."""
    return NO_ROPE | dict(rope_scaling=rope, rope_theta=theta) | others


# Name: the config, the changes to an older file, and `longest` (see above).
MODELS = {
    "opt_pre_norm": (tf.OPTConfig(**COMMON, ffn_dim=64), {}, None),
    "opt_post_norm": (
        tf.OPTConfig(**COMMON, ffn_dim=64, word_embed_proj_dim=16, do_layer_norm_before=False, enable_bias=True),
        {},
        None,
    ),
    "llama": (
        tf.LlamaConfig(
            **LLAMA,
            head_dim=16,
            attention_bias=True,
            mlp_bias=True,
            rms_norm_eps=1e-3,
            rope_parameters=dict(rope_type="llama3", rope_theta=1000.0, **LLAMA3),
        ),
        # The trained context is given twice, and the outer value counts.
        older_rope(
            dict(rope_type="llama3", **LLAMA3 | dict(original_max_position_embeddings=16)),
            1000.0,
            original_max_position_embeddings=32,
        ),
        None,
    ),
    "mistral": (
        tf.MistralConfig(**LLAMA | dict(num_key_value_heads=1), sliding_window=6),
        NO_ROPE | dict(rope_theta=10000.0),
        None,
    ),
    "qwen2": (
        tf.Qwen2Config(
            **LLAMA,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=9,
            max_window_layers=1,
            rope_parameters=dict(rope_type="default", rope_theta=1000.0),
        ),
        NO_ROPE | dict(rope_theta=1000.0, layer_types=None),
        None,
    ),
    "qwen3": (
        tf.Qwen3Config(
            **LLAMA | dict(num_attention_heads=6),
            head_dim=16,
            tie_word_embeddings=True,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=7,
            max_window_layers=1,
        ),
        NO_ROPE | dict(rope_theta=10000.0, layer_types=None, rope_scaling=None),
        None,
    ),
    **{
        f"{name}_{rope_type}": (
            make(**LLAMA, rope_parameters=dict(rope_type=rope_type, rope_theta=1000.0, **scaling)),
            older_rope(dict(type=rope_type, **scaling), 1000.0),
            64 if rope_type == "longrope" else None,
        )
        for name, make in {"llama": tf.LlamaConfig, "qwen2": tf.Qwen2Config}.items()
        for rope_type, scaling in SCALINGS.items()
        if (name, rope_type) != ("llama", "llama3")
    },
    "gemma2": (
        tf.Gemma2Config(
            **LLAMA | dict(num_hidden_layers=3),
            head_dim=16,
            query_pre_attn_scalar=10,
            sliding_window=6,
            attn_logit_softcapping=4.0,
            final_logit_softcapping=6.0,
            attention_bias=True,
            rms_norm_eps=1e-3,
            rope_parameters=dict(rope_type="default", rope_theta=1000.0),
        ),
        NO_ROPE | dict(rope_theta=1000.0, layer_types=None, hidden_act="gelu", cache_implementation="hybrid"),
        None,
    ),
    "gemma3": (
        tf.Gemma3TextConfig(
            **LLAMA | dict(num_hidden_layers=3),
            head_dim=16,
            query_pre_attn_scalar=10,
            sliding_window=6,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            final_logit_softcapping=6.0,
            rms_norm_eps=1e-3,
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", factor=8.0, rope_theta=5000.0),
                sliding_attention=dict(rope_type="default", rope_theta=100.0),
            ),
        ),
        older_rope(
            dict(rope_type="linear", factor=8.0),
            5000.0,
            rope_local_base_freq=100.0,
            layer_types=None,
            sliding_window_pattern=3,
        ),
        None,
    ),
    "gpt_oss": (
        tf.GptOssConfig(
            **LLAMA,
            head_dim=16,
            sliding_window=6,
            num_local_experts=4,
            num_experts_per_tok=2,
            swiglu_limit=0.7,
            swiglu_alpha=1.3,
            rms_norm_eps=1e-3,
            rope_parameters=dict(rope_type="yarn", rope_theta=1000.0, **YARN, truncate=False),
        ),
        older_rope(
            dict(rope_type="yarn", **YARN, truncate=False),
            1000.0,
            layer_types=None,
            initial_context_length=32,
            experts_per_token=3,
        ),
        None,
    ),
    "qwen3_moe": (
        tf.Qwen3MoeConfig(
            **LLAMA | dict(num_hidden_layers=3),
            head_dim=16,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            norm_topk_prob=True,
            mlp_only_layers=[0],
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=7,
        ),
        NO_ROPE
        | dict(rope_theta=10000.0, rope_scaling=None, num_local_experts=None, num_experts=6, max_window_layers=2),
        None,
    ),
    "mixtral": (
        tf.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
        NO_ROPE | dict(rope_theta=1e6),
        None,
    ),
    "phi3": (
        tf.Phi3Config(
            **LLAMA | dict(original_max_position_embeddings=2),
            sliding_window=9,
            rope_parameters=dict(
                rope_type="longrope",
                rope_theta=1000.0,
                partial_rotary_factor=0.75,
                short_factor=[1.0, 1.3, 1.6],
                long_factor=[1.5, 2.0, 4.0],
            ),
        ),
        older_rope(
            dict(type="longrope", short_factor=[1.0, 1.3, 1.6], long_factor=[1.5, 2.0, 4.0]),
            1000.0,
            partial_rotary_factor=0.75,
        ),
        None,
    ),
    "phi4": (tf.Phi3Config(**LLAMA, tie_word_embeddings=True), NO_ROPE | dict(rope_theta=10000.0), None),
    "olmo2": (
        tf.Olmo2Config(**LLAMA, attention_bias=True, rms_norm_eps=1e-3),
        NO_ROPE | dict(rope_theta=10000.0),
        None,
    ),
    "smollm3": (
        tf.SmolLM3Config(
            **LLAMA | dict(num_hidden_layers=3),
            no_rope_layer_interval=2,
            use_sliding_window=True,
            sliding_window=6,
            attention_bias=True,
            mlp_bias=True,
        ),
        NO_ROPE | dict(rope_theta=2e6, layer_types=None, no_rope_layers=None, rope_scaling=None),
        None,
    ),
    "granite": (
        tf.GraniteConfig(
            **LLAMA,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            embedding_multiplier=6.0,
            residual_multiplier=0.7,
            attention_multiplier=0.2,
            logits_scaling=2.0,
        ),
        NO_ROPE | dict(rope_theta=10000.0),
        None,
    ),
    "glm4": (
        tf.Glm4Config(**LLAMA, head_dim=16, rms_norm_eps=1e-3),
        NO_ROPE | dict(rope_theta=10000.0, partial_rotary_factor=0.5),
        None,
    ),
    "deepseek_v2": (
        tf.DeepseekV2Config(
            **DEEPSEEK,
            q_lora_rank=20,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            n_shared_experts=2,
            routed_scaling_factor=1.5,
            mlp_bias=True,
        ),
        {},
        None,
    ),
    "deepseek_v2_lite": (
        tf.DeepseekV2Config(**DEEPSEEK, q_lora_rank=None, topk_method="greedy", n_shared_experts=1),
        {},
        None,
    ),
    "deepseek_v3": (
        tf.DeepseekV3Config(
            **DEEPSEEK, q_lora_rank=20, n_group=4, topk_group=2, n_shared_experts=1, routed_scaling_factor=1.5
        ),
        {},
        None,
    ),
}
for _name in ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3"):
    _rope = dict(type="yarn", **YARN, mscale=1.2, mscale_all_dim=0.7)
    MODELS[_name] = (MODELS[_name][0], older_rope(_rope, 1000.0, moe_layer_freq=1, head_dim=None), None)


def make_model(folder: Path, config: dict, tensors: dict[str, np.ndarray]):
    """Writes a folder and has transformers load it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model, info = tf.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def saved(config, folder: Path) -> tuple[dict, dict[str, list[int]]]:
    """Gives config.json and the shapes of the tensors that transformers saves for a model."""
    tf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}
    return json.loads((folder / "config.json").read_text()), shapes


def greedy(model, prompts: list[list[int]]) -> dict | None:
    """Gives what transformers answers, one prompt at a time; None if the answers make a poor test."""
    options = dict(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    tokens, logits = [], np.zeros(0)
    for prompt in prompts:
        inputs = torch.tensor([prompt])
        sequence = model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
        tokens.append(sequence[0, len(prompt) :].tolist())
        logits = model(sequence, use_cache=False).logits[0].float().numpy()
        chosen = np.sort(logits[len(prompt) - 1 : -1], axis=-1)
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens[-1]
        gap = float((chosen[:, -1] - chosen[:, -2]).min())
        if gap < MIN_GAP:
            return None
    if len({token for answer in tokens for token in answer}) < MIN_DISTINCT:
        return None
    rows = logits[[len(prompts[-1]) - 1, -1]]
    return {"tokens": tokens, "logits": [[round(float(x), 5) for x in row] for row in rows]}


def make_reference(name: str, work: Path) -> dict:
    config, older, longest = MODELS[name]
    config, shapes = saved(config, work / "saved")
    for seed in itertools.count():
        prompts = [np.random.default_rng(seed).integers(1, VOCAB_SIZE, n).tolist() for n in PROMPT_LENGTHS]
        tensors = draw_tensors(shapes, seed)
        model = make_model(work / f"seed{seed}", config, tensors)
        if (result := greedy(model, prompts)) is not None:
            break
    changed = {key: value for key, value in (config | older).items() if key not in older or value is not None}
    again = greedy(make_model(work / "older", changed, tensors), prompts)
    assert again == result, f"{name}: transformers gives the older config another meaning"
    versions = {"transformers": tf.__version__, "torch": torch.__version__.partition("+")[0]}
    found = {"made_with": versions, "config": config, "older": older, "seed": seed, "tensors": shapes}
    return found | {"longest": longest, "prompts": prompts} | result


def main() -> None:
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    tf.logging.set_verbosity_error()
    for name in sys.argv[1:] or MODELS:
        with tempfile.TemporaryDirectory() as work:
            reference = make_reference(name, Path(work))
        lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in reference.items())
        (HERE / f"{name}.json").write_text("{\n" + lines + "\n}\n")
        print(f"{name}: seed {reference['seed']}", flush=True)
    print(f"{sum(path.stat().st_size for path in HERE.glob('*.json')) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
