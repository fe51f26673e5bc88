"""Text generation from a checkpoint: prompts, chat, perplexity, batches, benchmarks.

    python generate.py                                       the shipped model writes Python
    python generate.py "def quicksort(" --temperature 0      greedy
    git log -1 | python generate.py --checkpoint DIR --json  a Hugging Face folder
    python generate.py --checkpoint DIR --interactive        chat
    python generate.py --perplexity FILE                     perplexity of a text
    python generate.py --choices FILE.jsonl --num-fewshot 5  accuracy on multiple-choice questions
    python generate.py --dummy llama3.1-8b --prompt-tokens 128 --compile --bench
    python generate.py --quantize int4                       weights quantized while loading
    python generate.py --speculate ngram                     speculative decoding
    python generate.py --early-exit 0.99                     tokens that need fewer layers
    python generate.py --kv-budget 0.2                       a fifth of the KV cache
    python generate.py --cascade FILE.json                   a small model answers first
    python generate.py --json-schema FILE                    JSON that is valid under the schema
    python generate.py --batch requests.jsonl                many requests, continuous batching
    python generate.py --bench-serving 200 --request-rate 10  throughput and latency under load
    python generate.py --program FILE.py                     calls whose outputs fill other prompts
    python generate.py --offload cpu ...                     layers in host memory, or in files
    python generate.py --kv-store FOLDER --interactive       KV of earlier runs; the chat goes on
    torchrun --nproc-per-node 4 -- generate.py --tp 4 ...    tensor parallelism over 4 ranks; also
                                                             --pp 4, --ep, --cp 4 (KV cache)

Generation has two phases, one function each. `prefill` runs the prompt through the model in chunks:
large matmuls, compute bound. `Decoder.next` runs one token: every weight is read and used once, so
the step is memory bound and takes at least (weights + KV cache) / bandwidth. After each run one
line on stderr reports the achieved bandwidth beside the one measured on the device, with --bench
also the speed beside that bound.

generation/config.py has every flag; the sampling flags are the fields of paged_kv.py's
SamplingParams, in every mode. --n generates several continuations of one prompt in lockstep,
reading the weights once for all; continuation i equals a run with seed + i. --interactive keeps the
KV cache across turns and prefills only new tokens. --speculate drafts tokens cheaply and verifies
them in one step: the same distribution, and the same text when greedy (speculative.py).
--early-exit runs fewer layers for some tokens, and may change the text (generation/early_exit.py).

--tp, --pp and --ep shard the weights and the KV cache over ranks (generation/load.py,
generation/pipeline_inference.py), --cp shards the KV cache by tokens, for long contexts
(parallelism/context_parallel_decode.py). The text is that of one process up to summation order; if
weights are sharded and quantized also up to quantization, since each rank chooses scales for its
own shard. Each rank samples on its own and must get the same tokens: all ranks need the same kind
of device and the same number of threads. (Without the -- before generate.py, torchrun would take
--n for its own flag.)

--compile turns a decode step into one compiled graph of static shapes, on CUDA replayed as a CUDA
graph (the static cache and compiled step of gpt-fast). On a CPU the graph calls
generation/cpu.py's matmuls, which read memory faster than compiled ones; there --compile pays off
only with quantized weights.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

START = time.perf_counter()  # the imports below count as load time
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports: no traceback

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parent
for folder in "huggingface generation serving quantization training parallelism".split():
    spec = importlib.util.find_spec(folder)  # an installed package wins over a folder
    if spec.submodule_search_locations[0] != str(ROOT / folder):
        sys.exit(f"generate.py: error: {spec.origin} shadows {folder}/; uninstall that package")

from generation.bench import RunTimings, benchmark, device_name, measure_bandwidth, predicts
from generation.bench import speedup, summarize, summary_line, time_steps, weight_bytes
from generation.chat import Chat, chat_loop
from generation.config import CHAT_CONTEXT, DTYPES, GenerateConfig, parse_args
from generation.decoder_setup import AttendFactory, RunAhead, attention_and_cache, budgeted_cache
from generation.decoder_setup import can_run_ahead, check_logprobs, pick_attention
from generation.decoder_setup import reserve_lookahead_, sampling_params, sdpa, set_speculator_
from generation.decoder_setup import shard_kv_cache_
from generation.load import is_quantized, load, moe_layers, open_gguf, optimize_for_inference_
from generation.load import pick_device
from generation.prompt import fit_to_context, prompt_ids, prompt_text, read_text, text_format
from generation.ranks import process_group, rank0_then_broadcast, run_on_all_or_raise
from generation.sampling import Sampler, logprobs_of
from huggingface.tokenizer import Continuation, StopStrings, TextStream, Tokenizer
from huggingface.tokenizer import logprob_entry
from model import KVCache, Transformer
from paged_kv import CUDAGraphRunner, SamplingParams
from training.rank_env import rank_env
from training.flags import out_of_memory

IMPORT_SECONDS = time.perf_counter() - START

PREFILL_CHUNK = 512  # tokens; bounds the memory of a long prompt's mask and activations
NOT_FINITE = (
    "the logits after {} tokens are not finite, or all tokens are masked: the weights are damaged, "
    "--dtype has too small a range, or --set logit_bias bans what --regex or --json-schema needs"
)


# --------------------------------------------------------------------------------------------------
# Prefill and decode
# --------------------------------------------------------------------------------------------------


def prefill_chunks(
    model: Transformer,
    tokens: Tensor,
    cache: KVCache,
    start: int = 0,
    attention: AttendFactory = sdpa,
    chunk: int | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Prefill tokens (1, T) from position `start` on into the cache, chunk by chunk: yields (the
    chunk's first index in tokens, its hidden states (1, t, C))."""
    T = tokens.shape[1]
    if chunk is None:
        chunk = T if model.config.has_dynamic_rope else PREFILL_CHUNK
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
    """Prefill tokens (1, T) from position `start` on into the cache; returns the logits (1, V)
    of the last token. observe: called with each chunk's first position and hidden states."""
    for first, hidden in prefill_chunks(model, tokens, cache, start, attention):
        observe(start + first, hidden)
        last = hidden[:, -1]  # only the last token's logits are needed
    return model.head(last)


