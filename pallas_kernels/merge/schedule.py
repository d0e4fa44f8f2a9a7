"""How the merge kernel cuts its elements; speed only."""

from dataclasses import dataclass

THREADS = 128  # of one warpgroup
BYTES = 16  # a thread loads at once


@dataclass(frozen=True, kw_only=True)
class MergeSchedule:
    """Elements a CTA.

    Attributes:
      vec: consecutive float32 elements that a thread loads at once: 1, 2 or 4.
      repeats: how many of these a thread holds of each term.
    """

    vec: int
    repeats: int

    def __post_init__(self) -> None:
        if self.vec not in (1, 2, 4):
            raise ValueError(f"vec={self.vec} must be 1, 2 or 4")
        if self.repeats < 1:
            raise ValueError(f"repeats={self.repeats} must be at least 1")

    @property
    def tile(self) -> int:
        return THREADS * self.vec * self.repeats


def pick_schedule(*, terms: int, elements: int) -> MergeSchedule:
    """The widest loads that keep every term aligned, and about 8 loads in flight a thread.

    Args:
      terms: n.
      elements: of one term; at least the tile of one repeat of one element.
    """
    vec = next(v for v in (4, 2, 1) if elements % v == 0 and (v == 1 or elements >= THREADS * v))
    repeats = 1
    # Two CTAs a multiprocessor, before a thread is given more to do.
    while repeats * terms < 8 and elements >= THREADS * vec * repeats * 2 * 264:
        repeats *= 2
    return MergeSchedule(vec=vec, repeats=repeats)
