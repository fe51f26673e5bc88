"""Serving on n GPUs, predicted: time to the first token, time per token, tokens per dollar.

    python -m parallelism.planner --serve --prompt 2000 --output 500 --batch auto

    asked = Requests(prompt=2000, output=500)
    rank_layouts(shape, device, gpus=8, asked=asked)    # colocated replicas, best throughput first
    disaggregate(shape, device, gpus=8, asked=asked)    # the best pools for prefill and decode

A layout is tensor x pipeline x expert parallelism of one replica; further GPUs hold further
replicas. Colocated replicas add to each decode step its share of the prompts. Disaggregated ones
(Splitwise, arXiv:2311.18677; DistServe, arXiv:2401.09670) prefill in one pool and decode in
another, so that no prompt delays a token, and send the KV cache between them: a shorter time per
token, at fewer tokens per dollar unless an SLO holds colocated batches down. What a step costs is
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
    BYTES, Layout, Step, achieved, capacity, critical_batch, decode_work, kv_bytes_per_token,
    kv_shard, operators, prefill_work, ridge, step, weight_bytes,
)  # fmt: skip
from parallelism.training_plan import divisors

TRAINING = "dp cp zero micro chunks recompute schedule tokens fp8 eager".split()  # flags

# --------------------------------------------------------------------------------------------------
# A replica, and colocated or disaggregated pools of them
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Requests:
    """What is served: tokens per prompt and per output; batch: sequences per replica, None: as many
    as fit; slo: seconds to the first token, and per further token."""

    prompt: int
    output: int
    batch: int | None = None
    slo: tuple[float, float] = (math.inf, math.inf)

    @property
    def context(self) -> float:
        """Keys that a decoded token sees, mean over the output."""
        return self.prompt + (self.output + 1) / 2


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
    """A stage's step for its micro-batch of `batch` sequences. mixed: with the prompt tokens that
    arrive per decoded token in a steady state (chunked prefill, Sarathi, arXiv:2308.16369)."""
    work = decode_work(batch, asked.context)
    if mixed:
        work = work.plus(prefill_work(batch / asked.output, asked.prompt))
    return step(shape, device, layout, work.over(layout.pp))


def largest_batch(
    shape: Shape, device: Device, layout: Layout, asked: Requests, mixed: bool
) -> int:
    """Sequences that fit at their full length and keep the time per token; 0 if not one does, or
    fewer than asked for."""
    fits = capacity(shape, device, layout) // (asked.prompt + asked.output)
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
    return Prediction(layout, replicas, batch, ttft, tpot, replicas * batch / tpot, got.regime)


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
    if p.ep > 1 and (not s.experts or s.experts % p.ep):
        return f"--ep {p.ep} does not divide the model's {s.experts} experts"
    return None


def layouts(shape: Shape, device: Device, gpus: int, fixed: dict) -> Iterator[Layout]:
    """All valid layouts of replicas that fill `gpus` GPUs. fixed: fields of Layout that are not
    searched."""
    sizes = [[fixed[name]] if name in fixed else divisors(gpus) for name in ("tp", "pp", "ep")]
    for tp, pp, ep in product(*sizes):
        layout = Layout(**fixed | dict(tp=tp, pp=pp, ep=ep))
        if find_conflict(shape, device, layout, gpus) is None:
            yield layout


def rank_layouts(
    shape: Shape, device: Device, gpus: int, asked: Requests, **fixed: int | str
) -> list[Prediction]:
    """Predictions of colocated replicas, most tokens/s first. ValueError if there is none: what is
    not divisible, or what the layout with the most room for a KV cache lacks."""
    possible = list(layouts(shape, device, gpus, fixed))
    if not possible:
        raise ValueError(find_conflict(shape, device, Layout(**fixed), gpus))
    found = [predict(shape, device, p, asked, gpus // p.gpus) for p in possible]
    found = [got for got in found if got]
    if not found:
        raise ValueError(no_room_reason(shape, device, possible, asked))
    return sorted(found, key=lambda got: (-got.tokens_per_second, got.tpot))


def no_room_reason(
    shape: Shape, device: Device, possible: list[Layout], asked: Requests
) -> str:
    """Which no layout has: memory for the batch, or times within the SLO."""
    size = lambda p: weight_bytes(shape, p)
    roomy = max(possible, key=lambda p: (capacity(shape, device, p), -size(p)))
    tokens, length = capacity(shape, device, roomy), asked.prompt + asked.output
    if tokens < (asked.batch or 1) * length:
        return (
            f"a batch of {asked.batch or 1} with {length} tokens each does not fit: beside "
            f"{size(roomy) / 1e9:.1f} GB of weights per GPU, {roomy} caches {tokens} tokens; use "
            "more --gpus, a lower --batch, --quantize or --kv-cache-dtype"
        )
    one = replace(asked, batch=asked.batch or 1, slo=Requests.slo)
    ttft, tpot = (
        min(getattr(predict(shape, device, p, one), name) for p in possible
            if capacity(shape, device, p) >= one.batch * length)
        for name in ("ttft", "tpot")
    )  # fmt: skip
    return (
        f"no layout meets --slo {asked.slo[0]:g}:{asked.slo[1]:g}: the shortest time to the first "
        f"token is {ttft:.3g} s, and per token {tpot:.3g} s"
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
    sizes = {p for n in divisors(gpus) for p in layouts(shape, device, n, fixed) if p.gpus == n}
    for p in sorted(sizes, key=str):
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
        full = lambda n: n * in_rate >= left(n) * out_rate  # the decode pool is
        cross = bisect_left(range(1, most + 1), True, key=full)
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
    add("--serve", action="store_true", help="predict serving; --batch: sequences per replica")
    add("--prompt", default="2000", help="tokens of a prompt")
    add("--output", default="500", help="tokens of an output")
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
    batch = None if args.batch in (None, "auto") else parse_number(args.batch)
    slo = Requests.slo
    if args.slo is not None:
        parts = args.slo.split(":")
        require(len(parts) == 2, f"--slo must be A:B in seconds, such as 1:0.05, not {args.slo!r}")
        slo = tuple(parse_positive("slo", part) for part in parts)
    return Requests(parse_number(args.prompt), parse_number(args.output), batch, slo)


def report(args: argparse.Namespace) -> str:
    """The topic's output. ValueError: a wrong flag, or nothing fits."""
    for name in TRAINING:
        given = getattr(args, name) not in (None, False)
        require(not given, f"--{name} is of a training step: it cannot be combined with --serve")
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
    if args.json:
        return json.dumps(as_json(shape, device, gpus, price, found[:top], pools), indent=2)
    head = (
        f"{args.model}, {parameters(shape) / 1e9:.1f}B parameters in {args.quantize}, "
        f"{kv_bytes_per_token(shape, args.kv_cache_dtype):,.0f} bytes of KV cache per token, on "
        f"{gpus} {args.device}: {len(found)} layouts fit\n"
        f"critical batch {critical_batch(device, args.quantize):.0f} tokens per step; "
        f"prompts of {asked.prompt}, outputs of {asked.output} tokens\n"
        f"FLOPs per byte: {', '.join(f'{name} {ridge(d):.0f}' for name, d in DEVICES.items())}"
    )
    parts = [head, table(gpus, price, found[:top]), details(shape, device, asked, found[0])]
    return "\n\n".join([*parts, pools_line(gpus, price, found[0], pools)])


