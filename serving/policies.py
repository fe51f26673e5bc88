"""Scheduling policies: who runs next, as functions over paged_kv.py's Scheduler.

A policy gives each sequence a sort key; the Scheduler admits the smallest first and preempts the
largest first. Its optional methods see the start of each step and the end of each sequence, and
limit the tokens of a step, reserve blocks, or choose which cached block is evicted (see Scheduler).
`--policy NAME[:FIELD=VALUE,...]` uses one in --batch, --bench-serving and --serve, and
`python -m planner simulate trace` compares them on a trace in seconds.

    fcfs              first come first served, by priority (paged_kv.fcfs)
    longest-prefix    RadixAttention: the longest cached prefix first
    fair              VTC: the client that was served least first
    sjf               the shortest predicted output first
    mlfq              FastServe: multi-level feedback queue, for unknown output lengths
    qoe               Andes: whose reader would notice a wait the most
    deadline          QLM: earliest deadline first, groups that are too late last
    slo-mix           ConServe: offline requests fill steps up to the online requests' SLO
    s3                S3: blocks are reserved for the predicted output
    rag-cache         RAGCache: cached blocks are evicted by frequency, cost and age (PGDSF)

All sort by Engine.add's `priority` first, so there is no separate policy for it. sjf, mlfq, qoe and
deadline cost one to five microseconds per sequence and step.

A policy decides order, never content: each request's tokens are the same under all of them, up to
rounding (test_all.py). Needs: paged_kv.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from paged_kv import Scheduler, Sequence, fcfs


def _check_range(policy: Any, **ranges: tuple[float, float]) -> None:
    """ValueError if a field is outside its range; of a dict, if a value is."""
    for name, (low, high) in ranges.items():
        value = getattr(policy, name)
        named = value if isinstance(value, dict) else {"": value}
        for key, v in ((f"{name}.{k}".strip("."), v) for k, v in named.items()):
            if not low <= v <= high:
                raise ValueError(f"{key} must be from {low:g} to {high:g}, not {v!r}")


SECONDS = 1e-6, 1e9  # the range of times and rates
MAX_CLIENTS = 4096  # without requests whose counters are kept: the names may come from a network


@dataclass
class LongestPrefix:
    """Arrivals are grouped `patience` at a time; within a group the longest cached prefix goes
    first, so that requests with a common prefix run while it is cached (RadixAttention,
    arXiv:2312.07104, section 3). A request is overtaken by at most patience - 1 later ones of its
    priority. Loses when few prompts share a prefix: it is then fcfs that looks up each prompt."""

    patience: int = 64

    def __post_init__(self):
        _check_range(self, patience=(1, 1e9))

    def begin_step(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def __call__(self, seq: Sequence) -> Any:
        # running ones first: their prefixes are in use, and none is preempted for a longer match
        cached = math.inf if seq.running else len(self.scheduler.cached_prefix(seq))
        return seq.priority, seq.arrival // self.patience, -cached, seq.arrival


@dataclass
class Fair:
    """The virtual token counter (VTC, arXiv:2401.00588, algorithm 2): a client's counter is the
    service that it got, weighted input and output tokens over its share; the client with the
    smallest counter is admitted next. A client that returns from idleness is lifted to the least
    counter in the queue, so that it saves nothing up. Two clients with waiting requests at all
    times differ by at most 2 max(input_weight L, output_weight M), L tokens of the longest prompt,
    M of the KV cache, if input_weight <= output_weight. A name that is new, or was forgotten after
    MAX_CLIENTS others, starts at the greatest counter in the queue, so that a new name for each
    request is no way to the front; who uses several names at once has several shares. Loses
    throughput when clients share prefixes, whose requests it takes apart."""

    input_weight: float = 1.0
    output_weight: float = 2.0
    weights: dict[str, float] = field(default_factory=dict)  # share of a client, 1 if not named

    def __post_init__(self):
        _check_range(self, input_weight=(0, 1e9), output_weight=(0, 1e9), weights=SECONDS)
        self.service: defaultdict[str, float] = defaultdict(float)
        self.charged: dict[Sequence, int] = {}  # tokens that were counted, of admitted sequences
        self.queued: set[str] = set()  # clients with a waiting request in the last step
        self.last_left = ""  # the client that left the queue last
        self.ahead: dict[Sequence, float] = {}  # input of its client's waiting ones before it
        self.seen: Any = None  # changes whenever the waiting sequences do

    def begin_step(self, scheduler: Scheduler) -> None:
        charged, waiting = self.charged, scheduler.waiting
        for seq in scheduler.running:
            before, n = charged.get(seq), len(seq.tokens)
            if before is None:
                self._charge(seq)
            elif n > before:  # as _charge does, without a call for each token
                charged[seq] = n
                tokens = self.output_weight * (n - before)
                self.service[seq.client] += tokens / self.weights.get(seq.client, 1.0)
        seen = scheduler.n_admitted_tokens, len(waiting), waiting[-1] if waiting else None
        if seen != self.seen:
            self.seen = seen
            self._order(sorted(waiting, key=attrgetter("priority", "arrival")))

    def _input(self, seq: Sequence) -> float:
        """The service that admission adds. Other samples of a request share its prompt."""
        if seq in self.charged or seq.index:
            return 0.0
        return self.input_weight * seq.n_prompt / self.weights.get(seq.client, 1.0)

    def _charge(self, seq: Sequence) -> None:
        """Count the input of a sequence that was admitted, and its output since the last time."""
        service, before = self._input(seq), self.charged.get(seq, seq.n_prompt)
        self.charged[seq] = len(seq.tokens)
        output = self.output_weight * (len(seq.tokens) - before)
        self.service[seq.client] += service + output / self.weights.get(seq.client, 1.0)

    def _order(self, waiting: list[Sequence]) -> None:
        """Lift the clients that are new in the queue, and count what is ahead of each sequence."""
        service, queued = self.service, dict.fromkeys(seq.client for seq in waiting)
        for client in sorted(self.queued - queued.keys(), key=service.get):
            self.last_left = client
        present = self.queued & queued.keys()
        for client in queued:
            if client not in present:
                others = [service[other] for other in present or {self.last_left} & service.keys()]
                lift = min if client in service else max
                # at the end: the clients that came last are forgotten last
                service[client] = max(service.pop(client, 0.0), lift(others, default=0.0))
                present.add(client)
        self.queued, self.ahead = present, {}
        self._forget_idle()
        total: Counter[str] = Counter()
        for seq in waiting:
            self.ahead[seq] = total[seq.client]
            total[seq.client] += self._input(seq)

    def _forget_idle(self) -> None:
        if len(self.service) > MAX_CLIENTS:
            active = self.queued | {seq.client for seq in self.charged}
            idle = [client for client in self.service if client not in active]
            for client in idle[: len(self.service) - MAX_CLIENTS]:
                del self.service[client]

    def end(self, seq: Sequence) -> None:
        if seq in self.charged or len(seq.tokens) > seq.n_prompt:
            self._charge(seq)
            del self.charged[seq]

    def __call__(self, seq: Sequence) -> Any:
        if seq.running:  # first: the paper's algorithm does not preempt
            return seq.priority, 0, self.service.get(seq.client, 0.0), seq.arrival
        service = self.service.get(seq.client, 0.0) + self.ahead.get(seq, 0.0)
        return seq.priority, 1, service, seq.arrival


class Predictor:
    """Predicts output lengths: the mean over finished sequences of the same client with a prompt of
    similar length (the same power of two), else over all of the client, else max_new_tokens. Of
    MAX_CLIENTS such groups, those that ended last."""

    def __init__(self):
        self.sums: dict[Any, tuple[int, int, int]] = {}  # number, sum and sum of squares of lengths

    def observe(self, seq: Sequence) -> None:
        """A sequence ended."""
        n = len(seq.tokens) - seq.n_prompt
        if n:
            for key in ((seq.client, seq.n_prompt.bit_length()), seq.client):
                number, total, squares = self.sums.pop(key, (0, 0, 0))
                self.sums[key] = number + 1, total + n, squares + n * n
        while len(self.sums) > MAX_CLIENTS:
            del self.sums[next(iter(self.sums))]

    def predict(self, seq: Sequence, deviations: float = 0.0) -> float:
        """The whole output of a sequence in tokens, the mean plus standard deviations; more than it
        has, at most max_new_tokens."""
        found = self.sums.get((seq.client, seq.n_prompt.bit_length())) or self.sums.get(seq.client)
        length = most = seq.params.max_new_tokens
        if found:
            mean = found[1] / found[0]
            length = mean + deviations * math.sqrt(max(0.0, found[2] / found[0] - mean**2))
        return min(max(length, len(seq.tokens) - seq.n_prompt + 1), most)


@dataclass
class ShortestFirst:
    """Shortest predicted output first (SSJF, arXiv:2404.08509), without preemption: the least mean
    completion time if the predictions are right. Loses in overload, where long requests starve, and
    when a client's lengths are not alike."""

    def __post_init__(self):
        self.predictor = Predictor()
        self.end = self.predictor.observe

    def __call__(self, seq: Sequence) -> Any:
        return seq.priority, not seq.running, self.predictor.predict(seq), seq.arrival


