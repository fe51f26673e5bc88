"""Merge the LoRA adapter that most rows of a batch have, while that pays (dLoRA, OSDI 2024, 4.1).

A row with an adapter costs rank (C + F) operations per linear. With adapter m merged, its own rows
cost none, and all others rank_m (C + F) more: generation/adapters.py subtracts m from them. A
switch costs a matmul per linear, rank F C, that of `switch_rows` rows. In every step each candidate
(an adapter with rows, or none) gets credit for what it would have saved, at least 0 in total. One
whose credit pays for two switches is merged: hysteresis, so that short runs do not alternate.

Cost: a copy of the merged layers' weights, so that any number of switches leaves them bitwise as
they were; a pause of one matmul per weight. When it loses: no adapter dominates (then it never
switches), or dominance changes as often as credit is earned. Equivalence (test_all.py): greedy
tokens in fp32 are those without merging; logits differ by rounding. Hook: AdapterPool.merging.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class AdapterMerging:
    """Which adapter is in the weights. An adapter is an object with rank, scale, and matrices: A
    (rank, C) and B (F, rank) by the name of a linear."""

    def __init__(self, bases: Mapping[str, nn.Module]):
        """bases: the linears by name. ValueError if their weights are quantized."""
        self.bases = bases
        if not all(isinstance(base, nn.Linear) for base in bases.values()):
            raise ValueError("merge_adapters requires weights that are not quantized; remove it")
        sizes = [base.weight.shape for base in bases.values()]
        self.switch_rows = sum(F * C for F, C in sizes) / sum(F + C for F, C in sizes)
        self.current: Any = None
        self.credits: dict[Any, float] = {}
        self.saved: dict[nn.Linear, Tensor] = {}  # weights without the adapter
        self.n_switches = 0

    def update(self, rows: Mapping[Any, int]) -> Any:
        """The adapter to be in the weights for a step with these rows of each. One without rows is
        taken out: its blocks, needed to subtract it, may be evicted."""
        now, candidates = self._cost(self.current, rows), dict.fromkeys([None, *rows])
        saved = lambda m: self.credits.get(m, 0.0) + now - self._cost(m, rows)
        self.credits = {m: max(0.0, saved(m)) for m in candidates}
        best = max(candidates, key=self.credits.get)
        rank = max(getattr(m, "rank", 0) for m in (best, self.current))
        if best is not self.current and self.credits[best] > 2 * rank * self.switch_rows:
            self._switch(best)
        elif self.current not in candidates:
            self._switch(None)
        return self.current

    def _cost(self, merged: Any, rows: Mapping[Any, int]) -> float:
        """Of a step with an adapter merged, in operations / (C + F)."""
        rank = lambda m: getattr(m, "rank", 0)  # of None: 0
        return sum(n * (rank(a) + rank(merged)) for a, n in rows.items() if a is not merged)

    @torch.no_grad()
    def _switch(self, adapter: Any) -> None:
        for base, weight in self.saved.items():
            base.weight.copy_(weight)
        self.current, self.credits, self.saved = adapter, {}, {}
        self.n_switches += 1
        for name, (a, b) in (adapter.matrices if adapter is not None else {}).items():
            base = self.bases[name]
            self.saved[base], device = base.weight.clone(), base.weight.device
            wide = base.weight.float().addmm_(b.to(device).float(), a.to(device).float(),
                                              alpha=adapter.scale)  # fmt: skip
            base.weight.copy_(wide)


@torch.inference_mode()
def main() -> None:
    """Merged == base + adapter, and switched back bitwise; when a run of one adapter is merged."""
    linear, rank = nn.Linear(64, 96, bias=False), 4
    a, b = torch.randn(rank, 64), torch.randn(96, rank)
    adapter = type("Adapter", (), dict(rank=rank, scale=0.5, matrices={"x": (a, b)}))()
    merging, before, steps = AdapterMerging({"x": linear}), linear.weight.clone(), 0
    while merging.update({adapter: 8, None: 1}) is None:
        steps += 1
    assert torch.allclose(linear.weight, before + 0.5 * b @ a, atol=1e-5)
    print(f"8 of 9 rows have the adapter: merged after {steps} steps")
    assert merging.update({None: 9}) is None and torch.equal(linear.weight, before)
    print("no row has it: taken out at once")


if __name__ == "__main__":
    main()
