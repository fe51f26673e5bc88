"""Pipeline parallelism: one executor that runs any pipeline schedule.

A schedule gives each rank an ordered list of actions (schedules.py has a dozen; any object with the
attributes name, microbatches, chunk_to_rank, paths and actions works). Each rank owns model chunks,
callables from hidden states to hidden states. Microbatches pass from chunk to chunk: activations in
the forward direction, their gradients in the backward direction.

    pipe = Pipeline(schedule, {0: first, 7: last}, up, down, dtype=torch.bfloat16)
    losses = pipe.step(shape, inputs, loss)     # loss(y, m) -> scalar, on the last chunk's rank

The actions determine all messages. Each rank has the lists of all ranks, so it knows the order of
the messages from each other rank, and posts two receives ahead in that order; sends never block. No
tags are needed (NCCL has none), and any schedule that has a valid order runs without deadlock.
Messages to higher and to lower ranks use two process groups, since NCCL serializes the messages of
one pair of ranks. (Create the process group without device_id, which would serialize both groups.)

W, weight gradients after input gradients (Zero Bubble, arXiv:2401.10241): `split_backward_` and
`split_experts_backward` defer dW = dy^T x from B to a W of the schedule; x and dy are kept, and
other parameters, such as norms, get their gradients in B. U, an optimizer step after each
microbatch (PipeDream, arXiv:1806.03377, 3.3): forward passes use the newest weights, backward
passes those of their forward pass (weight stashing). `decode` generates on a ring of stages.

Equivalence (test_all.py): loss, all gradients and the weights after 3 steps equal one process's for
every schedule, combined with TP, FSDP and expert parallelism, on gloo; NCCL is untested. When it
loses: fewer microbatches than ranks; stages of unequal time (schedules.partition balances them);
links on which sending an activation takes as long as computing its stage. DualPipe's overlapped F
and B run one after the other: its smaller bubble is realized, its compute overlap is not.
Needs: torch. `torchrun --standalone --nproc-per-node 2 parallelism/pipeline.py` checks itself.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

Group = dist.ProcessGroup
Chunk = Callable[[Any], Any]  # x -> y, or (y, auxiliary loss), such as a router's
MessageKey = tuple[str, int, int]  # (F or B, microbatch, destination chunk)

NUM_PREFETCH_RECVS = 2  # receives posted ahead for each source rank


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def p2p_groups(pipelines: Sequence[Sequence[int]]) -> tuple[Group, Group]:
    """Process groups (for messages to higher ranks, to lower ranks) of this process's pipeline.
    pipelines: the ascending ranks of each. Collective: all processes pass the same lists."""
    ok = all(list(ranks) == sorted(ranks) for ranks in pipelines)
    _check(ok, f"the ranks of each pipeline must be ascending, not {[*map(list, pipelines)]}")
    make = lambda: dist.new_subgroups_by_enumeration([list(ranks) for ranks in pipelines])[0]
    return make(), make()


# --------------------------------------------------------------------------------------------------
# B and W
# --------------------------------------------------------------------------------------------------


class WeightGradStore:
    """Deferred weight gradients of a chunk's layers. queue: the list that backward passes append
    their dW computations to; None: they compute dW themselves. sums: fp32 gradient accumulators of
    weights narrower than fp32."""

    queue: list[Callable[[], None]] | None = None

    def __init__(self) -> None:
        self.sums: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def add(self, weight: Tensor, index: int | None, dw: Tensor) -> None:
        below_fp32 = weight.dtype.itemsize < 4
        total = self.sums.get(weight) if below_fp32 else weight.grad
        if total is None and below_fp32:
            total = self.sums[weight] = torch.zeros_like(weight, dtype=torch.float32)
        elif total is None:
            total = weight.grad = torch.zeros_like(weight)
        (total if index is None else total[index]).add_(dw)

    @torch.no_grad()
    def finish(self) -> None:
        """Round each fp32 sum once and add it to .grad."""
        for weight, total in self.sums.items():
            old = 0 if weight.grad is None else weight.grad
            weight.grad = (total + old).to(weight.dtype)
        self.sums.clear()


class _LinearSplitBackward(torch.autograd.Function):
    """F.linear(x, weight, bias), or with weight[index] of a stack (E, out, in). Backward computes
    dx = dy W and the bias gradient; dW = dy^T x is queued and later added to weight.grad."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, index: int | None,
        weight_grads: WeightGradStore,
    ) -> Tensor:  # fmt: skip
        matrix = weight if index is None else weight[index].to(x.dtype)
        y = F.linear(x, matrix, bias)
        ctx.save_for_backward(x.to(y.dtype))  # the dtype that autocast multiplies in
        ctx.weight = weight  # not in save_for_backward, which may return a copy
        ctx.index, ctx.weight_grads = index, weight_grads
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight, index, dx, db = ctx.saved_tensors, ctx.weight, ctx.index, None, None
        if ctx.needs_input_grad[0]:
            matrix = weight if index is None else weight[index]
            dx = dy @ matrix.to(dy.dtype)
        if ctx.needs_input_grad[2]:
            db = dy.flatten(0, -2).sum(0)
        if ctx.needs_input_grad[1]:
            weight_grads, rows = ctx.weight_grads, x.flatten(0, -2)
            dw = lambda: dy.flatten(0, -2).mT @ rows
            weight_grads.queue.append(lambda: weight_grads.add(weight, index, dw()))
        return dx, None, db, None, None


