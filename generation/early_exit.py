"""Early exit: decode steps that stop before the last layer, by position or by confidence.

A token that is easy to predict needs few layers. Two ways to use that, one runner of a Decoder's
steps each (`--early-exit A:B` and `--early-exit TARGET`):

DepthSchedule is SkipDecode (arXiv:2307.02628). Tokens late in a text are easier than early ones, so
the depth is a function of the position alone: A layers for the first new token, falling to B for
the last. All rows of a batch exit at the same layer, and since the depth never rises, every layer
that a step runs has the keys and values of all tokens before it: nothing is computed again. The
logits are those of the model's own norm and head. The prompt is run by all layers. What later
tokens lose is exact: layer i attends to the tokens at which the depth was more than i, all that
came before. (The paper skips middle layers and keeps the last; on checkpoints/small, whose training
knew of neither, keeping the first is better from 4 of 6 layers on and equal below.)

RampExits is Apparate (arXiv:2312.05385). A ramp after a layer predicts the token; if it is
confident (the probability of its most likely token is at least the ramp's threshold), the token is
released at once. The full model still computes the rest, and its own prediction is the feedback
from which thresholds are tuned: with no held-out data, and as the text drifts. For a decoder this
costs little latency and keeps the cache exact: the hidden states of released tokens wait at their
ramp, and the next token that does not exit takes them along through the remaining layers, whose
weights are read once for all (the parallel catch-up of FREE, arXiv:2310.05424). So the keys and
values are the full model's for the text as it is. Only released tokens may differ from what it
predicts, and they are not taken back: speculation (--speculate exit) with irrevocable drafts.

ExitThresholds promises more than an average: of every WINDOW consecutive tokens at most
(1 - target) * WINDOW differ from the full model's most likely token. A token is released only if
that holds even if all released tokens without feedback prove wrong. Within this budget a ramp's
threshold is the lowest at which its errors in the last WINDOW tokens, and one more, fit its part.

A ramp is the model's final norm and head. With --calibration-text it gets an affine map before the
head (the tuned lens, arXiv:2303.08112), here fitted by least squares to the full model's final
hidden states, in one pass over 16,384 tokens: on held-out Python (`main`), a ramp after layer 4 of
6 of checkpoints/small then releases 18% of the tokens at 99% agreement instead of 13%.

When it loses: every ramp reads the head's weights. In checkpoints/small the head is as large as one
and a half layers (4096 tokens x 256; a layer has 0.7M parameters), so a ramp after layer 4 must
release most tokens to pay, and at 99% agreement it releases one in six: RampExits is slower than
the plain model there. It needs models whose layers are many times the head, trained with exits
(LayerSkip, arXiv:2404.16710). DepthSchedule always saves its layers' time, but the agreement of a
model not trained for it falls fast: 69% after 5 of 6 layers, 47% after 4. The rows of a batch exit
together or not at all, so large batches exit rarely.

Equivalence (test_all.py): a flat schedule of all layers is the full model bit for bit; a falling
one equals the definition computed without a cache; target 1 gives the full model's text, any other
that of its definition. Needs: model.py, generation/cpu_decode.py.

    python -m generation.early_exit [CHECKPOINT]    agreement by depth and by threshold
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    raise SystemExit("run: python -m generation.early_exit [CHECKPOINT]")

import copy
import heapq
import math
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from generation.bench import weight_bytes
from generation.config import SHIPPED, GenerateConfig
from generation.cpu_decode import install_
from huggingface.tokenizer import Tokenizer
from model import Transformer
from generation.prompt import read_text

WINDOW = 512  # tokens over which agreement is promised
MAX_WAITING = 8  # released tokens without feedback at most
RETUNE = 16  # tokens from one tuning to the next
FIT_TOKENS, FIT_ROW, RIDGE = 16_384, 512, 1e-3


def slice_layers(model: Transformer, first: int, last: int, stage: bool = False) -> Transformer:
    """Layers first to last - 1 of a model, sharing all parameters, with its embedding, norm and
    head, or without them, as a pipeline stage."""
    part = copy.copy(model)
    part._modules = dict(model._modules)
    part.layers, part.layer_groups = model.layers[first:last], None  # its groups run all layers
    if stage:
        part.embed = part.norm = part.head = None
    return part if model.layer_groups is None else install_(part)


# --------------------------------------------------------------------------------------------------
# One depth per position
# --------------------------------------------------------------------------------------------------


def depth_at(i: int, n: int, first: int, last: int) -> int:
    """Layers of the i-th of n steps: linear from `first` to `last`, rounded up, then `last`. It
    never rises if last <= first."""
    share = min(1.0, i / max(1, n - 1))
    return math.ceil(first + (last - first) * share - 1e-9)


class ExitSteps:
    """What both runners have in common: the methods that a Decoder calls, and counts."""

    def __init__(self, decoder: Any):
        self.decoder, self.model, L = decoder, decoder.model, len(decoder.model.layers)
        parts = (slice_layers(self.model, *p, stage=True) for p in pairwise(range(L + 1)))
        self.layer_bytes = [weight_bytes(part, decoder.batch) for part in parts]
        self.bytes_skipped = 0  # of the weights that a step reads, by the last step
        self.reset()

    def reset(self) -> None:
        """Discard the counts, of steps and of layers run, each of which reads its weights once."""
        self.n_steps = self.n_layers = 0

    def observe(self, start: int, hidden: Tensor) -> None:
        """Called with the prompt's hidden states during prefill: no exit needs them."""

    def start(self, ids: Sequence[int], first: list[int]) -> None:
        """After prefill by all layers: the prompt's ids and the first token of every row."""
        self.texts, self.n_prompt = [[*ids, token] for token in first], len(ids)

    def next(self) -> list[list[int]]:
        """The next token of every row."""
        logits, n_layers = self.step()
        runs = self.decoder.finish_step(logits)
        self.n_steps, self.n_layers = self.n_steps + 1, self.n_layers + n_layers
        for text, run in zip(self.texts, runs):
            text += run
        return runs

    def step(self) -> tuple[Tensor, int]:
        """Run the last token of every row: logits (B, V), and the number of layers run."""
        raise NotImplementedError

    def agreement(self) -> float | None:
        """The share of tokens that are the full model's; None if unknown. After a step or more."""
        raise NotImplementedError

    def summary(self) -> dict[str, Any]:
        """Under the keys that --json prints."""
        L, agreement = len(self.model.layers), self.agreement() if self.n_steps else None
        layers = self.n_layers / self.n_steps if self.n_steps else L
        return {
            "layers_per_step": round(layers, 3),
            "layers_saved": round(1 - layers / L, 4),
            "agreement": None if agreement is None else round(agreement, 4),
        }


