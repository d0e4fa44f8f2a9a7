"""The annotated tree of the README names each file of the packages once, and nothing else."""

import re

import pytest

from scripts import readme_tree
from tests.source_tree import ROOT

START = "<!-- tree -->"


def blocks(readme: str) -> list[str]:
    """The fenced blocks that stand directly under the mark."""
    return re.findall(re.escape(START) + r"\s*```[a-z]*\n(.*?)```", readme, re.DOTALL)


def faults(block: str, entries: list[str]) -> list[str]:
    """What is wrong with a tree, a line each."""
    told = readme_tree.parse(block)
    missing = [f"missing: {entry}" for entry in entries if entry not in told]
    stale = [f"no such file: {entry}" for entry in told if entry not in entries]
    bare = [f"without a word: {entry}" for entry, text in told.items() if not text]
    return missing + stale + bare


def test_the_tree_in_the_readme_is_true():
    found = blocks((ROOT / "README.md").read_text())
    assert len(found) == 1, (
        f"README.md needs one fenced tree under {START} (make readme-tree ARGS=--write)"
    )
    wrong = faults(found[0], readme_tree.entries())
    assert not wrong, "make readme-tree ARGS=--write makes the tree:\n" + "\n".join(wrong)


def test_what_the_script_prints_is_accepted():
    wrong = faults(readme_tree.tree(), readme_tree.entries())
    assert not [fault for fault in wrong if not fault.startswith("without")]


def test_every_file_has_a_description():
    assert not [entry for entry in readme_tree.entries() if not readme_tree.description(entry)]


def test_faults_are_seen():
    block = "a/   folder\n  b.py   file\n  c.py\nd.md   text\n"
    assert faults(block, ["a/", "a/b.py", "a/e.py", "d.md"]) == [
        "missing: a/e.py",
        "no such file: a/c.py",
        "without a word: a/c.py",
    ]
    with pytest.raises(ValueError, match="twice"):
        faults("a.py  one\na.py  two\n", [])
