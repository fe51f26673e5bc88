"""KV that moves between engines: hand-over, live migration, replication and return, in parts.

A request needs its KV where it decodes. Copied at once, it keeps the request waiting for as long as
the copy takes, and the longer the prompt the longer. But KV is append-only: what is written never
changes. So it can be copied while it grows, and what is left at the end is small. Four uses:

    hand-over    a prefill worker sends the new KV after each chunk of a prompt; with the first
                 token, only the last part remains (DistServe, arXiv:2401.09670; Splitwise,
                 arXiv:2311.18677): disaggregated.py
    migration    a request that decodes goes to another engine: its KV is copied while it decodes
                 on, and it pauses for the last part (Llumnix, arXiv:2406.03243): migration.py
    replication  each step's new KV goes to a peer, where decoding continues after the last token
                 that arrived if this process dies (DejaVu, arXiv:2403.01876):
                 disaggregated_replicas.py
    return       what the decode worker adds goes back to the prefill worker, whose prefix cache
                 then has the next turn of the conversation (MemServe, arXiv:2406.17565): there too

All four are KVSender on one side and KVInbox on the other. A part is the KV of some consecutive
tokens of a sample, and these tokens. An inbox keeps parts in host memory, and writes the blocks
that they fill to its engine's prefix cache at once: they take no block from a running sequence, may
be evicted again, and a request that continues shares them, so that only what they lack is written
when it is admitted. So the target reserves nothing. Its block size may be another.

A Channel is a connection of two engines over torch.distributed. KV travels as raw bytes behind a
header of 8 integers, HEADER bytes; requests, which are small, are pickled. For t tokens in p parts

    bytes = p * HEADER + t * (8 + bytes of a token's KV)

to each rank of the other engine, which gets the KV heads that it caches, and no others.

Cost: KV crosses the network once, and the engine copies each part to host memory between two steps;
with replication and return it does so after every step. Gloo sends from host memory; if the group
has only NCCL, parts go through the GPUs. Without a prefix cache, all is written on admission. When
it loses: short prompts, where a hand-over costs more than the prefill; replication of many short
sequences, whose parts are a token each.

Equivalence (test_all.py): tokens == those of one undisturbed engine, greedy and sampled, with int8
KV, MLA and windows, whatever is moved, preempted, aborted, refused or killed; bytes == the formula.
Needs: paged_kv.py, and a process group. migration.py prints the pauses.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part; run: torchrun --nproc-per-node 2 -m serving.migration")

import math
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import takewhile
from operator import eq
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paged_kv import Engine, Output, SamplingParams, SwappedKV
from paged_kv import Sequence as EngineSequence

HEADER = 64  # bytes: key, sample, first, last, tokens in layers with windows, heads, shared, size
PROMPT, OBJECT = -1, -2  # in place of a sample's number
MAX_UNSENT = 64  # messages of a channel that may be on their way
NEVER = timedelta(days=365)  # a channel may be idle

# --------------------------------------------------------------------------------------------------
# Requests leave and enter an engine
# --------------------------------------------------------------------------------------------------


class KVTransfer(NamedTuple):
    """A request between two engines: its output so far, and its unfinished sequences, with their KV
    if that comes along."""

    output: Output
    sequences: list[EngineSequence]


def decodes(engine: Engine, id: Any) -> bool:
    """Whether each unfinished sample of a request has a token and waits for the next one."""
    sequences = engine.sequences[id]
    return all(s.running and s.remaining == 1 and s.output and s.n_unforked == 1 for s in sequences)


@torch.inference_mode()
def export_request(engine: Engine, id: Any, with_kv: bool = True) -> KVTransfer:
    """Remove a request that decodes, and return it. ValueError if there is none of that id."""
    engine._deliver()
    if id not in engine.outputs:
        raise ValueError(f"id {id!r} is not an unfinished request")
    assert decodes(engine, id), "only requests in decode can be exported"
    engine.cache.copy_rings(engine.scheduler.ring_copies)
    sequences, output = engine.sequences.pop(id), engine.outputs.pop(id)
    for seq in sequences:
        if with_kv:
            table, n = seq.block_table, seq.num_computed_tokens
            seq.swapped_kv = engine.cache.read(table, n, seq.ring)
        seq.listener = None
        engine.scheduler.finish(seq)  # a KVStore saves its blocks under its adapter
        engine._forget(seq)
        seq.adapter = None
    _synchronize(engine)
    return KVTransfer(output, sequences)


def import_request(engine: Engine, transfer: KVTransfer) -> None:
    """Continue a request of another engine of the same model. ValueError as in Engine.add; then
    this engine is unchanged."""
    output = transfer.output
    for seq in transfer.sequences:
        engine._check_request(seq.tokens[: seq.n_prompt], seq.params)
        seq.adapter = engine._adapter(seq.params)
    if output.id in engine.outputs:
        raise ValueError(f"id {output.id!r} is in use")
    engine.outputs[output.id], engine.sequences[output.id] = output, list(transfer.sequences)
    for seq in transfer.sequences:
        seq.arrival = engine.n_arrivals
        seq.listener = engine.output_callback(seq) if engine.output_callback else None
        engine.scheduler.add(seq)
        delivered = all([engine._call_listener(seq, "push", token) for token in seq.output])
        reason = None if delivered else "error"
        if delivered and seq.output:
            reason = engine._finish_reason(seq, seq.tokens[-1])
        if reason:
            engine._finish(seq, reason)
    engine.n_arrivals += 1


def continued(
    output: Output, params: SamplingParams, kv: Callable[..., Any] = lambda *_: None, **more
) -> KVTransfer:
    """A request that continues after the tokens of its output. kv(sample, tokens): what is at hand
    of their KV, a SwappedKV, or None. more: fields of its sequences."""
    prompt, sequences = output.prompt_ids, []
    for i, sample in enumerate(output.samples):
        if sample.finish_reason is None:
            tokens = prompt + sample.token_ids
            seq = EngineSequence(tokens, len(prompt), params, output, i, **more)
            seq.swapped_kv = kv(i, tokens)
            sequences.append(seq)
    return KVTransfer(output, sequences)


def _synchronize(engine: Engine) -> None:
    """Wait until what PagedKVCache.read copied is in host memory."""
    if (pages := engine.cache.pages[0]).is_cuda:
        torch.cuda.current_stream(pages.device).synchronize()


# --------------------------------------------------------------------------------------------------
# Parts
# --------------------------------------------------------------------------------------------------


class KVPart(NamedTuple):
    """KV of some consecutive tokens of a sample, or of the prompt that the samples share."""

    key: int  # of the request, the same on both sides
    sample: int
    tokens: list[int]
    kv: SwappedKV  # of these tokens, up to kv.n
    shared: bool = True  # a request without adapter may use it

    @property
    def first(self) -> int:
        return self.kv.n - len(self.tokens)


class Handover(NamedTuple):
    """The end of a hand-over or a migration: a request without its KV."""

    key: int
    output: Output
    params: SamplingParams | None = None
    fields: dict[str, Any] = {}  # of its sequences


class Cancel(NamedTuple):
    """No more of a request will be sent: it stays where it is, or has ended."""

    key: int


def join_kv(parts: Sequence[KVPart], n: int) -> SwappedKV:
    """The KV of consecutive parts, up to token n. A layer with a window has the last ones only."""

    def join(tensors: tuple[Tensor, ...]) -> Tensor:
        gaps = (i for i, x in enumerate(tensors) if x.shape[2] < len(parts[i].tokens))
        return torch.cat(tensors[max(gaps, default=0) :], dim=2)

    kv, scales = ([*map(join, zip(*(part.kv[i] for part in parts)))] for i in (1, 2))
    return truncate_kv(SwappedKV(parts[-1].kv.n, kv, scales), n)


def truncate_kv(kv: SwappedKV, n: int) -> SwappedKV:
    """The KV of tokens before n <= kv.n."""
    first = lambda x: x[:, :, : max(0, x.shape[2] - (kv.n - n))]
    return SwappedKV(n, *([*map(first, tensors)] for tensors in kv[1:]))


@torch.inference_mode()
def insert_blocks(engine: Engine, tokens: list[int], kv: SwappedKV) -> int:
    """Add full blocks of the tokens to the prefix cache, as far as kv has the KV of those that are
    missing; the number of new blocks. All are as recently used as if a sequence had ended."""
    blocks, size, first = engine.allocator, engine.allocator.block_size, None
    chain: list[int] = []
    end = kv.n - size + 1 if blocks.prefix_cache else 0
    for at in range(0, end, size):
        parent, content = blocks.node(chain[-1]) if chain else 0, tuple(tokens[at : at + size])
        found = blocks.find(parent, content)
        if found is not None:
            blocks.share(found)
        elif at < kv.first or not blocks.n_free:
            break
        else:
            found, first = blocks.allocate(), at if first is None else first
            blocks.register(found, parent, content)
        chain.append(found)
    if first is not None:
        engine.cache.write(chain, first, truncate_kv(kv, len(chain) * size))
    blocks.release(chain)
    return 0 if first is None else len(chain) - first // size


class KVSender:
    """Sends the KV of an engine's requests: what was computed since their last parts."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.sent: dict[Any, dict[int, int]] = {}  # of each request: sample or PROMPT -> tokens

    @torch.inference_mode()
    def send_new(self, id: Any, key: int, channel: Channel, limit: float = math.inf) -> int:
        """Send new KV of a request, of at most `limit` tokens; returns how many are left."""
        engine = self.engine
        for ended in self.sent.keys() - engine.outputs.keys():
            del self.sent[ended]
        sent = self.sent.setdefault(id, {})
        engine.cache.copy_rings(engine.scheduler.ring_copies)  # of forks of the last step
        parts, left = [], 0
        for seq in engine.sequences[id]:
            computed = min(seq.num_computed_tokens, len(seq.tokens) - 1)
            ranges = (PROMPT, 0, min(computed, seq.n_prompt)), (seq.index, seq.n_prompt, computed)
            for sample, start, end in ranges:
                first = sent.get(sample, start)
                last = min(end, first + limit)
                left += max(0, end - max(first, last))
                if first < last:
                    args = seq.block_table, seq.num_computed_tokens, seq.ring, first, last
                    kv, shared = engine.cache.read(*args), seq.adapter is None
                    parts.append(KVPart(key, sample, seq.tokens[first:last], kv, shared))
                    sent[sample], limit = last, limit - (last - first)
        _synchronize(engine)
        for part in parts:
            channel.send_part(part)
        return left

    def hand_over(
        self, id: Any, key: int, channel: Channel, end: Handover | None = None
    ) -> KVTransfer:
        """Send the rest of a request that decodes, which leaves this engine; returns it. If the
        channel fails, it stays. end: the last message, if the request itself cannot be pickled."""
        self.send_new(id, key, channel)
        output, seq = self.engine.outputs[id], self.engine.sequences[id][0]
        fields = dict(priority=seq.priority, client=seq.client)
        channel.send(end or Handover(key, output, seq.params, fields))
        return export_request(self.engine, id, with_kv=False)


