"""Sums, norms and scaling of gradients, each with a fixed order of additions."""

from .api import clip_factor, fork, merge, nonnegative_zero, scale_by, sum_of_squares, tree_sum

__all__ = [
    "clip_factor",
    "fork",
    "merge",
    "nonnegative_zero",
    "scale_by",
    "sum_of_squares",
    "tree_sum",
]
