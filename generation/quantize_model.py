"""Quantizes a whole model for generate.py: --quantize, --calibrate, --save, --quantize-report.

    python generate.py --quantize int8                           quantized while it loads
    python generate.py --quantize int4 --calibrate gptq --save DIR
    python generate.py --quantize-report                         size, loss and speed per scheme

Composition only: schemes are in quantize.py, calibration methods in calibrate.py, fast matmuls in
generation/cpu.py and gemm.py. This file knows the model: which linears read the same input, what a
block is, and where the calibration text comes from.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import json
import os
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from generation import cpu
from generation.config import GenerateConfig
from huggingface.tokenizer import Tokenizer, load_tokenizer
from huggingface.weights import hf_modules, hf_tensors, load_checkpoint, read_config
from huggingface.weights import save_checkpoint, write_atomically
from model import LatentAttention, ModelConfig, MoE, Transformer, causal_attention, rope_cos_sin
from huggingface import gguf_checkpoint
from quantization.calibrate import (
    Stats,
    accumulate_saliency,
    awq_scales,
    bias_correction,
    equalize_,
    fold_,
    gptq,
    layer_by_layer,
    observe,
    round_to_nearest,
    select_salient,
    smooth_scales,
)
from quantize import (
    QTensors,
    QuantizedLinear,
    Scheme,
    block_linear,
    check_skip,
    check_weights,
    fp8_linear,
    fp8_matmul,
    from_config,
    get_scheme,
    quantizable_modules,
    quantizable_weights,
    quantize_,
    quantize_module,
    quantize_modules_,
    to_config,
    use_linear_fn_,
    weight_only,
)

NUM_SEQUENCES, SEQ_LEN = 32, 512  # of the calibration text
TEXT_FILES = (  # prefixes of tokenizer and generation files, which --save copies
    "tokenizer", "special_tokens_map", "added_tokens", "generation_config", "chat_template",
    "vocab", "merges",
)  # fmt: skip
TACQ_KEEP_FRACTION = 0.0035  # of all weights, in 16 bits (arXiv:2504.07389, 4)

# --------------------------------------------------------------------------------------------------
# Loading and saving
# --------------------------------------------------------------------------------------------------


def load(
    args: GenerateConfig,
    device: torch.device,
    dtype: torch.dtype | None,
    tokenizer: Callable[[], Tokenizer],
    prepare: Callable[[Transformer], Any] | None = None,
) -> Transformer:
    """The model of --checkpoint, quantized as its config.json or --quantize specifies. First,
    prepare(model) is called with the model on the meta device."""
    path = args.checkpoint / "config.json"
    read_config(path)  # raises ValueError if it is invalid
    stored = json.loads(path.read_text(encoding="utf-8")).get("quantization_config") or {}
    if stored.get("quant_method") != "sheaf":
        return optimize_for_inference_(load_and_quantize(args, device, dtype, tokenizer, prepare))
    if args.quantize is not None:
        raise ValueError(
            f"--quantize: {args.checkpoint} is already quantized ({stored.get('scheme')}); remove "
            "the flag, or give the original checkpoint"
        )

    def prepare_quantized(model: Transformer) -> None:
        if prepare is not None:
            prepare(model)
        try:
            if isinstance(stored.get("gguf"), dict):
                quantize_stored_(model, stored["gguf"])
            else:
                from_config(model, stored)
        except ValueError as e:
            raise ValueError(f"{path}: {e}") from None

    model = load_checkpoint(args.checkpoint, device, dtype, prepare=prepare_quantized)
    return optimize_for_inference_(model)


def quantize_stored_(model: Transformer, schemes: Mapping[str, str]) -> None:
    """Quantize, on the meta device, the layers that a GGUF file has in a scheme of quantize.py:
    Hugging Face name of a linear layer or a stack of experts -> scheme."""
    names = hf_modules(model)
    for name, module in quantizable_modules(model).items():
        weights = {
            w: schemes.get(names.get(w, f"model.{w}")) for w in quantizable_weights(name, module)
        }
        for scheme in set(weights.values()) - {None}:
            skip = [weight for weight in weights if weights[weight] != scheme]
            quantize_modules_(model, {name: module}, get_scheme(scheme), skip)


def load_and_quantize(
    args: GenerateConfig,
    device: torch.device,
    dtype: torch.dtype | None,
    tokenizer: Callable[[], Tokenizer],
    prepare: Callable[[Transformer], Any] | None = None,
) -> Transformer:
    """The model of --checkpoint, quantized layer by layer while loading, or calibrated after."""
    config = read_config(args.checkpoint / "config.json")
    scheme, skip = requested_scheme(args), skip_names(args, config)
    with torch.device("meta"):
        meta_model = Transformer(config)  # validates the flags before any weight is read
        validate_skip(meta_model, skip)
        quantize_(meta_model, args.quantize, skip=skip, group_size=args.group_size)
    if args.calibrate is None:
        cpu.keep_freed_memory(2**22)  # temporaries; unquantized layers are returned
        skip += ("head",) if config.tie_embeddings else ()  # the last stage of --pp has a copy
        convert = partial(quantize_module, scheme=scheme, skip=skip)
        options = dict(prepare=prepare, convert_module=convert)
        return load_checkpoint(args.checkpoint, device, dtype, **options)
    check_calibration(args, scheme)
    with torch.inference_mode(False), torch.no_grad():  # tacq enables gradients itself
        model = load_checkpoint(args.checkpoint, device, dtype)
        needs_text = args.calibrate != "equalize"
        batches = calibration_text(args, model, tokenizer()) if needs_text else []
        calibrate_(model, args.calibrate, scheme, skip, batches)
    return model


def quantize_dummy_(args: GenerateConfig, model: Transformer) -> None:
    """--quantize with --dummy: quantize a model with random weights."""
    requested_scheme(args)
    cpu.keep_freed_memory(2**22)  # temporaries; unquantized layers are returned
    skip = skip_names(args, model.config)
    validate_skip(model, skip)
    if model.config.tie_embeddings and model.embed is None and model.head is not None:
        skip += ("head",)  # the last stage of --pp has a copy
    quantize_(model, args.quantize, skip=skip, group_size=args.group_size)
    optimize_for_inference_(model)


def optimize_for_inference_(model: Transformer) -> Transformer:
    """Replace quantize.py's plain torch matmul by the kernel for this device."""
    if next(model.parameters()).is_cuda:
        from quantization.gemm import block_scaled_matmul, weight_only_matmul

        def linear_fn(x: Tensor, qweight: Tensor, scales: Tensor, zeros: Any, bias: Any) -> Tensor:
            few_rows, group = x.numel() <= 64 * x.shape[-1], x.shape[-1] // scales.shape[1]
            fits = few_rows and (zeros is None or group in (32, 64, 128))
            return (weight_only_matmul if fits else weight_only)(x, qweight, scales, zeros, bias)

        use_linear_fn_(model, linear_fn)
        matmul = partial(block_scaled_matmul, fallback=fp8_matmul)
        use_linear_fn_(model, partial(fp8_linear, matmul=matmul), fp8_linear)
    elif cpu.load_kernels() is not None:
        use_linear_fn_(model, partial(cpu.packed_linear, fallback=weight_only))
        use_linear_fn_(model, partial(cpu.block_linear, fallback=block_linear), block_linear)
    return model


