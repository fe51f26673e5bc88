"""A simulator of the Engine: the real Scheduler, block allocator and prefix tree on a virtual clock.

    python -m serving.simulate TRACE --policies fcfs,fair,sjf --replicas 4 --plot out.png

TRACE is a file or a description (traces.py). A Replica runs paged_kv.py's own Scheduler on it; only
the model is missing. A step takes what StepCost says, base + per_token tokens + per_key keys read,
which --calibrate measures on this machine and --device computes from a data sheet, and a request
ends after the number of tokens that its trace has. So the order of tokens over all requests is the
Engine's, and the times are as good as the cost.

As long as nobody arrives, ends or waits, steps are alike: each running sequence gets one token. The
Replica then plans many steps at once, as one step whose drafts are all accepted (the Scheduler's
mechanism for speculative decoding), and rejects those after the next arrival.

What it does not know: the time of the host between steps beyond `base`, other programs, and a
cost that is not linear (steps of few tokens read all weights, large ones are bound by compute).

Equivalence (test_all.py): every timestamp == that of the real Engine whose clock advances by the
same cost; many steps at once == one by one. Needs: paged_kv.py, serving/traces.py, policies.py.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import json
import math
import random
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from paged_kv import BlockAllocator, Output, Plan, Sample, SamplingParams, Scheduler, Sequence
from paged_kv import SwappedKV, fcfs
from serving.policies import make_policy
from serving.traces import Arrival, read_trace

# --------------------------------------------------------------------------------------------------
# A replica
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step: base + per_token tokens + per_key keys read, and per_swapped for each token
    whose KV is copied from or to host memory."""

    base: float
    per_token: float
    per_key: float = 0.0
    per_swapped: float = 0.0

    def __call__(self, tokens: int, keys: int, swapped: int = 0) -> float:
        copies = self.per_swapped * swapped
        return self.base + self.per_token * tokens + self.per_key * keys + copies


def step_size(plan: Plan) -> tuple[int, int]:
    """Tokens that a plan runs, and keys that they read: a sequence's are read once for all of its
    tokens in the step."""
    tokens = sum(n for _, n in plan.run)
    return tokens, sum(seq.num_computed_tokens + n for seq, n in plan.run)


@dataclass(eq=False)
class Part(Sequence):
    """A request up to its next tool call, or to its end. Its Output.id is the Arrival."""

    number: int = 0

    @classmethod
    def of(cls, a: Arrival, before: Part | None = None) -> Part:
        """The first part of a request, or the one after a tool call."""
        number = before.number + 1 if before else 0
        stops = [0, *(call[0] for call in a.tool_calls), a.max_new_tokens]
        if before is None:
            output = Output(a, [], [Sample()], arrival_time=a.arrival_time)
            tokens = a.symbols()
        else:
            output, answer = before.request, a.tool_calls[before.number][2]
            tokens = before.tokens + [a.output_id] * answer
        params = _params(stops[number + 1] - stops[number])
        return cls(tokens, len(tokens), params, output, 0, a.priority, a.client, number=number)


@lru_cache(maxsize=None)
def _params(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens)


