"""KV cache in contiguous virtual memory: the block table is mapped by the hardware's page table.

A paged KV cache saves memory, but its attention kernel must read through a block table. vAttention
(arXiv:2405.04437) keeps the KV of a sequence contiguous in virtual memory and leaves paging to the
hardware: any unmodified kernel then runs on a growing cache. Addresses are reserved first, at no
cost, and memory is committed later:

    reserved    a slot per running sequence, with addresses for the model's whole context
    committed   physical pages, one per block of the Engine's allocator, created when a sequence
                first needs the block, and mapped at the end of the sequence's slot

A slot maps the blocks of a block table in order, and a block can be mapped in several slots. So
prefix sharing, forks with copy-on-write, preemption and swapping work as in paged_kv.py, where the
paper's system has to copy. Blocks that are reused in turn (all layers have sliding windows) are
mapped again further on.

Layout: CUDA maps pages of 2 MiB. With a buffer for the keys and one for the values of each layer, a
sequence could waste 2 L of them (128 MiB with Llama-3-8B). Tensor slicing, as in the paper, stores
the keys and values of all layers of a token side by side, (slots, tokens, L, 2, Hkv, D), and a
layer is a strided slice. A sequence then wastes less than one block, the smallest number of tokens
that fills whole pages (whole_block_size): 16 tokens in 2 MiB with Llama-3-8B.

Free blocks: the `spare` ones that the allocator would hand out next stay committed, or a thread
commits them while the model runs; the others go back to the system after the step that released
them (deferred reclamation). Blocks of the prefix cache are in use until they are evicted.

When it loses: `attention` is called once per sequence, where the paged kernel has one launch
(`decode` takes all slots at once); on a CPU, where the fused step of generation/cpu_decode.py reads
block tables and is not used; with little or an odd amount of KV per token, blocks on CUDA have
hundreds of tokens; no CUDA graphs, no quantized KV; see also serving/virtual_memory.py.

If memory runs out in a step, MemoryError says so and no request is lost: Engine.step can be called
again. Hook: the Engine's `cache` argument. Equivalence (test_all.py): tokens == PagedKVCache's;
committed bytes == what the system counts, less than one block per sequence above what is used.
Needs: torch, Linux or a CUDA GPU.

Shapes: R slots, N new tokens of all sequences, T of one and S its cached tokens; L layers, Hq / Hkv
query / key-value heads, D / Dv head dims.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    raise SystemExit("run: python -m serving.vattention")

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Lock
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_kv import Chunk, PagedKVCache, SwappedKV
from serving.virtual_memory import memory_class


def whole_block_size(config: Any, block_size: int, dtype: torch.dtype, device: torch.device) -> int:
    """The smallest number of tokens, at least block_size, whose KV fills whole pages."""
    token = PagedKVCache(config, 1, 1, dtype, "meta").bytes_per_token
    page = memory_class(device).granularity(device)
    fills = page // math.gcd(page, token)
    return -(-block_size // fills) * fills


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None,
    softcap: float | None = None, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """torch's scaled_dot_product_attention: q (1, T, Hq, D) of the last T of S tokens, k (1, S,
    Hkv, D), v (1, S, Hkv, Dv) -> (1, T, Hq, Dv). ValueError with softcap or sinks, which it lacks:
    pass attention.py's flash_attention."""
    if softcap is not None or sinks is not None:
        raise ValueError("softcap and sinks require attention=attention.flash_attention")
    T, Hq, Hkv = q.shape[1], q.shape[2], k.shape[2]
    if window is not None:  # contiguous: the window is a slice
        k, v = (x[:, max(0, x.shape[1] - T - window + 1) :] for x in (k, v))
    k, v, S = k.transpose(1, 2), v.transpose(1, 2), k.shape[1]
    mask = None
    if T > 1 or alibi_slopes is not None:
        j = torch.arange(S, device=q.device)
        distance = j[-T:, None] - j
        mask = (distance >= 0) & (distance < (window or S))
        if alibi_slopes is not None:
            bias = -alibi_slopes[:, None, None] * distance
            mask = bias.masked_fill(~mask, -math.inf).to(q.dtype)[None]  # (1, Hq, T, S)
    if T == 1:  # query heads that share a key head become its queries
        mask = mask if mask is None else mask.view(1, Hkv, -1, S)
        o = F.scaled_dot_product_attention(q.view(1, Hkv, -1, q.shape[3]), k, v, mask, scale=scale)
        return o.reshape(1, 1, Hq, -1)
    q = q.transpose(1, 2)
    o = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=Hq != Hkv)
    return o.transpose(1, 2)


