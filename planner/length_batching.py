"""Static batches by length: which requests to pad to one length, and how much padding that costs.

A static batch is as long as its longest request. Where batches cannot change between steps (an
encoder, a fixed compiled shape, a request-level engine) the only choice is who runs together.

partition: the input lengths are known. In sorted order a best partition is into runs of
neighbours, so dynamic programming over the sorted lengths finds it,

    best[i] = min over j of best[j] + cost(length[i - 1], i - j)

with the time of a padded batch from measurements (TurboTransformers, arXiv:2010.05680, section 5).
It is O(n B) for batches of at most B, and never worse than one padded batch: that is one partition.

group_by_length: the output lengths are predicted, by a model or from earlier outputs (Response
Length Perception and Sequence Scheduling, arXiv:2305.13144). Similar predictions run together; a
batch ends at its largest prediction, and the requests that are not finished then are collected and
run again at the end, together, for as long as they take.

When it loses: continuous batching (paged_kv.py's Engine) needs neither, since a finished sequence
leaves at once, without padding. Sorting delays a request by those sorted before it. A prediction
that is too low costs the whole run, so predict a high quantile rather than the mean.

Equivalence (test_all.py): partition costs what brute force over all partitions does, and steps()
counts the steps of real Engines that run the same batches.

Needs: the standard library, torch in its __main__.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Cost = Callable[[int, int], float]  # (padded length, batch size) -> seconds


def partition(lengths: Sequence[int], cost: Cost, max_batch: int | None = None) -> list[list[int]]:
    """Indices of the requests in each batch, for the least total cost, the shortest first.
    max_batch: requests in a batch at most. cost must not fall with the length. ValueError names
    the argument."""
    if max_batch is not None and max_batch < 1:
        raise ValueError(f"max_batch must be 1 or more, not {max_batch}")
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    best, first = [0.0], [0]  # of the i shortest requests: their cost, the first of the last batch
    for i in range(1, len(order) + 1):
        starts = range(max(0, i - (max_batch or i)), i)
        total = lambda j, i=i: best[j] + cost(lengths[order[i - 1]], i - j)
        first.append(min(starts, key=total))
        best.append(total(first[i]))
    batches, i = [], len(order)
    while i:
        batches.append(order[first[i] : i])
        i = first[i]
    return batches[::-1]


def total_cost(lengths: Sequence[int], batches: Sequence[Sequence[int]], cost: Cost) -> float:
    """Seconds of padded batches."""
    return sum(cost(max(lengths[i] for i in batch), len(batch)) for batch in batches)


def measured_cost(
    run: Callable[[int, int], Any], lengths: Sequence[int], sizes: Sequence[int], repeats: int = 3
) -> Cost:
    """A cost table: the least time of run(length, batch size) at each of the ascending lengths and
    sizes, linear between them and beyond the last; no less than of a shorter length. ValueError
    names the argument."""
    for name, values in (("lengths", lengths), ("sizes", sizes)):
        if not values or any(a >= b for a, b in pairwise(values)):
            raise ValueError(f"{name} must be one or more ascending numbers, not {values}")
    table = []
    for length in lengths:
        for size in sizes:
            run(length, size)  # warm-up
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                run(length, size)
                times.append(time.perf_counter() - start)
            shorter = table[-len(sizes)] if len(table) >= len(sizes) else 0.0
            table.append(max(min(times), shorter))

    def cost(length: int, size: int) -> float:
        def along(points: Sequence[int], x: int, at: Callable[[int], float]) -> float:
            if len(points) == 1:
                return at(0)
            i = min(max(bisect.bisect(points, x), 1), len(points) - 1)
            share = max(0.0, (x - points[i - 1]) / (points[i] - points[i - 1]))
            return (1 - share) * at(i - 1) + share * at(i)

        row = lambda i: along(sizes, size, lambda j: table[i * len(sizes) + j])
        return along(lengths, length, row)

    return cost


def fcfs_batches(n: int, size: int) -> list[list[int]]:
    """Batches in order of arrival."""
    return [[*range(i, min(n, i + size))] for i in range(0, n, size)]


def group_by_length(predicted: Sequence[int], size: int) -> list[list[int]]:
    """Batches of similar predicted lengths, the longest first."""
    order = sorted(range(len(predicted)), key=lambda i: -predicted[i])
    return [[order[i] for i in batch] for batch in fcfs_batches(len(order), size)]


@dataclass(frozen=True)
class Steps:
    """Decode steps of static batches, and rows of them that gave no token of a result."""

    steps: int
    padded: int  # rows of finished requests
    repeated: int  # rows of requests that were stopped, and run again

    @property
    def wasted(self) -> int:
        return self.padded + self.repeated


def steps(
    actual: Sequence[int], batches: Sequence[Sequence[int]], predicted: Sequence[int] | None = None,
    size: int = 1,
) -> Steps:  # fmt: skip
    """Run batches of requests with these output lengths. With predictions a batch ends at its
    largest one, and unfinished requests run again at the end in batches of `size`, by the length
    that they are known to exceed."""
    total = padded = repeated = 0
    overruns: list[tuple[int, int]] = []  # (tokens so far, request)
    for batch in batches:
        longest = max(actual[i] for i in batch)
        end = longest if predicted is None else min(longest, max(predicted[i] for i in batch))
        total += end
        padded += sum(max(0, end - actual[i]) for i in batch)
        overruns += [(end, i) for i in batch if actual[i] > end]
        repeated += sum(end for i in batch if actual[i] > end)
    again = [i for _, i in sorted(overruns)]
    if again:
        more = steps(actual, [again[i : i + size] for i in range(0, len(again), size)])
        total, padded = total + more.steps, padded + more.padded
    return Steps(total, padded, repeated)


def main() -> None:
    """Padded batches of an encoder layer on this device, and static batches of random lengths."""
    import random

    import torch

    rng, device = random.Random(0), "cuda" if torch.cuda.is_available() else "cpu"
    layer = torch.nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, device=device).eval()

    @torch.inference_mode()
    def run(length: int, size: int) -> float:
        return layer(torch.zeros(size, length, 128, device=device)).sum().item()

    cost = measured_cost(run, (1, 16, 64, 256, 512), (1, 4, 16, 32))
    lengths = [min(512, 4 + int(rng.lognormvariate(4, 1))) for _ in range(32)]
    title = f"{device}: 32 inputs of {min(lengths)} to {max(lengths)} tokens"
    print(f"{title:36}   batches   ms (by the cost table)")
    choices = {"one padded batch": fcfs_batches(32, 32), "batches of 8": fcfs_batches(32, 8)}
    for name, batches in (choices | {"by length": partition(lengths, cost)}).items():
        seconds, foretold = math.inf, total_cost(lengths, batches, cost)
        for _ in range(3):
            start = time.perf_counter()
            for batch in batches:
                run(max(lengths[i] for i in batch), len(batch))
            seconds = min(seconds, time.perf_counter() - start)
        print(f"{name:36}{len(batches):10}{1e3 * seconds:10.1f} ({1e3 * foretold:.1f})")
    actual = [min(512, 1 + int(rng.expovariate(1 / 100))) for _ in range(1024)]
    print("1,024 outputs of 100 tokens on average, batches of 16     steps   wasted rows")
    for error in (None, 0.0, 0.2, 0.5):
        guess = [math.ceil(n * (1 + rng.gauss(0, error or 0))) for n in actual]
        batches = fcfs_batches(1024, 16) if error is None else group_by_length(guess, 16)
        got = steps(actual, batches, None if error is None else guess, 16)
        name = "in order of arrival" if error is None else f"by prediction, error {error:.0%}"
        print(f"{name:54}{got.steps:9}{got.wasted / (got.wasted + sum(actual)):14.0%}")


if __name__ == "__main__":
    main()
