"""No file is too long, and none names a place that exists on one machine only."""

import pytest

from tests.source_tree import ROOT, files, text_of

MAX_LINES = 450

# Put together here, so that this file does not hold them itself.
REGISTRIES = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("registry", "npmjs"),
        ("deb", "debian"),
        ("conda", "anaconda"),
        ("download", "pytorch"),
        ("pypi", "nvidia"),
    )
]
LOCAL_PATHS = [f"/{name}/" for name in ("root", "work", "home", "opt")] + [
    "/".join(["", "tmp", ""])
]
INDEX_OPTIONS = ["--" + "index-url", "--" + "extra-index", "--" + "find-links"]


def offences(text: str) -> list[str]:
    return [word for word in REGISTRIES + LOCAL_PATHS + INDEX_OPTIONS if word in text]


def test_no_file_names_a_registry_or_a_local_path():
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in files()
        if (text := text_of(path)) is not None
        for word in offences(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("word", [*REGISTRIES, *LOCAL_PATHS, *INDEX_OPTIONS])
def test_an_offence_is_seen(word: str):
    assert offences(f"see {word}x for more") == [word]


def test_no_source_file_is_too_long():
    long = {
        str(path.relative_to(ROOT)): lines
        for path in files()
        if path.suffix == ".py" and (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not long
