"""Tests tools: what requests may say, what parsers find in texts, and whole and streamed answers."""

import dataclasses
import itertools
import json

import openai
import pytest

from examples.server.chat import ChatTemplate
from examples.server.fields import ApiError
from examples.server.tools import ToolCallParser, grammar_of, read_tools
from tests.http_server import HELLO

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "$defs": {"unit": {"enum": ["C", "F"]}},
            "type": "object",
            "properties": {"days": {"type": "integer", "minimum": 0, "maximum": 9}, "unit": {"$ref": "#/$defs/unit"}},
            "required": ["days", "unit"],
            "additionalProperties": False,
        },
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}
ONE = '{"name": "f", "arguments": {"a": [1, "</x>"]}}'
TWO = '{"name": "g", "arguments": {}}'
CALLS = [("f", {"a": [1, "</x>"]}), ("g", {})]
HERMES = [
    (f"<tool_call>\n{ONE}\n</tool_call>", "", CALLS[:1]),
    (f"Let me see.\n<tool_call>{ONE}</tool_call>\n<tool_call>{TWO}</tool_call>\n", "Let me see.", CALLS),
    (f"<tool_call>{ONE}", "", CALLS[:1]),
    (f"<tool_call>{ONE}</tool_call> and more", " and more", CALLS[:1]),
    ("no call, a < b and <tool_ca ", "no call, a < b and <tool_ca ", []),
    ("<tool_call>no JSON</tool_call> x", "<tool_call>no JSON</tool_call> x", []),
    (f" <tool_call>[]</tool_call><tool_call>{TWO}</tool_call>", " <tool_call>[]</tool_call>", CALLS[1:]),
    ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ("", "", []),
]
LLAMA = [text.replace("arguments", "parameters") for text in (ONE, TWO)]
LLAMA3 = [
    (LLAMA[0], "", CALLS[:1]),
    (f"<|python_tag|>{LLAMA[0]}; {LLAMA[1]}", "", CALLS),
    (f"\n{LLAMA[1]}\n", "", CALLS[1:]),
    ("Just a text {", "Just a text {", []),
    (f"{LLAMA[0]} and more", f"{LLAMA[0]} and more", []),
    ('{"name": "f"', '{"name": "f"', []),
    ('{"a": 1}', '{"a": 1}', []),
    ("", "", []),
]


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [("hermes", *case) for case in HERMES] + [("llama3", *case) for case in LLAMA3],
)
def test_what_parsers_find(form, text, content, calls):
    """Texts come whole, cut in two anywhere, or character by character."""
    cuts = [[text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))]
    for pieces in cuts:
        parser = ToolCallParser(form)
        found = [parser.push(piece) for piece in pieces] + [parser.push("", is_last=True)]
        assert "".join(piece for piece, _ in found) == content, pieces
        given = [call for _, some in found for call in some]
        assert [(call.name, json.loads(call.arguments)) for call in given] == calls
        assert parser.num_calls == len(calls)


@pytest.mark.parametrize(("form", "text"), [("hermes", HERMES[1][0]), ("llama3", LLAMA3[1][0])])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_parser_gives_out_the_first_call_alone(form, text, is_streamed):
    parser = ToolCallParser(form, are_parallel=False)
    found = [parser.push(piece) for piece in (text if is_streamed else [text])] + [parser.push("", is_last=True)]
    assert [call.name for _, calls in found for call in calls] == ["f"]
    assert parser.num_calls == 1


def test_text_is_not_held_back():
    """Only text that may begin a call is held back."""
    parser = ToolCallParser("hermes")
    assert [parser.push(piece)[0] for piece in ("a", " b", " <", "c", "<tool", "d")] == [
        "a",
        " b",
        "",
        " <c",
        "",
        "<toold",
    ]
    parser = ToolCallParser("llama3")
    assert [parser.push(piece)[0] for piece in ("\n", "a", " {", "}")] == ["", "\na", " {", "}"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": 5}, "tools must be a list"),
        ({"tools": [WEATHER] * 129}, "at most 128"),
        ({"tools": [5]}, r"tools\[0\] must have the type function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "must be 1 to 64 letters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "must be a JSON schema"),
        ({"tools": [WEATHER, WEATHER]}, "different names"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice must be auto"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "must name one"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": [WEATHER], "parallel_tool_calls": 1}, "parallel_tool_calls must be true or false"),
    ],
)
def test_wrong_tools_are_refused(fields, message):
    with pytest.raises(ApiError, match=message):
        read_tools(fields, "hermes")


def test_a_server_without_a_parser_refuses_tools(running):
    answer = running.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO, "tools": [WEATHER]})
    assert answer.status_code == 400
    assert "--tool-call-parser" in answer.json()["error"]["message"]


def test_no_tools():
    assert read_tools({"tools": [], "tool_choice": "auto"}, None) is None
    assert read_tools({"tools": [WEATHER], "tool_choice": "none"}, None) is None
    tools = read_tools({"tools": [WEATHER]}, "hermes")
    assert tools is not None
    assert grammar_of(tools, "hermes") is None


@pytest.fixture(params=["hermes", "llama3"])
def client(running, request, monkeypatch):
    """OpenAI's client of a server whose model writes calls in one of the forms."""
    template = ChatTemplate(
        "{% for tool in tools or [] %}{{ tool.function.name }},{% endfor %}{{ messages[-1].content }}"
    )
    model = dataclasses.replace(running.server._model, tool_format=request.param, template=template)
    monkeypatch.setattr(running.server, "_model", model)
    with running.openai() as client:
        client.form = request.param
        yield client


