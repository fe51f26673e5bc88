"""Speculative decoding: drafters and lossless verification.

A decode step reads every weight to make one token, and could run several tokens in nearly the same
time. So a cheap *drafter* proposes the next k tokens, the model runs all of them in one forward, as
in prefill, and rejection sampling accepts a prefix such that the output keeps exactly the model's
distribution (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318). Rejected drafts
are removed by truncating the KV cache. Two parts:

    verification  draft d is accepted with probability min(1, p(d) / q(d)); the first rejected one
                  is replaced by a sample of norm(max(p - q, 0)), and if all are accepted one more
                  token is sampled from p. p and q are target and draft distributions after
                  temperature, top-k, top-p and penalties; with greedy decoding each is one token.
    drafters      n-gram lookup in the context (LLMA, arXiv:2304.04487), a smaller model, the first
                  layers of the target, multi-token prediction (DeepSeek-V3, arXiv:2412.19437, 2.2),
                  or a trained head (EAGLE, arXiv:2401.15077).

generation/speculation_length.py chooses how many drafts a step has, generation/draft_trees.py has
several continuations in one forward.

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
`propose_batch` and run their model through a DraftRunner. Equivalence (test_all.py): greedy output
== plain decoding's for every drafter and cache; sampled output against the exact distribution by
chi-square, which wrong rules fail. Needs: torch; `python speculative.py` checks itself and prints
what verification and drafting cost.

Shapes: B rows, K drafts, V vocabulary, C model width.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence
from functools import partial
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
        self, rows: Sequence[Row], contexts: Sequence[list[int]], ks: Sequence[int], first: int = 0
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
