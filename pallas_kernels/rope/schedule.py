"""How QK-norm and rotation are cut over the CTAs of a Hopper chip; speed only."""

from dataclasses import dataclass

FILLED = 512  # CTAs that keep the chip busy, as a rule: about 4 a multiprocessor


@dataclass(frozen=True, kw_only=True)
class RopeSchedule:
    """Heads of one KV head that a CTA takes of a tile of tokens, one after the other.

    Attributes:
      queries: query heads.
      together: the same CTA takes key and value too, and all query heads; else another one does.
    """

    queries: int
    together: bool = False

    def __post_init__(self) -> None:
        if self.queries < 1:
            raise ValueError(f"queries={self.queries} must be at least 1")

    def parts(self, group: int) -> int:
        """CTAs that share a tile's G query heads of a KV head, its key and its value.

        Raises:
          ValueError: they would not take every head once.
        """
        if group % self.queries or (self.together and self.queries != group):
            raise ValueError(f"{self} does not divide {group} query heads")
        return 1 if self.together else 1 + group // self.queries


def pick_schedule(*, tiles: int, kv_heads: int, group: int) -> RopeSchedule:
    """As many heads a CTA as leave the chip filled: the angles are read once a CTA.

    Args:
      tiles: of tokens.
      kv_heads, group: Nkv and G.
    """
    if tiles * kv_heads >= FILLED:
        return RopeSchedule(queries=group, together=True)
    divisors = [n for n in range(1, group + 1) if group % n == 0]
    filling = [n for n in divisors if tiles * kv_heads * (1 + group // n) > FILLED]
    return RopeSchedule(queries=max(filling, default=1))
