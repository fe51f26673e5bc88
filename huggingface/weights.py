"""Load and save Hugging Face checkpoints: a folder with config.json and safetensors files.

`load_checkpoint` checks all safetensors headers, then copies one tensor at a time into the model:
peak memory is the model plus its largest tensor. `save_checkpoint` writes temporary files and
renames them, so a crash leaves the old checkpoint intact. A folder that is incomplete, truncated or
does not match its config.json raises a ValueError of one line.

config.json is converted in model.py (`ModelConfig.from_hf`, `to_hf`); this file maps the names of
tensors. Weights are read and written as safetensors only. Needs: torch, safetensors, model.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, count, product
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from huggingface.tokenizer import diagnose_file, read_json
from model import FP8_BLOCK, ModelConfig, Transformer

# Module or parameter -> its name in a Hugging Face checkpoint; ".weight" and ".bias" of a module
# keep their names. {} is the layer, a second {} the expert. Several names: tensors of the
# checkpoint that are concatenated along the rows of one parameter (gate and up of an expert).
HF_NAMES: dict[str, str | tuple[str, ...]] = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layers.{}.attention_norm": "model.layers.{}.input_layernorm",
    "layers.{}.attention.q_proj": "model.layers.{}.self_attn.q_proj",
    "layers.{}.attention.k_proj": "model.layers.{}.self_attn.k_proj",
    "layers.{}.attention.v_proj": "model.layers.{}.self_attn.v_proj",
    "layers.{}.attention.o_proj": "model.layers.{}.self_attn.o_proj",
    "layers.{}.attention.q_norm": "model.layers.{}.self_attn.q_norm",
    "layers.{}.attention.k_norm": "model.layers.{}.self_attn.k_norm",
    "layers.{}.attention.temperature": "model.layers.{}.self_attn.temperature",
    "layers.{}.attention.q_conv": "model.layers.{}.self_attn.q_conv",
    "layers.{}.attention.k_conv": "model.layers.{}.self_attn.k_conv",
    "layers.{}.attention.q_a_proj": "model.layers.{}.self_attn.q_a_proj",
    "layers.{}.attention.q_a_norm": "model.layers.{}.self_attn.q_a_layernorm",
    "layers.{}.attention.q_b_proj": "model.layers.{}.self_attn.q_b_proj",
    "layers.{}.attention.kv_a_proj": "model.layers.{}.self_attn.kv_a_proj_with_mqa",
    "layers.{}.attention.kv_a_norm": "model.layers.{}.self_attn.kv_a_layernorm",
    "layers.{}.attention.kv_b_proj": "model.layers.{}.self_attn.kv_b_proj",
    "layers.{}.cross_attention_norm": "model.layers.{}.cross_attn_layernorm",
    "layers.{}.cross_attention.q_proj": "model.layers.{}.cross_attn.q_proj",
    "layers.{}.cross_attention.k_proj": "model.layers.{}.cross_attn.k_proj",
    "layers.{}.cross_attention.v_proj": "model.layers.{}.cross_attn.v_proj",
    "layers.{}.cross_attention.o_proj": "model.layers.{}.cross_attn.o_proj",
    "layers.{}.mlp_norm": "model.layers.{}.post_attention_layernorm",
    "layers.{}.mlp.gate_proj": "model.layers.{}.mlp.gate_proj",
    "layers.{}.mlp.up_proj": "model.layers.{}.mlp.up_proj",
    "layers.{}.mlp.down_proj": "model.layers.{}.mlp.down_proj",
    "layers.{}.mlp.router": "model.layers.{}.mlp.gate.weight",
    "layers.{}.mlp.expert_bias": "model.layers.{}.mlp.gate.e_score_correction_bias",
    "layers.{}.mlp.w_gate_up": (
        "model.layers.{}.mlp.experts.{}.gate_proj.weight",
        "model.layers.{}.mlp.experts.{}.up_proj.weight",
    ),
    "layers.{}.mlp.w_down": ("model.layers.{}.mlp.experts.{}.down_proj.weight",),
    "layers.{}.mlp.shared.gate_proj": "model.layers.{}.mlp.shared_experts.gate_proj",
    "layers.{}.mlp.shared.up_proj": "model.layers.{}.mlp.shared_experts.up_proj",
    "layers.{}.mlp.shared.down_proj": "model.layers.{}.mlp.shared_experts.down_proj",
    "mtp.{}.embed_norm": "model.layers.{}.enorm",  # in the checkpoint, layer n_layers + depth
    "mtp.{}.hidden_norm": "model.layers.{}.hnorm",
    "mtp.{}.proj": "model.layers.{}.eh_proj",
    "mtp.{}.norm": "model.layers.{}.shared_head.norm",
}
MIXTRAL_NAMES = {
    "layers.{}.mlp.router": "model.layers.{}.block_sparse_moe.gate.weight",
    "layers.{}.mlp.w_gate_up": (
        "model.layers.{}.block_sparse_moe.experts.{}.w1.weight",
        "model.layers.{}.block_sparse_moe.experts.{}.w3.weight",
    ),
    "layers.{}.mlp.w_down": ("model.layers.{}.block_sparse_moe.experts.{}.w2.weight",),
}
FAMILY_NAMES = {"mixtral": MIXTRAL_NAMES}  # overrides of HF_NAMES by family


def read_config(path: str | os.PathLike) -> ModelConfig:
    """The ModelConfig of a config.json file. ValueError names the file, the field and the fix."""
    path = Path(path)
    check_kind(path.parent if path.name == "config.json" else path)
    try:
        hf = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ValueError(
            f"{path}: {e.strerror or e}; expected a Hugging Face config.json"
        ) from None
    except (ValueError, RecursionError) as e:
        raise ValueError(
            f"{path}: not valid JSON ({e}); it may be half-written, copy it again"
        ) from None
    if not isinstance(hf, dict):
        raise ValueError(f"{path}: must hold one JSON object")
    try:
        return ModelConfig.from_hf(hf)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


def check_folder(path: Path) -> None:
    """ValueError, with what it is instead, unless a checkpoint is the folder of a model."""
    check_kind(path)
    if not path.is_dir():
        what = "a file; give its folder" if path.exists() else "no such folder; download it first"
        raise ValueError(
            f"{path}: {what} (a checkpoint is a folder with config.json and safetensors files)"
        )


def check_kind(path: Path) -> None:
    """ValueError for a LoRA adapter, and for a GGUF file that gguf.as_folder has not opened."""
    adapter = path / "adapter_config.json"
    if adapter.exists() and not (path / "config.json").exists():
        raise ValueError(
            f"{path}: holds a LoRA adapter ({adapter.name}), not a model; give the folder of its "
            f"base model, and --adapter {path}"
        )
    if path.suffix == ".gguf" and path.is_file():
        raise ValueError(
            f"{path}: a GGUF file, which only generate.py's flags and serving.cluster open; give "
            "the model's Hugging Face folder"
        )


def hf_tensors(model: Transformer) -> dict[str, Tensor]:
    """Checkpoint tensor name -> the model's tensor: a parameter, a buffer, or a view of stacked
    experts. Loading copies into these tensors, saving reads them."""
    tensors = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        tensors |= dict(_hf_entries(model.config, name, tensor, _local_expert_ids(model, name)))
    return tensors


def hf_modules(model: Transformer) -> dict[str, str]:
    """Modules with a weight, with or without LoRA: name in the Transformer -> Hugging Face name."""
    hf_names = {id(tensor): name for name, tensor in hf_tensors(model).items()}
    return {
        name.removesuffix(".weight"): hf_names[id(p)].removesuffix(".weight")
        for name, p in model.named_parameters(remove_duplicate=False)
        if name.endswith(".weight") and id(p) in hf_names
    }


def _full_tensors(model: Transformer) -> dict[str, Tensor]:
    """hf_tensors, with full-sized meta tensors in place of this process's shards."""
    tensors = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if (shard := model.tp_shards.get(name)) is not None:
            tensor = torch.empty(shard.full_shape(tensor.shape), dtype=tensor.dtype, device="meta")
        if _local_expert_ids(model, name) is not None:
            E = len(model.get_submodule(name.rpartition(".w_")[0]).router)
            shape = (E, *tensor.shape[1:])
            tensor = torch.empty(shape, dtype=tensor.dtype, device="meta")
        tensors |= dict(_hf_entries(model.config, name, tensor))
    return tensors


