"""KV blocks that outlive their request, their process and the block pool: host memory, then disk.

A turn of a conversation starts with all tokens of the turns before it. Their KV was computed once,
but the pool has evicted it or the process has ended, so it is computed again: most of the tokens
that a chat service prefills (AttentionStore, arXiv:2403.19708, section 2.3). KVStore keeps full
blocks in host memory and in files of a folder:

    keys        a block is found by the hash of the block before it and of its own tokens; before
                the first one are the hashes of the model's weights and of the adapter, dtype,
                layout and block size. So any request, process or replica finds a prefix (MemServe,
                arXiv:2406.17565; LMCache, arXiv:2510.09665), and none that of other weights.
    tiers       blocks are copied to host memory when their sequence ends or is preempted, before
                the pool can evict them, and a background thread writes them to disk. What is read
                from disk is in host memory again.
    preloading  a thread copies layer i into the cache while layer i - 1 computes: `gate` makes each
                layer's attend wait for its own blocks only (AttentionStore, 3.2.1). On a GPU the
                copies have a stream of their own.
    eviction    least recently used first, except that blocks which waiting requests need are
                prefetched from disk, and evicted last, the end of the queue first (3.3).

AttentionStore stores keys before RoPE, so that KV survives when the start of a conversation is
dropped (3.4). Here keys are stored as they are used, rotated by the position that their hash
implies, and serving/prompt_cache.py rotates them by the difference where there is one. So where
nothing was dropped a loaded key is the computed one bit for bit, which it would not be after a
rotation in bf16; a dropped start adds one rounding. KV that attended to dropped tokens is exact in
the first layer and an approximation above: `lineage` keeps it apart from that of the same tokens.

A file is written under another name and renamed, and has a CRC-32 of key, layer and bytes for each
layer. So a process may be killed at any moment, several may share a folder, and files may be
damaged or deleted: a step that meets such a block runs again without it. There is no fsync: after a
power failure the CRC decides. A full disk leaves blocks in host memory. Trouble is one warning.

A CRC finds damage, not forgery, and KV tells the prompt that it was computed from: who can write to
the folder decides what a model that reads it continues. The folder is made with mode 0700 and its
files with 0600; processes that share it must trust each other.

Cost: copies, and 22 kB per token of TinyLlama. When it loses: where no prompt repeats, or reading
is slower than computing. Hooks: attend, through `gate`; Engine(kv_store=...). Equivalence
(test_all.py): found == computed, whatever was killed, damaged or full. Needs: torch.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import logging
import os
import re
import stat
import tempfile
import threading
import time
import zlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain, product
from pathlib import Path
from typing import IO, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

log = logging.getLogger(__name__)

SUM_BYTES = 4  # of the CRC-32 before each layer's bytes
# a block's file in the folder, and one that is being written
BLOCK_FILE = re.compile(r"([0-9a-f]{2})/\1[0-9a-f]{62}(\.[0-9.]+\.tmp)?")
STALE_SECONDS = 600  # age of a temporary file whose writer was killed


def sha256(*parts: bytes) -> bytes:
    """Of their concatenation."""
    return hashlib.sha256(b"".join(parts)).digest()


def open_regular(path: str | os.PathLike) -> IO[bytes]:
    """A regular file, open for reading. OSError for any other: opening a FIFO waits for its writer,
    reading a device may never end."""
    without_waiting = lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
    file = open(path, "rb", buffering=0, opener=without_waiting)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def content_hash(tensors: Iterable[Tensor]) -> bytes:
    """SHA-256 of dtypes, shapes and all bytes of tensors, on all cores."""

    def one(t: Tensor) -> bytes:
        raw = t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return sha256(f"{t.dtype} {tuple(t.shape)}".encode(), hashlib.sha256(raw).digest())

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return sha256(*pool.map(one, tensors))


@dataclass(frozen=True)
class StoredKV:
    """A prompt's blocks in the store, from number `first_block` on."""

    n: int  # tokens of the prompt up to the end of the last one
    first_block: int
    keys: list[bytes]
    first = 0  # as paged_kv.py's SwappedKV


class LoadError(RuntimeError):
    """A block could not be read: the step that needs it has to be run again, without it."""


