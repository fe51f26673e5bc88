"""The files of --batch: lines of requests and lines of results, and which result is of which line.

A run that is repeated keeps the results that it finds, so each says what it belongs to by a hash of
two parts: one of what all results of a run depend on (weights, tokenizer, chat template, flags),
one of its request's line. `request_lines` compares them and refuses a results file of other
requests, flags or weights; flags that change the text by rounding alone (NO_EFFECT) are left out.

Cost: SHA-256 of the weights on all cores, about a second per GB and core.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from generation.config import GenerateConfig
from huggingface.tokenizer import one_line

Id = str | int
MAX_DEPTH = 100  # of nested JSON
LINE_START = b'{"id": '  # the first bytes of every line of a results file
MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*/*.jinja", "*.gguf")
PIECE = 2**26  # bytes that a thread hashes at once
FOLDERS = ("checkpoint", "adapter", "adapters", "models")  # are in the hash by their content
# settings that have no effect on a result but by rounding
NO_EFFECT = {
    *"batch out device attention fixed_max compile offload experts json_schema".split(),
    *"tp pp ep cp shard_batch ffn_2d expert_load num_redundant_experts expert_spread".split(),
    *"kv_blocks block_size max_num_batched_tokens max_num_seqs prefix_cache policy".split(),
    *"continuous kv_swap kv_layout kv_store kv_store_size kv_store_host".split(),
    *"merge_adapters finetune reference exit_layers".split(),
}


class RequestLine(NamedTuple):
    """A line of a request file. values: its object, or why it is invalid."""

    id: Id
    line: int  # from 1
    hash: str
    values: dict[str, Any] | ValueError


class ResultLine(NamedTuple):
    """What is known of an existing result."""

    hash: str
    is_error: bool


Results = Mapping[tuple[Id, int], ResultLine]  # by id and line of the request


# --------------------------------------------------------------------------------------------------
# JSON
# --------------------------------------------------------------------------------------------------


def parse_json(data: bytes) -> Any:
    """A JSON value from a user. ValueError, which the caller puts a name before."""
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"is not JSON ({one_line(e)})") from None
    # nested deeper than MAX_DEPTH only with more brackets than that: most lines are not searched
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        level = [value]  # of one depth
        for _ in range(MAX_DEPTH):
            nested = (x for x in level if isinstance(x, (dict, list)))
            level = [*chain(*(x.values() if isinstance(x, dict) else x for x in nested))]
        if level:
            raise ValueError(f"is nested more than {MAX_DEPTH} deep")
    return value


def parse_object(data: bytes) -> dict[str, Any]:
    """A line's JSON object. ValueError."""
    try:
        value = parse_json(data)
    except ValueError as e:
        raise ValueError(f"the line {e}; fix it") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, not a {type(value).__name__}")
    return value


def parse_id(values: Mapping[str, Any], default: Any) -> Id:
    """A request's id, by default its line's number. ValueError."""
    id = default if values.get("id") is None else values["id"]
    if type(id) not in (str, int):
        raise ValueError(f"id must be a string or an integer, not {id!r}")
    return id


# --------------------------------------------------------------------------------------------------
# What a result depends on
# --------------------------------------------------------------------------------------------------


def run_hash(args: GenerateConfig) -> str:
    """The hash of what all results of a run depend on. ValueError for a folder that is missing."""
    names = [name for name in sorted(args.flags()) if name not in {*NO_EFFECT, *FOLDERS}]
    names = [name for name in names if not name.startswith(("speculate", "draft"))]
    settings = {name: repr(getattr(args, name)) for name in names}
    settings["grammar"] = repr(args.grammar)
    if args.dummy and Path(args.dummy).is_file():
        settings["dummy"] = _digest(Path(args.dummy).read_bytes())
    folders = [] if args.dummy else [("checkpoint", args.checkpoint)]
    folders += [("adapter", args.adapter)] if args.adapter else []
    content = [(name, folder_hash(folder)) for name, folder in folders]
    for flag in ("adapters", "models"):
        for name, folder in getattr(args, flag) or ():
            try:
                content.append((name, folder_hash(folder)))
            except ValueError as e:
                raise ValueError(f"--{flag} {name}={folder}: {e}") from None
    return _digest(json.dumps([settings, content]).encode())