class SplitLinear(nn.Linear):
    """nn.Linear that defers its weight gradient while the store has a queue."""

    weight_grads: WeightGradStore

    def forward(self, x: Tensor) -> Tensor:
        if self.weight_grads.queue is None or not self.weight.requires_grad:
            return super().forward(x)
        return _LinearSplitBackward.apply(x, self.weight, self.bias, None, self.weight_grads)


class SplitStack:
    """Stacked expert weights (E, out, in) for callers that use `linear`, as moe.grouped_experts
    does; defers their gradients."""

    def __init__(self, weight: Tensor, weight_grads: WeightGradStore):
        self.weight, self.weight_grads = weight, weight_grads
        self.shape, self.dtype = weight.shape, weight.dtype

    def linear(self, rows: Tensor, e: int) -> Tensor:
        return _LinearSplitBackward.apply(rows, self.weight, None, e, self.weight_grads)


def split_backward_(module: nn.Module, weight_grads: WeightGradStore) -> None:
    """Make every nn.Linear in the module, in place, defer its weight gradient to `weight_grads`.
    Parameters, names and hooks are kept. Call it before fully_shard; compiled layers are not
    supported. Subclasses of nn.Linear, which override the matmul, are unchanged."""
    for linear in module.modules():
        if type(linear) is nn.Linear:
            linear.__class__, linear.weight_grads = SplitLinear, weight_grads


def split_experts_backward(
    run: Callable[..., Tensor], weight_grads: WeightGradStore
) -> Callable[..., Tensor]:
    """Wrap the experts hook run(x, weights, ids, w_gate_up, w_down): the gradients of both stacks
    are deferred to `weight_grads`."""

    def split(x: Tensor, weights: Tensor, ids: Tensor, *stacks: Tensor) -> Tensor:
        if weight_grads.queue is not None:
            stacks = tuple(SplitStack(stack, weight_grads) for stack in stacks)
        return run(x, weights, ids, *stacks)

    return split


# --------------------------------------------------------------------------------------------------
# The executor
# --------------------------------------------------------------------------------------------------


