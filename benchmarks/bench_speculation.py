"""Measures what speculative decoding gains, and what it costs if it gains nothing.

One engine generates the same texts without and with speculation in turns. A row has the wall time of both, their steps,
and how many guessed tokens were right. If tokens differ, the output says how many are alike. The texts are:

- greedy: the engine's own look-up makes the guesses. Greedy texts of the small trained model repeat themselves. Random
  weights are changed so that texts repeat their prompts (`repeat_prompts`).
- drawn: the same look-up for texts that do not repeat themselves, drawn at a high temperature.
- told: greedy texts, which the proposer knows. It errs in every seventh token, and shows the gain of good guesses.

    python -m benchmarks.bench_speculation --model tiny
    python -m benchmarks.bench_speculation --model llama3-8b --out FILE     # on a GPU, random weights
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import environment
from benchmarks.models import BLOCK_SIZE, MODELS, make_model
from examples import loop
from examples.checkpoint import load_model
from examples.command_line import TINY
from examples.step import make_step, xla_options
from paged_jax import engine

TEXTS = "greedy", "drawn", "told"
PROMPT_LEN = 64  # tokens of a prompt for random weights
HOT = 1e3  # a temperature at which all tokens are about equally likely
PROMPT = "The for statement is used to iterate over the elements of a sequence. "


class Told:
    """A proposer that knows texts, and guesses every seventh token wrongly. Without texts it uses `PromptLookup`.

    Attributes:
        texts: the texts, prompts included; empty for a look-up.
    """

    def __init__(self):
        self.texts: list[list[int]] = []
        self._lookup = engine.PromptLookup()

    def propose(self, rows: list[engine.DraftRow], /) -> list[list[int]]:
        """Makes guesses for each row."""
        if not self.texts:
            return self._lookup.propose(rows)
        return [self._guess(row) for row in rows]

    def forget(self, key: tuple[int, int], /) -> None:
        """Forgets a row's look-ups."""
        self._lookup.forget(key)

    def _guess(self, row: engine.DraftRow) -> list[int]:
        size = len(row.tokens)
        text = next((text for text in self.texts if text[:size] == row.tokens), row.tokens)
        return [token ^ (not (size + i) % 7) for i, token in enumerate(text[size : size + row.most])]


@dataclasses.dataclass(frozen=True)
class Row:
    """One case: wall seconds and steps without and with speculation, and guessed tokens."""

    text: str
    num_seqs: int
    num_tokens: int
    plain_s: float
    speculating_s: float
    plain_steps: int
    speculating_steps: int
    drafted: int
    accepted: int

    @property
    def gain(self) -> float:
        """Tokens per second with speculation, over tokens per second without."""
        return self.plain_s / self.speculating_s


def measure(
    the_engine: engine.Engine, proposer: Told, text: str, prompts: list[list[int]], max_tokens: int, repeats: int
) -> Row:
    """Runs one case, and keeps the best times. If tokens differ, it prints how many are alike."""
    params = engine.SamplingParams(max_tokens=max_tokens, temperature=HOT if text == "drawn" else 0.0, seed=5)
    speculating = the_engine.config
    plain = dataclasses.replace(speculating, max_draft_tokens=0)
    times: dict[engine.EngineConfig, list[float]] = {plain: [], speculating: []}
    tokens, stats, proposer.texts = {}, {}, []
    for _ in range(repeats):
        for config in (plain, speculating):
            the_engine.reset(config)
            began = time.perf_counter()
            results = the_engine.generate(prompts, params)
            times[config].append(time.perf_counter() - began)
            tokens[config] = [list(samples[0].token_ids) for samples in results]
            stats[config] = the_engine.stats()
            if text == "told" and config is plain:
                proposer.texts = [[*prompt, *new] for prompt, new in zip(prompts, tokens[plain], strict=True)]
    if (share := _alike(tokens[plain], tokens[speculating])) < 1:
        print(f"{text}: {share:.1%} of the tokens are alike before the first one that differs", flush=True)
    before, after = stats[plain], stats[speculating]
    return Row(
        text,
        len(prompts),
        after.num_output_tokens,
        min(times[plain]),
        min(times[speculating]),
        before.num_steps,
        after.num_steps,
        after.num_draft_tokens,
        after.num_accepted_tokens,
    )


def _alike(texts: list[list[int]], others: list[list[int]]) -> float:
    """The share of tokens before the first one that differs. Two programs may break a tie of logits differently."""
    pairs = [list(zip(one, other, strict=True)) for one, other in zip(texts, others, strict=True)]
    firsts = [next((i for i, (a, b) in enumerate(pair) if a != b), len(pair)) for pair in pairs]
    return sum(firsts) / sum(map(len, pairs))


