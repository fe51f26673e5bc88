"""pipeline.py: one executor for every pipeline schedule.

A schedule says what a rank does in which order (schedules.py has a dozen; any object with its
attributes will do: name, microbatches, home, paths, actions); this file does it. Ranks have chunks
of a model, callables from hidden states to hidden states, and microbatches go from chunk to chunk:
activations one way, their gradients the other.

    pipe = Pipeline(schedule, {0: first, 7: last}, up, down, dtype=torch.bfloat16)
    losses = pipe.step(shape, inputs, loss)     # loss(y, m) -> scalar, where the last chunk is

What is sent follows from the lists. Every rank has them all, so it knows in which order messages
reach it from each other rank, and asks for them in that order, two ahead; nobody waits to send. So
no tags are needed (NCCL has none), and what can be run in some order runs without deadlock.
Messages to higher ranks and to lower ones go through two groups, for NCCL does those of a pair one
by one. (Its process group must not be given a device_id, which would make them all of one row.)

W, the weights' gradients after the input's (Zero Bubble, arXiv:2401.10241): `split_weights_` has
the nn.Linear layers of a chunk leave dW = dy^T x for later, where the schedule has a W for it, and
between B and W x and dy are what is kept; `split_experts` does so for experts. Other parameters'
gradients, norms', come with B. Sums of bf16 weights' products are made in fp32. Under activation
checkpointing nothing is recomputed twice.

U, the optimizer's step after each microbatch (PipeDream, arXiv:1806.03377, 3.3): forward passes
take the newest weights, backward passes those that their forward pass had, of which there are
copies for as long as they are needed; microbatch t on stage s of n (from 1) sees t - n + s updates.

`decode` is generation on a ring of stages: groups of rows follow each other, and the last rank's
tokens go to the first.

Equivalence (test_all.py): loss, all gradients and weights after 3 steps are one process's, for
every schedule, with TP, FSDP and experts on other ranks; on gloo: NCCL has not been tried. When it
loses: fewer microbatches than ranks; stages that take unequal times (schedules.partition cuts
them); links where an activation takes as long as its stage. DualPipe's F and B beside each other
are done one after the other: what its list saves in waiting is there, what overlap would is not.
Needs: torch. `python pipeline.py` starts 4 processes, checks itself and prints a table (--check:
none).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

Group = dist.ProcessGroup
Chunk = Callable[[Any], Any]  # x -> y, or (y, a loss of its own, such as a router's)
Key = tuple[str, int, int]  # (F or B, microbatch, the chunk that it is for): a message

AHEAD = 2  # receives that wait on each link


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def p2p_groups(pipelines: Sequence[Sequence[int]]) -> tuple[Group, Group]:
    """The groups (to higher ranks, to lower ones) of this process among all pipelines, each an
    ascending list of ranks. Collective: all processes call it, with the same lists."""
    ok = all(list(ranks) == sorted(ranks) for ranks in pipelines)
    _check(ok, f"ranks must ascend, as a group numbers them, in {[*map(list, pipelines)]}")
    make = lambda: dist.new_subgroups_by_enumeration([list(ranks) for ranks in pipelines])[0]
    return make(), make()


# --------------------------------------------------------------------------------------------------
# B and W
# --------------------------------------------------------------------------------------------------


class WeightGradStore:
    """What the Pipeline tells a chunk's layers: where they leave what W has to do; None if their
    backward pass does it. sums: of gradients of weights below fp32, until the end."""

    queue: list[Callable[[], None]] | None = None

    def __init__(self) -> None:
        self.sums: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def add(self, weight: Tensor, index: int | None, dw: Tensor) -> None:
        narrow = weight.dtype.itemsize < 4
        total = self.sums.get(weight) if narrow else weight.grad
        if total is None and narrow:
            total = self.sums[weight] = torch.zeros_like(weight, dtype=torch.float32)
        elif total is None:
            total = weight.grad = torch.zeros_like(weight)
        (total if index is None else total[index]).add_(dw)

    @torch.no_grad()
    def finish(self) -> None:
        """Round the sums, once, and add them to .grad."""
        for weight, total in self.sums.items():
            old = 0 if weight.grad is None else weight.grad
            weight.grad = (total + old).to(weight.dtype)
        self.sums.clear()


class _Product(torch.autograd.Function):
    """F.linear(x, weight, bias), of a stack that of its matrix `index`: backward dx = dy W and the
    bias, later dW = dy^T x, which is added to weight.grad."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, index: int | None, weight_grads: WeightGradStore
    ) -> Tensor:
        matrix = weight if index is None else weight[index].to(x.dtype)
        y = F.linear(x, matrix, bias)
        ctx.save_for_backward(x.to(y.dtype))  # as autocast would have it
        ctx.weight, ctx.index, ctx.weight_grads = weight, index, weight_grads  # saved, it might come as a copy
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
            product = lambda: dy.flatten(0, -2).mT @ rows
            weight_grads.queue.append(lambda: weight_grads.add(weight, index, product()))
        return dx, None, db, None, None


