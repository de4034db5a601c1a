"""Serves a model over HTTP with OpenAI's interface, many requests at once through one paged KV cache.

    python -m examples.serve
    python -m examples.serve --model Qwen/Qwen3-0.6B --port 8000 --max-num-seqs 128

Without --model the tiny model in examples/tiny answers; its text looks like Python's documentation. Then:

    curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
        -d '{"model": "tiny", "prompt": "The for statement", "max_tokens": 64, "stream": true}'

or, with the `openai` package,

    client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hello"}])

The server has /v1/completions, /v1/chat/completions (with the chat template of the model's folder), /v1/models,
/tokenize, /detokenize, /version, /health, and /metrics for Prometheus. All requests share one cache: each holds the
blocks that it needs, equal beginnings are computed once, and when blocks run out the request that came last waits and
continues later.

Who may call: everybody who can reach --host, unless --api-key is given. No web page may, unless --cors-origins names
it. A server that listens at this machine's own address answers to this machine's own names, unless --allowed-hosts
names others, as a proxy may use.

Sizes: a running text holds one block for each --block-size tokens of its prompt and its answer, so that --num-blocks
bounds the tokens of all running texts together. Layers with a sliding window hold blocks for the window only. --max-
num-seqs bounds the texts that run at the same time. --max-tokens-per-step bounds the tokens that one step computes, one
for each running text and the others of prompts: if it is larger, first tokens come sooner, but texts that already run
wait longer for their next token. --between-tokens-ms bounds how long, for 99 of 100 tokens: the server measures its
steps at the start, and goes by the times of its steps from then on.

Texts that repeat their prompt or themselves, such as edits and code, come faster with --speculate 4: while few run,
each step also verifies tokens that the text suggests. Answers stay the same; where guesses are wrong, none is made. The
tokens that were guessed, and those that were right, are counted in /metrics.

Where many texts begin with one long prompt, --shared-prefixes 4 lets each step read up to four such beginnings once for
all of their texts, if that spares enough.

Answers can be kept to a JSON schema (response_format), a regular expression, some choices or a grammar (guided_regex,
guided_choice, guided_grammar). With --tool-call-parser, models call tools. A request with a lower priority goes first.

Several GPUs: --mesh tp=2 splits the model over two of them, and --mesh dcp=2 the blocks of the cache, for long texts.
--mesh dp=2 runs two copies of the model, which share the requests; each copy has --num-blocks blocks and runs
--max-num-seqs texts. --mesh dp=2,tp=4 is both, on eight GPUs. One process launches the steps of many GPUs slowly, so
that a process for each GPU is faster. This command starts eight on this host:

    python -m examples.serve --mesh tp=8 --processes 8

After a step that failed, requests get errors, /health answers 503, and the server tries the engine until it serves
again. If a step does not end within --step-seconds, /health answers 503. If the engine can never be used again, the
process ends with exit code 1.

SIGTERM or Ctrl-C ends the server once all requests are answered or --drain-seconds have passed; a second one ends it
within seconds.
"""

import argparse
import bisect
import contextlib
import dataclasses
import functools
import gc
import logging
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from tokenizers import Tokenizer

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples import loop
from examples.checkpoint import CheckpointError, find_folder, load_model
from examples.command_line import CommandError, check, choose_dtype, choose_scales, one_line, use_compilation_cache
from examples.config import DecoderConfig
from examples.decoder import Decoder
from examples.server import options as command
from examples.server import processes
from examples.server.api import MAX_LOGPROBS
from examples.server.app import Model, Server, model_name
from examples.server.chat import load_template
from examples.server.http import BACKLOG, bind, make_http_server, url_of
from examples.server.memory import available_memory
from examples.server.worker import Worker
from examples.sharding import MeshError, make_mesh, peer_sum, replicas
from examples.step import make_step, xla_options
from paged_jax import engine

