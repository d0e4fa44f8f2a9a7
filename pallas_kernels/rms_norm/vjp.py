"""Backward passes of the RMS norms.

    dx = r (s dy) - x (r^3 / D) sum(s dy x) + dstream     in float32, rounded once
    ds = sum over the rows of dy x r                      ascending blocks of fixed size

All rows of a call count as one sequence: whoever has several keeps them apart.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct

from ..differentiable import ON_GPU, backward_backend
from ..primitive import BLOCKS, REFERENCE, define_op
from .reference_backward import rms_norm_gradient_reference
from .topology import RmsNormTopology


def _avals(x: Any, scale: Any, *_: Any, **__: Any) -> list[Any]:
    return [ShapeDtypeStruct(x.shape, x.dtype), ShapeDtypeStruct(scale.shape, scale.dtype)]


_bind = define_op(
    "rms_norm_gradient",
    out_avals=_avals,
    implementations={
        REFERENCE: rms_norm_gradient_reference,
        BLOCKS: functools.partial(rms_norm_gradient_reference, **ON_GPU),
    },
)


def rms_norm_backward(
    operands: Any,
    outputs: Any,
    cotangents: Any,
    *,
    backend: str,
    eps: float,
    topology: RmsNormTopology,
) -> tuple[jax.Array | None, ...]:
    """Backward pass of `rms_norm`, for `differentiable`."""
    del outputs
    x, scale, num_rows = operands
    none = jnp.zeros((x.shape[0], 0), x.dtype)
    dx, dscale = _bind(
        x,
        scale,
        cotangents[0],
        none,
        num_rows,
        backend=backward_backend(backend),
        eps=eps,
        topology=topology,
    )
    return dx, dscale, None


def add_rms_norm_backward(
    operands: Any,
    outputs: Any,
    cotangents: Any,
    *,
    backend: str,
    eps: float,
    topology: RmsNormTopology,
) -> tuple[jax.Array | None, ...]:
    """Backward pass of `add_rms_norm`; both summands have one gradient."""
    _, _, scale, num_rows = operands
    dx, dscale = _bind(
        outputs[1],
        scale,
        *cotangents,
        num_rows,
        backend=backward_backend(backend),
        eps=eps,
        topology=topology,
    )
    return dx, dx, dscale, None
