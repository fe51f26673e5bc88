"""expert_parallel.py: the experts of a mixture shared out over ranks.

A mixture's weights are its experts', and a token needs K of E. So every rank holds some experts,
and tokens travel to them (GShard, arXiv:2006.16668). Each function here takes a callable of the
experts hook's form, (x, weights, ids, w_gate_up, w_down) -> (N, C), and gives one, so that they
nest. With P a Placement, rank = node * M + number, `mine` the ranks of this node and `others` those
of this number on every node:

    all-to-all       placed(exchanged(experts, P.width), P)
    by nodes first   placed(exchanged(exchanged(experts, P.width, mine), P.width * M, others), P)
    sliced along F   placed(exchanged(summed(experts, tp), P.width, ep), P)
    same tokens      placed(summed(local(experts, rank * P.width, P.width)), P)

A token goes once to each rank (in two levels: to each node) that holds any of its experts, with its
ids and weights; what comes back is one row, already summed there. In two levels the slow links
between nodes carry it once however many experts it has on the other side (DeepSpeed-MoE,
arXiv:2207.00032; DeepSeek-V3, arXiv:2412.19437, 3.2.2). In `chunks`, transfers of one overlap with
the experts of another, and in the backward pass too. A Placement may give hot experts copies.

What it costs: two transfers of N * min(K, ranks) rows each way, one exchange of sizes that the host
waits for. When it loses: decoding few tokens, where all ranks can have them all (`summed(local)`);
a load so skewed that one rank has all the work (copies, or balance).

Gradients: a rank's experts get theirs from the tokens of all ranks: with a loss that is a sum over
tokens, or is divided by the count of all, nothing more is to be added up but over replicas of the
rank. Equivalence (test_all.py): outputs, loss and every gradient of one process, 2 and 4 ranks,
empty ranks too. Needs: torch. `torchrun --nproc-per-node 4 parallelism/expert_parallel.py` checks itself and
prints a table (--check: none); `python parallelism/expert_parallel.py` starts these itself.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Experts = Callable[..., Tensor]  # (x, weights, ids, w_gate_up, w_down) -> (N, C), the hook's form


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_ids(ids: Tensor, n: int) -> None:
    if ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():
        low, high = (int(i) for i in ids.aminmax())
        _check(low >= -1 and high < n, f"ids go from {low} to {high}, but there are {n}")


@dataclass(frozen=True)
class Placement:
    """Which experts each rank holds, in the order of its stacks; an expert may have copies. Slot
    ids number all places: rank * width + place."""

    slots: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        found = sorted({e for held in self.slots for e in held})
        ok = bool(found) and found == list(range(len(found)))
        _check(ok, f"slots must hold every expert from 0 on, not {found}")
        ok = all(len(set(held)) == len(held) for held in self.slots)
        _check(ok, "slots must hold no expert twice on one rank")

    @property
    def ranks(self) -> int:
        return len(self.slots)

    @property
    def width(self) -> int:
        """Places of a rank, where the fullest has no empty one."""
        return max(map(len, self.slots))

    @property
    def n_experts(self) -> int:
        return 1 + max(e for held in self.slots for e in held)

    @property
    def copies(self) -> tuple[int, ...]:
        held = [e for of_rank in self.slots for e in of_rank]
        return tuple(held.count(e) for e in range(self.n_experts))

    @staticmethod
    def even(n_experts: int, ranks: int) -> Placement:
        """Neighbours together, as many on each rank."""
        ok = ranks >= 1 and n_experts % ranks == 0
        _check(ok, f"{n_experts} experts cannot be shared evenly by {ranks} ranks: take a divisor, "
               "or Placement.by_load, where ranks may hold one more")  # fmt: skip
        own = n_experts // ranks
        return Placement(tuple(tuple(range(r * own, (r + 1) * own)) for r in range(ranks)))

    @staticmethod
    def by_load(loads: Sequence[float], ranks: int, redundant: int = 0) -> Placement:
        """Ranks of nearly the same load (DeepSeek-V3, 3.4.1): `redundant` more copies, each for the
        expert with most load per copy, then every copy, hot ones first, on the least loaded rank
        that has room and does not hold its expert. Ranks hold the same number, or one more."""
        loads = [float(load) for load in loads]
        ok = all(0 <= load < math.inf for load in loads)
        _check(ok, f"loads must be 0 or more, not {loads}")
        copies, total = [1] * len(loads), len(loads) + redundant
        ok = redundant >= 0 and ranks >= 1 and ranks <= total <= len(loads) * ranks
        _check(ok, f"{len(loads)} experts and {redundant} redundant copies do not fit {ranks} "
               "ranks: each needs one at least and no expert twice")  # fmt: skip
        for _ in range(redundant):
            open_ = [e for e in range(len(loads)) if copies[e] < ranks]
            copies[max(open_, key=lambda e: loads[e] / copies[e])] += 1
        held: list[list[int]] = [[] for _ in range(ranks)]
        share = [load / n for load, n in zip(loads, copies)]
        carried = lambda r: sum(share[e] for e in held[r])
        queue = sorted(range(len(loads)), key=lambda e: (-share[e], -copies[e]))
        for e in (e for e in queue for _ in range(copies[e])):
            most = total // ranks  # and one more where total % ranks ranks have it not yet
            fuller = sum(len(h) > most for h in held) < total % ranks
            room = [r for r in range(ranks) if len(held[r]) < most + fuller]
            apart = [r for r in room if e not in held[r]]
            r = min(apart or room, key=carried)
            if not apart:  # another rank takes e and gives what r may hold
                trades = [(q, f) for q in range(ranks) for f in held[q]
                          if e not in held[q] and f not in held[r]]  # fmt: skip
                if trades:
                    q, f = min(trades, key=lambda trade: abs(share[trade[1]] - share[e]))
                    held[q][held[q].index(f)], e = e, f
            held[r].append(e)
        return Placement(tuple(map(tuple, held)))

    def physical(self, ids: Tensor, offset: int = 0) -> Tensor:
        """Expert ids (N, K) -> slot ids. Tokens take the copies of an expert in turn, the first
        token copy `offset`. ValueError, on a CPU, for an id that is no expert's."""
        _check_ids(ids, self.n_experts)
        table, copies = _slot_table(self, ids.device)
        turn = torch.arange(offset, offset + len(ids), device=ids.device)[:, None]
        known = ids.clamp(min=0)
        return table[known, turn % copies[known]].masked_fill(ids < 0, -1)


