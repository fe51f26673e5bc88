"""Hugging Face folders: config.json and safetensors, read into a Transformer and written from one.

`load_checkpoint` reads only headers before it allocates, then copies one tensor at a time from the
file to its place: the peak is the model and its largest tensor. `save_checkpoint` writes each file
beside its place and renames it, so that a crash leaves the old checkpoint. A folder that is
incomplete, truncated or of another model than its config.json says is refused in one line.

What config.json's fields mean is in model.py (`ModelConfig.from_hf`, `to_hf`); here are the names
of the tensors. Weights are read and written only as safetensors. Needs: torch, safetensors,
model.py.
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
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from model import FP8_BLOCK, ModelConfig, Transformer

# Our parameter -> its name in a checkpoint; below a module, ".weight" and ".bias" are the same. {}
# is the layer. Experts are stored one by one, gate and up apart: a second {} is the expert, and
# several names are the row blocks of one tensor here.
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
    "layers.{}.attention.q_a_proj": "model.layers.{}.self_attn.q_a_proj",
    "layers.{}.attention.q_a_norm": "model.layers.{}.self_attn.q_a_layernorm",
    "layers.{}.attention.q_b_proj": "model.layers.{}.self_attn.q_b_proj",
    "layers.{}.attention.kv_a_proj": "model.layers.{}.self_attn.kv_a_proj_with_mqa",
    "layers.{}.attention.kv_a_norm": "model.layers.{}.self_attn.kv_a_layernorm",
    "layers.{}.attention.kv_b_proj": "model.layers.{}.self_attn.kv_b_proj",
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
    "mtp.{}.embed_norm": "model.layers.{}.enorm",  # here {} counts on from the last layer
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
FAMILY_NAMES = {"mixtral": MIXTRAL_NAMES}  # where a family differs from HF_NAMES


def read_config(path: str | os.PathLike) -> ModelConfig:
    """The ModelConfig of a config.json file. ValueError names the file, the field and the mend."""
    try:
        hf = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise ValueError(
            f"{path}: {e.strerror or e}; expected a Hugging Face config.json"
        ) from None
    except (ValueError, RecursionError) as e:
        raise ValueError(
            f"{path}: not valid JSON ({e}); it may be half-written, copy it again"
        ) from None
    if not isinstance(hf, dict):
        raise ValueError(f"{path}: must hold one JSON object, not a {type(hf).__name__}")
    try:
        return ModelConfig.from_hf(hf)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


def hf_tensors(model: Transformer) -> dict[str, Tensor]:
    """Every name in this model's checkpoint -> the tensor here that it is: a parameter, a buffer,
    or of stacked experts a view of one. Loading copies into them, saving reads from them."""
    tensors = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        tensors |= dict(_hf_entries(model.config, name, tensor, _local_expert_ids(model, name)))
    return tensors


def hf_modules(model: Transformer) -> dict[str, str]:
    """Modules with a weight, adapted or not: the name here -> that in a Hugging Face model."""
    theirs = {id(tensor): name for name, tensor in hf_tensors(model).items()}
    return {
        name.removesuffix(".weight"): theirs[id(p)].removesuffix(".weight")
        for name, p in model.named_parameters(remove_duplicate=False)
        if name.endswith(".weight") and id(p) in theirs
    }


def _full_tensors(model: Transformer) -> dict[str, Tensor]:
    """hf_tensors, with meta tensors for the whole of those that this process has in part."""
    tensors = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if (cut := model.tp_shards.get(name)) is not None:
            tensor = torch.empty(cut.full_shape(tensor.shape), dtype=tensor.dtype, device="meta")
        if _local_expert_ids(model, name) is not None:
            shape = (model.config.n_experts, *tensor.shape[1:])
            tensor = torch.empty(shape, dtype=tensor.dtype, device="meta")
        tensors |= dict(_hf_entries(model.config, name, tensor))
    return tensors


def _tensors_by_part(model: Transformer) -> dict[str, dict[str, Tensor]]:
    """_of_whole of each layer, of the embedding, the norm, the head, and all for further tokens."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        part = ".".join(name.split(".")[: 2 if name.startswith("layers.") else 1])
        parts.setdefault(part, {}).update(_hf_entries(model.config, name, tensor))
    return parts


def _has_part(model: Transformer, part: str) -> bool:
    module, _, layer = part.partition(".")
    held = getattr(model, module)
    if isinstance(held, nn.ModuleList):
        return layer in dict(held.named_children()) if layer else len(held) > 0
    return held is not None


