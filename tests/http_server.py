"""What the tests of the HTTP server share: a server in this process, one in a process of its own, and requests."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from examples import serve
from examples.server import http
from tests.model_folders import short_tiny

ROOT = Path(__file__).parents[1]
NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, MAX_QUEUED = 24, 16, 4, 200
GOOD = {"model": "tiny", "prompt": "x", "max_tokens": 1}
PROMPT = "The assert statement "
HELLO = [{"role": "user", "content": "Hi"}]
JSON = {"content-type": "application/json"}


class Running:
    """A server on 127.0.0.1, in a thread of this process; `more` are further options of its command line."""

    def __init__(self, *more):
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
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = http.make_http_server(self.server, 20)
        self.thread = threading.Thread(target=self.http.run, kwargs={"sockets": [self.listener]})
        self.thread.start()
        wait_for(lambda: self.http.started)

    def stop(self):
        """Ends the server and its worker."""
        self.http.should_exit = True
        self.thread.join(30)
        self.listener.close()
        assert not self.thread.is_alive()
        assert not self.worker.is_alive

    def connect(self, request, timeout=30):
        """Sends a request, whole or in part, and returns the connection."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout)
        connection.sendall(request)
        return connection

    def wait_until_idle(self):
        """Waits until no request is unfinished; then checks that no block is held or lost."""
        wait_for(lambda: not self.engine.has_work and self.worker._unfinished == 0)
        blocks = self.engine._blocks.counts()
        wait_for(lambda: self.engine._blocks.counts().held == 0)
        assert sum(blocks) == NUM_BLOCKS


class Process:
    """A server in a process of its own, whose pool holds one long text; what it writes to stderr goes to a file.

    `patch` is Python code that runs before the server is made.
    """

    def __init__(self, path, *options, patch=""):
        self.path = path
        code = f"import sys\nfrom examples import serve\n{patch}\nsys.exit(serve.main(sys.argv[1:]))"
        command = [sys.executable, "-c", code, "--model", str(short_tiny()), "--port", "0"]
        with path.open("w") as stderr:
            self.process = subprocess.Popen(
                [*command, "--max-num-seqs", "1", "--num-blocks", "32", "--max-tokens-per-step", "16", *options],
                cwd=ROOT, stderr=stderr, env=os.environ | {"JAX_PLATFORMS": "cpu"},
            )  # fmt: skip
        wait_for(lambda: "\n" in self.errors, 240)
        assert self.errors.startswith("Serving tiny at http://127.0.0.1:"), self.errors
        self.url = self.errors.splitlines()[0].split()[-1]
        self.port = int(self.url.removesuffix("/v1").rsplit(":", 1)[1])

    @property
    def errors(self):
        """The text that the server has written to stderr."""
        return self.path.read_text()

    def ask(self, **fields):
        """Asks for a long text, and returns the connection."""
        content = GOOD | {"max_tokens": 400, "temperature": 0, "prompt": "In"} | fields
        connection = socket.create_connection(("127.0.0.1", self.port), 60)
        connection.sendall(http_request("/v1/completions", content))
        return connection

    def wait(self, seconds, code=0):
        """Waits until the server has ended with this exit code; with 0, it has written nothing but where it served."""
        assert self.process.wait(seconds) == code
        assert code or self.errors.count("\n") == 1, self.errors


def http_request(path, content):
    """The bytes of a POST request, whose body is `content` as JSON."""
    body = json.dumps(content).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def received(connection):
    """All that comes until the server closes the connection, without the sizes of HTTP's chunks."""
    with connection, connection.makefile("rb") as stream:
        return stream.read().decode()


def received_soon(connection, seconds=2):
    """Receives until the connection is closed, or nothing has come for this many seconds."""
    connection.settimeout(seconds)
    content = b""
    with contextlib.suppress(TimeoutError):
        while piece := connection.recv(1 << 16):
            content += piece
    return content.decode()


def wait_for(is_done, seconds=30):
    """Waits until `is_done()`, for this many seconds at most."""
    deadline = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.01)
