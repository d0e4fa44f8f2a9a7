"""Tables for the rotary position embedding, made on the host.

    angle[p, i] = p * frequency[i],    frequency[i] = theta^(-2i / Dh)   (then scaled)

A cosine folded by the compiler, one computed in jit and one computed by NumPy differ from one
another in thousands of entries. So the tables are made once, here, in float64, rounded once to
float32, and travel with the model as data.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float32, Float64

from .config import FrequencyFactors, LinearScaling, Llama3Scaling, RopeConfig, TransformerConfig


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Float64[np.ndarray, " half_Dh"]:
    """Angle per position of each pair (i, i + Dh / 2).

    Args:
      rope: base and scaling.
      head_dim: Dh, even.

    Returns:
      float64 [Dh / 2], descending.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequencies = np.float64(rope.theta) ** -exponents
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor=factor):
            return frequencies / factor
        case FrequencyFactors(factors=factors):
            return frequencies / np.asarray(factors, dtype=np.float64)
        case Llama3Scaling() as scaling:
            return _llama3(frequencies, scaling)


def _llama3(frequencies: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """How often a frequency turns within the original context decides how much of it is scaled."""
    turns = frequencies * scaling.original_max_position / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


def rope_tables(
    config: TransformerConfig, length: int
) -> tuple[Float32[np.ndarray, "L half_Dh"], Float32[np.ndarray, "L half_Dh"]]:
    """Cosine and sine of the angles of positions 0 to `length` - 1.

    Args:
      config: gives `rope` and `head_dim`.
      length: L, number of positions.

    Returns:
      cos, sin: float32 [L, Dh / 2] each, computed in float64 and rounded once.

    Raises:
      ValueError: `length` is not positive.

    Invariance: a position's entries do not depend on `length`.
    """
    if length < 1:
        raise ValueError(f"length={length} must be a positive number of positions.")
    frequencies = rope_frequencies(config.rope, config.head_dim)
    angles = np.arange(length, dtype=np.float64)[:, None] * frequencies[None, :]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
