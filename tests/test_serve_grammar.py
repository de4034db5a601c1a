"""Tests requests that restrict their answer, and requests that change logits, with OpenAI's client."""

import json
import re

import numpy as np
import pytest
from tokenizers import Tokenizer

from examples.command_line import TINY
from examples.server.fields import ApiError
from examples.server.grammar import Grammar, Grammars, read_grammar
from tests.http_server import GOOD, HELLO, PROMPT

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["list", "tuple"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
        "name": {"type": "string", "maxLength": 5},
    },
    "required": ["kind", "sizes", "name"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def client(running):
    """OpenAI's client of the server."""
    with running.openai() as client:
        yield client


@pytest.fixture(scope="module")
def grammars():
    """The grammars of the tiny tokenizer, whose tokens are bytes."""
    return Grammars(Tokenizer.from_file(str(TINY / "tokenizer.json")), (256,))


def check(text):
    """Checks an answer against SCHEMA."""
    value = json.loads(text)
    assert list(value) == ["kind", "sizes", "name"]
    assert value["kind"] in ("list", "tuple")
    assert len(value["sizes"]) <= 2
    assert all(type(size) is int and 0 <= size < 100 for size in value["sizes"])
    assert len(value["name"]) <= 5


@pytest.mark.parametrize("temperature", [0, 2])
def test_answers_are_valid_for_the_schema(client, temperature):
    """Beside requests without a schema in the same batch."""
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, response_format=FORMAT, temperature=temperature, n=4, seed=3, max_tokens=200
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        check(choice.message.content)
    texts = {choice.message.content for choice in answer.choices}
    assert len(texts) == (4 if temperature else 1)


def test_a_streamed_answer_is_the_whole_one(client):
    how = {
        "model": "tiny",
        "messages": HELLO,
        "response_format": FORMAT,
        "temperature": 2,
        "seed": 9,
        "max_tokens": 200,
    }
    whole = client.chat.completions.create(**how).choices[0].message.content
    chunks = list(client.chat.completions.create(**how, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_an_answer_that_is_cut_off_says_so(client):
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, response_format={"type": "json_object"}, max_tokens=1, temperature=0
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("{", "length")


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"guided_regex": "[a-c]{2,4}-[0-9]"}, "[a-c]{2,4}-[0-9]"),
        ({"guided_choice": ["yes", "no", 'a "quoted" one']}, 'yes|no|a "quoted" one'),
        ({"guided_grammar": 'start: "x" /[0-9]/ "y"'}, "x[0-9]y"),
        ({"guided_grammar": 'root ::= "x" [0-9] "y"'}, "x[0-9]y"),
        ({"structured_outputs": {"regex": "q{3}"}}, "q{3}"),
        ({"guided_json": {"enum": [12, "b"]}}, '12|"b"'),
        ({"guided_json": '{"const": true}'}, "true"),
    ],
)
def test_vllms_fields(client, fields, form):
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, temperature=2, n=2, seed=1, max_tokens=60, extra_body=fields
    )
    for choice in answer.choices:
        assert re.fullmatch(form, choice.text), choice.text
        assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type must be text"),
        ({"response_format": {"type": "json_schema"}}, "must have an object schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}, "Invalid type"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex cannot stand beside"),
        ({"guided_regex": "a+("}, "unclosed group"),
        ({"guided_regex": 5}, "guided_regex must be a text"),
        ({"guided_choice": []}, "guided_choice must be a list"),
        ({"guided_grammar": "nonsense"}, "guided_grammar cannot be used"),
        ({"guided_json": "{"}, "guided_json is not valid JSON"),
        ({"guided_json": 5}, "guided_json must be a JSON schema"),
        ({"structured_outputs": {"xml": "a"}}, "unrecognized field of structured_outputs"),
        ({"presence_penalty": 2.5}, "presence_penalty must be in"),
        ({"min_p": 2}, "min_p must be in"),
        ({"priority": 2**31}, "priority must be in"),
        ({"min_tokens": 2}, "min_tokens must be at most max_tokens"),
        ({"logit_bias": {"257": 1}}, "logit_bias names token 257"),
        ({"logit_bias": {"1": 101}}, "must be in"),
        ({"repetition_penalty": 0}, "repetition_penalty must be in"),
    ],
)
def test_what_cannot_be_done_is_refused(running, fields, message):
    answer = running.post("/v1/completions", json=GOOD | fields)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_a_grammar_that_fails_while_it_runs(running, monkeypatch):
    """The request gets an error; the server goes on."""

    class Broken:
        def start(self):
            raise RuntimeError("too complex")

    monkeypatch.setattr(running.server._grammars, "mask", lambda grammar: Broken())
    answer = running.post("/v1/completions", json=GOOD | {"guided_regex": "a"})
    assert answer.status_code == 500
    assert "too complex" in answer.json()["error"]["message"]
    streamed = running.post("/v1/completions", json=GOOD | {"guided_regex": "a", "stream": True})
    assert "too complex" in streamed.text
    running.wait_until_idle()


