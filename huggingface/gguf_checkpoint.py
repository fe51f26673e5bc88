"""GGUF files, both ways: llama.cpp's format for a model, its tokenizer and its chat template.

    python generate.py --checkpoint FILE.gguf
    python generate.py --checkpoint DIR --save OUT.gguf                    in the checkpoint's dtype
    python generate.py --checkpoint DIR --quantize q8_0 --save OUT.gguf    or q4_0

`as_folder` presents a file, or the parts of one, as a Hugging Face folder: config.json, tokenizer
and chat template are written from the metadata (gguf_tokenizer.py), and `model.gguf` is a link,
whose tensors `stored_tensors` gives to huggingface/weights.py under their Hugging Face names.
`write` is the inverse. The two formats differ in

    q, k of architecture llama   llama.cpp rotates pairs (2i, 2i + 1), so its rows are permuted
    experts                      stacked (E, F, C) instead of one tensor per expert
    kv_b_proj of DeepSeek        two tensors per head, W_k transposed, for the absorbed form
    Mistral, Mixtral             have architecture llama, without a window
    Llama 3's RoPE scaling       a tensor of factors, rope_freqs, instead of its parameters

Q8_0 and Q4_0 have the layout of quantize.py's q8_0 and q4_0, so linear layers and experts are
loaded as they are, unless --quantize, --tp, --adapter or --offload needs them dense. Everything
else is dequantized as it is read, then --quantize applies. When it loses: a Q4_K file needs the
memory of bf16, or a second rounding.

A file is read completely or refused: an architecture, field, tensor or format that is unknown here
is a ValueError, and a config that llama.cpp would read as another one is not written. Sliding
windows become a context of their size. llama.cpp scores DeepSeek-V2's groups of experts by the
best two experts, not the best one, so its text differs there.

A file written here ends texts where its folder does: eos, eot and eom are the first of those ids,
and one more field has all, since llama.cpp also ends at tokens with certain names.

Equivalence (test_all.py): on the shipped model, ids and greedy tokens of llama.cpp in bf16, q8_0
and q4_0; for each family, its best next tokens; written and read again, the same config, tensors,
ids and chat template. Needs: torch, gguf (pip install gguf==0.19.0).
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import json
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from huggingface import gguf_tokenizer
from huggingface.gguf_file import EXACT, PACKED, TensorInfo, package, read_header
from huggingface.tokenizer import eos_ids
from model import ModelConfig, rope_frequencies

# --------------------------------------------------------------------------------------------------
# Metadata <-> config.json
# --------------------------------------------------------------------------------------------------

COMMON = {  # field of the metadata, without the architecture -> of config.json
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
HEADS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
DENSE = COMMON | dict.fromkeys(HEADS, "head_dim")
MIXTRAL = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
EXPERTS = {"expert_used_count": "num_experts_per_tok",
           "expert_feed_forward_length": "moe_intermediate_size"}  # fmt: skip
DEEPSEEK = COMMON | EXPERTS | {
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.value_length_mla": "v_head_dim",
    "rope.dimension_count": "qk_rope_head_dim",
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, str]]] = {  # model_type -> architecture, fields
    "llama": ("llama", DENSE),
    "mistral": ("llama", DENSE),
    "mixtral": ("llama", DENSE | MIXTRAL),
    "qwen2": ("qwen2", DENSE),
    "qwen3": ("qwen3", DENSE),
    "qwen3_moe": ("qwen3moe", DENSE | EXPERTS | {"expert_count": "num_experts"}),
    "deepseek_v2": ("deepseek2", DEEPSEEK),
    "deepseek_v3": ("deepseek2", DEEPSEEK),
}
YARN = {  # rope.scaling.* -> rope_scaling.*
    "factor": "factor", "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
}  # fmt: skip
# The only parameters that are recognized in rope_freqs, whatever the factor
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {  # fields that are supported with these values only
    "expert_count": (0,), "expert_used_count": (0,), "attention.causal": (True,),
    "nextn_predict_layers": (0,), "expert_group_count": (0,), "expert_group_used_count": (0,),
    # YaRN's own factors times one, which converters write
    "rope.scaling.yarn_attn_factor": (1.0,), "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
}  # fmt: skip
IGNORED = ("rope.scaling.finetuned", "tensor_data_layout")
TEXTS = ("rope.scaling.type", "tensor_data_layout")  # the other fields are numbers
DEEPSEEK_DEFAULTS = {
    "expert_group_count": 1, "expert_group_used_count": 1, "expert_shared_count": 0,
    "expert_weights_scale": 1.0, "leading_dense_block_count": 0,
}  # fmt: skip


def read_config(
    path: Path, metadata: Mapping[str, Any], tensors: Collection[str], factors: Tensor | None
) -> dict[str, Any]:
    """The config.json of a file with this metadata and these names of tensors. factors: the tensor
    rope_freqs, if the file has one."""
    arch = metadata.get("general.architecture")
    own = {k.removeprefix(f"{arch}."): x for k, x in metadata.items() if k.startswith(f"{arch}.")}
    kind = _family(arch, own)
    if kind is None:
        known = ", ".join(dict.fromkeys(arch for arch, _ in FAMILIES.values()))
        raise ValueError(f"{path}: general.architecture is {arch!r}; known: {known}")
    _check_keys(path, arch, own, metadata)
    hf = {"model_type": kind} | _read_fields(path, kind, own, len(tensors))
    tokens = metadata.get("tokenizer.ggml.tokens")
    tokens = tokens if isinstance(tokens, list) else []
    hf.setdefault("vocab_size", len(tokens))
    metadata = gguf_tokenizer.with_defaults(metadata)
    hf["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    hf["eos_token_id"] = gguf_tokenizer.end_ids(metadata)
    hf["tie_word_embeddings"] = "output.weight" not in tensors
    if arch == "llama" and kind != "mixtral":
        hf["attention_bias"] = "blk.0.attn_q.bias" in tensors
        hf["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    if kind == "qwen3_moe":
        hf["norm_topk_prob"] = True
    if factors is not None:
        hf["rope_scaling"] = _read_llama3(path, factors, hf)
    return hf


def _read_fields(path: Path, kind: str, own: dict[str, Any], n_tensors: int) -> dict[str, Any]:
    """Fields of config.json that the architecture's own metadata has. Each must be known."""
    arch, fields = FAMILIES[kind]
    hf: dict[str, Any] = {"rope_scaling": _read_rope(path, arch, own)}
    if arch == "deepseek2":
        hf |= _read_latent(own, kind)
    for key in [key for key in fields if key in own]:
        name, value = fields[key], own.pop(key)
        if hf.setdefault(name, value) != value:
            raise ValueError(f"{path}: {arch}.{key} is {value}, but {name} is {hf[name]}")
        limit = {"block_count": n_tensors, "context_length": 2**32}.get(key, 2**20)
        if type(value) is int and value > limit:
            raise ValueError(f"{path}: {arch}.{key} is {value}, more than the possible {limit}")
    for key, value in own.items():
        if key not in IGNORED and value not in NEUTRAL.get(key, ()):
            raise ValueError(f"{path}: unknown field {arch}.{key} ({value!r}) may change the model")
    return hf