def _local_expert_ids(model: Transformer, name: str) -> Sequence[int] | None:
    """The experts that the tensor of this name is a stack of, if they are not all."""
    stack = re.fullmatch(r"(.+)\.w_(?:gate_up|down)(?:\.\w+)?", name)
    return None if stack is None else model.get_submodule(stack[1]).local_expert_ids


def _hf_entries(
    config: ModelConfig, name: str, tensor: Tensor, held: Sequence[int] | None = None
) -> list[tuple[str, Tensor]]:
    """The names under which a checkpoint holds this tensor of the model, each with its part. A
    stack that holds an expert twice has two parts of one name."""
    names = HF_NAMES | FAMILY_NAMES.get(config.family, {})
    kind, number, block, rest = re.fullmatch(
        r"(?:(layers|mtp)\.(\d+)\.)?(block\.)?(.+)", name
    ).groups()
    if kind is not None:
        rest = f"{'layers' if block else kind}.{{}}.{rest}"
        number = int(number) + (config.n_layers if kind == "mtp" else 0)
    module, _, leaf = rest.rpartition(".")
    theirs = names.get(rest) or names[module]
    if rest not in names:  # below a module, or of a stack of experts that was made one
        theirs = f"{theirs if isinstance(theirs, str) else 'model.' + module}.{leaf}"
    if isinstance(theirs, str):
        return [(theirs.format(number), tensor)]
    held = range(len(tensor)) if held is None else held
    return [
        (their.format(number, e), rows)
        for e, expert in zip(held, tensor, strict=True)
        for their, rows in zip(theirs, expert.chunk(len(theirs)), strict=True)
    ]


def _shard_files(folder: Path) -> dict[Path, set[str] | None]:
    """The folder's safetensors files: the single one, or those that the index names, each with the
    tensors that it should hold."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return {single: None}
    if not index.exists():
        raise ValueError(
            f"{folder}: holds neither model.safetensors nor model.safetensors.index.json; "
            "weights are read only as safetensors, convert other formats first"
        )
    shards: dict[str, set[str]] = {}
    try:
        for tensor, name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            shards.setdefault(name, set()).add(tensor)
        outside = [n for n in shards if Path(n).name != n or n in ("", ".", "..") or "\\" in n]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as e:
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
            f"{index}: names files that are not there: {_abbreviate(missing)}; download them again"
        )
    return {folder / n: shards[n] for n in sorted(shards)}


def _abbreviate(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


# What may be stored, and what it becomes unless the caller says otherwise
STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.bfloat16,
}
# What is stored bit by bit, where a swapped module holds tensors of these dtypes
EXACT_DTYPES = {
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "F8_E4M3": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, as the file's header describes it."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: F32, BF16, F8_E4M3, ...

    def read(self, rows: Sequence[int] | None = None, cut: Any = None) -> Tensor:
        """A view of the file, or a copy of these rows, or of the cut. Opened anew for each: a
        mapping that lives on keeps in memory every page it has read."""
        with _open_safetensors(self.path) as f:
            if rows is None and cut is None:
                return f.get_tensor(self.name)
            part = f.get_slice(self.name)
            if cut is not None:
                return part[(slice(None),) * cut.dim + (slice(cut.start, cut.stop),)]
            return torch.cat([part[i : i + 1] for i in rows])


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as f:
            yield f
    except (SafetensorError, OSError) as e:
        raise ValueError(
            f"{path}: cannot be read ({e}); it may be truncated, copy it again"
        ) from None


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder, from the headers alone. ValueError if the files do not hold what
    the index says."""
    stored: dict[str, StoredTensor] = {}
    for path, expected in _shard_files(folder).items():
        with _open_safetensors(path) as f:
            for name in f.keys():
                part = f.get_slice(name)
                stored[name] = StoredTensor(path, name, tuple(part.get_shape()), part.get_dtype())
            found = set(f.keys())
        if expected is not None and found != expected:
            odd = _abbreviate(sorted(found ^ expected))
            raise ValueError(
                f"{path}: does not hold the tensors that model.safetensors.index.json says "
                f"({odd}); the shards are mixed up, download them again"
            )
    return stored


