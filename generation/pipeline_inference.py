"""Pipeline-parallel decoding for generate.py --pp: each rank holds some of the layers.

    torchrun --nproc-per-node 4 -- generate.py --pp 4 --n 8        8 rows, two in each of 4 groups
    torchrun --nproc-per-node 8 -- generate.py --pp 2 --tp 4 --n 4

A token of one row runs through the stages one after another, so all ranks but one would idle. The
rows are therefore split into as many groups as ranks, and a stage runs one group while the next
stage runs the previous one (parallelism/pipeline.py, decode). The last rank samples
(generation/sampling.py): noise depends only on the row, so the text equals that of one process. It
sends the tokens to the first rank, which forwards them with the hidden states to all: each rank
sees a row's end one step later than the last rank.

The prompt is pipelined too, chunk by chunk: with c chunks on p ranks the first token takes
(c + p - 1) / p times as long as a chunk on one rank, nearly 1/p of the time of one rank for a long
prompt (sequence pipeline parallelism of Mnemosyne, arXiv:2409.17264). Each rank loads and caches
only its own layers, so the model may be larger than one rank's memory. When it loses: fewer rows
than ranks (one row is as fast as on one rank that could hold the model); links slower than a
stage's compute. Hook: a stage is model.py's Transformer with layers dropped and embedding or head
None. Needs: generate.py, model.py, parallelism/pipeline.py, parallelism/schedules.py,
training/pipeline_model.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from generation.config import GenerateConfig
from model import KVCache, Transformer
from parallelism.pipeline import p2p_groups, decode
from training.pipeline_model import keep_stages_
from parallelism.schedules import balance


class PPStage:
    """--pp: this rank's layers of the model. Call `shard_` before loading weights, and
    `finalize_` after all module swaps."""

    def __init__(self, args: GenerateConfig):
        self.mesh, self.ranks = args.mesh, args.mesh.size("pp")

    def shard_(self, model: Transformer) -> None:
        """Drop the layers of other ranks. ValueError names the flag."""
        costs = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
        costs[-1] += model.head.weight.numel()  # a decode step takes as long as reading the weights
        try:
            layers = [range(*bounds) for bounds in balance(costs, self.ranks)]
        except ValueError as e:
            raise ValueError(f"--pp {self.ranks}: {e}") from None
        keep_stages_(model, [self.mesh.rank("pp")], layers)

    def finalize_(self, model: Transformer) -> None:
        """Renumber the layers, and set model.config to this rank's layers, for its KV cache."""
        c, own = model.config, [int(name) for name, _ in model.layers.named_children()]
        for i, block in enumerate(model.layers):
            block.attention.spec = replace(block.attention.spec, index=i)
        counts = {i: c.experts_of(layer) for i, layer in enumerate(own) if layer in c.moe_layers}
        moe = dict(moe_layers=tuple(counts), n_experts=max(counts.values(), default=c.n_experts))
        moe["layer_experts"] = tuple(counts.values()) if c.layer_experts else ()
        none = dict(windows=(), sparse_layers=(), n_mtp_layers=0)
        model.config = replace(c, n_layers=len(own), **moe, **none)