class KVInbox:
    """The parts that have arrived at an engine, in host memory and in its prefix cache."""

    def __init__(self, engine: Engine):
        self.engine, self.n_blocks = engine, 0  # blocks added to the prefix cache
        self.parts: dict[int, dict[int, list[KVPart]]] = {}  # of each request: sample or PROMPT
        self.before: dict[int, list[int]] = {}  # tokens before the first part; the cache has them

    def add(self, part: KVPart) -> None:
        """Keep a part. Between two steps."""
        parts = self.parts.setdefault(part.key, {}).setdefault(part.sample, [])
        if parts and parts[-1].kv.n != part.first:  # the request was sent again
            parts.clear()
        parts.append(part)
        size = self.engine.allocator.block_size
        done = part.first // size * size  # tokens of blocks that were full before
        tokens = self.tokens(part.key, part.sample)
        if part.shared and len(tokens) == part.kv.n >= done + size:
            new = [x for x in self._parts(part.key, part.sample) if x.kv.n > done]
            self.n_blocks += insert_blocks(self.engine, tokens, join_kv(new, part.kv.n))

    def _parts(self, key: int, sample: int) -> list[KVPart]:
        """The parts of a sample, those of its prompt first."""
        of = self.parts.get(key, {})
        return of.get(PROMPT, []) + (of.get(sample, []) if sample >= 0 else [])

    def tokens(self, key: int, sample: int = PROMPT) -> list[int]:
        """The tokens of a sample whose KV is here."""
        parts = self._parts(key, sample)
        before = self.before.get(key, [])[: parts[0].first if parts else 0]
        return before + [token for part in parts for token in part.tokens]

    def kv(self, key: int, sample: int, tokens: list[int]) -> SwappedKV | None:
        """What is here of the KV of a sample's tokens but the last, which gives the logits."""
        parts, here = self._parts(key, sample), self.tokens(key, sample)
        usable = parts and (parts[0].first == 0 or self.engine.allocator.prefix_cache)
        n = sum(1 for _ in takewhile(bool, map(eq, here, tokens[:-1])))
        return join_kv(parts, n) if usable and n > parts[0].first else None

    def receive(self, end: Handover) -> Output:
        """The request continues in this engine. ValueError as in import_request."""
        transfer = continued(end.output, end.params, partial(self.kv, end.key), **end.fields)
        self.forget(end.key)
        if transfer.sequences:
            import_request(self.engine, transfer)
        return end.output

    def forget(self, key: int) -> None:
        """Drop what is in host memory of a request."""
        self.parts.pop(key, None)
        self.before.pop(key, None)


