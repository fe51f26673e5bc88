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

generation/config.py has every flag; the sampling flags are the fields of paged_kv.py's
SamplingParams, in every mode. --n generates several continuations of one prompt in lockstep,
reading the weights once for all; sample b equals a run with seed + b. --interactive keeps the KV
cache across turns and prefills only new tokens. --speculate drafts tokens cheaply and verifies
them in one step: the same distribution, and the same text when greedy (speculative.py).

--tp, --pp and --ep shard the weights and the KV cache over ranks (generation/load.py,
parallelism/pipeline_inference.py). The text is that of one process up to summation order; with
--quantize also up to quantization, since each rank chooses scales for its own shard. Each rank
samples for itself: ranks must be machines of the same kind with the same number of threads.

--compile turns a decode step into one compiled graph of static shapes, on CUDA replayed as a CUDA
graph (the static cache and compiled step of gpt-fast). On a CPU the graph calls
generation/cpu.py's matmuls, which read memory faster than compiled ones, and it is worth it with
quantized weights.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import stat
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

START = time.perf_counter()  # the imports below count as load time

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parent
for drawer in "huggingface generation serving quantization training parallelism".split():
    spec = importlib.util.find_spec(drawer)  # an installed package wins over a folder
    if spec.submodule_search_locations[0] != str(ROOT / drawer):
        sys.exit(f"generate.py: error: {spec.origin} shadows {drawer}/; uninstall that package")

from generation.bench import RunTimings, device_name, measured_bandwidth, speedup, summarize
from generation.bench import summary_line, time_steps
from generation.config import CHAT_CONTEXT, DTYPES, GenerateConfig, parse_args
from generation.cuda_graph import CUDAGraphRunner, compile_step, gather_experts_if_compiled
from generation.load import is_quantized, load, load_draft, moe_layers
from generation.load import optimize_for_inference_, pick_device
from generation.ranks import Rank0Policy, process_group, rank0_then_broadcast, run_on_all_or_raise
from generation.sampling import Sampler, logprobs_of
from huggingface.tokenizer import (
    ChatTemplate, Continuation, StopStrings, TextStream, Tokenizer, eos_ids, load_chat_template,
    load_tokenizer, logprob_entry,
)  # fmt: skip
from model import Attend, KVCache, ModelConfig, Transformer
from paged_kv import SamplingParams

IMPORT_SECONDS = time.perf_counter() - START

DEFAULT_PROMPT = "class Stack:\n    def __init__(self):\n"
PREFILL_CHUNK = 512  # tokens; bounds the memory of a long prompt's mask and activations
NOT_FINITE = (
    "the logits after {} tokens are not finite: the weights are damaged, or --dtype has too small "
    "a range"
)


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


# --------------------------------------------------------------------------------------------------
# A prompt
# --------------------------------------------------------------------------------------------------


def generate(args: GenerateConfig) -> None:
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


def prompt_text(args: GenerateConfig) -> str:
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
    args: GenerateConfig, text: str, tokenizer: Tokenizer, config: ModelConfig
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


def build_decoder(
    args: GenerateConfig,
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
            raise ValueError(f"--set shard_batch: --n {rows} must be a multiple of --tp {ranks}")
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
        raise ValueError(f"--set logit_bias {str(e).partition(' ')[2]}") from None
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


def pick_attention(name: str) -> AttendFactory:
    """sdpa, or flash: attention.py's kernels over the same cache slots."""
    if name == "sdpa":
        return sdpa
    from attention import as_attend  # imported here: it imports Triton, 0.2 s

    return lambda cache, limit: as_attend(cache, limit=limit)


def shard_batch_attention(attention: AttendFactory, group: Any) -> AttendFactory:
    """shard_batch: a rank computes attention with all heads for the rows that it caches. A prompt
    is one row: every rank prefills it for its own heads, and stores its keys in all its rows."""
    from parallelism.inference_parallel import batch_sharded_attend

    def make_attend(cache: KVCache, limit: int | None) -> Attend:
        plain = attention(cache, limit)
        sharded = batch_sharded_attend(plain, group)
        return lambda spec, q, *rest: (sharded if len(q) > 1 else plain)(spec, q, *rest)

    return make_attend


def report(
    args: GenerateConfig, text: str, rows: list[Continuation], summary: dict[str, Any]
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


# --------------------------------------------------------------------------------------------------
# A conversation
# --------------------------------------------------------------------------------------------------


def interactive_chat(args: GenerateConfig) -> None:
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


def run_turn(args: GenerateConfig, chat: Chat, line: str, eos: Sequence[int], limit: int) -> None:
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
                "increase --set ctx_size"
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
# Perplexity and quantization
# --------------------------------------------------------------------------------------------------


def score_file(args: GenerateConfig) -> None:
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


def save_quantized(args: GenerateConfig) -> None:
    """--save: the quantized checkpoint."""
    from quantization import quantize_model

    model, _ = load(args, pick_device(args.device))
    print(quantize_model.save(args, model))


def quantize_report(args: GenerateConfig) -> None:
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


# --------------------------------------------------------------------------------------------------
# main
# --------------------------------------------------------------------------------------------------


@torch.inference_mode()
def run(args: GenerateConfig) -> None:
    """Run the mode that the flags select."""
    from serving.run import batch, bench_serving  # here: tqdm and the Engine take 0.1 s

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
