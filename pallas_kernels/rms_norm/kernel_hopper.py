"""RMS norm with the residual add on Hopper: one warpgroup a row, straight from global memory.

    stream = round(x + residual)        normed = round(stream / sqrt(mean(stream^2) + eps) * scale)

Order of additions: the row lies strided over the warpgroup's 128 threads, a thread holding every
128th vector of `vec` neighbouring columns. It adds the squares of its vectors lane by lane, in
8 / vec sums that take turns, those in ascending order, and then the lanes; the 32 threads of a warp
are added by butterflies and the four warps by a tree. A row that is no multiple of 256 columns has
a second piece, its last 256 columns; those that the first piece holds count as zero there, and the
second sum is added to the first. Squares are rounded before they are added. All of it follows the
hidden size alone.

Grid: one CTA a row, whose loads are all in flight at once; several CTAs share a multiprocessor.
"""

import dataclasses
import functools
import operator

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .topology import RmsNormTopology

THREADS = 128  # of one warpgroup
VECTORS = (8, 4, 2)  # columns a thread holds together
SHORTEST = THREADS * VECTORS[-1]  # columns of the shortest piece
LONGEST = 16384  # columns that the registers of a warpgroup hold
ALIGNMENT = 64  # columns
REDUCTION_SCRATCH_BYTES = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """Columns [start, start + size) of a row; the first `foreign` belong to the piece before."""

    start: int
    size: int
    foreign: int = 0

    @property
    def layout(self):
        vec = next(v for v in VECTORS if self.size % (THREADS * v) == 0)
        return plgpu.Layout.WG_STRIDED((self.size,), vec_size=vec)

    @property
    def columns(self):
        return pl.ds(self.start, self.size)

    def own(self, values):
        """The values, zero in foreign columns."""
        if not self.foreign:
            return values
        place = plgpu.broadcasted_iota(jnp.int32, (self.size,), 0, layout=self.layout)
        return jnp.where(place < self.foreign, jnp.zeros_like(values), values)


def pieces_of(hidden_size: int) -> tuple[Piece, ...]:
    """How a row of `hidden_size` columns, 256 or more, is cut."""
    whole = hidden_size // SHORTEST * SHORTEST
    first = Piece(start=0, size=whole)
    if whole == hidden_size:
        return (first,)
    start = hidden_size - SHORTEST
    return first, Piece(start=start, size=SHORTEST, foreign=whole - start)


def _body(*refs, hidden_size: int, real_size: int, eps: float, add: bool):
    inputs, scale_gmem, outputs = refs[: 1 + add], refs[1 + add], refs[2 + add :]
    pieces = pieces_of(hidden_size)
    row = lax.axis_index("row")

    def load(ref):
        return [plgpu.load(ref.at[p.columns], layout=p.layout, optimized=False) for p in pieces]

    arrays, scales = [load(ref.at[row]) for ref in inputs], load(scale_gmem)
    store_normed(pieces, arrays, scales, outputs, row=row, real_size=real_size, eps=eps)


def store_normed(pieces, arrays, scales, outputs, *, row, real_size: int, eps: float) -> None:
    """A row in registers, and perhaps its residual, to its norm and the new stream.

    Args:
      pieces: of the row.
      arrays: of x, and perhaps of the residual, the values of each piece.
      scales: those of each piece.
      outputs: refs [M, D] of the norm and, with a residual, of the stream.
      row, real_size, eps: which row, its columns that are no padding, the constant.
    """
    dtype = scales[0].dtype

    def store(ref, values):
        for piece, value in zip(pieces, values, strict=True):
            ref[row, piece.columns] = value

    def wide(values):
        return [v.astype(jnp.float32) for v in values]

    streams = wide(arrays[0])
    if len(arrays) == 2:
        pairs = zip(streams, wide(arrays[1]), strict=True)
        rounded = [(x + r).astype(dtype) for x, r in pairs]
        store(outputs[1], rounded)
        streams = wide(rounded)
    squares = [_sum_of_squares(p, s) for p, s in zip(pieces, streams, strict=True)]
    mean = lax.optimization_barrier(functools.reduce(operator.add, squares) * (1.0 / real_size))
    factor = lax.rsqrt(mean + eps)
    pairs = zip(streams, wide(scales), strict=True)
    store(outputs[0], [(stream * factor * scale).astype(dtype) for stream, scale in pairs])


def _sum_of_squares(piece: Piece, values):
    # The barrier keeps the products out of the sum, where they could become multiply-adds.
    return jnp.sum(lax.optimization_barrier(piece.own(values * values)))


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def _launch(*arrays: jax.Array, eps: float, interpret: bool) -> tuple[jax.Array, ...]:
    """arrays: x [M, D], perhaps the residual [M, D], scale [D]."""
    add = len(arrays) == 3
    rows, real_size = arrays[0].shape
    hidden_size = max(real_size, SHORTEST)
    if hidden_size != real_size:
        widths = ((0, 0), (0, hidden_size - real_size))
        arrays = tuple(jnp.pad(a, widths[-a.ndim :]) for a in arrays)
    out = jax.ShapeDtypeStruct((rows, hidden_size), arrays[0].dtype)
    outs = plgpu.kernel(
        functools.partial(_body, hidden_size=hidden_size, real_size=real_size, eps=eps, add=add),
        out_type=(out,) * (2 if add else 1),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=REDUCTION_SCRATCH_BYTES),
        kernel_name="add_rms_norm" if add else "rms_norm",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(*arrays)
    return tuple(o[:, :real_size] for o in outs)


def _check(x: jax.Array) -> None:
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise NotImplementedError(
            f"rms_norm on Hopper takes bfloat16, float16 or float32, got {x.dtype}"
        )
    if x.shape[1] % ALIGNMENT or x.shape[1] > LONGEST:
        raise NotImplementedError(
            f"rms_norm on Hopper takes hidden sizes that are a multiple of {ALIGNMENT} up to "
            f"{LONGEST}, got {x.shape[1]}"
        )


def rms_norm_hopper(
    x: jax.Array, scale: jax.Array, *, eps: float, interpret: bool = False
) -> jax.Array:
    """x [M, D], scale [D] -> normed [M, D]; see `api.rms_norm`.

    Raises:
      NotImplementedError: another dtype, or a hidden size that does not fit.

    Invariance: the bits of row m depend on x[m], scale and eps only.
    """
    _check(x)
    return _launch(x, scale, eps=eps, interpret=interpret)[0]


def add_rms_norm_hopper(
    x: jax.Array, residual: jax.Array, scale: jax.Array, *, eps: float, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """x, residual [M, D], scale [D] -> (normed, stream) [M, D]; see `api.add_rms_norm`.

    Raises and Invariance as for `rms_norm_hopper`, the row's residual included.
    """
    _check(x)
    normed, stream = _launch(x, residual, scale, eps=eps, interpret=interpret)
    return normed, stream


def rms_norm_hopper_op(
    x: jax.Array,
    scale: jax.Array,
    num_rows: jax.Array,
    *,
    eps: float,
    topology: RmsNormTopology,
) -> tuple[jax.Array]:
    """`rms_norm_hopper` as an implementation of the primitive."""
    del num_rows, topology  # the hidden size fixes this kernel's order of additions
    return (rms_norm_hopper(x, scale, eps=eps),)


def add_rms_norm_hopper_op(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array,
    num_rows: jax.Array,
    *,
    eps: float,
    topology: RmsNormTopology,
) -> tuple[jax.Array, jax.Array]:
    """`add_rms_norm_hopper` as an implementation of the primitive."""
    del num_rows, topology
    return add_rms_norm_hopper(x, residual, scale, eps=eps)
