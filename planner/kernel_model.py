"""Model of GPU kernels: what limits a matmul, before it is written, and what stays in L2.

    python -m planner kernel matmul 4096,4096,4096 --tile 128,128,64 --device h100
    python -m planner kernel l2 1024 --model llama3-8b --device h100

A kernel is limited by arithmetic, by bytes or by overhead (He, "Making Deep Learning Go Brrrr From
First Principles"; NVIDIA, "GPU Performance Background User's Guide"), and a matmul also by
quantization: whole tiles cover the result, whole waves of tiles cover the SMs (NVIDIA, "Matrix
Multiplication Background User's Guide"). The bytes are HBM's: an exact simulation of an LRU cache
says what an order of tiles misses in L2, for the order of quantization/gemm.py and moe.py and for
others. Remote data is fetched in the chunk that hides most of it (MGG, OSDI 2023).

Since Ampere a part of L2 can be set aside for the addresses of an access policy window (CUDA C++
Programming Guide, "Device Memory L2 Access Management"). Which tensors it should hold is a packing
problem: each lives from the kernel that writes it to the last one that reads it, and those alive at
once must fit. AutoScratch (MLSys 2023) searches with evolution and reinforcement learning, because
it can only measure; on a model of the traffic the best choice is found exactly, by dynamic
programming.

All times are lower bounds: datasheet rates, perfect overlap. The L2 is one fully associative cache;
a real one has two partitions, and data that both halves of the chip read occupies both. Programs of
a wave run in lockstep. When it loses: a kernel bound by shared memory or instructions looks faster
here than it is. LRU already keeps a tensor that the next kernel reads if it fits, so a pin gains
where a larger tensor passes in between; weights are read once per step and gain only if they fit as
a whole. The model of pins counts no traffic inside a kernel and takes the residual of a layer from
HBM. Needs: the standard library. Proof (test_all.py): NVIDIA's, Triton's and the articles' own
numbers, gemm.py's own order, brute force on random small cases, every subset of pins, and the
simulated cache.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import argparse
import itertools
import json
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from planner.cost_model import (
    DEVICES,
    KERNEL_OVERHEAD,
    LINK_EFFICIENCY,
    Device,
    Shape,
    load_shape,
    parameters,
    parse_number,
    require,
)
from planner.flags import add_shared

KIB, MIB = 2**10, 2**20
BYTES = 2  # per element: fp16, bf16
# CUDA C++ Programming Guide, technical specifications per compute capability, 8.0 to 10.0
THREADS_PER_SM, BLOCKS_PER_SM, REGISTERS_PER_SM = 2048, 32, 65536
THREADS_PER_BLOCK = 1024
SHARED_RESERVED = 1024  # bytes per block that CUDA keeps (Hopper Tuning Guide)
OTHER_REGISTERS = 32  # per thread, beside the accumulators: addresses, operands (our estimate)
EAGER_OVERHEAD = 1 / 280e3  # s per operator: 280,000 tiny PyTorch operators per second (He)
# Part of L2: the most that an A100 takes (deviceQuery: 30 of 40 MiB), and the sample's of "L2 Cache
# Set-Aside" (CUDA C++ Programming Guide); others may take less
SET_ASIDE = 0.75


class Processor(NamedTuple):
    """SMs, bytes of L2 and of shared memory per SM, seconds of a load from HBM."""

    sms: int
    l2: int
    shared: int
    latency: float

    @property
    def max_shared(self) -> int:
        """Bytes of shared memory that one block can have."""
        return self.shared - SHARED_RESERVED


# SMs, L2 and shared memory: deviceQuery, NVIDIA's whitepapers, Chips and Cheese (B200). Latency:
# cycles / clock of a pointer chase (github.com/te42kyfo/gpu-benches, gpu-latency) on A100 and H100
# PCIe; H100's stands for all of Hopper and for B200.
PROCESSORS = {
    "a100-40gb": Processor(108, 40 * MIB, 164 * KIB, 574.6 / 1.410e9),
    "a100-80gb": Processor(108, 40 * MIB, 164 * KIB, 571.8 / 1.410e9),
    "h100": Processor(132, 50 * MIB, 228 * KIB, 658.4 / 1.755e9),
    "h100-pcie": Processor(114, 50 * MIB, 228 * KIB, 658.4 / 1.755e9),
    "h200": Processor(132, 50 * MIB, 228 * KIB, 658.4 / 1.755e9),
    "b200": Processor(148, 126 * MIB, 228 * KIB, 658.4 / 1.755e9),
}

# --------------------------------------------------------------------------------------------------
# Waves, tiles, occupancy, bytes in flight, rooflines
# --------------------------------------------------------------------------------------------------


def tile_efficiency(M: int, N: int, block_m: int, block_n: int) -> float:
    """Share of the tiles' area that is in the result (NVIDIA, matmul guide, 3.1)."""
    return M * N / (math.ceil(M / block_m) * block_m * math.ceil(N / block_n) * block_n)


