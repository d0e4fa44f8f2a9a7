"""Rows of heads between global memory and registers on Hopper, each row at a place of its own.

A tile holds 64 rows of half a head in the registers of one warpgroup. A thread holds `VECTOR`
neighbouring columns of a row at a time, four threads a row, so that global memory is read and
written in whole sectors, and what a norm adds up is a shuffle away from the tile of a wgmma.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

ROWS = 64  # of a tile
INTERPRETED_ROWS = 8  # of a tile in the interpreter, which stores row by row
VECTOR = 4  # columns a thread holds together
COLUMNS = 16  # that the four threads of a row hold together
TILE = plgpu.Layout.WGMMA
WIDE = plgpu.Layout.WGMMA_UPCAST_2X
ROW = WIDE.reduce(1)


def rows_of_tile(tile, interpret: bool):
    """int32 [64], the rows of a tile; fewer in the interpreter."""
    count = INTERPRETED_ROWS if interpret else ROWS
    return tile * count + plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=ROW)


def load_rows(ref, rows, interpret: bool):
    """ref [T, half] in global memory -> [64, half]; rows beyond the last are copies of it.

    Args:
      rows: int32 [64], of consecutive rows.
    """
    if interpret:
        return ref[pl.ds(rows[0], INTERPRETED_ROWS)]
    count, half = ref.shape
    result = plgpu.ShapeDtypeStruct((ROWS, half), ref.dtype, WIDE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROW), return_type=result)
    def load(_, ref, rows):
        layout = mgpu.WGMMA_LAYOUT_UPCAST_2X
        kind = ir.VectorType.get((VECTOR,), ir.MemRefType(ref.type).element_type)
        places = [_inside(row, count) for row in _each_row(rows)]

        def one(part, column):
            return vector.load(kind, ref, [places[part], column], alignment=_bytes(kind))

        return mgpu.FragmentedArray(
            _registers=_registers(layout, half, one), _layout=layout, _is_signed=None
        )

    return load(ref, rows)


def load_numbers(ref, rows, interpret: bool):
    """ref int32 [T] in global memory -> [64]; those beyond the last are copies of it."""
    if interpret:
        return ref[pl.ds(rows[0], INTERPRETED_ROWS)]
    (count,) = ref.shape
    result = plgpu.ShapeDtypeStruct((ROWS,), jnp.int32, ROW)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROW), return_type=result)
    def load(_, ref, rows):
        kind = ir.VectorType.get((1,), ir.MemRefType(ref.type).element_type)
        registers = rows.registers.copy()
        for part, row in enumerate(_each_row(rows)):
            registers[0, 0, part, 0, 0] = vector.load(kind, ref, [_inside(row, count)])
        return mgpu.FragmentedArray(_registers=registers, _layout=rows.layout, _is_signed=True)

    return load(ref, rows)


def store_rows(ref, values, *places, interpret: bool):
    """Writes values [64, half], each row where it belongs; rows that belong nowhere are left out.

    Args:
      ref: [A, half] or [A, B, half] in global memory.
      values: of ref's dtype.
      places: int32 [64] for each axis but the last; one of A or more belongs nowhere.
    """
    if interpret and len(places) == 1:
        ref[pl.ds(places[0][0], INTERPRETED_ROWS)] = values
        return
    if interpret:
        _store_one_by_one(ref, values, places)
        return
    half, count = ref.shape[-1], ref.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WIDE, *(ROW for _ in places)))
    def store(_, ref, values, *places):
        index = ir.IndexType.get()
        rows = list(zip(*(_each_row(place) for place in places), strict=True))
        for part, row in enumerate(rows):
            bound = mgpu.c(count, row[0].type)
            belongs = arith.cmpi(arith.CmpIPredicate.ult, row[0], bound)
            with mgpu.when(belongs):
                where = [arith.index_castui(index, place) for place in row]

                def one(this, column, part=part, where=where):
                    return (where, column) if this == part else None

                targets = _registers(values.layout, half, one)
                for target, register in zip(targets.flat, values.registers.flat, strict=True):
                    if target is not None:
                        where, column = target
                        size = _bytes(register.type)
                        vector.store(register, ref, [*where, column], alignment=size)

    store(ref, values, *places)


def across_columns(rows, half: int, interpret: bool):
    """float32 [64] over the rows of a wgmma tile -> [64, half]; the same threads hold both."""
    if interpret:
        return lax.broadcast_in_dim(rows, (*rows.shape, half), (0,))
    result = plgpu.ShapeDtypeStruct((ROWS, half), jnp.float32, WIDE)

    @plgpu.inline_mgpu(arg_types=(TILE.reduce(1),), return_type=result)
    def spread(_, rows):
        rows = mgpu.FragmentedArray(
            _registers=rows.registers, _layout=ROW.to_mgpu(), _is_signed=None
        )
        return rows.broadcast_in_dim((ROWS, half), (0,), WIDE.to_mgpu())

    return spread(rows)


def across_rows(ref, rows: int):
    """ref [half] in global memory -> float32 [rows, half]."""
    values = plgpu.load(ref, layout=WIDE.reduce(0), optimized=False).astype(jnp.float32)
    return plgpu.layout_cast(lax.broadcast_in_dim(values, (rows, *values.shape), (1,)), WIDE)


def _store_one_by_one(ref, values, places):
    @pl.loop(0, INTERPRETED_ROWS)
    def _(row):
        where = [lax.dynamic_index_in_dim(place, row, keepdims=False) for place in places]

        @pl.when(where[0] < ref.shape[0])
        def _():
            value = lax.dynamic_index_in_dim(values, row, keepdims=False)
            ref[(*where, slice(None))] = value


def _each_row(rows) -> list:
    """The int32 values of the two rows that a thread holds."""
    return [vector.extract(rows.registers[0, 0, part, 0, 0], [], [0]) for part in range(2)]


def _inside(row, count: int):
    """The row as an index, the last one for those beyond."""
    last = mgpu.c(count - 1, row.type)
    return arith.index_castui(ir.IndexType.get(), arith.minui(row, last))


def _registers(layout, half: int, one):
    """An array like the registers of [64, half]; one(part, column) gives an entry.

    part: which of the thread's two rows; column: where the register's columns begin.
    """
    index = ir.IndexType.get()
    _, first = next(iter(layout.thread_idxs((ROWS, half))))
    registers = np.empty(layout.registers_shape((ROWS, half)), dtype=object)
    for place in np.ndindex(registers.shape):
        column = arith.addi(first, mgpu.c(place[1] * COLUMNS, index))
        registers[place] = one(place[4], column)
    return registers


def _bytes(kind) -> int:
    return mgpu.bitwidth(kind) // 8