@lru_cache(None)  # one for each mixture of a model
def _slot_table(placement: Placement, device: torch.device) -> tuple[Tensor, Tensor]:
    """(E, most copies) the slots of every expert, and (E,) how many they are."""
    copies, width = placement.copies, placement.width
    of = [[r * width + held.index(e) for r, held in enumerate(placement.slots) if e in held]
          for e in range(placement.n_experts)]  # fmt: skip
    table = [slots + [-1] * (max(copies) - len(slots)) for slots in of]
    return torch.tensor(table, device=device), torch.tensor(copies, device=device)


def placed(experts: Experts, placement: Placement, offset: int = 0) -> Experts:
    """From ids of experts to ids of slots."""

    def run(x: Tensor, weights: Tensor, ids: Tensor, *matrices: Any) -> Tensor:
        return experts(x, weights, placement.physical(ids, offset), *matrices)

    return run


def local(experts: Experts, first: int, width: int) -> Experts:
    """`experts` for slots first .. first + width - 1, as 0 .. width - 1; others are nobody's."""

    def run(x: Tensor, weights: Tensor, ids: Tensor, *matrices: Any) -> Tensor:
        mine = (ids >= first) & (ids < first + width)
        return experts(x, weights, torch.where(mine, ids - first, -1), *matrices)

    return run


def held(stack: Tensor, placement: Placement, rank: int) -> Tensor:
    """A rank's part of a stack (E, ...)."""
    return stack[list(placement.slots[rank])]


