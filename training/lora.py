"""LoRA: low-rank adapters on frozen linear layers, with PEFT's file format.

Full fine-tuning keeps a gradient and two optimizer states per weight (12 bytes in fp32, and 4
for the weight) and produces a full checkpoint per task. LoRA (Hu et al., arXiv:2106.09685, section
4.1) assumes that the weight update has low rank: it freezes W and trains two low-rank factors,

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
the parameters), no gradient of W (a third of a layer's FLOPs), and small adapter files. When it
loses: where the data require more capacity, as in pretraining; with small matrices, where the two
extra kernel launches dominate. Not supported: stacked experts of an MoE, which are not nn.Linear,
and a weight shared by two modules (a tied head), which cannot be merged for one of them only.

Adapters of 16-bit weights are fp32 and are cast to the input's dtype in the forward pass. Call
apply_lora_ before quantization, compilation and sharding. Initialization depends only on (seed,
name), so it is the same for any targets, rank or device.

Hook: the Linear swap; base parameters stay the same objects under the same names. Equivalence
(test_all.py): with newly initialized or disabled adapters the output is bitwise that of the base
model; merged equals unmerged up to one rounding of each weight to its dtype. Needs: torch;
safetensors for files only. `python training/lora.py` runs a check and prints a table.

Shapes: x (..., C), C in features, F out features.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


class LoRALinear(nn.Linear):
    """x W^T + bias + scale * (x A^T) B^T; W and bias are frozen."""

    lora_a: nn.Parameter  # (rank, C)
    lora_b: nn.Parameter  # (F, rank)
    scale: float
    enabled: bool

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if not self.enabled:
            return y
        low = F.linear(x, self.lora_a.to(x.dtype))
        return y + self.scale * F.linear(low, self.lora_b.to(low.dtype))


# --------------------------------------------------------------------------------------------------
# Applying and merging
# --------------------------------------------------------------------------------------------------


def apply_lora_(
    model: nn.Module,
    rank: int,
    alpha: float | None = None,
    targets: Sequence[str] = TARGETS,
    seed: int = 0,
) -> nn.Module:
    """Add adapters, in place, to every nn.Linear whose name ends in one of the targets, and freeze
    all other parameters. alpha: default rank, a scale alpha / rank of 1 (the paper's choice, 4.1).
    ValueError if no module matches or one cannot be adapted."""
    is_target = lambda name: name.rpartition(".")[2] in targets
    names = [name for name, module in _linears(model).items() if is_target(name)]
    what = "stacked experts are not supported" if targets else "give at least one"
    _check(bool(names), f"targets {', '.join(targets)}: no nn.Linear has such a name ({what})")
    return _adapt(model, names, rank, rank if alpha is None else alpha, seed)


def _linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def _adapt(model: nn.Module, names: Sequence[str], rank: int, alpha: float, seed: int) -> nn.Module:
    _check(isinstance(rank, int) and rank > 0, f"rank must be an integer above 0, not {rank!r}")
    _check(0 < alpha < math.inf, f"alpha must be a number above 0, not {alpha!r}")
    users = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    for name in names:
        old = model.get_submodule(name)
        _check(not isinstance(old, LoRALinear), f"{name} is adapted already; call merge_ first")
        kind = type(old).__name__
        _check(
            type(old) is nn.Linear,
            f"{name} is a {kind}, not an nn.Linear; apply LoRA before it is converted",
        )
        shared = users[old.weight] > 1
        _check(not shared, f"{name} shares its weight with another module; remove it from targets")
    model.requires_grad_(False)
    for name in names:
        old = model.get_submodule(name)
        _replace_module(model, name, _make_lora_linear(old, name, rank, alpha / rank, seed))
    return model


def _make_lora_linear(old: nn.Linear, name: str, rank: int, scale: float, seed: int) -> LoRALinear:
    """A LoRALinear in place of `old`. A is uniform in +-1 / sqrt(C), as in PEFT and the paper's
    code."""
    with torch.device("meta"):
        new = LoRALinear(old.in_features, old.out_features, old.bias is not None)
    new.weight, new.bias, new.scale, new.enabled = old.weight, old.bias, scale, True
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    rng = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
    bound = old.in_features**-0.5
    a = torch.empty(rank, old.in_features).uniform_(-bound, bound, generator=rng)
    kwargs = dict(dtype=torch.promote_types(old.weight.dtype, torch.float32))
    kwargs["device"] = old.weight.device
    new.lora_a = nn.Parameter(a.to(**kwargs))
    new.lora_b = nn.Parameter(torch.zeros(old.out_features, rank, **kwargs))
    return new.train(old.training)


def _replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _lora_linears(model: nn.Module) -> dict[str, LoRALinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name: NAME.lora_a (rank, C) and NAME.lora_b (F, rank); empty for
    a model without adapters."""
    found = _lora_linears(model).items()
    return {
        f"{name}.{leaf}": getattr(m, leaf) for name, m in found for leaf in ("lora_a", "lora_b")
    }


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[nn.Module]:
    """Context manager that disables all adapters. With activation recomputation, the backward pass
    must run with adapters enabled or disabled as in the forward pass."""
    found = list(_lora_linears(model).values())
    before = [m.enabled for m in found]
    for m in found:
        m.enabled = False
    try:
        yield model
    finally:
        for m, enabled in zip(found, before):
            m.enabled = enabled


@torch.no_grad()
def merge_(model: nn.Module) -> nn.Module:
    """Merge adapters in place: W += scale * B A, computed in fp32 (or W's dtype if wider) and
    rounded once, and restore plain nn.Linear modules. Frozen weights stay frozen."""
    for name, m in _lora_linears(model).items():
        wide = m.lora_a.dtype
        m.weight.copy_(m.weight.to(wide).addmm_(m.lora_b, m.lora_a, alpha=m.scale))
        with torch.device("meta"):
            plain = nn.Linear(m.in_features, m.out_features, m.bias is not None)
        plain.weight, plain.bias = m.weight, m.bias
        _replace_module(model, name, plain.train(m.training))
    return model


# --------------------------------------------------------------------------------------------------
# PEFT files
# --------------------------------------------------------------------------------------------------

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
# fields of adapter_config.json that change the forward pass -> their supported values
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None,),
}


