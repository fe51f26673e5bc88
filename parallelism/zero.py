"""zero.py: the optimizer of a model shared out over data-parallel ranks.

Adam in mixed precision keeps 16 bytes for a parameter: 2 of weight, 2 of gradient and K = 12 of its
own (fp32 weight and two moments), and data parallelism keeps them on every rank. ZeRO (Rajbhandari
et al., arXiv:1910.02054, section 5) gives each of P ranks a P-th: of K in stage 1, of the gradients
too in stage 2 (`state_bytes` is its formula; stage 3 is FSDP's). An all-reduce is a reduce-scatter
and an all-gather, and the optimizer steps between the two: the same bytes travel.

    optimizer = DistributedOptimizer(model.parameters(), partial(torch.optim.AdamW, lr=1e-3))
    for micro in batches[:-1]:
        with optimizer.accumulate():
            loss(micro).backward()  # a sum over tokens / the count of all ranks and micro-batches
    loss(batches[-1]).backward()
    dist.all_reduce(square := optimizer.squared_norm())  # clip to norm 1
    optimizer.scale_gradients((1.0 / (square.sqrt() + 1e-6)).clamp(max=1.0))
    optimizer.step()
    optimizer.zero_grad()

As in Megatron-LM, parameters lie side by side in buckets, last used first, cut in P equal slices
anywhere, in the middle of a matrix too, and are views of them. A hook takes each gradient as it is
made; when a bucket has all its own, its reduce-scatter begins, and the backward pass goes on beside
it. Ranks begin buckets in one fixed order and, by the end, all of them, so that a parameter that
has no gradient on some rank (it counts as zero there) holds nobody up. Gradients are SUMMED. In
stage 1 they stay whole over micro-batches and are reduced in the last one; in stage 2 in each, and
then only a slice is kept. Weights below fp32 have fp32 masters, and are reduced in fp32.

What it costs: .grad is None after the backward pass, so that clipping goes by `squared_norm`; stage
2 sends gradients once per micro-batch. When it loses: few parameters or ranks; on gloo, whose
reduce-scatter is an all-reduce inside and does not tell when it is done (what was sent is freed at
the end of the backward pass, and not within it). Never for optimizers that are not elementwise
(LAMB, Muon, Adafactor), which see slices. Which hook: none, it takes parameters. Beside other
collectives in the backward pass give it a group of its own: ranks may send at other moments.

Equivalence (test_all.py): weights after 10 steps are one process's and DDP's. Needs: torch.
`torchrun --nproc-per-node 4 parallelism/zero.py` checks itself and prints a table (--check: none); `python
zero.py` starts these itself.
"""

from __future__ import annotations

import copy
import os
import statistics
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

# the older names are all that torch 2.11 has, and deprecated in 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

ALIGN = 64  # bytes: where a parameter may begin; vector loads and TMA ask for 16


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def state_bytes(
    n_params: int, ranks: int, stage: int, *, weight: int = 2, gradient: int = 2, state: int = 12
) -> float:
    """Bytes of a rank, without activations: (weight + gradient + state) * n_params, of which stage
    1 shares out the state, 2 the gradient too, 3 all (arXiv:1910.02054, 3.1 and 5: K = state).

    bf16 weights and AdamW are here weight=2, gradient=4, state=12, and fp32 ones 4, 4, 8: their
    masters are the weights. Padding comes on top.
    """
    _check(stage in (0, 1, 2, 3), f"stage must be 0, 1, 2 or 3, not {stage}")
    part = lambda first: 1 / ranks if stage >= first else 1
    return n_params * (weight * part(3) + gradient * part(2) + state * part(1))


