"""Spindle: waves of the operators of several tasks, with devices by their scaling curves.

    python -m planner search spindle --gpus 16

A multi-task model has tasks of different sizes, and small ones do not scale to all devices. Waves
run some of them side by side (arXiv:2409.03365); a heuristic beside a lower bound.

When it loses: times come from formulas or from --problem, not from a profile of the machine. Waves
finish all tasks of one depth before the next: a task of few devices that could run beside the next
depth does not. test_all.py compares it with all waves of small random problems. Needs: the standard
library.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import argparse
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from planner.cost_model import Device, load_device, parse_number, require
from planner.flags import is_count, is_positive, read_problem
from planner.solvers import lower_hull
from planner.training_plan import Plan, block, divisors, passes


@dataclass(frozen=True)
class Task:
    """`count` equal operators in a row (a MetaOp), seconds[n]: of one on n devices; after: tasks
    whose outputs it reads."""

    count: int
    seconds: Mapping[int, float]
    after: tuple[str, ...] = ()


class Wave(NamedTuple):
    """Tasks that run side by side: name -> (devices, operators)."""

    seconds: float
    runs: dict[str, tuple[int, int]]


def speed_hull(task: Task, devices: int) -> list[tuple[int, float]]:
    """(devices, operators per second), from (0, 0) up: the concave hull of the scaling curve, the
    mean speeds that time-sharing of allocations reaches."""
    speeds = ((n, -1 / t) for n, t in task.seconds.items() if n <= devices)
    return [(n, -speed) for n, speed in lower_hull([(0, 0.0), *speeds])]


def relax(tasks: Mapping[str, Task], devices: int) -> tuple[float, dict[str, float]]:
    """(seconds, devices of each task) of independent tasks that end together on fractions of
    devices. No schedule is shorter: speeds are concave, so constant allocations are best (theorem
    1; Blazewicz et al., Annals of OR 2004)."""
    hulls = {name: speed_hull(task, devices) for name, task in tasks.items()}

    def needed(name: str, seconds: float) -> float:
        speed = tasks[name].count / seconds
        for (n0, s0), (n1, s1) in itertools.pairwise(hulls[name]):
            if speed <= s1:
                return n0 + (n1 - n0) * (speed - s0) / (s1 - s0)
        return math.inf

    low, high = 0.0, 2 * sum(t.count / hulls[name][1][1] for name, t in tasks.items())
    for _ in range(60):
        middle = (low + high) / 2
        fits = sum(needed(name, middle) for name in tasks) <= devices
        low, high = (low, middle) if fits else (middle, high)
    return high, {name: needed(name, high) for name in tasks}


def allocations(tasks: Mapping[str, Task], devices: int) -> Iterator[dict[str, int]]:
    """All ways to run some of the tasks side by side: name -> devices."""
    if not tasks:
        yield {}
        return
    (name, task), *others = tasks.items()
    for n in [0, *(n for n in task.seconds if n <= devices)]:
        for rest in allocations(dict(others), devices - n):
            yield {name: n} | rest if n else rest


def candidate_waves(
    tasks: Mapping[str, Task], chosen: Mapping[str, int], left: Mapping[str, int]
) -> Iterator[Wave]:
    """Waves with `chosen` devices for each task that end with one of the operators left."""
    times = {name: tasks[name].seconds[n] for name, n in chosen.items()}
    for name, time in times.items():
        for c in range(1, left[name] + 1):
            end = c * time * (1 + 1e-9)
            counts = {n: min(left[n], int(end / t)) for n, t in times.items()}
            if all(counts.values()):
                took = max(counts[n] * t for n, t in times.items())
                yield Wave(took, {n: (chosen[n], count) for n, count in counts.items()})


def best_wave(
    tasks: Mapping[str, Task], left: Mapping[str, int], work: Mapping[str, float], devices: int
) -> Wave:
    """The wave that does the most work per second, the longer of equal ones."""
    best, found = (0.0, 0.0), None
    for chosen in allocations(tasks, devices):
        for wave in candidate_waves(tasks, chosen, left):
            done = sum(count * work[name] for name, (_, count) in wave.runs.items())
            key = round(done / wave.seconds, 9), wave.seconds
            if key > best:
                best, found = key, wave
    return found


def level_waves(tasks: Mapping[str, Task], devices: int) -> list[Wave]:
    """Waves of independent tasks, each the best one of up to 4 of the tasks with the most work
    left. An operator's work is its device-seconds in the relaxed plan, so that a wave of 1 second
    does at most `devices`. (The paper rounds the relaxed plan to two allocations of each task and
    fills waves with those.)"""
    seconds, shares = relax(tasks, devices)
    work = {name: shares[name] * seconds / task.count for name, task in tasks.items()}
    left = {name: task.count for name, task in tasks.items()}
    waves = []
    while any(left.values()):
        most = sorted((n for n in left if left[n]), key=lambda n: -left[n] * work[n])
        wave = best_wave({n: tasks[n] for n in most[:4]}, left, work, devices)
        for name, (_, count) in wave.runs.items():
            left[name] -= count
        waves.append(wave)
    return waves


def one_by_one(tasks: Mapping[str, Task], devices: int) -> list[Wave]:
    """Each task alone, on the allocation that is fastest."""
    waves = []
    for name, task in tasks.items():
        n = min((n for n in task.seconds if n <= devices), key=task.seconds.__getitem__)
        waves.append(Wave(task.count * task.seconds[n], {name: (n, task.count)}))
    return waves


def plan_waves(tasks: Mapping[str, Task], devices: int) -> tuple[list[Wave], float]:
    """(waves, a lower bound of their time): tasks at the same depth of the graph share waves, one
    depth after the other. The bound is of plans by depth: a plan that mixes depths can be shorter.
    """
    depth: dict[str, int] = {}
    while len(depth) < len(tasks):
        ready = [n for n in tasks if n not in depth and {*tasks[n].after} <= {*depth}]
        require(ready, "spindle: 'after' names an unknown task, or tasks wait for each other")
        depth |= {n: 1 + max((depth[a] for a in tasks[n].after), default=-1) for n in ready}
    waves, bound = [], 0.0
    for level in sorted({*depth.values()}):
        some = {n: t for n, t in tasks.items() if depth[n] == level}
        for name, task in some.items():
            ok = min(task.seconds) <= devices
            require(ok, f"spindle: {name} needs {min(task.seconds)} devices of {devices}")
        ways = level_waves(some, devices), one_by_one(some, devices)
        waves += min(ways, key=lambda found: sum(wave.seconds for wave in found))
        bound += relax(some, devices)[0]
    return waves, bound


SPINDLE = {
    "tasks": {  # layers, width, heads, tokens of a sample, samples, [tasks before it]
        # ViT-H's layers (arXiv:2010.11929, table 1), wav2vec 2.0 Large's (2006.11477), BERT's
        "image": [32, 1280, 16, 256, 64, []],
        "audio": [24, 1024, 16, 512, 32, []],
        "text": [12, 768, 12, 512, 32, []],
        "image-text": [12, 1024, 16, 768, 32, ["image", "text"]],
        "audio-text": [12, 1024, 16, 1024, 16, ["audio", "text"]],
    }
}


def make_task(name: str, given: Any, device: Device, gpus: int) -> Task:
    """A task of a problem: given times, or those of formulas with its samples divided over GPUs,
    without the all-reduce of their gradients."""
    try:
        *sizes, after = given
        if len(sizes) == 2:
            count, seconds = sizes[0], {int(n): t for n, t in sizes[1].items()}
            ok = min(seconds) > 0 and all(map(is_positive, seconds.values()))
        else:
            count, dim, heads, seq, samples = sizes
            ok = all(map(is_count, sizes)) and dim % heads == 0
            one = lambda n: sum(passes(block(1, dim, heads), device, seq, Plan(micro=samples // n)))
            seconds = {n: one(n) for n in divisors(samples) if n <= gpus} if ok else {}
        ok = ok and is_count(count) and count <= 1000 and isinstance(after, list)
        require(ok and all(isinstance(a, str) for a in after), "")
        return Task(count, seconds, tuple(after))
    except (TypeError, ValueError, AttributeError):
        raise ValueError(
            f"--problem: tasks: {name} must be [layers, width, heads, tokens, samples, [before]] "
            "or [layers, {GPUs: seconds}, [before]]: positive, at most 1,000 layers, whole heads"
        ) from None


def spindle_report(args: argparse.Namespace) -> str:
    """The waves, and their time beside that of one task after another and the bound."""
    p, device = read_problem(args, SPINDLE), load_device(args.device)
    gpus = parse_number(args.gpus, "--gpus")
    tasks = {name: make_task(name, given, device, gpus) for name, given in p.tasks.items()}
    waves, bound = plan_waves(tasks, gpus)
    total, alone = (sum(w.seconds for w in found) for found in (waves, one_by_one(tasks, gpus)))
    lines = [
        f"{len(tasks)} tasks on {gpus} {args.device}: {total * 1e3:.2f} ms; one after another "
        f"{alone * 1e3:.2f}; by depth, no plan takes less than {bound * 1e3:.2f}",
        f"{'ms':>9}{'GPUs':>6}  operators on GPUs",
    ]
    for seconds, runs in waves:
        used = sum(n for n, _ in runs.values())
        text = ", ".join(f"{name} {count} on {n}" for name, (n, count) in runs.items())
        lines.append(f"{seconds * 1e3:>9.2f}{used:>6}  {text}")
    return "\n".join(lines)
