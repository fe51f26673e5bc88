"""drafting.py: speculation in generate.py, from a prompt and in batches.

speculative.py knows drafts and rules, and neither sampling.py's contract nor a cache of ours. This
part of generate.py puts them together:

    Drawing      drafts drawn and verified by the rows of a Sampler: its distributions, its noise
    Speculator   the rounds of a Decoder: propose, run, verify, cut back, measured as they go
    speculator   that of a Decoder, as --speculate and --draft say

serving.py has the same for the Engine.

What a round draws from is what the model without drafts would draw from: Sampler.ahead gives the
rows as they would stand after each draft, counts and positions included. Proposals made for certain
leave the text that the seed gives without them; drafts drawn from a q of their own use noise of
their own, which nothing else hears.

Equivalence (test_all.py): greedy text == that without drafts, for every drafter and cache; sampled
text in distribution, by chi-square over whole continuations. Needs: speculative.py, sampling.py,
model.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from generation.sampling import Sampler, draw
from huggingface.tokenizer import Tokenizer
from model import KVCache, ModelConfig, Transformer
from speculative import (
    DraftHead,
    DraftModel,
    Contiguous,
    Fixed,
    Goodput,
    Heads,
    MTP,
    NGram,
    Proposal,
    Runner,
    Staged,
    Tree,
    TreeDrafts,
    TreeGoodput,
    accept,
    accept_tree,
    follow_tree,
    matching,
    tree_attend,
)

LONGEST = 8  # drafts in a row, where --speculate-k does not say
NODES = 12  # of a tree
# how often a draft model's choices are what is drawn, by rank, before anything was measured
RANKS = (0.6, 0.15, 0.07, 0.04)


# --------------------------------------------------------------------------------------------------
# Drawing
# --------------------------------------------------------------------------------------------------


class Drawing:
    """Drafts, drawn and verified by the rows of a Sampler.

    certain: draw drafts with the noise that the target's own token will be drawn with, and verify
    them as certain. Two near distributions then mostly draw the same token, and the text is what
    the seed gives without drafts (a coupling; arXiv:2408.07978). Otherwise by the rule of
    Leviathan et al., which keeps the most that can be kept.
    forced: verify nothing, and keep each draft with this probability: for measuring speed.
    """

    def __init__(self, sampler: Sampler, certain: bool = False, forced: float | None = None):
        self.sampler, self.certain, self.forced = sampler, certain, forced

    def draft(
        self, logits: Tensor, rows: Sequence[int] | None, i: int
    ) -> tuple[Tensor, Tensor | None]:
        """A drafter's logits (R, V) for the i-th draft of the rows -> ids (R,), q (R, V) or None.
        Counts of penalties are those at the last token that is certain: any q will do."""
        view = self._standing(logits.shape[0], rows, i)
        if "noise" not in view.features:
            return view.process(logits).argmax(-1), None
        q = view.probabilities(logits)
        if self.certain:
            return draw(q, view.noise()).clamp(min=0), None
        return draw(q, view.draft_noise()).clamp(min=0), q

    def children(self, logits: Tensor, m: int, i: int) -> tuple[Tensor, Tensor | None]:
        """logits (B, W, V) after W nodes of every row, at level i -> ids (B, W, m): the likeliest,
        or drawn without replacement, and then their q (B, W, V)."""
        B, W, V = logits.shape
        view = self._standing(B * W, [row for row in range(B) for _ in range(W)], i)
        x = logits.flatten(0, 1)
        if "noise" not in view.features:
            return view.process(x).topk(m).indices.view(B, W, m), None
        q = view.probabilities(x)
        noise = view.noise() if self.certain else view.draft_noise()
        ids = (q / noise.clamp(min=1e-30)).topk(m).indices.view(B, W, m)  # the race, m places of it
        return ids, None if self.certain else q.view(B, W, V)

    def verify(
        self,
        logits: Tensor,
        tokens: Tensor,
        probs: Tensor | None,
        lengths: Tensor,
        rows: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """logits (R, K + 1, V) of rows that have lengths (R,) drafts of tokens (R, K), drawn from
        probs (R, K, V) -> out (R, K + 1) and how many drafts were kept, n (R,): out[:n + 1] is
        recorded as the rows' new tokens. -1 where there is nothing to draw from."""
        R, K = tokens.shape
        run = Tree.chain(K)
        view = self.sampler.ahead(tokens, run.mask.to(tokens.device), rows)
        flat = logits.flatten(0, 1)
        if self.forced is not None:
            out = view(flat).view(R, K + 1)
            kept = F.pad(self._uniform(view, run, R) < self.forced, (0, 1))
            n = matching(kept, torch.ones_like(tokens, dtype=torch.bool), lengths)
            out[:, :-1] = torch.where(kept[:, :-1], tokens, out[:, :-1])
        elif probs is None or "noise" not in view.features:
            out = view(flat).view(R, K + 1)
            n = matching(out, tokens, lengths)
        else:
            p = view.probabilities(flat).view(R, K + 1, -1)
            n, rest = accept(p, probs, tokens, self._uniform(view, run, R), lengths)
            out = self._with_last(tokens, rest, n, rows)
        self.sampler.record_run(out, n + 1, rows)
        return out, n

    def verify_tree(
        self, logits: Tensor, tokens: Tensor, probs: Tensor | None, tree: Tree
    ) -> tuple[Tensor, Tensor, Tensor]:
        """logits (B, N + 1, V) after the root and each node; tokens (B, N) of the nodes, drawn from
        probs (B, N + 1, V) -> out (B, depth + 1) and n (B,) as verify, path (B, depth)."""
        B, N = tokens.shape
        view = self.sampler.ahead(tokens, tree.mask.to(tokens.device))
        flat = logits.flatten(0, 1)
        if probs is None or "noise" not in view.features:
            drawn = view(flat).view(B, N + 1)
            path, n = follow_tree(drawn, tokens, tree)
            out = drawn.gather(1, torch.cat((path[:, :1] * 0, path.clamp(min=0) + 1), 1))
        else:
            p = view.probabilities(flat).view(B, N + 1, -1)
            path, n, rest = accept_tree(p, probs, tokens, self._uniform(view, tree, B), tree)
            out = self._with_last(tokens.gather(1, path.clamp(min=0)), rest, n, None)
        self.sampler.record_run(out, n + 1)
        return out, n, path

    def _standing(self, R: int, rows: Sequence[int] | None, i: int | Tensor) -> Sampler:
        """The R rows, i tokens further."""
        device = self.sampler.seed.device
        view = self.sampler.ahead(
            torch.zeros(R, 0, dtype=torch.long, device=device),
            torch.ones(1, 1, dtype=torch.bool, device=device),
            rows,
        )
        view.position += i
        return view

    def _uniform(self, view: Sampler, tree: Tree, R: int) -> Tensor:
        """(R, N): what decides about each node, where its parent stands; a number for each, since
        siblings stand at one position."""
        N, device = len(tree.parents), view.seed.device
        above = torch.tensor(tree.parents, dtype=torch.long, device=device) + 1
        part = copy.copy(view)
        part.seed, part.position = (
            t.view(R, N + 1)[:, above].reshape(-1, 1) for t in (view.seed, view.position)
        )
        return part.uniform(torch.arange(N, device=device).repeat(R)).view(R, N)

    def _with_last(
        self, tokens: Tensor, rest: Tensor, n: Tensor, rows: Sequence[int] | None
    ) -> Tensor:
        """tokens (R, K), and at place n the one drawn from rest (R, V): (R, K + 1)."""
        last = draw(rest, self._standing(len(n), rows, n[:, None]).noise())
        return torch.cat((tokens, last[:, None]), 1).scatter(1, n[:, None], last[:, None])