class SplitLinear(nn.Linear):
    weight_grads: WeightGradStore

    def forward(self, x: Tensor) -> Tensor:
        if self.weight_grads.queue is None or not self.weight.requires_grad:
            return super().forward(x)
        return _Product.apply(x, self.weight, self.bias, None, self.weight_grads)


class SplitStack:
    """Experts' matrices (E, out, in), for who multiplies by `linear`: moe.grouped_experts does."""

    def __init__(self, weight: Tensor, weight_grads: WeightGradStore):
        self.weight, self.weight_grads = weight, weight_grads
        self.shape, self.dtype = weight.shape, weight.dtype

    def linear(self, rows: Tensor, e: int) -> Tensor:
        return _Product.apply(rows, self.weight, None, e, self.weight_grads)


def split_weights_(module: nn.Module, weight_grads: WeightGradStore) -> None:
    """Have every nn.Linear in it, in place, leave its weight's gradient to `later`. Parameters,
    names and hooks stay. Before fully_shard; compiled layers cannot. Subclasses, which multiply in
    ways of their own, are left alone."""
    for linear in module.modules():
        if type(linear) is nn.Linear:
            linear.__class__, linear.weight_grads = SplitLinear, weight_grads


def split_experts(run: Callable[..., Tensor], weight_grads: WeightGradStore) -> Callable[..., Tensor]:
    """The experts hook run(x, weights, ids, w_gate_up, w_down), leaving both stacks' gradients to
    `later`."""

    def split(x: Tensor, weights: Tensor, ids: Tensor, *stacks: Tensor) -> Tensor:
        if weight_grads.queue is not None:
            stacks = tuple(SplitStack(stack, weight_grads) for stack in stacks)
        return run(x, weights, ids, *stacks)

    return split


# --------------------------------------------------------------------------------------------------
# The executor
# --------------------------------------------------------------------------------------------------


