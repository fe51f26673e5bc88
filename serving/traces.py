"""Traces: what arrives when, for the simulator and for --bench-serving.

A scheduler's merits depend on what arrives: bursts fill its queue, long outputs hold its memory,
shared prefixes hit its cache. A trace is an iterator of Arrivals in ascending order of time, either
read from a file or generated from a description such as

    random:n=1000,rate=4,cv=2,input=200/900,output=16:128,client=a+random:rate=40,client=flood

Prompts have no text. They are segments (text id, tokens), so that a prompt of 8000 tokens is a few
integers, and two prompts share a prefix as far as their segments are equal. `ids` turns them into
real token ids for the Engine; `symbols` into a list with the same common prefixes, far cheaper, for
the simulator. A negative text id ~t is the token t itself: real prompts fit in as well.

Arrivals are a renewal process with Gamma gaps, as BurstGPT (arXiv:2401.17644) fits to a real
service, whose rate may follow the hours of a day. Lengths are constant, uniform or log-normal.
Prompts are unrelated (`random`), or conversations that grow by each output and have tool calls
(`conversations`), or a system prompt and documents of Zipf popularity (`rag`).

Arrival times do not depend on the service (an open loop): the next turn of a conversation comes
after a pause that assumes an output rate, even if the service has not finished the turn before. A
closed loop of N waiting users cannot be a trace: a slower service would get fewer requests.

Files (read_trace), by their first line:

    BurstGPT   CSV with Timestamp (seconds), Request tokens, Response tokens; Session ID, if any, is
               the client. Rows without response tokens are failed requests: they are skipped, as in
               the dataset's own files without failures.
    Azure      CSV with TIMESTAMP (date and time), ContextTokens, GeneratedTokens
    JSONL      what write_trace writes, an object per line: max_new_tokens; prompt_tokens (a number,
               or a list of segments [text id, tokens]) or prompt_ids (token ids); optionally
               arrival_time (default 0), client, priority, tool_calls (a list of [new tokens before
               it, seconds, tokens of the answer]), output_id. id is ignored: request files of
               --batch are traces if their prompts are token ids and they set nothing else.

Times in CSV files count from the first row. A file that is not in order of time is refused, not
sorted: it may be damaged.

test_all.py proves rates, burstiness, lengths and popularity, and on the real Scheduler that ids and
symbols have equal prefix hits: those of the longest common prefix of segments.

`python serving/traces.py TRACE [OUT.jsonl] [SEED]` describes a trace and writes it to a file.
"""

from __future__ import annotations

import csv
import heapq
import inspect
import json
import math
import os
import random
import re
import sys
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate, chain, count, repeat
from pathlib import Path
from typing import Any, TextIO

