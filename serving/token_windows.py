"""Backpropagation through a sequence in windows of tokens, for fine-tuning beside inference.

A training step on a sequence of T tokens occupies the device for as long as it takes, which is too
long between two steps of an inference engine. FlexLLM (Miao et al., arXiv:2402.18789, 6) cuts it
into windows of tokens small enough to share a step with requests. The forward pass of a window is
that of a chunked prefill: its queries attend to the keys and values of earlier windows. The
backward pass runs the windows in reverse. A window's keys and values were read by all later
windows, so their gradients are summed while those run and enter when the window's turn comes:

    forward   w = 1 .. n    o_w = attention(q_w, [k_1 .. k_w], [v_1 .. v_w])
    backward  w = n .. 1    dk_w, dv_w = sum over u > w of window u's gradients of them, then
                            backpropagate (loss_w, k_w, v_w) with (1, dk_w, dv_w)

    run = TokenWindows(model, loss, tokens, attention)
    while run.next_tokens:           # of the next window, forward or backward
        run.step(64)                 # at most 64 tokens of a forward pass

Gain: a unit of work as small as wanted. Memory is that of training on the whole sequence, which
with LoRA is the inputs of the adapters and of the nonlinear operations: autograd keeps nothing for
frozen matmuls (FlexLLM's pruned activations). Cost: small matmuls, and each window copies the keys
and values before it. When it loses: as training alone; use train.py.

Hook: attend. Equivalence (test_all.py): the gradients of windows of any sizes == those of the whole
sequence, within 1e-6. Needs: torch. `python serving/token_windows.py` runs a check
and prints a table.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

Pairs = dict[int, list[Tensor]]  # layer -> [k, v]


@dataclass
class Window:
    """A window between its forward and its backward pass."""

    loss: Tensor
    outputs: Pairs  # k and v as computed, in the autograd graph
    leaves: Pairs  # the same values, read by later windows, whose .grad sums their gradients

    @property
    def n_tokens(self) -> int:
        return next(iter(self.outputs.values()))[0].shape[1]


@dataclass
class TokenWindows:
    """The forward and backward pass of one sequence.

    model: (tokens (1, t), positions (t,), attend) -> output (1, t, ...); loss: (that output, the
    slice of the sequence that it is of) -> scalar, summed over windows; tokens (T,); attention:
    (spec, q (1, t, Hq, D), k (1, S, Hkv, D), v (1, S, Hkv, Dv), positions (t,)) ->
    (1, t, Hq, Dv), where query i of t stands at S - t + i. Gradients are added to .grad of the
    model's parameters."""

    model: Callable[..., Tensor]
    loss: Callable[[Tensor, slice], Tensor]
    tokens: Tensor
    attention: Callable[..., Tensor]
    windows: list[Window] = field(default_factory=list)  # awaiting their backward pass
    n_forward: int = 0  # tokens whose forward pass is done
    total: float = 0.0  # the loss of those

    @property
    def next_tokens(self) -> int:
        """Tokens of the next backward pass, or that still need a forward pass; 0: done."""
        if self.n_forward < len(self.tokens):
            return len(self.tokens) - self.n_forward
        return self.windows[-1].n_tokens if self.windows else 0

    @property
    def is_forward(self) -> bool:
        return self.n_forward < len(self.tokens)

    def step(self, max_tokens: int) -> None:
        """Run the forward pass of at most max_tokens (> 0), or, after the last, the backward pass
        of a window."""
        if self.is_forward:
            self._forward(max_tokens)
        else:
            self._backward()

    def _forward(self, max_tokens: int) -> None:
        at = slice(self.n_forward, min(len(self.tokens), self.n_forward + max_tokens))
        outputs: Pairs = {}
        earlier = [window.leaves for window in self.windows]

        def attend(spec: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
            outputs[spec.index] = [k, v]
            past = [leaves[spec.index] for leaves in earlier]
            k, v = (torch.cat(x, 1) for x in zip(*past, (k, v)))
            return self.attention(spec, q, k, v, positions)

        positions = torch.arange(at.start, at.stop, device=self.tokens.device)
        loss = self.loss(self.model(self.tokens[None, at], positions, attend), at)
        leaves = {i: [x.detach().requires_grad_() for x in pair] for i, pair in outputs.items()}
        self.windows.append(Window(loss, outputs, leaves))
        self.n_forward, self.total = at.stop, self.total + loss.item()

    def _backward(self) -> None:
        window = self.windows.pop()
        outputs, gradients = [window.loss], [torch.ones_like(window.loss)]
        for layer, pair in window.outputs.items():
            for x, leaf in zip(pair, window.leaves[layer]):
                if leaf.grad is not None and x.requires_grad:
                    outputs.append(x)
                    gradients.append(leaf.grad)
        torch.autograd.backward(outputs, gradients)


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def attention_reference(spec: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Causal attention, with all scores in memory. q (1, t, H, D), k and v (1, S, H, D)."""
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    late = torch.arange(k.shape[1], device=q.device) > positions[:, None]
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(late, -torch.inf).softmax(-1), v)


class Blocks(nn.Module):
    """Layers of attention for the check and the table."""

    def __init__(self, dim: int, n_layers: int, **kwargs: Any):
        super().__init__()
        self.embed = nn.Embedding(64, dim, **kwargs)
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim, **kwargs) for _ in range(n_layers))

    def forward(self, tokens: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        x = self.embed(tokens)
        for i, linear in enumerate(self.qkv):
            q, k, v = linear(x).unflatten(-1, (3, 2, -1)).unbind(2)
            x = x + attend(SimpleNamespace(index=i), q, k, v, positions).flatten(2)
        return x


def run(model: Blocks, tokens: Tensor, window: int) -> tuple[list[Tensor], float]:
    """The gradients of a loss, and the seconds of the longest step."""
    model.zero_grad()
    weight = torch.linspace(-1, 1, len(tokens)).to(model.embed.weight)
    loss = lambda x, at: (x.square().sum(-1) * weight[at]).sum()
    windows, longest = TokenWindows(model, loss, tokens, attention_reference), 0.0
    while windows.next_tokens:
        start = time.perf_counter()
        windows.step(window)
        longest = max(longest, time.perf_counter() - start)
    return [p.grad.clone() for p in model.parameters()], longest


def check() -> None:
    """Gradients by windows equal those of the whole."""
    torch.manual_seed(0)
    model, tokens = Blocks(16, 3, dtype=torch.float64), torch.randint(64, (50,))
    for whole, windowed in zip(run(model, tokens, 50)[0], run(model, tokens, 7)[0]):
        assert torch.allclose(whole, windowed, rtol=1e-10, atol=1e-12)


def main() -> None:
    """Total time by window, and the longest step."""
    check()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokens = Blocks(512, 8, device=device), torch.randint(64, (2048,), device=device)
    print(f"{device}, 8 layers of attention, 2048 tokens, fp32")
    print(f"{'window':>8}{'seconds':>10}{'longest step':>14}")
    for window in (2048, 512, 128):
        start = time.perf_counter()
        longest = run(model, tokens, window)[1]
        print(f"{window:>8}{time.perf_counter() - start:>10.2f}{longest:>14.3f}")


if __name__ == "__main__":
    main()
