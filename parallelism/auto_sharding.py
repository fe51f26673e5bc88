"""Shardings of every operator by integer and linear programs: Alpa, and HAP on unlike GPUs.

    python -m parallelism.planner --search alpa --model llama3-70b --gpus 64
    python -m parallelism.planner --search hap --device h100:4,a100-80gb:4

A layer is a graph of seven operators. Each mesh axis shards one loop dimension of each operator:
tokens (i), output features (j), input features (k), attention heads (h), or nothing (r). That costs
an operator collectives of its own (j, k: activations, i: gradients of weights), and an edge whose
ends have different layouts an all-gather or an all-to-all. Alpa (arXiv:2201.12023, 4.2)
chooses the letters by an integer linear program, for every submesh that a stage may have, and the
stages and submeshes by a dynamic program around it (5.1; schedules.partition). Megatron's
tensor parallelism is what it finds where weights do not fit: qkv:j attention:h out:k up:j down:k.

On unlike GPUs equal shards wait for the slowest one. HAP (arXiv:2401.05965) gives each GPU one
share of all sharded operators, by a linear program for given letters, and chooses the letters for
given shares, in turn.

When it loses: costs are sums, nothing overlaps, and alpa's times are therefore above those of
training_plan.py; layers are in groups of at most 32, GPUs of at most 16, as the dynamic program is
in Python; a dense model without latent attention only. test_all.py compares both programs with
enumeration. Needs: scipy (HiGHS) and numpy, imported when they are used.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m parallelism.planner --search")

import argparse
import math
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import pairwise, product
from typing import Any, NamedTuple

from parallelism.cost_model import (
    ATTENTION_EFFICIENCY,
    DEVICES,
    GEMM_EFFICIENCY,
    HBM_EFFICIENCY,
    KERNEL_OVERHEAD,
    LINK_EFFICIENCY,
    MEMORY_FRACTION,
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
from parallelism.schedules import partition
from parallelism.training_plan import (
    LAYER_HBM_BYTES,
    LOGITS_BYTES,
    RECOMPUTE,
    RESERVED_BYTES,
    Plan,
    activation_bytes,
    divisors,
    head_seconds,
    parse_batch,
    parse_job,
    train_flags,
)


def _solver() -> tuple[Any, Any, Any]:
    """scipy's solvers, numpy, and scipy's sparse matrices."""
    try:
        import numpy
        import scipy.optimize
        from scipy.sparse import coo_array
    except ImportError:
        raise ValueError("--search alpa and hap require scipy; run: pip install scipy") from None
    return scipy.optimize, numpy, coo_array

# --------------------------------------------------------------------------------------------------
# Operators and their shardings
# --------------------------------------------------------------------------------------------------

# Loop dimension that a mesh axis shards -> layout of (input, output) on it: T by tokens, F by
# features, R replicated. Of a matmul (i, k) x (k, j) i needs a reduction of the weight gradient, j
# of the input gradient, k of the output (Alpa, table 2); h are attention heads.
LAYOUTS = {"i": "TT", "j": "RF", "k": "FR", "h": "FF", "r": "RR"}


class Operator(NamedTuple):
    """Of a layer: the loop dimensions that can be sharded; forward FLOPs, HBM bytes of forward and
    backward, and input and output elements per token; weights; what feature shards divide."""

    name: str
    letters: str
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
            "--search alpa and hap require a dense --model without latent attention")  # fmt: skip
    (c, f), (c_back, f_back) = LAYER_HBM_BYTES[True]
    C, F, heads = shape.dim, shape.ffn, (shape.heads, shape.kv_heads)
    *qkv, out = shape.attention()
    ups = len(shape.feed_forward(False)) - 1
    norm = Operator("norm", "ir", 0, (c + c_back) / 2 * C, 0, C, C, (C, C))
    width = sum(m.n for m in qkv)
    linear = lambda name, k, n, hbm, parts: Operator(
        name, "ijkr", 2 * k * n, hbm, k * n, k, n, parts
    )
    operators = [
        norm,
        linear("qkv", C, width, 0, heads),
        Operator("attention", "ihr", seq * score_width(shape), 0, 0, width, out.k, heads),
        linear("out", out.k, C, 0, heads),
        norm,
        linear("up", C, ups * F, (f + f_back) * F, (F, F)),
        linear("down", F, C, 0, (F, F)),
    ]
    edges = {(0, 1): C, (1, 2): width, (2, 3): out.k, (3, 4): C, (4, 5): C, (5, 6): F}
    return operators, edges | {(0, 4): C, (6, 0): C, (4, 0): C}


def shardings(op: Operator, axes: Sequence[int], sequences: int) -> Iterator[str]:
    """A letter per mesh axis, such that whole sequences and heads are on a GPU."""
    for letters in product(*(op.letters if n > 1 else "r" for n in axes)):
        sharded = lambda which: math.prod(n for n, x in zip(axes, letters) if x in which)
        heads, kv_heads = op.parts
        fits = heads % sharded("jkh") == 0
        fits &= kv_heads % sharded("jkh") == 0 or sharded("jkh") % kv_heads == 0
        if fits and sequences % sharded("i") == 0:
            yield "".join(letters)


def operator_seconds(op: Operator, device: Device, tokens: float) -> float:
    """Forward and backward seconds of an operator on one GPU, without launches."""
    ahead, back = ATTENTION_EFFICIENCY["fa3"]
    cost = 1 / ahead + 2.5 / back if op.name == "attention" else 3 / GEMM_EFFICIENCY
    return tokens * (op.flops * cost / device.bf16 + op.hbm / (HBM_EFFICIENCY * device.hbm))


def op_transfers(
    op: Operator, letters: str, axes: Sequence[int], tokens: float, micros: int
) -> Iterator[tuple[str, float, int]]:
    """(collective, bytes, axis) of an operator per micro-batch; gradients of weights are reduced
    once for all `micros`. Bytes: of the tensor that the ranks of the axis have together."""
    if op.weights:
        for axis, letter in enumerate(letters):
            split = lambda which: math.prod(
                n for b, (n, x) in enumerate(zip(axes, letters)) if b != axis and x in which
            )
            if letter == "i":
                yield "all-reduce", 4 * op.weights / split("jk") / micros, axis
            elif letter == "j":
                yield "all-reduce", 2 * tokens * op.width_in / split("ik"), axis
            elif letter == "k":
                yield "all-reduce", 2 * tokens * op.width_out / split("ij"), axis


def reshard_transfers(
    before: str, after: str, axes: Sequence[int], size: float
) -> Iterator[tuple[str, float, int]]:
    """(collective, bytes, axis), forward and backward, that bring a tensor of `size` bytes from the
    output layout of one operator's letters to the input layout of the next one's (Alpa, table 3).
    """
    pairs = [(LAYOUTS[x][1], LAYOUTS[y][0]) for x, y in zip(before, after)]
    for axis, (x, y) in enumerate(pairs):
        split = math.prod(axes[b] for b, (_, z) in enumerate(pairs) if b != axis and z != "R")
        if x != y and "R" in (x, y):  # to R: forward; from R: the gradient
            yield "all-gather", size / split, axis
        elif x != y:
            yield from [("all-to-all", size / split, axis)] * 2


def transfer_seconds(device: Device, axes: Sequence[int], kind: str, size: float, axis: int):
    """Seconds of a collective on one axis of a mesh whose last axis is within a node."""
    stride = math.prod(axes[axis + 1 :])
    if kind == "all-to-all":
        return all_to_all(size, axes[axis], stride, device)
    return (2 if kind == "all-reduce" else 1) * ring(size, axes[axis], stride, device)


def choose_shardings(
    costs: Sequence[Sequence[float]],
    edges: dict[tuple[int, int], Sequence[Sequence[float]]],
    budgets: Sequence[tuple[Sequence[Sequence[float]], float]] = (),
) -> tuple[float, list[int]]:
    """The choice of each node that minimizes the sum of costs[node][choice] and of edges[u, v]
    [choice of u][choice of v] (Alpa, 4.2, equation 1), and that sum. budgets: (use of each node's
    choices, limit of their sum). (inf, []) if no choice satisfies them.

    x is one-hot per node. A variable per pair of choices of an edge has x of either end as its
    marginals, so that it is their product without being an integer itself."""
    optimize, np, coo_array = _solver()
    starts = [0]
    for sizes in (*map(len, costs), *(len(m) * len(m[0]) for m in edges.values())):
        starts.append(starts[-1] + sizes)
    nodes, rows, limits = len(costs), [], []  # rows: variable -> coefficient

    def add(terms: dict[int, float], low: float, high: float) -> None:
        rows.append(terms)
        limits.append((low, high))

    for v, own in enumerate(costs):
        add({starts[v] + a: 1 for a in range(len(own))}, 1, 1)
    for (u, v), first in zip(edges, starts[nodes:]):
        n, m = len(costs[u]), len(costs[v])
        for a in range(n):
            add({first + a * m + b: 1 for b in range(m)} | {starts[u] + a: -1}, 0, 0)
        for b in range(m):
            add({first + a * m + b: 1 for a in range(n)} | {starts[v] + b: -1}, 0, 0)
    for use, limit in budgets:
        flat = [x for own in use for x in own]
        add({a: x / limit for a, x in enumerate(flat)}, -np.inf, 1)
    flat = [x for own in costs for x in own] + [x for m in edges.values() for row in m for x in row]
    unit = max(*flat, 1e-30)  # the solver's tolerances are absolute
    at = [(i, j) for i, terms in enumerate(rows) for j in terms]
    matrix = coo_array(([x for terms in rows for x in terms.values()], tuple(zip(*at))))
    got = optimize.milp(
        np.array(flat) / unit,
        constraints=optimize.LinearConstraint(matrix.tocsr(), *np.array(limits).T),
        integrality=np.arange(starts[-1]) < starts[nodes],
        bounds=optimize.Bounds(0, 1),
        options={"mip_rel_gap": 0},
    )
    if got.x is None:
        return math.inf, []
    chosen = [int(np.argmax(got.x[a:b])) for a, b in pairwise(starts[: nodes + 1])]
    total = sum(own[a] for own, a in zip(costs, chosen))
    return total + sum(m[chosen[u]][chosen[v]] for (u, v), m in edges.items()), chosen

# --------------------------------------------------------------------------------------------------
# Alpa: shardings of operators, submeshes of stages
# --------------------------------------------------------------------------------------------------


class Sharding(NamedTuple):
    """A layer on a mesh: seconds per micro-batch, parameters per GPU, letters of each operator."""

    seconds: float
    weights: float
    axes: tuple[int, int]
    letters: tuple[str, ...]

    def degrees(self) -> tuple[int, int] | None:
        """(dp, tp) if each axis is data parallel or Megatron's tensor parallel throughout."""
        used = [n > 1 and "".join(x[a] for x in self.letters) for a, n in enumerate(self.axes)]
        if any(letters not in (False, "i" * 7, "rjhkrjk") for letters in used):
            return None
        size = lambda which: math.prod(n for n, x in zip(self.axes, used) if x and x[0] == which)
        return size("i"), size("r")


