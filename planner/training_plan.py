"""A training step on n GPUs, predicted: memory, time, and the ranking of all layouts.

    got = predict(shape, DEVICES["h100"], Plan(dp=8, zero=3, recompute="full"), seq=8192, batch=16)
    got.step, got.tokens_per_second, got.mfu, got.seconds, got.memory
    rank_plans(shape, device, gpus=64, seq=8192, batch=512)  # fastest first

`rank_plans` enumerates data x tensor x context x pipeline x expert parallelism, ZeRO stage,
micro-batch size, recomputation and pipeline schedule, drops plans that do not fit in memory and
ranks the rest by predicted step time. The time is a sum of terms, each a small function with its
source:

    matmuls         FLOPs of every matrix (Kaplan, arXiv:2001.08361, 2.1; attention as in PaLM,
                    arXiv:2204.02311, app. B, causal: half) or its bytes, whichever are slower
                    (roofline, Williams et al., CACM 2009)
    elementwise     HBM bytes of norms, rotary embedding, SwiGLU, residuals, loss, optimizer
    collectives     rings, alpha + bytes / beta (Thakur et al., IJHPCA 2005); between nodes the
                    slower of NVLink and the NICs of those group members that share a node
    pipeline        bubbles in closed form (arXiv:2104.04473, 2401.10241), uneven stages
    overlap         max(0, transfer - concurrent compute), and the SMs of an overlapped transfer
    memory          states (ZeRO, arXiv:1910.02054), activations (Korthikanti, arXiv:2205.05198)

When it is wrong: kernels far from cuBLAS and FlashAttention; small matmuls, which reach less (the
smallest published run is predicted 1.3x too fast); unbalanced expert load; schedules that overlap
expert all-to-alls, which it counts as exposed; shared networks. It cannot separate plans a few
percent apart. Predicted memory is up to a fifth below what torchtitan reports with fragmentation.
test_all.py checks each formula against numbers printed in papers, and predictions within 20% of 56
published runs, except that smallest one and two of MegaScale's, which changed its model. Needs: the
standard library.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import math
import shlex
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from planner.cost_model import (
    ATTENTION_EFFICIENCY,
    GEMM_EFFICIENCY,
    GEMM_FP8_EFFICIENCY,
    GIB,
    HBM_EFFICIENCY,
    KERNEL_OVERHEAD,
    LINK_EFFICIENCY,
    MEMORY_FRACTION,
    RESERVED_BYTES,
    SHAPES,
    Device,
    Matrix,
    Shape,
    all_to_all,
    exposed_seconds,
    load_cluster,
    model_flops,
    parameters,
    parse_number,
    recomputed_flops,
    require,
    ring,
    score_width,
)

# HBM bytes per token and layer, compiled -> (C, F) of forward and backward, counted op by op in
# bf16. Eager, with RMSNorm and rotary embedding in fp32: 36C per norm, 6C per residual, 38C rotary
# and repeated heads, 10F SwiGLU. Compiled: each tensor once.
LAYER_HBM_BYTES = {False: ((122, 10), (210, 18)), True: ((22, 6), (24, 12))}
LOSS_HBM_BYTES = 28  # HBM traffic per logit: bf16 and fp32 copies, softmax, its gradient
LOGITS_BYTES = 10  # memory per logit at the peak
CAST_HBM_BYTES = 10  # HBM traffic per FP8 matmul output: amax, read, write; inputs and gradients
ASYNC_TP_OVERLAP = 0.5  # hidden part of TP transfers: 1.09 to 1.16x in torchtitan's benchmark
RECOMPUTE = ("none", "selective", "full")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")
TRAIN_MODELS = ("llama2-7b", "llama3-8b", "llama3.2-1b")  # of SHAPES, known to train.py
SIZES = ("dp", "tp", "cp", "pp", "ep", "zero", "micro", "chunks")

# --------------------------------------------------------------------------------------------------
# Plans
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """dp * tp * cp * pp ranks, tp innermost, then cp, dp, pp. Experts are sharded over ep of the dp
    ranks. zero: 1 reduces gradients once per step, 2 in every micro-batch, 3 also gathers weights
    for each pass. recompute: none, selective (saves attention and every second matmul, as
    torchtitan's "op") or full (saves the block's input). chunks: virtual stages per rank. micro:
    micro-batch size in sequences. The last four describe the software: fused elementwise kernels,
    FP8 matmuls, attention kernel, async TP."""

    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    zero: int = 1
    micro: int = 1
    recompute: str = "none"
    schedule: str = "1f1b"
    chunks: int = 1
    compiled: bool = True
    fp8: bool = False
    attention: str = "fa3"
    async_tp: bool = True

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    def __str__(self) -> str:
        ranks = " x ".join(f"{k} {getattr(self, k)}" for k in ("dp", "tp", "cp", "pp"))
        more = f", ep {self.ep}" * (self.ep > 1)
        pipe = f", {self.schedule}" * (self.pp > 1) + f" v{self.chunks}" * (self.chunks > 1)
        label = f"zero {self.zero}, micro {self.micro}, recompute {self.recompute}"
        return f"{ranks}{more}, {label}{pipe}"


def find_conflict(shape: Shape, plan: Plan, seq: int, batch: int) -> str | None:
    """Why a plan is invalid, or None. batch: sequences per step."""
    p, s = plan, shape
    micros, parts = batch // (p.dp * p.micro), p.cp if p.cp == 1 else 2 * p.cp  # zigzag: 2 each
    chunks = {"interleaved": p.chunks > 1, "zbv": p.chunks == 2}.get(p.schedule, p.chunks == 1)
    if p.schedule not in SCHEDULES:
        return f"schedule {p.schedule} is not one of {', '.join(SCHEDULES)}"
    if p.recompute not in RECOMPUTE:
        return f"recompute {p.recompute} is not one of {', '.join(RECOMPUTE)}"
    if p.zero not in (1, 2, 3):
        return f"zero {p.zero} is not 1, 2 or 3"
    if p.zero > 1 and p.dp * p.cp == 1:
        return f"zero {p.zero} requires dp x cp > 1; use zero 1"
    if p.pp > s.layers or p.pp * p.chunks > s.layers + 2:  # embedding and head may be own stages
        stages = f"{p.pp * p.chunks} stages (pp {p.pp} x {p.chunks} chunks)"
        return f"{stages} are more than the model's {s.layers} layers; lower pp"
    if p.schedule != "1f1b" and p.pp == 1:
        return f"schedule {p.schedule} requires pp > 1; use 1f1b, or a higher pp"
    if not chunks:
        return f"schedule {p.schedule} cannot be combined with {p.chunks} chunks per rank"
    if batch % (p.dp * p.micro):
        return f"batch of {batch} sequences is not divisible by dp {p.dp} x micro {p.micro}"
    if p.schedule == "interleaved" and micros % p.pp:
        return f"interleaved: {micros} micro-batches are not divisible by pp {p.pp}"
    if p.zero == 3 and p.pp > 1:
        return "zero 3 cannot be combined with pp: weights per micro-batch; use zero 1 or 2"
    if s.heads % p.tp or s.kv_heads % p.tp and p.tp % s.kv_heads:
        return f"tp {p.tp} cannot shard {s.heads} heads and {s.kv_heads} key-value heads"
    if seq % (parts * p.tp):
        return f"seq {seq} is not divisible by cp's {parts} parts x tp {p.tp}"
    if p.ep > 1 and (p.dp % p.ep or not s.experts or s.experts % p.ep):
        return f"ep {p.ep} does not divide dp {p.dp} and {s.experts} experts"
    return None


def parse_job(args: Namespace) -> tuple[Shape, Device, int, int, int]:
    """(model, GPU, number of GPUs, tokens per sequence, sequences per step) of the flags."""
    shape, device, gpus = load_cluster(args.model, args.device, args.gpus)
    seq, batch = parse_batch(args)
    ok = device.fp8 > device.bf16 or not args.fp8
    require(ok, f"--fp8 cannot be combined with --device {args.device}: it has no FP8")
    return shape, device, gpus, seq, batch


def parse_batch(args: Namespace) -> tuple[int, int]:
    """(tokens per sequence, sequences per step) of the flags."""
    seq = parse_number(args.seq, "--seq", 1024)
    size = parse_number(args.batch or "4M", "--batch", 1024)
    fix = f"--batch {size} is not divisible by --seq {seq}; use {max(size // seq, 1) * seq}"
    require(size % seq == 0, fix)
    return seq, size // seq


def fixed_fields(args: Namespace) -> dict[str, Any]:
    """The fields of Plan that flags fix."""
    given = {name: vars(args).get(name) for name in (*SIZES, "recompute", "schedule")}
    fixed = {name: value for name, value in given.items() if value is not None}
    for name in SIZES:
        require(fixed.get(name, 1) > 0, f"--{name} must be positive, not {fixed.get(name)}")
    return fixed | {"fp8": args.fp8, "compiled": not args.eager}


def divisors(n: int) -> list[int]:
    """Divisors of n, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def layouts(
    shape: Shape, device: Device, gpus: int, seq: int, fixed: dict[str, Any]
) -> Iterator[tuple[int, int, int, int]]:
    """(dp, tp, cp, pp) of `gpus` ranks: tp within a node, cp with at least 2048 tokens per rank."""
    ranks = divisors(gpus)
    free = lambda name, fits: [fixed[name]] if name in fixed else [d for d in ranks if fits(d)]
    for tp, cp, pp in product(
        free("tp", lambda d: d <= device.node and shape.heads % d == 0),
        free("cp", lambda d: d == 1 or seq // d >= 2048),
        free("pp", lambda d: d <= shape.layers),
    ):
        dp = gpus // (tp * cp * pp)
        if gpus == dp * tp * cp * pp and fixed.get("dp", dp) == dp:
            yield dp, tp, cp, pp


def plans(
    shape: Shape, device: Device, gpus: int, seq: int, batch: int, **fixed: Any
) -> Iterator[Plan]:
    """All valid plans of `layouts`, with micro-batches of 1, 2, 4 and 8 sequences, 2 to 8 chunks
    per rank if interleaved, ZeRO 1 to 3. fixed: fields of Plan that are not searched."""
    free = lambda name, values: [fixed[name]] if name in fixed else values
    chunks = {"interleaved": range(2, 9), "zbv": (2,)}
    pipes = [
        (s, v) for s in free("schedule", SCHEDULES) for v in free("chunks", chunks.get(s, [1]))
    ]
    options = list(product(free("micro", (1, 2, 4, 8)), free("zero", (1, 2, 3)), pipes,
                        free("recompute", RECOMPUTE)))  # fmt: skip
    base = Plan(**fixed)
    for dp, tp, cp, pp in layouts(shape, device, gpus, seq, fixed):
        experts = [d for d in divisors(dp) if d == 1 or shape.experts and shape.experts % d == 0]
        for ep in free("ep", experts) if batch % dp == 0 else ():
            for micro, zero, (schedule, v), recompute in options:
                plan = replace(
                    base, dp=dp, tp=tp, cp=cp, pp=pp, ep=ep, micro=micro, zero=zero,
                    schedule=schedule, chunks=v, recompute=recompute,
                )  # fmt: skip
                if find_conflict(shape, plan, seq, batch) is None:
                    yield plan


def possible_plans(
    shape: Shape, device: Device, gpus: int, seq: int, batch: int, **fixed: Any
) -> list[Plan]:
    """All `plans`. ValueError with what is not divisible if there is none."""
    found = list(plans(shape, device, gpus, seq, batch, **fixed))
    if not found:
        raise ValueError(_no_plan_reason(shape, device, gpus, seq, batch, fixed))
    return found


def train_conflict(shape: Shape, plan: Plan) -> str | None:
    """Why train.py cannot run a valid plan, or None."""
    p, stages = plan, plan.pp * plan.chunks
    if p.fp8 and p.tp > 1:
        return "--fp8 cannot be combined with --tp"
    if p.compiled and p.pp > 1 and p.schedule in ("zb-h1", "zbv"):
        return f"--compile cannot be combined with --pp-schedule {p.schedule}"
    if p.attention != Plan.attention:
        return f"it has no flag for attention by {p.attention}"
    if stages > shape.layers:
        return f"it has no stage without a layer: {stages} stages, {shape.layers} layers"
    return None


def model_flag(model: str) -> str:
    """train.py's --model for the planner's. One that it does not know by name is a config.json, of
    the folder given, or of the folder where the checkpoint of that name is."""
    if model not in TRAIN_MODELS and (model in SHAPES or Path(model).is_dir()):
        model = str(Path(model) / "config.json")
    return f"--model {shlex.quote(model)}"


def train_flags(
    model: str, shape: Shape, plan: Plan, seq: int, batch: int,
    layers: Sequence[int] = (), recompute: Sequence[int] = (),
) -> str:  # fmt: skip
    """train.py with the flags of a plan, or why it cannot run it. model: --model; layers: of each
    stage; recompute: stages that do."""
    p, why = plan, train_conflict(shape, plan)
    if why:
        return f"train.py: cannot run this plan: {why}"
    words = [model_flag(model)]
    words += [f"--{k} {getattr(p, k)}" for k in ("dp", "tp", "cp", "ep", "pp") if getattr(p, k) > 1]
    words += [f"--zero {p.zero}"] * (p.dp * p.cp > 1)
    words += [f"--batch-size {batch} --micro-batch-size {p.micro} --seq-len {seq}"]
    words += [f"--recompute {p.recompute}"] * (p.recompute != "none")
    words += ["--compile"] * p.compiled + ["--fp8 tensorwise"] * p.fp8
    words += ["--async-tp"] * (p.async_tp and p.tp > 1)
    if p.pp > 1:
        words += [f"--pp-schedule {p.schedule}"]
        words += [f"--set virtual_stages={p.chunks}"] * (p.schedule == "interleaved")
        for name, values in (("pp_layers", layers), ("pp_recompute", recompute)):
            words += [f"--set {name}={','.join(map(str, values))}"] if values else []
    return f"train.py {' '.join(words)}"


# --------------------------------------------------------------------------------------------------
# Memory
# --------------------------------------------------------------------------------------------------


def state_bytes(params: float, ranks: int, zero: int, gradient: int = 2) -> tuple[float, ...]:
    """Bytes per rank of (bf16 weights, gradients, Adam's K = 12) in ZeRO stages 0 to 3
    (arXiv:1910.02054, figure 1)."""
    sizes = (2 * params, 3), (gradient * params, 2), (12 * params, 1)
    return tuple(size / ranks if zero >= stage else size for size, stage in sizes)


@cache
def activation_bytes(shape: Shape, recompute: str, compiled: bool) -> float:
    """Bytes per token that a layer saves for its backward pass, mean over layers.

    none, eager, GPT: 32 C, which is 34 s b h of Korthikanti et al. (arXiv:2205.05198, 4.1) without
    the two dropout masks, and with flash attention 4 H for the lse instead of 5 a s: inputs and
    outputs of two norms 8 C, q, k, v, o, and F before and after its nonlinearity. compiled: outputs
    of norms and nonlinearities are recomputed in the backward pass (torch.compile's min-cut
    partitioner; fused kernels). full: 2 C, the block's input.
    """
    s, C = shape, shape.dim
    if recompute == "full":
        return 2 * C
    v_dim, qk = s.v_dim or s.head_dim, s.head_dim + s.rope_dim
    o, keys = s.heads * v_dim, (s.heads if s.kv_rank else s.kv_heads) * (qk + v_dim)
    if recompute == "selective":  # the input, o, lse and every second matmul
        matmuls = s.mean(lambda matrices: sum(m.n * m.active_count for m in matrices[::2]))
        return 2 * (C + o + matmuls) + 4 * s.heads
    inner, latents, copies = ffn_width(s), s.q_rank + s.kv_rank, s.experts_per_token * C
    gates = inner if s.gpt else 2 * inner
    saved = 4 * C + 2 * (s.heads * qk + keys + o + latents + gates) + 4 * s.heads
    return saved + 2 * copies * s.moe_layers / s.layers + (0 if compiled else 4 * C + 2 * inner)


def ffn_width(shape: Shape) -> float:
    """Active F per token, mean over layers."""
    met = shape.expert_ffn * (shape.experts_per_token + shape.shared_experts)
    return shape.ffn + (met - shape.ffn) * shape.moe_layers / shape.layers


def in_flight(plan: Plan, micros: int, last: bool) -> float:
    """Peak number of micro-batches whose activations the first or last rank stores: all in GPipe,
    p and 1 in 1F1B (arXiv:2104.04473, 2.2), p +- (p - 1) / v interleaved (2.2.2), p on all
    ranks in ZB-H1 and ZB-V (arXiv:2401.10241, 2; 2405.15362)."""
    p, v = plan.pp, plan.chunks
    in_flight = {
        "gpipe": micros,
        "1f1b": 1 if last else p,
        "interleaved": p + (p - 1) / v * (-1 if last else 1),
    }
    return min(micros, in_flight.get(plan.schedule, p))


@cache
def layer_parameters(shape: Shape) -> tuple[float, float]:
    """Parameters of all layers: (outside routed experts, of routed experts)."""
    routed = [m for m in shape.feed_forward(True) if m.count == shape.experts > 1]
    experts = shape.moe_layers * sum(m.k * m.n * m.count for m in routed)
    ends = (1 if shape.tied else 2) * shape.dim * shape.vocab
    return parameters(shape) - ends - experts, experts


def layers_per_rank(shape: Shape, plan: Plan) -> tuple[int, int]:
    """Layers of (the fullest rank, the rank with the head). Stages have equal numbers; if the
    layers do not divide evenly, the last and the first stage have fewer, as in Llama 3
    (arXiv:2407.21783, 3.3.2)."""
    stage = -(-shape.layers // (plan.pp * plan.chunks))
    missing = stage * plan.pp * plan.chunks - shape.layers
    return stage * plan.chunks, stage * plan.chunks - min(stage, -(-missing // 2))


def count_ends(shape: Shape, first: bool, last: bool) -> int:
    """Matrices of C x V on a stage: the embedding, the head, or both, which are one if tied."""
    return 1 if shape.tied and first and last else first + last


def stage_bytes(
    shape: Shape, plan: Plan, seq: int, layers: float, ends: int, head: bool, micros: float
) -> dict[str, float]:
    """Bytes by kind on a rank with `layers` layers, `ends` (count_ends), the loss if `head`, and
    the activations of `micros` micro-batches. Gradients are fp32."""
    p, C, n = plan, shape.dim, plan.dp * plan.cp
    tokens = p.micro * seq / p.cp
    dense, experts = (part / shape.layers / p.tp for part in layer_parameters(shape))
    end = C * shape.vocab / p.tp
    saved = activation_bytes(shape, p.recompute, p.compiled)
    # one layer's working set: gradients, recomputed activations; under tp gathered input and output
    working = activation_bytes(shape, "none", p.compiled) * (1 if p.recompute == "none" else 2)
    working += 4 * C * p.tp if p.tp > 1 else 0
    whole = 2 * (2 * (dense + experts / p.ep) + end) if p.zero == 3 else 0  # two layers and an end
    parts = ((layers * dense + ends * end, n), (layers * experts / p.ep, n / p.ep))
    states = [state_bytes(*part, p.zero, gradient=4) for part in parts]
    weights, gradients, optimizer = (sum(both) for both in zip(*states))
    activations = tokens / p.tp * (micros * layers * saved + working)
    logits = LOGITS_BYTES * tokens * shape.vocab / p.tp if head else 0
    return {
        "weights": weights + whole, "gradients": gradients, "optimizer": optimizer,
        "activations": activations, "logits": logits, "reserved": RESERVED_BYTES,
    }  # fmt: skip


def memory(shape: Shape, plan: Plan, seq: int, batch: int) -> dict[str, float]:
    """Bytes by kind on the fuller of the first rank, with the embedding and the most micro-batches,
    and the last, with the head and its logits."""
    p, micros = plan, batch // (plan.dp * plan.micro)
    both = p.pp == 1 or p.schedule == "zbv"  # ZB-V: the first rank has the last stage too
    full, last = layers_per_rank(shape, p)
    ends, first = count_ends(shape, True, both), in_flight(p, micros, last=False)
    ranks = [stage_bytes(shape, p, seq, full, ends, both, first)]
    if not both:
        ranks += [stage_bytes(shape, p, seq, last, 1, True, in_flight(p, micros, last=True))]
    return max(ranks, key=lambda kinds: sum(kinds.values()))


# --------------------------------------------------------------------------------------------------
# Time
# --------------------------------------------------------------------------------------------------


def matmul_seconds(shape: Shape, device: Device, tokens: float, plan: Plan) -> tuple[float, float]:
    """Forward seconds of a layer's matmuls, mean over layers: (all, every second one)."""
    rate = GEMM_FP8_EFFICIENCY * device.fp8 if plan.fp8 else GEMM_EFFICIENCY * device.bf16

    def seconds(m: Matrix) -> float:
        flops = 2 * tokens * m.active_count * m.k * m.n / plan.tp
        weights = m.k * m.n * max(m.count / plan.ep, 1)
        moved = 2 * (weights + tokens * m.active_count * (m.k + m.n)) / plan.tp
        return max(flops / rate, moved / (HBM_EFFICIENCY * device.hbm)) + KERNEL_OVERHEAD

    mean = lambda part: shape.mean(lambda matrices: sum(map(seconds, matrices[part])))
    return mean(slice(None)), mean(slice(1, None, 2))


@cache
def layer_seconds(shape: Shape, device: Device, seq: int, plan: Plan) -> dict[str, tuple]:
    """Seconds of a layer for a micro-batch: kind -> (forward, backward, recomputation), mean over
    layers."""
    p, C, moe = plan, shape.dim, shape.moe_layers / shape.layers
    tokens, full = p.micro * seq / p.cp, p.recompute == "full"
    recomputes = p.recompute != "none"
    work, second = matmul_seconds(shape, device, tokens, p)
    rates = (share * device.bf16 for share in ATTENTION_EFFICIENCY[p.attention])
    # 2 matmuls forward, 5 backward (arXiv:2307.08691, 3.1); a query sees seq / 2 keys on average
    attend, attend_back = (
        part * tokens * seq * score_width(shape) / p.tp / rate
        for part, rate in zip((1, 2.5), rates)
    )
    routed = C * shape.experts_per_token * moe  # elements per token, permuted and unpermuted
    outputs = shape.mean(lambda matrices: sum(m.n * m.active_count for m in matrices))
    cast = CAST_HBM_BYTES / 2 * outputs if p.fp8 else 0
    hbm = HBM_EFFICIENCY * device.hbm
    elementwise, elementwise_back = (
        tokens / p.tp * (c * C + f * ffn_width(shape) + 8 * routed + cast) / hbm
        for c, f in LAYER_HBM_BYTES[p.compiled]
    )
    tp_transfer = ring(2 * C * tokens, p.tp, 1, device) * (1 - ASYNC_TP_OVERLAP * p.async_tp)
    gather = tp_transfer if p.fp8 else 2 * tp_transfer  # two inputs; FP8 halves the bytes
    width = score_width(shape) / p.tp  # MLA; otherwise of the rank's key-value heads
    width = width if shape.kv_rank else 2 * max(shape.kv_heads / p.tp, 1) * shape.head_dim
    kv_ring = ring(2 * tokens * width * p.cp, p.cp, p.tp, device)  # k, v; backward: and gradients
    cp_exposed = exposed_seconds(kv_ring, attend)
    cp_exposed_back = exposed_seconds(2 * kv_ring, attend_back)
    ep_transfer = 2 * all_to_all(2 * tokens / p.tp * routed, p.ep, p.tp * p.cp, device)
    return {
        "matmuls": (work, 2 * work, work if full else second * recomputes),
        "attention": (attend, attend_back, full * attend),
        "elementwise": (elementwise, elementwise_back, recomputes * elementwise),
        # gather and scatter; in backward also inputs again (arXiv:2205.05198, 4.2.2)
        "tensor parallel": (
            gather + 2 * tp_transfer,
            4 * tp_transfer + gather,
            full * 2 * tp_transfer,
        ),
        "context parallel": (cp_exposed, cp_exposed_back, full * cp_exposed),
        # dispatch and combine
        "expert parallel": (ep_transfer, ep_transfer, recomputes * ep_transfer),
    }


def block(layers: int, dim: int, heads: int) -> Shape:
    """Layers in GPT's form, without embedding and head."""
    return Shape(layers, dim, heads, heads, dim // heads, 4 * dim, 0, gpt=True)


def passes(shape: Shape, device: Device, seq: int, plan: Plan = Plan()) -> tuple[float, float]:
    """Seconds of a layer's (forward, backward and recomputation) for a micro-batch."""
    forward, backward, again = zip(*layer_seconds(shape, device, seq, plan).values())
    return sum(forward), sum(backward) + sum(again)


def head_seconds(shape: Shape, device: Device, tokens: float) -> float:
    """Forward and backward seconds of the head and the loss of `tokens`."""
    logits = tokens * shape.vocab
    matmuls = 6 * logits * shape.dim / (GEMM_EFFICIENCY * device.bf16)
    return matmuls + LOSS_HBM_BYTES * logits / (HBM_EFFICIENCY * device.hbm)


def hop_seconds(shape: Shape, device: Device, tokens: float, far: bool) -> float:
    """Seconds to send the activations of `tokens` to the next stage, in another node if far; the
    latency is the network's, also within a node."""
    wire = device.network if far else device.nvlink
    return device.alpha[1] + 2 * shape.dim * tokens / (LINK_EFFICIENCY * wire)


def far_hops(plan: Plan, device: Device) -> int:
    """How many of the pp - 1 hops leave a node on some rank: two stages share no node."""
    stride, node = plan.tp * plan.cp * plan.dp, device.node
    return sum(i * stride // node < ((i + 2) * stride - 1) // node for i in range(plan.pp - 1))


def bubble(schedule: str, p: int, chunks: int, slot: float, weight: float) -> float:
    """Idle seconds of a rank per step. slot: forward and backward time of a micro-batch on the
    rank; weight: the part of it for weight gradients.

        gpipe, 1f1b   (p - 1) slot                arXiv:2104.04473, 2.2
        interleaved   (p - 1) slot / v            2.2.2
        zb-h1         (p - 1) (slot - 2 weight)   arXiv:2401.10241, table 2: F + B - W
        zbv           (p - 1) (slot - 3 weight)   2401.10241, 6: none if F = B = W; otherwise
                                                  ZB-H2's, an approximation
    """
    left = {"interleaved": slot / chunks, "zb-h1": slot - 2 * weight, "zbv": slot - 3 * weight}
    return (p - 1) * max(0.0, left.get(schedule, slot))


def data_parallel(
    shape: Shape, device: Device, plan: Plan, layers: int, micros: int, slots: tuple[float, float]
) -> tuple[float, float]:
    """Seconds per step of a rank with `layers`: (exposed transfers of weights and gradients, the
    optimizer). slots: forward and backward compute of a micro-batch, which overlaps all transfers
    except the first layer's gather and the last one's reduction."""
    p, n = plan, plan.dp * plan.cp
    dense, experts = (part * layers / shape.layers / p.tp for part in layer_parameters(shape))
    dense += shape.dim * shape.vocab / p.tp * (1 if p.pp > 1 or shape.tied else 2)
    experts, over = experts / p.ep, n // p.ep
    transfer = lambda width: (
        ring(width * dense, n, p.tp, device, layers)
        + ring(width * experts, over, p.tp * p.ep, device, layers)
    )
    gather, reduce = transfer(1 if p.fp8 else 2), transfer(4)  # gradients in fp32
    ends = (gather + reduce) / layers
    before = exposed_seconds(gather, slots[0])
    if p.zero == 3:
        moved = micros * (before + exposed_seconds(gather + reduce, slots[1]) + ends)
    else:
        moved = before + ends + (micros if p.zero == 2 else 1) * exposed_seconds(reduce, slots[1])
    updated = 30 * (dense / n + experts / over)  # bytes: p, m, v, gradient in; p, m, v, bf16 out
    return moved, updated / (HBM_EFFICIENCY * device.hbm)


@dataclass(frozen=True)
class Prediction:
    """memory: bytes per rank by kind; seconds: step time by kind, whose sum is `step`; tokens/s per
    GPU; mfu: model FLOPs over the bf16 peak; hfu: with recomputation."""

    plan: Plan
    memory: dict[str, float]
    seconds: dict[str, float]
    step: float
    tokens_per_second: float
    mfu: float
    hfu: float

    @property
    def bytes(self) -> float:
        return sum(self.memory.values())


def predict(shape: Shape, device: Device, plan: Plan, seq: int, batch: int) -> Prediction:
    """One step over `batch` sequences of `seq` tokens. ValueError if the plan is invalid."""
    why = find_conflict(shape, plan, seq, batch)
    require(not why, why)
    p = plan
    micros, tokens = batch // (p.dp * p.micro), p.micro * seq / p.cp
    local = replace(p, dp=p.ep, pp=1, zero=1, schedule="1f1b", chunks=1)  # what affects a layer
    layer = layer_seconds(shape, device, seq, local)
    passes = (sum(kind[i] for kind in layer.values()) for i in range(3))
    forward, backward, recompute_seconds = passes
    head = head_seconds(shape, device, tokens / p.tp)
    full, last = layers_per_rank(shape, p)
    both = p.pp == 1 or p.schedule == "zbv"
    layer_total = forward + backward + recompute_seconds
    slot = max(full * layer_total + both * head, last * layer_total + head)
    mean = shape.layers / p.pp
    seconds = {kind: micros * mean * (f + b) for kind, (f, b, _) in layer.items()}
    seconds["recomputation"] = micros * mean * recompute_seconds
    seconds["head and loss"] = micros * head / p.pp
    seconds["uneven stages"] = micros * slot - sum(seconds.values())
    seconds["bubble"] = bubble(p.schedule, p.pp, p.chunks, slot, full * layer["matmuls"][0])
    if p.pp > 1:
        far = far_hops(p, device)
        hops = [hop_seconds(shape, device, tokens / p.tp, i < far) for i in range(p.pp - 1)]
        sends = exposed_seconds(2 * micros * p.chunks * max(hops), micros * slot)
        seconds["stage to stage"] = sends + 2 * sum(hops)
    ends = both * head / 3
    slots = (full * forward + ends, full * (backward + recompute_seconds) + 2 * ends)
    sync = data_parallel(shape, device, p, full, micros, slots)
    seconds["data parallel"], seconds["optimizer"] = sync
    step = sum(seconds.values())
    rate = batch * seq / step / p.gpus
    flops = model_flops(shape, seq)
    hardware_flops = flops + recomputed_flops(shape, seq, p.recompute)
    return Prediction(
        p, memory(shape, p, seq, batch), seconds, step, rate,
        rate * flops / device.bf16, rate * hardware_flops / device.bf16,
    )  # fmt: skip


def rank_plans(
    shape: Shape, device: Device, gpus: int, seq: int, batch: int, **fixed: Any
) -> list[Prediction]:
    """Predictions of all `plans` that fit in memory, fastest first. ValueError with the reason if
    there is none: what is not divisible, or how much memory the smallest plan lacks."""
    possible = possible_plans(shape, device, gpus, seq, batch, **fixed)
    needs = [(sum(memory(shape, p, seq, batch).values()), p) for p in possible]
    budget = device.usable_memory
    found = [predict(shape, device, p, seq, batch) for need, p in needs if need <= budget]
    if found:
        return sorted(found, key=lambda got: (got.step, got.bytes))
    need, plan = min(needs, key=lambda pair: pair[0])
    kinds = memory(shape, plan, seq, batch).items()
    raise ValueError(
        f"no plan fits: the smallest ({plan}) needs {need / GIB:.1f} of "
        f"{budget / GIB:.1f} GiB per GPU ({MEMORY_FRACTION:.0%} of {device.memory / GIB:.1f}): "
        + ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in kinds if size)
        + f"; short by {(need - budget) / GIB:.1f} GiB; use more --gpus, a shorter --seq "
        "or a larger --device"
    )


def _no_plan_reason(
    shape: Shape, device: Device, gpus: int, seq: int, batch: int, fixed: dict[str, Any]
) -> str:
    found = list(layouts(shape, device, gpus, seq, fixed))
    if not found:
        requested = " x ".join(f"{k} {fixed[k]}" for k in ("dp", "tp", "cp", "pp") if k in fixed)
        return f"{gpus} GPUs are not divisible by {requested}"
    sizes = min(found, key=lambda layout: (batch % layout[0] > 0, layout[0]))
    chunks = 2 if fixed.get("schedule") in ("interleaved", "zbv") else 1
    plan = Plan(**dict(zip(("dp", "tp", "cp", "pp"), sizes), chunks=chunks) | fixed)
    why = find_conflict(shape, plan, seq, batch)
    return why or "no plan satisfies all fixed flags; fix fewer"
