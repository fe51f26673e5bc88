"""offload.py: gradients that never stand side by side, and optimizer states that live elsewhere.

A parameter of fp32 with AdamW is 4 bytes of weight, 4 of gradient and 8 of moments; in bf16 with
fp32 masters it is 2, 2 and 12. Two ways to less of it on the device that computes:

    OptimizerInBackward   Each parameter's optimizer steps as soon as its gradient is there, within
                          the backward pass, and frees it: of all gradients one or two exist at a
                          time (LOMO, Lv et al., arXiv:2306.09782, 3.2; torchtitan has it too).
    OffloadedOptimizer    Masters and moments are in the host's memory, and its cores take the step
                          (ZeRO-Offload, arXiv:2101.06840); or they are in memory-mapped files on a
                          disk, and visited one parameter at a time (ZeRO-Infinity,
                          arXiv:2104.07857): as many of them as the disk has room for.

What it costs. In-backward: there is no moment at which all gradients exist, so no clipping by the
norm of all, no micro-batches, no step that is skipped; the loss must be divided by its count before
backward. Offloaded: 2 or 4 bytes a parameter over the bus down and up per step, and a step at the
speed of host memory, or of the disk where the page cache is smaller than the states. When it loses:
wherever the states fit. Peers are the resident optimizer and, for shares of ranks, zero.py.

Gradients are taken off the device in `step`, parameter by parameter, each while the CPU steps the
one before, not by hooks as they come: so a caller may clip or scale them first, and add up
micro-batches where they are. What travels is staged in two pinned buffers as large as the largest
parameter; pinned memory for all, which torch gives in powers of two, would save a copy in the
host's memory for fp32 weights, and none for bf16, which are rounded on the way.

Hook: parameters' post-accumulate-grad hooks, which fully_shard calls with shards, for the first;
none for the second. DTensors are stepped as this rank's plain shard: only elementwise optimizers
(AdamW, not Muon) may be handed over. Equivalence (test_all.py): weights and states are bit for bit
those of the resident optimizer (fused AdamW on a CPU). Needs: torch, and for files Linux or macOS.
`python training/offload.py` checks itself and prints a table.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

Factory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]  # of param groups


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _local(t: Tensor) -> Tensor:
    """Of a DTensor this rank's part, which has its memory."""
    return t.to_local() if hasattr(t, "to_local") else t


def _each(params: Iterable[Any]) -> Iterator[tuple[Parameter, dict[str, Any]]]:
    """(trained parameter, settings of its group); params: parameters, or groups of torch.optim."""
    given, seen = list(params), set()
    grouped = bool(given) and isinstance(given[0], dict)
    for group in given if grouped else [{"params": given}]:
        own = group["params"]
        for p in [own] if isinstance(own, Tensor) else own:
            _check(isinstance(p, Tensor), f"params must be parameters, not {type(p)}")
            _check(p not in seen, f"a parameter {tuple(p.shape)} is there twice")
            seen.add(p)
            if p.requires_grad:
                yield p, {k: v for k, v in group.items() if k != "params"}
    _check(any(p.requires_grad for p in seen), "params has nothing that requires a gradient")


# --------------------------------------------------------------------------------------------------
# In the backward pass
# --------------------------------------------------------------------------------------------------


