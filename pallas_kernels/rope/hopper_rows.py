"""Rows of heads between global memory and registers on Hopper, each row at a place of its own.

A tile holds 32 rows of half a head in the registers of one warpgroup: four threads a row, each of
which has 8 neighbouring columns of every 32, so that global memory is read and written 16 bytes a
thread.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

ROWS = 32  # of a tile
INTERPRETED_ROWS = 8  # of a tile in the interpreter, which stores row by row
VECTOR = 8  # columns a thread holds together
COLUMNS = 32  # that the four threads of a row hold together
TILE = plgpu.Layout.TILED(
    plgpu.Tiling(((ROWS, COLUMNS), (ROWS // 4, COLUMNS), (VECTOR,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
ROW = TILE.reduce(1)  # each row's value in its four threads


def rows_of_tile(tile, interpret: bool):
    """int32 [rows of a tile]: the rows of a tile."""
    count = INTERPRETED_ROWS if interpret else ROWS
    return tile * count + plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=ROW)


def load_rows(ref, rows, interpret: bool):
    """ref [T, half] in global memory -> [32, half]; rows beyond the last are copies of it.

    Args:
      rows: int32 [32], of consecutive rows.
    """
    if interpret:
        return ref[pl.ds(rows[0], INTERPRETED_ROWS)]
    count, half = ref.shape
    result = plgpu.ShapeDtypeStruct((ROWS, half), ref.dtype, TILE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROW), return_type=result)
    def load(_, ref, rows):
        kind = ir.VectorType.get((VECTOR,), ir.MemRefType(ref.type).element_type)
        row = _inside(one_row(rows), count)
        registers = [
            vector.load(kind, ref, [row, column], alignment=_bytes(kind))
            for column in _columns(half)
        ]
        return tile_of(registers, half)

    return load(ref, rows)


def load_numbers(ref, rows, interpret: bool):
    """ref int32 [T] in global memory -> [32]; those beyond the last are copies of it."""
    if interpret:
        return ref[pl.ds(rows[0], INTERPRETED_ROWS)]
    (count,) = ref.shape
    result = plgpu.ShapeDtypeStruct((ROWS,), jnp.int32, ROW)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROW), return_type=result)
    def load(_, ref, rows):
        kind = ir.VectorType.get((1,), ir.MemRefType(ref.type).element_type)
        return row_of(vector.load(kind, ref, [_inside(one_row(rows), count)]), is_signed=True)

    return load(ref, rows)


def store_rows(ref, values, *places, interpret: bool):
    """Writes values [32, half], each row where it belongs; rows that belong nowhere are left out.

    Args:
      ref: [A, half] or [A, B, half] in global memory.
      values: of ref's dtype.
      places: int32 [32] for each axis but the last; one of A or more belongs nowhere.
    """
    if interpret and len(places) == 1:
        ref[pl.ds(places[0][0], INTERPRETED_ROWS)] = values
        return
    if interpret:
        _store_one_by_one(ref, values, places)
        return
    count, *_, half = ref.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE, *(ROW for _ in places)))
    def store(_, ref, values, *places):
        places = [one_row(place) for place in places]
        bound = mgpu.c(count, places[0].type)
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, places[0], bound)):
            where = [arith.index_castui(ir.IndexType.get(), place) for place in places]
            for column, part in zip(_columns(half), values.registers.flat, strict=True):
                vector.store(part, ref, [*where, column], alignment=_bytes(part.type))

    store(ref, values, *places)


def across_columns(rows, half: int, interpret: bool):
    """float32 [32] -> [32, half]."""
    count = INTERPRETED_ROWS if interpret else ROWS
    return plgpu.layout_cast(lax.broadcast_in_dim(rows, (count, half), (0,)), TILE)


def across_rows(ref, interpret: bool):
    """ref [half] in global memory -> float32 [32, half]."""
    count = INTERPRETED_ROWS if interpret else ROWS
    values = plgpu.load(ref, layout=TILE.reduce(0), optimized=False).astype(jnp.float32)
    return plgpu.layout_cast(lax.broadcast_in_dim(values, (count, *values.shape), (1,)), TILE)


def one_row(rows):
    """The value that a thread holds of an array [32] over the rows."""
    return vector.extract(rows.registers.item(), [], [0])


def row_of(register, *, is_signed: bool | None = None):
    """The array [32] of which each thread holds this vector of one value."""
    registers = np.empty((1, 1, 1, 1), dtype=object)
    registers[0, 0, 0, 0] = register
    return mgpu.FragmentedArray(_registers=registers, _layout=ROW.to_mgpu(), _is_signed=is_signed)


def tile_of(parts, half: int):
    """The array [32, half] of which each thread holds these vectors, in order of columns."""
    layout = TILE.to_mgpu()
    registers = np.empty(len(parts), dtype=object)
    registers[:] = parts
    registers = registers.reshape(layout.registers_shape((ROWS, half)))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _store_one_by_one(ref, values, places):
    @pl.loop(0, INTERPRETED_ROWS)
    def _(row):
        where = [lax.dynamic_index_in_dim(place, row, keepdims=False) for place in places]

        @pl.when(where[0] < ref.shape[0])
        def _():
            value = lax.dynamic_index_in_dim(values, row, keepdims=False)
            ref[(*where, slice(None))] = value


def _inside(row, count: int):
    """The row as an index, the last one for those beyond."""
    last = mgpu.c(count - 1, row.type)
    return arith.index_castui(ir.IndexType.get(), arith.minui(row, last))


def _columns(half: int) -> list:
    """Where each of a thread's vectors begins."""
    _, first = next(iter(TILE.to_mgpu().thread_idxs((ROWS, half))))
    return [arith.addi(first, mgpu.c(at, first.type)) for at in range(0, half, COLUMNS)]


def _bytes(kind) -> int:
    return mgpu.bitwidth(kind) // 8
