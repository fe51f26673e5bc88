"""Hang watchdog: names the rank that the others wait for, and the line of code that it is at.

When one rank of a job hangs, all others wait in a collective until it times out, and the error
names none of them. A thread in each rank samples the stack of the training thread: the rank waits
while its innermost line is in a collective.

    Watchdog     When a phase of a step exceeds its timeout, compares the ranks, through a store,
        and reports the stuck ones (no heartbeat, not waiting for others, or furthest behind), with
        the stack of each.
    stragglers   From the same samples: how long each rank waits, and for which ranks.

Cost: 100 stack samples per second take 0.4% of a core. When it loses: the timeout must exceed the
slowest healthy step. Hooks: none, the training loop calls beat(step, phase). Equivalence
(test_all.py): of four ranks the one that sleeps, has left, is stopped or is behind is the one that
is named. Needs: torch, Linux. `python training/watchdog.py` reports a hang of its own.
"""

from __future__ import annotations

import json
import linecache
import os
import queue
import re
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

SAMPLE_INTERVAL = 0.01  # seconds between samples of the watched thread's stack
MAX_RANKS_LISTED = 16  # in a report
STORE_TIMEOUT = 5.0  # seconds
COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")
WAITING = re.compile(r"\.(wait|wait_tensor(\.default)?)\(")
NCCL_STATES = "enqueued", "started", "completed"
WAITING_FOR_GPU = re.compile(r"\.(synchronize|item|tolist|cpu)\(")


def _is_waiting(frame: FrameType | None) -> bool:
    """Whether the thread with this innermost frame waits for other ranks: in a collective of
    torch.distributed, at a line that waits for one, or for a GPU that is in one. A wait inside
    other C++ code, such as DDP's reducer in backward, counts as work."""
    while frame is not None and frame.f_code.co_filename.endswith("torch/_ops.py"):
        frame = frame.f_back
    if frame is None:
        return False
    path = frame.f_code.co_filename
    if path.endswith(COLLECTIVES):
        return True
    line = linecache.getline(path, frame.f_lineno or 0)
    return bool(WAITING.search(line) or (WAITING_FOR_GPU.search(line) and _in_nccl_collective()))


def _in_nccl_collective() -> bool:
    """Whether the GPU is in a collective rather than in a kernel before one, as NCCL's flight
    recorder, which polls every 100 ms, last saw it. True if it has no record, as with gloo. Without
    TORCH_NCCL_ENABLE_TIMING=1 it sees no starts, and a launched collective counts."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    groups = json.loads(dump(includeCollectives=False)).get("pg_status") if dump else None
    if not groups:
        return True
    for status in groups.values():
        last = {name: int(status[f"last_{name}_collective"]) for name in NCCL_STATES}
        first_seen = last["started"] if last["started"] >= 0 else last["enqueued"]
        if first_seen > last["completed"]:
            return True
    return False


def _stack(frame: FrameType | None, depth: int = 16) -> str:
    """`file.py:12 inner < file.py:34 outer`."""
    frames = islice(traceback.walk_stack(frame), depth) if frame else ()
    of = lambda f, line: f"{os.path.basename(f.f_code.co_filename)}:{line} {f.f_code.co_name}"
    return " < ".join(of(f, line) for f, line in frames)


def find_culprit(
    before: Mapping[int, dict], after: Mapping[int, dict], world: int
) -> dict[int, str]:
    """{stuck rank: reason}, from two snapshots of all ranks' rows some heartbeats apart."""
    stopped = {}
    for rank in range(world):
        if rank not in after:
            stopped[rank] = "has never reported"
        elif after[rank]["left"]:
            stopped[rank] = "has left the loop"
        elif rank in before and before[rank]["beat"] == after[rank]["beat"]:
            stopped[rank] = "has no heartbeat: dead or stopped"
    busy = {rank: "is not waiting for other ranks" for rank in after if not after[rank]["waits"]}
    progress = {rank: (row["step"], row["beats"]) for rank, row in after.items()}
    behind = {r: "is furthest behind" for r, at in progress.items() if at == min(progress.values())}
    return stopped or busy or (behind if len(behind) < world else {})


