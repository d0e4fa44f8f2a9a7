"""Parameter holders: linear, norm and embedding layers."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .cast import to_compute_dtype
from .config import TransformerConfig
from .ops import TransformerOps
from .rope import rope_tables


class Linear(nnx.Module):
    """A weight [..., in] in a checkpoint's (out, in) layout and an optional bias [...]."""

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        dtype: str,
        param_dtype: str,
        rngs: nnx.Rngs,
        bias_shape: tuple[int, ...] | None = None,
    ) -> None:
        self.dtype = dtype
        init = nnx.initializers.normal(shape[-1] ** -0.5)
        self.weight = nnx.Param(init(rngs.params(), shape, jnp.dtype(param_dtype)))
        if bias_shape is None:
            self.bias = None
        else:
            self.bias = nnx.Param(jnp.zeros(bias_shape, jnp.dtype(param_dtype)))

    def cast_weight(self) -> jax.Array:
        """The weight in the compute dtype."""
        return to_compute_dtype(self.weight[...], self.dtype)

    def cast_bias(self) -> jax.Array | None:
        """The flat bias in the compute dtype, or None."""
        if self.bias is None:
            return None
        return to_compute_dtype(self.bias[...], self.dtype).reshape(-1)


class NormScale(nnx.Module):
    """The scale of an RMS norm."""

    def __init__(self, size: int, *, dtype: str, param_dtype: str) -> None:
        self.dtype = dtype
        self.scale = nnx.Param(jnp.ones((size,), jnp.dtype(param_dtype)))

    def cast_scale(self) -> jax.Array:
        """The scale in the compute dtype."""
        return to_compute_dtype(self.scale[...], self.dtype)


class Embedding(nnx.Module):
    """The token table [V, D]; looking up copies rows, it adds nothing."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.dtype = config.dtype
        shape = (config.vocab_size, config.hidden_size)
        init = nnx.initializers.normal(config.hidden_size**-0.5)
        self.embedding = nnx.Param(init(rngs.params(), shape, jnp.dtype(config.param_dtype)))

    def __call__(self, tokens: jax.Array, num_rows: jax.Array, ops: TransformerOps) -> jax.Array:
        """int32 [T] -> [T, D] in the compute dtype; ids of padding may be anything."""
        rows = ops.embed(self.embedding[...], tokens, num_rows=num_rows)
        return to_compute_dtype(rows, self.dtype)

    def cast_weight(self) -> jax.Array:
        """The table in the compute dtype, as an output projection."""
        return to_compute_dtype(self.embedding[...], self.dtype)


class RopeTable(nnx.Variable):
    """Host-made rotary tables; not parameters, so no optimiser and no cast touches them."""


class Rope(nnx.Module):
    """Cosine and sine tables float32 [max_position, Dh / 2]."""

    def __init__(self, config: TransformerConfig) -> None:
        cos, sin = rope_tables(config, config.max_position)
        self.cos = RopeTable(jnp.asarray(cos))
        self.sin = RopeTable(jnp.asarray(sin))

    def rows(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """float32 [T, Dh / 2] of each position.

        Raises:
          ValueError: the tables are no longer float32.
        """
        for name in ("cos", "sin"):
            table: Any = getattr(self, name)[...]
            if table.dtype != jnp.float32:
                raise ValueError(
                    f"rope.{name} must stay float32, got {table.dtype}: cast parameters "
                    "(nnx.Param) only, not the whole state"
                )
        cos = self.cos[...].at[positions].get(mode="clip")
        sin = self.sin[...].at[positions].get(mode="clip")
        return cos, sin
