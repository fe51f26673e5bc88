"""Expert parallelism: MoE experts sharded over ranks, tokens dispatched to them by all-to-all.

Most weights of an MoE model belong to its experts, and a token needs only K of E. So every rank
holds some of the experts, and tokens are sent to them (GShard, arXiv:2006.16668). Each function
here wraps a callable with the experts hook's signature, (x, weights, ids, w_gate_up, w_down) ->
(N, C), and returns one, so that they nest. With P a Placement, n = P.slots_per_rank, rank = node *
M + local_rank, `intra` the ranks of this node and `inter` those with this local_rank on every node:

    all-to-all    remap_expert_ids(all_to_all_dispatch(experts, n), P)
    two levels    remap_expert_ids(all_to_all_dispatch(
                      all_to_all_dispatch(experts, n, intra), n * M, inter), P)
    EP and TP     remap_expert_ids(all_to_all_dispatch(all_reduce_combine(experts, tp), n, ep), P)
    same tokens   remap_expert_ids(all_reduce_combine(select_local_slots(experts, rank * n, n)), P)

A token is sent once to each rank (in two levels: to each node) that holds any of its experts, with
its ids and weights; one row comes back, already summed over those experts. In two levels the slow
links between nodes carry a token once, however many experts it has on the other node
(DeepSpeed-MoE, arXiv:2207.00032; DeepSeek-V3, arXiv:2412.19437, 3.2.2). With `chunks`, the
transfers of one chunk overlap with the experts of another, in the backward pass too, in the `order`
that best_order finds for given times (ScheMoE, EuroSys 2024). With `quantize`, rows travel as int8
or FP8: 1 byte per value and 4 per row, and each transfer rounds once. A Placement
may hold redundant replicas of hot experts, so that ranks are loaded evenly, or so that the experts
survive the loss of ranks (Lazarus, arXiv:2407.04656): P.recovery_probability(lost) compares them,
and P.without(ranks) places the experts on the ranks that are left, without moving a weight.

Cost: two transfers of N * min(K, ranks) rows each way, and one exchange of sizes that the host
waits for. When it loses: decoding few tokens, where giving all ranks all tokens is cheaper; a load
so skewed that one rank does all the work (use replicas, or balance the router).

Gradients: a rank's experts get gradients from the tokens of all ranks. If the loss is a sum over
tokens, or is divided by the global token count, nothing else must be reduced except over data
parallel replicas. Equivalence (test_all.py): outputs, loss and every gradient equal one process's,
on 2 and 4 ranks, with empty ranks too; quantized, each is within half a step per rounding.
Needs: torch.
`torchrun --standalone --nproc-per-node 2 parallelism/expert_parallel.py` runs a check and a table.
"""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Experts = Callable[..., Tensor]  # (x, weights, ids, w_gate_up, w_down) -> (N, C)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_ids(ids: Tensor, n: int) -> None:
    if ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():
        low, high = (int(i) for i in ids.aminmax())
        _check(low >= -1 and high < n, f"ids go from {low} to {high}, but there are {n}")


