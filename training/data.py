"""Training data: packing, tokenizing and mixing text, chats and preference pairs into token rows.

A step needs (B, T + 1) ids, but documents vary in length. Splitting one concatenated stream into
rows (`get_batch`) splits documents; one document per row, padded or truncated, wastes most of the
row or loses the end. Best-fit packing (Ding et al., arXiv:2404.10830) is bin packing: documents
longer than a row are split into pieces, then every piece, longest first, goes whole into the
fullest row that still has room for it. No token is lost, and almost nothing is padding.

Targets and document boundaries are encoded in the values, so that a row is a single tensor in
files, batches and micro-batches (`decode` is the definition):

    0 <= v          token v mod 2^30, a target (of the position before it)
    v < 0           token ~v, an input but never a target: prompt or padding
    bit 30 (START)  of v, or of ~v: first token of a document. It is never a target, and in packed
                    rows its position is 0, by which attention separates documents

    documents -> tokenize -> folder of shards -> Shards \
    chats -> chat_rows, pairs -> preference_rows -> Rows -> Stream.rows(step, indices) -> decode

`tokenize` streams documents through worker processes and writes shards, each atomically and from
its own documents only: memory is bounded, a killed run continues after the last shard, and `Shards`
reads finished shards while others are written. `Stream.rows` is a pure function of seed, step,
sample index and files: no state to save, the same rows on any number of ranks.

Gain: with rows of 2048 tokens and documents about as long as web pages, best fit fills 99.9%, one
document per row 31%. Cost: seconds of packing for a million documents; 4 bytes per token on disk.
When it loses: if few documents are shorter than a row; if attention ignores positions, documents
attend to each other; a sorted source stays roughly sorted in its first epoch.

Hook: positions. Equivalence (test_all.py): decoded rows hold every prediction of every document
once, with its own position, under any packing; and a shard folder is the same to the byte with 0, 1
or n workers, uninterrupted or after kill -9. Needs: torch, and POSIX locks for tokenize.
`python training/data.py` checks itself and prints a table.
"""

from __future__ import annotations

import array
import fcntl
import hashlib
import json
import math
import os
import re
import signal
import sysconfig
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

BOS, EOS = 1, 2  # of tokenizers trained by dataset.train_tokenizer
DELIMITERS = (BOS,), (EOS,)  # tokens before and after a document
IGNORE = -100  # ignore_index of cross-entropy
START = 1 << 30  # first token of a document
PAD = ~0  # token 0, not a target

Document = tuple[str, str]  # (name, text); the name decides whether it is for validation
Messages = list[dict[str, Any]]  # {"role": ..., "content": ...}
BatchEncode = Callable[[list[str]], list[list[int]]]  # texts to ids, without BOS and EOS
Fit = Callable[[Sequence[int], int], list[list[int]]]  # (lengths, capacity) -> indices per bin
Render = Callable[[Messages, bool], str]  # (messages, add_generation_prompt): a chat template
Preference = tuple[Any, Any, Any]  # prompt, chosen, rejected: strings, or lists of messages


class Question(NamedTuple):
    """A multiple-choice question. A choice continues the prompt: its leading space is its own."""

    prompt: str
    choices: list[str]
    answer: int  # index of the right choice


def _check(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --------------------------------------------------------------------------------------------------
# Documents
# --------------------------------------------------------------------------------------------------


def read_documents(data: str | None) -> list[Document]:
    """The documents of --data: a text file, a folder of them, or JSONL with "text"; by default the
    source of Python's standard library without tests. In a fixed order."""
    return list(stream_documents(data))


def stream_documents(data: str | None) -> Iterator[Document]:
    """read_documents as a generator: a folder is read file by file, JSONL line by line."""
    path = Path(data or sysconfig.get_paths()["stdlib"])
    _check(path.exists(), f"--data {path}: no such file or folder")
    if path.is_dir():
        documents = _folder(path, "*.py" if data is None else "*")
    elif path.suffix in (".jsonl", ".ndjson"):
        documents = _jsonl(path)
    else:
        whole = _text(path) or ""  # split, so that part of a single file can be for validation
        documents = ((f"{i}", whole[i : i + 8192]) for i in range(0, len(whole), 8192))
    found = False
    for name, text in documents:
        if text.strip():
            found = True
            yield name, text
    _check(found, f'--data {path}: holds no text (UTF-8 files, or JSONL lines with "text")')


def _text(path: Path) -> str | None:
    try:
        text = path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, OSError):
        return None
    return None if "\0" in text else text


