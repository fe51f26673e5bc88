"""Simulated workers that serve variants of a model: a latency table, and the loop over events.

A Variant is an accuracy and the seconds of a batch by its size; simulate() runs arrivals, ends of
batches and failures of workers on one queue ordered by deadline, and asks a Policy
(planner/variants.py) for each batch. A query whose deadline no variant of its model can meet any
more is dropped, as in Clockwork (OSDI 2020) and SHEPHERD (NSDI 2023): each query is served once or
dropped once, and a worker has one batch at a time. Not modelled: loading a variant (all of them
stay in memory) and interference between workers.

calibrate() measures variants.json. A query is a prompt of 64 tokens of held-out text, its answer
the next token. The variants are the checkpoint in bf16, int8 and int4, its first layers (the
weight-shared subnets of SuperServe, run by early_exit.slice_layers), and it on the last tokens of
the prompt (subsets of the input, as MOSEL's modalities); then smaller checkpoints.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import itertools
import math
import statistics
import time
from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Variant:
    """A way to answer a query: accuracy in [0, 1], seconds by batch size, and the price of one
    second on one worker. A batch is padded to the next size of the table. An ensemble runs one
    member on each of several workers; degraded[i] is what remains without member i."""

    name: str
    accuracy: float
    latency: Mapping[int, float]
    cost: float = 1.0
    model: str = ""
    degraded: tuple[Variant, ...] = ()

    @property
    def workers(self) -> int:
        """Workers that one batch occupies."""
        return len(self.degraded) or 1


@dataclass(frozen=True, order=True)
class Query:
    """A query to `model`: times in seconds, and the accuracy that its variant should have."""

    deadline: float
    index: int
    arrival: float
    floor: float = 0.0
    model: str = ""


class Choice(NamedTuple):
    """A policy's decision: a batch and its variant, which takes `seconds`."""

    variant: Variant
    queries: list[Query]
    seconds: float


@dataclass(eq=False)
class Run:
    """A batch being served on `workers`, one per member of the variant."""

    choice: Choice
    workers: list[int]
    start: float
    variant: Variant  # that of the choice, less the members whose worker was lost


Choose = Callable[[list[Query], float, "Pool"], Choice]


@dataclass(frozen=True)
class Policy:
    """choose(queue, now, pool): the next batch; called while the queue is not empty and a worker is
    idle. preempt: a running batch and what replaces it, called when no worker is idle. scale: the
    number of workers wanted."""

    choose: Choose
    preempt: Callable[[list[Query], float, Pool], tuple[Run, Choice] | None] | None = None
    scale: Callable[[float, Pool], int] | None = None


@dataclass
class Result:
    """What happened: (query, variant, start, finish) of the served, the dropped, the (worker,
    start, end, lost) intervals in which workers were busy; the price of these, and the seconds for
    which workers were rented."""

    served: list[tuple[Query, Variant, float, float]] = field(default_factory=list)
    dropped: list[Query] = field(default_factory=list)
    busy: list[tuple[int, float, float, bool]] = field(default_factory=list)
    cost: float = 0.0
    rented: float = 0.0

    @property
    def total(self) -> int:
        """The number of queries."""
        return len(self.served) + len(self.dropped)

    @property
    def in_time(self) -> float:
        """Share of all queries that are answered by their deadline."""
        return sum(end <= q.deadline for q, _, _, end in self.served) / max(1, self.total)

    @property
    def attainment(self) -> float:
        """Share of all queries that are answered in time by a variant above their floor."""
        met = (v.accuracy >= q.floor and end <= q.deadline for q, v, _, end in self.served)
        return sum(met) / max(1, self.total)

    @property
    def accuracy(self) -> float:
        """Mean accuracy of the answers."""
        return statistics.fmean(r[1].accuracy for r in self.served) if self.served else 0.0

    @property
    def quality(self) -> float:
        """Quality under deadlines: mean over all queries of the accuracy, 0 if late or dropped."""
        right = (v.accuracy for q, v, _, end in self.served if end <= q.deadline)
        return sum(right) / max(1, self.total)

    @property
    def lost(self) -> float:
        """Worker seconds of batches that were preempted or whose worker failed."""
        return sum(end - start for _, start, end, lost in self.busy if lost)


