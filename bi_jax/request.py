"""What a user asks for and what comes back: plain, frozen data. Host only, no jax.

Names and shapes follow vLLM where it has them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from bi_jax.sampling_params import (
    DEFAULT_MAX_TOKENS,
    LogprobsMode,
    SamplingParams,
    checked_token_ids,
)

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "CompletionOutput",
    "FinishReason",
    "LogprobsMode",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "TopLogprobs",
    "check_prompt_token_ids",
]

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, ready to be admitted: token ids and how to go on from them.

    prompt is the text that prompt_token_ids came from, None when the ids were given.

    Raises: ValueError for an empty prompt, an empty request_id, ids that are no ids, or other
      parameters than SamplingParams.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    prompt: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str) or not self.request_id:
            raise ValueError(f"request_id={self.request_id!r} must be a non-empty string")
        if not isinstance(self.sampling_params, SamplingParams):
            raise ValueError(
                f"sampling_params={self.sampling_params!r:.80} must be a SamplingParams"
            )
        if isinstance(self.prompt_token_ids, Set):
            raise ValueError("prompt_token_ids must be in order, got a set")
        ids = checked_token_ids("prompt_token_ids", self.prompt_token_ids)
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


class _WhenRead:
    """A text that may be given as a function, which is asked when the text is read; unset: empty.

    So nobody waits for the weights to be hashed but who wants to know the identity.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._slot = f"_{name}"

    def __get__(self, instance: Any, owner: type) -> str:
        if instance is None:
            return ""  # what a dataclass takes for the field's default
        value: Any = instance.__dict__[self._slot]
        if callable(value):
            value = instance.__dict__[self._slot] = value()
        return value

    def __set__(self, instance: Any, value: str | Callable[[], str]) -> None:
        instance.__dict__[self._slot] = value


class _Identified:
    def __getstate__(self) -> dict[str, Any]:
        """For `pickle` and `copy`: what is still to be asked is asked now."""
        self.identity  # type: ignore[attr-defined]  # noqa: B018
        return self.__dict__


@dataclass(frozen=True, kw_only=True, eq=False)
class CompletionOutput(_Identified):
    """One completion of a prompt.

    token_ids: every token drawn, the one that ended the completion included.
    logprobs: float32[len(token_ids)], of those tokens, in the request's logprobs_mode.
    stop_reason: the stop string or stop token id that ended it; None for end-of-sequence ids.
    finish_reason: None while the completion is still going on (streaming).
    seed: with index, prompt and identity all that is needed to draw it again.
    identity: what fixed the bits; whoever reads it first waits until the weights are hashed.
    """

    index: int
    token_ids: Sequence[int]
    text: str
    logprobs: np.ndarray
    top_logprobs: TopLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    seed: int | None = None
    identity: _WhenRead = _WhenRead()
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
class RequestOutput(_Identified):
    """One request's completions, in the order of their index.

    prompt_logprobs: float32[len(prompt_token_ids)] when asked for; entry 0 is NaN, since nothing
        precedes the first token.
    identity: what fixed the bits; equal identities and seeds give equal bits. Read as above.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    prompt_logprobs: np.ndarray | None = None
    prompt_top_logprobs: TopLogprobs | None = None
    sampling_params: SamplingParams | None = None
    identity: _WhenRead = _WhenRead()
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


def _frozen_array(values: Any, dtype: Any) -> np.ndarray:
    """A private, read-only copy, so that a frozen value stays what it was."""
    array = np.array(values, dtype=dtype)
    array.flags.writeable = False
    return array
