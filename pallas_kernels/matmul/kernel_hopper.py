"""Matrix product on Hopper: out[m, n] = sum_k x[m, k] w[n, k], weights as checkpoints store them.

Order of additions: one float32 accumulator per output element, K ascending in wgmma's steps of 16,
never split. S segments of K have one accumulator each; their float32 sums are added by one
balanced binary tree of neighbours. Bias is added in float32; the result is rounded once. SwiGLU
multiplies a gate tile and an up tile side by side and keeps silu(gate) * up, computed in float32
from both accumulators.

Grid: clusters of CTAs walk the output tiles. In each CTA the last warpgroup loads tiles of x and w
through TMA and the others multiply. What lies outside the arrays is read as zero and not written.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .layout_hopper import Problem, scratch_spec
from .schedule import SM_REGISTERS, THREADS, Schedule, round_up

LOADER_REGISTERS = 40  # a thread
MAX_REGISTERS = 240  # a thread
OPERAND_DTYPES = (jnp.bfloat16, jnp.float16)
OUT_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
N_MULTIPLE = 8  # rows of a shared-memory tile
K_MULTIPLE = 64  # elements of a swizzled row
LOG2_E = 1.4426950408889634


def _tiles_here(p: Problem):
    """Output tiles that this CTA walks."""
    m_tiles, n_tiles = p.tiles
    return lax.div(m_tiles * n_tiles - 1 - lax.axis_index("grid"), p.clusters) + 1


def _tile_loop(p: Problem, tile, *, owner=0, owners: int = 1) -> None:
    """Calls tile(i, m0, n0) for each i-th output tile of this CTA, at row m0 and column n0.

    With several owners, only for the tiles that are the given owner's turn.
    """
    s = p.s
    m_tiles, n_tiles = p.tiles
    cluster = lax.axis_index("grid")

    def step(turn, _):
        i = turn * owners + owner
        m_i, n_i = plgpu.planar_snake(
            cluster + i * p.clusters,
            (m_tiles, n_tiles),
            0 if s.raster == "m" else 1,
            s.raster_width,
        )
        m_i = m_i * s.cluster_m + lax.axis_index("cluster_m")
        n_i = n_i * s.cluster_n + lax.axis_index("cluster_n")
        tile(i, m_i * s.tile_m, n_i * s.tile_n)

    lax.fori_loop(0, lax.div(_tiles_here(p) + (owners - 1) - owner, owners), step, None)


def _load_rows(p: Problem, x_gmem, x_smem, k_loaded, m0, k_i) -> None:
    """One step's rows of x."""
    plgpu.copy_gmem_to_smem(
        x_gmem.at[pl.ds(m0, p.x_rows), pl.ds(k_i * p.s.tile_k, p.s.tile_k)],
        x_smem.at[pl.ds(0, p.x_rows)],
        k_loaded,
        collective_axes="cluster_n" if p.s.cluster_n > 1 else None,
    )


def _load_weights(p: Problem, w_gmem, w_smem, k_loaded, n0, k_i) -> None:
    """One step's weights; SwiGLU lays each warpgroup's gate rows above its up rows."""
    rows = p.s.tile_n // p.chunks
    if p.stacked:
        w_gmem = w_gmem.at[lax.div(k_i, p.segment_steps)]
        k_i = lax.rem(k_i, p.segment_steps)
    k0 = k_i * p.s.tile_k
    for chunk in range(p.chunks):
        for part in range(p.parts):
            source = w_gmem if p.parts == 1 else w_gmem.at[part]
            plgpu.copy_gmem_to_smem(
                source.at[pl.ds(n0 + chunk * rows, rows), pl.ds(k0, p.s.tile_k)],
                w_smem.at[pl.ds((chunk * p.parts + part) * rows, rows)],
                k_loaded,
                collective_axes="cluster_m" if p.s.cluster_m > 1 else None,
            )


def _slot_of(p: Problem, count):
    """Stage of the step that comes `count` steps after this CTA's first."""
    return lax.rem(jnp.int32(count), jnp.int32(p.s.stages))


def _slot_after(p: Problem, slot):
    """Of the next step. A remainder by 3 or 5 in every step would hold the products up."""
    return lax.select(slot == p.s.stages - 1, jnp.int32(0), slot + 1)


def _slot_before(p: Problem, slot):
    return lax.select(slot == 0, jnp.int32(p.s.stages - 1), slot - 1)


def _loader(*operands, p: Problem) -> None:
    """Role of the last warpgroup: one warp, so that no copy waits for the others."""
    plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")

    @plgpu.warp_map
    def _of_warp(warp):
        pl.when(warp == 0)(functools.partial(_load, p, *operands))