class Pool:
    """The workers and their running batches; what a policy sees, and the loop of simulate()."""

    def __init__(self, variants: Sequence[Variant], workers: int, startup: float):
        self.variants, self.limit, self.startup = list(variants), workers, startup
        self.idle: set[int] = set()
        self.runs: list[Run] = []
        self.arrivals: list[float] = []
        self.queue: list[Query] = []
        self.rented_since: dict[int, float] = {}
        self.events: list[tuple[float, int, Callable[[Any, float], None], Any]] = []
        self.count = itertools.count()
        self.result = Result()
        self.answers, self.accuracy_sum = 0, 0.0  # of all batches started and not requeued

    def push(self, when: float, handle: Callable[[Any, float], None], item: Any) -> None:
        """Call handle(item, when) at a time; simultaneous events keep their order."""
        heappush(self.events, (when, next(self.count), handle, item))

    def arrive(self, query: Query, now: float) -> None:
        """A query arrives."""
        self.arrivals.append(now)
        insort(self.queue, query)

    def rent(self, worker: int, now: float) -> None:
        """A worker is ready."""
        self.idle.add(worker)

    def begin(self, choice: Choice, now: float) -> None:
        """Start a batch on idle workers, those with the lowest numbers."""
        variant = choice.variant
        assert choice.queries and variant.workers <= len(self.idle), "a batch without a worker"
        workers = sorted(self.idle)[: variant.workers]
        self.idle -= {*workers}
        for query in choice.queries:
            self.queue.remove(query)
        self.runs.append(run := Run(choice, workers, now, variant))
        self._count(run, 1)
        self.push(now + choice.seconds, self.finish, run)

    def _count(self, run: Run, sign: int) -> None:
        n = sign * len(run.choice.queries)
        self.answers += n
        self.accuracy_sum += n * run.variant.accuracy

    def release(self, run: Run, worker: int, now: float, lost: bool) -> None:
        """Account for the worker's time in a batch that it leaves."""
        self.result.busy.append((worker, run.start, now, lost))
        self.result.cost += (now - run.start) * run.choice.variant.cost
        self.idle.add(worker)

    def finish(self, run: Run, now: float) -> None:
        """A batch is done, unless it was stopped."""
        if run not in self.runs:
            return
        self.runs.remove(run)
        for worker in run.workers:
            self.release(run, worker, now, lost=False)
        self.result.served += [(q, run.variant, run.start, now) for q in run.choice.queries]

    def stop(self, run: Run, now: float) -> None:
        """Preempt a batch: its queries return to the queue, its work is lost."""
        self.runs.remove(run)
        self._count(run, -1)
        for worker in run.workers:
            self.release(run, worker, now, lost=True)
        for query in run.choice.queries:
            insort(self.queue, query)

    def kill(self, worker: int, now: float) -> None:
        """A spot worker is taken away. An ensemble continues without its member; any other batch
        returns to the queue. A replacement is ready after `startup` seconds."""
        run = next((r for r in self.runs if worker in r.workers), None)
        if run is None and worker not in self.idle:
            return  # not rented, or not ready
        if run is not None and run.variant.degraded:
            self._count(run, -1)
            run.variant = run.variant.degraded[run.workers.index(worker)]
            self._count(run, 1)
            run.workers.remove(worker)
            self.release(run, worker, now, lost=True)
        elif run is not None:
            self.stop(run, now)
        self.retire(worker, now)
        self.add_worker(now)

    def retire(self, worker: int, now: float) -> None:
        """Give an idle worker back."""
        self.idle.remove(worker)
        self.result.rented += now - self.rented_since.pop(worker)

    def add_worker(self, now: float, startup: float | None = None) -> None:
        """Rent a worker, the lowest number that is free; it is ready after `startup` seconds."""
        worker = next(w for w in itertools.count() if w not in self.rented_since)
        self.rented_since[worker] = now
        self.push(now + (self.startup if startup is None else startup), self.rent, worker)

    def dispatch(self, policy: Policy, now: float) -> None:
        """Drop what is too late, then start batches until workers or queries run out."""
        fastest: dict[str, float] = {}
        for v in self.variants:
            fastest[v.model] = min(fastest.get(v.model, math.inf), v.latency[min(v.latency)])
        late = {q.index for q in self.queue if now + fastest[q.model] > q.deadline}
        self.result.dropped += [q for q in self.queue if q.index in late]
        self.queue = [q for q in self.queue if q.index not in late]
        while self.queue and self.idle:
            self.begin(policy.choose(self.queue, now, self), now)
        if self.queue and policy.preempt and (swap := policy.preempt(self.queue, now, self)):
            self.stop(swap[0], now)
            self.begin(swap[1], now)
        if policy.scale:
            wanted = min(self.limit, max(1, policy.scale(now, self)))
            for _ in range(wanted - len(self.rented_since)):
                self.add_worker(now)
            for worker in sorted(self.idle)[: max(0, len(self.rented_since) - wanted)]:
                self.retire(worker, now)


