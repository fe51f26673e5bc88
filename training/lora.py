"""lora.py: fine-tuning a few parameters beside frozen ones, low-rank adaptation.

Full fine-tuning keeps a gradient and two moments for every weight, 12 bytes beside its 4, and gives
a whole checkpoint per task. What a task changes has a low rank, LoRA says (Hu et al.,
arXiv:2106.09685, section 4.1): freeze W and train a product of two thin matrices beside it,

    y = x W^T + alpha / rank * (x A^T) B^T      W (F, C) frozen, A (rank, C), B (F, rank)

with A drawn and B zero, so that training begins at the model as it was. After training B A is added
to W, and the model is as fast as before; or kept apart, a file of megabytes for each task.

    lora_(model, rank=16)                             # adapters where the targets are, all frozen
    optimizer = AdamW(adapters(model).values())       # train as ever
    save_adapters(model, folder, base="org/model")    # PEFT's format
    with disabled(model): ...                         # the base model: a reference for DPO or GRPO
    merge_(model)                                     # plain nn.Linear again

What it costs: two thin products for each thick one, in training and until merged; activations are
kept as without it. What it gains: gradients and optimizer states of few parameters (rank 16 on all
of Llama 2 7B: 0.6%), no gradient of W (a third of a layer's arithmetic), and adapters that travel.
When it loses: where the data teach more than so few parameters hold, as pretraining does; with
small matrices, whose products are cheaper than three calls. Stacked experts of mixtures are no
nn.Linear and are not adapted; nor is a weight that two modules share (a tied head), for it could
not be merged into one of them.

Adapters are fp32 beside weights of 16 bits, and are multiplied in the input's dtype. lora_ comes
before quantized products, compiling and sharding. What is drawn depends on (seed, name) alone: so
adapters are the same whatever else is adapted, on every rank and device.

Hook: the Linear swap; every weight keeps its object and its name. Equivalence (test_all.py): fresh
and disabled adapters leave every bit of the output; merged is unmerged but for one rounding of each
weight to its own dtype. Needs: torch, and safetensors for files alone. `python training/lora.py` checks
itself and prints a table.

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
    """x W^T + bias + scale * (x A^T) B^T, W and bias frozen."""

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
# On and off a model
# --------------------------------------------------------------------------------------------------


def apply_lora_(
    model: nn.Module,
    rank: int,
    alpha: float | None = None,
    targets: Sequence[str] = TARGETS,
    seed: int = 0,
) -> nn.Module:
    """Adapt every nn.Linear whose name ends in one of the targets, in place, and freeze all else.
    alpha None: rank, a scale of 1 (the paper's first choice, 4.1). ValueError where nothing is to
    be adapted, or what is cannot be."""
    known = lambda name: name.rpartition(".")[2] in targets
    names = [name for name, module in _linears(model).items() if known(name)]
    what = "stacked experts are not covered" if targets else "give at least one"
    _check(bool(names), f"targets {', '.join(targets)}: no nn.Linear has such a name ({what})")
    return _adapt(model, names, rank, rank if alpha is None else alpha, seed)


def _linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def _adapt(model: nn.Module, names: Sequence[str], rank: int, alpha: float, seed: int) -> nn.Module:
    _check(isinstance(rank, int) and rank > 0, f"rank must be a whole number above 0, not {rank!r}")
    _check(0 < alpha < math.inf, f"alpha must be a number above 0, not {alpha!r}")
    users = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    for name in names:
        old = model.get_submodule(name)
        _check(not isinstance(old, LoRALinear), f"{name} is adapted already; merge_ it first")
        kind = type(old).__name__
        _check(type(old) is nn.Linear, f"{name} is a {kind}; adapt it while it is an nn.Linear")
        shared = users[old.weight] > 1
        _check(not shared, f"{name} shares its weight with another module; take it off the targets")
    model.requires_grad_(False)
    for name in names:
        _replace_module(model, name, _make_lora_linear(model.get_submodule(name), name, rank, alpha / rank, seed))
    return model


def _make_lora_linear(old: nn.Linear, name: str, rank: int, scale: float, seed: int) -> LoRALinear:
    """A is uniform within 1 / sqrt(C), as PEFT and the paper's own code draw it."""
    with torch.device("meta"):
        new = LoRALinear(old.in_features, old.out_features, old.bias is not None)
    new.weight, new.bias, new.scale, new.enabled = old.weight, old.bias, scale, True
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    rng = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
    bound = old.in_features**-0.5
    a = torch.empty(rank, old.in_features).uniform_(-bound, bound, generator=rng)
    like = dict(dtype=torch.promote_types(old.weight.dtype, torch.float32))
    like["device"] = old.weight.device
    new.lora_a = nn.Parameter(a.to(**like))
    new.lora_b = nn.Parameter(torch.zeros(old.out_features, rank, **like))
    return new.train(old.training)


def _replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _lora_linears(model: nn.Module) -> dict[str, LoRALinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What is trained, under its name in the model: NAME.lora_a (rank, C), NAME.lora_b (F, rank).
    Empty for a model without adapters."""
    found = _lora_linears(model).items()
    return {
        f"{name}.{leaf}": getattr(m, leaf) for name, m in found for leaf in ("lora_a", "lora_b")
    }


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[nn.Module]:
    """The model without its adapters, meanwhile. A backward pass that recomputes activations must
    find the adapters as its forward pass did."""
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
    """W + scale * B A in place, summed in fp32 (or W's dtype, if that is wider) and rounded once to
    W's, and plain nn.Linear again. What is frozen stays so: requires_grad_ is the caller's."""
    for name, m in _lora_linears(model).items():
        wide = m.lora_a.dtype
        m.weight.copy_(m.weight.to(wide).addmm_(m.lora_b, m.lora_a, alpha=m.scale))
        with torch.device("meta"):
            plain = nn.Linear(m.in_features, m.out_features, m.bias is not None)
        plain.weight, plain.bias = m.weight, m.bias
        _replace_module(model, name, plain.train(m.training))
    return model


# --------------------------------------------------------------------------------------------------
# Files, as PEFT writes and reads them
# --------------------------------------------------------------------------------------------------

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
# of adapter_config.json: what changes the arithmetic, and the values that are LoRA's own
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
    """Write adapter_config.json and adapter_model.safetensors, or leave those that are there.

    base: the name or folder of the model that they go with. rename: module's name here -> in a
    Hugging Face model, "layers.0.attention.q_proj" -> "model.layers.0.self_attn.q_proj"."""
    from safetensors.torch import save_file

    found = {rename(name): m for name, m in _lora_linears(model).items()}
    _check(bool(found), "the model has no adapters to save; lora_ makes them")
    kinds = {(len(m.lora_a), m.scale) for m in found.values()}
    _check(
        len(kinds) == 1, f"adapters of several ranks or scales, {sorted(kinds)}, are not one file"
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
    """All files are on the disk before the first takes its place."""
    made = {path.with_name(f".{path.name}.{os.getpid()}.tmp"): path for path in writers}
    try:
        for tmp, path in made.items():
            tmp.touch()
            mode = tmp.stat().st_mode  # safetensors' own is for nobody else
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
    """Put a folder's adapters, written by save_adapters or PEFT, on a plain model, in place.
    rename: as save_adapters. ValueError names the file and the field or tensor that does not fit.
    """
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
    given = {key for keys in wanted.values() for key in keys}
    odd = sorted(given ^ tensors.keys())
    _check(
        bool(wanted) and not odd,
        f"{folder / WEIGHTS}: {odd[0] if odd else 'empty'}: not a pair for a layer of this model",
    )
    for name, (a, b) in wanted.items():
        shapes = ((rank, linears[name].in_features), (linears[name].out_features, rank))
        for key, shape in zip((a, b), shapes):
            found = tuple(tensors[key].shape)
            _check(found == shape, f"{folder / WEIGHTS}: {key} is {found}, and must be {shape}")
    _adapt(model, list(wanted), rank, alpha, seed=0)
    with torch.no_grad():
        for name, (a, b) in wanted.items():
            module = model.get_submodule(name)
            module.lora_a.copy_(tensors[a])
            module.lora_b.copy_(tensors[b])
    return model


def _read_config(path: Path) -> tuple[int, float]:
    """(rank, alpha). ValueError where the arithmetic is not that of LoRALinear."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        rank, alpha = config["r"], config["lora_alpha"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path}: must be PEFT's, with r and lora_alpha ({e!r})") from None
    for field, known in SUPPORTED.items():
        value = config.get(field, known[0])
        _check(value in known, f"{path}: {field} is {value!r}; known here: {known[0]!r}")
    return rank, alpha


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


class _Block(nn.Module):
    """SwiGLU under the names that targets go by."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def check() -> None:
    """Output and gradients are those of the dense weight W + scale * B A, by the chain rule; and
    disabling, merging and the file give back what was there."""
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
    """A step of AdamW and a forward pass, and the bytes of gradients and moments."""
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
