"""How many tokens to draft in a step of speculative decoding: fixed, by goodput, by confidence.

More drafts mean fewer steps of the target and more work that is rejected. The policies of
--speculate-k, each an object with choose(rows) -> k of each row, observe(...) after each step, and
forget(row):

    FixedK       always k
    Goodput      the k of each sequence that maximizes expected tokens per second, from measured
                 acceptance rates and step times; 0 where drafting does not pay (SmartSpec,
                 arXiv:2406.14066). TreeGoodput: the same for the size and shape of a draft tree
    Confidence   drafts until the draft model is not confident of them (LLMCad, arXiv:2309.04255)

Goodput measures how costs change with the batch. Confidence sees which tokens are easy: it drafts
many where a text is predictable and few where not. It does not measure costs, and loses in a large
batch, whose steps are compute-bound, and where a draft costs half of a step. Equivalence
(test_all.py): no policy changes the text; Goodput is near the best fixed k of simulated conditions;
Confidence runs the target less often than the best fixed k, if a draft costs a quarter of a step.
Needs: draft_trees.py's Tree.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

from generation.draft_trees import Tree, best_tree

Row = Hashable  # identifies a sequence


class FixedK:
    """Always k drafts."""

    def __init__(self, k: int):
        self.k = k

    def choose(self, rows: Sequence[Row]) -> list[int]:
        return [self.k] * len(rows)

    def observe(self, *step: Any) -> None:
        """Called after each step, as Goodput.observe."""

    def forget(self, row: Row) -> None:
        """Called when a row has ended."""


class Confidence(FixedK):
    """Drafts while they are likely to be accepted (LLMCad, arXiv:2309.04255), at most k: the last
    draft of a row is the one with which the product of their probabilities in the draft model falls
    below the row's threshold. A step with a rejected draft raises the threshold, one without lowers
    it, so that about one step in five has no rejected draft.

    The last draft is verified too. Without it, sampled drafts would be those that were likely, not
    samples of q, and verification would not be exact.
    """

    INITIAL, ACCEPTED, REJECTED = 0.2, 0.5, 1.2  # threshold, and what it is multiplied by

    def __init__(self, k: int):
        super().__init__(k)
        self.thresholds: dict[Row, float] = {}

    def suffices(self, rows: Sequence[Row], probs: Sequence[float]) -> list[bool]:
        """Whether each row is to draft on after drafts with these joint probabilities."""
        return [p >= self.thresholds.get(row, self.INITIAL) for row, p in zip(rows, probs)]

    def observe(
        self, rows: Sequence[Row], proposed: Sequence[int], accepted: Sequence[int], *_: Any
    ) -> None:
        for row, k, n in zip(rows, proposed, accepted):
            if k:
                threshold = self.thresholds.get(row, self.INITIAL)
                threshold *= self.ACCEPTED if n == k else self.REJECTED
                self.thresholds[row] = min(max(threshold, 1e-6), 1.0)

    def forget(self, row: Row) -> None:
        self.thresholds.pop(row, None)


class LatencyModel:
    """Predicts seconds from a size: medians of recent measurements in bins of size, interpolated
    linearly, with slopes of 0 or more."""

    def __init__(self):
        self.bins: dict[int, deque[tuple[int, float]]] = {}  # bins are 1/8 of the size wide
        self.points: dict[int, tuple[float, float]] = {}  # of each bin (mean size, median seconds)

    def __bool__(self) -> bool:
        return bool(self.bins)

    def add(self, size: int, seconds: float) -> None:
        width = 1 << max(0, size.bit_length() - 4)
        bin = size // width * width
        steps = self.bins.setdefault(bin, deque(maxlen=9))
        steps.append((size, seconds))
        # the lower median, since noise only makes measurements longer
        typical = sorted(s for _, s in steps)[(len(steps) - 1) // 2]
        self.points[bin] = sum(n for n, _ in steps) / len(steps), typical

    def predict(self, sizes: Sequence[int]) -> list[float]:
        """Seconds of each size: 0 without measurements, constant if only one size was measured."""
        if len(self.points) < 2:
            return [seconds for _, seconds in self.points.values() or [(0, 0.0)]] * len(sizes)
        at, seconds = zip(*sorted(self.points.values()))
        found = []
        for n in sizes:
            b = min(max(bisect_left(at, n), 1), len(at) - 1)
            slope = max(0.0, (seconds[b] - seconds[b - 1]) / (at[b] - at[b - 1]))
            found.append(max(0.0, seconds[b - 1] + slope * (n - at[b - 1])))
        return found


class Goodput:
    """For each row of a batch the k with the highest expected goodput (SmartSpec,
    arXiv:2406.14066), from the measured acceptance rate a of each row and of all, and the measured
    step time by number of tokens. The i-th draft of a row has the expected value a^i tokens; drafts
    of all rows are added in order of value while

        (rows + value of the drafts) / (seconds of a step of rows + drafts tokens, and of drafting)

    increases. If no draft increases it, k is 0. Acceptance changes along a text, so such rows try
    one draft in turn, at a cost below 1% of the time, and continue while it is accepted; and where
    drafting pays, an occasional step runs without drafts, to measure its time.
    """

    HALF_LIFE = 16  # drafts of a row after which an old one has half the weight
    PRIOR = 2  # weight of the acceptance of all rows, in drafts
    TRIAL_COST = 0.0075  # fraction of the time spent on trial drafts
    PLAIN_INTERVAL = 128  # steps with drafts between two without

    def __init__(self, max_k: int):
        self.max_k = max_k
        # of each row: drafts accepted, drafts verified, whether the last step accepted all
        self.counts: dict[Row, tuple[float, float, bool]] = {}
        self.total = (1.2, 2.0)  # accepted, verified over all rows, with an optimistic start
        self.step_latency = LatencyModel()  # by tokens in the step
        self.draft_latency = LatencyModel()  # of one draft position, by rows that draft
        self.last_trials: dict[Row, int] = {}  # step of the last trial of a row with k = 0
        self.steps = self.last_trial = self.last_plain = 0

    def choose(self, rows: Sequence[Row]) -> list[int]:
        """k for each row of the next step."""
        self.steps += 1
        none = [0] * len(rows)
        if not rows or not self.max_k or not self.step_latency:
            return none  # measure a step without drafts first
        ks = self._best(rows)
        if not self.draft_latency:  # measure one draft first
            ks = [min(k, 1) for k in ks]
        if not any(ks):
            self.last_plain = self.steps
        elif self.steps - self.last_plain > self.PLAIN_INTERVAL:
            self.last_plain = self.steps
            return none
        idle = [i for i, k in enumerate(ks) if k == 0]
        if idle:
            plain, trial = self.step_latency.predict([len(rows), len(rows) + 1])
            trial += 0.0 if any(ks) else self.draft_latency.predict([1])[0]
            hopeless = (len(rows) + 1) * plain <= len(rows) * trial  # even if all were accepted
            interval = max(3, (trial / max(plain, 1e-9) - 1) / self.TRIAL_COST)
            interval = self.PLAIN_INTERVAL if hopeless else interval
            if self.steps - self.last_trial > interval:
                i = min(idle, key=lambda i: self.last_trials.get(rows[i], 0))
                ks[i], self.last_trial, self.last_trials[rows[i]] = 1, self.steps, self.steps
            for i in idle if not hopeless else ():
                ks[i] = max(ks[i], int(self.counts.get(rows[i], (0, 0, False))[2]))
        return ks

    def observe(
        self,
        rows: Sequence[Row],
        proposed: Sequence[int],
        accepted: Sequence[int],
        tokens: int,
        seconds: float,
        draft_seconds: float = 0.0,
    ) -> None:
        """Record a step: drafts proposed and accepted of each row, the tokens the step ran, its
        seconds including drafting, and the seconds of drafting."""
        for row, k, n in zip(rows, proposed, accepted):
            verified = min(n + 1, k)  # drafts after a rejected one were not verified
            if verified:
                decay = 0.5 ** (verified / self.HALF_LIFE)
                hits, tries, _ = self.counts.get(row, (0.0, 0.0, False))
                self.counts[row] = hits * decay + n, tries * decay + verified, n == k
                decay **= 1 / 8  # 8 half-lives: all rows together change more slowly
                self.total = self.total[0] * decay + n, self.total[1] * decay + verified
        if any(proposed):
            longest = max(proposed)
            self.draft_latency.add(math.ceil(sum(proposed) / longest), draft_seconds / longest)
        self.step_latency.add(tokens, seconds - draft_seconds)

    def forget(self, row: Row) -> None:
        """Drop the measurements of a row that has ended."""
        self.counts.pop(row, None)
        self.last_trials.pop(row, None)

    def rate(self, row: Row) -> float:
        """Estimated acceptance rate of a row."""
        hits, tries, _ = self.counts.get(row, (0.0, 0.0, False))
        prior = self.PRIOR * self.total[0] / self.total[1]
        return min(0.99, (hits + prior) / (tries + self.PRIOR))

    def _best(self, rows: Sequence[Row]) -> list[int]:
        """The k of each row with the highest expected tokens per second."""
        R, rates = len(rows), [self.rate(row) for row in rows]
        values = sorted(  # expected value, number and row of each possible draft
            ((a**i, i, r) for r, a in enumerate(rates) for i in range(1, self.max_k + 1)),
            reverse=True,
        )
        seconds = self.step_latency.predict(range(R, R + len(values) + 1))
        draft = self.draft_latency.predict(range(R + 1))
        best, (best_k, best_n), ks = R / max(seconds[0], 1e-9), (0, 0), [0] * R
        # drafting time is proportional to the largest k
        candidates = range(1, self.max_k + 1)
        if R > 8:
            candidates = {self.max_k >> i for i in range(self.max_k.bit_length())}
        for largest in candidates if draft[R] > 0.001 * seconds[0] else (self.max_k,):
            n, tokens = 0, float(R)
            for value, i, _ in values:
                if i <= largest:
                    n, tokens = n + 1, tokens + value
                    drafting = largest * draft[-(-n // largest)]
                    speed = tokens / max(seconds[n] + drafting, 1e-9)
                    if speed > best:
                        best, best_k, best_n = speed, largest, n
        for _, _, r in [x for x in values if x[1] <= best_k][:best_n]:
            ks[r] += 1
        return ks


class TreeGoodput(Goodput):
    """Goodput for trees: of a few sizes the one with the highest expected tokens per second, each
    in the best shape for the measured acceptance of the drafter's first, second, ... choice."""

    def __init__(self, sizes: Sequence[int], ranks: Sequence[float], fixed: bool = False):
        """sizes: numbers of nodes, ascending; ranks: prior acceptance of each rank; fixed: always
        use the largest size."""
        super().__init__(1)
        self.sizes, self.fixed = sizes, fixed
        self.rank_counts = [[8.0 * a, 8.0] for a in ranks]  # accepted, verified
        self.trees: list[Tree] = []
        self.rounds = 0

    @property
    def acceptance(self) -> list[float]:
        """Acceptance rate of each rank, descending."""
        return sorted((hits / tries for hits, tries in self.rank_counts), reverse=True)

    def choose_tree(self, rows: Sequence[Row]) -> Tree:
        """The tree of the next step, the same for all rows; Tree(()) for no drafts."""
        if self.rounds % 16 == 0:
            self.trees = [best_tree(self.acceptance, size) for size in self.sizes]
        self.rounds += 1
        if self.fixed:
            return self.trees[-1]
        if not self.step_latency:
            return Tree(())
        choices = [Tree(()), *self.trees]
        sizes = [len(rows) * (1 + len(tree.parents)) for tree in choices]
        seconds = self.step_latency.predict(sizes)
        draft = self.draft_latency.predict([1])[0]
        speeds = [
            (1 + self._value(tree)) / max(s + draft * tree.depth, 1e-9)
            for tree, s in zip(choices, seconds)
        ]
        best = max(range(len(choices)), key=speeds.__getitem__)
        cost = seconds[1] - seconds[0] + draft * choices[1].depth
        interval = max(3, cost / (self.TRIAL_COST * max(seconds[0], 1e-9)))
        if not best and self.rounds - self.last_trial > interval:
            self.last_trial, best = self.rounds, 1
        elif best and self.rounds - self.last_plain > self.PLAIN_INTERVAL:
            best = 0
        if not best:
            self.last_plain = self.rounds
        return choices[best]

    def observe_tree(
        self,
        rows: Sequence[Row],
        tree: Tree,
        paths: Sequence[Sequence[int]],
        seconds: float,
        draft_seconds: float,
    ) -> None:
        """Record a step: the accepted path of nodes of each row."""
        children = [tree.parents.count(i) for i in range(-1, len(tree.parents))]
        for path in paths:
            for node, after in zip((-1, *path), (*path, None)):
                for rank in range(min(children[node + 1], len(self.rank_counts))):
                    self.rank_counts[rank][1] += 1
                    self.rank_counts[rank][0] += after is not None and tree.ranks[after] == rank
        if self.rank_counts[0][1] > 512:
            self.rank_counts = [[hits / 2, tries / 2] for hits, tries in self.rank_counts]
        if tree.parents:
            self.draft_latency.add(1, draft_seconds / tree.depth)
        self.step_latency.add(len(rows) * (1 + len(tree.parents)), seconds - draft_seconds)

    def _value(self, tree: Tree) -> float:
        """Expected number of accepted tokens."""
        values, acceptance = [], self.acceptance
        for parent, rank in zip(tree.parents, tree.ranks):
            values.append(acceptance[rank] * (values[parent] if parent >= 0 else 1.0))
        return sum(values)
