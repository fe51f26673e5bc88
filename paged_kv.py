"""Paged KV cache and continuous batching: block allocator, prefix cache, scheduler, Engine.

Each decode step reads all weights. A batch reads them once for all its sequences, so throughput
depends on the batch size, which KV memory limits: a contiguous cache reserves the maximum length
for every sequence, and a static batch runs until its longest sequence ends. Five ideas keep the
batch large:

    paging        KV is stored in blocks of a few tokens, with a block table per sequence; a
                  sequence wastes less than one block (PagedAttention, arXiv:2309.06180). Blocks are
                  reference-counted: samples of one prompt share its blocks, with copy-on-write.
                  Without a prefix cache, layers with sliding windows keep the window's blocks only.
    prefix cache  full blocks are looked up by content, in a tree whose edges are the tokens of a
                  block (RadixAttention, arXiv:2312.07104). Blocks of finished sequences stay cached
                  until their memory is needed, and are evicted in LRU order.
    scheduling    continuous batching (Orca, OSDI 2022) with chunked prefill (Sarathi-Serve,
                  arXiv:2403.02310): each step has a token budget, spent first on one token for each
                  decoding sequence, then on chunks of prompts, so a long prompt delays a next token
                  by at most one step. When no block is free, the sequence of lowest priority is
                  preempted: its KV is recomputed later, or swapped to host memory.
    speculation   at small batch sizes, the rest of the budget verifies draft tokens: as many as
                  prompts and free blocks leave room for, fewer as the batch grows (SmartSpec,
                  arXiv:2406.14066). Drafts never delay or preempt a sequence.
    one kernel    prefill chunks, decode tokens and mixtures of both are one attention call over a
                  packed token axis, which reads keys through the block tables; keys are split over
                  programs when few queries read many keys (flash-decoding).

Cost: attention looks up the block of each key; the scheduler is Python and takes microseconds per
sequence and step; the batch waits while KV is swapped. When it loses: with a single sequence, where
a contiguous cache is as fast; with latent attention, which is absorbed here for any number of
tokens and so slower for long prompts; on a CPU, which gains nothing from static shapes.

Hook: `PagedKVCache.attend` is the model's attend callable; the model does not change. The Engine
calls model(tokens (1, N), positions (1, N), attend, return_hidden=True) and model.head. It reads
vocab_size, eos_ids, n_layers, n_kv_heads, head_dim and kv_lora_rank of model.config, and `windows`
if it is there; the cache reads index, scale, window, softcap, alibi_slopes, sinks, latent,
latent_dim and expand of a layer's spec. Sampler, drafter, verifier and output callback are
arguments. Equivalence
(test_all.py): paged == contiguous, batched == alone, chunked == whole, prefix hit == miss,
preempted == not preempted, forked == separate, speculative == plain decoding.
Needs: torch, and triton for the kernel.

Shapes: N new tokens of all sequences, packed; R sequences; T new tokens of one sequence and S its
cached tokens including the new ones; Hq / Hkv query / key-value heads, D / Dv head dims, V
vocabulary, W block table width. A cache is (blocks, block_size, Hkv, D).
"""

from __future__ import annotations

import heapq
import math
import os
import time
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate, count, product, takewhile
from numbers import Integral, Real
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

triton = None  # then plain torch serves every call; the import takes 0.3 s that a CPU can save
if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET"):
    with suppress(ImportError):  # not installed
        import triton
        import triton.language as tl

INTERPRET = triton is not None and triton.knobs.runtime.interpret

# --------------------------------------------------------------------------------------------------
# Requests and outputs
# --------------------------------------------------------------------------------------------------


# field: (type, test, its range in words). The limits keep all sums and quotients finite in fp32.
FIELDS: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "temperature": (Real, lambda v: v == 0 or 1e-9 <= v <= 1e9, "0 (greedy), or from 1e-9 to 1e9"),
    "top_k": (Integral, lambda v: 0 <= v < 2**63, "an integer, 0 (all) or more"),
    "top_p": (Real, lambda v: 0 < v <= 1, "more than 0 and at most 1"),
    "min_p": (Real, lambda v: 0 <= v <= 1, "from 0 to 1"),
    "repetition_penalty": (Real, lambda v: 1e-9 <= v <= 1e9, "from 1e-9 to 1e9 (1 is none)"),
    "presence_penalty": (Real, lambda v: -1e9 <= v <= 1e9, "from -1e9 to 1e9"),
    "frequency_penalty": (Real, lambda v: -1e9 <= v <= 1e9, "from -1e9 to 1e9"),
    "seed": (Integral, lambda v: 0 <= v < 2**63, "an integer from 0 to 2**63 - 1"),
    "min_new_tokens": (Integral, lambda v: 0 <= v < 2**63, "an integer, 0 or more"),
    "max_new_tokens": (Integral, lambda v: v >= 1, "an integer, 1 or more"),
    "n": (Integral, lambda v: v >= 1, "an integer, 1 or more"),
    "logprobs": (Integral, lambda v: v >= 0, "an integer, 0 or more, or None"),
}


@dataclass(frozen=True)
class SamplingParams:
    """A request's parameters: the sampling distribution, length, stopping, samples and logprobs.
    The defaults sample from the model's own distribution. ValueError names the field."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # the k most likely tokens, and ties with the last of them; 0: all
    top_p: float = 1.0  # the smallest set of most likely tokens with total probability p; 1: all
    min_p: float = 0.0  # tokens with at least this fraction of the highest probability
    repetition_penalty: float = 1.0  # tokens in prompt or output: logit / r if positive, else * r
    presence_penalty: float = 0.0  # tokens in the output: logit minus this
    frequency_penalty: float = 0.0  # tokens in the output: logit minus this per occurrence
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()  # added; -inf bans a token
    min_new_tokens: int = 0  # before this many no EOS, and a stop string that ends there is text
    seed: int = 0  # sample i uses seed + i
    max_new_tokens: int = 200
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()  # stop strings; require an output_callback
    n: int = 1  # samples, which share the prompt's KV
    logprobs: int | None = None  # return each token's log-probability, and the top n
    grammar: Any = None  # generation/structured.py's Grammar, or a pattern for serving/batch.py
    adapter: str | None = None  # name of one of Engine(adapters=...)

    def __post_init__(self):
        for name, (kind, good, wanted) in FIELDS.items():
            value = getattr(self, name)
            if value is None and name == "logprobs":
                continue
            ok = isinstance(value, kind) and not isinstance(value, bool) and good(value)
            _check(ok, f"{name} must be {wanted}, not {value!r}")
            object.__setattr__(self, name, float(value) if kind is Real else int(value))
        least, most = self.min_new_tokens, self.max_new_tokens
        _check(least <= most, f"min_new_tokens {least} is more than max_new_tokens {most}")
        ok = isinstance(self.ignore_eos, bool)
        _check(ok, f"ignore_eos must be true or false, not {self.ignore_eos!r}")
        ok = self.grammar is None or not self.ignore_eos
        _check(ok, "ignore_eos cannot be combined with grammar, whose text EOS ends")
        ok = self.adapter is None or isinstance(self.adapter, str)
        _check(ok, f"adapter must be a name, not {self.adapter!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        ok = isinstance(stop, (tuple, list)) and all(isinstance(s, str) and s for s in stop)
        _check(ok, f"stop must be non-empty strings, not {stop!r}")
        ok = not any("\ud800" <= char <= "\udfff" for text in stop for char in text)
        _check(ok, f"stop must be valid Unicode, not {stop!r}")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))


def _bias_pairs(bias: Any) -> tuple[tuple[int, float], ...]:
    """logit_bias sorted by token id, hashable like the other fields."""
    try:
        pairs = sorted((i, b) for i, b in (bias.items() if isinstance(bias, Mapping) else bias))
    except (TypeError, ValueError):
        raise ValueError(f"logit_bias must map token ids to numbers, not {bias!r}") from None
    for i, b in pairs:
        ok = isinstance(i, Integral) and not isinstance(i, bool) and i >= 0
        _check(ok, f"logit_bias must have token ids, 0 or more, for keys, not {i!r}")
        ok = isinstance(b, Real) and not isinstance(b, bool) and (b == -math.inf or abs(b) <= 1e9)
        _check(ok, f"logit_bias of token {i} must be -inf (banned) or from -1e9 to 1e9, not {b!r}")
    _check(len(dict(pairs)) == len(pairs), f"logit_bias must name a token once, not as in {bias!r}")
    return tuple((int(i), float(b)) for i, b in pairs)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass
class Sample:
    """One continuation. finish_reason: eos, stop, length, abort or error. logprobs: for each token
    its log-probability before temperature and penalties, the top ids, and their log-probabilities.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[tuple[float, list[int], list[float]]] = field(default_factory=list)


@dataclass
class Output:
    """A request's output, which grows with every step. An invalid request has an error and no
    samples."""

    id: Any
    prompt_ids: list[int]
    samples: list[Sample] = field(default_factory=list)
    error: str | None = None
    arrival_time: float = 0.0  # seconds of the Engine's clock
    timestamps: list[float] = field(default_factory=list)  # first step, then sample 0's tokens
    num_prompt_logprobs: int | None = None  # most likely tokens in each entry of the next field
    prompt_logprobs: list[tuple[float, list[int], list[float]]] = field(default_factory=list)
    prompt_logprobs_from: int = 1  # the prompt token that the first entry is of

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


class SwappedKV(NamedTuple):
    """KV of a sequence's first n tokens in host memory, contiguous; of the last m <= n of them in a
    layer whose blocks are reused (sliding window), and where the others are in the prefix tree."""

    n: int
    kv: list[Tensor]  # of each layer (2 or 1, Hkv, n or m, D)
    scales: list[Tensor]  # (2 or 1, Hkv, n or m), if quantized

    @property
    def first(self) -> int:
        """The first position that all layers have."""
        return max((self.n - x.shape[2] for x in self.kv), default=0)


@dataclass(eq=False)
class Sequence:
    """One sample of a request. Between steps

        0 .... num_computed_tokens ......... len(tokens)
        in the cache   | remaining: 1 if it decodes, more if it is in prefill

    The first num_cached_blocks of its block table are full blocks in the prefix tree, and
    prefix_node is the node of the last one. After a prefix hit on the whole prompt the last token
    is run again for its logits, but its KV is shared: positions before num_written_tokens are not
    written."""

    tokens: list[int]  # prompt and output
    n_prompt: int
    params: SamplingParams = SamplingParams()
    request: Output | None = None
    index: int = 0  # number of the sample in its request
    priority: int = 0  # smaller is more urgent
    client: str = ""  # who sent the request
    arrival: int = 0
    n_unforked: int = 1  # samples still to fork at the end of the prompt, itself included
    block_table: list[int] = field(default_factory=list)
    ring: int = 0  # while it runs: the number of its ring buffer, see PagedKVCache
    num_computed_tokens: int = 0
    num_written_tokens: int = 0
    num_cached_blocks: int = 0
    prefix_node: int = 0
    num_draft_tokens: int = 0  # requested for the next step
    num_lookahead_blocks: int = 0  # blocks for drafts, at the end of block_table
    running: bool = False
    swapped_kv: SwappedKV | None = None
    listener: Any = None
    adapter: Any = None  # generation/adapters.py's Adapter, or shared_models.py's SharedModel
    adapter_blocks: list[int] = field(default_factory=list)  # with its weights, while it runs

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.num_computed_tokens

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
    """Reference-counted blocks, and the prefix tree of full blocks.

    A block is free; in use by refs[block] sequences; or cached: in use by none, but its content can
    be looked up. Cached blocks are evicted only when no block is free, in LRU order, or leaves with
    the smallest eviction_key(block) first. A tree node is a number that is never reused, 0 the
    root; an edge is the tokens of a block, compared exactly (no hash that could collide).

    A sequence that uses a block uses all its ancestors, and releases them after it. So an ancestor
    is never less recently used than its descendants, and LRU eviction always evicts a leaf.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, prefix_cache: bool = True):
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            _check(_is_int(value) and value > 0, f"{name} must be an integer >= 1, not {value!r}")
        self.block_size, self.prefix_cache = block_size, prefix_cache
        self.refs = [0] * num_blocks
        self.free = list(range(num_blocks))[::-1]
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.eviction_key: Callable[[int], Any] | None = None  # None: LRU
        self.hits = [0] * num_blocks  # of each block since it was added to the tree
        self.children: dict[tuple[int, tuple[int, ...]], int] = {}  # (parent, tokens) -> block
        # block -> (parent node, tokens, its own node)
        self.entries: dict[int, tuple[int, tuple[int, ...], int]] = {}
        self.n_nodes = 0

    @property
    def n_free(self) -> int:
        """Blocks that can be allocated: free or cached."""
        return len(self.free) + len(self.cached)

    def allocate(self) -> int:
        """A block with one reference and undefined content, evicting a cached block if needed."""
        if not self.free:
            assert self.cached, "check n_free first"
            self._unlink(self._least_useful())
        block = self.free.pop()
        self.refs[block] = 1
        return block

    def _least_useful(self) -> int:
        """The cached block to evict."""
        if self.eviction_key is None:
            return next(iter(self.cached))
        parents = {parent for parent, _ in self.children}
        return min((b for b in self.cached if self.node(b) not in parents), key=self.eviction_key)

    def share(self, block: int) -> int:
        """Add a reference to a block."""
        self.cached.pop(block, None)
        self.refs[block] += 1
        self.hits[block] += 1
        return block

    def release(self, blocks: list[int]) -> None:
        """Drop a reference to each of a sequence's blocks, the last block first."""
        for block in reversed(blocks):
            assert self.refs[block] > 0, block
            self.refs[block] -= 1
            if self.refs[block] == 0 and block in self.entries:
                self.cached[block] = None
            elif self.refs[block] == 0:
                self.free.append(block)

    def find(self, node: int, tokens: tuple[int, ...]) -> int | None:
        """The block with these tokens below the node."""
        return self.children.get((node, tokens))

    def node(self, block: int) -> int:
        return self.entries[block][2]

    def register(self, block: int, node: int, tokens: tuple[int, ...]) -> int:
        """Add a full block to the prefix tree; returns its node."""
        assert block not in self.entries and (node, tokens) not in self.children
        self.n_nodes += 1
        self.hits[block] = 0
        self.entries[block] = node, tokens, self.n_nodes
        self.children[node, tokens] = block
        return self.n_nodes

    def uncache(self, blocks: Iterable[int]) -> None:
        """Remove these blocks and their descendants from the prefix tree."""
        removed = {self.node(block) for block in blocks if block in self.entries}
        if removed:
            for block, (parent, _, own) in list(self.entries.items()):  # parents come first
                if parent in removed or own in removed:
                    removed.add(own)
                    self._unlink(block)

    def _unlink(self, block: int) -> None:
        parent, tokens, _ = self.entries.pop(block)
        del self.children[parent, tokens]
        if block in self.cached:
            del self.cached[block]
            self.free.append(block)


