"""--problem of the planner's searches: fields in JSON, which replace the defaults of a search.

helix.py, spindle.py, pipeline_search.py and perseus.py list their fields. `block` and `passes` are
the layers that a problem describes by their sizes, and their times.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --search")

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.cost_model import Device, Shape, require
from planner.training_plan import Plan, layer_seconds


def block(layers: int, dim: int, heads: int) -> Shape:
    """Layers in GPT's form, without embedding and head."""
    return Shape(layers, dim, heads, heads, dim // heads, 4 * dim, 0, gpt=True)


def passes(shape: Shape, device: Device, seq: int, plan: Plan = Plan()) -> tuple[float, float]:
    """Seconds of a layer's (forward, backward and recomputation) for a micro-batch."""
    forward, backward, again = zip(*layer_seconds(shape, device, seq, plan).values())
    return sum(forward), sum(backward) + sum(again)


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
        require(name in fields, f"--problem: {name} is no field of {args.search}; it has {known}")
        like = fields[name]
        if isinstance(like, (int, float)):
            ok = (is_count if isinstance(like, int) else is_positive)(value)
        else:  # None: checked by the search
            ok = like is None or isinstance(value, type(like)) and len(value) > 0
        example, found = json.dumps(like)[:60], json.dumps(value)[:60]
        require(ok, f"--problem: {name} must be of the form {example}, not {found}")
    return argparse.Namespace(**fields | given)
