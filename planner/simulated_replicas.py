"""Simulated Engines: the real Scheduler, block allocator and prefix tree on a virtual clock; alike,
or as prefill and decode pools, with LoRA adapters, or lending each other memory.

    python -m planner simulate trace TRACE --pools 1:1                 against --replicas 2
    python -m planner simulate trace TRACE --pools 2:2:flip            against --pools 2:2
    python -m planner simulate trace TRACE --adapters 8,64             against --adapters 8,64:wait
    python -m planner simulate trace TRACE --replicas 2 --kv-swap --lend

Only the model is missing. A step takes what StepCost says, and a request ends after the number of
tokens that its trace has (traces.py), so the order of tokens over all requests is the Engine's, and
the times are as good as the cost. planner/simulate.py runs traces on one or more.

As long as nobody arrives, ends or can be admitted, steps are alike: each running sequence gets one
token. A Replica then plans many steps at once, as one step whose drafts are all accepted (the
Scheduler's mechanism for speculative decoding), and rejects those after the next arrival.

Three subclasses of Replica are not alike, or not alone; Pools and RankAware are routers:

Pools (DistServe, arXiv:2401.09670; TetriInfer, arXiv:2401.11181). A prompt runs to its first token
    on a prefill replica; its KV, n_prompt x bytes per token, is sent to a decode replica at
    --bandwidth, one transfer at a time from each. So no prompt delays a next token. The decode
    replica is the one of two with fewer predicted tokens that has room for the predicted length.
    flip: a replica of a pool with little to do joins the pool that misses its objective, once it
    has drained. Loses: to colocated replicas under one load for which the pools have the wrong
    sizes, or with loose objectives; flipping, in the time for which a replica drains. The memory of
    a prompt is free as soon as its transfer is queued. serving/disaggregated.py does it for real.
Adapters (CaraServe, arXiv:2401.11240). Each client has a LoRA adapter, copied from host memory when
    a request needs it. Load-then-run waits for the copy; CPU-assisted, prompts run meanwhile with
    the adapter on the CPU, at a lower speed. A step costs more by per_rank x the ranks of its
    sequences; RankAware routes by that cost. Loses: CPU-assisted, the time between tokens of the
    others in the batch, which wait for the CPU too; RankAware gains nothing where ranks are equal.
Lending (AQUA, arXiv:2407.21255). A preempted sequence's KV goes to free memory of another replica,
    over a faster link than host memory's. The lender gets it back when its own sequences need it,
    and its next step waits for the copy to host memory. Gains nothing when all are full at the same
    time, or when a copy to host memory is short beside a step.

Equivalence (test_all.py): every timestamp == that of the real Engine on a clock that advances by
the same cost; many steps at once == one by one; timestamps of --pools 1:1 == those of two real
Engines with export_request and import_request between them. Needs: paged_kv.py, serving/traces.py,
policies.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import bisect
import heapq
import math
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from paged_kv import (
    BlockAllocator,
    Output,
    Plan,
    Sample,
    SamplingParams,
    Scheduler,
    Sequence,
    SwappedKV,
    fcfs,
)
from serving.policies import Predictor, choose_for_pause, make_policy
from serving.traces import Arrival

# --------------------------------------------------------------------------------------------------
# A replica
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step: base + per_token tokens + per_key keys read, and per_swapped for each
    token whose KV is copied from or to host memory."""

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
    tokens = keys = 0
    for seq, n in plan.run:
        tokens += n
        keys += seq.num_computed_tokens + n
    return tokens, keys


@dataclass(eq=False)
class Part(Sequence):
    """A request up to its next tool call, or to its end. Its Output.id is the Arrival."""

    number: int = 0
    preserved: list[int] = field(default_factory=list)  # its KV blocks during the tool call

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


