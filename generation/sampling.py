"""Batched sampler: logits processors, temperature, top-k, top-p, min-p, and a per-row seed.

A single sequence, n samples of one prompt, a batch whose requests have different settings, a step
captured in a CUDA graph and the verification of drafts must all sample from the same distribution.
So two pure functions define that distribution, in this order:

    process_logits   repetition penalty, presence and frequency penalties, logit bias, and masks:
                     of min_new_tokens (end-of-sequence ids) and grammar (structured.py)
    probabilities    temperature, then top-k, top-p, min-p, renormalised: the distribution that
                     tokens are sampled from and that speculative verification compares; with
                     temperature 0 the argmax has probability 1

`Sampler` keeps the state of B rows in static tensors: each setting as a (B, 1) column, token
counts, seeds, positions. A feature that no row uses has no tensor and no code in the step: greedy
alone is one argmax. A step without a grammar never synchronizes with the host, so it compiles into
the decode step and can be captured in its CUDA graph. `RowSampler` is the same for paged_kv.py's
Engine, whose sequences come and go: a row of one Sampler for each. Both take a row's settings from
any object with the fields of paged_kv.py's SamplingParams, which checks their ranges.

Sampling uses exponential noise (equivalent to Gumbel-max): argmax(p / E) with E ~ Exp(1),
independent per token, is a sample of p. The noise is a pure function of (seed, position, token id),
computed in the step by a counter-based generator (SplitMix64, doi:10.1145/2660193.2660195). A row's
tokens therefore depend only on its seed and logits, not on other rows, its row index, the batch
size, or preemption. Seeds use all 63 bits (torch's CPU generator uses 32), and noise for 128k
tokens takes a third of the time of torch's exponential_.

A row that cannot be sampled (all logits -inf, or one NaN) gets the id -1, which no embedding or
tokenizer accepts.

Cost: only top-p sorts; tokens that cannot be in the nucleus are zeroed first, since zeros sort
quickly. A penalty or a bias keeps (B, V) tensors. When it loses: on a GPU top-p still sorts all V,
where a kernel that searches for the threshold (FlashInfer's) is faster; in eager mode a repetition
penalty passes over all V, where gathering the few tokens seen would do.

Hook: none; its input is logits. Equivalence (test_all.py): measured frequencies against the
specified distribution, `probabilities` against plain Python and the logits processors of
transformers, batched == alone, compiled == eager, a preempted sequence == an uninterrupted one.
Needs: torch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import reduce
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

INF = math.inf

# --------------------------------------------------------------------------------------------------
# Logits processing and the sampling distribution
# --------------------------------------------------------------------------------------------------


def process_logits(
    logits: Tensor,
    *,
    prompt: Tensor | None = None,
    output: Tensor | None = None,
    repetition_penalty: Tensor | float | None = None,
    presence_penalty: Tensor | float | None = None,
    frequency_penalty: Tensor | float | None = None,
    bias: Tensor | None = None,
    forbidden: Tensor | None = None,
) -> Tensor:
    """(..., V) logits -> (..., V) fp32.

    prompt (..., V) bool: the token is in the prompt; output (..., V): its count in the output; bias
    (..., V) is added; forbidden (..., V) bool: set to -inf. A penalty is a number or a (..., 1)
    column and requires output; repetition_penalty also requires prompt. Repetition is CTRL's
    (arXiv:1909.05858), presence and frequency are OpenAI's.
    """
    x = logits.float()
    if repetition_penalty is not None:
        r = repetition_penalty
        x = torch.where(prompt | output.bool(), x.clamp(min=0) / r + x.clamp(max=0) * r, x)
    if presence_penalty is not None:
        x = x - presence_penalty * output.clamp(max=1)
    if frequency_penalty is not None:
        x = x - frequency_penalty * output
    if bias is not None:
        x = x + bias
    if forbidden is not None:
        x = torch.where(forbidden, -INF, x)
    return x


def probabilities(
    logits: Tensor,
    temperature: Tensor | float = 1.0,
    top_k: Tensor | int = 0,
    top_p: Tensor | float = 1.0,
    min_p: Tensor | float = 0.0,
    *,
    max_k: int | None = None,
) -> Tensor:
    """(..., V) logits -> (..., V) fp32, the distribution to sample from.

    Each setting is a number or a (..., 1) column. max_k: the largest top_k in the column; without
    it a top_k column sorts all V. A temperature column must not contain 0. A row without a finite
    logit, or with a NaN, is NaN.
    """
    x = logits.float()
    if not isinstance(temperature, Tensor) and temperature == 0:
        best = x.argmax(-1, keepdim=True)
        return torch.zeros_like(x).scatter(-1, best, 1.0)
    if isinstance(top_k, Tensor) or 0 < top_k < x.shape[-1]:
        # top-k first: subtraction and temperature below keep the order but may round logits to ties
        x = torch.where(x < _kth_largest(x, top_k, max_k), -INF, x)
    x = x - x.amax(-1, keepdim=True)  # the maximum is now 0: no overflow in the division below
    if isinstance(temperature, Tensor) or temperature != 1:
        x = x / temperature
    if isinstance(top_p, Tensor) or top_p < 1:
        x = torch.where(_outside_nucleus(x, top_p), -INF, x)
    if isinstance(min_p, Tensor) or min_p > 0:
        x = torch.where(x < torch.as_tensor(min_p, dtype=torch.float32).log(), -INF, x)
    return x.softmax(-1)


def _kth_largest(x: Tensor, k: Tensor | int, max_k: int | None) -> Tensor:
    """The k-th largest of x (..., V) -> (..., 1); -inf where k is 0."""
    V = x.shape[-1]
    if not isinstance(k, Tensor):
        return x.topk(k).values[..., -1:]
    largest = x.topk(min(max_k or V, V)).values
    kth = largest.gather(-1, (k - 1).clamp(0, largest.shape[-1] - 1).expand(*x.shape[:-1], 1))
    return kth.masked_fill(k == 0, -INF)


def _outside_nucleus(x: Tensor, top_p: Tensor | float) -> Tensor:
    """(..., V) logits -> (..., V) bool, True outside the nucleus: the smallest set of most likely
    tokens whose probability reaches top_p (arXiv:1904.09751); ties go to the lower ids."""
    top_p = torch.as_tensor(top_p, dtype=torch.float32)
    # top_p 1 keeps all tokens even if the cumulative sum rounds above 1; 1e-30 is safe in fp32
    top_p = top_p.where(top_p < 1, INF).clamp(min=1e-30)
    p = x.softmax(-1)
    # Tokens below (1 - top_p) / V have less than 1 - top_p in total, so none is in the nucleus:
    # zero them before the sort, which is faster.
    p = torch.where(p < (1 - top_p) / p.shape[-1], 0.0, p)
    p, ids = p.sort(dim=-1, descending=True, stable=True)
    before = p.cumsum(-1) - p  # 0 for the most likely token, which is therefore always kept
    out = (before >= top_p) | (p == 0)  # zeroed tokens stay out even if the sum rounds below top_p
    return torch.empty_like(out).scatter_(-1, ids, out)


def sample(probs: Tensor, noise: Tensor) -> Tensor:
    """(..., V) probabilities and Exp(1) noise -> (...) ids; -1 for a row of zeros or NaN."""
    # a caller's noise may be 0, and for a token of probability 0 the NaN of 0 / 0 would be argmax
    ids = (probs / noise.clamp(min=1e-30)).argmax(-1)
    return ids.where(_gather(probs, ids) > 0, -1)


def greedy(logits: Tensor) -> Tensor:
    """(..., V) logits -> (...) ids, the argmax; -1 where the maximum is NaN or infinite."""
    ids = logits.argmax(-1)
    return ids.where(_gather(logits, ids).isfinite(), -1)


def _gather(x: Tensor, ids: Tensor) -> Tensor:
    """x (..., V), ids (...) -> x at ids (...)."""
    return x.gather(-1, ids[..., None])[..., 0]


def logprobs_of(logits: Tensor, ids: Tensor, top: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """logits (..., V), ids (...) -> log-probabilities of the ids (...), the `top` largest ones
    (..., top) in descending order, and their ids (..., top).

    For the model's own distribution pass raw logits; for a prompt logits[:-1] and ids[1:].
    """
    V = logits.shape[-1]
    if not 0 <= top <= V:
        raise ValueError(f"top must be from 0 to the vocabulary size {V}, not {top}")
    logp = logits.log_softmax(-1, dtype=torch.float32)
    best = logp.topk(top)
    return _gather(logp, ids), best.values, best.indices


# --------------------------------------------------------------------------------------------------
# Noise
# --------------------------------------------------------------------------------------------------

# SplitMix64's constants as signed int64, torch's only 64-bit integers; multiplication wraps.
GOLDEN, MIX_1, MIX_2 = (
    c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def splitmix(state: Tensor, steps: Tensor) -> Tensor:
    """Output n of the generator with this 64-bit state, where steps is n * GOLDEN, n = 1, 2, ...

    For any n a bijection of the state: different states never give the same output.
    """
    z = state + steps
    for shift, factor in ((30, MIX_1), (27, MIX_2), (31, None)):
        high = z >> shift
        high &= 2 ** (64 - shift) - 1  # makes the arithmetic shift logical
        z ^= high  # in place: in eager mode on a CPU this is memory bound
        if factor is not None:
            z *= factor
    return z


def exponential(seed: Tensor, position: Tensor, steps: Tensor) -> Tensor:
    """seed, position (..., 1) int64, steps (V,) = arange(1, V + 1) * GOLDEN -> Exp(1), (..., V).

    Two generators: output `position` of the first, seeded with seed, is the state of the second,
    whose output v is the noise of token v.
    """
    state = splitmix(seed, (position + 1) * GOLDEN)
    u = splitmix(state, steps).bitwise_and_(2**63 - 1).float().mul_(2.0**-63)
    # Small noise decides the argmax, and u has its best resolution near 0. Exclude both ends: noise
    # 0 always wins, and infinite noise is like probability 0.
    return u.clamp_(2.0**-64, 1 - 2.0**-24).neg_().log1p_().neg_()  # -log(1 - u)


def uniform(seed: Tensor, position: Tensor, step: Tensor) -> Tensor:
    """seed, position and step (...) -> uniform in [0, 1), (...): an output of the generator of
    `exponential`, at a step that `exponential` does not use."""
    state = splitmix(splitmix(seed, (position + 1) * GOLDEN), step)
    return state.bitwise_and_(2**63 - 1).float().mul_(2.0**-63).clamp_(max=1 - 2.0**-24)


# --------------------------------------------------------------------------------------------------
# Rows
# --------------------------------------------------------------------------------------------------

PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
WARPERS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
COLUMNS = {**PENALTIES, **WARPERS, "min_new_tokens": 0}  # (B, 1) each, and its neutral value
TABLES = {"prompt": torch.bool, "output": torch.int32, "bias": torch.float32}  # (B, V) each


def neutral_params(**fields: Any) -> SimpleNamespace:
    """A row's settings: no feature, except these fields of paged_kv.py's SamplingParams."""
    others = dict(seed=0, logit_bias=(), ignore_eos=False, grammar=None)
    return SimpleNamespace(**COLUMNS | others | fields)


def features_of(params: Any) -> set[str]:
    """What a row's settings require in the step: names of columns and tables, "greedy", "noise",
    "grammar"."""
    names = {name for name, neutral in COLUMNS.items() if getattr(params, name) != neutral}
    if params.temperature == 0:
        names = names - {"top_k", "top_p", "min_p"} | {"greedy"}  # they always keep the argmax
    else:
        names.add("noise")
    if names & PENALTIES.keys():
        names.add("output")
    if "repetition_penalty" in names:
        names.add("prompt")
    if params.logit_bias:
        names.add("bias")
    if params.grammar is not None:
        names.add("grammar")
    return names - ({"min_new_tokens"} if params.ignore_eos else set())


class Sampler:
    """B rows, each with its SamplingParams, and their state: settings, token counts, seeds,
    positions.

    Call start(prompts), then ids = sampler(logits) for every token. All state is in tensors with
    fixed addresses: a compiled or captured step is valid until `features` or `max_k` change.
    """

    def __init__(
        self,
        params: Any,
        batch: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        eos_ids: Sequence[int] = (),
    ):
        """params: one SamplingParams for all rows (row b uses seed + b), or a list of one per row.

        ValueError: an id is not in the vocabulary, or a row bans every token.
        """
        if not isinstance(params, list):
            params = [replace(params, seed=(params.seed + b) % 2**63) for b in range(batch)]
        if len(params) != batch:
            raise ValueError(f"params must be one or a list of {batch}, not of {len(params)}")
        self.vocab_size, self.eos_ids = vocab_size, list(eos_ids)
        self._check_ids("eos_ids", self.eos_ids)
        self.is_eos = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.is_eos[self.eos_ids] = True
        self.steps = torch.arange(1, vocab_size + 1, device=device) * GOLDEN
        self.seed = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.position = torch.zeros_like(self.seed)  # tokens in the output so far
        self.tensors: dict[str, Tensor] = {}  # of every feature used so far
        self.params, self.row_features = [None] * batch, [set()] * batch
        self.grammars: list[Any] = [None] * batch
        self.states = [0] * batch  # of the grammars, on the host
        for row, row_params in enumerate(params):
            self._set_row(row, row_params)
        self._update_features()
        self.start([()] * batch)

    # ---- a step ----

    def __call__(self, logits: Tensor) -> Tensor:
        """(B, V) logits -> (B,) ids, recorded; -1 where a row cannot be sampled."""
        if "noise" in self.features:
            ids = sample(self.probabilities(logits), self.noise())
        else:
            ids = greedy(self.process(logits))
        self.record(ids)
        return ids

    def sample_rows(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """(R, V) logits of R distinct rows -> (R,) ids, recorded; the other rows are unchanged.

        Works on a copy of the rows' state, without the features that only other rows use. Not for a
        compiled step.
        """
        index = torch.tensor(rows).to(self.seed.device, non_blocking=True)
        part = self._copy_rows(rows, index)
        ids = part(logits)
        self.position[index] = part.position
        if "output" in part.features:
            self.tensors["output"][index] = part.tensors["output"]
        for row, state in zip(rows, part.states):
            self.states[row] = state
        return ids

    def process(self, logits: Tensor) -> Tensor:
        """process_logits with the rows' settings and counts; without any, the logits unchanged."""
        assert logits.shape == self.seed.shape[:1] + self.steps.shape, logits.shape
        kwargs = {n: self.tensors[n] for n in (*PENALTIES, *TABLES) if n in self.features}
        if "min_new_tokens" in self.features:
            kwargs["forbidden"] = self.is_eos & (self.position < self.tensors["min_new_tokens"])
        if "grammar" in self.features:
            allowed = self._allowed()
            if "forbidden" in kwargs:  # but where a grammar allows EOS alone
                kwargs["forbidden"] &= (allowed & ~self.is_eos).any(-1, keepdim=True)
            kwargs["forbidden"] = ~allowed | kwargs.get("forbidden", False)
        return process_logits(logits, **kwargs) if kwargs else logits

    def _allowed(self) -> Tensor:
        """(B, V) bool: the tokens that the rows' grammars allow."""
        allowed = torch.ones(self.seed.shape[:1] + self.steps.shape, dtype=torch.bool)
        for mask, grammar, state in zip(allowed, self.grammars, self.states):
            if grammar is not None:
                mask.copy_(grammar.allowed(state))
        return allowed.to(self.steps.device)

    def probabilities(self, logits: Tensor) -> Tensor:
        """(B, V) logits -> (B, V) fp32: the distribution of each row's next token."""
        x = self.process(logits)
        kwargs = {n: self.tensors[n] for n in WARPERS if n in self.features}
        if "greedy" in self.features:
            others = torch.ones_like(x, dtype=torch.bool)
            others.scatter_(-1, x.argmax(-1, keepdim=True), False)
            x = torch.where(others & (kwargs["temperature"] == 0), -INF, x)
            kwargs["temperature"] = kwargs["temperature"].clamp(min=1e-9)
        return probabilities(x, **kwargs, max_k=self.max_k)

    def noise(self) -> Tensor:
        """(B, V) Exp(1) noise from the rows' seeds and positions."""
        return exponential(self.seed, self.position, self.steps)

    def record(self, ids: Tensor, times: int = 1) -> None:
        """Append ids (B,) to the rows' outputs; times=-1 removes them again."""
        if "output" in self.features:
            counts = self.tensors["output"]  # counts of a failed row (id -1) do not matter
            counts.scatter_add_(1, ids.clamp(min=0)[:, None], torch.full_like(counts[:, :1], times))
        if "grammar" in self.features:
            assert times == 1, "a grammar cannot go back"
            self._advance_states(ids[:, None], [1] * len(ids))
        self.position.add_(times)

    def _advance_states(
        self, ids: Tensor, counts: Sequence[int], rows: Sequence[int] | None = None
    ) -> None:
        """Advance the grammars of all rows, or of `rows`, by the first of ids (R, T)."""
        for row, run, n in zip(rows or range(len(ids)), ids.tolist(), counts):
            if (grammar := self.grammars[row]) is not None:
                for token in run[:n]:
                    self.states[row] = grammar.advance(self.states[row], token)

    def _copy_rows(self, rows: Sequence[int] | None, index: Tensor) -> Sampler:
        """A copy with the rows of self at `index`, and the features of `rows` alone (None: all)."""
        part = copy.copy(self)
        if rows is not None:
            part.params = [self.params[r] for r in rows]
            part.row_features = [self.row_features[r] for r in rows]
            part._update_features()
        part.tensors = {n: t[index] for n, t in self.tensors.items() if n in part.features}
        part.seed, part.position = self.seed[index], self.position[index]
        at = index.tolist() if "grammar" in part.features else []
        part.grammars, part.states = ([x[i] for i in at] for x in (self.grammars, self.states))
        return part

    # ---- speculative decoding ----

    def draft_noise(self) -> Tensor:
        """(B, V) Exp(1) noise, independent of noise(): for sampling drafts."""
        return exponential(self.seed, self.position, self.steps + (self.steps[-1] + GOLDEN))

    def uniform(self, which: Tensor) -> Tensor:
        """(B,) in [0, 1), independent of both noises and for each `which` (B,) >= 0: accepts or
        rejects drafts."""
        step = 2 * (self.steps[-1] + GOLDEN) + which * GOLDEN
        return uniform(self.seed[:, 0], self.position[:, 0], step)

    def expand_for_drafts(
        self, tokens: Tensor, mask: Tensor, rows: Sequence[int] | None = None
    ) -> Sampler:
        """A copy with R * (N + 1) rows: each of R rows (all, or those given) in its current state,
        and as it would be after each of its N draft tokens (R, N) and the drafts before that one.
        mask (N + 1, N + 1) bool: [i, j] is True if draft j - 1 is draft i - 1 or precedes it: lower
        triangular for a sequence, the ancestors for a tree; column 0 is the current state."""
        R, N = tokens.shape
        index = torch.arange(R) if rows is None else torch.tensor(rows)
        part = self._copy_rows(rows, index.to(self.seed.device).repeat_interleave(N + 1))
        part.position += (mask.sum(1) - 1).repeat(R)[:, None]
        if "output" in part.features:
            counts = part.tensors["output"].view(R, N + 1, -1)
            for i in range(N):
                ids = tokens[:, i].clamp(min=0).view(R, 1, 1).expand(R, N + 1, 1)
                counts.scatter_add_(2, ids, mask[:, i + 1].to(counts).view(1, -1, 1).expand_as(ids))
        if "grammar" in part.features:
            for i, row in enumerate(mask.tolist()[1:], 1):
                parent = max(j for j in range(i) if row[j])
                for r, token in enumerate(tokens[:, i - 1].tolist()):
                    first = r * (N + 1)
                    if (grammar := part.grammars[first]) is not None:
                        part.states[first + i] = grammar.advance(part.states[first + parent], token)
        return part

    def record_run(self, ids: Tensor, n: Tensor, rows: Sequence[int] | None = None) -> None:
        """Append the first n (R,) of ids (R, T) to the outputs of all rows, or of `rows`."""
        index = torch.arange(len(ids)) if rows is None else torch.tensor(rows)
        index = index.to(ids.device)
        if "output" in self.features:
            counts = self.tensors["output"]
            taken = (torch.arange(ids.shape[1], device=ids.device) < n[:, None]).to(counts)
            counts.index_put_((index[:, None], ids.clamp(min=0)), taken, accumulate=True)
        if "grammar" in self.features:
            self._advance_states(ids, n.tolist(), rows)
        self.position.index_add_(0, index, n[:, None])

    # ---- between steps ----

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Reset every row to the end of its prompt."""
        if len(prompts) != len(self.params):
            raise ValueError(f"prompts must be {len(self.params)}, one per row, not {len(prompts)}")
        for row, prompt in enumerate(prompts):
            self._reset_row(row, prompt, ())

    def admit(
        self, row: int, params: Any, prompt: Sequence[int], output: Sequence[int] = ()
    ) -> None:
        """Assign a row to another sequence; other rows are unaffected. A preempted sequence passes
        its output so far and continues as if never interrupted."""
        self._set_row(row, params)
        self._update_features()
        self._reset_row(row, prompt, output)

    def _reset_row(self, row: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        self.seed[row], self.position[row] = self.params[row].seed, len(output)
        grammar = self.grammars[row] = self.params[row].grammar
        self.states[row] = 0 if grammar is None else reduce(grammar.advance, output, grammar.start)
        for name, ids in (("prompt", prompt), ("output", output)):
            if name in self.tensors:
                self._check_ids(name, ids)
                count = torch.tensor(ids, dtype=torch.long).bincount(minlength=self.vocab_size)
                self.tensors[name][row] = count.to(self.tensors[name])

    def _set_row(self, row: int, params: Any) -> None:
        """Write a row's settings; a tensor is allocated when the first row uses it, with neutral
        values for the other rows."""
        self.check(params)
        if params.top_k >= self.vocab_size:
            params = replace(params, top_k=0)
        self.params[row], self.row_features[row] = params, features_of(params)
        B, V = len(self.params), self.vocab_size
        for name in self.row_features[row] - self.tensors.keys() - {"greedy", "noise", "grammar"}:
            neutral = COLUMNS.get(name, 0)
            width, dtype = (V, TABLES[name]) if name in TABLES else (1, None)
            dtype = dtype or (torch.float32 if isinstance(neutral, float) else torch.long)
            column = torch.full((B, width), neutral, dtype=dtype, device=self.seed.device)
            self.tensors[name] = column
        for name in COLUMNS.keys() & self.tensors.keys():
            used = name in self.row_features[row]
            self.tensors[name][row] = getattr(params, name) if used else COLUMNS[name]
        if "bias" in self.tensors:
            bias = torch.zeros(V, dtype=torch.float32)
            for i, b in params.logit_bias:
                bias[i] = b
            self.tensors["bias"][row] = bias.to(self.seed.device)

    def _update_features(self) -> None:
        """The features of a step: the union over its rows."""
        self.features = frozenset().union(*self.row_features)
        if not self.eos_ids:
            self.features -= {"min_new_tokens"}
        k = max((p.top_k for p in self.params if p.temperature > 0), default=0)
        # rounded up to a power of two: fewer distinct steps as rows change
        self.max_k = min(self.vocab_size, 1 << (k - 1).bit_length()) if k else 0

    def check(self, params: Any) -> None:
        """ValueError: an id is not in the vocabulary, or every token is banned."""
        self._check_ids("logit_bias", [i for i, _ in params.logit_bias])
        size = getattr(params.grammar, "vocab_size", None)
        if params.grammar is not None and size != self.vocab_size:
            raise ValueError(
                f"grammar must be a Grammar of {self.vocab_size} tokens, not {params.grammar!r:.60}"
            )
        banned = {i for i, b in params.logit_bias if b == -INF}
        if params.min_new_tokens and not params.ignore_eos:
            banned |= set(self.eos_ids)
        if len(banned) >= self.vocab_size:
            raise ValueError(
                f"logit_bias and min_new_tokens={params.min_new_tokens} leave no token to sample: "
                f"they ban all {self.vocab_size} tokens of the vocabulary"
            )

    def _check_ids(self, field: str, ids: Sequence[int]) -> None:
        for i in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= i < self.vocab_size:
                raise ValueError(
                    f"{field} has token id {i}, but the vocabulary ends at {self.vocab_size - 1}"
                )


# --------------------------------------------------------------------------------------------------
# Rows of an Engine's sequences
# --------------------------------------------------------------------------------------------------

CPU_LOGITS = 2**20  # logits sampled at once on a CPU, see RowSampler


class RowSampler:
    """An Engine's sampler with per-sequence settings: every sequence has a row of one Sampler.

    A step samples only its own rows, in groups with the same features: a greedy row next to sampled
    ones costs only its argmax (a seventh of sampling), and rows without top_p are not sorted. On a
    CPU a group is split into chunks of a million logits: 33 rows of 128k took 94 ms at once and 36
    ms in chunks, since tensors over 32 MB get new pages from the system each time.

    A preempted or waiting sequence may lose its row to another. When it is scheduled again it gets
    a row with its token counts and position restored. A sequence is an object with params, seed,
    tokens, n_prompt and output, as paged_kv.py's.
    """

    def __init__(
        self, vocab_size: int, max_num_seqs: int, device: Any = "cpu", eos: Collection[int] = ()
    ):
        eos = [e for e in eos if e < vocab_size]
        greedy_rows = [neutral_params(temperature=0)] * max_num_seqs
        self.sampler = Sampler(greedy_rows, max_num_seqs, vocab_size, device, eos)
        self.rows: dict[Any, int] = {}  # least recently used first
        self.num_recorded = [-1] * max_num_seqs  # output tokens that each row has recorded
        on_cpu = torch.device(device).type == "cpu"
        self.max_rows = max(1, CPU_LOGITS // vocab_size) if on_cpu else max_num_seqs

    def check(self, params: Any) -> None:
        """ValueError: a logit_bias outside the vocabulary, or every token is banned."""
        self.sampler.check(params)

    def __call__(self, logits: Tensor, sequences: list[Any]) -> Tensor:
        """(R, V) logits -> (R,) ids, recorded; -1 where a row cannot be sampled."""
        rows, groups = self.assign_rows(sequences), {}
        for i, row in enumerate(rows):
            groups.setdefault(frozenset(self.sampler.row_features[row]), []).append(i)
            # counted before the step: if it is interrupted, the mismatch restores the row
            self.num_recorded[row] += 1
        ids = torch.empty(len(rows), dtype=torch.long, device=logits.device)
        for group in groups.values():
            for first in range(0, len(group), self.max_rows):
                part = group[first : first + self.max_rows]
                contiguous = part[-1] - part[0] == len(part) - 1  # then logits[index] is a view
                index = slice(part[0], part[-1] + 1) if contiguous else part
                ids[index] = self.sampler.sample_rows(logits[index], [rows[i] for i in part])
        return ids

    def assign_rows(self, sequences: list[Any]) -> list[int]:
        """Each sequence's row, its state restored if it lost its row since its last step."""
        for seq in sorted(sequences, key=lambda seq: seq not in self.rows):  # rows in use first
            if seq in self.rows:
                row = self.rows.pop(seq)
            else:
                free = set(range(len(self.num_recorded))) - set(self.rows.values())
                row = free.pop() if free else self.rows.pop(next(iter(self.rows)))
                self.num_recorded[row] = -1
            self.rows[seq] = row
            if self.num_recorded[row] != len(seq.tokens) - seq.n_prompt:
                params = replace(seq.params, seed=seq.seed)
                self.sampler.admit(row, params, seq.tokens[: seq.n_prompt], seq.output)
                self.num_recorded[row] = len(seq.output)
        return [self.rows[seq] for seq in sequences]

    def grammar_state(self, sequence: Any) -> tuple[Any, int]:
        """A sequence's grammar, None if it has none, and the state after its tokens."""
        if sequence.params.grammar is None:
            return None, 0
        (row,) = self.assign_rows([sequence])
        return self.sampler.grammars[row], self.sampler.states[row]


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def main() -> None:
    """The frequencies of a row's samples match its probabilities; milliseconds per token beside
    softmax and torch.multinomial, which have no setting."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.15 s

    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits, n = torch.randn(1, 40).mul(2).to(device), 50_000
    row = Sampler([neutral_params(temperature=1.4, top_k=20, top_p=0.95)], 1, 40, device)
    p, seeds = row.probabilities(logits)[0], torch.arange(n, device=device)[:, None]
    ids = sample(p.expand(n, -1), exponential(seeds, row.position, row.steps))
    error = (ids.bincount(minlength=40) / n - p).abs().max().item()
    assert error < 0.02, error  # 9 standard deviations
    print(f"{device}: frequencies of {n} samples are within {error:.4f} of the probabilities")

    V = 128_256
    x = torch.randn(1, V).mul(3).to(device)
    ms = lambda f: 1e3 * Timer("f(x)", globals=dict(f=f, x=x)).blocked_autorange().median
    print(f"{'ms per token, one row of 128,256':34}")
    print(f"{'multinomial':34} {ms(lambda x: torch.multinomial(x.softmax(-1), 1)):6.2f}")
    for fields in (
        dict(temperature=0), dict(), dict(top_k=50), dict(top_p=0.9), dict(min_p=0.05),
        dict(repetition_penalty=1.1), dict(logit_bias=((1, 2.0),)),
    ):  # fmt: skip
        name = ", ".join(f"{k} {v}" for k, v in fields.items()) or "defaults"
        print(f"{name:34} {ms(Sampler([neutral_params(**fields)], 1, V, device)):6.2f}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
