"""Shapes of published models, GPUs, and what their matrices, bytes and links cost.

    shape, device = SHAPES["llama3-8b"], DEVICES["h100"]
    parameters(shape), model_flops(shape, seq=8192)         # FLOPs per trained token
    ring(size, n=8, stride=1, device=device)                # seconds of an all-gather

The parts that the planner's files share: training_plan.py (a training step), serving_cost.py
(prefill and decode), datacenter.py (a run's energy, failures and network) and search.py. The
fraction of peak that hardware reaches is one short list of constants, from published single-kernel
measurements, the same for every model, device and plan. Needs: the standard library; for a
config.json also torch.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from model import ModelConfig

# Fractions of the datasheet's peak, the same for all models, devices, plans and published runs.
# bf16 matmuls on H100: 600 to 780 of 989 TFLOP/s on random data, limited by power; FP8: 1,000 of
# 1,979. The low end, as shapes are given and kernels follow each other.
GEMM_EFFICIENCY = 0.60
GEMM_FP8_EFFICIENCY = 0.50
# (forward, backward) of 989 TFLOP/s: D 128, 8k tokens, H100 (arXiv:2407.08608, figures 5 and 6)
ATTENTION_EFFICIENCY = {
    "fa2": (0.34, 0.32),  # FlashAttention-2, torch's in 2024: 333 and 318 TFLOP/s
    "fa3": (0.57, 0.54),  # FlashAttention-3 and cuDNN 9: 529 to 602 and 518 to 559
}
HBM_EFFICIENCY = 0.90  # bandwidth of elementwise kernels
LINK_EFFICIENCY = 0.80  # nccl-tests' bus bandwidth: 360 of 450 GB/s NVLink, 40 of 50 per NIC
COMM_SM_FRACTION = 0.15  # of the SMs run an overlapped transfer: NCCL takes 16 to 24 of 132
KERNEL_OVERHEAD = 8e-6  # s per matmul: launch, first loads and last wave
GIB = 2**30
MEMORY_FRACTION = 0.9  # usable part of a device's memory; measured memory is up to a fifth more
RESERVED_BYTES = 4 * GIB  # CUDA context, NCCL buffers, fragmentation


def require(ok: Any, message: str | None) -> None:
    """ValueError with the message unless ok."""
    if not ok:
        raise ValueError(message)


# --------------------------------------------------------------------------------------------------
# Models and devices
# --------------------------------------------------------------------------------------------------


class Matrix(NamedTuple):
    """A weight (k, n): a layer has `count` of them, a token uses `active_count`."""

    k: int
    n: int
    count: int = 1
    active_count: int = 1


def active_weights(matrices: Iterable[Matrix]) -> int:
    """Weights that a token uses."""
    return sum(m.k * m.n * m.active_count for m in matrices)


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer. ffn is F of dense layers; with experts, all layers except the
    first `dense_layers` are MoE layers. kv_rank > 0: multi-head latent attention (MLA), with
    head_dim = qk_nope_head_dim. gpt: LayerNorm, biases, two FFN matrices, learned positions."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    v_dim: int = 0
    qk_norm: bool = False
    gpt: bool = False
    positions: int = 0

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    def attention(self) -> list[Matrix]:
        """q, k, v and output projections; MLA: of q and of the latent, down and up, and output."""
        C, H, D = self.dim, self.heads, self.head_dim
        if not self.kv_rank:
            return [Matrix(C, H * D), *[Matrix(C, self.kv_heads * D)] * 2, Matrix(H * D, C)]
        q = [Matrix(C, self.q_rank)] if self.q_rank else []
        q += [Matrix(self.q_rank or C, H * (D + self.rope_dim))]
        kv = [Matrix(C, self.kv_rank + self.rope_dim), Matrix(self.kv_rank, H * (D + self.v_dim))]
        return [*q, *kv, Matrix(H * self.v_dim, C)]

    def feed_forward(self, moe: bool) -> list[Matrix]:
        """Gate, up and down, or in GPT's form up and down; moe: the router, then those of the
        routed and of the shared experts."""
        C, ups = self.dim, 1 if self.gpt else 2
        mlp = lambda F, *counts: [Matrix(C, F, *counts)] * ups + [Matrix(F, C, *counts)]
        if not moe:
            return mlp(self.ffn)
        routed = mlp(self.expert_ffn, self.experts, self.experts_per_token)
        shared = mlp(self.expert_ffn, self.shared_experts, self.shared_experts)
        return [Matrix(C, self.experts), *routed, *(shared if self.shared_experts else [])]

    def layer_matrices(self) -> list[tuple[int, list[Matrix]]]:
        """[(number of layers, matrices of one layer in execution order)]"""
        counts = ((self.layers - self.moe_layers, False), (self.moe_layers, True))
        return [(n, self.attention() + self.feed_forward(moe)) for n, moe in counts if n]

    def mean(self, size: Callable[[list[Matrix]], float]) -> float:
        """Mean over layers of size(matrices)."""
        return sum(n * size(matrices) for n, matrices in self.layer_matrices()) / self.layers


@cache
def parameters(shape: Shape, active: bool = False) -> int:
    """Number of parameters, or of those active per token."""
    s, C = shape, shape.dim
    with_bias = lambda m: m.k * m.n * (m.active_count if active else m.count) + s.gpt * m.n
    matrices = sum(n * sum(map(with_bias, layer)) for n, layer in s.layer_matrices())
    layer_norms = (4 if s.gpt else 2) * C + s.qk_norm * 2 * s.head_dim + s.kv_rank + s.q_rank
    ends = (1 + s.gpt) * C + s.positions * C + (1 if s.tied else 2) * C * s.vocab
    return matrices + s.layers * layer_norms + ends


@cache
def model_flops(shape: Shape, seq: int, causal: bool = True) -> float:
    """Training FLOPs per token: 6 per active weight without the embedding, and attention
    6 T H (Dqk + Dv) per layer (PaLM, arXiv:2204.02311, app. B: 12 T H D), half of it if causal."""
    weights = shape.layers * shape.mean(active_weights)
    scores = shape.layers * seq * score_width(shape)
    return 6 * (weights + shape.dim * shape.vocab) + (3 if causal else 6) * scores


@cache
def recomputed_flops(shape: Shape, seq: int, recompute: str) -> float:
    """FLOPs per token that recomputation adds; full: a forward pass without the head; selective:
    every second matmul."""
    if recompute == "full":
        return model_flops(shape, seq) / 3 - 2 * shape.dim * shape.vocab
    if recompute == "selective":
        return 2 * shape.layers * shape.mean(lambda matrices: active_weights(matrices[1::2]))
    return 0.0


def score_width(shape: Shape) -> int:
    """H (Dqk + Dv): half the forward attention FLOPs per causal pair of tokens."""
    D, v_dim = shape.head_dim + shape.rope_dim, shape.v_dim or shape.head_dim
    return shape.heads * (D + v_dim)


def _moe(experts: int, active_count: int, ffn: int, **more: Any) -> dict[str, Any]:
    return dict(experts=experts, experts_per_token=active_count, expert_ffn=ffn) | more


_MLA = dict(q_rank=1536, kv_rank=512, rope_dim=64, v_dim=128)
SHAPES = {  # layers, dim, heads, kv_heads, head_dim, ffn, vocab: as in their config.json
    "llama3.2-1b": Shape(16, 2048, 32, 8, 64, 8192, 128256, tied=True),
    "llama3-8b": Shape(32, 4096, 32, 8, 128, 14336, 128256),
    "llama3-70b": Shape(80, 8192, 64, 8, 128, 28672, 128256),
    "llama3-405b": Shape(126, 16384, 128, 8, 128, 53248, 128256),
    "llama2-7b": Shape(32, 4096, 32, 32, 128, 11008, 32000),
    "llama2-13b": Shape(40, 5120, 40, 40, 128, 13824, 32000),
    "llama2-70b": Shape(80, 8192, 64, 8, 128, 28672, 32000),
    "mistral-7b": Shape(32, 4096, 32, 8, 128, 14336, 32000),
    "mixtral-8x7b": Shape(32, 4096, 32, 8, 128, 14336, 32000, **_moe(8, 2, 14336)),
    "qwen3-30b-a3b": Shape(48, 2048, 32, 4, 128, 6144, 151936, qk_norm=True, **_moe(128, 8, 768)),
    "qwen3-235b-a22b": Shape(
        94, 4096, 64, 4, 128, 12288, 151936, qk_norm=True, **_moe(128, 8, 1536)
    ),
    "deepseek-v3": Shape(
        61, 7168, 128, 128, 128, 18432, 129280, dense_layers=3, **_MLA,
        **_moe(256, 8, 2048, shared_experts=1),
    ),
    "gpt3-175b": Shape(
        96, 12288, 96, 96, 128, 49152, 50257, tied=True, gpt=True, positions=2048
    ),
}  # fmt: skip


def load_shape(name: str) -> Shape:
    """A model of SHAPES, or a Hugging Face config.json, or the folder with one. ValueError as
    read_config's, which reads it, and for models that a Shape cannot represent."""
    if name in SHAPES:
        return SHAPES[name]
    try:
        path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
        require(path.is_file(), f"--model {name} is no file, nor one of {', '.join(SHAPES)}")
    except OSError as e:
        raise ValueError(f"--model {name}: {e.strerror}") from None
    try:
        from huggingface.weights import read_config  # the one reader of config.json; needs torch
    except ModuleNotFoundError as e:
        raise ValueError(f"--model {path}: install {e.name} to read a config.json") from None
    return config_shape(path, read_config(path))


