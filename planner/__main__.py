"""Predictions without a GPU: what a training run, a service, a site or a kernel would take.

    python -m planner train --model llama3-405b --gpus 16384 --device h100 --batch 16M
    python -m planner TOPIC --help

The program alone; the formulas lie beside it, by topic:

    cost_model.py       models, GPUs, FLOPs, collectives
    train     training_report.py, training_plan.py
    serve     serving_plan.py, serving_cost.py
    simulate  simulate.py, simulated_replicas.py; colocation.py, time_sharing.py; variants.py,
              variant_simulator.py
    site      datacenter.py
    search    search.py, auto_sharding.py, helix.py, spindle.py, pipeline_search.py,
              mixed_cluster.py, solvers.py
    kernel    kernel_model.py, einsum_model.py

Nothing in the other drawers imports this one.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    raise SystemExit("run: python -m planner --help")

import argparse
import importlib
import os
import sys

# topic, or topic and kind: (module, whose add_flags(parser), or the function named after a dot,
# sets `report`: function(args) -> str; help)
TOPICS = {
    "train": ("training_report", "layouts of a training run, by predicted seconds per step"),
    "serve": ("serving_plan", "layouts of a service, by predicted dollars per token"),
    "simulate": ("", "serving on a virtual clock"),
    "simulate trace": ("simulate", "scheduling policies, replicas and routers on a trace"),
    "simulate colocation": (
        "colocation",
        "several models on the same GPUs, tables of five systems",
    ),
    "simulate variants": ("variants", "which variant of a model serves the next batch"),
    "site": ("datacenter", "power, energy, failures and network of a site; a budget's best model"),
    "search": ("search", "layouts as eleven systems search for them"),
    "kernel": ("", "one GPU"),
    "kernel matmul": ("kernel_model", "waves, occupancy, L2 misses, tiles and regime of a matmul"),
    "kernel einsum": ("einsum_model", "order, FLOPs, bytes, regime and tiles of a contraction"),
    "kernel l2": ("kernel_model.add_l2_flags", "which activations of a layer to pin in L2"),
}


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The flags of the topic that argv names. Only its module is imported: `simulate` needs torch,
    the others the standard library. engine_flags: what `simulate` hands to generate.py's parser."""
    about = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser("python -m planner", description=about, allow_abbrev=False)
    groups = {"": parser.add_subparsers(dest="topic", required=True, metavar="TOPIC")}
    for name, (module, text) in TOPICS.items():
        topic, _, kind = name.rpartition(" ")
        about = f"{text[0].upper()}{text[1:]}."
        own = groups[topic].add_parser(kind, help=text, description=about, allow_abbrev=False)
        if not module:
            groups[name] = own.add_subparsers(dest="kind", required=True, metavar="KIND")
        elif name.split() == argv[: name.count(" ") + 1]:
            module, _, function = module.partition(".")
            module = importlib.import_module(f"planner.{module}")
            getattr(module, function or "add_flags")(own)
    args, args.engine_flags = parser.parse_known_args(argv)
    if args.engine_flags and argv[:2] != ["simulate", "trace"]:
        words = [word for word in argv[:2] if not word.startswith("-")]
        raise ValueError(f"{' '.join(words)} has no flag {args.engine_flags[0]}; see --help")
    return args


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = parse_args(argv)
        print(args.report(args), flush=True)
    except BrokenPipeError:  # stdout was closed, for example by `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError) as e:
        print(f"python -m planner: error: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
