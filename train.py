"""Train a Llama- or DeepSeek-style model on text, in one process or under torchrun.

    python train.py                              the standard library's source -> runs/stdlib
    python train.py --data A.jsonl=3 --data B --pack --model small --steps 2000 --out runs/mine
    torchrun --nproc-per-node 8 --max-restarts 9 train.py --resume auto --tp 2 --zero 3 ...
                                                 tensor parallel over 2 ranks, ZeRO-3 over 4 data
                                                 parallel ranks; restarted after a failure
    python train.py --out runs/mine --export     the newest checkpoint as a Hugging Face folder
    python train.py --init runs/mine --task sft --data chats.jsonl --out runs/chat
                                                 then --task dpo or grpo; --lora 8 trains adapters,
                                                 --lora-jobs FILE several in one batch
    python train.py --init checkpoints/small --upcycle 8 --out runs/moe
                                                 MoE: each MLP becomes 8 experts, copies of it
    python train.py --init checkpoints/small --task draft-head --out runs/head
                                                 a draft head for speculative decoding

training/config.py has every flag and which go together; train() is the program from data to the
last checkpoint, with one loop. Another loss is an objective (training/step.py),
another optimizer a branch of build_optimizer (training/build.py), another reaction to a failure a
callback (training/callbacks.py).

OUT holds metrics.jsonl and checkpoints/; when the run ends or is stopped, it is also a Hugging Face
folder (config.json, model.safetensors in bf16, tokenizer) that generate.py and transformers open.

Guarantees, tested by test_all.py:

- A batch is a pure function of (seed, step, sample index). The loader has no state, so the losses
  of a resumed run are bitwise those of an uninterrupted one (on CPU).
- The loss of a step is the mean over its *tokens*: every micro-batch's sum is divided by the token
  count of the whole step on all ranks, so micro-batch size and rank count change only rounding.
- Parallelism (--tp --cp --ep --zero ..., parallel_dims.py) changes only rounding: one seed gives
  the same weights and batches under every layout, and a checkpoint resumes under any other.
  Exception: --aux-loss is computed per micro-batch.
- A checkpoint is written atomically and verified by sha256 before it is loaded. SIGTERM and Ctrl-C
  save and exit; after kill -9 of any rank at any moment the previous checkpoint is intact.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import shutil
import sys
from collections.abc import Mapping
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

from parallelism.dist_env import DistEnv, init_distributed
from parallelism.parallel_dims import ParallelDims
from training.build import build_model, build_optimizer, compile_model, meta_model, model_config
from training.callbacks import (
    Callback, Callbacks, DiLoCoWorker, MemoryCheckpoints, OffloadFolder, Profiler, RankMonitor, log,
)  # fmt: skip
from training.checkpoint import Checkpoints
from training.config import FIXED, RESTORED, SAVED_AS, TrainConfig, check_combinations
from training.config import check_experts, parse_args
from training.dataset import TOKENIZER_FILES, build_dataset
from training.draft_head import DRAFT_HEAD, build_draft_head, save_draft_head
from training.lora_jobs import build_job_datasets
from training.metrics import Metrics, PeakMemory, Throughput, plot, progress_bar, summary
from training.metrics import summary_writer
from training.objectives import build_objective
from training.optimizers import LossScaler, learning_rate
from training.flags import check_limits
from training.recovery import Diverged, Guard, stop_on_signals
from training.replica_groups import ReplicaGroup
from training.state import CHECKPOINTS, TrainState, export, saved_run
from training.step import LoadBalancer, clip_gradients, forward_backward, make_attend


def restore_settings(config: TrainConfig) -> None:
    """With --resume, fill the config from the checkpoint. ValueError if OUT holds something else,
    or a given setting contradicts the run's."""
    saved = saved_run(config.out)
    if config.resume == "auto" and saved is None:  # there may still be a checkpoint in memory
        config.resume = None
    if config.resume is None:
        check_output_dir(config.out, saved)
        check_combinations(config)
        return
    if saved is None:
        raise ValueError(
            f"--resume: {config.out / CHECKPOINTS} has no checkpoint; nothing was saved yet, start "
            "without --resume"
        )
    run = saved[2]["run"]
    for name in (*FIXED, *RESTORED):
        if name not in config.given:  # a run saved before the field existed lacks its key
            setattr(config, name, run.get(SAVED_AS.get(name, name), getattr(config, name)))
    if config.dtype == "auto":
        config.dtype = run["dtype"]
    for name in config.changed_settings(run):
        raise ValueError(
            f"{config.shown(name)} {getattr(config, name)} differs from the run's "
            f"{run.get(SAVED_AS.get(name, name))}; omit it, or start a new run in another --out"
        )
    for name in ("init", "lora_jobs", "memory_checkpoint_dir"):
        setattr(config, name, getattr(config, name) and Path(getattr(config, name)))
    check_limits(config)
    check_combinations(config)


