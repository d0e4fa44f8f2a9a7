"""Draws docs/benchmarks/attention_*.json as an SVG: our time over cuDNN's, a bar a case."""

import svg_page

WIDTH, LEFT, TOP, ROW, RIGHT, BOTTOM = 860, 220, 40, 26, 170, 30
MOST = 2.5  # ratio at the right edge; a longer bar ends there and says its number
OURS, SLOWER, GRID = "#4477aa", "#ee6677", "#dddddd"


def x_of(ratio: float) -> float:
    return LEFT + min(ratio, MOST) / MOST * (WIDTH - LEFT - RIGHT)


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#222222">{words}</text>'


def draw(result: dict) -> str:
    rows = result["rows"]
    bottom = TOP + ROW * len(rows)
    parts = [text(LEFT, 20, f"attention: our time / cuDNN's, {result['chip']}, {result['date']}")]
    for tick in range(round(MOST * 2) + 1):
        x, colour = x_of(tick / 2), "#888888" if tick == 2 else GRID
        ends = f'x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}"'
        parts.append(f'<line {ends} stroke="{colour}"/>')
        parts.append(text(x, bottom + 18, f"{tick / 2:.1f}", "middle"))
    for place, row in enumerate(rows):
        y, ratio = TOP + ROW * place, row["ratio"]
        colour = OURS if ratio <= 1.05 else SLOWER
        width = x_of(ratio) - LEFT
        parts.append(
            f'<rect x="{LEFT}" y="{y + 4}" width="{width:.1f}" height="{ROW - 8}" fill="{colour}"/>'
        )
        parts.append(text(LEFT - 8, y + 17, row["case"], "end"))
        times = f"{ratio:.3f} ({row['ours_us']:,} / {row['peer_us']:,} us)"
        parts.append(text(x_of(ratio) + 6, y + 17, times))
    return svg_page.page(parts, width=WIDTH, height=bottom + BOTTOM)


if __name__ == "__main__":
    svg_page.main(__doc__, draw)
