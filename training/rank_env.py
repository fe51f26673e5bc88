"""The environment of ranks, as torchrun sets it or people who start ranks by hand: checked by name.

    RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=node0 MASTER_PORT=29500 python train.py ...

torch reads these variables too, but its errors name no variable, or come after minutes of waiting.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch.distributed as dist

PR_SET_PDEATHSIG = 1  # prctl(2)
PARENT = os.getppid()  # torchrun, unless it has ended already


class RankEnv(NamedTuple):
    """RANK, WORLD_SIZE and LOCAL_RANK; one process without them."""

    rank: int
    world: int
    local_rank: int


def world_size() -> int:
    """The number of processes that torchrun started; 1 without it."""
    return _number("WORLD_SIZE", 1, 1)


def rank_env() -> RankEnv:
    """The ranks' environment. ValueError names the variable that is missing or wrong."""
    world = world_size()
    rank, local_rank = _number("RANK", 0, 0), _number("LOCAL_RANK", 0, 0)
    if rank >= world:
        given = os.environ.get("WORLD_SIZE", "not set")
        raise ValueError(f"RANK={rank}: must be below WORLD_SIZE, which is {given}")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if world > 1 and not os.environ.get(name):
            raise ValueError(f"{name} is not set, but WORLD_SIZE={world}: start with torchrun")
    _number("MASTER_PORT", 1, 1, 2**16)
    return RankEnv(rank, world, local_rank)


def _number(name: str, default: int, least: int, end: int | None = None) -> int:
    """The number, from `least` to `end` - 1, in an environment variable. ValueError names it."""
    text = os.environ.get(name, str(default))
    ok = text.isascii() and text.isdecimal() and least <= int(text)
    if not ok or (end is not None and int(text) >= end):
        bounds = f"{least} or more" if end is None else f"from {least} to {end - 1}"
        raise ValueError(f"{name}={text}: must be a number, {bounds}, as torchrun sets it")
    return int(text)


def end_with_torchrun() -> None:
    """On Linux, let the kernel send SIGTERM to this rank when torchrun ends before it: killed by
    SIGKILL, torchrun cannot stop its ranks, and they would keep their GPUs."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != PARENT:  # it has ended already
            os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def rendezvous_errors(rank: int) -> Iterator[None]:
    """Raise errors of the ranks' rendezvous as ConnectionError that names MASTER_ADDR and
    MASTER_PORT."""
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError, TimeoutError) as e:
        address, port = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
        why = str(e).partition("\n")[0] or type(e).__name__
        if rank == 0 and ("EADDRINUSE" in str(e) or "address already in use" in str(e)):
            text = f"MASTER_PORT={port}: the port is in use on this machine; choose another"
        elif rank == 0:
            text = f"MASTER_ADDR={address}, MASTER_PORT={port}: no rendezvous of all ranks ({why})"
        else:
            text = f"MASTER_ADDR={address}, MASTER_PORT={port}: rank 0 does not answer ({why})"
        raise ConnectionError(text) from None
