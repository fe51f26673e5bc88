"""Replicas of an Engine behind one HTTP server, on Ray Serve or as processes of this machine.

    python -m serving.cluster --replicas 2 --checkpoint DIR       # Ray Serve; MIN:MAX autoscales
    python -m serving.cluster --replicas 2 --backend mp           # processes of this machine
    python -m serving.cluster --disaggregate 1:2                  # 1 runs prompts, 2 decode
    further flags: those of generate.py --serve

The HTTP server is serving/server.py in this process, its engine a ReplicatedEngine
(replicated_engine.py): a stream survives the death of its replica. Each of N replicas has 1/N of
this machine's CPUs, or a GPU; one that dies is started again, and --backend mp kills one that gives
no sign of life for a minute. With MIN:MAX, Ray Serve adds replicas while they have more than 16
calls each, and removes some while they have fewer.

With --tp T a replica is T ranks (tp_worker.py), each with 1/T of its CPUs or a GPU of its own; on
Ray they are a placement group on one node. If one dies, the others are killed, and their calls
continue on another replica.

Not here: a second HTTP server; if this process ends, its clients' connections break. Nor is there a
password between replicas: the ports of --tp, --disaggregate and Ray are on loopback, but what
arrives there is unpickled, so every user of this machine must be trusted.

When it loses: Ray costs about a millisecond per event. Equivalence (test_all.py): 50 streams over 2
replicas, which are killed with -9 at random moments, == the undisturbed run. Needs:
replicated_engine.py, routing.py; for Ray: pip install "ray[serve]==2.60.0".
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    raise SystemExit("run: python -m serving.cluster --help")

import argparse
import asyncio
import atexit
import importlib
import math
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import TCPStore
from tqdm import tqdm

from serving.batch import Request
from serving.disaggregated import Placement, parse_placement
from serving.disaggregated_replicas import DisaggregatedReplica, DisaggregatedReplicas
from serving.replicated_engine import Replica, ReplicatedEngine, Update, run_follower
from serving.routing import PrefixAndLoad

TARGET_CALLS = 16  # per replica, of autoscaling
BEAT_SECONDS = 5.0  # between two signs of life of a replica, in each call
SILENCE_SECONDS = 30.0  # without one, twice in a row; then the replica is killed
STEP_SECONDS = 300.0  # of a step of an engine; then its replica gives no sign of life
MAX_RESTART_SECONDS = 60.0  # before a replica that died at its start is started again

# --------------------------------------------------------------------------------------------------
# Ranks of a replica
# --------------------------------------------------------------------------------------------------


def rank_store() -> TCPStore:
    """A store in this process, in which ranks on this machine rendezvous, as in torchrun's. A
    TCPStore that opens its socket itself listens on all interfaces, but ranks unpickle."""
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    options = dict(is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return TCPStore(host, port, **options)


def rank_env(rank: int, tp: int, store: TCPStore) -> dict[str, str]:
    """The environment that torchrun would give a rank. It sees no GPU but its own."""
    env = dict(RANK=rank, LOCAL_RANK=0, WORLD_SIZE=tp, TORCHELASTIC_USE_AGENT_STORE=True)
    env |= dict(MASTER_ADDR=store.host, MASTER_PORT=store.port)
    return {name: str(value) for name, value in env.items()}


# --------------------------------------------------------------------------------------------------
# Replicas on Ray Serve
# --------------------------------------------------------------------------------------------------


def ray_options(
    low: int, high: int, cpus: float, gpus: int, tp: int, max_calls: int
) -> dict[str, Any]:
    """Options of the deployment: autoscaled if low < high; a placement group if a replica has
    several ranks. cpus, gpus: of a rank."""
    bounds = dict(min_replicas=low, max_replicas=high, target_ongoing_requests=TARGET_CALLS)
    bounds |= dict(look_back_period_s=15, upscale_delay_s=5)  # seconds
    options = {"autoscaling_config": bounds} if low < high else {"num_replicas": low}
    if tp > 1:
        bundles = [{"CPU": cpus} | ({"GPU": gpus} if gpus else {}) for _ in range(tp)]
        options |= dict(placement_group_bundles=bundles, placement_group_strategy="STRICT_PACK")
    resources = {"num_cpus": cpus, "num_gpus": gpus}
    return dict(max_ongoing_requests=max_calls, ray_actor_options=resources) | options


class RayReplica(Replica):
    """A deployment of Ray Serve. With --tp, rank 0 starts the others in the other bundles of its
    placement group; they die with it, and it with them."""

    def __init__(self, argv: list[str], threads: int, tp: int, resources: dict[str, float]):
        """resources: num_cpus and num_gpus of each rank."""
        import ray

        if tp > 1:
            self.store = rank_store()
            for rank in range(1, tp):
                options = ray_rank_options(rank, resources, rank_env(rank, tp, self.store))
                task = ray.remote(run_follower).options(**options).remote(argv, threads)
                threading.Thread(target=_exit_with, args=(task,), daemon=True).start()
            os.environ.update(rank_env(0, tp, self.store))
        super().__init__(argv, threads)


def ray_rank_options(rank: int, resources: dict[str, float], env: dict[str, str]) -> dict[str, Any]:
    """Options of a task in a bundle of the placement group of this process."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = PlacementGroupSchedulingStrategy(ray.util.get_current_placement_group(), rank)
    more = dict(scheduling_strategy=bundle, max_retries=0, runtime_env={"env_vars": env})
    return resources | more


