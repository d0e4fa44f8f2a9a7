"""Checks for batch-invariance tests: yours as well as ours.

They work on any jitted function, on one device or a mesh, compare bytes, and raise `Inconclusive`
instead of passing where the operands could not have shown a difference.
"""

from . import operands
from .bits import BitDifference, assert_same_bits, bit_difference
from .invariance import Inconclusive, assert_batch_invariant
from .reorder import reordered

__all__ = [
    "BitDifference",
    "Inconclusive",
    "assert_batch_invariant",
    "assert_same_bits",
    "bit_difference",
    "operands",
    "reordered",
]
