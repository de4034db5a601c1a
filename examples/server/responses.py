"""Reads the bodies of HTTP requests within bounds, and sends answers: JSON objects and streams of events."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from examples.server.fields import ApiError
from examples.server.worker import EngineFailed


class Bodies:
    """Reads bodies. Clients that send half of one cannot fill the memory, nor stay for ever.

    Args:
        most_bytes: of one body.
        most_bytes_together: of all bodies that are being read.
        seconds: for one body.
    """

    def __init__(self, most_bytes: int, most_bytes_together: int = 256 << 20, seconds: float = 60.0):
        self.most_bytes, self.most_bytes_together, self.seconds = most_bytes, most_bytes_together, seconds
        self._num_bytes = 0  # of the bodies that are being read

    async def read(self, request: Request) -> bytes:
        """Reads a request's body.

        Raises:
            ApiError: it is too long, comes too slowly, or too many others are being read.
        """
        body = bytearray()
        try:
            async with asyncio.timeout(self.seconds):
                async for chunk in request.stream():
                    self._num_bytes += len(chunk)
                    body += chunk
                    if len(body) > self.most_bytes:
                        raise _refused_body(f"the body is longer than {self.most_bytes} bytes", 413)
                    if self._num_bytes > self.most_bytes_together:
                        raise _refused_body("the server reads too many long bodies; try again later", 503)
        except TimeoutError:
            raise _refused_body(f"the body did not come within {self.seconds} seconds", 408) from None
        finally:
            self._num_bytes -= len(body)
        return bytes(body)


class EventStream(Response):
    """A response of server-sent events: one for each chunk, then [DONE]. It ends if the client hangs up.

    Args:
        chunks: the objects to send.
        close: called once at the end, also after an error.
    """

    def __init__(self, chunks: AsyncIterator[dict], close: Callable[[], None]):
        super().__init__(headers={"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})
        del self.headers["content-length"]
        self._chunks, self._close = chunks, close

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Sends the events."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await until_gone(receive, self._send_all(send))
        except asyncio.CancelledError:  # the server ends before the answer does
            await self._send_event(send, shutting_down().body)
            await self._send_done(send)
        finally:
            self._close()

    async def _send_all(self, send: Any) -> None:
        try:
            async for chunk in self._chunks:
                await self._send_event(send, chunk)
        except EngineFailed:
            await self._send_event(send, server_error().body)
        except ApiError as error:
            await self._send_event(send, error.body)
        await self._send_done(send)

    @staticmethod
    async def _send_event(send: Any, content: dict[str, Any]) -> None:
        body = f"data: {json.dumps(content, allow_nan=False)}\n\n".encode()
        await send({"type": "http.response.body", "body": body, "more_body": True})

    @staticmethod
    async def _send_done(send: Any) -> None:
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def until_gone(receive: Any, work: Awaitable[None]) -> bool:
    """Awaits some work until it is done or the client hangs up; returns whether it was done."""

    async def gone():
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
        return tasks[0].done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def json_response(content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response of a JSON object, which cannot hold NaN."""
    return Response(json.dumps(content, allow_nan=False), status, headers, "application/json")


def refusal(error: ApiError) -> Response:
    """The response that tells a client of an error."""
    return json_response(error.body, error.status, error.headers)


def server_error() -> ApiError:
    """The error that a client gets where the server is to blame; the log has more."""
    return ApiError("the server failed to answer the request", status=500, kind="server_error")


def shutting_down() -> ApiError:
    """The error that a client gets whose request cannot be finished before the server ends."""
    return ApiError("the server shuts down; try again later", status=503, kind="server_error")


def _refused_body(message: str, status: int) -> ApiError:
    # The rest of the body may still come, so that the client cannot send another request.
    return ApiError(message, status=status, headers={"connection": "close"})
