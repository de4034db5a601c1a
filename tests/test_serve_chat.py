"""Tests chat templates: those of folders, the default one, and what their sandbox refuses."""

import json

import pytest

from examples.config import CheckpointError
from examples.server.chat import ChatTemplate, TemplateError, load_template


def test_chat_templates(tmp_path):
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ '>' if add_generation_prompt }}"
    messages = [{"role": "user", "content": "Hi"}]
    assert load_template(tmp_path).render(messages) == "user: Hi\nassistant:"
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ bos_token }}" + source, "bos_token": {"content": "<s>"}})
    )
    assert load_template(tmp_path).render(messages) == "<s>[user]Hi>"
    (tmp_path / "chat_template.jinja").write_text(source)
    assert load_template(tmp_path).render(messages) == "[user]Hi>"
    for bad in (
        "{{ raise_exception('no') }}",
        "{{ messages.x.y }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 / 0 }}",
        "{{ '{1}'.format(0) }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ):
        with pytest.raises(TemplateError):
            ChatTemplate(bad).render(messages)
    with pytest.raises(CheckpointError, match="cannot be read"):
        ChatTemplate("{% for %}")
