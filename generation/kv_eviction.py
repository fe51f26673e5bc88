"""A KV cache with a budget of tokens per head: the others are evicted, or stay in host memory.

A decode step reads all cached keys and values, although most get next to no weight. With a budget
of C tokens per layer and KV head, memory and bytes per step no longer grow with the text. The
policies differ in which tokens they keep:

    h2o           the C / 2 newest, and of the others those with the largest sum of attention
                  weights so far, the heavy hitters (H2O, arXiv:2306.14048)
    scissorhands  the C / 4 newest, and of the others those that were most often above the mean
                  weight in recent queries: what was pivotal stays so (Scissorhands,
                  arXiv:2305.17118). The window of queries is exponential here, so that a count per
                  key is enough, and one key is evicted at a time
    streaming     the first 4 tokens, attention sinks, and the newest (StreamingLLM,
                  arXiv:2309.17453)
    infinigen     nothing is evicted: host memory has all tokens, and each step fetches those C that
                  are likely to matter (InfiniGen, arXiv:2406.19707); SpeculativeCache
    recency, random    baselines: the newest, or a uniform sample

EvictingCache stores exactly C slots per head. A new token overwrites the slot of the token evicted
for it, so keys and values stay contiguous; since keys are stored rotated, the order of slots has no
meaning. The weights of a step are summed over the query heads of a group, and an MLA layer has one
head, its latent. A prompt is processed in chunks that attend to the kept tokens and themselves;
after each, the best C of both are kept. So the cache never exceeds its budget, and a layer needs
one chunk more while it runs.

Positions: a key keeps the rotation of its position in the text. StreamingLLM counts positions
within the cache, to stream past the trained context; generate.py ends at the context, where both
see trained distances, and text positions need no second rotation of every key in every step.

SpeculativeCache skews queries and keys by an orthogonal matrix per head, the right singular vectors
of the prompt's queries, which leaves every score unchanged and moves most of its sum into few
dimensions. 30% of these, for all keys, stay on the device. While layer i runs, they predict the
weights of layer i + 1: its query is computed from the input of layer i, which is close to its own
(`speculate_layers_`; it costs that layer's attention projections again). The first layer changes
the embeddings too much to predict the second, so these two select by their own queries.
`fetched_bytes` counts what came from host memory. The paper also fetches less than the budget where
few weights are large; here it is fixed.

When it loses: evicted tokens never return, so a question about an early detail that nothing has
attended to yet is answered wrongly (infinigen can fetch it). In a short context most bytes of a
step are the model's weights. With a small budget the newest tokens are worth most: at 10% of 512
tokens recency beats h2o and scissorhands on the shipped model, at 20% it loses to both. infinigen
reads PARTIAL / 2 of the cache in every step, and on a CPU alone, where nothing has to be copied,
only costs time.

Hooks: attend; layer_groups for infinigen. Equivalence (test_all.py): equal to full attention in
which the evicted keys are masked. A budget of the whole text is the plain cache. Needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_BLOCK = 64  # queries of a prompt whose attention weights are in memory at once
HISTORY = 64  # queries, the window of scissorhands
PARTIAL = 0.3  # share of the skewed dimensions that predict the weights
MIN_CAPACITY = 8  # tokens: the 4 sinks, and some more


# --------------------------------------------------------------------------------------------------
# Policies
# --------------------------------------------------------------------------------------------------


def hashes(positions: Tensor) -> Tensor:
    """fp32; the positions of the largest hashes are a uniform sample of all."""
    x = positions.long() + 1
    for factor in (0x45D9F3B, 0x119DE1F3):
        x = (x ^ x >> 16) * factor & 0xFFFFFFFF
    return ((x ^ x >> 16) & 0xFFFFFF).float()


class Policy(NamedTuple):
    """What an EvictingCache keeps: the keys of largest rank(positions, scores)."""

    rank: Callable[[Tensor, Tensor], Tensor]
    sinks: int = 0  # first positions that are never evicted
    recent: float = 0.0  # share of the slots for the newest tokens, which are not evicted
    # what a query adds to a key's score, of its weight and the mean weight; None: no scores
    gain: Callable[[Tensor, Tensor], Tensor] | None = None
    decay: float = 1.0  # of the scores, per query

    def importance(self, positions: Tensor, scores: Tensor, capacity: int) -> Tensor:
        """The order in which tokens are kept, largest first, for positions (..., S)."""
        newest = positions.amax(-1, keepdim=True)
        keep = (positions < self.sinks) | (positions > newest - int(self.recent * capacity))
        return self.rank(positions, scores).masked_fill(keep, math.inf)

    def add(self, scores: Tensor, weights: Tensor, mean: Tensor) -> Tensor:
        """scores (..., S) after T queries with weights (..., T, S), of mean (T, 1)."""
        T = weights.shape[-2]
        decay = self.decay ** torch.arange(T - 1, -1, -1, device=scores.device)
        return scores * self.decay**T + decay @ self.gain(weights, mean)


by_score = lambda positions, scores: scores
by_position = lambda positions, scores: positions.float()
was_pivotal = lambda weight, mean: (weight >= mean).float()
POLICIES = {
    "h2o": Policy(by_score, recent=0.5, gain=lambda weight, mean: weight),
    "scissorhands": Policy(by_score, recent=0.25, gain=was_pivotal, decay=1 - 1 / HISTORY),
    "streaming": Policy(by_position, sinks=4),
    "recency": Policy(by_position),
    "random": Policy(lambda positions, scores: hashes(positions)),
}
NAMES = (*POLICIES, "infinigen")


def attention(spec: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (B, T, Hq, D) over k (B, Hkv, S, D), v (B, Hkv, S, Dv), whose last T keys are the queries'
    own -> (B, T, Hq, Dv)."""
    (B, T, Hq, D), (H, S) = q.shape, k.shape[1:3]
    if T == 1:  # the query heads of a group as queries: each key is read once
        q = q.reshape(B, H, Hq // H, D)
        return F.scaled_dot_product_attention(q, k, v, scale=spec.scale).reshape(B, 1, Hq, -1)
    mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    kwargs = dict(attn_mask=mask, scale=spec.scale, enable_gqa=True)
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, **kwargs).transpose(1, 2)


