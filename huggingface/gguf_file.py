"""The container of GGUF (ggml's docs/gguf.md): typed key-value pairs, descriptions of tensors, then
the tensors in blocks of quantized values, each at a multiple of an alignment.

`Header` checks every count, length, type, shape and offset against the size of the file before it
is used, so that a truncated or inconsistent file is one ValueError; `read_header` joins the parts
of a split file. The gguf package's reader does
not, and takes 40 times as long for Llama 3's vocabulary (15 s). Its code dequantizes the blocks
(pip install gguf==0.19.0), but those of Q8_0 and Q4_0 are split into the integers and scales of
quantize.py's q8_0 and q4_0. Used by gguf_checkpoint.py, which knows the model.
Needs: torch, numpy, gguf.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import math
import mmap
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd"))  # struct's letters
STRING, ARRAY = 8, 9
# All that the gguf package dequantizes. Q5_0, Q5_1: Q4_K_M's for rows that are no multiple of 256;
# Q4_1: Q4_0's with an imatrix
TYPES = (
    "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4 NVFP4 "
    "IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S TQ1_0 TQ2_0".split()
)
EXACT = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PACKED = {"Q8_0": "q8_0", "Q4_0": "q4_0"}  # the schemes of quantize.py with the same layout


def package() -> Any:
    """The gguf package: types, block sizes, dequantization and the writer."""
    try:
        import gguf
    except ImportError:
        raise ValueError("GGUF files require the gguf package: pip install gguf==0.19.0") from None
    return gguf


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a GGUF file. shape: rows last, as in torch; offset: in the file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    type: str
    offset: int

    @property
    def dtype(self) -> str:
        """Of the model that it is read into, by default."""
        return self.type if self.type in EXACT else "BF16"

    @property
    def row_bytes(self) -> int:
        gguf = package()
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.type]]
        return self.shape[-1] // block * size

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes

    def raw(self, first: int | None = None) -> np.ndarray:
        """The bytes (..., row_bytes), of the matrix `first` of a stack if given. The pages are
        unmapped with the array."""
        shape, offset = (*self.shape[:-1], self.row_bytes), self.offset
        if first is not None:
            shape, offset = shape[1:], offset + first * math.prod(shape[1:])
        return np.memmap(self.path, np.uint8, "c", offset, shape)

    def read(self, first: int | None = None) -> Tensor:
        """The tensor in its own dtype, or dequantized to fp32, a chunk of rows at a time."""
        raw = self.raw(first)
        if self.type in EXACT:
            return torch.from_numpy(raw).view(EXACT[self.type])
        gguf, rows = package(), raw.reshape(-1, self.row_bytes)
        kind = gguf.GGMLQuantizationType[self.type]
        out = torch.empty(*raw.shape[:-1], self.shape[-1])
        step = max(1, 2**16 // self.shape[-1])
        for i in range(0, len(rows), step):
            values = gguf.quants.dequantize(rows[i : i + step], kind)
            out.view(-1, self.shape[-1])[i : i + step] = torch.from_numpy(values)
        return out

    def packed(self, leaf: str) -> Tensor:
        """qweight or scales (fp16) of quantize.py's q8_0 or q4_0: a block of 32 columns is a scale
        and 32 int8, or 16 bytes of two columns each."""
        blocks = torch.from_numpy(self.raw()).unflatten(-1, (self.shape[-1] // 32, -1))
        if leaf == "scales":
            return blocks[..., :2].contiguous().view(torch.float16)[..., 0]
        return blocks[..., 2:].flatten(-2).view(torch.int8 if self.type == "Q8_0" else torch.uint8)


class Header:
    """metadata and tensors of a GGUF file. ValueError names the file and the field."""

    def __init__(self, path: Path):
        self.path, self.at = path, 0
        try:
            with open(path, "rb") as f:
                self.size = f.seek(0, 2)
                self.data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b""
        except OSError as e:
            raise ValueError(f"{path}: {e.strerror or e}; expected a GGUF file") from None
        if self.data[:4] != b"GGUF":
            raise self.error("magic", "is not GGUF: no GGUF file, or half-written")
        self.at = 4
        if (version := self.number("I", "version")) not in (2, 3):
            raise self.error("version", f"is {version}; known: 2 and 3, little-endian")
        n_tensors, n_keys = self.count("tensor_count", 24), self.count("kv_count", 13)
        self.metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = self.name("a key")
            if key in self.metadata:
                raise self.error(key, "is there twice")
            self.metadata[key] = self.value(self.number("I", key), key)
        self.tensors = self.place([self.tensor_info() for _ in range(n_tensors)])
        self.data = b""

    def error(self, field: str, why: str) -> ValueError:
        return ValueError(f"{self.path}: {field} {why}; copy the file again")

    def number(self, kind: str, field: str) -> Any:
        """The next number, of a format character of `struct`."""
        if self.at + struct.calcsize(kind) > self.size:
            raise self.error(field, f"is beyond the end of the file ({self.size} bytes)")
        (value,) = struct.unpack_from(f"<{kind}", self.data, self.at)
        self.at += struct.calcsize(kind)
        # of an fp32, its shortest decimal: 1e-05 and not 9.99999974e-06
        return float(str(np.float32(value))) if kind == "f" else value

    def count(self, field: str, each: int) -> int:
        """The next number: of items of at least `each` bytes."""
        n = self.number("Q", field)
        if n * each > self.size - self.at:
            raise self.error(field, f"is {n}, more than the file can hold ({self.size} bytes)")
        return n

    def string(self, field: str) -> str:
        n = self.count(f"the length of {field}", 1)
        self.at += n
        try:
            return self.data[self.at - n : self.at].decode()
        except UnicodeDecodeError as e:
            raise self.error(field, f"is not UTF-8 ({e.reason})") from None

    def name(self, field: str) -> str:
        """The next string, which error messages will show."""
        text = self.string(field)
        if len(text) > 256 or not text.isprintable():
            raise self.error(field, f"is {text[:40]!r}, with {len(text)} characters")
        return text

    def value(self, kind: int, field: str) -> Any:
        if kind == STRING:
            return self.string(field)
        if kind in SCALARS:
            return self.number(SCALARS[kind], field)
        if kind != ARRAY:
            raise self.error(field, f"has type {kind}, which is unknown")
        kind = self.number("I", field)
        if kind == STRING:
            return [self.string(field) for _ in range(self.count(f"the length of {field}", 8))]
        if kind not in SCALARS:
            raise self.error(field, f"is an array of type {kind}, which is unknown")
        size = struct.calcsize(SCALARS[kind])
        n = self.count(f"the length of {field}", size)
        self.at += n * size
        return list(struct.unpack_from(f"<{n}{SCALARS[kind]}", self.data, self.at - n * size))

    def tensor_info(self) -> TensorInfo:
        """A tensor's description; its offset still counts from the first tensor."""
        gguf, name = package(), self.name("a tensor's name")
        dims = self.number("I", f"{name}: n_dims")
        if not 1 <= dims <= 4:
            raise self.error(name, f"has {dims} dimensions; known: 1 to 4")
        shape = [self.number("Q", f"{name}: dimensions") for _ in range(dims)]
        kind, offset = self.number("I", f"{name}: type"), self.number("Q", f"{name}: offset")
        known = {gguf.GGMLQuantizationType[t].value: t for t in TYPES}
        if kind not in known:
            names = {member.value: member.name for member in gguf.GGMLQuantizationType}
            raise ValueError(
                f"{self.path}: {name} has type {names.get(kind, kind)}, which is not supported; "
                f"known: {', '.join(TYPES)}"
            )
        block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)][0]
        if not 1 <= math.prod(shape) <= 2 * self.size or shape[0] % block:
            raise self.error(name, f"cannot have shape {shape[::-1]} in {known[kind]}")
        return TensorInfo(self.path, name, tuple(shape[::-1]), known[kind], offset)

    def place(self, infos: Sequence[TensorInfo]) -> dict[str, TensorInfo]:
        """By name, with offsets in the file. The tensors follow each other without gaps."""
        align = self.metadata.get("general.alignment", 32)
        if type(align) is not int or align < 8 or align & (align - 1):
            raise self.error("general.alignment", f"must be a power of 2, not {align!r}")
        first, offset = -(-self.at // align) * align, 0
        placed: dict[str, TensorInfo] = {}
        for info in infos:
            if info.name in placed:
                raise self.error(info.name, "is there twice")
            if info.offset != offset or first + offset + info.nbytes > self.size:
                raise self.error(
                    info.name,
                    f"is at offset {info.offset} with {info.nbytes} bytes, but must be at {offset} "
                    f"and end within the file's {self.size - first} bytes of tensors",
                )
            placed[info.name] = replace(info, offset=first + offset)
            offset += -(-info.nbytes // align) * align
        return placed


def read_header(path: Path) -> Header:
    """The header of a file; of the first of several parts (NAME-00001-of-00003.gguf, written by
    llama-gguf-split), with the tensors of all. ValueError names the part."""
    header = Header(path)
    n = header.metadata.get("split.count", 0)
    if n in (0, 1):
        return header
    name = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
    if name is None or int(name[2]) != n or header.metadata.get("split.no", 0) != 0:
        raise ValueError(f"{path}: is one of {n} parts; give the first, NAME-00001-of-0000N.gguf")
    for i in range(1, n):
        part = Header(path.with_name(f"{name[1]}-{i + 1:05}-of-{name[2]}.gguf"))
        if part.metadata.get("split.no") != i or part.metadata.get("split.count") != n:
            raise part.error("split.no", f"is not that of part {i + 1} of {n}")
        if twice := header.tensors.keys() & part.tensors.keys():
            raise part.error(sorted(twice)[0], "is in another part too")
        header.tensors |= part.tensors
    if header.metadata.get("split.tensors.count", len(header.tensors)) != len(header.tensors):
        raise header.error(
            "split.tensors.count", f"is not that of its parts, {len(header.tensors)}"
        )
    return header
