"""The attention sublayer."""

from typing import Any

import jax
from flax import nnx

from .config import TransformerConfig
from .layers import Linear, NormScale
from .ops import LayerCache, TransformerOps


class Attention(nnx.Module):
    """Fused qkv product, QK-norm and rotation, attention over the cache, out projection."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        kinds: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        heads = (config.num_kv_heads, config.queries_per_kv + 2, config.head_dim)
        self.qkv = Linear(
            (*heads, config.hidden_size),
            bias_shape=heads if config.qkv_bias else None,
            rngs=rngs,
            **kinds,
        )
        self.q_norm = NormScale(config.head_dim, **kinds) if config.qk_norm else None
        self.k_norm = NormScale(config.head_dim, **kinds) if config.qk_norm else None
        self.out = Linear((config.hidden_size, config.query_size), rngs=rngs, **kinds)

    def __call__(
        self,
        x: jax.Array,
        rope_rows: tuple[jax.Array, jax.Array],
        cache: LayerCache,
        batch: Any,
        ops: TransformerOps,
    ) -> tuple[jax.Array, LayerCache]:
        """x [T, D] -> ([T, D] before the residual add, the layer's cache)."""
        config = self.config
        weight = self.qkv.cast_weight()
        kv_heads, group, width, depth = weight.shape
        flat = ops.matmul(
            x,
            weight.reshape(kv_heads * group * width, depth),
            self.qkv.cast_bias(),
            num_rows=batch.num_tokens,
        )
        q, cache = ops.rope(
            flat.reshape(x.shape[0], kv_heads, group, width),
            *rope_rows,
            cache,
            batch,
            q_scale=None if self.q_norm is None else self.q_norm.cast_scale(),
            k_scale=None if self.k_norm is None else self.k_norm.cast_scale(),
            eps=config.rms_norm_eps,
        )
        mixed = ops.attend(
            q, cache, batch, scale=config.attention_scale, window=config.sliding_window
        )
        projected = ops.out_product(mixed, self.out.cast_weight(), num_rows=batch.num_tokens)
        return projected, cache
