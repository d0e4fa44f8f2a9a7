"""What fixes the bits of attention."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AttentionTopology:
    """Order of additions of one query head at one position.

    Attributes:
      kv_block: keys are met in blocks of this many tokens at absolute positions, ascending; one
        online-softmax update a block.
      kv_split: None: one chain of blocks. n: partial results at absolute multiples of n tokens,
        merged in ascending order.
    """

    kv_block: int
    kv_split: int | None = None

    def __post_init__(self) -> None:
        if self.kv_block < 1:
            raise ValueError(f"kv_block={self.kv_block} must be positive")
        if self.kv_split is not None and (self.kv_split < 1 or self.kv_split % self.kv_block):
            raise ValueError(
                f"kv_split={self.kv_split} must be a positive multiple of kv_block={self.kv_block}"
            )


def topology_for(*, head_dim: int) -> AttentionTopology:
    """The topology for heads of `head_dim` columns; nothing here can see a batch."""
    del head_dim  # 64 and 128 share one block size so far
    return AttentionTopology(kv_block=128)
