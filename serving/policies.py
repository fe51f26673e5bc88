"""Scheduling policies: who runs next, as functions over paged_kv.py's Scheduler.

A policy gives each sequence a sort key; the Scheduler admits the smallest first and preempts the
largest first. Its optional methods see the start of each step and the end of each sequence, and
limit the tokens of a step, reserve blocks, or choose which cached block is evicted (see Scheduler).
`--policy NAME[:FIELD=VALUE,...]` uses one in --batch, --bench-serving and --serve, and `python -m
serving.simulate` compares them on a trace in seconds.

    fcfs              first come first served, by priority (paged_kv.fcfs)
    longest-prefix    RadixAttention: the longest cached prefix first
    fair              VTC: the client that was served least first

A policy decides order, never content: each request's tokens are the same under all of them, up to
rounding. Needs: paged_kv.py.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from paged_kv import Scheduler, Sequence, fcfs


@dataclass
class LongestPrefix:
    """Arrivals are grouped `patience` at a time; within a group the longest cached prefix goes
    first, so that requests with a common prefix run while it is cached (RadixAttention,
    arXiv:2312.07104, section 3). A request is overtaken by at most patience - 1 later ones of its
    priority."""

    patience: int = 64

    def begin_step(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def __call__(self, seq: Sequence) -> Any:
        # running ones first: their prefixes are in use, and none is preempted for a longer match
        cached = math.inf if seq.running else len(self.scheduler.cached_prefix(seq))
        return seq.priority, seq.arrival // self.patience, -cached, seq.arrival


@dataclass
class Fair:
    """The virtual token counter (VTC, arXiv:2401.00588, algorithm 2): a client's counter is the
    service that it got, weighted input and output tokens; the client with the smallest counter goes
    next. One that returns from idleness is lifted to the least counter of the waiting clients, so
    that it saves nothing up. Two clients with waiting requests at all times differ by at most
    2 max(input_weight L, output_weight M): L tokens of the longest prompt, M of the KV cache."""

    input_weight: float = 1.0
    output_weight: float = 2.0
    weights: dict[str, float] = field(default_factory=dict)  # share of a client, 1 if not named

    def __post_init__(self):
        self.service: Counter[str] = Counter()  # of each client, divided by its weight
        self.charged: dict[Sequence, int] = {}  # tokens of each running sequence
        self.queued: set[str] = set()  # clients with a waiting request in the last step

    def begin_step(self, scheduler: Scheduler) -> None:
        for seq in scheduler.running:
            self._charge(seq)
        queued = {seq.client for seq in scheduler.waiting}
        least = min((self.service[c] for c in queued & self.queued), default=None)
        for client in queued - self.queued if least is not None else ():
            self.service[client] = max(self.service[client], least)
        self.queued = queued

    def _charge(self, seq: Sequence) -> None:
        """Count the tokens that a sequence got since the last step: its prompt, when admitted, and
        its output."""
        before, after = self.charged.get(seq, 0), max(seq.n_prompt, len(seq.tokens))
        n_in = seq.n_prompt if not before else 0
        tokens = self.input_weight * n_in + self.output_weight * (after - before - n_in)
        self.service[seq.client] += tokens / self.weights.get(seq.client, 1.0)
        self.charged[seq] = after

    def end(self, seq: Sequence) -> None:
        if seq.running or seq in self.charged:
            self._charge(seq)
            self.charged.pop(seq)

    def __call__(self, seq: Sequence) -> Any:
        # running ones first: the paper's algorithm does not preempt
        return seq.priority, not seq.running, self.service[seq.client], seq.arrival


POLICIES: dict[str, Callable[..., Any]] = {
    "fcfs": lambda: fcfs,
    "longest-prefix": LongestPrefix,
    "fair": Fair,
}


def make_policy(spec: str, clock: Callable[[], float] = time.perf_counter) -> Any:
    """The policy of NAME[:FIELD=VALUE,...]. clock: that of the Engine. ValueError names the field."""
    name, _, rest = spec.partition(":")
    if name not in POLICIES:
        raise ValueError(f"{name!r} is not a policy; use one of {', '.join(POLICIES)}")
    make = POLICIES[name]
    known = {f.name: f.type for f in fields(make)} if isinstance(make, type) else {}
    known = {name: kind for name, kind in known.items() if kind in ("int", "float")}
    values: dict[str, Any] = {}
    for pair in rest.split(",") if rest else ():
        key, _, value = pair.partition("=")
        kind = {"int": int, "float": float}.get(known.get(key))
        if kind is None:
            has = ", ".join(known) or "none"
            raise ValueError(f"{key!r} is not a field of policy {name}; its fields: {has}")
        try:
            values[key] = kind(value)
        except ValueError:
            raise ValueError(f"{key} of policy {name} must be a number, not {value!r}") from None
    policy = make(**values)
    if hasattr(policy, "clock"):
        policy.clock = clock
    return policy