def config_shape(path: Path, config: ModelConfig) -> Shape:
    """A ModelConfig as a Shape, without its multi-token prediction. ValueError if the model's
    parameters are not the Shape's within 1%, as with experts that differ between layers."""
    import torch

    from model import Transformer

    c, moe = replace(config, n_mtp_layers=0), bool(config.moe_layers)
    shape = Shape(
        c.n_layers, c.dim, c.n_heads, c.n_kv_heads, c.qk_nope_head_dim or c.head_dim, c.ffn_dim,
        c.vocab_size, tied=c.tie_embeddings, experts=c.n_experts * moe,
        experts_per_token=c.n_experts_per_token * moe, expert_ffn=c.expert_ffn_dim * moe,
        shared_experts=c.n_shared_experts * moe,
        dense_layers=(c.n_layers - len(c.moe_layers)) * moe, q_rank=c.q_lora_rank or 0,
        kv_rank=c.kv_lora_rank, rope_dim=c.qk_rope_head_dim, v_dim=c.v_head_dim, qk_norm=c.qk_norm,
    )  # fmt: skip
    with torch.device("meta"):
        count = sum(p.numel() for p in Transformer(c).parameters())
    ok = abs(parameters(shape) / count - 1) < 0.01
    require(ok, f"{path}: the planner does not model this {c.family}: it would count "
                f"{parameters(shape):,} of its {count:,} parameters")  # fmt: skip
    return shape


