"""What callers of `Engine.generate` may pass: one of a kind or many. Host only."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence

from .request import SamplingParams

Prompt = str | Sequence[int]


def as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """One for each of `count` prompts; None: the defaults. `Request` looks at what they are.

    Raises:
      ValueError: they are not as many.
    """
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    given: list[SamplingParams] = list(params) if isinstance(params, Sequence) else [params]
    if len(given) != count:
        raise ValueError(
            f"expected one SamplingParams for each of {count} prompts, got {len(given)}"
        )
    return given


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts one by one; token ids alone are one prompt.

    Raises:
      ValueError: it is neither a text, nor token ids, nor a sequence of them.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping) or not isinstance(prompts, Sequence):
        raise ValueError(
            f"prompts must be a text, token ids or a sequence of them, got {type(prompts).__name__}"
        )
    if prompts and all(isinstance(p, numbers.Integral) for p in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
