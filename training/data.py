"""Training data: documents, and rows of tokens packed from them.

A step needs (B, T + 1) ids, but documents vary in length. Splitting one concatenated stream into
rows (`get_batch`) splits documents; one document per row, padded or truncated, wastes most of the
row or loses the end. Best-fit packing (Ding et al., arXiv:2404.10830) is bin packing: documents
longer than a row are split into pieces, then every piece, longest first, goes whole into the
fullest row that still has room for it. No token is lost, and almost nothing is padding.

Targets and document boundaries are encoded in the values, so that a row is a single tensor in
files, batches and micro-batches (`decode` is the definition):

    0 <= v          token v mod 2^30, a target (of the position before it)
    v < 0           token ~v, an input but never a target: prompt or padding
    2^30 - 1        as a token: padding, read as token 0 (`is_padding`)
    bit 30 (START)  of v, or of ~v: first token of a document. It is never a target, and in packed
                    rows its position is 0, by which attention separates documents

shards.py makes folders of such rows and mixes them; chats.py reads conversations and makes rows of
them.

Gain: with rows of 2048 tokens and documents about as long as web pages, best fit fills 99.9%, one
document per row 31%. Cost: seconds of packing for a million documents; 4 bytes per token on disk.
When it loses: if few documents are shorter than a row; if attention ignores positions, documents
attend to each other.

Hook: positions. Equivalence (test_all.py): decoded rows hold every prediction of every document
once, with its own position, under any packing. Needs: torch.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import array
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

BOS, EOS = 1, 2  # of tokenizers trained by dataset.train_tokenizer
DELIMITERS = (BOS,), (EOS,)  # tokens before and after a document
IGNORE = -100  # ignore_index of cross-entropy
START = 1 << 30  # first token of a document
PADDING = START - 1  # the token of padding in encoded values
PAD = ~PADDING  # not a target

Document = tuple[str, str]  # (name, text); the name decides whether it is for validation
BatchEncode = Callable[[list[str]], list[list[int]]]  # texts to ids, without BOS and EOS
Fit = Callable[[Sequence[int], int], list[list[int]]]  # (lengths, capacity) -> indices per bin


def _check(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --------------------------------------------------------------------------------------------------
# Documents
# --------------------------------------------------------------------------------------------------


def read_documents(data: str | None) -> list[Document]:
    """The documents of --data: JSONL with "text", or one text file, whose documents are pieces of
    up to 8192 characters, cut after a line or a word, or a folder of JSONL and text files; by
    default the source of Python's standard library without tests. In a fixed order."""
    return list(stream_documents(data))


def stream_documents(
    data: str | None, left_out: Callable[[str], Any] = lambda what: None
) -> Iterator[Document]:
    """read_documents as a generator: a folder is read file by file, JSONL line by line. left_out is
    called with the name of each file of a folder that is not read, and the reason, as one text."""
    found, reasons, one_file = False, [], data is not None and Path(data).is_file()

    def skip(what: str) -> None:
        reasons.append(what)
        left_out(what)

    for name, path in source_files(data, skip):
        if path.suffix in (".jsonl", ".ndjson"):
            lines = ((n if one_file else f"{name}:{n}", text) for n, text in _jsonl(path))
        else:
            text, why = _read_text(path)
            if why is not None:
                skip(f"{name} ({why})")
            lines = ((name, text),)
            if one_file:  # split, so that part of a single file can be for validation
                lines = ((f"{i}", piece) for i, piece in enumerate(_pieces(text)))
        for document in lines:
            if document[1].strip():
                found = True
                yield document
    why = f": {list_some(reasons)}" if reasons else ""
    _check(found, f'--data {data}: holds no text (UTF-8 files, or JSONL lines with "text"){why}')


