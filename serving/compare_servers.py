"""The server of generate.py --serve beside its own Engine without HTTP, and beside `transformers
serve`: the same greedy requests, all at once, as text.

    python -m serving.compare_servers --checkpoint DIR [--requests N] [--peer PYTHON] [--rounds N]

Each round runs, in turn: the Engine alone in this process, the server in a process of its own with
a client of N streams in this one, and the peer's server the same way. PYTHON is an interpreter that
has transformers[serving]. Prints the tokens that were generated, tokens per second, time to first
token, and time between events with text, medians over the rounds. Needs: httpx.
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
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from serving.replay import percentile
from training.flags import check_positive

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
    from serving.batch import build_engine
    from serving.build import engine_options
    from serving.replay import replay, replay_metrics
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
        yield {"tokens": sum(lengths), "tok/s": m["output_tokens_per_second"],
               "TTFT p50": m["ttft_seconds_p50"], "TTFT p99": m["ttft_seconds_p99"],
               "gap p50": m["itl_seconds_p50"], "gap p99": m["itl_seconds_p99"]}  # fmt: skip


@contextmanager
def running(argv: list[str], seconds: float = 120.0) -> Iterator[None]:
    """A server process that answers at PORT. RuntimeError if it ends, or does not within a time."""
    environment, null = os.environ | {"HF_HUB_OFFLINE": "1"}, subprocess.DEVNULL
    process = subprocess.Popen(argv, env=environment, stdout=null, stderr=null)
    end = time.monotonic() + seconds
    try:
        while not is_healthy():
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"no server answers at port {PORT}: {' '.join(argv)}")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait()


def is_healthy() -> bool:
    """Whether a server answers 200 to GET /health at PORT."""
    try:
        return httpx.get(f"http://127.0.0.1:{PORT}/health").status_code == 200
    except httpx.TransportError:
        return False


async def events(body: dict[str, Any], port: int) -> AsyncIterator[dict[str, Any]]:
    """The server-sent events of a completion, less [DONE]."""
    data = json.dumps(body)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write((head + data).encode())
    status = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in status, status
    while line := await reader.readline():
        if line.startswith(b"data: {"):  # chunks of HTTP end where events do
            yield json.loads(line[6:])
    writer.close()


async def client(
    texts: list[str], lengths: list[int], fields: dict[str, Any], port: int = PORT
) -> Result:
    """All requests at once, each a stream. fields: further ones of the body. Tokens are those of
    the server's usage: a server without ignore_eos may end earlier."""
    start, firsts, gaps, tokens = time.perf_counter(), [], [], []

    async def stream(text: str, n: int) -> None:
        body, last = dict(prompt=text, max_tokens=n, temperature=0, stream=True), None
        async for event in events(body | fields, port):
            if usage := event.get("usage"):
                tokens.append(usage["completion_tokens"])
            if any(choice["text"] for choice in event["choices"]):
                now = time.perf_counter()
                if last is None:
                    firsts.append(now - start)
                else:
                    gaps.append(now - last)
                last = now

    await asyncio.gather(*map(stream, texts, lengths))
    assert len(tokens) == len(texts), "a stream has no usage"
    seconds = time.perf_counter() - start
    return {"tokens": sum(tokens), "tok/s": sum(tokens) / seconds,
            "TTFT p50": percentile(firsts, 50), "TTFT p99": percentile(firsts, 99),
            "gap p50": percentile(gaps, 50), "gap p99": percentile(gaps, 99)}  # fmt: skip


def compare(args: argparse.Namespace) -> None:
    """Run all rounds, and print the table."""
    folder, rng = args.checkpoint.resolve(), random.Random(1)
    texts = prompts(folder, args.requests, (16, 128))
    lengths = [rng.randint(16, 64) for _ in texts]
    server = [sys.executable, "generate.py", "--serve", str(PORT), "--checkpoint", str(folder)]
    server += ["--dtype", args.dtype, "--set", "prefix_cache=false"]
    usage = {"stream_options": {"include_usage": True}}
    programs = {"server": (server, usage | {"ignore_eos": True})}
    if args.peer:
        peer = [args.peer, "-m", "transformers.cli.transformers", "serve", str(folder)]
        peer += ["--port", str(PORT), "--continuous-batching", "--device", "cpu"]
        peer += ["--dtype", DTYPES[args.dtype]]
        programs["transformers serve"] = (peer, {"model": str(folder)})  # always has usage
    results: dict[str, list[Result]] = {name: [] for name in ("Engine", *programs)}
    engine = bare_engine(folder, texts, lengths, args.dtype)
    for _ in range(args.rounds):
        results["Engine"].append(next(engine))
        for name, (argv, fields) in programs.items():
            with running(argv):
                asyncio.run(client(texts, lengths, fields))  # warm-up
                results[name].append(asyncio.run(client(texts, lengths, fields)))
    columns = ["tokens", "tok/s", "TTFT p50", "TTFT p99", "gap p50", "gap p99"]
    print(f"{args.requests} requests\n{'':20}" + "".join(f"{c:>10}" for c in columns))
    for name, rounds in results.items():
        medians = (statistics.median(r[c] for r in rounds) for c in columns)
        print(f"{name:20}" + "".join(f"{x:10.3f}" for x in medians))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", help="a Python with transformers[serving]")
    args = parser.parse_args()
    try:
        check_positive(args, "requests", "rounds")
        compare(args)
    except (ValueError, RuntimeError) as e:
        parser.exit(1, f"error: {e}\n")


if __name__ == "__main__":
    main()