class OptimizerInBackward:
    """factory([{"params": [p], ...}]) for every parameter p, stepped by the backward pass, which
    leaves p.grad None.

    Set `param_groups[i]["lr"]` before the backward pass: there is a group for each parameter, with
    the settings of its own. `state` is all parameters'. It ends with this object, which the model
    does not keep alive, or with `remove`.
    """

    def __init__(self, params_or_groups: Iterable[Any], factory: Factory):
        self._of = {p: factory([{**how, "params": [p]}]) for p, how in _each(params_or_groups)}
        self.param_groups = [g for o in self._of.values() for g in o.param_groups]
        self.state: MutableMapping[Tensor, dict[str, Any]] = defaultdict(dict)
        hook = weakref.WeakMethod(self._step)
        arrived = lambda p: hook() and hook()(p)
        self._handles = [p.register_post_accumulate_grad_hook(arrived) for p in self._of]
        for optimizer in self._of.values():
            optimizer.state = self.state  # one mapping for all

    def _step(self, p: Tensor) -> None:
        self._of[p].step()
        p.grad = None

    def remove(self) -> None:
        """Take the hooks off: gradients stay again."""
        for handle in self._handles:
            handle.remove()

    def step(self) -> None:
        """Nothing: it is done."""

    def zero_grad(self) -> None:
        """Nothing: they are gone."""


# --------------------------------------------------------------------------------------------------
# On the host, in memory or in files
# --------------------------------------------------------------------------------------------------


class _Slot:
    """Pinned memory through which every second parameter comes and goes, on a stream beside the one
    that computes. All is in order there: when a gradient has arrived, what was sent to the device
    two parameters before has left."""

    def __init__(self, nbytes: int, stream: torch.cuda.Stream):
        self.down, self.up = (torch.empty(nbytes, dtype=torch.uint8).pin_memory() for _ in "du")
        self.stream, self.arrived = stream, torch.cuda.Event()

    @staticmethod
    def _as(memory: Tensor, like: Tensor) -> Tensor:
        return memory[: like.nbytes].view(like.dtype).view(like.shape)

    def fetch(self, grad: Tensor) -> Callable[[], Tensor]:
        """Begin to copy; what is returned waits for it and gives the copy."""
        here = self._as(self.down, grad)
        with torch.cuda.stream(self.stream):
            here.copy_(grad, non_blocking=True)
            self.arrived.record()
        return lambda: self.arrived.synchronize() or here

    def send(self, master: Tensor, p: Tensor) -> None:
        """Begin to copy master to p, in p's dtype."""
        here = self._as(self.up, p).copy_(master)
        with torch.cuda.stream(self.stream):
            p.copy_(here, non_blocking=True)


class _Home:
    """A parameter's fp32 master on the host, and its optimizer with the state that it makes."""

    def __init__(self, p: Parameter, how: dict[str, Any], factory: Factory):
        self.p, self.narrow = p, p.dtype != torch.float32
        self.master = Parameter(_local(p.detach()).to("cpu", torch.float32, copy=True))
        self.optimizer = factory([{**how, "params": [self.master]}])

    @contextmanager
    def visit(self) -> Iterator[dict[str, Any]]:
        """The optimizer's state of the parameter; the master has its memory within."""
        yield self.optimizer.state[self.master]

    def stepped(self) -> bool:
        return bool(self.optimizer.state.get(self.master))


class _FileHome(_Home):
    """The same in files `stem`.NAME, mapped in a visit only: resident is what is being visited."""

    def __init__(self, p: Parameter, how: dict[str, Any], factory: Factory, stem: str):
        super().__init__(p, how, factory)
        self.stem, self.shape, self.names = stem, self.master.shape, []
        self._leave({}, {})

    def stepped(self) -> bool:
        return super().stepped() or len(self.names) > 1

    def _map(self, name: str) -> Tensor:
        flat = torch.from_file(
            f"{self.stem}.{name}", shared=True, size=self.shape.numel(), dtype=torch.float32
        )
        return flat.view(self.shape)

    def _allocate(self, name: str) -> Tensor:
        """A file of its own; OSError if the disk is full, where a write to a mapped file that has
        no blocks kills the process."""
        path = Path(f"{self.stem}.{name}")
        path.unlink(missing_ok=True)  # not to cut a file short that somebody still has mapped
        with open(path, "wb") as f:
            if hasattr(os, "posix_fallocate"):
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
            self._leave(state, mapped)

    def _leave(self, state: dict[str, Any], mapped: dict[str, Tensor]) -> None:
        """Let go of what has the master's shape and dtype, to a file if it is in none yet."""
        form = (torch.float32, self.shape)
        like = lambda t: isinstance(t, Tensor) and (t.dtype, t.shape) == form
        shaped = {"master": self.master.data} | {n: t for n, t in state.items() if like(t)}
        for name, t in shaped.items():
            file = mapped[name] if name in mapped else self._allocate(name)
            if t is not file:
                file.copy_(t)
            state.pop(name, None)
        self.master.data = torch.empty(0)


