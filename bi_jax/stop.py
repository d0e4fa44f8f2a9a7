"""When a completion ends, and which of its text may be shown meanwhile.

Stop strings are looked for in the text, not in the tokens, so they may begin and end anywhere.
The text is read character by character: the first stop string to be completed ends it, the
longest one if several are completed by one character. How the text was cut into tokens or pieces
therefore makes no difference, and neither does the order of the stop strings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bi_jax.detokenize import make_detokenizer
from bi_jax.request import FinishReason, SamplingParams
from bi_jax.tokenizer import Tokenizer


class StopChecker:
    """Looks for stop tokens and stop strings in one completion.

    Feed each token to `push_token`, and unless that ended it the text it completed to `push_text`;
    at the end call `flush`.

    Args:
      stop: strings that end the completion; the text is cut before them.
      stop_token_ids: ids that end it; reported as stop_reason.
      eos_token_ids: ids that end it unless ignore_eos; not reported.
      min_tokens: the first this many tokens end nothing, nor does text that they complete.
    """

    def __init__(
        self,
        *,
        stop: Sequence[str] = (),
        stop_token_ids: Iterable[int] = (),
        eos_token_ids: Iterable[int] = (),
        ignore_eos: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._stop = tuple(dict.fromkeys(stop))
        self._beginnings = {s[:length] for s in self._stop for length in range(1, len(s))}
        self._last_letters = {beginning[-1] for beginning in self._beginnings}
        self._stop_token_ids = frozenset(stop_token_ids)
        self._eos_token_ids = frozenset() if ignore_eos else frozenset(eos_token_ids)
        self._min_tokens = min_tokens
        self._held = ""
        self.num_tokens = 0
        self.stopped = False
        self.stop_reason: str | int | None = None

    def push_token(self, token_id: int) -> bool:
        """Whether this token ends the completion; its text is then not part of it."""
        self.num_tokens += 1
        if self.num_tokens <= self._min_tokens:
            return False
        if token_id in self._stop_token_ids:
            self.stopped, self.stop_reason = True, token_id
        elif token_id in self._eos_token_ids:
            self.stopped = True
        return self.stopped

    def push_text(self, piece: str) -> str:
        """The text that may be shown now: no stop string begins in it, whatever may follow."""
        if not self._stop:
            return piece
        text = self._held + piece
        if self.num_tokens > self._min_tokens:
            found = self._first_completed(text, len(self._held))
            if found is not None:
                start, match = found
                if not self.stopped:
                    self.stopped, self.stop_reason = True, match
                self._held = ""
                return text[:start]
        held = self._could_begin(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self, piece: str = "") -> str:
        """The last text: `piece` and what was held back, cut before a stop string all the same."""
        text = self.push_text(piece) + self._held
        self._held = ""
        return text

    def _first_completed(self, text: str, new_from: int) -> tuple[int, str] | None:
        """Where the stop string starts that is completed first after `new_from`, and which it is.

        Of two that end together the longer one starts first, so (end, start) is what to minimise.
        """
        found = []
        for stop in self._stop:
            start = text.find(stop, max(0, new_from - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        return min(found)[1:] if found else None

    def _could_begin(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        if text[-1:] not in self._last_letters:
            return 0
        longest = min(len(text), max(map(len, self._stop)) - 1)
        lengths = range(longest, 0, -1)
        return next((length for length in lengths if text[-length:] in self._beginnings), 0)


class CompletionText:
    """The text of one completion as it grows: detokeniser, stop checker and length limit in one.

    Args:
      tokenizer: None where there is no text, only ids; stop strings are refused then.
      params: stop, stop_token_ids, ignore_eos, min_tokens, max_tokens, skip_special_tokens.
      eos_token_ids: the model's; the tokenizer's when not given.

    Raises: ValueError for stop strings without a tokenizer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        *,
        eos_token_ids: Iterable[int] | None = None,
    ) -> None:
        if tokenizer is None and params.stop:
            raise ValueError(f"stop={params.stop!r} needs a tokenizer, and the engine has none")
        if eos_token_ids is None:
            eos_token_ids = tokenizer.eos_token_ids if tokenizer is not None else ()
        self._checker = StopChecker(
            stop=tuple(params.stop),
            stop_token_ids=params.stop_token_ids,
            eos_token_ids=eos_token_ids,
            ignore_eos=params.ignore_eos,
            min_tokens=params.min_tokens,
        )
        self._detokenizer = (
            make_detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
            if tokenizer is not None
            else None
        )
        self._max_tokens = params.max_tokens
        self._pieces: list[str] = []
        self.finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """All text shown so far; the whole text once finish_reason is set."""
        return "".join(self._pieces)

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token id that ended the completion."""
        return self._checker.stop_reason

    @property
    def num_tokens(self) -> int:
        return self._checker.num_tokens

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that it lets be shown and may set finish_reason.

        Raises: ValueError when the completion has ended already.
        """
        if self.finish_reason is not None:
            raise ValueError(
                f"the completion has ended ({self.finish_reason}); no token may follow"
            )
        if self._checker.push_token(token_id):
            return self.finish("stop")
        piece = self._detokenizer.push(token_id) if self._detokenizer is not None else ""
        shown = self._checker.push_text(piece)
        self._pieces.append(shown)
        if self._checker.stopped:
            self.finish_reason = "stop"
        elif self.num_tokens >= self._max_tokens:
            shown += self.finish("length")
        return shown

    def finish(self, reason: FinishReason) -> str:
        """Ends the completion from outside (context full, aborted); returns its last text."""
        rest = self._detokenizer.flush() if self._detokenizer is not None else ""
        shown = self._checker.flush(rest)
        self._pieces.append(shown)
        self.finish_reason = "stop" if self._checker.stopped and reason != "abort" else reason
        return shown
