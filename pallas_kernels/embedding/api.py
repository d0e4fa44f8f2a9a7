"""Public lookup of token rows: a copy forwards, a sum in a stated order backwards."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from .. import contracts
from .vjp import lookup


def embedding(
    table: Float[Array, "V D"],
    tokens: Int32[Array, " T"],
    *,
    num_rows: Int32[Array, ""] | None = None,
) -> Float[Array, "T D"]:
    """table[tokens]; it adds nothing.

    Args:
      table: [V, D] float32, bfloat16 or float16.
      tokens: int32 [T]; ids of padding may be anything.
      num_rows: int32 [], tokens that hold data; the others get no gradient. None: all.

    Returns:
      [T, D] of the table's dtype.

    Raises:
      ValueError: shapes or dtypes do not fit.

    Invariance: row t is a copy of table[tokens[t]]. The gradient of a row of the table adds its
    tokens' cotangents in ascending order of t, in float32, and is rounded once.
    """
    contracts.check_float("embedding", "table", table)
    contracts.check_shape("embedding", "table", table, (None, None))
    contracts.check_dtype("embedding", "tokens", tokens, jnp.int32)
    contracts.check_shape("embedding", "tokens", tokens, (None,))
    return lookup(table, tokens, contracts.row_count(tokens, num_rows))
