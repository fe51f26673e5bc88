"""serving.py: many requests through one engine, from a file or by the clock.

The Engine of paged_kv.py moves tokens and blocks, and knows neither text nor files. This part of
generate.py puts them around it:

    RowSampler    sampling.py's whole contract, for each sequence by itself, as the Engine's sampler
    equip         drafters and their verification, as --speculate says
    Service       requests in, results out: text as it comes, stop strings, EOS, log-probabilities
    run_batch     --batch: a JSONL file of requests into a JSONL file of results
    replay        --bench-serving: requests that arrive as a Workload says, on the real clock

A file of requests may be long, wrong in places, and the process may die in the middle of it. So it
is read as the engine makes room; a line that is wrong is answered with an error that names the line
and the field, and the others as if it were not there; a result is written, a line in one piece, as
soon as there is one. The results on disk are the state of the run, all of it: started again, a run
cuts off the last line if a crash tore it, and leaves out what is answered.

In a benchmark a request is timed from the moment it is due, not from the moment the engine takes
it: one that falls behind must not look faster for it.

Equivalence (test_all.py): a request in a batch == the same alone through generate.py; a run killed
anywhere and resumed == an undisturbed one. That is up to the rounding of products of other shapes:
in bf16, where tokens are nearly as likely as each other, texts may part.

Needs: paged_kv.py, sampling.py, tokenizer.py, drafting.py and what that needs, tqdm.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import argparse
import difflib
import json
import math
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from tqdm import tqdm

from generation.drafting import Drawing, build_drafter, check_target, longest_run, padded
from generation.sampling import Sampler, Sampling
from huggingface.tokenizer import (
    ChatTemplate,
    Continuation,
    StopStrings,
    TextStream,
    Tokenizer,
    logprob_entry,
    one_line,
)
from model import Transformer
from paged_kv import Chunk, Engine, Output, PagedKVCache, SamplingParams, Sequence, Step
from speculative import Fixed, Goodput, Proposal, Runner, common

# --------------------------------------------------------------------------------------------------
# The engine
# --------------------------------------------------------------------------------------------------

CPU_CACHE_BYTES = 2**30
CUDA_CACHE_SHARE = 0.8  # of what the weights leave free; the rest is for activations
CPU_LOGITS = 2**20  # logits in one go, see RowSampler


class RowSampler:
    """sampling.py's contract for an Engine: every sequence has a row of one Sampler.

    A step draws for its own rows and no others, in groups that ask for the same features: next to
    sampled rows a greedy one costs its argmax (a seventh of a draw), and nobody is sorted for
    another's top_p. On a CPU a group goes in parts of a million logits: 33 rows of 128k took 94 ms
    at once and 36 in parts, since tensors beyond 32 MB are new pages from the system each time.
    (Padding to a power of two would be simpler: 33 rows of 4096 would cost 1.8 ms and not 1.1.)

    A sequence that was away, preempted or left out, may lose its row to another. When it is back it
    gets one again, with the counts and the position it had.
    """

    def __init__(self, vocab_size: int, max_running: int, device: Any, eos: Collection[int] = ()):
        eos = [e for e in eos if e < vocab_size]
        self.sampler = Sampler(Sampling(temperature=0), max_running, vocab_size, device, eos)
        self.rows: dict[Sequence, int] = {}  # the one that was longest away first
        self.drawn = [-1] * max_running  # tokens that each row has recorded
        on_cpu = torch.device(device).type == "cpu"
        self.part = max(1, CPU_LOGITS // vocab_size) if on_cpu else max_running

    def check(self, params: SamplingParams) -> None:
        """ValueError names a field that is out of range, or that leaves no token to draw."""
        self.sampler.check(_sampling(params, params.seed))

    def __call__(self, logits: Tensor, sequences: list[Sequence]) -> Tensor:
        """(R, V) logits -> (R,) ids, recorded; -1 where there is nothing to draw from."""
        rows, groups = self.rows_of(sequences), {}
        for i, row in enumerate(rows):
            groups.setdefault(frozenset(self.sampler.uses[row]), []).append(i)
            self.drawn[row] += 1  # before it is true: a step that is interrupted is done again
        ids = torch.empty(len(rows), dtype=torch.long, device=logits.device)
        for group in groups.values():
            for first in range(0, len(group), self.part):
                part = group[first : first + self.part]
                together = part[-1] - part[0] == len(part) - 1  # a view, and no copy of the logits
                where = slice(part[0], part[-1] + 1) if together else part
                ids[where] = self.sampler.draw_rows(logits[where], [rows[i] for i in part])
        return ids

    def rows_of(self, sequences: list[Sequence]) -> list[int]:
        for seq in sorted(sequences, key=lambda seq: seq not in self.rows):  # who has one keeps it
            if seq in self.rows:
                row = self.rows.pop(seq)
            else:
                free = set(range(len(self.drawn))) - set(self.rows.values())
                row = free.pop() if free else self.rows.pop(next(iter(self.rows)))
                self.drawn[row] = -1
            self.rows[seq] = row
            if self.drawn[row] != len(seq.tokens) - seq.n_prompt:
                how, prompt = _sampling(seq.params, seq.seed), seq.tokens[: seq.n_prompt]
                self.sampler.admit(row, how, prompt, seq.output)
                self.drawn[row] = len(seq.output)
        return [self.rows[seq] for seq in sequences]


def _sampling(params: SamplingParams, seed: int) -> Sampling:
    """What sampling.py is asked. Where EOS is a token like others, none is held back."""
    how = {f.name: getattr(params, f.name) for f in fields(Sampling)} | {"seed": seed}
    return Sampling(**how | ({"min_new_tokens": 0} if params.ignore_eos else {}))


def blocks_that_fit(
    model: nn.Module, block_size: int, max_running: int, kv_dtype: Any, more_layers: float = 0.0
) -> int:
    """Blocks for max_running sequences of the whole context, or as many as memory allows: 80% of
    what is free on CUDA, 1 GB elsewhere. more_layers: of another's cache in the same blocks."""
    config, weight = model.config, model.embed.weight
    one = PagedKVCache(config, 1, block_size, weight.dtype, weight.device, kv_dtype)
    allowed = CPU_CACHE_BYTES
    if weight.is_cuda:
        allowed = int(CUDA_CACHE_SHARE * torch.cuda.mem_get_info(weight.device)[0])
    wanted = max_running * math.ceil(config.context / block_size)
    per_block = one.bytes_per_token * block_size * (1 + more_layers / config.n_layers)
    return max(1, min(wanted, int(allowed / per_block)))


