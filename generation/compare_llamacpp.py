"""Decoding speed beside llama.cpp's, in turn, on the same GGUF files: TinyLlama-1.1B's shape, with
random weights.

    python generation/compare_llamacpp.py --python PEER/bin/python --folder FOLDER
    python generation/compare_llamacpp.py --python PEER/bin/python --folder FOLDER --second-turn

Prints the first table of BENCHMARKS.md, which plot_decode.py draws; or the time to the first token
of a second turn, 32 tokens after a history of 2,000: without its KV, with that in memory and on
disk (in the page cache), by --kv-store and by llama.cpp's saved states. PEER is an environment with
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

TURNS = """
import ctypes, json, sys, tempfile, time
path, n, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
old = [5 + 7 * i % 1000 for i in range(n)]
new = old + [100 + i for i in range(32)]
times = dict(again=[], memory=[], disk=[])
def timed(name, restore):
    start = time.perf_counter()
    run(restore())
    times[name].append(1e3 * (time.perf_counter() - start))
def report():
    print(json.dumps({name: sorted(values)[1] for name, values in times.items()}))
"""

OUR_TURNS = (
    TURNS
    + """
import torch
import generate
from generation.config import parse_args
from generation.load import load, open_gguf
torch.set_num_threads(threads)
with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
    args = parse_args(f"--checkpoint {path} --temperature 0 --kv-store {folder}".split())
    with open_gguf(args):
        model, tokenizer = load(args, torch.device("cpu"))
        decoder = generate.build_decoder(args, model, tokenizer, n + 64, ())
    history = generate.build_history(args, decoder)
    run = lambda cached: decoder.start(new, cached)
    for _ in range(3):
        history.ids = new
        timed("again", lambda: 0)
        history.save(new[: n + 1])
        history.store.flush()
        timed("memory", lambda: history.find(new))
        history.store.host.clear()
        timed("disk", lambda: history.find(new))
    report()
"""
)

LLAMA_CPP_TURNS = (
    TURNS
    + """
import llama_cpp as api
model = api.Llama(path, n_ctx=n + 64, n_threads=threads, n_threads_batch=threads, n_batch=512,
                  verbose=False)
run, tokens, size = lambda n: model.eval(new[n:]), (ctypes.c_int32 * n)(*old), ctypes.c_size_t()
with tempfile.NamedTemporaryFile() as file:
    name = file.name.encode()
    def from_memory():
        assert api.llama_state_set_data(model.ctx, state, used) == used
        model.n_tokens = n
        return n
    def from_disk():
        assert api.llama_state_load_file(model.ctx, name, tokens, n, ctypes.byref(size))
        model.n_tokens = n
        return n
    for _ in range(3):
        model.reset()
        timed("again", lambda: 0)
        model.reset()
        model.eval(old)
        state = (ctypes.c_uint8 * api.llama_state_get_size(model.ctx))()
        used = api.llama_state_get_data(model.ctx, state, len(state))
        assert api.llama_state_save_file(model.ctx, name, tokens, n)
        for restore in (from_memory, from_disk):
            model.reset()
            timed(restore.__name__[5:], restore)
    report()
"""
)


def run(command: Sequence[str | Path]) -> str:
    """The last line that a program prints."""
    root = GENERATE.parent
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    except OSError as e:
        sys.exit(f"{command[0]}: {e.strerror}")
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


def write_gguf(args: argparse.Namespace, name: str) -> Path:
    """The file with the weights in one format."""
    gguf = args.folder.resolve() / f"tinyllama-{name}.gguf"
    if not gguf.exists():
        run([args.python, "-c", WRITE_GGUF, gguf, name.upper()])
    return gguf


def second_turn(gguf: Path, python: str, threads: int, rounds: int, n: int) -> list[str]:
    """The table's rows: ms to the first token after n tokens of history, medians of the rounds."""
    programs = {"sheaf": (sys.executable, OUR_TURNS), "llama.cpp": (python, LLAMA_CPP_TURNS)}
    runs: dict[str, list[dict]] = {program: [] for program in programs}
    for _ in range(rounds):
        for program, (interpreter, code) in programs.items():
            command = [interpreter, "-c", code, gguf.resolve(), str(n), str(threads)]
            runs[program].append(json.loads(run(command)))
            print(program, runs[program][-1], file=sys.stderr)
    rows = []
    for program, results in runs.items():
        ms = {name: statistics.median(r[name] for r in results) for name in results[0]}
        gain = ", ".join(f"{ms['again'] / ms[name]:.1f}x" for name in ("memory", "disk"))
        rows.append(f"| {program} | {' | '.join(f'{x:.0f}' for x in ms.values())} | {gain} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="python with llama-cpp-python and gguf")
    parser.add_argument("--folder", type=Path, required=True, help="for llama.cpp's weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--second-turn", action="store_true", help="time to its first token")
    args = parser.parse_args()
    if min(args.rounds, args.threads) < 1 or not args.folder.is_dir():
        parser.error("--rounds and --threads must be 1 or more, --folder a folder")
    if args.second_turn:
        gguf = write_gguf(args, "bf16")
        print("| program | prefill again, ms | KV in memory | KV on disk | gain |")
        print("|---|---|---|---|---|")
        print("\n".join(second_turn(gguf, args.python, args.threads, args.rounds, 2000)))
        return
    print("| weights | program | decode tok/s, each run | ours / it | prefill tok/s | ours / it |")
    print("|---|---|---|---|---|---|")
    for name in FORMATS:
        gguf = write_gguf(args, name)
        rows = compare(name, gguf, args.python, args.threads, args.rounds)
        print("\n".join(rows), flush=True)


if __name__ == "__main__":
    main()
