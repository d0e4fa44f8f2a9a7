"""docs/audit.md names every entry of the tables, with its reason."""

import pytest

from bi_jax import audit_rules as rules
from bi_jax.flag_table import COMPILER_OPTIONS, NCCL_VARIABLES, PROCESS_FLAGS
from tests.source_tree import ROOT

TEXT = (ROOT / "docs" / "audit.md").read_text()


def row_with(*words: str) -> bool:
    """Whether one row of a table holds all the words."""
    return any(all(w in line for w in words) for line in TEXT.splitlines() if line[:1] == "|")


@pytest.mark.parametrize("name", sorted(rules.EXACT_PRIMITIVES))
def test_each_exact_primitive_is_listed_with_its_reason(name):
    assert row_with(f"`{name}`", rules.EXACT_PRIMITIVES[name])


@pytest.mark.parametrize("name", sorted({**rules.FORBIDDEN_PRIMITIVES, **rules.FOREIGN_PRIMITIVES}))
def test_each_refused_primitive_is_listed_under_its_kind(name):
    kind = {**rules.FORBIDDEN_PRIMITIVES, **rules.FOREIGN_PRIMITIVES}[name]
    assert row_with(f"| {kind} |", f"`{name}`", rules.REASONS[kind])


def test_every_kind_and_rule_is_explained():
    for kind, reason in rules.REASONS.items():
        assert row_with(f"| {kind} |", reason)
    assert row_with(f"`{rules.COTANGENT_SUM}`", rules.COTANGENTS)


def test_every_flag_is_listed():
    for flag in (*COMPILER_OPTIONS, *PROCESS_FLAGS, *NCCL_VARIABLES):
        assert row_with(f"`{flag.name}`", f"| {flag.text} |", flag.reason, flag.checked)


def test_an_entry_that_is_missing_is_seen():
    assert not row_with("`dot_general`", rules.MOVES)


def test_nothing_is_both_exact_and_refused():
    assert not rules.EXACT_PRIMITIVES.keys() & rules.FORBIDDEN_PRIMITIVES.keys()
    assert not rules.EXACT_HLO & rules.FORBIDDEN_HLO.keys()