class Pipeline:
    """Runs this rank's actions of a schedule; reusable for any number of steps.

    chunks: chunk number -> module or callable, for all chunks of this rank. The first chunk of a
    path gets inputs[m], the others hidden states of `shape`; all but the last return hidden states
    of `shape`. up, down: the groups of `p2p_groups`, in the order of the schedule's ranks.
    weight_grads: the store given to split_backward_, for schedules with W. recompute: chunks that
    save only their input and recompute their forward pass in the backward pass.
    before_action(action, last): called before each action; last: it is the chunk's last B.
    Schedules with U need modules, and must recompute by `recompute`: checkpointing inside a module
    would see other weights. Collective over the groups. `microbatch` is the index of the microbatch
    being run; `events` are the last run's (start, end, action), by the host's clock.
    """

    def __init__(
        self,
        schedule: Any,
        chunks: Mapping[int, Chunk],
        up: Group,
        down: Group,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        weight_grads: WeightGradStore | None = None,
        recompute: Collection[int] = (),
        before_action: Callable[[Any, bool], None] | None = None,
    ):
        self.schedule, self.chunks, self.up, self.down = schedule, chunks, up, down
        self.rank, self.dtype, self.device = dist.get_rank(up), dtype, device
        self.weight_grads = weight_grads or WeightGradStore()
        self.recompute, self.before_action = recompute, before_action
        ranks, size = len(schedule.actions), dist.get_world_size(up)
        _check(ranks == size, f"the schedule has {ranks} ranks, the process group {size}")
        own = {chunk for chunk, rank in enumerate(schedule.chunk_to_rank) if rank == self.rank}
        _check(own == set(chunks), f"rank {self.rank} must have the chunks {sorted(own)} of "
               f"{schedule.name}, not {sorted(chunks)}")  # fmt: skip
        self.actions = schedule.actions[self.rank]
        self.split_backwards = {a[1:3] for a in self.actions if a[0] == "W"}
        self.position = {a[:3]: n for rank in schedule.actions for n, a in enumerate(rank)}
        self.last_backward = {a[2]: a for a in self.actions if a[0] == "B"}
        self.events: list[tuple[float, float, Any]] = []
        self.microbatch = 0
        hops = [hop for path in schedule.paths for hop in zip(path, path[1:])]
        self.next_chunk = {("F", a): b for a, b in hops} | {("B", b): a for a, b in hops}
        messages = lambda kinds: [[*self._messages_from(rank, kinds)] for rank in range(size)]
        self.incoming = {kinds: messages(kinds) for kinds in ("FB", "F")}
        rank_of = schedule.chunk_to_rank
        self._connect({tuple(sorted((rank_of[a], rank_of[b]))) for a, b in hops})

    # ---- messages ----

    def _connect(self, pairs: Collection[tuple[int, int]]) -> None:
        """Send one message each way between each pair of ranks that will communicate. NCCL
        connects on the first call of both ends, which blocks: all ranks use one order of pairs."""
        for pair in sorted(pair for pair in pairs if pair[0] != pair[1] and self.rank in pair):
            for group, source, to in ((self.up, *pair), (self.down, *pair[::-1])):
                token = torch.zeros(1, device=self.device)
                if self.rank == source:
                    dist.send(token, group=group, group_dst=to)
                else:
                    dist.recv(token, group=group, group_src=source)

    def _messages_from(self, source: int, kinds: str) -> Iterator[MessageKey]:
        """The messages from `source` to this rank, in sending order."""
        for kind, m, chunk, *_ in self.schedule.actions[source]:
            to = self.next_chunk.get((kind, chunk)) if kind in kinds else None
            if to is not None and self.schedule.chunk_to_rank[to] == self.rank != source:
                yield kind, m, to

    def _group(self, rank: int, sending: bool) -> Group:
        return self.up if (rank > self.rank) == sending else self.down

    def _start(self, shape: Sequence[int], kinds: str) -> None:
        """Reset the state of a run and post the first receives."""
        self.shape, self.sent, self.events = tuple(shape), [], []
        self.local_messages: dict[MessageKey, Tensor] = {}  # between chunks of this rank
        self.expected = [deque(messages) for messages in self.incoming[kinds]]
        self.pending_recvs: dict[MessageKey, tuple[Tensor, Any]] = {}
        for source in range(len(self.expected)):
            for _ in range(NUM_PREFETCH_RECVS):
                self._post_recv(source)

    def _post_recv(self, source: int) -> None:
        if self.expected[source]:
            buffer = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            work = dist.irecv(buffer, group=self._group(source, False), group_src=source)
            self.pending_recvs[self.expected[source].popleft()] = buffer, work

    def _recv(self, key: MessageKey) -> Tensor:
        """Wait for a message. It may not have been computed yet."""
        if key in self.local_messages:
            return self.local_messages.pop(key)
        kind, m, chunk = key
        back = self.next_chunk["B" if kind == "F" else "F", chunk]
        source = self.schedule.chunk_to_rank[back]
        while key not in self.pending_recvs:
            assert self.expected[source], f"rank {source} never sends {key}: run schedules.validate"
            self._post_recv(source)
        buffer, work = self.pending_recvs.pop(key)
        work.wait()
        self.began = time.perf_counter()
        self._release_sent(source, self.position[kind, m, back])
        self._post_recv(source)
        return buffer

    def _release_sent(self, rank: int, position: int) -> None:
        """Free the send buffers that `rank` has received for its actions up to `position`."""
        received = lambda one: one[0] == rank and one[1] <= position
        for *_, work, _ in filter(received, self.sent):
            work.wait()
        self.sent = [one for one in self.sent if not received(one)]

    def _send(self, kind: str, m: int, chunk: int, x: Tensor) -> None:
        """Send the output of (kind, m, chunk) to the next chunk's rank."""
        to = self.next_chunk[kind, chunk]
        owner = self.schedule.chunk_to_rank[to]
        if owner == self.rank:
            self.local_messages[kind, m, to] = x
            return
        _check(tuple(x.shape) == self.shape and x.dtype == self.dtype, f"chunk {chunk} returned "
               f"{tuple(x.shape)} of {x.dtype}, not {self.shape} of {self.dtype}")  # fmt: skip
        x = x.contiguous()
        work = dist.isend(x, group=self._group(owner, True), group_dst=owner)
        # keep the tensor alive until it is sent; gloo reports completion only in wait()
        self.sent.append((owner, self.position[kind, m, to], work, x))

    # ---- actions ----

    def step(
        self, shape: Sequence[int], inputs: Sequence[Any], loss: Callable[[Any, int], Tensor],
        update: Callable[[int], None] | None = None,
    ) -> dict[int, Tensor]:  # fmt: skip
        """Run forward and backward passes of all microbatches, accumulating into .grad the gradient
        of the sum of loss(y, m). Returns {m: loss} on the last chunk's rank. inputs[m] is read only
        on the first chunk's rank. update(chunk): the optimizer step, for schedules with U."""
        stash_weights = any(action[0] == "U" for action in self.actions)
        name = self.schedule.name
        _check(not stash_weights or update is not None, f"{name} has U actions: pass `update`")
        self._start(shape, "FB")
        newest_weights = {
            c: _clone_weights(module) if stash_weights else None
            for c, module in self.chunks.items()
        }
        saved: dict[tuple[int, int], tuple] = {}  # from F to B: input and roots of the graph
        weight_grad_queues: dict[tuple[int, int], list] = {}  # from B to W
        weights_used: dict[tuple[int, int], dict] = {}  # from F to U: its version of the weights
        losses: dict[int, Tensor] = {}
        for action in self.actions:
            self.began, (kind, m, chunk, *_) = time.perf_counter(), action
            key, self.microbatch = (m, chunk), m
            if self.before_action is not None:
                self.before_action(action, action == self.last_backward[chunk])
            if kind in "FB" and key in self.split_backwards:
                self.weight_grads.queue = weight_grad_queues.setdefault(key, [])
            if kind == "F":
                weights_used[key] = newest_weights[chunk]
                saved[key] = self._forward(inputs, m, chunk, loss, losses, newest_weights[chunk])
            elif kind == "B":
                self._backward(m, chunk, *saved.pop(key))
            elif kind == "W":
                queue = weight_grad_queues.pop(key)
                while queue:  # frees each x and dy after its use
                    queue.pop(0)()
            else:
                self.weight_grads.finish()
                _move_grads(weights_used.pop(key), self.chunks[chunk])
                update(chunk)
                newest_weights[chunk] = _clone_weights(self.chunks[chunk])
            self.weight_grads.queue = None
            self.events.append((self.began, time.perf_counter(), action))
        self.weight_grads.finish()
        self._finish()
        return losses

    def _forward(
        self, inputs: Sequence[Any], m: int, chunk: int, loss: Callable[[Any, int], Tensor],
        losses: dict[int, Tensor], weights: dict[str, Tensor] | None,
    ) -> tuple[Any, list[Tensor]]:  # fmt: skip
        """Returns (x, roots of the backward pass)."""
        if ("B", chunk) in self.next_chunk:
            x = self._recv(("F", m, chunk)).requires_grad_()
        else:
            x = inputs[m]
        run = self.chunks[chunk]
        if weights is not None:
            run = lambda x: functional_call(self.chunks[chunk], weights, (x,), tie_weights=False)
        y = checkpoint(run, x, use_reentrant=False) if chunk in self.recompute else run(x)
        y, *aux_loss = y if isinstance(y, tuple) else (y,)
        if ("F", chunk) not in self.next_chunk:
            y = loss(y, m)
            losses[m] = y.detach()
        else:
            self._send("F", m, chunk, y.detach())
        return x, [y, *aux_loss]

    def _backward(self, m: int, chunk: int, x: Any, roots: list[Tensor]) -> None:
        dy = self._recv(("B", m, chunk)) if ("F", chunk) in self.next_chunk else None
        pairs = [(y, d) for y, d in zip(roots, (dy, *[None] * len(roots))) if y.requires_grad]
        if pairs:  # empty: this chunk and all before it are frozen
            torch.autograd.backward(*zip(*pairs))
        if ("B", chunk) in self.next_chunk:
            dx, x.grad = x.grad, None  # x itself may be kept for W
            self._send("B", m, chunk, dx)

    def _finish(self) -> None:
        for *_, work, _ in self.sent:
            work.wait()
        self.sent.clear()
        assert not self.local_messages and not self.pending_recvs, "unconsumed messages"

    @torch.no_grad()
    def forward(
        self, shape: Sequence[int], inputs: Sequence[Any],
        finish: Callable[[Any, int], Any] = lambda y, m: y,
    ) -> dict[int, Any]:  # fmt: skip
        """Run the schedule's forward passes only. Returns {m: finish(y, m)} on the last chunk's
        rank."""
        self._start(shape, "F")
        out = {}
        for action in self.actions:
            kind, m, chunk, *_ = action
            if kind != "F":
                continue
            self.began, self.microbatch = time.perf_counter(), m
            x = self._recv(("F", m, chunk)) if ("B", chunk) in self.next_chunk else inputs[m]
            y = self.chunks[chunk](x)
            y = y[0] if isinstance(y, tuple) else y
            if ("F", chunk) in self.next_chunk:
                self._send("F", m, chunk, y)
            else:
                out[m] = finish(y, m)
            self.events.append((self.began, time.perf_counter(), action))
        self._finish()
        return out


