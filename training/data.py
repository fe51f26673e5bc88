"""data.py: from text, chats and preferences to the rows of token ids that a step trains on.

A step wants (B, T + 1) ids and documents come in every length. Cutting one long stream of them in
rows (`batch_of`) fills every row, and tears documents apart; a document to a row, padded or cut
off, wastes most of the row or loses the end. Best-fit packing (Ding et al., arXiv:2404.10830)
treats it as bin packing: a document longer than a row is cut into pieces, then every piece, longest
first, goes whole into the fullest row that still has room for it. No token is lost, next to nothing
is padding, and no document shorter than a row is cut. `best_fit` does a million in seconds.

What a row says beside its ids is coded into its numbers, so that a row is one tensor everywhere,
in files, batches and micro-batches (`decode` is the whole definition):

    0 <= v          token v mod 2^30, a target (of the position before it)
    v < 0           token ~v, read but never a target: a prompt, padding
    bit 30 (START)  of v, or of ~v: a document begins here. It is nobody's target, and where rows
                    are packed its position is 0, by which attention tells documents apart

    documents -> tokenize -> folder of shards -> Shards \\
    chats -> chat_rows, pairs -> preference_rows -> Rows -> Stream.rows(step, indices) -> decode

`tokenize` reads documents lazily, hands them to worker processes and gets them back in order, and
writes shards, each whole or not there and made of its own documents alone. So memory is bounded, a
run that was killed goes on after the last shard, and `Shards`, in this process (tokenize in a
thread) or on another rank, reads those that are there and waits for those that are not.

`Stream.rows(step, indices)` is a pure function of the seed, the step, the sample's index in its
batch, and the files: no state to save, the same rows on any number of ranks. Sources are mixed by
weight, exactly in every run of as many samples as the weights add up to. Every row of a source is
seen once before any is seen twice: the first time in an order that is shuffled in blocks of a few
shards, so that it does not depend on how much has been written, later over all.

What it gains: of rows of 2048, and documents about as long as web pages, best fit fills 99.9%
(98.5% of rows of 32768, in shards), next fit 81%, a row for each 31%; one stream is as full, and
tears a quarter of the documents though they would fit a row. What it costs: bin packing, 4 bytes a
token on disk, and a second or two until a worker has begun. When it loses: where few documents are
shorter than a row, there is nothing to gain; where attention does not go by positions, documents
see each other; a source that is sorted (by site, by date) stays so in the large in its first epoch;
and workers beyond the idle cores only wait. In chats each turn is encoded by itself, as generation
meets it: `encode` must put nothing in front (no BOS, no space).

Which hook: positions. Equivalence (test_all.py): decoded rows hold every prediction of every
document once, with its own position, under any packing; and a shard folder is the same to the byte
with 0, 1 or n workers, whole or after kill -9. Needs: torch, and POSIX locks for tokenize.
`python training/data.py` checks itself and prints a table.
"""

from __future__ import annotations

import array
import fcntl
import hashlib
import json
import math
import multiprocessing
import os
import re
import signal
import sysconfig
import tempfile
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BOS, EOS = 1, 2  # of tokenizers that are trained here
ENDS = (BOS,), (EOS,)  # what stands before a document, and after it
IGNORE = -100  # what cross-entropy does not count
START = 1 << 30  # a document begins here
PAD = ~0  # token 0, not a target

Document = tuple[str, str]  # (name, text); the name decides whether it is held out
Messages = list[dict[str, Any]]  # {"role": ..., "content": ...}
Batched = Callable[[list[str]], list[list[int]]]  # texts to ids, without BOS and EOS
Fit = Callable[[Sequence[int], int], list[list[int]]]  # lengths, capacity: who shares a bin
Render = Callable[[Messages, bool], str]  # (messages, add_generation_prompt): a chat template
Preference = tuple[Any, Any, Any]  # prompt, chosen, rejected: strings, or lists of messages