class Pipeline:
    """This rank's part in a schedule, as often as wanted.

    chunks: number -> module or callable, of those that have their home here. The first of a path
    gets inputs[m], others hidden states of `shape`, which is what they return, the last one of a
    path excepted. up, down: the groups that `channels` makes, in the order of the schedule's ranks.
    later: the one of split_weights_, for a schedule with W. recompute: chunks whose forward pass
    is made again for the backward pass; they keep their input alone. before(action, last): called
    before each action; last, if this is the chunk's last backward pass. A U needs modules, and
    recomputation inside of them would see other weights: let it be done here. Collective over the
    groups. ValueError if the chunks are not the schedule's.

    `microbatch` is the number of the one that a chunk is being called for, `events` the last run's.
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
        before: Callable[[Any, bool], None] | None = None,
    ):
        self.schedule, self.chunks, self.up, self.down = schedule, chunks, up, down
        self.rank, self.dtype, self.device = dist.get_rank(up), dtype, device
        self.weight_grads, self.recompute, self.before = weight_grads or WeightGradStore(), recompute, before
        ranks, size = len(schedule.actions), dist.get_world_size(up)
        _check(ranks == size, f"the schedule is for {ranks} ranks, the group has {size}")
        own = {chunk for chunk, rank in enumerate(schedule.home) if rank == self.rank}
        _check(own == set(chunks), f"rank {self.rank} must have the chunks {sorted(own)} of "
               f"{schedule.name}, not {sorted(chunks)}")  # fmt: skip
        self.actions = schedule.actions[self.rank]
        self.split = {a[1:3] for a in self.actions if a[0] == "W"}
        self.place = {a[:3]: n for rank in schedule.actions for n, a in enumerate(rank)}
        self.last = {a[2]: a for a in self.actions if a[0] == "B"}
        self.events: list[tuple[float, float, Any]] = []  # of the last run, by the host's clock
        self.microbatch = 0
        hops = [hop for path in schedule.paths for hop in zip(path, path[1:])]
        self.next = {("F", a): b for a, b in hops} | {("B", b): a for a, b in hops}
        sources = range(size)
        self.incoming = {
            kinds: [[*self._messages(source, kinds)] for source in sources] for kinds in ("FB", "F")
        }
        self._connect({tuple(sorted((schedule.home[a], schedule.home[b]))) for a, b in hops})

    # ---- what is sent ----

    def _connect(self, pairs: Collection[tuple[int, int]]) -> None:
        """A message each way between ranks that will have some. NCCL makes a connection when both
        ends first call, and the one that calls first waits: so all do it in one order of pairs."""
        for pair in sorted(pair for pair in pairs if pair[0] != pair[1] and self.rank in pair):
            for group, source, to in ((self.up, *pair), (self.down, *pair[::-1])):
                token = torch.zeros(1, device=self.device)
                if self.rank == source:
                    dist.send(token, group=group, group_dst=to)
                else:
                    dist.recv(token, group=group, group_src=source)

    def _messages(self, source: int, kinds: str) -> Iterator[Key]:
        """All that `source` sends to this rank, in its order."""
        for kind, m, chunk, *_ in self.schedule.actions[source]:
            to = self.next.get((kind, chunk)) if kind in kinds else None
            if to is not None and self.schedule.home[to] == self.rank != source:
                yield kind, m, to

    def _link(self, rank: int, sending: bool) -> Group:
        return self.up if (rank > self.rank) == sending else self.down

    def _open(self, shape: Sequence[int], kinds: str) -> None:
        """Before a run: ask for the first messages."""
        self.shape, self.sent, self.events = tuple(shape), [], []
        self.got: dict[Key, Tensor] = {}  # from another chunk of this rank
        self.expected = [deque(messages) for messages in self.incoming[kinds]]
        self.posted: dict[Key, tuple[Tensor, Any]] = {}
        for source in range(len(self.expected)):
            for _ in range(AHEAD):
                self._post(source)

    def _post(self, source: int) -> None:
        if self.expected[source]:
            buffer = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            work = dist.irecv(buffer, group=self._link(source, False), group_src=source)
            self.posted[self.expected[source].popleft()] = buffer, work

    def _take(self, key: Key) -> Tensor:
        """The message, for which its sender may still have to do something."""
        if key in self.got:
            return self.got.pop(key)
        kind, m, chunk = key
        back = self.next["B" if kind == "F" else "F", chunk]
        source = self.schedule.home[back]
        while key not in self.posted:
            assert self.expected[source], f"rank {source} never sends {key}: see schedules.check"
            self._post(source)
        buffer, work = self.posted.pop(key)
        work.wait()
        self.began = time.perf_counter()
        self._arrived(source, self.place[kind, m, back])
        self._post(source)
        return buffer

    def _arrived(self, rank: int, place: int) -> None:
        """What that rank took for the actions up to this place of its list need not be kept."""
        there = [one for one in self.sent if one[0] == rank and one[1] <= place]
        for one in there:
            one[2].wait()
        self.sent = [one for one in self.sent if one[0] != rank or one[1] > place]

    def _give(self, kind: str, m: int, chunk: int, x: Tensor) -> None:
        """Send what (kind, m, chunk) has made to whom it is for."""
        to = self.next[kind, chunk]
        home = self.schedule.home[to]
        if home == self.rank:
            self.got[kind, m, to] = x
            return
        _check(tuple(x.shape) == self.shape and x.dtype == self.dtype, f"chunk {chunk} made "
               f"{tuple(x.shape)} of {x.dtype}, not {self.shape} of {self.dtype}")  # fmt: skip
        x = x.contiguous()
        work = dist.isend(x, group=self._link(home, True), group_dst=home)
        # the tensor must live until it has gone, and gloo says so to who waits, alone
        self.sent.append((home, self.place[kind, m, to], work, x))

    # ---- what is done ----

    def step(
        self, shape: Sequence[int], inputs: Sequence[Any], loss: Callable[[Any, int], Tensor],
        update: Callable[[int], None] | None = None,
    ) -> dict[int, Tensor]:  # fmt: skip
        """Forward and backward passes of all microbatches: to .grad is added the gradient of the
        sum of loss(y, m) over them; {m: loss} of those whose last chunk is here. inputs[m] is only
        looked at where the first chunk is. update(chunk): the optimizer's step, for a U."""
        stashes = any(action[0] == "U" for action in self.actions)
        _check(not stashes or update is not None, f"{self.schedule.name} needs `update`, for its U")
        self._open(shape, "FB")
        newest = {c: _copy(module) if stashes else None for c, module in self.chunks.items()}
        kept: dict[tuple[int, int], tuple] = {}  # F's, for B
        queues: dict[tuple[int, int], list] = {}  # B's, for W
        used: dict[tuple[int, int], dict] = {}  # F's weights, for U
        losses: dict[int, Tensor] = {}
        for action in self.actions:
            self.began, (kind, m, chunk, *_) = time.perf_counter(), action
            key, self.microbatch = (m, chunk), m
            if self.before is not None:
                self.before(action, action == self.last[chunk])
            if kind in "FB" and key in self.split:
                self.weight_grads.queue = queues.setdefault(key, [])
            if kind == "F":
                used[key] = newest[chunk]
                kept[key] = self._forward(inputs, m, chunk, loss, losses, newest[chunk])
            elif kind == "B":
                self._backward(m, chunk, *kept.pop(key))
            elif kind == "W":
                queue = queues.pop(key)
                while queue:  # x and dy of each go when it is done
                    queue.pop(0)()
            else:
                self.weight_grads.finish()
                _hand_over(used.pop(key), self.chunks[chunk])
                update(chunk)
                newest[chunk] = _copy(self.chunks[chunk])
            self.weight_grads.queue = None
            self.events.append((self.began, time.perf_counter(), action))
        self.weight_grads.finish()
        self._close()
        return losses

    def _forward(
        self, inputs: Sequence[Any], m: int, chunk: int, loss: Callable[[Any, int], Tensor],
        losses: dict[int, Tensor], weights: dict[str, Tensor] | None,
    ) -> tuple[Any, list[Tensor]]:  # fmt: skip
        """(x, what the backward pass begins with)"""
        if ("B", chunk) in self.next:
            x = self._take(("F", m, chunk)).requires_grad_()
        else:
            x = inputs[m]
        run = self.chunks[chunk]
        if weights is not None:
            run = lambda x: functional_call(self.chunks[chunk], weights, (x,), tie_weights=False)
        y = checkpoint(run, x, use_reentrant=False) if chunk in self.recompute else run(x)
        y, *own = y if isinstance(y, tuple) else (y,)
        if ("F", chunk) not in self.next:
            y = loss(y, m)
            losses[m] = y.detach()
        else:
            self._give("F", m, chunk, y.detach())
        return x, [y, *own]

    def _backward(self, m: int, chunk: int, x: Any, roots: list[Tensor]) -> None:
        dy = self._take(("B", m, chunk)) if ("F", chunk) in self.next else None
        pairs = [(y, d) for y, d in zip(roots, (dy, *[None] * len(roots))) if y.requires_grad]
        if pairs:  # none: all of this chunk and before it is frozen
            torch.autograd.backward(*zip(*pairs))
        if ("B", chunk) in self.next:
            dx, x.grad = x.grad, None  # W may keep x
            self._give("B", m, chunk, dx)

    def _close(self) -> None:
        for *_, work, _ in self.sent:
            work.wait()
        self.sent.clear()
        assert not self.got and not self.posted, "messages that nobody took"

    @torch.no_grad()
    def forward(
        self, shape: Sequence[int], inputs: Sequence[Any],
        finish: Callable[[Any, int], Any] = lambda y, m: y,
    ) -> dict[int, Any]:  # fmt: skip
        """The forward passes alone, in the schedule's order: {m: finish(y, m)} where the last chunk
        is."""
        self._open(shape, "F")
        out = {}
        for action in self.actions:
            kind, m, chunk, *_ = action
            if kind != "F":
                continue
            self.began, self.microbatch = time.perf_counter(), m
            x = self._take(("F", m, chunk)) if ("B", chunk) in self.next else inputs[m]
            y = self.chunks[chunk](x)
            y = y[0] if isinstance(y, tuple) else y
            if ("F", chunk) in self.next:
                self._give("F", m, chunk, y)
            else:
                out[m] = finish(y, m)
            self.events.append((self.began, time.perf_counter(), action))
        self._close()
        return out


