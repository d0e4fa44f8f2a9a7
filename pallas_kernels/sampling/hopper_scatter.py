"""What the cut needs of a warpgroup and Pallas lacks: places in memory that follow the data.

An array lies as a block of logits does, element t + 128 i in thread t. The interpreter, which has
no inline code, does the same with array updates.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import llvm
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from ..log_softmax.hopper_blocks import I32, PLACES, THREADS

WARPS = 4

_REF = plgpu.RefType()


def append(lists, count, values, dropped, interpret: bool) -> None:
    """Adds what is not dropped of `values` to lists in shared memory, in any order.

    Args:
      lists: int32 [n, capacity]; what does not fit is left out.
      count: int32 [1] in shared memory, grows by the number of elements, fitting or not.
      values: arrays int32 [size].
      dropped: bool [size], what is left out.
    """
    capacity = lists.shape[1]
    if interpret:
        kept = 1 - dropped.astype(I32)
        slots = jnp.where(kept > 0, count[0] + jnp.cumsum(kept) - kept, capacity)
        for n, value in enumerate(values):
            lists[n] = lists[n].at[slots].set(value, mode="drop")
        count[0] = count[0] + jnp.sum(kept)
        return
    stores = "".join(
        f"@q st.shared.b32 [s+{4 * n * capacity}], ${n + 3}; " for n in range(len(values))
    )
    code = (
        "{ .reg .pred p, q; .reg .b32 s; setp.ne.b32 p, $2, 0; @!p bra passed; "
        f"atom.shared.add.u32 s, [$1], 1; setp.lt.u32 q, s, {capacity}; "
        f"shl.b32 s, s, 2; add.u32 s, s, $0; {stores}passed: }}"
    )

    layout = _layout(dropped)

    @plgpu.inline_mgpu(arg_types=(_REF, _REF, layout, *(layout for _ in values)))
    def store(_, lists, count, keep, *values):
        lists, count = _shared(lists), _shared(count)
        for flag, *mine in zip(_own(keep), *map(_own, values), strict=True):
            _run(code, lists, count, flag, *mine)

    store(lists, count, _flags(dropped), *values)


def add_at(table, slots, values, interpret: bool) -> None:
    """Adds to a warp's own sums in shared memory, modulo 2^32.

    What goes into the last slot, where many may meet, is added up on the way.

    Args:
      table: int32 [WARPS, n, PLACES].
      slots: int32 [size], from 0 to PLACES - 1.
      values: n arrays int32 [size].
    """
    if interpret:
        warps = jnp.arange(slots.size) % THREADS // (THREADS // WARPS)
        for n, value in enumerate(values):
            for warp in range(WARPS):
                kept = jnp.where(warps == warp, value, 0)
                table[warp, n] = table[warp, n].at[slots].add(kept)
        return
    count = len(values)
    offsets = [4 * n * PLACES for n in range(count)]
    adds = "".join(f"red.shared.add.u32 [$0+{at}], ${n + 2}; " for n, at in enumerate(offsets))
    code = f"{{ .reg .pred p; setp.ne.b32 p, $1, 0; @!p bra passed; {adds}passed: }}"
    by_one = "{ .reg .pred p; .reg .b32 l; mov.u32 l, %laneid; setp.eq.u32 p, l, 0; "
    by_one += "".join(
        f"@p red.shared.add.u32 [$0+{at}], ${n + 1}; " for n, at in enumerate(offsets)
    )
    layout = _layout(slots)

    @plgpu.inline_mgpu(arg_types=(_REF, layout, *(layout for _ in values)))
    def add(_, table, slots, *values):
        i32 = ir.IntegerType.get_signless(32)
        zero, last = utils.c(0, i32), utils.c(PLACES - 1, i32)
        warp = arith.shrui(utils.thread_idx(), utils.c(5, i32))
        start = arith.addi(_shared(table), arith.muli(warp, utils.c(4 * count * PLACES, i32)))
        sums, rest = [zero] * count, []
        for slot, *mine in zip(_own(slots), *map(_own, values), strict=True):
            elsewhere = arith.cmpi(arith.CmpIPredicate.ne, slot, last)
            sums = [
                arith.addi(total, arith.select(elsewhere, zero, value))
                for total, value in zip(sums, mine, strict=True)
            ]
            rest.append((slot, arith.extui(i32, elsewhere), mine))
        everyone = utils.c(-1, i32)
        sums = [utils.redux(total, everyone, utils.ReductionKind.ADD) for total in sums]
        _run(by_one + "}", arith.addi(start, utils.c(4 * (PLACES - 1), i32)), *sums)
        for slot, flag, mine in rest:
            address = arith.addi(start, arith.shli(slot, utils.c(2, i32)))
            _run(code, address, flag, *mine)

    add(table, slots, *values)


def store_at(ref, slots, values, limit: int, interpret: bool) -> None:
    """Writes values int32 [size] into ref [limit] in global memory where slots are below limit."""
    if interpret:
        ref[...] = ref[...].at[jnp.where(slots < limit, slots, limit)].set(values, mode="drop")
        return
    code = (
        f"{{ .reg .pred p; .reg .b64 a; setp.lt.u32 p, $1, {limit}; "
        "mad.wide.u32 a, $1, 4, $0; @p st.global.b32 [a], $2; }"
    )

    layout = _layout(slots)

    @plgpu.inline_mgpu(arg_types=(_REF, layout, layout))
    def store(_, ref, slots, values):
        address = llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(ref))
        for slot, value in zip(_own(slots), _own(values), strict=True):
            _run(code, address, slot, value)

    store(ref, slots, values)


def _run(code: str, *arguments) -> None:
    utils.inline_ptx(code, *arguments, has_side_effects=True)


def _shared(ref):
    """The address of shared memory, 32 bits."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))


def _layout(array):
    return plgpu.Layout.WG_STRIDED(array.shape, vec_size=1)


def _flags(dropped):
    zeros = plgpu.layout_cast(jnp.zeros(dropped.shape, I32), _layout(dropped))
    return jnp.where(dropped, zeros, jnp.ones_like(zeros))


def _own(array):
    """The elements of this thread."""
    return [vector.extract(register, [], [0]) for register in array.registers.flat]