@dataclass(frozen=True)
class Placement:
    """Which experts each rank holds, in the order of its weight stacks; experts may have replicas.
    Slot ids are rank * slots_per_rank + index within the rank."""

    slots: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        found = sorted({e for experts in self.slots for e in experts})
        ok = bool(found) and found == list(range(len(found)))
        _check(ok, f"slots must hold every expert from 0 on, not {found}")
        ok = all(len(set(experts)) == len(experts) for experts in self.slots)
        _check(ok, "slots must hold no expert twice on one rank")

    @property
    def ranks(self) -> int:
        return len(self.slots)

    @property
    def slots_per_rank(self) -> int:
        """The number of experts on the rank that has most."""
        return max(map(len, self.slots))

    @property
    def n_experts(self) -> int:
        return 1 + max(e for experts in self.slots for e in experts)

    @property
    def replica_counts(self) -> tuple[int, ...]:
        experts = [e for of_rank in self.slots for e in of_rank]
        return tuple(experts.count(e) for e in range(self.n_experts))

    @staticmethod
    def even(n_experts: int, ranks: int) -> Placement:
        """Consecutive experts, the same number on each rank."""
        ok = ranks >= 1 and n_experts % ranks == 0
        _check(ok, f"{n_experts} experts do not divide by {ranks} ranks: take a divisor, "
               "or Placement.by_load, where ranks may hold one more")  # fmt: skip
        own = n_experts // ranks
        return Placement(tuple(tuple(range(r * own, (r + 1) * own)) for r in range(ranks)))

    @staticmethod
    def by_load(
        loads: Sequence[float], ranks: int, redundant: int = 0, spread: str = "balance"
    ) -> Placement:
        """Add `redundant` replicas one at a time to the expert with the most load per replica, then
        place them all. spread "balance" (DeepSeek-V3, 3.4.1): each, hottest first, on the least
        loaded rank that has room and does not hold its expert; ranks hold the same number of
        experts, or one more. "overlap": see _max_rank_overlap; all ranks hold the same number."""
        _check(spread in ("balance", "overlap"), f"spread must be balance or overlap, not {spread}")
        loads = [float(load) for load in loads]
        ok = all(0 <= load < math.inf for load in loads)
        _check(ok, f"loads must be 0 or more, not {loads}")
        replicas, total = [1] * len(loads), len(loads) + redundant
        ok = redundant >= 0 and ranks >= 1 and ranks <= total <= len(loads) * ranks
        _check(ok, f"{len(loads)} experts and {redundant} redundant replicas do not fit {ranks} "
               "ranks: each needs at least one expert and none twice")  # fmt: skip
        if spread == "overlap":
            redundant += -total % ranks  # fills every rank
        for _ in range(redundant):
            candidates = [e for e in range(len(loads)) if replicas[e] < ranks]
            replicas[max(candidates, key=lambda e: loads[e] / replicas[e])] += 1
        if spread == "overlap":
            return Placement(_max_rank_overlap(loads, replicas, ranks))
        slots: list[list[int]] = [[] for _ in range(ranks)]
        share = [load / n for load, n in zip(loads, replicas)]
        rank_load = lambda r: sum(share[e] for e in slots[r])
        queue = sorted(range(len(loads)), key=lambda e: (-share[e], -replicas[e]))
        for e in (e for e in queue for _ in range(replicas[e])):
            most = total // ranks  # one more on total % ranks of the ranks
            one_more = sum(len(s) > most for s in slots) < total % ranks
            room = [r for r in range(ranks) if len(slots[r]) < most + one_more]
            allowed = [r for r in room if e not in slots[r]]
            r = min(allowed or room, key=rank_load)
            if not allowed:  # swap: another rank takes e and gives an expert that r may hold
                trades = [(q, f) for q in range(ranks) for f in slots[q]
                          if e not in slots[q] and f not in slots[r]]  # fmt: skip
                if trades:
                    q, f = min(trades, key=lambda trade: abs(share[trade[1]] - share[e]))
                    slots[q][slots[q].index(f)], e = e, f
            slots[r].append(e)
        return Placement(tuple(map(tuple, slots)))

    def without(self, lost: Sequence[int]) -> Placement:
        """The placement on the other ranks, which keep the experts that they hold. ValueError if
        only lost ranks hold an expert."""
        left = tuple(own for rank, own in enumerate(self.slots) if rank not in lost)
        gone = {e for own in self.slots for e in own} - {e for own in left for e in own}
        _check(not gone, f"only the lost ranks {[*lost]} hold experts {sorted(gone)}: reload them")
        return Placement(left)

    def recovery_probability(self, lost: int, samples: int = 20_000) -> float:
        """The probability that the other ranks hold all experts when `lost` random ranks are lost:
        exact if there are at most `samples` ways to lose them, else of as many random ones."""
        _check(0 <= lost < self.ranks, f"lost must be from 0 to {self.ranks - 1}, not {lost}")
        holders = {frozenset(r for r, own in enumerate(self.slots) if e in own)
                   for e in range(self.n_experts)}  # fmt: skip
        draws, rng = combinations(range(self.ranks), lost), random.Random(0)
        if math.comb(self.ranks, lost) > samples:
            draws = (rng.sample(range(self.ranks), lost) for _ in range(samples))
        survived = [not any(map(set(ranks).issuperset, holders)) for ranks in draws]
        return sum(survived) / len(survived)

    def physical_ids(self, ids: Tensor, offset: int = 0) -> Tensor:
        """Expert ids (N, K) -> slot ids. Tokens use the replicas of an expert round-robin, starting
        at replica `offset`. ValueError, on a CPU, for an id out of range."""
        _check_ids(ids, self.n_experts)
        table, replicas = _slot_table(self, ids.device)
        turn = torch.arange(offset, offset + len(ids), device=ids.device)[:, None]
        known = ids.clamp(min=0)
        return table[known, turn % replicas[known]].masked_fill(ids < 0, -1)


