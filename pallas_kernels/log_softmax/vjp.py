"""Backward pass of the log-probability of one target a row; row r alone decides dlogits[r]."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct

from ..differentiable import ON_GPU, backward_backend
from ..primitive import BLOCKS, REFERENCE, define_op
from .reference_backward import target_logprobs_gradient_reference


def _avals(logits: Any, *_: Any, **__: Any) -> list[Any]:
    return [ShapeDtypeStruct(logits.shape, jnp.dtype("float32"))]


_bind = define_op(
    "target_logprobs_gradient",
    out_avals=_avals,
    implementations={
        REFERENCE: target_logprobs_gradient_reference,
        BLOCKS: functools.partial(target_logprobs_gradient_reference, **ON_GPU),
    },
)


def target_logprobs_backward(
    operands: Any, outputs: Any, cotangents: Any, *, backend: str, **_: Any
) -> tuple[jax.Array | None, ...]:
    """Backward pass of `target_logprobs`, for `differentiable`.

    Raises:
      NotImplementedError: there are several targets a row.
    """
    logits, target, inv_temperature, cut_key, cut_id, num_rows = operands
    if target.shape[1] != 1:
        raise NotImplementedError(
            f"target_logprobs: gradients are of one target a row, got {target.shape[1]}"
        )
    (dlogits,) = _bind(
        logits,
        target,
        inv_temperature,
        cut_key,
        cut_id,
        outputs[1],
        *cotangents,
        num_rows,
        backend=backward_backend(backend),
    )
    return dlogits, None, None, None, None, None