class _Bucket:
    """Parameters of one group, dtype and device as views of `flat`. This rank's slice of it is
    `own`, which the inner optimizer steps as `master`: itself, or in fp32 where it is narrower."""

    def __init__(
        self, params: list[Parameter], group: dist.ProcessGroup | None, reduce: torch.dtype
    ):
        self.params, self.group, self.reduce, self.spans = params, group, reduce, {}
        ranks, rank, first = dist.get_world_size(group), dist.get_rank(group), params[0]
        line, end = ALIGN // first.element_size(), 0
        for p in params:
            self.spans[p] = slice(end, end + p.numel())
            end = _up(end + p.numel(), line)
        self.flat = first.new_zeros(_up(max(end, 1), ranks * line))
        for p in params:
            self.view(p).copy_(p.detach())
            p.data = self.view(p)
        dist.broadcast(self.flat, group=group, group_src=0)  # one model, as DDP makes sure of
        self.own = self.flat.chunk(ranks)[rank]
        self.master = Parameter(self.own.to(torch.promote_types(first.dtype, torch.float32)))
        self.apart = self.master.dtype != first.dtype
        self.clear()

    def view(self, p: Parameter, of: Tensor | None = None) -> Tensor:
        return (self.flat if of is None else of)[self.spans[p]].view(p.shape)

    def clear(self) -> None:
        self.whole = self.work = self.received = self.master.grad = None
        self.missing = set(self.params)

    def gradients(self) -> Tensor:
        if self.whole is None:
            self.whole = torch.zeros_like(self.flat, dtype=self.reduce)
        return self.whole

    def launch(self) -> None:
        self.received = torch.empty_like(self.own, dtype=self.reduce)
        self.work = reduce_scatter(self.received, self.gradients(), group=self.group, async_op=True)

    def land(self) -> None:
        """Add what has arrived to the master's gradient, and free the whole one."""
        self.work.wait()
        if self.master.grad is None:
            self.master.grad = self.received.to(self.master.dtype)
        else:
            self.master.grad.add_(self.received)
        self.whole = self.work = self.received = None

    def all_gather(self) -> dist.Work:
        if self.apart:
            self.own.copy_(self.master)
        return all_gather(self.flat, self.own, group=self.group, async_op=True)

    def slice_of(self, values: Mapping[Parameter, Tensor]) -> Tensor:
        """This rank's slice of tensors that are shaped like the parameters."""
        whole = torch.zeros(len(self.flat), dtype=self.master.dtype)
        for p, value in values.items():
            self.view(p, whole).copy_(value)
        place = dist.get_rank(self.group) * len(self.own)
        return whole[place : place + len(self.own)].to(self.flat.device)


