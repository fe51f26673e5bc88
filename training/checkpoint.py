"""Sharded checkpoints, written asynchronously, that load under any other sharding.

A long run is interrupted often and resumes from its last checkpoint. So: a step must not wait for
the disk; no rank can hold the full state; the next run may use another parallelism or number of
ranks; and what a crash, a full disk or a bad disk leaves behind must never be loaded.

    checkpoints = Checkpoints(Path("run"), keep=2)  # on all ranks, together
    if found := checkpoints.newest():  # the newest intact one, verified by sha256
        checkpoints.load(found, state)
    checkpoints.save(step, state, {"tokens": 10**9})  # returns when `state` is copied
    checkpoints.wait()  # at the end; OSError if a save failed

`state` is {name: tensor}. A tensor of which a rank has only parts is a `ShardedTensor` (as in
Megatron-LM): the chunks (hyperrectangles) of the full tensor that are on this rank: an FSDP shard,
a rank's columns of two stacked matrices (`regions`), its experts. torch.distributed.checkpoint
(DCP; the idea is that of ByteCheckpoint, arXiv:2407.20143) stores each chunk with its offsets, and
a reader loads the overlap of stored chunks with its own. A chunk replicated on several ranks is
written by the one with the fewest bytes so far (`assign_writes`).

save() copies to host memory; a thread with a process group of its own does the rest, as in
CheckFreq (Mohan et al., FAST 21) and DCP's async_save: DCP writes files to step-00000100.tmp, then
sha256, manifest, fsync, one rename. If a stage fails on one rank (a full disk), all raise the same
OSError from wait() or the next save(), and older checkpoints are unchanged. With `async_staging`
the copy, too, overlaps with the next forward and backward pass; wait_for_staging(), called before
the optimizer step, waits for the rest of it.

Cost: host memory for a copy of what the rank writes; each byte is written, hashed, and read again
to verify it on resume. Gain (200 MB, 4 ranks on 2 CPU cores): training waits 38 ms for the copy and
1 ms with `async_staging`; DCP's async_save, which allocates a new copy and does not verify it, 73.
When it loses: with no idle core; under a few MB, where torch.save is as good; in a folder that not
all ranks can access. .metadata is a pickle of DCP's, of which only DCP's own classes are loaded, so
that a checkpoint runs no code. Hook: none, it takes tensors.

Equivalence (test_all.py): saved under one sharding and loaded under any other, on another number of
ranks, every tensor is bit for bit the same; after kill -9 at random moments of saves an intact
checkpoint always exists. `torchrun --nproc-per-node 4 training/checkpoint.py` checks and measures.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import json
import math
import mmap
import os
import pickle
import re
import shutil
import sys
import tempfile
import threading
import time
import warnings
import weakref
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
Block = tuple  # (offsets in the full tensor, index into the local one[, sizes to view that as])
LocalChunks = dict[str, tuple[Sizes, torch.dtype, dict[Sizes, Sizes]]]  # full, {offsets: sizes}

# DCP warns that there is no process group, which one process does not need
warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")

MANIFEST = "manifest.json"
ALIGN = 64  # bytes, of a host buffer
MAX_CHUNK_BYTES = 64 << 20  # larger chunks are split by rows
STEP_DIR = re.compile(r"step-(\d{8,})$")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _split_rows(at: Sizes, chunk: Tensor) -> dict[Sizes, Tensor]:
    """A chunk as several of at most MAX_CHUNK_BYTES (or one row), so that replicas can share the
    writing of a large tensor, and a reader of some rows need not read all."""
    if chunk.nbytes <= MAX_CHUNK_BYTES or chunk.dim() == 0:
        return {at: chunk}
    step = max(1, MAX_CHUNK_BYTES * len(chunk) // chunk.nbytes)
    return {(at[0] + i, *at[1:]): chunk[i : i + step] for i in range(0, len(chunk), step)}


class ShardedTensor(Tensor):
    """This rank's part of a full tensor of `shape`. For each (offsets, index) of `blocks`,
    `local[index]` is the chunk that begins at `offsets` of the full tensor; with a third entry,
    sizes, it is `local[index].view(sizes)`. No blocks: this rank has no part of it.

    A Tensor without data, because torch.distributed.checkpoint requires the type and the three
    dunder methods below (its protocol for tensor subclasses). Compute with `local`.
    """

    local: Tensor
    chunks: dict[Sizes, Tensor]  # {offsets: a view of local}

    @staticmethod
    def __new__(cls, local: Tensor, shape: Sequence[int], blocks: Iterable[Block]) -> ShardedTensor:
        like = {"dtype": local.dtype, "device": local.device}
        tensor = Tensor._make_wrapper_subclass(cls, tuple(shape), **like)
        tensor.local, tensor.chunks = local.detach(), {}
        for offsets, index, *sizes in blocks:
            chunk = tensor.local[index].view(*sizes) if sizes else tensor.local[index]
            if chunk.numel() or 0 in shape:
                tensor.chunks |= _split_rows(tuple(offsets), chunk)
        return tensor

    @classmethod
    def of(cls, x: Tensor) -> ShardedTensor:
        """A plain tensor as a full one; a DTensor as this rank's shard of it."""
        if isinstance(x, ShardedTensor):
            return x
        if not hasattr(x, "__create_chunk_list__"):
            return cls(x, x.shape, [((0,) * x.dim(), ())])
        return cls(x.to_local(), x.shape, [(c.offsets, ()) for c in x.__create_chunk_list__()])

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties, items = M.TensorProperties(dtype=self.dtype), []
        for chunk in self.__create_chunk_list__():
            data = TensorWriteData(chunk, properties, self.size())
            index = M.MetadataIndex(name, chunk.offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[M.ChunkStorageMetadata]:
        return [M.ChunkStorageMetadata(torch.Size(o), t.shape) for o, t in self.chunks.items()]

    def __get_tensor_shard__(self, index: M.MetadataIndex) -> Tensor:
        return self.chunks[tuple(index.offset)]

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"ShardedTensor({tuple(self.shape)}, {self.dtype}, chunks at {list(self.chunks)})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN206
        raise TypeError(f"{func}: a ShardedTensor has no data; compute with its .local")


def regions(shape: Sequence[int], dim_indices: Sequence[Sequence[range]]) -> list[Block]:
    """Blocks of a local tensor that has, along dimension d, the concatenated ranges
    `dim_indices[d]` of the full tensor. Dimensions that are not given are complete.

    >>> regions((8, 6), [[range(0, 2), range(4, 6)]])  # the first halves of two stacked blocks
    [((0, 0), (slice(0, 2), slice(0, 6))), ((4, 0), (slice(2, 4), slice(0, 6)))]
    """
    per_dim = []
    for d, n in enumerate(shape):
        merged: list[range] = []
        for r in dim_indices[d] if d < len(dim_indices) else [range(n)]:
            if merged and merged[-1].stop == r.start:
                merged[-1] = range(merged[-1].start, r.stop)
            elif r:
                merged.append(r)
        ends = list(itertools.accumulate(map(len, merged)))
        per_dim.append([(r.start, slice(end - len(r), end)) for r, end in zip(merged, ends)])
    return [
        (tuple(o for o, _ in spans), tuple(index for _, index in spans))
        for spans in itertools.product(*per_dim)
    ]


def flat_regions(shape: Sequence[int], elements: range) -> list[Block]:
    """Blocks of a local tensor (len(elements),), a range of the full tensor's flattened elements.

    >>> flat_regions((4, 3), range(2, 10))  # the end of row 0, rows 1 and 2, the start of row 3
    [((0, 2), slice(0, 1), (1, 1)), ((1, 0), slice(1, 7), (2, 3)), ((3, 0), slice(7, 8), (1, 1))]
    """
    if not shape:
        return [((), slice(0, 1), ())] if elements else []
    row_size, blocks, start = math.prod(shape[1:]), [], elements.start
    while start < elements.stop:
        row, column = divmod(start, row_size)
        rows = 0 if column else (elements.stop - start) // row_size
        if rows:  # whole ones
            n = rows * row_size
            parts = [((0,) * len(shape[1:]), slice(0, n), shape[1:])]
        else:
            n = min(row_size - column, elements.stop - start)
            parts = flat_regions(shape[1:], range(column, column + n))
        first = start - elements.start
        for offsets, index, sizes in parts:
            index = slice(first + index.start, first + index.stop)
            blocks.append(((row, *offsets), index, (max(rows, 1), *sizes)))
        start += n
    return blocks


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint on disk: the number of steps done, the caller's metadata, its folder."""

    step: int
    metadata: dict[str, Any]
    path: Path


def list_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in `folder`, ascending."""
    matches = [STEP_DIR.match(path.name) for path in Path(folder).glob("step-*")]
    return sorted(int(m[1]) for m in matches if m)


def checkpoint_path(folder: Path, step: int) -> Path:
    """The folder of the checkpoint of `step`, which need not exist."""
    return Path(folder) / f"step-{step:08d}"


def _manifest_sha256(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`, verified by the checksum that it contains."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        good = manifest.pop("sha256") == _manifest_sha256(manifest)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f"{path / MANIFEST}: cannot be read ({e}); use another one") from None
    _check(good, f"{path / MANIFEST}: its checksum is wrong; use another checkpoint")
    return manifest


def read_user_metadata(path: Path) -> tuple[int, dict[str, Any]]:
    """(step, metadata) of the checkpoint in folder `path`. Not collective."""
    manifest = _read_manifest(Path(path))
    return manifest["step"], manifest["about"]


# What .metadata is made of: data without methods that run others' code. Not BytesStorageMetadata:
# it makes DCP unpickle whole objects, and a state here has tensors alone.
METADATA_CLASSES = {
    (M.__name__, name)
    for name in "Metadata TensorStorageMetadata TensorProperties ChunkStorageMetadata "
    "MetadataIndex StorageMeta _MEM_FORMAT_ENCODING".split()
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size"),
    ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in METADATA_CLASSES or is_dtype:
            return super().find_class(module, name)
        raise ValueError(f"{module}.{name} is not a class of checkpoints")


class Reader(dcp.FileSystemReader):
    """DCP's reader, which loads nothing but METADATA_CLASSES from .metadata. ValueError names the
    file if it has anything else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> M.Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with open(path, "rb") as f:
                metadata = _MetadataUnpickler(f).load()
            _check(isinstance(metadata, M.Metadata), "holds something else")
        except OSError:
            raise
        except Exception as e:  # an altered pickle may raise anything
            why = f"not the metadata of a checkpoint ({e}); do not use this folder"
            raise ValueError(f"{path}: {why}") from None
        metadata.storage_meta = metadata.storage_meta or M.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_full_tensors(path: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """{name: full tensor on the CPU}, of `names` or of all. Not collective."""
    saved = Reader(path).read_metadata().state_dict_metadata
    names = list(saved if names is None else names)
    missing = sorted(set(names) - set(saved))
    _check(not missing, f"{path}: has no tensor {', '.join(missing)}")
    empty = lambda meta: torch.empty(meta.size, dtype=meta.properties.dtype)
    state = {name: empty(saved[name]) for name in names}
    dcp.load(state, storage_reader=Reader(path), no_dist=True)
    return state


def _digest(path: Path) -> tuple[int, str]:
    """(bytes, sha256) of a file."""
    with open(path, "rb") as f:
        return path.stat().st_size, hashlib.file_digest(f, "sha256").hexdigest()


def _file_error(path: Path, size: int, digest: str) -> str | None:
    """The error of a corrupt file, or None."""
    try:
        found = _digest(path)
    except OSError as e:
        return f"{path}: {e.strerror}"
    if found[0] != size:
        return f"{path}: has {found[0]} bytes, not {size}"
    return None if found[1] == digest else f"{path}: its sha256 is not the one in the manifest"


def _delete(path: Path) -> None:
    """Remove a folder; of a link only the link. OSError of the first that cannot be removed."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _copy_(to: Tensor, chunk: Tensor) -> Tensor:
    """to.copy_(chunk). Copies in host memory avoid torch's thread pool: once a second thread has
    used OpenMP there are more OpenMP threads than cores, and those of training then sleep between
    operations (a step of 8M parameters on 2 cores takes 1.35 times as long)."""
    if chunk.is_cuda:
        return to.copy_(chunk, non_blocking=True)
    if chunk.is_conj() or chunk.is_neg():  # in its memory the conjugation is not yet done
        to.copy_(chunk)
    elif chunk.is_contiguous():
        ctypes.memmove(to.data_ptr(), chunk.data_ptr(), chunk.nbytes)
    elif chunk.dim() > 1 and chunk[0].is_contiguous():
        for part, rows in zip(to, chunk):
            ctypes.memmove(part.data_ptr(), rows.data_ptr(), rows.nbytes)
    else:
        to.copy_(chunk)
    return to


def assign_writes(all_local_chunks: Sequence[LocalChunks]) -> list[set[tuple[str, Sizes]]]:
    """For each rank, the (name, offsets) of the chunks that it writes, from every rank's chunks:
    {name: (full shape, dtype, {offsets: sizes})}. Each chunk, the largest first, is assigned to
    the holder with the fewest bytes so far, so that replicas are written once.

    ValueError if ranks disagree about a tensor, or its chunks do not make up all of it.
    """
    full: dict[str, tuple[Sizes, torch.dtype]] = {}
    sizes: dict[tuple[str, Sizes], Sizes] = {}
    holders: dict[tuple[str, Sizes], list[int]] = {}
    for rank, local_chunks in enumerate(all_local_chunks):
        for name, (*shape_dtype, chunks) in local_chunks.items():
            same = full.setdefault(name, shape_dtype) == shape_dtype
            _check(same, f"{name}: is {full[name]}, but {shape_dtype} on rank {rank}")
            for at, size in chunks.items():
                same = sizes.setdefault((name, at), size) == size
                _check(same, f"{name}: ranks differ about the size of the chunk at {at}")
                holders.setdefault((name, at), []).append(rank)
    elements = dict.fromkeys(full, 0)
    for (name, _), size in sizes.items():
        elements[name] += math.prod(size)
    for name, (shape, _) in full.items():
        message = f"{name}: the ranks' chunks have {elements[name]} elements, not those of {shape}"
        _check(elements[name] == math.prod(shape), message)
    bytes_of = {key: math.prod(n) * full[key[0]][1].itemsize for key, n in sizes.items()}
    assigned_bytes, writes = [0] * len(all_local_chunks), [set() for _ in all_local_chunks]
    for key in sorted(sizes, key=lambda key: (-bytes_of[key], key)):
        rank = min(holders[key], key=assigned_bytes.__getitem__)
        assigned_bytes[rank] += bytes_of[key]
        writes[rank].add(key)
    return writes


def _can_hold(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether `wide` represents every number of `narrow`."""
    if wide == narrow or not (wide.is_floating_point and narrow.is_floating_point):
        return wide == narrow
    a, b = torch.finfo(wide), torch.finfo(narrow)
    return a.bits > b.bits and a.max >= b.max


class _Writer(dcp.FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        # torch.save's error about its incomplete archive hides the disk's error
        except RuntimeError as e:
            raise e.__context__ or e from None


class Checkpoints:
    """The checkpoints in `folder`, of which the latest `keep` are kept. Construction and all
    methods are collective over the default group, or for one process without a group.

    `folder` must be accessible to all ranks. `sync`: save() returns when everything is written.
    `read_only`: nothing in `folder` is changed, so another process may be writing it.
    """

    def __init__(
        self, folder: Path, *, keep: int = 2, sync: bool = False, read_only: bool = False
    ):  # fmt: skip
        _check(keep >= 1, f"keep must be 1 or more, not {keep}")
        self.folder, self.keep, self.sync = Path(folder), keep, sync
        self.read_only = read_only
        alone = not (dist.is_available() and dist.is_initialized())
        # a group of its own, so that the thread's collectives cannot match those of training
        self.group = None if alone else dist.new_group(backend="gloo")
        self.rank, self.world = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        self.local_chunks: LocalChunks | None = None
        self.local_writes: set[tuple[str, Sizes]] = set()  # the chunks that this rank writes
        self.buffers: dict[tuple[str, Sizes], Tensor] = {}  # their host copies
        self.unpin: Callable[[], Any] = lambda: None  # before the buffers are freed
        self.corrupt: set[int] = set()
        self.thread, self.pending = ThreadPoolExecutor(1, "checkpoint"), None
        self.copied, self.event, self.gpu = threading.Event(), None, None
        self.copied.set()
        if read_only:
            return
        self._run_on_all_or_raise(self._clean_up)
        self._run_on_all_or_raise(lambda: os.listdir(self.folder))  # every rank can access it

    # -- writing

    def save(
        self, step: int, state: Mapping[str, Tensor], metadata: Mapping[str, Any],
        async_staging: bool = False,
    ) -> None:  # fmt: skip
        """Copy `state` ({name: ShardedTensor, DTensor, or a tensor equal on all ranks}) to host
        memory, begin to write it and `metadata` (JSON) as step-`step`, and return: then the tensors
        may change; with `async_staging` only after wait_for_staging(). Waits for the previous save,
        and raises its OSError.

        ValueError if the ranks' chunks do not make up the full tensors, or `metadata` is not JSON.
        """
        _check(not self.read_only, f"{self.folder}: opened to be read only")
        self.wait()
        try:
            metadata = json.loads(json.dumps(metadata))
        except (TypeError, ValueError) as e:
            raise ValueError(f"metadata is not JSON ({e})") from None
        tensors = {name: ShardedTensor.of(x) for name, x in state.items()}
        self._plan_writes(tensors)
        self.gpu = next((p.device for p in tensors.values() if p.is_cuda), None)
        ready = torch.cuda.current_stream(self.gpu).record_event() if self.gpu else None
        self.copied, self.event = threading.Event(), None
        self.pending = self.thread.submit(self._write, step, tensors, metadata, ready)
        if self.sync:
            self.wait()
        elif not async_staging:
            self.wait_for_staging()

    def wait_for_staging(self) -> None:
        """Return when the tensors of the last save may change (on a GPU: for work queued on the
        current stream from now on). Call it before the optimizer step."""
        self.copied.wait()
        if self.event is not None:
            torch.cuda.current_stream(self.gpu).wait_event(self.event)

    def wait(self) -> None:
        """Return when the current save is complete. OSError on all ranks if it failed on any; older
        checkpoints are unchanged."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def _plan_writes(self, tensors: Mapping[str, ShardedTensor]) -> None:
        """Assign writes to ranks, in the first save and again if any rank's sharding changed."""
        local_chunks = {
            name: (tuple(p.shape), p.dtype, {at: tuple(t.shape) for at, t in p.chunks.items()})
            for name, p in tensors.items()
        }
        changed = torch.tensor(local_chunks != self.local_chunks, dtype=torch.int32)
        if self.group is not None:
            dist.all_reduce(changed, dist.ReduceOp.MAX, self.group)
        if changed:
            self.unpin()
            self.buffers.clear()
            self.local_writes = assign_writes(self._gather(local_chunks))[self.rank]
            self.local_chunks = local_chunks

    def _allocate(self, chunks: Mapping[tuple[str, Sizes], Tensor]) -> None:
        """Make the host buffers, in one block of memory. For a GPU it is pinned here, because
        torch's pinned allocator rounds every size up to a power of two."""
        starts = [0, *itertools.accumulate(-(-c.nbytes // ALIGN) * ALIGN for c in chunks.values())]
        slab = mmap.mmap(-1, starts[-1] or 1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for (key, c), start in zip(chunks.items(), starts):
            new = torch.empty(0, dtype=c.dtype)
            if c.numel():
                new = torch.frombuffer(slab, dtype=c.dtype, count=c.numel(), offset=start)
            self.buffers[key] = new.view(c.shape)
        if self.gpu:
            cudart, at = torch.cuda.cudart(), torch.frombuffer(slab, dtype=torch.uint8).data_ptr()
            torch.cuda.check_error(int(cudart.cudaHostRegister(at, len(slab), 0)))
            # of self: a finalizer of the slab would run after its memory is unmapped
            self.unpin = weakref.finalize(self, cudart.cudaHostUnregister, at)

    def _stage(self, tensors: Mapping[str, ShardedTensor], ready: Any) -> dict[str, ShardedTensor]:
        """Copy the chunks that this rank writes to reused host buffers. On a GPU the copies run on
        a side stream, after the event `ready`."""
        staged: dict[str, ShardedTensor] = {}
        if self.local_writes and not self.buffers:
            self._allocate({(n, at): tensors[n].chunks[at] for n, at in self.local_writes})
        side = torch.cuda.Stream(self.gpu) if self.gpu else None
        with torch.cuda.stream(side) if side else contextlib.nullcontext():
            if side:
                side.wait_event(ready)
            for name, at in sorted(self.local_writes):
                chunk = tensors[name].chunks[at]
                buffer = _copy_(self.buffers[name, at], chunk)
                empty = ShardedTensor(buffer, tensors[name].shape, [])
                staged.setdefault(name, empty).chunks[at] = buffer
            self.event = side.record_event() if side else None
        return staged

    def _write(
        self, step: int, tensors: Mapping[str, ShardedTensor], metadata: Any, ready: Any
    ) -> None:
        """In the thread: copy, write, hash, commit. Each stage succeeds on all ranks or on none."""
        final = checkpoint_path(self.folder, step)
        tmp = final.with_suffix(".tmp")
        staged: dict[str, ShardedTensor] = {}
        if self.gpu:  # a new thread's device is 0, where every rank would create a context
            torch.cuda.set_device(self.gpu)

        def stage() -> None:
            try:
                staged.update(self._stage(tensors, ready))
            finally:
                self.copied.set()
            if self.event is not None:
                self.event.synchronize()
            if self.rank == 0:
                _delete(tmp)

        def write() -> None:
            dcp.save(staged, storage_writer=_Writer(tmp), process_group=self.group)

        def digests() -> dict[str, tuple[int, str]]:
            own = f"__{self.rank}_" if self.rank else ("__0_", ".")
            return {name: _digest(tmp / name) for name in os.listdir(tmp) if name.startswith(own)}

        try:
            self._run_on_all_or_raise(stage)
            self._run_on_all_or_raise(write)
            files = {k: v for part in self._run_on_all_or_raise(digests) for k, v in part.items()}
            self._run_on_all_or_raise(lambda: self._commit(tmp, final, step, metadata, files))
        except Exception as e:
            with contextlib.suppress(OSError):
                if self.rank == 0:
                    _delete(tmp)
            raise OSError(f"{final}: not written, older checkpoints are kept: {e}") from None

    def _commit(self, tmp: Path, final: Path, step: int, metadata: dict, files: dict) -> None:
        """Rank 0: write the manifest and rename the folder, which makes it a checkpoint; then
        delete old ones and those that newest() found corrupt. Later steps belong to another run and
        are kept."""
        if self.rank != 0:
            return
        if missing := sorted(files.keys() - set(os.listdir(tmp))):
            raise OSError(f"{tmp}: does not have {missing[0]}; all ranks must share this folder")
        manifest = {"step": step, "about": metadata, "files": files}
        text = json.dumps({**manifest, "sha256": _manifest_sha256(manifest)})
        (tmp / MANIFEST).write_text(text, encoding="utf-8")
        _fsync(tmp / MANIFEST)  # DCP has fsynced the others
        _fsync(tmp)
        old = final.with_suffix(".old")
        if final.exists():  # _clean_up restores it after a crash here
            final.rename(old)
        tmp.rename(final)
        _fsync(self.folder)
        with contextlib.suppress(OSError):
            _delete(old)
        self.corrupt.discard(step)
        good = [s for s in list_steps(self.folder) if s <= step and s not in self.corrupt]
        for path in (checkpoint_path(self.folder, s) for s in {*good[: -self.keep], *self.corrupt}):
            with contextlib.suppress(OSError):  # a failure costs disk space, not the run
                # if only half deleted, the folder has the name of a leftover
                _delete(path.rename(path.with_suffix(".tmp")))
        self.corrupt.clear()

    def _clean_up(self) -> None:
        """Rank 0: remove what a killed save has left."""
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in self.folder.glob("step-*.old"):
                if not old.with_suffix("").exists():  # killed between the two renames
                    old.rename(old.with_suffix(""))
            for left in (*self.folder.glob("step-*.old"), *self.folder.glob("step-*.tmp")):
                with contextlib.suppress(OSError):
                    _delete(left)

    # -- reading

    def newest(self) -> CheckpointInfo | None:
        """The newest checkpoint whose files match their sha256, or None if there is no checkpoint.
        Corrupt ones are skipped with a message on stderr.

        Ranks verify different files and share the result. ValueError if all are corrupt.
        """
        self.wait()
        steps = self._gather(list_steps(self.folder))[0]
        for step in reversed(steps):
            path = checkpoint_path(self.folder, step)
            by_rank = self._gather(self._find_errors(path))
            errors = list(dict.fromkeys(error for part in by_rank for error in part))
            if not errors:
                return CheckpointInfo(*read_user_metadata(path), path)
            self.corrupt.add(step)
            if self.rank == 0:
                for error in errors:
                    print(f"skipped corrupt checkpoint of step {step}: {error}", file=sys.stderr)
        corrupt = f"{self.folder}: all {len(steps)} checkpoints are corrupt"
        _check(not steps, f"{corrupt}; restore a copy, or start a new run in another folder")
        return None

    def _find_errors(self, path: Path) -> list[str]:
        try:
            files = _read_manifest(path)["files"]
        except ValueError as e:
            return [str(e)]
        own = sorted(files)[self.rank :: self.world]
        return [error for name in own if (error := _file_error(path / name, *files[name]))]

    def load(
        self, found: CheckpointInfo, state: Mapping[str, Tensor], *, optional: Collection[str] = ()
    ) -> None:
        """Load the checkpoint into the tensors of `state` (as in save), in place, under any
        sharding and number of ranks. Names in `optional` may be missing on either side; such
        tensors are unchanged.

        ValueError, on all ranks and before any tensor changes, if a name is missing on one side, a
        shape differs, or a dtype cannot represent what was saved.
        """
        self.wait()
        tensors = {name: ShardedTensor.of(x) for name, x in state.items()}
        saved = Reader(found.path).read_metadata().state_dict_metadata
        wanted = set().union(*self._gather(set(tensors)))
        errors = [f"{name} is not in the checkpoint" for name in wanted - {*saved, *optional}]
        unexpected = set(saved) - {*wanted, *optional}
        errors += [f"{name} is in the checkpoint but not in the state" for name in unexpected]
        for name in tensors.keys() & saved.keys():
            tensor, shape, dtype = tensors[name], saved[name].size, saved[name].properties.dtype
            if tensor.shape != shape:
                errors.append(f"{name} has shape {tuple(shape)}, not {tuple(tensor.shape)}")
            elif not _can_hold(tensor.dtype, dtype):
                errors.append(f"{name} is {dtype}, which {tensor.dtype} cannot represent")
        errors = sorted({error for part in self._gather(errors) for error in part})
        more = f" and {len(errors) - 8} more" if len(errors) > 8 else ""
        _check(not errors, f"{found.path}: {'; '.join(errors[:8])}{more}")
        present = {name: tensor for name, tensor in tensors.items() if name in saved}
        reader = Reader(found.path)
        read = partial(dcp.load, present, storage_reader=reader, process_group=self.group)
        try:
            self._run_on_all_or_raise(read)
        except OSError as e:
            raise ValueError(f"{found.path}: cannot be read: {e}") from None

    # -- collectives

    def _gather(self, value: Any) -> list[Any]:
        if self.group is None:
            return [value]
        every = [None] * self.world
        dist.all_gather_object(every, value, self.group)
        return every

    def _run_on_all_or_raise(self, run: Callable[[], Any]) -> list[Any]:
        """Every rank's run(); if it fails on any, OSError on all, naming each failed rank."""
        value, failed = None, []
        try:
            value = run()
        except dcp.api.CheckpointException as e:
            failed = [_error_line(rank, cause) for rank, (cause, _) in e.failures.items()]
        except Exception as e:
            failed = [_error_line(self.rank, e)]
        parts = self._gather((value, failed))
        if failures := list(dict.fromkeys(f for _, part in parts for f in part)):
            raise OSError("; ".join(failures))
        return [value for value, _ in parts]


def _error_line(rank: int, e: BaseException) -> str:
    return f"rank {rank}: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def main() -> None:
    """A state saved by rows loads as columns; milliseconds that training waits for a save."""
    if "RANK" not in os.environ:
        raise SystemExit("run: torchrun --standalone --nproc-per-node 4 training/checkpoint.py")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = [tempfile.mkdtemp(dir=".") if rank == 0 else None]
    dist.broadcast_object_list(folder)
    gpus, n = torch.cuda.device_count(), 6000 // world
    full = torch.arange(float(n * world) ** 2, device=f"cuda:{rank % gpus}" if gpus else "cpu")
    full = full.view(n * world, n * world)
    rows, columns = (full.narrow(dim, n * rank, n).clone() for dim in (0, 1))
    state = {"x": ShardedTensor(rows, full.shape, [((n * rank, 0), ())])}
    part = ShardedTensor(torch.zeros_like(columns), full.shape, [((0, n * rank), ())])
    checkpoints = Checkpoints(Path(folder[0]))
    checkpoints.save(1, state, {})  # the first save allocates buffers
    checkpoints.load(checkpoints.newest(), {"x": part})
    assert torch.equal(part.local, columns)
    for name, save in {
        "save": lambda: checkpoints.save(2, state, {}),
        "save, async_staging": lambda: checkpoints.save(3, state, {}, async_staging=True),
        "torch.save": lambda: torch.save(rows, f"{folder[0]}/{rank}"),
    }.items():
        dist.barrier()
        start = time.perf_counter()
        save()
        ms = 1e3 * (time.perf_counter() - start)
        checkpoints.wait()
        if rank == 0:
            print(f"{name:>20}{ms:>8.1f} ms for {full.nbytes / 1e6:.0f} MB on {world} ranks")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
