"""The lookup with its backward pass."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct

from ..primitive import REFERENCE, define_op
from .reference_backward import embedding_gradient_reference


def _avals(dy: Any, *_: Any, vocab_size: int, out_dtype: str) -> list[Any]:
    return [ShapeDtypeStruct((vocab_size, dy.shape[1]), jnp.dtype(out_dtype))]


_bind = define_op(
    "embedding_gradient",
    out_avals=_avals,
    implementations={REFERENCE: embedding_gradient_reference},
)


def _lookup(table: jax.Array, tokens: jax.Array, num_rows: jax.Array) -> jax.Array:
    del num_rows
    return table.at[tokens].get(mode="clip")


def _forward(table: jax.Array, tokens: jax.Array, num_rows: jax.Array) -> tuple[jax.Array, Any]:
    # An array without elements carries the table's height and dtype.
    return _lookup(table, tokens, num_rows), (table[:, :0], tokens, num_rows)


def _backward(saved: Any, dy: jax.Array) -> tuple[jax.Array, None, None]:
    like, tokens, num_rows = saved
    (dtable,) = _bind(
        dy,
        tokens,
        num_rows,
        backend=REFERENCE,
        vocab_size=like.shape[0],
        out_dtype=like.dtype.name,
    )
    return dtable, None, None


lookup: Callable[..., jax.Array] = jax.custom_vjp(_lookup)
lookup.defvjp(_forward, _backward)  # type: ignore[attr-defined]
