"""Train a Llama- or DeepSeek-style model on text, in one process or under torchrun.

    python train.py                              the standard library's source -> runs/stdlib
    python train.py --data A.jsonl=3 --data B --pack --model small --steps 2000 --out runs/mine
    torchrun --nproc-per-node 8 --max-restarts 9 train.py --resume auto --tp 2 --zero 3 ...
                                                 tensor parallel over 2 ranks, ZeRO-3 over 4 data
                                                 parallel ranks; restarted after a failure
    python train.py --out runs/mine --export     the newest checkpoint as a Hugging Face folder
    python train.py --init runs/mine --task sft --data chats.jsonl --out runs/chat
                                                 then --task dpo or grpo; --lora 8 trains adapters
    python train.py --init checkpoints/small --upcycle 8 --out runs/moe
                                                 MoE: each MLP becomes 8 experts, copies of it
    python train.py --train-draft-head --init checkpoints/small --out runs/head
                                                 a draft head for speculative decoding
    python train.py --diloco 100 --diloco-rendezvous FOLDER --diloco-workers 4 --out RUN0
                                                 worker 0; start --diloco-worker 1, 2, 3 elsewhere.
                                                 They synchronize every 100 steps (diloco.py)

A run reads the documents, trains a tokenizer on them, writes token files, and then loops: batch,
gradient accumulation over micro-batches, clipping, AdamW, periodic validation and checkpoints. OUT
holds metrics.jsonl and checkpoints/; when the run ends or is stopped, it is also a Hugging Face
folder (config.json, model.safetensors in bf16, tokenizer) that generate.py and transformers open.
--fp8 and --qat change the matmuls of training, not the format of the saved weights.

Guarantees, tested by test_all.py:

- A batch is a pure function of (seed, step, sample index). The loader has no state, so the losses
  of a resumed run are bitwise those of an uninterrupted one (on CPU).
- The loss of a step is the mean over its *tokens*: every micro-batch's sum is divided by the token
  count of the whole step on all ranks, so micro-batch size and rank count change only rounding.
- Parallelism (--tp --cp --ep --zero ..., parallel_dims.py) changes only rounding: one seed gives
  the same weights and batches under every layout, and a checkpoint resumes under any other.
  Exception: --aux-loss is computed per micro-batch.
- With --recompute and --offload results are bitwise the same; --loss-chunk changes only rounding.
- A checkpoint is written atomically and verified by sha256 before it is loaded. SIGTERM and Ctrl-C
  save and exit; after kill -9 of any rank at any moment the previous checkpoint is intact.

Files in training/: flags, dataset and data, build, step, state, checkpoint, recovery, optimizers,
metrics; recompute, chunked_loss, offload (memory); lora, tuning (fine-tuning). In parallelism/:
dist_env, parallel_dims.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent
for folder in "huggingface generation serving quantization training parallelism".split():
    spec = importlib.util.find_spec(folder)  # an installed package of the same name comes first
    if spec.submodule_search_locations[0] != str(ROOT / folder):
        sys.exit(f"train.py: error: {spec.origin} shadows {folder}/; uninstall that package")

from model import Transformer
from parallelism.dist_env import DistEnv, init_distributed
from parallelism.parallel_dims import ParallelDims
from training.build import build_model, build_optimizer, compile_model, meta_model, model_config
from training.build import offload_folder
from training.checkpoint import Checkpoints
from training.dataset import TOKENIZER_FILES, NextToken, Dataset, prepare_task, prepare_text
from training.draft_head import train_draft_head
from training.flags import DRAFT_HEAD, FIXED, SAVED, flag, parse_args
from training.flags import validate_diloco_flags, resolve_expert_flags, resolve_flags
from training.metrics import Metrics, PeakMemory, flops_per_token, peak_flops, plot, profile_step
from training.metrics import progress_bar, summary, summary_writer
from training.optimizers import LossScaler, learning_rate
from training.recovery import (
    Diverged,
    Guard,
    MemoryCheckpoint,
    Watchdog,
    stop_on_signals,
    stragglers,
)
from training.state import CHECKPOINTS, DiLoCoWorker, State, export, saved_run
from training.step import LoadBalancer, accumulate, make_attend, update, validate
from training.tuning import build_objective

RUN_ID = "run.id"  # file in OUT with a random id of the run
SIGTERM_GRACE = 10.0  # seconds for a step to finish after SIGTERM before the state is dumped
EXIT_HANG = 75  # exit code of a rank that timed out: EX_TEMPFAIL, try again


def resolve_args(args: argparse.Namespace) -> None:
    """With --resume, fill args from the checkpoint. ValueError if OUT or a flag conflicts with
    the run."""
    saved = saved_run(args.out)
    if args.auto and saved is None:  # there may still be a checkpoint in memory
        args.resume = None
    if args.resume is None:
        check_output_dir(args.out)
        resolve_flags(args)
        return
    if saved is None:
        raise ValueError(
            f"--resume: {args.out / CHECKPOINTS} has no checkpoint; nothing was saved yet, start "
            "without --resume"
        )
    run = saved[2]["run"]
    for name, key in SAVED.items():
        if flag(name) not in args.given:  # a run saved before the flag existed lacks its key
            setattr(args, name, run.get(key, getattr(args, name)))
    if args.dtype == "auto":
        args.dtype = run["dtype"]
    for name in changed_settings(args, run):
        raise ValueError(
            f"{flag(name)} {getattr(args, name)} differs from the run's {run.get(SAVED[name])}; "
            "omit it, or start a new run in another --out"
        )
    folder = args.memory_checkpoint_dir
    args.init, args.memory_checkpoint_dir = (p and Path(p) for p in (args.init, folder))
    resolve_flags(args)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that a checkpoint stores and --resume restores, as JSON."""
    run = {key: getattr(args, name) for name, key in SAVED.items()}
    return {key: str(x.resolve()) if isinstance(x, Path) else x for key, x in run.items()}


