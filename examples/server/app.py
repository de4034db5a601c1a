"""The HTTP routes: each reads a request, submits it to the worker, and makes an answer of the tokens.

While a route waits for tokens, it also watches the connection: if the client hangs up, the request is cancelled and its
blocks are freed.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from tokenizers import Tokenizer

import paged_jax
from examples.server.answers import Answer
from examples.server.api import (
    Conversation,
    Wanted,
    read_body,
    read_chat,
    read_completion,
    read_detokenize,
    read_tokenize,
    sampling_params,
)
from examples.server.chat import ChatTemplate, TemplateError
from examples.server.fields import ApiError, check_text
from examples.server.grammar import Grammar, Grammars
from examples.server.metrics import Metrics
from examples.server.middleware import Access, Gate, ToldOfTheEnd
from examples.server.responses import Bodies, EventStream, json_response, refusal, server_error, until_gone
from examples.server.tokens import TokenTexts, longest_token
from examples.server.tools import Format, ToolCallParser, grammar_of, special_tokens
from examples.server.worker import EngineFailed, Overloaded, Ticket, TooManyAtOnce, Unavailable, Worker
from paged_jax import engine

MAX_BODY = 16 << 20  # bytes
LEAST_MAX_BODY = 1 << 20  # bytes; a model with few positions may still be sent many short prompts


@dataclass(frozen=True)
class Model:
    """The facts of the model that routes need.

    Attributes:
        names: the names by which clients call it, its own first.
        tokenizer: its tokenizer.
        template: its chat template.
        eos_token_ids: tokens that end a text.
        vocab_size: the size of its vocabulary; token ids in prompts must be below it.
        max_model_len: the most tokens of a text, the prompt's included, that are ever in the cache.
        tool_format: how it writes its calls of tools; None if that is not known.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    template: ChatTemplate
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_model_len: int
    tool_format: Format | None = None


