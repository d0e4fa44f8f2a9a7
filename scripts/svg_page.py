"""What the plots of benchmarks share: a page of SVG, and the command that draws it."""

import argparse
import json
import pathlib
from collections.abc import Callable, Sequence


def page(parts: Sequence[str], *, width: int, height: int) -> str:
    """One SVG document of these elements."""
    size = f'width="{width}" height="{height}" font-family="sans-serif" font-size="12"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{body}\n</svg>\n'


def main(description: str | None, draw: Callable[[dict], str]) -> None:
    """Reads the JSON that the command line names and writes its plot beside it."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("json", type=pathlib.Path)
    args = parser.parse_args()
    args.json.with_suffix(".svg").write_text(draw(json.loads(args.json.read_text())))
