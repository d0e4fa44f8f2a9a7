"""Sampled tokens follow the softmax they claim, through the engine, on a full vocabulary."""

import numpy as np
import pytest

from bi_jax import SamplingParams
from tests.bi_jax import tiny

PROMPT = [17]
DRAWS_A_REQUEST, SEEDS = 2500, 8  # 20,000 draws


def probabilities(temperature: float) -> np.ndarray:
    """float64 [V] of the token after the prompt: each one is scored as a prompt's second token."""
    engine = tiny.rescheduled(token_buckets=(64,))
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    outputs = engine.generate([[*PROMPT, token] for token in range(tiny.VOCAB)], params)
    scores = [output.prompt_logprobs for output in outputs]
    logprobs = np.array([score[1] for score in scores if score is not None], np.float64)
    assert logprobs.shape == (tiny.VOCAB,)
    assert abs(np.exp(logprobs).sum() - 1) < 1e-5
    weights = np.exp(logprobs / temperature)
    return weights / weights.sum()


def chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; cells of fewer than 5 expected are merged."""
    order = np.argsort(expected)
    rare = np.cumsum(expected[order]) < 5
    first = int(rare.sum()) + 1
    cells = [order[:first], *([i] for i in order[first:])]
    observed = np.array([counts[c].sum() for c in cells])
    wanted = np.array([expected[c].sum() for c in cells])
    return float(((observed - wanted) ** 2 / wanted).sum()), len(cells) - 1


def limit(degrees: int, sigmas: float = 4.0) -> float:
    """Wilson and Hilferty's upper quantile; about 3e-5 of true samples lie above it."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + sigmas * part**0.5) ** 3


@pytest.mark.parametrize("temperature", [pytest.param(0.5, marks=pytest.mark.slow), 1.0])
def test_draws_follow_the_softmax(temperature: float):
    engine = tiny.rescheduled(token_buckets=(64,))
    params = [
        SamplingParams(temperature=temperature, n=DRAWS_A_REQUEST, seed=seed, max_tokens=1)
        for seed in range(SEEDS)
    ]
    outputs = engine.generate([PROMPT] * SEEDS, params)
    tokens = [completion.token_ids[0] for output in outputs for completion in output.outputs]
    assert len(tokens) == 20_000
    counts = np.bincount(tokens, minlength=tiny.VOCAB).astype(float)
    statistic, degrees = chi_square(counts, len(tokens) * probabilities(temperature))
    assert degrees > 60
    assert statistic < limit(degrees)
    # Controls: another temperature, and nearly uniform noise, are told apart by the same draws.
    for wrong in (1.1 * temperature, 100.0):
        statistic, degrees = chi_square(counts, len(tokens) * probabilities(wrong))
        assert statistic > limit(degrees)


def test_positions_and_samples_are_independent():
    """Pairs of tokens of neighbouring samples, and of neighbouring seeds: no correlation."""
    engine = tiny.rescheduled(token_buckets=(64,))
    params = [SamplingParams(n=1000, seed=seed, max_tokens=1) for seed in (1, 2)]
    outputs = engine.generate([PROMPT] * 2, params)
    p = probabilities(1.0)
    rank = np.cumsum(p) - p / 2
    mean, variance = float((p * rank).sum()), float((p * rank**2).sum() - (p * rank).sum() ** 2)
    a, b = (rank[[c.token_ids[0] for c in output.outputs]] - mean for output in outputs)
    for left, right in ((a, b), (a[:-1], a[1:]), (b[:-1], b[1:])):
        correlation = float((left * right).mean()) / variance
        assert abs(correlation) < 4 / len(left) ** 0.5
    assert float((a * a).mean()) / variance > 0.8  # the control: with itself it is 1
