"""The model: a Llama-style transformer in plain PyTorch, and the Hugging Face folder it lives in.

This file is the ground truth of the repo. Each sibling makes one thing here faster, smaller or
larger and proves that it computes the same; so this file says what "the same" is, in the fewest
lines.

    tokens -> embed -> [x + attention(norm(x)), x + mlp(norm(x))] * L -> norm -> head -> logits

Architecture (Llama 2, arXiv:2307.09288; Llama 3, arXiv:2407.21783): RMSNorm before each half of a
block, rotary positions (RoFormer, arXiv:2104.09864), grouped-query attention (arXiv:2305.13245)
with a head_dim of its own, SwiGLU (arXiv:2002.05202), optional biases, optionally tied embeddings.

Three arguments of `Transformer.forward` are the hooks everything else attaches to:

    attend(spec, q, k, v, positions) -> o
        owns the cache, the mask and the kernel. The model hands over this step's new, rotated
        tokens and asks no more.
    positions
        where the tokens stand. Never counted inside the model, so that chunks, packed sequences and
        trees need no change here.
    return_hidden
        the final hidden states instead of logits.

A pipeline stage is this model with some layers dropped and `embed`, `norm` or `head` set to None.
Weights are read and written only as safetensors. Needs: torch, safetensors.

Shapes: B batch, T new tokens, S keys (cached + new), Hq / Hkv query / key-value heads, D head dim,
C model width, F feed-forward width, V vocabulary, L layers. Attention tensors are (B, T, H, D).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

# --------------------------------------------------------------------------------------------------
# Configuration: ours <-> config.json
# --------------------------------------------------------------------------------------------------

# ModelConfig field -> config.json field, the type it must have, and the value if it is absent
# (REQUIRED: there is none; None: derived from the others in from_hf).
REQUIRED = object()
HF_FIELDS: dict[str, tuple[str, type, Any]] = {
    "vocab_size": ("vocab_size", int, REQUIRED),
    "dim": ("hidden_size", int, REQUIRED),
    "n_layers": ("num_hidden_layers", int, REQUIRED),
    "n_heads": ("num_attention_heads", int, REQUIRED),
    "n_kv_heads": ("num_key_value_heads", int, None),
    "head_dim": ("head_dim", int, None),
    "ffn_dim": ("intermediate_size", int, REQUIRED),
    "max_seq_len": ("max_position_embeddings", int, 2048),
    "norm_eps": ("rms_norm_eps", float, 1e-6),
    "rope_theta": ("rope_theta", float, 10000.0),
    "attention_bias": ("attention_bias", bool, False),
    "mlp_bias": ("mlp_bias", bool, False),
    "tie_embeddings": ("tie_word_embeddings", bool, False),
}

# Read elsewhere in from_hf, and those that are known to change nothing we compute.
HF_OTHER = {
    "model_type",
    "hidden_act",
    "rope_scaling",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
}
HF_IGNORED = set(
    "architectures _name_or_path transformers_version dtype torch_dtype use_cache pretraining_tp "
    "initializer_range attention_dropout pad_token_id output_attentions output_hidden_states "
    "return_dict chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type "
    "_attn_implementation_autoset is_llama_config".split()
)

# rope type -> the fields it reads (all numbers, all required)
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides what the model computes. The defaults are Llama's."""

    vocab_size: int
    dim: int  # C
    n_layers: int  # L
    n_heads: int  # Hq
    n_kv_heads: int  # Hkv, divides Hq
    head_dim: int  # D, need not be C / Hq
    ffn_dim: int  # F
    max_seq_len: int = 2048  # the context the weights were trained for
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None  # {"rope_type": ..., its ROPE_TYPES fields}
    attention_bias: bool = False  # on q, k, v and o
    mlp_bias: bool = False
    tie_embeddings: bool = False  # head.weight is embed.weight
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()  # generation stops at any of them

    def __post_init__(self):
        for name in (
            "vocab_size",
            "dim",
            "n_layers",
            "n_heads",
            "n_kv_heads",
            "head_dim",
            "ffn_dim",
            "max_seq_len",
            "rope_theta",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{_both_names(name)} must be positive, not {getattr(self, name)}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"{_both_names('n_kv_heads')} ({self.n_kv_heads}) must divide "
                f"{_both_names('n_heads')} ({self.n_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even (RoPE rotates pairs), not {self.head_dim}")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """The config of a Hugging Face config.json, already parsed. ValueError names the field."""
        if hf.get("model_type") != "llama":
            raise ValueError(f"model_type is {hf.get('model_type')!r}; known: 'llama'")
        unknown = sorted(set(hf) - {f for f, _, _ in HF_FIELDS.values()} - HF_OTHER - HF_IGNORED)
        if unknown:
            raise ValueError(
                f"unknown field{'s' * (len(unknown) > 1)} {', '.join(unknown)}: it may change "
                "what the model computes; remove it if it does not"
            )
        if hf.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ValueError(f"hidden_act is {hf['hidden_act']!r}; known: 'silu'")

        theta, scaling = _read_rope(hf)
        given = {
            name: _typed(hf, key, kind, default) for name, (key, kind, default) in HF_FIELDS.items()
        }
        given["rope_theta"] = theta
        if given["n_kv_heads"] is None:
            given["n_kv_heads"] = given["n_heads"]
        if given["head_dim"] is None:
            given["head_dim"] = given["dim"] // max(1, given["n_heads"])
        eos = hf.get("eos_token_id")
        eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
        if not all(type(i) is int for i in eos):
            raise ValueError(
                f"eos_token_id must be an int or a list of ints, not {hf['eos_token_id']!r}"
            )
        bos = _typed(hf, "bos_token_id", int, None)
        return cls(**given, rope_scaling=scaling, bos_id=bos, eos_ids=tuple(eos))

    def to_hf(self) -> dict[str, Any]:
        """The config.json that says the same. Readable by transformers 4 and 5."""
        hf: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
        }
        hf |= {key: getattr(self, name) for name, (key, _, _) in HF_FIELDS.items()}
        if self.rope_scaling is not None:
            hf["rope_scaling"] = dict(self.rope_scaling)
        eos = list(self.eos_ids)
        return hf | {
            "bos_token_id": self.bos_id,
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        }


