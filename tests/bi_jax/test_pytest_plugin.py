"""The installed pytest plugin: fixtures, marker, and a failure that is called inconclusive."""

import subprocess
import sys

import pytest

from tests.source_tree import ROOT

USER_TEST = """
import numpy as np
import pytest


@pytest.mark.batch_invariance
def test_passes(assert_batch_invariant, adversarial_operands):
    x = adversarial_operands.spread((4, 8))
    assert_batch_invariant(lambda x: -x, [x], sizes=(2,))


@pytest.mark.batch_invariance
def test_cannot_tell(assert_batch_invariant):
    assert_batch_invariant(lambda x: -x, [np.ones((4, 8), np.float32)], sizes=(2,))


def test_differs(assert_same_bits):
    assert_same_bits(np.float32([1.0]), np.float32([2.0]))


def test_adds(assert_no_foreign_reductions):
    assert_no_foreign_reductions(lambda x: x.sum(), np.ones(3, np.float32))


def test_fixtures_exist(assert_schedule_invariant):
    assert callable(assert_schedule_invariant)
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("users_project")
    (folder / "test_mine.py").write_text(USER_TEST)
    command = [sys.executable, "-m", "pytest", "-v", "--strict-markers", "-p", "no:cacheprovider"]
    if not _is_installed():
        command += ["-p", "bi_jax.pytest_plugin"]
    return subprocess.run(
        [*command, str(folder)], capture_output=True, text=True, cwd=folder
    ).stdout


def _is_installed():
    from importlib.metadata import entry_points

    return any(e.value == "bi_jax.pytest_plugin" for e in entry_points(group="pytest11"))


def test_fixtures_and_marker_are_there(outcome):
    assert "test_passes PASSED" in outcome and "test_fixtures_exist PASSED" in outcome


def test_inconclusive_is_a_failure_with_a_name_of_its_own(outcome):
    assert "test_cannot_tell INCONCLUSIVE" in outcome
    assert "all rows of the result are equal" in outcome
    assert "3 failed, 2 passed" in outcome


def test_differences_are_reported(outcome):
    assert "test_differs FAILED" in outcome and "(0x3f800000)" in outcome
    assert "test_adds FAILED" in outcome and "reduce_sum" in outcome


def test_it_is_declared_and_loads_no_jax():
    assert 'bi_jax = "bi_jax.pytest_plugin"' in (ROOT / "pyproject.toml").read_text()
    code = "import sys, bi_jax.pytest_plugin; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False"
