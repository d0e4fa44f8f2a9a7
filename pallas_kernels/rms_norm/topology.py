"""What fixes the bits of an RMS norm."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RmsNormTopology:
    """Order of additions of the sum of squares of one row.

    Attributes:
      lanes: the row, padded with zeros, is cut into strips of this many columns; each lane adds its
        column of the strips in ascending order, then the lanes are added by halves
        (lane i + lane i + lanes/2, and so on). A power of two.
    """

    lanes: int

    def __post_init__(self) -> None:
        if self.lanes < 2 or self.lanes & (self.lanes - 1):
            raise ValueError(f"lanes={self.lanes} must be a power of two, 2 or more")


def topology_for(*, hidden_size: int) -> RmsNormTopology:
    """The topology of a row of `hidden_size` columns; it has no row count to look at."""
    lanes = 2
    while lanes < hidden_size and lanes < 1024:
        lanes *= 2
    return RmsNormTopology(lanes=lanes)
