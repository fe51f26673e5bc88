"""Folders of token rows: tokenized in parallel, read while they are written, mixed by weight.

    documents -> tokenize -> folder of shards -> Shards -> Stream.rows(step, indices)

`tokenize` streams documents through worker processes and writes shards of rows (data.py), each
atomically and from its own documents only: memory is bounded, a killed run continues after the last
shard, and `Shards` reads finished shards while others are written. `Stream.rows` is a pure function
of seed, step, sample index and files: no state to save, the same rows on any number of ranks.

A shard's name has its number of rows and the start of its sha256. The size is checked when a folder
is opened, the content when a process reads the first row of a shard: a truncated or changed file is
never trained on, and a start does not read the whole data set (MosaicML's streaming checks its
hashes when it downloads a shard). Cost: 6 ms per shard of 8 MB and process.

When it loses: a sorted source stays roughly sorted in its first epoch, which shuffles a few shards
at a time.

Equivalence (test_all.py): a shard folder is the same to the byte with 0, 1 or n workers,
uninterrupted or continued after a failure. Part of train.py. Needs POSIX locks.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import array
import hashlib
import json
import math
import re
import signal
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from training.data import DELIMITERS, BatchEncode, Delimiters, Document, delimit
from training.data import open_atomically, pack_rows, read_tokens, window_rows
from training.writer_lock import has_writer, writer_lock


def _check(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --------------------------------------------------------------------------------------------------
# Tokenizing into shards
# --------------------------------------------------------------------------------------------------

ABOUT, INDEX, FAILED = "about.json", "index.json", "failed.txt"
REBUILD = "delete the folder, and --resume tokenizes the data again"
# number, total documents up to its end, rows, start of its sha256 (older folders lack these two)
SHARD_NAME = re.compile(r"(\d{6,})-(\d{12,})(?:-(\d+)-([0-9a-f]{16}))?\.rows")


class ShardFile(NamedTuple):
    """A shard, by its name. rows, digest: None in folders that older versions have written."""

    path: Path
    documents: int  # of all shards up to this one
    rows: int | None
    digest: str | None


def list_shards(folder: Path, finished: bool = False) -> list[ShardFile]:
    """The shards of a folder, in order, up to the first that is missing: a listing of a folder that
    grows may lack one. ValueError if the folder is finished, a number is there twice, or a *.rows
    file has another name."""
    shards: list[ShardFile] = []
    for path in sorted(folder.glob("*.rows")):
        match = SHARD_NAME.fullmatch(path.name)
        _check(match, f"{path}: is not the name of a shard; move it out of the folder")
        number, documents, rows, digest = match.groups()
        twice = f"{path}: there is another shard of this number; remove the copy"
        _check(int(number) >= len(shards), twice)
        if int(number) > len(shards):
            missing = f"{folder}: the shard before {path.name} is missing; restore it, or {REBUILD}"
            _check(not finished, missing)
            break
        shards.append(ShardFile(path, int(documents), rows and int(rows), digest))
    return shards


def read_index(folder: Path) -> dict[str, int] | None:
    """The total {"rows", "documents"} of a finished folder; None: not finished, or damaged."""
    index = _read_json(folder / INDEX) or {}
    return index if all(type(index.get(name)) is int for name in ("rows", "documents")) else None


def map_shard(shard: ShardFile, width: int) -> Tensor:
    """A shard's rows (R, width), memory-mapped. ValueError if its size is another than written."""
    size, row = shard.path.stat().st_size, 4 * width
    written = size // row * row if shard.rows is None else shard.rows * row
    error = f"{shard.path}: has {size} bytes, but {written} were written; restore it, or {REBUILD}"
    _check(size == written, error)
    return read_tokens(shard.path).view(-1, width)


def shard_digest(rows: Tensor) -> str:
    """The start of the sha256 of a shard's rows, int32 in memory."""
    return hashlib.sha256(rows.numpy()).hexdigest()[:16]


