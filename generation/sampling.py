"""sampling.py: from logits to a token, one contract for every mode.

A single sequence, n samples of one prompt, a batch whose rows each ask for something else, a step
replayed as a CUDA graph and the verification of a draft must all draw from the same distribution.
So what a person may ask is one frozen dataclass, `Sampling`; what it means is two pure functions of
tensors, read in this order:

    process_logits   repetition penalty, presence and frequency penalties, logit bias, no
                     end-of-sequence before min_new_tokens
    probabilities    temperature, then top-k, top-p, min-p, renormalised: the distribution that is
                     drawn from, and what speculative verification compares; temperature 0 puts all
                     of it on the argmax

and `Sampler` holds what B rows need for it in static tensors: each feature's numbers as a (B, 1)
column, token counts, seeds, positions. A feature that no row uses has no column and no code in the
step: greedy alone is one maximum. A step is tensor work without a look from the host, so that it
compiles into the decode step and replays inside its graph.

Drawing is the exponential race: argmax(p / E) with E ~ Exp(1) independent per token is a draw from
p. Its noise is a pure function of (seed, position, token id), computed in the step by a counter
generator (SplitMix64, doi:10.1145/2660193.2660195): a row's tokens depend on its own seed and
logits and on nothing else. Not on its neighbours, its slot, the size of the batch, or a pause in
between; seeds differ in all 63 bits, where torch's CPU generator hears 32 of them, and 128k tokens
take a third of the time of its exponential_.

A row that has nothing to draw from, all of its logits -inf or one of them NaN, gets the id -1,
which no embedding and no tokenizer takes for a token.

What it costs: `python sampling.py` prints it, per feature and token. Only top-p sorts; tokens too
unlikely to matter are zeroed before, and zeros sort quickly. A penalty or a bias keeps (B, V)
tensors. When it loses: on a GPU that sort is still one of all V, where a kernel that searches for
the threshold (FlashInfer's) is faster; and eager, a repetition penalty passes over all V, where
gathering the few tokens seen would do.

Hook: none; it is handed logits. Equivalence (test_all.py): measured frequencies against the
distribution specified, `probabilities` against its definition in plain Python and the processors of
transformers, batched == alone, compiled == eager. Needs: torch.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real

import torch
from torch import Tensor

INF = math.inf

# --------------------------------------------------------------------------------------------------
# What may be asked
# --------------------------------------------------------------------------------------------------

# field: (type, test, the range in words). The outer limits keep every sum and quotient in fp32.
RANGES: dict[str, tuple[type, Callable[[float], bool], str]] = {
    "temperature": (float, lambda v: v == 0 or 1e-9 <= v <= 1e9, "0 (greedy), or from 1e-9 to 1e9"),
    "top_k": (int, lambda v: 0 <= v < 2**63, "a whole number, 0 (all) or more"),
    "top_p": (float, lambda v: 0 < v <= 1, "more than 0 and at most 1"),
    "min_p": (float, lambda v: 0 <= v <= 1, "from 0 to 1"),
    "repetition_penalty": (float, lambda v: 1e-9 <= v <= 1e9, "from 1e-9 to 1e9 (1 is none)"),
    "presence_penalty": (float, lambda v: -1e9 <= v <= 1e9, "from -1e9 to 1e9"),
    "frequency_penalty": (float, lambda v: -1e9 <= v <= 1e9, "from -1e9 to 1e9"),
    "min_new_tokens": (int, lambda v: 0 <= v < 2**63, "a whole number, 0 or more"),
    "seed": (int, lambda v: 0 <= v < 2**63, "a whole number from 0 to 2**63 - 1"),
}


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. The defaults draw from the model's own distribution.

    ValueError names a field that is out of range, its value and the range.
    """

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # draw from the k likeliest, and those as likely as the last of them; 0: all
    top_p: float = 1.0  # from the smallest set of likeliest tokens that reaches p; 1: all
    min_p: float = 0.0  # from tokens with at least this share of the likeliest's probability
    repetition_penalty: float = 1.0  # tokens in prompt or output: logit / r if positive, else * r
    presence_penalty: float = 0.0  # tokens in the output: logit minus this
    frequency_penalty: float = 0.0  # tokens in the output: logit minus this per occurrence
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()  # added; -inf forbids
    min_new_tokens: int = 0  # no end-of-sequence id before that many
    seed: int = 0

    def __post_init__(self):
        for field, (kind, good, wanted) in RANGES.items():
            value = getattr(self, field)
            if not _is(kind, value) or not good(value):
                raise ValueError(f"{field} must be {wanted}, not {value!r}")
            object.__setattr__(self, field, kind(value))
        bias = self.logit_bias
        try:
            pairs = sorted((i, b) for i, b in (bias.items() if isinstance(bias, Mapping) else bias))
        except (TypeError, ValueError):
            raise ValueError(f"logit_bias must map token ids to numbers, not {bias!r}") from None
        for i, b in pairs:
            if not _is(int, i) or i < 0:
                raise ValueError(f"logit_bias must have token ids, 0 or more, for keys, not {i!r}")
            if not _is(float, b) or not (b == -INF or -1e9 <= b <= 1e9):
                raise ValueError(
                    f"logit_bias of token {i} must be -inf (never) or from -1e9 to 1e9, not {b!r}"
                )
        if len(dict(pairs)) < len(pairs):
            raise ValueError(f"logit_bias must name a token once, not as in {bias!r}")
        pairs = tuple((int(i), float(b)) for i, b in pairs)  # hashable, as the rest is
        object.__setattr__(self, "logit_bias", pairs)