def as_json(
    shape: Shape, device: Device, gpus: int, price: float, found: list[Prediction],
    pools: Pools | None,
) -> dict:  # fmt: skip
    """What --json prints: seconds, bytes, tokens/s and $ per million output tokens."""
    layout = found[0].layout

    def priced(got: Prediction | Pools) -> dict:
        cost = dollars_per_million(gpus, price, got.tokens_per_second)
        return asdict(got) | {"dollars_per_million": cost}

    return {
        "kv_bytes_per_token": kv_bytes_per_token(shape, layout.kv),
        "critical_batch": critical_batch(device, layout.weights),
        "layouts": [priced(got) for got in found],
        "pools": pools and priced(pools),
    }


def table(gpus: int, price: float, found: list[Prediction]) -> str:
    """One line per layout; regime: of a step with its share of the prompts."""
    heads = ("tok/s", 10), ("tok/s/GPU", 11), ("$/M tok", 9), ("TTFT ms", 9), ("ms/tok", 8)
    lines = ["".join(f"{head:>{width}}" for head, width in (*heads, ("batch", 7))) + "  layout"]
    for got in found:
        rate, cost = got.tokens_per_second, dollars_per_million(gpus, price, got.tokens_per_second)
        numbers = f"{rate:>10,.0f}{rate / gpus:>11,.0f}{cost:>9.3f}"
        numbers += f"{1e3 * got.ttft:>9.1f}{1e3 * got.tpot:>8.2f}{got.batch:>7}"
        lines.append(f"{numbers}  {got.replicas} of {got.layout}: {got.regime}")
    return "\n".join(lines)


def details(shape: Shape, device: Device, asked: Requests, got: Prediction) -> str:
    """Of the best layout: memory, the operators of a prefill and a decode step, their seconds."""
    p, rates = got.layout, achieved(device)
    heads = ("GFLOP", 10), ("MB", 10), ("FLOPs/byte", 12), ("ms", 9)
    lines = [
        f"best: {p}; {weight_bytes(shape, p) / 1e9:.1f} GB of weights per GPU; a replica caches "
        f" {capacity(shape, device, p):,} tokens",
        f"{'of a GPU and its stage':<24}" + "".join(f"{h:>{n}}" for h, n in heads) + "  bound",
    ]
    works = {
        "prefill": prefill_work(p.ep, asked.prompt),
        "decode": decode_work(got.batch, asked.context).over(p.pp),
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


def pools_line(gpus: int, price: float, colocated: Prediction, pools: Pools | None) -> str:
    """The best disaggregated pools beside the best colocated layout."""
    if pools is None:
        return "disaggregated: no two pools fit"
    first, second, rate = pools.prefill, pools.decode, pools.tokens_per_second
    cost = dollars_per_million(gpus, price, rate)
    return (
        f"disaggregated: {first.replicas} prefill of {first.layout}, {second.replicas} decode of "
        f"{second.layout}, batch {second.batch}\n"
        f"{rate:,.0f} tok/s ({rate / colocated.tokens_per_second:.2f}x colocated), "
        f"{cost:.3f} $/M tok, TTFT {1e3 * pools.ttft:.1f} ms with the transfer of the KV cache, "
        f"{1e3 * second.tpot:.2f} ms/tok ({colocated.tpot / second.tpot:.2f}x faster)"
    )
