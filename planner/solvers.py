"""Solvers that several searches share: maximum flows, convex hulls, mixed-integer programs.

helix.py, spindle.py, pipeline_search.py and auto_sharding.py use them, and name the papers.
test_all.py compares them with scipy and with enumeration. Needs: the standard library;
IntegerProgram.minimize: scipy (HiGHS) and numpy, imported when it is called.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

Arcs = dict[tuple[Hashable, Hashable], float]


def max_flow(capacity: Arcs, source: Hashable, sink: Hashable) -> tuple[Arcs, set] | None:
    """(flow of every arc, the source's side of a minimum cut) by shortest augmenting paths (Edmonds
    and Karp, JACM 1972), or None if the flow is unbounded. No arc may have an opposite one."""
    left: dict[Hashable, dict[Hashable, float]] = defaultdict(dict)
    for (u, v), c in capacity.items():
        left[u][v], left[v][u] = c, 0.0
    tiny = 1e-9 * max((c for c in capacity.values() if c < math.inf), default=0.0)
    while True:
        parent, queue = {source: source}, [source]
        for u in queue:
            for v, c in left[u].items():
                if c > tiny and v not in parent:
                    parent[v] = u
                    queue.append(v)
            if sink in parent:
                break
        else:
            return {(u, v): max(0.0, left[v][u]) for u, v in capacity}, set(parent)
        path = [sink]
        while path[-1] != source:
            path.append(parent[path[-1]])
        steps = list(zip(path[1:], path))
        amount = min(left[u][v] for u, v in steps)
        if amount == math.inf:
            return None
        for u, v in steps:
            left[u][v] -= amount
            left[v][u] += amount


def lower_hull(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (x, y) on the lower convex hull, from the least x to the least y."""
    hull: list[tuple[float, float]] = []
    slope = lambda a, b: (b[1] - a[1]) / (b[0] - a[0])
    for x, y in sorted(points):
        if hull and y >= hull[-1][1]:
            continue
        while len(hull) > 1 and slope(hull[-2], hull[-1]) >= slope(hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    return hull


class Solution(NamedTuple):
    """values: of each variable. objective: their cost; no solution costs less than bound."""

    values: dict[Any, float]
    objective: float
    bound: float


class IntegerProgram:
    """A mixed-integer linear program of named variables, which are at least 0."""

    def __init__(self) -> None:
        self.index: dict[Any, int] = {}
        self.variables: list[tuple[float, float, bool]] = []  # cost, upper bound, whether integer
        self.rows: list[list[tuple[int, float]]] = []  # of (variable, coefficient)
        self.limits: list[tuple[float, float]] = []  # of each row's sum

    def add(
        self, name: Hashable, cost: float = 0.0, most: float = math.inf, integer: bool = False
    ) -> None:
        """A variable from 0 to `most`."""
        self.index[name] = len(self.variables)
        self.variables.append((cost, most, integer))

    def limit(self, terms: Iterable[tuple[Any, float]], least: float, most: float) -> None:
        """least <= sum of coefficient x variable <= most"""
        self.rows.append([(self.index[name], c) for name, c in terms])
        self.limits.append((least, most))

    def minimize(self, seconds: float = math.inf) -> Solution | None:
        """The variables with the least cost, or the least found in `seconds`; None if there are
        none. ValueError without scipy."""
        try:
            import numpy as np
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import coo_array
        except ImportError:
            text = "search alpa, hap and helix require scipy; run: pip install scipy"
            raise ValueError(text) from None
        entries = [(i, j, c) for i, row in enumerate(self.rows) for j, c in row]
        at, columns, values = zip(*entries)
        shape = len(self.rows), len(self.variables)
        costs, most, integer = map(np.array, zip(*self.variables))
        got = milp(
            costs, integrality=integer, bounds=Bounds(0, most),
            constraints=LinearConstraint(
                coo_array((values, (at, columns)), shape=shape).tocsr(), *zip(*self.limits)
            ),
            options={"time_limit": seconds, "mip_rel_gap": 0},
        )  # fmt: skip
        if got.x is None:
            return None
        return Solution(dict(zip(self.index, map(float, got.x))), got.fun, got.mip_dual_bound)
