"""Serving on n GPUs, predicted: time to the first token, time per token, tokens per dollar.

    python -m parallelism.planner --serve --prompt 2000 --output 500 --batch auto

    asked = Requests(prompt=2000, output=500)
    rank_layouts(shape, device, gpus=8, asked=asked)    # colocated replicas, best throughput first
    disaggregate(shape, device, gpus=8, asked=asked)    # the best pools for prefill and decode

A layout is tensor x pipeline x expert parallelism of one replica; further GPUs hold further
replicas. Colocated replicas add to each decode step its share of the prompts. Disaggregated ones
(Splitwise, arXiv:2311.18677; DistServe, arXiv:2401.09670) prefill in one pool and decode in
another, so that no prompt delays a token, and send the KV cache between them: a shorter time per
token, at fewer tokens per dollar unless an SLO keeps colocated batches small. What a step costs is
serving_cost.py's.

When it is wrong: requests of unlike lengths, prefix caches, speculative decoding, queues (TTFT is
that of an idle prefill). Needs: the standard library.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    raise SystemExit("run: python -m parallelism.planner --serve")

import argparse
import json
import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product

from parallelism.cost_model import (
    DEVICES, LINK_EFFICIENCY, Device, Shape, load_cluster, parameters, parse_number, require,
)  # fmt: skip
from parallelism.serving_cost import (
    BYTES, Layout, Step, Work, achieved, capacity, critical_batch, decode_work, kv_bytes_per_token,
    kv_shard, operators, prefill_work, ridge, step, weight_bytes,
)  # fmt: skip
from parallelism.training_plan import divisors

READS = {"model", "device", "gpus", "batch", "tp", "pp", "ep", "top"}  # of the shared flags

# --------------------------------------------------------------------------------------------------
# A replica, and colocated or disaggregated pools of them
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Requests:
    """What is served: tokens per prompt and per output, 2 or more; batch: sequences per replica,
    None: as many as fit; slo: seconds to the first token, and per further token."""

    prompt: int
    output: int
    batch: int | None = None
    slo: tuple[float, float] = (math.inf, math.inf)

    @property
    def context(self) -> float:
        """Keys that a token reads, mean over an output's decode steps: prompt + 1 to prompt +
        output - 1."""
        return self.prompt + self.output / 2


@dataclass(frozen=True)
class Prediction:
    """n replicas of a layout: TTFT and time per token of a request in seconds; tokens/s of all
    replicas' outputs, 0 if they only prefill."""

    layout: Layout
    replicas: int
    batch: int
    ttft: float
    tpot: float
    tokens_per_second: float
    regime: str


def prefill(shape: Shape, device: Device, layout: Layout, prompt: int) -> Step:
    """A stage's step for one prompt on each of the ep ranks."""
    return step(shape, device, layout, prefill_work(layout.ep, prompt))


def decode(
    shape: Shape, device: Device, layout: Layout, asked: Requests, batch: int, mixed: bool
) -> Step:
    """A stage's step for its micro-batch of `batch` sequences. mixed: with the prompts that arrive
    per step in a steady state (chunked prefill, Sarathi, arXiv:2308.16369)."""
    return step(shape, device, layout, micro_batch(layout, asked, batch, mixed))


