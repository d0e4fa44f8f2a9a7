"""One launch of the Hopper matmul: its sizes, its output tiles and its shared memory."""

import dataclasses
import functools

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from .schedule import Schedule, cdiv, round_up


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One launch: sizes and what is static about them. `parts` is 2 for SwiGLU, else 1.

    `stacked` weights are [segments, N, K / segments].
    """

    m: int
    n: int
    k: int
    parts: int
    bias: bool
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    s: Schedule
    segments: int = 1
    stacked: bool = False

    @property
    def tiles(self) -> tuple[int, int]:
        """Output tiles along M and N, in clusters."""
        s = self.s
        return cdiv(self.m, s.tile_m * s.cluster_m), cdiv(self.n, s.tile_n * s.cluster_n)

    @property
    def clusters(self) -> int:
        """Clusters launched; each walks every `clusters`-th tile."""
        m_tiles, n_tiles = self.tiles
        return min(m_tiles * n_tiles, max(self.s.ctas // self.s.cluster_size, 1))

    @property
    def k_steps(self) -> int:
        return cdiv(self.k, self.s.tile_k)

    @property
    def segment_steps(self) -> int:
        return self.k_steps // self.segments

    @property
    def chunks(self) -> int:
        """Pieces in which the weights of a step arrive: gate and up of each warpgroup's columns."""
        return self.s.warpgroups if self.parts == 2 and self.s.split == "n" else 1

    @property
    def owners(self) -> int:
        """Warpgroups among which whole tiles go round; 1 when all share every tile."""
        return self.s.warpgroups if self.s.split == "turns" else 1

    @property
    def empty_parts(self) -> bool:
        """Whether the last tile leaves a warpgroup without any row, and it may pass."""
        s = self.s
        divided = s.pass_empty and s.split == "m" and s.warpgroups > 1
        return divided and -self.m % s.tile_m >= s.part_m

    @property
    def x_rows(self) -> int:
        """Rows of x that a step loads; those of the tile beyond them reach no stored result."""
        rows = round_up(self.m, 8)
        return min(self.s.tile_m, rows if rows == 8 else round_up(rows, 8 * self.s.cluster_n))

    @property
    def out_block(self) -> tuple[int, int]:
        """Rows and columns of one store."""
        s = self.s
        # Swapped, a block is whole row tiles of the accumulator.
        widest = 64 if s.swap else 128 // jnp.dtype(self.out_dtype).itemsize
        sizes = (w for w in (64, 32, 16, 8) if w <= widest)
        width = next(w for w in sizes if s.part_n % w == self.n % w == 0)
        return (s.part_m if s.swap else 64), width

    @property
    def acc_shape(self) -> tuple[int, int]:
        s = self.s
        width = self.parts * s.part_n
        return (width, s.part_m) if s.swap else (s.part_m, width)


def tiled(width: int, dtype) -> tuple:
    """The shared-memory layout of TMA and wgmma; plain rows where they are too narrow for it."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(width * itemsize * 8)
    if swizzle < 32:
        return ()
    return (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))


def scratch_spec(p: Problem) -> dict:
    """Shared memory and barriers of one CTA."""
    s = p.s
    operand = functools.partial(plgpu.SMEM, dtype=p.dtype, transforms=tiled(s.tile_k, p.dtype))
    axes = (("cluster_m", s.cluster_m), ("cluster_n", s.cluster_n))
    shared_axes = tuple(name for name, size in axes if size > 1)
    barrier = (
        functools.partial(plgpu.ClusterBarrier, collective_axes=shared_axes)
        if shared_axes
        else plgpu.Barrier
    )
    spec = dict(
        x_smem=operand((s.stages, s.tile_m, s.tile_k)),
        w_smem=operand((s.stages, p.parts * s.tile_n, s.tile_k)),
        out_smem=plgpu.SMEM(
            (s.warpgroups, s.out_slots, *p.out_block),
            p.out_dtype,
            transforms=tiled(p.out_block[1], p.out_dtype),
        ),
        k_loaded=plgpu.Barrier(
            num_arrivals=1 + p.parts * p.chunks, num_barriers=p.owners * s.stages
        ),
        k_consumed=barrier(num_arrivals=s.warpgroups // p.owners, num_barriers=s.stages),
    )
    if s.parked:
        spec["parked"] = plgpu.SMEM(
            (s.warpgroups, s.part_m, s.parked),
            jnp.float32,
            transforms=tiled(s.parked, jnp.float32),
        )
    if p.bias:
        spec["bias_smem"] = plgpu.SMEM((s.warpgroups, s.part_n), jnp.float32)
        spec["bias_loaded"] = plgpu.Barrier(num_barriers=s.warpgroups)
    return spec
