"""Failure recovery: in-memory checkpoints, loss-spike guard, the store of a restarted run.

Llama 3's run on 16,384 GPUs was interrupted 419 times in 54 days (arXiv:2407.21783, 3.3.4). What is
lost each time is mostly time: back to the last checkpoint on disk, up to the timeout of a
collective, until somebody looks at the loss. Each part shortens one of these:

    MemoryCheckpoint   Copies of the training state in the memory of two machines, every few steps
        (GEMINI, SOSP 2023). `put` saves this rank's tensors to a file in tmpfs, which outlives the
        process, and sends a copy to its partner, rank (r + P/2) % P: for even P these are the pairs
        of GEMINI's group placement, few of which are lost when two machines are. After a restart
        `newest` and `get` find the copies, wherever ranks are placed now, and transfer them. `dump`
        is `put` without the partner, for a healthy rank whose collective has failed: if a
        data-parallel replica survives, not even the current step is lost ("just-in-time"
        checkpoints, Gupta et al., EuroSys 2024).
    Guard        Decides to skip a batch whose loss or gradient is not finite, or whose loss is a
        spike compared with those before, as PaLM did by hand (arXiv:2204.02311, 5.1).
    fresh_store  A store for a restarted run: torchrun's still has the addresses of dead processes.

Cost: host memory for 6 states (two steps and the one being written, each twice), and with a GPU one
more, pinned; training stops during `put` (see the table). When it loses: a power cut, or the loss
of two machines that are partners, takes both copies, so checkpoints on disk remain necessary; a
restart with another world size must load those. watchdog.py finds hangs and slow ranks.
Hooks: none, the training loop calls all of it. Equivalence (test_all.py): what `get` returns is bit
for bit what was put, with any one rank's memory lost; a resumed guard decides as an uninterrupted
one. Needs: torch, Linux. `torchrun --nproc-per-node 4 training/recovery.py` checks MemoryCheckpoint
and prints a table.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import stat
import sys
import tempfile
import time
import uuid
import weakref
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None  # None: all ranks


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --------------------------------------------------------------------------------------------------
# MemoryCheckpoint
# --------------------------------------------------------------------------------------------------

CHUNK = 32 * 2**20  # bytes per message
# restart generation, step, owner, holder
COPY_NAME = re.compile(r"(\d+)-(\d{8,})-\d+-\d+\.(pt|tmp)")
# restart generation, step, key, file name, bytes
CopyInfo = tuple[int, int, str, str, int]
Plan = list[tuple[int, str, int]]  # per rank: (rank that has its state, file name, bytes)


def _local(t: Tensor) -> Tensor:
    return (t.to_local() if hasattr(t, "to_local") else t).detach()  # a DTensor's local shard


def _pinned_like(tensors: Mapping[str, Tensor], owner: Any) -> dict[str, Tensor]:
    """Host tensors, in one block of memory per dtype. It is pinned in place until `owner` is freed:
    torch's pinned allocator rounds sizes up to a power of two."""
    found, cudart = {}, torch.cuda.cudart()
    for dtype in {t.dtype for t in tensors.values()}:
        same = {name: t for name, t in tensors.items() if t.dtype == dtype}
        block = torch.empty(sum(t.numel() for t in same.values()), dtype=dtype)
        if block.nbytes:
            torch.cuda.check_error(int(cudart.cudaHostRegister(block.data_ptr(), block.nbytes, 0)))
            weakref.finalize(owner, cudart.cudaHostUnregister, block.data_ptr())
        parts = block.split([t.numel() for t in same.values()])
        found |= {name: part.view(t.shape) for (name, t), part in zip(same.items(), parts)}
    return found