def _max_rank_overlap(
    loads: Sequence[float], replicas: Sequence[int], ranks: int
) -> tuple[tuple[int, ...], ...]:
    """The placement that most likely survives the loss of random ranks (Lazarus, 4.2). With c slots
    per rank, the c experts with the fewest replicas have them on the same ranks, then the next c on
    others, and so on: all c are lost together or none is. The replicas that are left, of experts
    with more than the first of their group, fill the free slots.

    If c does not divide the experts, one group is smaller; the later in this order, the better.
    Where that gives an expert two replicas on one rank, another expert gets a replica instead, and
    the placement starts again from these counts."""
    E, c, counts = len(loads), sum(replicas) // ranks, list(replicas)
    attempts = [position for _ in range(E * ranks) for position in reversed(range(E // c + 1))]
    for position in attempts:
        order = sorted(range(E), key=lambda e: (counts[e], loads[e] / counts[e]))
        slots: list[list[int]] = []
        for i in range(-(-E // c)):
            size = E % c if i == position and E % c else c
            group, order = order[:size], order[size:]
            slots += [[*group] for _ in range(min(counts[group[0]], ranks - len(slots)))]
        slots += [[] for _ in range(ranks - len(slots))]
        used = [sum(e in own for own in slots) for e in range(E)]
        for own in sorted(slots, key=len, reverse=True):
            while len(own) < c:
                absent = {*range(E)} - {*own}
                e = max(absent, key=lambda e: (counts[e] - used[e], loads[e] / used[e]))
                own.append(e)
                used[e] += 1
        if used == counts:
            break
        counts = used if position == 0 else counts
    return tuple(map(tuple, slots))


@lru_cache(None)  # one for each MoE layer of a model
def _slot_table(placement: Placement, device: torch.device) -> tuple[Tensor, Tensor]:
    """(E, max replicas) the slots of every expert, and (E,) their number."""
    replicas, width = placement.replica_counts, placement.slots_per_rank
    of = [[r * width + own.index(e) for r, own in enumerate(placement.slots) if e in own]
          for e in range(placement.n_experts)]  # fmt: skip
    table = [slots + [-1] * (max(replicas) - len(slots)) for slots in of]
    return torch.tensor(table, device=device), torch.tensor(replicas, device=device)


def keep_local_experts_(moe: nn.Module, ids: Sequence[int]) -> None:
    """Reduce the stacked weights of a MoE layer to these experts, in place. The model may be on the
    meta device; weights that are loaded or initialized later go to these experts."""
    moe.local_expert_ids = ids
    for stack in (moe.w_gate_up, moe.w_down):
        stack.data = stack.data[list(ids)]


def remap_expert_ids(experts: Experts, placement: Placement, offset: int = 0) -> Experts:
    """`experts` takes slot ids; the returned callable takes expert ids."""

    def run(x: Tensor, weights: Tensor, ids: Tensor, *matrices: Any) -> Tensor:
        return experts(x, weights, placement.physical_ids(ids, offset), *matrices)

    return run


def select_local_slots(experts: Experts, first: int, width: int) -> Experts:
    """Run `experts` on slots first .. first + width - 1 only, as 0 .. width - 1; all other ids
    become -1 (padding)."""

    def run(x: Tensor, weights: Tensor, ids: Tensor, *matrices: Any) -> Tensor:
        is_local = (ids >= first) & (ids < first + width)
        return experts(x, weights, torch.where(is_local, ids - first, -1), *matrices)

    return run


def sum_replica_grads_(
    grads: Tensor, placement: Placement, rank: int, group: dist.ProcessGroup | None = None
) -> None:
    """Give every replica of an expert the sum of its replicas' gradients, so that they stay equal.
    grads (slots, ...): of this rank's stack."""
    replicated = [e for e, n in enumerate(placement.replica_counts) if n > 1]
    if not replicated:
        return
    total = grads.new_zeros(len(replicated), *grads.shape[1:])
    own = [(i, replicated.index(e)) for i, e in enumerate(placement.slots[rank]) if e in replicated]
    for slot, i in own:
        total[i] += grads[slot]
    dist.all_reduce(total, group=group)
    for slot, i in own:
        grads[slot] = total[i]


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
    """y, attached to the graph of `inputs` even where no token chose an expert of this rank: every
    rank takes part in the collectives of the backward pass."""
    if y.requires_grad:
        return y
    leaves = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    return y + sum(t[:0].sum() for t in leaves).type_as(y) if leaves else y


def all_reduce_combine(experts: Experts, group: dist.ProcessGroup | None = None) -> Experts:
    """All ranks of `group` have the same tokens; each computes a partial output (of its experts, or
    of its columns of every expert: Megatron, arXiv:1909.08053), and an all-reduce sums them."""

    def run(x: Tensor, weights: Tensor, ids: Tensor, *matrices: Any) -> Tensor:
        x, weights = _SumGradients.apply(x, weights, group)
        y = _with_gradients(experts(x, weights, ids, *matrices), x, weights, *matrices)
        return _SumOutputs.apply(y, group)

    return run


QUANTIZED = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}  # largest value


def quantize_rows(x: Tensor, kind: str) -> Tensor:
    """x (N, C) -> (N, C + 4) uint8: C values in `kind` of QUANTIZED, and the row's fp32 scale, its
    max|x| / the largest value. A row with inf or NaN has no finite value."""
    dtype, largest = QUANTIZED[kind]
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / largest).clamp(min=1e-38)  # a row of zeros
    q = (x / scale).round() if kind == "int8" else x / scale
    return torch.cat((q.to(dtype).view(torch.uint8), scale.view(torch.uint8)), 1)


def dequantize_rows(payload: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Inverse of quantize_rows: (N, C + 4) uint8 -> (N, C)."""
    q, scale = payload[:, :-4].contiguous(), payload[:, -4:].contiguous()
    return (q.view(QUANTIZED[kind][0]).float() * scale.view(torch.float32)).to(dtype)


class _Transfer:
    """Asynchronous all-to-alls of the rows of several tensors, from `start` to `finish`. Gradients
    travel the other way, from the backward of `finish` to the backward of `start`. One autograd
    node for all tensors, so that every rank launches the collectives in the same order. quantize:
    of QUANTIZED, to send the first tensor so, and its gradient."""

    def __init__(
        self, sends: list[int], receives: list[int], group: dist.ProcessGroup | None,
        quantize: str | None = None,
    ):  # fmt: skip
        self.sends, self.receives, self.group, self.quantize = sends, receives, group, quantize

    def launch(self, tensors: Sequence[Tensor], back: bool = False) -> tuple[Tensor, ...]:
        """Launch the all-to-alls, whose result `wait` returns; returns tensors of its shapes."""
        sends, receives = (self.receives, self.sends) if back else (self.sends, self.receives)
        self.rows = [t.contiguous() for t in tensors]  # alive until they are sent
        self.dtype, n = tensors[0].dtype, sum(receives)
        shaped = tuple(t.new_empty(1).expand(n, *t.shape[1:]) for t in tensors)
        if self.quantize:
            self.rows[0] = quantize_rows(self.rows[0], self.quantize)
        self.buffers = tuple(t.new_empty(n, *t.shape[1:]) for t in self.rows)
        sizes = dict(output_split_sizes=receives, input_split_sizes=sends, group=self.group)
        self.works = [
            dist.all_to_all_single(buffer, t, **sizes, async_op=True)
            for buffer, t in zip(self.buffers, self.rows)
        ]
        return shaped

    def wait(self) -> tuple[Tensor, ...]:
        for work in self.works:
            work.wait()
        buffers, self.buffers, self.rows, self.works = self.buffers, (), [], []
        if self.quantize:
            buffers = dequantize_rows(buffers[0], self.quantize, self.dtype), *buffers[1:]
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
        return None, *ctx.transfer.wait()


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transfer: _Transfer, *begun: Tensor) -> tuple[Tensor, ...]:
        ctx.transfer = transfer
        return transfer.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *ctx.transfer.launch(grads, back=True)  # received by _Start.backward


STAGES = "send", "compute", "receive"
Order = Sequence[tuple[str, int]]  # (stage, chunk), see all_to_all_dispatch


def default_order(chunks: int) -> Order:
    """Send all chunks, then compute all, then receive all: the best order if dispatch and combine
    take equally long (ScheMoE)."""
    return [(stage, i) for stage in STAGES for i in range(chunks)]


def makespan(order: Order, times: Sequence[float]) -> float:
    """Seconds of a layer's tasks in this order. times: of one chunk's send (select and compress
    rows), dispatch, compute (decompress, experts, compress), combine, receive (decompress, sum).
    Dispatch and combine run on the communication stream, as they are launched: at the end of a send
    or compute. The other tasks run on the compute stream."""
    send, dispatch, compute, combine, receive = times
    seconds = dict(send=(send, dispatch), compute=(compute, combine), receive=(receive, 0.0))
    now, link, arrived = 0.0, 0.0, {}
    for stage, i in order:
        task, transfer = seconds[stage]
        now = max(now, arrived.get(i, 0.0)) + task
        if stage != "receive":
            arrived[i] = link = max(link, now) + transfer
    return now


def best_order(times: Sequence[float], chunks: int) -> Order:
    """The order with the smallest makespan of `times`, by branch and bound from the default order;
    for all_to_all_dispatch on all ranks. Another one is better only if dispatch and combine differ,
    for instance if a rank receives more than it sends. A second for 5 chunks."""
    best = default_order(chunks)
    least = makespan(best, times)

    def search(order: list[tuple[str, int]], done: tuple[int, ...]) -> None:
        nonlocal best, least
        left = [(chunks - n) * task for n, task in zip(done, times[::2])]  # seconds of each stage
        bound = makespan(order, times) + sum(left)
        if bound >= least:
            return
        if len(order) == 3 * chunks:
            best, least = order, bound
        for stage, n in enumerate(done):  # chunks are alike: each stage takes them in turn
            if n < (chunks, *done)[stage]:
                more = tuple(m + (s == stage) for s, m in enumerate(done))
                search([*order, (STAGES[stage], n)], more)

    search([], (0, 0, 0))
    return best


def all_to_all_dispatch(
    experts: Experts, width: int, group: dist.ProcessGroup | None = None, chunks: int = 1,
    quantize: str | None = None, order: Order | None = None,
) -> Experts:  # fmt: skip
    """Every rank of `group` has its own tokens and `width` slots. A token is sent once to each rank
    that holds any of its slots, with its ids and weights; `experts` runs there, with ids relative
    to the rank's first slot; the returned rows are summed in rank order.

    With `chunks` > 1 the transfer of one chunk overlaps with the experts of another (Tutel,
    arXiv:2206.03382), in the backward pass too, which runs the `order` (default_order) in reverse.
    quantize: "int8" or "fp8", to send rows and their gradients so. One host synchronization, for
    the sizes. Under autocast rows are sent in its dtype. ValueError, on a CPU, for an id that no
    rank holds; the group is then unusable, since its other ranks wait in the collective.
    """

    _check(chunks >= 1, f"chunks must be at least 1, not {chunks}")
    ok = quantize in (None, *QUANTIZED)
    _check(ok, f"quantize must be {' or '.join(QUANTIZED)}, not {quantize!r}")
    order = order or default_order(chunks)
    ok = sorted(order) == sorted(default_order(chunks))
    _check(ok, f"order must send, compute and receive each of {chunks} chunks once, not {order}")

    def run(x: Tensor, weights: Tensor, ids: Tensor, *matrices: Any) -> Tensor:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        ok = len(x) == len(weights) == len(ids) and weights.shape == ids.shape
        sizes = tuple(x.shape), tuple(weights.shape), tuple(ids.shape)
        _check(ok, "x (N, C), weights (N, K) and ids (N, K) do not fit: {}, {}, {}".format(*sizes))
        _check_ids(ids, ranks * width)
        inner, dtype = select_local_slots(experts, rank * width, width), x.dtype
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        split = zip(*(t.tensor_split(chunks) for t in (x, weights, ids)))
        pieces = [_DispatchedChunk(*parts, width, ranks, quantize) for parts in split]
        sends = torch.stack([piece.needed.sum(0) for piece in pieces], 1)  # (ranks, chunks)
        receives = torch.empty_like(sends)
        dist.all_to_all_single(receives, sends, group=group)
        sizes = torch.stack((sends, receives)).permute(2, 0, 1).tolist()
        return _run_tasks(pieces, order, sizes, group, inner, matrices).to(dtype)

    return run


def _run_tasks(
    pieces: list[_DispatchedChunk], order: Order, sizes: list, group: Any, experts: Experts,
    matrices: Sequence[Any],
) -> Tensor:  # fmt: skip
    """Run the tasks of all chunks in this order; returns the rows of all chunks."""
    tasks = {"send": lambda i: pieces[i].send(*sizes[i], group),
             "compute": lambda i: pieces[i].compute(experts, matrices),
             "receive": lambda i: pieces[i].receive()}  # fmt: skip
    done = {(stage, i): tasks[stage](i) for stage, i in order}
    return torch.cat([done["receive", i] for i in range(len(pieces))])


class _DispatchedChunk:
    """One chunk of the tokens of a dispatch: send, compute on the receiving ranks, return."""

    def __init__(
        self, x: Tensor, weights: Tensor, ids: Tensor, width: int, ranks: int, quantize: str | None
    ):
        self.x, self.weights, self.ids, self.quantize = x, weights, ids, quantize
        rank = torch.where(ids < 0, ranks, ids // width)
        needed = torch.zeros(len(ids), ranks + 1, dtype=torch.bool, device=ids.device)
        self.needed = needed.scatter_(1, rank, True)[:, :ranks]  # (tokens, ranks)

    def send(self, sends: list[int], receives: list[int], group: dist.ProcessGroup | None) -> None:
        token = self.needed.t().nonzero_static(size=sum(sends))[:, 1]  # rank by rank
        self.ids_transfer = _Transfer(sends, receives, group)
        self.ids_transfer.launch([self.ids[token]])
        self.dispatch = _Transfer(sends, receives, group, self.quantize)
        self.dispatch.start(self.x[token], self.weights[token])
        self.combine = _Transfer(receives, sends, group, self.quantize)

    def compute(self, experts: Experts, matrices: Sequence[Any]) -> None:
        (ids,), (x, weights) = self.ids_transfer.wait(), self.dispatch.finish()
        self.combine.start(
            _with_gradients(experts(x, weights, ids, *matrices), x, weights, *matrices)
        )

    def receive(self) -> Tensor:
        rows = self.combine.finish()[0]
        n = len(rows)
        if n == 0:  # a row to index: every rank runs the same operations, so that activation
            rows = F.pad(rows, (0, 0, 0, 1))  # checkpointing recomputes at the same point
        before = self.needed.sum(0).cumsum(0) - self.needed.sum(0)
        place = self.needed.cumsum(0) - 1 + before
        place = place.masked_fill(~self.needed, n)
        most = min(place.shape[1], self.ids.shape[1])  # ranks that a token is sent to
        place = place.topk(most, dim=1, largest=False).values.sort(dim=1).values
        valid = place < n
        # a token sent to fewer ranks gathers rows of other tokens and masks them out; different
        # ones, since a GPU would serialize the gradients of one row
        others = torch.arange(place.numel(), device=place.device).view_as(place) % len(rows)
        gathered = rows[torch.where(valid, place, others)]
        return gathered.masked_fill(~valid[..., None], 0.0).sum(1)


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def loop_experts(
    x: Tensor, weights: Tensor, ids: Tensor, w_gate_up: Tensor, w_down: Tensor
) -> Tensor:
    """SwiGLU experts in a plain loop."""
    out = torch.zeros_like(x)
    for e in ids[ids >= 0].unique().tolist():
        token, k = (ids == e).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], w_gate_up[e]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, w_down[e]) * weights[token, k, None]
        out = out.index_add(0, token, y)
    return out


def main() -> None:
    """Gradients == one process's; milliseconds of a step beside experts without transfers."""
    if "RANK" not in os.environ:
        sys.exit("run torchrun --standalone --nproc-per-node 2 parallelism/expert_parallel.py")
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    gpu = torch.cuda.is_available()
    torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu")
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    (N, C), E = (4096, 2048) if gpu else (256, 256), 4 * ranks
    P = Placement.even(E, ranks)
    dispatch = partial(all_to_all_dispatch, loop_experts, P.slots_per_rank)
    forms = {f"{n} chunks": remap_expert_ids(dispatch(chunks=n), P) for n in (1, 2)}
    torch.manual_seed(0)
    randn = lambda *size: torch.randn(size).requires_grad_()
    ids = torch.rand(N * ranks, E).topk(3).indices
    whole = [randn(N * ranks, C), randn(N * ranks, 3), ids, randn(E, C, C), randn(E, C, C // 2)]
    shard = lambda t: t.detach().chunk(ranks)[rank].requires_grad_(t.requires_grad)
    local = [*map(shard, whole)]

    def step(experts: Experts, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        leaves = [t for t in inputs if t.requires_grad]
        return torch.autograd.grad(experts(*inputs).square().sum(), leaves)

    for experts in forms.values():
        for grad, full in zip(step(experts, local), step(loop_experts, whole)):
            assert (grad - shard(full)).norm() < 1e-5 * grad.norm()
    forms["no transfers"] = lambda x, weights, ids, *w: loop_experts(x, weights, ids % 4, *w)
    for name, experts in forms.items():
        timer = Timer("step(experts, x)", globals=dict(step=step, experts=experts, x=local))
        ms = 1e3 * timer.timeit(20).mean  # the same number of runs on all ranks
        print(f"{N} tokens per rank, C {C}, {name}: {ms:.2f} ms\n" if rank == 0 else "", end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