Prompt = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace. Two prompts share a prefix as far as their segments are equal."""

    arrival_time: float  # seconds after the start
    prompt: Prompt  # segments (text id, tokens); the texts of adjacent ones differ, except tokens
    max_new_tokens: int  # tokens that it generates
    client: str = ""
    priority: int = 0  # lower runs first
    # (new tokens before the call, seconds that it takes, tokens of its answer)
    tool_calls: tuple[tuple[int, float, int], ...] = ()
    output_id: int = 0  # text id of its output, which later prompts of a conversation contain

    @property
    def n_prompt(self) -> int:
        return sum(n for _, n in self.prompt)

    @property
    def n_output(self) -> int:
        """Tokens that follow the prompt in the end: new tokens and answers of tools."""
        return self.max_new_tokens + sum(n for _, _, n in self.tool_calls)

    def ids(self, vocab_size: int) -> list[int]:
        """The prompt as token ids. Those of a segment are a function of its text id: (5, 80) is the
        beginning of (5, 100)."""
        ids: list[int] = []
        for text, n in self.prompt:
            ids += [~text] * n if text < 0 else random.Random(text).choices(range(vocab_size), k=n)
        return ids

    def symbols(self) -> list[int]:
        """A list that stands for ids: prompts have equal beginnings here where they have there."""
        symbols: list[int] = []
        for text, n in self.prompt:
            symbols += [text] * n
        return symbols


def prompt_of(ids: Iterable[int]) -> Prompt:
    """The prompt with these token ids."""
    return tuple((~i, 1) for i in ids)


# --------------------------------------------------------------------------------------------------
# Times and lengths
# --------------------------------------------------------------------------------------------------


def arrival_times(n: int, rate: float, arrival_cv: float, rng: random.Random) -> Iterator[float]:
    """n ascending arrival times in seconds. The gaps are Gamma distributed with mean 1 / rate and
    coefficient of variation `arrival_cv`: 1 is a Poisson process, less than 0.01 evenly spaced."""
    shape = arrival_cv**-2 if arrival_cv >= 0.01 else 0.0
    gap = lambda: rng.gammavariate(shape, 1 / shape) if shape else 1.0
    return accumulate(gap() / rate for _ in range(n))


def diurnal(times: Iterable[float], swing: float, day: float) -> Iterator[float]:
    """Move arrivals of a constant rate so that hour h of a day has 1 - swing cos(2 pi (h + 1/2) /
    24) of that rate: the least at midnight, where the trace starts. day: its seconds.

    Time is warped rather than arrivals dropped (thinning), so a burst stays one."""
    weights = [1 - swing * math.cos(2 * math.pi * (h + 0.5) / 24) for h in range(24)]
    hour, moved = day / 24, 0.0
    starts = [*accumulate((w * hour for w in weights), initial=0.0)]  # of hours, before the warp
    for time in times:
        days, rest = divmod(time, day)
        h = min(bisect_right(starts, rest) - 1, 23)
        moved = max(moved, days * day + h * hour + (rest - starts[h]) / weights[h])
        yield moved


Z99 = 2.3263478740408408  # 99th percentile of the standard normal distribution


class Lengths:
    """A distribution of token counts, called with a generator. "200": always 200; "16:128": uniform
    from 16 to 128; "200/900": log-normal with mean 200 and 99th percentile 900.

    With sigma s, p99 / mean is exp(Z99 s - s^2 / 2), at most 14.9; the smaller s of two is used."""

    def __init__(self, text: str):
        found = re.fullmatch(r"([0-9]{1,9})(?:([:/])([0-9]{1,9}))?", text)
        low, high = (int(found[1]), int(found[3] or found[1])) if found else (0, 0)
        self.log_normal = found is not None and found[2] == "/" and low < high
        if not 1 <= low <= high or self.log_normal and high > 14.9 * low:
            raise ValueError("N, MIN:MAX or MEAN/P99, from 1 token, P99 from MEAN to 14.9 MEAN")
        self.low, self.size = low, high - low + 1
        if self.log_normal:
            self.sigma = Z99 - math.sqrt(Z99**2 - 2 * math.log(high / low))
            self.mu = math.log(low) - self.sigma**2 / 2

    def __call__(self, rng: random.Random) -> int:
        if self.log_normal:
            return max(1, round(math.exp(rng.gauss(self.mu, self.sigma))))
        return self.low + int(rng.random() * self.size)


# --------------------------------------------------------------------------------------------------
# Generators. Each takes the times at which something starts, a generator of random numbers, new
# text ids, and (client, priority) for each start.
# --------------------------------------------------------------------------------------------------

Owners = Iterator[tuple[str, int]]


def _shared(texts: Iterator[int], tokens: int) -> Prompt:
    return ((next(texts), tokens),) if tokens else ()


def random_prompts(
    times: Iterable[float], rng: random.Random, texts: Iterator[int], owners: Owners, *,
    input: Lengths = Lengths("200/900"), output: Lengths = Lengths("100/400"), prefix: int = 0,
) -> Iterator[Arrival]:  # fmt: skip
    """Unrelated prompts, after the same `prefix` tokens."""
    shared = _shared(texts, prefix)
    for time in times:
        prompt = (*shared, (next(texts), input(rng)))
        yield Arrival(time, prompt, output(rng), *next(owners), output_id=next(texts))


def conversations(
    times: Iterable[float], rng: random.Random, texts: Iterator[int], owners: Owners, *,
    system: int = 200, input: Lengths = Lengths("50/200"), output: Lengths = Lengths("100/400"),
    turns: Lengths = Lengths("1:8"), pause: float = 10.0, speed: float = 20.0, tools: int = 0,
    tool_seconds: float = 1.0, tool_tokens: Lengths = Lengths("100/500"),
) -> Iterator[Arrival]:  # fmt: skip
    """Conversations that start at `times`: each turn's prompt is the previous one, its output and
    `input` new tokens. The next turn comes once the output has been generated at `speed` tokens per
    second, and after an exponential pause. Each output has `tools` tool calls of exponential
    duration."""
    shared = _shared(texts, system)
    # heap of (time of the next turn, conversation, prompt so far, turns left, owner)
    pending: list[tuple[float, int, Prompt, int, tuple[str, int]]] = []
    for i, start in enumerate(chain(times, (math.inf,))):
        while pending and pending[0][0] < start:
            time, j, history, left, owner = heapq.heappop(pending)
            prompt, n = (*history, (next(texts), input(rng))), output(rng)
            calls = tuple(
                (at, rng.expovariate(1.0) * tool_seconds, tool_tokens(rng))
                for at in (sorted(rng.sample(range(1, n), min(tools, n - 1))) if tools else ())
            )
            turn = Arrival(time, prompt, n, *owner, calls, next(texts))
            yield turn
            if left > 1:
                time += n / speed + sum(seconds for _, seconds, _ in calls)
                time += rng.expovariate(1.0) * pause
                prompt = (*prompt, (turn.output_id, turn.n_output))
                heapq.heappush(pending, (time, j, prompt, left - 1, owner))
        if start < math.inf:
            heapq.heappush(pending, (start, i, shared, turns(rng), next(owners)))


def rag(
    times: Iterable[float], rng: random.Random, texts: Iterator[int], owners: Owners, *,
    system: int = 100, documents: int = 1000, zipf: float = 1.0, top: int = 2,
    document: Lengths = Lengths("400/1500"), input: Lengths = Lengths("30/100"),
    output: Lengths = Lengths("100/400"),
) -> Iterator[Arrival]:  # fmt: skip
    """Questions after a system prompt and up to `top` different documents. The k-th most popular
    document is retrieved in proportion to k ** -zipf, and always has the same length."""
    shared = _shared(texts, system)
    segments = [(next(texts), document(rng)) for _ in range(documents)]
    weights = [*accumulate(k**-zipf for k in range(1, documents + 1))]
    for time in times:
        found = dict.fromkeys(rng.choices(segments, cum_weights=weights, k=top))
        prompt = (*shared, *found, (next(texts), input(rng)))
        yield Arrival(time, prompt, output(rng), *next(owners), output_id=next(texts))


GENERATORS = {"random": random_prompts, "conversations": conversations, "rag": rag}

# Fields of every generator. n and rate count what starts: conversations, else requests.
COMMON = dict(n=1000, rate=1.0, cv=1.0, swing=0.0, day=86400.0, client="", clients=1, priority=0)
SMALLEST = dict(n=1, rate=1e-9, day=1e-6, clients=1, documents=1, top=1, speed=1e-6)
LARGEST = dict(cv=100.0, swing=1.0, zipf=100.0, day=1e9, pause=1e9, tool_seconds=1e9)


def generate(description: str, seed: int = 0) -> Iterator[Arrival]:
    """The trace of a description NAME[:FIELD=VALUE,...], a function of it and the seed; several
    joined by + are merged by time. cv: coefficient of variation of the gaps. swing, day: see
    diurnal. clients: each start is by one of them at random, named client0, client1, ...

    Fields of an arrival process (rate, cv, swing, day) change the times alone. ValueError names the
    generator and the field."""
    texts = re.split(r"\+(?=\s*[a-z])", description)  # 1e+9 is a number
    parts = [_generate(text, seed, i) for i, text in enumerate(texts)]
    return heapq.merge(*parts, key=lambda a: a.arrival_time) if len(parts) > 1 else parts[0]


def _generate(description: str, seed: int, part: int) -> Iterator[Arrival]:
    name, _, rest = description.strip().partition(":")
    if name not in GENERATORS:
        raise ValueError(f"{name!r} is not a generator; use {', '.join(GENERATORS)}")
    parameters = inspect.signature(GENERATORS[name]).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    defaults, values = COMMON | own, {}
    for item in filter(None, rest.split(",")):
        field, _, text = item.partition("=")
        if field not in defaults:
            raise ValueError(f"{name}: {field!r} is not a field; use {', '.join(defaults)}")
        if field in values:
            raise ValueError(f"{name}: {field} is given twice; give it once")
        values[field] = _parse_field(name, field, text, defaults[field])
    values = defaults | values
    rng, rng_times = (random.Random(f"{seed} {part} {kind}") for kind in ("prompts", "times"))
    times = arrival_times(values["n"], values["rate"], values["cv"], rng_times)
    if values["swing"]:
        times = diurnal(times, values["swing"], values["day"])
    texts = count((seed % 2**24 << 40) + (part << 32) + 1)  # other texts for another seed
    client, clients, priority = values["client"], values["clients"], values["priority"]
    owners: Owners = repeat((client, priority))
    if clients > 1:
        named = [(f"{client or 'client'}{i}", priority) for i in range(clients)]
        owners = iter(lambda: named[int(rng.random() * clients)], None)
    return GENERATORS[name](times, rng, texts, owners, **{field: values[field] for field in own})


def _parse_field(name: str, field: str, text: str, default: Any) -> Any:
    try:
        value = type(default)(text)
    except ValueError as e:
        kind = e if isinstance(default, Lengths) else {int: "an integer"}.get(type(default))
        raise ValueError(f"{name}: {field} must be {kind or 'a number'}, not {text!r}") from None
    if isinstance(default, (int, float)) and field != "priority":
        low, high = SMALLEST.get(field, 0), LARGEST.get(field, math.inf)
        if not low <= value <= high:
            most = f" and at most {high:g}" if high < math.inf else ""
            raise ValueError(f"{name}: {field} must be at least {low:g}{most}, not {text}")
    return value


# --------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------

FRESH = 2**64  # text ids of a file's prompts without segments: from here, above those of generators


def open_trace(source: str, seed: int = 0) -> Iterator[Arrival]:
    """The trace of a description, if it starts with the name of a generator, or else of a file."""
    named = source.partition(":")[0].strip() in GENERATORS
    return generate(source, seed) if named else read_trace(Path(source))


def read_trace(path: Path) -> Iterator[Arrival]:
    """The requests of a file in one of the forms above, read lazily. ValueError names the file, the
    row (1 is the first line of the file) and the column."""
    try:
        with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
            first_line = next((line for line in file if line.strip()), "")
            is_json, previous = first_line.lstrip().startswith("{"), None
            file.seek(0)
            for row, column, arrival in (_read_json if is_json else _read_csv)(path, file):
                time, last = arrival.arrival_time, 0.0 if previous is None else previous
                if time < last:
                    early = f"{time:g} s after the start is before the previous row's {last:g} s"
                    raise _row_error(path, row, column, f"{early}; sort the file by time")
                yield arrival
                previous = time
    except OSError as e:
        use = f"give a trace file or one of {', '.join(GENERATORS)}"
        raise ValueError(f"{path}: {e.strerror}; {use}") from None
    if previous is None:
        raise ValueError(f"{path}, row 1: no requests follow; give a file that has some")


def _row_error(path: Path, row: int, column: str, problem: object) -> ValueError:
    return ValueError(f"{path}, row {row}{column and f', {column}'}: {problem}")


def _check(ok: object, kind: str, value: object) -> None:
    if not ok:
        raise ValueError(f"must be {kind}, not {value!r:.60}")


def _number(text: str) -> Any:
    """A cell as JSON would have it: a string if it is not a number."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _tokens(value: Any) -> int:
    _check(type(value) is int and 0 < value < 10**9, "an integer from 1 to 999999999", value)
    return value