class Replica:
    """An Engine without a model: runs sequences on a Scheduler, on a clock of its own."""

    def __init__(
        self,
        cost: StepCost,
        policy: str = "fcfs",
        *,
        num_blocks: int,
        block_size: int = 16,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 64,
        kv_swap: bool = False,
        prefix_cache: bool = True,
        finished: Callable[[Part, float], Any] = lambda part, time: None,
        one_by_one: bool = False,
    ):
        """finished: called with each part at its end. one_by_one: never plan many steps at once."""
        self.cost, self.finished, self.one_by_one = cost, finished, one_by_one
        self.time = 0.0  # end of the last complete step
        policy = make_policy(policy, lambda: self.time)
        self.allocator = BlockAllocator(num_blocks, block_size, prefix_cache)
        self.scheduler = Scheduler(
            self.allocator, max_num_batched_tokens, max_num_seqs, policy, kv_swap
        )
        self.fixed_order = policy is fcfs  # of the waiting ones, whatever the time
        self.fixed_budget = not hasattr(policy, "token_budget")
        self.arriving: list[tuple[float, int, Part]] = []  # a heap
        self.n_sent = self.n_arrived = self.n_steps = 0
        self.plan: Plan | None = None  # of the steps that run, which end at self.ends
        self.ends: list[float] = []
        self.steady = False  # the last step only gave each running sequence a token

    @property
    def n_unfinished(self) -> int:
        return len(self.scheduler.running) + len(self.scheduler.waiting)

    @property
    def capacity(self) -> int:
        """Tokens that a sequence can have."""
        return len(self.allocator.refs) * self.allocator.block_size

    def send(self, part: Part, time: float) -> None:
        """A sequence will arrive at a time, which this replica must not have passed."""
        heapq.heappush(self.arriving, (time, self.n_sent, part))
        self.n_sent += 1

    def advance(self, until: float) -> None:
        """Let all happen that happens by a time: arrivals, and ends of steps."""
        while True:
            arrival = self.arriving[0][0] if self.arriving else math.inf
            horizon = min(until, arrival)
            if self.plan is None and self.n_unfinished and self.time < horizon:
                self._plan()
            if self.plan is not None and self.ends[-1] <= horizon:
                self._complete(len(self.ends))
            elif self.arriving and arrival <= until:
                self._arrive()
            else:
                return

    def _arrive(self) -> None:
        time, _, part = heapq.heappop(self.arriving)
        if self.plan is not None:  # it waits for the end of the present step
            self._complete(bisect.bisect_left([self.time, *self.ends[:-1]], time))
        elif not self.n_unfinished:
            self.time = max(self.time, time)
        part.arrival, self.n_arrived = self.n_arrived, self.n_arrived + 1
        self.scheduler.add(part)

    def _plan(self) -> None:
        """Plan the next step, or as many as are alike."""
        scheduler, n = self.scheduler, self._num_steps()
        for seq in scheduler.running:
            seq.num_draft_tokens = n - 1
        self.plan = plan = scheduler.schedule()
        assert plan.run, "nothing can run"
        swapped, (tokens, keys) = swap(plan), step_size(plan)
        n = 1 + min(plan.drafts.values()) if len(plan.drafts) == len(plan.run) else 1
        self.steady = not swapped and all(m == 1 for _, m in plan.run)
        self.ends, end = [], self.time
        for i in range(n):
            end += self.cost(tokens, keys + i * tokens, swapped)
            self.ends.append(end)

    def _num_steps(self) -> int:
        """How many of the next steps are alike: each running sequence decodes, and there are blocks
        and a budget for all."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        if self.one_by_one or not running or not self.fixed_budget:
            return 1
        if waiting and not (self.fixed_order and self.steady):
            return 1
        if not all(s.remaining == 1 and s.num_written_tokens < len(s.tokens) for s in running):
            return 1
        left = min(seq.n_prompt + seq.params.max_new_tokens - len(seq.tokens) for seq in running)
        blocks = self.allocator.n_free // len(running)  # of each: its next token may need one
        budget = self.scheduler.max_num_batched_tokens // len(running)
        return max(1, min(left, budget, (blocks - 1) * self.allocator.block_size))

    def _complete(self, n: int) -> None:
        """The first n of the planned steps have run."""
        plan, start, ends = self.plan, self.time, self.ends[:n]
        self.plan, self.time = None, ends[-1]
        self.n_steps += n
        for part, tokens in plan.run:
            request = part.request
            if not request.timestamps:
                request.timestamps.append(start)
            self.scheduler.accept(part, tokens)
            if part.remaining == 0:
                self.scheduler.accept(part, n - 1)
                part.tokens += [request.id.output_id] * n
                request.timestamps += ends
                if len(part.tokens) == part.n_prompt + part.params.max_new_tokens:
                    self._end(part)

    def _end(self, part: Part) -> None:
        self.scheduler.finish(part)
        self.finished(part, self.time)


def swap(plan: Plan) -> int:
    """Do a plan's swaps, without any KV; the number of tokens copied."""
    copied = 0
    for seq, _, _, n in plan.swap_out:
        seq.swapped_kv = SwappedKV(n, [], [])
        copied += n
    for seq, first in plan.swap_in:
        copied += seq.swapped_kv.n - first
        seq.swapped_kv = None
    return copied


# --------------------------------------------------------------------------------------------------
# Replicas and results
# --------------------------------------------------------------------------------------------------


