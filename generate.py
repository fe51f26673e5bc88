"""Text generation from a checkpoint: prompts, chat, perplexity, batches, benchmarks.

    python generate.py                                       the shipped model writes Python
    python generate.py "def quicksort(" --temperature 0      greedy
    git log -1 | python generate.py --checkpoint DIR --json  a Hugging Face folder
    python generate.py --checkpoint DIR --interactive        chat
    python generate.py --perplexity FILE                     perplexity of a text
    python generate.py --dummy llama3.1-8b --prompt-tokens 128 --compile --bench
    python generate.py --quantize int4                       weights quantized while loading
    python generate.py --speculate ngram                     speculative decoding
    python generate.py --batch requests.jsonl                many requests, continuous batching
    python generate.py --bench-serving 200 --request-rate 10 throughput and latency under load
    torchrun --nproc-per-node 4 generate.py --tp 4 ...       tensor parallelism over 4 ranks
    torchrun --nproc-per-node 4 -- generate.py --pp 4 --n 8  pipeline parallelism over 4 ranks
    torchrun --nproc-per-node 4 generate.py --ep ...         expert parallelism over 4 ranks

Generation has two phases, one function each. `prefill` runs the prompt through the model in chunks:
large matmuls, compute bound. A decode step runs one token: every weight is read and used once, so
the step is memory bound and takes at least (weights + KV cache) / bandwidth. After each run one
line on stderr reports the achieved bandwidth, and its share of a read bandwidth measured here.

Sampling settings are the fields of paged_kv.py's SamplingParams, in every mode, as flags. --n
generates several continuations of one prompt in lockstep, reading the weights once for all; sample
b equals a run with seed + b. --interactive keeps the KV cache across turns and prefills only new
tokens.

--speculate drafts the next tokens cheaply and verifies them in one step: the same distribution, and
the same text when greedy (speculative.py). The acceptance rate is reported.

MoE models use moe.py's grouped experts. With --ep every rank runs the same tokens and loads only
its part of the experts; an all-reduce adds their outputs. A model whose experts do not fit one
device decodes on several. Each rank samples for itself: ranks must be machines of the same kind
with the same number of threads.

With --tp every rank loads its heads, columns and rows of all weight matrices and caches its own
heads' keys and values (parallel.py's plan): a step reads 1 / N of the weights and has two
all-reduces per layer. Logits are gathered, so all ranks sample the same tokens; decisions by time
are rank 0's, decisions by free memory the minimum over ranks. The text is that of one process up to
summation order; with --quantize also up to quantization, since each rank chooses scales for its own
shard. With --ep too, experts are sharded over groups of --tp ranks. With MLA or MQA every rank
would cache and read all keys: --shard-batch gives each rank some of the --n rows instead, for two
more collectives per layer (parallelism/inference_parallel.py).

With --pp every rank loads and caches some of the layers, and the --n rows run through the stages in
groups (parallelism/pipeline_inference.py); combine with --tp to shard each layer too.

--compile turns a decode step into one compiled graph of static shapes, on CUDA replayed as a CUDA
graph (the static cache and compiled step of gpt-fast). On a CPU the graph calls
generation/cpu.py's matmuls, which read memory faster than compiled ones, and it is worth it with
quantized weights. Needs: model.py, huggingface/, generation/, sentencepiece or tokenizers; moe.py
for MoE models, parallelism/expert_parallel.py for --ep; parallel.py for --tp,
parallelism/inference_parallel.py for --shard-batch; parallelism/pipeline_inference.py and its
dependencies for --pp; attention.py for --attention flash; serving/batch.py and paged_kv.py for
--batch and --bench-serving; quantization/quantize_model.py and its dependencies for --quantize,
training/data.py for --calibrate, training/metrics.py for --plot; speculative.py for --speculate.
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

START = time.perf_counter()  # the imports below count as load time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent
for drawer in "huggingface generation serving quantization training parallelism".split():
    spec = importlib.util.find_spec(drawer)  # an installed package wins over a folder
    if spec.submodule_search_locations[0] != str(ROOT / drawer):
        sys.exit(f"generate.py: error: {spec.origin} shadows {drawer}/; uninstall that package")

from generation import cpu
from generation.sampling import Sampler, logprobs_of
from huggingface.tokenizer import (
    ChatTemplate,
    Continuation,
    DummyTokenizer,
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
from paged_kv import SamplingParams
from training.lora import load_adapters_, merge_

IMPORT_SECONDS = time.perf_counter() - START

SHIPPED = ROOT / "checkpoints" / "small"
DEFAULT_PROMPT = "class Stack:\n    def __init__(self):\n"
TEMPERATURE = 0.8
PREFILL_CHUNK = 512  # tokens; bounds the memory of a long prompt's mask and activations
CHAT_CONTEXT = 8192  # default --ctx-size of a conversation, tokens
NOT_FINITE = (
    "the logits after {} tokens are not finite: the weights are damaged, or --dtype has too small "
    "a range"
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPES |= {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}

# --------------------------------------------------------------------------------------------------
# Prefill and decode
# --------------------------------------------------------------------------------------------------


AttendFactory = Callable[[KVCache, int | None], Attend]  # (cache, limit of slots to read) -> attend


def sdpa(cache: KVCache, limit: int | None) -> Attend:
    """An attend function: torch's scaled_dot_product_attention over the first `limit` slots."""
    return partial(cache.attend, limit=limit)


def hidden_chunks(
    model: Transformer,
    tokens: Tensor,
    cache: KVCache,
    start: int = 0,
    attention: AttendFactory = sdpa,
) -> Iterator[tuple[int, Tensor]]:
    """Prefill tokens (1, T) from position `start` on into the cache, chunk by chunk: yields (the
    chunk's first index in tokens, its hidden states (1, t, C))."""
    T = tokens.shape[1]
    scaling = model.config.rope_scaling or {}
    # dynamic NTK scales by the length of the forward call, so chunks would change the result
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
    attention: AttendFactory = sdpa,
    observe: Callable[[int, Tensor], None] = lambda start, hidden: None,
) -> Tensor:
    """Prefill tokens (1, T) from position `start` on into the cache; logits (1, V) of the last.
    observe: called with every chunk's position and hidden states (1, t, C)."""
    for first, hidden in hidden_chunks(model, tokens, cache, start, attention):
        observe(start + first, hidden)
        last = hidden[:, -1]  # only the last token's logits are needed
    return model.head(last)


