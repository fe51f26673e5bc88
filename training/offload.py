"""Optimizer step in the backward pass, and optimizer states in host memory or on disk.

With AdamW an fp32 parameter takes 4 bytes of weight, 4 of gradient and 8 of optimizer states; a
bf16 one with an fp32 master weight takes 2, 2 and 12. Two ways to reduce that on the device:

    OptimizerInBackward   Each parameter's optimizer steps as soon as its gradient is accumulated,
                          and frees the gradient: only one or two exist at a time (LOMO, Lv et al.,
                          arXiv:2306.09782, 3.2; torchtitan has it too).
    OffloadedOptimizer    Master weights and optimizer states are in host memory, and the CPU does
                          the step (ZeRO-Offload, arXiv:2101.06840); or they are in memory-mapped
                          files on a disk, mapped one parameter at a time (ZeRO-Infinity,
                          arXiv:2104.07857).

Cost, in backward: no clipping by the global norm, no gradient accumulation over micro-batches and
no skipped step; the loss must be normalized before backward. Cost, offloaded: 2 or 4 bytes per
parameter over the bus each way per step, and a step at the speed of host memory, or of the disk if
the page cache is smaller than the states. When it loses: wherever the states fit on the device, or
on several (parallelism/zero.py).

`step` copies gradients to the host parameter by parameter, each while the CPU steps the previous
one, and not from hooks in backward, so that the caller can first clip or accumulate them. Transfers
are staged in two pinned buffers the size of the largest parameter.

Hook: parameters' post-accumulate-grad hooks, which fully_shard calls with shards, for the first;
none for the second. DTensors are stepped as this rank's local shard, so only elementwise optimizers
(AdamW, not Muon) are possible. Equivalence (test_all.py): weights and states are bit for bit those
of the resident optimizer (fused AdamW on a CPU). Needs: torch, and for files Linux or macOS.
`python training/offload.py` runs a check and prints a table.
"""

from __future__ import annotations

import copy
import os
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

Factory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]  # of param groups


