"""diloco.py: data parallelism over slow links, among workers that come and go.

Data parallelism adds up gradients in every step. Workers that step alone and meet each H-th step
need 1/H of the bytes. Local SGD (Stich, arXiv:1805.09767) then averages weights; DiLoCo (Douillard
et al., arXiv:2311.08105) takes what a worker moved by, start - now, for a gradient ("pseudo-
gradient"), and the mean of these for one step of an outer optimizer, SGD with Nesterov momentum,
from where all started: with lr 1 and momentum 0 that is averaging. The inner optimizer, AdamW,
keeps its moments and is not touched.

    outer = DiLoCo(model.parameters(), over(group), every=500)
    for batch in batches:  # this worker's own
        loss(batch).backward(); inner.step(); inner.zero_grad()
        outer.step()  # each 500th meets the others

`average` sends fp16, as OpenDiLoCo does (arXiv:2407.07852), and adds in fp32: each tensor is
divided by a power of two just over its largest value on any worker, so that nothing overflows, and
what is lost is 2^-11 of a value, or 2^-25 of the tensor's largest; slices go to their owners in an
all-to-all, are averaged there in fp32, and come back in fp16. All workers get the same bits.

`over(group)` is for ranks that live and die together. `Workers` are islands: each its own program,
in no common process group, whom one's death would end too. They share a torch Store, and meet in
turns, each of which has its keys there:

1. Who arrives says so. When all who live of the last turn are there, or `timeout` seconds after it
   came, any member proposes who takes part; compare_set lets the first proposal stand.
2. These make a gloo group for this turn alone, and average.
3. Who holds the whole result votes; "commit" is proposed by who sees all votes, "abort" by who had
   an error, or waited too long. The first word stands. After a commit all who live apply the
   same result, which all had voted to have; after an abort nobody does, and what is left of them
   takes the next turn, from inputs that are as they were.

Each beats in the store; whose beats stop is dead, and not waited for. Who starts while a run is
under way, or was left out as too slow, takes part in the next turn with nothing: a member sends it
the start weights and the momentum, and the turn's mean takes all of them to the same place.

The store must outlive workers: a folder that all can write to (FileStore: no server), or HOST:PORT
of `python parallelism/diloco.py --serve HOST:PORT`, a process that does nothing else. If it goes, all stop, and
go on from checkpoints with another. Links are gloo's: plain TCP, between machines that trust each
other, by the interface that GLOO_SOCKET_IFNAME names.

What it costs: two more copies of the weights (start, momentum), which device="cpu" offloads; all
wait for the slowest, up to `timeout`. When it loses: where links are fast, for steps apart teach
less than steps together; in few rounds from new weights, as momentum has to gather (the paper
begins from a trained model; numbers in BENCHMARKS.md); and H beyond about 500.
Hook: none, it takes parameters. Equivalence (test_all.py): lr 1 and momentum 0 is averaging, H = 1
of SGD is data parallelism, and the outer step is torch.optim.SGD's. Needs: torch. `python
diloco.py` starts 4 workers, kills one, checks itself and prints a table (--check: none).
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

POLL = 0.02  # seconds between looks into the store
FAILURES = 5  # turns in a row; then the error is no other worker's


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --------------------------------------------------------------------------------------------------
# The mean, and the step
# --------------------------------------------------------------------------------------------------


def all_reduce_mean(
    group: Any, x: Tensor, weight: float, sizes: list[int], dtype: torch.dtype
) -> tuple[Tensor, int]:
    """Mean over a group's ranks, weighted, of x (n,), which is tensors of these sizes end to end,
    sent in dtype: in x's dtype, the same bits on all ranks; and the bytes that this rank sent."""
    ranks = group.size()
    tops = torch.stack([x.new_tensor(weight), *(part.abs().max() for part in x.split(sizes))])
    table = x.new_empty(ranks, len(tops))
    group.allgather([list(table)], [tops]).wait()
    weights, tops = table[:, 0], table[:, 1:].amax(0)
    scales = torch.ldexp(torch.ones_like(tops), torch.frexp(tops).exponent)
    wire = x.new_zeros(-(-len(x) // ranks) * ranks, dtype=dtype)
    for out, part, scale in zip(wire[: len(x)].split(sizes), x.split(sizes), scales):
        out.copy_(part / scale)
    group.alltoall_base(received := torch.empty_like(wire), wire, [], []).wait()
    mean = weights @ received.view(ranks, -1).to(x.dtype) / weights.sum()
    group.allgather([list(wire.view(ranks, -1))], [mean.to(dtype)]).wait()
    whole = wire[: len(x)].to(x.dtype)
    for part, scale in zip(whole.split(sizes), scales):
        part.mul_(scale)
    sent = table[0].nbytes + 2 * wire.nbytes // ranks
    return whole, (ranks - 1) * sent


@dataclass(frozen=True)
class Round:
    """What a meeting came to."""

    number: int
    mean: Tensor  # (n,), of the pseudo-gradients
    workers: list[int]  # whose mean it is
    sent: int  # bytes, by this worker
    state: Tensor | None = None  # (2, n) start and momentum before it, for one who had not these


Exchange = Callable[["DiLoCo", Tensor, float], Round]  # (its state, pseudo-gradient, weight)


def process_group_exchange(group: Any = None) -> Exchange:
    """Meetings of the ranks of a process group; None: of all."""

    def exchange(outer: DiLoCo, delta: Tensor, weight: float) -> Round:
        ranks = group or dist.group.WORLD
        mean, sent = all_reduce_mean(ranks, delta, weight, outer.sizes, outer.dtype)
        return Round(outer.round, mean, list(range(ranks.size())), sent)

    return exchange


def _local(p: Tensor) -> Tensor:
    """A parameter's memory; of a DTensor this rank's shard."""
    return (p.to_local() if hasattr(p, "to_local") else p).detach()


class DiLoCo:
    """The outer optimizer of parameters that some inner one steps. lr=1, momentum=0: Local SGD.

    All workers begin with the same weights, of the same shapes, and the same settings. dtype: of
    what is sent. device: of start weights and momentum, in fp32 or the parameters' own if wider
    (None: the parameters' device). A pseudo-gradient counts by the steps it is made of.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        exchange: Exchange,
        *,
        every: int,
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        dtype: torch.dtype = torch.float16,
        device: str | torch.device | None = None,
    ):
        self.params = list(params)
        _check(len(self.params) > 0, "params are empty")
        _check(every > 0, f"every must be more than 0, not {every}")
        _check(lr > 0, f"lr must be more than 0, not {lr}")
        _check(0 <= momentum < 1, f"momentum must be from 0 to less than 1, not {momentum}")
        self.exchange, self.every, self.dtype = exchange, every, dtype
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self.sizes = [_local(p).numel() for p in self.params]
        first = _local(self.params[0])
        wide = torch.promote_types(first.dtype, torch.float32)
        self.state = first.new_zeros(2, sum(self.sizes), dtype=wide, device=device or first.device)
        self.start, self.velocity = self.state
        self.start.copy_(self._now())
        self.round = self.steps = 0  # rounds done, and inner steps since the last

    def _now(self) -> Tensor:
        return torch.cat([_local(p).flatten().to(self.state) for p in self.params])

    @property
    def settings(self) -> dict[str, Any]:
        """What must be the same for all."""
        names = "every", "lr", "momentum", "nesterov", "dtype"
        shapes = hashlib.sha256(str(self.sizes).encode()).hexdigest()[:8]
        return {name: str(getattr(self, name)) for name in names} | {"parameters": shapes}

    @torch.no_grad()
    def step(self) -> Round | None:
        """After every step of the inner optimizer; meets the others in each `every`-th. ValueError
        for weights that are not finite, which would be everybody's."""
        self.steps += 1
        if self.steps < self.every:
            return None
        delta = self.start - self._now()
        _check(bool(delta.isfinite().all()), f"weights are not finite in round {self.round}")
        return self._synchronize(delta)

    @torch.no_grad()
    def join(self) -> Round:
        """Meet the others with nothing, for what they have."""
        self.steps = 0
        return self._synchronize(torch.zeros_like(self.start))

    def _synchronize(self, delta: Tensor) -> Round:
        done = self.exchange(self, delta, float(self.steps))
        if done.state is not None:
            self.state.copy_(done.state)
        self.velocity.mul_(self.momentum).add_(done.mean)
        change = done.mean + self.momentum * self.velocity if self.nesterov else self.velocity
        self.start.sub_(self.lr * change)
        for p, new in zip(self.params, self.start.split(self.sizes)):
            _local(p).copy_(new.view(_local(p).shape))
        self.round, self.steps = done.number + 1, 0
        return done

    def state_dict(self) -> dict[str, Any]:
        """With the parameters and the inner optimizer's state, all that a checkpoint needs."""
        return {"state": self.state, "round": self.round, "steps": self.steps}

    def load_state_dict(self, held: dict[str, Any]) -> None:
        self.state.copy_(held["state"])
        self.round, self.steps = int(held["round"]), int(held["steps"])


# --------------------------------------------------------------------------------------------------
# Workers that come and go
# --------------------------------------------------------------------------------------------------


def open_store(at: str, timeout: float = 60.0) -> dist.Store:
    """Of HOST:PORT, which `python parallelism/diloco.py --serve` listens at, or of a folder."""
    host, _, port = at.rpartition(":")
    if host and port.isdigit():
        wait = timedelta(seconds=timeout)
        try:
            return dist.TCPStore(host, int(port), timeout=wait, wait_for_workers=False)
        except RuntimeError:
            raise ValueError(f"no store at {at}: start python parallelism/diloco.py --serve {at}") from None
    Path(at).mkdir(parents=True, exist_ok=True)
    return dist.FileStore(str(Path(at) / "store"))


class ElasticExchange:
    """Meetings of the workers 0..n - 1 that are there (`DiLoCo`'s exchange). at: where the store
    is, with nothing in it of another run. timeout: seconds that a worker may be silent, or come
    later than another, or an operation of a turn may last. about: what must be the same for all,
    beside DiLoCo's settings. Call `begin` before the first step, and `close` at the end. A worker
    that is started again takes the place of the one of its number.
    """

    def __init__(
        self, at: str, worker: int, n: int, *, timeout: float = 60.0,
        run_config: dict[str, Any] | None = None,
    ):  # fmt: skip
        _check(0 <= worker < n, f"worker must be from 0 to {n - 1}, not {worker}")
        _check(timeout > 0, f"timeout must be more than 0, not {timeout}")
        self.at, self.worker, self.n, self.timeout = at, worker, n, timeout
        self.store, self.token, self.run_config = open_store(at, timeout), uuid.uuid4().hex, run_config or {}
        self.joining = True  # without the run's state
        self._last_heartbeat: dict[int, tuple[bytes, float]] = {}  # of each: last beat, when it was new
        self._last_announcement: dict[int, tuple[int, str]] = {}  # of each: the last turn that it came to
        self._expected = set(range(n))  # those of the last turn: others come when they come
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._heartbeat_loop, daemon=True)

    # ---- who lives ----

    def begin(self, round: int) -> bool:
        """Whether the run is in another round than this one: then `join` first. Else waits until
        all n have begun, or `timeout` is over."""
        self.store.set(f"owner/{self.worker}", self.token)
        number = int(self.store.compare_set("turn", "", f"0 {round}").split()[1])
        self.joining = number != round
        self._heartbeat(self.store)
        self._thread.start()
        end = time.monotonic() + self.timeout
        while not self.joining and not all(map(self._is_alive, range(self.n))):
            if time.monotonic() > end:
                break
            time.sleep(POLL)
        return self.joining

    def _heartbeat_loop(self) -> None:
        store = open_store(self.at, self.timeout)  # one is not for two threads
        while not self._closed.wait(min(1.0, self.timeout / 8)):
            try:
                self._heartbeat(store)
            except RuntimeError:  # the store is gone: whoever meets will say so
                return

    def _heartbeat(self, store: dist.Store) -> None:
        """Say that this worker lives, and note who else has said so since. No clock is compared."""
        role = "late" if self.joining else "member"
        store.set(f"beat/{self.worker}", f"{role} {self.token} {time.monotonic()}")
        for i in range(self.n):
            beat = store.get(f"beat/{i}") if store.check([f"beat/{i}"]) else b""
            if beat and beat != self._last_heartbeat.get(i, (b"", 0.0))[0]:
                self._last_heartbeat[i] = beat, time.monotonic()

    def _is_alive(self, worker: int, role: bytes = b"") -> bool:
        beat, when = self._last_heartbeat.get(worker, (b"left", 0.0))
        there = not beat.startswith(b"left") and beat.startswith(role)
        return there and time.monotonic() - when < self.timeout

    def close(self) -> None:
        """Leave: others do not wait for this worker."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.store.set(f"beat/{self.worker}", "left")

    # ---- a meeting ----

    def __call__(self, outer: DiLoCo, delta: Tensor, weight: float) -> Round:
        _check(bool(self._last_heartbeat), "begin(round) comes before the first meeting")
        own = outer.settings | self.run_config
        run = json.loads(self.store.compare_set("run", "", json.dumps(own)))
        other = ", ".join(f"{k} {own.get(k)}, not {run.get(k)}" for k in run | own
                          if own.get(k) != run.get(k))  # fmt: skip
        _check(not other, f"this worker differs from the run of this store: {other}")
        failed = 0
        while True:
            owner = self.store.get(f"owner/{self.worker}").decode()
            _check(owner == self.token, f"worker {self.worker} was started again: this one leaves")
            turn, number = self._current_attempt()
            self.joining = weight == 0 or number != outer.round
            members = self._form_group(turn)
            if [self.worker, self.token, self.joining] not in members:
                self._wait_for_next_attempt(turn, number, members)
                continue
            self._expected = {i for i, _, _ in members}
            try:
                done = self._reduce(turn, number, members, outer, delta, weight)
            except RuntimeError:  # a peer has died, or is too slow
                failed, done = failed + 1, None
                if failed == FAILURES:
                    raise
            if self._vote(turn, number, members, done is not None):
                self.joining = False
                return done

    def _form_group(self, turn: int) -> list[list[Any]]:
        """The members of this turn, (worker, token, late) each."""
        me, end = [self.worker, self.token, self.joining], time.monotonic() + self.timeout
        self.store.set(f"{turn}/here/{self.worker}", json.dumps(me))
        while not self.store.check([f"{turn}/members"]):
            here = self._announced(turn)
            others = self._expected - {i for i, _, _ in here}
            patient = time.monotonic() < end
            if not self.joining and me in here and not (patient and any(map(self._is_alive, others))):
                self.store.compare_set(f"{turn}/members", "", json.dumps(here))
            lost = self.joining and not any(self._is_alive(i, b"member") for i in range(self.n))
            _check(patient or not lost, "no worker that lives has the run's weights: resume all "
                   "with another, empty, store")  # fmt: skip
            time.sleep(POLL)
        return json.loads(self.store.get(f"{turn}/members"))

    def _announced(self, turn: int) -> list[list[Any]]:
        keys = [f"{turn}/here/{i}" for i in range(self.n)]
        here = [json.loads(self.store.get(key)) for key in keys if self.store.check([key])]
        for i, token, late in here:
            if self._last_announcement.get(i) != (turn, token):  # a sign of life, once, as a beat is
                self._last_announcement[i] = turn, token
                role = "late" if late else "member"
                self._last_heartbeat[i] = f"{role} {token}".encode(), time.monotonic()
        return here

    def _current_attempt(self) -> tuple[int, int]:
        """The turn that is next or under way, and which round it is to make."""
        turn, number = self.store.get("turn").split()
        return int(turn), int(number)

    def _reduce(
        self, turn: int, number: int, members: list[list[Any]], outer: DiLoCo, delta: Tensor,
        weight: float,
    ) -> Round:  # fmt: skip
        """The mean, by a group of this turn's own; to those who are late also the state."""
        ids, late = [i for i, _, _ in members], [late for _, _, late in members]
        rank, source, sent, state = ids.index(self.worker), late.index(False), 0, None
        wait, store = timedelta(seconds=self.timeout), dist.PrefixStore(f"{turn}/gloo", self.store)
        group = dist.ProcessGroupGloo(store, rank, len(members), wait)
        if self.joining:
            state = torch.empty(outer.state.shape, dtype=outer.state.dtype)
            group.recv([state], source, 0).wait()
        for joiner in [r for r in range(len(ids)) if late[r]] if rank == source else ():
            group.send([outer.state.cpu()], joiner, 0).wait()
            sent += outer.state.nbytes
        delta, weight = (torch.zeros_like(delta), 0.0) if self.joining else (delta, weight)
        mean, more = all_reduce_mean(group, delta.cpu(), weight, outer.sizes, outer.dtype)
        workers = [i for i, _, late in members if not late]
        return Round(number, mean.to(outer.state.device), workers, sent + more, state)

    def _vote(self, turn: int, number: int, members: list[list[Any]], ok: bool) -> bool:
        """Whether the turn's result counts: all that had a hand in it say the same."""
        verdict, word, end = f"{turn}/verdict", "", time.monotonic() + self.timeout
        if ok:
            self.store.set(f"{turn}/ok/{self.worker}", "1")
        while not word and not self.store.check([verdict]):
            missing = [i for i, _, _ in members if not self.store.check([f"{turn}/ok/{i}"])]
            if not missing:
                word = "commit"
            elif not ok or time.monotonic() > end or not all(map(self._is_alive, missing)):
                word = "abort"
            else:
                time.sleep(POLL)
        return self._decide(turn, number, word or "abort")

    def _decide(self, turn: int, number: int, word: str) -> bool:
        """End a turn with the first word said of it; whether that was "commit"."""
        first = self.store.compare_set(f"{turn}/verdict", "", word)
        after = f"{turn + 1} {number + (first == b'commit')}"
        self.store.compare_set("turn", f"{turn} {number}", after)
        return first == b"commit"

    def _wait_for_next_attempt(self, turn: int, number: int, members: list[list[Any]]) -> None:
        while self._current_attempt()[0] == turn:
            if not any(self._is_alive(i) for i, _, _ in members if i != self.worker):
                self._decide(turn, number, "abort")
            time.sleep(POLL)


# --------------------------------------------------------------------------------------------------
# Self-check
# --------------------------------------------------------------------------------------------------


def serve_store(at: str) -> None:
    """Keep a store at HOST:PORT until killed."""
    host, _, port = at.rpartition(":")
    _check(bool(host) and port.isdigit(), f"--serve {at}: must be HOST:PORT")
    store = dist.TCPStore(host, int(port), is_master=True, wait_for_workers=False)
    print(f"a store at {host}:{store.port}", flush=True)
    threading.Event().wait()


def _example(worker: int, at: str, rounds: int, dies: int | None, told: Any) -> None:
    """A regression on this worker's own 256 samples, 5 steps of AdamW a round, 4 workers."""
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(worker)
    x, w = torch.randn(256, 16, generator=rng), torch.zeros(16, requires_grad=True)
    inner, workers = torch.optim.AdamW([w], lr=0.03), ElasticExchange(at, worker, 4, timeout=5.0)
    outer = DiLoCo([w], workers, every=5, momentum=0.5)
    met, loss = outer.join() if workers.begin(outer.round) else None, torch.tensor(math.nan)
    while True:
        while outer.round == 6 and worker < 3 and len(workers._announced(workers._current_attempt()[0])) == 0:
            time.sleep(POLL)  # worker 3 is being started again
        if met is not None:
            told.put((met.number, met.workers, w.tolist(), loss.item(), met.bytes_sent))
            if outer.round == rounds:
                break
        loss = (x @ w - x.sum(1)).square().mean()
        loss.backward()
        inner.step(), inner.zero_grad()
        if (outer.round, outer.steps) == (dies, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        met = outer.step()
    workers.close()


def check() -> list[str]:
    """4 workers; one is killed in the midst of a round and started again: all go on, whoever meets
    has the same weights, and the loss falls. A line for each round."""
    with tempfile.TemporaryDirectory() as at:
        fork, rounds = multiprocessing.get_context("fork"), 12
        told, got = fork.SimpleQueue(), []
        begin = lambda i, dies: fork.Process(target=_example, args=(i, at, rounds, dies, told))
        started = [begin(i, 3 if i == 3 else None) for i in range(4)]
        for p in started:
            p.start()
        started[3].join()
        started[3] = begin(3, None)
        started[3].start()
        while any(p.is_alive() for p in started) or not told.empty():
            got += [told.get()] if not told.empty() else []
            time.sleep(POLL / 10)
        assert [p.exitcode for p in started] == [0] * 4, [p.exitcode for p in started]
    lines = []
    for number in range(rounds):
        _, ids, weights, losses, sent = zip(*(told for told in got if told[0] == number))
        assert all(w == weights[0] for w in weights) and all(i == ids[0] for i in ids)
        worst = max(loss for loss in losses if not math.isnan(loss))
        lines.append(f"{number:>6}{str(ids[0]):>14}{worst:>12.2e}{max(bytes_sent):>8}")
    assert "[0, 1, 2, 3]" in lines[2] and "[0, 1, 2] " in lines[3], lines
    assert worst < 0.1, lines
    return lines


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--serve":
        serve_store(sys.argv[2])
        return
    lines = check()
    if "--check" not in sys.argv:
        print(f"{'round':>6}{'mean of':>14}{'worst loss':>12}{'bytes':>8}", *lines, sep="\n")


if __name__ == "__main__":
    main()
