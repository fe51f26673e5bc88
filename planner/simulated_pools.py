"""Simulated replicas that are not alike, or not alone: prefill and decode pools, replicas with LoRA
adapters, and replicas that lend each other memory.

    python -m planner simulate trace TRACE --pools 1:1                 against --replicas 2
    python -m planner simulate trace TRACE --pools 2:2:flip            against --pools 2:2
    python -m planner simulate trace TRACE --adapters 8,64             against --adapters 8,64:wait
    python -m planner simulate trace TRACE --replicas 2 --kv-swap --lend

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

Hook: a subclass of Replica for each, under the real Scheduler and BlockAllocator; Pools and
RankAware are routers. Equivalence (test_all.py): timestamps of --pools 1:1 == those of two real
Engines with export_request and import_request between them. Needs: simulated_replica.py,
policies.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import heapq
import math
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paged_kv import Plan, SamplingParams, SwappedKV
from planner.simulated_replica import Part, Replica
from serving.policies import Predictor
from serving.traces import Arrival


def advance_together(actors: Sequence[Any], until: float) -> None:
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


# ---- prefill and decode pools ----


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
        self, replicas: Sequence[PoolReplica], n_prefill: int, token_seconds: float,
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

    def __call__(self, arrival: Arrival, replicas: Sequence[PoolReplica]) -> PoolReplica:
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


# ---- adapters ----


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

    def __call__(self, arrival: Arrival, replicas: Sequence[AdapterReplica]) -> AdapterReplica:
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


# ---- memory of peers ----


class Loan(NamedTuple):
    """Blocks of a lender that hold a preempted sequence's first n tokens."""

    borrower: LendingReplica
    lender: LendingReplica
    blocks: list[int]
    n: int


class Ledger:
    """What replicas lend each other. ratio: time of a copy to a peer over one to host memory."""

    def __init__(self, replicas: Sequence[LendingReplica], ratio: float):
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
