"""Speculative decoding of one prompt: the steps of generate.py's Decoder that draft and verify.

speculative.py has drafters and acceptance rules (for trees: generation/draft_trees.py); it knows
neither generation/sampling.py's settings nor a KV cache. This file connects them with both:

    RejectionSampler   samples drafts and verifies them, with a Sampler's distributions and noise
    Speculator         a Decoder's draft-verify steps: propose, forward, accept or reject, roll back
    TreeSpeculator     the same for drafts that are a tree

generation/drafters.py makes them from flags, generation/speculation_length.py chooses how many
tokens are drafted, and serving/paged_drafting.py has the Engine's steps.

Verification uses the distributions that the model would sample from without drafts:
Sampler.expand_for_drafts gives the rows' state after each draft, including penalty counts and
positions. With deterministic drafts (q is None) the sampled text is exactly the one that the seed
gives without drafts; drafts sampled from a distribution q use independent noise, and the text has
the same distribution only.

When it loses: a step that verifies K drafts reads the weights once, as a step of one token does,
but computes K + 1 tokens: with many rows or rejected drafts it is slower.

Equivalence (test_all.py): greedy text == greedy text without drafts, for every drafter and cache;
sampled text has the same distribution, by chi-square over whole continuations. Needs:
speculative.py, generation/draft_trees.py, generation/sampling.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from generation.draft_trees import Tree, accept_tree, match_tree, tree_attend
from generation.sampling import Sampler, sample
from speculative import Proposal, accept, count_matches

# --------------------------------------------------------------------------------------------------
# Sampling and verifying drafts
# --------------------------------------------------------------------------------------------------


class RejectionSampler:
    """Samples and verifies drafts with the settings, distributions and noise of a Sampler's rows.

    coupled: sample drafts with the noise that the target's token will use, and verify them as
    deterministic proposals. Similar distributions then mostly give the same token, and the text is
    the one that the seed gives without drafts (a coupling; arXiv:2408.07978). By default, rejection
    sampling (Leviathan et al.), which has the highest possible acceptance rate.
    forced_acceptance: skip verification and accept each draft with this probability, to measure
    speed.
    """

    def __init__(
        self, sampler: Sampler, coupled: bool = False, forced_acceptance: float | None = None
    ):
        self.sampler, self.coupled, self.forced_acceptance = sampler, coupled, forced_acceptance

    def sample_draft(
        self, logits: Tensor, rows: Sequence[int] | None, i: int
    ) -> tuple[Tensor, Tensor | None]:
        """A drafter's logits (R, V) for the i-th draft of the rows -> ids (R,), q (R, V) or None.
        Penalties ignore earlier drafts of the step: this changes q, but verification is exact for
        any q."""
        expanded = self._advanced_copy(logits.shape[0], rows, i)
        if "noise" not in expanded.features:
            return expanded.process(logits).argmax(-1), None
        q = expanded.probabilities(logits)
        if self.coupled:
            return sample(q, expanded.noise()).clamp(min=0), None
        return sample(q, expanded.draft_noise()).clamp(min=0), q

    def sample_children(self, logits: Tensor, m: int, i: int) -> tuple[Tensor, Tensor | None]:
        """logits (B, W, V) after W nodes of every row, at depth i -> m children of each, and q: the
        top m and None, or m sampled without replacement from q (B, W, V), and q."""
        B, W, V = logits.shape
        expanded = self._advanced_copy(B * W, [row for row in range(B) for _ in range(W)], i)
        x = logits.flatten(0, 1)
        if "noise" not in expanded.features:
            return expanded.process(x).topk(m).indices.view(B, W, m), None
        q = expanded.probabilities(x)
        noise = expanded.noise() if self.coupled else expanded.draft_noise()
        ids = (q / noise.clamp(min=1e-30)).topk(m).indices.view(B, W, m)  # Gumbel top-m
        return ids, None if self.coupled else q.view(B, W, V)

    def verify(
        self,
        logits: Tensor,
        tokens: Tensor,
        probs: Tensor | None,
        lengths: Tensor,
        rows: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """logits (R, K + 1, V) of rows with lengths (R,) drafts, tokens (R, K) sampled from probs
        (R, K, V) -> out (R, K + 1) and the number of accepted drafts n (R,). out[:, : n + 1], the
        rows' new tokens, are recorded; -1 where a row cannot be sampled."""
        R, K = tokens.shape
        chain = Tree.chain(K)
        expanded = self.sampler.expand_for_drafts(tokens, chain.mask.to(tokens.device), rows)
        flat = logits.flatten(0, 1)
        if self.forced_acceptance is not None:
            out = expanded(flat).view(R, K + 1)
            accepted = F.pad(self._uniform(expanded, chain, R) < self.forced_acceptance, (0, 1))
            n = count_matches(accepted, torch.ones_like(tokens, dtype=torch.bool), lengths)
            kept = torch.arange(K, device=out.device) < n[:, None]
            out[:, :-1] = torch.where(kept, tokens, out[:, :-1])
        elif probs is None or "noise" not in expanded.features:
            out = expanded(flat).view(R, K + 1)
            n = count_matches(out, tokens, lengths)
        else:
            p = expanded.probabilities(flat).view(R, K + 1, -1)
            n, residual = accept(p, probs, tokens, self._uniform(expanded, chain, R), lengths)
            out = self._set_last(tokens, residual, n, rows)
        self.sampler.record_run(out, n + 1, rows)
        return out, n

    def verify_tree(
        self, logits: Tensor, tokens: Tensor, probs: Tensor | None, tree: Tree
    ) -> tuple[Tensor, Tensor, Tensor]:
        """logits (B, N + 1, V) after the root and each node; tokens (B, N) of the nodes, sampled
        from probs (B, N + 1, V) -> out (B, depth + 1), n (B,) as in verify; path (B, depth)."""
        B, N = tokens.shape
        expanded = self.sampler.expand_for_drafts(tokens, tree.mask.to(tokens.device))
        flat = logits.flatten(0, 1)
        if probs is None or "noise" not in expanded.features:
            sampled = expanded(flat).view(B, N + 1)
            path, n = match_tree(sampled, tokens, tree)
            out = sampled.gather(1, torch.cat((path[:, :1] * 0, path.clamp(min=0) + 1), 1))
        else:
            p = expanded.probabilities(flat).view(B, N + 1, -1)
            uniform = self._uniform(expanded, tree, B)
            path, n, residual = accept_tree(p, probs, tokens, uniform, tree)
            out = self._set_last(tokens.gather(1, path.clamp(min=0)), residual, n, None)
        self.sampler.record_run(out, n + 1)
        return out, n, path

    def _advanced_copy(self, R: int, rows: Sequence[int] | None, i: int | Tensor) -> Sampler:
        """A Sampler of the R rows with positions advanced by i tokens."""
        device = self.sampler.seed.device
        expanded = self.sampler.expand_for_drafts(
            torch.zeros(R, 0, dtype=torch.long, device=device),
            torch.ones(1, 1, dtype=torch.bool, device=device),
            rows,
        )
        expanded.position += i
        if isinstance(i, int) and i:  # the drafts before, and so the grammar's state, are unknown
            expanded.features -= {"grammar"}
        return expanded

    def _uniform(self, expanded: Sampler, tree: Tree, R: int) -> Tensor:
        """(R, N) uniform numbers in [0, 1), to accept or reject each node: a function of the seed,
        the position of its parent and its own index, since siblings share a position."""
        N, device = len(tree.parents), expanded.seed.device
        parents = torch.tensor(tree.parents, dtype=torch.long, device=device) + 1
        part = copy.copy(expanded)
        part.seed, part.position = (
            t.view(R, N + 1)[:, parents].reshape(-1, 1) for t in (expanded.seed, expanded.position)
        )
        return part.uniform(torch.arange(N, device=device).repeat(R)).view(R, N)

    def _set_last(
        self, tokens: Tensor, residual: Tensor, n: Tensor, rows: Sequence[int] | None
    ) -> Tensor:
        """tokens (R, K) -> (R, K + 1), with a sample of residual (R, V) at index n (R,)."""
        last = sample(residual, self._advanced_copy(len(n), rows, n[:, None]).noise())
        return torch.cat((tokens, last[:, None]), 1).scatter(1, n[:, None], last[:, None])