def _check(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _local(t: Tensor) -> Tensor:
    """This rank's shard of a DTensor, sharing its memory; a plain tensor unchanged."""
    return t.to_local() if hasattr(t, "to_local") else t


def _trainable_params(params: Iterable[Any]) -> list[tuple[Parameter, dict[str, Any]]]:
    """(trainable parameter, settings of its group) of parameters or torch.optim's groups."""
    found = []
    for group in torch.optim.Optimizer(params, {}).param_groups:  # which checks them
        settings = {k: v for k, v in group.items() if k != "params"}
        found += [(p, settings) for p in group["params"] if p.requires_grad]
    _check(found, "params has no parameter that requires a gradient")
    return found


class OptimizerInBackward:
    """factory([{"params": [p], ...}]) for every parameter p, stepped by the backward pass, which
    leaves p.grad None.

    Set `param_groups[i]["lr"]` before the backward pass: there is one group per parameter, with the
    settings of its original group. `state` is that of all parameters. The hooks end with `remove`
    or when this object is freed; the model does not keep it alive.
    """

    def __init__(self, params_or_groups: Iterable[Any], factory: Factory):
        self._optimizers = {
            p: factory([{**settings, "params": [p]}])
            for p, settings in _trainable_params(params_or_groups)
        }
        self.param_groups = [g for o in self._optimizers.values() for g in o.param_groups]
        self.state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        hook = weakref.WeakMethod(self._step)
        on_grad = lambda p: hook() and hook()(p)
        self._handles = [p.register_post_accumulate_grad_hook(on_grad) for p in self._optimizers]
        for optimizer in self._optimizers.values():
            optimizer.state = self.state  # one mapping for all

    def _step(self, p: Tensor) -> None:
        self._optimizers[p].step()
        p.grad = None

    def remove(self) -> None:
        """Remove the hooks: gradients are kept again."""
        for handle in self._handles:
            handle.remove()

    def step(self) -> None:
        """No-op: the backward pass has done it."""

    def zero_grad(self) -> None:
        """No-op: the gradients are already freed."""


class _Slot:
    """Pinned buffers for a gradient and for weights, used by every second parameter. The copies
    from and to the GPU run on two streams, at the same time."""

    def __init__(self, nbytes: int, d2h: torch.cuda.Stream, h2d: torch.cuda.Stream):
        pinned = lambda: torch.empty(nbytes, dtype=torch.uint8).pin_memory()
        self.grad, self.weights, self.d2h, self.h2d = pinned(), pinned(), d2h, h2d
        self.fetched, self.sent = torch.cuda.Event(), torch.cuda.Event()

    @staticmethod
    def _as(buffer: Tensor, like: Tensor) -> Tensor:
        return buffer[: like.nbytes].view(like.dtype).view(like.shape)

    def fetch(self, grad: Tensor) -> Callable[[], Tensor]:
        """Start copying grad to the host; returns a function that waits for the copy and returns
        it."""
        buffer = self._as(self.grad, grad)
        with torch.cuda.stream(self.d2h):
            buffer.copy_(grad, non_blocking=True)
            self.fetched.record()
        return lambda: self.fetched.synchronize() or buffer

    def send(self, master: Tensor, p: Tensor) -> None:
        """Start copying master to p, in p's dtype."""
        self.sent.synchronize()  # the previous weights have left the buffer
        buffer = self._as(self.weights, p).copy_(master)
        with torch.cuda.stream(self.h2d):
            p.copy_(buffer, non_blocking=True)
            self.sent.record()


class _HostState:
    """A parameter's fp32 master weight on the host, and its optimizer with the states."""

    def __init__(self, p: Parameter, settings: dict[str, Any], factory: Factory):
        self.p, self.low_precision = p, p.dtype != torch.float32
        self.master = Parameter(_local(p.detach()).to("cpu", torch.float32, copy=True))
        self.optimizer = factory([{**settings, "params": [self.master]}])

    @contextmanager
    def visit(self) -> Iterator[dict[str, Any]]:
        """The parameter's optimizer state; self.master has data inside the context."""
        yield self.optimizer.state[self.master]

    def has_state(self) -> bool:
        return bool(self.optimizer.state.get(self.master))


class _FileState(_HostState):
    """The same in files `stem`.NAME, memory-mapped only inside `visit`."""

    def __init__(self, p: Parameter, settings: dict[str, Any], factory: Factory, stem: str):
        super().__init__(p, settings, factory)
        self.stem, self.shape, self.names = stem, self.master.shape, []
        self._unmap({}, {})

    def has_state(self) -> bool:
        return super().has_state() or len(self.names) > 1

    def _map(self, name: str) -> Tensor:
        size = self.shape.numel()
        flat = torch.from_file(f"{self.stem}.{name}", shared=True, size=size, dtype=torch.float32)
        return flat.view(self.shape)

    def _allocate(self, name: str) -> Tensor:
        """Create and map a file; OSError if the disk is full, where a write to a sparse mapped
        file kills the process with SIGBUS."""
        path = Path(f"{self.stem}.{name}")
        path.unlink(missing_ok=True)  # never truncate a file that may still be mapped elsewhere
        with open(path, "wb") as f:
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(f.fileno(), 0, 4 * self.shape.numel())
        self.names.append(name)
        return self._map(name)

    @contextmanager
    def visit(self) -> Iterator[dict[str, Any]]:
        state, mapped = self.optimizer.state[self.master], {n: self._map(n) for n in self.names}
        self.master.data = mapped["master"]
        state.update((name, t) for name, t in mapped.items() if name != "master")
        try:
            yield state
        finally:
            self._unmap(state, mapped)

    def _unmap(self, state: dict[str, Any], mapped: dict[str, Tensor]) -> None:
        """Unmap tensors of the master's shape and dtype, writing new ones to files."""
        dtype_shape = (torch.float32, self.shape)
        on_disk = lambda t: isinstance(t, Tensor) and (t.dtype, t.shape) == dtype_shape
        tensors = {"master": self.master.data} | {n: t for n, t in state.items() if on_disk(t)}
        for name, t in tensors.items():
            file = mapped[name] if name in mapped else self._allocate(name)
            if t is not file:
                file.copy_(t)
            state.pop(name, None)
        self.master.data = torch.empty(0)


class _StateMapping(Mapping):
    """{parameter: optimizer state}, of the parameters that have been stepped."""

    def __init__(self, host_states: dict[Parameter, _HostState]):
        self._host_states = host_states

    def __iter__(self) -> Iterator[Parameter]:
        return (p for p, host_state in self._host_states.items() if host_state.has_state())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, p: Parameter) -> Mapping[str, Any]:
        host_state = self._host_states[p]
        if not host_state.has_state():
            raise KeyError(f"a parameter {tuple(p.shape)} has no state before its first step")
        with host_state.visit() as state:
            master = {"master": host_state.master.data} if host_state.low_precision else {}
            return MappingProxyType(state | master)

    def __setitem__(self, p: Parameter, values: Mapping[str, Any]) -> None:
        host_state = self._host_states[p]
        with torch.no_grad(), host_state.visit() as state:
            shape = host_state.master.shape
            host_state.master.data.copy_(_local(values.get("master", p).detach()))
            for name, v in values.items():
                if name == "master":
                    continue
                if isinstance(v, Tensor):
                    v = _local(v.detach()).to("cpu", torch.float32, copy=True)
                    ok = f"{name} has shape {tuple(v.shape)}, its parameter {tuple(shape)}"
                    _check(v.dim() == 0 or v.shape == shape, ok)
                state[name] = v

    def update(self, values: Mapping[Parameter, Mapping[str, Any]]) -> None:
        for p, state in values.items():
            self[p] = state