def add_copies_(
    grads: Tensor, placement: Placement, rank: int, group: dist.ProcessGroup | None = None
) -> None:
    """Where experts have copies, give each the gradient of all, so that they stay copies. grads
    (slots, ...): of this rank's stack."""
    several = [e for e, n in enumerate(placement.copies) if n > 1]
    if not several:
        return
    total = grads.new_zeros(len(several), *grads.shape[1:])
    mine = [
        (place, several.index(e)) for place, e in enumerate(placement.slots[rank]) if e in several
    ]
    for place, i in mine:
        total[i] += grads[place]
    dist.all_reduce(total, group=group)
    for place, i in mine:
        grads[place] = total[i]


class _SumOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        ctx.group = group
        return x.view_as(x), weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        grads = [grad.contiguous().clone() for grad in grads]
        for grad in grads:
            dist.all_reduce(grad, group=ctx.group)
        return *grads, None


def _with_gradients(y: Tensor, *inputs: Any) -> Tensor:
    """y, which asks for gradients wherever another rank's may: where nobody chose an expert of this
    rank, its experts may have run nothing, but it has its part in the way back."""
    if y.requires_grad:
        return y
    takers = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    return y + sum(t[:0].sum() for t in takers).type_as(y) if takers else y


def summed(experts: Experts, group: dist.ProcessGroup | None = None) -> Experts:
    """All ranks of `group` have the same tokens, and each computes a share of the output: of the
    experts, or of every expert's columns (Megatron, arXiv:1909.08053)."""

    def run(x: Tensor, weights: Tensor, ids: Tensor, *matrices: Any) -> Tensor:
        x, weights = _SumGradients.apply(x, weights, group)
        y = _with_gradients(experts(x, weights, ids, *matrices), x, weights, *matrices)
        return _SumOutputs.apply(y, group)

    return run


class _Transfer:
    """All-to-alls of the rows of some tensors, begun by `start` and awaited by `finish`. The
    gradients go the other way: begun by the backward pass of `finish`, awaited by that of `start`,
    and all by one node each, for every rank must begin them in the same order."""

    def __init__(self, sends: list[int], receives: list[int], group: dist.ProcessGroup | None):
        self.sends, self.receives, self.group = sends, receives, group

    def launch(self, tensors: Sequence[Tensor], back: bool = False) -> tuple[Tensor, ...]:
        """Begin; what the rows will have arrived in by the end of `wait`."""
        sends, receives = (self.receives, self.sends) if back else (self.sends, self.receives)
        self.rows = [t.contiguous() for t in tensors]  # alive until they are sent
        self.buffers = tuple(t.new_empty(sum(receives), *t.shape[1:]) for t in tensors)
        sizes = dict(output_split_sizes=receives, input_split_sizes=sends, group=self.group)
        self.works = [
            dist.all_to_all_single(buffer, t, **sizes, async_op=True)
            for buffer, t in zip(self.buffers, self.rows)
        ]
        return self.buffers

    def wait(self) -> tuple[Tensor, ...]:
        for work in self.works:
            work.wait()
        buffers, self.buffers, self.rows, self.works = self.buffers, (), [], []
        return buffers

    def start(self, *tensors: Tensor) -> _Transfer:
        self.begun = _Start.apply(self, *tensors)
        return self

    def finish(self) -> tuple[Tensor, ...]:
        begun, self.begun = self.begun, ()  # a cycle through the graph is never collected
        return _Finish.apply(self, *begun)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transfer: _Transfer, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.transfer = transfer
        transfer.launch(tensors)
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.transfer.wait()
        return None, *grads


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transfer: _Transfer, *begun: Tensor) -> tuple[Tensor, ...]:
        ctx.transfer = transfer
        return transfer.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *ctx.transfer.launch(grads, back=True)  # filled when _Start hands them on


