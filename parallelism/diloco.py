"""DiLoCo: low-communication data parallelism, with fault-tolerant, elastic workers.

Data parallelism all-reduces gradients in every step. If workers synchronize only every H steps,
communication falls to 1/H. Local SGD (Stich, arXiv:1805.09767) averages the weights. DiLoCo
(Douillard et al., arXiv:2311.08105) averages the workers' weight changes, start - current, as a
"pseudo-gradient" and applies one step of an outer optimizer, SGD with Nesterov momentum, to the
start weights. With outer lr 1 and momentum 0 this is weight averaging. The inner optimizer, AdamW,
keeps its state on each worker.

    outer = DiLoCo(model.parameters(), process_group_exchange(group), every=500)
    for batch in batches:  # this worker's shard of the data
        loss(batch).backward(); inner.step(); inner.zero_grad()
        outer.step()  # every 500th call synchronizes

`all_reduce_mean` sends fp16, as OpenDiLoCo does (arXiv:2407.07852), and adds in fp32. Each tensor
is scaled by a power of two above its largest value on any worker, so nothing overflows and the
rounding error is 2^-11 of a value, or 2^-25 of the tensor's largest. An all-to-all sends fp16
slices to their owners, which average them in fp32, and an all-gather returns the means in fp16. All
workers get the same bits.

`process_group_exchange(group)` is for ranks of one job, which fail together. `ElasticExchange` is
for workers that are separate jobs, so that one can fail, restart or join alone. They coordinate
through a torch Store, in attempts, each with its own keys:

1. Workers announce themselves. When all live members of the last attempt have, or after `timeout`
   seconds, any member proposes the group; compare_set makes the first proposal final.
2. The group creates a gloo process group for this attempt and averages.
3. Each worker with the full result votes. One that sees all votes proposes "commit", one that had
   an error or timed out "abort"; the first proposal is final. After a commit, all live workers
   apply the same result; after an abort none does, and the next attempt has the same inputs.

A worker without heartbeats is dead and is not waited for. One that joins, or was excluded as too
slow, takes part with weight 0: a member sends it the start weights and the momentum.

torchft has such a vote too (training/replica_groups.py uses it); this one is kept because it needs
no server, sends half the bytes, and has a joining worker take part in a round with weight 0.

The store must outlive the workers: a shared folder (FileStore, no server), or HOST:PORT of
`python parallelism/diloco.py --serve HOST:PORT`. If it fails, all workers stop, and resume from
checkpoints with a new store. The store listens at HOST alone, and all who reach it can write to it;
Gloo's TCP is unencrypted: the network must be trusted.

Cost: two copies of the weights (start, momentum), which device="cpu" offloads; every round waits
for the slowest worker, up to `timeout`. When it loses: on fast links, as local steps reduce the
loss less than synchronous steps; in few rounds from random weights, as outer momentum builds up
slowly (the paper starts from a trained model; numbers in BENCHMARKS.md); with H above about 500.
Hook: none, it takes parameters. Equivalence (test_all.py): lr 1 and momentum 0 equals weight
averaging, with H = 1 too, and the outer step equals torch.optim.SGD's.
Needs: torch. A check and a table: `torchrun --standalone --nproc-per-node 2 parallelism/diloco.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
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

POLL = 0.02  # seconds between polls of the store
MAX_FAILURES = 5  # failed attempts in a round before the error is raised


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --------------------------------------------------------------------------------------------------
# All-reduce and outer optimizer
# --------------------------------------------------------------------------------------------------


def all_reduce_mean(
    group: Any, x: Tensor, weight: float, sizes: list[int], dtype: torch.dtype
) -> tuple[Tensor, int]:
    """Weighted mean over a group's ranks of x (n,), concatenated tensors of these sizes, sent in
    `dtype`. Returns the mean in x's dtype, the same bits on all ranks, and the bytes this rank
    sent."""
    ranks = group.size()
    amax = torch.stack([x.new_tensor(weight), *(part.abs().max() for part in x.split(sizes))])
    table = x.new_empty(ranks, len(amax))
    group.allgather([list(table)], [amax]).wait()
    weights, amax = table[:, 0], table[:, 1:].amax(0)
    scales = torch.ldexp(torch.ones_like(amax), torch.frexp(amax).exponent)
    buffer = x.new_zeros(-(-len(x) // ranks) * ranks, dtype=dtype)
    for out, part, scale in zip(buffer[: len(x)].split(sizes), x.split(sizes), scales):
        out.copy_(part / scale)
    group.alltoall_base(received := torch.empty_like(buffer), buffer, [], []).wait()
    mean = weights @ received.view(ranks, -1).to(x.dtype) / weights.sum()
    group.allgather([list(buffer.view(ranks, -1))], [mean.to(dtype)]).wait()
    result = buffer[: len(x)].to(x.dtype)
    for part, scale in zip(result.split(sizes), scales):
        part.mul_(scale)
    bytes_per_rank = table[0].nbytes + 2 * buffer.nbytes // ranks
    return result, (ranks - 1) * bytes_per_rank


@dataclass(frozen=True)
class Round:
    """Result of a synchronization round."""

    number: int
    mean: Tensor  # (n,), of the pseudo-gradients
    workers: list[int]  # ids of the workers averaged
    bytes_sent: int  # by this worker
    state: Tensor | None = None  # (2, n) start and momentum before the round, for a joining worker


Exchange = Callable[["DiLoCo", Tensor, float], Round]  # (outer, pseudo-gradient, weight)


def process_group_exchange(group: Any = None) -> Exchange:
    """An Exchange among the ranks of a process group (None: the default group)."""

    def exchange(outer: DiLoCo, delta: Tensor, weight: float) -> Round:
        ranks = group or dist.group.WORLD
        mean, nbytes = all_reduce_mean(ranks, delta, weight, outer.sizes, outer.dtype)
        return Round(outer.round, mean, list(range(ranks.size())), nbytes)

    return exchange


def _local(p: Tensor) -> Tensor:
    """A parameter's local tensor: this rank's shard of a DTensor."""
    return (p.to_local() if hasattr(p, "to_local") else p).detach()


class DiLoCo:
    """The outer optimizer of parameters that an inner optimizer updates. lr=1, momentum=0: Local
    SGD.

    All workers must start with the same weights, shapes and settings. every: inner steps between
    rounds. dtype: of the communication. device: of start weights and momentum, which are fp32 or
    the parameters' dtype if wider (None: the parameters' device). Pseudo-gradients are weighted by
    their number of inner steps.
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
        self.start.copy_(self._flat_params())
        self.round = self.steps = 0  # rounds done, inner steps since the last

    def _flat_params(self) -> Tensor:
        return torch.cat([_local(p).flatten().to(self.state) for p in self.params])

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that must be equal on all workers."""
        names = "every", "lr", "momentum", "nesterov", "dtype"
        shapes = hashlib.sha256(str(self.sizes).encode()).hexdigest()[:8]
        return {name: str(getattr(self, name)) for name in names} | {"parameters": shapes}

    @torch.no_grad()
    def step(self) -> Round | None:
        """Call after every inner step; every `every`-th call synchronizes. ValueError if this
        worker's weights are not finite, before they reach the others."""
        self.steps += 1
        if self.steps < self.every:
            return None
        delta = self.start - self._flat_params()
        _check(bool(delta.isfinite().all()), f"weights are not finite in round {self.round}")
        return self._synchronize(delta)

    @torch.no_grad()
    def join(self) -> Round:
        """Take part in a round with weight 0, to receive the state of the running job."""
        self.steps = 0
        return self._synchronize(torch.zeros_like(self.start))

    def _synchronize(self, delta: Tensor) -> Round:
        done = self.exchange(self, delta, float(self.steps))
        if done.state is not None:
            self.state.copy_(done.state)
        self.velocity.mul_(self.momentum).add_(done.mean)
        update = done.mean + self.momentum * self.velocity if self.nesterov else self.velocity
        self.start.sub_(self.lr * update)
        for p, new in zip(self.params, self.start.split(self.sizes)):
            _local(p).copy_(new.view(_local(p).shape))
        self.round, self.steps = done.number + 1, 0
        return done

    def state_dict(self) -> dict[str, Any]:
        """Outer state; a checkpoint also needs the parameters and the inner optimizer's state."""
        return {"state": self.state, "round": self.round, "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state.copy_(state_dict["state"])
        self.round, self.steps = int(state_dict["round"]), int(state_dict["steps"])


# --------------------------------------------------------------------------------------------------
# Elastic workers
# --------------------------------------------------------------------------------------------------


def _host_and_port(address: str) -> tuple[str, int] | None:
    """The parts of HOST:PORT; None for the name of a folder."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return None
    _check(int(port) < 2**16, f"{address}: the port must be below 65536")
    return host, int(port)


def open_store(address: str, timeout: float = 60.0) -> dist.Store:
    """The store at HOST:PORT, served by `python parallelism/diloco.py --serve`, or in a folder."""
    if at := _host_and_port(address):
        limit = timedelta(seconds=timeout)
        try:
            return dist.TCPStore(*at, timeout=limit, wait_for_workers=False)
        except RuntimeError:
            command = f"python parallelism/diloco.py --serve {address}"
            raise ValueError(f"no store at {address}: start {command}") from None
    try:
        Path(address).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ValueError(f"no store in {address}: {e.strerror}; name a folder") from None
    return dist.FileStore(str(Path(address) / "store"))


def serve_store(address: str) -> None:
    """Serve a store at HOST:PORT until killed."""
    at = _host_and_port(address)
    _check(at is not None, f"--serve {address}: must be HOST:PORT")
    try:
        store = _listen(*at)
    except (OSError, RuntimeError):
        raise ValueError(f"--serve {address}: not an address of this machine, or in use") from None
    print(f"serving a store at {at[0]}:{store.port}", flush=True)
    threading.Event().wait()


def _listen(host: str, port: int) -> dist.TCPStore:
    """A store that listens at this address alone: one that opens its socket itself listens on all
    interfaces."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family)
    port, fd = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd, use_libuv=True
    )