class _States(Mapping):
    """The optimizers' states by parameter, of those that have been stepped."""

    def __init__(self, homes: dict[Parameter, _Home]):
        self._homes = homes

    def __iter__(self) -> Iterator[Parameter]:
        return (p for p, home in self._homes.items() if home.stepped())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, p: Parameter) -> Mapping[str, Any]:
        home = self._homes[p]
        if not home.stepped():
            raise KeyError(f"a parameter {tuple(p.shape)} has made no step")
        with home.visit() as state:
            return MappingProxyType(state | ({"master": home.master.data} if home.narrow else {}))

    def __setitem__(self, p: Parameter, values: Mapping[str, Any]) -> None:
        home = self._homes[p]
        with torch.no_grad(), home.visit() as state:
            held = {
                k: _local(v.detach()) if isinstance(v, Tensor) else v for k, v in values.items()
            }
            home.master.data.copy_(held.pop("master", _local(p.detach())))
            for name, v in held.items():
                ok = not isinstance(v, Tensor) or v.dim() == 0 or v.shape == home.master.shape
                _check(ok, f"{name} has the shape {tuple(getattr(v, 'shape', ()))}, its parameter "
                       f"{tuple(home.master.shape)}")  # fmt: skip
                state[name] = v.to("cpu", torch.float32, copy=True) if isinstance(v, Tensor) else v

    def update(self, values: Mapping[Parameter, Mapping[str, Any]]) -> None:
        for p, state in values.items():
            self[p] = state


