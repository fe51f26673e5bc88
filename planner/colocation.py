"""Many models on shared GPUs, each mechanism beside its baseline, simulated: placement.

A GPU that serves one model is idle between its bursts and full when they come. With several models
on a GPU, one uses what another leaves. Hardware here is what the argument needs and no more: a
deterministic service time or a latency table. Times are simulated seconds.

AlpaServe (Li et al., OSDI 2023, arXiv:2302.11665). Two models on two GPUs, each split over both as
    a pipeline: a burst of one model uses both GPUs (section 3.1). Mean latencies follow from M/D/1
    queues (3.4), and so do the loads between which the pipeline wins under Poisson arrivals.
    `greedy_placement` is Algorithm 1 (4.2). Loses: at low load, where nobody waits and the overhead
    of parallelism is added to each request; near saturation, since overhead takes capacity. Greedy
    placement is not optimal: test_all.py bounds its gap to brute force.
MuxServe (Duan et al., ICML 2024, arXiv:2404.02015). One pool of KV blocks, each of one head of one
    layer, serves LLMs with different numbers of heads (3.4, resource manager); prompts of one LLM
    run beside the decoding of others, and quotas of blocks follow their use (3.3, ADBS). Loses:
    without quotas, a flood of one LLM takes the memory of the others; quotas cost goodput where the
    pool alone is enough; when all LLMs decode, running them together gains nothing.
Gpulet (Choi et al., USENIX ATC 2022). A GPU is split into at most two partitions, each shared in
    time by the models placed on it, with predicted interference between both. Loses:
    models that fill a GPU gain nothing from a split; a prediction that is too low breaks SLOs, by
    its error, and one that is too high rejects what fits.

Left out: the choice of GPU groups in AlpaServe and MuxServe, which is enumeration around what is
here; Gpulet's split of one model's rate over several partitions. Hook: none; MuxServe's pool runs
under the real Scheduler and BlockAllocator of paged_kv.py. planner/time_sharing.py decides what
runs when on one GPU. `python -m planner simulate colocation` prints the tables of both files.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import argparse
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from paged_kv import BlockAllocator, Scheduler, Sequence
from planner.time_sharing import Row, orion_rows, qlm_rows, times

# ---- AlpaServe: model parallelism multiplexes bursts ----


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
    """A model with a deterministic service time."""

    seconds: float  # of a request on one GPU
    memory: float  # of its weights, in units of a GPU's
    slo: float  # on latency, in seconds


Arrivals = list[tuple[float, int]]  # (time, model)
Placement = list[frozenset[int]]  # of each group of GPUs: its models
Groups = list[tuple[int, float]]  # (GPUs, overhead of a pipeline over them)


def attainment(arrivals: Arrivals, models: list[Model], groups: Groups, placed: Placement) -> float:
    """Fraction of requests within their SLO. A request goes to the group with its model that
    finishes it first, and is rejected if that is too late (section 4.3)."""
    free, good = [[0.0] * n for n, _ in groups], 0
    for arrival, m in arrivals:
        best = math.inf, 0, []
        for g, (n, overhead) in enumerate(groups):
            if m in placed[g]:
                now, times = arrival, []
                for t in free[g]:
                    times.append(now := max(t, now) + overhead * models[m].seconds / n)
                best = min(best, (now, g, times))
        if best[0] - arrival <= models[m].slo:
            free[best[1]] = best[2]
            good += 1
    return good / len(arrivals)


def greedy_placement(arrivals: Arrivals, models: list[Model], groups: Groups) -> Placement:
    """Algorithm 1: add the replica (model, group) with which simulation attains most, until no
    other fits into memory; the best placement seen."""
    now: Placement = [frozenset() for _ in groups]
    seen = [(0.0, now)]
    while True:
        options = []
        for m, g in product(range(len(models)), range(len(groups))):
            new = now[:g] + [now[g] | {m}] + now[g + 1 :]
            if m not in now[g] and sum(models[i].memory for i in new[g]) <= groups[g][0]:
                options.append((attainment(arrivals, models, groups, new), new))
        if not options:
            return max(seen, key=lambda option: option[0])[1]
        seen.append(max(options, key=lambda option: option[0]))
        now = seen[-1][1]


# ---- MuxServe: one pool of head-wise KV blocks ----


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


class LLM(NamedTuple):
    """Seconds of a step: `weights` reads the weights and `key` a cached token, at memory bandwidth;
    `token` is the arithmetic of a new token. A step takes the longer of both sums."""

    heads: int  # layers x KV heads
    weights: float
    token: float
    key: float


class Request(NamedTuple):
    """A request to one of several LLMs."""

    arrival: float
    llm: int
    prompt: int  # tokens
    output: int

    def alone(self, llm: LLM) -> float:
        """About its latency on an idle GPU."""
        decode = llm.weights + llm.key * (self.prompt + self.output / 2)
        return self.prompt * llm.token + self.output * decode


def _step_llms(
    turns: list[tuple[LLM, Scheduler]], budget: int, requests: list[Request]
) -> tuple[float, list[Sequence]]:
    """Step all LLMs at once, the first ones in turn with most of the budget of prompt tokens: the
    step's seconds, and the sequences that ended."""
    compute, memory, finished = 0.0, 0.0, []
    for llm, scheduler in turns:
        n_decoding = sum(seq.remaining == 1 for seq in scheduler.running)
        scheduler.max_num_batched_tokens = n_decoding + budget
        plan = scheduler.schedule()
        scheduler.commit(plan)
        budget = min(budget, plan.budget)
        compute += llm.token * sum(n for _, n in plan.run)
        memory += llm.weights * bool(plan.run)
        memory += llm.key * sum(seq.num_computed_tokens for seq, _ in plan.run)
        for seq, _ in plan.run:
            seq.tokens += [0] * (seq.remaining == 0)
            if len(seq.output) == requests[seq.arrival].output:
                scheduler.finish(seq)
                finished.append(seq)
    return max(compute, memory), finished


