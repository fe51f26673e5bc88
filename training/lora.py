"""LoRA: low-rank adapters on frozen linear layers, with PEFT's file format.

Full fine-tuning keeps a gradient and two optimizer states per weight (12 bytes in fp32) and
produces a full checkpoint per task. LoRA (Hu et al., arXiv:2106.09685, 4.1) assumes that the weight
update has low rank: it freezes W and trains two low-rank factors,

    y = x W^T + alpha / rank * (x A^T) B^T      W (F, C) frozen, A (rank, C), B (F, rank)

A is initialized randomly and B with zeros, so training starts at the base model. After training,
B A is merged into W at no inference cost, or kept as an adapter file of a few MB per task.

    apply_lora_(model, rank=16)                             # adapt the targets, freeze all else
    optimizer = AdamW(adapter_parameters(model).values())
    save_adapters(model, folder, base="org/model")          # PEFT's format
    with disable_adapters(model): ...                       # the base model, a reference for DPO
    merge_(model)                                           # plain nn.Linear again

Cost: two small matmuls per adapted linear until merged; activation memory is unchanged. Gain:
gradients and optimizer states of the adapters only (rank 16 on all TARGETS of Llama 2 7B: 0.6% of
the parameters) and no gradient of W (a third of a layer's FLOPs). When it loses: where the data
require more capacity, as in pretraining; with small matrices, where kernel launches dominate. Not
supported: stacked experts of an MoE, which are not nn.Linear, and a weight shared by two modules (a
tied head), which cannot be merged for one of them only.

Adapters of 16-bit weights are fp32 and are cast to the input's dtype in the forward pass. Call
apply_lora_ before quantization, compilation and sharding. Initialization depends only on (seed,
name), so it is the same for any targets, rank or device.

Hook: the Linear swap; base parameters stay the same objects under the same names. Equivalence
(test_all.py): with newly initialized or disabled adapters the output is bitwise that of the base
model; merged equals unmerged up to one rounding of each weight to its dtype. Needs: torch;
safetensors for files only. `python training/lora.py` runs a check and prints a table.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _check(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)


class LoRALinear(nn.Linear):
    """x W^T + bias + scale * (x A^T) B^T; W and bias are frozen."""

    lora_a: nn.Parameter  # (rank, C)
    lora_b: nn.Parameter  # (F, rank)
    scale: float
    enabled: bool

    def delta(self, x: Tensor) -> Tensor:
        """scale * (x A^T) B^T"""
        low = F.linear(x, self.lora_a.to(x.dtype))
        return self.scale * F.linear(low, self.lora_b.to(low.dtype))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y + self.delta(x) if self.enabled else y


def _linears(model: nn.Module, kind: type = nn.Linear) -> dict[str, Any]:
    return {name: m for name, m in model.named_modules() if isinstance(m, kind)}


def apply_lora_(
    model: nn.Module, rank: int, alpha: float | None = None, targets: Sequence[str] = TARGETS,
    seed: int = 0,
) -> nn.Module:  # fmt: skip
    """Add adapters, in place, to every nn.Linear whose name ends in one of the targets, and freeze
    all other parameters. alpha: default rank, a scale alpha / rank of 1 (the paper's choice, 4.1).
    ValueError if no module matches or one cannot be adapted."""
    names = [name for name in _linears(model) if name.rpartition(".")[2] in targets]
    _check_rank(rank, alpha := rank if alpha is None else alpha)
    what = "stacked experts are not supported" if targets else "give at least one"
    _check(names, f"targets {', '.join(targets)}: no nn.Linear has such a name ({what})")
    return _adapt(model, names, rank, alpha, seed)


def _check_rank(rank: Any, alpha: Any) -> None:
    _check(type(rank) is int and rank > 0, f"rank must be an integer above 0, not {rank!r}")
    ok = type(alpha) in (int, float) and 0 < alpha <= torch.finfo(torch.float32).max
    _check(ok, f"alpha must be a number above 0, finite in fp32, not {alpha!r:.80}")


def _adapt(model: nn.Module, names: Sequence[str], rank: int, alpha: float, seed: int) -> nn.Module:
    users = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    for name in names:
        old = model.get_submodule(name)
        _check(not isinstance(old, LoRALinear), f"{name} is adapted already; call merge_ first")
        kind = f"{name} is a {type(old).__name__}, not an nn.Linear"
        _check(type(old) is nn.Linear, f"{kind}; apply LoRA before it is converted")
        shared = f"{name} shares its weight with another module; remove it from targets"
        _check(users[old.weight] == 1, shared)
    model.requires_grad_(False)
    for name in names:
        lora = make_lora_linear(model.get_submodule(name), name, rank, alpha / rank, seed)
        model.set_submodule(name, lora)
    return model


def make_lora_linear(old: nn.Linear, name: str, rank: int, scale: float, seed: int) -> LoRALinear:
    """A LoRALinear in place of `old`. A is uniform in +-1 / sqrt(C), as in PEFT and the paper's
    code."""
    with torch.device("meta"):
        new = LoRALinear(old.in_features, old.out_features, old.bias is not None)
    new.weight, new.bias, new.scale, new.enabled = old.weight, old.bias, scale, True
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    rng = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
    bound = old.in_features**-0.5
    a = torch.empty(rank, old.in_features).uniform_(-bound, bound, generator=rng)
    dtype, device = torch.promote_types(old.weight.dtype, torch.float32), old.weight.device
    new.lora_a = nn.Parameter(a.to(device, dtype))
    new.lora_b = nn.Parameter(torch.zeros(old.out_features, rank, dtype=dtype, device=device))
    return new.train(old.training)


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name: NAME.lora_a (rank, C) and NAME.lora_b (F, rank); empty for
    a model without adapters."""
    found = _linears(model, LoRALinear).items()
    return {f"{name}.{x}": getattr(m, x) for name, m in found for x in ("lora_a", "lora_b")}


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[nn.Module]:
    """Context manager that disables all adapters. With activation recomputation, the backward pass
    must run with adapters enabled or disabled as in the forward pass."""
    before = {m: m.enabled for m in _linears(model, LoRALinear).values()}
    for m in before:
        m.enabled = False
    try:
        yield model
    finally:
        for m, enabled in before.items():
            m.enabled = enabled


@torch.no_grad()
def merge_(model: nn.Module) -> nn.Module:
    """Merge adapters in place: W += scale * B A, computed in fp32 (or W's dtype if wider) and
    rounded once, and restore plain nn.Linear modules. Frozen weights stay frozen."""
    for name, m in _linears(model, LoRALinear).items():
        wide = m.lora_a.dtype
        m.weight.copy_(m.weight.to(wide).addmm_(m.lora_b, m.lora_a, alpha=m.scale))
        with torch.device("meta"):
            plain = nn.Linear(m.in_features, m.out_features, m.bias is not None)
        plain.weight, plain.bias = m.weight, m.bias
        model.set_submodule(name, plain.train(m.training))
    return model


CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
# The fields of PEFT 0.21's LoraConfig by what they may be; any other field, null and false are as
# if absent, or else refused: an adapter is read as PEFT reads it, or not at all.
NO_EFFECT = """auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config
    inference_mode loftq_config lora_dropout lora_ga_config megatron_core peft_version
    qalora_group_size revision runtime_config""".split()  # on the forward pass, unless another has
# pissa, olora, corda, lora_ga and loftq change W: B A of such a file belongs to W - scale B0 A0
SUPPORTED = {
    "peft_type": ("LORA",), "task_type": ("CAUSAL_LM",), "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica"),
    "rank_pattern": ({},), "alpha_pattern": ({},), "modules_to_save": ([],),
    "layer_replication": ([],), "layers_pattern": ([], "", "layers", ["layers"]),
}  # fmt: skip
SELECTION = ("target_modules", "exclude_modules", "layers_to_transform")  # _check_selection
MATCH_SECONDS = 1  # of a CPU, for a regular expression of these
MATCH = f"""if True:
    import json, re, resource, sys
    resource.setrlimit(resource.RLIMIT_CPU, ({MATCH_SECONDS}, {MATCH_SECONDS}))
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
    pattern, names = json.load(sys.stdin)
    print(json.dumps([name for name in names if re.fullmatch(pattern, name)]))
"""