def _identity(name: str) -> str:
    return name


def save_adapters(
    model: nn.Module, folder: str | os.PathLike, base: str, rename: Callable[[str], str] = _identity
) -> None:
    """Write adapter_config.json and adapter_model.safetensors; on failure existing files are kept.

    base: name or folder of the base model. rename: module name -> its name in the Hugging Face
    model, "layers.0.attention.q_proj" -> "model.layers.0.self_attn.q_proj"."""
    from safetensors.torch import save_file

    found = {rename(name): m for name, m in _lora_linears(model).items()}
    _check(bool(found), "the model has no adapters to save; call apply_lora_ first")
    kinds = {(len(m.lora_a), m.scale) for m in found.values()}
    _check(
        len(kinds) == 1,
        f"adapters with different (rank, scale), {sorted(kinds)}, cannot be saved in one file",
    )
    rank, scale = kinds.pop()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": scale * rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in found}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }
    tensors = {}
    for name, m in found.items():
        for key, p in (("lora_A", m.lora_a), ("lora_B", m.lora_b)):
            tensors[f"{PREFIX}{name}.{key}.weight"] = p.detach().cpu().contiguous()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2) + "\n"
    writers = {
        folder / WEIGHTS: lambda tmp: save_file(tensors, tmp, {"format": "pt"}),
        folder / CONFIG: lambda tmp: tmp.write_text(text, encoding="utf-8"),
    }
    _write_atomically(writers)


def _write_atomically(writers: dict[Path, Callable[[Path], Any]]) -> None:
    """Write all files to temporary files and fsync them, then rename all."""
    made = {path.with_name(f".{path.name}.{os.getpid()}.tmp"): path for path in writers}
    try:
        for tmp, path in made.items():
            tmp.touch()
            mode = tmp.stat().st_mode  # safetensors creates files with mode 0600
            writers[path](tmp)
            tmp.chmod(mode)
            with open(tmp, "rb+") as f:
                os.fsync(f.fileno())
        for tmp, path in made.items():
            os.replace(tmp, path)
    finally:
        for tmp in made:
            tmp.unlink(missing_ok=True)


