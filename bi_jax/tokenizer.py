"""Text to token ids and back, with what a model folder says about both.

The work is done by the `tokenizers` library, the same code that transformers runs.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, pre_tokenizers

from bi_jax.chat import DEFAULT_CHAT_DATE, pick_chat_template, render_chat
from bi_jax.models.checkpoint.gguf_file import open_gguf
from bi_jax.tokenizer_folder import tokenizer_from_folder
from bi_jax.tokenizer_gguf import tokenizer_from_gguf
from bi_jax.tokenizer_parts import HINT, TokenizerParts

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
        self._bytes: dict[int, bytes] = {}

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
        parts = _read(Path(path))
        return cls(
            parts.backend,
            eos_token_ids=parts.eos_token_ids,
            bos_token_id=parts.bos_token_id,
            special_tokens=parts.special_tokens,
            chat_templates=parts.chat_templates,
        )

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
        if skip_special_tokens and token_id in self._special_ids:
            return True
        return self.backend.id_to_token(int(token_id)) is None

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """The bytes one token adds to the text of a byte-level tokenizer (`is_byte_level`)."""
        if skip_special_tokens and token_id in self._special_ids:
            return b""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = _bytes_of(self.backend.id_to_token(int(token_id)))
        return known

    @functools.cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

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


def _bytes_of(token: str | None) -> bytes:
    if token is None:  # logits may be wider than the vocabulary
        return b""
    try:
        return bytes(_byte_of_letter()[letter] for letter in token)
    except KeyError:  # an added token is spelled as it is
        return token.encode("utf-8")


def _read(path: Path) -> TokenizerParts:
    if path.is_file() and path.suffix == ".json":
        return tokenizer_from_folder(path.parent, path)
    if path.is_file():
        return tokenizer_from_gguf(open_gguf(path).metadata)
    if not path.is_dir():
        raise ValueError(f"there is no tokenizer at {path}: no such file or folder")
    if (path / "tokenizer.json").is_file():
        return tokenizer_from_folder(path, path / "tokenizer.json")
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return tokenizer_from_gguf(open_gguf(files[0]).metadata)
    for name, kind in _OTHER_KINDS.items():
        if (path / name).is_file():
            raise NotImplementedError(
                f"{path} holds {kind} and no tokenizer.json, which is what is supported; {HINT}"
            )
    raise ValueError(f"{path} holds no tokenizer.json; {HINT}")
