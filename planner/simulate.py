"""A simulator of serving: policies, replicas and routers on a trace, in seconds.

    python -m planner simulate trace TRACE --policies fcfs,fair,sjf --replicas 4 --plot out.png

TRACE is a file or a description (traces.py). The replicas run the real Scheduler on a virtual
clock; they may be prefill and decode pools, have LoRA adapters, or lend each other memory
(simulated_replicas.py). What a step costs is linear, base + per_token tokens + per_key keys read:
--calibrate measures it on this machine, --device computes it from published peak rates, without
launches.

What it does not know: other programs on the machine, and costs that are not linear (a step of few
tokens is bound by reading the weights, one of many by compute). --engine runs the trace on a real
Engine too, in real time, and prints both.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import argparse
import json
import math
import random
import re
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from generation.config import parse_slo
from huggingface.tokenizer import one_line
from paged_kv import Output, SamplingParams, Scheduler
from serving.replay import percentile, replay
from serving.policies import qoe
from planner.simulated_replicas import (
    AdapterReplica, Adapters, Ledger, LendingReplica, Part, PoolReplica, Pools, RankAware, Replica,
    StepCost, advance_together,
)  # fmt: skip
from serving.traces import GENERATORS, Arrival, generate, open_trace

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
    """What clients saw. Latencies count from a request's arrival; itl is the time between tokens,
    without tool calls."""

    slo: tuple[float, float] = (1.0, 0.1)  # seconds to the first token, and per further token
    requests: int = 0
    tokens: int = 0
    good: int = 0  # requests within the SLO
    qoe: float = 0.0  # sum over requests, for a reader whose pace is the SLO
    first: float = math.inf  # arrival
    last: float = -math.inf  # token
    itl: Histogram = field(default_factory=Histogram)
    ttft: array = field(default_factory=lambda: array("d"))
    e2e: array = field(default_factory=lambda: array("d"))
    waits: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # by client

    def add(self, arrival: Arrival, output: Output) -> None:
        """A request has ended."""
        start, (_, *times) = output.arrival_time, output.timestamps
        gaps = [b - a for a, b in zip(times, times[1:])]
        for tokens, *_ in reversed(arrival.tool_calls):
            del gaps[tokens - 1]
        self.itl.add(gaps)
        ttft = times[0] - start
        self.ttft.append(ttft)
        self.e2e.append(times[-1] - start)
        self.waits[arrival.client].append(ttft)
        self.requests, self.tokens = self.requests + 1, self.tokens + len(times)
        self.good += ttft <= self.slo[0] and sum(gaps) <= self.slo[1] * len(gaps)
        in_time = ttft <= self.slo[0] and max(gaps, default=0.0) <= self.slo[1]
        seen = [] if in_time else [*accumulate(gaps, initial=times[0])]
        self.qoe += 1.0 if in_time else qoe(start, seen, self.slo[0], 1 / self.slo[1])
        self.first, self.last = min(self.first, start), max(self.last, times[-1])

    def metrics(self, schedulers: Sequence[Scheduler]) -> dict[str, float]:
        """All numbers, under the names that --json prints."""
        seconds = self.last - self.first
        hits, admitted, preempted = (
            sum(getattr(s, name) for s in schedulers)
            for name in ("n_hit_tokens", "n_admitted_tokens", "n_preempted")
        )
        return {
            "requests": self.requests,
            "seconds": seconds,
            "tokens_per_second": self.tokens / seconds,
            **{f"ttft_p{p}": percentile(self.ttft, p) for p in (50, 99)},
            **{f"itl_p{p}": self.itl.percentile(p) for p in (50, 99)},
            "e2e_mean": sum(self.e2e) / len(self.e2e),
            "within_slo": self.good / self.requests,
            "goodput": self.good / seconds,
            "qoe": self.qoe / self.requests,
            "worst_client_ttft": max(sum(w) / len(w) for w in self.waits.values()),
            "preemptions": preempted,
            "hit_rate": hits / max(1, admitted),
            "replica_seconds_per_1000_tokens": 1e3 * len(schedulers) * seconds / self.tokens,
        }


Router = Callable[[Arrival, Sequence[Replica]], Replica]


def simulate(
    trace: Iterable[Arrival], replicas: list[Replica], route: Router, report: Report,
    together: Sequence[Any] = (),
) -> dict[str, float]:  # fmt: skip
    """Run a trace to its end; returns Report.metrics. route chooses the replica of an arrival; see
    `load`. together: the actors of pools.advance_together, if replicas depend on each other."""
    for replica in replicas:
        replica.finished = lambda part, time: report.add(part.request.id, part.request)
    allocator = replicas[0].allocator
    capacity = len(allocator.refs) * allocator.block_size
    for arrival in trace:
        if arrival.n_prompt + arrival.n_output > capacity:
            asked = f"{arrival.n_prompt} prompt tokens plus {arrival.n_output} more"
            raise ValueError(
                f"{asked} exceed the KV cache of {capacity} tokens; give more --blocks"
            )
        if together:
            advance_together(together, arrival.arrival_time)
        replica = route(arrival, replicas)
        replica.send(Part.of(arrival), arrival.arrival_time)
        replica.advance(arrival.arrival_time)
    if together:
        advance_together(together, math.inf)
    for replica in replicas:
        replica.advance(math.inf)
    return report.metrics([replica.scheduler for replica in replicas])


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
    """By the texts that begin in the prompt's first 256 tokens: equal beginnings meet in one prefix
    cache, whatever its load."""
    key, n = [], 0
    for text, tokens in arrival.prompt:
        key, n = key + [text], n + tokens
        if n >= 256:
            break
    return replicas[random.Random(repr(key)).randrange(len(replicas))]


class Preble:
    """routing.py's PrefixAndLoad: where most of the prompt is cached, unless that replica is
    overloaded."""

    def __init__(self):
        from serving.routing import PrefixAndLoad  # here: 1 s

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
        params = SamplingParams(temperature=0, max_new_tokens=a.max_new_tokens, ignore_eos=True)
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


def cost_on_device(device: str, model: str, block_size: int) -> tuple[StepCost, int]:
    """The cost at a GPU's peak rates (planner/serving_cost.py), and the KV blocks that fit: a
    step reads all weights (of all experts), a token computes with them and a key is read at full
    speed, and KV is swapped at the network's. It has no launches, and nothing overlaps: the planner
    takes the maximum of reads and FLOPs where this adds them."""
    from planner.cost_model import DEVICES, load_shape, parameters
    from planner.serving_cost import Layout, capacity, kv_bytes_per_token, weight_bytes

    if device not in DEVICES:
        raise ValueError(f"--device {device}: use one of {', '.join(DEVICES)}")
    d, shape = DEVICES[device], load_shape(model)
    kv_bytes, weights = kv_bytes_per_token(shape), weight_bytes(shape, Layout())
    compute = 2 * parameters(shape, active=True) / d.bf16
    blocks = capacity(shape, d, Layout()) // block_size
    if blocks < 1:
        raise ValueError(
            f"--model {model} does not fit --device {device}: {weights / 1e9:.1f} GB of weights "
            f"leave less than one block of {block_size} tokens"
        )
    return StepCost(weights / d.hbm, compute, kv_bytes / d.hbm, kv_bytes / d.network), blocks


# --------------------------------------------------------------------------------------------------
# The program
# --------------------------------------------------------------------------------------------------

COLUMNS = {  # metric: (heading, factor, format)
    "tokens_per_second": ("tok/s", 1, ".0f"),
    "ttft_p50": ("TTFT p50", 1e3, ".0f"),
    "ttft_p99": ("p99 ms", 1e3, ".0f"),
    "itl_p50": ("ITL p50", 1e3, ".1f"),
    "itl_p99": ("p99 ms", 1e3, ".1f"),
    "e2e_mean": ("mean s", 1, ".2f"),
    "within_slo": ("in SLO", 100, ".0f"),
    "goodput": ("good/s", 1, ".2f"),
    "qoe": ("QoE", 1, ".2f"),
    "worst_client_ttft": ("worst s", 1, ".2f"),
    "preemptions": ("preempt", 1, ".0f"),
    "hit_rate": ("hit %", 100, ".0f"),
    "replica_seconds_per_1000_tokens": ("s/1k tok", 1, ".2f"),
}


def table(results: dict[str, dict[str, float]]) -> str:
    """A row per policy. worst s: mean time to the first token of the client that waits longest;
    good/s: requests per second within the SLO; QoE: quality of experience of a reader whose pace is
    the SLO (policies.qoe), the mean; s/1k tok: replica seconds per 1000 tokens."""
    width = max(map(len, results)) + 1
    rows = [f"{'':{width}}" + "".join(f"{heading:>10}" for heading, *_ in COLUMNS.values())]
    for name, metrics in results.items():
        cells = (f"{factor * metrics[key]:{form}}" for key, (_, factor, form) in COLUMNS.items())
        rows.append(f"{name:{width}}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(rows)


def plot(reports: dict[str, Report], path: Path) -> None:
    """Cumulative distributions of the time to the first token and of the whole request."""
    from training.metrics import pyplot

    figure, axes = pyplot().subplots(1, 2, figsize=(9, 3.5), sharey=True, layout="constrained")
    for axis, name, label in zip(axes, ("ttft", "e2e"), ("time to first token", "end to end")):
        for policy, report in reports.items():
            values = np.sort(np.array(getattr(report, name)))
            axis.plot(values, np.arange(1, len(values) + 1) / len(values), label=policy)
        axis.set(xscale="log", xlabel=f"{label}, s")
    axes[0].set(ylabel="fraction of requests")
    axes[0].legend()
    figure.savefig(path)


def load_engine(flags: list[str]) -> Any:
    """The Engine of generate.py --bench-serving with these flags."""
    from generation.config import parse_args
    from generation.load import open_gguf, pick_device
    from serving.build import load_engine

    args = parse_args(["--bench-serving", *flags])
    with open_gguf(args):
        return load_engine(args, pick_device(args.device))


def calibrate(path: Path, engine: Any) -> str:
    """Measure steps of an Engine with 1 to max_num_seqs sequences, and write the cost to a file."""
    from huggingface.weights import write_atomically

    sizes, seconds = [], []
    for i, n in enumerate((1, 4, 16, engine.scheduler.max_num_seqs)):
        for seed in (2 * i, 2 * i + 1):  # the first to warm up
            trace = generate(f"random:n={2 * n},rate=inf,input=16:200,output=16:64", seed)
            found = measure(engine, trace)
        sizes, seconds = sizes + found[0], seconds + found[1]
    cost = fit(sizes, seconds)
    text = json.dumps(asdict(cost) | {"blocks": len(engine.allocator.refs)})
    write_atomically(path, lambda tmp: tmp.write_text(text + "\n"))
    error = float(np.median([abs(cost(*size) / s - 1) for size, s in zip(sizes, seconds)]))
    return f"{path}: {text}, median error {error:.0%} over {len(sizes)} steps"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `simulate trace`."""
    parser.epilog = "All other flags are generate.py's, for --engine and --calibrate."
    parser.set_defaults(report=report)
    add = parser.add_argument
    add("trace", nargs="?", help="a file, or a description (serving/traces.py)", metavar="TRACE")
    add("--policies", default="fcfs", help="NAME[:FIELD=VALUE,...],... (serving/policies.py)")
    add("--replicas", type=int, default=1, help="engines behind the router")
    add("--router", default="power-of-two", choices=(*ROUTERS, "rank-aware"))
    add(
        "--device", default="h100", help="GPU at whose peak rates steps run (planner/cost_model.py)"
    )
    add("--model", default="llama3-8b", help="with --device: name of cost_model.py, or folder")
    add("--pools", help="prefill and decode replicas; flip: they change", metavar="P:D[:flip]")
    add("--adapters", help="LoRA ranks of the clients' adapters", metavar="RANK,...[:wait]")
    add("--lend", action="store_true", help="--kv-swap to free memory of other replicas")
    add("--bandwidth", type=float, default=25e9, help="bytes/s of the link of these three")
    add("--cost", type=Path, help="file of --calibrate, instead of --device", metavar="FILE")
    add("--blocks", type=int, help="KV blocks of each replica (default: what fits)")
    add("--block-size", type=int, default=16)
    add("--max-num-batched-tokens", type=int, default=2048)
    add("--max-num-seqs", type=int, default=256)
    add("--kv-swap", action="store_true", help="preemption swaps KV to host memory")
    add("--no-prefix-cache", action="store_true")
    add("--at-tool-call", default="discard", choices=("discard", "preserve", "swap", "min-waste"))
    add("--slo", default="1:0.1", help="seconds to the first token, and per further token")
    add("--seed", type=int, default=0)
    add("--plot", type=Path, metavar="FILE")
    add("--json", action="store_true")
    add("--calibrate", type=Path, help="measure an Engine here and write its cost", metavar="FILE")
    add("--engine", action="store_true", help="also run the trace on an Engine, in real time")


