"""A tokenizer out of a model folder, read as transformers reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from bi_jax.chat import load_chat_templates
from bi_jax.tokenizer_parts import TokenizerParts, set_bos_and_eos

_SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def tokenizer_from_folder(folder: Path, file: Path) -> TokenizerParts:
    """Reads tokenizer.json (`file`) and the settings that lie beside it in `folder`.

    Files: tokenizer_config.json, special_tokens_map.json, generation_config.json, config.json and
    those of the chat templates; each may be missing.

    Raises: ValueError for files that are damaged or contradict one another.
    """
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{file} is damaged or of an unknown kind: {error}") from None
    config = _read_object(folder / "tokenizer_config.json")
    special = _special_tokens(folder, config)
    _add_missing(backend, special, config, folder)
    if "add_bos_token" in config or "add_eos_token" in config:
        add_bos, add_eos = (bool(config.get(f"add_{name}_token")) for name in ("bos", "eos"))
        set_bos_and_eos(backend, special, add_bos, add_eos)
    bos = special.get("bos_token")
    return TokenizerParts(
        backend=backend,
        eos_token_ids=_eos_token_ids(folder, backend, special),
        bos_token_id=None if bos is None else backend.token_to_id(bos),
        special_tokens=special,
        chat_templates=load_chat_templates(folder, config),
    )


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ...: tokenizer_config.json first, special_tokens_map.json fills in."""
    older = _read_object(folder / "special_tokens_map.json")
    special = {}
    for name in _SPECIAL_NAMES:
        key = f"{name}_token"
        value = config[key] if key in config else older.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            special[key] = value
        elif value is not None:
            raise ValueError(f"{key}={value!r:.80} in {folder} must be a string")
    return special


def _add_missing(
    backend: Tokenizer,
    special: Mapping[str, str],
    config: Mapping[str, Any],
    folder: Path,
) -> None:
    """Adds tokens that only tokenizer_config.json knows, at the ids that it says."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = _added_tokens(config.get("added_tokens_decoder") or {}, folder)
    for token_id, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        if entry["content"] in known:
            continue
        flags = {key: bool(entry.get(key)) for key in ("single_word", "lstrip", "rstrip")}
        token = AddedToken(entry["content"], normalized=bool(entry.get("normalized")), **flags)
        _add(backend, token, bool(entry.get("special")))
        known.add(entry["content"])
        got = backend.token_to_id(entry["content"])
        if got != int(token_id):
            raise ValueError(
                f"{folder}: tokenizer_config.json says that {entry['content']!r} has id "
                f"{token_id}, tokenizer.json says {got}"
            )
    for text in special.values():
        if text not in known:
            _add(backend, AddedToken(text, normalized=False), True)


def _added_tokens(listed: Any, folder: Path) -> Mapping[str, Mapping[str, Any]]:
    """Checks that they are id -> {content, ...}."""
    entries = listed.items() if isinstance(listed, dict) else [("", listed)]
    for token_id, entry in entries:
        text = entry.get("content") if isinstance(entry, dict) else None
        if not token_id.isdecimal() or not isinstance(text, str):
            raise ValueError(
                f"added_tokens_decoder in {folder / 'tokenizer_config.json'} must name texts by "
                f"token id, got {entry!r:.80} at {token_id!r:.20}"
            )
    return listed


def _add(backend: Tokenizer, token: AddedToken, special: bool) -> None:
    if special:
        backend.add_special_tokens([token])
    else:
        backend.add_tokens([token])


def _eos_token_ids(folder: Path, backend: Tokenizer, special: Mapping[str, str]) -> tuple[int, ...]:
    """The tokenizer's eos_token and generation_config.json's list; else config.json's."""
    end = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    ids = [] if end is None else [end]
    ids += _id_list(folder / "generation_config.json")
    if not ids:
        ids += _id_list(folder / "config.json")
    return tuple(dict.fromkeys(ids))


def _id_list(file: Path) -> list[int]:
    value = _read_object(file).get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise ValueError(f"eos_token_id={value!r} in {file} must be a token id or a list of them")
    return ids


def _read_object(file: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object")
    return content
