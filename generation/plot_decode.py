"""Draws the README's picture of decoding speed from the first table of BENCHMARKS.md.

    python generation/plot_decode.py generation/decode.svg

A bar is the median of a program's runs, all taken in turn on one machine. Needs nothing but Python.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1] / "BENCHMARKS.md"
HEADER = "| program | decode tok/s, each run |"
TITLE = "TinyLlama-1.1B, bf16, batch 1, 2 CPU cores: tokens per second"
LABEL_WIDTH, BAR_WIDTH, ROW_HEIGHT = 130, 420, 30  # pixels


def decode_speeds(text: str) -> dict[str, float]:
    """Median tokens per second of each program in the first such table of BENCHMARKS.md."""
    rows = text[text.index(HEADER) :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {c[0]: statistics.median(map(float, c[1].split(","))) for c in cells}


def render_svg(speeds: dict[str, float]) -> str:
    """Horizontal bars, the fastest first, ours in blue."""
    width, height = LABEL_WIDTH + BAR_WIDTH + 60, ROW_HEIGHT * (len(speeds) + 1) + 10
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="14">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="8" y="20">{TITLE}</text>',
    ]
    ranked = sorted(speeds.items(), key=lambda item: -item[1])
    for i, (name, speed) in enumerate(ranked, 1):
        y, length = i * ROW_HEIGHT, BAR_WIDTH * speed / ranked[0][1]
        color = "#3572b0" if name == "sheaf" else "#b8b8b8"
        out += [
            f'<text x="{LABEL_WIDTH - 8}" y="{y + 20}" text-anchor="end">{name}</text>',
            f'<rect x="{LABEL_WIDTH}" y="{y + 4}" width="{length:.1f}" height="22" '
            f'fill="{color}"/>',
            f'<text x="{LABEL_WIDTH + length + 6:.1f}" y="{y + 20}">{speed:.1f}</text>',
        ]
    return "\n".join([*out, "</svg>\n"])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python generation/plot_decode.py FILE.svg")
    svg = render_svg(decode_speeds(BENCHMARKS.read_text(encoding="utf-8")))
    Path(sys.argv[1]).write_text(svg, encoding="utf-8")
