"""QK-norm and rotary embedding on Hopper: one CTA of one warpgroup a token and group of KV heads.

    (low, high) -> (low cos - high sin, high cos + low sin)    after the per-head RMS norm, if any

A tile's 64 rows are heads of one token: for each KV head its G query heads, then k, then v, each
of the three at an aligned row; rows between and beyond them hold anything and are not stored.
Order of additions of the norm: the tree over the columns of a wgmma tile, lower half plus upper
half of the head; it follows Dh alone. The products of the rotation are rounded before they are
added: no multiply-add is contracted.

Grid: (token, group of KV heads).
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .topology import RopeTopology

TILE = plgpu.Layout.WGMMA
ROWS = 64  # heads a tile
REDUCTION_SCRATCH_BYTES = 1024
TMA_ALIGNMENT = 128  # bytes, of what TMA reads or writes in shared memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """At which row of a KV head's part of the tile its k and v stand, and how long the part is."""

    group: int
    half: int

    @property
    def step(self) -> int:
        """Rows of a half head, two bytes a value, between aligned places."""
        return max(TMA_ALIGNMENT // (2 * self.half), 1)

    @property
    def k(self) -> int:
        return -(-self.group // self.step) * self.step

    @property
    def v(self) -> int:
        return self.k + self.step

    @property
    def total(self) -> int:
        return self.v + self.step

    @property
    def dense(self) -> bool:
        """Whether no row is left empty, so that the part is one piece of the input."""
        return self.step == 1


def kv_heads_a_tile(kv_heads: int, rows: Rows) -> int:
    """The most KV heads, as a divisor of all, whose rows fit a tile; 0 if one does not fit."""
    fitting = [c for c in range(1, kv_heads + 1) if kv_heads % c == 0 and c * rows.total <= ROWS]
    return max(fitting, default=0)


def _body(*refs, group: int, tile_heads: int, eps: float, qk_norm: bool, interpret: bool):
    qkv_gmem, cos_gmem, sin_gmem, scales_gmem, *outs = refs[:7]
    halves_smem, trig_smem, scales_smem, out_smem, loaded = refs[7:]
    half = halves_smem.shape[-1]
    rows = Rows(group=group, half=half)
    dtype = halves_smem.dtype
    token, tile = lax.axis_index("token"), lax.axis_index("tile")

    def load_inputs():
        for part in range(2):
            for head, place, count in _pieces(rows, tile_heads):
                heads = pl.ds(tile * tile_heads * (group + 2) + head, count)
                target = halves_smem.at[part, pl.ds(place, count)]
                plgpu.copy_gmem_to_smem(qkv_gmem.at[token, heads, part], target, loaded)
        plgpu.copy_gmem_to_smem(cos_gmem.at[token], trig_smem.at[0], loaded)
        plgpu.copy_gmem_to_smem(sin_gmem.at[token], trig_smem.at[1], loaded)
        if qk_norm:
            plgpu.copy_gmem_to_smem(scales_gmem, scales_smem, loaded)
        plgpu.barrier_wait(loaded)

    def heads_of(part):
        return plgpu.load(halves_smem.at[part], layout=TILE, optimized=False).astype(jnp.float32)

    def across_rows(ref):
        """float32 or narrower [half] in shared memory -> float32 [64, half]."""
        values = plgpu.load(ref, layout=TILE.reduce(0), optimized=False).astype(jnp.float32)
        return lax.broadcast_in_dim(values, (ROWS, half), (1,))

    def normed(low, high, is_k):
        squares = jnp.sum(low * low, axis=1) + jnp.sum(high * high, axis=1)
        factor = lax.rsqrt(squares * (1.0 / (2 * half)) + eps)
        factor = lax.broadcast_in_dim(factor, (ROWS, half), (0,))

        def scaled(part, values):
            q_scale, k_scale = (across_rows(scales_smem.at[kind, part]) for kind in range(2))
            scale = jnp.where(is_k, k_scale, q_scale)
            return (values * factor * scale).astype(dtype).astype(jnp.float32)

        return scaled(0, low), scaled(1, high)

    def store(part, values):
        ref = out_smem.at[part]
        if interpret:
            ref[...] = values
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE))
        def store_plain(_, ref, values):
            values.store_untiled(ref, optimized=False)

        store_plain(ref, values)

    load_inputs()
    head = plgpu.broadcasted_iota(jnp.int32, (ROWS, half), 0, layout=TILE)
    role = lax.rem(head, jnp.full_like(head, rows.total))
    is_k, is_v = role == rows.k, role == rows.v
    low, high = plain = heads_of(0), heads_of(1)
    if qk_norm:
        low, high = normed(low, high, is_k)
    cos, sin = across_rows(trig_smem.at[0]), across_rows(trig_smem.at[1])
    turned = _rounded_sums(low, high, cos, sin, interpret)
    for part in range(2):
        store(part, jnp.where(is_v, plain[part], turned[part]).astype(dtype))
    plgpu.commit_smem()
    _write_heads(out_smem, outs, token, tile, rows, tile_heads)


