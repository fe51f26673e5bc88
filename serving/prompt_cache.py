"""--kv-store in generate.py: KV of earlier prompts and conversations for a Decoder's cache.

serving/kv_store.py keeps the blocks; the engine of --batch, --serve and --program uses it by
itself. Here are the cache of one prompt, whose slots are blocks in order; the conversation of
--interactive, which is continued when the program is started again; and its truncation: a
conversation that outgrows the context loses its oldest turns, and keeps the KV of the others.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from generation.config import GenerateConfig
from huggingface.weights import write_atomically
from model import ModelConfig, Transformer, apply_rope, rope_frequencies
from serving.kv_store import KVStore, LoadError, content_hash


def open_store(args: GenerateConfig, model: Transformer) -> KVStore | None:
    """The KVStore of --kv-store. ValueError names the flag."""
    if args.kv_store is None:
        return None
    option = model.config.contiguous_only
    if model.config.has_dynamic_rope:
        option = "rope_scaling 'dynamic', which rotates all keys by the longest sequence"
    if option:
        raise ValueError(f"--kv-store {args.kv_store}: not supported with {option}")
    try:
        sizes = args.kv_store_size, args.kv_store_host
        return KVStore(args.kv_store, sizes[0], fingerprint(model), sizes[1])
    except OSError as e:
        raise ValueError(f"--kv-store {args.kv_store}: {e.strerror}; give a folder") from None


def fingerprint(model: Transformer) -> str:
    """Of what the KV of a model depends on, up to rounding: modules, config, and all bytes of the
    weights. A sample of them could miss what a fine-tune has changed, for example one row."""
    named = dict([*model.named_parameters(), *model.named_buffers()])
    about = f"{model} {model.config} {[*named]}"
    return hashlib.sha256(about.encode() + content_hash(named.values())).hexdigest()


class History:
    """What a Decoder's cache can have without prefill."""

    def __init__(self, store: KVStore, decoder: Any, prefill: Callable[..., Tensor], size: int):
        """prefill: generate.py's, which this replaces in the decoder. size: tokens per block."""
        self.store, self.decoder, self.plain_prefill = store, decoder, prefill
        self.config, self.ids, self.before = decoder.model.config, [], 0
        cache = decoder.cache
        pairs = zip(cache.k, cache.v) if cache.v else zip(cache.k)
        self.layers = [*pairs][: cache.n_layers]  # (B, Hkv, S, D) each
        blocks = lambda t: t[:, :, : t.shape[2] // size * size].unflatten(2, (-1, size))
        store.bind([[*map(blocks, layer)] for layer in self.layers], size, rows=1)
        self.num_slots = self.layers[0][0].shape[2]
        decoder.prefill = self.prefill

    def find(self, ids: Sequence[int], cached: int = 0) -> int:
        """How many of a prompt's first tokens need no prefill: `cached` are in the cache, others
        are loaded during the prefill."""
        self.ids, self.before = list(ids), cached
        self.store.recover(None)  # what was found for a prompt that was not run
        ids = ids[: min(len(ids) - 1, self.num_slots)]  # this cache may be the smaller one
        kv = self.store.find(ids, cached // self.store.block_size)
        if kv is None or kv.n <= cached:
            return cached
        self.store.load(kv, range(kv.n // self.store.block_size))
        return kv.n

    def prefill(
        self, model: Transformer, tokens: Tensor, cache: Any, start: int, attention: Any,
        **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """As generate.py's. If a stored block cannot be read, once more without it."""
        gated = lambda cache, limit: self.store.gate(attention(cache, limit))
        while True:
            try:
                return self.plain_prefill(model, tokens, cache, start, gated, **kwargs)
            except BaseException as e:  # also Ctrl-C: what is in the cache must then be known
                self.decoder.num_cached = self.before
                if not self.store.recover(e):
                    raise
            start = self.find(self.ids, self.before)
            tokens = torch.tensor([self.ids[start:]], device=tokens.device)

    def save(self, ids: Sequence[int]) -> None:
        """Store the full blocks of row 0, whose tokens are ids; the last may not have been run."""
        n = min(self.decoder.num_cached, len(ids) - 1)
        self.store.save(ids, range(n // self.store.block_size))

    # ---- conversations ----

    @property
    def path(self) -> Path:
        """The conversation's file: other weights, which may have other tokens, have another."""
        name = hashlib.sha256(self.store.fingerprint.encode()).hexdigest()[:16]
        return self.store.folder / f"chat-{name}.json"

    def restore(self, fields: dict[str, type]) -> dict[str, Any]:
        """The conversation that was saved last, with these fields; {} if there is none. ValueError
        names the file."""
        try:
            state = json.loads(self.path.read_bytes())
            lineage = bytes.fromhex(state.pop("lineage"))
            if {name: type(value) for name, value in state.items()} != fields:
                raise ValueError(f"its fields must be {', '.join(fields)}")
            self.store.lineage = lineage
            return state
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, LookupError, AttributeError, TypeError) as e:
            raise ValueError(f"{self.path}: not a conversation ({e}); delete it") from None

    def write(self, state: dict[str, Any]) -> None:
        """Save the conversation for the next start of the program."""
        text = json.dumps(state | {"lineage": self.store.lineage.hex()})
        try:
            write_atomically(self.path, lambda tmp: tmp.write_text(text, encoding="utf-8"))
        except OSError as e:
            self.store.warn("chat", str(e))

    def shorten(self, old: Sequence[int], new: Sequence[int]) -> int:
        """Move the KV of a conversation, old, to where a shorter one, new, has the tokens that
        follow the dropped ones. Returns how many of new's first tokens are then cached. Their KV
        has attended to the dropped ones, so it is stored under a lineage of its own."""
        cached = self.find([*old, 0], min(self.decoder.num_cached, len(old)))
        try:
            self.store.wait()
        except LoadError as e:
            self.store.recover(e)
            cached = self.before
        start, n, length = longest_run(old[:cached], new[:-1])
        if length:
            drop_tokens_(self.layers, start, n, start + n + length, rotation(self.config))
            lineage = f"{self.store.lineage.hex()} {list(old[:cached])} {start} {n}"
            self.store.lineage = hashlib.sha256(lineage.encode()).digest()
        return start + length


def longest_run(old: Sequence[int], new: Sequence[int]) -> tuple[int, int, int]:
    """(p, n, m): the first p tokens of old and new are equal, and, of all n > 0, new[p : p + m] and
    old[p + n : p + n + m] for the longest time."""

    def equal(i: int, j: int) -> int:
        pairs = enumerate(zip(islice(old, i, None), islice(new, j, None)))
        end = min(len(old) - i, len(new) - j)
        return next((at for at, (a, b) in pairs if a != b), end)

    p = equal(0, 0)
    runs = {i - p: equal(i, p) for i in range(p + 1, len(old)) if new[p : p + 1] == old[i : i + 1]}
    n = max(runs, key=runs.get, default=0)
    return p, n, runs.get(n, 0)


def drop_tokens_(
    layers: Sequence[Sequence[Tensor]], start: int, n: int, length: int,
    rotate: Callable[[Tensor, int], Tensor],
) -> None:  # fmt: skip
    """Remove positions start to start + n of the first `length` from a contiguous cache, in place:
    later tokens move down by n. layers: of each its keys, and its values if it has any, (B, H, S,
    D). rotate(keys, n): the same keys n positions later."""
    for keys, *values in layers:
        keys[:, :, start : length - n] = rotate(keys[:, :, start + n : length], -n)
        for x in values:
            x[:, :, start : length - n] = x[:, :, start + n : length].clone()


def rotation(config: ModelConfig) -> Callable[[Tensor, int], Tensor]:
    """drop_tokens_'s rotate, in fp32: RoPE's rotations add up, so keys that were rotated by their
    position are rotated by the difference. ALiBi's keys have no position; of MLA's latents only the
    last dims are rotated."""
    if config.alibi:
        return lambda keys, n: keys.clone()
    rank = config.kv_lora_rank

    def rotate(keys: Tensor, n: int) -> Tensor:
        angles = n * rope_frequencies(config, torch.zeros(1, device=keys.device)).double()
        cos, sin = angles.cos().float(), angles.sin().float()
        turned = apply_rope(keys[..., rank:], cos, sin, config.rope_interleaved)
        return torch.cat((keys[..., :rank], turned), dim=-1)

    return rotate
