"""generate.py: text from a checkpoint, and the speed at which it came.

    python generate.py                                       the shipped model writes Python
    python generate.py "def quicksort(" --temperature 0      greedy
    git log -1 | python generate.py --checkpoint DIR --json  any Llama-type Hugging Face folder
    python generate.py --dummy llama3.1-8b --prompt-tokens 128 --compile --bench

Generation has two regimes, and each is one function here. `prefill` runs the whole prompt through
the model in chunks: large matrix products, limited by arithmetic. `decode` runs one token: every
weight is read to be used once, so a step lasts as long as reading the weights and the KV cache
takes, and no program is faster than bytes / bandwidth. After each run one line on stderr says how
near it came: the bytes really read per second, and their share of a read bandwidth measured on the
spot.

--compile turns a decode step into one compiled graph of static shapes, on CUDA replayed as a CUDA
graph (the static cache and compiled step of gpt-fast). On a CPU it loses: there the linear layers
are cpu.py's, which read memory faster than compiled ones. Needs: model.py, cpu.py, and
sentencepiece or tokenizers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import stat
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

START = time.perf_counter()  # the imports below are part of what a user waits for

import torch
from torch import Tensor

import cpu
from model import CONFIGS, KVCache, ModelConfig, Transformer, load_checkpoint, read_config

IMPORT_SECONDS = time.perf_counter() - START

SHIPPED = Path(__file__).resolve().parent / "checkpoints" / "small"
DEFAULT_PROMPT = "class Stack:\n    def __init__(self):\n"
PREFILL_CHUNK = 512  # tokens; bounds the memory of a long prompt's mask and activations
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# --------------------------------------------------------------------------------------------------
# Tokenizers
# --------------------------------------------------------------------------------------------------


class Tokenizer(Protocol):
    """Text to ids and back. encode adds the model's begin-of-sequence token."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...


class SentencePieceTokenizer:
    """A `tokenizer.model`."""

    def __init__(self, path: Path):
        import sentencepiece

        self.sp = sentencepiece.SentencePieceProcessor()
        self.sp.load(str(path))

    def encode(self, text: str) -> list[int]:
        return self.sp.encode(text, add_bos=self.sp.bos_id() >= 0)

    def decode(self, ids: list[int]) -> str:
        size = self.sp.vocab_size()  # the model's vocabulary may be padded beyond it
        return self.sp.decode([i for i in ids if i < size])


class JSONTokenizer:
    """A `tokenizer.json` of the tokenizers library."""

    def __init__(self, path: Path):
        import tokenizers

        self.tk = tokenizers.Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        return self.tk.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        return self.tk.decode(ids, skip_special_tokens=True)


class NoTokenizer:
    """For random weights: text in as bytes, ids out as numbers."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        return [b % self.vocab_size for b in text.encode()]

    def decode(self, ids: list[int]) -> str:
        return "".join(f"<{i}>" for i in ids)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer beside the weights, decided by which file is there."""
    for name, kind in (
        ("tokenizer.model", SentencePieceTokenizer),
        ("tokenizer.json", JSONTokenizer),
    ):
        path = folder / name
        if path.exists():
            try:
                return kind(path)
            except Exception as e:  # each library has errors of its own
                raise ValueError(
                    f"{path}: not a tokenizer of this kind ({str(e).splitlines()[0]})"
                ) from None
    raise ValueError(
        f"{folder}: holds neither tokenizer.model nor tokenizer.json; copy one from where the "
        "model came from"
    )