class Server:
    """The routes and what they share.

    Args:
        worker: runs the engine.
        model: the model.
        access: who may call the server.
    """

    def __init__(self, worker: Worker, model: Model, access: Access = Access()):  # noqa: B008 (immutable)
        self._worker, self._model, self._access = worker, model, access
        self._created = int(time.time())
        self._metrics = Metrics()
        self._tokens = TokenTexts(model.tokenizer)
        self._grammars = Grammars(model.tokenizer, model.eos_token_ids)
        # A longer text has too many tokens, whatever they are.
        self._most_characters = model.max_model_len * longest_token(model.tokenizer)
        # JSON may write a character in 12 bytes, as two escapes.
        self._bodies = Bodies(min(MAX_BODY, LEAST_MAX_BODY + 12 * self._most_characters))

    @property
    def name(self) -> str:
        """The name by which clients call the model."""
        return self._model.names[0]

    @property
    def worker(self) -> Worker:
        """The worker, which runs the engine."""
        return self._worker

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/v1/completions", self._guarded("completions", self._completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded("chat", self._chat), methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._models),
            Route("/tokenize", self._guarded("tokenize", self._tokenize), methods=["POST"]),
            Route("/detokenize", self._guarded("detokenize", self._detokenize), methods=["POST"]),
            Route("/health", self._health),
            Route("/metrics", self._show_metrics),
            Route("/version", self._version),
        ]
        middleware = [Middleware(Gate, self._access), Middleware(ToldOfTheEnd)]
        if origins := self._access.origins:
            cors = Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id"],
            )
            middleware.insert(0, cors)
        return Starlette(
            routes=routes,
            lifespan=self._lifespan,
            middleware=middleware,
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
                response = refusal(error)
            except TooManyAtOnce as error:
                response = refusal(ApiError(str(error)))
            except Overloaded:
                headers = {"retry-after": "1"}
                error = ApiError(
                    "too many requests wait; try again later",
                    status=429, kind="requests", code="queue_full", headers=headers,
                )  # fmt: skip
                response = refusal(error)
            except Unavailable as error:
                response = refusal(ApiError(str(error), status=503, kind="server_error"))
            except EngineFailed:
                response = refusal(server_error())
            self._metrics.requests.labels(name, str(response.status_code)).inc()
            return response

        return guarded

    async def _completions(self, request: Request) -> Response:
        asked = read_completion(read_body(await self._bodies.read(request)), self._model.names)
        wanted, params = asked.wanted, sampling_params(asked.wanted, self._model.eos_token_ids)
        self._worker.check_room(len(asked.prompts) * params.n)
        add = wanted.add_special_tokens is not False
        prompts = [await self._encode(prompt, "prompt", add_special_tokens=add) for prompt in asked.prompts]
        echoes = [self._echo(*pair) for pair in zip(asked.prompts, prompts, strict=True)] if asked.echo else []
        answer = Answer(False, self._model.names[0], self._tokens, wanted, prompts, echoes)
        return await self._answer(request, answer, prompts, params, wanted, wanted.grammar)

    async def _chat(self, request: Request) -> Response:
        form = self._model.tool_format
        asked = read_chat(read_body(await self._bodies.read(request)), self._model.names, form)
        wanted, tools = asked.wanted, asked.tools
        params = sampling_params(wanted, self._model.eos_token_ids)
        self._worker.check_room(params.n)
        grammar, parser = wanted.grammar, None
        if tools is not None and form is not None:
            special = special_tokens(self._model.tokenizer)
            grammar = grammar_of(tools, form, special) or grammar
            parser = functools.partial(ToolCallParser, form, tools.are_parallel)
            # The texts around calls must be seen.
            params = dataclasses.replace(params, skip_special_tokens=params.skip_special_tokens and not special)
        prompt = await self._encode_chat(asked.conversation, wanted.add_special_tokens)
        answer = Answer(True, self._model.names[0], self._tokens, wanted, [prompt], make_parser=parser)
        return await self._answer(request, answer, [prompt], params, wanted, grammar)

    async def _encode_chat(self, conversation: Conversation, add_special_tokens: bool | None) -> list[int]:
        """Renders a conversation and encodes it, with special tokens if the template has none itself."""
        template = self._model.template
        self._check_length(sum(len(message["content"] or "") for message in conversation.messages), "messages")
        try:
            text = await asyncio.to_thread(template.render, conversation.messages, **conversation.options)
        except TemplateError as error:
            raise ApiError(str(error), param="messages") from None
        add = template.adds_special_tokens if add_special_tokens is None else add_special_tokens
        return await self._encode(text, "messages", add_special_tokens=add)

    async def _encode(self, prompt: str | list[int], param: str, *, add_special_tokens: bool) -> list[int]:
        if isinstance(prompt, str):
            check_text(prompt, param)
            self._check_length(len(prompt), param)

        def encode() -> list[int]:
            token_ids = prompt
            if isinstance(token_ids, str):
                # Unlike a call for one text, a call for several ones lets other threads run meanwhile.
                encode = self._model.tokenizer.encode_batch_fast
                (encoded,) = encode([token_ids], add_special_tokens=add_special_tokens)
                token_ids = encoded.ids
            if not all(0 <= token_id < self._model.vocab_size for token_id in token_ids):
                raise ApiError(f"{param} must hold tokens in [0, {self._model.vocab_size - 1}]", param=param)
            return token_ids

        return await asyncio.to_thread(encode)

    def _check_length(self, num_characters: int, param: str) -> None:
        """Refuses a text that has too many tokens whatever they are, before time is spent on it."""
        if num_characters > self._most_characters:
            message = f"{param} has {num_characters} characters; at most {self._most_characters} can fit"
            raise ApiError(message, param=param, code="context_length_exceeded")

    def _echo(self, asked: str | list[int], prompt: list[int]) -> str:
        """The text of a prompt as it was sent."""
        is_text = isinstance(asked, str)
        return asked if is_text else self._model.tokenizer.decode(prompt, skip_special_tokens=False)

    async def _answer(
        self,
        request: Request,
        answer: Answer,
        prompts: list[list[int]],
        params: engine.SamplingParams,
        wanted: Wanted,
        grammar: Grammar | None,
    ) -> Response:
        """Submits the prompts, and makes a response of the tokens, whole or streamed."""
        if grammar is not None:
            mask = await asyncio.to_thread(self._grammars.mask, grammar)
            params = dataclasses.replace(params, mask=mask)
        try:
            tickets = self._worker.submit([(prompt, params) for prompt in prompts])
        except ValueError as error:
            code = "context_length_exceeded" if "fit" in str(error) else None
            raise ApiError(str(error), code=code) from None
        if wanted.stream:
            return EventStream(self._chunks(answer, tickets, wanted.usage), lambda: self._close(tickets))
        try:
            choices: list[list[engine.Delta]] = [[] for _ in range(answer.num_choices)]

            async def collect():
                async for index, delta in self._merge(tickets):
                    choices[index].append(delta)

            if not await until_gone(request.receive, collect()):
                raise ClientDisconnect
        finally:
            self._close(tickets)
        return json_response(answer.whole(choices))

    async def _chunks(self, answer: Answer, tickets: list[Ticket], usage: str) -> AsyncIterator[dict]:
        """Yields the chunks of a streamed answer: what comes before the model's text, the text, and the usage."""

        def told() -> dict[str, Any]:
            return {} if usage == "never" else {"usage": answer.usage() if usage == "always" else None}

        for index in range(answer.num_choices):
            if answer.is_chat or (answer.echo(index) and not answer.is_scored):
                yield answer.opening(index) | told()
        async for index, delta in self._merge(tickets):
            answer.count(index, delta)
            if delta.text or delta.logprobs or delta.finish_reason or not answer.is_chat:
                yield answer.chunk(index, delta) | told()
        if usage != "never":
            yield answer.usage_chunk()

    async def _merge(self, tickets: list[Ticket]) -> AsyncIterator[tuple[int, engine.Delta]]:
        """Yields the deltas of several requests as they come, each with the index of its choice."""
        timer, queue = self._metrics.timer(), asyncio.Queue()

        async def forward(place: int, ticket: Ticket) -> None:
            try:
                async for delta in ticket.deltas():
                    queue.put_nowait((place * ticket.params.n + delta.index, delta))
            except EngineFailed as error:
                queue.put_nowait(error)
            queue.put_nowait(None)

        tasks = [asyncio.create_task(forward(place, ticket)) for place, ticket in enumerate(tickets)]
        num_open = len(tasks)
        try:
            while num_open:
                news = await queue.get()
                if isinstance(news, Exception):
                    raise news
                if news is None:
                    num_open -= 1
                    continue
                timer.tokens(news[0], len(news[1].token_ids))
                yield news
            timer.end()
        finally:
            for task in tasks:
                task.cancel()

    def _close(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self._worker.close(ticket)

    async def _tokenize(self, request: Request) -> Response:
        content = read_body(await self._bodies.read(request))
        asked, add = read_tokenize(content, self._model.names)
        if isinstance(asked, Conversation):
            token_ids = await self._encode_chat(asked, add)
        else:
            token_ids = await self._encode(asked, "prompt", add_special_tokens=add is not False)
        answer = {"count": len(token_ids), "max_model_len": self._model.max_model_len, "tokens": token_ids}
        if content.get("return_token_strs"):
            answer["token_strs"] = [self._tokens.text(token_id) for token_id in token_ids]
        return json_response(answer)

    async def _detokenize(self, request: Request) -> Response:
        token_ids = read_detokenize(read_body(await self._bodies.read(request)), self._model.names)
        await self._encode(token_ids, "tokens", add_special_tokens=False)  # which checks them
        return json_response({"prompt": self._model.tokenizer.decode(token_ids, skip_special_tokens=False)})

    async def _models(self, request: Request) -> Response:
        cards = {
            name: {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "paged_jax",
                "max_model_len": self._model.max_model_len,
            }
            for name in self._model.names
        }
        name = request.path_params.get("model")
        if name is None:
            return json_response({"object": "list", "data": list(cards.values())})
        if name not in cards:
            return refusal(ApiError(f"the model {json.dumps(name)} does not exist", status=404, code="model_not_found"))
        return json_response(cards[name])

    async def _health(self, _request: Request) -> Response:
        trouble = self._worker.trouble
        if trouble is None:
            return json_response({"status": "ok"})
        return json_response({"status": "failing", "reason": trouble}, 503)

    async def _version(self, _request: Request) -> Response:
        return json_response({"version": paged_jax.__version__})

    async def _show_metrics(self, _request: Request) -> Response:
        self._metrics.update(await self._worker.stats(), self._worker.trouble is None)
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _http_error(_request: Request, error: Any) -> Response:
    return refusal(ApiError(error.detail, status=error.status_code, headers=error.headers))


async def _gone(_request: Request, _error: Any) -> Response:
    return Response(status_code=499)  # the client is gone and will not read it


async def _unforeseen(_request: Request, _error: Any) -> Response:
    return refusal(server_error())


def model_name(model: str | Path) -> str:
    """The name by which clients call a model: its hub id, or its folder's own name."""
    return Path(model).expanduser().resolve().name if Path(model).expanduser().is_dir() else str(model)