@cache
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
        at_tool_call: str = "discard",
        finished: Callable[[Part, float], Any] = lambda part, time: None,
        one_by_one: bool = False,
    ):
        """at_tool_call: what becomes of the KV of a sequence during a tool call: "preserve" it,
        "swap" it to host memory, "discard" it, so that it is cached until its blocks are needed, or
        "min-waste", which of these wastes least (policies.choose_for_pause). finished: called
        with a request's last part and the time. one_by_one: never plan many steps at once."""
        self.cost, self.finished, self.one_by_one = cost, finished, one_by_one
        self.at_tool_call = at_tool_call
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
        self.n_swapped_out = 0  # tokens that tool calls swapped out since the last step
        self.plan: Plan | None = None  # of the steps that run, which end at self.ends
        self.ends: list[float] = []
        self.steady = False  # the last step only gave each running sequence a token

    @property
    def n_unfinished(self) -> int:
        return len(self.scheduler.running) + len(self.scheduler.waiting)

    def send(self, part: Part, time: float) -> None:
        """A sequence will arrive at a time, which this replica must not have passed."""
        heapq.heappush(self.arriving, (time, self.n_sent, part))
        self.n_sent += 1

    def next_event(self) -> float:
        """When something happens next. A step starts after all else that happens at its time."""
        arrival = self.arriving[0][0] if self.arriving else math.inf
        if self.plan is not None:
            return min(arrival, self.ends[-1])
        return math.nextafter(self.time, math.inf) if self.n_unfinished else arrival

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
        self._release_preserved(part)
        if self.plan is not None:  # it waits for the end of the present step
            self._complete(bisect.bisect_left([self.time, *self.ends[:-1]], time))
        elif not self.n_unfinished:
            self.time = max(self.time, time)
        part.arrival, self.n_arrived = self.n_arrived, self.n_arrived + 1
        self.scheduler.add(part)

    def _release_preserved(self, part: Part) -> None:
        """From now on its KV is cached, as most recently used."""
        self.allocator.release(part.preserved)
        part.preserved = []

    def _plan(self) -> None:
        """Plan the next step, or as many as are alike."""
        scheduler, n = self.scheduler, self._num_steps()
        for seq in scheduler.running:
            seq.num_draft_tokens = n - 1
        plan = scheduler.schedule()
        if not plan.run:  # the KV that is preserved leaves no room for anyone
            for *_, paused in self.arriving:
                self._release_preserved(paused)
            plan = scheduler.schedule()
        assert plan.run, "nothing can run"
        self.plan = plan
        swapped, (tokens, keys) = self._swap(plan) + self.n_swapped_out, step_size(plan)
        self.n_swapped_out = 0
        n = 1 + min(plan.drafts.values()) if len(plan.drafts) == len(plan.run) else 1
        self.steady = not swapped and tokens == len(plan.run)
        more = self._more_seconds(plan)
        end = self.time + self.cost(tokens, keys, swapped) + more
        self.ends, alike, per_key = [end], self.cost(tokens, 0) + more, self.cost.per_key
        for total in range(keys + tokens, keys + n * tokens, tokens):  # each reads all new keys
            end += alike + per_key * total
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
        # of each: its next token may need one; none is evicted for tokens that may be rejected
        blocks = len(self.allocator.free) // len(running)
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
            self.scheduler.accept(part, tokens + n - 1)
            if part.remaining <= 0:  # all in several steps, in which each has tokens == 1
                part.tokens += [request.id.output_id] * n
                if n > 1:
                    self.scheduler.register(part, plan)
                request.timestamps += ends
                if len(part.tokens) == part.n_prompt + part.params.max_new_tokens:
                    self._end(part)

    def _end(self, part: Part) -> None:
        """A request has ended, or calls a tool: then it comes back with the answer."""
        arrival, blocks = part.request.id, part.block_table[: part.num_cached_blocks]
        if part.number == len(arrival.tool_calls):
            self.scheduler.finish(part)
            self.finished(part, self.time)
            return
        seconds, following = arrival.tool_calls[part.number][1], Part.of(arrival, part)
        action, context = self.at_tool_call, part.num_computed_tokens
        if action == "min-waste":
            other = sum(seq.num_computed_tokens for seq in self.scheduler.running) - context
            swap_seconds = context * self.cost.per_swapped or math.inf  # 0: not measured
            action = choose_for_pause(context, seconds, other, self.cost.per_token, swap_seconds)
        if action == "preserve":
            following.preserved = [*map(self.allocator.share, blocks)]
        elif action == "swap":
            following.swapped_kv = SwappedKV(context, [], [])
            self.n_swapped_out += context
        self.scheduler.finish(part)
        self.send(following, self.time + seconds)

    def _swap(self, plan: Plan) -> float:
        """Do a plan's swaps, without any KV; the number of tokens copied at host memory's speed."""
        copied = 0
        for seq, _, _, n in plan.swap_out:
            seq.swapped_kv = SwappedKV(n, [], [])
            copied += self._copied(seq, n)
        for seq, first in plan.swap_in:
            copied += self._copied(seq, seq.swapped_kv.n - first)
            seq.swapped_kv = None
        return copied

    # ---- for subclasses ----

    def _copied(self, part: Part, n: int) -> float:
        """Tokens that host memory copies in the time in which n of a part are swapped."""
        return n

    def _more_seconds(self, plan: Plan) -> float:
        """Seconds of each of the planned steps that StepCost does not know."""
        return 0.0