class Decoder:
    """B continuations of one prompt in lockstep: KV cache, sampler and decode step.

    In eager mode a step reads only the used part of the cache. Compiled, it gets the whole cache,
    so that shapes are static: one compilation, and on CUDA one captured graph, replayed on the same
    input tensors. sdpa then reads the whole cache; attention.py's kernels, which take the length as
    a tensor, read only the used part.
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
        cache: Any = None,
    ):
        """max_len: cache slots per row. keep_logits: store each step's logits in `last_step`.
        cache: that of `attention`, by default a KVCache."""
        first = next(model.parameters())
        device, dtype = first.device, first.dtype
        V = model.config.vocab_size
        self.model, self.batch, self.compiled, self.num_cached = model, batch, compiled, 0
        self.attention = attention
        self.cache = cache or KVCache(model.config, batch, max_len, dtype, device)
        self.sampler = Sampler(params, batch, V, device, [e for e in eos if e < V])
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.logits = torch.zeros(batch, V, dtype=dtype, device=device) if keep_logits else None
        self.last_step: tuple[Tensor, Tensor] | None = None  # logits (B, T, V), sampled ids (B, T)
        self.weight_bytes = weight_bytes(model, batch)
        # a speculation.Speculator or an early_exit.ExitSteps, which then runs the steps
        self.speculator: Any = None
        self.broadcast: Callable[[Tensor], Any] | None = None  # from rank 0, with --ep
        self.ahead: RunAhead | None = None  # of `run`
        self.prefill = prefill
        self.run = self._compile() if compiled else lambda: self._step(self.num_cached + 1)

    def start(self, ids: Sequence[int], cached: int = 0) -> list[list[int]]:
        """Prefill the prompt `ids`, of which the first `cached` are in the cache already; returns
        the first new token of every row."""
        self.num_cached = cached
        if self.ahead is not None:
            self.ahead.reset()
        prompt = torch.tensor([ids[cached:]], device=self.token.device)
        kwargs = {} if self.speculator is None else {"observe": self.speculator.observe}
        logits = self.prefill(self.model, prompt, self.cache, cached, self.attention, **kwargs)
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
        if self.ahead is not None:
            tokens = self.ahead.next(self.num_cached + 1 < self.cache.max_len)
        else:
            self.run()
            tokens = self._tokens()
        self.num_cached += 1  # only after the whole step: Ctrl-C may interrupt it anywhere
        return self.check_finite(tokens)

    def finish_step(self, logits: Tensor) -> list[list[int]]:
        """The next tokens of every row, from the logits (B, V) of a step that the caller ran."""
        self._sample(logits)
        self.position.add_(1)
        self.num_cached += 1
        return self._tokens()

    def stop(self) -> None:
        """Called when all rows have finished: a no-op here; PipelineDecoder stops its stages."""

    def store_step(self, logits: Tensor, sampled: Tensor) -> None:
        """With keep_logits, set last_step: logits (B, T, V), ids (B, T) sampled from them."""
        if self.logits is not None:
            self.last_step = logits, sampled.clamp(min=0)

    def _tokens(self) -> list[list[int]]:
        if self.broadcast is not None:  # the ranks' logits may be rounded differently
            self.broadcast(self.token)
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
        """Compile a function of static shapes. On CUDA, coordinate_descent_tuning lets Inductor
        generate matrix-vector products as reductions, fused with neighbouring ops."""
        device = self.token.device
        options = {"coordinate_descent_tuning": True} if device.type == "cuda" else {}
        return CUDAGraphRunner(step, device, **options)

    def _compile(self) -> Callable[[], None]:
        from moe import gather_experts_if_compiled, has_static_shapes

        for module in moe_layers(self.model):
            if not has_static_shapes(module):
                module.experts = gather_experts_if_compiled(module.experts)
        runner = self.graph_runner(self._step)
        runner()  # compiles; cache slots it writes are overwritten by the first prompt
        return runner

    def bytes_per_step(self) -> int:
        """Bytes read by the last step: weights, and the part of the cache that was read."""
        whole = self.compiled and self.attention is sdpa
        weights = self.weight_bytes - getattr(self.speculator, "bytes_skipped", 0)
        return weights + self.cache.bytes_read(None if whole else self.num_cached)


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
    """Continue a prompt, and print a summary. With --cascade the small model does if it can."""
    text = ""
    if args.prompt_tokens is None:
        text = rank0_then_broadcast(partial(prompt_text, args))
    if args.cascade is not None:
        from serving import cascade

        gate = cascade.read_gate(args)
        small = cascade.small_args(args, gate)
        with open_gguf(small):
            if gate.asks_small and complete(small, text, gate):
                return
    complete(args, text)


def complete(args: GenerateConfig, text: str, gate: Any = None) -> bool:
    """Continue `text`, streamed, and print a summary. With a cascade.Gate, only if the context
    holds the prompt and the gate keeps the answer. Returns whether it was printed."""
    begin = time.perf_counter()
    device, model, tokenizer = load_model(args)
    format = text_format(args, model.config, tokenizer)
    ids = prompt_ids(args, text, tokenizer, model.config, format, limited=gate is None)
    if gate is not None and len(ids) >= model.config.context:
        return False
    args.max_new_tokens = fit_to_context(args, len(ids), model.config.context)
    has_eos = not (args.ignore_eos or args.bench or args.dummy)
    eos = format.eos_ids if has_eos else ()
    decoder = build_decoder(args, model, tokenizer, len(ids) + args.max_new_tokens, eos)
    history = build_history(args, decoder)
    cached = 0 if history is None else history.find(ids)
    load_seconds = IMPORT_SECONDS + time.perf_counter() - begin

    continues = args.prompt_tokens is None and not args.chat  # the text continues the prompt's
    text = text if continues else ""
    streamed = args.n == 1 and not (args.json or args.bench or gate is not None)
    show = partial(print, end="", flush=True) if streamed else lambda text: None
    energy = open_energy_counter(device) if args.energy else None
    rows: list[Continuation] = []

    def run() -> RunTimings:
        stream = lambda: TextStream(tokenizer, ids if continues else (), args.grammar is not None)
        stop, least = lambda: StopStrings(args.stop, tokenizer), args.min_new_tokens
        new = lambda: Continuation(tokenizer, stream(), stop(), eos, show, min_tokens=least)
        rows[:] = [new() for _ in range(args.n)]
        steps = run_rows(decoder, ids, rows, args.max_new_tokens, args.logprobs, cached)
        return time_steps(steps, decoder, rows, energy)

    show(text)
    runs, baseline = benchmark(run, args.bench, decoder) if args.bench else ([run()], [])

    summary = {}
    if gate is not None:
        summary["confidence"] = gate.confidence([e["logprob"] for e in rows[0].logprobs])
        if not gate.keeps(summary["confidence"]):
            return False
        args.logprobs = None  # they were for the gate
    bandwidth = measure_bandwidth(device)
    summary |= summarize(runs, len(ids), load_seconds, bandwidth, predicts(args, decoder))
    if history is not None:
        history.save(ids + rows[0].tokens)
        summary["cached_tokens"] = cached
    if decoder.speculator is not None:
        summary |= decoder.speculator.summary() | speedup(runs, baseline)
    if args.kv_budget is not None:
        summary |= getattr(decoder.cache, "summary", dict)()  # a KVCache, if everything fits
    report(args, text, rows, summary, streamed)
    print(summary_line(summary, device_name(device, args.mesh, args.cp)), file=sys.stderr)
    return True


def load_model(args: GenerateConfig) -> tuple[torch.device, Transformer, Tokenizer]:
    """The device, the model on it, or this rank's shard, and the tokenizer."""
    device = run_on_all_or_raise(partial(pick_device, args.device))
    return device, *run_on_all_or_raise(partial(load, args, device))