def _family(arch: Any, own: Mapping[str, Any]) -> str | None:
    """config.json's model_type; Mistral's, which GGUF does not tell from Llama's, is llama."""
    if arch == "llama":
        return "mixtral" if own.get("expert_count") else "llama"
    if arch == "deepseek2":
        return "deepseek_v3" if own.get("expert_gating_func") == 2 else "deepseek_v2"
    return next((kind for kind, (name, _) in FAMILIES.items() if name == arch), None)


def _check_keys(path: Path, arch: str, own: Mapping, metadata: Mapping) -> None:
    """ValueError if a value has the wrong type, or the keys are not those of one whole model."""
    for key, value in own.items():
        if isinstance(value, list) or isinstance(value, str) != (key in TEXTS):
            raise ValueError(f"{path}: {arch}.{key} cannot be {str(value)[:60]!r}")
    optional = ("vocab_size", "attention.head_count_kv", "rope.freq_base")
    missing = [key for key in COMMON if key not in own and key not in optional]
    if missing:
        raise ValueError(f"{path}: {arch}.{missing[0]} is missing; copy the file again")
    for prefix, _, key in (name.partition(".") for name in metadata):
        if prefix != arch and key in DENSE | DEEPSEEK:
            raise ValueError(f"{path}: {prefix}.{key} does not belong to architecture {arch}")


