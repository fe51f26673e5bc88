"""dist_env.py: where a process of train.py computes: its device, and which rank of how many it is.

One process, or under torchrun one of many, which find each other in torchrun's store. After a
restart they look into a part of it that the dead have not written to (recovery.fresh_store).
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from training.recovery import fresh_store


@dataclass(frozen=True)
class DistEnv:
    """Where this process computes: its device, the dtype of its matmuls, and which rank of how
    many it is."""

    device: torch.device
    dtype: str
    rank: int
    world: int
    store: dist.Store | None = None  # where ranks find each other

    def autocast(self) -> torch.autocast:
        narrow = torch.float16 if self.dtype == "fp16" else torch.bfloat16
        return torch.autocast(self.device.type, narrow, enabled=self.dtype != "fp32")


def init_distributed(args: argparse.Namespace) -> DistEnv:
    """Pick device and dtype; under torchrun, join the other ranks."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as e:
        raise ValueError(f"--device {name}: not usable here ({str(e).splitlines()[0]})") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = None
    if world > 1:
        store, *_ = next(dist.rendezvous("env://"))
        store = fresh_store(store, rank, world)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    if args.dtype == "auto":
        args.dtype = "bf16" if has_fast_bf16(device) else "fp32"
    return DistEnv(device, args.dtype, rank, world, store)


def has_fast_bf16(device: torch.device) -> bool:
    """Whether bf16 products are faster than fp32's; on a CPU before AVX-512 they are far slower."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    return torch.backends.cpu.get_cpu_capability() not in ("AVX2", "DEFAULT", "NO AVX")


def rank0_first(place: DistEnv, work: Callable[[], None]) -> None:
    """work() on the first rank; its ValueError or OSError on all. Collective."""
    error = None
    try:
        if place.rank == 0:
            work()
    except (ValueError, OSError) as e:
        error = e
    if place.world > 1:
        dist.broadcast_object_list(box := [error], 0)
        error = box[0]
    if error is not None:
        raise error
