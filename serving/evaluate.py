"""Scores of texts that are given: perplexity, and accuracy on multiple-choice questions.

    python generate.py --perplexity FILE
    python generate.py --choices TASK.jsonl --num-fewshot 5
    python generate.py --choices                                  the next line of Python, of four
    python generate.py --quantize-report --choices TASK.jsonl     what each scheme loses

Both sum log-probabilities of given tokens; nothing is generated. Perplexity is exp of the mean loss
per token of a text, in a sliding window of the model's context. It depends on the tokenizer: bits
per byte compare models of different vocabularies.

Accuracy is counted as lm-eval counts it. A line of TASK.jsonl is
{"prompt": "Q: 2 + 2?\\nA:", "choices": [" 3", " 4"], "answer": 1}. The answer is the choice with
the highest log-likelihood after the prompt (acc), or per character (acc_norm), because a sum over
tokens prefers short choices: the two numbers that the Open LLM Leaderboard and EleutherAI's lm-eval
print. A space or newline that begins a choice is not one of its characters: it is lm-eval's
target_delimiter. The K answered questions in front (--num-fewshot) are the first K others of the
file, or of --set fewshot=FILE, each followed by an empty line. A context that is too long loses its
first tokens.

Calibration (HELM, arXiv:2211.09110): the confidence in an answer is its share of the likelihood of
all choices; the expected calibration error is the mean, over ten bins of equally many answers, of
|share of right answers - mean confidence| (serving/cascade.py). Below 100 questions a bin has
few, and the error is mostly noise; acc_stderr says how far chance alone moves the accuracy.

Without a file, a question is twelve lines of a held-out file of Python's standard library, and the
choices are the line that follows and three others of that file. It needs no download and separates
schemes; it is no benchmark that others report.

Cost: the tokens of every choice and of the prompts. All are prompts of one continuous batch
(paged_kv.py's Engine), whose prefix cache computes the few-shot examples once and a question's
prompt once for its choices. A text is prefilled by generate.py without the Engine, and one longer
than the context costs twice its tokens. When it loses: for a single question; a scheme whose
activations are quantized over all rows of a call (llm.int8) scores a choice by what else is in the
batch.

Equivalence (test_all.py): log-likelihoods and scores == log_softmax of the plain forward;
accuracies == those of lm-eval on the same task, which runs this model by serving/lm_eval_model.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from generation.bench import device_name
from generation.config import GenerateConfig
from generation.ranks import rank0_then_broadcast
from generation.sampling import logprobs_of
from huggingface.tokenizer import Tokenizer, logprob_entry
from model import KVCache, Transformer
from paged_kv import Output, SamplingParams
from serving.cascade import expected_calibration_error
from training.chats import Question, read_questions
from training.data import is_validation, stream_documents

if TYPE_CHECKING:  # --perplexity does not wait for the Service's imports: see the functions
    from serving.batch import Service

QUEUED = 256  # requests that the engine has at most, so that a large task is encoded as it runs
PROMPT_LINES, QUESTIONS_PER_FILE = 12, 4  # of the questions without a file
Pair = tuple[list[int], list[int]]  # token ids of a context and of its continuation
Prefill = Callable[[Transformer, Tensor, KVCache], Iterator[tuple[int, Tensor]]]
"""generate.prefill_chunks"""


# --------------------------------------------------------------------------------------------------
# Perplexity
# --------------------------------------------------------------------------------------------------


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


# --------------------------------------------------------------------------------------------------
# Multiple-choice questions
# --------------------------------------------------------------------------------------------------


def read_task(args: GenerateConfig) -> list[Question]:
    """The questions of --choices, with the few-shot examples in their prompts. ValueError names
    flag and file."""
    examples = None if args.fewshot is None else read_file("--set fewshot=", args.fewshot)
    questions = read_file("--choices ", args.choices) if args.choices else python_questions()
    examples = examples or questions
    source = str(args.fewshot or args.choices or "the standard library")
    return [add_examples(examples, args.num_fewshot, source, q) for q in questions]


def read_file(flag: str, path: str | Path) -> list[Question]:
    """The questions of a file. ValueError begins with the flag."""
    try:
        return read_questions(Path(path))
    except (ValueError, OSError) as e:
        text = str(e) if isinstance(e, ValueError) else f"{path}: {e.strerror}; give a JSONL file"
        raise ValueError(flag + text) from None


def add_examples(examples: Sequence[Question], K: int, source: str, question: Question) -> Question:
    """The question after the first K others of the examples, answered. ValueError, which names the
    source, if there are fewer."""
    shots = [*islice((e for e in examples if e != question), K)]
    if len(shots) < K:
        text = f"{source} has {len(shots)} other questions than {question.prompt[-40:]!r}"
        raise ValueError(f"--num-fewshot {K}: {text}")
    before = "".join(f"{e.prompt}{e.choices[e.answer]}\n\n" for e in shots)
    return question._replace(prompt=before + question.prompt)


def python_questions() -> list[Question]:
    """Which line follows PROMPT_LINES lines of a held-out file of Python's standard library. The
    choices begin with their newline; none is in the prompt."""
    rng, found = random.Random(0), []
    for _, text in (doc for doc in stream_documents(None) if is_validation(doc[0])):
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) < 8 * PROMPT_LINES:
            continue
        for _ in range(QUESTIONS_PER_FILE):
            at = rng.randrange(PROMPT_LINES, len(lines))
            right, before = lines[at], lines[at - PROMPT_LINES : at]
            choices = [right, *rng.sample(sorted({*lines} - {right, *before}), 3)]
            rng.shuffle(choices)
            if right not in before:
                texts, answer = ["\n" + choice for choice in choices], choices.index(right)
                found.append(Question("\n".join(before), texts, answer))
    return found


# --------------------------------------------------------------------------------------------------
# Log-likelihoods of choices
# --------------------------------------------------------------------------------------------------


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Pair:
    """Ids of a context and of its continuation, split where the context alone would end; spaces at
    the context's end belong to the continuation, as tokenizers have them."""
    stripped = context.rstrip()
    whole = tokenizer.encode(context + continuation)
    n = len(tokenizer.encode(stripped))
    return whole[:n], whole[n:]


