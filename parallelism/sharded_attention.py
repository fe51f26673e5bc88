"""Attention to keys of which each rank has any part.

A text too long for one rank's memory has its KV cache on several: any tokens on any rank, in any
number. Each rank's queries need all of them. Attention to a part of the keys gives a partial output
and the log-sum-exp of its scores, and partial outputs are merged exactly (online softmax,
arXiv:1805.02867). So either travels (arXiv:2411.01783):

    pass-kv  the keys, around a ring, each rank's past every rank's queries
    pass-q   the queries, gathered by all ranks; partial outputs return in one all-to-all

Ring attention (context_parallel.py), for training, is pass-kv with shards of equal size and no
cached keys. Here masks follow from positions: `at_q` and `at_k` are the positions of each rank's
queries and keys, known to all ranks. Windows, softcap, ALiBi and sinks are supported, and latents
(MLA), which are sent as they are cached and expanded on arrival.

Cost: pass-kv sends the cached keys of all ranks through every rank, pass-q the queries and outputs;
should_pass_kv chooses, bytes_sent is the formula. When it loses: few keys, whose scores take less
time than a transfer. Hook: used behind an `attend` callable (kv_parallel.py). Equivalence
(test_all.py): attention of one process in outputs and lse. Inference alone: no gradients. Needs:
torch. A check and a table: `torchrun --standalone --nproc-per-node 2
parallelism/sharded_attention.py`.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Group = dist.ProcessGroup | None  # None: all ranks
KV = Sequence[Tensor]  # k (B, S, Hkv, D) and v (B, S, Hkv, Dv), or latents (B, S, 1, R) alone

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
QUERY_BLOCK = 256  # queries whose scores are in memory at a time


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --------------------------------------------------------------------------------------------------
# Attention to a part of the keys
# --------------------------------------------------------------------------------------------------


def partial_attention(
    spec: Any, q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention of q (B, T, Hq, D) at positions i (T,) to k (B, S, Hkv, D), v (B, S, Hkv, Dv) at
    rising positions j (S,), causal: o (B, T, Hq, Dv) and lse (B, Hq, T) in fp32, or fp64 for fp64
    inputs; 0 and -inf for a query that sees no key. i and j are on the CPU. add_sinks adds the
    sinks, once, after partial outputs are merged."""
    outs = []
    for block, at in zip(q.split(QUERY_BLOCK, dim=1), i.split(QUERY_BLOCK)):
        low, high = (int(at.min()), int(at.max())) if len(at) else (0, -1)
        first = 0 if spec.window is None else int(torch.searchsorted(j, low - spec.window + 1))
        last = int(torch.searchsorted(j, high, right=True))
        if first >= last:
            outs.append(_empty_attention(block, v))
            continue
        bias = _score_bias(spec, block, at, j[first:last])
        o, lse = _attention(spec, block, k[:, first:last], v[:, first:last], bias)
        if bias is not None:
            empty = (bias[0] == -math.inf).all(-1)  # queries (T,) that see no key, now NaN
            o, lse = o.masked_fill(empty[:, None, None], 0), lse.masked_fill(empty, -math.inf)
        outs.append((o, lse))
    o, lse = zip(*outs)
    return torch.cat(o, 1), torch.cat(lse, 2)


def _score_bias(spec: Any, q: Tensor, i: Tensor, j: Tensor) -> Tensor | None:
    """ALiBi's bias, and -inf for masked keys: (1 or Hq, T, S) in fp32 or fp64, or None if neither
    is needed."""
    slopes = spec.alibi_slopes
    masked = j[-1] > i.min() or (spec.window is not None and i.max() - j[0] >= spec.window)
    if not masked and slopes is None:
        return None
    i, j = i.to(q.device), j.to(q.device)
    distance = i[:, None] - j
    mask = distance >= 0
    if spec.window is not None:
        mask = mask & (distance < spec.window)
    bias = distance[None].to(torch.promote_types(q.dtype, torch.float32))
    bias = bias * (0.0 if slopes is None else -slopes[:, None, None])
    return bias.masked_fill(~mask, -math.inf)