class OffloadedOptimizer:
    """factory(param groups) for fp32 master weights of the parameters in `groups`, with master
    weights and optimizer states on the host.

    where: "cpu", or the Path of a folder for files as large as masters and states, a different one
    for each rank; existing files are overwritten. Parameters have any dtype and are on one device,
    which may be a CPU. `param_groups` has one group per parameter, to set "lr" in. `state[p]` has
    the states of the factory's optimizer ("step", "exp_avg", "exp_avg_sq") as fp32 tensors on the
    CPU, of this rank's shard if p is a DTensor, and "master" if p is not fp32; write to them in
    place, or assign `state[p] = {...}`, which copies its values, and p if "master" is missing.
    After loading weights without states call `refresh`. OSError if the disk is full.
    """

    def __init__(self, groups: Iterable[Any], factory: Factory, where: str | Path = "cpu"):
        files, params = isinstance(where, Path), _trainable_params(groups)
        _check(files or where == "cpu", f'where must be "cpu" or a Path, not {where!r}')
        devices = {p.device for p, _ in params}
        _check(len(devices) == 1, f"parameters must be on one device, not on {devices}")
        if files:
            try:
                where.mkdir(parents=True, exist_ok=True)
            except OSError as e:
                raise OSError(f"--offload {where}: {e.strerror}; give another folder") from None
        self._host_states: dict[Parameter, _HostState] = {}
        for i, (p, settings) in enumerate(params):
            if files and _local(p).numel() > 0:  # an empty file cannot be mapped
                self._host_states[p] = _FileState(p, settings, factory, str(where / f"{i:05d}"))
            else:
                self._host_states[p] = _HostState(p, settings, factory)
        optimizers = [h.optimizer for h in self._host_states.values()]
        self.param_groups = [g for optimizer in optimizers for g in optimizer.param_groups]
        self.state = _StateMapping(self._host_states)
        self._slots, self._streams, device = [], [], devices.pop()
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in range(2)]
            most = max(_local(p.detach()).nbytes for p in self._host_states)
            self._slots = [_Slot(most, *self._streams) for _ in range(2)]

    def _fetch(self, params: list[Parameter], i: int) -> Callable[[], Tensor] | None:
        """Start copying the gradient of params[i] to the host; returns a function that waits."""
        if i == len(params):
            return None
        grad = _local(params[i].grad)
        return self._slots[i % 2].fetch(grad) if self._slots else lambda: grad

    @torch.no_grad()
    def step(self) -> None:
        """Step all parameters that have a gradient; gradients are kept until zero_grad."""
        params = [p for p in self._host_states if p.grad is not None]
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        next_grad = self._fetch(params, 0)
        for i, p in enumerate(params):
            grad, next_grad = next_grad, self._fetch(params, i + 1)
            host_state = self._host_states[p]
            with host_state.visit():
                host_state.master.grad = grad().float()
                host_state.optimizer.step()
                host_state.master.grad = None
                if self._slots:
                    self._slots[i % 2].send(host_state.master, _local(p.detach()))
                else:
                    _local(p.detach()).copy_(host_state.master)
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def zero_grad(self) -> None:
        for p in self._host_states:
            p.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights to the masters: call it after loading weights."""
        for p, host_state in self._host_states.items():
            with host_state.visit():
                host_state.master.data.copy_(_local(p.detach()))


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------

ADAM = partial(torch.optim.AdamW, lr=1e-3, fused=True)
KINDS: dict[str, Callable[[list[Parameter], Path], Any]] = {
    "resident": lambda params, folder: ADAM(params),
    "in backward": lambda params, folder: OptimizerInBackward(params, ADAM),
    "cpu": lambda params, folder: OffloadedOptimizer(params, ADAM),
    "files": lambda params, folder: OffloadedOptimizer(params, ADAM, folder),
}


def check(width: int = 65, timed: bool = False) -> None:
    """Weights after 3 steps are bit for bit those of the resident optimizer; ms per step."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    device, weights = "cuda" if torch.cuda.is_available() else "cpu", []
    start = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8))).to(device)
    x = torch.randn(64, width, device=device)

    def step(model: torch.nn.Module, optimizer: Any) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for name, make in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            model = copy.deepcopy(start)
            run = partial(step, model, make(list(model.parameters()), Path(folder)))
            for _ in range(3):
                run()
            weights.append(model[0].weight.detach().clone())
            assert device == "cuda" or torch.equal(weights[-1], weights[0]), name
            if timed:
                ms = 1e3 * Timer("run()", globals={"run": run}).blocked_autorange().median
                print(f"{name:>12}{ms:>8.1f} ms per step of 8 linears of {width} x {width}, fp32")


if __name__ == "__main__":
    check(4096 if torch.cuda.is_available() else 1024, timed=True)
