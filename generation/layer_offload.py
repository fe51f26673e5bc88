"""Streamed layers: a model larger than the device's memory, two layers resident.

A decode step uses each layer once, in order. So the weights can stay in host memory, or in files,
and cross to the device just before they are used: while layer i computes, layer i + 1 is copied
into the other of two buffers (ZeRO-Inference, DeepSpeed Inference, arXiv:2207.00032, section VI).

Cost: every step moves all layers, so it takes at least their bytes / bandwidth of the link, and one
sequence decodes at that speed: about 2 tokens per second for 8 GB of weights over 16 GB/s. When it
pays: with a batch (or a prompt) large enough that a layer computes longer than it is copied, where
throughput is that of resident weights. When it loses: whenever the weights fit.

Hook: forward hooks of the layers, which point their parameters at the buffer; `convert_module` of
load_checkpoint, so that loading holds no more than one layer on the device either.
Equivalence (test_all.py): bit for bit the logits of resident layers. Needs: torch; files need Linux
or macOS. `python generation/layer_offload.py` runs a check and prints a table.
"""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # bytes; of each tensor in a buffer


def tensors_of(layer: nn.Module) -> list[Tensor]:
    """The parameters and buffers of a layer."""
    return [*layer.parameters(), *layer.buffers()]


def host_memory(nbytes: int, where: str | Path, pin: bool) -> Tensor:
    """nbytes (uint8) of host memory, pinned on request, or of an unnamed file in folder `where`,
    which is gone when the process ends. OSError if the disk is full."""
    if where == "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin)
    Path(where).mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=where, prefix="layer-") as f:
        if hasattr(os, "posix_fallocate"):  # a full disk raises here, not SIGBUS at a write
            os.posix_fallocate(f.fileno(), 0, nbytes)
        return torch.from_file(f.name, shared=True, size=nbytes, dtype=torch.uint8)


