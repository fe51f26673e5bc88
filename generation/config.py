"""The configuration of generate.py: every setting, and which settings go together.

A field of GenerateConfig is a flag, or a rarer setting of --set (training/flags.py). Its sampling
fields are those of paged_kv.py's SamplingParams, in every mode. Every mistake is one line that
names the setting and the fix.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import json
import math
import re
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from generation import kv_eviction
from huggingface.tokenizer import check_utf8
from model import CONFIGS
from paged_kv import SamplingParams
from training.flags import Settings, check_excludes, check_limits, check_requires, flag, parse
from training.flags import parse_bytes, rare

SHIPPED = Path(__file__).resolve().parents[1] / "checkpoints" / "small"
TEMPERATURE = 0.8
CHAT_CONTEXT = 8192  # default ctx_size of a conversation, tokens
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPES |= {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
# fmt: off


@dataclass
class GenerateConfig(Settings):
    """Every setting: a flag of its own, or --set NAME=VALUE for the rarer ones."""

    # prompt
    prompt: str | None = flag(
        None, "text to continue; - or a pipe: read it from stdin", positional=True, nargs="?")
    checkpoint: Path = flag(
        SHIPPED, "Hugging Face checkpoint folder, by default the shipped one, or a GGUF file",
        metavar="DIR|FILE.gguf")
    adapter: Path | None = flag(
        None, "LoRA in PEFT's format, merged into the weights", metavar="DIR")
    chat: bool = flag(False, "apply the chat template to the prompt")
    interactive: bool = flag(False, "chat in the terminal; commands: /reset, /quit")
    system_prompt: str | None = flag(None, "system message of a chat", metavar="TEXT")
    perplexity: Path | None = flag(
        None, "print the perplexity of this text and exit", metavar="FILE")
    choices: str | None = flag(
        None, "print the accuracy on multiple-choice questions and exit (serving/evaluate.py): "
        "lines of prompt, choices and answer, a number from 0; without FILE: the next line of "
        "Python's standard library", nargs="?", const="", metavar="FILE.jsonl")
    num_fewshot: int = flag(
        0, "answered questions before each of --choices", "0 or more", metavar="K")
    fewshot: Path | None = rare(None, "file of these (default: the other questions)")
    json: bool = flag(False, "print one JSON object instead of text")
    ctx_size: int | None = rare(None, f"tokens of a conversation ({CHAT_CONTEXT})", "2 or more")

    # sampling
    max_new_tokens: int = flag(200, "tokens to generate at most", "1 or more")
    n: int = flag(1, "number of continuations; continuation i uses seed + i", "1 or more")
    temperature: float | None = flag(None, f"0 is greedy ({TEMPERATURE})")
    top_k: int = flag(0, "sample from the k most likely tokens; 0: all")
    top_p: float = flag(1.0, "sample from the smallest set of tokens with this total probability")
    min_p: float = flag(
        0.0, "sample from tokens with at least this fraction of the highest probability")
    seed: int = flag(0, "seed of the random numbers")
    stop: list[str] | tuple = flag(
        (), "stop before this text; repeatable", action="append", metavar="TEXT")
    ignore_eos: bool = flag(False, "do not stop at end-of-sequence tokens")
    logprobs: int | None = flag(
        None, "with --json: log-probabilities of the tokens and of the K most likely ones",
        metavar="K")
    regex: str | None = flag(
        None, "the text must match this regular expression (generation/structured.py)",
        metavar="PATTERN")
    json_schema: Path | None = flag(
        None, "the text must be JSON that is valid under the schema in FILE", metavar="FILE")
    repetition_penalty: float = rare(
        1.0, "factor that penalizes tokens in prompt or output; 1: off")
    presence_penalty: float = rare(0.0, "subtracted from the logits of tokens in the output")
    frequency_penalty: float = rare(0.0, "subtracted from a logit per occurrence in the output")
    min_new_tokens: int = rare(0, "neither EOS nor --stop ends the text before this many tokens")
    logit_bias: str = rare("", "ID:BIAS,... added to logits; -inf bans a token")

    # model and device
    device: str | None = flag(None, "default: cuda if available, else cpu")
    dtype: str | None = flag(
        None, "default: the checkpoint's (bf16 for --dummy)", choices=tuple(DTYPES))
    attention: str = flag(
        "sdpa", "flash: attention.py's kernels, slower on a CPU", choices=("sdpa", "flash"))
    fixed_max: float | None = rare(
        None, "with --attention flash: constant in place of the softmax's running maximum where a "
        "long cache is split, see attention.py's decode_attention", "-1000 or more")
    compile: bool = flag(False, "compile the decode step (CUDA graph on CUDA)")
    bench: int | None = flag(
        None, "benchmark: N runs (default: 5) that ignore EOS; print medians", "1 or more",
        nargs="?", const=5, metavar="N")
    energy: bool = flag(False, "with --bench: joules per token, if NVML or RAPL measures them")
    dummy: str | None = flag(
        None, f"random weights; CONFIG is a config.json or one of: {', '.join(CONFIGS)}",
        metavar="CONFIG")
    prompt_tokens: int | None = flag(
        None, "a prompt of N random token ids", "1 or more", metavar="N")
    offload: str | None = flag(
        None, "keep the layers in host memory, or in files of FOLDER, and copy each to the device "
        "when it is used", metavar="cpu|FOLDER")
    experts: str = rare(
        "grouped", "moe.py's grouped GEMM, or model.py's loop", choices=("grouped", "loop"))

    # many devices
    tp: int | None = flag(None, "tensor parallelism over N ranks", "1 or more", metavar="N")
    pp: int | None = flag(
        None, "pipeline parallelism over N ranks, the --n rows in groups", "1 or more",
        metavar="N")
    ep: bool = flag(False, "expert parallelism over all ranks")
    cp: int | None = flag(
        None, "context parallelism over N ranks: each has the whole model and 1/N of the KV cache",
        "1 or more", metavar="N")
    shard_batch: bool = rare(
        False, "with --tp and --n, for MLA or MQA: shard the KV cache by rows instead of heads")
    ffn_2d: bool = rare(
        False, "with --tp: shard the feed-forward's weights along both dimensions, and gather them "
        "for long prompts, where that sends fewer bytes")
    expert_load: Path | None = rare(
        None, "place experts by the load measured in train.py's metrics.jsonl")
    num_redundant_experts: int = rare(0, "replicas of the most loaded experts", "0 or more")
    expert_spread: str = rare(
        "balance", "place replicas for an even load, or with the largest probability that all "
        "experts survive lost ranks", choices=("balance", "overlap"))

    # quantization
    quantize: str | None = flag(
        None, "int8, int4, q8_0, q4_0, fp8, ...", metavar="SCHEME")
    group_size: int | None = flag(
        None, "weights per scale, for int4, int3 and int2 (default: 32)", metavar="G")
    calibrate: str | None = flag(
        None, "calibrated quantization",
        choices=("gptq", "awq", "smoothquant", "tacq", "equalize", "bias"))
    save: Path | None = flag(
        None, "write the quantized checkpoint to the folder OUT and exit; OUT.gguf: a GGUF file, "
        "quantized or not", metavar="OUT")
    quantize_report: bool = flag(
        False, "print bytes, loss and speed (with --choices: accuracy) of every scheme on this "
        "checkpoint and exit")
    quantize_skip: str = rare(
        "", "layers to keep in 16 bit: comma-separated names or substrings of names")
    calibration_text: Path | None = rare(
        None, "text for --calibrate and --quantize-report (default: Python's standard library), or "
        "to fit the ramps of --early-exit (default: the model's own norm and head)")
    plot: Path | None = rare(None, "with --quantize-report: plot of loss by bytes")

    # speculative decoding
    speculate: str | None = flag(
        None, "speculative decoding. Source of the drafts: ngram, a lookup in prompt and output; "
        "draft, --draft-model; tree, a tree of the top tokens of --draft-model; staged, a tree "
        "whose own drafting ngram speeds up (trees are never compiled); exit, the model's first "
        "layers; mtp, the model's multi-token prediction layers; head, a draft head of train.py "
        "--task draft-head",
        choices=("ngram", "draft", "staged", "tree", "exit", "mtp", "head"))
    draft_model: str | None = flag(
        None, "folder of the draft model or head (default for checkpoints/small: the shipped ones)",
        metavar="DIR")
    speculate_k: str = flag(
        "auto", "drafts per step (nodes of a tree); auto: by measured goodput, up to 8; "
        "confidence: while the drafter's own are likely to be accepted, up to 16",
        metavar="N|auto|confidence")
    reference: Path | None = flag(
        None, "with --speculate ngram: text to copy drafts from, besides the prompt and the output",
        metavar="FILE")
    exit_layers: int | None = rare(
        None, "with --speculate exit: number of first layers that draft (default: half of all)",
        "1 or more")
    draft_ahead: bool = rare(
        False, "with --speculate draft: draft on before the drafts are verified; if all are "
        "accepted, the next ones need no forward (slower where both models run in turn)")
    draft_coupled: bool = rare(
        False, "sample drafts with the noise of the target's token and accept those that equal it: "
        "the text is what --seed gives without drafts, at a lower acceptance rate")
    forced_acceptance: float | None = rare(
        None, "with --bench: accept drafts with this probability, unverified; the text has no "
        "meaning", "0 or more")

    # early exit
    early_exit: str | None = flag(
        None, "decode with fewer layers (generation/early_exit.py): from A layers for the first "
        "new token to B for the last; or tokens exit where a ramp is confident, and this share of "
        "them is the full model's", metavar="A:B|SHARE")
    exit_ramps: str = rare("", "with --early-exit SHARE: layers before each ramp (two thirds)")

    # KV budget
    kv_budget: float | None = flag(
        None, "cache and read at most this share of the prompt's and new tokens, to 1, or this "
        "number of tokens, per layer and KV head (generation/kv_eviction.py)", "positive",
        metavar="SHARE|N")
    kv_policy: str = flag(
        "h2o", "which tokens --kv-budget keeps: heavy hitters and recent ones; pivotal ones; sinks "
        "and recent ones; predicted ones of all, in host memory; or the baselines",
        choices=kv_eviction.NAMES)

    # cascade
    cascade: Path | None = flag(
        None, "a small model answers first, and --checkpoint where that one is not sure: its "
        "folder, or a file of python -m serving.cascade; also with --serve",
        metavar="DIR|FILE.json")
    cascade_threshold: float | None = flag(
        None, "keep the small model's answer from this confidence on; 0: always, 1: never "
        "(default: the file's)", "0 or more", metavar="X")

    # KV of earlier runs
    kv_store: Path | None = flag(
        None, "keep the KV of prompts and outputs in FOLDER, where other runs and processes with "
        "the same weights find it (serving/kv_store.py); --interactive continues its conversation, "
        "and drops its oldest turns when the context is full", metavar="FOLDER")
    kv_store_size: str = flag("20G", "bytes of --kv-store at most", metavar="SIZE")
    kv_store_host: str = rare("1G", "bytes of --kv-store in host memory at most")

    # many requests
    batch: Path | None = flag(
        None, "run a JSONL file of requests: each line has prompt, messages or prompt_ids, "
        "optionally id, priority, fields (an object, which replaces {fields} in the prompt), regex "
        "or json_schema (an object), and sampling fields, whose defaults are the flags above; - is "
        "stdin. Exit code 1: some requests failed", metavar="FILE")
    adapters: str | None = flag(
        None, "LoRA adapters in PEFT's format that requests of --batch (field adapter) and --serve "
        "(field model) can name", metavar="NAME=DIR,...")
    runtime_adapters: Path | None = flag(
        None, "clients of --serve may load adapters from folders in DIR, and unload theirs "
        "(serving/runtime_adapters.py)", metavar="DIR")
    max_adapters: int = rare(64, "adapters with --runtime-adapters at most", "1 or more")
    models: str | None = flag(
        None, "full fine-tunes of --checkpoint, which requests name like --adapters: tensors that "
        "are equal are stored once, batches are mixed (serving/shared_models.py)",
        metavar="NAME=DIR,...")
    reorder: bool = flag(
        False, "reorder the requests of --batch, and the fields of each, so that more prefixes are "
        "cached, and compute equal requests once; reads the whole file first")
    out: Path | None = flag(
        None, "results of --batch (default for x.jsonl: x.results.jsonl); existing results of the "
        "same requests, flags and weights are kept", metavar="FILE")
    program: str | None = flag(
        None, "run a program of prompts, `async def main(p, prompt)` of FILE.py, or its function "
        "NAME (serving/programs.py)", metavar="FILE.py[:NAME]")
    bench_serving: int | None = flag(
        None, "throughput and latency of N random requests (default: 64), greedy by default",
        "1 or more", nargs="?", const=64, metavar="N")
    request_rate: float = flag(math.inf, "arrivals per second", metavar="R")
    shared_prefix: int = flag(
        0, "tokens that all random prompts share", "0 or more", metavar="N")
    kv_blocks: int | None = flag(
        None, "KV cache blocks (default: for --max-num-seqs, within 80%% of free GPU memory or "
        "1 GB)", "1 or more", metavar="N")
    max_num_batched_tokens: int = flag(
        512, "tokens per step at most, prefill included", "1 or more", metavar="N")
    max_num_seqs: int = flag(64, "running sequences at most", "1 or more", metavar="N")
    kv_cache_dtype: str | None = flag(None, "quantize the KV cache", choices=("int8", "fp8"))
    policy: str = flag(
        "fcfs", "who runs next (serving/policies.py): fcfs, longest-prefix, fair, sjf, mlfq, qoe, "
        "deadline, slo-mix, s3, rag-cache",
        metavar="NAME[:FIELD=VALUE,...]")
    disaggregate: str | None = flag(
        None, "measure goodput under torchrun: P prefill and D decode workers of T tensor-parallel "
        "ranks each (default 1) against colocated engines; auto: every placement on all ranks",
        metavar="P[xT]:D[xT]|auto")
    serve: str | None = flag(
        None, "an HTTP server with the OpenAI API and a page", nargs="?", const="127.0.0.1:8000",
        metavar="[HOST:]PORT")
    api_key: list[str] | tuple = flag(
        (), "accept calls of --serve with this key only; repeatable; a key is required beyond "
        "loopback; other users see it in the list of processes, unlike SHEAF_API_KEY and "
        "--api-key-file", action="append", metavar="KEY")
    api_key_file: Path | None = flag(
        None, "as --api-key, with a key in each line of FILE", metavar="FILE")
    drain_timeout: float = flag(
        60.0, "seconds that running requests have after SIGTERM", "0 or more", metavar="S")
    max_queue: int = rare(512, "waiting requests of --serve at most", "1 or more")
    request_timeout: float = rare(600.0, "seconds that a request of --serve may take", "positive")
    cors_origin: str = rare("", "origin whose pages may call --serve, or *")
    slo: str = rare("1:0.1", "seconds to the first token, and per further token, for goodput")
    merge_adapters: bool = rare(
        False, "with --adapters: merge the most used one into the weights while that pays")
    arrival_cv: float = rare(1.0, "variation of the time between arrivals; 1: Poisson", "0 or more")
    input_tokens: str = rare("16:128", "tokens of a random prompt, uniform from A to B")
    output_tokens: str = rare("16:64", "tokens of a random output, uniform from A to B")
    block_size: int = rare(16, "tokens per KV block", "1 or more")
    prefix_cache: bool = rare(True, "share the KV of equal prefixes")
    continuous: bool = rare(
        True, "admit requests as soon as others end; false: once all have ended, for comparison")
    kv_swap: bool = rare(False, "swap preempted KV to host memory instead of recomputing it")
    kv_layout: str = rare(
        "paged", "virtual: contiguous addresses per sequence, and memory that is mapped on demand "
        "and given back (serving/vattention.py)", choices=("paged", "virtual"))

    finetune: Path | None = flag(
        None, "with --serve or --batch: train LoRA adapters on the tokens that requests leave of "
        'each step; FILE is {"data": [PATH, ...], "out": DIR, ...} (serving/finetune.py)',
        metavar="FILE")

    grammar: str | None = None  # the pattern of regex or json_schema
    sampling_params: SamplingParams | None = None
    mesh: Any = None  # parallel.Mesh, set by process_group
    # fmt: on

    def is_on(self, condition: str) -> bool:
        """Settings.is_on; --tp 1, --pp 1 and --cp 1 are the same as none."""
        is_one = condition in ("tp", "pp", "cp") and getattr(self, condition) == 1
        return not is_one and super().is_on(condition)


DESCRIPTION = "text generation from a checkpoint: prompts, chat, perplexity, batches, benchmarks"
GROUPS = {  # the first field of each group of --help
    "prompt": "prompt", "max_new_tokens": "sampling", "device": "model and device",
    "tp": "many devices: torchrun --nproc-per-node N -- generate.py ...",
    "quantize": "quantization", "speculate": "speculative decoding", "early_exit": "early exit",
    "kv_budget": "KV budget", "cascade": "cascade", "kv_store": "KV of earlier runs",
    "batch": "many requests",
}  # fmt: skip
SAMPLING = "max_new_tokens n temperature top_k top_p min_p seed stop ignore_eos repetition_penalty "
SAMPLING += "presence_penalty frequency_penalty min_new_tokens logit_bias regex json_schema"
SINGLE = "prompt prompt_tokens interactive chat perplexity bench attention"
SHARDED = "interactive calibrate save quantize_report"
ENGINE = "kv_blocks block_size max_num_batched_tokens max_num_seqs kv_cache_dtype prefix_cache "
ENGINE += "policy continuous kv_swap kv_layout"

# setting, the settings of which it needs one
REQUIRES = [
    ("logprobs", "json batch"), ("system_prompt", "chat interactive batch"),
    ("ctx_size", "interactive"), ("out", "batch"), ("reorder", "batch"), ("energy", "bench"),
    ("num_fewshot", "choices"), ("fewshot", "num_fewshot"),
    ("group_size", "quantize quantize_report"),
    ("quantize_skip", "quantize quantize_report"), ("calibrate", "quantize"),
    ("calibration_text", "calibrate=gptq|awq|smoothquant|tacq|bias quantize_report early_exit"),
    ("exit_ramps", "early_exit"), ("cascade_threshold", "cascade"), ("kv_policy", "kv_budget"),
    ("plot", "quantize_report"),
    ("draft_model", "speculate=draft|staged|tree|head"), ("speculate_k", "speculate"),
    ("draft_coupled", "speculate"), ("draft_ahead", "speculate=draft"),
    ("speculate_k=confidence", "speculate=draft|exit|mtp|head"), ("exit_layers", "speculate=exit"),
    ("reference", "speculate=ngram|staged"),
    ("forced_acceptance", "speculate=ngram|draft|exit|mtp|head"),
    ("forced_acceptance", "bench bench_serving"),
    ("adapters", "batch serve"), ("merge_adapters", "adapters runtime_adapters"),
    ("models", "batch serve"), ("runtime_adapters", "serve"), ("max_adapters", "runtime_adapters"),
    *((name, "batch bench_serving serve program choices") for name in ENGINE.split()),
    *((name, "bench_serving") for name in (
        "request_rate", "arrival_cv", "input_tokens", "output_tokens", "shared_prefix",
        "disaggregate")), ("slo", "disaggregate"),
    *((name, "serve") for name in (
        "api_key", "api_key_file", "drain_timeout", "max_queue", "request_timeout", "cors_origin")),
    ("finetune", "batch serve"),
    ("kv_store_size", "kv_store"), ("kv_store_host", "kv_store"),
    ("expert_load", "ep"), ("num_redundant_experts", "ep"),
    ("expert_spread", "num_redundant_experts"), ("shard_batch", "tp"),
    ("ffn_2d", "tp"), ("fixed_max", "attention=flash"),
]  # fmt: skip

# setting, settings that it cannot be combined with, why
EXCLUDES = [
    ("batch", f"{SINGLE} json bench_serving", "the requests are in its file"),
    ("bench_serving", f"{SINGLE} stop n logprobs max_new_tokens min_new_tokens ignore_eos",
     "its requests are random"),
    ("serve", f"{SINGLE} json batch bench_serving {SAMPLING}",
     "the requests come from its clients"),
    ("program", "prompt_tokens interactive chat perplexity bench attention json batch "
     "bench_serving serve n regex json_schema cascade early_exit", "its calls are the requests"),
    ("program", "tp pp ep", "its engine runs on one device"),
    ("interactive", "prompt json bench prompt_tokens chat perplexity logprobs dummy n",
     "it reads a line at a time"),
    ("perplexity", f"prompt bench prompt_tokens chat dummy {SAMPLING} compile speculate",
     "it generates nothing"),
    ("save", f"{SINGLE} json batch bench_serving dummy {SAMPLING} compile speculate",
     "it generates nothing"),
    ("choices", f"{SINGLE} batch bench_serving serve program save dummy {SAMPLING} speculate "
     "logprobs", "it generates nothing"),
    ("choices", "early_exit kv_budget cascade ep pp cp", "its engine scores prompts"),
    ("energy", "tp pp ep cp", "it reads the counter of one device"),
    ("quantize_report", f"{SINGLE} batch bench_serving dummy quantize save speculate {SAMPLING}",
     "it runs every scheme on a text of its own"),
    ("quantize_report", ENGINE, "its engine is the default one"),
    ("calibrate", "dummy", "random weights have no activations to calibrate"),
    # a compiled step gathers the weights of each token's experts, which are on other ranks
    ("ep", f"batch bench_serving serve speculate compile {SHARDED}",
     "every rank has some of the experts"),
    ("tp", SHARDED, "every rank has a shard of the weights"),
    # torch.compile does not trace the sends and receives between stages
    ("pp", f"{SHARDED} compile batch bench_serving serve speculate perplexity logprobs ep "
     "shard_batch",
     "every rank has some of the layers"),
    ("cp", f"{SHARDED} compile attention=flash batch bench_serving serve program speculate "
     "perplexity regex json_schema early_exit cascade tp pp ep",
     "every rank has some of the tokens' keys"),
    ("ffn_2d", "ep pp quantize", "it shards dense 16-bit weights over all ranks"),
    ("shard_batch", "batch bench_serving serve speculate perplexity", "it shards the --n rows"),
    ("offload", "quantize calibrate save quantize_report adapter compile tp pp ep",
     "layers are copied to the device one by one"),
    ("disaggregate", "tp pp ep json speculate", "each placement shards the model by itself"),
    ("policy=longest-prefix", "prefix_cache=False", "no prompt is cached"),
    ("reorder", "prefix_cache=False", "no prompt is cached"),
    ("adapter", "quantize save quantize_report dummy ep tp pp", "it is merged into 16-bit weights"),
    ("finetune", "dummy quantize offload tp pp ep compile cascade",
     "it trains on 16-bit weights in place"),
    ("finetune", "adapter adapters", "the new adapter would be of other weights"),
    ("adapters", "adapter compile offload tp pp ep kv_cache_dtype=fp8 cascade",
     "its layers have weights in the KV cache of one device"),
    ("runtime_adapters", "adapter compile offload tp pp ep kv_cache_dtype=fp8 cascade finetune "
     "models kv_layout=virtual", "its layers have weights in the KV cache of one device"),
    ("merge_adapters", "quantize", "adapters are merged into 16-bit weights"),
    ("kv_layout=virtual", "adapters finetune", "adapters are kept in blocks of the paged cache"),
    ("kv_layout=virtual", "kv_cache_dtype", "its memory holds 16-bit KV"),
    ("kv_layout=virtual", "compile", "its addresses are mapped between steps"),
    ("models", "adapter adapters quantize compile offload dummy tp pp ep cascade finetune",
     "they share the 16-bit weights of --checkpoint on one device"),
    ("kv_store", "perplexity save quantize_report bench bench_serving", "they repeat no prompt"),
    ("kv_store", "tp pp ep offload models", "it fingerprints the weights of one model and device"),
    ("kv_store", "early_exit", "its tokens have the KV of fewer layers"),
    ("kv_store", "kv_budget cp kv_layout=virtual", "it copies blocks of a cache of all tokens"),
    ("kv_store", "prefix_cache=False", "it keeps the blocks of the prefix cache"),
    ("prompt_tokens", "prompt chat", "the prompt is random"),
    ("draft_ahead", "compile batch bench_serving serve program",
     "it continues the drafts of one prompt, uncompiled"),
    ("regex", "json_schema", "a text has one grammar"),
    *((name, "compile pp ep shard_batch", "it masks on the host and drafts forced tokens")
      for name in ("regex", "json_schema")),
    ("interactive", "regex json_schema", "replies are free text"),
    ("bench_serving", "regex json_schema", "its requests are random"),
    ("dummy", "checkpoint chat regex json_schema", "it has random weights and no tokenizer"),
    ("early_exit", "interactive perplexity save quantize_report batch bench_serving serve",
     "it decodes after one prompt"),
    ("early_exit", "speculate regex json_schema", "they run the steps themselves"),
    ("early_exit", "compile tp pp ep offload", "its steps differ in their layers"),
    ("kv_budget", "batch bench_serving serve program",
     "the engine's blocks keep the tokens of all heads"),
    ("kv_budget", "attention=flash compile speculate early_exit regex json_schema",
     "tokens have no fixed slots"),
    ("kv_budget", "tp pp ep cp save quantize_report", "one process generates one text"),
    ("kv_policy=infinigen", "offload", "both copy ahead of the layers"),
    ("cascade", "interactive perplexity save quantize_report batch bench_serving bench n logprobs "
     "dummy prompt_tokens tp pp ep", "two models answer one text after the other"),
    ("bench", "stop logprobs ignore_eos regex json_schema", "runs have a fixed length"),
    ("ignore_eos", "regex json_schema", "EOS ends their text"),
]


def parse_args(argv: list[str]) -> GenerateConfig:
    """The config of a command line, with sampling_params. ValueError names a flag that is out of
    range or would have no effect."""
    args = parse(GenerateConfig, argv, "generate.py", DESCRIPTION, GROUPS)
    check_limits(args)
    check_requires(args, REQUIRES)
    check_excludes(args, EXCLUDES)
    check_values(args)
    if args.temperature is None:
        sampled = any(map(args.is_on, ("top_k", "top_p", "min_p"))) or args.bench_serving is None
        args.temperature = TEMPERATURE if sampled else 0.0
    for name in ("input_tokens", "output_tokens"):
        setattr(args, name, parse_range(args, name))
    for name in ("kv_store_size", "kv_store_host"):
        setattr(args, name, parse_size(args, name))
    for name in ("adapters", "models"):
        setattr(args, name, parse_folders(args, name))
    if args.runtime_adapters is not None:
        if not args.runtime_adapters.is_dir():
            raise ValueError(f"--runtime-adapters {args.runtime_adapters}: no such folder")
        args.adapters = args.adapters or []
    args.slo = parse_slo(args.slo)
    args.early_exit, args.exit_ramps = parse_exits(args)
    args.grammar = read_grammar(args)
    args.sampling_params = read_sampling(args)
    for name in args.flags():
        value = getattr(args, name)
        if isinstance(value, int) and value >= 2**63:
            raise ValueError(f"{args.shown(name)} must be less than 2**63, not {value}")
    return args


def check_values(args: GenerateConfig) -> None:
    """ValueError names a setting whose range check_limits does not know."""
    for name in ("prompt", "system_prompt", "regex"):
        shown = "the prompt" if name == "prompt" else args.shown(name)
        check_utf8(getattr(args, name) or "", shown)
    if args.arrival_cv and not 0.01 <= args.arrival_cv <= 100:
        raise ValueError(f"--set arrival_cv must be 0 or from 0.01 to 100, not {args.arrival_cv}")
    if not args.request_rate >= 1e-6:
        raise ValueError(f"--request-rate must be at least 1e-6, not {args.request_rate}")
    for name in ("forced_acceptance", "cascade_threshold"):
        if (getattr(args, name) or 0) > 1:
            raise ValueError(f"{args.shown(name)} must be from 0 to 1, not {getattr(args, name)}")
    if (args.kv_budget or 0) > 1 and not args.kv_budget.is_integer():
        raise ValueError(f"--kv-budget must be a share to 1 or whole tokens, not {args.kv_budget}")
    if args.offload is not None and args.offload != "cpu" and "/" not in args.offload:
        if not args.offload or not Path(args.offload).is_dir():
            raise ValueError(f"--offload {args.offload!r}: must be cpu or a folder that exists")
    if args.device == "":
        raise ValueError("--device is empty; give cpu, cuda or cuda:N")
    if not re.fullmatch(r"(\*|https?://[^/\s]+)?", args.cors_origin):
        raise ValueError(
            "--set cors_origin must be * or an origin such as https://example.org, without a path, "
            f"not {args.cors_origin!r}"
        )
    k = args.speculate_k
    if k not in ("auto", "confidence") and not (k.isdecimal() and 1 <= int(k) <= 64):
        raise ValueError(f"--speculate-k must be from 1 to 64, auto or confidence, not {k}")
    if args.max_num_seqs > args.max_num_batched_tokens:
        raise ValueError(
            f"--max-num-seqs {args.max_num_seqs} must not exceed --max-num-batched-tokens "
            f"{args.max_num_batched_tokens}"
        )


def read_grammar(args: GenerateConfig) -> str | None:
    """The pattern of --regex or --json-schema; ValueError names the flag."""
    if args.regex is None and args.json_schema is None:
        return None
    from generation.json_schema import parse_grammar  # here: 0.05 s

    name, value = "--regex", args.regex
    if args.json_schema is not None:
        name, value = f"--json-schema {args.json_schema}", None
        try:
            value = json.loads(args.json_schema.read_bytes())
        except (OSError, ValueError, RecursionError) as e:
            raise ValueError(f"{name}: not a JSON file ({e})") from None
    return parse_grammar(name, value, args.json_schema is not None)


def parse_slo(text: str, flag: str = "--set slo") -> tuple[float, float]:
    """A:B, seconds to the first token and per further token; ValueError names the flag."""
    try:
        a, b = map(float, text.split(":"))
        if not 0 < min(a, b) <= max(a, b) < math.inf:
            raise ValueError
    except ValueError:
        raise ValueError(f"{flag} must be A:B, two positive numbers, not {text!r}") from None
    return a, b


def parse_exits(args: GenerateConfig) -> tuple[tuple[int, int] | float | None, list[int]]:
    """--early-exit, as (A, B) layers or a share, and exit_ramps. ValueError names the setting."""
    text, given = args.early_exit, args.exit_ramps.split(",") if args.exit_ramps else []
    ramps = [int(x) if x.isdecimal() else 0 for x in given]
    if any(a >= b for a, b in pairwise([0, *ramps])):
        wanted = "numbers A,B,..., 1 or more and rising"
        raise ValueError(f"--set exit_ramps must be {wanted}, not {args.exit_ramps}")
    if text is None:
        return None, []
    if match := re.fullmatch(r"([1-9]\d{0,8}):([1-9]\d{0,8})", text):
        first, last = map(int, match.groups())
        if first < last or ramps:
            why = "has no ramps; remove exit_ramps" if ramps else "must not rise"
            raise ValueError(f"--early-exit {text}: a depth that depends on the position {why}")
        return (first, last), []
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise ValueError(f"--early-exit must be A:B layers, A >= B, or a share to 1, not {text!r}")
    return share, ramps


def parse_range(args: GenerateConfig, name: str) -> tuple[int, int]:
    """A setting A:B, integers from 1. ValueError names it."""
    text = getattr(args, name)
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
        raise ValueError(f"{args.shown(name)} must be A:B, integers 1 <= A <= B, not {text!r}")
    return int(low), int(high)


def parse_size(args: GenerateConfig, name: str) -> int:
    """A setting in bytes, more than 0. ValueError names it."""
    try:
        if (size := parse_bytes(getattr(args, name))) > 0:
            return size
    except ValueError:
        pass
    raise ValueError(f"{args.shown(name)} must be bytes: 8e9, 500M or 20G")


def parse_folders(args: GenerateConfig, name: str) -> list[tuple[str, Path]] | None:
    """A setting NAME=DIR,...; None if it is not given. ValueError names it."""
    text = getattr(args, name)
    if text is None:
        return None
    pairs = [entry.partition("=")[::2] for entry in filter(None, text.split(","))]
    if not pairs or not all(map(all, pairs)):
        raise ValueError(f"{args.shown(name)} must be NAME=DIR,..., not {text!r}")
    return [(key, Path(folder)) for key, folder in pairs]


def read_sampling(args: GenerateConfig) -> SamplingParams:
    """The SamplingParams of the flags; ValueError names the flag."""
    bias = []
    for entry in filter(None, args.logit_bias.split(",")):
        try:
            token, value = entry.split(":")
            bias.append((int(token), float(value)))
        except ValueError:
            raise ValueError(f"--set logit_bias must be ID:BIAS,..., not {entry!r}") from None
    try:
        values = {f.name: getattr(args, f.name) for f in fields(SamplingParams)}
        values |= {"logit_bias": tuple(bias), "adapter": None}  # --adapter is merged
        return SamplingParams(**values)
    except ValueError as e:
        name, _, rest = str(e).partition(" ")
        raise ValueError(f"{args.shown(name)} {rest}") from None
