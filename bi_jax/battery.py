"""The battery of a certificate: one set of requests, computed in many ways, bits compared."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .engine import Engine
from .request import RequestOutput, SamplingParams
from .testing import bit_difference
from .testing.schedule import Way, first_difference, run_together, ways

SEED = 31_337
PASSED, FAILED, INCONCLUSIVE = "same bits", "DIFFERENT BITS", "inconclusive"

Request = tuple[list[int], SamplingParams]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One way in which the battery was computed again.

    Attributes:
      name: in few words.
      promise: which row of the contract it tries: repeat, batch, schedule or scoring.
      verdict: PASSED, FAILED or INCONCLUSIVE.
      detail: the first difference, or why nothing can be said.
      digest: of all bits that were computed.
      values: token ids and log-probabilities compared.
      programs: compiled row counts (buckets) that ran.
      seconds: it took.
    """

    name: str
    promise: str
    verdict: str
    detail: str
    digest: str
    values: int
    programs: tuple[int, ...]
    seconds: float


def battery_requests(engine: Engine, *, tokens: int, filters: bool) -> list[Request]:
    """Prompts of lengths around pages and blocks, greedy and sampled, one with two samples.

    Args:
      engine: gives vocabulary, page size and context.
      tokens: new tokens of each completion.
      filters: whether some use top-p, which takes further step programs to compile.
    """
    page, room = engine.config.page_size, engine.max_model_len - tokens - 1
    lengths = [n for n in (1, 5, page - 1, page + 1, 2 * page + 2, 17) if 0 < n <= room]
    if not lengths:
        raise ValueError(
            f"a context of {engine.max_model_len} tokens has no room for {tokens} new ones"
        )
    rng = np.random.default_rng(SEED)
    vocab = engine.model_config.vocab_size
    requests = []
    for i, length in enumerate(lengths):
        params = SamplingParams(
            temperature=(0.0, 1.0, 0.7)[i % 3],
            top_p=(1.0, 1.0, 0.9)[i % 3] if filters else 1.0,
            n=2 if i == 1 else 1,
            seed=SEED + i,
            max_tokens=tokens,
            ignore_eos=True,
        )
        requests.append((rng.integers(0, vocab, length).tolist(), params))
    return requests


def battery_ways(engine: Engine, requests: Sequence[Request]) -> Iterator[tuple[str, Way]]:
    """Every way that is tried, after the promise that it tries."""
    promises = {"once more": "repeat"}
    for way in ways(engine, requests):
        yield promises.get(way.name, "batch"), way
    config = engine.scheduler.config
    longest = max(len(prompt) + params.max_tokens for prompt, params in requests)
    odd = min(7, config.max_num_batched_tokens)
    few = -(-longest // config.page_size) + 1
    schedules: list[tuple[str, dict[str, Any]]] = [
        (f"prompts in chunks of {odd} tokens", {"max_num_batched_tokens": odd}),
        ("without the prefix cache", {"prefix_caching": False}),
        ("two at a time", {"max_num_seqs": min(2, config.max_num_seqs)}),
        (f"with {few} cache pages, so that requests are interrupted", {"num_pages": few}),
        (
            "in the largest compiled step only",
            {"token_buckets": engine.runner.config.token_buckets[-1:]},
        ),
    ]
    for name, changes in schedules:
        if changes.get("num_pages", 0) <= config.num_pages:
            yield "schedule", Way(name=name, run=_on(engine, requests, changes))


def _on(
    engine: Engine, requests: Sequence[Request], changes: dict[str, Any]
) -> Callable[[], list[RequestOutput]]:
    def run() -> list[RequestOutput]:
        twin = engine.rescheduled(**changes)
        try:
            return run_together(twin, requests)
        finally:
            engine.runner.buckets_used |= twin.runner.buckets_used

    return run


def check_way(engine: Engine, expected: list[RequestOutput], promise: str, way: Way) -> Check:
    """Runs one way and compares it with the first run."""
    started = time.perf_counter()
    engine.runner.buckets_used = set()
    got = way.run()
    difference = first_difference(expected, got, shorter=way.shorter)
    return Check(
        name=way.name,
        promise=promise,
        verdict=PASSED if difference is None else FAILED,
        detail=difference or "",
        digest=digest_of(got),
        values=sum(2 * len(c.token_ids) for out in got for c in out.outputs),
        programs=tuple(sorted(engine.runner.buckets_used)),
        seconds=time.perf_counter() - started,
    )


def check_scoring(
    engine: Engine, requests: Sequence[Request], expected: list[RequestOutput]
) -> Check:
    """Scores each completion as part of a prompt; the log-probabilities must be the sampler's."""
    started = time.perf_counter()
    engine.runner.buckets_used = set()
    score = SamplingParams(temperature=0.0, max_tokens=1, seed=0, prompt_logprobs=0)
    pairs = [
        (list(prompt), completion)
        for (prompt, _), output in zip(requests, expected, strict=True)
        for completion in output.outputs
    ]
    prompts = [[*prompt, *completion.token_ids] for prompt, completion in pairs]
    outputs = run_together(engine, [(prompt, score) for prompt in prompts])
    detail, values = "", 0
    for (prompt, completion), output in zip(pairs, outputs, strict=True):
        scored = output.prompt_logprobs[len(prompt) :]
        values += len(scored)
        difference = bit_difference(scored, completion.logprobs)
        if difference is not None and not detail:
            detail = f"prompt of {len(prompt)} tokens, completion {completion.index}: {difference}"
    return Check(
        name="scored as part of a prompt",
        promise="scoring",
        verdict=FAILED if detail else PASSED,
        detail=detail,
        digest=_hash(b"".join(out.prompt_logprobs[1:].tobytes() for out in outputs)),
        values=values,
        programs=tuple(sorted(engine.runner.buckets_used)),
        seconds=time.perf_counter() - started,
    )


def digest_of(outputs: Sequence[RequestOutput]) -> str:
    """SHA-256 over the token ids and log-probability bits of all completions, in order."""
    return _hash(b"".join(c.bits() for output in outputs for c in output.outputs))


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
