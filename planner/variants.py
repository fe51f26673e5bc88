"""Choosing among variants of a model: which variant serves the next batch, and how large is it?

    python -m planner simulate variants [--workers N] [--slo-ms MS] [--seed N] [--table FILE.json]
    python -m planner simulate variants --calibrate [--checkpoint DIR ...] [--table FILE.json]

Quantization, fewer layers, a shorter prompt or a smaller model each give a faster variant that is
wrong more often. Under bursts a fixed variant is either too slow or needlessly inaccurate. Policies
that look at the queue do better, and each paper below is one such function of 10 to 25 lines:

    edf          the baseline: earliest deadline first, largest batch that is in time
    greedy       edf, with the most accurate variant for which that batch is in time
    infaas       cheapest variant that meets deadline and accuracy floor; scales the workers
    mosel        subsets of the input: spends in bursts the accuracy that it earned in lulls
    ramsis       value iteration over (queue length, slack) for Poisson arrivals
    shepherd     largest batch of all models first; preempts for a batch 3.03 times as large
    slackfit     SuperServe: the slowest latency bucket that the slack allows, and its largest batch
    cocktail     smallest ensemble that reaches the accuracy floor; weighted votes, spot workers
    best-effort  Q-learning over (queue length, slack)

They are compared by simulation (variant_simulator.py) on the latencies and accuracies of
variants.json, which --calibrate measures: "last16" and "layers4" see the last 16 tokens of a prompt
and run the first 4 layers.

When they lose: at a low, even load every deadline is met by the most accurate variant, and no
policy does better (second table printed). infaas is then less accurate by design. No policy meets
more deadlines than the fastest variant alone: slackfit beats every fixed variant of at least its
accuracy. greedy is as good as ramsis if the SLO is several times the slowest batch. shepherd beats
edf only in overload and where batching pays (seconds grow slower than the batch), else the
preempted work is a loss. The votes of the shipped checkpoints are no better than the best of them:
they learned from the same text, so they err together. Where one fast variant is nearly as accurate
as the best (checkpoints/draft in the first table printed), it alone has more quality under
deadlines than slackfit, shepherd and best-effort. Switching variants is free here.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import argparse
import itertools
import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from serving.traces import arrival_times
from planner.variant_simulator import (
    SIZES, Choice, Policy, Pool, Query, Result, Run, Variant, calibrate, simulate,
)  # fmt: skip
from training.flags import check_positive

TABLE = Path(__file__).with_name("variants.json")
LAMBDA = 3.03  # SHEPHERD's ratio of batch sizes: the best competitive ratio of its Flex


def batches(
    queue: Sequence[Query], now: float, pool: Pool, late: bool = False, floors: bool = True
) -> list[Choice]:
    """For each variant and batch size: the batch of the most urgent queries of the first one's
    model, if it is in time for all of them (late: in any case). floors: only variants of at least
    the accuracy floor of each query, unless no such batch is in time."""
    head, found = queue[0], []
    for v in pool.variants:
        is_below = floors and v.accuracy < head.floor
        if is_below or v.model != head.model or v.workers > len(pool.idle):
            continue
        mates = (q for q in queue if q.model == v.model and not (floors and v.accuracy < q.floor))
        batch = list(itertools.islice(mates, max(v.latency)))
        for size, seconds in sorted(v.latency.items()):
            if late or now + seconds <= head.deadline:
                found.append(Choice(v, batch[:size], seconds))
            if size >= len(batch):
                break
    return found if found or not floors else batches(queue, now, pool, late, floors=False)


def largest(choice: Choice) -> tuple[int, float]:
    """The key of the largest batch, and among these of the most accurate variant."""
    return len(choice.queries), choice.variant.accuracy


def price(choice: Choice) -> float:
    """What a batch costs, per query."""
    cost = choice.seconds * choice.variant.cost * choice.variant.workers
    return cost / len(choice.queries)


def edf(queue: list[Query], now: float, pool: Pool) -> Choice:
    """Earliest deadline first, with the largest batch in time; given one variant, the baseline of
    all these papers. Adaptive batching of Clipper (NSDI 2017)."""
    return max(batches(queue, now, pool), key=lambda c: (len(c.queries), -c.seconds))


def greedy(queue: list[Query], now: float, pool: Pool, margin: float = 0.0) -> Choice:
    """The largest batch in time, and the most accurate variant for it; `margin` seconds of slack
    are left if possible. The load-agnostic baseline of RAMSIS."""
    every = batches(queue, now, pool)
    early = [c for c in every if now + c.seconds + margin <= queue[0].deadline]
    return max(early or [min(every, key=lambda c: c.seconds)], key=largest)


def infaas(queue: list[Query], now: float, pool: Pool) -> Choice:
    """The cheapest variant, per query, that meets the first query's deadline and accuracy floor.
    INFaaS (ATC 2021), selection of a model variant."""
    return min(batches(queue, now, pool), key=lambda c: (price(c), c.seconds))


def infaas_workers(now: float, pool: Pool, window: float = 2.0, load: float = 0.5) -> int:
    """Workers for the arrivals of the last `window` seconds and the queue, each query alone with
    the mean variant, loaded to `load`. INFaaS, the model autoscaler."""
    recent = itertools.takewhile(lambda t: t > now - window, reversed(pool.arrivals))
    each = statistics.fmean(min(v.latency.values()) for v in pool.variants if v.workers == 1)
    return math.ceil((sum(1 for _ in recent) + len(pool.queue)) / window * each / load)


def mosel(queue: list[Query], now: float, pool: Pool) -> Choice:
    """greedy among the variants (subsets of a query's input) after which the mean accuracy of all
    answers is at least the floor: lulls earn the accuracy that bursts spend. If no batch in time
    keeps the floor, the most accurate variant is late. MOSEL (EMNLP 2024, arXiv 2310.18481),
    "Modality selection": an accuracy guarantee per job, not per query."""

    def keeps_floor(c: Choice) -> bool:
        n = len(c.queries)
        mean = (pool.accuracy_sum + n * c.variant.accuracy) / (pool.answers + n)
        return mean >= queue[0].floor - 1e-9

    kept = [c for c in batches(queue, now, pool, floors=False) if keeps_floor(c)]
    late = lambda: batches(queue, now, pool, late=True, floors=False)
    return max(kept, key=largest) if kept else max(late(), key=lambda c: c.variant.accuracy)


def shepherd_batches(queue: Sequence[Query], now: float, pool: Pool) -> list[Choice]:
    """The largest batch in time of each variant of each model, without the queries that it would
    be too late for. SHEPHERD (NSDI 2023), Flex: the candidate batches."""
    found = []
    for v in pool.variants:
        for size, seconds in sorted(v.latency.items(), reverse=True):
            mates = (q for q in queue if q.model == v.model and now + seconds <= q.deadline)
            batch = list(itertools.islice(mates, size))
            if len(batch) > max((s for s in v.latency if s < size), default=0):
                found.append(Choice(v, batch, seconds))
    return found


def shepherd(queue: list[Query], now: float, pool: Pool) -> Choice:
    """The largest candidate batch of all models. SHEPHERD, Flex: an idle worker."""
    return max(shepherd_batches(queue, now, pool), key=largest)


def shepherd_preempt(queue: list[Query], now: float, pool: Pool) -> tuple[Run, Choice] | None:
    """Replace the smallest running batch if a candidate is LAMBDA times as large; what it computed
    is lost. SHEPHERD, Flex: an arrival while all workers are busy."""
    run = min(pool.runs, key=lambda r: len(r.choice.queries), default=None)
    best = max(shepherd_batches(queue, now, pool), key=largest, default=None)
    if run is None or best is None or len(best.queries) < LAMBDA * len(run.choice.queries):
        return None
    return run, best


def herd(rates: Mapping[str, float], throughput: Mapping[str, float], workers: int,
         models_per_worker: int) -> list[tuple[list[str], int]]:  # fmt: skip
    """Groups of request streams with the workers of each: of all groupings in which a group's
    models fit a worker, the one whose least burst tolerance is highest (the factor by which a
    group's rate may grow until its workers are saturated). By enumeration: at most 8 streams.
    SHEPHERD, Herd: the periodic planner, an integer program there."""

    def groupings(names: list[str]) -> Iterable[list[list[str]]]:
        if not names:
            yield []
            return
        for rest in groupings(names[1:]):
            yield [[names[0]], *rest]
            for i in range(len(rest)):
                yield [*rest[:i], [names[0], *rest[i]], *rest[i + 1 :]]

    plans = []
    for groups in groupings(sorted(rates)):
        if len(groups) <= workers and max(map(len, groups)) <= models_per_worker:
            need = [sum(rates[m] / throughput[m] for m in group) for group in groups]
            given = [1] * len(groups)
            for _ in range(workers - len(groups)):
                given[min(range(len(groups)), key=lambda i: given[i] / need[i])] += 1
            tolerance = min(w / n for w, n in zip(given, need))
            plans.append((tolerance, [*zip(groups, given)]))
    return max(plans)[1]


def slackfit(queue: list[Query], now: float, pool: Pool, buckets: int = 8) -> Choice:
    """All (variant, batch size) lie in evenly spaced buckets of latency. The first query's slack
    picks the highest bucket that it allows, and there the largest batch, then accuracy: little
    slack, which queueing causes, leads to fast variants. SuperServe (NSDI 2025, arXiv 2312.16733);
    its subnets with fewer layers are `early_exit.slice_layers` here."""
    every = batches(queue, now, pool)
    seconds = [s for v in pool.variants for s in v.latency.values()]
    width = (max(seconds) - min(seconds)) / buckets
    bucket = lambda c: min(buckets - 1, int((c.seconds - min(seconds)) / width))
    top = max(map(bucket, every))
    return max((c for c in every if bucket(c) == top), key=largest)


def cocktail(queue: list[Query], now: float, pool: Pool) -> Choice:
    """The cheapest model or ensemble that reaches the accuracy floor in time, so ensembles shrink
    as slack and idle workers do; else the most accurate. Cocktail (NSDI 2022), the dynamic
    model selection; weighted_vote() is its class-based weighted majority."""
    every = batches(queue, now, pool, floors=False)
    reach = [c for c in every if c.variant.accuracy >= queue[0].floor]
    if reach:
        return min(reach, key=price)
    return max(every, key=lambda c: (c.variant.accuracy, -price(c)))


def ensembles(singles: Sequence[Variant], votes: Mapping[str, float]) -> list[Variant]:
    """Variants of `votes` ({"a+b+c": accuracy of their vote}), each as slow as its slowest member,
    with what remains of it after the loss of each member. Cocktail."""
    known = {v.name: v for v in singles}
    for names in sorted(votes, key=lambda names: names.count("+")):
        members = [known[name] for name in names.split("+")]
        less = ["+".join(m.name for m in members if m is not lost) for lost in members]
        latency = {n: max(m.latency[n] for m in members) for n in members[0].latency}
        cost, degraded = statistics.fmean(m.cost for m in members), tuple(known[n] for n in less)
        known[names] = Variant(names, votes[names], latency, cost, members[0].model, degraded)
    return [known[names] for names in votes]


def value_iteration(rewards: Tensor, next_states: Tensor, tolerance: float = 1e-9) -> Tensor:
    """Q values (S, A) of a decision process: rewards (S, A), next_states (S, A, S) the
    probabilities of the next state times the discount. -inf rewards are impossible actions."""
    values = torch.zeros(len(rewards), dtype=rewards.dtype)
    while True:
        q = rewards + next_states @ values
        change = (q.max(1).values - values).abs().max()
        values = q.max(1).values
        if change <= tolerance:
            return q


class Ramsis:
    """The policy that is best for Poisson arrivals. State: (queue length, slack of the first query
    in steps of slo / bins); action: the variant that serves the whole queue, up to its largest
    batch; reward: the accuracy of the answers in time, less `penalty` for each late one. Of
    several workers, each is planned as if its share of `rate` were all. RAMSIS: "Model selection
    for latency-critical inference serving" (EuroSys 2024)."""

    def __init__(self, variants: Sequence[Variant], rate: float, slo: float, penalty: float = 0.0,
                 bins: int = 20, horizon: float = 20.0):  # fmt: skip
        self.variants, self.slo, self.bins = list(variants), slo, bins
        self.longest = max(max(v.latency) for v in variants)
        S = self.longest * (bins + 1)
        rewards = torch.zeros(S, len(self.variants), dtype=torch.double)
        following = torch.zeros(S, len(self.variants), S, dtype=torch.double)
        decay = 1 / (horizon * slo)  # future rewards count e^(-decay seconds)
        for a, v in enumerate(self.variants):
            for n in range(1, self.longest + 1):
                seconds = batch_seconds(v, n)
                after = self._arrivals(seconds, rate, decay)
                for j in range(bins + 1):
                    s, in_time = self.state(n, j * slo / bins), seconds <= j * slo / bins
                    rewards[s, a] = n * (v.accuracy if in_time else -penalty)
                    following[s, a] = after
        self.best = value_iteration(rewards, following).argmax(1)

    def state(self, n: int, slack: float) -> int:
        """Index of a state; the slack is rounded down."""
        j = min(self.bins, max(0, int(slack / self.slo * self.bins + 1e-9)))
        return (min(n, self.longest) - 1) * (self.bins + 1) + j

    def _arrivals(self, seconds: float, rate: float, decay: float) -> Tensor:
        """The discounted probabilities (S,) of the state after a batch of `seconds`: the time of
        the first arrival decides the slack, the number of those after it the queue length."""
        out = torch.zeros(self.longest * (self.bins + 1), dtype=torch.double)
        idle = math.exp(-rate * seconds)  # no arrival: the next one finds an empty queue
        out[self.state(1, self.slo)] += idle * rate / (rate + decay)
        steps = 20
        for i in range(steps):
            x, width = (i + 0.5) * seconds / steps, seconds / steps
            first = math.exp(-rate * i * width) - math.exp(-rate * (i + 1) * width)
            mean, slack = rate * (seconds - x), self.slo - (seconds - x)
            p, total = math.exp(-mean), 0.0
            for k in range(self.longest - 1):
                out[self.state(1 + k, slack)] += first * p
                p, total = p * mean / (k + 1), total + p
            out[self.state(self.longest, slack)] += first * (1 - total)
        return out * math.exp(-decay * seconds)

    def __call__(self, queue: list[Query], now: float, pool: Pool) -> Choice:
        variant = self.variants[self.best[self.state(len(queue), queue[0].deadline - now)]]
        batch = queue[: max(variant.latency)]
        return Choice(variant, batch, batch_seconds(variant, len(batch)))


class BestEffort:
    """A router that learns which variant is best at each (queue length, slack), by Q-learning on
    training traces. The reward is the accuracy of the answers in time, less that of the best
    variant for every query, so that it is 0 in a lull and dropped queries count at once. "Learned
    best-effort LLM serving" (arXiv 2401.07886); its deep Q network is a table here, and
    it routes batches, not single requests."""

    def __init__(self, variants: Sequence[Variant], slo: float, seed: int = 0, bins: int = 8):
        self.variants, self.slo, self.bins = list(variants), slo, bins
        self.best = max(v.accuracy for v in variants)
        self.q: dict[tuple[tuple[int, int], str], float] = {}
        self.visits: Counter[tuple[tuple[int, int], str]] = Counter()
        self.explore, self.previous, self.rng = 0.0, None, random.Random(seed)

    def state(self, queue: Sequence[Query], now: float) -> tuple[int, int]:
        """(bits of the queue length, slack in steps of slo / bins)"""
        return len(queue).bit_length(), int((queue[0].deadline - now) / self.slo * self.bins)

    def __call__(self, queue: list[Query], now: float, pool: Pool) -> Choice:
        state = self.state(queue, now)
        actions = {c.variant.name: c for c in batches(queue, now, pool)}  # the last is the largest
        value = lambda name: self.q.get((state, name), 0.0)
        name = max(actions, key=lambda n: (value(n), actions[n].variant.accuracy))
        if self.explore:
            drops = len(pool.result.dropped)
            if self.previous is not None:
                key, reward, then, dropped = self.previous
                future = math.exp((then - now) / (5 * self.slo)) * value(name)
                target = reward - self.best * (drops - dropped) + future
                self.visits[key] += 1
                rate = max(0.02, self.visits[key] ** -0.7)
                self.q[key] = self.q.get(key, 0.0) + rate * (target - self.q.get(key, 0.0))
            if self.rng.random() < self.explore:
                name = self.rng.choice(list(actions))
            loss = len(actions[name].queries) * (self.best - actions[name].variant.accuracy)
            self.previous = (state, name), -loss, now, drops
        return actions[name]

    def learn(self, traces: Iterable[Sequence[Query]], workers: int) -> BestEffort:
        """Learn from simulations of the traces, exploring less from trace to trace."""
        for i, trace in enumerate(traces):
            self.explore, self.previous = 0.3 / (1 + i / 5), None
            simulate(trace, self.variants, Policy(self), workers)
        self.explore = 0.0
        return self


def batch_seconds(variant: Variant, n: int) -> float:
    """Seconds of a batch of n; of more than the largest, that of the largest."""
    sizes = variant.latency.keys()
    return variant.latency[min((size for size in sizes if size >= n), default=max(sizes))]


POLICIES: dict[str, Policy] = {
    "edf": Policy(edf),
    "greedy": Policy(greedy),
    "infaas": Policy(infaas, scale=infaas_workers),
    "mosel": Policy(mosel),
    "shepherd": Policy(shepherd, preempt=shepherd_preempt),
    "slackfit": Policy(slackfit),
    "cocktail": Policy(cocktail),
}
"""Those that need no plan; Ramsis(...) and BestEffort(...).learn(...) are the other two."""


def trace(n: int, rate: float, cv: float, slo: float, seed: int, floor: float = 0.0) -> list[Query]:
    """n queries with a deadline `slo` seconds after each arrival; see traces.arrival_times."""
    times = arrival_times(n, rate, cv, random.Random(seed))
    return [Query(t + slo, i, t, floor) for i, t in enumerate(times)]


def pareto(variants: Sequence[Variant]) -> list[Variant]:
    """Without those to which another is preferable in accuracy and at every batch size."""

    def beats(a: Variant, b: Variant) -> bool:
        faster = all(a.latency[n] <= b.latency[n] for n in b.latency)
        return a is not b and faster and (a.accuracy, b.name) > (b.accuracy, a.name)

    return [v for v in variants if not any(beats(other, v) for other in variants)]


def padded(latency: Mapping[int, float]) -> dict[int, float]:
    """A batch may be padded to a larger size that was measured to be faster."""
    return {b: min(s for c, s in latency.items() if c >= b) for b in latency}


def read_table(path: Path) -> tuple[list[Variant], list[Variant], str]:
    """variants.json: its variants, its ensembles, and how it was measured. ValueError if it is not
    what --calibrate writes."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        singles = []
        for v in table["variants"]:
            latency = {int(b): s for b, s in v["latency"].items()}
            if {*latency} != {*SIZES} or not all(0 < s < math.inf for s in latency.values()):
                raise ValueError(f"{v['name']} has no latency for each batch size of {SIZES}")
            singles.append(Variant(v["name"], v["accuracy"], padded(latency)))
        teams = ensembles(singles, table["votes"])
        if not singles or not all(0 <= v.accuracy <= 1 for v in singles + teams):
            raise ValueError("it has no variants, or accuracies beyond 0 to 1")
        return singles, teams, "{command}, {date}, {device}".format(**table)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as e:
        text = f"--table {path}: not a table of variants ({e!r}); make one with --calibrate"
        raise ValueError(text) from None


def compare(
    singles: list[Variant], teams: list[Variant], queries: list[Query], floor: float, rate: float,
    slo: float, workers: int, training: Iterable[list[Query]],
) -> dict[str, Result]:  # fmt: skip
    """{policy: its Result} of one trace. The fixed variants are served by edf; policies choose
    among the Pareto-optimal ones, as in SuperServe. Only infaas, mosel and cocktail are given the
    accuracy floor; the others know none."""
    results = {v.name: simulate(queries, [v], POLICIES["edf"], workers) for v in singles}
    singles = pareto(singles)
    policies = POLICIES | {
        "ramsis": Policy(Ramsis(singles, rate / workers, slo)),
        "best-effort": Policy(BestEffort(singles, slo).learn(training, workers)),
    }
    with_floor = [replace(q, floor=floor) for q in queries]
    for name, policy in policies.items():
        variants = singles + teams if name == "cocktail" else singles
        given = with_floor if name in ("infaas", "mosel", "cocktail") else queries
        results[name] = simulate(given, variants, policy, workers)
    return results


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `simulate variants`."""
    add = parser.add_argument
    add("--table", type=Path, default=TABLE, help="latencies and accuracies (variants.json)")
    add("--calibrate", action="store_true", help="measure the variants and write --table")
    shipped = [TABLE.parents[1] / "checkpoints" / name for name in ("small", "draft", "moe")]
    add("--checkpoint", type=Path, nargs="+", default=shipped, help="folders to measure")
    add("--workers", type=int, default=2, help="(2)")
    add("--slo-ms", type=float, help="default: 5 batches of 1, most accurate variant")
    add("--requests", type=int, default=2000, help="(2000)")
    add("--seed", type=int, default=0, help="(0)")
    parser.set_defaults(report=report)


def report(args: argparse.Namespace) -> str:
    """The output of `simulate variants`: two tables, or with --calibrate what was written."""
    check_positive(args, "workers", "requests", "slo_ms")
    if args.calibrate:
        if not args.table.parent.is_dir():
            raise ValueError(f"--table {args.table}: there is no folder {args.table.parent}")
        measured = calibrate(args.checkpoint)
        args.table.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
        return f"{args.table}: {len(measured['variants'])} variants"
    singles, teams, origin = read_table(args.table)
    best = max(singles, key=lambda v: v.accuracy)
    slo = args.slo_ms / 1000 if args.slo_ms else 5 * best.latency[1]
    floor = statistics.median(v.accuracy for v in singles)
    lines = [
        f"{args.table.name}: {origin}",
        f"{args.workers} workers, {args.requests} queries, SLO {slo * 1000:.0f} ms; accuracy floor "
        f"(infaas, mosel, cocktail) {floor:.3f}",
    ]
    for title, load, cv in (("bursts", 2.5, 4.0), ("low, even load", 0.3, 0.0)):
        rate = load * args.workers / best.latency[1]
        traces = [trace(args.requests, rate, cv, slo, args.seed + i) for i in range(21)]
        results = compare(singles, teams, traces[0], floor, rate, slo, args.workers, traces[1:])
        lines += [
            f"\n{title}: {rate:.1f} queries/s, {load:.0%} of {best.name}'s, arrival cv {cv:g}",
            f"{'':16} in time  +floor accuracy quality    cost  rented    lost",
        ]
        for name, r in results.items():
            lines.append(
                f"{name:16} {r.in_time:7.1%} {r.attainment:7.1%} {r.accuracy:8.4f} "
                f"{r.quality:7.4f} {r.cost:7.1f} {r.rented:7.1f} {r.lost:7.1f}"
            )
    return "\n".join(lines)