# --------------------------------------------------------------------------------------------------
# Scheduling
# --------------------------------------------------------------------------------------------------


NO_KV_STORE = SimpleNamespace(  # the methods of serving/kv_store.py's KVStore, without one
    want=lambda *_: None, find=lambda *_: None, save=lambda *_: None, recover=lambda _: False,
    gate=lambda attend: attend, busy=False,
    counts=dict(kv_store_host_tokens=0, kv_store_disk_tokens=0),
)  # fmt: skip


def fcfs(seq: Sequence) -> Any:
    """The default policy, first come first served by priority: a sort key, of which the smallest is
    admitted first and the largest is preempted first. The oldest sequence of the highest priority
    is never preempted."""
    return seq.priority, seq.arrival


@dataclass
class Plan:
    """The scheduler's output for one step. KV copies happen in the order of these fields, before
    the model runs."""

    budget: int = 0  # tokens left
    # (sequence, its block table, its ring, number of tokens)
    swap_out: list[tuple[Sequence, list[int], int, int]] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)  # destination block -> source block
    swap_in: list[tuple[Sequence, int]] = field(default_factory=list)  # first token to copy
    stored: list[tuple[Sequence, Any]] = field(default_factory=list)  # what the KVStore found
    run: list[tuple[Sequence, int]] = field(default_factory=list)  # number of its tokens to run
    drafts: dict[Sequence, int] = field(default_factory=dict)  # number of drafts to verify
    loads: list[tuple[Any, list[int]]] = field(default_factory=list)  # adapters, blocks to fill
    newly_cached: list[int] = field(default_factory=list)  # blocks this step adds to the tree


