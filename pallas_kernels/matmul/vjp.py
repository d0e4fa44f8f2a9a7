"""Backward passes of the matrix products.

    dx[m] = dy[m] w          the forward product with w transposed: row m alone decides it
    dw    = dy^T x           rows ascending: in blocks of fixed size (`row_sums`) on a CPU, in one
                             accumulator on Hopper
    dbias = sum of dy        rows in ascending blocks of fixed size

dy is rounded to x's dtype before it is multiplied, as its products run in that dtype; each result
is rounded once. The element-wise parts and the sums of rows run by the reference body on every
backend, at one fixed number of rows. All rows of a call count as one sequence: whoever has several
keeps them apart.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct

from ..differentiable import ON_GPU, Bind, backward_backend
from ..primitive import BLOCKS, HOPPER, REFERENCE, define_op
from ..rounding import round_to
from .reference_backward import (
    bias_gradient_reference,
    swiglu_gradient_reference,
    weight_gradient_reference,
)
from .topology import DEFAULT
from .weight_hopper import weight_gradient_hopper


def _weight_avals(dy: Any, x: Any, *_: Any, out_dtype: str) -> list[Any]:
    return [ShapeDtypeStruct((dy.shape[1], x.shape[1]), jnp.dtype(out_dtype))]


def _bias_avals(dy: Any, *_: Any, out_dtype: str) -> list[Any]:
    return [ShapeDtypeStruct((dy.shape[1],), jnp.dtype(out_dtype))]


def _swiglu_avals(gate_up: Any, *_: Any, out_dtype: str) -> list[Any]:
    return [ShapeDtypeStruct(gate_up.shape, jnp.dtype(out_dtype))]


_bind_weight = define_op(
    "matmul_weight_gradient",
    out_avals=_weight_avals,
    implementations={REFERENCE: weight_gradient_reference, HOPPER: weight_gradient_hopper},
)
_bind_bias = define_op(
    "matmul_bias_gradient",
    out_avals=_bias_avals,
    implementations={REFERENCE: bias_gradient_reference},
)
_bind_swiglu = define_op(
    "swiglu_gradient",
    out_avals=_swiglu_avals,
    implementations={
        REFERENCE: swiglu_gradient_reference,
        BLOCKS: functools.partial(swiglu_gradient_reference, **ON_GPU),
    },
)


def matmul_backward(bind_matmul: Bind) -> Any:
    """The backward pass of `bind_matmul`, for `differentiable`."""

    def backward(
        operands: Any, outputs: Any, cotangents: Any, *, backend: str, **_: Any
    ) -> tuple[jax.Array | None, ...]:
        del outputs
        x, w, bias, num_rows = operands
        (dy,) = cotangents
        dx, dw = _product_gradients(bind_matmul, x, w, dy, num_rows, backend)
        if bias.size == 0:
            return dx, dw, bias, None
        out_dtype = bias.dtype.name
        (dbias,) = _bind_bias(dy, num_rows, backend=REFERENCE, out_dtype=out_dtype)
        return dx, dw, dbias, None

    return backward


def swiglu_backward(bind_matmul: Bind) -> Any:
    """The backward pass of the SwiGLU product; both products are made again, not stored."""

    def backward(
        operands: Any, outputs: Any, cotangents: Any, *, backend: str, **_: Any
    ) -> tuple[jax.Array | None, ...]:
        del outputs
        x, gate_up, num_rows = operands
        (dy,) = cotangents
        w = gate_up.reshape(-1, gate_up.shape[2])
        (both,) = _product(bind_matmul, x, w, num_rows, backend, "float32")
        out_dtype = x.dtype.name
        (dboth,) = _bind_swiglu(
            both, dy, num_rows, backend=backward_backend(backend), out_dtype=out_dtype
        )
        dx, dw = _product_gradients(bind_matmul, x, w, dboth, num_rows, backend)
        return dx, dw.reshape(gate_up.shape), None

    return backward


def _product_gradients(
    bind_matmul: Bind,
    x: jax.Array,
    w: jax.Array,
    dy: jax.Array,
    num_rows: jax.Array,
    backend: str,
) -> tuple[jax.Array, jax.Array]:
    dy = round_to(dy, x.dtype)
    (dx,) = _product(bind_matmul, dy, w.T, num_rows, backend, x.dtype.name)
    (dw,) = _bind_weight(dy, x, num_rows, backend=backend, out_dtype=w.dtype.name)
    return dx, dw


def _product(
    bind_matmul: Bind,
    x: jax.Array,
    w: jax.Array,
    num_rows: jax.Array,
    backend: str,
    out_dtype: str,
) -> tuple[jax.Array, ...]:
    absent = jnp.zeros((0,), x.dtype)
    return bind_matmul(
        x, w, absent, num_rows, backend=backend, out_dtype=out_dtype, topology=DEFAULT
    )