def check_output_dir(out: Path, saved: tuple[Path, int, Any] | None) -> None:
    """ValueError if OUT holds results that a new run would overwrite."""
    if saved is not None:
        raise ValueError(
            f"--out {out}: holds a run of {saved[1]} steps; continue it with --resume, or choose "
            "another folder"
        )
    existing = {path.name for path in out.glob("*.safetensors")}
    if existing:
        what = "a draft head" if existing == {DRAFT_HEAD} else "a model but no run to resume"
        raise ValueError(f"--out {out}: holds {what}; choose another folder")


# --------------------------------------------------------------------------------------------------
# The program
# --------------------------------------------------------------------------------------------------


def train(config: TrainConfig) -> None:
    """Train until --steps or a signal, from the newest checkpoint if resumed; then export."""
    restore_settings(config)
    env = init_distributed(config)  # device, dtype, rank and world size
    model_cfg = model_config(config)
    check_experts(config, model_cfg)
    layout = ParallelDims(config, model_cfg, env.world, env.device.type)  # meshes; checks sizes
    prepare_output(config, env)
    dataset = (build_job_datasets if config.lora_jobs else build_dataset)(config, model_cfg, env)
    memory = PeakMemory(env.device)
    if config.task == "draft-head":
        model = build_draft_head(config, model_cfg, env)
    else:
        model = build_model(config, model_cfg, env, layout)  # TP -> recompute -> compile -> FSDP
    step_model = compile_model(model) if config.compile and layout.mesh is None else model
    optimizer = build_optimizer(model, layout, config)
    objective = build_objective(config, model, dataset, env, layout)
    attend = layout.attend(make_attend(config.attention, layout.packed))
    losses = dict(aux=config.aux_loss, seq=config.seq_aux_loss, z=config.router_z_loss)
    balance = LoadBalancer(model, **losses, layout=layout)
    scaler = LossScaler() if config.dtype == "fp16" else None
    has_spikes = config.loss_spike_sigma and config.task not in ("dpo", "grpo")
    guard = Guard(config.max_skipped_batches, config.loss_spike_sigma if has_spikes else math.inf)
    extra = config, guard, scaler, dataset.fingerprint
    state = TrainState(model, optimizer, layout, *extra)
    checkpoints = Checkpoints(config.out / CHECKPOINTS, keep=config.keep_latest_k)
    callbacks = build_callbacks(config, state, checkpoints, env, memory)
    speed, bar = Throughput(config, model_cfg, env), None
    try:
        step = resume(config, state, checkpoints, callbacks)  # the number of finished steps
        log_start(config, model, dataset.size, layout, step, env)
        signals, stopping = stop_on_signals(), False
        metrics = Metrics(config.out, step, config.tensorboard) if env.rank == 0 else None
        bar = progress_bar(step, config.steps, env)
        step = callbacks.start(step)
        while step < config.steps and not stopping:
            step = callbacks.before_step(step)  # a replica group may be behind the others
            callbacks.phase(step + 1, "data")
            speed.start()
            batch = objective.batch(step).to(env.device, non_blocking=True)
            data_wait = speed.elapsed()

            callbacks.phase(step + 1, "forward and backward")
            lr = set_learning_rate(optimizer, config, step)
            if config.optimizer_in_backward:
                checkpoints.wait_for_staging()
            scale = scaler.scale if scaler else 1.0
            rest = env.autocast, attend, balance, layout, objective, scale
            with callbacks.dump_on_error():
                losses = forward_backward(step_model, batch, config.micro_batch_size, *rest)
                losses = callbacks.reduce_gradients(losses)

            callbacks.phase(step + 1, "update")
            groups = objective.clip_groups(model) if config.lora_jobs else ()
            norm = clip_gradients(model, config.grad_clip, layout, scale, groups)
            checkpoints.wait_for_staging()  # the last step's weights must be copied first
            skipped = callbacks.vote()
            skipped = skipped or reason_to_skip(
                config, step + 1, losses["loss"], norm, guard, scaler
            )
            if skipped is None:
                optimizer.step()
                state.updates += 1
            optimizer.zero_grad()
            balance.update(layout)
            step += 1
            callbacks.phase(step, "logging")

            # waits for the GPU, so that the step's time includes the update
            stopping, data_wait = sync_stop_and_data_wait(signals, data_wait, env.device)
            row = {"step": step, **losses, "lr": lr, **balance.row, **objective.row, **speed.row()}
            row["data_wait"] = data_wait
            row |= {} if config.optimizer_in_backward else {"grad_norm": norm}
            row |= {"skipped": skipped} if skipped else {}
            step = row["step"] = callbacks.after_update(step, row)  # DiLoCo may skip steps
            done = step == config.steps
            if step % config.eval_every == 0 or done:
                callbacks.phase(step, "validation")
                with env.autocast():
                    row |= objective.validate(step_model, config.micro_batch_size, attend)
                layout.reshard(step_model)
                row |= {"expert_load": balance.expert_load()} if balance.row else {}
                row |= callbacks.statistics()
            log_row(row, env, bar)
            if metrics is not None:
                metrics.write(row)
            if (step % config.save_every == 0 and skipped is None) or stopping or done:
                checkpoints.save(step, *callbacks.checkpoint(), async_staging=True)
            callbacks.after_step(step)
            bar.update(step - bar.n)
        checkpoints.wait()
        callbacks.finish(stopped=step < config.steps)
        if metrics is not None:
            metrics.close()
        if env.rank == 0 and config.task == "draft-head":
            save_draft_head(config.out, model, step)
        elif env.rank == 0:
            export(config.out, config.out, config.lora_merged)
        if step < config.steps:
            text = f"stopped after step {step}, saved in {config.out}; continue with --resume"
            log(env, text)
    except Diverged:
        checkpoints.wait()  # all ranks are here
        raise
    finally:
        if bar is not None:
            bar.close()
        if env.world == 1:  # with more ranks, one may be dead and this would hang
            with contextlib.suppress(OSError):
                checkpoints.wait()
        callbacks.close()