def requested_scheme(args: GenerateConfig) -> Scheme:
    """The scheme of --quantize and --group-size."""
    try:
        return get_scheme(args.quantize, args.group_size)
    except ValueError as e:
        flag = "--group-size" if str(e).startswith("group_size") else "--quantize"
        raise ValueError(f"{flag}: {e}") from None


def skip_names(args: GenerateConfig, config: ModelConfig) -> tuple[str, ...]:
    """Modules not to quantize: those of quantize_skip, and latent attention's kv_b_proj, which
    decoding absorbs as a matrix and would have to dequantize at every step."""
    names = tuple(filter(None, args.quantize_skip.split(",")))
    return names + ("kv_b_proj",) * (config.kv_lora_rank > 0 and "kv_b_proj" not in names)


def validate_skip(model: Transformer, skip: tuple[str, ...]) -> None:
    """ValueError, which names the flag, unless all names of skip match."""
    try:
        check_skip(model, skip)
    except ValueError as e:
        raise ValueError(f"--set quantize_{e}") from None


def check_save(args: GenerateConfig) -> None:
    """ValueError if --save would overwrite something, or writes nothing new, or GGUF lacks the
    scheme of --quantize."""
    out = args.save
    if out.suffix != ".gguf" and args.quantize is None:
        raise ValueError(f"--save {out} requires --quantize, or a name that ends in .gguf")
    if out.exists() and (not out.is_dir() or any(out.iterdir()) or out.suffix == ".gguf"):
        raise ValueError(f"--save {out}: exists and is not an empty folder; name another")
    if out.suffix == ".gguf" and args.quantize not in (None, "q8_0", "q4_0"):
        raise ValueError(f"--save {out}: GGUF has q8_0 and q4_0, not --quantize {args.quantize}")
    existing = next(path for path in out.absolute().parents if path.exists())
    folder = out.absolute().parent if out.suffix == ".gguf" else existing
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"--save {out}: no folder {folder} that can be written; name another")