def _load(p: Problem, x_gmem, w_gmem, x_smem, w_smem, k_loaded, k_consumed) -> None:
    """Keeps up to `stages` steps of x and w in flight."""
    s = p.s

    def load_tile(i, m0, n0):
        def load_step(k_i, slot):
            @pl.when((i > 0) | (k_i >= s.stages))
            def _wait_for_room():
                plgpu.barrier_wait(k_consumed.at[slot])

            loaded = k_loaded.at[lax.rem(i, p.owners) * s.stages + slot]
            loads = [
                lambda: _load_rows(p, x_gmem, x_smem.at[slot], loaded, m0, k_i),
                lambda: _load_weights(p, w_gmem, w_smem.at[slot], loaded, n0, k_i),
            ]
            for load in reversed(loads) if s.weights_first else loads:
                load()
            return _slot_after(p, slot)

        lax.fori_loop(0, p.k_steps, load_step, _slot_of(p, i * p.k_steps))

    _tile_loop(p, load_tile)

    # The other CTAs of the cluster still signal this one: leave only when every slot is free.
    def drain(count, _):
        plgpu.barrier_wait(k_consumed.at[_slot_of(p, count)])

    steps = _tiles_here(p) * p.k_steps
    lax.fori_loop(lax.max(steps - s.stages, 0), steps, drain, None)


def _multiply(p: Problem, i, segment: int, acc, x_smem, w_smem, k_loaded, k_consumed) -> None:
    """acc += x w^T over a segment of K: the only place where products are added."""
    s = p.s
    wg = lax.axis_index("wg")
    width = p.parts * s.part_n
    x_part = pl.ds(wg * s.part_m, s.part_m) if s.split == "m" else pl.ds(0, s.part_m)
    w_part = pl.ds(wg * width, width) if s.split == "n" else pl.ds(0, width)
    first = i * p.k_steps + segment * p.segment_steps

    def mma_step(k_i, slot):
        # Each owner counts the phases of its own barriers only.
        plgpu.barrier_wait(k_loaded.at[lax.rem(i, p.owners) * s.stages + slot])
        x_tile, w_tile = x_smem.at[slot, x_part], w_smem.at[slot, w_part]
        if s.swap:
            plgpu.wgmma(acc, w_tile, x_tile.T)
        else:
            plgpu.wgmma(acc, x_tile, w_tile.T)
        plgpu.wgmma_wait(s.inflight)

        @pl.when(k_i >= s.inflight)
        def _release():
            plgpu.barrier_arrive(k_consumed.at[_slot_before(p, slot) if s.inflight else slot])

        return _slot_after(p, slot)

    slot = lax.fori_loop(0, p.segment_steps, mma_step, _slot_of(p, first))
    if s.inflight:
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(k_consumed.at[_slot_before(p, slot)])


def _pass_over(p: Problem, i, k_loaded, k_consumed) -> None:
    """Gives every step of a tile back untouched."""

    def step(_, slot):
        plgpu.barrier_wait(k_loaded.at[slot])
        plgpu.barrier_arrive(k_consumed.at[slot])
        return _slot_after(p, slot)

    lax.fori_loop(0, p.k_steps, step, _slot_of(p, i * p.k_steps))


def _silu(gate):
    """gate / (1 + exp(-gate)) in six instructions: exp2 and the reciprocal root in fast forms."""
    root = lax.rsqrt(1.0 + jnp.exp2(gate * -LOG2_E))
    return gate * root * root


def _epilogue(p: Problem, y, bias):
    """Sums to rounded results, [part_m, part_n] or, swapped, [part_n, part_m]."""
    if p.parts == 2 and p.s.swap:
        y = _silu(y[: p.s.part_n]) * y[p.s.part_n :]
    elif p.parts == 2:
        y = _silu(y[:, : p.s.part_n]) * y[:, p.s.part_n :]
    if bias is not None:
        axis = 1 if p.s.swap else 0
        bias = plgpu.layout_cast(bias, plgpu.Layout.WGMMA.reduce(axis))
        y = y + lax.broadcast_in_dim(bias, y.shape, (1 - axis,))
    return y.astype(p.out_dtype)