def _clone_weights(module: nn.Module) -> dict[str, Tensor]:
    """A copy of the weights, unaffected by updates, under every name of shared parameters."""
    copies = {p: p.detach().clone().requires_grad_(p.requires_grad) for p in module.parameters()}
    return {
        f"{path}.{name}".lstrip("."): copies[p]
        for path, part in module.named_modules()
        for name, p in part.named_parameters(recurse=False, remove_duplicate=False)
    }


def _move_grads(version: dict[str, Tensor], module: nn.Module) -> None:
    """Move the gradients of a stashed version to the module's current parameters."""
    for name, p in module.named_parameters():
        p.grad, version[name].grad = version[name].grad, None


# --------------------------------------------------------------------------------------------------
# Generation
# --------------------------------------------------------------------------------------------------


def decode(
    stage: Callable[[Tensor, int], Tensor],
    first_tokens: Sequence[Tensor],
    sample: Callable[[Tensor, int], Tensor],
    shape: Callable[[int], Sequence[int]],
    up: Group,
    down: Group,
    *,
    dtype: torch.dtype,
) -> Iterator[list[Tensor]]:
    """Decode several groups of rows that follow each other through the stages. With as many groups
    as ranks and equally fast ranks, no rank idles.

    stage(x, g): this rank's layers on group g. x: tokens (B, 1) on rank 0, else hidden states of
    shape(g) and `dtype`. It returns hidden states, on the last rank the input of sample(y, g) ->
    next tokens (B,). first_tokens: (B,) of each group. Yields on every rank the input tokens of all
    groups, starting with the first. All ranks must close() after the same step; tokens sampled in
    that step are discarded.
    """
    rank, ranks = dist.get_rank(up), dist.get_world_size(up)
    _check(ranks > 1, "decode needs a pipeline of 2 ranks or more, not 1")
    sent: deque = deque()

    def send(x: Tensor, to: int, group: Group) -> None:
        x = x.contiguous()
        sent.append((dist.isend(x, group=group, group_dst=to), x))
        while len(sent) > 4 * len(first_tokens):  # sent a round ago: already received
            sent.popleft()[0].wait()

    def receive(x: Tensor, source: int, group: Group) -> Tensor:
        dist.recv(x, group=group, group_src=source)
        return x

    started = False
    try:
        while True:
            seen = []
            for g, first in enumerate(first_tokens):
                tokens = first
                if rank > 0:
                    tokens = receive(torch.empty_like(first), rank - 1, up)
                    x = receive(first.new_empty(tuple(shape(g)), dtype=dtype), rank - 1, up)
                else:
                    if started:
                        tokens = receive(torch.empty_like(first), ranks - 1, down)
                    x = tokens[:, None]
                y = stage(x, g)
                if rank < ranks - 1:
                    send(tokens, rank + 1, up)
                    send(y, rank + 1, up)
                else:
                    send(sample(y, g), 0, down)
                seen.append(tokens)
            started = True
            yield seen
    except GeneratorExit:  # not after an error, when the messages in flight are unknown
        for first in first_tokens if rank == 0 else ():
            receive(torch.empty_like(first), ranks - 1, down)
        for work, _ in sent:
            work.wait()


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def one_f_one_b(p: int, m: int, steady: str = "BF") -> SimpleNamespace:
    """The 1F1B schedule; steady "BWF": with a W after each B."""
    ahead = {"B": 0, "W": 0, "F": p}
    lists = [
        [("F", i, r) for i in range(min(p - r, m))]
        + [(k, i + max(ahead[k] - r, 0), r) for i in range(m) for k in steady
           if i + max(ahead[k] - r, 0) < m] for r in range(p)
    ]  # fmt: skip
    return SimpleNamespace(
        name="1f1b", microbatches=m, chunk_to_rank=range(p), paths=(range(p),), actions=lists
    )