def build_engine(
    model: nn.Module, eos: Collection[int] = (), *, max_running: int = 64, **options: Any
) -> Engine:
    """An Engine that draws by sampling.py's contract; `options` are further arguments of it."""
    sampler = RowSampler(model.config.vocab_size, max_running, model.embed.weight.device, eos)
    return Engine(model, max_running=max_running, sampler=sampler, eos_ids=eos, **options)


# --------------------------------------------------------------------------------------------------
# Drafts
# --------------------------------------------------------------------------------------------------


class Paged(Runner):
    """A drafter's model over blocks: rows are the Engine's sequences, and their tables, which have
    room for the drafts that are asked for, serve this cache too. Its blocks hold what was written
    when the sequence had them: after a preemption, or where a prefix was found, less than the
    target's do. Drafts are then worse, and the text is the same."""

    def __init__(self, forward: Callable[..., Tensor], cache: PagedKVCache, first: int = 0):
        """first: the index of the model's layer that is the cache's layer 0."""
        super().__init__(forward, cache, cache.device)
        self.first = first
        self.tables: WeakKeyDictionary[Sequence, list[int]] = WeakKeyDictionary()

    def run(
        self,
        rows: list[Sequence],
        starts: list[int],
        tokens: list[list[int]],
        hidden: list[Tensor] | None,
    ) -> list[Tensor]:
        chunks = [Chunk(t, s, row.table) for row, s, t in zip(rows, starts, tokens) if t]
        step = self.cache.step(chunks)
        before = None if hidden is None else torch.cat(hidden)[None]
        h = self._forward(step, step.tokens[None], before)
        for row in rows:
            self.tables[row] = list(row.table)
        return list(h.split([len(t) for t in tokens]))

    def step(
        self, rows: list[Sequence], ids: Tensor, at: list[int], hidden: Tensor | None = None
    ) -> Tensor:
        """One token more of each row, as Contiguous.step. A row that asks for fewer drafts than
        others has no slot for more: what it does there is not looked at."""
        size = self.cache.block_size
        room = [min(p, len(row.table) * size - 1) for row, p in zip(rows, at)]
        step = self.cache.step([Chunk([0], p, row.table) for row, p in zip(rows, room)])
        return self._forward(step, ids[None], None if hidden is None else hidden[None])

    def kept(self, row: Any, n: int) -> int:
        return min(n, common(self.tables.get(row, []), row.table) * self.cache.block_size)

    def _forward(self, step: Step, tokens: Tensor, hidden: Tensor | None) -> Tensor:
        def attend(spec: Any, *given: Tensor) -> Tensor:
            own = replace(spec, index=spec.index - self.first) if self.first else spec
            return self.cache.attend(own, *given, step=step)

        return self.forward(tokens, step.positions[None], attend, hidden)[0]