def encode_pairs(service: Service, texts: Iterable[tuple[str, str]]) -> Iterator[Pair]:
    """encode_pair of each; what has no context follows first_token."""
    for context, continuation in texts:
        before, ids = encode_pair(service.tokenizer, context, continuation)
        yield before or first_token(service), ids


def first_token(service: Service) -> list[int]:
    """What a text without context follows, as in lm-eval: BOS, or EOS if the tokenizer has none."""
    return (service.tokenizer.encode("") or [*service.eos])[:1]


def run_requests(service: Service, requests: Iterable[tuple[Any, ...]]) -> list[Output]:
    """Run requests, each with further arguments of Service.add, as one continuous batch."""
    outputs = []
    for request in requests:
        outputs.append(service.add(*request))
        while len(service.engine.outputs) >= QUEUED:
            service.step()
    while service.engine.unfinished:
        service.step()
    if errors := [output.error for output in outputs if output.error is not None]:
        raise ValueError(errors[0])
    return outputs


def loglikelihoods(service: Service, pairs: Iterable[Pair]) -> list[tuple[float, bool]]:
    """For each pair the log-probability of the continuation, in nats, and whether it is what greedy
    decoding gives. ValueError if one is empty or too long."""
    from serving.batch import Request

    limit = service.engine.model.config.context - 1  # one token is sampled
    params = SamplingParams(temperature=0.0, max_new_tokens=1)

    def request(i: int, context: list[int], continuation: list[int]) -> tuple[Any, ...]:
        ids = (context + continuation)[-limit:]
        start = len(ids) - len(continuation)
        if not 0 < start < len(ids):
            text, n = service.tokenizer.decode(continuation[:10]), len(continuation)
            raise ValueError(f"{text!r}... has {n} tokens; a choice must have 1 to {limit - 1}")
        return Request(str(i), i, ids, params), 1, start  # 1: the most likely token beside it

    scores = []
    for output in run_requests(service, (request(i, *pair) for i, pair in enumerate(pairs))):
        entries, tokens = output.prompt_logprobs, output.prompt_ids[output.prompt_logprobs_from :]
        is_greedy = all(best[0] == token for token, (_, best, _) in zip(tokens, entries))
        scores.append((sum(logprob for logprob, *_ in entries), is_greedy))
    return scores


