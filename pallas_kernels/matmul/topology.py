"""What fixes the bits of a matrix product."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MatmulTopology:
    """Order of additions of out[m, n] = sum over k of x[m, k] * w[n, k].

    Attributes:
      k_segments: 1: one float32 accumulator walks K in ascending order. S > 1: K is cut at S - 1
        fixed places and the S partial sums are merged by one balanced binary tree.
      accumulator: dtype of the accumulators.
    """

    k_segments: int = 1
    accumulator: str = "float32"

    def __post_init__(self) -> None:
        if self.k_segments not in (1, 2, 4, 8):
            raise ValueError(f"k_segments={self.k_segments} must be 1, 2, 4 or 8")
        if self.accumulator != "float32":
            raise ValueError(f"accumulator={self.accumulator!r} must be 'float32'")


DEFAULT = MatmulTopology()
