"""The ops that see weights cut over ranks: out and down projection, embedding and logits.

    out, down   a float32 partial sum for each segment of K; the partial sums are merged in one
                stated order, across ranks where there are several, and rounded once
    embedding   each rank looks its own rows up; bit patterns are combined by an integer sum in
                which all terms but one are zero
    logits      each rank's columns are whole already; they are gathered

Everything but the products and the merge moves data and adds nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bi_jax.models.config import TP_INVARIANT, TransformerConfig
from bi_jax.models.ops import whole_products
from bi_jax.models.parallel_layout import ABSENT, K_STEP, ParallelLayout
from bi_jax.pallas_kernels.embedding import embedding
from bi_jax.pallas_kernels.matmul.kernel_hopper import K_MULTIPLE as HOPPER_K_MULTIPLE
from bi_jax.pallas_kernels.primitive import HOPPER
from bi_jax.pallas_kernels.rms_norm import fits_peer_norm

from .collectives import exact_psum_of_one, gather_along, ordered_psum, tree_psum

TENSOR_AXIS = "tp"

Product = Callable[..., jax.Array]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["part"], meta_fields=[])
@dataclass(frozen=True)
class Unsummed:
    """A rank's float32 term [T, D] of a row product, which the next norm sums over ranks."""

    part: jax.Array


def layout_for(config: TransformerConfig, *, degree: int, backend: str) -> ParallelLayout:
    """The layout over `degree` ranks, segments filled up to what a matmul's backend takes.

    Raises:
      ValueError: the degree does not fit the topology.
    """
    multiple = HOPPER_K_MULTIPLE if backend == HOPPER else K_STEP
    return ParallelLayout(config=config, degree=degree, k_multiple=multiple)


def cut_products(
    layout: ParallelLayout,
    matmul: Product,
    segmented: Product,
    *,
    merge: str,
    peers: jax.Array | None = None,
) -> dict[str, Product]:
    """`out_product`, `down_product`, `embed` and `logits` of a layout.

    Args:
      layout: where the weights lie. Of degree 1 the weights may also be whole, as in a checkpoint;
        they are then cut inside the program, to the same bits.
      matmul, segmented: `matmul` and `segmented_matmul`, backend and topology bound.
      merge: backend of the merge.
      peers: as in `collectives.ordered_psum`; few rows then come out `Unsummed`.

    Returns:
      The ops by their names in `TransformerOps`; of a degree above 1 for use under `shard_map`
      over the axis "tp".
    """
    if layout.trivial:
        return whole_products(matmul)
    axis = TENSOR_AXIS if layout.degree > 1 else None
    tree = layout.config.topology == TP_INVARIANT

    def row_product(x: jax.Array, weight: jax.Array, num_rows: Any) -> Any:
        """x [T, segments * K], weight [segments, D, K] of this rank -> [T, D] on every rank, or
        this rank's part of it, `Unsummed`."""
        if axis is None:
            return segmented(x, weight, num_rows=num_rows)
        if tree:
            part = segmented(x, weight, num_rows=num_rows, out_dtype="float32")
        else:
            part = matmul(x, weight[0], num_rows=num_rows, out_dtype="float32")
        if peers is not None and fits_peer_norm(part.shape):
            return Unsummed(part)
        kinds: dict[str, Any] = dict(out_dtype=x.dtype.name, backend=merge, peers=peers)
        return tree_psum(part[None], axis, **kinds) if tree else ordered_psum(part, axis, **kinds)

    def whole_product(
        x: jax.Array, weight: jax.Array, cuts: Sequence[int], depth: int, num_rows: Any
    ) -> jax.Array:
        """x [T, K], weight [D, K] -> [T, D] on one device, the same sums; differentiable."""
        parts = [
            matmul(part, piece, num_rows=num_rows, out_dtype="float32")
            for part, piece in zip(_split(x, cuts, depth), _split(weight, cuts, depth), strict=True)
        ]
        return tree_psum(jnp.stack(parts), None, out_dtype=x.dtype.name, backend=merge)

    def out_product(mixed: jax.Array, weight: jax.Array, *, num_rows: jax.Array) -> Any:
        if weight.ndim == 2:
            cuts = [cut * layout.config.head_dim for cut in layout.head_cuts]
            flat = mixed.reshape(mixed.shape[0], -1)
            return whole_product(flat, weight, cuts, layout.out_depth, num_rows)
        x = _filled(_segments_of_heads(mixed, layout), weight.shape)
        return row_product(x, weight, num_rows)

    def down_product(hidden: jax.Array, weight: jax.Array, *, num_rows: jax.Array) -> Any:
        if weight.ndim == 2:
            cuts = layout.width_cuts
            return whole_product(hidden, weight, cuts, layout.down_depth, num_rows)
        return row_product(hidden, weight, num_rows)

    if axis is None:
        return {**whole_products(matmul), "out_product": out_product, "down_product": down_product}
    return {
        "out_product": out_product,
        "down_product": down_product,
        "embed": _embed,
        "logits": _logits(layout.config.vocab_size, matmul),
    }