# --------------------------------------------------------------------------------------------------
# Replicas together
# --------------------------------------------------------------------------------------------------


def advance_together(actors: list[Any], until: float) -> None:
    """As Replica.advance of each, in order of time: none is ahead of what another does to it."""
    while True:
        first = min(actors, key=lambda actor: actor.next_event())
        if (time := first.next_event()) > until or time == math.inf:
            return
        first.advance(time)


def parts_of(replica: Replica) -> list[Part]:
    """Its unfinished parts, and those on their way to it."""
    scheduler = replica.scheduler
    return scheduler.running + scheduler.waiting + [part for *_, part in replica.arriving]


def capacity(replica: Replica) -> int:
    """Tokens of its KV cache."""
    return len(replica.allocator.refs) * replica.allocator.block_size


# --------------------------------------------------------------------------------------------------
# Prefill and decode pools
# --------------------------------------------------------------------------------------------------


class ReceivedKV(SwappedKV):
    """KV that a transfer writes into the memory of the replica that decodes."""


ONE_TOKEN = SamplingParams(max_new_tokens=1)


class PoolReplica(Replica):
    """A Replica on which a part that comes without KV ends with its first token; `pools` then sends
    it on. So its role is a matter of what is sent to it."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.pools: Pools | None = None
        self.prompts: dict[Part, SamplingParams] = {}  # parts in prefill, their own parameters

    def send(self, part: Part, time: float) -> None:
        if part.swapped_kv is None and part.params.max_new_tokens > 1:
            self.prompts[part], part.params = part.params, ONE_TOKEN
        super().send(part, time)

    def _copied(self, part: Part, n: int) -> float:
        return 0 if isinstance(part.swapped_kv, ReceivedKV) else n

    def _end(self, part: Part) -> None:
        if part in self.prompts:
            part.params = self.prompts.pop(part)
            self.scheduler.finish(part)
            self.pools.end_prefill(part, self.time, self)
        else:
            super()._end(part)
            self.pools.predictor.observe(part)


class Pools:
    """Prefill and decode replicas; the router of arrivals, and an actor of advance_together."""

    def __init__(
        self, replicas: list[PoolReplica], n_prefill: int, token_seconds: float,
        slo: tuple[float, float] = (1.0, 0.1), flip: bool = False,
    ):  # fmt: skip
        """token_seconds: of a token's KV on a link, its bytes / bandwidth. slo: see Report."""
        self.prefill, self.decode = [*replicas[:n_prefill]], [*replicas[n_prefill:]]
        self.token_seconds, self.slo, self.flip = token_seconds, slo, flip
        self.predictor, self.random = Predictor(), random.Random(0)
        self.ended: list[tuple[float, int, Part, PoolReplica]] = []  # a heap of ends of prefill
        self.link_free: defaultdict[PoolReplica, float] = defaultdict(float)  # the sender's
        self.draining: tuple[PoolReplica, list[PoolReplica]] | None = None  # and its next pool
        self.n_flips = self.n_ended = self.tokens_sent = 0
        for replica in replicas:
            replica.pools = self

    def __call__(self, arrival: Arrival, replicas: list[PoolReplica]) -> PoolReplica:
        """The prefill replica with the fewest prompt tokens to run."""
        if arrival.tool_calls:
            raise ValueError("--pools cannot be combined with a trace that has tool calls")
        self._flip()
        return min(self.prefill, key=self._queued)

    # ---- transfer ----

    def end_prefill(self, part: Part, time: float, source: PoolReplica) -> None:
        """A part will have its first token at a time. A replica may say so early (see _arrive)."""
        heapq.heappush(self.ended, (time, self.n_ended, part, source))
        self.n_ended += 1

    def next_event(self) -> float:
        return self.ended[0][0] if self.ended else math.inf

    def advance(self, until: float) -> None:
        """Send the KV of all prompts that have ended by a time."""
        while self.ended and self.ended[0][0] <= until:
            time, _, part, source = heapq.heappop(self.ended)
            self._flip()
            n = part.n_prompt
            self.link_free[source] = max(time, self.link_free[source]) + n * self.token_seconds
            self.tokens_sent += n
            part.swapped_kv = ReceivedKV(n, [], [])
            self._place(part).send(part, self.link_free[source])

    # ---- placement by predicted length ----

    def _predicted(self, part: Part) -> float:
        """Tokens at its end. The first predictions of a client are exact: max_new_tokens."""
        return part.n_prompt + self.predictor.predict(part)

    def _reserved(self, replica: PoolReplica) -> float:
        """Tokens that it will hold if none ends before the others."""
        return sum(map(self._predicted, parts_of(replica)))

    def _place(self, part: Part) -> PoolReplica:
        """Of two random decode replicas with room the one with fewer predicted tokens."""
        held = {replica: self._reserved(replica) + self._predicted(part) for replica in self.decode}
        room = [replica for replica, n in held.items() if n <= capacity(replica)] or self.decode
        return min(self.random.sample(room, min(2, len(room))), key=held.get)

    # ---- roles ----

    def _queued(self, replica: PoolReplica) -> int:
        """Prompt tokens to run."""
        return sum(part.remaining for part in parts_of(replica) if part in replica.prompts)

    def pressure(self, decodes: bool, n: int) -> float:
        """What a pool uses of its objective if it had n replicas, 1 all of it. Prefill: seconds of
        queued prompts. Decode: seconds of a step, or predicted tokens of KV."""
        pool = self.decode if decodes else self.prefill
        cost, parts = pool[0].cost, [part for replica in pool for part in parts_of(replica)]
        if not decodes:
            return cost.per_token * sum(map(self._queued, pool)) / n / self.slo[0]
        seconds = cost(len(parts) / n, sum(len(part.tokens) for part in parts) / n)
        held = sum(map(self._predicted, parts)) / n
        return max(seconds / self.slo[1], held / capacity(pool[0]))

    def _flip(self) -> None:
        """Begin or end to move a replica to a pool that misses its objective, from one that needs
        less than 0.8 of its own without it."""
        if self.draining and not parts_of(self.draining[0]):
            replica, pool = self.draining
            pool.append(replica)
            self.draining = None
        if not self.flip or self.draining:
            return
        pools = self.prefill, self.decode
        for source, target in ((0, 1), (1, 0)):
            n = len(pools[source])
            misses = self.pressure(bool(target), len(pools[target])) > 1
            if n > 1 and misses and self.pressure(bool(source), n - 1) < 0.8:
                replica = min(pools[source], key=lambda replica: len(parts_of(replica)))
                pools[source].remove(replica)
                self.draining, self.n_flips = (replica, pools[target]), self.n_flips + 1
                return


