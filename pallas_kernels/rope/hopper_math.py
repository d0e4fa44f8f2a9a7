"""The arithmetic of QK-norm and rotation on Hopper, with every multiply-add spelled out.

Mosaic lets the compiler contract a * b + c, and which of two products it then rounds follows the
code around them. So nothing here is left to it: `fma(a, b, c)` is rounded once, and other products
and sums of float32 are rounded each.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, math, vector

from . import hopper_rows
from .hopper_rows import ROW, ROWS, TILE

WORDS = 4  # of two columns each, in a thread's vector


def rotated(low, high, cos, sin, interpret: bool):
    """fma(low, cos, -(high sin)) and fma(high, cos, low sin), float32 [32, half] each."""
    if interpret:
        return low * cos - high * sin, high * cos + low * sin
    out = plgpu.ShapeDtypeStruct(low.shape, jnp.float32, TILE)

    @plgpu.inline_mgpu(arg_types=(TILE,) * 4, return_type=(out, out))
    def turn(_, low, high, cos, sin):
        def lower(low, high, cos, sin):
            return math.fma(low, cos, arith.negf(arith.mulf(high, sin)))

        def upper(high, low, cos, sin):
            return math.fma(high, cos, arith.mulf(low, sin))

        return low._pointwise(lower, high, cos, sin), high._pointwise(upper, low, cos, sin)

    return turn(low, high, cos, sin)


def mean_of_squares(low, high, eps: float, interpret: bool):
    """fma(sum of squares of both halves, 1 / Dh, eps), float32 [32]; low and high [32, half].

    Columns stand in groups of 8, and four threads share a row: thread t adds the squares of columns
    2 t and 2 t + 1 of each group, even groups and odd groups apart. Of these it first adds, for
    each of its two columns, those of the two least groups, fma(x, x, y y) with x of the lesser one,
    then fma(x, x, sum) in ascending order; then even and odd, then its two columns, then threads 0
    and 1 as well as 2 and 3, then both. The halves come last.
    """
    half = low.shape[1]
    if interpret:
        wide = (side.astype(jnp.float32) for side in (low, high))
        lower, upper = (jnp.sum(side * side, axis=1) for side in wide)
        return (lower + upper) * (1.0 / (2 * half)) + eps
    result = plgpu.ShapeDtypeStruct((ROWS,), jnp.float32, ROW)

    @plgpu.inline_mgpu(arg_types=(TILE, TILE), return_type=result)
    def mean(_, low, high):
        float32 = ir.F32Type.get()
        total = arith.addf(_sum_of_squares(low), _sum_of_squares(high))
        scale, shift = mgpu.c(1.0 / (2 * half), float32), mgpu.c(eps, float32)
        mean = math.fma(total, scale, shift)
        return hopper_rows.row_of(vector.broadcast(ir.VectorType.get((1,), float32), mean))

    return mean(low, high)


def _sum_of_squares(side):
    """The sum of a row's half, in each of its four threads."""
    pairs = _own_columns(side)
    both = arith.addf(_chain(*pairs[0::2]), _chain(*pairs[1::2]))
    total = arith.addf(*(vector.extract(both, [], [i]) for i in range(2)))
    for distance in (1, 2):
        total = arith.addf(total, utils.shfl_bfly(total, distance))
    return total


def _chain(first, second, *later):
    total = math.fma(first, first, arith.mulf(second, second))
    for x in later:
        total = math.fma(x, x, total)
    return total


def _own_columns(side) -> list:
    """float32 pairs of columns 2 t and 2 t + 1 of each group of 8, in thread t of a row.

    A thread has loaded one whole group of each four; the four threads exchange words.
    """
    i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), side.mlir_dtype)
    wide = ir.VectorType.get((2,), ir.F32Type.get())
    thread = arith.remui(utils.thread_idx(), mgpu.c(WORDS, i32))
    zero = mgpu.c(0, i32)
    odd, upper = (
        arith.cmpi(arith.CmpIPredicate.ne, arith.andi(thread, mgpu.c(bit, i32)), zero)
        for bit in (1, 2)
    )
    found = []
    for register in side.registers.flat:
        words = utils.bitcast(register, ir.VectorType.get((WORDS,), i32))
        words = [vector.extract(words, [], [i]) for i in range(WORDS)]
        # Words 0 and 1 to the lower two threads, 2 and 3 to the upper two.
        kept = [arith.select(upper, words[2 + i], words[i]) for i in range(2)]
        sent = [arith.select(upper, words[i], words[2 + i]) for i in range(2)]
        got = [utils.shfl_bfly(word, 2) for word in sent]
        groups = [
            [arith.select(upper, got[i], kept[i]) for i in range(2)],
            [arith.select(upper, kept[i], got[i]) for i in range(2)],
        ]
        # Of what is left, the even word to the even thread.
        for even_word, odd_word in groups:
            other = utils.shfl_bfly(arith.select(odd, even_word, odd_word), 1)
            found.append(arith.select(odd, other, even_word))
            found.append(arith.select(odd, odd_word, other))
    return [arith.extf(wide, utils.bitcast(word, pair)) for word in found]
