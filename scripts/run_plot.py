"""A picture of a run's metrics, as SVG and without a plotting library."""

import json
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 640, 160, 40
CURVES = ("reward", "gradient_norm", "clip_fraction", "sampler_trainer_difference")


def plot(log: Path, picture: Path) -> None:
    """Draws each of `CURVES` over the steps of a JSONL file."""
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    panels = [_panel(name, [s[name] for s in steps], row) for row, name in enumerate(CURVES)]
    height = HEIGHT * len(CURVES)
    picture.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="11">{"".join(panels)}</svg>\n'
    )


def _panel(name: str, values: list[float], row: int) -> str:
    low, high = min(values, default=0.0), max(values, default=0.0)
    span = (high - low) or 1.0
    wide, tall = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
    top = row * HEIGHT + MARGIN
    stride = wide / max(len(values) - 1, 1)
    points = " ".join(
        f"{MARGIN + stride * i:.1f},{top + tall * (1 - (value - low) / span):.1f}"
        for i, value in enumerate(values)
    )
    return (
        f'<text x="{MARGIN}" y="{top - 8}">{name}: {low:.4g} to {high:.4g}</text>'
        f'<rect x="{MARGIN}" y="{top}" width="{wide}" height="{tall}" fill="none" stroke="#ccc"/>'
        f'<polyline points="{points}" fill="none" stroke="#246"/>'
    )