@dataclass(frozen=True)
class Device:
    """One GPU and its share of a server. Rates per second, links per direction and GPU."""

    bf16: float  # dense FLOP/s
    fp8: float  # bf16's where there is none
    memory: float  # bytes
    hbm: float  # bytes/s
    nvlink: float  # bytes/s
    watts: float  # maximum power of the server, per GPU
    node: int = 8  # GPUs in one NVLink domain
    network: float = 50e9  # bytes/s: 400 Gb/s
    alpha: tuple[float, float] = (2e-6, 5e-6)  # latency in s, within and between nodes

    @property
    def usable_memory(self) -> float:
        """Bytes that a plan may take, RESERVED_BYTES included."""
        return MEMORY_FRACTION * self.memory

    @property
    def model_memory(self) -> float:
        """Bytes that a model's weights, states and activations may take."""
        return self.usable_memory - RESERVED_BYTES


# NVIDIA's datasheets (dense rates); watts: DGX A100 6.5 kW, H100 and H200 10.2, B200 14.3, GB200
# NVL72 120 kW; PCIe: 8 cards of 350 W and the rest of an A100's server.
DEVICES = {
    "a100-40gb": Device(312e12, 312e12, 40 * GIB, 1.555e12, 300e9, 812, network=25e9),
    "a100-80gb": Device(312e12, 312e12, 80 * GIB, 2.039e12, 300e9, 812, network=25e9),
    "h100": Device(989e12, 1979e12, 80 * GIB, 3.35e12, 450e9, 1275),
    "h100-pcie": Device(756e12, 1513e12, 80 * GIB, 2.0e12, 300e9, 762, node=2),
    "h200": Device(989e12, 1979e12, 141e9, 4.8e12, 450e9, 1275),
    "b200": Device(2250e12, 4500e12, 180e9, 8e12, 900e9, 1788),
    "gb200-nvl72": Device(2500e12, 5000e12, 186e9, 8e12, 900e9, 1667, node=72),
}


