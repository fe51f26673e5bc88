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

training/config.py has every flag and which go together; Trainer builds the parts of a run, and its
loop() is the one loop, with forward_backward below it. Another loss is an objective
(training/step.py), another optimizer a branch of build_optimizer (training/build.py), another
reaction to a failure a callback (training/callbacks.py).

OUT holds metrics.jsonl and checkpoints/; when the run ends or is stopped, it is also a Hugging Face
folder (config.json, model.safetensors in bf16, tokenizer) that generate.py and transformers open.

Guarantees, tested by test_all.py:

- A batch is a pure function of (seed, step, sample index). The loader has no state, so the losses
  of a resumed run are bitwise those of an uninterrupted one (on CPU).
- The loss of a step is the mean over its *tokens*: every micro-batch's sum is divided by the token
  count of the whole step on all ranks, so micro-batch size and rank count change only rounding.
- Parallelism (--tp --cp --ep --zero ..., parallelize.py) changes only rounding: one seed gives
  the same weights and batches under every layout, and a checkpoint resumes under any other.
  Exception: --aux-loss is computed per micro-batch.
- A checkpoint is written atomically and verified by sha256 before it is loaded. SIGTERM and Ctrl-C
  save and exit; after kill -9 of any rank at any moment the previous checkpoint is intact.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports: no traceback

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parent
for folder in "huggingface generation serving quantization training parallelism".split():
    spec = importlib.util.find_spec(folder)  # an installed package of the same name comes first
    if spec.submodule_search_locations[0] != str(ROOT / folder):
        sys.exit(f"train.py: error: {spec.origin} shadows {folder}/; uninstall that package")

from model import Attend, causal_attention
from training.build import build_model, build_optimizer, common_files, common_inputs, compile_model
from training.build import export_run, meta_model, model_config, prepare_output
from training.callbacks import DiLoCoWorker, build_callbacks
from training.checkpoint import Checkpoints, list_steps
from training.config import TrainConfig, check_experts, parse_args
from training.dataset import build_dataset
from training.dist_env import all_ranks_reach, init_distributed, rank0_first, same_on_all_ranks
from training.dist_env import sync_stop_and_data_wait
from training.draft_head import build_draft_head, save_draft_head
from training.flags import out_of_memory
from training.lora_jobs import build_job_datasets
from training.metrics import Metrics, PeakMemory, Throughput, log, plot, progress_bar, show_row
from training.metrics import summary
from training.objectives import build_objective
from training.optimizers import LossScaler, learning_rate
from training.parallelize import ParallelDims
from training.recovery import Diverged, Guard, stop_on_signals
from training.replica_groups import ReplicaGroup
from training.state import CHECKPOINTS, TrainState, export, restore_settings
from training.step import MTP_WEIGHT, SINGLE_PROCESS, LoadBalancer, NextToken, Objective
from training.step import clip_gradients, make_attend, step_shares


def train(config: TrainConfig) -> None:
    """Train until --steps or a signal, from the newest checkpoint if resumed; then export."""
    restore_settings(config)
    with contextlib.ExitStack() as out:  # releases the lock of OUT
        with contextlib.ExitStack() as start:  # undone by an error
            trainer = Trainer(config, out, start)
        try:
            step = trainer.loop()
            trainer.finish(step)
        except Diverged:
            trainer.checkpoints.wait()  # all ranks are here
            raise
        finally:
            trainer.close()


