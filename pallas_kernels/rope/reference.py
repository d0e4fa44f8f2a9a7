"""QK-norm and rotary embedding on a CPU, every operation at one fixed number of rows."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..fixed_rows import for_row_blocks
from ..lanes import normalize
from ..pages import put
from .topology import RopeTopology

ROWS = 4  # tokens a block


def rotate(heads: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Half-split rotation of float32 [..., Dh] by cos, sin [..., Dh / 2] (arXiv:2104.09864)."""
    low, high = jnp.split(heads, 2, axis=-1)
    # Each product is kept apart so that no compiler contracts one of the two into an FMA.
    a, b, c, d = lax.optimization_barrier((low * cos, high * sin, high * cos, low * sin))
    return jnp.concatenate([a - b, c + d], axis=-1)


def rope_reference(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    q_scale: jax.Array,
    k_scale: jax.Array,
    num_rows: jax.Array,
    *,
    eps: float,
    qk_norm: bool,
    topology: RopeTopology,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """qkv [T, Nkv, G + 2, Dh], cos and sin [T, Dh / 2] -> q [T, Nkv, G, Dh], k, v [T, Nkv, Dh]."""
    lanes = topology.norm_lanes

    def body(
        rows: jax.Array, cosine: jax.Array, sine: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        heads = rows.astype(jnp.float32)
        q, k = heads[:, :, :-2], heads[:, :, -2:-1]
        if qk_norm:
            q = _rounded(normalize(q, q_scale, eps, lanes), qkv.dtype)
            k = _rounded(normalize(k, k_scale, eps, lanes), qkv.dtype)
        cosine, sine = cosine[:, None, None], sine[:, None, None]
        q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
        return q.astype(qkv.dtype), k[:, :, 0].astype(qkv.dtype), rows[:, :, -1]

    q, k, v = for_row_blocks(body, qkv, cos, sin, rows=ROWS, num_rows=num_rows)
    return q, k, v


def rope_into_pages_reference(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    q_scale: jax.Array,
    k_scale: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page: jax.Array,
    slot: jax.Array,
    num_rows: jax.Array,
    **params: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`rope_reference`, then k and v [T, Nkv, Dh] at their (page, slot) of [P, Nkv, Tp, Dh]."""
    q, k, v = rope_reference(qkv, cos, sin, q_scale, k_scale, num_rows, **params)
    return q, put(k_pages, k, page, slot), put(v_pages, v, page, slot)


def _rounded(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The rounding point between QK-norm and rotation: to the compute dtype and back."""
    return lax.optimization_barrier(values.astype(dtype)).astype(jnp.float32)