def _seconds(value: Any) -> float:
    _check(type(value) in (int, float) and 0 <= value < 1e15, "seconds, 0 or more", value)
    return float(value)


def _ticks(text: str) -> int:
    """Units of 100 ns until a UTC date and time with up to 7 fraction digits."""
    found = re.fullmatch(r"(.{10}[ T].{8})(?:\.([0-9]{1,7}))?(?:\+00:00|Z)?", text)
    _check(found, "YYYY-MM-DD HH:MM:SS.FFFFFFF in UTC", text)
    whole = datetime.fromisoformat(found[1]) - datetime(1970, 1, 1)
    return 10**7 * (86400 * whole.days + whole.seconds) + int((found[2] or "").ljust(7, "0"))


CSV_FORMS = (  # columns of time, prompt tokens and output tokens; the unit of time per second
    ("Timestamp", "Request tokens", "Response tokens", lambda text: _seconds(_number(text)), 1),
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens", _ticks, 10**7),
)


def _read_csv(path: Path, file: TextIO) -> Iterator[tuple[int, str, Arrival]]:
    rows, first, failed = csv.reader(file), None, 0
    row, column, header = 1, "", next(rows, [])
    try:
        form = next((form for form in CSV_FORMS if form[0] in header), None)
        if form is None:
            known = " or ".join(", ".join(form[:3]) for form in CSV_FORMS)
            raise ValueError(f"not a trace; give JSON lines, or CSV with a header: {known}")
        *columns, parse_time, unit = form
        for column in columns:
            if column not in header:
                raise ValueError(f"no such column; a header has {', '.join(columns)}")
        indices = [*map(header.index, columns)]
        at_client = header.index("Session ID") if "Session ID" in header else None
        for cells in rows:
            row, column = rows.line_num, ""
            if len(cells) != len(header):
                raise ValueError(f"{len(cells)} columns, but the header has {len(header)}")
            column, (time, n_prompt, n_output) = columns[0], (cells[i].strip() for i in indices)
            time = parse_time(time)
            first = time if first is None else first
            if n_output == "0":
                failed += 1
                continue
            column = columns[1]
            prompt = ((FRESH + 2 * row, _tokens(_number(n_prompt))),)
            column = columns[2]
            client = "" if at_client is None else cells[at_client]
            output = dict(max_new_tokens=_tokens(_number(n_output)), output_id=FRESH + 2 * row + 1)
            yield row, columns[0], Arrival((time - first) / unit, prompt, client=client, **output)
    except (ValueError, csv.Error) as e:
        raise _row_error(path, row, column, e) from None
    if failed:
        warnings.warn(f"{path}: skipped {failed} rows without output (failed requests)")


