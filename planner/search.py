"""Layouts found by the search algorithms of eleven systems, on the planner's formulas.

    python -m planner search aceso --model llama3-70b --gpus 256

training_plan.py ranks every plan; that works while all stages are equal and a plan is ten numbers.
Each method here searches a space that is too large for it, or needs far fewer evaluations:

    aceso     any plan, by relieving its bottleneck again and again   (Liu et al., EuroSys '24)
    merak     layers of each stage, and whether it recomputes         (arXiv:2206.04959)
    oobleck   pipelines of different sizes that use every node left   (arXiv:2309.08125, 4)
    alpa      a sharding per operator, stages on submeshes            (auto_sharding.py)
    hap       uneven shards on heterogeneous GPUs                     (auto_sharding.py)
    crius     jobs on several types of GPU                    (mixed_cluster.py)
    helix     layers on unequal GPUs                                  (helix.py)
    spindle   waves of tasks                                          (spindle.py)
    disttrain, dynapipe    GPUs of each module, micro-batches         (pipeline_search.py)
    perseus   a clock for every pass                                  (pipeline_search.py)

What train.py can run is printed as its flags: equal stages of data and tensor parallelism with any
number of layers each and any set of recomputing stages. It cannot run stages of different sizes,
pipelines of different sizes or uneven shards; oobleck and alpa then print the layouts that it can.

When it loses: aceso finds a local optimum, more than 5% above the best plan in about 1 of 50 random
jobs. merak and oobleck count a step as sum(t) + (m - 1) max(t) over stages and minimize max(t).
Plans that differ by a few percent are a tie, as the formulas are not exact. test_all.py compares
each method with brute force on small random cases. Needs: the standard library; alpa and hap scipy.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import argparse
import bisect
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from planner import auto_sharding, helix, mixed_cluster, pipeline_search, spindle
from planner.cost_model import Device, Shape, require
from planner.flags import PLAN_FIELDS, add_shared
from planner.training_plan import (
    RECOMPUTE,
    Plan,
    Prediction,
    count_ends,
    data_parallel,
    divisors,
    find_conflict,
    fixed_fields,
    head_seconds,
    hop_seconds,
    layer_seconds,
    layouts,
    memory,
    parse_job,
    plans,
    possible_plans,
    predict,
    rank_plans,
    stage_bytes,
    train_flags,
)

# --------------------------------------------------------------------------------------------------
# Aceso: relieve the bottleneck
# --------------------------------------------------------------------------------------------------


class Move(NamedTuple):
    """One of Aceso's reconfiguration primitives. shift: the least factor of degree `field` goes to
    degree `to`; up, down: `field` gets its next or previous option; set: `field` becomes `to`."""

    kind: str
    field: str
    to: Any = None


def shift(source: str, target: str) -> Move:
    """The least factor of one degree goes to another: shift("tp", "dp")."""
    return Move("shift", source, target)


def up(field: str) -> Move:
    """The next option of a field: of more recomputation, a larger micro-batch."""
    return Move("up", field)


def down(field: str) -> Move:
    """The previous option of a field."""
    return Move("down", field)


def use(schedule: str) -> Move:
    """Another pipeline schedule."""
    return Move("set", "schedule", schedule)


def chunks(n: int) -> Move:
    """n chunks of layers per rank, of the interleaved schedule."""
    return Move("set", "chunks", n)


# What relieves a term of the step or a kind of memory
REMEDIES = {
    "matmuls": [
        down("recompute"), shift("tp", "dp"), up("micro"), shift("tp", "pp"), shift("pp", "dp"),
    ],
    "attention": [shift("cp", "dp"), shift("tp", "dp"), shift("pp", "dp")],
    "elementwise": [shift("dp", "tp"), shift("pp", "tp")],
    "tensor parallel": [shift("tp", "dp"), shift("tp", "pp"), shift("tp", "cp")],
    "context parallel": [shift("cp", "dp"), shift("cp", "tp"), shift("cp", "pp")],
    "expert parallel": [down("ep"), shift("tp", "dp")],
    "recomputation": [down("recompute"), down("micro"), shift("dp", "pp")],
    "head and loss": [shift("pp", "dp"), shift("dp", "tp")],
    "uneven stages": [
        shift("pp", "dp"), shift("pp", "tp"), down("chunks"), up("chunks"), chunks(4), chunks(6),
    ],
    "bubble": [
        use("interleaved"), use("zb-h1"), use("zbv"), up("chunks"), chunks(6), down("micro"),
        shift("pp", "dp"), shift("pp", "tp"), shift("pp", "cp"),
    ],
    "stage to stage": [down("chunks"), use("1f1b"), use("zb-h1"), shift("pp", "dp"), up("micro")],
    "data parallel": [
        shift("dp", "tp"), shift("dp", "pp"), shift("dp", "cp"), down("zero"), up("ep"),
        up("micro"),
    ],
    "optimizer": [shift("dp", "tp"), shift("dp", "pp"), shift("pp", "dp")],
    "weights": [
        up("zero"), shift("dp", "tp"), shift("dp", "pp"), shift("dp", "cp"), up("ep"),
        up("recompute"),
    ],
    "gradients": [
        up("zero"), shift("dp", "tp"), shift("dp", "pp"), shift("dp", "cp"), up("ep"),
        up("recompute"),
    ],
    "activations": [
        up("recompute"), down("micro"), shift("dp", "tp"), shift("dp", "cp"), use("1f1b"),
        shift("pp", "tp"), shift("pp", "cp"),
    ],
    "logits": [down("micro"), shift("dp", "tp"), shift("dp", "cp"), up("recompute")],
}  # fmt: skip
HOPS, BEAM = 4, 2  # moves in a row; configurations kept after each but the last
OPTIONS = {"micro": (1, 2, 4, 8), "zero": (1, 2, 3), "recompute": RECOMPUTE, "chunks": range(2, 9)}


def change_field(p: Plan, move: Move) -> Plan | None:
    """The plan after a move, whether or not it can run. None if there is no such option."""
    field, value = move.field, getattr(p, move.field)
    if move.kind == "shift":
        if value == 1:
            return None
        factor = divisors(value)[1]
        return replace(p, **{field: value // factor, move.to: getattr(p, move.to) * factor})
    if move.kind == "set" and field == "schedule":
        return replace(p, schedule=move.to, chunks=2 if move.to in ("interleaved", "zbv") else 1)
    if move.kind == "set":
        return replace(p, chunks=move.to) if p.schedule == "interleaved" else p
    if field == "ep":
        return replace(p, ep=value * 2 if move.kind == "up" else value // 2)
    options = OPTIONS[field]
    if value not in options:
        return None
    i = options.index(value) + (1 if move.kind == "up" else -1)
    return replace(p, **{field: options[i]}) if 0 <= i < len(options) else None


def reconfigure(plan: Plan, move: Move) -> Plan | None:
    """The plan after a move, and after what it entails: no schedule without stages, whole
    micro-batches. None if there is nothing to change."""
    p = change_field(plan, move)
    if p is None:
        return None
    p = replace(p, ep=math.gcd(p.ep, p.dp))
    if p.pp == 1:
        p = replace(p, schedule="1f1b", chunks=1)
    if p.zero > 1 and (p.dp * p.cp == 1 or p.pp > 1 and p.zero == 3):
        p = replace(p, zero=2 if p.dp * p.cp > 1 else 1)
    return p if p != plan else None


class Evaluations(dict):
    """plan -> (whether it does not fit, step or bytes) for every plan that was evaluated."""

    def __init__(self, shape: Shape, device: Device, gpus: int, seq: int, batch: int, fixed: dict):
        self.job, self.fixed = (shape, seq, batch), fixed
        self.device, self.allowed = device, set(layouts(shape, device, gpus, seq, fixed))

    def valid(self, p: Plan) -> bool:
        """Whether `plans` has the plan: one that costs no evaluation to reject."""
        return (
            (p.dp, p.tp, p.cp, p.pp) in self.allowed
            and all(getattr(p, name) == value for name, value in self.fixed.items())
            and find_conflict(self.job[0], p, *self.job[1:]) is None
        )

    def __missing__(self, p: Plan) -> tuple[bool, float]:
        shape, seq, batch = self.job
        size = sum(memory(shape, p, seq, batch).values())
        over = size > self.device.usable_memory
        self[p] = over, size if over else self.predict(p).step
        return self[p]

    def predict(self, p: Plan) -> Prediction:
        return predict(self.job[0], self.device, p, *self.job[1:])

    def bottlenecks(self, p: Plan) -> list[str]:
        """Kinds of memory of a plan that does not fit, otherwise of time, the largest first."""
        if self[p][0]:
            kinds = memory(self.job[0], p, *self.job[1:])
            kinds["weights"] = kinds.pop("optimizer")  # mostly larger, and relieved alike
        else:
            kinds = self.predict(p).seconds
        return sorted((k for k in kinds if k in REMEDIES and kinds[k] > 0), key=lambda k: -kinds[k])


def relieve(
    seen: Evaluations, plan: Plan, goal: tuple[bool, float], hops: int, visited: set[Plan]
) -> Plan | None:
    """The first plan better than `goal` that up to `hops` moves reach, for the plan's largest
    bottleneck first (Aceso's multi-hop search)."""
    for kind in seen.bottlenecks(plan):
        found = (reconfigure(plan, move) for move in REMEDIES[kind])
        new = [p for p in dict.fromkeys(found) if p and p not in visited and seen.valid(p)]
        visited |= set(new)
        new.sort(key=seen.__getitem__)
        if new and seen[new[0]] < goal:
            return new[0]
        if hops == 1:
            continue
        for p in new[:BEAM]:
            better = relieve(seen, p, goal, hops - 1, visited)
            if better:
                return better
    return None


def climb(seen: Evaluations, plan: Plan, hops: int) -> Plan:
    """The plan after relieving bottlenecks until none can be."""
    while better := relieve(seen, plan, seen[plan], hops, {plan}):
        plan = better
    return plan


def aceso(
    shape: Shape, device: Device, gpus: int, seq: int, batch: int, **fixed: Any
) -> tuple[Plan | None, Evaluations]:
    """The best plan at which no bottleneck can be relieved further, or None if none fits; and what
    was evaluated. One move at a time from a start for each number of stages; then several in a
    row from the best of these."""
    seen = Evaluations(shape, device, gpus, seq, batch, fixed)
    ends = []
    for pp in sorted({layout[3] for layout in seen.allowed}):
        found = plans(shape, device, gpus, seq, batch, **fixed | dict(pp=pp))
        ends += [climb(seen, p, 1) for p in [next(found, None)] if p]
    ends = sorted(dict.fromkeys(ends), key=seen.__getitem__)[:BEAM]
    best = min((climb(seen, p, HOPS) for p in ends), key=seen.__getitem__, default=None)
    return None if best is None or seen[best][0] else best, seen


def aceso_report(args: argparse.Namespace) -> str:
    """The plan, its evaluations, and those of exhaustive search."""
    job, fixed = parse_job(args), fixed_fields(args)
    every = rank_plans(*job, **fixed)
    total = sum(1 for _ in plans(*job, **fixed))
    plan, seen = aceso(*job, **fixed)
    require(plan, f"aceso: found no plan that fits after {len(seen)} evaluations; use more --gpus")
    step, least = seen[plan][1], every[0].step
    return (
        f"aceso: {step:.3f} s/step after {len(seen)} evaluations; {plan}\n"
        f"exhaustive: {least:.3f} s/step after {total} evaluations; {every[0].plan}\n"
        f"ratio {step / least:.3f}\n{train_flags(args.model, job[0], plan, *job[3:])}"
    )


# --------------------------------------------------------------------------------------------------
# Stages of equal GPUs: Merak's layers and recomputation, Oobleck's templates
# --------------------------------------------------------------------------------------------------


def stage_seconds(
    shape: Shape, device: Device, plan: Plan, seq: int, layers: int, last: bool
) -> float:
    """Forward and backward seconds of a micro-batch on a stage, sends included."""
    tokens = plan.micro * seq / (plan.cp * plan.tp)
    local = replace(plan, dp=plan.ep, pp=1, zero=1, schedule="1f1b", chunks=1)
    layer = sum(map(sum, layer_seconds(shape, device, seq, local).values()))
    hop = hop_seconds(shape, device, tokens, far=True)
    return layers * layer + (head_seconds(shape, device, tokens) if last else 2 * hop)


def stage_choices(
    shape: Shape, device: Device, plan: Plan, seq: int, micros: int, kinds: Sequence[str]
) -> list[list[tuple[float, str]]]:
    """For each stage of 1F1B and each number of layers: (seconds, recomputation), the fastest of
    `kinds` that fits in memory, (inf, "") if none does. Stage s keeps the activations of pp - s
    micro-batches, so the first stages recompute and the last ones need not."""

    @cache
    def choose(layers: int, first: bool, last: bool, stored: int) -> tuple[float, str]:
        found = [(math.inf, "")]
        for kind in kinds:
            p = replace(plan, recompute=kind)
            ends = count_ends(shape, first, last)
            size = sum(stage_bytes(shape, p, seq, layers, ends, last, stored).values())
            if size <= device.usable_memory:
                found.append((stage_seconds(shape, device, p, seq, layers, last), kind))
        return min(found)

    n, pp = shape.layers, plan.pp
    return [
        [choose(k, s == 0, s == pp - 1, min(micros, pp - s)) for k in range(1, n - pp + 2)]
        for s in range(pp)
    ]


def assign_layers(layers: int, seconds: Sequence[Sequence[float]]) -> list[int] | None:
    """Layers of each stage that minimize the time of the slowest. seconds[s][n - 1]: of n layers on
    stage s, growing with n, inf if they do not fit. None if nothing fits. For a bound on the time,
    every stage takes as many layers as it can: the least bound with room for all is the optimum."""
    room = lambda bound: [bisect.bisect(row, bound) for row in seconds]
    fits = lambda bound: min(room(bound)) >= 1 and sum(room(bound)) >= layers
    bounds = sorted({t for row in seconds for t in row if t < math.inf})
    least = bisect.bisect_left(bounds, True, key=fits)
    if least == len(bounds) or len(seconds) > layers:
        return None
    counts = room(bounds[least])
    for _ in range(sum(counts) - layers):
        open_ = [s for s, n in enumerate(counts) if n > 1]
        counts[max(open_, key=lambda s: seconds[s][counts[s] - 1])] -= 1
    return counts


class Pipeline(NamedTuple):
    """Stages of a pipeline: layers and recomputation of each, seconds of each per micro-batch."""

    layers: list[int]
    recompute: list[str]
    spent: list[float]

    def seconds(self, micros: int) -> float:
        """Of a step of so many micro-batches."""
        return sum(self.spent) + (micros - 1) * max(self.spent) if micros else 0.0


def make_pipeline(
    shape: Shape, device: Device, plan: Plan, seq: int, micros: int, kinds: Sequence[str]
) -> Pipeline | None:
    """The stages of a plan that minimize the slowest one, None if they do not fit. kinds: of
    recomputation, chosen for each stage."""
    if plan.pp > shape.layers:
        return None
    choices = stage_choices(shape, device, plan, seq, micros, kinds)
    counts = assign_layers(shape.layers, [[t for t, _ in row] for row in choices])
    if not counts:
        return None
    chosen = [row[n - 1] for row, n in zip(choices, counts)]
    return Pipeline(counts, [kind for _, kind in chosen], [t for t, _ in chosen])


def merak(
    shape: Shape, device: Device, gpus: int, seq: int, batch: int,
    kinds: Sequence[str] = ("none", "full"), **fixed: Any,
) -> tuple[float, Plan, Pipeline] | None:  # fmt: skip
    """(seconds of a step, plan, stages): the best data, tensor and pipeline parallel degrees and
    micro-batch, with the layers of each stage and whether it recomputes. None if nothing fits.
    ValueError if there is no such plan."""
    found = []
    fields = {"cp": 1, "recompute": "full", "zero": 1} | fixed
    for p in possible_plans(shape, device, gpus, seq, batch, **fields | {"schedule": "1f1b"}):
        micros = batch // (p.dp * p.micro)
        if pipeline := make_pipeline(shape, device, p, seq, micros, kinds):
            slot = max(pipeline.spent)
            sync = data_parallel(
                shape, device, p, max(pipeline.layers), micros, (slot / 3, 2 * slot / 3)
            )
            found.append((pipeline.seconds(micros) + sum(sync), p, pipeline))
    return min(found, key=lambda one: one[0], default=None)


def merak_report(args: argparse.Namespace) -> str:
    """The plan whose stages choose recomputation, beside those where all stages do or none does."""
    job, fixed = parse_job(args), fixed_fields(args)
    lines = []
    for name, kinds in (("none", ("none",)), ("full", ("full",)), ("each", ("none", "full"))):
        got = merak(*job, kinds, **fixed)
        if got:
            step, p, pipeline = got
            lines += [f"recompute {name + ' stage' * (name == 'each'):<11}{step:>8.2f} s/step  "
                      f"dp {p.dp} x tp {p.tp} x pp {p.pp}, micro {p.micro}"]  # fmt: skip
    require(lines, f"merak: no stages of {args.model} fit {args.gpus} GPUs; use more --gpus")
    kinds = set(pipeline.recompute)
    again = [s for s, kind in enumerate(pipeline.recompute) if kind == "full"]
    plan = replace(p, recompute=kinds.pop() if len(kinds) == 1 else "none")
    stages = again if plan.recompute == "none" else ()
    flags = train_flags(args.model, job[0], plan, *job[3:], pipeline.layers, stages)
    return "\n".join([*lines, flags])


def template_sizes(least: int, nodes: int, failures: int) -> range:
    """Sizes of the pipeline templates that cover every number of nodes left (Oobleck, 4.1.1): from
    `least`, which the model needs, to what `failures` other pipelines of that size leave.

    Every n from (f + 1) least to `nodes` is covered by f + 1 pipelines: f of the least size and one
    of n - f least, which is between least and nodes - f least. Sizes up to 2 least - 1 suffice for
    that with at least f + 1: with n = q least + r, q - 1 of the least size and one of least + r."""
    copies = failures + 1
    fix = f"{copies} copies of a model that needs {least} nodes do not fit {nodes} nodes"
    require(nodes >= copies * least, f"--failures {failures}: {fix}; use more --gpus")
    return range(least, nodes - failures * least + 1)


def cover_nodes(nodes: int, rates: dict[int, float], copies: int) -> dict[int, tuple[int, ...]]:
    """n -> sizes of at least `copies` pipelines that use exactly n nodes, with the highest sum of
    rates (Oobleck, 4.2.1), for all n <= nodes that have some. rates: of each size."""
    best = {(0, 0): (0.0, ())}  # (nodes used, pipelines up to `copies`) -> (rate, sizes)
    for n, (size, rate), count in product(range(1, nodes + 1), rates.items(), range(copies + 1)):
        if (n - size, count) in best:
            total, sizes = best[n - size, count]
            key = n, min(count + 1, copies)
            if key not in best or total + rate > best[key][0]:
                best[key] = total + rate, (*sizes, size)
    return {n: sizes for (n, count), (_, sizes) in best.items() if count == copies}


def distribute_micro_batches(micros: int, pipelines: Sequence[Pipeline]) -> list[int]:
    """Micro-batches of each pipeline such that the last to finish finishes earliest (Oobleck,
    4.2.2): the next one goes to the pipeline that would then finish first."""
    counts = [0] * len(pipelines)
    finish = [(p.seconds(1), i) for i, p in enumerate(pipelines)]
    heapq.heapify(finish)
    for _ in range(micros):
        i = finish[0][1]
        counts[i] += 1
        heapq.heapreplace(finish, (pipelines[i].seconds(counts[i] + 1), i))
    return counts


def oobleck_pipelines(args: argparse.Namespace) -> tuple[dict[int, Pipeline], Plan, int]:
    """(number of nodes -> its pipeline, for all that fit; what they share; micro-batches)"""
    shape, device, gpus, seq, batch = parse_job(args)
    fixed = fixed_fields(args)
    kinds = [fixed.pop("recompute")] if args.recompute else RECOMPUTE
    plan = Plan(**{"tp": math.gcd(device.node, shape.kv_heads)} | fixed)
    why = find_conflict(shape, plan, seq, batch)
    require(not why, why)
    node = device.node
    fix = f"--tp {plan.tp} does not divide a node of {node} GPUs; use a divisor"
    require(node % plan.tp == 0, fix)
    require(gpus >= node, f"search oobleck requires whole nodes; use at least --gpus {node}")
    micros, made = batch // plan.micro, {}
    for n in range(1, gpus // node + 1):
        p = replace(plan, pp=n * node // plan.tp)
        if pipeline := make_pipeline(shape, device, p, seq, micros, kinds):
            made[n] = pipeline
    require(made, f"oobleck: {args.model} does not fit {gpus} {args.device}; use more --gpus")
    return made, plan, micros


def oobleck_report(args: argparse.Namespace) -> str:
    """The templates, and the pipelines for every number of nodes that failures can leave."""
    require(args.failures.isdecimal(), f"--failures {args.failures} is no number of nodes; use 1")
    made, shared, micros = oobleck_pipelines(args)
    shape, device, gpus, seq, batch = parse_job(args)
    failures, nodes = int(args.failures), gpus // device.node
    sizes = [n for n in template_sizes(min(made), nodes, failures) if n in made]
    covers = cover_nodes(nodes, {n: 1 / max(made[n].spent) for n in sizes}, failures + 1)
    lines = [f"templates of {sizes[0]} to {sizes[-1]} nodes, tp {shared.tp}; "
             f"{failures} may fail at once",
             f"{'nodes':>5}{'s/step':>9}  pipelines: nodes x micro-batches"]  # fmt: skip
    for n in range(nodes, (failures + 1) * sizes[0] - 1, -1):
        fix = f"at most {sizes[-1]} have a layer per stage; raise --tp"
        require(n in covers, f"oobleck: no pipelines use {n} nodes: {fix}")
        used = covers[n]
        few = f"{micros} micro-batches are fewer than {len(used)} pipelines; use a larger --batch"
        require(micros >= len(used), few)
        counts = distribute_micro_batches(micros, [made[i] for i in used])
        step = max(made[i].seconds(m) for i, m in zip(used, counts))
        row = ", ".join(f"{i} x {m}" for i, m in zip(used, counts))
        lines.append(f"{n:>5}{step:>9.2f}  {row}")
        if len(set(zip(used, counts))) == 1:  # train.py's pipelines are equal
            layers, kinds, _ = made[used[0]]
            kind = max(kinds, key=RECOMPUTE.index)
            plan = replace(shared, dp=len(used), pp=len(layers), recompute=kind)
            flags = train_flags(args.model, shape, plan, seq, batch, layers)
            lines.append(f"{'':16}{flags}")
    return "\n".join(lines)


class Method(NamedTuple):
    """A system's search: its report, the shared flags that it reads (flags.py), what it finds."""

    report: Callable[[argparse.Namespace], str]
    flags: str
    finds: str


_JOB = "model device gpus seq batch"
METHODS = {
    "aceso": Method(
        aceso_report, f"{_JOB} {PLAN_FIELDS} fp8 eager", "any plan, by relieving its bottleneck"
    ),
    "oobleck": Method(
        oobleck_report, f"{_JOB} tp micro recompute fp8 eager",
        "pipelines of different sizes that use every node left after a failure",
    ),
    "merak": Method(
        merak_report, f"{_JOB} dp tp cp pp ep zero micro fp8 eager",
        "layers of each stage, and whether it recomputes",
    ),
    "alpa": Method(
        auto_sharding.alpa_report, f"{_JOB} recompute", "a sharding per operator, stages on meshes"
    ),
    "hap": Method(
        auto_sharding.hap_report, "model device seq batch micro", "uneven shards on unequal GPUs"
    ),
    "crius": Method(
        mixed_cluster.report, "seq batch json", "GPU type, number and stages of each of many jobs"
    ),
    "helix": Method(helix.helix_report, "problem model", "layers on unequal GPUs, for serving"),
    "spindle": Method(
        spindle.spindle_report, "problem device gpus", "waves of the operators of several tasks"
    ),
    "disttrain": Method(
        pipeline_search.disttrain_report, "problem model device gpus seq",
        "GPUs of each module of a multimodal model",
    ),
    "dynapipe": Method(
        pipeline_search.dynapipe_report, "problem model device",
        "micro-batches of sequences of unequal lengths",
    ),
    "perseus": Method(
        pipeline_search.perseus_report, "problem model device seq",
        "a clock for every pass of a pipeline",
    ),
}  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    """A sub-command for each of METHODS, with the flags that it reads."""
    methods = parser.add_subparsers(dest="method", required=True, metavar="METHOD")
    for name, method in METHODS.items():
        about = f"{method.finds[0].upper()}{method.finds[1:]}."
        own = methods.add_parser(name, help=method.finds, description=about, allow_abbrev=False)
        add_shared(own, method.flags)
        if name == "oobleck":
            own.add_argument("--failures", default="1", help="nodes that may fail at once (1)")
        if name == "crius":
            mixed_cluster.add_flags(own)
        own.set_defaults(report=method.report)
