"""The model: Llama- and DeepSeek-style transformers in plain PyTorch, and their configuration.

This file is the reference implementation. Every other file makes one part of it faster, smaller or
larger, and is tested against it.

    tokens -> embed -> [x + attention(norm(x)), x + mlp(norm(x))] * L -> norm -> head -> logits

All model families share this structure and differ only in fields of ModelConfig:

    Llama 1-3.3   RMSNorm, rotary positions (RoFormer, arXiv:2104.09864), grouped-query attention
                  (arXiv:2305.13245), SwiGLU (arXiv:2002.05202)
    Mistral       + a sliding window (arXiv:2310.06825)
    Qwen2, 2.5    + biases on q, k, v; windows on some layers       Qwen3   + norms on q and k
    Mixtral, Qwen3-MoE     an MoE in place of the MLP, in all layers or some
    DeepSeek-V2, V3, R1    + latent attention (MLA, arXiv:2405.04434), shared experts, group-limited
                  routing, YaRN (arXiv:2309.00071), multi-token prediction (arXiv:2412.19437)
    sheaf         what no family above has: ALiBi, cosine attention, convolved q and k, block-sparse
                  layers, cross attention, a number of experts per layer

There are two attention modules (`Attention`, `LatentAttention`) and two feed-forward modules
(`MLP`, `MoE`). The family only decides the names of config.json fields and of checkpoint tensors.

Hooks for the other files, all visible at the call site:

    attend(spec, q, k, v, positions) -> o
        owns the KV cache, the mask and the kernel. The model passes the q, k and v of the new
        tokens, after RoPE.
    positions
        the positions of the tokens, always an argument: chunked prefill, packed sequences and
        token trees need no change here.
    attend.qk_history
        optional, an attribute of the attend callable or of the object whose method it is: the q
        and k of earlier tokens, for qk_conv. Without it, rows must start at position 0.
    return_hidden
        return the final hidden states instead of logits.
    source, CrossAttention.attend
        keys and values of another sequence (Transformer.source_kv), and what attends to them.
    linear_fn
        of Attention and MLP: applies several linear layers to one input. Tensor parallelism
        replaces it to overlap the all-gather of the input with the matmuls.
    MoE.experts
        runs tokens through their experts; by default a plain loop.
    MoE.observe, is_padding
        sees router logits and expert ids, for load balancing; ids of -1 of tokens that forward's
        argument is_padding says are padding.
    MoE.local_expert_ids, Transformer.tp_shards
        the experts, and the shards of other tensors, that this process has under expert or tensor
        parallelism.

A pipeline stage is this model with some layers dropped and `embed`, `norm` or `head` set to None.
Needs: torch.

Shapes: B batch, T new tokens, S keys (cached + new), Hq / Hkv query / key-value heads, D / Dv head
dims, C model width, F feed-forward width, V vocabulary, E experts, K experts per token, N = B * T,
L layers. Attention tensors are (B, T, H, D).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

log = logging.getLogger(__name__)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --------------------------------------------------------------------------------------------------
# Configuration
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelConfig:
    """The model's hyperparameters. The defaults are Llama's."""

    vocab_size: int
    dim: int  # C
    n_layers: int  # L
    n_heads: int  # Hq
    n_kv_heads: int  # Hkv, divides Hq
    head_dim: int  # D, need not be C / Hq
    ffn_dim: int  # F
    max_seq_len: int = 2048  # the context the weights were trained for
    norm_eps: float = 1e-6
    tie_embeddings: bool = False  # head.weight is embed.weight
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()  # generation stops at any of them
    family: str = "llama"  # key of FAMILIES: names of config.json fields and checkpoint tensors

    # positions
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None  # {"rope_type": ..., its ROPE_TYPES fields}
    rotary_dim: int | None = None  # rotate the first rotary_dim of the D dims (None: all)
    rope_interleaved: bool = False  # rotate pairs (0, 1), (2, 3), ... not (i, i + D/2)
    alibi: bool = False  # no rotation; a bias linear in the distance (arXiv:2108.12409)

    # attention and feed-forward
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over D on q and k, before RoPE
    qk_cosine: bool = False  # cosine attention: q / |q| . k / |k| times a learned factor per head
    windows: tuple[int | None, ...] = ()  # per layer: sliding window or None; (): no windows
    qk_conv: int = 0  # width of a causal depthwise convolution of q and k, before RoPE; 0: none
    sparse_layers: tuple[int, ...] = ()  # indices of the layers with block-sparse attention
    sparse_blocks: tuple[int, ...] = (64, 3, 1, 0)  # the SparseBlocks of those layers
    cross_attention_layers: tuple[int, ...] = ()  # indices of the layers with a CrossAttention

    # MLA, if kv_lora_rank > 0; then D = qk_nope_head_dim + qk_rope_head_dim
    kv_lora_rank: int = 0
    q_lora_rank: int | None = None  # None: one q_proj, no low-rank factors
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    # mixture of experts
    moe_layers: tuple[int, ...] = ()  # indices of the layers that have an MoE
    n_experts: int = 0  # E
    layer_experts: tuple[int, ...] = ()  # E of each of the moe_layers, at most n_experts; (): equal
    n_experts_per_token: int = 0  # K
    expert_ffn_dim: int = 0
    n_shared_experts: int = 0  # one MLP, n_shared_experts times as wide as an expert
    scoring: str = "softmax"  # of the router logits; or "sigmoid"
    correction_bias: bool = False  # MoE.expert_bias: added for selection, not in the weights
    n_groups: int = 1  # group-limited routing: select from topk_groups of n_groups groups
    topk_groups: int = 1
    group_score_topk: int = 1  # a group's score: the sum of its group_score_topk best scores
    norm_topk: bool = False  # normalize the K weights to sum 1
    routed_scaling: float = 1.0  # multiplies the K weights
    n_mtp_layers: int = 0

    def __post_init__(self):
        _check(self.family in FAMILIES, f"family is {self.family!r}; known: {', '.join(FAMILIES)}")
        for name in self._positive_fields():
            value = getattr(self, name)
            _check(value > 0, f"{self._hf_name(name)} must be positive, not {value}")
        for name in ("norm_eps", "n_shared_experts", "n_mtp_layers"):
            value = getattr(self, name)
            _check(value >= 0, f"{self._hf_name(name)} must not be negative, not {value}")
        for name in ("moe_layers", "sparse_layers", "cross_attention_layers"):
            ok = all(0 <= i < self.n_layers for i in getattr(self, name))
            _check(ok, f"{name} must be from 0 to {self.n_layers - 1}")
        self._check_attention()
        self._check_rope()
        self._check_experts()

    def _positive_fields(self) -> list[str]:
        names = "vocab_size dim n_layers n_heads n_kv_heads head_dim ffn_dim max_seq_len rope_theta"
        if self.kv_lora_rank:
            names += " kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
            names += "" if self.q_lora_rank is None else " q_lora_rank"
        if self.moe_layers:
            names += " n_experts n_experts_per_token expert_ffn_dim"
        return names.split()

    def _check_attention(self) -> None:
        kv_heads = f"{self._hf_name('n_kv_heads')} ({self.n_kv_heads})"
        heads = f"{self._hf_name('n_heads')} ({self.n_heads})"
        if self.kv_lora_rank:
            ok = self.n_kv_heads == self.n_heads
            _check(ok, f"{kv_heads} must be {heads}: MLA has no query groups")
            for name in ("alibi", "qk_norm", "qk_cosine", "rotary_dim", "qk_conv"):
                ok = getattr(self, name) in (False, None)
                _check(ok, f"kv_lora_rank cannot be combined with {name}")
        _check(self.n_heads % self.n_kv_heads == 0, f"{kv_heads} must divide {heads}")
        ok = not (self.qk_cosine and self.qk_norm)
        _check(ok, "qk_cosine cannot be combined with qk_norm: both normalize q and k")
        windows, blocks = self.windows, self.sparse_blocks
        ok = len(windows) in (0, self.n_layers) and all(w is None or w >= 1 for w in windows)
        _check(ok, "sliding_window (windows) must be 1 or more, or null, for each layer")
        ok = self.qk_conv == 0 or self.qk_conv >= 2
        _check(ok, f"qk_conv must be 0, or a width of 2 or more, not {self.qk_conv}")
        ok = len(blocks) == 4 and min(blocks[:2]) >= 1 and min(blocks[2:]) >= 0
        _check(ok, f"sparse_blocks must be at least (1, 1, 0, 0), not {blocks}")

    def _check_rope(self) -> None:
        D, rope = self.rope_dim, self.rope_scaling
        name = "head_dim" if self.rotary_dim is None else "rotary_dim"
        name = "qk_rope_head_dim" if self.kv_lora_rank else name
        ok = D % 2 == 0 and 0 < D <= self.head_dim
        limit = "positive" if name == "head_dim" else f"from 2 to {self.head_dim}"
        wanted = f"even (RoPE rotates pairs) and {limit}"
        _check(ok, f"{name} must be {wanted}, not {D}")
        if rope is None:
            return
        kind = rope.get("rope_type")
        required, _ = ROPE_TYPES.get(kind, (None, None))
        ok = bool(required) and set(required) <= set(rope)
        _check(ok, f"rope_scaling is {dict(rope)}; known: a rope_type and its fields")
        ok = kind != "llama3" or rope["low_freq_factor"] < rope["high_freq_factor"]
        _check(ok, "low_freq_factor must be less than high_freq_factor")
        ok = (kind != "dynamic" or D >= 4) and (kind != "yarn" or self.rope_theta > 1)
        _check(ok, f"rope_type {kind!r} needs rope_theta > 1 and 4 or more rotated dims")

    def _check_experts(self) -> None:
        counts, n_layers = self.layer_experts, len(self.moe_layers)
        _check(
            not counts
            or len(counts) == n_layers
            and all(type(n) is int and n > 0 for n in counts)
            and max(counts) == self.n_experts,
            f"layer_experts must be one positive number for each of the {n_layers} moe_layers, and "
            f"n_experts ({self.n_experts}) the largest, not {counts}",
        )
        if self.moe_layers:
            ok = self.scoring in ("softmax", "sigmoid")
            _check(ok, f"scoring is {self.scoring!r}; known: 'softmax', 'sigmoid'")
            for E in counts or (self.n_experts,):
                self._check_routing(E)

    def _check_routing(self, E: int) -> None:
        """Whether K of E experts can be selected within the best groups."""
        K, G, topk_groups = self.n_experts_per_token, self.n_groups, self.topk_groups
        _check(
            G >= 1 and E % G == 0 and 1 <= topk_groups <= G,
            f"{self._hf_name('n_groups')} ({G}) must divide {self._hf_name('n_experts')} ({E}), "
            f"and {self._hf_name('topk_groups')} ({topk_groups}) must be from 1 to {G}",
        )
        size, name = E // G, self._hf_name("n_experts_per_token")
        ok = K <= size * topk_groups
        _check(ok, f"{name} ({K}) is more than the {size * topk_groups} experts to select from")
        best = self.group_score_topk
        ok = best <= size
        _check(ok, f"group_score_topk ({best}) is more than the {size} experts of a group")

    def _hf_name(self, name: str) -> str:
        """The field's name and its name in config.json, for error messages."""
        key = FAMILIES[self.family].fields.get(name, name)
        return name if key == name else f"{name} ({key} in config.json)"

    @property
    def rope_dim(self) -> int:
        """Number of rotated dims per head."""
        if self.kv_lora_rank:
            return self.qk_rope_head_dim
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def window(self, index: int) -> int | None:
        """Sliding window of layer `index`; None: full attention."""
        return self.windows[index] if index < len(self.windows) else None

    def experts_of(self, index: int) -> int:
        """E of MoE layer `index`; MTP layers, from n_layers on, are like the last layer."""
        at = self.moe_layers.index(min(index, self.n_layers - 1))
        return self.layer_experts[at] if self.layer_experts else self.n_experts

    def sparse(self, index: int) -> SparseBlocks | None:
        """Block-sparse pattern of layer `index`; None: full attention."""
        return SparseBlocks(*self.sparse_blocks) if index in self.sparse_layers else None

    @property
    def contiguous_only(self) -> str:
        """The option, if any, that paged KV, draft trees and context parallelism lack, else ""."""
        options = ("qk_conv", "sparse_layers", "cross_attention_layers")
        return next((name for name in options if getattr(self, name)), "")

    @property
    def has_dynamic_rope(self) -> bool:
        """Dynamic NTK: keys depend on the number of tokens in a forward call."""
        return (self.rope_scaling or {}).get("rope_type") == "dynamic"

    @property
    def context(self) -> int:
        """Maximum sequence length: max_seq_len, or what dynamic NTK or YaRN extend it to."""
        rope = self.rope_scaling or {}
        original = {
            "dynamic": self.max_seq_len,
            "yarn": rope.get("original_max_position_embeddings", 0),
        }.get(rope.get("rope_type"), 0)
        return max(self.max_seq_len, int(original * rope.get("factor", 1)))

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Build from a parsed Hugging Face config.json. ValueError names the field."""
        kind = hf.get("model_type")
        kind = ALIASES.get(kind, kind) if isinstance(kind, str) else None
        if kind not in FAMILIES:
            what, text = f"{hf.get('model_type')!r:.60}", hf.get("text_config")
            if isinstance(text, dict):
                what += f", whose text_config ({text.get('model_type')!r:.60}) is not read"
            raise ValueError(f"model_type is {what}; known: {', '.join(FAMILIES)}")
        family = FAMILIES[kind]
        _check_fields(hf, family)
        given: dict[str, Any] = {"family": kind, **family.overrides}
        for name, key in family.fields.items():
            given[name] = _typed(hf, key, _scalar_type(name), family.defaults.get(key, REQUIRED))
        for converter in family.converters:
            given |= converter.read(hf, given)
        return cls(**given)

    def to_hf(self) -> dict[str, Any]:
        """The equivalent config.json, readable by transformers 4 and 5. ValueError if the family's
        config.json cannot represent this config."""
        family = FAMILIES[self.family]
        hf: dict[str, Any] = {"architectures": [family.architecture], "model_type": self.family}
        hf |= family.constants
        hf |= {key: getattr(self, name) for name, key in family.fields.items()}
        for converter in family.converters:
            hf |= converter.write(self)
        back = ModelConfig.from_hf(hf)
        lost = [n for n in self.__dataclass_fields__ if getattr(back, n) != getattr(self, n)]
        _check(
            not lost,
            f"a {self.family} config.json cannot represent the values of {', '.join(lost)}; "
            "use family='sheaf', which can represent any config",
        )
        return hf


# --------------------------------------------------------------------------------------------------
# Positions
# --------------------------------------------------------------------------------------------------


def rope_frequencies(config: ModelConfig, positions: Tensor) -> Tensor:
    """Frequencies of RoPE's rotated pairs, (rope_dim / 2,) fp32: theta ** (-2i / D), scaled.

    linear: divided by `factor` (position interpolation, arXiv:2306.15595). dynamic: theta grows
    with the largest position once it exceeds max_seq_len (NTK-aware). llama3: frequencies whose
    wavelength exceeds the training context are divided by `factor`, high frequencies are kept,
    those between are interpolated. yarn: the same with a ramp over dimensions ("NTK by parts",
    arXiv:2309.00071, 3.2).
    """
    D, rope = config.rope_dim, config.rope_scaling
    theta, kind, device = config.rope_theta, rope and rope["rope_type"], positions.device
    if kind == "dynamic":
        length = (positions.max() + 1).clamp(min=config.max_seq_len)
        stretch = length.float() / config.max_seq_len
        theta = theta * (rope["factor"] * stretch - (rope["factor"] - 1)) ** (D / (D - 2))
    freq = theta ** (-torch.arange(0, D, 2, dtype=torch.float32, device=device) / D)
    if kind in (None, "dynamic"):
        return freq
    if kind == "linear":
        return freq / rope["factor"]
    original = rope["original_max_position_embeddings"]
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = original * freq / (2 * math.pi)  # rotations within the training context
        keep = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        low, high = (  # dimensions with beta_fast and beta_slow rotations in the training context
            D * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))
            for turns in (rope.get("beta_fast", 32), rope.get("beta_slow", 1))
        )
        if rope.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, D - 1)
        ramp = torch.arange(D // 2, dtype=torch.float32, device=device) - low
        keep = 1 - (ramp / (high - low if high != low else 0.001)).clamp(0, 1)
    return keep * freq + (1 - keep) * freq / rope["factor"]


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention temperature scaling (arXiv:2309.00071, 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def rope_magnitude(config: ModelConfig) -> float:
    """The scale of cos and sin: 1 except with YaRN."""
    rope = config.rope_scaling or {}
    if rope.get("rope_type") != "yarn" or "attention_factor" in rope:
        return rope.get("attention_factor", 1.0)
    if "mscale" in rope and "mscale_all_dim" in rope:
        over, under = (yarn_mscale(rope["factor"], rope[m]) for m in ("mscale", "mscale_all_dim"))
        return over / under
    return yarn_mscale(rope["factor"])


Rope = tuple[Tensor, Tensor]  # cos and sin of every angle, (B or 1, T, 1, rope_dim / 2) fp32


def rope_cos_sin(config: ModelConfig, positions: Tensor) -> Rope:
    """cos and sin for positions (T,) or (B, T).

    Recomputed in each forward, which is cheap. A precomputed buffer would be rounded by a cast to
    bf16, lost on the meta device and limited to a maximum length.
    """
    angles = positions[..., None].float() * rope_frequencies(config, positions)
    angles = angles.view(-1, *angles.shape[-2:])[:, :, None]  # (B or 1, T, 1, rope_dim / 2)
    size = rope_magnitude(config)
    return angles.cos() * size, angles.sin() * size


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate pairs of the first 2n dims of x (B, T, H, D) by their n angles, in fp32: (x_i,
    x_{i+n}), or interleaved (x_2i, x_2i+1)."""
    n = cos.shape[-1]
    rotated, rest = x[..., : 2 * n].float(), x[..., 2 * n :]
    a, b = rotated.unflatten(-1, (n, 2)).unbind(-1) if interleaved else rotated.chunk(2, dim=-1)
    pair = a * cos - b * sin, b * cos + a * sin
    rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    rotated = rotated.type_as(x)
    return rotated if rest.shape[-1] == 0 else torch.cat((rotated, rest), dim=-1)


