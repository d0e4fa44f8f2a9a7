"""What a user asks for and what comes back: plain, frozen data. Host only, no jax.

Names and shapes follow vLLM where it has them.
"""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

LogprobsMode = Literal["raw", "scaled", "processed"]
FinishReason = Literal["stop", "length", "abort"]

DEFAULT_MAX_TOKENS = 1024
SEED_BITS = 63


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the completions of one request are drawn, and when they end.

    n: completions of the prompt. Completion i does not depend on n.
    temperature: 0 is greedy; the lowest id wins ties.
    top_p, top_k, min_p: keep the most likely tokens; 1.0, 0 (or -1) and 0.0 keep all of them.
    seed: in [0, 2**63), or None: one is assigned at admission and reported on the output.
    max_tokens: at most this many new tokens (default 1024); the model's context also ends a
        completion. A smaller max_tokens gives a prefix of the same completion.
    min_tokens: the first this many tokens end nothing. End tokens are not masked out among them
        (as some engines do), so the log-probabilities stay the model's own.
    stop: strings that end a completion; its text is cut before them, its token_ids are not.
    stop_token_ids: ids that end a completion, beside the model's end-of-sequence ids.
    ignore_eos: go on after the model's end-of-sequence ids; stop and stop_token_ids still end.
    logprobs: also report this many most likely tokens at every step, as top_logprobs.
    prompt_logprobs: score the prompt's tokens, with this many most likely ones (0: none).
    logprobs_mode: "raw" (the model's), "scaled" (after temperature), "processed" (after top-k,
        top-p and min-p too).
    skip_special_tokens: leave special tokens out of the text.

    Raises: ValueError naming the field and its value; TypeError never.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._set(n=_whole("n", self.n, low=1))
        temperature = _real("temperature", self.temperature, low=0.0)
        self._set(temperature=temperature)
        self._set(top_p=_real("top_p", self.top_p, low=0.0, high=1.0, low_open=True))
        top_k = _whole("top_k", self.top_k, low=-1, what="0 (or -1: keep all) or more")
        self._set(top_k=max(top_k, 0))
        self._set(min_p=_real("min_p", self.min_p, low=0.0, high=1.0))
        if self.seed is not None:
            self._set(seed=_whole("seed", self.seed, low=0, high=2**SEED_BITS - 1))
        self._set(max_tokens=_whole("max_tokens", self.max_tokens, low=1))
        min_tokens = _whole("min_tokens", self.min_tokens, low=0)
        if min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={min_tokens} must not exceed max_tokens={self.max_tokens}"
            )
        self._set(min_tokens=min_tokens)
        self._set(stop=_stop_strings(self.stop))
        self._set(stop_token_ids=_token_ids("stop_token_ids", self.stop_token_ids))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(**{name: _whole(name, getattr(self, name), low=0)})
        if self.logprobs_mode not in get_args(LogprobsMode):
            raise ValueError(
                f"logprobs_mode={self.logprobs_mode!r} must be one of "
                + ", ".join(repr(mode) for mode in get_args(LogprobsMode))
            )
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def with_seed(self, seed: int | None = None) -> SamplingParams:
        """These parameters with a seed: their own, else the given one, else a fresh one.

        A fresh seed is 63 bits from the operating system, never from the wall clock, so two
        unseeded requests admitted together differ.
        """
        if self.seed is not None:
            return self
        return replace(self, seed=secrets.randbits(SEED_BITS) if seed is None else seed)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, ready to be admitted: token ids and how to go on from them.

    prompt is the text that prompt_token_ids came from, None when the ids were given.

    Raises: ValueError for an empty prompt, an empty request_id or ids that are no ids.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    prompt: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str) or not self.request_id:
            raise ValueError(f"request_id={self.request_id!r} must be a non-empty string")
        ids = _token_ids("prompt_token_ids", self.prompt_token_ids)
        if not ids:
            raise ValueError(f"the prompt of request {self.request_id!r} is empty")
        object.__setattr__(self, "prompt_token_ids", ids)

    def check_against_model(self, *, vocab_size: int, max_model_len: int) -> None:
        """Raises: ValueError when the model cannot read this prompt or write one token after it."""
        check_prompt_token_ids(
            self.prompt_token_ids, vocab_size=vocab_size, max_model_len=max_model_len
        )
        for token in self.sampling_params.stop_token_ids:
            if token >= vocab_size:
                raise ValueError(
                    f"stop_token_ids holds {token}, outside the vocabulary of {vocab_size} tokens"
                )


