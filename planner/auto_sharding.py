"""A sharding for every operator of a layer: Alpa, on submeshes for stages; HAP, on unequal GPUs.

    python -m planner search alpa --model llama3-70b --gpus 64
    python -m planner search hap --device h100:4,a100-80gb:4

A layer is a graph of seven operators: norm qkv attention out norm up down. On each axis of a mesh
of GPUs an operator is split in one way. The layouts of its input and output on that axis have
Alpa's names: S0, sharded along dimension 0, the tokens; S1, along dimension 1, the features; R,
replicated.

    split     input  output
    TOKENS    S0     S0      all-reduces the gradients of its weights: data parallelism
    COLUMNS   R      S1      all-reduces the gradients of its inputs (Megatron's column parallelism)
    ROWS      S1     R       all-reduces its outputs                 (Megatron's row parallelism)
    HEADS     S1     S1      nothing
    WHOLE     R      R       nothing; every GPU of the axis does the same work

If a tensor's layout differs where it is produced and where it is used, the edge between the two
costs an all-gather or an all-to-all. Alpa (arXiv:2201.12023, 4.2) chooses the splits by an integer
linear program, for every submesh that a stage may have, and the stages and their submeshes by a
dynamic program around it (5.2; schedules.partition). Where weights do not fit, it finds Megatron's
tensor parallelism: qkv by columns, attention by heads, out by rows, up by columns, down by rows.

On heterogeneous GPUs equal shards wait for the slowest one. HAP (arXiv:2401.05965) gives each GPU
one share of all sharded operators, by a linear program for given splits, and chooses the splits for
given shares, in turn, until neither improves. Its paper finds the splits by A* search; costs add
up, so Alpa's integer program has the same optimum. An all-gather or all-reduce pads the shards to
the largest one, or sends each from its GPU in turn.

When it loses: costs are sums, nothing overlaps, and the times are therefore above those of
training_plan.py; only dense models without latent attention. Alpa: activations count as sharded
over all GPUs of a stage, whatever the splits. Searched are at most 32 groups of layers, 16 groups
of GPUs and 16 GPUs per sequence, as the dynamic program is in Python (1,024 GPUs take a minute).
HAP: shares are real numbers, not whole sequences and heads; all GPUs are one ring on the slowest
network, even within a node; the result is a local optimum. test_all.py compares the three programs
with enumeration. Needs: scipy (HiGHS) and numpy, imported when they are used.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, product
from typing import NamedTuple

from parallelism.schedules import partition
from planner.cost_model import (
    ATTENTION_EFFICIENCY,
    DEVICES,
    GEMM_EFFICIENCY,
    HBM_EFFICIENCY,
    KERNEL_OVERHEAD,
    LINK_EFFICIENCY,
    Device,
    Shape,
    all_to_all,
    load_shape,
    model_flops,
    recomputed_flops,
    require,
    ring,
    score_width,
)
from planner.solvers import IntegerProgram
from planner.training_plan import (
    LAYER_HBM_BYTES,
    LOGITS_BYTES,
    RECOMPUTE,
    Plan,
    activation_bytes,
    count_ends,
    divisors,
    head_seconds,
    hop_seconds,
    parse_batch,
    parse_job,
    train_flags,
)

# --------------------------------------------------------------------------------------------------
# Operators and their splits
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Split:
    """How one axis of a mesh splits an operator: what it shards, and the layouts of the input and
    the output on the axis. Compared by identity: there are five."""

    what: str
    input: str
    output: str


TOKENS = Split("tokens", "S0", "S0")
COLUMNS = Split("columns", "R", "S1")
ROWS = Split("rows", "S1", "R")
HEADS = Split("heads", "S1", "S1")
WHOLE = Split("whole", "R", "R")
SHARDED_WEIGHTS = (COLUMNS, ROWS)
Splits = tuple[Split, ...]  # of an operator, by axis of the mesh


class Operator(NamedTuple):
    """splits: that an axis may have. flops, hbm, width_in, width_out: per token, FLOPs of the
    forward pass, HBM bytes of forward and backward, and elements of the input and the output.
    weights: their number. parts: (heads, key-value heads), which stay whole, or features."""

    name: str
    splits: Splits
    flops: float
    hbm: float
    weights: float
    width_in: float
    width_out: float
    parts: tuple[int, int]


@cache
def layer_graph(shape: Shape, seq: int) -> tuple[list[Operator], dict[tuple[int, int], float]]:
    """The operators of a dense layer, and elements per token of the tensor between any two. Norms
    and residual additions are one operator. The last edges lead to the next layer's first."""
    require(not shape.experts and not shape.kv_rank,
            "search alpa and hap require a dense --model without latent attention")  # fmt: skip
    (c, f), (c_back, f_back) = LAYER_HBM_BYTES[True]
    C, F, heads = shape.dim, shape.ffn, (shape.heads, shape.kv_heads)
    *qkv, out = shape.attention()
    ups = len(shape.feed_forward(False)) - 1
    norm = Operator("norm", (TOKENS, WHOLE), 0, (c + c_back) / 2 * C, 0, C, C, (C, C))
    width = sum(m.n for m in qkv)

    def linear(name: str, k: int, n: int, hbm: float, parts: tuple[int, int]) -> Operator:
        every = (TOKENS, COLUMNS, ROWS, WHOLE)
        return Operator(name, every, 2 * k * n, hbm, k * n, k, n, parts)

    flops = seq * score_width(shape)
    operators = [
        norm,
        linear("qkv", C, width, 0, heads),
        Operator("attention", (TOKENS, HEADS, WHOLE), flops, 0, 0, width, out.k, heads),
        linear("out", out.k, C, 0, heads),
        norm,
        linear("up", C, ups * F, (f + f_back) * F, (F, F)),
        linear("down", F, C, 0, (F, F)),
    ]
    edges = {(0, 1): C, (1, 2): width, (2, 3): out.k, (3, 4): C, (4, 5): C, (5, 6): F}
    return operators, edges | {(0, 4): C, (6, 0): C, (4, 0): C}


