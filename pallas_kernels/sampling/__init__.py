"""Token choice: greedy or drawn exactly from integers, with top-k, top-p and min-p."""

from .api import choose_and_score, choose_token, find_cut, top_tokens
from .hopper_cut import MOST_ORDERED
from .threefry import fold_in, threefry2x32
from .topology import SamplingTopology, topology_for

__all__ = [
    "MOST_ORDERED",
    "SamplingTopology",
    "choose_and_score",
    "choose_token",
    "find_cut",
    "fold_in",
    "threefry2x32",
    "top_tokens",
    "topology_for",
]
