"""ZeRO stages 1 and 2: optimizer states, and gradients, sharded over data-parallel ranks.

Mixed-precision Adam needs 16 bytes per parameter: 2 for the weight, 2 for the gradient and K = 12
for optimizer states (fp32 weight and two moments), and plain data parallelism stores them on every
rank. ZeRO (Rajbhandari et al., arXiv:1910.02054, section 5) stores 1/P per rank: of K in stage 1,
of the gradients too in stage 2 (`state_bytes` is its formula; stage 3 is FSDP). The all-reduce of
gradients becomes a reduce-scatter before the step and an all-gather after it: the same traffic.

    optimizer = DistributedOptimizer(model.parameters(), partial(torch.optim.AdamW, lr=1e-3))
    for micro in batches[:-1]:
        with optimizer.accumulate():
            loss(micro).backward()  # a sum over tokens / the count of all ranks and micro-batches
    loss(batches[-1]).backward()
    dist.all_reduce(square := optimizer.squared_norm())  # clip to norm 1
    optimizer.scale_gradients((1.0 / (square.sqrt() + 1e-6)).clamp(max=1.0))
    optimizer.step()
    optimizer.zero_grad()

As in Megatron-LM, parameters are views of flat buckets, in reverse order of use; a bucket is split
into P equal shards, also in the middle of a matrix. A hook adds each gradient to its bucket. When a
bucket is complete, its reduce-scatter starts and overlaps with the rest of the backward pass. All
ranks reduce all buckets in one fixed order, so that a parameter without a gradient on some rank
(zero there) does not cause a deadlock. Gradients are SUMMED, not averaged. Stage 1 accumulates full
gradients over micro-batches and reduces them in the last one; stage 2 reduces them in every
micro-batch and keeps only its shard. Weights below fp32 have fp32 master weights, and are reduced
in fp32.

Cost: .grad is None after the backward pass, so clipping uses `squared_norm`; stage 2 communicates
gradients once per micro-batch. When it loses: few parameters or ranks; on gloo, where a
reduce-scatter is an all-reduce and its completion cannot be polled (full gradients are freed only
at the end of the backward pass). Not for optimizers that are not elementwise (LAMB, Muon,
Adafactor), since they would see shards of flattened parameters. Hook: none, it takes parameters. If
the backward pass has other collectives, give it a process group of its own: the order relative to
them may differ between ranks.

Equivalence (test_all.py): weights, states and norms of each step equal those of one process. Needs:
torch. A check and a table: `torchrun --standalone --nproc-per-node 2 parallelism/zero.py`.
"""

from __future__ import annotations

import copy
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

# torch 2.11 has only the older names, which 2.13 deprecates
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

ALIGN = 64  # bytes: alignment of a parameter in its bucket; vector loads and TMA require 16


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def state_bytes(
    n_params: int, ranks: int, stage: int, *, weight: int = 2, gradient: int = 2, state: int = 12
) -> float:
    """Bytes per rank, without activations: (weight + gradient + state) * n_params. Stage 1 shards
    the optimizer state, 2 also the gradient, 3 all (arXiv:1910.02054, 3.1 and 5: K = state).

    For this file, bf16 weights and AdamW have weight=2, gradient=4, state=12, and fp32 weights 4,
    4, 8, without separate master weights. Padding is not included.
    """
    _check(stage in (0, 1, 2, 3), f"stage must be 0, 1, 2 or 3, not {stage}")
    fraction = lambda first: 1 / ranks if stage >= first else 1
    return n_params * (weight * fraction(3) + gradient * fraction(2) + state * fraction(1))


