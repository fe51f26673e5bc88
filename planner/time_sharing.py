"""Many models on one GPU, each mechanism beside its baseline, simulated: what runs when.

A kernel is (seconds, compute share, memory share); kernels that run together all slow down by the
largest sum of their shares. A request takes its seconds in one of an engine's slots. Times are
simulated seconds. planner/colocation.py is about what is placed where, and prints both tables.

Orion (Strati et al., EuroSys 2024). Best-effort kernels run only while the high-priority client is
    idle or runs a kernel with another bottleneck, and only short ones. Loses: in best-effort
    throughput, to naive sharing, with long kernels, which never run, or with the bottleneck of the
    high-priority kernels.
QLM (Patke et al., SoCC 2024, arXiv:2407.00047), its part about several models. Requests are grouped
    by model and SLO; groups are ordered by estimated waiting times, which include swapping models
    (request groups, waiting time estimator, global scheduler; here a local search in place of its
    linear program). Loses: to EDF, where the mean length is estimated much too low; with one model
    and SLO, where it is FCFS; requests that are late already wait for all others.

Used by no hook. Needs: nothing.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import heapq
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

from serving.traces import arrival_times


class Kernel(NamedTuple):
    """seconds alone on a GPU, and the shares of its compute and memory bandwidth used meanwhile."""

    seconds: float
    compute: float
    memory: float


def slowdown(kernels: Iterable[Kernel]) -> float:
    """Factor by which kernels that run together are slower than alone: each resource is divided in
    proportion, and the most oversubscribed one sets the pace."""
    kernels = list(kernels)
    return max(1.0, sum(k.compute for k in kernels), sum(k.memory for k in kernels))


# ---- Orion: best-effort kernels beside complementary ones ----

BOUND, DUR_THRESHOLD = 0.6, 0.025  # of a bottleneck; best-effort kernel / time of a request
Admit = Callable[[Kernel | None, Kernel, float], bool]  # (running, best-effort, its budget)


def profile(kernel: Kernel) -> str:
    """Bottleneck: the resource of which a kernel uses most, if more than 60%."""
    shares = {"compute": kernel.compute, "memory": kernel.memory}
    name = max(shares, key=shares.get)
    return name if shares[name] > BOUND else "unknown"


def orion(high: Kernel | None, best_effort: Kernel, budget: float) -> bool:
    """Admit a best-effort kernel that is short, if nothing or another bottleneck runs."""
    complementary = high is None or profile(high) != profile(best_effort)
    return best_effort.seconds <= budget and complementary


def share_gpu(
    arrivals: list[float], request: list[Kernel], best_effort: list[Kernel], admit: Admit
) -> tuple[list[float], float]:
    """Latencies of high-priority requests, each these kernels in turn, and the best-effort seconds
    (as if alone) that are done per second; best_effort repeats. No kernel is preempted."""
    budget = DUR_THRESHOLD * sum(kernel.seconds for kernel in request)
    todo, queue, latencies = arrivals[::-1], [], []
    now = done = high = low = 0.0  # high, low: seconds left of the running kernels
    index = at = 0
    while todo or queue:
        while todo and todo[-1] <= now:
            queue.append(todo.pop())
        running = request[index] if queue else None
        high = high or (running.seconds if running else 0.0)
        kernel = best_effort[at % len(best_effort)]
        if not low and admit(running, kernel, budget):
            low = kernel.seconds
        factor = slowdown(k for k, left in ((running, high), (kernel, low)) if left)
        steps = [left * factor for left in (high, low) if left]
        step = min(steps + [t - now for t in todo[-1:]])
        now += step
        if low and not (low := round(low - step / factor, 12)):
            at, done = at + 1, done + kernel.seconds
        if high and not (high := round(high - step / factor, 12)):
            index = (index + 1) % len(request)
            if index == 0:
                latencies.append(now - queue.pop(0))
    return latencies, done / now


# ---- QLM: request groups ordered by waiting-time estimates ----


class Job(NamedTuple):
    """A request to one of several models: seconds in a slot of the batch, deadline of its start."""

    arrival: float
    model: int
    seconds: float
    deadline: float


Pick = Callable[[list[Job], float, int | None], Job]  # of waiting ones, at a time, a loaded model


def serve_queue(jobs: list[Job], pick: Pick, slots: int, swap: float) -> dict[Job, float]:
    """Start of each job on an engine with `slots` sequences of one model at a time. Another model
    is loaded when all sequences have ended, in `swap` seconds."""
    todo, waiting, running = sorted(jobs, reverse=True), [], []
    starts: dict[Job, float] = {}
    now, loaded = 0.0, None
    while todo or waiting:
        if not waiting:
            now = max(now, todo[-1].arrival)
        while todo and todo[-1].arrival <= now:
            waiting.append(todo.pop())
        while running and running[0] <= now:
            heapq.heappop(running)
        if len(running) == slots:
            now = running[0]
            continue
        job = pick(waiting, now, loaded)
        waiting.remove(job)
        if job.model != loaded:
            now = max([now, *running]) + swap
            loaded, running = job.model, []
        starts[job] = now
        heapq.heappush(running, now + job.seconds)
    return starts


def fcfs(waiting: list[Job], now: float, loaded: int | None) -> Job:
    """First come first served."""
    return min(waiting)


def edf(waiting: list[Job], now: float, loaded: int | None) -> Job:
    """Earliest deadline first."""
    return min(waiting, key=lambda job: (job.deadline, job))


class QLM:
    """Pick: the first request of the first group. mean: seconds of a request of each model."""

    def __init__(self, mean: list[float], slots: int, swap: float, group_size: int = 16):
        self.mean, self.slots, self.swap, self.group_size = mean, slots, swap, group_size
        self.estimates: dict[Job, float] = {}  # the start of each request, when it was first seen

    def __call__(self, waiting: list[Job], now: float, loaded: int | None) -> Job:
        order = self.order(self.groups(waiting), now, loaded)
        for job, start in self.starts(order, now, loaded):
            self.estimates.setdefault(job, start)
        return order[0][0]

    def groups(self, waiting: list[Job]) -> list[list[Job]]:
        """Requests of one model and SLO, in order of arrival, at most group_size together."""
        kinds, n = defaultdict(list), self.group_size
        for job in sorted(waiting):
            kinds[job.model, round(job.deadline - job.arrival, 6)].append(job)
        return [jobs[i : i + n] for jobs in kinds.values() for i in range(0, len(jobs), n)]

    def starts(self, order: list[list[Job]], now: float, loaded: int | None):
        """Waiting-time estimator, (request, start) for each: what is before a request over the
        throughput, that is mean seconds over slots each; a swap first drains the batch, which takes
        the mean of a request."""
        for group in order:
            if group[0].model != loaded:
                now += self.swap + (0.0 if loaded is None else self.mean[loaded])
                loaded = group[0].model
            for job in group:
                yield job, now
                now += self.mean[loaded] / self.slots

    def order(self, groups: list[list[Job]], now: float, loaded: int | None) -> list[list[Job]]:
        """The virtual queue: fewest estimated violations, then least total wait. The best of FCFS,
        EDF and model by model, then improved by moving one group at a time."""

        def cost(order: list[list[Job]]) -> tuple[int, float]:
            starts = [*self.starts(order, now, loaded)]
            return sum(t > job.deadline for job, t in starts), sum(t for _, t in starts)

        by_model = lambda group: (group[0].model != loaded, group[0].model, group[0].deadline)
        keys = (lambda group: group[0]), (lambda group: group[0].deadline), by_model
        new, best = min((sorted(groups, key=key) for key in keys), key=cost), None
        while best is None or cost(new) < cost(best):
            best, moves = new, []
            for i, j in product(range(len(best)), repeat=2):
                rest = best[:i] + best[i + 1 :]
                moves.append(rest[:j] + [best[i]] + rest[j:])
            new = min(moves, key=cost)
        return best


# ---- the table ----

HIGH_PRIORITY = [Kernel(4e-4, 0.9, 0.2), Kernel(3e-4, 0.2, 0.85), Kernel(5e-4, 0.9, 0.25)] * 5
Row = tuple[str, str, str, float, float]  # techniques, workload, measure, of each technique


def times(seed: int, rate: float, n: int, cv: float = 1) -> list[float]:
    """n arrival times in seconds, at a rate per second; see traces.arrival_times."""
    return [*arrival_times(n, rate, cv, random.Random(seed))]


def orion_rows() -> Iterator[Row]:
    """Kernels side by side without regard to their profile, against Orion."""
    p99 = lambda values: sorted(values)[int(0.99 * len(values))]
    run = partial(share_gpu, times(1, 80, 1500), HIGH_PRIORITY)
    alone = p99(run(HIGH_PRIORITY, lambda *_: False)[0])
    mixed, long = [Kernel(1e-4, 0.1, 0.7), Kernel(1.5e-4, 0.7, 0.1)], [Kernel(2e-3, 0.7, 0.1)]
    for name, work in ("mixed", mixed), ("long", long):
        naive, new = run(work, lambda *_: True), run(work, orion)
        name, title = f"{name} best-effort kernels", "Orion: naive, by profile"
        yield title, name, "p99 / p99 alone", p99(naive[0]) / alone, p99(new[0]) / alone
        yield title, name, "best-effort throughput", naive[1], new[1]


def job_trace(seed: int, rate: float, n_models: int = 2, n: int = 200) -> list[Job]:
    """Requests with log-normal lengths and SLOs of 3 or 30 s on their start."""
    rng, length = random.Random(seed), lambda: rng.lognormvariate(0, 0.6)
    arrivals = times(seed, rate, n)
    return [Job(t, rng.randrange(n_models), length(), t + rng.choice((3, 30))) for t in arrivals]


def attained(starts: dict[Job, float]) -> float:
    """Fraction of requests that start before their deadline."""
    return sum(t <= job.deadline for job, t in starts.items()) / len(starts)


def qlm_rows() -> Iterator[Row]:
    """First come first served and earliest deadline first, against QLM's groups."""
    for name, rate, n_models, error in (
        ("two models, swap 2 s", 3, 2, 1.0),
        ("one model, estimated mean 5x too low", 7, 1, 0.2),
    ):
        jobs = job_trace(1, rate, n_models)
        mean = [error * statistics.mean(job.seconds for job in jobs)] * 2
        policies = fcfs, edf, QLM(mean, 8, 2)
        *old, new = (serve_queue(jobs, pick, 8, 2) for pick in policies)
        for title, starts in zip(("FCFS", "EDF"), old):
            yield f"QLM: {title}, groups", name, "SLO attainment", attained(starts), attained(new)
        wait = statistics.mean(t - job.arrival for job, t in new.items())
        error = statistics.mean(abs(policies[2].estimates[job] - t) for job, t in new.items())
        yield "QLM: wait, error of estimate", name, "mean, s", wait, error