def _param_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Copies of the groups, with what is trained; ValueError for what cannot lie in a bucket."""
    given = list(params)
    grouped = bool(given) and isinstance(given[0], dict)
    groups, seen = [dict(g) for g in given] if grouped else [{"params": given}], set()
    for g in groups:
        g["params"] = [g["params"]] if isinstance(g["params"], Tensor) else list(g["params"])
        for p in g["params"]:
            ok = isinstance(p, Parameter) and type(p.data) is Tensor and p.device.type != "meta"
            _check(ok, f"params must be plain parameters with memory, or groups, not {type(p)}")
        g["params"] = [p for p in dict.fromkeys(g["params"]) if p.requires_grad]
        for p in g["params"]:
            _check(p not in seen, f"a parameter {tuple(p.shape)} is in two param groups")
            ok = p.numel() == 0 or p.data_ptr() not in seen
            _check(ok, f"a parameter {tuple(p.shape)} has the memory of another: tie them by being "
                   "one Parameter, b.weight = a.weight")  # fmt: skip
            seen |= {p, p.data_ptr()}
    _check(len(seen) > 0, "params has nothing that requires a gradient")
    return groups


def _plan(
    groups: list[dict[str, Any]], reduce_dtype: torch.dtype | None, limit: int
) -> list[SimpleNamespace]:
    """Buckets (number of the group, params, dtype of the reduction), the first to be full first."""
    found = []
    for number, g in enumerate(groups):
        open_: dict[Any, SimpleNamespace] = {}
        for n, p in enumerate(reversed(g["params"]), 1):
            dtype = reduce_dtype or torch.promote_types(p.dtype, torch.float32)
            size, bucket = p.numel() * dtype.itemsize, open_.get((p.dtype, p.device))
            if bucket is None or bucket.size + size > limit:
                bucket = SimpleNamespace(number=number, params=[], dtype=dtype, size=0)
                open_[p.dtype, p.device] = bucket
                found.append(bucket)
            bucket.params.append(p)
            bucket.size += size
            # groups do not tell where in the model their parameters are: evenly all over it, then
            bucket.over = n / len(g["params"])
    return sorted(found, key=lambda bucket: bucket.over)


class DistributedOptimizer:
    """ZeRO stage 1 or 2 of the optimizer that factory(param groups) makes of flat slices.

    params: parameters, or param groups as torch.optim takes them; frozen ones are left alone. The
    groups stay: set `param_groups[i]["lr"]`, or hand `.optimizer` to a scheduler. group: the ranks
    that hold the same model; its first one's weights are given to all. bucket_bytes: of gradients
    in reduce_dtype (None: fp32, or the parameters' own if wider); a larger parameter is alone. A
    parameter's memory becomes its bucket's: build this after model.to(...), load weights by copy,
    and then `refresh`. A parameter without a gradient has a zero one. All methods but zero_grad are
    collective: every rank calls them in the same order.
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
        _check(dist.is_initialized(), "there is no process group: dist.init_process_group first")
        _check(dist.get_rank(group) >= 0, "this rank is not in the group")
        groups, self.group, self.stage = _param_groups(params), group, stage
        plan = _plan(groups, reduce_dtype, bucket_bytes)
        with torch.no_grad():
            self.buckets = [_Bucket(b.params, group, b.dtype) for b in plan]
        self._home = {p: i for i, bucket in enumerate(self.buckets) for p in bucket.params}
        for number, g in enumerate(groups):
            g["params"] = [b.master for b, at in zip(self.buckets, plan) if at.number == number]
        self.optimizer = factory(groups)
        self._held = self._reduced = False
        self._next = 0  # the bucket to send next
        hook = weakref.WeakMethod(self._arrived)  # the model does not keep the optimizer
        for p in self._home:
            p.register_post_accumulate_grad_hook(lambda p: hook() and hook()(p))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @torch.no_grad()
    def _arrived(self, p: Parameter) -> None:
        self._take(p)
        if self._held:
            return
        self.buckets[self._home[p]].missing.discard(p)
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self.buckets[self._next].launch()
            self._next += 1
        for bucket in self.buckets:  # free what has come, wait for nothing
            if bucket.work is not None and bucket.work.is_completed():
                bucket.land()

    def _take(self, p: Parameter) -> None:
        ok = self._home[p] >= self._next and not self._reduced
        _check(ok, f"a gradient of a parameter {tuple(p.shape)} came after its bucket was sent: "
               "all backward passes of a step but the last go into accumulate()")  # fmt: skip
        bucket = self.buckets[self._home[p]]
        bucket.view(p, bucket.gradients()).add_(p.grad.detach())
        p.grad = None

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """For a backward pass that is not the step's last. Stage 1 sends nothing in it, and there
        may be several; stage 2 sends its gradients, and waits for them at the end."""
        self._held = self.stage == 1
        try:
            yield
        finally:
            self._held = False
        if self.stage == 2:
            self.finish()
            self._reduced = False

    @torch.no_grad()
    def finish(self) -> None:
        """Send the buckets that wait for a gradient that did not come, and wait for all. Other
        methods call it: only who wants to throw gradients away must."""
        if self._reduced:
            return
        for p in self._home:
            if p.grad is not None:  # set by hand, or older than the hooks
                self._take(p)
        for bucket in self.buckets[self._next :]:
            bucket.launch()
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.land()
            bucket.missing = set(bucket.params)
        self._next, self._reduced = 0, True

    def squared_norm(self) -> Tensor:
        """Of this rank's slices of the gradient: the sum over the group is the model's."""
        self.finish()
        # torch.linalg.vector_norm in fp32 is up to 6e-4 off on a CPU
        squares = [b.master.grad.square().sum() for b in self.buckets]
        return torch.stack([x.to(squares[0].device) for x in squares]).sum()

    def scale_gradients(self, factor: float | Tensor) -> None:
        self.finish()
        for bucket in self.buckets:
            bucket.master.grad.mul_(factor)

    @torch.no_grad()
    def step(self) -> None:
        """ValueError where a parameter was given other memory since this was built."""
        for p, i in self._home.items():
            ok = p.data_ptr() == self.buckets[i].view(p).data_ptr()
            _check(ok, f"a parameter {tuple(p.shape)} has left its bucket: model.to(...) comes "
                   "before DistributedOptimizer(...)")  # fmt: skip
        self.finish()
        self.optimizer.step()
        for work in [bucket.all_gather() for bucket in self.buckets]:
            work.wait()
        self._reduced = False

    def zero_grad(self) -> None:
        _check(self._next == 0, "gradients are on their way: before zero_grad, step() or finish()")
        for bucket in self.buckets:
            bucket.clear()
            for p in bucket.params:
                p.grad = None
        self._reduced = False

    @torch.no_grad()
    def refresh(self) -> None:
        """Masters from the weights, after these were loaded, the same on every rank."""
        for bucket in self.buckets:
            bucket.master.copy_(bucket.own)

    @torch.no_grad()
    def gather_state(self) -> dict[Parameter, dict[str, Any]]:
        """On the group's first rank {parameter: {"step", "exp_avg", ...}}, whole, on the CPU, with
        "master" for narrow ones; elsewhere {}."""
        states: dict[Parameter, dict[str, Any]] = {}
        for b in self.buckets:
            held = dict(self.optimizer.state.get(b.master, {}))
            held |= {"master": b.master.data} if b.apart else {}
            for name, value in sorted(held.items()):  # in one order on all ranks
                sliced = isinstance(value, Tensor) and value.shape == b.master.shape
                if sliced:
                    whole = value.new_empty(len(b.flat))
                    all_gather(whole, value, group=self.group)
                for p in b.params if dist.get_rank(self.group) == 0 else ():
                    one = b.view(p, whole) if sliced else value
                    one = one.to("cpu", copy=True) if isinstance(one, Tensor) else one
                    states.setdefault(p, {})[name] = one
        return states

    @torch.no_grad()
    def load_state(self, states: Mapping[Parameter, Mapping[str, Any]]) -> None:
        """From what `gather_state` gave, on any number of ranks, each of which has all of it. Load
        the weights first: they are the masters where the state has none."""
        self.refresh()
        index = {m: i for i, m in enumerate(m for g in self.param_groups for m in g["params"])}
        inner: dict[int, dict[str, Any]] = {i: {} for i in range(len(index))}
        for b in self.buckets:
            names, part = set(states.get(b.params[0], {})), inner[index[b.master]]
            for p in b.params:
                ok = p in states and set(states[p]) == names
                _check(ok, f"the state of a parameter {tuple(p.shape)} is not there, or not all")
            for name in sorted(names):
                values = {p: states[p][name] for p in b.params}
                shaped = all(getattr(v, "shape", None) == p.shape for p, v in values.items())
                if shaped and name != "step":
                    part[name] = b.slice_of(values)
                    continue
                part[name] = copy.deepcopy(values[b.params[0]])  # one number for all of the bucket
                for p, v in values.items():
                    ok = getattr(v, "ndim", 0) == 0 and v == part[name]
                    _check(ok, f"{name} of a parameter {tuple(p.shape)} must have its shape, or be "
                           "one number, the same for all")  # fmt: skip
            b.master.copy_(part.pop("master", b.master))
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": inner})


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def check(rank: int, ranks: int) -> None:
    """Weights after 5 steps == AdamW's in one process: both stages, 2 micro-batches a step."""
    for stage in (1, 2):
        torch.manual_seed(0)
        make = lambda: torch.nn.Sequential(*(torch.nn.Linear(7, 7) for _ in range(4))).double()
        mine, alone = make(), make()
        mine[3].weight, alone[3].weight = mine[0].weight, alone[0].weight  # tied
        alone.load_state_dict(mine.state_dict())
        adam = partial(torch.optim.AdamW, lr=1e-2, eps=1e-6)
        optimizer = DistributedOptimizer(mine.parameters(), adam, stage=stage, bucket_bytes=600)
        reference = adam(alone.parameters())
        for _ in range(5):
            x = torch.randn(ranks, 2, 3, 7, dtype=torch.float64)
            for micro in range(2):
                with nullcontext() if micro else optimizer.accumulate():
                    mine(x[rank, micro]).square().sum().backward()
            alone(x).square().sum().backward()
            optimizer.step(), reference.step()
            optimizer.zero_grad(), reference.zero_grad()
        for a, b in zip(mine.parameters(), alone.parameters()):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-10), (stage, rank)