def _both_names(name: str) -> str:
    key = HF_FIELDS[name][0]
    return name if key == name else f"{name} ({key} in config.json)"


def _typed(hf: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    """hf[key] as `kind`, strictly: "32", 32.0 and True are no ints."""
    value = hf.get(key)
    if value is None:
        if default is REQUIRED:
            raise ValueError(f"{key} is missing")
        return default
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise ValueError(f"{key} must be {kind.__name__}, not {value!r}")
    return value


def _read_rope(hf: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling) from transformers 4's rope_theta + rope_scaling or 5's rope_parameters."""
    key = "rope_parameters" if hf.get("rope_parameters") is not None else "rope_scaling"
    rope = hf.get(key) or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"{key} must be an object, not {rope!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise ValueError(f"{key}.rope_type is {kind!r}; known: {', '.join(ROPE_TYPES)}")
    unknown = sorted(set(rope) - {"rope_type", "type", "rope_theta", *ROPE_TYPES[kind]})
    if unknown:
        raise ValueError(f"unknown field {key}.{unknown[0]} for rope_type {kind!r}")
    theta = _typed(rope if "rope_theta" in rope else hf, "rope_theta", float, 10000.0)
    if kind == "default":
        return theta, None
    values = {name: rope.get(name) for name in ROPE_TYPES[kind]}
    for name, value in values.items():
        if type(value) not in (int, float) or not value > 0:
            raise ValueError(f"{key}.{name} must be a positive number, not {value!r}")
    return theta, {"rope_type": kind, **values}


def _llama(
    vocab: int, dim: int, layers: int, heads: int, kv: int, ffn: int, **more: Any
) -> ModelConfig:
    return ModelConfig(vocab, dim, layers, heads, kv, dim // heads, ffn, **more)


_LLAMA31_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# Shapes known by name, for `train.py --model` and `generate.py --dummy`.
CONFIGS: dict[str, ModelConfig] = {
    "draft": _llama(4096, 128, 4, 2, 1, 352, max_seq_len=512, tie_embeddings=True),  # 1.3M
    "small": _llama(4096, 256, 6, 4, 2, 704, max_seq_len=512, tie_embeddings=True),  # 5.5M
    "base": _llama(4096, 288, 6, 6, 6, 768, max_seq_len=256),  # 8.3M, the training benchmark
    "tinyllama-1.1b": _llama(32000, 2048, 22, 32, 4, 5632, norm_eps=1e-5),
    "llama2-7b": _llama(32000, 4096, 32, 32, 32, 11008, max_seq_len=4096, norm_eps=1e-5),
    "llama3.2-1b": _llama(
        128256,
        2048,
        16,
        32,
        8,
        8192,
        max_seq_len=131072,
        norm_eps=1e-5,
        rope_theta=5e5,
        rope_scaling=_LLAMA31_ROPE | {"factor": 32.0},
        tie_embeddings=True,
    ),
    "llama3.1-8b": _llama(
        128256,
        4096,
        32,
        32,
        8,
        14336,
        max_seq_len=131072,
        norm_eps=1e-5,
        rope_theta=5e5,
        rope_scaling=_LLAMA31_ROPE,
    ),
    "llama3.1-70b": _llama(
        128256,
        8192,
        80,
        64,
        8,
        28672,
        max_seq_len=131072,
        norm_eps=1e-5,
        rope_theta=5e5,
        rope_scaling=_LLAMA31_ROPE,
    ),
}


def read_config(path: str | os.PathLike) -> ModelConfig:
    """The ModelConfig of a config.json file. ValueError names the file, the field and the mend."""
    try:
        hf = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise ValueError(
            f"{path}: {e.strerror or e}; expected a Hugging Face config.json"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ValueError(
            f"{path}: not valid JSON ({e}); it may be half-written, copy it again"
        ) from None
    if not isinstance(hf, dict):
        raise ValueError(f"{path}: must hold one JSON object, not a {type(hf).__name__}")
    try:
        return ModelConfig.from_hf(hf)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


# --------------------------------------------------------------------------------------------------
# Rotary positions
# --------------------------------------------------------------------------------------------------


def rope_frequencies(config: ModelConfig, device: torch.device | str = "cpu") -> Tensor:
    """Angle per position of each rotated pair, (D/2,) fp32: theta ** (-2i / D), then scaled.

    linear: divided by `factor` (position interpolation, arXiv:2306.15595). llama3: wavelengths
    longer than the trained context are divided by `factor`, short ones kept, those between
    blended.
    """
    D = config.head_dim
    freq = config.rope_theta ** (-torch.arange(0, D, 2, dtype=torch.float32, device=device) / D)
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    if scaling["rope_type"] == "linear":
        return freq / scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = (
        scaling["original_max_position_embeddings"] * freq / (2 * math.pi)
    )  # in the trained context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * freq + (1 - keep) * freq / scaling["factor"]


def rope_cos_sin(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle, (B or 1, T, 1, D/2) fp32.

    Recomputed in each forward: a few small operations, and no table that a cast to bf16 could
    spoil, a meta device could lose or a long context could outgrow.
    """
    angles = positions[..., None].float() * rope_frequencies(
        config, positions.device
    )  # (B?, T, D/2)
    angles = angles.view(-1, *angles.shape[-2:])[:, :, None]
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i+D/2}) of x (B, T, H, D) by their angles, in fp32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