def describe(layout: ParallelLayout) -> tuple[tuple[str, str], ...]:
    """What the layout fixes about bits, for the identity; empty where it fixes nothing."""
    if layout.trivial:
        return ()
    order = "one balanced tree" if layout.config.topology == TP_INVARIANT else "added in order"
    return (("row_products", f"{layout.segments} segments of K, {order}, rounded once"),)


def _split(array: jax.Array, cuts: Sequence[int], depth: int) -> list[jax.Array]:
    """[M, K] cut along K, each part with zeros up to `depth`; differentiates to data movement."""
    sizes = [b - a for a, b in itertools.pairwise(cuts)]
    parts = lax.split(array, sizes, axis=1)
    return [jnp.pad(part, ((0, 0), (0, depth - part.shape[1]))) for part in parts]


def _filled(x: jax.Array, weight: Sequence[int]) -> jax.Array:
    """[T, segments * k] with each segment filled up to the K of a weight [segments, D, K]."""
    segments, _, depth = weight
    if x.shape[1] == segments * depth:
        return x
    x = x.reshape(x.shape[0], segments, -1)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, depth - x.shape[2])))
    return x.reshape(x.shape[0], -1)


def _segments_of_heads(mixed: jax.Array, layout: ParallelLayout) -> jax.Array:
    """[T, slots, G, Dh] -> [T, segments * heads * Dh]: this rank's heads as its segments want them.

    Query heads that only fill a slot up go nowhere; a segment's missing heads are exact zeros.
    """
    count, *_, width = mixed.shape
    if layout.heads_in_order:
        return mixed.reshape(count, -1)
    heads = mixed.reshape(count, -1, width)
    table = layout.head_table.reshape(layout.degree, -1)
    table = jnp.asarray(np.where(table == ABSENT, heads.shape[1], table), jnp.int32)
    mine = table[lax.axis_index(TENSOR_AXIS) if layout.degree > 1 else 0]
    return heads.at[:, mine].get(mode="fill", fill_value=0).reshape(count, -1)


def _embed(table: jax.Array, tokens: jax.Array, *, num_rows: jax.Array | None = None) -> jax.Array:
    """The rows of tokens from a table of which this rank has its part."""
    first = lax.axis_index(TENSOR_AXIS) * table.shape[0]
    here = tokens - first
    mine = (here >= 0) & (here < table.shape[0])
    rows = embedding(table, jnp.where(mine, here, 0), num_rows=num_rows)
    zeros = jnp.zeros((), rows.dtype)
    return exact_psum_of_one(jnp.where(mine[:, None], rows, zeros), TENSOR_AXIS)


def _logits(vocab_size: int, matmul: Product) -> Product:
    def logits(
        hidden: jax.Array, weight: jax.Array, *, num_rows: jax.Array | None = None
    ) -> jax.Array:
        mine = matmul(hidden, weight, num_rows=num_rows, out_dtype="float32")
        return gather_along(mine, TENSOR_AXIS, axis=1)[:, :vocab_size]

    return logits