def tokenize(
    documents: Iterable[Document], make_encode: Callable[[], BatchEncode], folder: Path,
    seq_len: int, pack: bool, workers: int = 0, *, delimiters: Delimiters = DELIMITERS,
    about: Mapping[str, Any] | None = None, shard_tokens: int = 1 << 21,
) -> dict[str, int]:  # fmt: skip
    """Write shards of rows of `documents` into `folder`, for Shards to read; returns the total
    {"rows", "documents"}.

    make_encode is pickled and called once in each of `workers` processes (0: once, in this one).
    delimiters: token ids around each document. pack: best-fit packing, else windows. about (JSON):
    what else the rows depend on. A folder written with the same values is continued after its last
    shard, or kept if finished; any other is emptied. ValueError if a document cannot be encoded, a
    worker dies, or another process is writing the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = {"seq_len": seq_len, "pack": pack, "shard_tokens": shard_tokens, "ends": delimiters}
    make_encode = partial(_with_delimiters, make_encode, delimiters)
    about = json.loads(json.dumps({**(about or {}), **own}))
    with writer_lock(folder):
        if _read_json(folder / ABOUT) != about:
            for name in (INDEX, ABOUT, "*.rows"):
                _remove(folder, name)
            _write_json(folder / ABOUT, about)
        if (index := read_index(folder)) is not None:
            return index
        _remove(folder, ".*.tmp")
        _remove(folder, FAILED)
        try:
            return _write_shards(documents, make_encode, folder, workers, about)
        except Exception as e:  # recorded for readers on other ranks, and raised
            if "DataLoader worker" in str(e):  # raised anywhere, by torch's handler of SIGCHLD
                e = ValueError("a tokenizing worker died (out of memory?); use fewer --workers")
            with suppress(OSError):
                (folder / FAILED).write_text(f"{e}\n", encoding="utf-8")
            raise e from None


def _write_shards(
    documents: Iterable[Document], make_encode: Callable[[], BatchEncode], folder: Path,
    workers: int, about: Mapping[str, Any],
) -> dict[str, int]:  # fmt: skip
    """Write the shards that follow those in the folder, and the index."""
    make_rows = pack_rows if about["pack"] else window_rows
    shards = list_shards(folder)
    done = shards[-1].documents if shards else 0
    number, total, pending, size = len(shards), done, [], 0

    def write() -> None:
        rows = make_rows(pending, about["seq_len"]).contiguous()
        name = f"{number:06}-{total:012}-{len(rows)}-{shard_digest(rows)}.rows"
        with open_atomically(folder / name) as f:
            f.write(rows.numpy())

    for ids in _encode_documents(islice(documents, done, None), make_encode, workers):
        pending.append(torch.frombuffer(ids, dtype=torch.int32))
        total, size = total + 1, size + len(pending[-1])
        if size >= about["shard_tokens"]:
            write()
            number, pending, size = number + 1, [], 0
    if pending:
        write()
    _check(total, f"{folder}: there are no documents to write")
    width = about["seq_len"] + 1
    rows = sum(map(len, (map_shard(shard, width) for shard in list_shards(folder))))
    index = {"rows": rows, "documents": total}
    _write_json(folder / INDEX, index)
    return index


def _encode_documents(
    documents: Iterable[Document], make_encode: Callable[[], BatchEncode], workers: int
) -> Iterator[bytearray]:
    """Each document as int32 ids, in order."""
    options: dict[str, Any] = {}
    if workers:  # spawned: safe with threads and CUDA
        options = dict(num_workers=workers, multiprocessing_context="spawn", prefetch_factor=1)
    loader = DataLoader(
        _EncodedChunks(make_encode), sampler=_chunks(documents), batch_size=None, collate_fn=list,
        worker_init_fn=_ignore_interrupts, generator=torch.Generator(), **options,
    )  # fmt: skip
    for ids in chain.from_iterable(loader):
        if isinstance(ids, ValueError):
            raise ids
        yield ids


class _EncodedChunks(Dataset):
    """A DataLoader's data set whose "indices" are the chunks of documents to encode."""

    def __init__(self, make_encode: Callable[[], BatchEncode]):
        self.make_encode, self.encode = make_encode, None

    def __getitem__(self, chunk: list[Document]) -> list[bytearray | ValueError]:
        try:
            self.encode = self.encode or self.make_encode()
            return _encode_chunk(self.encode, chunk)
        except Exception as e:  # returned, because DataLoader adds a traceback to what is raised
            return [ValueError(f"{e}")]


