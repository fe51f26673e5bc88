"""Speculative decoding: drafters, lossless verification, draft trees, adaptive draft length.

A decode step reads every weight to make one token, and could run several tokens in nearly the same
time. So a cheap *drafter* proposes the next k tokens, the model runs all of them in one forward, as
in prefill, and rejection sampling accepts a prefix such that the output keeps exactly the model's
distribution (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318). Rejected drafts
are removed by truncating the KV cache. Four parts:

    verification  draft d is accepted with probability min(1, p(d) / q(d)); the first rejected one
                  is replaced by a sample of norm(max(p - q, 0)), and if all are accepted one more
                  token is sampled from p. p and q are target and draft distributions after
                  temperature, top-k, top-p and penalties; with greedy decoding each is one token.
    trees         several continuations in one forward: each node attends to its ancestors only, and
                  verification tries siblings in turn on the residual of p (SpecInfer,
                  arXiv:2305.09781).
    drafters      n-gram lookup in the context (LLMA, arXiv:2304.04487), a smaller model, the first
                  layers of the target, multi-token prediction (DeepSeek-V3, arXiv:2412.19437, 2.2),
                  a trained head (EAGLE, arXiv:2401.15077), or one drafter inside another (staged,
                  arXiv:2308.04623).
    draft length  the k of each sequence that maximizes expected tokens per second, from measured
                  acceptance rates and step times; 0 where drafting does not pay (SmartSpec,
                  arXiv:2406.14066).

k drafts with acceptance rate a give (1 - a^(k+1)) / (1 - a) tokens per step of the model. When it
loses: in large batches, whose steps are compute-bound; where a draft costs much of a step (small
models, whose steps are overhead); on text that is hard to predict. MoE models gain less: k tokens
read the experts of all of them.

Two kinds of drafts. *Deterministic* ones (copied, or a drafter's argmax) are verified by sampling
as without drafts and accepting while the sampled token equals the draft, the limit of rejection
sampling for a one-token q: the output is that of plain decoding with the same seed, token for
token. Drafts *sampled* from q and verified by rejection sampling are accepted more often, and only
the output's distribution is the same.

Hook: drafters are callables, `propose(context, k) -> tokens, probs`; batched ones have
`propose_batch` and run their model through a DraftRunner; `tree_attend` is the model's attend
callable. Equivalence (test_all.py): greedy output == plain decoding's for every drafter and cache;
sampled output against the exact distribution by chi-square, which wrong rules fail; tree logits ==
each path's. Needs: torch; `python speculative.py` checks itself and prints what verification and
drafting cost.

Shapes: B rows, K drafts, N nodes of a tree, V vocabulary, C model width.
"""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --------------------------------------------------------------------------------------------------
# Verification
# --------------------------------------------------------------------------------------------------


def speculative_sample(
    target_probs: Tensor,
    draft_probs: Tensor,
    draft_tokens: Tensor,
    generator: torch.Generator | None = None,
) -> Tensor:
    """target_probs (K + 1, V), draft_probs (K, V), draft_tokens (K,) sampled from them -> the n
    accepted drafts and one more token, (n + 1,), distributed as samples of target_probs
    (arXiv:2211.17192, algorithm 1). ValueError if shapes or target_probs are invalid."""
    K, V = draft_tokens.numel(), target_probs.shape[-1]
    shapes = [tuple(x.shape) for x in (target_probs, draft_probs, draft_tokens)]
    if shapes != [(K + 1, V), (K, V), (K,)]:
        raise ValueError(
            "target_probs must be (K + 1, V), draft_probs (K, V), draft_tokens (K,), not "
            f"{', '.join(map(str, shapes))}"
        )
    uniform = torch.rand(1, K, generator=generator, device=target_probs.device)
    n, residual = accept(target_probs[None], draft_probs[None], draft_tokens[None], uniform)
    if not residual.sum() > 0:
        raise ValueError(f"target_probs[{int(n)}] is not a distribution: it cannot be sampled")
    last = torch.multinomial(residual[0], 1, generator=generator)
    return torch.cat((draft_tokens[: int(n)], last))


def accept(
    target: Tensor,
    draft: Tensor | None,
    tokens: Tensor,
    uniform: Tensor,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rejection sampling for B rows that accept different numbers of drafts, without a host sync.

    target (B, K + 1, V): p after each token; draft (B, K, V): the q that tokens (B, K) were sampled
    from, None if they are deterministic; uniform (B, K) in [0, 1); lengths (B,): number of drafts
    of each row. -> n (B,) accepted; residual (B, V), the distribution of the next token:
    norm(max(p - q, 0)) after a rejected draft, else p. NaN where p is.
    """
    B, K = tokens.shape
    rows = torch.arange(B, device=tokens.device)
    lengths = torch.full_like(rows, K) if lengths is None else lengths
    target = target.to(torch.promote_types(target.dtype, torch.float32))
    p = _gather_last(target[:, :K], tokens)
    q = torch.ones_like(p) if draft is None else _gather_last(draft, tokens)
    accepted = (uniform * q < p) & (torch.arange(K, device=tokens.device) < lengths[:, None])
    n = accepted.long().cumprod(1).sum(1)
    p = target[rows, n]
    if K == 0:
        return n, p / p.sum(-1, keepdim=True)
    rejected = n.clamp(max=K - 1)
    masked = p.scatter(1, tokens[rows, rejected][:, None], 0) if draft is None else None
    residual = masked if draft is None else _residual(p, draft[rows, rejected])
    use_residual = (n < lengths)[:, None] & (residual.sum(-1, keepdim=True) > 0)
    p = torch.where(use_residual, residual, p)
    return n, p / p.sum(-1, keepdim=True)


def count_matches(sampled: Tensor, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Verification of deterministic drafts: sampled (B, K + 1) from p after each of the tokens (B,
    K) -> number of accepted drafts n (B,), up to the first mismatch. The output is
    sampled[:, : n + 1]."""
    same = sampled[:, :-1] == tokens
    if lengths is not None:
        same &= torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    return same.long().cumprod(1).sum(1)


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """Unnormalized max(p - q, 0), (B, V)."""
    return (p - q).clamp(min=0)


def _gather_last(x: Tensor, ids: Tensor) -> Tensor:
    """x (..., V), ids (...) -> (...)"""
    return x.gather(-1, ids[..., None])[..., 0]


# --------------------------------------------------------------------------------------------------
# Trees
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tree:
    """A draft tree: the parent of each node, -1 for the root, which is the last accepted token.

    Nodes are ordered by level and siblings by rank: a node's first child is the drafter's first
    choice. In tensors the root is 0 and node i is i + 1. ValueError for another order.
    """

    parents: tuple[int, ...]

    def __post_init__(self):
        for i, parent in enumerate(self.parents):
            if not -1 <= parent < i:
                raise ValueError(f"parents[{i}] must be from -1 to {i - 1}, not {parent}")
        if list(self.depths) != sorted(self.depths):
            raise ValueError(f"parents must be ordered by level, not {self.parents}")

    @classmethod
    def chain(cls, k: int) -> Tree:
        """A sequence of k drafts."""
        return cls(tuple(range(-1, k - 1)))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        found: list[int] = []
        for parent in self.parents:
            found.append(found[parent] + 1 if parent >= 0 else 1)
        return tuple(found)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.parents[:i].count(parent) for i, parent in enumerate(self.parents))

    @property
    def depth(self) -> int:
        return max(self.depths, default=0)

    @cached_property
    def mask(self) -> Tensor:
        """(N + 1, N + 1) bool: [i, j] where j is i or an ancestor of i."""
        mask = torch.eye(len(self.parents) + 1, dtype=torch.bool)
        for i, parent in enumerate(self.parents):
            mask[i + 1] |= mask[parent + 1]
        return mask


