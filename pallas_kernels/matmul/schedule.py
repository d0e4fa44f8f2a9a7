"""How a matrix product is laid out on the chip: what fixes its speed and none of its bits.

Rows are allowed to choose a schedule. Every schedule keeps one float32 accumulator per output
element and walks K upwards in the instruction's own steps of 16, so all of them give the same bits.
"""

import dataclasses

import jax.numpy as jnp

from ..shared_memory import CTA_BYTES

SMS = 132  # of an H100 or H200
BARRIER_ROOM = 1024  # bytes; more than the barriers of any schedule take
THREADS = 128  # of a warpgroup
SM_REGISTERS = 65536


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Tiles over the independent axes, pipeline depth, clusters and grid order.

    Attributes:
      tile_m: rows of x that one CTA holds.
      tile_n: output columns of one CTA; SwiGLU reads twice as many rows of w.
      tile_k: K elements of one pipeline step.
      stages: pipeline steps in flight.
      swap: weights are the row operand of wgmma and tokens its column operand.
      warpgroups: warpgroups that multiply; each owns a part of the tile.
      split: the axis, "m" or "n", along which the warpgroups divide the tile; "turns": each takes
        whole tiles in turn, so that one stores while the next multiplies.
      cluster_m: CTAs of one cluster along M; they share the weights they read.
      cluster_n: CTAs of one cluster along N; they share the rows of x they read.
      raster: the axis, "m" or "n", that changes fastest from one tile to the next.
      raster_width: tiles along `raster` before the other axis advances.
      ctas: most CTAs to launch; when there are more tiles, each CTA walks several.
      inflight: wgmma groups left running when the next one is issued (0 or 1).
      out_slots: blocks of results that a warpgroup may have on their way to global memory.
      parked: columns of a warpgroup's part whose sum over the first half of the segments waits in
        shared memory; the other columns' waits in registers.
      weights_first: a step asks for its weights before its rows of x.
      pass_empty: a warpgroup whose rows of a tile all lie beyond the last one passes it over.
    """

    tile_m: int
    tile_n: int
    tile_k: int = 64
    stages: int = 4
    swap: bool = False
    warpgroups: int = 1
    split: str = "m"
    cluster_m: int = 1
    cluster_n: int = 1
    raster: str = "m"
    raster_width: int = 8
    ctas: int = 132
    inflight: int = 1
    out_slots: int = 2
    pass_empty: bool = False
    parked: int = 0
    weights_first: bool = False

    def __post_init__(self):
        for name in ("tile_m", "tile_n"):
            if (value := getattr(self, name)) % 8 or value <= 0:
                raise ValueError(f"{name}={value} must be a positive multiple of 8")
        if self.tile_k % 64 or self.tile_k <= 0:
            raise ValueError(f"tile_k={self.tile_k} must be a positive multiple of 64")
        if self.split not in ("m", "n", "turns"):
            raise ValueError(f"split={self.split!r} must be 'm', 'n' or 'turns'")
        if self.raster not in ("m", "n"):
            raise ValueError(f"raster={self.raster!r} must be 'm' or 'n'")
        if self.inflight not in (0, 1):
            raise ValueError(f"inflight={self.inflight} must be 0 or 1")
        if self.stages <= self.inflight:
            raise ValueError(f"stages={self.stages} must exceed inflight={self.inflight}")
        if self.swap and self.warpgroups > 1 and self.split == "m":
            raise ValueError("a swapped schedule divides its tile along n, but split='m'")
        if self.parked > (0 if self.swap else self.part_n):
            raise ValueError(f"parked={self.parked} columns of a part of {self.part_n}, or swapped")
        if self.part_m % (8 if self.swap else 64):
            raise ValueError(f"{self.part_m} rows a warpgroup do not fit the wgmma shape")

    @property
    def part_m(self) -> int:
        """Rows of x that one warpgroup multiplies."""
        return self.tile_m // (self.warpgroups if self.split == "m" else 1)

    @property
    def part_n(self) -> int:
        """Output columns that one warpgroup computes."""
        return self.tile_n // (self.warpgroups if self.split == "n" else 1)

    @property
    def cluster_size(self) -> int:
        return self.cluster_m * self.cluster_n


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return cdiv(a, b) * b


def fitted(s: Schedule, parts: int, out_itemsize: int = 2) -> Schedule:
    """`s` with as many pipeline stages as shared memory holds, at most 16."""
    step = (s.tile_m + parts * s.tile_n) * s.tile_k * 2
    block = s.part_m * 64 * out_itemsize if s.swap else 64 * 128
    other = s.warpgroups * (s.out_slots * block + 4 * s.part_m * s.parked)
    stages = (CTA_BYTES - BARRIER_ROOM - other) // step
    return dataclasses.replace(s, stages=min(stages, 16))


def with_room(s: Schedule, parts: int, out_dtype) -> Schedule:
    """`s` with fewer stages where results of this dtype leave no room for all of them."""
    stages = fitted(s, parts, jnp.dtype(out_dtype).itemsize).stages
    return dataclasses.replace(s, stages=min(s.stages, stages))


def normal_schedule(tile_m: int, tile_n: int, *, parts: int, k: int, **fields) -> Schedule:
    """Tokens as wgmma's rows: one warpgroup up to 64 rows, else two."""
    warpgroups = 1 if tile_m <= 64 else 2
    s = Schedule(tile_m=tile_m, tile_n=tile_n, warpgroups=warpgroups, **fields)
    s = fitted(s, parts)
    return dataclasses.replace(s, stages=max(2, min(s.stages, cdiv(k, s.tile_k))))