def score_choices(service: Service, questions: Sequence[Question]) -> list[list[float]]:
    """The log-likelihoods of the choices of each question."""
    pairs = encode_pairs(service, ((q.prompt, choice) for q in questions for choice in q.choices))
    scores = iter(loglikelihoods(service, pairs))
    return [[next(scores)[0] for _ in q.choices] for q in questions]


# --------------------------------------------------------------------------------------------------
# Metrics
# --------------------------------------------------------------------------------------------------


@dataclass
class Accuracy:
    """What --choices prints. stderr: standard errors of the means, nan of one question."""

    questions: int
    acc: float  # the most likely choice is right
    acc_stderr: float
    acc_norm: float  # the most likely one per character is
    acc_norm_stderr: float
    expected_calibration_error: float


def characters(choice: str) -> int:
    """Without the space or newline that begins it, at least 1."""
    return max(1, len(choice) - choice[:1].isspace())


def accuracy(questions: Sequence[Question], scores: Sequence[Sequence[float]]) -> Accuracy:
    """scores: score_choices(). Of equal scores the first choice counts."""
    right, right_norm, confidences = [], [], []
    for q, of in zip(questions, scores, strict=True):
        per_character = [s / characters(choice) for s, choice in zip(of, q.choices)]
        best, best_norm = (max(range(len(x)), key=x.__getitem__) for x in (of, per_character))
        right.append(float(best == q.answer))
        right_norm.append(float(best_norm == q.answer))
        confidences.append(1 / sum(math.exp(s - of[best]) for s in of))
    mean, n = statistics.fmean, len(right)

    def stderr(x: Sequence[float]) -> float:
        return statistics.stdev(x) / math.sqrt(n) if n > 1 else math.nan

    error = expected_calibration_error(torch.tensor(confidences), torch.tensor(right))
    return Accuracy(n, mean(right), stderr(right), mean(right_norm), stderr(right_norm), error)


def acc_and_norm(
    questions: Sequence[Question], tokenizer: Tokenizer, model: Transformer
) -> tuple[float, float]:
    """acc and acc_norm of a model that is loaded already, by an Engine of its own."""
    from serving.batch import Service, num_available_blocks

    blocks = num_available_blocks(model, 16, 64, None)
    service = Service(model, tokenizer, model.config.eos_ids, num_blocks=blocks)
    found = accuracy(questions, score_choices(service, questions))
    return found.acc, found.acc_norm


def run(args: GenerateConfig) -> None:
    """--choices: print the Accuracy, with --json also the log-likelihoods of all choices."""
    from serving.build import build_service

    questions = rank0_then_broadcast(partial(read_task, args))
    service, start = build_service(args), time.perf_counter()
    scores = score_choices(service, questions)
    seconds, engine = time.perf_counter() - start, service.engine
    found = vars(accuracy(questions, scores))
    if args.json:
        found = {name: None if math.isnan(value) else value for name, value in found.items()}
        print(json.dumps(found | {"loglikelihoods": scores}))
    else:
        lines = (f"{name.replace('_', ' ')}: {value:.6g}" for name, value in found.items())
        print("\n".join(lines))
    stats = f"{engine.n_arrivals} choices, {engine.counts['steps']} steps, {seconds:.2f} s; "
    stats += f"{engine.scheduler.n_hit_tokens} of {engine.scheduler.n_admitted_tokens} tokens were "
    device = device_name(engine.model.embed.weight.device, args.mesh)
    print(f"[{device}] {stats}cached", file=sys.stderr)