def alibi_slopes(n_heads: int, device: torch.device | None = None) -> Tensor:
    """ALiBi slopes (Hq,) fp32: 2 ** (-8h / H), h = 1..H, for H a power of two. Otherwise those of
    the largest power of two P below H, then every other slope of the series for 2P
    (arXiv:2108.12409, 3, and its code)."""
    h = torch.arange(n_heads, dtype=torch.float32, device=device)
    power = 2 ** math.floor(math.log2(n_heads))
    steps = torch.where(h < power, 2 * (h + 1), 2 * (h - power) + 1)
    return 2 ** (-4 * steps / power)


# --------------------------------------------------------------------------------------------------
# The attend hook and its default
# --------------------------------------------------------------------------------------------------


class SparseBlocks(NamedTuple):
    """Block-sparse causal attention: queries of block a attend to keys of block b if a - b < local,
    if b < global_, or if stride divides a - b (Sparse Transformers, arXiv:1904.10509; BigBird,
    arXiv:2007.14062)."""

    block_size: int  # positions; attention.py's kernels take powers of two from 16 on
    local: int
    global_: int
    stride: int  # 0: none

    def mask(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether positions i (..., T) may attend to positions j (..., S): (..., T, S) bool."""
        a, b = i[..., None] // self.block_size, j[..., None, :] // self.block_size
        mask = (a - b < self.local) | (b < self.global_)
        return mask | ((a - b) % self.stride == 0) if self.stride else mask


@dataclass(frozen=True)
class AttentionSpec:
    """A layer's constants, passed to `attend`.

    MLA calls `attend` in one of two forms; both are plain attention over the given q, k, v.
    Absorbed: k is the latent, one head of latent_dim + rope dims, and v a view of its first
    latent_dim columns; a cache stores k alone. Expanded: k and v have all heads, but a cache stores
    `latent` (B, T, 1, R) and expands cached latents with k, v = expand(latent).
    """

    index: int  # layer index
    scale: float  # multiplies q . k
    window: int | None = None
    sparse: SparseBlocks | None = None
    causal: bool = True  # False: no mask (cross attention)
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    latent_dim: int | None = None
    latent: Tensor | None = None
    expand: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None


Attend = Callable[[AttentionSpec, Tensor, Tensor, Tensor, Tensor], Tensor]


def causal_attention(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, positions: Tensor
) -> Tensor:
    """Causal attention over the new tokens alone: the default `attend`, without a KV cache.

    q (B, T, Hq, D), k (B, T, Hkv, D), v (B, T, Hkv, Dv) -> (B, T, Hq, Dv). The mask follows the
    order of the tokens; positions are used by RoPE only. Without spec.causal there is no mask.
    """
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if any(x is not None for x in (spec.window, spec.sparse, spec.alibi_slopes)):
        order = torch.arange(q.shape[1], device=q.device)
        return dense_attention(spec, q, k, v, order, order)
    assert spec.softcap is None and spec.sinks is None, "no family here has softcap or sinks"
    o = _grouped_sdpa(q.transpose(1, 2), k, v, spec.scale, causal=spec.causal)
    return o.transpose(1, 2)


def packed_attention(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, positions: Tensor
) -> Tensor:
    """causal_attention for packed documents: a document starts wherever positions (B, T) is 0 and
    does not attend to earlier ones."""
    ok = spec.sparse is None
    _check(ok, "packed rows do not support sparse_layers: use a row per document")
    T = q.shape[1]
    # offset each document's positions by T: the window, at most T, cannot reach an earlier one
    shifted = torch.arange(T, device=q.device) + T * (positions == 0).cumsum(-1)
    spec = replace(spec, window=min(spec.window or T, T))
    return dense_attention(spec, q, k.transpose(1, 2), v.transpose(1, 2), shifted, shifted)


def dense_attention(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor
) -> Tensor:
    """Attention of queries at positions i (T,) or (B, T) to keys at positions j (S,) or (B, S).

    q (B, T, Hq, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv) -> (B, T, Hq, Dv). A query attends to keys
    with 0 <= i - j < window; ALiBi subtracts slope * (i - j) from the score.
    """
    assert spec.softcap is None and spec.sinks is None, "no family here has softcap or sinks"
    B, T, Hq, D = q.shape
    Hkv = k.shape[1]
    distance = (i[..., None] - j[..., None, :]).view(-1, 1, T, k.shape[2])  # (B?, 1, T, S)
    mask = distance >= 0
    if spec.window is not None:
        mask = mask & (distance < spec.window)
    if spec.sparse is not None:
        mask = mask & spec.sparse.mask(i, j).view(-1, 1, T, k.shape[2])
    if spec.alibi_slopes is not None:
        bias = -spec.alibi_slopes[:, None, None] * distance
        mask = bias.masked_fill(~mask, -math.inf).to(q.dtype)  # (B?, Hq, T, S)
    if T == 1:
        # Decode: fold the heads of each GQA group into the query length, to read each key once.
        if mask.shape[1] > 1:
            mask = mask.reshape(-1, Hkv, Hq // Hkv, k.shape[2])
        q = q.reshape(B, Hkv, Hq // Hkv, D)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale)
        return o.reshape(B, 1, Hq, -1)
    return _grouped_sdpa(q.transpose(1, 2), k, v, spec.scale, mask).transpose(1, 2)


def _grouped_sdpa(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """scaled_dot_product_attention of q (B, Hq, T, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv).

    k and v are repeated Hq / Hkv times where torch would use its unfused backend, which keeps all
    scores (B, Hq, T, S) for backward: on CUDA, for grouped heads in fp32 or with a mask, except
    where torch prefers cuDNN (Hopper, Blackwell). The memory-efficient backend takes repeated ones.
    """
    groups, grouped = q.shape[1] // k.shape[1], True
    if groups > 1 and q.is_cuda:
        if torch.compiler.is_compiling():  # the choice of a backend cannot be traced
            grouped = mask is None and q.dtype != torch.float32
        else:
            choice = torch._fused_sdp_choice(q, k, v, mask, 0.0, causal, enable_gqa=True)
            grouped = choice != torch.nn.attention.SDPBackend.MATH.value
    if not grouped:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


class KVCache:
    """KV cache of B sequences in static tensors; slot index = position.

        cache = KVCache(config, 1, 512, dtype, device)
        model(prompt, torch.arange(T), cache.attend)          # prefill, whole or in chunks
        model(token, torch.tensor([T]), cache.attend)         # decode

    New tokens are written at their positions, and a query at position i attends to slots j <= i.
    Slots of rejected tokens are overwritten before any query can attend to them, so `truncate`
    only lowers `end`, a device tensor. No step depends on a Python value and shapes are static, so
    a step compiles once and can be replayed as a CUDA graph.

    Memory: 2 * L * B * Hkv * max_len * D elements; with MLA L * B * max_len *
    (kv_lora_rank + qk_rope_head_dim), no values. L includes the MTP layers, which have their own
    tensors and do not change `length`. attend reads all max_len slots unless given a limit:
    `functools.partial(cache.attend, limit=n)`, with n > every position.

    With `rollback`, a layer with a sliding window W has a ring buffer of W + rollback slots, slot =
    position % slots (Mistral 7B, arXiv:2310.06825, section 2): its memory does not grow with
    max_len. truncate may then drop at most `rollback` tokens, and `update` and `move` cannot be
    used. With qk_conv K a layer also keeps q and k of K - 1 + rollback (None: max_len) tokens.
    """

    def __init__(
        self, config: ModelConfig, batch_size: int, max_len: int,
        dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
        rollback: int | None = None,
    ):  # fmt: skip
        layers = config.n_layers + config.n_mtp_layers
        heads, dim = config.n_kv_heads, config.head_dim
        if config.kv_lora_rank:
            heads, dim = 1, config.kv_lora_rank + config.qk_rope_head_dim
        slots = [max_len] * layers
        if rollback is not None and not config.kv_lora_rank:
            windows = map(config.window, range(layers))
            slots = [min(max_len, w + rollback) if w else max_len for w in windows]
        self.max_len = max_len
        new = lambda n: torch.zeros(batch_size, heads, n, dim, dtype=dtype, device=device)
        self.k = [new(n) for n in slots]
        self.v = [] if config.kv_lora_rank else [torch.zeros_like(k) for k in self.k]
        slots = max_len if rollback is None else min(max_len, config.qk_conv - 1 + rollback)
        heads = config.n_heads + config.n_kv_heads
        self.qk = [new(slots) for _ in self.k] if config.qk_conv else []  # before convolution
        self.n_layers = config.n_layers  # MTP layers come after these
        self.end = torch.zeros((), dtype=torch.long, device=device)  # a tensor: no sync per step

    @property
    def length(self) -> int:
        """Number of slots in use: the last position written + 1."""
        return int(self.end)

    def truncate(self, n: int) -> None:
        """Drop the tokens at positions >= n."""
        self.end.clamp_(max=n)

    def move(self, slots: Tensor, positions: Tensor) -> None:
        """Copy keys and values from slots (B, n) to positions (B, n): compacts the accepted path of
        a draft tree."""
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        for t in (*self.k, *self.v):
            t[rows, :, positions] = t[rows, :, slots]

    def bytes_read(self, limit: int | None = None) -> int:
        """Bytes that one decode step reads from the cache."""
        used = (*self.k[: self.n_layers], *self.v[: self.n_layers])
        return sum(t[:, :, :limit].numel() * t.element_size() for t in used)

    def update(
        self, spec: AttentionSpec, k: Tensor, v: Tensor, positions: Tensor, limit: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Store the new k and v (B, T, Hkv, D) at positions (T,) or (B, T). Returns all keys and
        values up to `limit`, (B, S, Hkv, D) in k's dtype, slot index = position. A single row of
        new tokens is written to all rows of the cache (a shared prompt).

        With expanded MLA, if the new tokens fill the whole `limit`, the given k and v are returned
        as they are, in their order, instead of being expanded again.
        """
        slots = self.k[spec.index]  # (B, Hkv, S, D)
        assert slots.shape[2] == self.max_len, "a ring buffer has no slot for each position"
        _write(slots, positions, k if spec.latent is None else spec.latent)
        if spec.index < self.n_layers:
            self.end.copy_(positions.max() + 1)
        if spec.expand is not None and limit == k.shape[1] and positions.dim() == 1:
            return k, v
        keys = slots[: len(k), :, :limit].to(k.dtype).transpose(1, 2)
        if spec.latent_dim is not None:
            return keys, keys[..., : spec.latent_dim]
        if spec.expand is not None:
            return spec.expand(keys)
        slots = self.v[spec.index]
        _write(slots, positions, v)
        return keys, slots[: len(k), :, :limit].to(k.dtype).transpose(1, 2)

    def attend(
        self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, positions: Tensor,
        limit: int | None = None,
    ) -> Tensor:  # fmt: skip
        """The attend hook: attention of q (B, T, Hq, D) over the keys and values of `update`."""
        if self.k[spec.index].shape[2] < self.max_len:
            return self._attend_to_ring(spec, q, k, v, positions, limit)
        keys, values = self.update(spec, k, v, positions, limit)
        # keys returned as given are at `positions`, in any order; otherwise slot j is position j
        j = positions if keys is k else torch.arange(keys.shape[1], device=q.device)
        return dense_attention(spec, q, keys.transpose(1, 2), values.transpose(1, 2), positions, j)

    def _attend_to_ring(
        self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, positions: Tensor,
        limit: int | None,
    ) -> Tensor:  # fmt: skip
        """attend for a layer with a ring buffer; the positions of a row are consecutive."""
        rings = self.k[spec.index], self.v[spec.index]
        (T, R), new = (k.shape[1], rings[0].shape[2]), (k, v)
        read = lambda: [ring[: len(k), :, :limit].to(k.dtype) for ring in rings]
        write = lambda: [_write(r, positions[..., -R:] % R, x[:, -R:]) for r, x in zip(rings, new)]
        if T <= R - spec.window + 1:  # writing first overwrites only keys outside every window
            write()
            keys, values = read()
            j = self._ring_positions(R, keys.shape[2], positions[..., -1:])
        else:
            cached, added = read(), (k.transpose(1, 2), v.transpose(1, 2))
            keys, values = (torch.cat(pair, dim=2) for pair in zip(cached, added))
            j = self._ring_positions(R, cached[0].shape[2], positions[..., :1] - 1)
            j = torch.cat((j, positions), dim=-1)
            write()
        if spec.index < self.n_layers:
            self.end.copy_(positions.max() + 1)
        return dense_attention(spec, q, keys, values, positions, j)

    def qk_history(self, index: int, qk: Tensor, positions: Tensor, n: int) -> Tensor:
        """Store a layer's q and k before convolution, qk (B, T, Hq + Hkv, D), at consecutive
        positions. Returns those of the n tokens before and qk, (B, n + T, Hq + Hkv, D)."""
        ring = self.qk[index]
        R, rows = ring.shape[2], torch.arange(len(qk), device=qk.device)[:, None]
        before = positions[..., :1] - torch.arange(n, 0, -1, device=qk.device)
        history = torch.cat((ring[rows, :, before % R].to(qk.dtype), qk), dim=1)
        _write(ring, positions[..., -R:] % R, qk[:, -R:])
        return history

    @staticmethod
    def _ring_positions(R: int, n: int, last: Tensor) -> Tensor:
        """Position stored in each of the first n slots of a ring of R, (..., n), when `last`
        (..., 1) is the newest. Slots not written yet get 2**40, which no query attends to."""
        j = last - (last - torch.arange(n, device=last.device)) % R
        return j.where(j >= 0, 1 << 40)


def qk_history(attend: Attend) -> Callable[..., Tensor] | None:
    """attend.qk_history, or that of the object whose method, or a partial of it, attend is."""
    method = attend.func if isinstance(attend, partial) else attend
    # not getattr(method, "__self__", method), which torch.compile takes to be the default
    owner = method.__self__ if isinstance(method, MethodType) else method
    return getattr(owner, "qk_history", None)


def _write(slots: Tensor, positions: Tensor, new: Tensor) -> None:
    """slots (B, Hkv, S, D) at positions (T,) or (B, T) = new (B, T, Hkv, D)."""
    new = new.to(slots.dtype)
    if positions.dim() == 1:
        slots[:, :, positions] = new.transpose(1, 2)
    else:
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        slots[rows, :, positions] = new


# --------------------------------------------------------------------------------------------------
# Attention
# --------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """x / rms(x) * weight (arXiv:1910.07467), with the mean of squares in fp32."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.type_as(x)


LinearFn = Callable[..., Sequence[Tensor]]


def apply_linears(x: Tensor, *linears: nn.Module) -> list[Tensor]:
    """Default linear_fn: [linear(x) for each layer], x (B, T, C)."""
    return [linear(x) for linear in linears]


class Attention(nn.Module):
    """Grouped-query attention. The number of heads follows from the width of the projections, so
    tensor parallelism only has to shard their weights."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        C, D, bias = config.dim, config.head_dim, config.qkv_bias
        self.spec = AttentionSpec(index, D**-0.5, config.window(index), config.sparse(index))
        self.head_dim, self.interleaved = D, config.rope_interleaved
        self.alibi_heads = config.n_heads if config.alibi else 0
        self.first_head = 0  # index of this process's first query head (tensor parallelism)
        self.linear_fn: LinearFn = apply_linears
        self.q_proj = nn.Linear(C, config.n_heads * D, bias)
        self.k_proj = nn.Linear(C, config.n_kv_heads * D, bias)
        self.v_proj = nn.Linear(C, config.n_kv_heads * D, bias)
        self.o_proj = nn.Linear(config.n_heads * D, C, config.o_bias)
        self.q_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else None
        self.temperature = None
        if config.qk_cosine:  # logits from -10 to 10 at first (Swin V2, arXiv:2111.09883, 3.3)
            self.temperature = nn.Parameter(torch.ones(config.n_heads))
            self.spec = replace(self.spec, scale=10.0)
        self.q_conv = self.k_conv = None
        if config.qk_conv:  # (H, D, K) as vectors: optimizers treat matrices as maps
            self.q_conv = nn.Parameter(torch.empty(config.n_heads * D * config.qk_conv))
            self.k_conv = nn.Parameter(torch.empty(config.n_kv_heads * D * config.qk_conv))

    def forward(self, x: Tensor, rope: Rope, positions: Tensor, attend: Attend) -> Tensor:
        projected = self.linear_fn(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in projected)
        if self.q_conv is not None:
            q, k = self._convolve(q, k, positions, attend)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.temperature is not None:
            q, k = (F.normalize(t.float(), dim=-1).type_as(t) for t in (q, k))
            q = q * self.temperature[:, None]
        spec = self.spec
        if self.alibi_heads:
            slopes = alibi_slopes(self.alibi_heads, x.device)
            local_heads = slice(self.first_head, self.first_head + q.shape[2])
            spec = replace(spec, alibi_slopes=slopes[local_heads])
        else:
            q, k = (apply_rope(t, *rope, self.interleaved) for t in (q, k))
        return self.o_proj(attend(spec, q, k, v, positions).flatten(2))

    def _convolve(
        self, q: Tensor, k: Tensor, positions: Tensor, attend: Attend
    ) -> tuple[Tensor, ...]:
        """Causal depthwise convolution of q and k over the sequence, K weights per head and dim
        (Primer's multi-DConv-head attention, arXiv:2109.08668, 3, which also convolves v)."""
        T, qk, weight = q.shape[1], torch.cat((q, k), 2), torch.cat((self.q_conv, self.k_conv))
        weight = weight.view(qk.shape[2], self.head_dim, -1)  # the last of K is the token's own
        before, history = weight.shape[-1] - 1, qk_history(attend)
        if history is None:
            qk = F.pad(qk, (0, 0, 0, 0, before, 0))
        else:
            qk = history(self.spec.index, qk, positions, before)
        out = 0.0
        for d in range(before + 1):  # the token d before, if the sequence has one
            exists = (positions >= d)[..., None, None]
            out = out + qk[:, before - d :][:, :T] * exists * weight[..., before - d]
        return out.type_as(q).split((q.shape[2], k.shape[2]), dim=2)


class CrossAttention(Attention):
    """Attention to another sequence, the source, without mask and RoPE (Attention Is All You Need,
    arXiv:1706.03762, 3.2.3). Its keys and values are computed once, for all steps. `attend` may be
    replaced by attention.py's as_attend()."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(replace(config, qk_norm=False, qk_cosine=False, qk_conv=0), index)
        self.spec = AttentionSpec(index, self.head_dim**-0.5, causal=False)
        self.attend: Attend = causal_attention

    def source_kv(self, source: Tensor) -> list[Tensor]:
        """source (B, S, C) -> k, v (B, S, Hkv, D)."""
        projected = self.linear_fn(source, self.k_proj, self.v_proj)
        return [t.unflatten(-1, (-1, self.head_dim)) for t in projected]

    def forward(self, x: Tensor, kv: Sequence[Tensor], positions: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        return self.o_proj(self.attend(self.spec, q, *kv, positions).flatten(2))


class LatentAttention(nn.Module):
    """MLA (DeepSeek-V2, arXiv:2405.04434, 2.1): keys and values of all heads are projected from one
    latent of kv_lora_rank dims, plus rope dims shared by all heads; only these are cached.

    Expanded: k = [W_k latent, rope] and v = W_v latent per head. Fewer dims per score; used in
    prefill and training. Absorbed: W_k is applied to the query and W_v to the attention output,

        q . W_k c = (W_k^T q) . c          sum_j p_j W_v c_j = W_v (sum_j p_j c_j)

    so attention reads the cached latents without expanding them; used in decode. With T queries
    over a long context, absorbed takes fewer operations while T < R (Dk + Dv) / (2R - Dk - Dv), 170
    in DeepSeek-V3 (R = kv_lora_rank, Dk = qk_nope_head_dim, Dv = v_head_dim). Steps of at most
    `absorb_up_to` tokens, by default 1, use the absorbed form.
    """

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        C, H, R = config.dim, config.n_heads, config.kv_lora_rank
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.v_dim, self.rank, self.interleaved = config.v_head_dim, R, config.rope_interleaved
        self.absorb_up_to = 1
        rope = config.rope_scaling or {}
        all_dim = rope.get("mscale_all_dim")
        mscale = yarn_mscale(rope["factor"], all_dim) if all_dim else 1.0
        scale = config.head_dim**-0.5 * mscale**2
        self.spec = AttentionSpec(index, scale, config.window(index), config.sparse(index))
        bias, eps = config.qkv_bias, 1e-6  # DeepSeek's code hard-codes eps in these norms
        self.q_proj = None
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(C, H * config.head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(C, config.q_lora_rank, bias)
            self.q_a_norm = RMSNorm(config.q_lora_rank, eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, H * config.head_dim, bias=False)
        self.kv_a_proj = nn.Linear(C, R + self.rope_dim, bias)
        self.kv_a_norm = RMSNorm(R, eps)
        self.kv_b_proj = nn.Linear(R, H * (self.nope_dim + self.v_dim), bias=False)
        self.o_proj = nn.Linear(H * self.v_dim, C, config.o_bias)

    def forward(self, x: Tensor, rope: Rope, positions: Tensor, attend: Attend) -> Tensor:
        B, T, _ = x.shape
        if self.q_proj is not None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        q = q.view(B, T, -1, self.nope_dim + self.rope_dim)
        q_nope, q_rope = q.split((self.nope_dim, self.rope_dim), dim=-1)
        q_rope = apply_rope(q_rope, *rope, self.interleaved)
        latent, k_rope = self.kv_a_proj(x)[:, :, None].split((self.rank, self.rope_dim), dim=-1)
        k_rope = apply_rope(k_rope, *rope, self.interleaved)
        latent = torch.cat((self.kv_a_norm(latent), k_rope), dim=-1)  # (B, T, 1, R + rope)
        if T <= self.absorb_up_to:
            o = self._absorbed(q_nope, q_rope, latent, positions, attend)
        else:
            spec = replace(self.spec, latent=latent, expand=self.expand)
            q = torch.cat((q_nope, q_rope), dim=-1)
            o = attend(spec, q, *self.expand(latent), positions)
        return self.o_proj(o.reshape(B, T, -1))

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """latent (B, S, 1, R + rope) -> k (B, S, Hq, D), v (B, S, Hq, Dv)."""
        B, S, _, _ = latent.shape
        kv = self.kv_b_proj(latent[:, :, 0, : self.rank]).view(B, S, -1, self.nope_dim + self.v_dim)
        k_nope, v = kv.split((self.nope_dim, self.v_dim), dim=-1)
        k_rope = latent[..., self.rank :].expand(-1, -1, kv.shape[2], -1)
        return torch.cat((k_nope, k_rope), dim=-1), v

    def _absorbed(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        weight = self.kv_b_proj.weight.view(-1, self.nope_dim + self.v_dim, self.rank)
        w_k, w_v = weight.split((self.nope_dim, self.v_dim), dim=1)  # (Hq, Dk, R), (Hq, Dv, R)
        q = torch.cat((torch.einsum("bthd,hdr->bthr", q_nope, w_k), q_rope), dim=-1)
        spec = replace(self.spec, latent_dim=self.rank)
        o = attend(spec, q, latent, latent[..., : self.rank], positions)  # (B, T, Hq, R)
        return torch.einsum("bthr,hdr->bthd", o, w_v)


# --------------------------------------------------------------------------------------------------
# Feed-forward
# --------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, ffn_dim: int, bias: bool = False):
        super().__init__()
        self.gate_proj = nn.Linear(dim, ffn_dim, bias)
        self.up_proj = nn.Linear(dim, ffn_dim, bias)
        self.down_proj = nn.Linear(ffn_dim, dim, bias)
        self.linear_fn: LinearFn = apply_linears

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.linear_fn(x, self.gate_proj, self.up_proj)
        return self.down_proj(F.silu(gate) * up)


Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Observe = Callable[[Tensor, Tensor], None]


def loop_experts(
    x: Tensor, weights: Tensor, ids: Tensor, w_gate_up: Tensor, w_down: Tensor
) -> Tensor:
    """Default experts hook: a loop over experts, each applied to the tokens routed to it.

    x (N, C), weights and ids (N, K), w_gate_up (E, 2F, C) gate rows first, w_down (E, C, F)
    -> (N, C): sum over k of weights[:, k] * expert[ids[:, k]](x). An id of -1 is padding.
    """
    out = torch.zeros_like(x)
    for e in ids[ids >= 0].unique().tolist():
        token, k = (ids == e).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], w_gate_up[e]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, w_down[e]) * weights[token, k, None].type_as(x)
        out = out.index_add(0, token, y.type_as(out))
    return out


class MoE(nn.Module):
    """Mixture of experts: shared(x) + sum over the top K experts of weight * expert(x).

    Routing, in fp32 (Mixtral, arXiv:2401.04088; DeepSeek-V2 2.1.2; DeepSeek-V3 2.1.2): scores are
    the softmax or sigmoid of the router logits. The top K experts, within the best groups, are
    selected by score + expert_bias; their weights are the scores without the bias, optionally
    normalized, times a constant.

    DeepSpeed-MoE (arXiv:2201.05596, 4.1) needs no other code. Its Residual-MoE, a dense MLP and one
    expert that corrects it, is n_shared_experts=1, n_experts_per_token=1 and norm_topk=False. Its
    Pyramid-MoE has more experts in later layers: layer_experts.
    """

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        C, E, width = config.dim, config.experts_of(index), config.expert_ffn_dim
        self.config = config
        self.router = nn.Parameter(torch.empty(E, C))  # not an nn.Linear, so never quantized
        if config.correction_bias:
            self.register_buffer("expert_bias", torch.zeros(E))
        self.w_gate_up = nn.Parameter(torch.empty(E, 2 * width, C))
        self.w_down = nn.Parameter(torch.empty(E, C, width))
        shared = config.n_shared_experts * width
        self.shared = MLP(C, shared) if shared else None
        self.experts: Experts = loop_experts
        self.observe: Observe | None = None  # called with logits (B, T, E) and ids (B, T, K)
        self.local_expert_ids: Sequence[int] | None = None  # ids of the stacked experts; None: all

    def forward(self, x: Tensor, is_padding: Tensor | None = None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        logits = self.router_logits(flat)
        weights, ids = self.select_experts(logits)
        if self.observe is not None:
            seen = ids if is_padding is None else ids.masked_fill(is_padding.reshape(-1, 1), -1)
            self.observe(*(t.view(*x.shape[:-1], -1) for t in (logits, seen)))
        o = self.experts(flat, weights, ids, self.w_gate_up, self.w_down).view_as(x)
        return o if self.shared is None else o + self.shared(x)

    def router_logits(self, x: Tensor) -> Tensor:
        """x (N, C) -> (N, E) fp32."""
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.router.float())

    def select_experts(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits (N, E) -> weights (N, K) fp32 and expert ids (N, K)."""
        c = self.config
        scores = logits.softmax(-1) if c.scoring == "softmax" else logits.sigmoid()
        choice = scores.detach()
        if c.correction_bias:
            choice = choice + self.expert_bias
        if c.n_groups > 1:
            grouped = choice.view(len(logits), c.n_groups, -1)
            best = grouped.topk(c.group_score_topk, dim=-1).values.sum(-1)
            best = best.topk(c.topk_groups, dim=-1).indices
            lost = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
            choice = grouped.masked_fill(lost[..., None], -math.inf).flatten(1)
        ids = choice.topk(c.n_experts_per_token, dim=-1).indices
        weights = scores.gather(1, ids)
        if c.norm_topk:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * c.routed_scaling, ids


# --------------------------------------------------------------------------------------------------
# The transformer
# --------------------------------------------------------------------------------------------------


SourceKV = Mapping[int, Sequence[Tensor]]  # layer index -> CrossAttention.source_kv


class Block(nn.Module):
    """x + attention(norm(x)), in some layers x + cross_attention(norm(x), source), then x +
    mlp(norm(x)); `moe`: an MoE instead of an MLP."""

    def __init__(self, config: ModelConfig, index: int, moe: bool):
        super().__init__()
        latent = config.kv_lora_rank > 0
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = LatentAttention(config, index) if latent else Attention(config, index)
        self.cross_attention = None
        if index in config.cross_attention_layers:
            self.cross_attention_norm = RMSNorm(config.dim, config.norm_eps)
            self.cross_attention = CrossAttention(config, index)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        dense = config.dim, config.ffn_dim, config.mlp_bias
        self.mlp = MoE(config, index) if moe else MLP(*dense)

    def forward(
        self, x: Tensor, rope: Rope, positions: Tensor, attend: Attend,
        source: SourceKV | None = None, is_padding: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        x = x + self.attention(self.attention_norm(x), rope, positions, attend)
        if self.cross_attention is not None:
            _check(source is not None, "cross_attention_layers requires forward(..., source=...)")
            kv = source[self.cross_attention.spec.index]
            x = x + self.cross_attention(self.cross_attention_norm(x), kv, positions)
        routing = (is_padding,) if isinstance(self.mlp, MoE) else ()
        return x + self.mlp(self.mlp_norm(x), *routing)


class MTP(nn.Module):
    """One depth of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, 2.2): from the final
    hidden state at position t and the embedding of token t + 1, the hidden state that predicts
    token t + 2. Embedding and head are shared with the model; see Transformer.mtp_forward."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        C, eps = config.dim, config.norm_eps
        self.embed_norm = RMSNorm(C, eps)
        self.hidden_norm = RMSNorm(C, eps)
        self.proj = nn.Linear(2 * C, C, bias=False)
        self.block = Block(config, index, config.n_layers - 1 in config.moe_layers)
        self.norm = RMSNorm(C, eps)

    def forward(
        self, hidden: Tensor, embedded: Tensor, rope: Rope, positions: Tensor, attend: Attend,
        is_padding: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        x = torch.cat((self.embed_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        return self.norm(self.block(self.proj(x), rope, positions, attend, None, is_padding))


class Transformer(nn.Module):
    """The model. Built under `torch.device("meta")`, it allocates no memory."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        L = config.n_layers
        # nn.Embedding() would initialize itself, which takes seconds on the meta device
        table = torch.empty(config.vocab_size, config.dim)
        self.embed = nn.Embedding.from_pretrained(table, freeze=False)
        self.layers = nn.ModuleList(Block(config, i, i in config.moe_layers) for i in range(L))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.mtp = nn.ModuleList(MTP(config, L + i) for i in range(config.n_mtp_layers))
        # if set, forward calls these instead of the layers; each runs several consecutive layers
        # (training/recompute.py)
        self.layer_groups: Sequence[Callable[..., Tensor]] | None = None
        # parameter name -> its shard (parallel.TPShard), if this process has only a part of it
        self.tp_shards: dict[str, Any] = {}
        self.tie()
        if not table.is_meta:
            self.init_weights()

    def tie(self) -> None:
        """Share the embedding's weight with the head if the config ties them. Call after loading
        weights."""
        if self.config.tie_embeddings and self.head is not None and self.embed is not None:
            self.head.weight = self.embed.weight

    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Initialize matrices with N(0, 0.02), divided by sqrt(2L) for those that write to the
        residual stream (GPT-2, 2.3)."""
        for name, p in self.named_parameters():
            self.init_weight(name, p, generator)
        for b in self.buffers():
            b.zero_()

    @torch.no_grad()
    def init_weight(self, name: str, p: Tensor, generator: torch.Generator | None = None) -> None:
        """init_weights for one parameter; p has its full, unsharded shape."""
        if name.endswith("_conv"):  # as in Primer's code
            nn.init.constant_(p, 0.5 / self.config.qk_conv)
            p.view(-1, self.config.qk_conv)[:, -1] = 0.5
        elif p.dim() == 1:
            nn.init.constant_(p, 0.0 if name.endswith("bias") else 1.0)
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight", "w_down"))
            std = 0.02 / math.sqrt(2 * self.config.n_layers) if residual else 0.02
            nn.init.normal_(p, 0.0, std, generator)

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, attend: Attend = causal_attention,
        return_hidden: bool = False, source: SourceKV | None = None,
        is_padding: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """tokens (B, T) -> logits (B, T, V), or the hidden states before the head (B, T, C).

        positions: (T,) or (B, T), default 0..T-1. If `embed` is None, tokens are hidden states
        (B, T, C) of the previous pipeline stage; if `head` is None, hidden states are returned.
        source: source_kv(...), if the config has cross_attention_layers. is_padding (B, T) bool:
        tokens that MoE layers do not count.
        """
        x = tokens if self.embed is None else self.embed(tokens)
        positions = self._positions(tokens, positions, attend)
        rope = rope_cos_sin(self.config, positions)
        more = () if source is None and is_padding is None else (source, is_padding)
        for layer in self.layer_groups or self.layers:
            x = layer(x, rope, positions, attend, *more)
        if self.norm is not None:
            x = self.norm(x)
        return x if return_hidden or self.head is None else self.head(x)

    def source_kv(self, source: Tensor) -> SourceKV:
        """forward's `source`, for all steps: keys and values of hidden states (B, S, C), such as
        those of an encoder, for each layer with cross attention."""
        layers = (m for layer in self.layers if (m := layer.cross_attention) is not None)
        return {m.spec.index: m.source_kv(source) for m in layers}

    def _positions(self, tokens: Tensor, positions: Tensor | None, attend: Attend) -> Tensor:
        """Positions, by default 0..T-1. ValueError if qk_conv needs earlier tokens than these."""
        if positions is None:
            return torch.arange(tokens.shape[1], device=tokens.device)
        if self.config.qk_conv and qk_history(attend) is None:
            expected = F.pad(positions[..., :-1] + 1, (1, 0))
            ok = bool(((positions == 0) | (positions == expected)).all())
            _check(ok, "qk_conv requires q and k of earlier tokens: use KVCache.attend")
        return positions

    def mtp_forward(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor | None = None,
        attend: Attend = causal_attention, depth: int = 0, is_padding: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Multi-token prediction: hidden (B, T, C), from forward(return_hidden=True) or the
        previous depth, and tokens (B, T), the inputs shifted left by depth + 1 -> hidden states
        (B, T, C) whose logits, self.head(...), predict the token after those."""
        positions = self._positions(tokens, positions, attend)
        rope = rope_cos_sin(self.config, positions)
        return self.mtp[depth](hidden, self.embed(tokens), rope, positions, attend, is_padding)


# --------------------------------------------------------------------------------------------------
# Model families: ModelConfig <-> config.json
# --------------------------------------------------------------------------------------------------

Json = Mapping[str, Any]
REQUIRED = object()
FP8_BLOCK = 128  # DeepSeek's FP8 weights have one scale per block of 128 x 128


@dataclass(frozen=True)
class FieldConverter:
    """Converts config.json fields that do not map one to one to fields of ModelConfig."""

    keys: tuple[str, ...]  # in config.json
    read: Callable[[Json, Json], Json]  # (config.json, ModelConfig fields so far) -> more of them
    write: Callable[[ModelConfig], Json]


@dataclass(frozen=True)
class Family:
    """The config.json format of one model_type."""

    architecture: str
    fields: Mapping[str, str]  # of ModelConfig -> of config.json
    converters: tuple[FieldConverter, ...] = ()
    overrides: Json = field(default_factory=dict)  # ModelConfig fields implied by the model_type
    constants: Json = field(default_factory=dict)  # config.json fields with one allowed value
    defaults: Json = field(default_factory=lambda: DEFAULTS)


ALIASES = {"kimi_k2": "deepseek_v3"}  # model_type -> the one that it equals

# Defaults of config.json fields that are absent or null; all other fields are required.
DEFAULTS = {
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "attention_bias": False,
    "mlp_bias": False,
    "num_key_value_heads": None,  # num_attention_heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "q_lora_rank": None,
    "num_nextn_predict_layers": 0,
    "rope_interleave": True,
}

# Fields that do not affect the forward pass.
HF_IGNORED = set(
    "architectures _name_or_path transformers_version use_cache pretraining_tp "
    "initializer_range attention_dropout pad_token_id output_attentions output_hidden_states "
    "return_dict chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type "
    "_attn_implementation _attn_implementation_autoset attn_implementation use_flash_attn "
    "_flash_attn_2_enabled experts_implementation _experts_implementation is_llama_config "
    "auto_map unsloth_version unsloth_fixed tokenizer_class task_specific_params "
    "max_sequence_length max_window_layers head_dim output_router_logits router_aux_loss_coef "
    "aux_loss_alpha seq_aux ep_size qk_head_dim transformers.js_config "
    # generation settings that transformers 4 writes
    "max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups "
    "diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
    "output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens prefix sep_token_id decoder_start_token_id".split()
)
# Fields that are supported only absent, null, or
HF_UNSET = (
    "attn_logit_softcapping final_logit_softcapping sliding_window layer_types "
    "cross_attention_hidden_size finetuning_task".split()
)
HF_OFF = (  # false
    "use_sliding_window attention_bias mlp_bias qkv_bias use_mrope rope_interleaved torchscript "
    "use_bfloat16 tf_legacy_loss add_cross_attention tie_encoder_decoder".split()
)
HF_DTYPES = "auto float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2".split()
HF_NEUTRAL: dict[str, tuple[Any, ...]] = {  # one of these values
    **dict.fromkeys(("dtype", "torch_dtype"), (None, *HF_DTYPES)),
    "hidden_act": ("silu", "swish"),
    "router_jitter_noise": (None, 0.0),
    "moe_layer_freq": (None, 1),
    "shared_expert_intermediate_size": (None, 0),
    "is_decoder": (None, False, True),
    "pruned_heads": (None, {}),
    **dict.fromkeys(HF_UNSET, (None,)),
    **dict.fromkeys(HF_OFF, (None, False)),
}
# HF_NEUTRAL for the fields of quantization_config, which describes the stored tensors.
HF_FP8: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "fmt": (None, "e4m3"),
    "weight_block_size": ([FP8_BLOCK, FP8_BLOCK],),
    "activation_scheme": (None, "dynamic"),
    "scale_fmt": (None, "float", "ue8m0"),
    "dequantize": (None, False),
}
# An unknown field with one of these words in its name is a part of the architecture
ARCHITECTURE = re.compile(
    "attn|attention|rope|rotary|theta|freq|position|alibi|window|mask|causal|norm|rms|eps|scal|"
    "multiplier|temperature|mup|soft|clip|logit|embed|head|tie|share|layer|block|depth|width|dim|"
    "size|num|hidden|resid|skip|mlp|ffn|ff_|glu|act|gate|expert|moe|rout|bias|conv|ssm|mamba|"
    "memory|recur|kv|query|qk|lora|rank|adapter|sink|sparse|quant|pattern|encoder|vision|image|"
    "audio"
)


def _check_fields(hf: Json, family: Family) -> None:
    """Every field is used by the family, neutral, or without effect. ValueError names the field."""
    known = {*family.fields.values(), *(key for c in family.converters for key in c.keys)}
    rest = set(hf) - known - HF_IGNORED - {"model_type"}
    allowed = HF_NEUTRAL | {key: (None, value) for key, value in family.constants.items()}
    unknown = sorted(rest - set(allowed) - {"quantization_config"})
    risky = [key for key in unknown if hf[key] is not None and ARCHITECTURE.search(key)]
    _check(
        not risky,
        f"unknown field{'s' * (len(risky) > 1)} {', '.join(risky)}: it may change "
        "what the model computes; remove it from config.json if it does not",
    )
    if unknown:
        log.warning("config.json: unknown fields are ignored: %s", ", ".join(unknown))
    _check_values(hf, rest, allowed)
    quantized = hf.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    if quantized is None or method == "sheaf":  # the latter: `prepare` of load_checkpoint
        return
    _check(method == "fp8", f"quantization_config has quant_method {method!r:.60}; known: 'fp8'")
    for key in sorted(set(quantized) - set(HF_FP8) - {"modules_to_not_convert"}):
        raise ValueError(f"unknown field quantization_config.{key}")
    _check_values(quantized, set(quantized), HF_FP8, "quantization_config.")


def _check_values(
    hf: Json, keys: set[str], allowed: Mapping[str, tuple[Any, ...]], where: str = ""
) -> None:
    for key in sorted(keys & set(allowed)):
        known = ", ".join(repr(v) for v in allowed[key] if v is not None) or "null"
        _check(hf[key] in allowed[key], f"{where}{key} is {hf[key]!r:.60}; known: {known}")


LIMITS = dict.fromkeys(("num_hidden_layers", "num_nextn_predict_layers"), 10_000)
LIMITS |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 100_000)


def _check_type(value: Any, kind: type, name: str) -> None:
    """Strictly: "32", 32.0 and True are not ints. A float is finite; an int is one too."""
    ok = type(value) is kind
    if kind is float:
        ok = type(value) in (int, float) and abs(value) < 1e300
    _check(ok, f"{name} must be {kind.__name__}, not {value!r}")
    limit = LIMITS.get(name, 2**31)
    _check(kind is not int or abs(value) < limit, f"{name} must be less than {limit}, not {value}")


def _typed(hf: Json, key: str, kind: type, default: Any = REQUIRED) -> Any:
    """hf[key], which must be of type `kind`; `default` if it is absent or null."""
    value = hf.get(key)
    if value is None:
        _check(default is not REQUIRED, f"{key} is missing")
        return default
    _check_type(value, kind, key)
    return kind(value)


def _ints(hf: Json, key: str, limit: int = 2**31) -> tuple[int, ...]:
    """hf[key] as a tuple: an int, a list of ints, or null."""
    value = hf.get(key)
    value = [] if value is None else value if isinstance(value, list) else [value]
    ok = all(type(i) is int and 0 <= i < limit for i in value)
    _check(ok, f"{key} must be an int or a list of ints below {limit}, not {hf.get(key)!r:.60}")
    return tuple(value)


def _read_heads(hf: Json, given: Json) -> Json:
    n = given["n_heads"]
    head_dim = given.get("head_dim")
    if "kv_lora_rank" in given:
        head_dim = given["qk_nope_head_dim"] + given["qk_rope_head_dim"]
    return {
        "n_kv_heads": n if given["n_kv_heads"] is None else given["n_kv_heads"],
        "head_dim": given["dim"] // max(1, n) if head_dim is None else head_dim,
        "eos_ids": _ints(hf, "eos_token_id", given["vocab_size"]),
    }


def _write_heads(config: ModelConfig) -> Json:
    eos = list(config.eos_ids)
    return {"eos_token_id": eos[0] if len(eos) == 1 else eos or None, "hidden_act": "silu"}


HEADS = FieldConverter(("eos_token_id",), _read_heads, _write_heads)


def _read_window(hf: Json, given: Json) -> Json:
    """One sliding window for all layers; Qwen3-MoE also requires use_sliding_window."""
    ok = given["family"] != "mistral" or "sliding_window" in hf
    _check(ok, "sliding_window is missing (null: no window)")
    enabled = _typed(hf, "use_sliding_window", bool, given["family"] != "qwen3_moe")
    window = _typed(hf, "sliding_window", int, None) if enabled else None
    return {"windows": () if window is None else (window,) * given["n_layers"]}


def _write_window(config: ModelConfig) -> Json:
    switch = {"use_sliding_window": bool(config.windows)} if config.family == "qwen3_moe" else {}
    return {"sliding_window": config.windows[0] if config.windows else None} | switch


WINDOW = FieldConverter(("sliding_window",), _read_window, _write_window)
SWITCHED_WINDOW = replace(WINDOW, keys=("sliding_window", "use_sliding_window"))


def _read_layer_windows(hf: Json, given: Json) -> Json:
    """Sliding windows per layer: by layer_types or, if absent, from layer max_window_layers on."""
    L, types, window = given["n_layers"], hf.get("layer_types"), None
    if _typed(hf, "use_sliding_window", bool, False):
        window = _typed(hf, "sliding_window", int)
    if types is None:
        first = L if window is None else _typed(hf, "max_window_layers", int)
        types = ["full_attention" if i < first else "sliding_attention" for i in range(L)]
    meaning = {"full_attention": None, "sliding_attention": window}
    ok = isinstance(types, list) and len(types) == L and all(t in [*meaning] for t in types)
    _check(ok, f"layer_types must be {L} of {', '.join(meaning)}, not {types!r}")
    ok = window is not None or "sliding_attention" not in types
    _check(ok, "layer_types has 'sliding_attention', but use_sliding_window is off")
    windows = tuple(meaning[t] for t in types)
    return {"windows": windows if any(w is not None for w in windows) else ()}


def _write_layer_windows(config: ModelConfig) -> Json:
    windows = config.windows or (None,) * config.n_layers
    return {
        "use_sliding_window": any(windows),
        "sliding_window": max((w for w in windows if w is not None), default=None),
        "max_window_layers": config.n_layers,  # layer_types takes precedence
        "layer_types": ["sliding_attention" if w else "full_attention" for w in windows],
    }


LAYER_WINDOWS = FieldConverter(
    ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    _read_layer_windows,
    _write_layer_windows,
)


def _read_sparse_step(hf: Json, given: Json) -> Json:
    """Every decoder_sparse_step-th layer is an MoE layer, except mlp_only_layers."""
    step, dense = _typed(hf, "decoder_sparse_step", int, 1), _ints(hf, "mlp_only_layers")
    _check(step >= 1, f"decoder_sparse_step must be 1 or more, not {step}")
    layers = range(given["n_layers"])
    return {"moe_layers": tuple(i for i in layers if (i + 1) % step == 0 and i not in dense)}


def _write_sparse_step(config: ModelConfig) -> Json:
    dense = [i for i in range(config.n_layers) if i not in config.moe_layers]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


SPARSE_STEP = FieldConverter(
    ("decoder_sparse_step", "mlp_only_layers"), _read_sparse_step, _write_sparse_step
)
ALL_SPARSE = FieldConverter(
    (),
    lambda hf, given: {
        "moe_layers": tuple(range(given["n_layers"])), "expert_ffn_dim": given["ffn_dim"]
    },
    lambda config: {},
)  # fmt: skip
FIRST_DENSE = FieldConverter(
    ("first_k_dense_replace",),
    lambda hf, given: {
        "moe_layers": tuple(range(_typed(hf, "first_k_dense_replace", int), given["n_layers"]))
    },
    lambda config: {"first_k_dense_replace": config.n_layers - len(config.moe_layers)},
)
N_EXPERTS = FieldConverter(  # transformers 5 writes num_local_experts
    ("num_experts", "num_local_experts"),
    lambda hf, given: {
        "n_experts": _typed(hf, "num_experts" if "num_experts" in hf else "num_local_experts", int)
    },
    lambda config: {"num_experts": config.n_experts},
)


def _read_v2_groups(hf: Json, given: Json) -> Json:
    method = _typed(hf, "topk_method", str, "greedy")
    ok = method in ("greedy", "group_limited_greedy")
    _check(ok, f"topk_method is {method!r}; known: 'greedy', 'group_limited_greedy'")
    return {"n_groups": 1, "topk_groups": 1} if method == "greedy" else {}


def _write_v2_groups(config: ModelConfig) -> Json:
    return {"topk_method": "greedy" if config.n_groups == 1 else "group_limited_greedy"}


V2_GROUPS = FieldConverter(("topk_method",), _read_v2_groups, _write_v2_groups)

# rope type -> (required fields, optional fields); all but truncate are numbers
ROPE_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
    ),
}


