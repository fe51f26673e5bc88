"""All parallelism of train.py: the techniques of parallel.py and parallelism/, composed.

    torchrun --nproc-per-node 8 train.py --tp 2 --cp 2 --zero 3

They are applied in torchtitan's order (arXiv:2410.06511, 2.2), in which no step undoes an earlier
one: expert and tensor parallelism, activation checkpointing, torch.compile, FSDP. Training results
do not depend on the layout. Batches are a function of (seed, step, sample); weights are initialized
as full tensors, parameter by parameter, of which every rank keeps its shard; checkpoints hold full
tensors. So one seed trains one model under every layout, and a run can resume under another layout.

A ParallelDims without a mesh is one process, and all its methods work there too.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

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
from model import MLP, Attend, Block, ModelConfig, MoE, Transformer, causal_attention, rope_cos_sin
from parallel import (
    TensorParallel,
    apply_fsdp,
    apply_tp,
    clip_gradients,
    copy_shard_,
    gather_full_tensor,
    gradient_norm,
    is_expert_stack,
    make_mesh,
    reshard,
    set_last_micro_batch,
    squared_norm,
    sum_gradients,
    to_local,
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
from parallelism.expert_parallel import Placement, all_to_all_dispatch, keep_local_experts_
from parallelism.expert_parallel import remap_expert_ids
from training.pipeline_model import PipelineStages, check_stages
from parallelism.quantized_collectives import QuantizedAllGather, QuantizedReduceScatter
from parallelism.quantized_collectives import node_groups
from parallelism.ring_self_attention import ring_self_attention
from parallelism.zero import DistributedOptimizer
from training.checkpoint import regions
from training.chunked_loss import linear_cross_entropy
from training.config import TrainConfig
from training.data import is_padding
from training.optimizers import mup_factors
from training.recompute import MODES, checkpoint_wrapper, choose_modes, chunk_tokens
from training.recompute import layer_groups, saved_bytes

SAVED_OPS = [torch.ops.sheaf.attention_forward.default]  # whose outputs --recompute selective saves
IGNORE = -100  # ignore_index: a target that is not counted
AUTO_CHUNK_LOGITS = 2**29  # bytes of a micro-batch's logits above which the loss is chunked


@dataclass(frozen=True)
class ExpertParallel:
    """The experts of this rank, and the all-to-alls that dispatch tokens to other ranks."""

    rank: int
    ranks: int
    levels: tuple[tuple[int, Any], ...]  # innermost first: (ranks per member, group)
    chunks: int
    quantize: str | None = None

    def local_expert_ids(self, n_experts: int) -> tuple[int, ...]:
        """This rank's experts of a layer with n_experts."""
        return Placement.even(n_experts, self.ranks).slots[self.rank]

    def wrap(self, run: Any, n_experts: int) -> Any:
        """Wrap the experts hook `run` over local experts to take tokens routed to any expert."""
        placement = Placement.even(n_experts, self.ranks)
        for i, (members, group) in enumerate(self.levels):
            chunks = self.chunks if i == len(self.levels) - 1 else 1
            width = members * placement.slots_per_rank
            run = all_to_all_dispatch(run, width, group, chunks, self.quantize)
        return remap_expert_ids(run, placement)