def _tensors_by_part(model: Transformer) -> dict[str, dict[str, Tensor]]:
    """_full_tensors by part of the model: each layer, embedding, norm, head, and all of MTP."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        part = ".".join(name.split(".")[: 2 if name.startswith("layers.") else 1])
        parts.setdefault(part, {}).update(_hf_entries(model.config, name, tensor))
    return parts


def _has_part(model: Transformer, part: str) -> bool:
    name, _, layer = part.partition(".")
    module = getattr(model, name)
    if isinstance(module, nn.ModuleList):
        return layer in dict(module.named_children()) if layer else len(module) > 0
    return module is not None


def _local_expert_ids(model: Transformer, name: str) -> Sequence[int] | None:
    """local_expert_ids of the MoE whose stacked expert weight has this name, else None."""
    stack = re.fullmatch(r"(.+)\.w_(?:gate_up|down)(?:\.\w+)?", name)
    return None if stack is None else model.get_submodule(stack[1]).local_expert_ids


def _hf_entries(
    config: ModelConfig, name: str, tensor: Tensor, expert_ids: Sequence[int] | None = None
) -> list[tuple[str, Tensor]]:
    """(checkpoint name, view) for each checkpoint tensor that this tensor is made of. An expert
    that is stacked twice gives two views of one name."""
    names = HF_NAMES | FAMILY_NAMES.get(config.family, {})
    kind, number, block, rest = re.fullmatch(
        r"(?:(layers|mtp)\.(\d+)\.)?(block\.)?(.+)", name
    ).groups()
    if kind is not None:
        rest = f"{'layers' if block else kind}.{{}}.{rest}"
        number = int(number) + (config.n_layers if kind == "mtp" else 0)
    module, _, leaf = rest.rpartition(".")
    hf_name = names.get(rest) or names[module]
    if rest not in names:  # .weight or .bias, or a tensor of a quantized module
        hf_name = f"{hf_name if isinstance(hf_name, str) else 'model.' + module}.{leaf}"
    if isinstance(hf_name, str):
        return [(hf_name.format(number), tensor)]
    expert_ids = range(len(tensor)) if expert_ids is None else expert_ids
    return [
        (block_name.format(number, e), rows)
        for e, expert in zip(expert_ids, tensor, strict=True)
        for block_name, rows in zip(hf_name, expert.chunk(len(hf_name)), strict=True)
    ]


def _shard_files(folder: Path) -> dict[Path, set[str] | None]:
    """The folder's safetensors files -> the tensors that the index lists for each; None for the
    single file of a folder without index."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if os.path.lexists(single):  # a link to a missing file is an error
        return {single: None}
    if not os.path.lexists(index):
        raise ValueError(
            f"{folder}: holds neither model.safetensors nor model.safetensors.index.json; "
            "weights are read only as safetensors, convert other formats first"
        )
    shards: dict[str, set[str]] = {}
    try:
        for tensor, name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            shards.setdefault(name, set()).add(tensor)
        outside = [n for n in shards if Path(n).name != n or n in ("", ".", "..") or "\\" in n]
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as e:
        raise ValueError(
            f"{index}: not a safetensors index ({type(e).__name__}: {e}); copy it again"
        ) from None
    if outside:
        raise ValueError(
            f"{index}: weight_map points outside the folder ({outside[0]!r}); entries must be "
            "plain file names beside the index"
        )
    missing = [n for n in sorted(shards) if not (folder / n).exists()]
    if missing:
        raise ValueError(
            f"{index}: lists missing files: {_abbreviate(missing)}; download them again"
        )
    return {folder / n: shards[n] for n in sorted(shards)}


