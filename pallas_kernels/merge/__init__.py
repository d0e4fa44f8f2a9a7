"""Sums of a few float32 partial results, in one stated order, rounded once."""

from .api import fits_peers, ordered_sum, peer_sum, tree_sum
from .topology import MergeTopology, order_of

__all__ = ["MergeTopology", "fits_peers", "order_of", "ordered_sum", "peer_sum", "tree_sum"]
