"""Searches for unequal devices and unequal tasks: which device runs which layers, on how many.

    python -m parallelism.planner --search helix --model llama3-70b --problem '{"group": 10}'
    python -m parallelism.planner --search spindle --gpus 16

Two papers, each a small optimization problem on the models and devices of cost_model.py:

    helix      serving on unequal GPUs: the layers that each one holds, as a mixed-integer program
               over a flow of tokens, and a weighted round robin that follows the flow's links
               (arXiv:2406.01566); exact, or within the bound that is printed
    spindle    multi-task models: waves of operators, with devices from each one's scaling curve
               (arXiv:2409.03365); a heuristic beside a lower bound

When it loses: rates come from formulas or from --problem, not from a profile of the machine, and a
search is as good as they are. Helix's program grows with GPUs x GPUs x layers: place groups of
layers. Its nodes always have a full batch; the paper's estimate of KV memory in use is left out.
Spindle's waves finish all tasks of one depth before the next: a task of few devices that could run
beside the next depth does not. test_all.py compares both with all solutions of small random
problems. pipeline_search.py has the searches for training pipelines. Needs: the standard library;
helix: scipy.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("run: python -m parallelism.planner --search helix")

import argparse
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from parallelism.cost_model import (
    DEVICES,
    LINK_EFFICIENCY,
    MEMORY_FRACTION,
    Device,
    Shape,
    load_device,
    load_shape,
    parse_number,
    require,
)
from parallelism.serving_cost import Layout, achieved, decode_work, kv_bytes_per_token, step
from parallelism.training_plan import (
    RESERVED_BYTES,
    Plan,
    divisors,
    layer_parameters,
    layer_seconds,
)

Arcs = dict[tuple[Hashable, Hashable], float]


def max_flow(capacity: Arcs, source: Hashable, sink: Hashable) -> tuple[Arcs, set] | None:
    """(flow of every arc, the source's side of a minimum cut) by shortest augmenting paths (Edmonds
    and Karp, JACM 1972), or None if the flow is unbounded. No arc may have an opposite one."""
    left: dict[Hashable, dict[Hashable, float]] = defaultdict(dict)
    for (u, v), c in capacity.items():
        left[u][v], left[v][u] = c, 0.0
    tiny = 1e-9 * max((c for c in capacity.values() if c < math.inf), default=0.0)
    while True:
        parent, queue = {source: source}, [source]
        for u in queue:
            for v, c in left[u].items():
                if c > tiny and v not in parent:
                    parent[v] = u
                    queue.append(v)
            if sink in parent:
                break
        else:
            return {(u, v): max(0.0, left[v][u]) for u, v in capacity}, set(parent)
        path = [sink]
        while path[-1] != source:
            path.append(parent[path[-1]])
        steps = list(zip(path[1:], path))
        amount = min(left[u][v] for u, v in steps)
        if amount == math.inf:
            return None
        for u, v in steps:
            left[u][v] -= amount
            left[v][u] += amount


# --------------------------------------------------------------------------------------------------
# Helix: layers on unequal GPUs
# --------------------------------------------------------------------------------------------------


HOST = "host"  # sends prompts to first layers, receives tokens from last ones
Span = tuple[int, int]  # first layer, last + 1


@dataclass(frozen=True)
class Cluster:
    """rates: per node the tokens/s with 1, 2, ... layers, as many as fit; links: tokens/s from node
    to node and from and to HOST, none if missing."""

    layers: int
    rates: Mapping[str, Sequence[float]]
    links: Mapping[tuple[str, str], float]

    def flow_arcs(self, spans: Mapping[str, Span]) -> Arcs:
        """The graph whose maximum flow is the throughput of a placement: a node's arc from (name,
        in) to (name, out) is its rate, and a link counts if the receiver holds the layer after the
        sender's last one ("partial inference": it may hold earlier ones too)."""
        first, after = ({n: span[i] for n, span in spans.items()} for i in (0, 1))
        first[HOST], after[HOST] = self.layers, 0
        rates = {n: self.rates[n][end - begin - 1] for n, (begin, end) in spans.items()}
        valid = lambda a, b: first[b] <= after[a] and (b == HOST or after[a] < after[b])
        arcs = {((n, "in"), (n, "out")): rate for n, rate in rates.items()}
        for (a, b), rate in self.links.items():
            if {a, b} <= {*first} and valid(a, b):
                arcs[(a, "out"), (b, "in")] = min(rate, *(rates[n] for n in (a, b) if n != HOST))
        return arcs

    def equal(self, a: str, b: str) -> bool:
        """Whether the two nodes can change places."""
        other = {a: b, b: a}
        changed = {tuple(other.get(n, n) for n in pair): r for pair, r in self.links.items()}
        return self.rates[a] == self.rates[b] and changed == self.links

    def routes(self, spans: Mapping[str, Span]) -> dict[tuple[str, str], float]:
        """Tokens/s on each used link of a maximum flow."""
        flow, _ = max_flow(self.flow_arcs(spans), (HOST, "out"), (HOST, "in"))
        return {(a, b): f for ((a, _), (b, _)), f in flow.items() if a != b and f > 0}


