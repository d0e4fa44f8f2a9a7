"""The pytest plugin that is installed with bi_jax: fixtures, a marker, and "inconclusive".

Loads nothing of JAX until a fixture is asked for. `pytest -p no:bi_jax` turns it off.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

MARKER = "batch_invariance: checks bits across batches; select these with -m batch_invariance"
_OUTCOME = "bi_jax_inconclusive"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)


@pytest.fixture
def assert_same_bits() -> Callable[..., None]:
    """`bi_jax.testing.assert_same_bits`."""
    from bi_jax import testing

    return testing.assert_same_bits


@pytest.fixture
def assert_batch_invariant() -> Callable[..., None]:
    """`bi_jax.testing.assert_batch_invariant`."""
    from bi_jax import testing

    return testing.assert_batch_invariant


@pytest.fixture
def assert_schedule_invariant() -> Callable[..., None]:
    """`bi_jax.testing.assert_schedule_invariant`."""
    from bi_jax import testing

    return testing.assert_schedule_invariant


@pytest.fixture
def assert_no_foreign_reductions() -> Callable[..., None]:
    """`bi_jax.testing.assert_no_foreign_reductions`."""
    from bi_jax import testing

    return testing.assert_no_foreign_reductions


@pytest.fixture
def adversarial_operands() -> ModuleType:
    """`bi_jax.testing.operands`: spread, cancelling, tied and poisoned values."""
    from bi_jax.testing import operands

    return operands


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
    del item
    result = yield
    kind = call.excinfo.type if call.excinfo is not None else None
    if kind is not None and kind.__module__ == "bi_jax.testing.invariance":
        setattr(result.get_result(), _OUTCOME, kind.__name__ == "Inconclusive")


def pytest_report_teststatus(
    report: pytest.TestReport | pytest.CollectReport,
) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
    """An inconclusive check fails, under a name of its own."""
    if getattr(report, _OUTCOME, False):
        return "failed", "I", ("INCONCLUSIVE", {"yellow": True})
    return None