class Trainer:
    """The parts of a run, in the order in which they are built, and, last, the loop."""

    def __init__(self, config: TrainConfig, out: contextlib.ExitStack, start: contextlib.ExitStack):
        self.config, self.env = config, init_distributed(config)  # device, dtype, ranks
        same_on_all_ranks(self.env, lambda: common_inputs(config))
        model_cfg = model_config(config)
        # meshes; checks sizes
        self.layout = ParallelDims(config, model_cfg, self.env.world, self.env.device.type)
        rank0_first(self.env, lambda: prepare_output(config, out, start))
        same_on_all_ranks(self.env, lambda: common_files(config))
        prepare_data = build_job_datasets if config.lora_jobs else build_dataset
        self.dataset = prepare_data(config, model_cfg, self.env)
        memory = PeakMemory(self.env.device)
        if config.task == "draft-head":
            self.model = build_draft_head(config, model_cfg, self.env)
        else:  # TP -> recompute -> compile -> FSDP
            self.model = build_model(config, model_cfg, self.env, self.layout)
        compiled = config.compile and self.layout.mesh is None
        self.step_model = compile_model(self.model) if compiled else self.model
        self.optimizer = build_optimizer(self.model, self.layout, config)
        self.objective = build_objective(config, self.model, self.dataset, self.env, self.layout)
        self.attend = self.layout.attend(make_attend(config.attention, self.layout.packed))
        self.balance = LoadBalancer(
            self.model, aux=config.aux_loss, seq=config.seq_aux_loss, z=config.router_z_loss,
            layout=self.layout,
        )  # fmt: skip
        self.scaler = LossScaler() if config.dtype == "fp16" else None
        has_spikes = config.loss_spike_sigma and config.task not in ("dpo", "grpo")
        spike_sigma = config.loss_spike_sigma if has_spikes else math.inf
        self.guard = Guard(config.max_skipped_batches, spike_sigma)
        self.state = TrainState(
            self.model, self.optimizer, self.layout, config, self.guard, self.scaler,
            self.dataset.fingerprint,
        )  # fmt: skip
        self.checkpoints = Checkpoints(config.out / CHECKPOINTS, keep=config.keep_latest_k)
        self.callbacks = build_callbacks(config, self.state, self.env, memory)
        self.replica_group, self.diloco = None, None
        if config.replica_groups is not None:
            self.replica_group = self.callbacks.add(ReplicaGroup(config, self.state, self.env))
        if config.diloco is not None:
            worker = DiLoCoWorker(config, self.state, self.checkpoints, self.env)
            self.diloco = self.callbacks.add(worker)
        self.speed = Throughput(config, model_cfg, self.env)
        self.metrics, self.bar = None, None

    def start(self) -> int:
        """Resume, and report the run; returns the number of finished steps."""
        config, env, model = self.config, self.env, self.model
        step = self.resume()
        if env.rank == 0:
            full = model if config.task == "draft-head" else meta_model(model.config)
            print(summary(config, full, self.dataset, step, env), file=sys.stderr)
            if self.layout.mesh is not None:
                print(self.layout.mesh, file=sys.stderr)
        self.signals = stop_on_signals()
        if env.rank == 0:
            self.metrics = Metrics(config.out, step, config.tensorboard)
        self.bar = progress_bar(step, config.steps, env)
        self.callbacks.start(step)
        return step if self.diloco is None else self.diloco.join(step)

    def resume(self) -> int:
        """Load the newest intact state, from memory checkpoints or from disk; returns its step."""
        found = self.checkpoints.newest() if self.config.resume else None
        if (step := self.callbacks.restore(found.step if found else 0)) is not None:
            return step
        if found is None:
            return 0
        self.state.load(self.checkpoints, found)
        self.callbacks.load(found)
        return found.step

    def reason_to_skip(self, step: int, loss: float, norm: float) -> str | None:
        """Why this batch's gradient is not applied, the same on all ranks, or None. Diverged after
        too many skipped batches."""
        config, scaler, reason = self.config, self.scaler, None
        if scaler is not None and not scaler.update(math.isfinite(norm)):
            reason = f"a gradient overflowed; the loss scale is now {scaler.scale:g}"
        hint = f"the last checkpoint in {config.out} is intact; resume from it with a lower --lr"
        if not list_steps(config.out / CHECKPOINTS):
            hint = "nothing was saved yet; check the weights and the data, or give a lower --lr"
        if reason is None or scaler.scale == scaler.MIN_SCALE:
            try:
                reason = self.guard.judge(loss, norm)
            except Diverged as e:
                raise Diverged(f"step {step}: {e} ({hint})") from None
        if reason is not None and config.optimizer_in_backward:
            raise Diverged(f"step {step}: {reason}; the update is already applied ({hint})")
        return reason

    def validate(self) -> dict[str, Any]:
        """What a validation adds to the row of its step. Collective."""
        with self.env.autocast():
            row = self.objective.validate(
                self.step_model, self.config.micro_batch_size, self.attend
            )
        self.layout.reshard(self.step_model)
        row |= {"expert_load": self.balance.expert_load()} if self.balance.row else {}
        return row | self.callbacks.statistics()

    @contextlib.contextmanager
    def saved_on_error(self, step: int) -> Iterator[None]:
        """Errors of data, rewards and validations cost no steps: if all ranks fail, they save the
        state after `step`. If one fails alone, it finishes the save that has begun, and each dumps
        to memory."""
        try:
            with self.callbacks.dump_on_error():
                yield
        except Exception:
            with contextlib.suppress(OSError, RuntimeError):  # a rank may be dead
                self.checkpoints.wait()
                if all_ranks_reach(self.env, f"failed after step {step}"):
                    self.save_now(step)
            raise

    def save_now(self, step: int) -> None:
        """Save the state after `step`, if there is none yet, and wait for it."""
        self.checkpoints.wait()
        if step not in (0, *list_steps(self.config.out / CHECKPOINTS)):
            self.checkpoints.save(step, *self.callbacks.checkpoint())
            self.checkpoints.wait()
            log(self.env, f"step {step} is saved; continue with --resume")

    def report(self, row: Mapping[str, Any]) -> None:
        """Show a step, and write it to metrics.jsonl."""
        show_row(row, self.env, self.bar)
        if self.metrics is not None:
            self.metrics.write(row)
        self.bar.update(row["step"] - self.bar.n)

    def finish(self, step: int) -> None:
        """The loop has ended after `step`: export."""
        config, stopped = self.config, step < self.config.steps
        self.checkpoints.wait()
        self.callbacks.finish(stopped)
        if self.metrics is not None:
            self.metrics.close()
        if self.env.rank == 0 and config.task == "draft-head":
            save_draft_head(config.out, self.model, step)
        elif self.env.rank == 0:
            export(config.out, config.out, config.lora_merged)
        if stopped:
            text = f"stopped after step {step}, saved in {config.out}; continue with --resume"
            log(self.env, text)

    def close(self) -> None:
        """End threads and connections, also after an error."""
        if self.bar is not None:
            self.bar.close()
        if self.env.world == 1:  # with more ranks, one may be dead and this would hang
            with contextlib.suppress(OSError):
                self.checkpoints.wait()
        self.callbacks.close()

    def loop(self) -> int:
        """Train up to --steps or a signal; returns the number of finished steps."""
        config, env, layout = self.config, self.env, self.layout
        optimizer, checkpoints, callbacks = self.optimizer, self.checkpoints, self.callbacks
        group, diloco = self.replica_group, self.diloco  # None without their flags
        step, stopping = self.start(), False
        while step < config.steps and not stopping:
            if group is not None:
                step = group.before_step(step)  # it may be behind the others
            callbacks.phase(step + 1, "data")
            self.speed.start()
            with self.saved_on_error(step):
                batch = self.objective.batch(step).to(env.device, non_blocking=True)
            data_wait = self.speed.elapsed()

            callbacks.phase(step + 1, "forward and backward")
            lr = set_learning_rate(optimizer, config, step)
            if config.optimizer_in_backward:
                checkpoints.wait_for_staging()
            scale = self.scaler.scale if self.scaler else 1.0
            with callbacks.dump_on_error():
                losses = forward_backward(
                    self.step_model, batch, config.micro_batch_size, env.autocast, self.attend,
                    self.balance, layout, self.objective, scale,
                )  # fmt: skip
                if group is not None:
                    losses = group.reduce_gradients(losses)

            callbacks.phase(step + 1, "update")
            groups = self.objective.clip_groups(self.model) if config.lora_jobs else ()
            norm = clip_gradients(self.model, config.grad_clip, layout, scale, groups)
            checkpoints.wait_for_staging()  # the last step's weights must be copied first
            skipped = group.vote() if group is not None else None
            skipped = skipped or self.reason_to_skip(step + 1, losses["loss"], norm)
            if skipped is None:
                optimizer.step()
                self.state.updates += 1
            optimizer.zero_grad()
            self.balance.update(layout)
            step += 1

            callbacks.phase(step, "logging")
            # waits for the GPU, so that the step's time includes the update
            stopping, data_wait = sync_stop_and_data_wait(self.signals, data_wait, env.device)
            row = {"step": step, **losses, "lr": lr, **self.balance.row, **self.objective.row}
            row |= self.speed.row(row.pop("tokens")) | {"data_wait": data_wait}
            row |= {} if config.optimizer_in_backward else {"grad_norm": norm}
            row |= {"skipped": skipped} if skipped else {}
            if diloco is not None:
                step = row["step"] = diloco.synchronize(step, row)  # it may skip steps
            callbacks.after_update(row)
            done = step == config.steps
            due = (step % config.save_every == 0 and skipped is None) or stopping or done
            if due and env.world > 1:  # first: in the validation one rank may fail alone
                checkpoints.save(step, *callbacks.checkpoint(), async_staging=True)
            if step % config.eval_every == 0 or done:
                callbacks.phase(step, "validation")
                with self.saved_on_error(step):
                    row |= self.validate()
            self.report(row)
            if due and env.world == 1:
                checkpoints.save(step, *callbacks.checkpoint(), async_staging=True)
            callbacks.after_step(step)
        return step


