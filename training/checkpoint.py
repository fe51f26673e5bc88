"""checkpoint.py: sharded checkpoints that are written while training goes on.

A run of days on many machines is stopped again and again, and goes on from what was saved last.
Four things are asked of that: the step must not wait for the disk; no rank can hold the whole; the
next run may be cut in another way, over more ranks or fewer; and what a crash, a full disk or a bad
disk leaves must never be taken for a checkpoint.

    checkpoints = Checkpoints(Path("run"), keep=2)  # on all ranks, together
    if found := checkpoints.newest():  # the newest one that is whole; checked by its sha256
        checkpoints.load(found, state)
    checkpoints.save(step, state, {"tokens": 10**9})  # returns when `state` is copied
    checkpoints.wait()  # at the end; or OSError, of a save that failed

`state` is {name: tensor}, and a tensor of which a rank has only parts is a `Piece`: the rectangles
of the whole that are here. So any cutting is told in one way: a shard of FSDP, a rank's columns of
two stacked matrices (`regions`), its experts, ZeRO's slice from the middle of one matrix to the
middle of another (`flat_blocks`). torch.distributed.checkpoint (DCP; ByteCheckpoint,
arXiv:2407.20143, describes the same idea) stores each rectangle with its place, and a reader takes
the overlap of what is stored with what it has: no layout of the writer is left in the files. What
several ranks hold alike one of them copies and writes, the one that has least to write
(`share_out`): under plain data parallelism, of P ranks each writes a P-th.

save() copies to host memory and leaves the rest to a thread with a process group of its own, as
CheckFreq (Mohan et al., FAST 21) and DCP's async_save: files in step-00000100.tmp by DCP, their
sha256, a manifest, fsync, one rename. Ranks agree after each stage; where one failed, say its disk
is full, all get the same OSError, from wait() or the next save(), and older ones are as they were.
With `lazy` the copy too is made beside the next forward and backward pass, and staged(), called
before the weights change, waits for what is left of it.

What it costs: host memory for a copy of what the rank writes; each byte is written, hashed, and
read again to check it at the start. What it gains (200 MB, 4 ranks on 2 CPU cores): training waits
38 ms for the copy, 4% of a save of 0.9 s, and with `lazy` 1 ms; DCP's async_save, which allocates
its copy anew, 73 ms; gathering to rank 0 and torch.save, 1200. (The copy runs at memory's speed,
5 GB/s, once its buffers are there; the first save takes twice that. A forked process would see the
weights without a copy, in 15 ms, but can take part in no collective.) When it loses: with no core
to spare, since writing and hashing slow training down then; under a few MB, where torch.save is as
good; in a folder that not all ranks see. .metadata is a pickle of DCP's: read only checkpoints
that you trust. Which hook: none, it takes tensors.

Equivalence (test_all.py): saved under one cutting and loaded under any other, over another number
of ranks, every tensor is bit for bit the same; after kill -9 at random moments of saves there is
always a whole one. Needs: torch. `python training/checkpoint.py` starts 4 processes, checks itself and
prints a table (--check: none).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import itertools
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import metadata as M
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Sizes = tuple[int, ...]  # or offsets
Block = tuple  # (offsets in the whole, index into the local tensor[, sizes to view that as])
Holding = dict[str, tuple[Sizes, torch.dtype, dict[Sizes, Sizes]]]  # whole, {offsets: sizes}

MANIFEST = "manifest.json"
LIMIT = 64 << 20  # bytes: larger rectangles are written as several, cut in rows
NAME = re.compile(r"step-(\d{8,})$")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _rows(at: Sizes, tile: Tensor) -> dict[Sizes, Tensor]:
    """A rectangle as some of at most LIMIT bytes (or one row): so replicas can share out a large
    tensor, and a reader of some of its rows need not read them all."""
    if tile.nbytes <= LIMIT or tile.dim() == 0:
        return {at: tile}
    step = max(1, LIMIT * len(tile) // tile.nbytes)
    return {(at[0] + i, *at[1:]): tile[i : i + step] for i in range(0, len(tile), step)}


class Piece(Tensor):
    """What this rank has of a tensor of `shape`: `local`, of which `local[index]` is the rectangle
    that begins at `offsets` of the whole, for each (offsets, index) of `blocks`; with a third
    entry, sizes, it is `local[index].view(sizes)`. No blocks: this rank has nothing of it.

    A Tensor by its metadata alone: torch.distributed.checkpoint asks for one, and for the three
    methods below (its protocol for tensor classes of others). Arithmetic is for `local`.
    """

    local: Tensor
    tiles: dict[Sizes, Tensor]  # {offsets: a view of local}

    @staticmethod
    def __new__(cls, local: Tensor, shape: Sequence[int], blocks: Iterable[Block]) -> Piece:
        like = {"dtype": local.dtype, "device": local.device}
        piece = Tensor._make_wrapper_subclass(cls, tuple(shape), **like)
        piece.local, piece.tiles = local.detach(), {}
        for offsets, index, *sizes in blocks:
            tile, at = piece.local[index], tuple(offsets)
            tile = tile.view(*sizes) if sizes else tile
            inside = tile.dim() == len(at) == len(shape) and all(
                0 <= o <= o + n <= whole for o, n, whole in zip(at, tile.shape, shape)
            )
            said = f"{tuple(tile.shape)} at {at} is not inside {tuple(shape)}"
            _check(inside, f"blocks: {said}, the shape of the whole")
            _check(at not in piece.tiles, f"blocks: two begin at {at}")
            if tile.numel() or 0 in shape:
                piece.tiles |= _rows(at, tile)
        return piece

    @classmethod
    def of(cls, x: Tensor) -> Piece:
        """A plain tensor as the whole of itself; a DTensor as what this rank has of it."""
        if isinstance(x, Piece):
            return x
        if not hasattr(x, "__create_chunk_list__"):
            return cls(x, x.shape, [((0,) * x.dim(), ())])
        return cls(x.to_local(), x.shape, [(c.offsets, ()) for c in x.__create_chunk_list__()])

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = M.TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=M.MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[M.ChunkStorageMetadata]:
        return [M.ChunkStorageMetadata(torch.Size(o), t.shape) for o, t in self.tiles.items()]

    def __get_tensor_shard__(self, index: M.MetadataIndex) -> Tensor:
        return self.tiles[tuple(index.offset)]

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Piece(of={tuple(self.shape)}, dtype={self.dtype}, at={list(self.tiles)})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN206
        raise TypeError(f"{func}: a Piece says where numbers are; compute with its .local")


def regions(shape: Sequence[int], dim_indices: Sequence[Sequence[range]]) -> list[Block]:
    """Blocks of a local tensor that has, along dimension d, the indices of the whole given by the
    ranges `dim_indices[d]`, one after the other. Dimensions that are not given are there whole.

    >>> regions((8, 6), [[range(0, 2), range(4, 6)]])  # the first halves of two stacked blocks
    [((0, 0), (slice(0, 2), slice(0, 6))), ((4, 0), (slice(2, 4), slice(0, 6)))]
    """
    _check(len(dim_indices) <= len(shape), f"dim_indices: more than the {len(shape)} of shape")
    cuts = []
    for d, n in enumerate(shape):
        joined: list[range] = []
        for r in dim_indices[d] if d < len(dim_indices) else [range(n)]:
            _check(r.step == 1 and 0 <= r.start and r.stop <= n, f"dim_indices[{d}]: {r} of {n}")
            if joined and joined[-1].stop == r.start:
                joined[-1] = range(joined[-1].start, r.stop)
            elif r:
                joined.append(r)
        ends = list(itertools.accumulate(map(len, joined)))
        cuts.append([(r.start, slice(end - len(r), end)) for r, end in zip(joined, ends)])
    return [
        (tuple(o for o, _ in cut), tuple(index for _, index in cut))
        for cut in itertools.product(*cuts)
    ]


def flat_blocks(shape: Sequence[int], start: int, stop: int) -> list[Block]:
    """Blocks of a flat local tensor that has the elements start..stop of a row-major whole: at
    most two for each dimension and one, since a slice ends within a row, and begins within one.

    >>> flat_blocks((3, 4), 2, 9)
    [((0, 2), (slice(0, 2),), (1, 2)), ((1, 0), (slice(2, 6),), (1, 4)),
     ((2, 0), (slice(6, 7),), (1, 1))]
    """
    count = math.prod(shape)
    _check(0 <= start <= stop <= count, f"start, stop: {start}, {stop} are not within {count}")

    def cut(dim: int, at: int, end: int) -> list[tuple[Sizes, Sizes]]:
        """(offsets, sizes), from dimension `dim` on, of the elements at..end of a slab of those."""
        if at == end or dim == len(shape):
            return [((), ())] * (end - at)
        rest = shape[dim + 1 :]
        row = math.prod(rest)

        def part(r: int, a: int, b: int) -> list[tuple[Sizes, Sizes]]:
            return [((r, *o), (1, *n)) for o, n in cut(dim + 1, a - r * row, b - r * row)]

        first, last = -(-at // row), end // row  # rows first..last are there whole
        if first > last:
            return part(last, at, end)
        whole = [((first, *(0,) * len(rest)), (last - first, *rest))] if last > first else []
        return part(first - 1, at, first * row) + whole + part(last, last * row, end)

    blocks, place = [], 0
    for offsets, sizes in cut(0, start, stop):
        blocks.append((offsets, (slice(place, place := place + math.prod(sizes)),), sizes))
    return blocks


@dataclass(frozen=True)
class Found:
    """A checkpoint on disk: the steps done, what the caller wrote with it, its folder."""

    step: int
    about: dict[str, Any]
    path: Path


def find(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in `folder`, ascending."""
    matches = [NAME.match(path.name) for path in Path(folder).glob("step-*")]
    return sorted(int(m[1]) for m in matches if m)


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of that step is, if there is one."""
    return Path(folder) / f"step-{step:08d}"


def _sealed(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`, which vouches for itself by its own checksum."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        good = manifest.pop("sha256") == _sealed(manifest)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path / MANIFEST}: cannot be read ({e}); use another one") from None
    _check(good, f"{path / MANIFEST}: its checksum is wrong; use another checkpoint")
    return manifest


def read_about(path: Path) -> tuple[int, dict[str, Any]]:
    """(step, about) of the checkpoint in folder `path`. One process, no group."""
    manifest = _manifest(Path(path))
    return manifest["step"], manifest["about"]


def read_whole(path: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Whole tensors on the CPU, those of `names` or all. One process, though it be a rank."""
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    names = list(saved if names is None else names)
    lacking = sorted(set(names) - set(saved))
    _check(not lacking, f"{path}: has no tensor {', '.join(lacking)}")
    state = {
        name: torch.empty(saved[name].size, dtype=saved[name].properties.dtype) for name in names
    }
    _quietly(lambda: dcp.load(state, checkpoint_id=path, no_dist=True))
    return state