def _read_latent(own: dict[str, Any], kind: str) -> dict[str, Any]:
    """Fields of DeepSeek's config.json. Without *_mla, key_length is that of a head; with them, of
    the latent, and head_count_kv is 1."""
    own.pop("attention.head_count_kv", None)
    own.pop("expert_gating_func", None)
    rope = own.get("rope.dimension_count")
    value = own.pop("attention.value_length", None)
    key = own.pop("attention.key_length", None)
    key = own.pop("attention.key_length_mla", key)
    own.update(DEEPSEEK_DEFAULTS | {"attention.value_length_mla": value} | own)
    hf = {
        "num_key_value_heads": own["attention.head_count"],
        "qk_nope_head_dim": key - rope if type(key) is type(rope) is int else None,
        "norm_topk_prob": own.pop("expert_weights_norm", False),
    }
    if kind == "deepseek_v2":
        hf["topk_method"] = "group_limited_greedy"  # "greedy" if there is one group
    return hf


def _read_rope(path: Path, arch: str, own: dict[str, Any]) -> dict[str, Any] | None:
    """config.json's rope_scaling."""
    key = "rope.scaling."
    values = {hf: own.pop(key + name) for name, hf in YARN.items() if key + name in own}
    kind = own.pop(f"{key}type", "linear" if values.get("factor", 1.0) != 1.0 else "none")
    log_multiplier = own.pop(f"{key}yarn_log_multiplier", None)
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"{path}: {arch}.{key}type is {kind!r}; known: none, linear, yarn")
    if log_multiplier is not None:  # 0.1 * mscale_all_dim, to which mscale is equal
        values |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * log_multiplier, 6))
    if kind == "linear":
        values = {"factor": values.get("factor")}
    return None if kind == "none" else {"rope_type": kind, **values}


def rope_factors(config: ModelConfig) -> Tensor:
    """Llama 3's scaling as in the tensor rope_freqs: what each frequency is divided by."""
    position = torch.zeros(1)
    plain = rope_frequencies(replace(config, rope_scaling=None), position)
    return plain / rope_frequencies(config, position)


def _read_llama3(path: Path, factors: Tensor, hf: dict[str, Any]) -> dict[str, Any]:
    scaling = LLAMA3 | {"factor": float(factors.max())}
    config = ModelConfig.from_hf({**hf, "rope_scaling": scaling})
    expected = rope_factors(config)
    if expected.shape != factors.shape or not torch.allclose(expected, factors, rtol=1e-3):
        raise ValueError(f"{path}: rope_freqs.weight is not Llama 3's, the only one known")
    return scaling


