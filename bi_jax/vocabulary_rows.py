"""Token tables with rows of zeros up to a number that the kernels take, added once at load."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bi_jax.models.ops import TransformerOps
from bi_jax.pallas_kernels.matmul.kernel_hopper import N_MULTIPLE
from bi_jax.pallas_kernels.primitive import HOPPER

_TABLES = (("embed", "embedding"), ("lm_head", "weight"))


def rows_for(vocab_size: int, ops: TransformerOps) -> int:
    """Rows of a table of V tokens under these ops; V itself where any number will do."""
    on_hopper = dict(ops.description).get("matmul", "").startswith(f"{HOPPER}:")
    return -(-vocab_size // N_MULTIPLE) * N_MULTIPLE if on_hopper else vocab_size


def with_rows(state: nnx.State, rows: int) -> nnx.State:
    """The state of a model with token tables [rows, D]: cut, or padded with zeros.

    Invariance: the first V logits of a row are products of their own rows alone.
    """
    for module, name in _TABLES:
        if module not in state:
            continue
        table: Any = state[module][name]
        have = table[...].shape[0]
        if have > rows:
            state[module][name] = table.replace(table[...][:rows])
        elif have < rows:
            state[module][name] = table.replace(_padded(table[...], rows))
    return state


def _padded(table: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(table, ((0, rows - table.shape[0]), (0, 0)))
