"""Tests who may call the server: keys, hosts, web pages, content types; and request ids and the access log."""

import asyncio
import logging
import re
from types import SimpleNamespace

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from examples import serve
from examples.server.app import Model, Server
from examples.server.chat import ChatTemplate
from examples.server.middleware import LOOPBACK, Access, Gate, is_allowed_host
from examples.server.options import access_of
from examples.server.worker import Worker
from tests.real_tokenizers import TOKENIZERS
from tests.test_serve_worker import MadeUpEngine


def ask(access, method="POST", path="/v1/x", url="http://localhost:8000", **headers):
    """The answer of an application that is behind a gate and always answers 200."""

    async def fine(_request):
        return PlainTextResponse("fine")

    async def go():
        app = Starlette(routes=[Route("/{path:path}", fine, methods=["GET", "POST"])], middleware=[gate])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=url) as client:
            sent = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
            return await client.request(method, path, headers={k: v for k, v in sent.items() if v is not None})

    gate = Middleware(Gate, access)
    return asyncio.run(go())


@pytest.mark.parametrize(
    ("header", "is_let_in"),
    [
        ("Bearer good", True),
        ("bearer good", True),
        ("Bearer  good ", True),
        ("Bearer schlüssel", True),
        ("Bearer other", True),
        ("Bearer bad", False),
        ("Bearer goo", False),
        ("Bearer good2", False),
        ("Bearer", False),
        ("good", False),
        ("Basic good", False),
        ("", False),
        (None, False),
    ],
)
def test_keys(header, is_let_in):
    header = None if header is None else header.encode()
    answer = ask(Access(api_keys=("good", "other", "schlüssel")), authorization=header)
    assert answer.status_code == (200 if is_let_in else 401)
    if not is_let_in:
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "good" not in answer.text


def test_keys_are_compared_in_constant_time(monkeypatch):
    compared = []

    def compare_digest(a, b):
        compared.append((a, b))
        return a == b

    monkeypatch.setattr("examples.server.middleware.hmac.compare_digest", compare_digest)
    assert ask(Access(api_keys=("good", "other")), authorization="Bearer good").status_code == 200
    assert compared == [(b"good", b"good"), (b"good", b"other")]


def make_server(**access):
    """A server over a made-up engine, which is not started."""
    model = Model(("one", "two"), TOKENIZERS["byte_level"](), ChatTemplate(), (), 300, 10)
    return Server(Worker(MadeUpEngine(), 0), model, Access(**access))


def test_balancers_alone_need_no_key():
    is_open = {"/health", "/metrics", "/version"}
    methods = {route.path: max(route.methods) for route in make_server().app().routes}
    assert methods.keys() > is_open
    for path, method in methods.items():
        answer = ask(Access(api_keys=("good",)), method, path.replace("{model:path}", "one"))
        assert answer.status_code == (200 if path in is_open else 401), path
    assert ask(Access(api_keys=("good",)), "GET", "/v1/health").status_code == 401


@pytest.mark.parametrize(
    ("host", "hosts", "is_allowed"),
    [
        ("localhost", [LOOPBACK], True),
        ("LocalHost:8000", [LOOPBACK], True),
        ("127.0.0.1:8000", [LOOPBACK], True),
        ("127.8.9.1", [LOOPBACK], True),
        ("[::1]:8000", [LOOPBACK], True),
        ("[::1]", [LOOPBACK], True),
        ("evil.example:8000", [LOOPBACK], False),
        ("localhost.evil.example", [LOOPBACK], False),
        ("127.0.0.1.evil.example", [LOOPBACK], False),
        ("10.0.0.1", [LOOPBACK], False),
        ("loopback", ["example.org"], False),
        ("", [LOOPBACK], False),
        ("localhost", ["example.org"], False),
        ("Example.org:80", ["example.ORG"], True),
        ("example.org", [LOOPBACK, "example.org"], True),
    ],
)
def test_hosts(host, hosts, is_allowed):
    """A page of evil.example can have that name mean 127.0.0.1, and then read what it may call."""
    assert is_allowed_host(host, hosts) == is_allowed
    answer = ask(Access(hosts=tuple(hosts)), "GET", host=host)
    assert answer.status_code == (200 if is_allowed else 403)
    assert ask(Access(), "GET", host=host).status_code == 200