def _segments(value: Any) -> Any:
    """prompt_tokens: a number, or the prompt."""
    if not isinstance(value, list):
        return _tokens(value)
    ok = value and all(isinstance(s, list) and len(s) == 2 and type(s[0]) is int for s in value)
    _check(ok, "a number of tokens or a list of [text id, tokens]", value)
    for (a, _), (b, _) in zip(value, value[1:]):
        _check(a != b or a < 0, "segments whose neighbours have other texts; join these", [a, b])
    return tuple((text, _tokens(n)) for text, n in value)


def _token_ids(value: Any) -> Prompt:
    ok = isinstance(value, list) and value and all(type(i) is int and i >= 0 for i in value)
    _check(ok, "a list of token ids", value)
    return prompt_of(value)


def _tool_calls(value: Any) -> tuple[tuple[int, float, int], ...]:
    ok = isinstance(value, list) and all(isinstance(c, list) and len(c) == 3 for c in value)
    _check(ok, "a list of [new tokens before it, seconds, tokens of the answer]", value)
    calls = tuple((_tokens(at), _seconds(seconds), _tokens(n)) for at, seconds, n in value)
    times = [at for at, _, _ in calls]
    _check(times == sorted({*times}), "in ascending order of new tokens", times)
    return calls


def _string(value: Any) -> str:
    _check(isinstance(value, str), "a string", value)
    return value


