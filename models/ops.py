"""The explicit record of everything a model computes with.

A model never imports a kernel: whoever builds the step passes this record down. The same model so
runs on references, on GPU kernels, with stock XLA ops as a control, and under shard_map. The last
four ops see weights that may be cut over ranks; what they give is the same on every rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from bi_jax.pallas_kernels.embedding import embedding

LayerCache = Any  # opaque to the model; only `rope` and `attend` open it


class Rope(Protocol):
    """(qkv, cos, sin, layer_cache, batch, *, q_scale, k_scale, eps) -> (q, layer_cache)."""

    def __call__(
        self,
        qkv: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        cache: LayerCache,
        batch: Any,
        *,
        q_scale: jax.Array | None,
        k_scale: jax.Array | None,
        eps: float,
    ) -> tuple[jax.Array, LayerCache]: ...


class Attend(Protocol):
    """(q, layer_cache, batch, *, scale, window) -> out like q."""

    def __call__(
        self,
        q: jax.Array,
        cache: LayerCache,
        batch: Any,
        *,
        scale: float,
        window: int | None,
    ) -> jax.Array: ...


@dataclass(frozen=True, kw_only=True)
class TransformerOps:
    """Callables with the signatures of `bi_jax.pallas_kernels`, backend and topology bound.

    Attributes:
      matmul: (x [M, K], w [N, K], bias [N] or None, *, num_rows, out_dtype) -> [M, N].
      swiglu_matmul: (x [M, K], gate_up [2, F, K], *, num_rows) -> [M, F].
      rms_norm: (x [M, D], scale [D], *, eps, num_rows) -> [M, D].
      add_rms_norm: (x, residual [M, D], scale [D], *, eps, num_rows) -> (normed, stream).
      rope: qkv [T, Nkv, G + 2, Dh], cos and sin [T, Dh / 2] -> q [T, Nkv, G, Dh]; stores the
        tokens' keys and values in the cache.
      attend: q [T, Nkv, G, Dh] over the cache, in which this batch's keys are stored.
      out_product: (mixed [T, Nkv, G, Dh], weight, *, num_rows) -> [T, D]: summed over all heads.
      down_product: (hidden [T, F], weight, *, num_rows) -> [T, D]: summed over all of F. A model
        hands what the two give to add_rms_norm as it is: a record may sum there.
      embed: (table, tokens [T], *, num_rows) -> [T, D] in the table's dtype; copies.
      logits: (hidden [R, D], weight, *, num_rows) -> float32 [R, V], the accumulators unrounded.
      description: backend and topology of every op, for the identity and for people.
    """

    matmul: Callable[..., jax.Array]
    swiglu_matmul: Callable[..., jax.Array]
    rms_norm: Callable[..., jax.Array]
    add_rms_norm: Callable[..., tuple[jax.Array, jax.Array]]
    rope: Rope
    attend: Attend
    out_product: Callable[..., jax.Array]
    down_product: Callable[..., jax.Array]
    embed: Callable[..., jax.Array]
    logits: Callable[..., jax.Array]
    description: tuple[tuple[str, str], ...] = ()


def whole_products(matmul: Callable[..., jax.Array]) -> dict[str, Callable[..., jax.Array]]:
    """The ops that see cut weights, for weights that are whole: one product each, and a lookup."""

    def out_product(mixed: jax.Array, weight: jax.Array, *, num_rows: jax.Array) -> jax.Array:
        return matmul(mixed.reshape(mixed.shape[0], -1), weight, num_rows=num_rows)

    def logits(
        hidden: jax.Array, weight: jax.Array, *, num_rows: jax.Array | None = None
    ) -> jax.Array:
        return matmul(hidden, weight, num_rows=num_rows, out_dtype="float32")

    return {
        "out_product": out_product,
        "down_product": matmul,
        "embed": embedding,
        "logits": logits,
    }
