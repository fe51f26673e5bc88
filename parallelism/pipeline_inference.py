"""ring.py: generate.py's decoder over a pipeline of ranks, each with some of the layers.

    torchrun --nproc-per-node 4 -- generate.py --pp 4 --n 8        8 rows, two in each of 4 groups
    torchrun --nproc-per-node 8 -- generate.py --pp 2 --tp 4 --n 4

One token of one row passes the stages one after the other, and all ranks but one wait. So the rows
are cut in as many groups as there are ranks, which follow each other: a stage runs one group while
the next stage runs the one before (pipeline.decode). The last rank draws, as sampling.py has it: a
row's noise is its own, and the text is that of one process. Its tokens go to the first rank, and
with the hidden states to all: each knows when the rows have ended, one step later than the last.

A prompt is pipelined too, chunk after chunk. Every rank reads and caches its own layers alone, so
that a model fits that fits on no rank. When it loses: fewer rows than ranks (one row goes as fast
as on one rank that could hold the model); links that take longer than a stage. Which hook: a stage
is model.py's Transformer with layers dropped, embedding or head None. Needs: generate.py, model.py,
pipeline.py, schedules.py, stages.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import argparse
import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from model import KVCache, Transformer
from parallelism.pipeline import p2p_groups, decode
from parallelism.pipeline_model import keep_stages_
from parallelism.schedules import balance


class Stage:
    """--pp: of the model this rank's layers. `cut_` a model before its weights come; `join_` it
    when no module will be swapped any more."""

    def __init__(self, args: argparse.Namespace):
        self.mesh, self.ranks = args.mesh, args.mesh.size("pp")

    def cut_(self, model: Transformer) -> None:
        """Drop the others' layers. ValueError names the flag."""
        costs = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
        costs[-1] += model.head.weight.numel()  # a step lasts as long as reading all that
        try:
            layers = [range(*cut) for cut in balance(costs, self.ranks)]
        except ValueError as e:
            raise ValueError(f"--pp {self.ranks}: {e}") from None
        keep_stages_(model, [self.mesh.rank("pp")], layers)

    def join_(self, model: Transformer) -> None:
        """model.config now says, for who makes a cache, how many layers this rank has."""
        c, own = model.config, [int(name) for name, _ in model.layers.named_children()]
        for i, block in enumerate(model.layers):
            block.attention.spec = replace(block.attention.spec, index=i)
        sparse = tuple(i for i, layer in enumerate(own) if layer in c.moe_layers)
        model.config = replace(c, n_layers=len(own), windows=(), moe_layers=sparse, n_mtp_layers=0)


class Ring:
    """generate.Decoder's steps, on every rank of a pipeline; all must take the same. chunks:
    generate.hidden_chunks."""

    def __init__(self, decoder: Any, mesh: Any, chunks: Callable[..., Iterator]):
        self.decoder, self.model, self.chunks = decoder, decoder.model, chunks
        self.rank, self.ranks = mesh.rank("pp"), mesh.size("pp")
        self.up, self.down = p2p_groups(mesh.world.mesh.flatten(1).mT.tolist())
        rows = torch.arange(decoder.batch).tensor_split(min(decoder.batch, self.ranks))
        self.rows = [group.tolist() for group in rows]
        self.caches = [rows_of(decoder.cache, group) for group in self.rows]
        self.dtype, self.ring, self.speculator = next(self.model.parameters()).dtype, None, None
        self.at: list[int] = []  # of each group: where its next token stands
        self.ahead = False  # whether the first tokens have gone in

    def start(self, ids: Sequence[int], cached: int = 0) -> list[list[int]]:
        assert cached == 0, "a conversation keeps its cache; --pp has none"
        self.stop()
        d, tokens = self.decoder, torch.zeros_like(self.decoder.token[:, 0])
        logits = self._prefill(torch.tensor([ids], device=tokens.device))
        d.sampler.start([ids] * d.batch)
        if logits is not None:
            tokens = d.sampler(logits.expand(d.batch, -1))
        dist.broadcast(tokens, group=self.up, group_src=self.ranks - 1)
        d.used, self.at = len(ids), [len(ids)] * len(self.rows)
        shape = lambda g: (len(self.rows[g]), 1, self.model.config.dim)
        firsts = [tokens[rows].clone() for rows in self.rows]
        links = dict(up=self.up, down=self.down, dtype=self.dtype)
        self.ring = decode(self._stage, firsts, self._drawn, shape, **links)
        self.ahead = False
        return d.runs(tokens[:, None].tolist())

    def next(self) -> list[list[int]]:
        if not self.ahead:
            next(self.ring)
        self.ahead = True
        tokens = torch.cat(next(self.ring))
        self.decoder.used += 1
        return self.decoder.runs(tokens[:, None].tolist())

    def stop(self) -> None:
        if self.ring is not None:
            self.ring.close()
        self.ring = None

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
            while len(sent) > 2:  # the next stage is at most so far behind
                sent.popleft()[0].wait()
            return y

        model.config, d = self.model.config, self.decoder
        for _, hidden in self.chunks(model, tokens, d.cache, 0, d.attention):
            last = hidden[:, -1]
        for work, _ in sent:
            work.wait()
        return self.model.head(last) if self.rank == self.ranks - 1 else None

    def _stage(self, x: Tensor, g: int) -> Tensor:
        at, self.at[g] = self.at[g], self.at[g] + 1
        attend = self.decoder.attention(self.caches[g], at + 1)
        x = x.clamp(min=0) if self.rank == 0 else x  # a row that has failed says so by -1
        return self.model(x, torch.tensor([at], device=x.device), attend)

    def _drawn(self, logits: Tensor, g: int) -> Tensor:
        return self.decoder.sampler.draw_rows(logits[:, -1], self.rows[g])

    def bytes_per_step(self) -> int:
        """Of this rank: its weights once for each group, and its cache."""
        again = (len(self.rows) - 1) * self.decoder.weight_bytes
        return self.decoder.bytes_per_step() + again


def rows_of(cache: KVCache, rows: Sequence[int]) -> KVCache:
    """The same memory, of neighbouring rows alone."""
    part, span = copy.copy(cache), slice(rows[0], rows[-1] + 1)
    part.k, part.v = ([t[span] for t in ts] for ts in (cache.k, cache.v))
    return part