class Program:
    """A mixed-integer program: named variables from 0 up, binary or not, and rows of limits."""

    def __init__(self) -> None:
        self.index: dict[Any, int] = {}
        self.binary: list[bool] = []
        self.rows: list[list[tuple[int, float]]] = []
        self.limits: list[tuple[float, float]] = []

    def add(self, name: Hashable, binary: bool = False) -> Any:
        self.index[name] = len(self.binary)
        self.binary.append(binary)
        return name

    def limit(self, terms: Iterable[tuple[Any, float]], least: float, most: float) -> None:
        """least <= sum of coefficient x variable <= most"""
        self.rows.append([(self.index[name], c) for name, c in terms])
        self.limits.append((least, most))

    def maximize(self, names: Iterable[Any], seconds: float) -> tuple[set, float] | None:
        """(the binary variables that are 1, upper bound of the sum of `names`) by HiGHS."""
        try:
            import numpy as np
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import coo_array
        except ImportError:
            raise ValueError("--search helix needs scipy: pip install scipy") from None
        entries = ((i, j, c) for i, row in enumerate(self.rows) for j, c in row)
        at, columns, values = zip(*entries)
        matrix = coo_array((values, (at, columns)), shape=(len(self.rows), len(self.binary)))
        cost = np.zeros(len(self.binary))
        cost[[self.index[name] for name in names]] = -1
        got = milp(
            cost, integrality=self.binary, bounds=Bounds(0, np.where(self.binary, 1, np.inf)),
            constraints=LinearConstraint(matrix, *zip(*self.limits)),
            options={"time_limit": seconds, "mip_rel_gap": 0},
        )  # fmt: skip
        if got.x is None:
            return None
        ones = {name for name, i in self.index.items() if self.binary[i] and got.x[i] > 0.5}
        return ones, -got.mip_dual_bound


def place(cluster: Cluster, seconds: float = 30.0) -> tuple[dict[str, Span], float]:
    """(layers of each used node, upper bound of the throughput) that maximize the flow. The bound
    is reached unless the solver stops after `seconds`: ValueError if it has found nothing then.

    Binary (n, first, end): the node's span; (a, b, e): flow of tokens that have passed e layers, at
    most the rate of a's span if it ends at e, and of b's span if it covers layer e. The paper has
    one flow per link, switched by both ends' layers; a flow per e makes the relaxation tighter.
    Flows are in thousandths of the fastest node or link: the solver's tolerances are absolute.
    """
    L, program = cluster.layers, Program()
    unit = min(max(map(max, cluster.rates.values())), max(cluster.links.values())) / 1000
    most = 1000 * (len(cluster.rates) + 1)  # of all links into a node
    rates = {n: [min(r / unit, most) for r in row] for n, row in cluster.rates.items()}
    spans = {n: [program.add((n, s, e), True) for s in range(L) for e in range(s + 1, L + 1)
                 if e - s <= len(rates[n])] for n in rates}  # fmt: skip
    rate_of = {v: rates[v[0]][v[2] - v[1] - 1] for held in spans.values() for v in held}
    ones = lambda some: [(v, 1.0) for v in some]
    limited = lambda able: [(v, -rate_of[v]) for v in able]
    into, out = defaultdict(list), defaultdict(list)  # flows by (node, layers passed)
    for (a, b), rate in cluster.links.items():
        passed = [0] if a == HOST else [L] if b == HOST else range(1, L)
        flows = {e: program.add((a, b, e, "flow")) for e in passed}
        program.limit(ones(flows.values()), 0, min(rate / unit, 1000))
        for e, flow in flows.items():
            out[a, e].append(flow)
            into[b, e].append(flow)
    for n, held in spans.items():
        program.limit(ones(held), 0, 1)
        flows = [ones(into[n, e]) + [(v, -1.0) for v in out[n, e]] for e in range(L + 1)]
        program.limit(itertools.chain(*flows), 0, 0)
        for e in range(L + 1):
            able = [v for v in held if v[1] <= e < v[2]]
            program.limit([*ones(into[n, e]), *limited(able)], -math.inf, 0)
            able = [v for v in held if v[2] == e]
            program.limit([*ones(out[n, e]), *limited(able)], -math.inf, 0)
    sent = out[HOST, 0]
    for e in range(L):  # implied: every token passes every layer
        program.limit([*ones(sent), *limited(v for v in rate_of if v[1] <= e < v[2])], -math.inf, 0)
    for a, b in itertools.pairwise(rates):  # equal nodes in the order of their first layers
        if cluster.equal(a, b):
            firsts = [(v, v[1]) for v in spans[a]] + [(v, -v[1]) for v in spans[b]]
            program.limit(firsts, -math.inf, 0)
    found = program.maximize(sent, seconds)
    require(found, f"helix: no placement found in {seconds:g} s; use a larger group")
    return {n: (first, end) for n, first, end in found[0]}, found[1] * unit


