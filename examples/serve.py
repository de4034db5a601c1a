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
/health, and /metrics for Prometheus. All requests share one cache: each holds the blocks that it needs, equal
beginnings are computed once, and when blocks run out the request that came last waits and continues later.

Sizes: a running text holds one block for each --block-size tokens of its prompt and its answer, so that --num-blocks
bounds the tokens of all running texts together. --max-num-seqs bounds the texts that run at the same time.
--max-tokens-per-step bounds the tokens that one step computes, one for each running text and the others of prompts: if
it is larger, first tokens come sooner, but texts that already run wait longer for their next token.

Several GPUs: --mesh tp=2 splits the model over two of them. --mesh dp=2 runs two copies of it, which share the
requests; each copy has --num-blocks blocks and runs --max-num-seqs texts. --mesh dp=2,tp=4 is both, on eight GPUs.

SIGTERM or Ctrl-C ends the server once all requests are answered or --drain-seconds have passed; a second one ends it at
once.
"""

import argparse
import asyncio
import contextlib
import functools
import gc
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import uvicorn
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from tokenizers import Tokenizer

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples import loop
from examples.checkpoint import CheckpointError, find_folder, load_model
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
from examples.decoder import Decoder
from examples.server.api import MAX_LOGPROBS
from examples.server.app import Server, model_name
from examples.server.chat import load_template
from examples.server.worker import Worker
from examples.sharding import MeshError, make_mesh, parse_mesh, replicas
from examples.step import make_step, xla_options
from paged_jax import PagedKVCache, engine

SAMPLE = """The quick brown fox jumps over the lazy dog. In 1969 people first walked on the Moon; a list in Python is
written [1, 2, 3], and `for x in values: print(x)` prints what is in one."""  # int8 scales fit this text
MEMORY_SHARE = 0.85  # fraction of the device's memory for weights and cache; a step's intermediates need the rest
BACKLOG = 2048  # connections that the operating system keeps until the server takes them


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line.

    Raises:
        CommandError: an option or its value is wrong.
    """
    parser = Parser("serve", __doc__)
    add = parser.add_argument
    add("--model", metavar="DIR_OR_HUB_ID", default=str(TINY), help="Hugging Face folder or hub id (examples/tiny)")
    add("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 = from everywhere (%(default)s)")
    add("--port", metavar="N", type=int, default=8000, help="0 = any free one (%(default)s)")
    add("--max-num-seqs", metavar="N", type=int, default=16, help="texts that run at the same time (%(default)s)")
    add("--max-tokens-per-step", metavar="N", type=int, default=256,
        help="new tokens of one step: one for each running text, the others for prompts (%(default)s)")  # fmt: skip
    add("--max-queued", metavar="N", type=int, default=256,
        help="texts that may wait; more are answered with status 429 (%(default)s)")  # fmt: skip
    add_model_options(add)
    add("--num-blocks", metavar="N", type=int,
        help="blocks in the cache (what --max-num-seqs of the longest texts need, if memory allows)")  # fmt: skip
    add("--host-blocks", metavar="N", type=int, default=0,
        help="blocks in host memory, where texts that must wait keep what is computed (%(default)s)")  # fmt: skip
    add("--mesh", metavar="SIZES", help="tp=2 splits the model over two GPUs, dp=2 runs two copies of it (one GPU)")
    add("--processes", metavar="N", type=int, default=1,
        help="processes that share the model, each started with the same options (%(default)s)")  # fmt: skip
    add("--process", metavar="I", type=int, default=0, help="which of them this is; 0 listens (%(default)s)")
    add("--coordinator", metavar="HOST:PORT", default="localhost:8100",
        help="where process 0 can be reached by the others, at two ports in a row (%(default)s)")  # fmt: skip
    add("--drain-seconds", metavar="S", type=int, default=60, help="to finish requests in at the end (%(default)s)")
    options = parser.parse_args(argv)

    check(options, "--port", 0 <= options.port < 2**16, "from 0 to 65535")
    check(options, "--max-num-seqs", options.max_num_seqs >= 1, "1 or more")
    is_enough = options.max_num_seqs <= options.max_tokens_per_step < 2**24
    check(options, "--max-tokens-per-step", is_enough, "--max-num-seqs or more, and below 2**24")
    check(options, "--max-queued", options.max_queued >= 0, "0 or more")
    check(options, "--host-blocks", options.host_blocks >= 0, "0 or more")
    check(options, "--drain-seconds", options.drain_seconds >= 1, "1 or more")
    check(options, "--processes", options.processes >= 1, "1 or more")
    check(options, "--process", 0 <= options.process < options.processes, "from 0 to one less than --processes")
    check(options, "--coordinator", re.fullmatch(r"[^:]+:\d{1,5}", options.coordinator) is not None, "HOST:PORT")
    options.mesh = parse_mesh(options.mesh) if options.mesh else None
    is_one_copy = options.mesh is None or options.mesh["dp"] == 1
    check(options, "--processes", options.processes == 1 or is_one_copy, "1 with copies of the model (dp)")
    check_model_options(options)
    return options