class RowVerifier:
    """Drawing for an Engine: its verifier, and what its drafters draw with, by the rows that its
    RowSampler keeps. Rows that ask for the same features go together, as there."""

    def __init__(self, rows: RowSampler, certain: bool = False, forced: float | None = None):
        self.rows, self.drawing = rows, Drawing(rows.sampler, certain, forced)

    def draft(self, logits: Tensor, sequences: list[Sequence], i: int) -> Any:
        return self.drawing.draft(logits, self.rows.rows_of(sequences), i)

    def __call__(
        self, logits: Tensor, sequences: list[Sequence], drafts: list[Proposal]
    ) -> list[list[int]]:
        """logits (M, V): of each sequence one row more than it has drafts -> its new tokens."""
        rows, groups = self.rows.rows_of(sequences), {}
        first = [0, *accumulate(len(tokens) + 1 for tokens, _ in drafts)]
        for i, row in enumerate(rows):
            groups.setdefault(frozenset(self.rows.sampler.uses[row]), []).append(i)
            self.rows.drawn[row] = -1  # until it is done: a step that is interrupted is done again
        runs: list[list[int]] = [[] for _ in rows]
        for group in groups.values():
            K = max(len(drafts[i][0]) for i in group)
            size = max(1, self.rows.part // (K + 1))
            for part in (group[j : j + size] for j in range(0, len(group), size)):
                tokens, lengths, probs = padded([drafts[i] for i in part], K, logits.device)
                begin = torch.tensor([first[i] for i in part], device=logits.device)[:, None]
                at = torch.arange(K + 1, device=logits.device).expand(len(part), -1)
                chosen = logits[begin + torch.minimum(at, lengths[:, None])]
                numbers = [rows[i] for i in part]
                out, n = self.drawing.verify(chosen, tokens, probs, lengths, numbers)
                for i, run, kept in zip(part, out.tolist(), n.tolist()):
                    runs[i] = run[: kept + 1]
        for seq, row, run in zip(sequences, rows, runs):
            self.rows.drawn[row] = len(seq.tokens) - seq.n_prompt + len(run)
        return runs


def equip(
    args: argparse.Namespace,
    engine: Engine,
    tokenizer: Tokenizer,
    load: Callable[[str], tuple[Transformer, Tokenizer]],
) -> None:
    """--speculate for an Engine that draws by a RowSampler. ValueError names the flag."""
    model, blocks = engine.model, engine.allocator
    if args.speculate in ("tree", "staged"):
        raise ValueError(f"--speculate {args.speculate} is for one prompt; in a batch take draft")
    verifier = RowVerifier(engine.sampler, args.draft_certain, args.draft_acceptance)

    def new_cache(config: Any) -> PagedKVCache:
        weight = model.embed.weight
        return PagedKVCache(
            config, len(blocks.refs), blocks.block_size, weight.dtype, weight.device, args.kv_dtype
        )

    cache, runner = engine.cache, Paged
    if args.speculate == "mtp":
        cache = new_cache(SimpleNamespace(**vars(model.config) | {"n_layers": 1}))
        runner = partial(Paged, first=model.config.n_layers)
    check_target(model)
    engine.drafter = build_drafter(
        args, model, tokenizer, load, verifier.draft, runner, cache, new_cache
    )
    engine.verifier = verifier
    longest = longest_run(args)
    engine.speculate_k = Goodput(longest) if args.speculate_k == "auto" else Fixed(longest)


# --------------------------------------------------------------------------------------------------
# Requests and results
# --------------------------------------------------------------------------------------------------

Id = str | int
Result = dict[str, Any]
AHEAD = 4  # times max_running: so many may wait in the engine, for its policy to choose from


@dataclass(eq=False)
class Request:
    """What one user asks."""

    id: Id
    line: int
    ids: list[int]
    params: SamplingParams
    priority: int = 0  # the smaller goes first
    continues: bool = True  # the text goes on where the prompt ends; a reply is a text of its own
    show: Callable[[int, str], Any] | None = None  # (sample, text), as it comes
    samples: dict[int, Continuation] = field(default_factory=dict)


class Service:
    """An engine that takes requests and gives results, text and all."""

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, eos: Collection[int] = (), **options: Any
    ):
        """`options` are build_engine's."""
        self.tokenizer, self.eos = tokenizer, eos
        self.engine = build_engine(model, eos, listen=self._listen, **options)

    def add(self, request: Request) -> None:
        """ValueError: it is refused, and nothing has changed."""
        self.engine.add(request.ids, request.params, id=request, priority=request.priority)

    def _listen(self, seq: Sequence) -> Continuation:
        request, i = seq.request.id, seq.index
        stream = TextStream(self.tokenizer, request.ids if request.continues else ())
        stop, eos = StopStrings(request.params.stop), self.eos
        request.samples[i] = Continuation(
            self.tokenizer,
            stream,
            stop,
            () if request.params.ignore_eos else eos,
            partial(request.show, i) if request.show else lambda text: None,
        )
        return request.samples[i]

    def answers(self, requests: RequestFile) -> Iterator[Result]:
        """The result of every request of a file, as soon as there is one."""
        unread, more = iter(requests), True
        while more or self.engine.unfinished:
            while more and self.engine.n_waiting < AHEAD * self.engine.scheduler.max_running:
                request = next(unread, None)
                more = request is not None
                if isinstance(request, Request):
                    try:
                        self.add(request)
                    except ValueError as e:
                        yield requests.refusal(request.id, request.line, e)
                elif more:
                    yield request
            for output in self.engine.step():
                request = output.id
                if output.finished and output.error is not None:
                    yield requests.refusal(request.id, request.line, output.error)
                elif output.finished:
                    yield self._result(request, output)

    def _result(self, request: Request, output: Output) -> Result:
        """In the form of generate.py --json: the first sample, and with n > 1 all of them."""
        samples: list[Result] = []
        for i, sample in enumerate(output.samples):
            text, tokens = request.samples[i].text, sample.token_ids
            samples.append({"text": text, "tokens": tokens, "finish_reason": sample.finish_reason})
            if request.params.logprobs is not None:
                samples[i]["logprobs"] = [
                    logprob_entry(self.tokenizer, token, logprob, best, ids)
                    for token, (logprob, ids, best) in zip(tokens, sample.logprobs)
                ]
        head = {"id": request.id, "line": request.line}
        more = {"samples": samples} if len(samples) > 1 else {}
        return head | samples[0] | {"prompt_tokens": len(request.ids)} | more


