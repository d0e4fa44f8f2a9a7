"""The backward pass of `lanes.normalize`."""

import jax
import jax.numpy as jnp
from jax import lax

from .lanes import sum_over_lanes


def normalize_gradient(
    values: jax.Array, scale: jax.Array, eps: float, lanes: int, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """y = v r s with r = 1 / sqrt(mean(v^2) + eps), all float32, over the last axis.

    dv = r (s dy) - v (r^3 / D) sum(s dy v); the row's share of ds is dy v r.

    Returns:
      dv and the share of ds, both in the shape of values.
    """
    squares = lax.optimization_barrier(values * values)
    width = values.shape[-1]
    mean = sum_over_lanes(squares, lanes) * (1.0 / width)
    r = lax.optimization_barrier(lax.rsqrt(mean + eps))[..., None]
    scale = scale.astype(jnp.float32).reshape((1,) * (values.ndim - 1) + (-1,))
    scaled = lax.optimization_barrier(scale * dy)
    inner = sum_over_lanes(lax.optimization_barrier(scaled * values), lanes)[..., None]
    pull = lax.optimization_barrier(inner * (1.0 / width) * (r * r * r))
    # Both products are kept apart so that neither is contracted into the subtraction.
    first, second = lax.optimization_barrier((r * scaled, values * pull))
    return first - second, dy * lax.optimization_barrier(values * r)