@pytest.mark.parametrize(
    ("arguments", "hosts"),
    [
        ([], (LOOPBACK,)),
        (["--host", "::1"], (LOOPBACK,)),
        (["--host", "0.0.0.0"], None),
        (["--host", "0.0.0.0", "--allowed-hosts", "a.example", "loopback"], ("a.example", LOOPBACK)),
        (["--allowed-hosts", "*"], None),
    ],
)
def test_hosts_of_the_command_line(arguments, hosts):
    options = serve.parse([*arguments, "--api-key", "a", "b", "--cors-origins", "https://x", "--access-log"])
    expected = Access(api_keys=("a", "b"), hosts=hosts, origins=("https://x",), is_logged=True)
    assert access_of(options) == expected
    assert access_of(serve.parse([])) == Access(hosts=(LOOPBACK,))


@pytest.mark.parametrize(
    ("origins", "origin", "is_let_in"),
    [
        ((), None, True),
        ((), "https://evil.example", False),
        ((), "http://localhost:8000", False),
        ((), "null", False),
        (("https://good.example",), "https://good.example", True),
        (("https://good.example",), "https://evil.example", False),
        (("https://good.example",), "http://good.example", False),
        (("*",), "https://evil.example", True),
    ],
)
def test_web_pages(origins, origin, is_let_in):
    for method in ("GET", "POST"):
        answer = ask(Access(origins=origins), method, origin=origin)
        assert answer.status_code == (200 if is_let_in else 403)


@pytest.mark.parametrize(
    ("content_type", "is_let_in"),
    [
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("text/plain", False),
        ("application/x-www-form-urlencoded", False),
        ("text/plain; application/json", False),
        ("", False),
        (None, False),
    ],
)
def test_content_types(content_type, is_let_in):
    """A web page can post texts and forms without asking the server first whether it may."""
    answer = ask(Access(), content_type=content_type)
    assert answer.status_code == (200 if is_let_in else 415)
    assert ask(Access(), "GET", content_type=content_type).status_code == 200


def test_request_ids():
    for sent in ("my-id.7", "A_b:9", "x" * 128):
        assert ask(Access(), x_request_id=sent).headers["x-request-id"] == sent
    ids = {ask(Access(), x_request_id=sent).headers["x-request-id"] for sent in (None, "", "a b", "x" * 129, b"\xe9")}
    assert len(ids) == 5
    assert all(re.fullmatch("[0-9a-f]{32}", request_id) for request_id in ids)
    refused = ask(Access(api_keys=("k",)), x_request_id="7")
    assert (refused.status_code, refused.headers["x-request-id"]) == (401, "7")


def test_the_access_log(caplog, monkeypatch):
    clock = SimpleNamespace(perf_counter=iter([1.0, 1.25, 2.0, 2.004]).__next__)
    monkeypatch.setattr("examples.server.middleware.time", clock)
    caplog.set_level(logging.INFO, "paged_jax.access")
    ask(Access(is_logged=True), x_request_id="7")
    ask(Access(is_logged=True, api_keys=("secret",)), path="/v1/%0a%C3%A9", authorization="Bearer wrong")
    lines = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(r"127\.0\.0\.1 POST /v1/x 200 250 ms 7", lines[0])
    assert re.fullmatch(r"127\.0\.0\.1 POST /v1/\?\\xe9 401 4 ms \w{32}", lines[1])
    assert len(lines) == 2
    caplog.clear()
    monkeypatch.undo()
    ask(Access())
    assert not caplog.records


def test_web_pages_may_call_if_they_are_allowed():
    server = make_server(api_keys=("key",), origins=("https://good.example",))

    async def go():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app()), base_url="http://x") as client:
            for origin, expected in (("https://good.example", 200), ("https://evil.example", 400)):
                headers = {"origin": origin, "access-control-request-method": "POST"}
                headers["access-control-request-headers"] = "authorization, content-type"
                answer = await client.options("/v1/completions", headers=headers)
                assert answer.status_code == expected
            headers = {"origin": "https://good.example", "authorization": "Bearer key"}
            answer = await client.get("/v1/models", headers=headers)
            assert answer.headers["access-control-allow-origin"] == "https://good.example"
            assert (answer.status_code, answer.json()["data"][0]["id"]) == (200, "one")
            assert (await client.get("/v1/models/two", headers=headers)).json()["id"] == "two"
            headers = {"authorization": "Bearer key"}
            assert "access-control-allow-origin" not in (await client.get("/v1/models", headers=headers)).headers

    asyncio.run(go())