class ParallelDims:
    """The mesh of a run, and how one rank shards model, batch, gradients and checkpoint."""

    def __init__(
        self, args: TrainConfig | None = None, config: ModelConfig | None = None,
        world: int = 1, device_type: str = "cpu",
    ):  # fmt: skip
        self.args, self.mesh, self.experts, self.has_chunked_loss = args, None, None, False
        self.tp: TensorParallel | None = None
        self.buckets: DistributedOptimizer | None = None
        self.stages: PipelineStages | None = None
        self._positions: dict[tuple[int, torch.device], Tensor] = {}
        if args is not None:
            sizes = check(args, config, world)
        if world > 1:
            self.mesh = make_mesh(**sizes, device_type=device_type)
            if args.pp > 1:
                self.stages = PipelineStages(args, config, self.mesh)
            if args.ep > 1:
                self.experts = self._make_expert_parallel(args)
            if args.cp > 1:
                cp_ranks = self.mesh.world.mesh.movedim(3, -1).reshape(-1, args.cp)
                nested = cp_ranks.view(-1, args.cp // args.cp_ulysses, args.cp_ulysses)
                self.ulysses_group, self.ring_group = _new_group(nested), _new_group(nested.mT)

    def size(self, dim: str) -> int:
        return 1 if self.mesh is None else self.mesh.size(dim)

    @property
    def dp_size(self) -> int:
        return 1 if self.mesh is None else self.mesh.dp_rank_and_size[1]

    @property
    def packed(self) -> bool:
        """Whether rows are packed documents, each attending only to itself."""
        return self.args is not None and self.args.pack

    @property
    def uses_fsdp(self) -> bool:
        """Whether parameters are sharded by fully_shard."""
        return self.mesh is not None and self.args.zero > 0 and not self.args.distributed_optimizer

    def samples(self, batch_size: int) -> range:
        """The indices of this rank's samples of a batch."""
        if self.mesh is None:
            return range(batch_size)
        rank, size = self.mesh.dp_rank_and_size
        return range(rank, batch_size, size)

    # ---- the model ----

    def shard_model_(self, model: Transformer) -> None:
        """Keep this rank's layers, experts, heads and columns, in place. The model may be on the
        meta device."""
        if self.stages is not None:
            self.stages.shard_model_(model)
        for moe_layer in _moe_layers(model) if self.experts else ():
            ids = self.experts.local_expert_ids(len(moe_layer.router))
            keep_local_experts_(moe_layer, ids)
        if self.mesh is not None:
            args = self.args
            async_matmuls = (all_gather_matmul, matmul_reduce_scatter) if args.async_tp else None
            options = dict(gather_logits=False, async_matmuls=async_matmuls)
            options["sequence_parallel"] = args.sequence_parallel
            self.tp = apply_tp(model, self.mesh, **options)

    def parallelize_(self, model: Transformer, dtype: torch.dtype | None) -> None:
        """Apply, after linear layers are converted: expert dispatch, activation checkpointing,
        torch.compile per block (one process compiles the whole model instead), FSDP."""
        if self.stages is not None:
            self.stages.defer_weight_grads_(model)
        for moe_layer in _moe_layers(model) if self.experts else ():
            moe_layer.experts = self.experts.wrap(moe_layer.experts, len(moe_layer.router))
        if self.args is None:
            return
        blocks = [*model.layers, *(depth.block for depth in model.mtp)]
        for block in blocks if self.args.mlp_chunk else ():
            if isinstance(block.mlp, MLP):
                block.mlp.forward = chunk_tokens(block.mlp.forward, self.args.mlp_chunk)
        for block, mode in zip(blocks, self._recompute_modes(model)):
            block.forward = checkpoint_wrapper(block.forward, mode, SAVED_OPS)
        if self.args.recompute == "sqrt":
            model.layer_groups = layer_groups(model.layers)
        self._enable_chunked_loss(model)
        if self.mesh is None:
            return
        if self.args.compile:
            for block in blocks:
                for moe_layer in _moe_layers(block):
                    if self.experts or not moe.has_static_shapes(moe_layer):
                        moe_layer.experts = torch.compiler.disable(moe_layer.experts)
                block.compile()
        parts = [model]
        if self.stages is not None:
            self.stages.build_chunks_(model, self.uses_fsdp, dtype)
            parts = self.stages.chunks.values()
        options = self._fsdp_comm_options() if self.uses_fsdp else {}
        for part in parts if self.uses_fsdp else ():
            options["separate_head"] = self.has_chunked_loss
            apply_fsdp(part, self.mesh, stage=self.args.zero, param_dtype=dtype, **options)

    def _recompute_modes(self, model: Transformer) -> list[str]:
        """The recomputation mode of each block, then of each MTP depth."""
        mode, names = self.args.recompute, [name for name, _ in model.layers.named_children()]
        if isinstance(mode, int):
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.args.dtype)
            return modes_within_budget(self.args, model.config, dtype)
        mode = "full" if mode == "sqrt" else mode  # sqrt: groups of blocks that save only inputs
        is_full = lambda name: self.stages is not None and self.stages.is_recomputed(name)
        return ["full" if is_full(name) else mode for name in names] + [mode] * len(model.mtp)

    def _enable_chunked_loss(self, model: Transformer) -> None:
        """Make the head compute the loss chunk by chunk, on request or if the logits are large."""
        args, rows = self.args, self.args.loss_chunk
        logits = 4 * args.micro_batch_size * args.seq_len * model.config.vocab_size
        requested = args.output_z_loss > 0 or (rows or 0) > 0
        supported = self.stages is None and type(model.head) is nn.Linear
        needed = "--set loss_chunk and output_z_loss need a plain head: no --pp and no --qat"
        _check(supported or not requested, needed)
        if supported and (requested or rows is None and logits >= AUTO_CHUNK_LOGITS):
            model.head.__class__, self.has_chunked_loss = LossHead, True
            model.head.loss_kwargs = dict(chunk=rows, z_loss=args.output_z_loss)
            if self.size("tp") > 1:
                tp_kwargs = dict(group=self.tp.group, vocab_start=self.tp.vocab_start)
                model.head.loss_kwargs |= tp_kwargs

    def _fsdp_comm_options(self) -> dict[str, Any]:
        """The arguments of apply_fsdp from hpz_size and zero_quantized."""
        node = self.args.hpz_size
        if not self.args.zero_quantized:
            return dict(node_size=node)
        fsdp_ranks = self.mesh.dense.mesh.movedim(2, -1).flatten(0, -2).tolist()
        nodes = node_groups(node, fsdp_ranks) if node else None
        all_gather = QuantizedAllGather(unquantized_group_size=node or 1)
        reduce_scatter = QuantizedReduceScatter(nodes=nodes)
        return dict(node_size=node, all_gather=all_gather, reduce_scatter=reduce_scatter)

    @torch.no_grad()
    def init_weights_(self, model: Transformer, seed: int) -> None:
        """Initialize as one process does from this seed. Full tensors are materialized one at a
        time, and this rank's shards copied."""
        rng, params = torch.Generator().manual_seed(seed), dict(model.named_parameters())
        for name, shape in self.full_shapes(model).items():
            full = torch.empty(shape)
            model.init_weight(name, full, rng)
            if self.args is not None and self.args.mup_base and full.dim() > 1:
                sizes = model.config.dim, self.args.mup_base
                full.mul_(mup_factors(name, full.shape, *sizes)[0])
            self.copy_shards_(params, name, full)
        for buffer in model.buffers():
            buffer.zero_()

    def full_shapes(self, model: Transformer) -> dict[str, torch.Size]:
        """The shapes of the whole model's parameters, by name."""
        with torch.device("meta"):
            return {name: p.shape for name, p in Transformer(model.config).named_parameters()}

    def checkpoint_name(self, name: str) -> str:
        """A local parameter's name in the whole model and in checkpoints."""
        return name if self.stages is None else self.stages.checkpoint_name(name)

    def copy_shards_(
        self, params: Mapping[str, Tensor], checkpoint_name: str, full: Tensor
    ) -> None:
        """Copy a full tensor's shards into the local parameters (none, one or two) that have this
        name in a checkpoint."""
        for name in {checkpoint_name, "head.weight"} & params.keys():
            if self.checkpoint_name(name) == checkpoint_name:
                self.copy_shard_(name, params[name], full)

    def copy_shard_(self, name: str, p: Tensor, full: Tensor) -> None:
        """Copy into p its shard of a full tensor. p: a parameter, or a tensor sharded like it."""
        if self.experts and is_expert_stack(p):
            full = full[list(self.experts.local_expert_ids(len(full)))]
        copy_shard_(p, full, self.tp.shards.get(name) if self.tp else None)

    def full_tensors(
        self, named: Mapping[str, Tensor], buffers: bool = False
    ) -> Iterator[tuple[str, Tensor | None]]:
        """(name, the full tensor on the first rank) of all the model's parameters or buffers.
        named: the local ones, or tensors sharded like them. Collective."""
        if self.stages is None:
            yield from ((name, self.full_tensor(name, x)) for name, x in named.items())
        else:
            metas = self.stages.buffers if buffers else self.stages.parameters
            yield from self.stages.full_tensors(metas, named, self.full_tensor)

    def full_tensor(self, name: str, x: Tensor) -> Tensor | None:
        """The full tensor of a parameter, or of a tensor sharded like it, at least on the first of
        the ranks that shard it. Collective over these ranks."""
        if self.mesh is None:
            return x.detach()
        x = gather_full_tensor(x, self.tp.shards.get(name), self.mesh)
        if x is None or not self.experts or not is_expert_stack(x):
            return x
        first, group = self.mesh.rank("ep") == 0, self.mesh.group("ep")
        parts = [torch.empty_like(x) for _ in range(self.mesh.size("ep"))] if first else None
        dist.gather(x.contiguous(), parts, group=group, group_dst=0)
        return torch.cat(parts) if first else None

    def shard_regions(self, name: str, x: Tensor) -> tuple[tuple[int, ...], list[Any]]:
        """(shape of the full tensor, its regions on this rank) of a parameter or buffer, as
        checkpoint.ShardedTensor takes them."""
        shape, shard = list(x.shape), self.tp.shards.get(name) if self.tp else None
        stacked = self.experts is not None and is_expert_stack(x)
        shape[0] *= self.experts.ranks if stacked else 1
        shape = shape if shard is None else list(shard.full_shape(shape))
        dims = [[range(n)] for n in shape]
        if stacked:
            dims[0] = [range(e, e + 1) for e in self.experts.local_expert_ids(shape[0])]
        if shard is not None:
            starts = range(shard.start, shard.blocks * shard.block_size, shard.block_size)
            dims[shard.dim] = [range(s, s + shard.stop - shard.start) for s in starts]
        if isinstance(x, DTensor):
            for i, placement in enumerate(x.placements):
                if placement.is_shard():
                    ranks, rank = x.device_mesh.size(i), x.device_mesh.get_local_rank(i)
                    dims[0] = _fsdp_rows(dims[0], ranks, rank)
        return tuple(shape), regions(shape, dims)

    @property
    def shard_id(self) -> str:
        """An id of the shard of the training state on this rank; ranks with equal ids are
        replicas."""
        if self.mesh is None:
            return "all"
        dims = ("pp", "tp", "ep") + ("fsdp",) * (self.args.zero > 0)
        return ".".join(f"{dim}{self.mesh.rank(dim)}/{self.mesh.size(dim)}" for dim in dims)

    def optimizer(self, groups: list[dict[str, Any]], factory: Any) -> Any:
        """factory(groups), or of slices of them with distributed_optimizer."""
        if self.mesh is None or not self.args.distributed_optimizer:
            return factory(groups)
        group, stage = self.mesh.group("fsdp"), self.args.zero
        self.buckets = DistributedOptimizer(groups, factory, group, stage=stage)
        return self.buckets

    # ---- a step ----

    def attend(self, plain: Attend) -> Attend:
        """The attend hook: `plain`, or with --cp attention across ranks."""
        if self.size("cp") == 1:
            return plain
        method, heads = self.args.cp_method, self.args.cp_ulysses

        def local_attention(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> tuple:
            """Attention that returns lse, unlike SDPA; kernels on GPUs, for memory."""
            if q.is_cuda or self.args.attention == "flash":
                return flash_attention(q, k, v, return_lse=True, **kwargs)
            return attention_with_lse(q, k, v, **kwargs)

        cp_attention = all_gather_attention if method == "all-gather" else ring_attention
        options = dict(placement=self._placement, attention=local_attention, group=self.ring_group)
        run = partial(cp_attention, **options)
        if method == "ring-self-attention":
            placement = partial(cp_positions, placement=self._placement)
            run = partial(ring_self_attention, placement=placement, group=self.ring_group)
        if heads > 1:
            inner = partial(run, return_lse=True) if heads < self.size("cp") else local_attention
            run = partial(ulysses_attention, attention=inner, group=self.ulysses_group)

        def attend(spec: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
            return run(q, k, v, scale=spec.scale, window=spec.window)

        return attend

    @property
    def _placement(self) -> str:
        return "striped" if self.args.cp_method == "striped" else "zigzag"

    def positions(self, seq_len: int, device: torch.device) -> Tensor | None:
        """The positions of this rank's tokens of a sequence; None: all of them."""
        if self.size("cp") == 1:
            return None
        if (seq_len, device) in self._positions:  # a copy to a GPU waits for its queued work
            return self._positions[seq_len, device]
        ring_rank, ulysses_rank = divmod(self.mesh.rank("cp"), self.args.cp_ulysses)
        ring_size = self.size("cp") // self.args.cp_ulysses
        own = torch.arange(seq_len)
        if ring_size > 1:
            own = cp_positions(seq_len, ring_size, ring_rank, self._placement)
        own = own.chunk(self.args.cp_ulysses)[ulysses_rank].to(device)
        return self._positions.setdefault((seq_len, device), own)

    def padding(self, batch: Tensor) -> Tensor:
        """Which of this rank's inputs of encoded rows (B, T + 1) are padding: bool."""
        at, padding = self.positions(batch.shape[1] - 1, batch.device), is_padding(batch)
        return padding if at is None else padding[:, at]

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy in nats of logits (B, T, V), or (B, T, V / tp) with --tp."""
        logits, targets = logits.flatten(0, 1), targets.flatten()
        if self.size("tp") > 1:
            return vocab_cross_entropy(logits, targets, self.tp, IGNORE)
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="sum")

    def head_loss(self, model: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
        """cross_entropy of the head's logits, chunk by chunk if enabled."""
        if self.has_chunked_loss:
            return model.head(hidden, targets)
        return self.cross_entropy(model.head(hidden), targets)

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Sum x over all ranks with different tokens: tp ranks have the same and count once."""
        if self.mesh is None:
            return x
        dist.all_reduce(x)
        return x // self.size("tp") if not x.is_floating_point() else x / self.size("tp")

    def micro_batches(self, model: nn.Module, batch: Tensor, size: int) -> Iterator[Tensor]:
        """The micro-batches of a step; FSDP and ZeRO buckets reduce gradients in the last one."""
        micro_batches = batch.split(size)
        for i, micro_batch in enumerate(micro_batches, 1):
            if self.uses_fsdp:
                set_last_micro_batch(model, self.args.zero, i == len(micro_batches))
            accumulates = self.buckets is not None and i < len(micro_batches)
            with self.buckets.accumulate() if accumulates else contextlib.nullcontext():
                yield micro_batch

    def reshard(self, model: nn.Module) -> None:
        """Free gathered parameters after forward passes that had no backward pass."""
        if self.uses_fsdp:
            reshard(model, self.args.zero)

    def sum_gradients(self, model: nn.Module) -> None:
        """Finish the gradient reductions that the backward passes of a step leave."""
        if self.args is not None and self.args.optimizer_in_backward:
            return
        if self.buckets is not None:
            self.buckets.finish_grad_sync()
        elif self.mesh is not None:
            sum_gradients(model, self.mesh, self.tp)
        if self.stages is not None:
            self.stages.sum_shared_gradients(model)

    def scale_gradients(self, model: nn.Module, factor: float) -> None:
        if self.buckets is not None:
            self.buckets.scale_gradients(factor)
            return
        grads = [to_local(p.grad) for p in model.parameters() if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clip the whole model's gradient. Returns its norm before clipping (0 with
        optimizer_in_backward, which keeps no gradients)."""
        if self.args is not None and self.args.optimizer_in_backward:
            return torch.zeros(())
        if self.mesh is None:
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            norm = squared_norm(grads).sqrt()
            nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
            return norm
        if self.buckets is not None:
            square = self.buckets.squared_norm()
            dist.all_reduce(square, group=self.mesh.group("fsdp"))
            self.buckets.scale_gradients((max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0))
            return square.sqrt()
        num_copies = {} if self.stages is None else self.stages.num_copies(model)
        norm = gradient_norm(model, self.mesh, self.tp, num_copies)
        clip_gradients(model, norm, max_norm)
        return norm

    def _make_expert_parallel(self, args: TrainConfig) -> ExpertParallel:
        ep, levels, node = args.ep, ((1, self.mesh.group("ep")),), args.ep_node_size
        if node is not None:
            nodes = self.mesh.experts.mesh.mT.reshape(-1, ep // node, node)
            inner, outer = _new_group(nodes), _new_group(nodes.mT)
            levels = ((1, inner), (node, outer))
        return ExpertParallel(self.mesh.rank("ep"), ep, levels, args.ep_chunks, args.ep_quantized)


class LossHead(nn.Linear):
    """An output head that, given targets, returns their summed cross-entropy without materializing
    all logits (chunked_loss.py)."""

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return super().forward(hidden)
        flat = hidden.flatten(0, 1), self.weight, targets.flatten()
        kwargs = self.loss_kwargs
        if not torch.is_grad_enabled():  # validation
            kwargs = kwargs | {"z_loss": 0.0}
        return linear_cross_entropy(*flat, bias=self.bias, ignore_index=IGNORE, **kwargs)


def modes_within_budget(
    args: TrainConfig, config: ModelConfig, dtype: torch.dtype | None
) -> list[str]:
    """The recomputation modes of the blocks with the least recomputed FLOPs, among those that save
    at most --recompute bytes per micro-batch. Bytes and FLOPs are measured with fake tensors."""
    kinds = [(config.window(i), config.sparse(i)) for i in range(config.n_layers)]
    costs = {kind: _recompute_costs(args, config, i, dtype) for i, kind in enumerate(kinds)}
    try:
        return choose_modes([costs[kind] for kind in kinds], args.recompute)
    except ValueError as e:
        raise ValueError(f"--recompute {args.recompute}: {e}") from None


def _recompute_costs(
    args: TrainConfig, config: ModelConfig, index: int, dtype: torch.dtype | None
) -> dict[str, tuple[int, float]]:
    """(saved bytes, recomputed matmul FLOPs) of one block in each mode."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # only here: slow to import
    from torch.utils.flop_counter import FlopCounterMode

    costs, first = {}, 0.0
    with FakeTensorMode():
        block, at = Block(config, index, False), torch.arange(args.seq_len)
        x = torch.empty(args.micro_batch_size, args.seq_len, config.dim).requires_grad_()
        rope = rope_cos_sin(config, at)
        persistent = [*block.parameters(), *rope, at]
        for mode in MODES[:4]:
            forward = checkpoint_wrapper(block.forward, mode)
            forward = partial(forward, x, rope, at, causal_attention)
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                kept = saved_bytes(forward, persistent)
                with FlopCounterMode(display=False) as counter:
                    forward().sum().backward()
            flops = float(counter.get_total_flops())
            first = first or flops
            costs[mode] = kept, flops - first
    return costs


def _new_group(ranks: Tensor) -> Any:
    """The process group of the row of ranks (..., n) that contains this rank. Collective."""
    return dist.new_subgroups_by_enumeration(ranks.flatten(0, -2).tolist())[0]


def _fsdp_rows(ranges: list[range], ranks: int, rank: int) -> list[range]:
    """The rows, among those of `ranges`, that fully_shard assigns to a rank."""
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


def _check(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


def check(args: TrainConfig, config: ModelConfig, world: int) -> dict[str, int]:
    """The mesh sizes. ValueError, naming the flag, if they do not fit the ranks, model or batch.
    Which flags exclude each other is in train.py."""
    tp, cp, ep, copies = args.tp, args.cp, args.ep, args.dp_replicate
    shared, started = tp * cp * args.pp, "ranks that torchrun starts"
    over = f"--pp {args.pp} x " * (args.pp > 1) + f"--tp {tp} x --cp {cp}"
    _check(world % shared == 0, f"{over} = {shared} must divide the {world} {started}")
    dp = world // shared
    given = f"--dp {args.dp} x {over} = {(args.dp or 1) * shared}"
    _check(args.dp in (None, dp), f"{given}, but torchrun starts {world} ranks")
    _check(dp % copies == 0, f"--dp-replicate {copies} must divide the {dp} data-parallel ranks")
    shards = dp // copies * cp
    for name, size, total, what in (
        ("hpz_size", args.hpz_size, shards, f"the {shards} FSDP ranks"),
        ("ep_node_size", args.ep_node_size, ep, f"--ep {ep}"),
    ):
        ok = size is None or 1 < size < total and total % size == 0
        _check(ok, f"--set {name}={size} must divide {what} and be between 1 and {total}")
    ranks = f"{world} {started}" if world == shards else f"{shards} ranks of dp x cp"
    _check(shards % ep == 0, f"--ep {ep} must divide the {ranks}")
    for n in config.layer_experts or (config.n_experts,) if ep > 1 else ():
        _check(n % ep == 0, f"--ep {ep}: {n} experts of an MoE layer do not divide by {ep} ranks")
    check_batch(args, dp, world)
    check_model(args, config)
    reduced = not args.optimizer_in_backward or world == 1 or args.zero
    _check(reduced, "--set optimizer_in_backward requires --zero with several ranks")
    check_stages(args, config, dp * args.batch_share[0])
    return dict(dp_replicate=copies, dp_shard=dp // copies, cp=cp, tp=tp, pp=args.pp, ep=ep)


def check_batch(args: TrainConfig, dp: int, world: int) -> None:
    """ValueError if the batch cannot be divided over dp groups of ranks with different samples."""
    units = {"dpo": 2, "grpo": args.num_generations}.get(args.task, 1)
    n, jobs = args.batch_size // units, args.batch_share[0]
    what = {1: "sequences", 2: "pairs"}.get(units, "prompts")
    batch = f"--batch-size {args.batch_size}" + f", {n} {what}," * (units > 1)
    kind = "groups" if args.replica_groups else "workers"
    over = f"{jobs} {kind} x " * (jobs > 1) + f"{dp} ranks"
    over += " with different batches" * (dp < world)
    _check(n % (dp * jobs) == 0, f"{batch} must be a multiple of the {over}")
    rows = args.batch_size // max(1, world // args.cp)
    _check(
        not args.optimizer_in_backward or rows <= args.micro_batch_size,
        "--set optimizer_in_backward steps in every backward pass: set --micro-batch-size to the "
        f"{rows} sequences of a rank",
    )


def check_model(args: TrainConfig, config: ModelConfig) -> None:
    """ValueError for models that a layout or a setting does not support."""
    T, cp, depths = args.seq_len, args.cp, config.n_mtp_layers
    sequence = args.tp > 1 and args.sequence_parallel
    _check(T > depths, f"--seq-len {T} must be greater than the model's {depths} MTP layers")
    _check(
        not depths or not (cp > 1 or sequence),
        "multi-token prediction shifts the sequence, so it cannot be combined with --cp, and with "
        "--tp it requires --set sequence_parallel=false",
    )
    plain = not (config.moe_layers or depths) and args.pp == args.tp == cp == args.ep == 1
    _check(
        plain or not isinstance(args.recompute, int),
        "--recompute BYTES requires a dense model without --pp, --tp, --cp, --ep and MTP: use "
        "selective or full",
    )
    untied = args.mup_base is None or not config.tie_embeddings
    _check(untied, "--set mup_base requires an untied head, with its own learning rate")
    per_rank = f"--seq-len {T} must be a multiple of"
    parts, and_tp = cp * 2 * (args.tp if sequence else 1), f" x --tp {args.tp}" * sequence
    _check(cp == 1 or T % parts == 0, f"{per_rank} 2 x --cp {cp}{and_tp}")
    either = f"--tp {args.tp}, or use --set sequence_parallel=false"
    _check(not sequence or T % args.tp == 0, f"{per_rank} {either}")
    heads, kv_heads = config.n_heads // args.tp, max(1, config.n_kv_heads // args.tp)
    ulysses = args.cp_ulysses
    fits = cp % ulysses == 0 and heads % ulysses == 0
    _check(fits, f"--cp-ulysses {ulysses} must divide --cp {cp} and the {heads} heads per rank")
    _check(
        kv_heads % ulysses == 0 or ulysses % kv_heads == 0,
        f"--cp-ulysses {ulysses} must be a multiple or a divisor of the {kv_heads} key heads per "
        "rank",
    )
    dynamic = (config.rope_scaling or {}).get("rope_type") == "dynamic"
    _check(
        cp == 1 or not dynamic or T <= config.max_seq_len,
        f"--cp with dynamic NTK, which depends on the largest position: --seq-len {T} must not "
        f"exceed {config.max_seq_len}",
    )
    _check(cp == 1 or not config.alibi, "--cp does not support models with ALiBi")
    option = config.contiguous_only
    _check(cp == 1 or not option, f"--cp does not support models with {option}")
    _check(not (args.pack and config.sparse_layers), "--pack does not support sparse_layers")
    _check(not config.cross_attention_layers, "train.py has no source for cross_attention_layers")
