"""Draft trees: several continuations in one forward of the model.

A chain of drafts is lost after its first rejected one. A tree has alternatives for each next token:
all its nodes run in one forward, each attends to its ancestors only, and verification tries
siblings in turn on the residual of p (SpecInfer, arXiv:2305.09781). The output keeps the model's
distribution, as with a chain (speculative.py).

    Tree, best_tree   the tree with the most accepted tokens for given acceptance rates (Sequoia)
    accept_tree       rejection sampling along a tree; match_tree for deterministic drafts
    tree_attend       the model's attend callable for the nodes of a tree over a KV cache
    TreeDrafter       a draft model's tree, a level per forward, or more with a drafter of its own
                      (staged, arXiv:2308.04623)

When it loses: a node costs as much as a draft of a chain, and most are rejected; a chain is better
where the first choice is nearly always right. `generate.py --speculate tree` and `staged` use it.
Equivalence (test_all.py): a tree that is a chain == speculative.py's rule; sampled output against
the exact distribution by chi-square; logits of a tree == those of each path. Needs: torch;
`python generation/draft_trees.py` checks itself and prints what verification costs.

Shapes: B rows, N nodes of a tree, V vocabulary, C model width.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# --------------------------------------------------------------------------------------------------
# Trees, their verification and their attention
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
        residual = p.scatter(1, token, 0) if q is None else (p - q).clamp(min=0)
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


def run_nodes(
    runner: Any, tokens: Tensor, tree: Tree, base: Tensor, nodes: Tensor, limit: int
) -> Tensor:
    """Run nodes (T,) of a tree, tokens (B, T), by a ContiguousRunner -> (B, T, C)."""
    depths = torch.tensor((0, *tree.depths), device=runner.device)[nodes]
    attend = tree_attend(runner.cache, tree, base, nodes, limit)
    return runner.forward(tokens, base[:, None] + depths, attend, None)


# --------------------------------------------------------------------------------------------------
# Drafting a tree
# --------------------------------------------------------------------------------------------------


_tree = lru_cache(Tree)  # with its mask


class TreeDrafter:
    """A draft model's tree: its top tokens, or samples without replacement, one level per forward.

    With `inner`, such as NGram, drafting itself is speculative (staged, arXiv:2308.04623): a
    forward also runs inner's guess of what follows each node. A child that was guessed needs no
    forward of its own, so that a forward makes one level or more. One sequence at a time.

    model: speculative.py's DraftModel on a ContiguousRunner. inner: its NGram, or another function
    context, k -> tokens, probs. children(logits (B, W, V), m, i) -> ids (B, W, m) by rank, q
    (B, W, V) or None.
    """

    def __init__(
        self,
        model: Any,
        children: Callable[..., tuple[Tensor, Tensor | None]],
        inner: Callable[[list[int], int], Any] | None = None,
    ):
        self.model, self.children, self.inner = model, children, inner

    def propose_tree(
        self, rows: Sequence[Hashable], contexts: Sequence[list[int]], tree: Tree
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
    """The forwards of a draft model for one tree. Its cache holds the nodes that have children, and
    inner's guesses, at most 2 N entries in the order in which they were run: `parents` is the tree
    of these entries."""

    def __init__(
        self,
        model: Any,
        rows: Sequence[Hashable],
        contexts: Sequence[list[int]],
        tree: Tree,
        inner: Callable[[list[int], int], Any] | None,
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
            h = run_nodes(self.model.runner, ids, _tree(tuple(self.parents)), self.base, new, limit)
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


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def check(rows: int = 200_000) -> None:
    """Two siblings sampled without replacement: the accepted one, or a sample of the residual, has
    the distribution p, and with a sample of p in place of the residual's it has not."""
    rng, V, tree = torch.Generator().manual_seed(0), 6, Tree((-1, -1))
    p, q = torch.randn(2, V, generator=rng).softmax(-1)
    tokens = q.expand(rows, V).multinomial(2, generator=rng)
    target, draft = p.expand(rows, 3, V), q.expand(rows, 3, V)
    path, n, rest = accept_tree(target, draft, tokens, torch.rand(rows, 2, generator=rng), tree)
    for replacement in (rest, p.expand(rows, V)):
        other = replacement.multinomial(1, generator=rng)[:, 0]
        chosen = tokens.gather(1, path.clamp(min=0))[:, 0]
        counts = torch.where(n > 0, chosen, other).bincount(minlength=V)
        chi_square = ((counts - p * rows) ** 2 / (p * rows)).sum()
        assert (chi_square < 30) == (replacement is rest), chi_square  # 5 degrees of freedom


def main() -> None:
    """Microseconds that verifying trees of 4 and 12 nodes adds to a step."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    check()
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    V = 128_256
    for B, N in ((1, 4), (1, 12), (4, 4), (4, 12)):
        tree, (p, q) = (
            best_tree((0.6, 0.15, 0.07, 0.04), N),
            torch.randn(2, B, N + 1, V).softmax(-1),
        )
        tokens, uniform = q[:, 0].multinomial(N), torch.rand(B, N)
        timer = Timer("f(*args)", globals=dict(f=accept_tree, args=(p, q, tokens, uniform, tree)))
        took = 1e6 * timer.blocked_autorange().median
        print(f"accept_tree {B} x {N} of {V} tokens: {took:.0f} us")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
