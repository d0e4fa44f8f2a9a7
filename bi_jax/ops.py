"""The one place that picks an implementation for every op, and says what it picked."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from bi_jax.models.config import TransformerConfig
from bi_jax.models.ops import TransformerOps
from bi_jax.pallas_kernels.attention import attention, write_pages
from bi_jax.pallas_kernels.attention import topology_for as attention_topology
from bi_jax.pallas_kernels.log_softmax import topology_for as log_softmax_topology
from bi_jax.pallas_kernels.matmul import MatmulTopology, matmul, swiglu_matmul
from bi_jax.pallas_kernels.primitive import REFERENCE
from bi_jax.pallas_kernels.rms_norm import add_rms_norm, rms_norm
from bi_jax.pallas_kernels.rms_norm import topology_for as norm_topology
from bi_jax.pallas_kernels.rope import rope
from bi_jax.pallas_kernels.rope import topology_for as rope_topology
from bi_jax.pallas_kernels.sampling import topology_for as sampling_topology

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
    products = MatmulTopology()
    norms = norm_topology(hidden_size=config.hidden_size)
    rotation = rope_topology(head_dim=config.head_dim)
    mixing = attention_topology(head_dim=config.head_dim)
    chosen = {
        "matmul": products,
        "rms_norm": norms,
        "rope": rotation,
        "attention": mixing,
        "log_softmax": log_softmax_topology(vocab_size=config.vocab_size),
        "sampling": sampling_topology(vocab_size=config.vocab_size),
    }
    return TransformerOps(
        matmul=_bind(matmul, backend, products),
        swiglu_matmul=_bind(swiglu_matmul, backend, products),
        rms_norm=_bind(rms_norm, backend, norms),
        add_rms_norm=_bind(add_rms_norm, backend, norms),
        rope=_bind(rope, backend, rotation),
        attend=functools.partial(_attend, backend=backend, topology=mixing),
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
    pages = LayerPages(*write_pages(cache.k, cache.v, k, v, batch))
    out, _ = attention(
        q, pages.k, pages.v, batch, scale=scale, window=window, backend=backend, topology=topology
    )
    return out, pages


def _identity(x: jax.Array) -> jax.Array:
    return x