class DepthSchedule(ExitSteps):
    """`first` layers for the first new token, falling to `last` for that of the n-th step."""

    def __init__(self, decoder: Any, first: int, last: int, n: int):
        super().__init__(decoder)
        self.n, self.first, self.last, L = n, first, last, len(self.model.layers)
        self.models = {d: slice_layers(self.model, 0, d) for d in range(last, min(first + 1, L))}
        self.models[L] = self.model

    def step(self) -> tuple[Tensor, int]:
        d, at = self.decoder, self.decoder.num_cached
        depth = depth_at(at - self.n_prompt, self.n, self.first, self.last)
        self.bytes_skipped = sum(self.layer_bytes[depth:])
        attend = d.attention(d.cache, at + 1)
        return self.models[depth](d.token, d.position, attend)[:, -1], depth

    def agreement(self) -> float | None:
        """Of greedy text without penalties or biases, by one forward pass of the full model."""
        if self.decoder.sampler.features != {"greedy", "temperature"}:
            return None
        tokens = torch.tensor(self.texts, device=self.decoder.token.device)
        expected = self.model(tokens[:, :-1]).argmax(-1)[:, self.n_prompt :]
        return (expected == tokens[:, self.n_prompt + 1 :]).float().mean().item()


# --------------------------------------------------------------------------------------------------
# Exits by confidence
# --------------------------------------------------------------------------------------------------


