"""layout.py: train.py's model on many ranks: parallel.py and its company, composed.

    torchrun --nproc-per-node 8 train.py --tp 2 --cp 2 --zero 3

The order is torchtitan's (arXiv:2410.06511, 2.2), for each step needs the one before it undone by
none: experts and matrices are cut (expert and tensor parallelism), blocks recompute their
activations, are compiled, and are sharded (FSDP). What a run is does not depend on it: batches are
a function of (seed, step, sample), weights are drawn whole, parameter by parameter, and every rank
keeps its part; the checkpoint holds whole tensors. So one seed trains one model under every layout,
and a run saved under one goes on under another.

A Layout without a mesh is one process: all its methods then do what one process does.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import argparse
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import moe
from attention import flash_attention
from model import Attend, Block, ModelConfig, MoE, Transformer, causal_attention, rope_cos_sin
from parallel import (
    TensorParallel,
    apply_fsdp,
    apply_tp,
    clip_gradients,
    gather,
    gradient_norm,
    is_stack,
    last_micro_batch,
    local,
    make_mesh,
    copy_shard_,
    reshard,
    sum_gradients,
    vocab_cross_entropy,
)
from parallelism.async_tp import all_gather_matmul, matmul_reduce_scatter
from parallelism.context_parallel import (
    all_gather_attention,
    attention_with_lse,
    cp_positions,
    ring_attention,
    ulysses_attention,
)
from parallelism.expert_parallel import Placement, exchanged, placed
from parallelism.pipeline_model import PipelineStages
from parallelism.pipeline_model import add_flags as add_stage_flags
from parallelism.pipeline_model import check as check_stages
from parallelism.quantized_collectives import (
    QuantizedAllGather,
    QuantizedReduceScatter,
    node_groups,
)
from parallelism.zero import DistributedOptimizer
from training.checkpoint import regions
from training.chunked_loss import linear_cross_entropy
from training.optimizers import mup_factors
from training.recompute import MODES, choose, kept_bytes, segments, wrapped

KERNELS = [torch.ops.sheaf.attention_forward.default]  # whose outputs --recompute selective keeps
IGNORE = -100  # a target that is not counted
LOGITS = 2**29  # bytes of a micro-batch's logits, from which on --loss-chunk auto makes chunks


def add_flags(p: argparse.ArgumentParser) -> None:
    """How the ranks that torchrun starts share the work."""
    number = partial(p.add_argument, type=int)
    number("--dp", metavar="N", help="ranks with batches of their own (all that tp and cp leave)")
    number("--dp-replicate", default=1, metavar="N", help="copies of the shards: HSDP (1)")
    add_stage_flags(p)
    number("--tp", default=1, metavar="N", help="ranks that share every matrix (1)")
    number("--cp", default=1, metavar="N", help="ranks that share every sequence (1)")
    number("--ep", default=1, metavar="N", help="ranks that share the experts out, of dp x cp (1)")
    number("--ep-node-size", metavar="RANKS", help="tokens go to each node of so many ranks once")
    number("--ep-chunks", default=1, help="pieces whose transfers and products overlap (1)")
    p.add_argument(
        "--zero",
        type=int,
        choices=(0, 1, 2, 3),
        default=0,
        help="what data-parallel ranks shard: 1 the optimizer's states, 2 gradients too, 3 "
        "parameters too, by torch's fully_shard (%(default)s)",
    )
    p.add_argument(
        "--bucketed",
        action="store_true",
        help="ZeRO 1 and 2 by zero.py's buckets of gradients, in place of fully_shard",
    )
    p.add_argument(
        "--zero-quantized",
        action="store_true",
        help="shards are gathered as int8, gradients scattered as int4 (ZeRO++): not exact",
    )
    number("--zero-node-size", metavar="RANKS", help="--zero 3 gathers once, then in such nodes")
    p.add_argument(
        "--no-sequence-parallel",
        action="store_true",
        help="with --tp, norms and what is between them whole on every rank",
    )
    p.add_argument("--async-tp", action="store_true", help="tp's transfers overlap with products")
    p.add_argument(
        "--cp-method",
        choices=("zigzag", "striped", "all-gather"),
        default="zigzag",
        help="which parts of a sequence ranks have on a ring, or all keys gathered (%(default)s)",
    )
    number(
        "--cp-ulysses", default=1, metavar="N", help="of cp, exchange heads; the others ring (1)"
    )
    p.add_argument(
        "--dry-run",
        action="store_true",
        help="train nothing: print what a step costs the first of --world-size ranks, in bytes",
    )
    number("--world-size", metavar="N", help="ranks of a --dry-run (1)")


@dataclass(frozen=True)
class ExpertParallel:
    """Which of the experts a rank holds, and the exchanges that take tokens to the others."""

    placement: Placement
    local_expert_ids: tuple[int, ...]
    levels: tuple[tuple[int, Any], ...]  # innermost first: (slots of a member, of which group)
    chunks: int

    def wrap(self, run: Any) -> Any:
        """`run`, which knows this rank's experts, for tokens that choose among all."""
        for i, (width, group) in enumerate(self.levels):
            run = exchanged(run, width, group, self.chunks if i == len(self.levels) - 1 else 1)
        return placed(run, self.placement)


