"""Backward pass of a sum: every term has the sum's cotangent, widened to float32."""

from typing import Any

import jax
import jax.numpy as jnp


def merge_backward(operands: Any, outputs: Any, cotangents: Any, **params: Any) -> tuple[jax.Array]:
    """For `differentiable`; moves and widens, computes nothing."""
    del outputs, params
    return (jnp.broadcast_to(cotangents[0].astype(jnp.float32), operands[0].shape),)