def save(args: GenerateConfig, model: Transformer) -> str:
    """--save: write a folder that generate.py can load, or a GGUF file. Returns a one-line
    summary."""
    out, source = args.save, args.checkpoint
    if out.suffix == ".gguf":
        try:
            tensors = hf_tensors(model)
            write_atomically(
                out, lambda tmp: gguf_checkpoint.write(tmp, model.config, tensors, source)
            )
        except ValueError as e:
            raise ValueError(f"--save {out}: {e}") from None
        return f"{out}: {out.stat().st_size / 1e6:.1f} MB"
    config = to_config(model, args.quantize, args.group_size, skip_names(args, model.config))
    if args.calibrate is not None:
        config["calibrated"] = args.calibrate
    save_checkpoint(model, out, quantization=config)
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name.startswith(TEXT_FILES):
            shutil.copyfile(path, out / path.name)
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    return f"{out}: {args.quantize}, {size / 1e6:.1f} MB of weights"


# --------------------------------------------------------------------------------------------------
# Calibration
# --------------------------------------------------------------------------------------------------


def check_calibration(args: GenerateConfig, scheme: Scheme) -> None:
    """ValueError if the method of --calibrate does not apply to the scheme of --quantize."""
    is_integer = scheme.spec is not None
    fits = {
        "gptq": is_integer,
        "awq": is_integer and bool(scheme.spec.group_size),
        "tacq": is_integer and bool(scheme.spec.group_size),
        "smoothquant": not scheme.is_weight_only,
        "equalize": True,
        "bias": True,
    }
    if not fits[args.calibrate]:
        schemes = {"gptq": "int8 to int2", "awq": "int4 to int2", "tacq": "int4 to int2"}
        schemes = schemes.get(args.calibrate, "int8-dynamic, llm.int8 or fp8")
        raise ValueError(
            f"--calibrate {args.calibrate} requires --quantize {schemes}, not {args.quantize}"
        )


