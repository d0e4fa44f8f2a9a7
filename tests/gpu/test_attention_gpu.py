"""Hopper attention on the card: equal bits whatever the schedule, and cuDNN's accuracy."""

import subprocess
import sys

import pytest

from tests.gpu.attention_checks import CASES, check_accuracy, check_case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_do_not_follow_the_schedule(case):
    """Prefill = any chunking = decode; page sizes and ids, strangers, NaN where nobody wrote.

    The control, another kv_block, has to differ on the same fixture.
    """
    found = check_case(case)
    assert found["ok"], found


def test_fresh_processes_agree():
    code = (
        "from tests.gpu.attention_checks import CASES, check_case;"
        "print(check_case(CASES[0])['digest'])"
    )
    command = [sys.executable, "-c", code]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    digests = {run.communicate()[0].strip().splitlines()[-1] for run in runs}
    assert len(digests) == 1, digests


def test_accuracy_is_that_of_cudnn():
    for row in check_accuracy():
        assert row["ratio"] <= 1.5, row
        assert row["lse_max_error"] < 1e-5, row
