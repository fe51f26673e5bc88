"""A cascade of two models: the small one answers first, the large one only where it is needed.

    python -m serving.cascade --large DIR --small DIR --target 0.95 --out cascade.json
    python generate.py --checkpoint DIR --cascade cascade.json          also with --serve

FrugalGPT (arXiv:2305.05176) and Tabi (EuroSys 2023): most questions need no large model. The small
one answers; a scorer turns its log-probabilities into the probability that the answer is as good as
the large model's, and below a threshold the large model answers anew. Nothing is shared but text,
so the two may differ in everything, the tokenizer included. The threshold is the whole trade: at 1
the large model answers alone and the small one is not asked, at 0 the large one is never called.

The scorer is a logistic regression on the mean and the minimum of the answer's log-probabilities
and the logarithm of its length (Platt scaling, with two more features: a text is wrong at its least
likely token). It is calibrated: of answers with confidence 0.8 about 80% are right. `main` prints
HELM's expected calibration error (arXiv:2211.09110): the mean over 10 bins of equally many answers
of |share of right answers - mean confidence|. Without a file the confidence is exp(mean), the
geometric mean of the probabilities, which is not calibrated.

`main` fits scorer and threshold on every other prompt, and reports the rest. An answer is right if
it equals the large model's (quality then rises with the threshold, up to 1), or, with --prompts,
the given one (quality may then fall: sometimes only the small model is right). Of the thresholds
that reach the target `main` takes the cheapest. Cost is the weights read per token, which bound
decoding, as a share of the large model's.

CompletionCache is FrugalGPT's other half, for a server: an LRU cache of completions by their exact
prompt and parameters. Similar prompts are not matched: a wrong hit is a wrong answer.

When it loses: an answer sent on is computed twice, and its first token is late by the small model's
whole answer. If the small model costs a share s of the large one, more than s of its answers must
be kept to gain anything: it must be far smaller, and often right. For checkpoints/draft and small s
is 0.23, and a third of continuations by 4 tokens agree: at 94% agreement three in four prompts are
sent on and nothing is gained; for more, `main` recommends threshold 1. Speculation (--speculate
draft) with the same two models keeps the large one's text.

Equivalence (test_all.py): threshold 1 is the large model token for token, threshold 0 the small
one; on held-out text agreement and cost rise with the threshold. Needs: huggingface/.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    raise SystemExit("run: python -m serving.cascade --help")

import argparse
import copy
import json
import math
import sys
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from generation.config import GenerateConfig, parse_args
from huggingface.gguf_checkpoint import is_gguf, source_path
from huggingface.tokenizer import read_json
from huggingface.weights import write_atomically

FEATURES = ("mean log-probability", "minimum", "logarithm of the length")
RIDGE = 1e-2  # of the regression, on standardized features
BINS = 10


# --------------------------------------------------------------------------------------------------
# Confidence
# --------------------------------------------------------------------------------------------------


def features(logprobs: Sequence[float]) -> list[float]:
    """FEATURES of an answer, of one token or more."""
    return [sum(logprobs) / len(logprobs), min(logprobs), math.log(len(logprobs))]


@dataclass(frozen=True)
class Gate:
    """Decides whether an answer of the small model is kept or the large model answers. weights,
    bias: of the scorer; without, the confidence is exp(mean log-probability)."""

    small: str  # the folder of the small model
    threshold: float
    weights: tuple[float, ...] = ()
    bias: float = 0.0

    def confidence(self, logprobs: Sequence[float]) -> float:
        """From 0 to 1."""
        x = features(logprobs)
        if not self.weights:
            return math.exp(x[0])
        score = self.bias + sum(w * f for w, f in zip(self.weights, x))
        return 1 / (1 + math.exp(-max(-500.0, min(score, 500.0))))  # 0 if it is NaN

    @property
    def asks_small(self) -> bool:
        return self.threshold < 1

    def keeps(self, confidence: float) -> bool:
        """Whether an answer is kept. One with a NaN is not, unless the threshold is 0."""
        return self.asks_small and (self.threshold == 0 or confidence >= self.threshold)


def fit_scorer(x: Tensor, right: Tensor) -> tuple[tuple[float, ...], float]:
    """Weights and bias of a ridge logistic regression of right (N,) on features x (N, 3), in
    float64."""
    x, right = x.double(), right.double()
    mean, std = x.mean(0), x.std(0, correction=0).clamp(min=1e-6)
    z = F.pad((x - mean) / std, (0, 1), value=1.0)
    w, eye = z.new_zeros(z.shape[1]), torch.eye(z.shape[1], dtype=z.dtype)
    for _ in range(100):  # Newton's method, with bounded steps
        p = (z @ w).sigmoid()
        gradient = z.T @ (p - right) / len(z) + 2 * RIDGE * w
        hessian = (z.T * (p * (1 - p))) @ z / len(z) + 2 * RIDGE * eye
        step = torch.linalg.solve(hessian, gradient)
        w = w - step * (2 / step.norm()).clamp(max=1)
    weights = w[:-1] / std
    return tuple(weights.tolist()), (w[-1] - weights @ mean).item()


def expected_calibration_error(confidences: Tensor, right: Tensor) -> float:
    """HELM's: bins of equally many answers, by confidence; the mean of |accuracy - confidence|,
    weighted by their sizes. confidences, right (N,)."""
    order = confidences.argsort()
    bins = zip(*(t.double()[order].tensor_split(BINS) for t in (confidences, right)))
    return sum((r.sum() - c.sum()).abs().item() for c, r in bins) / len(order)


# --------------------------------------------------------------------------------------------------
# Thresholds
# --------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """A cascade at one threshold."""

    threshold: float
    sent: float  # share of prompts that the large model answers
    quality: float  # share of right answers
    cost: float  # weights read, as a share of the large model alone


def sweep(
    confidences: Tensor,
    small_right: Tensor,
    large_right: Tensor,
    small_cost: float,
    thresholds: Sequence[float],
) -> list[Point]:
    """The cascade at each threshold. confidences, small_right, large_right: (N,), of the answers of
    the small and the large model; small_cost: of an answer, in answers of the large model."""
    points = []
    for threshold in thresholds:
        gate = Gate("", threshold)
        sent = torch.tensor([not gate.keeps(c) for c in confidences.tolist()])
        right = torch.where(sent, large_right.bool(), small_right.bool())
        share = sent.double().mean().item()
        cost = share + small_cost * gate.asks_small
        points.append(Point(threshold, share, right.double().mean().item(), cost))
    return points


def choose_threshold(points: Sequence[Point], target: float) -> Point:
    """The cheapest point with this quality; the large model alone, threshold 1, if none has it."""
    good = [p for p in points if p.quality >= target]
    return min(good, key=lambda p: p.cost, default=points[-1])


# --------------------------------------------------------------------------------------------------
# Completions
# --------------------------------------------------------------------------------------------------


class CompletionCache:
    """Completions by key, max_size tokens at most: the least recently used are evicted."""

    def __init__(self, max_size: int = 2**18):
        self.max_size, self.size, self.hits, self.misses = max_size, 0, 0, 0
        self.entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def get(self, key: Hashable) -> Any:
        """The completion of a key, None if there is none."""
        if key not in self.entries:
            self.misses += 1
            return None
        self.hits += 1
        self.entries.move_to_end(key)
        return self.entries[key][0]

    def put(self, key: Hashable, completion: Any, size: int) -> None:
        """Keep a completion of `size` tokens, prompt included."""
        self.size += size - self.entries.pop(key, (None, 0))[1]
        self.entries[key] = completion, size
        while self.size > self.max_size:
            self.size -= self.entries.popitem(last=False)[1][1]


# --------------------------------------------------------------------------------------------------
# --cascade
# --------------------------------------------------------------------------------------------------


def read_gate(args: GenerateConfig) -> Gate:
    """The Gate of --cascade DIR or FILE.json. ValueError names flag, file and field."""
    path, threshold = args.cascade, args.cascade_threshold
    if path.is_dir() or is_gguf(path):
        if threshold is None:
            raise ValueError(
                f"--cascade {path} requires --cascade-threshold X, or give the file that python -m "
                "serving.cascade wrote"
            )
        return Gate(str(path), threshold)
    if not path.is_file():
        raise ValueError(f"--cascade {path}: neither a checkpoint nor a file")
    found, n, is_text = read_json(path), len(FEATURES), lambda x: isinstance(x, str)
    is_number = lambda x: type(x) in (int, float) and abs(x) < 1e300
    are_weights = lambda x: isinstance(x, list) and len(x) == n and all(map(is_number, x))
    for name, is_valid, wanted in (
        ("small", is_text, "a folder"), ("large", is_text, "a folder"),
        ("threshold", lambda x: is_number(x) and 0 <= x <= 1, "a number from 0 to 1"),
        ("weights", are_weights, f"{n} numbers"), ("bias", is_number, "a number"),
    ):  # fmt: skip
        if not is_valid(found.get(name)):
            raise ValueError(f"{path}: {name} must be {wanted}, not {found.get(name)!r}")
    if Path(found["large"]) != source_path(args.checkpoint).resolve():
        raise ValueError(f"{path}: was fitted for --checkpoint {found['large']}; fit it for yours")
    threshold = found["threshold"] if threshold is None else threshold
    return Gate(found["small"], threshold, tuple(found["weights"]), found["bias"])


def small_args(args: GenerateConfig, gate: Gate) -> GenerateConfig:
    """The flags that run the small model: those of the large one, without what belongs to it."""
    small = copy.copy(args)
    small.checkpoint, small.cascade = Path(gate.small), None
    for name in ("adapter", "quantize", "calibrate", "speculate", "early_exit", "offload"):
        setattr(small, name, None)
    small.logprobs = 0
    return small


# --------------------------------------------------------------------------------------------------
# Fitting
# --------------------------------------------------------------------------------------------------

PROMPT_CHARACTERS = 240


def text_prompts(text: str, n: int) -> list[str]:
    """Up to n different prompts, evenly spaced in a text, from a line's start to before a space."""
    prompts, n = [], min(n, len(text))
    for i in range(n):
        start = text.find("\n", i * max(0, len(text) - 2 * PROMPT_CHARACTERS) // n) + 1
        prompts.append(text[start : start + PROMPT_CHARACTERS].rpartition(" ")[0].rstrip())
    return list(dict.fromkeys(filter(None, prompts)))


class Answers(NamedTuple):
    """A model's answers to all prompts."""

    texts: list[str]
    logprobs: list[list[float]]  # of the tokens of each
    weight_bytes: int  # that a token reads


def answer_all(folder: Path, prompts: Sequence[str], max_new_tokens: int) -> Answers:
    """Greedy answers, up to the end of the line."""
    from generation.bench import weight_bytes
    from generation.load import load, open_gguf, pick_device
    from huggingface.tokenizer import eos_ids
    from paged_kv import SamplingParams
    from serving.batch import Request, Service, num_available_blocks

    args = parse_args(["--checkpoint", str(folder)])
    with open_gguf(args):
        model, tokenizer = load(args, pick_device(args.device))
        eos = eos_ids(args.checkpoint, model.config.eos_ids, tokenizer)
    service = Service(model, tokenizer, eos, num_blocks=num_available_blocks(model, 16, 64, None))
    params = SamplingParams(0.0, max_new_tokens=max_new_tokens, stop=("\n",), logprobs=0)
    requests = [Request(str(i), i, tokenizer.encode(p), params) for i, p in enumerate(prompts)]
    outputs = [*map(service.add, requests)]
    while service.engine.unfinished:
        service.step()
    if errors := [output.error for output in outputs if output.error is not None]:
        raise ValueError(f"{folder}: {errors[0]}")
    texts = [request.samples[0].text for request in requests]
    logprobs = [[entry[0] for entry in output.logprobs] for output in outputs]
    return Answers(texts, logprobs, weight_bytes(model))


def print_points(points: Sequence[Point], quality: str) -> None:
    """A line for each threshold."""
    print(f"{'threshold':>10}{'sent on':>10}{quality:>12}{'cost':>8}")
    for p in points:
        print(f"{p.threshold:10.4f}{p.sent:10.1%}{p.quality:12.1%}{p.cost:8.2f}")


def plot(points: Sequence[Point], quality: str, path: Path) -> None:
    """Quality against cost, a point for each threshold."""
    from training.metrics import pyplot

    figure, axes = pyplot().subplots(figsize=(7, 4))
    axes.plot([p.cost for p in points], [p.quality for p in points], marker="o")
    for p in points:
        axes.annotate(f"{p.threshold:.2f}", (p.cost, p.quality), fontsize=8)
    axes.axvline(1.0, color="gray", linestyle=":", label="the large model alone")
    axes.set(xlabel="weights read, of the large model's", ylabel=quality)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
    """Fit scorer and threshold on every other prompt; print the cascade on the rest."""
    parser = argparse.ArgumentParser(prog="python -m serving.cascade", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for flag, text in (("--large", "checkpoint folder"), ("--small", "checkpoint folder")):
        parser.add_argument(flag, type=Path, required=True, metavar="DIR", help=text)
    add = parser.add_argument
    add("--target", type=float, default=0.95, help="share of right answers (0.95)")
    add("--data", metavar="PATH", help="text, as train.py's (default: held-out Python)")
    add("--prompts", type=Path, metavar="FILE.jsonl", help='lines of "prompt" and "answer"')
    add("--n", type=int, default=256, help="prompts taken from the text (256)")
    add("--max-new-tokens", type=int, default=4, help="of an answer (4)")
    add("--out", type=Path, metavar="FILE.json", help="write scorer and threshold")
    add("--plot", type=Path, metavar="FILE.png", help="quality against cost")
    args = parser.parse_args(argv)
    try:
        fit(args)
    except (ValueError, OSError) as e:
        sys.exit(f"serving.cascade: error: {e}")


def fit(args: argparse.Namespace) -> None:
    """main, with its flags. ValueError names the flag or the file."""
    prompts, expected = read_data(args)
    small, large = (answer_all(f, prompts, args.max_new_tokens) for f in (args.small, args.large))
    is_right = lambda answers: torch.tensor(
        [a.strip() == b.strip() for a, b in zip(answers.texts, expected or large.texts)]
    )
    right, large_right = is_right(small), is_right(large)
    x = torch.tensor([*map(features, small.logprobs)], dtype=torch.float64)
    gate = Gate(str(args.small.resolve()), 1.0, *fit_scorer(x[::2], right[::2]))
    of = lambda g: torch.tensor([*map(g.confidence, small.logprobs)], dtype=torch.float64)
    confidences, raw = of(gate), of(Gate("", 1.0))
    data, cost = (confidences, right, large_right), small.weight_bytes / large.weight_bytes
    # first 0: the prompts that the cascade is fitted to; 1: the rest
    sweep_half = lambda first, thresholds: sweep(*(t[first::2] for t in data), cost, thresholds)
    every = [0.0, *sorted(set(confidences[::2].tolist())), 1.0]
    threshold = choose_threshold(sweep_half(0, every), args.target).threshold
    points = sweep_half(1, [*(i / 10 for i in range(10)), 0.95, 1.0])
    (held_out,) = sweep_half(1, [threshold])
    quality = "accuracy" if expected else "agreement"
    print_points(points, quality)
    print(f"threshold for {args.target:.0%}, on prompts that it was not fitted to:")
    print_points([held_out], quality)
    errors = [expected_calibration_error(c[1::2], right[1::2]) for c in (raw, confidences)]
    print("expected calibration error: exp(mean) {:.3f}, scorer {:.3f}".format(*errors))
    if args.plot is not None:
        plot(points, quality, args.plot)
    if args.out is not None:
        found = asdict(replace(gate, threshold=threshold))
        found |= {"large": str(args.large.resolve()), "target": args.target, "measure": quality}
        found |= {"held_out": held_out._asdict(), "expected_calibration_error": errors[1]}
        text = json.dumps(found, indent=1) + "\n"
        write_atomically(args.out, lambda tmp: tmp.write_text(text, encoding="utf-8"))


def read_data(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The prompts, and their answers if they are given. ValueError names flag and file."""
    from training.chats import read_prompts
    from training.data import is_validation, stream_documents

    if not 0 < args.target <= 1:
        raise ValueError(f"--target must be more than 0, and 1 at most, not {args.target}")
    for flag, value, least in (("n", args.n, 2), ("max-new-tokens", args.max_new_tokens, 1)):
        if value < least:
            raise ValueError(f"--{flag} must be {least} or more, not {value}")
    if args.plot is not None:
        from training.metrics import pyplot

        pyplot()  # before the work: whether it is installed
    for path in filter(None, (args.out, args.plot)):
        if not path.parent.is_dir():
            raise ValueError(f"{path}: folder {path.parent} does not exist")
    if args.prompts is not None:
        pairs = read_prompts(args.prompts)
        plain = all(isinstance(pair.prompt, str) and pair.tools is None for pair in pairs)
        if len(pairs) < 2 or not plain:
            why = "give two or more lines whose prompt is a string, without tools"
            raise ValueError(f"{args.prompts}: {why}")
        return [pair.prompt for pair in pairs], [pair.answer for pair in pairs]
    docs = stream_documents(args.data)
    text = "\n".join(t for name, t in docs if args.data is not None or is_validation(name))
    prompts = text_prompts(text, args.n)
    if len(prompts) < 2:
        raise ValueError(f"--data {args.data}: too short for two different prompts")
    return prompts, []


if __name__ == "__main__":
    with torch.inference_mode():
        main()
