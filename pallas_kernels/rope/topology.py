"""What fixes the bits of QK-norm and the rotary embedding."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RopeTopology:
    """Order of operations of one head of q or k.

    Attributes:
      norm_lanes: lanes of the per-head RMS norm's sum (see `RmsNormTopology`): head_dim columns
        padded to this power of two and added by halves.
    """

    norm_lanes: int

    def __post_init__(self) -> None:
        if self.norm_lanes < 2 or self.norm_lanes & (self.norm_lanes - 1):
            raise ValueError(f"norm_lanes={self.norm_lanes} must be a power of two, 2 or more")


def topology_for(*, head_dim: int) -> RopeTopology:
    """The topology for heads of `head_dim` columns."""
    lanes = 2
    while lanes < head_dim:
        lanes *= 2
    return RopeTopology(norm_lanes=lanes)