def _integer(value: Any) -> int:
    _check(type(value) is int, "an integer", value)
    return value


JSON_FIELDS = dict(arrival_time=_seconds, max_new_tokens=_tokens, prompt_tokens=_segments)
JSON_FIELDS |= dict(prompt_ids=_token_ids, client=_string, priority=_integer)
JSON_FIELDS |= dict(tool_calls=_tool_calls, output_id=_integer)


def _read_json(path: Path, file: TextIO) -> Iterator[tuple[int, str, Arrival]]:
    for row, line in enumerate(file, 1):
        if not line.strip():
            continue
        text, column = FRESH + 2 * row, ""
        values = {"arrival_time": 0.0, "output_id": text + 1}
        try:
            given = json.loads(line)
            _check(isinstance(given, dict), "a JSON object", given)
            given.pop("id", None)
            for column, value in given.items():
                if column not in JSON_FIELDS:
                    raise ValueError(f"not a field of a trace; use {', '.join(JSON_FIELDS)}")
                values[column] = JSON_FIELDS[column](value)
            column = "max_new_tokens"
            _check(column in values, "given", None)
            column = "prompt_tokens"
            prompts = [values.pop(x) for x in (column, "prompt_ids") if x in values]
            _check(len(prompts) == 1, "given, or prompt_ids, and not both", prompts)
            prompt = prompts[0] if isinstance(prompts[0], tuple) else ((text, prompts[0]),)
            arrival, column = Arrival(prompt=prompt, **values), "tool_calls"
            late = [call for call in arrival.tool_calls if call[0] >= arrival.max_new_tokens]
            _check(not late, "before the last new token", late)
        except (ValueError, RecursionError) as e:
            raise _row_error(path, row, column, e) from None
        yield row, "arrival_time", arrival