def forward_backward(
    model: torch.nn.Module, batch: Tensor, micro_batch_size: int,
    autocast: Callable[[], Any] = contextlib.nullcontext, attend: Attend = causal_attention,
    balance: LoadBalancer | None = None, layout: ParallelDims = SINGLE_PROCESS,
    objective: Objective | None = None, scale: float = 1.0,
) -> dict[str, float]:  # fmt: skip
    """Leave in .grad the gradient of the mean loss over all tokens of the step, plus MTP_WEIGHT
    times the MTP loss and the auxiliary losses of `balance`, times `scale`; return those losses,
    and as "tokens" the number of the step's inputs that are not padding. objective: by default
    NextToken.

    The divisor is the token count of the whole step (all micro-batches, all ranks), known before
    the first backward pass: a mean of micro-batch means would give tokens of short micro-batches
    more weight. An auxiliary loss is a mean over routed tokens, or over sequences, of which each
    micro-batch counts by its share of the step's.
    """
    objective = objective or NextToken(layout=layout)
    count, tokens, share = step_shares(model, batch, objective, layout)
    if layout.stages is not None:
        rest = autocast, attend, balance, layout
        totals = layout.stages.accumulate(model, batch, count, share, *rest)
    else:
        totals, done = torch.zeros(3, device=batch.device), 0
        for micro in layout.micro_batches(model, batch, micro_batch_size):
            if balance is not None:
                balance.recording = True
            with autocast():
                sums = objective.loss(model, micro, slice(done, done + len(micro)), attend)
                sums = sums if isinstance(sums, tuple) else (sums, sums.new_zeros(()))
                main, mtp = (x / count for x in sums)
            aux = main.new_zeros(())
            if balance is not None:
                aux = balance.pop_losses(share(micro))
            # tp sums the gradients of MoE inputs, and each rank computes the whole aux loss
            loss = main + MTP_WEIGHT * mtp + aux / layout.size("tp")
            if scale != 1.0:  # fp16
                loss = loss * scale
            loss.backward()
            totals += torch.stack((main, mtp, aux)).detach()
            done += len(micro)
    layout.sum_gradients(model)
    main, mtp, aux = layout.all_reduce_sum(totals).tolist()
    losses = {"loss": main, "tokens": int(tokens)}
    losses |= {"mtp_loss": mtp} if len(getattr(model, "mtp", ())) else {}
    return losses | ({"aux_loss": aux} if balance is not None and balance.has_aux_loss else {})


