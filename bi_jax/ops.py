"""The one place that picks an implementation for every op, and says what it picked."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from bi_jax.models.config import TransformerConfig
from bi_jax.models.ops import TransformerOps
from bi_jax.pallas_kernels import attention as attention_op
from bi_jax.pallas_kernels import matmul as matmul_op
from bi_jax.pallas_kernels import rms_norm as rms_norm_op
from bi_jax.pallas_kernels import rope as rope_op
from bi_jax.pallas_kernels.primitive import REFERENCE

from .kv_cache import LayerPages


def pick_backend(platform: str) -> str:
    """The backend for a JAX platform name.

    Raises:
      NotImplementedError: no backend of ours keeps the contract there.
    """
    if platform in ("cpu", "gpu"):
        return REFERENCE
    raise NotImplementedError(
        f"bi_jax runs on the platforms cpu and gpu (NVIDIA Hopper), got '{platform}'"
    )


def transformer_ops(config: TransformerConfig, *, backend: str) -> TransformerOps:
    """The ops record of a model on one device.

    Args:
      config: chooses the topologies; nothing here sees a batch.
      backend: implementation by name, the same for every op.
    """
    matmul_topology = matmul_op.MatmulTopology()
    norm = rms_norm_op.topology_for(hidden_size=config.hidden_size)
    rope = rope_op.topology_for(head_dim=config.head_dim)
    attend = attention_op.topology_for(head_dim=config.head_dim)
    chosen = {"matmul": matmul_topology, "rms_norm": norm, "rope": rope, "attention": attend}
    return TransformerOps(
        matmul=_bind(matmul_op.matmul, backend, matmul_topology),
        swiglu_matmul=_bind(matmul_op.swiglu_matmul, backend, matmul_topology),
        rms_norm=_bind(rms_norm_op.rms_norm, backend, norm),
        add_rms_norm=_bind(rms_norm_op.add_rms_norm, backend, norm),
        rope=_bind(rope_op.rope, backend, rope),
        attend=functools.partial(_attend, backend=backend, topology=attend),
        reduce=_identity,
        description=tuple((name, f"{backend}: {topology}") for name, topology in chosen.items()),
    )


def _bind(op: Callable[..., Any], backend: str, topology: Any) -> Callable[..., Any]:
    return functools.partial(op, backend=backend, topology=topology)


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: LayerPages,
    batch: Any,
    *,
    scale: float,
    window: int | None,
    backend: str,
    topology: Any,
) -> tuple[jax.Array, LayerPages]:
    pages = LayerPages(*attention_op.write_pages(cache.k, cache.v, k, v, batch))
    out, _ = attention_op.attention(
        q, pages.k, pages.v, batch, scale=scale, window=window, backend=backend, topology=topology
    )
    return out, pages


def _identity(x: jax.Array) -> jax.Array:
    return x