def _store(p: Problem, y, out_smem, out_gmem, m0, n0) -> None:
    """Sends one warpgroup's results to global memory, block by block."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before may still be on its way
    rows, columns = p.out_block
    blocks = [(r, c) for r in range(0, p.s.part_m, rows) for c in range(0, p.s.part_n, columns)]
    for index, (r, c) in enumerate(blocks):
        block = out_smem.at[index % p.s.out_slots]
        if index >= p.s.out_slots:
            plgpu.wait_smem_to_gmem(p.s.out_slots - 1, wait_read_only=True)
        if p.s.swap:
            part = y[c : c + columns, r : r + rows]
            if part.dtype.itemsize == 4:  # pairs along a row of the output, for whole vectors
                part = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
            block.T[...] = part
        else:
            block[...] = y[r : r + rows, c : c + columns]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(block, out_gmem.at[pl.ds(m0 + r, rows), pl.ds(n0 + c, columns)])


def _parked_sum(parked, left, right_of):
    """left + right_of(), for which the first columns of left wait in shared memory."""
    columns = parked.shape[1]
    parked[...] = left[:, :columns]
    if columns == left.shape[1]:
        right = right_of()
        return parked[...] + right
    rest = lax.optimization_barrier(left[:, columns:])
    right = right_of()
    return jnp.concatenate([parked[...] + right[:, :columns], rest + right[:, columns:]], axis=1)


def consumer_registers(warpgroups: int) -> int:
    """Registers a thread of a multiplying warpgroup may take: more than there are never come.

    The CTA is launched with an equal share for each warpgroup; the loader gives most of its back.
    """
    share = SM_REGISTERS // (THREADS * (warpgroups + 1)) // 8 * 8
    free = (share * (warpgroups + 1) - LOADER_REGISTERS) // warpgroups
    return min(MAX_REGISTERS, free // 8 * 8)


def _consumer(p: Problem, bias_gmem, out_gmem, scratch) -> None:
    """Role of the other warpgroups: multiply, finish and store their part of each tile."""
    s = p.s
    wg = lax.axis_index("wg")
    plgpu.set_max_registers(consumer_registers(s.warpgroups), action="increase")

    def load_bias(n0):
        plgpu.commit_smem()  # reads of the tile before end here
        barrier = scratch["bias_loaded"].at[wg]
        bias_smem = scratch["bias_smem"].at[wg]
        plgpu.copy_gmem_to_smem(bias_gmem.at[pl.ds(n0, s.part_n)], bias_smem, barrier)
        plgpu.barrier_wait(barrier)
        return bias_smem[...]

    def compute_part(i, m0, n0):
        def finish(y):
            return _epilogue(p, y, None if bias_gmem is None else load_bias(n0))

        def sum_of(segment, then=lambda y: y):
            def with_acc(acc):
                names = ("x_smem", "w_smem", "k_loaded", "k_consumed")
                _multiply(p, i, segment, acc, *(scratch[name] for name in names))
                return then(acc[...])

            return pl.run_scoped(with_acc, plgpu.ACC(p.acc_shape, jnp.float32))

        def tree(first, count):
            """Depth first: one sum of each level waits, the root's partly in shared memory."""
            if count == 1:
                return sum_of(first)
            half = count // 2
            left = tree(first, half)
            if s.parked and count == p.segments:
                parked = scratch["parked"].at[wg]
                return _parked_sum(parked, left, lambda: tree(first + half, half))
            # Without the barrier the addition sinks to its use, and both terms wait till then.
            return lax.optimization_barrier(left + tree(first + half, half))

        y = sum_of(0, finish) if p.segments == 1 else finish(tree(0, p.segments))
        _store(p, y, scratch["out_smem"].at[wg], out_gmem, m0, n0)

    def compute_tile(i, m0, n0):
        m0 = m0 + (wg * s.part_m if s.split == "m" else 0)
        n0 = n0 + (wg * s.part_n if s.split == "n" else 0)
        if not p.empty_parts:
            compute_part(i, m0, n0)
            return
        # A warpgroup without rows leaves the tensor cores to the others.
        barriers = scratch["k_loaded"], scratch["k_consumed"]
        lax.cond(m0 < p.m, lambda: compute_part(i, m0, n0), lambda: _pass_over(p, i, *barriers))

    owner = wg if p.owners > 1 else 0
    _tile_loop(p, compute_tile, owner=owner, owners=p.owners)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _body(*refs, p: Problem, **scratch) -> None:
    x_gmem, w_gmem, *bias_gmem, out_gmem = refs
    operands = (scratch[name] for name in ("x_smem", "w_smem", "k_loaded", "k_consumed"))
    lax.cond(
        lax.axis_index("wg") == p.s.warpgroups,
        lambda: _loader(x_gmem, w_gmem, *operands, p=p),
        lambda: _consumer(p, bias_gmem[0] if p.bias else None, out_gmem, scratch),
    )