def set_learning_rate(optimizer: Any, config: TrainConfig, step: int) -> float:
    """Set and return the learning rate of `step`, a function of the step: nothing to save."""
    lr = learning_rate(
        step, config.steps, config.lr, schedule=config.lr_schedule, warmup=config.warmup_steps,
        decay=config.decay_steps, end=config.min_lr_factor,
    )  # fmt: skip
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("scale", 1.0)
    return lr


def main(argv: list[str] | None = None) -> int:
    try:
        config = parse_args(sys.argv[1:] if argv is None else argv)
        if config.plot:
            print(plot(config.out))
        elif config.export is not None:
            export_run(config)
        elif config.dry_run:
            from training.dry_run import dry_run  # imported late: fake tensors take a second

            model_cfg = model_config(config)
            check_experts(config, model_cfg)
            print(dry_run(config, model_cfg, forward_backward))
        else:
            train(config)
        sys.stdout.flush()
    except BrokenPipeError:  # stdout was closed, for example by `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as e:
        print(f"train.py: error: {e}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as e:
        if (reason := out_of_memory(e)) is None:
            raise
        fix = "see --recompute, --offload and --zero"
        print(f"train.py: error: out of memory ({reason}); {fix}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the first step; later, Ctrl-C saves and exits
        return 130
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