FIXED = normal_schedule(128, 128, parts=2, k=4096)  # the one-schedule mode: every row count


def _swapped(
    tile_m: int, tile_n: int, warpgroups: int, *, stages: int, inflight: int = 1
) -> Schedule:
    """Weights as wgmma's rows, one store on its way: for rows a little beyond a tile of 128."""
    return Schedule(
        tile_m=tile_m,
        tile_n=tile_n,
        stages=stages,
        swap=True,
        warpgroups=warpgroups,
        split="n",
        inflight=inflight,
        out_slots=1,
    )


MANY = 1 << 30  # rows
# (N, K, parts): (rows up to, schedule). Measured on an H200; from `scripts/tune_matmul.py table`.
TUNED: dict[tuple[int, int, int], tuple[tuple[int, Schedule], ...]] = {
    (6144, 4096, 1): (
        (8, Schedule(tile_m=64, tile_n=48, tile_k=128, stages=7, cluster_n=2)),
        (64, Schedule(tile_m=64, tile_n=48, tile_k=128, stages=7)),
        (128, Schedule(tile_m=64, tile_n=96, tile_k=128, stages=5, weights_first=True)),
        (256, Schedule(tile_m=64, tile_n=192, stages=6, weights_first=True)),
        (272, _swapped(136, 128, 2, stages=5)),
        (320, Schedule(tile_m=64, tile_n=240, stages=5)),
        (512, Schedule(tile_m=128, tile_n=192, warpgroups=2, split="turns")),
        (4096, Schedule(tile_m=256, tile_n=192, stages=3, warpgroups=2, inflight=0)),
        (MANY, Schedule(tile_m=128, tile_n=176, stages=5, warpgroups=2, split="turns")),
    ),
    (4096, 4096, 1): (
        (16, Schedule(tile_m=64, tile_n=32, tile_k=128, stages=8)),
        (32, Schedule(tile_m=32, tile_n=64, tile_k=128, stages=9, swap=True, split="n")),
        (64, Schedule(tile_m=32, tile_n=64, tile_k=128, stages=9, swap=True, split="n")),
        (128, Schedule(tile_m=64, tile_n=64, tile_k=128, stages=6, weights_first=True)),
        (256, Schedule(tile_m=64, tile_n=128, stages=8, weights_first=True)),
        (272, _swapped(136, 64, 1, stages=8)),
        (320, Schedule(tile_m=64, tile_n=160, stages=7)),
        (512, Schedule(tile_m=128, tile_n=128, stages=6, warpgroups=2)),
        (MANY, Schedule(tile_m=128, tile_n=256, warpgroups=2)),
    ),
    (28672, 4096, 1): (
        (32, Schedule(tile_m=64, tile_n=128, tile_k=128, cluster_n=2)),
        (64, Schedule(tile_m=64, tile_n=224, tile_k=128, stages=3, out_slots=1)),
        (128, Schedule(tile_m=128, tile_n=224, warpgroups=2, inflight=0)),
        (256, Schedule(tile_m=128, tile_n=224, warpgroups=2, inflight=0, weights_first=True)),
        (272, _swapped(136, 256, 2, stages=3, inflight=0)),
        (512, Schedule(tile_m=128, tile_n=128, stages=6, warpgroups=2, split="turns")),
        (1024, Schedule(tile_m=128, tile_n=256, warpgroups=2)),
        (4096, Schedule(tile_m=128, tile_n=176, stages=5, warpgroups=2, split="turns")),
        (MANY, Schedule(tile_m=128, tile_n=192, warpgroups=2, split="turns")),
    ),
    (4096, 14336, 1): (
        (8, Schedule(tile_m=8, tile_n=64, tile_k=256, stages=6, swap=True, split="n")),
        (32, Schedule(tile_m=64, tile_n=32, tile_k=128, stages=8)),
        (64, Schedule(tile_m=32, tile_n=64, tile_k=128, stages=9, swap=True, split="n")),
        (128, Schedule(tile_m=64, tile_n=64, tile_k=128, stages=6)),
        (256, Schedule(tile_m=64, tile_n=128, stages=8, weights_first=True)),
        (272, _swapped(136, 64, 1, stages=8)),
        (320, Schedule(tile_m=64, tile_n=160, stages=7)),
        (512, Schedule(tile_m=128, tile_n=128, stages=6, warpgroups=2, split="turns")),
        (MANY, Schedule(tile_m=128, tile_n=256, warpgroups=2)),
    ),
    (24576, 4096, 1): (
        (8, Schedule(tile_m=64, tile_n=64, tile_k=128, stages=6, cluster_n=2)),
        (64, Schedule(tile_m=64, tile_n=192, tile_k=128, stages=3, out_slots=1)),
        (128, Schedule(tile_m=128, tile_n=192, warpgroups=2, inflight=0, weights_first=True)),
        (
            256,
            Schedule(
                tile_m=256, tile_n=192, stages=3, warpgroups=2, inflight=0, weights_first=True
            ),
        ),
        (272, _swapped(136, 192, 3, stages=4, inflight=0)),
        (320, Schedule(tile_m=128, tile_n=192, warpgroups=2)),
        (512, Schedule(tile_m=256, tile_n=192, stages=3, warpgroups=2, inflight=0)),
        (1024, Schedule(tile_m=256, tile_n=192, stages=3, warpgroups=2)),
        (MANY, Schedule(tile_m=128, tile_n=176, stages=5, warpgroups=2, split="turns")),
    ),
    (4096, 12288, 1): (
        (8, Schedule(tile_m=8, tile_n=64, tile_k=256, stages=6, swap=True, split="n")),
        (32, Schedule(tile_m=64, tile_n=32, tile_k=128, stages=8)),
        (64, Schedule(tile_m=32, tile_n=64, tile_k=128, stages=9, swap=True, split="n")),
        (128, Schedule(tile_m=64, tile_n=64, tile_k=128, stages=6, weights_first=True)),
        (256, Schedule(tile_m=64, tile_n=128, stages=8, weights_first=True)),
        (272, _swapped(136, 64, 1, stages=8)),
        (320, Schedule(tile_m=64, tile_n=160, stages=7)),
        (512, Schedule(tile_m=128, tile_n=128, stages=6, warpgroups=2)),
        (MANY, Schedule(tile_m=128, tile_n=256, warpgroups=2)),
    ),
    (151936, 4096, 1): (
        (8, Schedule(tile_m=8, tile_n=64, tile_k=256, stages=6, swap=True, split="n")),
        (16, Schedule(tile_m=64, tile_n=128, tile_k=128)),
        (32, Schedule(tile_m=64, tile_n=64, tile_k=128, stages=6, cluster_n=2)),
        (64, Schedule(tile_m=64, tile_n=128, tile_k=128, cluster_n=2)),
        (128, Schedule(tile_m=128, tile_n=128, stages=6, warpgroups=2, cluster_n=2)),
        (256, Schedule(tile_m=128, tile_n=256, warpgroups=2, inflight=0, weights_first=True)),
        (272, _swapped(136, 256, 2, stages=3, inflight=0)),
        (320, Schedule(tile_m=128, tile_n=256, warpgroups=2)),
        (1024, Schedule(tile_m=256, tile_n=192, stages=3, warpgroups=2)),
        (MANY, Schedule(tile_m=128, tile_n=176, stages=5, warpgroups=2, split="turns")),
    ),
    (14336, 4096, 2): (
        (64, Schedule(tile_m=64, tile_n=64, tile_k=128, cluster_n=2)),
        (128, Schedule(tile_m=128, tile_n=112, warpgroups=2)),
        (256, Schedule(tile_m=128, tile_n=112, warpgroups=2, inflight=0, weights_first=True)),
        (272, _swapped(136, 128, 2, stages=3, inflight=0)),
        (512, Schedule(tile_m=128, tile_n=96, warpgroups=2, split="turns")),
        (1024, Schedule(tile_m=128, tile_n=128, warpgroups=2)),
        (MANY, Schedule(tile_m=128, tile_n=96, warpgroups=2, split="turns")),
    ),
    (12288, 4096, 2): (
        (64, Schedule(tile_m=64, tile_n=96, tile_k=128, stages=3, out_slots=1)),
        (128, Schedule(tile_m=128, tile_n=96, warpgroups=2, inflight=0)),
        (
            256,
            Schedule(tile_m=256, tile_n=96, stages=3, warpgroups=2, inflight=0, weights_first=True),
        ),
        (272, _swapped(136, 64, 1, stages=6)),
        (320, Schedule(tile_m=128, tile_n=96, warpgroups=2)),
        (512, Schedule(tile_m=256, tile_n=96, stages=3, warpgroups=2, inflight=0)),
        (MANY, Schedule(tile_m=128, tile_n=96, warpgroups=2, split="turns")),
    ),
}