def calibration_text(
    args: GenerateConfig, model: Transformer, tokenizer: Tokenizer, validation: bool = False
) -> list[Tensor]:
    """Sequences (1, T) of calibration_text or, without it, of the standard library's source: of
    the training split, or of train.py's validation split."""
    from training.data import read_documents, split_documents  # imported only where it is needed

    path, T = args.calibration_text, min(SEQ_LEN, model.config.context)
    source = "the standard library" if path is None else f"--set calibration_text={path}"
    if path is not None and not path.is_file():
        raise ValueError(f"{source}: no such file")
    try:
        texts = split_documents(read_documents(None if path is None else str(path)))[validation]
    except ValueError as e:
        raise ValueError(str(e).replace("--data", "--set calibration_text")) from None
    step = max(1, len(texts) // (4 * NUM_SEQUENCES))  # from the whole text
    ids: list[int] = []
    for text in (text for first in range(step) for text in texts[first::step]):
        ids += tokenizer.encode(text)
        if len(ids) > NUM_SEQUENCES * T:
            break
    n = min(NUM_SEQUENCES, len(ids) // T)
    if n == 0:
        raise ValueError(f"{source}: {len(ids)} tokens, fewer than one sequence of {T}; give more")
    device = model.embed.weight.device
    return list(torch.tensor(ids[: n * T], device=device).view(n, 1, T))


@torch.no_grad()
def calibrate_(
    model: Transformer, method: str, scheme: Scheme, skip: Sequence[str], batches: Sequence[Tensor]
) -> None:
    """Quantize the model in place by a calibration method on batches of (1, T) tokens: block by
    block, each on the outputs of the quantized blocks before it. Head and MTP layers are rounded to
    nearest. "equalize" reads no batches."""
    if method == "equalize":
        for block in model.layers:
            equalize_block_(block)
        return quantize_modules_(model, quantizable_modules(model, skip), scheme, skip)
    kept = select_kept_weights(model, scheme, skip, batches) if method == "tacq" else {}
    positions = torch.arange(batches[0].shape[1], device=batches[0].device)
    rope = rope_cos_sin(model.config, positions)
    run = lambda block, x: block(x, rope, positions, causal_attention)
    states = [model.embed(tokens) for tokens in batches]
    for i, block, replay in layer_by_layer(model.layers, states, run):
        if method in ("awq", "smoothquant"):
            fold_scales_(block, method, scheme, replay)
            continue  # folding changes no output; the weights are rounded below
        modules = {f"layers.{i}.{name}": m for name, m in quantizable_modules(block).items()}
        if method == "bias":
            quantize_and_correct_biases_(model, modules, scheme, skip, replay)
            continue
        with observe_hessians(modules) as stats:
            replay()
        quantize_modules_(model, modules, scheme, skip, partial(gptq_rounding, scheme, stats, kept))
    quantize_modules_(model, quantizable_modules(model, skip), scheme, skip)
    for name, (index, values) in kept.items():
        model.get_submodule(name).keep_unquantized(index, values)


@contextmanager
def observe_hessians(modules: dict[str, nn.Module]) -> Iterator[dict[str, Stats]]:
    """Hessians of the inputs of these linears and of both linears of each expert of MoE layers."""
    moe_layers = {name: m for name, m in modules.items() if isinstance(m, MoE)}
    linears = {name: m for name, m in modules.items() if name not in moe_layers}
    with observe(linears, "hessian") as stats:
        hooks = {name: m.experts for name, m in moe_layers.items()}
        for name, m in moe_layers.items():
            m.experts = partial(_observe_experts, name, stats, m.experts)
        try:
            yield stats
        finally:
            for name, m in moe_layers.items():
                m.experts = hooks[name]


def _observe_experts(
    name: str,
    stats: dict[str, Stats],
    experts: Callable[..., Tensor],
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
) -> Tensor:
    for e in ids.unique().tolist():
        tokens = x[(ids == e).any(-1)]
        gate, up = F.linear(tokens, w_gate_up[e]).chunk(2, dim=-1)
        for leaf, inputs in (("w_gate_up", tokens), ("w_down", F.silu(gate) * up)):
            stats.setdefault(f"{name}.{leaf}.{e}", Stats("hessian")).update(inputs)
    return experts(x, weights, ids, w_gate_up, w_down)


def gptq_rounding(
    scheme: Scheme,
    stats: dict[str, Stats],
    kept: dict[str, tuple[Tensor, Tensor]],
    name: str,
    weight: Tensor,
) -> QTensors:
    """The `rounding` of quantize_ by GPTQ; to nearest for an expert that no token was routed to."""
    if name not in stats or stats[name].count == 0:
        scales, zeros = scheme.spec.choose_qparams(weight)
        return scheme.spec.quantize(weight, scales, zeros), scales, zeros
    keep = None
    if name in kept:
        keep = torch.zeros(weight.numel(), dtype=torch.bool, device=weight.device)
        keep[kept[name][0]] = True
        keep = keep.view_as(weight)
    return gptq(weight, stats[name].hessian, scheme.spec, keep=keep)


def fold_mappings(block: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module], list[Tensor]]]:
    """Where scales of a block can be folded: (producer, the linears that read its output, the bare
    parameters that read it)."""
    attention, mlp = block.attention, block.mlp
    if isinstance(attention, LatentAttention):
        first = attention.q_proj if attention.q_proj is not None else attention.q_a_proj
        yield block.attention_norm, [first, attention.kv_a_proj], []
        if attention.q_proj is None:
            yield attention.q_a_norm, [attention.q_b_proj], []
    else:
        yield block.attention_norm, [attention.q_proj, attention.k_proj, attention.v_proj], []
    if isinstance(mlp, MoE):
        shared = [] if mlp.shared is None else [mlp.shared.gate_proj, mlp.shared.up_proj]
        if shared:  # on which the input is observed
            yield block.mlp_norm, shared, [mlp.router, mlp.w_gate_up]
        mlp = mlp.shared
    else:
        yield block.mlp_norm, [mlp.gate_proj, mlp.up_proj], []
    if mlp is not None:
        yield mlp.up_proj, [mlp.down_proj], []