def best_tree(acceptance: Sequence[float], nodes: int, depth: int | None = None) -> Tree:
    """The tree of `nodes` nodes with the most accepted tokens on average, if a node's child of rank
    r is accepted with probability acceptance[r], descending: a node's value is the product along
    its path, and the best are added greedily (Sequoia, arXiv:2402.12374, without depth terms)."""
    found: list[tuple[int, int, int]] = []  # (depth, parent's number in this list or -1, rank)
    heap = [(-acceptance[0], 1, -1, 0)] if nodes and depth != 0 else []
    while heap and len(found) < nodes:
        value, level, parent, rank = heapq.heappop(heap)
        found.append((level, parent, rank))
        of_parent = value / acceptance[rank] if acceptance[rank] else 0.0
        if rank + 1 < len(acceptance):
            heapq.heappush(heap, (of_parent * acceptance[rank + 1], level, parent, rank + 1))
        if depth is None or level < depth:
            heapq.heappush(heap, (value * acceptance[0], level + 1, len(found) - 1, 0))
    number, parents = {-1: -1}, []
    order = sorted(range(len(found)), key=lambda i: found[i][0])  # stable: siblings by rank
    for new, i in enumerate(order):
        number[i] = new
        parents.append(number[found[i][1]])
    return Tree(tuple(parents))


def accept_tree(
    target: Tensor, draft: Tensor | None, tokens: Tensor, uniform: Tensor, tree: Tree
) -> tuple[Tensor, Tensor, Tensor]:
    """Verification of a tree (multi-step speculative sampling, arXiv:2305.09781, algorithm 2): a
    node's children are tried by rank; a rejected one replaces p by the residual of p and q, and is
    removed from q; the first accepted one is the next node.

    target (B, N + 1, V); draft (B, N + 1, V), the q that a node's children were sampled from
    without replacement, None if they are deterministic; tokens, uniform (B, N).
    -> path (B, depth) of node numbers, -1 past its end; its length n (B,); residual (B, V).
    """
    B, N = tokens.shape
    rows = torch.arange(B, device=tokens.device)
    target = target.to(torch.promote_types(target.dtype, torch.float32))
    path = torch.full((B, tree.depth + 1), -1, dtype=torch.long, device=tokens.device)
    at, n = torch.zeros_like(rows), torch.zeros_like(rows)
    p, q = target[:, 0], None if draft is None else draft[:, 0].to(target.dtype)
    for i, parent in enumerate(tree.parents):
        token, here = tokens[:, i : i + 1], at == parent + 1
        q_i = torch.ones_like(p[:, 0]) if q is None else q.gather(1, token)[:, 0]
        here = here & (q_i > 0)  # once q is exhausted, further children were not sampled from it
        accepted = here & (uniform[:, i] * q_i < p.gather(1, token)[:, 0])
        residual = p.scatter(1, token, 0) if q is None else _residual(p, q)
        total = residual.sum(-1, keepdim=True)
        rejected = (here & ~accepted)[:, None]
        p = torch.where(rejected & (total > 0), residual / total, p)
        p = torch.where(accepted[:, None], target[:, i + 1], p)
        if q is not None:
            others = q.scatter(1, token, 0)
            others = others / others.sum(-1, keepdim=True).clamp(min=1e-30)
            q = torch.where(rejected, others, q)
            q = torch.where(accepted[:, None], draft[:, i + 1].to(q.dtype), q)
        path[rows, n] = torch.where(accepted, i, path[rows, n])
        at, n = torch.where(accepted, i + 1, at), n + accepted
    return path[:, : tree.depth], n, p / p.sum(-1, keepdim=True)


