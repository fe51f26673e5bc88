"""Serving on n GPUs, predicted: time to the first token, time per token, tokens per dollar.

    python -m planner serve --prompt 2000 --output 500 --batch auto

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

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import argparse
import json
import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product

from planner.cost_model import (
    DEVICES, Device, Shape, load_cluster, parameters, parse_number, require, send_seconds,
)  # fmt: skip
from planner.flags import add_shared
from planner.serving_cost import (
    BYTES, Layout, Step, Work, achieved, capacity, critical_batch, decode_work, kv_bytes_per_token,
    kv_shard, operators, prefill_work, ridge, step, weight_bytes,
)  # fmt: skip
from planner.training_plan import divisors

# --------------------------------------------------------------------------------------------------
# A replica, and colocated or disaggregated pools of them
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Requests:
    """What is served. prompt, output: tokens of each, output 2 or more. batch: sequences per
    replica; None: as many as fit. slo: seconds to the first token, and per further token."""

    prompt: int
    output: int
    batch: int | None = None
    slo: tuple[float, float] = (math.inf, math.inf)

    @property
    def context(self) -> float:
        """Keys that a token reads: the mean of prompt + 1 to prompt + output - 1, its decode steps.
        """
        return self.prompt + self.output / 2


@dataclass(frozen=True)
class Prediction:
    """Replicas of a layout. ttft, tpot: seconds to a request's first token, and per further token;
    tokens_per_second: of all replicas' outputs, 0 if they only prefill."""

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
    arriving = running / (asked.output - 1) if mixed else 0
    return decode_work(running, asked.context).plus(prefill_work(arriving, asked.prompt))