def _save(
    path: Path, header: dict, tensors: Mapping[str, Tensor], pinned: Mapping[str, Tensor] | None
) -> int:
    """torch.save((header, tensors on the CPU)), atomically; returns the bytes of the file.

    Copies from a GPU run on a side stream, into `pinned`, after the work queued on the current
    stream. None: at once, into other memory, as pinning waits for the GPU: the current stream may
    be blocked by a collective that never ends, and then no update queued behind it has run, so that
    the state is still that of the last step.
    """
    local, side = {name: _local(t) for name, t in tensors.items()}, None
    if gpu := next((t.device for t in local.values() if t.is_cuda), None):
        side = torch.cuda.Stream(gpu)
        if pinned is not None:
            side.wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.stream(side):
        for name, t in local.items():
            if pinned and name in pinned:
                pinned[name].copy_(t, non_blocking=True)
                local[name] = pinned[name]
            elif not t.is_cpu or t.untyped_storage().nbytes() > t.nbytes:
                # a view would save its whole storage
                local[name] = t.to("cpu", copy=True)
    if side is not None:
        side.synchronize()
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save((header, local), file)
    except RuntimeError as e:  # of the incomplete archive, which hides the OSError
        raise e.__context__ or e from None
    os.replace(temporary, path)
    return path.stat().st_size


def _load(path: Path, verify: bool = False) -> tuple[dict, dict[str, Tensor]]:
    """(header, memory-mapped tensors) of a file; ValueError if it is corrupt, by the CRC-32 that
    torch.save's zip archive has of the header and, with verify, of the tensors."""
    try:
        with zipfile.ZipFile(path) as archive:
            _check(not verify or archive.testzip() is None, "wrong CRC-32")
            archive.read(next(n for n in archive.namelist() if n.endswith("/data.pkl")))
        return torch.load(path, mmap=True, weights_only=True)
    except (OSError, zipfile.BadZipFile, StopIteration, ValueError) as e:
        raise ValueError(f"{path} is not an intact memory checkpoint: {e}") from None


def make_private_folder(folder: Path) -> None:
    """Make a folder that no other user can read or write. OSError if there is one that another
    user has made or could write to: its name can be guessed, and /dev/shm is writable by all."""
    with suppress(FileExistsError):  # a file, or a link that leads nowhere: refused below
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    private = found.st_uid == os.getuid() and not found.st_mode & 0o022
    if not (stat.S_ISDIR(found.st_mode) and private):
        raise OSError(
            f"{folder}: must be a folder (no link) of this user that no other can write to, or "
            "memory checkpoints could be replaced; remove it, or name another with --set "
            "memory_checkpoint_dir=DIR"
        )
    folder.chmod(0o700)


def _allocate(path: Path, size: int) -> None:
    """Create a file of `size` bytes. OSError if there is too little space, where a write to a
    mapped file in a full tmpfs kills the process with SIGBUS."""
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def _chunks(path: Path | None) -> Sequence[Tensor]:
    """A file's bytes, memory-mapped, as messages."""
    if path is None:
        return ()
    size = path.stat().st_size
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8).split(CHUNK)


def _choose_copies(
    keys: Sequence[str], copies_by_rank: Sequence[list[CopyInfo]], corrupt: set[tuple[int, str]]
) -> tuple[int, int, Plan] | None:
    """(restart generation, step, plan) of the newest state of which every key has a copy of the
    same generation and step."""
    saved = {copy[:2] for copies in copies_by_rank for copy in copies}
    for generation, step in sorted(saved, reverse=True):
        holders: dict[str, dict[int, tuple[int, str, int]]] = {}
        for rank, copies in enumerate(copies_by_rank):
            for *version, key, name, size in copies:
                if version == [generation, step] and (rank, name) not in corrupt:
                    holders.setdefault(key, {}).setdefault(rank, (rank, name, size))
        if set(keys) <= holders.keys():
            own = [holders[key].get(rank) for rank, key in enumerate(keys)]
            # ranks without an own copy read from the holders in turn
            others = [list(holders[key].values()) for key in keys]
            plan = [o or h[rank % len(h)] for rank, (o, h) in enumerate(zip(own, others))]
            return generation, step, plan
    return None


