"""Trains the tiny model of examples/tiny: a byte-level Llama on the text of Python's own documentation.

    python -m examples.train_tiny --out examples/tiny

The text is `pydoc_data.topics` (what `help("topics")` shows, half a megabyte). Each topic is a document, and one topic
in twenty is held out. A model soon memorises so little text. Therefore training drops weights at random and keeps a
moving average of the weights; it saves the average that did best on the held-out topics, in bfloat16. Training takes a
minute or two on one data-center GPU, and needs the extra `train`.
"""

import argparse
import itertools
import json
import math
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.attend import causal_attend
from examples.checkpoint import save_model
from examples.decoder import Decoder
from examples.families import load_config

END_OF_TEXT = 256  # the one token that is not a byte; it ends every topic
CONTEXT = 512  # tokens
PEAK_LEARNING_RATE = 2e-3
WARMUP = 0.03  # fraction of the run
WEIGHT_DECAY = 0.1
AVERAGE_DECAY = 0.995  # of the moving average, in each step
STEPS_PER_CALL = 10
EVAL_EVERY = 250  # steps

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 160,
    "intermediate_size": 416,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": END_OF_TEXT,
    "torch_dtype": "bfloat16",
}


class TrainState(NamedTuple):
    """The state of the training."""

    params: Any
    average: Any  # exponential moving average of params: what is evaluated and saved
    opt_state: Any
    step: Array


def byte_tokenizer() -> Tokenizer:
    """Makes a tokenizer whose token ids are the bytes of the text's UTF-8, and 256 for the end of a text."""
    # ByteLevel writes every byte as a visible character: these as themselves, all others as characters from 256 on.
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(256)
    vocab = {chr(byte if byte in visible else next(others)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = byte_level  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def load_tokens() -> tuple[np.ndarray, np.ndarray]:
    """Gives the training and the held-out topics as token ids, i32, with END_OF_TEXT after every topic."""
    documents = [np.array([*text.strip("\n").encode(), END_OF_TEXT], np.int32) for _, text in sorted(topics.items())]
    held_out = [document for i, document in enumerate(documents) if i % 20 == 7]
    train = [document for i, document in enumerate(documents) if i % 20 != 7]
    return np.concatenate(train), np.concatenate(held_out)


def make_loss(config):
    """Builds `loss(params, crops i32 [num_crops, CONTEXT + 1])`, in nats per byte, computed in bfloat16."""
    graphdef, compute = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)))
    attend = causal_attend()
    positions = np.arange(CONTEXT, dtype=np.int32)

    def loss(params, crops):
        model = nnx.merge(graphdef, jax.tree.map(lambda p, like: p.astype(like.dtype), params, compute))

        def one(crop):
            caches = (None,) * CONFIG["num_hidden_layers"]
            hidden, _ = model(crop[:-1], jnp.asarray(positions), caches, attend)
            return optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), crop[1:])

        return jax.vmap(one)(crops).mean()

    return loss


def drop_weights(params, key: Array, share: float):
    """Zeroes a random fraction, `share`, of the entries of every matrix, and scales up the other entries."""
    leaves, structure = jax.tree.flatten(params)
    for i, leaf in enumerate(leaves):
        if leaf.ndim > 1:
            kept = jax.random.bernoulli(jax.random.fold_in(key, i), 1 - share, leaf.shape)
            leaves[i] = jnp.where(kept, leaf / (1 - share), 0)
    return jax.tree.unflatten(structure, leaves)


