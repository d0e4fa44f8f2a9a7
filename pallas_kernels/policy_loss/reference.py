"""The clipped policy-gradient loss in plain JAX, every operation at one fixed shape."""

import jax
import jax.numpy as jnp
from jax import lax

from ..fixed_rows import for_row_blocks

TOKENS = 64  # tokens a block of the element-wise part


def policy_terms_reference(
    logprobs: jax.Array,
    old: jax.Array,
    reference: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    normaliser: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """[B, T] each, advantages [B] -> loss of each row [B], slope, ratio and KL [B, T]."""

    def body(new: jax.Array, old: jax.Array, ref: jax.Array, a: jax.Array, size: jax.Array):
        ratio = lax.optimization_barrier(jnp.exp(lax.optimization_barrier(new - old)))
        plain = lax.optimization_barrier(ratio * a)
        cut = lax.optimization_barrier(jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * a)
        gap = lax.optimization_barrier(ref - new)
        far = lax.optimization_barrier(jnp.exp(gap))
        kl = lax.optimization_barrier((far - 1.0) - gap)
        penalty = lax.optimization_barrier(kl * kl_coef)
        pull = lax.optimization_barrier((far - 1.0) * kl_coef)
        loss = (penalty - jnp.minimum(plain, cut)) / size
        # Where the clipped branch is the smaller one, the ratio has no slope.
        slope = -(jnp.where(plain <= cut, plain, 0.0) + pull) / size
        return loss, slope, ratio, kl

    def spread(a: jax.Array) -> jax.Array:
        return jnp.broadcast_to(a, mask.shape).reshape(-1)

    # What is masked may hold anything.
    columns = [jnp.where(mask, a, 0.0).reshape(-1) for a in (logprobs, old, reference)]
    columns += [spread(advantages[:, None]), spread(normaliser[None, None])]
    count = jnp.int32(mask.size)
    terms = for_row_blocks(body, *columns, rows=TOKENS, num_rows=count)
    loss, slope, ratio, kl = (jnp.where(mask, a.reshape(mask.shape), 0.0) for a in terms)

    def add(t: jax.Array, total: jax.Array) -> jax.Array:
        here = lax.optimization_barrier(lax.dynamic_index_in_dim(loss, t, 1, keepdims=False))
        return jnp.where(mask[:, t], total + here, total)

    rows = lax.fori_loop(0, mask.shape[1], add, jnp.zeros(mask.shape[:1], jnp.float32))
    return rows, slope, jnp.where(mask, ratio, 1.0), kl


def push_reference(slope: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    """slope [B, T] times cotangent [B]."""
    slope, cotangent = lax.optimization_barrier((slope, cotangent))
    return (lax.optimization_barrier(slope * cotangent[:, None]),)