def exchanged(
    experts: Experts, width: int, group: dist.ProcessGroup | None = None, chunks: int = 1
) -> Experts:
    """Every rank of `group` has tokens of its own and holds `width` slots: a token goes once to
    each rank that holds any of its slots, with its ids and weights; `experts` runs there, ids
    counted from the rank's first slot; the rows that come back are added up in the order of ranks.

    Tokens go in `chunks` pieces, so that one is on its way while the experts run another (Tutel,
    arXiv:2206.03382, and in the backward pass too). One host synchronisation, for the sizes. Under
    autocast rows travel in its dtype. ValueError, on a CPU, for an id that no rank holds: it ends
    the group, whose other ranks wait.
    """

    _check(chunks >= 1, f"chunks must be at least 1, not {chunks}")

    def run(x: Tensor, weights: Tensor, ids: Tensor, *matrices: Any) -> Tensor:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        ok = len(x) == len(weights) == len(ids) and weights.shape == ids.shape
        sizes = tuple(x.shape), tuple(weights.shape), tuple(ids.shape)
        _check(ok, "x (N, C), weights (N, K) and ids (N, K) do not fit: {}, {}, {}".format(*sizes))
        _check_ids(ids, ranks * width)
        inner, dtype = local(experts, rank * width, width), x.dtype
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        split = zip(*(t.tensor_split(chunks) for t in (x, weights, ids)))
        pieces = [_Piece(*parts, width, ranks) for parts in split]
        sends = torch.stack([piece.wanted.sum(0) for piece in pieces], 1)  # (ranks, chunks)
        receives = torch.empty_like(sends)
        dist.all_to_all_single(receives, sends, group=group)
        for piece, sizes in zip(pieces, torch.stack((sends, receives)).permute(2, 0, 1).tolist()):
            piece.send(*sizes, group)
        for piece in pieces:
            piece.compute(inner, matrices)
        return torch.cat([piece.receive() for piece in pieces]).to(dtype)

    return run


class _Piece:
    """Some of the tokens of an exchange, on their way."""

    def __init__(self, x: Tensor, weights: Tensor, ids: Tensor, width: int, ranks: int):
        self.x, self.weights, self.ids = x, weights, ids
        rank = torch.where(ids < 0, ranks, ids // width)
        wanted = torch.zeros(len(ids), ranks + 1, dtype=torch.bool, device=ids.device)
        self.wanted = wanted.scatter_(1, rank, True)[:, :ranks]  # by a token, of a rank

    def send(self, sends: list[int], receives: list[int], group: dist.ProcessGroup | None) -> None:
        token = self.wanted.t().nonzero_static(size=sum(sends))[:, 1]  # rank by rank
        self.ids_there = _Transfer(sends, receives, group)
        self.ids_there.launch([self.ids[token]])
        self.there = _Transfer(sends, receives, group).start(self.x[token], self.weights[token])
        self.back = _Transfer(receives, sends, group)

    def compute(self, experts: Experts, matrices: Sequence[Any]) -> None:
        (ids,), (x, weights) = self.ids_there.wait(), self.there.finish()
        self.back.start(_with_gradients(experts(x, weights, ids, *matrices), x, weights, *matrices))

    def receive(self) -> Tensor:
        rows = self.back.finish()[0]
        n = len(rows)
        if n == 0:  # one to point at: the way back has the same steps on every rank, so that
            rows = F.pad(rows, (0, 0, 0, 1))  # checkpointing recomputes at the same moment
        before = self.wanted.sum(0).cumsum(0) - self.wanted.sum(0)
        place = self.wanted.cumsum(0) - 1 + before
        place = place.masked_fill(~self.wanted, n)
        most = min(place.shape[1], self.ids.shape[1])  # ranks that a token goes to
        place = place.topk(most, dim=1, largest=False).values.sort(dim=1).values
        there = place < n
        # a token that goes to fewer takes rows of others, and counts them nothing; not all the same
        # one, on which a GPU's gradients would queue
        others = torch.arange(place.numel(), device=place.device).view_as(place) % len(rows)
        taken = rows[torch.where(there, place, others)]
        return taken.masked_fill(~there[..., None], 0.0).sum(1)


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def loop_experts(
    x: Tensor, weights: Tensor, ids: Tensor, w_gate_up: Tensor, w_down: Tensor
) -> Tensor:
    """SwiGLU experts one by one: all that is needed here of the mixture itself."""
    out = torch.zeros_like(x)
    for e in ids[ids >= 0].unique().tolist():
        token, k = (ids == e).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], w_gate_up[e]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, w_down[e]) * weights[token, k, None].type_as(x)
        out = out.index_add(0, token, y)
    return out