def load_checkpoint(
    path: str | os.PathLike,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    prepare: Callable[[Transformer], Any] | None = None,
    convert_module: Callable[[str, nn.Module], nn.Module] | None = None,
) -> Transformer:
    """The model of a Hugging Face folder, in eval mode, on `device` in `dtype` (default: that of
    the stored embedding).

    Headers are checked first; then tensors go one by one from the file to their place, so that the
    peak is the model and its largest tensor. FP8 weights with block scales (DeepSeek-V3) are
    dequantized on the way. ValueError, with file, field and mend, for a folder that is missing,
    incomplete or wrong.

    prepare(model) may swap modules of the model while it is on the meta device: the folder holds
    the tensors of those. It may also cut a mixture's stacks to the experts that this process is to
    hold and say in MoE.held which these are: of the others nothing is read but the headers, which
    are checked all the same, so that every process refuses a folder that lacks an expert. The same
    holds for parameters that it cuts and names in Transformer.tp_shards, and for layers, embedding,
    norm and head that it drops.
    each(name, module) gives what takes a module's place as soon as its own tensors are there,
    before the next are read: a model that is quantized so is never whole in `dtype`. A module that
    shares a parameter with an earlier one is not offered.
    """
    folder = Path(path)
    if not folder.is_dir():
        what = "a file; give its folder" if folder.exists() else "no such folder; download it first"
        raise ValueError(
            f"{folder}: {what} (a checkpoint is a folder with config.json and safetensors)"
        )
    config = read_config(folder / "config.json")
    stored = _stored_tensors(folder)
    L = config.n_layers
    if not any(name.startswith(f"model.layers.{L}.") for name in stored):
        config = replace(config, n_mtp_layers=0)  # transformers leaves these layers out
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
    """Module after module: its memory, its tensors, what takes its place."""
    made: dict[Tensor, nn.Parameter] = {}
    modules = dict(model.named_modules())
    users = Counter(p for m in modules.values() for p in m.parameters(recurse=False))
    for name, module in modules.items():
        shares = any(p in made for p in module.parameters(recurse=False))
        _allocate_module(module, device, dtype, made)
        own = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        for leaf, tensor in () if shares else own:
            held = _local_expert_ids(model, f"{name}.{leaf}")
            cut = model.tp_shards.get(f"{name}.{leaf}")
            for stored_name, target in _hf_entries(model.config, f"{name}.{leaf}", tensor, held):
                part = cut if cut is None or target is tensor else replace(cut, dim=cut.dim - 1)
                scale = stored.get(f"{stored_name}_scale_inv")
                if scale is None:  # a stack that is stored whole is cut to its rows
                    rows = held if target is tensor else None
                    target.copy_(plan[stored_name].read(rows, part))
                elif part is None:
                    _dequantize(plan[stored_name].read(), scale.read(), target)
                else:  # blocks of scales need not end where the part does
                    whole = target.new_empty(plan[stored_name].shape)
                    _dequantize(plan[stored_name].read(), scale.read(), whole)
                    target.copy_(part.of(whole))
        if convert_module is not None and not shares and (new := convert_module(name, module)) is not module:
            parent, _, leaf = name.rpartition(".")
            setattr(modules[parent], leaf, new)
            modules[name] = new
        # what only this module has may go now; what another shares, it finds here
        made = {p: new for p, new in made.items() if users[p] > 1}