@dataclass
class MultiLevelQueue:
    """Skip-join multi-level feedback queue (FastServe, arXiv:2305.05920). Service is
    counted in steps: one for each output token, and a prompt's share of max_num_batched_tokens. The
    quantum doubles with each level. A sequence joins the highest level whose quantum covers its
    prefill, sinks a level when its quantum is used, and preempts those below; one that waits for
    `starve` steps returns to the highest level. So short outputs need not be predicted. With
    kv_swap preempted KV is swapped, though not ahead of time as in the paper. Loses when all
    outputs have about the same length: they are preempted for nothing."""

    quantum: float = 8.0  # steps, of the highest level
    levels: int = 8
    starve: int = 2000  # steps

    def __post_init__(self):
        _check_range(self, quantum=(1e-3, 1e9), levels=(1, 64), starve=(1, 1e9))
        self.step, self.budget = 0, 1
        self.last_run: dict[Sequence, int] = {}  # step
        self.promoted: dict[Sequence, float] = {}  # its service at the last promotion

    def begin_step(self, scheduler: Scheduler) -> None:
        self.step, self.budget = self.step + 1, scheduler.max_num_batched_tokens
        for seq in scheduler.running:
            self.last_run[seq] = self.step
        for seq in scheduler.waiting:
            if self.step - self.last_run.setdefault(seq, self.step) >= self.starve:
                self.last_run[seq], self.promoted[seq] = self.step, self._service(seq)

    def _service(self, seq: Sequence) -> float:
        return seq.n_prompt / self.budget + len(seq.tokens) - seq.n_prompt

    def level(self, seq: Sequence) -> int:
        """0 is the highest."""
        used, level = self._service(seq) - self.promoted.get(seq, 0.0), 0
        if seq not in self.promoted:  # skip levels
            while level < self.levels - 1 and self.quantum * 2**level < seq.n_prompt / self.budget:
                level += 1
        while level < self.levels - 1 and used >= self.quantum * 2**level:
            used, level = used - self.quantum * 2**level, level + 1
        return level

    def end(self, seq: Sequence) -> None:
        self.last_run.pop(seq, None)
        self.promoted.pop(seq, None)

    def __call__(self, seq: Sequence) -> Any:
        return seq.priority, self.level(seq), not seq.running, seq.arrival


