"""Token ids to text, one token at a time, never half a character.

A token of a byte-level vocabulary may end in the middle of a UTF-8 character, so text can lag
behind the tokens by up to three bytes; `flush` says what is left when no more will come.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from bi_jax.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# A character is at most four bytes, hence at most four tokens; more than twice as many that still
# end in U+FFFD are no character that is being spelled out.
MAX_PENDING_TOKENS = 9


class Detokenizer(Protocol):
    """Pieces of text, in order; joined they are the text of all tokens."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        ...

    def flush(self) -> str:
        """What is left, an unfinished character as U+FFFD; the last call."""
        ...


def make_detokenizer(tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> Detokenizer:
    """A detokenizer for one completion.

    With a byte-level tokenizer the joined pieces equal `tokenizer.decode` of all ids, whatever the
    ids are. With others they do for ids that spell valid UTF-8.
    """
    if tokenizer.is_byte_level:
        return ByteDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return WindowDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)


class ByteDetokenizer:
    """For byte-level vocabularies: joins bytes; constant work a token."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(token_id, self._skip))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For every other decoder: decodes a window of the last tokens and shows what is new.

    The window holds the tokens shown last, as context, for the decoder may treat the first token
    of a text differently (a space that it drops), and the tokens not shown yet.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._shown: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if self._tokenizer.is_silent(token_id, self._skip):
            return ""  # as context it would be none
        self._pending.append(token_id)
        return self._take(hold=len(self._pending) < MAX_PENDING_TOKENS)

    def flush(self) -> str:
        return self._take(hold=False)

    def _take(self, *, hold: bool) -> str:
        before = self._tokenizer.decode(self._shown, self._skip)
        text = self._tokenizer.decode(self._shown + self._pending, self._skip)
        if len(text) <= len(before) or (hold and text.endswith(REPLACEMENT)):
            return ""
        self._shown, self._pending = self._pending, []
        return text[len(before) :]