# --------------------------------------------------------------------------------------------------
# The attend hook, and the attention used when none is given
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionSpec:
    """A layer's constants, as its `attend` callable sees them. Llama sets only the first two."""

    index: int  # which layer
    scale: float  # multiplies q . k
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    latent_dim: int | None = None


Attend = Callable[[AttentionSpec, Tensor, Tensor, Tensor, Tensor], Tensor]


def causal_attention(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, positions: Tensor
) -> Tensor:
    """Causal attention over the new tokens alone: what forward does without a cache.

    q (B, T, Hq, D), k and v (B, T, Hkv, D) -> (B, T, Hq, D). Order in the sequence is the mask;
    positions have done their work in RoPE.
    """
    _check_plain(spec)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale, enable_gqa=True)
    return o.transpose(1, 2)


def _check_plain(spec: AttentionSpec) -> None:
    extras = (spec.window, spec.softcap, spec.alibi_slopes, spec.sinks, spec.latent_dim)
    assert all(x is None for x in extras), "this attend knows scale alone; hand forward another"


class KVCache:
    """Keys and values of B sequences in two static tensors per layer, slot number = position.

        cache = KVCache(config, 1, 512, dtype, device)
        model(prompt, torch.arange(T), cache.attend)          # prefill, whole or in chunks
        model(token, torch.tensor([T]), cache.attend)         # decode

    New tokens are written at their positions, and a query at position i sees the slots j <= i.
    That is the whole bookkeeping: a slot written by a forgotten branch is overwritten before it
    can be seen, so `truncate` moves a number and touches no memory. Nothing depends on a Python
    counter and no shape changes between steps, so a step compiles once and replays as a CUDA
    graph.

    Memory: 2 * L * B * Hkv * max_len * D elements. attend reads all max_len slots unless it is told
    how many can matter: `functools.partial(cache.attend, limit=n)`, n > every position.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        max_len: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        shape = (batch_size, config.n_kv_heads, max_len, config.head_dim)
        self.max_len = max_len
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layers)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layers)]
        self.end = torch.zeros((), dtype=torch.long, device=device)  # a tensor: no sync per step

    @property
    def length(self) -> int:
        """Slots in use: one more than the last position written."""
        return int(self.end)

    def truncate(self, n: int) -> None:
        """Forget the tokens at positions >= n."""
        self.end.clamp_(max=n)

    def bytes_read(self, limit: int | None = None) -> int:
        """Bytes one decode step reads from the cache."""
        per_slot = sum(t[:, :, :1].numel() * t.element_size() for t in (*self.k, *self.v))
        return per_slot * (self.max_len if limit is None else min(limit, self.max_len))

    def attend(
        self,
        spec: AttentionSpec,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        limit: int | None = None,
    ) -> Tensor:
        """The attend hook: q (B, T, Hq, D), k and v (B, T, Hkv, D), positions (T,) or (B, T)."""
        _check_plain(spec)
        keys, values = self.k[spec.index], self.v[spec.index]  # (B, Hkv, S, D)
        _write(keys, positions, k)
        _write(values, positions, v)
        self.end.copy_(positions.max() + 1)
        keys, values = keys[:, :, :limit].to(q.dtype), values[:, :, :limit].to(q.dtype)
        seen = torch.arange(keys.shape[2], device=q.device) <= positions[..., None]  # (B?, T, S)
        seen = seen.view(-1, 1, *seen.shape[-2:])

        B, T, Hq, D = q.shape
        if T == 1:
            # Queries that share a key head become rows of one query: no key is read twice.
            q = q.view(B, keys.shape[1], -1, D)
            o = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, scale=spec.scale)
            return o.reshape(B, 1, Hq, D)
        q = q.transpose(1, 2)
        o = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=seen, scale=spec.scale, enable_gqa=True
        )
        return o.transpose(1, 2)


def _write(slots: Tensor, positions: Tensor, new: Tensor) -> None:
    """slots (B, Hkv, S, D) at positions (T,) or (B, T) = new (B, T, Hkv, D)."""
    new = new.to(slots.dtype)
    if positions.dim() == 1:
        slots[:, :, positions] = new.transpose(1, 2)
    else:
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        slots[rows, :, positions] = new


# --------------------------------------------------------------------------------------------------
# The transformer
# --------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """x / rms(x) * weight (arXiv:1910.07467), the mean of squares in fp32."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.type_as(x)


