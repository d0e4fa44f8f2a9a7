"""Checks for batch-invariance tests: yours as well as ours.

They work on any jitted function, on one device or a mesh, compare bytes, and raise `Inconclusive`
instead of passing where the operands could not have shown a difference.
"""

from . import operands
from .bits import BitDifference, assert_same_bits, bit_difference
from .foreign import assert_no_foreign_reductions
from .invariance import Inconclusive, assert_batch_invariant
from .reorder import reordered
from .schedule import assert_same_completions, assert_schedule_invariant

__all__ = [
    "BitDifference",
    "Inconclusive",
    "assert_batch_invariant",
    "assert_no_foreign_reductions",
    "assert_same_bits",
    "assert_same_completions",
    "assert_schedule_invariant",
    "bit_difference",
    "operands",
    "reordered",
]