def step_cost(args: argparse.Namespace) -> tuple[StepCost, int]:
    """The cost of --cost or --device, and the number of KV blocks."""
    if args.cost is None:
        cost, blocks = cost_on_device(args.device, args.model, args.block_size)
    else:
        try:
            values = json.loads(args.cost.read_text())
            blocks, cost = values.pop("blocks"), StepCost(**values)
        except (OSError, ValueError, KeyError, TypeError) as e:
            message = f"--cost {args.cost}: not a file of --calibrate ({one_line(e)})"
            raise ValueError(message) from None
    return cost, blocks if args.blocks is None else args.blocks


MOST_BLOCKS, MOST_REPLICAS = 10**7, 9999  # the simulator's own memory


def check_args(args: argparse.Namespace) -> None:
    """ValueError names a wrong value or combination of flags."""
    if args.engine_flags and not (args.engine or args.calibrate):
        raise ValueError(f"{args.engine_flags[0]} is unknown, or requires --engine or --calibrate")
    if args.calibrate:
        return
    if args.plot is not None and not args.plot.absolute().parent.is_dir():
        raise ValueError(f"--plot {args.plot}: no such folder; create it first")
    if not 1 <= args.replicas <= MOST_REPLICAS:
        raise ValueError(f"--replicas must be from 1 to {MOST_REPLICAS}, not {args.replicas}")
    if args.blocks is not None and not 1 <= args.blocks <= MOST_BLOCKS:
        raise ValueError(f"--blocks must be from 1 to {MOST_BLOCKS}, not {args.blocks}")
    if args.block_size < 1:
        raise ValueError(f"--block-size must be 1 or more, not {args.block_size}")
    if args.engine and args.replicas > 1:
        raise ValueError("--engine is one Engine: it cannot be combined with --replicas")
    if args.trace is None:
        raise ValueError(f"give a TRACE: a file, or one of {', '.join(GENERATORS)}")
    used = [name for name in ("pools", "adapters", "lend") if getattr(args, name)]
    if used and args.engine or len(used) > 1:
        others = ", ".join(f"--{name}" for name in [*used[1:], *["engine"] * args.engine])
        raise ValueError(f"--{used[0]} cannot be combined with {others}")
    if not 0 < args.bandwidth < math.inf:
        raise ValueError(f"--bandwidth must be bytes/s, more than 0, not {args.bandwidth}")
    if args.pools and not re.fullmatch(r"[1-9]\d{0,3}:[1-9]\d{0,3}(:flip)?", args.pools):
        raise ValueError(f"--pools must be P:D or P:D:flip, not {args.pools!r}")
    if args.pools and args.replicas > 1:
        raise ValueError("--pools has a number of replicas: it cannot be combined with --replicas")
    if args.adapters and not re.fullmatch(r"[1-9]\d{0,3}(,[1-9]\d{0,3})*(:wait)?", args.adapters):
        raise ValueError(f"--adapters must be RANK,... or RANK,...:wait, not {args.adapters!r}")
    if args.lend and not (args.kv_swap and args.replicas > 1):
        raise ValueError("--lend requires --kv-swap and --replicas 2 or more")
    if args.router == "rank-aware" and not args.adapters:
        raise ValueError("--router rank-aware requires --adapters")