class ExitThresholds:
    """The ramps' thresholds, tuned to a target: of each `window` consecutive tokens, at least
    target * window are what the full model predicts."""

    def __init__(self, n_ramps: int, target: float, window: int = WINDOW):
        self.budget, self.window = 1 - target, window
        self.values = [math.inf] * n_ramps
        # of each token: (confidence, whether right) of each ramp; whether it was released wrongly
        self.records: deque[tuple[list[tuple[float, bool]], bool]] = deque(maxlen=window)
        self.n_wrong, self.n_new = 0, 0

    def allow(self, n_open: int) -> bool:
        """Whether the budget allows n_open released tokens without feedback all to be wrong."""
        return self.n_wrong + n_open <= self.budget * len(self.records) + 1e-9

    def observe(self, ramps: list[tuple[float, bool]], released: int | None) -> None:
        """Feedback for a token: of each ramp its confidence, and whether it was right; the ramp at
        which the token was released, if any."""
        wrong = released is not None and not ramps[released][1]
        if len(self.records) == self.window:
            self.n_wrong -= self.records[0][1]
        self.records.append((ramps, wrong))
        self.n_wrong, self.n_new = self.n_wrong + wrong, self.n_new + 1
        if wrong or self.n_new >= RETUNE:
            self.tune()

    def tune(self) -> None:
        """Each ramp gets an equal part of the budget, and keeps one error of it in reserve."""
        self.n_new = 0
        allowed = int(self.budget * len(self.records) / len(self.values) + 1e-9) - 1
        for i in range(len(self.values)):
            wrong = (ramps[i][0] for ramps, _ in self.records if not ramps[i][1])
            highest = [math.inf, *heapq.nlargest(allowed + 1, wrong)]
            rejected = highest[allowed + 1] if len(highest) > allowed + 1 else 0.0
            self.values[i] = math.nextafter(rejected, math.inf)


@dataclass
class OpenToken:
    """A token of every row without feedback yet; confidences and predictions (B,) of each ramp."""

    ramps: list[tuple[list[float], list[int]]] = field(default_factory=list)
    released: int | None = None  # at this ramp