SAMPLE = """The quick brown fox jumps over the lazy dog. In 1969 people first walked on the Moon; a list in Python is
written [1, 2, 3], and `for x in values: print(x)` prints what is in one."""  # int8 scales fit this text
MEMORY_SHARE = 0.85  # fraction of the device's memory for weights and cache; a step's intermediates need the rest
MEASURED_LEN = 1024  # tokens of the prompts with which steps are measured
HOST_SHARE = 0.5  # fraction of a CPU machine's free memory for the cache; other programs need the rest


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line.

    Raises:
        CommandError: an option or its value is wrong.
    """
    return command.parse(argv, __doc__)


def longest_text(options: argparse.Namespace, config: DecoderConfig) -> int:
    """The most tokens of a text, prompt and answer together.

    Raises:
        CommandError: the model has fewer positions than --max-model-len.
    """
    limit, positions = options.max_model_len, config.max_position_embeddings
    check(options, "--max-model-len", limit is None or limit <= positions, f"at most the model's {positions} positions")
    return positions if limit is None else limit


def make_caches(
    options: argparse.Namespace,
    model: Decoder,
    config: DecoderConfig,
    tokenizer: Tokenizer,
    dtype: str,
    mesh: Mesh | None = None,
) -> tuple[loop.Cache, ...]:
    """Makes a cache for each layer, with --num-blocks blocks or else as many as can be used and fit in memory.

    Layers with a sliding window get no more blocks than --max-num-seqs texts hold at the same time.

    Raises:
        CommandError: not a single block fits in memory.
    """
    cache_dtype = dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    ids = tokenizer.encode(SAMPLE).ids[: config.max_position_embeddings]
    sample = loop.make_request([ids], max_new_tokens=1, max_position_embeddings=config.max_position_embeddings)
    scales = choose_scales(options, config, cache_dtype, loop.make_programs(model), sample, dtype, mesh)
    num_blocks = options.num_blocks
    sizes = functools.partial(
        engine.pool_sizes,
        config.sliding_windows,
        block_size=options.block_size,
        config=engine_config(options, config),
    )
    if num_blocks is None:
        num_blocks = options.max_num_seqs * -(-longest_text(options, config) // options.block_size)
        scale = None if cache_dtype == dtype else 1.0
        one = loop.make_cache(config, 1, options.block_size, cache_dtype, scale, scale)
        parts = config.num_parts if config.latent is None else 1  # every device has all latents
        device = (jax.local_devices() if mesh is None else mesh.local_devices)[0]
        if (memory := device.memory_stats()) and "bytes_limit" in memory:
            room = MEMORY_SHARE * memory["bytes_limit"] - memory["bytes_in_use"]
            room *= parts * config.num_shards
        elif device.platform == "cpu" and (available := available_memory()) is not None:
            copies = 1 if options.mesh is None else options.mesh["dp"]  # of the model, all in one memory
            room = HOST_SHARE * available / copies
        else:
            room = math.inf
        # The largest number of blocks with which the pools of all layers fit.
        numbers = range(1, num_blocks + 1)
        num_blocks = bisect.bisect_right(numbers, room, key=lambda number: sum(sizes(num_blocks=number)) * one.nbytes)
        if options.processes > 1:  # all processes must have the same number of blocks
            num_blocks = int(np.min(multihost_utils.process_allgather(np.int32(num_blocks))))
        if num_blocks < 1:
            raise CommandError("the weights leave no memory for the cache")
    counts = sizes(num_blocks=num_blocks)
    return loop.make_caches(config, counts, options.block_size, cache_dtype, scales=scales, mesh=mesh)


def engine_config(options: argparse.Namespace, config: DecoderConfig) -> engine.EngineConfig:
    """The sizes and policies of an engine.

    Raises:
        CommandError: the model has fewer positions than --max-model-len.
    """
    return engine.EngineConfig(
        max_model_len=longest_text(options, config),
        max_num_seqs=options.max_num_seqs,
        max_tokens_per_step=options.max_tokens_per_step,
        max_logprobs=min(MAX_LOGPROBS, config.vocab_size),
        num_host_blocks=options.host_blocks,
        max_draft_tokens=options.speculate,
        max_shared_prefixes=options.shared_prefixes,
    )


def make_engine(
    options: argparse.Namespace,
    model: Decoder,
    config: DecoderConfig,
    tokenizer: Tokenizer,
    dtype: str,
    mesh: Mesh | None,
) -> engine.Engine:
    """Makes an engine of a model, with a cache beside it, and compiles its programs.

    Raises:
        CommandError: something cannot be done.
    """
    model.limit(longest_text(options, config))
    peers = peer_sum(config, dtype, mesh, options.custom_all_reduce)
    weights, step = make_step(model, implementation=options.implementation, peers=peers)
    kind = engine.LeadingEngine if options.processes > 1 and options.process == 0 else engine.Engine
    try:
        return kind(
            cast(engine.Step, step),  # the step takes the engine's batches too, which have the attributes that it reads
            weights,
            make_caches(options, model, config, tokenizer, dtype, mesh),
            engine_config(options, config),
            sliding_windows=config.sliding_windows,
            tokenizer=tokenizer,
            show_progress=options.process == 0,
            compiler_options=functools.partial(xla_options, weights=weights, mesh=mesh, peers=peers),
        )
    except (NotImplementedError, ValueError) as error:  # the library says what it cannot do
        raise CommandError(str(error)) from error


def keep_up(options: argparse.Namespace, the_engine: engine.Engine) -> None:
    """Bounds the tokens of steps that compute prompts beside running texts by --between-tokens-ms.

    The engine begins with the size that is fast enough for prompts of `MEASURED_LEN` tokens, or else with the smallest;
    how long it takes is said on stderr. Then it goes by the times of its own steps.
    """
    if options.between_tokens_ms is None:
        return
    times = the_engine.measure_steps(min(MEASURED_LEN, the_engine.config.max_model_len))
    sizes = {s.num_tokens: 1e3 * seconds for s, seconds in times.items() if not s.is_decode and not s.is_verify}
    most = max((size for size, ms in sizes.items() if ms <= options.between_tokens_ms), default=min(sizes))
    print(f"Steps with prompts beside running texts: {most} tokens, {sizes[most]:.1f} ms", file=sys.stderr, flush=True)
    seconds = options.between_tokens_ms / 1e3
    pace = {"max_tokens_beside_decodes": most, "between_tokens_seconds": seconds}
    the_engine.reset(dataclasses.replace(the_engine.config, **pace))


def make_server(options: argparse.Namespace, until_end: contextlib.ExitStack | None = None) -> Server | None:
    """Loads the model, once for each of its copies, and compiles its programs.

    Args:
        options: the options of the command line.
        until_end: the engine is entered into this stack, which the caller closes at the end.

    Returns:
        The server; None in a process other than the first, after it has followed the first one to its end.

    Raises:
        CommandError, CheckpointError, MeshError: something cannot be done.
    """
    host, port = options.coordinator.rsplit(":", 1)
    if options.processes > 1:
        jax.distributed.initialize(options.coordinator, options.processes, options.process)
    dtype = choose_dtype(options)
    if not options.no_compilation_cache:
        use_compilation_cache()
    folder = find_folder(options.model)
    template = load_template(folder, options.chat_template)
    meshes = [None] if options.mesh is None else replicas(make_mesh(options.mesh))
    copies = [load_model(folder, dtype, mesh, split_experts=options.split_experts) for mesh in meshes]
    _, config, tokenizer, eos_token_ids = copies[0]
    longest_text(options, config)  # which may be refused, before anything is compiled
    engines = [
        make_engine(options, model, config, tokenizer, dtype, mesh)
        for (model, *_), mesh in zip(copies, meshes, strict=True)
    ]
    for each in engines:
        keep_up(options, each)
    first, others = engines[0], (host, int(port) + 1)
    if options.process:
        engine.follow(first, others)
        return None
    if isinstance(first, engine.LeadingEngine):
        first.wait_for_followers(others, options.processes - 1)
        if until_end is not None:
            until_end.enter_context(first)
    gc.freeze()  # the objects made so far live to the end: searching them for garbage would delay some steps
    the_engine = engine.Replicas(engines) if len(engines) > 1 else first
    most_tokens = the_engine.check([0], engine.SamplingParams()) - 1  # all but the last one, which is not in the cache
    names = tuple(options.served_model_name or [model_name(options.model)])
    model = Model(names, tokenizer, template, eos_token_ids, config.vocab_size, most_tokens, options.tool_call_parser)
    worker = Worker(the_engine, options.max_queued, step_seconds=options.step_seconds)
    return Server(worker, model, command.access_of(options))


def show_log() -> None:
    """Writes the library's and the server's log to stderr."""
    log = logging.getLogger("paged_jax")
    if not log.handlers:
        log.addHandler(handler := logging.StreamHandler())
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.setLevel(logging.INFO)


def end(worker: Worker) -> int:
    """Says what went wrong with the engine, if anything did, and returns the exit code of the process."""
    if worker.is_alive:
        print("serve: a step of the engine does not end; the process ends without it", file=sys.stderr, flush=True)
        os._exit(1)  # an ordinary end would wait for the device
    if worker.broken is not None:
        print("serve:", worker.broken, file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    try:
        options = parse(argv)
        if options.process is None:
            command = [sys.executable, "-m", "examples.serve", *(sys.argv[1:] if argv is None else argv)]
            return processes.run(command, options.processes)
        if options.process:
            make_server(options)
            return 0
        with bind(options.host, options.port) as listener, contextlib.ExitStack() as until_end:
            the_server = make_server(options, until_end)
            assert the_server is not None
            server = make_http_server(the_server, options.drain_seconds)
            show_log()
            listener.listen(BACKLOG)  # from now on clients can connect; they wait until the server is up
            print(f"Serving {the_server.name} at {url_of(listener)}", file=sys.stderr, flush=True)
            server.run(sockets=[listener])
            gc.unfreeze()  # so that the interpreter can free everything at its end
            return end(the_server.worker)
    except KeyboardInterrupt:
        return 130
    except (CommandError, CheckpointError, MeshError, jax.errors.JaxRuntimeError, MemoryError) as error:
        print("serve:", one_line(error), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
