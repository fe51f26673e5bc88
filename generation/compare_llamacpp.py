"""Decoding speed beside llama.cpp's, in turn, on the same GGUF files: TinyLlama-1.1B's shape, with
random weights.

    python generation/compare_llamacpp.py --python PEER/bin/python --folder FOLDER

Prints the first table of BENCHMARKS.md, which plot_decode.py draws. PEER is an environment with
llama-cpp-python, built for this machine, and gguf: CMAKE_ARGS=-DGGML_NATIVE=ON pip install
llama-cpp-python gguf. FOLDER keeps the files, 4 GB. Each run is a new process, reads 128 tokens and
decodes 32, three times, and reports the median. The bound is the fastest read of memory that our
runs measured, over the bytes of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

GENERATE = Path(__file__).resolve().parents[1] / "generate.py"
FORMATS = ("bf16", "q8_0", "q4_0")
OURS = "--prompt-tokens 128 --max-new-tokens 33 --temperature 0 --bench 3 --json"

WRITE_GGUF = """
import sys, numpy as np, gguf
path, kind = sys.argv[1], gguf.GGMLQuantizationType[sys.argv[2]]
rng, w = np.random.default_rng(0), gguf.GGUFWriter(path, "llama")
L, C, F, Hq, Hkv, V = 22, 2048, 5632, 32, 4, 32000
w.add_block_count(L), w.add_context_length(2048), w.add_embedding_length(C)
w.add_feed_forward_length(F), w.add_head_count(Hq), w.add_head_count_kv(Hkv)
w.add_layer_norm_rms_eps(1e-5), w.add_rope_dimension_count(64), w.add_vocab_size(V)
w.add_tokenizer_model("llama"), w.add_token_list([f"<t{i}>".encode() for i in range(V)])
w.add_token_scores([0.0] * V), w.add_token_types([2, 3, 3] + [1] * (V - 3))
w.add_unk_token_id(0), w.add_bos_token_id(1), w.add_eos_token_id(2)
def add(name, N, K):
    weight = rng.standard_normal((N, K), dtype=np.float32) * 0.02
    w.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
add("token_embd.weight", V, C), add("output.weight", V, C)
w.add_tensor("output_norm.weight", np.ones(C, np.float32))
for i in range(L):
    for name, N, K in (("attn_q", C, C), ("attn_k", Hkv * 64, C), ("attn_v", Hkv * 64, C),
                       ("attn_output", C, C), ("ffn_gate", F, C), ("ffn_up", F, C),
                       ("ffn_down", C, F)):
        add(f"blk.{i}.{name}.weight", N, K)
    for name in ("attn_norm", "ffn_norm"):
        w.add_tensor(f"blk.{i}.{name}.weight", np.ones(C, np.float32))
w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
"""

RUN_LLAMA_CPP = """
import json, sys, time
from llama_cpp import Llama
path, threads = sys.argv[1], int(sys.argv[2])
model = Llama(path, n_ctx=512, n_threads=threads, n_threads_batch=threads, n_batch=512,
              verbose=False)
prefill, decode = [], []
for _ in range(3):
    model.reset()
    start = time.perf_counter()
    model.eval([5 + 7 * i % 1000 for i in range(128)])
    prefill.append(128 / (time.perf_counter() - start))
    start = time.perf_counter()
    for i in range(32):
        model.eval([100 + i])
    decode.append(32 / (time.perf_counter() - start))
median = lambda speeds: sorted(speeds)[1]
print(json.dumps(dict(tokens_per_second=median(decode), prefill_tokens_per_second=median(prefill))))
"""


def run(command: Sequence[str | Path]) -> str:
    """The last line that a program prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]}: {(done.stderr or 'failed').strip().splitlines()[-1]}")
    return (done.stdout.strip() or "{}").splitlines()[-1]


def compare(name: str, gguf: Path, python: str, threads: int, rounds: int) -> list[str]:
    """The table's rows of one format: ours, llama.cpp and the bound."""
    ours = [sys.executable, GENERATE, "--checkpoint", gguf, *OURS.split()]
    commands = {"sheaf": ours, "llama.cpp": [python, "-c", RUN_LLAMA_CPP, gguf, str(threads)]}
    runs: dict[str, list[dict]] = {program: [] for program in commands}
    for _ in range(rounds):
        for program, command in commands.items():
            runs[program].append(json.loads(run(command)))
            speed = runs[program][-1]["tokens_per_second"]
            print(f"{name}, {program}: {speed:.1f} tok/s", file=sys.stderr)
    median = lambda program, key: statistics.median(r[key] for r in runs[program])
    rows = []
    for program, results in runs.items():
        each = ", ".join(f"{r['tokens_per_second']:.1f}" for r in results)
        ratios = {}
        for key in ("tokens_per_second", "prefill_tokens_per_second"):
            ratio = median("sheaf", key) / median(program, key)
            ratios[key] = f"**{ratio:.2f}**" if program != "sheaf" else ""
        decode, prefill = ratios.values()
        speed = f"{median(program, 'prefill_tokens_per_second'):.0f}"
        rows.append(f"| {name} | {program} | {each} | {decode} | {speed} | {prefill} |")
    step = median("sheaf", "gigabytes_per_second") / median("sheaf", "tokens_per_second")
    bound = max(r["device_gigabytes_per_second"] for r in runs["sheaf"])
    what = f"bound: {step:.2f} GB a step at {bound:.0f} GB/s"
    return [*rows, f"| {name} | {what} | {bound / step:.1f} | | | |"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="python with llama-cpp-python and gguf")
    parser.add_argument("--folder", type=Path, required=True, help="for llama.cpp's weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    print("| weights | program | decode tok/s, each run | ours / it | prefill tok/s | ours / it |")
    print("|---|---|---|---|---|---|")
    for name in FORMATS:
        gguf = args.folder / f"tinyllama-{name}.gguf"
        if not gguf.exists():
            run([args.python, "-c", WRITE_GGUF, gguf, name.upper()])
        rows = compare(name, gguf, args.python, args.threads, args.rounds)
        print("\n".join(rows), flush=True)


if __name__ == "__main__":
    main()