def _check(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --------------------------------------------------------------------------------------------------
# Documents
# --------------------------------------------------------------------------------------------------


def read_documents(data: str | None) -> list[Document]:
    """The documents of --data: a text file, a folder of them, a JSONL with "text"; or, without it,
    the source of Python's standard library, tests left out. In a fixed order. ValueError if there
    is no text.
    """
    return list(stream_documents(data))


def stream_documents(data: str | None) -> Iterator[Document]:
    """read_documents, one after another: a folder is read by the file, JSONL by the line."""
    path = Path(data or sysconfig.get_paths()["stdlib"])
    _check(path.exists(), f"--data {path}: no such file or folder")
    if path.is_dir():
        documents = _folder(path, "*.py" if data is None else "*")
    elif path.suffix in (".jsonl", ".ndjson"):
        documents = _jsonl(path)
    else:
        whole = _text(path) or ""  # in pieces, so that some of a single file can be held out
        documents = ((f"{i}", whole[i : i + 8192]) for i in range(0, len(whole), 8192))
    none = True
    for name, text in documents:
        if text.strip():
            none = False
            yield name, text
    if none:
        raise ValueError(
            f'--data {path}: holds no text (UTF-8 files, or JSONL lines with a "text" field)'
        )


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
    """("FILE: line N", object) of each line of JSONL; `fields` is for the error."""
    with open(path, "rb") as f:  # whose lines end at \n alone
        for n, line in enumerate(f, 1):
            where = f"{path}: line {n}"
            if not line.strip():
                continue
            try:
                found = json.loads(line.decode("utf-8-sig"))
                if b"\\ud" in line.lower():  # half a surrogate pair is no text
                    json.dumps(found, ensure_ascii=False).encode()
            except (ValueError, RecursionError):  # of JSON, of Unicode; brackets without end
                found = None
            _check(isinstance(found, dict), f"{where} is not a JSON object with {fields}")
            yield where, found


def _jsonl(path: Path) -> Iterator[Document]:
    for where, found in _objects(path, 'a "text" field'):
        _check("text" in found, f'{where} is not a JSON object with a "text" field')
        text = found["text"]
        kind = type(text).__name__
        _check(kind == "str", f'{where}: "text" must be a string, not {kind}')
        yield where.rpartition(" ")[2], text


def is_validation(name: str) -> bool:
    """Whether a document is for validation: one in 16, by a hash of its name, the same on every
    machine."""
    return hashlib.sha256(name.encode()).digest()[0] < 16


def split(docs: list[Document]) -> tuple[list[str], list[str]]:
    """(training texts, held-out texts): by held_out; the last sixteenth if that leaves none."""
    kept = [text for name, text in docs if not is_validation(name)]
    held = [text for name, text in docs if is_validation(name)]
    if kept and held:
        return kept, held
    texts = [text for _, text in docs]
    if len(texts) == 1:
        texts = [texts[0][: -len(texts[0]) // 16], texts[0][-len(texts[0]) // 16 :]]
    n = max(1, len(texts) // 16)
    return texts[:-n], texts[-n:]


# --------------------------------------------------------------------------------------------------
# One flat stream of tokens, and windows of it
# --------------------------------------------------------------------------------------------------


def _write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """write(temporary), fsync, rename to `path`; on any failure `path` is as it was."""
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(tmp)
        with open(tmp, "rb+") as f:
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except OSError as e:
        raise OSError(f"{path}: cannot be written ({e}); the previous file is untouched") from None
    finally:
        tmp.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)  # the rename itself lives there
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


Ends = tuple[Sequence[int], Sequence[int]]


def write_tokens(path: Path, encode: Batched, texts: list[str], ends: Ends = ENDS) -> None:
    """One flat file of int32: BOS document EOS, BOS document EOS, ..."""
    before, after = ends

    def write(tmp: Path) -> None:
        with open(tmp, "wb") as f:
            for i in range(0, len(texts), 64):
                for ids in encode(texts[i : i + 64]):
                    array.array("i", [*before, *ids, *after]).tofile(f)

    _write_atomically(path, write)


def read_tokens(path: Path) -> Tensor:
    """The file of write_tokens, memory-mapped, (n,) int32."""
    return torch.from_file(
        str(path), shared=False, size=path.stat().st_size // 4, dtype=torch.int32
    )


def get_batch(
    tokens: Tensor, seed: int, step: int, indices: Iterable[int], batch_size: int, seq_len: int
) -> Tensor:
    """Samples `indices` of the batch of `step`: (as many, seq_len + 1), inputs and targets
    overlapping.

    A pure function of its arguments. Sample g = step * batch_size + index is the g-th window of an
    endless row of epochs; each epoch cuts the tokens at a phase of its own and shuffles the
    windows, so that all are seen once before any is seen twice.
    """
    n = (len(tokens) - 1) // seq_len - 1  # windows an epoch, leaving room for the phase
    rows, shuffled = [], {}
    for g in (step * batch_size + i for i in indices):
        epoch, place = divmod(g, max(n, 1))
        if epoch not in shuffled:
            rng = torch.Generator().manual_seed(
                seed * 1_000_003 + epoch
            )  # it hears only the low 32 bits
            phase = int(torch.randint(seq_len, (), generator=rng)) if n > 0 else 0
            shuffled[epoch] = phase, torch.randperm(max(n, 1), generator=rng)
        phase, order = shuffled[epoch]
        start = phase + int(order[place]) * seq_len
        rows.append(tokens[start : start + seq_len + 1])
    return torch.stack(rows).long()


# --------------------------------------------------------------------------------------------------
# Coded rows
# --------------------------------------------------------------------------------------------------


def decode(batch: Tensor, packed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """(inputs, targets, positions), each (B, T), of coded rows (B, T + 1) int64; what is no
    target is IGNORE. `packed`: positions restart where a document begins; else they are None.

    IGNORE itself as the only negative number of a row that begins no document is padding of plain
    rows, and token 0; in coded rows it is token 99.
    """
    coded = torch.where(batch < 0, ~batch, batch)
    starts = coded >= START
    plain = ((batch >= 0) | (batch == IGNORE)).all(1, keepdim=True) & ~starts[:, :1]
    tokens = torch.where(plain & (batch < 0), 0, coded % START)
    targets = tokens.masked_fill((batch < 0) | starts, IGNORE)[:, 1:]
    if not packed:
        return tokens[:, :-1], targets, None
    at = torch.arange(batch.shape[1] - 1, device=batch.device)
    begun = torch.where(starts[:, :-1], at, 0).cummax(1).values
    return tokens[:, :-1], targets, at - begun


def encode_row(ids: Sequence[int], prompt: int, seq_len: int) -> Tensor:
    """One document as a coded row (seq_len + 1,) int32, padded. Its first `prompt` tokens are no
    targets. ValueError: it is longer than that."""
    room = seq_len + 1
    _check(len(ids) <= room, f"ids: {len(ids)} tokens do not fit a row of {room}; cut them")
    coded = torch.tensor([~i for i in ids[:prompt]] + [*ids[prompt:]], dtype=torch.int32)
    return pack_rows([coded], seq_len)[0]


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Which items share a bin: lists of indices whose lengths add up to at most `capacity`.

    Best-fit decreasing: longest first, each into the bin that it fills most, else a new one.
    `rooms` has bit r set where a bin has r left, and the least that is enough is its lowest bit
    above: n log n to sort and capacity / 64 words an item.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    fine = not order or (lengths[order[0]] <= capacity and lengths[order[-1]] > 0)
    _check(fine, f"lengths must be 1 to {capacity}, the capacity; cut longer documents first")
    bins: list[list[int]] = []
    having: list[list[list[int]]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    for i in order:
        length = lengths[i]
        if enough := rooms >> length:
            room = length + (enough & -enough).bit_length() - 1
            chosen = having[room].pop()
            if not having[room]:
                rooms ^= 1 << room
        else:
            room, chosen = capacity, []
            bins.append(chosen)
        chosen.append(i)
        if left := room - length:
            having[left].append(chosen)
            rooms |= 1 << left
    return bins


def one_each(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """best_fit's place where every document has a row to itself."""
    return [[i] for i in range(len(lengths))]


def pack_rows(documents: Sequence[Tensor], seq_len: int, fit: Fit = best_fit) -> Tensor:
    """Documents of coded values, (n,) int32 each, as rows (R, seq_len + 1) int32.

    A longer one is cut into pieces that overlap by one token, the last input of a piece being the
    first of the next, so that no prediction is lost. Padding is a document of its own.
    """
    room, pieces = seq_len + 1, []
    for document in documents:
        for i in range(0, max(len(document) - 1, 1), seq_len):
            pieces.append(document[i : i + room])
    padding = torch.full((room,), PAD, dtype=torch.int32)
    padding[0] = ~START
    parts, starts, place = [], [], 0
    for together in fit([len(piece) for piece in pieces], room):
        for i in together:
            parts.append(pieces[i])
            starts.append(place)
            place += len(pieces[i])
        parts.append(padding[: -place % room])
        place += len(parts[-1])
    flat = torch.cat(parts)
    first = flat[starts]
    flat[starts] = torch.where(first < 0, first & ~START, first | START)
    return flat.view(-1, room)


def window_rows(documents: Sequence[Tensor], seq_len: int) -> Tensor:
    """Documents one after another, cut where a row is full, rows overlapping by one token; the last
    one padded. No document is marked: (R, seq_len + 1) int32."""
    flat = torch.cat([*documents])
    n = max(1, -(-(len(flat) - 1) // seq_len))
    flat = torch.cat([flat, flat.new_full((n * seq_len + 1 - len(flat),), PAD)])
    return flat.unfold(0, seq_len + 1, seq_len).contiguous()


# --------------------------------------------------------------------------------------------------
# Tokenizing into shards
# --------------------------------------------------------------------------------------------------

ABOUT, INDEX, LOCK, FAILED = "about.json", "index.json", "writer.lock", "failed.txt"


def tokenize(
    documents: Iterable[Document], make_encode: Callable[[], Batched], folder: Path,
    seq_len: int, pack: bool, workers: int = 0, *, ends: Ends = ENDS,
    about: Mapping[str, Any] | None = None, shard_tokens: int = 1 << 21,
) -> dict[str, int]:  # fmt: skip
    """Fill `folder` with rows of `documents` for Shards to read; {"rows", "documents"} of all.

    make_encode is called once in each of `workers` processes (so it is pickled; 0: once, in this
    one); `ends` go around each document. `pack`: best-fit packing, else windows. `about` (JSON)
    says what else the rows depend on, data and tokenizer: a folder that was made of the same goes
    on after its last shard, or is left as it is if it is finished; any other is emptied.
    ValueError: a document that cannot be encoded, by name; a process that died; a folder that
    somebody else is writing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = {"seq_len": seq_len, "pack": pack, "shard_tokens": shard_tokens, "ends": ends}
    whole = partial(_whole, make_encode, ends)
    about = json.loads(json.dumps({**(about or {}), **own}))
    with _locked(folder):
        if _read_json(folder / ABOUT) != about:
            for name in (INDEX, ABOUT, "*.rows"):
                _remove(folder, name)
            _write_json(folder / ABOUT, about)
        if (index := _read_json(folder / INDEX)) is not None:
            return index
        _remove(folder, ".*.tmp")
        _remove(folder, FAILED)
        try:
            return _write_shards(documents, whole, folder, workers, about)
        except Exception as e:  # said here for those who read, and handed on
            with suppress(OSError):
                (folder / FAILED).write_text(f"{e}\n", encoding="utf-8")
            raise


def _write_shards(
    documents: Iterable[Document], make_encode: Callable[[], Batched], folder: Path,
    workers: int, about: Mapping[str, Any],
) -> dict[str, int]:  # fmt: skip
    """Shards are named "NUMBER-DOCUMENTS.rows", by how many documents are in all up to its end."""
    lay_out = pack_rows if about["pack"] else window_rows
    shards = sorted(folder.glob("*.rows"))
    done = int(shards[-1].stem.partition("-")[2]) if shards else 0
    number, total, held, size = len(shards), done, [], 0

    def write() -> None:
        rows = lay_out(held, about["seq_len"])
        path = folder / f"{number:06}-{total:012}.rows"
        _write_atomically(path, lambda tmp: tmp.write_bytes(rows.numpy().tobytes()))

    for ids in _encoded(islice(documents, done, None), make_encode, workers):
        held.append(torch.frombuffer(ids, dtype=torch.int32))
        total, size = total + 1, size + len(held[-1])
        if size >= about["shard_tokens"]:
            write()
            number, held, size = number + 1, [], 0
    if held:
        write()
    _check(total, f"{folder}: there are no documents to fill it with")
    values = sum(path.stat().st_size for path in folder.glob("*.rows")) // 4
    index = {"rows": values // (about["seq_len"] + 1), "documents": total}
    _write_json(folder / INDEX, index)
    return index


def _encoded(
    documents: Iterable[Document], make_encode: Callable[[], Batched], workers: int
) -> Iterator[bytearray]:
    """Each document as int32, in order. Every worker has one chunk at a time, and gets
    the next before what it returned is worked on."""
    if workers == 0:
        encode = make_encode()
        for chunk in _chunks(documents):
            yield from _encode_chunk(encode, chunk)
        return
    context, n = multiprocessing.get_context("spawn"), 0  # safe beside threads and CUDA
    pipes, processes = [], []
    try:
        for _ in range(workers):
            here, there = context.Pipe()
            args = make_encode, there
            processes.append(context.Process(target=_work, args=args, daemon=True))
            processes[-1].start()
            there.close()
            pipes.append(here)
        for n, chunk in enumerate(_chunks(documents), 1):
            pipe = pipes[(n - 1) % workers]
            encoded = _receive(pipe) if n > workers else []
            pipe.send(chunk)
            yield from encoded
        for i in range(max(0, n - workers), n):
            yield from _receive(pipes[i % workers])
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise ValueError(
            "a tokenizing process died (was it out of memory?); start again, with fewer --workers"
        ) from None
    finally:
        for pipe, process in zip(pipes, processes):
            pipe.close()
            process.terminate()
            process.join()


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


def _encode_chunk(encode: Batched, chunk: list[Document]) -> list[bytearray]:
    try:
        many = encode([text for _, text in chunk])
    except Exception as e:  # an encoder fails in any way it likes
        for document in chunk if len(chunk) > 1 else ():
            _encode_chunk(encode, [document])  # is it this one?
        names = " to ".join(dict.fromkeys((chunk[0][0], chunk[-1][0])))
        why = f"cannot be tokenized ({type(e).__name__}: {e})"
        raise ValueError(f"document {names}: {why}; mend it, or leave it out") from None
    return [bytearray(array.array("i", ids).tobytes()) for ids in many]


def _whole(make_encode: Callable[[], Batched], ends: Ends) -> Batched:
    """What it makes, with the ends of documents."""
    encode, (before, after) = make_encode(), ends
    return lambda texts: [[*before, *ids, *after] for ids in encode(texts)]


def _work(make_encode: Callable[[], Batched], pipe: Any) -> None:
    """A worker: chunks come in, lists of documents or a ValueError go out, until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started it
    encode = None
    try:
        while True:
            chunk = pipe.recv()
            try:
                encode = encode or make_encode()
                result = _encode_chunk(encode, chunk)
            except Exception as e:
                result = ValueError(f"{e}")
            pipe.send(result)
    except (EOFError, OSError):  # it has gone, or wants no more
        return


def _receive(pipe: Any) -> list[bytearray]:
    result = pipe.recv()
    if isinstance(result, ValueError):
        raise result
    return result


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _write_json(path: Path, value: Any) -> None:
    _write_atomically(path, lambda tmp: tmp.write_text(json.dumps(value), encoding="utf-8"))


def _remove(folder: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        path.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The lock of a folder's one writer; the system drops it when its process ends, however."""
    with open(folder / LOCK, "ab") as f:
        for attempt in range(20):  # a reader may just be asking whether it is held
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                _check(attempt < 19, f"{folder}: another process is writing it; wait, or end it")
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
# Rows, and the stream of them
# --------------------------------------------------------------------------------------------------


class Rows:
    """Rows in memory, (R, T + 1), as a source of Stream."""

    def __init__(self, rows: Tensor):
        _check(len(rows), "rows: there are none to train on")
        self.all = rows

    def __len__(self) -> int:
        return len(self.all)

    def row(self, i: int) -> Tensor:
        """(T + 1,)."""
        return self.all[i]

    def block(self, i: int) -> range | None:
        """The rows among which row i is shuffled in the first epoch; None past the last."""
        return range(len(self)) if i < len(self) else None


class Shards:
    """The rows of a folder that tokenize fills, or filled, as a source of Stream; memory-mapped.

    Whoever asks for a row that is not there yet waits for it. ValueError: the writer failed or
    died, once `patience` seconds have passed without one. `about`: what the folder must have been
    made of, key by key, waited for too. `block` shards at a time are shuffled in the first epoch.
    The file system must be one that all see, locks included; or else write a folder on each node.
    """

    def __init__(
        self, folder: Path, about: Mapping[str, Any] | None = None, *,
        block: int = 4, patience: float = 10.0,
    ):  # fmt: skip
        self.folder, self.patience, self.block_shards = Path(folder), patience, block
        self.index: dict[str, int] | None = None
        self.maps: list[Tensor] = []
        self.ends = [0]  # rows up to the begin of each shard, and of the one to come
        wanted = json.loads(json.dumps(dict(about or {})))
        made = lambda: _read_json(self.folder / ABOUT) or {}
        self._wait(lambda: made() and made() | wanted == made(), "was made of something else")
        self.width = made()["seq_len"] + 1
        self._look()

    def _wait(self, ready: Callable[[], bool], what: str = "is not finished") -> None:
        since = time.monotonic()
        while not ready():
            if _has_writer(self.folder):
                since = time.monotonic()
            elif time.monotonic() - since > self.patience:
                failed, why = self.folder / FAILED, f"nobody is writing it, and it {what}"
                if failed.exists():
                    why = f"its writer failed: {failed.read_text(encoding='utf-8').strip()}"
                raise ValueError(f"{self.folder}: {why}; tokenize again, which goes on from here")
            time.sleep(0.02)

    def _look(self) -> None:
        """Take note of shards that have come."""
        if self.index is not None:
            return
        index = _read_json(self.folder / INDEX)  # first: then all shards are there
        for path in sorted(self.folder.glob("*.rows"))[len(self.maps) :]:
            whole = path.stat().st_size % (4 * self.width) == 0
            _check(whole, f"{path}: does not hold whole rows; delete the folder, it is made again")
            self.maps.append(read_tokens(path).view(-1, self.width))
            self.ends.append(self.ends[-1] + len(self.maps[-1]))
        rows = None if index is None else index["rows"]
        same = rows is None or rows == self.ends[-1]
        _check(same, f"{self.folder}: holds {self.ends[-1]} rows of the {rows} that were written; "
               "delete the folder, it is made again")  # fmt: skip
        self.index = index

    def _shard(self, i: int) -> int | None:
        """Which shard has row i, if it is there."""
        return bisect_right(self.ends, i) - 1 if 0 <= i < self.ends[-1] else None

    @property
    def finished(self) -> bool:
        """Whether all rows are there."""
        self._look()
        return self.index is not None

    def __len__(self) -> int:
        _check(self.finished, f"{self.folder}: how many rows is not known before all are written")
        return self.ends[-1]

    def row(self, i: int) -> Tensor:
        """(T + 1,) int32, once it is written."""
        self._wait(lambda: self._shard(i) is not None or self.finished)
        shard = self._shard(i)
        _check(shard is not None, f"{self.folder}: has no row {i}, but {self.ends[-1]} rows")
        return self.maps[shard][i - self.ends[shard]]

    def block(self, i: int) -> range | None:
        """The rows among which row i is shuffled in the first epoch, once all of them are written;
        None past the last."""

        each = self.block_shards
        first = lambda: self._shard(i) // each * each
        here = lambda: self._shard(i) is not None
        self._wait(lambda: (here() and first() + each < len(self.ends)) or self.finished)
        if not here():
            return None
        return range(self.ends[first()], self.ends[min(first() + each, len(self.maps))])


@dataclass(frozen=True)
class Source:
    """Where samples come from, and how many of them against the other sources'."""

    path: str
    weight: Fraction


def parse_sources(given: Sequence[str]) -> list[Source]:
    """["a.jsonl=3", "folder"]: paths, each with a weight after its last "=" (1 without a number).
    Weights say how many of the samples, whatever the sizes."""
    sources = []
    for one in given:
        path, equals, number = one.rpartition("=")
        weighted = equals and re.fullmatch(r"\d+(\.\d*)?|\.\d+", number)
        source = Source(path, Fraction(number)) if weighted else Source(one, Fraction(1))
        _check(source.path, f"--data {one}: no path; write PATH or PATH=WEIGHT")
        _check(source.weight > 0, f"--data {one}: the weight must be more than 0; or leave it out")
        sources.append(source)
    return sources


def _rng(*parts: int) -> torch.Generator:
    """By all of the numbers: manual_seed itself hears 32 bits."""
    return torch.Generator().manual_seed(zlib.crc32(repr(parts).encode()))


class Stream:
    """Samples of several sources, mixed by weight: sample g = step * batch_size + index.

    In every `period` samples (the weights as the least whole numbers, added up) from a multiple of
    it on, each source has exactly its share; a shuffle says in which order.
    """

    def __init__(
        self, sources: Sequence[Rows | Shards], weights: Sequence[Fraction | float],
        seed: int, batch_size: int,
    ):  # fmt: skip
        _check(sources and len(sources) == len(weights), "Stream wants a weight for every source")
        exact = [Fraction(str(w)) for w in weights]
        _check(min(exact) > 0, f"weights must be more than 0, not {[*map(float, exact)]}")
        scale = math.lcm(*(w.denominator for w in exact))
        whole = [int(w * scale) for w in exact]
        self.counts = [n // math.gcd(*whole) for n in whole]
        self.period = sum(self.counts)
        said = f"weights {[*map(float, exact)]} come out even in {self.period} samples; round them"
        _check(self.period <= 1_000_000, said)
        self.sources, self.seed, self.batch_size = [*sources], seed, batch_size
        self._mix = lru_cache(64)(self._mix)
        self._order = lru_cache(2 * len(sources))(self._order)

    def _mix(self, period: int) -> tuple[list[int], list[int]]:
        """Of every sample of a period: its source, and how many of that source were before it."""
        kinds = torch.repeat_interleave(torch.tensor(self.counts))
        kinds = kinds[torch.randperm(self.period, generator=_rng(self.seed, 0, period))].tolist()
        seen, before = [0] * len(self.counts), []
        for k in kinds:
            before.append(seen[k])
            seen[k] += 1
        return kinds, before

    def _order(self, source: int, epoch: int, first: int, n: int) -> Tensor:
        return torch.randperm(n, generator=_rng(self.seed, 1, source, epoch, first))

    def source_of(self, g: int) -> tuple[int, int]:
        """(which source sample g is from, its number among that source's samples)."""
        period, place = divmod(g, self.period)
        kinds, before = self._mix(period)
        k = kinds[place]
        return k, period * self.counts[k] + before[place]

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
        """Samples `indices` of the batch of `step`: coded rows (as many, T + 1) int64."""
        return torch.stack([self.row(step * self.batch_size + i) for i in indices]).long()


# --------------------------------------------------------------------------------------------------
# Chats, preferences, prompts
# --------------------------------------------------------------------------------------------------

_KINDS = {str: "a string", list: "a list of messages", int: "a number", float: "a number"}


def _field(where: str, found: Mapping[str, Any], name: str, *kinds: type) -> Any:
    """The field, of one of the kinds; of messages, each with a role and content."""
    said = " or ".join(dict.fromkeys(_KINDS[kind] for kind in kinds))
    _check(name in found, f'{where}: has no "{name}"; give {said}')
    value = found[name]
    right = isinstance(value, kinds) and not isinstance(value, bool)
    _check(right, f'{where}: "{name}" must be {said}, not {type(value).__name__}')
    for i, message in enumerate(value if isinstance(value, list) else ()):
        _check(isinstance(message, dict), f'{where}: "{name}"[{i}] must be an object')
        for key in ("role", "content"):
            fine = isinstance(message.get(key), str)
            _check(fine, f'{where}: "{name}"[{i}] wants a string "{key}"')
    _check(value not in ("", []), f'{where}: "{name}" is empty')
    return value


def read_conversations(path: Path) -> Iterator[Messages]:
    """JSONL with "messages". ValueError: file, line and field."""
    for where, found in _objects(path, '"messages"'):
        yield _field(where, found, "messages", list)


def read_preferences(path: Path) -> Iterator[Preference]:
    """JSONL with "prompt" (or "messages"), "chosen" and "rejected"."""
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


def chat_tokens(messages: Messages, render: Render, encode: Callable[[str], list[int]]) -> Tensor:
    """One conversation as coded values (n,) int32. Targets are what the assistant would generate:
    in each of its turns all after the generation prompt, with the text that ends the turn.

    Where a turn begins is found by rendering the conversation up to it. ValueError: what that gives
    is not how the whole begins (a template that changes earlier turns), or there is no such turn.
    """
    whole, done, parts = render(messages, False), 0, []
    _check(whole, "messages: the chat template makes nothing of them")
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = render(messages[:i], True), render(messages[: i + 1], False)
        _check(
            after.startswith(before) and whole.startswith(after) and len(before) >= done,
            f"messages[{i}]: the chat template renders what comes before this one differently than "
            "in the whole conversation; split the conversation there, or change the template",
        )
        parts += [(whole[done : len(before)], False), (whole[len(before) : len(after)], True)]
        done = len(after)
    _check(parts, "messages: none is the assistant's, so there is nothing to learn")
    coded = []
    for text, target in [*parts, (whole[done:], False)]:
        ids = encode(text) if text else []
        coded += ids if target else [~i for i in ids]
    return torch.tensor(coded, dtype=torch.int32)


def _each(
    name: str, items: Iterable[Any] | Mapping[int, Any], make: Callable[[Any], Any]
) -> list[Any]:
    """make of all; its ValueErrors with the number of the item: from 1, or its key."""
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
    """Conversations as coded rows (R, seq_len + 1) int32, best-fit packed, or a row for each. One
    longer than a row goes on in further rows. ValueError: as chat_tokens, by number (or key)."""
    tokens = lambda messages: chat_tokens(messages, render, encode)
    documents = _each("conversation", conversations, tokens)
    rows = pack_rows(documents, seq_len, best_fit if pack else one_each)
    targets = (rows >= 0) & (rows < START)
    return rows[targets.any(1)]  # a piece may be of a prompt alone


def preference_rows(
    pairs: Iterable[Preference] | Mapping[int, Preference], render: Render | None,
    encode: Callable[[str], list[int]], seq_len: int,
) -> Tensor:  # fmt: skip
    """Pairs as coded rows (2 * n, seq_len + 1) int32: chosen, rejected, chosen, ... Completions are
    targets, and cut off at the row's end.

    Strings are a user's and an assistant's message; without `render` they are plain text, with BOS
    in front and EOS behind. Completions may repeat the prompt's messages. ValueError: a prompt that
    leaves no room.
    """

    def row(prompt: Any, completion: Any) -> Tensor:
        if render is None:
            plain = isinstance(prompt, str) and isinstance(completion, str)
            _check(plain, "messages want a chat template; give strings, or a model that has one")
            context, text = [BOS, *encode(prompt)], [*encode(completion), EOS]
        else:
            said, reply = _messages(prompt, "user"), _messages(completion, "assistant")
            reply = reply[len(said) :] if reply[: len(said)] == said else reply
            before, whole = render(said, True), render([*said, *reply], False)
            same = whole.startswith(before)
            _check(same, "the chat template renders the prompt otherwise before a completion")
            context, text = encode(before), encode(whole[len(before) :])
        room = seq_len + 1 - len(context)
        said = f"its prompt, {len(context)} tokens, leaves no room in a row of {seq_len + 1}"
        _check(room > 0, f"{said}; leave it out, or make rows longer")
        return encode_row([*context, *text[:room]], len(context), seq_len)

    both = lambda pair: torch.stack([row(pair[0], completion) for completion in pair[1:]])
    return torch.cat(_each("pair", pairs, both))


def _messages(given: str | Messages, role: str) -> Messages:
    return [{"role": role, "content": given}] if isinstance(given, str) else given


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def next_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """The plain way: in the order given, a new bin when the last one has no room."""
    bins, room = [], 0
    for i, length in enumerate(lengths):
        if length > room:
            bins.append([])
            room = capacity
        bins[-1].append(i)
        room -= length
    return bins


def predictions(documents: Iterable[Sequence[int]], seq_len: int) -> list[tuple[int, ...]]:
    """What training on ids sees, said plainly: each target behind all that is read before it, of
    documents in pieces of seq_len + 1 that overlap by one."""
    pieces = (
        ids[i : i + seq_len + 1] for ids in documents for i in range(0, len(ids) - 1, seq_len)
    )
    return sorted(tuple(piece[:n]) for piece in pieces for n in range(2, len(piece) + 1))


def decoded(rows: Tensor) -> list[tuple[int, ...]]:
    """The same, of what decode makes of packed rows."""
    found = []
    for inputs, targets, positions in zip(*(x.tolist() for x in decode(rows.long(), True))):
        for t, target in enumerate(targets):
            if target != IGNORE:
                found.append((*inputs[t - positions[t] : t + 1], target))
    return sorted(found)


class HashTokenizer:
    """A stand-in for a tokenizer: words, runs of spaces and signs, by a hash."""

    def __call__(self) -> Batched:
        pieces = re.compile(r"\w+|\s+|[^\w\s]")
        one = lambda text: [3 + zlib.crc32(p.encode()) % 50_000 for p in pieces.findall(text)]
        return lambda texts: [one(text) for text in texts]


def _lengths(n: int, rng: torch.Generator) -> list[int]:
    """Of web pages, about: log-normal, a median of 400 tokens, a tail of thousands."""
    return (torch.randn(n, generator=rng) * 1.2 + 6).exp().clamp(2, 100_000).int().tolist()


def check() -> None:
    """Packed rows hold every prediction once; shards are the same written by anyone; the stream
    gives every row once."""
    rng, T = torch.Generator().manual_seed(0), 32
    documents = [torch.randint(3, 99, (n // 20 + 2,), generator=rng, dtype=torch.int32)
                 for n in _lengths(200, rng)]  # fmt: skip
    want = predictions([d.tolist() for d in documents], T)
    for fit in (best_fit, next_fit, one_each):
        assert decoded(pack_rows(documents, T, fit)) == want, fit
    texts = [(f"{i}", "a few words " * (1 + i % 9)) for i in range(100)]
    with tempfile.TemporaryDirectory() as tmp:
        for workers in (0, 1):
            folder = Path(tmp, f"{workers}")
            index = tokenize(texts, HashTokenizer(), folder, T, True, workers, shard_tokens=500)
        shards = Shards(folder)
        assert len(shards) == index["rows"] and shards.maps[0].equal(Shards(Path(tmp, "0")).maps[0])
        stream = Stream([shards], [1], seed=0, batch_size=len(shards))
        for epoch in range(2):
            got = stream.rows(epoch, range(len(shards)))
            assert sorted(got.tolist()) == sorted(torch.cat(shards.maps).tolist())


def benchmark() -> None:
    """Rows that packing makes of 30,000 documents, and tokens per second of tokenizing."""
    T, rng = 2048, torch.Generator().manual_seed(0)
    documents = [torch.full((n,), 3, dtype=torch.int32) for n in _lengths(30_000, rng)]
    total = sum(len(d) - 1 for d in documents)
    cut = lambda documents, T: pack_rows([d[: T + 1] for d in documents], T, one_each)
    ways = {
        "best fit": pack_rows,
        "next fit": lambda documents, T: pack_rows(documents, T, next_fit),
        "one stream, cut": window_rows,
        "one each, truncated": cut,
    }
    torn = place = 0  # documents that fit a row, and stand in two
    for n in map(len, documents):
        torn += n <= T + 1 and place // T != (place + n - 2) // T
        place += n
    print(f"{len(documents):,} documents, {total:,} predictions, rows of {T}")
    print(f"{'':>20}{'rows':>9}{'filled':>9}{'lost':>8}{'cut in two':>12}{'rows/s':>10}")
    for name, way in ways.items():
        start = time.perf_counter()
        rows = way(documents, T)
        speed = len(rows) / (time.perf_counter() - start)
        kept = min(total, int(((rows[:, 1:] >= 0) & (rows[:, 1:] < START)).sum()))
        cuts = torn / len(documents) if way is window_rows else 0
        print(f"{name:>20}{len(rows):>9,}{kept / rows[:, 1:].numel():>9.1%}"
              f"{1 - kept / total:>8.1%}{cuts:>12.1%}{speed:>10,.0f}")  # fmt: skip
    texts = read_documents(None)
    print(f"\n{'workers':>20}{'tokens/s':>12}   (words of the standard library's source)")
    for workers in (0, 1, 2):
        encoded = _encoded(texts, HashTokenizer(), workers)
        next(encoded)  # workers have begun
        start = time.perf_counter()
        tokens = sum(len(ids) // 4 for ids in encoded)
        print(f"{workers:>20}{tokens / (time.perf_counter() - start):>12,.0f}")


if __name__ == "__main__":
    check()
    benchmark()