def model_to_time() -> torch.nn.Sequential:
    layers = [torch.nn.Linear(n, m) for n, m in [(512, 1024), (1024, 512)] * 4]
    return torch.nn.Sequential(*layers)


def contestants() -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    from torch.distributed.device_mesh import init_device_mesh  # peers alone, slow to import
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def sharded() -> torch.nn.Module:
        model = model_to_time()
        for layer in [*model, model]:
            fully_shard(layer, mesh=mesh)
        return model

    adam = partial(torch.optim.AdamW, lr=1e-4)
    shared = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW, lr=1e-4)
    ddp = lambda: DistributedDataParallel(model_to_time(), bucket_cap_mb=4)
    ours = partial(DistributedOptimizer, factory=adam, bucket_bytes=4 * 2**20)
    return {
        "DDP + AdamW": (ddp, adam),
        "DDP + ZeroRedundancyOptimizer": (ddp, shared),
        "fully_shard + AdamW": (sharded, adam),
        "zero.py, stage 1": (model_to_time, partial(ours, stage=1)),
        "zero.py, stage 2": (model_to_time, partial(ours, stage=2)),
    }


def benchmark(rank: int, ranks: int) -> None:
    """Milliseconds of a step, on this machine, whose ranks share its cores and memory, and MB of a
    rank's moments. The peers' gradients are means and ours sums, which costs the same."""
    n = sum(p.numel() for p in model_to_time().parameters())
    whole, part = (state_bytes(n, ranks, s, weight=0, gradient=0, state=8) / 1e6 for s in (0, 1))
    say, x = print if rank == 0 else lambda *_: None, torch.randn(64, 512)
    say(f"{ranks} ranks, gloo, {n / 1e6:.1f}M parameters, fp32, 64 rows each; by the formula the")
    say(f"moments are {whole:.1f} MB on every rank, or {part:.1f}")
    say(f"{'':>30}{'ms':>9}{'MB':>9}")
    for name, (make, factory) in contestants().items():
        model, spent = make(), []
        optimizer = factory(model.parameters())
        for _ in range(9):
            dist.barrier()
            start = time.perf_counter()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            spent.append(time.perf_counter() - start)
        inner = getattr(optimizer, "optim", None) or getattr(optimizer, "optimizer", optimizer)
        states = [t for state in inner.state.values() for t in state.values()]
        held = sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in states)
        say(f"{name:>30}{1e3 * statistics.median(spent[2:]):>9.1f}{held / 1e6:>9.1f}")


def main() -> None:
    if "RANK" not in os.environ:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        sys.exit(subprocess.run([*run, *sys.argv], env=os.environ | threads).returncode)
    dist.init_process_group("gloo")
    check(dist.get_rank(), dist.get_world_size())
    if "--check" not in sys.argv:
        benchmark(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
