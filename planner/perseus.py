"""Perseus: a clock for every forward and backward pass of a pipeline.

    python -m planner search perseus --model llama3-8b

Passes that are not on the critical path run slower, at less energy, while the iteration takes no
longer: the least energy of a pipeline at each iteration time (arXiv:2312.06902), exact for convex
energies. The graph of passes is cut once per unit of time (solvers.max_flow); schedules.py lists
the passes, and simulates them.

When it loses: times come from formulas or from --problem, not from a profile of the machine. GPUs
cannot change their clock for each pass when passes are shorter than some ten milliseconds, and
train.py sets none: it runs the layers that are printed. test_all.py compares the frontier with all
plans of small random problems. Needs: the standard library.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import argparse
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple

from parallelism.schedules import Action, Schedule, make_schedule, simulate
from planner.cost_model import load_device, load_shape, parse_number, require
from planner.pipeline_search import ActionCosts, stage_flags, stage_passes
from planner.flags import is_positive, read_problem
from planner.solvers import Arcs, lower_hull, max_flow

WAITING_WATTS = 75.5  # of a GPU blocked in a receive: the default of Perseus's lowtime library


def energy_curve(options: Mapping[float, float], unit: float = 1) -> dict[int, float]:
    """Least joules at each whole number of time units, from options {seconds: joules}: the lower
    convex hull from the fastest option, rounded up, to the one with the least energy."""
    hull = lower_hull(options.items())
    first = max(1, math.ceil(hull[0][0] / unit * (1 - 1e-9)))
    curve, lines = {first: hull[0][1]}, list(itertools.pairwise(hull))
    for t in range(first, int(hull[-1][0] / unit * (1 + 1e-9)) + 1 if lines else first):
        # of a convex curve, the highest of all lines
        curve[t] = max(e + (t * unit - s) * (f - e) / (u - s) for (s, e), (u, f) in lines)
    return curve


class Point(NamedTuple):
    """A Pareto-optimal plan: time units and joules of an iteration, units of each pass."""

    time: int
    joules: float
    plan: dict[Action, int]


def energy_frontier(
    schedule: Schedule, curves: Callable[[Action], dict[int, float]]
) -> Iterator[Point]:
    """The plans with the least energy at each time, from the slowest useful one to the fastest.

    Events are starts and ends of passes; the time between the two of a pass is what it may take,
    and curves(action) is its energy by time (convex and decreasing, see energy_curve). One unit
    faster: events on one side of a cut move one unit earlier. The minimum cut of (energy of passes
    that get shorter) - (gain of passes that get longer) keeps the plan optimal, because the total
    energy is L-natural-convex in the events (Phillips and Dessouky, Management Science 1977).
    """
    curve_of = {a: curves(a) for actions in schedule.actions for a in actions}
    slowest = ActionCosts(of=lambda a: max(curve_of[a]))
    at: dict[Hashable, int] = {"begin": 0}
    arcs: list[tuple[Hashable, Hashable, dict[int, float]]] = []
    keys, order = {a[:3]: a for a in curve_of}, {0: 0.0}
    for events in simulate(schedule, slowest).events:
        last = "begin"
        for start, end, a in events:
            at[a, "start"], at[a, "end"] = round(start), round(end)
            before = [last, *((keys[key], "end") for key in schedule.dependencies(a))]
            arcs += [(node, (a, "start"), order) for node in before]
            arcs.append(((a, "start"), (a, "end"), curve_of[a]))
            last = a, "end"
        arcs.append((last, "finish", order))
    at["finish"] = max(at.values())
    while True:
        plan = {a: min(at[a, "end"] - at[a, "start"], max(c)) for a, c in curve_of.items()}
        yield Point(at["finish"], sum(curve_of[a][t] for a, t in plan.items()), plan)
        found = max_flow(cut_arcs(arcs, at), "begin", "finish")
        if found is None:  # no pass on the critical path can be faster
            return
        for node in at:
            at[node] -= node not in found[1]


def cut_arcs(arcs: Iterable[tuple], at: Mapping[Hashable, int]) -> Arcs:
    """Arcs whose cuts cost the energy of a unit less between the sides. A pass that gets longer is
    an arc that crosses back, with a negative cost; as [u in S] - [v in S] is [u -> v crosses] - [v
    -> u crosses], adding `gain` of that to an arc leaves it a cost in one direction only, and each
    node a cost of its side."""
    capacity, side = defaultdict(float), defaultdict(float)
    for u, v, curve in arcs:
        time, least, most = at[v] - at[u], min(curve), max(curve)
        loss = math.inf if time == least else curve[time - 1] - curve[time] if time <= most else 0.0
        gain = curve[time] - curve[time + 1] if time < most else 0.0
        if loss > gain:
            capacity[u, v] += loss - gain
        side[u] += gain
        side[v] -= gain
    for node, cost in side.items():
        if cost > 0 and node not in ("begin", "finish"):
            capacity[node, "finish"] += cost
        elif cost < 0 and node not in ("begin", "finish"):
            capacity["begin", node] -= cost
    return capacity


PERSEUS = {
    "pp": 4,
    "micro_batches": 8,
    "clocks": [1.0, 0.9, 0.8, 0.7, 0.6, 0.5],  # of the highest
    "watts": 700.0,  # at the highest clock: the limit of an H100 SXM (datasheet)
    "waiting": WAITING_WATTS,
    "options": None,  # of each stage [F, B], each {seconds: joules}; default: from the model
    "units": 8,  # of time in the shortest pass: times are rounded to one
    "seconds": None,  # of the slowest pipeline of a job, if it is another one ("straggler")
}
Stage = list[dict[float, float]]  # {seconds: joules} of its F and its B


def clock_options(p: argparse.Namespace, seconds: float) -> dict[float, float]:
    """{seconds: joules} of a pass that takes `seconds` at the highest clock: its time is as 1 /
    clock, its power above that of a waiting GPU as the clock's cube (f V^2 with V ~ f)."""
    power = lambda clock: p.waiting + (p.watts - p.waiting) * clock**3
    return {seconds / clock: power(clock) * seconds / clock for clock in p.clocks}