# --------------------------------------------------------------------------------------------------
# Rounds
# --------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What became of drafts."""

    tried: list[int] = field(default_factory=list)  # at each place of a run
    kept: list[int] = field(default_factory=list)
    verified: int = 0  # steps of a row that had drafts
    tokens: int = 0  # that those gave

    def count(self, proposed: int, kept: int) -> None:
        """One row's step."""
        if proposed:
            self.verified, self.tokens = self.verified + 1, self.tokens + kept + 1
            more = [0] * (proposed - len(self.tried))
            self.tried, self.kept = self.tried + more, self.kept + more
            for i in range(proposed):
                self.tried[i] += 1
                self.kept[i] += i < kept

    def facts(self) -> dict[str, Any]:
        """Under the names that --json prints."""
        share = [round(k / t, 3) for k, t in zip(self.kept, self.tried)]
        mean = self.tokens / self.verified if self.verified else None
        return {
            "verifications": self.verified,
            "tokens_per_verification": None if mean is None else round(mean, 3),
            "acceptance": share,
        }


class Speculator:
    """The steps of a Decoder, with drafts. Its rows hold different numbers of tokens, so that each
    has positions of its own; a step runs the last token and the drafts of every row, and what was
    refused is overwritten when those positions come again.

    new_policy: Fixed or Goodput; spare: slots that the decoder's cache has for drafts, behind those
    of tokens; fast: makes a function of tensors fast, where shapes are static."""

    def __init__(
        self,
        decoder: Any,
        drafter: Any,
        new_policy: Callable[[], Any],
        drawing: Drawing,
        spare: int,
        fast: Callable[[Callable], Callable] | None = None,
    ):
        self.decoder, self.drafter, self.drawing = decoder, drafter, drawing
        self.spare = spare
        self.new_policy = new_policy
        self.contexts: list[list[int]] = []
        self.rows = list(range(decoder.batch))
        self.free = getattr(drafter, "free", False)
        self.forward = self._forward if fast is None else fast(self._forward)
        self.renew()

    def warm_up(self, longest: int) -> None:
        """Compile, or capture, all shapes that will come: who measures steps must not measure
        that. What is written to the caches is overwritten by the first prompt."""
        decoder, B = self.decoder, len(self.rows)
        run = getattr(self.drafter, "run", None)
        for K in (0, *(1 << i for i in range((longest - 1).bit_length() + 1))):
            tokens = torch.zeros(B, K + 1, dtype=torch.long, device=decoder.token.device)
            positions = torch.arange(K + 1, device=tokens.device).expand(B, -1).contiguous()
            hidden, _ = self.forward(tokens, positions)
            if K < 2 and getattr(run, "fast", None) is not None:
                run.fast(tokens, positions, hidden.clone() if run.reads_hidden else None)

    # ---- what the Decoder calls ----

    def renew(self) -> None:
        """Forget what was measured."""
        self.policy, self.tally = self.new_policy(), Tally()

    def observe(self, start: int, hidden: Tensor) -> None:
        """The prompt's hidden states (1, t, C) from position `start` on, which all rows share."""
        if hasattr(self.drafter, "observe"):
            for row in self.rows:
                self.drafter.observe(row, start, hidden[0])

    def start(self, ids: Sequence[int], first: list[int]) -> None:
        """The prompt was run, and gave every row its first token."""
        self.contexts = [[*ids, token] for token in first]

    def next(self) -> list[list[int]]:
        """The next tokens of every row, one or more."""
        begin = time.perf_counter()
        nothing: list[Proposal] = [([], None)] * len(self.rows)
        k = max(self.policy.choose(self.rows))
        ask = k or int(self.free)  # what a copy would have been costs nothing to know
        proposals = self._propose(ask) if ask else nothing
        lengths = [len(tokens) for tokens, _ in proposals]
        drafted = time.perf_counter() - begin
        out, n = self._verify(proposals if k else nothing)
        runs, tokens = self._append(out, n), len(self.rows)
        if k:
            tokens *= 1 + max(lengths)
            for proposed, kept in zip(lengths, n):
                self.tally.count(proposed, kept)
        else:
            n = [int(guess[:1] == run) for (guess, _), run in zip(proposals, runs)]
        seconds = time.perf_counter() - begin
        self.policy.observe(self.rows, lengths, n, tokens, seconds, drafted)
        return runs

    def _append(self, out: list[list[int]], n: list[int]) -> list[list[int]]:
        """Take the tokens of every row that are new. One that came to the end of its cache before
        the others did stands still; nobody hears it any more."""
        runs = [run[: kept + 1] for run, kept in zip(out, n)]
        for context, run in zip(self.contexts, runs):
            context += run[: self.decoder.cache.max_len - self.spare - len(context)]
        return runs

    # ---- a round ----

    def _propose(self, k: int) -> list[Proposal]:
        if hasattr(self.drafter, "many"):
            return self.drafter.many(self.rows, self.contexts, [k] * len(self.rows))
        return [self.drafter(context, k) for context in self.contexts]

    def _verify(self, proposals: list[Proposal]) -> tuple[list[list[int]], list[int]]:
        """-> drawn tokens of each row, and how many of its drafts were kept."""
        d, device = self.decoder, self.decoder.token.device
        K = max(len(tokens) for tokens, _ in proposals)
        if d.compiled and K:
            K = 1 << (K - 1).bit_length()  # few shapes
        last = torch.tensor([[c[-1]] for c in self.contexts], device=device)
        positions = torch.tensor([[len(c) - 1] for c in self.contexts], device=device)
        if K == 0:
            hidden, logits = self.forward(last, positions)
            out = self.drawing.sampler(logits[:, 0])[:, None]
            n = [0] * len(self.rows)
        else:
            tokens, lengths, probs = padded(proposals, K, device)
            positions = positions + torch.arange(K + 1, device=device)
            hidden, logits = self.forward(torch.cat((last, tokens), 1), positions)
            out, n = self.drawing.verify(logits, tokens, probs, lengths)
            n = n.tolist()
        d.keep(logits, out)
        self._observe(hidden, n)
        return out.tolist(), n

    def _observe(self, hidden: Tensor, n: list[int]) -> None:
        """Hand the drafter the hidden states (B, K + 1, C) of what was kept; forget the rest."""
        ends = [len(c) + kept for c, kept in zip(self.contexts, n)]
        self.decoder.cache.truncate(max(ends))
        self.decoder.used = max(ends)
        if hasattr(self.drafter, "observe"):
            for row, context, kept in zip(self.rows, self.contexts, n):
                self.drafter.observe(row, len(context) - 1, hidden[row, : kept + 1])

    def _forward(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        d = self.decoder
        limit = None if d.compiled else max(map(len, self.contexts)) + tokens.shape[1] - 1
        place = positions[0] if len(positions) == 1 else positions
        hidden = d.model(tokens, place, d.attention(d.cache, limit), return_hidden=True)
        return hidden, d.model.head(hidden)


def padded(
    proposals: Sequence[Proposal], K: int, device: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """tokens (R, K), lengths (R,), and q (R, K, V) if any was drawn."""
    tokens = torch.tensor([t + [0] * (K - len(t)) for t, _ in proposals], device=device)
    lengths = torch.tensor([len(t) for t, _ in proposals], device=device)
    drawn = next((q for _, q in proposals if q is not None), None)
    if drawn is None:
        return tokens.view(len(proposals), K).long(), lengths, None
    probs = drawn.new_zeros(len(proposals), K, drawn.shape[-1])
    for r, (t, q) in enumerate(proposals):
        if q is not None:
            probs[r, : len(t)] = q
        else:
            probs[r, torch.arange(len(t)), t] = 1.0
    return tokens.view(len(proposals), K).long(), lengths, probs


class TreeSpeculator(Speculator):
    """Rounds whose drafts are a tree: of all paths the one that is kept is moved to where a run
    would stand, if it is not there already."""

    def next(self) -> list[list[int]]:
        begin = time.perf_counter()
        tree = self.policy.choose_tree(self.rows)
        tokens, probs = None, None
        if tree.parents:
            tokens, probs = self.drafter.grow(self.rows, self.contexts, tree)
        drafted = time.perf_counter() - begin
        out, paths = self._verify_tree(tokens, probs, tree)
        for path in paths:
            self.tally.count(tree.depth, len(path))
        runs = self._append(out, list(map(len, paths)))
        seconds = time.perf_counter() - begin
        self.policy.observe_tree(self.rows, tree, paths, seconds, drafted)
        return runs

    def _verify_tree(
        self, tokens: Tensor | None, probs: Tensor | None, tree: Tree
    ) -> tuple[list[list[int]], list[list[int]]]:
        """-> drawn tokens and the nodes that were kept, of each row."""
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
        out, n, path = self.drawing.verify_tree(logits, tokens, probs, tree)
        at = torch.cat((path[:, :1] * 0, path.clamp(min=0) + 1), 1)
        d.keep(logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1])), out)
        n = n.tolist()
        paths = [nodes[:kept] for nodes, kept in zip(path.tolist(), n)]
        if any(nodes != list(range(len(nodes))) for nodes in paths):
            d.cache.move(
                base[:, None] + at[:, 1:],
                base[:, None] + 1 + torch.arange(tree.depth, device=device),
            )
        self._observe(hidden, n)
        return out.tolist(), paths


