"""Tests chat templates: those of folders and the default one, and what their sandbox refuses."""

import datetime
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


def test_templates_that_cannot_be_read(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": ["x"]}')
    assert load_template(tmp_path).render([{"role": "user", "content": "Hi"}])  # as if there were none
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="not UTF-8"):
        load_template(tmp_path)


MESSAGES = [{"role": "user", "content": "Hi"}]


def test_templates_as_transformers_renders_them():
    """The template has the tag around an assistant's text, and the arguments of transformers' `tojson`."""
    source = "{% for m in messages %}{% generation %}{% set x = m.content %}{{ x }}{% endgeneration %};{% endfor %}"
    assert ChatTemplate(source).render(MESSAGES * 2) == "Hi;Hi;"
    value = "{'b': 'é<', 'a': [1]}"
    for arguments, expected in [
        ("", '{"b": "é<", "a": [1]}'),
        ("ensure_ascii=false", '{"b": "é<", "a": [1]}'),
        ("ensure_ascii=true", '{"b": "\\u00e9<", "a": [1]}'),
        ("sort_keys=true", '{"a": [1], "b": "é<"}'),
        ("separators=(',', ':')", '{"b":"é<","a":[1]}'),
        ("indent=1", '{\n "b": "é<",\n "a": [\n  1\n ]\n}'),
    ]:
        template = ChatTemplate("{{ " + value + " | tojson(" + arguments + ") }}")
        assert template.render(MESSAGES) == expected


def test_lines_of_a_template_that_hold_only_blocks_leave_nothing():
    source = "{% for m in messages %}\n  {% if m.role %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n."
    assert ChatTemplate(source).render(MESSAGES) == "Hi\n."


def test_of_several_named_templates_the_default_one_counts(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, 3, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_template(tmp_path).render(MESSAGES) == "plain"


def test_special_tokens_are_found_in_both_files(tmp_path):
    source = "{{ bos_token }}{{ eos_token }}{{ pad_token }}"
    (tmp_path / "chat_template.jinja").write_text(source)
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": {"content": "</s>"}}')
    assert load_template(tmp_path).render(MESSAGES) == "<s></s>"
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<b>", "eos_token": null}')
    assert load_template(tmp_path).render(MESSAGES) == "<b></s>"
    assert not load_template(tmp_path).adds_special_tokens


def test_only_a_model_without_a_template_needs_the_tokenizers_special_tokens(tmp_path):
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<s>"}')
    template = load_template(tmp_path)
    assert template.adds_special_tokens
    assert template.render(MESSAGES) == "user: Hi\nassistant:"
    answer = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [{}]}]
    assert template.render(answer, add_generation_prompt=False) == "user: Hi\nassistant: \n"


def test_a_template_of_the_command_line(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("own")
    (tmp_path / "other").write_text("other {{ bos_token }}")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    assert load_template(tmp_path, tmp_path / "other").render(MESSAGES) == "other <s>"
    with pytest.raises(CheckpointError, match="none cannot be read: No such file"):
        load_template(tmp_path, tmp_path / "none")


@pytest.mark.parametrize("form", ["{{ m.content }}", "{{ m.content | trim }}"])
def test_the_last_message_can_be_gone_on_with(form):
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>" + form + "</>{% endfor %}")
    messages = [*MESSAGES, {"role": "assistant", "content": " Hi, I "}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == ("<user>Hi</><assistant> Hi, I " if "trim" not in form else "<user>Hi</><assistant>Hi, I")
    text = template.render([*MESSAGES, {"role": "assistant", "content": "Hi"}], continue_final_message=True)
    assert text == "<user>Hi</><assistant>Hi", "the last of two equal texts"
    with pytest.raises(TemplateError, match="whose text the chat template shows"):
        template.render([*MESSAGES, {"role": "assistant", "content": " "}], continue_final_message=True)
    with pytest.raises(TemplateError, match="whose text the chat template shows"):
        ChatTemplate("x").render(MESSAGES, continue_final_message=True)


def test_more_names_for_a_template():
    template = ChatTemplate("{{ messages[0].content }}{{ enable_thinking }}", {"bos_token": ""})
    assert template.render(MESSAGES, more={"enable_thinking": False}) == "HiFalse"
    for name in ("messages", "bos_token", "tools"):
        with pytest.raises(TemplateError, match=f"cannot have {name}"):
            template.render(MESSAGES, more={name: "x"})


def test_what_a_template_may_use():
    """The date, loops that skip, and special tokens that the model lacks."""
    now = datetime.datetime.now()
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(MESSAGES) in (str(now.year), str(now.year + 1))
    source = "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}"
    assert ChatTemplate(source).render(MESSAGES * 2) == "user"
    assert not ChatTemplate("").adds_special_tokens


def test_special_tokens_that_a_folder_lacks_are_empty(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"unk_token": "<unk>"}')
    names = "bos_token", "eos_token", "pad_token", "unk_token"
    (tmp_path / "chat_template.jinja").write_text("{{ " + " + '.' + ".join(names) + " }}")
    template = load_template(tmp_path)
    assert template.render(MESSAGES) == "...<unk>"
    for name in names:
        with pytest.raises(TemplateError, match=f"cannot have {name}"):
            template.render(MESSAGES, more={name: "x"})