class OffloadedOptimizer:
    """factory(param groups) for fp32 masters of `groups`' parameters, with its state on the host.

    where: "cpu", or the Path of a folder for files, one for each rank; what is there is written
    over, and it is as large as masters and states. Parameters are on one device, of any dtype; a
    CPU will do. `param_groups` has a group for each of them, to set "lr" in. `state[p]` has what
    the factory's optimizer keeps ("step", "exp_avg", "exp_avg_sq") as plain fp32 tensors on the
    CPU, of this rank's shard if p is a DTensor, and "master" where p is narrower; they may be
    written to in place, or `state[p] = {...}` copies others in, and takes the master from p if they
    have none. After new weights without a state call `refresh`. OSError where the disk is full.
    """

    def __init__(self, groups: Iterable[Any], factory: Factory, where: str | Path = "cpu"):
        files, params = isinstance(where, Path), list(_each(groups))
        _check(files or where == "cpu", f'where must be "cpu" or a Path, not {where!r}')
        devices = {p.device for p, _ in params}
        _check(len(devices) == 1, f"parameters must be on one device, not on {devices}")
        if files:
            where.mkdir(parents=True, exist_ok=True)
        self._homes: dict[Parameter, _Home] = {}
        for i, (p, how) in enumerate(params):
            if files and _local(p).numel() > 0:  # an empty file cannot be mapped
                self._homes[p] = _FileHome(p, how, factory, str(where / f"{i:05d}"))
            else:
                self._homes[p] = _Home(p, how, factory)
        self.param_groups = [g for h in self._homes.values() for g in h.optimizer.param_groups]
        self.state = _States(self._homes)
        self._slots, self._stream, device = [], None, devices.pop()
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            most = max(_local(p.detach()).nbytes for p in self._homes)
            self._slots = [_Slot(most, self._stream) for _ in range(2)]

    def _fetch(self, todo: list[Parameter], i: int) -> Callable[[], Tensor] | None:
        """Begin to take the gradient of todo[i] to the host; a function that waits for it."""
        if i == len(todo):
            return None
        grad = _local(todo[i].grad)
        return self._slots[i % 2].fetch(grad) if self._slots else lambda: grad

    @torch.no_grad()
    def step(self) -> None:
        """Of all parameters that have a gradient, which stays until zero_grad."""
        todo = [p for p in self._homes if p.grad is not None]
        if self._slots:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        ahead = self._fetch(todo, 0)
        for i, p in enumerate(todo):
            here, ahead, home = ahead, self._fetch(todo, i + 1), self._homes[p]
            with home.visit():
                home.master.grad = here().float()
                home.optimizer.step()
                home.master.grad = None
                if self._slots:
                    self._slots[i % 2].send(home.master, _local(p.detach()))
                else:
                    _local(p.detach()).copy_(home.master)
        if self._slots:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def zero_grad(self) -> None:
        for p in self._homes:
            p.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Masters from the weights, after these were loaded."""
        for p, home in self._homes.items():
            with home.visit():
                home.master.data.copy_(_local(p.detach()))


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------

NAMES = ("resident", "in backward", "cpu", "files")


def adam(groups: list[Any], fused: bool = True) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=fused)


def optimizer_of(name: str, model: torch.nn.Module, folder: str) -> Any:
    params = list(model.parameters())
    return {
        "resident": lambda: adam(params),
        "in backward": lambda: OptimizerInBackward(params, adam),
        "cpu": lambda: OffloadedOptimizer(params, adam),
        "files": lambda: OffloadedOptimizer(params, adam, Path(folder)),
    }[name]()


def check() -> None:
    """Weights after 3 steps are the resident optimizer's, to the last bit."""
    results = {}
    for name in NAMES:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.Linear(65, 7))
        with tempfile.TemporaryDirectory() as folder:
            optimizer = optimizer_of(name, model, folder)
            for _ in range(3):
                model(torch.randn(4, 33)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        results[name] = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert torch.equal(results[name], results["resident"]), name


def steps(name: str, device: str, folder: str, layers: int, width: int) -> float:
    """Median milliseconds from batch to weights."""
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    x, spent = torch.randn(64, width, device=device), []
    optimizer = optimizer_of(name, model.to(device), folder)
    for _ in range(6):
        start = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - start)
    return 1e3 * statistics.median(spent[1:])


def most_resident() -> int:
    """Bytes, the most of this process since the last call, as Linux has it."""
    words = Path("/proc/self/status").read_text().split()
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(words[words.index("VmHWM:") + 1])


def measure(name: str, device: str, folder: str) -> None:
    """Print a row; the process is this row's alone."""
    steps(name, device, folder, 1, 16)  # loads what is loaded late
    before, n = most_resident(), 16 * 1024**2
    ms = steps(name, device, folder, 16, 1024)
    row = f"{name:>12}{ms:>8.1f}{(most_resident() - before) / n - 4 * (device == 'cpu'):>9.1f}"
    if device == "cuda":
        row += f"{torch.cuda.max_memory_allocated() / n - 4:>9.1f}"
    print(row)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        if sys.argv[1:]:
            measure(sys.argv[1], device, folder)
            return
        check()
        if sys.platform != "linux":
            sys.exit("checked; the table asks Linux's /proc for its bytes")
        print(f"{device}, {torch.get_num_threads()} threads, 16.8M parameters, fp32, fused AdamW")
        gpu = f"{'GPU':>9}" if device == "cuda" else ""
        print(
            f"bytes a parameter beside the weights\n{'':>12}{'ms':>8}{'host':>9}{gpu}", flush=True
        )
        freed = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory goes back, and does not count
        for name in NAMES:
            run = [sys.executable, __file__, name]
            subprocess.run(run, env=os.environ | freed, check=True)


if __name__ == "__main__":
    main()
