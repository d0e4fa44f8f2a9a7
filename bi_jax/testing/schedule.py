"""Checks that a completion's bits do not depend on how an engine came to compute it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bi_jax.identity import warn_if_different

from .bits import bit_difference
from .invariance import Inconclusive

# What a request is: a prompt, as text or token ids, and its SamplingParams.
Request = tuple[Any, Any]
Outputs = list[Any]

STRANGER_SEED = 7_919


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to run the requests.

    Attributes:
      name: for the report.
      run: gives the outputs in the order of the requests.
      shorter: whether fewer samples or tokens are asked for, so that prefixes must agree.
    """

    name: str
    run: Callable[[], Outputs]
    shorter: bool = False


def assert_schedule_invariant(
    engine: Any,
    requests: Sequence[Request],
    *,
    others: Sequence[Any] = (),
    strangers: Sequence[Request] | None = None,
    min_tokens: int = 2,
) -> None:
    """Raises unless each completion has the same bits in every schedule that is tried.

    The requests run together; then each alone, in reversed order, among strangers, twice (the
    second time on what the first left in the cache), with fewer samples, and with a smaller
    max_tokens, whose completions must be prefixes; then on other engines.

    Args:
      engine: has `generate(prompts, sampling_params)`.
      requests: (prompt, SamplingParams) each; a request without a seed is given its index.
      others: engines of the same model with other settings: chunks, pages, buckets, cache size.
      strangers: requests to run beside; None: random prompts of a few lengths.
      min_tokens: fewer tokens than this in all make the check inconclusive.

    Raises:
      AssertionError: bits changed; names the way, the request, the place and both values.
      Inconclusive: nothing changed, but too little was generated to tell.
    """
    requests = seeded(requests)
    for other in others:
        _warn_of_another_identity(engine, other)
    expected = run_together(engine, requests)
    for way in ways(engine, requests, others=others, strangers=strangers):
        difference = first_difference(expected, way.run(), shorter=way.shorter)
        if difference is not None:
            raise AssertionError(
                f"not schedule-invariant: {way.name}, compared with all together: {difference}"
            )
    check_power(expected, min_tokens)