class TextStream:
    """Ids in, printable text out: a character whose bytes are still arriving is held back."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]):
        self.tokenizer = tokenizer
        self.ids = prompt[-8:]  # some context: a piece may read differently at the start of a text
        self.shown = tokenizer.decode(self.ids)

    def push(self, token: int) -> str:
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new = text[len(self.shown) :]
        self.ids = self.ids[-8:]
        self.shown = self.tokenizer.decode(self.ids)
        return new

    def finish(self) -> str:
        """What was held back and will never be completed."""
        return self.tokenizer.decode(self.ids)[len(self.shown) :]


# --------------------------------------------------------------------------------------------------
# Sampling
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. temperature 0 is greedy; top_k 0 and top_p 1 keep the whole
    vocabulary."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0


def probabilities(logits: Tensor, how: Sampling) -> Tensor:
    """(..., V) logits -> the distribution to draw from: temperature, then top-k, then top-p,
    renormalised.

    top-p keeps the smallest set of likeliest tokens whose probability reaches top_p
    (arXiv:1904.09751).
    """
    logits = logits.float() / how.temperature
    if 0 < how.top_k < logits.shape[-1]:
        kth = logits.topk(how.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    probs = logits.softmax(-1)
    if how.top_p < 1:
        ordered, ids = probs.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # 0 for the likeliest, which therefore always stays
        kept = ordered.masked_fill(before >= how.top_p, 0.0)
        probs = torch.zeros_like(probs).scatter(-1, ids, kept)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def sample(logits: Tensor, how: Sampling, noise: Tensor | None) -> Tensor:
    """(..., V) logits -> (...) token ids.

    `noise` is Exp(1), of the logits' shape: argmax(p / noise) is a draw from p (the exponential
    race), and needs neither a host round trip nor a random generator inside a compiled graph.
    """
    if how.temperature == 0:
        return logits.argmax(-1)
    # noise may round to 0, and 0 / 0 would win: a token that top-k or top-p has ruled out
    return (probabilities(logits, how) / noise.clamp(min=1e-30)).argmax(-1)


# --------------------------------------------------------------------------------------------------
# Prefill and decode
# --------------------------------------------------------------------------------------------------


def prefill(model: Transformer, tokens: Tensor, cache: KVCache) -> Tensor:
    """Run tokens (B, T) from position 0 into the cache; logits (B, V) after the last one."""
    T = tokens.shape[1]
    for start in range(0, T, PREFILL_CHUNK):
        end = min(T, start + PREFILL_CHUNK)
        positions = torch.arange(start, end, device=tokens.device)
        attend = partial(cache.attend, limit=end)
        hidden = model(tokens[:, start:end], positions, attend, return_hidden=True)
    return model.head(hidden[:, -1])  # one row: the other T - 1 rows of logits are never looked at


def decode(
    model: Transformer,
    token: Tensor,
    position: Tensor,
    attend: Callable,
    how: Sampling,
    noise: Tensor | None,
) -> Tensor:
    """One step: token (B, 1) at position (1,) -> the next token (B, 1)."""
    logits = model(token, position, attend)[:, -1]
    return sample(logits, how, noise)[:, None]


class Decoder:
    """One sequence at a time: its cache, its random numbers, its decode step.

    Eager, a step reads just the used part of the cache. Compiled, it reads all of it, so that no
    shape ever changes: one compilation, and on CUDA one captured graph, replayed over the same
    input tensors.
    """

    def __init__(self, model: Transformer, max_len: int, how: Sampling, compiled: bool = False):
        device, dtype = model.embed.weight.device, model.embed.weight.dtype
        self.model, self.how, self.compiled = model, how, compiled
        self.cache = KVCache(model.config, 1, max_len, dtype, device)
        self.generator = torch.Generator(device)
        self.token = torch.zeros(1, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.noise = (
            torch.ones(1, model.config.vocab_size, device=device) if how.temperature > 0 else None
        )
        self.run = self._compile() if compiled else lambda: self._step(self.used)
        self.weight_bytes = weight_bytes(model)

    def start(self, prompt: Tensor, seed: int) -> int:
        """Prefill prompt (1, T); the first new token."""
        self.generator.manual_seed(seed)
        logits = prefill(self.model, prompt, self.cache)
        self._draw_noise()
        self.token.copy_(sample(logits, self.how, self.noise)[:, None])
        self.position.fill_(prompt.shape[1])
        self.used = prompt.shape[1]
        return int(self.token)

    def next(self) -> int:
        """Append the last token to the sequence; the one after it."""
        self._draw_noise()
        self.used += 1
        self.run()
        return int(self.token)

    def _step(self, limit: int | None = None) -> None:
        attend = partial(self.cache.attend, limit=limit)
        self.token.copy_(
            decode(self.model, self.token, self.position, attend, self.how, self.noise)
        )
        self.position.add_(1)

    def _compile(self) -> Callable[[], None]:
        # on CUDA this option lets the compiler write one-row products as reductions, fused with
        # their neighbours
        options = {"coordinate_descent_tuning": True} if self.token.device.type == "cuda" else {}
        step = torch.compile(self._step, fullgraph=True, dynamic=False, options=options)
        for _ in range(2):
            step()  # compiles; the slots it writes are overwritten by the first prompt
        if self.token.device.type != "cuda":
            return step
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    def _draw_noise(self) -> None:
        if self.noise is not None:
            self.noise.exponential_(generator=self.generator)

    def bytes_per_token(self) -> int:
        """What the last step read: weights and the part of the cache it looked at."""
        return self.weight_bytes + self.cache.bytes_read(None if self.compiled else self.used)


def weight_bytes(model: Transformer) -> int:
    """Bytes of weights a decode step reads: all that multiply, and one row of the embedding."""
    embed = model.embed.weight
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    looked_up = 0 if model.head.weight is embed else (len(embed) - 1) * embed[0].numel()
    return total - looked_up * embed.element_size()


def generate_tokens(
    decoder: Decoder, prompt: Tensor, seed: int, max_new: int, eos_ids: tuple[int, ...] = ()
) -> Iterator[int]:
    """At most max_new tokens after prompt (1, T), each as soon as it is known; an EOS is the
    last."""
    for i in range(max_new):
        token = decoder.start(prompt, seed) if i == 0 else decoder.next()
        yield token
        if token in eos_ids:
            return


# --------------------------------------------------------------------------------------------------
# The program
# --------------------------------------------------------------------------------------------------


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line; ValueError names a flag that is out of range."""
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    p.add_argument("prompt", nargs="?", help="text to continue; - or a pipe reads it from stdin")
    p.add_argument(
        "--checkpoint", type=Path, default=SHIPPED, metavar="DIR", help="Hugging Face folder"
    )
    p.add_argument("--max-new-tokens", type=int, default=200)
    p.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    p.add_argument(
        "--top-k", type=int, default=0, help="draw from the k likeliest tokens; 0: from all"
    )
    p.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="draw from the likeliest that reach this probability",
    )
    p.add_argument("--seed", type=int, default=0, help="same seed, same text")
    p.add_argument("--device", help="default: cuda if there is one, else cpu")
    p.add_argument("--dtype", choices=DTYPES, help="default: as stored (bf16 for --dummy)")
    p.add_argument(
        "--compile", action="store_true", help="compile the decode step (CUDA graph on CUDA)"
    )
    p.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    p.add_argument(
        "--bench",
        nargs="?",
        type=int,
        const=5,
        metavar="N",
        help="N runs (5), no EOS stop, print medians",
    )
    p.add_argument(
        "--dummy",
        metavar="CONFIG",
        help=f"random weights of a config.json, or of {', '.join(CONFIGS)}",
    )
    p.add_argument("--prompt-tokens", type=int, metavar="N", help="random token ids for a prompt")
    args = p.parse_args(argv)
    for flag, good, wanted in (
        ("--max-new-tokens", args.max_new_tokens >= 1, "at least 1"),
        ("--temperature", 0 <= args.temperature < float("inf"), "0 (greedy) or more"),
        ("--top-k", args.top_k >= 0, "0 (all) or more"),
        ("--top-p", 0 < args.top_p <= 1, "more than 0 and at most 1"),
        ("--seed", 0 <= args.seed < 2**63, "from 0 to 2**63 - 1"),
        ("--bench", args.bench is None or args.bench >= 1, "at least 1"),
        ("--prompt-tokens", args.prompt_tokens is None or args.prompt_tokens >= 1, "at least 1"),
    ):
        if not good:
            value = getattr(args, flag[2:].replace("-", "_"))
            raise ValueError(f"{flag} must be {wanted}, not {value}")
    return args