def _ignore_interrupts(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent


def _chunks(documents: Iterable[Document], characters: int = 1 << 19) -> Iterator[list[Document]]:
    chunk, size = [], 0
    for document in documents:
        chunk.append(document)
        size += len(document[1])
        if size >= characters:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _encode_chunk(encode: BatchEncode, chunk: list[Document]) -> list[bytearray]:
    try:
        encoded = encode([text for _, text in chunk])
    except Exception as e:  # an encoder may raise anything
        if len(chunk) > 1:
            for document in chunk:  # find the one that fails: this raises
                _encode_chunk(encode, [document])
        names = " to ".join(dict.fromkeys((chunk[0][0], chunk[-1][0])))
        why = f"cannot be tokenized ({type(e).__name__}: {e})"
        raise ValueError(f"document {names}: {why}; fix it or remove it") from None
    return [bytearray(array.array("i", ids).tobytes()) for ids in encoded]


def _with_delimiters(make_encode: Callable[[], BatchEncode], delimiters: Delimiters) -> BatchEncode:
    """make_encode(), with delimiters added around each document."""
    encode = make_encode()
    return lambda texts: [delimit(ids, delimiters) for ids in encode(texts)]


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):  # a damaged file is written again
        return None
    return found if isinstance(found, dict) else None


def _write_json(path: Path, value: Any) -> None:
    with open_atomically(path) as f:
        f.write(json.dumps(value).encode())


