"""Chat templates, which make one text of a conversation's messages, in the form that the model was trained on.

A model's folder has its template in chat_template.jinja or in tokenizer_config.json. The template is a program that
somebody else wrote, so it runs in Jinja's sandbox.
"""

import datetime
import json
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from examples.config import CheckpointError, read_json

DEFAULT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


class TemplateError(ValueError):
    """Says why a template cannot render the messages, in words that can be shown to users."""


class ChatTemplate:
    """A model's chat template.

    Args:
        source: the template, in Jinja's language.
        special_tokens: texts that the template may use, by name, such as "bos_token".

    Raises:
        CheckpointError: the template is not in Jinja's language.
    """

    def __init__(self, source: str = DEFAULT_TEMPLATE, special_tokens: dict[str, str] | None = None):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        self._special_tokens = special_tokens or {}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template cannot be read: {error}") from None

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Makes the prompt after which the assistant's next message begins.

        Args:
            messages: objects with "role" and "content", both texts.

        Raises:
            TemplateError: the template cannot render the messages; the error says why.
        """
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, **self._special_tokens
            )
        except Exception as error:  # a template is a program, which may fail in any way
            raise TemplateError(f"the chat template refuses the messages: {error}") from None


def load_template(folder: Path) -> ChatTemplate:
    """Loads the template of a model's folder, or a simple one if the folder has none.

    Raises:
        CheckpointError: the folder has a template that cannot be read.
    """
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    special_tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        special_tokens[name] = token if isinstance(token, str) else ""
    source: Any = settings.get("chat_template")
    if (folder / "chat_template.jinja").exists():
        try:
            source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{folder} has a chat_template.jinja that is not UTF-8") from error
    if isinstance(source, list):  # several templates with names
        named = [item for item in source if isinstance(item, dict)]
        source = next((item.get("template") for item in named if item.get("name") == "default"), None)
    if source is None:
        return ChatTemplate()
    if not isinstance(source, str):
        raise CheckpointError(f"{folder} has a chat_template that is no text")
    return ChatTemplate(source, special_tokens)


def _raise(message: str):
    raise TemplateError(message)
