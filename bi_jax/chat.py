"""Chat templates: where a model folder keeps them, and how they are rendered.

A template is a program that came with the weights, so it runs in a sandbox and sees plain JSON-like
data only. It can ask for today's date; it is told a fixed one, so that a prompt does not change at
midnight.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import sandbox

from bi_jax.chat_sandbox import RefusedByTemplate, compile_template

# What Llama 3's own template falls back to when nobody tells it the date.
DEFAULT_CHAT_DATE = datetime.date(2024, 7, 26)

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
PROCESSOR_FILE = "chat_template.json"


def load_chat_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """All chat templates of a model folder by name; the unnamed one is called "default".

    Places, the later winning name by name: `chat_template` in tokenizer_config.json (a string, or
    a list of {name, template}), chat_template.json, chat_template.jinja together with
    additional_chat_templates/*.jinja.

    Raises: ValueError when one of these is there but holds something else.
    """
    templates = _named(tokenizer_config.get("chat_template"), folder / "tokenizer_config.json")
    processor = folder / PROCESSOR_FILE
    if processor.is_file():
        try:
            content = json.loads(processor.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{processor} is not valid JSON: {error}") from None
        if not isinstance(content, dict):
            raise ValueError(f"{processor} must hold an object with the key 'chat_template'")
        templates |= _named(content.get("chat_template"), processor)
    main = folder / TEMPLATE_FILE
    files = {"default": main} if main.is_file() else {}
    files |= {path.stem: path for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    return templates | {name: path.read_text(encoding="utf-8") for name, path in files.items()}


def pick_chat_template(
    templates: Mapping[str, str], *, name: str | None = None, with_tools: bool = False
) -> str:
    """The template called `name`; else "tool_use" if there are tools; else "default".

    Raises: ValueError when the model has no such template, naming those that it has.
    """
    if not templates:
        raise ValueError("this model has no chat template; give the prompt raw")
    known = ", ".join(sorted(templates))
    if name is not None:
        if name not in templates:
            raise ValueError(f"there is no chat template named {name!r}; this model has: {known}")
        return templates[name]
    if with_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" not in templates:
        raise ValueError(f"no chat template is the default one; name one of: {known}")
    return templates["default"]


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    special_tokens: Mapping[str, str] | None = None,
    date: datetime.date = DEFAULT_CHAT_DATE,
    options: Mapping[str, Any] | None = None,
) -> str:
    """The prompt that `template` makes of a conversation, as transformers would make it.

    Args:
      template: the source, in jinja2.
      messages: a non-empty list of {role, content, ...}; keys whose value is None are left out.
      add_generation_prompt: end with the opening of the assistant's turn.
      tools: JSON schemas of callable functions, for templates that know about them.
      documents: {title, text} records, likewise.
      special_tokens: bos_token, eos_token, ... as the template may name them.
      date: what `strftime_now` formats; midnight of this day, never the clock.
      options: whatever else the template reads, such as enable_thinking=False.

    Raises: ValueError in one sentence, whatever it was that the template did not like.
    """
    for name in ("messages", "tools", "documents", "add_generation_prompt", "strftime_now"):
        if name in (options or {}):
            raise ValueError(f"{name!r} cannot be given as an option of the chat template")

    def strftime_now(form: str) -> str:
        return datetime.datetime.combine(date, datetime.time()).strftime(form)

    variables = {
        **(special_tokens or {}),
        **_plain(dict(options or {}), "options"),
        "messages": _messages(messages),
        "tools": _plain(list(tools), "tools") if tools is not None else None,
        "documents": _plain(list(documents), "documents") if documents is not None else None,
        "add_generation_prompt": bool(add_generation_prompt),
        "strftime_now": strftime_now,
    }
    try:
        return compile_template(template).render(variables)
    except jinja2.TemplateSyntaxError as error:
        reason = f"is not valid jinja2: {error.message} (line {error.lineno})"
    except RefusedByTemplate as error:
        reason = f"refuses this conversation: {error}"
    except sandbox.SecurityError as error:
        reason = f"tried something that is not allowed: {error}"
    except jinja2.UndefinedError as error:
        reason = f"uses something that this conversation does not have: {error}"
    except RecursionError:
        reason = "nests too deeply"
    except Exception as error:  # a template can raise anything that Python can
        reason = f"failed on this conversation: {type(error).__name__}: {error}"
    raise ValueError(f"the chat template {' '.join(reason.split())}")


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ValueError(f"messages must be a list of {{role, content}}, got {messages!r:.80}")
    if not messages:
        raise ValueError("messages is empty; a conversation needs at least one message")
    plain = []
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{place}]={message!r:.80} must have a role")
        kept = {key: value for key, value in message.items() if value is not None}
        plain.append(_plain(kept, f"messages[{place}]"))
    return plain


def _plain(value: Any, place: str) -> Any:
    """A copy made of exact JSON types, so that no method of a richer object can be reached."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {
            _plain(key, place): _plain(item, f"{place}[{key!r}]") for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
    raise ValueError(
        f"{place} holds a {type(value).__name__}; a chat may hold only plain JSON data"
    )


def _named(value: Any, source: Path) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
        return dict(value)
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        pairs = {entry.get("name"): entry.get("template") for entry in value}
        if all(isinstance(part, str) for pair in pairs.items() for part in pair):
            return {str(name): str(text) for name, text in pairs.items()}
    raise ValueError(
        f"chat_template in {source} must be a string or a list of {{name, template}}, "
        f"got {value!r:.80}"
    )
