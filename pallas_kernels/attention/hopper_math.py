"""Scalar arithmetic of the Hopper attention kernel with every multiply-add spelled out.

Mosaic lets the compiler contract a * b + c, and whether it does can depend on the code around it.
So the places where a product meets a sum call `fused_multiply_add`; nowhere else does a product
feed a sum.
"""

import math

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray, Tiling
from jax.extend.mlir.dialects import arith as mlir_arith
from jax.extend.mlir.dialects import math as mlir_math

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
LOWEST = float(
    jnp.finfo(jnp.float32).min
)  # stands for "no key yet" where -inf would make inf - inf

TILE = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
# The first eight of the sixteen rows that a warp holds of TILE: [32, n] where TILE is [64, n].
HALF_TILE = plgpu.Layout.TILED(
    Tiling(((32, 8), (8, 8), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
HALF_ROW = HALF_TILE.reduce(1)
WARP_ROWS = 16
# [8, n]: sixteen threads a row. A thread holds every other eight of columns, of each one column;
# its neighbours hold the other eights, then the other column of a pair, then the other pairs.
EIGHTS = plgpu.Layout.TILED(
    Tiling(((8, 16), (2, 16), (8,), (2,), (1,))),
    warp_dims=(-7,),
    lane_dims=(-5, -3, -2, -4),
    vector_dim=-1,
)
EIGHTS_ROW = EIGHTS.reduce(1)
HALF_AXIS = {2: 4, 1: 2}  # which axis of the registers of TILE, and of ROW, numbers the two halves


def fused_multiply_add(a, b, c, *, layout, interpret: object):
    """a * b + c rounded once, on float32 arrays of one shape; `a` or `b` may be a Python float.

    The interpret mode cannot inline Mosaic code and rounds twice; it promises no GPU bits.
    """
    if interpret:
        return a * b + c
    if isinstance(b, float):
        return _fma_constant(a, b, c, layout)
    result = plgpu.ShapeDtypeStruct(a.shape, jnp.float32, layout)

    @plgpu.inline_mgpu(arg_types=(layout, layout, layout), return_type=result)
    def fma(_, a, b, c):
        return a._pointwise(lambda x, y, z: mlir_math.fma(x, y, z), b, c)

    return fma(a, b, c)


def _fma_constant(a, b: float, c, layout):
    result = plgpu.ShapeDtypeStruct(a.shape, jnp.float32, layout)

    @plgpu.inline_mgpu(arg_types=(layout, layout), return_type=result)
    def fma(_, a, c):
        def one(x, z):
            return mlir_math.fma(x, splat(b, x.type), z)

        return a._pointwise(one, c)

    return fma(a, c)


def splat(value: float, ty):
    """An MLIR constant of a float or vector-of-float type."""
    from jax.extend.mlir import ir

    if isinstance(ty, ir.VectorType):
        element = ir.FloatAttr.get(ir.VectorType(ty).element_type, value)
        return mlir_arith.constant(ty, ir.DenseElementsAttr.get_splat(ty, element))
    return mlir_arith.constant(ty, ir.FloatAttr.get(ty, value))


def rows_to_tile(x, width: int, *, layout=TILE):
    """float32[rows] -> float32[rows, width], a row's value in every column."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, (x.shape[0], width), [0]), layout)


def sum_rows(x, *, layout, interpret: object):
    """float32[rows, n] -> float32[rows], in one fixed order of columns whatever the layout.

    A thread adds the pairs of columns it holds to two sums, even and odd pairs, adds these, then
    the two of a pair, then those of its neighbours. Mosaic has as many sums as `acc_ilp` says for
    the rows that a thread holds together, which are two in TILE and one in HALF_TILE. In EIGHTS
    each of these sums has a thread of its own.
    """
    if layout == TILE or interpret:
        return x.sum(axis=1)
    result = plgpu.ShapeDtypeStruct(x.shape[:1], jnp.float32, layout.reduce(1))

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    def add(_, x):
        return x.reduce("add", 1, acc_ilp=1 if layout == EIGHTS else 4)

    return add(x)


def first_half(x, *, interpret: object):
    """The first eight rows of each warp: [64, n] in TILE -> [32, n] in HALF_TILE."""
    if interpret:
        return x.reshape(-1, WARP_ROWS, x.shape[1])[:, : WARP_ROWS // 2].reshape(-1, x.shape[1])
    result = plgpu.ShapeDtypeStruct((x.shape[0] // 2, x.shape[1]), x.dtype, HALF_TILE)

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=result)
    def take(_, x):
        layout = HALF_TILE.to_mgpu()
        registers = x.registers.take(0, HALF_AXIS[2])
        return FragmentedArray(
            _registers=registers.reshape(layout.registers_shape(result.shape)),
            _layout=layout,
            _is_signed=x.is_signed,
        )

    return take(x)


def both_halves(x, *, interpret: object):
    """[32, ...] in HALF_TILE or HALF_ROW -> [64, ...]: a warp's last eight rows like its first."""
    return joined(x, x, interpret=interpret)


def joined(first, second, *, interpret: object):
    """Each warp's first and last eight rows, [32, ...] in HALF_TILE or HALF_ROW -> [64, ...]."""
    shape = (2 * first.shape[0], *first.shape[1:])
    if interpret:
        eights = [x.reshape(-1, 1, WARP_ROWS // 2, *x.shape[1:]) for x in (first, second)]
        return jnp.concatenate(eights, axis=1).reshape(shape)
    half, whole = (HALF_TILE, TILE) if first.ndim == 2 else (HALF_ROW, ROW)
    result = plgpu.ShapeDtypeStruct(shape, first.dtype, whole)

    @plgpu.inline_mgpu(arg_types=(half, half), return_type=result)
    def join(_, *halves):
        layout = whole.to_mgpu()
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        places = np.moveaxis(registers, HALF_AXIS[len(shape)], 0)
        for place, x in zip(places, halves, strict=True):
            place[...] = x.registers.reshape(place.shape)
        signed = halves[0].is_signed
        return FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)

    return join(first, second)


def store_swizzled(ref, x, *, line: int, interpret: object):
    """Stores [64, n] in TILE to shared memory in tiles of 8 rows of `line` 16-bit columns.

    Unlike Pallas' own stores it does not let the warpgroup meet before and after.
    """
    if interpret:
        ref[...] = x
        return
    tiles = plgpu.RefType((plgpu.TilingTransform((8, line)), plgpu.SwizzleTransform(2 * line)))

    @plgpu.inline_mgpu(arg_types=(tiles, TILE))
    def store(_, ref, x):
        x.store_tiled(ref, swizzle=2 * line)

    store(ref, x)


def store_plain(ref, x, *, layout=TILE, interpret: object):
    """Stores registers to a shared-memory ref with plain rows, bank conflicts and all.

    Unlike Pallas' own stores it does not let the warpgroup meet before and after.
    """
    if interpret:
        ref[...] = x
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def store(_, ref, x):
        x.store_untiled(ref, optimized=False)

    store(ref, x)