def make_run(loss, params, weight_drop: float, batch_size: int):
    """Builds the state and the jitted `run(state, tokens, key, rate, num_steps) -> (state, mean loss)`."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.98),
        optax.add_decayed_weights(WEIGHT_DECAY, mask=lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree)),
    )

    def step(state: TrainState, tokens, key, rate):
        crop_key, drop_key = jax.random.split(key)
        starts = jax.random.randint(crop_key, (batch_size,), 0, tokens.shape[0] - CONTEXT)
        crops = jax.vmap(lambda start: jax.lax.dynamic_slice_in_dim(tokens, start, CONTEXT + 1))(starts)
        value, grads = jax.value_and_grad(lambda p: loss(drop_weights(p, drop_key, weight_drop), crops))(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, update: p - rate * update, state.params, updates)
        # The average decays faster in the first steps, so that it soon forgets the random weights it started from.
        count = state.step.astype(jnp.float32)
        decay = jnp.minimum(AVERAGE_DECAY, (1 + count) / (10 + count))
        average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, state.average, params)
        return TrainState(params, average, opt_state, state.step + 1), value

    def run(state: TrainState, tokens, key, rate, num_steps):
        def body(i, carry):
            state, total = carry
            state, value = step(state, tokens, jax.random.fold_in(key, i), rate)
            return state, total + value

        state, total = jax.lax.fori_loop(0, num_steps, body, (state, jnp.float32(0)))
        return state, total / num_steps.astype(jnp.float32)

    state = TrainState(params, jax.tree.map(jnp.copy, params), optimizer.init(params), jnp.int32(0))
    return state, jax.jit(run, donate_argnums=0)


def learning_rate(progress: float) -> float:
    """The learning rate: a linear warm-up, then a cosine down to a twentieth of the peak; progress goes from 0 to 1."""
    if progress < WARMUP:
        return PEAK_LEARNING_RATE * max(0.1, progress / WARMUP)
    cosine = 0.5 * (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP)))
    return PEAK_LEARNING_RATE * (0.05 + 0.95 * cosine)


def train(config, options: argparse.Namespace) -> tuple[Any, float]:
    """Trains until the steps or the seconds are used up.

    Returns:
        The averaged weights, float32, that did best on the held-out topics, and their bits per byte there.
    """
    started = time.monotonic()
    train_tokens, held_out = load_tokens()
    num_crops = min(options.eval_crops, (len(held_out) - 1) // CONTEXT)
    held_out = np.stack([held_out[i * CONTEXT : (i + 1) * CONTEXT + 1] for i in range(num_crops)])
    loss = make_loss(config)
    params = nnx.state(Decoder(config, rngs=nnx.Rngs(options.seed)))
    state, run = make_run(loss, params, options.weight_drop, options.batch_size)
    evaluate = jax.jit(loss)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    sizes = f"{len(train_tokens):,} bytes to train on, {num_crops * CONTEXT:,} held out"
    print(f"{num_params:,} parameters, {sizes}", flush=True)

    tokens, held_out, key = jnp.asarray(train_tokens), jnp.asarray(held_out), jax.random.key(options.seed)
    state, _ = run(state, tokens, key, jnp.float32(0), jnp.int32(0))  # no step: this compiles
    best, best_bits = None, math.inf
    compiled = time.monotonic()
    step, progress = 0, 0.0
    while progress < 1:
        num_steps = min(STEPS_PER_CALL, options.steps - step)
        rate = jnp.float32(learning_rate(progress))
        state, value = run(state, tokens, jax.random.fold_in(key, step), rate, jnp.int32(num_steps))
        bits, step, now = float(value) / math.log(2), step + num_steps, time.monotonic()
        # Progress follows the limit that is nearer, so that the learning rate always comes down before the end.
        by_time = (now - compiled) / max(options.max_seconds - (compiled - started), 1)
        progress = max(step / options.steps, by_time)
        if step % EVAL_EVERY == 0 or progress >= 1:
            held_out_bits = float(evaluate(state.average, held_out)) / math.log(2)
            bits_text = f"{bits:.3f} train, {held_out_bits:.3f} held out"
            print(f"step {step:5d} {now - started:6.1f} s   bits/byte: {bits_text}", flush=True)
            if held_out_bits < best_bits:
                best, best_bits = jax.tree.map(jnp.copy, state.average), held_out_bits
    return best, best_bits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch-size", type=int, default=128, help="crops of 512 bytes a step")
    parser.add_argument(
        "--max-seconds",
        type=float,
        default=90,
        help="when training ends at the latest; the learning rate comes down by then",
    )
    parser.add_argument("--weight-drop", type=float, default=0.1, help="fraction of the weights that each step drops")
    parser.add_argument("--eval-crops", type=int, default=64, help="held-out crops to evaluate on, at most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    byte_tokenizer().save(str(options.out / "tokenizer.json"))
    config = load_config(options.out)
    params, bits = train(config, options)
    model = Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    nnx.update(model, jax.tree.map(lambda p: p.astype(jnp.bfloat16), params))
    save_model(options.out, model, config)
    print(f"held out: {bits:.3f} bits/byte; saved to {options.out}")


if __name__ == "__main__":
    main()
