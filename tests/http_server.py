"""What the tests of the HTTP server share: a server in this process, one in a process of its own, and requests."""

import contextlib
import functools
import json
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import httpx
import openai

from examples import serve
from examples.server import http
from tests.conftest import PATIENCE
from tests.model_folders import short_tiny

ROOT = Path(__file__).parents[1]
NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, MAX_QUEUED = 24, 16, 4, 200
GOOD = {"model": "tiny", "prompt": "x", "max_tokens": 1}
PROMPT = "The assert statement "
HELLO = [{"role": "user", "content": "Hi"}]
JSON = {"content-type": "application/json"}


class Client:
    """Sends requests to a server on 127.0.0.1. It reads no certificates, for which a request would take 30 ms longer.

    Attributes:
        port: where the server listens.
    """

    port: int

    def __init__(self):
        self._connections = contextlib.ExitStack()

    @property
    def url(self):
        """The server's address, without a path."""
        return f"http://127.0.0.1:{self.port}"

    def get(self, path):
        """The answer to a GET request."""
        return httpx.get(self.url + path, timeout=PATIENCE, verify=False)

    def post(self, path, **content):
        """The answer to a POST request, whose content is `json` or `content`, as in `httpx.post`."""
        return httpx.post(self.url + path, timeout=PATIENCE, verify=False, **content)

    def openai(self):
        """OpenAI's own client of the server, a context manager."""
        http_client = openai.DefaultHttpxClient(timeout=PATIENCE, verify=False)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=http_client)

    def connect(self, request):
        """Sends a request, whole or in part, and returns the connection, which `disconnect` closes at the latest."""
        connection = socket.create_connection(("127.0.0.1", self.port), PATIENCE)
        self._connections.enter_context(connection)
        connection.sendall(request)
        return connection

    def disconnect(self):
        """Closes all connections. Fixtures call it, so that a test that fails leaves none open."""
        self._connections.close()


class Running(Client):
    """A server on 127.0.0.1, in a thread of this process; `more` are further options of its command line."""

    def __init__(self, *more):
        super().__init__()
        options = serve.parse(
            [
                *(
                    "--model",
                    str(short_tiny()),
                    "--num-blocks",
                    str(NUM_BLOCKS),
                    "--block-size",
                    str(BLOCK_SIZE),
                    "--port",
                    "0",
                ),
                *("--max-num-seqs", str(MAX_NUM_SEQS), "--max-tokens-per-step", "32"),
                *("--max-queued", str(MAX_QUEUED), "--host-blocks", "8", *more),
            ]
        )
        self.server = serve.make_server(options)
        self.worker, self.engine = self.server._worker, self.server._worker._engine
        self.worker.stats = functools.partial(self.worker.stats, PATIENCE)  # tests want the present ones
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.http = http.make_http_server(self.server, 20)
        self.thread = threading.Thread(target=self.http.run, kwargs={"sockets": [self.listener]})
        self.thread.start()
        wait_for(lambda: self.http.started)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        """Ends the server and its worker."""
        self.disconnect()
        self.http.should_exit = True
        self.thread.join(PATIENCE)
        self.listener.close()
        assert not self.thread.is_alive()
        assert not self.worker.is_alive

    @contextlib.contextmanager
    def held(self):
        """Lets the engine begin no step while the block runs, so that requests stay unfinished, however long it takes.

        The thread of the engine waits meanwhile. It takes requests, and ends others, before each step.
        """
        may_go, step = threading.Event(), self.engine.step

        def wait_and_step():
            assert may_go.wait(PATIENCE), "the test never lets the engine run its step"
            return step()

        with mock.patch.object(self.engine, "step", wait_and_step):
            try:
                yield
            finally:
                may_go.set()

    def wait_until_idle(self):
        """Waits until no request is unfinished; then checks that no block is held or lost."""
        wait_for(lambda: self.worker._unfinished == 0 and not self._blocks()[0])
        wait_for(lambda: self._blocks()[1].held == 0)
        assert sum(self._blocks()[1]) == NUM_BLOCKS

    def _blocks(self):
        """Whether the engine has work, and its counts of blocks, both between two steps."""
        answers = queue.SimpleQueue()
        self.worker._inbox.put(lambda: answers.put((self.engine.has_work, self.engine._blocks.counts())))
        return answers.get(timeout=PATIENCE)