class Attention(nn.Module):
    """Grouped-query attention around the attend hook. Head counts are read off the projections'
    width, so that a tensor-parallel shard of them needs no other change."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        C, D, bias = config.dim, config.head_dim, config.attention_bias
        self.spec = AttentionSpec(index, D**-0.5)
        self.head_dim = D
        self.q_proj = nn.Linear(C, config.n_heads * D, bias)
        self.k_proj = nn.Linear(C, config.n_kv_heads * D, bias)
        self.v_proj = nn.Linear(C, config.n_kv_heads * D, bias)
        self.o_proj = nn.Linear(config.n_heads * D, C, bias)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], positions: Tensor, attend: Attend
    ) -> Tensor:
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, -1, self.head_dim)
        k = self.k_proj(x).view(B, T, -1, self.head_dim)
        v = self.v_proj(x).view(B, T, -1, self.head_dim)
        o = attend(self.spec, apply_rope(q, *rope), apply_rope(k, *rope), v, positions)
        return self.o_proj(o.reshape(B, T, -1))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn_dim, config.mlp_bias)
        self.up_proj = nn.Linear(config.dim, config.ffn_dim, config.mlp_bias)
        self.down_proj = nn.Linear(config.ffn_dim, config.dim, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, index)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], positions: Tensor, attend: Attend
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, positions, attend)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """The model. Built under `torch.device("meta")` it allocates nothing."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tie()
        self.init_weights()

    def tie(self) -> None:
        """Make the head share the embedding's weight, where the config says so. For use after
        loading."""
        if self.config.tie_embeddings and self.head is not None and self.embed is not None:
            self.head.weight = self.embed.weight

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """N(0, 0.02) matrices, those that write to the residual stream divided by sqrt(2L) (GPT-2,
        2.3)."""
        for name, p in self.named_parameters():
            if p.dim() == 1:
                nn.init.constant_(p, 0.0 if name.endswith("bias") else 1.0)
            else:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / math.sqrt(2 * self.config.n_layers) if residual else 0.02
                nn.init.normal_(p, 0.0, std, generator)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attend: Attend = causal_attention,
        return_hidden: bool = False,
    ) -> Tensor:
        """tokens (B, T) -> logits (B, T, V), or the hidden states before the head (B, T, C).

        positions: (T,) or (B, T), default 0..T-1. Where `embed` is None, tokens are hidden states
        (B, T, C) from the stage before; where `head` is None, hidden states come out.
        """
        x = tokens if self.embed is None else self.embed(tokens)
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        rope = rope_cos_sin(self.config, positions)
        for layer in self.layers:
            x = layer(x, rope, positions, attend)
        if self.norm is not None:
            x = self.norm(x)
        return x if return_hidden or self.head is None else self.head(x)


