"""Several ranks generate one text: process groups, the mesh of --tp, --ep and --pp, one decision.

All ranks run the same program on the same tokens. What depends on the outside (stdin, files, time,
free memory) is decided by rank 0 or agreed on, and an error on one rank is raised on all.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from generation.config import GenerateConfig
from training.rank_env import end_with_torchrun, rank_env, rendezvous_errors


@contextmanager
def process_group(args: GenerateConfig) -> Iterator[None]:
    """With --ep, --tp, --pp, --cp or --disaggregate under torchrun: initialize torch.distributed.
    Sets args.mesh."""
    several = args.ep or args.tp or args.pp or args.cp or args.disaggregate
    if not several or "WORLD_SIZE" not in os.environ:
        args.mesh = build_mesh(args)
        yield
        return
    end_with_torchrun()
    with rendezvous_errors(rank_env().rank):
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    # rank 0 may wait for input, or a server for calls, while the others wait in a broadcast. If it
    # ends, its sockets close and they fail at once
    dist.distributed_c10d._set_pg_timeout(timedelta(days=9999), dist.group.WORLD)
    try:
        args.mesh = build_mesh(args)
        yield
        dist.barrier()  # no rank exits while others still communicate
    finally:
        dist.destroy_process_group()


def build_mesh(args: GenerateConfig) -> Any:
    """A parallel.Mesh of all ranks, --tp innermost, then --ep or --pp; None without --tp and --pp.
    ValueError names the flag."""
    ranks, tp = dist.get_world_size() if dist.is_initialized() else 1, args.tp
    if (args.pp or 1) > 1:
        return pipeline_mesh(args.pp, tp or 1, ranks)
    if args.cp and not (tp or args.ep or args.disaggregate):
        check_ranks(f"--cp {args.cp}", args.cp, ranks)
    if tp is None or tp == ranks == 1:
        return None
    if ranks == 1:
        raise ValueError(f"--tp {tp}: start it with torchrun --nproc-per-node {tp}")
    if ranks % tp:
        raise ValueError(f"--tp {tp} does not divide the {ranks} processes that torchrun started")
    if tp < ranks and not args.ep:
        raise ValueError(
            f"--tp {tp}: torchrun started {ranks} processes, and the others would be idle; give "
            f"--tp {ranks}, or add --ep to shard experts over them"
        )
    from parallel import make_mesh  # imported here: importing torch's DeviceMesh takes a second

    return make_mesh(dp_shard=ranks // tp, ep=ranks // tp, tp=tp)


def pipeline_mesh(pp: int, tp: int, ranks: int) -> Any:
    """The mesh of --pp stages of --tp ranks each."""
    check_ranks(f"--pp {pp}" + (f" x --tp {tp}" if tp > 1 else ""), pp * tp, ranks)
    from parallel import make_mesh

    return make_mesh(tp=tp, pp=pp)


def check_ranks(flags: str, needed: int, ranks: int) -> None:
    """ValueError unless torchrun started as many ranks as the flags need."""
    if needed != ranks:
        raise ValueError(
            f"{flags} is {needed} processes, not {ranks}: start it with torchrun --nproc-per-node "
            f"{needed}"
        )


def run_on_all_or_raise(fn: Callable[[], Any]) -> Any:
    """fn() on every rank. If it raises on one, all ranks raise, so that none waits for it."""
    if not dist.is_initialized():
        return fn()
    result, errors = None, [None] * dist.get_world_size()
    try:
        result, error = fn(), None
    except (ValueError, OSError, MemoryError, torch.OutOfMemoryError) as e:
        error = str(e) or "out of memory"
    dist.all_gather_object(errors, error)
    for rank, error in enumerate(errors):
        if error is not None:
            raise ValueError(error if rank == 0 else f"rank {rank}: {error}")
    return result


def rank0_then_broadcast(fn: Callable[[], Any]) -> Any:
    """The result of fn() on rank 0, on every rank: for example, stdin can be read only once."""
    if not dist.is_initialized():
        return fn()
    return broadcast_object(run_on_all_or_raise(lambda: fn() if dist.get_rank() == 0 else None))


def broadcast_object(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def all_reduce_min(n: int) -> int:
    """The minimum of n over ranks."""
    if not dist.is_initialized():
        return n
    values = [n] * dist.get_world_size()
    dist.all_gather_object(values, n)
    return min(values)


class Rank0Policy:
    """A speculation policy for several ranks: policies use measured times, so rank 0's choices are
    broadcast."""

    def __init__(self, policy: Any):
        self.policy = policy

    def choose(self, rows: Sequence[Any]) -> list[int]:
        return broadcast_object(self.policy.choose(rows))

    def choose_tree(self, rows: Sequence[Any]) -> Any:
        return broadcast_object(self.policy.choose_tree(rows))

    def observe(self, *step: Any) -> None:
        self.policy.observe(*step)

    def observe_tree(self, *step: Any) -> None:
        self.policy.observe_tree(*step)

    def forget(self, row: Any) -> None:
        self.policy.forget(row)