class MemoryCheckpoint:
    """This rank's state in the memory of two machines. Construction, put, newest and get are
    collective over `group`, which must support CPU tensors (gloo); dump is not collective.

    folder: in a tmpfs of this machine (/dev/shm/<this run>); ranks of a machine may share it. It
    must belong to this user alone: OSError on all ranks if it does not on one.
    key: identifies the state: ranks with equal keys have equal state, as data-parallel replicas do.

    Each restart of a run is a new, higher restart generation: copies of a step that is repeated are
    never mixed with those of an earlier generation.
    """

    def __init__(self, folder: Path | str, key: str, group: Group = None) -> None:
        distributed = dist.is_initialized()
        self.rank = dist.get_rank(group) if distributed else 0
        self.world = dist.get_world_size(group) if distributed else 1
        self.folder, self.key, self.group = Path(folder), key, group
        self._run_on_all_or_raise(lambda: make_private_folder(self.folder))
        for path in self._copies("tmp"):  # left by a killed process; no rank writes yet
            path.unlink(missing_ok=True)
        generations = [generation for generation, _ in self._list_saved()]
        self.restart_generation = max(self._gather(max([*generations, int(time.time())]))) + 1
        self._found: tuple[int, int, Plan] | None = None
        self._pinned: dict[str, Tensor] = {}  # host copies of tensors on a GPU, for put

    def put(self, step: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """Store `tensors` and `metadata` (JSON) as the state after `step`, here and at the partner.
        OSError on all ranks if one has too little memory; the previous copies are kept."""
        partner, source = ((self.rank + i * (self.world // 2)) % self.world for i in (1, -1))
        own, path = self._path(step, self.rank), self._path(step, source)
        temporary = path.with_suffix(".tmp")
        try:
            sizes = self._run_on_all_or_raise(lambda: self._save(step, tensors, metadata))
            if source != self.rank:
                self._run_on_all_or_raise(lambda: _allocate(temporary, sizes[source]))
                self._exchange(own, partner, temporary, source)
                os.replace(temporary, path)
        except OSError:
            for left in (own, own.with_suffix(".tmp"), temporary):
                left.unlink(missing_ok=True)
            raise
        # two steps are kept, because ranks may be one `put` apart at a failure
        for generation, old in self._list_saved()[2:]:
            for path in self.folder.glob(f"{generation}-{old:08d}-*.pt"):
                path.unlink(missing_ok=True)

    def dump(self, step: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """`put` without the partner and without communication: for a rank whose collective has
        failed or hangs. May be called in any thread while nothing writes to `tensors`, so not
        during the optimizer step."""
        self._save(step, tensors, metadata, in_order=False)

    def newest(self) -> int | None:
        """The newest step of which an intact copy exists for every rank's key, or None: the keys or
        the world size differ, or two partners were lost together."""
        copies: list[CopyInfo] = []
        for path in sorted(self._copies()):
            header = self._header(path)
            if header is not None and header["world"] == self.world:
                version = header["generation"], header["step"]
                copies.append((*version, header["key"], path.name, path.stat().st_size))
        keys, copies_by_rank = zip(*self._gather((self.key, copies)))
        corrupt: set[tuple[int, str]] = set()
        while found := _choose_copies(keys, copies_by_rank, corrupt):
            own = {name for holder, name, _ in found[2] if holder == self.rank}
            bad = [(self.rank, n) for n in own if not self._header(self.folder / n, verify=True)]
            bad = [file for part in self._gather(bad) for file in part]
            if not bad:
                break
            corrupt.update(bad)
        self._found = found
        return found and found[1]

    def get(self, step: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Copy this rank's state after `step`, which newest() has returned, into `tensors`; returns
        its metadata. ValueError on all ranks if a name, shape or dtype differs from the copy's."""
        generation, found, plan = self._found or (0, None, [])
        _check(found == step, f"step {step} is not the one newest() returned; call it first")
        header, stored = _load(self._fetch(generation, step, plan))
        given, error = {name: _local(t) for name, t in tensors.items()}, None
        kind = lambda t: "nothing" if t is None else f"{t.dtype} {tuple(t.shape)}"
        for name in given.keys() | stored.keys():
            copy, own = kind(stored.get(name)), kind(given.get(name))
            if copy != own:
                error = f"{name}: the copy has {copy}, the model {own}"
        errors = [error for error in self._gather(error) if error]
        _check(not errors, f"step {step} does not match the model: {errors[:1]}")
        for name, t in stored.items():
            given[name].copy_(t)
        return json.loads(header["metadata"])

    def clear(self) -> None:
        """Delete all copies: at the end of a run, because tmpfs uses memory, and before a run that
        starts from an older state on purpose."""
        for path in self._copies():
            path.unlink(missing_ok=True)

    def _save(self, step: int, tensors: Mapping, metadata: Mapping, in_order: bool = True) -> int:
        if in_order and not self._pinned:
            on_gpu = {name: _local(t) for name, t in tensors.items() if _local(t).is_cuda}
            self._pinned = _pinned_like(on_gpu, self) if on_gpu else {}
        pinned = self._pinned if in_order else None
        header = {"generation": self.restart_generation, "step": step, "key": self.key}
        header |= {"world": self.world, "metadata": json.dumps(metadata)}
        return _save(self._path(step, self.rank), header, tensors, pinned)

    def _header(self, path: Path, verify: bool = False) -> dict | None:
        """A file's header; None, with a message on stderr, if it is corrupt."""
        try:
            return _load(path, verify)[0]
        except ValueError as error:
            print(f"recovery.py: ignored: {error}", file=sys.stderr, flush=True)
            return None

    def _fetch(self, generation: int, step: int, plan: Plan) -> Path:
        """Transfer all copies that are on other ranks; returns the path of this rank's."""
        holder, name, size = plan[self.rank]
        path, remote = self.folder / name, holder != self.rank
        if remote:
            path = self.folder / f"{generation}-{step:08d}-{self.rank}-{self.rank}.pt"
        temporary = path.with_suffix(".tmp")
        self._run_on_all_or_raise(lambda: _allocate(temporary, size) if remote else None)
        for rank, (source, name, _) in enumerate(plan):
            if self.rank == source != rank:
                self._exchange(self.folder / name, rank, None, rank)
            elif self.rank == rank != source:
                self._exchange(None, source, temporary, source)
                os.replace(temporary, path)
        return path

    def _exchange(self, out: Path | None, target: int, into: Path | None, source: int) -> None:
        """Send file `out` to target and receive source's file in `into`, chunk by chunk."""
        for sent, received in zip_longest(_chunks(out), _chunks(into)):
            works = []
            if sent is not None:
                works.append(dist.isend(sent, group_dst=target, group=self.group))
            if received is not None:
                works.append(dist.irecv(received, group_src=source, group=self.group))
            for work in works:
                work.wait()

    def _path(self, step: int, owner: int) -> Path:
        return self.folder / f"{self.restart_generation}-{step:08d}-{owner}-{self.rank}.pt"

    def _copies(self, suffix: str = "pt") -> list[Path]:
        """The copies in the folder, which may have other files too."""
        return [p for p in self.folder.glob(f"*.{suffix}") if COPY_NAME.fullmatch(p.name)]

    def _list_saved(self) -> list[tuple[int, int]]:
        """(restart generation, step) of the copies in the folder, newest first."""
        names = [path.name.split("-")[:2] for path in self._copies()]
        return sorted({(int(generation), int(step)) for generation, step in names}, reverse=True)

    def _gather(self, value: Any) -> list[Any]:
        if self.world == 1:
            return [value]
        dist.all_gather_object(values := [None] * self.world, value, group=self.group)
        return values

    def _run_on_all_or_raise(self, run: Callable[[], Any]) -> list[Any]:
        """Every rank's run(); OSError on all ranks if it raised one on any."""
        value, failure = None, None
        try:
            value = run()
        except OSError as error:
            failure = f"rank {self.rank}: {error}"
        values, failures = zip(*self._gather((value, failure)))
        if any(failures):
            raise OSError("; ".join(failure for failure in failures if failure))
        return list(values)


# --------------------------------------------------------------------------------------------------
# Guard
# --------------------------------------------------------------------------------------------------


class Diverged(ValueError):
    """Too many batches were skipped: the weights, the data or the learning rate must change."""


class Guard:
    """Decides for each batch whether to skip it, from the loss and gradient norm over all ranks, so
    that all ranks decide alike. A function of the sequence of these numbers and nothing else.

    The mean is an exponential moving average over about 20 batches. The standard deviation is that
    of an individuals chart (Shewhart): the mean absolute difference of successive losses / 1.128,
    which measures the noise between batches and hardly the slope of the curve; at least 2% of the
    mean, so that slow waves are no spikes. A loss is a spike if it exceeds the mean by more than
    `spike_sigma` deviations; skipped batches change neither statistic. Diverged is raised at the
    `max_skipped`-th skip in a row, or when 3 times as many of the last 100 batches were skipped, as
    with data that raises the loss for good. The first `warmup` batches must only be finite.
    """

    MEAN, NOISE, FLOOR, RECENT = 1 / 20, 1 / 50, 0.02, 100

    def __init__(self, max_skipped: int = 10, spike_sigma: float = 6.0, warmup: int = 20) -> None:
        valid = max_skipped >= 1 and spike_sigma > 0 and warmup >= 2
        _check(valid, "max_skipped must be >= 1, spike_sigma > 0, warmup >= 2")
        self.max_skipped, self.spike_sigma, self.warmup = max_skipped, spike_sigma, warmup
        self.state: dict[str, Any] = {
            "judged": 0, "taken": 0, "mean": 0.0, "noise": 0.0, "last": 0.0, "skipped": [],
        }  # fmt: skip

    def judge(self, loss: float, grad_norm: float) -> str | None:
        """The reason to skip this batch, or None; Diverged (a ValueError) after too many skips."""
        s = self.state
        s["judged"] += 1
        why = self._why(loss, grad_norm)
        if why is None:
            self._update_statistics(loss)
            return None
        s["skipped"] = [i for i in s["skipped"] if i > s["judged"] - self.RECENT] + [s["judged"]]
        row = s["skipped"][-self.max_skipped :]
        in_row = len(row) == self.max_skipped and row[-1] - row[0] == self.max_skipped - 1
        if in_row or len(s["skipped"]) >= 3 * self.max_skipped:
            of_100 = f"{len(s['skipped'])} of the last 100"
            many = f"{self.max_skipped} in a row" if in_row else of_100
            raise Diverged(f"{many} of the batches had to be skipped, this one because {why}; "
                           "use an older checkpoint or a lower learning rate")  # fmt: skip
        return why

    def _why(self, loss: float, grad_norm: float) -> str | None:
        s = self.state
        for name, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not math.isfinite(value):
                return f"the {name} is {value}"
        noise = max(s["noise"], self.FLOOR * abs(s["mean"]))
        if s["taken"] < self.warmup or not noise or loss <= s["mean"] + self.spike_sigma * noise:
            return None
        sigma = (loss - s["mean"]) / noise
        return f"the loss {loss:.4g} is {sigma:.1f} deviations above its mean {s['mean']:.4g}"

    def _update_statistics(self, loss: float) -> None:
        s = self.state
        if s["taken"]:
            step = abs(loss - s["last"]) / 1.128
            s["noise"] += (step - s["noise"]) * max(self.NOISE, 1 / s["taken"])
        s["taken"] += 1
        s["mean"] += (loss - s["mean"]) * max(self.MEAN, 1 / s["taken"])
        s["last"] = loss

    def state_dict(self) -> dict[str, Any]:
        """Numbers and a list of numbers, which JSON stores exactly."""
        return self.state | {"skipped": list(self.state["skipped"])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _check(state.keys() == self.state.keys(), f"a guard's state has {sorted(self.state)}")
        self.state = dict(state) | {"skipped": list(state["skipped"])}


# --------------------------------------------------------------------------------------------------
# Signals; the store of a restarted run
# --------------------------------------------------------------------------------------------------


def stop_on_signals() -> list[int]:
    """A list to which the first SIGTERM or Ctrl-C appends its number; a second one acts at once."""
    caught: list[int] = []

    def note(number: int, frame: Any) -> None:
        caught.append(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    return caught


def fresh_store(store: dist.Store, rank: int, ranks: int) -> dist.Store:
    """`store` under a new prefix, without the keys of earlier starts; call it on every rank.

    torchrun keeps one store over restarts, with the addresses of processes that have ended: a rank
    that reads a key before its peer has written it connects to a dead process, or hangs (pytorch
    issue 135712). The restart count does not identify a start, because each machine's agent counts
    its own. So rank 0 generates a name for this start and answers every request for it; requests
    are numbered, and a number is never reused, so that no answer to an earlier start is read. (All
    processes of the earlier start must have ended, which torchrun ensures.)

    After the store's timeout rank 0 raises TimeoutError, other ranks what the store raises.
    """
    if rank:
        name = store.get(f"name {store.add('asked', 1)}").decode()
        store.add(f"{name} heard", 1)
        return dist.PrefixStore(name, store)
    name, answered = uuid.uuid4().hex, 0
    until = time.monotonic() + store.timeout.total_seconds()
    while (heard := store.add(f"{name} heard", 0)) < ranks - 1:
        if time.monotonic() > until:
            raise TimeoutError(f"{heard + 1} of {ranks} ranks joined within {store.timeout}")
        asked = store.add("asked", 0)
        for number in range(answered + 1, asked + 1):
            store.set(f"name {number}", name)
        answered = asked
        time.sleep(0.01)
    return dist.PrefixStore(name, store)


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def main() -> None:
    """The loss of any one rank's memory loses nothing; milliseconds of put and get."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    if "RANK" not in os.environ:
        raise SystemExit("run: torchrun --standalone --nproc-per-node 4 training/recovery.py")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    root = [tempfile.mkdtemp(dir="/dev/shm") if rank == 0 else None]
    dist.broadcast_object_list(root)
    folder, key, state = Path(root[0], str(rank)), f"shard {rank}", {"w": torch.randn(25 * 2**20)}
    for lost in range(world):
        MemoryCheckpoint(folder, key).put(3, state, {"rank": rank})
        memory, into = MemoryCheckpoint(folder, key), {"w": torch.zeros(25 * 2**20)}
        if rank == lost:
            memory.clear()
        assert memory.newest() == 3 and memory.get(3, into) == {"rank": rank}
        assert torch.equal(into["w"], state["w"])
    if rank == 0:
        print(f"checked; {world} ranks, gloo, 100 MiB of state each: ms")
    for name, run in {
        "dump, own memory only": lambda: memory.dump(4, state, {}),
        "put, with the partner": lambda: memory.put(4, state, {}),
        "newest": memory.newest,
        "get, own copy": lambda: memory.get(4, into),
        "torch.save to tmpfs": lambda: torch.save(state, folder / "peer"),
    }.items():
        dist.barrier()
        ms = 1e3 * Timer("run()", globals={"run": run}).timeit(3).median  # as often on all
        if rank == 0:
            print(f"{name:>36}{ms:>9.1f}")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(root[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