def match_tree(sampled: Tensor, tokens: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
    """count_matches for a tree of deterministic drafts: sampled (B, N + 1) from p after the root
    and each node; the path follows the child equal to the sampled token. -> path (B, depth) and its
    length n (B,), as in accept_tree."""
    B = len(tokens)
    rows = torch.arange(B, device=tokens.device)
    path = torch.full((B, tree.depth + 1), -1, dtype=torch.long, device=tokens.device)
    at, n = torch.zeros_like(rows), torch.zeros_like(rows)
    for i, parent in enumerate(tree.parents):
        accepted = (at == parent + 1) & (tokens[:, i] == sampled[rows, at])
        path[rows, n] = torch.where(accepted, i, path[rows, n])
        at, n = torch.where(accepted, i + 1, at), n + accepted
    return path[:, : tree.depth], n


def tree_attend(
    cache: Any, tree: Tree, base: Tensor, nodes: Tensor, limit: int | None = None
) -> Callable[..., Tensor]:
    """The attend hook for a draft tree: all nodes, or some whose ancestors were run before.

    base (B,): the root's position. nodes (T,): nodes to run, 0 the root, i + 1 node i. Node j is
    stored in slot base + j, since siblings share a position, and attends to all tokens before the
    root, its ancestors and itself. The model's positions are base + depth. cache: an object with
    update(spec, k, v, slots, limit) -> all keys and values up to limit.
    """
    ancestors = tree.mask.to(base.device)[nodes]  # (T, N + 1)
    depths = torch.tensor((0, *tree.depths), device=base.device)
    slots = base[:, None] + nodes

    def attend(spec: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        keys, values = cache.update(spec, k, v, slots, limit)  # (B, S, Hkv, D)
        j = torch.arange(keys.shape[1], device=q.device)
        node = j - base[:, None]  # (B, S): the node in each slot; < 0: a token before the root
        inside = node.clamp(0, len(depths) - 1)
        in_tree = ancestors[:, inside].transpose(0, 1) & (node == inside)[:, None]
        mask = (node < 0)[:, None] | in_tree
        key_positions = torch.where(node < 0, j, base[:, None] + depths[inside])
        distance = positions[..., None] - key_positions[:, None]  # (B, T, S)
        if spec.window is not None:
            mask = mask & (distance < spec.window)
        mask = mask[:, None]
        if spec.alibi_slopes is not None:
            bias = -spec.alibi_slopes[:, None, None] * distance[:, None]
            mask = bias.masked_fill(~mask, -math.inf).to(q.dtype)
        assert all(getattr(spec, x, None) is None for x in ("softcap", "sinks", "sparse"))
        q, keys, values = q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        o = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, scale=spec.scale, enable_gqa=True
        )
        return o.transpose(1, 2)

    return attend


# --------------------------------------------------------------------------------------------------
# Drafters without a model
# --------------------------------------------------------------------------------------------------

Proposal = tuple[list[int], Tensor | None]  # <= k tokens; q (len, V), or None if deterministic


class NGram:
    """Prompt lookup (LLMA, arXiv:2304.04487): finds the longest suffix of the context, of min_n to
    max_n tokens, that occurs earlier in it, at its latest occurrence, else in a reference, and
    proposes the tokens that follow. A copy that reaches the end of the context continues with
    itself, so that a loop is continued for any k.

    references: lists of ids that are searched too. A proposal takes a few microseconds per thousand
    tokens and no forward: `python speculative.py` prints how many.
    """

    is_free = True  # proposals cost almost nothing, also when they are not verified

    def __init__(self, max_n: int = 4, min_n: int = 1, references: Sequence[list[int]] = ()):
        if not 1 <= min_n <= max_n:
            raise ValueError(f"min_n must be from 1 to max_n ({max_n}), not {min_n}")
        self.max_n, self.min_n = max_n, min_n
        # the last token of a text is not searched: nothing follows it
        self.references = [(list(ids), _bytes(ids[:-1])) for ids in references]

    def __call__(self, context: list[int], k: int) -> Proposal:
        if k <= 0:
            return [], None
        texts = [(context, _bytes(context[:-1])), *self.references]
        for n in range(min(self.max_n, len(context)), self.min_n - 1, -1):
            suffix = _bytes(context[-n:])
            for text, searched in texts:
                at = _rfind(searched, suffix)
                if at >= 0:
                    run = text[at + n : at + n + k]
                    while len(run) < k and text is context:
                        run.append(run[at + n - len(context)])  # continue with the copy itself
                    return run, None
        return [], None


def _bytes(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def _rfind(text: bytes, run: bytes) -> int:
    """Index of the last occurrence of the tokens `run` in `text`, or -1."""
    at = text.rfind(run)
    while at >= 0 and at % 4:  # not aligned to a token
        at = text.rfind(run, 0, at + len(run) - 1)
    return at // 4


# --------------------------------------------------------------------------------------------------
# Drafters with a model
# --------------------------------------------------------------------------------------------------

Row = Hashable  # identifies a sequence
# Samples the i-th draft: logits (R, V), rows, i -> ids (R,), q (R, V) or None
SampleFn = Callable[[Tensor, Sequence[Row], int], tuple[Tensor, Tensor | None]]
PREFILL_CHUNK = 512  # tokens per forward in a drafter's prefill
MAX_PENDING = 2048  # hidden states kept of a row without proposals; MTP then lacks older ones


def argmax(logits: Tensor, rows: Sequence[Row], i: int) -> tuple[Tensor, None]:
    """The default SampleFn: the most likely token, deterministic."""
    return logits.argmax(-1), None


class DraftRunner:
    """Runs a drafter's model over its KV cache. forward(tokens (B, T), positions, attend, hidden)
    -> hidden states (B, T, C); its argument `hidden` is for MTP."""

    def __init__(self, forward: Callable[..., Tensor], cache: Any, device: Any):
        self.forward, self.cache, self.device = forward, cache, device

    def extend(
        self,
        rows: Sequence[Row],
        starts: Sequence[int],
        tokens: Sequence[list[int]],
        hidden: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Run each row's tokens from position `start` on, for MTP with the hidden states (t, C) of
        the positions before them -> hidden states (t, C) of each row."""
        out: list[list[Tensor]] = [[] for _ in rows]
        for first in range(0, max(map(len, tokens)), PREFILL_CHUNK):
            part = [t[first : first + PREFILL_CHUNK] for t in tokens]
            before = None if hidden is None else [h[first : first + PREFILL_CHUNK] for h in hidden]
            found = self.run(rows, [s + first for s in starts], part, before)
            for h, chunks in zip(found, out):
                chunks.append(h)
        return [torch.cat(chunks) for chunks in out]

    def num_valid(self, row: Row, n: int) -> int:
        """How many of a row's first n positions are still valid in the cache."""
        return n


class ContiguousRunner(DraftRunner):
    """A DraftRunner over a contiguous cache of `batch` rows 0, 1, ... that run together. cache: an
    object with attend, update and max_len, as model.KVCache; its last slot is for padding.

    Rows are right-padded; cache entries of padding are overwritten before they are attended to.
    `static_forward`, if given, is forward(tokens, positions, hidden) for one or two tokens per row
    with static shapes, which attends over the whole cache.
    """

    def __init__(
        self,
        forward: Callable[..., Tensor],
        cache: Any,
        device: Any,
        batch: int = 1,
        static_forward: Any = None,
    ):
        super().__init__(forward, cache, device)
        self.batch, self.static_forward = batch, static_forward
        self.needs_hidden = False  # set by MTPDrafter

    def run(
        self,
        rows: Sequence[int],
        starts: list[int],
        tokens: list[list[int]],
        hidden: list[Tensor] | None,
    ) -> list[Tensor]:
        T = max(map(len, tokens))
        padded = torch.tensor([t + [0] * (T - len(t)) for t in tokens], device=self.device)
        if hidden is not None:
            hidden = torch.stack([F.pad(h, (0, 0, 0, T - len(h))) for h in hidden])
        h = self._forward(rows, padded, starts, hidden)
        return [h[i, : len(t)] for i, t in enumerate(tokens)]

    def step(
        self, rows: Sequence[int], ids: Tensor, at: list[int], hidden: Tensor | None = None
    ) -> Tensor:
        """One more token of each row: ids (R,) at positions `at`, hidden (R, C) -> (R, C)."""
        before = None if hidden is None else hidden[:, None]
        return self._forward(rows, ids[:, None], at, before)[:, 0]

    def nodes(self, tokens: Tensor, tree: Tree, base: Tensor, nodes: Tensor, limit: int) -> Tensor:
        """Run nodes (T,) of a tree, tokens (B, T) -> (B, T, C)."""
        depths = torch.tensor((0, *tree.depths), device=self.device)[nodes]
        attend = tree_attend(self.cache, tree, base, nodes, limit)
        return self.forward(tokens, base[:, None] + depths, attend, None)

    def _forward(
        self, rows: Sequence[int], tokens: Tensor, starts: list[int], hidden: Tensor | None
    ) -> Tensor:
        """tokens (R, T) of some of the rows -> (R, T, C)."""
        T, begin = tokens.shape[1], torch.tensor(starts, device=self.device)
        if len(rows) < self.batch:  # other rows have ended: their outputs are not read
            scatter = lambda x: x.new_zeros(self.batch, *x.shape[1:]).index_copy(0, index, x)
            index = torch.tensor(rows, device=self.device)
            tokens, begin = scatter(tokens), scatter(begin)
            hidden = None if hidden is None else scatter(hidden)
            return self._forward_all(tokens, begin, max(starts) + T, hidden)[index]
        return self._forward_all(tokens, begin, max(starts) + T, hidden)

    def _forward_all(
        self, tokens: Tensor, begin: Tensor, end: int, hidden: Tensor | None
    ) -> Tensor:
        positions = begin[:, None] + torch.arange(tokens.shape[1], device=self.device)
        positions = positions.clamp(max=self.cache.max_len - 1)  # padding may exceed the cache
        if self.static_forward is not None and tokens.shape[1] <= 2:
            return self.static_forward(tokens, positions, hidden)
        positions = positions[0] if len(positions) == 1 else positions
        attend = partial(self.cache.attend, limit=end)
        return self.forward(tokens, positions, attend, hidden)


class Drafter:
    """Base class of drafters with a model: k tokens autoregressively, batched over rows."""

    is_free = False

    def __call__(self, context: list[int], k: int) -> Proposal:
        """Drafts for one sequence."""
        return self.propose_batch([0], [context], [k])[0]

    def propose_batch(
        self, rows: Sequence[Row], contexts: Sequence[list[int]], ks: Sequence[int]
    ) -> list[Proposal]:
        raise NotImplementedError

    def observe(self, row: Row, start: int, hidden: Tensor) -> None:
        """Receive the target's final hidden states (t, C) of a row's positions from `start` on."""

    def forget(self, row: Row) -> None:
        """Drop the state of a row that has ended."""

    def _chain(
        self,
        rows: Sequence[Row],
        ks: Sequence[int],
        state: Any,
        logits_of: Callable[[Any], Tensor],
        follow: Callable[[Any, Tensor, int], Any],
    ) -> list[Proposal]:
        """max(ks) drafts of each row: sample from logits_of(state), then state = follow(state, ids,
        i). One host sync, at the end."""
        sampled, probs, k = [], [], max(ks)
        for i in range(k):
            ids, q = self.sample(logits_of(state), rows, i)
            sampled.append(ids)
            probs.append(q)
            if i + 1 < k:
                state = follow(state, ids, i)
        tokens = torch.stack(sampled, 1).tolist()
        if probs[0] is None:
            return [(t[:n], None) for t, n in zip(tokens, ks)]
        q = torch.stack(probs, 1)
        return [(t[:n], q[r, :n]) for r, (t, n) in enumerate(zip(tokens, ks))]


class DraftModel(Drafter):
    """A smaller model of the same vocabulary, with its own KV cache: a proposal first runs the new
    tokens of the context, mostly one or two, then one token at a time.

    runner: a DraftRunner. shared: the model is the target's first layers and uses the target's
    cache (early exit, arXiv:2404.16710), which already has the context's KV.
    """

    def __init__(
        self, runner: Any, head: Callable, sample: SampleFn = argmax, shared: bool = False
    ):
        self.runner, self.head, self.sample, self.shared = runner, head, sample, shared
        self.cached_tokens: dict[Row, list[int]] = {}
        self.forwards = 0

    def forget(self, row: Row) -> None:
        self.cached_tokens.pop(row, None)

    def propose_batch(
        self, rows: Sequence[Row], contexts: Sequence[list[int]], ks: Sequence[int]
    ) -> list[Proposal]:
        if not any(ks):
            return [([], None)] * len(rows)
        h = self.read(rows, contexts)

        def follow(h: Tensor, ids: Tensor, i: int) -> Tensor:
            self.forwards += 1
            return self.runner.step(rows, ids, [len(c) + i for c in contexts])

        found = self._chain(rows, ks, h, self.head, follow)
        for row, context, (tokens, _) in zip(rows, contexts, found):
            self.cached_tokens[row] = context + tokens[:-1]
        return found

    def read(self, rows: Sequence[Row], contexts: Sequence[list[int]]) -> Tensor:
        """Run the new tokens of the contexts; hidden states (R, C) of their last tokens."""
        starts = [self._start(row, context) for row, context in zip(rows, contexts)]
        self.forwards += 1
        h = self.runner.extend(rows, starts, [c[s:] for c, s in zip(contexts, starts)])
        return torch.stack([x[-1] for x in h])

    def _start(self, row: Row, context: list[int]) -> int:
        if self.shared:
            return len(context) - 1
        cached = common_prefix_length(self.cached_tokens.get(row, []), context)
        return self.runner.num_valid(row, min(cached, len(context) - 1))


def common_prefix_length(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    for i in range(0, n, 64):
        j = min(n, i + 64)
        if a[i:j] != b[i:j]:
            return next(at for at in range(i, j) if a[at] != b[at])
    return n


class StagedDrafter(DraftModel):
    """A draft model that itself uses speculative decoding (arXiv:2308.04623): it verifies the
    deterministic drafts of `inner`, such as NGram, several tokens per forward. One row at a time.
    """

    def __init__(self, runner: Any, head: Callable, inner: Callable, sample: SampleFn = argmax):
        super().__init__(runner, head, sample)
        self.inner = inner

    def propose_batch(
        self, rows: Sequence[Row], contexts: Sequence[list[int]], ks: Sequence[int]
    ) -> list[Proposal]:
        return [self._one(*each) for each in zip(rows, contexts, ks)]

    def _one(self, row: Row, context: list[int], k: int) -> Proposal:
        tokens: list[int] = []
        probs: list[Tensor | None] = []
        while len(tokens) < k:
            prefix = context + tokens
            draft = self.inner(prefix, k - len(tokens) - 1)[0]
            start, self.forwards = self._start(row, prefix), self.forwards + 1
            h = self.runner.extend([row], [start], [prefix[start:] + draft])[0]
            logits, accepted = self.head(h[len(prefix) - 1 - start :]), 0
            for i in range(len(draft) + 1):
                ids, q = self.sample(logits[i : i + 1], [row], len(tokens))
                tokens.append(int(ids))
                probs.append(q)
                if i == len(draft) or tokens[-1] != draft[i]:
                    break
                accepted += 1
            self.cached_tokens[row] = prefix + draft[:accepted]
        return tokens, None if not probs or probs[0] is None else torch.cat(probs)


class MTPDrafter(Drafter):
    """Multi-token prediction as a drafter (DeepSeek-V3, arXiv:2412.19437, 2.2): predicts token t +
    2 from the target's hidden state at t and token t + 1, then continues from its own hidden
    states. Only the first MTP depth is used.

    runner: a DraftRunner over the model's MTP layer. It runs every position with the target's
    hidden state there, which `observe` receives.
    """

    def __init__(self, runner: Any, head: Callable, sample: SampleFn = argmax):
        self.runner, self.head, self.sample = runner, head, sample
        runner.needs_hidden = True
        # of each row the observed hidden states not yet run: start, pieces (t, C)
        self.pending: dict[Row, tuple[int, list[Tensor]]] = {}

    def observe(self, row: Row, start: int, hidden: Tensor) -> None:
        begin, pieces = self.pending.get(row, (start, []))
        if start != begin + sum(map(len, pieces)):
            begin, pieces = start, []  # after preemption or a prefix-cache hit
        pieces.append(hidden.clone())  # a CUDA graph overwrites its output
        while sum(map(len, pieces)) - len(pieces[0]) >= MAX_PENDING:
            begin += len(pieces.pop(0))
        self.pending[row] = begin, pieces

    def forget(self, row: Row) -> None:
        self.pending.pop(row, None)

    def propose_batch(
        self, rows: Sequence[Row], contexts: Sequence[list[int]], ks: Sequence[int]
    ) -> list[Proposal]:
        starts, pieces = zip(*(self.pending.get(row, (0, [])) for row in rows))
        # rows whose hidden states cover the context up to its second to last token
        ready = [
            p and s + sum(map(len, p)) == len(c) - 1 for s, p, c in zip(starts, pieces, contexts)
        ]
        found: list[Proposal] = [([], None)] * len(rows)
        some = [i for i, ok in enumerate(ready) if ok and ks[i]]
        if not some:
            return found
        rows, contexts, ks = ([x[i] for i in some] for x in (rows, contexts, ks))
        tokens = [c[starts[i] + 1 :] for i, c in zip(some, contexts)]
        hidden = [torch.cat(pieces[i]) for i in some]
        h = self.runner.extend(rows, [starts[i] for i in some], tokens, hidden)
        for row, context in zip(rows, contexts):
            self.pending[row] = len(context) - 1, []

        def follow(h: Tensor, ids: Tensor, i: int) -> Tensor:
            return self.runner.step(rows, ids, [len(c) - 1 + i for c in contexts], h)

        last = torch.stack([x[-1] for x in h])
        for i, proposal in zip(some, self._chain(rows, ks, last, self.head, follow)):
            found[i] = proposal
        return found


class DraftHead(nn.Module):
    """An MLP that predicts the target's next final hidden state from the current one, h, and the
    embedding of the next token, e: h' = h + down(silu(up([norm(h), norm(e)]))). Logits are the
    target's head of h'; further drafts continue from h'. EAGLE (arXiv:2401.15077) without its
    attention layer: a draft costs two matmuls and the head, and no KV cache.

    train.py --task draft-head trains one for a checkpoint.
    """

    def __init__(self, dim: int, ffn_dim: int):
        super().__init__()
        self.hidden_norm = nn.RMSNorm(dim, eps=1e-6)
        self.embed_norm = nn.RMSNorm(dim, eps=1e-6)
        self.up = nn.Linear(2 * dim, ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """hidden (..., C), the embedding of the token after it (..., C) -> (..., C)."""
        x = torch.cat((self.hidden_norm(hidden), self.embed_norm(embedded)), dim=-1)
        return hidden + self.down(F.silu(self.up(x)))


class HeadDrafter(Drafter):
    """A DraftHead as a drafter; embed(ids) and head(hidden) are the target's."""

    def __init__(self, step: Callable, embed: Callable, head: Callable, sample: SampleFn = argmax):
        self.step, self.embed, self.head, self.sample = step, embed, head, sample
        self.last: dict[Row, tuple[int, Tensor]] = {}  # last observed position, its hidden state

    def observe(self, row: Row, start: int, hidden: Tensor) -> None:
        self.last[row] = start + len(hidden) - 1, hidden[-1].clone()

    def forget(self, row: Row) -> None:
        self.last.pop(row, None)

    def propose_batch(
        self, rows: Sequence[Row], contexts: Sequence[list[int]], ks: Sequence[int]
    ) -> list[Proposal]:
        found: list[Proposal] = [([], None)] * len(rows)
        last = [self.last.get(row, (-1, None)) for row in rows]
        some = [i for i, (at, _) in enumerate(last) if ks[i] and at == len(contexts[i]) - 2]
        if not some:
            return found
        h = torch.stack([last[i][1] for i in some])
        ids = torch.tensor([contexts[i][-1] for i in some], device=h.device)
        follow = lambda h, ids, i: self.step(h, self.embed(ids))
        part = [rows[i] for i in some], [ks[i] for i in some]
        for i, proposal in zip(some, self._chain(*part, follow(h, ids, 0), self.head, follow)):
            found[i] = proposal
        return found


class TreeDrafter:
    """A draft model's tree, level by level: its top tokens, or samples without replacement.

    children(logits (B, W, V), m, i) -> ids (B, W, m) by rank, q (B, W, V) or None.
    """

    def __init__(self, model: DraftModel, children: Callable[..., tuple[Tensor, Tensor | None]]):
        self.model, self.children = model, children

    def propose_tree(
        self, rows: Sequence[Row], contexts: Sequence[list[int]], tree: Tree
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens (B, N) and, if they were sampled, the q (B, N + 1, V) of each node's children."""
        m = self.model
        logits = m.head(m.read(rows, contexts))[:, None]  # (B, W, V) of the nodes in `level`
        base = torch.tensor([len(c) - 1 for c in contexts], device=logits.device)
        limit = max(len(c) for c in contexts) + len(tree.parents)
        tokens = torch.zeros(len(rows), len(tree.parents), dtype=torch.long, device=logits.device)
        probs: Tensor | None = None
        level = [-1]
        for depth in range(1, tree.depth + 1):
            new = [i for i, d in enumerate(tree.depths) if d == depth]
            m_children = 1 + max(tree.ranks[i] for i in new)
            ids, q = self.children(logits, m_children, depth - 1)
            parents = [level.index(tree.parents[i]) for i in new]
            tokens[:, new] = ids[:, parents, [tree.ranks[i] for i in new]]
            if q is not None:
                shape = len(rows), len(tree.parents) + 1, q.shape[-1]
                probs = q.new_zeros(shape) if probs is None else probs
                probs[:, [i + 1 for i in level]] = q
            level = [i for i in new if i in tree.parents]
            if level:
                nodes = torch.tensor([i + 1 for i in level], device=logits.device)
                m.forwards += 1
                logits = m.head(m.runner.nodes(tokens[:, level], tree, base, nodes, limit))
        for row, context in zip(rows, contexts):
            # the tree's drafts are in other cache slots than their positions: not reusable
            m.cached_tokens[row] = list(context)
        return tokens, probs


# --------------------------------------------------------------------------------------------------
# Draft length
# --------------------------------------------------------------------------------------------------


class FixedK:
    """Always k drafts."""

    def __init__(self, k: int):
        self.k = k

    def choose(self, rows: Sequence[Row]) -> list[int]:
        return [self.k] * len(rows)

    def observe(self, *what: Any) -> None:
        pass

    def forget(self, row: Row) -> None:
        pass


class LatencyModel:
    """Predicts seconds from a size: medians of recent measurements in bins of size, interpolated
    linearly."""

    def __init__(self):
        self.bins: dict[int, deque[tuple[int, float]]] = {}  # bins are 1/8 of the size wide
        self.points: dict[int, tuple[float, float]] = {}  # of each bin (mean size, median seconds)

    def __bool__(self) -> bool:
        return bool(self.bins)

    def add(self, size: int, seconds: float) -> None:
        width = 1 << max(0, size.bit_length() - 4)
        bin = size // width * width
        steps = self.bins.setdefault(bin, deque(maxlen=9))
        steps.append((size, seconds))
        # the lower median, since noise only makes measurements longer
        typical = sorted(s for _, s in steps)[(len(steps) - 1) // 2]
        self.points[bin] = sum(n for n, _ in steps) / len(steps), typical

    def predict(self, sizes: Sequence[int]) -> list[float]:
        """Seconds of each size: 0 without measurements, constant if only one size was measured."""
        if len(self.points) < 2:
            return [seconds for _, seconds in self.points.values() or [(0, 0.0)]] * len(sizes)
        at, seconds = zip(*sorted(self.points.values()))
        found = []
        for n in sizes:
            b = min(max(bisect_left(at, n), 1), len(at) - 1)
            slope = max(0.0, (seconds[b] - seconds[b - 1]) / (at[b] - at[b - 1]))
            found.append(max(0.0, seconds[b - 1] + slope * (n - at[b - 1])))
        return found


class Goodput:
    """For each row of a batch the k with the highest expected goodput (SmartSpec,
    arXiv:2406.14066), from the measured acceptance rate a of each row and of all, and the measured
    step time by number of tokens. The i-th draft of a row has the expected value a^i tokens; drafts
    of all rows are added in order of value while

        (rows + value of the drafts) / (seconds of a step of rows + drafts tokens, and of drafting)

    increases. If no draft increases it, k is 0. Acceptance changes along a text, so such rows try
    one draft in turn, at a cost below 1% of the time, and continue while it is accepted; and where
    drafting pays, an occasional step runs without drafts, to measure its time.
    """

    HALF_LIFE = 16  # drafts of a row after which an old one has half the weight
    PRIOR = 2  # weight of the acceptance of all rows, in drafts
    TRIAL_COST = 0.0075  # fraction of the time spent on trial drafts
    PLAIN_INTERVAL = 128  # steps with drafts between two without

    def __init__(self, max_k: int):
        self.max_k = max_k
        # of each row: drafts accepted, drafts verified, whether the last step accepted all
        self.counts: dict[Row, tuple[float, float, bool]] = {}
        self.total = (1.2, 2.0)  # accepted, verified over all rows, with an optimistic start
        self.step_latency = LatencyModel()  # by tokens in the step
        self.draft_latency = LatencyModel()  # of one draft position, by rows that draft
        self.last_trials: dict[Row, int] = {}  # step of the last trial of a row with k = 0
        self.steps = self.last_trial = self.last_plain = 0

    def choose(self, rows: Sequence[Row]) -> list[int]:
        """k for each row of the next step."""
        self.steps += 1
        none = [0] * len(rows)
        if not rows or not self.max_k or not self.step_latency:
            return none  # measure a step without drafts first
        ks = self._best(rows)
        if not self.draft_latency:  # draft latency was not measured yet
            ks = [min(k, 1) for k in ks]
        if not any(ks):
            self.last_plain = self.steps
        elif self.steps - self.last_plain > self.PLAIN_INTERVAL:
            self.last_plain = self.steps
            return none
        idle = [i for i, k in enumerate(ks) if k == 0]
        if idle:
            now, more = self.step_latency.predict([len(rows), len(rows) + 1])
            more += 0.0 if any(ks) else self.draft_latency.predict([1])[0]
            hopeless = (len(rows) + 1) * now <= len(rows) * more  # even if all were accepted
            interval = max(3, (more / max(now, 1e-9) - 1) / self.TRIAL_COST)
            interval = self.PLAIN_INTERVAL if hopeless else interval
            if self.steps - self.last_trial > interval:
                i = min(idle, key=lambda i: self.last_trials.get(rows[i], 0))
                ks[i], self.last_trial, self.last_trials[rows[i]] = 1, self.steps, self.steps
            for i in idle if not hopeless else ():
                ks[i] = max(ks[i], int(self.counts.get(rows[i], (0, 0, False))[2]))
        return ks

    def observe(
        self,
        rows: Sequence[Row],
        proposed: Sequence[int],
        accepted: Sequence[int],
        tokens: int,
        seconds: float,
        draft_seconds: float = 0.0,
    ) -> None:
        """Record a step: drafts proposed and accepted of each row, the tokens the step ran, its
        seconds including drafting, and the seconds of drafting."""
        for row, k, n in zip(rows, proposed, accepted):
            verified = min(n + 1, k)  # drafts after a rejected one were not verified
            if verified:
                decay = 0.5 ** (verified / self.HALF_LIFE)
                hits, tries, _ = self.counts.pop(row, (0.0, 0.0, False))
                self.counts[row] = hits * decay + n, tries * decay + verified, n == k
                decay **= 1 / 8
                self.total = self.total[0] * decay + n, self.total[1] * decay + verified
        if any(proposed):
            longest = max(proposed)
            self.draft_latency.add(math.ceil(sum(proposed) / longest), draft_seconds / longest)
        self.step_latency.add(tokens, seconds - draft_seconds)

    def forget(self, row: Row) -> None:
        """Drop the measurements of a row that has ended."""
        self.counts.pop(row, None)
        self.last_trials.pop(row, None)

    def rate(self, row: Row) -> float:
        """Estimated acceptance rate of a row."""
        hits, tries, _ = self.counts.get(row, (0.0, 0.0, False))
        prior = self.PRIOR * self.total[0] / self.total[1]
        return min(0.99, (hits + prior) / (tries + self.PRIOR))

    def _best(self, rows: Sequence[Row]) -> list[int]:
        """The k of each row with the highest expected tokens per second."""
        R, rates = len(rows), [self.rate(row) for row in rows]
        values = sorted(
            ((a**i, i, r) for r, a in enumerate(rates) for i in range(1, self.max_k + 1)),
            reverse=True,
        )
        seconds = self.step_latency.predict(range(R, R + len(values) + 1))
        draft = self.draft_latency.predict(range(R + 1))
        best, limit, found = R / max(seconds[0], 1e-9), (0, 0), [0] * R
        # drafting time is proportional to the largest k
        candidates = range(1, self.max_k + 1)
        if R > 8:
            candidates = {self.max_k >> i for i in range(self.max_k.bit_length())}
        for largest in candidates if draft[R] > 0.001 * seconds[0] else (self.max_k,):
            n, tokens = 0, float(R)
            for value, i, _ in values:
                if i <= largest:
                    n, tokens = n + 1, tokens + value
                    drafting = largest * draft[-(-n // largest)]
                    speed = tokens / max(seconds[n] + drafting, 1e-9)
                    if speed > best:
                        best, limit = speed, (largest, n)
        largest, n = limit
        for _, _, r in [x for x in values if x[1] <= largest][:n]:
            found[r] += 1
        return found


class TreeGoodput(Goodput):
    """Goodput for trees: of a few sizes the one with the highest expected tokens per second, each
    in the best shape for the measured acceptance of the drafter's first, second, ... choice."""

    def __init__(self, sizes: Sequence[int], ranks: Sequence[float], fixed: bool = False):
        """sizes: numbers of nodes, ascending; ranks: prior acceptance of each rank; fixed: always
        use the largest size."""
        super().__init__(1)
        self.sizes, self.fixed = sizes, fixed
        self.rank_counts = [[8.0 * a, 8.0] for a in ranks]  # accepted, verified
        self.trees: list[Tree] = []
        self.rounds = 0

    @property
    def acceptance(self) -> list[float]:
        """Acceptance rate of each rank, descending."""
        return sorted((hits / tries for hits, tries in self.rank_counts), reverse=True)

    def choose_tree(self, rows: Sequence[Row]) -> Tree:
        """The tree of the next step, the same for all rows; Tree(()) for no drafts."""
        if self.rounds % 16 == 0:
            self.trees = [best_tree(self.acceptance, size) for size in self.sizes]
        self.rounds += 1
        if self.fixed:
            return self.trees[-1]
        if not self.step_latency:
            return Tree(())
        choices = [Tree(()), *self.trees]
        sizes = [len(rows) * (1 + len(tree.parents)) for tree in choices]
        seconds = self.step_latency.predict(sizes)
        draft = self.draft_latency.predict([1])[0]
        speeds = [
            (1 + self._value(tree)) / max(s + draft * tree.depth, 1e-9)
            for tree, s in zip(choices, seconds)
        ]
        best = max(range(len(choices)), key=speeds.__getitem__)
        cost = seconds[1] - seconds[0] + draft * choices[1].depth
        interval = max(3, cost / (self.TRIAL_COST * max(seconds[0], 1e-9)))
        if not best and self.rounds - self.last_trial > interval:
            self.last_trial, best = self.rounds, 1
        elif best and self.rounds - self.last_plain > self.PLAIN_INTERVAL:
            best = 0
        if not best:
            self.last_plain = self.rounds
        return choices[best]

    def observe_tree(
        self,
        rows: Sequence[Row],
        tree: Tree,
        paths: Sequence[Sequence[int]],
        seconds: float,
        draft_seconds: float,
    ) -> None:
        """Record a step: the accepted path of nodes of each row."""
        children = [tree.parents.count(i) for i in range(-1, len(tree.parents))]
        for path in paths:
            for node, after in zip((-1, *path), (*path, None)):
                for rank in range(min(children[node + 1], len(self.rank_counts))):
                    self.rank_counts[rank][1] += 1
                    self.rank_counts[rank][0] += after is not None and tree.ranks[after] == rank
        if self.rank_counts[0][1] > 512:
            self.rank_counts = [[hits / 2, tries / 2] for hits, tries in self.rank_counts]
        if tree.parents:
            self.draft_latency.add(1, draft_seconds / tree.depth)
        self.step_latency.add(len(rows) * (1 + len(tree.parents)), seconds - draft_seconds)

    def _value(self, tree: Tree) -> float:
        """Expected number of accepted tokens."""
        values, acceptance = [], self.acceptance
        for parent, rank in zip(tree.parents, tree.ranks):
            values.append(acceptance[rank] * (values[parent] if parent >= 0 else 1.0))
        return sum(values)


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def check(rows: int = 200_000) -> None:
    """Two tokens of a Markov chain, by drafts, against their exact distribution, which a residual
    of p instead of max(p - q, 0) fails."""
    rng, V, K = torch.Generator().manual_seed(0), 6, 2
    random = lambda *shape: torch.randn(*shape, generator=rng).softmax(-1)
    first, then, q1, q2 = random(V), random(V, V), random(V), random(V, V)
    exact = (first[:, None] * then).flatten()
    d1 = q1.expand(rows, V).multinomial(1, generator=rng)
    d2 = q2[d1[:, 0]].multinomial(1, generator=rng)
    target = torch.stack((first.expand(rows, V), then[d1[:, 0]], then[d2[:, 0]]), 1)
    draft = torch.stack((q1.expand(rows, V), q2[d1[:, 0]]), 1)
    n, residual = accept(target, draft, torch.cat((d1, d2), 1), torch.rand(rows, K, generator=rng))
    for replacement in (residual, target[torch.arange(rows), n]):
        last = replacement.multinomial(1, generator=rng)
        out = torch.cat((d1, d2, last), 1).scatter(1, n[:, None], last)
        more = then[out[:, 0]].multinomial(1, generator=rng)[:, 0]
        pairs = out[:, 0] * V + torch.where(n == 0, more, out[:, 1])
        counts, expected = pairs.bincount(minlength=V * V), exact * rows
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert (chi_square < 90) == (replacement is residual), chi_square  # 35 degrees of freedom


def main() -> None:
    """Microseconds that verifying 5 drafts, and copying an n-gram, add to a step."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    check()
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    V, K, text = 128_256, 5, [i * i % 2003 for i in range(32_768)] * 2
    for B in (1, 16):
        p, q = torch.randn(B, K + 1, V).softmax(-1), torch.randn(B, K, V).softmax(-1)
        ids, u = q.flatten(0, 1).multinomial(1).view(B, K), torch.rand(B, K)
        timer = Timer("accept(*args)", globals=dict(accept=accept, args=(p, q, ids, u)))
        print(f"accept {B} x {K} of {V} tokens: {1e6 * timer.blocked_autorange().median:.0f} us")
    timer = Timer("ngram(text, 8)", globals=dict(ngram=NGram(), text=text))
    print(f"NGram of {len(text)} tokens: {1e6 * timer.blocked_autorange().median:.0f} us")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
