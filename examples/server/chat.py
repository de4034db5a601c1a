"""Chat templates, which join a conversation's messages into one text, in the form that the model was trained on.

A model's folder has its template in chat_template.jinja or in tokenizer_config.json. The template is a program that
somebody else wrote, so it runs in Jinja's sandbox.
"""

import datetime
import json
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from examples.config import CheckpointError, read_json

DEFAULT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}\n{% endfor %}"
DEFAULT_TEMPLATE += "{% if add_generation_prompt %}assistant:{% endif %}"


class TemplateError(ValueError):
    """Says why a template cannot render the messages, in words that can be shown to users."""


class _Generation(Extension):
    """The tag {% generation %}, by which templates mark for training what an assistant says: it changes no text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Any) -> nodes.Node:
        """Makes a node of all that stands between the tag and {% endgeneration %}."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """A model's chat template.

    Args:
        source: the template, in Jinja's language; None for a simple one.
        special_tokens: texts that the template may use, by name, such as "bos_token".

    Attributes:
        adds_special_tokens: whether the tokenizer must add its special tokens to the text, which has none.

    Raises:
        CheckpointError: the template is not in Jinja's language.
    """

    def __init__(self, source: str | None = None, special_tokens: dict[str, str] | None = None):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        environment.filters["tojson"] = _to_json
        self.adds_special_tokens = source is None
        self._special_tokens = special_tokens or {}
        try:
            self._template = environment.from_string(DEFAULT_TEMPLATE if source is None else source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template cannot be read: {error}") from None

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        more: dict[str, Any] | None = None,
    ) -> str:
        """Makes the prompt after which the model goes on.

        Args:
            messages: objects with "role" and "content", a text or, beside tool calls, None.
            add_generation_prompt: whether the assistant's next message begins at the end.
            continue_final_message: whether the text ends where the last message's content does, to be gone on with.
            tools: the tools that the model may call, in OpenAI's form.
            more: further names that the template may use.

        Raises:
            TemplateError: the template cannot render the messages; the error says why.
        """
        names = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": tools}
        if taken := sorted((more or {}).keys() & (names.keys() | self._special_tokens.keys())):
            raise TemplateError(f"chat_template_kwargs cannot have {taken[0]}")
        try:
            text = self._template.render(**names, **self._special_tokens, **(more or {}))
        except Exception as error:  # a template is a program, which may fail in any way
            raise TemplateError(f"the chat template refuses the messages: {error}") from None
        return _cut(text, messages[-1]["content"]) if continue_final_message else text


def load_template(folder: Path, file: Path | None = None) -> ChatTemplate:
    """Loads the template of a model's folder, or a simple one if the folder has none.

    Args:
        folder: the model's folder.
        file: a file with a template that is taken instead.

    Raises:
        CheckpointError: there is a template that cannot be read.
    """
    settings = _settings(folder / "tokenizer_config.json")
    special_tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        for found in (settings, _settings(folder / "special_tokens_map.json")):
            token = found.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                special_tokens.setdefault(name, token)
        special_tokens.setdefault(name, "")
    source: Any = settings.get("chat_template")
    path = folder / "chat_template.jinja" if file is None else file
    if path.exists() or file is not None:
        try:
            source = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path.parent} has a {path.name} that is not UTF-8") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if isinstance(source, list):  # several templates with names
        named = [item for item in source if isinstance(item, dict)]
        source = next((item.get("template") for item in named if item.get("name") == "default"), None)
    if source is not None and not isinstance(source, str):
        raise CheckpointError(f"{folder} has a chat_template that is no text")
    return ChatTemplate(source, special_tokens)


def _settings(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _cut(text: str, last: str) -> str:
    """Cuts a rendered text off behind the content of its last message, which templates may strip of its spaces."""
    stripped = last.strip()
    at = text.rfind(stripped)
    if not stripped or at < 0:
        raise TemplateError("continue_final_message needs a last message whose text the chat template shows")
    end = at + len(last.lstrip())
    return text[:end] if text[at:end] == last.lstrip() else text[: at + len(stripped)]


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter `tojson` as transformers has it; Jinja's own would write < and > as escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str):
    raise TemplateError(message)
