"""Generates text through the paged KV cache, from the command line.

    python -m examples.generate
    python -m examples.generate --model Qwen/Qwen3-0.6B --prompt "The sea" --prompt "A mountain" --stream
    python -m examples.generate --json --temperature 0.8 --top-p 0.95 --seed 7 --prompt "The assert statement"
    python -m examples.generate --prompt-file prompts.txt --kv-cache-dtype int8
    echo "The for statement" | python -m examples.generate --prompt-file - --max-new-tokens 40

Without --model the tiny model in examples/tiny is used; its text looks like Python's documentation. The program writes
each prompt and the text after it to stdout or, with --json, one object for each prompt; it writes everything else to
stderr. The exit code is 2, with one line on stderr, if something cannot be done.
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
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples import loop
from examples.checkpoint import CheckpointError, load_model
from examples.command_line import (
    TINY,
    CommandError,
    Parser,
    add_model_options,
    check,
    check_model_options,
    choose_dtype,
    choose_scales,
    one_line,
    use_compilation_cache,
)
from examples.config import DecoderConfig
from examples.sharding import MeshError, make_mesh, parse_mesh, peer_sum, replicas
from examples.text import Writer

DEFAULT_PROMPT = 'The "for" statement'
TINY_TEMPERATURE = 0.6  # the tiny model's likeliest text soon repeats itself


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of the command line."""
    parser = Parser("generate", __doc__)
    add = parser.add_argument_group("what to write").add_argument
    add("--model", metavar="DIR_OR_HUB_ID", default=str(TINY), help="Hugging Face folder or hub id (examples/tiny)")
    add("--prompt", metavar="TEXT", action="append",
        help=f"may be given several times; --prompt=-x if it starts with a dash ({DEFAULT_PROMPT})")  # fmt: skip
    add("--prompt-file", metavar="FILE", action="append",
        help="one prompt a line, or in a file named *.jsonl one JSON string a line; - reads stdin")  # fmt: skip
    add("--max-new-tokens", metavar="N", type=int, default=128, help="of each prompt, at most (%(default)s)")
    add("--stream", action="store_true", help="write text as it is generated")
    add("--json", action="store_true", help="write one JSON object a prompt")
    add = parser.add_argument_group("how tokens are picked").add_argument
    add("--temperature", metavar="T", type=float,
        help=f"0 = always the likeliest token (0 with --model, {TINY_TEMPERATURE} without)")  # fmt: skip
    add("--top-k", metavar="K", type=int, default=0, help="draw from the K likeliest tokens only; 0 = all")
    add("--top-p", metavar="P", type=float, default=1.0, help="... that together reach probability P; 1 = all")
    add("--seed", metavar="N", type=int, default=0, help="of the draws (%(default)s)")
    add = parser.add_argument_group("how it runs").add_argument
    add_model_options(add)
    add("--num-blocks", metavar="N", type=int,
        help="blocks in the cache (what the prompts may need at most); without a free one all texts end")  # fmt: skip
    add("--mesh", metavar="SIZES", type=str,
        help="tp=2 splits the model over two GPUs, dcp=2 the contexts; dp=2,tp=4 runs two such copies")  # fmt: skip
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line, and the prompts on stdin and in files.

    Raises:
        CommandError: an option or its value is wrong.
    """
    options = make_parser().parse_args(argv)

    check(options, "--max-new-tokens", 1 <= options.max_new_tokens < 2**31, "1 or more, and below 2**31")
    check(options, "--temperature", options.temperature is None or 0 <= options.temperature < math.inf, "0 or more")
    check(options, "--top-k", 0 <= options.top_k < 2**31, "0 or more")
    check(options, "--top-p", 0 < options.top_p <= 1, "above 0 and at most 1")
    check(options, "--seed", 0 <= options.seed < 2**32, "from 0 to 2**32 - 1")
    check_model_options(options)
    prompts = list(options.prompt or [])
    for name in options.prompt_file or []:
        prompts += read_prompts(name)
    options.prompt = prompts or [DEFAULT_PROMPT]
    options.mesh = None if options.mesh is None else parse_mesh(options.mesh)
    if options.temperature is None:
        options.temperature = TINY_TEMPERATURE if options.model == str(TINY) else 0.0
    return options


def read_prompts(name: str) -> list[str]:
    """Reads the prompts in a file, or on stdin if the name is "-"; empty lines are left out.

    Raises:
        CommandError: there is no such file, it is no text, or it holds no prompt.
    """
    path = name if name != "-" else "stdin"
    try:
        content = (sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()).decode()
    except (OSError, AttributeError) as error:  # a closed stdin is None
        raise CommandError(f"{path} cannot be read: {error}") from None
    except UnicodeDecodeError:
        raise CommandError(f"{path} is not valid UTF-8") from None
    lines = [line.removesuffix("\r") for line in content.split("\n")]
    prompts = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise CommandError(f"{path} holds no prompt")
    return [_json_prompt(path, *prompt) if name.endswith(".jsonl") else prompt[1] for prompt in prompts]


def _json_prompt(path: str, number: int, line: str) -> str:
    try:
        prompt = json.loads(line)
    except (ValueError, RecursionError):
        prompt = None
    if not isinstance(prompt, str):
        raise CommandError(f"{path}, line {number}: expected a JSON string")
    return prompt


def encode(tokenizer: Tokenizer, prompts: list[str], config: DecoderConfig) -> list[list[int]]:
    """Turns each prompt into token ids.

    Raises:
        CommandError: a prompt is empty, no text, or longer than the model's positions.
    """
    prompt_ids = []
    for i, prompt in enumerate(prompts):
        name = "the prompt" if len(prompts) == 1 else f"prompt {i + 1}"
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise CommandError(f"{name} is not valid UTF-8") from None
        ids = tokenizer.encode(prompt).ids
        if not prompt or not ids:
            raise CommandError(f"{name} is empty")
        if max(ids) >= config.vocab_size:
            raise CommandError(f"{name} has token {max(ids)}; the model's vocabulary has {config.vocab_size}")
        if len(ids) > config.max_position_embeddings:
            limit = config.max_position_embeddings
            raise CommandError(f"{name} has {len(ids)} tokens; the model has {limit} positions")
        prompt_ids.append(ids)
    return prompt_ids


def choose_num_blocks(options: argparse.Namespace, request: loop.Request) -> int:
    """Returns the number of blocks that the user asked for, or else the number that the batch may need at most.

    Raises:
        CommandError: the prompts alone need more than the user asked for.
    """
    prompt_lens, output_lens = jax.device_get((request.prompt_lens, request.max_output_lens))
    if options.num_blocks is None:
        return int((-(-(prompt_lens + output_lens - 1) // options.block_size)).sum())
    needed = int((-(-prompt_lens // options.block_size)).sum())
    if needed > options.num_blocks:
        raise CommandError(
            f"the prompts need {needed} blocks of {options.block_size} tokens, --num-blocks gives {options.num_blocks}"
        )
    return options.num_blocks


def make_caches(
    options: argparse.Namespace,
    config: DecoderConfig,
    programs: loop.Programs,
    request: loop.Request,
    dtype: str,
    mesh: Mesh | None,
) -> tuple[loop.Cache, ...]:
    """Makes empty caches. Scales for int8 that are not given are measured on the prompts."""
    num_blocks = choose_num_blocks(options, request)
    cache_dtype = dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    scales = choose_scales(options, config, cache_dtype, programs, request, dtype, mesh)
    return loop.make_caches(config, num_blocks, options.block_size, cache_dtype, scales=scales, mesh=mesh)


def compile_programs(options: argparse.Namespace, programs: loop.Programs, *arguments) -> list:
    """Compiles the programs that the run calls: `[generate]`, or `[prefill, decode]` for --stream."""
    if not options.stream:
        return [programs.generate.lower(*arguments).compile()]
    weights, _, request = arguments
    prefill = programs.prefill.lower(*arguments).compile()
    generation = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(programs.prefill, *arguments),
        prefill.output_shardings,
    )
    return [prefill, programs.decode.lower(weights, generation, request).compile()]


def bar(description: str) -> Progress:
    """Makes a bar on stderr that moves while it is open; it shows nothing if stderr is not a terminal."""
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn(description), BarColumn(), TimeElapsedColumn()
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    progress.add_task(description, total=None)
    return progress


def summarize(generations: list[loop.Generation], num_tokens: int, seconds: float, compile_seconds: float) -> str:
    """Says in one line how fast tokens were generated and how well they filled the blocks."""
    states = jax.device_get([generation.allocator for generation in generations])
    num_blocks = sum(blocks.ref_counts.size for blocks in states)
    num_used = num_blocks - sum(int(blocks.num_free) for blocks in states)
    num_slots = num_used * states[0].block_size
    waste = 100 * (1 - sum(int(blocks.seq_lens.sum()) for blocks in states) / max(num_slots, 1))
    return (
        f"{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.1f} tokens/s "
        f"(and {compile_seconds:.1f} s to compile); {num_used} of {num_blocks} blocks used, "
        f"cache waste {waste:.1f}% of their {num_slots} slots"
    )


def notices(results: list[tuple[list[int], str]], max_new_tokens: int, config: DecoderConfig) -> list[str]:
    """Makes a line for each text that ended early, for lack of blocks or positions."""
    lines = []
    for i, (token_ids, finish_reason) in enumerate(results):
        name = f"the text of prompt {i + 1}" if len(results) > 1 else "the text"
        cut = f"{name} was cut after {len(token_ids)} of {max_new_tokens} tokens"
        if finish_reason == "blocks":
            lines.append(f"{cut}: the cache has no free block left; --num-blocks gives it more")
        elif finish_reason == "length" and len(token_ids) < max_new_tokens:
            lines.append(f"{cut}: the model has no more than {config.max_position_embeddings} positions")
    return lines


def run(options: argparse.Namespace) -> None:
    """Generates text, and writes the results to stdout and a summary to stderr.

    Raises:
        CommandError, CheckpointError: something cannot be done.
    """
    dtype = choose_dtype(options)  # this comes first, as nothing works without a device
    if not options.no_compilation_cache:
        use_compilation_cache()
    # There is a copy of the model for each place of the mesh along "dp". Each copy has its own prompts and blocks.
    meshes = [None] if options.mesh is None else replicas(make_mesh(options.mesh))[: len(options.prompt)]
    loaded = [load_model(options.model, dtype, mesh, split_experts=options.split_experts) for mesh in meshes]
    _, config, tokenizer, eos_token_ids = loaded[0]
    prompt_ids = encode(tokenizer, options.prompt, config)
    for model, *_ in loaded:
        model.limit(max(map(len, prompt_ids)) + options.max_new_tokens)
    requests = [
        loop.make_request(
            prompt_ids[i :: len(meshes)],
            max_new_tokens=options.max_new_tokens,
            max_position_embeddings=config.max_position_embeddings,
            stop_token_ids=eos_token_ids,
            sampling=loop.Sampling(options.temperature, options.top_k, options.top_p),
            seed=options.seed + i,
        )
        for i in range(len(meshes))
    ]
    peers = [peer_sum(config, dtype, mesh, options.custom_all_reduce) for mesh in meshes]
    copies = [
        loop.make_programs(model, implementation=options.implementation, peers=its_peers)
        for (model, *_), its_peers in zip(loaded, peers, strict=True)
    ]

    started = time.perf_counter()
    firsts, rests, states = [], [], []
    try:
        with bar("Compiling"):
            for programs, request, mesh in zip(copies, requests, meshes, strict=True):
                caches = make_caches(options, config, programs, request, dtype, mesh)
                first, *rest = compile_programs(options, programs, programs.weights, caches, request)
                firsts.append(first)
                rests.append(rest)
                states.append(caches)
    except (NotImplementedError, ValueError) as error:  # the library says what it cannot do
        raise CommandError(str(error)) from error
    compiled = time.perf_counter()

    def advance(programs: list) -> list[tuple[list[int], str]]:
        """Runs a program of each copy at the same time; returns all results in the order of the prompts."""
        arguments = zip(programs, copies, states, requests, strict=True)
        states[:] = [run(copy.weights, state, request) for run, copy, state, request in arguments]
        texts = [loop.outputs(generation) for generation in states]
        return [texts[i % len(texts)][i // len(texts)] for i in range(len(prompt_ids))]

    writer = Writer(tokenizer, options.prompt, prompt_ids, options.json)
    with contextlib.nullcontext() if options.stream else bar("Generating"):
        results = advance(firsts)
    writer.update(results)
    while any(finish_reason == "running" for _, finish_reason in results):
        results = advance([decode for (decode,) in rests])
        writer.update(results)
    seconds = time.perf_counter() - compiled
    num_tokens = sum(len(token_ids) for token_ids, _ in results)
    for notice in notices(results, options.max_new_tokens, config):
        print("note:", notice, file=sys.stderr)
    print(summarize(states, num_tokens, seconds, compiled - started), file=sys.stderr)


def prepare_streams() -> None:
    """Replaces closed streams by ones that discard everything; makes stdout escape characters that it cannot encode."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def discard_stdout() -> None:
    """Discards everything on stdout after it has failed, because Python flushes it again at exit."""
    with contextlib.suppress(OSError):  # stdout may not be a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    prepare_streams()
    try:
        run(parse(argv))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of stdout, such as head, has ended
        discard_stdout()
        return 1
    except (CommandError, CheckpointError, MeshError, jax.errors.JaxRuntimeError, OSError) as error:
        if isinstance(error, OSError):
            discard_stdout()
        with contextlib.suppress(OSError):
            print("error:", one_line(error), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