def write_config(config: ModelConfig, tensors: Collection[str]) -> dict[str, Any]:
    """The metadata of a config, whose file will have tensors of these names. ValueError if GGUF
    cannot represent it."""
    if config.family not in FAMILIES:
        raise ValueError(f"GGUF has no model_type {config.family!r}; known: {', '.join(FAMILIES)}")
    hf, (arch, fields) = config.to_hf(), FAMILIES[config.family]
    own = {key: hf[name] for key, name in fields.items() if hf.get(name) is not None}
    # llama.cpp has no windows in these architectures: the same up to a context of their size
    own["context_length"] = min([config.max_seq_len, *(w for w in config.windows if w)])
    if arch == "deepseek2":
        own |= {
            "attention.head_count_kv": 1,
            "attention.key_length": config.kv_lora_rank + config.rope_dim,
            "attention.value_length": config.kv_lora_rank,
            "attention.key_length_mla": config.head_dim,
            "expert_gating_func": 2 if config.scoring == "sigmoid" else 1,
            "expert_weights_norm": config.norm_topk,
        }
    rope = config.rope_scaling or {}
    if rope.get("rope_type", "llama3") != "llama3":
        own["rope.scaling.type"] = rope["rope_type"]
        for key, name in YARN.items():
            if name in rope:
                number = int if key == "original_context_length" else float
                own[f"rope.scaling.{key}"] = number(rope[name])
        if "mscale_all_dim" in rope:
            own["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    metadata = {"general.architecture": arch} | {f"{arch}.{key}": x for key, x in own.items()}
    if config.bos_id is not None:
        metadata["tokenizer.ggml.bos_token_id"] = config.bos_id
    metadata |= gguf_tokenizer.write_end_ids(config.eos_ids)
    factors = rope_factors(config) if "rope_freqs.weight" in tensors else None
    back = ModelConfig.from_hf(read_config(Path(arch), metadata, tensors, factors))
    names = set(ModelConfig.__dataclass_fields__) - {"windows", "max_seq_len", "n_mtp_layers"}
    names -= {"family"} if config.family == "mistral" else set()
    if lost := sorted(name for name in names if getattr(back, name) != getattr(config, name)):
        raise ValueError(f"GGUF cannot represent this model's {', '.join(lost)}")
    return metadata


# --------------------------------------------------------------------------------------------------
# Tensors
# --------------------------------------------------------------------------------------------------

LINEARS = {  # tensor of a layer -> module of a Hugging Face layer
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
LAYER = LINEARS | {
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}
STACKS = {"gate": "w1", "up": "w3", "down": "w2"}  # ffn_{}_exps; Mixtral's name of an expert's


def hf_names(hf: Mapping[str, Any]) -> dict[str, str]:
    """Name in a GGUF file -> in a Hugging Face checkpoint, but for experts and kv_b_proj."""
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    names = {f"{name}.weight": f"{module}.weight" for name, module in names.items()}
    for i in range(hf["num_hidden_layers"]):
        for stem, module in LAYER.items():
            if hf["model_type"] == "mixtral" and module == "mlp.gate":
                module = "block_sparse_moe.gate"
            for leaf in ("weight", "bias"):
                names[f"blk.{i}.{stem}.{leaf}"] = f"model.layers.{i}.{module}.{leaf}"
        names[f"blk.{i}.exp_probs_b.bias"] = f"model.layers.{i}.mlp.gate.e_score_correction_bias"
    return names


def expert_name(hf: Mapping[str, Any], layer: int, e: int, part: str) -> str:
    """Name of an expert's weight in a Hugging Face checkpoint."""
    if hf["model_type"] == "mixtral":
        return f"model.layers.{layer}.block_sparse_moe.experts.{e}.{STACKS[part]}.weight"
    return f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight"


def permute_heads(hf: Mapping[str, Any], name: str, t: Tensor, back: bool = False) -> Tensor:
    """Rows of q and k in llama.cpp's order for architecture llama: of each head, dims 0, D/2, 1,
    D/2 + 1, ...; back: the inverse. Other tensors are returned as they are."""
    part = re.fullmatch(r"blk\.\d+\.attn_([qk])\..*", name)
    if part is None or FAMILIES[hf["model_type"]][0] != "llama":
        return t
    heads = hf["num_attention_heads" if part[1] == "q" else "num_key_value_heads"]
    halves = (heads, -1, 2) if back else (heads, 2, -1)
    return t.unflatten(0, halves).transpose(1, 2).reshape(t.shape)


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a GGUF file with the interface of weights.py's StoredTensor."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # safetensors' name
    load: Callable[[], Tensor]

    def read(self, rows: Sequence[int] | None = None, shard: Any = None) -> Tensor:
        """The tensor, or these rows, or its TP shard."""
        t = self.load()
        if shard is not None:
            return t.narrow(shard.dim, shard.start, shard.stop - shard.start)
        return t if rows is None else t[list(rows)]


LINK = "model.gguf"  # in a folder of as_folder: to the file
Entries = Iterator[tuple[str, Sequence[int], str, Callable[[], Tensor]]]  # GGUFTensor's, but path
Outputs = Iterator[tuple[str, Sequence[Tensor]]]


def packable(hf: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Linear layers and stacks of experts whose format is a scheme of quantize.py: name in a
    Hugging Face checkpoint -> scheme."""
    types = {name: info.type for name, info in tensors.items() if info.type in PACKED}
    modules = {"output": "lm_head"}
    for i in range(hf["num_hidden_layers"]):
        modules |= {f"blk.{i}.{stem}": f"model.layers.{i}.{hf}" for stem, hf in LINEARS.items()}
        modules[f"blk.{i}.ffn_down_exps"] = f"model.layers.{i}.mlp.w_down"
        gate, up = (types.get(f"blk.{i}.ffn_{part}_exps.weight") for part in ("gate", "up"))
        if gate == up:
            modules[f"blk.{i}.ffn_gate_exps"] = f"model.layers.{i}.mlp.w_gate_up"
    names = {f"{stem}.weight": module for stem, module in modules.items()}
    return {module: PACKED[types[name]] for name, module in names.items() if name in types}


def stored_tensors(folder: Path) -> dict[str, GGUFTensor]:
    """The tensors of a folder of `as_folder`, by their Hugging Face names."""
    hf = json.loads((folder / "config.json").read_text())
    path = folder / LINK
    rest = dict(read_header(path.resolve()).tensors)
    packed = hf.get("quantization_config", {}).get("gguf", {})
    rest.pop("rope_freqs.weight", None)  # in config.json
    # Each takes its tensors from `rest`
    entries = [*_dense(hf, rest, packed), *_experts(hf, rest, packed), *_latents(hf, rest)]
    if rest:
        raise ValueError(f"{path}: {next(iter(rest))} is a tensor that {hf['model_type']} lacks")
    return {name: GGUFTensor(path, name, tuple(shape), *x) for name, shape, *x in entries}


def _dense(hf: dict, rest: dict[str, TensorInfo], packed: Mapping[str, str]) -> Entries:
    for name, hf_name in hf_names(hf).items():
        if (info := rest.pop(name, None)) is None:
            continue
        order = partial(permute_heads, hf, name, back=True)
        if (module := hf_name.removesuffix(".weight")) in packed:
            yield from _packed(module, [info], order)
        else:
            load = lambda info=info, order=order: order(info.read())
            yield hf_name, info.shape, info.dtype, load


def _packed(module: str, infos: list[TensorInfo], order: Callable = lambda t: t) -> Entries:
    """qweight and scales of a module whose rows are those of these tensors."""
    *stack, _, K = infos[0].shape
    rows = sum(info.shape[-2] for info in infos)
    qweight = ("qweight", K, "I8") if infos[0].type == "Q8_0" else ("qweight", K // 2, "U8")
    for leaf, width, dtype in (qweight, ("scales", K // 32, "F16")):
        load = lambda leaf=leaf: order(torch.cat([info.packed(leaf) for info in infos], -2))
        yield f"{module}.{leaf}", (*stack, rows, width), dtype, load


def _experts(hf: dict, rest: dict[str, TensorInfo], packed: Mapping[str, str]) -> Entries:
    for i in range(hf["num_hidden_layers"]):
        parts = {part: rest.pop(f"blk.{i}.ffn_{part}_exps.weight", None) for part in STACKS}
        for stack, of_stack in (("w_gate_up", ("gate", "up")), ("w_down", ("down",))):
            infos = [parts[part] for part in of_stack if parts[part] is not None]
            if (module := f"model.layers.{i}.mlp.{stack}") in packed:
                yield from _packed(module, infos)
                continue
            for part, info in zip(of_stack, infos):
                for e in range(info.shape[0] if len(info.shape) == 3 else 0):
                    load = partial(info.read, e)
                    yield expert_name(hf, i, e, part), info.shape[1:], info.dtype, load


def _latents(hf: dict, rest: dict[str, TensorInfo]) -> Entries:
    """kv_b_proj (H * (Dk + Dv), R) from W_k (H, R, Dk) and W_v (H, Dv, R)."""
    for i in range(hf["num_hidden_layers"]):
        k, v = (rest.pop(f"blk.{i}.attn_{part}_b.weight", None) for part in "kv")
        if k is not None and v is not None and len(k.shape) == len(v.shape) == 3:
            shape = (k.shape[0] * (k.shape[2] + v.shape[1]), v.shape[2])
            load = lambda k=k, v=v: torch.cat((k.read().mT, v.read()), 1).flatten(0, 1)
            yield f"model.layers.{i}.self_attn.kv_b_proj.weight", shape, k.dtype, load


def outputs(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Outputs:
    """The tensors of a GGUF file, from those of weights.hf_tensors: (name, [values]), or [qweight,
    scales]. Multi-token prediction is left out. ValueError if GGUF has no place for one."""
    hf, rest = config.to_hf(), dict(tensors)
    take = lambda name: [rest.pop(f"{name}.{leaf}") for leaf in ("qweight", "scales")]
    for name, hf_name in hf_names(hf).items():
        module = hf_name.removesuffix(".weight")
        if "kv_b_proj" not in module and (hf_name in rest or f"{module}.qweight" in rest):
            parts = [rest.pop(hf_name)] if hf_name in rest else take(module)
            yield name, [permute_heads(hf, name, t) for t in parts]
    for i in config.moe_layers:
        parts = {}
        for part in STACKS:
            names = [expert_name(hf, i, e, part) for e in range(config.n_experts)]
            if names[0] in rest:
                parts[part] = [torch.stack([rest.pop(name) for name in names])]
        if "gate" not in parts:
            both = take(f"model.layers.{i}.mlp.w_gate_up")
            parts["gate"], parts["up"] = zip(*(t.chunk(2, 1) for t in both))
        if "down" not in parts:
            parts["down"] = take(f"model.layers.{i}.mlp.w_down")
        for part in STACKS:
            yield f"blk.{i}.ffn_{part}_exps.weight", parts[part]
    for i in range(config.n_layers if config.kv_lora_rank else 0):
        kv = rest.pop(f"model.layers.{i}.self_attn.kv_b_proj.weight")
        sizes = (config.qk_nope_head_dim, config.v_head_dim)
        k, v = kv.unflatten(0, (config.n_heads, -1)).split(sizes, 1)
        yield f"blk.{i}.attn_k_b.weight", [k.mT]
        yield f"blk.{i}.attn_v_b.weight", [v]
    if config.rope_scaling and config.rope_scaling["rope_type"] == "llama3":
        yield "rope_freqs.weight", [rope_factors(config)]
    mtp = tuple(f"model.layers.{config.n_layers + i}." for i in range(config.n_mtp_layers))
    lost = [name for name in rest if not name.startswith(mtp or ("mtp.",))]
    if lost:
        raise ValueError(f"GGUF has no place for {lost[0]}")


def encode(name: str, parts: Sequence[Tensor]) -> tuple[str, Tensor]:
    """Type and bytes (..., row_bytes) of a tensor of `outputs`. Vectors and routers are fp32, as
    llama.cpp expects."""
    if len(parts) == 1:
        exact = parts[0].dim() > 1 and "ffn_gate_inp" not in name
        dtype = parts[0].dtype if exact else torch.float32
        kind = {dtype: kind for kind, dtype in EXACT.items()}[dtype]
        return kind, parts[0].detach().cpu().to(dtype).contiguous().view(torch.uint8)
    qweight, scales = (t.cpu() for t in parts)
    if scales.dtype != torch.float16:
        raise ValueError(f"GGUF stores q8_0 and q4_0, but {name} is quantized to another scheme")
    blocks = qweight.view(torch.uint8).unflatten(-1, (scales.shape[-1], -1))
    data = torch.cat((scales[..., None].contiguous().view(torch.uint8), blocks), -1).flatten(-2)
    return "Q8_0" if qweight.dtype == torch.int8 else "Q4_0", data


# --------------------------------------------------------------------------------------------------
# Files <-> folders
# --------------------------------------------------------------------------------------------------


@contextmanager
def as_folder(path: Path, packed: bool = True) -> Iterator[Path]:
    """A temporary Hugging Face folder of a GGUF file, for load_checkpoint, load_tokenizer and
    load_chat_template; any other path as it is. packed: linear layers and experts in Q8_0 and Q4_0
    stay quantized; open them with generate.py. A ValueError inside names the file instead of the
    folder."""
    if not is_gguf(path):
        yield path
        return
    package()
    with tempfile.TemporaryDirectory(prefix="gguf-") as name:
        folder = Path(name)
        try:
            header = read_header(path)
            factors = header.tensors.get("rope_freqs.weight")
            factors = None if factors is None else factors.read()
            hf = read_config(path, header.metadata, header.tensors, factors)
            if packed and (schemes := packable(hf, header.tensors)):
                hf["quantization_config"] = {
                    "quant_method": "sheaf", "version": 1, "scheme": "gguf", "gguf": schemes,
                }  # fmt: skip
            (folder / "config.json").write_text(json.dumps(hf))
            for file, data in gguf_tokenizer.read(path, header.metadata).items():
                (folder / file).write_bytes(data)
            (folder / LINK).symlink_to(path.absolute())
            for part in {tensor.path for tensor in header.tensors.values()} - {path}:
                (folder / part.name).symlink_to(part.absolute())  # it is hashed too
            yield folder
        except ValueError as e:
            text = str(e).replace(f"{folder}/{LINK}", str(path))
            raise ValueError(text.replace(str(folder), str(path))) from None


def is_gguf(path: Path) -> bool:
    """Whether a checkpoint is given as a GGUF file, by its name."""
    return path.suffix == ".gguf" and not path.is_dir()


def source_path(folder: Path) -> Path:
    """The GGUF file of which as_folder made this folder; any other folder as it is."""
    link = folder / LINK
    is_ours = link.is_symlink() and os.path.isabs(os.readlink(link))
    return Path(os.readlink(link)) if is_ours else folder


def model_name(checkpoint: Path) -> str:
    """How a server names a checkpoint: its folder's name, or its GGUF file's without the ending."""
    path = source_path(checkpoint)
    if path.suffix != ".gguf":
        return path.resolve().name
    return re.sub(r"-00001-of-\d{5}$", "", path.stem)


def write(path: Path, config: ModelConfig, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write a GGUF file of the tensors of weights.hf_tensors, with the tokenizer and chat template
    of a Hugging Face folder. ValueError, before the file is made, if GGUF cannot represent them."""
    gguf = package()
    metadata = write_config(config, [name for name, _ in outputs(config, tensors)])
    metadata |= gguf_tokenizer.write(folder, config.vocab_size)
    own = metadata.get("tokenizer.ggml.eos_token_id")
    ids = [id for id in eos_ids(folder, config.eos_ids) if id in config.eos_ids or id != own]
    metadata |= gguf_tokenizer.write_end_ids(ids, own)
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture"))
    for name, parts in outputs(config, tensors):
        kind, data = encode(name, parts)
        kind = gguf.GGMLQuantizationType[kind]
        writer.add_tensor_info(name, data.shape, np.dtype(np.uint8), data.nbytes, kind)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
           str: writer.add_string, list: writer.add_array}  # fmt: skip
    for key, value in metadata.items():
        add[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, parts in outputs(config, tensors):
        writer.write_tensor_data(encode(name, parts)[1].numpy())
    writer.close()
