"""train.py: train a Llama- or DeepSeek-style model from text, on one process or under torchrun.

    python train.py                              the standard library's source -> runs/stdlib
    python train.py --data A.jsonl=3 --data B --pack --model small --steps 2000 --out runs/mine
    torchrun --nproc-per-node 8 --max-restarts 9 train.py --resume auto --tp 2 --zero 3 ...
                                                 matrices over two ranks, the rest over the four
                                                 with other batches; a rank that dies is replaced
    python train.py --out runs/mine --export     the newest checkpoint as a Hugging Face folder
    python train.py --init runs/mine --task sft --data chats.jsonl --out runs/chat
                                                 then --task dpo or grpo; each with --lora 8 or not
    python train.py --init checkpoints/small --upcycle 8 --out runs/mixture
                                                 8 experts in place of every MLP, each its copy
    python train.py --train-draft-head --init checkpoints/small --out runs/head
                                                 a draft head for speculative decoding with it
    python train.py --diloco 100 --diloco-rendezvous FOLDER --diloco-workers 4 --diloco-worker 0 --out RUN0
                                                 and 1, 2, 3 elsewhere: workers that meet in each
                                                 100th step, and may come and go (diloco.py)

A run, in order: read the documents; train a tokenizer on them; write them as token files; then per
step take a batch, accumulate gradients over micro-batches, clip, AdamW; now and then validate and
save. OUT has metrics.jsonl and checkpoints/, and when the run ends or is stopped it is a Hugging
Face folder (config.json, model.safetensors in bf16, tokenizer) that generate.py and transformers
open. --fp8 and --qat change what a step multiplies, not what is saved.

What holds, and test_all.py proves:

- The batch is a pure function of (seed, step, sample index). No loader has a state, so a run
  resumed with --resume prints the losses of an uninterrupted one to the last digit (on CPU).
- The loss of a step is the mean over its *tokens*: every micro-batch's sum is divided by the count
  of the whole step, on all ranks, so micro-batch size and rank count change nothing but rounding.
- Layouts (--tp --cp --ep --zero ..., parallel_dims.py) change nothing but rounding either: one seed is
  the same weights and batches under each, and the checkpoint goes on under any other. (But for
  --aux-loss, which is one of each micro-batch.)
- --recompute, --offload and --loss-chunk change memory: the first two no bit, the third rounding.
- A checkpoint appears whole or not at all, and is not read if a byte of it has changed. SIGTERM
  and Ctrl-C save and leave; kill -9 at any moment, of any rank, leaves the previous one.

Its parts, each a file: flags.py; dist_env.py; dataset.py and data.py; parallel_dims.py, how ranks share the
work; recompute.py, chunked_loss.py and offload.py, memory; optimizers.py; lora.py and tuning.py,
what comes after pre-training; checkpoint.py, state.py and recovery.py; metrics.py.
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
for drawer in "huggingface generation serving quantization training parallelism".split():
    spec = importlib.util.find_spec(drawer)  # an installed package wins over a folder
    if spec.submodule_search_locations[0] != str(ROOT / drawer):
        sys.exit(f"train.py: error: {spec.origin} hides the folder {drawer}/; uninstall that package")

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
from training.metrics import Metrics, PeakMemory, flops_per_token, peak_flops, plot, profiled
from training.metrics import progress_bar, summary, summary_writer
from training.optimizers import LossScaler, learning_rate
from training.recovery import Diverged, Guard, Mirror, Watch, stop_on_signals, stragglers
from training.state import CHECKPOINTS, DiLoCoWorker, State, export, saved_run
from training.step import LoadBalancer, accumulate, make_attend, update, validate
from training.tuning import build_objective

RUN_ID = "run.id"  # in OUT: which run this is
SIGTERM_GRACE = 10.0  # seconds that a step may go on after SIGTERM, before its state is kept
EXIT_HANG = 75  # the exit code of a rank that waited too long: EX_TEMPFAIL, try again

def resolve_args(args: argparse.Namespace) -> None:
    """Fill args from the checkpoint under --resume; refuse what would spoil a run."""
    saved = saved_run(args.out)
    if args.auto and saved is None:  # memory may yet know of a run that no disk does
        args.resume = None
    if args.resume is None:
        refuse_taken(args.out)
        resolve_flags(args)
        return
    if saved is None:
        raise ValueError(
            f"--resume: {args.out / CHECKPOINTS} has no checkpoint; nothing was saved yet, start "
            "without --resume"
        )
    run = saved[2]["run"]
    for name in SAVED:
        if flag(name) not in args.given:
            setattr(args, name, run.get(name, getattr(args, name)))  # it may be older than a flag
    if args.dtype == "auto":
        args.dtype = run["dtype"]
    for name in differing(args, run):
        raise ValueError(
            f"{flag(name)} {getattr(args, name)} differs from the run's {run.get(name)}; leave it "
            "out, or start anew in another --out"
        )
    args.init, args.memory_checkpoint_dir = (p and Path(p) for p in (args.init, args.memory_checkpoint_dir))
    resolve_flags(args)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What --resume takes from a checkpoint, as JSON has it."""
    run = {name: getattr(args, name) for name in SAVED}
    return {name: str(x.resolve()) if isinstance(x, Path) else x for name, x in run.items()}


