"""schedules.py: who computes what when in a pipeline. A schedule is a list; one simulator times it.

A model cut into stages on p ranks and a batch cut into m microbatches (GPipe, arXiv:1811.06965)
make a grid of work, and each rank does its part of it in some order. That order is the idea of a
dozen papers. Here it is data: for every rank a list of actions (kind, microbatch, chunk), where a
chunk is a part of the model that a rank has, and the kinds are

    F  forward        B  backward: gradients of the input; of the weights too, if no W follows
    W  gradients of the weights                  U  the optimizer's step (PipeDream's, each time)

What ranks send follows from it: an F needs the F of the chunk before, a B the B of the chunk after.
`check` proves that a list can be run, whoever wrote it, `simulate` says how long it takes and what
it keeps, and pipeline.py runs it.

    schedule         a rank waits              keeps      chunks
    gpipe            (p-1)(F+B+W)              m          1      arXiv:1811.06965
    1f1b             (p-1)(F+B+W)              p          1      PipeDream-flush, arXiv:2006.09503
    pipedream        never between batches     p          1      arXiv:1806.03377: stashed weights
    interleaved      (p-1)(F+B+W)/v            p+(p-1)/v  v      arXiv:2104.04473, 2.2.2
    breadth-first    (p-1)(F+B+W)/v            m          v      arXiv:2211.05953
    zb-h1            (p-1)(F+B-W)              p          1      arXiv:2401.10241, 2.1
    zb-h2            (p-1)(F+B-2W)             2p-1       1      arXiv:2401.10241, 2.2
    zbv              0 where F = B = W         p          2, V   arXiv:2401.10241, 6
    v-half           ~ 1/2 of 1f1b's           ~ p/2      2, V   arXiv:2405.15362
    v-min            ~ 2/3 of 1f1b's           ~ p/3      2, V   arXiv:2405.15362
    dualpipe         (p/2-1)(FB+B-2W)          p+1        2      arXiv:2412.19437, 3.2.1
    dualpipev        (p-1)(FB+B-2W)/2          p+1/2      2, V   DeepSeek's DualPipe repository

F, B, W: the time a rank's share of the model takes for a microbatch; FB: of an F and a whole
backward pass beside each other. It keeps so many times its share's activations of a microbatch.
The waits are exact for m >= 2p and, from zb-h1 on, W no more than F and B; DualPipe's for F = B and
FB = F+B+W: an overlap that gains something leaves less.
In a V rank r has stages r and 2p-1-r, so that rank 0 has both ends of the model. DualPipe's two
chunks are stages r and p-1-r, and half of the microbatches go up the ranks: every stage is there
twice.

When they lose: chunks send more; a W apart reads its input once more, and pays where m is not many
times p; `zbv` is 0 for equal times only. Needs: nothing. `python schedules.py --schedule zbv
--stages 4 --microbatches 8` draws one; without arguments: a check, and the table above in numbers.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import math
import re
import shutil
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
    kind: str  # F, B, W or U
    microbatch: int
    chunk: int
    beside: bool = False  # at once with the list's next one: DualPipe's overlapped F and B

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.chunk}{'+' if self.beside else ''}"


@dataclass(frozen=True)
class Schedule:
    """What every rank does, in order. Chunks are numbered over all ranks; a microbatch goes through
    those of one path, in the model's order."""

    name: str
    microbatches: int
    home: tuple[int, ...]  # of each chunk: its rank
    paths: tuple[tuple[int, ...], ...]  # of the microbatches, or of their first and second half
    actions: tuple[tuple[Action, ...], ...]  # of each rank

    def path(self, microbatch: int) -> tuple[int, ...]:
        return self.paths[microbatch * len(self.paths) // self.microbatches]

    def stage(self, chunk: int) -> int:
        """Its place in the model."""
        return next(path.index(chunk) for path in self.paths if chunk in path)

    def needs(self, action: Action) -> list[tuple[str, int, int]]:
        """What is done before, as (kind, microbatch, chunk)."""
        kind, m, chunk, _ = action
        if kind in "WU":
            return [("B", m, chunk)]
        path = self.path(m)
        at = path.index(chunk)
        if kind == "F":
            return [("F", m, c) for c in path[:at][-1:]]
        return [("F", m, chunk), *(("B", m, c) for c in path[at + 1 : at + 2])]

    def split(self) -> set[tuple[int, int]]:
        """(microbatch, chunk) of the backward passes that leave the weights to a W."""
        return {a[1:3] for actions in self.actions for a in actions if a.kind == "W"}

    def __str__(self) -> str:
        """A line per rank, kind microbatch . chunk, which `parse` reads."""
        head = [f"# {self.name}: {self.microbatches} microbatches"]
        head += [" > ".join(f"{c}@{self.home[c]}" for c in path) for path in self.paths]
        return "\n".join((*head, *(" ".join(map(str, actions)) for actions in self.actions)))


def parse(text: str) -> Schedule:
    """A schedule as str() writes it. ValueError, naming the line, for anything else."""
    head, *lines = text.strip().splitlines() or [""]
    named = re.fullmatch(r"# (\S+): ([1-9]\d{0,8}) microbatches", head)
    _check(named is not None, f"line 1 must be '# NAME: M microbatches', not {head!r}")
    paths, actions, home = [], [], {}
    for n, line in enumerate(lines, 2):
        try:
            if "@" in line:
                at = [tuple(map(int, place.split("@"))) for place in line.split(">")]
                home |= dict(at)
                paths.append(tuple(chunk for chunk, _ in at))
            else:
                words = [
                    re.fullmatch(r"([FBWU])(\d+)\.(\d+)(\+?)", w).groups() for w in line.split()
                ]
                actions.append(tuple(Action(k, int(m), int(c), bool(b)) for k, m, c, b in words))
        except (ValueError, AttributeError):
            raise ValueError(f"line {n} is neither chunk@rank > ... nor F0.0 B0.0 ...") from None
    chunks = sorted(c for path in paths for c in path)
    ok = chunks == list(range(len(chunks))) and len(set(map(len, paths))) == 1
    _check(ok, "the paths, of one length, must have every chunk from 0 on once")
    places = tuple(home[c] for c in range(len(home)))
    schedule = Schedule(named[1], int(named[2]), places, tuple(paths), tuple(actions))
    check(schedule)
    return schedule


# --------------------------------------------------------------------------------------------------
# One chunk per rank
# --------------------------------------------------------------------------------------------------


def _line(
    name: str, p: int, m: int, of_rank: Callable[[int], Iterable[tuple[str, int]]]
) -> Schedule:
    """From each rank's (kind, microbatch)."""
    chunks = tuple(range(p))
    actions = tuple(tuple(Action(kind, i, r) for kind, i in of_rank(r)) for r in chunks)
    return Schedule(name, m, chunks, (chunks,), actions)


def gpipe(p: int, m: int) -> Schedule:
    """All forward passes, then all backward passes, the last first."""
    work = [("F", i) for i in range(m)] + [("B", i) for i in reversed(range(m))]
    return _line("gpipe", p, m, lambda r: work)


def one_f_one_b(p: int, m: int, name: str = "1f1b") -> Schedule:
    """Forward passes until the first backward pass can come; then one of each in turn, so that rank
    r keeps p - r microbatches. PipeDream is the same list with an update after each B: nobody ever
    waits for a batch to end, and a B needs the weights that its F had (pipeline.py stashes them):
    of `ahead` versions, the oldest."""

    def of_rank(r: int) -> Iterator[tuple[str, int]]:
        ahead = min(p - r, m)
        yield from (("F", i) for i in range(ahead))
        for i in range(m):
            yield "B", i
            if name == "pipedream":
                yield "U", i
            if i + ahead < m:
                yield "F", i + ahead

    return _line(name, p, m, of_rank)


def zero_bubble(p: int, m: int, name: str = "zb-h1") -> Schedule:
    """1F1B whose W come later, where a rank would wait. H1 delays them by r microbatches, and all
    ranks keep p, as rank 0 of 1F1B does. H2 has more forward passes at the start, to fill what is
    left, and waits nowhere if F = B = W and m >= 2p - 1."""

    def of_rank(r: int) -> Iterator[tuple[str, int]]:
        ahead, delay = (2 * (p - r) - 1, 2 * r) if name == "zb-h2" else (p - r, r)
        ahead = min(ahead, m)
        yield from (("F", i) for i in range(ahead))
        for i in range(m + delay):
            if i < m:
                yield "B", i
            if 0 <= i - delay:
                yield "W", i - delay
            if i + ahead < m:
                yield "F", i + ahead

    return _line(name, p, m, of_rank)


# --------------------------------------------------------------------------------------------------
# Several chunks per rank
# --------------------------------------------------------------------------------------------------


def _looped(name: str, p: int, m: int, v: int, of_rank: Callable) -> Schedule:
    """Stage i on rank i mod p; from each rank's (kind, microbatch, which of its v chunks)."""
    rows = ([Action(kind, i, c * p + r) for kind, i, c in of_rank(r)] for r in range(p))
    return Schedule(name, m, (*range(p),) * v, (tuple(range(v * p)),), tuple(map(tuple, rows)))


def interleaved(p: int, m: int, v: int = 2) -> Schedule:
    """1F1B of p microbatches on one chunk, then on the next, for every p of them."""
    _check(m % p == 0, f"interleaved takes microbatches by the {p} stages, and {m} is no multiple")

    def nth(n: int) -> tuple[int, int]:
        group, place = divmod(n, p * v)
        return group * p + place % p, place // p

    def of_rank(r: int) -> Iterator[tuple[str, int, int]]:
        ahead = min(2 * (p - 1 - r) + (v - 1) * p + 1, m * v)
        yield from (("F", *nth(n)) for n in range(ahead))
        for n in range(m * v):
            i, c = nth(n)
            yield "B", i, v - 1 - c
            if n + ahead < m * v:
                yield "F", *nth(n + ahead)

    return _looped("interleaved", p, m, v, of_rank)


def breadth_first(p: int, m: int, v: int = 2) -> Schedule:
    """All microbatches through one chunk, then through the next, so that parameters sharded over
    data-parallel ranks are gathered once for all of them."""
    work = [("F", i, c) for c in range(v) for i in range(m)]
    work += [("B", i, c) for c in reversed(range(v)) for i in range(m)]
    return _looped("breadth-first", p, m, v, lambda r: work)


def _v_shaped(name: str, p: int, m: int, of_rank: Callable) -> Schedule:
    """Stages r and 2p - 1 - r on rank r; from its (kind, microbatch, 0 or 1, beside?)."""
    rows = [[] for _ in range(p)]
    for r, row in enumerate(rows):
        for kind, i, leg, *beside in of_rank(r):
            row.append(Action(kind, i, 2 * p - 1 - r if leg else r, *beside))
    home = (*range(p), *reversed(range(p)))
    return Schedule(name, m, home, (tuple(range(2 * p)),), tuple(map(tuple, rows)))


def zbv(p: int, m: int) -> Schedule:
    """Each rank has begun 2p - 1 - r microbatches when its last chunk's first B comes; from there
    F, B, W of both chunks in turn, always one of them ready."""

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


# With F = B = W = 1, a microbatch's 6 on a rank: how much later the next rank does its F on the way
# down the V and up it, then its B down and up. All 1 keeps least; the more, the less is waited for.
SLOPES = {"v-min": (1, 1, 1, 1), "v-half": (2, 1, 2, 1)}


def building_block(p: int, slopes: Sequence[int]) -> list[list[int]]:
    """When each rank does F and F, B and B of its two chunks, of microbatch 0, such that the same
    6, 12, ... later never meet (arXiv:2405.15362, 3). A rank keeps (F to B, of both) / 6 chunks."""
    for turns in sorted(itertools.product(range(6), repeat=3), key=sum):
        start, ranks = 0, [[] for _ in range(p)]
        for slope, turn, way in zip(slopes, (*turns, 0), (1, -1, 1, -1)):
            for n, r in enumerate(range(p)[::way]):
                ranks[r].append(start + n * slope)
            start += (p - 1) * slope + 1 + turn
        if all(len({t % 6 for t in times}) == 4 for times in ranks):
            return ranks
    raise AssertionError(f"slopes {slopes} meet on {p} ranks")


def v_controlled(p: int, m: int, name: str) -> Schedule:
    """Building blocks on end, W where nothing else is ready or a rank keeps a microbatch more than
    its block does."""
    todo, legs = [], ((0, "F"), (1, "F"), (1, "B"), (0, "B"))
    block = building_block(p, SLOPES[name])
    for times in block:
        order = sorted((t + 6 * i, i, leg, k) for t, (leg, k) in zip(times, legs) for i in range(m))
        todo.append([(k, i, leg) for _, i, leg, k in order])
    # from an F to the end of the B, two units later, that is chunks in the rhythm; W may lag by 2
    most = [-(-(b0 - f0 + b1 - f1 + 4) // 6) + 2 for f0, f1, b1, b0 in block]
    plain = _v_shaped(name, p, m, todo.__getitem__)  # all F and B; to know what needs what
    done: dict[tuple[str, int, int], int] = {}
    kept, late, out = [0] * p, [[] for _ in range(p)], [[] for _ in range(p)]
    now = 0
    while any(todo) or any(late):
        now += 1
        for r in range(p):
            ready = False
            if todo[r]:
                action = plain.actions[r][len(plain.actions[r]) - len(todo[r])]  # the next one
                ready = all(done.get(one, now) < now for one in plain.needs(action))
                ready &= action.kind == "B" or kept[r] < most[r] or not late[r]
            if ready:
                kind, i, leg = todo[r].pop(0)
                done[action[:3]] = now
                late[r] += [("W", i, leg)] if kind == "B" else []
                kept[r] += kind == "F"
            elif late[r]:
                kind, i, leg = late[r].pop(0)
                kept[r] -= 1
            else:
                continue
            out[r].append((kind, i, leg))
    return _v_shaped(name, p, m, out.__getitem__)


def _dual(p: int, m: int, r: int) -> list[tuple[str, int, int, bool]]:
    """DualPipe's order on rank r of p, which has two chunks that m microbatches each go through:
    begin the one's, then the other's; in the middle an F of either beside a B of the other; at the
    end split backward passes, whose W fill."""
    work, late, rest = [], [], p - 1 - r
    count = {kind: [0, 0] for kind in "FB"}

    def do(kind: str, leg: int, beside: bool = False, split: bool = False) -> None:
        i = count[kind][leg]
        count[kind][leg] += 1
        work.append((kind, i, leg, beside))
        late.extend([("W", i, leg, False)] if split else [])

    def both(one: int, beside: bool = True) -> None:
        do("F", one, beside)
        do("B", 1 - one)

    for _ in range(2 * rest):
        do("F", 0)
    for _ in range(r + 1):
        do("F", 0)
        do("F", 1)
    for _ in range(rest):
        do("B", 1, split=True)
        work.append(late.pop(0))
        do("F", 1)
    for i in range(m - 2 * p + r + 1):
        both(0, beside=i > 0 or rest > 0)  # the first on the last rank: apart, to send F at once
        both(1)
    for _ in range(rest):
        do("B", 1)
        both(1)
    for i in range(2 * (r + 1)):
        do("B", 1 - i % 2, split=i > r)
    for _ in range(rest):
        work.append(late.pop(0))
        do("B", 0, split=True)
    return work + late


def dualpipev(p: int, m: int) -> Schedule:
    """DualPipe cut in the middle: what was its second half of the ranks is the second chunks."""
    _check(m >= 2 * p, f"dualpipev needs {2 * p} microbatches or more, twice its stages; not {m}")
    return _v_shaped("dualpipev", p, m, partial(_dual, p, m))


def dualpipe(p: int, m: int) -> Schedule:
    """Microbatches from both ends of the ranks at once: chunk r is stage r on rank r, for the first
    half of them; chunk 2p - 1 - r, on the same rank, stage p - 1 - r, for the second."""
    _check(p % 2 == 0, f"dualpipe needs an even number of stages, not {p}")
    ok = m % 2 == 0 and m >= 2 * p
    _check(ok, f"dualpipe needs an even number of microbatches, {2 * p} or more; not {m}")
    rows = []
    for r in range(p):
        chunks, far = (r, 2 * p - 1 - r), int(r >= p // 2)
        rows.append(tuple(
            Action(kind, i + (leg ^ far) * (m // 2), chunks[leg ^ far], beside)
            for kind, i, leg, beside in _dual(p // 2, m // 2, min(r, p - 1 - r))
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
LOOPED = ("interleaved", "breadth-first")  # those that take a number of chunks per rank


def make_schedule(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """The schedule of that name; `chunks` per rank of the LOOPED ones (2). ValueError for a name
    that is not there, and for numbers that it cannot be made for."""
    _check(name in SCHEDULES, f"schedule {name!r} is unknown; there are {', '.join(SCHEDULES)}")
    for what, n in (("stages", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        _check(n is None or n >= 1, f"{what} must be at least 1, not {n}")
    ok = chunks is None or name in LOOPED
    _check(ok, f"chunks go with {' and '.join(LOOPED)}: {name} has as many as it has")
    return SCHEDULES[name](ranks, microbatches, *([chunks] if chunks else []))


# --------------------------------------------------------------------------------------------------
# Check and simulation
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Of one microbatch and a rank's share of the model, in any unit of time. B: gradients of the
    input alone; a B without W takes B + W. together: F beside such a B (F + B + W). send: from rank
    to rank, while both compute. sizes: of each stage, relative to the mean. kept: the part of the
    activations that a W still needs."""

    F: float = 1.0
    B: float = 1.0
    W: float = 1.0
    together: float | None = None
    send: float = 0.0
    sizes: Sequence[float] | None = None
    kept: float = 1.0

    def of(self, actions: Sequence[Action], schedule: Schedule, split: set) -> float:
        """One action, or two beside each other."""
        stages, ranks = len(schedule.paths[0]), len(schedule.actions)
        spent = 0.0
        for kind, m, chunk, _ in actions:
            whole = {"F": self.F, "B": self.B, "W": self.W, "U": 0.0}[kind]
            whole += self.W if kind == "B" and (m, chunk) not in split else 0.0
            size = self.sizes[schedule.stage(chunk)] if self.sizes else 1.0
            spent += whole * size * ranks / stages
        alone = self.F + self.B + self.W
        overlap = 1.0 if self.together is None else self.together / alone
        return spent * (overlap if len(actions) > 1 else 1.0)


class Event(NamedTuple):
    start: float
    end: float
    action: Action


@dataclass(frozen=True)
class Timeline:
    """When every rank does what, and what follows from that."""

    schedule: Schedule
    events: tuple[tuple[Event, ...], ...]  # of each rank
    peaks: tuple[float, ...]  # of each rank: activations kept at most, in shares of a microbatch

    @property
    def makespan(self) -> float:
        return max(events[-1].end for events in self.events)

    @property
    def busy(self) -> list[float]:
        """Of each rank: time in which it computes."""
        return [sum(end - start for start, end in {e[:2] for e in es}) for es in self.events]

    @property
    def bubble(self) -> float:
        """What the worst rank waits between its first action and its last: the next step's first
        may begin while others still end this one's (arXiv:2401.10241, 2)."""
        spans = (events[-1].end - events[0].start for events in self.events)
        return max(span - busy for span, busy in zip(spans, self.busy))

    @property
    def bubble_fraction(self) -> float:
        """Of all ranks' time until the last has ended."""
        return 1 - sum(self.busy) / (self.makespan * len(self.events))


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Timeline:
    """Every rank does its list in order, each action as soon as what it needs is there. ValueError,
    naming who waits for what, if some never come."""
    home, split = schedule.home, schedule.split()
    done: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * len(schedule.actions), [0] * len(schedule.actions)
    events: list[list[Event]] = [[] for _ in schedule.actions]
    waiting: dict[tuple[str, int, int], list[int]] = {}  # what -> ranks
    ready = list(range(len(events)))
    while ready:
        r = ready.pop()
        while at[r] < len(schedule.actions[r]):
            actions = _next(schedule.actions[r], at[r])
            needs = {one for a in actions for one in schedule.needs(a)}
            missing = next((one for one in needs if one not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(r)
                break
            late = [done[one] + (costs.send if home[one[2]] != r else 0.0) for one in needs]
            start = max(free[r], *late, 0.0)
            free[r] = end = start + costs.of(actions, schedule, split)
            for a in actions:
                done[a[:3]] = end
                events[r].append(Event(start, end, a))
                ready += waiting.pop(a[:3], [])
            at[r] += len(actions)
    stuck = [f"rank {r} has {schedule.actions[r][at[r]]}, which needs {Action(*what)}"
             for what, ranks in waiting.items() for r in ranks]  # fmt: skip
    _check(not stuck, f"{schedule.name} never ends: {'; '.join(stuck)}")
    peaks = tuple(_peak(schedule, actions, split, costs) for actions in schedule.actions)
    return Timeline(schedule, tuple(map(tuple, events)), peaks)


def _next(actions: Sequence[Action], at: int) -> Sequence[Action]:
    return actions[at : at + 1 + actions[at].beside]


def _peak(schedule: Schedule, actions: Iterable[Action], split: set, costs: Costs) -> float:
    share, held, most = len(schedule.actions) / len(schedule.paths[0]), 0.0, 0.0
    for kind, m, chunk, _ in actions:
        size = share * (costs.sizes[schedule.stage(chunk)] if costs.sizes else 1.0)
        part = costs.kept if (m, chunk) in split else 0.0
        held += size * {"F": 1.0, "B": part - 1.0, "W": -part, "U": 0.0}[kind]
        most = max(most, held)
    return most


def check(schedule: Schedule) -> None:
    """ValueError, saying what is wrong, unless every microbatch does F and B once on every chunk of
    its path, on the chunk's rank, W at most once, U after that, on a chunk for all or for none, and
    no rank waits for ever."""
    seen: dict[tuple[str, int, int], int] = {}
    for r, actions in enumerate(schedule.actions):
        _check(len(actions) > 0, f"rank {r} has nothing to do")
        for action, after in itertools.zip_longest(actions, actions[1:]):
            kind, m, chunk, beside = action
            known = kind in ("F", "B", "W", "U") and 0 <= m < schedule.microbatches
            known = known and chunk in schedule.path(m)
            _check(known, f"rank {r} has {action}: no such kind, microbatch or chunk on its path")
            home = schedule.home[chunk]
            _check(home == r, f"rank {r} has {action}, but chunk {chunk} is on rank {home}")
            _check(action[:3] not in seen, f"rank {r} has {action} twice")
            seen[action[:3]] = r
            alone = beside and (after is None or after.beside)
            _check(not alone, f"rank {r} has {action}, but no single action after it to go beside")
    updated = {chunk for kind, _, chunk in seen if kind == "U"}
    for m in range(schedule.microbatches):
        for kind, chunk in itertools.product("FBU", schedule.path(m)):
            missing = f"{Action(kind, m, chunk)} is missing on rank {schedule.home[chunk]}"
            ok = (kind, m, chunk) in seen or (kind == "U" and chunk not in updated)
            _check(ok, missing)
    for r, actions in enumerate(schedule.actions):
        late = {a[1:3]: a for a in actions if a.kind == "W"}
        for n, a in enumerate(actions):
            ok = a.kind != "U" or late.get(a[1:3], a) in actions[: n + 1]
            _check(ok, f"rank {r} has {a} before {late.get(a[1:3])}, whose gradients it would miss")
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
    """Cut layers 0..layers-1 into stages (first, last + 1, devices), one after the other, such that
    a batch takes least: sum(t) + (microbatches - 1) max(t), t = seconds(first, last + 1, devices)
    of a stage's microbatch, math.inf if it does not fit (Alpa, arXiv:2201.12023, 5.1; PipeDream's
    partitioner, arXiv:1806.03377, 3.1, is the case of many microbatches). All devices are used, in
    groups of `sizes`; stages: so many (any number).

    For each candidate of max(t), from the first that fits, until it alone costs more than the best:
    the least sum under it, by dynamic programming over (layers, devices, stages) done. ValueError
    if nothing fits.
    """
    most = min(layers, devices)
    ok = stages is None or 1 <= stages <= most
    _check(ok, f"{stages} stages of {layers} layers on {devices} devices: take 1 to {most}")
    _check(microbatches >= 1, f"microbatches must be at least 1, not {microbatches}")
    spans = itertools.combinations(range(layers + 1), 2)
    times = {(i, j, d): seconds(i, j, d) for i, j in spans for d in sizes if d <= devices}
    best, cuts = math.inf, None
    least = partial(_least_sum, layers, devices, stages, times)
    bounds = sorted({t for t in times.values() if t < math.inf})
    for bound in bounds[bisect.bisect(bounds, 0, key=lambda t: least(t)[0] < math.inf) :]:
        if microbatches * bound >= best:  # the sum is no less than its largest
            break
        total, found = least(bound)
        slowest = max(times[cut] for cut in found)
        if total + (microbatches - 1) * slowest < best:
            best, cuts = total + (microbatches - 1) * slowest, found
    _check(cuts is not None, f"no cut of {layers} layers fits {devices} devices"
           + (f" in {stages} stages" if stages else "") + ": take more devices")  # fmt: skip
    return cuts


def _least_sum(
    layers: int, devices: int, stages: int | None, times: dict, bound: float
) -> tuple[float, list[tuple[int, int, int]]]:
    """The stages of least sum(t), every t <= bound; (inf, []) if there are none."""
    after: dict[tuple[int, int, int], list] = {}  # (first layer, ...) -> stages that begin there
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
    """(first, last + 1) of so many stages, the slowest as fast as can be: costs of each layer. For
    a pipeline that is full most of the time."""
    n = len(costs)
    _check(1 <= stages <= n, f"{stages} stages cannot be cut out of {n} layers: take 1 to {n}")
    sums = list(itertools.accumulate(costs, initial=0.0))
    cuts = partition(n, stages, lambda i, j, d: sums[j] - sums[i], 10**6, stages)
    return [(first, end) for first, end, _ in cuts]


# --------------------------------------------------------------------------------------------------
# Pictures
# --------------------------------------------------------------------------------------------------

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def picture(timeline: Timeline, width: int = 100) -> str:
    """Two lines per rank: what it does, small letters for all chunks but its first, and of which
    microbatch (from the 63rd again 0)."""
    events = [event for events in timeline.events for event in events]
    shortest = min(e.end - e.start for e in events if e.end > e.start)
    columns = round(min(timeline.makespan / shortest, width))
    scale, lines = columns / timeline.makespan, []
    for r, own in enumerate(timeline.events):
        kinds, numbers = ["."] * columns, [" "] * columns
        first = min(e.action.chunk for e in own)
        for start, end, (kind, m, chunk, _) in _drawn(own):
            for x in range(round(start * scale), round(end * scale)):
                kinds[x] = kind if chunk == first else kind.lower()
                numbers[x] = DIGITS[m % len(DIGITS)]
        lines += [f"rank {r:<3}{''.join(kinds)}", f"{'':8}{''.join(numbers)}".rstrip()]
    return "\n".join(lines)


def _drawn(events: Sequence[Event]) -> Iterator[Event]:
    """Two beside each other as one after the other, F for a third of their time."""
    last = None
    for start, end, action in events:
        third = start + (end - start) / 3
        second = last is not None and last.action.beside
        last = Event(start, end, action)
        yield Event(third if second else start, third if action.beside else end, action)


def svg(timeline: Timeline, width: int = 1200, height: int = 28) -> str:
    """The same as an image: F blue, B green, W yellow, paler on all chunks but a rank's first."""
    colors = {"F": "#6b9bd1", "B": "#7bbf7b", "W": "#e8c468", "U": "#b48ead"}
    scale, out = width / timeline.makespan, []
    for r, own in enumerate(timeline.events):
        first = min(e.action.chunk for e in own)
        out.append(f'<text x="0" y="{(r + 0.65) * height}">{r}</text>')
        for start, end, (kind, m, chunk, _) in _drawn(own):
            x, w, y = 24 + start * scale, (end - start) * scale, r * height
            box = f'x="{x:.1f}" y="{y}" width="{w:.1f}" height="{height - 2}"'
            opacity = 1 if chunk == first else 0.55
            title = f"<title>{Action(kind, m, chunk)}</title>"
            out.append(f'<rect {box} fill="{colors[kind]}" opacity="{opacity}">{title}</rect>')
            if w > 9:
                at = f'x="{x + w / 2:.1f}" y="{y + 0.65 * height:.1f}" text-anchor="middle"'
                out.append(f"<text {at}>{m}</text>")
    size = f'width="{width + 24}" height="{len(timeline.events) * height}"'
    style = 'font-family="monospace" font-size="11"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(out) + "\n</svg>"
    )


def report(timeline: Timeline, width: int = 100) -> str:
    """The picture, and its numbers."""
    s, peaks = timeline.schedule, ", ".join(f"{peak:.3g}" for peak in timeline.peaks)
    return (
        f"{s.name}: {len(s.actions)} ranks, {len(s.home)} chunks, {s.microbatches} microbatches\n"
        f"{picture(timeline, width)}\n"
        f"time {timeline.makespan:g}; the worst rank waits {timeline.bubble:.4g}; "
        f"{timeline.bubble_fraction:.1%} of all ranks' time is idle\n"
        f"activations kept by each rank, in its share's of a microbatch: {peaks}"
    )


# --------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------


def self_check() -> None:
    """Closed forms of the table above."""
    F, B, W, p, m = 5.0, 6.0, 4.0, 4, 16
    costs, whole = Costs(F, B, W), F + B + W
    forms = {"gpipe": (p - 1) * whole, "1f1b": (p - 1) * whole, "interleaved": (p - 1) * whole / 2}
    forms |= {"breadth-first": (p - 1) * whole / 2, "zb-h1": (p - 1) * (F + B - W)}
    for name, expected in forms.items():
        schedule = make_schedule(name, p, m)
        check(parse(str(schedule)))
        bubble = simulate(schedule, costs).bubble
        assert abs(bubble - expected) < 1e-9, (name, bubble, expected)
    equal = {name: simulate(make_schedule(name, p, m)).bubble for name in SCHEDULES}
    assert (
        equal["zbv"] == equal["zb-h2"] == 0 and equal["dualpipe"] == 2 and equal["dualpipev"] == 3
    )


def table(p: int = 8, m: int = 32) -> str:
    """Every schedule at F = B = W = 1."""
    head = f"p = {p}, m = {m}, F = B = W = 1; a rank computes {3 * m}"
    rows = [head, f"{'':16}{'waits':>8}{'time':>8}{'idle':>8}{'keeps':>8}"]
    for name in SCHEDULES:
        t = simulate(make_schedule(name, p, m))
        numbers = f"{t.bubble:8.1f}{t.makespan:8.1f}{t.bubble_fraction:8.1%}{max(t.peaks):8.1f}"
        rows.append(f"{name:16}{numbers}")
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--schedule", metavar="NAME", help=f"{', '.join(SCHEDULES)}; or a file of one")
    p.add_argument("--stages", type=int, default=4, metavar="P", help="ranks (%(default)s)")
    p.add_argument("--microbatches", type=int, default=8, metavar="M", help="(%(default)s)")
    p.add_argument("--chunks", type=int, metavar="V", help="per rank, of the looped ones (2)")
    for name in ("forward", "backward", "weights"):
        help = "time of it, for a rank's share; backward: of the input alone (1)"
        p.add_argument(f"--{name}", type=float, default=1.0, metavar="T", help=help)
    p.add_argument("--together", type=float, metavar="T", help="of an F beside a whole backward")
    p.add_argument("--send", type=float, default=0.0, metavar="T", help="from rank to rank (0)")
    p.add_argument("--list", action="store_true", help="print the list itself, and no picture")
    p.add_argument("--plot", type=Path, metavar="FILE.svg", help="write the picture there too")
    args = p.parse_args(argv)
    try:
        if args.schedule is None:
            self_check()
            print(table())
            return 0
        if Path(args.schedule).is_file():
            schedule = parse(Path(args.schedule).read_text(encoding="utf-8"))
        else:
            schedule = make_schedule(args.schedule, args.stages, args.microbatches, args.chunks)
        work = args.forward, args.backward, args.weights
        ok = all(0 <= t < math.inf for t in (*work, args.send, args.together or 0.0))
        _check(ok and sum(work) > 0, "times must be 0 or more, finite, and not all 0")
        timeline = simulate(schedule, Costs(*work, args.together, args.send))
        width = max(40, shutil.get_terminal_size((108, 24)).columns - 8)
        print(schedule if args.list else report(timeline, width))
        if args.plot:
            args.plot.write_text(svg(timeline), encoding="utf-8")
    except (ValueError, OSError) as e:
        print(f"schedules.py: error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
