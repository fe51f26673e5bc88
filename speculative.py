"""Speculative decoding: drafters, lossless verification, draft trees.

A decode step reads every weight to make one token, and could run several tokens in nearly the same
time. So a cheap *drafter* proposes the next k tokens, the model runs all of them in one forward, as
in prefill, and rejection sampling accepts a prefix such that the output keeps exactly the model's
distribution (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318). Rejected drafts
are removed by truncating the KV cache. Three parts:

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

generation/speculation_length.py chooses how many drafts a step has.

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
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
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

    A parent precedes its children, and siblings are ordered by rank: a node's first child is the
    drafter's first choice. In tensors the root is 0 and node i is i + 1. ValueError otherwise.
    """

    parents: tuple[int, ...]

    def __post_init__(self):
        for i, parent in enumerate(self.parents):
            if not -1 <= parent < i:
                raise ValueError(f"parents[{i}] must be from -1 to {i - 1}, not {parent}")

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


def best_tree(acceptance: Sequence[float], nodes: int) -> Tree:
    """The tree of `nodes` nodes with the most accepted tokens on average, if a node's child of rank
    r is accepted with probability acceptance[r], descending: a node's value is the product along
    its path, and the best are added greedily (Sequoia, arXiv:2402.12374, without depth terms)."""
    found: list[tuple[int, int, int]] = []  # (depth, parent's number in this list or -1, rank)
    heap = [(-acceptance[0], 1, -1, 0)]
    while len(found) < nodes:
        value, level, parent, rank = heapq.heappop(heap)
        found.append((level, parent, rank))
        of_parent = value / acceptance[rank] if acceptance[rank] else 0.0
        if rank + 1 < len(acceptance):
            heapq.heappush(heap, (of_parent * acceptance[rank + 1], level, parent, rank + 1))
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
    """Base class of drafters with a model: k tokens autoregressively, batched over rows, or fewer
    where `confidence` is not sufficient."""

    is_free = False
    head: Callable
    sample: SampleFn
    confidence: Any = None  # suffices(rows, joint probabilities of drafts) -> whether to draft on

    def __call__(self, context: list[int], k: int) -> Proposal:
        """Drafts for one sequence."""
        return self.propose_batch([0], [context], [k])[0]

    def propose_batch(
        self, rows: Sequence[Row], contexts: Sequence[list[int]], ks: Sequence[int]
    ) -> list[Proposal]:
        """Up to ks drafts after the contexts of the rows that are ready, none for the others."""
        found: list[Proposal] = [([], None)] * len(rows)
        ready = [i for i, k in enumerate(ks) if k and self.is_ready(rows[i], contexts[i])]
        if ready:
            drafts = self._draft(*([x[i] for i in ready] for x in (rows, contexts, ks)))
            for i, proposal in zip(ready, drafts):
                found[i] = proposal
        return found

    def is_ready(self, row: Row, context: list[int]) -> bool:
        """Whether the row was observed up to its context's second to last token."""
        raise NotImplementedError

    def _draft(
        self, rows: Sequence[Row], contexts: Sequence[list[int]], ks: Sequence[int]
    ) -> list[Proposal]:
        raise NotImplementedError

    def observe(self, row: Row, start: int, hidden: Tensor) -> None:
        """Called after each forward of the target with its final hidden states (t, C) of a row's
        positions from `start` on."""

    def forget(self, row: Row) -> None:
        """Called when a row has ended: drop its state."""

    def _chain(
        self,
        rows: Sequence[Row],
        ks: Sequence[int],
        state: Any,
        follow: Callable[[Any, Tensor, int], Any],
        first: int = 0,
    ) -> list[Proposal]:
        """Up to ks drafts of each row, from draft number `first` on: sample from head(state), then
        state = follow(state, ids, i). One host sync, at the end; with `confidence` one per
        draft."""
        sampled, probs, ks, confidences = [], [], list(ks), None
        for i in range(max(ks)):
            logits = self.head(state)
            ids, q = self.sample(logits, rows, first + i)
            sampled.append(ids)
            probs.append(q)
            if self.confidence is not None:
                p = _gather_last(logits.float().softmax(-1), ids)
                confidences = p if confidences is None else confidences * p
                go_on = self.confidence.suffices(rows, confidences.tolist())
                ks = [k if more else min(k, i + 1) for k, more in zip(ks, go_on)]
            if i + 1 >= max(ks):
                break
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
        self.ahead: Proposal = [], None  # the context and drafts of draft_ahead; q of the drafts
        self.forwards = self.num_ahead_used = 0

    def forget(self, row: Row) -> None:
        self.cached_tokens.pop(row, None)

    def propose_batch(
        self, rows: Sequence[Row], contexts: Sequence[list[int]], ks: Sequence[int]
    ) -> list[Proposal]:
        if not any(ks):
            return [([], None)] * len(rows)
        (ahead, q), self.ahead, n = self.ahead, ([], None), len(contexts[0])
        if len(ahead) > n and ahead[:n] == contexts[0]:
            self.num_ahead_used += 1
            k, end = ks[0], len(ahead) - n
            return [(ahead[n : n + k], None if q is None else q[len(q) - end :][:k])]
        return self._draft(rows, contexts, ks)

    def draft_ahead(self, row: Row, context: list[int], drafts: list[int], k: int) -> None:
        """Continue one sequence's drafts by up to k while the target verifies them (LLMCad). If it
        accepts all, and its next token is the first of the continuation, the rest of that is the
        next proposal, without a forward. This is exact: it was sampled after that token."""
        prefix = context + drafts
        tokens, q = self._draft([row], [prefix], [k], len(drafts))[0]
        self.ahead = prefix + tokens, q

    def _draft(
        self,
        rows: Sequence[Row],
        contexts: Sequence[list[int]],
        ks: Sequence[int],
        first: int = 0,
    ) -> list[Proposal]:
        h = self.read(rows, contexts)[:, 0]

        def follow(h: Tensor, ids: Tensor, i: int) -> Tensor:
            self.forwards += 1
            return self.runner.step(rows, ids, [len(c) + i for c in contexts])

        found = self._chain(rows, ks, h, follow, first)
        for row, context, (tokens, _) in zip(rows, contexts, found):
            self.cached_tokens[row] = context + tokens[:-1]
        return found

    def read(
        self, rows: Sequence[Row], contexts: Sequence[list[int]], more: Sequence[int] = ()
    ) -> Tensor:
        """Run the new tokens of the contexts, and `more` after them -> hidden states (R, 1 +
        len(more), C) from the last token of each context on."""
        starts = [self._start(row, context) for row, context in zip(rows, contexts)]
        self.forwards += 1
        h = self.runner.extend(rows, starts, [[*c[s:], *more] for c, s in zip(contexts, starts)])
        return torch.stack([x[-1 - len(more) :] for x in h])

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

    def is_ready(self, row: Row, context: list[int]) -> bool:
        start, pieces = self.pending.get(row, (0, []))
        return bool(pieces) and start + sum(map(len, pieces)) == len(context) - 1

    def _draft(
        self, rows: Sequence[Row], contexts: Sequence[list[int]], ks: Sequence[int]
    ) -> list[Proposal]:
        starts, pieces = zip(*(self.pending[row] for row in rows))
        tokens = [c[start + 1 :] for start, c in zip(starts, contexts)]
        h = self.runner.extend(rows, starts, tokens, [*map(torch.cat, pieces)])
        for row, context in zip(rows, contexts):
            self.pending[row] = len(context) - 1, []

        def follow(h: Tensor, ids: Tensor, i: int) -> Tensor:
            return self.runner.step(rows, ids, [len(c) - 1 + i for c in contexts], h)

        return self._chain(rows, ks, torch.stack([x[-1] for x in h]), follow)


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

    def is_ready(self, row: Row, context: list[int]) -> bool:
        return self.last.get(row, (-1, None))[0] == len(context) - 2

    def _draft(
        self, rows: Sequence[Row], contexts: Sequence[list[int]], ks: Sequence[int]
    ) -> list[Proposal]:
        h = torch.stack([self.last[row][1] for row in rows])
        ids = torch.tensor([context[-1] for context in contexts], device=h.device)
        follow = lambda h, ids, i: self.step(h, self.embed(ids))
        return self._chain(rows, ks, follow(h, ids, 0), follow)


