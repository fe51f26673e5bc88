"""Ring Self-Attention: attention over a sharded sequence with whole rows of scores.

The first sequence parallelism (Li et al., arXiv:2105.13120, 3.1). Keys travel around a ring until
each rank has its queries' scores over the whole sequence, then comes an ordinary softmax, then
values travel:

    S_n = Q_n [K_1 ... K_N]^T,    P_n = softmax(S_n),    O_n = sum_i P_n,i V_i

Ring attention (context_parallel.py) sends K and V together and merges partial outputs by online
softmax, in memory linear in T. Here the probabilities, T^2 / N per head on each rank, are kept for
the backward pass, which computes no score again: 6 matmuls instead of 7. Both send the same bytes.

When it loses: on long sequences, where T^2 / N scores per head do not fit; with a causal mask,
which saves no compute here; and on slow links, since a transfer overlaps with one matmul instead of
two. Hook: `attend` (train.py --set cp_method=ring-self-attention). Equivalence (test_all.py):
attention of one process in outputs, lse and gradients; bytes sent == ring attention's. Needs:
torch. A check and a table: `torchrun --nproc-per-node 2 parallelism/ring_self_attention.py`.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Group = dist.ProcessGroup | None  # None: all ranks
Placement = Callable[[int, int, int], Tensor]  # (T, ranks, rank) -> positions (T / ranks,)

# torch 2.13 renamed it; 2.11 has the old name only
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def contiguous(T: int, ranks: int, rank: int) -> Tensor:
    """The positions (T / ranks,) of a rank's tokens: one chunk."""
    return torch.arange(T).chunk(ranks)[rank]


def ring(x: Tensor, group: Group) -> Iterator[tuple[slice, Tensor]]:
    """Every rank's x (B, t, H, D), this rank's first: (its columns in the scores, x). The next one
    is received while the caller computes."""
    rank, ranks, t = dist.get_rank(group), dist.get_world_size(group), x.shape[1]
    for step in range(ranks):
        source = (rank - step) % ranks
        if has_next := step + 1 < ranks:
            received = torch.empty_like(sent := x.contiguous())
            send = dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % ranks)
            receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % ranks)
            works = dist.batch_isend_irecv([send, receive])
        yield slice(source * t, (source + 1) * t), x
        if has_next:
            for work in works:
                work.wait()
            x = received