@functools.partial(jax.jit, static_argnames=("out_dtype", "schedule", "segments", "interpret"))
def _launch(
    x, w, bias, *, out_dtype, schedule: Schedule, segments: int = 1, interpret: bool = False
):
    """Under jit, so that equal call sites are traced and lowered once."""
    stacked = segments > 1 and w.ndim == 3
    _check(x, w, out_dtype, segments, schedule.tile_k)
    rows = x.shape[0]
    p = Problem(
        m=rows,
        n=w.shape[-2],
        k=w.shape[-1] * (segments if stacked else 1),
        parts=1 if w.ndim == 2 or stacked else w.shape[0],
        segments=segments,
        stacked=stacked,
        bias=bias is not None,
        dtype=x.dtype,
        out_dtype=jnp.dtype(out_dtype),
        s=schedule,
    )
    if rows > 8:  # TMA tiles are 8 rows high; one short tile is clipped for free
        p = dataclasses.replace(p, m=round_up(rows, 8))
    x = jnp.pad(x, ((0, p.m - rows), (0, p.k - x.shape[1])))
    kernel = plgpu.kernel(
        functools.partial(_body, p=p),
        out_type=jax.ShapeDtypeStruct((p.m, p.n), p.out_dtype),
        scratch_types=scratch_spec(p),
        grid=(p.clusters,),
        grid_names=("grid",),
        cluster=(schedule.cluster_m, schedule.cluster_n),
        cluster_names=("cluster_m", "cluster_n"),
        num_threads=schedule.warpgroups + 1,
        thread_name="wg",
        # Only SwiGLU's epilogue holds anything that this changes.
        compiler_params=plgpu.CompilerParams(approx_math=p.parts == 2),
        kernel_name="matmul" if p.parts == 1 else "swiglu_matmul",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )
    operands = (x, w) if bias is None else (x, w, bias.astype(jnp.float32))
    return kernel(*operands)[:rows]


def _check(x, w, out_dtype, segments: int, tile_k: int) -> None:
    if x.dtype not in OPERAND_DTYPES or w.dtype != x.dtype:
        raise NotImplementedError(
            f"the Hopper matmul multiplies bfloat16 or float16 by the same, got x {x.dtype} and w "
            f"{w.dtype}; float32 operands would silently be rounded to TF32"
        )
    if jnp.dtype(out_dtype) not in OUT_DTYPES:
        raise NotImplementedError(f"out_dtype={out_dtype} must be bfloat16, float16 or float32")
    n, k = w.shape[-2:]
    if segments > 1:
        stacked = w.ndim == 3
        k = k * segments if stacked else k
        if k % (segments * tile_k) or x.shape[1] != k or (stacked and len(w) != segments):
            raise NotImplementedError(
                f"the Hopper matmul cuts K into {segments} segments of whole steps of {tile_k}, "
                f"got w {list(w.shape)} and x with K={x.shape[1]}"
            )
    if n % N_MULTIPLE or k % K_MULTIPLE or x.shape[1] > k:
        raise ValueError(
            f"w must have N a multiple of {N_MULTIPLE} and K a multiple of {K_MULTIPLE} no smaller "
            f"than x's, got N={n}, K={k} and x with K={x.shape[1]}: pad it with `pad_weights`"
        )


def pad_weights(w: jax.Array) -> jax.Array:
    """w [..., N, K] with zeros up to the sizes that the kernel takes; done once, at load.

    The product then has the padded N; zeros along K add nothing to an accumulator.
    """
    n, k = w.shape[-2:]
    widths = [(0, 0)] * (w.ndim - 2)
    return jnp.pad(w, (*widths, (0, -n % N_MULTIPLE), (0, -k % K_MULTIPLE)))


def matmul_hopper(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    out_dtype,
    schedule: Schedule,
    segments: int = 1,
    interpret: bool = False,
) -> jax.Array:
    """x w^T (+ bias), float32 accumulators, rounded once.

    Args:
      x: [M, K] bfloat16 or float16, any M; a multiple of 8 (or M <= 8) avoids a padded copy.
      w: [N, K] of x's dtype; N a multiple of 8, K of 64 (see `pad_weights`). With several
        segments also [segments, N, K / segments].
      bias: [N], added in float32.
      out_dtype: bfloat16, float16 or float32.
      schedule: speed only.
      segments: a power of two; equal parts of K whose sums a balanced tree adds. It fixes bits.
      interpret: run the kernel in Mosaic GPU's interpreter on a CPU.

    Returns:
      [M, N].

    Raises:
      NotImplementedError: float32 operands (never silently TF32), other dtypes, segments that are
        no whole steps of K.
      ValueError: N or K not padded.

    Invariance: the bits of row m depend on x[m], w, bias, out_dtype and segments; not on M, the
    row's place, the other rows (NaN and Inf included) or the schedule.
    """
    return _launch(
        x,
        w,
        bias,
        out_dtype=out_dtype,
        schedule=schedule,
        segments=segments,
        interpret=interpret,
    )


def swiglu_matmul_hopper(
    x: jax.Array, gate_up: jax.Array, *, out_dtype, schedule: Schedule, interpret: bool = False
) -> jax.Array:
    """silu(x gate^T) * (x up^T) for gate_up [2, F, K]: float32 until the one rounding.

    Args, Raises and Invariance as for `matmul_hopper`; `schedule.tile_n` counts columns of F.

    Returns:
      [M, F].
    """
    return _launch(x, gate_up, None, out_dtype=out_dtype, schedule=schedule, interpret=interpret)
