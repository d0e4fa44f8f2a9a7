"""The sum over the cards of one host by one kernel that reads the peers' terms over NVLink.

    out[e] = round(sum over ranks r of x_r[e])        in the order of the topology, float32

Every rank computes every element, so the result needs no second exchange. The runtime's barrier
before a kernel that touches peers makes all terms ready; at the end each CTA tells its like on the
other ranks that it has read, and waits to be told so: then a rank may overwrite its term.
No multicast: peers' addresses are read one by one. Grid: (CTA), each takes every CTAS-th tile.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .schedule import THREADS
from .topology import MergeTopology, merged

CTAS = 132  # at most: all must run at once, since they wait for one another
VEC = 4


def _body(x_gmem, out_gmem, read, *, axis: str, ranks: int, topology: MergeTopology, ctas: int):
    (elements,) = x_gmem.shape
    tile = THREADS * VEC
    layout = plgpu.Layout.WG_STRIDED((tile,), vec_size=VEC)
    first = lax.axis_index("cta")
    tiles = pl.cdiv(elements, tile)

    @pl.loop(0, pl.cdiv(tiles, ctas))
    def _tiles(step):
        index = jnp.minimum(step * ctas + first, tiles - 1)
        start = jnp.minimum(index * tile, elements - tile)
        place = pl.ds(pl.multiple_of(start, VEC), tile)
        terms = [
            plgpu.load(
                plgpu.remote_ref(x_gmem, {axis: jnp.int32(rank)}).at[place],
                layout=layout,
                optimized=False,
            )
            for rank in range(ranks)
        ]
        out_gmem[place] = merged(terms, topology, lambda a, b: a + b).astype(out_gmem.dtype)

    for rank in range(ranks):
        pl.semaphore_signal(read, device_id={axis: jnp.int32(rank)})
    pl.semaphore_wait(read, ranks, decrement=False)


@functools.partial(jax.jit, static_argnames=("axis", "ranks", "out_dtype", "topology"))
def merge_peers_hopper(
    x: jax.Array, *, axis: str, ranks: int, out_dtype: str, topology: MergeTopology
) -> jax.Array:
    """x float32 [...], this rank's term -> [...] of out_dtype, the same on every rank.

    Args:
      x: a multiple of 4 elements, at least 512.
      axis: mesh axis of all the mesh's devices, in one process.
      ranks: its size.
      out_dtype, topology: as for `merge_hopper`.

    Invariance: element by element, of the ranks' terms in their order.
    """
    elements = x.size
    ctas = min(CTAS, -(-elements // (THREADS * VEC)))
    kernel = plgpu.kernel(
        functools.partial(_body, axis=axis, ranks=ranks, topology=topology, ctas=ctas),
        out_type=jax.ShapeDtypeStruct((elements,), jnp.dtype(out_dtype)),
        scratch_types=(plgpu.SemaphoreType.REGULAR,),
        grid=(ctas,),
        grid_names=("cta",),
    )
    return kernel(x.reshape(-1)).reshape(x.shape)
