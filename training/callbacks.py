"""What a training run does besides training: memory checkpoints, hang detection, DiLoCo, profiling.

train.py's loop calls `phase` as each phase of a step begins, `after_update` when the weights have
changed, `after_step` when the step is logged and saved, `statistics` at each validation. A callback
overrides what it needs; what changes the step itself, DiLoCo and replica groups, the loop also
calls by name. recovery.py, watchdog.py, diloco.py and metrics.py have the mechanisms; this file
joins them to the loop.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import contextlib
import hashlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from parallelism.diloco import DiLoCo, ElasticExchange
from training.build import offload_folder
from training.checkpoint import CheckpointInfo, Checkpoints, ShardedTensor, read_full_tensors
from training.config import TrainConfig
from training.dist_env import NO_TIMEOUT, DistEnv, rank0_first, set_collective_timeout
from training.metrics import PeakMemory, log, profile_step
from training.recovery import MemoryCheckpoint
from training.state import TrainState
from training.watchdog import Watchdog, stragglers

RUN_ID = "run.id"  # file in OUT with a random id of the run
SIGTERM_GRACE = 10.0  # seconds for a step to finish after SIGTERM before the state is dumped
EXIT_HANG = 75  # exit code of a rank that timed out: EX_TEMPFAIL, try again


class Callback:
    """Does nothing; steps are counted from 1, and `step` is the one being made, or just made."""

    def restore(self, after: int) -> int | None:
        """Load a state newer than step `after`; returns its step. Collective, as all others."""

    def load(self, found: CheckpointInfo) -> None:
        """Load from a checkpoint on disk what `checkpoint` stored."""

    def start(self, step: int) -> None:
        """Called before the loop, with the number of finished steps."""

    def phase(self, step: int, name: str) -> None:
        """ "data", "forward and backward", "update", "logging" or "validation" begins."""

    def after_update(self, row: dict[str, Any]) -> None:
        """May add to the row of metrics.jsonl."""

    def statistics(self) -> dict[str, Any]:
        """Additions to the row of a validation."""
        return {}

    def checkpoint(self) -> tuple[dict[str, ShardedTensor], dict[str, Any]]:
        """Tensors and JSON metadata to store in a checkpoint."""
        return {}, {}

    def after_step(self, step: int) -> None:
        """The step is logged and, if due, being saved."""

    def failed(self) -> None:
        """A batch, a pass or a validation failed, perhaps because another rank died."""

    def finish(self, stopped: bool) -> None:
        """The loop has ended; stopped: by a signal."""

    def close(self) -> None:
        """The run ends, perhaps with an error: stop threads and connections."""


def _on_each(name: str) -> Any:
    """A method of Callbacks that calls the method `name` of each callback."""

    def call(self: Callbacks, *args: Any, **kwargs: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, name)(*args, **kwargs)

    return call


class Callbacks(Callback):
    """Several callbacks, called in turn."""

    load, phase, after_step = _on_each("load"), _on_each("phase"), _on_each("after_step")
    failed, finish, close = _on_each("failed"), _on_each("finish"), _on_each("close")
    start, after_update = _on_each("start"), _on_each("after_update")

    def __init__(self, callbacks: list[Callback], state: TrainState):
        self.callbacks, self.state = callbacks, state

    def add(self, callback: Any) -> Any:
        """Also call this one; returns it."""
        self.callbacks.append(callback)
        return callback

    def restore(self, after: int) -> int | None:
        return next((s for c in self.callbacks if (s := c.restore(after)) is not None), None)

    def statistics(self) -> dict[str, Any]:
        return {k: x for callback in self.callbacks for k, x in callback.statistics().items()}

    def checkpoint(self) -> tuple[dict[str, ShardedTensor], dict[str, Any]]:
        """The whole checkpoint: the training state and what the callbacks add."""
        tensors, metadata = self.state.sharded_state_dict(), self.state.metadata()
        for callback in self.callbacks:
            more_tensors, more_metadata = callback.checkpoint()
            tensors, metadata = tensors | more_tensors, metadata | more_metadata
        return tensors, metadata

    @contextlib.contextmanager
    def dump_on_error(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.failed()
            raise


class MemoryCheckpoints(Callback):
    """--memory-checkpoint-every: the state in this node's memory and a peer's (recovery.py), and a
    dump of the last consistent state when a rank dies or hangs."""

    def __init__(self, config: TrainConfig, state: TrainState, env: DistEnv):
        self.config, self.state, self.env = config, state, env
        self.lock, self.consistent_step = threading.Lock(), None
        out = config.out

        def write_run_id() -> None:
            if not (out / RUN_ID).exists():
                (out / RUN_ID).write_text(os.urandom(8).hex())

        rank0_first(env, write_run_id)
        name = hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:12]
        folder = config.memory_checkpoint_dir or Path(f"/dev/shm/sheaf-{os.getuid()}-{name}")
        group = dist.new_group(backend="gloo") if env.world > 1 else None
        run = (out / RUN_ID).read_text()  # an older run in the same folder has another id
        self.saver = MemoryCheckpoint(folder, f"{run}.{state.layout.shard_id}", group)

    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name, (_, x) in self.state.tensors().items()}

    def restore(self, after: int) -> int | None:
        """Load the newest memory checkpoint if it is newer than step `after` and its settings are
        this run's; without one, forget those of other runs."""
        auto = self.config.resume is not None or self.config.auto
        step = self.saver.newest() if auto else None
        if step is not None and step > after:
            tensors = self.tensors()
            backup = {name: x.clone() for name, x in tensors.items()}
            metadata = self.saver.get(step, tensors)
            if not (changed := self.config.changed_settings(metadata["run"])):
                self.state.load_metadata(metadata, step)
                self.state.sync_after_load()
                log(self.env, f"resumed after step {step} from memory")
                return step
            log(self.env, f"memory checkpoint of step {step} ignored: {changed[0]} has changed")
            for name, x in tensors.items():
                x.copy_(backup[name])
        if not after:
            self.saver.clear()
        return None

    def start(self, step: int) -> None:
        """Start a thread that dumps the state on SIGTERM if the main thread is blocked in a
        collective with a dead rank: torchrun kills the process 30 seconds later, and its state may
        be the only copy."""
        if self.env.world == 1:
            return
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

        def wait() -> None:
            while signal.SIGTERM not in os.read(read_end, 1):
                continue
            before = self.consistent_step
            time.sleep(SIGTERM_GRACE)
            if self.consistent_step is not None and self.consistent_step == before:
                self.failed()

        threading.Thread(target=wait, daemon=True).start()

    def phase(self, step: int, name: str) -> None:
        if name == "data":
            self.consistent_step = step - 1
        elif name == "update":  # weights may be half updated: the state must not be copied
            self.lock.acquire()
            self.consistent_step = None
        elif name == "logging":
            self.consistent_step = step
            self.lock.release()

    def after_step(self, step: int) -> None:
        if step % self.config.memory_checkpoint_every == 0:
            self.saver.put(step, self.tensors(), self.state.metadata())

    def failed(self) -> None:
        """Dump the state after the last step to this node's memory, without other ranks."""
        if not self.lock.acquire(blocking=False):
            return
        try:
            if self.consistent_step is not None:
                with torch.no_grad():
                    rest = self.tensors(), self.state.metadata()
                    self.saver.dump(self.consistent_step, *rest)
        finally:
            self.lock.release()

    def finish(self, stopped: bool) -> None:
        if not stopped:
            self.saver.clear()
            if self.config.memory_checkpoint_dir is None:
                with contextlib.suppress(OSError):  # other ranks still have copies there
                    self.saver.folder.rmdir()