# --------------------------------------------------------------------------------------------------
# Quality of experience
# --------------------------------------------------------------------------------------------------


def pace(timestamps: list[float], rate: float) -> list[float]:
    """When a client shows tokens that arrive at these times, if it shows `rate` per second at most:
    Andes' token pacer, which keeps early tokens for later gaps."""
    shown: list[float] = []
    for at in timestamps:
        shown.append(max(at, shown[-1] + 1 / rate) if shown else at)
    return shown


def qoe(arrival: float, timestamps: list[float], ttft: float, rate: float) -> float:
    """Quality of experience, from 0 to 1, of a request whose reader expects the first token after
    ttft seconds and then `rate` tokens/s: tokens x seconds that were shown, over those expected, up
    to the end of reading (Andes, arXiv:2404.16283v1). Tokens before their time count as
    in time."""
    due = [arrival + ttft + i / rate for i in range(len(timestamps))]
    shown = [max(at, d) for at, d in zip(pace(timestamps, rate), due)]
    end = max(shown, default=0.0) + 1 / rate
    return sum(end - at for at in shown) / sum(end - at for at in due) if due else 0.0


@dataclass
class Timeline:
    """What a reader has seen until `time`."""

    start: float
    time: float
    received: int = 0
    shown: float = 0.0
    area: float = 0.0  # tokens x seconds shown

    def read(self, seconds: float, rate: float, speed: float = 0.0) -> tuple[float, float]:
        """Tokens shown, and tokens x seconds, after more seconds in which tokens arrive at a
        speed."""
        buffered = self.received - self.shown
        full = seconds if speed >= rate else min(seconds, buffered / (rate - speed))
        area = self.shown * full + rate * full**2 / 2  # at the rate; then as they arrive
        area += self.received * (seconds - full) + speed * (seconds**2 - full**2) / 2
        shown = min(self.shown + rate * seconds, self.received + speed * seconds)
        return shown, self.area + area


