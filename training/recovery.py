"""recovery.py: to lose a step, not an hour, when a machine, a batch or a collective fails.

16,384 GPUs were interrupted 419 times in the 54 days of Llama 3 (arXiv:2407.21783, 3.3.4), and what
is lost is mostly time: back to the last checkpoint on disk, up to the time-out of a collective,
until somebody looks at the loss. Four answers, each to one of these:

    Mirror   Copies of the training state in the memory of two machines, every few steps (GEMINI,
             SOSP 2023): `put` writes this rank's tensors to a file in tmpfs, which outlives the
             process, and another into that of rank (r + P/2) % P, its partner: an even P gives the
             pairs of GEMINI's group placement, of which few are lost when two machines are.
             `newest` and `get` find out who holds what after a restart, however ranks are placed
             then, and move it. `dump` is `put` without the partner, for a healthy rank whose
             collective has failed: where data-parallel replicas remain, not even the step under
             way is lost ("just-in-time" checkpoints, Gupta et al., EuroSys 2024).
    Guard    Says that a batch is to be skipped: its loss or gradient is not finite, or its loss
             jumps out of the noise of those before, as PaLM did by hand (arXiv:2204.02311, 5.1).
    Watch    A thread that knows where the loop stands. When a step takes too long it compares the
             ranks and names the guilty: whose heartbeat has stopped, who is not waiting for the
             others, who is furthest behind; with the line of code at which each of them stands.
    stragglers   And from the same samples: how long each rank waits, and for whom.

And `fresh_store`, for the start after: torchrun's store still has the addresses of the dead.

Cost: host memory for `keep` + 1 states twice, and the time of `put` (the table), in which training
stands still; 100 looks at a stack per second, 0.4% of a core. When they lose: a power cut,
or two machines that are partners, takes both copies, so the disk stays the last resort; a world of
another size resumes from the disk; a slow step is no hang, so the time-out must exceed the longest.
Hooks: none, all are called by the training loop. Equivalence (test_all.py): what comes back is what
was put, bit for bit, with any one rank's memory lost; a resumed guard judges as one that went on.
Needs: torch, Linux. `python training/recovery.py` starts 4 processes, checks itself and prints a table
(--check: none).
"""

from __future__ import annotations

import itertools
import json
import linecache
import math
import mmap
import os
import queue
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None  # None: all ranks


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --------------------------------------------------------------------------------------------------
# Mirror: one file per state
# --------------------------------------------------------------------------------------------------

PREFIX = struct.Struct("<8sIIQ")  # magic, CRC-32 of the tensors and of the header, its length
MAGIC = b"mirror 1"
LINE = 64  # bytes: tensors begin at multiples, which suits every dtype
CHUNK = 32 * 2**20  # bytes of one message