def simulate(
    queries: Sequence[Query],
    variants: Sequence[Variant],
    policy: Policy,
    workers: int = 2,
    kills: Iterable[tuple[float, int]] = (),
    startup: float = 0.0,
) -> Result:
    """Serve all queries. kills: (time, worker) of spot workers taken away, which are replaced after
    `startup` seconds, as are those that the policy adds. ValueError if no variant is of a query's
    model."""
    models = {v.model for v in variants if v.workers == 1}
    if unknown := {q.model for q in queries} - models:
        raise ValueError(f"queries: no variant of model {min(unknown)!r}; there are {[*models]}")
    pool = Pool(variants, workers, startup)
    for _ in range(workers):
        pool.add_worker(0.0, startup=0.0)
    for query in queries:
        pool.push(query.arrival, pool.arrive, query)
    for when, worker in kills:
        pool.push(when, pool.kill, worker)
    now, last = 0.0, max((q.deadline for q in queries), default=0.0)
    while pool.events and (pool.runs or pool.queue or pool.events[0][0] <= last):
        now, _, handle, item = heappop(pool.events)
        handle(item, now)
        if not (pool.events and pool.events[0][0] == now):
            pool.dispatch(policy, now)
    for worker in [*pool.rented_since]:
        pool.result.rented += now - pool.rented_since.pop(worker)
    return pool.result


# --------------------------------------------------------------------------------------------------
# The measured table
# --------------------------------------------------------------------------------------------------

PROMPT, SIZES, MEMBERS = 64, (1, 2, 4, 8, 16), ("small", "draft", "moe", "small-int4")