def _exit_with(task: Any) -> None:
    """End this process if a Ray task fails."""
    import ray

    try:
        ray.get(task)
    except ray.exceptions.RayError:
        os._exit(1)


class RayReplicas:
    """Actors of Ray Serve, on the cluster of RAY_ADDRESS or on one that is started here."""

    def __init__(self, argv: list[str], threads: int, tp: int, options: dict[str, Any]):
        """options: ray_options. ValueError: a replica does not start."""
        import ray
        from ray import serve
        from ray.serve.config import RequestRouterConfig

        paths = {"env_vars": {"PYTHONPATH": str(Path(__file__).parents[1])}}
        ray.init(include_dashboard=False, log_to_driver=False, runtime_env=paths)
        serve.start(proxy_location="Disabled")
        router = RequestRouterConfig(request_router_class="serving.routing.PrefixRouter")
        deployment = serve.deployment(RayReplica).options(request_router_config=router, **options)
        replica = deployment.bind(argv, threads, tp, options["ray_actor_options"])
        try:
            handle = serve.run(replica, name="sheaf", route_prefix=None)
        except RuntimeError:
            status = serve.status().applications["sheaf"].deployments["RayReplica"]
            raise ValueError(f"no replica starts: {status.message.splitlines()[-1]}") from None
        atexit.register(serve.delete, "sheaf")  # a cluster of RAY_ADDRESS would keep it
        self.handle = handle.options(stream=True)

    def describe(self) -> tuple[int, int]:
        """As Replica.describe."""
        return self.handle.options(stream=False).describe.remote().result()

    async def call(self, *args: Any) -> AsyncIterator[Update]:
        """Replica.generate of the replica that PrefixRouter chooses. ConnectionError if it dies."""
        from ray.exceptions import RayError, RayTaskError

        updates = self.handle.generate.remote(*args)
        try:
            async for update in updates:
                yield update
        except RayTaskError as e:  # an exception of the replica itself
            raise e.cause from None
        except RayError as e:  # actor, worker, node or object lost
            raise ConnectionError(f"the replica died ({type(e).__name__})") from None
        finally:
            updates.cancel()


# --------------------------------------------------------------------------------------------------
# Replicas as processes
# --------------------------------------------------------------------------------------------------


class LocalReplica:
    """The processes of a replica, which live and die together: rank 0, and with --tp the others."""

    def __init__(
        self, folder: str, make: Any, argv: list[str], threads: int, tp: int, gpu: int | None
    ):
        """folder: of sockets. make(argv, threads): its Replica. gpu: the first of its tp GPUs;
        None: CPUs."""
        context = multiprocessing.get_context("forkserver")
        self.pipe, end = context.Pipe(duplex=False)
        self.store = rank_store() if tp > 1 else None
        self.processes = []
        for rank in range(tp):
            env = {} if tp == 1 else rank_env(rank, tp, self.store)
            env |= {} if gpu is None else visible_gpu(gpu + rank)
            args = env, argv, threads, *((folder, end, make) if rank == 0 else ())
            self.processes.append(context.Process(target=_run_rank, args=args, daemon=True))
            self.processes[-1].start()
        end.close()
        self.pid = self.processes[0].pid
        self.socket = f"{folder}/{self.pid}"

    def describe(self) -> tuple[int, int]:
        """As Replica.describe, once it has started. ValueError: it does not."""
        while not self.pipe.poll(0.5):
            if not self.is_alive():
                self.kill()
        try:
            description = self.pipe.recv()
        except EOFError:
            raise ValueError("a replica does not start; its error is above") from None
        if isinstance(description, ValueError):
            raise description
        return description

    def is_alive(self) -> bool:
        """Other ranks than 0 end without an error only if rank 0 reports one."""
        return self.processes[0].is_alive() and not any(p.exitcode for p in self.processes)

    def accepts_calls(self) -> bool:
        return self.is_alive() and self.has_started()

    def has_started(self) -> bool:
        """Whether it accepts calls, or did before it died."""
        return os.path.exists(self.socket)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


