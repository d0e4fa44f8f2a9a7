"""How the completions of a request are drawn: plain, frozen, checked data. Host only, no jax."""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

LogprobsMode = Literal["raw", "scaled", "processed"]

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
        self._set(stop_token_ids=checked_token_ids("stop_token_ids", self.stop_token_ids))
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


def inverse_temperature(temperature: float) -> float:
    """1 / temperature as a normal float32: an extreme one must be neither 0 nor infinite."""
    limits = np.finfo(np.float32)
    return float(np.float32(min(max(1.0 / temperature, float(limits.tiny)), float(limits.max))))


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


def checked_token_ids(name: str, ids: Iterable[Any]) -> tuple[int, ...]:
    if isinstance(ids, (str, bytes, Mapping)) or not isinstance(ids, Iterable):
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
    if not isinstance(stops, Iterable) or isinstance(stops, Mapping):
        raise ValueError(f"stop={stop!r} must be a string or a sequence of strings")
    stops = tuple(stops)
    for text in stops:
        if not isinstance(text, str):
            raise ValueError(f"stop={stop!r} must hold strings only, got {text!r}")
        if not text:
            raise ValueError(f"stop={stop!r} must not hold an empty string")
    return stops
