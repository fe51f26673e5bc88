"""Context parallelism: attention over a sequence that is sharded across ranks.

A sequence too long for one rank is split into one shard per rank. Everything but attention runs on
the local shard; attention needs the keys and values of all ranks. Three ways to get them:

    ring_attention        K and V pass from neighbour to neighbour while the local ones are in use:
                          besides its own, a rank holds one shard in use and one in flight
                          (arXiv:2310.01889)
    all_gather_attention  all-gather K and V: they are small in models with few key heads (Llama 3)
    ulysses_attention     all-to-all: exchange tokens for heads, so each rank has all tokens of some
                          heads (arXiv:2309.14509); with the ring as its attention: 2D (USP)

    at = cp_positions(T, ranks, rank)             the positions of this rank's tokens
    o = ring_attention(q, k, v, group=group)      q, k, v, o: of the local tokens

Under a causal mask late tokens see more keys than early ones: with contiguous shards the last rank
has nearly twice the mean work, and all ranks wait for it. zigzag gives each rank an early and a
late chunk, striped every ranks-th token; both balance the work (`pairs_per_rank` counts it).

All three take any attention that returns (o, lse) and is differentiable in both. Partial results
are merged by online softmax. The backward pass recomputes that attention block by block, so the
saved memory is O(T / ranks) and no block needs another block's probabilities. What the mask leaves
between two ranks' shards is computed by interval arithmetic (_band_calls): a few causal, windowed
or unmasked calls of plain attention.

When it loses: sequences that fit on one rank, since there is less compute per byte sent; short
packed documents, each of which costs a call. Equivalence (test_all.py): attention of one process in
outputs, lse and gradients, for every placement, causal or not, with windows and packed documents.
Hook: used behind an `attend` callable. Needs: torch. A check and a table: `torchrun --standalone
--nproc-per-node 2 parallelism/context_parallel.py`.
"""

from __future__ import annotations

import math
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Group = dist.ProcessGroup
# (q, k, v, *, causal, window, scale) -> (o (B, T, Hq, Dv), lse (B, Hq, T)), differentiable
AttentionFn = Callable[..., tuple[Tensor, Tensor]]

# torch 2.13 renamed these two; 2.11 has the old names only
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --------------------------------------------------------------------------------------------------
# Plain attention and the placement of tokens
# --------------------------------------------------------------------------------------------------


def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, window: int | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(q k^T scale) v and its log-sum-exp in plain torch, which materializes the scores.
    Softmax in fp32, or fp64 for fp64 inputs; a fully masked query gets o = 0, lse = -inf."""
    (B, T, Hq, D), (S, Hkv) = q.shape, k.shape[1:3]
    if causal and T > 128:  # the first half of the queries sees at most S - T / 2 keys
        early, late = q.split([T // 2, T - T // 2], dim=1)
        known = max(S - late.shape[1], 0)
        halves = (early, k[:, :known], v[:, :known]), (late, k, v)
        halves = [attention_with_lse(*x, window=window, scale=scale) for x in halves]
        return tuple(torch.cat(pair, dim) for pair, dim in zip(zip(*halves), (1, 2)))
    dtype = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(dtype).reshape(B, T, Hkv, Hq // Hkv, D)
    s = torch.einsum("bthgd,bshd->bhgts", grouped, k.to(dtype)) * (
        D**-0.5 if scale is None else scale
    )
    distance = torch.arange(T, device=q.device)[:, None] + S - T - torch.arange(S, device=q.device)
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen = seen & (distance < window)
    empty = ~seen.any(-1)
    s = s.masked_fill(~(seen | empty[:, None]), -math.inf)  # avoids -inf - -inf in the gradient
    lse = s.logsumexp(-1)
    p = (s - lse[..., None]).exp().masked_fill(empty[:, None], 0)
    o = torch.einsum("bhgts,bshd->bthgd", p, v.to(dtype)).reshape(B, T, Hq, v.shape[3])
    return o.to(q.dtype), lse.masked_fill(empty, -math.inf).reshape(B, Hq, T)


def _position_runs(T: int, ranks: int, rank: int, placement: str) -> list[tuple[int, int, int]]:
    """A rank's positions as arithmetic progressions (first, step, length)."""
    parts = 2 * ranks if placement == "zigzag" else ranks
    known = placement in ("contiguous", "zigzag", "striped")
    _check(known, f"placement must be contiguous, zigzag or striped, not {placement!r}")
    _check(T % parts == 0, f"{T} tokens on {ranks} ranks: {placement} needs a multiple of {parts}; "
           "pad the sequence")  # fmt: skip
    n = T // parts
    if placement == "zigzag":
        return [(chunk * n, 1, n) for chunk in (rank, parts - 1 - rank)]
    return [(rank * n, 1, n) if placement == "contiguous" else (rank, ranks, n)]


