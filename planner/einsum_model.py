"""Einsum: FLOPs, bytes, the best order of contraction, and the tiles that move fewest bytes.

    python -m planner kernel einsum "bhtd,bhsd,bhsv->bhtv" --in-order \\
        --sizes b=1,h=32,t=4096,s=4096,d=128,v=128

A contraction of n operands is n - 1 contractions of pairs, and their order decides the FLOPs;
`best_order` finds it by dynamic programming over sets of operands. A step, or a fused chain of
steps, is then tiled: the bytes that cross between HBM and the SMs follow from the tiles' shapes
alone, so configurations are ranked by them and only the first few need to be timed (Welder, OSDI
2023). Fused, the two steps above are FlashAttention: the T x S scores stay on the chip. Without
--in-order, which a softmax between them requires, the best order is linear attention's.

When it loses: traffic sees neither waves nor bank conflicts (kernel_model.py adds the waves), and
fusing repeats the first step for each tile of the indices that only later steps have. Needs: the
standard library. Proof (test_all.py): numpy's and opt_einsum's counts, every order, and loops over
tiles that count each load.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import argparse
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from planner.cost_model import Device, parse_number, require
from planner.flags import add_shared
from planner.kernel_model import (
    BYTES,
    EAGER_OVERHEAD,
    REGISTERS_PER_SM,
    Processor,
    device_of,
    regime,
    render,
    require_positive,
)

TILES = (16, 32, 64, 128, 256)  # sizes of an index
ACCUMULATORS = 2 * REGISTERS_PER_SM  # bytes: half of the registers


class Step(NamedTuple):
    """A contraction of `operands`; `loads`: those of them that no earlier step computes."""

    operands: tuple[str, ...]
    out: str
    loads: tuple[str, ...]


def parse_einsum(text: str, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], str]:
    """ "ij,jk->ik" -> (("ij", "jk"), "ik"); ValueError names the index."""
    left, arrow, out = text.replace(" ", "").partition("->")
    inputs = tuple(left.split(","))
    ok = arrow and all(term.isalpha() for term in inputs) and (out.isalpha() or not out)
    require(ok, f"EINSUM {text!r} is not of the form ij,jk->ik")
    for term in (*inputs, out):
        twice = "".join(i for i in term if term.count(i) > 1)[:1]
        require(not twice, f"EINSUM: index {twice} stands twice in {term}")
    strange = "".join(sorted(set(out) - set(left)))[:1]
    require(not strange, f"EINSUM: no operand has index {strange} of the output")
    missing = "".join(sorted(set(left) - {",", *sizes}))[:1]
    require(not missing, f"--sizes lacks index {missing} of the einsum; add {missing}=SIZE")
    unused = "".join(sorted(set(sizes) - set(left)))[:1]
    require(not unused, f"--sizes: the einsum has no index {unused}")
    require(len(inputs) <= 10, f"EINSUM has {len(inputs)} operands; at most 10")
    loops = numel(left.replace(",", ""), sizes)
    require(loops <= 1e40, "--sizes: more than 1e40 iterations of one loop nest")
    return inputs, out


def parse_sizes(text: str) -> dict[str, int]:
    """ "t=4k,d=128" as {"t": 4096, "d": 128}."""
    sizes: dict[str, int] = {}
    for word in filter(None, text.split(",")):
        name, equals, size = word.strip().partition("=")
        ok = equals and len(name) == 1 and name.isalpha()
        require(ok, f"--sizes {word!r} is not of the form t=4096")
        require(name not in sizes, f"--sizes gives index {name} twice")
        sizes[name] = parse_number(size, f"--sizes {name}:", 1024)
    return sizes


def numel(indices: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Elements of a tensor with these indices."""
    return math.prod(sizes[i] for i in set(indices))


def einsum_flops(inputs: Sequence[str], out: str, sizes: Mapping[str, int]) -> int:
    """FLOPs of one loop nest over all indices: in each iteration a product per operand after the
    first, and an addition if an index is summed (opt_einsum's flop_count; Rocktaschel, "Einsum is
    All you Need"). 2 m n k for a matmul."""
    every = set("".join(inputs))
    return numel(every, sizes) * (len(inputs) - 1 + (every != set(out)))


def einsum_bytes(inputs: Sequence[str], out: str, sizes: Mapping[str, int]) -> int:
    """Bytes of the result and of each operand read once."""
    return BYTES * sum(numel(term, sizes) for term in (*inputs, out))