TRAINED_LENGTH = "original_max_position_embeddings"


def _read_rope_scaling(rope: Any, key: str, max_seq_len: int) -> dict[str, Any] | None:
    """ModelConfig.rope_scaling from an object of config.json, its field `key`."""
    _check(isinstance(rope, Mapping), f"{key} must be an object, not {rope!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    ok = isinstance(kind, str) and kind in ROPE_TYPES
    _check(ok, f"{key}.rope_type is {kind!r}; known: {', '.join(ROPE_TYPES)}")
    needed, optional = ROPE_TYPES[kind]
    others = {"rope_type", "type", "finetuned", "rope_theta", "partial_rotary_factor"}
    for name in sorted(set(rope) - {*others, *needed, *optional}):
        raise ValueError(f"unknown field {key}.{name} for rope_type {kind!r}")
    if kind == "default":
        return None
    absent = {TRAINED_LENGTH: max_seq_len}
    values = {name: rope.get(name, absent.get(name)) for name in (*needed, *optional)}
    values = {n: v for n, v in values.items() if v is not None or n in needed}
    for name, value in values.items():
        ok, wanted = type(value) in (int, float) and 0 < value < 1e300, "a positive number"
        if name == "truncate":
            ok, wanted = type(value) is bool, "true or false"
        _check(ok, f"{key}.{name} must be {wanted}, not {value!r}")
    return {"rope_type": kind, **values}


def _read_rope(hf: Json, given: Json) -> Json:
    """rope_theta and rope_scaling of transformers 4, or rope_parameters of transformers 5."""
    key = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    rope = hf.get(key) or {}
    ok = not rope or hf.get("rope_scaling") in (None, rope)
    _check(ok, "rope_parameters and rope_scaling differ; remove the wrong one")
    scaling = _read_rope_scaling(rope, key, given["max_seq_len"])
    trained = _typed(hf, TRAINED_LENGTH, int, None)  # outside, it takes precedence
    if trained is not None and TRAINED_LENGTH in (scaling or {}):
        scaling[TRAINED_LENGTH] = trained
    default_theta = FAMILIES[given["family"]].defaults.get("rope_theta", 10000.0)
    theta, factor = (
        _typed(rope if rope.get(name) is not None else hf, name, float, default)
        for name, default in (("rope_theta", default_theta), ("partial_rotary_factor", 1.0))
    )
    _check(
        factor == 1,
        f"partial_rotary_factor is {factor}; known: 1.0, as in transformers' "
        f"{given['family']} (use model_type 'sheaf' for other values)",
    )
    return {"rope_theta": theta, "rope_scaling": scaling}


def _write_rope(config: ModelConfig) -> Json:
    scaling = {} if config.rope_scaling is None else {"rope_scaling": dict(config.rope_scaling)}
    return {"rope_theta": config.rope_theta} | scaling


ROPE = FieldConverter(
    ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", TRAINED_LENGTH),
    _read_rope,
    _write_rope,
)


def _scalar_type(name: str) -> type | None:
    """int, float, bool or str, if that is the type of this field of ModelConfig (or None)."""
    kinds = {"int": int, "float": float, "bool": bool, "str": str}
    return kinds.get(ModelConfig.__dataclass_fields__[name].type.removesuffix(" | None"))


def _read_sheaf(hf: Json, given: Json) -> Json:
    config = hf.get("config")
    ok = isinstance(config, dict) and set(config) <= set(ModelConfig.__dataclass_fields__)
    _check(ok, "config must be an object of ModelConfig's fields")
    read = {}
    for f in fields(ModelConfig):
        value = config.get(f.name, None if f.default is MISSING else f.default)
        kind, types = _scalar_type(f.name), (int, type(None)) if "None" in f.type else (int,)
        if kind is not None and not (value is None and f.default is None):
            _check_type(value, kind, f"config.{f.name}")
        elif f.type.startswith("tuple"):
            ok = isinstance(value, (list, tuple)) and all(type(x) in types for x in value)
            _check(ok, f"config.{f.name} must be a list of integers, not {value!r}")
            value = tuple(value)
        elif f.name == "rope_scaling" and value is not None:
            value = _read_rope_scaling(value, "config.rope_scaling", read["max_seq_len"])
        read[f.name] = value
    return read


SHEAF = FieldConverter(("config",), _read_sheaf, lambda config: {"config": asdict(config)})

# Fields of ModelConfig -> of config.json
COMMON = {
    "vocab_size": "vocab_size", "dim": "hidden_size", "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size", "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps", "tie_embeddings": "tie_word_embeddings", "bos_id": "bos_token_id",
}  # fmt: skip
DENSE = COMMON | {"head_dim": "head_dim"}
BIASES = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
TOP_K = {"n_experts_per_token": "num_experts_per_tok"}
EXPERTS = TOP_K | {"expert_ffn_dim": "moe_intermediate_size"}
NORM_TOPK = {"norm_topk": "norm_topk_prob"}
MLA = "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim".split()
DEEPSEEK = COMMON | BIASES | EXPERTS | dict(zip(MLA, MLA)) | {
    "n_experts": "n_routed_experts", "n_shared_experts": "n_shared_experts",
    "n_groups": "n_group", "topk_groups": "topk_group", "routed_scaling": "routed_scaling_factor",
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        fields=DENSE | BIASES | {"mlp_bias": "mlp_bias"},
        converters=(HEADS, ROPE),
        defaults=DEFAULTS | {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},  # Llama 1
    ),
    "mistral": Family("MistralForCausalLM", fields=DENSE, converters=(HEADS, ROPE, WINDOW)),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        fields=DENSE,
        converters=(HEADS, ROPE, LAYER_WINDOWS),
        overrides={"qkv_bias": True},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        fields=DENSE | BIASES,
        converters=(HEADS, ROPE, LAYER_WINDOWS),
        overrides={"qk_norm": True},
        constants={"use_qk_norm": True},
        defaults=DEFAULTS | {"head_dim": 128},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        fields=DENSE | TOP_K | {"n_experts": "num_local_experts"},
        converters=(HEADS, ROPE, WINDOW, ALL_SPARSE),
        overrides={"norm_topk": True},
        defaults=DEFAULTS | {"rope_theta": 1e6},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        fields=DENSE | BIASES | EXPERTS | NORM_TOPK,
        converters=(HEADS, ROPE, SWITCHED_WINDOW, SPARSE_STEP, N_EXPERTS),
        overrides={"qk_norm": True},
        constants={"use_qk_norm": True},
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        fields=DEEPSEEK,
        converters=(HEADS, ROPE, FIRST_DENSE, V2_GROUPS),
        defaults=DEFAULTS | {"n_group": 1, "topk_group": 1},
        overrides={"rope_interleaved": True},
        # with norm_topk_prob, DeepSeek's code normalizes and does not scale, transformers does the
        # reverse; no published model sets it
        constants={"scoring_func": "softmax", "norm_topk_prob": False},
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        fields=DEEPSEEK | NORM_TOPK | {
            "rope_interleaved": "rope_interleave", "n_mtp_layers": "num_nextn_predict_layers"
        },
        converters=(HEADS, ROPE, FIRST_DENSE),
        overrides={"scoring": "sigmoid", "correction_bias": True, "group_score_topk": 2},
        constants={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ),
    # For configs that no published family can represent: ALiBi, interleaved RoPE, combinations. All
    # fields of ModelConfig by name; transformers rejects it rather than misread it.
    "sheaf": Family("Transformer", fields={}, converters=(SHEAF,)),
}  # fmt: skip