def build_forms(folders: Sequence[Path]) -> dict[str, tuple[Any, int]]:
    """{name: (model, tokens of the prompt that it sees)}: the first checkpoint in all forms, the
    others as they are. ValueError if one cannot be loaded or its tokenizer differs."""
    from generation.config import parse_args
    from generation.early_exit import slice_layers
    from generation.load import load, open_gguf, pick_device

    def loaded(folder: Path, *flags: str) -> Any:
        args = parse_args(["--checkpoint", str(folder), *flags])
        with open_gguf(args):
            model, tokenizer = load(args, pick_device(args.device))
        if tokenizer.vocab_size != vocab.setdefault("size", tokenizer.vocab_size):
            raise ValueError(f"--checkpoint {folder}: its tokenizer differs from {folders[0]}'s")
        return model

    vocab: dict[str, int] = {}
    name, model = folders[0].name, loaded(folders[0])
    forms = {name: (model, PROMPT)}
    for scheme in ("int8", "int4"):
        forms[f"{name}-{scheme}"] = loaded(folders[0], "--quantize", scheme), PROMPT
    for n in range(model.config.n_layers - 1, model.config.n_layers // 2, -1):
        forms[f"{name}-layers{n}"] = slice_layers(model, 0, n), PROMPT
    for n in (PROMPT // 2, PROMPT // 4):
        forms[f"{name}-last{n}"] = model, n
    return forms | {folder.name: (loaded(folder), PROMPT) for folder in folders[1:]}


def held_out_prompts(folder: Path, n: int) -> Tensor:
    """(n, PROMPT + 1) tokens, evenly spaced in train.py's validation files of the standard library;
    the last one is the answer."""
    from huggingface.tokenizer import load_tokenizer
    from training.data import is_validation, stream_documents

    encode = load_tokenizer(folder).encode
    ids = [t for name, text in stream_documents(None) if is_validation(name) for t in encode(text)]
    starts = torch.linspace(0, len(ids) - PROMPT - 1, n).long()
    return torch.tensor(ids)[starts[:, None] + torch.arange(PROMPT + 1)]


@torch.inference_mode()
def calibrate(folders: Sequence[Path], n: int = 1024, rounds: int = 20) -> dict[str, Any]:
    """The table of variants.json. Accuracy and loss are of n held-out prompts; the seconds are the
    fastest of `rounds` runs, in which all forms take turns. The votes' class weights are counted on
    as many other prompts. On a CPU a worker is one thread."""
    from generation.bench import device_name, synchronize

    torch.set_num_threads(1)
    forms, data = build_forms(folders), held_out_prompts(folders[0], 2 * n)
    device = next(iter(forms.values()))[0].embed.weight.device
    data = data.to(device)

    def answer(name: str, rows: Tensor) -> Tensor:
        model, seen = forms[name]
        hidden = model(rows[:, PROMPT - seen : PROMPT], return_hidden=True)
        return model.head(hidden[:, -1])

    seconds = {name: dict.fromkeys(SIZES, math.inf) for name in forms}
    for size, name in itertools.product(SIZES * rounds, forms):
        synchronize(device)
        start = time.perf_counter()
        answer(name, data[:size])
        synchronize(device)
        seconds[name][size] = min(seconds[name][size], time.perf_counter() - start)
    rows, answers, truth = [], {}, data[:, -1]
    for name in forms:
        logits = torch.cat([answer(name, part).float() for part in data.split(64)])
        loss = torch.nn.functional.cross_entropy(logits[1::2], truth[1::2]).item()
        answers[name] = logits.argmax(-1)
        accuracy = (answers[name] == truth)[1::2].float().mean().item()
        latency = {size: float(f"{s:.4g}") for size, s in seconds[name].items()}
        row = {"name": name, "accuracy": round(accuracy, 4), "loss": round(loss, 4)}
        rows.append(row | {"latency": latency})
    return {
        "command": "python -m planner simulate variants --calibrate",
        "date": str(date.today()),
        "device": device_name(device),
        "checkpoints": [folder.name for folder in folders],
        "prompts": n,
        "prompt_tokens": PROMPT,
        "rounds": rounds,
        "variants": rows,
        "votes": vote_accuracies(answers, truth, forms[folders[0].name][0].config.vocab_size),
    }


def vote_accuracies(answers: Mapping[str, Tensor], truth: Tensor, V: int) -> dict[str, float]:
    """{"a+b": accuracy of their weighted vote} of all teams of MEMBERS: weights are counted on the
    even prompts, the accuracy on the odd ones."""
    members, found = [m for m in MEMBERS if m in answers], {}
    for team in itertools.chain(*(itertools.combinations(members, k) for k in (2, 3, 4))):
        votes = torch.stack([answers[m] for m in team])
        weights = class_weights(votes[:, ::2], truth[::2], V)
        right = weighted_vote(votes[:, 1::2], weights) == truth[1::2]
        found["+".join(team)] = round(right.float().mean().item(), 4)
    return found


def class_weights(votes: Tensor, truth: Tensor, classes: int) -> Tensor:
    """Cocktail's weights (M, classes) of votes (M, N): how often model m is right when it answers
    c, shrunk towards its overall accuracy by one observation."""
    right = (votes == truth).double()
    overall = right.mean(1, keepdim=True)
    zeros = torch.zeros(len(votes), classes, dtype=torch.double, device=votes.device)
    hits = zeros.scatter_add(1, votes, right)
    return (hits + overall) / (zeros.scatter_add(1, votes, torch.ones_like(right)) + 1)


def weighted_vote(votes: Tensor, weights: Tensor) -> Tensor:
    """votes (M, N), weights (M, classes) -> the answers (N,) with the largest sums of weights."""
    scores = torch.zeros(votes.shape[1], weights.shape[1], dtype=weights.dtype, device=votes.device)
    for vote, weight in zip(votes, weights):
        scores.scatter_add_(1, vote[:, None], weight[vote][:, None])
    return scores.argmax(1)