def _status_line(rank: int, row: dict) -> str:
    return f"rank {rank} has been in step {row['step']}, {row['phase']}, for {row['seconds']:.1f} s"


def _hang_report(rank: int, before: dict, after: dict, world: int) -> str:
    """The report of a hang: the stuck ranks, and the step and phase of every rank."""
    stuck, own = find_culprit(before, after, world), after[rank]
    lines, positions = [_status_line(rank, own)], {}
    for other, why in [*stuck.items()][:MAX_RANKS_LISTED]:
        lines.append(f"  stuck: rank {other} {why}")
        if other in after:
            lines.append(f"    at {after[other]['stack']}")
    if not stuck:
        lines.append("  all ranks wait in the same phase: collectives differ, or the network fails")
        lines.append(f"    at {own['stack']}")
    for other, row in sorted(after.items()):
        state = "has left" if row["left"] else "waits" if row["waits"] else "busy"
        positions.setdefault((row["step"], row["phase"], state), []).append(other)
    for (step, phase, state), ranks in sorted(positions.items()):
        more = ", ..." * (len(ranks) > MAX_RANKS_LISTED)
        names = ", ".join(map(str, ranks[:MAX_RANKS_LISTED])) + more
        longest = max(after[other]["seconds"] for other in ranks)
        lines.append(f"  step {step}, {phase}, {state}, for {longest:.1f} s: rank {names}")
    return "\n".join(lines)


class Watchdog:
    """Watches the thread that creates it from two threads of its own, and other ranks through
    `store`.

    store: None for one process; it is cloned, so that its users do not block each other.
    timeout: seconds that one phase of a step may last; first_timeout: the same for the first step,
        which compiles kernels and connects ranks.
    report(text): receives the diagnosis of a hang; then on_hang() is called, in the watchdog's
        thread: it may call MemoryCheckpoint.dump, except during the optimizer step, and os._exit,
        so that torchrun restarts the run.
    """

    def __init__(
        self, store: dist.Store | None, rank: int, world: int, *, timeout: float,
        first_timeout: float, report: Callable[[str], None], on_hang: Callable[[], None],
    ) -> None:  # fmt: skip
        if world > 1 and store is None:
            raise ValueError(f"store = None, but there are {world} ranks")
        if not (timeout > 0 and first_timeout > 0):
            given = f"timeout = {timeout}, first_timeout = {first_timeout}"
            raise ValueError(f"{given}: must be > 0 seconds")
        self.rank, self.world = rank, world
        self.timeout, self.first_timeout = timeout, first_timeout
        self.report, self.on_hang = report, on_hang
        self.store = None if store is None else dist.PrefixStore("watch", store.clone())
        self.interval = min(1.0, timeout / 10)
        self._thread, self._over = threading.get_ident(), threading.Event()
        self._where: tuple[int | None, str, int] = (None, "start", 0)  # step, phase, beats in it
        self._first_step: int | None = None
        self._seconds, self._is_blocked, self._sums = 0.0, False, [0.0, 0.0]
        self._asked, self._answers = threading.Event(), queue.SimpleQueue()
        self.threads = [threading.Thread(target=self._sample, name="watch", daemon=True)]
        if store is not None:
            self.threads.append(threading.Thread(target=self._publish, name="beat", daemon=True))
        for thread in self.threads:
            thread.start()

    def beat(self, step: int, phase: str) -> None:
        """Call at the start of each phase ("data", "forward", ...) of a step, the same phases on
        all ranks."""
        before, _, beats = self._where
        if before is None:
            self._first_step = step
        self._where = (step, phase, beats + 1 if step == before else 0)

    def wait_times(self) -> tuple[float, float]:
        """Seconds that the watched thread (waited for other ranks, was busy) since the last
        call."""
        (busy, waiting), self._sums = self._sums, [0.0, 0.0]
        return waiting, busy

    def close(self) -> None:
        """End the threads, and report to the other ranks that this one has left the loop."""
        self._over.set()
        for thread in self.threads:
            thread.join(STORE_TIMEOUT)

    def _sample(self) -> None:
        seen, spent, last = self._where, 0.0, time.perf_counter()
        while not self._over.is_set():
            time.sleep(SAMPLE_INTERVAL)
            passed = time.perf_counter() - last
            last += passed
            self._is_blocked = _is_waiting(sys._current_frames().get(self._thread))
            self._sums[self._is_blocked] += passed
            where = self._where
            # at most 1 s per sample: a stopped process or a suspended machine is not a hang
            self._seconds = spent = spent + min(passed, 1.0) if where is seen else 0.0
            seen = where
            limit = self.first_timeout if where[0] == self._first_step else self.timeout
            if where[0] is not None and spent > limit:
                text = self._diagnose()
                if self._where is not seen or self._over.is_set():
                    continue  # it was only slow, or an exception has ended the wait
                self.report(text)
                self.on_hang()
                return

    def _row(self, beat: int) -> dict[str, Any]:
        step, phase, beats = self._where
        frame = sys._current_frames().get(self._thread)
        return {
            "beat": beat, "step": -1 if step is None else step, "phase": phase, "beats": beats,
            "seconds": self._seconds, "waits": self._is_blocked, "left": self._over.is_set(),
            "stack": _stack(frame),
        }  # fmt: skip

    def _publish(self) -> None:
        """All communication with the store, which may block forever if its host is dead."""
        beat, over = 0, False
        while not over:
            over, beat = self._over.wait(self.interval), beat + 1
            try:
                self.store.set(str(self.rank), json.dumps(self._row(beat)))
                if self._asked.is_set():
                    self._asked.clear()
                    names = [str(r) for r in range(self.world)]
                    present = [name for name in names if self.store.check([name])]
                    self._answers.put({int(n): json.loads(self.store.get(n)) for n in present})
            except RuntimeError:  # the store is gone; _diagnose reports that
                return

    def _snapshot(self) -> dict[int, dict]:
        """The rows of all ranks that have one."""
        self._asked.set()
        return self._answers.get(timeout=STORE_TIMEOUT + 2 * self.interval)

    def _diagnose(self) -> str:
        if self.store is None:
            return _hang_report(0, {0: self._row(1)}, {0: self._row(2)}, 1)
        end, late = time.monotonic() + STORE_TIMEOUT, True
        try:
            before = self._snapshot()
            while late and time.monotonic() < end:
                time.sleep(3 * self.interval)  # a live rank beats within this time, if not loaded
                after = self._snapshot()
                common = [(before[r], row) for r, row in after.items() if r in before]
                late = any(a["beat"] == b["beat"] and not b["left"] for a, b in common)
        except queue.Empty:
            row, dead = self._row(0), "its host (rank 0, or torchrun's agent) is dead or stopped"
            at = f"\n  stuck: the store does not answer: {dead}\n    this rank is at {row['stack']}"
            return _status_line(self.rank, row) + at
        return _hang_report(self.rank, before, after, self.world)


