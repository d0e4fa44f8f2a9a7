"""The explicit record of everything a model computes with.

A model never imports a kernel: whoever builds the step passes this record down. The same model so
runs on references, on GPU kernels, with stock XLA ops as a control, and under shard_map.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax

LayerCache = Any  # opaque to the model; only `attend` opens it


class Attend(Protocol):
    """(q, k, v, layer_cache, batch, *, scale, window) -> (out like q, layer_cache)."""

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: LayerCache,
        batch: Any,
        *,
        scale: float,
        window: int | None,
    ) -> tuple[jax.Array, LayerCache]: ...


@dataclass(frozen=True, kw_only=True)
class TransformerOps:
    """Callables with the signatures of `bi_jax.pallas_kernels`, backend and topology bound.

    Attributes:
      matmul: (x [M, K], w [N, K], bias [N] or None, *, num_rows, out_dtype) -> [M, N].
      swiglu_matmul: (x [M, K], gate_up [2, F, K], *, num_rows) -> [M, F].
      rms_norm: (x [M, D], scale [D], *, eps, num_rows) -> [M, D].
      add_rms_norm: (x, residual [M, D], scale [D], *, eps, num_rows) -> (normed, stream).
      rope: (qkv [T, Nkv, G + 2, Dh], cos, sin [T, Dh / 2], *, q_scale, k_scale, eps, num_rows)
        -> (q [T, Nkv, G, Dh], k [T, Nkv, Dh], v [T, Nkv, Dh]).
      attend: stores k and v in the cache and attends over it.
      reduce: sum over the devices that share a row-parallel product; the identity on one device.
      description: backend and topology of every op, for the identity and for people.
    """

    matmul: Callable[..., jax.Array]
    swiglu_matmul: Callable[..., jax.Array]
    rms_norm: Callable[..., jax.Array]
    add_rms_norm: Callable[..., tuple[jax.Array, jax.Array]]
    rope: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    attend: Attend
    reduce: Callable[[jax.Array], jax.Array]
    description: tuple[tuple[str, str], ...] = ()