# --------------------------------------------------------------------------------------------------
# A file of requests
# --------------------------------------------------------------------------------------------------

PROMPTS = ("prompt", "messages", "prompt_ids")
PARAMS = tuple(f.name for f in fields(SamplingParams))
KNOWN = ("id", "priority", *PROMPTS, *PARAMS)


@dataclass
class RequestFile:
    """The requests of a JSONL file that have no answer yet, in order; in place of one that is
    wrong its result, an error. Read as they are asked for."""

    path: Path
    answered: Mapping[tuple[Id, int], bool]  # by (id, line), see read_results
    tokenizer: Tokenizer
    template: ChatTemplate | None
    system: str | None  # put before messages that have none
    defaults: SamplingParams
    limit: int  # tokens that a prompt and its text may have
    # of several processes one reads, for all: from_first(read) is what it read
    from_first: Callable[[Callable[[], Any]], Any] = lambda read: read()

    def __iter__(self) -> Iterator[Request | Result]:
        unread = self._unread()
        while (answer := self.from_first(partial(next, unread, None))) is not None:
            yield answer

    def _unread(self) -> Iterator[Request | Result]:
        first: dict[Id, int] = {}  # the line that has the id
        with open(self.path, "rb") as file:
            for line, raw in enumerate(file, 1):
                if not raw.strip():
                    continue
                id: Id = line
                try:
                    values = _json_object(raw)
                    id = _id(values, line)
                    if first.setdefault(id, line) != line:
                        raise ValueError(f"id {id!r} is line {first[id]}'s; take another")
                    if (id, line) in self.answered:
                        continue
                    answer = self._request(values, id, line)
                except ValueError as e:
                    answer = self.refusal(id, line, e)
                    first.setdefault(id, line)  # a line that cannot be read has its number for id
                if (id, line) not in self.answered:
                    yield answer

    def refusal(self, id: Id, line: int, why: object) -> Result:
        """The result of a request that cannot have one."""
        return {"id": id, "line": line, "error": f"{self.path}, line {line}: {one_line(why)}"}

    def _request(self, values: dict[str, Any], id: Id, line: int) -> Request:
        for name in [name for name in values if name not in KNOWN]:
            near = difflib.get_close_matches(name, KNOWN, 1)
            mend = f"did you mean {near[0]}?" if near else f"there are {', '.join(KNOWN)}"
            raise ValueError(f"{name!r} is not a field; {mend}")
        ids, priority = self._prompt_ids(values), values.get("priority", 0)
        if type(priority) is not int:
            raise ValueError(f"priority must be a whole number, not {priority!r}")
        given = {name: values[name] for name in PARAMS if name in values}
        if isinstance(given.get("logit_bias"), dict):
            given["logit_bias"] = _bias(given["logit_bias"])
        if "max_new_tokens" not in given:  # one's own is taken at its word, and may be refused
            room = max(1, self.limit - len(ids))
            given["max_new_tokens"] = min(self.defaults.max_new_tokens, room)
        params = replace(self.defaults, **given)
        return Request(id, line, ids, params, priority, continues="messages" not in values)

    def _prompt_ids(self, values: dict[str, Any]) -> list[int]:
        given = [name for name in PROMPTS if name in values]
        if len(given) != 1:
            has = " and ".join(given) or "none of them"
            raise ValueError(f"a request has one of {', '.join(PROMPTS)}; this has {has}")
        value = values[given[0]]
        if given == ["prompt"]:
            if not isinstance(value, str) or not value:
                raise ValueError("prompt must be a text that is not empty")
            return self._encode(value, bos=True)
        if given == ["prompt_ids"]:
            if not isinstance(value, list) or not all(type(i) is int for i in value):
                raise ValueError("prompt_ids must be a list of token ids")
            return value
        if self.template is None:
            raise ValueError("messages: the checkpoint has no chat template; give a prompt")
        if not isinstance(value, list) or not value or not all(isinstance(m, dict) for m in value):
            raise ValueError("messages must be a list of one or more objects")
        if self.system is not None and not any(m.get("role") == "system" for m in value):
            value = [{"role": "system", "content": self.system}, *value]
        return self._encode(self.template.render(value), bos=False)

    def _encode(self, text: str, bos: bool) -> list[int]:
        try:
            return self.tokenizer.encode(text, bos)
        except UnicodeEncodeError as e:  # JSON can spell half a character
            raise ValueError(f"the prompt is no text: {e}") from None


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"not JSON ({one_line(e)}); mend the line") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, not a {type(value).__name__}")
    return value