class RankMonitor(Callback):
    """Reports ranks that hang, then ends this one so that torchrun restarts the run; at validations
    peak memory, the share of time that ranks wait for each other, and stragglers. Collectives time
    out only after the report, because NCCL then ends the process without a dump of the state."""

    def __init__(self, config: TrainConfig, env: DistEnv, memory: PeakMemory, on_hang: Any):
        self.config, self.env, self.memory, self.on_hang = config, env, memory, on_hang
        self.watchdog: Watchdog | None = None
        set_collective_timeout(NO_TIMEOUT)  # also of the groups of the mesh, while ranks load

    def start(self, step: int) -> None:
        timeout = self.config.hang_timeout
        first_timeout = 10 * timeout  # the first step compiles, and connects ranks
        if self.env.world > 1:
            seconds = max(2 * first_timeout, default_pg_timeout.total_seconds())
            set_collective_timeout(timedelta(seconds=min(seconds, NO_TIMEOUT.total_seconds())))
        report = lambda text: print(f"train.py: {text}", file=sys.stderr, flush=True)
        self.watchdog = Watchdog(
            self.env.store, self.env.rank, self.env.world, timeout=timeout,
            first_timeout=first_timeout, report=report, on_hang=self.exit,
        )  # fmt: skip

    def exit(self) -> None:
        """Called in the watchdog's thread."""
        try:
            self.on_hang()
        finally:
            os._exit(EXIT_HANG)

    def phase(self, step: int, name: str) -> None:
        self.watchdog.beat(step, name)

    def statistics(self) -> dict[str, Any]:
        local = [*self.watchdog.wait_times(), float(self.memory.bytes())]
        ranks = [local]
        if self.env.world > 1:
            dist.all_gather_object(ranks := [None] * self.env.world, local)
        waits, busy, memory = zip(*ranks)
        wait = sum(waits) / max(sum(waits) + sum(busy), 1e-9)
        row = {"peak_memory": int(max(memory)), "comm_wait": round(wait, 4)}
        slow = stragglers([*zip(waits, busy)]) if self.env.world > 1 else None
        return row | ({"stragglers": slow} if slow else {})

    def finish(self, stopped: bool) -> None:
        self.close()  # no timeout for the export

    def close(self) -> None:
        if self.watchdog is not None:
            self.watchdog.close()
            self.watchdog = None


