"""Context parallelism for decoding: attention to a KV cache of which each rank has any part.

The KV cache of a long text can be larger than the memory of a GPU that holds the whole model. Here
every rank has the whole model and some of the tokens' keys: a text N times as long fits on N ranks.
Attention to a part of the keys gives a partial output and the log-sum-exp of its scores, and
partial outputs are merged exactly (online softmax, arXiv:1805.02867), so that either can travel:

    prefill  The prompt's tokens are sharded (zigzag), and keys stay on the rank that computed them
             (LoongServe, arXiv:2404.09526). pass-kv: keys travel around a ring, past every rank's
             queries. pass-q: all ranks gather the queries, and partial outputs return in one
             all-to-all. That is fewer bytes once most keys are cached (arXiv:2411.01783).
    decode   Queries travel. Each rank attends to its own part (KV parallelism of Mnemosyne,
             arXiv:2409.17264; DistAttention of Infinite-LLM, arXiv:2401.02669; decode context
             parallelism of vLLM). If the rows are a multiple of the ranks, each rank runs the model
             on its share of them, else all ranks run all rows.
    scaling  One rank, the master, stores a new token's keys. Each block has the master with the
             most free slots, so a rank that joins (`grow`), empty, is the next one: no keys move.
             If fewer ranks store a prompt than compute it (`shrink`), they store the other ranks'
             keys while these pass by on the ring (LoongServe, 4.1).
    lending  Requests with different home ranks can share a Ledger of the blocks that each rank
             lends to which other (Infinite-LLM's gManager).

    cache = KVParallelCache(KVCache(config, rows, slots_per_rank(max_len, ranks)), group)
    model = KVParallelModel(model, cache)
    hidden = model(prompt, torch.arange(T), cache.attend, return_hidden=True)    # of the last token
    logits = model(token, torch.tensor([T]), cache.attend)

Masks follow from the positions of each rank's queries and keys, which all ranks know. Windows,
softcap, ALiBi and sinks are supported, and latents (MLA), sent as they are cached.

Cost: per layer of a decode step one all-gather of outputs, or for sharded rows one of queries and
one all-to-all of outputs, for any context (bytes_sent). When it loses: short contexts, whose keys
are read in less time than a collective takes, and one row, as every rank reads all weights. Hooks:
`attend`, and a wrapper of the model; generate.py --cp. Inference alone: context_parallel.py is for
training, with gradients and shards of equal size. Equivalence (test_all.py): logits and keys of one
process up to summation order, whatever joins or leaves; bytes sent == the formulas. Needs: torch.
A check and a table: `torchrun --standalone --nproc-per-node 2
parallelism/context_parallel_decode.py`.
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

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
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if T == 1:  # the heads of a group as queries, to read each key once
        q = q.reshape(B, Hkv, -1, D)
        bias = None if bias is None else bias.expand(B, Hq, 1, -1).reshape(B, Hkv, Hq // Hkv, -1)
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
# The ledger of blocks
# --------------------------------------------------------------------------------------------------


class Ledger:
    """How many blocks each instance lends to each other one (Infinite-LLM's gManager, 5). An
    instance uses its own blocks first and borrows the rest where most are free. Keys never move:
    the lender computes partial attention for the queries that the borrower sends."""

    def __init__(self, capacity: Sequence[int]):
        """capacity: blocks of each instance."""
        self.capacity = dict(enumerate(capacity))
        self.blocks = Counter()  # in use, by (borrower, lender): an instance's own by (i, i)

    def free(self, lender: int) -> int:
        """Blocks of an instance that are not in use."""
        _check(lender in self.capacity, f"instance {lender} is none of {[*self.capacity]}")
        used = sum(n for (_, owner), n in self.blocks.items() if owner == lender)
        return self.capacity[lender] - used

    def balance(self, instance: int) -> int:
        """Blocks that it lends, less those that it borrows. The sum over all instances is 0."""
        return sum(
            n * ((lender == instance) - (borrower == instance))
            for (borrower, lender), n in self.blocks.items()
        )

    def borrow(self, borrower: int, n: int, lender: int | None = None) -> dict[int, int]:
        """Take n blocks, of one lender if given: {lender: blocks}. ValueError if fewer are free."""
        _check(n >= 0 and borrower in self.capacity, f"instance {borrower} asks for {n} blocks")
        lenders, taken, missing = [lender], {}, n
        if lender is None:
            lenders = sorted(self.capacity, key=lambda i: (i != borrower, -self.free(i), i))
        for i in lenders:
            if share := min(self.free(i), missing):
                taken[i], missing = share, missing - share
        _check(not missing, f"instance {borrower} asks for {n} blocks: {n - missing} are free")
        self.blocks.update({(borrower, i): share for i, share in taken.items()})
        return taken

    def give_back(self, borrower: int, lender: int, n: int) -> None:
        """Return n blocks. ValueError if it has fewer. With a dead instance, none are left."""
        if not {borrower, lender} <= self.capacity.keys():
            return
        has = self.blocks[borrower, lender]
        _check(0 <= n <= has, f"instance {borrower} has {has} blocks of {lender}, not {n}")
        self.blocks[borrower, lender] -= n
        self.blocks += Counter()  # drops zeros

    def died(self, instance: int) -> dict[int, int]:
        """Remove an instance; what it borrowed is free, and a second call changes nothing. Returns
        {borrower: blocks} that others lose: they must compute these tokens again."""
        lost = {b: n for (b, lender), n in self.blocks.items() if lender == instance != b}
        self.blocks = Counter({k: n for k, n in self.blocks.items() if instance not in k})
        self.capacity.pop(instance, None)
        return lost


# --------------------------------------------------------------------------------------------------
# The cache
# --------------------------------------------------------------------------------------------------


def slots_per_rank(max_len: int, ranks: int, block_size: int = 16) -> int:
    """Slots of a rank's cache for max_len tokens on all ranks: its share, and the last block."""
    return (math.ceil(max_len / (ranks * block_size)) + 1) * block_size


class Call(NamedTuple):
    """Where one forward pass of the model computes and stores its new tokens."""

    layout: str  # "tokens" or "rows": each rank runs its own; "replicated": all run all
    queries: list[Tensor]  # positions of each rank's tokens
    before: list[Tensor]  # positions of each rank's cached keys, before the call
    first: int  # position of the first new token
    owner: Tensor  # (T,): the rank that stores the keys of each new token


class KVParallelCache:
    """A KV cache whose tokens are anywhere on the ranks of a group; all ranks make the same calls.

    cache: this rank's part, such as a model.KVCache: lists k and v of tensors (B, Hkv, slots, D),
    one per layer, v empty for latents, and bytes_read(slots). members: the ranks that store new
    tokens, by default all. home: the rank whose request it is, the borrower in the ledger. ledger:
    free blocks of the ranks, if several requests share them; by default this cache's slots."""

    def __init__(
        self, cache: Any, group: Group = None, members: Sequence[int] | None = None,
        block_size: int = 16, home: int = 0, ledger: Ledger | None = None,
    ):  # fmt: skip
        self.cache, self.group, self.block_size, self.home = cache, group, block_size, home
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.slots = cache.k[0].shape[2] // block_size * block_size
        self.members: list[int] = []
        for rank in range(self.ranks) if members is None else members:
            self.grow(rank)
        _check(home in range(self.ranks), f"home must be below {self.ranks}, not {home}")
        _check(self.members != [], "members must be one rank or more")
        self.ledger = ledger or Ledger([self.slots // block_size] * self.ranks)
        self.positions = torch.zeros(self.ranks, self.slots, dtype=torch.long)  # by rank and slot
        self.counts, self.length = [0] * self.ranks, 0  # tokens of each rank, of all
        self.master, self.call = home, None

    def grow(self, rank: int) -> None:
        """Let a rank store new tokens; empty, it is the next master."""
        _check(0 <= rank < self.ranks, f"rank must be from 0 to {self.ranks - 1}, not {rank}")
        self.members = sorted({*self.members, rank})

    def shrink(self, rank: int) -> None:
        """Let a rank store no further tokens. It keeps those that it has, and computes its part of
        a prompt, whose keys the members store."""
        _check(rank in self.members, f"rank {rank} is none of the members {self.members}")
        _check(self.members != [rank], "the last member cannot leave: its keys would be nowhere")
        self.members = [member for member in self.members if member != rank]

    def truncate(self, n: int) -> None:
        """Drop the tokens at positions >= n."""
        counts = [int(torch.searchsorted(p[:c], n)) for p, c in zip(self.positions, self.counts)]
        self.length = min(self.length, n)
        self._set_counts(counts)

    def positions_of(self, rank: int) -> Tensor:
        """Positions of a rank's tokens in the order of its slots: they rise."""
        return self.positions[rank, : self.counts[rank]]

    def bytes_read(self, limit: int | None = None) -> int:
        """Bytes of this rank's part that a decode step reads."""
        return self.cache.bytes_read(self.counts[self.rank])

    # ---- placement of new tokens ----

    def begin(self, B: int, T: int, first: int) -> Call:
        """Place T new tokens of B rows at positions from `first` on; later ones are dropped. Tokens
        of a long prompt are sharded over all ranks and stored where they are computed."""
        _check(first <= self.length, f"position {first}: only {self.length} tokens are cached")
        if first < self.length:
            self.truncate(first)
        new, before = torch.arange(first, first + T), [*map(self.positions_of, range(self.ranks))]
        if B == 1 and T >= 2 * self.ranks:
            queries = self._shard(new)
            call = Call("tokens", queries, before, first, self._owners(queries))
        else:
            layout = "rows" if T == 1 and B % self.ranks == 0 else "replicated"
            call = Call(layout, [new] * self.ranks, before, first, self._next_masters(T))
        stored = [new[call.owner == rank] for rank in range(self.ranks)]
        for rank, (own, room) in enumerate(zip(stored, self._room())):
            _check(len(own) <= room, f"rank {rank} has room for {room} tokens, not {len(own)}: let "
                   "another rank join, or give more slots")  # fmt: skip
        for own, n, row in zip(stored, self.counts, self.positions):
            row[n : n + len(own)] = own
        self._set_counts([n + len(own) for n, own in zip(self.counts, stored)])
        self.length, self.call = first + T, call
        return call

    def _shard(self, new: Tensor) -> list[Tensor]:
        """Each rank's part of new positions: of 2 * ranks chunks an early and a late one (zigzag),
        so that all compute as many scores; ranks with fewer tokens get the larger parts."""
        n = self.ranks
        chunks = new.tensor_split(2 * n)
        pairs = [torch.cat((chunks[r], chunks[2 * n - 1 - r])) for r in range(n)]
        order = sorted(range(n), key=self.counts.__getitem__)
        parts = dict(zip(order, sorted(pairs, key=len, reverse=True)))
        return [parts[r] for r in range(n)]

    def _owners(self, queries: list[Tensor]) -> Tensor:
        """The rank that stores each token (T,): members those that they compute, and an equal share
        of those that other ranks compute."""
        others = [at for r, at in enumerate(queries) if r not in self.members]
        stored = [(r, queries[r]) for r in self.members]
        if others:
            stored += zip(self.members, torch.cat(others).tensor_split(len(self.members)))
        at = torch.cat([at for _, at in stored])
        return torch.tensor([r for r, own in stored for _ in own])[at.argsort()]

    def _next_masters(self, T: int) -> Tensor:
        """The rank that stores each of T tokens (T,): one with the most free slots, until its block
        is full."""
        counts, room, masters = self.counts.copy(), self._room(), []
        for _ in range(T):
            if counts[self.master] % self.block_size == 0 or self.master not in self.members:
                self.master = max(self.members, key=lambda r: (room[r], r == self.home))
            counts[self.master] += 1
            room[self.master] -= 1
            masters.append(self.master)
        return torch.tensor(masters)

    def _room(self) -> list[int]:
        """Tokens that each rank can store: in its last block, in free ones, and in its slots."""
        size = self.block_size
        free = [self.ledger.free(rank) * size for rank in range(self.ranks)]
        return [min(more + -n % size, self.slots - n) for more, n in zip(free, self.counts)]

    def _set_counts(self, counts: list[int]) -> None:
        """Set each rank's number of tokens; the ledger borrows or gives back whole blocks."""
        for rank, (old, new) in enumerate(zip(self.counts, counts)):
            blocks = math.ceil(new / self.block_size) - math.ceil(old / self.block_size)
            if blocks > 0:
                self.ledger.borrow(self.home, blocks, rank)
            else:
                self.ledger.give_back(self.home, rank, -blocks)
        self.counts = counts

    # ---- the attend hook ----

    def attend(self, spec: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """The attend hook, for the tokens that KVParallelModel has placed with `begin`."""
        call, rank, dtype = self.call, self.rank, q.dtype
        new = [k, v] if spec.latent_dim is None else [k]  # what a cache stores
        new = new if spec.latent is None else [spec.latent]
        if call.layout == "rows":
            q, *new = self._gather_rows(q, *new)
        self._store(spec.index, call.queries[rank], new)
        if call.layout == "tokens":
            o, lse = self._sharded(spec, q, new)
        else:
            kv = self._read(spec.index, len(q), self.counts[rank], dtype)
            keys = keys_and_values(spec, kv)
            o, lse = partial_attention(spec, q, *keys, call.queries[rank], self.positions_of(rank))
            o, lse = exchange_outputs(o, lse, self.group, 0 if call.layout == "rows" else None)
        o = o if spec.sinks is None else add_sinks(o, lse, spec.sinks)
        return o.to(dtype)

    def _sharded(self, spec: Any, q: Tensor, new: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Attention of a prompt's sharded tokens. If not all ranks are members, what travels is the
        cached keys and all new ones, of which members store their share."""
        call, index = self.call, spec.index
        if len(self.members) == self.ranks:
            kv = self._read(index, len(q), self.counts[self.rank], q.dtype)
            at = [*map(self.positions_of, range(self.ranks))]
            return sharded_attention(spec, q, call.queries, kv, at, self.group)
        old = self._read(index, len(q), len(call.before[self.rank]), q.dtype)
        kv = [torch.cat(pair, 1) for pair in zip(old, new)]
        at = [torch.cat(pair) for pair in zip(call.before, call.queries)]

        def received(rank: int, kv: KV) -> None:
            n = len(call.before[rank])
            self._store(index, call.queries[rank], [x[:, n:] for x in kv])

        return sharded_attention(spec, q, call.queries, kv, at, self.group, "pass-kv", received)

    def _gather_rows(self, *tensors: Tensor) -> list[Tensor]:
        """Tensors (B / ranks, 1, H, D) of each rank's rows -> (B, 1, H, D), in one all-gather."""
        x = gather(torch.cat([t.flatten(2) for t in tensors], -1), self.group).flatten(0, 1)
        parts = x.split([t[0, 0].numel() for t in tensors], -1)
        return [part.unflatten(2, t.shape[2:]) for part, t in zip(parts, tensors)]

    def _tensors(self, index: int) -> list[Tensor]:
        """A layer's keys and values, or latents alone."""
        return [t[index] for t in (self.cache.k, self.cache.v) if t]

    def _store(self, index: int, at: Tensor, new: Sequence[Tensor]) -> None:
        """Store those of the tokens at positions `at` that are this rank's to store."""
        own = (self.call.owner[at - self.call.first] == self.rank).nonzero()[:, 0]
        slots = torch.searchsorted(self.positions_of(self.rank), at[own])
        for t, x in zip(self._tensors(index), new):
            t[:, :, slots] = x[:, own].transpose(1, 2).to(t.dtype)

    def _read(self, index: int, rows: int, n: int, dtype: torch.dtype) -> list[Tensor]:
        return [t[:rows, :, :n].to(dtype).transpose(1, 2) for t in self._tensors(index)]


class KVParallelModel:
    """A model that all ranks of a KVParallelCache call with all tokens: each runs its part of a
    prompt's tokens, or of a decode step's rows."""

    def __init__(self, model: Any, cache: KVParallelCache):
        """ValueError if the model's keys depend on tokens that other ranks have."""
        self.model, self.cache, self.config, self.head = model, cache, model.config, model.head
        option = getattr(model.config, "contiguous_only", "")
        _check(not option, f"the KV cache of a model with {option} cannot be sharded")
        rope = getattr(model.config, "rope_scaling", None) or {}
        _check(rope.get("rope_type") != "dynamic",
               "with rope_type dynamic a rank's keys depend on tokens of other ranks")  # fmt: skip

    def __call__(
        self, tokens: Tensor, positions: Tensor, attend: Any, return_hidden: bool = False
    ) -> Tensor:
        """tokens (B, T), positions (T,), consecutive -> logits, or hidden states before the head,
        on every rank: (B, T, ...), but of a sharded prompt's last token alone, (1, 1, ...)."""
        cache = self.cache
        call = cache.begin(*tokens.shape, int(positions[0]))
        if call.layout == "tokens":
            own = (call.queries[cache.rank] - call.first).to(tokens.device)
            tokens, positions = tokens[:, own], positions[own]
        elif call.layout == "rows":
            tokens = tokens.chunk(cache.ranks)[cache.rank]
        x = self.model(tokens, positions, attend, return_hidden=True)
        if call.layout == "tokens":
            source = max(range(cache.ranks), key=lambda rank: call.queries[rank][-1])
            dist.broadcast(x := x[:, -1:].contiguous(), group=cache.group, group_src=source)
        elif call.layout == "rows":
            x = gather(x, cache.group).flatten(0, 1)
        return x if return_hidden else self.head(x)


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def main() -> None:
    """Sharded attention == attention of one process; milliseconds of a decode step's attention."""
    from types import SimpleNamespace

    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    if "RANK" not in os.environ:
        command = "torchrun --standalone --nproc-per-node 2 parallelism/context_parallel_decode.py"
        sys.exit(f"run: {command}")
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