class RampExits(ExitSteps):
    """Steps that end at the first ramp that is confident of all rows' tokens. Ramps divide the
    layers into stages. waiting[i]: hidden states (B, T, C) of tokens that were released before
    stage i, which runs them together with the next token that reaches it."""

    def __init__(
        self,
        decoder: Any,
        depths: Sequence[int],
        thresholds: ExitThresholds,
        maps: Sequence[nn.Module] = (),
    ):
        """depths: number of layers before each ramp, rising. maps: see fit_maps."""
        ends = [0, *depths, len(decoder.model.layers)]
        self.stages = [slice_layers(decoder.model, *p, stage=True) for p in pairwise(ends)]
        self.depths, self.thresholds = ends[1:], thresholds
        self.maps = [*(maps or [nn.Identity() for _ in depths]), nn.Identity()]
        super().__init__(decoder)
        size = lambda module: sum(t.nbytes for t in chain(module.parameters(), module.buffers()))
        self.head_bytes, self.map_bytes = size(self.model.head), [*map(size, self.maps)]

    def reset(self) -> None:
        super().reset()
        self.n_released = self.n_compared = self.n_agreed = 0

    def start(self, ids: Sequence[int], first: list[int]) -> None:
        super().start(ids, first)
        self.waiting = [self.model.embed(self.decoder.token)[:, :0]] * len(self.stages)
        self.open: list[OpenToken] = []  # in order; all but the newest have been released

    def step(self) -> tuple[Tensor, int]:
        d, at = self.decoder, self.decoder.num_cached
        attend, x = d.attention(d.cache, at + 1), self.model.embed(d.token)
        self.open.append(OpenToken())
        for i, (stage, depth) in enumerate(zip(self.stages, self.depths)):
            x, self.waiting[i] = torch.cat((self.waiting[i], x), 1), self.waiting[i][:, :0]
            positions = torch.arange(at + 1 - x.shape[1], at + 1, device=x.device)
            x = stage(x, positions, attend)
            logits = self.model.head(self.maps[i](self.model.norm(x)))
            if stage is not self.stages[-1] and self.exits(i, logits):
                self.waiting[i + 1] = torch.cat((self.waiting[i + 1], x), 1)
                self.n_released += 1
                break
        else:
            self.feedback(logits)
        ramps = i * self.head_bytes + sum(self.map_bytes[: i + 1])
        self.bytes_skipped = sum(self.layer_bytes[depth:]) - ramps
        return logits[:, -1], depth

    def exits(self, i: int, logits: Tensor) -> bool:
        """Record the predictions of ramp i, logits (B, T, V) of the last T open tokens; whether the
        newest exits there."""
        best, ids = logits.float().softmax(-1).max(-1)
        columns = zip(self.open[-best.shape[1] :], best.T.tolist(), ids.T.tolist())
        for token, confidences, predictions in columns:
            token.ramps.append((confidences, predictions))
        confident = best[:, -1].min().item() >= self.thresholds.values[i]  # compared in float64
        n = len(self.open)
        if confident and n <= MAX_WAITING and self.thresholds.allow(n * len(best)):
            self.open[-1].released = i
        return self.open[-1].released is not None

    def feedback(self, logits: Tensor) -> None:
        """The full model's logits (B, T, V) of all T open tokens."""
        for token, expected in zip(self.open, logits.argmax(-1).T.tolist()):
            for row, full in enumerate(expected):
                ramps = [(c[row], predicted[row] == full) for c, predicted in token.ramps]
                self.thresholds.observe(ramps, token.released)
                self.n_compared += 1
                self.n_agreed += token.released is None or ramps[token.released][1]
        self.open.clear()

    def agreement(self) -> float | None:
        """Of the most likely tokens, also of sampled text, where all layers have run by now."""
        return self.n_agreed / self.n_compared if self.n_compared else None

    def summary(self) -> dict[str, Any]:
        released = self.n_released / max(1, self.n_steps)
        thresholds = [None if t == math.inf else round(t, 4) for t in self.thresholds.values]
        return super().summary() | {"released": round(released, 4), "thresholds": thresholds}


def normed_states(model: Transformer, depths: Sequence[int], tokens: Tensor) -> list[Tensor]:
    """Hidden states (B, T, C) of tokens (B, T) after each of the depths and after all layers, each
    through the model's final norm."""
    x, states = model.embed(tokens), []
    for ends in pairwise([0, *depths, len(model.layers)]):
        x = slice_layers(model, *ends, stage=True)(x)
        states.append(model.norm(x))
    return states


@torch.inference_mode()
def fit_maps(model: Transformer, depths: Sequence[int], rows: Tensor) -> list[nn.Module]:
    """For each depth an affine map of the normed hidden states after so many layers to those of
    all layers, by ridge regression on the tokens rows (N, T)."""
    C, options = model.config.dim, dict(dtype=torch.float64, device=rows.device)
    gram = torch.zeros(len(depths), C + 1, C + 1, **options)
    cross = torch.zeros(len(depths), C + 1, C, **options)
    for part in rows.split(4):
        *inputs, last = (x.flatten(0, 1).double() for x in normed_states(model, depths, part))
        for i, a in enumerate(F.pad(x, (0, 1), value=1.0) for x in inputs):
            gram[i] += a.T @ a
            cross[i] += a.T @ last
    scale = gram.diagonal(dim1=1, dim2=2).mean(1).view(-1, 1, 1)
    gram, maps = gram + RIDGE * scale * torch.eye(C + 1, **options), []
    for solution in torch.linalg.solve(gram, cross).to(model.embed.weight.dtype):
        maps.append(nn.Linear(C, C, device=rows.device, dtype=solution.dtype).requires_grad_(False))
        maps[-1].weight.copy_(solution[:-1].T)
        maps[-1].bias.copy_(solution[-1])
    return maps


# --------------------------------------------------------------------------------------------------
# --early-exit
# --------------------------------------------------------------------------------------------------


