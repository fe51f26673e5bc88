"""A step of an inference engine, predicted: its operators, seconds, regime, memory.

    shape, device = SHAPES["llama3-8b"], DEVICES["h100"]
    kv_bytes_per_token(shape), critical_batch(device)   # 131072 bytes, 295 tokens
    step(shape, achieved(device), Layout(tp=2), decode_work(64, context=2250)).regime

A step runs some tokens through the model: a prompt's, one per running sequence, or both (chunked
prefill). Each operator takes max(FLOPs / peak, bytes / bandwidth), the roofline (Williams et al.,
CACM 2009), where a decode step's bytes are the weights and the KV cache (Chen, "Transformer
Inference Arithmetic", 2022; Austin et al., "How to Scale Your Model", 2025, part 7). To their sum
come a launch per kernel and the collectives of the layout. Which of compute, bandwidth and overhead
is largest names the regime (He, "Making Deep Learning Go Brrrr From First Principles", 2022).

With a datasheet's Device the times are the lower bounds of the articles; `achieved` lowers its
rates to cost_model.py's fractions, which are fitted to no serving benchmark. When it is wrong:
engines bound by their CPU (scheduling, sampling and detokenization are not in it), eager kernels
without CUDA graphs, experts with unbalanced or small matmuls, sliding windows (all layers attend to
all keys). test_all.py checks it against the numbers of the articles and TensorRT-LLM's published
tables. Needs: the standard library.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

from dataclasses import dataclass, replace
from typing import NamedTuple

from planner.cost_model import (
    GEMM_EFFICIENCY,
    GEMM_FP8_EFFICIENCY,
    HBM_EFFICIENCY,
    KERNEL_OVERHEAD,
    LINK_EFFICIENCY,
    Device,
    Matrix,
    Shape,
    all_to_all,
    parameters,
    ring,
    score_width,
    send_seconds,
)
from planner.training_plan import LAYER_HBM_BYTES, ffn_width, layer_parameters

BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}  # per weight or element of the cache

# --------------------------------------------------------------------------------------------------
# The work of a step, and its operators
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """A replica of tp * pp * ep GPUs. ep: ranks with attention and KV cache of their own (data
    parallel attention) that share the experts. weights, kv: a key of BYTES; fp8 weights also
    compute in FP8, int8 and int4 ones in bf16. Embedding and head stay in bf16."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    weights: str = "bf16"
    kv: str = "bf16"

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.ep

    def __str__(self) -> str:
        return f"tp {self.tp} x pp {self.pp} x ep {self.ep}"


class Work(NamedTuple):
    """Of a step: tokens run through the layers, query-key pairs within prompts, cached keys read by
    tokens that are decoded, rows of logits."""

    tokens: float
    pairs: float
    keys: float
    rows: float

    def plus(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(self, other)))

    def over(self, n: int) -> Work:
        return Work(*(a / n for a in self))


def prefill_work(prompts: float, prompt: int) -> Work:
    """Whole prompts, causal."""
    return Work(prompts * prompt, prompts * prompt * (prompt + 1) / 2, 0, prompts)


def decode_work(batch: float, context: float) -> Work:
    """One token for each of `batch` sequences with `context` keys."""
    return Work(batch, 0, batch * context, batch)


class Operator(NamedTuple):
    """A group of kernels of one stage on one GPU. dtype: of its matmuls."""

    name: str
    flops: float
    bytes: float
    kernels: float = 0
    dtype: str = "bf16"

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved; compute bound above the device's `ridge`."""
        return self.flops / self.bytes


def kv_bytes_per_token(shape: Shape, kv: str = "bf16") -> float:
    """Of all layers: 2 Hkv D elements each (Chen, "kv cache"), with MLA the latent."""
    latent, heads = shape.kv_rank + shape.rope_dim, 2 * shape.kv_heads * shape.head_dim
    return BYTES[kv] * shape.layers * (latent if shape.kv_rank else heads)


