"""Fault-tolerant data parallelism with torchft: groups of ranks that may die, come back and join.

Each replica group is a job of its own, with its own --out: one process, or a torchrun with any
parallelism inside. Groups share every batch and average their gradients in every step.

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 5000
    export TORCHFT_LIGHTHOUSE=http://HOST:29510
    torchrun --nproc-per-node 8 train.py --replica-groups 2 --replica-group 0 --out runs/group0
    torchrun --nproc-per-node 8 train.py --replica-groups 2 --replica-group 1 --out runs/group1

A step: the lighthouse names the groups that are alive (the quorum); one that is behind loads the
state of another, over HTTP, and takes its step number; gradients are averaged over the quorum; all
groups vote, and skip the update if one died in the step. The next quorum is without the dead group,
whose share of the batches is left out until it is back. It needs no checkpoint.

Cost: an all-reduce of the gradients between groups, not overlapped with the backward pass, and a
quorum of a few milliseconds. When it loses: within one failure domain, where --zero alone is
faster. A gradient is the mean over the groups of their means over tokens. Equivalence
(test_all.py): two groups equal one process of the whole batch, and a group that was killed and
started again ends with the bits of the other. The stores of the groups and torchft's servers listen
on all interfaces, and a state that a group loads is a pickle, which may run code: the network must
be trusted. Needs: the optional torchft.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import to_local
from training.callbacks import Callback
from training.config import TrainConfig
from training.dist_env import DistEnv
from training.state import TrainState

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"  # environment variable with its URL
TIMEOUT = timedelta(seconds=60)  # of a quorum, a vote, a transfer or a reduction
ABORTED = "a replica group failed in this step"


class ReplicaGroup(Callback):
    """--replica-groups: this process's rank of its group. ValueError if torchft or the lighthouse
    is missing."""

    def __init__(self, config: TrainConfig, state: TrainState, env: DistEnv):
        self.state, self.env, self.step = state, env, 0
        try:
            from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL
        except ImportError:
            raise ValueError(
                "--replica-groups requires the optional torchft: pip install torchft"
            ) from None
        if LIGHTHOUSE not in os.environ:
            raise ValueError(
                f"--replica-groups: set {LIGHTHOUSE}=http://HOST:29510, where torchft_lighthouse "
                "--min_replicas 1 runs"
            )
        host = os.environ.get("MASTER_ADDR", "localhost")
        # a store of its own: torchrun's keeps the addresses of processes that have ended
        self.store, port = None, None
        if env.rank == 0:
            self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            port = self.store.port
        if env.world > 1:
            dist.broadcast_object_list(box := [port], 0)
            port = box[0]
        group = (ProcessGroupNCCL if env.device.type == "cuda" else ProcessGroupGloo)(TIMEOUT)
        try:
            self.manager = Manager(
                pg=group, min_replica_size=1, use_async_quorum=False, timeout=TIMEOUT,
                state_dict=self.state_dict, load_state_dict=self.load_state_dict,
                replica_id=f"group{config.replica_group}", store_addr=host, store_port=port,
                rank=env.rank, world_size=env.world,
            )  # fmt: skip
        except RuntimeError as e:
            why = str(e).splitlines()[0]
            raise ValueError(f"{LIGHTHOUSE}={os.environ[LIGHTHOUSE]}: {why}") from None

    def state_dict(self) -> dict[str, Any]:
        """What a group that is behind loads: called between two steps, in a thread of torchft."""
        tensors = {name: to_local(x).cpu() for name, (_, x) in self.state.tensors().items()}
        return {"step": self.step, "metadata": self.state.metadata(), "tensors": tensors}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, (_, x) in self.state.tensors().items():
            to_local(x).copy_(state_dict["tensors"][name])
        self.step = state_dict["step"]
        self.state.load_metadata(state_dict["metadata"], self.step)
        self.state.sync_after_load()

    def before_step(self, step: int) -> int:
        """Form the quorum; returns the number of finished steps, of the group that is ahead."""
        self.step = step
        self.manager.start_quorum()
        return self.step

    def reduce_gradients(self, losses: dict[str, float]) -> dict[str, float]:
        """Average the gradients, and the losses, over the quorum."""
        grads = [to_local(p.grad) for p in self.state.trainable.values() if p.grad is not None]
        for dtype in {g.dtype for g in grads}:
            same = [g for g in grads if g.dtype == dtype]
            flat = self.average(torch.cat([g.flatten() for g in same]))
            for g, mean in zip(same, flat.split([g.numel() for g in same])):
                g.copy_(mean.view_as(g))
        means = self.average(torch.tensor([*losses.values()], device=self.env.device))
        return dict(zip(losses, means.tolist()))

    def average(self, x: Tensor) -> Tensor:
        self.manager.allreduce(x).wait()
        return x

    def vote(self) -> str | None:
        """Why the groups skip this update, or None. A group that alone thinks so is behind, and
        loads the state of the others before its next step."""
        return None if self.manager.should_commit() else ABORTED

    def after_update(self, row: dict[str, Any]) -> None:
        row["replica_groups"] = self.manager.num_participants()

    def close(self) -> None:
        self.manager.shutdown(wait=False)
