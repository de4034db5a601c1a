"""Generates text through the paged KV cache, from the command line.

    python -m examples.generate
    python -m examples.generate --model Qwen/Qwen3-0.6B --prompt "The sea" --prompt "A mountain" --stream
    python -m examples.generate --json --temperature 0.8 --top-p 0.95 --seed 7 --prompt "The assert statement"

Without --model the tiny model in examples/tiny writes, and what it writes looks like Python's documentation. On
stdout is the text (each prompt with what follows it) or, with --json, one object a prompt; everything else is on
stderr. Exit code 2 and one line on stderr if something asked for cannot be done.
"""

import argparse
import contextlib
import io
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples import loop
from examples.checkpoint import CheckpointError, load_model
from examples.config import DecoderConfig

TINY = Path(__file__).resolve().parent / "tiny"
DEFAULT_PROMPT = 'The "for" statement'
TINY_TEMPERATURE = 0.6  # its likeliest text soon repeats itself
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class GenerateError(ValueError):
    """Something asked for cannot be done; its message is one line, fit to be shown to a user."""


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise GenerateError(message)


class Detokenizer:
    """Turns the tokens that follow a prompt into text as they come, never half a character.

    New text is what decoding some tokens back gives more with the new tokens than without them, since what a token
    spells may depend on its neighbours.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]):
        self.tokenizer = tokenizer
        self.ids = list(prompt_ids[-5:])
        self.num_read = len(self.ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; bytes of an unfinished character wait for the rest of it."""
        return "".join(self._push(token_id) for token_id in token_ids)

    def _push(self, token_id: int) -> str:
        self.ids.append(token_id)
        text = self._new_text()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self.ids, self.num_read = self.ids[self.num_read :], len(self.ids) - self.num_read
        return text

    def flush(self) -> str:
        """What still waits at the end, with replacement characters for bytes that spell nothing."""
        text = self._new_text()
        self.num_read = len(self.ids)
        return text

    def _new_text(self) -> str:
        before = self.tokenizer.decode(self.ids[: self.num_read])
        return self.tokenizer.decode(self.ids)[len(before) :]


