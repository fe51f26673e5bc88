"""Expert capacity and expert choice: mixtures of experts before dropless ones.

Hardware wants equal shapes, so GShard (arXiv:2006.16668) and Switch (arXiv:2101.03961) give every
expert a buffer of `capacity` rows: slots beyond it are dropped, and empty rows are computed for
nothing. V-MoE (arXiv:2106.05974) drops those with the smallest weights. Expert-choice routing (Zhou
et al., arXiv:2202.09368) turns the choice around: each expert takes its best tokens, so the load is
even by construction.

When they lose: dropped tokens pass the layer unchanged, and quality falls with them, where
moe.py's grouped_experts drops none; a token's experts depend on the other tokens of its batch,
under expert choice on later ones, which decoding does not have. train.py does not use them: they
are the reference of what dropless experts replaced. Equivalence (test_all.py): padded_experts ==
grouped_experts after limit_capacity; the choices == plain Python's. Needs: moe.py.

Shapes: N tokens, K experts per token, E experts, C model width, as in moe.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from moe import sort_slots


def expert_capacity(n_tokens: int, top_k: int, n_experts: int, factor: float) -> int:
    """Slots per expert at a capacity factor (GShard, arXiv:2006.16668); 1.0 drops no token if the
    load is even."""
    if not 0 < factor < math.inf:
        raise ValueError(f"factor must be positive, not {factor}")
    if n_experts < 1:
        raise ValueError(f"n_experts must be positive, not {n_experts}")
    return max(1, math.ceil(factor * n_tokens * top_k / n_experts))


def limit_capacity(
    weights: Tensor, ids: Tensor, n_experts: int, capacity: int, *, by: str = "order"
) -> tuple[Tensor, Tensor]:
    """weights and ids (N, K) when every expert accepts at most `capacity` slots: its first ones
    (Switch) or, with by="weight", those with the largest weights (V-MoE, arXiv:2106.05974). The
    others are dropped: id -1, weight 0."""
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, not {capacity}")
    if by not in ("order", "weight"):
        raise ValueError(f"by must be order or weight, not {by!r}")
    flat = ids.flatten()
    priority = torch.arange(len(flat), device=ids.device)
    if by == "weight":
        priority = weights.detach().flatten().argsort(descending=True, stable=True)
    order, bounds = sort_slots(flat[priority], n_experts)
    position = _positions_in_expert(order, bounds, flat[priority])
    position = torch.empty_like(position).scatter_(0, priority, position).view_as(ids)
    keep = (position < capacity) & (ids >= 0)
    return weights.masked_fill(~keep, 0.0), ids.masked_fill(~keep, -1)


def expert_choice(
    logits: Tensor, capacity: int, *, scoring: str = "softmax"
) -> tuple[Tensor, Tensor]:
    """Expert-choice routing: each expert selects its `capacity` best tokens (Zhou et al.,
    arXiv:2202.09368): logits (N, E) -> weights, ids (N, E). ids[n, e] is e if expert e selects
    token n, else -1. Balanced by construction, but a token's experts depend on later tokens: not
    for decoding."""
    N, E = logits.shape
    if not 1 <= capacity <= N:
        raise ValueError(f"capacity must be from 1 to the {N} tokens, not {capacity}")
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring must be softmax or sigmoid, not {scoring!r}")
    finite = logits.detach().isfinite().all(-1)
    if not finite.all():
        raise ValueError(f"logits of token {int(finite.int().argmin())} are not finite")
    scores = logits.float().softmax(-1) if scoring == "softmax" else logits.float().sigmoid()
    tokens = scores.detach().topk(capacity, dim=0).indices
    selected = torch.zeros_like(scores, dtype=torch.bool).scatter(0, tokens, True)
    ids = torch.arange(E, device=logits.device).expand(N, E)
    return scores.masked_fill(~selected, 0.0), ids.masked_fill(~selected, -1)


def _positions_in_expert(order: Tensor, bounds: Tensor, flat: Tensor) -> Tensor:
    """The position of every slot within its expert's slots."""
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order), device=order.device)
    return position - bounds[flat]  # padding, id -1, comes after the last bound


def padded_experts(
    x: Tensor, weights: Tensor, ids: Tensor, w_gate_up: Tensor, w_down: Tensor, capacity: int
) -> Tensor:
    """The method before dropless experts, for comparison: every expert has a padded buffer of
    `capacity` rows, and slots beyond it are dropped (GShard, Switch). Shapes as grouped_experts,
    and the same result as its after limit_capacity."""
    E, C, K = len(w_down), x.shape[1], ids.shape[1]
    weights, ids = limit_capacity(weights, ids, E, capacity)
    flat = ids.flatten()
    position = _positions_in_expert(*sort_slots(ids, E), flat) + flat * capacity
    row = position.masked_fill(flat < 0, E * capacity)  # the last row takes all padding
    token = torch.arange(len(flat), device=x.device) // K
    buffers = x.new_zeros(E * capacity + 1, C).index_put((row,), x[token])
    gate, up = torch.bmm(buffers[:-1].view(E, capacity, C), w_gate_up.mT).chunk(2, dim=-1)
    y = F.pad(torch.bmm(F.silu(gate) * up, w_down.mT).flatten(0, 1), (0, 0, 0, 1))
    return (y[row].view(-1, K, C) * weights[..., None].type_as(x)).sum(1)