def _mask(
    placement: Placement, t: int, causal: bool, window: int | None, q: Tensor, group: Group
) -> Tensor:
    """True for keys, in the ranks' order, that this rank's queries do not see: (t, T)."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    at = [placement(t * ranks, ranks, r).to(q.device) for r in range(ranks)]
    distance = at[rank][:, None] - torch.cat(at)
    mask = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    return mask if window is None else mask | (distance >= window)


class _RingSelfAttention(torch.autograd.Function):
    """Scores are (B, Hkv, G, t, T): G query heads share a key head."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, group: Group
    ) -> tuple[Tensor, Tensor]:
        (B, t, Hq, _), Hkv, T = q.shape, k.shape[2], mask.shape[1]
        dtype = torch.promote_types(q.dtype, torch.float32)
        grouped = q.to(dtype).unflatten(2, (Hkv, -1))
        p = torch.empty(B, Hkv, Hq // Hkv, t, T, dtype=dtype, device=q.device)
        for columns, part in ring(k, group):
            p[..., columns] = torch.einsum("bthgd,bshd->bhgts", grouped, part.to(dtype))
        p.mul_(scale).masked_fill_(mask, -math.inf)
        lse = p.logsumexp(-1)
        p.sub_(lse[..., None]).exp_()
        o = torch.zeros(B, t, Hkv, Hq // Hkv, v.shape[3], dtype=dtype, device=q.device)
        for columns, part in ring(v, group):
            o += torch.einsum("bhgts,bshd->bthgd", p[..., columns], part.to(dtype))
        o = o.flatten(2, 3)
        ctx.save_for_backward(q, k, v, p, o)
        ctx.scale, ctx.group = scale, group
        return o.to(q.dtype), lse.flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Any, ...]:
        q, k, v, p, o = ctx.saved_tensors
        group, Hkv, (B, _, _, _, T) = ctx.group, k.shape[2], p.shape
        split = lambda x: x.to(p.dtype).unflatten(2, (Hkv, -1))
        do, o, grouped = split(do), split(o), split(q)
        ds, dq = torch.empty_like(p), torch.zeros_like(grouped)
        dk, dv = (p.new_empty(B, T, Hkv, x.shape[3]) for x in (k, v))
        for columns, part in ring(v, group):
            ds[..., columns] = torch.einsum("bthgd,bshd->bhgts", do, part.to(p.dtype))
            dv[:, columns] = torch.einsum("bhgts,bthgd->bshd", p[..., columns], do)
        rest = dlse.unflatten(1, (Hkv, -1)) - torch.einsum("bthgd,bthgd->bhgt", do, o)
        ds.add_(rest[..., None]).mul_(p).mul_(ctx.scale)
        for columns, part in ring(k, group):
            dq += torch.einsum("bhgts,bshd->bthgd", ds[..., columns], part.to(p.dtype))
            dk[:, columns] = torch.einsum("bhgts,bthgd->bshd", ds[..., columns], grouped)
        dk, dv = (_sum_to_owner(x, group) for x in (dk, dv))
        return dq.flatten(2, 3).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *[None] * 3


def _sum_to_owner(x: Tensor, group: Group) -> Tensor:
    """(B, T, H, D), in the ranks' order -> this rank's (B, T / ranks, H, D), summed over ranks."""
    parts = x.unflatten(1, (dist.get_world_size(group), -1)).transpose(0, 1).contiguous()
    reduce_scatter(out := torch.empty_like(parts[0]), parts.flatten(0, 1), group=group)
    return out


def ring_self_attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group = None, placement: Placement = contiguous,
    causal: bool = True, scale: float | None = None, window: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """q (B, t, Hq, D), k (B, t, Hkv, D), v (B, t, Hkv, Dv) of this rank's t = T / ranks tokens, at
    the positions that placement gives -> o (B, t, Hq, Dv). Each rank sends (ranks - 1) times K and
    V in the forward pass, and again in the backward pass with their gradients in fp32."""
    if window is not None and window < 1:
        raise ValueError(f"window must be 1 or more, not {window}")
    device = q.device.type
    if torch.is_autocast_enabled(device):
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    mask = _mask(placement, q.shape[1], causal, window, q, group)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    with torch.autocast(device, enabled=False):  # scores are in fp32
        out = _RingSelfAttention.apply(q, k, v, mask, scale, group)
    return out if return_lse else out[0]


def score_bytes(T: int, ranks: int, heads: int, B: int = 1, itemsize: int = 4) -> int:
    """Bytes of the probabilities that a rank keeps for the backward pass of a layer."""
    return B * heads * T * T // ranks * itemsize


def main() -> None:
    """Outputs and gradients == those of one rank; time of forward and backward by length."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    if "RANK" not in os.environ:
        sys.exit("run: torchrun --standalone --nproc-per-node 2 parallelism/ring_self_attention.py")
    gpu = torch.cuda.is_available()
    torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu")
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([r]) for r in range(ranks)][rank]

    def step(group: Group, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(ring_self_attention(*inputs, group=group).square().sum(), inputs)

    torch.manual_seed(0)
    for T in (256 * ranks, 1024 * ranks):
        whole = [torch.randn(1, T, h, 64).requires_grad_() for h in (4, 2, 2)]
        part = [x.detach().chunk(ranks, 1)[rank].requires_grad_() for x in whole]
        want = tuple(x.chunk(ranks, 1)[rank] for x in step(alone, whole))
        torch.testing.assert_close(step(None, part), want, rtol=1e-3, atol=1e-4)
        # the same number of runs on all ranks
        args = (None, part), (alone, whole)
        ms = [1e3 * Timer("f(*x)", globals=dict(f=step, x=x)).timeit(5).median for x in args]
        if rank == 0:
            mb = f"{score_bytes(T, ranks, heads=4) / 1e6:.1f} MB of scores"
            print(f"T {T}: {ms[0]:.1f} ms on {ranks} ranks, each with {mb}; {ms[1]:.1f} ms on one")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
