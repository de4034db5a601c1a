"""The HTTP server below the routes: its socket, how it ends, and how long it waits for a request's head."""

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from examples.command_line import CommandError
from examples.server.app import Server

BACKLOG = 2048  # connections that the operating system keeps until the server takes them
HEAD_SECONDS = 30.0  # in which a connection must send the head of a request


class Protocol(H11Protocol):
    """Uvicorn's protocol, which closes connections that take too long to send the head of a request."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begins a connection."""
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Takes bytes: the head of a request, or a part of it or of its body."""
        super().data_received(data)
        if self._is_answering():
            self._stop_waiting()
        elif self._deadline is None:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends a connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        self.transport.close()


class HttpServer(uvicorn.Server):
    """Uvicorn, which after a signal finishes its requests and ends with exit code 0.

    Requests that are unfinished when time is up or a second signal comes are cancelled. The app tells their clients. A
    third signal ends the process as if nobody listened to it.

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
        if self.should_exit:
            self._is_hurried = True
            signal.signal(sig, signal.SIG_DFL)
        self.should_exit = True

    def end_at_once(self) -> None:
        """Ends the server without waiting for requests. Any thread may call it."""
        self._is_hurried = self.should_exit = True

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
    config = uvicorn.Config(server.app(), http=Protocol, log_level="warning", access_log=False, backlog=BACKLOG)
    http_server = HttpServer(config, drain_seconds)
    server.worker.on_broken = http_server.end_at_once
    return http_server


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