def ask(client, **fields):
    """Asks for an answer of the tiny model, which has never heard of tools."""
    how = {"model": "tiny", "messages": HELLO, "tools": [WEATHER, STOP], "temperature": 2, "seed": 5, "max_tokens": 250}
    return client.chat.completions.create(**how | fields)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["required", "named"]
)
def test_required_calls_are_valid(client, choice):
    """This holds at temperature 2, and the chunks of a stream say the same."""
    stop = STOP | {"function": STOP["function"] | {"parameters": {"type": "object", "additionalProperties": False}}}
    how = {"tools": [WEATHER, stop], "tool_choice": choice, "n": 2, "parallel_tool_calls": False}
    answer = ask(client, **how)
    for item in answer.choices:
        assert item.finish_reason == "tool_calls"
        assert item.message.content is None
        (call,) = item.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert call.function.name in ("get_weather", "stop")
        if choice != "required" or call.function.name == "get_weather":
            assert call.function.name == "get_weather"
            assert 0 <= arguments["days"] <= 9
            assert arguments["unit"] in ("C", "F")
        else:
            assert arguments == {}
    chunks = [chunk.choices[0] for chunk in ask(client, **how | {"n": 1}, stream=True)]
    (call,) = itertools.chain(*(chunk.delta.tool_calls or [] for chunk in chunks))
    first = answer.choices[0].message.tool_calls[0]
    assert (call.index, call.type, call.function) == (0, "function", call.function)
    assert call.id.startswith("call_")
    assert (call.function.name, call.function.arguments) == (first.function.name, first.function.arguments)
    assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
    assert chunks[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_may_have_calls(client, stream):
    """A grammar makes the tiny model write what a real one would."""
    text, content, calls = (HERMES if client.form == "hermes" else LLAMA3)[1]
    how = {"extra_body": {"guided_choice": [text]}, "stream": stream}
    if stream:
        chunks = list(ask(client, **how))
        deltas = [chunk.choices[0].delta for chunk in chunks]
        found = "".join(delta.content or "" for delta in deltas)
        given = list(itertools.chain(*(delta.tool_calls or [] for delta in deltas)))
        reason = chunks[-1].choices[0].finish_reason
        assert [call.index for call in given] == [0, 1]
    else:
        choice = ask(client, **how).choices[0]
        found, given, reason = choice.message.content or "", choice.message.tool_calls, choice.finish_reason
    assert found == content
    assert [(call.function.name, json.loads(call.function.arguments)) for call in given] == calls
    assert len({call.id for call in given}) == 2
    assert reason == "tool_calls"


def test_an_answer_may_be_a_text(client):
    choice = ask(client, extra_body={"guided_choice": ["Hello"]}).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("Hello", None, "stop")


def test_the_template_sees_the_tools(client):
    """Unless the model is to call none."""
    tokens = [ask(client, tool_choice=choice, max_tokens=1).usage.prompt_tokens for choice in ("auto", "none")]
    assert tokens == [len("get_weather,stop,Hi"), len("Hi")]


def test_a_call_beside_a_schema_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="cannot stand beside this tool_choice"):
        ask(client, tool_choice="required", response_format={"type": "json_object"})


def test_a_conversation_with_results_of_tools(client):
    """The messages that a client sends back: the assistant's calls, and their results."""
    call = {"id": "call_1", "type": "function", "function": {"name": "stop", "arguments": "{}"}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "call_1", "content": "done"})
    assert ask(client, messages=messages, max_tokens=1).choices[0].finish_reason == "length"


def test_the_schema_of_a_call():
    """Both words for definitions stand at the schema's root, where references begin."""
    for word in ("$defs", "definitions"):
        definitions = {"unit": {"enum": ["C"]}}
        parameters = {word: definitions, "properties": {"u": {"$ref": f"#/{word}/unit"}}, "required": ["u"]}
        tool = {"type": "function", "function": {"name": "a.b-c_" + "d" * 58, "parameters": parameters}}
        for form, key in (("hermes", "arguments"), ("llama3", "parameters")):
            tools = read_tools({"tools": [tool, STOP], "tool_choice": "required"}, form)
            assert tools is not None
            assert tools == ([tool, STOP], {tool["function"]["name"]: parameters, "stop": {"type": "object"}}, True)
            grammar = grammar_of(tools, form)
            (rule,) = (line for line in grammar.text.splitlines() if line.startswith("call_0: %json "))
            schema = json.loads(rule.removeprefix("call_0: %json "))
            assert schema.pop("x-guidance")["key_separator"] == ": "
            assert schema == {
                word: definitions,
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    key: {"type": "object", "properties": parameters["properties"], "required": ["u"]},
                },
                "required": ["name", key],
                "additionalProperties": False,
            }
            assert (grammar.kind, grammar.param) == ("lark", "tools")
            assert "body: call_0 | call_1" in grammar.text


def test_a_call_may_name_its_arguments_in_the_other_form_s_word():
    """Models mix them up; a call without arguments has none."""
    for text, arguments in (('{"name": "f", "arguments": {"a": 1}}', {"a": 1}), ('{"name": "f"}', {})):
        parser = ToolCallParser("llama3")
        _, ((name, found),) = parser.push(text, is_last=True)
        assert (name, json.loads(found)) == ("f", arguments)
