"""Draws docs/benchmarks/matmul_*.json as an SVG: our time over cuBLAS', by rows, a line a case."""

import collections
import math

import svg_page

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 860, 460, 60, 40, 150, 50
LOW, HIGH = 0.6, 1.3  # ratios shown; what lies outside is drawn at the edge
COLOURS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#bbbbbb",
    "#222222",
    "#ee8866",
)


def x_of(rows: int) -> float:
    return LEFT + math.log2(rows) / 13 * (WIDTH - LEFT - RIGHT)


def y_of(ratio: float) -> float:
    place = (min(max(ratio, LOW), HIGH) - LOW) / (HIGH - LOW)
    return HEIGHT - BOTTOM - place * (HEIGHT - TOP - BOTTOM)


def line(x1, y1, x2, y2, colour: str = "#dddddd") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def text(x, y, words: str, anchor: str = "middle", colour: str = "#222222") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}">{words}</text>'


def draw(result: dict) -> str:
    cases = collections.defaultdict(list)
    for row in result["rows"]:
        cases[row["case"]].append((row["rows"], row["ratio"]))
    right = WIDTH - RIGHT
    parts = [text(LEFT, 20, f"matmul: our time / cuBLAS', {result['header']['chip']}", "start")]
    for tick in range(round(LOW * 10), round(HIGH * 10) + 1):
        y = y_of(tick / 10)
        parts.append(line(LEFT, y, right, y, "#888888" if tick == 10 else "#dddddd"))
        parts.append(text(LEFT - 8, y + 4, f"{tick / 10:.1f}", "end"))
    for power in range(0, 14):
        parts.append(text(x_of(1 << power), HEIGHT - BOTTOM + 18, str(1 << power)))
    parts.append(text((LEFT + right) / 2, HEIGHT - 10, "rows"))
    for (case, points), colour in zip(cases.items(), COLOURS, strict=False):
        path = " ".join(f"{x_of(m):.1f},{y_of(r):.1f}" for m, r in sorted(points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = TOP + 18 * list(cases).index(case)
        parts.append(text(right + 12, y, case, "start", colour))
    return svg_page.page(parts, width=WIDTH, height=HEIGHT)


if __name__ == "__main__":
    svg_page.main(__doc__, draw)
