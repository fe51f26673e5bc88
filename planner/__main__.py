"""Parallelism planner: predicts which layout trains a model fastest on n GPUs, without a GPU.

    python -m planner --model llama3-405b --gpus 16384 --device h100 --batch 16M

The program alone; the formulas lie beside it, by topic:

    cost_model.py       models, GPUs, FLOPs, collectives
    training_plan.py    memory and time of a training step, the ranking of layouts
    serving_cost.py     prefill and decode steps: operators, time, memory
    serving_plan.py     --serve: the ranking of layouts, disaggregated pools, $ per token
    datacenter.py       --site: a run and a site: days, energy, failures, servers per row
    network_topology.py Clos, rail-optimized, rail-only and HPN networks
    scaling_laws.py     Kaplan's and Chinchilla's laws: a budget's model and tokens
    mixed_cluster.py    --site --mix: jobs on GPUs of several types
    search.py           --search: layouts as Aceso, Oobleck and Merak find them
    auto_sharding.py    --search: shards of each operator (Alpa)
    uneven_sharding.py  --search: uneven shards on heterogeneous GPUs (HAP)
    helix.py            --search: layers on unequal GPUs
    spindle.py          --search: waves of the operators of several tasks
    pipeline_search.py  --search: modules (DistTrain), micro-batches (DynaPipe)
    perseus.py          --search: a clock for every pass of a pipeline
    kernel_model.py     --kernel: a matmul on one GPU: waves, occupancy, L2, regime
    einsum_model.py     --einsum: order of contraction, FLOPs, bytes, tiles
    l2_residency.py     --persist: activations to pin in L2
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    raise SystemExit("run: python -m planner")

import argparse
import json
import os
import sys
from dataclasses import asdict

from planner import datacenter, einsum_model, kernel_model, l2_residency, search, serving_plan
from planner.cost_model import (
    DEVICES,
    GIB,
    SHAPES,
    Device,
    Shape,
    parameters,
    parse_number,
    require,
)
from planner.datacenter import estimate_run
from planner.training_plan import (
    RECOMPUTE,
    SCHEDULES,
    SIZES,
    Prediction,
    fixed_fields,
    parse_job,
    rank_plans,
    train_conflict,
    train_flags,
)

# flag: module of its formulas, with add_flags(parser), report(args) -> str and READS, the flags of
# others that it reads (without it, any of the program's own)
TOPICS = {
    "serve": serving_plan,
    "site": datacenter,
    "search": search,
    "kernel": kernel_model,
    "einsum": einsum_model,
    "persist": l2_residency,
}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The program's flags; given: names of those on the command line; topic_of: of these, the ones
    that belong to a topic -> its flag."""
    about = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser("python -m planner", description=about)
    add = parser.add_argument
    add("--model", default="llama3-8b", help=f"{', '.join(SHAPES)}, or a config.json")
    add("--gpus", default="8", help="their number")
    add("--device", default="h100", help=", ".join(DEVICES))
    add("--seq", default="8192", help="tokens per sequence (k is 1024)")
    add("--batch", help="tokens per step (default: 4M; k is 1024, M 1024^2)")
    add("--tokens", help="of the run (T is 1e12); default: 20 per active parameter (Chinchilla)")
    add("--storage", default="122M", help="bytes/s per GPU for checkpoints; Llama 3 had 2 TB/s")
    add("--top", default="10", help="number of plans to print")
    add("--fp8", action="store_true", help="FP8 matmuls in the layers")
    add("--eager", action="store_true", help="no torch.compile: elementwise kernels are not fused")
    add("--json", action="store_true")
    for name in SIZES:
        add(f"--{name}", type=int, help="fix this field; default: search")
    add("--recompute", choices=RECOMPUTE)
    add("--schedule", choices=SCHEDULES)
    defaults, topic_of = vars(parser.parse_args([])), {}
    for flag, topic in TOPICS.items():
        topic.add_flags(parser)
        more = vars(parser.parse_args([]))
        topic_of |= dict.fromkeys(more.keys() - defaults.keys(), flag)
        defaults = more
    args = parser.parse_args(argv)
    unset = argparse.Namespace(**dict.fromkeys(defaults, ...))
    given = vars(parser.parse_args(argv, unset))
    args.given = {name for name, value in given.items() if value is not ...}
    args.topic_of = {name: flag for name, flag in topic_of.items() if name in args.given}
    return args


def check_flags(args: argparse.Namespace, topics: list[str]) -> None:
    """ValueError for two topics, or a flag that the program would not read."""
    reads = [getattr(TOPICS[flag], "READS", args.given - args.topic_of.keys()) for flag in topics]
    known = {"json"}.union(*reads)
    for name in sorted(args.given):
        owner, flag = args.topic_of.get(name), f"--{name.replace('_', '-')}"
        require(not owner or owner in topics or name in known, f"{flag} requires --{owner}")
    require(len(topics) < 2, f"--{' cannot be combined with --'.join(topics)}")
    if topics and (others := args.given - args.topic_of.keys() - known):
        name = min(others).replace("_", "-")
        raise ValueError(f"--{name} cannot be combined with --{topics[0]}")


