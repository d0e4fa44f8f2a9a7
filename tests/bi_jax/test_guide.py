"""The guide's examples run, in order, as they are printed."""

import re

import pytest

from tests.source_tree import ROOT

GUIDE = ROOT / "docs" / "guide-batch-invariance.md"


def test_every_block_of_the_guide_runs(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 7
    names = {"__name__": "guide"}
    for number, block in enumerate(blocks):
        try:
            exec(compile(block, f"{GUIDE.name} block {number}", "exec"), names)
        except Exception as error:
            pytest.fail(f"block {number} of the guide: {type(error).__name__}: {error}")
    printed = capsys.readouterr().out
    assert "not batch-invariant" in printed and "reduce_sum -> float32[300]" in printed
