"""Speculative decoding: several tokens for one reading of the weights, and the same distribution.

A decode step reads every weight to make one token, and could run several for nearly the same time.
So something cheap, the *drafter*, proposes the next k tokens; the model runs them all in one
forward, as it would a prompt; and a rule keeps of them as many as leave the output distributed
exactly as the model's own (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318). What
was refused is forgotten: the KV cache is cut back by moving a number. Five parts:

    the rule     a drafted token d is kept with probability min(1, p(d) / q(d)); the first that is
                 not is replaced by a draw from norm(max(p - q, 0)), and after a whole run one more
                 is drawn from p. p and q are what is drawn from, after temperature, top-k, top-p
                 and penalties; greedy is the limit where both are one token.
    the tree     several continuations at once: every node attends to its ancestors alone, and the
                 rule goes on from sibling to sibling with what p has left (SpecInfer,
                 arXiv:2305.09781).
    drafters     text copied from what stands before (LLMA, arXiv:2304.04487), a smaller model, the
                 first layers of the same, multi-token prediction (DeepSeek-V3, arXiv:2412.19437,
                 2.2), a head trained for it (EAGLE, arXiv:2401.15077), or one of them inside
                 another (staged, arXiv:2308.04623).
    how many     k that promises most tokens per second, by the acceptance and the step times
                 measured so far, for each sequence of a batch; 0 where drafting does not pay
                 (SmartSpec, arXiv:2406.14066).

A run of k drafts, each kept with probability a, gives (1 - a^(k+1)) / (1 - a) tokens for one step
of the model. When it loses: where a step is limited by arithmetic and not by memory, in large
batches; where a draft costs much of a step (small models, whose steps are overhead); where the text
cannot be guessed. Mixtures of experts gain less: k tokens read the experts of all of them.

Two ways of drawing. A token proposed *for certain* (copied, or a drafter's argmax) is verified by
drawing as without it and going on while the draw agrees: the rule's limit for a q of one token,
and the output is then that of plain decoding with the same seed, token for token. Drafts *drawn*
from q and verified by the rule are kept more often, and only their distribution is the same.

Hook: drafters are callables, `propose(context, k) -> tokens, probs`. Those that batch have `many`,
and are handed how to run their model; `tree_attend` is the model's attend callable. Equivalence
(test_all.py): greedy output == plain decoding's for every drafter and cache; sampled output against
the exact distribution by chi-square, where wrong rules fail; tree logits == each path's. Needs:
torch; `python speculative.py` checks itself and prints what verification and drafting cost.

Shapes: B rows, K drafted tokens, N nodes of a tree, V vocabulary, C model width.
"""

from __future__ import annotations

import heapq
import importlib.util
import math
import random
import statistics
import time
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
# The rule
# --------------------------------------------------------------------------------------------------


def speculative_sample(
    target_probs: Tensor,
    draft_probs: Tensor,
    draft_tokens: Tensor,
    generator: torch.Generator | None = None,
) -> Tensor:
    """target_probs (K + 1, V), draft_probs (K, V), draft_tokens (K,) drawn from them -> the n that
    are kept and one more, (n + 1,): distributed as if each were drawn from target_probs
    (arXiv:2211.17192, algorithm 1). ValueError if shapes disagree or there is nothing to draw."""
    K, V = draft_tokens.numel(), target_probs.shape[-1]
    shapes = [tuple(x.shape) for x in (target_probs, draft_probs, draft_tokens)]
    if shapes != [(K + 1, V), (K, V), (K,)]:
        raise ValueError(
            "target_probs must be (K + 1, V), draft_probs (K, V), draft_tokens (K,), not "
            f"{', '.join(map(str, shapes))}"
        )
    uniform = torch.rand(1, K, generator=generator, device=target_probs.device)
    n, rest = accept(target_probs[None], draft_probs[None], draft_tokens[None], uniform)
    if not rest.sum() > 0:
        raise ValueError(f"target_probs[{int(n)}] is not a distribution: nothing can be drawn")
    return torch.cat((draft_tokens[: int(n)], torch.multinomial(rest[0], 1, generator=generator)))


