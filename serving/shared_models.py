"""Fine-tunes of one base in one batch: tensors that models share are stored and computed once.

A full fine-tune often leaves tensors of its base as they were: frozen embeddings, or all layers but
the last. Served as separate models, each needs all of its weights, a KV cache and batches of its
own. BlockLLM (arXiv:2404.18322) serves models as assemblies of blocks and stores a block that
several models have once; a batch of requests to different models runs such a block together.

    sharing   while a checkpoint is loaded, each tensor that is bitwise that of the base, or of a
              fine-tune loaded before, is dropped for that one: tensor by tensor, so that no second
              whole model is in memory
    routing   a module whose tensors differ in some model is replaced by a ModulePerRow, which runs
              each model's module on the rows of that model; all others run once on all rows
    cache     keys and values of a token depend on the model: each has a root of its own in the
              allocator's prefix tree, so that models share free blocks but no prefix

BlockLLM also shares blocks that are only similar, stitches blocks of different widths together and
places blocks on many devices; these change outputs or need training and are left out.

Cost: a gather and a scatter of the rows for each module that differs. Memory is the base and what
differs; with K models that differ in a share s of the weights, 1 + K s instead of 1 + K models.
When it loses: many models with few rows each: a step reads the weights of all of them for small
matmuls, and at s = 1 it runs one model after the other. A fine-tune that changes all tensors shares
nothing; if the change has a low rank, use LoRA and adapters.py. Bitwise sharing is lost once a
checkpoint is stored in another dtype. Steps are not captured in CUDA graphs, and layers that differ
are not fused on a CPU: where memory suffices for separate models, those may be faster.

Hook: Engine(adapters=pool), as adapters.py's pool: `get` names a request's model and `prepare` the
rows of a step; `head` is called for the logits. Equivalence (test_all.py): a mixed batch == each
model alone, token for token in fp32. Needs: torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, nn


def _check(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(eq=False)
class SharedModel:
    """One fine-tune. For the scheduler it is an adapter without weights in KV blocks."""

    name: str
    root: int  # a node of the prefix tree, below 0, the parent of its KV
    own_bytes: int  # of tensors that no model loaded before has
    shared_bytes: int
    num_blocks: int = 0
    num_missing: int = 0
    text_format: Any = None  # huggingface/fine_tune.py's; None: the base's

    def resident(self) -> list[int]:
        return []

    share = allocate = resident


@dataclass(eq=False)
class Batch:
    """The rows of each model, None for the base, in a step; between steps it is empty."""

    rows: dict[SharedModel | None, Tensor] = field(default_factory=dict)


class ModulePerRow(nn.Module):
    """A module of the base, and those of the models in which its tensors differ. Its input and
    output are (N, ...) or (1, N, ...) for the N rows of a step."""

    def __init__(self, default: nn.Module, batch: Batch):
        super().__init__()
        self.default, self.batch = default, batch
        self.others = nn.ModuleList()
        self.by_model: dict[SharedModel | None, nn.Module] = {}

    @property
    def weight(self) -> Tensor:
        return self.default.weight

    def add(self, model: SharedModel, module: nn.Module) -> None:
        """Let a model's rows run its own module, or an earlier model's with the same tensors."""
        same = next((other for other in self.others if _same_tensors(other, module)), None)
        if same is None:
            self.others.append(module)
        self.by_model[model] = module if same is None else same

    def forward(self, x: Tensor) -> Tensor:
        captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
        assert not captured, "the rows of a step change: use Engine(static=False)"
        groups: dict[nn.Module, list[Tensor]] = {}
        for model, rows in self.batch.rows.items():
            groups.setdefault(self.by_model.get(model, self.default), []).append(rows)
        if len(groups) <= 1:
            return next(iter(groups), self.default)(x)
        x, lead = (x[0], (1,)) if len(x) == 1 else (x, ())
        parts = [module(x[torch.cat(rows)]) for module, rows in groups.items()]
        y = parts[0].new_empty(len(x), *parts[0].shape[1:])
        y[torch.cat([*chain(*groups.values())])] = torch.cat(parts)
        return y.view(*lead, *y.shape)


class ModelPool:
    """The base and its fine-tunes, as the adapters of an Engine."""

    def __init__(self, model: nn.Module):
        """model: the base. `add` replaces modules of it by ModulePerRows, in place."""
        self.model, self.batch = model, Batch()
        self.adapters: dict[str, SharedModel] = {}  # by name
        self.roots, self.device = count(-1, -1), next(model.parameters()).device
        self.units = dict(_units(model))  # of the base
        self.per_row: dict[str, ModulePerRow] = {}  # in place of units
        self.tensors = {name: [t] for name, t in _named_tensors(model)}  # all versions of each

    def share(self, name: str, module: nn.Module) -> nn.Module:
        """load_checkpoint's convert_module: replace a module's own tensors by those of the pool's
        models that have the same bits. Returns the module. ValueError if a tensor differs that all
        models must have in common."""
        own = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        for leaf, tensor in list(own):
            full_name = f"{name}.{leaf}"
            stored = self.tensors.get(full_name, [])
            same = next((t for t in stored if _same_bits(t, tensor)), None)
            if same is not None:
                setattr(module, leaf, same)
            elif stored and not any(full_name.startswith(f"{unit}.") for unit in self.units):
                raise ValueError(
                    f"{full_name} differs from the base's, but attention can only use one for all "
                    "rows; serve this model alone"
                )
        return module

    def add(self, name: str, model: nn.Module, text_format: Any = None) -> SharedModel:
        """Serve a model with modules of the base's kinds, whose tensors have been through `share`.
        ValueError if the name is in use."""
        _check(name not in self.adapters, f"model {name!r} is given twice")
        stored = {id(t) for tensors in self.tensors.values() for t in tensors}
        sizes: dict[int, int] = {}  # bytes of each tensor of the model, by id
        for full_name, tensor in _named_tensors(model):
            sizes[id(tensor)] = tensor.nbytes
            if id(tensor) not in stored:
                self.tensors[full_name].append(tensor)
        own = sum(n for key, n in sizes.items() if key not in stored)
        shared = sum(sizes.values()) - own
        new = SharedModel(name, next(self.roots), own, shared, text_format=text_format)
        self.adapters[name] = new
        for path, default in self.units.items():
            unit = model.get_submodule(path)
            if not _same_tensors(unit, default):
                self._replace(path).add(new, unit)
        return new

    def _replace(self, path: str) -> ModulePerRow:
        """The ModulePerRow in place of a module of the base."""
        if path not in self.per_row:
            module = self.per_row[path] = ModulePerRow(self.units[path], self.batch)
            parent, _, leaf = path.rpartition(".")
            setattr(self.model.get_submodule(parent), leaf, module)
            self.model.layer_groups = None  # they have the layers' own modules
        return self.per_row[path]

    def bind(self, cache: Any, allocator: Any, max_rows: int, max_slots: int) -> None:
        """Called by the Engine when it is made; nothing is kept in KV blocks."""

    def load(self, loads: Sequence[Any]) -> None:
        """Called by the Engine before a step that needs weights in blocks; none is needed here."""

    def get(self, name: str) -> SharedModel:
        """ValueError if there is none of that name."""
        known = ", ".join(self.adapters) or "none"
        _check(name in self.adapters, f"model {name!r} is not loaded; loaded: {known}")
        return self.adapters[name]

    def prepare(self, rows: Sequence[tuple[SharedModel | None, int]]) -> None:
        """The model of each sequence of the next step and the number of its rows; () once the step
        has run: drafters run the base."""
        indices: dict[SharedModel | None, list[int]] = {}
        at = 0
        for model, n in rows:
            indices.setdefault(model, []).extend(range(at, at + n))
            at += n
        to_tensor = lambda index: torch.tensor(index, device=self.device)
        self.batch.rows = {model: to_tensor(index) for model, index in indices.items()}

    def head(self, hidden: Tensor, models: Sequence[SharedModel | None]) -> Tensor:
        """Logits (R, V) of hidden states (R, C), each row with the head of its model."""
        self.prepare([(model, 1) for model in models])
        try:
            return self.model.head(hidden)
        finally:
            self.prepare([])


def _units(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The smallest modules that compute each row by itself, by name: those without children, and
    MoE layers. Not MLA's kv_b_proj, whose weight the attention reads."""
    for name, child in module.named_children():
        if f"{prefix}{name}" == "mtp":  # of drafters, which run the base
            continue
        if hasattr(child, "experts") or not any(True for _ in child.children()):
            if not (hasattr(module, "absorb_up_to") and name == "kv_b_proj"):
                yield f"{prefix}{name}", child
        else:
            yield from _units(child, f"{prefix}{name}.")


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All but those of multi-token prediction; a tied parameter under each of its names."""
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers())
    return ((name, tensor) for name, tensor in named if not name.startswith("mtp."))


def _same_tensors(a: nn.Module, b: nn.Module) -> bool:
    """Whether two modules of one kind hold the same tensor objects: `share` makes equal ones so."""
    ids = lambda module: [id(t) for t in chain(module.parameters(), module.buffers())]
    return ids(a) == ids(b)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are equal: NaN equals itself, 0.0 and -0.0 differ."""
    same_kind = a.dtype == b.dtype and a.shape == b.shape
    return same_kind and torch.equal(a.detach().view(torch.uint8), b.detach().view(torch.uint8))


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


