"""Text requests on paged_kv.py's Engine, and offline batch inference from JSONL files.

The Engine schedules token ids and KV blocks; it knows neither text nor files. This file adds:

    Service       requests in, results out: streamed text, stop strings, EOS, log-probabilities
    run_batch     --batch: a JSONL file of requests to a JSONL file of results (batch_file.py)

A request file may be long or have invalid lines, and the process may die halfway. So the file is
read only as fast as the engine needs it; an invalid line gets an error result that names line and
field and does not affect the others; each result is written in one piece as soon as it is finished.
The results file is the whole state of a run: a restart removes an incomplete last line and skips
the requests that have a result; a file of other requests, flags or weights is refused. (--reorder
reads the whole file first: serving/reorder.py.)

Equivalence (test_all.py): a request in a batch == the same request alone through generate.py; a run
killed at any point and resumed == an uninterrupted run. Both up to rounding, which depends on the
batch size: in bf16, texts may diverge where two tokens have nearly equal probability.

Needs: paged_kv.py, generation/sampling.py, generation/json_schema.py, huggingface/tokenizer.py,
serving/paged_drafting.py, tqdm.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import difflib
import json
import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from generation.json_schema import parse_grammar
from generation.sampling import RowSampler
from generation.structured import Grammar, Vocabulary
from huggingface.chat_template import ChatTemplate
from huggingface.fine_tune import template_of
from huggingface.tokenizer import (
    Continuation, StopStrings, TextStream, Tokenizer, logprob_entry, one_line,
)  # fmt: skip
from paged_kv import Engine, Output, PagedKVCache, SamplingParams, Sequence
from serving.batch_file import Id, RequestLine, Results, request_lines
from serving.kv_transfer import continued, import_request
from serving.paged_drafting import jump_forced_tokens
from serving.reorder import fields_text, group_requests
from serving.replay import percentile

# --------------------------------------------------------------------------------------------------
# The engine
# --------------------------------------------------------------------------------------------------

CPU_CACHE_BYTES = 2**30
CUDA_CACHE_SHARE = 0.8  # of the memory left free by the weights; the rest is for activations


def num_available_blocks(
    model: nn.Module, block_size: int, max_num_seqs: int, kv_dtype: Any,
    extra_layers: float = 0.0, num_blocks: int | None = None,
) -> int:  # fmt: skip
    """KV blocks for max_num_seqs sequences of full context length, or as many as fit in memory: 80%
    of free memory on CUDA, 1 GB elsewhere; or num_blocks, if the device can have them: ValueError
    if not. extra_layers: layers of a drafter's cache, which uses the same block tables."""
    config, weight = model.config, model.embed.weight
    cache = PagedKVCache(config, 1, block_size, weight.dtype, weight.device, kv_dtype)
    bytes_per_block = cache.bytes_per_token * block_size * (1 + extra_layers / config.n_layers)
    available, total = CPU_CACHE_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if weight.is_cuda:
        free, total = torch.cuda.mem_get_info(weight.device)
        available = int(CUDA_CACHE_SHARE * free)
    if num_blocks is not None:
        needed = num_blocks * bytes_per_block
        if needed > total:
            gb = f"{needed / 1e9:.1f} GB of KV cache, but {weight.device} has {total / 1e9:.1f} GB"
            raise ValueError(f"--kv-blocks {num_blocks} needs {gb}")
        return num_blocks
    wanted = max_num_seqs * math.ceil(config.context / block_size)
    return max(1, min(wanted, int(available / bytes_per_block)))


def build_engine(
    model: nn.Module, eos: Collection[int] = (), *, max_num_seqs: int = 64, **kwargs: Any
) -> Engine:
    """An Engine with a RowSampler; kwargs are further arguments of Engine."""
    sampler = RowSampler(model.config.vocab_size, max_num_seqs, model.embed.weight.device, eos)
    return Engine(model, max_num_seqs=max_num_seqs, sampler=sampler, eos_ids=eos, **kwargs)


# --------------------------------------------------------------------------------------------------
# Requests and results
# --------------------------------------------------------------------------------------------------

Owner = tuple[Id, int, str]  # id, line and hash of a request
Result = dict[str, Any]
QUEUE_FACTOR = 4  # the engine queues at most 4 x max_num_seqs requests, ordered by its policy


@dataclass(eq=False)
class Request:
    """A parsed line of a request file."""

    id: Id
    line: int
    ids: list[int]
    params: SamplingParams
    priority: int = 0  # lower runs first
    client: str = ""  # who sent it
    continues: bool = True  # False: a chat reply, detokenized without the prompt
    on_text: Callable[[int, str], Any] | None = None  # called with (sample, new text)
    samples: dict[int, Continuation] = field(default_factory=dict)
    hash: str = ""  # of a RequestLine
    duplicates: list[Owner] = field(default_factory=list)  # equal requests

    @property
    def owners(self) -> list[Owner]:
        """Every request that gets the result."""
        return [(self.id, self.line, self.hash), *self.duplicates]


