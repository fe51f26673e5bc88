"""The parts of generate.py's Decoder that flags choose: attention, KV cache, settings, drafts."""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from generation.config import GenerateConfig
from generation.early_exit import build_early_exit
from generation.kv_eviction import build_cache
from generation.load import load_draft
from generation.ranks import Rank0Policy
from huggingface.tokenizer import Tokenizer
from model import Attend, KVCache, Transformer
from paged_kv import SamplingParams

AttendFactory = Callable[[KVCache, int | None], Attend]  # (cache, limit of slots to read) -> attend


def sdpa(cache: KVCache, limit: int | None) -> Attend:
    """An attend function: torch's scaled_dot_product_attention over the first `limit` slots."""
    return partial(cache.attend, limit=limit)


def pick_attention(name: str, fixed_max: float | None = None) -> AttendFactory:
    """sdpa, or flash: attention.py's kernels over the same cache slots."""
    if name == "sdpa":
        return sdpa
    from attention import as_attend

    return lambda cache, limit: as_attend(cache, limit=limit, fixed_max=fixed_max)


def check_logprobs(args: GenerateConfig, vocab_size: int) -> None:
    """ValueError if --logprobs asks for more tokens than there are."""
    if args.logprobs is not None and args.logprobs > vocab_size:
        raise ValueError(
            f"--logprobs must be at most the vocabulary size {vocab_size}, not {args.logprobs}"
        )


def sampling_params(
    args: GenerateConfig, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]
) -> SamplingParams:
    """The SamplingParams of the flags, with the grammar compiled. ValueError names the flag."""
    check_logprobs(args, vocab_size)
    if args.grammar is None:
        return args.sampling_params
    from generation.structured import Vocabulary

    grammar = Vocabulary.of(tokenizer, vocab_size, eos).grammar(args.grammar)
    return replace(args.sampling_params, grammar=grammar)


def reserve_lookahead_(args: GenerateConfig, model: Transformer) -> int:
    """Cache slots that only drafts use. With drafts, verification uses absorbed MLA as decode steps
    do."""
    if not args.speculate and args.grammar is None:
        return 0
    from generation import drafters

    drafters.raise_mla_absorb_limit_(args, model)
    return drafters.lookahead_slots(args)


# --------------------------------------------------------------------------------------------------
# Attention and KV cache
# --------------------------------------------------------------------------------------------------


def attention_and_cache(
    args: GenerateConfig, model: Transformer, max_len: int, lookahead: int
) -> tuple[AttendFactory, Any]:
    """--attention, and the cache that it reads, of max_len slots per row and `lookahead` for
    drafts. ValueError names the flag."""
    attention, rows = pick_attention(args.attention, args.fixed_max), args.n
    if args.shard_batch and args.mesh is not None:
        attention, rows = shard_batch_attention(attention, args.mesh, rows)
    if args.is_on("cp"):
        from parallelism.context_parallel_decode import slots_per_rank

        attention, max_len = lambda cache, limit: cache.attend, slots_per_rank(max_len, args.cp)
    # ring buffers for layers with sliding windows, where every step attends through KVCache.attend
    # and none goes back further than the rejected drafts
    whole = args.interactive or args.kv_store is not None  # their KV may be kept
    ring = attention is sdpa and not whole and args.speculate not in ("tree", "staged")
    cache = budgeted_cache(args, model, rows, max_len, 0 if ring else None)
    if cache is None:
        first, rollback = next(model.parameters()), lookahead if ring else None
        sizes = rows, max_len + lookahead
        cache = KVCache(model.config, *sizes, first.dtype, first.device, rollback)
    return attention, cache


def shard_batch_attention(
    attention: AttendFactory, mesh: Any, rows: int
) -> tuple[AttendFactory, int]:
    """shard_batch: a rank computes attention with all heads for the rows that it caches, of which
    it returns the number. A prompt is one row: every rank prefills it for its own heads, and stores
    its keys in all its rows."""
    from parallelism.inference_parallel import batch_sharded_attend

    group, ranks = mesh.group("tp"), mesh.size("tp")
    if rows % ranks:
        raise ValueError(f"--set shard_batch: --n {rows} must be a multiple of --tp {ranks}")

    def make_attend(cache: KVCache, limit: int | None) -> Attend:
        plain = attention(cache, limit)
        sharded = batch_sharded_attend(plain, group)
        return lambda spec, q, *rest: (sharded if len(q) > 1 else plain)(spec, q, *rest)

    return make_attend, rows // ranks