def degree(splits: Splits, axes: Sequence[int], which: Splits) -> int:
    """Over how many GPUs the axes with a split of `which` shard."""
    return math.prod(n for n, split in zip(axes, splits) if split in which)


def shardings(op: Operator, axes: Sequence[int], sequences: int) -> Iterator[Splits]:
    """A split per mesh axis, such that whole sequences and heads are on a GPU."""
    heads, kv_heads = op.parts
    for splits in product(*(op.splits if n > 1 else (WHOLE,) for n in axes)):
        n = degree(splits, axes, (COLUMNS, ROWS, HEADS))
        whole_heads = heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
        if whole_heads and sequences % degree(splits, axes, (TOKENS,)) == 0:
            yield splits


def operator_seconds(op: Operator, device: Device, tokens: float) -> float:
    """Forward and backward seconds of an operator on one GPU, without launches."""
    ahead, back = ATTENTION_EFFICIENCY["fa3"]
    cost = 1 / ahead + 2.5 / back if op.name == "attention" else 3 / GEMM_EFFICIENCY
    return tokens * (op.flops * cost / device.bf16 + op.hbm / (HBM_EFFICIENCY * device.hbm))


def op_transfers(
    op: Operator, splits: Splits, axes: Sequence[int], tokens: float, micros: int
) -> Iterator[tuple[str, float, int]]:
    """(collective, bytes, axis) of an operator per micro-batch; gradients of weights are reduced
    once for all `micros`. Bytes: of the tensor that the ranks of the axis have together."""
    if not op.weights:
        return
    by = partial(degree, splits, axes)
    for axis, split in enumerate(splits):
        if split is TOKENS:
            yield "all-reduce", 4 * op.weights / by(SHARDED_WEIGHTS) / micros, axis
        elif split is COLUMNS:
            yield "all-reduce", 2 * tokens * op.width_in / by((TOKENS, ROWS)), axis
        elif split is ROWS:
            yield "all-reduce", 2 * tokens * op.width_out / by((TOKENS, COLUMNS)), axis


def reshard_transfers(
    before: Splits, after: Splits, axes: Sequence[int], size: float
) -> Iterator[tuple[str, float, int]]:
    """(collective, bytes, axis), forward and backward, that bring a tensor of `size` bytes from the
    output layout of one operator's splits to the input layout of the next one's (Alpa, table 2)
    and its gradient back."""
    pairs = [(x.output, y.input) for x, y in zip(before, after)]
    for axis, (x, y) in enumerate(pairs):
        parts = math.prod(axes[b] for b, (_, z) in enumerate(pairs) if b != axis and z != "R")
        if x != y and "R" in (x, y):  # to R: forward; from R: the gradient
            yield "all-gather", size / parts, axis
        elif x != y:
            yield from [("all-to-all", size / parts, axis)] * 2


