"""A paged KV cache, and the engine that serves many requests from it.

Generating text reads all weights for every token. A batch reads them once for all its sequences, so
throughput is a matter of keeping the batch full, and what empties it is memory: a contiguous cache
reserves the longest possible length for each sequence, and a batch that starts and ends together
waits for its slowest. Six ideas, each a part of this file, fill it:

    paging        KV in blocks of a few tokens and a block table per sequence: less than one block
                  of a sequence is wasted (PagedAttention, arXiv:2309.06180). Blocks are counted by
                  reference: samples of one prompt share it, and copy a block only to write to it.
    prefix cache  full blocks are found again by their content, in a tree of which every edge is the
                  tokens of a block (RadixAttention, arXiv:2312.07104). What a sequence leaves stays
                  until its memory is needed, and the least recently used goes first.
    scheduling    sequences join and leave between any two steps (Orca, OSDI 2022). A step has a
                  budget of tokens: first one for each sequence that decodes, then chunks of prompts
                  (Sarathi-Serve, arXiv:2403.02310): no prompt, however long, delays a next token by
                  more than one such step. When no block is free, the last in order gives back its
                  own, to be computed again later, or kept meanwhile in the host's memory.
    speculation   while few decode, a step has tokens to spare: those that a drafter proposes are
                  verified in it, as many as prompts and memory leave room for, fewer the fuller
                  the batch is (SmartSpec, arXiv:2406.14066). Nobody waits or gives way for them.
    one kernel    prompts in chunks, decoding, and both at once are one attention over a flat axis
                  of tokens, reading keys through the block tables; split over the keys where few
                  queries read many (flash-decoding).
    two workers   one runs prompts, another decodes, and KV goes from one to the other (DistServe,
                  arXiv:2401.09670): the same copy that preemption keeps on the host.

What it costs: an attention that looks up where each key is, and a scheduler in Python, microseconds
per sequence and step (`python paged_kv.py` prints how many); swapping copies KV while all wait.
When it loses: with a single sequence, for which a contiguous cache does as well; with latent
attention, which here is absorbed at any number of tokens, and so slower for a long prompt; a CPU
gains nothing from static shapes or compiling.

Hook: `PagedKVCache.attend` is the model's attend callable; the model does not change. The Engine
calls model(tokens (1, N), positions (1, N), attend, return_hidden=True) and model.head, and reads
model.config. Sampler, drafter, verifier and listener are handed to it. Equivalence (test_all.py):
paged == contiguous, batched == alone, chunked == whole, hit == cold, preempted == undisturbed,
forked == separate, drafted == plain.
Copied alone, this file needs torch, and triton for the kernel; `python paged_kv.py` checks itself
and prints a benchmark.

Shapes: N new tokens of all sequences, flat; R sequences, T new tokens of one and S its cached ones,
the new included; Hq / Hkv query / key-value heads, D / Dv head dims, V vocabulary; W blocks at most
in a table. A cache is (blocks, block_size, Hkv, D).
"""

from __future__ import annotations

import heapq
import math
import queue
import threading
import time
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate, count
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS, Windows: plain torch serves every call
    triton = None

INTERPRET = triton is not None and triton.knobs.runtime.interpret