def plan_report(args: argparse.Namespace) -> str:
    """The plans of a model, and the run of the best one."""
    shape, device, gpus, seq, batch = parse_job(args)
    top, storage = parse_number(args.top, "--top"), parse_number(args.storage, "--storage")
    fixed = fixed_fields(args)
    found = rank_plans(shape, device, gpus, seq, batch, **fixed)
    active = parameters(shape, active=True)
    tokens = parse_number(args.tokens, "--tokens") if args.tokens else 20 * active
    run = estimate_run(shape, device, found[0], seq, batch, tokens, storage)
    if args.json:
        return json.dumps({"plans": [asdict(got) for got in found[:top]], "run": run}, indent=2)
    size = f"{parameters(shape) / 1e9:.1f}B parameters"
    return (
        f"{args.model}, {size}, on {gpus} {args.device}: {len(found)} plans fit\n"
        f"--batch {batch * seq}: {batch} sequences of --seq {seq} tokens; --tokens {tokens}: "
        f"{tokens / active:.3g} per active parameter\n\n"
        f"{table(found[:top])}\n\n{details(device, found[0], run)}\n"
        f"{commands(args.model, shape, device, found, seq, batch)}"
    )


def commands(
    model: str, shape: Shape, device: Device, found: list[Prediction], seq: int, batch: int
) -> str:
    """The command that trains by the fastest plan that train.py can run, and why if it is not the
    fastest of all."""
    lines = []
    if why := train_conflict(shape, found[0].plan):
        lines += [f"train.py cannot run the best plan: {why}"]
    runs = (got for got in found if train_conflict(shape, got.plan) is None)
    if got := next(runs, None):
        lines += [f"its fastest is {got.plan}, {got.step:.2f} s/step"] if why else []
        flags = train_flags(model, shape, got.plan, seq, batch)
        lines += [f"{launcher(got.plan.gpus, device.node)}{flags}"]
    return "\n".join(lines)


def launcher(gpus: int, node: int) -> str:
    """What starts train.py on each node; HOST is the first one."""
    nodes = -(-gpus // node)
    if gpus == 1:
        return "python "
    if nodes == 1:
        return f"torchrun --nproc-per-node {gpus} "
    where = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return f"torchrun --nnodes {nodes} --nproc-per-node {node} {where} "


def table(found: list[Prediction]) -> str:
    """One line per plan."""
    lines = [f"{'s/step':>8}{'tok/s/GPU':>11}{'MFU':>7}{'GiB':>7}  plan"]
    for got in found:
        numbers = f"{got.step:>8.2f}{got.tokens_per_second:>11,.1f}{got.mfu:>7.1%}"
        lines.append(f"{numbers}{got.bytes / GIB:>7.1f}  {got.plan}")
    return "\n".join(lines)


def details(device: Device, got: Prediction, run: dict[str, float]) -> str:
    """Memory and time of a plan by kind, and the estimate of the whole run."""
    row = lambda name, value, whole: f"  {name:<20}{value:>9.3f}{value / whole:>8.1%}"
    memory = [row(kind, size / GIB, device.memory / GIB) for kind, size in got.memory.items()]
    seconds = [row(kind, t, got.step) for kind, t in got.seconds.items() if t > 0]
    return "\n".join((
        f"best: {got.plan}",
        f"memory, GiB of {device.memory / GIB:.1f} per GPU",
        *memory,
        row("", got.bytes / GIB, device.memory / GIB),
        "time per step, s",
        *seconds,
        row("", got.step, got.step),
        f"{got.tokens_per_second:,.1f} tokens/s/GPU; MFU {got.mfu:.1%} of bf16's peak, "
        f"{got.hfu:.1%} with recomputation (HFU)",
        f"{run['tokens'] / 1e12:.3g}T tokens, {run['flops']:.3g} FLOPs: {run['days']:.1f} days, "
        f"{run['mwh']:,.0f} MWh at most (servers at their maximum power)",
        f"mean time between failures {run['mtbf_hours']:.1f} h; a checkpoint of "
        f"{run['checkpoint_bytes'] / 1e12:.3g} TB takes {run['checkpoint_seconds']:.1f} s, best "
        f"every {run['checkpoint_interval'] / 60:.1f} min; goodput {run['goodput']:.1%}",
    ))  # fmt: skip


def report(args: argparse.Namespace) -> str:
    """The program's output. ValueError: a wrong flag, or nothing fits."""
    topics = [flag for flag in TOPICS if getattr(args, flag) not in (None, False)]
    check_flags(args, topics)
    return TOPICS[topics[0]].report(args) if topics else plan_report(args)


def main(argv: list[str] | None = None) -> None:
    try:
        print(report(parse_args(argv)), flush=True)
    except BrokenPipeError:  # stdout was closed, for example by `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ValueError as e:
        sys.exit(f"python -m planner: {e}")


if __name__ == "__main__":
    main()
