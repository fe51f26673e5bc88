"""train.py --pp: the model partitioned into pipeline stages, run by pipeline.py.

    torchrun --nproc-per-node 4 train.py --pp 2 --pp-schedule zbv --tp 2 --batch-size 16
    torchrun --nproc-per-node 4 -m training.pipeline_model   # benchmark: schedules, torch's too

Each pp rank has some of the layers; the first stage has the embedding, the last one the final norm
and the head. A rank's model is the full model without the other ranks' modules, so names, initial
weights, batches and checkpoints are those of one process. Its chunks are slices of that model, and
FSDP is applied to each; tensor parallelism, experts and recomputation are inside the layers.

Modules that exist on several stages (DualPipe's two copies, both ends of a tied embedding) have
their gradients summed over all copies, which then take the same optimizer step.

With --zero, a chunk's parameters are gathered at its first use and kept for the step; with --zero 3
only until the rank switches to another chunk, once per chunk and direction with a breadth-first
schedule (arXiv:2211.05953, 4). Gradients stay unsharded until the chunk's last backward pass and
are then reduced: --zero 2 equals 1 here. fully_shard reduces only in backward passes, so schedules
that end in W run one more, of one token (under --cp, one row) with a zero gradient.

When it loses: --async-tp, --fp8, --qat and GPU expert kernels compute weight gradients together
with input gradients, in B; W then has less work to fill bubbles with.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    raise SystemExit("run: torchrun --nproc-per-node 4 -m training.pipeline_model")

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model import Attend, ModelConfig, MoE, Transformer
from parallel import Mesh, to_local
from parallelism.pipeline import (
    Pipeline,
    WeightGradStore,
    p2p_groups,
    split_backward_,
    split_experts_backward,
)
from parallelism.schedules import SCHEDULES, Action, Schedule, make_schedule
from parallelism.schedules import balance as balance_layers
from training.config import TrainConfig
from training.data import decode

TRAINABLE = [name for name in SCHEDULES if name != "pipedream"]


def check_stages(args: TrainConfig, config: ModelConfig, dp_size: int) -> None:
    """ValueError, naming the flag, for unsupported pipeline settings. dp_size: the number of
    data-parallel ranks that a step's batch is split over."""
    if args.pp == 1:
        return
    if config.n_mtp_layers:
        raise ValueError(
            "--pp cannot be combined with multi-token prediction, which needs the embedding on the "
            "last stage"
        )
    if args.pp_schedule not in TRAINABLE:
        raise ValueError(
            f"--pp-schedule {args.pp_schedule} steps after every micro-batch, but train.py after "
            "whole batches: use 1f1b (pipeline.Pipeline supports both)"
        )
    rows, micro = args.batch_size // dp_size, args.micro_batch_size
    if rows % micro:
        raise ValueError(
            f"--micro-batch-size {micro} must divide the {rows} sequences of a rank: with --pp all "
            "micro-batches have one size"
        )
    schedule = _make_schedule(args, rows // micro)
    if args.compile and any(a.kind == "W" for actions in schedule.actions for a in actions):
        raise ValueError(
            f"--compile cannot be combined with --pp-schedule {args.pp_schedule}, which splits "
            "backward passes: use 1f1b"
        )
    stages = len(schedule.paths[0])
    stage_layers(args, config, stages)
    if not set(parse_ints(args.pp_recompute or "", "--set pp_recompute")) <= {*range(stages)}:
        raise ValueError(
            f"--set pp_recompute={args.pp_recompute}: stages are from 0 to {stages - 1}"
        )


def parse_ints(text: str, flag: str) -> list[int]:
    """The integers of a comma-separated setting."""
    try:
        return [int(n) for n in text.split(",") if text]
    except ValueError:
        raise ValueError(f"{flag}={text}: expected integers, such as 8,8,7") from None


def _make_schedule(args: TrainConfig, microbatches: int) -> Schedule:
    try:
        return make_schedule(args.pp_schedule, args.pp, microbatches, args.virtual_stages)
    except ValueError as e:
        raise ValueError(
            f"--pp-schedule {e} (microbatches = --batch-size / data-parallel ranks / "
            "--micro-batch-size)"
        ) from None


def stage_layers(args: TrainConfig, config: ModelConfig, stages: int) -> list[range]:
    """The layers of every stage: from pp_layers, or balanced to minimize the slowest stage's
    FLOPs per token (the head counts as part of the last layer)."""
    L = config.n_layers
    if args.pp_layers is not None:
        counts = parse_ints(args.pp_layers, "--set pp_layers")
        if len(counts) != stages or sum(counts) != L or min(counts) < 1:
            raise ValueError(
                f"--set pp_layers={args.pp_layers}: must be {stages} numbers of 1 or more, one per "
                f"stage, that sum to {L}"
            )
        ends = [sum(counts[: i + 1]) for i in range(stages)]
        return [range(end - n, end) for n, end in zip(counts, ends)]
    if stages > L:
        raise ValueError(
            f"--pp {args.pp} makes {stages} stages, more than the model's {L} layers: use fewer "
            "ranks, or a schedule with fewer chunks"
        )
    with torch.device("meta"):
        model = Transformer(config)
    costs = [layer_cost(config, layer, i, args.seq_len) for i, layer in enumerate(model.layers)]
    costs[-1] += config.vocab_size * config.dim
    return [range(*bounds) for bounds in balance_layers(costs, stages)]


def layer_cost(config: ModelConfig, layer: nn.Module, index: int, seq_len: int) -> float:
    """Multiplications per token: one per active weight, and Hq (D + Dv) per key, of which there are
    seq_len / 2 on average."""
    weights = 0.0
    for p in layer.parameters():
        stack = p.dim() == 3  # of experts, K of which are active per token
        weights += config.n_experts_per_token * p[0].numel() if stack else p.numel()
    window = min(config.window(index) or seq_len, seq_len)
    keys = window - window * window / (2 * seq_len)
    dims = config.head_dim + (config.v_head_dim or config.head_dim)
    return weights + config.n_heads * dims * keys


def keep_stages_(model: Transformer, stages: Sequence[int], layers: Sequence[range]) -> None:
    """Remove from a model, in place, all but these stages. layers: of each stage. Parameters keep
    their names; a tied head gets its own weight; MTP layers are removed."""
    blocks, model.layers = list(model.layers), nn.ModuleList()
    for i in sorted(i for stage in stages for i in layers[stage]):
        model.layers.add_module(str(i), blocks[i])
    if model.config.tie_embeddings:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    model.mtp = nn.ModuleList()
    if 0 not in stages:
        model.embed = None
    if len(layers) - 1 not in stages:
        model.norm = model.head = None


class PipelineStages:
    """A rank's chunks of the model: partitioning, training steps, gradients of shared modules,
    validation and full tensors for checkpoints along pp."""

    def __init__(self, args: TrainConfig, config: ModelConfig, mesh: Mesh):
        self.args, self.config, self.mesh, self.rank = args, config, mesh, mesh.rank("pp")
        rows = args.batch_size // (mesh.dp_rank_and_size[1] * args.diloco_workers)
        s = _make_schedule(args, rows // args.micro_batch_size)
        self.schedule, self.layers = s, stage_layers(args, config, len(s.paths[0]))
        self.local_chunks = [c for c, rank in enumerate(s.chunk_to_rank) if rank == self.rank]
        self.ends = {path[i] for path in s.paths for i in (0, -1)}
        self.pipeline_ranks = mesh.world.mesh.flatten(1).mT.tolist()  # of all pipelines
        self.up, self.down = p2p_groups(self.pipeline_ranks)
        with torch.device("meta"):
            whole = Transformer(config)
        self.parameters = dict(whole.named_parameters())  # on the meta device
        self.buffers = dict(whole.named_buffers())
        sets = map(self._ranks, self.parameters)
        self.groups = {ranks: None for ranks in sets if len(ranks) > 1}
        for ranks in self.groups:
            lists = [[pipeline[r] for r in ranks] for pipeline in self.pipeline_ranks]
            self.groups[ranks] = dist.new_subgroups_by_enumeration(lists)[0]
        self.weight_grads = WeightGradStore()
        self.run_chunk: Callable | None = None  # set by each step: (chunk's model, input) -> output
        self.chunks: dict[int, Transformer] = {}
        self.pipelines: dict[Any, Pipeline] = {}

    # ---- placement ----

    def checkpoint_name(self, name: str) -> str:
        """A local parameter's name in the whole model: a tied head has its own copy here."""
        tied = self.config.tie_embeddings and name == "head.weight"
        return "embed.weight" if tied else name

    def _ranks_of_copies(self, name: str) -> list[int]:
        """The pp rank of every copy of a parameter of the whole model."""
        last = len(self.layers) - 1
        stages = [0 if name.startswith("embed.") else last]
        if name.startswith("layers."):
            layer = int(name.split(".")[1])
            stages = [i for i, layers in enumerate(self.layers) if layer in layers]
        elif self.config.tie_embeddings and name == "embed.weight":
            stages = [0, last]
        rank_of = self.schedule.chunk_to_rank
        return [rank_of[path[i]] for path in self.schedule.paths for i in stages]

    def _ranks(self, name: str) -> tuple[int, ...]:
        return tuple(sorted(set(self._ranks_of_copies(name))))

    def num_copies(self, model: nn.Module) -> dict[str, int]:
        """The number of copies along pp of each local parameter, by name."""
        names = (name for name, _ in model.named_parameters())
        return {name: len(self._ranks_of_copies(self.checkpoint_name(name))) for name in names}

    def local_moe_layers(self) -> list[int]:
        """The local MoE layers, as indices among the whole model's."""
        own = {i for chunk in self.local_chunks for i in self.layers[self.schedule.stage(chunk)]}
        return [n for n, i in enumerate(sorted(self.config.moe_layers)) if i in own]

    # ---- the model ----

    def shard_model_(self, model: Transformer) -> None:
        """Keep this rank's stages, in place. The model may be on the meta device."""
        stages = [self.schedule.stage(chunk) for chunk in self.local_chunks]
        keep_stages_(model, stages, self.layers)

    def defer_weight_grads_(self, model: Transformer) -> None:
        """Make layers defer their weight gradients to W, if the schedule has any."""
        if not self.schedule.split_backwards():
            return
        args, device = self.args, self.mesh.world.device_type
        split_backward_(model, self.weight_grads)
        plain = args.experts == "grouped" and not (args.fp8 or args.qat) and device == "cpu"
        for moe_layer in model.modules() if plain else ():
            if isinstance(moe_layer, MoE):
                moe_layer.experts = split_experts_backward(moe_layer.experts, self.weight_grads)

    def is_recomputed(self, layer: str) -> bool:
        """Whether pp_recompute selects the layer of that name."""
        stages = parse_ints(self.args.pp_recompute or "", "--set pp_recompute")
        return any(int(layer) in self.layers[stage] for stage in stages)

    def build_chunks_(self, model: Transformer, sharded: bool, dtype: torch.dtype | None) -> None:
        """Build the chunks, models over the same modules, after the layers are final. dtype: the
        dtype in which fully_shard, if sharded, gathers, and so of the hidden states."""
        self.sharded, self.dtype = sharded, dtype if sharded else None
        layers = dict(model.layers.named_children())
        for chunk in self.local_chunks:
            with torch.device("meta"):
                part = Transformer(self.config)
            stage = self.schedule.stage(chunk)
            part.layers, part.mtp = nn.ModuleList(), nn.ModuleList()
            for i in self.layers[stage]:
                part.layers.add_module(str(i), layers[str(i)])
            part.embed = model.embed if stage == 0 else None
            last = stage == len(self.layers) - 1
            part.norm, part.head = (model.norm, model.head) if last else (None, None)
            self.chunks[chunk] = part

    # ---- a step ----

    def accumulate(
        self, model: Transformer, batch: Tensor, count: Any, share: Callable[[Tensor], Tensor],
        autocast: Callable, attend: Attend, balance: Any, layout: Any,
    ) -> Tensor:  # fmt: skip
        """The pipeline's part of train.py's forward_backward: accumulate the gradient of this
        rank's batch. Returns its losses (main, MTP, auxiliary), 0 on ranks that do not compute
        them. share(micro-batch): the weights of its auxiliary losses (LoadBalancer.pop_losses)."""
        totals, at = torch.zeros(3, device=batch.device), self._positions(batch, layout)
        size = self.args.micro_batch_size
        micro_batches, pipe = batch.split(size), self._pipeline(model)
        parts = (select_tokens(rows, at, layout.packed) for rows in micro_batches)
        inputs, targets, where = zip(*parts)
        padding = self._padding(micro_batches, layout)

        def run_chunk(part: Transformer, x: Tensor) -> Any:
            m = pipe.microbatch
            if balance is not None:
                balance.recording = True
            with autocast():
                y = part(x, where[m], attend, is_padding=padding[m])
            if balance is None:
                return y
            aux = balance.pop_losses(share(micro_batches[m]))
            totals[2] += aux.detach()
            return (y, aux / layout.size("tp")) if aux.requires_grad else y

        def loss(logits: Tensor, m: int) -> Tensor:
            with autocast():
                main = layout.cross_entropy(logits, targets[m]) / count
            totals[0] += main.detach()
            return main

        self.run_chunk = run_chunk
        pipe.step(self._shape(inputs[0]), inputs, loss)
        if self.sharded and self.schedule.split_backwards():
            self._reduce_gradients(model, inputs[0], at, attend, autocast)
        return totals

    def _positions(self, batch: Tensor, layout: Any) -> Tensor:
        at = layout.positions(batch.shape[1] - 1, batch.device)
        return torch.arange(batch.shape[1] - 1, device=batch.device) if at is None else at

    def _padding(self, batches: Sequence[Tensor], layout: Any) -> list[Tensor | None]:
        """What MoE layers do not count, of each batch of encoded rows."""
        return [layout.padding(batch) if self.config.moe_layers else None for batch in batches]

    def _shape(self, inputs: Tensor) -> tuple[int, int, int]:
        """The shape of the hidden states sent between ranks."""
        B, T = inputs.shape
        full = self.args.tp == 1 or not self.args.sequence_parallel
        return B, T if full else T // self.args.tp, self.config.dim

    def _pipeline(self, model: Transformer, forward: int = 0) -> Pipeline:
        """The Pipeline of the schedule, or of the forward passes of `forward` microbatches; cached
        by `forward`."""
        if forward not in self.pipelines:
            run = lambda chunk: lambda x: self.run_chunk(self.chunks[chunk], x)
            chunks, first = {chunk: run(chunk) for chunk in self.chunks}, next(model.parameters())
            options: dict[str, Any] = dict(dtype=self.dtype or first.dtype, device=first.device)
            options["before_action"] = self._fsdp_hook() if self.sharded and not forward else None
            options["weight_grads"] = self.weight_grads
            schedule = forward_only_schedule(self.schedule, forward) if forward else self.schedule
            self.pipelines[forward] = Pipeline(schedule, chunks, self.up, self.down, **options)
        return self.pipelines[forward]

    def _fsdp_hook(self) -> Callable[[Action, bool], None]:
        """A before_action hook: whether fully_shard reshards after the action, and reduces."""
        actions, stage = self.schedule.actions[self.rank], self.args.zero
        split = bool(self.schedule.split_backwards())
        after = dict(zip(actions, actions[1:]))

        def before(action: Action, last: bool) -> None:
            part, last = self.chunks[action.chunk], last and not split
            switches = action not in after or after[action].chunk != action.chunk
            part.set_requires_gradient_sync(last)
            part.set_reshard_after_forward(stage == 3 and switches)
            part.set_reshard_after_backward(last or (stage == 3 and switches))

        return before

    def _reduce_gradients(
        self, model: Transformer, tokens: Tensor, at: Tensor, attend: Attend, autocast: Callable
    ) -> None:
        """Run a backward pass with a zero gradient, of as few tokens as possible, so that
        fully_shard reduces the gradients accumulated by W. Two passes with bf16 gradients, which
        fully_shard converts to the reduction dtype only if another pass follows."""
        n = self.args.tp if self.args.cp == 1 else len(at)
        tokens, at = tokens[:1, :n], at[:n]
        dtype = self.dtype or next(model.parameters()).dtype
        hidden = torch.zeros(self._shape(tokens), dtype=dtype, device=at.device, requires_grad=True)
        passes = (True,) if self.dtype is None else (False, True)
        for part, last in itertools.product(self.chunks.values(), passes):
            part.set_requires_gradient_sync(last)
            part.set_reshard_after_backward(last)
            with autocast():
                y = part(hidden if part.embed is None else tokens, at, attend)
            y.backward(torch.zeros_like(y))

    def sum_shared_gradients(self, model: Transformer) -> None:
        """Sum the gradients of parameters with several copies along pp. Must be the last reduction:
        a later one could round the copies differently."""
        grads: dict[str, list[Tensor]] = {}
        for name, p in model.named_parameters():
            if p.requires_grad and len(self._ranks_of_copies(self.checkpoint_name(name))) > 1:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                grads.setdefault(self.checkpoint_name(name), []).append(to_local(p.grad))
        for name in (name for name in self.parameters if name in grads):
            first, *others = grads[name]
            for grad in others:
                first.add_(grad)
            if len(self._ranks(name)) > 1:
                dist.all_reduce(first, group=self.groups[self._ranks(name)])
            for grad in others:
                grad.copy_(first)

    # ---- validation and checkpoints ----

    @torch.no_grad()
    def validation_losses(
        self, model: Transformer, batches: Sequence[Tensor], autocast: Callable, attend: Attend,
        layout: Any,
    ) -> list[Tensor]:  # fmt: skip
        """The summed cross-entropy of each batch, on the last stage; zeros on the others."""
        at, zero = self._positions(batches[0], layout), torch.zeros((), device=batches[0].device)
        pipe = self._pipeline(model, forward=len(batches))
        parts = (select_tokens(batch, at, layout.packed) for batch in batches)
        inputs, targets, where = zip(*parts)
        padding = self._padding(batches, layout)

        def run_chunk(part: Transformer, x: Tensor) -> Tensor:
            with autocast():
                m = pipe.microbatch
                return part(x, where[m], attend, is_padding=padding[m])

        def loss(logits: Tensor, m: int) -> Tensor:
            with autocast():
                return layout.cross_entropy(logits, targets[m])

        self.run_chunk = run_chunk
        losses = pipe.forward(self._shape(inputs[0]), inputs, loss)
        return [losses.get(m, zero.clone()) for m in range(len(batches))]

    def full_tensors(
        self,
        metas: Mapping[str, Tensor],
        named: Mapping[str, Tensor],
        full_tensor: Callable[[str, Tensor], Tensor | None],
    ) -> Iterator[tuple[str, Tensor | None]]:
        """(name, full tensor on the first rank) of all tensors of `metas`. named: the local ones;
        full_tensor(name, x): gathers x over the ranks of this stage. Collective."""
        dtype = next((x.dtype for x in named.values()), None)
        for name, meta in metas.items():
            owner = self._ranks(name)[0]
            x = full_tensor(name, named[name]) if self.rank == owner else None
            ranks = dist.get_process_group_ranks(self.up)
            if owner and ranks[0] == 0 and self.rank in (0, owner):
                if self.rank == owner:
                    dist.send(x.contiguous(), group=self.down, group_dst=0)
                    x = None
                else:
                    device = self.mesh.world.device_type
                    x = torch.empty_like(meta, dtype=dtype or meta.dtype, device=device)
                    dist.recv(x, group=self.down, group_src=owner)
            yield name, x


def select_tokens(batch: Tensor, at: Tensor, packed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(inputs, targets, positions) of encoded rows (B, T + 1): the tokens at positions `at`; for
    packed rows, positions within their documents."""
    inputs, targets, where = decode(batch, packed)
    return inputs[:, at], targets[:, at], at if where is None else where


def forward_only_schedule(schedule: Schedule, microbatches: int) -> Schedule:
    """A schedule of the forward passes of `microbatches` microbatches over the same chunks."""
    schedule = replace(schedule, microbatches=microbatches)
    rows, started = [[] for _ in schedule.actions], Counter()
    for m in range(microbatches):
        path = schedule.path(m)
        for stage, chunk in enumerate(path):
            row = rows[schedule.chunk_to_rank[chunk]]
            row.append((started[path] + stage, Action("F", m, chunk)))
        started[path] += 1
    return replace(schedule, actions=tuple(tuple(a for _, a in sorted(row)) for row in rows))


# --------------------------------------------------------------------------------------------------
# Benchmark: pipeline.py with every schedule and torch.distributed.pipelining
# --------------------------------------------------------------------------------------------------


def _model(stages: int, C: int = 256) -> list[nn.Module]:
    """8 blocks, split into `stages` stages."""
    torch.manual_seed(0)
    block = lambda: nn.Sequential(
        nn.RMSNorm(C), nn.Linear(C, 3 * C), nn.GELU(), nn.Linear(3 * C, C)
    )
    return [nn.Sequential(*(block() for _ in range(8 // stages))) for _ in range(stages)]


def _torch_step(
    name: str, stage_to_rank: Sequence[int], rank: int, m: int, x: Tensor, target: Tensor
) -> Callable:
    """One step of torch's schedule of that name."""
    from torch.distributed import pipelining

    n, parts = len(stage_to_rank), _model(len(stage_to_rank))
    local_stages = [i for i, owner in enumerate(stage_to_rank) if owner == rank]
    cpu = torch.device("cpu")
    stages = [pipelining.PipelineStage(parts[i], i, n, cpu) for i in local_stages]
    options = dict(loss_fn=lambda y, t: (y - t).square().sum(), scale_grads=False)
    schedule = getattr(pipelining, name)(stages if n > 4 else stages[0], m, **options)
    args = (x,) if 0 in local_stages else ()
    kwargs = dict(target=target) if n - 1 in local_stages else {}
    return lambda: schedule.step(*args, **kwargs)


def _pipeline_step(
    name: str, rank: int, m: int, x: Tensor, target: Tensor, links: tuple
) -> Callable:
    """One step of pipeline.py with the schedule of that name."""
    s, weight_grads, targets = make_schedule(name, 4, m), WeightGradStore(), target.chunk(m)
    parts, inputs = _model(len(s.paths[0])), x.chunk(m)
    own = {c: parts[s.stage(c)] for c, h in enumerate(s.chunk_to_rank) if h == rank}
    for part in own.values() if s.split_backwards() else ():
        split_backward_(part, weight_grads)
    pipe = Pipeline(s, own, *links, weight_grads=weight_grads)
    loss = lambda y, i: (y - targets[i]).square().sum()
    return lambda: pipe.step(inputs[0].shape, inputs, loss)


def benchmark() -> None:
    """Median milliseconds per step on 4 ranks, which share this machine's cores; interleaved."""
    dist.init_process_group("gloo")
    rank, links, m = dist.get_rank(), p2p_groups([range(4)]), 16
    x, target = torch.randn(2, m * 128, 256, generator=torch.Generator().manual_seed(1)).unbind()
    line, loop, vee = [*range(4)], [*range(4)] * 2, [0, 1, 2, 3, 3, 2, 1, 0]
    peers = {"gpipe": ("ScheduleGPipe", line), "1f1b": ("Schedule1F1B", line)}
    peers |= {"interleaved": ("ScheduleInterleaved1F1B", loop)}
    peers |= {"zbv": ("ScheduleZBVZeroBubble", vee), "dualpipev": ("ScheduleDualPipeV", vee)}
    runs = {}
    for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "v-half", "v-min", "dualpipev"):
        runs[name] = _pipeline_step(name, rank, m, x, target, links)
        if name in peers:
            peer, stage_to_rank = peers[name]
            runs[f"  torch's {peer}"] = _torch_step(peer, stage_to_rank, rank, m, x, target)
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(9):
        for name, run_step in runs.items():
            dist.barrier()
            start = time.perf_counter()
            run_step()
            dist.barrier()
            spent[name].append(1e3 * (time.perf_counter() - start))
    if rank == 0:
        print(f"4 stages of 2 blocks of 256 x 768, {m} microbatches of 128 rows, fp32, ms")
        for name, ms in spent.items():
            print(f"{name:34}{statistics.median(ms[2:]):9.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    benchmark()