def _is(kind: type, value: object) -> bool:
    """A number of that kind, numpy's too; True and False are none."""
    wide = Real if kind is float else Integral
    return isinstance(value, wide) and not isinstance(value, bool)


# --------------------------------------------------------------------------------------------------
# What it means
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

    prompt (..., V) bool: the token is in the prompt; output (..., V): how often in the output; bias
    (..., V) is added; forbidden (..., V) bool. A penalty is a number or a (..., 1) column of them
    and needs output, repetition prompt too. Repetition is CTRL's (arXiv:1909.05858), presence and
    frequency are OpenAI's.
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
    """(..., V) logits -> (..., V) fp32, the distribution to draw from.

    Each setting is a number or a (..., 1) column of them; max_k is the largest top_k of a column
    (without it a column is looked up in a sort). A column of temperatures has no 0 in it. A row
    without one finite logit, or with a NaN, is NaN.
    """
    x = logits.float()
    if not isinstance(temperature, Tensor) and temperature == 0:
        best = x.argmax(-1, keepdim=True)
        return torch.zeros_like(x).scatter(-1, best, 1.0)
    if isinstance(top_k, Tensor) or 0 < top_k < x.shape[-1]:
        # the next two lines keep the order, but might round two logits into one
        x = torch.where(x < _kth(x, top_k, max_k), -INF, x)
    x = x - x.amax(-1, keepdim=True)  # the largest is 0 from here on: no overflow in the next line
    if isinstance(temperature, Tensor) or temperature != 1:
        x = x / temperature
    if isinstance(top_p, Tensor) or top_p < 1:
        x = torch.where(_beyond(x, top_p), -INF, x)
    if isinstance(min_p, Tensor) or min_p > 0:
        x = torch.where(x < torch.as_tensor(min_p, dtype=torch.float32).log(), -INF, x)
    return x.softmax(-1)


def _kth(x: Tensor, k: Tensor | int, max_k: int | None) -> Tensor:
    """(..., 1) the k-th largest of x (..., V); -inf where k is 0."""
    V = x.shape[-1]
    if not isinstance(k, Tensor):
        return x.topk(k).values[..., -1:]
    largest = x.topk(min(max_k or V, V)).values
    kth = largest.gather(-1, (k - 1).clamp(0, largest.shape[-1] - 1).expand(*x.shape[:-1], 1))
    return kth.masked_fill(k == 0, -INF)


def _beyond(x: Tensor, top_p: Tensor | float) -> Tensor:
    """(..., V) logits -> True outside the nucleus: the smallest set of likeliest tokens whose
    probability reaches top_p (arXiv:1904.09751); of equals the lower ids are in it."""
    top_p = torch.as_tensor(top_p, dtype=torch.float32)
    # 1 keeps all, though a sum of all may round to more; and nothing is below what fp32 can hold
    top_p = top_p.where(top_p < 1, INF).clamp(min=1e-30)
    p = x.softmax(-1)
    # All tokens below (1 - top_p) / V together fall short of 1 - top_p: the set is full before it
    # comes to them.
    p = torch.where(p < (1 - top_p) / p.shape[-1], 0.0, p)
    p, ids = p.sort(dim=-1, descending=True, stable=True)
    before = p.cumsum(-1) - p  # 0 for the likeliest, which therefore always stays
    out = (before >= top_p) | (p == 0)  # the zeroed stay out should a rounded sum fall short
    return torch.empty_like(out).scatter_(-1, ids, out)


