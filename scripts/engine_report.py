"""From what bench_engine.py measured to docs/benchmarks: a short JSON, a table and a plot.

python scripts/engine_report.py raw.json docs/benchmarks/engine_h200
"""

import argparse
import collections
import json
import pathlib
from typing import Any

from engine_profile import class_of

LAYERS = "layers and head"  # what a step has besides token choice
REST = "token choice and the rest"
WIDTH, BAR, LEFT, TOP = 860, 18, 190, 56
COLOURS = {
    "gate and up, SwiGLU": "#4477aa",
    "other products": "#66ccee",
    "attention": "#228833",
    "norms, rotation": "#ccbb44",
    "page writes": "#ee6677",
    "scales put together": "#aa3377",
    "work list": "#222222",
    REST: "#bbbbbb",
}


def shortened(row: dict[str, Any]) -> dict[str, Any]:
    """A case without its kernels' names: milliseconds by class, ours over stock and floor."""
    kept = {key: row[key] for key in ("case", "aim", "floor_ms", "memory") if key in row}
    kept["ours_ms"] = row["ours"]["ms"]
    kept["ours_rounds_ms"] = row["ours"]["rounds_ms"]
    sums: collections.Counter[str] = collections.Counter()
    for kernel in row["ours"].get("kernels", ()):
        sums[class_of(kernel["kernel"])] += kernel["us"] / 1e3
    if sums:
        known = {kind: ms for kind, ms in sums.items() if kind in COLOURS}
        kept["kernels_ms"] = row["ours"]["kernels_ms"]
        kept[LAYERS] = round(sum(known.values()), 3)
        known[REST] = row["ours"]["ms"] - sum(known.values())
        kept["classes_ms"] = {kind: round(ms, 3) for kind, ms in known.items()}
        kept["layers_over_floor"] = round(kept[LAYERS] / row["floor_ms"], 3)
    kept["ours_over_floor"] = row["ours_over_floor"]
    if "stock" in row:
        kept["stock_ms"] = row["stock"]["ms"]
        kept["stock_rounds_ms"] = row["stock"]["rounds_ms"]
        kept["stock_kernels_ms"] = row["stock"].get("kernels_ms")
        for name in ("stock_over_floor", "ours_over_stock"):
            kept[name] = row[name]
        if LAYERS in kept:
            kept["layers_over_stock"] = round(kept[LAYERS] / row["stock"]["ms"], 3)
    return kept


def table(result: dict[str, Any]) -> str:
    """Markdown, a line a case."""
    lines = [
        "# The engine's step against stock XLA with cuDNN and against the floor",
        "",
        f"{result['header']['chip']}, {result['header']['date']}, `{result['header']['command']}`.",
        "Ratios: of the whole step / of its layers and head alone.",
        "",
        *([result["note"], ""] if "note" in result else []),
        "| step | floor ms | stock ms | ours ms | layers and head ms | over stock | over floor |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = [row["case"], f"{row['floor_ms']:.2f}"]
        cells += [f"{row[k]:.2f}" if k in row else "-" for k in ("stock_ms", "ours_ms", LAYERS)]
        for kind in ("stock", "floor"):
            pair = [row.get(f"{who}_over_{kind}") for who in ("ours", "layers")]
            cells.append(" / ".join("-" if value is None else f"{value:.2f}" for value in pair))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any]) -> str:
    """SVG: the floor, stock and ours of each case, in units of the floor; ours by class."""
    rows = [row for row in result["rows"] if "classes_ms" in row]
    if not rows:
        raise SystemExit("no case was profiled: nothing to draw")
    longest = max(row["ours_ms"] / row["floor_ms"] for row in rows)
    unit = (WIDTH - LEFT - 60) / longest
    title = f"time of a step over its floor, {result['header']['chip']}, {result['header']['date']}"
    parts = [_text(LEFT, 18, title, "start")]
    for place, (kind, colour) in enumerate(COLOURS.items()):
        x, y = LEFT + 170 * (place % 4), 32 + 14 * (place // 4)
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(x + 14, y, kind, "start"))
    y = TOP + 14
    for row in rows:
        for name, ms in (("floor", row["floor_ms"]), ("stock", row.get("stock_ms"))):
            if ms is not None:
                width = unit * ms / row["floor_ms"]
                parts.append(_bar(LEFT, y, width, "#dddddd" if name == "floor" else "#999999"))
                parts.append(_text(LEFT - 8, y + 13, f"{row['case']}: {name}", "end"))
                parts.append(_text(LEFT + width + 4, y + 13, f"{ms:.2f} ms", "start"))
                y += BAR + 2
        x = float(LEFT)
        for kind in COLOURS:
            width = unit * row["classes_ms"].get(kind, 0.0) / row["floor_ms"]
            parts.append(_bar(x, y, width, COLOURS[kind]))
            x += width
        parts.append(_text(LEFT - 8, y + 13, "ours", "end"))
        parts.append(_text(x + 4, y + 13, f"{row['ours_ms']:.2f} ms", "start"))
        y += BAR + 14
    size = f'width="{WIDTH}" height="{y}" font-family="sans-serif" font-size="11"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{"\n".join(parts)}\n</svg>\n'


def _bar(x: float, y: float, width: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>'


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("raw", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path, help="without .json, .md and .svg")
    arguments = parser.parse_args()
    result = json.loads(arguments.raw.read_text())
    result["rows"] = [shortened(row) for row in result["rows"]]
    for suffix, text in (
        (".json", json.dumps(result, indent=1) + "\n"),
        (".md", table(result)),
        (".svg", plot(result)),
    ):
        arguments.output.with_suffix(suffix).write_text(text)


if __name__ == "__main__":
    main()
