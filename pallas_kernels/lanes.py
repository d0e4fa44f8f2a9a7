"""The one place where the sum over a row's lanes is written for the references."""

import jax
import jax.numpy as jnp


def sum_over_lanes(values: jax.Array, lanes: int) -> jax.Array:
    """Sums float32 [..., D] over D in the order that `RmsNormTopology` states -> [...]."""
    width = values.shape[-1]
    padded = -(-width // lanes) * lanes
    pad = [(0, 0)] * (values.ndim - 1) + [(0, padded - width)]
    strips = jnp.pad(values, pad).reshape(*values.shape[:-1], padded // lanes, lanes)
    total = strips[..., 0, :]
    for i in range(1, strips.shape[-2]):
        total = total + strips[..., i, :]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


def normalize(values: jax.Array, scale: jax.Array, eps: float, lanes: int) -> jax.Array:
    """values / sqrt(mean(values^2) + eps) * scale over the last axis of float32 values."""
    # The barrier keeps the squares out of the adds, where they could become FMAs.
    squares = jax.lax.optimization_barrier(values * values)
    mean = sum_over_lanes(squares, lanes) * (1.0 / values.shape[-1])
    scale = scale.astype(jnp.float32).reshape((1,) * (values.ndim - 1) + (-1,))
    return values * jax.lax.rsqrt(mean + eps)[..., None] * scale
