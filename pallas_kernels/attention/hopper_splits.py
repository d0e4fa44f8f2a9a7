"""Merging ranges of keys on Hopper, for the topologies that split them.

    m = max over s of lse[s]          w[s] = exp2((lse[s] - m) * log2(e))
    o = (sum over s of w[s] o[s]) / (sum over s of w[s])        lse = m + log(sum over s of w[s])

s is every range of `kv_split` keys in which the query sees some, ascending; products are rounded
before they are added, and ranges that it does not see add exact zeros. Both follow the query's
position, the window and kv_split alone. Grid: (token, query head).
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .hopper_math import LN_2, LOG2_E, LOWEST

LINE = 128  # columns of a warpgroup's line; shorter heads leave the rest unused
# Between a product and the sum that it goes into stands a minimum or maximum that changes nothing,
# which no compiler knows, so that none contracts the two into one multiply-add. (A barrier is an
# empty inline assembly by the time ptxas looks for such pairs.)
HIGHEST = float(jnp.finfo(jnp.float32).max)  # no term reaches it: weights are at most 1
LAYOUT = plgpu.Layout.WG_STRIDED((LINE,), vec_size=1)


def _body(*refs, kv_split: int, window: int | None):
    parts_gmem, lses_gmem, positions_gmem, count_gmem, o_gmem, lse_gmem = refs
    token, head = lax.axis_index("token"), lax.axis_index("head")
    splits = parts_gmem.shape[0]

    @pl.when(token < count_gmem[0])
    def _merge():
        position = positions_gmem[token]
        oldest = 0 if window is None else jnp.maximum(position - (window - 1), 0)
        # All loads before the first addition, so that they are in flight together.
        parts = [
            plgpu.load(parts_gmem.at[s, token, head], layout=LAYOUT, optimized=False)
            for s in range(splits)
        ]
        lses = [
            jnp.where(
                (s * kv_split <= position) & ((s + 1) * kv_split > oldest),
                lses_gmem[s, token, head],
                LOWEST,
            )
            for s in range(splits)
        ]
        top = functools.reduce(jnp.maximum, lses)
        zeros = plgpu.layout_cast(jnp.zeros((LINE,), jnp.float32), LAYOUT)
        total, length = zeros, jnp.float32(0.0)
        for part, lse in zip(parts, lses, strict=True):
            weight = jnp.exp2((lse - top) * LOG2_E)
            weight = jnp.where(lse > LOWEST, weight, 0.0)
            # What nobody wrote may be NaN.
            term = jnp.where(zeros + lse > LOWEST, part, zeros) * weight
            total = total + jnp.minimum(term, HIGHEST)
            length = length + weight
        o_gmem[token, head] = (total / length).astype(o_gmem.dtype)
        lse_gmem[token, head] = top + jnp.maximum(jnp.log2(length) * LN_2, 0.0)


@functools.partial(
    jax.jit, static_argnames=("kv_split", "window", "head_dim", "out_dtype", "interpret")
)
def merge_splits(
    parts: jax.Array,
    lses: jax.Array,
    positions: jax.Array,
    num_tokens: jax.Array,
    *,
    kv_split: int,
    window: int | None,
    head_dim: int,
    out_dtype,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:
    """parts float32 [S, T or more, Nkv, G, LINE], lses likewise without LINE -> (o, lse).

    Args:
      positions: int32 [T]; num_tokens: int32 [].
      kv_split: keys of a range.
      window: keys a query sees, or None.
      head_dim: columns in use.
      out_dtype: of o.
      interpret: run in the GPU interpret mode.

    Returns:
      o [T, Nkv, G, head_dim] of out_dtype and lse float32 [T, Nkv, G].

    Invariance: token t's results depend on its position and its rows of parts and lses only.
    """
    splits, rows, kv_heads, group, line = parts.shape
    tokens, heads = positions.shape[0], kv_heads * group
    o, lse = plgpu.kernel(
        functools.partial(_body, kv_split=kv_split, window=window),
        out_type=(
            jax.ShapeDtypeStruct((tokens, heads, line), out_dtype),
            jax.ShapeDtypeStruct((tokens, heads), jnp.float32),
        ),
        grid=(tokens, heads),
        grid_names=("token", "head"),
        kernel_name="merge_splits",
        interpret=interpret,
    )(
        parts.reshape(splits, rows, heads, line),
        lses.reshape(splits, rows, heads),
        positions,
        num_tokens.reshape(1),
    )
    o = o[..., :head_dim].reshape(tokens, kv_heads, group, head_dim)
    return o, lse.reshape(tokens, kv_heads, group)