def _id(values: dict[str, Any], otherwise: Any) -> Id:
    id = values.get("id", otherwise)
    if type(id) not in (str, int):
        raise ValueError(f"id must be a string or a whole number, not {id!r}")
    return id


def _bias(bias: dict[str, Any]) -> dict[int, Any]:
    """JSON has neither integers for keys nor an infinity."""
    try:
        return {int(i): -math.inf if b == "-inf" else b for i, b in bias.items()}
    except ValueError:
        raise ValueError(f"logit_bias must have token ids for keys, not {list(bias)!r}") from None


# --------------------------------------------------------------------------------------------------
# A file of results
# --------------------------------------------------------------------------------------------------

HEAD = b'{"id": '  # how each of its lines begins


def read_results(path: Path) -> dict[tuple[Id, int], bool]:
    """What a file of results has answered: (id, line) -> whether with an error.

    A last line that a crash tore is cut off. ValueError: it is another kind of file, left as it is.
    """
    answered: dict[tuple[Id, int], bool] = {}
    if not path.exists():
        return answered
    whole = 0
    with open(path, "r+b") as file:
        for line, raw in enumerate(file, 1):
            if not raw.endswith(b"\n") and raw[: len(HEAD)] == HEAD[: len(raw)]:
                break
            try:
                result = _json_object(raw)
                answered[_id(result, None), result["line"]] = "error" in result
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{path}, line {line}: not a result; delete it, or give another --out"
                ) from None
            whole += len(raw)
        file.truncate(whole)
    return answered