class PipelineDecoder:
    """generate.Decoder's interface on every rank of a pipeline; all ranks must make the same calls.
    prefill_chunks: generate.prefill_chunks."""

    def __init__(self, decoder: Any, mesh: Any, prefill_chunks: Callable[..., Iterator]):
        self.decoder, self.model, self.prefill_chunks = decoder, decoder.model, prefill_chunks
        self.rank, self.ranks = mesh.rank("pp"), mesh.size("pp")
        self.up, self.down = p2p_groups(mesh.world.mesh.flatten(1).mT.tolist())
        rows = torch.arange(decoder.batch).tensor_split(min(decoder.batch, self.ranks))
        self.rows = [group.tolist() for group in rows]
        self.caches = [slice_cache_rows(decoder.cache, group) for group in self.rows]
        self.dtype, self.steps, self.speculator = next(self.model.parameters()).dtype, None, None
        self.positions: list[int] = []  # position of each group's next token
        self.first_tokens_sent = False  # whether the first tokens have entered the pipeline

    def start(self, ids: Sequence[int], cached: int = 0) -> list[list[int]]:
        """Prefill the prompt `ids` and start decoding; the first new token of every row."""
        assert cached == 0, "--pp cannot reuse a conversation's cache"
        self.stop()
        d, tokens = self.decoder, torch.zeros_like(self.decoder.token[:, 0])
        logits = self._prefill(torch.tensor([ids], device=tokens.device))
        d.sampler.start([ids] * d.batch)
        if logits is not None:
            tokens = d.sampler(logits.expand(d.batch, -1))
        dist.broadcast(tokens, group=self.up, group_src=self.ranks - 1)
        d.num_cached, self.positions = len(ids), [len(ids)] * len(self.rows)
        shape = lambda g: (len(self.rows[g]), 1, self.model.config.dim)
        firsts = [tokens[rows].clone() for rows in self.rows]
        links = dict(up=self.up, down=self.down, dtype=self.dtype)
        self.steps = decode(self._stage, firsts, self._sample, shape, **links)
        self.first_tokens_sent = False
        return d.check_finite(tokens[:, None].tolist())

    def next(self) -> list[list[int]]:
        """The next token of every row."""
        if not self.first_tokens_sent:
            next(self.steps)
        self.first_tokens_sent = True
        tokens = torch.cat(next(self.steps))
        self.decoder.num_cached += 1
        return self.decoder.check_finite(tokens[:, None].tolist())

    def stop(self) -> None:
        """End decoding of this prompt; on every rank after the same step."""
        if self.steps is not None:
            self.steps.close()
        self.steps = None

    def _prefill(self, tokens: Tensor) -> Tensor | None:
        """The last token's logits (1, V), on the last rank."""
        sent: deque[tuple[Any, Tensor]] = deque()

        def model(x: Tensor, positions: Tensor, attend: Any, return_hidden: bool) -> Tensor:
            if self.rank > 0:
                x = x.new_empty(*x.shape, self.model.config.dim, dtype=self.dtype)
                dist.recv(x, group=self.up, group_src=self.rank - 1)
            y = self.model(x, positions, attend, return_hidden=True).contiguous()
            if self.rank < self.ranks - 1:
                sent.append((dist.isend(y, group=self.up, group_dst=self.rank + 1), y))
            while len(sent) > 2:  # the next stage may lag two chunks behind
                sent.popleft()[0].wait()
            return y

        model.config, d = self.model.config, self.decoder
        for _, hidden in self.prefill_chunks(model, tokens, d.cache, 0, d.attention):
            last = hidden[:, -1]
        for work, _ in sent:
            work.wait()
        return self.model.head(last) if self.rank == self.ranks - 1 else None

    def _stage(self, x: Tensor, g: int) -> Tensor:
        position, self.positions[g] = self.positions[g], self.positions[g] + 1
        attend = self.decoder.attention(self.caches[g], position + 1)
        x = x.clamp(min=0) if self.rank == 0 else x  # a failed row has the id -1
        return self.model(x, torch.tensor([position], device=x.device), attend)

    def _sample(self, logits: Tensor, g: int) -> Tensor:
        return self.decoder.sampler.sample_rows(logits[:, -1], self.rows[g])

    def bytes_per_step(self) -> int:
        """Bytes that this rank read in the last step: its weights once per group, and its cache."""
        other_groups = (len(self.rows) - 1) * self.decoder.weight_bytes
        return self.decoder.bytes_per_step() + other_groups


def slice_cache_rows(cache: KVCache, rows: Sequence[int]) -> KVCache:
    """A cache of consecutive rows of `cache`, sharing its memory."""
    part, span = copy.copy(cache), slice(rows[0], rows[-1] + 1)
    for name in ("k", "v", "qk"):
        setattr(part, name, [t[span] for t in getattr(cache, name)])
    return part