def main() -> None:
    """Losses and gradients == one process's; milliseconds of a step beside torch's 1F1B."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    if "RANK" not in os.environ:
        sys.exit("run torchrun --standalone --nproc-per-node 2 parallelism/pipeline.py")
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    gpu = torch.cuda.is_available()
    torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu")
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device, groups = torch.get_default_device(), p2p_groups([range(ranks)])
    m, N, C = 4 * ranks, *((4096, 4096) if gpu else (128, 256))
    torch.manual_seed(0)
    layer = lambda: nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))
    whole = nn.Sequential(*(layer() for _ in range(ranks)))
    x, loss = torch.randn(m * N, C), lambda y, _: y.square().sum()
    runs = {}
    for name, steady in (("1f1b", "BF"), ("1f1b with W", "BWF")):
        chunk, store = copy.deepcopy(whole[rank]), WeightGradStore()
        split_backward_(chunk, store)
        schedule = one_f_one_b(ranks, m, steady)
        pipe = Pipeline(schedule, {rank: chunk}, *groups, device=device, weight_grads=store)
        runs[name] = partial(pipe.step, (N, C), x.split(N), loss)
        runs[name]()
        expected = torch.autograd.grad(whole(x).square().sum(), [*whole[rank].parameters()])
        for p, grad in zip(chunk.parameters(), expected):
            assert (p.grad - grad).norm() < 1e-5 * grad.norm()
    stage = PipelineStage(copy.deepcopy(whole[rank]), rank, ranks, device)
    peer = Schedule1F1B(stage, m, loss_fn=lambda y, _: y.square().sum(), scale_grads=False)
    last = dict(target=x) if rank == ranks - 1 else {}
    runs["torch's Schedule1F1B"] = partial(peer.step, *([x] if rank == 0 else []), **last)
    for name, run in runs.items():
        ms = 1e3 * Timer("run()", globals=dict(run=run)).timeit(10).mean
        print(f"{m} microbatches of {N} x {C}, {name}: {ms:.1f} ms\n" if rank == 0 else "", end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