class LocalReplicas:
    """Processes of this machine; a replica that dies is started again, later and later if it dies
    at its start. A call is a connection to the Unix socket of a replica: the arguments of
    Replica.generate, then its updates, and BEAT between them. A replica that gives no sign of life,
    stopped or hung in a driver, is killed, so that its calls continue elsewhere."""

    def __init__(
        self, n: int, argv: list[str], threads: int, tp: int, gpus: int,
        make: Callable[[int], Any] = lambda i: Replica,
    ):  # fmt: skip
        """gpus: of each rank, 0 or 1. make(i): what makes replica i, see LocalReplica. ValueError:
        a replica does not start."""
        self.policy = PrefixAndLoad()
        self.folder = tempfile.TemporaryDirectory()  # of sockets; other users cannot enter it
        # a process then starts in 0.2 s, not in 2
        modules = ("serving.build", "serving.disaggregated_replicas", "ray.serve.request_router")
        multiprocessing.set_forkserver_preload([*modules, *["parallel"] * (tp > 1)])
        args, gpu = (argv, threads, tp), lambda i: i * tp if gpus else None
        self.start = lambda i: LocalReplica(self.folder.name, make(i), *args, gpu(i))
        self.replicas = [self.start(i) for i in range(n)]
        self.description = [replica.describe() for replica in self.replicas][0]
        self.failures = [0] * n  # starts of each replica that failed, in a row
        self.restart_times: list[float | None] = [None] * n  # of those that are dead
        self.stopped = threading.Event()
        atexit.register(self.stopped.set)
        threading.Thread(target=self._restart_dead, daemon=True).start()

    def describe(self) -> tuple[int, int]:
        """As Replica.describe."""
        return self.description

    def _restart_dead(self) -> None:
        while not self.stopped.wait(0.5):
            self.restart_dead(time.monotonic())

    def restart_dead(self, now: float) -> None:
        """Start the replicas that have died, those that died at their start after a while."""
        for i, replica in enumerate(self.replicas):
            if replica.is_alive():
                continue
            if self.restart_times[i] is None:
                replica.kill()
                n = self.failures[i] = 0 if replica.has_started() else self.failures[i] + 1
                delay = min(MAX_RESTART_SECONDS, 2.0**n) if n else 0.0
                self.restart_times[i] = now + delay
                if n:
                    text = f"replica {i} died at its start, {n} times in a row; next try in"
                    print(f"{text} {delay:.0f} s", file=sys.stderr, flush=True)
            if now >= self.restart_times[i]:
                self.restart_times[i] = None
                self.replicas[i] = self.start(i)

    async def choose(self, ids: Sequence[int], among: slice = slice(None)) -> LocalReplica:
        """The best of some replicas for a prompt; waits until one is alive."""
        while not (alive := {r.pid: r for r in self.replicas[among] if r.accepts_calls()}):
            await asyncio.sleep(0.1)
        pid = self.policy.choose(ids, alive)[0]
        self.policy.record(ids, pid)
        return alive[pid]

    async def call(self, requests: list[Request], *args: Any) -> AsyncIterator[Update]:
        """Replica.generate of the best replica. ConnectionError if it dies."""
        replica = await self.choose(requests[0].ids)
        async with aclosing(self.updates(replica, requests, *args)) as updates:
            async for update in updates:
                yield update

    async def updates(self, replica: LocalReplica, *args: Any) -> AsyncIterator[Update]:
        """Replica.generate of a replica. ConnectionError if it dies."""
        pid = replica.pid
        self.policy.calls[pid] += 1
        try:
            reader, writer = await asyncio.open_unix_connection(replica.socket)
            try:
                await _send(writer, args)
                while isinstance(update := await _receive_alive(reader), (Update, Beat)):
                    if isinstance(update, Update):
                        yield update
            finally:
                writer.close()
        except (OSError, EOFError):
            replica.kill()
            self.policy.forget(pid)
            raise ConnectionError("the replica died") from None
        finally:
            self.policy.calls[pid] -= 1
        if update is not None:
            raise update


