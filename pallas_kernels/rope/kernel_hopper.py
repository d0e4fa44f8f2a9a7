"""QK-norm and rotary embedding on Hopper: one CTA of one warpgroup a token and group of KV heads.

    (low, high) -> (low cos - high sin, high cos + low sin)    after the per-head RMS norm, if any

A tile's 64 rows are heads of one token: for each KV head its G query heads, then k, then v; rows
beyond them hold anything and are not stored. Order of additions of the norm: the tree over the
columns of a wgmma tile, lower half plus upper half of the head; it follows Dh alone. The products
of the rotation are rounded before they are added: no multiply-add is contracted.

Grid: (token, group of KV heads).
"""

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


def kv_heads_a_tile(kv_heads: int, group: int) -> int:
    """The most KV heads, as a divisor of all, whose G + 2 heads fit a tile."""
    fitting = [c for c in range(1, kv_heads + 1) if kv_heads % c == 0 and c * (group + 2) <= ROWS]
    return max(fitting, default=0)


def _body(*refs, group: int, tile_heads: int, eps: float, qk_norm: bool, interpret: bool):
    qkv_gmem, cos_gmem, sin_gmem, scales_gmem, *outs = refs[:7]
    halves_smem, trig_smem, scales_smem, out_smem, loaded = refs[7:]
    rows, half = tile_heads * (group + 2), halves_smem.shape[-1]
    dtype = halves_smem.dtype
    token, tile = lax.axis_index("token"), lax.axis_index("tile")

    def load_inputs():
        heads = pl.ds(tile * rows, rows)
        for part in range(2):
            target = halves_smem.at[part, pl.ds(0, rows)]
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
    role = lax.rem(head, jnp.full_like(head, group + 2))
    is_k, is_v = role == group, role == group + 1
    low, high = plain = heads_of(0), heads_of(1)
    if qk_norm:
        low, high = normed(low, high, is_k)
    cos, sin = across_rows(trig_smem.at[0]), across_rows(trig_smem.at[1])
    turned = _rounded_sums(low, high, cos, sin, interpret)
    for part in range(2):
        store(part, jnp.where(is_v, plain[part], turned[part]).astype(dtype))
    plgpu.commit_smem()
    _write_heads(out_smem, outs, token, tile, group, tile_heads)


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


def _write_heads(out_smem, outs, token, tile, group: int, tile_heads: int):
    """Each KV head's queries, key and value go to their own arrays, half by half."""
    q_gmem, k_gmem, v_gmem = outs
    for i in range(tile_heads):
        first, head = i * (group + 2), tile * tile_heads + i
        for part in range(2):
            staged = out_smem.at[part]
            plgpu.copy_smem_to_gmem(staged.at[pl.ds(first, group)], q_gmem.at[token, head, :, part])
            plgpu.copy_smem_to_gmem(staged.at[first + group], k_gmem.at[token, head, part])
            plgpu.copy_smem_to_gmem(staged.at[first + group + 1], v_gmem.at[token, head, part])
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
    tile_heads = kv_heads_a_tile(kv_heads, group)
    if qkv.dtype not in (jnp.bfloat16, jnp.float16) or width not in (64, 128) or not tile_heads:
        raise NotImplementedError(
            "rope on Hopper takes bfloat16 or float16, head sizes 64 and 128 and groups up to "
            f"{ROWS - 2}, got {qkv.dtype}, head size {width}, group {group}"
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
            plgpu.Barrier(num_arrivals=4 if scales is None else 5),
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
