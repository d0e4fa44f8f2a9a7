"""QK-norm and rotary embedding on Hopper, keys and values written straight into their pages.

    (low, high) -> (low cos - high sin, high cos + low sin)    after the per-head RMS norm, if any

A tile is one head of 32 neighbouring tokens in the registers of one warpgroup, low and high half
apart. Order of additions: `hopper_math` states that of the norm and which products of the rotation
are rounded; it follows Dh alone.

Grid: (tile of tokens, KV head, part); the first part takes the head's key and value, each other
some of its query heads, or one takes them all. A token whose page does not exist is padding: its
key and value go nowhere.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ..in_place import run_in_place
from . import hopper_math, hopper_rows
from .hopper_rows import INTERPRETED_ROWS, ROWS
from .schedule import RopeSchedule, pick_schedule
from .topology import RopeTopology

WIDTHS = (64, 128)  # head sizes


def _body(*refs, schedule: RopeSchedule, eps: float, interpret: bool):
    qkv_gmem, cos_gmem, sin_gmem, page_gmem, slot_gmem, *rest = refs
    *scales_gmem, k_gmem, v_gmem, q_gmem = rest
    group = qkv_gmem.shape[2] - 2
    rows = hopper_rows.rows_of_tile(lax.axis_index("tile"), interpret)
    kv_head, part = lax.axis_index("kv_head"), lax.axis_index("part")
    load = functools.partial(hopper_rows.load_rows, rows=rows, interpret=interpret)
    store = functools.partial(hopper_rows.store_rows, interpret=interpret)

    angles = load(cos_gmem), load(sin_gmem)

    def load_head(head):
        return [load(qkv_gmem.at[:, kv_head, head, side]) for side in range(2)]

    def turned(head, scale_gmem):
        low, high = load_head(head)
        wide = low.astype(jnp.float32), high.astype(jnp.float32)
        if scale_gmem is not None:
            wide = _normed((low, high), wide, scale_gmem, eps, interpret)
        sides = hopper_math.rotated(*wide, *angles, interpret)
        return [side.astype(low.dtype) for side in sides]

    def take_queries(first):
        scale_gmem = scales_gmem[0] if scales_gmem else None

        @pl.loop(0, schedule.queries)
        def _(i):
            head = first + i
            for side, values in enumerate(turned(head, scale_gmem)):
                store(q_gmem.at[:, kv_head, head, side], values, rows)

    def take_key_and_value():
        scale_gmem = scales_gmem[1] if scales_gmem else None
        page, slot = (
            hopper_rows.load_numbers(ref, rows, interpret) for ref in (page_gmem, slot_gmem)
        )
        page = jnp.where(rows < qkv_gmem.shape[0], page, k_gmem.shape[0])

        value, key = load_head(group + 1), turned(group, scale_gmem)
        for pages_gmem, sides in ((v_gmem, value), (k_gmem, key)):
            for side, values in enumerate(sides):
                store(pages_gmem.at[:, kv_head, :, side], values, page, slot)

    if schedule.together:
        take_key_and_value()
        take_queries(0)
    else:
        pl.when(part == 0)(take_key_and_value)
        pl.when(part > 0)(lambda: take_queries((part - 1) * schedule.queries))


def _normed(head, wide, scale_gmem, eps: float, interpret: bool):
    """The per-head RMS norm of (low, high) [32, half], rounded once to the head's dtype."""
    mean = hopper_math.mean_of_squares(*head, eps, interpret)
    factor = hopper_rows.across_columns(lax.rsqrt(mean), head[0].shape[1], interpret)

    def scaled(side, values):
        scale = hopper_rows.across_rows(scale_gmem.at[side], interpret)
        return (values * factor * scale).astype(head[0].dtype).astype(jnp.float32)

    return scaled(0, wide[0]), scaled(1, wide[1])