# --------------------------------------------------------------------------------------------------
# Draft-verify steps
# --------------------------------------------------------------------------------------------------


@dataclass
class AcceptanceStats:
    """Counts of proposed and accepted drafts."""

    proposed: list[int] = field(default_factory=list)  # by position in the draft
    accepted: list[int] = field(default_factory=list)
    verified: int = 0  # verification steps, counted per row
    tokens: int = 0  # tokens from those steps

    def update(self, num_proposed: int, num_accepted: int) -> None:
        """Count one row's step."""
        if num_proposed:
            self.verified, self.tokens = self.verified + 1, self.tokens + num_accepted + 1
            more = [0] * (num_proposed - len(self.proposed))
            self.proposed, self.accepted = self.proposed + more, self.accepted + more
            for i in range(num_proposed):
                self.proposed[i] += 1
                self.accepted[i] += i < num_accepted

    def summary(self) -> dict[str, Any]:
        """The counts, under the keys that --json prints."""
        rates = [round(a / p, 3) for a, p in zip(self.accepted, self.proposed)]
        mean = self.tokens / self.verified if self.verified else None
        return {
            "verifications": self.verified,
            "tokens_per_verification": None if mean is None else round(mean, 3),
            "acceptance": rates,
        }


class Speculator:
    """The steps of a Decoder with speculative decoding. Rows accept different numbers of tokens, so
    each has its own positions; a step runs the last token and the drafts of every row, and cache
    entries of rejected drafts are overwritten when their positions are used again.

    new_policy: makes a policy of speculation_length.py; lookahead_slots: cache slots at the end
    that only drafts use; compile_fn: compiles or captures a function of static shapes;
    draft_ahead: the DraftModel drafts on before the drafts of the only row are verified."""

    def __init__(
        self,
        decoder: Any,
        drafter: Any,
        new_policy: Callable[[], Any],
        rejection_sampler: RejectionSampler,
        lookahead_slots: int,
        compile_fn: Callable[[Callable], Callable] | None = None,
        draft_ahead: bool = False,
    ):
        self.decoder, self.drafter, self.rejection_sampler = decoder, drafter, rejection_sampler
        self.lookahead_slots, self.draft_ahead = lookahead_slots, draft_ahead
        self.new_policy = new_policy
        self.contexts: list[list[int]] = []
        self.rows = list(range(decoder.batch))
        self.drafter_is_free = getattr(drafter, "is_free", False)
        self.forward = self._forward if compile_fn is None else compile_fn(self._forward)
        self.reset()

    def warm_up(self, max_drafts: int) -> None:
        """Compile or capture all shapes in advance, so that the policy's measured step times do not
        include it. The first prompt overwrites what this writes to the caches."""
        decoder, B = self.decoder, len(self.rows)
        runner = getattr(self.drafter, "runner", None)
        for K in (0, *(1 << i for i in range((max_drafts - 1).bit_length() + 1))):
            tokens = torch.zeros(B, K + 1, dtype=torch.long, device=decoder.token.device)
            positions = torch.arange(K + 1, device=tokens.device).expand(B, -1).contiguous()
            hidden, _ = self.forward(tokens, positions)
            if K < 2 and getattr(runner, "static_forward", None) is not None:
                hidden = hidden.clone() if runner.needs_hidden else None
                runner.static_forward(tokens, positions, hidden)

    # ---- called by the Decoder ----

    def reset(self) -> None:
        """Discard the measurements."""
        self.policy, self.stats = self.new_policy(), AcceptanceStats()

    def summary(self) -> dict[str, Any]:
        """The counts, under the keys that --json prints."""
        return self.stats.summary()

    def observe(self, start: int, hidden: Tensor) -> None:
        """Pass the drafter the prompt's hidden states (1, t, C) from position `start` on, which all
        rows share."""
        if hasattr(self.drafter, "observe"):
            for row in self.rows:
                self.drafter.observe(row, start, hidden[0])

    def start(self, ids: Sequence[int], first: list[int]) -> None:
        """After prefill: the prompt's ids and the first token of every row."""
        self.contexts = [[*ids, token] for token in first]

    def next(self) -> list[list[int]]:
        """The next tokens of every row, one or more."""
        begin = time.perf_counter()
        empty: list[Proposal] = [([], None)] * len(self.rows)
        k = max(self.policy.choose(self.rows))
        n_drafts = k or int(self.drafter_is_free)  # if k = 0, compared but not verified
        proposals = self._propose(n_drafts) if n_drafts else empty
        lengths = [len(tokens) for tokens, _ in proposals]
        draft_seconds = time.perf_counter() - begin
        out, n = self._verify(proposals if k else empty, k)
        runs, num_tokens = self._append(out, n), len(self.rows)
        if k:
            num_tokens *= 1 + max(lengths)
            for num_proposed, num_accepted in zip(lengths, n):
                self.stats.update(num_proposed, num_accepted)
        else:
            n = [int(draft[:1] == run) for (draft, _), run in zip(proposals, runs)]
        seconds = time.perf_counter() - begin
        self.policy.observe(self.rows, lengths, n, num_tokens, seconds, draft_seconds)
        return runs

    def _append(self, out: list[list[int]], n: list[int]) -> list[list[int]]:
        """Append the new tokens of every row. A row whose cache is full before the others' stops
        growing; its output is ignored from then on."""
        runs = [run[: accepted + 1] for run, accepted in zip(out, n)]
        for context, run in zip(self.contexts, runs):
            context += run[: self.decoder.cache.max_len - self.lookahead_slots - len(context)]
        return runs

    # ---- one step ----

    def _propose(self, k: int) -> list[Proposal]:
        if hasattr(self.drafter, "propose_batch"):
            return self.drafter.propose_batch(self.rows, self.contexts, [k] * len(self.rows))
        return [self.drafter(context, k) for context in self.contexts]

    def _verify(self, proposals: list[Proposal], k: int = 0) -> tuple[list[list[int]], list[int]]:
        """-> each row's sampled tokens, and the number of its drafts that were accepted. k: drafts
        that were requested."""
        d, device = self.decoder, self.decoder.token.device
        K = max(len(tokens) for tokens, _ in proposals)
        if d.compiled and K:
            K = 1 << (K - 1).bit_length()  # pad to a power of two: fewer shapes to compile
        last = torch.tensor([[c[-1]] for c in self.contexts], device=device)
        positions = torch.tensor([[len(c) - 1] for c in self.contexts], device=device)
        if K == 0:
            hidden, logits = self.forward(last, positions)
            out = self.rejection_sampler.sampler(logits[:, 0])[:, None]
            n = [0] * len(self.rows)
        else:
            tokens, lengths, probs = pad_drafts(proposals, K, device)
            positions = positions + torch.arange(K + 1, device=device)
            hidden, logits = self.forward(torch.cat((last, tokens), 1), positions)
            if self.draft_ahead:  # before the verification is waited for
                self.drafter.draft_ahead(0, self.contexts[0], proposals[0][0], k + 1)
            out, n = self.rejection_sampler.verify(logits, tokens, probs, lengths)
            n = n.tolist()
        d.store_step(logits, out)
        self._observe(hidden, n)
        return out.tolist(), n

    def _observe(self, hidden: Tensor, n: list[int]) -> None:
        """Pass the drafter the hidden states (B, K + 1, C) of accepted tokens, and truncate the
        cache."""
        ends = [len(c) + accepted for c, accepted in zip(self.contexts, n)]
        self.decoder.cache.truncate(max(ends))
        self.decoder.num_cached = max(ends)
        if hasattr(self.drafter, "observe"):
            for row, context, accepted in zip(self.rows, self.contexts, n):
                self.drafter.observe(row, len(context) - 1, hidden[row, : accepted + 1])

    def _forward(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        d = self.decoder
        limit = None if d.compiled else max(map(len, self.contexts)) + tokens.shape[1] - 1
        positions = positions[0] if len(positions) == 1 else positions
        hidden = d.model(tokens, positions, d.attention(d.cache, limit), return_hidden=True)
        return hidden, d.model.head(hidden)


def pad_drafts(
    proposals: Sequence[Proposal], K: int, device: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Proposals padded to K: tokens (R, K), lengths (R,), and q (R, K, V), None if none has a q."""
    tokens = torch.tensor([t + [0] * (K - len(t)) for t, _ in proposals], device=device)
    tokens = tokens.view(len(proposals), K).long()  # also for K = 0
    lengths = torch.tensor([len(t) for t, _ in proposals], device=device)
    first_q = next((q for _, q in proposals if q is not None), None)
    if first_q is None:
        return tokens, lengths, None
    probs = first_q.new_zeros(len(proposals), K, first_q.shape[-1])
    for r, (t, q) in enumerate(proposals):
        if q is not None:
            probs[r, : len(t)] = q
        else:
            probs[r, torch.arange(len(t)), t] = 1.0
    return tokens, lengths, probs


class TreeSpeculator(Speculator):
    """Steps whose drafts are a tree: the cache entries of the accepted path are moved to
    consecutive slots if they are not there already."""

    def next(self) -> list[list[int]]:
        begin = time.perf_counter()
        tree = self.policy.choose_tree(self.rows)
        tokens, probs = None, None
        if tree.parents:
            tokens, probs = self.drafter.propose_tree(self.rows, self.contexts, tree)
        draft_seconds = time.perf_counter() - begin
        out, paths = self._verify_tree(tokens, probs, tree)
        for path in paths:
            self.stats.update(tree.depth, len(path))
        runs = self._append(out, list(map(len, paths)))
        seconds = time.perf_counter() - begin
        self.policy.observe_tree(self.rows, tree, paths, seconds, draft_seconds)
        return runs

    def _verify_tree(
        self, tokens: Tensor | None, probs: Tensor | None, tree: Tree
    ) -> tuple[list[list[int]], list[list[int]]]:
        """-> each row's sampled tokens, and the nodes of its accepted path."""
        d = self.decoder
        if tokens is None:
            return self._verify([([], None)] * len(self.rows))[0], [[] for _ in self.rows]
        device = d.token.device
        last = torch.tensor([[c[-1]] for c in self.contexts], device=device)
        base = torch.tensor([len(c) - 1 for c in self.contexts], device=device)
        depths = torch.tensor((0, *tree.depths), device=device)
        nodes = torch.arange(len(depths), device=device)
        limit = max(map(len, self.contexts)) + len(tree.parents)
        attend = tree_attend(d.cache, tree, base, nodes, limit)
        hidden = d.model(
            torch.cat((last, tokens), 1), base[:, None] + depths, attend, return_hidden=True
        )
        logits = d.model.head(hidden)
        out, n, path = self.rejection_sampler.verify_tree(logits, tokens, probs, tree)
        slot_offsets = torch.cat((path[:, :1] * 0, path.clamp(min=0) + 1), 1)
        index = slot_offsets[..., None].expand(-1, -1, logits.shape[-1])
        d.store_step(logits.gather(1, index), out)
        n = n.tolist()
        paths = [path[:accepted] for path, accepted in zip(path.tolist(), n)]
        if any(path != list(range(len(path))) for path in paths):
            d.cache.move(
                base[:, None] + slot_offsets[:, 1:],
                base[:, None] + 1 + torch.arange(tree.depth, device=device),
            )
        self._observe(hidden, n)
        return out.tolist(), paths
