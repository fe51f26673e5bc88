"""Speculative decoding in the Engine: drafts in paged caches, verified row by row.

generation/drafters.py builds the drafters and generation/speculation.py verifies their drafts; an
Engine takes both as callables. This file adds:

    PagedDraftRunner   runs a drafter's model over a paged cache, on the sequences' block tables
    RowVerifier        an Engine's verifier: a RejectionSampler over the rows of its RowSampler
    enable_speculative_decoding    both, as --speculate asks for them
    jump_forced_tokens             drafts the tokens that grammars force

Equivalence (test_all.py): greedy text == greedy text without drafts. Hooks: Engine.drafter,
Engine.verifier and Engine.speculate_k. Needs: generation/drafters.py, generation/speculation.py,
generation/structured.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from generation.config import GenerateConfig
from generation.drafters import build_drafter, check_rope_scaling, new_policy
from generation.sampling import RowSampler
from generation.speculation import RejectionSampler, pad_drafts
from generation.structured import ForcedPolicy, ForcedTokens
from huggingface.tokenizer import Tokenizer
from model import ModelConfig, Transformer
from paged_kv import Chunk, Engine, PagedKVCache, Sequence, Step
from speculative import DraftRunner, Proposal, common_prefix_length


class PagedDraftRunner(DraftRunner):
    """Runs a drafter's model over a paged cache. Rows are the Engine's sequences; their block
    tables, which have lookahead slots, also index this cache. After a preemption or a prefix-cache
    hit this cache has fewer valid entries of a sequence than the target's cache: drafts are then
    worse, but the output has the same distribution."""

    def __init__(self, forward: Callable[..., Tensor], cache: PagedKVCache, first_layer: int = 0):
        """first_layer: index of the model layer that is layer 0 of the cache."""
        super().__init__(forward, cache, cache.device)
        self.first_layer = first_layer
        self.tables: WeakKeyDictionary[Sequence, list[int]] = WeakKeyDictionary()

    def run(
        self,
        rows: list[Sequence],
        starts: list[int],
        tokens: list[list[int]],
        hidden: list[Tensor] | None,
    ) -> list[Tensor]:
        new = zip(rows, starts, tokens)
        step = self.cache.step([Chunk(t, s, r.block_table, ring=r.ring) for r, s, t in new if t])
        prev_hidden = None if hidden is None else torch.cat(hidden)[None]
        h = self._forward(step, step.tokens[None], prev_hidden)
        for row in rows:
            self.tables[row] = list(row.block_table)
        return list(h.split([len(t) for t in tokens]))

    def step(
        self, rows: list[Sequence], ids: Tensor, at: list[int], hidden: Tensor | None = None
    ) -> Tensor:
        """One more token of each row, as ContiguousRunner.step. A row with fewer drafts than the
        others has no slots for more: its position is clamped and its result is ignored."""
        size = self.cache.block_size
        clamped = [min(p, len(row.block_table) * size - 1) for row, p in zip(rows, at)]
        chunks = [Chunk([0], p, row.block_table, ring=row.ring) for row, p in zip(rows, clamped)]
        step = self.cache.step(chunks)
        return self._forward(step, ids[None], None if hidden is None else hidden[None])

    def num_valid(self, row: Any, n: int) -> int:
        num_blocks = common_prefix_length(self.tables.get(row, []), row.block_table)
        return min(n, num_blocks * self.cache.block_size)

    def _forward(self, step: Step, tokens: Tensor, hidden: Tensor | None) -> Tensor:
        def attend(spec: Any, *qkv_positions: Tensor) -> Tensor:
            cache_spec = spec
            if self.first_layer:
                cache_spec = replace(spec, index=spec.index - self.first_layer)
            return self.cache.attend(cache_spec, *qkv_positions, step=step)

        return self.forward(tokens, step.positions[None], attend, hidden)[0]


class RowVerifier:
    """Samples and verifies an Engine's drafts: a RejectionSampler over the rows of the Engine's
    RowSampler. Rows with the same features are verified together."""

    def __init__(
        self, row_sampler: RowSampler, coupled: bool = False, forced_acceptance: float | None = None
    ):
        self.row_sampler = row_sampler
        self.rejection_sampler = RejectionSampler(row_sampler.sampler, coupled, forced_acceptance)

    def sample_draft(self, logits: Tensor, sequences: list[Sequence], i: int) -> Any:
        """The i-th draft of each sequence, as RejectionSampler.sample_draft."""
        rows = self.row_sampler.assign_rows(sequences)
        return self.rejection_sampler.sample_draft(logits, rows, i)

    def __call__(
        self, logits: Tensor, sequences: list[Sequence], drafts: list[Proposal]
    ) -> list[list[int]]:
        """logits (M, V), all sequences concatenated, one row more than drafts for each -> the new
        tokens of each sequence."""
        rows, groups = self.row_sampler.assign_rows(sequences), {}
        first = [0, *accumulate(len(tokens) + 1 for tokens, _ in drafts)]
        for i, row in enumerate(rows):
            groups.setdefault(frozenset(self.row_sampler.sampler.row_features[row]), []).append(i)
            self.row_sampler.num_recorded[row] = -1  # restored if the step is interrupted
        runs: list[list[int]] = [[] for _ in rows]
        for group in groups.values():
            K = max(len(drafts[i][0]) for i in group)
            size = max(1, self.row_sampler.max_rows // (K + 1))
            for part in (group[j : j + size] for j in range(0, len(group), size)):
                tokens, lengths, probs = pad_drafts([drafts[i] for i in part], K, logits.device)
                first_row = torch.tensor([first[i] for i in part], device=logits.device)[:, None]
                at = torch.arange(K + 1, device=logits.device).expand(len(part), -1)
                padded = logits[first_row + torch.minimum(at, lengths[:, None])]
                part_rows = [rows[i] for i in part]
                out, n = self.rejection_sampler.verify(padded, tokens, probs, lengths, part_rows)
                for i, run, accepted in zip(part, out.tolist(), n.tolist()):
                    runs[i] = run[: accepted + 1]
        for seq, row, run in zip(sequences, rows, runs):
            self.row_sampler.num_recorded[row] = len(seq.tokens) - seq.n_prompt + len(run)
        return runs


def enable_speculative_decoding(
    args: GenerateConfig,
    engine: Engine,
    tokenizer: Tokenizer,
    load: Callable[[str], tuple[Transformer, Tokenizer]],
) -> None:
    """--speculate for an Engine with a RowSampler. ValueError names the flag."""
    model, blocks = engine.model, engine.allocator
    if args.speculate in ("tree", "staged"):
        raise ValueError(
            f"--speculate {args.speculate} cannot be combined with --batch or --bench-serving: it "
            "drafts for one prompt; use --speculate draft"
        )
    verifier = RowVerifier(engine.sampler, args.draft_coupled, args.forced_acceptance)
    sizes, weight = (len(blocks.refs), blocks.block_size), model.embed.weight
    kind = weight.dtype, weight.device, args.kv_cache_dtype

    def new_cache(config: ModelConfig) -> PagedKVCache:
        return PagedKVCache(config, *sizes, *kind)

    if args.speculate != "ngram":  # these drafters read the keys of all tokens
        engine.scheduler.max_blocks = None
    cache, make_runner = engine.cache, PagedDraftRunner
    if args.speculate == "mtp":
        cache = new_cache(SimpleNamespace(**vars(model.config) | {"n_layers": 1}))
        make_runner = partial(PagedDraftRunner, first_layer=model.config.n_layers)
    check_rope_scaling(model)
    engine.drafter = build_drafter(
        args, model, tokenizer, load, verifier.sample_draft, make_runner, cache, new_cache
    )
    engine.verifier = verifier
    engine.speculate_k = new_policy(args, engine.drafter)


def jump_forced_tokens(engine: Engine) -> None:
    """Make an Engine draft the tokens that grammars force, before those of --speculate."""
    if isinstance(engine.drafter, ForcedTokens):
        return
    policy = None if engine.drafter is None else engine.speculate_k
    if engine.drafter is None:
        engine.verifier = RowVerifier(engine.sampler)
    engine.drafter = ForcedTokens(engine.sampler.grammar_state, engine.drafter)
    engine.speculate_k = ForcedPolicy(engine.drafter, policy)
