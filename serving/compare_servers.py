"""The server of generate.py --serve beside its own Engine without HTTP, and beside `transformers
serve`: the same greedy requests, all at once, as text.

    python -m serving.compare_servers --checkpoint DIR [--requests N] [--peer PYTHON] [--rounds N]

Each round runs, in turn: the Engine alone in this process, the server in a process of its own with
a client of N streams in this one, and the peer's server the same way. PYTHON is an interpreter that
has transformers[serving]. Prints tokens per second, time to first token, and time between events,
medians over the rounds. Needs: httpx.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    raise SystemExit("run: python -m serving.compare_servers --help")

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from serving.batch import percentile

Result = dict[str, float]
PORT = 8765
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def prompts(folder: Path, n: int, tokens: tuple[int, int]) -> list[str]:
    """n texts of random length, pieces of this repository's sources."""
    from huggingface.tokenizer import load_tokenizer

    text, rng = Path("model.py").read_text() + Path("paged_kv.py").read_text(), random.Random(0)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(text, bos=False)
    starts = [rng.randrange(len(ids) - tokens[1]) for _ in range(n)]
    return [tokenizer.decode(ids[at : at + rng.randint(*tokens)]) for at in starts]


def bare_engine(folder: Path, texts: list[str], lengths: list[int], dtype: str) -> Iterator[Result]:
    """The Engine of `generate.py --batch`, in this process; one result per round."""
    import torch

    from generation.config import parse_args
    from generation.load import load
    from paged_kv import SamplingParams
    from serving.batch import build_engine, replay, replay_metrics
    from serving.run import engine_options
    from serving.traces import Arrival, prompt_of

    args = parse_args(["--checkpoint", str(folder), "--dtype", dtype, "--batch", "x"])
    with torch.inference_mode():
        model, tokenizer = load(args, torch.device("cpu"))
        engine = build_engine(model, **engine_options(args, model) | {"prefix_cache": False})
        trace = [Arrival(0.0, prompt_of(tokenizer.encode(t)), n) for t, n in zip(texts, lengths)]
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        replay(engine, trace, params)  # warm-up
    while True:
        with torch.inference_mode():
            m = replay_metrics(engine, trace, params)
        yield {"tok/s": m["output_tokens_per_second"], "TTFT p50": m["ttft_seconds_p50"],
               "TTFT p99": m["ttft_seconds_p99"], "gap p50": m["itl_seconds_p50"],
               "gap p99": m["itl_seconds_p99"]}  # fmt: skip


@contextmanager
def running(argv: list[str]) -> Iterator[None]:
    """A server process that answers at PORT."""
    process = subprocess.Popen(
        argv,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(600):
            try:
                if httpx.get(f"http://127.0.0.1:{PORT}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait()


async def client(texts: list[str], lengths: list[int], fields: dict[str, Any]) -> Result:
    """All requests at once, each a stream. fields: further ones of the body."""
    start, firsts, gaps = time.perf_counter(), [], []

    async def stream(text: str, n: int) -> None:
        body = json.dumps(fields | dict(prompt=text, max_tokens=n, temperature=0, stream=True))
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
        writer.write((head + body).encode())
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        last = 0.0
        while data := await reader.read(2**16):
            if b'"text"' in data:
                now = time.perf_counter()
                firsts.append(now - start) if not last else gaps.append(now - last)
                last = now
        writer.close()

    await asyncio.gather(*map(stream, texts, lengths))
    seconds = time.perf_counter() - start
    return {"tok/s": sum(lengths) / seconds, "TTFT p50": percentile(firsts, 50),
            "TTFT p99": percentile(firsts, 99), "gap p50": percentile(gaps, 50),
            "gap p99": percentile(gaps, 99)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", help="a Python with transformers[serving]")
    args = parser.parse_args()
    folder, rng = args.checkpoint.resolve(), random.Random(1)
    texts = prompts(folder, args.requests, (16, 128))
    lengths = [rng.randint(16, 64) for _ in texts]
    server = [sys.executable, "generate.py", "--serve", str(PORT), "--checkpoint", str(folder)]
    programs = {
        "server": (
            [*server, "--dtype", args.dtype, "--set", "prefix_cache=false"],
            {"ignore_eos": True},
        )
    }
    if args.peer:
        peer = [args.peer, "-m", "transformers.cli.transformers", "serve", str(folder), "--port"]
        peer += [
            str(PORT),
            "--continuous-batching",
            "--dtype",
            DTYPES[args.dtype],
            "--device",
            "cpu",
        ]
        programs["transformers serve"] = (peer, {"model": str(folder)})
    results: dict[str, list[Result]] = {name: [] for name in ("Engine", *programs)}
    engine = bare_engine(folder, texts, lengths, args.dtype)
    for _ in range(args.rounds):
        results["Engine"].append(next(engine))
        for name, (argv, fields) in programs.items():
            with running(argv):
                asyncio.run(client(texts, lengths, fields))  # warm-up
                results[name].append(asyncio.run(client(texts, lengths, fields)))
    columns = ["tok/s", "TTFT p50", "TTFT p99", "gap p50", "gap p99"]
    print(f"{args.requests} requests\n{'':20}" + "".join(f"{c:>10}" for c in columns))
    for name, rounds in results.items():
        medians = (statistics.median(r[c] for r in rounds) for c in columns)
        print(f"{name:20}" + "".join(f"{x:10.3f}" for x in medians))


if __name__ == "__main__":
    main()