def load_device(name: str) -> Device:
    """A GPU of DEVICES."""
    require(name in DEVICES, f"--device {name} is unknown; use one of {', '.join(DEVICES)}")
    return DEVICES[name]


# --------------------------------------------------------------------------------------------------
# Transfers
# --------------------------------------------------------------------------------------------------


def send_seconds(size: float, device: Device, far: bool) -> float:
    """Seconds to send `size` bytes to a GPU of the node, or if far of another one."""
    wire = device.network if far else device.nvlink
    return device.alpha[far] + size / (LINK_EFFICIENCY * wire)


def ranks_in_node(n: int, stride: int, device: Device) -> int:
    """How many of n ranks with stride `stride` share a node."""
    return min(n, max(1, device.node // stride))


def ring(size: float, n: int, stride: int, device: Device, calls: int = 1) -> float:
    """Seconds of `calls` all-gathers or reduce-scatters over n ranks with stride `stride`; size:
    unsharded bytes of all calls. Each is n - 1 steps, which send size / n bytes (Thakur et al.,
    2005, 4.1). Between nodes, rings use the NICs of all members in a node."""
    if n == 1 or size == 0:
        return 0.0
    near = ranks_in_node(n, stride, device)
    wire = device.nvlink if near == n else min(device.nvlink, near * device.network)
    return (n - 1) * (calls * device.alpha[near < n] + size / n / (LINK_EFFICIENCY * wire))


def all_to_all(size: float, n: int, stride: int, device: Device) -> float:
    """Seconds of an all-to-all of size / n bytes per pair of n ranks, over NVLink and NICs at once.
    """
    if n == 1:
        return 0.0
    near = ranks_in_node(n, stride, device)
    inside, outside = (near - 1) / n / device.nvlink, (n - near) / n / device.network
    return (n - 1) * device.alpha[near < n] + size * max(inside, outside) / LINK_EFFICIENCY


def exposed_seconds(transfer: float, compute: float) -> float:
    """Seconds that a transfer adds to the compute that it overlaps with."""
    return max(0.0, transfer - compute) + COMM_SM_FRACTION * min(transfer, compute)


def load_cluster(model: str, device: str, gpus: str) -> tuple[Shape, Device, int]:
    """--model, --device and --gpus. ValueError if one is unknown, or the nodes are not whole."""
    shape, known, n = load_shape(model), load_device(device), parse_number(gpus, "--gpus")
    ok = n <= known.node or n % known.node == 0
    whole = n // known.node * known.node
    require(ok, f"--gpus {n} is not divisible by nodes of {known.node}; use {whole}")
    return shape, known, n


def parse_number(text: str, flag: str, base: int = 1000) -> int:
    """ "16M" -> 16 base^2; k, M, B and T. ValueError, naming the flag, unless it is whole and from
    1 to 1e15."""
    power = "kmbt".find(text[-1:].lower()) + 1
    try:
        value = float(text[:-1] if power else text) * base**power
    except ValueError:
        value = 0.0
    ok = 1 <= value <= 1e15 and abs(value - round(value)) <= 1e-3 * value
    require(ok, f"{flag} {text!r:.60} is not a number such as 8192, 16M or 15.6T, from 1 on")
    return round(value)