def visible_gpu(gpu: int) -> dict[str, str]:
    """The environment of a process that has one of the GPUs that are visible here."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[gpu] if visible else str(gpu)}


def _run_rank(
    env: dict[str, str], argv: list[str], threads: int, folder: str = "", pipe: Any = None,
    make: Callable[..., Replica] = Replica,
) -> None:  # fmt: skip
    """A process of a replica, until its parent ends. Rank 0 has a pipe: it sends its description or
    its ValueError, then accepts calls."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the server drains first
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    os.environ.update(env)
    tqdm.set_lock(threading.RLock())  # instead of a semaphore, which a killed process leaks
    if pipe is None:
        return run_follower(argv, threads)
    try:
        replica = make(argv, threads)
    except ValueError as e:
        return pipe.send(e)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    asyncio.run(_accept_calls(replica, f"{folder}/{os.getpid()}", pipe))


class Beat(NamedTuple):
    """A sign of life."""


async def _accept_calls(replica: Replica, path: str, pipe: Any) -> None:
    async def reply(args: tuple, writer: asyncio.StreamWriter) -> None:
        try:
            async with aclosing(replica.generate(*args)) as updates:
                async for update in updates:
                    await _send(writer, update)
            await _send(writer, None)
        except Exception as e:
            known = isinstance(e, (ValueError, ConnectionError))
            await _send(writer, e if known else RuntimeError(repr(e)))

    async def beat(writer: asyncio.StreamWriter) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            if replica.engine is None or replica.engine.step_seconds() < STEP_SECONDS:
                writer.write(_packed(Beat()))

    async def call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        beats = asyncio.create_task(beat(writer))
        task = asyncio.create_task(reply(await _receive(reader), writer))
        with suppress(ConnectionError):
            await reader.read()  # until the caller closes the connection
        task.cancel()
        beats.cancel()
        writer.close()

    async with await asyncio.start_unix_server(call, f"{path}.new", backlog=2048) as server:
        os.rename(f"{path}.new", path)  # now it gets calls
        pipe.send(await replica.describe())
        await server.serve_forever()


def _packed(value: Any) -> bytes:
    data = pickle.dumps(value)
    return struct.pack("<Q", len(data)) + data


async def _send(writer: asyncio.StreamWriter, value: Any) -> None:
    writer.write(_packed(value))
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> Any:
    (size,) = struct.unpack("<Q", await reader.readexactly(8))
    return pickle.loads(await reader.readexactly(size))


async def _receive_alive(reader: asyncio.StreamReader) -> Any:
    """As _receive. EOFError if nothing comes for SILENCE_SECONDS, twice: the first time this
    process may have been stopped itself."""
    task = asyncio.create_task(_receive(reader))
    try:
        for _ in range(2):
            await asyncio.wait([task], timeout=SILENCE_SECONDS)
            if task.done():
                return task.result()
    finally:
        task.cancel()
    raise EOFError("no sign of life")


# --------------------------------------------------------------------------------------------------
# main
# --------------------------------------------------------------------------------------------------


def start_replicas(own: argparse.Namespace, args: Any, argv: list[str]) -> Any:
    """RayReplicas or LocalReplicas. ValueError names a wrong flag or what is missing."""
    import torch

    if args.finetune is not None:
        raise ValueError("--finetune: every replica would train it; use generate.py --serve")
    if args.cascade is not None:
        raise ValueError("--cascade: replicas have one model; use generate.py --serve")
    if args.runtime_adapters is not None:
        raise ValueError("--runtime-adapters: every replica has its own; use generate.py --serve")
    placement = check_disaggregate(own, args)
    low, _, high = own.replicas.partition(":")
    numbers = [low, high or low]
    if not all(n.isdecimal() and int(n) for n in numbers) or int(numbers[0]) > int(numbers[1]):
        raise ValueError(f"--replicas must be N or MIN:MAX, not {own.replicas!r}")
    low, high = map(int, numbers)
    tp = args.tp or 1
    cpus = len(os.sched_getaffinity(0)) / (high * tp)  # of a rank
    cpus = math.floor(cpus) if cpus > 1 else math.floor(100 * cpus) / 100
    gpus, threads = int(torch.cuda.is_available() and args.device in (None, "cuda")), int(cpus) or 1
    if own.backend == "mp":
        if low < high:
            raise ValueError("--backend mp has no autoscaling; use --replicas N")
        if gpus and high * tp > torch.cuda.device_count():
            where = f"--replicas {high}" + (f" --tp {tp}" if tp > 1 else "")
            raise ValueError(f"{where}: there are {torch.cuda.device_count()} GPUs")
        if placement is None:
            return LocalReplicas(high, argv, threads, tp, gpus)
        store, n = rank_store(), placement.n_prefill
        address = store.host, store.port

        def make(i: int) -> Any:
            return partial(DisaggregatedReplica, i < n, own.replicate, address)

        replicas = LocalReplicas(high, argv, threads, tp, gpus, make)
        return DisaggregatedReplicas(replicas, n, store)
    try:
        import ray.serve  # noqa: F401
    except ImportError:
        raise ValueError(
            'serving.cluster requires ray: pip install "ray[serve]==2.60.0", or use --backend mp'
        ) from None
    max_calls = args.max_queue + args.max_num_seqs
    return RayReplicas(argv, threads, tp, ray_options(low, high, cpus, gpus, tp, max_calls))


