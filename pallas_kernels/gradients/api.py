"""Public arithmetic on gradients: checks, then one marked primitive each."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from .. import contracts
from ..primitive import REFERENCE, define_op
from .reference import (
    clip_factor_reference,
    merge_reference,
    nonnegative_zero_reference,
    scale_reference,
    sum_of_squares_reference,
    tree_sum_reference,
)


def _like_first(a: Any, *_: Any) -> list[Any]:
    return [jax.ShapeDtypeStruct(a.shape, a.dtype)]


def _scalar(*_: Any) -> list[Any]:
    return [jax.ShapeDtypeStruct((), jnp.dtype("float32"))]


_bind_merge = define_op(
    "merge_gradients", out_avals=_like_first, implementations={REFERENCE: merge_reference}
)
_bind_zero = define_op(
    "nonnegative_zero",
    out_avals=_like_first,
    implementations={REFERENCE: nonnegative_zero_reference},
)
_bind_tree = define_op(
    "tree_sum",
    out_avals=lambda a, *, out_dtype: [jax.ShapeDtypeStruct(a.shape[1:], jnp.dtype(out_dtype))],
    implementations={REFERENCE: tree_sum_reference},
)
_bind_scale = define_op(
    "scale_gradient", out_avals=_like_first, implementations={REFERENCE: scale_reference}
)
_bind_clip = define_op(
    "clip_factor",
    out_avals=lambda a, b: _scalar() * 2,
    implementations={REFERENCE: clip_factor_reference},
)
_bind_squares = define_op(
    "sum_of_squares", out_avals=_scalar, implementations={REFERENCE: sum_of_squares_reference}
)


def merge(a: Float[Array, "*S"], b: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """a + b, one rounding an element.

    Args:
      a, b: one shape and dtype, float32, bfloat16 or float16.

    Raises:
      ValueError: shapes or dtypes differ.

    Invariance: element by element.
    """
    contracts.check_float("merge", "a", a)
    contracts.check_same_dtype("merge", "a", a, "b", b)
    contracts.check_shape("merge", "b", b, a.shape)
    return _bind_merge(a, b, backend=REFERENCE)[0]


def nonnegative_zero(a: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """a with 0.0 for -0.0: among such leaves, one that is all zeros changes no sum's bits.

    Args:
      a: float32, bfloat16 or float16.

    Raises:
      ValueError: a is of another dtype.

    Invariance: element by element.
    """
    contracts.check_float("nonnegative_zero", "a", a)
    return _bind_zero(a, backend=REFERENCE)[0]


def tree_sum(leaves: Float[Array, "n ..."], *, out_dtype: str) -> Float[Array, "..."]:
    """Adds 2i and 2i + 1, then the pairs, and so on, each -0.0 taken as 0.0.

    Args:
      leaves: n of them, a power of two; float32, bfloat16 or float16.
      out_dtype: in which they are added; at least as wide as theirs.

    Raises:
      ValueError: another dtype, or n is no power of two.

    Invariance: element by element; the sum of the leaves by `nonnegative_zero` and `merge`.
    """
    contracts.check_float("tree_sum", "leaves", leaves)
    count = leaves.shape[0] if leaves.ndim else 0
    if count < 1 or count & (count - 1):
        raise ValueError(f"tree_sum: leaves must be a power of two in number, got {count}")
    return _bind_tree(leaves, backend=REFERENCE, out_dtype=out_dtype)[0]


def scale_by(a: Float[Array, "*S"], factor: Float32[Array, ""]) -> Float[Array, "*S"]:
    """a * factor in float32, rounded once to a's dtype.

    Args:
      a: float32, bfloat16 or float16.
      factor: float32 [].

    Raises:
      ValueError: dtypes do not fit.

    Invariance: element by element.
    """
    contracts.check_float("scale_by", "a", a)
    contracts.check_dtype("scale_by", "factor", factor, jnp.float32)
    return _bind_scale(a, factor, backend=REFERENCE)[0]


def sum_of_squares(a: Float[Array, "*S"]) -> Float32[Array, ""]:
    """The sum of the squares of all elements in float32.

    Elements in row-major order, zeros after them, are cut into strips of `reference.LANES`; each
    lane adds its column ascending, then the lanes are added by halves.

    Args:
      a: float32, bfloat16 or float16.

    Raises:
      ValueError: a is of another dtype.

    Invariance: of a alone, in every program.
    """
    contracts.check_float("sum_of_squares", "a", a)
    return _bind_squares(a, backend=REFERENCE)[0]


def clip_factor(
    squares: Float32[Array, ""], max_norm: Float32[Array, ""]
) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    """norm = sqrt(squares), and what to scale by so that it is at most max_norm: at most 1.

    Args:
      squares: float32 [], a sum of squares.
      max_norm: float32 [].

    Raises:
      ValueError: dtypes do not fit.

    Invariance: of the two numbers alone.
    """
    contracts.check_dtype("clip_factor", "squares", squares, jnp.float32)
    contracts.check_dtype("clip_factor", "max_norm", max_norm, jnp.float32)
    norm, factor = _bind_clip(squares, max_norm, backend=REFERENCE)
    return norm, factor


@jax.custom_vjp
def fork(a: Float[Array, "*S"]) -> tuple[Float[Array, "*S"], Float[Array, "*S"]]:
    """a twice: two uses of one array, whose gradients `merge` adds.

    Args:
      a: float32, bfloat16 or float16.

    Invariance: copies forwards; element by element backwards.
    """
    return a, a


fork.defvjp(lambda a: ((a, a), None), lambda _, both: (merge(*both),))
