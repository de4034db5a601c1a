"""Tools: functions that a model may ask its client to call, with OpenAI's interface.

The chat template shows the tools to the model, and the model writes its calls in the form that it was trained on. A
`ToolCallParser` finds them in the text. Where a call is required, a grammar allows nothing else.

- hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, also behind a text. Hermes and
  Qwen write so.
- llama3: `{"name": ..., "parameters": {...}}` and nothing else, several ones with a semicolon between them. Llama 3
  writes so, and may begin with `<|python_tag|>`.
"""

import json
import re
import uuid
from collections.abc import Collection
from typing import Any, Literal, NamedTuple

from tokenizers import Tokenizer

from examples.server.fields import ApiError, read_flag, shown
from examples.server.grammar import Grammar

type Format = Literal["hermes", "llama3"]

FORMATS: tuple[Format, ...] = "hermes", "llama3"
FIELDS = {"tools", "tool_choice", "parallel_tool_calls"}
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_MOST_TOOLS = 128  # OpenAI's limit
_ANY_OBJECT = {"type": "object"}
_DECODER = json.JSONDecoder()


class Tools(NamedTuple):
    """A request's tools.

    Attributes:
        shown: the objects that the chat template gets.
        required: if an answer must call one of some functions: these functions' names and the schemas of their
            arguments; empty if the model may also answer with a text.
        are_parallel: whether an answer may have several calls.
    """

    shown: list[dict[str, Any]]
    required: dict[str, dict[str, Any]]
    are_parallel: bool


class ToolCall(NamedTuple):
    """A call that the model asks for; the arguments are the text of a JSON object."""

    name: str
    arguments: str


