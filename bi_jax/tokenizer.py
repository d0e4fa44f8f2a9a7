"""Text to token ids and back, with what a model folder says about both.

The work is done by the `tokenizers` library, the same code that transformers runs.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers, processors

from bi_jax.chat import (
    DEFAULT_CHAT_DATE,
    load_chat_templates,
    pick_chat_template,
    render_chat,
)
from bi_jax.models.checkpoint.gguf_file import open_gguf
from bi_jax.tokenizer_gguf import HINT, added_bos_and_eos, tokenizer_from_gguf

_SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# Kinds of tokenizer that are recognised by a file, in order to be refused by name.
_OTHER_KINDS = {
    "tokenizer.model": "a SentencePiece model (tokenizer.model)",
    "spiece.model": "a SentencePiece model (spiece.model)",
    "tekken.json": "a Tekken file (tekken.json)",
    "vocab.json": "a slow byte-pair tokenizer (vocab.json)",
    "vocab.txt": "a WordPiece vocabulary (vocab.txt)",
}


class Tokenizer:
    """A model's tokenizer, its end tokens and its chat templates.

    Attributes:
      eos_token_ids: ids that end a completion, in the order the model names them; may be empty.
      bos_token_id: the id a text begins with where the model wants one, or None.
      special_tokens: bos_token, eos_token, ... as text, for chat templates.
      chat_templates: source by name; see `chat_template` for the default one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Iterable[int] = (),
        bos_token_id: int | None = None,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.eos_token_ids = tuple(eos_token_ids)
        self.bos_token_id = bos_token_id
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Tokenizer:
        """Reads a tokenizer from this machine; nothing is fetched and nothing is executed.

        Args:
          path: a Hugging Face folder with tokenizer.json, an Orbax folder written by
            scripts/convert.py (it holds the same files), a tokenizer.json, or a GGUF file.

        Raises:
          ValueError: there is nothing there, or it is damaged or contradicts itself.
          NotImplementedError: a kind of tokenizer that is not supported.
        """
        path = Path(path)
        if path.is_file() and path.suffix == ".json":
            return _from_folder(cls, path.parent, path)
        if path.is_file():
            return _from_gguf(cls, path)
        if not path.is_dir():
            raise ValueError(f"there is no tokenizer at {path}: no such file or folder")
        if (path / "tokenizer.json").is_file():
            return _from_folder(cls, path, path / "tokenizer.json")
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return _from_gguf(cls, files[0])
        for name, kind in _OTHER_KINDS.items():
            if (path / name).is_file():
                raise NotImplementedError(
                    f"{path} holds {kind} and no tokenizer.json, which is what is supported; {HINT}"
                )
        raise ValueError(f"{path} holds no tokenizer.json; {HINT}")

    @property
    def eos_token_id(self) -> int | None:
        """The first of eos_token_ids."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the highest id; a model's logits are often a little wider."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @functools.cached_property
    def is_byte_level(self) -> bool:
        """Whether decoding is joining the tokens' bytes and nothing else."""
        return isinstance(self.backend.decoder, decoders.ByteLevel)

    @property
    def chat_template(self) -> str | None:
        """The source of the default chat template, None where there is none."""
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens spelled out in it become their ids.

        Args:
          text: any string that UTF-8 can hold.
          add_special_tokens: add the BOS (or EOS) token where the model wants one. False for text
            that a chat template made: it has them already.

        Raises: ValueError for half of a surrogate pair.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text holds half of a surrogate pair, {text[error.start]!r}, at place "
                f"{error.start}; it is no Unicode text"
            ) from None
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD, unknown ids become nothing.

        Raises: ValueError for a negative id.
        """
        ids = [int(token) for token in ids]
        if ids and min(ids) < 0:
            raise ValueError(f"token id {min(ids)} is negative")
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def is_silent(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Whether `decode` passes over this id: it is unknown, or special and they are skipped."""
        token = self.backend.id_to_token(int(token_id))
        return token is None or (skip_special_tokens and token in self._special)

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """The bytes one token adds to the text of a byte-level tokenizer (`is_byte_level`)."""
        token = self.backend.id_to_token(int(token_id))
        if token is None or (skip_special_tokens and token in self._special):
            return b""
        try:
            return bytes(_byte_of_letter()[letter] for letter in token)
        except KeyError:  # an added token is spelled as it is
            return token.encode("utf-8")

    @functools.cached_property
    def _special(self) -> frozenset[str]:
        added = self.backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        date: datetime.date = DEFAULT_CHAT_DATE,
        **options: Any,
    ) -> str:
        """The prompt for a conversation as text; see `bi_jax.chat.render_chat`.

        Args:
          template: the name of one of chat_templates, where there are several.
          options: what the template reads beside, such as enable_thinking=False.

        Raises: ValueError when there is no such template or it does not like the conversation.
        """
        source = pick_chat_template(self.chat_templates, name=template, with_tools=bool(tools))
        return render_chat(
            source,
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            special_tokens=self.special_tokens,
            date=date,
            options=options,
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of `apply_chat_template(messages, **options)`, no special tokens added.

        Special tokens that a user typed become special tokens, as transformers has it by default.
        """
        text = self.apply_chat_template(messages, **options)
        return self.encode(text, add_special_tokens=False)


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for.

    Printable Latin-1 stands for itself; the other bytes, in order, for what follows U+00FF.
    """
    letters = set(pre_tokenizers.ByteLevel.alphabet())
    table = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    others = (byte for byte in range(256) if chr(byte) not in table)
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}