def weighted_attention(spec: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """attention, and its weights (B, Hkv, T, S) fp32, summed over the query heads of a group."""
    (B, T, Hq, D), (H, S) = q.shape, k.shape[1:3]
    q = q.reshape(B, T, H, Hq // H, D).permute(0, 2, 3, 1, 4).float()
    scores = (q.flatten(2, 3) @ k.float().mT * spec.scale).view(B, H, Hq // H, T, S)
    if T > 1:
        later = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
        scores[..., S - T :].masked_fill_(later, -math.inf)
    p = scores.softmax(-1)
    o = (p.flatten(2, 3).to(v.dtype) @ v).view(B, H, Hq // H, T, -1)
    return o.permute(0, 3, 1, 2, 4).reshape(B, T, Hq, -1), p.sum(2)


class BudgetedCache:
    """What both caches have in common: layer i is row[i] of their tensors, or if it has a sliding
    window is in another cache, `windowed`. A subclass has attend_from, selected_bytes (bytes_read
    without windowed layers) and summary (fields of --json)."""

    def __init__(self, layers: Sequence[int], capacity: int, windowed: Any):
        self.row = {layer: row for row, layer in enumerate(layers)}
        self.capacity, self.windowed = capacity, windowed

    def attend(
        self, spec: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor,
        limit: int | None = None,
    ) -> Tensor:  # fmt: skip
        """The attend hook, for q (B, T, Hq, D) at consecutive positions (T,) up to limit - 1."""
        if spec.index not in self.row:
            return self.windowed.attend(spec, q, k, v, positions, limit)
        start = int(positions[0]) if limit is None else limit - k.shape[1]
        return self.attend_from(spec, q, k, v, start)

    def bytes_read(self, limit: int | None = None) -> int:
        """Bytes that a decode step reads, `limit` being the length of the text."""
        windowed = 0 if self.windowed is None else self.windowed.bytes_read(limit)
        return windowed + self.selected_bytes(limit)


# --------------------------------------------------------------------------------------------------
# Eviction
# --------------------------------------------------------------------------------------------------


class EvictingCache(BudgetedCache):
    """The keys and values that a policy keeps: `capacity` slots per layer, row and head.

    `tensors` (L, B, H, C, ...), of which the first num_kept[l] slots are used; num_seen[l] tokens
    came so far. A text may go on from an earlier position: the tokens after it are dropped, and
    those evicted for them do not return. With MLA, H is 1, a slot has the latent and no value.
    """

    def __init__(
        self, policy: str, shape: tuple[int, int, int], layers: Sequence[int], capacity: int,
        dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
        latent: bool = False, windowed: Any = None,
    ):  # fmt: skip
        """shape: (B, H, D)."""
        super().__init__(layers, capacity, windowed)
        (B, H, D), self.policy = shape, POLICIES[policy]

        def new(dtype: torch.dtype, *dims: int) -> Tensor:
            return torch.zeros(len(layers), B, H, capacity, *dims, dtype=dtype, device=device)

        self.tensors = [new(torch.int32), new(torch.float32), new(dtype, D)]
        self.tensors += [] if latent else [new(dtype, D)]
        self.positions, self.scores, self.k, self.v = (*self.tensors, None)[:4]
        self.num_kept, self.num_seen = [0] * len(layers), [0] * len(layers)

    def selected_bytes(self, limit: int | None) -> int:
        return self.k[0, :, :, 0].nbytes * (1 if self.v is None else 2) * sum(self.num_kept)

    def summary(self) -> dict[str, int]:
        return {"kv_tokens": max(self.num_kept)}

    def attend_from(self, spec: Any, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Attention to the kept tokens and the new ones, from position `start` on."""
        row = self.row[spec.index]
        if self.num_kept[row] and start < self.num_seen[row]:
            self._drop(row, start)
        return (self._decode if k.shape[1] == 1 else self._prefill)(spec, q, k, v, start)

    def _decode(self, spec: Any, q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
        row = self.row[spec.index]
        slots, n = self.place(row, row + 1, position)
        at, found = slots[0, ..., None, None].expand(-1, -1, 1, k.shape[-1]), []
        for cached, new in zip((self.k, self.v), (k,) if self.v is None else (k, v)):
            new = new.transpose(1, 2).to(cached.dtype)
            cached[row].scatter_(2, at, new.expand_as(at))  # a prompt's row goes to all rows
            found.append(cached[row, : len(q), :, :n].to(q.dtype))
        keys, values = found[0], found[-1]
        if self.v is None:
            values = keys[..., : spec.latent_dim]
        if self.policy.gain is None:
            return attention(spec, q, keys, values)
        o, weights = weighted_attention(spec, q, keys, values)
        self.observe(row, row + 1, weights[None], q.shape[2])
        return o

    def place(self, first: int, end: int, position: int) -> tuple[Tensor, int]:
        """Slots (end - first, B, H) for a new token, and the number of kept tokens with it. If all
        slots are used, a token per head is evicted."""
        rows, n = slice(first, end), self.num_kept[first]
        positions, scores = self.positions[rows], self.scores[rows]
        self.num_seen[rows] = [position + 1] * (end - first)  # first: Ctrl-C may interrupt it
        if n < self.capacity:
            slots = torch.full(positions.shape[:3], n, device=positions.device)
        else:
            slots = self.policy.importance(positions, scores, n).argmin(-1)
        positions.scatter_(-1, slots[..., None], position)
        scores.scatter_(-1, slots[..., None], 0.0)
        n = min(n + 1, self.capacity)
        self.num_kept[rows] = [n] * (end - first)
        return slots, n

    def observe(self, first: int, end: int, weights: Tensor, n_heads: int) -> None:
        """Score the kept tokens by the weights (end - first, B, H, 1, n) of a decode step."""
        n = weights.shape[-1]
        scores = self.scores[first:end, ..., :n]
        mean = torch.full((1, 1), n_heads / self.k.shape[2] / n, device=weights.device)
        scores.copy_(self.policy.add(scores, weights, mean))

    def _prefill(self, spec: Any, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Attention of a chunk, then the best tokens of the kept ones and the chunk are kept."""
        row, (B, T) = self.row[spec.index], k.shape[:2]
        n = self.num_kept[row]
        at = torch.arange(start, start + T, dtype=torch.int32, device=k.device)
        at = at.expand(B, self.k.shape[2], T)
        new = [at, torch.zeros_like(at, dtype=torch.float32)]
        new += [x.transpose(1, 2) for x in (k if spec.latent is None else spec.latent, v)]
        tokens = [
            torch.cat((cached[row, :B, :, :n].to(x.dtype), x), dim=2)
            for cached, x in zip(self.tensors, new)
        ]
        positions, scores, keys, values = *tokens[:3], tokens[-1]
        if spec.latent_dim is not None:
            values = keys[..., : spec.latent_dim]
        elif spec.expand is not None:
            pair = (k, v) if n == 0 else spec.expand(keys.transpose(1, 2))
            keys, values = (x.transpose(1, 2) for x in pair)
        if self.policy.gain is None:
            o = attention(spec, q, keys, values)
        else:
            o = self._score_chunk(spec, q, keys, values, scores)
        importance = self.policy.importance(positions, scores, self.capacity)
        self.num_seen[row] = start + T
        self._keep(row, min(n + T, self.capacity), importance, tokens)
        return o

    def _score_chunk(self, spec: Any, q: Tensor, k: Tensor, v: Tensor, scores: Tensor) -> Tensor:
        """Attention of a chunk, of which all weights are added to scores (B, H, S), in place."""
        T, H, group = q.shape[1], scores.shape[1], q.shape[2] // scores.shape[1]
        n, outputs = k.shape[2] - T, []
        for first in range(0, T, QUERY_BLOCK):
            part = q[:, first : first + QUERY_BLOCK]
            S = n + first + part.shape[1]
            o, weights = weighted_attention(spec, part, k[:, :, :S], v[:, :, :S])
            outputs.append(o)
            weights = weights.unflatten(1, (H, -1)).sum(2)  # expanded MLA has a key head per query
            visible = torch.arange(n + first + 1, S + 1, device=q.device)[:, None]
            scores[..., :S] = self.policy.add(scores[..., :S], weights, group / visible)
        return torch.cat(outputs, dim=1)

    def _keep(self, row: int, count: int, importance: Tensor, tokens: list[Tensor]) -> None:
        """Store the `count` most important of `tokens`, (B, H, S, ...) each as in `tensors`."""
        if count < importance.shape[-1]:
            kept = importance.topk(count, dim=-1).indices
            at = kept[..., None].expand(*kept.shape, self.k.shape[-1])
            tokens = [x.gather(2, kept if x.dim() == 3 else at) for x in tokens]
        slots = [x[row, :, :, :count] for x in self.tensors]  # a prompt's row goes to all rows
        self.num_kept[row] = min(count, self.num_kept[row])
        torch._foreach_copy_(slots, tokens)  # Ctrl-C cannot interrupt it
        self.num_kept[row] = count

    def _drop(self, row: int, end: int) -> None:
        """Drop the tokens at positions >= end, and where a head has more left than another, its
        least important."""
        n = self.num_kept[row]
        positions, scores, *_ = tokens = [x[row, :, :, :n].clone() for x in self.tensors]
        late = positions >= end
        importance = self.policy.importance(positions.masked_fill(late, -1), scores, self.capacity)
        importance = importance.masked_fill(late, -math.inf)
        self._keep(row, n - int(late.sum(-1).max()), importance, tokens)


# --------------------------------------------------------------------------------------------------
# Speculated selection
# --------------------------------------------------------------------------------------------------


class SpeculativeCache(BudgetedCache):
    """All keys and values in host memory, of which a step fetches capacity - 1 per row and head.

    Host (L, B, H, max_len, D); on the device the partial keys (L, B, H, max_len, R) and the columns
    of the skewing matrix that project to them, (L, H, D, R). A prompt's chunks fetch everything.
    """

    def __init__(
        self, shape: tuple[int, int, int], layers: Sequence[int], capacity: int, max_len: int,
        dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
        windowed: Any = None,
    ):  # fmt: skip
        """shape: (B, H, D)."""
        super().__init__(layers, capacity, windowed)
        (B, H, D), L = shape, len(layers)
        pinned = torch.device(device).type == "cuda"
        host = lambda: torch.zeros(L, B, H, max_len, D, dtype=dtype, pin_memory=pinned)
        self.k, self.v, self.rank = host(), host(), max(1, round(PARTIAL * D))
        self.partial = torch.zeros(L, B, H, max_len, self.rank, dtype=dtype, device=device)
        self.skew = torch.zeros(L, H, D, self.rank, dtype=dtype, device=device)
        self.prefetched: dict[int, tuple[Tensor, Tensor]] = {}  # by row of the tensors above
        self.fetched_bytes = self.step_bytes = 0

    def selected_bytes(self, limit: int | None) -> int:
        partial = self.partial[:, :, :, :limit]
        return self.step_bytes + partial.numel() * partial.element_size()

    def summary(self) -> dict[str, int]:
        return {"kv_tokens": self.capacity, "kv_fetched_bytes": self.fetched_bytes}

    def attend_from(self, spec: Any, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Attention to all tokens before `start`, or if T is 1 to the selected ones, and to the new
        ones."""
        row, (B, T) = self.row[spec.index], k.shape[:2]
        if start == 0:  # a new text
            self.skew[row] = skewing_matrix(q, k, self.rank)
            self.fetched_bytes = self.fetched_bytes if row else 0
        new = [x.transpose(1, 2) for x in (k, v)]
        fetched = self.prefetched.pop(row, None)
        if T > 1:
            fetched = self._fetch(row, B, start, None)
        elif fetched is None:
            fetched = self._fetch(row, B, start, self.select(row, q, start, spec.scale))
        o = attention(spec, q, *(torch.cat(pair, dim=2) for pair in zip(fetched, new)))
        for slots, x in zip((self.k, self.v), new):
            slots[row, :, :, start : start + T] = x  # a prompt's row goes to all rows
        self.partial[row, :, :, start : start + T] = new[0] @ self.skew[row]
        return o

    def speculate(self, spec: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """An attend hook that fetches for layer spec.index, q (B, 1, Hq, D) being close to its own
        query. Returns zeros: only the query is wanted."""
        if spec.index in self.row:
            row, start = self.row[spec.index], int(positions[0])
            selected = self.select(row, q, start, spec.scale)
            self.prefetched[row] = self._fetch(row, len(q), start, selected)
        return torch.zeros_like(q)

    def select(self, row: int, q: Tensor, n: int, scale: float) -> Tensor | None:
        """Indices (B, H, capacity - 1) of the first n tokens, of the largest predicted weights for
        q (B, 1, Hq, D), summed over the query heads of a group; None: all n."""
        if n < self.capacity:
            return None
        partial = self.partial[row, :, :, :n].float()
        q = q.reshape(len(q), partial.shape[1], -1, q.shape[-1]) @ self.skew[row]
        weights = (q.float() @ partial.mT * scale).softmax(-1).sum(2)
        return weights.topk(self.capacity - 1, dim=-1, sorted=False).indices.sort(-1).values

    def _fetch(self, row: int, B: int, n: int, selected: Tensor | None) -> list[Tensor]:
        """Keys and values (B, H, m, D) of the first n tokens, or of the selected ones."""
        if selected is None:
            found = [x[row, :B, :, :n] for x in (self.k, self.v)]
        else:
            H, max_len, D = self.k.shape[2:]
            at = selected.to("cpu") + max_len * torch.arange(B * H).view(B, H, 1)
            found = [x[row].view(-1, D).index_select(0, at.flatten()) for x in (self.k, self.v)]
            found = [x.view(B, H, -1, D) for x in found]
        self.step_bytes = sum(x.nbytes for x in found) * len(self.row)
        self.fetched_bytes += self.step_bytes // len(self.row)
        return [x.to(self.partial.device, non_blocking=True) for x in found]


def skewing_matrix(q: Tensor, k: Tensor, rank: int) -> Tensor:
    """For q (B, T, Hq, D) and k (B, T, H, D) the columns (H, D, rank) of an orthogonal matrix per
    key head that are most used: those of the right singular vectors V of the group's queries with
    the largest sum of |q V| and |k V|."""
    H = k.shape[2]
    rows = [x.unflatten(2, (H, -1)).permute(2, 0, 1, 3, 4).flatten(1, 3).float() for x in (q, k)]
    v = torch.linalg.eigh(rows[0].mT @ rows[0]).eigenvectors  # of the SVD of q
    used = sum((x @ v).abs().sum(1) for x in rows)
    columns = used.topk(rank, dim=-1).indices
    return v.gather(2, columns[:, None].expand(-1, v.shape[1], -1)).to(q.dtype)


def speculate_layers_(model: Any, cache: SpeculativeCache) -> None:
    """Let each decode step of a model fetch the keys of layer i + 1 before layer i runs, except for
    the first two layers."""

    def group(layer: Any, following: Any) -> Callable[..., Tensor]:
        def run(x: Tensor, rope: Any, positions: Tensor, *rest: Any) -> Tensor:
            if x.shape[1] == 1:
                normed = following.attention_norm(x)
                following.attention(normed, rope, positions, cache.speculate)
            return layer(x, rope, positions, *rest)

        return run

    first, *layers = model.layers
    model.layer_groups = [first, *map(group, layers, layers[1:]), *layers[-1:]]


def build_cache(
    policy: str, budget: float, model: Any, rows: int, max_len: int, windowed: Any = None
) -> EvictingCache | SpeculativeCache | None:
    """The cache of a model for `rows` texts of up to max_len tokens; None if the budget is all of
    them. budget: a share of max_len up to 1, or a number of tokens. windowed: a cache for layers
    with sliding windows. ValueError names the flag."""
    c, p = model.config, next(model.parameters())
    capacity = int(budget * max_len + 1e-9) if budget <= 1 else int(budget)
    if capacity >= max_len:
        return None
    if capacity < MIN_CAPACITY:
        asked = f"--kv-budget {budget:g} of {max_len} tokens is {capacity}"
        raise ValueError(f"{asked}, fewer than the {MIN_CAPACITY} that are needed; raise it")
    lacks = "alibi" if c.alibi else c.contiguous_only
    if policy == "infinigen" and c.kv_lora_rank:
        lacks = "latent attention, whose queries of a prompt and of a step differ in form"
    if lacks:
        raise ValueError(f"--kv-budget with --kv-policy {policy} does not support {lacks}")
    layers = [i for i in range(c.n_layers) if c.window(i) is None]
    if not layers:
        raise ValueError("--kv-budget: sliding windows bound the cache of every layer; remove it")
    shape = rows, c.n_kv_heads, c.head_dim
    if c.kv_lora_rank:
        shape = rows, 1, c.kv_lora_rank + c.qk_rope_head_dim
    if policy != "infinigen":
        latent = c.kv_lora_rank > 0
        return EvictingCache(policy, shape, layers, capacity, p.dtype, p.device, latent, windowed)
    cache = SpeculativeCache(shape, layers, capacity, max_len, p.dtype, p.device, windowed)
    speculate_layers_(model, cache)
    return cache


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def main() -> None:
    """A step == attention to the kept tokens; megabytes and milliseconds of a step over 4096."""
    from types import SimpleNamespace

    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    device, N, H, D = "cuda" if torch.cuda.is_available() else "cpu", 4096, 4, 64
    spec = SimpleNamespace(index=0, scale=0.125, latent=None, latent_dim=None, expand=None)
    q, k, v = (torch.randn(1, N + 99, h, D, device=device) for h in (2 * H, H, H))
    print(f"one layer, {H} key heads, D {D}, fp32, {device}: MB and ms of a step after {N} tokens")
    for name, budget in (("recency", N + 99), *((name, N // 5) for name in NAMES)):  # first: all
        make = partial(EvictingCache, name)
        if name == "infinigen":
            make = partial(SpeculativeCache, max_len=N + 99)
        cache, at = make(shape=(1, H, D), layers=[0], capacity=budget, device=device), 0

        def step(n: int = 1) -> Tensor:
            nonlocal at
            at += n
            return cache.attend_from(spec, *(x[:, at - n : at] for x in (q, k, v)), at - n)

        while at < N:
            step(512)
        o = step()
        if name != "infinigen":
            kept = cache.positions[0].long()[0, :, : cache.num_kept[0], None].expand(-1, -1, D)
            keys, values = (x[0].transpose(0, 1).gather(1, kept)[None] for x in (k, v))
            error = (o - attention(spec, q[:, at - 1 : at], keys, values)).abs().max()
            assert error < 1e-5, f"{name}: a step differs from attention to the kept tokens"
        ms = 1e3 * Timer("step()", globals=dict(step=step)).timeit(90).mean
        print(f"{name:14}{budget:>6}{cache.bytes_read(at) / 1e6:>8.2f}{ms:>8.3f}")


if __name__ == "__main__":
    main()