def build_callbacks(
    config: TrainConfig, state: TrainState, checkpoints: Checkpoints, env: DistEnv,
    memory: PeakMemory,
) -> Callbacks:  # fmt: skip
    """The callbacks of the flags."""
    callbacks: list[Callback] = []
    if config.memory_checkpoint_every is not None:
        callbacks.append(MemoryCheckpoints(config, state, env))
    callbacks.append(RankMonitor(config, env, memory, Callbacks(callbacks[:], state).failed))
    if config.replica_groups is not None:
        callbacks.append(ReplicaGroup(config, state, env))
    if config.diloco is not None:
        callbacks.append(DiLoCoWorker(config, state, checkpoints, env))
    if config.profile is not None:
        callbacks.append(Profiler(config, memory, env.rank))
    if config.offload not in (None, "cpu"):
        callbacks.append(OffloadFolder(config))
    return Callbacks(callbacks, state)


def prepare_output(config: TrainConfig, env: DistEnv) -> None:
    """Make OUT, without the temporary files of a save that was killed."""
    if config.tensorboard:
        summary_writer()  # fail now if tensorboard is not installed
    config.out.mkdir(parents=True, exist_ok=True)
    for leftover in config.out.glob(".*.tmp") if env.rank == 0 else ():
        leftover.unlink()