# --------------------------------------------------------------------------------------------------
# Adapters
# --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Adapters:
    """LoRA adapters, one for each client; the ranks in turn, in the order of first arrivals."""

    ranks: tuple[int, ...]
    load: float  # seconds per rank, to copy one from host memory
    per_rank: float  # seconds of a step, per rank of each of its sequences
    cpu: float = 4.0  # times as long as per_token, for a token whose adapter runs on the CPU
    slots: int = 32  # in GPU memory; more only while more are in use
    wait: bool = False  # load-then-run
    clients: dict[str, int] = field(default_factory=dict)  # number of each

    def rank(self, client: str) -> int:
        return self.ranks[self.clients.setdefault(client, len(self.clients)) % len(self.ranks)]


class AdapterReplica(Replica):
    """A Replica that copies adapters to its GPU when they are needed, the least recently used one
    out for a new one."""

    def __init__(self, *args: Any, adapters: Adapters, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.adapters, self.link_free = adapters, 0.0
        self.loaded: OrderedDict[str, float] = OrderedDict()  # client -> end of the copy
        self.in_use: Counter[str] = Counter()  # unfinished requests of each client

    def send(self, part: Part, time: float) -> None:
        if part.number == 0:  # after a tool call it is loaded
            ready = self._load(part.client, time)
            self.in_use[part.client] += 1
            time = max(time, ready) if self.adapters.wait else time
        super().send(part, time)

    def _load(self, client: str, now: float) -> float:
        """When the client's adapter is in GPU memory. Copies are one after the other."""
        if client not in self.loaded:
            unused = [name for name in self.loaded if not self.in_use[name]]
            for name in unused[: max(0, len(self.loaded) + 1 - self.adapters.slots)]:
                del self.loaded[name]
            seconds = self.adapters.load * self.adapters.rank(client)
            self.link_free = self.loaded[client] = max(now, self.link_free) + seconds
        self.loaded.move_to_end(client)
        return self.loaded[client]

    def _loading(self, part: Part) -> float:
        """Seconds until its adapter is in GPU memory."""
        return max(0.0, self.loaded[part.client] - self.time)

    def _num_steps(self) -> int:
        return 1 if any(map(self._loading, self.scheduler.running)) else super()._num_steps()

    def _more_seconds(self, plan: Plan) -> float:
        """The ranks' share; and what the CPU takes longer, until the end of the part's tokens or of
        the copy, when the GPU runs the rest of them."""
        seconds, cpu = 0.0, self.adapters.cpu
        for part, n in plan.run:
            seconds += self.adapters.per_rank * self.adapters.rank(part.client)
            if left := self._loading(part):
                seconds += (cpu - 1) * min(n * self.cost.per_token, left / cpu)
        return seconds

    def _end(self, part: Part) -> None:
        if part.number == len(part.request.id.tool_calls):
            self.in_use[part.client] -= 1
        super()._end(part)


@dataclass
class RankAware:
    """The router to the replica on which a request adds the least to the seconds of a decode step,
    summed over all requests of the step; among those whose step then is within the objective."""

    slo: tuple[float, float] = (1.0, 0.1)  # see Report

    def __call__(self, arrival: Arrival, replicas: list[AdapterReplica]) -> AdapterReplica:
        return min(replicas, key=lambda replica: self._rise(arrival, replica))

    def _rise(self, arrival: Arrival, replica: AdapterReplica) -> tuple[bool, float]:
        replica.advance(arrival.arrival_time)
        parts, adapters = parts_of(replica), replica.adapters
        ranks = sum(adapters.rank(part.client) for part in parts)
        keys, n = sum(len(part.tokens) for part in parts), len(parts)
        before = replica.cost(n, keys) + adapters.per_rank * ranks
        after = replica.cost(n + 1, keys + arrival.n_prompt)
        after += adapters.per_rank * (ranks + adapters.rank(arrival.client))
        return after > self.slo[1], (n + 1) * after - n * before


# --------------------------------------------------------------------------------------------------
# Memory of peers
# --------------------------------------------------------------------------------------------------


class Loan(NamedTuple):
    """Blocks of a lender that hold a preempted sequence's first n tokens."""

    borrower: LendingReplica
    lender: LendingReplica
    blocks: list[int]
    n: int


class Ledger:
    """What replicas lend each other. ratio: time of a copy to a peer over one to host memory."""

    def __init__(self, replicas: list[LendingReplica], ratio: float):
        self.replicas, self.ratio = replicas, ratio
        self.loans: dict[Part, Loan] = {}  # the oldest first
        for replica in replicas:
            replica.ledger = self

    def balance(self, replica: LendingReplica) -> int:
        """Blocks that it lends, less those that it borrows. The sum over all replicas is 0."""
        return sum(
            len(loan.blocks) * ((loan.lender is replica) - (loan.borrower is replica))
            for loan in self.loans.values()
        )

    def spare(self, replica: LendingReplica) -> int:
        """Blocks left if each of its sequences is admitted and gets one more."""
        scheduler, size = replica.scheduler, replica.allocator.block_size
        waiting = sum(1 + len(part.tokens) // size for part in scheduler.waiting)
        return replica.allocator.n_free - len(scheduler.running) - waiting

    def borrow(self, borrower: LendingReplica, part: Part, n: int) -> None:
        """Store a part's first n tokens on the peer with the most spare blocks, if they suffice."""
        lender = max((r for r in self.replicas if r is not borrower), key=self.spare)
        size = -(-n // borrower.allocator.block_size)
        if size <= self.spare(lender):
            blocks = [lender.allocator.allocate() for _ in range(size)]
            self.loans[part] = Loan(borrower, lender, blocks, n)

    def give_back(self, part: Part) -> Loan:
        loan = self.loans.pop(part)
        loan.lender.allocator.release(loan.blocks)
        return loan

    def recall(self, lender: LendingReplica) -> int:
        """Give blocks back until the lender has enough; the tokens that go to host memory."""
        moved = 0
        for part in [part for part, loan in self.loans.items() if loan.lender is lender]:
            if self.spare(lender) >= 0:
                break
            moved += self.give_back(part).n
        return moved


class LendingReplica(Replica):
    """A Replica that swaps to its peers' memory if they have any to spare, else to host memory."""

    ledger: Ledger

    def _plan(self) -> None:
        self.n_swapped_out += self.ledger.recall(self)
        super()._plan()

    def _copied(self, part: Part, n: int) -> float:
        if not part.running:  # it is swapped out
            self.ledger.borrow(self, part, n)
        return n * self.ledger.ratio if part in self.ledger.loans else n

    def _swap(self, plan: Plan) -> float:
        copied, loans = super()._swap(plan), self.ledger.loans
        for part in [p for p in loans if loans[p].borrower is self and p.swapped_kv is None]:
            self.ledger.give_back(part)  # it is swapped in, or its prefix was cached here
        return copied
