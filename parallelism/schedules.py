"""Pipeline schedules as lists of actions, with one validity check and one simulator.

Splitting a model into stages on p ranks and a batch into m microbatches (GPipe, arXiv:1811.06965)
gives a grid of work, of which each rank executes its part in some order. That order is the idea of
a dozen papers. Here it is data: one list per rank of actions (kind, microbatch, chunk). A chunk is
a part of the model that one rank owns (torch's and Megatron's virtual stage), and the kinds are

    F  forward        B  backward: input gradients; weight gradients too, unless a W follows
    W  weight gradients                          U  optimizer step (PipeDream: each microbatch)

The messages follow from the lists: an F needs the F of the previous chunk, a B the B of the next.
`validate` verifies that any list can be executed, `simulate` computes its time and memory, and
pipeline.py runs it.

    schedule         bubble per rank           memory     chunks
    gpipe            (p-1)(F+B+W)              m          1      arXiv:1811.06965
    1f1b             (p-1)(F+B+W)              p          1      PipeDream-flush, arXiv:2006.09503
    pipedream        none between batches      p          1      arXiv:1806.03377: stashed weights
    interleaved      (p-1)(F+B+W)/v            p+(p-1)/v  v      arXiv:2104.04473, 2.2.2
    breadth-first    (p-1)(F+B+W)/v            m          v      arXiv:2211.05953
    zb-h1            (p-1)(F+B-W)              p          1      arXiv:2401.10241, 2.1
    zb-h2            (p-1)(F+B-2W)             2p-1       1      arXiv:2401.10241, 2.2
    zbv              0 where F = B = W         p          2, V   arXiv:2401.10241, 6
    v-half           ~ 1/2 of 1f1b's           ~ p/2      2, V   arXiv:2405.15362
    v-min            ~ 2/3 of 1f1b's           ~ p/3      2, V   arXiv:2405.15362
    dualpipe         (p/2-1)(FB+B-2W)          p+1        2      arXiv:2412.19437, 3.2.1
    dualpipev        (p-1)(FB+B-2W)/2          p+1/2      2, V   DeepSeek's DualPipe repository

F, B, W: time of a rank's share of the model for one microbatch; FB: time of an F overlapped with a
full backward pass. Memory: peak activations, in units of one microbatch's activations of a rank's
share. The bubbles are exact for m >= 2p and, from zb-h1 on, W no longer than F and B; DualPipe's
for F = B and FB = F+B+W: a faster FB leaves a smaller bubble.
V: rank r has stages r and 2p-1-r, so rank 0 has both ends of the model. DualPipe's two chunks are
stages r and p-1-r, with half of the microbatches in each direction: every stage exists twice.

When it loses: more chunks send more activations; a separate W reads its input again and pays only
while m is not many times p; `zbv` has no bubble for equal times only. Needs: nothing.
`python parallelism/schedules.py --schedule zbv --stages 4 --microbatches 8` plots a schedule;
without arguments it prints the table above in numbers.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import math
import re
import shutil
import string
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


class Action(NamedTuple):
    """One entry of a rank's list. str(): F0.1, and F0.1+ if it overlaps with the next action."""

    kind: str  # F, B, W or U
    microbatch: int
    chunk: int
    overlap: bool = False  # runs at the same time as the rank's next action (DualPipe's F and B)

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.chunk}{'+' if self.overlap else ''}"