def save_adapters(
    model: nn.Module, folder: str | os.PathLike, base: str, rename: Callable[[str], str] = str
) -> None:
    """Write adapter_config.json and adapter_model.safetensors; on failure existing files are kept.

    base: name or folder of the base model. rename: module name -> its name in the Hugging Face
    model, "layers.0.attention.q_proj" -> "model.layers.0.self_attn.q_proj"."""
    from safetensors.torch import save

    found = {rename(name): m for name, m in _linears(model, LoRALinear).items()}
    _check(found, "the model has no adapters to save; call apply_lora_ first")
    (rank, scale), *others = {(len(m.lora_a), m.scale) for m in found.values()}
    _check(not others, "adapters of different rank or scale cannot be saved in one file")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank,
        "lora_alpha": scale * rank, "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in found}),
    }  # fmt: skip
    tensors = {}
    for name, m in found.items():
        for key, p in (("lora_A", m.lora_a), ("lora_B", m.lora_b)):
            tensors[f"{PREFIX}{name}.{key}.weight"] = p.detach().cpu().contiguous()
    files = {
        WEIGHTS: save(tensors, {"format": "pt"}),
        CONFIG: json.dumps(config, indent=2).encode(),
    }
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=folder) as tmp:
        for name, content in files.items():
            with open(Path(tmp, name), "wb") as f:
                f.write(content)
                os.fsync(f.fileno())
        for name in files:
            os.replace(Path(tmp, name), Path(folder, name))