def transfer_seconds(
    device: Device, axes: Sequence[int], kind: str, size: float, axis: int
) -> float:
    """Seconds of a collective on one axis of a mesh whose last axis is within a node."""
    n, stride = axes[axis], math.prod(axes[axis + 1 :])
    if kind == "all-to-all":  # each rank sends its shard
        return all_to_all(size / n, n, stride, device)
    return (2 if kind == "all-reduce" else 1) * ring(size, n, stride, device)


def choose_shardings(
    costs: Sequence[Sequence[float]],
    edges: dict[tuple[int, int], Sequence[Sequence[float]]],
    budgets: Sequence[tuple[Sequence[Sequence[float]], float]] = (),
) -> tuple[float, list[int]]:
    """The choice of each node that minimizes the sum of costs[node][choice] and of edges[u, v]
    [choice of u][choice of v] (Alpa, 4.2, equation 1), and that sum. budgets: (use of each node's
    choices, limit of their sum). (inf, []) if no choice satisfies them.

    Integer (v, a) is 1 if node v has choice a. Continuous (u, v, a, b), of a pair of choices of an
    edge, has these of either end as its marginals, so that it is their product. Costs are in units
    of the largest: the solver's tolerances are absolute."""
    program = IntegerProgram()
    flat = [x for own in (*costs, *chain(*edges.values())) for x in own]
    unit = max(*flat, 1e-30)
    for v, own in enumerate(costs):
        for a, x in enumerate(own):
            program.add((v, a), x / unit, most=1, integer=True)
        program.limit([((v, a), 1) for a in range(len(own))], 1, 1)
    for (u, v), matrix in edges.items():
        first, second = range(len(costs[u])), range(len(costs[v]))
        for a, b in product(first, second):
            program.add((u, v, a, b), matrix[a][b] / unit, most=1)
        for a in first:
            program.limit([*(((u, v, a, b), 1) for b in second), ((u, a), -1)], 0, 0)
        for b in second:
            program.limit([*(((u, v, a, b), 1) for a in first), ((v, b), -1)], 0, 0)
    for use, limit in budgets:
        terms = [((v, a), x / limit) for v, own in enumerate(use) for a, x in enumerate(own)]
        program.limit(terms, -math.inf, 1)
    found = program.minimize()
    if not found:
        return math.inf, []
    chosen = [max(range(len(own)), key=lambda a: found.values[v, a]) for v, own in enumerate(costs)]
    total = sum(own[a] for own, a in zip(costs, chosen))
    return total + sum(m[chosen[u]][chosen[v]] for (u, v), m in edges.items()), chosen


# --------------------------------------------------------------------------------------------------
# Alpa: shardings of operators, submeshes of stages
# --------------------------------------------------------------------------------------------------


DATA_PARALLEL = (TOKENS,) * 7
TENSOR_PARALLEL = (WHOLE, COLUMNS, HEADS, ROWS, WHOLE, COLUMNS, ROWS)  # Megatron's


class Sharding(NamedTuple):
    """A layer on a mesh: seconds per micro-batch, parameters per GPU, splits of each operator."""

    seconds: float
    weights: float
    axes: tuple[int, int]
    splits: tuple[Splits, ...]

    def by_axis(self) -> list[tuple[int, Splits]]:
        """(GPUs, split of each operator) of the axes that have more than one GPU."""
        return [(n, one) for n, one in zip(self.axes, zip(*self.splits)) if n > 1]

    def degrees(self) -> tuple[int, int] | None:
        """(dp, tp) if each axis is data parallel or Megatron's tensor parallel throughout."""
        sizes = {DATA_PARALLEL: 1, TENSOR_PARALLEL: 1}
        for n, used in self.by_axis():
            if used not in sizes:
                return None
            sizes[used] *= n
        return sizes[DATA_PARALLEL], sizes[TENSOR_PARALLEL]


