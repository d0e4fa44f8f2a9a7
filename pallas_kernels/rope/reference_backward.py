"""Gradients of QK-norm and rotary embedding, at one fixed number of rows."""

import jax
import jax.numpy as jnp

from ..fixed_rows import for_row_blocks
from ..lanes_backward import normalize_gradient
from ..row_sums import sum_rows
from .reference import rotate
from .topology import RopeTopology

ROWS = 4  # tokens a block on a CPU

Arrays = tuple[jax.Array, ...]


def rope_gradient_reference(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    q_scale: jax.Array,
    k_scale: jax.Array,
    dq: jax.Array,
    dk: jax.Array,
    dv: jax.Array,
    num_rows: jax.Array,
    *,
    eps: float,
    qk_norm: bool,
    topology: RopeTopology,
    rows: int = ROWS,
    counted: bool = True,
) -> Arrays:
    """dq [T, Nkv, G, Dh], dk and dv [T, Nkv, Dh] -> dqkv, dq_scale, dk_scale.

    The rotation is undone by the opposite angle; the norm's gradient takes it unrounded.
    """

    def norm(heads: jax.Array, scale: jax.Array, dy: jax.Array) -> Arrays:
        if not qk_norm:
            return dy, jnp.zeros((*dy.shape[:1], 0), jnp.float32)
        dx, share = normalize_gradient(heads, scale, eps, topology.norm_lanes, dy)
        flat = share.reshape(share.shape[0], -1, share.shape[-1])
        total = flat[:, 0]
        for head in range(1, flat.shape[1]):
            total = total + flat[:, head]
        return dx, total

    def body(
        qkv_rows: jax.Array,
        cosine: jax.Array,
        sine: jax.Array,
        dq_rows: jax.Array,
        dk_rows: jax.Array,
        dv_rows: jax.Array,
    ) -> Arrays:
        heads = qkv_rows.astype(jnp.float32)
        cosine, sine = cosine[:, None, None], sine[:, None, None]
        back_q = rotate(dq_rows.astype(jnp.float32), cosine, -sine)
        back_k = rotate(dk_rows.astype(jnp.float32)[:, :, None], cosine, -sine)
        back_q, back_k = jax.lax.optimization_barrier((back_q, back_k))
        back_q, q_share = norm(heads[:, :, :-2], q_scale, back_q)
        back_k, k_share = norm(heads[:, :, -2:-1], k_scale, back_k)
        dqk = jnp.concatenate([back_q, back_k], axis=2).astype(qkv.dtype)
        return jnp.concatenate([dqk, dv_rows[:, :, None]], axis=2), q_share, k_share

    arrays = (qkv, cos, sin, dq, dk, dv)
    dqkv, q_shares, k_shares = for_row_blocks(
        body, *arrays, rows=rows, num_rows=num_rows, counted=counted
    )
    if not qk_norm:
        return dqkv, q_scale, k_scale
    return (
        dqkv,
        sum_rows(q_shares, num_rows, counted=counted).astype(q_scale.dtype),
        sum_rows(k_shares, num_rows, counted=counted).astype(k_scale.dtype),
    )