def open_energy_counter(device: torch.device) -> Callable[[], float] | None:
    """--energy: joules so far; None, and a line that says why, if nothing counts them."""
    from generation.energy import open_counter

    try:
        return open_counter(device)
    except ValueError as e:
        print(f"generate.py: --energy: not measured: {e}", file=sys.stderr)
        return None


def build_decoder(
    args: GenerateConfig, model: Transformer, tokenizer: Tokenizer, max_len: int, eos: Sequence[int]
) -> Decoder:
    """A decoder with max_len cache slots per row. ValueError names the flag."""
    params = sampling_params(args, tokenizer, model.config.vocab_size, eos)
    lookahead = reserve_lookahead_(args, model)
    attention, cache = attention_and_cache(args, model, max_len, lookahead)
    keep_logits = args.logprobs is not None
    options = args.n, eos, args.compile, keep_logits, attention, cache
    try:
        decoder = Decoder(model, max_len + lookahead, params, *options)
    except ValueError as e:
        if not str(e).startswith("logit_bias"):
            raise
        raise ValueError(f"--set logit_bias {str(e).partition(' ')[2]}") from None
    if args.is_on("pp"):
        from generation.pipeline_inference import PipelineDecoder

        return PipelineDecoder(decoder, args.mesh, prefill_chunks)
    if args.is_on("cp"):
        shard_kv_cache_(decoder)
    if args.ep and dist.is_initialized():
        decoder.broadcast = partial(dist.broadcast, src=0)
    set_speculator_(args, decoder, tokenizer, lookahead)
    if can_run_ahead(args, decoder):
        decoder.ahead = RunAhead(decoder.run, decoder.token)
    return decoder