@dataclass
class Experience:
    """Andes (arXiv:2404.16283v1): each step prefers those whose QoE within the `horizon`
    gains the most from running rather than waiting, per token of KV. A reader with a buffer loses
    nothing by a pause, so its sequence can be preempted. At most `preemptions` per request, so that
    recomputation is bounded. Loses throughput to preemption, and to fcfs when there is no queue."""

    ttft: float = 1.0  # seconds, expected
    rate: float = 4.8  # tokens per second, a fast reader's
    horizon: float = 5.0  # seconds
    preemptions: float = 1.0
    clock = time.perf_counter

    def __post_init__(self):
        _check_range(self, ttft=(0, 1e9), rate=SECONDS, horizon=SECONDS, preemptions=(0, 1e9))
        self.timelines: dict[Sequence, Timeline] = {}
        self.gain: dict[Sequence, float] = {}
        self.speed, self.preemptive, self.n_seen = self.rate, True, 0

    def begin_step(self, scheduler: Scheduler) -> None:
        now, fastest = self.clock(), 0.0
        sequences = scheduler.running + scheduler.waiting
        for seq in sequences:
            n = len(seq.tokens) - seq.n_prompt
            if seq not in self.timelines:
                self.timelines[seq], self.n_seen = Timeline(now, now, n), self.n_seen + 1
            t = self.timelines[seq]
            if n > t.received and now > t.time:
                fastest = max(fastest, (n - t.received) / (now - t.time))
            t.shown, t.area = t.read(now - t.time, self.rate)
            t.received, t.time = n, now
        self.speed += 0.1 * (fastest - self.speed) if fastest else 0.0
        self.gain = {seq: self._gain(seq) for seq in sequences}
        self.preemptive = scheduler.n_preempted < self.preemptions * self.n_seen

    def _gain(self, seq: Sequence) -> float:
        t = self.timelines[seq]
        expected = self.rate * max(0.0, t.time + self.horizon - t.start - self.ttft) ** 2 / 2
        if not expected:
            return 0.0
        wait, run = (t.read(self.horizon, self.rate, speed)[1] for speed in (0.0, self.speed))
        return (min(1.0, run / expected) - min(1.0, wait / expected)) / len(seq.tokens)

    def end(self, seq: Sequence) -> None:
        self.timelines.pop(seq, None)

    def __call__(self, seq: Sequence) -> Any:
        stays = seq.running and not self.preemptive
        return seq.priority, not stays, -self.gain.get(seq, 0.0), not seq.running, seq.arrival


# --------------------------------------------------------------------------------------------------
# Service level objectives
# --------------------------------------------------------------------------------------------------


