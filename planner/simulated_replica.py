"""A simulated Engine: the real Scheduler, block allocator and prefix tree on a virtual clock.

Only the model is missing. A step takes what StepCost says, and a request ends after the number of
tokens that its trace has (traces.py), so the order of tokens over all requests is the Engine's, and
the times are as good as the cost. planner/simulate.py runs traces on one or more.

As long as nobody arrives, ends or can be admitted, steps are alike: each running sequence gets one
token. A Replica then plans many steps at once, as one step whose drafts are all accepted (the
Scheduler's mechanism for speculative decoding), and rejects those after the next arrival.

Equivalence (test_all.py): every timestamp == that of the real Engine on a clock that advances by
the same cost; many steps at once == one by one. Needs: paged_kv.py, serving/traces.py, policies.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import bisect
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from paged_kv import (
    BlockAllocator, Output, Plan, Sample, SamplingParams, Scheduler, Sequence, SwappedKV, fcfs,
)  # fmt: skip
from serving.policies import choose_for_pause, make_policy
from serving.traces import Arrival


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

    # ---- for subclasses (simulated_pools.py) ----

    def _copied(self, part: Part, n: int) -> float:
        """Tokens that host memory copies in the time in which n of a part are swapped."""
        return n

    def _more_seconds(self, plan: Plan) -> float:
        """Seconds of each of the planned steps that StepCost does not know."""
        return 0.0