def _remove(folder: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        path.unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------
# Sources of rows, and the stream that mixes them
# --------------------------------------------------------------------------------------------------


class Rows:
    """Rows in memory, (R, T + 1), as a source of Stream."""

    def __init__(self, rows: Tensor):
        _check(len(rows), "rows: empty, nothing to train on")
        self.all = rows

    def __len__(self) -> int:
        return len(self.all)

    def row(self, i: int) -> Tensor:
        """(T + 1,)."""
        return self.all[i]

    def block(self, i: int) -> range | None:
        """The range of rows shuffled together with row i in the first epoch; None past the end."""
        return range(len(self)) if i < len(self) else None


class Shards:
    """Memory-mapped rows of a folder that tokenize writes or has written, as a source of Stream.

    Reading a row waits until it is written. ValueError if the writer failed, if there has been none
    for `timeout` seconds, or if a shard is not as it was written. about: values that the folder's
    about.json must have, also waited for. block: number of shards shuffled together in the first
    epoch. The file system must be shared by all ranks, with locks; else write a folder on each
    node.
    """

    def __init__(
        self, folder: Path, about: Mapping[str, Any] | None = None, *,
        block: int = 4, timeout: float = 10.0,
    ):  # fmt: skip
        self.folder, self.timeout, self.block_shards = Path(folder), timeout, block
        self.index: dict[str, int] | None = None
        self.files: list[ShardFile] = []
        self.maps: list[Tensor] = []
        self.verified: set[int] = set()  # shards whose content this process has checked
        self.row_offsets = [0]  # index of the first row of each shard, and of the next one
        required = json.loads(json.dumps(dict(about or {})))

        def has_required() -> bool:
            actual = _read_json(self.folder / ABOUT)
            return actual is not None and actual | required == actual

        self._wait(has_required, "was made from other data or settings")
        self.width = _read_json(self.folder / ABOUT)["seq_len"] + 1
        self._refresh()

    def _wait(self, ready: Callable[[], bool], what: str = "is not finished") -> None:
        since, failed = time.monotonic(), self.folder / FAILED
        checked, interval = -math.inf, min(1.0, self.timeout / 10)
        while not ready():
            # not in every turn: the lock is of one writer and of the readers on all ranks
            if (now := time.monotonic()) - checked < interval:
                time.sleep(0.02)
                continue
            checked = now
            if has_writer(self.folder):
                since = now
            elif failed.exists() or now - since > self.timeout:
                why = f"no process is writing it, and it {what}"
                if failed.exists():
                    why = f"its writer failed: {failed.read_text(encoding='utf-8').strip()}"
                raise ValueError(f"{self.folder}: {why}; --resume tokenizes it again")

    def _refresh(self) -> None:
        """Map shards written since the last call."""
        if self.index is not None:
            return
        index = read_index(self.folder)  # read first: it is written after all shards
        for file in list_shards(self.folder, index is not None)[len(self.files) :]:
            self.maps.append(map_shard(file, self.width))
            self.files.append(file)
            self.row_offsets.append(self.row_offsets[-1] + len(self.maps[-1]))
        have, written = self.row_offsets[-1], index["rows"] if index else None
        error = f"{self.folder}: has {have} of the {written} rows written; {REBUILD}"
        _check(written in (None, have), error)
        self.index = index

    def _shard(self, i: int) -> int | None:
        """The index of the shard with row i, or None."""
        return bisect_right(self.row_offsets, i) - 1 if 0 <= i < self.row_offsets[-1] else None

    @property
    def finished(self) -> bool:
        """Whether all rows are written."""
        self._refresh()
        return self.index is not None

    def __len__(self) -> int:
        _check(self.finished, f"{self.folder}: its length is unknown until all rows are written")
        return self.row_offsets[-1]

    def row(self, i: int) -> Tensor:
        """(T + 1,) int32. Waits until it is written."""
        self._wait(lambda: self._shard(i) is not None or self.finished)
        shard = self._shard(i)
        _check(shard is not None, f"{self.folder}: has {self.row_offsets[-1]} rows, no row {i}")
        self._verify(shard)
        return self.maps[shard][i - self.row_offsets[shard]]

    def _verify(self, i: int) -> None:
        """ValueError if the content of shard i, read for the first time, is not what was
        written."""
        path, digest = self.files[i].path, self.files[i].digest
        if i not in self.verified and digest is not None:
            same = shard_digest(self.maps[i]) == digest
            _check(same, f"{path}: has changed since it was written; restore it, or {REBUILD}")
        self.verified.add(i)

    def block(self, i: int) -> range | None:
        """The range of rows shuffled together with row i in the first epoch; None past the end.
        Waits until all of them are written."""
        n = self.block_shards

        def is_written() -> bool:
            shard = self._shard(i)
            return shard is not None and shard // n * n + n < len(self.row_offsets)

        self._wait(lambda: is_written() or self.finished)
        if (shard := self._shard(i)) is None:
            return None
        first = shard // n * n
        last = min(first + n, len(self.maps))
        return range(self.row_offsets[first], self.row_offsets[last])


DECIMAL = re.compile(r"\d+(\.\d*)?|\.\d+", re.ASCII)
NUMBER = re.compile(r"[-+]?(inf(inity)?|nan|(\d+\.?\d*|\.\d+)(e[-+]?\d+)?)", re.I)


@dataclass(frozen=True)
class Source:
    """A source of samples, and its weight relative to the other sources."""

    path: str
    weight: Fraction


def parse_sources(given: Sequence[str]) -> list[Source]:
    """Parse --data, such as ["a.jsonl=3", "folder"]: paths, each with a weight after its last "="
    (default 1). A path that exists as it is written has no weight. Weights are shares of the
    samples, independent of the sizes."""
    sources = []
    for text in given:
        path, equals, number = text.rpartition("=")
        is_number = equals and NUMBER.fullmatch(number) and not Path(text).exists()
        weighted = is_number and DECIMAL.fullmatch(number)
        why = "the weight must be a decimal number above 0, such as 3 or 0.5"
        _check(weighted or not is_number, f"--data {text}: {why}")
        source = Source(path, Fraction(number)) if weighted else Source(text, Fraction(1))
        _check(source.path, f"--data {text}: no path; write PATH or PATH=WEIGHT")
        _check(source.weight > 0, f"--data {text}: the weight must be greater than 0, or omit it")
        repeated = source.path in (other.path for other in sources)
        _check(not repeated, f"--data {text}: given twice; give it once, with a larger weight")
        sources.append(source)
    return sources


def _rng(*parts: int) -> torch.Generator:
    """A generator seeded by a hash of all numbers; manual_seed itself uses 32 bits only."""
    return torch.Generator().manual_seed(zlib.crc32(repr(parts).encode()))


class Stream:
    """Samples of several sources, mixed by weight: sample g = step * batch_size + index.

    Every aligned block of `period` samples (the sum of the weights as smallest integers) contains
    exactly each source's share, in shuffled order.
    """

    def __init__(
        self, sources: Sequence[Rows | Shards], weights: Sequence[Fraction | float],
        seed: int, batch_size: int,
    ):  # fmt: skip
        _check(sources and len(sources) == len(weights), "Stream needs one weight per source")
        exact = [Fraction(str(w)) for w in weights]
        _check(min(exact) > 0, f"weights must be greater than 0, not {[*map(float, exact)]}")
        scale = math.lcm(*(w.denominator for w in exact))
        whole = [int(w * scale) for w in exact]
        self.counts = [n // math.gcd(*whole) for n in whole]
        self.period = sum(self.counts)
        error = f"weights {[*map(float, exact)]} have a period of {self.period} samples; round them"
        _check(self.period <= 1_000_000, error)
        self.sources, self.seed, self.batch_size = [*sources], seed, batch_size
        self._mix = lru_cache(64)(self._mix)
        self._order = lru_cache(2 * len(sources))(self._order)

    def _mix(self, period: int) -> tuple[list[int], list[int]]:
        """For every sample of a period: its source, and how many of that source precede it."""
        ids = torch.repeat_interleave(torch.tensor(self.counts))
        ids = ids[torch.randperm(self.period, generator=_rng(self.seed, 0, period))].tolist()
        seen, before = [0] * len(self.counts), []
        for k in ids:
            before.append(seen[k])
            seen[k] += 1
        return ids, before

    def _order(self, source: int, epoch: int, first: int, n: int) -> Tensor:
        return torch.randperm(n, generator=_rng(self.seed, 1, source, epoch, first))

    def source_of(self, g: int) -> tuple[int, int]:
        """(index of sample g's source, its number among that source's samples)."""
        period, i = divmod(g, self.period)
        ids, before = self._mix(period)
        k = ids[i]
        return k, period * self.counts[k] + before[i]

    def row(self, g: int) -> Tensor:
        """Sample g, (T + 1,)."""
        k, i = self.source_of(g)
        source = self.sources[k]
        if (block := source.block(i)) is not None:
            order = self._order(k, 0, block.start, len(block))
            return source.row(block.start + int(order[i - block.start]))
        epoch, i = divmod(i, len(source))
        return source.row(int(self._order(k, epoch, 0, len(source))[i]))

    def rows(self, step: int, indices: Iterable[int]) -> Tensor:
        """Samples `indices` of the batch of `step`: encoded rows (len(indices), T + 1) int64."""
        return torch.stack([self.row(step * self.batch_size + i) for i in indices]).long()