def draw(probs: Tensor, noise: Tensor) -> Tensor:
    """(..., V) probabilities and Exp(1) noise -> (...) ids; -1 for a row of zeros or NaN."""
    # noise from elsewhere may be 0, and 0 / 0 would win: a token that has been ruled out
    ids = (probs / noise.clamp(min=1e-30)).argmax(-1)
    return ids.where(_at(probs, ids) > 0, -1)


def greedy(logits: Tensor) -> Tensor:
    """(..., V) -> (...) ids, the argmax; -1 where that is NaN or infinite."""
    ids = logits.argmax(-1)
    return ids.where(_at(logits, ids).isfinite(), -1)


def _at(x: Tensor, ids: Tensor) -> Tensor:
    """x (..., V), ids (...) -> (...)"""
    return x.gather(-1, ids[..., None])[..., 0]


def logprobs_of(logits: Tensor, ids: Tensor, top: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(..., V) and (...) -> the ids' log-probabilities (...), the top largest (..., top), falling,
    and their ids (..., top).

    Of the model's own distribution: hand it the raw logits. For a prompt: logits[:-1], ids[1:].
    """
    V = logits.shape[-1]
    if not 0 <= top <= V:
        raise ValueError(f"top must be from 0 to the vocabulary's {V}, not {top}")
    logp = logits.log_softmax(-1, dtype=torch.float32)
    best = logp.topk(top)
    return _at(logp, ids), best.values, best.indices


# --------------------------------------------------------------------------------------------------
# Noise
# --------------------------------------------------------------------------------------------------

# SplitMix64's constants as the signed integers torch has; products wrap.
GOLDEN, MIX_1, MIX_2 = (
    c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def splitmix(state: Tensor, steps: Tensor) -> Tensor:
    """The generator's output n from a 64-bit state, where steps is n * GOLDEN, n = 1, 2, ...

    A bijection of the state for any n, so that different states never give the same output.
    """
    z = state + steps
    for shift, factor in ((30, MIX_1), (27, MIX_2), (31, None)):
        high = z >> shift
        high &= 2 ** (64 - shift) - 1  # the shift of a signed number, made logical
        z ^= high  # in place: eager on a CPU, memory is what this costs
        if factor is not None:
            z *= factor
    return z


def exponential(seed: Tensor, position: Tensor, steps: Tensor) -> Tensor:
    """seed, position (..., 1) int64, steps (V,) = arange(1, V + 1) * GOLDEN -> Exp(1), (..., V).

    Output `position` of one generator, started by seed, starts another: output v is of token v.
    """
    state = splitmix(seed, (position + 1) * GOLDEN)
    u = splitmix(state, steps).bitwise_and_(2**63 - 1).float().mul_(2.0**-63)
    # The race is decided at small noise, so u is fine near 0. Neither end may be reached: noise 0
    # beats everything, and infinite noise makes a token as hopeless as one of probability 0.
    return u.clamp_(2.0**-64, 1 - 2.0**-24).neg_().log1p_().neg_()  # -log(1 - u)


def uniform(seed: Tensor, position: Tensor, step: Tensor) -> Tensor:
    """seed, position and step (...) -> [0, 1), (...): one output of what `exponential` draws from,
    by a step that it does not take."""
    state = splitmix(splitmix(seed, (position + 1) * GOLDEN), step)
    return state.bitwise_and_(2**63 - 1).float().mul_(2.0**-63).clamp_(max=1 - 2.0**-24)


# --------------------------------------------------------------------------------------------------
# Rows
# --------------------------------------------------------------------------------------------------

OFF = Sampling()
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
SHAPE = ("temperature", "top_k", "top_p", "min_p")
COLUMNS = {name: torch.float32 for name in (*PENALTIES, *SHAPE)}  # (B, 1) each
COLUMNS |= {"top_k": torch.long, "min_new_tokens": torch.long}
TABLES = {"prompt": torch.bool, "output": torch.int32, "bias": torch.float32}  # (B, V) each


def features_of(how: Sampling) -> set[str]:
    """What a row needs in the step: columns, tables, and whether it is greedy or needs noise."""
    names = {name for name in COLUMNS if getattr(how, name) != getattr(OFF, name)}
    if how.temperature == 0:
        names = names - {"top_k", "top_p", "min_p"} | {"greedy"}  # the argmax is in all their sets
    else:
        names.add("noise")
    if names & set(PENALTIES):
        names.add("output")
    if "repetition_penalty" in names:
        names.add("prompt")
    if how.logit_bias:
        names.add("bias")
    return names


class Sampler:
    """B rows, a Sampling each, and their state: settings, counts, seeds, positions.

    start(prompts), then ids = sampler(logits) for every token. All state is tensors that keep their
    addresses: a compiled or captured step is valid for as long as `step_key` is the same.
    """

    def __init__(
        self,
        how: Sampling | Sequence[Sampling],
        batch: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        eos_ids: Sequence[int] = (),
    ):
        """One Sampling serves all rows, row b with seed + b: as if alone with that seed.

        ValueError: an id is not in the vocabulary, or a row forbids every token there is.
        """
        if isinstance(how, Sampling):
            how = [replace(how, seed=(how.seed + b) % 2**63) for b in range(batch)]
        if len(how) != batch:
            raise ValueError(f"how must be one Sampling or {batch} of them, not {len(how)}")
        self.vocab_size, self.eos_ids = vocab_size, list(eos_ids)
        self._check_ids("eos_ids", self.eos_ids)
        self.is_eos = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.is_eos[self.eos_ids] = True
        self.steps = torch.arange(1, vocab_size + 1, device=device) * GOLDEN
        self.seed = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.position = torch.zeros_like(self.seed)  # tokens in the output so far
        self.tensors: dict[str, Tensor] = {}  # of every feature that was ever in use
        self.how, self.uses = [OFF] * batch, [features_of(OFF)] * batch  # of each row
        for row, h in enumerate(how):
            self._set(row, h)
        self._choose()
        self.start([()] * batch)

    # ---- a step ----

    def __call__(self, logits: Tensor) -> Tensor:
        """(B, V) logits -> (B,) ids, recorded; -1 where a row has nothing to draw from."""
        if "noise" in self.features:
            ids = draw(self.probabilities(logits), self.noise())
        else:
            ids = greedy(self.process(logits))
        self.record(ids)
        return ids

    def draw_rows(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """(R, V) logits of R different rows alone -> (R,) ids, recorded; the others stand still.

        A step of a copy of their state: what only the others ask for is not in it. Not for a
        compiled step.
        """
        part, index = copy.copy(self), torch.tensor(rows, device=self.seed.device)
        part.how, part.uses = [self.how[r] for r in rows], [self.uses[r] for r in rows]
        part._choose()
        part.tensors = {n: t[index] for n, t in self.tensors.items() if n in part.features}
        part.seed, part.position = self.seed[index], self.position[index]
        ids = part(logits)
        self.position[index] = part.position
        if "output" in part.features:
            self.tensors["output"][index] = part.tensors["output"]
        return ids

    def process(self, logits: Tensor) -> Tensor:
        """process_logits by the rows' settings and counts; the very logits if there are none."""
        assert logits.shape == self.seed.shape[:1] + self.steps.shape, logits.shape
        more = {n: self.tensors[n] for n in (*PENALTIES, *TABLES) if n in self.features}
        if "min_new_tokens" in self.features:
            more["forbidden"] = self.is_eos & (self.position < self.tensors["min_new_tokens"])
        return process_logits(logits, **more) if more else logits

    def probabilities(self, logits: Tensor) -> Tensor:
        """(B, V) logits -> (B, V) fp32: what each row's next token is drawn from."""
        x = self.process(logits)
        shape = {n: self.tensors[n] for n in SHAPE if n in self.features}
        if "greedy" in self.features:
            others = torch.ones_like(x, dtype=torch.bool)
            others.scatter_(-1, x.argmax(-1, keepdim=True), False)
            x = torch.where(others & (shape["temperature"] == 0), -INF, x)
            shape["temperature"] = shape["temperature"].clamp(min=1e-9)
        return probabilities(x, **shape, max_k=self.max_k)

    def noise(self) -> Tensor:
        """(B, V) Exp(1) noise, by the rows' seeds and positions."""
        return exponential(self.seed, self.position, self.steps)

    def record(self, ids: Tensor, times: int = 1) -> None:
        """Append ids (B,) to the rows' outputs; times=-1 takes them off again."""
        if "output" in self.features:
            counts = self.tensors["output"]  # a row that got -1 has failed, whatever is counted
            counts.scatter_add_(1, ids.clamp(min=0)[:, None], torch.full_like(counts[:, :1], times))
        self.position.add_(times)

    # ---- a step with drafts ----

    def draft_noise(self) -> Tensor:
        """(B, V) as noise, and independent of it: what drafts are drawn with."""
        return exponential(self.seed, self.position, self.steps + (self.steps[-1] + GOLDEN))

    def uniform(self, which: Tensor) -> Tensor:
        """(B,) in [0, 1), independent of both kinds of noise and for each `which` (B,), 0 or more:
        what decides about drafts."""
        step = 2 * (self.steps[-1] + GOLDEN) + which * GOLDEN
        return uniform(self.seed[:, 0], self.position[:, 0], step)

    def ahead(self, tokens: Tensor, seen: Tensor, rows: Sequence[int] | None = None) -> Sampler:
        """A copy whose rows stand where drafts would have them: of R rows (all, or those given) and
        N drafted tokens (R, N) each, R * (N + 1) rows: as they are, and after every draft and those
        before it. seen (N + 1, N + 1) bool: [i, j] where draft j - 1 is i - 1 or before it, of a
        run the lower triangle, of a tree its ancestors; column 0 is of what is there already."""
        (R, N), part, device = tokens.shape, copy.copy(self), self.seed.device
        index = torch.arange(R, device=device)
        if rows is not None:
            part.how, part.uses = [self.how[r] for r in rows], [self.uses[r] for r in rows]
            part._choose()
            index = torch.tensor(rows, device=device)
        index = index.repeat_interleave(N + 1)
        part.tensors = {n: t[index] for n, t in self.tensors.items() if n in part.features}
        part.seed = self.seed[index]
        part.position = self.position[index] + (seen.sum(1) - 1).repeat(R)[:, None]
        if "output" in part.features:
            counts = part.tensors["output"].view(R, N + 1, -1)
            for i in range(N):
                ids = tokens[:, i].clamp(min=0).view(R, 1, 1).expand(R, N + 1, 1)
                counts.scatter_add_(2, ids, seen[:, i + 1].to(counts).view(1, -1, 1).expand_as(ids))
        return part

    def record_run(self, ids: Tensor, n: Tensor, rows: Sequence[int] | None = None) -> None:
        """Append the first n (R,) of ids (R, T) to the outputs of all rows, or of those given."""
        index = torch.arange(len(ids)) if rows is None else torch.tensor(rows)
        index = index.to(ids.device)
        if "output" in self.features:
            counts = self.tensors["output"]
            taken = (torch.arange(ids.shape[1], device=ids.device) < n[:, None]).to(counts)
            counts.index_put_((index[:, None], ids.clamp(min=0)), taken, accumulate=True)
        self.position.index_add_(0, index, n[:, None])

    # ---- between steps ----

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Every row begins anew, each after its prompt."""
        if len(prompts) != len(self.how):
            raise ValueError(f"prompts must be {len(self.how)}, one per row, not {len(prompts)}")
        for row, prompt in enumerate(prompts):
            self._begin(row, prompt, ())

    def admit(
        self, row: int, how: Sampling, prompt: Sequence[int], output: Sequence[int] = ()
    ) -> None:
        """Give a row to another sequence; the other rows notice nothing. One that was interrupted
        goes on after its output as if it had never stopped."""
        self._set(row, how)
        self._choose()
        self._begin(row, prompt, output)

    @property
    def step_key(self) -> tuple[frozenset[str], int]:
        """What a step consists of: another key, another compilation or captured graph."""
        return self.features, self.max_k

    def _begin(self, row: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        self.seed[row], self.position[row] = self.how[row].seed, len(output)
        for name, ids in (("prompt", prompt), ("output", output)):
            if name in self.tensors:
                self._check_ids(name, ids)
                count = torch.tensor(ids, dtype=torch.long).bincount(minlength=self.vocab_size)
                self.tensors[name][row] = count.to(self.tensors[name])

    def _set(self, row: int, how: Sampling) -> None:
        """Write a row's settings; a tensor appears when the first row needs it, neutral for the
        others."""
        self.check(how)
        if how.top_k >= self.vocab_size:
            how = replace(how, top_k=0)
        self.how[row], self.uses[row] = how, features_of(how)
        B, V = len(self.how), self.vocab_size
        for name in self.uses[row] - self.tensors.keys() - {"greedy", "noise"}:
            shape, dtype = ((B, V), TABLES[name]) if name in TABLES else ((B, 1), COLUMNS[name])
            neutral = getattr(OFF, name, 0)
            self.tensors[name] = torch.full(shape, neutral, dtype=dtype, device=self.seed.device)
        for name in COLUMNS.keys() & self.tensors.keys():
            self.tensors[name][row] = getattr(how, name)
        if "bias" in self.tensors:
            bias = torch.zeros(V, dtype=torch.float32)
            for i, b in how.logit_bias:
                bias[i] = b
            self.tensors["bias"][row] = bias.to(self.seed.device)

    def _choose(self) -> None:
        """The features of a step: those of its rows together."""
        self.features = frozenset().union(*self.uses)
        if not self.eos_ids:
            self.features -= {"min_new_tokens"}
        k = max((h.top_k for h in self.how if h.temperature > 0), default=0)
        # a power of two: few different steps, where rows come and go
        self.max_k = min(self.vocab_size, 1 << (k - 1).bit_length()) if k else 0

    def check(self, how: Sampling) -> None:
        """ValueError: an id is not in the vocabulary, or there is no token that is allowed."""
        self._check_ids("logit_bias", [i for i, _ in how.logit_bias])
        banned = {i for i, b in how.logit_bias if b == -INF}
        if how.min_new_tokens:
            banned |= set(self.eos_ids)
        if len(banned) >= self.vocab_size:
            raise ValueError(
                f"logit_bias and min_new_tokens={how.min_new_tokens} leave no token to draw: they "
                f"forbid all {self.vocab_size} of the vocabulary"
            )

    def _check_ids(self, field: str, ids: Sequence[int]) -> None:
        for i in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= i < self.vocab_size:
                raise ValueError(
                    f"{field} has token id {i}, but the vocabulary ends at {self.vocab_size - 1}"
                )


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def definition(logits: list[float], how: Sampling) -> list[float]:
    """One row of `probabilities` in plain Python, word for word."""
    T = how.temperature
    weights = [math.exp((x - max(logits)) / T) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: -weights[i])  # stable: lower ids first
    if how.top_k:
        kth = weights[order[min(how.top_k, len(order)) - 1]]
        order = [i for i in order if weights[i] >= kth]
    if how.top_p < 1:
        total, kept, reached = sum(weights[i] for i in order), [], 0.0
        while reached < how.top_p * total:
            kept.append(order[len(kept)])
            reached += weights[kept[-1]]
        order = kept
    order = [i for i in order if weights[i] >= how.min_p * weights[order[0]]]
    total = sum(weights[i] for i in order)
    return [weights[i] / total if i in order else 0.0 for i in range(len(logits))]


def check(device: str) -> None:
    """The generator's published output, the definition, the frequencies, greedy and alone."""
    steps = torch.arange(1, 4, device=device) * GOLDEN
    first = [i % 2**64 for i in splitmix(torch.tensor([1234567], device=device), steps).tolist()]
    assert first == [6457827717110365317, 3203168211198807973, 9817491932198370423], first
    asked = [
        Sampling(),
        Sampling(temperature=0.7, top_k=9, seed=2**62),
        Sampling(top_p=0.8, seed=1),
        Sampling(temperature=1.4, top_k=20, top_p=0.95, min_p=0.02, seed=2),
        Sampling(temperature=0),
    ]
    V, rng = 40, torch.Generator().manual_seed(0)
    logits = torch.randn(len(asked), V, generator=rng).mul(2).to(device)
    together = Sampler(asked, len(asked), V, device)
    p = together.probabilities(logits)
    for row, how in enumerate(asked[:-1]):
        expected = torch.tensor(definition(logits[row].tolist(), how), device=device)
        torch.testing.assert_close(p[row], expected, rtol=1e-4, atol=1e-7)
        together.start([()] * len(asked))
        alone = Sampler(how, 1, V, device)
        assert all(together(logits)[row] == alone(logits[row : row + 1])[0] for _ in range(10))
        seeds = torch.arange(50_000, device=device)[:, None] + how.seed
        noise = exponential(seeds, together.position[:1], together.steps)
        ids = draw(p[row].expand_as(noise), noise)
        seen, expected = ids.bincount(minlength=V), p[row] * len(ids)
        chi2 = ((seen - expected) ** 2 / expected.clamp(min=1e-9)).sum().item()
        assert chi2 < 90, (how, chi2)  # 39 degrees of freedom at most: one in 10^5 is above
    assert together(logits)[-1] == logits[-1].argmax()


def peer(how: Sampling, prompt: Tensor) -> Callable[[Tensor], Tensor] | None:
    """A step of transformers' processors and torch.multinomial; None where it has no such one."""
    from transformers.generation import logits_process as P

    if how.presence_penalty or how.frequency_penalty:
        return None
    r, eos, length = how.repetition_penalty, [2], prompt.shape[1]
    device = str(prompt.device)
    steps = [
        how.repetition_penalty != 1 and P.RepetitionPenaltyLogitsProcessor(r),
        how.logit_bias and P.SequenceBiasLogitsProcessor({(i,): b for i, b in how.logit_bias}),
        how.min_new_tokens
        and P.MinNewTokensLengthLogitsProcessor(length, how.min_new_tokens, eos, device),
        how.temperature not in (0, 1) and P.TemperatureLogitsWarper(how.temperature),
        how.top_k and P.TopKLogitsWarper(how.top_k),
        how.top_p < 1 and P.TopPLogitsWarper(how.top_p),
        how.min_p and P.MinPLogitsWarper(how.min_p),
    ]
    steps = P.LogitsProcessorList(s for s in steps if s)
    if how.temperature == 0:
        return lambda logits: steps(prompt, logits).argmax(-1)
    return lambda logits: torch.multinomial(steps(prompt, logits).softmax(-1), 1)


def seconds(*calls: Callable[[], object], repeats: int = 11) -> list[float]:
    """Median time of each call, taken in turns: what else the machine does slows all alike."""
    times = [[] for _ in calls]
    for _ in range(repeats + 2):
        for call, taken in zip(calls, times):
            start = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken[2:]) for taken in times]


