"""Layouts of a training run, ranked by predicted time per step, and the run of the best one.

    python -m planner train --model llama3-405b --gpus 16384 --device h100 --batch 16M

training_plan.py predicts memory and time of each layout; here are the table, the details of the
best plan and the command that trains by the fastest one that train.py can run.
Needs: the standard library.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import argparse
import json
from dataclasses import asdict

from planner.cost_model import GIB, Device, Shape, parameters, parse_number
from planner.datacenter import estimate_run
from planner.flags import PLAN_FIELDS, add_shared
from planner.training_plan import (
    Prediction,
    fixed_fields,
    parse_job,
    rank_plans,
    train_conflict,
    train_flags,
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `train`."""
    add_shared(parser, f"model gpus device seq batch storage top fp8 eager json {PLAN_FIELDS}")
    text = "of the run; T is 1e12 (20 per active parameter, Chinchilla)"
    parser.add_argument("--tokens", help=text)
    parser.set_defaults(report=plan_report)


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