def stage_layers(shape: Shape, layout: Layout) -> float:
    """Fraction of the layers in the fullest pipeline stage."""
    return -(-shape.layers // layout.pp) / shape.layers


def kv_shard(shape: Shape, layout: Layout) -> float:
    """Part of a token's KV cache on one GPU: heads are sharded over tp, and replicated once each
    rank has one; MLA's latent is always replicated."""
    heads = 1 if shape.kv_rank else min(layout.tp, shape.kv_heads)
    return stage_layers(shape, layout) / heads


def matmuls(shape: Shape, layout: Layout, work: Work) -> list[Operator]:
    """The layers' matmuls on one GPU and stage. Of E experts, those are read that at least one
    token chooses, under uniform routing E (1 - (1 - K / E)^tokens)."""
    s, p, local = shape, layout, work.over(layout.ep)
    dtype = "fp8" if p.weights == "fp8" else "bf16"

    def group(name: str, kernels: int, layers: float, matrices: list[Matrix]) -> Operator:
        flops = moved = 0.0
        for m in matrices:
            used = m.count * (1 - (1 - m.active_count / m.count) ** work.tokens)
            ranks = p.ep if m.count == s.experts > 1 else 1
            flops += 2 * local.tokens * m.active_count * m.k * m.n
            moved += BYTES[p.weights] * m.k * m.n * used / ranks
            moved += 2 * local.tokens * m.active_count * (m.k + m.n)
        return Operator(name, layers * flops / p.tp, layers * moved / p.tp, layers * kernels, dtype)

    part = stage_layers(s, p)
    dense, moe = part * (s.layers - s.moe_layers), part * s.moe_layers
    found = [group("projections", 4 if s.kv_rank else 2, dense + moe, s.attention())]
    found += [group("feed-forward", 2, dense, s.feed_forward(False))] if dense else []
    kernels = 5 if s.shared_experts else 3  # router, grouped up and down, shared up and down
    return found + ([group("experts", kernels, moe, s.feed_forward(True))] if moe else [])


def operators(shape: Shape, layout: Layout, work: Work) -> list[Operator]:
    """All operators of one GPU and stage for a replica's work. With MLA, decoded tokens attend to
    the latent (absorbed weights, DeepSeek-V2, arXiv:2405.04434, 2.1), prompts to expanded keys. The
    stages share the head's time."""
    s, p, local = shape, layout, work.over(layout.ep)
    layers, pair = stage_layers(s, p) * s.layers, 2 * score_width(s)
    cached = 2 * s.heads * (2 * s.kv_rank + s.rope_dim) if s.kv_rank else pair
    flops = layers * (local.pairs * pair + local.keys * cached) / p.tp
    moved = (local.keys + local.tokens) * kv_bytes_per_token(s, p.kv) * kv_shard(s, p)
    c, f = LAYER_HBM_BYTES[True][0]
    elementwise = layers * local.tokens * (c * s.dim + f * ffn_width(s) / p.tp)
    head, logits = s.dim * s.vocab / p.tp / p.pp, s.vocab / p.tp / p.pp
    return [
        *matmuls(s, p, work),
        Operator("attention", flops, moved, layers),
        Operator("elementwise", 0.0, elementwise),
        Operator("head", 2 * local.rows * head, 2 * (head + local.rows * logits), 1 / p.pp),
    ]


# --------------------------------------------------------------------------------------------------
# Time of a step
# --------------------------------------------------------------------------------------------------


def achieved(device: Device) -> Device:
    """The device at the rates that kernels reach (cost_model.py's fractions)."""
    rates = dict(bf16=GEMM_EFFICIENCY * device.bf16, fp8=GEMM_FP8_EFFICIENCY * device.fp8)
    return replace(device, **rates, hbm=HBM_EFFICIENCY * device.hbm)


def ridge(device: Device, dtype: str = "bf16") -> float:
    """FLOPs per byte at which compute takes as long as memory (the roofline's ridge point)."""
    return (device.fp8 if dtype == "fp8" else device.bf16) / device.hbm


def critical_batch(device: Device, weights: str = "bf16", shape: Shape | None = None) -> float:
    """Tokens per step from which matmuls are compute bound: 2 FLOPs per weight and token against
    the weight's bytes (Chen, "batch sizes": 208 on A100; Austin et al., part 7: 240 on TPU v5e).
    With a shape those of its experts, E / K times as many (part 4: 3,840 for DeepSeek, int8)."""
    unused = shape.experts / shape.experts_per_token if shape and shape.experts else 1
    return ridge(device, weights) * BYTES[weights] / 2 * unused


def all_reduce(size: float, n: int, device: Device) -> float:
    """Seconds of an all-reduce of `size` bytes. Within a node the faster of one shot, each GPU
    reads all others', and two shots, reduce-scatter and all-gather (TensorRT-LLM's
    customAllReduce); between nodes a ring."""
    if n == 1 or n > device.node:
        return 2 * ring(size, n, 1, device)
    alpha, moved = device.alpha[0], (n - 1) * size / (LINK_EFFICIENCY * device.nvlink)
    return min(alpha + moved, 2 * (alpha + moved / n))


def collectives(shape: Shape, device: Device, layout: Layout, work: Work) -> dict[str, float]:
    """Seconds of a stage's collectives: two all-reduces per layer (Megatron, arXiv:1909.08053, 3),
    the experts' dispatch and combine, the hop to the next stage. A kernel's launch for each."""
    s, p, local = shape, layout, work.over(layout.ep)
    part, sent, launch = stage_layers(s, p), 2 * s.dim * local.tokens, KERNEL_OVERHEAD
    found = {}
    if p.tp > 1:
        reduce = all_reduce(sent, p.tp, device) + launch
        found["tensor parallel"] = 2 * part * s.layers * reduce
    if p.ep > 1:
        routed = sent * s.experts_per_token / p.tp
        dispatch = all_to_all(routed, p.ep, p.tp, device) + launch
        found["expert parallel"] = 2 * part * s.moe_layers * dispatch
    if p.pp > 1:
        hop = send_seconds(sent / p.tp, device, far=p.gpus > device.node)
        found["stage to stage"] = hop + launch
    return found


@dataclass(frozen=True)
class Step:
    """A stage's step: seconds by kind, whose sum is `total`, and what compute, bandwidth (HBM) and
    overhead (launches, collectives) would each take alone."""

    seconds: dict[str, float]
    compute: float
    bandwidth: float
    overhead: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def regime(self) -> str:
        """compute, bandwidth or overhead."""
        return max(("compute", "bandwidth", "overhead"), key=lambda name: getattr(self, name))


def step(shape: Shape, device: Device, layout: Layout, work: Work) -> Step:
    """One stage's step of a replica's work, on a device whose rates are all used."""
    seconds, compute, bandwidth, kernels = {}, 0.0, 0.0, 0.0
    for op in operators(shape, layout, work):
        flops = op.flops / (device.fp8 if op.dtype == "fp8" else device.bf16)
        moved = op.bytes / device.hbm
        seconds[op.name] = max(flops, moved)
        compute, bandwidth, kernels = compute + flops, bandwidth + moved, kernels + op.kernels
    launches = kernels * KERNEL_OVERHEAD
    moves = collectives(shape, device, layout, work)
    seconds |= {"launches": launches} | moves
    return Step(seconds, compute, bandwidth, launches + sum(moves.values()))


# --------------------------------------------------------------------------------------------------
# Memory
# --------------------------------------------------------------------------------------------------


def weight_bytes(shape: Shape, layout: Layout) -> float:
    """Bytes of weights on the fullest GPU. The embedding and the head are on the first and the last
    stage."""
    dense, experts = layer_parameters(shape)
    ends = parameters(shape) - dense - experts
    part, halves = stage_layers(shape, layout), 1 if layout.pp == 1 or shape.tied else 2
    layers = BYTES[layout.weights] * part * (dense + experts / layout.ep)
    return (layers + 2 * ends / halves) / layout.tp


def capacity(shape: Shape, device: Device, layout: Layout) -> int:
    """Tokens in a replica's KV cache, in what the weights leave of the model's memory; 0 if the
    weights do not fit."""
    left = device.model_memory - weight_bytes(shape, layout)
    per_token = kv_bytes_per_token(shape, layout.kv) * kv_shard(shape, layout)
    return max(0, int(left / per_token)) * layout.ep
