"""Helix: which layers each of unequal GPUs serves, and which GPUs a request passes.

    python -m planner search helix --model llama3-70b --problem '{"group": 10}'

The layers of each node are a mixed-integer program over a flow of tokens from node to node, and a
weighted round robin sends requests along the flow's links (arXiv:2406.01566). The placement is
exact, or within the bound that is printed.

When it loses: rates come from formulas or from --problem, not from a profile of the machine. The
program grows with GPUs x GPUs x layers: place groups of layers. Nodes always have a full batch; the
paper's estimate of KV memory in use is left out. test_all.py compares it with all placements of
small random problems. Needs: scipy.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import argparse
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.cost_model import DEVICES, LINK_EFFICIENCY, Device, Shape, load_shape, require
from planner.flags import is_count, is_positive, read_problem
from planner.serving_cost import Layout, achieved, decode_work, kv_bytes_per_token, step
from planner.solvers import Arcs, IntegerProgram, max_flow
from planner.training_plan import layer_parameters

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


def place(cluster: Cluster, seconds: float = 30.0) -> tuple[dict[str, Span], float]:
    """(layers of each used node, upper bound of the throughput) that maximize the flow. The bound
    is reached unless the solver stops after `seconds`: ValueError if it has found nothing then.

    Integer (n, first, end): 1 if that is the node's span. (a, b, e): flow of tokens that have
    passed e layers, at most the rate of a's span if it ends at e, and of b's span if it covers
    layer e. The paper has one flow per link, switched by both ends' layers; a flow per e makes the
    relaxation tighter. Flows are in thousandths of the fastest node or link: the solver's
    tolerances are absolute.
    """
    L, program = cluster.layers, IntegerProgram()
    unit = min(max(map(max, cluster.rates.values())), max(cluster.links.values())) / 1000
    most = 1000 * (len(cluster.rates) + 1)  # of all links into a node
    rates = {n: [min(r / unit, most) for r in row] for n, row in cluster.rates.items()}
    spans = {n: [(n, s, e) for s in range(L) for e in range(s + 1, min(L, s + len(row)) + 1)]
             for n, row in rates.items()}  # fmt: skip
    every = [*itertools.chain(*spans.values())]
    for span in every:
        program.add(span, most=1, integer=True)
    into, out = add_flows(program, cluster, unit)
    terms = lambda names, c=1.0: [(v, c) for v in names]

    def limit_to_rates(flows: Sequence[tuple], able: Iterable[tuple[str, int, int]]) -> None:
        rated = [((n, s, e), -rates[n][e - s - 1]) for n, s, e in able]
        program.limit([*terms(flows), *rated], -math.inf, 0)

    for n, own in spans.items():
        program.limit(terms(own), 0, 1)
        kept = [terms(into[n, e]) + terms(out[n, e], -1.0) for e in range(L + 1)]
        program.limit(itertools.chain(*kept), 0, 0)
        for e in range(L + 1):
            limit_to_rates(into[n, e], [v for v in own if v[1] <= e < v[2]])
            limit_to_rates(out[n, e], [v for v in own if v[2] == e])
    for e in range(L):  # implied: every token passes every layer
        limit_to_rates(out[HOST, 0], [v for v in every if v[1] <= e < v[2]])
    for a, b in itertools.pairwise(rates):  # equal nodes in the order of their first layers
        if cluster.equal(a, b):
            firsts = [(v, v[1]) for v in spans[a]] + [(v, -v[1]) for v in spans[b]]
            program.limit(firsts, -math.inf, 0)
    found = program.minimize(seconds)
    require(found, f"helix: no placement found in {seconds:g} s; use a larger group")
    return {n: (s, e) for n, s, e in every if found.values[n, s, e] > 0.5}, -found.bound * unit


def add_flows(program: IntegerProgram, cluster: Cluster, unit: float) -> tuple[dict, dict]:
    """A variable per link and number of layers passed, with the rate of links as their limit, and
    those from the host to maximize. ((node, layers passed) -> variables) into and out of nodes."""
    into, out = defaultdict(list), defaultdict(list)
    for (a, b), rate in cluster.links.items():
        passed = [0] if a == HOST else [cluster.layers] if b == HOST else range(1, cluster.layers)
        for e in passed:
            program.add((a, b, e), cost=-1 if a == HOST else 0)
            out[a, e].append((a, b, e))
            into[b, e].append((a, b, e))
        program.limit([((a, b, e), 1.0) for e in passed], 0, min(rate / unit, 1000))
    return into, out


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
    most = int(device.model_memory / (weights + kv))
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