def write_trace(path: Path, arrivals: Iterable[Arrival]) -> None:
    """Write a trace as JSONL; read_trace gives equal Arrivals. A file is replaced when the trace is
    complete: of two processes that write it, the trace of the last one remains."""
    is_file = path.is_file() or not path.exists()  # not a device or pipe
    target = path.with_name(f".{path.name}.{os.getpid()}.tmp") if is_file else path
    try:
        _write_rows(target, arrivals)
        if is_file:
            os.replace(target, path)
    finally:
        if is_file:
            target.unlink(missing_ok=True)


def _write_rows(path: Path, arrivals: Iterable[Arrival]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for a in arrivals:
            values = dict(arrival_time=a.arrival_time, prompt_tokens=a.prompt)
            values |= dict(max_new_tokens=a.max_new_tokens, output_id=a.output_id)
            optional = dict(client=a.client, priority=a.priority, tool_calls=a.tool_calls)
            values |= {name: value for name, value in optional.items() if value}
            file.write(json.dumps(values) + "\n")


def main(
    source: str = "conversations:n=200,tools=1", out: str = "", seed: str = "0", *more: str
) -> None:
    if more or not re.fullmatch(r"-?[0-9]{1,18}", seed):
        given = f"{more[0]!r} is too much" if more else f"SEED must be an integer, not {seed!r}"
        raise ValueError(f"{given}; usage: python serving/traces.py TRACE [OUT.jsonl] [SEED]")
    trace, n_shared, seen = list(open_trace(source, int(seed))), 0, set()
    if out:
        write_trace(Path(out), trace)
    for a in trace:
        prefixes = [*accumulate(a.prompt, lambda *pair: hash(pair), initial=0)][1:]
        n_shared += sum(n for (_, n), prefix in zip(a.prompt, prefixes) if prefix in seen)
        seen.update(prefixes)
    seconds, n_clients = trace[-1].arrival_time, len({a.client for a in trace})
    print(f"{len(trace)} requests of {n_clients} clients in {seconds:.1f} s")
    for name in ("n_prompt", "max_new_tokens"):
        sizes = sorted(getattr(a, name) for a in trace)
        mean, p99 = sum(sizes) / len(sizes), sizes[math.ceil(0.99 * len(sizes)) - 1]
        print(f"{name:15} mean {mean:8.1f}   p99 {p99:6}   max {sizes[-1]:6}")
    print(f"shared with earlier ones {n_shared / sum(a.n_prompt for a in trace):6.0%} of n_prompt")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (OSError, ValueError) as e:
        raise SystemExit(f"error: {e}") from None