def pick_device(name: str | None) -> torch.device:
    """The device of that name, tried out; by default CUDA where there is one."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as e:
        raise ValueError(f"--device {name}: not usable here ({str(e).splitlines()[0]})") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)  # graphs are captured on the current device
    return device


def dummy_model(name: str, device: torch.device, dtype: torch.dtype) -> Transformer:
    """Random weights in the shape of a named config or a config.json."""
    if name not in CONFIGS and not Path(name).exists():
        raise ValueError(f"--dummy {name}: neither a config.json nor one of {', '.join(CONFIGS)}")
    config = CONFIGS[name] if name in CONFIGS else read_config(name)
    with torch.device("meta"):
        model = Transformer(config).to(dtype).eval()
    model = model.to_empty(device=device)
    model.tie()
    model.init_weights(torch.Generator(device).manual_seed(0))
    return model


def load(args: argparse.Namespace, device: torch.device) -> tuple[Transformer, Tokenizer]:
    """Model and tokenizer of --checkpoint, or of --dummy."""
    if args.dummy is not None:
        model = dummy_model(args.dummy, device, DTYPES[args.dtype or "bf16"])
        return model, NoTokenizer(model.config.vocab_size)
    model = load_checkpoint(args.checkpoint, device, DTYPES[args.dtype] if args.dtype else None)
    return model, load_tokenizer(args.checkpoint)


def eos_ids(args: argparse.Namespace, config: ModelConfig) -> tuple[int, ...]:
    """Every id that ends a text: config.json's, and generation_config.json's where there is one."""
    path = args.checkpoint / "generation_config.json"
    if args.bench or args.dummy:
        return ()
    if not path.exists():
        return config.eos_ids
    try:
        more = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as e:
        raise ValueError(f"{path}: not a JSON object ({e}); copy it again") from None
    more = [] if more is None else more if isinstance(more, list) else [more]
    if not all(type(i) is int for i in more):
        raise ValueError(f"{path}: eos_token_id must be an int or a list of ints, not {more!r}")
    return config.eos_ids + tuple(more)


def prompt_text(args: argparse.Namespace) -> str:
    """The prompt: the argument, stdin, or the default; ValueError if it is empty."""
    text = args.prompt
    if text == "-" or (text is None and stdin_is(stat.S_ISREG)):
        text = sys.stdin.read()
    elif text is None:
        # An empty pipe is no prompt: schedulers and test runners start programs with one.
        text = (sys.stdin.read() if stdin_is(stat.S_ISFIFO) else "") or DEFAULT_PROMPT
    if not text:
        raise ValueError("the prompt is empty; give some text, as an argument or on stdin")
    return text


def prompt_ids(
    args: argparse.Namespace, text: str, tokenizer: Tokenizer, config: ModelConfig
) -> list[int]:
    """The prompt's token ids; ValueError if they do not fit the model."""
    if args.prompt_tokens is None:
        ids = tokenizer.encode(text)
        n = len(ids)
    else:
        n = args.prompt_tokens
    if n >= config.max_seq_len:
        raise ValueError(
            f"the prompt has {n} tokens, and the model's context (max_position_embeddings in "
            f"config.json) is {config.max_seq_len}; shorten it to leave room for new ones"
        )
    if args.prompt_tokens is not None:
        rng = torch.Generator().manual_seed(0)
        ids = torch.randint(config.vocab_size, (n,), generator=rng).tolist()
    if max(ids) >= config.vocab_size:
        raise ValueError(
            f"{args.checkpoint}: the tokenizer gives id {max(ids)}, but vocab_size in config.json "
            f"is {config.vocab_size}; the two are not of one model"
        )
    return ids