def views(memory: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
    """Tensors of the shapes and dtypes of `like`, one after the other in memory (bytes,)."""
    out, at = [], 0
    for t in like:
        out.append(memory[at : at + t.nbytes].view(t.dtype).view(t.shape))
        at += -(-t.nbytes // ALIGNMENT) * ALIGNMENT
    return out


def packed_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory for `views` of such tensors."""
    return sum(-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in tensors)


class LayerStream:
    """Keeps layers' tensors on the host and copies each to the device when it is called.

        stream = LayerStream("cpu", device)
        for layer in model.layers:
            stream.add(layer)               # moves its tensors to the host
        stream.start(model.layers)          # call them in this order; another one waits for copies

    where: "cpu" for host memory (pinned for CUDA, where torch rounds each layer up to a power of
    two bytes), or a folder for files. The layers must share no tensor. bandwidth: of a simulated
    link, bytes per second, for measurements on a CPU; a copy then takes at least bytes / bandwidth.
    """

    def __init__(self, where: str | Path, device: torch.device, bandwidth: float | None = None):
        self.where, self.device, self.bandwidth = where, torch.device(device), bandwidth
        self.on_cuda = self.device.type == "cuda"
        self.copy_stream = torch.cuda.Stream(self.device) if self.on_cuda else None
        self.worker = ThreadPoolExecutor(1, "layer-stream")
        self.host: dict[nn.Module, list[Tensor]] = {}
        self.buffers: list[Tensor] = []  # two, on the device
        self.computed: list[Any] = [None, None]  # CUDA events: the last layer in it has computed
        self.pending: tuple[nn.Module, int, Future] | None = None  # layer, buffer, its copy

    def add(self, layer: nn.Module) -> nn.Module:
        """Move the layer's tensors to the host."""
        tensors = tensors_of(layer)
        memory = host_memory(packed_bytes(tensors), self.where, self.on_cuda)
        self.host[layer] = views(memory, tensors)
        for t, host in zip(tensors, self.host[layer]):
            host.copy_(t.detach())
        self._release(layer)
        return layer

    def start(self, layers: Iterable[nn.Module]) -> None:
        """Allocate the two buffers, and hook the layers."""
        layers = list(layers)
        nbytes = max(packed_bytes(self.host[layer]) for layer in layers)
        new = partial(torch.empty, nbytes, dtype=torch.uint8, device=self.device)
        self.buffers = [new(), new()]
        if self.on_cuda:  # their memory may still be in use by earlier kernels
            stream = torch.cuda.current_stream(self.device)
            self.computed = [stream.record_event(), stream.record_event()]
            for buffer in self.buffers:
                buffer.record_stream(self.copy_stream)
        for layer, following in zip(layers, layers[1:] + layers[:1]):
            layer.register_forward_pre_hook(partial(self._before, following))
            layer.register_forward_hook(self._after)

    def close(self) -> None:
        """Wait for the last copy, and end the thread."""
        self.worker.shutdown()
        if self.on_cuda:
            self.copy_stream.synchronize()

    def _before(self, following: nn.Module, layer: nn.Module, args: Any) -> None:
        if self.pending is None or self.pending[0] is not layer:  # the first call, or another order
            if self.pending is not None:
                self.pending[2].result()
            self._fetch(layer, 0)
        _, index, copy = self.pending
        arrived = copy.result()
        if self.on_cuda:
            torch.cuda.current_stream(self.device).wait_event(arrived)
        host = self.host[layer]
        for t, data in zip(tensors_of(layer), views(self.buffers[index], host)):
            t.data = data
        layer._stream_buffer = index
        self._fetch(following, 1 - index)

    def _after(self, layer: nn.Module, args: Any, output: Any) -> None:
        if self.on_cuda:
            stream = torch.cuda.current_stream(self.device)
            self.computed[layer._stream_buffer] = stream.record_event()
        self._release(layer)

    def _release(self, layer: nn.Module) -> None:
        """Free the layer's memory: each tensor becomes one element, expanded to its shape."""
        for t in tensors_of(layer):
            t.data = torch.zeros((), dtype=t.dtype, device=self.device).expand(t.shape)

    def _fetch(self, layer: nn.Module, index: int) -> None:
        """Start copying a layer into a buffer."""
        self.pending = layer, index, self.worker.submit(self._copy, self.host[layer], index)

    @torch.inference_mode()
    def _copy(self, host: list[Tensor], index: int) -> Any:
        """Copy, or on CUDA enqueue the copy; returns the event to wait for."""
        start, device = time.perf_counter(), views(self.buffers[index], host)
        if self.on_cuda:
            with torch.cuda.stream(self.copy_stream):
                self.copy_stream.wait_event(self.computed[index])
                for to, source in zip(device, host):
                    to.copy_(source, non_blocking=True)
                return self.copy_stream.record_event()
        for to, source in zip(device, host):
            to.copy_(source)
        if self.bandwidth is not None:
            seconds = packed_bytes(host) / self.bandwidth
            time.sleep(max(0.0, start + seconds - time.perf_counter()))
        return None


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def main() -> None:
    """Streamed == resident, bit for bit; rows per second by batch, beside resident layers."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    device, width = ("cuda", 8192) if torch.cuda.is_available() else ("cpu", 1024)
    torch.manual_seed(0)
    resident = nn.Sequential(*(nn.Linear(width, width) for _ in range(8))).bfloat16().to(device)
    with tempfile.TemporaryDirectory() as folder:
        streamed: dict[str, nn.Module] = {"resident": resident}
        for where in ("cpu", folder):
            model, stream = copy.deepcopy(resident), LayerStream(where, device)
            for layer in model:
                stream.add(layer)
            stream.start(model)
            streamed["from files" if where == folder else "from host"] = model
        print(f"{'batch':>8}" + "".join(f"{name:>12}" for name in streamed) + "   rows per second")
        for batch in (1, 64, 1024):
            x, line = torch.randn(batch, width, device=device).bfloat16(), f"{batch:>8}"
            for model in streamed.values():
                assert torch.equal(model(x), resident(x))
                t = Timer("f(x)", globals=dict(f=model, x=x)).blocked_autorange().median
                line += f"{batch / t:>12.0f}"
            print(line)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