def cp_positions(T: int, ranks: int, rank: int, placement: str = "zigzag") -> Tensor:
    """The positions (T // ranks,) of a rank's tokens among T, in storage order.

    contiguous: chunk r. striped: r, r + ranks, ... (Striped Attention, arXiv:2311.09431). zigzag:
    chunks r and 2 * ranks - 1 - r of 2 * ranks (Llama 3, arXiv:2407.21783, 3.3.2), which balances
    the work under a causal mask. ValueError if T is not divisible."""
    runs = _position_runs(T, ranks, rank, placement)
    return torch.cat([first + step * torch.arange(n) for first, step, n in runs])


def pairs_per_rank(
    T: int, ranks: int, placement: str, window: int | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> list[int]:  # fmt: skip
    """The number of unmasked (query, key) pairs of each rank under a causal mask."""
    positions = torch.arange(T)
    starts = torch.tensor(_check_cu_seqlens(cu_seqlens, T) or (0, T))
    start = starts[torch.bucketize(positions, starts, right=True) - 1]
    keys = (positions - start + 1).clamp(max=window or T)
    return [int(keys[cp_positions(T, ranks, r, placement)].sum()) for r in range(ranks)]


def _check_cu_seqlens(cu_seqlens: Tensor | Sequence[int] | None, T: int) -> tuple[int, ...] | None:
    if cu_seqlens is None:
        return None
    cu = tuple(cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else map(int, cu_seqlens))
    ok = len(cu) > 1 and cu[0] == 0 and cu[-1] == T and list(cu) == sorted(cu)
    _check(ok, f"cu_seqlens must rise from 0 to the {T} tokens of all ranks, not {cu}")
    return cu


# --------------------------------------------------------------------------------------------------
# The attention calls that a mask needs between two ranks
# --------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """attention(q[:, q0:q1], k[:, k0:k1], v[:, k0:k1], causal=causal, window=window)"""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool
    window: int | None


def _band_calls(n: int, m: int, low: int, high: int) -> list[_Call]:
    """At most two calls that cover the pairs low <= t - s < high of queries t < n and keys s < m.

    A causal call that ends at query b and key e covers t - s >= b - e. With b - e = low it serves
    the queries before m + low, whose last visible key is in this block; the other queries see all
    keys up to the end of the block and need only the window."""
    low, high = max(low, 1 - m), min(high, n)
    if low >= high:
        return []
    split, calls = 0 if low == 1 - m else min(n, m + low), []
    if split:
        t, e = max(low, 0), split - low
        s = max(0, t - high + 1)
        calls = [_Call(t, split, s, e, t - e + 1 < low, high - low if split - s > high else None)]
    end, s = min(n, m + high - 1), max(0, split - high + 1)
    if split < end:
        calls.append(_Call(split, end, s, m, False, high + m - end if end - s > high else None))
    return calls


def _merge_calls(calls: Sequence[_Call]) -> tuple[_Call, ...]:
    """Merge adjacent calls, first along the keys, then along the queries, where masks allow it."""
    no_mask = (False, None)
    along_keys = lambda p, c: p[:2] == c[:2] and p.k1 == c.k0 and p[4:] == no_mask and not c.window
    along_queries = lambda p, c: p.q1 == c.q0 and p[2:] == c[2:] and c[4:] == no_mask
    for fits, start in ((along_keys, "k0"), (along_queries, "q0")):
        done: list[_Call] = []
        for c in calls:
            if done and fits(done[-1], c):
                c = c._replace(**{start: getattr(done.pop(), start)})
            done.append(c)
        calls = done
    return tuple(calls)


def _mask_calls(
    q_runs: list, k_runs: list, causal: bool, window: int | None, cu: tuple[int, ...] | None
) -> tuple[_Call, ...]:  # fmt: skip
    """The calls for queries at the positions of q_runs and keys at those of k_runs."""
    T = 1 + max(first + step * (n - 1) for first, step, n in q_runs + k_runs)
    cu = cu or (0, T)
    calls, q_offset = [], 0
    inside = lambda first, step, n, at: min(max(-((first - at) // step), 0), n)
    for q_run in q_runs:
        spans = (
            bisect_right(cu, q_run[0]) - 1,
            bisect_right(cu, q_run[0] + q_run[1] * (q_run[2] - 1)),
        )
        for start, stop in pairwise(cu[spans[0] : spans[1] + 1]):
            k_offset, (t, t_end) = 0, (inside(*q_run, at) for at in (start, stop))
            for k_run in k_runs:
                s, s_end = (inside(*k_run, at) for at in (start, stop))
                if t < t_end and s < s_end:
                    n, m, step = t_end - t, s_end - s, q_run[1]
                    offset = q_run[0] + step * t - k_run[0] - step * s
                    low = -(offset // step) if causal else 1 - m
                    high = n if window is None else -((offset - window) // step)
                    q0, k0 = q_offset + t, k_offset + s
                    for a, b, c, e, *mask in _band_calls(n, m, low, high):
                        calls.append(_Call(q0 + a, q0 + b, k0 + c, k0 + e, *mask))
                k_offset += k_run[2]
        q_offset += q_run[2]
    return _merge_calls(calls)


@lru_cache(64)  # one entry per kind of layer
def _ring_plan(
    T: int, ranks: int, rank: int, placement: str, causal: bool, window: int | None,
    cu: tuple[int, ...] | None,
) -> list[tuple[_Call, ...]]:  # fmt: skip
    """The calls of each ring step, in which this rank holds the keys of rank - step. Steps that no
    rank needs are dropped: with contiguous chunks and a window, keys travel to few ranks."""
    runs = [_position_runs(T, ranks, r, placement) for r in range(ranks)]
    see = lambda r, step: _mask_calls(runs[r], runs[(r - step) % ranks], causal, window, cu)
    needed = lambda step: step == 0 or any(see(r, step) for r in range(ranks))
    last = next(step for step in reversed(range(ranks)) if needed(step))
    return [see(rank, step) for step in range(last + 1)]


@lru_cache(64)
def _gather_plan(
    T: int, ranks: int, rank: int, placement: str, causal: bool, window: int | None,
    cu: tuple[int, ...] | None,
) -> tuple[tuple[_Call, ...], list[int]]:  # fmt: skip
    """The calls on the gathered keys, and the order in which to concatenate the ranks' chunks.
    Stripes stay separate: a stripe of queries and all keys do not form a band."""
    own, every = _position_runs(T, ranks, rank, placement), [(0, 1, T)]
    runs = [run for r in range(ranks) for run in _position_runs(T, ranks, r, placement)]
    order = sorted(range(len(runs)), key=runs.__getitem__)
    return _mask_calls(own, runs if placement == "striped" else every, causal, window, cu), order


# --------------------------------------------------------------------------------------------------
# Partial attention and its merge
# --------------------------------------------------------------------------------------------------


def _empty_attention(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Initial o = 0 and lse = -inf, in the accumulation dtype."""
    B, T, Hq, _ = q.shape
    o = q.new_zeros(B, T, Hq, v.shape[3], dtype=torch.promote_types(q.dtype, torch.float32))
    return o, o.new_full((B, Hq, T), -math.inf)


def _weight(lse: Tensor, merged_lse: Tensor) -> Tensor:
    """exp(lse - merged_lse) (B, Hq, T), 0 for fully masked queries, as (B, T, Hq, 1)."""
    w = torch.where(merged_lse == -math.inf, 0, (lse - merged_lse).exp())
    return w.transpose(1, 2)[..., None]


def _merge(o: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merge the attention over further keys into o and lse, in place, by online softmax
    (arXiv:1805.02867)."""
    merged_lse = torch.logaddexp(lse, more_lse)
    o.mul_(_weight(lse, merged_lse)).add_(_weight(more_lse, merged_lse) * more)
    lse.copy_(merged_lse)


def _attend(
    o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, calls: Sequence[_Call],
    attention: AttentionFn, scale: float | None,
) -> None:  # fmt: skip
    for a, b, c, e, causal, window in calls:
        more = attention(q[:, a:b], k[:, c:e], v[:, c:e], causal=causal, window=window, scale=scale)
        _merge(o[:, a:b], lse[:, :, a:b], *more)


def _output_grads(o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor) -> tuple[Tensor, ...]:
    do = do.to(lse.dtype)
    return lse, do, dlse - (do * o).sum(-1).transpose(1, 2)


def _attend_backward(
    dq: Tensor, saved: Sequence[Tensor], k: Tensor, v: Tensor, calls: Sequence[_Call],
    attention: AttentionFn, scale: float | None,
) -> list[Tensor]:  # fmt: skip
    """Add to dq; return dk and dv of this block. With w_b = exp(lse_b - lse), o = sum w_b o_b gives

        grad o_b = w_b do,   grad lse_b = w_b (do . o_b + rest),   rest = dlse - do . o

    which are backpropagated through a recomputation of the block's attention."""
    q, lse, do, rest = saved
    dkv = [torch.zeros_like(x, dtype=dq.dtype) for x in (k, v)]
    for a, b, c, e, causal, window in calls:
        parts = [x.detach().requires_grad_() for x in (q[:, a:b], k[:, c:e], v[:, c:e])]
        with torch.enable_grad():
            o_b, lse_b = attention(*parts, causal=causal, window=window, scale=scale)
        w, do_b = _weight(lse_b.detach(), lse[:, :, a:b]), do[:, a:b]
        inner = (do_b * o_b.detach()).sum(-1).transpose(1, 2) + rest[:, :, a:b]
        grads = (w * do_b).to(o_b.dtype), (w[..., 0].transpose(1, 2) * inner).to(lse_b.dtype)
        grads = torch.autograd.grad((o_b, lse_b), parts, grads)
        for total, grad in zip((dq[:, a:b], dkv[0][:, c:e], dkv[1][:, c:e]), grads):
            total.add_(grad)
    return dkv


# --------------------------------------------------------------------------------------------------
# Ring, all-gather, Ulysses
# --------------------------------------------------------------------------------------------------


class _Shift:
    """An asynchronous shift along the ring: send tensors to rank + by, receive from rank - by."""

    def __init__(self, tensors: Sequence[Tensor], group: Group | None, by: int = 1) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        to, source = (
            dist.get_global_rank(group or dist.group.WORLD, (rank + d) % ranks) for d in (by, -by)
        )
        self.sent = [t.contiguous() for t in tensors]  # kept alive until wait()
        self.received = [torch.empty_like(t) for t in self.sent]
        pairs = zip(self.sent, self.received)
        ops = [(dist.isend, out, to, dist.irecv, into, source) for out, into in pairs]
        ops = [dist.P2POp(*half, group) for op in ops for half in (op[:3], op[3:])]
        self.works = dist.batch_isend_irecv(ops)

    def wait(self) -> list[Tensor]:
        for transfer in self.works:
            transfer.wait()
        self.sent = []
        return self.received


class _Ring(torch.autograd.Function):
    """K and V travel around the ring in the forward and in the backward pass. In the backward pass
    dK and dV follow their block one step behind: its second rank starts the sum, each rank adds,
    and the last one returns it to the owner."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: list, *options: Any) -> Any:
        ctx.plan, ctx.options = plan, options
        group, *core = options  # core: attention, scale
        (o, lse), kv = _empty_attention(q, v), [k, v]
        for step, calls in enumerate(plan):
            incoming = _Shift(kv, group) if step + 1 < len(plan) else None
            _attend(o, lse, q, *kv, calls, *core)
            kv = incoming.wait() if incoming else []
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Any, ...]:
        q, k, v, *saved = ctx.saved_tensors
        (group, *core), saved = ctx.options, (q, *_output_grads(*saved, do, dlse))
        dq, kv = torch.zeros_like(q, dtype=saved[1].dtype), [k, v]
        own, grad_shift = [], None
        for step, calls in enumerate(ctx.plan):
            incoming = _Shift(kv, group) if step + 1 < len(ctx.plan) else None
            grads = _attend_backward(dq, saved, *kv, calls, *core)
            if grad_shift:
                grads = [a.add_(b) for a, b in zip(grad_shift.wait(), grads)]
            if step == 0:
                own = grads
            else:
                grad_shift = _Shift(grads, group, by=1 if incoming else -step)
            kv = incoming.wait() if incoming else []
        if grad_shift:
            own = [a.add_(b) for a, b in zip(own, grad_shift.wait())]
        return dq.to(q.dtype), own[0].to(k.dtype), own[1].to(v.dtype), *[None] * 4


def _gather_keys(x: Tensor, order: list[int], group: Group | None) -> Tensor:
    """All-gather (B, t, H, D) -> (B, T, H, D), with the ranks' chunks in `order`."""
    gathered = x.new_empty(dist.get_world_size(group), *x.shape)
    all_gather(gathered.flatten(0, 1), x.contiguous(), group=group)
    chunks = gathered.transpose(0, 1).flatten(1, 2).chunk(len(order), 1)
    return torch.cat([chunks[i] for i in order], 1)


def _scatter_keys(x: Tensor, order: list[int], group: Group | None) -> Tensor:
    """Backward of _gather_keys: reduce-scatter (B, T, H, D) -> (B, t, H, D)."""
    chunks = x.chunk(len(order), 1)
    x = torch.cat([chunks[order.index(i)] for i in range(len(order))], 1)
    parts = x.unflatten(1, (dist.get_world_size(group), -1)).transpose(0, 1).contiguous()
    out = torch.empty_like(parts[0])
    reduce_scatter(out, parts.flatten(0, 1), group=group)
    return out


class _AllGather(torch.autograd.Function):
    """All keys at once, gathered again in the backward pass: only shards are saved."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: tuple, *options: Any) -> Any:
        ctx.plan, ctx.options = plan, options
        (calls, order), (group, *core) = plan, options
        o, lse = _empty_attention(q, v)
        _attend(o, lse, q, *(_gather_keys(x, order, group) for x in (k, v)), calls, *core)
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Any, ...]:
        q, k, v, *saved = ctx.saved_tensors
        (calls, order), (group, *core) = ctx.plan, ctx.options
        saved = (q, *_output_grads(*saved, do, dlse))
        dq = torch.zeros_like(q, dtype=saved[1].dtype)
        full_kv = (_gather_keys(x, order, group) for x in (k, v))
        grads = _attend_backward(dq, saved, *full_kv, calls, *core)
        dk, dv = (_scatter_keys(x, order, group) for x in grads)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *[None] * 4


def _cp_inputs(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, ...]:
    shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
    ok = q.dim() == k.dim() == v.dim() == 4 and q.shape[:2] == k.shape[:2]
    ok = ok and k.shape[:3] == v.shape[:3] and q.shape[3] == k.shape[3]
    _check(ok, "the local q, k, v must be (B, T, Hq, D), (B, T, Hkv, D), (B, T, Hkv, Dv), not "
           f"{shapes}")  # fmt: skip
    ok = q.shape[2] % k.shape[2] == 0
    _check(ok, f"q has {q.shape[2]} heads, which must be a multiple of the {k.shape[2]} key heads")
    ok = window is None or (isinstance(window, int) and window >= 1)
    _check(ok, f"window must be an integer of at least 1, not {window}")
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    return q, k, v


def _cp_attention(
    function: Any, plan: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor,
    group: Group | None, attention: AttentionFn, placement: str, causal: bool,
    scale: float | None, window: int | None, cu_seqlens: Tensor | Sequence[int] | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v = _cp_inputs(q, k, v, window)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    T = q.shape[1] * ranks
    calls = plan(T, ranks, rank, placement, causal, window, _check_cu_seqlens(cu_seqlens, T))
    with torch.autocast(q.device.type, enabled=False):  # as in the backward pass's recomputation
        return function.apply(q, k, v, calls, group, attention, scale)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group | None = None,
    attention: AttentionFn = attention_with_lse, placement: str = "zigzag", causal: bool = True,
    scale: float | None = None, window: int | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Ring attention (arXiv:2310.01889) over a sequence sharded by cp_positions:
    q (B, T / ranks, Hq, D), k, v with Hkv heads -> o (B, T / ranks, Hq, Dv).

    The transfer of the next K and V overlaps with attention to the current ones. Each rank sends
    (ranks - 1) times K and V in the forward pass, and as often K, V and their fp32 gradients in the
    backward pass. Saved for backward: q, k, v, o, lse, O(T / ranks). The backward pass recomputes
    `attention` block by block. cu_seqlens: boundaries of documents packed into the full sequence,
    each attending only to itself and costing a call; a GPU tensor is synchronized, a list is not.
    All ranks must have shards of equal size. ValueError for sizes that do not fit.
    """
    out = _cp_attention(
        _Ring, _ring_plan, q, k, v, group, attention, placement, causal, scale, window, cu_seqlens
    )
    return out if return_lse else out[0]


def all_gather_attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group | None = None,
    attention: AttentionFn = attention_with_lse, placement: str = "zigzag", causal: bool = True,
    scale: float | None = None, window: int | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """ring_attention with one transfer (Llama 3, arXiv:2407.21783, 3.3.2): all-gather K and V, then
    attend from the local chunks in few large calls. K and V of the full sequence are temporarily in
    memory, which is little with few key heads; the transfer is not overlapped with compute. The
    backward pass gathers again and reduce-scatters dK and dV.
    """
    out = _cp_attention(
        _AllGather, _gather_plan, q, k, v, group, attention, placement, causal, scale, window,
        cu_seqlens,
    )  # fmt: skip
    return out if return_lse else out[0]


class _SeqAllToAll(torch.autograd.Function):
    """All-to-all (B, t, H, D) <-> (B, t * ranks, H / ranks, D): a shard of the tokens for a shard
    of the heads, for several tensors at once. The backward pass is the inverse exchange."""

    @staticmethod
    def forward(ctx: Any, group: Group | None, back: bool, *tensors: Tensor) -> Any:
        ctx.group, ctx.back = group, back
        return _SeqAllToAll.exchange(group, back, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_SeqAllToAll.exchange(ctx.group, not ctx.back, grads)

    @staticmethod
    def exchange(group: Group | None, back: bool, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ranks, dim = dist.get_world_size(group), 1 if back else 2
        parts = [x.unflatten(dim, (ranks, -1)).movedim(dim, 0).contiguous() for x in tensors]
        received = [torch.empty_like(x) for x in parts]
        launch = partial(dist.all_to_all_single, group=group, async_op=True)
        for transfer in [launch(new, old) for new, old in zip(received, parts)]:
            transfer.wait()
        return tuple(x.movedim(0, 3 - dim).flatten(3 - dim, 4 - dim) for x in received)


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group | None = None,
    attention: AttentionFn = attention_with_lse, causal: bool = True, scale: float | None = None,
    window: int | None = None, cu_seqlens: Tensor | Sequence[int] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """DeepSpeed-Ulysses (arXiv:2309.14509): exchange contiguous shards of the sequence for shards
    of the heads, attend, and exchange back. Two all-to-alls of (1 - 1 / ranks) of the local
    activations, and unchanged attention; but ranks must divide Hq. With more ranks than key heads,
    key heads are repeated. ValueError otherwise.

    2D (USP, arXiv:2405.07719; LoongTrain, arXiv:2406.18485), with U ranks here and R on a ring:

        ulysses_attention(..., group=inner, attention=partial(ring_attention, group=outer,
                                                              return_lse=True))

    Rank u of the inner and r of the outer group holds cp_positions(T, R, r, placement).chunk(U)[u].
    cu_seqlens requires an attention over the full sequence; in 2D, pass it to the ring.
    """
    q, k, v = _cp_inputs(q, k, v, window)
    ranks, Hq, Hkv = dist.get_world_size(group), q.shape[2], k.shape[2]
    _check(Hq % ranks == 0, f"{Hq} query heads cannot be split over {ranks} ranks: use a divisor, "
           "and a ring for the remaining ranks")  # fmt: skip
    ok = Hkv % ranks == 0 or ranks % Hkv == 0
    _check(ok, f"{Hkv} key heads and {ranks} ranks: one must be a multiple of the other")
    if Hkv % ranks:
        k, v = (x.repeat_interleave(ranks // Hkv, dim=2) for x in (k, v))
    q, k, v = _SeqAllToAll.apply(group, False, q, k, v)
    cu = _check_cu_seqlens(cu_seqlens, q.shape[1]) or (0, q.shape[1])
    lengths = [b - a for a, b in pairwise(cu)]
    outs = [
        attention(*document, causal=causal, window=window, scale=scale)
        for document in zip(*(x.split(lengths, dim=1) for x in (q, k, v)))
        if document[0].shape[1]
    ]
    o, lse = (torch.cat(parts, dim) for parts, dim in zip(zip(*outs), (1, 2)))
    if not return_lse:
        return _SeqAllToAll.apply(group, True, o)[0]
    o, lse = _SeqAllToAll.apply(group, True, o, lse.transpose(1, 2)[..., None])
    return o, lse[..., 0].transpose(1, 2)


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def main() -> None:
    """Gradients == attention over the full sequence; milliseconds of each variant."""
    if "RANK" not in os.environ:
        sys.exit("run: torchrun --standalone --nproc-per-node 2 parallelism/context_parallel.py")
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    gpu = torch.cuda.is_available()
    torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu")
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    forms = {p: (partial(ring_attention, placement=p), p)
             for p in ("contiguous", "striped", "zigzag")}  # fmt: skip
    forms |= {"all-gather": (all_gather_attention, "zigzag")}
    forms |= {"Ulysses": (ulysses_attention, "contiguous")}
    step = lambda form, inputs: torch.autograd.grad(form(*inputs).square().sum(), inputs)
    torch.manual_seed(0)
    T, H, Hkv = 32 * ranks, 2 * ranks, ranks
    whole = [torch.randn(2, T, h, 16, dtype=torch.double).requires_grad_() for h in (H, Hkv, Hkv)]
    expected = step(lambda *x: attention_with_lse(*x)[0], whole)
    for form, placement in forms.values():
        at = cp_positions(T, ranks, rank, placement)
        got = step(form, [x.detach()[:, at].requires_grad_() for x in whole])
        torch.testing.assert_close(got, tuple(x[:, at] for x in expected))
    T, D = (8192, 128) if gpu else (1024, 64)
    local = [torch.randn(1, T // ranks, h, D).requires_grad_() for h in (H, Hkv, Hkv)]
    for name, (form, placement) in forms.items():
        # the same number of runs on all ranks
        timer = Timer("step(form, x)", globals=dict(step=step, form=form, x=local))
        ms, pairs = 1e3 * timer.timeit(5).mean, pairs_per_rank(T, ranks, placement)
        if rank == 0:
            print(f"T {T}, {ranks} ranks, forward + backward, {name}: {ms:.1f} ms, "
                  f"max / mean work {max(pairs) * ranks / sum(pairs):.2f}")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