def _copy(module: nn.Module) -> dict[str, Tensor]:
    """A version of the weights, which later updates leave as it is; one name of each for every
    module that has it."""
    copies = {p: p.detach().clone().requires_grad_(p.requires_grad) for p in module.parameters()}
    return {
        f"{path}.{name}".lstrip("."): copies[p]
        for path, part in module.named_modules()
        for name, p in part.named_parameters(recurse=False, remove_duplicate=False)
    }


def _hand_over(version: dict[str, Tensor], module: nn.Module) -> None:
    """The gradients at a version's weights, to the newest ones."""
    for name, p in module.named_parameters():
        p.grad, version[name].grad = version[name].grad, None


# --------------------------------------------------------------------------------------------------
# Generation
# --------------------------------------------------------------------------------------------------


def decode(
    stage: Callable[[Tensor, int], Tensor],
    starts: Sequence[Tensor],
    draw: Callable[[Tensor, int], Tensor],
    shape: Callable[[int], Sequence[int]],
    up: Group,
    down: Group,
    *,
    dtype: torch.dtype,
) -> Iterator[list[Tensor]]:
    """Decoding of several groups of rows, which follow each other through the stages: with as many
    groups as ranks, and ranks equally fast, all of them work all the time.

    stage(x, g): this rank's layers on group g, of tokens (B, 1) on rank 0, else of hidden states of
    shape(g) and `dtype`; hidden states, on the last rank what draw(y, g) makes the next tokens (B,)
    of. starts: the first tokens (B,) of every group. Yields, on every rank, the tokens of all
    groups that went in, beginning with the first; when told to stop (close), all ranks must after
    the same step. What was drawn from the last ones is then lost.
    """
    rank, ranks = dist.get_rank(up), dist.get_world_size(up)
    _check(ranks > 1, "one rank is no pipeline")
    sent: deque = deque()

    def send(x: Tensor, to: int, group: Group) -> None:
        x = x.contiguous()
        sent.append((dist.isend(x, group=group, group_dst=to), x))
        while len(sent) > 4 * len(starts):  # a round ago: they have long arrived
            sent.popleft()[0].wait()

    def receive(x: Tensor, source: int, group: Group) -> Tensor:
        dist.recv(x, group=group, group_src=source)
        return x

    again = False
    try:
        while True:
            seen = []
            for g, first in enumerate(starts):
                tokens = first
                if rank > 0:
                    tokens = receive(torch.empty_like(first), rank - 1, up)
                    x = receive(first.new_empty(tuple(shape(g)), dtype=dtype), rank - 1, up)
                else:
                    if again:
                        tokens = receive(torch.empty_like(first), ranks - 1, down)
                    x = tokens[:, None]
                y = stage(x, g)
                if rank < ranks - 1:
                    send(tokens, rank + 1, up)
                    send(y, rank + 1, up)
                else:
                    send(draw(y, g), 0, down)
                seen.append(tokens)
            again = True
            yield seen
    except GeneratorExit:  # not after an error: then nobody knows what is on its way
        for first in starts if rank == 0 else ():
            receive(torch.empty_like(first), ranks - 1, down)
        for work, _ in sent:
            work.wait()


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def _one_f_one_b(p: int, m: int, split: bool = False) -> SimpleNamespace:
    """The list of 1F1B; split: its W r microbatches after their B, ZB-H1."""
    lists = []
    for r in range(p):
        work = [("F", i, r) for i in range(min(p - r, m))]
        for i in range(m + r * split):
            work += [("B", i, r)] if i < m else []
            work += [("W", i - r, r)] if split and i >= r else []
            work += [("F", i + p - r, r)] if i + p - r < m else []
        lists.append(work)
    names = dict(name="1f1b", microbatches=m, home=range(p), paths=(range(p),), actions=lists)
    return SimpleNamespace(**names)