def layer_shardings(
    shape: Shape, device: Device, seq: int, sequences: int, micros: int, axes: tuple[int, int]
) -> Iterator[Sharding]:
    """The fastest shardings of a layer with at most 1, 1/2, 1/4, ... of its weights per GPU."""
    operators, widths = layer_graph(shape, seq)
    tokens, seconds = sequences * seq, partial(transfer_seconds, device, axes)
    options = [list(shardings(op, axes, sequences)) for op in operators]
    split = lambda letters, which: math.prod(n for n, x in zip(axes, letters) if x in which)
    costs = [
        [
            operator_seconds(op, device, tokens / split(x, "ijkh"))
            + 3 * KERNEL_OVERHEAD * (op.flops > 0)
            + sum(seconds(*moved) for moved in op_transfers(op, x, axes, tokens, micros))
            for x in own
        ]
        for op, own in zip(operators, options)
    ]
    resharding = lambda x, y, size: sum(seconds(*t) for t in reshard_transfers(x, y, axes, size))
    edges = {
        (u, v): [[resharding(x, y, 2 * tokens * n) for y in options[v]] for x in options[u]]
        for (u, v), n in widths.items()
    }
    held = [[op.weights / split(x, "jk") for x in own] for op, own in zip(operators, options)]
    limit = sum(op.weights for op in operators)
    while limit >= sum(map(min, held)) * (1 - 1e-9):
        total, chosen = choose_shardings(costs, edges, [(held, limit * (1 + 1e-9))])
        if not chosen:
            return
        used = sum(own[a] for own, a in zip(held, chosen))
        yield Sharding(total, used, axes, tuple(own[a] for own, a in zip(options, chosen)))
        while limit > used * (1 - 1e-9):
            limit /= 2


