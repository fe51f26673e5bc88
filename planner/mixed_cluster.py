"""Training jobs on a cluster of several GPU types: which type, how many GPUs, which layout.

    python -m planner search crius --mix h100=16,a100-80gb=32 --jobs llama3-8b,llama2-13b

Crius (Xue et al., arXiv:2403.16125) schedules cells. A cell fixes what decides most of a job's
speed: the GPU type, the number of GPUs and the number of pipeline stages. Its throughput is
estimated from two plans, only data and only tensor parallelism within a stage; the cell that a job
is given is then tuned over all plans. Cells of all jobs are chosen so that the sum of throughputs,
each relative to the job's best cell, is the largest: exact, by dynamic programming over the GPUs
left of each type, in 8 s for 6 jobs on three types of 512 GPUs. No job uses two types.

When it loses: where the best plan of a cell lies between its two, or has expert or context
parallelism. The estimate is 0.8 to 1 of the tuned plan for most cells, but 0.57 for Llama 3 405B on
64 GB200 without stages and 0.24 for Qwen3 235B on 64 H100. Needs: the standard library.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import argparse
import json
from typing import Any, NamedTuple

from planner.cost_model import DEVICES, Shape, load_shape, parse_number, require
from planner.training_plan import Prediction, divisors, parse_batch, rank_plans


class Cell(NamedTuple):
    """What a job is given: GPUs of one type, and its pipeline stages."""

    device: str
    gpus: int
    stages: int


def cells(cluster: dict[str, int], layers: int) -> list[Cell]:
    """Cells of powers of two GPUs and stages, of types and counts that the cluster has."""
    powers = lambda most: [1 << i for i in range(most.bit_length())]
    return [
        Cell(device, gpus, stages)
        for device, count in cluster.items()
        for gpus in powers(count)
        for stages in powers(min(gpus, layers))
    ]


def estimate_cell(shape: Shape, cell: Cell, seq: int, batch: int) -> float:
    """Tokens/s of a cell: the best of only data and only tensor parallelism within a stage, or 0 if
    neither fits."""
    device, ranks = DEVICES[cell.device], cell.gpus // cell.stages
    most = max(d for d in divisors(ranks) if d <= device.node and shape.heads % d == 0)
    best = 0.0
    for tp in {1, most}:
        try:
            fixed = dict(tp=tp, cp=1, pp=cell.stages, dp=ranks // tp, ep=1)
            found = rank_plans(shape, device, cell.gpus, seq, batch, **fixed)
        except ValueError:
            continue
        best = max(best, found[0].tokens_per_second * cell.gpus)
    return best


def choose_cells(
    rates: list[dict[Cell, float]], cluster: dict[str, int]
) -> tuple[float, list[Cell | None]]:
    """(sum of rates relative to each job's highest, a cell per job or None) that is the largest
    within the GPUs of each type. rates: per job, cell -> tokens/s."""
    names = list(cluster)
    best = {tuple(cluster.values()): (0.0, ())}
    for job in rates:
        top = max(job.values(), default=0.0)
        cells = {(c.device, c.gpus): c for c in sorted(job, key=job.get) if job[c] > 0}.values()
        found: dict[tuple[int, ...], tuple[float, tuple]] = {}
        for left, (score, chosen) in best.items():
            options = [(left, score, None)]
            for cell in cells:  # of the best number of stages
                at = names.index(cell.device)
                if left[at] >= cell.gpus:
                    rest = (*left[:at], left[at] - cell.gpus, *left[at + 1 :])
                    options.append((rest, score + job[cell] / top, cell))
            for rest, value, cell in options:
                if value > found.get(rest, (-1.0,))[0]:
                    found[rest] = value, (*chosen, cell)
        best = found
    score, chosen = max(best.values(), key=lambda pair: pair[0])
    return score, list(chosen)


def tune_cell(shape: Shape, cell: Cell, seq: int, batch: int) -> Prediction:
    """The fastest of all plans of a cell."""
    return rank_plans(shape, DEVICES[cell.device], cell.gpus, seq, batch, pp=cell.stages)[0]


def parse_mix(text: str) -> dict[str, int]:
    """ "h100=16,a100-80gb=32" as {device: GPUs}. ValueError for an unknown device or no number."""
    cluster: dict[str, int] = {}
    for part in text.split(","):
        name, _, count = part.strip().partition("=")
        require(count and name not in cluster, f"--mix {text!r}: write it as h100=16,a100-80gb=32")
        require(name in DEVICES, f"--mix: {name} is unknown; use one of {', '.join(DEVICES)}")
        cluster[name] = parse_number(count, f"--mix {name}:")
    return cluster


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `search crius`, beside the shared ones."""
    add = parser.add_argument
    add("--mix", required=True, help="the cluster, such as h100=16,a100-80gb=32")
    add("--jobs", required=True, help="models to train, such as llama3-8b,llama2-13b")


def schedule(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per job: its cell, the estimate and the tuned plan; without a cell, only its model."""
    cluster, names = parse_mix(args.mix), [name.strip() for name in args.jobs.split(",")]
    shapes, (seq, batch) = [load_shape(name) for name in names], parse_batch(args)
    rates = [
        {cell: estimate_cell(s, cell, seq, batch) for cell in cells(cluster, s.layers)}
        for s in shapes
    ]
    rows = []
    for name, shape, rate, cell in zip(names, shapes, rates, choose_cells(rates, cluster)[1]):
        row: dict[str, Any] = {"model": name}
        if cell:
            got = tune_cell(shape, cell, seq, batch)
            tuned = got.tokens_per_second * cell.gpus
            row |= {**cell._asdict(), "estimate": rate[cell], "tuned": tuned, "plan": str(got.plan)}
        rows.append(row)
    return rows


def report(args: argparse.Namespace) -> str:
    """The output of `search crius`: a line per job."""
    rows = schedule(args)
    if args.json:
        return json.dumps(rows, indent=2)
    lines = [f"{'job':<16}{'cell':<18}{'tok/s estimated':>17}{'tuned':>11}  plan"]
    for row in rows:
        if "plan" not in row:
            lines.append(f"{row['model']:<16}no cell: too few GPUs left, or too little memory")
            continue
        cell, plan = f"{row['gpus']} {row['device']}", row["plan"]
        rates = f"{row['estimate']:>17,.0f}{row['tuned']:>11,.0f}"
        lines.append(f"{row['model']:<16}{cell:<18}{rates}  {plan}")
    return "\n".join(lines)