# --------------------------------------------------------------------------------------------------
# What the flags say
# --------------------------------------------------------------------------------------------------


def spare(args: argparse.Namespace) -> int:
    """Slots that a cache needs behind those of tokens: for drafts, also if their number is rounded
    up to a power of two, and one that takes what is padding."""
    return 1 + max(1 << (longest_run(args) - 1).bit_length(), NODES)


def longest_run(args: argparse.Namespace) -> int:
    """Drafts in a row, or nodes of a tree, that --speculate-k allows."""
    if args.speculate_k != "auto":
        return int(args.speculate_k)
    return NODES if args.speculate == "tree" else LONGEST


def prepare_(args: argparse.Namespace, model: Transformer) -> None:
    """Before a Decoder is built: a step that verifies decodes, so latent attention is absorbed in
    it."""
    for module in model.modules():
        if hasattr(module, "absorb_up_to"):
            module.absorb_up_to = max(module.absorb_up_to, spare(args))


def speculator(
    args: argparse.Namespace,
    decoder: Any,
    tokenizer: Tokenizer,
    load: Callable[[str], tuple[Transformer, Tokenizer]],
) -> Speculator:
    """--speculate for a Decoder. ValueError names the flag that is wrong."""
    model, device, longest = decoder.model, decoder.token.device, longest_run(args)
    check_target(model)
    if args.speculate == "staged" and decoder.batch > 1:
        raise ValueError("--speculate staged is for one row; with --n take draft")
    drawing = Drawing(decoder.sampler, args.draft_certain, args.draft_acceptance)

    def draw(logits: Tensor, rows: Sequence[int], i: int) -> tuple[Tensor, Tensor | None]:
        return drawing.draft(logits, None if len(rows) == decoder.batch else rows, i)

    def runner(forward: Callable[..., Tensor], cache: KVCache) -> Contiguous:
        fast = None
        if decoder.compiled:
            whole = lambda tokens, positions, hidden: forward(
                tokens, positions, cache.attend, hidden
            )
            fast = decoder.replayed(whole)
        return Contiguous(forward, cache, device, decoder.batch, fast)

    new_cache = lambda config: KVCache(
        config, decoder.batch, decoder.cache.max_len, decoder.cache.k[0].dtype, device
    )
    drafter = build_drafter(args, model, tokenizer, load, draw, runner, decoder.cache, new_cache)
    fast = decoder.replayed if decoder.compiled else None
    if args.speculate == "tree":
        sizes = [longest] if args.speculate_k != "auto" else [2, 4, 8, NODES]
        policy = partial(TreeGoodput, sizes, RANKS, args.speculate_k != "auto")
        trees = TreeDrafts(drafter, drawing.children)
        return TreeSpeculator(decoder, trees, policy, drawing, spare(args))
    policy = partial(Goodput, longest) if args.speculate_k == "auto" else partial(Fixed, longest)
    found = Speculator(decoder, drafter, policy, drawing, spare(args), fast)
    if decoder.compiled:
        found.warm_up(longest)
    return found