def repeat_prompts(weights: dict[str, Any]) -> dict[str, Any]:
    """Makes the head expect tokens n, n + 1, ..., n + 63, n, n + 1, ...: such prompts are repeated again and again.

    A token's column of the head becomes the embedding of the token before it. The residual stream is closer to the last
    token's embedding than to any other, so greedy tokens do not depend on rounding. No time changes.
    """
    embedding = weights["embed_tokens"]["embedding"]
    token = jnp.arange(embedding.shape[0])
    first = token // PROMPT_LEN * PROMPT_LEN
    size = jnp.minimum(PROMPT_LEN, embedding.shape[0] - first)
    head = weights["lm_head"]["kernel"]
    expected = jax.jit(lambda embedding, before: (embedding[before] / 200).T.astype(head.dtype))
    return weights | {"lm_head": {"kernel": expected(embedding, first + (token - first - 1) % size)}}


def make_engine(args: argparse.Namespace, proposer: Told) -> tuple[engine.Engine, list[list[int]]]:
    """Makes an engine that speculates, and a prompt for each sequence."""
    most = max(args.num_seqs)
    if args.model == "tiny":
        dtype = jnp.float32
        decoder, config, tokenizer, _ = load_model(TINY, dtype)
        weights, step = make_step(decoder)
        prompt = tokenizer.encode(PROMPT).ids
        prompts = [prompt[i:] + prompt[:i] for i in range(most)]
    else:
        dtype, config = jnp.bfloat16, MODELS[args.model]
        weights, step = make_model(config)
        weights = repeat_prompts(weights)
        firsts = np.random.default_rng(0).permutation(config.vocab_size // PROMPT_LEN)[:most] * PROMPT_LEN
        prompts = [list(range(first, first + PROMPT_LEN)) for first in firsts.tolist()]
    longest = max(map(len, prompts)) + args.max_tokens
    sizes = engine.EngineConfig(
        max_model_len=longest,
        max_num_seqs=most,
        max_tokens_per_step=max(256, most),
        decode_rows=tuple(sorted(set(args.num_seqs))),
        mixed_tokens=(max(256, most),),
        adjustments=False,
        max_draft_tokens=args.speculate,
        verify_tokens=tuple(count * (1 + args.speculate) for count in sorted(set(args.num_seqs))),
    )
    caches = loop.make_caches(config, most * -(-longest // BLOCK_SIZE) + 8, BLOCK_SIZE, dtype)
    options = {"proposer": proposer, "compiler_options": xla_options}
    return engine.Engine(cast(engine.Step, step), weights, caches, sizes, **options), prompts


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_speculation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    with_head = [name for name, config in MODELS.items() if not config.tie_embeddings]
    add(
        "--model", choices=("tiny", *with_head), default="tiny", help="examples/tiny, or random weights of these shapes"
    )
    add("--num-seqs", type=int, nargs="+", default=[1, 4, 16], help="default 1 4 16")
    add("--max-tokens", type=int, default=256, help="tokens of each text; default 256")
    add("--speculate", type=int, default=4, help="guessed tokens of a text that a step verifies; default 4")
    add("--repeats", type=int, default=3, help="default 3")
    add("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    proposer, rows = Told(), []
    began = time.perf_counter()
    the_engine, prompts = make_engine(args, proposer)
    print(f"the engine has started in {time.perf_counter() - began:.1f} s", flush=True)
    measured = the_engine.measure_steps(the_engine.config.max_model_len)
    steps = [
        {"num_tokens": shape.num_tokens, "is_verify": shape.is_verify, "is_decode": shape.is_decode, "ms": 1e3 * each}
        for shape, each in measured.items()
    ]
    for step in steps:
        name = "decodes" if step["is_decode"] else "verifies" if step["is_verify"] else "computes prompts"
        print(f"a step of {step['num_tokens']} tokens that {name}: {step['ms']:.2f} ms", flush=True)
    for text in TEXTS:
        for num_seqs in args.num_seqs:
            row = measure(the_engine, proposer, text, prompts[:num_seqs], args.max_tokens, args.repeats)
            rows.append(row)
            print(
                f"{text:6} {num_seqs:3} texts: {row.num_tokens / row.plain_s:8.0f} -> "
                f"{row.num_tokens / row.speculating_s:8.0f} tokens/s ({row.gain:.2f}), {row.plain_steps:5} -> "
                f"{row.speculating_steps:5} steps, {row.accepted} of {row.drafted} guesses right",
                flush=True,
            )
    if args.out:
        report = {"op": "speculation", "model": args.model, "device": jax.devices()[0].device_kind}
        report |= {"environment": environment(), "steps": steps, "rows": [dataclasses.asdict(row) for row in rows]}
        args.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