def read_stages(p: argparse.Namespace, args: argparse.Namespace) -> tuple[list[Stage], str]:
    """(options of each stage, the flags of train.py with its layers)."""
    if p.options is None:
        ok = all(is_positive(clock) and clock <= 1 for clock in p.clocks)
        require(ok, "--problem: clocks must be fractions of the highest: above 0, at most 1")
        ok = p.watts > p.waiting
        require(ok, f"--problem: watts {p.watts:g} must be above waiting {p.waiting:g}")
        shape, seq = load_shape(args.model), parse_number(args.seq, "--seq", 1024)
        ok = p.pp <= shape.layers
        require(ok, f"--problem: pp {p.pp} is more than the model's {shape.layers} layers")
        counts, times = stage_passes(shape, load_device(args.device), seq, p.pp)
        options = [[clock_options(p, t) for t in stage] for stage in times]
        return options, stage_flags(args.model, counts)
    try:
        stages = [[{float(t): e for t, e in both.items()} for both in s] for s in p.options]
        numbers = [x for s in stages for both in s for pair in both.items() for x in pair]
        require(all(map(is_positive, numbers)) and all(map(all, stages)), "")
        require(len(stages) == p.pp and all(len(s) == 2 for s in stages), "")
    except (AttributeError, TypeError, ValueError):
        text = f"{p.pp} stages (pp) of [F, B], each {{seconds: joules}} with positive numbers"
        raise ValueError(f"--problem: options must be {text}") from None
    return stages, f"train.py --pp {p.pp} --pp-schedule 1f1b"


def perseus_report(args: argparse.Namespace) -> str:
    """The energy of an iteration by its time, and the plan that fits in `seconds`, or the fastest.
    Between two options of a pass, energy is interpolated: run it part of the time at each."""
    p = read_problem(args, PERSEUS)
    stages, flags = read_stages(p, args)
    ok = p.seconds is None or is_positive(p.seconds)
    require(ok, f"--problem: seconds must be positive, not {p.seconds}")
    ok = p.pp * p.micro_batches <= 512
    require(ok, f"--problem: pp {p.pp} x micro_batches {p.micro_batches} is more than 512")
    shortest, *_, longest = sorted(t for stage in stages for both in stage for t in both)
    unit = shortest / p.units
    text = f"--problem: passes of {shortest:g} to {longest:g} s are more than 1,000 units"
    require(longest <= 1000 * unit, f"{text}; lower units, or leave slow options out")
    # as a GPU waits at all other times, a pass costs what it takes above that
    curve = lambda both: energy_curve({t: e - p.waiting * t for t, e in both.items()}, unit)
    curves = [[*map(curve, stage)] for stage in stages]
    of_action = lambda rows, a: rows[a.chunk]["FB".index(a.kind)]
    curve_of = lambda a: of_action(curves, a)
    schedule = make_schedule("1f1b", p.pp, p.micro_batches)
    points = [*energy_frontier(schedule, curve_of)][::-1]
    idle = lambda seconds: p.waiting * p.pp * seconds
    total = lambda point: point.joules + idle(point.time * unit)
    fastest = simulate(schedule, ActionCosts(of=lambda a: min(of_action(stages, a)))).makespan
    highest = idle(fastest)
    for both in (of_action(stages, a) for a in points[0].plan):
        highest += both[min(both)] - p.waiting * min(both)
    row = lambda x: f"{x.time * unit:>9.3f}{total(x):>10,.0f}{1 - total(x) / highest:>8.1%}"
    points = points[: 1 + min(range(len(points)), key=lambda i: total(points[i]))]
    chosen = [x for x in points if x is points[0] or x.time * unit <= (p.seconds or 0)][-1]
    some = {round(i * (len(points) - 1) / 6) for i in range(7)}
    return "\n".join([
        f"1f1b, {p.pp} stages, {p.micro_batches} micro-batches; at the highest clocks "
        f"{fastest:.3f} s, {highest:,.0f} J",
        f"{'seconds':>9}{'joules':>10}{'saved':>8}",
        *(row(points[i]) for i in sorted(some)),
        f"{chosen.time * unit:.3f} s, {total(chosen):,.0f} J: time of each pass over its shortest",
        *(f"  {actions[0].chunk} {kind} " + " ".join(
            f"{chosen.plan[a] / min(curve_of(a)):.2f}" for a in actions if a.kind == kind
        ) for actions in schedule.actions for kind in "FB"),
        flags,
    ])  # fmt: skip
