"""The decoder in NumPy and float64, as the papers write it: an independent check of our layouts.

It takes parameters as `load_params` gives them and shares no code with the model.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bi_jax.models.config import TransformerConfig
from bi_jax.models.rope import rope_frequencies

Params = Mapping[str, np.ndarray]


def decoder_logits(config: TransformerConfig, params: Params, tokens: np.ndarray) -> np.ndarray:
    """float64 logits [T, V] of one sequence int32 [T]."""
    params = {path: np.asarray(value, dtype=np.float64) for path, value in params.items()}
    x = params["embed.embedding"][tokens]
    for layer in range(config.num_layers):
        own = f"layers.{layer}."
        local = {path[len(own) :]: v for path, v in params.items() if path.startswith(own)}
        x = x + _attention(config, local, _norm(config, x, local["attn_norm.scale"]))
        x = x + _mlp(local, _norm(config, x, local["mlp_norm.scale"]))
    head = params.get("lm_head.weight", params["embed.embedding"])
    return _norm(config, x, params["final_norm.scale"]) @ head.T


def _norm(config: TransformerConfig, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * scale


def _mlp(local: Params, x: np.ndarray) -> np.ndarray:
    gate, up = (x @ weight.T for weight in local["mlp.gate_up.weight"])
    return (gate / (1 + np.exp(-gate)) * up) @ local["mlp.down.weight"].T


def _rotate(config: TransformerConfig, x: np.ndarray) -> np.ndarray:
    """x: [T, heads, Dh]."""
    frequencies = rope_frequencies(config.rope, config.head_dim)
    angles = np.arange(len(x))[:, None, None] * frequencies
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attention(config: TransformerConfig, local: Params, x: np.ndarray) -> np.ndarray:
    length, groups = len(x), config.queries_per_kv
    qkv = np.einsum("td,ngkd->tngk", x, local["attention.qkv.weight"])
    if config.qkv_bias:
        qkv = qkv + local["attention.qkv.bias"]
    q, k, v = qkv[:, :, :groups], qkv[:, :, groups], qkv[:, :, groups + 1]
    q = q.reshape(length, config.num_query_heads, config.head_dim)
    if config.qk_norm:
        q = _norm(config, q, local["attention.q_norm.scale"])
        k = _norm(config, k, local["attention.k_norm.scale"])
    q, k = _rotate(config, q), _rotate(config, k)
    k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
    scores = np.einsum("thk,shk->hts", q, k) / np.sqrt(config.head_dim)
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    hidden = distance < 0
    if config.sliding_window is not None:
        hidden |= distance >= config.sliding_window
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("hts,shk->thk", weights, v).reshape(length, config.query_size)
    return out @ local["attention.out.weight"].T
