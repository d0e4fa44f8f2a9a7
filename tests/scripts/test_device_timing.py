"""scripts/device_timing.py: the order of what is timed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from device_timing import turns


def test_members_of_a_cell_take_turns_and_no_cell_is_torn():
    assert turns([2, 1, 3], 3) == [0, 1, 1, 0, 0, 1, 2, 2, 2, 3, 4, 5, 5, 4, 3, 3, 4, 5]
    assert turns([1, 1], 2) == [0, 0, 1, 1]