@dataclass(frozen=True)
class Schedule:
    """The ordered actions of every rank. Chunks are numbered over all ranks; a microbatch passes
    through the chunks of one path, in the order of the model."""

    name: str
    microbatches: int
    chunk_to_rank: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]  # one of all microbatches, or one of each half
    actions: tuple[tuple[Action, ...], ...]  # per rank

    def path(self, microbatch: int) -> tuple[int, ...]:
        return self.paths[microbatch * len(self.paths) // self.microbatches]

    def stage(self, chunk: int) -> int:
        """The chunk's index in the order of the model."""
        return next(path.index(chunk) for path in self.paths if chunk in path)

    def dependencies(self, action: Action) -> list[tuple[str, int, int]]:
        """The (kind, microbatch, chunk) that must finish before the action starts."""
        kind, m, chunk, _ = action
        if kind in "WU":
            return [("B", m, chunk)]
        path = self.path(m)
        at = path.index(chunk)
        if kind == "F":
            return [("F", m, c) for c in path[:at][-1:]]
        return [("F", m, chunk), *(("B", m, c) for c in path[at + 1 : at + 2])]

    def split_backwards(self) -> set[tuple[int, int]]:
        """(microbatch, chunk) of the backward passes whose weight gradients are a W."""
        return {a[1:3] for actions in self.actions for a in actions if a.kind == "W"}

    def __str__(self) -> str:
        """One line per path and per rank, such as F0.1 (kind, microbatch.chunk); see `parse`."""
        head = [f"# {self.name}: {self.microbatches} microbatches"]
        head += [" > ".join(f"{c}@{self.chunk_to_rank[c]}" for c in path) for path in self.paths]
        return "\n".join((*head, *(" ".join(map(str, actions)) for actions in self.actions)))


def parse(text: str) -> Schedule:
    """Inverse of str(schedule). ValueError names the invalid line."""
    head, *lines = text.strip().splitlines() or [""]
    named = re.fullmatch(r"# (\S+): ([1-9]\d{0,8}) microbatches", head)
    _check(named is not None, f"line 1 must be '# NAME: M microbatches', not {head!r}")
    paths, actions, rank_of = [], [], {}
    for n, line in enumerate(lines, 2):
        try:
            if "@" in line:
                steps = [tuple(map(int, step.split("@"))) for step in line.split(">")]
                rank_of |= dict(steps)
                paths.append(tuple(chunk for chunk, _ in steps))
            else:
                words = [
                    re.fullmatch(r"([FBWU])(\d+)\.(\d+)(\+?)", w).groups() for w in line.split()
                ]
                actions.append(tuple(Action(k, int(m), int(c), bool(b)) for k, m, c, b in words))
        except (ValueError, AttributeError):
            raise ValueError(f"line {n} is neither chunk@rank > ... nor F0.0 B0.0 ...") from None
    chunks = sorted(c for path in paths for c in path)
    ok = chunks == list(range(len(chunks))) and len(set(map(len, paths))) == 1
    _check(ok, "the paths must have equal lengths and contain each chunk from 0 on once")
    chunk_to_rank = tuple(rank_of[c] for c in range(len(rank_of)))
    schedule = Schedule(named[1], int(named[2]), chunk_to_rank, tuple(paths), tuple(actions))
    validate(schedule)
    return schedule


# --------------------------------------------------------------------------------------------------
# One chunk per rank
# --------------------------------------------------------------------------------------------------


def _one_chunk_per_rank(
    name: str, p: int, m: int, of_rank: Callable[[int], Iterable[tuple[str, int]]]
) -> Schedule:
    """A schedule from of_rank(r) -> (kind, microbatch) in order."""
    chunks = tuple(range(p))
    actions = tuple(tuple(Action(kind, i, r) for kind, i in of_rank(r)) for r in chunks)
    return Schedule(name, m, chunks, (chunks,), actions)


def gpipe(p: int, m: int) -> Schedule:
    """All forward passes, then all backward passes in reverse order."""
    work = [("F", i) for i in range(m)] + [("B", i) for i in reversed(range(m))]
    return _one_chunk_per_rank("gpipe", p, m, lambda r: work)


def one_f_one_b(p: int, m: int, name: str = "1f1b") -> Schedule:
    """Warm-up forward passes until the first backward pass is possible, then one F and one B in
    turn (1F1B), so that rank r keeps the activations of p - r microbatches. PipeDream is the same
    list with an optimizer step after each B: there is no flush between batches, and a B needs the
    weights of its F (pipeline.py stashes them): the oldest of `warmup` versions."""

    def of_rank(r: int) -> Iterator[tuple[str, int]]:
        warmup = min(p - r, m)
        yield from (("F", i) for i in range(warmup))
        for i in range(m):
            yield "B", i
            if name == "pipedream":
                yield "U", i
            if i + warmup < m:
                yield "F", i + warmup

    return _one_chunk_per_rank(name, p, m, of_rank)


def zero_bubble(p: int, m: int, name: str = "zb-h1") -> Schedule:
    """1F1B with W delayed into the bubbles. H1 delays W by r microbatches; every rank then keeps p
    microbatches, as rank 0 of 1F1B does. H2 runs more warm-up forward passes, which fill the rest
    of the bubble: there is none if F = B = W and m >= 2p - 1."""

    def of_rank(r: int) -> Iterator[tuple[str, int]]:
        warmup, delay = (2 * (p - r) - 1, 2 * r) if name == "zb-h2" else (p - r, r)
        warmup = min(warmup, m)
        yield from (("F", i) for i in range(warmup))
        for i in range(m + delay):
            if i < m:
                yield "B", i
            if 0 <= i - delay:
                yield "W", i - delay
            if i + warmup < m:
                yield "F", i + warmup

    return _one_chunk_per_rank(name, p, m, of_rank)


# --------------------------------------------------------------------------------------------------
# Several chunks per rank
# --------------------------------------------------------------------------------------------------


def _looped(name: str, p: int, m: int, v: int, of_rank: Callable) -> Schedule:
    """Stage i on rank i mod p, from of_rank(r) -> (kind, microbatch, local chunk 0..v-1)."""
    rows = ([Action(kind, i, c * p + r) for kind, i, c in of_rank(r)] for r in range(p))
    return Schedule(name, m, (*range(p),) * v, (tuple(range(v * p)),), tuple(map(tuple, rows)))


def interleaved(p: int, m: int, v: int = 2) -> Schedule:
    """Interleaved 1F1B: each group of p microbatches runs on one chunk, then on the next."""
    _check(m % p == 0, f"interleaved on {p} stages needs a multiple of {p} microbatches, not {m}")

    def nth_forward(n: int) -> tuple[int, int]:
        group, index = divmod(n, p * v)
        return group * p + index % p, index // p

    def of_rank(r: int) -> Iterator[tuple[str, int, int]]:
        warmup = min(2 * (p - 1 - r) + (v - 1) * p + 1, m * v)
        yield from (("F", *nth_forward(n)) for n in range(warmup))
        for n in range(m * v):
            i, c = nth_forward(n)
            yield "B", i, v - 1 - c
            if n + warmup < m * v:
                yield "F", *nth_forward(n + warmup)

    return _looped("interleaved", p, m, v, of_rank)


def breadth_first(p: int, m: int, v: int = 2) -> Schedule:
    """All microbatches through one chunk, then through the next: FSDP gathers a chunk's parameters
    once for all of them."""
    work = [("F", i, c) for c in range(v) for i in range(m)]
    work += [("B", i, c) for c in reversed(range(v)) for i in range(m)]
    return _looped("breadth-first", p, m, v, lambda r: work)


def _v_shaped(name: str, p: int, m: int, of_rank: Callable) -> Schedule:
    """Stages r and 2p - 1 - r on rank r, from of_rank(r) -> (kind, microbatch, leg 0 or 1, and
    optionally overlap)."""
    rows = [[] for _ in range(p)]
    for r, row in enumerate(rows):
        for kind, i, leg, *overlap in of_rank(r):
            row.append(Action(kind, i, 2 * p - 1 - r if leg else r, *overlap))
    chunk_to_rank = (*range(p), *reversed(range(p)))
    return Schedule(name, m, chunk_to_rank, (tuple(range(2 * p)),), tuple(map(tuple, rows)))


def zbv(p: int, m: int) -> Schedule:
    """Rank r starts 2p - 1 - r microbatches before the first B of its last chunk; then F, B, W of
    both chunks alternate, one of which is always ready."""

    def of_rank(r: int) -> Iterator[tuple[str, int, int]]:
        n, work = max(m, 2 * p - 1), []
        done = {kind: [0, 0] for kind in "FBW"}

        def do(leg: int, kinds: str) -> None:
            for kind in kinds:
                work.append((kind, done[kind][leg], leg))
                done[kind][leg] += 1

        for _ in range(2 * (p - r) - 1):
            do(0, "F")
        for _ in range(r):
            do(1, "F")
            do(0, "F")
        for _ in range(p - r):
            do(1, "FBW")
        while done["F"][1] < n:
            do(0, "FBW" if done["F"][0] < n else "BW")
            do(1, "FBW")
        for _ in range(r):
            do(0, "B")
            do(1, "B")
        for _ in range(p - r):
            do(0, "BW")
        for leg in (1, 0):
            do(leg, "W" * (n - done["W"][leg]))
        return (one for one in work if one[1] < m)

    return _v_shaped("zbv", p, m, of_rank)


# With F = B = W = 1, a microbatch takes 6 units on a rank. Delays from one rank to the next of F
# down the V, F up, B down, B up. All 1: least memory; larger delays: more memory, smaller bubble.
SLOPES = {"v-min": (1, 1, 1, 1), "v-half": (2, 1, 2, 1)}


def building_block(p: int, slopes: Sequence[int]) -> list[list[int]]:
    """Start times of microbatch 0 on each rank (F of chunk 0, F of chunk 1, B of chunk 1, B of
    chunk 0), such that copies shifted by 6, 12, ... never collide (arXiv:2405.15362, 3). A rank
    keeps (sum of both lifetimes from F to B) / 6 chunk activations."""
    for turns in sorted(itertools.product(range(6), repeat=3), key=sum):
        start, ranks = 0, [[] for _ in range(p)]
        for slope, turn, way in zip(slopes, (*turns, 0), (1, -1, 1, -1)):
            for n, r in enumerate(range(p)[::way]):
                ranks[r].append(start + n * slope)
            start += (p - 1) * slope + 1 + turn
        if all(len({t % 6 for t in times}) == 4 for times in ranks):
            return ranks
    raise AssertionError(f"slopes {slopes} collide on {p} ranks")


def v_controlled(p: int, m: int, name: str) -> Schedule:
    """Repeated building blocks. W runs where no F or B is ready, or where one more F would exceed
    the memory of the building block."""
    todo, legs = [], ((0, "F"), (1, "F"), (1, "B"), (0, "B"))
    block = building_block(p, SLOPES[name])
    for times in block:
        order = sorted((t + 6 * i, i, leg, k) for t, (leg, k) in zip(times, legs) for i in range(m))
        todo.append([(k, i, leg) for _, i, leg, k in order])
    # chunks alive in the steady state, from F to the end of B (2 units); W may lag by 2 more
    most = [-(-(b0 - f0 + b1 - f1 + 4) // 6) + 2 for f0, f1, b1, b0 in block]
    plain = _v_shaped(name, p, m, todo.__getitem__)  # all F and B, for their dependencies
    done: dict[tuple[str, int, int], int] = {}
    kept, deferred, out = [0] * p, [[] for _ in range(p)], [[] for _ in range(p)]
    now = 0
    while any(todo) or any(deferred):
        now += 1
        for r in range(p):
            ready = False
            if todo[r]:
                action = plain.actions[r][len(plain.actions[r]) - len(todo[r])]  # the next one
                ready = all(done.get(one, now) < now for one in plain.dependencies(action))
                ready &= action.kind == "B" or kept[r] < most[r] or not deferred[r]
            if ready:
                kind, i, leg = todo[r].pop(0)
                done[action[:3]] = now
                deferred[r] += [("W", i, leg)] if kind == "B" else []
                kept[r] += kind == "F"
            elif deferred[r]:
                kind, i, leg = deferred[r].pop(0)
                kept[r] -= 1
            else:
                continue
            out[r].append((kind, i, leg))
    return _v_shaped(name, p, m, out.__getitem__)


def _dualpipe_order(p: int, m: int, r: int) -> list[tuple[str, int, int, bool]]:
    """DualPipe's order on rank r of p, whose two chunks each run m microbatches: warm up one chunk,
    then the other; in the steady state overlap an F of one with a B of the other; cool down with
    split backward passes, whose W fill the bubbles."""
    work, deferred, rest = [], [], p - 1 - r
    count = {kind: [0, 0] for kind in "FB"}

    def do(kind: str, leg: int, overlap: bool = False, split: bool = False) -> None:
        i = count[kind][leg]
        count[kind][leg] += 1
        work.append((kind, i, leg, overlap))
        deferred.extend([("W", i, leg, False)] if split else [])

    def both(one: int, overlap: bool = True) -> None:
        do("F", one, overlap)
        do("B", 1 - one)

    for _ in range(2 * rest):
        do("F", 0)
    for _ in range(r + 1):
        do("F", 0)
        do("F", 1)
    for _ in range(rest):
        do("B", 1, split=True)
        work.append(deferred.pop(0))
        do("F", 1)
    for i in range(m - 2 * p + r + 1):
        both(0, overlap=i > 0 or rest > 0)  # first pair on the last rank: F is sent immediately
        both(1)
    for _ in range(rest):
        do("B", 1)
        both(1)
    for i in range(2 * (r + 1)):
        do("B", 1 - i % 2, split=i > r)
    for _ in range(rest):
        work.append(deferred.pop(0))
        do("B", 0, split=True)
    return work + deferred


def dualpipev(p: int, m: int) -> Schedule:
    """The first half of DualPipe's ranks; the second chunks replace the second half."""
    _check(m >= 2 * p, f"dualpipev needs at least {2 * p} microbatches, twice the stages; not {m}")
    return _v_shaped("dualpipev", p, m, partial(_dualpipe_order, p, m))


def dualpipe(p: int, m: int) -> Schedule:
    """Microbatches enter at both ends: chunk r, on rank r, is stage r for the first half of them;
    chunk 2p - 1 - r, on the same rank, is stage p - 1 - r for the second half."""
    _check(p % 2 == 0, f"dualpipe needs an even number of stages, not {p}")
    ok = m % 2 == 0 and m >= 2 * p
    _check(ok, f"dualpipe needs an even number of microbatches, {2 * p} or more; not {m}")
    rows = []
    for r in range(p):
        chunks, far = (r, 2 * p - 1 - r), int(r >= p // 2)
        rows.append(tuple(
            Action(kind, i + (leg ^ far) * (m // 2), chunks[leg ^ far], overlap)
            for kind, i, leg, overlap in _dualpipe_order(p // 2, m // 2, min(r, p - 1 - r))
        ))  # fmt: skip
    paths = tuple(range(p)), tuple(range(p, 2 * p))
    return Schedule("dualpipe", m, (*range(p), *reversed(range(p))), paths, tuple(rows))


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "pipedream": partial(one_f_one_b, name="pipedream"),
    "interleaved": interleaved,
    "breadth-first": breadth_first,
    "zb-h1": zero_bubble,
    "zb-h2": partial(zero_bubble, name="zb-h2"),
    "zbv": zbv,
    "v-half": partial(v_controlled, name="v-half"),
    "v-min": partial(v_controlled, name="v-min"),
    "dualpipe": dualpipe,
    "dualpipev": dualpipev,
}
LOOPED = ("interleaved", "breadth-first")  # the schedules with any number of chunks per rank


def make_schedule(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """A schedule by name. chunks: per rank, for the LOOPED schedules (default 2). ValueError for an
    unknown name or unsupported numbers."""
    _check(name in SCHEDULES, f"unknown schedule {name!r}; choose from {', '.join(SCHEDULES)}")
    for what, n in (("stages", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        _check(n is None or n >= 1, f"{what} must be at least 1, not {n}")
    ok = chunks is None or name in LOOPED
    _check(ok, f"chunks require {' or '.join(LOOPED)}: {name} has a fixed number of chunks")
    size = f"{ranks} stages x {microbatches} microbatches x {chunks or 1} chunks"
    _check(ranks * microbatches * (chunks or 1) <= 10**6, f"{size} are more than 10^6")
    return SCHEDULES[name](ranks, microbatches, *([chunks] if chunks else []))


# --------------------------------------------------------------------------------------------------
# Check and simulation
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Times of one microbatch on a rank's share of the model, in any unit. B: input gradients only;
    a B without a W takes B + W. overlapped: an F overlapped with such a B (default F + B + W).
    send: latency between ranks, hidden behind compute."""

    F: float = 1.0
    B: float = 1.0
    W: float = 1.0
    overlapped: float | None = None
    send: float = 0.0

    def duration(self, actions: Sequence[Action], schedule: Schedule, split: set) -> float:
        """Time of one action, or of two overlapped actions."""
        stages, ranks = len(schedule.paths[0]), len(schedule.actions)
        spent = 0.0
        for kind, m, chunk, _ in actions:
            whole = {"F": self.F, "B": self.B, "W": self.W, "U": 0.0}[kind]
            whole += self.W if kind == "B" and (m, chunk) not in split else 0.0
            spent += whole * ranks / stages
        alone = self.F + self.B + self.W
        factor = 1.0 if self.overlapped is None else self.overlapped / alone
        return spent * (factor if len(actions) > 1 else 1.0)


class Event(NamedTuple):
    """An action and its simulated time."""

    start: float
    end: float
    action: Action


@dataclass(frozen=True)
class Timeline:
    """Start and end of every action, with peak memory and bubbles."""

    schedule: Schedule
    events: tuple[tuple[Event, ...], ...]  # per rank
    peaks: tuple[float, ...]  # per rank: peak activations, in microbatches of its share

    @property
    def makespan(self) -> float:
        return max(events[-1].end for events in self.events)

    @property
    def busy(self) -> list[float]:
        """Compute time of each rank."""
        return [sum(end - start for start, end in {e[:2] for e in es}) for es in self.events]

    @property
    def bubble(self) -> float:
        """Idle time of the worst rank between its first and its last action: the next step may
        begin while other ranks finish this one (arXiv:2401.10241, 2)."""
        spans = (events[-1].end - events[0].start for events in self.events)
        return max(span - busy for span, busy in zip(spans, self.busy))

    @property
    def bubble_fraction(self) -> float:
        """Idle fraction of all ranks' time until the last action ends."""
        return 1 - sum(self.busy) / (self.makespan * len(self.events))


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Timeline:
    """Execute every rank's list in order, each action as soon as its dependencies are done.
    ValueError for a deadlock, with the blocked ranks and what each waits for."""
    rank_of, split = schedule.chunk_to_rank, schedule.split_backwards()
    done: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * len(schedule.actions), [0] * len(schedule.actions)
    events: list[list[Event]] = [[] for _ in schedule.actions]
    waiting: dict[tuple[str, int, int], list[int]] = {}  # what -> ranks
    ready = list(range(len(events)))
    while ready:
        r = ready.pop()
        while at[r] < len(schedule.actions[r]):
            first = schedule.actions[r][at[r]]
            actions = schedule.actions[r][at[r] : at[r] + 1 + first.overlap]
            dependencies = {one for a in actions for one in schedule.dependencies(a)}
            missing = next((one for one in dependencies if one not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(r)
                break
            arrivals = [
                done[one] + (costs.send if rank_of[one[2]] != r else 0.0) for one in dependencies
            ]
            start = max(free[r], *arrivals, 0.0)
            free[r] = end = start + costs.duration(actions, schedule, split)
            for a in actions:
                done[a[:3]] = end
                events[r].append(Event(start, end, a))
                ready += waiting.pop(a[:3], [])
            at[r] += len(actions)
    stuck = [f"rank {r} has {schedule.actions[r][at[r]]}, which needs {Action(*what)}"
             for what, ranks in waiting.items() for r in ranks]  # fmt: skip
    _check(not stuck, f"{schedule.name} deadlocks: {'; '.join(stuck)}")
    peaks = tuple(_peak(schedule, actions, split) for actions in schedule.actions)
    return Timeline(schedule, tuple(map(tuple, events)), peaks)


def _peak(schedule: Schedule, actions: Iterable[Action], split: set) -> float:
    """The most activations alive at once: from an F to its W, or to its B if it has no W."""
    freed_by = lambda a: "W" if a[1:3] in split else "B"
    alive = itertools.accumulate((a.kind == "F") - (a.kind == freed_by(a)) for a in actions)
    return max(alive) * len(schedule.actions) / len(schedule.paths[0])


def validate(schedule: Schedule) -> None:
    """Validate a schedule. Every microbatch must have one F and one B for every chunk of its path,
    on the chunk's rank, at most one W, and U after these, on a chunk for all microbatches or none;
    and there must be no deadlock. ValueError says what is wrong."""
    seen: dict[tuple[str, int, int], int] = {}
    for r, actions in enumerate(schedule.actions):
        _check(len(actions) > 0, f"rank {r} has no actions")
        for action, after in itertools.zip_longest(actions, actions[1:]):
            kind, m, chunk, overlap = action
            known = kind in ("F", "B", "W", "U") and 0 <= m < schedule.microbatches
            known = known and chunk in schedule.path(m)
            _check(known, f"rank {r} has {action}: unknown kind, microbatch or chunk of its path")
            owner = schedule.chunk_to_rank[chunk]
            _check(owner == r, f"rank {r} has {action}, but chunk {chunk} is on rank {owner}")
            _check(action[:3] not in seen, f"rank {r} has {action} twice")
            seen[action[:3]] = r
            alone = overlap and (after is None or after.overlap)
            _check(not alone, f"rank {r} has {action}, with no single next action to overlap")
    updated = {chunk for kind, _, chunk in seen if kind == "U"}
    for m in range(schedule.microbatches):
        for kind, chunk in itertools.product("FBU", schedule.path(m)):
            missing = f"{Action(kind, m, chunk)} is missing on rank {schedule.chunk_to_rank[chunk]}"
            ok = (kind, m, chunk) in seen or (kind == "U" and chunk not in updated)
            _check(ok, missing)
    for r, actions in enumerate(schedule.actions):
        w = {a[1:3]: a for a in actions if a.kind == "W"}
        for n, a in enumerate(actions):
            ok = a.kind != "U" or w.get(a[1:3], a) in actions[: n + 1]
            _check(ok, f"rank {r} has {a} before {w.get(a[1:3])}, so it misses these gradients")
    simulate(schedule)


# --------------------------------------------------------------------------------------------------
# Stages of a model
# --------------------------------------------------------------------------------------------------


def partition(
    layers: int,
    devices: int,
    seconds: Callable[[int, int, int], float],
    microbatches: int,
    stages: int | None = None,
    sizes: Sequence[int] = (1,),
) -> list[tuple[int, int, int]]:
    """Partition layers 0..layers-1 into consecutive stages (first, last + 1, devices) that minimize
    the time of a batch, sum(t) + (microbatches - 1) max(t). t = seconds(first, last + 1, devices)
    is the time of a microbatch on a stage, math.inf if it does not fit (Alpa, arXiv:2201.12023,
    5.2; PipeDream's partitioner, arXiv:1806.03377, 3.1, is the case of many microbatches). All
    devices are used, in groups of `sizes`. stages: their number (default: any).

    For each bound on max(t), from the smallest feasible one until the bound alone costs more than
    the best: the least sum, by dynamic programming over (layers, devices, stages). ValueError if
    nothing fits.
    """
    most = min(layers, devices)
    ok = stages is None or 1 <= stages <= most
    _check(ok, f"{stages} stages of {layers} layers on {devices} devices: choose 1 to {most}")
    _check(microbatches >= 1, f"microbatches must be at least 1, not {microbatches}")
    spans = itertools.combinations(range(layers + 1), 2)
    times = {(i, j, d): seconds(i, j, d) for i, j in spans for d in sizes if d <= devices}
    best, partition_ = math.inf, None
    least = partial(_least_sum, layers, devices, stages, times)
    bounds = sorted({t for t in times.values() if t < math.inf})
    for bound in bounds[bisect.bisect(bounds, 0, key=lambda t: least(t)[0] < math.inf) :]:
        if microbatches * bound >= best:  # the sum is at least its largest term
            break
        total, found = least(bound)
        slowest = max(times[stage] for stage in found)
        if total + (microbatches - 1) * slowest < best:
            best, partition_ = total + (microbatches - 1) * slowest, found
    _check(partition_ is not None, f"no partition of {layers} layers fits {devices} devices"
           + (f" in {stages} stages" if stages else "") + ": use more devices")  # fmt: skip
    return partition_


def _least_sum(
    layers: int, devices: int, stages: int | None, times: dict, bound: float
) -> tuple[float, list[tuple[int, int, int]]]:
    """The partition with the least sum(t) and every t <= bound; (inf, []) if there is none."""
    after: dict[tuple[int, int, int], list] = {}  # first layer -> stages that begin there
    for (i, j, d), t in times.items():
        if t <= bound:
            after.setdefault(i, []).append((t, j, d))
    # (layers done, devices used, stages) -> (sum, the last stage, the state before)
    best: dict[tuple[int, int, int], tuple] = {(0, 0, 0): (0.0, None, None)}
    for i in range(layers):
        for state in [s for s in best if s[0] == i]:
            for t, j, d in after.get(i, []):
                new = j, state[1] + d, state[2] + (stages is not None)
                if new[1] > devices or (stages is not None and new[2] > stages):
                    continue
                if best[state][0] + t < best.get(new, (math.inf,))[0]:
                    best[new] = best[state][0] + t, (i, j, d), state
    state, found = (layers, devices, stages or 0), []
    if state not in best:
        return math.inf, []
    total = best[state][0]
    while best[state][1] is not None:
        found.append(best[state][1])
        state = best[state][2]
    return total, found[::-1]


def balance(costs: Sequence[float], stages: int) -> list[tuple[int, int]]:
    """(first, last + 1) of each of `stages` stages, minimizing the cost of the slowest. costs: of
    each layer. For pipelines with many microbatches."""
    n = len(costs)
    _check(1 <= stages <= n, f"{stages} stages need at least as many layers, not {n} layers")
    sums = list(itertools.accumulate(costs, initial=0.0))
    balanced = partition(n, stages, lambda i, j, d: sums[j] - sums[i], 10**6, stages)
    return [(first, end) for first, end, _ in balanced]


# --------------------------------------------------------------------------------------------------
# Plots
# --------------------------------------------------------------------------------------------------


def render_text(timeline: Timeline, width: int = 100) -> str:
    """Two lines per rank: the kind of its actions, in lower case for all chunks but its first, and
    the microbatch below (0 again from the 63rd on)."""
    digits, lines = string.digits + string.ascii_letters, []
    shortest = min(e.end - e.start for own in timeline.events for e in own if e.end > e.start)
    columns = round(min(timeline.makespan / shortest, width))
    scale = columns / timeline.makespan
    for r, own in enumerate(timeline.events):
        kinds, numbers = ["."] * columns, [" "] * columns
        first = min(e.action.chunk for e in own)
        for start, end, (kind, m, chunk, _) in _bars(own):
            for x in range(round(start * scale), round(end * scale)):
                kinds[x] = kind if chunk == first else kind.lower()
                numbers[x] = digits[m % len(digits)]
        lines += [f"rank {r:<3}{''.join(kinds)}", f"{'':8}{''.join(numbers)}".rstrip()]
    return "\n".join(lines)


def _bars(events: Sequence[Event]) -> Iterator[Event]:
    """Overlapped pairs as consecutive bars, F taking a third of their time."""
    last = None
    for start, end, action in events:
        third = start + (end - start) / 3
        second = last is not None and last.overlap
        yield Event(third if second else start, third if action.overlap else end, action)
        last = action


def render_svg(timeline: Timeline, width: int = 1200, height: int = 28) -> str:
    """The same plot as SVG: F blue, B green, W yellow, paler for all chunks but a rank's first."""
    colors = {"F": "#6b9bd1", "B": "#7bbf7b", "W": "#e8c468", "U": "#b48ead"}
    scale, out = width / timeline.makespan, []
    for r, own in enumerate(timeline.events):
        first, y, middle = min(e.action.chunk for e in own), r * height, (r + 0.65) * height
        out.append(f'<text x="0" y="{middle}">{r}</text>')
        for start, end, (kind, m, chunk, _) in _bars(own):
            x, w, opacity = 24 + start * scale, (end - start) * scale, 1 if chunk == first else 0.55
            out.append(
                f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="{height - 2}" '
                f'fill="{colors[kind]}" opacity="{opacity}">'
                f"<title>{Action(kind, m, chunk)}</title></rect>"
            )
            if w > 9:
                out.append(
                    f'<text x="{x + w / 2:.1f}" y="{middle:.1f}" text-anchor="middle">{m}</text>'
                )
    size = f'width="{width + 24}" height="{len(timeline.events) * height}"'
    style = f'{size} font-family="monospace" font-size="11"'
    return "\n".join((f'<svg xmlns="http://www.w3.org/2000/svg" {style}>', *out, "</svg>"))


def report(timeline: Timeline, width: int = 100) -> str:
    """The text plot with time, bubble and memory."""
    s, peaks = timeline.schedule, ", ".join(f"{peak:.3g}" for peak in timeline.peaks)
    return (
        f"{s.name}: {len(s.actions)} ranks, {len(s.chunk_to_rank)} chunks, "
        f"{s.microbatches} microbatches\n"
        f"{render_text(timeline, width)}\n"
        f"time {timeline.makespan:g}; largest bubble of a rank {timeline.bubble:.4g}; "
        f"{timeline.bubble_fraction:.1%} of all ranks' time is idle\n"
        f"peak activations per rank, in microbatches of its share: {peaks}"
    )


def table(p: int = 8, m: int = 32) -> str:
    """A row per schedule at F = B = W = 1."""
    rows = [f"p = {p}, m = {m}, F = B = W = 1; a rank computes {3 * m}",
            f"{'':16}{'bubble':>8}{'time':>8}{'idle':>8}{'memory':>8}"]  # fmt: skip
    for name in SCHEDULES:
        t = simulate(make_schedule(name, p, m))
        numbers = f"{t.bubble:8.1f}{t.makespan:8.1f}{t.bubble_fraction:8.1%}{max(t.peaks):8.1f}"
        rows.append(f"{name:16}{numbers}")
    return "\n".join(rows)


# --------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------


def read(path: Path) -> Schedule:
    """A schedule written by --list. ValueError, naming the file, if it is none."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8") from None
    except ValueError as e:
        raise ValueError(f"{path}: {e!s:.200}") from None


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The program's flags."""
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = p.add_argument
    text = f"{', '.join(SCHEDULES)}; or a file written by --list (default: a table of all)"
    add("--schedule", metavar="NAME", help=text)
    add("--stages", type=int, default=4, metavar="P", help="ranks (%(default)s)")
    add("--microbatches", type=int, default=8, metavar="M", help="(%(default)s)")
    text = f"chunks per rank, with {' and '.join(LOOPED)} (2)"
    add("--chunks", type=int, metavar="V", help=text)
    for name in ("forward", "backward", "weights"):
        text = "time for a rank's share of the model; backward: input gradients only (1)"
        add(f"--{name}", type=float, default=1.0, metavar="T", help=text)
    text = "time of an F overlapped with a full backward pass (DualPipe)"
    add("--overlapped", type=float, metavar="T", help=text)
    add("--send", type=float, default=0.0, metavar="T", help="latency between ranks (0)")
    add("--list", action="store_true", help="print the action lists, not the plot")
    add("--plot", type=Path, metavar="FILE.svg", help="also write the plot as SVG")
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    try:
        _check(args.schedule is not None or not argv, f"{' '.join(argv)} requires --schedule NAME")
        if args.schedule is None:
            print(table())
            return 0
        if Path(args.schedule).is_file():
            schedule = read(Path(args.schedule))
        else:
            schedule = make_schedule(args.schedule, args.stages, args.microbatches, args.chunks)
        work = args.forward, args.backward, args.weights
        ok = all(0 <= t <= 1e18 for t in (*work, args.send, args.overlapped or 0.0))
        _check(ok and sum(work) > 0, "times must be from 0 to 1e18, and not all 0")
        timeline = simulate(schedule, Costs(*work, args.overlapped, args.send))
        width = max(40, shutil.get_terminal_size((108, 24)).columns - 8)
        print(schedule if args.list else report(timeline, width))
        if args.plot:
            args.plot.write_text(render_svg(timeline), encoding="utf-8")
    except (ValueError, OSError) as e:
        print(f"schedules.py: error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
