"""The one place that picks an implementation for every op, and says what it picked."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import jax

from bi_jax.models.config import TP_INVARIANT, TransformerConfig
from bi_jax.models.ops import TransformerOps
from bi_jax.models.parallel_layout import ParallelLayout
from bi_jax.pallas_kernels.attention import attention
from bi_jax.pallas_kernels.attention import topology_for as attention_topology
from bi_jax.pallas_kernels.log_softmax import topology_for as log_softmax_topology
from bi_jax.pallas_kernels.matmul import MatmulTopology, matmul, segmented_matmul, swiglu_matmul
from bi_jax.pallas_kernels.primitive import HOPPER, REFERENCE
from bi_jax.pallas_kernels.rms_norm import add_rms_norm, peer_add_rms_norm, rms_norm
from bi_jax.pallas_kernels.rms_norm import topology_for as norm_topology
from bi_jax.pallas_kernels.rope import rope_into_pages
from bi_jax.pallas_kernels.rope import topology_for as rope_topology
from bi_jax.pallas_kernels.sampling import MOST_ORDERED
from bi_jax.pallas_kernels.sampling import topology_for as sampling_topology

from .kv_cache import LayerPages
from .row_products import Unsummed, cut_products, describe, layout_for


@dataclass(frozen=True, kw_only=True)
class TokenBackends:
    """Implementations of the ops of token choice, by name.

    Attributes:
      choose_token: the draw.
      target_logprobs: the score; on Hopper both come from one op where nothing else is reported.
      cut: `find_cut`, and `top_tokens` where it takes the count.
    """

    choose_token: str
    target_logprobs: str
    cut: str

    def top_tokens(self, count: int) -> str:
        """That of `top_tokens`: beyond what the Hopper kernel orders, the reference."""
        return REFERENCE if self.cut == HOPPER and count > MOST_ORDERED else self.cut

    @property
    def share_a_pass(self) -> bool:
        """Whether the draw and the score can read the logits together; the bits are the same."""
        return self.choose_token == self.target_logprobs == HOPPER


@dataclass(frozen=True, kw_only=True)
class Backends:
    """The implementation of every op, by name. Nothing is substituted for what is named here."""

    matmul: str
    rms_norm: str
    rope: str
    attention: str
    log_softmax: str
    sampling: str
    cut: str
    merge: str

    @classmethod
    def all(cls, name: str) -> "Backends":
        """One implementation for every op."""
        return cls(**{field.name: name for field in fields(cls)})

    @property
    def tokens(self) -> TokenBackends:
        """Those of token choice; `cut` is `find_cut` and `top_tokens`."""
        return TokenBackends(
            choose_token=self.sampling, target_logprobs=self.log_softmax, cut=self.cut
        )


ON_CPU = Backends.all(REFERENCE)
ON_HOPPER = Backends.all(HOPPER)


def pick_backends(device: Any, dtype: str) -> Backends:
    """The implementations for a device and a compute dtype.

    Raises:
      NotImplementedError: none of ours keeps the contract there.
    """
    if device.platform == "cpu":
        return ON_CPU
    capability = str(getattr(device, "compute_capability", ""))
    if device.platform != "gpu" or not capability.startswith("9."):
        raise NotImplementedError(
            "bi_jax runs on CPUs and on NVIDIA Hopper GPUs (compute capability 9.0), got "
            f"'{device.device_kind}'; JAX_PLATFORMS=cpu runs it on the CPU"
        )
    if dtype == "float32":
        raise NotImplementedError(
            "float32 has no Hopper kernels (its products would silently be TF32); use dtype "
            "bfloat16 or float16"
        )
    return ON_HOPPER


def transformer_ops(
    config: TransformerConfig,
    *,
    backend: str | Backends,
    layout: ParallelLayout | None = None,
    peers: jax.Array | None = None,
) -> TransformerOps:
    """The ops record of a model on one device, or on each rank of a layout.

    Args:
      config: chooses the topologies; nothing here sees a batch.
      backend: implementation of each op by name, or one name for all.
      layout: where the weights lie; None: on one device. Of a degree above 1 the ops run under
        `shard_map` over the axis "tp".
      peers: as in `collectives.ordered_psum`, of the program that is traced; schedule.
    """
    names = Backends.all(backend) if isinstance(backend, str) else backend
    layout = layout or layout_for(config, degree=1, backend=names.matmul)
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
    product = _bind(matmul, names.matmul, products)
    segmented = functools.partial(segmented_matmul, backend=names.matmul)
    add_norm = _bind(add_rms_norm, names.rms_norm, norms)
    if peers is not None:
        tree = config.topology == TP_INVARIANT
        over_peers = _bind(peer_add_rms_norm, names.rms_norm, norms)
        over_peers = functools.partial(over_peers, tree=tree)
        add_norm = functools.partial(_sum_and_add_norm, norm=add_norm, over=over_peers, peers=peers)
    return TransformerOps(
        matmul=product,
        swiglu_matmul=_bind(swiglu_matmul, names.matmul, products),
        rms_norm=_bind(rms_norm, names.rms_norm, norms),
        add_rms_norm=add_norm,
        rope=_bind(_rope, names.rope, rotation),
        attend=_bind(_attend, names.attention, mixing),
        **cut_products(layout, product, segmented, merge=names.merge, peers=peers),
        description=(
            *((name, f"{getattr(names, name)}: {topology}") for name, topology in chosen.items()),
            *describe(layout),
        ),
    )


def _bind(op: Callable[..., Any], backend: str, topology: Any) -> Callable[..., Any]:
    return functools.partial(op, backend=backend, topology=topology)


def _sum_and_add_norm(
    x: jax.Array | Unsummed,
    residual: jax.Array,
    scale: jax.Array,
    *,
    eps: float,
    num_rows: jax.Array | None = None,
    norm: Callable[..., Any],
    over: Callable[..., Any],
    peers: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`add_rms_norm` of what is summed over ranks already, or on the way."""
    if isinstance(x, Unsummed):
        return over(x.part, peers, residual, scale, eps=eps)
    return norm(x, residual, scale, eps=eps, num_rows=num_rows)


def _rope(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    cache: LayerPages,
    batch: Any,
    **options: Any,
) -> tuple[jax.Array, LayerPages]:
    q, *pages = rope_into_pages(qkv, cos, sin, cache.k, cache.v, batch, **options)
    return q, LayerPages(*pages)


def _attend(q: jax.Array, cache: LayerPages, batch: Any, **options: Any) -> jax.Array:
    return attention(q, cache.k, cache.v, batch, **options)[0]