def _aligned(n: int) -> int:
    return -(-n // LINE) * LINE


def _local(t: Tensor) -> Tensor:
    return (t.to_local() if hasattr(t, "to_local") else t).detach()  # a DTensor's part


def _table(tensors: Mapping[str, Tensor]) -> dict[str, list]:
    """name -> [dtype, shape]"""
    mine = {name: _local(t) for name, t in tensors.items()}
    return {name: [str(t.dtype).removeprefix("torch."), [*t.shape]] for name, t in mine.items()}


def _mapped(path: Path, size: int) -> mmap.mmap:
    """A fresh file of `size` zeros, in memory. Its space is taken at once: to write through a map
    into a full tmpfs would be SIGBUS, the end of the process, where this is an OSError."""
    try:
        with open(path, "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _read(path: Path) -> tuple[dict, mmap.mmap]:
    """Header and the whole file; ValueError if it is no mirror's or has lost its end."""
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    magic, _, crc, n = PREFIX.unpack(data[: PREFIX.size].ljust(PREFIX.size, b"\0"))
    text = data[PREFIX.size : PREFIX.size + n]
    _check(magic == MAGIC and zlib.crc32(text) == crc, "no file of Mirror, or a damaged header")
    header = json.loads(text)
    size = _aligned(PREFIX.size + n) + header["bytes"]
    _check(len(data) == size, f"{len(data)} bytes of {size}")
    return header, data


def _header(path: Path, whole: bool) -> dict | None:
    """A file's header; None, said loudly, if it is bad, or if `whole` and its tensors are."""
    try:
        header, data = _read(path)
        crc = zlib.crc32(memoryview(data)[len(data) - header["bytes"] :]) if whole else 0
        _check(not whole or crc == PREFIX.unpack_from(data)[1], "wrong checksum")
        return header
    except (OSError, ValueError) as error:
        print(f"recovery.py: {path} is refused: {error}", file=sys.stderr, flush=True)
        return None


def _views(header: dict, data: mmap.mmap) -> dict[str, Tensor]:
    """The tensors of a file, where they lie."""
    memory, views, at = torch.frombuffer(data, dtype=torch.uint8), {}, len(data) - header["bytes"]
    for name, (dtype, shape) in header["tensors"].items():
        dtype = getattr(torch, dtype)
        n = math.prod(shape) * dtype.itemsize
        views[name] = memory[at : at + n].view(dtype).view(shape)
        at += _aligned(n)
    return views


def _write(path: Path, header: dict, tensors: Mapping[str, Tensor], ordered: bool) -> mmap.mmap:
    """The file of `tensors`, seen under its name when it is whole; returns its bytes.

    Copies from a GPU run on a stream of their own. `ordered`: after what the current stream has to
    do. If not, at once, since that one may wait for a collective that never ends; then what the
    step under way has queued behind it has not run either, and the state is the last step's.
    """
    local = {name: _local(t) for name, t in tensors.items()}
    n = sum(_aligned(t.nbytes) for t in local.values())
    header = header | {"tensors": _table(tensors), "bytes": n}
    text = json.dumps(header).encode()
    start = _aligned(PREFIX.size + len(text))
    data = _mapped(temporary := path.with_suffix(".tmp"), start + n)
    gpu, side = next((t.device for t in local.values() if t.is_cuda), None), None
    if gpu is not None:
        side = torch.cuda.Stream(gpu)
        if ordered:
            side.wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.stream(side):
        for name, view in _views(header, data).items():
            view.copy_(local[name])
    crc = zlib.crc32(memoryview(data)[start:])
    data[: PREFIX.size] = PREFIX.pack(MAGIC, crc, zlib.crc32(text), len(text))
    data[PREFIX.size : PREFIX.size + len(text)] = text
    os.replace(temporary, path)
    return data


def _chunks(data: mmap.mmap | bytes) -> Sequence[Tensor]:
    return torch.frombuffer(data, dtype=torch.uint8).split(CHUNK) if data else ()


# --------------------------------------------------------------------------------------------------
# Mirror: who holds what
# --------------------------------------------------------------------------------------------------

Copy = tuple[int, int, str, str, int]  # life, step, key, the file's name and bytes
Plan = list[tuple[int, str, int]]  # for every rank: which rank holds its state; name and bytes


def _choose(
    keys: Sequence[str], held: Sequence[list[Copy]], refused: set[tuple[int, str]]
) -> tuple[int, int, Plan] | None:
    """Life, step and plan of the newest state that can be put together from copies of one life."""
    for life, step in sorted({copy[:2] for copies in held for copy in copies}, reverse=True):
        holders: dict[str, dict[int, tuple[int, str, int]]] = {}
        for rank, copies in enumerate(held):
            for *moment, key, name, size in copies:
                if moment == [life, step] and (rank, name) not in refused:
                    holders.setdefault(key, {}).setdefault(rank, (rank, name, size))
        if set(keys) <= holders.keys():
            own = [holders[key].get(rank) for rank, key in enumerate(keys)]
            able = [list(holders[key].values()) for key in keys]  # takers in turn, not all from one
            return life, step, [o or a[r % len(a)] for r, (o, a) in enumerate(zip(own, able))]
    return None


class Mirror:
    """This rank's state in the memory of two machines. Construction, put, newest and get are
    collective over `group`, one with gloo for CPU tensors; dump is not.

    folder: in a tmpfs of this machine (/dev/shm/<this run>); ranks of a machine may share it.
    key: names the content: ranks of equal keys hold equal state, as data-parallel replicas do.
    distance: to the partner, by default P // 2; 0: no copy elsewhere, for one machine.
    keep: how many steps are kept, at least 2, for ranks may be a `put` apart when all ends.

    A run that is restarted is another "life", and newer than the ones before: steps that it repeats
    are never mixed with theirs.
    """

    def __init__(
        self, folder: Path | str, key: str, group: Group = None, *,
        distance: int | None = None, keep: int = 2,
    ) -> None:  # fmt: skip
        alone = not dist.is_initialized()
        self.rank = 0 if alone else dist.get_rank(group)
        self.world = 1 if alone else dist.get_world_size(group)
        self.folder, self.key, self.group, self.keep = Path(folder), key, group, keep
        self.distance = self.world // 2 if distance is None else distance
        _check(keep >= 2, f"keep = {keep}: at least 2, or a crash during put leaves no whole step")
        _check(0 <= self.distance < self.world, f"distance = {distance} of {self.world} ranks")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self.folder.glob("*.tmp"):  # of a process that was killed; nobody writes yet
            path.unlink(missing_ok=True)
        lives = [life for life, _ in self._moments()]
        self.life = max(self._gather(max([*lives, int(time.time())]))) + 1
        self._found: tuple[int, int, Plan] | None = None

    def put(self, step: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Keep `tensors` and `about` (JSON) as the state after `step`, here and at the partner.
        OSError on all ranks, and the copies before stay, if memory is short on one."""
        own, source = self._path(step, self.rank), (self.rank - self.distance) % self.world
        path = self._path(step, source)
        temporary = path.with_suffix(".tmp")
        try:
            out, size = self._together(lambda: self._own(step, tensors, about, ordered=True))
            if source != self.rank:
                into, _ = self._together(lambda: _mapped(temporary, size[source]))
                self._exchange(out, (self.rank + self.distance) % self.world, into, source)
                os.replace(temporary, path)
        except OSError:
            own.unlink(missing_ok=True), temporary.unlink(missing_ok=True)
            raise
        for life, old in self._moments()[self.keep :]:
            for path in self.folder.glob(f"{life}-{old:08d}-*.mirror"):
                path.unlink(missing_ok=True)

    def dump(self, step: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """put without the partner and without a word to anybody: for a rank whose collective has
        failed or hangs, from any thread, as long as nothing writes to `tensors`: while the
        optimizer's step runs, do not."""
        self._own(step, tensors, about, ordered=False)

    def newest(self) -> int | None:
        """The newest step of which, for every rank's key, somebody holds a good copy. None if there
        is none: other keys, a world of another size, partners lost together."""
        copies: list[Copy] = []
        for path in sorted(self.folder.glob("*.mirror")):
            header = _header(path, whole=False)
            if header is not None and header["world"] == self.world:
                moment = header["life"], header["step"]
                copies.append((*moment, header["key"], path.name, path.stat().st_size))
        keys, held = zip(*self._gather((self.key, copies)))
        refused: set[tuple[int, str]] = set()
        while found := _choose(keys, held, refused):
            mine = sorted({name for holder, name, _ in found[2] if holder == self.rank})
            bad = [(self.rank, n) for n in mine if not _header(self.folder / n, whole=True)]
            bad = [file for part in self._gather(bad) for file in part]
            if not bad:
                break
            refused.update(bad)
        self._found = found
        return found and found[1]

    def get(self, step: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Copy this rank's state after `step`, which newest() has given, into `tensors`, and return
        its `about`. ValueError on all ranks if a name, shape or dtype is not the copy's."""
        life, found, plan = self._found or (0, None, [])
        _check(found == step, f"step {step} is not what newest() has found: call it first")
        header, data = _read(self._fetched(life, step, plan))
        mine, fault = _table(tensors), None
        for name in sorted(mine.keys() | header["tensors"].keys()):
            if mine.get(name) != header["tensors"].get(name):
                fault = f"{name}: the copy has {header['tensors'].get(name)}, we {mine.get(name)}"
        faults = [fault for fault in self._gather(fault) if fault]
        _check(not faults, f"the state of step {step} does not fit: {faults[:1]}")
        for name, view in _views(header, data).items():
            _local(tensors[name]).copy_(view)
        return header["about"]

    def clear(self) -> None:
        """Forget all, at the end of a run, for tmpfs is memory, and where one starts from an older
        state than the copies' on purpose."""
        for path in self.folder.glob("*.mirror"):
            path.unlink(missing_ok=True)

    def _fetched(self, life: int, step: int, plan: Plan) -> Path:
        """Where this rank's state lies here, once all that others hold has travelled."""
        holder, name, size = plan[self.rank]
        path, away = self.folder / name, holder != self.rank
        if away:
            path = self.folder / f"{life}-{step:08d}-{self.rank}-{self.rank}.mirror"
        temporary = path.with_suffix(".tmp")
        into, _ = self._together(lambda: _mapped(temporary, size) if away else b"")
        for rank, (source, name, _) in enumerate(plan):
            if self.rank == source != rank:
                self._exchange(_read(self.folder / name)[1], rank, b"", rank)
            elif self.rank == rank != source:
                self._exchange(b"", source, into, source)
                os.replace(temporary, path)
        return path

    def _exchange(
        self, out: mmap.mmap | bytes, target: int, into: mmap.mmap | bytes, source: int
    ) -> None:
        """`out` to the target and the source's file to `into`, a chunk at a time both ways."""
        for there, here in itertools.zip_longest(_chunks(out), _chunks(into)):
            works = []
            if there is not None:
                works.append(dist.isend(there, group_dst=target, group=self.group))
            if here is not None:
                works.append(dist.irecv(here, group_src=source, group=self.group))
            for work in works:
                work.wait()

    def _own(self, step: int, tensors: Mapping, about: Mapping, ordered: bool) -> mmap.mmap:
        head = {"life": self.life, "step": step, "key": self.key, "world": self.world}
        path = self._path(step, self.rank)
        return _write(path, head | {"about": dict(about)}, tensors, ordered)

    def _path(self, step: int, owner: int) -> Path:
        return self.folder / f"{self.life}-{step:08d}-{owner}-{self.rank}.mirror"

    def _moments(self) -> list[tuple[int, int]]:
        """(life, step) of the files here, the newest first."""
        names = [path.name.split("-")[:2] for path in self.folder.glob("*.mirror")]
        return sorted({(int(life), int(step)) for life, step in names}, reverse=True)

    def _gather(self, value: Any) -> list[Any]:
        if self.world == 1:
            return [value]
        dist.all_gather_object(values := [None] * self.world, value, group=self.group)
        return values

    def _together(self, make: Callable[[], mmap.mmap]) -> tuple[mmap.mmap, list[int]]:
        """What `make` gives, and everybody's sizes of it; OSError on all ranks if one had that."""
        made, fault = b"", None
        try:
            made = make()
        except OSError as error:
            fault = f"rank {self.rank}: {error}"
        sizes, faults = zip(*self._gather((len(made), fault)))
        if any(faults):
            raise OSError("; ".join(fault for fault in faults if fault))
        return made, sizes


# --------------------------------------------------------------------------------------------------
# Guard
# --------------------------------------------------------------------------------------------------


class Diverged(ValueError):
    """Skipping batches does not help: the weights, the data or the learning rate must change."""


class Guard:
    """Judges every batch by its loss and gradient norm, both those of all ranks, so that all judge
    alike. A function of the sequence of these numbers and nothing else.

    The mean is exponential, over about 20 batches. The deviation is that of an individuals chart
    (Shewhart): the mean step from one loss to the next, / 1.128, which a falling curve hardly
    changes and the noise between batches makes; but at least 2% of the mean, for slow waves are not
    noise. A loss is a spike if it exceeds the mean by more than `spikes` of these; skipped batches
    leave both as they are. Diverged is raised with the `patience`-th skip in a row, or when 3 times
    as many of the last 100 were skipped: data that raises the loss for good does that too. The
    first `warmup` batches are only judged for being finite.
    """

    MEAN, NOISE, FLOOR, RECENT = 1 / 20, 1 / 50, 0.02, 100

    def __init__(self, patience: int = 10, spikes: float = 6.0, warmup: int = 20) -> None:
        _check(patience >= 1 and spikes > 0 and warmup >= 2, "patience, spikes >= 1; warmup >= 2")
        self.patience, self.spikes, self.warmup = patience, spikes, warmup
        self.state: dict[str, Any] = {
            "judged": 0, "taken": 0, "mean": 0.0, "noise": 0.0, "last": 0.0, "skipped": [],
        }  # fmt: skip

    def judge(self, loss: float, grad_norm: float) -> str | None:
        """Why this batch must be skipped, or None; Diverged (a ValueError) if that has failed."""
        s = self.state
        s["judged"] += 1
        why = self._why(loss, grad_norm)
        if why is None:
            self._take(loss)
            return None
        s["skipped"] = [i for i in s["skipped"] if i > s["judged"] - self.RECENT] + [s["judged"]]
        row = s["skipped"][-self.patience :]
        in_row = len(row) == self.patience and row[-1] - row[0] == self.patience - 1
        if in_row or len(s["skipped"]) >= 3 * self.patience:
            many = f"{self.patience} in a row" if in_row else f"{len(s['skipped'])} of the last 100"
            raise Diverged(f"{many} of the batches had to be skipped, this one because {why}: go "
                           "back to an older checkpoint, or lower the learning rate")  # fmt: skip
        return why

    def _why(self, loss: float, grad_norm: float) -> str | None:
        s = self.state
        for name, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not math.isfinite(value):
                return f"the {name} is {value}"
        noise = max(s["noise"], self.FLOOR * abs(s["mean"]))
        if s["taken"] < self.warmup or not noise or loss <= s["mean"] + self.spikes * noise:
            return None
        far = (loss - s["mean"]) / noise
        return f"the loss {loss:.4g} is {far:.1f} deviations above its mean {s['mean']:.4g}"

    def _take(self, loss: float) -> None:
        s = self.state
        if s["taken"]:
            step = abs(loss - s["last"]) / 1.128
            s["noise"] += (step - s["noise"]) * max(self.NOISE, 1 / s["taken"])
        s["taken"] += 1
        s["mean"] += (loss - s["mean"]) * max(self.MEAN, 1 / s["taken"])
        s["last"] = loss

    def state_dict(self) -> dict[str, Any]:
        """Numbers and a list of them: JSON keeps them exactly."""
        return self.state | {"skipped": list(self.state["skipped"])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _check(state.keys() == self.state.keys(), f"a guard's state has {sorted(self.state)}")
        self.state = dict(state) | {"skipped": list(state["skipped"])}


# --------------------------------------------------------------------------------------------------
# The store of a start
# --------------------------------------------------------------------------------------------------


def stop_on_signals() -> list[int]:
    """A list that the first SIGTERM or Ctrl-C puts a number into; the second acts at once."""
    caught: list[int] = []

    def note(number: int, frame: Any) -> None:
        caught.append(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    return caught


def fresh_store(store: dist.Store, rank: int, ranks: int) -> dist.Store:
    """`store` without what ranks of an earlier start left there; call it on every rank.

    torchrun keeps one store over restarts, and in it the addresses of processes that are gone:
    whoever reads before its peer has written connects to a dead one, or hangs (pytorch's issue
    135712). The count of restarts tells no start from another, for each machine's agent counts its
    own. So the first rank draws a name for this start, and gives it to whoever asks under a number
    that none before had; the dead ask no more, and are not waited for. (All ranks of the earlier
    start must have ended, as torchrun sees to.)

    After the store's own time-out the first rank raises TimeoutError, others what the store raises.
    """
    if rank:
        name = store.get(f"name {store.add('asked', 1)}").decode()
        store.add(f"{name} heard", 1)
        return dist.PrefixStore(name, store)
    name, answered = uuid.uuid4().hex, 0
    until = time.monotonic() + store.timeout.total_seconds()
    while (heard := store.add(f"{name} heard", 0)) < ranks - 1:
        if time.monotonic() > until:
            raise TimeoutError(f"{heard + 1} of {ranks} ranks are here after {store.timeout}")
        asked = store.add("asked", 0)
        for number in range(answered + 1, asked + 1):
            store.set(f"name {number}", name)
        answered = asked
        time.sleep(0.01)
    return dist.PrefixStore(name, store)


# --------------------------------------------------------------------------------------------------
# Watch
# --------------------------------------------------------------------------------------------------

PERIOD = 0.01  # seconds between samples of the watched thread's stack
SHOWN = 16  # ranks that a report names one by one
STORE = 5.0  # seconds that a store may take to answer
COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")
WAITING = re.compile(r"\.(wait|wait_tensor(\.default)?|synchronize|item|tolist|cpu)\(")


def _waits(frame: FrameType | None) -> bool:
    """Whether a thread whose innermost frame this is waits for others: in a collective of
    torch.distributed, or at a line that waits for one, or for the GPU, where NCCL's wait is. What
    waits in C++ called from elsewhere, as DDP's reducer in backward, passes for work."""
    while frame is not None and frame.f_code.co_filename.endswith("torch/_ops.py"):
        frame = frame.f_back
    if frame is None:
        return False
    path = frame.f_code.co_filename
    if path.endswith(COLLECTIVES):
        return True
    return bool(WAITING.search(linecache.getline(path, frame.f_lineno or 0)))


def _stack(frame: FrameType | None, depth: int = 16) -> str:
    """`file.py:12 inner < file.py:34 outer`."""
    lines = []
    while frame is not None and len(lines) < depth:
        code = frame.f_code
        lines.append(f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " < ".join(lines)


def blame(before: Mapping[int, dict], after: Mapping[int, dict], world: int) -> dict[int, str]:
    """Rank -> what it is guilty of, from two looks at the board some heartbeats apart."""
    stopped = {}
    for rank in range(world):
        if rank not in after:
            stopped[rank] = "has never shown up"
        elif after[rank]["left"]:
            stopped[rank] = "has left the loop"
        elif rank in before and before[rank]["beat"] == after[rank]["beat"]:
            stopped[rank] = "no heartbeat: dead or stopped"
    if stopped:
        return stopped
    busy = {rank: "is not waiting for anybody" for rank in after if not after[rank]["waits"]}
    if busy:
        return busy
    place = {rank: (row["step"], row["beats"]) for rank, row in after.items()}
    least = min(place.values())
    if least == max(place.values()):
        return {}
    return {rank: "is furthest behind" for rank in place if place[rank] == least}


def _stands(rank: int, row: dict) -> str:
    return f"rank {rank} has been in step {row['step']}, {row['phase']}, for {row['seconds']:.1f} s"


def _told(rank: int, before: dict, after: dict, world: int) -> str:
    """The report of a hang: the guilty, and where all stand."""
    guilty, me = blame(before, after, world), after[rank]
    lines, places = [_stands(rank, me)], {}
    for other, why in [*guilty.items()][:SHOWN]:
        lines.append(f"  guilty: rank {other} {why}")
        if other in after:
            lines.append(f"    at {after[other]['stack']}")
    if not guilty:
        lines.append("  all ranks wait at the same place: not the same collective, or the network")
        lines.append(f"    at {me['stack']}")
    for other, row in sorted(after.items()):
        state = "has left" if row["left"] else "waits" if row["waits"] else "busy"
        places.setdefault((row["step"], row["phase"], state), []).append(other)
    for (step, phase, state), ranks in sorted(places.items()):
        names = ", ".join(map(str, ranks[:SHOWN])) + ", ..." * (len(ranks) > SHOWN)
        longest = max(after[other]["seconds"] for other in ranks)
        lines.append(f"  step {step}, {phase}, {state}, for {longest:.1f} s: rank {names}")
    return "\n".join(lines)


class Watch:
    """Watches the thread that makes it, from two threads of its own, and its peers through `store`.

    store: None for one process; else it is cloned, so that nobody waits for another's turn.
    timeout: seconds that one phase of a step may last; `first`: those of the first step, which
        compiles kernels and connects ranks.
    report(text): gets the verdict; on_hang() is called after it, in the watching thread, and may
        Mirror.dump() unless the optimizer is at work, and os._exit for torchrun to start anew.
    """

    def __init__(
        self, store: dist.Store | None, rank: int, world: int, *, timeout: float, first: float,
        report: Callable[[str], None], on_hang: Callable[[], None],
    ) -> None:  # fmt: skip
        _check(world == 1 or store is not None, f"store = None, but there are {world} ranks")
        _check(timeout > 0 and first > 0, f"timeout = {timeout}, first = {first}: seconds, > 0")
        self.rank, self.world, self.timeout, self.first = rank, world, timeout, first
        self.report, self.on_hang = report, on_hang
        self.store = None if store is None else dist.PrefixStore("watch", store.clone())
        self.interval = min(1.0, timeout / 10)
        self._thread, self._over = threading.get_ident(), threading.Event()
        self._where: tuple[int | None, str, int] = (None, "start", 0)  # step, phase, beats in it
        self._opening: int | None = None
        self._seconds, self._waiting, self._sums = 0.0, False, [0.0, 0.0]
        self._asked, self._answers = threading.Event(), queue.SimpleQueue()
        self.threads = [threading.Thread(target=self._sample, name="watch", daemon=True)]
        if store is not None:
            self.threads.append(threading.Thread(target=self._publish, name="beat", daemon=True))
        for thread in self.threads:
            thread.start()

    def beat(self, step: int, phase: str) -> None:
        """The loop enters a phase ("data", "forward", ...) of a step. All ranks pass the same."""
        before, _, beats = self._where
        if before is None:
            self._opening = step
        self._where = (step, phase, beats + 1 if step == before else 0)

    def waits(self) -> tuple[float, float]:
        """Seconds since the last call in which the watched thread (waited for others, was busy)."""
        (busy, waiting), self._sums = self._sums, [0.0, 0.0]
        return waiting, busy

    def close(self) -> None:
        """The loop is over; peers that go on will know."""
        self._over.set()
        for thread in self.threads:
            thread.join(STORE)

    def _sample(self) -> None:
        seen, spent, last = self._where, 0.0, time.perf_counter()
        while not self._over.is_set():
            time.sleep(PERIOD)
            passed = time.perf_counter() - last
            last += passed
            self._waiting = _waits(sys._current_frames().get(self._thread))
            self._sums[self._waiting] += passed
            where = self._where
            # a process that was stopped, or a machine asleep, has not hung: hence at most a second
            self._seconds = spent = spent + min(passed, 1.0) if where is seen else 0.0
            seen = where
            limit = self.first if where[0] == self._opening else self.timeout
            if where[0] is not None and spent > limit:
                told = self._verdict()
                if self._where is not seen:
                    continue  # it was only slow
                self.report(told)
                self.on_hang()
                return

    def _row(self, beat: int) -> dict[str, Any]:
        step, phase, beats = self._where
        frame = sys._current_frames().get(self._thread)
        return {
            "beat": beat, "step": -1 if step is None else step, "phase": phase, "beats": beats,
            "seconds": self._seconds, "waits": self._waiting, "left": self._over.is_set(),
            "stack": _stack(frame),
        }  # fmt: skip

    def _publish(self) -> None:
        """All talk with the store, which may take for ever if its host is dead."""
        beat, over = 0, False
        while not over:
            over, beat = self._over.wait(self.interval), beat + 1
            try:
                self.store.set(str(self.rank), json.dumps(self._row(beat)))
                if self._asked.is_set():
                    self._asked.clear()
                    names = [str(r) for r in range(self.world)]
                    there = [name for name in names if self.store.check([name])]
                    self._answers.put({int(n): json.loads(self.store.get(n)) for n in there})
            except RuntimeError:  # the store is gone, which is said if ever it is asked
                return

    def _verdict(self) -> str:
        if self.store is None:
            return _told(0, {0: self._row(1)}, {0: self._row(2)}, 1)
        looks = []
        while len(looks) < 2:
            self._asked.set()
            try:
                looks.append(self._answers.get(timeout=STORE + 2 * self.interval))
            except queue.Empty:
                return _stands(self.rank, row := self._row(0)) + (
                    "\n  guilty: the store does not answer: its host (rank 0, or torchrun's agent) "
                    f"is dead or stopped\n    this rank is at {row['stack']}"
                )
            if len(looks) < 2:
                time.sleep(3 * self.interval)  # for heartbeats to be missed in
        return _told(self.rank, *looks, self.world)


def stragglers(rows: Iterable[Sequence[float]], slack: float = 0.1) -> str | None:
    """Whom the others wait for, from every rank's Watch.waits() over the same steps: those that are
    busy longer than the median rank by more than `slack` of the time. None if nobody is."""
    rows = list(rows)
    usual = statistics.median_low([busy for _, busy in rows])
    slow = [rank for rank, (w, b) in enumerate(rows) if b - usual > slack * (w + b)]
    if not slow:
        return None
    share = statistics.median(w / (w + b or 1.0) for r, (w, b) in enumerate(rows) if r not in slow)
    names = ", ".join(f"rank {rank} ({rows[rank][1]:.2f} s)" for rank in slow)
    return (
        f"busy for longer than the others' {usual:.2f} s, who wait {share:.0%} of the time: {names}"
    )


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def check(store: dist.Store, rank: int, ranks: int, folder: Path) -> None:
    """Each rank's memory lost in turn, the guard on a curve, a hang and whose it is."""
    state = lambda step: {"w": torch.full((3, 5), 10.0 * rank + step), "n": torch.tensor(step)}
    mine = folder / str(rank)
    mirror = Mirror(mine, f"shard {rank}")
    for step in (1, 2, 3):
        mirror.put(step, state(step), {"rng": rank})
    for lost in range(ranks):
        if rank == lost:
            mirror.clear()
        mirror = Mirror(mine, f"shard {rank}")
        assert mirror.newest() == 3
        assert mirror.get(3, into := state(0)) == {"rng": rank}
        assert all(torch.equal(into[name], t) for name, t in state(3).items())
        mirror.put(3, into, {"rng": rank})
    guard, noise = Guard(), torch.Generator().manual_seed(0)
    for i in range(300):
        loss = (2 + 6 * 0.99**i) * (1 + 0.03 * torch.randn((), generator=noise).item())
        assert guard.judge(loss, 1.0) is None, (i, loss)
    assert guard.judge(1.5 * loss, 1.0) and guard.judge(math.nan, 1.0)
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    watch = Watch(store, rank, ranks, timeout=1.0, first=1.0, report=told.put, on_hang=int)
    watch.beat(1, "forward")
    if rank == 1:
        time.sleep(2.5)
    dist.barrier()
    assert "guilty: rank 1 is not waiting" in told.get(timeout=5.0), rank
    watch.close()


def milliseconds(run: Callable[[], Any], times: int) -> float:
    spent = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        spent.append(time.perf_counter() - start)
    return 1e3 * statistics.median(spent)


def benchmark(rank: int, ranks: int, folder: Path) -> None:
    """On this machine, whose ranks share its cores and memory."""
    say = print if rank == 0 else lambda *_: None
    state, mirrors = {f"w{i}": torch.randn(25 * 2**18) for i in range(4)}, folder / f"table {rank}"
    here, there = (Mirror(mirrors / str(d), f"{rank}", distance=d) for d in (0, ranks // 2))
    disk = Path(tempfile.gettempdir()) / f"recovery-peer-{os.getpid()}"
    say(f"{ranks} ranks, gloo; 100 MiB of state each, into {folder.parent}\n{'':>44}{'ms':>9}")
    for name, run in {
        "put, own memory alone (distance=0)": lambda: here.put(1, state, {}),
        "put, with the partner": lambda: there.put(1, state, {}),
        "newest": there.newest,
        "get, own copy": lambda: there.get(1, state),
        "torch.save to disk (no fsync, no copy)": lambda: torch.save(state, disk),
    }.items():
        dist.barrier()
        say(f"{name:>44}{milliseconds(run, 3):>9.1f}")
    disk.unlink()
    if rank == 0:
        alone()


def alone() -> None:
    """One rank, while the others wait."""
    guard, x = Guard(), torch.randn(256, 256)
    judge = lambda: [guard.judge(2.0, 1.0) for _ in range(1000)]
    print(f"{'Guard.judge':>44}{milliseconds(judge, 9) / 1e3:>9.5f}")
    work = lambda: [x @ x for _ in range(200)]
    plain, watched = [], []
    for _ in range(25):  # in turn, for machines are noisy
        plain.append(milliseconds(work, 1))
        watch = Watch(None, 0, 1, timeout=60.0, first=60.0, report=print, on_hang=int)
        watched.append(milliseconds(work, 1))
        beat = lambda: [watch.beat(i, "forward") for i in range(1000)]
        watch.close()
    share = statistics.median(watched) / statistics.median(plain) - 1
    print(f"{'200 products of 256 x 256':>44}{statistics.median(plain):>9.1f}")
    print(f"{'the same under Watch':>44}{statistics.median(watched):>9.1f}  ({share:+.1%})")
    print(f"{'Watch.beat':>44}{milliseconds(beat, 9) / 1e3:>9.5f}")


def main() -> None:
    if "RANK" not in os.environ:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        sys.exit(subprocess.run([*run, *sys.argv], env=os.environ | threads).returncode)
    store, rank, ranks = next(dist.rendezvous("env://"))
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    box = [tempfile.mkdtemp(prefix="recovery-", dir=memory) if rank == 0 else None]
    dist.broadcast_object_list(box)
    check(store, rank, ranks, Path(box[0]))
    if "--check" not in sys.argv:
        benchmark(rank, ranks, Path(box[0]))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(box[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