def layer_shardings(
    shape: Shape, device: Device, seq: int, sequences: int, micros: int, axes: tuple[int, int]
) -> Iterator[Sharding]:
    """The fastest shardings of a layer with at most 1, 1/2, 1/4, ... of its weights per GPU."""
    operators, widths = layer_graph(shape, seq)
    tokens, seconds = sequences * seq, partial(transfer_seconds, device, axes)
    options = [list(shardings(op, axes, sequences)) for op in operators]

    def op_cost(op: Operator, x: Splits) -> float:
        work = operator_seconds(
            op, device, tokens / degree(x, axes, (TOKENS, COLUMNS, ROWS, HEADS))
        )
        launches = 3 * KERNEL_OVERHEAD * (op.flops > 0)
        moved = op_transfers(op, x, axes, tokens, micros)
        return work + launches + sum(seconds(*transfer) for transfer in moved)

    def edge_cost(width: float, x: Splits, y: Splits) -> float:
        moved = reshard_transfers(x, y, axes, 2 * tokens * width)
        return sum(seconds(*transfer) for transfer in moved)

    costs = [[op_cost(op, x) for x in own] for op, own in zip(operators, options)]
    edges = {
        (u, v): [[edge_cost(width, x, y) for y in options[v]] for x in options[u]]
        for (u, v), width in widths.items()
    }
    weights = [[op.weights / degree(x, axes, SHARDED_WEIGHTS) for x in own]
               for op, own in zip(operators, options)]  # fmt: skip
    limit = sum(op.weights for op in operators)
    while limit >= sum(map(min, weights)) * (1 - 1e-9):
        total, chosen = choose_shardings(costs, edges, [(weights, limit * (1 + 1e-9))])
        if not chosen:
            return
        used = sum(own[a] for own, a in zip(weights, chosen))
        yield Sharding(total, used, axes, tuple(own[a] for own, a in zip(options, chosen)))
        while limit > used * (1 - 1e-9):
            limit /= 2