def check_prompt_token_ids(
    token_ids: Sequence[int], *, vocab_size: int, max_model_len: int
) -> None:
    """Raises: ValueError when the prompt is empty, too long, or not of this vocabulary."""
    if len(token_ids) == 0:
        raise ValueError("the prompt is empty; it needs at least one token")
    if len(token_ids) >= max_model_len:
        raise ValueError(
            f"the prompt has {len(token_ids)} tokens; a context of {max_model_len} tokens leaves "
            f"room for at most {max_model_len - 1}"
        )
    for place, token in enumerate(token_ids):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"token id {token} at place {place} of the prompt is outside the vocabulary of "
                f"{vocab_size} tokens"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class TopLogprobs:
    """The k most likely tokens of each of T places, most likely first, lowest id on ties."""

    token_ids: np.ndarray  # int32[T, k]
    logprobs: np.ndarray  # float32[T, k]

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", _frozen_array(self.token_ids, np.int32))
        object.__setattr__(self, "logprobs", _frozen_array(self.logprobs, np.float32))
        if self.token_ids.ndim != 2 or self.token_ids.shape != self.logprobs.shape:
            raise ValueError(
                "token_ids and logprobs must have one shape [T, k], got "
                f"{self.token_ids.shape} and {self.logprobs.shape}"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class CompletionOutput:
    """One completion of a prompt.

    token_ids: every token drawn, the one that ended the completion included.
    logprobs: float32[len(token_ids)], of those tokens, in the request's logprobs_mode.
    stop_reason: the stop string or stop token id that ended it; None for end-of-sequence ids.
    finish_reason: None while the completion is still going on (streaming).
    seed: with index, prompt and identity all that is needed to draw it again.
    """

    index: int
    token_ids: Sequence[int]
    text: str
    logprobs: np.ndarray
    top_logprobs: TopLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    seed: int | None = None
    identity: str = ""
    weights_version: int = 0

    def __post_init__(self) -> None:
        ids = tuple(operator.index(token) for token in self.token_ids)
        object.__setattr__(self, "token_ids", ids)
        object.__setattr__(self, "logprobs", _frozen_array(self.logprobs, np.float32))
        if self.logprobs.shape != (len(ids),):
            raise ValueError(
                f"logprobs must have shape ({len(ids)},), one for each token id, got "
                f"{self.logprobs.shape}"
            )
        if self.top_logprobs is not None and len(self.top_logprobs.token_ids) != len(ids):
            raise ValueError(
                f"top_logprobs must have {len(ids)} rows, got {len(self.top_logprobs.token_ids)}"
            )
        if self.finish_reason is not None and self.finish_reason not in get_args(FinishReason):
            raise ValueError(
                f"finish_reason={self.finish_reason!r} must be 'stop', 'length', 'abort' or None"
            )

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def bits(self) -> bytes:
        """What the contract compares: token ids as int32 and log-probabilities as float32 bytes."""
        ids = np.asarray(self.token_ids, dtype="<i4")
        return ids.tobytes() + self.logprobs.astype("<f4").tobytes()


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestOutput:
    """One request's completions, in the order of their index.

    prompt_logprobs: float32[len(prompt_token_ids)] when asked for; entry 0 is NaN, since nothing
        precedes the first token.
    identity: what fixed the bits; equal identities and seeds give equal bits.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    prompt_logprobs: np.ndarray | None = None
    prompt_top_logprobs: TopLogprobs | None = None
    sampling_params: SamplingParams | None = None
    identity: str = ""
    weights_version: int = 0

    def __post_init__(self) -> None:
        ids = tuple(operator.index(token) for token in self.prompt_token_ids)
        object.__setattr__(self, "prompt_token_ids", ids)
        object.__setattr__(self, "outputs", tuple(self.outputs))
        if self.prompt_logprobs is not None:
            logprobs = _frozen_array(self.prompt_logprobs, np.float32)
            object.__setattr__(self, "prompt_logprobs", logprobs)
            if logprobs.shape != (len(ids),):
                raise ValueError(
                    f"prompt_logprobs must have shape ({len(ids)},), got {logprobs.shape}"
                )

    @property
    def finished(self) -> bool:
        return all(completion.finished for completion in self.outputs)


def _whole(
    name: str, value: Any, *, low: int, high: int | None = None, what: str | None = None
) -> int:
    expected = what or (f"{low} or more" if high is None else f"from {low} to {high}")
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r} must be a whole number, {expected}") from None
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name}={value!r} must be {expected}")
    return number


def _real(
    name: str, value: Any, *, low: float, high: float = math.inf, low_open: bool = False
) -> float:
    if high == math.inf:
        expected = f"a finite number, {low:g} or more"
    else:
        expected = f"{'above' if low_open else 'from'} {low:g} and at most {high:g}"
    try:
        if isinstance(value, (bool, str)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name}={value!r} must be a number, {expected}") from None
    too_low = number <= low if low_open else number < low
    if math.isnan(number) or math.isinf(number) or too_low or number > high:
        raise ValueError(f"{name}={value!r} must be {expected}")
    return number


def _token_ids(name: str, ids: Iterable[Any]) -> tuple[int, ...]:
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise ValueError(f"{name}={ids!r} must be a sequence of token ids")
    out = []
    for place, token in enumerate(ids):
        try:
            if isinstance(token, bool):
                raise TypeError
            out.append(operator.index(token))
        except TypeError:
            raise ValueError(f"{name}[{place}]={token!r} must be a token id") from None
        if out[-1] < 0:
            raise ValueError(f"{name}[{place}]={token!r} must be a token id, 0 or more")
    return tuple(out)


def _stop_strings(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Iterable):
        raise ValueError(f"stop={stop!r} must be a string or a sequence of strings")
    stops = tuple(stops)
    for text in stops:
        if not isinstance(text, str):
            raise ValueError(f"stop={stop!r} must hold strings only, got {text!r}")
        if not text:
            raise ValueError(f"stop={stop!r} must not hold an empty string")
    return stops


def _frozen_array(values: Any, dtype: Any) -> np.ndarray:
    """A private, read-only copy, so that a frozen value stays what it was."""
    array = np.array(values, dtype=dtype)
    array.flags.writeable = False
    return array