class Service:
    """An Engine with a tokenizer: takes text requests and returns text results."""

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, eos: Collection[int] = (), **kwargs: Any
    ):
        """kwargs: arguments of build_engine."""
        self.tokenizer, self.eos = tokenizer, eos
        self.ttft, self.itl = deque(maxlen=100_000), deque(maxlen=100_000)  # seconds
        self.tuner: Any = None  # of --finetune (serving/finetune.py)
        self.engine = build_engine(model, eos, output_callback=self._new_continuation, **kwargs)

    def add(
        self, request: Request, prompt_logprobs: int | None = None, prompt_logprobs_from: int = 1
    ) -> Output:
        """Queue a request. prompt_logprobs: see Engine.add. ValueError if it is invalid; the engine
        is then unchanged."""
        if request.params.adapter is not None and self.engine.adapters is None:
            raise ValueError(f"adapter {request.params.adapter!r} requires --adapters or --models")
        self.compile_grammar(request)
        ids, params = request.ids, request.params
        more = dict(priority=request.priority, client=request.client)
        more |= dict(prompt_logprobs=prompt_logprobs, prompt_logprobs_from=prompt_logprobs_from)
        self.engine.add(ids, params, id=request, **more)
        return self.engine.outputs[request]

    def resume(
        self, request: Request, earlier: Output, kv: Callable[..., Any] = lambda *_: None
    ) -> Output:
        """Queue a request with the tokens that it had in a run that was interrupted. kv: see
        kv_transfer.continued."""
        self.compile_grammar(request)
        output = Output(request, request.ids, earlier.samples, arrival_time=self.engine.clock())
        output.prompt_logprobs = earlier.prompt_logprobs
        more = dict(priority=request.priority, client=request.client)
        import_request(self.engine, continued(output, request.params, kv, **more))
        return output

    def abort(self, request: Request) -> None:
        """End an unfinished request now."""
        self.engine.abort(request)

    def step(self) -> list[Output]:
        """As Engine.step."""
        return self.engine.step()

    def compile_grammar(self, request: Request) -> None:
        """Replace a pattern in params.grammar by its Grammar. ValueError if that is invalid. Does
        not touch the engine, so another thread may call it."""
        if isinstance(request.params.grammar, str):
            grammar = self._compile(request.params.grammar)
            request.params = replace(request.params, grammar=grammar)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self.tokenizer, self.engine.model.config.vocab_size, self.eos)

    def _compile(self, pattern: str) -> Grammar:
        try:
            return self._vocabulary.grammar(pattern)
        except ValueError as e:
            raise ValueError(f"the regex or json_schema {e}") from None

    def _new_continuation(self, seq: Sequence) -> Continuation:
        request, i = seq.request.id, seq.index
        if request.params.grammar is not None:
            jump_forced_tokens(self.engine)
        prompt, params = request.ids if request.continues else (), request.params
        stream = TextStream(self.tokenizer, prompt, params.grammar is not None)
        stop, eos = StopStrings(params.stop, self.tokenizer), () if params.ignore_eos else self.eos
        on_text = partial(request.on_text, i) if request.on_text else lambda text: None
        parts = self.tokenizer, stream, stop, eos, on_text
        request.samples[i] = Continuation(*parts, min_tokens=params.min_new_tokens)
        return request.samples[i]

    def results(self, requests: RequestFile) -> Iterator[Result]:
        """Run all requests of a file; yields each result as soon as it is finished."""
        pending, more = iter(requests), True
        while more or self.engine.unfinished:
            max_waiting = QUEUE_FACTOR * self.engine.scheduler.max_num_seqs
            while more and self.engine.n_waiting < max_waiting:
                request = next(pending, None)
                more = request is not None
                if isinstance(request, Request):
                    try:
                        self.add(request)
                    except ValueError as e:
                        yield from requests.error_results(request.owners, e)
                elif more:
                    yield request
            for output in self.engine.step():
                request = output.id
                if output.finished and len(output.timestamps) > 1:
                    tokens = output.timestamps[1:]
                    self.ttft.append(tokens[0] - output.arrival_time)
                    self.itl.extend(b - a for a, b in zip(tokens, tokens[1:]))
                if output.finished and output.error is not None:
                    yield from requests.error_results(request.owners, output.error)
                elif output.finished:
                    result = self._result(request, output)
                    for id, line, hash in request.owners:
                        yield result | {"id": id, "line": line, "hash": hash}

    def _result(self, request: Request, output: Output) -> Result:
        """The keys of generate.py --json, for the first sample; with n > 1, `samples` has all."""
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
# Request files
# --------------------------------------------------------------------------------------------------

