"""Zeros in the rows that hold no query: they cost the tensor cores less power than numbers do.

A decode tile has up to 64 rows of queries and stores those of one token. What the others hold
reaches no stored number, since a row of a product depends on no other row of its operand.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir.dialects import llvm
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from .hopper_math import HALF_TILE, LOWEST, TILE, splat
from .hopper_problem import I32, Cta, Item

HIGHEST = -LOWEST  # a running maximum under which every exponential is zero
EIGHT = 8  # rows of a tile in shared memory
CHUNK = 8  # 16-bit numbers of one store
THREADS = 128  # of a warpgroup
TILES = plgpu.RefType((plgpu.TilingTransform((EIGHT, 64)), plgpu.SwizzleTransform(128)))
SCALAR = plgpu.Layout.WG_SPLAT(())


def first_maxima(item: Item, cta: Cta):
    """The running maximum float32[rows] before any key; with it p = 0 where no query is."""
    row = plgpu.broadcasted_iota(I32, (cta.rows,), 0, layout=cta.row)
    token = row & (cta.row_of(1, 0) - 1)
    holds = (token >= item.begin) & (token < item.end) & (row < cta.row_of(cta.problem.group, 0))
    return jnp.where(holds, jnp.float32(LOWEST), jnp.float32(HIGHEST))


def empty_rows(item: Item, wg, cta: Cta):
    """Zeroes the rows of other requests, and of nobody, among an item's loaded queries.

    Returns zeros [rows, kv_block] for `row_operand`.
    """
    q_ref, problem = cta.memory.q_smem.at[wg], cta.problem
    if cta.interpret:
        row = plgpu.broadcasted_iota(I32, q_ref.shape, 0, layout=TILE)
        token = lax.rem(row, I32(problem.tokens))
        holds = (token >= item.begin) & (token < item.end)
        holds &= row < problem.group * problem.tokens
        q_ref[...] = jnp.where(holds, q_ref[...], jnp.zeros(q_ref.shape, problem.dtype))
        return jnp.zeros((cta.rows, problem.kv_block), problem.dtype)
    _store_zeros(q_ref, item.begin, item.end, cta)
    plgpu.commit_smem()
    return _load_zeros(q_ref, cta)


def _store_zeros(q_ref, begin, end, cta: Cta):
    """A thread stores sixteen bytes of each eight rows; a row's place knows nothing of swizzles."""
    problem = cta.problem

    @plgpu.inline_mgpu(arg_types=(TILES, SCALAR, SCALAR))
    def store(_, q, begin, end):
        eights, tiles, _, width = ir.MemRefType(q.type).shape
        i32, chunks = ir.IntegerType.get_signless(32), width // CHUNK
        zeros = splat(0.0, ir.VectorType.get((CHUNK,), ir.MemRefType(q.type).element_type))
        thread = arith.remui(utils.thread_idx(), mgpu.c(THREADS, i32))
        rest, chunk = _split(thread, chunks)
        rest, row = _split(rest, EIGHT)
        _, tile = _split(rest, tiles)
        place = [_index(tile), _index(row), _index(arith.muli(chunk, mgpu.c(CHUNK, i32)))]

        def put(eight: int):
            at = [mgpu.c(eight, ir.IndexType.get()), *place]
            vector.store(zeros, q, at, alignment=2 * CHUNK)

        tokens = range(0, problem.group * problem.tokens, problem.tokens)
        with_queries = [eight for eight in range(eights) if eight * EIGHT in tokens]
        for eight in set(range(eights)) - set(with_queries):
            put(eight)
        before = arith.cmpi(arith.CmpIPredicate.slt, row, begin.registers.item())
        behind = arith.cmpi(arith.CmpIPredicate.sge, row, end.registers.item())
        with mgpu.when(arith.ori(before, behind)):
            for eight in with_queries:
                put(eight)

    store(q_ref, begin, end)


def _split(x, n: int):
    """(x // n, x % n)."""
    n = mgpu.c(n, ir.IntegerType.get_signless(32))
    return arith.divui(x, n), arith.remui(x, n)


def _index(x):
    return arith.index_castui(ir.IndexType.get(), x)


def _load_zeros(q_ref, cta: Cta):
    """Zeros in registers of their own, for ptxas numbers like others.

    Constants it makes between the products that need them, which then wait for one another.
    """
    shape = (cta.rows, cta.problem.kv_block)
    result = plgpu.ShapeDtypeStruct(shape, cta.problem.dtype, HALF_TILE)

    @plgpu.inline_mgpu(arg_types=(TILES,), return_type=result)
    def load(_, q):
        pair = ir.VectorType.get((2,), ir.MemRefType(q.type).element_type)
        never_a_query = utils.memref_ptr(utils.memref_slice(q, (1, 0)))
        layout = HALF_TILE.to_mgpu()
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        for at in np.ndindex(registers.shape):
            i32 = ir.IntegerType.get_signless(32)
            # Volatile, so that they are not taken for one and the same number.
            value = llvm.load(i32, never_a_query, volatile_=True, alignment=4)
            registers[at] = llvm.bitcast(pair, value)
        return FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(q_ref)
