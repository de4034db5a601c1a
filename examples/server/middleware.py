"""Middleware, which requests pass before their routes: access, the request's id, the access log, the server's end."""

import asyncio
import hmac
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders

from examples.server.fields import ApiError
from examples.server.responses import refusal, shutting_down

_access_log = logging.getLogger("paged_jax.access")
_OPEN = {"/health", "/metrics", "/version"}  # paths for which no key is needed
LOOPBACK = "loopback"  # in place of a list of hosts: names and addresses of this machine for itself


@dataclass(frozen=True)
class Access:
    """Who may call the server.

    Attributes:
        api_keys: a client must send one of these keys; with none, no client needs a key.
        hosts: names and addresses by which the server may be called, LOOPBACK among them for this machine's own; None
            for any. A page on the web can give its own name this machine's address, and then call the server by it.
        origins: web pages that may call the server, such as "https://example.org"; "*" is all of them.
        is_logged: whether each request gets a line in the log.
    """

    api_keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    origins: tuple[str, ...] = ()
    is_logged: bool = False


class Gate:
    """Wraps an application: lets in only who may call, gives each request an id, and writes the access log.

    Args:
        app: the application.
        access: who may call.
    """

    def __init__(self, app: Any, access: Access):
        self._app, self._access = app, access

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Runs the application, or refuses the request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, began = Headers(scope=scope), time.perf_counter()
        request_id = headers.get("x-request-id", "")
        if not re.fullmatch(r"[\w.:-]{1,128}", request_id, re.ASCII):
            request_id = uuid.uuid4().hex
        status = 0  # until a response begins

        async def note_and_send(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            if (error := self._error(scope, headers)) is not None:
                await refusal(error)(scope, receive, note_and_send)
            else:
                await self._app(scope, receive, note_and_send)
        finally:
            if self._access.is_logged:
                milliseconds = 1000 * (time.perf_counter() - began)
                client = scope["client"][0] if scope.get("client") else "-"
                path = scope["path"].encode("ascii", "backslashreplace").decode()
                path = "".join(character if character.isprintable() else "?" for character in path)
                line = client, scope["method"], path, status, milliseconds, request_id
                _access_log.info("%s %s %s %d %.0f ms %s", *line)

    def _error(self, scope: Any, headers: Headers) -> ApiError | None:
        access = self._access
        if access.hosts is not None and not is_allowed_host(headers.get("host", ""), access.hosts):
            return ApiError("the server does not answer to this host name (--allowed-hosts)", status=403)
        origin = headers.get("origin")
        if origin is not None and "*" not in access.origins and origin not in access.origins:
            return ApiError("web pages of this origin may not call the server (--cors-origins)", status=403)
        if access.api_keys and scope["path"] not in _OPEN and not self._has_key(headers):
            message = "a valid key is needed, in a header 'authorization: Bearer KEY'"
            return ApiError(message, status=401, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        if scope["method"] == "POST":
            content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
            if content_type != "application/json":
                # A web page can send other types to any server without asking it first.
                return ApiError("the content type must be application/json", status=415)
        return None

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1")  # the bytes that came
        # All keys are compared, each in constant time, so that the time says nothing of them.
        matches = [hmac.compare_digest(given, known.encode()) for known in self._access.api_keys]
        return scheme.lower() == "bearer" and any(matches)


def is_allowed_host(host: str, hosts: Sequence[str]) -> bool:
    """Whether a request's header `host`, with or without a port, names one of some hosts."""
    name = host.lower()
    if match := re.fullmatch(r"\[([0-9a-f:.]+)\](:\d+)?|([^:]*)(:\d+)?", name):
        name = match[1] or match[3]
    if name in (known.lower() for known in hosts):
        return True
    if LOOPBACK not in hosts:
        return False
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class ToldOfTheEnd:
    """Wraps an application: a request that is cancelled, since the server ends, gets an error object as its answer.

    Args:
        app: the application. Once a response has begun, it must end it itself.
    """

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Runs the application."""
        has_begun = False

        async def note_and_send(message: Any) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, note_and_send)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            if not has_begun:
                await refusal(shutting_down())(scope, receive, send)
