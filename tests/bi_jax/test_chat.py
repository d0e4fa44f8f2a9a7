"""Chat templates: found in every place, rendered as in transformers, and kept in a box."""

import datetime
import json

import pytest

from bi_jax.chat import DEFAULT_CHAT_DATE, load_chat_templates, pick_chat_template, render_chat
from bi_jax.tokenizer import Tokenizer
from tests.bi_jax.text_cases import QWEN3_SMALL, expected

USER = [{"role": "user", "content": "hi"}]


def test_small_templates_render_as_in_transformers():
    cases = expected("templates")
    assert len(cases) == 9
    for case in cases:
        text = render_chat(case["template"], case["messages"], special_tokens={"bos_token": "<s>"})
        assert text == case["text"], case["template"]


def test_options_tools_documents_and_special_tokens_reach_the_template():
    source = (
        "{{ bos_token }}{{ style }}{{ tools[0].name }}{{ documents[0].title }}"
        "{{ add_generation_prompt }}"
    )
    text = render_chat(
        source,
        USER,
        add_generation_prompt=False,
        tools=[{"name": "T"}],
        documents=[{"title": "D"}],
        special_tokens={"bos_token": "<s>"},
        options={"style": "plain"},
    )
    assert text == "<s>plainTDFalse"
    with pytest.raises(ValueError, match="'tools' cannot be given as an option"):
        render_chat(source, USER, options={"tools": []})


def test_the_date_is_fixed_unless_the_caller_says_otherwise():
    source = "{{ strftime_now('%d %b %Y %H:%M') }}"
    assert datetime.date(2024, 7, 26) == DEFAULT_CHAT_DATE
    assert render_chat(source, USER) == "26 Jul 2024 00:00"
    date = datetime.date(2031, 1, 2)
    assert render_chat(source, USER, date=date) == "02 Jan 2031 00:00"


def test_keys_whose_value_is_none_are_left_out():
    source = "{{ messages[0].content is defined }}{{ messages[0].keys() | list }}"
    message = {"role": "assistant", "content": None, "name": "x"}
    assert render_chat(source, [message]) == "False['role', 'name']"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "{{ raise_exception('roles must\n alternate') }}",
            "refuses this conversation: roles must ",
        ),
        ("a\n{% for %}", "is not valid jinja2: .* (line 2)"),
        ("{{ messages[0].thing.part }}", "uses something that this conversation does not have"),
        ("{{ 1 + 'a' }}", "failed on this conversation: TypeError"),
        ("{{ ''.__class__.__mro__ }}", "not allowed"),
        ("{{ messages.append(1) }}", "not allowed"),
        ("{{ messages[0].update(a=1) }}", "not allowed"),
        ("{{ raise_exception.__globals__['json'] }}", "not allowed"),
        ("{{ strftime_now.__globals__['os'] }}", "not allowed"),
        ("{{ dict.__class__.mro() }}", "not allowed"),
        ("{{ cycler.__init__.__globals__ }}", "not allowed"),
        ("{% set ns = namespace() %}{% set ns.__init__ = 1 %}", "namespace may not hold"),
        ("{{ namespace(__class__=1) }}", "namespace may not hold"),
        ("{{ range(10 ** 9) | list }}", "failed on this conversation: OverflowError"),
        ("{% include 'other' %}", "failed on this conversation: TypeError: no loader"),
    ],
)
def test_what_a_template_may_not_do_is_one_clear_sentence(source, message):
    with pytest.raises(ValueError) as caught:
        render_chat(source, USER)
    text = str(caught.value)
    assert text.startswith("the chat template ") and "\n" not in text
    if message == "not allowed":
        assert "tried something that is not allowed" in text
    else:
        assert all(part in text for part in message.split(".*"))


def test_messages_must_be_plain_and_have_roles():
    for messages, message in [
        ([], "messages is empty"),
        ("hi", "messages must be a list"),
        ({"role": "user"}, "messages must be a list"),
        ([{"content": "x"}], r"messages\[0\]=.* must have a role"),
        ([*USER, "x"], r"messages\[1\]='x' must have a role"),
        ([{"role": "user", "content": object()}], r"messages\[0\]\['content'\] holds a object"),
        ([{"role": "user", "content": [b"x"]}], r"\['content'\]\[0\] holds a bytes"),
    ]:
        with pytest.raises(ValueError, match=message):
            render_chat("x", messages)


def test_a_subclass_of_a_plain_type_loses_its_methods():
    class Loud(str):
        def shout(self) -> str:
            return "!"

    with pytest.raises(ValueError, match="does not have"):
        render_chat("{{ messages[0].content.shout() }}", [{"role": "u", "content": Loud("x")}])


# Where they are kept -----------------------------------------------------------------------------


def test_every_place_is_read_and_a_file_of_its_own_wins(tmp_path):
    named = [{"name": "default", "template": "A"}, {"name": "rag", "template": "R"}]
    assert load_chat_templates(tmp_path, {}) == {}
    assert load_chat_templates(tmp_path, {"chat_template": "A"}) == {"default": "A"}
    assert load_chat_templates(tmp_path, {"chat_template": named}) == {"default": "A", "rag": "R"}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "B"}))
    assert load_chat_templates(tmp_path, {"chat_template": named})["default"] == "B"
    (tmp_path / "chat_template.jinja").write_text("C\u00e9", encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    assert load_chat_templates(tmp_path, {"chat_template": named}) == {
        "default": "C\u00e9",
        "rag": "R",
        "tool_use": "T",
    }


def test_a_folder_with_a_jinja_file_uses_it(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((QWEN3_SMALL / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!{{ eos_token }}")
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.chat_template == "{{ messages[0].content }}!{{ eos_token }}"
    assert tokenizer.apply_chat_template(USER) == "hi!<|im_end|>"


def test_damaged_places_are_named(tmp_path):
    for value in (3, [{"name": "a"}], ["x"], {"a": 1}):
        with pytest.raises(ValueError, match=r"chat_template in .*tokenizer_config\.json must be"):
            load_chat_templates(tmp_path, {"chat_template": value})
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(ValueError, match=r"chat_template\.json is not valid JSON"):
        load_chat_templates(tmp_path, {})
    (tmp_path / "chat_template.json").write_text("[]")
    with pytest.raises(ValueError, match=r"chat_template\.json must hold an object"):
        load_chat_templates(tmp_path, {})


def test_the_template_is_picked_by_name_then_tools_then_default():
    templates = {"default": "D", "tool_use": "T", "rag": "R"}
    assert pick_chat_template(templates) == "D"
    assert pick_chat_template(templates, with_tools=True) == "T"
    assert pick_chat_template(templates, name="rag", with_tools=True) == "R"
    assert pick_chat_template({"default": "D"}, with_tools=True) == "D"
    with pytest.raises(ValueError, match="has no chat template; give the prompt raw"):
        pick_chat_template({})
    with pytest.raises(ValueError, match="named 'x'; this model has: default, rag, tool_use"):
        pick_chat_template(templates, name="x")
    with pytest.raises(ValueError, match="name one of: rag"):
        pick_chat_template({"rag": "R"})
