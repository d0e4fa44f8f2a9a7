"""The sum over ranks, the residual add and the RMS norm of a row in one kernel over peers.

    x = round(sum over ranks r of part_r)             in the order of the sum's topology, float32
    stream = round(x + residual)        normed = round(stream / sqrt(mean(stream^2) + eps) * scale)

Bit for bit what `merge_peers_hopper` and then `add_rms_norm_hopper` give: a thread exchanges just
the columns that it norms. For the few rows of a decode step, where a launch costs as much as the
exchange. Grid: one CTA a row.
"""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from ..merge import MergeTopology
from ..merge.peer_exchange import Exchange
from ..merge.peer_layout import TERMS_CTAS, TERMS_ROUNDS, WORDS_CTAS, WORDS_ROUNDS
from .kernel_hopper import REDUCTION_SCRATCH_BYTES, THREADS, VECTORS, pieces_of, store_normed
from .topology import RmsNormTopology

VEC = VECTORS[0]
COLUMNS = THREADS * VEC
MOST_ROWS = min(TERMS_CTAS, WORDS_CTAS)
MOST_COLUMNS = THREADS * min(4 * TERMS_ROUNDS, 2 * WORDS_ROUNDS)
WORDS_ROWS = 16  # up to these every number has a flag of its own; schedule


def fits_peer_norm(shape: tuple[int, ...]) -> bool:
    """Whether the kernel takes a term [M, D]."""
    rows, columns = shape
    return 0 < rows <= MOST_ROWS and columns % COLUMNS == 0 and 0 < columns <= MOST_COLUMNS


def _body(part_gmem, table_gmem, residual_gmem, scale_gmem, *outputs, topology, eps, words):
    columns = part_gmem.shape[1]
    ranks = table_gmem.shape[0] - 1
    dtype = residual_gmem.dtype
    (piece,) = pieces_of(columns)
    row = lax.axis_index("row")
    result = plgpu.ShapeDtypeStruct((columns,), dtype, piece.layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 2, return_type=result)
    def summed(_, part, table):
        ex = Exchange(ranks, topology, dtype.name, table)
        width = 2 if words else 4
        first = arith.addi(ex.times(ex.cta, columns), ex.times(ex.thread, VEC))
        base = arith.addi(ex.address_of(part), ex.times(ex.wide(first), 4))
        held = [
            ex.load(base, width, at=4 * (start + i))
            for start in range(0, columns, COLUMNS)
            for i in range(0, VEC, width)
        ]
        sums = (ex.words if words else ex.terms)(held)
        packed = [word for values in sums for word in ex.rounded(values)]
        each = len(packed) * COLUMNS // columns
        vectors = [packed[i : i + each] for i in range(0, len(packed), each)]
        element = {"bfloat16": ir.BF16Type, "float16": ir.F16Type}[dtype.name].get()
        return fragmented_array.FragmentedArray(
            _registers=np.array([_vector(v, element, ex.i32) for v in vectors], dtype=object),
            _layout=fragmented_array.WGStridedFragLayout((columns,), VEC),
            _is_signed=None,
        )

    def load(ref):
        return [plgpu.load(ref.at[piece.columns], layout=piece.layout, optimized=False)]

    # Asked for before the ranks wait for one another.
    residual, scale = load(residual_gmem.at[row]), load(scale_gmem)
    arrays = [[summed(part_gmem, table_gmem)], residual]
    store_normed((piece,), arrays, scale, outputs, row=row, real_size=columns, eps=eps)


def _vector(words, element, i32):
    """Words of 32 bits -> one vector of VEC narrow floats."""
    whole = vector.from_elements(ir.VectorType.get((len(words),), i32), words)
    return utils.bitcast(whole, ir.VectorType.get((VEC,), element))


@functools.partial(jax.jit, static_argnames=("eps", "topology", "words"))
def peer_add_rms_norm_hopper(
    part: jax.Array,
    table: jax.Array,
    residual: jax.Array,
    scale: jax.Array,
    *,
    eps: float,
    topology: MergeTopology,
    words: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """part float32, residual [M, D], scale [D] -> (normed, stream) [M, D].

    Args:
      part: this rank's term, of a shape that `fits_peer_norm`.
      table: uint32 [ranks + 1, 2], see `Exchange`.
      residual, scale: bfloat16 or float16.
      eps, topology: of the norm, and the order of the sum over ranks.
      words: whether numbers have flags of their own; None: by the number of rows. Schedule.

    Invariance: the bits of row m depend on all ranks' part[m], residual[m], scale and eps.
    """
    rows, columns = part.shape
    words = rows <= WORDS_ROWS if words is None else words
    out = jax.ShapeDtypeStruct((rows, columns), residual.dtype)
    kernel = plgpu.kernel(
        functools.partial(_body, topology=topology, eps=eps, words=words),
        out_type=(out, out),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=REDUCTION_SCRATCH_BYTES),
        kernel_name="peer_add_rms_norm",
    )
    normed, stream = kernel(part, table, residual, scale)
    return normed, stream


def peer_add_rms_norm_op(
    part: jax.Array,
    table: jax.Array,
    residual: jax.Array,
    scale: jax.Array,
    *,
    eps: float,
    merge: MergeTopology,
    topology: RmsNormTopology,
) -> tuple[jax.Array, jax.Array]:
    """`peer_add_rms_norm_hopper` as an implementation of the primitive."""
    del topology  # the hidden size fixes this kernel's order of additions
    return peer_add_rms_norm_hopper(part, table, residual, scale, eps=eps, topology=merge)
