"""The options of the command line of `examples.serve`."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from examples.command_line import TINY, Parser, add_model_options, check, check_model_options
from examples.server.middleware import LOOPBACK, Access, is_allowed_host
from examples.server.tools import FORMATS
from examples.sharding import parse_mesh


def parse(argv: Sequence[str] | None, description: str | None = None) -> argparse.Namespace:
    """Reads the command line.

    Args:
        argv: the arguments; None for this process's own.
        description: the beginning of the help.

    Raises:
        CommandError: an option or its value is wrong.
    """
    parser = Parser("serve", description)
    add = parser.add_argument
    add("--model", metavar="DIR_OR_HUB_ID", default=str(TINY), help="Hugging Face folder or hub id (examples/tiny)")
    add("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 = from everywhere (%(default)s)")
    add("--port", metavar="N", type=int, default=8000, help="0 = any free one (%(default)s)")
    add("--max-model-len", metavar="N", type=int,
        help="tokens of the longest text, prompt and answer together (as many as the model has positions)")  # fmt: skip
    add("--max-num-seqs", metavar="N", type=int, default=16, help="texts that run at the same time (%(default)s)")
    add("--max-tokens-per-step", metavar="N", type=int, default=256,
        help="new tokens of one step: one for each running text, the others for prompts (%(default)s)")  # fmt: skip
    add("--between-tokens-ms", metavar="MS", type=float,
        help="how long prompts may hold up running texts: of 100 tokens, 99 come at most so long after the one before, "
        "if the machine can do it (as long as --max-tokens-per-step takes)")  # fmt: skip
    add("--max-queued", metavar="N", type=int, default=256,
        help="texts that may wait; more are answered with status 429 (%(default)s)")  # fmt: skip
    add_model_options(add)
    add("--num-blocks", metavar="N", type=int,
        help="blocks in the cache; fewer in layers with a sliding window, which need no more "
        "(what --max-num-seqs of the longest texts need, if memory allows)")  # fmt: skip
    add("--host-blocks", metavar="N", type=int, default=0,
        help="blocks in host memory, where texts that must wait keep what is computed (%(default)s)")  # fmt: skip
    add("--speculate", metavar="N", type=int, default=0,
        help="tokens of a text that a step may verify, guessed from the text; 0 = none (%(default)s)")  # fmt: skip
    add("--shared-prefixes", metavar="N", type=int, default=0,
        help="beginnings that a step may read once for all texts that share them; 0 = none (%(default)s)")  # fmt: skip
    add("--mesh", metavar="SIZES", help="tp=2 splits the model over two GPUs, dp=2 runs two copies of it (one GPU)")
    add("--processes", metavar="N", type=int, default=1,
        help="processes that share the model, each with a GPU; they are started here unless --process is given "
        "(%(default)s)")  # fmt: skip
    add("--process", metavar="I", type=int,
        help="which of them this is, if each is started by hand, on hosts of its own; 0 listens")  # fmt: skip
    add("--coordinator", metavar="HOST:PORT", default="localhost:8100",
        help="where process 0 can be reached by the others, at two ports in a row (%(default)s)")  # fmt: skip
    _add_clients_options(add)
    add("--drain-seconds", metavar="S", type=int, default=60, help="to finish requests in at the end (%(default)s)")
    add("--step-seconds", metavar="S", type=float, default=120.0,
        help="after which a step that has not ended makes /health answer 503 (%(default)s)")  # fmt: skip
    options = parser.parse_args(argv)

    check(options, "--port", 0 <= options.port < 2**16, "from 0 to 65535")
    check(options, "--max-model-len", options.max_model_len is None or options.max_model_len >= 1, "1 or more")
    check(options, "--max-num-seqs", options.max_num_seqs >= 1, "1 or more")
    is_enough = options.max_num_seqs <= options.max_tokens_per_step < 2**24
    check(options, "--max-tokens-per-step", is_enough, "--max-num-seqs or more, and below 2**24")
    limit = options.between_tokens_ms
    check(options, "--between-tokens-ms", limit is None or 0 < limit < float("inf"), "above 0")
    is_measurable = limit is None or options.processes == 1
    check(options, "--between-tokens-ms", is_measurable, "left out where several processes share the model")
    check(options, "--max-queued", options.max_queued >= 0, "0 or more")
    check(options, "--host-blocks", options.host_blocks >= 0, "0 or more")
    check(options, "--speculate", options.speculate >= 0, "0 or more")
    check(options, "--shared-prefixes", options.shared_prefixes >= 0, "0 or more")
    check(options, "--drain-seconds", options.drain_seconds >= 1, "1 or more")
    check(options, "--step-seconds", options.step_seconds > 0, "above 0")
    check(options, "--processes", options.processes >= 1, "1 or more")
    if options.process is None and options.processes == 1:
        options.process = 0
    is_one_of_them = options.process is None or 0 <= options.process < options.processes
    check(options, "--process", is_one_of_them, "from 0 to one less than --processes")
    check(options, "--coordinator", re.fullmatch(r"[^:]+:\d{1,5}", options.coordinator) is not None, "HOST:PORT")
    for flag in ("--api-key", "--served-model-name", "--cors-origins", "--allowed-hosts"):
        values = getattr(options, flag[2:].replace("-", "_")) or ["x"]
        check(options, flag, all(value.strip() == value != "" for value in values), "texts without spaces around them")
    options.mesh = parse_mesh(options.mesh) if options.mesh else None
    is_one_copy = options.mesh is None or options.mesh["dp"] == 1
    check(options, "--processes", options.processes == 1 or is_one_copy, "1 with copies of the model (dp)")
    check_model_options(options)
    return options


def access_of(options: argparse.Namespace) -> Access:
    """Says who may call the server."""
    hosts = options.allowed_hosts
    if hosts is None:
        # Only a server that listens to its own machine alone knows by which names it is called.
        hosts = [LOOPBACK] if is_allowed_host(_in_a_header(options.host), [LOOPBACK]) else ["*"]
    return Access(
        api_keys=tuple(options.api_key),
        hosts=None if "*" in hosts else tuple(hosts),
        origins=tuple(options.cors_origins),
        is_logged=options.access_log,
    )


def _in_a_header(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _add_clients_options(add) -> None:
    """Adds the options about access, and about what clients see."""
    add("--served-model-name", metavar="NAME", nargs="+",
        help="names by which clients call the model (its folder's name, or its hub id)")  # fmt: skip
    add("--chat-template", metavar="FILE", type=Path, help="a template in Jinja's language (the model's own)")
    add("--tool-call-parser", choices=FORMATS,
        help="form of the model's tool calls: hermes (also Qwen's) or llama3 (tools are refused)")  # fmt: skip
    add("--api-key", metavar="KEY", nargs="+", default=[],
        help="clients must send one of these, except to /health, /metrics and /version (no key is needed)")  # fmt: skip
    add("--cors-origins", metavar="ORIGIN", nargs="+", default=[],
        help="web pages that may call the server, such as https://example.org; * = all (none)")  # fmt: skip
    add("--allowed-hosts", metavar="NAME", nargs="+",
        help="names by which the server may be called, loopback = this machine's own; * = any (loopback if --host is, "
        "otherwise any)")  # fmt: skip
    add("--access-log", action="store_true", help="write a line for each request to stderr")