class ParallelDims:
    """One rank's place in a run, and what it does with model, batch, gradients and checkpoint."""

    def __init__(
        self, args: argparse.Namespace | None = None, config: ModelConfig | None = None,
        world: int = 1, device_type: str = "cpu",
    ):  # fmt: skip
        self.args, self.mesh, self.experts, self.has_chunked_loss = args, None, None, False
        self.tp: TensorParallel | None = None
        self.buckets: DistributedOptimizer | None = None
        self.stages: PipelineStages | None = None
        if args is not None:
            sizes = check(args, config, world)
        if world > 1:
            self.mesh = make_mesh(**sizes, device_type=device_type)
            if args.pp > 1:
                self.stages = PipelineStages(args, config, self.mesh)
            if args.ep > 1:
                self.experts = self._share_out(args, config)
            if args.cp > 1:
                whole = self.mesh.world.mesh.movedim(3, -1).reshape(-1, args.cp)
                nested = whole.view(-1, args.cp // args.cp_ulysses, args.cp_ulysses)
                self.ulysses_group, self.ring_group = _new_group(nested), _new_group(nested.mT)

    def size(self, dim: str) -> int:
        return 1 if self.mesh is None else self.mesh.size(dim)

    @property
    def dp_size(self) -> int:
        return 1 if self.mesh is None else self.mesh.dp[1]

    @property
    def packed(self) -> bool:
        """Whether rows hold documents that do not see each other."""
        return self.args is not None and self.args.pack

    @property
    def uses_fsdp(self) -> bool:
        """Whether fully_shard holds the parameters."""
        return self.mesh is not None and self.args.zero > 0 and not self.args.bucketed

    def samples(self, batch_size: int) -> range:
        """Which of a batch's samples are this rank's."""
        return (
            range(batch_size) if self.mesh is None else range(*_strided(self.mesh.dp, batch_size))
        )

    # ---- the model ----

    def shard_model_(self, model: Transformer) -> None:
        """Leave this rank's layers, experts, heads and columns. On the meta device or with
        weights."""
        if self.stages is not None:
            self.stages.shard_model_(model)
        for mixture in _moe_layers(model) if self.experts else ():
            mixture.held = self.experts.local_expert_ids
            for name in ("w_gate_up", "w_down"):
                stack = getattr(mixture, name)
                stack.data = stack.data[list(mixture.held)]
        if self.mesh is not None:
            args = self.args
            ring = (all_gather_matmul, matmul_reduce_scatter) if args.async_tp else None
            how = dict(sequence_parallel=not args.no_sequence_parallel, ring=ring)
            self.tp = apply_tp(model, self.mesh, gather_logits=False, **how)

    def parallelize_(self, model: Transformer, dtype: torch.dtype | None) -> None:
        """What comes over the model's own products: the way to the others' experts, then
        recomputation, compilation and shards. (One process compiles the model as a whole.)"""
        if self.stages is not None:
            self.stages.defer_weight_grads_(model)
        for mixture in _moe_layers(model) if self.experts else ():
            mixture.experts = self.experts.wrap(mixture.experts)
        if self.args is None:
            return
        blocks = [*model.layers, *(depth.block for depth in model.mtp)]
        for block, mode in zip(blocks, self._modes(model)):
            block.forward = wrapped(block.forward, mode, KERNELS)
        if self.args.recompute == "sqrt":
            model.segments = segments(model.layers)
        self._chunk_loss(model)
        if self.mesh is None:
            return
        if self.args.compile:
            for block in blocks:
                for mixture in _moe_layers(block):
                    if self.experts or not moe.has_static_shapes(mixture):
                        mixture.experts = torch.compiler.disable(mixture.experts)
                block.compile()
        parts = [model]
        if self.stages is not None:
            self.stages.build_chunks_(model, self.uses_fsdp, dtype)
            parts = self.stages.chunks.values()
        how = self._transfers() if self.uses_fsdp else {}
        for part in parts if self.uses_fsdp else ():
            how["head_apart"] = self.has_chunked_loss
            apply_fsdp(part, self.mesh, stage=self.args.zero, param_dtype=dtype, **how)

    def _modes(self, model: Transformer) -> list[str]:
        """What each block, and then each depth of further tokens, recomputes."""
        given, names = self.args.recompute, [name for name, _ in model.layers.named_children()]
        if isinstance(given, int):
            narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.args.dtype)
            return budgeted(self.args, model.config, narrow)
        plain = "full" if given == "sqrt" else given  # runs of blocks that keep no more than inputs
        again = lambda name: self.stages is not None and self.stages.is_recomputed(name)
        return ["full" if again(name) else plain for name in names] + [plain] * len(model.mtp)

    def _chunk_loss(self, model: Transformer) -> None:
        """Have the head make the loss itself, chunk by chunk, if logits are many."""
        args, rows = self.args, self.args.loss_chunk
        logits = 4 * args.micro_batch_size * args.seq_len * model.config.vocab_size
        asked = args.logit_z_loss > 0 or (rows or 0) > 0
        able = self.stages is None and type(model.head) is nn.Linear
        if asked and not able:
            raise ValueError("--loss-chunk and --logit-z-loss: not with --pp, nor with --qat")
        if able and (asked or rows is None and logits >= LOGITS):
            model.head.__class__, self.has_chunked_loss = LossHead, True
            model.head.how = dict(chunk=rows, z_loss=args.logit_z_loss)
            if self.size("tp") > 1:
                model.head.how |= dict(group=self.tp.group, vocab_start=self.tp.vocab_start)

    def _transfers(self) -> dict[str, Any]:
        """What --zero-node-size and --zero-quantized tell apply_fsdp."""
        node = self.args.zero_node_size
        if not self.args.zero_quantized:
            return dict(node_size=node)
        shard = self.mesh.dense.mesh.movedim(2, -1).flatten(0, -2).tolist()
        nodes = node_groups(node, shard) if node else None
        gather, scatter = QuantizedAllGather(plain_ranks=node or 1), QuantizedReduceScatter
        return dict(node_size=node, all_gather=gather, reduce_scatter=scatter(nodes=nodes))

    @torch.no_grad()
    def init_weights_(self, model: Transformer, seed: int) -> None:
        """The weights that one process draws from the seed, this rank's part of them: whole tensors
        come and go one by one."""
        rng, here = torch.Generator().manual_seed(seed), dict(model.named_parameters())
        for name, shape in self.full_shapes(model).items():
            whole = torch.empty(shape)
            model.init_weight(name, whole, rng)
            if self.args is not None and self.args.mup_base and whole.dim() > 1:
                sizes = model.config.dim, self.args.mup_base
                whole.mul_(mup_factors(name, whole.shape, *sizes)[0])
            self.copy_shards_(here, name, whole)
        for buffer in model.buffers():
            buffer.zero_()

    def full_shapes(self, model: Transformer) -> dict[str, torch.Size]:
        """Of the whole model's parameters."""
        with torch.device("meta"):
            return {name: p.shape for name, p in Transformer(model.config).named_parameters()}

    def checkpoint_name(self, name: str) -> str:
        """A parameter's name in the whole model, and in a checkpoint."""
        return name if self.stages is None else self.stages.checkpoint_name(name)

    def copy_shards_(self, here: Mapping[str, Tensor], stored: str, whole: Tensor) -> None:
        """`put` into the parameters here, one, two or none, that are the whole model's of that
        name."""
        for name in {stored, "head.weight"} & here.keys():
            if self.checkpoint_name(name) == stored:
                self.copy_shard_(name, here[name], whole)

    def copy_shard_(self, name: str, p: Tensor, whole: Tensor) -> None:
        """Copy into a parameter, or what is cut and sharded as it is, its part of the whole."""
        if self.experts and is_stack(p):
            whole = whole[list(self.experts.local_expert_ids)]
        copy_shard_(p, whole, self.tp.cuts.get(name) if self.tp else None)

    def full_tensors(
        self, named: Mapping[str, Tensor], buffers: bool = False
    ) -> Iterator[tuple[str, Tensor | None]]:
        """(name, the whole tensor on the first rank) of all the model's parameters or buffers, from
        those here, or what is cut and sharded as they are. Collective."""
        if self.stages is None:
            yield from ((name, self.full_tensor(name, x)) for name, x in named.items())
        else:
            metas = self.stages.buffers if buffers else self.stages.parameters
            yield from self.stages.full_tensors(metas, named, self.full_tensor)

    def full_tensor(self, name: str, x: Tensor) -> Tensor | None:
        """The whole of a parameter, or of what is cut and sharded as it is, on the first of the
        ranks that share it, and perhaps others. Collective over these."""
        if self.mesh is None:
            return x.detach()
        x = gather(x, self.tp.cuts.get(name), self.mesh)
        if x is None or not self.experts or not is_stack(x):
            return x
        first, group = self.mesh.rank("ep") == 0, self.mesh.group("ep")
        parts = [torch.empty_like(x) for _ in range(self.mesh.size("ep"))] if first else None
        dist.gather(x.contiguous(), parts, group=group, group_dst=0)
        return torch.cat(parts) if first else None

    def shard_regions(self, name: str, x: Tensor) -> tuple[tuple[int, ...], list[Any]]:
        """(shape of the whole, blocks of it) of which a parameter, or a buffer, is this rank's
        part, as checkpoint.Piece has them."""
        shape, cut = list(x.shape), self.tp.cuts.get(name) if self.tp else None
        stacked = self.experts is not None and is_stack(x)
        shape[:1] = [self.experts.placement.n_experts] if stacked else shape[:1]
        shape = shape if cut is None else list(cut.whole_shape(shape))
        dims = [[range(n)] for n in shape]
        if stacked:
            dims[0] = [range(e, e + 1) for e in self.experts.local_expert_ids]
        if cut is not None:
            starts = range(cut.start, cut.blocks * cut.whole, cut.whole)
            dims[cut.dim] = [range(s, s + cut.stop - cut.start) for s in starts]
        if isinstance(x, DTensor):
            for i, placement in enumerate(x.placements):
                if placement.is_shard():
                    ranks, rank = x.device_mesh.size(i), x.device_mesh.get_local_rank(i)
                    dims[0] = _shard(dims[0], ranks, rank)
        return tuple(shape), regions(shape, dims)

    @property
    def shard_id(self) -> str:
        """Which part of the state is here: ranks of which it is one have copies of each other."""
        if self.mesh is None:
            return "all"
        shared = ("pp", "tp", "ep") + ("fsdp",) * (self.args.zero > 0)
        return ".".join(f"{dim}{self.mesh.rank(dim)}/{self.mesh.size(dim)}" for dim in shared)

    def optimizer(self, groups: list[dict[str, Any]], factory: Any) -> Any:
        """factory(groups), or of slices of them with --bucketed."""
        if self.mesh is None or not self.args.bucketed:
            return factory(groups)
        group, stage = self.mesh.group("fsdp"), self.args.zero
        self.buckets = DistributedOptimizer(groups, factory, group, stage=stage)
        return self.buckets

    # ---- a step ----

    def attend(self, plain: Attend) -> Attend:
        """The attend hook: `plain`, or with --cp one that attends across ranks."""
        if self.size("cp") == 1:
            return plain
        method, heads = self.args.cp_method, self.args.cp_ulysses

        def piece(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
            """sdpa tells no lse: on a GPU, where plain scores are too large, the kernels."""
            if q.is_cuda or self.args.attention == "flash":
                return flash_attention(q, k, v, return_lse=True, **how)
            return attention_with_lse(q, k, v, **how)

        form = all_gather_attention if method == "all-gather" else ring_attention
        run = partial(form, placement=self._placement, attention=piece, group=self.ring_group)
        if heads > 1:
            inner = partial(run, return_lse=True) if heads < self.size("cp") else piece
            run = partial(ulysses_attention, attention=inner, group=self.ulysses_group)

        def attend(spec: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
            return run(q, k, v, scale=spec.scale, window=spec.window)

        return attend

    @property
    def _placement(self) -> str:
        return "striped" if self.args.cp_method == "striped" else "zigzag"

    def positions(self, seq_len: int, device: torch.device) -> Tensor | None:
        """Which of a sequence's tokens are this rank's; None: all."""
        if self.size("cp") == 1:
            return None
        ring, heads = divmod(self.mesh.rank("cp"), self.args.cp_ulysses)
        rings = self.size("cp") // self.args.cp_ulysses
        own = cp_positions(seq_len, rings, ring, self._placement) if rings > 1 else None
        own = torch.arange(seq_len) if own is None else own
        return own.chunk(self.args.cp_ulysses)[heads].to(device)

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Summed, in nats: of logits (B, T, V), or of this rank's part of the vocabulary."""
        logits, targets = logits.flatten(0, 1), targets.flatten()
        if self.size("tp") > 1:
            return vocab_cross_entropy(logits, targets, self.tp, IGNORE)
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="sum")

    def head_loss(self, model: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
        """cross_entropy of the head's logits, which need not all be there at a time."""
        if self.has_chunked_loss:
            return model.head(hidden, targets)
        return self.cross_entropy(model.head(hidden), targets)

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Of what ranks with the same tokens all have: the sum over ranks with others."""
        if self.mesh is None:
            return x
        dist.all_reduce(x)
        return x // self.size("tp") if not x.is_floating_point() else x / self.size("tp")

    def micro_batches(self, model: nn.Module, batch: Tensor, size: int) -> Iterator[Tensor]:
        """The step's pieces, shards being told which is the last."""
        pieces = batch.split(size)
        for i, piece in enumerate(pieces, 1):
            if self.uses_fsdp:
                last_micro_batch(model, self.args.zero, i == len(pieces))
            held = self.buckets is not None and i < len(pieces)
            with self.buckets.accumulate() if held else contextlib.nullcontext():
                yield piece

    def reshard(self, model: nn.Module) -> None:
        """After forward passes without backward ones."""
        if self.uses_fsdp:
            reshard(model, self.args.zero)

    def sum_gradients(self, model: nn.Module) -> None:
        """What the backward passes of a step have left undone."""
        if self.args is not None and self.args.optimizer_in_backward:
            return
        if self.buckets is not None:
            self.buckets.finish()
        elif self.mesh is not None:
            sum_gradients(model, self.mesh, self.tp)
        if self.stages is not None:
            self.stages.sum_shared_gradients(model)

    def scale_gradients(self, model: nn.Module, factor: float) -> None:
        if self.buckets is not None:
            self.buckets.scale_gradients(factor)
        for p in model.parameters() if self.buckets is None else ():
            if p.grad is not None:
                local(p.grad).mul_(factor)

    def clip(self, model: nn.Module, most: float) -> Tensor:
        """Clip the gradient of the whole model; its norm before (0 if none is left)."""
        if self.args is not None and self.args.optimizer_in_backward:
            return torch.zeros(())
        if self.mesh is None:
            squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
            norm = torch.stack(squares).sum().sqrt()
            nn.utils.clip_grads_with_norm_(model.parameters(), most, norm)
            return norm
        if self.buckets is not None:
            square = self.buckets.squared_norm()
            dist.all_reduce(square, group=self.mesh.group("fsdp"))
            self.buckets.scale_gradients((most / (square.sqrt() + 1e-6)).clamp(max=1.0))
            return square.sqrt()
        copies = {} if self.stages is None else self.stages.num_copies(model)
        norm = gradient_norm(model, self.mesh, self.tp, copies)
        clip_gradients(model, norm, most)
        return norm

    def _share_out(self, args: argparse.Namespace, config: ModelConfig) -> ExpertParallel:
        placement, ep = Placement.even(config.n_experts, args.ep), args.ep
        levels, node = ((placement.width, self.mesh.group("ep")),), args.ep_node_size
        if node is not None:
            nodes = self.mesh.experts.mesh.mT.reshape(-1, ep // node, node)
            levels = ((placement.width, _new_group(nodes)), (placement.width * node, _new_group(nodes.mT)))
        local_expert_ids = placement.slots[self.mesh.rank("ep")]
        return ExpertParallel(placement, local_expert_ids, levels, args.ep_chunks)


class LossHead(nn.Linear):
    """The model's head, which with targets gives their summed cross-entropy, and never all logits
    at a time (chunked_loss.py)."""

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return super().forward(hidden)
        flat = hidden.flatten(0, 1), self.weight, targets.flatten()
        how = self.how if torch.is_grad_enabled() else self.how | {"z_loss": 0.0}  # validation
        return linear_cross_entropy(*flat, bias=self.bias, ignore_index=IGNORE, **how)


def budgeted(args: argparse.Namespace, config: ModelConfig, dtype: torch.dtype | None) -> list[str]:
    """The modes of blocks that recompute least, of those that keep at most --recompute's bytes of a
    micro-batch. What each keeps, and multiplies again, is found with fake tensors."""
    kinds = {window: _costs(args, config, i, dtype) for i, window in enumerate(_windows(config))}
    try:
        return choose([kinds[window] for window in _windows(config)], args.recompute)
    except ValueError as e:
        raise ValueError(f"--recompute {args.recompute}: {e}") from None


def _windows(config: ModelConfig) -> list[int | None]:
    return [config.window(i) for i in range(config.n_layers)]


def _costs(
    args: argparse.Namespace, config: ModelConfig, index: int, dtype: torch.dtype | None
) -> dict[str, tuple[int, float]]:
    """Of one block in each mode: (bytes kept, flops of products that are made again)."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # for this alone, and slow to import
    from torch.utils.flop_counter import FlopCounterMode

    costs, first = {}, 0.0
    with FakeTensorMode():
        block, at = Block(config, index, False), torch.arange(args.seq_len)
        x = torch.empty(args.micro_batch_size, args.seq_len, config.dim).requires_grad_()
        rope = rope_cos_sin(config, at)
        held = [*block.parameters(), *rope, at]
        for mode in MODES[:4]:
            forward = partial(wrapped(block.forward, mode), x, rope, at, causal_attention)
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                kept = kept_bytes(forward, held)
                with FlopCounterMode(display=False) as counter:
                    forward().sum().backward()
            flops = float(counter.get_total_flops())
            first = first or flops
            costs[mode] = kept, flops - first
    return costs


def _strided(share: tuple[int, int], n: int) -> tuple[int, int, int]:
    return share[0], n, share[1]


def _new_group(ranks: Tensor) -> Any:
    """The process group of that row of ranks which has this one. Collective."""
    return dist.new_subgroups_by_enumeration(ranks.flatten(0, -2).tolist())[0]


def _shard(ranges: list[range], ranks: int, rank: int) -> list[range]:
    """Of rows, given by ranges, those that fully_shard leaves a rank."""
    rows = sum(map(len, ranges))
    each = -(-rows // ranks)
    first, last, found, seen = each * rank, min(rows, each * (rank + 1)), [], 0
    for r in ranges:
        start, stop = max(first - seen, 0), min(last - seen, len(r))
        found += [range(r.start + start, r.start + stop)] if start < stop else []
        seen += len(r)
    return found


def _moe_layers(model: nn.Module) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


def check(args: argparse.Namespace, config: ModelConfig, world: int) -> dict[str, int]:
    """The mesh's sizes. ValueError, naming the flag, if they do not fit ranks, model or batch."""
    tp, cp, ep, copies, node = args.tp, args.cp, args.ep, args.dp_replicate, args.ep_node_size
    over, shared = f"--tp {tp} x --cp {cp}", tp * cp * args.pp
    over = f"--pp {args.pp} x {over}" if args.pp > 1 else over
    if world % shared:
        raise ValueError(f"{over} = {shared} must divide the {world} ranks that torchrun starts")
    dp = world // shared
    if args.dp is not None and args.dp != dp:
        raise ValueError(
            f"--dp {args.dp} x {over} = {args.dp * shared}, but torchrun starts {world} ranks"
        )
    if dp % copies:
        raise ValueError(f"--dp-replicate {copies} must divide the {dp} ranks with other batches")
    if copies > 1 and not args.zero:
        raise ValueError("--dp-replicate copies shards: it goes with --zero 1, 2 or 3")
    alone = tp == ep == copies == 1
    if args.bucketed and not (args.zero in (1, 2) and alone):
        raise ValueError("--bucketed goes with --zero 1 or 2, and with --dp and --cp alone")
    if args.zero_quantized and (not args.zero or args.bucketed):
        raise ValueError("--zero-quantized goes with --zero 1, 2 or 3, and without --bucketed")
    within, shards = args.zero_node_size, dp // copies * cp
    if within is not None and not (args.zero == 3 and ep == args.pp == 1):
        raise ValueError("--zero-node-size goes with --zero 3, and without --ep and --pp")
    if within is not None and (not 1 < within < shards or shards % within):
        raise ValueError(
            f"--zero-node-size {within} must divide the {shards} ranks that shard, and lie between "
            "1 and these"
        )
    if (dp // copies * cp) % ep:
        raise ValueError(
            f"--ep {ep} must divide the {world} ranks that torchrun starts"
            if world == dp // copies
            else f"--ep {ep} must divide the {dp // copies * cp} ranks of dp x cp"
        )
    if node is not None and (not 1 < node < ep or ep % node):
        raise ValueError(f"--ep-node-size {node} must divide --ep {ep}, and lie between 1 and it")
    if ep > 1:
        try:
            Placement.even(config.n_experts, ep)
        except ValueError as e:
            raise ValueError(f"--ep {ep}: {e}") from None
    if args.batch_size % dp:
        raise ValueError(
            f"--batch-size {args.batch_size} must be a multiple of the {dp} ranks"
            + (" with batches of their own" if dp < world else "")
        )
    check_model(args, config)
    check_memory(args, config, world)
    check_stages(args, config, dp * args.diloco_workers)
    return dict(dp_replicate=copies, dp_shard=dp // copies, cp=cp, tp=tp, pp=args.pp, ep=ep)


def check_memory(args: argparse.Namespace, config: ModelConfig, world: int) -> None:
    """ValueError for flags of memory, optimizers and tasks that do not go with this layout."""
    dp = world // (args.tp * args.cp * args.pp)
    units = {"dpo": 2, "grpo": args.group}.get(args.task, 1)
    if args.batch_size // units % dp:
        what = "pairs" if args.task == "dpo" else "prompts"
        raise ValueError(
            f"--batch-size {args.batch_size} is {args.batch_size // units} {what} of {units} rows, "
            f"which must be a multiple of the {dp} ranks with batches of their own"
        )
    parts = [flag for flag in ("pp", "tp", "cp", "ep") if getattr(args, flag) > 1]
    if isinstance(args.recompute, int) and (parts or config.moe_layers or config.n_mtp_layers):
        raise ValueError("--recompute BYTES is for whole dense models; take selective or full")
    if args.recompute == "sqrt" and "pp" in parts:
        raise ValueError("--recompute sqrt goes by all layers; with --pp take full or selective")
    if args.pack and "cp" in parts:
        raise ValueError("--pack: not with --cp, whose ranks would have to know all borders")
    if args.mup_base is not None and config.tie_embeddings:
        raise ValueError("--mup-base: a tied head cannot have a learning rate of its own")
    whole = not parts and (world == 1 or not args.zero)
    if args.optimizer == "muon" and not whole:
        raise ValueError("--optimizer muon is of whole matrices: no --zero, --tp, --ep, --pp")
    if args.dtype == "fp16" and "pp" in parts:
        raise ValueError("--dtype fp16 scales its loss, which --pp does not; take bf16")
    if (args.offload or args.weights == "bf16") and args.bucketed:
        raise ValueError("--bucketed has an optimizer of its own: no --offload, no --weights bf16")
    if args.mirror_every is not None and args.bucketed:
        raise ValueError("--mirror-every keeps shards of fully_shard; leave --bucketed out")
    if args.optimizer_in_backward:
        if {*parts} - {"cp"} or (world > 1 and not args.zero) or args.bucketed:
            raise ValueError("--optimizer-in-backward: one process, or --zero with --dp and --cp")
        if args.batch_size // max(1, world // args.cp) > args.micro_batch_size:
            raise ValueError(
                "--optimizer-in-backward steps in every backward pass: give --micro-batch-size all "
                f"the {args.batch_size // max(1, world // args.cp)} sequences of a rank"
            )


def check_model(args: argparse.Namespace, config: ModelConfig) -> None:
    """ValueError for what --tp and --cp cannot do of this model."""
    sequence = args.tp > 1 and not args.no_sequence_parallel
    if config.n_mtp_layers and (args.cp > 1 or sequence):
        raise ValueError(
            "multi-token prediction shifts the sequence by a token, which ranks that have parts of "
            "it cannot: leave --cp out, and give --no-sequence-parallel with --tp"
        )
    if args.seq_len % (args.cp * 2 * (args.tp if sequence else 1)) and args.cp > 1:
        raise ValueError(
            f"--seq-len {args.seq_len} must be a multiple of 2 x --cp {args.cp}"
            + (f" x --tp {args.tp}" if sequence else "")
        )
    if sequence and args.seq_len % args.tp:
        raise ValueError(
            f"--seq-len {args.seq_len} must be a multiple of --tp {args.tp}; or give "
            "--no-sequence-parallel"
        )
    if args.async_tp and not sequence:
        raise ValueError("--async-tp overlaps what --tp with sequence parallelism transfers")
    if args.tp > 1 and (args.fp8 or args.qat):
        flag = "--fp8" if args.fp8 else "--qat"
        raise ValueError(f"{flag} scales whole matrices, and --tp cuts them; leave one out")
    heads = config.n_heads // args.tp
    if args.cp % args.cp_ulysses or heads % args.cp_ulysses:
        raise ValueError(
            f"--cp-ulysses {args.cp_ulysses} must divide --cp {args.cp} and the {heads} heads of a "
            "rank"
        )
    keys, ways = max(1, config.n_kv_heads // args.tp), args.cp_ulysses
    if keys % ways and ways % keys:
        raise ValueError(
            f"--cp-ulysses {ways} and the {keys} key heads of a rank: one must be a multiple of "
            "the other"
        )
    rope = config.rope_scaling or {}
    if args.cp > 1 and rope.get("rope_type") == "dynamic" and args.seq_len > config.max_seq_len:
        raise ValueError(
            f"--cp: dynamic NTK goes by the longest position, which only one rank has; --seq-len "
            f"{args.seq_len} must not exceed {config.max_seq_len}"
        )
    if args.cp > 1 and config.alibi:
        raise ValueError("--cp: attention across ranks knows no ALiBi biases; leave it out")
    if args.cp > 1 and args.sequence_loss:
        raise ValueError("--sequence-loss is of whole sequences, which --cp cuts; leave one out")