def forms(experts: Experts, P: Placement, rank: int) -> dict[str, Experts]:
    """All-to-all in one level and two, of 4 ranks as 2 nodes, and in chunks."""
    mine = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    others = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    inner = exchanged(experts, P.width, mine)
    return {
        "all-to-all": placed(exchanged(experts, P.width), P),
        "in 2 chunks": placed(exchanged(experts, P.width, chunks=2), P),
        "in 4 chunks": placed(exchanged(experts, P.width, chunks=4), P),
        "by nodes first": placed(exchanged(inner, 2 * P.width, others), P),
    }


def check(rank: int, ranks: int) -> None:
    """Outputs and gradients of every form == one process's, with an empty rank and with copies."""
    rng = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(shape, generator=rng, dtype=torch.float64)
    E, K, C, width, sizes = 8, 3, 16, 12, [5, 0, 9, 4]
    x, weights, stacks = make(18, C), make(18, K), (make(E, 2 * width, C), make(E, C, width))
    ids = torch.rand(18, E, generator=rng).topk(K).indices
    every = [t.clone().requires_grad_() for t in (x, weights, *stacks)]
    y = loop_experts(*every[:2], ids, *every[2:])
    y.square().sum().backward()
    own = lambda t: t.split(sizes)[rank]
    hot = Placement.by_load([9, 1, 1, 1, 1, 1, 1, 5], ranks, redundant=2)
    for P in (Placement.even(E, ranks), hot):
        for name, form in forms(loop_experts, P, rank).items():
            leaves = [own(x), own(weights), *(held(w, P, rank) for w in stacks)]
            leaves = [t.clone().requires_grad_() for t in leaves]
            got = form(*leaves[:2], own(ids), *leaves[2:])
            got.square().sum().backward()
            for leaf in leaves[2:]:
                add_copies_(leaf.grad, P, rank)
            wanted = [own(t.grad) for t in every[:2]] + [held(t.grad, P, rank) for t in every[2:]]
            for a, b in zip((got, *(t.grad for t in leaves)), (own(y), *wanted)):
                assert torch.allclose(a, b, rtol=1e-10, atol=1e-10), (name, rank)


def benchmark(rank: int, ranks: int) -> None:
    """Milliseconds of a forward pass, on this machine, whose ranks share its cores and memory."""
    rng = torch.Generator().manual_seed(rank)
    N, K, E, C, width = 512, 4, 16, 512, 256
    P = Placement.even(E, ranks)
    stacks = torch.randn(P.width, 2 * width, C), torch.randn(P.width, C, width)
    x, ids = torch.randn(N, C, generator=rng), torch.rand(N, E, generator=rng).topk(K).indices
    weights = torch.full((N, K), 1 / K)
    nothing = lambda x, weights, ids, *_: x
    rows = len(torch.unique(ids // P.width + 100 * torch.arange(N)[:, None]))
    say = print if rank == 0 else lambda *_: None
    say(f"{ranks} ranks of {N} tokens, K {K}, E {E}, C {C}, F {width}, fp32: {rows} rows sent")
    say(f"{'ms':>16}{'whole':>9}{'transfers':>11}")
    for name, whole in forms(loop_experts, P, rank).items():
        bare, times = forms(nothing, P, rank)[name], []
        for form in (whole, bare):
            spent = []
            for _ in range(7):
                dist.barrier()
                start = time.perf_counter()
                form(x, weights, ids, *stacks)
                dist.barrier()
                spent.append(time.perf_counter() - start)
            times.append(1e3 * statistics.median(spent[2:]))
        say(f"{name:>16}{times[0]:>9.2f}{times[1]:>11.2f}")


def main() -> None:
    if "RANK" not in os.environ:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        sys.exit(subprocess.run([*run, *sys.argv], env=os.environ | threads).returncode)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    _check(ranks == 4, f"the check is for 4 ranks, not {ranks}")
    check(rank, ranks)
    if "--check" not in sys.argv:
        with torch.inference_mode():
            benchmark(rank, ranks)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