def best_order(inputs: Sequence[str], out: str, sizes: Mapping[str, int]) -> list[Step]:
    """The contractions of pairs with the fewest FLOPs: dynamic programming over sets of operands,
    outer products included (opt_einsum's "dynamic-programming" path without its pruning)."""
    n = len(inputs)
    if n == 1:
        return [Step(tuple(inputs), out, tuple(inputs))]
    # a set of operands is an int, bit i for operand i: set -> indices of its contraction, and
    # (FLOPs, steps) of the best order
    indices = {1 << i: term for i, term in enumerate(inputs)}
    best: dict[int, tuple[int, list[Step]]] = {1 << i: (0, []) for i in range(n)}
    for s in sorted(range(1, 2**n), key=int.bit_count)[n:]:
        outside = {*out}.union(*(inputs[i] for i in range(n) if not s >> i & 1))
        inside = dict.fromkeys("".join(inputs[i] for i in range(n) if s >> i & 1))
        indices[s] = out if s == 2**n - 1 else "".join(i for i in inside if i in outside)
        found = []
        for small, large in _bipartitions(s):
            pair = indices[small], indices[large]
            loads = tuple(indices[x] for x in (small, large) if x.bit_count() == 1)
            (a, first), (b, second) = best[large], best[small]
            flops = a + b + einsum_flops(pair, indices[s], sizes)
            found.append((flops, [*first, *second, Step(pair, indices[s], loads)]))
        best[s] = min(found, key=lambda item: item[0])
    return best[2**n - 1][1]


def _bipartitions(s: int) -> Iterator[tuple[int, int]]:
    """Every split of the bits of s into two parts, the smaller number first."""
    large = (s - 1) & s
    while large > s ^ large:
        yield s ^ large, large
        large = (large - 1) & s


def in_order(inputs: Sequence[str], out: str, sizes: Mapping[str, int]) -> list[Step]:
    """The contractions of pairs from left to right."""
    steps, result = [], inputs[0]
    for i, term in enumerate(inputs[1:], 1):
        pair, later = (result, term), {*out}.union(*inputs[i + 1 :])
        result = "".join(j for j in dict.fromkeys("".join(pair)) if j in later)
        result = out if i == len(inputs) - 1 else result
        steps.append(Step(pair, result, pair if i == 1 else (term,)))
    return steps or [Step(tuple(inputs), out, tuple(inputs))]


# --------------------------------------------------------------------------------------------------
# Tiles: a chain of steps as one kernel, in which each step consumes the one before
# --------------------------------------------------------------------------------------------------


def is_chain(steps: Sequence[Step]) -> bool:
    """Whether each step consumes the result of the one before."""
    return all(len(step.loads) == 1 for step in steps[1:])


