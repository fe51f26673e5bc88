"""What stays in L2: which activations of a layer to pin, and what part of a tensor read repeatedly.

    python -m planner kernel l2 1024 --model llama3-8b --device h100

Since Ampere a part of L2 can be set aside for the addresses of an access policy window (CUDA C++
Programming Guide, "Device Memory L2 Access Management"). Which tensors it should hold is a packing
problem: each lives from the kernel that writes it to the last one that reads it, and those alive at
once must fit. AutoScratch (MLSys 2023) searches with evolution and reinforcement learning, because
it can only measure; on a model of the traffic the best choice is found exactly, by dynamic
programming.

When it loses: LRU already keeps a tensor that the next kernel reads if it fits, so a pin gains
where a larger tensor passes in between; weights are read once per step and gain only if they fit as
a whole. The model counts no traffic inside a kernel and takes the residual of a layer from HBM.
Needs: the standard library. Proof (test_all.py): every subset, and the simulated cache.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import argparse
from collections.abc import Iterable
from typing import NamedTuple

from planner.cost_model import Shape, load_shape, parameters, parse_number, require
from planner.flags import add_shared
from planner.kernel_model import BYTES, device_of, render

# Part of L2: the most that an A100 takes (deviceQuery: 30 of 40 MiB), and the sample's of "L2 Cache
# Set-Aside" (CUDA C++ Programming Guide); others may take less
SET_ASIDE = 0.75


class Tensor(NamedTuple):
    """Bytes, first and last step that touch it, HBM traffic without a pin and what a pin saves."""

    name: str
    size: int
    first: int
    last: int
    touched: int
    saved: int


def persistent(tensors: Iterable[Tensor], capacity: float) -> tuple[Tensor, ...]:
    """The tensors to pin in L2 that save most while all live ones fit (AutoScratch): dynamic
    programming over steps, whose state is the set of live pinned tensors."""
    best: dict[frozenset, tuple[int, tuple[Tensor, ...]]] = {frozenset(): (0, ())}
    for t in sorted(tensors, key=lambda t: t.first):
        states: dict[frozenset, tuple[int, tuple[Tensor, ...]]] = {}
        for before, (saved, chosen) in best.items():
            live = frozenset(x for x in before if x.last >= t.first)
            options = [(live, (saved, chosen))]
            if sum(x.size for x in live) + t.size <= capacity:
                options.append((live | {t}, (saved + t.saved, (*chosen, t))))
            for state, value in options:
                states[state] = max(states.get(state, (-1, ())), value, key=lambda v: v[0])
        best = states
    return max(best.values(), key=lambda v: v[0])[1]


def repeated_misses(size: int, capacity: int, line: int = 128) -> int:
    """Bytes missed by each further pass over `size` bytes. LRU alone misses all of them if they do
    not fit; pinning all but a line of the cache, the hitRatio of CUDA's access policy window,
    misses the least."""
    return 0 if size <= capacity else size - capacity + line


def layer_tensors(shape: Shape, tokens: int) -> list[Tensor]:
    """Activations of a dense decoder layer, in 8 kernels: norm, QKV, attention, O + residual, norm,
    gate and up, SwiGLU, down + residual. The input is read and the output written in any case."""
    ok = not shape.kv_rank and not shape.experts and not shape.gpt
    require(ok, "kernel l2 requires a dense Llama-like --model")
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rows = [
        ("input", shape.dim, (0, 3), 1), ("normed", shape.dim, (0, 1), 0),
        ("qkv", q + 2 * kv, (1, 2), 0), ("attended", q, (2, 3), 0),
        ("residual", shape.dim, (3, 4, 7), 0), ("normed again", shape.dim, (4, 5), 0),
        ("gate, up", 2 * shape.ffn, (5, 6), 0), ("hidden", shape.ffn, (6, 7), 0),
        ("output", shape.dim, (7,), 1),
    ]  # fmt: skip
    size = lambda width: BYTES * tokens * width
    return [
        Tensor(name, size(w), at[0], at[-1], size(w) * len(at), size(w) * (len(at) - fixed))
        for name, w, at, fixed in rows
    ]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `kernel l2`."""
    add_shared(parser, "model device json")
    text = "of a layer, whose activations to pin in L2; k is 1024"
    parser.add_argument("tokens", metavar="TOKENS", help=text)
    parser.set_defaults(report=report)


def report(args: argparse.Namespace) -> str:
    """The text, or JSON, of `kernel l2`."""
    shape, tokens = load_shape(args.model), parse_number(args.tokens, "TOKENS", 1024)
    tensors, room = layer_tensors(shape, tokens), int(SET_ASIDE * device_of(args)[1].l2)
    embedding = 0 if shape.tied else shape.dim * shape.vocab  # a row per token is read
    pinned, weights = persistent(tensors, room), BYTES * (parameters(shape) - embedding)
    before, saved = sum(t.touched for t in tensors), sum(t.saved for t in pinned)
    facts = dict(set_aside=room, pinned=[t.name for t in pinned], bytes=before, saved=saved)
    facts |= dict(weights=weights, weights_from_hbm=repeated_misses(weights, room))
    mb = lambda size: f"{size / 1e6:,.1f} MB"
    rows = {t.name: f"{mb(t.size)}, {'pinned' if t in pinned else 'not pinned'}" for t in tensors}
    rows["layer"] = f"{mb(before)} of activations cross HBM, {mb(before - saved)} with the pins"
    rows["weights"] = f"{mb(weights)} per step, {mb(facts['weights_from_hbm'])} if {mb(room)} stay"
    return render(args, f"{args.model}, {tokens} tokens on {args.device}", facts, rows)
