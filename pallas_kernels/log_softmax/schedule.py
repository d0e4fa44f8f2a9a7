"""How many vocabulary blocks a CTA walks; no schedule can change a bit."""

from dataclasses import dataclass

FEW_CTAS = 2112  # 16 for each of 132 multiprocessors: below that every block gets its own CTA


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Attributes:
    blocks_a_cta: vocabulary blocks of one row that one CTA walks, the next one loaded ahead.
    """

    blocks_a_cta: int

    def __post_init__(self) -> None:
        if self.blocks_a_cta < 1:
            raise ValueError(f"blocks_a_cta={self.blocks_a_cta} must be 1 or more")


def schedule_for(*, rows: int, blocks: int) -> Schedule:
    """The schedule of a batch; a block's numbers are the same whichever CTA makes them."""
    return Schedule(blocks_a_cta=1 if rows * blocks <= FEW_CTAS else 8)