def micro_batch(layout: Layout, asked: Requests, batch: int, mixed: bool) -> Work:
    """The work of one of pp micro-batches of `batch` sequences: at least one sequence per ep rank,
    and as many on each as on the fullest (vLLM pads the others). mixed: see decode; an output of n
    tokens has n - 1 decode steps, since its first token comes from the prefill."""
    running = layout.ep * max(1, -(-batch // layout.ep) / layout.pp)
    work = decode_work(running, asked.context)
    return work.plus(prefill_work(mixed * running / (asked.output - 1), asked.prompt))


def sequences(shape: Shape, device: Device, layout: Layout, asked: Requests) -> int:
    """How many fit in a replica at their full length, each on one of the ep ranks."""
    per_rank = capacity(shape, device, layout) // layout.ep
    return layout.ep * (per_rank // (asked.prompt + asked.output))


def largest_batch(
    shape: Shape, device: Device, layout: Layout, asked: Requests, mixed: bool
) -> int:
    """Sequences that fit and keep the time per token; 0 if not one does, or fewer than asked
    for."""
    fits = sequences(shape, device, layout, asked)
    if asked.batch is not None:
        fits = asked.batch if asked.batch <= fits else 0
    rates = achieved(device)
    tpot = lambda n: layout.pp * decode(shape, rates, layout, asked, n, mixed).total
    if asked.batch is None:
        return bisect_left(range(1, fits + 1), True, key=lambda n: tpot(n) > asked.slo[1])
    return fits if fits and tpot(fits) <= asked.slo[1] else 0


def predict(
    shape: Shape, device: Device, layout: Layout, asked: Requests, replicas: int = 1,
    mixed: bool = True,
) -> Prediction | None:  # fmt: skip
    """A replica's prediction; None if the requests do not fit or miss the SLO. mixed: the replica
    prefills too; otherwise its TTFT is not held to the SLO."""
    batch, rates = largest_batch(shape, device, layout, asked, mixed), achieved(device)
    ttft = layout.pp * prefill(shape, rates, layout, asked.prompt).total
    if not batch or mixed and ttft > asked.slo[0]:
        return None
    got = decode(shape, rates, layout, asked, batch, mixed)
    tpot = layout.pp * got.total
    rate = replicas * batch / tpot * asked.output / (asked.output - 1)
    return Prediction(layout, replicas, batch, ttft, tpot, rate, got.regime)


def find_conflict(shape: Shape, device: Device, layout: Layout, gpus: int) -> str | None:
    """Why a layout is invalid on `gpus` GPUs, or None."""
    s, p = shape, layout
    if gpus % p.gpus:
        return f"--gpus {gpus} is not divisible by a replica's {p.gpus} ({p})"
    if p.tp > device.node:
        return f"--tp {p.tp} is more than the {device.node} GPUs of a node"
    if s.heads % p.tp or s.kv_heads % p.tp and p.tp % s.kv_heads:
        return f"--tp {p.tp} cannot shard {s.heads} heads and {s.kv_heads} key-value heads"
    if p.pp > s.layers:
        return f"--pp {p.pp} is more than the model's {s.layers} layers"
    if p.ep > 1 and not s.experts:
        return f"--ep {p.ep} requires experts, and the model has none"
    if p.ep > 1 and s.experts % p.ep:
        return f"--ep {p.ep} does not divide the model's {s.experts} experts"
    return None


def layouts(shape: Shape, device: Device, gpus: int, fixed: dict) -> Iterator[Layout]:
    """All valid layouts of replicas that fill `gpus` GPUs. fixed: fields of Layout that are not
    searched."""
    limits = dict(tp=device.node, pp=shape.layers, ep=max(1, shape.experts))
    free = {name: [n for n in divisors(gpus) if n <= most] for name, most in limits.items()}
    for tp, pp, ep in product(*([fixed[k]] if k in fixed else free[k] for k in limits)):
        layout = Layout(**fixed | dict(tp=tp, pp=pp, ep=ep))
        if find_conflict(shape, device, layout, gpus) is None:
            yield layout


def rank_layouts(
    shape: Shape, device: Device, gpus: int, asked: Requests, **fixed: int | str
) -> list[Prediction]:
    """Predictions of colocated replicas, most tokens/s first; [] if the requests fit no layout, or
    miss the SLO with all. ValueError if there is no layout."""
    possible = list(layouts(shape, device, gpus, fixed))
    if not possible:
        raise ValueError(find_conflict(shape, device, Layout(**fixed), gpus))
    found = [predict(shape, device, p, asked, gpus // p.gpus) for p in possible]
    found = [got for got in found if got]
    return sorted(found, key=lambda got: (-got.tokens_per_second, got.tpot))


def no_room_reason(
    shape: Shape, device: Device, gpus: int, asked: Requests, fixed: dict
) -> str:
    """Which no layout has: memory for the batch, or times within the SLO."""
    possible = list(layouts(shape, device, gpus, fixed))
    one = replace(asked, batch=asked.batch or 1, slo=Requests.slo)
    times = [got for p in possible if (got := predict(shape, device, p, one))]
    if not times:
        room = lambda p: (sequences(shape, device, p, asked), capacity(shape, device, p) // p.ep)
        best = max(possible, key=lambda p: (*room(p), -weight_bytes(shape, p)))
        (fit, tokens), fewer = room(best), "a lower --batch, " * (one.batch > 1)
        return (
            f"a batch of {one.batch} with {asked.prompt + asked.output} tokens each does not fit: "
            f"beside {weight_bytes(shape, best) / 1e9:.1f} GB of weights per GPU, {best} caches "
            f"{tokens} tokens per rank, {fit} sequences; use more --gpus, {fewer}--quantize or "
            "--kv-cache-dtype"
        )
    ttft, tpot = (min(getattr(got, name) for got in times) for name in ("ttft", "tpot"))
    return (
        f"no layout meets --slo {asked.slo[0]:g}:{asked.slo[1]:g}: the shortest time to the first "
        f"token of any is {ttft:.3g} s, and per token {tpot:.3g} s"
    )


@dataclass(frozen=True)
class Pools:
    """Replicas that prefill and replicas that decode; tokens/s of both together, TTFT with the
    transfer of the KV cache."""

    prefill: Prediction
    decode: Prediction
    ttft: float
    tokens_per_second: float


def transfer_seconds(shape: Shape, device: Device, layout: Layout, prompt: int, far: bool) -> float:
    """To send a prompt's KV cache from all GPUs of a replica, over the network if far."""
    size = kv_bytes_per_token(shape, layout.kv) * prompt * kv_shard(shape, layout)
    wire = LINK_EFFICIENCY * (device.network if far else device.nvlink)
    return device.alpha[far] + size / wire


def disaggregate(
    shape: Shape, device: Device, gpus: int, asked: Requests, **fixed: int | str
) -> Pools | None:
    """The two pools with the most tokens/s on at most `gpus` GPUs, over all pairs of layouts whose
    replica divides `gpus`, and all replica counts; None if no pair fits. A pair's rate is the lower
    of its pools', so the best number of prefill replicas is beside the point where they cross."""
    far, rates, sides = gpus > device.node, achieved(device), ([], [])
    for p in layouts(shape, device, gpus, fixed):
        got = predict(shape, device, p, asked, mixed=False)
        if got:
            sides[1].append((p, got, got.tokens_per_second / asked.output))
        one = prefill(shape, rates, p, asked.prompt)
        ttft = p.pp * one.total + transfer_seconds(shape, device, p, asked.prompt, far)
        if capacity(shape, device, p) >= asked.prompt * p.ep * p.pp and ttft <= asked.slo[0]:
            got = Prediction(p, 1, p.ep * p.pp, ttft, 0.0, 0.0, one.regime)
            sides[0].append((p, got, p.ep / one.total))
    best = None
    for (p, first, in_rate), (q, second, out_rate) in product(*sides):
        most, left = (gpus - q.gpus) // p.gpus, lambda n: (gpus - n * p.gpus) // q.gpus
        outrun = lambda n: n * in_rate >= left(n) * out_rate  # the decode pool is the slower one
        cross = bisect_left(range(1, most + 1), True, key=outrun)
        for n in range(max(1, cross), min(most, cross + 1) + 1):
            rate = asked.output * min(n * in_rate, left(n) * out_rate)
            if best is None or (rate, -first.ttft) > (best.tokens_per_second, -best.ttft):
                pools = replace(first, replicas=n), replace(second, replicas=left(n))
                best = Pools(*pools, first.ttft, rate)
    return best


def dollars_per_million(gpus: int, price: float, tokens_per_second: float) -> float:
    """$ per million output tokens at `price` $ per GPU and hour."""
    return gpus * price / 3600 / tokens_per_second * 1e6


# --------------------------------------------------------------------------------------------------
# The topic's flags and report
# --------------------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    """--serve, and what only it reads. It shares --model, --device, --gpus, --batch, --tp, --pp,
    --ep, --top and --json."""
    add = parser.add_argument_group("serving (serving_plan.py)").add_argument
    add("--serve", action="store_true", help="predict serving; --batch: sequences per replica, "
        "or auto, the default: as many as fit and keep --slo")
    add("--prompt", default="2000", help="tokens of a prompt")
    add("--output", default="500", help="tokens of an output, 2 or more")
    add("--quantize", default="bf16", choices=BYTES, help="weights of the layers")
    add("--kv-cache-dtype", default="bf16", choices=("bf16", "fp8", "int8"))
    add("--slo", help="seconds to the first token, and per further token", metavar="A:B")
    add("--gpu-hour", default="2.5", help="$ per GPU and hour; 2.5 is no quote", metavar="PRICE")


def parse_positive(flag: str, text: str) -> float:
    """A positive finite float. ValueError names the flag."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    require(0 < value < math.inf, f"--{flag} must be a positive number, not {text!r}")
    return value


def read_requests(args: argparse.Namespace) -> Requests:
    """--prompt, --output, --batch and --slo."""
    prompt, output = parse_number(args.prompt), parse_number(args.output)
    require(output > 1, f"--output must be 2 or more, not {output}: prefill gives the first token")
    batch = None if args.batch in (None, "auto") else parse_number(args.batch)
    slo = Requests.slo
    if args.slo is not None:
        parts = args.slo.split(":")
        require(len(parts) == 2, f"--slo must be A:B in seconds, such as 1:0.05, not {args.slo!r}")
        slo = tuple(parse_positive("slo", part) for part in parts)
    return Requests(prompt, output, batch, slo)


def report(args: argparse.Namespace) -> str:
    """The topic's output. ValueError: a wrong flag, or nothing fits."""
    shape, device, gpus = load_cluster(args.model, args.device, args.gpus)
    asked, top = read_requests(args), parse_number(args.top)
    price = parse_positive("gpu-hour", args.gpu_hour)
    ok = args.quantize != "fp8" or device.fp8 > device.bf16
    require(ok, f"--quantize fp8 cannot be combined with --device {args.device}: it has no FP8")
    sizes = {name: getattr(args, name) for name in ("tp", "pp", "ep")}
    fixed = {name: n for name, n in sizes.items() if n is not None}
    for name, n in fixed.items():
        require(n > 0, f"--{name} must be positive, not {n}")
    fixed |= dict(weights=args.quantize, kv=args.kv_cache_dtype)
    found = rank_layouts(shape, device, gpus, asked, **fixed)
    pools = disaggregate(shape, device, gpus, asked, **fixed)
    reason = "" if found else no_room_reason(shape, device, gpus, asked, fixed)
    require(found or pools, reason)
    numbers = {
        "kv_bytes_per_token": kv_bytes_per_token(shape, args.kv_cache_dtype),
        "critical_batch": critical_batch(device, args.quantize),
    }
    if shape.experts:
        numbers["critical_batch_of_experts"] = critical_batch(device, args.quantize, shape)
    if args.json:
        return json.dumps(numbers | as_json(gpus, price, found[:top], pools), indent=2)
    critical = [f"{n:,.0f}" for name, n in numbers.items() if name.startswith("critical")]
    head = (
        f"{args.model}, {parameters(shape) / 1e9:.1f}B parameters in {args.quantize}, "
        f"{numbers['kv_bytes_per_token']:,.0f} bytes of KV cache per token, on "
        f"{gpus} {args.device}: {len(found)} layouts fit\n"
        f"critical batch {' and, of experts, '.join(critical)} tokens per step; "
        f"prompts of {asked.prompt}, outputs of {asked.output} tokens\n"
        f"FLOPs per byte: {', '.join(f'{name} {ridge(d):.0f}' for name, d in DEVICES.items())}"
    )
    parts = [f"colocated: {reason}"]
    if found:
        parts = [table(gpus, price, found[:top]), details(shape, device, asked, found[0])]
    return "\n\n".join([head, *parts, pools_line(gpus, price, found, pools)])


def as_json(gpus: int, price: float, found: list[Prediction], pools: Pools | None) -> dict:
    """Layouts and pools as --json prints them: seconds, tokens/s, $ per million output tokens."""

    def priced(got: Prediction | Pools) -> dict:
        cost = dollars_per_million(gpus, price, got.tokens_per_second)
        return asdict(got) | {"dollars_per_million": cost}

    return {"layouts": [priced(got) for got in found], "pools": pools and priced(pools)}


def table(gpus: int, price: float, found: list[Prediction]) -> str:
    """One line per layout; regime: of a step with its share of the prompts."""
    heads = ("tok/s", 10), ("tok/s/GPU", 11), ("$/M tok", 9), ("TTFT ms", 9), ("ms/tok", 9)
    heads = *heads, ("batch", 8)
    lines = ["".join(f"{head:>{width}}" for head, width in heads) + "  layout"]
    for got in found:
        rate, cost = got.tokens_per_second, dollars_per_million(gpus, price, got.tokens_per_second)
        cells = f"{rate:,.0f}", f"{rate / gpus:,.0f}", f"{cost:.3f}"
        cells += f"{1e3 * got.ttft:.1f}", f"{1e3 * got.tpot:.2f}", str(got.batch)
        numbers = "".join(f" {cell:>{width - 1}}" for cell, (_, width) in zip(cells, heads))
        lines.append(f"{numbers}  {got.replicas} of {got.layout}: {got.regime}")
    return "\n".join(lines)


def details(shape: Shape, device: Device, asked: Requests, got: Prediction) -> str:
    """Of the best layout: memory, the operators of a prefill and a decode step, their seconds."""
    p, rates = got.layout, achieved(device)
    heads = ("GFLOP", 10), ("MB", 10), ("FLOPs/byte", 12), ("ms", 9)
    lines = [
        f"best: {p}; {weight_bytes(shape, p) / 1e9:.1f} GB of weights per GPU; a replica caches "
        f"{capacity(shape, device, p):,} tokens",
        f"{'of a GPU and its stage':<24}" + "".join(f"{h:>{n}}" for h, n in heads) + "  bound",
    ]
    works = {
        "prefill": prefill_work(p.ep, asked.prompt),
        "decode": micro_batch(p, asked, got.batch, mixed=False),
    }
    for name, work in works.items():
        took = step(shape, rates, p, work)
        rest = dict(took.seconds)
        for op in operators(shape, p, work):
            bound = "compute" if op.intensity > ridge(rates, op.dtype) else "bandwidth"
            numbers = f"{op.flops / 1e9:>10.1f}{op.bytes / 1e6:>10.1f}{op.intensity:>12.1f}"
            numbers += f"{1e3 * rest.pop(op.name):>9.3f}"
            lines.append(f"{f'{name}: {op.name}':<24}{numbers}  {bound}")
        kinds = ", ".join(f"{kind} {1e3 * t:.3f} ms" for kind, t in rest.items())
        lines.append(f"{name}: {1e3 * took.total:.3f} ms, {took.regime} bound; {kinds}")
    return "\n".join(lines)


def pools_line(gpus: int, price: float, found: list[Prediction], pools: Pools | None) -> str:
    """The best disaggregated pools, with ratios to the best colocated layout."""
    if pools is None:
        return "disaggregated: no two pools fit, or none meet the SLO"
    first, second, rate = pools.prefill, pools.decode, pools.tokens_per_second
    cost, times = dollars_per_million(gpus, price, rate), ["", ""]
    if found:
        ratios = rate / found[0].tokens_per_second, second.tpot / found[0].tpot
        times = [f" ({ratio:.3g}x colocated)" for ratio in ratios]
    return (
        f"disaggregated: {first.replicas} prefill of {first.layout}, {second.replicas} decode of "
        f"{second.layout}, batch {second.batch}\n"
        f"{rate:,.0f} tok/s{times[0]}, "
        f"{cost:.3f} $/M tok, TTFT {1e3 * pools.ttft:.1f} ms with the transfer of the KV cache, "
        f"{1e3 * second.tpot:.2f} ms/tok{times[1]}"
    )