def check_target(model: Transformer) -> None:
    """ValueError: a model whose keys depend on how many tokens a call has."""
    scaling = model.config.rope_scaling or {}
    if scaling.get("rope_type") == "dynamic":
        raise ValueError(
            "--speculate: rope_scaling 'dynamic' turns keys by the length of a call, and drafts "
            "would change it; give config.json another rope_type"
        )


def build_drafter(
    args: argparse.Namespace,
    model: Transformer,
    tokenizer: Tokenizer,
    load: Callable[[str], tuple[Transformer, Tokenizer]],
    draw: Callable,
    runner: Callable[[Callable[..., Tensor], Any], Runner],
    cache: Any,
    new_cache: Callable[[ModelConfig], Any],
) -> Any:
    """The drafter of --speculate; `runner` runs a forward over a cache, `cache` is the target's."""
    kind = args.speculate
    if kind == "ngram":
        return NGram()
    if kind == "mtp":
        if not len(model.mtp):
            raise ValueError(
                f"--speculate mtp: {args.checkpoint} has no multi-token prediction "
                "(num_nextn_predict_layers in config.json); take ngram or draft"
            )
        return MTP(runner(_further(model), cache), model.head, draw)
    if kind == "exit":
        most = model.config.n_layers - 1
        if most < 1:
            raise ValueError("--speculate exit: the model has one layer, and needs two or more")
        layers = args.exit_layers or model.config.n_layers // 2
        if layers > most:
            raise ValueError(f"--exit-layers must be from 1 to {most}, not {layers}")
        early = first_layers(model, layers)
        return DraftModel(runner(_plain(early), cache), early.head, draw, shared=True)
    if kind == "head":
        if args.draft is None and args.dummy is not None:
            raise ValueError("--speculate head: random weights have none; give --draft DIR")
        head = load_head(args.draft or str(args.checkpoint), model)
        return Heads(head, model.embed, model.head, draw)
    name = args.draft or (_shipped(args.checkpoint) if args.dummy is None else None)
    if name is None:
        raise ValueError(
            f"--speculate {kind} needs --draft DIR, a smaller model of that vocabulary"
        )
    draft, theirs = load(name)
    check_vocabulary(f"--draft {name}", draft, theirs, model, tokenizer)
    run = runner(_plain(draft), new_cache(draft.config))
    if kind == "staged":
        return Staged(run, draft.head, NGram(), draw)
    return DraftModel(run, draft.head, draw)


