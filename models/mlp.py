"""The feed-forward sublayer."""

from typing import Any

import jax
from flax import nnx

from .config import TransformerConfig
from .layers import Linear
from .ops import TransformerOps


class Mlp(nnx.Module):
    """silu(x gate^T) * (x up^T), then down."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        kinds: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        width, depth = config.intermediate_size, config.hidden_size
        self.gate_up = Linear((2, width, depth), rngs=rngs, **kinds)
        self.down = Linear((depth, width), rngs=rngs, **kinds)

    def __call__(self, x: jax.Array, num_rows: jax.Array, ops: TransformerOps) -> jax.Array:
        """x [T, D] -> [T, D] before the residual add."""
        hidden = ops.swiglu_matmul(x, self.gate_up.cast_weight(), num_rows=num_rows)
        return ops.down_product(hidden, self.down.cast_weight(), num_rows=num_rows)
