"""What fixes the bits of a sum of partial results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

ASCENDING = "ascending"
TREE = "tree"


@dataclass(frozen=True, kw_only=True)
class MergeTopology:
    """Order of additions of n float32 terms.

    Attributes:
      order: "ascending", ((t0 + t1) + t2) + t3 ...; or "tree", neighbours are added, then the pairs
        of neighbours, and so on, so that a tree over trees of n/k consecutive terms is the tree
        over all n.
    """

    order: str

    def __post_init__(self) -> None:
        if self.order not in (ASCENDING, TREE):
            raise ValueError(f"order={self.order!r} must be '{ASCENDING}' or '{TREE}'")


def order_of(*, tree: bool) -> MergeTopology:
    """The tree, or the ascending order."""
    return MergeTopology(order=TREE if tree else ASCENDING)


def merged(terms: Sequence[Any], topology: MergeTopology, add: Callable[[Any, Any], Any]) -> Any:
    """The sum of the terms; the one place where the order is written.

    Args:
      terms: at least one; a power of two of them for the tree.
      topology: the order.
      add: of two terms.
    """
    if topology.order == ASCENDING:
        total = terms[0]
        for term in terms[1:]:
            total = add(total, term)
        return total
    level = list(terms)
    while len(level) > 1:
        level = [add(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0]