class Histogram:
    """Counts of positive values in bins of 1% width: a percentile is exact to 1%."""

    def __init__(self):
        self.counts, self.new = np.zeros(4096, dtype=np.int64), array("d")

    def add(self, values: Iterable[float]) -> None:
        self.new.extend(values)
        if len(self.new) > 100_000:
            self._count()

    def _count(self) -> None:
        bins = np.log(np.maximum(self.new, 1e-9)) / math.log(1.01) + 2083
        np.add.at(self.counts, np.clip(bins, 0, 4095).astype(int), 1)
        self.new = array("d")

    def percentile(self, p: float) -> float:
        """The upper edge of the bin of the nearest-rank percentile; nan if empty."""
        self._count()
        total = np.cumsum(self.counts)
        if not total[-1]:
            return math.nan
        return 1.01 ** (int(np.searchsorted(total, p / 100 * total[-1])) - 2082)


@dataclass
class Report:
    """What clients saw. Latencies count from a request's arrival; itl is the time between tokens
    that follow each other without a tool call."""

    slo: tuple[float, float] = (1.0, 0.1)  # seconds to the first token, and per further token
    requests: int = 0
    tokens: int = 0
    good: int = 0  # requests within the SLO
    end: float = 0.0
    itl: Histogram = field(default_factory=Histogram)
    ttft: array = field(default_factory=lambda: array("d"))
    e2e: array = field(default_factory=lambda: array("d"))
    qoe: array = field(default_factory=lambda: array("d"))
    waits: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # by client

    def add(self, output: Output) -> None:
        """A request has ended."""
        arrival: Arrival = output.id
        _, *times = output.timestamps
        pauses = {call[0] for call in arrival.tool_calls}
        gaps = [b - a for a, b in zip(times, times[1:])]
        if pauses:
            gaps = [gap for i, gap in enumerate(gaps, 1) if i not in pauses]
        self.itl.add(gaps)
        ttft = times[0] - arrival.arrival_time
        self.ttft.append(ttft)
        self.e2e.append(times[-1] - arrival.arrival_time)
        self.waits[arrival.client].append(ttft)
        self.requests, self.tokens = self.requests + 1, self.tokens + len(times)
        self.good += ttft <= self.slo[0] and sum(gaps) <= self.slo[1] * max(1, len(gaps))
        self.end = max(self.end, times[-1])

    def metrics(self, replicas: list[Replica]) -> dict[str, float]:
        """All numbers, under the names that --json prints."""
        schedulers = [replica.scheduler for replica in replicas]
        admitted = sum(s.n_admitted_tokens for s in schedulers)
        worst = max((sum(w) / len(w) for w in self.waits.values()), default=math.nan)
        return {
            "requests": self.requests,
            "seconds": self.end,
            "tokens_per_second": self.tokens / self.end if self.end else 0.0,
            **{f"ttft_p{p}": percentile(self.ttft, p) for p in (50, 99)},
            **{f"itl_p{p}": self.itl.percentile(p) for p in (50, 99)},
            "e2e_mean": sum(self.e2e) / max(1, len(self.e2e)),
            "within_slo": self.good / max(1, self.requests),
            "goodput": self.good / self.end if self.end else 0.0,
            "worst_client_ttft": worst,
            "preemptions": sum(s.n_preempted for s in schedulers),
            "hit_rate": sum(s.n_hit_tokens for s in schedulers) / max(1, admitted),
            "replica_seconds_per_1000_tokens": 1e3 * len(replicas) * self.end / max(1, self.tokens),
        }


Router = Callable[[Arrival, Sequence[Replica]], Replica]


def simulate(
    trace: Iterable[Arrival], replicas: list[Replica], route: Router, report: Report
) -> dict[str, float]:
    """Run a trace to its end; returns Report.metrics. route chooses the replica of an arrival; see
    `load`."""
    for replica in replicas:
        replica.finished = lambda part, time: report.add(part.request)
    for arrival in trace:
        room = replicas[0].capacity - arrival.n_prompt - arrival.n_output
        if room < 0:
            raise ValueError(
                f"a request of {arrival.n_prompt} + {arrival.n_output} tokens exceeds the KV cache "
                f"of {replicas[0].capacity}: give --blocks"
            )
        replica = route(arrival, replicas)
        replica.send(Part.of(arrival), arrival.arrival_time)
        replica.advance(arrival.arrival_time)
    for replica in replicas:
        replica.advance(math.inf)
    return report.metrics(replicas)


def load(replica: Replica, now: float) -> int:
    """Unfinished requests of a replica at a time, which is not before the last one asked for."""
    replica.advance(now)
    return replica.n_unfinished