class Scheduler:
    """Decides which tokens to run in the next step. Integers only: no model, no clock.

    policy: sequence -> sort key of the scheduling order; ties go to the older sequence. Optional
    methods: begin_step(scheduler) is called before each step, and end(seq) when a sequence leaves;
    token_budget(scheduler) limits the tokens of a step further: those first in order run;
    reserved_tokens(seq) is the output that blocks must be free for when it is admitted, and while
    it runs; eviction_key(block): see BlockAllocator.
    continuous: admit sequences as soon as others end; False: once all have ended (request-level
    batching, the baseline of Orca).
    max_blocks: most blocks of a sequence; position p is in block_table[p // block_size %
    max_blocks]. For a model whose layers all have sliding windows (Mistral 7B, arXiv:2310.06825,
    section 2): enough for the window and a step's tokens. None: no limit.
    """

    def __init__(
        self, allocator: BlockAllocator, max_num_batched_tokens: int = 512, max_num_seqs: int = 64,
        policy: Callable[[Sequence], Any] = fcfs, kv_swap: bool = False, continuous: bool = True,
        max_blocks: int | None = None,
    ):  # fmt: skip
        ok = _is_int(max_num_seqs) and 1 <= max_num_seqs <= max_num_batched_tokens
        _check(
            ok and _is_int(max_num_batched_tokens),
            f"max_num_seqs {max_num_seqs} must be an integer from 1 to max_num_batched_tokens "
            f"({max_num_batched_tokens}): every running sequence has a token in each step",
        )
        self.allocator, self.block_size = allocator, allocator.block_size
        self.max_num_batched_tokens, self.max_num_seqs = max_num_batched_tokens, max_num_seqs
        self.kv_swap, self.continuous, self.max_blocks = kv_swap, continuous, max_blocks
        ok = max_blocks is None or not allocator.prefix_cache
        _check(ok, "max_blocks requires prefix_cache=False: reused blocks hold no prefix")
        self.key = lambda seq: (policy(seq), seq.arrival, seq.index)
        self.begin_step = getattr(policy, "begin_step", lambda scheduler: None)
        self.end = getattr(policy, "end", lambda seq: None)
        self.token_budget = getattr(policy, "token_budget", lambda _: max_num_batched_tokens)
        self.reserved_tokens = getattr(policy, "reserved_tokens", lambda seq: 0)
        allocator.eviction_key = getattr(policy, "eviction_key", None)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.ring_copies: dict[int, int] = {}  # destination -> source: forks since the last step
        self.kv_store: Any = NO_KV_STORE
        self.n_preempted = self.n_admitted_tokens = self.n_hit_tokens = self.n_run_tokens = 0

    def schedule(self, plan: Plan | None = None) -> Plan:
        """Plan the next step. The caller runs it and then calls commit; or rollback if it failed,
        also if schedule itself was interrupted and only the plan passed in exists."""
        plan = Plan() if plan is None else plan
        for seq in self.running:  # if sampling was interrupted, the last token is run again
            n = len(seq.tokens)
            if seq.num_computed_tokens >= n:
                seq.num_computed_tokens = n - 1
                seq.num_written_tokens = min(seq.num_written_tokens, n)
            if seq.num_lookahead_blocks:
                self._free_lookahead(seq)
        self.begin_step(self)
        plan.budget = max(1, min(self.token_budget(self), self.max_num_batched_tokens))
        waiting = self.waiting if self.continuous or not self.running else []
        queue = heapq.nsmallest(self.max_num_seqs, waiting, key=self.key)
        ranked = sorted(self.running + queue, key=self.key)
        if queue:
            later = ranked[ranked.index(queue[0]) :]
            self._preempt_for(queue[0], [seq for seq in later if seq.running], plan)
        order = [seq for seq in ranked if seq.running]
        decoding = [seq for seq in order if seq.remaining == 1]
        for seq in decoding:  # first: no next token waits for a prompt
            if plan.budget and seq.running and self._append_slot(seq, order, plan):
                self._run(seq, plan)
        rest, admitting = set(queue + order).difference(decoding), True
        for seq in [seq for seq in ranked if seq in rest]:
            if not seq.running and (plan.budget or not self.continuous):
                # a sequence that does not fit blocks those behind it: else it might never fit
                admitting = admitting and self._admit(seq, plan)
            if plan.budget and seq.running:
                self._run(seq, plan)
        for seq, _ in plan.run:  # last, so that drafts take no budget or blocks from others
            if seq.num_draft_tokens and seq.remaining == 1:
                self._allocate_lookahead(seq, plan)
        for seq in queue:  # prefetch, without evicting anything
            if not seq.running and seq.adapter is not None:
                if len(self.allocator.free) - len(self.running) >= seq.adapter.num_missing:
                    blocks = seq.adapter.share()
                    self.allocator.release(blocks + self._load_adapter(seq, plan))
        return plan

    def commit(self, plan: Plan) -> None:
        """Record that the plan was run. Accepted drafts are recorded by accept."""
        for seq, n in plan.run:
            self.accept(seq, n)

    def accept(self, seq: Sequence, n: int) -> None:
        """Record that a sequence's next n tokens, or its first n drafts, are in the cache."""
        self.n_run_tokens += n
        seq.num_computed_tokens += n
        seq.num_written_tokens = max(seq.num_written_tokens, seq.num_computed_tokens)

    def rollback(self, plan: Plan) -> None:
        """The plan was not completed: all running sequences return to the queue, and restart from
        their blocks that are still in the prefix tree."""
        self.allocator.uncache(plan.newly_cached)
        for seq in list(self.running):
            self._release(seq)
            self.waiting.append(seq)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)
        self.kv_store.want(seq, seq.tokens, seq.adapter)

    def finish(self, seq: Sequence) -> None:
        """A sequence ended or was aborted: release its blocks."""
        if seq.running:
            self._release(seq)
        else:
            self.waiting.remove(seq)
        self.end(seq)

    def fork(self, seq: Sequence) -> Sequence:
        """The next sample of its request: a sequence with the same tokens, sharing all blocks. Its
        ring buffer is copied before the next step (ring_copies)."""
        index = max(seq.index + 1, seq.params.n - seq.n_unforked + 1)
        child = replace(seq, index=index, n_unforked=1, ring=self._free_ring())
        self.ring_copies[child.ring] = seq.ring
        child.tokens, child.listener = list(seq.tokens), None
        child.block_table = [*map(self.allocator.share, seq.block_table)]
        child.adapter_blocks = [*map(self.allocator.share, seq.adapter_blocks)]
        seq.n_unforked = max(1, seq.n_unforked - 1)
        self.running.append(child)
        return child

    # ---- the parts of a step ----

    def _preempt_for(self, seq: Sequence, later: list[Sequence], plan: Plan) -> None:
        """Preempt running sequences that come later in order than a waiting one, if the waiting
        one can then be admitted."""
        if later and self._fits(seq, later):
            while later and not self._fits(seq):
                self._preempt(later.pop(), plan)

    def _append_slot(self, seq: Sequence, order: list[Sequence], plan: Plan) -> bool:
        """Ensure a block that only this sequence references for its next token: allocate it, or
        copy a shared one. If none is free the last in order is preempted; False if that is the
        sequence itself."""
        at = seq.num_computed_tokens // self.block_size
        at = at if self.max_blocks is None else at % self.max_blocks
        while True:
            new = at == len(seq.block_table)
            shared = not new and self.allocator.refs[seq.block_table[at]] > 1
            if not new and (not shared or seq.num_written_tokens > seq.num_computed_tokens):
                return True
            if self.allocator.n_free:
                break
            self._preempt(order[-1], plan)
            if order.pop() is seq:
                return False
        block = self.allocator.allocate()
        if shared:
            # if `block` is released and reallocated in this step, the last copy to it counts
            plan.copies[block] = seq.block_table[at]
            self.allocator.release([seq.block_table[at]])
        seq.block_table[at : at + 1] = [block]
        return True

    def _allocate_lookahead(self, seq: Sequence, plan: Plan) -> None:
        """Allocate slots for the requested drafts, limited by the remaining budget, by free blocks,
        and by max_new_tokens less the one token that every step adds."""
        at, refs = len(seq.tokens), self.allocator.refs
        first = at // self.block_size if self.max_blocks is None else 0
        if any(refs[block] > 1 for block in seq.block_table[first:]):
            return  # shared with a fork until both have sampled
        room = len(seq.block_table) + self.allocator.n_free
        reuse = self.max_blocks is not None and room >= self.max_blocks
        room = math.inf if reuse else room * self.block_size - at
        left = seq.n_prompt + seq.params.max_new_tokens - at - 1
        n = min(seq.num_draft_tokens, plan.budget, room, left)
        if n > 0:
            while len(seq.block_table) < self._num_blocks_for(at + n):
                seq.block_table.append(self.allocator.allocate())
                seq.num_lookahead_blocks += 1
            plan.drafts[seq] = n
            plan.budget -= n

    def _free_lookahead(self, seq: Sequence) -> None:
        """Release the lookahead blocks that hold no accepted tokens."""
        own = len(seq.block_table) - seq.num_lookahead_blocks
        own = max(own, self._num_blocks_for(seq.num_written_tokens))
        refs, entries = self.allocator.refs, self.allocator.entries
        assert all(refs[block] == 1 and block not in entries for block in seq.block_table[own:])
        self.allocator.release(seq.block_table[own:])
        del seq.block_table[own:]
        seq.num_lookahead_blocks = 0

    def _fits(self, seq: Sequence, without: Iterable[Sequence] = ()) -> bool:
        """Whether a sequence can be admitted if those in `without` are preempted: blocks for all
        its tokens and its reservation, and for each running sequence what is left of its own, at
        least one more."""
        hits, refs = set(self.cached_prefix(seq)), self.allocator.refs
        needed = self._reserved_blocks(seq)
        if seq.adapter is not None:
            hits.update(seq.adapter.resident())
            needed += seq.adapter.num_blocks
        running = set(self.running).difference(without)
        needed += sum(max(1, self._reserved_blocks(s) - len(s.block_table)) for s in running)
        used = Counter(block for s in without for block in s.block_table + s.adapter_blocks)
        freed = sum(refs[block] == n for block, n in used.items() if block not in hits)
        available = self.allocator.n_free - sum(refs[block] == 0 for block in hits) + freed
        num_seqs = sum(s.n_unforked for s in running) + seq.n_unforked
        return needed - len(hits) <= available and num_seqs <= self.max_num_seqs

    def _reserved_blocks(self, seq: Sequence) -> int:
        """Blocks of its tokens and its reservation."""
        output = min(self.reserved_tokens(seq), seq.params.max_new_tokens)
        return self._num_blocks_for(max(len(seq.tokens), seq.n_prompt + output))

    def _admit(self, seq: Sequence, plan: Plan) -> bool:
        """Start running a sequence: share its cached blocks and allocate the rest."""
        if not self._fits(seq):
            return False
        seq.ring = self._free_ring()
        self.waiting.remove(seq)
        self.running.append(seq)
        seq.running, seq.prefix_node = True, self._root(seq)
        if seq.adapter is not None:
            seq.adapter_blocks = seq.adapter.share()
        self._match_prefix(seq)  # both before blocks are allocated, which evicts others
        if seq.adapter is not None:
            seq.adapter_blocks += self._load_adapter(seq, plan)
        self.n_hit_tokens += seq.num_computed_tokens
        self.n_admitted_tokens += len(seq.tokens)
        while len(seq.block_table) < self._num_blocks_for(len(seq.tokens)):
            seq.block_table.append(self.allocator.allocate())
        tokens = seq.tokens[:-1][: self._num_shareable_blocks(seq) * self.block_size]
        kv = seq.swapped_kv or self.kv_store.find(tokens, seq.num_cached_blocks, seq.adapter, seq)
        n = seq.num_computed_tokens
        # without all tokens before it cannot be shared, and is recomputed
        usable = kv is not None and (kv.first <= n or not self.allocator.prefix_cache)
        if usable and kv.n > n:
            if kv is seq.swapped_kv:
                plan.swap_in.append((seq, seq.num_written_tokens))
            else:
                plan.stored.append((seq, kv))
            seq.num_computed_tokens = seq.num_written_tokens = kv.n
            self.register(seq, plan)
        else:
            seq.swapped_kv = None
        return True

    def _load_adapter(self, seq: Sequence, plan: Plan) -> list[int]:
        """Allocate the missing blocks of its adapter, and plan their loading."""
        new = seq.adapter.allocate()
        plan.newly_cached += new
        plan.loads += [(seq.adapter, new)] if new else []
        return new

    def _run(self, seq: Sequence, plan: Plan) -> None:
        """Schedule as many of its tokens as the budget allows."""
        self._match_prefix(seq)  # other sequences may have added its next blocks to the tree
        n = min(seq.remaining, plan.budget)
        self.register(seq, plan, n)
        plan.run.append((seq, n))
        plan.budget -= n

    def _preempt(self, seq: Sequence, plan: Plan) -> None:
        """Release its blocks and return it to the queue."""
        if self.kv_swap and seq.num_computed_tokens:
            plan.swap_out.append((seq, [*seq.block_table], seq.ring, seq.num_computed_tokens))
        self._release(seq)
        self.waiting.append(seq)
        self.n_preempted += 1

    def _release(self, seq: Sequence) -> None:
        if getattr(seq.request, "error", None) is None:  # else it may have computed NaN
            # blocks of a failed step are not in the tree any more
            full = takewhile(self.allocator.entries.get, seq.block_table[: seq.num_cached_blocks])
            self.kv_store.save(seq.tokens, [*full], seq.adapter)
        self.allocator.release(seq.block_table)
        self.allocator.release(seq.adapter_blocks)
        self.running.remove(seq)
        seq.block_table, seq.adapter_blocks, seq.running = [], [], False
        seq.num_computed_tokens = seq.num_written_tokens = seq.num_cached_blocks = 0
        seq.prefix_node = seq.num_draft_tokens = seq.num_lookahead_blocks = 0

    def _free_ring(self) -> int:
        used = {seq.ring for seq in self.running}
        return next(ring for ring in count() if ring not in used)  # fewer than max_num_seqs run

    def _num_blocks_for(self, n: int) -> int:
        n = -(-n // self.block_size)
        return n if self.max_blocks is None else min(n, self.max_blocks)

    # ---- the prefix tree ----

    def _root(self, seq: Sequence) -> int:
        """The root of its prefixes: KV depends on the adapter."""
        return 0 if seq.adapter is None else seq.adapter.root

    def cached_prefix(self, seq: Sequence) -> list[int]:
        """The blocks of the prefix tree with a sequence's next tokens, as many as it can share."""
        blocks, node = [], seq.prefix_node if seq.running else self._root(seq)
        for i in range(seq.num_cached_blocks, self._num_shareable_blocks(seq)):
            block = self.allocator.find(node, self._block_tokens(seq, i))
            if block is None:
                break
            blocks.append(block)
            node = self.allocator.node(block)
        return blocks

    def _match_prefix(self, seq: Sequence) -> None:
        """Share the blocks of its next tokens that are in the prefix tree. Those computed in this
        same step count too: every layer writes all keys before it reads any."""
        if seq.num_computed_tokens == seq.num_cached_blocks * self.block_size:
            for block in self.cached_prefix(seq):
                self._use_cached_block(seq, block)
                seq.num_computed_tokens = min(seq.num_written_tokens, len(seq.tokens) - 1)

    def _num_shareable_blocks(self, seq: Sequence) -> int:
        """Its first blocks that may be read from the prefix tree: before the tokens that are run
        for log-probabilities of the prompt."""
        n = len(seq.tokens) * self.allocator.prefix_cache
        if seq.request is not None and seq.request.num_prompt_logprobs is not None:
            n = min(n, seq.request.prompt_logprobs_from - 1)
        return n // self.block_size

    def register(self, seq: Sequence, plan: Plan, n: int = 0) -> None:
        """Add to the prefix tree the blocks that are full once n more tokens are run. If a block of
        the same content is in the tree, share that one instead."""
        if not self.allocator.prefix_cache:
            return
        while (seq.num_cached_blocks + 1) * self.block_size <= seq.num_computed_tokens + n:
            i = seq.num_cached_blocks
            tokens, block = self._block_tokens(seq, i), seq.block_table[i]
            found = self.allocator.find(seq.prefix_node, tokens)
            if found is not None:
                self._use_cached_block(seq, found)
            else:
                seq.prefix_node = self.allocator.register(block, seq.prefix_node, tokens)
                seq.num_cached_blocks += 1
                plan.newly_cached.append(block)

    def _block_tokens(self, seq: Sequence, i: int) -> tuple[int, ...]:
        return tuple(seq.tokens[i * self.block_size : (i + 1) * self.block_size])

    def _use_cached_block(self, seq: Sequence, block: int) -> None:
        """Append a block of the prefix tree to its cached blocks, replacing its own there."""
        self.allocator.share(block)
        if seq.num_cached_blocks < len(seq.block_table):
            self.allocator.release([seq.block_table[seq.num_cached_blocks]])
            seq.block_table[seq.num_cached_blocks] = block
        else:
            seq.block_table.append(block)
        seq.prefix_node = self.allocator.node(block)
        seq.num_cached_blocks += 1
        written = seq.num_cached_blocks * self.block_size
        seq.num_written_tokens = max(seq.num_written_tokens, written)


# --------------------------------------------------------------------------------------------------
# KV cache
# --------------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """Tokens of one sequence to run in a step, the first at position `start`."""

    tokens: list[int]
    start: int
    block_table: list[int]  # blocks for all positions up to the last of `tokens`
    num_written_tokens: int = 0  # KV before this position is in the cache and not written
    ring: int = 0  # the sequence's ring buffer


class Step(NamedTuple):
    """A step's metadata, as tensors on the device."""

    tokens: Tensor  # (N,)
    positions: Tensor  # (N,)
    slots: Tensor  # (N,) cache slot of each token: block * block_size + offset
    block_table: Tensor  # (R, W) int32
    cu_seqlens: Tensor  # (R + 1,) int32: sequence r has rows cu_seqlens[r] to cu_seqlens[r + 1]
    lengths: Tensor  # (R,) int32: cached tokens including the new ones
    ring_slots: Tensor | None = None  # slots and block_table of the layers with ring buffers
    ring_table: Tensor | None = None
    buffer: Tensor | None = None  # (bytes,) uint8, of which the others are views


def _views(buffer: Tensor, like: Collection[Tensor | None]) -> list[Tensor | None]:
    """Views of a buffer of bytes with the shapes and dtypes of `like`, in its order, each aligned
    to 16 bytes, as Triton's and Inductor's kernels expect."""
    sizes = [0 if x is None else -(-x.nbytes // 16) * 16 for x in like]
    parts = zip(buffer.split(sizes), like)
    return [x if x is None else part[: x.nbytes].view(x.dtype).view(x.shape) for part, x in parts]


KV_DTYPES = {"int8": (torch.int8, 127), "fp8": (torch.float8_e4m3fn, 448)}  # and the maximum value


class PagedKVCache:
    """Keys and values of all sequences, one tensor of blocks per layer.

        step = cache.step([Chunk(prompt, 0, [5, 2]), Chunk([token], 9, [7])])
        attend = functools.partial(cache.attend, step=step)
        logits = model(step.tokens[None], step.positions[None], attend)         # (1, N, V)

    A layer's tensor is (2, Hkv, blocks + 1, block_size, D): keys and values, a head's blocks
    contiguous. Latent attention (config.kv_lora_rank) stores only the latents, (1, 1, blocks + 1,
    block_size, rank + rope). The last block is a null block, written by padding tokens.

    kv_dtype "int8" or "fp8" (e4m3) quantizes each head's vector of a token with its own absmax
    scale in fp32: with D = 128 it takes 0.52 of the memory of bf16.

    With rings, a layer with a sliding window has `rings` ring buffers of ring_blocks blocks in
    place of num_blocks: in ring i, position p is in block i * ring_blocks + p // block_size %
    ring_blocks. A sequence then takes memory for all its tokens only in layers without a window.
    """

    def __init__(
        self, config: Any, num_blocks: int, block_size: int = 16,
        dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
        kv_dtype: str | None = None, rings: int = 0, ring_blocks: int = 0,
    ):  # fmt: skip
        """config: an object with n_layers, n_kv_heads, head_dim, for latent attention kv_lora_rank
        and qk_rope_head_dim, and for rings windows."""
        option = getattr(config, "contiguous_only", "")
        _check(not option, f"the Engine and its paged KV cache do not support {option}")
        if kv_dtype is not None:
            supported = ", ".join(KV_DTYPES)
            _check(kv_dtype in KV_DTYPES, f"kv_dtype must be one of {supported}, not {kv_dtype!r}")
            dtype, self.max_value = KV_DTYPES[kv_dtype]
            device = torch.device(device)
            old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9)
            _check(
                kv_dtype != "fp8" or not old,
                "kv_dtype fp8 requires a GPU of compute capability 8.9 or higher; use int8",
            )
        parts, heads, dim = 2, config.n_kv_heads, config.head_dim
        if getattr(config, "kv_lora_rank", None):
            parts, heads, dim = 1, 1, config.kv_lora_rank + config.qk_rope_head_dim
        self.num_blocks, self.block_size, self.device = num_blocks, block_size, device
        self.num_ring_blocks, self.ring_blocks = rings * ring_blocks, ring_blocks
        self.windowed = {i for i, w in enumerate(config.windows) if w} if rings else set()
        blocks = [num_blocks, self.num_ring_blocks]
        blocks = [blocks[layer in self.windowed] + 1 for layer in range(config.n_layers)]
        shapes = [(parts, heads, n, block_size) for n in blocks]
        self.pages = [torch.zeros(*s, dim, dtype=dtype, device=device) for s in shapes]
        self.scales: list[Tensor] = []  # of quantized pages: (2 or 1, Hkv, blocks + 1, block_size)
        if kv_dtype is not None:
            self.scales = [torch.ones(s, device=device) for s in shapes]
        nbytes = sum(t.nbytes for t in self._tensors(windowed=False))
        self.bytes_per_token = nbytes // (num_blocks + 1) // block_size  # rings excluded

    def step(self, chunks: list[Chunk], shape: tuple[int, int, int] | None = None) -> Step:
        """The tensors of a step. shape (N, R, W): pad them to N tokens, R sequences and W blocks
        per sequence. With a shape or on a GPU they are views of one buffer, for a single copy."""
        tokens, positions, cu, used = [], [], [0], 1  # used: blocks of the longest sequence
        for c in chunks:
            end = c.start + len(c.tokens)
            assert len(c.block_table) * self.block_size >= end, "a token without a block"
            tokens += c.tokens
            positions += range(c.start, end)
            cu.append(len(tokens))
            used = max(used, -(-end // self.block_size))
        n, r, width = shape or (len(tokens), len(chunks), used)
        assert n >= len(tokens) and r >= len(chunks), (n, r)
        lengths = [c.start + len(c.tokens) for c in chunks] + [0] * (r - len(chunks))
        cu += [cu[-1]] * (r - len(chunks))
        pad = [0] * (n - len(tokens))
        i32, i64 = partial(torch.tensor, dtype=torch.int32), partial(torch.tensor, dtype=torch.long)
        layout = partial(self._layout, chunks, (n, r, width), used)
        slots, table = layout([c.block_table for c in chunks], self.num_blocks)
        tensors = [i64(tokens + pad), i64(positions + pad), slots, table, i32(cu), i32(lengths)]
        if self.windowed:
            tensors += layout([self._ring(c.ring) for c in chunks], self.num_ring_blocks)
        device_type = torch.device(self.device).type
        if shape is None and device_type == "cpu":
            return Step(*tensors)
        parts = [F.pad(t.flatten().view(torch.uint8), (0, -t.nbytes % 16)) for t in tensors]
        size, pin = sum(map(len, parts)), device_type == "cuda"
        host = torch.cat(parts, out=torch.empty(size, dtype=torch.uint8, pin_memory=pin))
        buffer = host.to(self.device, non_blocking=True)
        return Step(*_views(buffer, tensors))._replace(buffer=buffer)

    def _layout(
        self, chunks: list[Chunk], shape: tuple[int, int, int], used: int,
        tables: list[list[int]], null: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """For shape (N, R, W): slots (N,), padded with those of block `null`, and block_table
        (R, W), zeros after column `used`. The blocks of a table shorter than its positions, a ring
        buffer, are used in turn."""
        (n, r, width), bs, null_slot = shape, self.block_size, null * self.block_size
        slots, table = [], array("i")
        for c, own in zip(chunks, tables):
            slots += [
                own[p // bs % len(own)] * bs + p % bs if p >= c.num_written_tokens else null_slot
                for p in range(c.start, c.start + len(c.tokens))
            ]
            # padded with its own blocks, so that no sequence reads another's KV
            table.extend((own * -(-used // len(own)))[:used])
        table.extend(array("i", [0]) * (used * (r - len(chunks))))
        slots = torch.tensor(slots + [null_slot] * (n - len(slots)), dtype=torch.long)
        table = torch.frombuffer(table, dtype=torch.int32).view(r, used)
        return slots, table if used == width else F.pad(table, (0, width - used))

    def attend(
        self, spec: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, *, step: Step
    ) -> Tensor:
        """The attend hook: writes k and v (B, T, Hkv, D) of the step's tokens to their slots, then
        attends with q (B, T, Hq, D) to all cached tokens of each sequence."""
        if spec.index in self.windowed:
            step = step._replace(slots=step.ring_slots, block_table=step.ring_table)
        self._store(spec.index, step.slots, spec.latent if spec.latent is not None else k, v)
        # (blocks, block_size, Hkv, ...) of keys and values; None where there are none
        by_slot = lambda tensors: (*tensors[spec.index].movedim(1, 3), None)[:2]
        pages = (*by_slot(self.pages), *(by_slot(self.scales) if self.scales else (None, None)))
        pages = _Pages(*pages, step.block_table, step.cu_seqlens, step.lengths, spec.latent_dim)
        options = {name: getattr(spec, name) for name in _ScoreOptions._fields}
        if spec.expand is None:
            o = paged_attention(q.flatten(0, 1), **pages._asdict(), **options)
        else:  # too slow to decode with; the Engine selects the absorbed form
            options = _ScoreOptions(**options)
            o, _ = _reference(q.flatten(0, 1), pages, options, spec.expand, v.shape[-1])
        return o.view(*q.shape[:3], -1)

    def _store(self, layer: int, slots: Tensor, *new: Tensor) -> None:
        """Write k (B, T, Hkv, D), and v unless the cache stores latents alone, to the slots."""
        for part, x in enumerate(new[: len(self.pages[layer])]):
            x = x.flatten(0, 1).transpose(0, 1)  # (Hkv, N, D)
            pages = self.pages[layer][part].flatten(1, 2)  # (Hkv, slots, D)
            if self.scales:
                scale = x.float().abs().amax(-1).clamp(min=1e-12) / self.max_value
                self.scales[layer][part].flatten(1, 2).index_copy_(1, slots, scale)
                x = x.float() / scale[..., None]
                x = x.round() if pages.dtype == torch.int8 else x
            _raw(pages).index_copy_(1, slots, _raw(x.to(pages.dtype)))

    def copy(self, pairs: list[tuple[int, int]], windowed: bool = False) -> None:
        """Copy blocks; pairs: (source, destination). windowed: of the layers with ring buffers."""
        if pairs:
            source, target = torch.tensor(pairs, device=self.device).t()
            for t in map(_raw, self._tensors(windowed)):
                t.index_copy_(2, target, t.index_select(2, source))

    def copy_rings(self, copies: dict[int, int]) -> None:
        """Copy ring buffers; copies: destination -> source."""
        blocks = (zip(self._ring(source), self._ring(to)) for to, source in copies.items())
        self.copy([pair for ring in blocks for pair in ring], True)

    def read(
        self, table: list[int], n: int, ring: int = 0, first: int = 0, last: int | None = None
    ) -> SwappedKV:
        """Copy KV of a sequence's tokens `first` to `last`, of n in the cache, to the host. From a
        GPU the copy is asynchronous: synchronize the stream before another thread reads it."""
        last = n if last is None else last

        def one(layer: int, t: Tensor) -> Tensor:
            blocks = self._ring(ring) if layer in self.windowed else table
            start = min(last, max(first, n - len(blocks) * self.block_size))
            slots = self._slots(blocks, start, last)
            return _raw(t).flatten(2, 3).index_select(2, slots).to("cpu", non_blocking=True)

        kv, scales = ([*map(one, count(), tensors)] for tensors in (self.pages, self.scales))
        return SwappedKV(last, kv, scales)

    def write(self, table: list[int], first: int, host: SwappedKV, ring: int = 0) -> None:
        """Copy KV from position `first` on from the host to blocks; 0 where the host has none."""
        for tensors, source in ((self.pages, host.kv), (self.scales, host.scales)):
            for layer, (t, x) in enumerate(zip(tensors, source)):
                blocks = self._ring(ring) if layer in self.windowed else table
                n = min(host.n - first, len(blocks) * self.block_size)
                slots = self._slots(blocks, host.n - n, host.n)
                # a copy of contiguous memory is asynchronous, that of a slice is not
                x = x[:, :, -n:].contiguous().to(self.device, non_blocking=True)
                x = F.pad(x, (0, 0) * (x.dim() - 3) + (n - x.shape[2], 0))  # may have held NaN
                _raw(t).flatten(2, 3).index_copy_(2, slots, x)

    def _ring(self, ring: int) -> list[int]:
        """Blocks of a ring buffer."""
        return [*range(ring * self.ring_blocks, (ring + 1) * self.ring_blocks)]

    def _tensors(self, windowed: bool) -> list[Tensor]:
        """Pages and scales of the layers with, or without, ring buffers."""
        layers = [i for i in range(len(self.pages)) if (i in self.windowed) == windowed]
        return [tensors[i] for tensors in (self.pages, self.scales) if tensors for i in layers]

    def _slots(self, table: list[int], start: int, end: int) -> Tensor:
        """Slots of positions start to end; the blocks of a sliding window are reused in turn."""
        p = torch.arange(start, end)
        blocks = torch.tensor(table)[p // self.block_size % len(table)]
        slots = blocks * self.block_size + p % self.block_size
        return slots.to(self.device, non_blocking=True)


def _raw(x: Tensor) -> Tensor:
    """View fp8 as uint8: index_copy and other data movement do not support it everywhere."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


# --------------------------------------------------------------------------------------------------
# Attention through block tables, in plain torch
# --------------------------------------------------------------------------------------------------

MAX_GATHERED = 1 << 20  # key elements gathered at a time: with the values 4 MB in bf16
QUERY_CHUNK = 128  # queries of a sequence at a time


def _dense_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: int | None = None,
    softcap: float | None = None, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Reference for one sequence: q (T, Hq, D) of the last T of S tokens, k (S, Hkv, D), v (S, Hkv,
    Dv) -> o (T, Hq, Dv), lse (T, Hq)."""
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
    """The cache: k (blocks, block_size, Hkv, D), v the same with Dv, or None if it is the first
    latent_dim columns of k; scales (blocks, block_size, Hkv) if quantized; block_table (R, W),
    cu_seqlens (R + 1,), lengths (R,) int32."""

    k: Tensor
    v: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    block_table: Tensor
    cu_seqlens: Tensor
    lengths: Tensor
    latent_dim: int | None


class _ScoreOptions(NamedTuple):
    """What turns q . k into a logit."""

    scale: float
    window: int | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None


def _reference(
    q: Tensor, p: _Pages, options: _ScoreOptions, expand: Callable | None = None, Dv: int = 0
) -> tuple[Tensor, Tensor]:
    """One sequence at a time: gather its KV, then _dense_attention. expand: unabsorbed latent
    attention, from latents (1, S, 1, D) to keys and values (1, S, Hq, ...), these with Dv columns.
    """
    Dv = Dv or p.latent_dim or p.v.shape[3]
    o, lse = q.new_zeros(*q.shape[:2], Dv), q.new_full(q.shape[:2], -math.inf, dtype=torch.float32)
    cu, dtype = p.cu_seqlens.tolist(), torch.promote_types(q.dtype, torch.float32)
    for table, begin, end, length in zip(p.block_table, cu, cu[1:], p.lengths.tolist()):
        if end > begin:
            used = table[: -(-length // p.k.shape[1])]
            gather = lambda *x: _gather(*x, used, 1, q.dtype if expand else dtype)[0, :, :length]
            k = gather(p.k, p.k_scale).transpose(0, 1)
            v = k[..., :Dv] if p.v is None else gather(p.v, p.v_scale).transpose(0, 1)
            k, v = (x[0] for x in expand(k[None])) if expand else (k, v)
            o[begin:end], lse[begin:end] = _dense_attention(q[begin:end], k, v, **options._asdict())
    return o, lse


def _torch_attention(q: Tensor, p: _Pages, options: _ScoreOptions) -> Tensor:
    """The fast plain-torch path: scaled_dot_product_attention over keys gathered for a few
    sequences at a time, which fit in the CPU cache. Queries are split into chunks of at most
    QUERY_CHUNK; chunks of equal length and similar number of keys, such as all decode tokens, share
    a call, so there is little padding and no loop over tokens."""
    o = q.new_zeros(*q.shape[:2], p.latent_dim or p.v.shape[3])
    cu, groups = p.cu_seqlens.tolist(), defaultdict(list)
    for r, (begin, end, length) in enumerate(zip(cu, cu[1:], p.lengths.tolist())):
        for row in range(begin, end, QUERY_CHUNK):
            n = min(QUERY_CHUNK, end - row)
            groups[n].append((length - end + row + n, row, r))  # keys its last query sees
    for n, runs in groups.items():
        runs.sort(reverse=True)
        while runs:
            S = runs[0][0]
            most = max(1, MAX_GATHERED // (S * p.k.shape[2] * p.k.shape[3]))
            few = [run for run in runs[:most] if run[0] >= 0.8 * S - 64]
            ends, rows, seqs = (torch.tensor(x, device=q.device) for x in zip(*few))
            rows = rows[:, None] + torch.arange(n, device=q.device)
            o[rows] = _batched_attention(q[rows], ends, p.block_table[seqs], S, p, options)
            del runs[: len(few)]
    return o


def _batched_attention(
    q: Tensor, ends: Tensor, tables: Tensor, S: int, p: _Pages, options: _ScoreOptions
) -> Tensor:
    """q (B, T, Hq, D), in row b the last T of its ends[b] <= S tokens; tables (B, W) -> o."""
    (B, T, Hq, D), Hkv = q.shape, p.k.shape[2]
    first = 0 if options.window is None else max(0, int(ends[-1]) - T - options.window + 1)
    size = p.k.shape[1]
    table = tables[:, first // size : -(-S // size)].flatten()
    k = _gather(p.k, p.k_scale, table, B, q.dtype)  # (B, Hkv, keys, D)
    v = k if p.v is None else _gather(p.v, p.v_scale, table, B, q.dtype)
    j = torch.arange(k.shape[2], device=q.device) + first // size * size
    tail = int(ends[-1]) - first // size * size  # from here on some slots are past a row's end:
    for x in (k, v):  # they may hold NaN or inf, and 0 * NaN is NaN
        x[:, :, tail:].masked_fill_((j[tail:] >= ends[:, None])[:, None, :, None], 0)
    i = (ends[:, None] - T + torch.arange(T, device=q.device))[:, None, :, None]
    mask = j <= i  # (B, 1, T, keys)
    if options.window is not None:
        mask &= i - j < options.window
    if options.alibi_slopes is not None:
        bias = -options.alibi_slopes[:, None, None] * (i - j)
        mask = bias.masked_fill(~mask, -math.inf).to(q.dtype)  # (B, Hq, T, keys)
    if options.softcap is not None or options.sinks is not None:
        return _unfused_attention(q, k, v, mask, options)[..., : p.latent_dim]
    if T == 1:  # query heads that share keys become query rows of one head
        mask = mask.reshape(B, -1, Hq // Hkv, mask.shape[-1]) if mask.shape[1] > 1 else mask
        q = q.view(B, Hkv, -1, D)
    else:
        q = q.transpose(1, 2)
    o = F.scaled_dot_product_attention(q, k, v, mask, scale=options.scale, enable_gqa=T > 1)
    o = o.view(B, 1, Hq, -1) if T == 1 else o.transpose(1, 2)
    return o if p.v is not None else o[..., : p.latent_dim]


def _unfused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: _ScoreOptions
) -> Tensor:
    """With softcap or sinks, which scaled_dot_product_attention lacks. mask (B, 1 or Hq, T, keys):
    bool, or an additive bias with ALiBi."""
    (B, T, _, _), Hkv, dtype = q.shape, k.shape[1], torch.promote_types(q.dtype, torch.float32)
    by_head = lambda x: x.unflatten(1, (Hkv, -1)) if x.shape[1] > 1 else x[:, None]
    s = by_head(q.transpose(1, 2).to(dtype)).flatten(2, 3)  # (B, Hkv, heads * T, D)
    s = (s @ k.to(dtype).transpose(-1, -2) * options.scale).unflatten(2, (-1, T))
    if options.softcap is not None:
        s = (s / options.softcap).tanh_() * options.softcap
    mask = by_head(mask)
    s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
    if options.sinks is not None:
        sinks = options.sinks.to(dtype).view(1, Hkv, -1, 1, 1).expand(B, -1, -1, T, -1)
        s = torch.cat((s, sinks), dim=-1)
    p = s.softmax(-1)[..., : k.shape[2]].flatten(2, 3)
    return (p @ v.to(dtype)).unflatten(2, (-1, T)).flatten(1, 2).transpose(1, 2).to(q.dtype)


def _gather(x: Tensor, scale: Tensor | None, table: Tensor, B: int, dtype: torch.dtype) -> Tensor:
    """x (blocks, block_size, Hkv, D), table of B * n blocks -> (B, Hkv, n * block_size, D)"""
    by_head = lambda x: x.movedim(2, 0).index_select(1, table)  # (Hkv, B * n, block_size, ...)
    found = by_head(_raw(x)).view(x.dtype).to(dtype)
    if scale is not None:
        found = found * by_head(scale)[..., None].to(dtype)
    return found.view(len(found), B, -1, x.shape[3]).transpose(0, 1)


# --------------------------------------------------------------------------------------------------
# Attention through block tables, one Triton kernel
# --------------------------------------------------------------------------------------------------

# Logits are multiplied by log2(e), since a GPU has an exp2 instruction and no exp
LOG2E = tl.constexpr(math.log2(math.e)) if triton else None
# For fp32 inputs: three tf32 matmuls on tensor cores reach fp32 accuracy
PRECISION = tl.constexpr("ieee" if INTERPRET else "tf32x3") if triton else None
jit = triton.jit if triton else (lambda fn=None, **_: fn or (lambda fn: fn))


@jit
def _find_sequence(pid, cu_ptr, n_seqs, BLOCK_Q: tl.constexpr):
    """For tile pid: its sequence, its first query in it, the sequence's first row and its length.

    Sequence r owns the tiles from cu[r] // BLOCK_Q + r: enough for any lengths, so that the grid
    depends on shapes alone. Tiles past the end of a sequence have no rows."""
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
        x = x.to(tl.float32)  # via fp32: not all narrow types convert to each other directly
    return x.to(like.dtype)


@jit(do_not_specialize=["n_seqs", "width"])
def _paged_kernel(
    q_ptr,  # (N, Hq, D)
    k_ptr, v_ptr,  # (blocks, PAGE, Hkv, D) and DV; v None: the first BLOCK_D columns of k
    k_scale_ptr, v_scale_ptr,  # (blocks, PAGE, Hkv) fp32; None: not quantized
    o_ptr, lse_ptr,  # (SPLITS, N, Hq, DV), (SPLITS, N, Hq) fp32
    table_ptr, cu_ptr, lengths_ptr,  # (R, width), (R + 1,), (R,) int32
    slopes_ptr, sinks_ptr, scale, softcap, window,  # None: compiled out
    q_strides, k_strides, v_strides, scale_strides, n_seqs, width,
    D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, WIDE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """o = softmax(logits(q k^T)) v, lse = log sum exp. Grid (query tiles * SPLITS, head tiles).

    The rows of a tile are BLOCK_Q queries of BLOCK_H heads that share a key head, so a decode step
    reads each key once for all of them. A tile of keys has BLOCK_N keys for any PAGE: each key's
    block is looked up. SPLITS programs share the keys of a query tile. D is BLOCK_D + BLOCK_R if it
    is a sum of two powers of two (192, 576). WIDE: int64 offsets, for 2^31 elements or more.
    """
    HEAD_TILES: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    n_heads = tl.num_programs(1) // HEAD_TILES * GROUP
    pid, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    seq, first_t, q_start, q_len = _find_sequence(pid, cu_ptr, n_seqs, BLOCK_Q)
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
    if sinks_ptr is not None and split == 0:  # the sink is one logit, counted in one split
        m_i = tl.load(sinks_ptr + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
        l_i += 1.0
    slope = 0.0
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + head, mask=valid, other=0.0)[:, None] * LOG2E
    # key tiles: [first, inner) cross the window's edge, [inner, outer) need no mask, [outer, last)
    # cross the diagonal or the end
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
                in_range = j < k_len
                seen_k = in_range[:, None]
                if phase == 1:
                    block = tl.load(table_ptr + j // PAGE)
                else:
                    block = tl.load(table_ptr + j // PAGE, mask=in_range, other=0)
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
                    k_scale = tl.load(k_scale_ptr + scale_slots, mask=in_range, other=0.0)
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
                base = tl.where(m_new == float("-inf"), 0.0, m_new)  # all keys masked so far
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
                        v_scale = tl.load(v_scale_ptr + scale_slots, mask=in_range, other=0.0)
                        p *= v_scale[None, :]
                acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)

    total = tl.where(l_i == 0, 1.0, l_i)
    out_row = ((split * tl.load(cu_ptr + n_seqs) + q_start + t).to(tl.int64)) * n_heads + head
    o = (acc / total[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + out_row[:, None] * DV + offs_v, o, mask=q_seen & (offs_v < DV))
    lse = tl.where(l_i == 0, float("-inf"), (m_i + tl.log2(total)) / LOG2E)
    tl.store(lse_ptr + out_row, lse, mask=valid)


@jit
def _combine_kernel(
    o_parts_ptr, lse_parts_ptr,  # (SPLITS, N, Hq, DV) fp32, (SPLITS, N, Hq) fp32
    o_ptr, lse_ptr, cu_ptr, n_seqs, DV: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """lse = log sum exp(lse_split), o = sum exp(lse_split - lse) o_split. Grid (N, Hq)."""
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


# By maximum head dim: BLOCK_N, (rows per tile, num_warps) for decode-only steps, and the same for
# steps with prefill.
CONFIGS: dict[int, tuple[int, tuple[int, int], tuple[int, int]]] = {
    128: (64, (16, 4), (128, 8)),
    256: (32, (16, 4), (64, 8)),
    1024: (32, (16, 8), (64, 8)),
}
# A key's address depends on the block table, and Triton divides num_stages between the two loads:
# with 5, two tiles of keys are in flight; with 3, for small shared memory, one.
NUM_STAGES, FEW_STAGES = 5, 3


def _next_power_of_2(n: int) -> int:
    """The next power of two, at least 16, the minimum of tl.dot."""
    return max(16, 1 << (n - 1).bit_length())


def _split_dim(D: int) -> tuple[int, int]:
    """BLOCK_D and BLOCK_R: 192 = 128 + 64, 576 = 512 + 64; else D padded to a power of two."""
    low = 1 << (D.bit_length() - 1)
    rest = D - low
    return (low, rest) if rest >= 16 and rest & (rest - 1) == 0 else (_next_power_of_2(D), 0)


@lru_cache
def _device_properties(index: int | None) -> tuple[int, int, int]:
    """Number of SMs, shared memory per program in bytes, major compute capability."""
    if index is None:  # the interpreter: numbers of an H100
        return 132, 232448, 9
    p = torch.cuda.get_device_properties(index)
    return p.multi_processor_count, p.shared_memory_per_block_optin, p.major


def _config(
    q: Tensor, group: int, widest: int, *, decode: bool, has_v: bool, quantized: bool
) -> tuple[int, int, int, int]:
    """BLOCK_N, rows per tile, num_warps, num_stages. group: query heads per key head; widest: the
    largest padded head dim; has_v: values are not a part of the tile of keys."""
    BLOCK_N, few, many = CONFIGS[min(d for d in CONFIGS if d >= widest)]
    rows, warps = few if decode and group <= few[0] else many
    _, shared_memory, major = _device_properties(q.device.index)
    stages = NUM_STAGES if shared_memory >= 1 << 17 else FEW_STAGES
    if q.element_size() == 4:
        rows, stages = min(rows, 32), 1
    elif widest > 256 and has_v:
        stages = FEW_STAGES
    if widest > 256 and (major != 9 or has_v or quantized):
        rows = min(rows, 32)  # 64 are for Hopper's wgmma, and do not fit beside values or scales
    return BLOCK_N, rows, warps, stages


def _launch(q: Tensor, p: _Pages, options: _ScoreOptions, n_splits: int) -> tuple[Tensor, Tensor]:
    """Launch the kernel. The grid depends on shapes alone, so that a CUDA graph can be replayed
    with other block tables and lengths."""
    (N, Hq, D), (blocks, page, Hkv, _), R = q.shape, p.k.shape, len(p.lengths)
    DV, (BLOCK_D, BLOCK_R) = p.latent_dim or p.v.shape[3], _split_dim(D)
    v = p.k[..., :DV] if p.v is None and BLOCK_D != DV else p.v
    v_scale = p.k_scale if p.v is None and v is not None else p.v_scale
    BLOCK_DV = BLOCK_D if v is None else _next_power_of_2(DV)
    widest = max(BLOCK_D + BLOCK_R, BLOCK_DV)
    flags = dict(decode=N <= R, has_v=v is not None, quantized=p.k_scale is not None)
    BLOCK_N, rows, warps, stages = _config(q, Hq // Hkv, widest, **flags)
    BLOCK_H = min(1 << (Hq // Hkv - 1).bit_length(), rows)
    BLOCK_Q = rows // BLOCK_H
    head_tiles = Hkv * -(-Hq // Hkv // BLOCK_H)
    tiles = N // BLOCK_Q + R
    if not n_splits:  # two programs per SM, each with at least 256 keys
        num_sms, *_ = _device_properties(q.device.index)
        wanted = -(-2 * num_sms // (tiles * head_tiles))
        most = p.block_table.shape[1] * page // 256
        n_splits = 1 << (max(1, min(wanted, most, 64)).bit_length() - 1)  # limits compilations
    o, lse = q.new_zeros(N, Hq, DV), q.new_full((N, Hq), -math.inf, dtype=torch.float32)
    o_parts, lse_parts = o, lse
    if n_splits > 1:
        o_parts = torch.empty((n_splits, N, Hq, DV), device=q.device)
        lse_parts = torch.empty((n_splits, N, Hq), device=q.device)
    cu = p.cu_seqlens
    _paged_kernel[tiles * n_splits, head_tiles](
        q, p.k, v, p.k_scale, v_scale, o_parts, lse_parts, p.block_table, cu, p.lengths,
        options.alibi_slopes, options.sinks, options.scale, options.softcap, options.window,
        q.stride(), p.k.stride(), (p.k if v is None else v).stride(),
        (0, 0, 0) if p.k_scale is None else p.k_scale.stride(), R, p.block_table.shape[1], D=D,
        DV=DV, GROUP=Hq // Hkv, PAGE=page, SPLITS=n_splits, WIDE=p.k.stride(0) * blocks >= 2**31,
        BLOCK_Q=BLOCK_Q, BLOCK_H=BLOCK_H, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D, BLOCK_R=BLOCK_R,
        BLOCK_DV=BLOCK_DV, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if n_splits > 1:
        _combine_kernel[N, Hq](
            o_parts, lse_parts, o, lse, cu, R, DV=DV, SPLITS=n_splits,
            BLOCK_S=_next_power_of_2(n_splits), BLOCK_DV=_next_power_of_2(DV),
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
    """Custom op, so that torch.compile does not trace into the kernel launch."""
    pages, options = _Pages(*args[:8]), _ScoreOptions(*args[8:13])
    n_splits, return_lse = args[13:]
    if not _uses_kernel(q):
        return _torch_fallback(q, pages, options, return_lse)
    with torch.cuda.device_of(q):
        return _launch(q, pages, options, n_splits)


@_paged_op.register_fake
def _(q, k, v, *args):
    DV = args[5] or v.shape[3]  # latent_dim
    return q.new_empty(*q.shape[:2], DV), q.new_empty(q.shape[:2], dtype=torch.float32)


def _torch_fallback(q: Tensor, p: _Pages, options: _ScoreOptions, return_lse: bool) -> tuple:
    """Without Triton. scaled_dot_product_attention returns no lse, so the reference computes it."""
    if return_lse:
        return _reference(q, p, options)
    return _torch_attention(q, p, options), q.new_empty(q.shape[:2], dtype=torch.float32)


def _uses_kernel(q: Tensor) -> bool:
    """Whether the Triton kernel supports this input."""
    runs = triton is not None and (q.is_cuda or INTERPRET) and q.dtype != torch.float64
    return runs and not (INTERPRET and q.dtype == torch.bfloat16)  # the interpreter gets bf16 wrong


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor | None, block_table: Tensor, cu_seqlens: Tensor,
    lengths: Tensor, *, scale: float | None = None, window: int | None = None,
    softcap: float | None = None, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, latent_dim: int | None = None,
    n_splits: int | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Causal attention of packed new tokens to the cached tokens of their sequences.

    q (N, Hq, D): sequence r has rows cu_seqlens[r] to cu_seqlens[r + 1]: a decode token, a prefill
    chunk, or none. They are the last of its lengths[r] tokens, whose KV is in the cache.
    k (blocks, block_size, Hkv, D), v (blocks, block_size, Hkv, Dv), of any strides (heads outermost
    is fastest); token p of sequence r is at k[block_table[r, p // block_size], p % block_size].
    block_table (R, W), cu_seqlens (R + 1,), lengths (R,): int32, on q's device. With latent_dim
    (absorbed latent attention) v is None: the values are the first latent_dim columns of k.
    k_scale, v_scale (blocks, block_size, Hkv) fp32 dequantize int8 and fp8. scale: D ** -0.5 if
    None; window: keys with i - j < window; softcap * tanh(. / softcap), then - alibi_slopes (Hq,) *
    (i - j); sinks (Hq,): an extra logit without a value.

    -> o (N, Hq, Dv) in q's dtype, and with return_lse (N, Hq) fp32, the natural log. Rows of no
    sequence are 0, with lse -inf. n_splits: programs that share the keys of a row; None: enough to
    fill the GPU. On CUDA there is no host sync, and launches depend on shapes alone. ValueError
    names the argument of a wrong shape or value.
    """
    q, p, options = _check_args(
        q, k, v, block_table, cu_seqlens, lengths, k_scale=k_scale, v_scale=v_scale,
        latent_dim=latent_dim, scale=scale, window=window, softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=sinks,
    )  # fmt: skip
    ok = n_splits is None or (_is_int(n_splits) and n_splits > 0)
    _check(ok, f"n_splits must be a positive integer, not {n_splits}")
    if _uses_kernel(q) or torch.compiler.is_compiling():
        o, lse = _paged_op(q, *p, *options, n_splits or 0, return_lse)
    else:
        o, lse = _torch_fallback(q, p, options, return_lse)
    return (o, lse) if return_lse else o


def paged_attention_reference(
    *args: Any, n_splits: int | None = None, return_lse: bool = False, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """paged_attention in plain torch: one sequence at a time, all scores at once."""
    o, lse = _reference(*_check_args(*args, **options))
    return (o, lse) if return_lse else o


def _check_args(
    q, k, v, block_table, cu_seqlens, lengths, *, k_scale=None, v_scale=None, latent_dim=None,
    scale=None, window=None, softcap=None, alibi_slopes=None, sinks=None,
) -> tuple[Tensor, _Pages, _ScoreOptions]:  # fmt: skip
    """Validated, contiguous arguments. ValueError names the argument at fault."""
    shape = lambda x: None if x is None else tuple(x.shape)
    ok = q.dim() == 3 and k.dim() == 4 and 0 not in (*q.shape[1:], *k.shape[1:])
    _check(ok, f"q {shape(q)} must be (N, Hq, D), k {shape(k)} (blocks, block_size, Hkv, D)")
    _check(lengths.dim() == 1, f"lengths must be (R,), not {shape(lengths)}")
    (_, Hq, D), R = q.shape, len(lengths)
    _check(k.shape[3] == D and Hq % k.shape[2] == 0, f"k {shape(k)} does not fit q {shape(q)}")
    _check((v is None) == (latent_dim is not None), "pass either v or latent_dim")
    _check(v is None or v.shape[:3] == k.shape[:3], f"v {shape(v)} does not fit k {shape(k)}")
    ok = latent_dim is None or 0 < latent_dim <= D
    _check(ok, f"latent_dim must be from 1 to k's {D}, not {latent_dim}")
    for name, x, wanted in (
        ("cu_seqlens", cu_seqlens, (R + 1,)),
        ("block_table", block_table, (R, *block_table.shape[-1:])),
        ("k_scale", k_scale, k.shape[:3]),
        ("v_scale", v_scale, k.shape[:3]),
        ("alibi_slopes", alibi_slopes, (Hq,)),
        ("sinks", sinks, (Hq,)),
    ):
        _check(x is None or x.shape == wanted, f"{name} must be {tuple(wanted)}, not {shape(x)}")
    _check((k_scale is None) == (v_scale is None) or v is None, "k_scale requires v_scale")
    ok = window is None or (_is_int(window) and window > 0)
    _check(ok, f"window must be a positive integer, not {window}")
    _check(softcap is None or softcap > 0, f"softcap must be positive, not {softcap}")
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    v = v if v is None or v.stride(-1) == 1 else v.contiguous()
    if v_scale is not None and v_scale.stride() != k_scale.stride():
        k_scale, v_scale = k_scale.contiguous(), v_scale.contiguous()
    integers = (x.to(torch.int32).contiguous() for x in (block_table, cu_seqlens, lengths))
    fp32 = lambda x: None if x is None else x.float().contiguous()
    scale, softcap = D**-0.5 if scale is None else float(scale), softcap and float(softcap)
    pages = _Pages(k, v, k_scale, v_scale, *integers, latent_dim)
    return q, pages, _ScoreOptions(scale, window, softcap, fp32(alibi_slopes), fp32(sinks))


# --------------------------------------------------------------------------------------------------
# The engine
# --------------------------------------------------------------------------------------------------


class GreedySampler:
    """The Engine's default sampler. generation/sampling.py's RowSampler supports all parameters."""

    def check(self, params: SamplingParams) -> None:
        """ValueError names a field that changes the distribution."""
        for name in (
            "temperature", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "logit_bias", "min_new_tokens", "grammar",
        ):  # fmt: skip
            value, neutral = getattr(params, name), getattr(SamplingParams, name)
            ok = not value if name == "temperature" else value == neutral
            _check(ok, f"{name} {value!r} requires a sampler that supports it: Engine(sampler=...)")

    def __call__(self, logits: Tensor, sequences: list[Sequence]) -> Tensor:
        """logits (R, V) -> ids (R,); -1 where the logits are not finite."""
        ids = logits.argmax(-1)
        return ids.where(logits.gather(-1, ids[:, None])[:, 0].isfinite(), -1)


def num_window_blocks(
    windows: Iterable[int | None], block_size: int, max_num_batched_tokens: int
) -> int:
    """Most blocks of a sequence that one step reads and writes in layers with windows; 0: none."""
    n = max((w for w in windows if w), default=0) + max_num_batched_tokens - 1  # positions
    return 1 + -(-(n - 1) // block_size) if any(windows) else 0  # at any alignment


Draft = tuple[list[int], Tensor | None]  # k tokens, and the q (k, V) they were sampled from or None
NO_DRAFT: Draft = [], None


class Engine:
    """Continuous batching of requests on one model.

        engine = Engine(model, num_blocks=1024)
        id = engine.add(prompt_ids, SamplingParams(temperature=0))
        while engine.unfinished:
            for output in engine.step():
                ...

    The module docstring says how it calls the model. It changes one setting of the model: latent
    attention is absorbed for any number of tokens.

    max_num_batched_tokens: token budget of a step, which bounds inter-token latency.
    max_num_seqs: samples that run at once, by default 64 or the budget. policy, continuous: see
    Scheduler. kv_swap: preemption swaps KV to host memory. kv_dtype: see PagedKVCache.

    sampler: an object with check(params), which raises ValueError, and __call__(logits (R, V),
    sequences) -> ids (R,), -1 where no token can be sampled. output_callback: called with each new
    sequence, returns its listener, an object with push(token), end(reason), and finish_reason, set
    once its text is complete. eos_ids: None for those of model.config. static: pad steps to a few
    shapes, and on CUDA replay CUDA graphs (the default there, but not with MoE layers: pass
    moe.has_static_shapes of them); `compile` compiles them too.

    drafter: drafter(tokens, k) -> (up to k draft ids, the q (k, V) they were sampled from, None if
    deterministic). Optional methods: propose_batch(sequences, contexts, ks) -> a draft of each;
    observe(seq, start, hidden (t, C)), hidden states of all tokens that were run and accepted, from
    position start on: a view, to be copied if kept; forget(seq) at the end. Tokens found in the
    prefix cache are not observed; preempted ones may be observed twice.
    speculate_k: drafts per step, or an object with choose(sequences) -> k of each decoding
    sequence, observe(sequences, proposed, accepted, tokens, seconds, draft_seconds) after each
    step, tokens being all that the step ran, and optionally forget.
    verifier(logits (M, V), sequences, drafts) -> new tokens of each sequence: the accepted drafts
    and one more, -1 if none can be sampled. A sequence with d drafts has d + 1 rows.

    adapters: generation/adapters.py's AdapterPool, whose adapters requests can name, or
    serving/shared_models.py's ModelPool, which has head(hidden (R, C), models) -> logits.
    cache: called like PagedKVCache, the default; optional method: reclaim(free blocks).
    kv_store: serving/kv_store.py's KVStore, where blocks of finished sequences are found.
    """

    def __init__(
        self, model: Any, *, num_blocks: int, block_size: int = 16,
        max_num_batched_tokens: int = 512, max_num_seqs: int | None = None,
        policy: Callable[[Sequence], Any] = fcfs, kv_swap: bool = False, continuous: bool = True,
        prefix_cache: bool = True, kv_dtype: str | None = None, sampler: Any = None,
        drafter: Any = None,
        verifier: Callable[[Tensor, list[Sequence], list[Draft]], list[list[int]]] | None = None,
        speculate_k: Any = 4, output_callback: Callable[[Sequence], Any] | None = None,
        eos_ids: Iterable[int] | None = None, compile: bool = False, static: bool | None = None,
        clock: Callable[[], float] = time.perf_counter, adapters: Any = None,
        cache: Callable[..., Any] | None = None, kv_store: Any = None,
    ):  # fmt: skip
        self.model, self.clock, self.output_callback = model, clock, output_callback
        weight = next(model.parameters())
        self.cuda_graphs = self._prepare_model(weight, compile, static)
        self.sampler = GreedySampler() if sampler is None else sampler
        self.drafter, self.adapters = drafter, adapters
        self.verifier = self._verify_by_sampling if verifier is None else verifier
        if _is_int(speculate_k) and speculate_k >= 0:
            fixed = lambda sequences, k=speculate_k: [k] * len(sequences)
            speculate_k = SimpleNamespace(choose=fixed, observe=lambda *_: None)
        self.speculate_k, ok = speculate_k, hasattr(speculate_k, "choose")
        _check(ok, f"speculate_k must be >= 0 or an object with choose(), not {speculate_k!r}")
        self.eos = set(model.config.eos_ids if eos_ids is None else eos_ids)
        self.allocator = BlockAllocator(num_blocks, block_size, prefix_cache)
        max_num_seqs = min(64, max_num_batched_tokens) if max_num_seqs is None else max_num_seqs
        limits = max_num_batched_tokens, max_num_seqs
        windows = () if prefix_cache else getattr(model.config, "windows", ())
        ring_blocks = num_window_blocks(windows, block_size, max_num_batched_tokens)
        max_blocks = ring_blocks if windows and all(windows) else None
        args = self.allocator, *limits, policy, kv_swap, continuous, max_blocks
        self.scheduler = Scheduler(*args)
        # adapters are in blocks too, which must be the same in all layers
        rings = any(windows) and max_blocks is None and adapters is None
        rings = max_num_seqs if rings and max_num_seqs * ring_blocks < num_blocks else 0
        args = model.config, num_blocks, block_size, weight.dtype, weight.device, kv_dtype
        self.cache = (cache or PagedKVCache)(*args, rings, ring_blocks)
        self.kv_store = self.scheduler.kv_store = kv_store or NO_KV_STORE
        if kv_store is not None:
            _check(prefix_cache, "kv_store requires prefix_cache: it keeps the tree's blocks")
            layers = [*zip(*filter(None, (self.cache.pages, self.cache.scales)))]
            kv_store.bind(layers, block_size)
        if adapters is not None:
            adapters.bind(self.cache, self.allocator, *limits)
        self.outputs: dict[Any, Output] = {}  # of unfinished requests
        self.sequences: dict[Any, list[Sequence]] = {}
        # sampled but not yet delivered: (sequence, index, token, log-probabilities, time)
        self.pending_outputs: deque[tuple[Sequence, int, int, Tensor | None, float]] = deque()
        self.updated_outputs: dict[Any, Output] = {}  # for the caller of step
        self.n_arrivals = self.n_last_step = 0  # requests; tokens
        # called before each step with what the last one left of its budget of tokens: the outputs
        # of that have been delivered
        self.background: Callable[[int], Any] | None = None
        self.counts = Counter(steps=0, tokens_run=0, tokens_new=0, proposed=0, accepted=0)

    def _prepare_model(
        self, weight: Tensor, compile: bool, static: bool | None
    ) -> CUDAGraphRunner | None:
        """Check and set up the model; returns what runs it with static shapes."""
        rope = getattr(self.model.config, "rope_scaling", None) or {}
        _check(
            rope.get("rope_type") != "dynamic",
            "rope_scaling 'dynamic' rotates all keys by the longest sequence of a batch, so it "
            "cannot be batched; set another rope_type in config.json",
        )
        modules = list(self.model.modules())
        for module in modules:  # a step mixes prefill and decode
            if hasattr(module, "absorb_up_to"):
                module.absorb_up_to = math.inf
        if static is None:  # MoE layers sync with the host for the tokens per expert
            static = weight.is_cuda and _uses_kernel(weight)
            static = compile or (static and not any(hasattr(m, "experts") for m in modules))
        run = lambda *step: self._hidden(Step(*step))
        return CUDAGraphRunner(run, weight.device, compile, packed=True) if static else None

    @property
    def capacity(self) -> int | float:
        """Tokens that a sequence can have, prompt and output."""
        return self._capacity(len(self.allocator.refs))

    def _capacity(self, blocks: int) -> int | float:
        max_blocks = self.scheduler.max_blocks
        window_fits = max_blocks is not None and max_blocks <= blocks
        whole = blocks * self.allocator.block_size
        context = getattr(self.model.config, "context", whole)
        return context if window_fits else min(whole, context)

    # ---- requests ----

    def add(
        self, prompt_ids: Iterable[int], params: SamplingParams = SamplingParams(temperature=0.0),
        *, id: Any = None, priority: int = 0, client: str = "",
        prompt_logprobs: int | None = None, prompt_logprobs_from: int = 1,
    ) -> Any:  # fmt: skip
        """Queue a request; returns its id. client: who sent it, for policies that are fair to each.
        prompt_logprobs: also return the log-probability of each prompt token from number
        prompt_logprobs_from (not 0) on, and of the K most likely ones in its place; only the tokens
        before are then read from the prefix cache. ValueError says why it cannot be served."""
        ok = isinstance(prompt_ids, Iterable)
        _check(ok, f"prompt_ids must be a list of token ids, not {prompt_ids!r}")
        prompt = list(prompt_ids)
        self._check_request(prompt, params)
        _check(_is_int(priority), f"priority must be an integer, not {priority!r}")
        _check(isinstance(id, Hashable), f"id must be hashable, not {id!r}")
        if id is None:
            id = next(n for n in count(self.n_arrivals) if n not in self.outputs)
        _check(id not in self.outputs, f"id {id!r} is in use by an unfinished request")
        samples = [Sample() for _ in range(params.n)]
        k, V = prompt_logprobs, self.model.config.vocab_size
        ok = k is None or (_is_int(k) and 0 <= k <= V)
        _check(ok, f"prompt_logprobs must be from 0 to {V}, not {k!r}")
        first, most = prompt_logprobs_from, len(prompt)
        ok = _is_int(first) and 1 <= first <= most
        _check(ok, f"prompt_logprobs_from must be from 1 to {most}, not {first!r}")
        output = Output(
            id, prompt, samples, arrival_time=self.clock(), num_prompt_logprobs=k,
            prompt_logprobs_from=first,
        )  # fmt: skip
        seq = Sequence(
            list(prompt), len(prompt), params, output, priority=priority, client=client,
            arrival=self.n_arrivals, n_unforked=params.n, adapter=self._adapter(params),
        )  # fmt: skip
        seq.listener = self.output_callback(seq) if self.output_callback else None
        self.n_arrivals += 1
        self.outputs[id], self.sequences[id] = output, [seq]
        self.scheduler.add(seq)
        return id

    def _check_request(self, prompt: list[int], params: SamplingParams) -> None:
        _check(isinstance(params, SamplingParams), f"params must be SamplingParams, not {params!r}")
        V, whole = self.model.config.vocab_size, len(prompt) + params.max_new_tokens
        _check(prompt, "the prompt has no tokens")
        for t in prompt:
            ok = _is_int(t) and 0 <= t < V
            _check(ok, f"prompt token id {t!r} is not in the vocabulary, 0 to {V - 1}")
        asked = f"max_new_tokens {params.max_new_tokens} and {len(prompt)} prompt tokens"
        context = getattr(self.model.config, "context", math.inf)
        _check(whole <= context, f"{asked} exceed the model's context of {context}; reduce one")
        cache, adapter = self.capacity, self._adapter(params)
        if adapter is not None:
            cache = self._capacity(len(self.allocator.refs) - adapter.num_blocks)
            asked += f", with adapter {adapter.name},"
        _check(whole <= cache, f"{asked} exceed the KV cache of {cache} tokens; reduce one")
        most = self.scheduler.max_num_seqs
        _check(params.n <= most, f"n must be at most max_num_seqs ({most}), not {params.n}")
        _check((params.logprobs or 0) <= V, f"logprobs must be at most {V}, not {params.logprobs}")
        ok = not params.stop or self.output_callback is not None
        _check(ok, "stop requires an output_callback: the Engine has tokens, not text")
        self.sampler.check(params)

    def _adapter(self, params: SamplingParams) -> Any:
        """ValueError if there is none of that name."""
        if params.adapter is None:
            return None
        _check(self.adapters is not None, "adapter requires adapters: Engine(adapters=...)")
        return self.adapters.get(params.adapter)

    def abort(self, id: Any) -> Output:
        """End a request now. ValueError if the id is unknown."""
        _check(id in self.outputs, f"id {id!r} is not an unfinished request")
        output = self.outputs[id]
        for seq in list(self.sequences[id]):
            self._finish(seq, "abort")
        for sample in output.samples:  # including those that have not forked yet
            sample.finish_reason = sample.finish_reason or "abort"
        return output

    @property
    def unfinished(self) -> int:
        """Number of unfinished requests."""
        return len(self.outputs)

    @property
    def n_waiting(self) -> int:
        """Number of waiting sequences."""
        return len(self.scheduler.waiting)

    def generate(
        self,
        prompts: Iterable[Iterable[int]],
        params: SamplingParams | list[SamplingParams] = SamplingParams(temperature=0.0),
    ) -> list[Output]:
        """Run all prompts to completion, with params for all or one for each; outputs in the order
        of the prompts. An invalid request's output has an error."""
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

    # ---- a step ----

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Run the model once; returns the outputs that changed since the last step. If the model,
        sampler, drafter or policy raises, or the step is interrupted, no request is lost: the next
        step resumes."""
        self._deliver()
        if self.background is not None:
            self.background(self.scheduler.max_num_batched_tokens - self.n_last_step)
        before = self.counts["tokens_run"]
        if self.outputs:
            self._step()
        getattr(self.cache, "reclaim", len)(self.allocator.free)
        self.n_last_step = self.counts["tokens_run"] - before
        updated_outputs, self.updated_outputs = self.updated_outputs, {}
        return list(updated_outputs.values())

    def _step(self) -> None:
        plan, start = Plan(), self.clock()
        decoding = self._choose_num_drafts()
        try:
            self.scheduler.schedule(plan)
            assert plan.run, "nothing can run: a bug in the policy or the scheduler"
            self._copy_kv(plan)  # first: a drafter may write to newly allocated blocks
            drafts, draft_seconds = self._propose_drafts(plan)
            hidden = self._run(plan, drafts)
        except BaseException as e:  # Ctrl-C too: the next step resumes
            repeat = self.kv_store.recover(e)
            self.scheduler.rollback(plan)
            if not repeat:
                raise
            return
        self.scheduler.commit(plan)
        to_sample: dict[Sequence, Draft] = {}  # sequences that sample a token, and their drafts
        rows, row = [], 0  # (row of hidden, sequence)
        for seq, n in plan.run:
            draft = drafts.get(seq, NO_DRAFT)
            row += n + len(draft[0])
            seq.request.timestamps = seq.request.timestamps or [start]
            if seq.request.num_prompt_logprobs is not None:
                self._score_prompt(seq, hidden[row - n - len(draft[0]) :][:n])
            if seq.num_computed_tokens == len(seq.tokens):
                for sample in (seq, *self._fork_samples(seq)):
                    to_sample[sample] = draft
                    rows += [(i, sample) for i in range(row - 1 - len(draft[0]), row)]
        last = torch.tensor([i for i, _ in rows], dtype=torch.long)
        owners = [seq for _, seq in rows]
        logits = self._head(hidden[last.to(hidden.device, non_blocking=True)], owners)
        logprobs = self._logprobs(logits, owners)  # samplers may modify logits
        runs, first = self._sample_or_verify(logits, to_sample), 0
        now = self.clock()
        for (seq, draft), run in zip(to_sample.items(), runs):
            self.scheduler.accept(seq, len(run) - 1)
            new = zip(count(len(seq.tokens)), run, logprobs[first : first + len(run)])
            self.pending_outputs.extend((seq, *x, now) for x in new)
            first += len(draft[0]) + 1
        counts = {s: (len(d[0]), len(run) - 1) for (s, d), run in zip(to_sample.items(), runs)}
        if self.drafter is not None:
            self._observe(plan, hidden, counts)
        ran = [seq for seq in decoding if seq in counts]
        if ran:
            results = map(list, zip(*(counts[seq] for seq in ran)))
            self.speculate_k.observe(ran, *results, row, now - start, draft_seconds)
        self._deliver()
        n_proposed, n_accepted = map(sum, zip(*counts.values())) if counts else (0, 0)
        self.counts.update(steps=1, tokens_run=row, proposed=n_proposed, accepted=n_accepted)

    # ---- speculative decoding ----

    def _choose_num_drafts(self) -> list[Sequence]:
        """Set num_draft_tokens of the decoding sequences, and return them."""
        running = self.scheduler.running if self.drafter is not None else []
        decoding = [seq for seq in running if seq.remaining <= 1 and seq.n_unforked == 1]
        if decoding:
            for seq, k in zip(decoding, self.speculate_k.choose(decoding), strict=True):
                seq.num_draft_tokens = k
        return decoding

    def _propose_drafts(self, plan: Plan) -> tuple[dict[Sequence, Draft], float]:
        """Drafts of the sequences that have slots for them, and the seconds they took."""
        if not plan.drafts:
            return {}, 0.0
        ks, start = list(plan.drafts.values()), self.clock()
        one_by_one = lambda _, contexts, ks: [*map(self.drafter, contexts, ks)]
        propose = getattr(self.drafter, "propose_batch", one_by_one)
        drafts = propose(list(plan.drafts), [seq.tokens for seq in plan.drafts], ks)
        seconds, V = self.clock() - start, self.model.config.vocab_size
        _check(len(drafts) == len(ks), f"drafter: {len(drafts)} drafts for {len(ks)} sequences")
        for (tokens, _), k in zip(drafts, ks):
            ok = len(tokens) <= k and all(_is_int(t) and 0 <= t < V for t in tokens)
            _check(ok, f"drafter: must return at most {k} token ids below {V}, not {tokens!r}")
        return {seq: draft for seq, draft in zip(plan.drafts, drafts) if draft[0]}, seconds

    def _sample_or_verify(
        self, logits: Tensor, to_sample: dict[Sequence, Draft]
    ) -> list[list[int]]:
        """New tokens of each sequence: its accepted drafts and one more."""
        seqs, drafts = list(to_sample), list(to_sample.values())
        if not any(tokens for tokens, _ in drafts):
            return [[id] for id in self.sampler(logits, seqs).tolist()] if seqs else []
        runs = self.verifier(logits, seqs, drafts)
        _check(len(runs) == len(seqs), f"verifier: {len(runs)} results for {len(seqs)} sequences")
        for run, (tokens, _) in zip(runs, drafts):
            n = len(run) - 1
            ok = 0 <= n <= len(tokens) and run[:n] == tokens[:n]
            _check(ok, f"verifier: must return a prefix of {tokens!r} and one token, not {run!r}")
        return runs

    def _verify_by_sampling(
        self, logits: Tensor, seqs: list[Sequence], drafts: list[Draft]
    ) -> list[list[int]]:
        """The default verifier: sample as without drafts, and accept while the sampled token equals
        the draft, so the output is that of plain decoding. Accepted tokens are appended to the
        sequence meanwhile, since the sampler reads it."""
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
        """Pass the drafter the hidden states of all tokens that were run and not rejected."""
        observe, row = getattr(self.drafter, "observe", lambda *_: None), 0
        for seq, n in plan.run:
            proposed, accepted = counts.get(seq, (0, 0))
            if seq.running:  # not aborted meanwhile
                start = seq.num_computed_tokens - accepted - n
                observe(seq, start, hidden[row : row + n + accepted])
            row += n + proposed

    # ---- model and samples ----

    def _copy_kv(self, plan: Plan) -> None:
        """Execute the plan's KV copies."""
        self.cache.copy_rings(self.scheduler.ring_copies)  # of forks of the last step
        self.scheduler.ring_copies.clear()
        for seq, table, ring, n in plan.swap_out:
            seq.swapped_kv = self.cache.read(table, n, ring)
        self.cache.copy([(source, to) for to, source in plan.copies.items()])
        for seq, first in plan.swap_in:
            self.cache.write(seq.block_table, first, seq.swapped_kv, seq.ring)
            seq.swapped_kv = None
        for seq, kv in plan.stored:
            self.kv_store.load(kv, seq.block_table)
        if self.adapters is not None:
            self.adapters.load(plan.loads)

    def _run(self, plan: Plan, drafts: dict[Sequence, Draft]) -> Tensor:
        """Run the model; hidden states (N, C)."""
        chunks = []
        for seq, n in plan.run:
            tokens = seq.tokens[seq.num_computed_tokens : seq.num_computed_tokens + n]
            tokens += drafts.get(seq, NO_DRAFT)[0]
            start, written = seq.num_computed_tokens, seq.num_written_tokens
            table, width = seq.block_table, -(-(start + len(tokens)) // self.allocator.block_size)
            if width > len(table):  # the blocks of a sliding window are reused in turn
                table = [table[i % len(table)] for i in range(width)]
            chunks.append(Chunk(tokens, start, table, written, seq.ring))
        if self.adapters is None:
            return self._forward(chunks, bool(drafts))
        rows = [(seq.adapter, len(c.tokens)) for (seq, _), c in zip(plan.run, chunks)]
        try:
            self.adapters.prepare(rows)
            return self._forward(chunks, bool(drafts))
        finally:
            self.adapters.prepare([])

    def _forward(self, chunks: list[Chunk], drafted: bool) -> Tensor:
        """Hidden states (N, C), padded if shapes are static."""
        if self.cuda_graphs is None or self.kv_store.busy:
            return self._hidden(self.cache.step(chunks), self.kv_store.gate)
        n, r = sum(len(c.tokens) for c in chunks), len(chunks)
        return self.cuda_graphs(*self.cache.step(chunks, self._padded_shape(n, r, drafted)))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile and capture the steps of all shapes, so that no request waits for it. Call it
        after setting the drafter."""
        if self.cuda_graphs is None:
            return
        max_n, max_r = self.scheduler.max_num_batched_tokens, self.scheduler.max_num_seqs
        # padded shapes change only at powers of two
        sizes = {x for k in range(max_n.bit_length()) for x in (2**k - 1, 2**k)} | {max_n, max_r}
        cases = product(sizes, sizes, {False, self.drafter is not None})
        shapes = {self._padded_shape(n, r, d) for n, r, d in cases if 0 < r <= min(n, max_r)}
        for shape in sorted(shapes, reverse=True):  # the largest first: others reuse its memory
            self.cuda_graphs(*self.cache.step([], shape))

    def _fork_samples(self, seq: Sequence) -> list[Sequence]:
        """Fork the other samples of a request at the end of its prompt."""
        forks = []
        while seq.n_unforked > 1:
            child = self.scheduler.fork(seq)
            self.sequences[seq.request.id].append(child)
            try:
                child.listener = self.output_callback(child) if self.output_callback else None
                forks.append(child)
            except Exception as e:
                self._fail(child, e)
                self._finish(child, "error")
        return forks

    def _hidden(self, step: Step, gate: Callable = NO_KV_STORE.gate) -> Tensor:
        """(N, C)"""
        attend = gate(partial(self.cache.attend, step=step))
        return self.model(step.tokens[None], step.positions[None], attend, return_hidden=True)[0]

    def _head(self, hidden: Tensor, seqs: list[Sequence]) -> Tensor:
        """Logits (R, V) of hidden states (R, C), a row of each sequence."""
        if (head := getattr(self.adapters, "head", None)) is not None:
            return head(hidden, [seq.adapter for seq in seqs])
        return self.model.head(hidden)

    def _padded_shape(self, n: int, r: int, drafted: bool = False) -> tuple[int, int, int]:
        """(N, R, W) for n tokens of r sequences. W is constant, N and R are powers of two: N == R
        if all sequences decode, N == 2 R with drafts and few prompt tokens, else N > R."""
        power = lambda x: 1 << (x - 1).bit_length()
        width = -(-self.capacity // self.allocator.block_size)
        if n == r:
            return power(n), power(n), width
        max_r = power(self.scheduler.max_num_seqs)
        prefill_n, draft_n = max(64, power(n), 2 * max_r), power(max(n, 2 * r))
        if drafted and draft_n < prefill_n:
            return draft_n, draft_n // 2, width
        return prefill_n, max_r, width

    def _logprobs(self, logits: Tensor, seqs: list[Sequence]) -> list[Tensor | None]:
        """(V,) on the host for each row whose sequence requests logprobs."""
        logp = lambda row: row.float().log_softmax(-1).cpu()
        wanted = [seq.params.logprobs is not None for seq in seqs]
        return [logp(row) if yes else None for row, yes in zip(logits, wanted)]

    def _score_prompt(self, seq: Sequence, hidden: Tensor) -> None:
        """Append the log-probabilities of the prompt tokens that follow the tokens just run, whose
        hidden states are (n, C). After a preemption, those that were appended before are not."""
        output, first = seq.request, seq.num_computed_tokens - len(hidden)
        at = output.prompt_logprobs_from + len(output.prompt_logprobs)  # the next token to score
        rows = hidden[max(0, at - 1 - first) : max(0, seq.n_prompt - 1 - first)]
        for part in rows.split(64) if len(rows) else ():
            logp = self._head(part, [seq] * len(part)).float().log_softmax(-1).cpu()
            best = logp.topk(output.num_prompt_logprobs)
            for row, ids, values in zip(logp, best.indices.tolist(), best.values.tolist()):
                token, at = output.prompt_ids[at], at + 1
                output.prompt_logprobs.append((float(row[token]), ids, values))

    def _append(self, seq: Sequence, token: int, logp: Tensor | None, now: float) -> None:
        sample = seq.request.samples[seq.index]
        if token >= 0:
            sample.token_ids.append(token)
            self.counts["tokens_new"] += 1
            seq.tokens.append(token)
            seq.request.timestamps += [now] if seq.index == 0 else []
        if token >= 0 and logp is not None:
            best = logp.topk(seq.params.logprobs)
            found = float(logp[token]), best.indices.tolist(), best.values.tolist()
            sample.logprobs.append(found)
        self.updated_outputs[seq.request.id] = seq.request

    def _deliver(self) -> None:
        """Append new tokens, call the listeners, and end complete sequences, dropping the rest of
        their new tokens. A listener may abort any request; if it is interrupted, the rest is
        delivered by the next step."""
        while self.pending_outputs:
            seq, at, token, logp, now = self.pending_outputs.popleft()
            if not seq.running or at != len(seq.tokens):
                continue
            self._append(seq, token, logp, now)
            delivered = True
            try:
                delivered = token < 0 or self._call_listener(seq, "push", token)
            finally:
                reason = self._finish_reason(seq, token) if delivered else "error"
                if reason and seq.running:
                    self._finish(seq, reason)

    def _finish_reason(self, seq: Sequence, token: int) -> str | None:
        """The finish reason if the sequence ends with this token, else None."""
        if token < 0:
            seq.request.error = (
                f"logits after {len(seq.tokens)} tokens are not finite, or all tokens are masked"
            )
            self.allocator.uncache(b for b in seq.block_table if self.allocator.refs[b] == 1)
            return "error"
        if seq.listener is not None and seq.listener.finish_reason:
            return seq.listener.finish_reason
        if token in self.eos and not seq.params.ignore_eos:
            return "eos"
        return "length" if len(seq.output) >= seq.params.max_new_tokens else None

    def _finish(self, seq: Sequence, reason: str) -> None:
        """Finish a sample, and with the last one its request."""
        output = seq.request
        self.updated_outputs[output.id] = output
        self.scheduler.finish(seq)
        output.samples[seq.index].finish_reason = reason
        self.sequences[output.id].remove(seq)
        if not self.sequences[output.id]:
            del self.outputs[output.id], self.sequences[output.id]
        self._call_listener(seq, "end", reason)
        self._forget(seq)

    def _forget(self, seq: Sequence) -> None:
        """Let the drafter and its policy drop a sequence's state."""
        for part in (self.drafter, self.speculate_k):
            if hasattr(part, "forget"):
                part.forget(seq)

    def _call_listener(self, seq: Sequence, method: str, value: Any) -> bool:
        """Call a method of the sequence's listener; False if it raised."""
        try:
            if seq.listener is not None:
                getattr(seq.listener, method)(value)
        except Exception as e:
            self._fail(seq, e)
            return False
        return True

    def _fail(self, seq: Sequence, e: Exception) -> None:
        """Record a listener's exception as the error of this request only."""
        seq.request.error = f"its listener failed: {type(e).__name__}: {e}"

    # ---- statistics ----

    def stats(self) -> dict[str, float]:
        """Totals since the start, and fractions; latencies follow from Output.timestamps."""
        scheduler = self.scheduler
        return dict(self.counts) | {
            "cache_used": 1 - self.allocator.n_free / len(self.allocator.refs),
            "hit_rate": scheduler.n_hit_tokens / max(1, scheduler.n_admitted_tokens),
            "preemptions": scheduler.n_preempted,
            **self.kv_store.counts,
        }


class CUDAGraphRunner:
    """A function of tensors (or None) with static shapes: compiled on request, and on CUDA captured
    once per input shapes as a CUDA graph with its own input tensors. Its side effects, such as
    cache writes, may happen several times; the next call overwrites its output."""

    def __init__(
        self, function: Callable[..., Any], device: torch.device, compile: bool = True,
        packed: bool = False, **options,
    ):  # fmt: skip
        """packed: inputs are views of the last one, as in a Step, and copied with it. options:
        Inductor's."""
        if compile:
            # one compilation per shape: about a dozen in an Engine
            kwargs = dict(fullgraph=True, dynamic=False, recompile_limit=64)
            function = torch.compile(function, **kwargs, options=options)
        self.function, self.cuda, self.pool = function, device.type == "cuda", None
        self.packed, self.graphs = packed, {}  # {input shapes: callable}

    def __call__(self, *inputs: Tensor | None) -> Any:
        key = tuple(None if x is None else x.shape for x in inputs)
        if key not in self.graphs:
            self.graphs[key] = self._capture(inputs)
        return self.graphs[key](*inputs)

    def _capture(self, inputs: tuple[Tensor | None, ...]) -> Callable[..., Any]:
        first = len(inputs) - 1 if self.packed else 0  # of the inputs to copy
        static_inputs = [None if x is None else x.clone() for x in inputs[first:]]
        if self.packed:
            static_inputs = [*_views(static_inputs[0], inputs[:-1]), *static_inputs]
        self.function(*static_inputs)
        if not self.cuda:
            return self.function
        self.function(*static_inputs)
        torch.cuda.synchronize()
        self.pool = self.pool or torch.cuda.graph_pool_handle()  # shared: graphs run one at a time
        graph = torch.cuda.CUDAGraph()
        # the default would fail if another thread called CUDA meanwhile, as NCCL's watchdog does
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            out = self.function(*static_inputs)

        def replay(*inputs: Tensor | None) -> Any:
            for static, new in zip(static_inputs[first:], inputs[first:]):
                if static is not None:
                    static.copy_(new)
            graph.replay()
            return out

        return replay


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def main() -> None:
    """paged_attention == its reference; decode attention beside torch's over gathered blocks."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.15 s

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def batch(lengths: list[int], new: list[int], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Random arguments, heads of Llama 3, blocks of 16 in random order."""
        table = torch.randperm(len(lengths) * -(-max(lengths) // 16)).view(len(lengths), -1)
        kv = torch.randn(2, 8, table.numel(), 16, 128, dtype=dtype, device=device).movedim(1, 3)
        q = torch.randn(sum(new), 32, 128, dtype=dtype, device=device)
        rows = table, torch.tensor([0, *new]).cumsum(0), torch.tensor(lengths)
        return (q, *kv, *(x.to(device, torch.int32) for x in rows))

    def gather_all(q, k, v, table, cu, lengths):  # one new token each
        k, v = (x[table.long()].flatten(1, 2).transpose(1, 2) for x in (k, v))
        mask = torch.arange(k.shape[2], device=q.device) < lengths[:, None, None, None]
        return F.scaled_dot_product_attention(q.view(len(q), 8, 4, 128), k, v, mask)

    args, flags = batch([20, 33, 64], [5, 1, 30], torch.float32), {"window": 7, "softcap": 2.0}
    error = paged_attention(*args, **flags) - paged_attention_reference(*args, **flags)
    assert error.abs().max() < 1e-4, error.abs().max()
    kind = "the Triton kernel" if _uses_kernel(args[0]) else "plain torch"
    print(f"{kind} == the reference; {device}, {torch.get_num_threads()} threads")
    print(f"{'decode attention, bf16':24} {'paged':>14} {'gather all':>14}   ms (GB/s of KV)")
    long = 4096 if device == "cuda" else 64 if INTERPRET else 1024
    for n, length in ((16, long // 8), (32, long), (1, 2 * long)):
        args, size = batch([length] * n, [1] * n, torch.bfloat16), 4096 * n * length / 1e9
        run = lambda f: Timer("f(*args)", globals=dict(f=f, args=args)).blocked_autorange().median
        times = map(run, (paged_attention, gather_all))
        cells = "".join(f"{1e3 * t:8.2f} ({size / t:4.0f})" for t in times)
        print(f"{n:4} sequences of {length:5}{cells}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