def make_caches(
    options: argparse.Namespace,
    model: Decoder,
    config: DecoderConfig,
    tokenizer: Tokenizer,
    dtype: str,
    mesh: Mesh | None = None,
) -> tuple[PagedKVCache, ...]:
    """Makes a cache for each layer, with --num-blocks blocks or else as many as can be used and fit in memory.

    Raises:
        CommandError: not a single block fits in memory.
    """
    cache_dtype = dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    ids = tokenizer.encode(SAMPLE).ids[: config.max_position_embeddings]
    sample = loop.make_request([ids], max_new_tokens=1, max_position_embeddings=config.max_position_embeddings)
    scales = choose_scales(options, config, cache_dtype, loop.make_programs(model), sample, dtype, mesh)
    num_blocks = options.num_blocks
    if num_blocks is None:
        num_blocks = options.max_num_seqs * -(-config.max_position_embeddings // options.block_size)
        sizes = options.block_size, config.num_kv_heads, config.head_size
        block_bytes = PagedKVCache.create(1, *sizes, dtype=cache_dtype).nbytes * config.num_layers
        device = (jax.local_devices() if mesh is None else mesh.local_devices)[0]
        if (memory := device.memory_stats()) and "bytes_limit" in memory:
            room = MEMORY_SHARE * memory["bytes_limit"] - memory["bytes_in_use"]
            num_blocks = min(num_blocks, int(room // (block_bytes // config.num_parts)))
        if options.processes > 1:  # all processes must have the same number of blocks
            num_blocks = int(np.min(multihost_utils.process_allgather(np.int32(num_blocks))))
        if num_blocks < 1:
            raise CommandError("the weights leave no memory for the cache")
    return loop.make_caches(config, num_blocks, options.block_size, cache_dtype, scales=scales, mesh=mesh)


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
    weights, step = make_step(model, implementation=options.implementation)
    kind = engine.LeadingEngine if options.processes > 1 and options.process == 0 else engine.Engine
    try:
        return kind(
            cast(engine.Step, step),  # the step takes the engine's batches too, which have the attributes that it reads
            weights,
            make_caches(options, model, config, tokenizer, dtype, mesh),
            engine.EngineConfig(
                max_model_len=config.max_position_embeddings,
                max_num_seqs=options.max_num_seqs,
                max_tokens_per_step=options.max_tokens_per_step,
                max_logprobs=min(MAX_LOGPROBS, config.vocab_size),
                num_host_blocks=options.host_blocks,
            ),
            tokenizer=tokenizer,
            show_progress=options.process == 0,
            compiler_options=functools.partial(xla_options, weights=weights, mesh=mesh),
        )
    except (NotImplementedError, ValueError) as error:  # the library says what it cannot do
        raise CommandError(str(error)) from error


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
    template = load_template(folder)
    meshes = [None] if options.mesh is None else replicas(make_mesh(options.mesh))
    copies = [load_model(folder, dtype, mesh) for mesh in meshes]
    _, config, tokenizer, eos_token_ids = copies[0]
    engines = [
        make_engine(options, model, config, tokenizer, dtype, mesh)
        for (model, *_), mesh in zip(copies, meshes, strict=True)
    ]
    first, others = engines[0], (host, int(port) + 1)
    if options.process:
        engine.follow(first, others)
        return None
    if isinstance(first, engine.LeadingEngine):
        first.wait_for_followers(others, options.processes - 1)
        if until_end is not None:
            until_end.enter_context(first)
    gc.freeze()  # the objects made so far live to the end: searching them for garbage would delay some steps
    worker = Worker(engine.Replicas(engines) if len(engines) > 1 else first, options.max_queued)
    name = model_name(options.model)
    return Server(worker, tokenizer, template, name, eos_token_ids, config.vocab_size)


class HttpServer(uvicorn.Server):
    """Uvicorn, which after a signal finishes its requests and ends with exit code 0.

    Requests that are unfinished when time is up or a second signal comes are cancelled. The app tells their clients.

    Args:
        config: uvicorn's config.
        drain_seconds: how long to wait for requests.
    """

    def __init__(self, config: uvicorn.Config, drain_seconds: float):
        super().__init__(config)
        self._drain_seconds, self._is_hurried = drain_seconds, False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Makes SIGINT and SIGTERM end the server, if it runs in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: dict[int, Any] = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Notes a signal."""
        self._is_hurried = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for all requests, or ends them."""
        ending = asyncio.create_task(self._end_requests())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_requests(self) -> None:
        deadline = time.monotonic() + self._drain_seconds
        while not self._is_hurried and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        for task in self.server_state.tasks:
            task.cancel()
        await asyncio.sleep(1)  # in which clients that read are told
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def make_http_server(server: Server, drain_seconds: float) -> HttpServer:
    """Makes the HTTP server; its `run(sockets=[...])` serves until `should_exit` is set or a signal comes."""
    return HttpServer(
        uvicorn.Config(server.app(), log_level="warning", access_log=False, backlog=BACKLOG), drain_seconds
    )


def bind(host: str, port: int) -> socket.socket:
    """Takes an address, before anything is compiled, which takes a while.

    Raises:
        CommandError: there is no such address, or another program has it.
    """
    with contextlib.ExitStack() as on_failure:
        try:
            listener = on_failure.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
        except OSError as error:
            raise CommandError(f"cannot listen at {host}:{port}: {error.strerror}") from None
        on_failure.pop_all()
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL of the OpenAI interface behind a socket that is bound."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if listener.family == socket.AF_INET6 else f"http://{host}:{port}/v1"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    try:
        options = parse(argv)
        if options.process:
            make_server(options)
            return 0
        with bind(options.host, options.port) as listener, contextlib.ExitStack() as until_end:
            the_server = make_server(options, until_end)
            assert the_server is not None
            server = make_http_server(the_server, options.drain_seconds)
            listener.listen(BACKLOG)  # from now on clients can connect; they wait until the server is up
            print(f"Serving {model_name(options.model)} at {url_of(listener)}", file=sys.stderr, flush=True)
            server.run(sockets=[listener])
            gc.unfreeze()  # so that the interpreter can free everything at its end
    except KeyboardInterrupt:
        return 130
    except (CommandError, CheckpointError, MeshError, jax.errors.JaxRuntimeError, MemoryError) as error:
        print("serve:", one_line(error), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