class Process(Client):
    """A server in a process of its own, whose pool holds one long text; what it writes to stderr goes to a file.

    `patch` is Python code that runs before the server is made. `is_held` keeps the engine from its steps until
    `release`.
    """

    def __init__(self, path, *options, patch="", is_held=False):
        super().__init__()
        self.path, self._gate = path, path.with_suffix(".go")
        patch += _HELD.format(gate=str(self._gate)) if is_held else ""
        code = f"import sys\nfrom examples import serve\n{patch}\nsys.exit(serve.main(sys.argv[1:]))"
        command = [sys.executable, "-c", code, "--model", str(short_tiny()), "--port", "0"]
        with path.open("w") as stderr:
            self.process = subprocess.Popen(
                [*command, "--max-num-seqs", "1", "--num-blocks", "32", "--max-tokens-per-step", "16", *options],
                cwd=ROOT, stderr=stderr, env=os.environ | {"JAX_PLATFORMS": "cpu"},
            )  # fmt: skip

    def wait_until_it_serves(self):
        """Waits until the server has compiled its programs and listens."""
        wait_for(lambda: "\n" in self.errors or self.process.poll() is not None, 5 * PATIENCE)
        found = re.match(r"Serving tiny at http://127\.0\.0\.1:(\d+)/v1\n", self.errors)
        assert found, self.errors
        self.port = int(found[1])

    def close(self):
        """Ends the process, whatever it does, and closes the connections to it."""
        self.disconnect()
        self.process.kill()
        self.process.wait()

    @property
    def errors(self):
        """The text that the server has written to stderr."""
        return self.path.read_text()

    def ask(self, **fields):
        """Asks for a text, and returns the connection. An answer with `stream` begins before the engine's first step.

        Once it has begun, the server has taken all requests that were sent before.
        """
        content = GOOD | {"max_tokens": 20, "temperature": 0, "prompt": "In"} | fields
        return self.connect(http_request("/v1/completions", content))

    def release(self):
        """Lets an engine that `is_held` run its steps."""
        self._gate.touch()

    def signal(self, number):
        """Sends the process a signal."""
        self.process.send_signal(number)

    def wait_until_it_ends(self):
        """Waits until the server has noticed its first signal: it takes no more connections."""

        def is_refused():
            try:
                socket.create_connection(("127.0.0.1", self.port), PATIENCE).close()
            except ConnectionError:
                return True
            return False

        wait_for(is_refused)

    def wait(self, code=0):
        """Waits until the server has ended with this exit code; with 0, it has written nothing but where it served."""
        assert self.process.wait(PATIENCE) == code
        assert code or self.errors.count("\n") == 1, self.errors


_HELD = """
import pathlib, time
from paged_jax.engine import Engine
def hold(step, gate=pathlib.Path({gate!r})):
    def wait_and_step(self):
        while not gate.exists():
            time.sleep(0.01)
        return step(self)
    return wait_and_step
Engine.step, serve.Worker.stop.__defaults__ = hold(Engine.step), (600,)
"""


def http_request(path, content):
    """The bytes of a POST request, whose body is `content` as JSON."""
    body = json.dumps(content).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def received(connection):
    """All that comes until the server closes the connection, without the sizes of HTTP's chunks."""
    with connection, connection.makefile("rb") as stream:
        return stream.read().decode()


def wait_for(is_done, seconds=PATIENCE):
    """Waits until `is_done()`, for this many seconds at most."""
    deadline = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.01)