def build_history(args: GenerateConfig, decoder: Decoder) -> Any:
    """--kv-store: a prompt_cache.py's History of the decoder; None without."""
    if args.kv_store is None:
        return None
    from serving.prompt_cache import History, open_store

    return History(open_store(args, decoder.model), decoder, prefill, args.block_size)


def report(
    args: GenerateConfig, text: str, rows: list[Continuation], summary: dict[str, Any],
    streamed: bool,
) -> None:  # fmt: skip
    """Print the results: as JSON, or, unless they were streamed, the prompt's text and theirs."""
    samples = []
    for row in rows:
        samples.append({"text": row.text, "tokens": row.tokens, "finish_reason": row.finish_reason})
        if args.logprobs is not None:
            samples[-1]["logprobs"] = row.logprobs
    if args.json:
        more = {"samples": samples} if args.n > 1 else {}
        print(json.dumps(samples[0] | more | summary))
    elif args.bench:
        return
    elif args.n == 1:
        print("" if streamed else text + rows[0].text)
    else:
        for b, row in enumerate(rows):
            print(f"{'=' * 20} {b + 1} of {args.n} {'=' * 20}\n{text}{row.text}")


# --------------------------------------------------------------------------------------------------
# A conversation
# --------------------------------------------------------------------------------------------------


def interactive_chat(args: GenerateConfig) -> None:
    """--interactive: one reply per input line. Ctrl-C stops the reply, not the program."""
    _, model, tokenizer = load_model(args)
    format = text_format(args, model.config, tokenizer)
    if format.template is None and args.system_prompt is not None:
        raise ValueError(f"--system-prompt: {args.checkpoint} has no chat template")
    limit = min(args.ctx_size or CHAT_CONTEXT, model.config.context)
    eos = () if args.ignore_eos else format.eos_ids
    decoder = build_decoder(args, model, tokenizer, limit, eos)
    history = build_history(args, decoder)
    chat = Chat(decoder, run_rows, tokenizer, format.template, args.system_prompt, history)
    chat_loop(args, chat, eos, limit)


# --------------------------------------------------------------------------------------------------
# Perplexity and quantization
# --------------------------------------------------------------------------------------------------