def make_replicas(
    args: argparse.Namespace, cost: StepCost, policy: str, **options: Any
) -> tuple[list[Replica], Router, Sequence[Any]]:
    """Replicas, their router, and the actors that advance together (see simulate)."""
    from planner.cost_model import DEVICES, load_shape
    from planner.serving_cost import kv_bytes_per_token

    slo = parse_slo(args.slo, "--slo")
    if args.pools:
        n_prefill, n_decode = map(int, args.pools.split(":")[:2])
        pooled = [PoolReplica(cost, policy, **options) for _ in range(n_prefill + n_decode)]
        seconds = kv_bytes_per_token(load_shape(args.model)) / args.bandwidth
        pools = Pools(pooled, n_prefill, seconds, slo, args.pools.endswith(":flip"))
        return pooled, pools, [pools, *pooled]
    route = RankAware(slo) if args.router == "rank-aware" else ROUTERS[args.router]()
    if args.adapters:
        ranks, _, wait = args.adapters.partition(":")
        shape, d = load_shape(args.model), DEVICES.get(args.device, DEVICES["h100"])
        size = 2 * shape.layers * sum(m.k + m.n for m in shape.attention())  # bytes per rank
        ranks, rates = tuple(map(int, ranks.split(","))), (size / args.bandwidth, size / d.hbm)
        options |= dict(adapters=Adapters(ranks, *rates, wait=bool(wait)))
        return [AdapterReplica(cost, policy, **options) for _ in range(args.replicas)], route, ()
    kind = LendingReplica if args.lend else Replica
    replicas = [kind(cost, policy, **options) for _ in range(args.replicas)]
    if not args.lend:
        return replicas, route, ()
    if not cost.per_swapped:
        raise ValueError("--lend requires a cost with per_swapped, the speed of host memory")
    seconds = kv_bytes_per_token(load_shape(args.model)) / args.bandwidth
    Ledger(replicas, seconds / cost.per_swapped)
    return replicas, route, replicas