class ElasticExchange:
    """An Exchange among the live workers of 0..num_workers - 1. address: of the store, which must
    not contain another run. timeout: maximum seconds without a heartbeat, to wait for other
    workers, and for a communication operation. run_config: settings that must be equal on all
    workers, in addition to DiLoCo's. Call `begin` before the first step and `close` at the end. A
    restarted worker replaces the one with its index.
    """

    def __init__(
        self, address: str, worker: int, num_workers: int, *, timeout: float = 60.0,
        run_config: dict[str, Any] | None = None,
    ):  # fmt: skip
        ok = 0 <= worker < num_workers
        _check(ok, f"worker must be from 0 to {num_workers - 1}, not {worker}")
        _check(timeout > 0, f"timeout must be more than 0, not {timeout}")
        self.address, self.worker, self.num_workers = address, worker, num_workers
        self.timeout, self.run_config = timeout, run_config or {}
        self.store, self.token = open_store(address, timeout), uuid.uuid4().hex
        self.joining = True  # does not have the run's state
        # by worker: (last heartbeat, local time when it was first seen)
        self._last_heartbeat: dict[int, tuple[bytes, float]] = {}
        self._announced_attempt: dict[int, tuple[int, str]] = {}  # by worker: (attempt, token)
        self._expected = set(range(num_workers))  # members of the last attempt, to wait for
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._heartbeat_loop, daemon=True)

    # ---- heartbeats ----

    def begin(self, round: int) -> bool:
        """Start heartbeats. Returns True if the run is in another round than `round`; the worker
        must then call DiLoCo.join. Otherwise waits, at most `timeout`, until all workers have
        begun."""
        self.store.set(f"owner/{self.worker}", self.token)
        number = int(self.store.compare_set("attempt", "", f"0 {round}").split()[1])
        self.joining = number != round
        self._heartbeat(self.store)
        self._thread.start()
        end = time.monotonic() + self.timeout
        while not self.joining and not all(map(self._is_alive, range(self.num_workers))):
            if time.monotonic() > end:
                break
            time.sleep(POLL)
        return self.joining

    def _heartbeat_loop(self) -> None:
        store = open_store(self.address, self.timeout)  # a store is not thread-safe
        while not self._closed.wait(min(1.0, self.timeout / 8)):
            try:
                self._heartbeat(store)
            except RuntimeError:  # the store is gone: the next round raises
                return

    def _heartbeat(self, store: dist.Store) -> None:
        """Write this worker's heartbeat and read the others'. Workers' clocks are not compared."""
        role = "joining" if self.joining else "member"
        store.set(f"heartbeat/{self.worker}", f"{role} {self.token} {time.monotonic()}")
        for i in range(self.num_workers):
            beat = store.get(f"heartbeat/{i}") if store.check([f"heartbeat/{i}"]) else b""
            if beat and beat != self._last_heartbeat.get(i, (b"", 0.0))[0]:
                self._last_heartbeat[i] = beat, time.monotonic()

    def _is_alive(self, worker: int, role: bytes = b"") -> bool:
        beat, when = self._last_heartbeat.get(worker, (b"left", 0.0))
        active = not beat.startswith(b"left") and beat.startswith(role)
        return active and time.monotonic() - when < self.timeout

    def close(self) -> None:
        """Leave the run, so that other workers do not wait for this one."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.store.set(f"heartbeat/{self.worker}", "left")

    # ---- a round ----

    def __call__(self, outer: DiLoCo, delta: Tensor, weight: float) -> Round:
        _check(bool(self._last_heartbeat), "call begin(round) before the first step")
        own = outer.settings | self.run_config
        run = json.loads(self.store.compare_set("run", "", json.dumps(own)))
        differences = ", ".join(f"{k} {own.get(k)}, not {run.get(k)}" for k in run | own
                                if own.get(k) != run.get(k))  # fmt: skip
        _check(not differences, f"settings differ from the run of this store: {differences}")
        failed = 0
        while True:
            owner = self.store.get(f"owner/{self.worker}").decode()
            _check(owner == self.token, f"worker {self.worker} was started again; this one stops")
            attempt, number = self._current_attempt()
            self.joining = weight == 0 or number != outer.round
            members = self._form_group(attempt)
            if [self.worker, self.token, self.joining] not in members:
                self._wait_for_next_attempt(attempt, number, members)
                continue
            self._expected = {i for i, _, _ in members}
            try:
                done = self._reduce(attempt, number, members, outer, delta, weight)
            except RuntimeError:  # a peer died or timed out
                failed, done = failed + 1, None
                if failed == MAX_FAILURES:
                    raise
            if self._vote(attempt, number, members, done is not None):
                self.joining = False
                return done

    def _form_group(self, attempt: int) -> list[list[Any]]:
        """The members of this attempt, (worker, token, joining) each."""
        me, end = [self.worker, self.token, self.joining], time.monotonic() + self.timeout
        self.store.set(f"{attempt}/announced/{self.worker}", json.dumps(me))
        while not self.store.check([f"{attempt}/members"]):
            announced = self._announced(attempt)
            others = self._expected - {i for i, _, _ in announced}
            in_time = time.monotonic() < end
            wait = in_time and any(map(self._is_alive, others))
            if not self.joining and me in announced and not wait:
                self.store.compare_set(f"{attempt}/members", "", json.dumps(announced))
            workers = range(self.num_workers)
            lost = self.joining and not any(self._is_alive(i, b"member") for i in workers)
            _check(in_time or not lost, "no live worker has the run's weights: resume all workers "
                   "with a new, empty store")  # fmt: skip
            time.sleep(POLL)
        return json.loads(self.store.get(f"{attempt}/members"))

    def _announced(self, attempt: int) -> list[list[Any]]:
        """The workers that have announced themselves, (worker, token, joining) each."""
        keys = [f"{attempt}/announced/{i}" for i in range(self.num_workers)]
        announced = [json.loads(self.store.get(key)) for key in keys if self.store.check([key])]
        for i, token, joining in announced:
            if self._announced_attempt.get(i) != (attempt, token):  # counts as a heartbeat, once
                self._announced_attempt[i] = attempt, token
                role = "joining" if joining else "member"
                self._last_heartbeat[i] = f"{role} {token}".encode(), time.monotonic()
        return announced

    def _current_attempt(self) -> tuple[int, int]:
        """(attempt, round): the current or next attempt and the round it is for."""
        attempt, number = self.store.get("attempt").split()
        return int(attempt), int(number)

    def _reduce(
        self, attempt: int, number: int, members: list[list[Any]], outer: DiLoCo, delta: Tensor,
        weight: float,
    ) -> Round:  # fmt: skip
        """Average in a process group of this attempt; joining workers also receive the state."""
        ids, joining = [i for i, _, _ in members], [joining for _, _, joining in members]
        rank, source, nbytes, state = ids.index(self.worker), joining.index(False), 0, None
        timeout = timedelta(seconds=self.timeout)
        store = dist.PrefixStore(f"{attempt}/gloo", self.store)
        group = dist.ProcessGroupGloo(store, rank, len(members), timeout)
        if self.joining:
            state = torch.empty(outer.state.shape, dtype=outer.state.dtype)
            group.recv([state], source, 0).wait()
        for joiner in [r for r in range(len(ids)) if joining[r]] if rank == source else ():
            group.send([outer.state.cpu()], joiner, 0).wait()
            nbytes += outer.state.nbytes
        delta, weight = (torch.zeros_like(delta), 0.0) if self.joining else (delta, weight)
        mean, more = all_reduce_mean(group, delta.cpu(), weight, outer.sizes, outer.dtype)
        workers = [i for i, _, joining in members if not joining]
        return Round(number, mean.to(outer.state.device), workers, nbytes + more, state)

    def _vote(self, attempt: int, number: int, members: list[list[Any]], ok: bool) -> bool:
        """Vote on the attempt's result. True, for all members, if it is committed."""
        decision, proposal, end = f"{attempt}/decision", "", time.monotonic() + self.timeout
        if ok:
            self.store.set(f"{attempt}/vote/{self.worker}", "1")
        while not proposal and not self.store.check([decision]):
            missing = [i for i, _, _ in members if not self.store.check([f"{attempt}/vote/{i}"])]
            if not missing:
                proposal = "commit"
            elif not ok or time.monotonic() > end or not all(map(self._is_alive, missing)):
                proposal = "abort"
            else:
                time.sleep(POLL)
        return self._decide(attempt, number, proposal or "abort")

    def _decide(self, attempt: int, number: int, proposal: str) -> bool:
        """End an attempt with the first proposal made; True if that was "commit"."""
        first = self.store.compare_set(f"{attempt}/decision", "", proposal)
        after = f"{attempt + 1} {number + (first == b'commit')}"
        self.store.compare_set("attempt", f"{attempt} {number}", after)
        return first == b"commit"

    def _wait_for_next_attempt(self, attempt: int, number: int, members: list[list[Any]]) -> None:
        while self._current_attempt()[0] == attempt:
            if not any(self._is_alive(i) for i, _, _ in members if i != self.worker):
                self._decide(attempt, number, "abort")
            time.sleep(POLL)


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def main() -> None:
    """A round with lr 1 and momentum 0 == the mean of the weights; milliseconds and bytes of a
    round beside an all-reduce of the gradients."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    if sys.argv[1:2] == ["--serve"]:
        try:
            return serve_store(" ".join(sys.argv[2:]))
        except ValueError as e:
            sys.exit(f"diloco.py: {e}")
    if "RANK" not in os.environ:
        sys.exit("run: torchrun --standalone --nproc-per-node 2 parallelism/diloco.py")
    gpu = torch.cuda.is_available()
    torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu")
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    n = 10**8 if gpu else 10**6
    torch.manual_seed(rank)
    x, weights = torch.randn(n), torch.zeros(n, requires_grad=True)
    outer = DiLoCo([weights], process_group_exchange(), every=1, lr=1.0, momentum=0.0)
    weights.data.copy_(x)
    done = outer.step()
    dist.all_reduce(x)
    # fp16 rounds by 2^-11 of a value, before and after the mean; no value is above 8
    assert (weights - x / ranks).abs().max() <= 2**-10 * 8
    for name, run, sent in (
        ("DiLoCo round", outer.step, done.bytes_sent),
        ("all-reduce", lambda: dist.all_reduce(x.zero_()), 2 * x.nbytes * (ranks - 1) // ranks),
    ):
        # the same number of runs on all ranks
        ms = 1e3 * Timer("run()", globals=dict(run=run)).timeit(10).mean
        if rank == 0:
            print(f"{n:,} weights, {ranks} ranks, {name}: {ms:.1f} ms, {sent / 1e6:.1f} MB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