def load_adapters_(
    model: nn.Module, folder: str | os.PathLike, rename: Callable[[str], str] = _identity
) -> nn.Module:
    """Add the adapters of a folder, written by save_adapters or PEFT, in place, to a model without
    adapters. rename: see save_adapters. ValueError names the file and the unsupported field or the
    tensor that does not match the model."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    rank, alpha = _read_config(folder / CONFIG)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as e:
        raise ValueError(f"{folder / WEIGHTS}: cannot be read ({e}); save it again") from None
    linears, wanted = _linears(model), {}
    for name in linears:
        keys = [f"{PREFIX}{rename(name)}.lora_{x}.weight" for x in "AB"]
        if any(key in tensors for key in keys):
            wanted[name] = keys
    matched = {key for keys in wanted.values() for key in keys}
    unmatched = sorted(matched ^ tensors.keys())
    _check(
        bool(wanted) and not unmatched,
        f"{folder / WEIGHTS}: {unmatched[0] if unmatched else 'empty'}: no pair of lora_A and "
        "lora_B for a layer of this model",
    )
    for name, (a, b) in wanted.items():
        shapes = ((rank, linears[name].in_features), (linears[name].out_features, rank))
        for key, shape in zip((a, b), shapes):
            found = tuple(tensors[key].shape)
            _check(found == shape, f"{folder / WEIGHTS}: {key} has shape {found}, not {shape}")
    _adapt(model, list(wanted), rank, alpha, seed=0)
    with torch.no_grad():
        for name, (a, b) in wanted.items():
            module = model.get_submodule(name)
            module.lora_a.copy_(tensors[a])
            module.lora_b.copy_(tensors[b])
    return model


def _read_config(path: Path) -> tuple[int, float]:
    """(rank, alpha). ValueError if the config is not supported by LoRALinear."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        rank, alpha = config["r"], config["lora_alpha"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path}: not a PEFT config with r and lora_alpha ({e!r})") from None
    for field, known in SUPPORTED.items():
        value = config.get(field, known[0])
        _check(value in known, f"{path}: {field} is {value!r}; supported: {known[0]!r}")
    return rank, alpha


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


class _Block(nn.Module):
    """SwiGLU MLP with a residual connection; its linears are named as in TARGETS."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def check() -> None:
    """Output and gradients must equal those of the dense weight W + scale * B A; disabling the
    adapters must restore the base model, and merging must keep the output."""
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(12, 20).double()), torch.randn(5, 12, dtype=torch.float64)
    plain = layer(x)
    apply_lora_(layer, 4, alpha=6, targets=("0",))
    assert torch.equal(layer(x), plain)
    module = layer[0]
    with torch.no_grad():
        module.lora_b.normal_()
    dense = (module.weight + 1.5 * module.lora_b @ module.lora_a).detach().requires_grad_()
    got, want = layer(x), F.linear(x, dense, module.bias)
    assert torch.allclose(got, want, rtol=0, atol=1e-12)
    got.square().sum().backward()
    want.square().sum().backward()
    assert torch.allclose(module.lora_a.grad, 1.5 * module.lora_b.T @ dense.grad)
    assert torch.allclose(module.lora_b.grad, 1.5 * dense.grad @ module.lora_a.T)
    assert module.weight.grad is None
    with disable_adapters(layer):
        assert torch.equal(layer(x), plain)
    merge_(layer)
    assert type(layer[0]) is nn.Linear and torch.allclose(layer(x), want, rtol=0, atol=1e-12)


def _seconds(run: Callable[[], Any], device: str, repeats: int = 5) -> float:
    spent = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - start)
    return statistics.median(spent[2:])


def benchmark(device: str) -> None:
    """Time of an AdamW step and a forward pass; memory of gradients and optimizer states."""
    dim, hidden, rows = (2048, 8192, 4096) if device == "cuda" else (512, 1536, 256)
    print(f"4 SwiGLU blocks of {dim} x {hidden}, {rows} rows, bf16 autocast, AdamW")
    print(f"{'trained':16}{'parameters':>12}{'state MB':>10}{'ms/step':>9}{'ms forward':>12}")
    x = torch.randn(rows, dim, device=device)
    for rank in (None, 4, 16, 64):
        torch.manual_seed(0)
        model = nn.Sequential(*(_Block(dim, hidden) for _ in range(4))).to(device)
        trained = [*model.parameters()]
        if rank is not None:
            trained = [*adapter_parameters(apply_lora_(model, rank)).values()]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

        def forward() -> Tensor:
            with torch.autocast(device, torch.bfloat16):
                return model(x)

        def step() -> None:
            forward().float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        times = [_seconds(step, device)]
        with torch.no_grad():
            times.append(_seconds(forward, device))
            label = "all" if rank is None else f"rank {rank}"
            n = sum(p.numel() for p in trained)
            line = "".join(f"{1e3 * t:{w}.1f}" for t, w in zip(times, (9, 12)))
            print(f"{label:16}{n:>12,}{12 * n / 1e6:>10.1f}{line}")
            if rank == 64:
                merge_(model)
                print(f"{'  merged':47}{1e3 * _seconds(forward, device):12.1f}")


def main() -> None:
    check()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"checked; {device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    benchmark(device)


if __name__ == "__main__":
    main()
