"""Flags that several topics of the planner share, and --problem of its searches.

A topic's add_flags names those that it reads; the program refuses the others. --problem is an
object in JSON, inline or in a file, whose fields replace the defaults of a search; helix.py,
spindle.py and pipeline_search.py list theirs.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.cost_model import DEVICES, SHAPES, require
from planner.training_plan import RECOMPUTE, SCHEDULES, SIZES

SHARED: dict[str, dict[str, Any]] = {
    "model": dict(default="llama3-8b", help=f"{', '.join(SHAPES)}, or a config.json (llama3-8b)"),
    "gpus": dict(default="8", help="their number (8)"),
    "device": dict(default="h100", help=f"{', '.join(DEVICES)} (h100)"),
    "seq": dict(default="8192", help="tokens per sequence; k is 1024 (8192)"),
    "batch": dict(help="tokens per step; k is 1024, M 1024^2 (4M)"),
    "storage": dict(default="122M", help="bytes/s per GPU for checkpoints; Llama 3 had 2 TB/s"),
    "top": dict(default="10", help="number of plans to print (10)"),
    "fp8": dict(action="store_true", help="FP8 matmuls in the layers"),
    "eager": dict(action="store_true", help="no torch.compile: elementwise kernels are not fused"),
    "json": dict(action="store_true", help="print JSON"),
    **{name: dict(type=int, help="fix this field; default: search") for name in SIZES},
    "recompute": dict(choices=RECOMPUTE, help="fix this field; default: search"),
    "schedule": dict(choices=SCHEDULES, help="fix this field; default: search"),
    "problem": dict(metavar="JSON", help="the problem's fields, or a file of them"),
}
PLAN_FIELDS = f"{' '.join(SIZES)} recompute schedule"


def add_shared(parser: argparse.ArgumentParser, names: str) -> None:
    """Add the flags of these names, separated by spaces."""
    for name in names.split():
        parser.add_argument(f"--{name}", **SHARED[name])


def is_positive(value: Any) -> bool:
    """Whether a value from JSON is a number above 0, and not too large for a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1e18


def is_count(value: Any) -> bool:
    """Whether a value from JSON is a whole number from 1 to 10^6."""
    return isinstance(value, int) and is_positive(value) and value <= 10**6


def read_json(text: str) -> Any:
    """JSON, inline or in a file."""
    try:
        if text.lstrip().startswith("{"):
            return json.loads(text)
        return json.loads(Path(text).read_text())
    except OSError:
        raise ValueError(f"--problem {text[:60]} is neither a file nor an object in JSON") from None
    except (ValueError, RecursionError) as e:
        raise ValueError(f"--problem: not JSON ({e})") from None


def read_problem(args: argparse.Namespace, fields: Mapping[str, Any]) -> argparse.Namespace:
    """`fields`, some of them replaced by those of --problem. ValueError for unknown fields, and for
    values that are not as the defaults: positive, whole, or not empty (None: any value)."""
    given = {} if args.problem is None else read_json(args.problem)
    require(isinstance(given, dict), "--problem must be an object in JSON")
    for name, value in given.items():
        known = ", ".join(fields)
        require(name in fields, f"--problem: {name} is no field of {args.method}; it has {known}")
        like = fields[name]
        if isinstance(like, int):
            ok = is_count(value)
        elif isinstance(like, float):
            ok = is_positive(value)
        else:  # None: checked by the search
            ok = like is None or isinstance(value, type(like)) and len(value) > 0
        example, found = json.dumps(like)[:60], json.dumps(value)[:60]
        require(ok, f"--problem: {name} must be of the form {example}, not {found}")
    return argparse.Namespace(**fields | given)
