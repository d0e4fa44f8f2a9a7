"""The product of queries and keys, started without an accumulator of zeros.

Pallas starts a product with zeroed registers: 64 moves a thread at every block, with nothing to do
beside them. Here the first step overwrites its accumulator, which adds the same numbers.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir.dialects import llvm, nvvm
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import mma_utils
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray, optimization_barrier
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from .hopper_math import TILE
from .schedule import WARPGROUP_ROWS

IN_FLIGHT = plgpu.Layout._WGMMA_ACC_32BIT
SWIZZLE = 128  # bytes: a group of columns of queries and keys
GROUP = SWIZZLE // 2
STEP = 16  # columns of an instruction


def start_product(q_ref, k_ref, *, interpret: object):
    """Starts q k^T of [m, Dh] and [n, Dh] in shared memory; only `awaited` may read it.

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
        shape, element = ir.MemRefType(q.type).shape, ir.MemRefType(q.type).element_type
        keys = mgpu.memref_transpose(k, (1, 0, 3, 2))
        places = (
            _places(q, (WARPGROUP_ROWS, GROUP), rhs=False),
            _places(keys, (GROUP, columns), rhs=True),
        )
        nvvm.wgmma_fence_aligned()
        registers = []
        for part in range(rows // WARPGROUP_ROWS):
            sums = []
            for group in range(shape[1]):
                for step in range(GROUP // STEP):
                    at = [place(m, group, step) for m, place in zip((part, 0), places, strict=True)]
                    sums = _step(sums, *at, columns, element)
            registers += sums
        _effect("wgmma.commit_group.sync.aligned;")
        layout = IN_FLIGHT.to_mgpu()
        held = np.array(registers, dtype=object).reshape(layout.registers_shape(result.shape))
        return FragmentedArray(_registers=held, _layout=layout, _is_signed=None)

    return start(q_ref, k_ref)


def _places(ref, group_size: tuple[int, int], *, rhs: bool):
    """Where a step finds its operand: (64 rows of the left one, columns, step) -> descriptor."""
    (base, (_, (a_step,))), (a_part, a_group), _ = mma_utils.create_descriptor(
        ref,
        swizzle=SWIZZLE,
        large_tile=(GROUP, GROUP),
        group_size=group_size,
        logical_k_major=rhs,
    )

    def place(part: int, group: int, step: int):
        i64 = ir.IntegerType.get_signless(64)
        offset = mma_utils.encode_addr(part * a_part + group * a_group + step * a_step)
        flags = llvm.IntegerOverflowFlags.none
        return llvm.add(base, arith.constant(i64, offset), overflow_flags=flags)

    return place


def _step(registers: list, q, k, columns: int, element) -> list:
    """One wgmma instruction; it overwrites its accumulator where there are no registers yet."""
    count = columns // 2
    value = ir.VectorType.get((1,), ir.F32Type.get())
    constraints = ["=f"] * count + [str(i) for i in range(len(registers))] + ["l", "l"]
    accumulator = ",".join(f"${i}" for i in range(count))
    at = count + len(registers)
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, {int(bool(registers))}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{columns}k{STEP}.f32.{element}.{element} "
        f"{{{accumulator}}}, ${at}, ${at + 1}, p, 1, 1, 0, 0; }}"
    )
    out = llvm.inline_asm(
        llvm.StructType.get_literal([value] * count),
        [*registers, q, k],
        text,
        ",".join(constraints),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(value, out, [i]) for i in range(count)]


def awaited(product, *, interpret: object):
    """The product's numbers, float32 [m, n], once nothing is in flight."""
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
