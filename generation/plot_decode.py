"""Draws the README's picture of decoding speed from the first table of BENCHMARKS.md.

    python generation/plot_decode.py generation/decode.svg

A bar is the median of a program's runs, all taken in turn on one machine; a line is the bound, the
memory's bandwidth over the bytes of a step. Needs nothing but Python.
"""

from __future__ import annotations

import statistics
import sys
from itertools import groupby
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1] / "BENCHMARKS.md"
HEADER = "| weights | program | decode tok/s, each run |"
TITLE = "TinyLlama-1.1B on 2 CPU cores, tokens per second; line: bound by memory"
LABEL_WIDTH, BAR_WIDTH, ROW_HEIGHT = 170, 420, 26  # pixels


def decode_speeds(text: str) -> list[tuple[str, str, float]]:
    """(weights, program, median tokens per second) of the first such table of BENCHMARKS.md."""
    rows = text[text.index(HEADER) :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return [(c[0], c[1], statistics.median(map(float, c[2].split(",")))) for c in cells]


def render_svg(speeds: list[tuple[str, str, float]]) -> str:
    """Horizontal bars, ours in blue, and for each group a line at its bound."""
    longest = max(speed for _, _, speed in speeds)
    bars, y = [], ROW_HEIGHT
    for weights, rows in groupby(speeds, key=lambda row: row[0]):
        top, bound = y + 4, None
        for _, name, speed in rows:
            length = BAR_WIDTH * speed / longest
            if name.startswith("bound"):
                bound = LABEL_WIDTH + length
                continue
            color = "#3572b0" if name == "sheaf" else "#b8b8b8"
            bars += [
                f'<text x="{LABEL_WIDTH - 8}" y="{y + 19}" text-anchor="end">'
                f"{weights}, {name}</text>",
                f'<rect x="{LABEL_WIDTH}" y="{y + 4}" width="{length:.1f}" height="20" '
                f'fill="{color}"/>',
                f'<text x="{LABEL_WIDTH + 6}" y="{y + 19}" fill="white">{speed:.1f}</text>',
            ]
            y += ROW_HEIGHT
        if bound is not None:
            line = f'x1="{bound:.1f}" x2="{bound:.1f}" y1="{top - 3}" y2="{y + 1}"'
            bars.append(f'<line {line} stroke="#c03028" stroke-width="2"/>')
        y += 8
    width, height = LABEL_WIDTH + BAR_WIDTH + 20, y + 4
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="14">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="8" y="20">{TITLE}</text>',
    ]
    return "\n".join([*head, *bars, "</svg>\n"])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python generation/plot_decode.py FILE.svg")
    svg = render_svg(decode_speeds(BENCHMARKS.read_text(encoding="utf-8")))
    try:
        Path(sys.argv[1]).write_text(svg, encoding="utf-8")
    except OSError as e:
        sys.exit(f"plot_decode.py: error: {e}")