class RoundRobin:
    """Each replica in turn."""

    def __init__(self):
        self.turn = 0

    def __call__(self, arrival: Arrival, replicas: Sequence[Replica]) -> Replica:
        self.turn += 1
        return replicas[(self.turn - 1) % len(replicas)]


class PowerOfTwo:
    """The less loaded of two random replicas (Mitzenmacher 2001): two choices suffice to make the
    longest queue exponentially shorter than random choice does."""

    def __init__(self):
        self.random = random.Random(0)

    def __call__(self, arrival: Arrival, replicas: Sequence[Replica]) -> Replica:
        two = self.random.sample(replicas, min(2, len(replicas)))
        return min(two, key=lambda replica: load(replica, arrival.arrival_time))


def prefix_hash(arrival: Arrival, replicas: Sequence[Replica]) -> Replica:
    """By the prompt's first segment: equal beginnings meet in one prefix cache, whatever its load.
    """
    first = random.Random(arrival.prompt[0][0]).randrange(len(replicas))
    return replicas[first]


class Preble:
    """cluster.py's PrefixAndLoad: where most of the prompt is cached, unless that replica is
    overloaded."""

    def __init__(self):
        from serving.cluster import PrefixAndLoad  # here: 1 s

        self.policy = PrefixAndLoad()

    def __call__(self, arrival: Arrival, replicas: Sequence[Replica]) -> Replica:
        loads = {i: load(r, arrival.arrival_time) for i, r in enumerate(replicas)}
        prompt = arrival.symbols()
        chosen = self.policy.choose(prompt, loads)[0]
        self.policy.record(prompt, chosen)
        return replicas[chosen]


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "power-of-two": PowerOfTwo,
    "prefix-hash": lambda: prefix_hash,
    "preble": Preble,
}


# --------------------------------------------------------------------------------------------------
# What a step costs
# --------------------------------------------------------------------------------------------------


def fit(sizes: Sequence[tuple[int, int]], seconds: Sequence[float]) -> StepCost:
    """The cost of measured steps of (tokens, keys), by least squares of relative errors with no
    negative term."""
    rows = np.array([[1.0, tokens, keys] for tokens, keys in sizes]) / np.array(seconds)[:, None]
    terms = [0, 1, 2]
    while True:  # drop the most negative term until none is
        found, *_ = np.linalg.lstsq(rows[:, terms], np.ones(len(rows)), rcond=None)
        if min(found) >= 0:
            break
        terms.pop(int(np.argmin(found)))
    return StepCost(*(float(found[terms.index(i)]) if i in terms else 0.0 for i in range(3)))


def measure(engine: Any, trace: Iterable[Arrival]) -> tuple[list[tuple[int, int]], list[float]]:
    """Run requests on a real Engine as fast as they go; the size and the seconds of each step."""
    sizes, seconds, vocab = [], [], engine.model.config.vocab_size
    for a in trace:
        params = SamplingParams(max_new_tokens=a.max_new_tokens, ignore_eos=True)
        engine.add(a.ids(vocab), params)
    while engine.unfinished:
        start, before = time.perf_counter(), engine.counts["tokens_run"]
        done = {seq: seq.num_computed_tokens for seq in engine.scheduler.running}
        engine.step()
        seconds.append(time.perf_counter() - start)
        after = {seq: seq.num_computed_tokens for seq in engine.scheduler.running}
        ended = {seq: len(seq.tokens) - 1 for seq in done.keys() - after.keys()}
        keys = sum(n for seq, n in (after | ended).items() if n > done.get(seq, 0))
        sizes.append((engine.counts["tokens_run"] - before, keys))
    return sizes, seconds


def cost_on_device(device: str, model: str) -> StepCost:
    """Of a data sheet (parallelism/planner.py): a step reads all weights, a token computes with
    them, a key is read, all at full speed; KV is swapped at the network's speed."""
    from parallelism.planner import DEVICES, load_shape, parameters

    if device not in DEVICES:
        raise ValueError(f"--device {device}: use one of {', '.join(DEVICES)}")
    d, shape = DEVICES[device], load_shape(model)
    kv_bytes = 2.0 * shape.layers * 2 * shape.kv_heads * shape.head_dim
    weights, active = 2.0 * parameters(shape), parameters(shape, active=True)
    return StepCost(weights / d.hbm, 2 * active / d.bf16, kv_bytes / d.hbm, kv_bytes / d.network)