def _pieces(rows: Rows, tile_heads: int) -> list[tuple[int, int, int]]:
    """(first head in the input, first row in the tile, how many) of each copy into the tile."""
    heads = rows.group + 2
    if rows.dense:
        return [(0, 0, tile_heads * heads)]
    parts = ((0, 0, rows.group), (rows.group, rows.k, 1), (rows.group + 1, rows.v, 1))
    return [
        (i * heads + head, i * rows.total + place, count)
        for i in range(tile_heads)
        for head, place, count in parts
    ]


def _rounded_sums(low, high, cos, sin, interpret: bool):
    """low cos - high sin and high cos + low sin, each product rounded to float32 first."""
    if interpret:
        return low * cos - high * sin, high * cos + low * sin
    outs = (plgpu.ShapeDtypeStruct(low.shape, jnp.float32, TILE),) * 4

    @plgpu.inline_mgpu(arg_types=(TILE,) * 4, return_type=outs)
    def products(_, low, high, cos, sin):
        return low * cos, high * sin, high * cos, low * sin

    a, b, c, d = products(low, high, cos, sin)
    return a - b, c + d


def _write_heads(out_smem, outs, token, tile, rows: Rows, tile_heads: int):
    """Each KV head's queries, key and value go to their own arrays, half by half."""
    q_gmem, k_gmem, v_gmem = outs
    for i in range(tile_heads):
        first, head = i * rows.total, tile * tile_heads + i
        for part in range(2):
            staged = out_smem.at[part]
            plgpu.copy_smem_to_gmem(
                staged.at[pl.ds(first, rows.group)], q_gmem.at[token, head, :, part]
            )
            plgpu.copy_smem_to_gmem(staged.at[first + rows.k], k_gmem.at[token, head, part])
            plgpu.copy_smem_to_gmem(staged.at[first + rows.v], v_gmem.at[token, head, part])
    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def rope_hopper(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    scales: jax.Array | None,
    *,
    eps: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """qkv [T, Nkv, G + 2, Dh] -> q [T, Nkv, G, Dh], k and v [T, Nkv, Dh]; see `api.rope`.

    Args:
      qkv: bfloat16 or float16.
      cos, sin: float32 [T, Dh / 2].
      scales: [2, Dh], the scale of q and of k, or None without QK-norm.
      eps: of the norm.
      interpret: run the kernel in Mosaic GPU's interpreter on a CPU.

    Raises:
      NotImplementedError: a dtype, group or head size that does not fit a tile.

    Invariance: the bits of token t depend on qkv[t], cos[t], sin[t], the scales and eps only.
    """
    tokens, kv_heads, group_2, width = qkv.shape
    group, half = group_2 - 2, width // 2
    rows = Rows(group=group, half=half)
    tile_heads = kv_heads_a_tile(kv_heads, rows)
    if qkv.dtype not in (jnp.bfloat16, jnp.float16) or width not in (64, 128) or not tile_heads:
        raise NotImplementedError(
            "rope on Hopper takes bfloat16 or float16, head sizes 64 and 128 and groups up to "
            f"{ROWS - 4}, got {qkv.dtype}, head size {width}, group {group}"
        )
    dtype = qkv.dtype
    body = functools.partial(
        _body,
        group=group,
        tile_heads=tile_heads,
        eps=eps,
        qk_norm=scales is not None,
        interpret=interpret,
    )
    heads = jax.ShapeDtypeStruct((tokens, kv_heads, 2, half), dtype)
    arrivals = 2 * len(_pieces(rows, tile_heads)) + (2 if scales is None else 3)
    q, k, v = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((tokens, kv_heads, group, 2, half), dtype),
            heads,
            heads,
        ),
        scratch_types=(
            plgpu.SMEM((2, ROWS, half), dtype),
            plgpu.SMEM((2, half), jnp.float32),
            plgpu.SMEM((2, 2, half), dtype),
            plgpu.SMEM((2, ROWS, half), dtype),
            plgpu.Barrier(num_arrivals=arrivals),
        ),
        grid=(tokens, kv_heads // tile_heads),
        grid_names=("token", "tile"),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=REDUCTION_SCRATCH_BYTES),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(
        qkv.reshape(tokens, kv_heads * group_2, 2, half),
        cos,
        sin,
        (jnp.zeros((2, width), dtype) if scales is None else scales).reshape(2, 2, half),
    )
    shape = (tokens, kv_heads, width)
    return q.reshape(tokens, kv_heads, group, width), k.reshape(shape), v.reshape(shape)


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
    scales = jnp.stack([q_scale, k_scale]) if qk_norm else None
    return rope_hopper(qkv, cos, sin, scales, eps=eps)
