"""Strict JAX, checked shapes, and a count of every test that did not run."""

from collections import Counter

import hypothesis
import jax
import jaxtyping
import pytest

from tests import shape_checks

# A number that was silently widened or broadcast is a number whose bits nobody chose.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_legacy_prng_key", "error")
# Engines turn the cache on; a test must not find what another run has left.
jax.config.update("jax_enable_compilation_cache", False)
# So that sharded code can be tried on a CPU.
jax.config.update("jax_num_cpu_devices", 8)

# The same examples in every run: a failure is a finding and never a matter of luck.
hypothesis.settings.register_profile("bi_jax", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("bi_jax")

# Before any test file imports the packages.
jaxtyping.install_import_hook(shape_checks.modules(), "tests.shape_checks.after_the_call")

TIERS = ("slow", "gpu", "multi_gpu")
_left_out: Counter[str] = Counter()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests that need cards which are not there, and says how many would be needed."""
    # Workers of pytest-xdist that name a test differently run none; one alone would not see it.
    unsteady = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unsteady:
        raise pytest.UsageError(
            f"names of tests hold an address, which no other process has: {unsteady}"
        )
    needs = {item: 2 if item.get_closest_marker("multi_gpu") else 1 for item in items}
    needs = {
        item: cards
        for item, cards in needs.items()
        if item.get_closest_marker("gpu") or item.get_closest_marker("multi_gpu")
    }
    have = _cards() if needs else 0
    for item, cards in needs.items():
        if have < cards:
            reason = f"needs {cards} NVIDIA card(s) that JAX can use, found {have}"
            item.add_marker(pytest.mark.skip(reason=reason))


def _cards() -> int:
    try:
        return len(jax.devices("cuda"))
    except RuntimeError:  # JAX has no CUDA plugin or sees no card
        return 0


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        tiers = [tier for tier in TIERS if item.get_closest_marker(tier)]
        for tier in tiers:
            _left_out[f"{tier} tests in {item.location[0]}"] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    # Under pytest-xdist only the workers collect; each collects everything.
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(_left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    for name, count in getattr(node, "workeroutput", {}).get("left_out", {}).items():
        _left_out[name] = max(_left_out[name], count)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _left_out:
        terminalreporter.section("left out by the markers")
        for name, count in sorted(_left_out.items()):
            terminalreporter.line(f"{count:4d} {name}")