def assert_same_completions(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    """Raises unless two lists of outputs have the same bits; warns where identities differ.

    Args:
      actual, expected: what `generate` returned for the same requests, here or elsewhere.

    Raises:
      AssertionError: names the request, the place and both values.
    """
    if len(actual) != len(expected):
        raise AssertionError(f"expected {len(expected)} outputs, got {len(actual)}")
    for mine, other in zip(actual, expected, strict=True):
        if warn_if_different(mine.identity, other.identity):
            break
    difference = first_difference(expected, actual)
    if difference is not None:
        raise AssertionError(f"completions differ: {difference}")


def _warn_of_another_identity(engine: Any, other: Any) -> None:
    mine, theirs = (getattr(e, "identity", None) for e in (engine, other))
    if mine is not None and theirs is not None:
        warn_if_different(mine, theirs, what="engines")


def seeded(requests: Sequence[Request]) -> list[Request]:
    """The requests, each with a seed."""
    return [(prompt, params.with_seed(i)) for i, (prompt, params) in enumerate(requests)]


def run_together(engine: Any, requests: Sequence[Request]) -> Outputs:
    """All requests in one call."""
    prompts, params = zip(*requests, strict=True)
    return engine.generate(list(prompts), list(params))


def ways(
    engine: Any,
    requests: Sequence[Request],
    *,
    others: Sequence[Any] = (),
    strangers: Sequence[Request] | None = None,
) -> Iterator[Way]:
    """Every way in which the requests are run again."""
    requests = list(requests)
    company = list(strangers) if strangers is not None else random_strangers(engine, requests)

    def alone() -> Outputs:
        return [run_together(engine, [request])[0] for request in requests]

    def backwards() -> Outputs:
        return run_together(engine, requests[::-1])[::-1]

    def among_strangers() -> Outputs:
        half = len(company) // 2
        out = run_together(engine, [*company[:half], *requests, *company[half:]])
        return out[half : half + len(requests)]

    yield Way(name="each alone", run=alone)
    yield Way(name="in reversed order", run=backwards)
    yield Way(name="among strangers", run=among_strangers)
    yield Way(name="once more", run=lambda: run_together(engine, requests))
    if any(params.n > 1 for _, params in requests):
        fewer = [(prompt, replace(params, n=1)) for prompt, params in requests]
        yield Way(
            name="with one sample each", run=lambda: run_together(engine, fewer), shorter=True
        )
    shorter = [
        (prompt, replace(params, max_tokens=max(1, params.max_tokens // 2), min_tokens=0))
        for prompt, params in requests
    ]
    yield Way(
        name="with half of max_tokens", run=lambda: run_together(engine, shorter), shorter=True
    )
    for index, other in enumerate(others):
        name = f"on another engine ({getattr(other, 'config', index)})"
        yield Way(name=name, run=lambda other=other: run_together(other, requests))


def random_strangers(engine: Any, requests: Sequence[Request]) -> list[Request]:
    """Requests of random token ids, of a few lengths, half of them sampled."""
    rng = np.random.default_rng(STRANGER_SEED)
    vocab = engine.model_config.vocab_size
    params = requests[0][1]
    longest = max(1, min(96, engine.max_model_len - params.max_tokens - 1))
    found = []
    for i, length in enumerate((longest, 1, longest // 2 + 1, 3)):
        ids = rng.integers(0, vocab, min(length, longest)).tolist()
        theirs = type(params)(
            temperature=float(i % 2), seed=i, max_tokens=params.max_tokens, ignore_eos=True
        )
        found.append((ids, theirs))
    return found


def first_difference(
    expected: Sequence[Any], got: Sequence[Any], *, shorter: bool = False
) -> str | None:
    """The first difference in bits between outputs, or None.

    Args:
      expected, got: outputs of the same requests.
      shorter: whether `got` was asked for fewer samples or tokens: then what is there must agree.
    """
    for index, (a, b) in enumerate(zip(expected, got, strict=True)):
        for first, second in zip(a.outputs, b.outputs, strict=not shorter):
            found = _completion_difference(first, second, shorter)
            if found is not None:
                return f"request {index}, completion {first.index}, {found}"
        if a.prompt_logprobs is not None and b.prompt_logprobs is not None:
            difference = bit_difference(b.prompt_logprobs, a.prompt_logprobs)
            if difference is not None:
                return f"request {index}, prompt_logprobs: {difference}"
    return None


def _completion_difference(a: Any, b: Any, shorter: bool) -> str | None:
    count = min(len(a.token_ids), len(b.token_ids))
    ids = bit_difference(
        np.asarray(b.token_ids[:count], np.int32), np.asarray(a.token_ids[:count], np.int32)
    )
    if ids is not None:
        return f"token ids: {ids}"
    logprobs = bit_difference(b.logprobs[:count], a.logprobs[:count])
    if logprobs is not None:
        return f"log-probabilities: {logprobs}"
    cut = shorter and b.finish_reason == "length" and len(b.token_ids) < len(a.token_ids)
    if len(a.token_ids) != len(b.token_ids) and not cut:
        return f"lengths: {len(a.token_ids)} and {len(b.token_ids)} tokens"
    return None


def check_power(outputs: Sequence[Any], min_tokens: int) -> None:
    """Raises Inconclusive where a difference could hardly have shown."""
    completions = [completion for output in outputs for completion in output.outputs]
    tokens = sum(len(completion.token_ids) for completion in completions)
    if tokens < min_tokens:
        raise Inconclusive(f"only {tokens} tokens were generated; {min_tokens} are needed")
    values = np.concatenate([np.asarray(c.logprobs, np.float32) for c in completions])
    finite = values[np.isfinite(values)]
    if len(np.unique(finite)) < 2:
        raise Inconclusive("all log-probabilities are one value, so no difference could show")
    if len(outputs) < 2:
        raise Inconclusive("one request alone meets no neighbour: pass two or more")
