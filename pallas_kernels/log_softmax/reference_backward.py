"""The gradient of log-probabilities, every operation at one fixed shape."""

import jax
import jax.numpy as jnp
from jax import lax

from ..fixed_rows import for_row_blocks
from ..float_order import is_kept, order_key

ROWS = 1  # rows a block on a CPU


def target_logprobs_gradient_reference(
    logits: jax.Array,
    target: jax.Array,
    inv_temperature: jax.Array,
    cut_key: jax.Array,
    cut_id: jax.Array,
    log_sum_exp: jax.Array,
    dlogprob: jax.Array,
    dlog_sum_exp: jax.Array,
    num_rows: jax.Array,
    *,
    rows: int = ROWS,
    counted: bool = True,
) -> tuple[jax.Array]:
    """logits [R, V], target and dlogprob [R, 1] -> dlogits float32 [R, V].

    dlogits[v] = ([v = t] dlogprob - p[v] (dlogprob - dlog_sum_exp)) inv_temperature, with
    p[v] = exp(x[v] inv_temperature - log_sum_exp) of the kept tokens, 0 of the others.
    """
    ids = lax.iota(jnp.int32, logits.shape[1])[None]

    def body(*block: jax.Array) -> tuple[jax.Array]:
        x, token, inverse, key, last, lse, dl, dlse = (
            a if a.ndim == 2 else a[:, None] for a in block
        )
        kept = is_kept(order_key(x), ids, key, last)
        exponent = lax.optimization_barrier(x * inverse) - lse
        p = jnp.where(kept, jnp.exp(exponent), 0.0)
        hit = (ids == token) & kept
        # A token that is not kept has log-probability -inf, whatever the logits.
        dl = jnp.where(jnp.any(hit, axis=1, keepdims=True), dl, 0.0)
        pushed = lax.optimization_barrier(p * (dl - dlse))
        return ((jnp.where(hit, dl, 0.0) - pushed) * inverse,)

    arrays = (logits, target, inv_temperature, cut_key, cut_id, log_sum_exp)
    arrays = (*arrays, dlogprob, dlog_sum_exp)
    (dlogits,) = for_row_blocks(body, *arrays, rows=rows, num_rows=num_rows, counted=counted)
    return (dlogits,)