def schedule_for(
    rows: int, n: int, k: int, *, parts: int = 1, out_dtype="bfloat16", fixed: bool = False
) -> Schedule:
    """The schedule of a product of `rows` rows with w [N, K] (parts 1) or [2, N, K] (SwiGLU).

    `fixed` gives the same schedule for every row count. All schedules give the same bits.
    """
    if fixed:
        return FIXED
    for limit, schedule in TUNED.get((n, k, parts), ()):
        if rows <= limit:
            return with_room(schedule, parts, out_dtype)
    return with_room(_rule(rows, n, k, parts), parts, out_dtype)


FEW_ROWS = 64
MOST_SUM_REGISTERS = 200  # a thread, of the sums of segments that live at a time
# Segments of K: (rows up to, schedule), measured on an H200 with N = 4096. Tiles that a CTA walks
# one after the other want every sum without a spill, few tiles a deep pipeline.
SEGMENTED: dict[int, tuple[tuple[int, Schedule], ...]] = {
    2: (
        (128, Schedule(tile_m=64, tile_n=64, tile_k=128, stages=6)),
        (256, Schedule(tile_m=64, tile_n=128, stages=8)),
        (272, _swapped(136, 64, 1, stages=8)),
        (512, Schedule(tile_m=128, tile_n=128, stages=6, warpgroups=2)),
        (MANY, Schedule(tile_m=128, tile_n=192, warpgroups=2)),
    ),
    4: (
        (128, Schedule(tile_m=64, tile_n=64, tile_k=128, stages=6)),
        (256, Schedule(tile_m=64, tile_n=128, stages=8)),
        (272, _swapped(136, 64, 1, stages=8)),
        (MANY, Schedule(tile_m=128, tile_n=128, stages=6, warpgroups=2)),
    ),
    8: (
        (128, Schedule(tile_m=64, tile_n=64, tile_k=128, stages=6)),
        (256, Schedule(tile_m=64, tile_n=128, stages=8, out_slots=1, parked=96)),
        (272, _swapped(72, 128, 2, stages=8)),
        (1024, Schedule(tile_m=128, tile_n=128, stages=5, warpgroups=2, out_slots=1, parked=96)),
        (MANY, Schedule(tile_m=128, tile_n=128, warpgroups=2, inflight=0, parked=128)),
    ),
}