class RoundRobin:
    """Helix's interleaved weighted round robin: each request goes to the link that would have the
    least load per capacity. A link's share of the requests converges to its share of the flow: of
    n requests through k links, it gets at most share (n + k - 1)."""

    def __init__(self, flows: Mapping[tuple[str, str], float]) -> None:
        self.next: dict[str, dict[str, float]] = defaultdict(dict)
        for (a, b), flow in flows.items():
            self.next[a][b] = flow
        self.count: dict[tuple[str, str], int] = dict.fromkeys(flows, 0)

    def pipeline(self) -> list[str]:
        """The nodes of the next request, from the first layer to the last."""
        at, path = HOST, []
        while not path or path[-1] != HOST:
            flows = self.next[at]
            to = min(flows, key=lambda b: (self.count[at, b] + 1) / flows[b])
            self.count[at, to] += 1
            path.append(at := to)
        return path[:-1]


def decode_rates(shape: Shape, device: Device, group: int, batch: int, context: int) -> list[float]:
    """Tokens/s of a node with 1, 2, ... groups of layers, as many as fit with their keys and
    values: serving_cost.py's step without the head."""
    share = group / shape.layers
    weights = 2 * share * sum(layer_parameters(shape))
    kv = share * batch * context * kv_bytes_per_token(shape)
    most = int((MEMORY_FRACTION * device.memory - RESERVED_BYTES) / (weights + kv))
    whole = step(shape, achieved(device), Layout(), decode_work(batch, context))
    seconds = share * (whole.total - whole.seconds["head"])
    return [batch / (k * seconds) for k in range(1, min(most, shape.layers // group) + 1)]


HELIX = {  # fields of --problem; --model decodes in bf16
    "nodes": {"h100": 1, "a100-80gb": 2, "a100-40gb": 4},  # or name: [tokens/s of 1, 2, ... groups]
    "group": 8,  # layers that are placed together
    "batch": 32,  # sequences that a node decodes at a time
    "context": 2048,  # tokens of each
    "network": 1.25e9,  # bytes/s from node to node: 10 Gb/s
    "requests": 1000,  # to route
    "seconds": 30.0,  # for the solver
}


def make_cluster(shape: Shape, p: argparse.Namespace) -> Cluster:
    """The nodes and links of a problem."""
    layers, odd = divmod(shape.layers, p.group)
    ok = layers > 0 and odd == 0
    require(ok, f"--problem: {shape.layers} layers are not divisible into groups of {p.group}")
    rates: dict[str, Sequence[float]] = {}
    for name, given in p.nodes.items():
        known = is_count(given) and name in DEVICES
        listed = isinstance(given, list) and given and all(map(is_positive, given))
        names = ", ".join(DEVICES)
        text = f"--problem: nodes: {name} must be a list of tokens/s, or a number of {names}"
        require(known or listed and name != HOST, text)
        found = [given] if listed else [decode_rates(shape, DEVICES[name], p.group, p.batch,
                                                     p.context)] * given  # fmt: skip
        rates |= {name if listed else f"{name}.{i}": row[:layers] for i, row in enumerate(found)}
    rates = {name: row for name, row in rates.items() if row}
    most = sum(map(len, rates.values()))
    ok = most >= layers
    require(ok, f"--problem: nodes hold {most} of {layers} groups of {p.group} layers; add nodes")
    text = f"{len(rates)} x {len(rates)} nodes x {layers} groups of layers are more than 20,000"
    require(len(rates) ** 2 * layers <= 20_000, f"--problem: {text}; use a larger group")
    sizes = {pair: 4 if HOST in pair else 2 * shape.dim  # bytes of a token: its id, or activations
             for pair in itertools.permutations([HOST, *rates], 2)}  # fmt: skip
    links = {pair: LINK_EFFICIENCY * p.network / size for pair, size in sizes.items()}
    return Cluster(layers, rates, links)


def helix_report(args: argparse.Namespace) -> str:
    """The placement, its links' tokens/s, and the pipelines of the next requests."""
    p = read_problem(args, HELIX)
    cluster = make_cluster(load_shape(args.model), p)
    spans, bound = place(cluster, p.seconds)
    flows = cluster.routes(spans)
    require(flows, f"helix: no placement found in {p.seconds:g} s; use a larger group")
    total = sum(f for (a, _), f in flows.items() if a == HOST)
    robin = RoundRobin(flows)
    paths = [tuple(robin.pipeline()) for _ in range(p.requests)]
    lines = [f"{args.model}: {total:,.0f} tokens/s, {total / bound:.1%} of the upper bound"]
    used = {n: span for n, span in spans.items() if any(n in link for link in flows)}
    for name, (first, end) in sorted(used.items(), key=lambda item: item[1]):
        to = ", ".join(f"{f:,.0f} to {b}" for (a, b), f in flows.items() if a == name)
        layers = f"{first * p.group} to {end * p.group - 1}"
        lines.append(f"  {name:<14}layers {layers:<12}{to}")
    lines.append(f"pipelines of {p.requests:,} requests")
    for path in sorted({*paths}, key=paths.count, reverse=True):
        lines.append(f"{paths.count(path):>7}  {' > '.join(path)}")
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------
# Spindle: waves of a multi-task model
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """`count` equal operators in a row (a MetaOp), seconds[n]: of one on n devices; after: tasks
    whose outputs it reads."""

    count: int
    seconds: Mapping[int, float]
    after: tuple[str, ...] = ()


class Wave(NamedTuple):
    """Tasks that run side by side: name -> (devices, operators)."""

    seconds: float
    runs: dict[str, tuple[int, int]]


def lower_hull(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (x, y) on the lower convex hull, from the least x to the least y."""
    hull: list[tuple[float, float]] = []
    slope = lambda a, b: (b[1] - a[1]) / (b[0] - a[0])
    for x, y in sorted(points):
        if hull and y >= hull[-1][1]:
            continue
        while len(hull) > 1 and slope(hull[-2], hull[-1]) >= slope(hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    return hull


def speed_hull(task: Task, devices: int) -> list[tuple[int, float]]:
    """(devices, operators per second), from (0, 0) up: the concave hull of the scaling curve, the
    mean speeds that time-sharing of allocations reaches."""
    speeds = ((n, -1 / t) for n, t in task.seconds.items() if n <= devices)
    return [(n, -speed) for n, speed in lower_hull([(0, 0.0), *speeds])]


def relax(tasks: Mapping[str, Task], devices: int) -> tuple[float, dict[str, float]]:
    """(seconds, devices of each task) of independent tasks that end together on fractions of
    devices. No schedule is shorter: speeds are concave, so constant allocations are best (theorem
    1; Blazewicz et al., Annals of OR 2004)."""
    hulls = {name: speed_hull(task, devices) for name, task in tasks.items()}

    def needed(name: str, seconds: float) -> float:
        speed = tasks[name].count / seconds
        for (n0, s0), (n1, s1) in itertools.pairwise(hulls[name]):
            if speed <= s1:
                return n0 + (n1 - n0) * (speed - s0) / (s1 - s0)
        return math.inf

    low, high = 0.0, 2 * sum(t.count / hulls[name][1][1] for name, t in tasks.items())
    for _ in range(60):
        middle = (low + high) / 2
        fits = sum(needed(name, middle) for name in tasks) <= devices
        low, high = (low, middle) if fits else (middle, high)
    return high, {name: needed(name, high) for name in tasks}


def allocations(tasks: Mapping[str, Task], devices: int) -> Iterator[dict[str, int]]:
    """All ways to run some of the tasks side by side: name -> devices."""
    if not tasks:
        yield {}
        return
    (name, task), *others = tasks.items()
    for n in [0, *(n for n in task.seconds if n <= devices)]:
        for rest in allocations(dict(others), devices - n):
            yield {name: n} | rest if n else rest


def level_waves(tasks: Mapping[str, Task], devices: int) -> list[Wave]:
    """Waves of independent tasks. Each wave, of up to 4 of the tasks with the most work left, is
    the one that does the most work per second, the longer of equal ones. An operator's work is its
    device-seconds in the relaxed plan, so that a wave of 1 second does at most `devices`. (The
    paper rounds the relaxed plan to two allocations of each task and fills waves with those.)"""
    seconds, shares = relax(tasks, devices)
    work = {name: shares[name] * seconds / task.count for name, task in tasks.items()}
    left, waves = {name: task.count for name, task in tasks.items()}, []
    while names := sorted((n for n in left if left[n]), key=lambda n: -left[n] * work[n])[:4]:
        best, found = (0.0, 0.0), None
        for chosen in allocations({n: tasks[n] for n in names}, devices):
            times = {name: tasks[name].seconds[n] for name, n in chosen.items()}
            for end in (c * t for name, t in times.items() for c in range(1, left[name] + 1)):
                counts = {n: min(left[n], int(end * (1 + 1e-9) / t)) for n, t in times.items()}
                took = max(counts[n] * t for n, t in times.items())
                rate = sum(counts[n] * work[n] for n in times) / took if took else 0.0
                if all(counts.values()) and best < (key := (round(rate, 9), took)):
                    runs = {n: (chosen[n], count) for n, count in counts.items()}
                    best, found = key, Wave(took, runs)
        for name, (_, count) in found.runs.items():
            left[name] -= count
        waves.append(found)
    return waves


def one_by_one(tasks: Mapping[str, Task], devices: int) -> list[Wave]:
    """Each task alone, on the allocation that is fastest."""
    waves = []
    for name, task in tasks.items():
        n = min((n for n in task.seconds if n <= devices), key=task.seconds.__getitem__)
        waves.append(Wave(task.count * task.seconds[n], {name: (n, task.count)}))
    return waves


def plan_waves(tasks: Mapping[str, Task], devices: int) -> tuple[list[Wave], float]:
    """(waves, a lower bound of their time): tasks at the same depth of the graph share waves, one
    depth after the other. The bound is of plans by depth: a plan that mixes depths can be shorter.
    """
    depth: dict[str, int] = {}
    while len(depth) < len(tasks):
        ready = [n for n in tasks if n not in depth and {*tasks[n].after} <= {*depth}]
        require(ready, "spindle: 'after' names an unknown task, or tasks wait for each other")
        depth |= {n: 1 + max((depth[a] for a in tasks[n].after), default=-1) for n in ready}
    waves, bound = [], 0.0
    for level in sorted({*depth.values()}):
        some = {n: t for n, t in tasks.items() if depth[n] == level}
        for name, task in some.items():
            ok = min(task.seconds) <= devices
            require(ok, f"spindle: {name} needs {min(task.seconds)} devices of {devices}")
        ways = level_waves(some, devices), one_by_one(some, devices)
        waves += min(ways, key=lambda found: sum(wave.seconds for wave in found))
        bound += relax(some, devices)[0]
    return waves, bound


SPINDLE = {
    "tasks": {  # layers, width, heads, tokens of a sample, samples, [tasks before it]
        # ViT-H's layers (arXiv:2010.11929, table 1), wav2vec 2.0 Large's (2006.11477), BERT's
        "image": [32, 1280, 16, 256, 64, []],
        "audio": [24, 1024, 16, 512, 32, []],
        "text": [12, 768, 12, 512, 32, []],
        "image-text": [12, 1024, 16, 768, 32, ["image", "text"]],
        "audio-text": [12, 1024, 16, 1024, 16, ["audio", "text"]],
    },
}


def block(layers: int, dim: int, heads: int) -> Shape:
    """Layers in GPT's form, without embedding and head."""
    return Shape(layers, dim, heads, heads, dim // heads, 4 * dim, 0, gpt=True)


def passes(shape: Shape, device: Device, seq: int, plan: Plan = Plan()) -> tuple[float, float]:
    """Seconds of a layer's (forward, backward and recomputation) for a micro-batch."""
    forward, backward, again = zip(*layer_seconds(shape, device, seq, plan).values())
    return sum(forward), sum(backward) + sum(again)


def make_task(name: str, given: Any, device: Device, gpus: int) -> Task:
    """A task of a problem: given times, or those of formulas with its samples divided over GPUs,
    without the all-reduce of their gradients."""
    try:
        *sizes, after = given
        if len(sizes) == 2:
            count, seconds = sizes[0], {int(n): t for n, t in sizes[1].items()}
            ok = min(seconds) > 0 and all(map(is_positive, seconds.values()))
        else:
            count, dim, heads, seq, samples = sizes
            ok = all(map(is_count, sizes)) and dim % heads == 0
            one = lambda n: sum(passes(block(1, dim, heads), device, seq, Plan(micro=samples // n)))
            seconds = {n: one(n) for n in divisors(samples) if n <= gpus} if ok else {}
        ok = ok and is_count(count) and isinstance(after, list)
        require(ok and all(isinstance(a, str) for a in after), "")
        return Task(count, seconds, tuple(after))
    except (TypeError, ValueError, AttributeError):
        raise ValueError(
            f"--problem: tasks: {name} must be [layers, width, heads, tokens, samples, [before]] "
            "or [count, {GPUs: seconds}, [before]], with positive numbers and whole heads"
        ) from None


def spindle_report(args: argparse.Namespace) -> str:
    """The waves, and their time beside that of one task after another and the bound."""
    p, device, gpus = read_problem(args, SPINDLE), load_device(args.device), parse_number(args.gpus)
    tasks = {name: make_task(name, given, device, gpus) for name, given in p.tasks.items()}
    waves, bound = plan_waves(tasks, gpus)
    total, alone = (sum(w.seconds for w in found) for found in (waves, one_by_one(tasks, gpus)))
    lines = [
        f"{len(tasks)} tasks on {gpus} {args.device}: {total * 1e3:.2f} ms; one after another "
        f"{alone * 1e3:.2f}; by depth, no plan takes less than {bound * 1e3:.2f}",
        f"{'ms':>9}{'GPUs':>6}  operators on GPUs",
    ]
    for seconds, runs in waves:
        used = sum(n for n, _ in runs.values())
        text = ", ".join(f"{name} {count} on {n}" for name, (n, count) in runs.items())
        lines.append(f"{seconds * 1e3:>9.2f}{used:>6}  {text}")
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------
# Problems of the command line
# --------------------------------------------------------------------------------------------------


def is_positive(value: Any) -> bool:
    """Whether a value from JSON is a number above 0, and not too large for a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1e18


def is_count(value: Any) -> bool:
    """Whether a value from JSON is a whole number from 1 to 10^6."""
    return isinstance(value, int) and is_positive(value) and value <= 10**6


def read_json(text: str) -> Any:
    """JSON, inline or in a file."""
    try:
        if text.lstrip().startswith("{"):
            return json.loads(text)
        return json.loads(Path(text).read_text())
    except OSError:
        raise ValueError(f"--problem {text[:60]} is neither a file nor an object in JSON") from None
    except (ValueError, RecursionError) as e:
        raise ValueError(f"--problem: not JSON ({e})") from None


def read_problem(args: argparse.Namespace, fields: Mapping[str, Any]) -> argparse.Namespace:
    """`fields`, some of them replaced by those of --problem. ValueError for unknown fields, and for
    values that are not as the defaults: positive, whole, or not empty (None: any value)."""
    given = {} if args.problem is None else read_json(args.problem)
    require(isinstance(given, dict), "--problem must be an object in JSON")
    for name, value in given.items():
        known = ", ".join(fields)
        require(name in fields, f"--problem: {name} is no field of {args.search}; it has {known}")
        like = fields[name]
        if isinstance(like, (int, float)):
            ok = (is_count if isinstance(like, int) else is_positive)(value)
        else:  # None: checked by the search
            ok = like is None or isinstance(value, type(like)) and len(value) > 0
        example, found = json.dumps(like)[:60], json.dumps(value)[:60]
        require(ok, f"--problem: {name} must be of the form {example}, not {found}")
    return argparse.Namespace(**fields | given)


METHODS: dict[str, Callable[[argparse.Namespace], str]] = {
    "helix": helix_report,
    "spindle": spindle_report,
}