@dataclass
class Deadline:
    """QLM for one model (arXiv:2407.00047): waiting requests of a client form
    groups of `group_size` with one deadline, that of their oldest first token. A group's waiting
    time is the predicted work before it over the measured throughput. The earliest deadline is
    first, running or not; groups that will miss theirs go last, so that they delay none that can
    meet it. Loses when most are late: those that come last may starve."""

    slo: float = 1.0  # seconds from arrival to the first token
    slos: dict[str, float] = field(default_factory=dict)  # of a client, else `slo`
    group_size: int = 8
    clock = time.perf_counter

    def __post_init__(self):
        _check_range(self, slo=SECONDS, slos=SECONDS, group_size=(1, 1e9))
        self.predictor = Predictor()
        self.due: dict[Sequence, float] = {}
        self.place: dict[Sequence, tuple[bool, float]] = {}  # is late, deadline of its group
        self.tokens = self.seconds = 0.0  # of the last steps, for the throughput
        self.last: tuple[float, int] | None = None  # time and n_run_tokens at the last step

    def begin_step(self, scheduler: Scheduler) -> None:
        now = self.clock()
        if self.last and scheduler.running:  # not after an idle time
            self.tokens = 0.99 * self.tokens + scheduler.n_run_tokens - self.last[1]
            self.seconds = 0.99 * self.seconds + now - self.last[0]
        self.last = now, scheduler.n_run_tokens
        queues: dict[Any, list[Sequence]] = defaultdict(list)
        for seq in sorted(scheduler.waiting, key=attrgetter("arrival")):
            self.due.setdefault(seq, now + self.slos.get(seq.client, self.slo))
            if len(seq.tokens) == seq.n_prompt:  # else it was preempted: it has its first token
                queues[seq.priority, seq.client].append(seq)
        size = self.group_size
        groups = [q[i : i + size] for q in queues.values() for i in range(0, len(q), size)]
        ahead = 0.0  # tokens
        for group in sorted(groups, key=lambda g: (g[0].priority, self.due[g[0]], g[0].arrival)):
            deadline = self.due[group[0]]
            late = ahead * self.seconds > (deadline - now) * self.tokens
            self.place |= dict.fromkeys(group, (late, deadline))
            if not late:
                ahead += sum(seq.n_prompt + self.predictor.predict(seq) for seq in group)

    def end(self, seq: Sequence) -> None:
        self.predictor.observe(seq)
        self.due.pop(seq, None)
        self.place.pop(seq, None)

    def __call__(self, seq: Sequence) -> Any:
        late, deadline = self.place.get(seq, (False, math.inf))
        started = seq.running or len(seq.tokens) > seq.n_prompt
        return seq.priority, late and not started, deadline, not seq.running, seq.arrival