def _from_gguf(cls: type[Tokenizer], path: Path) -> Tokenizer:
    metadata = open_gguf(path).metadata
    found = tokenizer_from_gguf(metadata)
    add_bos, add_eos = added_bos_and_eos(metadata)
    _set_bos_and_eos(found.backend, found.special_tokens, add_bos, add_eos)
    return cls(
        found.backend,
        eos_token_ids=found.eos_token_ids,
        bos_token_id=found.bos_token_id,
        special_tokens=found.special_tokens,
        chat_templates=found.chat_templates,
    )


def _from_folder(cls: type[Tokenizer], folder: Path, file: Path) -> Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{file} is damaged or of an unknown kind: {error}") from None
    config = _read_object(folder / "tokenizer_config.json")
    special = _special_tokens(folder, config)
    _add_missing(backend, special, config, folder)
    if "add_bos_token" in config or "add_eos_token" in config:
        add_bos, add_eos = (bool(config.get(f"add_{name}_token")) for name in ("bos", "eos"))
        _set_bos_and_eos(backend, special, add_bos, add_eos)
    bos = special.get("bos_token")
    return cls(
        backend,
        eos_token_ids=_eos_token_ids(folder, backend, special),
        bos_token_id=None if bos is None else backend.token_to_id(bos),
        special_tokens=special,
        chat_templates=load_chat_templates(folder, config),
    )


def _set_bos_and_eos(
    backend: tokenizers.Tokenizer, special: Mapping[str, str], add_bos: bool, add_eos: bool
) -> None:
    """Makes `add_special_tokens` mean these two; a token that the model does not have is left."""
    before = [special["bos_token"]] if add_bos and "bos_token" in special else []
    behind = [special["eos_token"]] if add_eos and "eos_token" in special else []
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *behind],
        special_tokens=[(token, backend.token_to_id(token)) for token in {*before, *behind}],
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
    backend: tokenizers.Tokenizer,
    special: Mapping[str, str],
    config: Mapping[str, Any],
    folder: Path,
) -> None:
    """Adds tokens that only tokenizer_config.json knows, at the ids that it says."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
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


def _add(backend: tokenizers.Tokenizer, token: AddedToken, special: bool) -> None:
    if special:
        backend.add_special_tokens([token])
    else:
        backend.add_tokens([token])


def _eos_token_ids(
    folder: Path, backend: tokenizers.Tokenizer, special: Mapping[str, str]
) -> tuple[int, ...]:
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
