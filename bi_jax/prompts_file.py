"""Prompts from a text file (one a line) or JSONL. Host only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .request import SamplingParams

_PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
_PARAM_KEYS = tuple(f.name for f in fields(SamplingParams))


@dataclass(frozen=True, kw_only=True)
class PromptLine:
    """One prompt: a text, a conversation, or token ids, and its own sampling parameters.

    where: the file and line that it came from, for messages; empty for one of the command line.
    """

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: Sequence[int] | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """The defaults with this line's own values in their place."""
        return replace(defaults, **self.overrides) if self.overrides else defaults

    def label(self) -> str:
        """A short name for headings."""
        text = self.prompt or (f"{len(self.prompt_token_ids or ())} token ids")
        if self.messages:
            text = str(self.messages[-1].get("content"))
        first = text.strip().splitlines()[0] if text.strip() else text
        return first if len(first) <= 60 else first[:57] + "..."


def read_prompts_file(path: Path) -> list[PromptLine]:
    """The prompts of a file; blank lines are skipped.

    A ``.jsonl`` file holds an object a line: "prompt", "messages" or "prompt_token_ids", and any
    fields of SamplingParams for that prompt alone.

    Raises:
      ValueError: a line cannot be used (it is named by number), or there is no prompt.
      OSError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors put a byte order mark first
    except UnicodeDecodeError:
        raise ValueError(f"{path} must be UTF-8 text") from None
    # Not `splitlines`: it also cuts at characters that a prompt, or a string in JSON, may hold.
    numbered = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not numbered:
        raise ValueError(f"{path} holds no prompt")
    if path.suffix.lower() != ".jsonl":
        return [PromptLine(prompt=line, where=f"{path}, line {i}") for i, line in numbered]
    return [_from_json(path, number, line) for number, line in numbered]


def _from_json(path: Path, number: int, line: str) -> PromptLine:
    where = f"{path}, line {number}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number too long, or nested too deeply
        raise ValueError(f"{where} cannot be read: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where} must be a JSON object, got {type(record).__name__}")
    given = [key for key in _PROMPT_KEYS if key in record]
    if len(given) != 1:
        raise ValueError(f"{where} must have exactly one of {', '.join(_PROMPT_KEYS)}")
    unknown = sorted(set(record) - set(_PROMPT_KEYS) - set(_PARAM_KEYS))
    if unknown:
        raise ValueError(f"{where} has unknown fields: {', '.join(unknown)}")
    value = record[given[0]]
    if given[0] == "prompt" and (not isinstance(value, str) or not value):
        raise ValueError(f"{where}: prompt must be a text that is not empty")
    if given[0] != "prompt" and (not isinstance(value, list) or not value):
        raise ValueError(f"{where}: {given[0]} must be a list that is not empty")
    overrides = {key: record[key] for key in record if key in _PARAM_KEYS}
    known: dict[str, Any] = {given[0]: value}
    prompt = PromptLine(**known, overrides=overrides, where=where)
    try:
        prompt.params(SamplingParams())
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return prompt
