"""Hopper attention on the card: equal bits whatever the schedule, and cuDNN's accuracy.

Nearly all of the time is lowering and compiling, so every case runs in a process of its own, all of
them together; the first case three times, as the fresh processes that have to agree.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.gpu.attention_checks import CASES

pytestmark = pytest.mark.gpu

FRESH = 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(process, where its report will be) of each case, and of the accuracy."""
    folder = tmp_path_factory.mktemp("attention")
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

    def start(name: str, *arguments: str):
        path = folder / f"{name}.json"
        command = [sys.executable, "-m", "tests.gpu.attention_checks", *arguments]
        with open(folder / f"{name}.log", "w") as log:
            process = subprocess.Popen(
                [*command, "--json", str(path)], env=environment, stdout=log, stderr=log
            )
        return process, path

    # The longest first.
    order = sorted(range(len(CASES)), key=lambda n: -CASES[n].length)
    started = {str(n): start(str(n), str(n)) for n in order}
    started |= {f"fresh{i}": start(f"fresh{i}", "0") for i in range(1, FRESH)}
    started["accuracy"] = start("accuracy", "--accuracy")
    yield started
    for process, _ in started.values():
        process.kill()


def report(runs, name: str) -> dict:
    process, path = runs[name]
    process.wait()
    assert path.exists(), path.with_suffix(".log").read_text()[-2000:]
    return json.loads(path.read_text())


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: str(CASES[n]))
def test_bits_do_not_follow_the_schedule(runs, number):
    """Prefill = any chunking = decode; page sizes and ids, strangers, NaN where nobody wrote.

    The control, another kv_block, has to differ on the same fixture.
    """
    (found,) = report(runs, str(number))["bits"]
    assert found["ok"], found


def test_fresh_processes_agree(runs):
    names = ["0", *(f"fresh{i}" for i in range(1, FRESH))]
    digests = {report(runs, name)["bits"][0]["digest"] for name in names}
    assert len(digests) == 1, digests


def test_accuracy_is_that_of_cudnn(runs):
    for row in report(runs, "accuracy")["accuracy"]:
        assert row["ratio"] <= 1.5, row
        assert row["lse_max_error"] < 1e-5, row
