"""Backward pass of QK-norm and the rotary embedding.

    d(head) = rotation by the opposite angle, then the norm's gradient; float32, rounded once
    d(scale) = sum of each token's heads ascending, then of the tokens in ascending blocks

All tokens of a call count as one sequence: whoever has several keeps them apart.
"""

import functools
from typing import Any

import jax
from jax import ShapeDtypeStruct

from ..differentiable import ON_GPU, backward_backend
from ..pages import clear, take
from ..primitive import BLOCKS, REFERENCE, define_op
from .reference_backward import rope_gradient_reference


def _avals(qkv: Any, cos: Any, sin: Any, q_scale: Any, k_scale: Any, *_: Any, **__: Any):
    return [ShapeDtypeStruct(a.shape, a.dtype) for a in (qkv, q_scale, k_scale)]


_bind = define_op(
    "rope_gradient",
    out_avals=_avals,
    implementations={
        REFERENCE: rope_gradient_reference,
        BLOCKS: functools.partial(rope_gradient_reference, **ON_GPU),
    },
)


def rope_backward(
    operands: Any, outputs: Any, cotangents: Any, *, backend: str, **params: Any
) -> tuple[jax.Array | None, ...]:
    """Backward pass of `rope`, for `differentiable`; the tables have no gradient."""
    del outputs
    *saved, num_rows = operands
    dqkv, dq_scale, dk_scale = _bind(
        *saved, *cotangents, num_rows, backend=backward_backend(backend), **params
    )
    return dqkv, None, None, dq_scale, dk_scale, None


def rope_into_pages_saves(operands: Any, outputs: Any) -> tuple[Any, Any]:
    """All operands but the pages, and no outputs."""
    del outputs
    return (*operands[:5], *operands[7:]), ()


def rope_into_pages_backward(
    operands: Any, outputs: Any, cotangents: Any, *, backend: str, **params: Any
) -> tuple[jax.Array | None, ...]:
    """Backward pass of `rope_into_pages`: what the store copied is copied back."""
    *rotated, page, slot, num_rows = operands
    dq, *dpages = cotangents
    taken = [take(d, page, slot) for d in dpages]
    kept = [clear(d, page, slot) for d in dpages]
    cotangents = dq, *taken
    gradients = rope_backward((*rotated, num_rows), outputs, cotangents, backend=backend, **params)
    return *gradients[:-1], *kept, None, None, None