@torch.inference_mode()
def main() -> None:
    """A linear layer and 1, 4 and 16 models that differ in it: rows of all in turn == each model
    alone; the time of the step beside that of the base's layer."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    device = "cuda" if torch.cuda.is_available() else "cpu"
    C = 4096 if device == "cuda" else 512
    x = torch.randn(64, C, device=device)
    print(f"{device}, {C} x {C}, fp32, 64 rows\n{'models':>7}{'base ms':>10}{'per row ms':>12}")
    for n in (1, 4, 16):
        make = lambda: nn.Sequential(nn.Linear(C, C, bias=False, device=device))
        pool, others = ModelPool(make()), [make() for _ in range(n)]
        base = pool.model[0]
        models = [pool.add(f"m{i}", other) for i, other in enumerate(others)]
        pool.prepare([(models[i % n], 1) for i in range(64)])
        want = torch.stack([others[i % n](x[i]) for i in range(64)])
        assert torch.allclose(pool.model(x), want, atol=1e-4)
        ms = [1e3 * Timer("f(x)", globals=dict(f=f, x=x)).blocked_autorange().median
              for f in (base, pool.model)]  # fmt: skip
        print(f"{n:>7}{ms[0]:>10.3f}{ms[1]:>12.3f}")


if __name__ == "__main__":
    main()