class Writer:
    """Writes results to stdout in the order of the prompts, each as soon as it is its turn."""

    def __init__(self, tokenizer: Tokenizer, prompts: list[str], prompt_ids: list[list[int]], as_json: bool):
        self.as_json = as_json
        self.prompts = prompts
        self.detokenizers = [Detokenizer(tokenizer, ids) for ids in prompt_ids]
        self.texts = ["" for _ in prompts]
        self.num_read = [0 for _ in prompts]  # tokens that are in the texts
        self.turn = 0
        self.num_written = 0  # characters of the prompt whose turn it is, and of its text

    def update(self, results: list[tuple[list[int], str]]) -> None:
        """Takes all tokens so far of every prompt, a stop token included, and the finish reason or "running"."""
        for i, (token_ids, finish_reason) in enumerate(results):
            new_ids = token_ids[self.num_read[i] : -1 if finish_reason == "stop" else None]
            self.num_read[i] = len(token_ids)
            self.texts[i] += self.detokenizers[i].push(new_ids)
            if finish_reason != "running":
                self.texts[i] += self.detokenizers[i].flush()
        while self.turn < len(results) and self._write(self.turn, *results[self.turn]):
            self.turn, self.num_written = self.turn + 1, 0
        sys.stdout.flush()

    def _write(self, i: int, token_ids: list[int], finish_reason: str) -> bool:
        """Writes what is new of prompt i; whether that was its end."""
        is_end = finish_reason != "running"
        if not self.as_json:
            text = ("\n" if i > 0 else "") + self.prompts[i] + self.texts[i] + ("\n" if is_end else "")
            sys.stdout.write(text[self.num_written :])
            self.num_written = len(text)
        elif is_end:
            values = self.prompts[i], token_ids, self.texts[i], finish_reason
            result = dict(zip(("prompt", "token_ids", "text", "finish_reason"), values, strict=True))
            sys.stdout.write(json.dumps(result) + "\n")
        return is_end


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line.

    Raises:
        GenerateError: an option or its value is wrong.
    """
    parser = _Parser(
        prog="generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", metavar="DIR_OR_HUB_ID", default=str(TINY), help="Hugging Face folder or hub id (examples/tiny)")
    add("--prompt", metavar="TEXT", action="append",
        help=f"may be given several times; --prompt=-x if it starts with a dash ({DEFAULT_PROMPT})")  # fmt: skip
    add("--max-new-tokens", metavar="N", type=int, default=128, help="of each prompt, at most (%(default)s)")
    add("--temperature", metavar="T", type=float,
        help=f"0 = always the likeliest token (0 with --model, {TINY_TEMPERATURE} without)")  # fmt: skip
    add("--top-k", metavar="K", type=int, default=0, help="draw from the K likeliest tokens only; 0 = all")
    add("--top-p", metavar="P", type=float, default=1.0, help="... that together reach probability P; 1 = all")
    add("--seed", metavar="N", type=int, default=0, help="of the draws (%(default)s)")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto",
        help="of weights and cache; auto = float32 on a CPU, bfloat16 elsewhere")  # fmt: skip
    add("--block-size", metavar="N", type=int, default=16, help="tokens in a block of the cache (%(default)s)")
    add("--num-blocks", metavar="N", type=int, help="blocks in the cache (what the prompts may need at most)")
    add("--implementation", choices=("triton", "xla"), help="of the paged ops (the fastest there is)")
    add("--stream", action="store_true", help="write text as it is generated")
    add("--json", action="store_true", help="write one JSON object a prompt")
    options = parser.parse_args(argv)
    options.prompt = options.prompt or [DEFAULT_PROMPT]
    if options.temperature is None:
        options.temperature = TINY_TEMPERATURE if options.model == str(TINY) else 0.0

    def check(flag: str, is_right: bool, expected: str) -> None:
        if not is_right:
            value = getattr(options, flag[2:].replace("-", "_"))
            raise GenerateError(f"{flag} must be {expected}, got {value}")

    check("--max-new-tokens", 1 <= options.max_new_tokens < 2**31, "1 or more, and below 2**31")
    check("--temperature", 0 <= options.temperature < math.inf, "0 or more")
    check("--top-k", 0 <= options.top_k < 2**31, "0 or more")
    check("--top-p", 0 < options.top_p <= 1, "above 0 and at most 1")
    check("--seed", 0 <= options.seed < 2**32, "from 0 to 2**32 - 1")
    check("--block-size", options.block_size in BLOCK_SIZES, f"one of {', '.join(map(str, BLOCK_SIZES))}")
    check("--num-blocks", options.num_blocks is None or options.num_blocks >= 1, "1 or more")
    return options


def encode(tokenizer: Tokenizer, prompts: list[str], config: DecoderConfig) -> list[list[int]]:
    """The token ids of each prompt.

    Raises:
        GenerateError: a prompt is empty, no text, or longer than the model's positions.
    """
    prompt_ids = []
    for i, prompt in enumerate(prompts):
        name = "the prompt" if len(prompts) == 1 else f"prompt {i + 1}"
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise GenerateError(f"{name} is not valid UTF-8") from None
        ids = tokenizer.encode(prompt).ids
        if not prompt or not ids:
            raise GenerateError(f"{name} is empty")
        if max(ids) >= config.vocab_size:
            raise GenerateError(f"{name} has token {max(ids)}; the model's vocabulary has {config.vocab_size}")
        if len(ids) > config.max_position_embeddings:
            limit = config.max_position_embeddings
            raise GenerateError(f"{name} has {len(ids)} tokens; the model has {limit} positions")
        prompt_ids.append(ids)
    return prompt_ids


def choose_num_blocks(options: argparse.Namespace, request: loop.Request) -> int:
    """As many blocks as asked for, or as many as the batch can come to need.

    Raises:
        GenerateError: the prompts alone need more than asked for.
    """
    prompt_lens, output_lens = jax.device_get((request.prompt_lens, request.max_output_lens))
    if options.num_blocks is None:
        return int((-(-(prompt_lens + output_lens - 1) // options.block_size)).sum())
    needed = int((-(-prompt_lens // options.block_size)).sum())
    if needed > options.num_blocks:
        raise GenerateError(
            f"the prompts need {needed} blocks of {options.block_size} tokens, --num-blocks gives {options.num_blocks}"
        )
    return options.num_blocks


def compile_programs(options: argparse.Namespace, programs: loop.Programs, *arguments) -> list:
    """The compiled programs that the run calls: `[generate]`, or `[prefill, decode]` for --stream."""
    if not options.stream:
        return [programs.generate.lower(*arguments).compile()]
    weights, _, request = arguments
    generation = jax.eval_shape(programs.prefill, *arguments)
    lowered = programs.prefill.lower(*arguments), programs.decode.lower(weights, generation, request)
    return [program.compile() for program in lowered]


def bar(description: str) -> Progress:
    """A bar on stderr that moves as long as it is open; nothing where stderr is no terminal."""
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn(description), BarColumn(), TimeElapsedColumn()
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    progress.add_task(description, total=None)
    return progress


def summarize(generation: loop.Generation, num_tokens: int, seconds: float, compile_seconds: float) -> str:
    """One line on how fast it went and how well the blocks were filled."""
    blocks = jax.device_get(generation.allocator)
    num_blocks = blocks.ref_counts.size
    num_used = num_blocks - int(blocks.num_free)
    num_slots = num_used * blocks.block_size
    waste = 100 * (1 - int(blocks.seq_lens.sum()) / max(num_slots, 1))
    return (
        f"{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.1f} tokens/s "
        f"(and {compile_seconds:.1f} s to compile); {num_used} of {num_blocks} blocks used, "
        f"cache waste {waste:.1f}% of their {num_slots} slots"
    )


def default_dtype() -> str:
    """What --dtype=auto means here.

    Raises:
        GenerateError: JAX finds no device that it may use.
    """
    try:
        return "float32" if jax.default_backend() == "cpu" else "bfloat16"
    except (RuntimeError, AssertionError) as error:
        reason = str(error) or f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
        raise GenerateError(f"JAX finds no device: {reason}") from error


def run(options: argparse.Namespace) -> None:
    """Generates, writes the results to stdout and a summary to stderr.

    Raises:
        GenerateError, CheckpointError: something asked for cannot be done.
    """
    dtype = default_dtype()  # first of all, since without a device nothing works
    dtype = dtype if options.dtype == "auto" else options.dtype
    model, config, tokenizer, eos_token_ids = load_model(options.model, dtype)
    prompt_ids = encode(tokenizer, options.prompt, config)
    request = loop.make_request(
        prompt_ids,
        max_new_tokens=options.max_new_tokens,
        max_position_embeddings=config.max_position_embeddings,
        stop_token_ids=eos_token_ids,
        sampling=loop.Sampling(options.temperature, options.top_k, options.top_p),
        seed=options.seed,
    )
    num_blocks = choose_num_blocks(options, request)
    programs = loop.make_programs(model, implementation=options.implementation)
    weights = programs.weights

    started = time.perf_counter()
    try:
        with bar("Compiling"):
            caches = loop.make_caches(config, num_blocks, options.block_size, dtype)
            first, *rest = compile_programs(options, programs, weights, caches, request)
    except (NotImplementedError, ValueError) as error:  # what the library cannot do, in its own words
        raise GenerateError(str(error)) from error
    compiled = time.perf_counter()
    writer = Writer(tokenizer, options.prompt, prompt_ids, options.json)
    with contextlib.nullcontext() if options.stream else bar("Generating"):
        generation = first(weights, caches, request)
        results = loop.outputs(generation)
    writer.update(results)
    while any(finish_reason == "running" for _, finish_reason in results):
        generation = rest[0](weights, generation, request)
        results = loop.outputs(generation)
        writer.update(results)
    seconds = time.perf_counter() - compiled
    num_tokens = sum(len(token_ids) for token_ids, _ in results)
    print(summarize(generation, num_tokens, seconds, compiled - started), file=sys.stderr)


def prepare_streams() -> None:
    """Leads closed streams nowhere, and has stdout escape the characters that its encoding lacks."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def discard_stdout() -> None:
    """Leads stdout nowhere once it has failed, since the exit flushes it once more."""
    with contextlib.suppress(OSError):  # it need not be a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    prepare_streams()
    try:
        run(parse(argv))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the text has seen enough
        discard_stdout()
        return 1
    except (GenerateError, CheckpointError, jax.errors.JaxRuntimeError, OSError) as error:
        if isinstance(error, OSError):
            discard_stdout()
        with contextlib.suppress(OSError):
            print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