def stragglers(rows: Iterable[Sequence[float]], slack: float = 0.1) -> str | None:
    """The ranks that the others wait for, as one line, from every rank's Watchdog.wait_times() over
    the same steps: those busy longer than the median rank by more than `slack` of the time. None if
    there are none."""
    rows = list(rows)
    median = statistics.median_low([busy for _, busy in rows])
    slow = [rank for rank, (w, b) in enumerate(rows) if b - median > slack * (w + b)]
    if not slow:
        return None
    share = statistics.median(w / (w + b or 1.0) for r, (w, b) in enumerate(rows) if r not in slow)
    names = ", ".join(f"rank {rank} ({rows[rank][1]:.2f} s)" for rank in slow)
    return f"busy longer than the others ({median:.2f} s, waiting {share:.0%} of the time): {names}"


def main() -> None:
    """A phase that takes longer than its timeout is reported with its line; the cost of a beat."""
    reports, hung = [], threading.Event()
    calls = dict(report=reports.append, on_hang=hung.set)
    watch = Watchdog(None, 0, 1, timeout=0.2, first_timeout=60, **calls)
    start, n = time.perf_counter(), 100_000
    for _ in range(n):
        watch.beat(1, "forward")
    print(f"{1e6 * (time.perf_counter() - start) / n:.2f} us per beat")
    watch.beat(2, "backward")
    assert hung.wait(10) and "stuck: rank 0 is not waiting" in reports[0]
    print(reports[0])
    watch.close()


if __name__ == "__main__":
    main()