def _match_tensors(
    folder: Path, stored: dict[str, StoredTensor], wanted: dict[str, Tensor], config: ModelConfig
) -> dict[str, StoredTensor]:
    """The stored tensor of each wanted one. ValueError unless the two are the same set, of the same
    shapes, in dtypes that can be read."""
    plan = {name: stored[name] for name in wanted if name in stored}
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    if config.tie_embeddings and embed not in stored and head in stored:
        plan[embed] = stored[head]  # some exporters keep the other of the two
    elif config.tie_embeddings and head in wanted and embed in stored:
        plan[head] = stored[embed]  # a last stage has its own copy
    scaled = [n for n, s in plan.items() if s.dtype == "F8_E4M3" and n.endswith(".weight")]
    follow = {f"{name}_scale_inv" for name in scaled}
    follow |= {name for name in stored if name.endswith("rotary_emb.inv_freq")}
    follow |= set(_duplicate_tensors(config))
    missing = [name for name in wanted if name not in plan]
    missing += [name for name in follow if name.endswith("_scale_inv") and name not in stored]
    unexpected = [name for name in stored if name not in plan and name not in follow]
    if missing or unexpected:
        parts = [
            f"{what} tensors: {_abbreviate(names)}"
            for what, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        why = "weights and config.json are not of one model"
        if any(name.endswith(".qweight") for name in stored):
            why = "these weights are quantized as config.json must say; generate.py opens them"
        raise ValueError(f"{folder}: {'; '.join(parts)}; {why}")
    for name, s in plan.items():
        if s.shape != tuple(wanted[name].shape):
            raise ValueError(
                f"{s.path}: {name} has shape {list(s.shape)}, but config.json makes it "
                f"{list(wanted[name].shape)}; the two are not of one model"
            )
        exact = wanted[name].dtype in EXACT_DTYPES.values()
        known = [d for d, t in EXACT_DTYPES.items() if t == wanted[name].dtype]
        if s.dtype not in (known := known if exact else STORED_DTYPES):
            raise ValueError(f"{s.path}: {name} holds {s.dtype}; known: {', '.join(known)}")
        blocks = tuple(-(-n // FP8_BLOCK) for n in s.shape)
        if name in scaled and stored[f"{name}_scale_inv"].shape != blocks:
            raise ValueError(f"{s.path}: {name}_scale_inv must have shape {list(blocks)}")
    return plan


def _duplicate_tensors(config: ModelConfig) -> dict[str, str]:
    """Tensors that some exporters write though they follow from others: copy -> original."""
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    copies = {head: embed} if config.tie_embeddings else {}
    for i in range(config.n_layers, config.n_layers + config.n_mtp_layers):
        copies[f"model.layers.{i}.embed_tokens.weight"] = embed
        copies[f"model.layers.{i}.shared_head.head.weight"] = copies.get(head, head)
    return copies


def _check_duplicates(folder: Path, stored: dict[str, StoredTensor], model: Transformer) -> None:
    """ValueError if a stored copy is none: this model could not be what the file holds."""
    ours = hf_tensors(model)
    for copy, original in _duplicate_tensors(model.config).items():
        if copy in stored and original in stored and original in ours:
            ours_is = "head.weight" if original == "lm_head.weight" else "embed.weight"
            theirs = stored[copy].read(cut=model.tp_shards.get(ours_is))
            rows = zip(theirs.split(1024), ours[original].split(1024))
            if not all(torch.equal(a.to(b), b) for a, b in rows):
                raise ValueError(
                    f"{folder}: {copy} differs from {original}, of which it must be a copy; if the "
                    "two are meant to differ, set tie_word_embeddings to false in config.json"
                )


def allocate(model: Transformer, device: torch.device | str, dtype: torch.dtype) -> Transformer:
    """Memory for a model built on the meta device, its values still to come: parameters in `dtype`,
    buffers (routing corrections) as they are, in fp32. What was shared stays shared."""
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
    """allocate for one module's own tensors; `made` holds what other modules were given."""
    for name, p in list(module.named_parameters(recurse=False)):
        if p not in made:
            made[p] = nn.Parameter(torch.empty(p.shape, dtype=dtype, device=device))
        setattr(module, name, made[p])
    for name, b in list(module.named_buffers(recurse=False)):
        setattr(module, name, torch.empty(b.shape, dtype=b.dtype, device=device))


def _dequantize(weight: Tensor, scale: Tensor, target: Tensor) -> None:
    """target = weight (rows, columns) in FP8, times its block's scale; one strip of blocks at a
    time (DeepSeek-V3, arXiv:2412.19437, 3.3.2)."""
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
    """Write the model as a Hugging Face folder: config.json and safetensors in its own dtype, in
    one file, or from max_shard_bytes on in several with an index. `quantization` becomes
    config.json's quantization_config: what whoever swapped modules needs to swap them again.

    Each file appears whole or not at all: it is written beside its place, flushed to disk and
    renamed; several become the checkpoint when their index does. So a crash or a full disk at any
    moment leaves the old one. But where the folder held a model of another config, its config.json
    goes first, and what a crash leaves in between is refused. OSError where the disk refuses.
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
    """The weight files of the checkpoint in the folder, by their names; others are not touched."""
    shard = re.compile(r"model(-v\d+)?-\d{5}-of-\d{5}\.safetensors|model\.safetensors")
    return {path for path in folder.glob("*.safetensors") if shard.fullmatch(path.name)}


def _split_into_shards(tensors: dict[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    """The tensors in order, in as few runs as fit max_bytes each (a larger tensor alone)."""
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
    """Shards under names that no file has yet, then the index that makes them the checkpoint."""
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