def read_tools(content: dict[str, Any], form: Format | None) -> Tools | None:
    """Reads the tools of a request; None if it has none, or if the model is not to use them.

    Args:
        content: the request.
        form: how the model writes its calls; None if that is not known, so that tools are refused.

    Raises:
        ApiError: something is wrong with the tools, or the server cannot use them.
    """
    tools, choice = content.get("tools") or [], content.get("tool_choice")
    if not isinstance(tools, list) or len(tools) > _MOST_TOOLS:
        raise ApiError(f"tools must be a list of at most {_MOST_TOOLS} tools, got {shown(tools)}", param="tools")
    functions = [_read_function(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    schemas = dict(functions)
    if len(schemas) < len(functions):
        raise ApiError("tools must have different names", param="tools")
    if isinstance(choice, dict):
        name = (choice.get("function") or {}).get("name") if isinstance(choice.get("function"), dict) else None
        if choice.get("type") != "function" or name not in schemas:
            raise ApiError(f"tool_choice must name one of the tools, got {shown(choice)}", param="tool_choice")
        required = {name: schemas[name]}
    elif choice in (None, "auto", "none", "required"):
        if choice == "required" and not tools:
            raise ApiError("tool_choice required needs tools", param="tool_choice")
        required = schemas if choice == "required" else {}
    else:
        message = f"tool_choice must be auto, none, required or an object with a function, got {shown(choice)}"
        raise ApiError(message, param="tool_choice")
    are_parallel = read_flag(content, "parallel_tool_calls", default=True)
    if not tools or choice == "none":
        return None
    if form is None:
        raise ApiError("tools need a server that was started with --tool-call-parser", param="tools")
    return Tools(tools, required, are_parallel)


def _read_function(tool: Any, where: str) -> tuple[str, dict[str, Any]]:
    """The name of a tool's function, and the schema of its arguments."""
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise ApiError(f"{where} must have the type function and an object function", param="tools")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not re.fullmatch(r"[a-zA-Z0-9_.-]{1,64}", name):
        raise ApiError(f"{where}.function.name must be 1 to 64 letters, digits, '_', '.' or '-'", param="tools")
    if parameters is not None and not isinstance(parameters, dict):
        raise ApiError(f"{where}.function.parameters must be a JSON schema", param="tools")
    return name, parameters or _ANY_OBJECT


def special_tokens(tokenizer: Tokenizer) -> set[str]:
    """The special tokens around calls; decoding shows them only on request."""
    added = tokenizer.get_added_tokens_decoder().values()
    return {token.content for token in added if token.special and token.content in (_OPEN, _CLOSE)}


def grammar_of(tools: Tools, form: Format, special: Collection[str] = ()) -> Grammar | None:
    """The grammar of an answer that must have a call; None where none is required.

    Args:
        tools: what the request says.
        form: how the model writes its calls.
        special: texts that are special tokens, which a grammar names in another way.
    """
    if not tools.required:
        return None
    calls = [_schema_of_call(name, schema, form) for name, schema in tools.required.items()]
    # Each function gets its own schema, because references begin at a schema's root.
    rules = [f"call_{i}: %json {json.dumps(schema)}" for i, schema in enumerate(calls)]
    rules.append("body: " + " | ".join(f"call_{i}" for i in range(len(calls))))
    if form == "llama3":
        return Grammar("lark", "\n".join(["start: body", *rules]), "tools")
    begin, end = (text if text in special else json.dumps(text) for text in (_OPEN, _CLOSE))
    start = 'start: call ("\\n" call)*' if tools.are_parallel else "start: call"
    return Grammar("lark", "\n".join([start, f'call: {begin} "\\n" body "\\n" {end}', *rules]), "tools")


def _schema_of_call(name: str, schema: dict[str, Any], form: Format) -> dict[str, Any]:
    """The schema of the object that a model writes to call a function."""
    key = "arguments" if form == "hermes" else "parameters"
    roots = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
    arguments = {"type": "object"} | {word: value for word, value in schema.items() if word not in roots}
    return roots | {
        # Models are trained on calls with these spaces and no others.
        "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
        "type": "object",
        "properties": {"name": {"const": name}, key: arguments},
        "required": ["name", key],
        "additionalProperties": False,
    }


class ToolCallParser:
    """Splits the text of one choice, which comes piece by piece, into shown text and calls.

    A call is given out once it is whole, since until then its text may turn out to be no call. Text that is no call is
    given out as it is.

    Args:
        form: how the model writes its calls.
        are_parallel: whether more than the first call is given out.

    Attributes:
        num_calls: calls that were given out.
    """

    def __init__(self, form: Format, are_parallel: bool = True):
        self._form, self._most = form, None if are_parallel else 1
        self._held = ""
        self._is_text = False  # for llama3: the answer's beginning shows that it is no call
        self.num_calls = 0

    def push(self, text: str, *, is_last: bool = False) -> tuple[str, list[ToolCall]]:
        """Takes the next piece of the text.

        Args:
            text: the piece.
            is_last: whether no more comes.

        Returns:
            The text that can be given out, and the calls that are whole.
        """
        self._held += text
        content, calls = (self._hermes if self._form == "hermes" else self._llama3)(is_last)
        calls = calls if self._most is None else calls[: max(self._most - self.num_calls, 0)]
        self.num_calls += len(calls)
        return content, calls

    def _hermes(self, is_last: bool) -> tuple[str, list[ToolCall]]:
        content, calls = "", []
        while _OPEN in self._held:
            before, _, after = self._held.partition(_OPEN)
            inside, closed, rest = after.partition(_CLOSE)
            if not closed and not is_last:
                break
            call = _read_call(inside, "arguments")
            content += before.rstrip() if call is not None else before + _OPEN + inside + closed
            calls += [] if call is None else [call]
            self._held = rest
        if is_last:
            text, self._held = self._held, ""
            return content + (text if text.strip() or not (calls or self.num_calls) else ""), calls
        # It holds back text that may begin a call, with the space before it, which is no part of the text.
        begins = self._held.find(_OPEN)
        if begins < 0:
            size = next((n for n in range(len(_OPEN), 0, -1) if self._held.endswith(_OPEN[:n])), 0)
            begins = len(self._held) - size
        text = self._held[:begins].rstrip()
        self._held = self._held[len(text) :]
        return content + text, calls

    def _llama3(self, is_last: bool) -> tuple[str, list[ToolCall]]:
        """Holds back the whole answer while it may consist of calls: only the end shows that no text follows."""
        text = self._held.lstrip()
        if not self._is_text and not is_last:
            text = text.removeprefix(_PYTHON_TAG).lstrip()
            self._is_text = bool(text) and text[0] != "{" and not _PYTHON_TAG.startswith(text)
            if not self._is_text:
                return "", []
        calls = [] if self._is_text else _read_calls(text.removeprefix(_PYTHON_TAG))
        content, self._held = "" if calls else self._held, ""
        return content, calls


def _read_calls(text: str) -> list[ToolCall]:
    """The calls of a text that has nothing else, or none."""
    calls, at = [], 0
    while (at := len(text) - len(text[at:].lstrip(" \n;"))) < len(text):
        try:
            _, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        call = _read_call(text[at:end], "parameters")
        if call is None:
            return []
        calls.append(call)
        at = end
    return calls


def _read_call(text: str, key: str) -> ToolCall | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get(key, call.get("arguments", {}))
    if not isinstance(arguments, dict):
        return None
    return ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False))


def call_object(call: ToolCall) -> dict[str, Any]:
    """A call in OpenAI's form, with a new id."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
