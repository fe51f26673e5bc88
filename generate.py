"""generate.py: text from a checkpoint, in every mode, and the speed at which it came.

    python generate.py                                       the shipped model writes Python
    python generate.py "def quicksort(" --temperature 0      greedy
    git log -1 | python generate.py --checkpoint DIR --json  any folder of a family known here
    python generate.py --checkpoint DIR --interactive        a conversation
    python generate.py --score FILE                          perplexity of a text
    python generate.py --dummy llama3.1-8b --prompt-tokens 128 --compile --bench
    python generate.py --quantize int4                       fewer bits a weight, as it loads
    python generate.py --speculate ngram                     several tokens for one reading of them
    python generate.py --batch requests.jsonl                many requests, results as they finish
    python generate.py --bench-serving 200 --rate 10         throughput and latencies under load
    torchrun --nproc-per-node 4 generate.py --tp 4 ...       every matrix cut over four processes
    torchrun --nproc-per-node 4 -- generate.py --pp 4 --n 8  the layers cut over four, in a ring
    torchrun --nproc-per-node 4 generate.py --ep ...         a mixture's experts over four processes

Generation has two regimes, and each is one function here. `prefill` runs the whole prompt through
the model in chunks: large matrix products, limited by arithmetic. A decode step runs one token:
every weight is read to be used once, so a step lasts as long as reading the weights and the KV
cache takes, and no program is faster than bytes / bandwidth. After each run one line on stderr says
how near it came: the bytes really read per second, and their share of a read bandwidth measured on
the spot.

How a token is drawn is sampling.py's contract, in every mode: its fields are flags here. --n draws
several continuations of one prompt in lockstep, reading the weights once for all; sample b is what
seed + b gives alone. --interactive keeps the KV cache across turns and prefills only what is new.

--speculate lets something cheap propose the next tokens, and a step verifies them all: the same
distribution, greedy the same text (speculative.py). The facts then say how many were kept.

Mixtures of experts run by moe.py's grouped experts. With --ep every rank runs the same tokens and
has a part of the experts, the only ones it reads from the files; their outputs are added up. So a
model whose experts are too many for one device decodes on several, each reading its own. Each draws
the tokens for itself: ranks must be machines of one kind, with the same number of threads.

With --tp every rank has its heads, columns and rows of all matrices, reads only these from the
files, and caches its own heads' keys (parallel.py's plan): a step reads 1 / N of the weights, and
takes two sums over ranks a layer. Logits are gathered, so that all draw the same tokens; what goes
by a clock or by free memory, rank 0 or the poorest decides. It is the text of one process up to the
rounding of sums in another order; with --quantize also up to that of codes, for each rank finds
scales for its own part. With --ep too, experts are shared out over groups of --tp ranks. Where all
heads share keys, every rank would cache and read them all: --shard-batch gives each some of the --n
rows instead, for two exchanges a layer more (inference_parallel.py).

With --pp every rank has some of the layers, reads and caches these alone, and the --n rows follow
each other through them in groups (ring.py); each layer may be cut over --tp ranks besides.

--compile turns a decode step into one compiled graph of static shapes, on CUDA replayed as a CUDA
graph (the static cache and compiled step of gpt-fast). On a CPU the graph calls cpu.py's products,
which read memory faster than compiled ones, and it pays where these are quantized. Needs: model.py,
tokenizer.py, sampling.py, cpu.py, sentencepiece or tokenizers; for mixtures of experts moe.py, and
for --ep expert_parallel.py; for --tp parallel.py, with --shard-batch inference_parallel.py; for
--pp ring.py, which names its own; for --attention flash attention.py; for --batch and
--bench-serving, which are serving.py's, that and paged_kv.py; for --quantize compress.py, and with
it quantize.py, calibrate.py, sparse.py and gemm.py, to calibrate data.py, to --plot metrics.py; for
--speculate drafting.py and speculative.py.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import math
import os
import shutil
import stat
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

START = time.perf_counter()  # the imports below are part of what a user waits for

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent
for drawer in "huggingface generation serving quantization training parallelism".split():
    spec = importlib.util.find_spec(drawer)  # an installed package wins over a folder
    if spec.submodule_search_locations[0] != str(ROOT / drawer):
        sys.exit(f"generate.py: error: {spec.origin} hides the folder {drawer}/; uninstall that package")

from generation import cpu
from generation.sampling import Sampler, Sampling, logprobs_of
from huggingface.tokenizer import (
    ChatTemplate,
    Continuation,
    NoTokenizer,
    StopStrings,
    TextStream,
    Tokenizer,
    eos_ids,
    load_chat_template,
    load_tokenizer,
    logprob_entry,
)
from huggingface.weights import allocate, hf_modules, load_checkpoint, read_config
from model import CONFIGS, Attend, KVCache, ModelConfig, MoE, Transformer
from training.lora import load_adapters_, merge_

IMPORT_SECONDS = time.perf_counter() - START

SHIPPED = ROOT / "checkpoints" / "small"
DEFAULT_PROMPT = "class Stack:\n    def __init__(self):\n"
TEMPERATURE = 0.8
PREFILL_CHUNK = 512  # tokens; bounds the memory of a long prompt's mask and activations
CHAT_CONTEXT = 8192  # tokens the cache of a conversation holds, unless --context says otherwise
NOT_FINITE = (
    "the logits after {} tokens are not finite; the weights are damaged, or --dtype is too narrow "
    "for them"
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPES |= {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}

# --------------------------------------------------------------------------------------------------
# Prefill and decode
# --------------------------------------------------------------------------------------------------


AttendOver = Callable[[KVCache, int | None], Attend]  # of a cache and how many slots can matter


def sdpa(cache: KVCache, limit: int | None) -> Attend:
    """The model's attend argument: torch's own attention over the first `limit` slots."""
    return partial(cache.attend, limit=limit)


def hidden_chunks(
    model: Transformer, tokens: Tensor, cache: KVCache, start: int = 0, attention: AttendOver = sdpa
) -> Iterator[tuple[int, Tensor]]:
    """Run tokens (1, T) from position `start` on into the cache, a chunk at a time: (where the
    chunk begins in tokens, its hidden states (1, t, C))."""
    T = tokens.shape[1]
    scaling = model.config.rope_scaling or {}
    # dynamic NTK turns by the length of the call: a prompt in pieces would be another prompt
    chunk = T if scaling.get("rope_type") == "dynamic" else PREFILL_CHUNK
    for first in range(0, T, chunk):
        last = min(T, first + chunk)
        positions = torch.arange(start + first, start + last, device=tokens.device)
        attend = attention(cache, start + last)
        yield first, model(tokens[:, first:last], positions, attend, return_hidden=True)


def prefill(
    model: Transformer,
    tokens: Tensor,
    cache: KVCache,
    start: int = 0,
    attention: AttendOver = sdpa,
    observe: Callable[[int, Tensor], None] = lambda start, hidden: None,
) -> Tensor:
    """Run tokens (1, T) from position `start` on into the cache; logits (1, V) after the last.
    observe: sees the hidden states (1, t, C) of every chunk and where it starts."""
    for first, hidden in hidden_chunks(model, tokens, cache, start, attention):
        observe(start + first, hidden)
        last = hidden[:, -1]  # the other rows of logits are never looked at
    return model.head(last)


def gathered_if_compiled(experts: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The experts hook of a compiled step that has no kernel: gather the K experts of each token,
    so that no shape depends on the routing. Outside of it, in prefill, the `experts` given."""

    def run(x: Tensor, weights: Tensor, ids: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return experts(x, weights, ids, w_gate_up, w_down)
        gate, up = torch.einsum("nc,nkfc->nkf", x, w_gate_up[ids]).chunk(2, dim=-1)
        y = torch.einsum("nkf,nkcf->nkc", F.silu(gate) * up, w_down[ids])
        return (y * weights[..., None].type_as(x)).sum(1)

    return run


class Decoder:
    """B continuations of one prompt in lockstep: their cache, their sampler, their decode step.

    Eager, a step reads just the used part of the cache. Compiled, it is given all of it, so that no
    shape ever changes: one compilation, and on CUDA one captured graph, replayed over the same
    input tensors. sdpa then reads all of it, a kernel that is told the length does not.
    """

    def __init__(
        self,
        model: Transformer,
        max_len: int,
        how: Sampling,
        batch: int = 1,
        eos: Sequence[int] = (),
        compiled: bool = False,
        keep_logits: bool = False,
        attention: AttendOver = sdpa,
        cached_rows: int | None = None,
    ):
        """A cache of max_len tokens per row, of all rows or of those that `attention` knows to look
        for here. keep_logits: `shown` has them after every step."""
        first = next(model.parameters())
        device, dtype = first.device, first.dtype
        V = model.config.vocab_size
        self.model, self.batch, self.compiled, self.used = model, batch, compiled, 0
        self.attention = attention
        self.cache = KVCache(model.config, cached_rows or batch, max_len, dtype, device)
        self.sampler = Sampler(how, batch, V, device, [e for e in eos if e < V])
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.logits = torch.zeros(batch, V, dtype=dtype, device=device) if keep_logits else None
        self.shown: tuple[Tensor, Tensor] | None = None  # logits (B, T, V), the tokens drawn (B, T)
        self.run = self._compile() if compiled else lambda: self._step(self.used + 1)
        self.weight_bytes = weight_bytes(model, batch)
        self.speculator: Any = None  # a drafting.Speculator, which then does the steps

    def start(self, ids: Sequence[int], cached: int = 0) -> list[list[int]]:
        """Prefill the prompt `ids`, the first `cached` of which the cache holds already; the first
        new token of every row."""
        self.used = cached
        prompt = torch.tensor([ids[cached:]], device=self.token.device)
        more = {} if self.speculator is None else {"observe": self.speculator.observe}
        logits = prefill(self.model, prompt, self.cache, cached, self.attention, **more)
        self.used = len(ids)
        self.sampler.start([ids] * self.batch)
        self.position.fill_(len(ids))
        self._draw(logits.expand(self.batch, -1))
        runs = self.runs(self._tokens())
        if self.speculator is not None:
            self.speculator.start(ids, [run[0] for run in runs])
        return runs

    def next(self) -> list[list[int]]:
        """The next tokens of every row: one, or with a speculator one or more."""
        if self.speculator is not None:
            return self.runs(self.speculator.next())
        self.run()
        self.used += 1  # now that the whole step is done: Ctrl-C may end it anywhere
        return self.runs(self._tokens())

    def stop(self) -> None:
        """No further step is wanted of this prompt."""

    def keep(self, logits: Tensor, drawn: Tensor) -> None:
        """Show logits (B, T, V) and the tokens (B, T) drawn from them to who asked for logits."""
        if self.logits is not None:
            self.shown = logits, drawn.clamp(min=0)

    def _tokens(self) -> list[list[int]]:
        if self.logits is not None:
            self.keep(self.logits[:, None], self.token)
        return self.token.tolist()

    def runs(self, runs: list[list[int]]) -> list[list[int]]:
        if min(map(min, runs)) < 0:
            raise ValueError(NOT_FINITE.format(self.used))
        return runs

    def _draw(self, logits: Tensor) -> None:
        if self.logits is not None:
            self.logits.copy_(logits)
        self.token.copy_(self.sampler(logits)[:, None])

    def _step(self, limit: int | None = None) -> None:
        attend = self.attention(self.cache, limit)
        self._draw(self.model(self.token, self.position, attend)[:, -1])
        self.position.add_(1)

    def replayed(self, step: Callable[..., Any]) -> Replayed:
        """A part of the model's work with static shapes, for a speculator."""
        return Replayed(step, self.token.device)

    def _compile(self) -> Callable[[], None]:
        from moe import has_static_shapes  # which imports Triton: only where it is asked

        for module in mixtures(self.model):
            if not has_static_shapes(module):
                module.experts = gathered_if_compiled(module.experts)
        step = compiled(self._step, self.token.device)
        for _ in range(2):
            step()  # compiles; the slots it writes are overwritten by the first prompt
        if self.token.device.type != "cuda":
            return step
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    def bytes_per_step(self) -> int:
        """What the last step read: weights and the part of the cache it looked at."""
        whole = self.compiled and self.attention is sdpa
        return self.weight_bytes + self.cache.bytes_read(None if whole else self.used)


def compiled(step: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """One graph of static shapes. On CUDA this option lets the compiler write one-row products as
    reductions, fused with their neighbours."""
    options = {"coordinate_descent_tuning": True} if device.type == "cuda" else {}
    return torch.compile(step, fullgraph=True, dynamic=False, options=options)


class Replayed:
    """A function of tensors (or None), compiled for every shape that comes; on CUDA captured as a
    graph over inputs of its own. What it writes elsewhere, a cache, may be written twice."""

    def __init__(self, step: Callable[..., Any], device: torch.device):
        self.step, self.cuda = compiled(step, device), device.type == "cuda"
        self.ready: dict[Any, Callable[..., Any]] = {}  # by shapes

    def __call__(self, *inputs: Tensor | None) -> Any:
        key = tuple(None if x is None else x.shape for x in inputs)
        if key not in self.ready:
            with torch._dynamo.config.patch(recompile_limit=64):
                self.step(*inputs)
            self.ready[key] = self._captured(inputs) if self.cuda else self.step
        return self.ready[key](*inputs)

    def _captured(self, inputs: Sequence[Tensor | None]) -> Callable[..., Any]:
        mine = [None if x is None else x.clone() for x in inputs]
        self.step(*mine)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.step(*mine)

        def replay(*inputs: Tensor | None) -> Any:
            for old, new in zip(mine, inputs):
                if old is not None:
                    old.copy_(new)
            graph.replay()
            return out

        return replay


def weight_bytes(model: Transformer, batch: int = 1) -> int:
    """Bytes of weights a decode step reads: all that multiply (of E experts the K of each row, as
    if these were drawn evenly), and a row of the embedding for each; not those of multi-token
    prediction."""
    c, total = model.config, 0.0
    embed, head = (getattr(module, "weight", None) for module in (model.embed, model.head))
    for name, p in chain(model.named_parameters(), model.named_buffers()):
        if name.startswith("mtp.") or name.endswith(".correction"):
            continue
        if p is embed and head is not embed:
            total += batch * p[0].nbytes
        elif p.dim() == 3:
            total += p.nbytes * (1 - (1 - c.n_experts_per_token / c.n_experts) ** batch)
        else:
            total += p.nbytes
    return round(total)


# --------------------------------------------------------------------------------------------------
# Continuations
# --------------------------------------------------------------------------------------------------


def run_rows(
    decoder: Decoder,
    ids: Sequence[int],
    rows: list[Continuation],
    max_new: int,
    top: int | None = None,
    cached: int = 0,
) -> Iterator[list[int]]:
    """At most max_new tokens for every row after the prompt, each as soon as it is known, several
    at once where a draft was right; a row that ended is no longer heard. With `top`,
    log-probabilities are kept beside the tokens."""
    runs = decoder.start(ids, cached)
    while True:
        if top is not None:
            found = logprobs_of(*decoder.shown, top)
        for b, (row, run) in enumerate(zip(rows, runs)):
            for i, token in enumerate(run):
                if row.finish is not None:
                    break
                if top is not None:
                    chosen, *best = (x[b, i].tolist() for x in found)
                    row.logprobs.append(logprob_entry(row.tokenizer, token, chosen, *best))
                row.push(token)
                if len(row.tokens) == max_new:
                    row.end("length")
        yield runs
        if all(row.finish for row in rows):
            decoder.stop()
            return
        runs = decoder.next()


def score(
    model: Transformer, ids: Sequence[int], window: int, top: int = 0, attention: AttendOver = sdpa
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Log-probabilities of ids[1:], each given what stands before it: logprobs_of, chunk by chunk.

    A text longer than `window` goes in windows that overlap by half, and of each only the new half
    counts: every token has at least half a window before it.
    """
    half = max(1, window // 2)
    device, dtype = model.embed.weight.device, model.embed.weight.dtype
    cache = KVCache(model.config, 1, min(window, len(ids)), dtype, device)
    done = 1  # tokens that have their logprob, or need none
    while done < len(ids):
        begin = 0 if done == 1 else done - half
        tokens = torch.tensor([ids[begin : begin + window]], device=device)
        for first, hidden in hidden_chunks(model, tokens, cache, attention=attention):
            known = tokens[0, first + 1 : first + 1 + hidden.shape[1]]
            skip = max(0, done - begin - first - 1)
            if skip < len(known):
                logits = model.head(hidden[0, skip : len(known)])
                yield logprobs_of(logits, known[skip:], top)
        done = begin + tokens.shape[1]


# --------------------------------------------------------------------------------------------------
# Conversation
# --------------------------------------------------------------------------------------------------


class Chat:
    """A conversation over one cache: each turn prefills only what the cache does not hold.

    With a chat template every turn is the whole conversation, rendered; without one, all the text
    so far and the new line. The cache keeps the ids that were really generated, though the same
    text might be tokenized otherwise: where the new text continues the old, only the rest of it is
    tokenized (in its context). Where it does not (templates that rewrite earlier turns), the cache
    is cut back to the longest common beginning.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        system: str | None = None,
    ):
        self.decoder, self.tokenizer = decoder, tokenizer
        self.template, self.system = template, system
        self.reset()

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.ids: list[int] = []  # prompt and reply of the last turn
        self.text = ""  # what they say
        self.exact = False  # whether that is all they say
        self.turn = 0

    def ids_for(self, line: str) -> tuple[str, list[int]]:
        """The conversation with this line of the user's, as text and ids."""
        if self.template is None:
            text = self.text + line
        else:
            text = self.template.render([*self.messages, {"role": "user", "content": line}])
        encode = partial(self.tokenizer.encode, bos=self.template is None)
        whole = encode(text)
        if self.exact and text.startswith(self.text):
            before = encode(self.text)
            if whole[: len(before)] == before:
                return text, self.ids + whole[len(before) :]
        return text, whole

    def ask(
        self, line: str, how: Sampling, max_new: int, row: Continuation, limit: int
    ) -> Iterator[int]:
        """Generate the reply into `row`; yields at every step, and may be abandoned at any. First
        yields how many ids the cache already held. ValueError if the conversation is too long."""
        text, ids = self.ids_for(line)
        if not ids:
            raise ValueError("the prompt has no tokens; say something")
        if len(ids) >= limit:
            raise ValueError(
                f"the conversation has {len(ids)} tokens, and the cache holds {limit}; /reset "
                "starts a new one, --context makes the cache larger"
            )
        held = min(self.decoder.used, len(self.ids), len(ids) - 1)  # one must run, for its logits
        same = next((i for i in range(held) if ids[i] != self.ids[i]), held)
        if self.template is None:  # a reply is a text of its own, a continuation is not
            row.stream = TextStream(self.tokenizer, ids)
        yield same
        self.ids, self.text, self.turn = ids, text, self.turn + 1
        seed = (how.seed + self.turn - 1) % 2**63  # each turn draws anew
        self.decoder.sampler.admit(0, replace(how, seed=seed), ())
        try:
            for tokens in run_rows(
                self.decoder, ids, [row], min(max_new, limit - len(ids)), cached=same
            ):
                yield len(tokens[0])
        finally:  # also when Ctrl-C ended it
            row.end("interrupted")
            self._remember(line, row)

    def _remember(self, line: str, row: Continuation) -> None:
        self.messages += [
            {"role": "user", "content": line},
            {"role": "assistant", "content": row.text},
        ]
        tokens, text = row.tokens, row.text
        if row.finish == "eos" and self.template is None:
            tokens = tokens[:-1]  # it would end more than this turn
        elif row.finish == "eos":
            text += self.tokenizer.piece(tokens[-1])  # as the template writes it
        self.ids, self.text = self.ids + tokens, self.text + text
        self.exact = row.finish != "stop"  # those ids say the stop string too


# --------------------------------------------------------------------------------------------------
# The command line
# --------------------------------------------------------------------------------------------------

SAMPLING_FLAGS = {
    "temperature": (float, "0 is greedy"),
    "top_k": (int, "draw from the k likeliest tokens; 0: from all"),
    "top_p": (float, "draw from the likeliest that reach this probability"),
    "min_p": (float, "draw from tokens with this share of the likeliest's probability"),
    "repetition_penalty": (float, "divide the logits of tokens seen, in prompt or text; 1: off"),
    "presence_penalty": (float, "subtract from the logits of tokens in the text"),
    "frequency_penalty": (float, "subtract, times how often they are in the text"),
    "min_new_tokens": (int, "no end-of-sequence token before"),
    "seed": (int, "same seed, same text"),
}


def build_parser() -> argparse.ArgumentParser:
    """Every flag there is, with its default."""
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = p.add_argument
    add("prompt", nargs="?", help="text to continue; - or a pipe reads it from stdin")
    text = "Hugging Face folder (the shipped checkpoints/small)"
    add("--checkpoint", type=Path, default=SHIPPED, metavar="DIR", help=text)
    add(
        "--adapter", type=Path, metavar="DIR", help="LoRA's, in PEFT's format: added to the weights"
    )
    add("--max-new-tokens", type=int, default=200, help="end after so many (%(default)s)")
    defaults = {f.name: f.default for f in fields(Sampling)}
    for name, (kind, text) in SAMPLING_FLAGS.items():
        text, default = f"{text} (%(default)s)", defaults[name]
        if name == "temperature":  # by mode
            text, default = f"0 is greedy ({TEMPERATURE})", None
        add(_flag(name), type=kind, default=default, help=text)
    add("--logit-bias", metavar="ID:BIAS,...", default="", help="add to logits; -inf forbids")
    add("--ignore-eos", action="store_true", help="an end of text ends nothing")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeat")
    add("--n", type=int, default=1, help="so many continuations; number i draws with seed + i")
    add("--logprobs", type=int, metavar="K", help="with --json: log-probabilities, the K best too")
    add("--chat", action="store_true", help="the prompt is a message, put into the chat template")
    add("--interactive", action="store_true", help="a conversation; /reset and /quit")
    add("--system", metavar="TEXT", help="with --chat or --interactive: the system message")
    add("--context", type=int, help=f"with --interactive: tokens it may hold ({CHAT_CONTEXT})")
    add("--score", type=Path, metavar="FILE", help="perplexity of this text, and nothing else")
    add("--device", help="default: cuda if there is one, else cpu")
    add("--dtype", choices=DTYPES, help="default: as stored (bf16 for --dummy)")
    text = "flash: attention.py's kernels; on a CPU its plain torch, slower (%(default)s)"
    add("--attention", choices=("sdpa", "flash"), default="sdpa", help=text)
    add("--compile", action="store_true", help="compile the decode step (CUDA graph on CUDA)")
    add("--json", action="store_true", help="print one JSON object instead of text")
    text = "N runs (5), no EOS stop, print medians"
    add("--bench", nargs="?", type=int, const=5, metavar="N", help=text)
    text = f"random weights of a config.json, or of {', '.join(CONFIGS)}"
    add("--dummy", metavar="CONFIG", help=text)
    add("--prompt-tokens", type=int, metavar="N", help="random token ids for a prompt")
    text = "under torchrun: cut every matrix over N processes, which generate together"
    add("--tp", type=int, metavar="N", help=text)
    text = "under torchrun: cut the layers over N processes, which the --n rows go through in turns"
    add("--pp", type=int, metavar="N", help=text)
    text = "with --tp and --n, where heads share keys (MLA, one key head): cache only some rows"
    add("--shard-batch", action="store_true", help=text)
    add_expert_flags(add)
    add_quantize_flags(add)
    add_speculation_flags(add)
    add_serving_flags(add)
    return p


def add_expert_flags(add: Callable[..., Any]) -> None:
    """Those of mixtures of experts."""
    text = (
        "grouped: moe.py's, as few products as there are experts in use; loop: model.py's plain one"
    )
    add("--experts", choices=("grouped", "loop"), default="grouped", help=f"{text} (%(default)s)")
    add("--ep", action="store_true", help="under torchrun: experts shared out over its processes")
    text = (
        "with --ep: place experts by what train.py counted (metrics.jsonl, or a list per mixture)"
    )
    add("--expert-load", type=Path, metavar="FILE", help=text)
    text = "with --ep: so many copies more, of the experts with the most load (%(default)s)"
    add("--redundant-experts", type=int, default=0, metavar="N", help=text)


def add_quantize_flags(add: Callable[..., Any]) -> None:
    """Those of compress.py."""
    text = "hold the weights in fewer bits: int8, int4, int8-dynamic, llm.int8, fp8, ..."
    add("--quantize", metavar="SCHEME", help=text)
    text = "weights that share a scale, of int4, int3 and int2 (32)"
    add("--group-size", type=int, metavar="G", help=text)
    text = "leave these in 16 bit: names of layers or parts of them"
    add("--quantize-skip", metavar="NAME,...", default="", help=text)
    text = "let a text decide how to round: gptq, awq, smoothquant, tacq"
    add("--calibrate", choices=("gptq", "awq", "smoothquant", "tacq"), help=text)
    text = "with --calibrate or --quantize-report: the text (the standard library's source)"
    add("--calibration-text", type=Path, metavar="FILE", help=text)
    add("--save", type=Path, metavar="OUT", help="write the quantized checkpoint, and nothing else")
    text = "bytes, loss and speed of every scheme on this checkpoint, and nothing else"
    add("--quantize-report", action="store_true", help=text)
    add("--plot", type=Path, metavar="FILE", help="with --quantize-report: draw loss against bytes")


def add_speculation_flags(add: Callable[..., Any]) -> None:
    """Those of drafting.py."""
    text = (
        "draft the next tokens, and verify them in one step: ngram copies from what stands before, "
        "draft is a smaller model, staged that with ngram inside, tree a tree of its choices, exit "
        "the first layers, mtp the model's own multi-token prediction, head one that train.py "
        "--train-draft-head made (tree is never compiled)"
    )
    names = ("ngram", "draft", "staged", "tree", "exit", "mtp", "head")
    add("--speculate", choices=names, help=text)
    text = "folder of the draft model or head (for the shipped model the shipped ones)"
    add("--draft", metavar="DIR", help=text)
    text = "drafts in a step (nodes of a tree); auto: what pays, up to 8 (%(default)s)"
    add("--speculate-k", default="auto", metavar="N|auto", help=text)
    text = "with --speculate exit: so many layers (half)"
    add("--exit-layers", type=int, metavar="N", help=text)
    text = (
        "draw drafts with the target's own noise: sampled text is then what --seed gives without "
        "drafts, and fewer of them are kept"
    )
    add("--draft-certain", action="store_true", help=text)
    text = "with --bench: keep drafts with this probability, whatever they are; only speed is real"
    add("--draft-acceptance", type=float, metavar="A", help=text)


def add_serving_flags(add: Callable[..., Any]) -> None:
    """Those of --batch and --bench-serving_batch."""
    text = (
        "answer a JSONL file: on each line prompt, messages or prompt_ids, and optionally id, "
        "priority and the names of the flags above, which are its defaults"
    )
    add("--batch", type=Path, metavar="FILE", help=text)
    text = "with --batch: the results (FILE's name and .results.jsonl); what is there stays"
    add("--out", type=Path, metavar="FILE", help=text)
    text = "N random requests (64), greedy unless asked otherwise: throughput and latencies"
    add("--bench-serving", nargs="?", type=int, const=64, metavar="N", help=text)
    add("--rate", type=float, default=math.inf, help="arrivals per second (all at once)")
    text = "coefficient of variation of the time between arrivals (%(default)s, Poisson)"
    add("--burstiness", type=float, default=1.0, metavar="CV", help=text)
    text = "length of a random {}, uniform (%(default)s)"
    add("--input-tokens", default="16:128", metavar="A:B", help=text.format("prompt"))
    add("--output-tokens", default="16:64", metavar="A:B", help=text.format("output"))
    text = "tokens before each random prompt, the same for all (%(default)s)"
    add("--shared-prefix", type=int, default=0, metavar="N", help=text)
    text = "size of the KV cache (what --max-running needs, within 80%% of free GPU memory or 1 GB)"
    add("--kv-blocks", type=int, metavar="N", help=text)
    add("--block-size", type=int, default=16, help="tokens in a block (%(default)s)")
    text = "tokens in a step, prompts included (%(default)s)"
    add("--max-batch-tokens", type=int, default=512, help=text)
    add("--max-running", type=int, default=64, help="sequences that run at once (%(default)s)")
    add("--kv-dtype", choices=("int8", "fp8"), help="quantize the KV cache")
    add("--no-prefix-cache", action="store_true", help="compute equal prompts anew")
    add("--swap", action="store_true", help="keep the KV of who must wait in host memory")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


WORKLOAD_FLAGS = "rate burstiness input_tokens output_tokens shared_prefix"
ENGINE_FLAGS = "kv_blocks block_size max_batch_tokens max_running kv_dtype no_prefix_cache swap"


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line, with .how, its Sampling, and .mesh, that of --tp. ValueError names a flag
    that is out of range or would be ignored."""
    parser = build_parser()
    args = parser.parse_args(argv)
    given = {name for name in vars(args) if getattr(args, name) != parser.get_default(name)}
    given -= {name for name in ("tp", "pp") if getattr(args, name) == 1}  # which cut nothing
    if args.temperature is None:
        draws = {"top_k", "top_p", "min_p"} & given or args.bench_serving is None
        args.temperature = TEMPERATURE if draws else 0.0
    check_ranges(args)
    check_modes(args, given)
    args.how, args.mesh = read_sampling(args), None  # process_group knows of ranks
    if "" in args.stop:
        raise ValueError("--stop must not be empty")
    return args


def check_ranges(args: argparse.Namespace) -> None:
    """ValueError names a flag that is out of range; those of Sampling are checked there."""
    for names, good, wanted in (
        ("max_new_tokens n bench prompt_tokens", lambda v: v >= 1, "at least 1"),
        ("bench_serving kv_blocks block_size", lambda v: v >= 1, "at least 1"),
        ("max_batch_tokens max_running", lambda v: v >= 1, "at least 1"),
        ("context", lambda v: v >= 2, "at least 2"),
        ("exit_layers tp pp", lambda v: v >= 1, "at least 1"),
        ("draft_acceptance", lambda v: 0 <= v <= 1, "from 0 to 1"),
        ("logprobs shared_prefix redundant_experts", lambda v: v >= 0, "0 or more"),
        ("burstiness", lambda v: v == 0 or 0.01 <= v <= 100, "0, or from 0.01 to 100"),
        ("rate", lambda v: v >= 1e-6, "at least 1e-6"),
    ):
        for name in names.split():
            value = getattr(args, name)
            if value is not None and not good(value):
                raise ValueError(f"{_flag(name)} must be {wanted}, not {value}")
    for name in ("input_tokens", "output_tokens"):
        text = getattr(args, name)
        low, _, high = text.partition(":")
        if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
            raise ValueError(f"{_flag(name)} must be A:B, two numbers from 1 on, not {text!r}")
        setattr(args, name, (int(low), int(high)))
    if args.speculate_k != "auto":
        ok = args.speculate_k.isdecimal() and 1 <= int(args.speculate_k) <= 64
        if not ok:
            raise ValueError(f"--speculate-k must be from 1 to 64 or auto, not {args.speculate_k}")
    for low, high in (("min_new_tokens", "max_new_tokens"), ("max_running", "max_batch_tokens")):
        if getattr(args, low) > getattr(args, high):
            raise ValueError(
                f"{_flag(low)} {getattr(args, low)} is more than {_flag(high)} "
                f"{getattr(args, high)}"
            )


def check_modes(args: argparse.Namespace, given: set[str]) -> None:
    """ValueError names a flag, of those given, that would be ignored."""
    for names, good, needs in (
        ("logprobs", args.json or args.batch, "--json, which prints them"),
        ("system", args.chat or args.interactive or args.batch, "--chat or --interactive"),
        ("context", args.interactive, "--interactive"),
        ("out", args.batch, "--batch"),
        ("group_size", args.quantize or args.quantize_report, "--quantize"),
        ("quantize_skip", args.quantize or args.quantize_report, "--quantize"),
        ("calibrate save", args.quantize, "--quantize"),
        ("calibration_text", args.calibrate or args.quantize_report, "--calibrate"),
        ("plot", args.quantize_report, "--quantize-report"),
        ("draft", args.speculate in ("draft", "staged", "tree", "head"), "--speculate draft or so"),
        ("speculate_k draft_certain", args.speculate, "--speculate"),
        ("exit_layers", args.speculate == "exit", "--speculate exit"),
        ("draft_acceptance", args.speculate != "tree", "another --speculate than tree"),
        (
            "draft_acceptance",
            args.speculate and (args.bench or args.bench_serving),
            "--speculate and --bench or --bench-serving",
        ),
        (ENGINE_FLAGS, args.batch or args.bench_serving, "--batch or --bench-serving"),
        (WORKLOAD_FLAGS, args.bench_serving, "--bench-serving"),
        ("expert_load redundant_experts", args.ep, "--ep"),
        ("shard_batch", args.tp and args.tp > 1, "--tp 2 or more"),
    ):
        for name in names.split():
            if name in given and not good:
                raise ValueError(f"{_flag(name)} needs {needs}")
    reported = f"{' '.join(SAMPLING_FLAGS)} n max_new_tokens logit_bias ignore_eos stop"
    drawing = f"{' '.join(SAMPLING_FLAGS)} n max_new_tokens logit_bias ignore_eos stop compile"
    drawing += " speculate"
    serving = "prompt prompt_tokens interactive chat score bench attention"
    for mode, others in (
        ("batch", f"{serving} json bench_serving"),
        ("bench_serving", f"{serving} stop n logprobs max_new_tokens min_new_tokens ignore_eos"),
        ("interactive", "prompt json bench prompt_tokens chat score logprobs dummy n"),
        ("score", f"prompt bench prompt_tokens chat dummy {drawing}"),
        ("save", f"{serving} json batch bench_serving dummy {drawing}"),
        (
            "quantize_report",
            f"{serving} batch bench_serving dummy quantize save speculate {reported}",
        ),
        ("calibrate", "dummy"),
        ("ep", "batch bench_serving interactive speculate compile calibrate save quantize_report"),
        ("tp", "interactive compile calibrate save quantize_report"),
        (
            "pp",
            "interactive compile calibrate save quantize_report batch bench_serving speculate "
            "score logprobs ep shard_batch",
        ),
        ("shard_batch", "batch bench_serving speculate score"),
        ("adapter", "quantize save quantize_report dummy ep tp pp"),
        ("prompt_tokens", "prompt chat"),
        ("dummy", "checkpoint chat"),
        ("bench", "stop logprobs ignore_eos"),
    ):
        clash = [other for other in others.split() if other in given]
        if mode in given and clash:
            other = "a prompt" if clash[0] == "prompt" else _flag(clash[0])
            raise ValueError(f"{_flag(mode)} does not go together with {other}")


def read_sampling(args: argparse.Namespace) -> Sampling:
    """The Sampling that the flags say; ValueError names the flag."""
    bias = []
    for entry in filter(None, args.logit_bias.split(",")):
        try:
            token, value = entry.split(":")
            bias.append((int(token), float(value)))
        except ValueError:
            raise ValueError(f"--logit-bias must be ID:BIAS,..., not {entry!r}") from None
    try:
        return Sampling(
            **{name: getattr(args, name) for name in SAMPLING_FLAGS}, logit_bias=tuple(bias)
        )
    except ValueError as e:
        name, _, rest = str(e).partition(" ")
        raise ValueError(f"{_flag(name)} {rest}") from None


def pick_device(name: str | None) -> torch.device:
    """The device of that name, tried out; by default CUDA where there is one, for each rank its
    own."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if dist.is_initialized() and name.startswith("cuda:"):
        raise ValueError(f"--device {name}: every rank has a GPU of its own; give cuda")
    if dist.is_initialized() and name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as e:
        raise ValueError(f"--device {name}: not usable here ({str(e).splitlines()[0]})") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)  # graphs are captured on the current device
    return device


def pick_attention(name: str) -> AttendOver:
    """sdpa, or flash: attention.py's kernels over the same slots."""
    if name == "sdpa":
        return sdpa
    from attention import as_attend  # only here: it imports Triton, which takes 0.2 s

    return lambda cache, limit: as_attend(cache, limit=limit)


def by_rows(attention: AttendOver, group: Any) -> AttendOver:
    """--shard-batch: a rank attends, with all heads, for the rows that it caches. A prompt is one
    row: every rank prefills it for its own heads, and its keys go to all the rows it caches."""
    from parallelism.inference_parallel import batch_sharded

    def over(cache: KVCache, limit: int | None) -> Attend:
        whole = attention(cache, limit)
        own = batch_sharded(whole, group)
        return lambda spec, q, *rest: (own if len(q) > 1 else whole)(spec, q, *rest)

    return over


# --------------------------------------------------------------------------------------------------
# Several processes
# --------------------------------------------------------------------------------------------------


@contextmanager
def process_group(args: argparse.Namespace) -> Iterator[None]:
    """With --ep, --tp or --pp under torchrun: the group of its processes, and args.mesh."""
    if not (args.ep or args.tp or args.pp) or "WORLD_SIZE" not in os.environ:
        args.mesh = new_mesh(args)
        yield
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        args.mesh = new_mesh(args)
        yield
        dist.barrier()  # none hangs up while another still listens
    finally:
        dist.destroy_process_group()


def new_mesh(args: argparse.Namespace) -> Any:
    """The ranks as parallel.Mesh: neighbours along --tp, the groups of these along --ep or --pp.
    None where there is nothing to cut. ValueError names the flag."""
    ranks, tp = dist.get_world_size() if dist.is_initialized() else 1, args.tp
    if (args.pp or 1) > 1:
        return pipeline_mesh(args.pp, tp or 1, ranks)
    if tp is None or tp == ranks == 1:
        return None
    if ranks == 1:
        raise ValueError(f"--tp {tp}: start it with torchrun --nproc-per-node {tp}")
    if ranks % tp:
        raise ValueError(f"--tp {tp} does not divide the {ranks} processes that torchrun started")
    if tp < ranks and not args.ep:
        raise ValueError(
            f"--tp {tp}: torchrun started {ranks} processes, and the others would have nothing to "
            f"do; give --tp {ranks} or, to share out experts over them, --ep too"
        )
    from parallel import make_mesh  # only here: torch's meshes take a second to import

    return make_mesh(dp_shard=ranks // tp, ep=ranks // tp, tp=tp)


def pipeline_mesh(pp: int, tp: int, ranks: int) -> Any:
    """Stages of --tp ranks each."""
    if pp * tp != ranks:
        flags = f"--pp {pp}" + (f" x --tp {tp}" if tp > 1 else "")
        raise ValueError(
            f"{flags} is {pp * tp} processes, not {ranks}: start it with torchrun --nproc-per-node "
            f"{pp * tp}"
        )
    from parallel import make_mesh

    return make_mesh(tp=tp, pp=pp)


def agreed(work: Callable[[], Any]) -> Any:
    """work() on every rank. What one of them refuses all refuse, so that none waits for it."""
    if not dist.is_initialized():
        return work()
    result, errors = None, [None] * dist.get_world_size()
    try:
        result, error = work(), None
    except (ValueError, OSError, MemoryError, torch.OutOfMemoryError) as e:
        error = str(e) or "out of memory"
    dist.all_gather_object(errors, error)
    for rank, error in enumerate(errors):
        if error is not None:
            raise ValueError(error if rank == 0 else f"rank {rank}: {error}")
    return result


def from_first(work: Callable[[], Any]) -> Any:
    """work() of rank 0, for all: stdin, say, can be read but once."""
    if not dist.is_initialized():
        return work()
    return told(agreed(lambda: work() if dist.get_rank() == 0 else None))


def told(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def least(n: int) -> int:
    """The smallest of what the ranks have."""
    if not dist.is_initialized():
        return n
    every = [n] * dist.get_world_size()
    dist.all_gather_object(every, n)
    return min(every)


class ToldChoices:
    """A policy of speculation that goes by the clock, as rank 0 has it: what it chooses all do."""

    def __init__(self, policy: Any):
        self.policy = policy

    def choose(self, rows: Sequence[Any]) -> list[int]:
        return told(self.policy.choose(rows))

    def choose_tree(self, rows: Sequence[Any]) -> Any:
        return told(self.policy.choose_tree(rows))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)


class Slices:
    """--tp: of every matrix the part of this rank. `cut_` a model before its weights come; `join_`
    it when no module will be swapped any more."""

    def __init__(self, args: argparse.Namespace):
        self.mesh, self.ranks, self.by_rows = args.mesh, args.mesh.size("tp"), args.shard_batch

    def cut_(self, model: Transformer) -> None:
        """Leave of the model what is this rank's. ValueError names the flag."""
        from parallel import apply_tp

        c = model.config
        if self.by_rows and not (c.kv_lora_rank or c.n_kv_heads == 1):
            raise ValueError(
                f"--shard-batch is for latent attention or one key head, not {c.n_kv_heads}; leave "
                "it out"
            )
        try:
            apply_tp(model, self.mesh, gather_logits=False)
        except ValueError as e:
            raise ValueError(f"--{e}") from None  # tp N does not divide ...

    def join_(self, model: Transformer) -> None:
        """Give every rank the logits of the whole vocabulary; model.config now says of heads, for
        who makes a cache, how many this rank has."""
        c, group = model.config, self.mesh.group("tp")
        kv_heads = max(1, c.n_kv_heads // self.ranks)
        model.config = replace(c, n_heads=c.n_heads // self.ranks, n_kv_heads=kv_heads)
        widest = -(-c.vocab_size // self.ranks)

        def gather(head: nn.Module, args: Any, logits: Tensor) -> Tensor:
            mine = F.pad(logits, (0, widest - logits.shape[-1])).contiguous()
            parts = [torch.empty_like(mine) for _ in range(self.ranks)]
            dist.all_gather(parts, mine, group=group)
            return torch.cat(parts, -1)[..., : c.vocab_size]

        if self.ranks > 1 and model.head is not None:
            model.head.register_forward_hook(gather)


# --------------------------------------------------------------------------------------------------
# Mixtures of experts, over one process or several
# --------------------------------------------------------------------------------------------------


def mixtures(model: Transformer) -> list[MoE]:
    """In the order of the layers, those of multi-token prediction last."""
    return [module for module in model.modules() if isinstance(module, MoE)]


class Shares:
    """--ep: the experts of every mixture shared out over the ranks, with --tp over its groups.
    `cut_` a model before its weights come; `join_` it when all else that sets experts is done."""

    def __init__(self, args: argparse.Namespace):
        self.args, alone = args, not dist.is_initialized()
        self.group = g = None if args.mesh is None else args.mesh.group("ep")  # None: all ranks
        self.rank, self.ranks = (0, 1) if alone else (dist.get_rank(g), dist.get_world_size(g))
        self.placements: list[Any] = []

    def cut_(self, model: Transformer) -> None:
        """Leave of all stacks the experts of this rank. ValueError names the flag."""
        if not mixtures(model):
            raise ValueError("--ep: the model has no mixture of experts to share out; leave it out")
        self.placements = self._place(model.config, len(mixtures(model)))
        for module, placement in zip(mixtures(model), self.placements):
            module.held = placement.slots[self.rank] if self.ranks > 1 else None
            for name in ("w_gate_up", "w_down") if self.ranks > 1 else ():
                stack = getattr(module, name).data
                setattr(module, name, nn.Parameter(stack[list(module.held)], requires_grad=False))

    def join_(self, model: Transformer) -> None:
        """Have all ranks' experts run the same tokens, and add up what they give."""
        from parallelism.expert_parallel import local, placed, summed

        placements = self.placements if self.ranks > 1 else ()
        for layer, (module, placement) in enumerate(zip(mixtures(model), placements)):
            mine = local(module.experts, self.rank * placement.width, placement.width)
            module.experts = placed(summed(mine, self.group), placement, offset=layer)

    def _place(self, config: ModelConfig, n: int) -> list[Any]:
        from parallelism.expert_parallel import Placement

        path, copies, E = self.args.expert_load, self.args.redundant_experts, config.n_experts
        try:
            if path is None and not copies:
                return [Placement.even(E, self.ranks)] * n
            loads = [[1.0] * E] * n if path is None else read_loads(path, config, n)
            return [Placement.by_load(load, self.ranks, copies) for load in loads]
        except ValueError as e:
            flag = "--redundant-experts" if copies else "--ep"
            why = str(e).replace("Placement.by_load", "give --expert-load")
            raise ValueError(why if why.startswith("--") else f"{flag}: {why}") from None


def read_loads(path: Path, config: ModelConfig, n: int) -> list[list[float]]:
    """How often each expert of the n mixtures was chosen: the last "expert_load" in train.py's
    metrics.jsonl, or a JSON file of such a list. It may leave out multi-token prediction."""

    def parsed(text: str) -> Any:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):  # of a line: a crash tore it
            return None
        return value.get("expert_load") if isinstance(value, dict) else value

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(
            f"--expert-load {path}: cannot be read ({e}); give metrics.jsonl"
        ) from None
    loads, E = parsed(text), config.n_experts
    if loads is None:
        loads = next(filter(None, map(parsed, reversed(text.splitlines()))), None)
    ok = isinstance(loads, list) and len(loads) in (n, len(config.moe_layers))
    for load in loads if ok else ():
        ok = ok and isinstance(load, list) and len(load) == E
        ok = ok and all(type(x) in (int, float) and 0 <= x < math.inf for x in load)
    if not ok:
        raise ValueError(
            f"--expert-load {path}: has no list of {E} counts for each of {n} mixtures "
            "(expert_load in metrics.jsonl); give one of this model"
        )
    return loads + [[1.0] * E] * (n - len(loads))


# --------------------------------------------------------------------------------------------------
# Model and prompt
# --------------------------------------------------------------------------------------------------


def dummy_model(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    prepare: Callable[[Transformer], Any] | None = None,
) -> Transformer:
    """Random weights in the shape of a named config or a config.json; of what prepare(model) cuts
    on the meta device, this process's part of them."""
    if name not in CONFIGS and not Path(name).exists():
        raise ValueError(f"--dummy {name}: neither a config.json nor one of {', '.join(CONFIGS)}")
    config = CONFIGS[name] if name in CONFIGS else read_config(name)
    with torch.device("meta"):
        model = Transformer(config).eval()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    if prepare is not None:
        prepare(model)
    allocate(model, device, dtype)
    rng, here = torch.Generator(device).manual_seed(0), dict(model.named_parameters())
    for name, shape in shapes.items():
        p, module = here.get(name), name.rpartition(".")[0]
        held = model.get_submodule(module).held if p is not None and p.dim() == 3 else None
        cut = model.cuts.get(name)
        alone = p is not None and held is None and cut is None
        whole = p if alone else torch.empty(shape, dtype=dtype, device=device)
        model.init_weight(name, whole, rng)
        part = whole if held is None else whole[list(held)]
        if p is not None and not alone:
            p.data.copy_(part if cut is None else cut.of(part))
        if name == "embed.weight" and config.tie_embeddings and "head.weight" in here:
            cut = model.cuts.get("head.weight")  # a last stage's own copy
            here["head.weight"].data.copy_(whole if cut is None else cut.of(whole))
    for buffer in model.buffers():
        buffer.zero_()
    return model


def load(args: argparse.Namespace, device: torch.device) -> tuple[Transformer, Tokenizer]:
    """Model and tokenizer of --checkpoint, or of --dummy. ValueError if they do not fit."""
    if device.type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        if args.compile and not shutil.which(compiler):
            raise ValueError(f"--compile on a CPU needs a C++ compiler, and there is no {compiler}")
    dtype = DTYPES[args.dtype] if args.dtype else None
    parts = [Shares(args)] if args.ep else []
    if (args.pp or 1) > 1:
        from parallelism.pipeline_inference import Stage  # only here: it is a program over this one

        parts.append(Stage(args))
    parts += [] if args.mesh is None else [Slices(args)]
    prepare = partial(cut_, parts) if parts else None
    if args.dummy is not None:
        model = dummy_model(args.dummy, device, dtype or torch.bfloat16, prepare)
        if args.quantize is not None:
            from quantization import quantize_model  # only here: imports Triton, 0.2 s

            quantize_model.quantize_dummy_(args, model)
        return fast_(args, model, parts), NoTokenizer(model.config.vocab_size)
    if args.mesh is not None and is_quantized(args.checkpoint):
        raise ValueError(
            f"--{'pp' if args.mesh.size('pp') > 1 else 'tp'}: {args.checkpoint} holds codes, which "
            "are not cut; give --quantize and the checkpoint that it was made of"
        )
    if args.quantize is not None or is_quantized(args.checkpoint):
        from quantization import quantize_model

        tokenizer = partial(load_tokenizer, args.checkpoint)
        model = quantize_model.load(args, device, dtype, tokenizer, prepare)
    else:
        model = load_checkpoint(args.checkpoint, device, dtype, prepare=prepare)
    if args.adapter is not None:
        names = hf_modules(model)
        merge_(load_adapters_(model, args.adapter, lambda name: names.get(name, name)))
    tokenizer, size = load_tokenizer(args.checkpoint), model.config.vocab_size
    if tokenizer.vocab_size > size:
        raise ValueError(
            f"{args.checkpoint}: the tokenizer has {tokenizer.vocab_size} tokens, but vocab_size "
            f"in config.json is {size}; the two are not of one model"
        )
    return fast_(args, model, parts), tokenizer


def cut_(parts: Sequence[Shares | Slices], model: Transformer) -> None:
    """Leave of a model what --ep and --tp give this process."""
    for part in parts:
        part.cut_(model)


def fast_(
    args: argparse.Namespace, model: Transformer, parts: Sequence[Shares | Slices] = ()
) -> Transformer:
    """What runs the model faster than model.py does: on a CPU cpu.py's products, in mixtures the
    experts that --experts says; then what --ep and --tp cut is joined. Returns the model."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu:
        for_cpu_(model)
    if args.experts == "grouped" and mixtures(model):
        from moe import use_grouped_experts  # only here: it imports Triton, which takes 0.2 s

        use_grouped_experts(model, **({"linear": cpu.expert_linear} if on_cpu else {}))
    for part in parts:
        part.join_(model)
    return model


def for_cpu_(model: Transformer) -> None:
    """cpu.py's products in place of torch's in linear layers, and its memory."""
    cpu.keep_freed_memory()
    cpu.swap_linear_(model)


def is_quantized(folder: Path) -> bool:
    """Whether --save wrote the folder. What is wrong with a config.json, load_checkpoint says."""
    try:
        hf = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return hf["quantization_config"]["quant_method"] == "sheaf"
    except (OSError, ValueError, LookupError, TypeError):
        return False


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


def stdin_is(kind: Callable[[int], bool]) -> bool:
    """Whether stdin is of that kind of file, by its mode."""
    try:
        return kind(os.fstat(sys.stdin.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):  # no stdin at all
        return False


def prompt_ids(
    args: argparse.Namespace, text: str, tokenizer: Tokenizer, config: ModelConfig
) -> list[int]:
    """The prompt's token ids; ValueError if they do not fit the model."""
    if args.prompt_tokens is not None:
        n = args.prompt_tokens
    elif args.chat:
        template = load_chat_template(args.checkpoint)
        if template is None:
            raise ValueError(f"--chat: {args.checkpoint} has no chat template; leave --chat out")
        messages = [] if args.system is None else [{"role": "system", "content": args.system}]
        messages.append({"role": "user", "content": text})
        ids = tokenizer.encode(template.render(messages), bos=False)
        n = len(ids)
    else:
        ids = tokenizer.encode(text)
        n = len(ids)
    if n == 0:
        raise ValueError("the prompt has no tokens; give some text")
    if n >= config.context:
        raise ValueError(
            f"the prompt has {n} tokens, and the model's context (max_position_embeddings in "
            f"config.json) is {config.context}; shorten it to leave room for new ones"
        )
    if args.prompt_tokens is not None:
        rng = torch.Generator().manual_seed(0)
        ids = torch.randint(config.vocab_size, (n,), generator=rng).tolist()
    return ids


# --------------------------------------------------------------------------------------------------
# Speed
# --------------------------------------------------------------------------------------------------


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
    """One run's times, seconds."""

    tokens: int  # of the longest row
    first: float  # prompt in, first token out
    rest: float  # all the tokens after the first
    later: int  # tokens of all rows after the first step
    read: int  # bytes those steps read, drafters' not counted


def clocked(steps: Iterable[list[int]], decoder: Decoder, rows: list[Continuation]) -> Run:
    """Go through all the steps, on the clock."""
    start = time.perf_counter()
    n, first, read = 0, 0.0, 0
    for _ in steps:
        if n == 0:
            first = time.perf_counter() - start
        else:
            read += decoder.bytes_per_step()
        n += 1
    rest = time.perf_counter() - start - first
    tokens = [len(row.tokens) for row in rows]
    return Run(max(tokens), first, rest, sum(tokens) - len(tokens), read)


def facts_of(
    runs: list[Run], prompt_tokens: int, load_seconds: float, bandwidth: float
) -> dict[str, Any]:
    """The medians over the runs, under the names that --json prints."""
    med = lambda f: statistics.median(f(r) for r in runs)
    facts = {
        "prompt_tokens": prompt_tokens,
        "new_tokens": runs[-1].tokens,
        "load_seconds": load_seconds,
        "first_token_seconds": med(lambda r: r.first),
        "prefill_tokens_per_second": prompt_tokens / med(lambda r: r.first),
    }
    if runs[-1].tokens > 1:
        speed = med(lambda r: r.read / r.rest / 1e9)
        facts |= {
            "tokens_per_second": med(lambda r: r.later / r.rest),
            "gigabytes_per_second": speed,
            "measured_gigabytes_per_second": bandwidth / 1e9,
            "bandwidth_share": speed * 1e9 / bandwidth,
        }
    return {k: round(v, 4) for k, v in facts.items()}


def speed_up(runs: list[Run], plain: list[Run]) -> dict[str, Any]:
    """Over the same runs without drafts, where these were made."""
    if not plain or runs[-1].tokens < 2:
        return {}
    med = lambda runs: statistics.median(r.later / r.rest for r in runs)
    return {
        "plain_tokens_per_second": round(med(plain), 4),
        "speed_up": round(med(runs) / med(plain), 4),
    }


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
    if f.get("verifications"):
        shares = f["acceptance"]
        while len(shares) > 1 and shares[-1] == 0 == shares[-2]:
            shares = shares[:-1]
        kept = " ".join(f"{share:.0%}" for share in shares)
        line += f"; {f['tokens_per_verification']:.2f} tokens per verification, drafts kept {kept}"
    elif "verifications" in f:
        line += "; nothing was drafted"
    if "speed_up" in f:
        line += f"; {f['speed_up']:.2f}x of {f['plain_tokens_per_second']:.1f} tok/s without drafts"
    return line


def device_name(device: torch.device, mesh: Any = None) -> str:
    """What the facts are about: one rank's device, of so many."""
    name = f"{device.type}, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    cut = [] if mesh is None else [d for d in ("pp", "tp") if mesh.size(d) > 1] or ["tp"]
    return ", ".join([name, *(f"{d} {mesh.size(d)}" for d in cut)])


# --------------------------------------------------------------------------------------------------
# The modes
# --------------------------------------------------------------------------------------------------


def build_decoder(
    args: argparse.Namespace,
    model: Transformer,
    tokenizer: Tokenizer,
    max_len: int,
    eos: Sequence[int],
) -> Decoder:
    """A decoder with a cache of max_len tokens per row. ValueError names the flag."""
    top, V = args.logprobs, model.config.vocab_size
    if top is not None and top > V:
        raise ValueError(f"--logprobs must be at most the vocabulary's {V}, not {top}")
    keep, attention, rows = top is not None, pick_attention(args.attention), args.n
    if args.shard_batch and args.mesh is not None:
        attention, ranks = by_rows(attention, args.mesh.group("tp")), args.mesh.size("tp")
        if rows % ranks:
            raise ValueError(f"--shard-batch: --n {rows} is no multiple of --tp {ranks}")
        rows //= ranks
    if args.speculate:
        from generation import drafting

        max_len += drafting.spare(args)
        drafting.prepare_(args, model)
    try:
        decoder = Decoder(
            model, max_len, args.how, args.n, eos, args.compile, keep, attention, cached_rows=rows
        )
    except ValueError as e:
        if not str(e).startswith("logit_bias"):
            raise
        raise ValueError(f"--logit-bias {str(e).partition(' ')[2]}") from None
    if (args.pp or 1) > 1:
        from parallelism.pipeline_inference import Ring

        return Ring(decoder, args.mesh, hidden_chunks)
    if args.speculate:
        draft = partial(load_draft, args, model.embed.weight.device)
        decoder.speculator = found = drafting.speculator(args, decoder, tokenizer, draft)
        if dist.is_initialized() and args.speculate_k == "auto":
            found.new_policy = lambda new=found.new_policy: ToldChoices(new())
            found.renew()
    return decoder


def load_draft(
    args: argparse.Namespace, device: torch.device, name: str
) -> tuple[Transformer, Tokenizer]:
    """The model of --draft, as --checkpoint's or --dummy's would be loaded."""
    other = copy.copy(args)
    other.quantize, other.checkpoint = None, Path(name)
    other.dummy = name if args.dummy is not None else None
    try:
        return agreed(partial(load, other, device))
    except ValueError as e:
        raise ValueError(f"--draft {name}: {str(e).removeprefix('--dummy ')}") from None


def generate(args: argparse.Namespace) -> None:
    """Continue a prompt, and report."""
    text = "" if args.prompt_tokens is not None else from_first(partial(prompt_text, args))
    begin = time.perf_counter()
    device = agreed(partial(pick_device, args.device))
    model, tokenizer = agreed(partial(load, args, device))
    ids = prompt_ids(args, text, tokenizer, model.config)
    room = model.config.context - len(ids)
    max_new = min(args.max_new_tokens, room)
    if max_new < args.max_new_tokens:
        print(
            f"generate.py: --max-new-tokens {args.max_new_tokens} lowered to {max_new}, the end of "
            f"the model's context of {model.config.context}",
            file=sys.stderr,
        )
    free = args.ignore_eos or args.bench or args.dummy
    eos = () if free else eos_ids(args.checkpoint, model.config.eos_ids)
    decoder = build_decoder(args, model, tokenizer, len(ids) + max_new, eos)
    load_seconds = IMPORT_SECONDS + time.perf_counter() - begin

    quiet = args.json or args.bench
    # several texts at once cannot be shown as they come
    show = partial(print, end="", flush=True) if not quiet and args.n == 1 else lambda text: None
    continues = args.prompt_tokens is None and not args.chat  # a chat reply is a text of its own

    def new_rows() -> list[Continuation]:
        stream = lambda: TextStream(tokenizer, ids if continues else ())
        return [
            Continuation(tokenizer, stream(), StopStrings(args.stop), eos, show)
            for _ in range(args.n)
        ]

    if continues and not quiet and args.n == 1:
        print(text, end="", flush=True)

    def run() -> Run:
        nonlocal rows
        rows = new_rows()
        return clocked(run_rows(decoder, ids, rows, max_new, args.logprobs), decoder, rows)

    rows, runs, plain, speculator = [], [], [], decoder.speculator
    for _ in range(args.bench + 1 if args.bench else 1):
        if speculator is not None and args.bench:  # in turns: what else runs slows both
            decoder.speculator = None
            plain.append(run())
            decoder.speculator = speculator
            speculator.renew()
        runs.append(run())
    if args.bench:
        runs, plain = runs[1:], plain[1:]  # the first was the warm-up
    facts = facts_of(runs, len(ids), load_seconds, measured_bandwidth(device))
    if speculator is not None:
        facts |= speculator.tally.facts() | speed_up(runs, plain)
    report(args, text if continues else "", rows, facts)
    print(facts_line(facts, device_name(device, args.mesh)), file=sys.stderr)


def report(
    args: argparse.Namespace, text: str, rows: list[Continuation], facts: dict[str, Any]
) -> None:
    """What is printed when all has come."""
    samples = []
    for row in rows:
        samples.append({"text": row.text, "tokens": row.tokens, "finish_reason": row.finish})
        if args.logprobs is not None:
            samples[-1]["logprobs"] = row.logprobs
    if args.json:
        more = {"samples": samples} if args.n > 1 else {}
        print(json.dumps(samples[0] | more | facts))
    elif args.n > 1 and not args.bench:
        for b, row in enumerate(rows):
            print(f"{'=' * 20} {b + 1} of {args.n} {'=' * 20}\n{text}{row.text}")
    elif not args.bench:
        print()


def score_file(args: argparse.Namespace) -> None:
    """--score: how well the model predicts a text."""
    try:
        text = args.score.read_bytes().decode("utf-8")  # line ends as they are
    except UnicodeDecodeError as e:
        raise ValueError(f"--score {args.score}: not UTF-8 text ({e.reason})") from None
    except OSError as e:
        raise ValueError(f"--score {args.score}: {e.strerror}; give a text file") from None
    device = agreed(partial(pick_device, args.device))
    model, tokenizer = agreed(partial(load, args, device))
    ids = tokenizer.encode(text)
    if not text or len(ids) < 2:
        raise ValueError(f"--score {args.score}: too short to predict anything ({len(ids)} tokens)")
    total, entries, top = 0.0, [], args.logprobs
    attention = pick_attention(args.attention)
    for chosen, best, best_ids in score(model, ids, model.config.context, top or 0, attention):
        total += chosen.double().sum().item()
        for row in zip(chosen, best, best_ids) if top is not None else ():
            token = ids[1 + len(entries)]
            entries.append(logprob_entry(tokenizer, token, *(x.tolist() for x in row)))
    if not math.isfinite(total):
        raise ValueError(NOT_FINITE.format(len(ids)))
    facts = {
        "tokens": len(ids) - 1,
        "nats_per_token": -total / (len(ids) - 1),
        "perplexity": math.exp(-total / (len(ids) - 1)),
        "bits_per_byte": -total / math.log(2) / len(text.encode()),
    }
    if args.json:
        print(json.dumps(facts | ({"logprobs": entries} if top is not None else {})))
    else:
        print("\n".join(f"{name.replace('_', ' ')}: {value:.6g}" for name, value in facts.items()))


def converse(args: argparse.Namespace) -> None:
    """--interactive: a line in, a reply out. Ctrl-C stops the reply and not the program."""
    device = pick_device(args.device)
    model, tokenizer = load(args, device)
    template = load_chat_template(args.checkpoint)
    if template is None and args.system is not None:
        raise ValueError(f"--system: {args.checkpoint} has no chat template to put it into")
    limit = min(args.context or CHAT_CONTEXT, model.config.context)
    eos = () if args.ignore_eos else eos_ids(args.checkpoint, model.config.eos_ids)
    decoder = build_decoder(args, model, tokenizer, limit, eos)
    chat = Chat(decoder, tokenizer, template, args.system)
    if template is None:
        print("This checkpoint has no chat template: it continues your text.", file=sys.stderr)
    print(f"{limit} tokens of context. /reset forgets, /quit leaves.", file=sys.stderr)
    while (line := next_line()) is not None and line.strip() != "/quit":
        if line.strip() == "/reset":
            chat.reset()
            print("forgotten", file=sys.stderr)
        elif line:
            try:
                one_turn(args, chat, line, eos, limit)
            except ValueError as e:
                print(f"generate.py: {e}", file=sys.stderr)


def next_line() -> str | None:
    """A line of the user's; None at the end of input."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            print("\n/quit leaves", file=sys.stderr)


def one_turn(
    args: argparse.Namespace, chat: Chat, line: str, eos: Sequence[int], limit: int
) -> None:
    """One reply, as it comes, then how much of its prompt the cache held already."""
    show = partial(print, end="", flush=True)
    start, held = time.perf_counter(), 0
    row = Continuation(
        chat.tokenizer, TextStream(chat.tokenizer), StopStrings(args.stop), eos, show
    )
    steps = chat.ask(line, args.how, args.max_new_tokens, row, limit)
    try:
        held = next(steps)
        for _ in steps:
            pass
    except KeyboardInterrupt:
        steps.close()
    print()
    print(
        f"[{len(chat.ids)} tokens, {held} of them from the cache, {len(row.tokens)} new in "
        f"{time.perf_counter() - start:.2f} s{', interrupted' * (row.finish == 'interrupted')}]",
        file=sys.stderr,
    )


def engine_options(args: argparse.Namespace, model: Transformer) -> dict[str, Any]:
    """The Engine's arguments that the flags say."""
    from serving.batch import blocks_that_fit

    names = "block_size max_batch_tokens max_running kv_dtype swap compile"
    options = {name: getattr(args, name) for name in names.split()}
    options["prefix_cache"] = not args.no_prefix_cache
    if mixtures(model):  # without static shapes a step cannot be captured either
        from moe import has_static_shapes

        options["static"] = all(map(has_static_shapes, mixtures(model)))
        if args.compile and not options["static"]:
            raise ValueError("--compile: what experts compute has no static shape; leave it out")
    more = draft_layers(args, model.config)
    fit = least(blocks_that_fit(model, args.block_size, args.max_running, args.kv_dtype, more))
    if args.mesh is not None:
        options["static"] = False  # no graph has sums over ranks in it
    return options | {"num_blocks": args.kv_blocks or fit}


def draft_layers(args: argparse.Namespace, config: ModelConfig) -> float:
    """What a drafter caches beside the model, in layers of the model's."""
    if args.speculate == "mtp":
        return 1.0
    if args.speculate != "draft" or args.draft is None:
        return 0.0
    path = Path(args.draft)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists() and args.draft not in CONFIGS:
        raise ValueError(f"--draft {args.draft}: no such folder")
    c = CONFIGS[args.draft] if args.draft in CONFIGS else read_config(path)
    heads = max(1, c.n_kv_heads // (args.tp or 1))  # config has those of this rank
    width = lambda c, heads: (
        c.kv_lora_rank + c.qk_rope_head_dim if c.kv_lora_rank else 2 * heads * c.head_dim
    )
    return c.n_layers * width(c, heads) / width(config, config.n_kv_heads)


def equip(args: argparse.Namespace, engine: Any, tokenizer: Tokenizer) -> None:
    """--speculate, if it is given, for an Engine."""
    from serving import batch as serving_batch

    if args.speculate:
        device = engine.model.embed.weight.device
        serving_batch.equip(args, engine, tokenizer, partial(load_draft, args, device))
        if dist.is_initialized() and args.speculate_k == "auto":
            engine.speculate_k = ToldChoices(engine.speculate_k)


def batch_files(args: argparse.Namespace) -> tuple[Path, dict]:
    """Of --batch: where results go, and what is answered there. ValueError names the flag."""
    from serving import batch as serving_batch

    if not os.access(args.batch, os.R_OK) or args.batch.is_dir():
        raise ValueError(f"--batch {args.batch}: cannot be read; give a JSONL file")
    out = args.out or args.batch.with_suffix(".results.jsonl")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    if out.exists() and out.samefile(args.batch):
        raise ValueError(f"--out {out} is the file of requests; give another")
    return out, serving_batch.read_results(out)


def batch(args: argparse.Namespace) -> None:
    """--batch: a file of requests into a file of results."""
    from serving import batch as serving_batch  # only here: it imports Triton, which takes 0.2 s

    out, answered = from_first(partial(batch_files, args))
    device = agreed(partial(pick_device, args.device))
    model, tokenizer = agreed(partial(load, args, device))
    template = None if args.dummy else load_chat_template(args.checkpoint)
    eos = () if args.dummy else eos_ids(args.checkpoint, model.config.eos_ids)
    names = [f.name for f in fields(serving_batch.SamplingParams)]
    given = {name: getattr(args, name) for name in names} | {"logit_bias": args.how.logit_bias}
    defaults = serving_batch.SamplingParams(**given)
    service = serving_batch.Service(model, tokenizer, eos, **engine_options(args, model))
    equip(args, service.engine, tokenizer)
    limit = service.engine.capacity
    requests = serving_batch.RequestFile(
        args.batch, answered, tokenizer, template, args.system, defaults, limit, from_first
    )
    first = not dist.is_initialized() or dist.get_rank() == 0
    try:
        line = serving_batch.run_batch(service, requests, out if first else Path(os.devnull))
    except KeyboardInterrupt:
        print(f"stopped; {out} has what is finished, the same command goes on", file=sys.stderr)
        raise
    print(f"[{device_name(device, args.mesh)}] {line}", file=sys.stderr)


def bench_serving(args: argparse.Namespace) -> None:
    """--bench-serving: random requests on the real clock, after a warm-up by others as long."""
    from serving import batch as serving_batch

    lengths = {name: getattr(args, name) for name in WORKLOAD_FLAGS.split()}
    workload = serving_batch.Workload(args.bench_serving, seed=args.how.seed, **lengths)
    device = agreed(partial(pick_device, args.device))
    model, tokenizer = agreed(partial(load, args, device))
    engine = serving_batch.build_engine(model, **engine_options(args, model))
    equip(args, engine, tokenizer)
    longest = args.shared_prefix + args.input_tokens[1] + args.output_tokens[1]
    if longest > engine.capacity:
        raise ValueError(
            f"--shared-prefix, --input-tokens and --output-tokens make up to {longest} tokens, "
            f"and the context or the cache (--kv-blocks) holds {engine.capacity}"
        )
    how = {f.name: getattr(args.how, f.name) for f in fields(Sampling)}
    params = serving_batch.SamplingParams(**how, ignore_eos=True)
    trace = workload.trace(model.config.vocab_size)
    shifted = lambda ids: [(i + 1) % model.config.vocab_size for i in ids]
    warm_up = [replace(a, due=0.0, ids=shifted(a.ids)) for a in trace[: 2 * args.max_running]]
    # the first compiles and captures what steps of this form need
    facts = [serving_batch.replay(engine, part, params, told) for part in (warm_up, trace)][1]
    print(json.dumps(facts) if args.json else serving_batch.facts_table(facts))


def save_quantized(args: argparse.Namespace) -> None:
    """--save: the quantized checkpoint."""
    from quantization import quantize_model

    model, _ = load(args, pick_device(args.device))
    print(quantize_model.save(args, model))


def quantize_report(args: argparse.Namespace) -> None:
    """--quantize-report: what every scheme costs and gains on this checkpoint."""
    from quantization import quantize_model

    if is_quantized(args.checkpoint):
        raise ValueError(f"--quantize-report: {args.checkpoint} is quantized already")
    quantize_model.check_report(args)
    device = pick_device(args.device)
    dtype = DTYPES[args.dtype] if args.dtype else None
    tokenizer = load_tokenizer(args.checkpoint)

    @torch.inference_mode()
    def speed(model: Transformer, batch: int) -> float:
        fast_(args, model)
        decoder = Decoder(model, 128, Sampling(temperature=0.0), batch, (), args.compile)
        decoder.start(list(range(1, 65)))
        runs = []
        for _ in range(32):
            start = time.perf_counter()
            decoder.next()
            runs.append(time.perf_counter() - start)
        return batch / statistics.median(runs)

    rows = []
    say = (lambda line: None) if args.json else partial(print, flush=True)
    say(quantize_model.REPORT_HEAD)
    for row in quantize_model.report(args, device, dtype, tokenizer, speed):
        say(quantize_model.report_line(row))
        rows.append(row)
    say("* slower than 16 bit")
    if args.json:
        print(json.dumps([vars(row) for row in rows]))
    if args.plot is not None:
        quantize_model.plot(rows, args.plot)


@torch.inference_mode()
def run(args: argparse.Namespace) -> None:
    """The mode that the command line asks for."""
    modes = (
        (args.interactive, converse),
        (args.score, score_file),
        (args.save, save_quantized),
        (args.quantize_report, quantize_report),
        (args.batch, batch),
        (args.bench_serving, bench_serving),
        (True, generate),
    )
    with process_group(args):
        next(mode for flag, mode in modes if flag)(args)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    several = any(a.partition("=")[0] in ("--ep", "--tp", "--pp") for a in argv)
    if not several or "WORLD_SIZE" not in os.environ or os.environ.get("RANK") == "0":
        return outcome(argv)
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        try:
            code = outcome(argv)  # rank 0 says the same
        except RuntimeError:  # it has left: whoever read its text has seen enough
            code = 1
        if code:
            time.sleep(1)  # torchrun ends all as soon as one fails, and rank 0 is to be heard
        return code


def outcome(argv: list[str]) -> int:
    """The exit code; an error is one line on stderr."""
    try:
        run(parse_args(argv))
    except BrokenPipeError:  # the reader, say `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as e:
        print(f"generate.py: error: {e}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as e:
        if isinstance(e, RuntimeError) and "memory" not in str(e):
            raise
        why = (str(e) or "no more to be had").splitlines()[0]
        print(f"generate.py: error: out of memory ({why})", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