PROMPT_FIELDS = ("prompt", "messages", "prompt_ids")
PARAM_FIELDS = tuple(f.name for f in fields(SamplingParams) if f.name != "grammar")
GRAMMAR_FIELDS = {"regex", "json_schema"}
FIELDS = ("id", "priority", "client", *PROMPT_FIELDS, "fields", *PARAM_FIELDS, *GRAMMAR_FIELDS)


@dataclass
class RequestFile:
    """The requests of a JSONL file that have no result yet, in order, read lazily. An invalid line
    gives its error result instead. With `reorder`, in the order of serving/reorder.py, which is
    that of all lines, so that it and the fields are the same when a run is resumed."""

    path: Path
    previous_results: Results
    tokenizer: Tokenizer
    template: ChatTemplate | None
    system: str | None  # system message for conversations without one
    defaults: SamplingParams
    limit: int  # max tokens of prompt and output
    # returns read() of rank 0 on every rank: only rank 0 reads the file
    rank0_then_broadcast: Callable[[Callable[[], Any]], Any] = lambda read: read()
    reorder: bool = False
    run_hash: str = ""  # of what all results depend on
    max_bytes: int = 2**20  # of a prompt: a longer one cannot fit, and is not tokenized
    adapters: Mapping[str, Any] = field(default_factory=dict)  # by name, with their text_format

    def __iter__(self) -> Iterator[Request | Result]:
        items = self._read()
        while (item := self.rank0_then_broadcast(partial(next, items, None))) is not None:
            yield item

    def _read(self) -> Iterator[Request | Result]:
        lines = request_lines(self.path, self.run_hash, self.previous_results)
        groups: Iterable[list[RequestLine]] = ([line] for line in lines)
        if self.reorder:
            lines = list(lines)
            invalid = [[line] for line in lines if isinstance(line.values, ValueError)]
            valid = [line for line in lines if not isinstance(line.values, ValueError)]
            order = group_requests([line.values for line in valid], PROMPT_FIELDS)
            groups = chain(invalid, ([valid[i] for i in same] for same in order))
        for group in groups:
            owners = [x[:3] for x in group if x[:2] not in self.previous_results]
            if owners:
                yield from self._parse(group[0].values, owners)

    def _parse(
        self, values: dict[str, Any] | ValueError, owners: list[Owner]
    ) -> Iterator[Request | Result]:
        """The request of equal lines, or their error results."""
        try:
            if isinstance(values, ValueError):
                raise values
            request = self._request(values, *owners[0])
        except ValueError as e:
            yield from self.error_results(owners, e)
        else:
            request.duplicates = owners[1:]
            yield request

    def error_results(self, owners: Iterable[Owner], error: object) -> Iterator[Result]:
        """The results of requests that failed."""
        for id, line, hash in owners:
            text = f"{self.path}, line {line}: {one_line(error)}"
            yield {"id": id, "line": line, "error": text, "hash": hash}

    def _request(self, values: dict[str, Any], id: Id, line: int, hash: str) -> Request:
        values = {name: value for name, value in values.items() if value is not None}
        if unknown := [name for name in values if name not in FIELDS]:
            name = unknown[0]
            close = difflib.get_close_matches(name, FIELDS, 1)
            hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(FIELDS)}"
            raise ValueError(f"{name!r} is not a field; {hint}")
        ids, priority = self._prompt_ids(values), values.get("priority", 0)
        if type(priority) is not int:
            raise ValueError(f"priority must be an integer, not {priority!r}")
        client = values.get("client", "")
        if type(client) is not str:
            raise ValueError(f"client must be a string, not {client!r}")
        given = {name: values[name] for name in PARAM_FIELDS if name in values}
        if "logit_bias" in given:
            given["logit_bias"] = parse_logit_bias(given["logit_bias"])
        for name in values.keys() & GRAMMAR_FIELDS:
            if "grammar" in given:
                raise ValueError("regex cannot be combined with json_schema: give one grammar")
            given["grammar"] = parse_grammar(name, values[name], name == "json_schema")
        if "max_new_tokens" not in given:  # only the default is lowered to fit
            room = max(1, self.limit - len(ids))
            given["max_new_tokens"] = min(self.defaults.max_new_tokens, room)
        params = replace(self.defaults, **given)
        continues = "messages" not in values
        more = dict(continues=continues, hash=hash)
        return Request(id, line, ids, params, priority, client, **more)

    def _prompt_ids(self, values: dict[str, Any]) -> list[int]:
        given = [name for name in PROMPT_FIELDS if name in values]
        if len(given) != 1:
            has, names = " and ".join(given) or "none of them", ", ".join(PROMPT_FIELDS)
            raise ValueError(f"a request must have one of {names}; this one has {has}")
        value = values[given[0]]
        if given == ["prompt"]:
            if not isinstance(value, str) or not value:
                raise ValueError("prompt must be a non-empty string")
            return self._encode(_insert_fields(value, values), "prompt")
        if given == ["prompt_ids"]:
            if "fields" in values:
                raise ValueError("fields cannot be combined with prompt_ids; give a prompt")
            if not isinstance(value, list) or not all(type(i) is int for i in value):
                raise ValueError("prompt_ids must be a list of token ids")
            return value
        template = template_of(values.get("adapter"), self.adapters, self.template)
        if template is None:
            raise ValueError("messages: the model has no chat template; give a prompt")
        text = _insert_fields(template.prompt(value, self.system), values)
        return self._encode(text, "messages")

    def _encode(self, text: str, field: str) -> list[int]:
        try:
            return self.tokenizer.encode_prompt(text, self.max_bytes, bos=field == "prompt")
        except ValueError as e:
            raise ValueError(f"{field}: the text {e}") from None