def wave_efficiency(tiles: int, slots: int) -> float:
    """Part of the waves' slots that hold a tile: wave quantization (NVIDIA, matmul guide, 3.2). For
    stream-K, `tiles` are tiles x steps of K (Osama et al., arXiv:2301.03598, and Colfax's CUTLASS
    tutorial on persistent kernels)."""
    return tiles / (math.ceil(tiles / slots) * slots)


def occupancy(p: Processor, threads: int, registers: int, shared: int) -> tuple[int, str]:
    """Blocks per SM, and what limits them: threads, blocks, registers per thread (allocated by 8),
    or bytes of shared memory per block (allocated by 128); CUDA's cuda_occupancy.h. The registers
    of a warp are all in one of an SM's four partitions."""
    warp = 32 * (-(-registers // 8) * 8)
    limits = {
        "threads": THREADS_PER_SM // threads,
        "blocks": BLOCKS_PER_SM,
        "registers": 4 * (REGISTERS_PER_SM // 4 // warp) // (threads // 32),
        "shared memory": p.shared // (-(-(shared + SHARED_RESERVED) // 128) * 128),
    }
    limit = min(limits, key=limits.get)
    return limits[limit], limit


def bandwidth(device: Device, p: Processor, in_flight: float) -> float:
    """Bytes/s that `in_flight` outstanding bytes sustain: Little's law, concurrency = latency x
    throughput (Jones, "How GPU Computing Works", GTC 2021)."""
    return min(device.hbm, in_flight / p.latency)


def regime(flops: float, size: float, device: Device, overhead: float) -> tuple[str, float]:
    """What limits an operator, and its seconds: compute, bandwidth or overhead (He)."""
    seconds = {"compute": flops / device.bf16, "bandwidth": size / device.hbm, "overhead": overhead}
    name = max(seconds, key=seconds.get)
    return name, seconds[name]


# --------------------------------------------------------------------------------------------------
# L2: what an order of tiles reads from HBM
# --------------------------------------------------------------------------------------------------


def tile_order(rows: int, columns: int, group: int) -> Iterator[tuple[int, int]]:
    """(m, n) by program: column by column within `group` rows of tiles, as in quantization/gemm.py
    and Triton's matmul tutorial; 1 is row-major, `rows` is column-major."""
    for first in range(0, rows, group):
        height = min(group, rows - first)
        yield from ((first + i % height, i // height) for i in range(height * columns))


def matmul_trace(
    order: Sequence[tuple[int, int]], slots: int, mnk: Sequence[int], tile: Sequence[int]
) -> Iterator[tuple[tuple, int]]:
    """(block, bytes) of A and B as programs read them: `slots` at a time, step of K by step."""
    (M, N, K), (bm, bn, bk) = mnk, tile
    for first in range(0, len(order), slots):
        for k in range(-(-K // bk)):
            depth = BYTES * min(bk, K - k * bk)
            for m, n in order[first : first + slots]:
                yield ("A", m, k), depth * min(bm, M - m * bm)
                yield ("B", n, k), depth * min(bn, N - n * bn)


def lru_misses(trace: Iterable[tuple[tuple, int]], capacity: float) -> int:
    """Bytes that an LRU cache of `capacity` bytes reads for a trace of (block, bytes)."""
    cache: OrderedDict[tuple, int] = OrderedDict()
    used = missed = 0
    for block, size in trace:
        if block in cache:
            cache.move_to_end(block)
            continue
        cache[block] = size
        used, missed = used + size, missed + size
        while used > capacity:
            used -= cache.popitem(last=False)[1]
    return missed


def order_misses(
    mnk: Sequence[int], tile: Sequence[int], slots: int, l2: float, group: int, limit: int = 2**17
) -> float:
    """Bytes of A and B that a matmul in this order reads from HBM: the misses of matmul_trace. Of
    more than `limit` accesses, steps of K are merged as long as a wave's step takes at most an
    eighth of L2. If that is not enough, only the first waves are simulated, or the first steps of
    one wave, and the remaining tiles miss as the last half of these. That is up to 3 times too many
    if the simulated waves end within the first group of rows."""
    (M, N, K), (bm, bn, bk) = mnk, tile
    rows, columns = -(-M // bm), -(-N // bn)
    tiles, order = rows * columns, tile_order(rows, columns, group)
    simulated = list(itertools.islice(order, slots))  # the first wave
    ms, ns = (len(set(indices)) for indices in zip(*simulated))
    bytes_per_k = BYTES * (bm * ms + bn * ns)
    depth = max(bk, int(min(2 * tiles * K / limit, l2 / 8 / bytes_per_k)))  # of a merged step
    waves = -(-limit // (2 * slots * -(-K // depth)))
    simulated += itertools.islice(order, (waves - 1) * slots)
    some_k = min(K, depth * -(-limit // (2 * len(simulated)))) if waves == 1 else K

    def misses(programs: Sequence[tuple[int, int]]) -> float:
        trace = matmul_trace(programs, slots, (M, N, some_k), (bm, bn, depth))
        return lru_misses(trace, l2) * K / some_k

    missed = misses(simulated)
    if len(simulated) == tiles:
        return missed
    last, whole_group = len(simulated), min(group, rows) * columns
    if waves > 1:  # whole waves that are nearly whole groups of rows
        excess = lambda n: abs(n - round(n / whole_group) * whole_group) / n
        last = min(range(slots, last // 2 + 1, slots), key=lambda n: (excess(n), -n))
    missed_by_last = missed - misses(simulated[:-last])
    return missed + missed_by_last * (tiles - len(simulated)) / last


# --------------------------------------------------------------------------------------------------
# L2: which activations of a layer to pin, and what repeated reads of a tensor miss
# --------------------------------------------------------------------------------------------------


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


# --------------------------------------------------------------------------------------------------
# Remote data
# --------------------------------------------------------------------------------------------------


def pipelined(transfer: float, work: float, alpha: float, beta: float, chunks: int) -> float:
    """Seconds of fetching remote data in `chunks` and computing on each while the next arrives:
    fill + (chunks - 1) max(fetch, compute) + drain; alpha and beta are seconds per fetch and per
    chunk's computation (MGG)."""
    fetch, compute = alpha + transfer / chunks, beta + work / chunks
    return fetch + (chunks - 1) * max(fetch, compute) + compute


def best_chunks(transfer: float, work: float, alpha: float, beta: float, limit: int) -> int:
    """The fastest number of chunks n, 1 .. limit. `pipelined` is the larger of two convex functions
    of n: n alpha + transfer + beta + work / n if fetches are slower, otherwise alpha + transfer / n
    + n beta + work. So its minimum is at one of theirs or where they cross."""
    fetch_bound = math.sqrt(work / alpha) if alpha else limit
    compute_bound = math.sqrt(transfer / beta) if beta else limit
    crossing = (transfer - work) / (beta - alpha) if alpha != beta else 1
    bounds = fetch_bound, compute_bound, crossing
    near = {1, limit, *(round_(x) for x in bounds for round_ in (math.floor, math.ceil))}
    return min(
        (n for n in near if 1 <= n <= limit),
        key=lambda n: (pipelined(transfer, work, alpha, beta, n), n),
    )


# --------------------------------------------------------------------------------------------------
# The program's part
# --------------------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `kernel matmul`."""
    add_shared(parser, "device json")
    add = parser.add_argument
    add("mnk", metavar="M,N,K", help="a bf16 matmul's sizes; k is 1024")
    add("--tile", default="128,128,64", help="BLOCK_M,BLOCK_N,BLOCK_K (128,128,64)")
    add("--warps", type=int, default=8, help="per tile (8)")
    add("--stages", type=int, default=4, help="buffers of each operand's tile (4)")
    add("--group-m", type=int, default=8, help="rows of tiles per group of the order (8)")
    add("--measured", type=float, help="seconds that the kernel takes: prints the rates reached")
    parser.set_defaults(report=report)


def device_of(args: argparse.Namespace) -> tuple[Device, Processor]:
    """--device's rates, SMs and caches."""
    known = ", ".join(PROCESSORS)
    ok = args.device in PROCESSORS
    require(ok, f"--device {args.device}: SMs and L2 are not known; use one of {known}")
    return DEVICES[args.device], PROCESSORS[args.device]


def require_positive(args: argparse.Namespace, *names: str) -> None:
    """ValueError for a flag that is given and not a positive number."""
    for name in names:
        value = getattr(args, name)
        ok = value is None or 0 < value < math.inf
        require(ok, f"--{name.replace('_', '-')} must be positive, not {value}")


def render(args: argparse.Namespace, title: str, facts: dict, rows: dict[str, str]) -> str:
    """facts as JSON, or rows under a title."""
    if args.json:
        return json.dumps(facts, indent=2)
    return "\n".join([title, *(f"  {name:<22}{text}" for name, text in rows.items())])


def _three_numbers(flag: str, text: str) -> list[int]:
    words = text.split(",")
    require(len(words) == 3, f"{flag} must be three numbers such as 4096,4096,64, not {text!r}")
    return [parse_number(word, f"{flag}:", 1024) for word in words]


def matmul_model(
    mnk: Sequence[int], tile: Sequence[int], args: argparse.Namespace, device: Device, p: Processor
) -> dict[str, float]:
    """Tiles, waves, bytes and seconds of a matmul; ValueError if a block does not fit in an SM."""
    (M, N, K), (bm, bn, bk) = mnk, tile
    threads, registers = 32 * args.warps, bm * bn // (32 * args.warps) + OTHER_REGISTERS
    step = BYTES * (bm + bn) * bk
    shared = args.stages * step
    blocks, limit = occupancy(p, threads, registers, shared)
    text = f"--tile {bm},{bn},{bk} --warps {args.warps} --stages {args.stages} does not fit an SM"
    require(threads <= THREADS_PER_BLOCK, f"{text}: {threads:,} threads of {THREADS_PER_BLOCK:,}")
    require(registers <= 255, f"{text}: {registers} registers per thread of 255; add warps")
    require(blocks, f"{text}: {shared:,} bytes of {p.max_shared:,}")
    tiles, slots = -(-M // bm) * -(-N // bn), blocks * p.sms
    in_flight = min(tiles, slots) * max(1, args.stages - 1) * step
    misses = order_misses(mnk, tile, slots, p.l2, args.group_m)
    compute = -(-tiles // p.sms) * 2 * bm * bn * K / (device.bf16 / p.sms)
    memory = (misses + BYTES * M * N) / bandwidth(device, p, in_flight)
    flops, size = 2 * M * N * K, BYTES * (M * K + K * N + M * N)
    name, roofline = regime(flops, size, device, EAGER_OVERHEAD)
    return dict(
        flops=flops, bytes=size, regime=name, roofline=roofline, tiles=tiles, blocks=blocks,
        limit=limit, slots=slots, tile_efficiency=tile_efficiency(M, N, bm, bn),
        wave_efficiency=wave_efficiency(tiles, slots),
        stream_k_efficiency=wave_efficiency(tiles * -(-K // bk), slots), in_flight=in_flight,
        requested=BYTES * K * (M * -(-N // bn) + N * -(-M // bm)),
        misses=misses, compute=compute, memory=memory, seconds=max(compute, memory),
    )  # fmt: skip


def matmul_choices(
    got: dict[str, float], mnk: Sequence[int], tile: Sequence[int], args: argparse.Namespace,
    device: Device, p: Processor,
) -> dict:  # fmt: skip
    """Other orders of the tiles, and the chunks in which a remote A is fetched."""
    rows = -(-mnk[0] // tile[0])
    groups = sorted(g for g in {1, 2, 4, 8, 16, 32, args.group_m, rows} if g <= rows)
    transfer = BYTES * mnk[0] * mnk[2] / (LINK_EFFICIENCY * device.nvlink)
    remote = {}
    for name, beta in (("one kernel", 0.0), ("a kernel each", KERNEL_OVERHEAD)):
        times = transfer, got["compute"], device.alpha[0], beta
        chunks = best_chunks(*times, limit=rows)
        remote[name] = chunks, pipelined(*times, chunks)
    orders = {g: order_misses(mnk, tile, got["slots"], p.l2, g) for g in groups}
    return dict(orders=orders, remote=remote)


def matmul_rows(got: dict, tile: Sequence[int], device: Device, p: Processor) -> dict[str, str]:
    """The text of matmul_model and matmul_choices."""
    waves, mb = got["tiles"] / got["slots"], lambda size: f"{size / 1e6:,.1f} MB"
    return {
        "tiles": f"{got['tiles']:,} of {tile[0]} x {tile[1]}, {got['tile_efficiency']:.1%} of "
        "their area in the result",
        "occupancy": f"{got['blocks']} per SM, limited by {got['limit']}; {got['slots']} in a wave",
        "waves": f"{waves:.2f}: {got['wave_efficiency']:.1%} of the slots of {math.ceil(waves)}; "
        f"{got['stream_k_efficiency']:.1%} with stream-K",
        "bytes in flight": f"{mb(got['in_flight'])}; {mb(device.hbm * p.latency)} hide HBM's "
        "latency",
        "intensity": f"{got['flops'] / got['bytes']:.1f} FLOPs/byte; the GPU computes "
        f"{device.bf16 / device.hbm:.1f} per byte: limited by {got['regime']}",
        "time": f"{1e6 * got['roofline']:,.1f} us; of these tiles {1e6 * got['seconds']:,.1f} us "
        f"(compute {1e6 * got['compute']:,.1f}, HBM {1e6 * got['memory']:,.1f})",
        "A and B": f"{mb(got['requested'])} from L2, {mb(got['misses'])} from HBM",
        "HBM by GROUP_M": ", ".join(f"{g}: {mb(x)}" for g, x in got["orders"].items()),
        "A from a peer": ", ".join(
            f"{1e6 * seconds:,.1f} us in {chunks} chunks, {name}"
            for name, (chunks, seconds) in got["remote"].items()
        ),
    }  # fmt: skip


def report(args: argparse.Namespace) -> str:
    """The text, or JSON, of `kernel matmul`."""
    require_positive(args, "warps", "stages", "group_m", "measured")
    device, p = device_of(args)
    mnk, tile = _three_numbers("M,N,K", args.mnk), _three_numbers("--tile", args.tile)
    got = matmul_model(mnk, tile, args, device, p)
    got |= matmul_choices(got, mnk, tile, args, device, p)
    rows = matmul_rows(got, tile, device, p)
    if args.measured:
        rates = got["flops"] / args.measured / 1e12, got["bytes"] / args.measured / 1e9
        got["measured"] = dict(zip(("tflops", "gb_per_second"), rates))
        share = got["seconds"] / args.measured
        rows["measured"] = f"{rates[0]:,.1f} TFLOP/s, {rates[1]:,.1f} GB/s of A, B and C; "
        rows["measured"] += f"{share:.1%} of the predicted speed"
    return render(args, f"matmul {args.mnk} in bf16 on {args.device}", got, rows)


def add_l2_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `kernel l2`."""
    add_shared(parser, "model device json")
    text = "of a layer, whose activations to pin in L2; k is 1024"
    parser.add_argument("tokens", metavar="TOKENS", help=text)
    parser.set_defaults(report=l2_report)


def l2_report(args: argparse.Namespace) -> str:
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