def load_adapters_(
    model: nn.Module, folder: str | os.PathLike, rename: Callable[[str], str] = str
) -> nn.Module:
    """Add the adapters of a folder, written by save_adapters or PEFT, in place, to a model without
    adapters. rename: see save_adapters. ValueError names the file and the unsupported field or the
    tensor that does not match the model."""
    shapes = {name: (m.in_features, m.out_features) for name, m in _linears(model).items()}
    rank, alpha, tensors = read_adapters(folder, shapes, rename)
    _adapt(model, list(tensors), rank, alpha, seed=0)
    with torch.no_grad():
        for name, (a, b) in tensors.items():
            module = model.get_submodule(name)
            module.lora_a.copy_(a)
            module.lora_b.copy_(b)
    return model


def read_adapters(
    folder: str | os.PathLike, shapes: Mapping[str, tuple[int, int]],
    rename: Callable[[str], str] = str, read: Callable[[Path], bytes] = Path.read_bytes,
) -> tuple[int, float, dict[str, tuple[Tensor, Tensor]]]:  # fmt: skip
    """Rank, alpha, and A (rank, C) and B (F, rank) of each adapted module of a folder. shapes: C
    and F of the modules that can be adapted. read: of a file, its bytes, or OSError. ValueError as
    in load_adapters_."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    folder = Path(folder)
    config = _read_config(folder / CONFIG, read)
    rank, alpha = config["r"], config["lora_alpha"]
    try:
        tensors = load(read(folder / WEIGHTS))
    except (OSError, KeyError, SafetensorError) as e:  # KeyError: an unknown dtype
        raise ValueError(f"{folder / WEIGHTS}: cannot be read ({e}); save it again") from None
    wanted = {}
    for name in shapes:
        keys = [f"{PREFIX}{rename(name)}.lora_{x}.weight" for x in "AB"]
        if any(key in tensors for key in keys):
            wanted[name] = keys
    unmatched = sorted({key for keys in wanted.values() for key in keys} ^ tensors.keys())
    error = f"{folder / WEIGHTS}: {unmatched[0] if unmatched else 'empty'}: no pair of lora_A and "
    _check(wanted and not unmatched, f"{error}lora_B for a layer of this model")
    names = [*map(rename, shapes), "lm_head", "model.embed_tokens"]
    _check_selection(folder / CONFIG, config, [*map(rename, wanted)], names)
    for name, keys in wanted.items():
        C, F = shapes[name]
        for key, shape in zip(keys, ((rank, C), (F, rank))):
            found = tuple(tensors[key].shape)
            error = f"{folder / WEIGHTS}: {key} has shape {found}, not {shape}"
            _check(found == shape, f"{error} as r in {CONFIG} and this model give")
            finite = tensors[key].isfinite().all()
            _check(finite, f"{folder / WEIGHTS}: {key} has values that are not finite")
    return rank, alpha, {name: (tensors[a], tensors[b]) for name, (a, b) in wanted.items()}


def _read_config(path: Path, read: Callable[[Path], bytes]) -> dict[str, Any]:
    """The fields that are not null. ValueError if LoRALinear does not support one."""
    try:
        config = json.loads(read(path))
    except (OSError, ValueError, RecursionError) as e:
        why = getattr(e, "strerror", None) or e
        raise ValueError(f"{path}: cannot be read as JSON ({why})") from None
    _check(isinstance(config, dict), f"{path}: not a JSON object; is it PEFT's?")
    config = {field: value for field, value in config.items() if value is not None}
    for field in ("r", "lora_alpha", "target_modules"):
        _check(field in config, f"{path}: {field} is missing; is it a LoRA of PEFT?")
    for field, value in config.items():
        known = field in (*NO_EFFECT, *SELECTION, "r", "lora_alpha")
        if known or value is False or value in SUPPORTED.get(field, ()):
            continue
        fix = "merge the adapter with PEFT's merge_and_unload() and load the merged model"
        if field == "init_lora_weights":
            fix += ", or save it with path_initial_model_for_weight_conversion=..."
        raise ValueError(f"{path}: {field!r:.80} is {value!r:.80}, which is not supported; {fix}")
    try:
        _check_rank(config["r"], config["lora_alpha"])
        _check(config["r"] < 2**31, "r must be the rank of the tensors")
    except ValueError as e:
        raise ValueError(f"{path}: {str(e).replace('alpha', 'lora_alpha', 1)}") from None
    return config


def _check_selection(
    path: Path, config: Mapping[str, Any], adapted: Collection[str], names: Iterable[str]
) -> None:  # fmt: skip
    """ValueError if PEFT would leave out one of the modules that have tensors (adapted), or give
    others of `names` values that no file has: it initializes a selected module without tensors,
    which changes nothing unless B is random too."""
    fields = {field: config.get(field, []) for field in SELECTION}
    if type(fields["layers_to_transform"]) is int:
        fields["layers_to_transform"] = [fields["layers_to_transform"]]
    for field, value in fields.items():
        kind = int if field == "layers_to_transform" else str
        is_regex = kind is str and isinstance(value, str)
        ok = is_regex or (isinstance(value, list) and all(type(x) is kind for x in value))
        _check(ok, f"{path}: {field} must be a list, not {value!r:.80}")
    targets, excluded, layers = fields.values()
    if isinstance(targets, str) and "layers_to_transform" in config:
        raise ValueError(f"{path}: layers_to_transform needs target_modules that is a list")
    names = {*names, *adapted}
    targeted = _select(path, "target_modules", targets, names)
    left_out = {
        "target_modules": names - targeted,
        "exclude_modules": _select(path, "exclude_modules", excluded, names) if excluded else set(),
        "layers_to_transform": {
            name for name in names
            if layers and int((re.search(r"\blayers\.(\d+)\.", name) or [0, -1])[1]) not in layers
        },
    }  # fmt: skip
    for name, field in itertools.product(adapted, left_out):
        outside = f"{field} leaves out {name}, which has tensors in {WEIGHTS}"
        _check(name not in left_out[field], f"{path}: {outside}")
    random = names.difference(adapted, *left_out.values())
    if config.get("init_lora_weights") is False and random:
        why = f"is false and {min(random)}, of target_modules, has no tensors in {WEIGHTS}"
        raise ValueError(
            f"{path}: init_lora_weights {why}: PEFT gives it random values; save again"
        )


def _select(path: Path, field: str, value: str | list[str], names: Collection[str]) -> set[str]:
    """The names that PEFT selects: by their ends, or all of a name by a regular expression."""
    if isinstance(value, list):
        return {n for n in names if any(f".{n}".endswith(f".{end}") for end in value)}
    if field == "target_modules" and value.lower() == "all-linear":
        return {*names} - {"lm_head", "model.embed_tokens"}
    # in a process, since a stranger's expression may take for ever and hold Python's lock
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", MATCH], capture_output=True, text=True,
        input=json.dumps([value, [*names]]),
    )  # fmt: skip
    if done.returncode:
        error = done.stderr.strip().rpartition("\n")[2] or f"takes over {MATCH_SECONDS} s"
        fix = "write a list of names"
        raise ValueError(f"{path}: {field} {value!r:.80} cannot be evaluated ({error}); {fix}")
    return {*json.loads(done.stdout)}


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def check() -> None:
    """Output and gradients equal those of the dense weight W + scale * B A; merging keeps them."""
    model, x = nn.Sequential(nn.Linear(12, 20).double()), torch.randn(5, 12, dtype=torch.float64)
    module = apply_lora_(model, 4, alpha=6, targets=("0",))[0]
    nn.init.normal_(module.lora_b)
    dense = (module.weight + 1.5 * module.lora_b @ module.lora_a).detach().requires_grad_()
    got, want = model(x), F.linear(x, dense, module.bias)
    assert torch.allclose(got, want, rtol=0, atol=1e-12)
    (grad,) = torch.autograd.grad(want.square().sum(), dense)
    got.square().sum().backward()
    assert torch.allclose(module.lora_b.grad, 1.5 * grad @ module.lora_a.T)
    assert torch.allclose(merge_(model)(x), want, rtol=0, atol=1e-12)


def main() -> None:
    """Time of a forward and backward pass; memory of gradients and AdamW states."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    check()
    dim, device = (4096, "cuda") if torch.cuda.is_available() else (768, "cpu")
    x = torch.randn(dim, dim, device=device)
    print(f"{device}, 4 linears of {dim} x {dim}, {dim} rows, fp32")
    print(f"{'trained':10}{'parameters':>12}{'state MB':>10}{'ms':>9}")
    for rank in (None, 4, 64):
        model = nn.Sequential(*(nn.Linear(dim, dim, bias=False) for _ in range(4))).to(device)
        if rank:
            apply_lora_(model, rank, targets="0123")
        run = lambda: model(x).square().mean().backward()
        ms = 1e3 * Timer("run()", globals={"run": run}).blocked_autorange().median
        n = sum(p.numel() for p in model.parameters() if p.requires_grad)
        print(f"{f'rank {rank}' if rank else 'all':10}{n:>12,}{12 * n / 1e6:>10.1f}{ms:>9.1f}")


if __name__ == "__main__":
    main()
