"""Many models on shared GPUs: five placements and schedulers, each beside its baseline, simulated.

A GPU that serves one model is idle between its bursts, full when they come, and uses either its
arithmetic or its memory. With several models on a GPU, one uses what another leaves. Hardware here
is what the argument needs and no more: a deterministic service time, a latency table, or a kernel
with (seconds, compute share, memory share); kernels that run together all slow down by the largest
sum of their shares. Times are simulated seconds; randomness comes from a seed.

AlpaServe (Li et al., OSDI 2023, arXiv:2302.11665). Two models on two GPUs, each split over both as
    a pipeline: a burst of one model uses both GPUs (section 3.1). Mean latencies follow from M/D/1
    queues (3.4), and so do the loads between which the pipeline wins under Poisson arrivals;
    `greedy_placement` is Algorithm 1 (4.2). Loses: at low load, where the parallel overhead is
    added to each request and nobody waits; near saturation, since overhead takes capacity. Greedy
    placement is not optimal.
MuxServe (Duan et al., ICML 2024, arXiv:2404.02015). One pool of KV blocks, each of one head of one
    layer, serves LLMs with different numbers of heads (3.4, resource manager); prompts of one LLM
    run beside the decoding of others, and quotas of blocks follow their use (3.3, ADBS). Loses:
    without quotas a flood of one LLM takes the memory of the others; at equal load, where a static
    half is right, by the delay of the quotas; when all decode, since nothing is complementary.
Gpulet (Choi et al., USENIX ATC 2022). A GPU is split into at most two partitions, each shared in
    time by the models placed on it, with predicted interference between both (section 4). Loses:
    models that fill a GPU gain nothing from a split; a wrong prediction breaks SLOs silently.
Orion (Strati et al., EuroSys 2024). Best-effort kernels run only while the high-priority client
    is idle or runs a kernel with another bottleneck, and only short ones (section 5, scheduling
    policy). Loses: best-effort work with the same bottleneck waits, where naive sharing runs it.
QLM (Patke et al., SoCC 2024, arXiv:2407.00047). Requests are grouped by model and SLO; groups are
    ordered by estimated waiting times, which include swapping models (request groups, waiting time
    estimator, global scheduler; its eviction and load balancing are not here). Loses: without swap
    cost, to EDF, which is then optimal; with a wrong mean of output lengths.

Left out: MuxServe's and AlpaServe's choice of GPU groups, which is enumeration around what is here;
Gpulet's split of one model's rate over several partitions. Hook: none; MuxServe's pool runs under
the real Scheduler and BlockAllocator of paged_kv.py, as those of an Engine.
`python -m serving.colocation` prints each technique beside its baseline. Needs: nothing.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    raise SystemExit("run: python -m serving.colocation")

import heapq
import math
import random
import statistics
from collections.abc import Callable, Iterable
from itertools import product
from typing import NamedTuple

from paged_kv import BlockAllocator, Scheduler, Sequence


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


def gamma_arrivals(rng: random.Random, rate: float, cv: float, n: int) -> list[float]:
    """n arrival times with gamma intervals of mean 1 / rate and coefficient of variation cv: 1 is a
    Poisson process, more is bursty."""
    times, now = [], 0.0
    for _ in range(n):
        now += rng.gammavariate(cv**-2, cv**2 / rate)
        times.append(now)
    return times


# --------------------------------------------------------------------------------------------------
# AlpaServe: model parallelism multiplexes bursts
# --------------------------------------------------------------------------------------------------


def pipeline(arrivals: Iterable[float], stages: list[float]) -> list[float]:
    """Latency of each request through a pipeline of FIFO stages with these seconds."""
    free, latencies = [0.0] * len(stages), []
    for arrival in arrivals:
        now = arrival
        for i, seconds in enumerate(stages):
            free[i] = now = max(free[i], now) + seconds
        latencies.append(now - arrival)
    return latencies


def md1_latency(rate: float, service: float, bottleneck: float | None = None) -> float:
    """Mean latency under Poisson arrivals of a pipeline with `service` seconds in all, of which
    `bottleneck` in its slowest stage, the only one with a queue (Pollaczek-Khinchine)."""
    stage = service if bottleneck is None else bottleneck
    return service + rate * stage**2 / (2 * (1 - rate * stage)) if rate * stage < 1 else math.inf


def crossover_loads(overhead: float) -> tuple[float, float] | None:
    """The two loads (total rate x seconds, capacity 2) at which a two-way pipeline, slower by the
    factor `overhead`, and two dedicated GPUs have the same mean latency; None if the pipeline loses
    at all. From md1_latency(x / 2, 1) = md1_latency(x, overhead, overhead / 2)."""
    a = 6 * overhead**2 - 4 * overhead
    b = 12 * overhead**2 - 8
    d = b**2 - 128 * (overhead - 1) * a
    return None if d < 0 else ((b - d**0.5) / (2 * a), (b + d**0.5) / (2 * a))


class Model(NamedTuple):
    """seconds per request on one GPU, memory in units of a GPU's, SLO on latency in seconds."""

    seconds: float
    memory: float
    slo: float