def stage_sharding(
    shape: Shape, device: Device, seq: int, sequences: int, in_flight: int, recompute: str,
    options: Sequence[Sharding], n: int, first: bool, last: bool,
) -> tuple[float, Sharding | None]:  # fmt: skip
    """Seconds and sharding of a stage of n layers, the fastest of `options` that fits; (inf, None)
    if none does. Embedding, head and optimizer are sharded over all GPUs of the stage."""
    tokens, gpus = sequences * seq, math.prod(options[0].axes)
    ends = (first + last) * shape.dim * shape.vocab / gpus
    slower = 1 + recomputed_flops(shape, seq, recompute) / model_flops(shape, seq)
    head = head_seconds(shape, device, tokens / gpus) if last else 0.0
    hop = device.alpha[1] + 2 * tokens * shape.dim / gpus / (LINK_EFFICIENCY * device.network)
    saved = in_flight * n * activation_bytes(shape, recompute, True)
    saved += LOGITS_BYTES * shape.vocab * last
    best: tuple[float, Sharding | None] = math.inf, None
    for got in options:
        layer = sum(op.weights for op in layer_graph(shape, seq)[0]) / gpus
        states = n * (6 * got.weights + 12 * layer) + 18 * ends
        size = RESERVED_BYTES + states + saved * tokens / gpus
        seconds = n * got.seconds * slower + head + 2 * hop * (not last)
        if size <= MEMORY_FRACTION * device.memory and seconds < best[0]:
            best = seconds, got
    return best