def _plain(model: Transformer) -> Callable[..., Tensor]:
    return lambda tokens, positions, attend, hidden: model(
        tokens, positions, attend, return_hidden=True
    )


def _further(model: Transformer) -> Callable[..., Tensor]:
    return lambda tokens, positions, attend, hidden: model.predict_further(
        hidden, tokens, positions, attend
    )


def _shipped(checkpoint: Path) -> str | None:
    """The draft model that ships for the shipped model."""
    shipped = Path(__file__).resolve().parents[1] / "checkpoints"
    same = checkpoint.resolve() == shipped / "small"
    return str(shipped / "draft") if same else None


def first_layers(model: Transformer, n: int) -> Transformer:
    """The model without its layers from n on, sharing everything."""
    early = copy.copy(model)
    early._modules = dict(model._modules)
    early.layers = model.layers[:n]
    return early


def check_vocabulary(
    what: str, draft: Transformer, theirs: Tokenizer, model: Transformer, tokenizer: Tokenizer
) -> None:
    """ValueError where a draft's ids would mean something else."""
    a, b = draft.config.vocab_size, model.config.vocab_size
    if a != b:
        raise ValueError(
            f"{what}: its vocabulary has {a} tokens and the target's {b}; take a draft model of "
            "the target's family"
        )
    for i in range(tokenizer.vocab_size):
        mine, other = tokenizer.piece(i), theirs.piece(i)
        if mine != other:
            raise ValueError(
                f"{what}: its token {i} is {other!r} and the target's {mine!r}; take a draft model "
                "of the target's family"
            )


def load_head(folder: str, model: Transformer) -> DraftHead:
    """The head that train.py --train-draft-head wrote. ValueError names the file."""
    path = Path(folder) / "draft_head.safetensors"
    if not path.exists():
        raise ValueError(
            f"--speculate head: there is no {path}; train.py --train-draft-head makes one, and "
            "--draft DIR says where it is"
        )
    try:
        tensors = load_file(path)
    except Exception as e:
        raise ValueError(f"{path}: not a safetensors file ({e})") from None
    C, weight = model.config.dim, model.embed.weight
    up = tensors.get("up.weight")
    if up is None or up.shape[1] != 2 * C:
        found = "no draft head" if up is None else f"of a model {up.shape[1] // 2} wide"
        raise ValueError(f"{path}: {found}, and this model is {C} wide; train one for it")
    head = DraftHead(C, up.shape[0])
    wanted = {name: p.shape for name, p in head.state_dict().items()}
    if wanted != {name: t.shape for name, t in tensors.items()}:
        raise ValueError(f"{path}: other tensors than {', '.join(wanted)}, or of other shapes")
    head.load_state_dict(tensors)
    return head.to(weight.device, weight.dtype).eval()