Placement = list[frozenset[int]]  # of each group of GPUs: its models


def attainment(
    requests: list[tuple[float, int]],
    models: list[Model],
    groups: list[tuple[int, float]],
    placement: Placement,
) -> float:
    """Fraction of requests (arrival, model) within their SLO. A group is (GPUs, overhead of its
    pipeline). A request goes to the group that finishes it first, and is rejected if too late."""
    free = [[0.0] * n for n, _ in groups]
    good = 0
    for arrival, m in requests:
        best = math.inf, 0, []
        for g, (n, overhead) in enumerate(groups):
            if m in placement[g]:
                now, times = arrival, []
                for t in free[g]:
                    now = max(t, now) + overhead * models[m].seconds / n
                    times.append(now)
                best = min(best, (now, g, times))
        if best[0] - arrival <= models[m].slo:
            free[best[1]] = best[2]
            good += 1
    return good / len(requests)


def greedy_placement(
    requests: list[tuple[float, int]], models: list[Model], groups: list[tuple[int, float]]
) -> Placement:
    """AlpaServe's Algorithm 1: add the replica (model, group) that simulation finds best, until no
    other fits into memory; the best placement seen."""
    now: Placement = [frozenset() for _ in groups]
    best, most = now, 0.0
    while True:
        options = []
        for m, g in product(range(len(models)), range(len(groups))):
            if m not in now[g]:
                new = now[:g] + [now[g] | {m}] + now[g + 1 :]
                if sum(models[i].memory for i in new[g]) <= groups[g][0]:
                    options.append((attainment(requests, models, groups, new), -m, -g, new))
        if not options:
            return best
        score, *_, now = max(options, key=lambda option: option[:3])
        if score > most:
            best, most = now, score


# --------------------------------------------------------------------------------------------------
# MuxServe: one pool of head-wise KV blocks
# --------------------------------------------------------------------------------------------------


