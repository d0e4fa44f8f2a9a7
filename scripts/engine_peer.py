"""The peer of the engine's step: the same model as a user would write it for stock XLA and cuDNN.

One jitted step with its layers unrolled, dense caches, dot_general on the weights as they lie,
cuDNN attention, norms and rotation left to XLA, the largest logit as the next token. It has no
compiler options of ours, keeps no promise about bits, and computes no log-probability.
"""

from typing import Any

import jax
import jax.numpy as jnp
from engine_cases import Case
from jax import lax

from bi_jax.models import TransformerConfig

Cache = tuple[jax.Array, jax.Array]


def make_caches(config: TransformerConfig, case: Case) -> list[Cache]:
    """Random keys and values [B, S, Nkv, Dh] a layer."""
    shape = (case.requests, case.context, config.num_kv_heads, config.head_dim)
    fill = jax.jit(lambda key: jax.random.normal(key, shape, config.dtype))
    keys = iter(jax.random.split(jax.random.key(2), 2 * config.num_layers))
    return [(fill(next(keys)), fill(next(keys))) for _ in range(config.num_layers)]


def make_step(config: TransformerConfig, case: Case, *, attention: str) -> Any:
    """jit((params, caches, tokens [T]) -> (caches, next tokens [B])); the caches are donated."""

    def step(params: Any, caches: list[Cache], tokens: jax.Array) -> tuple[list[Cache], jax.Array]:
        position = jnp.arange(case.context - case.new, case.context)
        angles = position[:, None] * _frequencies(config)[None]
        rotation = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
        stream = params["embed"][tokens].reshape(case.requests, case.new, -1)
        new_caches = []
        for layer, cache in zip(params["layers"], caches, strict=True):
            x = _norm(stream, layer["attn_norm"], config)
            q, k, v = _qkv(x, layer, rotation, config)
            start = (0, case.context - case.new, 0, 0)
            cache = tuple(
                lax.dynamic_update_slice(c, n, start) for c, n in zip(cache, (k, v), strict=True)
            )
            new_caches.append(cache)
            keys, values = (k, v) if case.new == case.context else cache
            mixed = jax.nn.dot_product_attention(
                q, keys, values, is_causal=case.new > 1, implementation=attention
            )
            stream += _dot(mixed.reshape(*stream.shape[:2], -1), layer["out"])
            x = _norm(stream, layer["mlp_norm"], config)
            gate, up = jnp.split(_dot(x, layer["gate_up"]), 2, axis=-1)
            stream += _dot(jax.nn.silu(gate) * up, layer["down"])
        last = _norm(stream[:, -1], params["final_norm"], config)
        logits = _dot(last, params["head"], jnp.float32)
        return new_caches, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return jax.jit(step, donate_argnums=1)


def peer_params(model: Any) -> Any:
    """The engine's own arrays, by the names used here; nothing is copied."""

    def flat(weight: Any) -> jax.Array:
        array = weight.cast_weight()
        return array.reshape(-1, array.shape[-1])

    layers = [
        {
            "attn_norm": block.attn_norm.cast_scale(),
            "qkv": block.attention.qkv.cast_weight(),
            "q_norm": block.attention.q_norm.cast_scale(),
            "k_norm": block.attention.k_norm.cast_scale(),
            "out": block.attention.out.cast_weight(),
            "mlp_norm": block.mlp_norm.cast_scale(),
            "gate_up": block.mlp.gate_up.cast_weight(),
            "down": block.mlp.down.cast_weight(),
        }
        for block in model.layers
    ]
    head = model.embed if model.lm_head is None else model.lm_head
    return {
        "embed": model.embed.cast_weight(),
        "layers": layers,
        "final_norm": model.final_norm.cast_scale(),
        "head": flat(head),
    }


def _dot(x: jax.Array, w: jax.Array, out: Any = None) -> jax.Array:
    w = w.reshape(-1, w.shape[-1])
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, w, dims, preferred_element_type=out or x.dtype)


def _norm(x: jax.Array, scale: jax.Array, config: TransformerConfig) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean + config.rms_norm_eps) * scale.astype(jnp.float32)).astype(
        x.dtype
    )


def _qkv(x: jax.Array, layer: Any, rotation: Any, config: TransformerConfig) -> Any:
    qkv = _dot(x, layer["qkv"]).reshape(*x.shape[:2], *layer["qkv"].shape[:3])
    q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
    q = q.reshape(*x.shape[:2], config.num_query_heads, config.head_dim)
    q, k = _norm(q, layer["q_norm"], config), _norm(k, layer["k_norm"], config)
    return _rotate(q, rotation), _rotate(k, rotation), v


def _rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    cos, sin = rotation
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(
        x.dtype
    )


def _frequencies(config: TransformerConfig) -> jax.Array:
    exponent = jnp.arange(config.head_dim // 2, dtype=jnp.float32) / (config.head_dim // 2)
    return config.rope.theta**-exponent
