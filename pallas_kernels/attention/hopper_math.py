"""Scalar arithmetic of the Hopper attention kernel with every multiply-add spelled out.

Mosaic lets the compiler contract a * b + c, and whether it does can depend on the code around it.
So the places where a product meets a sum call `fused_multiply_add`; nowhere else does a product
feed a sum.
"""

import math

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.extend.mlir.dialects import arith as mlir_arith
from jax.extend.mlir.dialects import math as mlir_math

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
LOWEST = float(
    jnp.finfo(jnp.float32).min
)  # stands for "no key yet" where -inf would make inf - inf

TILE = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)


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


def rows_to_tile(x, width: int):
    """float32[64] -> float32[64, width], a row's value in every column."""
    return jax.lax.broadcast_in_dim(x, (x.shape[0], width), [0])


def store_plain(ref, x, *, interpret: object):
    """Stores a tile in registers to a shared-memory ref with plain rows, bank conflicts and all."""
    if interpret:
        ref[...] = x
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE))
    def store(_, ref, x):
        x.store_untiled(ref, optimized=False)

    store(ref, x)