def build_early_exit(args: GenerateConfig, decoder: Any, tokenizer: Tokenizer) -> ExitSteps:
    """The runner of --early-exit for a Decoder. ValueError names the flag."""
    model, L = decoder.model, decoder.model.config.n_layers
    if model.config.has_dynamic_rope:
        raise ValueError(
            "--early-exit cannot be combined with rope_scaling 'dynamic': its frequencies depend "
            "on the length of a forward call; remove --early-exit"
        )
    if isinstance(args.early_exit, tuple):
        first, last = args.early_exit
        if first > L:
            raise ValueError(f"--early-exit {first}:{last}: the model has {L} layers")
        return DepthSchedule(decoder, first, last, args.max_new_tokens - 1)
    depths = args.exit_ramps or [max(1, 2 * L // 3)]
    if depths[-1] >= L:
        raise ValueError(f"--set exit_ramps: no ramp fits after layer {depths[-1]} of {L}")
    maps = ()
    if args.calibration_text is not None:
        text = read_text(args.calibration_text, "--set calibration_text")
        if not text:
            raise ValueError(f"--set calibration_text {args.calibration_text}: the file is empty")
        maps = fit_maps(model, depths, text_rows(tokenizer.encode(text), model))
    return RampExits(decoder, depths, ExitThresholds(len(depths), args.early_exit), maps)


def text_rows(ids: Sequence[int], model: Transformer) -> Tensor:
    """Up to FIT_TOKENS tokens as rows (N, T) for a model."""
    T = min(FIT_ROW, model.config.context, len(ids))
    rows = torch.tensor(ids[:FIT_TOKENS], device=model.embed.weight.device)
    return rows[: len(rows) // T * T].view(-1, T)


@torch.inference_mode()
def ramp_records(
    model: Transformer, depths: Sequence[int], rows: Tensor, maps: Sequence[nn.Module] = ()
) -> list[list[tuple[float, bool]]]:
    """For each token of rows (N, T), in order, each ramp's confidence, and whether its prediction
    is the full model's."""
    maps, records = maps or [nn.Identity() for _ in depths], []
    for part in rows.split(4):
        *states, last = normed_states(model, depths, part)
        full = model.head(last).argmax(-1)
        best = [model.head(f(x)).float().softmax(-1).max(-1) for f, x in zip(maps, states)]
        columns = [zip(c.flatten().tolist(), (ids == full).flatten().tolist()) for c, ids in best]
        records += map(list, zip(*columns))
    return records


@torch.inference_mode()
def main(argv: Sequence[str]) -> None:
    """On held-out text: agreement by depth, and released tokens and agreement by threshold."""
    from huggingface.tokenizer import load_tokenizer
    from huggingface.weights import load_checkpoint
    from training.data import split_documents, stream_documents

    folder = Path(argv[0]) if argv else SHIPPED
    model, encode = load_checkpoint(folder, dtype=torch.float32), load_tokenizer(folder).encode
    split = split_documents(list(stream_documents(None)))
    # the beginnings of files, evenly spaced
    parts = ("\n".join(t[:4096] for t in texts[:: len(texts) // 32 + 1]) for texts in split)
    fit, rows = (text_rows(encode(text), model) for text in parts)
    depths = range(1, len(model.layers))
    print("layers before the ramp".ljust(32), *(f"{d:>12}" for d in depths))
    for name, maps in (("norm and head", ()), ("fitted map", fit_maps(model, depths, fit))):
        columns = list(zip(*ramp_records(model, depths, rows, maps)))
        for t in (0.0, 0.5, 0.8, 0.9, 0.95, 0.99):
            cells = []
            for column in columns:
                released = [right for confidence, right in column if confidence >= t]
                n, n_wrong = len(released), len(released) - sum(released)
                cells.append(f"{n / len(column):.1%} {1 - n_wrong / len(column):.1%}".rjust(12))
            print(f"{name}: released, agreement at {t}".ljust(32), *cells)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as e:
        sys.exit(f"generation.early_exit: error: {e}")
