"""The serving benchmark (--bench-serving): an Engine under a trace of requests, in real time.

A trace (serving/traces.py) gives each request its arrival time, and the engine gets it then,
whether or not it has finished those before: an open loop, as with independent users. A closed loop,
in which a new request waits for an old one, would hide that a slow engine builds up a queue. For
the same reason latencies count from a request's arrival time, not from when the engine admits it.

    queue   arrival -> admission to the batch
    TTFT    arrival -> first output token
    ITL     between two output tokens
    e2e     arrival -> last output token

Cost: the trace's own duration at least. When it misleads: above the rate that the engine can serve
the latencies grow with the length of the trace; the first requests meet an empty engine, so short
traces look better than long ones; and a first run measures compilation (entrypoints.py warms up).

Equivalence (test_all.py): on a clock that only the model advances, the times are those by hand.
`python -m planner.simulate` replays traces by a cost model, without running one.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit(
        "this is a part of generate.py; run: python generate.py --help"
    )

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from paged_kv import Engine, Output, SamplingParams
from serving.traces import Arrival


def replay(
    engine: Engine,
    trace: Iterable[Arrival],
    params: SamplingParams,
    sync_time: Callable[[float], float] = lambda seconds: seconds,
) -> list[Output]:
    """Run a trace in real time, request i with seed + i, which is also its Output's id; the
    arrival_time of each Output is the trace's. With several ranks, sync_time(time) returns rank 0's
    time, so that all ranks schedule the same requests in each step."""
    vocab_size, done = engine.model.config.vocab_size, []
    waiting = deque((i, a, a.ids(vocab_size)) for i, a in enumerate(trace))
    start = sync_time(engine.clock())
    while waiting or engine.unfinished:
        now = sync_time(engine.clock()) if waiting else math.inf
        while waiting and start + waiting[0][1].arrival_time <= now:
            i, a, ids = waiting.popleft()
            seed = (params.seed + i) % 2**63
            request = replace(params, max_new_tokens=a.max_new_tokens, seed=seed)
            engine.add(ids, request, id=i, priority=a.priority, client=a.client)
            engine.outputs[i].arrival_time = start + a.arrival_time
        if not engine.unfinished:
            time.sleep(max(0.0, start + waiting[0][1].arrival_time - sync_time(engine.clock())))
        done += [output for output in engine.step() if output.finished]
    for output in done:
        if output.error is not None:
            raise ValueError(output.error)
    return done


def replay_metrics(
    engine: Engine,
    trace: list[Arrival],
    params: SamplingParams,
    sync_time: Callable[[float], float] = lambda seconds: seconds,
) -> dict[str, Any]:
    """Replay a trace; its metrics under the keys that --json prints, times in seconds."""
    scheduler = engine.scheduler

    def counts() -> tuple[int, int, int]:
        return scheduler.n_hit_tokens, scheduler.n_admitted_tokens, scheduler.n_preempted

    before, done = counts(), replay(engine, trace, params, sync_time)
    hit_tokens, prompt_tokens, preempted = (b - a for a, b in zip(before, counts()))

    times: dict[str, list[float]] = {name: [] for name in ("queue", "ttft", "itl", "e2e")}
    for output in done:
        arrival, (admitted, *tokens) = output.arrival_time, output.timestamps
        for name, t in (("queue", admitted), ("ttft", tokens[0]), ("e2e", tokens[-1])):
            times[name].append(t - arrival)
        times["itl"] += [b - a for a, b in zip(tokens, tokens[1:])]
    start = done[0].arrival_time - trace[done[0].id].arrival_time
    seconds = max(output.timestamps[-1] for output in done) - start
    n_in, n_out = sum(len(o.prompt_ids) for o in done), sum(len(o.token_ids) for o in done)
    metrics = dict(requests=len(done), seconds=seconds, prompt_tokens=n_in, output_tokens=n_out)
    metrics["output_tokens_per_second"] = n_out / seconds
    metrics["total_tokens_per_second"] = (n_in + n_out) / seconds
    metrics |= dict(hit_rate=hit_tokens / max(1, prompt_tokens), preemptions=preempted)
    for name, t in times.items():
        metrics |= {f"{name}_seconds_p{p}": percentile(t, p) for p in (50, 99)}
        metrics[f"{name}_seconds_mean"] = sum(t) / len(t) if t else None
    return {name: value if value is None else round(value, 6) for name, value in metrics.items()}


def percentile(values: Collection[float], p: float) -> float | None:
    """The nearest-rank percentile: the smallest value with p percent of the values at or below it;
    None if there are no values."""
    return sorted(values)[math.ceil(p / 100 * len(values)) - 1] if values else None


def summary_table(m: Mapping[str, Any]) -> str:
    """The metrics of a replay as a table."""

    def ms(value: float | None) -> str:
        return "-" if value is None else f"{1e3 * value:.1f}"

    columns, line = ("mean", "p50", "p99"), "{:16} {:>9} {:>9} {:>9}".format
    names = {"queue": "queue time", "ttft": "TTFT", "itl": "ITL", "e2e": "end to end"}
    rows = [line(text, *(ms(m[f"{x}_seconds_{c}"]) for c in columns)) for x, text in names.items()]
    head = f"{m['requests']} requests in {m['seconds']:.2f} s, {m['prompt_tokens']} input tokens, "
    head += f"{m['output_tokens']} output tokens: {m['output_tokens_per_second']:.1f} output tok/s"
    head += f", {m['total_tokens_per_second']:.1f} total tok/s"
    end = f"prefix cache hit rate {m['hit_rate']:.0%}, {m['preemptions']} preemptions"
    return "\n".join([head, line("ms", *columns), *rows, end])
