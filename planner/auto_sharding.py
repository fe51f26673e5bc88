"""Alpa: a sharding for every operator of a layer, and submeshes of GPUs for the stages.

    python -m planner search alpa --model llama3-70b --gpus 64

A layer is a graph of seven operators: norm qkv attention out norm up down. On each axis of a mesh
of GPUs an operator is sharded by one letter:

    i  tokens            all-reduces the gradients of its weights: data parallelism
    j  output features   all-reduces the gradients of its inputs   (Megatron's column parallelism)
    k  input features    all-reduces its outputs                   (Megatron's row parallelism)
    h  attention heads   nothing
    r  not at all        nothing; every GPU of the axis does the same work

If a tensor's layout differs where it is produced and where it is used, the edge between the two
costs an all-gather or an all-to-all. Alpa (arXiv:2201.12023, 4.2) chooses the letters by an integer
linear program, for every submesh that a stage may have, and the stages and their submeshes by a
dynamic program around it (5.2; schedules.partition). Where weights do not fit, it finds Megatron's
tensor parallelism: qkv:j attention:h out:k up:j down:k.

When it loses: costs are sums, nothing overlaps, and its times are therefore above those of
training_plan.py; activations count as sharded over all GPUs of a stage, whatever the letters.
Searched are at most 32 groups of layers, 16 groups of GPUs and 16 GPUs per sequence, as the dynamic
program is in Python (1,024 GPUs take a minute); only dense models without latent attention.
test_all.py compares both programs with enumeration. uneven_sharding.py uses the graph and the
integer program for heterogeneous GPUs. Needs: scipy (HiGHS) and numpy, imported when they are used.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import argparse
import math
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import chain, product
from typing import NamedTuple

from parallelism.schedules import partition
from planner.cost_model import (
    ATTENTION_EFFICIENCY,
    GEMM_EFFICIENCY,
    HBM_EFFICIENCY,
    KERNEL_OVERHEAD,
    Device,
    Shape,
    all_to_all,
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
    parse_job,
    train_flags,
)

# --------------------------------------------------------------------------------------------------
# Operators and their shardings
# --------------------------------------------------------------------------------------------------

# Letter -> layout of (input, output) on the axis: T by tokens, F by features, R replicated
LAYOUTS = {"i": "TT", "j": "RF", "k": "FR", "h": "FF", "r": "RR"}


class Operator(NamedTuple):
    """letters: that may shard it. flops, hbm, width_in, width_out: per token, FLOPs of the forward
    pass, HBM bytes of forward and backward, and elements of the input and the output. weights:
    their number. parts: (heads, key-value heads), which stay whole, or features."""

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
            "search alpa and hap require a dense --model without latent attention")  # fmt: skip
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


def degree(letters: str, axes: Sequence[int], which: str) -> int:
    """Over how many GPUs the axes with a letter of `which` shard."""
    return math.prod(n for n, x in zip(axes, letters) if x in which)


def shardings(op: Operator, axes: Sequence[int], sequences: int) -> Iterator[str]:
    """A letter per mesh axis, such that whole sequences and heads are on a GPU."""
    for choice in product(*(op.letters if n > 1 else "r" for n in axes)):
        letters, (heads, kv_heads) = "".join(choice), op.parts
        n = degree(letters, axes, "jkh")
        whole_heads = heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
        if whole_heads and sequences % degree(letters, axes, "i") == 0:
            yield letters


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
    split = partial(degree, letters, axes)
    for axis, letter in enumerate(letters if op.weights else ""):
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
    output layout of one operator's letters to the input layout of the next one's (Alpa, table 2)
    and its gradient back."""
    pairs = [(LAYOUTS[x][1], LAYOUTS[y][0]) for x, y in zip(before, after)]
    for axis, (x, y) in enumerate(pairs):
        split = math.prod(axes[b] for b, (_, z) in enumerate(pairs) if b != axis and z != "R")
        if x != y and "R" in (x, y):  # to R: forward; from R: the gradient
            yield "all-gather", size / split, axis
        elif x != y:
            yield from [("all-to-all", size / split, axis)] * 2


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


class Sharding(NamedTuple):
    """A layer on a mesh: seconds per micro-batch, parameters per GPU, letters of each operator."""

    seconds: float
    weights: float
    axes: tuple[int, int]
    letters: tuple[str, ...]

    def degrees(self) -> tuple[int, int] | None:
        """(dp, tp) if each axis is data parallel or Megatron's tensor parallel throughout."""
        sizes = {"i" * 7: 1, "rjhkrjk": 1}
        for axis, n in enumerate(self.axes):
            used = "".join(x[axis] for x in self.letters)
            if n > 1 and used not in sizes:
                return None
            sizes[used] = sizes.get(used, 1) * n
        return sizes["i" * 7], sizes["rjhkrjk"]


def layer_shardings(
    shape: Shape, device: Device, seq: int, sequences: int, micros: int, axes: tuple[int, int]
) -> Iterator[Sharding]:
    """The fastest shardings of a layer with at most 1, 1/2, 1/4, ... of its weights per GPU."""
    operators, widths = layer_graph(shape, seq)
    tokens, seconds = sequences * seq, partial(transfer_seconds, device, axes)
    options = [list(shardings(op, axes, sequences)) for op in operators]

    def op_cost(op: Operator, x: str) -> float:
        work = operator_seconds(op, device, tokens / degree(x, axes, "ijkh"))
        launches = 3 * KERNEL_OVERHEAD * (op.flops > 0)
        moved = op_transfers(op, x, axes, tokens, micros)
        return work + launches + sum(seconds(*transfer) for transfer in moved)

    def edge_cost(width: float, x: str, y: str) -> float:
        moved = reshard_transfers(x, y, axes, 2 * tokens * width)
        return sum(seconds(*transfer) for transfer in moved)

    costs = [[op_cost(op, x) for x in own] for op, own in zip(operators, options)]
    edges = {
        (u, v): [[edge_cost(width, x, y) for y in options[v]] for x in options[u]]
        for (u, v), width in widths.items()
    }
    weights = [[op.weights / degree(x, axes, "jk") for x in own]
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
            letters = " ".join(f"{name}:{x}" for name, x in zip(names, found.letters))
            mesh = " x ".join(map(str, found.axes))
            lines += [f"  layers {first:>3} to {last - 1:<3} on {n:>4} GPUs ({mesh})  {letters}"]
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