def test_a_grammar_is_compiled_once(grammars):
    first = Grammar("regex", "ab*", "guided_regex")
    assert grammars.mask(first) is grammars.mask(first._replace(param="regex"))


def test_a_state_follows_its_grammar(grammars):
    """It allows the end where the text may end, and nothing once it must."""
    state = grammars.mask(Grammar("regex", "ab?", "guided_regex")).start()

    def allowed():
        words = np.zeros(10, np.uint32)  # more than the tokenizer has
        state.fill(words)
        return [token for token in range(320) if words[token // 32] >> np.uint32(token % 32) & 1]

    assert allowed() == [ord("a")]
    state.advance(ord("a"))
    assert allowed() == [ord("b"), 256]
    state.advance(ord("b"))
    assert allowed() == []
    with pytest.raises(RuntimeError):
        state.advance(ord("c"))


def test_no_grammar():
    for content in ({}, {"response_format": {"type": "text"}}, {"response_format": None, "structured_outputs": {}}):
        assert read_grammar(content) is None
    with pytest.raises(ApiError, match="must be an object"):
        read_grammar({"response_format": "json_object"})


def test_fields_that_change_logits(client):
    """Each field has its effect through OpenAI's client."""

    def ask(**fields):
        names = {"logit_bias", "presence_penalty", "frequency_penalty"}
        own = {name: value for name, value in fields.items() if name in names}
        more = {name: value for name, value in fields.items() if name not in names}
        how = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0} | own
        return client.completions.create(**how, extra_body=more).choices[0]

    plain = ask()
    assert ask(logit_bias={str(ord("q")): 100}).text == "q" * 12
    assert ask(logit_bias={str(256): 100}).text == ""
    late = ask(logit_bias={str(256): 100}, min_tokens=5)
    assert (len(late.text), late.finish_reason) == (5, "stop")
    assert late.text == plain.text[:5]
    banned = ask(logit_bias={str(ord(plain.text[0])): -100})
    assert plain.text[0] not in banned.text
    q = {str(ord("q")): 100, str(ord("z")): 99}
    for penalty in ({"presence_penalty": 2}, {"frequency_penalty": 1}, {"repetition_penalty": 2}):
        assert set(ask(logit_bias=q, **penalty).text) == {"q", "z"}, penalty
    assert ask(temperature=2, min_p=1).text == plain.text


def test_every_field_that_restricts_an_answer():
    """One grammar is read in each of vLLM's forms; what is empty or false restricts nothing."""
    schema, texts = {"type": "integer"}, {"regex": "a+", "grammar": "start: /a/"}
    for kind, value, read in [
        ("json", schema, ("json_schema", json.dumps(schema))),
        ("json", json.dumps(schema), ("json_schema", json.dumps(schema))),
        ("choice", ["x", "y"], ("choice", '["x", "y"]')),
        *((kind, text, (kind, text)) for kind, text in texts.items()),
    ]:
        assert read_grammar({f"guided_{kind}": value}) == (*read, f"guided_{kind}")
        assert read_grammar({"structured_outputs": {kind: value}}) == (*read, kind)
    any_object = "json_schema", '{"type": "object"}'
    assert read_grammar({"structured_outputs": {"json_object": True}}) == (*any_object, "structured_outputs")
    assert read_grammar({"structured_outputs": {"json_object": False}}) is None
    assert read_grammar({"response_format": {"type": "json_object"}}) == (*any_object, "response_format")
    assert read_grammar({"response_format": {}}) is None
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    assert read_grammar({"response_format": wanted}) == ("json_schema", json.dumps(schema), "response_format")


def test_each_token_that_ends_a_text_may_end_a_grammar_s():
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    state = Grammars(tokenizer, (255, 256)).mask(Grammar("regex", "a?", "regex")).start()
    words = np.zeros(9, np.uint32)
    state.fill(words)
    allowed = [token for token in range(288) if words[token // 32] >> np.uint32(token % 32) & 1]
    assert allowed == [ord("a"), 255, 256]