# --------------------------------------------------------------------------------------------------
# What is asked, and what comes
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks for. How tokens are drawn is the sampler's to understand and to check;
    the lengths, ends and extras are the Engine's. ValueError names the field."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    min_new_tokens: int = 0
    seed: int = 0  # sample i draws with seed + i
    max_new_tokens: int = 200
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()  # end before one of these texts; needs a listener
    n: int = 1  # samples, which share the prompt
    logprobs: int | None = None  # beside each token its log-probability, and of so many likeliest

    def __post_init__(self):
        texts = (self.stop,) if isinstance(self.stop, str) else self.stop
        ok = isinstance(texts, (tuple, list)) and all(isinstance(s, str) and s for s in texts)
        _check(ok, f"stop must be texts that are not empty, not {self.stop!r}")
        object.__setattr__(self, "stop", tuple(texts))
        for name, least in (("max_new_tokens", 1), ("n", 1), ("logprobs", 0), ("seed", 0)):
            value = getattr(self, name)
            ok = _is_whole(value) and least <= value and (name != "seed" or value < 2**63)
            ok = ok or (name == "logprobs" and value is None)
            _check(ok, f"{name} must be a whole number, {least} or more, not {value!r}")
        ok = isinstance(self.ignore_eos, bool)
        _check(ok, f"ignore_eos must be true or false, not {self.ignore_eos!r}")
        least, most = self.min_new_tokens, self.max_new_tokens
        ok = not _is_whole(least) or least <= most
        _check(ok, f"min_new_tokens {least} is more than max_new_tokens {most}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass
class Sample:
    """One continuation. finish_reason: eos, stop, length, abort or error. logprobs: for each token
    its log-probability under the model's own distribution, the likeliest ids, and theirs."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[tuple[float, list[int], list[float]]] = field(default_factory=list)


@dataclass
class Output:
    """A request's answer, which grows with every step. One refused has an error and no samples."""

    id: Any
    prompt_ids: list[int]
    samples: list[Sample] = field(default_factory=list)
    error: str | None = None
    added: float = 0.0  # when, in seconds of the Engine's clock
    times: list[float] = field(default_factory=list)  # of the first run, then of sample 0's tokens

    @property
    def finished(self) -> bool:
        return all(sample.finish_reason for sample in self.samples)

    @property
    def token_ids(self) -> list[int]:
        return self.samples[0].token_ids if self.samples else []

    @property
    def finish_reason(self) -> str | None:
        return self.samples[0].finish_reason if self.samples else "error"

    @property
    def logprobs(self) -> list[tuple[float, list[int], list[float]]]:
        return self.samples[0].logprobs if self.samples else []


class HostKV(NamedTuple):
    """Keys and values of a sequence's first n tokens, off the device: all layers, whatever the
    blocks were."""

    n: int
    kv: Tensor  # (L, 2 or 1, Hkv, n, D)
    scales: Tensor | None  # (L, 2 or 1, Hkv, n)


@dataclass(eq=False)
class Sequence:
    """One sample on its way through the engine. Between steps

        0 .............. computed ......... len(tokens)
        in the cache     | to be run: 1 if it decodes, more if it is a prompt

    and of its blocks the first `known` are full ones in the prefix tree, down to `node`. After a
    hit on the whole prompt the last token is run again, for its logits; its keys are there already:
    what stands before `stored` is not written."""

    tokens: list[int]  # prompt and output
    n_prompt: int
    params: SamplingParams = SamplingParams()
    request: Output | None = None
    index: int = 0  # which sample of the request
    priority: int = 0  # smaller is more urgent
    arrival: int = 0
    width: int = 1  # samples that will fork off it at the end of the prompt, itself included
    table: list[int] = field(default_factory=list)  # its blocks
    computed: int = 0
    stored: int = 0
    known: int = 0
    node: int = 0
    wants: int = 0  # drafted tokens, to be verified in the next step
    lent: int = 0  # blocks for them, the last of its table
    running: bool = False
    host: HostKV | None = None
    listener: Any = None

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def output(self) -> list[int]:
        return self.tokens[self.n_prompt :]

    @property
    def seed(self) -> int:
        return (self.params.seed + self.index) % 2**63


# --------------------------------------------------------------------------------------------------
# Blocks
# --------------------------------------------------------------------------------------------------


class BlockAllocator:
    """Blocks by reference count, and the prefix tree of those that are full.

    A block is free; in use, by as many sequences as refs says; or cached: in use by none, but its
    content can be found, and it is given away only when no free one is left, the least recently
    used first. A node of the tree is a number that is never used again, 0 the root; an edge is the
    tokens of a block: equal content is found, and nothing else (no hash that could collide).

    Whoever uses a block uses all those above it, and gives them back after it. So none is ever less
    recently used than those below, and what is evicted is a leaf.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, prefix_cache: bool = True):
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            ok = _is_whole(value) and value > 0
            _check(ok, f"{name} must be a whole number, 1 or more, not {value!r}")
        self.block_size, self.prefix_cache = block_size, prefix_cache
        self.refs = [0] * num_blocks
        self.free = list(range(num_blocks))[::-1]
        self.cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self.below: dict[tuple[int, tuple[int, ...]], int] = {}  # (node, tokens) -> block
        self.place: dict[int, tuple[int, tuple[int, ...], int]] = {}  # block -> where, its node
        self.n_nodes = 0

    @property
    def n_free(self) -> int:
        """Blocks that can be had."""
        return len(self.free) + len(self.cached)

    def allocate(self) -> int:
        """A block of one's own, with whatever content."""
        assert self.n_free, "ask n_free first"
        if not self.free:
            self._unlink(next(iter(self.cached)))
        block = self.free.pop()
        self.refs[block] = 1
        return block

    def share(self, block: int) -> int:
        """Use a block together with its other users."""
        self.cached.pop(block, None)
        self.refs[block] += 1
        return block

    def release(self, blocks: list[int]) -> None:
        """Give a sequence's blocks back, the last one first."""
        for block in reversed(blocks):
            assert self.refs[block] > 0, block
            self.refs[block] -= 1
            if self.refs[block] == 0 and block in self.place:
                self.cached[block] = None
            elif self.refs[block] == 0:
                self.free.append(block)

    def find(self, node: int, tokens: tuple[int, ...]) -> int | None:
        """The block that holds these tokens after those of the node."""
        return self.below.get((node, tokens))

    def node(self, block: int) -> int:
        return self.place[block][2]

    def register(self, block: int, node: int, tokens: tuple[int, ...]) -> int:
        """Let a full block be found; its node."""
        assert block not in self.place and (node, tokens) not in self.below
        self.n_nodes += 1
        self.place[block] = node, tokens, self.n_nodes
        self.below[node, tokens] = block
        return self.n_nodes

    def forget(self, blocks: Iterable[int]) -> None:
        """What these hold, and so what is below them, is not to be found again."""
        gone = {self.node(block) for block in blocks if block in self.place}
        if gone:
            for block, (above, _, own) in list(self.place.items()):  # those above come first
                if above in gone or own in gone:
                    gone.add(own)
                    self._unlink(block)

    def _unlink(self, block: int) -> None:
        above, tokens, _ = self.place.pop(block)
        del self.below[above, tokens]
        if block in self.cached:
            del self.cached[block]
            self.free.append(block)

    def check(self, tables: Iterable[list[int]]) -> None:
        """Every invariant, given the tables of all sequences that have blocks."""
        counts = [0] * len(self.refs)
        for table in tables:
            for block in table:
                counts[block] += 1
        assert counts == self.refs, (counts, self.refs)
        unused = {b for b, n in enumerate(counts) if n == 0}
        assert len(self.free) == len(set(self.free)) and not set(self.free) & set(self.cached)
        assert set(self.free) | set(self.cached) == unused
        assert set(self.cached) == unused & self.place.keys()
        assert {(n, t): b for b, (n, t, _) in self.place.items()} == self.below
        nodes = {own: block for block, (_, _, own) in self.place.items()}
        assert all(above in nodes or above == 0 for above, _, _ in self.place.values())
        age = {block: i for i, block in enumerate(self.cached)}
        for block in self.cached:  # one that is above is younger, or in use
            above = self.place[block][0]
            assert above == 0 or age.get(nodes[above], math.inf) > age[block]


# --------------------------------------------------------------------------------------------------
# Scheduling
# --------------------------------------------------------------------------------------------------


def first_come(seq: Sequence) -> Any:
    """The default policy, which is to say the order: the smallest is admitted first, the largest
    gives way first. By priority, then by arrival: the oldest of the most urgent always goes on."""
    return seq.priority, seq.arrival


@dataclass
class Plan:
    """One step: what to run, and what to copy before, in the order of these fields."""

    budget: int = 0  # tokens that may yet be run
    swap_out: list[tuple[Sequence, list[int], int]] = field(default_factory=list)  # blocks, tokens
    copies: dict[int, int] = field(default_factory=dict)  # to a block, from another
    swap_in: list[tuple[Sequence, int]] = field(default_factory=list)  # from which token on
    run: list[tuple[Sequence, int]] = field(default_factory=list)  # so many of its tokens
    drafts: dict[Sequence, int] = field(default_factory=dict)  # after them, so many drafted ones
    fresh: list[int] = field(default_factory=list)  # blocks that can be found from this step on


class Scheduler:
    """Which tokens to run in the next step: integers only, no model and no clock.

    policy(sequence) gives the key that all order is by; with equal keys the older comes first.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        max_batch_tokens: int = 512,
        max_running: int = 64,
        policy: Callable[[Sequence], Any] = first_come,
        swap: bool = False,
    ):
        _check(
            1 <= max_running <= max_batch_tokens,
            f"max_running must be from 1 to max_batch_tokens ({max_batch_tokens}), not "
            f"{max_running}: in every step each running sequence has a token",
        )
        self.allocator, self.block_size = allocator, allocator.block_size
        self.max_batch_tokens, self.max_running, self.swap = max_batch_tokens, max_running, swap
        self.key = lambda seq: (policy(seq), seq.arrival, seq.index)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.n_preempted = self.n_admitted_tokens = self.n_hit_tokens = 0

    def schedule(self, plan: Plan | None = None) -> Plan:
        """The next step. Its caller runs it, then says commit, or undo, also if this was
        interrupted and only the plan handed in is there."""
        plan = Plan() if plan is None else plan
        plan.budget = self.max_batch_tokens
        for seq in self.running:  # one that was run to its end, but then could not draw, is again
            seq.computed = min(seq.computed, len(seq.tokens) - 1)
            seq.stored = min(seq.stored, len(seq.tokens))
            if seq.lent:
                self._take_back(seq)
        queue = heapq.nsmallest(self.max_running, self.waiting, key=self.key)
        ranked = sorted(self.running + queue, key=self.key)
        rank = {seq: n for n, seq in enumerate(ranked)}
        order = [seq for seq in ranked if seq.running]
        if queue:
            self._make_way(queue[0], [seq for seq in order if rank[seq] > rank[queue[0]]], plan)
        order = [seq for seq in order if seq.running]
        for seq in list(order):  # nobody's next token waits for another's prompt
            if seq.running and seq.remaining == 1 and self._own_next_slot(seq, order, plan):
                self._run(seq, plan)
        prompts = [seq for seq in order if seq.remaining > 1]
        admitting = True
        for seq in sorted(prompts + queue, key=rank.get):
            if plan.budget and not seq.running:
                # one that does not fit holds back those behind it, or it might never fit
                admitting = admitting and self._admit(seq, plan)
            if plan.budget and seq.running:
                self._run(seq, plan)
        for seq, _ in plan.run:  # last, so that guesses take from nobody that runs
            if seq.wants and seq.remaining == 1:
                self._grant(seq, plan)
        return plan

    def commit(self, plan: Plan) -> None:
        """The plan was run; which drafted tokens were right, accept says."""
        for seq, n in plan.run:
            seq.computed += n
            seq.stored = max(seq.stored, seq.computed)

    def accept(self, seq: Sequence, n: int) -> None:
        """Its first n drafted tokens are to be its next: their keys are there already."""
        seq.computed += n
        seq.stored = max(seq.stored, seq.computed)

    def undo(self, plan: Plan) -> None:
        """The plan was not made or not run to its end: all that run begin again, with what is left
        of theirs in the prefix tree."""
        self.allocator.forget(plan.fresh)
        for seq in list(self.running):
            self._release(seq)
            self.waiting.append(seq)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def finish(self, seq: Sequence) -> None:
        """It ended, by itself or not: its blocks are for others now."""
        if seq.running:
            self._release(seq)
        else:
            self.waiting.remove(seq)

    def fork(self, seq: Sequence) -> Sequence:
        """The next sample of its request: another sequence with the same tokens in the same
        blocks."""
        child = replace(seq, index=max(seq.index + 1, seq.params.n - seq.width + 1), width=1)
        child.tokens, child.listener = list(seq.tokens), None
        child.table = [*map(self.allocator.share, seq.table)]
        seq.width = max(1, seq.width - 1)
        self.running.append(child)
        return child

    # ---- the parts of a step ----

    def _make_way(self, seq: Sequence, later: list[Sequence], plan: Plan) -> None:
        """Those that run, though later in order than one which waits, give way, if it helps."""
        if later and self._fits(seq, later):
            while later and not self._fits(seq):
                self._preempt(later.pop(), plan)

    def _own_next_slot(self, seq: Sequence, order: list[Sequence], plan: Plan) -> bool:
        """A block to write its next token to, which no other reads: the last in order give way for
        it, and be it itself (False)."""
        at = seq.computed // self.block_size
        while True:
            new = at == len(seq.table)
            shared = not new and self.allocator.refs[seq.table[at]] > 1
            if not new and (not shared or seq.stored > seq.computed):
                return True
            if self.allocator.n_free:
                break
            self._preempt(order[-1], plan)
            if order.pop() is seq:
                return False
        block = self.allocator.allocate()
        if shared:
            plan.copies[block] = seq.table[at]  # should it be given away again, the last one counts
            self.allocator.release([seq.table.pop()])
        seq.table.append(block)
        return True

    def _grant(self, seq: Sequence, plan: Plan) -> None:
        """Slots for as many drafted tokens as it wants, within what this step leaves: of the
        budget, of blocks, and of the tokens it may yet have, the one that comes anyway aside."""
        at, refs = len(seq.tokens), self.allocator.refs
        if any(refs[block] > 1 for block in seq.table[at // self.block_size :]):
            return  # shared with a fork, until both could draw
        room = (len(seq.table) + self.allocator.n_free) * self.block_size - at
        n = min(seq.wants, plan.budget, room, seq.n_prompt + seq.params.max_new_tokens - at - 1)
        if n > 0:
            while len(seq.table) < self._blocks(at + n):
                seq.table.append(self.allocator.allocate())
                seq.lent += 1
            plan.drafts[seq] = n
            plan.budget -= n

    def _take_back(self, seq: Sequence) -> None:
        """The blocks it was lent for drafted tokens, but for those which hold tokens now."""
        own = max(len(seq.table) - seq.lent, self._blocks(seq.stored))
        refs, place = self.allocator.refs, self.allocator.place
        assert all(refs[block] == 1 and block not in place for block in seq.table[own:])
        self.allocator.release(seq.table[own:])
        del seq.table[own:]
        seq.lent = 0

    def _fits(self, seq: Sequence, without: Iterable[Sequence] = ()) -> bool:
        """Whether there is room to admit it: blocks for all its tokens, one to spare for each that
        runs. As if those in `without` did not run."""
        hits, node, refs = set(), 0, self.allocator.refs
        for at in range(0, len(seq.tokens), self.block_size):
            block = self.allocator.find(node, tuple(seq.tokens[at : at + self.block_size]))
            if block is None:
                break
            hits.add(block)
            node = self.allocator.node(block)
        used = Counter(block for s in without for block in s.table)
        given_back = sum(refs[block] == n for block, n in used.items() if block not in hits)
        running = set(self.running).difference(without)
        have = self.allocator.n_free - sum(refs[block] == 0 for block in hits) + given_back
        need = self._blocks(len(seq.tokens)) - len(hits) + len(running)
        return need <= have and sum(s.width for s in running) + seq.width <= self.max_running

    def _admit(self, seq: Sequence, plan: Plan) -> bool:
        """Give it its blocks: those that are known, and for the rest of its tokens new ones."""
        if not self._fits(seq):
            return False
        self.waiting.remove(seq)
        self.running.append(seq)
        seq.running = True
        self._skip(seq)
        self.n_hit_tokens += seq.computed
        self.n_admitted_tokens += len(seq.tokens)
        while len(seq.table) < self._blocks(len(seq.tokens)):
            seq.table.append(self.allocator.allocate())
        if seq.host is not None and seq.host.n > seq.computed:
            plan.swap_in.append((seq, seq.stored))
            seq.computed = seq.stored = seq.host.n
            self._register(seq, plan)
        else:
            seq.host = None
        return True

    def _run(self, seq: Sequence, plan: Plan) -> None:
        """As much of it as the budget allows."""
        self._skip(seq)  # another may have computed its next blocks meanwhile, or will in this step
        n = min(seq.remaining, plan.budget)
        self._register(seq, plan, n)
        plan.run.append((seq, n))
        plan.budget -= n

    def _preempt(self, seq: Sequence, plan: Plan) -> None:
        """Take its blocks from it; it waits."""
        if self.swap and seq.computed:
            plan.swap_out.append((seq, list(seq.table), seq.computed))
        self._release(seq)
        self.waiting.append(seq)
        self.n_preempted += 1

    def _release(self, seq: Sequence) -> None:
        self.allocator.release(seq.table)
        self.running.remove(seq)
        seq.table, seq.computed, seq.stored, seq.known, seq.node = [], 0, 0, 0, 0
        seq.running, seq.wants, seq.lent = False, 0, 0

    def _blocks(self, n: int) -> int:
        return -(-n // self.block_size)

    # ---- the prefix tree ----

    def _skip(self, seq: Sequence) -> None:
        """Share the blocks of its next tokens that can be found: they are computed, or will be in
        this very step, in which every layer writes all keys before it reads any."""
        while seq.computed == seq.known * self.block_size:
            block = self.allocator.find(seq.node, self._next_block(seq))
            if block is None:
                return
            self._place(seq, block)
            seq.computed = min(seq.stored, len(seq.tokens) - 1)

    def _register(self, seq: Sequence, plan: Plan, n: int = 0) -> None:
        """Let its full blocks be found, as they will be when n more of its tokens are run. Where
        another was first with the same content, share that one."""
        if not self.allocator.prefix_cache:
            return
        while (seq.known + 1) * self.block_size <= seq.computed + n:
            tokens, block = self._next_block(seq), seq.table[seq.known]
            found = self.allocator.find(seq.node, tokens)
            if found is not None:
                self._place(seq, found)
            else:
                seq.node = self.allocator.register(block, seq.node, tokens)
                seq.known += 1
                plan.fresh.append(block)

    def _next_block(self, seq: Sequence) -> tuple[int, ...]:
        at = seq.known * self.block_size
        return tuple(seq.tokens[at : at + self.block_size])

    def _place(self, seq: Sequence, block: int) -> None:
        """Let the block be its next known one."""
        self.allocator.share(block)
        if seq.known < len(seq.table):
            self.allocator.release([seq.table[seq.known]])
            seq.table[seq.known] = block
        else:
            seq.table.append(block)
        seq.node, seq.known = self.allocator.node(block), seq.known + 1
        seq.stored = max(seq.stored, seq.known * self.block_size)


# --------------------------------------------------------------------------------------------------
# The cache
# --------------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """What to run of one sequence: tokens, of which the first stands at position `start`."""

    tokens: list[int]
    start: int
    table: list[int]  # blocks for all up to the last of them
    stored: int = 0  # keys of tokens before this position are in the cache already


class Step(NamedTuple):
    """A step's integers, as tensors on the device."""

    tokens: Tensor  # (N,)
    positions: Tensor  # (N,)
    slots: Tensor  # (N,) where in the cache each token's keys go: block * block_size + offset
    block_table: Tensor  # (R, W) int32
    cu_seqlens: Tensor  # (R + 1,) int32: sequence r has rows cu_seqlens[r] to cu_seqlens[r + 1]
    lengths: Tensor  # (R,) int32: its tokens in the cache, these included


KV_DTYPES = {"int8": (torch.int8, 127), "fp8": (torch.float8_e4m3fn, 448)}  # and the largest value


class PagedKVCache:
    """Keys and values of all sequences, of each layer one tensor of blocks.

        step = cache.step([Chunk(prompt, 0, [5, 2]), Chunk([token], 9, [7])])
        attend = functools.partial(cache.attend, step=step)
        logits = model(step.tokens[None], step.positions[None], attend)         # (1, N, V)

    A layer's tensor is (2, Hkv, blocks + 1, block_size, D): keys and values, a head's blocks side
    by side. Latent attention (config.kv_lora_rank) has the latents alone, (1, 1, blocks + 1,
    block_size, rank + rope). The last block is nobody's: what need not be kept is written there.

    kv_dtype "int8" or "fp8" (e4m3) stores each head's vector of a token divided by its largest
    value, kept beside it in fp32: with D = 128 it takes 0.52 of the memory of bf16.
    """

    def __init__(
        self,
        config: Any,
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kv_dtype: str | None = None,
    ):
        """config: anything with n_layers, n_kv_heads, head_dim, and for latent attention
        kv_lora_rank and qk_rope_head_dim."""
        if kv_dtype is not None:
            known = ", ".join(KV_DTYPES)
            _check(kv_dtype in KV_DTYPES, f"kv_dtype must be one of {known}, not {kv_dtype!r}")
            dtype, self.largest = KV_DTYPES[kv_dtype]
            device = torch.device(device)
            old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9)
            _check(kv_dtype != "fp8" or not old, "kv_dtype fp8 needs a newer GPU; take int8")
        parts, heads, dim = 2, config.n_kv_heads, config.head_dim
        if getattr(config, "kv_lora_rank", None):
            parts, heads, dim = 1, 1, config.kv_lora_rank + config.qk_rope_head_dim
        self.num_blocks, self.block_size, self.device = num_blocks, block_size, device
        shape, layers = (parts, heads, num_blocks + 1, block_size), range(config.n_layers)
        self.pages = [torch.zeros(*shape, dim, dtype=dtype, device=device) for _ in layers]
        self.scales: list[Tensor] = []  # of quantized pages: (2 or 1, Hkv, blocks + 1, block_size)
        if kv_dtype is not None:
            self.scales = [torch.ones(shape, device=device) for _ in layers]
        whole = [*self.pages, *self.scales]
        self.bytes_per_token = sum(t.nbytes for t in whole) // (num_blocks + 1) // block_size

    def step(self, chunks: list[Chunk], shape: tuple[int, int] | None = None) -> Step:
        """The tensors of a step; with a shape (N, R) padded to it, by tokens of no sequence and
        sequences of no tokens."""
        bs, spare = self.block_size, self.num_blocks * self.block_size
        tokens, positions, slots, cu, width = [], [], [], [0], 1
        for c in chunks:
            end = c.start + len(c.tokens)
            assert len(c.table) * bs >= end, "a token without a block"
            tokens += c.tokens
            positions += range(c.start, end)
            slots += [
                c.table[p // bs] * bs + p % bs if p >= c.stored else spare
                for p in range(c.start, end)
            ]
            cu.append(len(tokens))
            width = max(width, -(-end // bs))
        (n, r), w = shape or (len(tokens), len(chunks)), width
        assert n >= len(tokens) and r >= len(chunks), (n, r)
        # past the end of a table its own first block, not another's: nothing of another's gets in
        table = array("i")
        for c in chunks:
            table.extend(c.table[:w])
            table.extend(array("i", c.table[:1]) * (w - len(c.table)))
        table.extend(array("i", [0]) * (w * (r - len(chunks))))
        table = torch.frombuffer(table, dtype=torch.int32).view(r, w)
        lengths = [c.start + len(c.tokens) for c in chunks] + [0] * (r - len(chunks))
        cu += [cu[-1]] * (r - len(chunks))
        empty = n - len(tokens)
        i32, i64 = partial(torch.tensor, dtype=torch.int32), partial(torch.tensor, dtype=torch.long)
        rows = i64(tokens + [0] * empty), i64(positions + [0] * empty), i64(slots + [spare] * empty)
        return Step(*(t.to(self.device) for t in (*rows, table, i32(cu), i32(lengths))))

    def attend(
        self, spec: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, *, step: Step
    ) -> Tensor:
        """The attend hook: stores k and v (B, T, Hkv, D), the step's tokens in their order, then
        attends with q (B, T, Hq, D) to all that each sequence has."""
        self._store(spec.index, step.slots, spec.latent if spec.latent is not None else k, v)
        pages, scales = self.pages[spec.index], self.scales[spec.index] if self.scales else None
        flat = q.flatten(0, 1)
        rules = {name: getattr(spec, name) for name in _Rules._fields}
        if spec.expand is not None:
            o = self._expanded(spec, flat, step, rules)
        else:
            by_slot = lambda x: x.movedim(0, 2)  # (blocks, block_size, Hkv, ...)
            o = paged_attention(
                flat, by_slot(pages[0]), by_slot(pages[1]) if len(pages) > 1 else None,
                step.block_table, step.cu_seqlens, step.lengths, latent_dim=spec.latent_dim,
                k_scale=None if scales is None else by_slot(scales[0]),
                v_scale=None if scales is None or len(pages) == 1 else by_slot(scales[1]), **rules,
            )  # fmt: skip
        return o.view(*q.shape[:3], -1)

    def _store(self, layer: int, slots: Tensor, *new: Tensor) -> None:
        """new: k (B, T, Hkv, D), and v where it is stored."""
        for part, x in enumerate(new[: len(self.pages[layer])]):
            x = x.flatten(0, 1).transpose(0, 1)  # (Hkv, N, D)
            pages = self.pages[layer][part].flatten(1, 2)  # (Hkv, slots, D)
            if self.scales:
                scale = x.float().abs().amax(-1).clamp(min=1e-12) / self.largest
                self.scales[layer][part].flatten(1, 2).index_copy_(1, slots, scale)
                x = x.float() / scale[..., None]
                x = x.round() if pages.dtype == torch.int8 else x
            _raw(pages).index_copy_(1, slots, _raw(x.to(pages.dtype)))

    def _expanded(self, spec: Any, q: Tensor, step: Step, rules: dict[str, Any]) -> Tensor:
        """Latent attention as the model calls it unabsorbed: all latents of a sequence into heads,
        sequence by sequence. Right, but no way to decode; the Engine asks for the absorbed form."""
        pages = self.pages[spec.index]
        scales = self.scales[spec.index] if self.scales else None
        out, cu = [], step.cu_seqlens.tolist()
        for table, begin, end, length in zip(step.block_table, cu, cu[1:], step.lengths.tolist()):
            used = table[: -(-length // self.block_size)]
            k_scale = None if scales is None else scales[0].movedim(0, 2)
            latent = _gather(pages[0].movedim(0, 2), k_scale, used, 1, q.dtype)  # (1, 1, S, R)
            k, v = spec.expand(latent[:, 0, :length, None])
            o, _ = _dense(q[begin:end], k[0], v[0], **rules)
            out.append(o)
        out.append(o.new_zeros(len(q) - cu[-1], *o.shape[1:]))
        return torch.cat(out)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, source to destination, all at once."""
        if pairs:
            source, target = torch.tensor(pairs, device=self.device).t()
            for t in map(_raw, (*self.pages, *self.scales)):
                t.index_copy_(2, target, t.index_select(2, source))

    def read(self, table: list[int], n: int) -> HostKV:
        """The first n tokens of a sequence, on the host."""
        used = torch.tensor(table[: -(-n // self.block_size)], device=self.device)
        one = lambda t: _raw(t).index_select(2, used).cpu().flatten(2, 3)[:, :, :n]
        take = lambda tensors: torch.stack([one(t) for t in tensors])
        return HostKV(n, take(self.pages), take(self.scales) if self.scales else None)

    def write(self, table: list[int], first: int, host: HostKV) -> None:
        """Its tokens from `first` on, back into blocks."""
        p = torch.arange(first, host.n)
        slots = torch.tensor(table)[p // self.block_size] * self.block_size + p % self.block_size
        slots = slots.to(self.device)
        for to, source in ((self.pages, host.kv), (self.scales, host.scales)):
            for t, x in zip(to, source if source is not None else ()):
                _raw(t).flatten(2, 3).index_copy_(2, slots, x[:, :, first:].to(self.device))


def _raw(x: Tensor) -> Tensor:
    """fp8 as its bytes: not every operation that moves numbers knows it."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


# --------------------------------------------------------------------------------------------------
# Attention through block tables, in plain torch
# --------------------------------------------------------------------------------------------------

GATHERED = 1 << 20  # numbers of keys at a time: with their values 4 MB of bf16
QUERIES = 128  # at a time


def _dense(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: int | None = None,
    softcap: float | None = None, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The definition, for one sequence: q (T, Hq, D), the last of k (S, Hkv, D), v (S, Hkv, Dv)
    -> o (T, Hq, Dv), lse (T, Hq)."""
    (T, Hq, D), (S, Hkv, _) = q.shape, k.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.to(dtype).repeat_interleave(Hq // Hkv, dim=1) for x in (k, v))
    s = torch.einsum("thd,shd->hts", q.to(dtype), k) * (D**-0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    distance = torch.arange(S - T, S, device=q.device)[:, None] - torch.arange(S, device=q.device)
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(dtype)[:, None, None] * distance
    seen = distance >= 0
    if window is not None:
        seen = seen & (distance < window)
    s = s.masked_fill(~seen, -math.inf)
    if sinks is not None:
        s = torch.cat((s, sinks.to(dtype)[:, None, None].expand(-1, T, 1)), dim=-1)
    p = s.softmax(-1)[..., :S]
    return torch.einsum("hts,shd->thd", p, v).to(q.dtype), s.logsumexp(-1).t()


class _Pages(NamedTuple):
    """What is read: k (blocks, block_size, Hkv, D), v the same with Dv, or None where it is the
    first latent_dim columns of k; scales (blocks, block_size, Hkv) of quantized ones; block_table
    (R, W), cu_seqlens (R + 1,), lengths (R,) int32."""

    k: Tensor
    v: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    block_table: Tensor
    cu_seqlens: Tensor
    lengths: Tensor
    latent_dim: int | None


class _Rules(NamedTuple):
    """How q . k becomes a logit."""

    scale: float
    window: int | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None


def _reference(q: Tensor, p: _Pages, rules: _Rules) -> tuple[Tensor, Tensor]:
    """Sequence by sequence: gather all it has, then the definition."""
    Dv = p.latent_dim or p.v.shape[3]
    o, lse = q.new_zeros(*q.shape[:2], Dv), q.new_full(q.shape[:2], -math.inf, dtype=torch.float32)
    cu, flags = p.cu_seqlens.tolist(), rules._asdict()
    for table, begin, end, length in zip(p.block_table, cu, cu[1:], p.lengths.tolist()):
        if end > begin:
            used = table[: -(-length // p.k.shape[1])]
            dtype = torch.promote_types(q.dtype, torch.float32)
            k = _gather(p.k, p.k_scale, used, 1, dtype)[0, :, :length].transpose(0, 1)
            v = k[..., :Dv]
            if p.v is not None:
                v = _gather(p.v, p.v_scale, used, 1, dtype)[0, :, :length].transpose(0, 1)
            o[begin:end], lse[begin:end] = _dense(q[begin:end], k, v, **flags)
    return o, lse


def _plain(q: Tensor, p: _Pages, rules: _Rules) -> Tensor:
    """Plain torch at speed: torch's fused kernel, which is told no block tables, over keys gathered
    for a few sequences at a time: no more than stay in the processor's cache, and next to no
    padding. Queries go in runs, at most QUERIES of a sequence; runs as long as each other, such as
    all that decode, in one call if they have about as many keys. No loop is over tokens."""
    o = q.new_zeros(*q.shape[:2], p.latent_dim or p.v.shape[3])
    cu, groups = p.cu_seqlens.tolist(), defaultdict(list)
    for r, (begin, end, length) in enumerate(zip(cu, cu[1:], p.lengths.tolist())):
        for row in range(begin, end, QUERIES):
            n = min(QUERIES, end - row)
            groups[n].append((length - end + row + n, row, r))  # keys its last query sees
    for n, runs in groups.items():
        runs.sort(reverse=True)
        while runs:
            S = runs[0][0]
            most = max(1, GATHERED // (S * p.k.shape[2] * p.k.shape[3]))
            few = [run for run in runs[:most] if run[0] >= 0.8 * S - 64]
            ends, rows, seqs = (torch.tensor(x, device=q.device) for x in zip(*few))
            rows = rows[:, None] + torch.arange(n, device=q.device)
            o[rows] = _together(q[rows], ends, p.block_table[seqs], S, p, rules)
            del runs[: len(few)]
    return o


def _together(q: Tensor, ends: Tensor, tables: Tensor, S: int, p: _Pages, rules: _Rules) -> Tensor:
    """q (B, T, Hq, D), of row b the last of its ends[b] keys, S at most; tables (B, W) -> o."""
    (B, T, Hq, D), Hkv = q.shape, p.k.shape[2]
    first = 0 if rules.window is None else max(0, int(ends[-1]) - T - rules.window + 1)
    size = p.k.shape[1]
    table = tables[:, first // size : -(-S // size)].flatten()
    k = _gather(p.k, p.k_scale, table, B, q.dtype)  # (B, Hkv, keys, D)
    v = k if p.v is None else _gather(p.v, p.v_scale, table, B, q.dtype)
    j = torch.arange(k.shape[2], device=q.device) + first // size * size
    tail = int(ends[-1]) - first // size * size  # from here on some slots are nobody's, and they
    for x in (k, v):  # may hold what is not finite, of which a weight of 0 is no protection
        x[:, :, tail:].masked_fill_((j[tail:] >= ends[:, None])[:, None, :, None], 0)
    i = (ends[:, None] - T + torch.arange(T, device=q.device))[:, None, :, None]
    mask = j <= i  # (B, 1, T, keys)
    if rules.window is not None:
        mask &= i - j < rules.window
    if rules.alibi_slopes is not None:
        bias = -rules.alibi_slopes[:, None, None] * (i - j)
        mask = bias.masked_fill(~mask, -math.inf).to(q.dtype)  # (B, Hq, T, keys)
    if rules.softcap is not None or rules.sinks is not None:
        return _unfused(q, k, v, mask, rules)[..., : p.latent_dim]
    if T == 1:  # heads that share keys become rows of one head
        mask = mask.reshape(B, -1, Hq // Hkv, mask.shape[-1]) if mask.shape[1] > 1 else mask
        q = q.view(B, Hkv, -1, D)
    else:
        q = q.transpose(1, 2)
    o = F.scaled_dot_product_attention(q, k, v, mask, scale=rules.scale, enable_gqa=T > 1)
    o = o.view(B, 1, Hq, -1) if T == 1 else o.transpose(1, 2)
    return o if p.v is not None else o[..., : p.latent_dim]


def _unfused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rules: _Rules) -> Tensor:
    """With softcap or sinks, which torch's fused kernel does not have. mask (B, 1 or Hq, T, keys):
    bool, or with ALiBi in it what to add."""
    (B, T, _, _), Hkv, dtype = q.shape, k.shape[1], torch.promote_types(q.dtype, torch.float32)
    by_head = lambda x: x.unflatten(1, (Hkv, -1)) if x.shape[1] > 1 else x[:, None]
    s = by_head(q.transpose(1, 2).to(dtype)).flatten(2, 3)  # (B, Hkv, heads * T, D)
    s = (s @ k.to(dtype).transpose(-1, -2) * rules.scale).unflatten(2, (-1, T))
    if rules.softcap is not None:
        s = (s / rules.softcap).tanh_() * rules.softcap
    mask = by_head(mask)
    s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
    if rules.sinks is not None:
        sinks = rules.sinks.to(dtype).view(1, Hkv, -1, 1, 1).expand(B, -1, -1, T, -1)
        s = torch.cat((s, sinks), dim=-1)
    p = s.softmax(-1)[..., : k.shape[2]].flatten(2, 3)
    return (p @ v.to(dtype)).unflatten(2, (-1, T)).flatten(1, 2).transpose(1, 2).to(q.dtype)


def _gather(x: Tensor, scale: Tensor | None, table: Tensor, B: int, dtype: torch.dtype) -> Tensor:
    """x (blocks, block_size, Hkv, D) at B times as many blocks -> (B, Hkv, keys, D)"""
    by_head = lambda x: x.movedim(2, 0).index_select(1, table)  # (Hkv, B * n, block_size, ...)
    found = by_head(_raw(x)).view(x.dtype).to(dtype)
    if scale is not None:
        found = found * by_head(scale)[..., None].to(dtype)
    return found.view(len(found), B, -1, x.shape[3]).transpose(0, 1)


# --------------------------------------------------------------------------------------------------
# Attention through block tables, one Triton kernel
# --------------------------------------------------------------------------------------------------

# A GPU has an instruction for exp2, so logits are kept in base 2: multiplied by log2(e)
LOG2E = tl.constexpr(math.log2(math.e)) if triton else None
# Of fp32 inputs alone: three products of tf32 are as exact as fp32 needs, on the matrix units
PRECISION = tl.constexpr("ieee" if INTERPRET else "tf32x3") if triton else None
jit = triton.jit if triton else (lambda fn=None, **_: fn or (lambda fn: fn))


@jit
def _sequence_of(pid, cu_ptr, n_seqs, BLOCK_Q: tl.constexpr):
    """The sequence that tile pid is of, its first query there, its first row and how many it has.

    Sequence r owns the tiles cu[r] // BLOCK_Q + r and on: room for all its rows, whatever they are,
    so that the grid depends on shapes alone. A tile past the end has no rows."""
    seq, end = pid * 0, n_seqs
    while end - seq > 1:
        middle = (seq + end) // 2
        before = tl.load(cu_ptr + middle) // BLOCK_Q + middle <= pid
        seq, end = tl.where(before, middle, seq), tl.where(before, end, middle)
    start = tl.load(cu_ptr + seq)
    n = tl.load(cu_ptr + seq + 1) - start
    return seq, (pid - start // BLOCK_Q - seq) * BLOCK_Q, start, n


@jit
def _load_keys(ptr, slots, offs_d, seen, scale_ptr, DIM: tl.constexpr, CHECK: tl.constexpr, like):
    """Rows `slots` (BLOCK_N, 1) of a head's blocks, in the dtype of `like`; 0 where not seen."""
    if CHECK or DIM < offs_d.shape[1]:
        x = tl.load(ptr + slots + offs_d, mask=seen & (offs_d < DIM), other=0.0)
    else:
        x = tl.load(ptr + slots + offs_d)
    if scale_ptr is not None:
        x = x.to(tl.float32)  # by way of fp32: not every narrow type turns into every other
    return x.to(like.dtype)


@jit(do_not_specialize=["n_seqs", "width"])
def _paged_kernel(
    q_ptr,  # (N, Hq, D)
    k_ptr, v_ptr,  # (blocks, PAGE, Hkv, D) and DV; v None: the first BLOCK_D columns of k
    k_scale_ptr, v_scale_ptr,  # (blocks, PAGE, Hkv) fp32; None: not quantized
    o_ptr, lse_ptr,  # (SPLITS, N, Hq, DV), (SPLITS, N, Hq) fp32
    table_ptr, cu_ptr, lengths_ptr,  # (R, width), (R + 1,), (R,) int32
    slopes_ptr, sinks_ptr, scale, softcap, window,  # None: not in the kernel at all
    q_strides, k_strides, v_strides, scale_strides, n_seqs, width,
    D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, WIDE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """o = softmax(logits(q k^T)) v, lse = log sum exp. Grid (query tiles * SPLITS, head tiles).

    The rows of a tile are BLOCK_Q queries of BLOCK_H heads that read one key head: a decode step
    reads a key once for all of them. A tile of keys is BLOCK_N wide, whatever PAGE is: each key's
    block is looked up. SPLITS programs share the keys of a tile of queries. D is BLOCK_D + BLOCK_R
    where it is the sum of two powers of two (192, 576). WIDE: a layer has 2^31 numbers or more.
    """
    HEAD_TILES: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    n_heads = tl.num_programs(1) // HEAD_TILES * GROUP
    pid, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    seq, first_t, q_start, q_len = _sequence_of(pid, cu_ptr, n_seqs, BLOCK_Q)
    if first_t >= q_len:
        return
    k_len = tl.load(lengths_ptr + seq)
    kv_head = tl.program_id(1) // HEAD_TILES
    row = tl.arange(0, BLOCK_Q * BLOCK_H)
    t = first_t + row // BLOCK_H
    in_group = tl.program_id(1) % HEAD_TILES * BLOCK_H + row % BLOCK_H
    head = kv_head * GROUP + in_group
    valid = (t < q_len) & (in_group < GROUP)
    i = (k_len - q_len + t)[:, None]

    q_ptrs = q_ptr + (q_start + t).to(tl.int64) * q_strides[0] + head * q_strides[1]
    offs_d, offs_v = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    q_seen = valid[:, None]
    q = tl.load(q_ptrs[:, None] + offs_d, mask=q_seen & (offs_d < D), other=0.0)
    if BLOCK_R:
        offs_r = tl.arange(0, BLOCK_R)[None, :]
        q_rest = tl.load(q_ptrs[:, None] + BLOCK_D + offs_r, mask=q_seen, other=0.0)
    kv_head = kv_head.to(tl.int64)
    k_ptr += kv_head * k_strides[2]
    if v_ptr is not None:
        v_ptr += kv_head * v_strides[2]
    if k_scale_ptr is not None:
        k_scale_ptr += kv_head * scale_strides[2]
    if v_scale_ptr is not None:
        v_scale_ptr += kv_head * scale_strides[2]
    table_ptr += seq.to(tl.int64) * width

    m_i = tl.full((BLOCK_Q * BLOCK_H,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_Q * BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_Q * BLOCK_H, BLOCK_DV), tl.float32)
    if sinks_ptr is not None and split == 0:  # a logit already seen, once
        m_i = tl.load(sinks_ptr + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
        l_i += 1.0
    slope = 0.0
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + head, mask=valid, other=0.0)[:, None] * LOG2E
    # tiles of keys: [first, inner) the window's edge is in, [inner, outer) whole, [outer, last) the
    # diagonal or the end
    i_first = k_len - q_len + first_t
    i_last = tl.minimum(i_first + BLOCK_Q, k_len) - 1
    first, inner, last = 0, 0, tl.cdiv(i_last + 1, BLOCK_N)
    if window is not None:
        first = tl.maximum(i_first - window + 1, 0) // BLOCK_N
        inner = tl.minimum(tl.cdiv(tl.maximum(i_last - window + 1, 0), BLOCK_N), last)
    outer = tl.maximum(inner, (i_first + 1) // BLOCK_N)
    if SPLITS > 1:
        share = tl.cdiv(last - first, SPLITS)
        first += split * share
        last = tl.maximum(first, tl.minimum(last, first + share))
        inner = tl.minimum(tl.maximum(inner, first), last)
        outer = tl.minimum(tl.maximum(outer, inner), last)
    for phase in tl.static_range(3):
        if phase != 0 or window is not None:
            bounds = (first, inner, outer, last)
            for n in range(bounds[phase], bounds[phase + 1]):
                j = n * BLOCK_N + tl.arange(0, BLOCK_N)
                held = j < k_len
                seen_k = held[:, None]
                if phase == 1:
                    block = tl.load(table_ptr + j // PAGE)
                else:
                    block = tl.load(table_ptr + j // PAGE, mask=held, other=0)
                if WIDE:
                    block = block.to(tl.int64)
                at = j % PAGE
                slots = (block * k_strides[0] + at * k_strides[1])[:, None]
                CHECK: tl.constexpr = phase != 1
                k = _load_keys(k_ptr, slots, offs_d, seen_k, k_scale_ptr, D, CHECK, q)
                s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                if BLOCK_R:
                    k_rest = _load_keys(
                        k_ptr + BLOCK_D, slots, offs_r, seen_k, k_scale_ptr, BLOCK_R, CHECK, q
                    )
                    s = tl.dot(q_rest, tl.trans(k_rest), s, input_precision=PRECISION)
                if k_scale_ptr is not None:
                    scale_slots = block * scale_strides[0] + at * scale_strides[1]
                    k_scale = tl.load(k_scale_ptr + scale_slots, mask=held, other=0.0)
                    s *= k_scale[None, :]
                if softcap is None:
                    s *= scale * LOG2E
                else:
                    s = 1 - 2 / (1 + tl.exp2(s * (scale / softcap * 2 * LOG2E)))
                    s *= softcap * LOG2E
                j = j[None, :]
                if slopes_ptr is not None:
                    s -= slope * (i - j)
                if phase != 1:
                    seen = j <= i
                    if window is not None:
                        seen = seen & (i - j < window)
                    s = tl.where(seen, s, float("-inf"))

                m_new = tl.maximum(m_i, tl.max(s, 1))
                base = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that saw nothing so far
                p = tl.exp2(s - base[:, None])
                alpha = tl.exp2(m_i - base)
                acc *= alpha[:, None]
                l_i = l_i * alpha + tl.sum(p, 1)
                m_i = m_new
                if v_ptr is None:
                    v = k
                    if k_scale_ptr is not None:
                        p *= k_scale[None, :]
                else:
                    v_slots = (block * v_strides[0] + at * v_strides[1])[:, None]
                    v = _load_keys(v_ptr, v_slots, offs_v, seen_k, v_scale_ptr, DV, CHECK, q)
                    if v_scale_ptr is not None:
                        v_scale = tl.load(v_scale_ptr + scale_slots, mask=held, other=0.0)
                        p *= v_scale[None, :]
                acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)

    total = tl.where(l_i == 0, 1.0, l_i)
    place = ((split * tl.load(cu_ptr + n_seqs) + q_start + t).to(tl.int64)) * n_heads + head
    o = (acc / total[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + place[:, None] * DV + offs_v, o, mask=q_seen & (offs_v < DV))
    lse = tl.where(l_i == 0, float("-inf"), (m_i + tl.log2(total)) / LOG2E)
    tl.store(lse_ptr + place, lse, mask=valid)


@jit
def _combine_kernel(
    o_parts_ptr, lse_parts_ptr,  # (SPLITS, N, Hq, DV) fp32, (SPLITS, N, Hq) fp32
    o_ptr, lse_ptr, cu_ptr, n_seqs, DV: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """lse = log sum of exp of the splits', o = their sum by weight. Grid (N, Hq)."""
    n_rows = tl.load(cu_ptr + n_seqs)
    if tl.program_id(0) >= n_rows:
        return
    at = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_DV)
    parts = s.to(tl.int64) * n_rows * tl.num_programs(1) + at
    lse = tl.load(lse_parts_ptr + parts, mask=s < SPLITS, other=float("-inf"))
    top = tl.max(lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    w = tl.exp2((lse - top) * LOG2E)
    total = tl.sum(w, 0)
    seen = (s < SPLITS)[:, None] & (d < DV)[None, :]
    o = tl.load(o_parts_ptr + parts[:, None] * DV + d[None, :], mask=seen, other=0.0)
    o = tl.sum(w[:, None] * o, 0) / tl.where(total == 0, 1.0, total)
    tl.store(o_ptr + at * DV + d, o.to(o_ptr.dtype.element_ty), mask=d < DV)
    tl.store(lse_ptr + at, top + tl.log2(total) / LOG2E)


# By head dim, up to the key: keys of a tile and num_stages; rows of it and num_warps where all
# sequences decode, and where some do not.
CONFIGS: dict[int, tuple[int, int, tuple[int, int], tuple[int, int]]] = {
    128: (64, 3, (16, 4), (128, 8)),
    256: (32, 3, (16, 4), (64, 8)),
    1024: (32, 2, (16, 8), (32, 8)),
}


def _power(n: int) -> int:
    """The power of two from n on, and at least what a matrix unit takes."""
    return max(16, 1 << (n - 1).bit_length())


def _split_dim(D: int) -> tuple[int, int]:
    """BLOCK_D and BLOCK_R: 192 = 128 + 64, 576 = 512 + 64; or one power of two around D."""
    low = 1 << (D.bit_length() - 1)
    rest = D - low
    return (low, rest) if rest >= 16 and rest & (rest - 1) == 0 else (_power(D), 0)


@lru_cache
def _processors(index: int | None) -> int:
    return 132 if index is None else torch.cuda.get_device_properties(index).multi_processor_count


def _launch(q: Tensor, p: _Pages, rules: _Rules, n_splits: int) -> tuple[Tensor, Tensor]:
    """Launch the kernel. Everything here follows from shapes, so that a captured launch stays
    right whatever the tables and lengths are when it is replayed."""
    (N, Hq, D), (blocks, page, Hkv, _), R = q.shape, p.k.shape, len(p.lengths)
    DV, (BLOCK_D, BLOCK_R) = p.latent_dim or p.v.shape[3], _split_dim(D)
    v = p.k[..., :DV] if p.v is None and BLOCK_D != DV else p.v
    v_scale = p.k_scale if p.v is None and v is not None else p.v_scale
    BLOCK_DV = BLOCK_D if v is None else _power(DV)
    widest = max(BLOCK_D + BLOCK_R, BLOCK_DV)
    BLOCK_N, stages, few, many = CONFIGS[min(d for d in CONFIGS if d >= widest)]
    rows, warps = few if N <= R and Hq // Hkv <= few[0] else many
    if q.element_size() == 4:
        rows, stages = min(rows, 32), 1
    BLOCK_H = min(1 << (Hq // Hkv - 1).bit_length(), rows)
    BLOCK_Q = rows // BLOCK_H
    head_tiles = Hkv * -(-Hq // Hkv // BLOCK_H)
    tiles = N // BLOCK_Q + R
    if not n_splits:  # enough programs for two on each processor, but 256 keys or more in each
        wanted = -(-2 * _processors(q.device.index) // (tiles * head_tiles))
        most = p.block_table.shape[1] * page // 256
        n_splits = 1 << (max(1, min(wanted, most, 64)).bit_length() - 1)  # few kernels to compile
    o, lse = q.new_zeros(N, Hq, DV), q.new_full((N, Hq), -math.inf, dtype=torch.float32)
    o_parts, lse_parts = o, lse
    if n_splits > 1:
        o_parts = torch.empty((n_splits, N, Hq, DV), device=q.device)
        lse_parts = torch.empty((n_splits, N, Hq), device=q.device)
    cu = p.cu_seqlens
    _paged_kernel[tiles * n_splits, head_tiles](
        q, p.k, v, p.k_scale, v_scale, o_parts, lse_parts, p.block_table, cu, p.lengths,
        rules.alibi_slopes, rules.sinks, rules.scale, rules.softcap, rules.window, q.stride(),
        p.k.stride(), (p.k if v is None else v).stride(),
        (0, 0, 0) if p.k_scale is None else p.k_scale.stride(), R, p.block_table.shape[1], D=D,
        DV=DV, GROUP=Hq // Hkv, PAGE=page, SPLITS=n_splits, WIDE=p.k.stride(0) * blocks >= 2**31,
        BLOCK_Q=BLOCK_Q, BLOCK_H=BLOCK_H, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D, BLOCK_R=BLOCK_R,
        BLOCK_DV=BLOCK_DV, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if n_splits > 1:
        _combine_kernel[N, Hq](
            o_parts, lse_parts, o, lse, cu, R, DV=DV, SPLITS=n_splits, BLOCK_S=_power(n_splits),
            BLOCK_DV=_power(DV),
        )  # fmt: skip
    return o, lse


@torch.library.custom_op(
    "sheaf::paged_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor? v, Tensor? k_scale, Tensor? v_scale, Tensor block_table, "
    "Tensor cu_seqlens, Tensor lengths, int? latent_dim, float scale, int? window, float? softcap, "
    "Tensor? alibi_slopes, Tensor? sinks, int n_splits, bool return_lse) -> (Tensor, Tensor)",
)
def _paged_op(q, *args):
    """A step that is compiled calls this; without it the compiler would look inside."""
    pages, rules, (n_splits, return_lse) = _Pages(*args[:8]), _Rules(*args[8:13]), args[13:]
    if not _kernel(q):
        return _torch(q, pages, rules, return_lse)
    with torch.cuda.device_of(q):
        return _launch(q, pages, rules, n_splits)


@_paged_op.register_fake
def _(q, k, v, *args):
    DV = k.shape[3] if v is None else v.shape[3]
    DV = args[5] or DV
    return q.new_empty(*q.shape[:2], DV), q.new_empty(q.shape[:2], dtype=torch.float32)


def _torch(q: Tensor, p: _Pages, rules: _Rules, return_lse: bool) -> tuple[Tensor, Tensor]:
    """Without the kernel; torch's own keeps its lse to itself."""
    if return_lse:
        return _reference(q, p, rules)
    return _plain(q, p, rules), q.new_empty(q.shape[:2], dtype=torch.float32)


def _kernel(q: Tensor) -> bool:
    """Whether the Triton kernel can take this."""
    runs = triton is not None and (q.is_cuda or INTERPRET) and q.dtype != torch.float64
    return runs and not (INTERPRET and q.dtype == torch.bfloat16)  # which it gets wrong


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor | None, block_table: Tensor, cu_seqlens: Tensor,
    lengths: Tensor, *, scale: float | None = None, window: int | None = None,
    softcap: float | None = None, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, latent_dim: int | None = None,
    n_splits: int | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Causal attention of new tokens, flat, to the cached tokens of their sequences.

    q (N, Hq, D): sequence r has rows cu_seqlens[r] to cu_seqlens[r + 1], one that decodes, a chunk
    of a prompt, or none; they are the last of its lengths[r] tokens, whose keys are in the cache.
    k (blocks, block_size, Hkv, D), v (blocks, block_size, Hkv, Dv), of any strides (heads outermost
    is fastest); token p of sequence r is at k[block_table[r, p // block_size], p % block_size].
    block_table (R, W), cu_seqlens (R + 1,), lengths (R,): int32, on q's device. With latent_dim
    (absorbed latent attention) v is None: the values are the first latent_dim columns of k.
    k_scale, v_scale (blocks, block_size, Hkv) fp32 multiply what is stored (int8, fp8). scale: D **
    -0.5 if None; window: keys with i - j < window; softcap * tanh(. / softcap), then - alibi_slopes
    (Hq,) * (i - j); sinks (Hq,): one more logit, without a value.

    -> o (N, Hq, Dv) in q's dtype, and with return_lse (N, Hq) fp32, its natural log. Rows of no
    sequence are 0, their lse -inf. The keys of a row are split over n_splits programs; None: enough
    to fill the GPU. On CUDA nothing is read on the host, and launches follow from shapes alone.
    ValueError names what does not fit.
    """
    q, p, rules = _checked(
        q, k, v, block_table, cu_seqlens, lengths, k_scale, v_scale, latent_dim, scale, window,
        softcap, alibi_slopes, sinks,
    )  # fmt: skip
    _check(n_splits is None or n_splits > 0, f"n_splits must be positive, not {n_splits}")
    if _kernel(q) or torch.compiler.is_compiling():
        o, lse = _paged_op(q, *p, *rules, n_splits or 0, return_lse)
    else:
        o, lse = _torch(q, p, rules, return_lse)
    return (o, lse) if return_lse else o


def paged_attention_reference(
    q: Tensor, k: Tensor, v: Tensor | None, block_table: Tensor, cu_seqlens: Tensor,
    lengths: Tensor, *, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    latent_dim: int | None = None, return_lse: bool = False, **rules: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """paged_attention by its definition: sequence by sequence, all scores at once."""
    names = ("scale", "window", "softcap", "alibi_slopes", "sinks")
    given = (k_scale, v_scale, latent_dim, *(rules.pop(name, None) for name in names))
    _check(not rules or {*rules} == {"n_splits"}, f"no such argument: {', '.join(rules)}")
    o, lse = _reference(*_checked(q, k, v, block_table, cu_seqlens, lengths, *given))
    return (o, lse) if return_lse else o


def _checked(
    q, k, v, block_table, cu_seqlens, lengths, k_scale, v_scale, latent_dim, scale, window, softcap,
    slopes, sinks,
) -> tuple[Tensor, _Pages, _Rules]:  # fmt: skip
    """The arguments of a call, or a ValueError that names the one which does not fit."""
    shape = lambda x: None if x is None else tuple(x.shape)
    ok = q.dim() == 3 and k.dim() == 4
    _check(ok, f"q {shape(q)} must be (N, Hq, D), k {shape(k)} (blocks, block_size, Hkv, D)")
    (_, Hq, D), R = q.shape, len(lengths)
    _check(k.shape[3] == D and Hq % k.shape[2] == 0, f"k {shape(k)} does not fit q {shape(q)}")
    _check((v is None) == (latent_dim is not None), "v must be given, or latent_dim instead of it")
    _check(v is None or v.shape[:3] == k.shape[:3], f"v {shape(v)} does not fit k {shape(k)}")
    ok = latent_dim is None or 0 < latent_dim <= D
    _check(ok, f"latent_dim must be from 1 to k's {D}, not {latent_dim}")
    for name, x, wanted in (
        ("cu_seqlens", cu_seqlens, (R + 1,)),
        ("block_table", block_table, (R, *block_table.shape[1:2])),
        ("k_scale", k_scale, k.shape[:3]),
        ("v_scale", v_scale, k.shape[:3]),
        ("alibi_slopes", slopes, (Hq,)),
        ("sinks", sinks, (Hq,)),
    ):
        _check(x is None or x.shape == wanted, f"{name} must be {tuple(wanted)}, not {shape(x)}")
    _check((k_scale is None) == (v_scale is None) or v is None, "k_scale and v_scale go together")
    for name, x in (("window", window), ("softcap", softcap)):
        _check(x is None or x > 0, f"{name} must be positive, not {x}")
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    v = v if v is None or v.stride(-1) == 1 else v.contiguous()
    if v_scale is not None and v_scale.stride() != k_scale.stride():
        k_scale, v_scale = k_scale.contiguous(), v_scale.contiguous()
    integers = (x.to(torch.int32).contiguous() for x in (block_table, cu_seqlens, lengths))
    slopes, sinks = (None if x is None else x.float().contiguous() for x in (slopes, sinks))
    scale, softcap = D**-0.5 if scale is None else float(scale), softcap and float(softcap)
    pages = _Pages(k, v, k_scale, v_scale, *integers, latent_dim)
    return q, pages, _Rules(scale, window, softcap, slopes, sinks)


# --------------------------------------------------------------------------------------------------
# The engine
# --------------------------------------------------------------------------------------------------


UNKNOWN = (
    "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "min_new_tokens",
)  # fmt: skip


class Sampler:
    """The Engine's own: greedy, temperature, top-k, top-p. What a sequence draws depends on its
    seed and on how many tokens it has, and on no other sequence."""

    def check(self, params: SamplingParams) -> None:
        """ValueError names a field that is out of range, or that this sampler does not know."""
        number = lambda v: isinstance(v, (int, float)) and not isinstance(v, bool)
        for name, good, wanted in (
            ("temperature", lambda v: number(v) and 0 <= v < math.inf, "0 (greedy) or more"),
            ("top_k", lambda v: _is_whole(v) and v >= 0, "a whole number, 0 (all) or more"),
            ("top_p", lambda v: number(v) and 0 < v <= 1, "more than 0 and at most 1"),
        ):
            value = getattr(params, name)
            _check(good(value), f"{name} must be {wanted}, not {value!r}")
        for name in UNKNOWN:
            value = getattr(params, name)
            known = value == getattr(SamplingParams, name)
            _check(known, f"{name} {value!r} needs a sampler that knows it, handed to the Engine")

    def __call__(self, logits: Tensor, sequences: list[Sequence]) -> Tensor:
        """logits (R, V) -> ids (R,); -1 where the logits are not finite."""
        ids = logits.argmax(-1)
        ids = ids.where(logits.gather(-1, ids[:, None])[:, 0].isfinite(), -1)
        for row, seq in enumerate(sequences):
            if seq.params.temperature > 0 and int(ids[row]) >= 0:
                ids[row] = self._draw(logits[row].float(), seq)
        return ids

    def _draw(self, x: Tensor, seq: Sequence) -> Tensor:
        k, top_p = seq.params.top_k, seq.params.top_p
        if 0 < k < len(x):
            x = x.masked_fill(x < x.topk(k).values[-1], -math.inf)
        x = (x - x.max()) / seq.params.temperature
        p, ids = x.softmax(-1).sort(descending=True, stable=True)
        p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0) if top_p < 1 else p
        rng = torch.Generator().manual_seed(hash((seq.seed, len(seq.output))) % 2**63)
        noise = torch.empty(len(x)).exponential_(generator=rng).to(x.device)
        return ids[(p / noise.clamp(min=1e-30)).argmax()]


Draft = tuple[list[int], Tensor | None]  # tokens, the (k, V) probabilities they were drawn with
NO_DRAFT: Draft = [], None


class Engine:
    """Many requests on one model, batched anew at every step.

        engine = Engine(model, num_blocks=1024)
        id = engine.add(prompt_ids, SamplingParams(temperature=0))
        while engine.unfinished:
            for output in engine.step():
                ...

    What it asks of a model stands at the head of this file. It changes one thing in it: latent
    attention stays absorbed, however many tokens a call has.
    """

    def __init__(
        self,
        model: Any,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_batch_tokens: int = 512,
        max_running: int | None = None,
        policy: Callable[[Sequence], Any] = first_come,
        swap: bool = False,
        prefix_cache: bool = True,
        kv_dtype: str | None = None,
        sampler: Any = None,
        drafter: Any = None,
        verifier: Callable[[Tensor, list[Sequence], list[Draft]], list[list[int]]] | None = None,
        speculate_k: Any = 4,
        listen: Callable[[Sequence], Any] | None = None,
        eos_ids: Iterable[int] | None = None,
        compile: bool = False,
        static: bool | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """max_batch_tokens: the budget of a step, and so the longest a next token may wait.
        max_running: samples that run at once, 64 if the budget allows. policy: see Scheduler.
        swap: who gives way has its KV kept on the host. kv_dtype: see PagedKVCache.

        sampler: has check(params), which raises ValueError, and __call__(logits (R, V), sequences)
        -> ids (R,), -1 where there is none to draw. listen: gives for a sequence an object with
        push(token), end(reason), and finish, a reason once its text is complete. eos_ids: None for
        those of model.config. static: pad steps to a few shapes, and on CUDA replay them as graphs
        (the default there); with `compile` they are compiled too.

        drafter: drafter(tokens, k) -> (up to k ids that may come next, the (k, V) probabilities
        they were drawn with; None: they are certain). It may have many(sequences, contexts, ks) ->
        those of each; observe(seq, start, hidden (t, C)), told of all tokens that are run and kept,
        from position start on: a view, to be copied if it is to last; forget(seq) at the end. What
        the prefix cache has is not run; what is preempted may be again. speculate_k: tokens to
        draft, or an object: choose(sequences) -> k of each that decodes, observe(sequences,
        proposed, accepted, tokens, seconds, draft_seconds) what came of it, of all in the step,
        and perhaps forget.
        verifier(logits (M, V), sequences, drafts): has for each with d drafted tokens d + 1 rows,
        and gives its new ones: those accepted and one more, -1 where there is none to draw."""
        weight = next(model.parameters())
        rope = getattr(model.config, "rope_scaling", None) or {}
        _check(
            rope.get("rope_type") != "dynamic",
            "rope_scaling 'dynamic' turns all keys by the longest of a batch: such a model cannot "
            "be batched; give config.json another rope_type",
        )
        self.model, self.clock, self.listen = model, clock, listen
        self.allocator = BlockAllocator(num_blocks, block_size, prefix_cache)
        self.cache = PagedKVCache(
            model.config, num_blocks, block_size, weight.dtype, weight.device, kv_dtype
        )
        max_running = min(64, max_batch_tokens) if max_running is None else max_running
        self.scheduler = Scheduler(self.allocator, max_batch_tokens, max_running, policy, swap)
        self.capacity = min(num_blocks * block_size, getattr(model.config, "context", math.inf))
        self.sampler = Sampler() if sampler is None else sampler
        self.drafter, self.verifier = drafter, self._verify if verifier is None else verifier
        if _is_whole(speculate_k) and speculate_k >= 0:
            fixed = lambda sequences, k=speculate_k: [k] * len(sequences)
            speculate_k = SimpleNamespace(choose=fixed, observe=lambda *_: None)
        self.speculate_k, ok = speculate_k, hasattr(speculate_k, "choose")
        _check(ok, f"speculate_k must be 0 or more, or an object that chooses, not {speculate_k!r}")
        self.eos = set(model.config.eos_ids if eos_ids is None else eos_ids)
        modules = list(model.modules())
        if static is None:  # a loop over experts asks the host how many tokens each has
            static = weight.is_cuda and _kernel(weight)
            static = compile or (static and not any(hasattr(m, "experts") for m in modules))
        width = -(-self.capacity // self.allocator.block_size)
        self.shapes = Shapes(self._hidden, width, compile) if static else None
        for module in modules:  # since a step mixes prompts with decoding
            if hasattr(module, "absorb_up_to"):
                module.absorb_up_to = math.inf
        self.outputs: dict[Any, Output] = {}  # of unfinished requests
        self.sequences: dict[Any, list[Sequence]] = {}
        # new tokens on their way to sequence and listener: where in it, log-probabilities, when
        self.untold: deque[tuple[Sequence, int, int, Tensor | None, float]] = deque()
        self.grown: dict[Any, Output] = {}  # outputs, on their way to the caller of step
        self.n_arrivals = 0
        self.record = Record()

    # ---- requests ----

    def add(
        self,
        prompt_ids: Iterable[int],
        params: SamplingParams = SamplingParams(),
        *,
        id: Any = None,
        priority: int = 0,
    ) -> Any:
        """Let a request wait for its turn; its id. ValueError says why it cannot be served."""
        ok = isinstance(prompt_ids, Iterable)
        _check(ok, f"the prompt must be a list of token ids, not {prompt_ids!r}")
        prompt = list(prompt_ids)
        ok = isinstance(params, SamplingParams)
        _check(ok, f"params must be SamplingParams, not {params!r}")
        self._check_request(prompt, params)
        _check(_is_whole(priority), f"priority must be a whole number, not {priority!r}")
        _check(isinstance(id, Hashable), f"id must be one that a dict can hold, not {id!r}")
        if id is None:
            id = self.n_arrivals
            while id in self.outputs:
                id += 1
        _check(id not in self.outputs, f"id {id!r} is in use by a request that is not finished")
        samples = [Sample() for _ in range(params.n)]
        output = Output(id, prompt, samples, added=self.clock())
        seq = Sequence(
            list(prompt), len(prompt), params, output, priority=priority, arrival=self.n_arrivals,
            width=params.n,
        )  # fmt: skip
        seq.listener = self.listen(seq) if self.listen else None
        self.n_arrivals += 1
        self.outputs[id], self.sequences[id] = output, [seq]
        self.scheduler.add(seq)
        return id

    def _check_request(self, prompt: list[int], params: SamplingParams) -> None:
        V, whole = self.model.config.vocab_size, len(prompt) + params.max_new_tokens
        _check(prompt, "the prompt has no tokens")
        for t in prompt:
            ok = _is_whole(t) and 0 <= t < V
            _check(ok, f"the prompt has token id {t!r}, but the vocabulary ends at {V - 1}")
        asked = f"the prompt's {len(prompt)} tokens and max_new_tokens {params.max_new_tokens}"
        context = getattr(self.model.config, "context", math.inf)
        _check(whole <= context, f"{asked} pass the model's context of {context}; ask for less")
        cache = len(self.allocator.refs) * self.allocator.block_size
        _check(whole <= cache, f"{asked} are more than the whole cache of {cache}; ask for less")
        most = self.scheduler.max_running
        _check(params.n <= most, f"n must be at most max_running ({most}), not {params.n}")
        _check((params.logprobs or 0) <= V, f"logprobs must be at most {V}, not {params.logprobs}")
        ok = not params.stop or self.listen is not None
        _check(ok, "stop needs a listener: the Engine sees tokens, not text")
        self.sampler.check(params)

    def abort(self, id: Any) -> Output:
        """End a request where it is. ValueError if there is none of that id."""
        _check(id in self.outputs, f"id {id!r} is of no unfinished request")
        output = self.outputs[id]
        for seq in list(self.sequences[id]):
            self._end(seq, "abort")
        for sample in output.samples:  # those that had not forked yet
            sample.finish_reason = sample.finish_reason or "abort"
        return output

    @property
    def unfinished(self) -> int:
        """Requests that are not finished."""
        return len(self.outputs)

    @property
    def n_waiting(self) -> int:
        """Sequences that are not running."""
        return len(self.scheduler.waiting)

    def generate(
        self,
        prompts: Iterable[Iterable[int]],
        params: SamplingParams | list[SamplingParams] = SamplingParams(),
    ) -> list[Output]:
        """All prompts to their ends, in their order, with params for all or for each. One that
        cannot be served has an error."""
        prompts = list(prompts)
        each = params if isinstance(params, (list, tuple)) else [params] * len(prompts)
        _check(len(each) == len(prompts), f"{len(each)} params for {len(prompts)} prompts")
        outputs = []
        for prompt, p in zip(prompts, each):
            try:
                outputs.append(self.outputs[self.add(prompt, p)])
            except ValueError as e:
                outputs.append(Output(None, prompt, error=str(e)))
        for output in outputs:
            while not output.finished:
                self.step()
        return outputs

    def stream(self, id: Any) -> Iterator[int]:
        """The tokens of a request (its sample 0) as they come; runs the engine when it must."""
        _check(id in self.outputs, f"id {id!r} is of no unfinished request")
        output, seen = self.outputs[id], 0
        while seen < len(output.token_ids) or not output.finished:
            if seen == len(output.token_ids):
                self.step()
            else:
                yield output.token_ids[seen]
                seen += 1

    # ---- a step ----

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Run the model once; the outputs that grew or ended since the last step. Whatever model,
        sampler, drafter or policy raise, or a key pressed while the model runs, nothing is lost:
        the next step goes on."""
        self._deliver()
        if self.outputs:
            self._step()
        grown, self.grown = self.grown, {}
        return list(grown.values())

    def _step(self) -> None:
        plan, start = Plan(), self.clock()
        decoding = self._ask()
        try:
            self.scheduler.schedule(plan)
            assert plan.run, "nothing can run: a bug in the policy or the scheduler"
            self._move(plan)  # first: a drafter may write into the blocks that the plan gives
            drafts, draft_seconds = self._draft(plan)
            hidden = self._run(plan, drafts)
        except BaseException:
            self.scheduler.undo(plan)
            raise
        self.scheduler.commit(plan)
        given: dict[Sequence, Draft] = {}  # who draws, and what was drafted
        rows, row = [], 0  # from which hidden states, and whose each is
        for seq, n in plan.run:
            draft = drafts.get(seq, NO_DRAFT)
            row += n + len(draft[0])
            seq.request.times = seq.request.times or [start]
            if seq.computed == len(seq.tokens):
                for sample in (seq, *self._forks(seq)):
                    given[sample] = draft
                    rows += [(i, sample) for i in range(row - 1 - len(draft[0]), row)]
        last = torch.tensor([i for i, _ in rows], dtype=torch.long, device=hidden.device)
        logits = self.model.head(hidden[last])
        logprobs = self._logprobs(logits, [seq for _, seq in rows])  # a sampler may write on them
        runs, first = self._new_tokens(logits, given), 0
        now = self.clock()
        for (seq, draft), run in zip(given.items(), runs):
            self.scheduler.accept(seq, len(run) - 1)
            new = zip(count(len(seq.tokens)), run, logprobs[first : first + len(run)])
            self.untold.extend((seq, *x, now) for x in new)
            first += len(draft[0]) + 1
        counts = {s: (len(d[0]), len(run) - 1) for (s, d), run in zip(given.items(), runs)}
        if self.drafter is not None:
            self._observe(plan, hidden, counts)
        ran = [seq for seq in decoding if seq in counts]
        if ran:
            results = map(list, zip(*(counts[seq] for seq in ran)))
            self.speculate_k.observe(ran, *results, row, now - start, draft_seconds)
        self._deliver()
        self.record.step(now - start, row, counts.values(), self._used())

    # ---- tokens drafted and verified ----

    def _ask(self) -> list[Sequence]:
        """Who decodes; each knows now how many tokens it would have drafted."""
        running = self.scheduler.running if self.drafter is not None else []
        decoding = [seq for seq in running if seq.remaining <= 1 and seq.width == 1]
        if decoding:
            for seq, k in zip(decoding, self.speculate_k.choose(decoding), strict=True):
                seq.wants = k
        return decoding

    def _draft(self, plan: Plan) -> tuple[dict[Sequence, Draft], float]:
        """What is proposed to those that were granted it, and the seconds that took."""
        if not plan.drafts:
            return {}, 0.0
        ks, start = list(plan.drafts.values()), self.clock()
        one_by_one = lambda _, contexts, ks: [*map(self.drafter, contexts, ks)]
        propose = getattr(self.drafter, "many", one_by_one)
        drafts = propose(list(plan.drafts), [seq.tokens for seq in plan.drafts], ks)
        seconds, V = self.clock() - start, self.model.config.vocab_size
        _check(len(drafts) == len(ks), f"drafter: {len(drafts)} drafts for {len(ks)} sequences")
        for (tokens, _), k in zip(drafts, ks):
            ok = len(tokens) <= k and all(_is_whole(t) and 0 <= t < V for t in tokens)
            _check(ok, f"drafter: asked for up to {k} token ids below {V}, it gave {tokens!r}")
        return {seq: draft for seq, draft in zip(plan.drafts, drafts) if draft[0]}, seconds

    def _new_tokens(self, logits: Tensor, given: dict[Sequence, Draft]) -> list[list[int]]:
        """What comes next in each: of its draft what is right, and one more."""
        heads, drafts = list(given), list(given.values())
        if not any(tokens for tokens, _ in drafts):
            return [[id] for id in self.sampler(logits, heads).tolist()] if heads else []
        runs = self.verifier(logits, heads, drafts)
        _check(len(runs) == len(heads), f"verifier: {len(runs)} answers for {len(heads)} sequences")
        for run, (tokens, _) in zip(runs, drafts):
            n = len(run) - 1
            ok = 0 <= n <= len(tokens) and run[:n] == tokens[:n]
            _check(ok, f"verifier: asked about {tokens!r} and one token more, it gave {run!r}")
        return runs

    def _verify(self, logits: Tensor, seqs: list[Sequence], drafts: list[Draft]) -> list[list[int]]:
        """Draw as without a draft, and go on for as long as what is drawn was drafted: no token is
        another than it would have been. A sampler looks at what a sequence has, so it grows
        meanwhile."""
        first = [0, *accumulate(len(tokens) + 1 for tokens, _ in drafts)]
        runs, lengths = [[] for _ in seqs], [len(seq.tokens) for seq in seqs]
        todo = list(range(len(seqs)))
        try:
            while todo:
                at = [first[i] + len(runs[i]) for i in todo]
                ids = self.sampler(logits[at], [seqs[i] for i in todo]).tolist()
                for i, id in zip(todo, ids):
                    runs[i].append(id)
                todo = [i for i in todo if runs[i] == drafts[i][0][: len(runs[i])]]
                for i in todo:
                    seqs[i].tokens.append(runs[i][-1])
        finally:
            for seq, length in zip(seqs, lengths):
                del seq.tokens[length:]
        return runs

    def _observe(self, plan: Plan, hidden: Tensor, counts: dict[Sequence, tuple[int, int]]) -> None:
        """Show the drafter the hidden states of all tokens that were run and stay."""
        observe, row = getattr(self.drafter, "observe", lambda *_: None), 0
        for seq, n in plan.run:
            proposed, accepted = counts.get(seq, (0, 0))
            if seq.running:  # and was not aborted meanwhile
                start = seq.computed - accepted - n
                observe(seq, start, hidden[row : row + n + accepted])
            row += n + proposed

    # ---- its parts ----

    def _move(self, plan: Plan) -> None:
        """The copies of a plan."""
        for seq, table, n in plan.swap_out:
            seq.host = self.cache.read(table, n)
        self.cache.copy([(source, to) for to, source in plan.copies.items()])
        for seq, first in plan.swap_in:
            self.cache.write(seq.table, first, seq.host)
            seq.host = None

    def _run(self, plan: Plan, drafts: dict[Sequence, Draft]) -> Tensor:
        """The model: hidden states (N, C)."""
        chunks = []
        for seq, n in plan.run:
            tokens = seq.tokens[seq.computed : seq.computed + n]
            tokens += drafts.get(seq, NO_DRAFT)[0]
            chunks.append(Chunk(tokens, seq.computed, seq.table, seq.stored))
        if self.shapes is None:
            return self._hidden(self.cache.step(chunks))
        return self.shapes(self.cache.step(chunks, self._shape(chunks, bool(drafts))))

    def _forks(self, seq: Sequence) -> list[Sequence]:
        """The samples that begin where a prompt ends."""
        forks = []
        while seq.width > 1:
            child = self.scheduler.fork(seq)
            self.sequences[seq.request.id].append(child)
            try:
                child.listener = self.listen(child) if self.listen else None
                forks.append(child)
            except Exception as e:
                self._listener_failed(child, e)
                self._end(child, "error")
        return forks

    def _hidden(self, step: Step) -> Tensor:
        """(N, C)"""
        attend = partial(self.cache.attend, step=step)
        return self.model(step.tokens[None], step.positions[None], attend, return_hidden=True)[0]

    def _shape(self, chunks: list[Chunk], drafted: bool = False) -> tuple[int, int]:
        """(N, R), one of few: N == R if all decode, N == 2 R if there are drafts and few prompts,
        else N > R. Powers of two, as kernels like."""
        n, r = sum(len(c.tokens) for c in chunks), len(chunks)
        power = lambda x: 1 << (x - 1).bit_length()
        if n == r:
            return power(n), power(n)
        most = power(self.scheduler.max_running)
        whole, few = max(64, power(n), 2 * most), power(max(n, 2 * r))
        return (few, few // 2) if drafted and few < whole else (whole, most)

    def _logprobs(self, logits: Tensor, heads: list[Sequence]) -> list[Tensor | None]:
        """(V,) of each row whose sequence asks for them, on the host."""
        found: list[Tensor | None] = [None] * len(heads)
        for row, seq in enumerate(heads):
            if seq.params.logprobs is not None:
                found[row] = logits[row].float().log_softmax(-1).cpu()
        return found

    def _append(self, seq: Sequence, token: int, logp: Tensor | None, now: float) -> None:
        sample = seq.request.samples[seq.index]
        if token >= 0:
            sample.token_ids.append(token)
            self.record.tokens_new += 1
            seq.tokens.append(token)
            seq.request.times += [now] if seq.index == 0 else []
        if token >= 0 and logp is not None:
            best = logp.topk(seq.params.logprobs)
            found = float(logp[token]), best.indices.tolist(), best.values.tolist()
            sample.logprobs.append(found)
        self.grown[seq.request.id] = seq.request

    def _deliver(self) -> None:
        """Append what is new, tell the listeners, and end what is complete: then the rest of its
        new tokens is dropped. A listener may abort requests, its own too, and the keyboard may
        interrupt it: the rest is told at the next step."""
        while self.untold:
            seq, at, token, logp, now = self.untold.popleft()
            if not seq.running or at != len(seq.tokens):
                continue
            self._append(seq, token, logp, now)
            told = True
            try:
                told = token < 0 or self._tell(seq, "push", token)
            finally:
                reason = self._reason(seq, token) if told else "error"
                if reason and seq.running:
                    self._end(seq, reason)

    def _reason(self, seq: Sequence, token: int) -> str | None:
        """Why a sequence ends with this token, if it does."""
        if token < 0:
            seq.request.error = (
                f"the logits after {len(seq.tokens)} tokens are not finite, or all are ruled out"
            )
            self.allocator.forget(b for b in seq.table if self.allocator.refs[b] == 1)
            return "error"
        if seq.listener is not None and seq.listener.finish:
            return seq.listener.finish
        if token in self.eos and not seq.params.ignore_eos:
            return "eos"
        return "length" if len(seq.output) >= seq.params.max_new_tokens else None

    def _end(self, seq: Sequence, reason: str) -> None:
        """A sample is complete; with the last of its samples, its request."""
        output = seq.request
        self.grown[output.id] = output
        self.scheduler.finish(seq)
        output.samples[seq.index].finish_reason = reason
        self.sequences[output.id].remove(seq)
        if not self.sequences[output.id]:
            del self.outputs[output.id], self.sequences[output.id]
            self.record.request(output)
        self._tell(seq, "end", reason)
        self._forget(seq)

    def _forget(self, seq: Sequence) -> None:
        """Tell those who may keep something of a sequence that it is over."""
        for who in (self.drafter, self.speculate_k):
            if hasattr(who, "forget"):
                who.forget(seq)

    def _tell(self, seq: Sequence, what: str, value: Any) -> bool:
        """Call the listener; whether it took it."""
        try:
            if seq.listener is not None:
                getattr(seq.listener, what)(value)
        except Exception as e:
            return self._listener_failed(seq, e)
        return True

    def _listener_failed(self, seq: Sequence, e: Exception) -> bool:
        """That is its own request's error and nobody else's: whatever it raised goes no further."""
        seq.request.error = f"its listener failed: {type(e).__name__}: {e}"
        return False

    # ---- a request on its way to another engine ----

    def take(self, id: Any) -> Parcel:
        """Remove a request that has come to its first token, with the keys of all it has."""
        self._deliver()
        _check(id in self.outputs, f"id {id!r} is of no unfinished request")
        sequences, output = self.sequences.pop(id), self.outputs.pop(id)
        for seq in sequences:
            assert seq.running and seq.remaining == 1, "take what has its first token"
            seq.host, seq.listener = self.cache.read(seq.table, seq.computed), None
            self.scheduler.finish(seq)
            self._forget(seq)
        return Parcel(output, sequences)

    def give(self, parcel: Parcel) -> None:
        """Go on with what another engine, of the same model, took. ValueError as by add."""
        output = parcel.output
        for seq in parcel.sequences:
            self._check_request(seq.tokens[: seq.n_prompt], seq.params)
        _check(output.id not in self.outputs, f"id {output.id!r} is in use")
        self.outputs[output.id], self.sequences[output.id] = output, list(parcel.sequences)
        for seq in parcel.sequences:
            seq.arrival, seq.listener = self.n_arrivals, self.listen(seq) if self.listen else None
            self.scheduler.add(seq)
            told = all([self._tell(seq, "push", token) for token in seq.output])
            reason = self._reason(seq, seq.tokens[-1]) if told else "error"
            if reason:
                self._end(seq, reason)
        self.n_arrivals += 1

    # ---- what it did ----

    def _used(self) -> float:
        """Share of the blocks that are in use."""
        return 1 - self.allocator.n_free / len(self.allocator.refs)

    def stats(self) -> dict[str, float]:
        """Of all so far: seconds, shares and counts."""
        s = self.scheduler
        return self.record.summary() | {
            "cache_used": self._used(),
            "hit_rate": s.n_hit_tokens / max(1, s.n_admitted_tokens),
            "preemptions": s.n_preempted,
        }


class Shapes:
    """A step of the model for each shape that comes: compiled if asked for; on CUDA captured, once,
    as a graph over tensors of its own. Block tables are `width` wide in all of them."""

    def __init__(self, run: Callable[[Step], Tensor], width: int, compile: bool):
        self.run = torch.compile(run, fullgraph=True, dynamic=False) if compile else run
        self.width, self.pool = width, None
        self.captured: dict[tuple[int, int], tuple[Step, Any, Tensor]] = {}

    def __call__(self, step: Step) -> Tensor:
        # each shape is a compilation of the same function; there are about a dozen
        with torch._dynamo.config.patch(recompile_limit=64):
            if not step.tokens.is_cuda:
                return self.run(self._widened(step))
            key = len(step.tokens), len(step.lengths)
            if key not in self.captured:
                self.captured[key] = self._capture(self._widened(step))
        static, graph, out = self.captured[key]
        for mine, new in zip(static, step):  # what a table has beyond is not looked at
            mine[..., : new.shape[-1]].copy_(new)
        graph.replay()
        return out

    def _widened(self, step: Step) -> Step:
        more = self.width - step.block_table.shape[1]
        return step._replace(block_table=F.pad(step.block_table, (0, more)))

    def _capture(self, step: Step) -> tuple[Step, Any, Tensor]:
        static = Step(*(t.clone() for t in step))
        for _ in range(2):
            self.run(static)  # compiles, and stores the same keys in the same slots
        torch.cuda.synchronize()
        self.pool = self.pool or torch.cuda.graph_pool_handle()  # one step is over, then another
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            out = self.run(static)
        return static, graph, out


class Record:
    """Times and counts for stats; of the times the last 100,000."""

    def __init__(self):
        self.queue, self.ttft, self.gaps = (deque(maxlen=100_000) for _ in range(3))
        self.requests = self.steps = self.tokens_run = self.tokens_new = 0
        self.proposed = self.accepted = 0
        self.seconds = self.most_used = 0.0

    def step(self, seconds: float, run: int, drafts: Iterable[Any], used: float) -> None:
        self.steps, self.seconds = self.steps + 1, self.seconds + seconds
        self.tokens_run += run
        for proposed, accepted in drafts:
            self.proposed, self.accepted = self.proposed + proposed, self.accepted + accepted
        self.most_used = max(self.most_used, used)

    def request(self, output: Output) -> None:
        """A request that ended."""
        self.requests += 1
        first_run, *tokens = output.times or [None]
        if tokens:
            self.queue.append(first_run - output.added)
            self.ttft.append(tokens[0] - output.added)
            self.gaps.extend(b - a for a, b in zip(tokens, tokens[1:]))

    def summary(self) -> dict[str, float]:
        facts = {
            "requests": self.requests,
            "steps": self.steps,
            "tokens_run": self.tokens_run,
            "tokens_new": self.tokens_new,
            "proposed": self.proposed,
            "accepted": self.accepted,
            "tokens_per_second": self.tokens_new / self.seconds if self.seconds else 0.0,
            "cache_used_most": self.most_used,
        }
        for name, times in (("queue", self.queue), ("ttft", self.ttft), ("itl", self.gaps)):
            times = sorted(times) or [0.0]
            for p in (50, 99):
                facts[f"{name}_seconds_p{p}"] = times[math.ceil(p / 100 * len(times)) - 1]
        return facts


# --------------------------------------------------------------------------------------------------
# Prompts in one process, decoding in another
# --------------------------------------------------------------------------------------------------


class Parcel(NamedTuple):
    """A request on its way: its output so far, and its unfinished sequences with their keys."""

    output: Output
    sequences: list[Sequence]


def prefill_worker(
    engine: Engine, requests: Iterable[tuple[list[int], SamplingParams]], to: int
) -> None:
    """Run each prompt to its first token and send it, with its keys, to rank `to`. A long prompt
    here delays no next token there."""
    post = lambda parcel: dist.send_object_list([parcel], to)
    for id, (prompt, params) in enumerate(requests):
        try:
            engine.add(prompt, params, id=id)
        except ValueError as e:
            post(Parcel(Output(id, prompt, error=str(e)), []))
    while engine.unfinished:
        for output in engine.step():
            post(Parcel(output, []) if output.finished else engine.take(output.id))
    post(None)


def decode_worker(engine: Engine, source: int) -> list[Output]:
    """Decode what rank `source` sends, to the end; the outputs in the order of its requests."""
    inbox: queue.Queue[Parcel | BaseException | None] = queue.Queue(maxsize=64)

    def receive() -> None:
        box: list[Any] = [...]
        while box[0] is not None:
            try:
                dist.recv_object_list(box, source)
            except BaseException as e:  # the other worker is gone
                return inbox.put(e)
            inbox.put(box[0])

    threading.Thread(target=receive, daemon=True).start()
    outputs, more = {}, True
    while more or engine.unfinished:
        while more and (not engine.unfinished or not inbox.empty()):
            parcel = inbox.get()  # waits only while there is nothing to decode
            if isinstance(parcel, BaseException):
                raise parcel
            more = parcel is not None
            if more:
                outputs[parcel.output.id] = parcel.output
            if more and parcel.sequences:
                engine.give(parcel)
        engine.step()
    return [outputs[id] for id in sorted(outputs)]


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


class _Toy(torch.nn.Module):
    """As much of a model as an Engine asks for."""

    def __init__(self, device: str):
        super().__init__()
        self.config = SimpleNamespace(
            n_layers=2, n_kv_heads=2, head_dim=16, vocab_size=97, context=512, eos_ids=()
        )
        self.embed, self.head = torch.nn.Embedding(97, 64), torch.nn.Linear(64, 97)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(64, 4 * 16 + 2 * 2 * 16) for _ in range(2))
        self.specs = [
            SimpleNamespace(index=i, scale=0.25, window=(None, 9)[i], softcap=None, sinks=None,
                            alibi_slopes=None, latent_dim=None, latent=None, expand=None)
            for i in range(2)
        ]  # fmt: skip
        rng = torch.Generator().manual_seed(0)
        for p in self.parameters():
            torch.nn.init.normal_(p, 0.0, 0.5, rng)
        self.to(device)

    def forward(
        self, tokens: Tensor, positions: Tensor, attend: Callable, return_hidden: bool = False
    ) -> Tensor:
        x = self.embed(tokens) + torch.sin(positions[..., None] / (1 + torch.arange(64).to(tokens)))
        for spec, qkv in zip(self.specs, self.qkv):
            q, k, v = qkv(x).unflatten(-1, (8, 16)).split((4, 2, 2), dim=2)
            x = x + attend(spec, q, k, v, positions).flatten(2)
        return x if return_hidden else self.head(x)


def _batch(
    lengths: list[int], new: list[int], device: str, dtype: torch.dtype, heads: tuple[int, int, int]
) -> tuple[Tensor, ...]:
    """Random arguments of paged_attention: blocks of 16 in random order. heads: Hq, Hkv, D."""
    (Hq, Hkv, D), rng = heads, torch.Generator().manual_seed(0)
    W = -(-max(lengths) // 16)
    counts = [-(-n // 16) for n in lengths]
    blocks, table = iter(torch.randperm(sum(counts), generator=rng).tolist()), []
    for n in counts:
        table.append([next(blocks) for _ in range(n)] + [0] * (W - n))
    kv = torch.randn(2, Hkv, sum(counts), 16, D, generator=rng).to(device, dtype).movedim(1, 3)
    q = torch.randn(sum(new), Hq, D, generator=rng).to(device, dtype)
    cu = torch.tensor([0, *new]).cumsum(0)
    return (
        q,
        *kv,
        *(x.to(device, torch.int32) for x in (torch.tensor(table), cu, torch.tensor(lengths))),
    )


def _gather_everything(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, cu: Tensor, lengths: Tensor
) -> Tensor:
    """What paging costs without a kernel or a thought: all blocks of all sequences gathered, padded
    to the longest, then torch's attention. For one new token each."""
    R, (Hq, D), Hkv = len(lengths), q.shape[1:], k.shape[2]
    k, v = (x[table.long()].flatten(1, 2).transpose(1, 2) for x in (k, v))
    mask = torch.arange(k.shape[2], device=q.device) < lengths[:, None, None, None]
    o = F.scaled_dot_product_attention(q.view(R, Hkv, Hq // Hkv, D), k, v, mask)
    return o.view(R, Hq, D)


def _check_attention(device: str) -> None:
    """Against the definition."""
    slopes, sinks = torch.linspace(0.1, 1, 4).to(device), torch.ones(4, device=device)
    for new in ([1, 1, 1], [5, 1, 30], [1, 0, 64]):
        args = _batch([20, 33, 64], new, device, torch.float32, (4, 2, 16))
        for flags in ({}, {"window": 7, "alibi_slopes": slopes}, {"softcap": 2.0, "sinks": sinks}):
            expected = paged_attention_reference(*args, **flags)
            got = paged_attention(*args, **flags)
            assert (got - expected).abs().max() < 1e-4, (new, flags)


def _check_engine(device: str) -> None:
    """Together == alone, with blocks so few that most give way to others."""
    model, greedy = _Toy(device), SamplingParams(temperature=0, max_new_tokens=20)
    rng = torch.Generator().manual_seed(0)
    start = torch.randint(97, (40,), generator=rng).tolist()
    prompts = [start[: 7 * i % 41 + 1] + [i] * (i % 3) for i in range(24)]
    roomy = Engine(model, num_blocks=64)
    alone = [roomy.generate([p], greedy)[0].token_ids for p in prompts]
    for how in ({}, {"swap": True}, {"prefix_cache": False}, {"max_batch_tokens": 8}):
        engine = Engine(model, num_blocks=18, block_size=5, max_running=8, **how)
        outputs = engine.generate(prompts, greedy)
        assert [o.token_ids for o in outputs] == alone, how
        assert engine.stats()["preemptions"] > 0 and engine.allocator.n_free == 18, how
        engine.allocator.check([])


def _seconds(call: Callable[[], Any], device: str, repeats: int = 20) -> float:
    """Median time of a call."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2]


def _attention_table(device: str) -> None:
    """One new token each, bf16: time, and bytes of keys and values needed over time."""
    long = 4096 if device == "cuda" else 1024
    ragged = [long * (i + 1) ** 2 // 32**2 + 16 for i in range(32)]
    print(f"{'new token each, Llama 3 heads':34} {'paged':>9} {'gather all':>11}   ms (GB/s)")
    for name, lengths in (
        ("16 sequences of 128", [128] * 16),
        (f"32 sequences of 16 to {long + 16}", ragged),
        (f"32 sequences of {long}", [long] * 32),
        ("1 sequence of 8192", [8192]),
    ):
        args = _batch(lengths, [1] * len(lengths), device, torch.bfloat16, (32, 8, 128))
        size = 2 * 2 * 8 * 128 * sum(lengths) / 1e9
        line = f"{name:34}"
        for call in (paged_attention, _gather_everything):
            t = _seconds(lambda: call(*args), device, 20 if device == "cuda" else 3)
            line += f" {1e3 * t:7.2f} ({size / t:4.0f})"
        print(line)
    if device == "cuda":
        x = torch.empty(2**30, dtype=torch.uint8, device=device)
        y = torch.empty_like(x)
        print(f"copy of 1 GiB: {2 * 2**30 / 1e9 / _seconds(lambda: y.copy_(x), device):.0f} GB/s")


def _scheduler_table() -> None:
    """What a step costs without a model."""
    for n in (16, 64, 256):
        allocator = BlockAllocator(n * 40)
        scheduler = Scheduler(allocator, 4096, n)
        for i in range(n):
            scheduler.add(Sequence(list(range(i, i + 300)), 300, arrival=i))
        while scheduler.waiting or any(seq.remaining > 1 for seq in scheduler.running):
            scheduler.commit(scheduler.schedule())
        begin = time.perf_counter()
        for step in range(100):
            for seq in scheduler.running:
                seq.tokens.append(step)
            scheduler.commit(scheduler.schedule())
        print(f"scheduling {n} that decode: {10 * (time.perf_counter() - begin):.2f} ms a step")


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.inference_mode():
        _check_attention(device)
        if not INTERPRET:  # which would take minutes
            _check_engine(device)
        kind = "the Triton kernel" if INTERPRET or device == "cuda" else "plain torch"
        print(f"{kind} checked; {torch.get_num_threads()} threads, torch {torch.__version__}")
        if not INTERPRET:
            _attention_table(device)
    _scheduler_table()


if __name__ == "__main__":
    main()