def _model(n: int, C: int, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    torch.manual_seed(0)
    stage = lambda: nn.Sequential(
        nn.RMSNorm(C), nn.Linear(C, 3 * C), nn.GELU(), nn.Linear(3 * C, C)
    )
    return [stage().to(dtype) for _ in range(n)]


def check(rank: int, ranks: int, up: Group, down: Group) -> None:
    """Losses and gradients of 1F1B, without and with W, == one process's; `decode`'s tokens too."""
    torch.manual_seed(1)
    m, shape = 6, (2, 3, 8)
    x, goal = torch.randn(2, m, *shape, dtype=torch.float64).unbind()
    whole = _model(ranks, 8)
    outputs = list(x)
    for stage in whole:
        outputs = [stage(h) for h in outputs]
    expected = sum((y - t).square().sum() for y, t in zip(outputs, goal))
    expected.backward()
    for split in (False, True):
        weight_grads, own = WeightGradStore(), _model(ranks, 8)[rank]
        split_weights_(own, weight_grads)
        schedule = _one_f_one_b(ranks, m, split)
        pipe = Pipeline(schedule, {rank: own}, up, down, dtype=x.dtype, weight_grads=weight_grads)
        losses = pipe.step(shape, x, lambda y, i: (y - goal[i]).square().sum())
        if rank == ranks - 1:
            assert torch.allclose(sum(losses.values()), expected, rtol=1e-12)
        for p, q in zip(own.parameters(), whole[rank].parameters()):
            assert torch.allclose(p.grad, q.grad, rtol=1e-12, atol=1e-12)
    add = lambda x, g: x[..., None].double() + rank if rank == 0 else x + rank
    starts = [torch.tensor([g, 2 * g]) for g in range(3)]
    draw = lambda y, g: y[:, 0, 0].long() % 97
    ring = decode(add, starts, draw, lambda g: (2, 1, 1), up, down, dtype=torch.float64)
    for _, seen in zip(range(5), ring):
        assert all(torch.equal(s, t) for s, t in zip(seen, starts))
        starts = [(t + sum(range(ranks))) % 97 for t in starts]
    ring.close()


def benchmark(rank: int, ranks: int, up: Group, down: Group) -> None:
    """Milliseconds of a step of all ranks, which share this machine's cores."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    m, C, rows = 16, 256, 128
    say = print if rank == 0 else lambda *_: None
    say(f"{ranks} stages of 2 products of {C} x {3 * C}, {m} microbatches of {rows} rows, fp32, ms")
    x, goal = torch.randn(2, m * rows, C).unbind()
    loss = lambda y, t: (y - t).square().sum()
    first, last = rank == 0, rank == ranks - 1
    stage = PipelineStage(_model(ranks, C, torch.float32)[rank], rank, ranks, torch.device("cpu"))
    theirs = Schedule1F1B(stage, m, loss_fn=loss, scale_grads=False)
    given, wanted = ((x,) if first else ()), (dict(target=goal) if last else {})
    xs, goals = x.split(rows), goal.split(rows)
    rows_of = {"torch's Schedule1F1B": lambda: theirs.step(*given, **wanted)}
    for name, split in (("1f1b", False), ("zb-h1", True)):
        weight_grads, own = WeightGradStore(), _model(ranks, C, torch.float32)[rank]
        split_weights_(own, weight_grads)
        pipe = Pipeline(_one_f_one_b(ranks, m, split), {rank: own}, up, down, weight_grads=weight_grads)
        rows_of[name] = lambda pipe=pipe: pipe.step((rows, C), xs, lambda y, i: loss(y, goals[i]))
    for name, run in rows_of.items():
        say(f"{name:>22}{_ms(run):>9.1f}")


def _ms(work: Callable[[], Any], times: int = 9) -> float:
    spent = []
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        work()
        dist.barrier()
        spent.append(1e3 * (time.perf_counter() - start))
    return statistics.median(spent[2:])


def main() -> None:
    if "RANK" not in os.environ:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        sys.exit(subprocess.run([*run, *sys.argv], env=os.environ | threads).returncode)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = p2p_groups([range(ranks)])
    check(rank, ranks, *groups)
    if "--check" not in sys.argv:
        benchmark(rank, ranks, *groups)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