class KVStore:
    """KV blocks by content, in host memory and in a folder.

    store = KVStore(folder, 20 * 2**30, hash_of_the_weights)
    store.bind([[pages] for pages in cache.pages], block_size=16)
    store.save(tokens, blocks)                           # when a sequence ends
    if (kv := store.find(tokens)) is not None:           # tomorrow, in another process
        store.load(kv, block_table)
        model(new_tokens, positions, store.gate(attend))
    """

    def __init__(
        self, folder: str | os.PathLike, max_bytes: int, fingerprint: str, host_bytes: int = 2**30
    ):
        """max_bytes of files; each process that writes may exceed it by 1/16. fingerprint: of all
        that KV depends on but tokens, adapter and layout. OSError if there can be no folder."""
        self.folder, self.max_bytes, self.host_bytes = Path(folder), max_bytes, host_bytes
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.fingerprint, self.lineage = fingerprint, b""
        self.host: OrderedDict[bytes, Tensor] = OrderedDict()  # least recently used first
        self.wanted: WeakKeyDictionary[Any, list[bytes]] = WeakKeyDictionary()  # by waiting owner
        self.adapters: WeakKeyDictionary[Any, bytes] = WeakKeyDictionary()  # their hashes
        self.saving: set[bytes] = set()  # copied, but not in `host` yet
        self.unreadable, self.warned = set[bytes](), set[str]()  # files, and kinds of trouble
        self.counts = Counter(kv_store_host_tokens=0, kv_store_disk_tokens=0)  # loaded from there
        self.unscanned: int | None = None  # bytes written since the folder's size was read
        self.lock = threading.RLock()  # of host and wanted
        self.background = ThreadPoolExecutor(1, "kv-store")  # at exit, its work is finished
        self.to_load, self.loading = [], None  # (key, block) of the next call's Load, and this one

    def bind(
        self, layers: Sequence[Sequence[Tensor]], block_size: int, rows: int | None = None
    ) -> None:
        """The cache to copy from and to: of each layer its tensors (parts, heads, blocks,
        block_size, ...): PagedKVCache's pages and scales, or views of a contiguous cache. rows: the
        first parts, which alone are stored, and loaded into all: rows that share a prompt."""
        raw = lambda t: t.view(torch.uint8).flatten(3).movedim(2, 0)
        self.layers = [[*map(raw, tensors)] for tensors in layers]  # (blocks, parts, heads, bytes)
        self.block_size, self.rows = block_size, rows
        nbytes = lambda t: t[:, :rows].shape[1:].numel()  # of a block; a short cache has none
        sizes = [sum(map(nbytes, tensors)) + SUM_BYTES for tensors in self.layers]
        self.offsets = [0, *accumulate(sizes)]  # of the layers in a block's bytes
        dtypes = sorted({str(t.dtype) for t in layers[0]})
        self.root = sha256(f"{self.fingerprint} {block_size} {sizes} {dtypes}".encode())

    def keys(self, tokens: Sequence[int], adapter: Any = None) -> list[bytes]:
        """The key of each full block. adapter: None, or generation/adapters.py's Adapter."""
        own = b""
        if adapter is not None and (own := self.adapters.get(adapter)) is None:
            scale = torch.tensor([adapter.scale])
            own = content_hash([*adapter.weights, adapter.offsets, scale])
            self.adapters[adapter] = own
        key, size, found = sha256(self.root, own, self.lineage), self.block_size, []
        for start in range(0, len(tokens) - size + 1, size):
            key = sha256(key, array("q", tokens[start : start + size]).tobytes())
            found.append(key)
        return found

    # ---- finding and loading ----

    def want(self, owner: Any, tokens: Sequence[int], adapter: Any = None) -> None:
        """A request waits: move its blocks from disk to host memory, and evict them last, until it
        calls find or is deleted."""
        with self.lock:
            self.wanted[owner] = self.keys(tokens, adapter)
        self._submit(self._prefetch, owner)

    def find(
        self, tokens: Sequence[int], first: int = 0, adapter: Any = None, owner: Any = None
    ) -> StoredKV | None:
        """The longest run of stored blocks of a prompt from block `first` on."""
        with self.lock:
            keys = self.wanted.pop(owner, None) if owner is not None else None
        keys, end = self.keys(tokens, adapter) if keys is None else keys, first
        limit = min(len(keys), len(tokens) // self.block_size)
        while end < limit and self._has(keys[end]):
            end += 1
        return StoredKV(end * self.block_size, first, keys[first:end]) if end > first else None

    def load(self, kv: StoredKV, block_table: Sequence[int]) -> None:
        """Copy blocks to the cache during the next call of the model, whose attend is `gate`d."""
        self.to_load += zip(kv.keys, block_table[kv.first_block :])

    def gate(self, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The attend hook of a call of the model: waits until its layer's blocks have arrived.
        LoadError if one cannot be read; then call `recover`."""
        if self.to_load:
            self.loading, self.to_load = Load(self, self.to_load), []
        if (load := self.loading) is None:
            return attend

        def gated(spec: Any, *args: Tensor) -> Tensor:
            load.wait(spec.index)
            if spec.index == len(self.layers) - 1:
                self.loading = None
            return attend(spec, *args)

        return gated

    def wait(self) -> Load | None:
        """Load now, without a call of the model. LoadError as in `gate`."""
        self.gate(torch.empty)
        if (load := self.loading) is not None:
            load.wait(len(self.layers) - 1)
            self.loading = None
        return load

    @property
    def busy(self) -> bool:
        """Whether the next call of the model has to be gated."""
        return bool(self.to_load) or self.loading is not None

    def recover(self, error: BaseException) -> bool:
        """After a call of the model that failed: no thread writes to the cache any more. Returns
        whether the call can be repeated, since a block could not be read."""
        if self.loading is not None:
            self.loading.stop()
        self.loading, self.to_load = None, []
        return isinstance(error, LoadError)

    def _has(self, key: bytes) -> bool:
        return key in self.host or (key not in self.unreadable and os.path.exists(self._path(key)))

    def _prefetch(self, owner: Any) -> None:
        for key in self.wanted.get(owner, ()):
            if owner not in self.wanted or not self._has(key):
                return
            if key not in self.host:
                try:
                    self.read(key, data := self.new_block(), range(len(self.layers)))
                except (OSError, LoadError) as e:
                    return self.give_up(key, e)
                self.keep(key, data)

    # ---- saving ----

    def save(self, tokens: Sequence[int], blocks: Sequence[int], adapter: Any = None) -> None:
        """Copy the first blocks of a sequence, which are full, unless they are stored. They are
        written in the background; none are copied while host_bytes of others are not yet."""
        keys = self.keys(tokens[: len(blocks) * self.block_size], adapter)
        new = {k: b for k, b in zip(keys, blocks) if k not in self.saving and not self._has(k)}
        if not new or len(self.saving) * self.offsets[-1] > self.host_bytes:
            return
        try:
            rows, event = self._copy_out([*new.values()])
        except torch.OutOfMemoryError:
            return self.warn("copy", "KV is not kept: no GPU memory for a copy of its blocks")
        self.saving.update(new)
        self._submit(self._save, [*new], rows, event)

    def _copy_out(self, blocks: list[int]) -> tuple[Any, Any]:
        """The bytes of each block, with gaps for the sums; and on a GPU the event that they wait
        for, so that the step does not."""
        device = self.layers[0][0].device
        if device.type != "cuda":  # here one copy for each block is faster than an index
            rows = [self.new_block() for _ in blocks]
            for layer, (row, block) in product(range(len(self.layers)), [*zip(rows, blocks)]):
                for t, part in self.parts(layer, block, row):
                    part.copy_(t[: self.rows])
            return rows, None
        at = torch.tensor(blocks, device=device)
        gap = torch.zeros(len(blocks), SUM_BYTES, dtype=torch.uint8, device=device)
        parts = [[gap, *(t[at, : self.rows].flatten(1) for t in each)] for each in self.layers]
        return torch.cat([*chain(*parts)], 1), torch.cuda.current_stream(device).record_event()

    def new_block(self) -> Tensor:
        return torch.empty(self.offsets[-1], dtype=torch.uint8)

    def parts(self, layer: int, block: int, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """A layer's tensors of a block in the cache, and where they are in a block's bytes."""
        at = self.offsets[layer] + SUM_BYTES
        for t in self.layers[layer]:
            shape = t[block, : self.rows].shape
            yield t[block], data[at : at + shape.numel()].view(shape)
            at += shape.numel()

    def _submit(self, function: Callable[..., None], *args: Any) -> None:
        """Run it in the background; an exception is a warning."""
        self.background.submit(function, *args).add_done_callback(self._warn_of_failure)

    def _warn_of_failure(self, done: Future[None]) -> None:
        if (e := done.exception()) is not None:
            self.warn("background", f"a task in the background failed ({type(e).__name__}: {e})")

    def flush(self) -> None:
        """Wait until all that was saved is written."""
        self.background.submit(int).result()

    def _save(self, keys: list[bytes], rows: Any, event: Any) -> None:
        try:
            if event is not None:
                event.synchronize()
                with torch.cuda.stream(torch.cuda.Stream(rows.device)):
                    rows = [row.clone() for row in rows.cpu()]  # a view would keep all of them
            for key, data in zip(keys, rows):
                for layer, (start, end) in enumerate(zip(self.offsets, self.offsets[1:])):
                    part = data.numpy()[start:end]
                    part[:SUM_BYTES].data[:] = self._sum(key, layer, part[SUM_BYTES:])
                self.keep(key, data)
                self.saving.discard(key)
                self._write(key, data)
        finally:
            self.saving.difference_update(keys)

    def touch(self, blocks: dict[bytes, Tensor]) -> None:
        """These blocks are the most recently used ones."""
        for key, data in blocks.items():
            self.keep(key, data)
            with suppress(OSError):
                os.utime(self._path(key))

    def keep(self, key: bytes, data: Tensor) -> None:
        """Add a block to host memory, and evict others."""
        with self.lock:
            self.host[key] = data
            self.host.move_to_end(key)
            most = self.host_bytes // self.offsets[-1]
            if len(self.host) > most:
                for old in self._least_useful([*self.host])[: len(self.host) - most * 15 // 16]:
                    del self.host[old]

    def _least_useful(self, keys: list[bytes]) -> list[bytes]:
        """Keys, the least recently used first, in the order of eviction: those that no request
        waits for, then those of the last in the queue."""
        with self.lock:
            wanted = dict.fromkeys(chain(*self.wanted.values()))
        here = set(keys)
        last = [key for key in reversed(wanted) if key in here]
        return [key for key in keys if key not in wanted] + last

    # ---- files ----

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return os.path.join(self.folder, name[:2], name)

    @staticmethod
    def _sum(key: bytes, layer: int, part: Any) -> bytes:
        crc = zlib.crc32(part, zlib.crc32(key + layer.to_bytes(4, "little")))
        return crc.to_bytes(SUM_BYTES, "little")

    def read(self, key: bytes, data: Tensor, layers: range) -> None:
        """Read layers of a block from its file. OSError, or LoadError if it is damaged."""
        start, end = self.offsets[layers.start], self.offsets[layers.stop]
        raw = data.numpy()
        with open_regular(self._path(key)) as f:
            f.seek(start)
            if f.readinto(raw[start:end]) != end - start:
                raise LoadError("it is truncated")
        for layer in layers:
            part = raw[self.offsets[layer] : self.offsets[layer + 1]]
            if part[:SUM_BYTES].tobytes() != self._sum(key, layer, part[SUM_BYTES:]):
                raise LoadError("its checksum is wrong")

    def give_up(self, key: bytes, error: Exception) -> None:
        """Delete a block that cannot be read, and look for it no more."""
        self.unreadable.add(key)
        if not isinstance(error, FileNotFoundError):  # another process has evicted it
            self.warn("read", f"{self._path(key)} cannot be read ({error}); it is computed again")
            with suppress(OSError):
                os.unlink(self._path(key))

    def _write(self, key: bytes, data: Tensor) -> None:
        path = self._path(key)
        tmp = f"{path}.{os.getpid()}.{id(self)}.tmp"
        try:
            if self.unscanned is None or self.unscanned > self.max_bytes // 16:
                self._evict()
            with suppress(FileExistsError):
                os.mkdir(os.path.dirname(path), 0o700)
            private = lambda name, flags: os.open(name, flags, 0o600)
            with open(tmp, "xb", opener=private) as f:
                f.write(data.numpy())
            os.replace(tmp, path)
        except OSError as e:
            self.warn("write", f"{self.folder}: KV is kept in host memory only ({e.strerror})")
            with suppress(OSError):
                os.unlink(tmp)
            return
        self.unreadable.discard(key)
        self.unscanned += len(data)

    def _evict(self) -> None:
        """Delete files, the least recently used first, until they have 15/16 of max_bytes; and
        temporary ones whose writer was killed."""
        self.unscanned, found = 0, []
        for path in glob.glob("??/*", root_dir=self.folder):
            if not BLOCK_FILE.fullmatch(path):  # not ours: an editor's or rsync's copy
                continue
            path = os.path.join(self.folder, path)
            with suppress(FileNotFoundError):  # another process has deleted it
                at = os.lstat(path)
                if not path.endswith(".tmp"):
                    found.append((at.st_mtime, at.st_size, path))
                elif time.time() - at.st_mtime > STALE_SECONDS:
                    os.unlink(path)
        files = {bytes.fromhex(Path(path).name): (size, path) for _, size, path in sorted(found)}
        used = sum(size for size, _ in files.values())
        if used <= self.max_bytes:
            return
        for key in self._least_useful([*files]):
            if used <= self.max_bytes * 15 // 16:
                break
            with suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(files[key][1])
            used -= files[key][0]

    def warn(self, kind: str, text: str) -> None:
        """The first of its kind."""
        if kind not in self.warned:
            self.warned.add(kind)
            log.warning("KV store: %s", text)


class Load:
    """Blocks on their way into the cache, layer by layer, in a thread of their own. to_load: of
    each its key, and its number in the cache."""

    def __init__(self, store: KVStore, to_load: list[tuple[bytes, int]]):
        self.store, (self.keys, self.blocks) = store, zip(*to_load)
        self.data = {key: store.host.get(key) for key in self.keys}
        self.on_disk = [key for key, data in self.data.items() if data is None]
        self.data |= {key: store.new_block() for key in self.on_disk}
        self.arrived = [threading.Event() for _ in store.layers]
        self.error: Exception | None = None
        self.stopped, device = False, store.layers[0][0].device
        self.stream, self.events = None, [None] * len(store.layers)
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self.stream.wait_stream(torch.cuda.current_stream(device))  # the blocks' last readers
        self.at = torch.tensor(self.blocks, device=device)
        self.thread = threading.Thread(target=self._run, name="kv-load", daemon=True)
        self.thread.start()

    def wait(self, layer: int) -> None:
        """Until a layer has arrived; on a GPU the current stream waits. With the last one the
        blocks are counted."""
        if layer < len(self.arrived):
            self.arrived[layer].wait()
            if self.error is not None:
                raise self.error
            if self.events[layer] is not None:
                torch.cuda.current_stream().wait_event(self.events[layer])
        if layer == len(self.arrived) - 1:
            n, size = len(self.on_disk), self.store.block_size
            n_host = len(self.keys) - n
            counted = dict(kv_store_disk_tokens=n * size, kv_store_host_tokens=n_host * size)
            self.store.counts.update(counted)

    def stop(self) -> None:
        """End the thread and its copies; layers that have not arrived are not written."""
        self.stopped = True
        self.thread.join()
        if self.stream is not None:
            self.stream.synchronize()

    def _run(self) -> None:
        key, store = b"", self.store
        try:
            with torch.inference_mode(), torch.cuda.stream(self.stream):
                for layer, arrived in enumerate(self.arrived):
                    for key in self.on_disk:
                        if self.stopped:
                            return
                        store.read(key, self.data[key], range(layer, layer + 1))
                    self._copy(layer)
                    arrived.set()
            store.touch(self.data)
        except (OSError, LoadError) as e:
            store.give_up(key, e)
            self.error = LoadError(str(e))
        except Exception as e:  # raised where the layer is waited for
            self.error = e
        finally:
            for arrived in self.arrived:
                arrived.set()

    def _copy(self, layer: int) -> None:
        """Write a layer's bytes to the blocks of the cache."""
        store = self.store
        if self.stream is None:
            for key, block in zip(self.keys, self.blocks):
                for t, part in store.parts(layer, block, self.data[key]):
                    t.copy_(part)
            return
        start, end = store.offsets[layer] + SUM_BYTES, store.offsets[layer + 1]
        rows = torch.stack([self.data[key][start:end] for key in self.keys]).pin_memory()
        rows, tensors = rows.to(self.at.device, non_blocking=True), store.layers[layer]
        sizes = [t[0, : store.rows].numel() for t in tensors]
        for t, new in zip(tensors, rows.split(sizes, 1)):
            new = new.unflatten(1, (-1, *t.shape[2:]))
            t.index_copy_(0, self.at, new.expand(-1, *t.shape[1:]))
        self.events[layer] = self.stream.record_event()


def main() -> None:
    """A second store finds the blocks that the first one saved; the time of each tier."""
    L, blocks, size, times, now = 22, 125, 16, {}, time.perf_counter
    new = lambda: [[torch.zeros(2, 4, blocks, size, 64, dtype=torch.bfloat16)] for _ in range(L)]
    layers, tokens = new(), range(blocks * size)
    megabytes = sum(pages.normal_().nbytes for (pages,) in layers) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        first, second = (KVStore(folder, 2**30, "weights") for _ in range(2))
        first.bind(layers, size)
        start = now()
        first.save(tokens, range(blocks))
        times["save, in the step"] = now() - start
        first.flush()
        times["save, to disk"] = now() - start
        for tier in ("disk", "host memory"):
            second.bind(loaded := new(), size)
            start = now()
            second.load(second.find(tokens), range(blocks))
            load = second.wait()
            times[f"load from {tier}"] = now() - start
            load.thread.join()  # it moves what was on disk to host memory
            assert all(torch.equal(a, b) for (a,), (b,) in zip(layers, loaded))
    print(f"{len(tokens)} tokens of TinyLlama's shape, {megabytes:.0f} MB      ms  GB/s")
    for name, seconds in times.items():
        print(f"{name:39} {1e3 * seconds:9.1f} {megabytes / 1e3 / seconds:5.1f}")


if __name__ == "__main__":
    main()