def _attention(
    spec: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T scale + bias) v and its log-sum-exp, by SDPA's kernel for CPUs, whose public
    form does not return the log-sum-exp, or with all scores in memory."""
    (B, T, Hq, D), Hkv, Dv = q.shape, k.shape[2], v.shape[3]
    if T == 1:  # the heads of a group as queries, to read each key once
        fold = lambda x: x.reshape(B, Hkv, -1, x.shape[-1])
        bias = None if bias is None else fold(bias.expand(B, Hq, 1, -1))
    else:
        fold = lambda x: x
    q, k, v = fold(q.transpose(1, 2)), k.transpose(1, 2), v.transpose(1, 2)
    has_kernel = q.device.type == "cpu" and q.dtype != torch.float64 and Dv <= D
    if has_kernel and spec.softcap is None:
        bias = None if bias is None else bias.to(q.dtype).expand(B, -1, -1, -1)
        v = v if Dv == D else F.pad(v, (0, D - Dv))  # the kernel has one head dim
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=bias, scale=spec.scale
        )
        o, lse = o[..., :Dv].float(), lse.float()
    else:
        dtype = torch.promote_types(q.dtype, torch.float32)
        k, v = (x.to(dtype).repeat_interleave(q.shape[1] // Hkv, dim=1) for x in (k, v))
        s = q.to(dtype) @ k.mT * spec.scale
        s = s if spec.softcap is None else spec.softcap * torch.tanh(s / spec.softcap)
        s = s if bias is None else s + bias
        lse = s.logsumexp(-1)
        o = (s - lse[..., None]).exp() @ v
    return o.reshape(B, Hq, T, Dv).transpose(1, 2), lse.reshape(B, Hq, T)


def _empty_attention(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    B, T, Hq, _ = q.shape
    o = q.new_zeros(B, T, Hq, v.shape[3], dtype=torch.promote_types(q.dtype, torch.float32))
    return o, o.new_full((B, Hq, T), -math.inf)


def merge(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to the union of P disjoint sets of keys, from o (P, B, T, Hq, Dv) and lse (P, B,
    Hq, T): lse = log sum_p exp lse_p, o = sum_p exp(lse_p - lse) o_p (arXiv:1805.02867)."""
    total = lse.logsumexp(0)
    weight = torch.where(total == -math.inf, 0, (lse - total).exp())
    return (weight.transpose(-1, -2)[..., None] * o).sum(0), total