def fold_scales_(block: nn.Module, method: str, scheme: Scheme, replay: Callable[[], None]) -> None:
    """Fold AWQ's or SmoothQuant's scales into every mapping of the block."""
    mappings = list(fold_mappings(block))
    first = {str(i): linears[0] for i, (_, linears, _) in enumerate(mappings)}
    names = ("absmax",) if method == "smoothquant" else ("mean_abs", "hessian")
    with observe(first, *names) as stats:
        replay()
    for i, (producer, linears, parameters) in enumerate(mappings):
        inputs, weights = stats[str(i)], [m.weight for m in linears]
        if method == "smoothquant":
            s = smooth_scales(inputs.absmax, weights)
        else:
            s = awq_scales(weights, inputs.mean_abs, inputs.hessian, scheme.spec)
        fold_(producer, [*linears, *parameters], s)


def equalize_block_(block: nn.Module) -> None:
    """Equalize each pair of linears with nothing but a product per channel between them: up and
    down projections, also of experts; v and o projections, unless query heads share value heads."""
    attention, mlp, pairs = block.attention, block.mlp, []
    if isinstance(mlp, MoE):
        for gate_up, down in zip(mlp.w_gate_up, mlp.w_down):
            pairs.append((view_as_linear(gate_up.chunk(2)[1]), view_as_linear(down)))
        mlp = mlp.shared
    pairs += [] if mlp is None else [(mlp.up_proj, mlp.down_proj)]
    v_proj = getattr(attention, "v_proj", None)  # None in latent attention
    if v_proj is not None and v_proj.out_features == attention.o_proj.in_features:
        pairs.append((v_proj, attention.o_proj))
    for first, second in pairs:
        equalize_(first, second)


def view_as_linear(weight: Tensor) -> nn.Linear:
    """An nn.Linear without bias whose weight (N, K) is this view, for writing into it."""
    linear = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def quantize_and_correct_biases_(
    model: Transformer,
    modules: dict[str, nn.Module],
    scheme: Scheme,
    skip: Sequence[str],
    replay: Callable[[], None],
) -> None:
    """Round the modules of a block to nearest, and correct the mean output of its linears by their
    biases. Stacked experts have no biases, so theirs is not corrected."""
    linears = {name: m for name, m in modules.items() if type(m) is nn.Linear}
    with observe(linears, "mean") as stats:
        replay()
    quantize_modules_(model, modules, scheme, skip)
    for name, linear in linears.items():
        new, mean = model.get_submodule(name), stats[name].mean
        if isinstance(new, QuantizedLinear) and mean is not None:
            new.add_to_bias(bias_correction(linear.weight, new.weight, mean))


