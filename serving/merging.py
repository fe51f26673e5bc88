"""Merge the LoRA adapter that most rows of a batch have, while that pays (dLoRA, OSDI 2024, 4.1).

With adapter m in the weights, its rows cost nothing, and all other rows rank_m more than without,
for minus its part: serving/adapters.py adds that. A switch costs a matmul per weight, as much as
the rank (C + F) operations of `switch_rows` rows. Each state gets credit for what it would have
saved in every step so far, at least 0, and loses it in a step without rows of its adapter. It is
taken once its credit pays for two switches: hysteresis, so that short runs do not alternate.

Cost: a copy of the merged layers' weights, so that any number of switches leaves them bitwise as
they were; a pause of one matmul per weight. When it loses: no adapter dominates (then it never
switches), or dominance changes as often as credit is earned. Equivalence (test_all.py): greedy
tokens in fp32 are those without merging; logits differ by rounding. Hook: AdapterPool.merging.
Needs: torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Merging:
    """Which adapter is in the weights. An adapter is an object with rank, scale, and matrices: A
    (rank, C) and B (F, rank) by the name of a linear."""

    def __init__(self, bases: Mapping[str, nn.Module]):
        """bases: the linears by name. ValueError if their weights are quantized."""
        self.bases = dict(bases)
        if not all(isinstance(base, nn.Linear) for base in bases.values()):
            raise ValueError("merge_adapters: quantized weights cannot have an adapter merged")
        sizes = [base.weight.shape for base in self.bases.values()]
        self.switch_rows = sum(F * C for F, C in sizes) / sum(F + C for F, C in sizes)
        self.current: Any = None
        self.credits: dict[Any, float] = {}
        self.saved: dict[nn.Linear, Tensor] = {}  # weights without the adapter
        self.n_switches = 0

    def update(self, rows: Mapping[Any, int]) -> Any:
        """The adapter to be in the weights for a step with these numbers of rows. One that has no
        rows is taken out: its blocks may be evicted."""
        now, before = self._cost(self.current, rows), self.credits
        states = dict.fromkeys([None, *rows])
        self.credits = {m: max(0.0, before.get(m, 0.0) + now - self._cost(m, rows)) for m in states}
        best = max(states, key=self.credits.get)
        rank = max(m.rank for m in (best, self.current) if m) if best is not self.current else 0
        if rank and self.credits[best] > 2 * rank * self.switch_rows:
            self._switch(best)
        elif self.current not in states:
            self._switch(None)
        return self.current

    def _cost(self, merged: Any, rows: Mapping[Any, int]) -> float:
        rank = lambda adapter: 0 if adapter is None else adapter.rank
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
    merging, before, steps = Merging({"x": linear}), linear.weight.clone(), 0
    while merging.update({adapter: 8, None: 1}) is None:
        steps += 1
    assert torch.allclose(linear.weight, before + 0.5 * b @ a, atol=1e-5)
    print(f"8 of 9 rows have the adapter: merged after {steps} steps")
    assert merging.update({None: 9}) is None and torch.equal(linear.weight, before)
    print("no row has it: taken out at once")


if __name__ == "__main__":
    main()
