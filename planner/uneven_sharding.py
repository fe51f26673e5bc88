"""HAP: uneven shards of every operator on heterogeneous GPUs.

    python -m planner search hap --device h100:4,a100-80gb:4

On heterogeneous GPUs equal shards wait for the slowest one. HAP (arXiv:2401.05965) gives each GPU
one share of all sharded operators, by a linear program for given letters (auto_sharding.py), and
chooses the letters for given shares, in turn, until neither improves. Its paper finds the letters
by A* search; costs add up, so Alpa's integer program has the same optimum. An all-gather or
all-reduce pads the shards to the largest one, or sends each from its GPU in turn.

When it loses: shares are real numbers, not whole sequences and heads; costs are sums, nothing
overlaps; all GPUs are one ring on the slowest network, even within a node; only dense models
without latent attention. The result is a local optimum. test_all.py compares the linear program
with enumeration. Needs: scipy (HiGHS) and numpy, imported when they are used.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import argparse
import math
from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

from planner.auto_sharding import (
    choose_shardings,
    layer_graph,
    op_transfers,
    operator_seconds,
    reshard_transfers,
)
from planner.cost_model import DEVICES, LINK_EFFICIENCY, Device, Shape, load_shape, require
from planner.solvers import IntegerProgram
from planner.training_plan import (
    LOGITS_BYTES,
    activation_bytes,
    count_ends,
    divisors,
    head_seconds,
    parse_batch,
)


def sharding_ratios(
    work: Sequence[Sequence[float]], padded: float, largest: Sequence[float]
) -> tuple[float, list[float]]:
    """The share of each GPU in every sharded operator that minimizes the step, as a linear
    program. work[o][g]: seconds of operator o on GPU g alone; all wait for the slowest after each.
    padded: seconds of all collectives per unit of the largest share, as shards are padded to it.
    largest: share that fits the memory of each. (inf, []) if these add up to less than 1."""
    program = IntegerProgram()
    for g, most in enumerate(largest):
        program.add(("share", g), most=max(0.0, min(1.0, most)))
    for o in range(len(work)):
        program.add(("seconds", o), 1.0)
    program.add("largest", padded)
    for (o, row), g in product(enumerate(work), range(len(largest))):
        program.limit([(("share", g), row[g]), (("seconds", o), -1)], -math.inf, 0)
    shares = [("share", g) for g in range(len(largest))]
    for share in shares:
        program.limit([(share, 1), ("largest", -1)], -math.inf, 0)
    program.limit([(share, 1) for share in shares], 1, 1)
    found = program.minimize()
    return (found.objective, [found.values[s] for s in shares]) if found else (math.inf, [])


class Program(NamedTuple):
    """seconds: of a micro-batch; equal: with equal shares, whether they fit or not. letters: of
    each operator. ratios: share of each GPU."""

    seconds: float
    letters: list[str]
    ratios: list[float]
    equal: float


class Cluster:
    """Costs of a layer's operators on a mesh of one axis over all GPUs. padded: whether all-gathers
    and all-reduces pad shards to the largest, or send each from its GPU in turn."""

    def __init__(
        self, shape: Shape, devices: Sequence[Device], seq: int, sequences: int, micros: int,
        padded: bool,
    ) -> None:  # fmt: skip
        self.shape, self.devices, self.padded = shape, devices, padded
        self.tokens, self.micros = sequences * seq, micros
        self.operators, self.widths = layer_graph(shape, seq)
        self.options = [list(op.letters) for op in self.operators]
        self.equal = [1 / len(devices)] * len(devices)
        self.wire = LINK_EFFICIENCY * min(d.network for d in devices)
        self.alpha = max(d.alpha[1] for d in devices)
        self.seconds = [
            [operator_seconds(op, d, self.tokens) for d in devices] for op in self.operators
        ]

    def transfers(self, moves: Iterable[tuple[str, float, int]]) -> tuple[float, float]:
        """Seconds of collectives: (fixed, per unit of the largest share). The largest shard takes
        n - 1 steps of a ring; in an all-to-all, (n - 1) / n of it is sent."""
        n, fixed, slope = len(self.devices), 0.0, 0.0
        for kind, size, _ in moves:
            times, seconds = 2 if kind == "all-reduce" else 1, size / self.wire
            fixed += times * n * self.alpha
            if kind == "all-to-all":
                slope += (n - 1) / n * seconds
            elif self.padded:
                slope += times * (n - 1) * seconds
            else:
                fixed += times * seconds
        return fixed, slope

    def operator(self, v: int, letter: str) -> tuple[float, float]:
        """`transfers` of operator v."""
        axes = [len(self.devices)]
        return self.transfers(
            op_transfers(self.operators[v], letter, axes, self.tokens, self.micros)
        )

    def edge(self, u: int, v: int, before: str, after: str) -> tuple[float, float]:
        """`transfers` between operators u and v."""
        size = 2 * self.tokens * self.widths[u, v]
        return self.transfers(reshard_transfers(before, after, [len(self.devices)], size))

    def bytes(self, g: int) -> tuple[float, float, float]:
        """Of GPU g: what it has free, what a weight needs, what its share of the rest needs."""
        s = self.shape
        saved = s.layers * activation_bytes(s, "full", True) + activation_bytes(s, "none", True)
        ends = 18 * count_ends(s, True, True) * s.dim * s.vocab
        free = self.devices[g].model_memory
        return free, 18 * s.layers, self.tokens * (saved + LOGITS_BYTES * s.vocab) + ends

    def choose(self, ratios: Sequence[float]) -> list[str]:
        """The letters with the least time for given shares; [] if none fits in memory."""
        top, price = max(ratios), lambda pair: pair[0] + top * pair[1]
        work = lambda v, x: max(
            t * (1 if x == "r" else r) for t, r in zip(self.seconds[v], ratios)
        )
        every = list(enumerate(self.options))
        costs = [[work(v, x) + price(self.operator(v, x)) for x in own] for v, own in every]
        edges = {
            (u, v): [[price(self.edge(u, v, x, y)) for y in self.options[v]]
                     for x in self.options[u]]
            for u, v in self.widths
        }  # fmt: skip
        budgets = []
        for g, r in enumerate(ratios):
            free, weight, rest = self.bytes(g)
            use = [[weight * self.operators[v].weights * (r if x in "jk" else 1) for x in own]
                   for v, own in every]  # fmt: skip
            budgets.append((use, max(free - r * rest, 1.0)))
        _, chosen = choose_shardings(costs, edges, budgets)
        return [own[a] for own, a in zip(self.options, chosen)]

    def terms(self, letters: Sequence[str]) -> tuple[float, float, list[list[float]]]:
        """Seconds of the layers: fixed, per unit of the largest share, and of each sharded operator
        and the head on each GPU alone."""
        L, every = self.shape.layers, list(enumerate(letters))
        pairs = [self.operator(v, x) for v, x in every]
        pairs += [self.edge(u, v, letters[u], letters[v]) for u, v in self.widths]
        fixed, slope = (L * sum(part) for part in zip(*pairs))
        fixed += L * sum(max(self.seconds[v]) for v, x in every if x == "r")
        work = [[L * t for t in self.seconds[v]] for v, x in every if x != "r"]
        head = [head_seconds(self.shape, d, self.tokens) for d in self.devices]
        return fixed, slope, [*work, head]

    def step(self, letters: Sequence[str], ratios: Sequence[float]) -> float:
        """Seconds of a micro-batch for given letters and shares."""
        fixed, slope, work = self.terms(letters)
        slowest = (max(t * r for t, r in zip(row, ratios)) for row in work)
        return fixed + slope * max(ratios) + sum(slowest)

    def balance(self, letters: Sequence[str]) -> Program:
        """The shares with the least time for given letters."""
        fixed, slope, work = self.terms(letters)
        sharded = sum(op.weights for op, x in zip(self.operators, letters) if x in "jk")
        whole = sum(op.weights for op in self.operators) - sharded
        needs = map(self.bytes, range(len(self.devices)))
        largest = [(free - each * whole) / (rest + each * sharded) for free, each, rest in needs]
        seconds, ratios = sharding_ratios(work, slope, largest)
        return Program(fixed + seconds, list(letters), ratios, self.step(letters, self.equal))


def hap(
    shape: Shape, devices: Sequence[Device], seq: int, sequences: int, micros: int
) -> Program | None:
    """Shardings and shares, optimized in turn until neither improves, from equal shares and from
    shares by memory; None if nothing fits."""
    best, total = None, sum(d.memory for d in devices)
    for padded in (True, False):
        cluster = Cluster(shape, devices, seq, sequences, micros, padded)
        for ratios in (cluster.equal, [d.memory / total for d in devices]):
            found = None
            while letters := cluster.choose(ratios):
                new = cluster.balance(letters)
                if not new.ratios or found and new.seconds >= found.seconds * (1 - 1e-9):
                    break
                found, ratios = new, new.ratios
            if found and (best is None or found.seconds < best.seconds):
                best = found
    return best


def parse_cluster(text: str) -> list[str]:
    """ "h100:2,a100-80gb:4" -> the device of each GPU"""
    counts: dict[str, int] = {}
    for part in text.split(","):
        name, _, count = part.partition(":")
        n = int(count or 1) if (count or "1").isdecimal() else 0
        ok = name in DEVICES and n > 0
        require(ok, f"--device {part} is not DEVICE:COUNT, such as h100:4,a100-80gb:4")
        counts[name] = counts.get(name, 0) + n
    n = sum(counts.values())
    require(2 <= n <= 256, f"search hap: --device {text} is {n} GPUs; use 2 to 256, as in h100:4")
    return [name for name, n in counts.items() for _ in range(n)]


def hap_report(args: argparse.Namespace) -> str:
    """The shares of each kind of GPU, and the time beside equal shares."""
    shape, names = load_shape(args.model), parse_cluster(args.device)
    seq, batch = parse_batch(args)
    micro = 1 if args.micro is None else args.micro
    require(micro > 0, f"--micro must be positive, not {micro}")
    sequences = max(d for d in divisors(batch) if d <= micro * len(names))
    micros = batch // sequences
    devices = [DEVICES[name] for name in names]
    got = hap(shape, devices, seq, sequences, micros)
    require(got, f"hap: {args.model} does not fit {args.device}; add GPUs or lower --micro")
    letters = zip((op.name for op in layer_graph(shape, seq)[0]), got.letters)
    rows = [f"  {name:<14}{names.count(name):>4} x {got.ratios[names.index(name)]:.4f}"
            for name in dict.fromkeys(names)]  # fmt: skip
    return "\n".join((
        f"{micros * got.seconds:.2f} s/step, {micros} micro-batches of {sequences} sequences",
        f"equal shares of {1 / len(names):.4f}: {micros * got.equal:.2f} s/step",
        *rows,
        "sharded: " + " ".join(f"{name}:{x}" for name, x in letters),
        "train.py: has equal shards only",
    ))  # fmt: skip
