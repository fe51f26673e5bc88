"""inference_parallel.py: layouts of many ranks that pay in inference alone.

Tensor parallelism by heads (parallel.py) is where generation begins. Three things it leaves:

    batch_sharded      Where heads share keys (multi-query attention, absorbed MLA) every rank would
                       hold and read the whole cache. Shared out by rows of the batch, it holds 1/P
                       ("Efficiently Scaling Transformer Inference", arXiv:2211.05102, 3.3).
    FFN2D              Megatron's feed-forward sends as much however many ranks share it. Cut along
                       both C and F it sends about 1/sqrt(P) of that, in four transfers for two
                       (3.2.2): for many ranks and many rows.
    prefix_attention   A long prompt, and the cache of what came before, shared out over ranks: the
                       keys travel or the queries do, whichever are less (arXiv:2411.01783).

When they lose: few ranks, where a transfer is latency (FFN2D has twice as many); a batch of one
row, which cannot be shared out. Hooks: batch_sharded wraps an `attend` callable; FFN2D stands in
for an MLP. Equivalence (test_all.py): outputs of one rank, caches of B/P rows, bytes on the wire as
the formulas here say. Needs: torch. `python inference_parallel.py` starts 4 processes, checks
itself and prints a table (--check: none).
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Group = dist.ProcessGroup | None  # None: all ranks
# (q, k, v, *, causal, window, scale) -> (o (B, T, Hq, Dv), lse (B, Hq, T))
Attention = Callable[..., tuple[Tensor, Tensor]]

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --------------------------------------------------------------------------------------------------
# Rows of the batch for heads, and a feed-forward cut both ways
# --------------------------------------------------------------------------------------------------


class _Moved(torch.autograd.Function):
    """there(x), whose gradient is back(gradient)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable, back: Callable) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def _gather(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    ranks, dim = dist.get_world_size(group), dim % x.dim()
    if ranks == 1:
        return x
    out = x.new_empty(ranks, *x.shape)
    all_gather(out.flatten(0, 1), x.contiguous(), group=group)  # gloo wants them end to end
    return out.movedim(0, dim).flatten(dim, dim + 1)


def _scatter(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    ranks, dim = dist.get_world_size(group), dim % x.dim()
    if ranks == 1:
        return x
    parts = x.unflatten(dim, (ranks, -1)).movedim(dim, 0).contiguous()
    reduce_scatter(out := torch.empty_like(parts[0]), parts.flatten(0, 1), group=group)
    return out


def _to_rows(x: Tensor, group: Group) -> Tensor:
    """This rank's heads of all rows (B, T, H/P, D) -> all heads of its rows (B/P, T, H, D)."""
    parts = x.unflatten(0, (dist.get_world_size(group), -1)).contiguous()
    dist.all_to_all_single(out := torch.empty_like(parts), parts, group=group)
    return out.movedim(0, 2).flatten(2, 3)


def _to_heads(x: Tensor, group: Group) -> Tensor:
    """And back."""
    parts = x.unflatten(2, (dist.get_world_size(group), -1)).movedim(2, 0).contiguous()
    dist.all_to_all_single(out := torch.empty_like(parts), parts, group=group)
    return out.flatten(0, 1)


def batch_sharded(attend: Callable[..., Tensor], group: Group = None) -> Callable[..., Tensor]:
    """`attend` with all heads, for this rank's B/P rows (3.3), which are all that its cache holds;
    the caller has all rows, q of its Hq/P heads, and k, v that are the same on all ranks: those of
    multi-query attention, or absorbed MLA's latent.

    Expanded MLA has k, v of the rank's heads, which are exchanged as q is. If a cache calls
    `expand` for what it had of its rows, all ranks must, for as many keys: these are gathered,
    expanded and exchanged, so prefill in one piece, or raise `absorb_up_to`. ValueError for a B
    that P does not divide: pad the batch.
    """
    gather, scatter = (partial(move, group=group, dim=0) for move in (_gather, _scatter))
    to_rows, to_heads = (partial(move, group=group) for move in (_to_rows, _to_heads))

    def exchanged(*tensors: Tensor) -> tuple[Tensor, ...]:
        both = _Moved.apply(torch.cat(tensors, -1), to_rows, to_heads)
        return both.split([t.shape[-1] for t in tensors], -1)

    def run(spec: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        B, ranks, rank = len(q), dist.get_world_size(group), dist.get_rank(group)
        _check(B % ranks == 0, f"{B} rows cannot be shared evenly by {ranks} ranks: pad the batch")
        mine = lambda t: t.chunk(ranks)[rank]
        by_head = {name: getattr(spec, name) for name in ("alibi_slopes", "sinks")}
        new = {name: gather(t) for name, t in by_head.items() if t is not None}
        if spec.expand is None:
            (q,), k, v = exchanged(q), mine(k), mine(v)
        else:
            q, k, v = exchanged(q, k, v)
            expand = lambda latent: exchanged(*spec.expand(_Moved.apply(latent, gather, scatter)))
            new |= dict(latent=mine(spec.latent), expand=expand)
        if positions.dim() == 2 and len(positions) == B:
            positions = mine(positions)
        return _Moved.apply(attend(replace(spec, **new), q, k, v, positions), to_heads, to_rows)

    return run


class FFN2D(nn.Module):
    """SwiGLU on X x Y ranks (3.2.2): rank (i, j) has part i of X of the width C, and part j of Y of
    the hidden width F, of every matrix: gate, up (F/Y, C/X), down (C/X, F/Y); from whole ones, or
    these if `cut`. x_group has the ranks of this j in the order of i, y_group those of this i.

        x (C/P) gather y -> (C/X) gate, up -> sums (F/Y) scatter x -> (F/P) silu(gate) * up
                gather x -> (F/Y) down     -> sums (C/X) scatter y -> (C/P)

    x and y are (..., C/P), part i * Y + j, in which a norm and the residual may stay; or, if
    `replicated`, (..., C), equal on all ranks, for one gather more. X = 1 is Megatron's layout.
    """

    def __init__(
        self, gate: Tensor, up: Tensor, down: Tensor, x_group: Group, y_group: Group,
        replicated: bool = True, cut: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.groups, self.replicated = (x_group, y_group), replicated
        (i, j), (X, Y) = self.place()
        width, dim = len(gate) * (Y if cut else 1), len(down) * (X if cut else 1)
        ok = width % (X * Y) == 0 and dim % (X * Y) == 0
        _check(ok, f"F {width} and C {dim} cannot be shared evenly by {X} x {Y} ranks")
        if not cut:
            gate, up = (w.chunk(Y)[j].chunk(X, 1)[i] for w in (gate, up))
            down = down.chunk(X)[i].chunk(Y, 1)[j].clone()
        self.gate_up, self.down = nn.Parameter(torch.cat((gate, up))), nn.Parameter(down)

    def place(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(i, j), (X, Y)"""
        of = dist.get_rank, dist.get_world_size
        return tuple(tuple(get(group) for group in self.groups) for get in of)

    def forward(self, x: Tensor) -> Tensor:
        ((i, j), (X, Y)), move = self.place(), _Moved.apply
        gather_x, gather_y = (partial(_gather, group=group) for group in self.groups)
        scatter_x, scatter_y = (partial(_scatter, group=group) for group in self.groups)
        whole = lambda t: gather_x(gather_y(t))
        if self.replicated:
            x = move(x, lambda t: t.chunk(X, -1)[i], lambda grad: whole(scatter_y(grad)))
        else:
            x = move(x, gather_y, scatter_y)
        h = F.linear(x, self.gate_up).unflatten(-1, (2, -1))
        gate, up = move(h, scatter_x, gather_x).unbind(-2)
        h = move(F.silu(gate) * up, gather_x, scatter_x)
        y = move(F.linear(h, self.down), scatter_y, gather_y)
        return move(y, whole, lambda t: t.chunk(X, -1)[i].chunk(Y, -1)[j]) if self.replicated else y


def ffn_bytes(
    rows: int, C: int, F: int, X: int, Y: int, itemsize: int = 2, replicated: bool = False
) -> float:
    """Bytes that a rank sends in FFN2D for B * T = `rows`: (n - 1) / n of what each ring over n
    ranks gathers or scatters, C/X twice along Y and F/Y thrice along X. The paper drops (n - 1) / n
    and has no gate, 2 rows (C/X + F/Y). On X = 1, Megatron's, 2 rows C for any number of ranks."""
    width, hidden = (Y - 1) / Y * C / X, (X - 1) / X * F / Y
    back = (X * Y - 1) / (X * Y) * C if replicated else width
    return rows * itemsize * (width + back + 3 * hidden)


def best_grid(ranks: int, C: int, F: int, replicated: bool = False) -> tuple[int, int]:
    """The X * Y = ranks that send least: about X = sqrt(2/3 * ranks * C / F)."""
    grids = [(X, ranks // X) for X in range(1, ranks + 1) if ranks % X == 0]
    return min(grids, key=lambda grid: ffn_bytes(1, C, F, *grid, replicated=replicated))


def batch_sharded_bytes(rows: int, heads: int, dims: int, ranks: int, itemsize: int = 2) -> float:
    """Bytes that a rank sends in batch_sharded for B * T = `rows` and Hq = `heads`, `dims` being
    D + Dv of q and o, or 2D + 2Dv expanded."""
    return rows * heads * dims * itemsize * (ranks - 1) / ranks**2


# --------------------------------------------------------------------------------------------------
# A cached prefix shared out over ranks
# --------------------------------------------------------------------------------------------------


def passes_kv(
    new: int, cached: int, Hq: int, Hkv: int, *, ranks: int = 1, flops: float | None = None,
    bandwidth: float | None = None, element_size: int = 2,
) -> bool:  # fmt: skip
    """Whether K and V should travel, not Q (arXiv:2411.01783, Algorithm 1): where they are smaller,

        new / (new + cached) >= 2 Hkv / Hq

    or, if a rank's flops/s and the bandwidth (bytes/s) of a link are given, where attention hides
    them anyway: 4 new (new + cached) / ranks^2 flops per query head and dim in a step, against
    2 (new + cached) / ranks elements of K and V per key head and dim, is

        new >= ranks flops Hkv element_size / (2 Hq bandwidth).

    K and V need no way back, so a tie is theirs."""
    if new * Hq >= 2 * Hkv * (new + cached):
        return True
    if flops is None or bandwidth is None:
        return False
    return new >= ranks * flops * Hkv * element_size / (2 * Hq * bandwidth)


def prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *, among: Attention,
    attention: Attention, group: Group = None, how: str = "auto", scale: float | None = None,
    cached: Sequence[int] | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Prefill after a cached prefix: this rank's part of the new tokens, q (B, t, Hq, D), attends
    to every rank's cache and, causally, to all new tokens (arXiv:2411.01783).

    k_cache (B, S, Hkv, D), v_cache (B, S, Hkv, Dv): any part of the keys before the new ones, S as
    the rank likes, none too. how: "pass-kv" sends the caches round the ring; "pass-q" sends q, and
    what it saw comes home in one all-to-all; "auto" asks passes_kv. among(q, k, v, causal, window,
    scale) -> (o, lse) is attention of the new tokens to each other, as ring_attention with
    return_lse (context_parallel.py); attention is one rank's. cached: S of each rank; if None the
    ranks tell each other, which the host waits for. No window: a cache does not know its positions.
    No gradients.
    """
    _check(how in ("auto", "pass-kv", "pass-q"), f"how must be auto, pass-kv or pass-q, not {how}")
    ok = k_cache.shape[1] == v_cache.shape[1] and all(
        x.shape[:1] + x.shape[2:] == new.shape[:1] + new.shape[2:] and x.dtype == new.dtype
        for x, new in ((k_cache, k), (v_cache, v))
    )
    _check(ok, f"k_cache {tuple(k_cache.shape)} or v_cache {tuple(v_cache.shape)} does not fit k "
           f"{tuple(k.shape)}, v {tuple(v.shape)}, {k.dtype}")  # fmt: skip
    grads = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, k_cache, v_cache))
    _check(not grads, "prefix_attention has no gradients: run it under torch.no_grad()")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if cached is None:
        sizes = torch.empty(ranks, dtype=torch.int64, device=q.device)
        all_gather(sizes, sizes.new_full((1,), k_cache.shape[1]), group=group)
        cached = sizes.tolist()
    ok = len(cached) == ranks and cached[rank] == k_cache.shape[1]
    _check(ok, f"cached {list(cached)}: rank {rank} of {ranks} has {k_cache.shape[1]}")
    if how == "auto":
        by_kv = passes_kv(q.shape[1] * ranks, sum(cached), q.shape[2], k.shape[2])
        how = "pass-kv" if by_kv else "pass-q"
    run = _pass_kv if how == "pass-kv" else _pass_q
    see = partial(attention, causal=False, window=None, scale=scale)
    o, lse = run(q, [k_cache, v_cache], see, cached, group)
    o, lse = _merged(o, lse, *among(q, k, v, causal=True, window=None, scale=scale))
    return (o.to(q.dtype), lse) if return_lse else o.to(q.dtype)


def _merged(o: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two sets of keys (online softmax, arXiv:1805.02867), in the dtype of lse."""
    whole = torch.logaddexp(lse, more_lse)
    weight = lambda lse: torch.where(whole == -math.inf, 0, (lse - whole).exp()).mT[..., None]
    return weight(lse) * o.to(lse.dtype) + weight(more_lse) * more.to(lse.dtype), whole


def _nothing(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    B, T, Hq, _ = q.shape
    wide = dict(dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_zeros(B, T, Hq, v.shape[3], **wide), q.new_full((B, Hq, T), -math.inf, **wide)


def _shift(tensors: list[Tensor], like: list[Tensor], group: Group) -> Callable[[], list[Tensor]]:
    """Begin to send tensors to the next rank; a call then awaits those of the previous one."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sent = [t.contiguous() for t in tensors]
    ops = []
    for out, into in zip(sent, like):
        ops.append(dist.P2POp(dist.isend, out, group=group, group_peer=(rank + 1) % ranks))
        ops.append(dist.P2POp(dist.irecv, into, group=group, group_peer=(rank - 1) % ranks))
    works = dist.batch_isend_irecv(ops)

    def wait(sent: list[Tensor] = sent) -> list[Tensor]:  # these have to live until then
        for work in works:
            work.wait()
        return like

    return wait


def _pass_kv(
    q: Tensor, here: list[Tensor], see: Attention, cached: Sequence[int], group: Group
) -> tuple[Tensor, Tensor]:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    seen = _nothing(q, here[1])
    for step in range(ranks):
        if coming := step + 1 < ranks:
            length = cached[(rank - step - 1) % ranks]
            wait = _shift(here, [x.new_empty(len(x), length, *x.shape[2:]) for x in here], group)
        if here[0].shape[1]:
            seen = _merged(*seen, *see(q, *here))
        here = wait() if coming else here
    return seen


def _pass_q(
    q: Tensor, cache: list[Tensor], see: Attention, cached: Sequence[int], group: Group
) -> tuple[Tensor, Tensor]:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    parts: list[Any] = [None] * ranks  # for each rank, what its queries saw here
    for step in range(ranks):
        if coming := step + 1 < ranks:
            wait = _shift([q], [torch.empty_like(q, memory_format=torch.contiguous_format)], group)
        parts[(rank - step) % ranks] = see(q, *cache) if cached[rank] else _nothing(q, cache[1])
        q = wait()[0] if coming else q
    sent = [torch.stack([x.to(q.dtype) for x, _ in parts]), torch.stack([x for _, x in parts])]
    home = [torch.empty_like(x) for x in sent]
    for new, old in zip(home, sent):
        dist.all_to_all_single(new, old, group=group)
    seen = _nothing(q, cache[1])
    for part in zip(*home):
        seen = _merged(*seen, *part)
    return seen


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Spec:
    scale: float
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    expand: Callable | None = None


def plain(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T scale) v (B, T, Hq, Dv) and its log-sum-exp (B, Hq, T), the last query seeing
    the last key."""
    B, T, Hq, D = q.shape
    q = q.unflatten(2, (k.shape[2], -1))
    s = torch.einsum("bthgd,bshd->bhgts", q, k) * (D**-0.5 if scale is None else scale)
    if causal:
        ahead = torch.ones(T, k.shape[1], dtype=torch.bool).triu(1 + k.shape[1] - T)
        s = s.masked_fill(ahead, -math.inf)
    o = torch.einsum("bhgts,bshd->bthgd", s.softmax(-1), v)
    return o.flatten(2, 3), s.logsumexp(-1).flatten(1, 2)


def grid(X: int, Y: int) -> tuple[Group, Group]:
    """(x_group, y_group) of rank i * Y + j."""
    ranks = torch.arange(X * Y).view(X, Y)
    make = dist.new_subgroups_by_enumeration
    return make(ranks.T.tolist())[0], make(ranks.tolist())[0]


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The feed-forward of one rank."""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def check(rank: int, ranks: int) -> None:
    """Every layout's output is one rank's."""
    rng = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(shape, generator=rng, dtype=torch.float64)
    x, gate, up, down = make(3, 2, 16), make(24, 16), make(24, 16), make(16, 24)
    for X, Y in ((1, 4), (2, 2), (4, 1)):
        got = FFN2D(gate, up, down, *grid(X, Y))(x)
        assert torch.allclose(got, swiglu(x, gate, up, down)), (X, Y)
    q, k, v = make(8, 3, 8, 6), make(8, 5, 1, 6), make(8, 5, 1, 6)
    attend = lambda spec, q, k, v, at: plain(q, k, v, causal=True, window=None, scale=spec.scale)[0]
    got = batch_sharded(attend)(_Spec(0.3), q.chunk(ranks, 2)[rank], k, v, torch.arange(3))
    want = attend(_Spec(0.3), q, k, v, None).chunk(ranks, 2)[rank]
    assert torch.allclose(got, want)
    q, k, v = make(2, 8, 4, 6), make(2, 19, 2, 6), make(2, 19, 2, 6)
    want = plain(q, k, v, causal=True, window=None, scale=None)[0].chunk(ranks, 1)[rank]
    ends = [0, 5, 5, 9, 11]  # of the ranks' caches
    t = slice(2 * rank, 2 * rank + 2)

    def among(_: Tensor, __: Tensor, ___: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        return plain(q[:, t], k[:, 11 : 13 + 2 * rank], v[:, 11 : 13 + 2 * rank], **how)

    for how in ("pass-kv", "pass-q"):
        caches = (x[:, ends[rank] : ends[rank + 1]] for x in (k, v))
        new = (x[:, 11:][:, t] for x in (k, v))
        o = prefix_attention(q[:, t], *new, *caches, among=among, attention=plain, how=how)
        assert torch.allclose(o, want), how


def benchmark(rank: int, ranks: int) -> None:
    """Milliseconds of a feed-forward per grid, on this machine, and what a rank sends."""
    C, F_, rows = 512, 2048, 64
    x, gate, up, down = torch.randn(rows, C), *torch.randn(2, F_, C), torch.randn(C, F_)
    say = print if rank == 0 else lambda *_: None
    say(f"{ranks} ranks, {rows} rows, C {C}, F {F_}, fp32, in and out C / ranks")
    say(f"{'X x Y':>12}{'ms':>9}{'KB sent':>10}")
    with torch.no_grad():
        for X, Y in ((1, 4), (2, 2), (4, 1)):
            ffn, spent = FFN2D(gate, up, down, *grid(X, Y), replicated=False), []
            for _ in range(12):
                dist.barrier()
                start = time.perf_counter()
                ffn(x[:, : C // ranks])
                dist.barrier()
                spent.append(1e3 * (time.perf_counter() - start))
            kb = ffn_bytes(rows, C, F_, X, Y, itemsize=4) / 1e3
            say(f"{f'{X} x {Y}':>12}{statistics.median(spent[2:]):>9.2f}{kb:>10.0f}")
    for n in (4, 16, 64, 256):
        X, Y = best_grid(n, 8192, 28672)
        share = ffn_bytes(1, 8192, 28672, X, Y) / ffn_bytes(1, 8192, 28672, 1, n)
        say(f"C 8192, F 28672 on {n:>3} ranks: {X} x {Y} sends {share:.2f} of 1 x {n}")


def main() -> None:
    if "RANK" not in os.environ:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        sys.exit(subprocess.run([*run, *sys.argv], env=os.environ | threads).returncode)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    _check(ranks == 4, f"the check is for 4 ranks, not {ranks}")
    check(rank, ranks)
    if "--check" not in sys.argv:
        benchmark(rank, ranks)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