class TreeDrafter:
    """A draft model's tree: its top tokens, or samples without replacement, one level per forward.

    With `inner`, such as NGram, drafting itself is speculative (staged, arXiv:2308.04623): a
    forward also runs inner's guess of what follows each node. A child that was guessed needs no
    forward of its own, so that a forward makes one level or more. One sequence at a time.

    children(logits (B, W, V), m, i) -> ids (B, W, m) by rank, q (B, W, V) or None.
    """

    def __init__(
        self,
        model: DraftModel,
        children: Callable[..., tuple[Tensor, Tensor | None]],
        inner: Callable[[list[int], int], Proposal] | None = None,
    ):
        self.model, self.children, self.inner = model, children, inner

    def propose_tree(
        self, rows: Sequence[Row], contexts: Sequence[list[int]], tree: Tree
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens (B, N) and, if they were sampled, the q (B, N + 1, V) of each node's children."""
        run, N = _TreeRun(self.model, rows, contexts, tree, self.inner), len(tree.parents)
        tokens = torch.zeros(len(rows), N, dtype=torch.long, device=run.base.device)
        probs: Tensor | None = None
        waiting, depths = [-1] if N else [], (0, *tree.depths)
        while waiting:
            run.forward(waiting, tokens)
            ready, waiting = waiting, []
            for depth in range(tree.depth):
                level = [node for node in ready if depths[node + 1] == depth]
                if not level:
                    continue
                new = [i for i, parent in enumerate(tree.parents) if parent in level]
                m = 1 + max(tree.ranks[i] for i in new)
                ids, q = self.children(run.logits_of(level), m, depth)
                parents = [level.index(tree.parents[i]) for i in new]
                tokens[:, new] = ids[:, parents, [tree.ranks[i] for i in new]]
                if q is not None:
                    shape = len(rows), N + 1, q.shape[-1]
                    probs = q.new_zeros(shape) if probs is None else probs
                    probs[:, [i + 1 for i in level]] = q
                for node in new:
                    if node in run.reach:
                        (ready if run.was_guessed(node, tokens) else waiting).append(node)
        for row, context in zip(rows, contexts):
            # the tree's drafts are in other cache slots than their positions: not reusable
            self.model.cached_tokens[row] = list(context)
        return tokens, probs


class _TreeRun:
    """The forwards of a draft model for one tree. Its cache has the tree's nodes with children, and
    guesses, at most 2 N, in the order in which they were run: the nodes of a tree of its own."""

    def __init__(
        self,
        model: DraftModel,
        rows: Sequence[Row],
        contexts: Sequence[list[int]],
        tree: Tree,
        inner: Callable[[list[int], int], Proposal] | None,
    ):
        self.model, self.rows, self.contexts, self.tree = model, rows, contexts, tree
        self.inner = inner
        self.base = torch.tensor([len(c) - 1 for c in contexts], device=model.runner.device)
        self.parents: list[int] = []  # in the cache's tree
        self.entries = {-1: -1}  # a node of `tree` -> its node in the cache
        self.guesses: dict[tuple[int, int], int] = {}  # parent and token -> node in the cache
        self.logits: list[Tensor] = []  # (B, V) after the context and each node in the cache
        self.reach = {-1: 0}  # of each node with children: levels of such nodes below it
        for node in sorted(set(tree.parents) - {-1}, reverse=True):
            parent, below = tree.parents[node], self.reach.setdefault(node, 0)
            self.reach[parent] = max(self.reach.get(parent, 0), below + 1)

    def forward(self, nodes: list[int], tokens: Tensor) -> None:
        """Run the root, or nodes whose parents were run, and the guesses of what follows each.
        tokens: (B, N) of the tree."""
        first = len(self.parents)
        is_root = nodes == [-1]
        for node in () if is_root else nodes:
            self.entries[node] = self._add(self.entries[self.tree.parents[node]])
        guessed = [] if self.inner is None else self._guess(nodes, tokens[0].tolist())
        if is_root:
            h = self.model.read(self.rows, self.contexts, guessed)
        else:
            self.model.forwards += 1
            ids = torch.cat((tokens[:, nodes], tokens.new_tensor([guessed] * len(tokens))), 1)
            new = torch.arange(first + 1, len(self.parents) + 1, device=ids.device)
            limit = max(map(len, self.contexts)) + len(self.parents)
            h = self.model.runner.nodes(ids, _tree(tuple(self.parents)), self.base, new, limit)
        self.logits += self.model.head(h).unbind(1)

    def logits_of(self, nodes: list[int]) -> Tensor:
        """(B, W, V) after W nodes that were run."""
        return torch.stack([self.logits[self.entries[node] + 1] for node in nodes], 1)

    def was_guessed(self, node: int, tokens: Tensor) -> bool:
        """Whether a node's token was run as a guess after its parent: then it is such a node."""
        if self.inner is None:
            return False
        key = self.entries[self.tree.parents[node]], int(tokens[0, node])
        if key in self.guesses:
            self.entries[node] = self.guesses[key]
        return key in self.guesses

    def _add(self, parent: int) -> int:
        self.parents.append(parent)
        return len(self.parents) - 1

    def _guess(self, nodes: list[int], tokens: list[int]) -> list[int]:
        """Tokens of the guesses after all nodes."""
        found: list[int] = []
        for node in nodes:
            path, at = [], node
            while at >= 0:
                path, at = [tokens[at], *path], self.tree.parents[at]
            missing = len(self.reach) - len(self.entries)
            room = 2 * len(self.tree.parents) - len(self.parents) - missing
            guess = self.inner(self.contexts[0] + path, min(self.reach[node], room))[0]
            at = self.entries[node]
            for token in guess:
                self.guesses[at, token] = at = self._add(at)
            found += guess
        return found


_tree = lru_cache(Tree)  # with its mask


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