def run(args: argparse.Namespace) -> str:
    """All policies on one trace: the program's output."""
    cost, blocks = step_cost(args)
    engine_flags = [*args.engine_flags]
    sizes = dict(
        max_num_batched_tokens=args.max_num_batched_tokens, max_num_seqs=args.max_num_seqs,
        block_size=args.block_size, kv_swap=args.kv_swap, prefix_cache=not args.no_prefix_cache,
    )  # fmt: skip
    if args.engine:
        for name, value in (sizes | {"kv_blocks": blocks}).items():
            is_flag = name in ("kv_blocks", "max_num_batched_tokens", "max_num_seqs")
            flag = "--" + name.replace("_", "-") if is_flag else f"--set={name}"
            engine_flags.append(f"{flag}={json.dumps(value)}")
    reports, results = {}, {}
    for policy in re.split(r",(?![^,:=]*=)", args.policies):  # not at commas between fields
        options = dict(sizes, num_blocks=blocks, at_tool_call=args.at_tool_call)
        replicas, route, together = make_replicas(args, cost, policy, **options)
        reports[policy] = report = Report(parse_slo(args.slo, "--slo"))
        trace = open_trace(args.trace, args.seed)
        results[policy] = simulate(trace, replicas, route, report, together)
        if args.engine:
            name, report = f"{policy} (Engine)", Report(parse_slo(args.slo, "--slo"))
            engine = load_engine([*engine_flags, f"--policy={policy}"])
            trace = list(open_trace(args.trace, args.seed))
            for output in replay(engine, trace, SamplingParams(temperature=0, ignore_eos=True)):
                report.add(trace[output.id], output)
            reports[name], results[name] = report, report.metrics([engine.scheduler])
    if args.plot:
        plot(reports, args.plot)
    return json.dumps(results) if args.json else table(results)


def report(args: argparse.Namespace) -> str:
    """The output of `simulate trace`. ValueError names a wrong flag."""
    check_args(args)
    if not args.calibrate:
        return run(args)
    sizes = ("max_num_seqs", "max_num_batched_tokens")
    flags = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in sizes]
    return calibrate(args.calibrate, load_engine([*args.engine_flags, *flags]))