# --------------------------------------------------------------------------------------------------
# Channels
# --------------------------------------------------------------------------------------------------


class Channel:
    """Messages between this rank's engine and another one: parts, and objects that pickle."""

    def __init__(
        self, engine: Engine, targets: Mapping[int, slice] = {}, sources: Iterable[int] = (),
        group: Any = None,
    ):  # fmt: skip
        """targets: the other engine's ranks that need this one's KV, and which of its heads.
        sources: its ranks that send KV heads to this one, in the order of heads. group: a process
        group that torch.distributed need not know; None: the default one."""
        self.targets, self.sources, self.cache = targets, list(sources), engine.cache
        windows = getattr(engine.model.config, "windows", ())
        self.windowed = {layer for layer, window in enumerate(windows) if window}
        self.isend = dist.isend if group is None else lambda x, rank: group.send([x], rank, 0)
        group = dist.group.WORLD if group is None else group
        self.recv = lambda x, rank: group.recv([x], rank, 0).wait(NEVER)
        backend = dist.get_backend_config() if group is dist.group.WORLD else "gloo"
        self.device = "cpu" if "gloo" in str(backend) else "cuda"
        self.unsent: deque[tuple[Any, Tensor]] = deque()  # tensors must live until they are sent

    def send(self, message: Any) -> None:
        """Send an object, or None as the last one. RuntimeError if the other process died."""
        body = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        for rank in self.targets:
            self._send(rank, [0, OBJECT, 0, 0, 0, 0, 0], body)

    def send_part(self, part: KVPart) -> None:
        """As send, of the heads that each rank needs."""
        in_window = min(x.shape[2] for x in part.kv.kv)  # n in layers that keep all tokens
        for rank, heads in self.targets.items():
            kv = [x[:, heads] for x in (*part.kv.scales, *part.kv.kv)]
            body = [torch.tensor(part.tokens), *kv]  # in an order that keeps each aligned
            body = torch.cat([x.flatten().view(torch.uint8) for x in body])
            fields = part.key, part.sample, part.first, part.kv.n, in_window, kv[0].shape[1]
            self._send(rank, [*fields, part.shared], body)

    def _send(self, rank: int, fields: list[int], body: Tensor) -> None:
        header = torch.tensor([*map(int, fields), len(body)])
        assert header.nbytes == HEADER
        for x in (header, body):
            x = x.to(self.device)
            self.unsent.append((self.isend(x, rank), x))
        self.flush(MAX_UNSENT)

    def flush(self, most: int = 0) -> None:
        """Wait for messages to be sent, except for the last `most`."""
        while len(self.unsent) > 2 * most:
            self.unsent.popleft()[0].wait()

    def receive(self) -> Any:
        """The next message. RuntimeError if the other process died."""
        got = [self._receive(rank) for rank in self.sources]
        if not isinstance(got[0], KVPart) or len(got) == 1:
            return got[0]
        n, *tensors = zip(*(part.kv for part in got))
        kv, scales = ([torch.cat(x, dim=1) for x in zip(*ranks)] for ranks in tensors)
        return got[0]._replace(kv=SwappedKV(n[0], kv, scales))

    def _receive(self, rank: int) -> Any:
        header = torch.empty(HEADER // 8, dtype=torch.long, device=self.device)
        self.recv(header, rank)
        key, sample, first, last, in_window, heads, shared, size = header.tolist()
        body = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.recv(body, rank)
        body = body.cpu()
        if sample == OBJECT:
            return pickle.loads(body.numpy())
        ids, body = body.tensor_split([8 * (last - first)])
        tensors: list[Tensor] = []
        for pages in (self.cache.scales, self.cache.pages):
            for layer, like in enumerate(pages):
                n = in_window if layer in self.windowed else last - first
                shape = like.shape[0], heads, n, *like.shape[4:]
                size = math.prod(shape) * like.element_size()
                dtype = torch.uint8 if like.dtype == torch.float8_e4m3fn else like.dtype
                tensors.append(body[:size].view(dtype).view(shape))
                body = body[size:]
        assert not len(body), "the engines' KV caches differ"
        n = len(self.cache.scales)
        kv = SwappedKV(last, tensors[n:], tensors[:n])
        return KVPart(key, sample, ids.view(torch.long).tolist(), kv, bool(shared))

    def listen(self, put: Callable[[Any], Any]) -> None:
        """Call put(message) in a thread for each message, up to None or the exception that ended
        the channel."""

        def run(message: Any = ...) -> None:
            while message is not None and not isinstance(message, Exception):
                try:
                    message = self.receive()
                except Exception as e:  # the other process died
                    message = e
                put(message)

        threading.Thread(target=run, daemon=True).start()