def _llama(
    vocab: int, dim: int, layers: int, heads: int, kv: int, ffn: int, **more: Any
) -> ModelConfig:
    return ModelConfig(vocab, dim, layers, heads, kv, dim // heads, ffn, **more)


LLAMA_31_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LLAMA_31 = dict(max_seq_len=131072, norm_eps=1e-5, rope_theta=5e5, rope_scaling=LLAMA_31_ROPE)
LLAMA_32 = LLAMA_31 | {"rope_scaling": LLAMA_31_ROPE | {"factor": 32.0}, "tie_embeddings": True}

# Named configs, for `train.py --model` and `generate.py --dummy`.
CONFIGS: dict[str, ModelConfig] = {
    "draft": _llama(4096, 128, 4, 2, 1, 352, max_seq_len=512, tie_embeddings=True),  # 1.3M
    "small": _llama(4096, 256, 6, 4, 2, 704, max_seq_len=512, tie_embeddings=True),  # 5.5M
    "base": _llama(4096, 288, 6, 6, 6, 768, max_seq_len=256),  # 8.3M, used in training benchmarks
    "small-moe": ModelConfig(  # 3.8M, the shape of DeepSeek-V3
        vocab_size=4096, dim=192, n_layers=5, n_heads=6, n_kv_heads=6, head_dim=48, ffn_dim=512,
        max_seq_len=512, tie_embeddings=True, family="deepseek_v3", rope_interleaved=True,
        kv_lora_rank=64, q_lora_rank=96, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
        moe_layers=(1, 2, 3, 4), n_experts=8, n_experts_per_token=2, expert_ffn_dim=72,
        n_shared_experts=1, scoring="sigmoid", correction_bias=True, n_groups=4, topk_groups=2,
        group_score_topk=2, norm_topk=True, n_mtp_layers=1,
    ),
    "small-pr-moe": _llama(  # 9.0M, a pyramid of residual experts
        4096, 256, 6, 4, 2, 704, max_seq_len=512, tie_embeddings=True, family="sheaf",
        moe_layers=(1, 3, 5), n_experts=8, layer_experts=(4, 4, 8), n_experts_per_token=1,
        expert_ffn_dim=352, n_shared_experts=1,
    ),
    "tinyllama-1.1b": _llama(32000, 2048, 22, 32, 4, 5632, norm_eps=1e-5),
    "llama2-7b": _llama(32000, 4096, 32, 32, 32, 11008, max_seq_len=4096, norm_eps=1e-5),
    "llama3.2-1b": _llama(128256, 2048, 16, 32, 8, 8192, **LLAMA_32),
    "llama3-8b": _llama(
        128256, 4096, 32, 32, 8, 14336, max_seq_len=8192, norm_eps=1e-5, rope_theta=5e5
    ),
    "llama3.1-8b": _llama(128256, 4096, 32, 32, 8, 14336, **LLAMA_31),
    "llama3.1-70b": _llama(128256, 8192, 80, 64, 8, 28672, **LLAMA_31),
}  # fmt: skip