def run_batch(service: Service, requests: RequestFile, out: Path) -> str:
    """Answer what has no answer yet, each result a line at the end of `out`. Returns what there is
    to say of it."""
    total, done, errors = None, 0, 0
    if requests.path.is_file():  # a pipe can be read but once
        with open(requests.path, "rb") as file:
            total = sum(1 for raw in file if raw.strip())
    bar = tqdm(
        total=total,
        initial=len(requests.answered),
        mininterval=0.5 if sys.stderr.isatty() else 15,
        dynamic_ncols=True,
    )
    with bar, open(out, "ab") as file:
        for result in service.answers(requests):
            file.write(json.dumps(result).encode() + b"\n")
            file.flush()
            done, errors = done + 1, errors + ("error" in result)
            bar.update()
    line, old = f"{done} requests, {errors} errors", requests.answered
    if old:
        line += f" ({len(old)} before, {sum(old.values())} errors)"
    if done > errors:
        line += f"; {stats_line(service.engine.stats())}"
    if errors + sum(old.values()):
        line += f"; to try what failed again, delete its lines in {out}"
    return line


def stats_line(f: Mapping[str, Any]) -> str:
    """An engine's facts in one line for a person."""
    ms = lambda name: (
        f"{1e3 * f[name + '_seconds_p50']:.1f} ms (p99 {1e3 * f[name + '_seconds_p99']:.1f})"
    )
    return (
        f"{f['tokens_per_second']:.1f} tok/s, first token after {ms('ttft')}, then one every "
        f"{ms('itl')}, {f['hit_rate']:.0%} of the prompts from the cache, {f['preemptions']} "
        "preemptions"
    )


# --------------------------------------------------------------------------------------------------
# Requests by the clock
# --------------------------------------------------------------------------------------------------