class HeadBlocks(BlockAllocator):
    """An LLM's view of a pool shared with other LLMs. A block of the LLM is `heads` (layers x KV
    heads) blocks of the pool, each with block_size tokens of one head; its Scheduler sees blocks of
    tokens as ever. At most `quota` blocks of the pool are in use through it (None: all). Head
    dimensions are equal in all LLMs of a pool."""

    def __init__(self, pool: BlockAllocator, heads: int, quota: int | None = None):
        super().__init__(len(pool.refs) // heads, pool.block_size, prefix_cache=False)
        self.pool, self.heads = pool, heads
        self.quota = len(pool.refs) if quota is None else quota
        self.head_blocks: dict[int, list[int]] = {}

    @property
    def used(self) -> int:
        """Blocks of the pool."""
        return self.heads * len(self.head_blocks)

    @property
    def n_free(self) -> int:
        return max(0, min(self.pool.n_free, self.quota - self.used)) // self.heads

    def allocate(self) -> int:
        block = super().allocate()
        self.head_blocks[block] = [self.pool.allocate() for _ in range(self.heads)]
        return block

    def release(self, blocks: list[int]) -> None:
        super().release(blocks)
        for block in set(blocks):
            if self.refs[block] == 0:
                self.pool.release(self.head_blocks.pop(block))


def adapt_quotas(views: list[HeadBlocks], floors: list[int]) -> None:
    """ADBS: the LLM that uses the least of its quota lends half of what is idle to the one that
    uses the most, and keeps at least its floor."""
    usage = [view.used / view.quota for view in views]
    low, high = usage.index(min(usage)), usage.index(max(usage))
    idle = views[low].quota - max(views[low].used, floors[low])
    if low != high and usage[high] > 0.9 and idle > 0:
        moved = -(-idle // 2)
        views[low].quota -= moved
        views[high].quota += moved


MAX_BATCHED_TOKENS = 256


class LLM(NamedTuple):
    """Seconds of a step: `weights` reads the weights, `key` reads a cached token, both at memory
    bandwidth; `token` is the arithmetic of a new token. A step takes the longer of both sums."""

    heads: int  # layers x KV heads
    weights: float
    token: float
    key: float


class Request(NamedTuple):
    arrival: float
    llm: int
    prompt: int
    output: int


def serve_llms(
    requests: list[Request],
    llms: list[LLM],
    views: list[BlockAllocator],
    floors: list[int] | None = None,
    together: bool = True,
    observe: Callable[[list[Scheduler]], None] = lambda schedulers: None,
) -> list[float]:
    """Latencies, in order of `requests`. In a step all LLMs decode, and one that has prompts, in
    turns, runs prompts too; together=False steps one LLM at a time (temporal multiplexing).
    floors: of adapt_quotas, called after each step; so is `observe`."""
    schedulers = [Scheduler(view) for view in views]
    todo = sorted(range(len(requests)), key=lambda i: requests[i].arrival, reverse=True)
    latencies, now, turn = [0.0] * len(requests), 0.0, 0
    while todo or any(s.waiting or s.running for s in schedulers):
        if not any(s.waiting or s.running for s in schedulers):
            now = max(now, requests[todo[-1]].arrival)
        while todo and requests[todo[-1]].arrival <= now:
            i = todo.pop()
            seq = Sequence([0] * requests[i].prompt, requests[i].prompt, arrival=i)
            schedulers[requests[i].llm].add(seq)
        turns = [(turn + i) % len(llms) for i in range(1, len(llms) + 1)]
        has_prompt = lambda s: s.waiting or any(seq.remaining > 1 for seq in s.running)
        ready = [m for m in turns if has_prompt(schedulers[m])]
        ready = ready if together else [m for m in turns if schedulers[m].running or m in ready]
        turn = ready[0] if ready else turn
        compute = memory = 0.0
        finished: list[Sequence] = []
        for m in turns if together else [turn]:
            scheduler, llm = schedulers[m], llms[m]
            n_decoding = sum(seq.remaining == 1 for seq in scheduler.running)
            scheduler.max_num_batched_tokens = MAX_BATCHED_TOKENS if m == turn else n_decoding
            plan = scheduler.schedule()
            scheduler.commit(plan)
            compute += llm.token * sum(n for _, n in plan.run)
            memory += llm.weights * bool(plan.run)
            memory += llm.key * sum(seq.num_computed_tokens for seq, _ in plan.run)
            for seq, _ in plan.run:
                seq.tokens += [0] * (seq.remaining == 0)
                if len(seq.output) == requests[seq.arrival].output:
                    scheduler.finish(seq)
                    finished.append(seq)
        now += max(compute, memory)
        for seq in finished:
            latencies[seq.arrival] = now - requests[seq.arrival].arrival
        if floors is not None:
            adapt_quotas(views, floors)
        observe(schedulers)
    return latencies


def goodput(
    requests: list[Request], llms: list[LLM], latencies: list[float], scale: float = 4
) -> list[float]:
    """Of each LLM, requests per second within `scale` times their latency alone."""
    good = [0] * len(llms)
    for r, latency in zip(requests, latencies, strict=True):
        llm = llms[r.llm]
        alone = r.output * llm.weights + r.prompt * llm.token
        alone += llm.key * r.output * (r.prompt + r.output / 2)
        good[r.llm] += latency <= scale * alone
    end = max(r.arrival + latency for r, latency in zip(requests, latencies))
    return [n / end for n in good]


# --------------------------------------------------------------------------------------------------
# Gpulet: partitions of a GPU, shared in time
# --------------------------------------------------------------------------------------------------

# Sizes of the one or two partitions of a GPU.
SPLITS = ((1.0,), (0.2, 0.8), (0.4, 0.6), (0.5, 0.5), (0.6, 0.4), (0.8, 0.2))


class Network(NamedTuple):
    """A model without state: a batch takes launch + batch x work seconds on a whole GPU that it
    fills; one request fills at most the share `width`. memory: bandwidth share on a whole GPU."""

    launch: float
    work: float
    width: float
    memory: float
    slo: float

    def latency(self, batch: int, size: float) -> float:
        """Seconds of a batch on a partition."""
        return self.launch + batch * self.work / min(size, batch * self.width)


Demand = tuple[Network, float]  # requests per second
Split = list[tuple[float, list[Demand]]]  # of a GPU: partitions and what they serve


def batches(demands: list[Demand], size: float, factor: float = 1.0) -> list[int] | None:
    """Batch sizes of a partition that runs a batch of each network in turn, slowed by `factor`: the
    shortest cycle that keeps up with the rates, if no request waits longer than its SLO, which is a
    cycle and its own batch; else None (Nexus's squishy bin packing, SOSP 2019, section 6)."""
    cycle = -1.0
    while True:
        sizes = [max(1, math.ceil(rate * max(0.0, cycle))) for _, rate in demands]
        times = [factor * net.latency(b, size) for (net, _), b in zip(demands, sizes)]
        if any(sum(times) + t > net.slo for (net, _), t in zip(demands, times)):
            return None
        if sum(times) <= cycle:
            return sizes
        cycle = sum(times)


def bandwidth(size: float, demands: list[Demand]) -> float:
    """Most memory bandwidth that a partition's networks use, as a share of the GPU's."""
    return max(net.memory for net, _ in demands) * size


def interference(a: float, b: float) -> float:
    """True slowdown of two partitions that use these shares of the memory bandwidth."""
    return slowdown([Kernel(1, 0, a), Kernel(1, 0, b)])


def fit_interference(rng: random.Random, n: int = 200) -> tuple[Callable[..., float], float]:
    """A linear predictor of the slowdown from the bandwidths of both, fitted to n profiled pairs as
    in section 4, and its mean relative error on n others."""
    pairs = [(rng.random(), rng.random()) for _ in range(2 * n)]
    slope, shift = statistics.linear_regression(
        [a + b for a, b in pairs[:n]], [interference(*pair) for pair in pairs[:n]]
    )
    predict = lambda a, b: max(1.0, slope * (a + b) + shift)
    errors = [abs(predict(*p) / interference(*p) - 1) for p in pairs[n:]]
    return predict, statistics.mean(errors)


def is_feasible(split: Split, predict: Callable[[float, float], float]) -> bool:
    """Whether all SLOs of a GPU's partitions hold under the predicted interference."""
    factor = predict(*(bandwidth(*part) for part in split)) if len(split) == 2 else 1.0
    return all(batches(demands, size, factor) for size, demands in split)


def elastic_partition(
    demands: list[Demand],
    n_gpus: int,
    predict: Callable[[float, float], float],
    splits: Iterable[tuple[float, ...]] = SPLITS,
) -> list[Split] | None:
    """Partitions of each GPU that meet all SLOs, largest load first: each network gets a partition
    of its own where one fits, else a share of a partition's time; sizes may change with each new
    network. None if one does not fit. splits=[(1.0,)] shares in time only."""
    gpus: list[Split] = [[] for _ in range(n_gpus)]
    for demand in sorted(demands, key=lambda d: -d[0].work * d[1]):
        options = []
        for g, gpu in enumerate(gpus):
            groups = [part for _, part in gpu]
            added = [groups + [[demand]]]
            for i, part in enumerate(groups):
                added.append(groups[:i] + [part + [demand]] + groups[i + 1 :])
            for new, sizes in product(added, splits):
                split = [*zip(sizes, new)]
                if len(sizes) == len(new) and is_feasible(split, predict):
                    options.append((max(map(len, new)), len(split), g, split))
        if not options:
            return None
        *_, g, split = min(options, key=lambda option: option[:3])
        gpus[g] = split
    return gpus


def max_scale(fits: Callable[[float], object], most: float = 1e4) -> float:
    """Largest factor of the rates that fits, within 1%."""
    low, high = 0.0, most
    while high - low > 0.01 * high and high > 1e-3:
        low, high = (mid, high) if fits(mid := (low + high) / 2) else (low, mid)
    return low


# --------------------------------------------------------------------------------------------------
# Orion: best-effort kernels beside complementary ones
# --------------------------------------------------------------------------------------------------

Admit = Callable[[Kernel | None, Kernel, float], bool]  # (running, best-effort, its budget)


def profile(kernel: Kernel) -> str:
    """Bottleneck: the resource of which a kernel uses more than 60% (section 5)."""
    shares = {"compute": kernel.compute, "memory": kernel.memory}
    name = max(shares, key=shares.get)
    return name if shares[name] > 0.6 else "unknown"


def orion(high: Kernel | None, best_effort: Kernel, budget: float) -> bool:
    """Admit a best-effort kernel that is short, if nothing or another bottleneck runs."""
    complementary = high is None or profile(high) != profile(best_effort)
    return best_effort.seconds <= budget and complementary


def share_gpu(
    arrivals: list[float],
    request: list[Kernel],
    best_effort: list[Kernel],
    admit: Admit,
    budget: float = 0.025,
) -> tuple[list[float], float]:
    """Latencies of high-priority requests, each these kernels in turn, and the best-effort seconds
    (as if alone) that are done per second; best_effort repeats. Kernels are not preempted. Budget:
    longest best-effort kernel over a request's time alone (DUR_THRESHOLD)."""
    budget *= sum(kernel.seconds for kernel in request)
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
        if low:
            low = _less(low, step / factor)
            at, done = (at, done) if low else (at + 1, done + kernel.seconds)
        if high:
            high = _less(high, step / factor)
            index = index if high else (index + 1) % len(request)
            if not high and index == 0:
                latencies.append(now - queue.pop(0))
    return latencies, done / now


def _less(left: float, done: float) -> float:
    """left - done, and 0 if the difference is rounding."""
    return left - done if left - done > 1e-9 * done else 0.0


# --------------------------------------------------------------------------------------------------
# QLM: request groups ordered by waiting-time estimates
# --------------------------------------------------------------------------------------------------


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
    return min(waiting)


def edf(waiting: list[Job], now: float, loaded: int | None) -> Job:
    """Earliest deadline first."""
    return min(waiting, key=lambda job: (job.deadline, job))


class QLM:
    """Pick: the first request of the first group. mean: seconds of a request of each model."""

    def __init__(self, mean: list[float], slots: int, swap: float, group_size: int = 16):
        self.mean, self.slots, self.swap, self.group_size = mean, slots, swap, group_size
        self.estimates: dict[Job, float] = {}  # start of each request, when it was first seen

    def __call__(self, waiting: list[Job], now: float, loaded: int | None) -> Job:
        order = self.order(self.groups(waiting), now, loaded)
        for job, start in self.starts(order, now, loaded):
            self.estimates.setdefault(job, start)
        return order[0][0]

    def groups(self, waiting: list[Job]) -> list[list[Job]]:
        """Requests of one model and SLO, in order of arrival, at most group_size together."""
        kinds: dict[tuple[int, float], list[Job]] = {}
        for job in sorted(waiting):
            kinds.setdefault((job.model, round(job.deadline - job.arrival, 6)), []).append(job)
        size = self.group_size
        return [jobs[i : i + size] for jobs in kinds.values() for i in range(0, len(jobs), size)]

    def starts(
        self, order: list[list[Job]], now: float, loaded: int | None
    ) -> Iterable[tuple[Job, float]]:
        """Waiting-time estimator: tokens before a request over the throughput, that is mean seconds
        over slots for each; a swap first drains the batch, a mean request."""
        for group in order:
            if group[0].model != loaded:
                now += self.swap + (self.mean[loaded] if loaded is not None else 0.0)
                loaded = group[0].model
            for job in group:
                yield job, now
                now += self.mean[loaded] / self.slots

    def order(self, groups: list[list[Job]], now: float, loaded: int | None) -> list[list[Job]]:
        """The virtual queue: fewest estimated violations, then the least total wait. The best of
        FCFS, EDF and model by model, improved by moving one group at a time."""

        def cost(order: list[list[Job]]) -> tuple[int, float]:
            starts = [*self.starts(order, now, loaded)]
            return sum(t > job.deadline for job, t in starts), sum(t for _, t in starts)

        keys = (
            lambda g: g[0],
            lambda g: g[0].deadline,
            lambda g: (g[0].model != loaded, g[0].model, g[0].deadline),
        )
        best = min((sorted(groups, key=key) for key in keys), key=cost)
        while True:
            moves = []
            for i, j in product(range(len(best)), repeat=2):
                rest = best[:i] + best[i + 1 :]
                moves.append(rest[:j] + [best[i]] + rest[j:])
            new = min(moves, key=cost)
            if cost(new) >= cost(best):
                return best
            best = new


def slo_attainment(starts: dict[Job, float]) -> float:
    return sum(t <= job.deadline for job, t in starts.items()) / len(starts)
