"""Sums of a few float32 partial results, in one stated order, rounded once."""

from .api import ordered_sum, tree_sum
from .topology import MergeTopology

__all__ = ["MergeTopology", "ordered_sum", "tree_sum"]