def stdin_is(kind: Callable[[int], bool]) -> bool:
    """Whether stdin is of that kind of file, by its mode."""
    try:
        return kind(os.fstat(sys.stdin.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):  # no stdin at all
        return False


def measured_bandwidth(device: torch.device) -> float:
    """Bytes per second the device's memory moves: the best of reading 512 MB (on CUDA 1 GB) and, on
    CUDA, of copying it, each ten times between two looks at the clock."""
    on_cuda = device.type == "cuda"
    x = torch.ones(2**28 if on_cuda else 2**27, device=device)
    y = torch.empty_like(x) if on_cuda else None
    size, repeats, best = x.numel() * x.element_size(), 10 if on_cuda else 1, 0.0
    for _ in range(5):
        for moved, work in ((size, x.sum), (2 * size, lambda: y.copy_(x)))[: 1 + on_cuda]:
            synchronize(device)
            start = time.perf_counter()
            for _ in range(repeats):
                work()
            synchronize(device)
            best = max(best, moved * repeats / (time.perf_counter() - start))
    return best


def synchronize(device: torch.device) -> None:
    """Wait for the device to finish what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Run:
    """One run's tokens and times, seconds."""

    tokens: list[int]
    first: float  # prompt in, first token out
    rest: float  # all the tokens after the first
    read: int  # bytes those steps read


def run_once(tokens: Iterator[int], decoder: Decoder, show: Callable[[int], Any]) -> Run:
    """Draw all the tokens, showing each, on the clock."""
    start = time.perf_counter()
    seen, first, read = [], 0.0, 0
    for token in tokens:
        if not seen:
            first = time.perf_counter() - start
        else:
            read += decoder.bytes_per_token()
        seen.append(token)
        show(token)
    return Run(seen, first, time.perf_counter() - start - first, read)


def facts_of(
    runs: list[Run], prompt_tokens: int, load_seconds: float, bandwidth: float
) -> dict[str, Any]:
    """The medians over the runs, under the names that --json prints."""
    med = lambda f: statistics.median(f(r) for r in runs)
    facts = {
        "prompt_tokens": prompt_tokens,
        "new_tokens": len(runs[-1].tokens),
        "load_seconds": load_seconds,
        "first_token_seconds": med(lambda r: r.first),
        "prefill_tokens_per_second": prompt_tokens / med(lambda r: r.first),
    }
    if len(runs[-1].tokens) > 1:
        speed = med(lambda r: r.read / r.rest / 1e9)
        facts |= {
            "tokens_per_second": med(lambda r: (len(r.tokens) - 1) / r.rest),
            "gigabytes_per_second": speed,
            "measured_gigabytes_per_second": bandwidth / 1e9,
            "bandwidth_share": speed * 1e9 / bandwidth,
        }
    return {k: round(v, 4) for k, v in facts.items()}


def facts_line(f: dict[str, Any], where: str) -> str:
    """The facts in one line for a person."""
    line = (
        f"[{where}] loaded in {f['load_seconds']:.2f} s, first token after "
        f"{f['first_token_seconds']:.3f} s ({f['prompt_tokens']} in, "
        f"{f['prefill_tokens_per_second']:.0f} tok/s)"
    )
    if "tokens_per_second" in f:
        line += (
            f", then {f['tokens_per_second']:.1f} tok/s reading {f['gigabytes_per_second']:.2f} "
            f"GB/s, {f['bandwidth_share']:.0%} of the "
            f"{f['measured_gigabytes_per_second']:.1f} GB/s measured here"
        )
    return line


def build_decoder(
    args: argparse.Namespace, model: Transformer, prompt_tokens: int
) -> tuple[Decoder, int]:
    """A decoder with a cache as long as the run; how many new tokens the context has room for."""
    max_new = min(args.max_new_tokens, model.config.max_seq_len - prompt_tokens)
    if max_new < args.max_new_tokens:
        print(
            f"generate.py: --max-new-tokens {args.max_new_tokens} lowered to {max_new}, the end of "
            f"the model's context of {model.config.max_seq_len}",
            file=sys.stderr,
        )
    if model.embed.weight.device.type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        if args.compile and not shutil.which(compiler):
            raise ValueError(f"--compile on a CPU needs a C++ compiler, and there is no {compiler}")
        cpu.swap_linear_(model)
    how = Sampling(args.temperature, args.top_k, args.top_p)
    return Decoder(model, prompt_tokens + max_new, how, args.compile), max_new


@torch.inference_mode()
def generate(args: argparse.Namespace) -> None:
    """Load, run, and report: what the command line asks for, in order."""
    text = prompt_text(args)
    begin = time.perf_counter()
    device = pick_device(args.device)
    model, tokenizer = load(args, device)
    ids = prompt_ids(args, text, tokenizer, model.config)
    decoder, max_new = build_decoder(args, model, len(ids))
    stops = eos_ids(args, model.config)
    prompt = torch.tensor([ids], device=device)
    load_seconds = IMPORT_SECONDS + time.perf_counter() - begin

    pieces: list[str] = []
    quiet = args.json or args.bench

    def show(piece: str) -> None:
        pieces.append(piece)
        if not quiet:
            print(piece, end="", flush=True)

    def once() -> Run:
        pieces.clear()
        stream = TextStream(tokenizer, ids)
        tokens = generate_tokens(decoder, prompt, args.seed, max_new, stops)
        run = run_once(tokens, decoder, lambda token: show(stream.push(token)))
        show(stream.finish())
        return run

    if not quiet and args.prompt_tokens is None:
        print(text, end="", flush=True)
    if args.bench:
        once()  # warm-up, not counted
    runs = [once() for _ in range(args.bench or 1)]
    if not quiet:
        print()

    facts = facts_of(runs, len(ids), load_seconds, measured_bandwidth(device))
    if args.json:
        print(json.dumps({"text": "".join(pieces), "tokens": runs[-1].tokens, **facts}))
    print(facts_line(facts, device_name(device)), file=sys.stderr)


def device_name(device: torch.device) -> str:
    """What the facts are about."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def main(argv: list[str] | None = None) -> int:
    try:
        generate(parse_args(sys.argv[1:] if argv is None else argv))
    except BrokenPipeError:  # the reader, say `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as e:
        print(f"generate.py: error: {e}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as e:
        if "memory" not in str(e):
            raise
        print(f"generate.py: error: out of memory ({str(e).splitlines()[0]})", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
