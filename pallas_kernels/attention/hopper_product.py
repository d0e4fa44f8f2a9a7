"""The product of queries and keys, started without an accumulator of zeros.

Pallas starts a product with zeroed registers: 64 moves a thread at every block, with nothing to do
beside them. Here the first step overwrites its accumulator, which adds the same numbers.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import mma_utils
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray, optimization_barrier
from jax.extend.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from .hopper_math import TILE

IN_FLIGHT = plgpu.Layout._WGMMA_ACC_32BIT
STEP = 16  # columns of queries and keys a step
SWIZZLE = 128


def start_product(q_ref, k_ref, *, interpret: object):
    """Starts q k^T of [64, Dh] and [n, Dh] in shared memory; only `awaited` may read it.

    Column steps ascend as in Pallas' own product. The interpret mode computes it at once.
    """
    rows, columns = q_ref.shape[0], k_ref.shape[0]
    if interpret:

        def product(s_ref):
            plgpu.wgmma(s_ref, q_ref, k_ref.transpose((1, 0)))
            return s_ref[...]

        return pl.run_scoped(product, plgpu.ACC((rows, columns), jnp.float32))
    operand = plgpu.RefType((plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(SWIZZLE)))
    result = plgpu.ShapeDtypeStruct((rows, columns), jnp.float32, IN_FLIGHT)

    @plgpu.inline_mgpu(arg_types=(operand, operand), return_type=result)
    def start(_, q, k):
        i64 = ir.IntegerType.get_signless(64)
        group = SWIZZLE // 2
        (a, (_, a_step)), (_, a_group), _ = _descriptor(q, (rows, group), rhs=False)
        k = mgpu.memref_transpose(k, (1, 0, 3, 2))
        (b, (_, b_step)), (_, b_group), _ = _descriptor(k, (group, columns), rhs=True)
        nvvm.wgmma_fence_aligned()
        registers = []
        for n in range(ir.MemRefType(q.type).shape[1]):
            for i in range(group // STEP):
                at = [
                    llvm.add(
                        base,
                        arith.constant(i64, mma_utils.encode_addr(n * each + i * step)),
                        overflow_flags=llvm.IntegerOverflowFlags.none,
                    )
                    for base, each, step in ((a, a_group, a_step), (b, b_group, b_step))
                ]
                registers = _step(registers, *at, columns, ir.MemRefType(q.type).element_type)
        _effect("wgmma.commit_group.sync.aligned;")
        layout = IN_FLIGHT.to_mgpu()
        held = np.array(registers, dtype=object).reshape(layout.registers_shape(result.shape))
        return FragmentedArray(_registers=held, _layout=layout, _is_signed=None)

    return start(q_ref, k_ref)


def _descriptor(ref, group, *, rhs: bool):
    base, groups, fastest = mma_utils.create_descriptor(
        ref, swizzle=SWIZZLE, large_tile=(64, 64), group_size=group, logical_k_major=rhs
    )
    (value, (_, strides)) = base
    return (value, (None, strides[0])), groups, fastest


def _step(registers, a, b, columns: int, element):
    f32, count = ir.VectorType.get((1,), ir.F32Type.get()), columns // 2
    first = not registers
    inputs = [] if first else list(registers)
    constraints = ["=f"] * count + [str(i) for i in range(len(inputs))] + ["l", "l"]
    accumulator = ",".join(f"${i}" for i in range(count))
    at = count + len(inputs)
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, {int(not first)}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{columns}k{STEP}.f32.{element}.{element} "
        f"{{{accumulator}}}, ${at}, ${at + 1}, p, 1, 1, 0, 0; }}"
    )
    struct = llvm.StructType.get_literal([f32] * count)
    out = llvm.inline_asm(
        struct, [*inputs, a, b], text, ",".join(constraints), asm_dialect=0, has_side_effects=True
    )
    return [llvm.extractvalue(f32, out, [i]) for i in range(count)]


def awaited(product, *, interpret: object):
    """The product's numbers, float32 [64, n], once nothing is in flight."""
    if interpret:
        return product
    result = plgpu.ShapeDtypeStruct(product.shape, product.dtype, TILE)

    @plgpu.inline_mgpu(arg_types=(IN_FLIGHT,), return_type=result)
    def settle(_, x):
        _effect("wgmma.wait_group.sync.aligned 0;")
        return optimization_barrier(x).to_layout(TILE.to_mgpu())

    return settle(product)


def _effect(text: str):
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "", has_side_effects=True)