def check_disaggregate(own: argparse.Namespace, args: Any) -> Placement | None:
    """--disaggregate P:D, and the defaults of --replicas and --backend. ValueError names a wrong
    flag."""
    if own.disaggregate is None:
        if own.replicate:
            raise ValueError("--replicate requires --disaggregate P:D")
        own.replicas, own.backend = own.replicas or "2", own.backend or "ray"
        return None
    flag = f"--disaggregate {own.disaggregate}"
    if own.disaggregate == "auto":
        raise ValueError(f"{flag} is for generate.py --bench-serving; give P:D")
    placement = parse_placement(own.disaggregate)
    if own.backend == "ray":
        raise ValueError(f"{flag} requires --backend mp: its replicas are processes")
    if own.replicas is not None:
        raise ValueError(f"{flag} is the number of replicas; remove --replicas")
    if (args.tp or 1) > 1 or placement.prefill_tp > 1 or placement.decode_tp > 1:
        raise ValueError(f"{flag}: a replica has one rank here; give P:D, and no --tp")
    if own.replicate and not args.prefix_cache:
        raise ValueError("--replicate sends KV to a prefix cache; remove --set prefix_cache=false")
    own.replicas, own.backend = str(placement.workers[-1].stop), "mp"
    return placement


def main(argv: list[str] | None = None) -> int:
    from generation.config import parse_args
    from generation.load import checkpoint_config, dummy_config, open_gguf
    from generation.prompt import text_format
    from huggingface.tokenizer import DummyTokenizer, load_tokenizer
    from serving.build import check_engine_flags, fine_tunes, served_model
    from serving.entrypoints import bind, serve_engine

    parser = argparse.ArgumentParser(
        prog="python -m serving.cluster", description=__doc__.split("\n")[0], allow_abbrev=False,
        epilog="All other flags are those of generate.py --serve.",
    )  # fmt: skip
    parser.add_argument("--replicas", metavar="N|MIN:MAX", help="default: 2")
    parser.add_argument("--backend", choices=("ray", "mp"), help="default: ray")
    parser.add_argument(
        "--disaggregate", metavar="P:D", help="P replicas run prompts, D decode (--backend mp)"
    )
    parser.add_argument(
        "--replicate", action="store_true",
        help="with --disaggregate: send each step's KV back, not only full blocks",
    )  # fmt: skip
    own, rest = parser.parse_known_args(argv)
    rest = rest if any(a.startswith("--serve") for a in rest) else ["--serve", *rest]
    try:
        args = parse_args(rest)
        check_engine_flags(args)
        listener = bind(args)
        with open_gguf(args):  # each replica opens the file for itself
            config = dummy_config(args.dummy) if args.dummy else checkpoint_config(args.checkpoint)
            V = config.vocab_size
            tokenizer = DummyTokenizer(V) if args.dummy else load_tokenizer(args.checkpoint)
            format = text_format(args, config, tokenizer)
            adapters = fine_tunes(args, format, tokenizer)
            replicas = start_replicas(own, args, rest)
            model = served_model(args, tokenizer, format, adapters, *replicas.describe())
        where = f"{own.replicas} replicas"
        serve_engine(args, partial(ReplicatedEngine, replicas.call), model, listener, where)
    except ValueError as e:
        print(f"serving.cluster: error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    # under the name by which the replicas' processes import it
    sys.exit(importlib.import_module("serving.cluster").main())