# --------------------------------------------------------------------------------------------------
# Hugging Face folders: config.json + safetensors
# --------------------------------------------------------------------------------------------------

# Our module -> its name in a Llama checkpoint. Below modules, ".weight" and ".bias" are the same.
HF_NAMES = {
    "embed": "model.embed_tokens",
    "layers.{}.attention_norm": "model.layers.{}.input_layernorm",
    "layers.{}.attention.q_proj": "model.layers.{}.self_attn.q_proj",
    "layers.{}.attention.k_proj": "model.layers.{}.self_attn.k_proj",
    "layers.{}.attention.v_proj": "model.layers.{}.self_attn.v_proj",
    "layers.{}.attention.o_proj": "model.layers.{}.self_attn.o_proj",
    "layers.{}.mlp_norm": "model.layers.{}.post_attention_layernorm",
    "layers.{}.mlp.gate_proj": "model.layers.{}.mlp.gate_proj",
    "layers.{}.mlp.up_proj": "model.layers.{}.mlp.up_proj",
    "layers.{}.mlp.down_proj": "model.layers.{}.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}


def hf_name(name: str) -> str:
    """Our parameter name -> its name in a Hugging Face checkpoint (see HF_NAMES)."""
    module, _, kind = name.rpartition(".")
    parts = module.split(".")
    if parts[0] == "layers":
        key = ".".join(["layers", "{}", *parts[2:]])
        return f"{HF_NAMES[key].format(parts[1])}.{kind}"
    return f"{HF_NAMES[module]}.{kind}"


def _shards(folder: Path) -> list[Path]:
    """The folder's safetensors files: the single one, or those that the index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise ValueError(
            f"{folder}: holds neither model.safetensors nor model.safetensors.index.json; "
            "weights are read only as safetensors, convert other formats first"
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        outside = [n for n in names if Path(n).name != n or n in ("", ".", "..") or "\\" in n]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(
            f"{index}: not a safetensors index ({type(e).__name__}: {e}); copy it again"
        ) from None
    if outside:
        raise ValueError(
            f"{index}: weight_map points outside the folder ({outside[0]!r}); entries must be "
            "plain file names beside the index"
        )
    missing = [n for n in names if not (folder / n).exists()]
    if missing:
        raise ValueError(
            f"{index}: names files that are not there: {_some(missing)}; download them again"
        )
    return [folder / n for n in names]


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _stored_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """(name, slice) of every stored tensor; a slice knows shape and dtype, and reads only when
    indexed."""
    for path in _shards(folder):
        try:
            with safe_open(path, framework="pt") as f:
                for name in f.keys():
                    yield name, f.get_slice(name)
        except (SafetensorError, OSError) as e:
            raise ValueError(
                f"{path}: cannot be read ({e}); it may be truncated, copy it again"
            ) from None


def load_checkpoint(
    path: str | os.PathLike, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Transformer:
    """The model of a Hugging Face folder, in eval mode, on `device` in `dtype` (default: as
    stored).

    Tensors go one by one from the file to the device, so that the peak is the model and its
    largest tensor. ValueError, with file, field and mend, for a folder that is missing, incomplete
    or wrong.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(
            f"{folder}: no such folder; a checkpoint is a folder with config.json and safetensors"
        )
    config = read_config(folder / "config.json")
    with torch.device("meta"):
        model = Transformer(config).eval()
    wanted = {hf_name(name): p for name, p in model.named_parameters()}  # without a tied head
    ours = {hf_name(name): name for name, _ in model.named_parameters()}

    loaded, unexpected = {}, []
    for name, stored in _stored_tensors(folder):
        tied_head = name == "lm_head.weight" and config.tie_embeddings
        if tied_head or name.endswith("rotary_emb.inv_freq"):
            continue  # follows from the rest; some exporters write it all the same
        if name not in wanted:
            unexpected.append(name)
        elif list(stored.get_shape()) != list(wanted[name].shape):
            raise ValueError(
                f"{folder}: {name} has shape {list(stored.get_shape())}, but config.json makes it "
                f"{list(wanted[name].shape)}; the two are not of one model"
            )
        else:
            value = stored[:]
            if not value.is_floating_point():
                raise ValueError(
                    f"{folder}: {name} holds {value.dtype}, not floating-point weights"
                )
            target = torch.empty(value.shape, dtype=dtype or value.dtype, device=device)
            loaded[ours[name]] = target.copy_(value)  # not a view of the file, which may yet change
    missing = [name for name in wanted if ours[name] not in loaded]
    if missing or unexpected:
        parts = [
            f"{what} tensors: {_some(names)}"
            for what, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise ValueError(
            f"{folder}: {'; '.join(parts)}; weights and config.json are not of one model"
        )
    model.load_state_dict(loaded, assign=True, strict=False)  # a tied head has no tensor of its own
    model.tie()
    return model.to(dtype or model.embed.weight.dtype)  # some folders keep their norms in fp32


def save_checkpoint(model: Transformer, path: str | os.PathLike) -> None:
    """Write the model as a Hugging Face folder: config.json and model.safetensors, in its own
    dtype.

    Each file appears whole or not at all: it is written beside its place, flushed to disk and
    renamed, so that a crash or a full disk at any moment leaves the old one. (Saving over a model
    of another shape and dying between the two files leaves a folder that is refused, not wrong.)
    OSError where the disk refuses.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {hf_name(name): p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    config = (
        json.dumps(model.config.to_hf() | {"dtype": dtype, "torch_dtype": dtype}, indent=2) + "\n"
    )
    write_atomically(
        folder / "model.safetensors", lambda tmp: save_file(tensors, tmp, {"format": "pt"})
    )
    write_atomically(folder / "config.json", lambda tmp: tmp.write_text(config, encoding="utf-8"))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """write(temporary) then fsync and rename to `path`; on any failure `path` is as it was."""
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(tmp)
        os.chmod(tmp, 0o666 & ~_umask())  # safetensors makes its files private
        with open(tmp, "rb+") as f:
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except (OSError, SafetensorError) as e:  # a full disk comes as either
        raise OSError(f"{path}: cannot be written ({e}); the previous file is untouched") from None
    finally:
        tmp.unlink(missing_ok=True)
    if os.name == "posix":  # the rename itself lives in the folder
        fd = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