def folder_hash(folder: Path) -> str:
    """The hash of all bytes of a model's files, or of a GGUF file; a sample could miss what a
    fine-tune has changed. ValueError if it does not exist."""
    if not folder.exists():
        raise ValueError(f"{folder}: no such folder")
    files = {path for pattern in MODEL_FILES for path in folder.glob(pattern) if path.is_file()}
    files |= {folder} if folder.is_file() else set()
    pieces = [(x, start) for x in sorted(files) for start in range(0, x.stat().st_size, PIECE)]

    def piece_hash(piece: tuple[Path, int]) -> list[str]:
        path, start = piece
        with open(path, "rb") as file:
            file.seek(start)
            return [path.name, hashlib.sha256(file.read(PIECE)).hexdigest()]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return _digest(json.dumps([*pool.map(piece_hash, pieces)]).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


# --------------------------------------------------------------------------------------------------
# The files
# --------------------------------------------------------------------------------------------------


def request_lines(path: Path, run: str, previous: Results) -> Iterator[RequestLine]:
    """Each line of a request file that is not empty. run: the run's hash. ValueError if a previous
    result is not of this run and file."""
    first: dict[Id, int] = {}  # id -> number of the first line with it
    unmatched = dict(previous)
    with open(path, "rb") as file:
        for line, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            id: Id = line
            values: dict[str, Any] | ValueError
            text = raw.strip()
            try:
                values = parse_object(raw)
                text = json.dumps(values, sort_keys=True).encode()
                id = parse_id(values, line)
                if (other := first.setdefault(id, line)) != line:
                    raise ValueError(f"id {id!r} is already used by line {other}; give another")
            except ValueError as e:
                first.setdefault(id, line)  # without a readable id: the line number
                values = e
            request = RequestLine(id, line, f"{run}-{_digest(text)}", values)
            if (result := unmatched.pop((id, line), None)) is not None:
                check_result(request, result, path)
            yield request
    if unmatched:
        id, line = next(iter(unmatched))
        raise ValueError(
            f"{path} has no request for the result with id {id!r} and line {line}; name another "
            "file"
        )


def check_result(request: RequestLine, result: ResultLine, path: Path) -> None:
    """ValueError if an existing result is of another request."""
    if result.hash == request.hash:
        return
    if result.hash.partition("-")[0] != request.hash.partition("-")[0]:
        raise ValueError(
            "its results are of other flags or of another model (weights, tokenizer, chat "
            "template); name another file, or delete it"
        )
    raise ValueError(
        f"{path}, line {request.line}: has changed since its result (id {request.id!r}) was "
        "written; delete that result, or name another file"
    )


def read_results(path: Path) -> dict[tuple[Id, int], ResultLine]:
    """The results in a file.

    Truncates an incomplete last line. ValueError if it is not a results file, which is then
    unchanged.
    """
    found: dict[tuple[Id, int], ResultLine] = {}
    if not path.exists():
        return found
    complete_bytes = 0
    with open(path, "r+b") as file:
        for line, raw in enumerate(file, 1):
            shared = min(len(raw), len(LINE_START))
            if not raw.endswith(b"\n") and raw[:shared] == LINE_START[:shared]:
                break  # the start of a result, which was not written to its end
            try:
                result = parse_object(raw)
                key = parse_id(result, None), result["line"]
                found[key] = ResultLine(str(result.get("hash")), "error" in result)
            except (ValueError, KeyError, TypeError):
                fix = "delete the file or give another --out"
                raise ValueError(f"{path}, line {line}: not a result; {fix}") from None
            complete_bytes += len(raw)
        file.truncate(complete_bytes)
    return found
