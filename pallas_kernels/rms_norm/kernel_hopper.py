"""RMS norm with the residual add on Hopper: one CTA of one warpgroup a row.

    stream = round(x + residual)        normed = round(stream / sqrt(mean(stream^2) + eps) * scale)

Order of additions: the row, padded with zeros to a multiple of 128 lanes of `vec` columns, lies
strided over the warpgroup's 128 threads; each thread adds its own columns in ascending order, then
the threads are added by the warpgroup's shuffle tree. The layout follows the hidden size alone, so
a row's bits cannot follow the row count. Grid: one CTA a row.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .topology import RmsNormTopology

THREADS = 128  # of one warpgroup
WIDTH = 64  # columns of a staged line; TMA copies at most 256 lines
VECTORS = (8, 4, 2)  # columns a thread holds together
MAX_LINES = 256
REDUCTION_SCRATCH_BYTES = 1024


def vector_width(hidden_size: int) -> int:
    """Columns a thread holds together: the widest that needs no padding, else 2."""
    fitting = (v for v in VECTORS if hidden_size % (THREADS * v) == 0)
    return next(fitting, VECTORS[-1])


def padded_size(hidden_size: int) -> int:
    """The hidden size with its padded lanes."""
    lanes = THREADS * vector_width(hidden_size)
    return -(-hidden_size // lanes) * lanes


def _body(*refs, hidden_size: int, eps: float, add: bool):
    inputs, outputs, scratch = (refs[:3], refs[3:5], refs[5:]) if add else _without(refs)
    (*staged, normed_smem, loaded) = scratch
    lines, padded = hidden_size // WIDTH, padded_size(hidden_size)
    layout = plgpu.Layout.WG_STRIDED((padded // WIDTH, WIDTH), vec_size=vector_width(hidden_size))
    dtype = normed_smem.dtype
    row = lax.axis_index("row")

    def real(ref):
        return ref if padded == hidden_size else ref.at[pl.ds(0, lines)]

    def read(ref):
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    def clear_padding():
        for ref in staged:
            ref[...] = plgpu.layout_cast(jnp.zeros(ref.shape, dtype), layout)
        plgpu.commit_smem()

    def load_row():
        for source, target in zip(inputs, staged, strict=True):
            source = source if source is inputs[-1] else source.at[row]
            plgpu.copy_gmem_to_smem(source, real(target), loaded)
        plgpu.barrier_wait(loaded)

    if padded != hidden_size:
        clear_padding()
    load_row()
    total = read(staged[0])
    if add:
        total = (total + read(staged[1])).astype(dtype)
        staged[0][...] = total
        total = total.astype(jnp.float32)
    mean = jnp.sum(total * total) * (1.0 / hidden_size)
    normed = total * lax.rsqrt(mean + eps) * read(staged[-1])
    normed_smem[...] = normed.astype(dtype)
    plgpu.commit_smem()
    for source, target in zip((normed_smem, staged[0]), outputs, strict=False):
        plgpu.copy_smem_to_gmem(real(source), target.at[row])
    plgpu.wait_smem_to_gmem(0)


def _without(refs):
    """The references of the kernel that adds no residual."""
    return refs[:2], refs[2:3], refs[3:]


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def _launch(*arrays: jax.Array, eps: float, interpret: bool) -> tuple[jax.Array, ...]:
    """arrays: x [M, D], perhaps the residual [M, D], scale [D]."""
    add = len(arrays) == 3
    rows, hidden_size = arrays[0].shape
    dtype = arrays[0].dtype
    lines = hidden_size // WIDTH
    staged = plgpu.SMEM((padded_size(hidden_size) // WIDTH, WIDTH), dtype)
    out = jax.ShapeDtypeStruct((rows, lines, WIDTH), dtype)
    kernel = plgpu.kernel(
        functools.partial(_body, hidden_size=hidden_size, eps=eps, add=add),
        out_type=(out,) * (2 if add else 1),
        scratch_types=(
            *([staged] * len(arrays)),
            staged,
            plgpu.Barrier(num_arrivals=len(arrays)),
        ),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=REDUCTION_SCRATCH_BYTES),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )
    outs = kernel(*(a.reshape(*a.shape[:-1], lines, WIDTH) for a in arrays))
    return tuple(o.reshape(rows, hidden_size) for o in outs)


def _check(x: jax.Array) -> None:
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise NotImplementedError(
            f"rms_norm on Hopper takes bfloat16, float16 or float32, got {x.dtype}"
        )
    if x.shape[1] % WIDTH or x.shape[1] // WIDTH > MAX_LINES:
        raise NotImplementedError(
            f"rms_norm on Hopper takes hidden sizes that are a multiple of {WIDTH} up to "
            f"{WIDTH * MAX_LINES}, got {x.shape[1]}"
        )


def rms_norm_hopper(
    x: jax.Array, scale: jax.Array, *, eps: float, interpret: bool = False
) -> jax.Array:
    """x [M, D], scale [D] -> normed [M, D]; see `api.rms_norm`.

    Raises:
      NotImplementedError: another dtype, or a hidden size that TMA cannot stage.

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