class Profiler(Callback):
    """--profile STEP: a Chrome trace and memory of that step of this process."""

    def __init__(self, config: TrainConfig, memory: PeakMemory, rank: int):
        self.config, self.memory, self.rank = config, memory, rank
        self.profile, self.stats, self.step = contextlib.ExitStack(), {}, None

    def phase(self, step: int, name: str) -> None:
        if self.step is None:  # the first step: DiLoCo may have begun after that of the checkpoint
            self.step = step - 1 + self.config.profile
        if name == "data" and step == self.step:
            profile = profile_step(self.config.out, self.memory, self.rank)
            self.stats = self.profile.enter_context(profile)

    def after_update(self, row: dict[str, Any]) -> None:
        self.profile.close()
        row |= self.stats
        self.stats = {}


class OffloadFolder(Callback):
    """--offload FOLDER: removes the memory-mapped optimizer states when the run ends."""

    def __init__(self, config: TrainConfig):
        self.folder = offload_folder(config)

    def finish(self, stopped: bool) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class DiLoCoWorker(Callback):
    """--diloco: one DiLoCo worker. Its rank 0 synchronizes full weights on the CPU with the others,
    so that a worker can use any parallelism. Expert biases are not synchronized."""

    def __init__(
        self, config: TrainConfig, state: TrainState, checkpoints: Checkpoints, env: DistEnv
    ):
        self.model, self.layout, self.env = state.model, state.layout, env
        self.checkpoints, self.every, self.is_rank0 = checkpoints, config.diloco, env.rank == 0
        self.full_params = None if self.layout.mesh is None else {}  # filled on rank 0 alone
        self.gather_full_params()
        if self.is_rank0:
            files = (config.out / f"tokenizer.{kind}" for kind in ("model", "json"))
            content = next(path for path in files if path.exists()).read_bytes()
            same = {"tokenizer": hashlib.sha256(content).hexdigest()[:8]}  # on all workers
            for name in ("seed", "batch_size", "seq_len", "steps", "lr", "diloco_workers"):
                same["--" + name.replace("_", "-")] = getattr(config, name)
            self.workers = ElasticExchange(
                config.diloco_rendezvous, config.diloco_worker, config.diloco_workers,
                timeout=config.diloco_timeout, run_config=same,
            )  # fmt: skip
            params = self.full_params
            params = self.model.parameters() if params is None else params.values()
            outer = dict(every=self.every, lr=config.outer_lr, momentum=config.outer_momentum)
            self.outer = DiLoCo(params, self.workers, device="cpu", **outer)

    def checkpoint(self) -> tuple[dict[str, ShardedTensor], dict[str, Any]]:
        if not self.is_rank0:
            return {}, {}
        metadata = self.outer.state_dict()
        state = metadata.pop("state").cpu()
        tensor = ShardedTensor(state, state.shape, [((0,) * state.dim(), ())])
        return {"outer.state": tensor}, {"outer": metadata}

    def load(self, found: CheckpointInfo) -> None:
        if self.is_rank0:
            state = read_full_tensors(found.path, ["outer.state"])["outer.state"]
            self.outer.load_state_dict({"state": state, **found.metadata["outer"]})

    def join(self, step: int) -> int:
        """Continue with the other workers' step if they are ahead."""
        late = self.is_rank0 and self.workers.begin(self.outer.round)
        return self.sync(join=True)["step"] if self.broadcast_object(late) else step

    def synchronize(self, step: int, row: dict[str, Any]) -> int:
        """Synchronize every `every` steps. May add to the row of metrics.jsonl; returns the number
        of finished steps, which is higher if the other workers are ahead."""
        self.checkpoints.wait_for_staging()
        if step % self.every == 0:
            row |= self.sync()
        elif self.is_rank0:
            self.outer.step()
        return row["step"]

    def sync(self, join: bool = False) -> dict[str, Any]:
        """Synchronize with the other workers; join: this worker is late and takes their weights.
        Returns metrics of the round."""
        model, layout, metrics = self.model, self.layout, None
        self.gather_full_params()
        if self.is_rank0:
            done = self.outer.join() if join else self.outer.step()
            metrics = {"step": self.outer.round * self.every, "round": done.number}
            metrics |= {"workers": done.workers, "sent_bytes": done.bytes_sent}
        local_params = dict(model.named_parameters())
        shapes = {} if self.full_params is None else layout.full_shapes(model)
        for name, shape in shapes.items():
            full = self.full_params[name] if self.is_rank0 else torch.empty(shape)
            dist.broadcast(full := full.to(self.env.device), 0)
            layout.copy_shards_(local_params, name, full)
        return self.broadcast_object(metrics)

    @torch.no_grad()
    def gather_full_params(self) -> None:
        """Gather all shards into full_params on rank 0."""
        params = {} if self.full_params is None else dict(self.model.named_parameters())
        for name, x in self.layout.full_tensors(params) if params else ():
            if self.is_rank0:
                self.full_params.setdefault(name, torch.empty(x.shape)).copy_(x)

    def broadcast_object(self, x: Any) -> Any:
        """Rank 0's object, on all ranks."""
        if self.full_params is None:
            return x
        dist.broadcast_object_list(box := [x], 0, device=self.env.device)
        return box[0]

    def close(self) -> None:
        if self.is_rank0:
            self.workers.close()


def build_callbacks(
    config: TrainConfig, state: TrainState, env: DistEnv, memory: PeakMemory
) -> Callbacks:
    """The callbacks of the flags, but those that the loop calls by name."""
    callbacks: list[Callback] = []
    if config.memory_checkpoint_every is not None:
        callbacks.append(MemoryCheckpoints(config, state, env))
    callbacks.append(RankMonitor(config, env, memory, Callbacks(callbacks[:], state).failed))
    if config.profile is not None:
        callbacks.append(Profiler(config, memory, env.rank))
    if config.offload not in (None, "cpu"):
        callbacks.append(OffloadFolder(config))
    return Callbacks(callbacks, state)
