"""Keys below which a row's cut cannot lie on Hopper, from what the passes before found."""

import functools

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ..float_order import LOWEST, NAN, order_key
from ..log_softmax.hopper_blocks import I32, PLACE_LAYOUT, PLACES
from . import wide
from .hopper_buckets import bucket_of
from .hopper_list import lowest_key, search
from .hopper_row import Row, count_kept
from .hopper_walk import add_arrays, passed, running_weights, sum_before

U32 = jnp.uint32


def kth_group(row: Row, maxima, k):
    """The key of the k-th largest group of the row, LOWEST if there are fewer."""
    count = row.vocabulary.blocks * PLACES
    layout = plgpu.Layout.WG_STRIDED((count,), vec_size=1)
    keys = order_key(plgpu.load(row.gmem.groups.at[row.index], layout=layout, optimized=False))

    def from_key(lowest):
        return U32(0), count_kept(keys < lowest, keys).astype(U32)

    # A block has its maximum among its groups: as many as there are blocks are not below `least`.
    place = plgpu.broadcasted_iota(I32, (PLACES,), 0, layout=PLACE_LAYOUT)
    within = place < row.vocabulary.blocks
    least = jnp.min(jnp.where(within, order_key(maxima), jnp.full_like(place, NAN)))
    start = jnp.where(k <= row.vocabulary.blocks, least, I32(LOWEST))
    return search(from_key, (U32(0), k.astype(U32)), start, row.top_key)[0]


def share_bucket(row: Row, top_p):
    """The bucket that holds top-p's share of the row: (bound, end) of its keys, both exclusive,
    and what the cut needs of its weight."""
    weights = row.gmem.buckets
    load = functools.partial(plgpu.load, layout=PLACE_LAYOUT, optimized=False)
    parts = [
        tuple(load(weights.at[row.index, s, word]) for word in range(2))
        for s in range(weights.shape[1])
    ]
    upto = running_weights(functools.reduce(add_arrays, parts), row.smem.sums)
    whole = sum_before(I32(PLACES), row.smem.sums)
    need = wide.multiply_fraction_up(whole, top_p)
    bucket = passed(upto, wide.subtract(need, (U32(0), U32(1))))
    need = wide.subtract(need, sum_before(bucket, row.smem.sums))

    def first_of(bucket):
        def holds(x):
            gap = lax.optimization_barrier((x - row.top) * row.inverse)
            return bucket_of(gap) <= bucket

        return lowest_key(holds, row.top_key)

    end = jnp.where(bucket > 0, first_of(bucket - 1), I32(NAN))
    return first_of(bucket) - 1, end, *need


def end_of_gap(row: Row, log_min_p):
    """The lowest key that min-p keeps."""

    def holds(x):
        return lax.optimization_barrier((x - row.top) * row.inverse) >= log_min_p

    return lowest_key(holds, row.top_key)


def in_order(bound):
    """A bound that the logits know: no logit has the key -1, which from_order_key makes a -0.0."""
    return jnp.where(bound == -1, I32(-2), bound)