def accept(
    target: Tensor,
    draft: Tensor | None,
    tokens: Tensor,
    uniform: Tensor,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The rule, for B rows that keep different numbers of tokens; no look from the host.

    target (B, K + 1, V) p after each token; draft (B, K, V) the q that tokens (B, K) were drawn
    from, None if they were proposed for certain; uniform (B, K) in [0, 1); lengths (B,): so many
    of a row's tokens count. -> n (B,) kept; rest (B, V), what the one token more is drawn from:
    norm(max(p - q, 0)) where a token was refused, p where none was. NaN where p is.
    """
    B, K = tokens.shape
    rows = torch.arange(B, device=tokens.device)
    lengths = torch.full_like(rows, K) if lengths is None else lengths
    target = target.to(torch.promote_types(target.dtype, torch.float32))
    p = _at(target[:, :K], tokens)
    q = torch.ones_like(p) if draft is None else _at(draft, tokens)
    kept = (uniform * q < p) & (torch.arange(K, device=tokens.device) < lengths[:, None])
    n = kept.long().cumprod(1).sum(1)
    rest = target[rows, n]
    if K == 0:
        return n, rest / rest.sum(-1, keepdim=True)
    refused = n.clamp(max=K - 1)
    own = rest.scatter(1, tokens[rows, refused][:, None], 0) if draft is None else None
    left = own if draft is None else _left(rest, draft[rows, refused])
    rest = torch.where((n < lengths)[:, None] & (left.sum(-1, keepdim=True) > 0), left, rest)
    return n, rest / rest.sum(-1, keepdim=True)


def matching(drawn: Tensor, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
    """drawn (B, K + 1) from p after each of the tokens (B, K), which were proposed for certain ->
    how many are kept (B,): as long as they agree. The output is drawn[:, : n + 1]."""
    same = drawn[:, :-1] == tokens
    if lengths is not None:
        same &= torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    return same.long().cumprod(1).sum(1)


def _left(p: Tensor, q: Tensor) -> Tensor:
    """What p has beyond q, (B, V)."""
    return (p - q).clamp(min=0)


def _at(x: Tensor, ids: Tensor) -> Tensor:
    """x (..., V), ids (...) -> (...)"""
    return x.gather(-1, ids[..., None])[..., 0]


# --------------------------------------------------------------------------------------------------
# Trees
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tree:
    """A shape for drafts: of node i its parent, -1 for the root, the last token that is certain.

    Nodes come level by level, and siblings by rank: a node's first child is the drafter's first
    choice. In tensors the root is 0 and node i is i + 1. ValueError if the order is another.
    """

    parents: tuple[int, ...]

    def __post_init__(self):
        for i, parent in enumerate(self.parents):
            if not -1 <= parent < i:
                raise ValueError(f"parents[{i}] must be from -1 to {i - 1}, not {parent}")
        if list(self.depths) != sorted(self.depths):
            raise ValueError(f"parents must go level by level, not {self.parents}")

    @classmethod
    def chain(cls, k: int) -> Tree:
        """k drafts in a row."""
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
        """(N + 1, N + 1) bool: [i, j] where j is i or above it."""
        seen = torch.eye(len(self.parents) + 1, dtype=torch.bool)
        for i, parent in enumerate(self.parents):
            seen[i + 1] |= seen[parent + 1]
        return seen


def best_tree(acceptance: Sequence[float], nodes: int, depth: int | None = None) -> Tree:
    """The tree of so many nodes that keeps most tokens on average, where a node's child of rank r
    is the one that is kept with probability acceptance[r], falling: a node is worth the product
    along its path, and the best are taken (Sequoia, arXiv:2402.12374, without its depth terms)."""
    found: list[tuple[int, int, int]] = []  # (depth, parent's number in this list or -1, rank)
    heap = [(-acceptance[0], 1, -1, 0)] if nodes and depth != 0 else []
    while heap and len(found) < nodes:
        worth, level, parent, rank = heapq.heappop(heap)
        found.append((level, parent, rank))
        above = worth / acceptance[rank] if acceptance[rank] else 0.0
        if rank + 1 < len(acceptance):
            heapq.heappush(heap, (above * acceptance[rank + 1], level, parent, rank + 1))
        if depth is None or level < depth:
            heapq.heappush(heap, (worth * acceptance[0], level + 1, len(found) - 1, 0))
    number, parents = {-1: -1}, []
    order = sorted(range(len(found)), key=lambda i: found[i][0])  # stable: siblings by rank
    for new, i in enumerate(order):
        number[i] = new
        parents.append(number[found[i][1]])
    return Tree(tuple(parents))


def accept_tree(
    target: Tensor, draft: Tensor | None, tokens: Tensor, uniform: Tensor, tree: Tree
) -> tuple[Tensor, Tensor, Tensor]:
    """The rule down a tree (multi-step speculative sampling, arXiv:2305.09781, algorithm 2): at a
    node its children are tried by rank; each that is refused takes its q out of p, and itself out
    of q; the first that is kept is the next node.

    target (B, N + 1, V); draft (B, N + 1, V), the q that a node's children were drawn from without
    replacement, None if they were proposed for certain; tokens, uniform (B, N).
    -> path (B, depth) of node numbers, -1 behind its end; its length n (B,); rest (B, V).
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
        here = here & (q_i > 0)  # when q is used up, what is left of a level was not drawn
        kept = here & (uniform[:, i] * q_i < p.gather(1, token)[:, 0])
        left = p.scatter(1, token, 0) if q is None else _left(p, q)
        total = left.sum(-1, keepdim=True)
        refused = (here & ~kept)[:, None]
        p = torch.where(refused & (total > 0), left / total, p)
        p = torch.where(kept[:, None], target[:, i + 1], p)
        if q is not None:
            others = q.scatter(1, token, 0)
            others = others / others.sum(-1, keepdim=True).clamp(min=1e-30)
            q = torch.where(refused, others, q)
            q = torch.where(kept[:, None], draft[:, i + 1].to(q.dtype), q)
        path[rows, n] = torch.where(kept, i, path[rows, n])
        at, n = torch.where(kept, i + 1, at), n + kept
    return path[:, : tree.depth], n, p / p.sum(-1, keepdim=True)


def follow_tree(drawn: Tensor, tokens: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
    """`matching` down a tree: drawn (B, N + 1) from p after the root and each node; on to the child
    that is what was drawn. -> path (B, depth) and its length n (B,), as accept_tree."""
    B = len(tokens)
    rows = torch.arange(B, device=tokens.device)
    path = torch.full((B, tree.depth + 1), -1, dtype=torch.long, device=tokens.device)
    at, n = torch.zeros_like(rows), torch.zeros_like(rows)
    for i, parent in enumerate(tree.parents):
        kept = (at == parent + 1) & (tokens[:, i] == drawn[rows, at])
        path[rows, n] = torch.where(kept, i, path[rows, n])
        at, n = torch.where(kept, i + 1, at), n + kept
    return path[:, : tree.depth], n


def tree_attend(
    cache: Any, tree: Tree, base: Tensor, nodes: Tensor, limit: int | None = None
) -> Callable[..., Tensor]:
    """The attend hook of a tree of drafts, all of it or some nodes whose ancestors were run.

    base (B,): the root's position. nodes (T,): which are run, 0 the root, i + 1 node i; node j goes
    to slot base + j, so that none overwrites its sibling, and sees what stands before the root, its
    ancestors and itself. positions, base + depth, are handed to the model as ever. cache: anything
    with update(spec, k, v, slots, limit) -> all keys and values up to limit.
    """
    seen = tree.mask.to(base.device)[nodes]  # (T, N + 1)
    depths = torch.tensor((0, *tree.depths), device=base.device)
    slots = base[:, None] + nodes

    def attend(spec: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        keys, values = cache.update(spec, k, v, slots, limit)  # (B, S, Hkv, D)
        j = torch.arange(keys.shape[1], device=q.device)
        node = j - base[:, None]  # (B, S): what a slot holds, if not the token of that position
        inside = node.clamp(0, len(depths) - 1)
        mask = (node < 0)[:, None] | (seen[:, inside].transpose(0, 1) & (node == inside)[:, None])
        place = torch.where(node < 0, j, base[:, None] + depths[inside])
        distance = positions[..., None] - place[:, None]  # (B, T, S)
        if spec.window is not None:
            mask = mask & (distance < spec.window)
        mask = mask[:, None]
        if spec.alibi_slopes is not None:
            bias = -spec.alibi_slopes[:, None, None] * distance[:, None]
            mask = bias.masked_fill(~mask, -math.inf).to(q.dtype)
        assert getattr(spec, "softcap", None) is None and getattr(spec, "sinks", None) is None
        q, keys, values = q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        o = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, scale=spec.scale, enable_gqa=True
        )
        return o.transpose(1, 2)

    return attend


# --------------------------------------------------------------------------------------------------
# Drafters without a model
# --------------------------------------------------------------------------------------------------

Proposal = tuple[list[int], Tensor | None]  # at most k tokens, and q (len, V) or None: for certain


class NGram:
    """Copies: finds the last few tokens earlier in the context, the longest such run and of these
    the latest, else in a reference, and proposes what followed there (LLMA, arXiv:2304.04487;
    prompt lookup). A copy that reaches the end of the context goes on with itself, so that a loop
    is continued for any k.

    references: lists of ids that texts may quote, of which each is searched too. A proposal costs
    some microseconds per thousand tokens, and no forward: `python speculative.py` prints how many.
    """

    free = True  # a proposal costs next to nothing, whether it is run or not

    def __init__(self, longest: int = 4, shortest: int = 1, references: Sequence[list[int]] = ()):
        if not 1 <= shortest <= longest:
            raise ValueError(f"shortest must be from 1 to longest ({longest}), not {shortest}")
        self.longest, self.shortest = longest, shortest
        # the last token of a text is not searched: nothing follows it
        self.references = [(list(ids), _bytes(ids[:-1])) for ids in references]

    def __call__(self, context: list[int], k: int) -> Proposal:
        if k <= 0:
            return [], None
        places = [(context, _bytes(context[:-1])), *self.references]
        for n in range(min(self.longest, len(context)), self.shortest - 1, -1):
            suffix = _bytes(context[-n:])
            for text, searched in places:
                at = _last(searched, suffix)
                if at >= 0:
                    run = text[at + n : at + n + k]
                    while len(run) < k and text is context:
                        run.append(run[at + n - len(context)])  # of the copy itself
                    return run, None
        return [], None


def _bytes(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def _last(text: bytes, run: bytes) -> int:
    """Where the run of tokens last occurs in the text, -1 if nowhere."""
    at = text.rfind(run)
    while at >= 0 and at % 4:  # inside of tokens
        at = text.rfind(run, 0, at + len(run) - 1)
    return at // 4


# --------------------------------------------------------------------------------------------------
# Drafters with a model
# --------------------------------------------------------------------------------------------------

Row = Hashable  # which sequence it is
# Draw the i-th draft: logits (R, V), rows, i -> ids (R,), q (R, V) or None
Draw = Callable[[Tensor, Sequence[Row], int], tuple[Tensor, Tensor | None]]
CHUNK = 512  # tokens in one forward of a drafter that has a prompt to read
UNREAD = 2048  # hidden states kept of a row for whom nothing is drafted: MTP then lacks older ones


def argmax(logits: Tensor, rows: Sequence[Row], i: int) -> tuple[Tensor, None]:
    """The default Draw: the likeliest token, for certain."""
    return logits.argmax(-1), None


class Runner:
    """Runs a drafter's model over its cache. forward(tokens (B, T), positions, attend, hidden) ->
    hidden states (B, T, C); what it is handed as hidden is for MTP."""

    def __init__(self, forward: Callable[..., Tensor], cache: Any, device: Any):
        self.forward, self.cache, self.device = forward, cache, device

    def feed(
        self,
        rows: Sequence[Row],
        starts: Sequence[int],
        tokens: Sequence[list[int]],
        hidden: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Of each row its tokens from position `start` on, with the hidden states (t, C) before
        them if need be -> hidden states (t, C) of each."""
        out: list[list[Tensor]] = [[] for _ in rows]
        for first in range(0, max(map(len, tokens)), CHUNK):
            part = [t[first : first + CHUNK] for t in tokens]
            before = None if hidden is None else [h[first : first + CHUNK] for h in hidden]
            for h, all in zip(self.run(rows, [s + first for s in starts], part, before), out):
                all.append(h)
        return [torch.cat(parts) for parts in out]

    def kept(self, row: Row, n: int) -> int:
        """How many of a row's first n positions the cache still has where they were."""
        return n


class Contiguous(Runner):
    """Over a contiguous cache of `batch` rows, 0, 1, ..., which all go together. cache: attend,
    update, max_len and the limit of slots that matter, as model.KVCache has them; its last slot is
    no token's.

    Rows of different lengths are padded on the right: what the padding leaves in the cache is
    overwritten before anything sees it. `fast`, if given, is forward(tokens, positions, hidden) for
    one or two tokens a row, of static shapes, attending over the whole cache.
    """

    def __init__(
        self,
        forward: Callable[..., Tensor],
        cache: Any,
        device: Any,
        batch: int = 1,
        fast: Any = None,
    ):
        super().__init__(forward, cache, device)
        self.batch, self.fast = batch, fast
        self.reads_hidden = False  # as MTP does

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
        """One token more of each row, ids (R,) at positions `at`, hidden (R, C) -> (R, C)."""
        before = None if hidden is None else hidden[:, None]
        return self._forward(rows, ids[:, None], at, before)[:, 0]

    def nodes(self, tokens: Tensor, tree: Tree, base: Tensor, nodes: Tensor, limit: int) -> Tensor:
        """Nodes (T,) of a tree, tokens (B, T) -> (B, T, C)."""
        depths = torch.tensor((0, *tree.depths), device=self.device)[nodes]
        attend = tree_attend(self.cache, tree, base, nodes, limit)
        return self.forward(tokens, base[:, None] + depths, attend, None)

    def _forward(
        self, rows: Sequence[int], tokens: Tensor, starts: list[int], hidden: Tensor | None
    ) -> Tensor:
        """tokens (R, T) of some rows -> their (R, T, C)."""
        T, begin = tokens.shape[1], torch.tensor(starts, device=self.device)
        if len(rows) < self.batch:  # the others are over: what is written there is not read
            spread = lambda x: x.new_zeros(self.batch, *x.shape[1:]).index_copy(0, index, x)
            index = torch.tensor(rows, device=self.device)
            tokens, begin = spread(tokens), spread(begin)
            hidden = None if hidden is None else spread(hidden)
            return self._whole(tokens, begin, max(starts) + T, hidden)[index]
        return self._whole(tokens, begin, max(starts) + T, hidden)

    def _whole(self, tokens: Tensor, begin: Tensor, end: int, hidden: Tensor | None) -> Tensor:
        positions = begin[:, None] + torch.arange(tokens.shape[1], device=self.device)
        positions = positions.clamp(max=self.cache.max_len - 1)  # padding may reach beyond
        if self.fast is not None and tokens.shape[1] <= 2:
            return self.fast(tokens, positions, hidden)
        positions = positions[0] if len(positions) == 1 else positions
        attend = partial(self.cache.attend, limit=end)
        return self.forward(tokens, positions, attend, hidden)


class Drafter:
    """What the drafters below have in common: k tokens one after the other, for many rows."""

    free = False

    def __call__(self, context: list[int], k: int) -> Proposal:
        """For a single sequence."""
        return self.many([0], [context], [k])[0]

    def many(
        self, rows: Sequence[Row], contexts: Sequence[list[int]], ks: Sequence[int]
    ) -> list[Proposal]:
        raise NotImplementedError

    def observe(self, row: Row, start: int, hidden: Tensor) -> None:
        """The target's final hidden states (t, C) at a row's positions from `start` on."""

    def forget(self, row: Row) -> None:
        """That sequence is over."""

    def _chain(
        self,
        rows: Sequence[Row],
        ks: Sequence[int],
        state: Any,
        logits_of: Callable[[Any], Tensor],
        follow: Callable[[Any, Tensor, int], Any],
    ) -> list[Proposal]:
        """max(ks) drafts of each row: draw from logits_of(state), then state = follow(state, ids,
        i). The host looks once, at the end."""
        drawn, probs, k = [], [], max(ks)
        for i in range(k):
            ids, q = self.draw(logits_of(state), rows, i)
            drawn.append(ids)
            probs.append(q)
            if i + 1 < k:
                state = follow(state, ids, i)
        tokens = torch.stack(drawn, 1).tolist()
        if probs[0] is None:
            return [(t[:n], None) for t, n in zip(tokens, ks)]
        q = torch.stack(probs, 1)
        return [(t[:n], q[r, :n]) for r, (t, n) in enumerate(zip(tokens, ks))]


class DraftModel(Drafter):
    """A smaller model of the same vocabulary. Its cache keeps what it has read: a proposal runs
    what is new in the context, mostly one or two tokens, then one token at a time.

    run: a Contiguous or alike. shared: the cache is the target's own, and the model its first
    layers (early exit, arXiv:2404.16710): what it would write is there already.
    """

    def __init__(self, run: Any, head: Callable, draw: Draw = argmax, shared: bool = False):
        self.run, self.head, self.draw, self.shared = run, head, draw, shared
        self.held: dict[Row, list[int]] = {}
        self.forwards = 0

    def forget(self, row: Row) -> None:
        self.held.pop(row, None)

    def many(
        self, rows: Sequence[Row], contexts: Sequence[list[int]], ks: Sequence[int]
    ) -> list[Proposal]:
        if not any(ks):
            return [([], None)] * len(rows)
        h = self.read(rows, contexts)

        def follow(h: Tensor, ids: Tensor, i: int) -> Tensor:
            self.forwards += 1
            return self.run.step(rows, ids, [len(c) + i for c in contexts])

        found = self._chain(rows, ks, h, self.head, follow)
        for row, context, (tokens, _) in zip(rows, contexts, found):
            self.held[row] = context + tokens[:-1]
        return found

    def read(self, rows: Sequence[Row], contexts: Sequence[list[int]]) -> Tensor:
        """Run what is new in the contexts; hidden states (R, C) after their last tokens."""
        starts = [self._start(row, context) for row, context in zip(rows, contexts)]
        self.forwards += 1
        h = self.run.feed(rows, starts, [c[s:] for c, s in zip(contexts, starts)])
        return torch.stack([x[-1] for x in h])

    def _start(self, row: Row, context: list[int]) -> int:
        if self.shared:
            return len(context) - 1
        known = min(common(self.held.get(row, []), context), len(context) - 1)
        return self.run.kept(row, known)


def common(a: list[int], b: list[int]) -> int:
    """How many tokens they have in common from the start on."""
    n = min(len(a), len(b))
    for i in range(0, n, 64):
        j = min(n, i + 64)
        if a[i:j] != b[i:j]:
            return next(at for at in range(i, j) if a[at] != b[at])
    return n


class Staged(DraftModel):
    """A draft model that is itself sped up by a drafter, such as NGram (arXiv:2308.04623): it
    verifies what `inner` proposes, several tokens in a forward, by drawing as without it. One row
    at a time."""

    def __init__(self, run: Any, head: Callable, inner: Callable, draw: Draw = argmax):
        super().__init__(run, head, draw)
        self.inner = inner

    def many(
        self, rows: Sequence[Row], contexts: Sequence[list[int]], ks: Sequence[int]
    ) -> list[Proposal]:
        return [self._one(*each) for each in zip(rows, contexts, ks)]

    def _one(self, row: Row, context: list[int], k: int) -> Proposal:
        tokens: list[int] = []
        probs: list[Tensor | None] = []
        while len(tokens) < k:
            known = context + tokens
            guess = self.inner(known, k - len(tokens) - 1)[0]
            start, self.forwards = self._start(row, known), self.forwards + 1
            h = self.run.feed([row], [start], [known[start:] + guess])[0]
            logits, kept = self.head(h[len(known) - 1 - start :]), 0
            for i in range(len(guess) + 1):
                ids, q = self.draw(logits[i : i + 1], [row], len(tokens))
                tokens.append(int(ids))
                probs.append(q)
                if i == len(guess) or tokens[-1] != guess[i]:
                    break
                kept += 1
            self.held[row] = known + guess[:kept]
        return tokens, None if not probs or probs[0] is None else torch.cat(probs)


class MTP(Drafter):
    """Multi-token prediction as a drafter (DeepSeek-V3, arXiv:2412.19437, 2.2): from the target's
    hidden state at a position and the token after it, the one after that; then on from its own
    hidden state. Only its first depth is used.

    run: a Contiguous or alike, whose forward is predict_further. It reads every position with the
    target's hidden state there, which `observe` brings.
    """

    def __init__(self, run: Any, head: Callable, draw: Draw = argmax):
        self.run, self.head, self.draw = run, head, draw
        run.reads_hidden = True
        self.unread: dict[Row, tuple[int, list[Tensor]]] = {}  # start, hidden (t, C) in pieces

    def observe(self, row: Row, start: int, hidden: Tensor) -> None:
        begin, pieces = self.unread.get(row, (start, []))
        if start != begin + sum(map(len, pieces)):
            begin, pieces = start, []  # the sequence begins again, or its prefix was found
        pieces.append(hidden.clone())  # a graph writes there again
        while sum(map(len, pieces)) - len(pieces[0]) >= UNREAD:
            begin += len(pieces.pop(0))
        self.unread[row] = begin, pieces

    def forget(self, row: Row) -> None:
        self.unread.pop(row, None)

    def many(
        self, rows: Sequence[Row], contexts: Sequence[list[int]], ks: Sequence[int]
    ) -> list[Proposal]:
        starts, pieces = zip(*(self.unread.get(row, (0, [])) for row in rows))
        # those that follow the context to its last token but one
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
        h = self.run.feed(rows, [starts[i] for i in some], tokens, hidden)
        for row, context in zip(rows, contexts):
            self.unread[row] = len(context) - 1, []

        def follow(h: Tensor, ids: Tensor, i: int) -> Tensor:
            return self.run.step(rows, ids, [len(c) - 1 + i for c in contexts], h)

        last = torch.stack([x[-1] for x in h])
        for i, proposal in zip(some, self._chain(rows, ks, last, self.head, follow)):
            found[i] = proposal
        return found


class DraftHead(nn.Module):
    """From the target's final hidden state at a position and the token after it, the hidden state
    one further: h' = h + down(silu(up([norm(h), norm(e)]))), its logits the target's own head's of
    h'. Fed with its own h', it goes on. EAGLE (arXiv:2401.15077) without its attention, which h
    makes up for: a draft costs two matrices and the head, and no cache.

    train.py --train-draft-head trains one for a checkpoint.
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


class Heads(Drafter):
    """A DraftHead as a drafter: embed(ids) and head(hidden) are the target's."""

    def __init__(self, step: Callable, embed: Callable, head: Callable, draw: Draw = argmax):
        self.step, self.embed, self.head, self.draw = step, embed, head, draw
        self.last: dict[Row, tuple[int, Tensor]] = {}  # the hidden state at the last known position

    def observe(self, row: Row, start: int, hidden: Tensor) -> None:
        self.last[row] = start + len(hidden) - 1, hidden[-1].clone()

    def forget(self, row: Row) -> None:
        self.last.pop(row, None)

    def many(
        self, rows: Sequence[Row], contexts: Sequence[list[int]], ks: Sequence[int]
    ) -> list[Proposal]:
        found: list[Proposal] = [([], None)] * len(rows)
        known = [self.last.get(row, (-1, None)) for row in rows]
        some = [i for i, (at, _) in enumerate(known) if ks[i] and at == len(contexts[i]) - 2]
        if not some:
            return found
        h = torch.stack([known[i][1] for i in some])
        ids = torch.tensor([contexts[i][-1] for i in some], device=h.device)
        follow = lambda h, ids, i: self.step(h, self.embed(ids))
        part = [rows[i] for i in some], [ks[i] for i in some]
        for i, proposal in zip(some, self._chain(*part, follow(h, ids, 0), self.head, follow)):
            found[i] = proposal
        return found


class TreeDrafts:
    """A draft model's tree: level by level its likeliest tokens, or draws without replacement.

    children(logits (B, W, V), m, i) -> ids (B, W, m) by rank, q (B, W, V) or None.
    """

    def __init__(self, model: DraftModel, children: Callable[..., tuple[Tensor, Tensor | None]]):
        self.model, self.children = model, children

    def grow(
        self, rows: Sequence[Row], contexts: Sequence[list[int]], tree: Tree
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens (B, N) and, if they were drawn, the q (B, N + 1, V) of each node's children."""
        m = self.model
        logits = m.head(m.read(rows, contexts))[:, None]  # (B, W, V) of the nodes in `level`
        base = torch.tensor([len(c) - 1 for c in contexts], device=logits.device)
        limit = max(len(c) for c in contexts) + len(tree.parents)
        tokens = torch.zeros(len(rows), len(tree.parents), dtype=torch.long, device=logits.device)
        probs: Tensor | None = None
        level = [-1]
        for depth in range(1, tree.depth + 1):
            born = [i for i, d in enumerate(tree.depths) if d == depth]
            most = 1 + max(tree.ranks[i] for i in born)
            ids, q = self.children(logits, most, depth - 1)
            where = [level.index(tree.parents[i]) for i in born]
            tokens[:, born] = ids[:, where, [tree.ranks[i] for i in born]]
            if q is not None:
                shape = len(rows), len(tree.parents) + 1, q.shape[-1]
                probs = q.new_zeros(shape) if probs is None else probs
                probs[:, [i + 1 for i in level]] = q
            level = [i for i in born if i in tree.parents]
            if level:
                nodes = torch.tensor([i + 1 for i in level], device=logits.device)
                m.forwards += 1
                logits = m.head(m.run.nodes(tokens[:, level], tree, base, nodes, limit))
        for row, context in zip(rows, contexts):
            # where the drafts that it read stand in the cache, no text would have them
            m.held[row] = list(context)
        return tokens, probs


# --------------------------------------------------------------------------------------------------
# How many
# --------------------------------------------------------------------------------------------------


class Fixed:
    """Always k."""

    def __init__(self, k: int):
        self.k = k

    def choose(self, rows: Sequence[Row]) -> list[int]:
        return [self.k] * len(rows)

    def observe(self, *what: Any) -> None:
        pass

    def forget(self, row: Row) -> None:
        pass


class Times:
    """Seconds by size: of near sizes what the last few lasted, of others on a line between."""

    def __init__(self):
        self.bins: dict[int, deque[tuple[int, float]]] = {}  # to one part in eight
        self.points: dict[int, tuple[float, float]] = {}  # of each, where it is on the line

    def __bool__(self) -> bool:
        return bool(self.bins)

    def add(self, size: int, seconds: float) -> None:
        width = 1 << max(0, size.bit_length() - 4)
        bin = size // width * width
        steps = self.bins.setdefault(bin, deque(maxlen=9))
        steps.append((size, seconds))
        # the median, of two the lower: what disturbs a measurement makes it longer
        typical = sorted(s for _, s in steps)[(len(steps) - 1) // 2]
        self.points[bin] = sum(n for n, _ in steps) / len(steps), typical

    def of(self, sizes: Sequence[int]) -> list[float]:
        """Zeros as long as nothing is known; of one size alone, as if others lasted the same."""
        if len(self.points) < 2:
            return [last for _, last in self.points.values() or [(0, 0.0)]] * len(sizes)
        at, last = zip(*sorted(self.points.values()))
        found = []
        for n in sizes:
            b = min(max(bisect_left(at, n), 1), len(at) - 1)
            slope = max(0.0, (last[b] - last[b - 1]) / (at[b] - at[b - 1]))
            found.append(max(0.0, last[b - 1] + slope * (n - at[b - 1])))
        return found


class Goodput:
    """For each row of a batch the k that promises most tokens per second (SmartSpec,
    arXiv:2406.14066), by what was measured: how often drafts were kept, of each row and of all,
    and how long a step lasts that runs so many tokens. The i-th draft of a row is worth a^i tokens;
    the most valuable are taken, of all rows, for as long as

        (rows + worth of the drafts taken) / (seconds of a step of rows + drafts, and of drafting)

    rises. Where it does not even for one, k is 0. Text changes, so such rows try a single draft in
    turn, as often as that costs less than one part in a hundred, and on as long as it is kept;
    and where drafts go well, a step now and then has none, to know what that would last.
    """

    HALF_LIFE = 16  # drafts of a row after which an old one counts half: text comes in stretches
    PRIOR = 2  # drafts' worth of trust in what holds for all rows
    TRIALS = 0.0075  # of the time, for rows that do not draft
    PLAIN = 128  # steps with drafts between two without

    def __init__(self, longest: int):
        self.longest = longest
        self.kept: dict[Row, tuple[float, float, bool]] = {}  # tokens kept, tried; all of the last
        self.all = (1.2, 2.0)  # kept, tried of all rows; to begin with, hope
        self.times = Times()  # of steps, by the tokens they run
        self.drafts = Times()  # of drafting one position, by the rows that draft
        self.tried: dict[Row, int] = {}  # when a row that does not draft last did
        self.steps = self.last_trial = self.last_plain = 0

    def choose(self, rows: Sequence[Row]) -> list[int]:
        """k for each row of the next step."""
        self.steps += 1
        none = [0] * len(rows)
        if not rows or not self.longest or not self.times:
            return none  # so that there is something to compare with
        ks = self._best(rows)
        if not self.drafts:  # nor is it known what drafting costs
            ks = [min(k, 1) for k in ks]
        if not any(ks):
            self.last_plain = self.steps
        elif self.steps - self.last_plain > self.PLAIN:
            self.last_plain = self.steps
            return none
        idle = [i for i, k in enumerate(ks) if k == 0]
        if idle:
            now, more = self.times.of([len(rows), len(rows) + 1])
            more += 0.0 if any(ks) else self.drafts.of([1])[0]
            hopeless = (len(rows) + 1) * now <= len(rows) * more  # even if all drafts were kept
            often = self.PLAIN if hopeless else max(3, (more / max(now, 1e-9) - 1) / self.TRIALS)
            if self.steps - self.last_trial > often:
                i = min(idle, key=lambda i: self.tried.get(rows[i], 0))
                ks[i], self.last_trial, self.tried[rows[i]] = 1, self.steps, self.steps
            for i in idle if not hopeless else ():
                ks[i] = max(ks[i], int(self.kept.get(rows[i], (0, 0, False))[2]))
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
        """A step: of each row how many were proposed and kept; tokens that it ran, of all kinds;
        its seconds, and how many of these drafting took."""
        for row, k, n in zip(rows, proposed, accepted):
            tried = min(n + 1, k)  # those behind a refused one were not tried
            if tried:
                fade = 0.5 ** (tried / self.HALF_LIFE)
                kept, before, _ = self.kept.pop(row, (0.0, 0.0, False))
                self.kept[row] = kept * fade + n, before * fade + tried, n == k
                fade **= 1 / 8
                self.all = self.all[0] * fade + n, self.all[1] * fade + tried
        if any(proposed):
            longest = max(proposed)
            self.drafts.add(math.ceil(sum(proposed) / longest), draft_seconds / longest)
        self.times.add(tokens, seconds - draft_seconds)

    def forget(self, row: Row) -> None:
        """That sequence is over."""
        self.kept.pop(row, None)
        self.tried.pop(row, None)

    def rate(self, row: Row) -> float:
        """How likely the next draft of a row is kept, as far as is known."""
        kept, tried, _ = self.kept.get(row, (0.0, 0.0, False))
        prior = self.PRIOR * self.all[0] / self.all[1]
        return min(0.99, (kept + prior) / (tried + self.PRIOR))

    def _best(self, rows: Sequence[Row]) -> list[int]:
        R, rates = len(rows), [self.rate(row) for row in rows]
        worth = sorted(
            ((a**i, i, r) for r, a in enumerate(rates) for i in range(1, self.longest + 1)),
            reverse=True,
        )
        seconds = self.times.of(range(R, R + len(worth) + 1))
        draft = self.drafts.of(range(R + 1))
        best, limit, found = R / max(seconds[0], 1e-9), (0, 0), [0] * R
        # drafting lasts as long as the longest run
        some = range(1, self.longest + 1)
        if R > 8:
            some = {self.longest >> i for i in range(self.longest.bit_length())}
        for longest in some if draft[R] > 0.001 * seconds[0] else (self.longest,):
            n, tokens = 0, float(R)
            for w, i, _ in worth:
                if i <= longest:
                    n, tokens = n + 1, tokens + w
                    drafting = longest * draft[-(-n // longest)]
                    speed = tokens / max(seconds[n] + drafting, 1e-9)
                    if speed > best:
                        best, limit = speed, (longest, n)
        longest, n = limit
        for _, _, r in [x for x in worth if x[1] <= longest][:n]:
            found[r] += 1
        return found


class TreeGoodput(Goodput):
    """Goodput for trees: the size, of a few, that promises most tokens per second, and for each the
    shape that is best for how often the drafter's first, second, ... choice was what was kept."""

    def __init__(self, sizes: Sequence[int], ranks: Sequence[float], fixed: bool = False):
        """sizes: nodes, rising; ranks: acceptance of each rank to begin with; fixed: the largest,
        in the shape that is best so far, whatever it costs."""
        super().__init__(1)
        self.sizes, self.fixed = sizes, fixed
        self.seen = [[8.0 * a, 8.0] for a in ranks]  # kept, tried
        self.trees: list[Tree] = []
        self.rounds = 0

    @property
    def acceptance(self) -> list[float]:
        """Of each rank: how often a child of that rank is the one that is kept. Falling."""
        return sorted((kept / tried for kept, tried in self.seen), reverse=True)

    def choose_tree(self, rows: Sequence[Row]) -> Tree:
        """The next step's, for all rows; Tree(()) for none."""
        if self.rounds % 16 == 0:
            self.trees = [best_tree(self.acceptance, size) for size in self.sizes]
        self.rounds += 1
        if self.fixed:
            return self.trees[-1]
        if not self.times:
            return Tree(())
        choices = [Tree(()), *self.trees]
        seconds = self.times.of([len(rows) * (1 + len(tree.parents)) for tree in choices])
        draft = self.drafts.of([1])[0]
        speeds = [
            (1 + self._worth(tree)) / max(s + draft * tree.depth, 1e-9)
            for tree, s in zip(choices, seconds)
        ]
        best = max(range(len(choices)), key=speeds.__getitem__)
        cost = seconds[1] - seconds[0] + draft * choices[1].depth
        often = max(3, cost / (self.TRIALS * max(seconds[0], 1e-9)))
        if not best and self.rounds - self.last_trial > often:
            self.last_trial, best = self.rounds, 1
        elif best and self.rounds - self.last_plain > self.PLAIN:
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
        """A step: the path of nodes that was kept, of each row."""
        children = [tree.parents.count(i) for i in range(-1, len(tree.parents))]
        for path in paths:
            for node, after in zip((-1, *path), (*path, None)):
                for rank in range(min(children[node + 1], len(self.seen))):
                    self.seen[rank][1] += 1
                    self.seen[rank][0] += after is not None and tree.ranks[after] == rank
        if self.seen[0][1] > 512:
            self.seen = [[kept / 2, tried / 2] for kept, tried in self.seen]
        if tree.parents:
            self.drafts.add(1, draft_seconds / tree.depth)
        self.times.add(len(rows) * (1 + len(tree.parents)), seconds - draft_seconds)

    def _worth(self, tree: Tree) -> float:
        """Tokens it adds on average."""
        worth, acceptance = [], self.acceptance
        for parent, rank in zip(tree.parents, tree.ranks):
            worth.append(acceptance[rank] * (worth[parent] if parent >= 0 else 1.0))
        return sum(worth)


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def _random(shape: tuple[int, ...], rng: torch.Generator, heat: float = 1.0) -> Tensor:
    """Random distributions."""
    return torch.randn(*shape, generator=rng).mul(heat).softmax(-1)


def _chi_square(ids: Tensor, p: Tensor) -> float:
    """Of the counts of ids against p (V,), in standard deviations from what it should be."""
    expected = p.double() * len(ids)
    seen = ids.bincount(minlength=len(p))
    chi2 = ((seen - expected) ** 2 / expected).sum().item()
    freedom = len(p) - 1
    return (chi2 - freedom) / math.sqrt(2 * freedom)


def check(rows: int = 200_000) -> None:
    """Two tokens of a Markov chain by a run of drafts and by a tree, against their distribution; a
    wrong rule is noticed. How many are kept; copies; the best k."""
    rng = torch.Generator().manual_seed(0)
    V, K = 6, 2
    first, then = _random((V,), rng), _random((V, V), rng)  # p of a token, and of the one after it
    q1, q2 = _random((V,), rng), _random((V, V), rng)
    exact = (first[:, None] * then).flatten()
    d1 = q1.expand(rows, V).multinomial(1, generator=rng)
    d2 = q2[d1[:, 0]].multinomial(1, generator=rng)
    tokens = torch.cat((d1, d2), 1)
    target = torch.stack((first.expand(rows, V), then[d1[:, 0]], then[d2[:, 0]]), 1)
    draft = torch.stack((q1.expand(rows, V), q2[d1[:, 0]]), 1)
    uniform = torch.rand(rows, K, generator=rng)

    def pairs(n: Tensor, rest: Tensor) -> Tensor:
        """The first two tokens, the second drawn where the rule gave but one."""
        last = rest.multinomial(1, generator=rng)
        out = torch.cat((tokens, last), 1).scatter(1, n[:, None], last)
        more = then[out[:, 0]].multinomial(1, generator=rng)[:, 0]
        return out[:, 0] * V + torch.where(n == 0, more, out[:, 1])

    n, rest = accept(target, draft, tokens, uniform)
    assert _chi_square(pairs(n, rest), exact) < 5
    kept = torch.arange(rows), n
    assert _chi_square(pairs(n, target[kept]), exact) > 20, "p for the residual goes unnoticed"
    a, k = 0.7, 4
    p = torch.tensor([a, 1 - a]).expand(rows, k + 1, 2)
    q = torch.tensor([1.0, 0.0]).expand(rows, k, 2)
    n, _ = accept(p, q, torch.zeros(rows, k, dtype=torch.long), torch.rand(rows, k, generator=rng))
    assert abs(1 + n.double().mean().item() - (1 - a ** (k + 1)) / (1 - a)) < 0.02

    tree = best_tree([0.6, 0.3, 0.1], 5)
    assert tree.parents[:2] == (-1, 0) or tree.parents[:2] == (-1, -1)
    children = torch.stack([q1.expand(rows, V).multinomial(3, generator=rng)], 1)[:, 0]
    level = Tree((-1, -1, -1))
    target = torch.cat((first.expand(rows, 1, V), then[children]), 1)
    draft = torch.cat((q1.expand(rows, 1, V), torch.zeros(rows, 3, V)), 1)
    path, n, rest = accept_tree(target, draft, children, torch.rand(rows, 3, generator=rng), level)
    last = rest.multinomial(1, generator=rng)[:, 0]
    more = then[last].multinomial(1, generator=rng)[:, 0]
    chosen = children.gather(1, path.clamp(min=0))[:, 0]
    pair = torch.where(n > 0, chosen * V + last, last * V + more)
    assert _chi_square(pair, exact) < 5

    assert NGram()([7, 1, 2, 3, 9, 1, 2], 2) == ([3, 9], None)
    assert NGram()([5, 6, 5, 6], 5)[0] == [5, 6, 5, 6, 5]
    policy = Goodput(8)
    for step in range(400):  # a step of n tokens lasts 1 + n / 20; drafts are kept with 0.8
        k = policy.choose(["row"])[0]
        n = int((torch.rand(k, generator=rng) < 0.8).long().cumprod(0).sum())
        policy.observe(["row"], [k], [n], 1 + k, 1 + (1 + k) / 20)
    value = lambda k: (1 - 0.8 ** (k + 1)) / 0.2 / (1 + (1 + k) / 20)
    assert value(policy._best(["row"])[0]) > 0.93 * max(map(value, range(9)))


def _microseconds(call: Callable[[], Any], repeats: int = 30) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def benchmark(device: str) -> None:
    """Microseconds of what speculation adds to a step, beside transformers' functions for it."""
    rng, V, K = torch.Generator().manual_seed(0), 128_256, 5
    threads = torch.get_num_threads()
    has_peer = importlib.util.find_spec("transformers") is not None
    print(f"{device}, {threads} threads, torch {torch.__version__}; microseconds, median")
    print(f"{'':50} {'ours':>9} {'transformers':>13}")
    say = lambda name, ours, theirs: print(f"{name:50} {ours:>9.0f} {theirs:>13}")
    for B in (1, 16):
        logits = torch.randn(B, K + 1, V, generator=rng).mul(3).to(device)
        guess = torch.randn(B, K, V, generator=rng).mul(3).to(device)
        ids = guess.softmax(-1).flatten(0, 1).multinomial(1).view(B, K)

        def ours(logits: Tensor = logits, guess: Tensor = guess, ids: Tensor = ids) -> Tensor:
            u = torch.rand(ids.shape, device=ids.device)
            return accept(logits.softmax(-1), guess.softmax(-1), ids, u)[1].multinomial(1)

        theirs = "one row only"
        if has_peer and B == 1:
            from transformers.generation.utils import _speculative_sampling as peer

            theirs = f"{_microseconds(partial(peer, ids, guess, K, logits)):.0f}"
        name = f"softmax, accept, draw: {B} x {K} drafts, {V} tokens"
        say(name, _microseconds(ours), theirs if has_peer else "-")
    words = random.Random(0)
    for length in (1024, 32_768):
        text = [words.randrange(2000) for _ in range(length)]
        text += text[length // 2 : length // 2 + 3]
        copy, theirs = NGram(), "-"
        if has_peer:
            from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

            lookup = PromptLookupCandidateGenerator(
                num_output_tokens=8, max_matching_ngram_size=4, max_length=2 * length
            )
            ids = torch.tensor([text])
            theirs = f"{_microseconds(lambda: lookup.get_candidates(ids)):.0f}"
        say(f"NGram, 8 of {length} tokens", _microseconds(lambda: copy(text, 8)), theirs)
    for R in (1, 64):
        policy, rows = Goodput(8), list(range(R))
        for n in (R, 2 * R, 8 * R):
            policy.observe(rows, [1] * R, [1] * R, n, 1 + n / 100)
        say(f"Goodput, {R} rows, k up to 8", _microseconds(lambda: policy._best(rows)), "-")
    if not has_peer:
        print("transformers is not installed here: its column is empty")


if __name__ == "__main__":
    with torch.inference_mode():
        check()
        benchmark("cuda" if torch.cuda.is_available() else "cpu")