def _abbreviate(names: list[str]) -> str:
    shown = [name if name.isprintable() else repr(name) for name in names[:8]]
    return ", ".join(shown) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


INV_FREQ = "rotary_emb.inv_freq"  # of old checkpoints; computed from config.json
# Supported stored dtypes -> the dtype of the loaded model, by default
STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.bfloat16,
}
# Stored dtypes that are loaded unconverted, if a module's tensor has this dtype (quantized modules)
EXACT_DTYPES = {
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "F8_E4M3": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file, as its header describes it."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # safetensors' name: F32, BF16, F8_E4M3, ...

    def read(self, rows: Sequence[int] | None = None, shard: Any = None) -> Tensor:
        """A view of the file, or a copy of these rows, or of the TP shard. Each call opens the file
        again: a mapping that stays open keeps every page it has read in memory."""
        with _open_safetensors(self.path) as f:
            if rows is None and shard is None:
                return f.get_tensor(self.name)
            data = f.get_slice(self.name)
            if shard is not None:
                return data[(slice(None),) * shard.dim + (slice(shard.start, shard.stop),)]
            return torch.cat([data[i : i + 1] for i in rows])


@dataclass(frozen=True)
class ExpertTensor(StoredTensor):
    """Rows of one expert in a stored stack (E, rows, columns), whose name it has."""

    expert: int
    first_row: int

    def read(self, rows: Sequence[int] | None = None, shard: Any = None) -> Tensor:
        """A copy of the rows, or of their TP shard."""
        own = slice(self.first_row, self.first_row + self.shape[0])
        with _open_safetensors(self.path) as f:
            data = f.get_slice(self.name)[self.expert : self.expert + 1, own][0]
        return (
            data if shard is None else data.narrow(shard.dim, shard.start, shard.stop - shard.start)
        )


def _split_experts(
    stored: dict[str, StoredTensor], config: ModelConfig
) -> dict[str, StoredTensor]:  # fmt: skip
    """Experts that transformers 5 has saved in stacks (save_original_format=False) under the names
    of single ones, and other tensors as they are. A stack has the rows of gate, then of up."""
    names, split = HF_NAMES | FAMILY_NAMES.get(config.family, {}), {}
    for name, tensor in stored.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.(experts|gate)\.(\w+)", name)
        if match is None or (match[2] == "experts") != (len(tensor.shape) == 3):
            split[name] = tensor
        elif match[2] == "gate":  # its module has another name in Mixtral
            router = names["layers.{}.mlp.router"].format(match[1])
            split[router if match[3] == "weight" else name] = tensor
        else:
            parts = names[f"layers.{{}}.mlp.w_{match[3].removesuffix('_proj')}"]
            shape = (tensor.shape[1] // len(parts), tensor.shape[2])
            for e, (i, part) in product(range(tensor.shape[0]), enumerate(parts)):
                at = e, i * shape[0]
                expert = ExpertTensor(tensor.path, name, shape, tensor.dtype, *at)
                split[part.format(match[1], e)] = expert
    return split


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as f:
            yield f
    except OSError as e:
        raise ValueError(f"{path}: cannot be read ({e}); copy it again") from None
    except SafetensorError as e:
        with open(path, "rb") as file:
            why = diagnose_file(file.read(100))
        raise ValueError(f"{path}: cannot be read ({e}); {why}") from None


def _stored_tensors(folder: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """All tensors of the folder, read from the headers only. ValueError if a file lacks a tensor
    that the index lists and the model needs, or if two have the same."""
    if (folder / "model.gguf").exists() and not any(folder.glob("*.safetensors")):
        from huggingface.gguf_checkpoint import stored_tensors

        return stored_tensors(folder)
    stored: dict[str, StoredTensor] = {}
    tied = ("model.embed_tokens.weight", "lm_head.weight") if config.tie_embeddings else ()
    optional = {*_duplicate_tensors(config), *tied}
    for path, expected in _shard_files(folder).items():
        with _open_safetensors(path) as f:
            for name in f.keys():
                if name in stored:
                    raise ValueError(
                        f"{path}: {name} is in {stored[name].path.name} too; the shards are of "
                        "different models, download all of them and the index again"
                    )
                data = f.get_slice(name)
                stored[name] = StoredTensor(path, name, tuple(data.get_shape()), data.get_dtype())
            lacking = (expected or set()) - set(f.keys()) - optional
        if lacking := sorted(name for name in lacking if not name.endswith(INV_FREQ)):
            raise ValueError(
                f"{path}: lacks tensors that model.safetensors.index.json lists "
                f"({_abbreviate(lacking)}); download it and the index again"
            )
    return _split_experts(stored, config)


def load_checkpoint(
    path: str | os.PathLike,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    prepare: Callable[[Transformer], Any] | None = None,
    convert_module: Callable[[str, nn.Module], nn.Module] | None = None,
) -> Transformer:
    """Load a Hugging Face folder as a Transformer in eval mode, on `device`, in `dtype` (default:
    dtype of the stored embedding).

    All headers are checked first; then tensors are copied one by one, so peak memory is the model
    plus its largest tensor. FP8 weights with block scales (DeepSeek-V3) are dequantized. ValueError
    names the file, the field and the fix if the folder is missing, incomplete or wrong.

    prepare(model) is called with the model on the meta device. It may replace modules (the
    checkpoint must then hold the new modules' tensors) and shard the model: reduce stacked expert
    weights to MoE.local_expert_ids, shard parameters and list them in Transformer.tp_shards, and
    drop layers, embedding, norm or head. Only this process's shards are read, but all headers are
    checked, so that every process rejects an incomplete folder.
    convert_module(name, module) is called when a module's own tensors are loaded, before the next
    are read, and returns the module to use instead. Quantizing here never needs the whole model in
    `dtype`. It is not called for a module that shares a parameter with an earlier one.
    """
    folder = Path(path)
    check_folder(folder)
    config = read_config(folder / "config.json")
    stored = _stored_tensors(folder, config)
    L = config.n_layers
    if not any(name.startswith(f"model.layers.{L}.") for name in stored):
        config = replace(config, n_mtp_layers=0)  # transformers does not save MTP layers
    with torch.device("meta"):
        model = Transformer(config).eval()
    dropped = {}
    if prepare is not None:
        for p in model.parameters():
            p.data = p.data.to(dtype or _stored_dtype(stored))
        dropped = _tensors_by_part(model)
        prepare(model)
        dropped = {part: tensors for part, tensors in dropped.items() if not _has_part(model, part)}
    wanted = {name: t for tensors in dropped.values() for name, t in tensors.items()}
    plan = _match_tensors(folder, stored, wanted | _full_tensors(model), config)
    _load_tensors(model, plan, stored, device, dtype or _stored_dtype(stored), convert_module)
    _check_duplicates(folder, stored, model)
    return model


def _stored_dtype(stored: dict[str, StoredTensor]) -> torch.dtype:
    embed = stored.get("model.embed_tokens.weight") or stored.get("lm_head.weight")
    return STORED_DTYPES.get(embed and embed.dtype, torch.float32)


@torch.no_grad()
def _load_tensors(
    model: Transformer,
    plan: dict[str, StoredTensor],
    stored: dict[str, StoredTensor],
    device: torch.device | str,
    dtype: torch.dtype,
    convert_module: Callable[[str, nn.Module], nn.Module] | None,
) -> None:
    """For each module: allocate its tensors, read them, call convert_module."""
    made: dict[Tensor, nn.Parameter] = {}
    modules = dict(model.named_modules())
    size = sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    bar = progress_bar(size, "loading")
    users = Counter(p for m in modules.values() for p in m.parameters(recurse=False))
    for name, module in modules.items():
        shares = any(p in made for p in module.parameters(recurse=False))
        _allocate_module(module, device, dtype, made)
        own = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        for leaf, tensor in () if shares else own:
            bar.update(tensor.numel())
            full_name = f"{name}.{leaf}"
            expert_ids = _local_expert_ids(model, full_name)
            tp_shard = model.tp_shards.get(full_name)
            for stored_name, target in _hf_entries(model.config, full_name, tensor, expert_ids):
                shard = tp_shard
                if shard is not None and target is not tensor:  # one expert of a stack
                    shard = replace(shard, dim=shard.dim - 1)
                scale = stored.get(f"{stored_name}_scale_inv")
                if scale is None:
                    # of experts that are stored as one tensor, read the local ones
                    rows = expert_ids if target is tensor else None
                    target.copy_(plan[stored_name].read(rows, shard))
                elif shard is None:
                    _dequantize(plan[stored_name].read(), scale.read(), target)
                else:  # a shard may end inside a block of scales
                    full = target.new_empty(plan[stored_name].shape)
                    _dequantize(plan[stored_name].read(), scale.read(), full)
                    target.copy_(shard.slice(full))
        new = module if convert_module is None or shares else convert_module(name, module)
        if new is not module:
            parent, _, leaf = name.rpartition(".")
            setattr(modules[parent], leaf, new)
            modules[name] = new
        made = {p: new for p, new in made.items() if users[p] > 1}  # only shared ones are needed
    bar.close()


def progress_bar(size: int, what: str) -> tqdm:
    """A bar of `size` weights on rank 0's terminal, if it takes longer than 2 seconds."""
    disable = True if os.environ.get("RANK", "0") != "0" else None  # None: unless it is a terminal
    return tqdm(total=size, desc=what, unit="", unit_scale=True, delay=2, leave=False,
                disable=disable)  # fmt: skip


def _match_tensors(
    folder: Path, stored: dict[str, StoredTensor], wanted: dict[str, Tensor], config: ModelConfig
) -> dict[str, StoredTensor]:
    """Wanted tensor -> stored tensor. ValueError unless names and shapes match and the dtypes are
    supported."""
    plan = {name: stored[name] for name in wanted if name in stored}
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    if config.tie_embeddings and embed not in stored and head in stored:
        plan[embed] = stored[head]  # some exporters save only lm_head of the tied pair
    elif config.tie_embeddings and head in wanted and embed in stored:
        plan[head] = stored[embed]  # the last pipeline stage has its own copy
    scaled = [n for n, s in plan.items() if s.dtype == "F8_E4M3" and n.endswith(".weight")]
    if not any("scale" in name for name in stored) and not _quantization(folder):
        scaled = []  # a plain cast to FP8
    derived = {f"{name}_scale_inv" for name in scaled}
    derived |= {name for name in stored if name.endswith(INV_FREQ)}
    derived |= set(_duplicate_tensors(config))
    missing = [name for name in wanted if name not in plan]
    missing += [name for name in derived if name.endswith("_scale_inv") and name not in stored]
    unexpected = [name for name in stored if name not in plan and name not in derived]
    if missing or unexpected:
        parts = [
            f"{what} tensors: {_abbreviate(names)}"
            for what, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        why = _mismatch_reason(folder, stored, missing)
        raise ValueError(f"{folder}: {'; '.join(parts)}; {why}")
    for name, s in plan.items():
        if s.shape != tuple(wanted[name].shape):
            raise ValueError(
                f"{s.path}: {name} has shape {list(s.shape)}, but config.json implies "
                f"{list(wanted[name].shape)}; weights and config.json do not match"
            )
        exact = wanted[name].dtype in EXACT_DTYPES.values()
        known = [d for d, t in EXACT_DTYPES.items() if t == wanted[name].dtype]
        if s.dtype not in (known := known if exact else STORED_DTYPES):
            raise ValueError(f"{s.path}: {name} is {s.dtype}; known: {', '.join(known)}")
        blocks = tuple(-(-n // FP8_BLOCK) for n in s.shape)
        if name in scaled and stored[f"{name}_scale_inv"].shape != blocks:
            raise ValueError(f"{s.path}: {name}_scale_inv must have shape {list(blocks)}")
    return plan


# Last part of a tensor's name -> the format of quantized weights that has it
FOREIGN_FORMATS = {
    "qweight": "GPTQ or AWQ", "weight_packed": "compressed-tensors", "weight_scale": "FP8 or INT8",
    "absmax": "bitsandbytes", "SCB": "bitsandbytes", "scales": "MLX",
    "down_proj_blocks": "MXFP4", "input_scale": "static FP8",
}  # fmt: skip


def _quantization(folder: Path) -> dict[str, Any]:
    """quantization_config of config.json, or AutoGPTQ's and AutoAWQ's file; {} if there is none."""
    found = [read_json(folder / "config.json").get("quantization_config")]
    found += [read_json(folder / name) for name in ("quantize_config.json", "quant_config.json")]
    return next((x for x in found if isinstance(x, dict) and x), {})


def _mismatch_reason(folder: Path, stored: Mapping[str, Any], missing: Sequence[str]) -> str:
    """Why the stored tensors are not those that config.json implies, and what to do."""
    quantization, leaves = _quantization(folder), {name.rpartition(".")[2] for name in stored}
    if quantization.get("quant_method") == "sheaf":
        return "these weights are quantized; open them with generate.py"
    for leaf, kind in FOREIGN_FORMATS.items():
        if leaf in leaves:
            kind = quantization.get("quant_method", kind)
            return f"{kind} weights are not supported, give the 16-bit checkpoint"
    if list(missing) == ["lm_head.weight"]:
        return "if it is tied to the embedding, set tie_word_embeddings to true in config.json"
    return "weights and config.json do not match"


def _duplicate_tensors(config: ModelConfig) -> dict[str, str]:
    """Tensors that some exporters write twice: copy -> original."""
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    copies = {head: embed} if config.tie_embeddings else {}
    for i in range(config.n_layers, config.n_layers + config.n_mtp_layers):
        copies[f"model.layers.{i}.embed_tokens.weight"] = embed
        copies[f"model.layers.{i}.shared_head.head.weight"] = copies.get(head, head)
    return copies


def _check_duplicates(folder: Path, stored: dict[str, StoredTensor], model: Transformer) -> None:
    """ValueError if a stored copy differs from its original, which the model uses for both."""
    loaded = hf_tensors(model)
    for copy, original in _duplicate_tensors(model.config).items():
        if copy in stored and original in stored and original in loaded:
            name = "head.weight" if original == "lm_head.weight" else "embed.weight"
            duplicate = stored[copy].read(shard=model.tp_shards.get(name))
            rows = zip(duplicate.split(1024), loaded[original].split(1024))
            if not all(torch.equal(a.to(b), b) for a, b in rows):
                raise ValueError(
                    f"{folder}: {copy} differs from {original}, which config.json ties to it; if "
                    "this is intended, set tie_word_embeddings to false in config.json"
                )


def allocate(model: Transformer, device: torch.device | str, dtype: torch.dtype) -> Transformer:
    """Allocate uninitialized memory for a model on the meta device: parameters in `dtype`, buffers
    (expert_bias) in their own dtype. Shared parameters stay shared."""
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        _allocate_module(module, device, dtype, made)
    return model


def _allocate_module(
    module: nn.Module,
    device: torch.device | str,
    dtype: torch.dtype,
    made: dict[Tensor, nn.Parameter],
) -> None:
    """Allocate one module's own tensors; `made`: meta parameter -> the one allocated for it."""
    for name, p in list(module.named_parameters(recurse=False)):
        if p not in made:
            made[p] = nn.Parameter(torch.empty(p.shape, dtype=dtype, device=device))
        setattr(module, name, made[p])
    for name, b in list(module.named_buffers(recurse=False)):
        setattr(module, name, torch.empty(b.shape, dtype=b.dtype, device=device))


def _dequantize(weight: Tensor, scale: Tensor, target: Tensor) -> None:
    """target = FP8 weight (rows, columns) * scale of its block, one row of blocks at a time
    (DeepSeek-V3, arXiv:2412.19437, 3.3.2)."""
    for row in range(0, len(weight), FP8_BLOCK):
        factor = scale[row // FP8_BLOCK].float().repeat_interleave(FP8_BLOCK)[: weight.shape[1]]
        strip = slice(row, row + FP8_BLOCK)
        target[strip].copy_(weight[strip].float() * factor)


def save_checkpoint(
    model: Transformer,
    path: str | os.PathLike,
    max_shard_bytes: int = 5_000_000_000,
    quantization: Mapping[str, Any] | None = None,
) -> None:
    """Save the model as a Hugging Face folder: config.json and safetensors in the model's dtype,
    one file, or several with an index if larger than max_shard_bytes. `quantization` is saved as
    config.json's quantization_config, from which quantized modules are rebuilt on loading.

    Every file is written to a temporary file, flushed to disk and renamed; with several shards,
    renaming the index commits the save. A crash or a full disk at any moment leaves the old
    checkpoint. If the folder has a model of another config, its config.json is deleted first, so
    that after a crash the folder is rejected instead of mixing two models. OSError if a file cannot
    be written.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config.to_hf()
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    config |= {"dtype": dtype, "torch_dtype": dtype}
    if quantization is not None:
        config["quantization_config"] = dict(quantization)
    text, target = json.dumps(config, indent=2) + "\n", folder / "config.json"
    if target.exists() and target.read_bytes() != text.encode():
        target.unlink()
    index, old = folder / "model.safetensors.index.json", _weight_files(folder)
    shards = _split_into_shards(hf_tensors(model), max_shard_bytes)
    if len(shards) == 1:
        new = {folder / "model.safetensors"}
        _write_tensors(folder / "model.safetensors", shards[0])
        index.unlink(missing_ok=True)
    else:
        new = _write_shards(folder, shards)
    for path in old - new:
        path.unlink(missing_ok=True)
    write_atomically(target, lambda tmp: tmp.write_text(text, encoding="utf-8"))


def _weight_files(folder: Path) -> set[Path]:
    """The folder's weight files, as save_checkpoint names them; other files are not touched."""
    shard = re.compile(r"model(-v\d+)?-\d{5}-of-\d{5}\.safetensors|model\.safetensors")
    return {path for path in folder.glob("*.safetensors") if shard.fullmatch(path.name)}


def _split_into_shards(tensors: dict[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    """Split in order into as few shards of at most max_bytes as possible; a tensor above that
    gets its own shard."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    on_cpu = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    write_atomically(path, lambda tmp: save_file(on_cpu, tmp, {"format": "pt"}))


def _write_shards(folder: Path, shards: list[dict[str, Tensor]]) -> set[Path]:
    """Write shards under new file names, then the index."""
    total = sum(t.nbytes for shard in shards for t in shard.values())
    prefix = next(
        p
        for p in chain(["model"], (f"model-v{i}" for i in count(2)))
        if not any(folder.glob(f"{p}-[0-9]*-of-*.safetensors"))
    )
    weight_map, new = {}, set()
    for i, shard in enumerate(shards, 1):
        path = folder / f"{prefix}-{i:05}-of-{len(shards):05}.safetensors"
        _write_tensors(path, shard)
        weight_map |= dict.fromkeys(shard, path.name)
        new.add(path)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_atomically(
        folder / "model.safetensors.index.json",
        lambda tmp: tmp.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8"),
    )
    return new


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """write(temporary file), fsync, rename to `path`; on any failure `path` is unchanged."""
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        tmp.touch()  # its mode is that of the umask, which cannot be read without setting it
        mode = tmp.stat().st_mode & 0o777
        write(tmp)
        os.chmod(tmp, mode)  # safetensors creates files with mode 0600
        with open(tmp, "rb+") as f:
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except (OSError, SafetensorError) as e:  # a full disk can raise either
        kept = "; the previous file is unchanged" if path.exists() else ""
        raise OSError(f"{path}: cannot be written ({e}){kept}") from None
    finally:
        tmp.unlink(missing_ok=True)
    if os.name == "posix":  # fsync the folder: the rename is durable
        fd = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
