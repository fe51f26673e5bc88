"""stages.py: train.py's model in a pipeline: schedules.py's lists run by pipeline.py.

    torchrun --nproc-per-node 4 train.py --pp 2 --pp-schedule zbv --tp 2 --batch-size 16
    torchrun --nproc-per-node 4 -m parallelism.pipeline_model   # a benchmark of schedules beside torch's

Ranks along pp have some of the layers, the first stage the embedding, the last the final norm and
the head. A rank's model is the whole one with the others' parts dropped: names, weights and batches
are those of one process, and so are checkpoints. Its chunks are slices of that model, to each of
which FSDP is applied; tensor parallelism, experts and recomputation are within the layers.

What is there more than once, DualPipe's stages and both ends of a tied embedding, has its gradients
added up over its copies, which then make the same step.

With --zero a chunk's parameters are gathered when it is first used and kept for the step; with
--zero 3 only until the rank turns to another chunk, which is once per chunk and direction if the
schedule is breadth-first (arXiv:2211.05953, 4). Gradients are whole until the chunk's last backward
pass, and are then reduced: --zero 2 is 1 here. fully_shard reduces in backward passes alone, so
where a W comes last there is one more, of a token whose gradient is zero (under --cp, of a row).

When it loses: --async-tp, --fp8 and --qat multiply in ways of their own, and experts on a GPU in
kernels that make both gradients at once: their weights' come with B, and W has less to fill with.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    raise SystemExit("run: torchrun --nproc-per-node 4 -m parallelism.pipeline_model")

import argparse
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
from parallel import Mesh, local
from parallelism.pipeline import WeightGradStore, Pipeline, p2p_groups, split_experts, split_weights_
from parallelism.schedules import LOOPED, SCHEDULES, Action, Schedule, make_schedule
from parallelism.schedules import balance as balanced
from training.data import decode

TRAINABLE = [name for name in SCHEDULES if name != "pipedream"]


def add_flags(p: argparse.ArgumentParser) -> None:
    """How ranks share out the layers."""
    p.add_argument("--pp", type=int, default=1, metavar="N", help="ranks with layers of their own")
    p.add_argument(
        "--pp-schedule",
        choices=tuple(SCHEDULES),
        default="1f1b",
        help="who computes what when: python schedules.py --schedule NAME draws it (%(default)s)",
    )
    text = f"parts of the model on each rank, with {' and '.join(LOOPED)} (2)"
    p.add_argument("--pp-chunks", type=int, metavar="V", help=text)
    text = "layers of each stage, with commas between (by what they compute)"
    p.add_argument("--pp-layers", metavar="N,N,...", help=text)
    text = "stages, from 0 on, that do as --recompute full says; others as --recompute does"
    p.add_argument("--pp-recompute", metavar="S,S,...", help=text)


def check(args: argparse.Namespace, config: ModelConfig, shares: int) -> None:
    """ValueError, naming the flag, for what no pipeline over these ranks can do; a step's batch
    being cut in `shares` first."""
    for flag in ("--pp-schedule", "--pp-chunks", "--pp-layers", "--pp-recompute"):
        if flag in args.given and args.pp == 1:
            raise ValueError(f"{flag} goes with --pp; give both, or leave it out")
    if args.pp == 1:
        return
    if config.n_mtp_layers:
        raise ValueError("--pp: multi-token prediction needs the embedding on the last stage too")
    if args.bucketed:
        raise ValueError("--bucketed goes with --dp and --cp alone; with --pp take --zero without")
    if args.pp_schedule not in TRAINABLE:
        raise ValueError(
            f"--pp-schedule {args.pp_schedule} updates after every micro-batch, and train.py's "
            "steps are of whole batches: take 1f1b (pipeline.Pipeline runs the other)"
        )
    rows, micro = args.batch_size // shares, args.micro_batch_size
    if rows % micro:
        raise ValueError(
            f"--micro-batch-size {micro} must divide the {rows} sequences of a rank: with --pp all "
            "micro-batches are of one size"
        )
    schedule = _schedule(args, rows // micro)
    if args.compile and any(a.kind == "W" for actions in schedule.actions for a in actions):
        raise ValueError(
            f"--compile: --pp-schedule {args.pp_schedule} takes backward passes apart, which "
            "compiled layers cannot be; take 1f1b, or leave --compile out"
        )
    stages = len(schedule.paths[0])
    stage_layers(args, config, stages)
    if not set(numbers(args.pp_recompute or "", "--pp-recompute")) <= {*range(stages)}:
        raise ValueError(f"--pp-recompute {args.pp_recompute}: stages are from 0 to {stages - 1}")


def numbers(text: str, flag: str) -> list[int]:
    try:
        return [int(n) for n in text.split(",") if text]
    except ValueError:
        raise ValueError(f"{flag} {text}: give numbers, 8,8,7") from None


def _schedule(args: argparse.Namespace, microbatches: int) -> Schedule:
    try:
        return make_schedule(args.pp_schedule, args.pp, microbatches, args.pp_chunks)
    except ValueError as e:
        raise ValueError(
            f"--pp-schedule {e} (microbatches: --batch-size / ranks with batches of their own / "
            "--micro-batch-size)"
        ) from None


def stage_layers(args: argparse.Namespace, config: ModelConfig, stages: int) -> list[range]:
    """The layers of every stage: those of --pp-layers, or such that the slowest is as fast as can
    be, by the operations of a token (the head is the last layer's)."""
    L = config.n_layers
    if args.pp_layers is not None:
        counts = numbers(args.pp_layers, "--pp-layers")
        if len(counts) != stages or sum(counts) != L or min(counts) < 1:
            raise ValueError(
                f"--pp-layers {args.pp_layers}: must be {stages} numbers, one for each stage, 1 or "
                f"more, that are {L} in all"
            )
        ends = [sum(counts[: i + 1]) for i in range(stages)]
        return [range(end - n, end) for n, end in zip(counts, ends)]
    if stages > L:
        raise ValueError(
            f"--pp {args.pp} makes {stages} stages, more than the model's {L} layers: take fewer "
            "ranks, or a schedule with fewer chunks"
        )
    with torch.device("meta"):
        model = Transformer(config)
    costs = [layer_cost(config, layer, i, args.seq_len) for i, layer in enumerate(model.layers)]
    costs[-1] += config.vocab_size * config.dim
    return [range(*cut) for cut in balanced(costs, stages)]


def layer_cost(config: ModelConfig, layer: nn.Module, index: int, seq_len: int) -> float:
    """Multiplications per token: one for each weight it meets, and Hq (D + Dv) for each key, half
    of the sequence on average."""
    weights = 0.0
    for p in layer.parameters():
        stack = p.dim() == 3  # of experts, of which a token meets K
        weights += config.n_experts_per_token * p[0].numel() if stack else p.numel()
    window = min(config.window(index) or seq_len, seq_len)
    keys = window - window * window / (2 * seq_len)
    dims = config.head_dim + (config.v_head_dim or config.head_dim)
    return weights + config.n_heads * dims * keys


def keep_stages_(model: Transformer, stages: Sequence[int], layers: Sequence[range]) -> None:
    """Leave of a model, in place, these of its stages, which have those layers: under their names
    in the whole model. A tied head gets a weight of its own; layers for further tokens go."""
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
    """A rank's chunks of the model, and what ranks along pp do together."""

    def __init__(self, args: argparse.Namespace, config: ModelConfig, mesh: Mesh):
        self.args, self.config, self.mesh, self.rank = args, config, mesh, mesh.rank("pp")
        rows = args.batch_size // (mesh.dp[1] * args.diloco_workers)
        s = _schedule(args, rows // args.micro_batch_size)
        self.schedule, self.layers = s, stage_layers(args, config, len(s.paths[0]))
        self.mine = [chunk for chunk, rank in enumerate(s.home) if rank == self.rank]
        self.ends = {path[at] for path in s.paths for at in (0, -1)}
        self.lines = mesh.world.mesh.flatten(1).mT.tolist()  # all pipelines
        self.up, self.down = p2p_groups(self.lines)
        with torch.device("meta"):
            whole = Transformer(config)
        self.parameters = dict(whole.named_parameters())  # on the meta device
        self.buffers = dict(whole.named_buffers())
        sets = map(self._ranks, self.parameters)
        self.groups = {ranks: None for ranks in sets if len(ranks) > 1}
        for ranks in self.groups:
            lists = [[line[r] for r in ranks] for line in self.lines]
            self.groups[ranks] = dist.new_subgroups_by_enumeration(lists)[0]
        self.weight_grads, self.run = WeightGradStore(), None  # run: what a step has a chunk do
        self.chunks: dict[int, Transformer] = {}
        self.pipes: dict[Any, Pipeline] = {}

    # ---- what is where ----

    def checkpoint_name(self, name: str) -> str:
        """The whole model's name of a parameter here: a head that is tied has its own copy."""
        tied = self.config.tie_embeddings and name == "head.weight"
        return "embed.weight" if tied else name

    def _places(self, name: str) -> list[int]:
        """Of a parameter of the whole model: the rank of every copy."""
        last = len(self.layers) - 1
        stages = [0 if name.startswith("embed.") else last]
        if name.startswith("layers."):
            layer = int(name.split(".")[1])
            stages = [i for i, layers in enumerate(self.layers) if layer in layers]
        elif self.config.tie_embeddings and name == "embed.weight":
            stages = [0, last]
        return [self.schedule.home[path[i]] for path in self.schedule.paths for i in stages]

    def _ranks(self, name: str) -> tuple[int, ...]:
        return tuple(sorted(set(self._places(name))))

    def num_copies(self, model: nn.Module) -> dict[str, int]:
        """How often each parameter here is there along pp."""
        return {name: len(self._places(self.checkpoint_name(name))) for name, _ in model.named_parameters()}

    def local_moe_layers(self) -> list[int]:
        """Which of the whole model's mixtures are here."""
        own = {i for chunk in self.mine for i in self.layers[self.schedule.stage(chunk)]}
        return [n for n, i in enumerate(sorted(self.config.moe_layers)) if i in own]

    # ---- the model ----

    def shard_model_(self, model: Transformer) -> None:
        """Drop what other ranks have. On the meta device or with weights."""
        keep_stages_(model, [self.schedule.stage(chunk) for chunk in self.mine], self.layers)

    def defer_weight_grads_(self, model: Transformer) -> None:
        """Have layers leave gradients of weights to W, if the schedule has any."""
        if not self.schedule.split():
            return
        args, device = self.args, self.mesh.world.device_type
        split_weights_(model, self.weight_grads)
        plain = args.experts == "grouped" and not (args.fp8 or args.qat) and device == "cpu"
        for mixture in model.modules() if plain else ():
            if isinstance(mixture, MoE):
                mixture.experts = split_experts(mixture.experts, self.weight_grads)

    def is_recomputed(self, layer: str) -> bool:
        """--pp-recompute's answer for a layer of that name."""
        stages = numbers(self.args.pp_recompute or "", "--pp-recompute")
        return any(int(layer) in self.layers[stage] for stage in stages)

    def build_chunks_(self, model: Transformer, sharded: bool, dtype: torch.dtype | None) -> None:
        """The chunks, once the layers are what they are to be: models over the same modules.
        dtype: what fully_shard, if it comes next, gathers: then hidden states between layers are of
        it."""
        self.sharded, self.dtype = sharded, dtype if sharded else None
        layers = dict(model.layers.named_children())
        for chunk in self.mine:
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
        self, model: Transformer, batch: Tensor, count: Any, rows: int, autocast: Callable,
        attend: Attend, balance: Any, layout: Any,
    ) -> Tensor:  # fmt: skip
        """train.accumulate's part between the counts and the sums over ranks: leave the gradient
        of this rank's batch; its losses (main, ahead, auxiliary), 0 where they are not made."""
        totals, at = torch.zeros(3, device=batch.device), self._positions(batch, layout)
        size = self.args.micro_batch_size
        pieces, pipe = batch.split(size), self._pipeline(model)
        inputs, targets, where = zip(*(cut(piece, at, layout.packed) for piece in pieces))

        def run(part: Transformer, x: Tensor) -> Any:
            if balance is not None:
                balance.watching = True
            with autocast():
                y = part(x, where[pipe.microbatch], attend)
            if balance is None:
                return y
            aux = balance.take() * (len(x) / rows)
            totals[2] += aux.detach()
            return (y, aux / layout.size("tp")) if aux.requires_grad else y

        def loss(logits: Tensor, m: int) -> Tensor:
            with autocast():
                main = layout.cross_entropy(logits, targets[m]) / count
            totals[0] += main.detach()
            return main

        self.run = run
        pipe.step(self._shape(inputs[0]), inputs, loss)
        if self.sharded and self.schedule.split():
            self._reduce(model, inputs[0], at, attend, autocast)
        return totals

    def _positions(self, batch: Tensor, layout: Any) -> Tensor:
        at = layout.positions(batch.shape[1] - 1, batch.device)
        return torch.arange(batch.shape[1] - 1, device=batch.device) if at is None else at

    def _shape(self, inputs: Tensor) -> tuple[int, int, int]:
        """Of hidden states between ranks."""
        B, T = inputs.shape
        whole = self.args.tp == 1 or self.args.no_sequence_parallel
        return B, T if whole else T // self.args.tp, self.config.dim

    def _pipeline(self, model: Transformer, forward: int = 0) -> Pipeline:
        """The schedule's, or one of so many microbatches' forward passes; made once."""
        if forward not in self.pipes:
            run = lambda chunk: lambda x: self.run(self.chunks[chunk], x)
            chunks, first = {chunk: run(chunk) for chunk in self.chunks}, next(model.parameters())
            how: dict[str, Any] = dict(dtype=self.dtype or first.dtype, device=first.device)
            how["before"] = self._shards() if self.sharded and not forward else None
            schedule = forward_only(self.schedule, forward) if forward else self.schedule
            links = self.up, self.down
            self.pipes[forward] = Pipeline(schedule, chunks, *links, weight_grads=self.weight_grads, **how)
        return self.pipes[forward]

    def _shards(self) -> Callable[[Action, bool], None]:
        """Before an action: whether fully_shard keeps what it gathers for it, and reduces."""
        actions, stage = self.schedule.actions[self.rank], self.args.zero
        split = bool(self.schedule.split())
        after = dict(zip(actions, actions[1:]))

        def before(action: Action, last: bool) -> None:
            part, last = self.chunks[action.chunk], last and not split
            turn = action not in after or after[action].chunk != action.chunk
            part.set_requires_gradient_sync(last)
            part.set_reshard_after_forward(stage == 3 and turn)
            part.set_reshard_after_backward(last or (stage == 3 and turn))

        return before

    def _reduce(
        self, model: Transformer, tokens: Tensor, at: Tensor, attend: Attend, autocast: Callable
    ) -> None:
        """The backward pass that reduces what W has added up: of as few tokens as there can be, and
        gradients of zero. Two where gradients are bf16, for only those that a further pass has
        followed does fully_shard have in the dtype it reduces."""
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
        """Add up the gradients of what is there more than once along pp. The last of all sums: what
        comes after it, copies might round differently."""
        named: dict[str, list[Tensor]] = {}
        for name, p in model.named_parameters():
            if p.requires_grad and len(self._places(self.checkpoint_name(name))) > 1:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                named.setdefault(self.checkpoint_name(name), []).append(local(p.grad))
        for name in (name for name in self.parameters if name in named):
            first, *others = named[name]
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
        """The summed cross-entropy of each batch on the last stage; zeros elsewhere."""
        at, none = self._positions(batches[0], layout), torch.zeros((), device=batches[0].device)
        pipe = self._pipeline(model, forward=len(batches))
        inputs, targets, where = zip(*(cut(batch, at, layout.packed) for batch in batches))

        def run(part: Transformer, x: Tensor) -> Tensor:
            with autocast():
                return part(x, where[pipe.microbatch], attend)

        def loss(logits: Tensor, m: int) -> Tensor:
            with autocast():
                return layout.cross_entropy(logits, targets[m])

        self.run = run
        found = pipe.forward(self._shape(inputs[0]), inputs, loss)
        return [found.get(m, none.clone()) for m in range(len(batches))]

    def full_tensors(
        self,
        metas: Mapping[str, Tensor],
        named: Mapping[str, Tensor],
        whole: Callable[[str, Tensor], Tensor | None],
    ) -> Iterator[tuple[str, Tensor | None]]:
        """(name, whole tensor on the first rank) of all those of `metas`; named: what is here of
        them, whole(name, x): the whole one of what the ranks of this stage have. Collective."""
        dtype = next((x.dtype for x in named.values()), None)
        for name, meta in metas.items():
            owner = self._ranks(name)[0]
            x = whole(name, named[name]) if self.rank == owner else None
            line = dist.get_process_group_ranks(self.up)
            if owner and line[0] == 0 and self.rank in (0, owner):
                if self.rank == owner:
                    dist.send(x.contiguous(), group=self.down, group_dst=0)
                    x = None
                else:
                    how = dict(dtype=dtype or meta.dtype, device=self.mesh.world.device_type)
                    x = torch.empty_like(meta, **how)
                    dist.recv(x, group=self.down, group_src=owner)
            yield name, x


def cut(batch: Tensor, at: Tensor, packed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(inputs, targets, positions) of coded rows (B, T + 1): those at `at`, or whole packed rows,
    whose positions are those in their documents."""
    inputs, targets, where = decode(batch, packed)
    return inputs[:, at], targets[:, at], at if where is None else where


def forward_only(schedule: Schedule, microbatches: int) -> Schedule:
    """The forward passes of so many microbatches over the same chunks, as they can follow each
    other, from all ends at once."""
    schedule = replace(schedule, microbatches=microbatches)
    rows, begun = [[] for _ in schedule.actions], Counter()
    for m in range(microbatches):
        path = schedule.path(m)
        for stage, chunk in enumerate(path):
            rows[schedule.home[chunk]].append((begun[path] + stage, Action("F", m, chunk)))
        begun[path] += 1
    return replace(schedule, actions=tuple(tuple(a for _, a in sorted(row)) for row in rows))


# --------------------------------------------------------------------------------------------------
# Benchmark: the executor under every schedule, beside torch.distributed.pipelining
# --------------------------------------------------------------------------------------------------


def _model(stages: int, C: int = 256) -> list[nn.Module]:
    """8 blocks, in so many stages."""
    torch.manual_seed(0)
    block = lambda: nn.Sequential(
        nn.RMSNorm(C), nn.Linear(C, 3 * C), nn.GELU(), nn.Linear(3 * C, C)
    )
    return [nn.Sequential(*(block() for _ in range(8 // stages))) for _ in range(stages)]


def _theirs(name: str, home: Sequence[int], rank: int, m: int, x: Tensor, goal: Tensor) -> Callable:
    """torch's schedule of that name, over stages with these homes."""
    import torch.distributed.pipelining as theirs

    n, parts = len(home), _model(len(home))
    mine = [i for i, h in enumerate(home) if h == rank]
    cpu = torch.device("cpu")
    stages = [theirs.PipelineStage(parts[i], i, n, cpu) for i in mine]
    how = dict(loss_fn=lambda y, t: (y - t).square().sum(), scale_grads=False)
    schedule = getattr(theirs, name)(stages if n > 4 else stages[0], m, **how)
    given, wanted = ((x,) if 0 in mine else ()), (dict(target=goal) if n - 1 in mine else {})
    return lambda: schedule.step(*given, **wanted)


def _ours(name: str, rank: int, m: int, x: Tensor, goal: Tensor, links: tuple) -> Callable:
    s, weight_grads, goals = make_schedule(name, 4, m), WeightGradStore(), goal.chunk(m)
    parts, inputs = _model(len(s.paths[0])), x.chunk(m)
    own = {c: parts[s.stage(c)] for c, h in enumerate(s.home) if h == rank}
    for part in own.values() if s.split() else ():
        split_weights_(part, weight_grads)
    pipe, loss = Pipeline(s, own, *links, weight_grads=weight_grads), lambda y, i: (y - goals[i]).square().sum()
    return lambda: pipe.step(inputs[0].shape, inputs, loss)


def benchmark() -> None:
    """Milliseconds of a step of 4 ranks, which share this machine's cores: medians, in turns."""
    dist.init_process_group("gloo")
    rank, links, m = dist.get_rank(), p2p_groups([range(4)]), 16
    x, goal = torch.randn(2, m * 128, 256, generator=torch.Generator().manual_seed(1)).unbind()
    line, loop, vee = [*range(4)], [*range(4)] * 2, [0, 1, 2, 3, 3, 2, 1, 0]
    peers = {"gpipe": ("ScheduleGPipe", line), "1f1b": ("Schedule1F1B", line)}
    peers |= {"interleaved": ("ScheduleInterleaved1F1B", loop)}
    peers |= {"zbv": ("ScheduleZBVZeroBubble", vee), "dualpipev": ("ScheduleDualPipeV", vee)}
    runs = {}
    for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "v-half", "v-min", "dualpipev"):
        runs[name] = _ours(name, rank, m, x, goal, links)
        if name in peers:
            theirs, home = peers[name]
            runs[f"  torch's {theirs}"] = _theirs(theirs, home, rank, m, x, goal)
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(9):
        for name, run in runs.items():
            dist.barrier()
            start = time.perf_counter()
            run()
            dist.barrier()
            spent[name].append(1e3 * (time.perf_counter() - start))
    if rank == 0:
        print(f"4 stages of 2 blocks of 256 x 768, {m} microbatches of 128 rows, fp32, ms")
        for name, ms in spent.items():
            print(f"{name:34}{statistics.median(ms[2:]):9.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    benchmark()