def _folder(root: Path, pattern: str) -> Iterator[Document]:
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    for path in sorted(root.rglob(pattern)):
        inside = path.relative_to(root)
        if not path.is_file() or any(p.startswith(".") for p in inside.parts):
            continue
        if pattern == "*.py" and skip & set(inside.parts):
            continue
        if (text := _text(path)) is not None:
            yield inside.as_posix(), text


def _objects(path: Path, fields: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """("FILE: line N", object) of each line of JSONL; `fields` is for the error message."""
    with open(path, "rb") as f:  # in binary mode lines end only at \n
        for n, line in enumerate(f, 1):
            where = f"{path}: line {n}"
            if not line.strip():
                continue
            try:
                found = json.loads(line.decode("utf-8-sig"))
                if b"\\ud" in line.lower():  # raise on an unpaired surrogate
                    json.dumps(found, ensure_ascii=False).encode()
            except (ValueError, RecursionError):  # invalid JSON or Unicode; too deeply nested
                found = None
            _check(isinstance(found, dict), f"{where} is not a JSON object with {fields}")
            yield where, found


def _jsonl(path: Path) -> Iterator[Document]:
    for where, found in _objects(path, 'a "text" field'):
        _check("text" in found, f'{where} is not a JSON object with a "text" field')
        kind = type(found["text"]).__name__
        _check(kind == "str", f'{where}: "text" must be a string, not {kind}')
        yield where.rpartition(" ")[2], found["text"]


def is_validation(name: str) -> bool:
    """Whether a document is for validation: one in 16, by a hash of its name."""
    return hashlib.sha256(name.encode()).digest()[0] < 16


def split_documents(docs: list[Document]) -> tuple[list[str], list[str]]:
    """(training texts, validation texts): by is_validation; the last sixteenth if one is empty."""
    train = [text for name, text in docs if not is_validation(name)]
    val = [text for name, text in docs if is_validation(name)]
    if train and val:
        return train, val
    texts = [text for _, text in docs]
    if len(texts) == 1:
        texts = [texts[0][: -len(texts[0]) // 16], texts[0][-len(texts[0]) // 16 :]]
    n = max(1, len(texts) // 16)
    return texts[:-n], texts[-n:]


# --------------------------------------------------------------------------------------------------
# One flat stream of tokens, and windows of it as batches
# --------------------------------------------------------------------------------------------------


@contextmanager
def _open_new(path: Path) -> Iterator[BinaryIO]:
    """A file that replaces `path` once it is complete; on failure `path` is unchanged."""
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(tmp, "wb") as f:
            yield f
            f.flush(), os.fsync(f.fileno())
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


Delimiters = tuple[Sequence[int], Sequence[int]]


def write_tokens(
    path: Path, encode: BatchEncode, texts: list[str], delimiters: Delimiters = DELIMITERS
) -> None:
    """One flat file of int32: BOS document EOS, BOS document EOS, ..."""
    before, after = delimiters
    with _open_new(path) as f:
        for i in range(0, len(texts), 64):
            for ids in encode(texts[i : i + 64]):
                array.array("i", [*before, *ids, *after]).tofile(f)


def read_tokens(path: Path) -> Tensor:
    """The file of write_tokens, memory-mapped, (n,) int32."""
    size = path.stat().st_size // 4
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.int32)


def get_batch(
    tokens: Tensor, seed: int, step: int, indices: Iterable[int], batch_size: int, seq_len: int
) -> Tensor:
    """Samples `indices` of the batch of `step`: (len(indices), seq_len + 1).

    Sample g = step * batch_size + index is the g-th window of an infinite sequence of epochs; each
    epoch splits the tokens into windows at a random offset and shuffles them.
    """
    n = (len(tokens) - 1) // seq_len - 1  # windows per epoch, with room for the offset
    rows, shuffled = [], {}
    for g in (step * batch_size + i for i in indices):
        epoch, i = divmod(g, max(n, 1))
        if epoch not in shuffled:
            rng = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            offset = int(torch.randint(seq_len, (), generator=rng)) if n > 0 else 0
            shuffled[epoch] = offset, torch.randperm(max(n, 1), generator=rng)
        offset, order = shuffled[epoch]
        start = offset + int(order[i]) * seq_len
        rows.append(tokens[start : start + seq_len + 1])
    return torch.stack(rows).long()


# --------------------------------------------------------------------------------------------------
# Encoded rows
# --------------------------------------------------------------------------------------------------


def decode(batch: Tensor, packed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """(inputs, targets, positions), each (B, T), of encoded rows (B, T + 1) int64. Targets that do
    not count are IGNORE. packed: positions restart at each document; else they are None."""
    tokens = torch.where(batch < 0, ~batch, batch)
    starts = tokens >= START
    tokens = tokens % START
    targets = tokens.masked_fill((batch < 0) | starts, IGNORE)[:, 1:]
    if not packed:
        return tokens[:, :-1], targets, None
    at = torch.arange(batch.shape[1] - 1, device=batch.device)
    begun = torch.where(starts[:, :-1], at, 0).cummax(1).values
    return tokens[:, :-1], targets, at - begun


def encode_row(ids: Sequence[int], prompt: int, seq_len: int) -> Tensor:
    """One document as an encoded row (seq_len + 1,) int32, padded. Its first `prompt` tokens are
    not targets. ValueError if it is longer than the row."""
    room = seq_len + 1
    _check(len(ids) <= room, f"ids: {len(ids)} tokens do not fit a row of {room}; truncate them")
    coded = torch.tensor([~i for i in ids[:prompt]] + [*ids[prompt:]], dtype=torch.int32)
    return pack_rows([coded], seq_len)[0]


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins as lists of item indices, whose lengths add up to at most `capacity`.

    Best-fit decreasing: longest first, each into the fullest bin with enough room, else a new one.
    Bit r of `rooms` is set if a bin has r left; the smallest sufficient r is the lowest set bit
    from `length` on. Time: n log n to sort, and capacity / 64 words per item.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    ok = not order or (lengths[order[0]] <= capacity and lengths[order[-1]] > 0)
    _check(ok, f"lengths must be 1 to {capacity}, the capacity; split longer documents first")
    bins: list[list[int]] = []
    bins_by_room: list[list[list[int]]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    for i in order:
        length = lengths[i]
        if enough := rooms >> length:
            room = length + (enough & -enough).bit_length() - 1
            chosen = bins_by_room[room].pop()
            if not bins_by_room[room]:
                rooms ^= 1 << room
        else:
            room, chosen = capacity, []
            bins.append(chosen)
        chosen.append(i)
        if left := room - length:
            bins_by_room[left].append(chosen)
            rooms |= 1 << left
    return bins


def one_per_row(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """A Fit that gives every document its own row."""
    return [[i] for i in range(len(lengths))]


def pack_rows(documents: Sequence[Tensor], seq_len: int, fit: Fit = best_fit) -> Tensor:
    """Pack documents of encoded values, (n,) int32 each, into rows (R, seq_len + 1) int32.

    Longer documents are split into pieces that overlap by one token, so that no prediction is lost.
    Padding is a document of its own.
    """
    room, pieces = seq_len + 1, []
    for document in documents:
        for i in range(0, max(len(document) - 1, 1), seq_len):
            pieces.append(document[i : i + room])
    padding = torch.full((room,), PAD, dtype=torch.int32)
    padding[0] = ~START
    parts, starts, offset = [], [], 0
    for bin in fit([len(piece) for piece in pieces], room):
        for i in bin:
            parts.append(pieces[i])
            starts.append(offset)
            offset += len(pieces[i])
        parts.append(padding[: -offset % room])
        offset += len(parts[-1])
    flat = torch.cat(parts)
    first = flat[starts]
    flat[starts] = torch.where(first < 0, first & ~START, first | START)
    return flat.view(-1, room)


def window_rows(documents: Sequence[Tensor], seq_len: int) -> Tensor:
    """Concatenate documents and split them into rows (R, seq_len + 1) int32 that overlap by one
    token; the last row is padded. Document starts are not marked."""
    flat = torch.cat([*documents])
    n = max(1, -(-(len(flat) - 1) // seq_len))
    flat = torch.cat([flat, flat.new_full((n * seq_len + 1 - len(flat),), PAD)])
    return flat.unfold(0, seq_len + 1, seq_len).contiguous()


# --------------------------------------------------------------------------------------------------
# Tokenizing into shards
# --------------------------------------------------------------------------------------------------

ABOUT, INDEX, LOCK, FAILED = "about.json", "index.json", "writer.lock", "failed.txt"


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
    with _writer_lock(folder):
        if _read_json(folder / ABOUT) != about:
            for name in (INDEX, ABOUT, "*.rows"):
                _remove(folder, name)
            _write_json(folder / ABOUT, about)
        if (index := _read_json(folder / INDEX)) is not None:
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
    """Shards are named "NUMBER-DOCUMENTS.rows": the total number of documents up to their end."""
    make_rows = pack_rows if about["pack"] else window_rows
    shards = sorted(folder.glob("*.rows"))
    done = int(shards[-1].stem.partition("-")[2]) if shards else 0
    number, total, pending, size = len(shards), done, [], 0

    def write() -> None:
        rows = make_rows(pending, about["seq_len"])
        with _open_new(folder / f"{number:06}-{total:012}.rows") as f:
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
    values = sum(path.stat().st_size for path in folder.glob("*.rows")) // 4
    index = {"rows": values // (about["seq_len"] + 1), "documents": total}
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
        for document in chunk if len(chunk) > 1 else ():
            _encode_chunk(encode, [document])  # find the document that fails
        names = " to ".join(dict.fromkeys((chunk[0][0], chunk[-1][0])))
        why = f"cannot be tokenized ({type(e).__name__}: {e})"
        raise ValueError(f"document {names}: {why}; fix it or remove it") from None
    return [bytearray(array.array("i", ids).tobytes()) for ids in encoded]


def _with_delimiters(make_encode: Callable[[], BatchEncode], delimiters: Delimiters) -> BatchEncode:
    """make_encode(), with delimiters added around each document."""
    encode, (before, after) = make_encode(), delimiters
    return lambda texts: [[*before, *ids, *after] for ids in encode(texts)]


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _write_json(path: Path, value: Any) -> None:
    with _open_new(path) as f:
        f.write(json.dumps(value).encode())


def _remove(folder: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        path.unlink(missing_ok=True)


@contextmanager
def _writer_lock(folder: Path) -> Iterator[None]:
    """The lock of a folder's only writer; the OS releases it when the process ends or dies."""
    with open(folder / LOCK, "ab") as f:
        for attempt in range(20):  # _has_writer of a reader locks it briefly
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                _check(attempt < 19, f"{folder}: another process is writing it; wait or stop it")
                time.sleep(0.05)
        yield


def _has_writer(folder: Path) -> bool:
    try:
        with open(folder / LOCK, "rb") as f:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


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

    Reading a row waits until it is written. ValueError if the writer failed, or if there has been
    none for `timeout` seconds. about: values that the folder's about.json must have, also waited
    for. block: number of shards shuffled together in the first epoch. The file system must be
    shared by all ranks, with locks; else write a folder on each node.
    """

    def __init__(
        self, folder: Path, about: Mapping[str, Any] | None = None, *,
        block: int = 4, timeout: float = 10.0,
    ):  # fmt: skip
        self.folder, self.timeout, self.block_shards = Path(folder), timeout, block
        self.index: dict[str, int] | None = None
        self.maps: list[Tensor] = []
        self.row_offsets = [0]  # index of the first row of each shard, and of the next one
        required = json.loads(json.dumps(dict(about or {})))
        actual = lambda: _read_json(self.folder / ABOUT) or {}
        ready = lambda: actual() and actual() | required == actual()
        self._wait(ready, "was made from other data or settings")
        self.width = actual()["seq_len"] + 1
        self._refresh()

    def _wait(self, ready: Callable[[], bool], what: str = "is not finished") -> None:
        since, failed = time.monotonic(), self.folder / FAILED
        while not ready():
            if _has_writer(self.folder):
                since = time.monotonic()
            elif failed.exists() or time.monotonic() - since > self.timeout:
                why = f"no process is writing it, and it {what}"
                if failed.exists():
                    why = f"its writer failed: {failed.read_text(encoding='utf-8').strip()}"
                raise ValueError(f"{self.folder}: {why}; tokenize again, which continues from here")
            time.sleep(0.02)

    def _refresh(self) -> None:
        """Map shards written since the last call."""
        if self.index is not None:
            return
        index = _read_json(self.folder / INDEX)  # read first: it is written after all shards
        for path in sorted(self.folder.glob("*.rows"))[len(self.maps) :]:
            self.maps.append(read_tokens(path).view(-1, self.width))
            self.row_offsets.append(self.row_offsets[-1] + len(self.maps[-1]))
        have, written = self.row_offsets[-1], index["rows"] if index else None
        error = f"{self.folder}: has {have} of the {written} rows written; delete it to rebuild"
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
        return self.maps[shard][i - self.row_offsets[shard]]

    def block(self, i: int) -> range | None:
        """The range of rows shuffled together with row i in the first epoch; None past the end.
        Waits until all of them are written."""
        n = self.block_shards
        first = lambda: self._shard(i) // n * n
        exists = lambda: self._shard(i) is not None
        self._wait(lambda: (exists() and first() + n < len(self.row_offsets)) or self.finished)
        if not exists():
            return None
        last = min(first() + n, len(self.maps))
        return range(self.row_offsets[first()], self.row_offsets[last])


@dataclass(frozen=True)
class Source:
    """A source of samples, and its weight relative to the other sources."""

    path: str
    weight: Fraction


def parse_sources(given: Sequence[str]) -> list[Source]:
    """Parse --data, such as ["a.jsonl=3", "folder"]: paths, each with a weight after its last "="
    (default 1). Weights are shares of the samples, independent of the sizes."""
    sources = []
    for text in given:
        path, equals, number = text.rpartition("=")
        weighted = equals and re.fullmatch(r"\d+(\.\d*)?|\.\d+", number)
        source = Source(path, Fraction(number)) if weighted else Source(text, Fraction(1))
        _check(source.path, f"--data {text}: no path; write PATH or PATH=WEIGHT")
        _check(source.weight > 0, f"--data {text}: the weight must be greater than 0, or omit it")
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


# --------------------------------------------------------------------------------------------------
# Chats, preferences, prompts
# --------------------------------------------------------------------------------------------------

_KINDS = {str: "a string", list: "a list of messages", int: "a number", float: "a number"}


def _field(where: str, found: Mapping[str, Any], name: str, *kinds: type) -> Any:
    """found[name], checked to be of one of the kinds; messages must have role and content."""
    expected = " or ".join(dict.fromkeys(_KINDS[kind] for kind in kinds))
    _check(name in found, f'{where}: has no "{name}"; give {expected}')
    value = found[name]
    ok = isinstance(value, kinds) and not isinstance(value, bool)
    _check(ok, f'{where}: "{name}" must be {expected}, not {type(value).__name__}')
    for i, message in enumerate(value if isinstance(value, list) else ()):
        _check(isinstance(message, dict), f'{where}: "{name}"[{i}] must be an object')
        for key in ("role", "content"):
            ok = isinstance(message.get(key), str)
            _check(ok, f'{where}: "{name}"[{i}] needs a string "{key}"')
    _check(value not in ("", []), f'{where}: "{name}" is empty')
    return value


def read_conversations(path: Path) -> Iterator[Messages]:
    """Conversations of JSONL with "messages". ValueError names file, line and field."""
    for where, found in _objects(path, '"messages"'):
        yield _field(where, found, "messages", list)


def read_preferences(path: Path) -> Iterator[Preference]:
    """Pairs of JSONL with "prompt" (or "messages"), "chosen" and "rejected"."""
    for where, found in _objects(path, '"prompt", "chosen" and "rejected"'):
        name = "messages" if "messages" in found and "prompt" not in found else "prompt"
        prompt = _field(where, found, name, str, list)
        yield prompt, *(_field(where, found, key, str, list) for key in ("chosen", "rejected"))


def read_prompts(path: Path) -> list[tuple[str | Messages, str]]:
    """(prompt, answer) of JSONL with "prompt" and "answer"."""
    pairs = []
    for where, found in _objects(path, '"prompt" and "answer"'):
        prompt = _field(where, found, "prompt", str, list)
        pairs.append((prompt, str(_field(where, found, "answer", str, int, float))))
    _check(pairs, f"{path}: holds no prompts")
    return pairs


def read_questions(path: Path) -> list[Question]:
    """Multiple-choice questions of JSONL with "prompt", "choices" and "answer"."""
    found = []
    for where, line in _objects(path, '"prompt", "choices" and "answer"'):
        prompt, answer = _field(where, line, "prompt", str), _field(where, line, "answer", int)
        choices = line.get("choices")
        ok = isinstance(choices, list) and all(isinstance(c, str) and c for c in choices)
        _check(ok and len(choices) > 1, f'{where}: "choices" must be two or more texts, none empty')
        ok = 0 <= answer < len(choices)
        _check(ok, f'{where}: "answer" must be from 0 to {len(choices) - 1}, not {answer}')
        found.append(Question(prompt, choices, answer))
    _check(found, f"{path}: holds no questions")
    return found


def chat_tokens(messages: Messages, render: Render, encode: Callable[[str], list[int]]) -> Tensor:
    """One conversation as encoded values (n,) int32. Targets are what the assistant would generate:
    in each of its turns everything after the generation prompt, with the text that ends the turn.

    The start of a turn is found by rendering the conversation up to it. ValueError if that is not a
    prefix of the full rendering (a template that changes earlier turns), or if no turn is the
    assistant's.
    """
    whole, done, parts = render(messages, False), 0, []
    _check(whole, "messages: the chat template renders them as empty text")
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = render(messages[:i], True), render(messages[: i + 1], False)
        _check(
            after.startswith(before) and whole.startswith(after) and len(before) >= done,
            f"messages[{i}]: the chat template renders earlier messages differently than in the "
            "whole conversation; split the conversation here, or change the template",
        )
        parts += [(whole[done : len(before)], False), (whole[len(before) : len(after)], True)]
        done = len(after)
    _check(parts, "messages: none is from the assistant, so there are no targets")
    coded = []
    for text, target in [*parts, (whole[done:], False)]:
        ids = encode(text) if text else []
        coded += ids if target else [~i for i in ids]
    return torch.tensor(coded, dtype=torch.int32)


def _map_items(
    name: str, items: Iterable[Any] | Mapping[int, Any], make: Callable[[Any], Any]
) -> list[Any]:
    """[make(item) of all items]; ValueErrors get the item's number from 1, or its key."""
    made = []
    for n, item in items.items() if isinstance(items, Mapping) else enumerate(items, 1):
        try:
            made.append(make(item))
        except ValueError as e:
            raise ValueError(f"{name} {n}: {e}") from None
    _check(made, f"{name}s: there are none")
    return made


def chat_rows(
    conversations: Iterable[Messages] | Mapping[int, Messages], render: Render,
    encode: Callable[[str], list[int]], seq_len: int, pack: bool,
) -> Tensor:  # fmt: skip
    """Conversations as encoded rows (R, seq_len + 1) int32, best-fit packed or one per row. Longer
    ones are split over several rows. ValueError of chat_tokens, with the number (or key)."""
    tokens = lambda messages: chat_tokens(messages, render, encode)
    documents = _map_items("conversation", conversations, tokens)
    rows = pack_rows(documents, seq_len, best_fit if pack else one_per_row)
    targets = (rows >= 0) & (rows < START)
    return rows[targets.any(1)]  # drop pieces without targets (prompt only)


def preference_rows(
    pairs: Iterable[Preference] | Mapping[int, Preference], render: Render | None,
    encode: Callable[[str], list[int]], seq_len: int,
) -> Tensor:  # fmt: skip
    """Pairs as encoded rows (2 * n, seq_len + 1) int32: chosen, rejected, chosen, ... Completions
    are targets, truncated at the end of the row.

    Strings are rendered as a user and an assistant message; without `render` they are plain text
    between BOS and EOS. Completions may repeat the prompt's messages. ValueError if a prompt leaves
    no room for its completion.
    """

    def row(prompt: Any, completion: Any) -> Tensor:
        if render is None:
            plain = isinstance(prompt, str) and isinstance(completion, str)
            _check(plain, "messages require a chat template; give strings, or a model with one")
            context, text = [BOS, *encode(prompt)], [*encode(completion), EOS]
        else:
            messages, reply = _messages(prompt, "user"), _messages(completion, "assistant")
            reply = reply[len(messages) :] if reply[: len(messages)] == messages else reply
            before, whole = render(messages, True), render([*messages, *reply], False)
            ok = whole.startswith(before)
            _check(ok, "the chat template renders the prompt differently before a completion")
            context, text = encode(before), encode(whole[len(before) :])
        room = seq_len + 1 - len(context)
        error = f"its prompt, {len(context)} tokens, leaves no room in a row of {seq_len + 1}"
        _check(room > 0, f"{error}; remove it, or increase --seq-len")
        return encode_row([*context, *text[:room]], len(context), seq_len)

    pair_rows = lambda pair: torch.stack([row(pair[0], completion) for completion in pair[1:]])
    return torch.cat(_map_items("pair", pairs, pair_rows))


def _messages(given: str | Messages, role: str) -> Messages:
    return [{"role": role, "content": given}] if isinstance(given, str) else given


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def check() -> None:
    """Packed rows hold every prediction once, each after its own document alone."""
    documents = [torch.randint(3, 99, (n,), dtype=torch.int32) for n in range(2, 99)]
    found, wanted = [], []
    for inputs, targets, positions in zip(*decode(pack_rows(documents, 32).long(), packed=True)):
        for t in (targets != IGNORE).nonzero()[:, 0].tolist():
            found.append((*inputs[t - positions[t] : t + 1].tolist(), int(targets[t])))
    for ids in map(torch.Tensor.tolist, documents):
        wanted += [tuple(ids[(i - 1) // 32 * 32 : i + 1]) for i in range(1, len(ids))]
    assert sorted(found) == sorted(wanted)


def main() -> None:
    """How full rows of 2048 are, for documents as long as web pages: log-normal, median 400."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    check()
    lengths = (torch.randn(20_000) * 1.2 + 6).exp().clamp(2, 100_000).int().tolist()
    documents = [torch.full((n,), 3, dtype=torch.int32) for n in lengths]
    print(
        f"{len(documents)} documents, rows of 2048\n{'':>16}{'rows':>9}{'filled':>9}{'rows/s':>10}"
    )
    for name, make in {
        "best fit": lambda: pack_rows(documents, 2048),
        "one per row": lambda: pack_rows(documents, 2048, one_per_row),
        "one stream": lambda: window_rows(documents, 2048),
    }.items():
        seconds, rows = Timer("make()", globals={"make": make}).timeit(1).median, make()
        filled = ((rows[:, 1:] >= 0) & (rows[:, 1:] < START)).float().mean()
        print(f"{name:>16}{len(rows):>9}{filled:>9.1%}{len(rows) / seconds:>10,.0f}")


if __name__ == "__main__":
    main()
