"""The HTTP routes: each reads a request, submits it to the worker, and makes an answer of the tokens.

While a route waits for tokens, it also watches the connection: if the client hangs up, the request is cancelled and its
blocks are freed.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from tokenizers import Tokenizer

from examples.server.answers import Answer
from examples.server.api import ApiError, check_text, read_body, read_chat, read_completion, sampling_params
from examples.server.chat import ChatTemplate, TemplateError
from examples.server.worker import EngineFailed, Overloaded, Ticket, TooManyAtOnce, Worker
from paged_jax import engine

MAX_BODY = 16 << 20  # bytes


class Server:
    """The routes and what they share.

    Args:
        worker: runs the engine.
        tokenizer: the model's tokenizer.
        template: the model's chat template.
        model: the name by which clients call the model.
        stop_token_ids: tokens that end a text.
        vocab_size: the size of the vocabulary; token ids in prompts must be below it.
    """

    def __init__(
        self,
        worker: Worker,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        model: str,
        stop_token_ids: Sequence[int],
        vocab_size: int,
    ):
        self._worker, self._tokenizer, self._template, self._model = worker, tokenizer, template, model
        self._stop_token_ids, self._vocab_size = tuple(stop_token_ids), vocab_size
        self._created = int(time.time())
        self._metrics = Metrics()

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/v1/completions", self._guarded("completions", self._completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded("chat", self._chat), methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._models),
            Route("/health", self._health),
            Route("/metrics", self._show_metrics),
        ]
        return Starlette(
            routes=routes,
            lifespan=self._lifespan,
            middleware=[Middleware(ToldOfTheEnd)],
            exception_handlers={HTTPException: _http_error, ClientDisconnect: _gone, Exception: _unforeseen},
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        self._worker.start()
        yield
        await asyncio.to_thread(self._worker.stop)

    def _guarded(self, name: str, route: Callable[[Request], Awaitable[Response]]):
        """Makes a route that answers errors with OpenAI's objects, and counts its requests by status."""

        async def guarded(request: Request) -> Response:
            try:
                response = await route(request)
            except ApiError as error:
                response = _refusal(error)
            except TooManyAtOnce as error:
                response = _refusal(ApiError(str(error)))
            except Overloaded:
                error = ApiError(
                    "too many requests wait; try again later", status=429, kind="requests", code="queue_full"
                )
                response = _refusal(error, {"retry-after": "1"})
            except EngineFailed:
                response = _refusal(_server_error())
            self._metrics.requests.labels(name, str(response.status_code)).inc()
            return response

        return guarded

    async def _completions(self, request: Request) -> Response:
        wanted = read_completion(read_body(await _body(request)), self._model)
        params = sampling_params(wanted.params, self._stop_token_ids)
        self._worker.check_room(len(wanted.prompts) * params.n)
        prompts = [await self._encode(prompt, "prompt", add_special_tokens=True) for prompt in wanted.prompts]
        echoes = [self._tokenizer.decode(ids) if wanted.echo else "" for ids in prompts]
        answer = Answer(False, self._model, self._tokenizer, sum(map(len, prompts)))
        return await self._answer(request, answer, prompts, params, echoes, wanted.stream, wanted.include_usage)

    async def _chat(self, request: Request) -> Response:
        wanted = read_chat(read_body(await _body(request)), self._model)
        params = sampling_params(wanted.params, self._stop_token_ids)
        self._worker.check_room(params.n)
        try:
            text = self._template.render(wanted.messages)
        except TemplateError as error:
            raise ApiError(str(error), param="messages") from None
        prompt = await self._encode(text, "messages", add_special_tokens=False)
        answer = Answer(True, self._model, self._tokenizer, len(prompt))
        return await self._answer(request, answer, [prompt], params, [""], wanted.stream, wanted.include_usage)

    async def _encode(self, prompt: str | list[int], param: str, *, add_special_tokens: bool) -> list[int]:
        if isinstance(prompt, str):
            check_text(prompt, param)
            encoded = await asyncio.to_thread(self._tokenizer.encode, prompt, add_special_tokens=add_special_tokens)
            prompt = encoded.ids
        if not all(0 <= token_id < self._vocab_size for token_id in prompt):
            raise ApiError(f"{param} must hold tokens in [0, {self._vocab_size - 1}]", param=param)
        return prompt

    async def _answer(
        self,
        request: Request,
        answer: Answer,
        prompts: list[list[int]],
        params: engine.SamplingParams,
        echoes: list[str],
        stream: bool,
        include_usage: bool,
    ) -> Response:
        """Submits the prompts, and makes a response of the tokens, whole or streamed."""
        try:
            tickets = self._worker.submit([(prompt, params) for prompt in prompts])
        except ValueError as error:
            code = "context_length_exceeded" if "fit" in str(error) else None
            raise ApiError(str(error), code=code) from None
        if stream:
            chunks = self._chunks(answer, tickets, echoes, include_usage)
            return EventStream(chunks, lambda: self._close(tickets))
        try:
            choices: list[list[engine.Delta]] = [[] for _ in range(len(tickets) * params.n)]

            async def collect():
                async for index, delta in self._merge(tickets):
                    choices[index].append(delta)

            if not await _until_gone(request.receive, collect()):
                raise ClientDisconnect
        finally:
            self._close(tickets)
        return _json(answer.whole(choices, [echo for echo in echoes for _ in range(params.n)]))

    async def _chunks(
        self, answer: Answer, tickets: list[Ticket], echoes: list[str], include_usage: bool
    ) -> AsyncIterator[dict]:
        """Yields the chunks of a streamed answer: what comes before the model's text, the text, and the usage."""
        n, no_usage = tickets[0].params.n, {"usage": None} if include_usage else {}
        for index in range(len(tickets) * n):
            if answer.is_chat or echoes[index // n]:
                yield answer.chunk(index, echoes[index // n], is_first=True) | no_usage
        async for index, delta in self._merge(tickets):
            if delta.text or delta.logprobs or delta.finish_reason or not answer.is_chat:
                yield answer.chunk(index, delta.text, delta) | no_usage
        if include_usage:
            yield answer.usage_chunk()

    async def _merge(self, tickets: list[Ticket]) -> AsyncIterator[tuple[int, engine.Delta]]:
        """Yields the deltas of several requests as they come, each with the index of its choice."""
        began, queue = time.perf_counter(), asyncio.Queue()

        async def forward(place: int, ticket: Ticket) -> None:
            try:
                async for delta in ticket.deltas():
                    queue.put_nowait((place * ticket.params.n + delta.index, delta))
            except EngineFailed as error:
                queue.put_nowait(error)
            queue.put_nowait(None)

        tasks = [asyncio.create_task(forward(place, ticket)) for place, ticket in enumerate(tickets)]
        is_first, num_open = True, len(tasks)
        try:
            while num_open:
                news = await queue.get()
                if isinstance(news, Exception):
                    raise news
                if news is None:
                    num_open -= 1
                    continue
                if is_first:
                    self._metrics.first_token.observe(time.perf_counter() - began)
                    is_first = False
                yield news
            self._metrics.latency.observe(time.perf_counter() - began)
        finally:
            for task in tasks:
                task.cancel()

    def _close(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self._worker.close(ticket)

    async def _models(self, request: Request) -> Response:
        card = {"id": self._model, "object": "model", "created": self._created, "owned_by": "paged_jax"}
        name = request.path_params.get("model")
        if name is None:
            return _json({"object": "list", "data": [card]})
        if name != self._model:
            error = ApiError(f"the model {json.dumps(name)} does not exist", status=404, code="model_not_found")
            return _refusal(error)
        return _json(card)

    async def _health(self, _request: Request) -> Response:
        is_well = self._worker.is_alive and not self._worker.is_failing
        return _json({"status": "ok" if is_well else "failing"}, 200 if is_well else 503)

    async def _show_metrics(self, _request: Request) -> Response:
        self._metrics.update(await self._worker.stats())
        return Response(generate_latest(self._metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8")


class Metrics:
    """The numbers at /metrics: the engine's statistics, and how long requests take."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "paged_jax_http_requests", "Requests by route and status", ("route", "status"), registry=self.registry
        )
        self.first_token = Histogram(
            "paged_jax_first_token_seconds", "From arrival to the first token", registry=self.registry
        )
        self.latency = Histogram("paged_jax_request_seconds", "From arrival to the last token", registry=self.registry)
        fields = engine.Stats.__dataclass_fields__
        self._gauges = {
            name: Gauge(f"paged_jax_{name.removeprefix('num_')}", f"Engine: {name}", registry=self.registry)
            for name in fields
        }

    def update(self, stats: engine.Stats) -> None:
        """Sets the gauges to the engine's statistics."""
        for name, gauge in self._gauges.items():
            gauge.set(getattr(stats, name))


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
            await _until_gone(receive, self._send_all(send))
        except asyncio.CancelledError:  # the server ends before the answer does
            await self._send_event(send, json.dumps(_shutting_down().body))
            await self._send_event(send, "[DONE]", more=False)
        finally:
            self._close()

    async def _send_all(self, send: Any) -> None:
        try:
            async for chunk in self._chunks:
                await self._send_event(send, json.dumps(chunk))
        except EngineFailed:
            await self._send_event(send, json.dumps(_server_error().body))
        await self._send_event(send, "[DONE]", more=False)

    @staticmethod
    async def _send_event(send: Any, text: str, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": more})


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
                await _refusal(_shutting_down())(scope, receive, send)


async def _until_gone(receive: Any, work: Awaitable[None]) -> bool:
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


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise ApiError(f"the body is longer than {MAX_BODY} bytes", status=413)
    return bytes(body)


def _json(content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(content), status, headers, "application/json")


def _refusal(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    """The response that tells a client of an error."""
    return _json(error.body, error.status, headers)


def _server_error() -> ApiError:
    return ApiError("the server failed to answer the request", status=500, kind="server_error")


def _shutting_down() -> ApiError:
    return ApiError("the server shuts down; try again later", status=503, kind="server_error")


async def _http_error(_request: Request, error: Any) -> Response:
    return _refusal(ApiError(error.detail, status=error.status_code), error.headers)


async def _gone(_request: Request, _error: Any) -> Response:
    return Response(status_code=499)  # the client is gone and will not read it


async def _unforeseen(_request: Request, _error: Any) -> Response:
    return _refusal(_server_error())


def model_name(model: str | Path) -> str:
    """The name by which clients call a model: its hub id, or its folder's own name."""
    return Path(model).expanduser().resolve().name if Path(model).expanduser().is_dir() else str(model)
