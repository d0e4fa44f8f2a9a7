"""How a matrix product is laid out on the chip: everything that fixes its speed and none of its bits.

Rows are allowed to choose a schedule. Every schedule keeps one float32 accumulator per output
element and walks K upwards in the instruction's own steps of 16, so all of them give the same bits.
"""

import dataclasses


SMEM_BYTES = 232448  # what one CTA may hold on sm90
SMEM_ALIGNMENT = 1024
BARRIER_BYTES = 1024  # room for barriers and the compiler's own scratch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Tiles over the independent axes, pipeline depth, clusters and grid order.

    Attributes:
      tile_m: rows of x that one CTA holds.
      tile_n: output columns of one CTA (of the fused product: SwiGLU reads twice as many rows of w).
      tile_k: K elements of one pipeline step.
      stages: pipeline steps in flight.
      swap: weights are the row operand of wgmma and tokens its column operand.
      warpgroups: warpgroups that multiply; each owns a part of the tile.
      split: the axis, "m" or "n", along which the warpgroups divide the tile.
      cluster_m: CTAs of one cluster along M; they share the weights they read.
      cluster_n: CTAs of one cluster along N; they share the rows of x they read.
      raster: the axis, "m" or "n", that changes fastest from one tile to the next.
      raster_width: tiles along `raster` before the other axis advances.
      ctas: most CTAs to launch; when there are more tiles, each CTA walks several.
      inflight: wgmma groups left running when the next one is issued (0 or 1).
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
    pdl: bool = False

    def __post_init__(self):
        for name in ("tile_m", "tile_n"):
            if (value := getattr(self, name)) % 8 or value <= 0:
                raise ValueError(f"{name}={value} must be a positive multiple of 8")
        if self.tile_k % 64 or self.tile_k <= 0:
            raise ValueError(f"tile_k={self.tile_k} must be a positive multiple of 64")
        for name in ("split", "raster"):
            if (value := getattr(self, name)) not in ("m", "n"):
                raise ValueError(f"{name}={value!r} must be 'm' or 'n'")
        if self.inflight not in (0, 1):
            raise ValueError(f"inflight={self.inflight} must be 0 or 1")
        if self.stages <= self.inflight:
            raise ValueError(f"stages={self.stages} must exceed inflight={self.inflight}")
        if self.swap and self.warpgroups > 1 and self.split == "m":
            raise ValueError("a swapped schedule divides its tile along n, but split='m'")
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


