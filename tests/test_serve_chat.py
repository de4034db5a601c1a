"""Tests chat: templates of folders and the default one, what their sandbox refuses, and tokens in an answer."""

import json

import pytest

from examples.checkpoint import load_model
from examples.command_line import TINY
from examples.config import CheckpointError
from examples.server.answers import Answer
from examples.server.chat import ChatTemplate, TemplateError, load_template
from paged_jax.engine import Delta, TokenLogprob


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


def test_templates_that_cannot_be_read(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": ["x"]}')
    assert load_template(tmp_path).render([{"role": "user", "content": "Hi"}])  # as if there were none
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="not UTF-8"):
        load_template(tmp_path)


@pytest.mark.parametrize(("token", "token_bytes"), [(ord("a"), [ord("a")]), ("é".encode()[0], None)])
def test_the_bytes_of_a_token(token, token_bytes):
    """The tiny model's tokens are bytes; a part of a character is no text, so that its bytes are not told."""
    answer = Answer(True, "tiny", load_model(TINY, "float32")[2], 0)
    delta = Delta(0, 0, (token,), logprobs=(TokenLogprob(token, -1.0),))
    (choice,) = answer.whole([[delta]])["choices"]
    (item,) = choice["logprobs"]["content"]
    assert item["bytes"] == token_bytes
