"""Compiled decode steps of static shapes, on CUDA replayed as CUDA graphs (gpt-fast)."""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def compile_step(step: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Compile to one graph of static shapes. On CUDA, coordinate_descent_tuning lets Inductor
    generate matrix-vector products as reductions, fused with neighbouring ops."""
    options = {"coordinate_descent_tuning": True} if device.type == "cuda" else {}
    return torch.compile(step, fullgraph=True, dynamic=False, options=options)


class CUDAGraphRunner:
    """A function of tensors (or None), compiled for every input shape; on CUDA captured as a CUDA
    graph with static inputs. Its side effects, such as cache writes, may happen twice."""

    def __init__(self, step: Callable[..., Any], device: torch.device):
        self.step, self.cuda = compile_step(step, device), device.type == "cuda"
        self.graphs: dict[Any, Callable[..., Any]] = {}  # by input shapes

    def __call__(self, *inputs: Tensor | None) -> Any:
        key = tuple(None if x is None else x.shape for x in inputs)
        if key not in self.graphs:
            with torch._dynamo.config.patch(recompile_limit=64):
                self.step(*inputs)
            self.graphs[key] = self._capture(inputs) if self.cuda else self.step
        return self.graphs[key](*inputs)

    def _capture(self, inputs: Sequence[Tensor | None]) -> Callable[..., Any]:
        static_inputs = [None if x is None else x.clone() for x in inputs]
        self.step(*static_inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.step(*static_inputs)

        def replay(*inputs: Tensor | None) -> Any:
            for static, new in zip(static_inputs, inputs):
                if static is not None:
                    static.copy_(new)
            graph.replay()
            return out

        return replay


def gather_experts_if_compiled(experts: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An experts hook for compiled steps without a grouped kernel: gathers the weights of each
    token's K experts, so that no shape depends on routing. Outside of torch.compile, as in prefill,
    it calls the given `experts`."""

    def run(x: Tensor, weights: Tensor, ids: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return experts(x, weights, ids, w_gate_up, w_down)
        gate, up = torch.einsum("nc,nkfc->nkf", x, w_gate_up[ids]).chunk(2, dim=-1)
        y = torch.einsum("nkf,nkcf->nkc", F.silu(gate) * up, w_down[ids])
        return (y * weights[..., None].type_as(x)).sum(1)

    return run