class VirtualStep(NamedTuple):
    """A step's metadata. rows: slot, first row, end and cached tokens of each sequence. If each has
    one new token and there is a `decode`: their slots (N,), and lengths (R,) int32 of all slots."""

    tokens: Tensor  # (N,)
    positions: Tensor  # (N,)
    written: Tensor | slice  # rows of the tokens whose KV is not in the cache yet
    slots: Tensor  # their places: slot * context + position
    rows: list[tuple[int, int, int, int]]
    active: Tensor | None = None
    lengths: Tensor | None = None


class VirtualKVCache(PagedKVCache):
    """A PagedKVCache whose sequences are contiguous in virtual memory.

        engine = Engine(model, num_blocks=n, block_size=whole_block_size(...), static=False,
                        cache=functools.partial(VirtualKVCache, num_slots=max_num_seqs))

    `sequences` (R, context, L, 2, Hkv, D) is reserved; slot r can be read as far as its sequence
    reaches, and what lies behind may fault. `pages` are views of the pool of blocks, one per layer
    (2, Hkv, blocks, block_size, D). With latent attention 1 in place of 2."""

    def __init__(
        self, config: Any, num_blocks: int, block_size: int, dtype: torch.dtype,
        device: torch.device, kv_dtype: str | None = None, rings: int = 0, ring_blocks: int = 0, *,
        num_slots: int, spare: int = 16, attention: Callable[..., Tensor] = sdpa,
        decode: Callable[..., Tensor] | None = None,
    ):  # fmt: skip
        """num_slots: the Engine's max_num_seqs. spare: free blocks that stay committed.
        attention(q, k, v, **options): see `sdpa`. decode(q (R, 1, Hq, D), k (R, S, Hkv, D), v,
        lengths (R,), **options): see attention.py's decode_attention; it must not read keys from
        lengths[r] on. ValueError if a block does not fill whole pages, or for quantized KV."""
        whole = whole_block_size(config, 1, dtype, device)
        if block_size % whole:
            raise ValueError(f"block_size must be a multiple of {whole} here, not {block_size}")
        if kv_dtype is not None:
            raise ValueError(f"kv_dtype {kv_dtype} requires PagedKVCache: KV is not quantized here")
        super().__init__(config, num_blocks, block_size, dtype, "meta")  # for shapes and checks
        parts, heads, _, _, dim = self.pages[0].shape
        self.device, self.num_slots, self.spare = device, num_slots, spare
        self.attention, self.decode = attention, decode
        most = getattr(config, "context", num_blocks * block_size)
        self.slot_blocks = -(-most // block_size)
        block = self.bytes_per_token * block_size
        self.memory = memory_class(device)(num_blocks, block, device)
        self.base = self.memory.reserve(num_slots * self.slot_blocks * block)
        self.reserved_bytes = (num_blocks + num_slots * self.slot_blocks) * block  # addresses
        self.tables = [[None] * self.slot_blocks for _ in range(num_slots)]  # blocks mapped there
        self.lock, self.ahead = Lock(), Future()
        self.ahead.set_result(None)
        # synchronize: a thread's first CUDA call makes the device's context current
        self.thread = ThreadPoolExecutor(1, initializer=self.memory.synchronize)
        self._map(0, [0])  # CudaMemory.tensor needs the first page of a range
        token = len(self.pages), parts, heads, dim
        tensor = lambda at, blocks: self.memory.tensor(at, blocks * block).view(dtype)
        pool = tensor(self.memory.pool, num_blocks).view(num_blocks, block_size, *token)
        self.pages = list(pool.permute(2, 3, 4, 0, 1, 5))
        self.sequences = tensor(self.base, num_slots * self.slot_blocks).view(num_slots, -1, *token)

    @property
    def committed_bytes(self) -> int:
        """Of physical memory."""
        return len(self.memory.committed) * self.memory.page_bytes

    def step(self, chunks: list[Chunk], shape: None = None) -> VirtualStep:
        """Map the chunks' blocks. MemoryError if the system has no memory for them."""
        tokens, positions, written, slots, rows = [], [], [], [], []
        lengths, context = [0] * self.num_slots, self.sequences.shape[1]
        for c in chunks:
            begin, length = len(tokens), c.start + len(c.tokens)
            self._map(c.ring, c.block_table[: -(-length // self.block_size)])
            tokens += c.tokens
            positions += range(c.start, length)
            new = range(max(c.start, c.num_written_tokens), length)
            written += range(len(tokens) - len(new), len(tokens))
            slots += [c.ring * context + p for p in new]
            rows.append((c.ring, begin, len(tokens), length))
            lengths[c.ring] = length
        tensor = partial(torch.tensor, dtype=torch.long, device=self.device)
        written = slice(None) if len(written) == len(tokens) else tensor(written)
        step = VirtualStep(tensor(tokens), tensor(positions), written, tensor(slots), rows)
        if self.decode is not None and len(tokens) == len(rows):
            step = step._replace(active=tensor([c.ring for c in chunks]))
            step = step._replace(lengths=tensor(lengths).int())
        return step

    def attend(
        self, spec: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, *, step: VirtualStep
    ) -> Tensor:
        """The attend hook: writes k and v (1, N, Hkv, D), then calls a kernel with the queries of
        each sequence (1, T, Hq, D) and all its cached keys (1, S, Hkv, D)."""
        layer = self.sequences[:, :, spec.index].unbind(2)  # (R, context, Hkv, D) keys and values
        for cached, x in zip(layer, (k, v)):
            cached.flatten(0, 1).index_copy_(0, step.slots, x[0, step.written])
        names = ("scale", "window", "softcap", "alibi_slopes", "sinks")
        options, latent_dim = {name: getattr(spec, name) for name in names}, spec.latent_dim
        if step.active is not None:
            keys, *values = (x[:, : max(length for *_, length in step.rows)] for x in layer)
            rows = q.new_zeros(self.num_slots, 1, *q.shape[2:])
            rows[step.active] = q.transpose(0, 1)
            options |= {} if values else {"latent_dim": latent_dim}
            o = self.decode(rows, keys, *(values or [None]), step.lengths, **options)
            return o[step.active].transpose(0, 1)
        out = []
        for slot, begin, end, length in step.rows:
            keys, values = (x[slot, None, :length] for x in (layer[0], layer[-1]))
            values = values[..., :latent_dim]
            out.append(self.attention(q[:, begin:end], keys, values, **options))
        return torch.cat(out, 1)

    def copy(self, pairs: list[tuple[int, int]], windowed: bool = False) -> None:
        self._commit([target for _, target in pairs])
        super().copy(pairs)

    def write(self, table: list[int], first: int, host: SwappedKV, ring: int = 0) -> None:
        self._commit(table)
        super().write(table, first, host)

    def reclaim(self, free: list[int]) -> None:
        """Called by the Engine after each step with its free blocks, the next ones last: give back
        all but `spare` of them, which a thread commits if they are not."""
        rest, committed = max(0, len(free) - self.spare), self.memory.committed
        more = len(committed) > self.num_blocks - rest  # than in use and spare
        if more and (blocks := committed.keys() & set(free[:rest])):
            self._give_back(blocks)
        following = [block for block in reversed(free[rest:]) if block not in committed]
        if following and self.ahead.done():
            self.ahead = self.thread.submit(self._commit, following)

    def _give_back(self, blocks: set[int]) -> None:
        self.memory.synchronize()
        for slot, table in enumerate(self.tables):
            for i in [i for i, block in enumerate(table) if block in blocks]:
                self._unmap(slot, i)
        with self.lock:
            for block in blocks:
                self.memory.free(block)

    def _commit(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block not in self.memory.committed:
                with self.lock, self._memory_error():  # the thread may be at it
                    self.memory.commit(block)

    @contextmanager
    def _memory_error(self) -> Iterator[None]:
        """Say what there is no memory for."""
        try:
            yield
        except MemoryError as e:
            mib = self.committed_bytes / 2**20
            reason = f"no memory for a KV block besides {mib:.2f} MiB of others: {e}"
            raise MemoryError(reason) from None

    def _map(self, slot: int, blocks: list[int]) -> None:
        """Map a sequence's blocks to its slot, in order. What lies behind stays until its place is
        needed or its block is given back."""
        table = self.tables[slot]
        if table[: len(blocks)] == blocks:
            return
        changed = [i for i, block in enumerate(blocks) if table[i] != block]
        self._commit(blocks[i] for i in changed)
        if any(table[i] is not None for i in changed):
            self.memory.synchronize()
        for i in changed:
            if table[i] is not None:
                self._unmap(slot, i)
            with self._memory_error():
                self.memory.map(self._address(slot, i), blocks[i])
            table[i] = blocks[i]

    def _unmap(self, slot: int, i: int) -> None:
        self.tables[slot][i] = None  # first: Ctrl-C may come between
        self.memory.unmap(self._address(slot, i))

    def _address(self, slot: int, i: int) -> int:
        return self.base + (slot * self.slot_blocks + i) * self.memory.page_bytes


@torch.inference_mode()
def main() -> None:
    """Attention to mapped blocks == to the same blocks through a table; the time of both."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.15 s

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    config = SimpleNamespace(n_layers=4, n_kv_heads=8, head_dim=128, context=8192)
    size = whole_block_size(config, 16, torch.bfloat16, device)
    names = "window softcap alibi_slopes sinks latent_dim latent expand"
    spec = SimpleNamespace(index=1, scale=128**-0.5, **dict.fromkeys(names.split()))
    print(f"{'decode attention, bf16, ms':26}{'sdpa':>8}{'paged':>8}  MiB committed, reserved")
    for rows, length in ((16, 512), (4, 4096), (1, 8192)):
        args = config, rows * -(-length // size), size, torch.bfloat16, device
        virtual, paged = caches = VirtualKVCache(*args, num_slots=rows), PagedKVCache(*args)
        virtual._commit(range(args[1]))
        for copy, pages in zip(virtual.pages, paged.pages):
            copy.copy_(pages.normal_()[:, :, : args[1]])
        q, k, v = torch.randn(3, 1, rows, 8, 128, device=device).bfloat16()
        tables = torch.randperm(args[1]).view(rows, -1).tolist()
        chunks = [Chunk([0], length - 1, table, ring=i) for i, table in enumerate(tables)]
        calls = [partial(c.attend, spec, q, k, v, None, step=c.step(chunks)) for c in caches]
        torch.testing.assert_close(*(f() for f in calls), atol=2e-2, rtol=2e-2)
        ms = [1e3 * Timer("f()", globals=dict(f=f)).blocked_autorange().median for f in calls]
        mib = virtual.committed_bytes >> 20, virtual.reserved_bytes >> 20
        print(f"{rows:4} sequences of {length:5}{ms[0]:12.2f}{ms[1]:8.2f}{mib[0]:11}{mib[1]:10}")


if __name__ == "__main__":
    main()