def serve_llms(
    requests: list[Request], llms: list[LLM], views: list[HeadBlocks],
    floors: list[int] | None = None, together: bool = True,
    observe: Callable[[list[Scheduler]], None] = lambda schedulers: None,
) -> list[float]:  # fmt: skip
    """Latencies, in order of `requests`. In a step all LLMs decode, and one that has prompts, in
    turns, runs prompts too; together=False steps one LLM at a time (temporal multiplexing).
    floors: of adapt_quotas, called after each step, as observe is."""
    for i, r in enumerate(requests):
        most = min(views[r.llm].quota, floors[r.llm] if floors else math.inf)
        need = -(-(r.prompt + r.output) // views[r.llm].block_size) * llms[r.llm].heads
        if need > most:
            raise ValueError(f"request {i} needs {need} blocks, LLM {r.llm} has at most {most}")
    schedulers = [Scheduler(view) for view in views]
    todo = sorted(range(len(requests)), key=lambda i: requests[i].arrival, reverse=True)
    latencies, now, turns = [0.0] * len(requests), 0.0, [*range(len(llms))]
    budget = schedulers[0].max_num_batched_tokens
    in_turn = lambda s: s.waiting or any(q.remaining > 1 or not together for q in s.running)
    while todo or any(s.waiting or s.running for s in schedulers):
        if not any(s.waiting or s.running for s in schedulers):
            now = max(now, requests[todo[-1]].arrival)
        while todo and requests[todo[-1]].arrival <= now:
            r = requests[i := todo.pop()]
            schedulers[r.llm].add(Sequence([0] * r.prompt, r.prompt, arrival=i))
        turns = turns[1:] + turns[:1]
        first = next((i for i, m in enumerate(turns) if in_turn(schedulers[m])), 0)
        turns = turns[first:] + turns[:first]
        stepped = [(llms[m], schedulers[m]) for m in (turns if together else turns[:1])]
        seconds, finished = _step_llms(stepped, budget, requests)
        now += seconds
        for seq in finished:
            latencies[seq.arrival] = now - requests[seq.arrival].arrival
        if floors:
            adapt_quotas(views, floors)
        observe(schedulers)
    return latencies


def goodput(requests: list[Request], llms: list[LLM], latencies: list[float]) -> list[float]:
    """Of each LLM, requests per second within 4 times their latency alone."""
    done = [*zip(requests, latencies, strict=True)]
    end = max(r.arrival + latency for r, latency in done)
    good = [r.llm for r, latency in done if latency <= 4 * r.alone(llms[r.llm])]
    return [good.count(m) / end for m in range(len(llms))]


# ---- Gpulet: partitions of a GPU, shared in time ----

# sizes of the one or two partitions of a GPU
SPLITS = ((1.0,), (0.2, 0.8), (0.4, 0.6), (0.5, 0.5), (0.6, 0.4), (0.8, 0.2))


class Network(NamedTuple):
    """A batch takes launch + batch x work seconds on a whole GPU if it fills the GPU; one request
    fills the share `width`. memory: share of the GPU's bandwidth used by a partition that runs."""

    launch: float
    work: float
    width: float
    memory: float
    slo: float

    def latency(self, batch: int, size: float) -> float:
        """Seconds of a batch on a partition."""
        return self.launch + batch * self.work / min(size, batch * self.width)


Demand = tuple[Network, float]  # requests per second
Split = list[tuple[float, list[Demand]]]  # of a GPU: its partitions and what they serve
Predict = Callable[[float, float], float]  # bandwidths of two partitions -> slowdown of both


def worst_latencies(demands: list[Demand], size: float, factor: float = 1) -> list[float] | None:
    """Of a partition that runs a batch of each network in turn, slowed by `factor`: the shortest
    cycle that keeps up with the rates; a request waits at most a cycle and then runs (squishy bin
    packing, Nexus, SOSP 2019). None if one exceeds its SLO."""
    cycle = 0.0
    while True:
        times = [
            factor * net.latency(max(1, math.ceil(rate * cycle)), size) for net, rate in demands
        ]
        worst = [sum(times) + t for t in times]
        if any(t > net.slo for t, (net, _) in zip(worst, demands)):
            return None
        if sum(times) <= cycle:
            return worst
        cycle = sum(times)


def interference(a: float, b: float) -> float:
    """The true slowdown of both, from the bandwidths that they use."""
    return max(1.0, a + b)


def fit_interference(rng: random.Random, n: int = 200) -> tuple[Predict, float]:
    """A linear predictor of the slowdown, fitted to n profiled pairs, and its mean
    relative error on n others."""
    pairs = [(rng.random(), rng.random()) for _ in range(2 * n)]
    true = [interference(*pair) for pair in pairs]
    slope, shift = statistics.linear_regression([a + b for a, b in pairs[:n]], true[:n])
    predict = lambda a, b: max(1.0, slope * (a + b) + shift)
    errors = [abs(predict(*pair) / t - 1) for pair, t in zip(pairs[n:], true[n:])]
    return predict, statistics.mean(errors)


def is_feasible(split: Split, predict: Predict) -> bool:
    """Whether the SLOs of a GPU's networks hold with the predicted slowdown."""
    memory = [max(net.memory for net, _ in demands) for _, demands in split]
    factor = predict(*memory) if len(split) == 2 else 1.0
    return all(worst_latencies(demands, size, factor) for size, demands in split)


def elastic_partition(
    demands: list[Demand], n_gpus: int, predict: Predict, splits: Iterable[tuple] = SPLITS
) -> list[Split] | None:
    """Partitions that meet all SLOs, or None. Largest load first, each network gets a partition of
    its own where one fits, else a share of a partition's time; a GPU's sizes may change with each
    network. If that fails, whole GPUs shared in time only, which is splits=[(1.0,)]."""
    gpus: list[Split] = [[] for _ in range(n_gpus)]
    for demand in sorted(demands, key=lambda d: -d[0].work * d[1]):
        options = []
        for g, gpu in enumerate(gpus):
            old = [part for _, part in gpu]
            joined = [old[:i] + [part + [demand]] + old[i + 1 :] for i, part in enumerate(old)]
            for new, sizes in product([old + [[demand]], *joined], splits):
                split = [*zip(sizes, new)]
                if len(sizes) == len(new) and is_feasible(split, predict):
                    options.append((max(map(len, new)), len(new), g, split))
        if not options:
            whole = [(1.0,)]
            return elastic_partition(demands, n_gpus, predict, whole) if splits != whole else None
        *_, g, gpus[g] = min(options, key=lambda option: option[:3])
    return gpus


def max_rate(demands: list[Demand], fits: Callable[[list[Demand]], object]) -> float:
    """Largest factor of all rates that fits, within 1e-3 and below 100."""
    low, high = 0.0, 100.0
    while high - low > 1e-3:
        mid = (low + high) / 2
        low, high = (mid, high) if fits([(net, r * mid) for net, r in demands]) else (low, mid)
    return low


# ---- the table ----

LLMS = [LLM(2, 0.010, 5e-5, 1e-6), LLM(3, 0.015, 8e-5, 1.5e-6)]
SMALL, TINY = Network(0.001, 0.001, 0.2, 0.3, 0.03), Network(5e-4, 5e-4, 0.1, 0.2, 0.02)
MEDIUM, LARGE = Network(0.001, 0.002, 0.3, 0.7, 0.04), Network(0.002, 0.012, 1.0, 0.8, 0.1)


def alpaserve_rows() -> Iterator[Row]:
    """Dedicated GPUs against pipelines over both."""
    low, high = crossover_loads(1.1)
    loads = {"below the crossovers": 0.7 * low, "between them": 1.0, "above both": 1.05 * high}
    for (name, load), cv in [*product(loads.items(), (1, 4))][:5]:
        a, b = (times(seed, load / 2, 20000, cv) for seed in (0, 1))
        dedicated = pipeline(a, [1.0]) + pipeline(b, [1.0])
        both = pipeline(sorted(a + b), [0.55] * 2)
        name = f"{'bursts, CV 4' if cv > 1 else 'Poisson'}, load {name}"
        means = statistics.mean(dedicated), statistics.mean(both)
        yield ("AlpaServe: dedicated, pipelines", name, "mean latency, s", *means)


def llm_trace(*kinds: tuple[float, int, int], seconds: float = 40, seed: int = 0) -> list[Request]:
    """For each LLM (rate, mean prompt, mean output)."""
    rng, requests = random.Random(seed), []
    for m, (rate, prompt, output) in enumerate(kinds):
        for t in times(seed + m, rate, int(rate * seconds)):
            n = rng.randint(prompt // 2, prompt * 3 // 2)
            requests.append(Request(t, m, n, 1 + min(4 * output, int(rng.expovariate(1 / output)))))
    return requests


def serve_with(kind: str, blocks: int, requests: list[Request], **kwargs: Any) -> list[float]:
    """serve_llms with LLMS in static halves of the memory, one pool, or one pool with quotas."""
    half, pool = blocks // 2, BlockAllocator(blocks)
    quota, floors = (half, [blocks // 3] * len(LLMS)) if kind == "quotas" else (None, None)
    pools = [BlockAllocator(half) if kind == "static" else pool for _ in LLMS]
    views = [HeadBlocks(pool, llm.heads, quota) for pool, llm in zip(pools, LLMS)]
    return serve_llms(requests, LLMS, views, floors, **kwargs)


def muxserve_rows() -> Iterator[Row]:
    """Static halves of the KV cache against a shared pool and quotas."""
    skewed, flood = ((9, 200, 80), (1, 200, 80)), ((40, 40, 100), (0.5, 900, 20))
    for name, kinds, blocks, seconds in ("9 to 1", skewed, 1400, 40), ("flood", flood, 1000, 20):
        trace = llm_trace(*kinds, seconds=seconds)
        static, pool, quotas = (
            goodput(trace, LLMS, serve_with(kind, blocks, trace))
            for kind in ("static", "pool", "quotas")
        )
        for title, new in ("pool", pool), ("quotas", quotas):
            title = f"MuxServe: static halves, {title}"
            yield title, name, "goodput of both, 1/s", sum(static), sum(new)
            yield title, name, "of the lesser LLM, 1/s", static[1], new[1]
    for name, first in ("prompts beside decoding", (1000, 4)), ("decoding only", (50, 200)):
        trace = llm_trace((1e4, *first), (1e4, 50, 200), seconds=0.01)
        ends = [max(serve_with("pool", 4000, trace, together=t)) for t in (False, True)]
        yield ("MuxServe: in turns, together", name, "last finish, s", *ends)


def gpulet_rows() -> Iterator[Row]:
    """Sharing a GPU by time alone against partitions."""
    predict, error = fit_interference(random.Random(0))
    yield "Gpulet: none, linear prediction", "pairs", "mean relative error", math.nan, error
    fits = partial(elastic_partition, n_gpus=1, predict=predict)
    small, mixed = [(SMALL, 100), (TINY, 200)], [(SMALL, 100), (MEDIUM, 40), (LARGE, 10)]
    for name, mix in ("small", small), ("mixed", mixed), ("large", [(LARGE, 20)] * 2):
        rates = max_rate(mix, partial(fits, splits=[(1.0,)])), max_rate(mix, fits)
        yield ("Gpulet: time, partitions", f"{name} networks", "largest rate, x", *rates)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """`simulate colocation` has no flags."""
    parser.set_defaults(report=report)


def report(_: argparse.Namespace) -> str:
    """A line per technique, beside its baseline."""
    lines = [f"{'baseline, technique':33} {'workload':40} {'measure':23} {'baseline':>9} technique"]
    for rows in (alpaserve_rows, muxserve_rows, gpulet_rows, orion_rows, qlm_rows):
        for title, workload, measure, old, new in rows():
            lines.append(f"{title:33} {workload:40} {measure:23} {old:9.3f} {new:9.3f}")
    return "\n".join(lines)