@cache
def submesh_shardings(
    shape: Shape, device: Device, seq: int, sequences: int, micros: int, gpus: int
) -> tuple[Sharding, ...]:
    """Shardings on every logical mesh of `gpus` GPUs whose last axis is within a node."""
    meshes = [(gpus // n, n) for n in divisors(gpus) if n <= device.node]
    if gpus <= device.node:  # both axes are within the node
        meshes = [axes for axes in meshes if axes[0] >= axes[1]]
    found = (layer_shardings(shape, device, seq, sequences, micros, axes) for axes in meshes)
    return tuple(one for some in found for one in some)


def recompute_factor(shape: Shape, seq: int, recompute: str) -> float:
    """Time of a layer over its time without recomputation; 4/3 if full."""
    layers = model_flops(shape, seq) - 6 * shape.dim * shape.vocab
    return 1 + recomputed_flops(shape, seq, recompute) / layers


def stage_sharding(
    shape: Shape, device: Device, seq: int, sequences: int, in_flight: int, recompute: str,
    options: Sequence[Sharding], n: int, first: bool, last: bool,
) -> tuple[float, Sharding | None]:  # fmt: skip
    """Seconds and sharding of a stage of n layers, the fastest of `options` that fits; (inf, None)
    if none does. All but a layer's weights and gradients is sharded over all GPUs of the stage."""
    tokens, gpus = sequences * seq, math.prod(options[0].axes)
    weights = sum(op.weights for op in layer_graph(shape, seq)[0])
    saved = in_flight * n * activation_bytes(shape, recompute, True)
    logits = LOGITS_BYTES * shape.vocab * last
    ends = 18 * count_ends(shape, first, last) * shape.dim * shape.vocab
    sharded = (12 * n * weights + ends + (saved + logits) * tokens) / gpus
    room = device.model_memory - sharded
    fits = [one for one in options if 6 * n * one.weights <= room]
    if not fits:
        return math.inf, None
    best = min(fits, key=lambda one: one.seconds)
    if last:
        end = head_seconds(shape, device, tokens / gpus)
    else:
        end = 2 * hop_seconds(shape, device, tokens / gpus, far=True)
    return n * best.seconds * recompute_factor(shape, seq, recompute) + end, best


class Stages(NamedTuple):
    """seconds: of a step. stages: (first layer, last + 1, GPUs, sharding)"""

    seconds: float
    sequences: int
    recompute: str
    stages: list[tuple[int, int, int, Sharding]]


def alpa(
    shape: Shape, device: Device, gpus: int, seq: int, batch: int, equal: bool = False,
    recompute: Sequence[str] = RECOMPUTE,
) -> Stages | None:  # fmt: skip
    """The stages and shardings with the least sum(t) + (m - 1) max(t), or None if nothing fits.
    Layers come in at most 32 groups (the paper's layer clustering), GPUs in at most 16. Submeshes
    are parts of a node or whole nodes (5.2), the number of stages divides the groups of GPUs. Every
    stage has memory for as many micro-batches as the first. equal: stages of equally many GPUs."""
    unit, group = next(d for d in divisors(gpus) if gpus // d <= 16), -(-shape.layers // 32)
    bounds = [*range(0, shape.layers, group), shape.layers]
    units, groups = gpus // unit, len(bounds) - 1
    whole = lambda n: device.node % n == 0 or n % device.node == 0 or n == gpus
    sizes = [d for d in range(1, units + 1) if whole(unit * d)]
    counts = [n for n in divisors(units) if n <= groups]  # of stages
    sequences = [b for b in divisors(math.gcd(gpus, batch)) if gpus <= 16 * b]
    best = None
    for b in sequences or [math.gcd(gpus, batch)]:
        micros = batch // b
        options = {d: submesh_shardings(shape, device, seq, b, micros, unit * d) for d in sizes}
        for stages, kind in product(counts, recompute):
            of = cache(partial(stage_sharding, shape, device, seq, b, min(stages, micros), kind))
            times = lambda i, j, d: of(options[d], bounds[j] - bounds[i], i == 0, j == groups)
            allowed = [d for d in sizes if not equal or d * stages == units]
            try:
                found = partition(
                    groups, units, lambda *stage: times(*stage)[0], micros, stages, allowed
                )
            except ValueError:  # nothing fits
                continue
            spent = [times(*stage)[0] for stage in found]
            total = sum(spent) + (micros - 1) * max(spent)
            if best is None or total < best.seconds:
                rows = [(bounds[i], bounds[j], unit * d, times(i, j, d)[1]) for i, j, d in found]
                best = Stages(total, b, kind, rows)
    return best


def alpa_report(args: argparse.Namespace) -> str:
    """The stages of the best plan and of the best one that train.py can run."""
    shape, device, gpus, seq, batch = parse_job(args)
    names = [op.name for op in layer_graph(shape, seq)[0]]
    fixed = {"recompute": (args.recompute,)} if args.recompute else {}
    lines = []
    for equal in (False, True):
        got = alpa(shape, device, gpus, seq, batch, equal, **fixed)
        require(got, f"alpa: no stages of {args.model} fit {gpus} {args.device}; use more --gpus")
        micros = batch // got.sequences
        size = f"{micros} micro-batches of {got.sequences} sequences, recompute {got.recompute}"
        lines += [f"{'equal' if equal else 'any'} stages: {got.seconds:.2f} s/step, {size}"]
        for first, last, n, found in got.stages:
            lines += [f"  layers {first:>3} to {last - 1:<3} on {n:>4} GPUs"]
            for size, splits in found.by_axis():
                text = " ".join(f"{name}:{one.what}" for name, one in zip(names, splits))
                lines += [f"      axis of {size:>3}  {text}"]
    degrees = {found.degrees() for *_, found in got.stages}
    if len(degrees) > 1 or None in degrees:
        return "\n".join([*lines, "train.py: has no such shardings"])
    dp, tp = degrees.pop()
    plan = Plan(
        dp, tp, pp=len(got.stages), micro=got.sequences // dp, recompute=got.recompute,
        async_tp=False,
    )  # fmt: skip
    layers = [last - first for first, last, *_ in got.stages]
    return "\n".join([*lines, train_flags(args.model, shape, plan, seq, batch, layers)])


# --------------------------------------------------------------------------------------------------
# HAP: uneven shards on heterogeneous GPUs
# --------------------------------------------------------------------------------------------------


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
    """seconds: of a micro-batch; equal: with equal shares, whether they fit or not. splits: of
    each operator. ratios: share of each GPU."""

    seconds: float
    splits: list[Split]
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
        self.options = [list(op.splits) for op in self.operators]
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

    def operator(self, v: int, split: Split) -> tuple[float, float]:
        """`transfers` of operator v."""
        op, axes = self.operators[v], [len(self.devices)]
        return self.transfers(op_transfers(op, (split,), axes, self.tokens, self.micros))

    def edge(self, u: int, v: int, before: Split, after: Split) -> tuple[float, float]:
        """`transfers` between operators u and v."""
        size = 2 * self.tokens * self.widths[u, v]
        return self.transfers(reshard_transfers((before,), (after,), [len(self.devices)], size))

    def bytes(self, g: int) -> tuple[float, float, float]:
        """Of GPU g: what it has free, what a weight needs, what its share of the rest needs."""
        s = self.shape
        saved = s.layers * activation_bytes(s, "full", True) + activation_bytes(s, "none", True)
        ends = 18 * count_ends(s, True, True) * s.dim * s.vocab
        free = self.devices[g].model_memory
        return free, 18 * s.layers, self.tokens * (saved + LOGITS_BYTES * s.vocab) + ends

    def choose(self, ratios: Sequence[float]) -> list[Split]:
        """The splits with the least time for given shares; [] if none fits in memory."""
        top, price = max(ratios), lambda pair: pair[0] + top * pair[1]
        work = lambda v, x: max(
            t * (1 if x is WHOLE else r) for t, r in zip(self.seconds[v], ratios)
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
            use = []
            for op, own in zip(self.operators, self.options):
                whole = weight * op.weights
                use.append([whole * r if x in SHARDED_WEIGHTS else whole for x in own])
            budgets.append((use, max(free - r * rest, 1.0)))
        _, chosen = choose_shardings(costs, edges, budgets)
        return [own[a] for own, a in zip(self.options, chosen)]

    def terms(self, splits: Sequence[Split]) -> tuple[float, float, list[list[float]]]:
        """Seconds of the layers: fixed, per unit of the largest share, and of each sharded operator
        and the head on each GPU alone."""
        L, every = self.shape.layers, list(enumerate(splits))
        pairs = [self.operator(v, x) for v, x in every]
        pairs += [self.edge(u, v, splits[u], splits[v]) for u, v in self.widths]
        fixed, slope = (L * sum(part) for part in zip(*pairs))
        fixed += L * sum(max(self.seconds[v]) for v, x in every if x is WHOLE)
        work = [[L * t for t in self.seconds[v]] for v, x in every if x is not WHOLE]
        head = [head_seconds(self.shape, d, self.tokens) for d in self.devices]
        return fixed, slope, [*work, head]

    def step(self, splits: Sequence[Split], ratios: Sequence[float]) -> float:
        """Seconds of a micro-batch for given splits and shares."""
        fixed, slope, work = self.terms(splits)
        slowest = (max(t * r for t, r in zip(row, ratios)) for row in work)
        return fixed + slope * max(ratios) + sum(slowest)

    def balance(self, splits: Sequence[Split]) -> Program:
        """The shares with the least time for given splits."""
        fixed, slope, work = self.terms(splits)
        sharded = sum(op.weights for op, x in zip(self.operators, splits) if x in SHARDED_WEIGHTS)
        whole = sum(op.weights for op in self.operators) - sharded
        needs = map(self.bytes, range(len(self.devices)))
        largest = [(free - each * whole) / (rest + each * sharded) for free, each, rest in needs]
        seconds, ratios = sharding_ratios(work, slope, largest)
        return Program(fixed + seconds, list(splits), ratios, self.step(splits, self.equal))


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
            while splits := cluster.choose(ratios):
                new = cluster.balance(splits)
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
    operators, _ = layer_graph(shape, seq)
    rows = [f"  {name:<14}{names.count(name):>4} x {got.ratios[names.index(name)]:.4f}"
            for name in dict.fromkeys(names)]  # fmt: skip
    return "\n".join((
        f"{micros * got.seconds:.2f} s/step, {micros} micro-batches of {sequences} sequences",
        f"equal shares of {1 / len(names):.4f}: {micros * got.equal:.2f} s/step",
        *rows,
        "sharded: " + " ".join(f"{op.name}:{x.what}" for op, x in zip(operators, got.splits)),
        "train.py: has equal shards only",
    ))  # fmt: skip
