"""What fixes the bits of a log-probability."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LogSoftmaxTopology:
    """Order of additions of l = sum over kept v of exp((x[v] - max) * inv_temperature).

    The row is cut into blocks at fixed columns. Block b has its exact maximum m[b] and
    s[b] = sum of exp((x[v] - m[b]) * inv_temperature), made by `lanes` lanes that each add
    every lanes-th column in ascending order and are then added by halves (lane i + lane
    i + lanes/2, and so on). l adds s[b] * exp((m[b] - max) * inv_temperature) over b in
    ascending order, product and sum rounded separately. All float32. Who computes a block, and
    when, is free. On Hopper the blocks are the same; the order inside a block and over the blocks
    is the one that `hopper_summary` and `kernel_hopper` state, also fixed by V alone.

    The log-probability of t is ((x[t] - max) * inv_temperature) - log(l), and the log-sum-exp
    is (max * inv_temperature) + log(l), each operation rounded.

    Attributes:
      block: columns a block.
      lanes: partial sums of a block.
    """

    block: int
    lanes: int

    def __post_init__(self) -> None:
        if self.lanes < 2 or self.lanes & (self.lanes - 1):
            raise ValueError(f"lanes={self.lanes} must be a power of two, 2 or more")
        if self.block < self.lanes or self.block % self.lanes:
            raise ValueError(f"block={self.block} must be a multiple of lanes={self.lanes}")


def topology_for(*, vocab_size: int) -> LogSoftmaxTopology:
    """The topology of a vocabulary; it has no row count to look at."""
    del vocab_size  # one for all so far
    return LogSoftmaxTopology(block=2048, lanes=128)
