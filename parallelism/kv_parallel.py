"""KV parallelism: attention to a KV cache of which each rank has any part.

The KV cache of a long text can be larger than the memory of a GPU that holds the whole model. Here
every rank has the whole model and some of the tokens' keys: a text N times as long fits on N ranks.

    prefill  The prompt's tokens are sharded (zigzag), and keys stay on the rank that computed them
             (LoongServe, arXiv:2404.09526). Keys travel around a ring, or queries to all ranks,
             which are fewer bytes once most keys are cached (arXiv:2411.01783).
    decode   Queries travel. Each rank attends to its own part, and partial outputs are merged by
             their log-sum-exp (KV parallelism of Mnemosyne, arXiv:2409.17264; DistAttention of
             Infinite-LLM, arXiv:2401.02669). If the rows are a multiple of the ranks, each rank
             runs the model on its share of them, else all ranks run all rows.
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

Cost: per layer of a decode step one all-gather of outputs, or for sharded rows one of queries and
one all-to-all of outputs, for any context (sharded_attention.bytes_sent). When it loses: short
contexts, whose keys are read in less time than a collective takes, and one row, as every rank reads
all weights. Hooks: `attend`, and a wrapper of the model; generate.py --cp. Equivalence
(test_all.py): logits and keys of one process up to summation order, whatever joins or leaves; bytes
sent == the formulas. Needs: sharded_attention.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("run: torchrun --nproc-per-node 2 generate.py --cp 2")

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallelism.sharded_attention import (
    KV, Group, add_sinks, exchange_outputs, gather, keys_and_values, partial_attention,
    sharded_attention,
)  # fmt: skip


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


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
