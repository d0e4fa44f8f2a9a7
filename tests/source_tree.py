"""Reads the source of the packages without importing it: modules, imports and files."""

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"bi_jax": "bi_jax", "models": "bi_jax.models", "pallas_kernels": "bi_jax.pallas_kernels"}


@cache
def modules() -> dict[str, Path]:
    """Import name to file, for every module of the three packages."""
    found = {}
    for folder, name in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((name, *parts)).removesuffix(".__init__")] = path
    return found


def imports(source: str, module: str, is_package: bool = False) -> set[str]:
    """Dotted names that a source imports, at its top or inside functions.

    `from a import b` counts as `a.b`: the caller cuts it back where `b` is no module. Imports under
    `if TYPE_CHECKING:` count too: an arrow in the types is an arrow.
    """
    found = set()
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def module_of(name: str) -> str | None:
    """The module of ours that an imported dotted name lies in, or None for other people's."""
    while name:
        if name in modules():
            return name
        name = name.rpartition(".")[0]
    return None


@cache
def import_graph() -> dict[str, frozenset[str]]:
    """Each module of ours to the imported dotted names, ours cut back to modules."""
    graph = {}
    for name, path in modules().items():
        found = imports(path.read_text(), name, path.name == "__init__.py")
        graph[name] = frozenset(module_of(target) or target for target in found)
    return graph


@cache
def files() -> tuple[Path, ...]:
    """Every file of the project: tracked, or new and not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout.decode()
    paths = (ROOT / name for name in sorted(set(listed.split("\0"))) if name)
    return tuple(path for path in paths if path.is_file() and not path.is_symlink())


def text_of(path: Path) -> str | None:
    """The text of a file, or None for a binary one."""
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return None