def budgeted_cache(
    args: GenerateConfig, model: Transformer, rows: int, max_len: int, rollback: int | None
) -> Any:
    """The cache of --kv-budget, if less than everything. ValueError names the flag."""
    if args.kv_budget is None:
        return None
    windowed, windows, first = None, model.config.windows, model.embed.weight
    if any(windows):  # their KVCache has no slots for the other layers
        windowed = KVCache(model.config, rows, max_len, first.dtype, "meta", rollback)
        windowed.end = torch.zeros_like(windowed.end, device=first.device)
        for x in (windowed.k, windowed.v):
            x[:] = [t[:, :, : None if w else 0] for t, w in zip(x, windows)]
            x[:] = [torch.zeros_like(t, device=first.device) for t in x]
    return build_cache(args.kv_policy, args.kv_budget, model, rows, max_len, windowed)


def shard_kv_cache_(decoder: Any) -> None:
    """--cp: the decoder's cache is this rank's part of one that is sharded over all ranks."""
    from parallelism.context_parallel_decode import KVParallelCache, KVParallelModel

    decoder.cache = KVParallelCache(decoder.cache)
    try:
        decoder.model = KVParallelModel(decoder.model, decoder.cache)
    except ValueError as e:
        raise ValueError(f"--cp: {e}") from None


# --------------------------------------------------------------------------------------------------
# Steps
# --------------------------------------------------------------------------------------------------


def set_speculator_(
    args: GenerateConfig, decoder: Any, tokenizer: Tokenizer, lookahead: int
) -> None:
    """Set what runs the decoder's steps with --early-exit, --speculate or a grammar. ValueError
    names the flag."""
    if args.early_exit is not None:
        decoder.speculator = build_early_exit(args, decoder, tokenizer)
        return
    if not lookahead:
        return
    from generation import drafters

    if args.speculate:
        load_fn = partial(load_draft, args, decoder.token.device)
        speculator = drafters.build_speculator(args, decoder, tokenizer, load_fn)
        if dist.is_initialized() and args.speculate_k == "auto":
            speculator.new_policy = lambda new=speculator.new_policy: Rank0Policy(new())
            speculator.reset()
        decoder.speculator = speculator
    if args.grammar is not None:
        drafters.jump_forced_tokens(decoder, lookahead)


class RunAhead:
    """A compiled step on a GPU, launched before the tokens of the step before it are read, so that
    the GPU does not wait for the host. A step too many at the end writes a cache slot that nothing
    reads."""

    def __init__(self, step: Callable[[], Any], token: Tensor):
        """token: where step leaves its tokens, the input of the next."""
        self.step, self.token, self.launched, self.read = step, token, 0, 0
        options = dict(device="cpu", pin_memory=token.is_cuda)
        self.copies = [torch.empty_like(token, **options) for _ in range(2)]
        self.events = [torch.cuda.Event() for _ in range(2)] if token.is_cuda else []

    def launch(self) -> None:
        """Run a step on the GPU and copy its tokens to the host."""
        self.step()
        i, self.launched = self.launched % 2, self.launched + 1
        self.copies[i].copy_(self.token, non_blocking=True)
        if self.events:
            self.events[i].record()

    def next(self, has_slot: bool) -> list[list[int]]:
        """The tokens of the next step. has_slot: the cache has room for one step more."""
        if self.launched == self.read:
            self.launch()
        if has_slot:
            self.launch()
        i, self.read = self.read % 2, self.read + 1
        if self.events:
            self.events[i].synchronize()
        return self.copies[i].tolist()

    def reset(self) -> None:
        """Forget steps whose tokens were not read."""
        self.read = self.launched


def can_run_ahead(args: GenerateConfig, decoder: Any) -> bool:
    """Whether a step needs nothing from the host, and its KV is not kept for another prompt."""
    on_host = decoder.speculator is not None or decoder.broadcast is not None
    kept = args.interactive or args.kv_store is not None or args.logprobs is not None
    return args.compile and decoder.token.is_cuda and args.mesh is None and not on_host | kept
