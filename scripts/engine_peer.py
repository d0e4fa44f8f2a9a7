"""The peer of the engine's step: the same model as a user would write it for stock XLA and cuDNN.

One jitted step with its layers unrolled, dense caches, dot_general on the weights as they lie,
cuDNN attention, norms and rotation left to XLA, the largest logit as the next token. It has no
compiler options of ours, keeps no promise about bits, and computes no log-probability.

On a mesh every rank has its heads, its columns of the MLP and its rows of the vocabulary, under
shard_map; the out and down products are summed over ranks by psum, of float32 or of the compute
dtype, and of the logits only each rank's largest is gathered.
"""

from typing import Any

import jax
import jax.numpy as jnp
from engine_cases import Case
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bi_jax.models import TransformerConfig
from bi_jax.row_products import TENSOR_AXIS

Cache = tuple[jax.Array, jax.Array]
HEADS = P(None, None, TENSOR_AXIS)  # of caches


def make_caches(
    config: TransformerConfig, case: Case, *, mesh: Mesh | None = None, heads: int | None = None
) -> list[Cache]:
    """Random keys and values [B, S, Nkv, Dh] a layer; `heads` of all ranks, where they are cut."""
    shape = (case.requests, case.context, heads or config.num_kv_heads, config.head_dim)
    place = None if mesh is None else NamedSharding(mesh, HEADS)
    fill = jax.jit(lambda key: jax.random.normal(key, shape, config.dtype), out_shardings=place)
    keys = iter(jax.random.split(jax.random.key(2), 2 * config.num_layers))
    return [(fill(next(keys)), fill(next(keys))) for _ in range(config.num_layers)]


def make_step(
    config: TransformerConfig,
    case: Case,
    *,
    attention: str,
    params: Any = None,
    mesh: Mesh | None = None,
    sum_dtype: str | None = None,
) -> Any:
    """jit((params, caches, tokens [T]) -> (caches, next tokens [B])); the caches are donated.

    Args:
      config, case: what is computed.
      attention: implementation of `jax.nn.dot_product_attention`.
      params: on a mesh, the parameters, which say how they are cut.
      mesh: None: one device.
      sum_dtype: of the partial sums that cross ranks.
    """

    def summed(x: jax.Array, weight: jax.Array) -> jax.Array:
        if mesh is None:
            return _dot(x, weight)
        return lax.psum(_dot(x, weight, sum_dtype), TENSOR_AXIS).astype(x.dtype)

    def step(params: Any, caches: list[Cache], tokens: jax.Array) -> tuple[list[Cache], jax.Array]:
        position = jnp.arange(case.context - case.new, case.context)
        angles = position[:, None] * _frequencies(config)[None]
        rotation = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
        stream = _embedded(params["embed"], tokens, cut=mesh is not None)
        stream = stream.reshape(case.requests, case.new, -1)
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
            stream += summed(mixed.reshape(*stream.shape[:2], -1), layer["out"])
            x = _norm(stream, layer["mlp_norm"], config)
            gate, up = jnp.split(_dot(x, layer["gate_up"]), 2, axis=-1)
            stream += summed(jax.nn.silu(gate) * up, layer["down"])
        last = _norm(stream[:, -1], params["final_norm"], config)
        logits = _dot(last, params["head"], jnp.float32)
        if mesh is None:
            return new_caches, jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return new_caches, _largest(logits)

    if mesh is not None:
        cut = jax.tree.map(lambda a: a.sharding.spec, params)
        specs = (cut, HEADS, P())
        step = jax.shard_map(
            step, mesh=mesh, in_specs=specs, out_specs=(HEADS, P()), check_vma=False
        )
    return jax.jit(step, donate_argnums=1)


def _embedded(table: jax.Array, tokens: jax.Array, *, cut: bool) -> jax.Array:
    """Rows of tokens from a table of which this rank has its part, or all."""
    if not cut:
        return table[tokens]
    here = tokens - lax.axis_index(TENSOR_AXIS) * table.shape[0]
    mine = (here >= 0) & (here < table.shape[0])
    rows = jnp.where(mine[:, None], table[jnp.where(mine, here, 0)], 0)
    return lax.psum(rows, TENSOR_AXIS)


def _largest(logits: jax.Array) -> jax.Array:
    """The token of the largest of all ranks' logits."""
    index = jnp.argmax(logits, axis=-1)
    value = jnp.take_along_axis(logits, index[:, None], axis=-1)[:, 0]
    tokens = index + lax.axis_index(TENSOR_AXIS) * logits.shape[-1]
    both = jnp.stack([lax.bitcast_convert_type(value, jnp.int32), tokens.astype(jnp.int32)])
    both = lax.all_gather(both, TENSOR_AXIS)
    best = jnp.argmax(lax.bitcast_convert_type(both[:, 0], jnp.float32), axis=0)
    return jnp.take_along_axis(both[:, 1], best[None], axis=0)[0]


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
    q = q.reshape(*x.shape[:2], -1, config.head_dim)
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