def segmented_schedule_for(
    rows: int, n: int, k: int, *, segments: int, out_dtype="bfloat16"
) -> Schedule:
    """The schedule of a product whose K is cut into `segments` equal parts.

    Up to 64 rows that of a whole product, where its sums fit; beyond, by the rows alone.

    Raises:
      NotImplementedError: a segment is no whole number of steps of 64, or another number of them.
    """
    if segments not in SEGMENTED:
        known = ", ".join(map(str, SEGMENTED))
        raise NotImplementedError(f"matmul on Hopper takes {known} segments of K, got {segments}")
    if k % (64 * segments):
        raise NotImplementedError(
            f"matmul on Hopper cuts K into {segments} segments of whole steps of 64, got K={k}"
        )
    live = segments.bit_length()  # the accumulator, and one sum for each level of the tree
    if rows > FEW_ROWS:
        # Swapped tiles are stored by whole row tiles of the weights.
        fits = (s for limit, s in SEGMENTED[segments] if rows <= limit and not (s.swap and n % 64))
        s = with_room(next(fits), 1, out_dtype)
    else:
        s = schedule_for(rows, n, k, out_dtype=out_dtype)
    if rows <= FEW_ROWS and live * s.part_m * s.part_n // THREADS > MOST_SUM_REGISTERS:
        s = normal_schedule(64, 32 if cdiv(n, 32) <= SMS else 64, parts=1, k=k)
    while k % (s.tile_k * segments):
        narrower = dataclasses.replace(s, tile_k=s.tile_k - 64)
        s = fitted(narrower, 1, jnp.dtype(out_dtype).itemsize)
    return s