class _Bucket:
    """Parameters of one param group, dtype and device as views of `flat`. This rank's slice of it
    is `shard`. The inner optimizer updates `master`: the shard itself, or its fp32 copy if the
    dtype is narrower."""

    def __init__(
        self, params: list[Parameter], group: dist.ProcessGroup | None, reduce_dtype: torch.dtype
    ):
        self.params, self.group, self.reduce_dtype, self.spans = params, group, reduce_dtype, {}
        ranks, rank, first = dist.get_world_size(group), dist.get_rank(group), params[0]
        align, end = ALIGN // first.element_size(), 0
        for p in params:
            self.spans[p] = slice(end, end + p.numel())
            end = _round_up(end + p.numel(), align)
        self.flat = first.new_zeros(_round_up(max(end, 1), ranks * align))
        for p in params:
            self.view(p).copy_(p.detach())
            p.data = self.view(p)
        dist.broadcast(self.flat, group=group, group_src=0)  # equal weights on all ranks, as DDP
        self.shard = self.flat.chunk(ranks)[rank]
        self.master = Parameter(self.shard.to(torch.promote_types(first.dtype, torch.float32)))
        self.has_fp32_master = self.master.dtype != first.dtype
        self.clear()

    def view(self, p: Parameter, buffer: Tensor | None = None) -> Tensor:
        return (self.flat if buffer is None else buffer)[self.spans[p]].view(p.shape)

    def clear(self) -> None:
        self.full_grad = self.work = self.grad_shard = self.master.grad = None
        self.missing = set(self.params)

    def grad_buffer(self) -> Tensor:
        if self.full_grad is None:
            self.full_grad = torch.zeros_like(self.flat, dtype=self.reduce_dtype)
        return self.full_grad

    def start_reduce_scatter(self) -> None:
        self.grad_shard = torch.empty_like(self.shard, dtype=self.reduce_dtype)
        full = self.grad_buffer()
        self.work = reduce_scatter(self.grad_shard, full, group=self.group, async_op=True)

    def finish_reduce_scatter(self) -> None:
        """Add the reduced shard to the master's gradient, and free the full gradient."""
        self.work.wait()
        if self.master.grad is None:
            self.master.grad = self.grad_shard.to(self.master.dtype)
        else:
            self.master.grad.add_(self.grad_shard)
        self.full_grad = self.work = self.grad_shard = None

    def all_gather(self) -> dist.Work:
        if self.has_fp32_master:
            self.shard.copy_(self.master)
        return all_gather(self.flat, self.shard, group=self.group, async_op=True)

    def shard_of(self, values: Mapping[Parameter, Tensor]) -> Tensor:
        """This rank's shard of tensors with the shapes of the parameters."""
        full = torch.zeros(len(self.flat), dtype=self.master.dtype)
        for p, value in values.items():
            self.view(p, full).copy_(value)
        start = dist.get_rank(self.group) * len(self.shard)
        return full[start : start + len(self.shard)].to(self.flat.device)