def source_files(
    data: str | None, left_out: Callable[[str], Any] = lambda what: None
) -> list[tuple[str, Path]]:
    """(name, path) of the files of --data, in a fixed order: one, or those of a folder, without
    hidden ones; None: the standard library's."""
    path = Path(data or sysconfig.get_paths()["stdlib"])
    _check(path.exists(), f"--data {path}: no such file or folder")
    if path.is_file():
        return [(path.name, path)]
    _check(path.is_dir(), f"--data {path}: neither a file nor a folder; save it as a file first")
    return list(_folder(path, "*.py" if data is None else "*", left_out))


def _pieces(text: str, size: int = 8192) -> Iterator[str]:
    """Pieces of `size` characters at most, cut after a line or, if none ends in the second half,
    after a word."""
    start = 0
    while start < len(text):
        end = start + size
        for border in "\n", " ":
            if end < len(text) and (at := text.rfind(border, start + size // 2, end)) >= 0:
                end = at + 1
                break
        yield text[start:end]
        start = end


def list_some(what: Sequence[str], most: int = 5) -> str:
    """The first few of a list, and how many more."""
    more = f" and {len(what) - most} more" if len(what) > most else ""
    return ", ".join(what[:most]) + more


def _read_text(path: Path) -> tuple[str, str | None]:
    """(the text of a file, None), or ("", why it has none)."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as e:
        return "", f"byte {e.start} is not UTF-8"
    except OSError as e:
        return "", e.strerror or str(e)
    if (at := text.find("\0")) >= 0:
        return "", f"character {at} is NUL: not text"
    return text, None


def _folder(root: Path, pattern: str, left_out: Callable[[str], Any]) -> Iterator[tuple[str, Path]]:
    skip, hidden = {"site-packages", "dist-packages", "test", "tests", "idle_test"}, 0
    for path in sorted(root.rglob(pattern)):
        inside = path.relative_to(root)
        if pattern == "*.py" and ({*skip, "__pycache__"} & {*inside.parts}):
            continue
        if any(part.startswith(".") for part in inside.parts):
            hidden += path.is_file()
        elif path.is_file():
            yield inside.as_posix(), path
        elif path.is_symlink():
            left_out(f"{inside} (a link to {'a folder' if path.is_dir() else 'no file'})")
        elif not path.is_dir():
            left_out(f"{inside} (not a regular file)")
    if hidden:
        left_out(f"{hidden} hidden files")


def json_objects(path: Path, fields: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """("FILE: line N", object) of each line of JSONL, without fields that are null; `fields` is for
    the error message."""
    with open(path, "rb") as f:  # in binary mode lines end only at \n
        for n, line in enumerate(f, 1):
            where = f"{path}: line {n}"
            if not line.strip():
                continue
            found, why = None, ""
            try:
                found = parse_json(line.decode("utf-8-sig"))
            except UnicodeDecodeError as e:
                why = f": byte {e.start} is not UTF-8"
            except UnicodeEncodeError:
                why = ": it has half of a surrogate pair (\\ud800 to \\udfff)"
            except (ValueError, RecursionError) as e:  # invalid JSON; too deeply nested
                why = f": {getattr(e, 'msg', e)}".partition(";")[0]
            _check(isinstance(found, dict), f"{where} is not a JSON object with {fields}{why}")
            yield where, without_nulls(found)


def without_nulls(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if value is not None}


def parse_json(text: str) -> Any:
    value = json.loads(text)
    if "\\ud" in text.lower():  # raise on an unpaired surrogate
        json.dumps(value, ensure_ascii=False).encode()
    return value


NOT_OF_TEXT = frozenset("messages tools weight chosen rejected".split())
_warned: set[Path] = set()  # files whose fields beside "text" have been named on stderr


def _jsonl(path: Path) -> Iterator[Document]:
    """The "text" of each line. Corpora have many other fields, which are named once."""
    for where, found in json_objects(path, 'a "text" field'):
        _check("text" in found, f'{where} is not a JSON object with a "text" field')
        kind = type(found["text"]).__name__
        _check(kind == "str", f'{where}: "text" must be a string, not {kind}')
        if misplaced := found.keys() & NOT_OF_TEXT:
            raise ValueError(f'{where}: "{min(misplaced)}" has no meaning beside "text"; remove it')
        if (others := found.keys() - {"text"}) and path not in _warned:
            _warned.add(path)
            names = ", ".join(sorted(others))
            print(f'{where}: only "text" is read, not {names}', file=sys.stderr)
        yield where.rpartition(" ")[2], found["text"]


def is_validation(name: str) -> bool:
    """Whether a document is for validation: one in 16, by a hash of its name."""
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[0] < 16


def validation_documents(
    data: str | None, left_out: Callable[[str], Any] = lambda what: None
) -> list[str]:
    """The texts of a source that are for validation, by is_validation; if all are (a folder of one
    file), the last sixteenth of the text."""
    val, n = [], 0
    for n, (name, text) in enumerate(stream_documents(data, left_out), 1):
        if is_validation(name):
            val.append((name, text))
    return [text for _, text in val] if len(val) < n else split_documents(val)[1]


def training_documents(data: str | None) -> Iterator[Document]:
    """The other documents of a source, one by one."""
    found = False
    for name, text in stream_documents(data):
        if not is_validation(name):
            found = True
            yield name, text
    if not found:
        texts = split_documents(list(stream_documents(data)))[0]
        yield from ((f"part {i}", text) for i, text in enumerate(texts))


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
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """A file that replaces `path` once it is complete; on failure `path` is unchanged."""
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(tmp, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except OSError as e:
        raise OSError(f"{path}: cannot be written ({e.strerror or e})") from None
    finally:
        tmp.unlink(missing_ok=True)


Delimiters = tuple[Sequence[int], Sequence[int]]


def document_delimiters(tokenizer: Any, eos_ids: Sequence[int]) -> Delimiters:
    """Token ids around a document: what the tokenizer adds to every text (BOS, if it does), and at
    the end, if it adds nothing there, the model's first EOS."""
    before, after = tokenizer.bos_and_eos()
    return before, after or [*eos_ids[:1]]


def delimit(ids: Sequence[int], delimiters: Delimiters) -> list[int]:
    """A document with its delimiters, which its text may have already."""
    before, after = map(list, delimiters)
    ids = list(ids)
    ids = ids if ids[: len(before)] == before else before + ids
    return ids if ids[len(ids) - len(after) :] == after else ids + after


def write_tokens(
    path: Path, encode: BatchEncode, texts: list[str], delimiters: Delimiters = DELIMITERS
) -> None:
    """One flat file of int32: BOS document EOS, BOS document EOS, ..."""
    with open_atomically(path) as f:
        for i in range(0, len(texts), 64):
            for ids in encode(texts[i : i + 64]):
                array.array("i", delimit(ids, delimiters)).tofile(f)


def read_tokens(path: Path) -> Tensor:
    """The file of write_tokens, memory-mapped, (n,) int32."""
    size = path.stat().st_size // 4
    try:
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.int32)
    except RuntimeError as e:  # a folder, or no permission
        raise OSError(f"{path}: cannot be read ({str(e).splitlines()[0]})") from None


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
    tokens = tokens.masked_fill(tokens == PADDING, 0)
    targets = tokens.masked_fill((batch < 0) | starts, IGNORE)[:, 1:]
    if not packed:
        return tokens[:, :-1], targets, None
    at = torch.arange(batch.shape[1] - 1, device=batch.device)
    begun = torch.where(starts[:, :-1], at, 0).cummax(1).values
    return tokens[:, :-1], targets, at - begun


def is_padding(batch: Tensor) -> Tensor:
    """Which inputs of encoded rows (B, T + 1) are padding: (B, T) bool."""
    tokens = torch.where(batch < 0, ~batch, batch)[:, :-1]
    return tokens % START == PADDING


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
    padding[0] = ~(START | PADDING)
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