def resume(
    config: TrainConfig, state: TrainState, checkpoints: Checkpoints, callbacks: Callbacks
) -> int:
    """Load the newest intact state, from memory checkpoints or from disk; returns its step."""
    found = checkpoints.newest() if config.resume else None
    if (step := callbacks.restore(found.step if found else 0)) is not None:
        return step
    if found is None:
        return 0
    state.load(checkpoints, found)
    callbacks.load(found)
    return found.step


def set_learning_rate(optimizer: Any, config: TrainConfig, step: int) -> float:
    """Set and return the learning rate of `step`, a function of the step: nothing to save."""
    lr = learning_rate(
        step, config.steps, config.lr, schedule=config.lr_schedule, warmup=config.warmup_steps,
        decay=config.decay_steps, end=config.min_lr_factor,
    )  # fmt: skip
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("scale", 1.0)
    return lr


def reason_to_skip(
    config: TrainConfig, step: int, loss: float, norm: float, guard: Guard,
    scaler: LossScaler | None,
) -> str | None:  # fmt: skip
    """Why this batch's gradient is not applied, the same on all ranks, or None. Diverged after too
    many skipped batches."""
    reason = None
    if scaler is not None and not scaler.update(math.isfinite(norm)):
        reason = f"a gradient overflowed; the loss scale is now {scaler.scale:g}"
    hint = f"the last checkpoint in {config.out} is intact; resume from it with a lower --lr"
    if reason is None or scaler.scale == scaler.MIN_SCALE:
        try:
            reason = guard.judge(loss, norm)
        except Diverged as e:
            raise Diverged(f"step {step}: {e} ({hint})") from None
    if reason is not None and config.optimizer_in_backward:
        raise Diverged(f"step {step}: {reason}; the update is already applied ({hint})")
    return reason


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


def log_row(row: Mapping[str, Any], env: DistEnv, bar: tqdm) -> None:
    """Show a step in the progress bar; a skipped one, and validations, on lines of their own."""
    mfu = f", MFU {row['mfu']:.1%}" if "mfu" in row else ""
    text = f"loss {row['loss']:.3f}, {row['tokens_per_second']:,.0f} tok/s{mfu}"
    bar.set_postfix_str(text, refresh=False)
    start = f"step {row['step']}: "
    if "skipped" in row:
        log(env, f"{start}skipped, {row['skipped']}")
    if "peak_memory" in row:
        text = f"loss {row['loss']:.4f}"
        for name in ("val_loss", "val_accuracy", "val_reward"):
            shown_as = "validation" if name == "val_loss" else name.removeprefix("val_")
            text += f", {shown_as} {row[name]:.4f}" if name in row else ""
        if "acceptance" in row:
            text += ", accepted " + ", ".join(f"{rate:.0%}" for rate in row["acceptance"])
        log(env, f"{start}{text}, peak {row['peak_memory'] / 2**20:,.0f} MiB")
    if "stragglers" in row:
        log(env, start + row["stragglers"])


def log_start(
    config: TrainConfig, model: torch.nn.Module, n_tokens: int | None, layout: ParallelDims,
    step: int, env: DistEnv,
) -> None:  # fmt: skip
    """One line about the run, and the mesh."""
    full = model if config.task == "draft-head" else meta_model(model.config)
    if env.rank == 0:
        print(summary(config, full, n_tokens, step, env), file=sys.stderr)
        if layout.mesh is not None:
            print(layout.mesh, file=sys.stderr)


def export_run(config: TrainConfig) -> None:
    """--export: the newest intact checkpoint of OUT, with its tokenizer."""
    to = Path(config.export) if config.export else config.out
    export(config.out, to, config.lora_merged, verify=True)
    for name in TOKENIZER_FILES if to.resolve() != config.out.resolve() else ():
        if (config.out / name).exists():
            shutil.copy(config.out / name, to)
    print(to)


def main(argv: list[str] | None = None) -> int:
    try:
        config = parse_args(sys.argv[1:] if argv is None else argv)
        if config.plot:
            print(plot(config.out))
        elif config.export is not None:
            export_run(config)
        elif config.dry_run:
            from parallelism.dry_run import dry_run  # imported late: fake tensors take a second

            model_cfg = model_config(config)
            check_experts(config, model_cfg)
            print(dry_run(config, model_cfg))
        else:
            train(config)
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