def sequences_that_fit(shape: Shape, device: Device, layout: Layout, asked: Requests) -> int:
    """How many fit in a replica at their full length, each on one of the ep ranks."""
    per_rank = capacity(shape, device, layout) // layout.ep
    return layout.ep * (per_rank // (asked.prompt + asked.output))


def largest_batch(
    shape: Shape, device: Device, layout: Layout, asked: Requests, mixed: bool
) -> int:
    """Sequences that fit and meet the SLO's time per token: asked.batch or 0, or if it is None as
    many as do."""
    most, rates = sequences_that_fit(shape, device, layout, asked), achieved(device)
    tpot = lambda n: layout.pp * decode(shape, rates, layout, asked, n, mixed).total
    too_slow = lambda n: tpot(n) > asked.slo[1]  # the larger the batch, the slower
    if asked.batch is None:
        return bisect_left(range(1, most + 1), True, key=too_slow)
    return 0 if asked.batch > most or too_slow(asked.batch) else asked.batch


def predict(
    shape: Shape, device: Device, layout: Layout, asked: Requests, replicas: int = 1,
    mixed: bool = True,
) -> Prediction | None:  # fmt: skip
    """The prediction of replicas; None if the requests do not fit or miss the SLO. mixed: they
    prefill too; otherwise the SLO's time to the first token does not apply."""
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
    """Why no layout serves the requests: too little memory for the batch, or too short an SLO."""
    possible = list(layouts(shape, device, gpus, fixed))
    smallest = replace(asked, batch=asked.batch or 1, slo=Requests.slo)
    fits = [got for p in possible if (got := predict(shape, device, p, smallest))]
    if not fits:
        return _memory_reason(shape, device, possible, smallest)
    ttft, tpot = (min(getattr(got, name) for got in fits) for name in ("ttft", "tpot"))
    return (
        f"no layout meets --slo {asked.slo[0]:g}:{asked.slo[1]:g}: the shortest time to the first "
        f"token of any is {ttft:.3g} s, and per token {tpot:.3g} s"
    )


def _memory_reason(
    shape: Shape, device: Device, possible: list[Layout], asked: Requests
) -> str:
    """That the batch does not fit the layout with room for the most sequences."""

    def room(p: Layout) -> tuple[int, int]:
        fit = sequences_that_fit(shape, device, p, asked)
        return fit, capacity(shape, device, p) // p.ep

    best = max(possible, key=lambda p: (*room(p), -weight_bytes(shape, p)))
    (fit, tokens), fewer = room(best), "a lower --batch, " * (asked.batch > 1)
    return (
        f"a batch of {asked.batch} with {asked.prompt + asked.output} tokens each does not fit: "
        f"beside {weight_bytes(shape, best) / 1e9:.1f} GB of weights per GPU, {best} caches "
        f"{tokens} tokens per rank, {fit} sequences; use more --gpus, {fewer}--quantize or "
        "--kv-cache-dtype"
    )


@dataclass(frozen=True)
class Pools:
    """Replicas that prefill and replicas that decode. ttft: with the transfer of the KV cache;
    tokens_per_second: of the slower pool."""

    prefill: Prediction
    decode: Prediction
    ttft: float
    tokens_per_second: float


def transfer_seconds(shape: Shape, device: Device, layout: Layout, prompt: int, far: bool) -> float:
    """To send a prompt's KV cache from all GPUs of a replica, over the network if far."""
    size = kv_bytes_per_token(shape, layout.kv) * prompt * kv_shard(shape, layout)
    return send_seconds(size, device, far)


def prefill_replica(
    shape: Shape, device: Device, layout: Layout, asked: Requests, far: bool
) -> tuple[Prediction, float] | None:
    """(a replica that only prefills, its prompts/s); None if it cannot store one prompt per ep rank
    and stage, or misses the SLO. far: the caches are sent over the network."""
    p, one = layout, prefill(shape, achieved(device), layout, asked.prompt)
    ttft = p.pp * one.total + transfer_seconds(shape, device, p, asked.prompt, far)
    if capacity(shape, device, p) < asked.prompt * p.ep * p.pp or ttft > asked.slo[0]:
        return None
    return Prediction(p, 1, p.ep * p.pp, ttft, 0.0, 0.0, one.regime), p.ep / one.total


def disaggregate(
    shape: Shape, device: Device, gpus: int, asked: Requests, **fixed: int | str
) -> Pools | None:
    """The two pools with the most tokens/s on at most `gpus` GPUs, over all pairs of layouts whose
    replica divides `gpus`, and all replica counts; None if no pair fits."""
    possible, far = list(layouts(shape, device, gpus, fixed)), gpus > device.node
    prefills = (prefill_replica(shape, device, p, asked, far) for p in possible)
    decodes = (predict(shape, device, p, asked, mixed=False) for p in possible)
    pairs = product(filter(None, prefills), filter(None, decodes))
    found = (pools for pair in pairs for pools in splits(gpus, asked.output, *pair))
    return max(found, key=lambda pools: (pools.tokens_per_second, -pools.ttft), default=None)


def splits(
    gpus: int, output: int, first: tuple[Prediction, float], second: Prediction
) -> Iterator[Pools]:
    """The best numbers of prefill and decode replicas on `gpus` GPUs are among these. Tokens/s are
    those of the slower pool, so that the best split is beside the point where both are as fast."""
    (one, in_rate), out_rate = first, second.tokens_per_second / output  # requests/s of a replica
    p, q = one.layout.gpus, second.layout.gpus
    most, left = (gpus - q) // p, lambda n: (gpus - n * p) // q
    decode_is_slower = lambda n: n * in_rate >= left(n) * out_rate
    cross = bisect_left(range(1, most + 1), True, key=decode_is_slower)
    for n in range(max(1, cross), min(most, cross + 1) + 1):
        rate = output * min(n * in_rate, left(n) * out_rate)
        yield Pools(replace(one, replicas=n), replace(second, replicas=left(n)), one.ttft, rate)


def dollars_per_million(gpus: int, price: float, tokens_per_second: float) -> float:
    """$ per million output tokens at `price` $ per GPU and hour."""
    return gpus * price / 3600 / tokens_per_second * 1e6


# --------------------------------------------------------------------------------------------------
# The topic's flags and report
# --------------------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `serve`."""
    add_shared(parser, "model gpus device tp pp ep top json")
    add = parser.add_argument
    add("--batch", help="sequences per replica, or auto: as many as fit and keep --slo (auto)")
    add("--prompt", default="2000", help="tokens of a prompt (2000)")
    add("--output", default="500", help="tokens of an output, 2 or more (500)")
    add("--quantize", default="bf16", choices=BYTES, help="weights of the layers (bf16)")
    add("--kv-cache-dtype", default="bf16", choices=("bf16", "fp8", "int8"), help="(bf16)")
    add("--slo", help="seconds to the first token, and per further token", metavar="A:B")
    add("--gpu-hour", default="2.5", help="$ per GPU and hour; 2.5 is no quote", metavar="PRICE")
    parser.set_defaults(report=report)


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
    prompt, output = parse_number(args.prompt, "--prompt"), parse_number(args.output, "--output")
    require(output > 1, f"--output must be 2 or more, not {output}: prefill gives the first token")
    batch = None if args.batch in (None, "auto") else parse_number(args.batch, "--batch")
    slo = Requests.slo
    if args.slo is not None:
        parts = args.slo.split(":")
        require(len(parts) == 2, f"--slo must be A:B in seconds, such as 1:0.05, not {args.slo!r}")
        slo = tuple(parse_positive("slo", part) for part in parts)
    return Requests(prompt, output, batch, slo)


def report(args: argparse.Namespace) -> str:
    """The topic's output. ValueError: a wrong flag, or nothing fits."""
    shape, device, gpus = load_cluster(args.model, args.device, args.gpus)
    asked, top = read_requests(args), parse_number(args.top, "--top")
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
    times = f"{'TTFT ms':>9}{'ms/tok':>9}{'batch':>8}"
    lines = [f"{'tok/s':>10}{'tok/s/GPU':>11}{'$/M tok':>9}{times}  layout"]
    for got in found:
        rate, cost = got.tokens_per_second, dollars_per_million(gpus, price, got.tokens_per_second)
        numbers = f" {rate:>9,.0f} {rate / gpus:>10,.0f} {cost:>8.3f}"
        numbers += f" {1e3 * got.ttft:>8.1f} {1e3 * got.tpot:>8.2f} {got.batch:>7}"
        lines.append(f"{numbers}  {got.replicas} of {got.layout}: {got.regime}")
    return "\n".join(lines)


def details(shape: Shape, device: Device, asked: Requests, got: Prediction) -> str:
    """Of one layout: memory, the operators of a prefill and a decode step, their seconds."""
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
    cost, faster, shorter = dollars_per_million(gpus, price, rate), "", ""
    if found:
        faster = f" ({rate / found[0].tokens_per_second:.3g}x colocated)"
        shorter = f" ({second.tpot / found[0].tpot:.3g}x colocated)"
    return (
        f"disaggregated: {first.replicas} prefill of {first.layout}, {second.replicas} decode of "
        f"{second.layout}, batch {second.batch}\n"
        f"{rate:,.0f} tok/s{faster}, "
        f"{cost:.3f} $/M tok, TTFT {1e3 * pools.ttft:.1f} ms with the transfer of the KV cache, "
        f"{1e3 * second.tpot:.2f} ms/tok{shorter}"
    )