def score_file(args: GenerateConfig) -> None:
    """--perplexity: perplexity, nats per token and bits per byte of a text."""
    from serving.evaluate import perplexity

    text = read_text(args.perplexity)
    _, model, tokenizer = load_model(args)
    check_logprobs(args, model.config.vocab_size)
    attention = pick_attention(args.attention, args.fixed_max)

    def new_cache(max_len: int) -> Any:
        return budgeted_cache(args, model, 1, max_len, None)

    def chunks(model: Transformer, tokens: Tensor, cache: Any) -> Iterator[tuple[int, Tensor]]:
        C = getattr(cache, "capacity", tokens.shape[1])  # beyond a budget: steps, as in decode
        yield from prefill_chunks(model, tokens[:, :C], cache, attention=attention)
        for first, hidden in prefill_chunks(model, tokens[:, C:], cache, C, attention, chunk=1):
            yield C + first, hidden

    metrics, entries = perplexity(model, tokenizer, text, chunks, args.logprobs, new_cache)
    if math.isnan(metrics["perplexity"]):
        raise ValueError(NOT_FINITE.format(metrics["tokens"] + 1))
    if args.json:
        print(json.dumps(metrics | ({"logprobs": entries} if entries else {})))
    else:
        lines = (f"{name.replace('_', ' ')}: {value:.6g}" for name, value in metrics.items())
        print("\n".join(lines))


def save_quantized(args: GenerateConfig) -> None:
    """--save: the quantized checkpoint, or a GGUF file."""
    from generation import quantize_model

    quantize_model.check_save(args)
    model, _ = load(args, pick_device(args.device))
    print(quantize_model.save(args, model))


def quantize_report(args: GenerateConfig) -> None:
    """--quantize-report: bytes, loss and speed of every scheme on this checkpoint."""
    from generation import quantize_model

    if is_quantized(args.checkpoint):
        raise ValueError(
            f"--quantize-report: {args.checkpoint} is already quantized; give the original"
        )
    dtype, accuracy = DTYPES[args.dtype] if args.dtype else None, None
    if args.choices is not None:
        from serving import evaluate

        accuracy = partial(evaluate.acc_and_norm, evaluate.read_task(args))
    speed = partial(decode_speed, args)
    quantize_model.print_report(args, pick_device(args.device), dtype, speed, accuracy)


@torch.inference_mode()
def decode_speed(args: GenerateConfig, model: Transformer, batch: int) -> float:
    """Tokens per second of `batch` rows in lockstep, after a prompt of 64 tokens."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    optimize_for_inference_(args, model)
    decoder = Decoder(model, 128, SamplingParams(temperature=0.0), batch, (), args.compile)
    decoder.start(list(range(1, 65)))
    return batch / Timer("next()", globals=dict(next=decoder.next)).timeit(32).median


# --------------------------------------------------------------------------------------------------
# main
# --------------------------------------------------------------------------------------------------


@torch.inference_mode()
def run(args: GenerateConfig) -> int:
    """Run the mode that the flags select. Returns the exit code."""
    with process_group(args), open_gguf(args):
        if args.interactive:
            interactive_chat(args)
        elif args.perplexity is not None:
            score_file(args)
        elif args.save is not None:
            save_quantized(args)
        elif args.quantize_report:
            quantize_report(args)
        elif any(map(args.is_on, ("choices", "batch", "serve", "program", "bench_serving"))):
            return run_engine(args)
        else:
            generate(args)
    return 0


def run_engine(args: GenerateConfig) -> int:
    """The modes of the continuous-batching engine. Returns the exit code."""
    from serving import build, entrypoints, evaluate  # here: tqdm and the Engine take 0.1 s

    build.check_engine_flags(args)
    if args.choices is not None:
        evaluate.run(args)
    elif args.batch is not None:
        return entrypoints.batch(args)
    elif args.serve is not None:
        entrypoints.serve(args)
    elif args.program is not None:
        entrypoints.program(args)
    else:
        entrypoints.bench_serving(args)
    return 0


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    flags = ("--ep", "--tp", "--pp", "--cp", "--disaggregate")
    distributed = any(a.partition("=")[0] in flags for a in argv)
    rank = 0
    with suppress(ValueError):  # which run_cli reports
        rank = rank_env().rank if distributed else 0
    if rank == 0:
        return run_cli(argv)
    with open(os.devnull, "w") as devnull, redirect_stdout(devnull), redirect_stderr(devnull):
        try:
            code = run_cli(argv)  # its output is discarded: rank 0 prints the same
        except RuntimeError:  # rank 0 exited early, for example because its stdout was closed
            code = 1
        if code:
            time.sleep(1)  # torchrun stops all ranks when one fails; let rank 0 print first
        return code


def run_cli(argv: list[str]) -> int:
    """Run; print errors as one line on stderr. Returns the exit code."""
    try:
        return run(parse_args(argv))
    except BrokenPipeError:  # stdout was closed, for example by `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as e:
        print(f"generate.py: error: {e}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as e:
        if (reason := out_of_memory(e)) is None:
            raise
        print(f"generate.py: error: out of memory ({reason})", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
