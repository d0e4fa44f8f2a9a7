"""RoPE tables: against transformers' frequencies, and entry by entry in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bi_jax.models.config import FrequencyFactors, LinearScaling, Llama3Scaling, RopeConfig
from bi_jax.models.families.llama import LLAMA_3_1_8B, SMOLLM2_135M
from bi_jax.models.rope import rope_frequencies, rope_tables

EXPECTED = Path(__file__).parents[1] / "fixtures" / "rope_frequencies.npz"
TINY = Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=48
)
CASES = {
    "default": (64, RopeConfig(theta=500000.0)),
    "linear": (64, RopeConfig(theta=10000.0, scaling=LinearScaling(factor=4.0))),
    "llama3_tiny": (64, RopeConfig(theta=10000.0, scaling=TINY)),
    "llama3_1": (128, LLAMA_3_1_8B.rope),
}


@pytest.mark.parametrize("name", CASES)
def test_frequencies_match_transformers(name: str) -> None:
    head_dim, rope = CASES[name]
    with np.load(EXPECTED) as expected:
        # transformers computes in float32: a few units in the last place.
        np.testing.assert_allclose(
            rope_frequencies(rope, head_dim), expected[name], rtol=1e-6, atol=0
        )


@pytest.mark.parametrize("name", ["linear", "llama3_tiny", "llama3_1"])
def test_scaling_changes_the_frequencies(name: str) -> None:
    head_dim, rope = CASES[name]
    unscaled = rope_frequencies(RopeConfig(theta=rope.theta), head_dim)
    scaled = rope_frequencies(rope, head_dim)
    assert np.all(scaled <= unscaled * (1 + 1e-12))
    assert scaled[-1] < unscaled[-1] / 2


def test_factors_divide() -> None:
    plain = RopeConfig(theta=10000.0)
    factors = tuple(1.0 + i for i in range(32))
    divided = rope_frequencies(
        RopeConfig(theta=10000.0, scaling=FrequencyFactors(factors=factors)), 64
    )
    np.testing.assert_array_equal(divided, rope_frequencies(plain, 64) / np.array(factors))


def test_tables_are_float64_rounded_once() -> None:
    cos, sin = rope_tables(SMOLLM2_135M, 300)
    assert cos.shape == sin.shape == (300, 32)
    assert cos.dtype == sin.dtype == np.float32
    frequencies = rope_frequencies(SMOLLM2_135M.rope, 64)
    for position in (0, 1, 7, 299):
        angle = position * frequencies
        np.testing.assert_array_equal(cos[position], np.cos(angle).astype(np.float32))
        np.testing.assert_array_equal(sin[position], np.sin(angle).astype(np.float32))


def test_float32_angles_would_differ() -> None:
    """The control: the shortcut that others take does not give these tables."""
    cos, _ = rope_tables(SMOLLM2_135M, 300)
    frequencies = rope_frequencies(SMOLLM2_135M.rope, 64).astype(np.float32)
    angles = np.arange(300, dtype=np.float32)[:, None] * frequencies
    assert (np.cos(angles) != cos).sum() > 1000


@pytest.mark.parametrize("length", [1, 2, 3, 17, 255])
def test_entries_do_not_depend_on_the_length(length: int) -> None:
    short_tables, long_tables = (rope_tables(SMOLLM2_135M, size) for size in (length, 256))
    for short, long in zip(short_tables, long_tables, strict=True):
        assert short.tobytes() == long[:length].tobytes()


def test_refuses_an_empty_table() -> None:
    with pytest.raises(ValueError, match="length=0 must be a positive number"):
        rope_tables(SMOLLM2_135M, 0)