def benchmark(device: str) -> None:
    """Milliseconds per token of one row, step by step (eager), normal logits of deviation 3."""
    V, rng = 128_256, torch.Generator().manual_seed(0)
    torch.ones(7_000_000)  # from here on malloc keeps what is freed, as in a process with a model
    logits = torch.randn(1, V, generator=rng).mul(3).to(device)
    prompt = torch.randint(V, (1, 512), generator=rng)
    has_peer = importlib.util.find_spec("transformers") is not None
    print(f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}, one row of {V}")
    print(f"{'':37} {'ours':>7} {'transformers':>13}   ms per token, median")
    for how in (
        dict(temperature=0),
        dict(temperature=0, repetition_penalty=1.1),
        dict(),
        dict(temperature=0.7),
        dict(top_k=50),
        dict(top_p=0.9),
        dict(top_k=50, top_p=0.9),
        dict(min_p=0.05),
        dict(repetition_penalty=1.1),
        dict(presence_penalty=0.5),
        dict(frequency_penalty=0.5),
        dict(logit_bias={1: 2.0}),
        dict(min_new_tokens=9),
    ):
        name = ", ".join(f"{k} {v}" for k, v in how.items()) or "the defaults"
        sampler = Sampler(Sampling(**how), 1, V, device, eos_ids=[2])
        sampler.start(prompt.tolist())
        step = peer(Sampling(**how), prompt.to(device)) if has_peer else None
        calls = [lambda: sampler(logits)] + [lambda: step(logits)] * (step is not None)
        ours, *theirs = (f"{1e3 * s:.2f}" for s in seconds(*calls))
        print(f"{name:37} {ours:>7} {(theirs or ['-'])[0]:>13}")
    if not has_peer:
        print("transformers is not installed here: its column is empty")


if __name__ == "__main__":
    where = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.inference_mode():
        check(where)
        benchmark(where)