def _quietly(run: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """run(), without DCP's warning that there is no process group where none is meant."""
    if group is not None:  # filters belong to all threads: leave them alone
        return run()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
        return run()


def _digest(path: Path) -> tuple[int, str]:
    """(bytes, sha256) of a file."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as f:
        while chunk := f.read(1 << 22):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _fault(path: Path, size: int, digest: str | None) -> str | None:
    """What is wrong with a file; without a digest its size alone is looked at."""
    try:
        here = _digest(path) if digest else (path.stat().st_size, None)
    except OSError as e:
        return f"{path}: {e.strerror}"
    if here[0] != size:
        return f"{path}: has {here[0]} bytes, not {size}"
    return None if here[1] == digest else f"{path}: its sha256 is not that of what was written"


def _copy_(to: Tensor, tile: Tensor) -> Tensor:
    """to.copy_(tile). In host memory without torch's threads: a second thread that has used OpenMP
    leaves it with more threads than cores, and from then on those of training sleep between any
    two operations (a step of 8M parameters on 2 cores 1.35 times as long)."""
    if tile.is_cuda:
        return to.copy_(tile, non_blocking=True)
    if tile.is_contiguous():
        ctypes.memmove(to.data_ptr(), tile.data_ptr(), tile.nbytes)
    elif tile.dim() > 1 and tile[0].is_contiguous():
        for part, rows in zip(to, tile):
            ctypes.memmove(part.data_ptr(), rows.data_ptr(), rows.nbytes)
    else:
        to.copy_(tile)
    return to


def share_out(holdings: Sequence[Holding]) -> list[set[tuple[str, Sizes]]]:
    """For each rank, the (name, offsets) of the rectangles that it is to write, from what each
    rank holds: {name: (shape of the whole, dtype, {offsets: sizes})}. The largest ones first, each
    to the one of its holders that has least to write so far: replicas are written once.

    ValueError where ranks differ about a tensor, or all of them together do not have all of it.
    """
    wholes: dict[str, tuple[Sizes, torch.dtype]] = {}
    sizes: dict[tuple[str, Sizes], Sizes] = {}
    holders: dict[tuple[str, Sizes], list[int]] = {}
    for rank, holding in enumerate(holdings):
        for name, (*whole, tiles) in holding.items():
            same = wholes.setdefault(name, whole) == whole
            _check(same, f"{name}: is {wholes[name]}, and on rank {rank} {whole}")
            for at, size in tiles.items():
                same = sizes.setdefault((name, at), size) == size
                _check(same, f"{name}: ranks differ about the size of the block at {at}")
                holders.setdefault((name, at), []).append(rank)
    held = dict.fromkeys(wholes, 0)
    for (name, _), size in sizes.items():
        held[name] += math.prod(size)
    for name, (shape, _) in wholes.items():
        said = f"{name}: the ranks' blocks have {held[name]} elements, the whole {shape}"
        _check(held[name] == math.prod(shape), said)
    bytes_of = {key: math.prod(n) * wholes[key[0]][1].itemsize for key, n in sizes.items()}
    load, mine = [0] * len(holdings), [set() for _ in holdings]
    for key in sorted(sizes, key=lambda key: (-bytes_of[key], key)):
        rank = min(holders[key], key=load.__getitem__)
        load[rank] += bytes_of[key]
        mine[rank].add(key)
    return mine


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every number of the one is one of the other."""
    if wide == narrow or not (wide.is_floating_point and narrow.is_floating_point):
        return wide == narrow
    a, b = torch.finfo(wide), torch.finfo(narrow)
    return a.bits > b.bits and a.max >= b.max


class _Writer(dcp.FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as e:  # torch.save's, of its half-written archive, hides the disk's
            raise e.__context__ or e from None


class Checkpoints:
    """The checkpoints in `folder`, of which the last `keep` stay. All ranks of the default group
    make one together, and call each method together; or one process without a group.

    `folder` is one that all ranks see. With `sync`, save() returns when all is written.
    """

    def __init__(self, folder: Path, *, keep: int = 2, sync: bool = False):
        _check(keep >= 1, f"keep must be 1 or more, not {keep}")
        self.folder, self.keep, self.sync = Path(folder), keep, sync
        alone = not (dist.is_available() and dist.is_initialized())
        # a group of its own: what its thread sends cannot meet what training sends
        self.group = None if alone else dist.new_group(backend="gloo")
        self.rank, self.world = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        self.holding: Holding | None = None
        self.mine: set[tuple[str, Sizes]] = set()  # the tiles that this rank writes
        self.buffers: dict[tuple[str, Sizes], Tensor] = {}  # their copies
        self.refused: set[int] = set()
        self.thread, self.pending = ThreadPoolExecutor(1, "checkpoint"), None
        self.copied, self.event, self.gpu = threading.Event(), None, None
        self.copied.set()
        self._together(self._tidy)
        self._together(lambda: os.listdir(self.folder))

    # -- writing

    def save(
        self, step: int, state: Mapping[str, Tensor], about: Mapping[str, Any], lazy: bool = False
    ) -> None:
        """Copy `state` ({name: Piece, DTensor, or a tensor that is the same on all ranks}) to host
        memory, begin to write it and `about` (JSON) as step-`step`, and return: from here on the
        tensors may change; if `lazy`, from staged() on. The save before is waited for, and its
        OSError raised here.

        ValueError if the ranks' pieces do not make up the whole, or `about` is not JSON.
        """
        self.wait()
        try:
            about = json.loads(json.dumps(about))
        except (TypeError, ValueError) as e:
            raise ValueError(f"about: is not JSON ({e})") from None
        pieces = {name: Piece.of(x) for name, x in state.items()}
        self._plan(pieces)
        self.gpu = next((p.device for p in pieces.values() if p.is_cuda), None)
        ready = torch.cuda.current_stream(self.gpu).record_event() if self.gpu else None
        self.copied, self.event = threading.Event(), None
        self.pending = self.thread.submit(self._write, step, pieces, about, ready)
        if self.sync:
            self.wait()
        elif not lazy:
            self.staged()

    def staged(self) -> None:
        """Return when the tensors of the last save may change (work given to the current stream
        of a GPU from here on comes after the copy): call it before the optimizer's step."""
        self.copied.wait()
        if self.event is not None:
            torch.cuda.current_stream(self.gpu).wait_event(self.event)

    def wait(self) -> None:
        """Return when the save under way is complete. OSError, on all ranks, if it failed on any:
        what was there before is untouched."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def _plan(self, pieces: Mapping[str, Piece]) -> None:
        """Who writes what: settled in the first save, and again if any rank's cutting changed."""
        holding = {
            name: (tuple(p.shape), p.dtype, {at: tuple(t.shape) for at, t in p.tiles.items()})
            for name, p in pieces.items()
        }
        changed = torch.tensor(holding != self.holding, dtype=torch.int32)
        if self.group is not None:
            dist.all_reduce(changed, dist.ReduceOp.MAX, self.group)
        if changed:
            self.buffers.clear()
            self.mine = share_out(self._gather(holding))[self.rank]
            self.holding = holding

    def _stage(self, pieces: Mapping[str, Piece], ready: Any) -> dict[str, Piece]:
        """Copies of the tiles that this rank writes, in host buffers that are used again. From a
        GPU they are made beside its work, from when it was `ready`, on a stream of their own."""
        staged: dict[str, Piece] = {}
        side = torch.cuda.Stream(self.gpu) if self.gpu else None
        with torch.cuda.stream(side) if side else contextlib.nullcontext():
            if side:
                side.wait_event(ready)
            for name, at in sorted(self.mine):
                tile = pieces[name].tiles[at]
                if (name, at) not in self.buffers:
                    new = torch.empty(tile.shape, dtype=tile.dtype, pin_memory=tile.is_cuda)
                    self.buffers[name, at] = new
                buffer = _copy_(self.buffers[name, at], tile)
                staged.setdefault(name, Piece(buffer, pieces[name].shape, [])).tiles[at] = buffer
            self.event = side.record_event() if side else None
        return staged

    def _write(self, step: int, pieces: Mapping[str, Piece], about: Any, ready: Any) -> None:
        """In the thread: copy, write, hash, seal. Each stage is done on all ranks or none."""
        final = path_of(self.folder, step)
        tmp = final.with_suffix(".tmp")
        staged: dict[str, Piece] = {}

        def stage() -> None:
            try:
                staged.update(self._stage(pieces, ready))
            finally:
                self.copied.set()
            if self.event is not None:
                self.event.synchronize()
            if self.rank == 0:
                shutil.rmtree(tmp, ignore_errors=True)

        def write() -> None:
            writer = _Writer(tmp)
            save = partial(dcp.save, staged, storage_writer=writer, process_group=self.group)
            _quietly(save, self.group)

        def digests() -> dict[str, tuple[int, str]]:
            mine = lambda name: name.startswith(f"__{self.rank}_" if self.rank else ("__0_", "."))
            return {name: _digest(tmp / name) for name in os.listdir(tmp) if mine(name)}

        try:
            self._together(stage)
            self._together(write)
            files = {k: v for part in self._together(digests) for k, v in part.items()}
            self._together(lambda: self._seal(tmp, final, step, about, files))
        except BaseException as e:
            if self.rank == 0:
                shutil.rmtree(tmp, ignore_errors=True)
            raise OSError(f"{final}: was not written, older ones are as they were: {e}") from None

    def _seal(self, tmp: Path, final: Path, step: int, about: dict, files: dict) -> None:
        """Rank 0: the manifest, the rename that makes it a checkpoint; then old ones go, and those
        that newest() refused. Steps after this one are another run's, and stay."""
        if self.rank != 0:
            return
        for name, (size, _) in files.items():  # another node's too: is this folder shared?
            if fault := _fault(tmp / name, size, None):
                raise OSError(fault)
        manifest = {"step": step, "about": about, "files": dict(sorted(files.items()))}
        text = json.dumps({**manifest, "sha256": _sealed(json.loads(json.dumps(manifest)))})
        (tmp / MANIFEST).write_text(text, encoding="utf-8")
        _sync(tmp / MANIFEST)  # DCP has synced the others
        _sync(tmp)
        old = final.with_suffix(".old")
        if final.exists():  # _tidy brings it back, if it comes to that
            final.rename(old)
        tmp.rename(final)
        _sync(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        self.refused.discard(step)
        good = [s for s in find(self.folder) if s <= step and s not in self.refused]
        for path in (path_of(self.folder, s) for s in {*good[: -self.keep], *self.refused}):
            with contextlib.suppress(OSError):  # that costs disk, and not the run
                # half removed it has the name of a leftover
                shutil.rmtree(path.rename(path.with_suffix(".tmp")))
        self.refused.clear()

    def _tidy(self) -> None:
        """Rank 0: what a killed save has left."""
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in self.folder.glob("step-*.old"):
                if old.with_suffix("").exists():
                    shutil.rmtree(old, ignore_errors=True)
                else:  # killed between the two renames
                    old.rename(old.with_suffix(""))
            for tmp in self.folder.glob("step-*.tmp"):
                shutil.rmtree(tmp, ignore_errors=True)

    # -- reading

    def newest(self, verify: bool = True) -> Found | None:
        """The newest checkpoint whose files are as they were written (without `verify`: have the
        right sizes), None if there never was any. Each one that is refused is told on stderr.

        Ranks share out the files, and agree. ValueError if there are some and all are refused.
        """
        self.wait()
        steps = self._gather(find(self.folder))[0]
        for step in reversed(steps):
            path = path_of(self.folder, step)
            verdicts = self._gather(self._faults(path, verify))
            faults = list(dict.fromkeys(fault for part in verdicts for fault in part))
            if not faults:
                return Found(*read_about(path), path)
            self.refused.add(step)
            if self.rank == 0:
                for fault in faults:
                    print(f"refused checkpoint of step {step}: {fault}", file=sys.stderr)
        _check(
            not steps,
            f"{self.folder}: its {len(steps)} checkpoints are all damaged; restore one from a "
            "copy, or start anew in another folder",
        )
        return None

    def _faults(self, path: Path, verify: bool) -> list[str]:
        try:
            files = _manifest(path)["files"]
        except ValueError as e:
            return [str(e)]
        mine = sorted(files)[self.rank :: self.world]
        faults = [_fault(path / n, files[n][0], files[n][1] if verify else None) for n in mine]
        return [fault for fault in faults if fault]

    def load(
        self, found: Found, state: Mapping[str, Tensor], *, optional: Collection[str] = ()
    ) -> None:
        """Put the checkpoint into the tensors of `state`, as in save, in place; they may be cut in
        another way, over another number of ranks. Names of `optional` may be missing on either
        side: such tensors stay as they are.

        ValueError, on all ranks and before any tensor changes, if a name is missing on one side, a
        shape differs, or a dtype cannot hold what was saved.
        """
        self.wait()
        pieces = {name: Piece.of(x) for name, x in state.items()}
        saved = dcp.FileSystemReader(found.path).read_metadata().state_dict_metadata
        wanted = set().union(*self._gather(set(pieces)))
        faults = [f"{name} is not in the checkpoint" for name in wanted - {*saved, *optional}]
        faults += [f"{name} is not asked for" for name in set(saved) - {*wanted, *optional}]
        for name in pieces.keys() & saved.keys():
            here, there, stored = pieces[name], saved[name].size, saved[name].properties.dtype
            if here.shape != there:
                faults.append(f"{name} has shape {tuple(there)}, not {tuple(here.shape)}")
            elif not _holds(here.dtype, stored):
                faults.append(f"{name} is {stored}, which {here.dtype} cannot hold")
        faults = sorted({fault for part in self._gather(faults) for fault in part})
        more = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
        _check(not faults, f"{found.path}: {'; '.join(faults[:8])}{more}")
        here = {name: piece for name, piece in pieces.items() if name in saved}
        read = partial(dcp.load, here, checkpoint_id=found.path, process_group=self.group)
        try:
            self._together(lambda: _quietly(read, self.group))
        except OSError as e:
            raise ValueError(f"{found.path}: cannot be read: {e}") from None

    # -- among ranks

    def _gather(self, mine: Any) -> list[Any]:
        if self.group is None:
            return [mine]
        every = [None] * self.world
        dist.all_gather_object(every, mine, self.group)
        return every

    def _together(self, run: Callable[[], Any]) -> list[Any]:
        """Every rank's run(); where it failed on any, OSError on all, naming each."""
        value, failed = None, []
        try:
            value = run()
        except dcp.api.CheckpointException as e:
            failed = [_said(rank, cause) for rank, (cause, _) in e.failures.items()]
        except Exception as e:
            failed = [_said(self.rank, e)]
        parts = self._gather((value, failed))
        if failures := list(dict.fromkeys(f for _, part in parts for f in part)):
            raise OSError("; ".join(failures))
        return [value for value, _ in parts]


def _said(rank: int, e: BaseException) -> str:
    return f"rank {rank}: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"


def check(rank: int, world: int, folder: Path) -> None:
    """Saved in rows, loaded as flat slices; a damaged one is refused; training goes on."""
    x = torch.arange(24.0 * world).view(-1, 6)
    rows = lambda t: Piece(t, x.shape, [((4 * rank, 0), ())])
    checkpoints = Checkpoints(folder)
    for step in (1, 2):
        state = {"x": rows(x[4 * rank :][:4] + step), "same": torch.tensor(step)}
        checkpoints.save(step, state, {"step": step})
        for t in state.values():
            t.local.zero_() if isinstance(t, Piece) else t.zero_()
        for i in range(20):
            dist.all_reduce(y := torch.tensor(i))
            assert y == i * world, "the save's messages met those of training"
    checkpoints.wait()
    if rank == 0:  # one bit of one file of the newest
        path = max(path_of(folder, 2).glob("__*"))
        data = bytearray(path.read_bytes())
        data[-700] ^= 1
        path.write_bytes(data)
    dist.barrier()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        found = checkpoints.newest()
    assert found.step == 1 and ("sha256" in said.getvalue()) == (rank == 0)
    start, stop = x.numel() * rank // world, x.numel() * (rank + 1) // world
    flat = Piece(torch.zeros(stop - start), x.shape, flat_blocks(x.shape, start, stop))
    checkpoints.load(found, {"x": flat, "same": (same := torch.tensor(0))})
    assert torch.equal(flat.local, x.flatten()[start:stop] + 1) and same == 1
    assert torch.equal(read_whole(found.path)["x"], x + 1)


def contestants(folder: Path, own: dict[str, Tensor]) -> dict[str, tuple[Callable, ...]]:
    """{name: (begin(step), before the weights change, end(of what begin gave))}"""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo")
    mine, nothing = Checkpoints(folder), lambda *_: None
    whole = lambda t: (len(t) * world, *t.shape[1:])
    state = {n: Piece(t, whole(t), [((len(t) * rank, 0), ())]) for n, t in own.items()}
    parts = {f"{n}.{rank}": t for n, t in own.items()}  # DCP copies no Pieces

    def one_file(step: int) -> None:
        received = {}
        for name, t in own.items():
            every = [torch.empty(t.shape) for _ in range(world)] if rank == 0 else None
            dist.gather(t.cpu(), every)
            received[name] = every and torch.cat(every)
        if rank == 0:
            torch.save(received, folder / "one")
            _sync(folder / "one")
        dist.barrier()

    def peer(step: int) -> Any:
        future = dcp.async_save(parts, checkpoint_id=folder / f"{step}", process_group=group)
        return getattr(future, "upload_completion", future)

    save, wait = partial(mine.save, state=state, about={}), lambda _: mine.wait()
    return {
        "save(lazy=True), staged()": (partial(save, lazy=True), mine.staged, wait),
        "save()": (save, nothing, wait),
        "save(), wait()": (lambda step: (save(step), mine.wait()), nothing, nothing),
        "dcp.async_save": (peer, nothing, lambda future: future.result()),
        "gather, torch.save": (one_file, nothing, nothing),
    }


def benchmark(rank: int, world: int, folder: Path, mb: int = 200) -> None:
    """Medians of the ms that training waits and that a save takes, `mb` MB on all ranks."""
    count = torch.cuda.device_count()
    device = f"cuda:{rank % count}" if count else "cpu"
    own = {f"w{i}": torch.randn(mb * 100 // world, 250, device=device) for i in range(10)}
    say = partial(print, flush=True) if rank == 0 else lambda *_: None
    say(f"{mb} MB on {world} ranks ({device[:4]}), written to one disk and synced")
    say(f"{'':>28}{'waits, ms':>12}{'whole, ms':>12}{'waits':>8}{'MB/s':>8}")
    for name, (begin, before, end) in contestants(folder, own).items():
        waits, whole = [], []
        for step in range(1, 5):
            dist.barrier()
            start = time.perf_counter()
            given = begin(step)
            waited = time.perf_counter() - start
            time.sleep(0.1)  # a forward and backward pass
            middle = time.perf_counter()
            before()
            waits.append(waited + time.perf_counter() - middle)
            end(given)
            dist.barrier()
            whole.append(time.perf_counter() - start)
        wait, took = statistics.median(waits[1:]), statistics.median(whole[1:])
        row = f"{1e3 * wait:>12.1f}{1e3 * took:>12.0f}{wait / took:>8.1%}{mb / took:>8.0f}"
        say(f"{name:>28}{row}")


def main() -> None:
    if "RANK" not in os.environ:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        sys.exit(subprocess.run([*run, *sys.argv], env=os.environ | threads).returncode)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with tempfile.TemporaryDirectory(dir=".", ignore_cleanup_errors=True) as name:
        dist.broadcast_object_list(names := [name])
        check(rank, world, Path(names[0]) / "check")
        if "--check" not in sys.argv:
            benchmark(rank, world, Path(names[0]) / "table")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