@dataclass
class SloMix:
    """ConServe (arXiv:2410.01228): online requests have priority 0 or less, offline ones
    more. While there are online requests, a step has as many tokens as its cost, base + per_token
    tokens, leaves within `slo` seconds, the time between two tokens; else the full budget. Offline
    sequences run after online ones and are preempted first; with kv_swap their KV is kept, copied
    at preemption rather than bit by bit. The cost is fitted to the last steps unless given. Offline
    decoding runs before an online prompt, so max_num_seqs should be less than the tokens that an
    SLO allows; else it misses the SLO rather than starve that prompt."""

    slo: float = 0.1  # seconds
    base: float = 0.0  # seconds of a step
    per_token: float = 0.0  # seconds; 0: both are measured
    clock = time.perf_counter

    def __post_init__(self):
        _check_range(self, slo=SECONDS, base=(0, 1e9), per_token=(0, 1e9))
        self.sums = [0.0] * 5  # of the last steps: 1, tokens, seconds, tokens^2, tokens x seconds
        self.last: tuple[float, int] | None = None  # time and n_run_tokens at the last step

    def begin_step(self, scheduler: Scheduler) -> None:
        now, total = self.clock(), scheduler.n_run_tokens
        if self.last and scheduler.running and total > self.last[1]:  # not after an idle time
            x, y = total - self.last[1], now - self.last[0]
            self.sums = [0.99 * s + new for s, new in zip(self.sums, (1, x, y, x * x, x * y))]
        self.last = now, total

    def cost(self) -> tuple[float, float]:
        """(base, per_token) in seconds, as given or by least squares; 0 if no step was seen."""
        if self.per_token:
            return self.base, self.per_token
        n, x, y, xx, xy = self.sums
        spread = n * xx - x * x
        slope = (n * xy - x * y) / spread if spread > 1e-9 * n * xx else math.inf
        if not 0 <= slope * x <= y:  # steps of one size, or noise: all of it for the tokens
            return 0.0, y / x if x else 0.0
        return (y - slope * x) / n, slope

    def token_budget(self, scheduler: Scheduler) -> int:
        running, waiting = scheduler.running, scheduler.waiting
        base, per_token = self.cost()
        online = any(seq.priority <= 0 for seq in running + waiting)
        if not online or not per_token:
            return scheduler.max_num_batched_tokens
        prompts = any(s.priority <= 0 and s.remaining > 1 for s in running + waiting)
        decoding = sum(s.remaining == 1 and (prompts or s.priority <= 0) for s in running)
        fit = (self.slo - base) / per_token
        return int(min(max(fit, decoding + prompts), scheduler.max_num_batched_tokens))

    def __call__(self, seq: Sequence) -> Any:
        return fcfs(seq)


# --------------------------------------------------------------------------------------------------
# Memory
# --------------------------------------------------------------------------------------------------