def _rule(rows: int, n: int, k: int, parts: int) -> Schedule:
    """For shapes that nobody tuned: one wave of narrow tiles for few rows, else wide tiles."""
    if rows <= 64:
        even = cdiv(cdiv(n * parts, SMS), 16 * parts) * 16
        tile_n = even if even * parts <= 64 else 128 // parts
        return normal_schedule(64, tile_n, parts=parts, k=k, tile_k=128)
    if 256 < rows <= 272 and parts == 1 and n % 64 == 0:
        warpgroups = 1 if 2 * n // 64 <= SMS else 2
        s = fitted(_swapped(136, 64 * warpgroups, warpgroups, stages=2), parts)
        return dataclasses.replace(s, stages=max(2, min(s.stages, cdiv(k, s.tile_k))))
    sizes = ((256, 192), (128, 256), (128, 128), (64, 128), (64, 64))
    for tile_m, width in sizes:
        if cdiv(rows, tile_m) * cdiv(n * parts, width) >= SMS * 5 // 6:
            break
    return normal_schedule(tile_m, width // parts, parts=parts, k=k)


def schedules() -> frozenset[tuple[int, Schedule]]:
    """Every (parts, schedule) that `schedule_for` can return for a tuned shape, for the proof."""
    tuned = {(key[2], s) for key, rows in TUNED.items() for _, s in rows}
    return frozenset(tuned | {(1, FIXED), (2, FIXED)})