def differing(args: argparse.Namespace, run: Mapping[str, Any]) -> list[str]:
    """What of FIXED is not as it was; a run may be older than a flag."""
    known = [name for name in FIXED if name in run or flag(name) in args.given]
    return [name for name in known if settings(args)[name] != run.get(name)]


def refuse_taken(out: Path) -> None:
    """ValueError if OUT holds what a run that starts would write over."""
    if (saved := saved_run(out)) is not None:
        raise ValueError(
            f"--out {out}: holds a run of {saved[1]} steps; go on with --resume, or name another "
            "folder"
        )
    held = {path.name for path in out.glob("*.safetensors")}
    if held == {DRAFT_HEAD}:
        raise ValueError(f"--out {out}: holds a draft head; name another folder")
    if held:
        raise ValueError(f"--out {out}: holds a model that no run here made; name another folder")


def train(args: argparse.Namespace) -> None:
    """The whole run; every stage is one call."""
    resolve_args(args)
    place = init_distributed(args)
    config = model_config(args)
    resolve_expert_flags(args, config)
    if args.tensorboard:
        summary_writer()  # is it there?
    layout = ParallelDims(args, config, place.world, place.device.type)
    validate_diloco_flags(args, layout.dp_size)
    if args.seq_len <= config.n_mtp_layers:
        raise ValueError(
            f"--seq-len must be more than the model's {config.n_mtp_layers} MTP layers"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    for leftover in args.out.glob(".*.tmp") if place.rank == 0 else ():
        leftover.unlink()  # of a save that was killed
    if place.rank == 0 and args.memory_checkpoint_every and not (args.out / RUN_ID).exists():
        (args.out / RUN_ID).write_text(os.urandom(8).hex())
    text = (prepare_text if args.task == "text" else prepare_task)(args, config, place)
    if args.train_draft_head:
        train_draft_head(args, text, place)
        return
    memory = PeakMemory(place.device)
    model = build_model(args, config, place, layout)
    optimizer = build_optimizer(model, layout, args)
    run = Run(args, place, layout, model, optimizer, text, memory)
    try:
        run.resume()
        run.steps()
    finally:
        run.close()


class Run:
    """From the model that was built to the last checkpoint: the loop, and what stands around it."""

    def __init__(
        self, args: argparse.Namespace, place: DistEnv, layout: ParallelDims, model: Transformer,
        optimizer: Any, text: Dataset, memory: PeakMemory,
    ):  # fmt: skip
        self.memory, self.safe, self.changing = memory, None, threading.Lock()
        self.args, self.place, self.layout, self.model = args, place, layout, model
        self.optimizer, self.text, self.first, self.watch = optimizer, text, 0, None
        self.state = State(model, optimizer, layout, args.optimizer)
        self.saver = Checkpoints(args.out / CHECKPOINTS, keep=args.keep_latest_k)
        self.mirror = self._mirror()
        drawn = args.task in ("dpo", "grpo")  # their losses are differences, and may be 0
        self.guard = Guard(args.max_skipped_batches, math.inf if drawn else args.loss_spike_sigma or math.inf)
        self.scaler = LossScaler() if args.dtype == "fp16" else None
        self.island = None if args.diloco is None else DiLoCoWorker(args, model, layout, place)
        losses = dict(aux=args.aux_loss, seq=args.seq_aux_loss, z=args.router_z_loss)
        self.balance = LoadBalancer(model, **losses, layout=layout)
        alone = args.compile and layout.mesh is None
        self.step_model = compile_model(model) if alone else model
        self.attend = layout.attend(make_attend(args.attention, layout.packed))
        self.objective = build_objective(args, model, text, place, layout)
        self.tokens = args.batch_size // args.diloco_workers * args.seq_len
        passes = 4 if args.lora else 6  # frozen weights have no gradient
        self.flops = flops_per_token(meta_model(model.config), args.seq_len, passes)
        self.peak = peak_flops(place.device, args.dtype, place.world)

    def _mirror(self) -> Mirror | None:
        args = self.args
        if args.memory_checkpoint_every is None:
            return None
        name = hashlib.sha256(str(args.out.resolve()).encode()).hexdigest()[:12]
        folder = args.memory_checkpoint_dir or Path(f"/dev/shm/sheaf-{os.getuid()}-{name}")
        group = dist.new_group(backend="gloo") if self.place.world > 1 else None
        run = (args.out / RUN_ID).read_text()  # an older run in a folder of this name was another
        return Mirror(folder, f"{run}.{self.layout.shard_id}", group)

    # ---- from and to checkpoints ----

    def about(self) -> dict[str, Any]:
        """What goes with the tensors of a state, JSON."""
        about = {"updates": self.state.updates, "guard": self.guard.state_dict()}
        about |= {"run": settings(self.args), "config": self.model.config.to_hf()}
        about |= {"text": self.text.mark}
        return about | ({"scaler": self.scaler.state_dict()} if self.scaler else {})

    def resume(self) -> None:
        """To the newest state that is whole: of the copies in memory, or of the checkpoints."""
        args, about = self.args, None
        found = self.saver.newest() if args.resume else None
        if self.mirror is not None and (args.resume or args.auto):
            about = self.from_memory(found.step if found else 0)
        if about is None and found is not None:
            self.state.load(self.saver, found)
            about, self.first = found.about, found.step
            if self.island is not None:
                self.island.load(found)
        if about is None:
            if self.mirror is not None:
                self.mirror.clear()
            return
        if None not in (about.get("text"), self.text.mark) and about["text"] != self.text.mark:
            raise ValueError(
                f"--data is not what it was: {self.text.mark}, and {about['text']} when step "
                f"{self.first} was saved; restore it, or start anew in another --out"
            )
        self.guard.load_state_dict(about["guard"])
        if self.scaler is not None:
            self.scaler.load_state_dict(about["scaler"])

    def from_memory(self, after: int) -> dict[str, Any] | None:
        """Put the copies' state here, if it is of this run and of more steps than `after`."""
        at = self.mirror.newest()
        if at is None or at <= after:
            return None
        kept = {name: x.clone() for name, (_, x) in self.state.tensors().items()}
        tensors = {name: x for name, (_, x) in self.state.tensors().items()}
        about = self.mirror.get(at, tensors)
        if other := differing(self.args, about["run"]):
            self.say(f"what memory has of step {at} had another {flag(other[0])}; it is left alone")
            for name, x in tensors.items():
                x.copy_(kept[name])
            return None
        self.first, self.state.updates = at, about["updates"]
        self.state.loaded()
        self.say(f"resumed after step {at} from memory")
        return about

    def save(self, step: int) -> None:
        """Begin to write the state after `step`; training may go on."""
        pieces, about = self.state.pieces(), self.about()
        if self.island is not None:
            outer, held = self.island.pieces()
            pieces, about = pieces | outer, about | {"outer": held}
        self.saver.save(step, pieces, about, lazy=True)  # copied while the next step is computed

    def keep_in_memory(self, step: int) -> None:
        """Copies of the state after `step`, here and with a peer."""
        tensors = {name: x for name, (_, x) in self.state.tensors().items()}
        self.mirror.put(step, tensors, self.about())

    # ---- the loop ----

    def steps(self) -> None:
        """Steps first..args.steps, with progress, metrics, validation and checkpoints."""
        args, place, first = self.args, self.place, self.first
        if place.rank == 0:
            whole = meta_model(self.model.config)
            print(summary(args, whole, self.text.size, first, place), file=sys.stderr)
            if self.layout.mesh is not None:
                print(self.layout.mesh, file=sys.stderr)
        stop, leaving, done = stop_on_signals(), False, False
        self.last_words()
        metrics = Metrics(args.out, first, args.tensorboard) if place.rank == 0 else None
        self.watch = watch_of(args, place, self.hung)
        self.bar, at = progress_bar(first, args.steps, place), first
        at = at if self.island is None else self.island.begin(at)
        for step in self.bar:
            if step < at:  # the others have made it without this worker
                continue
            looked = args.profile == step + 1 - first
            how = args.out, self.memory, place.rank
            with profiled(*how) if looked else contextlib.nullcontext({}) as facts:
                row = self.step(step)
            row |= facts
            if self.island is not None:
                self.saver.staged()
                row |= self.island.after(step)
                at, step = row["step"], row["step"] - 1
            leaving, row["data_wait"] = of_all_ranks(stop, row["data_wait"], place.device)
            done = step + 1 == args.steps
            if (step + 1) % args.eval_every == 0 or done:
                row |= self.look(row)
            if metrics is not None:
                metrics.write(row)
            due = (step + 1) % args.save_every == 0 and "skipped" not in row
            if due or leaving or done:
                self.save(step + 1)
            if self.mirror is not None and (step + 1) % args.memory_checkpoint_every == 0:
                self.keep_in_memory(step + 1)
            if leaving:
                break
        self.finish(metrics, leaving and not done)

    def step(self, step: int) -> dict[str, Any]:
        """One step: a batch, its gradient, the update; its row of metrics.jsonl."""
        args, place, layout, scaler = self.args, self.place, self.layout, self.scaler
        start, self.safe = time.perf_counter(), step  # the state is that after so many steps
        self.watch.beat(step + 1, "data")
        batch = self.objective.batch(step).to(place.device)
        waited = time.perf_counter() - start
        lr = learning_rate(
            step, args.steps, args.lr, schedule=args.lr_schedule, warmup=args.warmup_steps,
            decay=args.decay_steps, end=args.min_lr_factor,
        )  # fmt: skip
        if args.optimizer_in_backward:
            self.saver.staged()
            self.safe = None
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group["scale"]
        scale, other = scaler.scale if scaler else 1.0, self.objective
        other = None if isinstance(other, NextToken) else other
        self.watch.beat(step + 1, "forward and backward")
        how = self.attend, self.balance, layout, other, scale
        try:
            losses = accumulate(self.step_model, batch, args.micro_batch_size, place.autocast, *how)
        except RuntimeError:  # perhaps another rank's end; the weights are those of the last step
            self.keep_alone()
            raise
        row = {"step": step + 1, **losses}
        self.watch.beat(step + 1, "update")
        with self.changing:  # nobody may copy the state meanwhile
            self.safe = None  # it may be half of this step's
            take = partial(self.take, row)
            norm = update(self.model, self.optimizer, lr, layout, args.grad_clip, scale, take)
            self.balance.update(layout)
            self.safe = step + 1
        row |= {} if args.optimizer_in_backward else {"grad_norm": norm}
        row["lr"] = lr
        row |= self.balance.row | self.objective.row
        spent = time.perf_counter() - start
        row["tokens_per_second"] = round(self.tokens / spent, 1)
        if self.peak:
            row["mfu"] = round(self.tokens / spent * self.flops / self.peak, 4)
        row["data_wait"] = waited
        mfu = f", MFU {row['mfu']:.1%}" if self.peak else ""
        text = f"loss {row['loss']:.3f}, {self.tokens / spent:,.0f} tok/s{mfu}"
        self.bar.set_postfix_str(text, refresh=False)
        return row

    def take(self, row: dict[str, Any], norm: float) -> bool:
        """Whether this batch's gradient, of that norm, is to be applied; said in `row` if not.
        ValueError if that happens too often."""
        self.saver.staged()  # the weights of the last step are written before they change
        why, scaler = None, self.scaler
        if scaler is not None and not scaler.update(math.isfinite(norm)):
            why = f"a gradient overflowed; the loss is scaled by {scaler.scale:g} from here on"
        if why is None or scaler.scale == scaler.LEAST:
            try:
                why = self.guard.judge(row["loss"], norm)
            except Diverged as e:  # on all ranks alike
                self.saver.wait()
                raise ValueError(f"step {row['step']}: {e} ({self.last_good()})") from None
        if why is not None and self.args.optimizer_in_backward:
            self.saver.wait()
            raise ValueError(
                f"step {row['step']}: {why}; it is in the weights ({self.last_good()})"
            )
        if why is not None:
            row["skipped"] = why
            self.say(f"step {row['step']}: skipped, {why}")
        self.state.updates += why is None
        return why is None

    def last_good(self) -> str:
        return f"the last checkpoint in {self.args.out} is as it was; try a lower --lr from there"

    def look(self, row: dict[str, Any]) -> dict[str, Any]:
        """Now and then: validation, and what ranks tell each other of their time and memory."""
        args, place, seen = self.args, self.place, {}
        self.watch.beat(row["step"], "validation")
        if self.text.held is not None:
            how = args.seq_len, args.micro_batch_size, place, self.attend, self.layout
            seen["val_loss"] = validate(self.step_model, self.text.held, *how)
        elif not isinstance(self.objective, NextToken):
            with place.autocast():
                how = self.step_model, args.micro_batch_size, self.attend
                seen |= self.objective.validate(*how)
            self.layout.reshard(self.step_model)
        seen |= {"expert_load": self.balance.last.tolist()} if self.balance.row else {}
        mine = [*self.watch.waits(), float(self.memory.bytes())]
        ranks = [mine]
        if place.world > 1:
            dist.all_gather_object(ranks := [None] * place.world, mine)
        waits, busy, memory = zip(*ranks)
        seen["peak_memory"] = int(max(memory))
        seen["comm_wait"] = round(sum(waits) / max(sum(waits) + sum(busy), 1e-9), 4)
        losses = f"loss {row['loss']:.4f}"
        for name in ("val_loss", "val_accuracy", "val_reward"):
            shown = name[4:] if name != "val_loss" else "validation"
            losses += f", {shown} {seen[name]:.4f}" if name in seen else ""
        self.say(f"step {row['step']}: {losses}, {seen['peak_memory'] / 2**20:,.0f} MiB at most")
        if place.world > 1 and (slow := stragglers([*zip(waits, busy)])):
            seen["stragglers"] = slow
            self.say(f"step {row['step']}: {slow}")
        return seen

    def finish(self, metrics: Metrics | None, leaving: bool) -> None:
        """The last checkpoint on disk, and what people open."""
        args = self.args
        self.watch.close()  # what follows takes as long as it takes
        self.saver.wait()
        if self.place.rank == 0 and saved_run(args.out):
            export(args.out, args.out, args.lora_merged)
            metrics.close()
        if args.offload not in (None, "cpu"):
            shutil.rmtree(offload_folder(args), ignore_errors=True)
        if self.mirror is not None and not leaving:
            self.mirror.clear()
        if leaving:
            self.say(f"stopped after step {self.safe}, saved in {args.out}; go on with --resume")

    # ---- when it fails ----

    def keep_alone(self) -> None:
        """The state after the last step, to this machine's memory and without the other ranks."""
        if self.mirror is None or not self.changing.acquire(blocking=False):
            return
        try:
            if self.safe is not None:
                tensors = {name: x for name, (_, x) in self.state.tensors().items()}
                with torch.no_grad():
                    self.mirror.dump(self.safe, tensors, self.about())
        finally:
            self.changing.release()

    def hung(self) -> None:
        """In the watching thread: the loop stands still, here or elsewhere, and will not go on."""
        try:
            self.keep_alone()
        finally:
            os._exit(EXIT_HANG)

    def last_words(self) -> None:
        """Have SIGTERM noted even while the main thread stands in a collective of which a rank is
        gone: torchrun kills it half a minute later, and its state may be the only copy."""
        if self.mirror is None or self.place.world == 1:
            return
        told, tell = os.pipe()
        os.set_blocking(tell, False)
        signal.set_wakeup_fd(tell, warn_on_full_buffer=False)

        def wait() -> None:
            while signal.SIGTERM not in os.read(told, 1):
                continue
            before = self.safe
            time.sleep(SIGTERM_GRACE)
            if self.safe is not None and self.safe == before:
                self.keep_alone()

        threading.Thread(target=wait, daemon=True).start()

    def say(self, line: str) -> None:
        """Print a line above the progress bar, on rank 0."""
        if self.place.rank == 0:
            tqdm.write(line, file=sys.stderr)

    def close(self) -> None:
        if self.place.world == 1:  # of several ranks another may be gone, and this would hang
            with contextlib.suppress(OSError):
                self.saver.wait()
        for thing in (self.watch, self.island):
            if thing is not None:
                thing.close()


def watch_of(args: argparse.Namespace, place: DistEnv, hung: Callable[[], None]) -> Watch:
    """Looks after the calling thread."""
    tell = lambda text: print(f"train.py: {text}", file=sys.stderr, flush=True)
    how = dict(timeout=args.hang_timeout, first=10 * args.hang_timeout)
    return Watch(place.store, place.rank, place.world, **how, report=tell, on_hang=hung)


def of_all_ranks(caught: list[int], wait: float, device: torch.device) -> tuple[bool, float]:
    """Whether any was told to stop, for all must leave at the same step; the longest wait."""
    most = torch.tensor([len(caught), wait], device=device)
    if dist.is_initialized():
        dist.all_reduce(most, dist.ReduceOp.MAX)
    told, wait = most.tolist()
    return told > 0, round(wait, 4)


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
            from parallelism.dry_run import dry_run  # only here: fake tensors take a second

            print(dry_run(args))
        else:
            train(args)
    except (ValueError, OSError) as e:
        print(f"train.py: error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the first step; later ones save first
        return 130
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
