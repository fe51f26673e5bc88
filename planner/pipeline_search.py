"""Searches for training pipelines: GPUs of each module, micro-batches, a clock for every pass.

    python -m planner search disttrain --gpus 64
    python -m planner search dynapipe --problem '{"lengths": [900, 80, 75], "pp": 4}'
    python -m planner search perseus --model llama3-8b

    disttrain  multimodal training: GPUs and parallelism of encoder, backbone and generator, exact;
               samples to ranks and the order of microbatches, heuristics (arXiv:2408.04275)
    dynapipe   documents of unequal lengths to micro-batches under a memory cap, exact
               (arXiv:2311.10418)
    perseus    passes that are not on the critical path run slower, at less energy, while the
               iteration takes no longer: the least energy of a pipeline at each iteration time,
               exact for convex energies (arXiv:2312.06902)

The first two minimize the time of a pipeline, sum(t) + weight max(t) (`least_sum_and_max`); perseus
cuts the graph of passes once per unit of time (solvers.max_flow). schedules.py lists the passes,
and simulates them.

When it loses: times come from formulas or from --problem, not from a profile of the machine. sum(t)
+ weight max(t) is a bound unless all t are equal. train.py runs the layouts and layers that are
printed, but pads or packs rows to one length, and sets no clocks; GPUs cannot change theirs for
each pass when passes are shorter than some ten milliseconds. test_all.py compares all three with
all solutions of small random problems. Needs: the standard library.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import argparse
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from parallelism.schedules import Action, Costs, Schedule, balance, make_schedule, simulate
from planner.cost_model import GIB, Device, Shape, load_device, load_shape, parse_number, require
from planner.flags import is_count, is_positive, read_problem
from planner.solvers import Arcs, lower_hull, max_flow
from planner.training_plan import (
    LOGITS_BYTES,
    Plan,
    activation_bytes,
    block,
    divisors,
    head_seconds,
    layer_parameters,
    memory,
    model_flag,
    passes,
    state_bytes,
)

# --------------------------------------------------------------------------------------------------
# DistTrain: encoder, backbone and generator
# --------------------------------------------------------------------------------------------------


def least_sum_and_max(solve: Callable[[float], Any], weight: float) -> tuple[float, Any]:
    """The least sum(t) + weight max(t) and its solution. solve(bound) -> (sum, max, solution) with
    the least sum of those with every t < bound, or None. The sum grows as the bound falls, so that
    only a max below (best - sum) / weight can still be better."""
    best, bound = (math.inf, None), math.inf
    while (found := solve(bound)) is not None:
        total, most, solution = found
        best = min(best, (total + weight * most, solution), key=lambda pair: pair[0])
        if best[0] <= total or weight == 0:
            break
        bound = min(most, (best[0] - total) / weight)
    return best


class Option(NamedTuple):
    """A way to run a module: GPUs, stages, seconds of a stage per microbatch."""

    gpus: int
    stages: int
    seconds: float
    label: str = ""


def orchestrate(
    modules: Mapping[str, Sequence[Option]], gpus: int, microbatches: int
) -> tuple[float, dict[str, Option]]:
    """(seconds, an option of each module) with the least time of a 1F1B pipeline through all
    modules on at most `gpus`: the first microbatch passes every stage, the others wait for the
    slowest (section 4's warm-up and steady phases). By dynamic programming over modules and GPUs.
    (inf, None) if nothing fits."""

    def solve(bound: float) -> tuple[float, float, dict[str, Option]] | None:
        best = {0: (0.0, {})}  # GPUs used -> (sum, options)
        for name, options in modules.items():
            after: dict[int, tuple[float, dict[str, Option]]] = {}
            for (used, (total, chosen)), o in itertools.product(best.items(), options):
                n, spent = used + o.gpus, total + o.stages * o.seconds
                if n <= gpus and o.seconds < bound and spent < after.get(n, (math.inf,))[0]:
                    after[n] = spent, chosen | {name: o}
            best = after
        if not best:
            return None
        total, chosen = min(best.values(), key=lambda found: found[0])
        return total, max(o.seconds for o in chosen.values()), chosen

    return least_sum_and_max(solve, microbatches - 1)


def balance_ranks(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Samples of each data-parallel rank, the longest first to the least loaded (LPT): the slowest
    rank takes at most 4/3 - 1/(3 ranks) of the best possible (Graham, 1969). The sum of gradients
    over all ranks is the same in any order."""
    groups: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        r = loads.index(min(loads))
        groups[r].append(i)
        loads[r] += costs[i]
    return groups


@dataclass(frozen=True)
class ActionCosts(Costs):
    """Costs of simulate() by action."""

    of: Callable[[Action], float] = lambda action: 1.0

    def duration(self, actions: Sequence[Action], schedule: Schedule, split: set) -> float:
        return sum(map(self.of, actions))


def reorder_microbatches(
    costs: Sequence[float], seconds: Callable[[Sequence[float]], float]
) -> list[int]:
    """An order of microbatches whose first stage takes `costs`. seconds: time of the pipeline with
    the costs in that order. A short one first starts the pipeline early, short ones at the end
    leave no stage idle (the idea of the paper's algorithm 2); then swaps while one helps."""
    short = sorted(range(len(costs)), key=costs.__getitem__)
    starts = [list(range(len(costs))), short[:1] + short[:0:-1]]
    time = lambda order: seconds([costs[i] for i in order])
    order = min(starts, key=time)
    best, improved = time(order), True
    while improved:
        improved = False
        for i, j in itertools.combinations(range(len(order)), 2):
            order[i], order[j] = order[j], order[i]
            if (now := time(order)) < best * (1 - 1e-12):
                best, improved = now, True
            else:
                order[i], order[j] = order[j], order[i]
    return order


DISTTRAIN = {
    "modules": {  # layers, width, heads, tokens of a sample; null: --model at --seq
        "encoder": [32, 1280, 16, 8192],  # ViT-H's layers (arXiv:2010.11929, table 1)
        "backbone": None,
        "generator": [28, 1152, 16, 4096],  # DiT-XL's (arXiv:2212.09748, table 1)
    },
    "samples": 256,  # per step
    "ranks": 8,  # over which samples are balanced
    "costs": [round(random.Random(i).lognormvariate(0, 1), 2) for i in range(512)],  # of samples
}


def module_options(
    shape: Shape, device: Device, seq: int, samples: int, gpus: int
) -> Iterator[Option]:
    """Ways to run a module for microbatches of `samples` samples in all: tensor parallelism in a
    node, equal stages, data parallelism; full recomputation, ZeRO 1, as many microbatches in flight
    as the module has stages."""
    for tp, dp in itertools.product(divisors(device.node), divisors(samples)):
        if shape.heads % tp or seq % tp or tp * dp > gpus:
            continue
        base = Plan(dp=dp, tp=tp, micro=samples // dp, recompute="full")
        layer = sum(passes(shape, device, seq, base))
        head = head_seconds(shape, device, base.micro * seq / tp)
        for pp in divisors(shape.layers):
            plan = replace(base, pp=pp)
            size = sum(memory(shape, plan, seq, pp * samples).values())
            if plan.gpus <= gpus and size <= device.usable_memory:
                seconds = shape.layers / pp * layer + head
                yield Option(plan.gpus, pp, seconds, f"--dp {dp} --tp {tp} --pp {pp}")


def disttrain_report(args: argparse.Namespace) -> str:
    """GPUs and parallelism of each module, the best of all numbers of samples per microbatch; and
    what reordering gains."""
    p, device = read_problem(args, DISTTRAIN), load_device(args.device)
    gpus = parse_number(args.gpus, "--gpus")
    shapes, best = {}, (math.inf, None, 0)
    for name, given in p.modules.items():
        ok = given is None or isinstance(given, list) and len(given) == 4
        ok = ok and all(map(is_count, given or ())) and (given is None or given[1] % given[2] == 0)
        text = "must be null or [layers, width, heads, tokens], with a width of whole heads"
        require(ok, f"--problem: modules: {name} {text}")
        seq = parse_number(args.seq, "--seq", 1024)
        shapes[name] = (load_shape(args.model), seq) if not given else (block(*given[:3]), given[3])
    for together in divisors(p.samples):
        ways = {n: [*module_options(shape, device, seq, together, gpus)]
                for n, (shape, seq) in shapes.items()}  # fmt: skip
        found = (*orchestrate(ways, gpus, p.samples // together), together)
        best = min(best, found, key=lambda found: found[0])
    seconds, chosen, together = best
    require(chosen, f"the modules do not fit {gpus} {args.device}; use more --gpus")
    lines = [f"{p.samples} samples on {gpus} {args.device}: {seconds:.2f} s, "
             f"{p.samples // together} microbatches of {together} samples"]  # fmt: skip
    lines += [f"  {n:<12}{o.gpus:>5} GPUs{o.seconds:>9.3f} s a stage  {o.label}"
              for n, o in chosen.items()]  # fmt: skip
    return "\n".join([*lines, *reorder_lines(p, [*chosen.values()])])


def reorder_lines(p: argparse.Namespace, options: Sequence[Option]) -> list[str]:
    """What reordering gains if the samples' shares of the first module's time are p.costs: samples
    balanced over ranks, and 8 microbatches of the slowest rank in the best order."""
    ok = all(map(is_positive, p.costs)) and len(p.costs) >= 8 * p.ranks
    require(ok, f"--problem: costs must be {8 * p.ranks} positive numbers or more")
    scale = options[0].seconds * 8 * p.ranks / sum(p.costs)
    costs = [scale * c for c in p.costs]
    load = lambda group: sum(costs[i] for i in group)
    given = [range(r, len(costs), p.ranks) for r in range(p.ranks)]
    ranks = balance_ranks(costs, p.ranks)
    slowest = max(ranks, key=load)
    micro = [load(slowest[m::8]) for m in range(8)]
    stages = [options[0].seconds] * (options[0].stages - 1)
    stages += [o.seconds for o in options[1:] for _ in range(o.stages)]
    schedule = make_schedule("1f1b", 1 + len(stages), 8)

    def seconds(first: Sequence[float]) -> float:  # a third of a stage's time is forward
        whole = lambda a: stages[a.chunk - 1] if a.chunk else first[a.microbatch]
        of = lambda a: whole(a) * (1 if a.kind == "F" else 2) / 3
        return simulate(schedule, ActionCosts(of=of)).makespan

    order = reorder_microbatches(micro, seconds)
    return [
        f"{len(costs)} unequal samples on {p.ranks} ranks: the slowest needs "
        f"{max(map(load, given)):.3f} s as given, {load(slowest):.3f} balanced",
        f"its 8 microbatches through {1 + len(stages)} stages: {seconds(micro):.3f} s as given, "
        f"{seconds([micro[i] for i in order]):.3f} in the order {' '.join(map(str, order))}",
    ]


# --------------------------------------------------------------------------------------------------
# DynaPipe: documents to micro-batches
# --------------------------------------------------------------------------------------------------


def micro_batches(
    lengths: Sequence[int], seconds: Callable[[int, int], float],
    fits: Callable[[int, int], bool], stages: int, replicas: int = 1,
) -> tuple[float, list[list[int]]]:  # fmt: skip
    """(seconds, documents of each micro-batch, padded to its longest), the slowest first, with the
    least sum(t) / replicas + (stages - 1) max(t): of one replica, the time of 1F1B if all t are
    equal, and a bound of it if they are in this order. seconds and fits: of a stage for (number of
    documents, padded length), monotonic. ValueError if a document alone does not fit.

    Documents are sorted by length, so that a micro-batch is a range of them. Nothing is lost: give
    each micro-batch, in order of its longest document, as many documents as it had, the longest
    first, and no micro-batch has a longer one than before.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    require(order, "dynapipe: there are no lengths")
    ok = fits(1, lengths[order[0]])
    require(ok, f"dynapipe: a document of {lengths[order[0]]} tokens exceeds the memory cap")
    spans: list[list[tuple[int, float]]] = [[]]  # by end: (first, seconds)
    for j in range(1, len(order) + 1):
        ways = ((i, j - i, lengths[order[i]]) for i in range(j - 1, -1, -1))
        some = itertools.takewhile(lambda way: fits(*way[1:]), ways)
        spans.append([(i, seconds(n, length)) for i, n, length in some])

    def solve(bound: float) -> tuple[float, float, list[list[int]]] | None:
        best = [(0.0, 0.0, 0)]  # documents before j -> (sum, seconds and start of the last range)
        for j in range(1, len(order) + 1):
            ways = itertools.takewhile(lambda span: span[1] < bound, spans[j])
            reach = min(((best[i][0] + t, t, i) for i, t in ways), default=(math.inf, 0.0, 0))
            best.append(reach)
        if best[-1][0] == math.inf:
            return None
        found, j = [], len(order)
        while j:
            _, t, i = best[j]
            found.append((t, order[i:j]))
            j = i
        found.sort(key=lambda pair: -pair[0])
        return best[-1][0] / replicas, found[0][0], [group for _, group in found]

    return least_sum_and_max(solve, stages - 1)


DYNAPIPE = {
    "lengths": [64 + int(random.Random(i).lognormvariate(6, 1)) for i in range(128)],  # tokens
    "pp": 4,
    "dp": 1,
    "memory": None,  # bytes of activations per rank; default: what the model's states leave
}


def stage_passes(
    shape: Shape, device: Device, seq: int, stages: int
) -> tuple[list[int], list[tuple[float, float]]]:
    """(layers, seconds of F and of B) of each stage for one sequence: layers balanced by time,
    the head with the last ones."""
    forward, backward = passes(shape, device, seq)
    head = head_seconds(shape, device, seq)
    costs = [forward + backward] * (shape.layers - 1) + [forward + backward + head]
    counts = [end - first for first, end in balance(costs, stages)]
    times = [(n * forward, n * backward) for n in counts]
    return counts, [*times[:-1], (times[-1][0] + head / 3, times[-1][1] + 2 * head / 3)]


def stage_flags(model: str, counts: Sequence[int]) -> str:
    """The command line of train.py with these layers on its stages."""
    layers = ",".join(map(str, counts))
    pp = f"--pp {len(counts)} --pp-schedule 1f1b"
    return f"train.py {model_flag(model)} {pp} --set pp_layers={layers}"


def stage_costs(
    shape: Shape, device: Device, counts: Sequence[int]
) -> tuple[Callable[[int, int], float], float]:
    """(seconds of the slowest stage for (documents, padded length), bytes that a padded token saves
    on the fullest stage). counts: layers of each stage; the last one has the head and its logits,
    and stage s has the activations of pp - s micro-batches (1F1B)."""

    def seconds(n: int, length: int) -> float:
        layer = sum(passes(shape, device, length, Plan(micro=n)))
        last = counts[-1] * layer + head_seconds(shape, device, n * length)
        return max(max(counts) * layer, last)

    saved = activation_bytes(shape, "none", True)
    held = [(len(counts) - s) * layers * saved for s, layers in enumerate(counts)]
    return seconds, max(*held, held[-1] + LOGITS_BYTES * shape.vocab)


def activation_budget(shape: Shape, device: Device, counts: Sequence[int], dp: int) -> float:
    """Bytes that the model's states leave for activations. One stage has embedding and head."""
    ends = 2 if len(counts) == 1 and not shape.tied else 1
    layers = max(counts) * sum(layer_parameters(shape)) / shape.layers
    states = state_bytes(layers + ends * shape.dim * shape.vocab, dp, 1, gradient=4)
    return device.model_memory - sum(states)


def dynapipe_report(args: argparse.Namespace) -> str:
    """The micro-batches beside the best ones of a fixed number of documents; train.py's flags."""
    p, device = read_problem(args, DYNAPIPE), load_device(args.device)
    shape = load_shape(args.model)
    require(all(map(is_count, p.lengths)), "--problem: lengths must be whole numbers of tokens")
    ok = p.pp <= shape.layers
    require(ok, f"--problem: pp {p.pp} is more than the model's {shape.layers} layers")
    counts, _ = stage_passes(shape, device, max(p.lengths), p.pp)
    cap = activation_budget(shape, device, counts, p.dp) if p.memory is None else p.memory
    text = "memory must be positive: bytes for activations; or use a higher pp"
    require(is_positive(cap), f"--problem: {text}")
    seconds, saved = stage_costs(shape, device, counts)
    fits = lambda n, length: n * length * saved <= cap
    _, found = micro_batches(p.lengths, seconds, fits, p.pp, p.dp)
    longest = lambda group: max(p.lengths[i] for i in group)

    def row(name: str, groups: Sequence[Sequence[int]]) -> tuple[float, str]:
        sizes = [(len(group), longest(group)) for group in groups]
        times, tokens = [seconds(*size) for size in sizes], [n * length for n, length in sizes]
        time = sum(times) / p.dp + (p.pp - 1) * max(times)
        numbers = f"{len(groups):>8}{1 - sum(p.lengths) / sum(tokens):>9.1%}"
        return time, f"{time:>9.3f}{numbers}{max(tokens) * saved / GIB:>7.1f}  {name}"

    whole = range(len(p.lengths))
    rows = [f"{len(whole)} documents, {sum(p.lengths):,} tokens, pp {p.pp}, dp {p.dp}, "
            f"{cap / GIB:.1f} GiB for activations",
            f"{'s/step':>9}{'batches':>8}{'padding':>9}{'GiB':>7}"]  # fmt: skip
    for name, order in ("as given", whole), ("sorted", sorted(whole, key=p.lengths.__getitem__)):
        splits = ((n, [order[i : i + n] for i in whole[::n]]) for n in range(1, len(whole) + 1))
        fixed = [row(f"{name}, {n} documents each", groups) for n, groups in splits
                 if all(fits(len(group), longest(group)) for group in groups)]  # fmt: skip
        rows.append(min(fixed)[1])
    flags = stage_flags(args.model, counts)
    rows += [row("dynamic programming", found)[1], flags, "documents x tokens:"]
    return "\n".join([*rows, " ".join(f"{len(group)}x{longest(group)}" for group in found)])


# --------------------------------------------------------------------------------------------------
# Perseus: a clock for every forward and backward pass
# --------------------------------------------------------------------------------------------------


WAITING_WATTS = 75.5  # of a GPU blocked in a receive: the default of Perseus's lowtime library


def energy_curve(options: Mapping[float, float], unit: float = 1) -> dict[int, float]:
    """Least joules at each whole number of time units, from options {seconds: joules}: the lower
    convex hull from the fastest option, rounded up, to the one with the least energy."""
    hull = lower_hull(options.items())
    first = max(1, math.ceil(hull[0][0] / unit * (1 - 1e-9)))
    curve, lines = {first: hull[0][1]}, list(itertools.pairwise(hull))
    for t in range(first, int(hull[-1][0] / unit * (1 + 1e-9)) + 1 if lines else first):
        # of a convex curve, the highest of all lines
        curve[t] = max(e + (t * unit - s) * (f - e) / (u - s) for (s, e), (u, f) in lines)
    return curve


class Point(NamedTuple):
    """A Pareto-optimal plan: time units and joules of an iteration, units of each pass."""

    time: int
    joules: float
    plan: dict[Action, int]


def energy_frontier(
    schedule: Schedule, curves: Callable[[Action], dict[int, float]]
) -> Iterator[Point]:
    """The plans with the least energy at each time, from the slowest useful one to the fastest.

    Events are starts and ends of passes; the time between the two of a pass is what it may take,
    and curves(action) is its energy by time (convex and decreasing, see energy_curve). One unit
    faster: events on one side of a cut move one unit earlier. The minimum cut of (energy of passes
    that get shorter) - (gain of passes that get longer) keeps the plan optimal, because the total
    energy is L-natural-convex in the events (Phillips and Dessouky, Management Science 1977).
    """
    curve_of = {a: curves(a) for actions in schedule.actions for a in actions}
    slowest = ActionCosts(of=lambda a: max(curve_of[a]))
    at: dict[Hashable, int] = {"begin": 0}
    arcs: list[tuple[Hashable, Hashable, dict[int, float]]] = []
    keys, order = {a[:3]: a for a in curve_of}, {0: 0.0}
    for events in simulate(schedule, slowest).events:
        last = "begin"
        for start, end, a in events:
            at[a, "start"], at[a, "end"] = round(start), round(end)
            before = [last, *((keys[key], "end") for key in schedule.dependencies(a))]
            arcs += [(node, (a, "start"), order) for node in before]
            arcs.append(((a, "start"), (a, "end"), curve_of[a]))
            last = a, "end"
        arcs.append((last, "finish", order))
    at["finish"] = max(at.values())
    while True:
        plan = {a: min(at[a, "end"] - at[a, "start"], max(c)) for a, c in curve_of.items()}
        yield Point(at["finish"], sum(curve_of[a][t] for a, t in plan.items()), plan)
        found = max_flow(cut_arcs(arcs, at), "begin", "finish")
        if found is None:  # no pass on the critical path can be faster
            return
        for node in at:
            at[node] -= node not in found[1]


def cut_arcs(arcs: Iterable[tuple], at: Mapping[Hashable, int]) -> Arcs:
    """Arcs whose cuts cost the energy of a unit less between the sides. A pass that gets longer is
    an arc that crosses back, with a negative cost; as [u in S] - [v in S] is [u -> v crosses] - [v
    -> u crosses], adding `gain` of that to an arc leaves it a cost in one direction only, and each
    node a cost of its side."""
    capacity, side = defaultdict(float), defaultdict(float)
    for u, v, curve in arcs:
        time, least, most = at[v] - at[u], min(curve), max(curve)
        loss = math.inf if time == least else curve[time - 1] - curve[time] if time <= most else 0.0
        gain = curve[time] - curve[time + 1] if time < most else 0.0
        if loss > gain:
            capacity[u, v] += loss - gain
        side[u] += gain
        side[v] -= gain
    for node, cost in side.items():
        if cost > 0 and node not in ("begin", "finish"):
            capacity[node, "finish"] += cost
        elif cost < 0 and node not in ("begin", "finish"):
            capacity["begin", node] -= cost
    return capacity


PERSEUS = {
    "pp": 4,
    "micro_batches": 8,
    "clocks": [1.0, 0.9, 0.8, 0.7, 0.6, 0.5],  # of the highest
    "watts": 700.0,  # at the highest clock: the limit of an H100 SXM (datasheet)
    "waiting": WAITING_WATTS,
    "options": None,  # of each stage [F, B], each {seconds: joules}; default: from the model
    "units": 8,  # of time in the shortest pass: times are rounded to one
    "seconds": None,  # of the slowest pipeline of a job, if it is another one ("straggler")
}
Stage = list[dict[float, float]]  # {seconds: joules} of its F and its B


def clock_options(p: argparse.Namespace, seconds: float) -> dict[float, float]:
    """{seconds: joules} of a pass that takes `seconds` at the highest clock: its time is as 1 /
    clock, its power above that of a waiting GPU as the clock's cube (f V^2 with V ~ f)."""
    options = {}
    for clock in p.clocks:
        power = p.waiting + (p.watts - p.waiting) * clock**3
        options[seconds / clock] = power * seconds / clock
    return options


def read_stages(p: argparse.Namespace, args: argparse.Namespace) -> tuple[list[Stage], str]:
    """(options of each stage, the flags of train.py with its layers)."""
    if p.options is None:
        for clock in p.clocks:
            text = "--problem: clocks must be fractions of the highest: above 0, at most 1"
            require(is_positive(clock) and clock <= 1, text)
        text = f"--problem: watts {p.watts:g} must be above waiting {p.waiting:g}"
        require(p.watts > p.waiting, text)
        shape, seq = load_shape(args.model), parse_number(args.seq, "--seq", 1024)
        text = f"--problem: pp {p.pp} is more than the model's {shape.layers} layers"
        require(p.pp <= shape.layers, text)
        counts, times = stage_passes(shape, load_device(args.device), seq, p.pp)
        options = [[clock_options(p, t) for t in stage] for stage in times]
        return options, stage_flags(args.model, counts)
    try:
        stages = [[{float(t): e for t, e in both.items()} for both in s] for s in p.options]
        numbers = [x for s in stages for both in s for pair in both.items() for x in pair]
        require(all(map(is_positive, numbers)) and all(map(all, stages)), "")
        require(len(stages) == p.pp and all(len(s) == 2 for s in stages), "")
    except (AttributeError, TypeError, ValueError):
        text = f"{p.pp} stages (pp) of [F, B], each {{seconds: joules}} with positive numbers"
        raise ValueError(f"--problem: options must be {text}") from None
    return stages, f"train.py --pp {p.pp} --pp-schedule 1f1b"


def of_pass(stages: Sequence[Sequence[Any]], a: Action) -> Any:
    """What a pass has in [F, B] of each stage."""
    return stages[a.chunk][0 if a.kind == "F" else 1]


def pass_curves(p: argparse.Namespace, stages: list[Stage], unit: float) -> list[list[dict]]:
    """The energy curves of the F and the B of each stage. A GPU waits at all other times, so that a
    pass costs what it takes above that."""
    curves = []
    for stage in stages:
        above = [{t: e - p.waiting * t for t, e in options.items()} for options in stage]
        curves.append([energy_curve(options, unit) for options in above])
    return curves


def fastest_iteration(
    p: argparse.Namespace, stages: list[Stage], schedule: Schedule
) -> tuple[float, float]:
    """Seconds and joules with the highest clock for every pass."""
    fastest = ActionCosts(of=lambda a: min(of_pass(stages, a)))
    seconds = simulate(schedule, fastest).makespan
    joules = p.waiting * p.pp * seconds
    for a in itertools.chain(*schedule.actions):
        options = of_pass(stages, a)
        joules += options[min(options)] - p.waiting * min(options)
    return seconds, joules


def time_unit(p: argparse.Namespace, stages: list[Stage]) -> float:
    """Seconds of a unit of time. ValueError for a problem that is too large."""
    require(p.seconds is None or is_positive(p.seconds),
            f"--problem: seconds must be positive, not {p.seconds}")  # fmt: skip
    require(p.pp * p.micro_batches <= 512,
            f"--problem: pp {p.pp} x micro_batches {p.micro_batches} is more than 512")  # fmt: skip
    times = [t for stage in stages for options in stage for t in options]
    unit = min(times) / p.units
    text = f"--problem: passes of {min(times):g} to {max(times):g} s are more than 1,000 units"
    require(max(times) <= 1000 * unit, f"{text}; lower units, or leave slow options out")
    return unit


def perseus_report(args: argparse.Namespace) -> str:
    """The energy of an iteration by its time, and the plan that fits in `seconds`, or the fastest.
    Between two options of a pass, energy is interpolated: run it part of the time at each."""
    p = read_problem(args, PERSEUS)
    stages, flags = read_stages(p, args)
    unit = time_unit(p, stages)
    curves = pass_curves(p, stages, unit)
    schedule = make_schedule("1f1b", p.pp, p.micro_batches)
    fastest, highest = fastest_iteration(p, stages, schedule)
    plans = []  # (seconds, joules with those of waiting, units of each pass), the fastest first
    for point in energy_frontier(schedule, lambda a: of_pass(curves, a)):
        seconds = point.time * unit
        plans.insert(0, (seconds, point.joules + p.waiting * p.pp * seconds, point.plan))
    joules = [plan[1] for plan in plans]
    plans = plans[: 1 + joules.index(min(joules))]
    lines = [
        f"1f1b, {p.pp} stages, {p.micro_batches} micro-batches; at the highest clocks "
        f"{fastest:.3f} s, {highest:,.0f} J",
        f"{'seconds':>9}{'joules':>10}{'saved':>8}",
    ]
    for i in sorted({round(i * (len(plans) - 1) / 6) for i in range(7)}):
        seconds, total, _ = plans[i]
        lines.append(f"{seconds:>9.3f}{total:>10,.0f}{1 - total / highest:>8.1%}")
    chosen = plans[0]
    for plan in plans:
        if p.seconds and plan[0] <= p.seconds:
            chosen = plan
    seconds, total, units = chosen
    lines.append(f"{seconds:.3f} s, {total:,.0f} J: time of each pass over its shortest")
    for actions in schedule.actions:
        for kind in "FB":
            own = [a for a in actions if a.kind == kind]
            ratios = [f"{units[a] / min(of_pass(curves, a)):.2f}" for a in own]
            lines.append(f"  {actions[0].chunk} {kind} {' '.join(ratios)}")
    return "\n".join([*lines, flags])