def arrivals(n: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """n times of arrival, seconds, rising. The gaps have mean 1 / rate and the coefficient of
    variation `burstiness`: Gamma, which at 1 is a Poisson process, at 0 a metronome."""
    shape = burstiness**-2 if burstiness else math.inf
    gap = lambda: rng.gammavariate(shape, 1 / shape) if burstiness else 1.0
    return list(accumulate(gap() / rate for _ in range(n)))


@dataclass(frozen=True)
class Arrival:
    """A request of a trace: when it is due, its prompt, and how many tokens it wants."""

    due: float  # seconds after the start
    ids: list[int]
    new: int


@dataclass(frozen=True)
class Workload:
    """Random requests, the same for the same seed, at any rate."""

    requests: int = 64
    rate: float = math.inf  # per second; inf: all at once
    burstiness: float = 1.0
    input_tokens: tuple[int, int] = (16, 128)  # from, to
    output_tokens: tuple[int, int] = (16, 64)
    shared_prefix: int = 0  # tokens before the input, the same in all requests
    seed: int = 0

    def trace(self, vocab_size: int) -> list[Arrival]:
        """The requests, in the order they are due."""
        rng = random.Random(self.seed)
        tokens = lambda n: [rng.randrange(vocab_size) for _ in range(n)]
        prefix, between = tokens(self.shared_prefix), rng.randint
        asked = [
            (prefix + tokens(between(*self.input_tokens)), between(*self.output_tokens))
            for _ in range(self.requests)
        ]
        due = arrivals(self.requests, self.rate, self.burstiness, rng)
        return [Arrival(at, ids, new) for at, (ids, new) in zip(due, asked)]


def replay(
    engine: Engine,
    trace: list[Arrival],
    params: SamplingParams,
    told: Callable[[float], float] = lambda seconds: seconds,
) -> dict[str, Any]:
    """Run a trace on the real clock, request i with seed + i; the facts, under the names that
    --json prints, times in seconds. Where several processes run it as one, told(time) is that of
    the one whose clock counts, and whose facts."""
    counts = lambda: (s.n_hit_tokens, s.n_admitted_tokens, s.n_preempted)
    s, waiting, due, done = engine.scheduler, deque(enumerate(trace)), {}, []
    before, start = counts(), told(engine.clock())
    while waiting or engine.unfinished:
        now = told(engine.clock()) if waiting else math.inf
        while waiting and start + waiting[0][1].due <= now:
            i, a = waiting.popleft()
            asked = replace(params, max_new_tokens=a.new, seed=(params.seed + i) % 2**63)
            due[engine.add(a.ids, asked)] = start + a.due
        if not engine.unfinished:
            time.sleep(max(0.0, start + waiting[0][1].due - told(engine.clock())))
        done += [output for output in engine.step() if output.finished]
    seconds = told(engine.clock()) - start
    hits, prompts, preempted = (b - a for a, b in zip(before, counts()))

    times: dict[str, list[float]] = {name: [] for name in ("queue", "ttft", "itl", "e2e")}
    for output in done:
        if output.error is not None:
            raise ValueError(output.error)
        at, (begun, *tokens) = due[output.id], output.times
        for name, t in (("queue", begun), ("ttft", tokens[0]), ("e2e", tokens[-1])):
            times[name].append(t - at)
        times["itl"] += [b - a for a, b in zip(tokens, tokens[1:])]
    read, written = sum(len(a.ids) for a in trace), sum(len(o.token_ids) for o in done)
    facts = {
        "requests": len(done),
        "seconds": seconds,
        "prompt_tokens": read,
        "output_tokens": written,
        "output_tokens_per_second": written / seconds,
        "total_tokens_per_second": (read + written) / seconds,
        "hit_rate": hits / max(1, prompts),
        "preemptions": preempted,
    }
    facts |= {f"{n}_seconds_p{p}": percentile(t, p) for n, t in times.items() for p in (50, 99)}
    return {name: fact if fact is None else round(fact, 6) for name, fact in facts.items()}


def percentile(values: list[float], p: float) -> float | None:
    """The smallest that p percent of the values do not exceed; None of no values."""
    return sorted(values)[math.ceil(p / 100 * len(values)) - 1] if values else None


def facts_table(f: Mapping[str, Any]) -> str:
    """The facts of a replay for a person."""
    ms = lambda value: "-" if value is None else f"{1e3 * value:.1f}"
    names = {"queue": "in the queue", "ttft": "first token", "itl": "between tokens", "e2e": "all"}
    rows = [
        f"{text:16} {ms(f[name + '_seconds_p50']):>9} {ms(f[name + '_seconds_p99']):>9}"
        for name, text in names.items()
    ]
    return "\n".join(
        [
            f"{f['requests']} requests in {f['seconds']:.2f} s, {f['prompt_tokens']} tokens in, "
            f"{f['output_tokens']} out: {f['output_tokens_per_second']:.1f} tok/s out, "
            f"{f['total_tokens_per_second']:.1f} in and out",
            f"{'ms':16} {'p50':>9} {'p99':>9}",
            *rows,
            f"{f['hit_rate']:.0%} of the prompts from the cache, {f['preemptions']} preemptions",
        ]
    )
