"""Makes the tiny checkpoints of this folder with transformers, and stores what transformers computes with them.

    python tests/data/make_models.py        # Python 3.11, torch 2.13 (CPU), transformers 5.23

Each model gets a folder as `save_pretrained` writes it, with a tokenizer.json that has a token for each printable ASCII
character, and a reference.npz:

    prompts      i32 [num_prompts, longest]      padded on the right with -1
    tokens       i32 [num_prompts, NEW_TOKENS]   continued greedily, one prompt at a time
    batched      i32 [num_prompts, NEW_TOKENS]   the same, all prompts in one padded batch
    logits_<i>   f32 [length, vocab_size]        of prompt i and its new tokens, at every position

It draws random weights large enough that the greedy tokens vary, and draws again until each of them wins clearly.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).parent
VOCAB_SIZE = 96  # token 0 ends a text, token i is the character 31 + i
NEW_TOKENS = 20
PROMPT_LENGTHS = 3, 11, 16, 21
MIN_GAP = 5e-3  # least difference of the first and the second logit wherever a token is chosen
MIN_DISTINCT = 8  # least number of different tokens among the NEW_TOKENS

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

# Name: config, and the size above which save_pretrained cuts the weights into shards.
MODELS = {
    "opt_pre_norm": (transformers.OPTConfig(**COMMON, ffn_dim=64), "1GB"),
    "opt_post_norm": (
        transformers.OPTConfig(**COMMON, ffn_dim=64, word_embed_proj_dim=16, do_layer_norm_before=False),
        "1GB",
    ),
    "llama": (
        transformers.LlamaConfig(
            **LLAMA,
            head_dim=16,
            attention_bias=True,
            mlp_bias=True,
            # Of the wavelengths 6, 20, 63, ... the first is kept, the second is blended and the others are stretched.
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=10000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        ),
        "40KB",
    ),
    "mistral": (transformers.MistralConfig(**LLAMA | dict(num_key_value_heads=1), sliding_window=6), "1GB"),
    "qwen2": (
        transformers.Qwen2Config(
            **LLAMA,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=9,
            max_window_layers=1,
            rope_parameters=dict(rope_type="default", rope_theta=1000.0),
        ),
        "1GB",
    ),
    "qwen3": (
        transformers.Qwen3Config(**LLAMA | dict(num_attention_heads=6), head_dim=16, tie_word_embeddings=True),
        "1GB",
    ),
}


def make_tokenizer() -> Tokenizer:
    vocab = {"</s>": 0} | {chr(31 + i): i for i in range(1, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def make_model(config, seed: int):
    """Makes a model and redraws its parameters: norms around 1, biases around 0, matrices above their usual size."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        if parameter.ndim == 1:
            parameter.data = 0.3 * noise + ("norm" in name and name.endswith("weight"))
        elif "embed" in name:
            parameter.data = noise if "embed_positions" in name else 0.25 * noise
        else:
            gain = 1.0 if name.endswith(("lm_head.weight", "project_out.weight")) else 2.5
            parameter.data = noise * gain / parameter.shape[1] ** 0.5
    return model


def make_reference(model, seed: int) -> dict[str, np.ndarray] | None:
    """Gives what transformers answers to random prompts of unequal length; None where that makes a poor test."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1, VOCAB_SIZE, length) for length in PROMPT_LENGTHS]
    options = dict(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    longest = max(PROMPT_LENGTHS)
    reference = {"prompts": np.full((len(prompts), longest), -1, np.int32)}

    tokens = []
    for i, prompt in enumerate(prompts):
        reference["prompts"][i, : len(prompt)] = prompt
        inputs = torch.tensor(prompt)[None]
        sequence = model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
        logits = model(sequence, use_cache=False).logits[0].float().numpy()
        tokens.append(sequence[0, len(prompt) :].numpy().astype(np.int32))
        reference[f"logits_{i}"] = logits

        chosen = np.sort(logits[len(prompt) - 1 : -1], axis=-1)
        assert (logits[len(prompt) - 1 : -1].argmax(-1) == tokens[-1]).all()
        gap = (chosen[:, -1] - chosen[:, -2]).min()
        print(
            f"  length {len(prompt)}: gap {gap:.4f}, logits to {abs(logits).max():.1f}, {len(set(tokens[-1]))} tokens"
        )
        if gap < MIN_GAP or len(set(tokens[-1])) < MIN_DISTINCT:
            return None
    reference["tokens"] = np.stack(tokens)

    padded = np.zeros((len(prompts), longest), np.int64)  # on the left, as transformers wants it
    mask = np.zeros_like(padded)
    for i, prompt in enumerate(prompts):
        padded[i, longest - len(prompt) :] = prompt
        mask[i, longest - len(prompt) :] = 1
    batch = model.generate(torch.tensor(padded), attention_mask=torch.tensor(mask), **options)
    reference["batched"] = batch[:, longest:].numpy().astype(np.int32)
    assert (reference["batched"] == reference["tokens"]).all()
    return reference


def main() -> None:
    torch.set_grad_enabled(False)
    for name, (config, max_shard_size) in MODELS.items():
        print(name)
        for seed in itertools.count():
            model = make_model(config, seed)
            if (reference := make_reference(model, seed)) is not None:
                break
        folder = HERE / name
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        make_tokenizer().save(str(folder / "tokenizer.json"), pretty=False)
        np.savez_compressed(folder / "reference.npz", **reference)
        print(" ", json.loads((folder / "config.json").read_text()).get("rope_parameters"))
    size = sum(path.stat().st_size for path in HERE.rglob("*") if path.is_file())
    print(f"{size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
