"""The distributed environment of a training process: device, matmul dtype, rank, world size, store.

One process, or one of several started by torchrun, which rendezvous in torchrun's store. After a
restart they use a fresh prefix of the store that dead processes have not written to
(recovery.fresh_store).
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from training.config import TrainConfig
from training.rank_env import end_with_torchrun, rank_env, rendezvous_errors
from training.recovery import fresh_store

# of collectives in which ranks wait for the work of others, for as long as these live: gloo fails
# at once when the socket of a process that has ended closes
NO_TIMEOUT = timedelta(days=9999)


@dataclass(frozen=True)
class DistEnv:
    """Device, matmul dtype (bf16, fp16 or fp32), rank and world size of this process."""

    device: torch.device
    dtype: str
    rank: int
    world: int
    store: dist.Store | None = None  # the rendezvous store; None: one process

    def autocast(self) -> torch.autocast:
        dtype = torch.float16 if self.dtype == "fp16" else torch.bfloat16
        return torch.autocast(self.device.type, dtype, enabled=self.dtype != "fp32")


def init_distributed(args: TrainConfig) -> DistEnv:
    """Choose device and dtype; under torchrun, initialize the process group. ValueError if the
    device cannot be used."""
    rank, world, local_rank = rank_env()
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda":
        name = f"cuda:{local_rank}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as e:
        why = str(e).splitlines()[0]
        raise ValueError(f"--device {name}: not available on this machine ({why})") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = None
    if world > 1:
        end_with_torchrun()
        with rendezvous_errors(rank):
            store, *_ = next(dist.rendezvous("env://"))
            store = fresh_store(store, rank, world)
        os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")  # for watchdog.py
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
        set_collective_timeout(NO_TIMEOUT)  # until the first step (RankMonitor)
    if args.dtype == "auto":
        args.dtype = "bf16" if has_fast_bf16(device) else "fp32"
    return DistEnv(device, args.dtype, rank, world, store)


def set_collective_timeout(timeout: timedelta) -> None:
    """Set the timeout of all process groups made so far. One by one, as in torchtitan: groups do
    not inherit the timeout of init_process_group."""
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def has_fast_bf16(device: torch.device) -> bool:
    """Whether bf16 matmuls are faster than fp32: GPUs before Ampere emulate them, and on CPUs
    without AVX-512 they are far slower."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.backends.cpu.get_cpu_capability() not in ("AVX2", "DEFAULT", "NO AVX")


def rank0_first(env: DistEnv, work: Callable[[], None]) -> None:
    """Call work() on rank 0; all ranks wait, however long it takes, and raise its ValueError or
    OSError, or ConnectionError if rank 0 ends. Collective."""
    error = None
    group = dist.new_group(backend="gloo", timeout=NO_TIMEOUT) if env.world > 1 else None
    try:
        if env.rank == 0:
            work()
    except (ValueError, OSError) as e:
        error = e
    if group is not None:
        try:
            dist.broadcast_object_list(box := [error], 0, group=group)
        except RuntimeError:
            raise ConnectionError("rank 0 has ended; see its output for the reason") from None
        dist.destroy_process_group(group)
        error = box[0]
    if error is not None:
        raise error


def same_on_all_ranks(env: DistEnv, work: Callable[[], Mapping[str, Any]]) -> None:
    """Call work() on every rank. All ranks raise the ValueError or OSError of any of them, and a
    ValueError for an entry of the results that is not equal on all. Collective."""
    own: Any
    try:
        own = work()
    except (ValueError, OSError) as e:
        own = e
    if env.world > 1:
        group = dist.new_group(backend="gloo", timeout=NO_TIMEOUT)
        try:
            dist.all_gather_object(results := [None] * env.world, own, group=group)
        except RuntimeError:
            raise ConnectionError("a rank has ended; see its output for the reason") from None
        dist.destroy_process_group(group)
    else:
        results = [own]
    for result in results:
        if isinstance(result, Exception):
            raise result
    for rank, result in enumerate(results):
        for name, value in results[0].items():
            if (other := result.get(name)) != value:
                raise ValueError(
                    f"{name} is {other!s:.60} on rank {rank}, but {value!s:.60} on rank 0; start "
                    "all ranks with the same flags and files"
                )


def all_ranks_reach(env: DistEnv, place: str, seconds: float = 10.0) -> bool:
    """Whether every rank calls this, with the same place, within `seconds` of this one: then a
    collective may follow. Not collective, as others may be blocked or dead. Once per place."""
    if env.world == 1:
        return True
    until = time.monotonic() + seconds
    arrived = env.store.add(place, 1)
    while arrived < env.world and time.monotonic() < until:
        time.sleep(0.05)
        arrived = env.store.add(place, 0)
    return arrived >= env.world


def sync_stop_and_data_wait(
    caught: list[int], wait: float, device: torch.device
) -> tuple[bool, float]:
    """Max-reduce over ranks: whether any caught a signal (all must stop at the same step), and the
    longest wait for data."""
    maxima = torch.tensor([len(caught), wait], device=device)
    if dist.is_initialized():
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
    n_caught, wait = maxima.tolist()
    return n_caught > 0, round(wait, 4)