def add_sinks(o: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """o after one more logit per query head, sinks (Hq,), in the softmax, which has no value."""
    return o * torch.sigmoid(lse - sinks[:, None]).transpose(1, 2)[..., None].to(o.dtype)


# --------------------------------------------------------------------------------------------------
# Sharded queries and sharded keys
# --------------------------------------------------------------------------------------------------


def should_pass_kv(
    new: int, cached: int, Hq: int, Hkv: float, *, ranks: int = 1, flops: float | None = None,
    bandwidth: float | None = None, element_size: int = 2,
) -> bool:  # fmt: skip
    """Whether to pass KV rather than Q (arXiv:2411.01783, Algorithm 1): if KV is smaller,

        new / (new + cached) >= 2 Hkv / Hq

    or, given a rank's flops/s and a link's bandwidth (bytes/s), if attention hides the transfer
    anyway: 4 new (new + cached) / ranks^2 flops per query head and dim in a ring step, against
    2 (new + cached) / ranks elements of K and V per key head and dim, gives

        new >= ranks flops Hkv element_size / (2 Hq bandwidth).

    A tie goes to KV, which needs no all-to-all of outputs."""
    if new * Hq >= 2 * Hkv * (new + cached):
        return True
    if flops is None or bandwidth is None:
        return False
    return new >= ranks * flops * Hkv * element_size / (2 * Hq * bandwidth)


def sharded_attention(
    spec: Any, q: Tensor, at_q: Sequence[Tensor], kv: KV, at_k: Sequence[Tensor],
    group: Group = None, mode: str = "auto",
    received: Callable[[int, KV], None] = lambda source, kv: None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of this rank's q to the keys of all ranks: o and lse as in partial_attention. Ranks
    can have any number of queries and of keys, also none (arXiv:2411.01783).

    at_q, at_k: each rank's positions; those of keys rise. mode: "pass-kv" sends keys around the
    ring; "pass-q" gathers q, and returns the partial outputs in one all-to-all; "auto" decides by
    should_pass_kv. received(source, kv): called with the keys of each other rank as they pass by.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    _check(mode in ("auto", "pass-kv", "pass-q"),
           f"mode must be auto, pass-kv or pass-q, not {mode}")  # fmt: skip
    for x, at in ((q, at_q), (kv[0], at_k)):
        ok = len(at) == ranks and len(at[rank]) == x.shape[1]
        _check(ok, f"positions of {[*map(len, at)]} tokens: rank {rank} of {ranks} has "
               f"{x.shape[1]}")  # fmt: skip
    grads = torch.is_grad_enabled() and any(x.requires_grad for x in (q, *kv))
    _check(not grads, "sharded_attention has no backward: run it under torch.no_grad()")
    if mode == "auto":
        new, total = (sum(map(len, at)) for at in (at_q, at_k))
        elements = sum(x.shape[2:].numel() for x in kv)  # of a token; 2 Hkv D without latents
        small = should_pass_kv(new, total - new, q.shape[2], elements / 2 / q.shape[3])
        mode = "pass-kv" if small else "pass-q"
    if mode == "pass-kv":
        return _pass_kv(spec, q, at_q, kv, at_k, group, received)
    return _pass_q(spec, q, at_q, kv, at_k[rank], group)


def keys_and_values(spec: Any, kv: KV) -> KV:
    """k and v, also from latents (spec.expand or spec.latent_dim, see model.AttentionSpec)."""
    if spec.expand is not None:
        latent = kv[0] if kv[0].shape[1] else F.pad(kv[0], (0, 0, 0, 0, 0, 1))
        return [x[:, : kv[0].shape[1]] for x in spec.expand(latent)]
    return kv if spec.latent_dim is None else (kv[0], kv[0][..., : spec.latent_dim])


def _pass_kv(
    spec: Any, q: Tensor, at_q: Sequence[Tensor], kv: KV, at_k: Sequence[Tensor], group: Group,
    received: Callable[[int, KV], None],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    out = None
    for step in range(ranks):
        source = (rank - step) % ranks
        if has_next := step + 1 < ranks:
            n = len(at_k[(source - 1) % ranks])
            wait = _ring_send_recv(kv, [x.new_empty(len(x), n, *x.shape[2:]) for x in kv], group)
        if step:
            received(source, kv)
        more = partial_attention(spec, q, *keys_and_values(spec, kv), at_q[rank], at_k[source])
        out = more if out is None else merge(*(torch.stack(pair) for pair in zip(out, more)))
        kv = wait() if has_next else kv
    return out


def _pass_q(
    spec: Any, q: Tensor, at_q: Sequence[Tensor], kv: KV, own_at_k: Tensor, group: Group
) -> tuple[Tensor, Tensor]:
    n = max(map(len, at_q))
    queries = gather(F.pad(q, (0, 0, 0, 0, 0, n - q.shape[1])), group).transpose(0, 1).flatten(1, 2)
    i = torch.cat([F.pad(at, (0, n - len(at))) for at in at_q])
    out = partial_attention(spec, queries, *keys_and_values(spec, kv), i, own_at_k)
    o, lse = exchange_outputs(*out, group, 1)
    return o[:, : q.shape[1]], lse[:, :, : q.shape[1]]


def _ring_send_recv(tensors: KV, like: list[Tensor], group: Group) -> Callable[[], list[Tensor]]:
    """Start sending tensors to the next rank and receiving from the previous one into `like`;
    returns a function that waits for them."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sent = [t.contiguous() for t in tensors]
    ops = []
    for out, into in zip(sent, like):
        ops.append(dist.P2POp(dist.isend, out, group=group, group_peer=(rank + 1) % ranks))
        ops.append(dist.P2POp(dist.irecv, into, group=group, group_peer=(rank - 1) % ranks))
    works = dist.batch_isend_irecv(ops)

    def wait(sent: list[Tensor] = sent) -> list[Tensor]:  # keeps `sent` alive until then
        for work in works:
            work.wait()
        return like

    return wait


def gather(x: Tensor, group: Group) -> Tensor:
    """All ranks' tensors of one shape, (ranks, *x.shape)."""
    out = x.new_empty(dist.get_world_size(group), *x.shape)
    all_gather(out.flatten(0, 1), x.contiguous(), group=group)  # gloo requires concatenation
    return out


def exchange_outputs(
    o: Tensor, lse: Tensor, group: Group, dim: int | None = None
) -> tuple[Tensor, Tensor]:
    """Merge all ranks' partial outputs. dim: the dimension of gathered queries, (ranks, own); each
    rank gets the outputs of its own. None: all ranks have the same queries and get all outputs."""
    parts = torch.cat((o, lse.transpose(1, 2)[..., None]), -1)
    if dim is None:
        received = gather(parts, group)
    else:
        parts = parts.unflatten(dim, (dist.get_world_size(group), -1)).movedim(dim, 0).contiguous()
        dist.all_to_all_single(received := torch.empty_like(parts), parts, group=group)
    return merge(received[..., :-1], received[..., -1].transpose(2, 3))


def bytes_sent(
    mode: str, ranks: int, Hq: int, kv: int, D: int, Dv: int, B: int = 1, T: int = 1, S: int = 0,
    itemsize: int = 2, output_itemsize: int = 4,
) -> float:  # fmt: skip
    """Bytes that a rank sends in a layer. kv: elements of a token's keys and values, Hkv (D + Dv).
    pass-kv, pass-q: T sharded queries over S sharded keys; rows, replicated: B rows of decode."""
    query, o = Hq * D * itemsize, Hq * (Dv + 1) * output_itemsize  # outputs and lse are fp32
    return (ranks - 1) * {
        "pass-kv": B * S / ranks * kv * itemsize,
        "pass-q": B * T / ranks * (query + o),
        "rows": B / ranks * (query + kv * itemsize + o),
        "replicated": B * T * o,
    }[mode]


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def main() -> None:
    """Sharded attention == attention of one process; milliseconds of a decode step's attention."""
    from types import SimpleNamespace

    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    if "RANK" not in os.environ:
        sys.exit("run: torchrun --standalone --nproc-per-node 2 parallelism/sharded_attention.py")
    gpu = torch.cuda.is_available()
    torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu")
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    none = dict.fromkeys("window softcap alibi_slopes sinks latent latent_dim expand".split())
    spec, at = SimpleNamespace(scale=0.125, **none), torch.arange(65536, device="cpu")
    torch.manual_seed(0)
    for S in (1024, 8192, 65536):
        kv, q = torch.randn(2, 1, S, 2, 64), torch.randn(1, ranks, 8, 64)
        keys, queries = at[:S].chunk(ranks), at[S - ranks : S].chunk(ranks)
        part = [x.chunk(ranks, 1)[rank] for x in kv]
        one = partial(partial_attention, spec, q, *kv, at[S - ranks : S], at[:S])
        every = partial(sharded_attention, spec, q[:, rank, None], queries, part, keys)
        want = one()[0][:, rank, None]
        for mode in ("pass-kv", "pass-q"):
            torch.testing.assert_close(every(mode=mode)[0], want, rtol=1e-3, atol=1e-4)
        # the same number of runs on all ranks
        ms = [1e3 * Timer("f()", globals=dict(f=f)).timeit(20).median for f in (one, every)]
        kb = bytes_sent("pass-q", ranks, 8, 256, 64, 64, T=ranks, itemsize=4) / 1e3
        if rank == 0:
            print(f"{S} keys, {ranks} queries: one rank {ms[0]:.2f} ms; {ranks} ranks {ms[1]:.2f}, "
                  f"each has {S * 1024 / ranks / 1e6:.1f} MB and sends {kb:.1f} KB")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
