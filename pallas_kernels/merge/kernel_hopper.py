"""Sums of partial results on Hopper: each thread adds its own elements of all terms.

    out[e] = round(sum over i of parts[i, e])        in the order of the topology, float32

No element meets another, so tiles are free. The last tile is moved back to end with the array: the
elements that two tiles share are computed twice, to the same bits. Grid: (tile).
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .schedule import THREADS, MergeSchedule, pick_schedule
from .topology import MergeTopology, merged


def _body(parts_gmem, out_gmem, *, topology: MergeTopology, schedule: MergeSchedule):
    terms, elements = parts_gmem.shape
    tile = schedule.tile
    layout = plgpu.Layout.WG_STRIDED((tile,), vec_size=schedule.vec)
    # A multiple of vec in either case, as aligned loads need.
    start = jnp.minimum(lax.axis_index("tile") * tile, elements - tile)
    place = pl.ds(pl.multiple_of(start, schedule.vec), tile)
    # All loads before the first addition, so that they are in flight together.
    loaded = [
        plgpu.load(parts_gmem.at[i, place], layout=layout, optimized=False) for i in range(terms)
    ]
    total = merged(loaded, topology, lambda a, b: a + b)
    out_gmem[place] = total.astype(out_gmem.dtype)


@functools.partial(jax.jit, static_argnames=("out_dtype", "topology", "schedule", "interpret"))
def _launch(
    parts: jax.Array,
    *,
    out_dtype: str,
    topology: MergeTopology,
    schedule: MergeSchedule,
    interpret: bool,
) -> jax.Array:
    """parts [n, E], E at least one tile."""
    elements = parts.shape[1]
    kernel = plgpu.kernel(
        functools.partial(_body, topology=topology, schedule=schedule),
        out_type=jax.ShapeDtypeStruct((elements,), jnp.dtype(out_dtype)),
        grid=(pl.cdiv(elements, schedule.tile),),
        grid_names=("tile",),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )
    return kernel(parts)


def merge_hopper(
    parts: jax.Array,
    *,
    out_dtype: str,
    topology: MergeTopology,
    schedule: MergeSchedule | None = None,
    interpret: bool = False,
) -> jax.Array:
    """parts float32 [n, ...] -> [...] of out_dtype; see `api`.

    Fewer than 128 elements are filled up first.

    Invariance: element by element; the schedule changes no bit.
    """
    shape = parts.shape[1:]
    flat = parts.reshape(parts.shape[0], -1)
    elements = flat.shape[1]
    if elements < THREADS:
        flat = jnp.pad(flat, ((0, 0), (0, THREADS - elements)))
    schedule = schedule or pick_schedule(terms=flat.shape[0], elements=flat.shape[1])
    out = _launch(
        flat, out_dtype=out_dtype, topology=topology, schedule=schedule, interpret=interpret
    )
    return out[:elements].reshape(shape)


def merge_hopper_op(
    parts: jax.Array, *, out_dtype: str, topology: MergeTopology
) -> tuple[jax.Array]:
    """`merge_hopper` as an implementation of the primitive."""
    return (merge_hopper(parts, out_dtype=out_dtype, topology=topology),)
