"""Perplexity of a text (--perplexity of generate.py) in a sliding window of the model's context."""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from generation.sampling import logprobs_of
from huggingface.tokenizer import Tokenizer, logprob_entry
from model import KVCache, Transformer

Prefill = Callable[[Transformer, Tensor, KVCache], Iterator[tuple[int, Tensor]]]
"""generate.prefill_chunks"""


def perplexity(
    model: Transformer, tokenizer: Tokenizer, text: str, prefill: Prefill, top: int | None = None,
    new_cache: Callable[[int], Any] = lambda n: None,
) -> tuple[dict[str, float], list[dict[str, Any]]]:  # fmt: skip
    """Perplexity, nats per token and bits per byte of a text; with `top`, also every token's
    log-probabilities (logprob_entry). new_cache: see score. Perplexity is nan if a log-probability
    is not finite. ValueError if the text has less than two tokens."""
    ids = tokenizer.encode(text)
    if not text or len(ids) < 2:
        raise ValueError(
            f"--perplexity: the text is too short ({len(ids)} tokens); give two or more"
        )
    total, entries = 0.0, []
    window = model.config.context
    for chosen, best, best_ids in score(model, ids, window, top or 0, prefill, new_cache):
        total += chosen.double().sum().item()
        if top is None:
            continue
        for row in zip(chosen, best, best_ids):
            token = ids[1 + len(entries)]
            entries.append(logprob_entry(tokenizer, token, *(x.tolist() for x in row)))
    metrics = {
        "tokens": len(ids) - 1,
        "nats_per_token": -total / (len(ids) - 1),
        "perplexity": math.exp(-total / (len(ids) - 1)) if math.isfinite(total) else math.nan,
        "bits_per_byte": -total / math.log(2) / len(text.encode()),
    }
    return metrics, entries


def score(
    model: Transformer, ids: Sequence[int], window: int, top: int, prefill: Prefill,
    new_cache: Callable[[int], Any] = lambda n: None,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """Log-probabilities of ids[1:] given the preceding tokens: yields logprobs_of() of each chunk.

    A text longer than `window` is scored with a sliding window of stride window / 2: after
    the first window / 2 tokens, each has at least window / 2 tokens of context. new_cache(tokens):
    what is used in place of a KVCache, if not None.
    """
    half = max(1, window // 2)
    device, dtype = model.embed.weight.device, model.embed.weight.dtype
    n = min(window, len(ids))
    cache = new_cache(n) or KVCache(model.config, 1, n, dtype, device)
    done = 1  # tokens done; the first has no context and is not scored
    while done < len(ids):
        begin = 0 if done == 1 else done - half
        tokens = torch.tensor([ids[begin : begin + window]], device=device)
        for first, hidden in prefill(model, tokens, cache):
            targets = tokens[0, first + 1 : first + 1 + hidden.shape[1]]
            skip = max(0, done - begin - first - 1)
            if skip < len(targets):
                logits = model.head(hidden[0, skip : len(targets)])
                yield logprobs_of(logits, targets[skip:], top)
        done = begin + tokens.shape[1]