def gather_experts_if_compiled(experts: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An experts hook for compiled steps without a grouped kernel: gathers the weights of each
    token's K experts, so that no shape depends on routing. Outside of torch.compile, in prefill,
    the given `experts`."""

    def run(x: Tensor, weights: Tensor, ids: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return experts(x, weights, ids, w_gate_up, w_down)
        gate, up = torch.einsum("nc,nkfc->nkf", x, w_gate_up[ids]).chunk(2, dim=-1)
        y = torch.einsum("nkf,nkcf->nkc", F.silu(gate) * up, w_down[ids])
        return (y * weights[..., None].type_as(x)).sum(1)

    return run


class Decoder:
    """B continuations of one prompt in lockstep: KV cache, sampler and decode step.

    In eager mode a step reads only the used part of the cache. Compiled, it gets the whole cache,
    so that shapes are static: one compilation, and on CUDA one captured graph, replayed on the same
    input tensors. sdpa then reads the whole cache; a kernel that takes the length does not.
    """

    def __init__(
        self,
        model: Transformer,
        max_len: int,
        params: SamplingParams,
        batch: int = 1,
        eos: Sequence[int] = (),
        compiled: bool = False,
        keep_logits: bool = False,
        attention: AttendFactory = sdpa,
        cached_rows: int | None = None,
    ):
        """max_len: cache slots per row. cached_rows: rows cached here, if `attention` shards the
        batch. keep_logits: store each step's logits in `last_step`."""
        first = next(model.parameters())
        device, dtype = first.device, first.dtype
        V = model.config.vocab_size
        self.model, self.batch, self.compiled, self.num_cached = model, batch, compiled, 0
        self.attention = attention
        self.cache = KVCache(model.config, cached_rows or batch, max_len, dtype, device)
        self.sampler = Sampler(params, batch, V, device, [e for e in eos if e < V])
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.logits = torch.zeros(batch, V, dtype=dtype, device=device) if keep_logits else None
        self.last_step: tuple[Tensor, Tensor] | None = None  # logits (B, T, V), sampled ids (B, T)
        self.run = self._compile() if compiled else lambda: self._step(self.num_cached + 1)
        self.weight_bytes = weight_bytes(model, batch)
        self.speculator: Any = None  # a drafting.Speculator, which then runs the steps

    def start(self, ids: Sequence[int], cached: int = 0) -> list[list[int]]:
        """Prefill the prompt `ids`, of which the first `cached` are in the cache already; returns
        the first new token of every row."""
        self.num_cached = cached
        prompt = torch.tensor([ids[cached:]], device=self.token.device)
        kwargs = {} if self.speculator is None else {"observe": self.speculator.observe}
        logits = prefill(self.model, prompt, self.cache, cached, self.attention, **kwargs)
        self.num_cached = len(ids)
        self.sampler.start([ids] * self.batch)
        self.position.fill_(len(ids))
        self._sample(logits.expand(self.batch, -1))
        runs = self.check_finite(self._tokens())
        if self.speculator is not None:
            self.speculator.start(ids, [run[0] for run in runs])
        return runs

    def next(self) -> list[list[int]]:
        """The next tokens of every row: one, or with a speculator one or more."""
        if self.speculator is not None:
            return self.check_finite(self.speculator.next())
        self.run()
        self.num_cached += 1  # only after the whole step: Ctrl-C may interrupt it anywhere
        return self.check_finite(self._tokens())

    def stop(self) -> None:
        """End decoding of this prompt; nothing to do here."""

    def store_step(self, logits: Tensor, sampled: Tensor) -> None:
        """With keep_logits, set last_step: logits (B, T, V), ids (B, T) sampled from them."""
        if self.logits is not None:
            self.last_step = logits, sampled.clamp(min=0)

    def _tokens(self) -> list[list[int]]:
        if self.logits is not None:
            self.store_step(self.logits[:, None], self.token)
        return self.token.tolist()

    def check_finite(self, runs: list[list[int]]) -> list[list[int]]:
        """The rows' new tokens; ValueError if one is -1, from logits that are not finite."""
        if min(map(min, runs)) < 0:
            raise ValueError(NOT_FINITE.format(self.num_cached))
        return runs

    def _sample(self, logits: Tensor) -> None:
        if self.logits is not None:
            self.logits.copy_(logits)
        self.token.copy_(self.sampler(logits)[:, None])

    def _step(self, limit: int | None = None) -> None:
        attend = self.attention(self.cache, limit)
        self._sample(self.model(self.token, self.position, attend)[:, -1])
        self.position.add_(1)

    def graph_runner(self, step: Callable[..., Any]) -> CUDAGraphRunner:
        """Compile or capture a function of static shapes, for a speculator."""
        return CUDAGraphRunner(step, self.token.device)

    def _compile(self) -> Callable[[], None]:
        from moe import has_static_shapes  # imported here: it imports Triton

        for module in moe_layers(self.model):
            if not has_static_shapes(module):
                module.experts = gather_experts_if_compiled(module.experts)
        step = compile_step(self._step, self.token.device)
        for _ in range(2):
            step()  # compiles; cache slots it writes are overwritten by the first prompt
        if self.token.device.type != "cuda":
            return step
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    def bytes_per_step(self) -> int:
        """Bytes read by the last step: weights, and the part of the cache that was read."""
        whole = self.compiled and self.attention is sdpa
        return self.weight_bytes + self.cache.bytes_read(None if whole else self.num_cached)


def compile_step(step: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Compile to one graph of static shapes. On CUDA this option lets the compiler generate
    matrix-vector products as reductions, fused with neighbouring ops."""
    options = {"coordinate_descent_tuning": True} if device.type == "cuda" else {}
    return torch.compile(step, fullgraph=True, dynamic=False, options=options)


class CUDAGraphRunner:
    """A function of tensors (or None), compiled for every input shape; on CUDA captured as a CUDA
    graph with static inputs. Its side effects, such as cache writes, may happen twice."""

    def __init__(self, step: Callable[..., Any], device: torch.device):
        self.step, self.cuda = compile_step(step, device), device.type == "cuda"
        self.graphs: dict[Any, Callable[..., Any]] = {}  # by input shapes

    def __call__(self, *inputs: Tensor | None) -> Any:
        key = tuple(None if x is None else x.shape for x in inputs)
        if key not in self.graphs:
            with torch._dynamo.config.patch(recompile_limit=64):
                self.step(*inputs)
            self.graphs[key] = self._capture(inputs) if self.cuda else self.step
        return self.graphs[key](*inputs)

    def _capture(self, inputs: Sequence[Tensor | None]) -> Callable[..., Any]:
        static_inputs = [None if x is None else x.clone() for x in inputs]
        self.step(*static_inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.step(*static_inputs)

        def replay(*inputs: Tensor | None) -> Any:
            for static, new in zip(static_inputs, inputs):
                if static is not None:
                    static.copy_(new)
            graph.replay()
            return out

        return replay


def weight_bytes(model: Transformer, batch: int = 1) -> int:
    """Bytes of weights a decode step reads: all matmul weights (of E experts the K of each row,
    assuming uniform routing) and one embedding row per batch row; not the MTP layers."""
    c, total = model.config, 0.0
    embed, head = (getattr(module, "weight", None) for module in (model.embed, model.head))
    for name, p in chain(model.named_parameters(), model.named_buffers()):
        if name.startswith("mtp.") or name.endswith(".expert_bias"):
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
    """Generate up to max_new tokens for every row after the prompt; yields each step's tokens, more
    than one per row if drafts were accepted. A finished row ignores further tokens. With `top`,
    rows also collect log-probabilities."""
    runs = decoder.start(ids, cached)
    while True:
        if top is not None:
            logprobs = logprobs_of(*decoder.last_step, top)
        for b, (row, run) in enumerate(zip(rows, runs)):
            for i, token in enumerate(run):
                if row.finish_reason is not None:
                    break
                if top is not None:
                    chosen, *best = (x[b, i].tolist() for x in logprobs)
                    row.logprobs.append(logprob_entry(row.tokenizer, token, chosen, *best))
                row.push(token)
                if len(row.tokens) == max_new:
                    row.end("length")
        yield runs
        if all(row.finish_reason for row in rows):
            decoder.stop()
            return
        runs = decoder.next()


def score(
    model: Transformer,
    ids: Sequence[int],
    window: int,
    top: int = 0,
    attention: AttendFactory = sdpa,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Log-probabilities of ids[1:] given the preceding tokens: yields logprobs_of, by chunk.

    A text longer than `window` is scored with a sliding window of stride window / 2: every token
    has at least half a window of context.
    """
    half = max(1, window // 2)
    device, dtype = model.embed.weight.device, model.embed.weight.dtype
    cache = KVCache(model.config, 1, min(window, len(ids)), dtype, device)
    done = 1  # tokens scored so far; the first needs no score
    while done < len(ids):
        begin = 0 if done == 1 else done - half
        tokens = torch.tensor([ids[begin : begin + window]], device=device)
        for first, hidden in hidden_chunks(model, tokens, cache, attention=attention):
            targets = tokens[0, first + 1 : first + 1 + hidden.shape[1]]
            skip = max(0, done - begin - first - 1)
            if skip < len(targets):
                logits = model.head(hidden[0, skip : len(targets)])
                yield logprobs_of(logits, targets[skip:], top)
        done = begin + tokens.shape[1]


# --------------------------------------------------------------------------------------------------
# Conversation
# --------------------------------------------------------------------------------------------------


class Chat:
    """A conversation over one KV cache: each turn prefills only tokens that are not cached.

    With a chat template every turn renders the whole conversation; without one, it is all the text
    so far and the new line. The cache keeps the ids that were generated, even if their text would
    be tokenized differently: if the new text extends the old, only the new part is tokenized (in
    context). If not (templates that rewrite earlier turns), the cache is truncated to the longest
    common prefix.
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
        """Start a new conversation."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.ids: list[int] = []  # prompt and reply of the last turn
        self.text = ""  # their text
        self.exact = False  # whether ids decode to exactly this text
        self.turn = 0

    def ids_for(self, line: str) -> tuple[str, list[int]]:
        """The conversation with this user message, as text and ids."""
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
        self, line: str, params: SamplingParams, max_new: int, row: Continuation, limit: int
    ) -> Iterator[int]:
        """Generate the reply into `row`; yields at every step and may be closed at any. The first
        value is the number of cached ids. ValueError if the conversation is too long."""
        text, ids = self.ids_for(line)
        if not ids:
            raise ValueError("the prompt has no tokens; enter some text")
        if len(ids) >= limit:
            raise ValueError(
                f"the conversation has {len(ids)} tokens, but the cache holds {limit}; /reset or "
                "increase --ctx-size"
            )
        # at least one token must run, for its logits
        reusable = min(self.decoder.num_cached, len(self.ids), len(ids) - 1)
        cached = next((i for i in range(reusable) if ids[i] != self.ids[i]), reusable)
        if self.template is None:  # without a template the text continues the prompt's
            row.stream = TextStream(self.tokenizer, ids)
        yield cached
        self.ids, self.text, self.turn = ids, text, self.turn + 1
        seed = (params.seed + self.turn - 1) % 2**63  # other noise in each turn
        self.decoder.sampler.admit(0, replace(params, seed=seed), ())
        try:
            for tokens in run_rows(
                self.decoder, ids, [row], min(max_new, limit - len(ids)), cached=cached
            ):
                yield len(tokens[0])
        finally:  # also after Ctrl-C
            row.end("interrupted")
            self._append_turn(line, row)

    def _append_turn(self, line: str, row: Continuation) -> None:
        self.messages += [
            {"role": "user", "content": line},
            {"role": "assistant", "content": row.text},
        ]
        tokens, text = row.tokens, row.text
        if row.finish_reason == "eos" and self.template is None:
            tokens = tokens[:-1]  # an EOS inside the text would end it there
        elif row.finish_reason == "eos":
            text += self.tokenizer.piece(tokens[-1])  # as the template writes it
        self.ids, self.text = self.ids + tokens, self.text + text
        self.exact = row.finish_reason != "stop"  # ids then include the stop string


# --------------------------------------------------------------------------------------------------
# The command line
# --------------------------------------------------------------------------------------------------

SAMPLING_FLAGS = {
    "temperature": (float, "0 is greedy"),
    "top_k": (int, "sample from the k most likely tokens; 0: all"),
    "top_p": (float, "sample from the smallest set of tokens with this total probability"),
    "min_p": (float, "sample from tokens with this fraction of the highest probability"),
    "repetition_penalty": (float, "divide the logits of tokens in prompt or output; 1: off"),
    "presence_penalty": (float, "subtract from the logits of tokens in the output"),
    "frequency_penalty": (float, "subtract, per occurrence in the output"),
    "min_new_tokens": (int, "no end-of-sequence token before this many"),
    "seed": (int, "same seed, same text"),
}


def build_parser() -> argparse.ArgumentParser:
    """All flags, with their defaults."""
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = p.add_argument
    add("prompt", nargs="?", help="text to continue; - or a pipe reads it from stdin")
    text = "Hugging Face folder (the shipped checkpoints/small)"
    add("--checkpoint", type=Path, default=SHIPPED, metavar="DIR", help=text)
    add(
        "--adapter", type=Path, metavar="DIR", help="LoRA in PEFT's format, merged into the weights"
    )
    add("--max-new-tokens", type=int, default=200, help="max tokens to generate (%(default)s)")
    defaults = {f.name: f.default for f in fields(SamplingParams)}
    for name, (kind, text) in SAMPLING_FLAGS.items():
        text, default = f"{text} (%(default)s)", defaults[name]
        if name == "temperature":  # its default depends on the mode
            text, default = f"0 is greedy ({TEMPERATURE})", None
        add(_flag(name), type=kind, default=default, help=text)
    add("--logit-bias", metavar="ID:BIAS,...", default="", help="add to logits; -inf bans a token")
    add("--ignore-eos", action="store_true", help="do not stop at end-of-sequence tokens")
    text = "stop before this text; repeatable"
    add("--stop", action="append", default=[], metavar="TEXT", help=text)
    text = "number of continuations; continuation i uses seed + i (%(default)s)"
    add("--n", type=int, default=1, help=text)
    text = "with --json: log-probabilities of the tokens and of the K most likely ones"
    add("--logprobs", type=int, metavar="K", help=text)
    add("--chat", action="store_true", help="apply the chat template to the prompt")
    add("--interactive", action="store_true", help="chat; /reset and /quit")
    add("--system-prompt", metavar="TEXT", help="with --chat or --interactive: the system message")
    text = f"with --interactive: max tokens of the conversation ({CHAT_CONTEXT})"
    add("--ctx-size", type=int, metavar="N", help=text)
    add("--perplexity", type=Path, metavar="FILE", help="only print the perplexity of this text")
    add("--device", help="default: cuda if available, else cpu")
    add("--dtype", choices=DTYPES, help="default: the checkpoint's (bf16 for --dummy)")
    text = "flash: attention.py's kernels; on a CPU its slower reference (%(default)s)"
    add("--attention", choices=("sdpa", "flash"), default="sdpa", help=text)
    add("--compile", action="store_true", help="compile the decode step (CUDA graph on CUDA)")
    add("--json", action="store_true", help="print one JSON object instead of text")
    text = "N runs (5) without EOS stop; print medians"
    add("--bench", nargs="?", type=int, const=5, metavar="N", help=text)
    text = f"random weights for a config.json, or for {', '.join(CONFIGS)}"
    add("--dummy", metavar="CONFIG", help=text)
    add("--prompt-tokens", type=int, metavar="N", help="a prompt of N random token ids")
    text = "tensor parallelism over N ranks; run with torchrun"
    add("--tp", type=int, metavar="N", help=text)
    text = "pipeline parallelism over N ranks, the --n rows in groups; run with torchrun"
    add("--pp", type=int, metavar="N", help=text)
    text = "with --tp and --n, for MLA or MQA: shard the KV cache by rows instead of heads"
    add("--shard-batch", action="store_true", help=text)
    add_expert_flags(add)
    add_quantize_flags(add)
    add_speculation_flags(add)
    add_serving_flags(add)
    return p


def add_expert_flags(add: Callable[..., Any]) -> None:
    """Flags of MoE models."""
    text = "grouped: moe.py's grouped GEMM; loop: model.py's loop over experts (%(default)s)"
    add("--experts", choices=("grouped", "loop"), default="grouped", help=text)
    add("--ep", action="store_true", help="expert parallelism over all ranks; run with torchrun")
    text = (
        "with --ep: place experts by measured load (train.py's metrics.jsonl, or a list per layer)"
    )
    add("--expert-load", type=Path, metavar="FILE", help=text)
    text = "with --ep: number of extra replicas, of the most loaded experts (%(default)s)"
    add("--num-redundant-experts", type=int, default=0, metavar="N", help=text)


def add_quantize_flags(add: Callable[..., Any]) -> None:
    """Flags of quantization/quantize_model.py."""
    text = "quantize the weights: int8, int4, int8-dynamic, llm.int8, fp8, ..."
    add("--quantize", metavar="SCHEME", help=text)
    text = "weights per scale, for int4, int3 and int2 (32)"
    add("--group-size", type=int, metavar="G", help=text)
    text = "layers to keep in 16 bit: names or parts of names"
    add("--quantize-skip", metavar="NAME,...", default="", help=text)
    text = "calibrated quantization: gptq, awq, smoothquant, tacq"
    add("--calibrate", choices=("gptq", "awq", "smoothquant", "tacq"), help=text)
    text = "with --calibrate or --quantize-report: the text (the standard library's source)"
    add("--calibration-text", type=Path, metavar="FILE", help=text)
    add("--save", type=Path, metavar="OUT", help="only write the quantized checkpoint")
    text = "only print bytes, loss and speed of every scheme on this checkpoint"
    add("--quantize-report", action="store_true", help=text)
    add("--plot", type=Path, metavar="FILE", help="with --quantize-report: plot loss over bytes")


def add_speculation_flags(add: Callable[..., Any]) -> None:
    """Flags of speculative decoding (generation/drafting.py)."""
    text = (
        "speculative decoding; drafts come from: ngram, a lookup in prompt and output; draft, a "
        "smaller model; staged, the same with ngram drafts of its own; tree, a tree of its top "
        "tokens (never compiled); exit, the model's first layers; mtp, its multi-token prediction "
        "layers; head, a draft head of train.py --task draft-head"
    )
    names = ("ngram", "draft", "staged", "tree", "exit", "mtp", "head")
    add("--speculate", choices=names, help=text)
    text = "folder of the draft model or draft head (for the shipped model the shipped ones)"
    add("--draft-model", metavar="DIR", help=text)
    text = "drafts per step (nodes of a tree); auto: by measured goodput, up to 8 (%(default)s)"
    add("--speculate-k", default="auto", metavar="N|auto", help=text)
    text = "with --speculate exit: number of layers that draft (half)"
    add("--exit-layers", type=int, metavar="N", help=text)
    text = (
        "propose deterministic drafts, sampled with the target's noise: the text is exactly what "
        "--seed gives without drafts, at a lower acceptance rate"
    )
    add("--draft-coupled", action="store_true", help=text)
    text = "with --bench: accept each draft with this probability, unverified; only speed is valid"
    add("--forced-acceptance", type=float, metavar="A", help=text)


def add_serving_flags(add: Callable[..., Any]) -> None:
    """Flags of --batch and --bench-serving."""
    text = (
        "run a JSONL file of requests: each line has prompt, messages or prompt_ids, optionally id "
        "and priority, and sampling settings, whose defaults are the flags above"
    )
    add("--batch", type=Path, metavar="FILE", help=text)
    text = "with --batch: results file (FILE with suffix .results.jsonl); existing results are kept"
    add("--out", type=Path, metavar="FILE", help=text)
    text = "throughput and latency of N random requests (64), greedy by default"
    add("--bench-serving", nargs="?", type=int, const=64, metavar="N", help=text)
    add("--request-rate", type=float, default=math.inf, help="arrivals per second (all at once)")
    text = "coefficient of variation of the time between arrivals (%(default)s: Poisson)"
    add("--arrival-cv", type=float, default=1.0, metavar="CV", help=text)
    text = "tokens of a random {}, uniform from A to B (%(default)s)"
    add("--input-tokens", default="16:128", metavar="A:B", help=text.format("prompt"))
    add("--output-tokens", default="16:64", metavar="A:B", help=text.format("output"))
    text = "length of a prefix shared by all random prompts (%(default)s)"
    add("--shared-prefix", type=int, default=0, metavar="N", help=text)
    text = "KV cache blocks (for --max-num-seqs sequences, within 80%% of free GPU memory or 1 GB)"
    add("--kv-blocks", type=int, metavar="N", help=text)
    add("--block-size", type=int, default=16, help="tokens per KV block (%(default)s)")
    text = "max tokens per step, prefill included (%(default)s)"
    add("--max-num-batched-tokens", type=int, default=512, help=text)
    add("--max-num-seqs", type=int, default=64, help="max running sequences (%(default)s)")
    add("--kv-cache-dtype", choices=("int8", "fp8"), help="quantize the KV cache")
    add("--no-prefix-cache", action="store_true", help="disable prefix caching")
    text = "swap a preempted sequence's KV to host memory instead of recomputing it"
    add("--kv-swap", action="store_true", help=text)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


WORKLOAD_FLAGS = "request_rate arrival_cv input_tokens output_tokens shared_prefix"
ENGINE_FLAGS = (
    "kv_blocks block_size max_num_batched_tokens max_num_seqs kv_cache_dtype no_prefix_cache "
    "kv_swap"
)


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The flags, with .sampling_params and .mesh, set by process_group. ValueError
    names a flag that is out of range or would have no effect."""
    parser = build_parser()
    args = parser.parse_args(argv)
    given = {name for name in vars(args) if getattr(args, name) != parser.get_default(name)}
    given -= {name for name in ("tp", "pp") if getattr(args, name) == 1}  # same as not given
    if args.temperature is None:
        sampled = {"top_k", "top_p", "min_p"} & given or args.bench_serving is None
        args.temperature = TEMPERATURE if sampled else 0.0
    check_ranges(args)
    check_modes(args, given)
    args.sampling_params, args.mesh = read_sampling(args), None
    return args


def check_ranges(args: argparse.Namespace) -> None:
    """ValueError names a flag that is out of range; SamplingParams checks its own fields."""
    for names, good, wanted in (
        ("bench prompt_tokens", lambda v: v >= 1, "at least 1"),
        ("bench_serving kv_blocks block_size", lambda v: v >= 1, "at least 1"),
        ("max_num_batched_tokens max_num_seqs", lambda v: v >= 1, "at least 1"),
        ("ctx_size", lambda v: v >= 2, "at least 2"),
        ("exit_layers tp pp", lambda v: v >= 1, "at least 1"),
        ("forced_acceptance", lambda v: 0 <= v <= 1, "from 0 to 1"),
        ("shared_prefix num_redundant_experts", lambda v: v >= 0, "0 or more"),
        ("arrival_cv", lambda v: v == 0 or 0.01 <= v <= 100, "0, or from 0.01 to 100"),
        ("request_rate", lambda v: v >= 1e-6, "at least 1e-6"),
    ):
        for name in names.split():
            value = getattr(args, name)
            if value is not None and not good(value):
                raise ValueError(f"{_flag(name)} must be {wanted}, not {value}")
    for name in ("input_tokens", "output_tokens"):
        text = getattr(args, name)
        low, _, high = text.partition(":")
        if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
            raise ValueError(f"{_flag(name)} must be A:B with integers 1 <= A <= B, not {text!r}")
        setattr(args, name, (int(low), int(high)))
    if args.speculate_k != "auto":
        ok = args.speculate_k.isdecimal() and 1 <= int(args.speculate_k) <= 64
        if not ok:
            raise ValueError(f"--speculate-k must be from 1 to 64 or auto, not {args.speculate_k}")
    for low, high in (
        ("min_new_tokens", "max_new_tokens"),
        ("max_num_seqs", "max_num_batched_tokens"),
    ):
        if getattr(args, low) > getattr(args, high):
            raise ValueError(
                f"{_flag(low)} {getattr(args, low)} must not exceed {_flag(high)} "
                f"{getattr(args, high)}"
            )


def check_modes(args: argparse.Namespace, given: set[str]) -> None:
    """ValueError names a flag, of those given, that would have no effect."""
    for names, good, requirement in (
        ("logprobs", args.json or args.batch, "--json, which prints them"),
        ("system_prompt", args.chat or args.interactive or args.batch, "--chat or --interactive"),
        ("ctx_size", args.interactive, "--interactive"),
        ("out", args.batch, "--batch"),
        ("group_size", args.quantize or args.quantize_report, "--quantize"),
        ("quantize_skip", args.quantize or args.quantize_report, "--quantize"),
        ("calibrate save", args.quantize, "--quantize"),
        ("calibration_text", args.calibrate or args.quantize_report, "--calibrate"),
        ("plot", args.quantize_report, "--quantize-report"),
        (
            "draft_model",
            args.speculate in ("draft", "staged", "tree", "head"),
            "--speculate draft, staged, tree or head",
        ),
        ("speculate_k draft_coupled", args.speculate, "--speculate"),
        ("exit_layers", args.speculate == "exit", "--speculate exit"),
        ("forced_acceptance", args.speculate != "tree", "a --speculate other than tree"),
        (
            "forced_acceptance",
            args.speculate and (args.bench or args.bench_serving),
            "--speculate and --bench or --bench-serving",
        ),
        (ENGINE_FLAGS, args.batch or args.bench_serving, "--batch or --bench-serving"),
        (WORKLOAD_FLAGS, args.bench_serving, "--bench-serving"),
        ("expert_load num_redundant_experts", args.ep, "--ep"),
        ("shard_batch", args.tp and args.tp > 1, "--tp 2 or more"),
    ):
        for name in names.split():
            if name in given and not good:
                raise ValueError(f"{_flag(name)} requires {requirement}")
    sampling = f"{' '.join(SAMPLING_FLAGS)} n max_new_tokens logit_bias ignore_eos stop"
    decoding = f"{sampling} compile speculate"
    single = "prompt prompt_tokens interactive chat perplexity bench attention"
    for mode, others in (
        ("batch", f"{single} json bench_serving"),
        ("bench_serving", f"{single} stop n logprobs max_new_tokens min_new_tokens ignore_eos"),
        ("interactive", "prompt json bench prompt_tokens chat perplexity logprobs dummy n"),
        ("perplexity", f"prompt bench prompt_tokens chat dummy {decoding}"),
        ("save", f"{single} json batch bench_serving dummy {decoding}"),
        (
            "quantize_report",
            f"{single} batch bench_serving dummy quantize save speculate {sampling}",
        ),
        ("calibrate", "dummy"),
        ("ep", "batch bench_serving interactive speculate compile calibrate save quantize_report"),
        ("tp", "interactive compile calibrate save quantize_report"),
        (
            "pp",
            "interactive compile calibrate save quantize_report batch bench_serving speculate "
            "perplexity logprobs ep shard_batch",
        ),
        ("shard_batch", "batch bench_serving speculate perplexity"),
        ("adapter", "quantize save quantize_report dummy ep tp pp"),
        ("prompt_tokens", "prompt chat"),
        ("dummy", "checkpoint chat"),
        ("bench", "stop logprobs ignore_eos"),
    ):
        clash = [other for other in others.split() if other in given]
        if mode in given and clash:
            other = "a prompt" if clash[0] == "prompt" else _flag(clash[0])
            raise ValueError(f"{_flag(mode)} cannot be combined with {other}")


def read_sampling(args: argparse.Namespace) -> SamplingParams:
    """The SamplingParams of the flags; ValueError names the flag."""
    bias = []
    for entry in filter(None, args.logit_bias.split(",")):
        try:
            token, value = entry.split(":")
            bias.append((int(token), float(value)))
        except ValueError:
            raise ValueError(f"--logit-bias must be ID:BIAS,..., not {entry!r}") from None
    try:
        values = {f.name: getattr(args, f.name) for f in fields(SamplingParams)}
        return SamplingParams(**values | {"logit_bias": tuple(bias)})
    except ValueError as e:
        name, _, rest = str(e).partition(" ")
        raise ValueError(f"{_flag(name)} {rest}") from None


def pick_device(name: str | None) -> torch.device:
    """The device of that name, after a test allocation; by default CUDA if available. Each rank
    gets its own GPU."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if dist.is_initialized() and name.startswith("cuda:"):
        raise ValueError(f"--device {name}: each rank uses its own GPU; give cuda")
    if dist.is_initialized() and name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as e:
        raise ValueError(f"--device {name} is not available ({str(e).splitlines()[0]})") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)  # graphs are captured on the current device
    return device


def pick_attention(name: str) -> AttendFactory:
    """sdpa, or flash: attention.py's kernels over the same cache slots."""
    if name == "sdpa":
        return sdpa
    from attention import as_attend  # imported here: it imports Triton, 0.2 s

    return lambda cache, limit: as_attend(cache, limit=limit)


def shard_batch_attention(attention: AttendFactory, group: Any) -> AttendFactory:
    """--shard-batch: a rank computes attention with all heads for the rows that it caches. A prompt
    is one row: every rank prefills it for its own heads, and stores its keys in all its rows."""
    from parallelism.inference_parallel import batch_sharded_attend

    def make_attend(cache: KVCache, limit: int | None) -> Attend:
        plain = attention(cache, limit)
        sharded = batch_sharded_attend(plain, group)
        return lambda spec, q, *rest: (sharded if len(q) > 1 else plain)(spec, q, *rest)

    return make_attend


# --------------------------------------------------------------------------------------------------
# Distributed
# --------------------------------------------------------------------------------------------------


@contextmanager
def process_group(args: argparse.Namespace) -> Iterator[None]:
    """With --ep, --tp or --pp under torchrun: initialize torch.distributed. Sets args.mesh."""
    if not (args.ep or args.tp or args.pp) or "WORLD_SIZE" not in os.environ:
        args.mesh = build_mesh(args)
        yield
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        args.mesh = build_mesh(args)
        yield
        dist.barrier()  # no rank exits while others still communicate
    finally:
        dist.destroy_process_group()


def build_mesh(args: argparse.Namespace) -> Any:
    """The ranks as parallel.Mesh, --tp innermost, then --ep or --pp; None without --tp and --pp.
    ValueError names the flag."""
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
            f"--tp {tp}: torchrun started {ranks} processes, and the others would be idle; give "
            f"--tp {ranks}, or add --ep to shard experts over them"
        )
    from parallel import make_mesh  # imported here: torch's meshes take a second to import

    return make_mesh(dp_shard=ranks // tp, ep=ranks // tp, tp=tp)


def pipeline_mesh(pp: int, tp: int, ranks: int) -> Any:
    """The mesh of --pp stages of --tp ranks each."""
    if pp * tp != ranks:
        flags = f"--pp {pp}" + (f" x --tp {tp}" if tp > 1 else "")
        raise ValueError(
            f"{flags} is {pp * tp} processes, not {ranks}: start it with torchrun --nproc-per-node "
            f"{pp * tp}"
        )
    from parallel import make_mesh

    return make_mesh(tp=tp, pp=pp)


def run_on_all_or_raise(fn: Callable[[], Any]) -> Any:
    """fn() on every rank. If it raises on one, all ranks raise, so that none waits for it."""
    if not dist.is_initialized():
        return fn()
    result, errors = None, [None] * dist.get_world_size()
    try:
        result, error = fn(), None
    except (ValueError, OSError, MemoryError, torch.OutOfMemoryError) as e:
        error = str(e) or "out of memory"
    dist.all_gather_object(errors, error)
    for rank, error in enumerate(errors):
        if error is not None:
            raise ValueError(error if rank == 0 else f"rank {rank}: {error}")
    return result


def rank0_then_broadcast(fn: Callable[[], Any]) -> Any:
    """The result of fn() on rank 0, on every rank: for example, stdin can be read only once."""
    if not dist.is_initialized():
        return fn()
    return broadcast_object(run_on_all_or_raise(lambda: fn() if dist.get_rank() == 0 else None))


def broadcast_object(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def all_reduce_min(n: int) -> int:
    """The minimum of n over ranks."""
    if not dist.is_initialized():
        return n
    values = [n] * dist.get_world_size()
    dist.all_gather_object(values, n)
    return min(values)


class Rank0Policy:
    """A speculation policy for several ranks: policies use measured times, so rank 0's choices are
    broadcast."""

    def __init__(self, policy: Any):
        self.policy = policy

    def choose(self, rows: Sequence[Any]) -> list[int]:
        return broadcast_object(self.policy.choose(rows))

    def choose_tree(self, rows: Sequence[Any]) -> Any:
        return broadcast_object(self.policy.choose_tree(rows))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)


class TPShards:
    """--tp: this rank's shard of every weight matrix. Call `shard_` before loading weights, and
    `gather_outputs_` after all module swaps."""

    def __init__(self, args: argparse.Namespace):
        self.mesh, self.ranks, self.shard_batch = args.mesh, args.mesh.size("tp"), args.shard_batch

    def shard_(self, model: Transformer) -> None:
        """Reduce the model to this rank's shard. ValueError names the flag."""
        from parallel import apply_tp

        c = model.config
        if self.shard_batch and not (c.kv_lora_rank or c.n_kv_heads == 1):
            raise ValueError(
                f"--shard-batch requires MLA or MQA (one KV head), not {c.n_kv_heads} KV heads"
            )
        try:
            apply_tp(model, self.mesh, gather_logits=False)
        except ValueError as e:
            raise ValueError(f"--{e}") from None  # tp N does not divide ...

    def gather_outputs_(self, model: Transformer) -> None:
        """All-gather the logits over ranks, and set model.config to this rank's heads, for its KV
        cache."""
        c, group = model.config, self.mesh.group("tp")
        kv_heads = max(1, c.n_kv_heads // self.ranks)
        model.config = replace(c, n_heads=c.n_heads // self.ranks, n_kv_heads=kv_heads)
        shard_size = -(-c.vocab_size // self.ranks)

        def gather(head: nn.Module, args: Any, logits: Tensor) -> Tensor:
            local = F.pad(logits, (0, shard_size - logits.shape[-1])).contiguous()
            shards = [torch.empty_like(local) for _ in range(self.ranks)]
            dist.all_gather(shards, local, group=group)
            return torch.cat(shards, -1)[..., : c.vocab_size]

        if self.ranks > 1 and model.head is not None:
            model.head.register_forward_hook(gather)


# --------------------------------------------------------------------------------------------------
# Mixture of experts
# --------------------------------------------------------------------------------------------------


def moe_layers(model: Transformer) -> list[MoE]:
    """The MoE layers in order, those of multi-token prediction last."""
    return [module for module in model.modules() if isinstance(module, MoE)]


class EPShards:
    """--ep: this rank's experts of every MoE layer; with --tp, experts are sharded over groups of
    --tp ranks. Call `shard_` before loading weights, and `gather_outputs_` after everything else
    that sets the experts hook."""

    def __init__(self, args: argparse.Namespace):
        self.args, single = args, not dist.is_initialized()
        self.group = g = None if args.mesh is None else args.mesh.group("ep")  # None: all ranks
        self.rank, self.ranks = (0, 1) if single else (dist.get_rank(g), dist.get_world_size(g))
        self.placements: list[Any] = []

    def shard_(self, model: Transformer) -> None:
        """Reduce the stacked expert weights to this rank's experts. ValueError names the flag."""
        if not moe_layers(model):
            raise ValueError("--ep requires an MoE model; this one has no MoE layers")
        self.placements = self._place(model.config, len(moe_layers(model)))
        for module, placement in zip(moe_layers(model), self.placements):
            module.local_expert_ids = placement.slots[self.rank] if self.ranks > 1 else None
            for name in ("w_gate_up", "w_down") if self.ranks > 1 else ():
                stack = getattr(module, name).data
                stack = stack[list(module.local_expert_ids)]
                setattr(module, name, nn.Parameter(stack, requires_grad=False))

    def gather_outputs_(self, model: Transformer) -> None:
        """All ranks' experts run the same tokens; an all-reduce adds their outputs."""
        from parallelism.expert_parallel import (
            all_reduce_combine,
            remap_expert_ids,
            select_local_slots,
        )

        placements = self.placements if self.ranks > 1 else ()
        for layer, (module, placement) in enumerate(zip(moe_layers(model), placements)):
            n = placement.slots_per_rank
            experts = select_local_slots(module.experts, self.rank * n, n)
            experts = all_reduce_combine(experts, self.group)
            module.experts = remap_expert_ids(experts, placement, offset=layer)

    def _place(self, config: ModelConfig, n: int) -> list[Any]:
        from parallelism.expert_parallel import Placement

        path, copies, E = self.args.expert_load, self.args.num_redundant_experts, config.n_experts
        try:
            if path is None and not copies:
                return [Placement.even(E, self.ranks)] * n
            loads = [[1.0] * E] * n if path is None else read_loads(path, config, n)
            return [Placement.by_load(load, self.ranks, copies) for load in loads]
        except ValueError as e:
            flag = "--num-redundant-experts" if copies else "--ep"
            error = str(e).replace("Placement.by_load", "give --expert-load")
            raise ValueError(error if error.startswith("--") else f"{flag}: {error}") from None


def read_loads(path: Path, config: ModelConfig, n: int) -> list[list[float]]:
    """Token counts per expert of the n MoE layers: the last "expert_load" in train.py's
    metrics.jsonl, or a JSON file with such a list. MTP layers may be missing."""

    def parse(text: str) -> Any:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):  # a line torn by a crash
            return None
        return value.get("expert_load") if isinstance(value, dict) else value

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(
            f"--expert-load {path}: cannot be read ({e}); give metrics.jsonl"
        ) from None
    loads, E = parse(text), config.n_experts
    if loads is None:
        loads = next(filter(None, map(parse, reversed(text.splitlines()))), None)
    ok = isinstance(loads, list) and len(loads) in (n, len(config.moe_layers))
    for load in loads if ok else ():
        ok = ok and isinstance(load, list) and len(load) == E
        ok = ok and all(type(x) in (int, float) and 0 <= x < math.inf for x in load)
    if not ok:
        raise ValueError(
            f"--expert-load {path}: has no list of {E} counts for each of {n} MoE layers "
            "(expert_load in metrics.jsonl); give a file of this model"
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
    """A model of a named config or a config.json with random weights. If prepare(model) shards it
    on the meta device, this rank's shards of them."""
    if name not in CONFIGS and not Path(name).exists():
        raise ValueError(f"--dummy {name}: neither a config.json nor one of {', '.join(CONFIGS)}")
    config = CONFIGS[name] if name in CONFIGS else read_config(name)
    with torch.device("meta"):
        model = Transformer(config).eval()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    if prepare is not None:
        prepare(model)
    allocate(model, device, dtype)
    rng, local_params = torch.Generator(device).manual_seed(0), dict(model.named_parameters())
    for name, shape in shapes.items():
        p, module = local_params.get(name), name.rpartition(".")[0]
        is_stack = p is not None and p.dim() == 3
        expert_ids = model.get_submodule(module).local_expert_ids if is_stack else None
        shard = model.tp_shards.get(name)
        unsharded = p is not None and expert_ids is None and shard is None
        full = p if unsharded else torch.empty(shape, dtype=dtype, device=device)
        model.init_weight(name, full, rng)
        local = full if expert_ids is None else full[list(expert_ids)]
        if p is not None and not unsharded:
            p.data.copy_(local if shard is None else shard.slice(local))
        if name == "embed.weight" and config.tie_embeddings and "head.weight" in local_params:
            shard = model.tp_shards.get("head.weight")  # the last pipeline stage's own copy
            local_params["head.weight"].data.copy_(full if shard is None else shard.slice(full))
    for buffer in model.buffers():
        buffer.zero_()
    return model


def load(args: argparse.Namespace, device: torch.device) -> tuple[Transformer, Tokenizer]:
    """Model and tokenizer of --checkpoint or --dummy. ValueError if they do not match."""
    if device.type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        if args.compile and not shutil.which(compiler):
            raise ValueError(f"--compile on a CPU requires a C++ compiler; {compiler} not found")
    dtype = DTYPES[args.dtype] if args.dtype else None
    shards = [EPShards(args)] if args.ep else []
    if (args.pp or 1) > 1:
        from parallelism.pipeline_inference import PPStage

        shards.append(PPStage(args))
    shards += [] if args.mesh is None else [TPShards(args)]
    prepare = partial(shard_model_, shards) if shards else None
    if args.dummy is not None:
        model = dummy_model(args.dummy, device, dtype or torch.bfloat16, prepare)
        if args.quantize is not None:
            from quantization import quantize_model  # imported here: it imports Triton, 0.2 s

            quantize_model.quantize_dummy_(args, model)
        return optimize_for_inference_(args, model, shards), DummyTokenizer(model.config.vocab_size)
    if args.mesh is not None and is_quantized(args.checkpoint):
        raise ValueError(
            f"--{'pp' if args.mesh.size('pp') > 1 else 'tp'}: {args.checkpoint} is quantized, and "
            "quantized weights cannot be sharded; give --quantize and the original checkpoint"
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
            f"in config.json is {size}; they belong to different models"
        )
    return optimize_for_inference_(args, model, shards), tokenizer


def shard_model_(shards: Sequence[EPShards | TPShards], model: Transformer) -> None:
    """Reduce a model to this rank's shards of --ep, --pp and --tp."""
    for shard in shards:
        shard.shard_(model)


def optimize_for_inference_(
    args: argparse.Namespace, model: Transformer, shards: Sequence[EPShards | TPShards] = ()
) -> Transformer:
    """Install faster kernels than model.py's: on a CPU generation/cpu.py's linear layers, in MoE
    layers the experts of --experts; then the collectives of --ep and --tp. Returns the model."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu:
        use_cpu_kernels_(model)
    if args.experts == "grouped" and moe_layers(model):
        from moe import use_grouped_experts  # imported here: it imports Triton, 0.2 s

        use_grouped_experts(model, **({"linear": cpu.expert_linear} if on_cpu else {}))
    for shard in shards:
        shard.gather_outputs_(model)
    return model


def use_cpu_kernels_(model: Transformer) -> None:
    """Replace linear layers by generation/cpu.py's, and let malloc keep freed memory."""
    cpu.keep_freed_memory()
    cpu.swap_linear_(model)


def is_quantized(folder: Path) -> bool:
    """Whether --save wrote the folder. load_checkpoint reports an invalid config.json."""
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
        # an empty pipe counts as no prompt: schedulers and test runners start programs with one
        text = (sys.stdin.read() if stdin_is(stat.S_ISFIFO) else "") or DEFAULT_PROMPT
    if not text:
        raise ValueError("the prompt is empty; give some text, as an argument or on stdin")
    return text


def stdin_is(kind: Callable[[int], bool]) -> bool:
    """Whether stdin's mode satisfies `kind`, such as stat.S_ISFIFO."""
    try:
        return kind(os.fstat(sys.stdin.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):  # there is no stdin
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
            raise ValueError(f"--chat: {args.checkpoint} has no chat template; remove --chat")
        system = args.system_prompt
        messages = [] if system is None else [{"role": "system", "content": system}]
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
            f"the prompt has {n} tokens, but the model's context (max_position_embeddings in "
            f"config.json) is {config.context}; shorten it"
        )
    if args.prompt_tokens is not None:
        rng = torch.Generator().manual_seed(0)
        ids = torch.randint(config.vocab_size, (n,), generator=rng).tolist()
    return ids


# --------------------------------------------------------------------------------------------------
# Speed
# --------------------------------------------------------------------------------------------------


def measured_bandwidth(device: torch.device) -> float:
    """Memory bandwidth of the device, bytes per second: the best of 5 measurements of reading 512
    MB (on CUDA 1 GB, ten times per measurement, and also of copying it)."""
    on_cuda = device.type == "cuda"
    x = torch.ones(2**28 if on_cuda else 2**27, device=device)
    y = torch.empty_like(x) if on_cuda else None
    size, repeats, best = x.numel() * x.element_size(), 10 if on_cuda else 1, 0.0
    for _ in range(5):
        for moved, fn in ((size, x.sum), (2 * size, lambda: y.copy_(x)))[: 1 + on_cuda]:
            synchronize(device)
            start = time.perf_counter()
            for _ in range(repeats):
                fn()
            synchronize(device)
            best = max(best, moved * repeats / (time.perf_counter() - start))
    return best


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class RunTimings:
    """Timings of one run, in seconds."""

    tokens: int  # of the longest row
    prefill_seconds: float  # until the first token
    decode_seconds: float  # all steps after the first
    decode_tokens: int  # of all rows, after the first step
    decode_bytes: int  # read by those steps, without the drafter's


def time_steps(
    steps: Iterable[list[int]], decoder: Decoder, rows: list[Continuation]
) -> RunTimings:
    """Run all steps and time them."""
    start = time.perf_counter()
    n, prefill_seconds, decode_bytes = 0, 0.0, 0
    for _ in steps:
        if n == 0:
            prefill_seconds = time.perf_counter() - start
        else:
            decode_bytes += decoder.bytes_per_step()
        n += 1
    decode_seconds = time.perf_counter() - start - prefill_seconds
    tokens = [len(row.tokens) for row in rows]
    decode_tokens = sum(tokens) - len(tokens)
    return RunTimings(max(tokens), prefill_seconds, decode_seconds, decode_tokens, decode_bytes)


def summarize(
    runs: list[RunTimings], prompt_tokens: int, load_seconds: float, bandwidth: float
) -> dict[str, Any]:
    """Medians over the runs, under the keys that --json prints."""
    med = lambda f: statistics.median(f(r) for r in runs)
    summary = {
        "prompt_tokens": prompt_tokens,
        "new_tokens": runs[-1].tokens,
        "load_seconds": load_seconds,
        "first_token_seconds": med(lambda r: r.prefill_seconds),
        "prefill_tokens_per_second": prompt_tokens / med(lambda r: r.prefill_seconds),
    }
    if runs[-1].tokens > 1:
        speed = med(lambda r: r.decode_bytes / r.decode_seconds / 1e9)
        summary |= {
            "tokens_per_second": med(lambda r: r.decode_tokens / r.decode_seconds),
            "gigabytes_per_second": speed,
            "measured_gigabytes_per_second": bandwidth / 1e9,
            "bandwidth_share": speed * 1e9 / bandwidth,
        }
    return {k: round(v, 4) for k, v in summary.items()}


def speedup(runs: list[RunTimings], baseline: list[RunTimings]) -> dict[str, Any]:
    """Speedup over the same runs without drafts; empty without a baseline."""
    if not baseline or runs[-1].tokens < 2:
        return {}
    med = lambda runs: statistics.median(r.decode_tokens / r.decode_seconds for r in runs)
    return {
        "plain_tokens_per_second": round(med(baseline), 4),
        "speed_up": round(med(runs) / med(baseline), 4),
    }


def summary_line(s: dict[str, Any], device: str) -> str:
    """The summary as one line."""
    line = (
        f"[{device}] loaded in {s['load_seconds']:.2f} s, first token after "
        f"{s['first_token_seconds']:.3f} s ({s['prompt_tokens']} in, "
        f"{s['prefill_tokens_per_second']:.0f} tok/s)"
    )
    if "tokens_per_second" in s:
        line += (
            f", then {s['tokens_per_second']:.1f} tok/s reading {s['gigabytes_per_second']:.2f} "
            f"GB/s, {s['bandwidth_share']:.0%} of the "
            f"{s['measured_gigabytes_per_second']:.1f} GB/s measured here"
        )
    if s.get("verifications"):
        rates = s["acceptance"]
        while len(rates) > 1 and rates[-1] == 0 == rates[-2]:
            rates = rates[:-1]
        accepted = " ".join(f"{rate:.0%}" for rate in rates)
        line += f"; {s['tokens_per_verification']:.2f} tokens per verification, "
        line += f"drafts accepted {accepted}"
    elif "verifications" in s:
        line += "; no drafts"
    if "speed_up" in s:
        line += f"; {s['speed_up']:.2f}x of {s['plain_tokens_per_second']:.1f} tok/s without drafts"
    return line


def device_name(device: torch.device, mesh: Any = None) -> str:
    """The device of one rank, and the sizes of --pp and --tp."""
    name = f"{device.type}, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    dims = [] if mesh is None else [d for d in ("pp", "tp") if mesh.size(d) > 1] or ["tp"]
    return ", ".join([name, *(f"{d} {mesh.size(d)}" for d in dims)])


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
    """A decoder with max_len cache slots per row. ValueError names the flag."""
    top, V = args.logprobs, model.config.vocab_size
    if top is not None and top > V:
        raise ValueError(f"--logprobs must be at most the vocabulary size {V}, not {top}")
    attention, rows = pick_attention(args.attention), args.n
    if args.shard_batch and args.mesh is not None:
        attention = shard_batch_attention(attention, args.mesh.group("tp"))
        ranks = args.mesh.size("tp")
        if rows % ranks:
            raise ValueError(f"--shard-batch: --n {rows} must be a multiple of --tp {ranks}")
        rows //= ranks
    if args.speculate:
        from generation import drafting

        max_len += drafting.lookahead_slots(args)
        drafting.raise_mla_absorb_limit_(args, model)
    try:
        decoder = Decoder(
            model,
            max_len,
            args.sampling_params,
            args.n,
            eos,
            args.compile,
            keep_logits=top is not None,
            attention=attention,
            cached_rows=rows,
        )
    except ValueError as e:
        if not str(e).startswith("logit_bias"):
            raise
        raise ValueError(f"--logit-bias {str(e).partition(' ')[2]}") from None
    if (args.pp or 1) > 1:
        from parallelism.pipeline_inference import PipelineDecoder

        return PipelineDecoder(decoder, args.mesh, hidden_chunks)
    if args.speculate:
        load_fn = partial(load_draft, args, model.embed.weight.device)
        speculator = drafting.build_speculator(args, decoder, tokenizer, load_fn)
        if dist.is_initialized() and args.speculate_k == "auto":
            speculator.new_policy = lambda new=speculator.new_policy: Rank0Policy(new())
            speculator.reset()
        decoder.speculator = speculator
    return decoder


def load_draft(
    args: argparse.Namespace, device: torch.device, name: str
) -> tuple[Transformer, Tokenizer]:
    """Model and tokenizer of --draft-model, loaded like --checkpoint or --dummy."""
    draft_args = copy.copy(args)
    draft_args.quantize, draft_args.checkpoint = None, Path(name)
    draft_args.dummy = name if args.dummy is not None else None
    try:
        return run_on_all_or_raise(partial(load, draft_args, device))
    except ValueError as e:
        raise ValueError(f"--draft-model {name}: {str(e).removeprefix('--dummy ')}") from None


def generate(args: argparse.Namespace) -> None:
    """Continue a prompt, and print a summary."""
    read_prompt = partial(prompt_text, args)
    text = "" if args.prompt_tokens is not None else rank0_then_broadcast(read_prompt)
    begin = time.perf_counter()
    device = run_on_all_or_raise(partial(pick_device, args.device))
    model, tokenizer = run_on_all_or_raise(partial(load, args, device))
    ids = prompt_ids(args, text, tokenizer, model.config)
    room = model.config.context - len(ids)
    max_new = min(args.max_new_tokens, room)
    if max_new < args.max_new_tokens:
        print(
            f"generate.py: --max-new-tokens {args.max_new_tokens} lowered to {max_new} to fit the "
            f"model's context of {model.config.context}",
            file=sys.stderr,
        )
    no_eos = args.ignore_eos or args.bench or args.dummy
    eos = () if no_eos else eos_ids(args.checkpoint, model.config.eos_ids)
    decoder = build_decoder(args, model, tokenizer, len(ids) + max_new, eos)
    load_seconds = IMPORT_SECONDS + time.perf_counter() - begin

    quiet = args.json or args.bench
    # with --n, texts cannot be streamed
    show = partial(print, end="", flush=True) if not quiet and args.n == 1 else lambda text: None
    continues = args.prompt_tokens is None and not args.chat  # a chat reply does not

    def new_rows() -> list[Continuation]:
        stream = lambda: TextStream(tokenizer, ids if continues else ())
        return [
            Continuation(tokenizer, stream(), StopStrings(args.stop), eos, show)
            for _ in range(args.n)
        ]

    if continues and not quiet and args.n == 1:
        print(text, end="", flush=True)

    def run() -> RunTimings:
        nonlocal rows
        rows = new_rows()
        return time_steps(run_rows(decoder, ids, rows, max_new, args.logprobs), decoder, rows)

    rows, runs, baseline, speculator = [], [], [], decoder.speculator
    for _ in range(args.bench + 1 if args.bench else 1):
        if speculator is not None and args.bench:  # alternating: other load affects both alike
            decoder.speculator = None
            baseline.append(run())
            decoder.speculator = speculator
            speculator.reset()
        runs.append(run())
    if args.bench:
        runs, baseline = runs[1:], baseline[1:]  # the first is a warm-up
    summary = summarize(runs, len(ids), load_seconds, measured_bandwidth(device))
    if speculator is not None:
        summary |= speculator.stats.summary() | speedup(runs, baseline)
    report(args, text if continues else "", rows, summary)
    print(summary_line(summary, device_name(device, args.mesh)), file=sys.stderr)


def report(
    args: argparse.Namespace, text: str, rows: list[Continuation], summary: dict[str, Any]
) -> None:
    """Print the results that were not streamed."""
    samples = []
    for row in rows:
        samples.append({"text": row.text, "tokens": row.tokens, "finish_reason": row.finish_reason})
        if args.logprobs is not None:
            samples[-1]["logprobs"] = row.logprobs
    if args.json:
        more = {"samples": samples} if args.n > 1 else {}
        print(json.dumps(samples[0] | more | summary))
    elif args.n > 1 and not args.bench:
        for b, row in enumerate(rows):
            print(f"{'=' * 20} {b + 1} of {args.n} {'=' * 20}\n{text}{row.text}")
    elif not args.bench:
        print()


def score_file(args: argparse.Namespace) -> None:
    """--perplexity: perplexity, nats per token and bits per byte of a text."""
    try:
        text = args.perplexity.read_bytes().decode("utf-8")  # without newline translation
    except UnicodeDecodeError as e:
        raise ValueError(f"--perplexity {args.perplexity}: not UTF-8 text ({e.reason})") from None
    except OSError as e:
        raise ValueError(
            f"--perplexity {args.perplexity}: {e.strerror}; give a text file"
        ) from None
    device = run_on_all_or_raise(partial(pick_device, args.device))
    model, tokenizer = run_on_all_or_raise(partial(load, args, device))
    ids = tokenizer.encode(text)
    if not text or len(ids) < 2:
        raise ValueError(
            f"--perplexity {args.perplexity}: too short ({len(ids)} tokens); give two or more"
        )
    total, entries, top = 0.0, [], args.logprobs
    attention = pick_attention(args.attention)
    for chosen, best, best_ids in score(model, ids, model.config.context, top or 0, attention):
        total += chosen.double().sum().item()
        for row in zip(chosen, best, best_ids) if top is not None else ():
            token = ids[1 + len(entries)]
            entries.append(logprob_entry(tokenizer, token, *(x.tolist() for x in row)))
    if not math.isfinite(total):
        raise ValueError(NOT_FINITE.format(len(ids)))
    metrics = {
        "tokens": len(ids) - 1,
        "nats_per_token": -total / (len(ids) - 1),
        "perplexity": math.exp(-total / (len(ids) - 1)),
        "bits_per_byte": -total / math.log(2) / len(text.encode()),
    }
    if args.json:
        print(json.dumps(metrics | ({"logprobs": entries} if top is not None else {})))
    else:
        lines = (f"{name.replace('_', ' ')}: {value:.6g}" for name, value in metrics.items())
        print("\n".join(lines))


def interactive_chat(args: argparse.Namespace) -> None:
    """--interactive: one reply per input line. Ctrl-C stops the reply, not the program."""
    device = pick_device(args.device)
    model, tokenizer = load(args, device)
    template = load_chat_template(args.checkpoint)
    if template is None and args.system_prompt is not None:
        raise ValueError(f"--system-prompt: {args.checkpoint} has no chat template")
    limit = min(args.ctx_size or CHAT_CONTEXT, model.config.context)
    eos = () if args.ignore_eos else eos_ids(args.checkpoint, model.config.eos_ids)
    decoder = build_decoder(args, model, tokenizer, limit, eos)
    chat = Chat(decoder, tokenizer, template, args.system_prompt)
    if template is None:
        print("This checkpoint has no chat template: it continues your text.", file=sys.stderr)
    print(f"{limit} tokens of context. /reset: new conversation; /quit: exit.", file=sys.stderr)
    while (line := read_line()) is not None and line.strip() != "/quit":
        if line.strip() == "/reset":
            chat.reset()
            print("new conversation", file=sys.stderr)
        elif line:
            try:
                run_turn(args, chat, line, eos, limit)
            except ValueError as e:
                print(f"generate.py: {e}", file=sys.stderr)


def read_line() -> str | None:
    """A line of user input; None at the end of input."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            print("\n/quit: exit", file=sys.stderr)


def run_turn(
    args: argparse.Namespace, chat: Chat, line: str, eos: Sequence[int], limit: int
) -> None:
    """Stream one reply, then print how many prompt tokens were cached."""
    show = partial(print, end="", flush=True)
    start, cached = time.perf_counter(), 0
    row = Continuation(
        chat.tokenizer, TextStream(chat.tokenizer), StopStrings(args.stop), eos, show
    )
    steps = chat.ask(line, args.sampling_params, args.max_new_tokens, row, limit)
    try:
        cached = next(steps)
        for _ in steps:
            pass
    except KeyboardInterrupt:
        steps.close()
    print()
    interrupted = row.finish_reason == "interrupted"
    print(
        f"[{len(chat.ids)} tokens, {cached} of them from the cache, {len(row.tokens)} new in "
        f"{time.perf_counter() - start:.2f} s{', interrupted' * interrupted}]",
        file=sys.stderr,
    )


def engine_options(args: argparse.Namespace, model: Transformer) -> dict[str, Any]:
    """The Engine's arguments from the flags."""
    from serving.batch import num_available_blocks

    names = "block_size max_num_batched_tokens max_num_seqs compile"
    options = {name: getattr(args, name) for name in names.split()}
    options |= dict(kv_dtype=args.kv_cache_dtype, kv_swap=args.kv_swap)
    options["prefix_cache"] = not args.no_prefix_cache
    if moe_layers(model):  # a step without static shapes cannot be captured
        from moe import has_static_shapes

        options["static"] = all(map(has_static_shapes, moe_layers(model)))
        if args.compile and not options["static"]:
            raise ValueError("--compile: these experts have no static shapes; remove --compile")
    num_blocks = num_available_blocks(
        model,
        args.block_size,
        args.max_num_seqs,
        args.kv_cache_dtype,
        draft_layers(args, model.config),
    )
    num_blocks = all_reduce_min(num_blocks)
    if args.mesh is not None:
        options["static"] = False  # steps with collectives are not captured in CUDA graphs
    return options | {"num_blocks": args.kv_blocks or num_blocks}


def draft_layers(args: argparse.Namespace, config: ModelConfig) -> float:
    """Size of the drafter's own KV cache per token, in layers of the model's cache."""
    if args.speculate == "mtp":
        return 1.0
    if args.speculate != "draft" or args.draft_model is None:
        return 0.0
    path = Path(args.draft_model)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists() and args.draft_model not in CONFIGS:
        raise ValueError(f"--draft-model {args.draft_model}: no such folder")
    c = CONFIGS[args.draft_model] if args.draft_model in CONFIGS else read_config(path)
    heads = max(1, c.n_kv_heads // (args.tp or 1))  # `config` has this rank's heads already
    width = lambda c, heads: (
        c.kv_lora_rank + c.qk_rope_head_dim if c.kv_lora_rank else 2 * heads * c.head_dim
    )
    return c.n_layers * width(c, heads) / width(config, config.n_kv_heads)


def enable_speculative_decoding(
    args: argparse.Namespace, engine: Any, tokenizer: Tokenizer
) -> None:
    """--speculate, if given, for an Engine."""
    from serving import batch as serving_batch

    if args.speculate:
        load_fn = partial(load_draft, args, engine.model.embed.weight.device)
        serving_batch.enable_speculative_decoding(args, engine, tokenizer, load_fn)
        if dist.is_initialized() and args.speculate_k == "auto":
            engine.speculate_k = Rank0Policy(engine.speculate_k)


def batch_files(args: argparse.Namespace) -> tuple[Path, dict]:
    """Of --batch: the results file, and the requests it has results for. ValueError names the
    flag."""
    from serving import batch as serving_batch

    if not os.access(args.batch, os.R_OK) or args.batch.is_dir():
        raise ValueError(f"--batch {args.batch}: cannot be read; give a JSONL file")
    out = args.out or args.batch.with_suffix(".results.jsonl")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    if out.exists() and out.samefile(args.batch):
        raise ValueError(f"--out {out} is the requests file; give another")
    return out, serving_batch.read_results(out)


def batch(args: argparse.Namespace) -> None:
    """--batch: run a file of requests into a file of results."""
    from serving import batch as serving_batch  # imported here: it imports Triton, 0.2 s

    out, answered = rank0_then_broadcast(partial(batch_files, args))
    device = run_on_all_or_raise(partial(pick_device, args.device))
    model, tokenizer = run_on_all_or_raise(partial(load, args, device))
    template = None if args.dummy else load_chat_template(args.checkpoint)
    eos = () if args.dummy else eos_ids(args.checkpoint, model.config.eos_ids)
    service = serving_batch.Service(model, tokenizer, eos, **engine_options(args, model))
    enable_speculative_decoding(args, service.engine, tokenizer)
    limit = service.engine.capacity
    requests = serving_batch.RequestFile(
        args.batch,
        answered,
        tokenizer,
        template,
        args.system_prompt,
        args.sampling_params,
        limit,
        rank0_then_broadcast,
    )
    is_rank0 = not dist.is_initialized() or dist.get_rank() == 0
    try:
        line = serving_batch.run_batch(service, requests, out if is_rank0 else Path(os.devnull))
    except KeyboardInterrupt:
        print(
            f"interrupted; finished results are in {out}, the same command resumes", file=sys.stderr
        )
        raise
    print(f"[{device_name(device, args.mesh)}] {line}", file=sys.stderr)


def bench_serving(args: argparse.Namespace) -> None:
    """--bench-serving: random requests in real time, after a warm-up with others as long."""
    from serving import batch as serving_batch

    flags = {name: getattr(args, name) for name in WORKLOAD_FLAGS.split()}
    workload = serving_batch.Workload(args.bench_serving, seed=args.sampling_params.seed, **flags)
    device = run_on_all_or_raise(partial(pick_device, args.device))
    model, tokenizer = run_on_all_or_raise(partial(load, args, device))
    engine = serving_batch.build_engine(model, **engine_options(args, model))
    enable_speculative_decoding(args, engine, tokenizer)
    longest = args.shared_prefix + args.input_tokens[1] + args.output_tokens[1]
    if longest > engine.capacity:
        raise ValueError(
            f"--shared-prefix, --input-tokens and --output-tokens give up to {longest} tokens, but "
            f"the context or the KV cache (--kv-blocks) holds {engine.capacity}"
        )
    params = replace(args.sampling_params, ignore_eos=True)
    trace = workload.trace(model.config.vocab_size)
    shifted = lambda ids: [(i + 1) % model.config.vocab_size for i in ids]
    warm_up = [replace(a, due=0.0, ids=shifted(a.ids)) for a in trace[: 2 * args.max_num_seqs]]
    serving_batch.replay(engine, warm_up, params, broadcast_object)  # compiles and captures steps
    metrics = serving_batch.replay(engine, trace, params, broadcast_object)
    print(json.dumps(metrics) if args.json else serving_batch.summary_table(metrics))


def save_quantized(args: argparse.Namespace) -> None:
    """--save: the quantized checkpoint."""
    from quantization import quantize_model

    model, _ = load(args, pick_device(args.device))
    print(quantize_model.save(args, model))


def quantize_report(args: argparse.Namespace) -> None:
    """--quantize-report: bytes, loss and speed of every scheme on this checkpoint."""
    from quantization import quantize_model

    if is_quantized(args.checkpoint):
        raise ValueError(
            f"--quantize-report: {args.checkpoint} is already quantized; give the original"
        )
    quantize_model.check_report(args)
    device = pick_device(args.device)
    dtype = DTYPES[args.dtype] if args.dtype else None
    tokenizer = load_tokenizer(args.checkpoint)

    @torch.inference_mode()
    def speed(model: Transformer, batch: int) -> float:
        optimize_for_inference_(args, model)
        decoder = Decoder(model, 128, SamplingParams(temperature=0.0), batch, (), args.compile)
        decoder.start(list(range(1, 65)))
        runs = []
        for _ in range(32):
            start = time.perf_counter()
            decoder.next()
            runs.append(time.perf_counter() - start)
        return batch / statistics.median(runs)

    rows = []
    say = (lambda line: None) if args.json else partial(print, flush=True)
    say(quantize_model.REPORT_HEADER)
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
    """Run the mode that the flags select."""
    modes = (
        (args.interactive, interactive_chat),
        (args.perplexity, score_file),
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
    distributed = any(a.partition("=")[0] in ("--ep", "--tp", "--pp") for a in argv)
    if not distributed or "WORLD_SIZE" not in os.environ or os.environ.get("RANK") == "0":
        return run_cli(argv)
    with open(os.devnull, "w") as devnull, redirect_stdout(devnull), redirect_stderr(devnull):
        try:
            code = run_cli(argv)  # rank 0 prints the same
        except RuntimeError:  # rank 0 exited early, for example because its stdout was closed
            code = 1
        if code:
            time.sleep(1)  # torchrun stops all ranks when one fails; let rank 0 print first
        return code


def run_cli(argv: list[str]) -> int:
    """Run; print errors as one line on stderr. Returns the exit code."""
    try:
        run(parse_args(argv))
    except BrokenPipeError:  # stdout was closed, for example by `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as e:
        print(f"generate.py: error: {e}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as e:
        if isinstance(e, RuntimeError) and "memory" not in str(e):
            raise
        detail = (str(e) or "allocation failed").splitlines()[0]
        print(f"generate.py: error: out of memory ({detail})", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