@functools.partial(jax.jit, static_argnames=("eps", "schedule", "interpret"))
def rope_into_pages_hopper(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    scales: tuple[jax.Array, ...],
    k_pages: jax.Array,
    v_pages: jax.Array,
    page: jax.Array,
    slot: jax.Array,
    *,
    eps: float,
    schedule: RopeSchedule | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """qkv [T, Nkv, G + 2, Dh] -> q [T, Nkv, G, Dh] and the pages; see `api.rope_into_pages`.

    Args:
      qkv: bfloat16 or float16.
      cos, sin: float32 [T, Dh / 2].
      scales: [Dh] of q and of k, or none without QK-norm.
      k_pages, v_pages: [P, Nkv, Tp, Dh], changed in place where the caller gives them away.
      page, slot: int32 [T], where each token's key and value go; a page of P or more: nowhere.
      eps: of the norm.
      schedule: speed only; None: by the number of tokens.
      interpret: run the kernel in Mosaic GPU's interpreter on a CPU.

    Raises:
      NotImplementedError: a dtype or head size that does not fit a tile.

    Invariance: the bits of token t depend on qkv[t], cos[t], sin[t], the scales and eps only.
    """
    tokens, kv_heads, group_2, width = qkv.shape
    group, half = group_2 - 2, width // 2
    if qkv.dtype not in (jnp.bfloat16, jnp.float16) or width not in WIDTHS:
        raise NotImplementedError(
            "rope on Hopper takes bfloat16 or float16 and head sizes 64 and 128, got "
            f"{qkv.dtype}, head size {width}"
        )
    tiles = -(-tokens // (INTERPRETED_ROWS if interpret else ROWS))
    schedule = schedule or pick_schedule(tiles=tiles, kv_heads=kv_heads, group=group)
    count = tokens
    if interpret:  # the interpreter reads whole tiles
        count = tiles * INTERPRETED_ROWS
        qkv, cos, sin, slot = (_longer(a, count, 0) for a in (qkv, cos, sin, slot))
        page = _longer(page, count, k_pages.shape[0])
    sides = (*k_pages.shape[:3], 2, half)
    launch = plgpu.kernel(
        functools.partial(_body, schedule=schedule, eps=eps, interpret=interpret),
        out_type=jax.ShapeDtypeStruct((count, kv_heads, group, 2, half), qkv.dtype),
        grid=(tiles, kv_heads, schedule.parts(group)),
        grid_names=("tile", "kv_head", "part"),
        kernel_name="rope_into_pages",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )
    operands = qkv.reshape(count, kv_heads, group_2, 2, half), cos, sin, page, slot
    scales = tuple(scale.reshape(2, half) for scale in scales)
    pages = k_pages.reshape(sides), v_pages.reshape(sides)
    q, pages = run_in_place(launch, (*operands, *scales), pages)
    k_pages, v_pages = (p.reshape(k_pages.shape) for p in pages)
    return q.reshape(count, kv_heads, group, width)[:tokens], k_pages, v_pages


def _longer(array: jax.Array, count: int, fill: int) -> jax.Array:
    widths = ((0, count - array.shape[0]), *((0, 0) for _ in array.shape[1:]))
    return jnp.pad(array, widths, constant_values=fill)


def rope_hopper(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    scales: tuple[jax.Array, ...],
    *,
    eps: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same kernel with a page of one slot for each token: q, and k and v [T, Nkv, Dh]."""
    tokens, kv_heads, _, width = qkv.shape
    pages = [jnp.empty((tokens, kv_heads, 1, width), qkv.dtype) for _ in range(2)]
    page = jnp.arange(tokens, dtype=jnp.int32)
    q, k, v = rope_into_pages_hopper(
        qkv, cos, sin, scales, *pages, page, jnp.zeros_like(page), eps=eps, interpret=interpret
    )
    return q, k[:, :, 0], v[:, :, 0]


def rope_hopper_op(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    q_scale: jax.Array,
    k_scale: jax.Array,
    num_rows: jax.Array,
    *,
    eps: float,
    qk_norm: bool,
    topology: RopeTopology,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`rope_hopper` as an implementation of the primitive."""
    del num_rows, topology  # the head size fixes this kernel's order of additions
    return rope_hopper(qkv, cos, sin, (q_scale, k_scale) if qk_norm else (), eps=eps)


def rope_into_pages_hopper_op(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    q_scale: jax.Array,
    k_scale: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page: jax.Array,
    slot: jax.Array,
    num_rows: jax.Array,
    *,
    eps: float,
    qk_norm: bool,
    topology: RopeTopology,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`rope_into_pages_hopper` as an implementation of the primitive."""
    del num_rows, topology  # padding has no page
    scales = (q_scale, k_scale) if qk_norm else ()
    return rope_into_pages_hopper(qkv, cos, sin, scales, k_pages, v_pages, page, slot, eps=eps)
