"""Prints the tree for the README, one line a file, from the first lines of the docstrings.

With --write it goes into README.md, into the fenced block under the mark.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("bi_jax", "models", "pallas_kernels")
# Folders whose files are listed one by one; of others the README names the folder only.
LISTED = (*PACKAGES, "scripts", "docs")
LISTED_SUFFIXES = (".py", ".sh", ".md")
MARK = "<!-- tree -->"
# What a docstring cannot say for itself.
TEXTS = {
    "tests/": "mirrors the packages; tests/fixtures holds small checkpoints",
    "docs/": "longer texts",
    "docs/benchmarks/": "figures measured on the chip, and their plots",
    "scripts/": "commands to run",
    "requirements/": "the complete locks: CPU and tools, and what a GPU adds",
    "pyproject.toml": "the distribution bi-jax, its extras and the settings of the tools",
    "setup.py": "maps the three folders to one import package",
    "Makefile": "make generate, make test and the rest",
    "scripts/setup.sh": "makes .venv from nothing, or finds it up to date",
    "README.md": "this file",
    "CONTRIBUTING.md": "three commands, the layering rule, how to add a kernel",
    "LICENSE": "Apache-2.0",
}
# Where the descriptions start.
COLUMN = 36


def entries() -> list[str]:
    """What the tree has to name, in its order: files, and folders with a slash at their end.

    `__init__.py` files stand for their folders and have no line of their own.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout.decode()
    found = set()
    for name in filter(None, listed.split("\0")):
        parts = name.split("/")
        if parts[0].startswith(".") or not (ROOT / name).exists():
            continue
        found.update("/".join(parts[:i]) + "/" for i in range(1, len(parts)))
        if parts[-1] != "__init__.py":
            found.add(name)
    kept = [entry for entry in found if _has_a_line(entry)]
    return sorted(kept, key=_order)


def _has_a_line(entry: str) -> bool:
    if entry.rstrip("/").count("/") == 0:
        return True
    return entry.split("/")[0] in LISTED and entry.endswith(("/", *LISTED_SUFFIXES))


def _order(entry: str) -> tuple:
    """Packages from what users import down, then the other folders, then files."""
    parts = entry.rstrip("/").split("/")
    top = PACKAGES.index(parts[0]) if parts[0] in PACKAGES else len(PACKAGES)
    is_file = len(parts) == 1 and not entry.endswith("/")
    return (is_file, top, *((not _is_file(entry, i), part) for i, part in enumerate(parts)))


def _is_file(entry: str, depth: int) -> bool:
    return not entry.endswith("/") and depth == entry.count("/")


def description(entry: str) -> str:
    """The text beside an entry: from the table above, a docstring or a heading."""
    if entry in TEXTS:
        return TEXTS[entry]
    path = ROOT / entry
    if entry.endswith("/"):
        path = path / "__init__.py"
    if not path.exists():
        return ""
    if path.suffix == ".py":
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        return doc.split("\n")[0].rstrip(".")
    if path.suffix == ".md":
        heading = re.search(r"^# +(.+)$", path.read_text(), re.MULTILINE)
        return heading.group(1) if heading else ""
    return ""


def tree() -> str:
    lines = []
    for entry in entries():
        depth = entry.rstrip("/").count("/")
        name = "  " * depth + entry.rstrip("/").split("/")[-1] + "/" * entry.endswith("/")
        lines.append(f"{name:{COLUMN}}{description(entry)}".rstrip())
    return "\n".join(lines)


def write() -> None:
    """Puts the tree into README.md."""
    readme = ROOT / "README.md"
    before, mark, after = readme.read_text().partition(MARK)
    opening, _, rest = after.partition("```")
    _, closing, end = rest.partition("```")
    if not mark or not closing:
        raise SystemExit(f"README.md needs {MARK} and a fenced block under it")
    readme.write_text(f"{before}{mark}{opening}```\n{tree()}\n```{end}")


def parse(block: str) -> dict[str, str]:
    """A printed tree back to {entry: description}. Raises ValueError for a repeated entry."""
    found, folders = {}, []
    for line in filter(str.strip, block.splitlines()):
        name, _, text = line.strip().partition(" ")
        depth = (len(line) - len(line.lstrip())) // 2
        del folders[depth:]
        entry = "".join(folders) + name
        if entry in found:
            raise ValueError(f"{entry} stands in the tree twice")
        found[entry] = text.strip()
        if name.endswith("/"):
            folders.append(name)
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        print(tree())