def changed_settings(args: argparse.Namespace, run: Mapping[str, Any]) -> list[str]:
    """Names of the FIXED arguments that differ from the saved run's. An argument that the run lacks
    (saved before the flag existed) is compared only if its flag is given."""
    known = [name for name in FIXED if SAVED[name] in run or flag(name) in args.given]
    return [name for name in known if settings(args)[SAVED[name]] != run.get(SAVED[name])]


def check_output_dir(out: Path) -> None:
    """ValueError if OUT holds results that a new run would overwrite."""
    if (saved := saved_run(out)) is not None:
        raise ValueError(
            f"--out {out}: holds a run of {saved[1]} steps; continue it with --resume, or choose "
            "another folder"
        )
    existing = {path.name for path in out.glob("*.safetensors")}
    if existing == {DRAFT_HEAD}:
        raise ValueError(f"--out {out}: holds a draft head; choose another folder")
    if existing:
        raise ValueError(f"--out {out}: holds a model but no run to resume; choose another folder")


def train(args: argparse.Namespace) -> None:
    """Set up and run training; every stage is one call."""
    resolve_args(args)
    env = init_distributed(args)
    config = model_config(args)
    resolve_expert_flags(args, config)
    if args.tensorboard:
        summary_writer()  # fail now if tensorboard is not installed
    layout = ParallelDims(args, config, env.world, env.device.type)
    validate_diloco_flags(args, layout.dp_size)
    if args.seq_len <= config.n_mtp_layers:
        raise ValueError(
            f"--seq-len {args.seq_len} must be greater than the model's {config.n_mtp_layers} MTP "
            "layers"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    for leftover in args.out.glob(".*.tmp") if env.rank == 0 else ():
        leftover.unlink()  # temporary file of a save that was killed
    if env.rank == 0 and args.memory_checkpoint_every and not (args.out / RUN_ID).exists():
        (args.out / RUN_ID).write_text(os.urandom(8).hex())
    dataset = (prepare_text if args.task == "text" else prepare_task)(args, config, env)
    if args.train_draft_head:
        train_draft_head(args, dataset, env)
        return
    memory = PeakMemory(env.device)
    model = build_model(args, config, env, layout)
    optimizer = build_optimizer(model, layout, args)
    run = Run(args, env, layout, model, optimizer, dataset, memory)
    try:
        run.resume()
        run.steps()
    finally:
        run.close()


class Run:
    """The training loop with resume, checkpoints, metrics, evaluation and failure handling."""

    def __init__(
        self, args: argparse.Namespace, env: DistEnv, layout: ParallelDims, model: Transformer,
        optimizer: Any, dataset: Dataset, memory: PeakMemory,
    ):  # fmt: skip
        self.memory, self.consistent_step, self.update_lock = memory, None, threading.Lock()
        self.args, self.env, self.layout, self.model = args, env, layout, model
        self.optimizer, self.dataset, self.first_step, self.watchdog = optimizer, dataset, 0, None
        self.state = State(model, optimizer, layout, args.optimizer)
        self.checkpoints = Checkpoints(args.out / CHECKPOINTS, keep=args.keep_latest_k)
        self.memory_checkpoint = self._memory_checkpoint()
        sigma = args.loss_spike_sigma or math.inf
        if args.task in ("dpo", "grpo"):  # their losses are differences and may be 0
            sigma = math.inf
        self.guard = Guard(args.max_skipped_batches, sigma)
        self.scaler = LossScaler() if args.dtype == "fp16" else None
        self.diloco_worker = None if args.diloco is None else DiLoCoWorker(args, model, layout, env)
        losses = dict(aux=args.aux_loss, seq=args.seq_aux_loss, z=args.router_z_loss)
        self.balance = LoadBalancer(model, **losses, layout=layout)
        compile_here = args.compile and layout.mesh is None  # else layout has compiled the blocks
        self.step_model = compile_model(model) if compile_here else model
        self.attend = layout.attend(make_attend(args.attention, layout.packed))
        self.objective = build_objective(args, model, dataset, env, layout)
        self.tokens = args.batch_size // args.diloco_workers * args.seq_len
        flops_per_weight = 4 if args.lora else 6  # LoRA: no gradient of the frozen weights
        self.flops = flops_per_token(meta_model(model.config), args.seq_len, flops_per_weight)
        self.peak = peak_flops(env.device, args.dtype, env.world)

    def _memory_checkpoint(self) -> MemoryCheckpoint | None:
        args = self.args
        if args.memory_checkpoint_every is None:
            return None
        name = hashlib.sha256(str(args.out.resolve()).encode()).hexdigest()[:12]
        folder = args.memory_checkpoint_dir or Path(f"/dev/shm/sheaf-{os.getuid()}-{name}")
        group = dist.new_group(backend="gloo") if self.env.world > 1 else None
        run = (args.out / RUN_ID).read_text()  # an older run in the same folder has another id
        return MemoryCheckpoint(folder, f"{run}.{self.layout.shard_id}", group)

    # ---- checkpoints ----

    def metadata(self) -> dict[str, Any]:
        """The JSON that a checkpoint stores in addition to its tensors."""
        metadata = {"updates": self.state.updates, "guard": self.guard.state_dict()}
        metadata |= {"run": settings(self.args), "config": self.model.config.to_hf()}
        metadata |= {"text": self.dataset.fingerprint}
        return metadata | ({"scaler": self.scaler.state_dict()} if self.scaler else {})

    def resume(self) -> None:
        """Load the newest intact state, from memory checkpoints or from disk."""
        args, metadata = self.args, None
        found = self.checkpoints.newest() if args.resume else None
        if self.memory_checkpoint is not None and (args.resume or args.auto):
            metadata = self.resume_from_memory(found.step if found else 0)
        if metadata is None and found is not None:
            self.state.load(self.checkpoints, found)
            metadata, self.first_step = found.metadata, found.step
            if self.diloco_worker is not None:
                self.diloco_worker.load(found)
        if metadata is None:
            if self.memory_checkpoint is not None:
                self.memory_checkpoint.clear()
            return
        saved, current = metadata.get("text"), self.dataset.fingerprint
        if None not in (saved, current) and saved != current:
            raise ValueError(
                f"--data has changed: {current} now, {saved} when step {self.first_step} was "
                "saved; restore it, or start a new run in another --out"
            )
        self.guard.load_state_dict(metadata["guard"])
        if self.scaler is not None:
            self.scaler.load_state_dict(metadata["scaler"])

    def resume_from_memory(self, after: int) -> dict[str, Any] | None:
        """Load the newest memory checkpoint if its settings are this run's and it is newer than
        step `after`. Returns its metadata, or None."""
        step = self.memory_checkpoint.newest()
        if step is None or step <= after:
            return None
        backup = {name: x.clone() for name, (_, x) in self.state.tensors().items()}
        tensors = {name: x for name, (_, x) in self.state.tensors().items()}
        metadata = self.memory_checkpoint.get(step, tensors)
        if changed := changed_settings(self.args, metadata["run"]):
            self.log(f"memory checkpoint of step {step} ignored: {flag(changed[0])} has changed")
            for name, x in tensors.items():
                x.copy_(backup[name])
            return None
        self.first_step, self.state.updates = step, metadata["updates"]
        self.state.sync_after_load()
        self.log(f"resumed after step {step} from memory")
        return metadata

    def save(self, step: int) -> None:
        """Start writing a checkpoint of the state after `step`, asynchronously."""
        tensors, metadata = self.state.sharded_state_dict(), self.metadata()
        if self.diloco_worker is not None:
            outer_tensors, outer = self.diloco_worker.sharded_state_dict()
            tensors, metadata = tensors | outer_tensors, metadata | {"outer": outer}
        # async_staging: tensors are copied to host memory during the next step
        self.checkpoints.save(step, tensors, metadata, async_staging=True)

    def save_to_memory(self, step: int) -> None:
        """Copy the state after `step` to this node's memory and to a peer's."""
        tensors = {name: x for name, (_, x) in self.state.tensors().items()}
        self.memory_checkpoint.put(step, tensors, self.metadata())

    # ---- the loop ----

    def steps(self) -> None:
        """Train from first_step to --steps with progress, metrics, evaluation and checkpoints."""
        args, env, first = self.args, self.env, self.first_step
        if env.rank == 0:
            full_model = meta_model(self.model.config)
            print(summary(args, full_model, self.dataset.size, first, env), file=sys.stderr)
            if self.layout.mesh is not None:
                print(self.layout.mesh, file=sys.stderr)
        signals, stopping, done = stop_on_signals(), False, False
        self.on_sigterm()
        metrics = Metrics(args.out, first, args.tensorboard) if env.rank == 0 else None
        self.watchdog = make_watchdog(args, env, self.on_hang)
        self.bar, next_step = progress_bar(first, args.steps, env), first
        if self.diloco_worker is not None:
            next_step = self.diloco_worker.begin(next_step)
        for step in self.bar:
            if step < next_step:  # the other DiLoCo workers are past this step
                continue
            profile = profile_step(args.out, self.memory, env.rank)
            wanted = args.profile == step + 1 - first
            with profile if wanted else contextlib.nullcontext({}) as stats:
                row = self.step(step)
            row |= stats
            if self.diloco_worker is not None:
                self.checkpoints.wait_for_staging()
                row |= self.diloco_worker.after_step(step)
                next_step, step = row["step"], row["step"] - 1
            stopping, wait = sync_stop_and_data_wait(signals, row["data_wait"], env.device)
            row["data_wait"] = wait
            done = step + 1 == args.steps
            if (step + 1) % args.eval_every == 0 or done:
                row |= self.evaluate(row)
            if metrics is not None:
                metrics.write(row)
            due = (step + 1) % args.save_every == 0 and "skipped" not in row
            if due or stopping or done:
                self.save(step + 1)
            every = args.memory_checkpoint_every
            if self.memory_checkpoint is not None and (step + 1) % every == 0:
                self.save_to_memory(step + 1)
            if stopping:
                break
        self.finish(metrics, stopping and not done)

    def step(self, step: int) -> dict[str, Any]:
        """One step: batch, forward, backward, update. Returns its row of metrics.jsonl."""
        args, env, layout, scaler = self.args, self.env, self.layout, self.scaler
        start, self.consistent_step = time.perf_counter(), step  # the state after `step` steps
        self.watchdog.beat(step + 1, "data")
        batch = self.objective.batch(step).to(env.device)
        data_wait = time.perf_counter() - start
        lr = learning_rate(
            step, args.steps, args.lr, schedule=args.lr_schedule, warmup=args.warmup_steps,
            decay=args.decay_steps, end=args.min_lr_factor,
        )  # fmt: skip
        if args.optimizer_in_backward:
            self.checkpoints.wait_for_staging()
            self.consistent_step = None
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group["scale"]
        scale, objective = scaler.scale if scaler else 1.0, self.objective
        objective = None if isinstance(objective, NextToken) else objective
        self.watchdog.beat(step + 1, "forward and backward")
        rest = env.autocast, self.attend, self.balance, layout, objective, scale
        try:
            losses = accumulate(self.step_model, batch, args.micro_batch_size, *rest)
        except RuntimeError:  # another rank may have died: keep the state after the last step
            self.dump_on_failure()
            raise
        row = {"step": step + 1, **losses}
        self.watchdog.beat(step + 1, "update")
        with self.update_lock:  # the state must not be copied during the update
            self.consistent_step = None  # weights may be half updated
            accept = partial(self.accept_step, row)
            norm = update(self.model, self.optimizer, lr, layout, args.grad_clip, scale, accept)
            self.balance.update(layout)
            self.consistent_step = step + 1
        row |= {} if args.optimizer_in_backward else {"grad_norm": norm}
        row["lr"] = lr
        row |= self.balance.row | self.objective.row
        elapsed = time.perf_counter() - start
        row["tokens_per_second"] = round(self.tokens / elapsed, 1)
        if self.peak:
            row["mfu"] = round(self.tokens / elapsed * self.flops / self.peak, 4)
        row["data_wait"] = data_wait
        mfu = f", MFU {row['mfu']:.1%}" if self.peak else ""
        text = f"loss {row['loss']:.3f}, {self.tokens / elapsed:,.0f} tok/s{mfu}"
        self.bar.set_postfix_str(text, refresh=False)
        return row

    def accept_step(self, row: dict[str, Any], norm: float) -> bool:
        """Whether to apply this batch's gradient, given its norm; if not, row["skipped"] has the
        reason. ValueError after too many skipped batches."""
        self.checkpoints.wait_for_staging()  # the last step's weights must be copied first
        reason, scaler = None, self.scaler
        if scaler is not None and not scaler.update(math.isfinite(norm)):
            reason = f"a gradient overflowed; the loss scale is now {scaler.scale:g}"
        if reason is None or scaler.scale == scaler.MIN_SCALE:
            try:
                reason = self.guard.judge(row["loss"], norm)
            except Diverged as e:  # raised on all ranks
                self.checkpoints.wait()
                raise ValueError(f"step {row['step']}: {e} ({self.resume_hint()})") from None
        if reason is not None and self.args.optimizer_in_backward:
            self.checkpoints.wait()
            raise ValueError(
                f"step {row['step']}: {reason}; the update is already applied "
                f"({self.resume_hint()})"
            )
        if reason is not None:
            row["skipped"] = reason
            self.log(f"step {row['step']}: skipped, {reason}")
        self.state.updates += reason is None
        return reason is None

    def resume_hint(self) -> str:
        return f"the last checkpoint in {self.args.out} is intact; resume from it with a lower --lr"

    def evaluate(self, row: dict[str, Any]) -> dict[str, Any]:
        """Validate, and collect peak memory and communication wait of all ranks. Called every
        --eval-every steps; returns additions to `row`."""
        args, env, result = self.args, self.env, {}
        self.watchdog.beat(row["step"], "validation")
        size, attend = args.micro_batch_size, self.attend
        if (tokens := self.dataset.validation) is not None:
            rest = args.seq_len, size, env, attend, self.layout
            result["val_loss"] = validate(self.step_model, tokens, *rest)
        elif not isinstance(self.objective, NextToken):
            with env.autocast():
                result |= self.objective.validate(self.step_model, size, attend)
            self.layout.reshard(self.step_model)
        result |= {"expert_load": self.balance.last.tolist()} if self.balance.row else {}
        local = [*self.watchdog.wait_times(), float(self.memory.bytes())]
        ranks = [local]
        if env.world > 1:
            dist.all_gather_object(ranks := [None] * env.world, local)
        waits, busy, memory = zip(*ranks)
        result["peak_memory"] = int(max(memory))
        result["comm_wait"] = round(sum(waits) / max(sum(waits) + sum(busy), 1e-9), 4)
        losses = f"loss {row['loss']:.4f}"
        for name in ("val_loss", "val_accuracy", "val_reward"):
            shown = name[4:] if name != "val_loss" else "validation"
            losses += f", {shown} {result[name]:.4f}" if name in result else ""
        self.log(f"step {row['step']}: {losses}, peak {result['peak_memory'] / 2**20:,.0f} MiB")
        if env.world > 1 and (slow := stragglers([*zip(waits, busy)])):
            result["stragglers"] = slow
            self.log(f"step {row['step']}: {slow}")
        return result

    def finish(self, metrics: Metrics | None, stopped: bool) -> None:
        """Wait for the last checkpoint and export it as a Hugging Face folder."""
        args = self.args
        self.watchdog.close()  # no timeout for the export
        self.checkpoints.wait()
        if self.env.rank == 0 and saved_run(args.out):
            export(args.out, args.out, args.lora_merged)
            metrics.close()
        if args.offload not in (None, "cpu"):
            shutil.rmtree(offload_folder(args), ignore_errors=True)
        if self.memory_checkpoint is not None and not stopped:
            self.memory_checkpoint.clear()
        if stopped:
            saved = f"stopped after step {self.consistent_step}, saved in {args.out}"
            self.log(f"{saved}; continue with --resume")

    # ---- failures ----

    def dump_on_failure(self) -> None:
        """Dump the state after the last step to this node's memory, without other ranks."""
        if self.memory_checkpoint is None or not self.update_lock.acquire(blocking=False):
            return
        try:
            if self.consistent_step is not None:
                tensors = {name: x for name, (_, x) in self.state.tensors().items()}
                with torch.no_grad():
                    self.memory_checkpoint.dump(self.consistent_step, tensors, self.metadata())
        finally:
            self.update_lock.release()

    def on_hang(self) -> None:
        """Dump the state and exit; the watchdog's thread calls it when any rank is stuck."""
        try:
            self.dump_on_failure()
        finally:
            os._exit(EXIT_HANG)

    def on_sigterm(self) -> None:
        """Start a thread that dumps the state on SIGTERM if the main thread is blocked in a
        collective with a dead rank: torchrun kills the process 30 seconds later, and its state may
        be the only copy."""
        if self.memory_checkpoint is None or self.env.world == 1:
            return
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

        def wait() -> None:
            while signal.SIGTERM not in os.read(read_end, 1):
                continue
            before = self.consistent_step
            time.sleep(SIGTERM_GRACE)
            if self.consistent_step is not None and self.consistent_step == before:
                self.dump_on_failure()

        threading.Thread(target=wait, daemon=True).start()

    def log(self, line: str) -> None:
        """Print a line above the progress bar, on rank 0."""
        if self.env.rank == 0:
            tqdm.write(line, file=sys.stderr)

    def close(self) -> None:
        if self.env.world == 1:  # with more ranks, one may be dead and this would hang
            with contextlib.suppress(OSError):
                self.checkpoints.wait()
        for resource in (self.watchdog, self.diloco_worker):
            if resource is not None:
                resource.close()


def make_watchdog(args: argparse.Namespace, env: DistEnv, on_hang: Callable[[], None]) -> Watchdog:
    """A watchdog for the calling thread; the first step may take 10 times --hang-timeout."""
    report = lambda text: print(f"train.py: {text}", file=sys.stderr, flush=True)
    timeouts = dict(timeout=args.hang_timeout, first_timeout=10 * args.hang_timeout)
    return Watchdog(env.store, env.rank, env.world, **timeouts, report=report, on_hang=on_hang)


def sync_stop_and_data_wait(
    caught: list[int], wait: float, device: torch.device
) -> tuple[bool, float]:
    """Max-reduce over ranks: whether any caught a signal (all must stop at the same step), and the
    longest wait for data."""
    maxima = torch.tensor([len(caught), wait], device=device)
    if dist.is_initialized():
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
    n_caught, wait = maxima.tolist()
    return n_caught > 0, round(wait, 4)


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse_args(sys.argv[1:] if argv is None else argv)
        if args.plot:
            print(plot(args.out))
        elif args.export is not None:
            to = Path(args.export) if args.export else args.out
            export(args.out, to, args.lora_merged, verify=True)
            for name in TOKENIZER_FILES if to.resolve() != args.out.resolve() else ():
                if (args.out / name).exists():
                    shutil.copy(args.out / name, to)
            print(to)
        elif args.dry_run:
            from parallelism.dry_run import dry_run  # imported late: fake tensors take a second

            print(dry_run(args))
        else:
            train(args)
    except (ValueError, OSError) as e:
        print(f"train.py: error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the first step; later, Ctrl-C saves and exits
        return 130
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
