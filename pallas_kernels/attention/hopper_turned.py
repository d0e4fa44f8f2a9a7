"""Decode with keys as rows: products of 8 columns, where others have 64 rows of mostly no query.

    s^T = k q^T   [kv_block, 8]        o^T = v^T p^T   [columns, 8]

An item is one token and KV head. Its columns are eight query heads that stand together, its own
`group` among them; what comes of the others is not stored. Products of single numbers are the same
and meet the same sums in the same order as elsewhere. The softmax is done in rows of keys again,
in a layout whose threads add what a thread of the other layouts adds, in their order.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, vector

from .hopper_math import EIGHTS, EIGHTS_ROW, TILE, store_plain
from .hopper_problem import Cta

COLUMN = plgpu.Layout.WGMMA.reduce(0)
CHUNK = 8  # 16-bit columns that swizzling keeps together
PLAIN = plgpu.RefType()
SWIZZLED = plgpu.RefType((plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def keys_to_columns(s, side, cta: Cta):
    """s^T float32[kv_block, 8] in TILE -> s [8, kv_block] in EIGHTS, through shared memory.

    `side`: which of the warpgroups with a softmax does it.
    """
    if cta.interpret:
        return s.T
    shape = s.shape[::-1]
    result = plgpu.ShapeDtypeStruct(shape, jnp.float32, EIGHTS)

    @plgpu.inline_mgpu(arg_types=(PLAIN, TILE), return_type=result)
    def turn(_, ref, s):
        _store_turned(ref, s)
        utils.warpgroup_barrier()
        layout = EIGHTS.to_mgpu()
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        one = ir.VectorType.get((1,), ir.F32Type.get())
        for at, place in zip(np.ndindex(registers.shape), layout.thread_idxs(shape), strict=True):
            registers[at] = vector.broadcast(one, memref.load(ref, list(place)))
        return FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return turn(cta.memory.s_smem.at[side], s)


def store_turned(ref, x, *, interpret: object):
    """x [n, 8] in TILE to a shared-memory ref [8, n or more] of plain rows."""
    if interpret:
        ref[...] = x.T
        return

    @plgpu.inline_mgpu(arg_types=(PLAIN, TILE))
    def store(_, ref, x):
        _store_turned(ref, x)

    store(ref, x)


def _store_turned(ref, x):
    places = x.layout.thread_idxs(x.shape)
    for (row, column), register in zip(places, x.registers.flat, strict=True):
        for n in range(ir.VectorType(register.type).shape[0]):
            at = arith.addi(column, arith.constant(ir.IndexType.get(), n))
            memref.store(_number(register, n), ref, [at, row])


def _number(register, n: int):
    return vector.extract(register, [], ir.DenseI64ArrayAttr.get([n]))


def keep_weights(p, alpha, side, cta: Cta):
    """p [8, kv_block] and alpha [8] to shared memory, for the product and for `factor_columns`."""
    mem = cta.memory
    store_plain(mem.alpha_smem.at[side], alpha, layout=EIGHTS_ROW, interpret=cta.interpret)
    if cta.interpret:
        mem.p_smem[side] = p
    else:

        @plgpu.inline_mgpu(arg_types=(SWIZZLED, EIGHTS))
        def store(_, ref, p):
            index = ir.IndexType.get()
            width = ir.MemRefType(ref.type).shape[-1]

            def constant(n):
                return arith.constant(index, n)

            zero, places = constant(0), p.layout.thread_idxs(p.shape)
            for (row, column), register in zip(places, p.registers.flat, strict=True):
                tile = arith.divui(column, constant(width))
                column = arith.remui(column, constant(width))
                chunk = arith.xori(arith.divui(column, constant(CHUNK)), row)
                within = arith.remui(column, constant(CHUNK))
                at = arith.addi(arith.muli(chunk, constant(CHUNK)), within)
                memref.store(_number(register, 0), ref, [zero, tile, row, at])

        store(mem.p_smem.at[side], p)
    plgpu.commit_smem()


def factor_columns(acc, factors_ref):
    """acc [n, 8] times the factors of its columns, float32[8] in shared memory."""
    factors = plgpu.load(factors_ref, layout=COLUMN, optimized=False)
    factors = lax.broadcast_in_dim(factors, acc.shape, [1])
    return acc * plgpu.layout_cast(factors, TILE)


def divide_columns(acc, total, cta: Cta):
    """acc [n, 8] times 1 / total [8]."""
    inverse = 1.0 / total
    to = cta.memory.inverse_smem.at[0]
    store_plain(to, inverse, layout=EIGHTS_ROW, interpret=cta.interpret)
    plgpu.commit_smem()
    return factor_columns(acc, to)


def add_turned_product(acc, p_ref, v_ref, cta: Cta):
    """acc + v^T p^T, waited for."""
    if cta.interpret:

        def product(acc_ref):
            plgpu.wgmma(acc_ref, v_ref.T, p_ref.T)
            return acc_ref[...]

        return acc + pl.run_scoped(product, plgpu.ACC(acc.shape, jnp.float32))

    def issue(acc_ref):
        plgpu.wgmma(acc_ref, v_ref.T, p_ref.T)

    return pl.run_state(issue)(plgpu.ACC.init(acc))