def _param_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Copies of the param groups with their trainable parameters; ValueError for one that cannot be
    in a bucket."""
    params = list(params)
    grouped = bool(params) and isinstance(params[0], dict)
    groups, seen = [dict(g) for g in params] if grouped else [{"params": params}], set()
    for g in groups:
        g["params"] = [g["params"]] if isinstance(g["params"], Tensor) else list(g["params"])
        for p in g["params"]:
            ok = isinstance(p, Parameter) and type(p.data) is Tensor and p.device.type != "meta"
            _check(ok, f"params must be plain parameters with memory, or groups, not {type(p)}")
        g["params"] = [p for p in dict.fromkeys(g["params"]) if p.requires_grad]
        for p in g["params"]:
            _check(p not in seen, f"a parameter {tuple(p.shape)} is in two param groups")
            ok = p.numel() == 0 or p.data_ptr() not in seen
            _check(ok, f"a parameter {tuple(p.shape)} shares memory with another: tie them as one "
                   "Parameter, b.weight = a.weight")  # fmt: skip
            seen |= {p, p.data_ptr()}
    _check(len(seen) > 0, "params has nothing that requires a gradient")
    return groups


def _plan_buckets(
    groups: list[dict[str, Any]], reduce_dtype: torch.dtype | None, limit: int
) -> list[SimpleNamespace]:
    """Buckets (index of the param group, params, reduction dtype), in the order of completion."""
    found = []
    for index, g in enumerate(groups):
        open_: dict[Any, SimpleNamespace] = {}
        for n, p in enumerate(reversed(g["params"]), 1):
            dtype = reduce_dtype or torch.promote_types(p.dtype, torch.float32)
            size, bucket = p.numel() * dtype.itemsize, open_.get((p.dtype, p.device))
            if bucket is None or bucket.size + size > limit:
                bucket = SimpleNamespace(index=index, params=[], dtype=dtype, size=0)
                open_[p.dtype, p.device] = bucket
                found.append(bucket)
            bucket.params.append(p)
            bucket.size += size
            # param groups do not say where in the model their parameters are: assume evenly
            bucket.ready_at = n / len(g["params"])
    return sorted(found, key=lambda bucket: bucket.ready_at)


class DistributedOptimizer:
    """ZeRO stage 1 or 2 around the optimizer that factory(param groups) creates for flat shards.

    params: parameters, or param groups as in torch.optim; frozen ones are skipped. The param groups
    are kept: set `param_groups[i]["lr"]`, or pass `.optimizer` to a scheduler. group: the data
    parallel ranks; the weights of its first rank are broadcast. bucket_bytes: size of the gradients
    of a bucket in reduce_dtype (None: fp32, or the parameters' dtype if wider); a larger parameter
    gets its own bucket. Parameters become views of buckets: create this after model.to(...), load
    weights by copy_, then call `refresh`. A gradient that is missing on some ranks counts as zero
    there; a parameter without one on all is not updated, though Adam's count of its steps goes on.
    All methods except zero_grad are collective: every rank must call them in the same order.
    """

    def __init__(
        self,
        params: Iterable[Parameter] | Iterable[dict[str, Any]],
        factory: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        group: dist.ProcessGroup | None = None,
        *,
        stage: int = 2,
        bucket_bytes: int = 25 * 2**20,
        reduce_dtype: torch.dtype | None = None,
    ):
        _check(stage in (1, 2), f"stage must be 1 or 2, not {stage}: FSDP is stage 3")
        _check(bucket_bytes > 0, f"bucket_bytes must be more than 0, not {bucket_bytes}")
        _check(dist.is_initialized(), "no process group: call dist.init_process_group first")
        _check(dist.get_rank(group) >= 0, "this rank is not in the group")
        groups, self.group, self.stage = _param_groups(params), group, stage
        plan = _plan_buckets(groups, reduce_dtype, bucket_bytes)
        with torch.no_grad():
            self.buckets = [_Bucket(b.params, group, b.dtype) for b in plan]
        self._bucket_index = {p: i for i, bucket in enumerate(self.buckets) for p in bucket.params}
        for index, g in enumerate(groups):
            g["params"] = [b.master for b, at in zip(self.buckets, plan) if at.index == index]
        self.optimizer = factory(groups)
        self._accumulating = self._reduced = False
        self._next_bucket = 0  # the next bucket to reduce
        self._have_gradients: set[Parameter] = set()  # on this rank, since zero_grad
        hook = weakref.WeakMethod(self._on_grad_ready)  # no reference from model to optimizer
        for p in self._bucket_index:
            p.register_post_accumulate_grad_hook(lambda p: hook() and hook()(p))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @torch.no_grad()
    def _on_grad_ready(self, p: Parameter) -> None:
        self._add_to_bucket(p)
        if self._accumulating:
            return
        self.buckets[self._bucket_index[p]].missing.discard(p)
        while self._next_bucket < len(self.buckets) and not self.buckets[self._next_bucket].missing:
            self.buckets[self._next_bucket].start_reduce_scatter()
            self._next_bucket += 1
        for bucket in self.buckets:  # free completed ones, without waiting
            if bucket.work is not None and bucket.work.is_completed():
                bucket.finish_reduce_scatter()

    def _add_to_bucket(self, p: Parameter) -> None:
        ok = self._bucket_index[p] >= self._next_bucket and not self._reduced
        _check(ok, f"a parameter {tuple(p.shape)} got a gradient after its bucket was reduced: "
               "all backward passes of a step but the last go into accumulate()")  # fmt: skip
        bucket = self.buckets[self._bucket_index[p]]
        bucket.view(p, bucket.grad_buffer()).add_(p.grad.detach())
        p.grad = None
        self._have_gradients.add(p)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """For backward passes before the step's last. Stage 1 does not communicate, and the block
        may have several passes; stage 2 reduces the gradients, and waits for it at the end."""
        self._accumulating = self.stage == 1
        try:
            yield
        finally:
            self._accumulating = False
        if self.stage == 2:
            self.finish_grad_sync()
            self._reduced = False

    @torch.no_grad()
    def finish_grad_sync(self) -> None:
        """Reduce the buckets that miss a gradient, and wait for all. The other methods call this;
        callers need it only before discarding gradients."""
        if self._reduced:
            return
        for p in self._bucket_index:
            if p.grad is not None:  # set by hand, or before the hooks existed
                self._add_to_bucket(p)
        for bucket in self.buckets[self._next_bucket :]:
            bucket.start_reduce_scatter()
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.finish_reduce_scatter()
            bucket.missing = set(bucket.params)
        self._next_bucket, self._reduced = 0, True

    def squared_norm(self) -> Tensor:
        """Squared norm of this rank's shards of the gradient; sum it over the group."""
        self.finish_grad_sync()
        # torch.linalg.vector_norm in fp32 is up to 6e-4 off on a CPU
        square = lambda x: x.norm() ** 2 if x.is_cuda else x.square().sum()
        squares = [square(b.master.grad) for b in self.buckets]
        return torch.stack([x.to(squares[0].device) for x in squares]).sum()

    def scale_gradients(self, factor: float | Tensor) -> None:
        self.finish_grad_sync()
        for bucket in self.buckets:
            bucket.master.grad.mul_(factor)

    @torch.no_grad()
    def step(self) -> None:
        """ValueError if a parameter is no longer a view of its bucket."""
        for p, i in self._bucket_index.items():
            ok = p.data_ptr() == self.buckets[i].view(p).data_ptr()
            _check(ok, f"a parameter {tuple(p.shape)} has left its bucket: model.to(...) comes "
                   "before DistributedOptimizer(...)")  # fmt: skip
        self.finish_grad_sync()
        skipped = [(x, x.clone()) for x in self._without_gradients()]
        self.optimizer.step()
        for x, before in skipped:
            x.copy_(before)
        for work in [bucket.all_gather() for bucket in self.buckets]:
            work.wait()
        self._reduced = False

    def _without_gradients(self) -> Iterator[Tensor]:
        """This rank's parts of the weights, and of their optimizer states, that got no gradient on
        any rank: torch's optimizers skip such parameters, but decay all of a bucket. Collective."""
        here = [int(p in self._have_gradients) for p in self._bucket_index]
        found = torch.tensor(here, dtype=torch.int32, device=self.buckets[0].flat.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        for (p, i), has_gradient in zip(self._bucket_index.items(), found.tolist()):
            if not has_gradient:
                b = self.buckets[i]
                first, span = dist.get_rank(self.group) * len(b.shard), b.spans[p]
                own = slice(max(span.start - first, 0), max(span.stop - first, 0))
                states = self.optimizer.state[b.master].values()
                yield from (x[own] for x in (b.master.data, *states) if x.shape == b.master.shape)

    def zero_grad(self) -> None:
        _check(self._next_bucket == 0, "gradients are being reduced: call step() or "
               "finish_grad_sync() before zero_grad()")  # fmt: skip
        for bucket in self.buckets:
            bucket.clear()
            for p in bucket.params:
                p.grad = None
        self._have_gradients.clear()
        self._reduced = False

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the master weights after loading weights, which must be equal on all ranks."""
        for bucket in self.buckets:
            bucket.master.copy_(bucket.shard)

    def local_state(
        self, names: Iterable[str], step: float
    ) -> dict[Parameter, tuple[range, dict[str, Tensor]]]:
        """{parameter: (range, {name: state})} of the optimizer's states `names`: the range of the
        flattened parameter's elements whose state is on this rank, and 1-D views of it, created as
        zeros if missing. Sets the states' "step" to `step`, the number of steps done. Not
        collective."""
        found = {}
        for b in self.buckets:
            state = self.optimizer.state[b.master]
            state.setdefault("step", torch.zeros((), device=b.master.device)).fill_(step)
            for name in names:
                state.setdefault(name, torch.zeros_like(b.master))
            first = dist.get_rank(self.group) * len(b.shard)
            for p, span in b.spans.items():
                own = range(max(span.start, first), min(span.stop, first + len(b.shard)))
                if own:
                    at = slice(own.start - first, own.stop - first)
                    elements = range(own.start - span.start, own.stop - span.start)
                    found[p] = elements, {name: state[name][at] for name in names}
        return found

    @torch.no_grad()
    def gather_state(self) -> dict[Parameter, dict[str, Any]]:
        """On the group's first rank {parameter: {"step", "exp_avg", ...}}, unsharded, on the CPU,
        with "master" for weights below fp32; {} on the others."""
        states: dict[Parameter, dict[str, Any]] = {}
        for b in self.buckets:
            state = dict(self.optimizer.state.get(b.master, {}))
            state |= {"master": b.master.data} if b.has_fp32_master else {}
            for name, value in sorted(state.items()):  # the same order on all ranks
                sharded = isinstance(value, Tensor) and value.shape == b.master.shape
                if sharded:
                    full = value.new_empty(len(b.flat))
                    all_gather(full, value, group=self.group)
                for p in b.params if dist.get_rank(self.group) == 0 else ():
                    one = b.view(p, full) if sharded else value
                    one = one.to("cpu", copy=True) if isinstance(one, Tensor) else one
                    states.setdefault(p, {})[name] = one
        return states

    @torch.no_grad()
    def load_state(self, states: Mapping[Parameter, Mapping[str, Any]]) -> None:
        """Load the result of `gather_state`, on any number of ranks, each with all of it. Load the
        weights first: they become the master weights if the state has none."""
        self.refresh()
        index = {m: i for i, m in enumerate(m for g in self.param_groups for m in g["params"])}
        inner: dict[int, dict[str, Any]] = {i: {} for i in range(len(index))}
        for b in self.buckets:
            names, state = set(states.get(b.params[0], {})), inner[index[b.master]]
            for p in b.params:
                ok = p in states and set(states[p]) == names
                _check(ok, f"the state of a parameter {tuple(p.shape)} is missing or incomplete")
            for name in sorted(names):
                values = {p: states[p][name] for p in b.params}
                elementwise = all(getattr(v, "shape", None) == p.shape for p, v in values.items())
                if elementwise and name != "step":
                    state[name] = b.shard_of(values)
                    continue
                state[name] = copy.deepcopy(values[b.params[0]])  # one number per bucket
                for p, v in values.items():
                    ok = getattr(v, "ndim", 0) == 0 and v == state[name]
                    _check(ok, f"{name} of a parameter {tuple(p.shape)} must have its shape, or be "
                           "one number, the same for all")  # fmt: skip
            b.master.copy_(state.pop("master", b.master))
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": inner})


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def main() -> None:
    """Weights after 5 steps == AdamW's in one process; milliseconds of a step beside DDP's."""
    if "RANK" not in os.environ:
        sys.exit("run: torchrun --standalone --nproc-per-node 2 parallelism/zero.py")
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    gpu = torch.cuda.is_available()
    torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu")
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    adam = partial(torch.optim.AdamW, lr=1e-2, eps=1e-6)
    build = lambda C: torch.nn.Sequential(*(torch.nn.Linear(C, C) for _ in range(8)))

    def step(model: torch.nn.Module, optimizer: Any, x: Tensor) -> None:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(0)
    model, x = build(7).double(), torch.randn(5, ranks, 3, 7, dtype=torch.float64)
    single = copy.deepcopy(model)
    optimizer = DistributedOptimizer(model.parameters(), adam, bucket_bytes=600)
    reference = adam(single.parameters())
    for batch in x:
        step(model, optimizer, batch[rank]), step(single, reference, batch)
    torch.testing.assert_close([*model.parameters()], [*single.parameters()])
    C = 4096 if gpu else 512
    x, zero, ddp = torch.randn(64, C), build(C), build(C)
    zero = zero, DistributedOptimizer(zero.parameters(), adam), x
    ddp = torch.nn.parallel.DistributedDataParallel(ddp), adam(ddp.parameters()), x
    for name, args in {"ZeRO 2": zero, "DDP": ddp}.items():
        # the same number of runs on all ranks
        ms = 1e3 * Timer("step(*args)", globals=dict(step=step, args=args)).timeit(10).mean
        if rank == 0:
            print(f"8 linears of {C} x {C}, {ranks} ranks, {name}: {ms:.1f} ms per step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