def _reloads(
    steps: Sequence[Step], i: int, term: str, sizes: Mapping[str, int], tile: Mapping[str, int]
) -> tuple[int, bool]:
    """How often the kernel reads an operand of step i, and whether its tile changes in a program.

    A program computes one tile of the last result, with the summed indices of the last step in its
    outermost loops and those of step i in its innermost. A loop over an index that the operand
    lacks reads it again only if loops inside have replaced its tile."""
    tiles = {j: -(-sizes[j] // n) for j, n in tile.items()}
    times, changes = math.prod(tiles[j] for j in set(steps[-1].out) - set(term)), False
    for step in steps[i:]:
        for j in sorted(set("".join(step.operands)) - set(step.out)):
            changes |= j in term and tiles[j] > 1
            times *= tiles[j] if changes and j not in term else 1
    return times, changes


def tile_traffic(steps: Sequence[Step], sizes: Mapping[str, int], tile: Mapping[str, int]) -> int:
    """Elements that move between HBM and the SMs: a tile of the result propagates to tiles of the
    operands, which are read as often as the loops over tiles require (Welder)."""
    reads = (
        numel(term, sizes) * _reloads(steps, i, term, sizes, tile)[0]
        for i, step in enumerate(steps)
        for term in step.loads
    )
    return sum(reads) + numel(steps[-1].out, sizes)


def tiled_flops(steps: Sequence[Step], sizes: Mapping[str, int], tile: Mapping[str, int]) -> int:
    """FLOPs of the chain: a step is repeated for each tile of the later steps' own indices."""
    total = 0
    for i, step in enumerate(steps):
        later = set("".join(term for s in steps[i:] for term in s.operands))
        repeats = (-(-sizes[j] // tile[j]) for j in later - set("".join(step.operands)))
        total += einsum_flops(step.operands, step.out, sizes) * math.prod(repeats)
    return total


def tile_footprint(
    steps: Sequence[Step], sizes: Mapping[str, int], tile: Mapping[str, int], stages: int
) -> tuple[int, int]:
    """(bytes of shared memory, bytes of fp32 accumulators). An operand whose tile changes has
    `stages` buffers, other operands have one, and so have results that a later step consumes."""
    shared = accumulators = 0
    for i, step in enumerate(steps):
        for term in step.loads:
            changes = _reloads(steps, i, term, sizes, tile)[1]
            shared += numel(term, tile) * (stages if changes else 1)
        shared += numel(step.out, tile) if step is not steps[-1] else 0
        accumulators += numel(step.out, tile)
    return BYTES * shared, 4 * accumulators


def rank_tiles(
    steps: Sequence[Step], sizes: Mapping[str, int], shared: int, stages: int
) -> list[tuple[int, dict[str, int]]]:
    """[(elements moved, tile)] of the tiles that fit in `shared` bytes of shared memory: the fewest
    elements first, and of as many the largest tile. An index has a size of TILES, or its own if
    that is smaller; an index of the result can have 1, and one that all tensors have has 1."""
    terms = [t for step in steps for t in (*step.operands, step.out)]
    batch = set(terms[0]).intersection(*terms)
    names = sorted(set("".join(terms)) - batch)
    require(len(names) <= 6, f"EINSUM: {len(names)} indices to tile; at most 6")
    choices = [[s for s in TILES if s < 2 * sizes[i]] or [sizes[i]] for i in names]
    choices = [[1, *x] if i in steps[-1].out and x != [1] else x for i, x in zip(names, choices)]
    found = []
    for picked in itertools.product(*choices):
        tile = dict.fromkeys(batch, 1) | dict(zip(names, picked))
        memory, accumulators = tile_footprint(steps, sizes, tile, stages)
        if memory <= shared and accumulators <= ACCUMULATORS:
            found.append((tile_traffic(steps, sizes, tile), tile))
    return sorted(found, key=lambda item: (item[0], -math.prod(item[1].values())))


# --------------------------------------------------------------------------------------------------
# The program's part
# --------------------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `kernel einsum`."""
    add_shared(parser, "device json")
    add = parser.add_argument
    add("einsum", metavar="EINSUM", help='such as "bhtd,bhsd->bhts"')
    add("--sizes", default="", help="of its indices: b=1,h=32,t=4k")
    add("--stages", type=int, default=4, help="buffers of each operand's tile (4)")
    text = "contract the operands as written, as a function between the steps requires"
    add("--in-order", action="store_true", help=text)
    parser.set_defaults(report=report)


def chain_model(
    chain: Sequence[Step], sizes: Mapping[str, int], stages: int, device: Device, p: Processor
) -> tuple[dict, str]:
    """Numbers and text of steps that are one kernel, with the tiles of fewest bytes."""
    flops = sum(einsum_flops(step.operands, step.out, sizes) for step in chain)
    size = einsum_bytes([t for step in chain for t in step.loads], chain[-1].out, sizes)
    name, seconds = regime(flops, size, device, EAGER_OVERHEAD)
    numbers = dict(flops=flops, bytes=size, regime=name, roofline=seconds)
    text = f"{flops:.4g} FLOPs, {size / 1e6:,.1f} MB: {name}, {1e6 * seconds:,.1f} us"
    ranked = rank_tiles(chain, sizes, p.max_shared, stages)
    if not ranked:
        return numbers, f"{text}; no tiles fit in an SM"
    moved, tile = ranked[0]
    done = tiled_flops(chain, sizes, tile)
    words = " ".join(f"{i}={n}" for i, n in tile.items() if n > 1) or "of 1"
    text += f"; tiles {words} move {BYTES * moved / 1e6:,.1f} MB"
    text += f", {done / flops:.2f}x FLOPs" if flops else ""
    return numbers | dict(tile=tile, moved=BYTES * moved, tiled_flops=done), text


def report(args: argparse.Namespace) -> str:
    """The text, or JSON, of `kernel einsum`: each step as a kernel, and all of them fused."""
    require_positive(args, "stages")
    sizes, (device, p) = parse_sizes(args.sizes), device_of(args)
    inputs, out = parse_einsum(args.einsum, sizes)
    steps = (in_order if args.in_order else best_order)(inputs, out, sizes)
    flops = einsum_flops(inputs, out, sizes)
    facts, rows = {"one loop nest": dict(flops=flops)}, {"one loop nest": f"{flops:.4g} FLOPs"}
    kernels: dict[str, Sequence[Step]] = {}
    for step in steps:
        name = f"{','.join(step.operands)}->{step.out}"
        name += f" ({len(kernels) + 1})" if name in kernels else ""
        kernels[name] = [step._replace(loads=step.operands)]
    if len(steps) > 1 and is_chain(steps):
        kernels["fused"] = steps
    for name, chain in kernels.items():
        facts[name], rows[name] = chain_model(chain, sizes, args.stages, device, p)
    return render(args, f"einsum {args.einsum} in bf16 on {args.device}", facts, rows)