def select_kept_weights(
    model: Transformer, scheme: Scheme, skip: Sequence[str], batches: Sequence[Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """TaCQ: for each linear the flat indices of the weights to keep in 16 bits, and the weights."""
    modules = quantizable_modules(model, skip)
    matrices = {n: m.weight for n, m in modules.items() if type(m) is nn.Linear}

    def loss(tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    fake_quantize = partial(round_to_nearest, scheme.spec)
    saliency = accumulate_saliency(model, matrices, loss, batches, fake_quantize)
    indices = select_salient(saliency, TACQ_KEEP_FRACTION)
    return {n: (i, matrices[n].detach().view(-1)[i]) for n, i in indices.items() if len(i)}


# --------------------------------------------------------------------------------------------------
# --quantize-report
# --------------------------------------------------------------------------------------------------

# (label, scheme, calibration); the first is the baseline
REPORT_SCHEMES: tuple[tuple[str, str | None, str | None], ...] = (
    ("16 bit", None, None),
    ("int8", "int8", None),
    ("q8_0", "q8_0", None),
    ("int4", "int4", None),
    ("q4_0", "q4_0", None),
    ("int4 gptq", "int4", "gptq"),
    ("int4 awq", "int4", "awq"),
    ("int4 equalize", "int4", "equalize"),
    ("int4 bias", "int4", "bias"),
    ("int3 gptq", "int3", "gptq"),
    ("int2 gptq", "int2", "gptq"),
    ("int2 tacq", "int2", "tacq"),
    ("int8-dynamic", "int8-dynamic", None),
    ("int8-dynamic smoothquant", "int8-dynamic", "smoothquant"),
    ("llm.int8", "llm.int8", None),
    ("fp8", "fp8", None),
    ("fp8-block", "fp8-block", None),
    ("2:4 sparse", "2:4", None),
)
BATCH_SIZES = (1, 8, 32)


@dataclass
class ReportRow:
    """One scheme: its size, its loss on the validation split compared with 16 bits, and its
    decoding speed."""

    scheme: str
    megabytes: float
    loss: float  # nats per token
    perplexity: float
    loss_percent: float  # increase over 16 bits
    kl: float  # KL divergence of the next-token distribution from 16 bits, nats
    agreement: float  # fraction of positions with the same argmax
    tokens_per_second: dict[int, float]  # by batch size
    slower: list[int]  # batch sizes at which 16 bits is faster
    # with --choices: acc and acc_norm of serving/evaluate.py, and their difference from 16 bits
    accuracy: tuple[float, ...] = ()
    accuracy_delta: tuple[float, ...] = ()


PLOT_SUFFIXES = ".png", ".svg", ".pdf"


def check_report(args: GenerateConfig) -> None:
    """Validate the flags of --quantize-report before minutes of work; ValueError names the flag."""
    if args.group_size is not None:
        requested_scheme(replace(args, quantize="int4"))
    if args.plot is not None:
        from training.metrics import pyplot

        if not args.plot.parent.is_dir():
            raise ValueError(f"--set plot {args.plot}: folder {args.plot.parent} does not exist")
        if args.plot.suffix not in PLOT_SUFFIXES:
            names = ", ".join(PLOT_SUFFIXES)
            raise ValueError(f"--set plot {args.plot}: give a name that ends in {names}")
        pyplot()


@torch.inference_mode(False)
@torch.no_grad()
def report(
    args: GenerateConfig,
    device: torch.device,
    dtype: torch.dtype | None,
    tokenizer: Tokenizer,
    speed: Callable[[Transformer, int], float],
    accuracy: Callable[[Tokenizer, Transformer], tuple[float, float]] | None,
) -> Iterator[ReportRow]:
    """Yield a ReportRow for each scheme, 16 bits first. speed(model, batch size) -> tokens per
    second of decoding; it may prepare the model for that. accuracy: see ReportRow."""
    reference = load_checkpoint(args.checkpoint, device, dtype)
    validate_skip(reference, skip_names(args, reference.config))
    batches = calibration_text(args, reference, tokenizer)
    validation = calibration_text(args, reference, tokenizer, validation=True)
    baseline = None
    for label, scheme, method in REPORT_SCHEMES:
        model = load_checkpoint(args.checkpoint, device, dtype)
        if not try_quantize_(args, model, scheme, method, batches):
            print(f"generate.py: {label} does not fit this model: skipped", file=sys.stderr)
            continue
        size = sum(t.nbytes for t in {*model.parameters(), *model.buffers()})
        loss, kl, agreement = compare(reference, model, validation)
        found = () if accuracy is None else accuracy(tokenizer, model)
        delta = tuple(a - b for a, b in zip(found, baseline.accuracy if baseline else found))
        speeds = {b: speed(model, b) for b in BATCH_SIZES}
        slower = [b for b in BATCH_SIZES if baseline and speeds[b] < baseline.tokens_per_second[b]]
        row = ReportRow(
            label,
            megabytes=size / 1e6,
            loss=loss,
            perplexity=math.exp(loss),
            loss_percent=100 * (loss / baseline.loss - 1) if baseline else 0.0,
            kl=kl,
            agreement=agreement,
            tokens_per_second=speeds,
            slower=slower,
            accuracy=found,
            accuracy_delta=delta,
        )
        baseline = baseline or row
        yield row


def try_quantize_(
    args: GenerateConfig,
    model: Transformer,
    scheme: str | None,
    method: str | None,
    batches: Sequence[Tensor],
) -> bool:
    """Quantize the model in place; False if the scheme does not fit its shapes."""
    skip = skip_names(args, model.config)
    grouped = scheme in ("int4", "int3", "int2")
    group_size = args.group_size if grouped else None
    try:
        if scheme == "2:4" and any(isinstance(m, MoE) for m in model.modules()):
            return False  # sparse.py does not prune stacked experts
        if scheme == "2:4":
            from quantization.sparse import sparsify_  # here: it imports Triton

            sparsify_(model, 2, 4, skip)
        elif method is not None:
            chosen = get_scheme(scheme, group_size)
            check_weights(quantizable_modules(model, skip), chosen.check, skip)
            calibrate_(model, method, chosen, skip, batches)
        elif scheme is not None:
            quantize_(model, scheme, skip=skip, group_size=group_size)
    except ValueError as e:
        if "divide" not in str(e):
            raise
        return False
    optimize_for_inference_(model)
    return True


def compare(
    reference: Transformer, model: Transformer, batches: Sequence[Tensor]
) -> tuple[float, float, float]:
    """(loss in nats per token, KL divergence from the reference's next-token distribution, fraction
    of positions with the same argmax)."""
    loss, kl, same, count = 0.0, 0.0, 0, 0
    for tokens in batches:
        expected = reference(tokens[:, :-1])[0].float().log_softmax(-1)
        actual = model(tokens[:, :-1])[0].float().log_softmax(-1)
        loss += F.nll_loss(actual, tokens[0, 1:], reduction="sum").item()
        kl += (expected.exp() * (expected - actual)).sum().item()
        same += (expected.argmax(-1) == actual.argmax(-1)).sum().item()
        count += len(expected)
    return loss / count, kl / count, same / count


def report_line(r: ReportRow) -> str:
    """Format one row; a star marks batch sizes at which 16 bits decodes faster."""
    speeds = (f"{v:.1f}{'*' if b in r.slower else ' '}" for b, v in r.tokens_per_second.items())
    return (
        f"{r.scheme:<25}{r.megabytes:>9.2f}{r.loss:>9.4f}{r.loss_percent:>8.2f}%"
        f"{r.perplexity:>9.3f}{r.kl:>9.5f}{r.agreement:>7.1%}"
        + "".join(f"{text:>12}" for text in speeds)
        + "".join(f"{a:>8.1%}{100 * d:>+7.1f}" for a, d in zip(r.accuracy, r.accuracy_delta))
    )


REPORT_HEADER = f"{'scheme':<25}{'MB':>9}{'loss':>9}{'more':>9}{'ppl':>9}{'KL':>9}{'same':>7}"
REPORT_HEADER += "".join(f"{f'tok/s x{b}':>12}" for b in BATCH_SIZES)
ACCURACY_HEADER = f"{'acc':>8}{'+/-':>7}{'norm':>8}{'+/-':>7}"  # percent; points against 16 bits


def plot(rows: Sequence[ReportRow], path: Path) -> None:
    """Plot loss against megabytes, one point per scheme."""
    from training.metrics import pyplot

    figure, axes = pyplot().subplots(figsize=(10, 5))
    axes.scatter([r.megabytes for r in rows], [r.loss for r in rows])
    done: list[ReportRow] = []
    for r in sorted(rows, key=lambda r: r.loss):  # labels of points in one place form a column
        crowd = sum(
            abs(r.megabytes / d.megabytes - 1) < 0.03 and r.loss - d.loss < 0.01 for d in done
        )
        offset = (6, 12 * crowd - 3)
        where = (r.megabytes, r.loss), offset
        axes.annotate(r.scheme, *where, textcoords="offset points", fontsize=8)
        done.append(r)
    axes.margins(0.1)
    axes.set(xlabel="MB of weights", ylabel="validation loss (nats per token)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def print_report(
    args: GenerateConfig, device: torch.device, dtype: torch.dtype | None,
    speed: Callable[[Transformer, int], float],
    accuracy: Callable[[Tokenizer, Transformer], tuple[float, float]] | None = None,
) -> None:  # fmt: skip
    """--quantize-report: print a line per scheme, or with --json a list of them; plot them to
    args.plot. accuracy: see ReportRow."""
    check_report(args)
    rows, show = [], (lambda line: None) if args.json else partial(print, flush=True)
    show(REPORT_HEADER + ACCURACY_HEADER * (accuracy is not None))
    for row in report(args, device, dtype, load_tokenizer(args.checkpoint), speed, accuracy):
        show(report_line(row))
        rows.append(row)
    show("* slower than 16 bit")
    if args.json:
        print(json.dumps([vars(row) for row in rows]))
    if args.plot is not None:
        plot(rows, args.plot)