class Stages(NamedTuple):
    """seconds: of a step. stages: (first layer, last + 1, GPUs, sharding)"""

    seconds: float
    sequences: int
    recompute: str
    stages: list[tuple[int, int, int, Sharding]]


def alpa(
    shape: Shape, device: Device, gpus: int, seq: int, batch: int, equal: bool = False,
    micro: Sequence[int] = (), recompute: Sequence[str] = RECOMPUTE,
) -> Stages | None:  # fmt: skip
    """The stages and shardings with the least sum(t) + (m - 1) max(t), or None if nothing fits.
    Layers come in at most 32 groups (the paper's layer clustering), GPUs in at most 16. Every stage
    has memory for as many micro-batches as the first. equal: stages of equally many GPUs. micro:
    sequences of a micro-batch to try."""
    unit, group = next(d for d in divisors(gpus) if gpus // d <= 16), -(-shape.layers // 32)
    bounds = [*range(0, shape.layers, group), shape.layers]
    units, groups = gpus // unit, len(bounds) - 1
    sizes = [d for d in divisors(units) if unit * d <= device.node or unit * d % device.node == 0]
    sequences = [b for b in divisors(batch) if b & (b - 1) == 0 and gpus <= 16 * b <= 16 * gpus]
    best = None
    for b in micro or sequences or [1]:
        options = {
            d: submesh_shardings(shape, device, seq, b, batch // b, unit * d) for d in sizes
        }
        for stages, kind in product((n for n in (1, 2, 4, 8, 16) if n <= units), recompute):
            if stages > groups or (equal and units % stages):
                continue
            of = cache(partial(
                stage_sharding, shape, device, seq, b, min(stages, batch // b), kind
            ))  # fmt: skip
            times = lambda i, j, d: of(options[d], bounds[j] - bounds[i], i == 0, j == groups)
            allowed = [d for d in sizes if not equal or d * stages == units]
            try:
                found = partition(
                    groups, units, lambda *stage: times(*stage)[0], batch // b, stages, allowed
                )
            except ValueError:  # nothing fits
                continue
            spent = [times(*stage)[0] for stage in found]
            total = sum(spent) + (batch // b - 1) * max(spent)
            if best is None or total < best.seconds:
                rows = [(bounds[i], bounds[j], unit * d, times(i, j, d)[1]) for i, j, d in found]
                best = Stages(total, b, kind, rows)
    return best


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


def alpa_report(args: argparse.Namespace) -> str:
    """The stages of the best plan and of the best one that train.py can run."""
    shape, device, gpus, seq, batch = parse_job(args)
    fixed = {"recompute": (args.recompute,)} if args.recompute else {}
    lines = []
    for equal in (False, True):
        got = alpa(shape, device, gpus, seq, batch, equal, **fixed)
        require(got, f"alpa: no stages of {args.model} fit {gpus} {args.device}; use more --gpus")
        micros = batch // got.sequences
        size = f"{micros} micro-batches of {got.sequences} sequences, recompute {got.recompute}"
        lines += [f"{'equal' if equal else 'any'} stages: {got.seconds:.2f} s/step, {size}"]
        for first, last, n, found in got.stages:
            letters = " ".join(f"{op.name}:{x}" for op, x in
                               zip(layer_graph(shape, seq)[0], found.letters))  # fmt: skip
            mesh = " x ".join(map(str, found.axes))
            lines += [f"  layers {first:>3} to {last - 1:<3} on {n:>4} GPUs ({mesh})  {letters}"]
    degrees = {found.degrees() for *_, found in got.stages}
    if len(degrees) > 1 or None in degrees:
        return "\n".join([*lines, "train.py: has no such shardings"])
    dp, tp = degrees.pop()
    plan = Plan(dp, tp, pp=len(got.stages), micro=got.sequences // dp, recompute=got.recompute)
    layers = [last - first for first, last, *_ in got.stages]
    return "\n".join([*lines, train_flags(plan, seq, batch, layers)])

# --------------------------------------------------------------------------------------------------
# HAP: uneven shards on unlike GPUs
# --------------------------------------------------------------------------------------------------


def sharding_ratios(
    work: Sequence[Sequence[float]], padded: float, largest: Sequence[float]
) -> tuple[float, list[float]]:
    """The share of each GPU in every sharded operator that minimizes the step (HAP, 5.1), as a
    linear program. work[o][g]: seconds of operator o on GPU g alone; GPUs wait for the slowest
    after each. padded: seconds of all collectives per unit of the largest share, as shards are
    padded to it. largest: share that fits the memory of each. (inf, []) if they do not add up."""
    optimize, np, _ = _solver()
    n, m = len(largest), len(work)
    rows = np.zeros((n * (m + 1), n + m + 1))  # variables: shares, seconds of operators, largest
    for o, g in product(range(m), range(n)):  # work * share <= seconds of the operator
        rows[o * n + g, [g, n + o]] = work[o][g], -1
    for g in range(n):
        rows[n * m + g, [g, n + m]] = 1, -1
    got = optimize.linprog(
        [0.0] * n + [1.0] * m + [padded],
        A_ub=rows, b_ub=np.zeros(len(rows)), A_eq=[[1.0] * n + [0.0] * (m + 1)], b_eq=[1.0],
        bounds=[(0, max(0.0, min(1.0, x))) for x in largest] + [(0, None)] * (m + 1),
    )  # fmt: skip
    return (got.fun, list(got.x[:n])) if got.x is not None else (math.inf, [])


class Program(NamedTuple):
    """seconds: of a micro-batch; equal: with equal shares, whether they fit or not. letters: of
    each operator. ratios: share of each GPU."""

    seconds: float
    letters: list[str]
    ratios: list[float]
    equal: float


class Cluster:
    """Costs of a layer's operators on unlike GPUs, one mesh axis over all of them. padded: whether
    collectives pad shards to the largest, or send each from its GPU in turn (HAP, 4.3)."""

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

    def transfers(self, moves: Any) -> tuple[float, float]:
        """Seconds of collectives: (fixed, per unit of the largest share)."""
        n, fixed, slope = len(self.devices), 0.0, 0.0
        for kind, size, _ in moves:
            times = 2 if kind == "all-reduce" else 1
            fixed += times * (n * self.alpha + (0 if self.padded else size / self.wire))
            slope += times * (n - 1) * size / self.wire * self.padded
        return fixed, slope

    def operator(self, v: int, letter: str) -> tuple[float, float]:
        axes = [len(self.devices)]
        return self.transfers(
            op_transfers(self.operators[v], letter, axes, self.tokens, self.micros)
        )

    def edge(self, u: int, v: int, before: str, after: str) -> tuple[float, float]:
        size = 2 * self.tokens * self.widths[u, v]
        return self.transfers(reshard_transfers(before, after, [len(self.devices)], size))

    def bytes(self, g: int) -> tuple[float, float, float]:
        """Of GPU g: what it has free, what a weight needs, what its share of the rest needs."""
        s = self.shape
        free = MEMORY_FRACTION * self.devices[g].memory - RESERVED_BYTES
        saved = s.layers * activation_bytes(s, "full", True) + activation_bytes(s, "none", True)
        ends = 18 * (1 if s.tied else 2) * s.dim * s.vocab
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
    """Shardings and shares, optimized in turn until neither improves (HAP, 3.2), from equal shares
    and from shares by memory; None if nothing fits. The paper finds the shardings by A* search;
    costs add up, so the integer program has the same optimum."""
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
    names = []
    for part in text.split(","):
        name, _, count = part.partition(":")
        ok = name in DEVICES and (count or "1").isdigit()
        require(ok, f"--device {part} is not DEVICE:COUNT, such as h100:4,a100-80gb:4")
        names += [name] * int(count or 1)
    require(len(names) > 1, f"--search hap: --device {text} is one GPU; use h100:4,a100-80gb:4")
    return names


def hap_report(args: argparse.Namespace) -> str:
    """The shares of each kind of GPU, and the time beside equal shares."""
    shape, names = load_shape(args.model), parse_cluster(args.device)
    seq, batch = parse_batch(args)
    sequences = (args.micro or 1) * len(names)
    micros = max(1, batch // sequences)
    devices = [DEVICES[name] for name in names]
    got = hap(shape, devices, seq, sequences, micros)
    require(got, f"hap: {args.model} does not fit {args.device}; add GPUs")
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


METHODS = {"alpa": alpa_report, "hap": hap_report}