def _insert_fields(text: str, values: dict[str, Any]) -> str:
    """A prompt, with a request's fields in the place of {fields}."""
    if "fields" not in values:
        return text
    if not isinstance(values["fields"], dict):
        raise ValueError(f"fields must be an object, not {values['fields']!r}")
    if text.count("{fields}") != 1:
        raise ValueError("a request with fields must have {fields} in its prompt, once")
    return text.replace("{fields}", fields_text(values["fields"]))


def parse_logit_bias(bias: Any) -> dict[int, Any]:
    """logit_bias from JSON, which has neither integer keys nor infinity."""
    is_id = partial(re.fullmatch, "0|[1-9][0-9]{0,17}")  # one spelling: no token is named twice
    if not isinstance(bias, dict) or not all(map(is_id, bias)):
        raise ValueError(f"logit_bias must be an object with token ids as keys, not {bias!r}")
    return {int(i): -math.inf if b == "-inf" else b for i, b in bias.items()}


# --------------------------------------------------------------------------------------------------
# Results
# --------------------------------------------------------------------------------------------------


def run_batch(service: Service, requests: RequestFile, out: Path) -> tuple[str, int]:
    """Run the requests that have no result yet, and append each result to `out` as a line. Returns
    a summary line, and how many results of all runs are errors."""
    total, done, errors, start = None, 0, 0, time.perf_counter()
    if requests.path.is_file():  # a pipe can be read only once
        with open(requests.path, "rb") as file:
            total = sum(1 for raw in file if raw.strip())
    previous, seconds = requests.previous_results, 0.5 if sys.stderr.isatty() else 15
    bar = tqdm(total=total, initial=len(previous), mininterval=seconds, dynamic_ncols=True)
    with bar, open(out, "ab") as file:
        for result in service.results(requests):
            file.write(json.dumps(result).encode() + b"\n")
            file.flush()
            done, errors = done + 1, errors + ("error" in result)
            bar.update()
    line, earlier = f"{done} requests, {errors} errors", sum(r.is_error for r in previous.values())
    if previous:
        line += f" (earlier runs: {len(previous)}, {earlier} errors)"
    if done > errors:
        line += f"; {stats_line(service, time.perf_counter() - start)}"
    line += f"; results: {out}"
    if errors + earlier:
        line += "; to retry failed requests, delete their lines there"
    return line, errors + earlier


def stats_line(service: Service, seconds: float) -> str:
    """The requests run so far, as one line."""
    stats = service.engine.stats()
    line = f"{stats['tokens_new'] / seconds:.1f} tok/s"
    for name, times in (("TTFT", service.ttft), ("ITL", service.itl)):
        p50, p99 = (1e3 * (percentile(times, p) or 0) for p in (50, 99))
        line += f", {name} {p50:.1f} ms (p99 {p99:.1f})"
    line += f", prefix cache hit rate {stats['hit_rate']:.0%}, {stats['preemptions']} preemptions"
    return line + stored_tokens(stats)


def stored_tokens(stats: Mapping[str, float]) -> str:
    """The prompts' tokens that --kv-store had, for a line of statistics; "" if none."""
    host, disk = (stats[f"kv_store_{tier}_tokens"] for tier in ("host", "disk"))
    return f", from the KV store {host} tokens in memory, {disk} on disk" if host + disk else ""