@dataclass
class ReservedLength:
    """S3 (arXiv:2306.06000): a sequence is admitted when there are blocks for its
    predicted output, in buckets of 1 / `buckets` of its max_new_tokens; one that outgrows its
    bucket has the next one reserved, and is preempted if there are no blocks. So more run than if
    each reserved max_new_tokens, and fewer are preempted than if none did. Loses batch size to
    blocks that are reserved and not yet used, when preemption is cheap."""

    buckets: int = 10
    deviations: float = 1.0  # standard deviations above the mean

    def __post_init__(self):
        _check_range(self, buckets=(1, 1e9), deviations=(0, 1e9))
        self.predictor = Predictor()
        self.reserved: dict[Sequence, int] = {}

    def reserved_tokens(self, seq: Sequence) -> int:
        if not seq.running or self.reserved.get(seq, 0) <= len(seq.tokens) - seq.n_prompt:
            width = -(-seq.params.max_new_tokens // self.buckets)
            length = math.ceil(self.predictor.predict(seq, self.deviations))
            self.reserved[seq] = -(-length // width) * width
        return self.reserved[seq]

    def end(self, seq: Sequence) -> None:
        self.predictor.observe(seq)
        self.reserved.pop(seq, None)

    def __call__(self, seq: Sequence) -> Any:
        return fcfs(seq)


@dataclass
class KnowledgeCache:
    """RAGCache's prefix-aware Greedy-Dual-Size-Frequency (PGDSF, arXiv:2404.12457): the cached leaf
    with the least clock + frequency x cost / size is evicted, and the clock rises to its value, so
    that what is not used ages. cost / size is that of a token's recomputation, 1 + key_cost x the
    tokens before it, whose keys it reads. Loses to LRU when popularity changes faster than the
    clock, and each eviction looks at all cached blocks."""

    key_cost: float = 3e-5  # time to read a key over that of a token: 2 L C / parameters, of 8B

    def __post_init__(self):
        _check_range(self, key_cost=(0, 1e9))
        self.clock_value, self.victim = 0.0, (math.inf, 0, 0)  # its value, block and node
        self.values: dict[int, tuple[int, int, float]] = {}  # of a block: node, hits, value
        self.depths: dict[int, int] = {}  # blocks from the root to a node

    def begin_step(self, scheduler: Scheduler) -> None:
        self.allocator = scheduler.allocator

    def _depth(self, node: int) -> int:
        if node not in self.depths:  # one pass for all new nodes; parents come first
            self.depths = {}
            for parent, _, own in self.allocator.entries.values():
                self.depths[own] = self.depths.get(parent, 0) + 1
        return self.depths[node]

    def eviction_key(self, block: int) -> float:
        value, victim, node = self.victim
        entries = self.allocator.entries
        if node and (victim not in entries or entries[victim][2] != node):  # it was evicted
            self.clock_value, self.victim = value, (math.inf, 0, 0)
        now = self.allocator.node(block), self.allocator.hits[block]
        if self.values.get(block, ())[:2] != now:  # new, or used since: its value has the clock
            tokens = (self._depth(now[0]) - 1) * self.allocator.block_size
            frequency, cost = 1 + now[1], 1 + self.key_cost * tokens
            self.values[block] = *now, self.clock_value + frequency * cost
        value = self.values[block][2]
        if value < self.victim[0]:
            self.victim = value, block, now[0]
        return value

    def __call__(self, seq: Sequence) -> Any:
        return fcfs(seq)


def pause_waste(
    context_tokens: int, pause_seconds: float, other_tokens: int, token_seconds: float,
    swap_seconds: float = math.inf,
) -> dict[str, float]:  # fmt: skip
    """Tokens of KV x seconds that each way to treat the KV of a sequence wastes while it waits for
    a tool (InferCept, arXiv:2402.01869). preserve: it is unused. discard: while it is
    recomputed, in chunks and so half of it on average, and that of all others, which wait. swap:
    both, while it is copied out and in, swap_seconds each way. Those that wait for
    blocks are not counted: in overload `swap` alone is better."""
    recompute = context_tokens * token_seconds
    return {
        "preserve": pause_seconds * context_tokens,
        "discard": recompute * (context_tokens / 2 + other_tokens),
        "swap": 2 * swap_seconds * (context_tokens + other_tokens),
    }


def choose_for_pause(*args: float) -> str:
    """preserve, discard or swap: the one that wastes least. args: those of pause_waste."""
    waste = pause_waste(*args)
    return min(waste, key=waste.get)


POLICIES: dict[str, Callable[..., Any]] = {
    "fcfs": lambda: fcfs,
    "longest-prefix": LongestPrefix,
    "fair": Fair,
    "sjf": ShortestFirst,
    "mlfq": MultiLevelQueue,
    "qoe": Experience,
    "deadline": Deadline,
    "slo-mix": SloMix,
    "s3": ReservedLength,
    "rag-cache": KnowledgeCache,
}


def make_policy(spec: str, clock: Callable[[], float] = time.perf_counter) -> Any:
    """The policy of NAME[:FIELD=VALUE,...], where a field that has a value for each client is
    FIELD.CLIENT=VALUE. clock: that of the Engine. ValueError names the field."""
    name, _, rest = spec.partition(":")
    if name not in POLICIES:
        raise ValueError(f"{name!r} is not a policy; use one of {', '.join(POLICIES)}")
    make = POLICIES[name]
    known = {f.name: f.type for f in fields(make)} if isinstance(make, type) else {}
    values: dict[str, Any] = {}
    pairs = rest.split(",") if rest else []
    for pair in pairs:
        key, _, value = pair.partition("=")
        key, dot, client = key.partition(".")
        kind = known.get(key, "")
        if bool(dot) != kind.startswith("dict") or not kind:
            has = [f + ".CLIENT" * k.startswith("dict") for f, k in known.items()]
            has = ", ".join(has) or "none"
            raise ValueError(f"{key + dot + client!r} is not a field of policy {name}: {has}")
        try:
            number = int(value) if kind == "int" else float(value)
        except ValueError:
            wanted = "an integer" if kind == "int" else "a number"
            raise ValueError(f"{key} of policy {name} must be {wanted}, not {value!r}") from None
        given, name_of_value = (values.setdefault(key, {}), client) if dot else (values, key)
        if name_of_value in given:
            raise ValueError(f"{key + dot + client} of policy {name} is given twice; give it once")
        given[name_of_value] = number
    policy = make(**values)
    if hasattr(policy, "clock"):
        policy.clock = clock
    return policy
