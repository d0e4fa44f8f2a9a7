"""How QK-norm and rotation are cut over the CTAs of a Hopper chip; speed only."""

from dataclasses import dataclass

FILLED = 512  # CTAs that keep the chip busy, as a rule


@dataclass(frozen=True, kw_only=True)
class RopeSchedule:
    """Heads that a CTA takes of a tile of tokens, one after the other.

    Attributes:
      kv_heads: KV heads whose queries, or whose keys and values, one CTA takes.
      queries: query heads of each of them.
    """

    kv_heads: int
    queries: int

    def __post_init__(self) -> None:
        for name in ("kv_heads", "queries"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


def pick_schedule(*, tiles: int, kv_heads: int, group: int) -> RopeSchedule:
    """As many heads a CTA as leave the chip filled: the angles are read once a CTA.

    Args:
      tiles: of tokens.
      kv_heads, group: Nkv and G.
    """
    if tiles * kv_heads * 2 < FILLED:
        return RopeSchedule(kv_heads=1, queries=1)
    most = tiles * kv_heads * 2 // FILLED
    divisors = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n <= most]
    return RopeSchedule(kv_heads=max(divisors), queries=group)
