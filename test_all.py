"""A proof per technique: what is claimed equal is compared, what must fail is made to fail.

    pytest -n 2 test_all.py            no GPU, no network, six to seven minutes on two cores
    pytest -n 2 test_all.py -m slow    the long fault tests
    pytest test_all.py -k cache        one technique (without pytest-xdist leave -n 2 out)

Each test says in its first line what it proves. Programs are run as a user runs them, in processes
of their own. The tests use no model but tiny random ones and the shipped checkpoints.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import gc
import importlib.util
import io
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, dataclass, replace
from dataclasses import field as dataclass_field
from datetime import timedelta
from functools import lru_cache, partial, reduce
from itertools import accumulate, combinations, islice, permutations, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

CUDA = torch.cuda.is_available()
if not CUDA:  # Triton's kernels run on the CPU, in this process, and not in those it starts
    os.environ["TRITON_INTERPRET"] = "1"
import attention as A
import gemm as X
import moe as O
import paged_kv as P
import quantize as Q
import sparse as Z

if A.INTERPRET:
    import triton.experimental.gluon  # noqa: F401, a launch would, when the variable is gone
    from triton.runtime.interpreter import InterpretedFunction
os.environ.pop("TRITON_INTERPRET", None)

import calibrate as C
import compress as W
import cpu
import drafting as D
import expert_parallel as Y
import generate as G
import model as M
import sampling as S
import serving as V
import speculative as E
import tokenizer as K
import train as T

REPO = Path(__file__).resolve().parent
INF = math.inf
torch.set_num_threads(1)  # tiny models: a second thread costs more than it brings
SMALL, DRAFT, MOE = (REPO / "checkpoints" / name for name in ("small", "draft", "moe"))


def tiny(**changes) -> M.ModelConfig:
    base = dict(
        vocab_size=97,
        dim=48,
        n_layers=3,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        ffn_dim=80,
        max_seq_len=128,
        bos_id=1,
        eos_ids=(2,),
    )
    return M.ModelConfig(**base | changes)


def latent(**changes) -> M.ModelConfig:
    """DeepSeek-V3's form: MLA, a dense layer, then experts in groups, one MTP layer."""
    base = dict(
        dim=64,
        n_kv_heads=4,
        head_dim=24,
        family="deepseek_v3",
        rope_interleaved=True,
        kv_lora_rank=24,
        q_lora_rank=20,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        moe_layers=(1, 2),
        n_experts=8,
        n_experts_per_token=3,
        expert_ffn_dim=24,
        n_shared_experts=1,
        scoring="sigmoid",
        correction_bias=True,
        n_groups=4,
        topk_groups=2,
        group_score_topk=2,
        norm_topk=True,
        n_mtp_layers=1,
    )
    return tiny(**base | changes)


def random_model(config: M.ModelConfig, seed: int = 0, std: float = 0.15) -> M.Transformer:
    """Weights large enough that attention is far from uniform: a wrong mask must show."""
    model, rng = M.Transformer(config).eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(1.0 if "norm" in name else 0.0, std, generator=rng)
    return model.requires_grad_(False)


def random_tokens(config: M.ModelConfig, *shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def transformers():
    """The reference of families, tokenizers and templates."""
    return pytest.importorskip("transformers", reason="pip install transformers==5.23.0")


def has_compiler() -> bool:
    return any(shutil.which(c) for c in (os.environ.get("CXX", "g++"), "clang++"))


ENV = os.environ | {"OMP_NUM_THREADS": "1"}


def run(*argv, cwd=REPO, stdin="", env=None, timeout=240, **more) -> subprocess.CompletedProcess:
    """A program of the repo, as a user starts it."""
    return subprocess.run(
        [sys.executable, *map(str, argv)],
        cwd=cwd,
        input=stdin,
        text=True,
        capture_output=True,
        timeout=timeout,
        env=ENV | (env or {}),
        **more,
    )


def refused(done: subprocess.CompletedProcess, *words: str) -> None:
    """Exit code 2 and one line on stderr that holds the words: the file, the field, the mend."""
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1, (
        done.stderr
    )
    for word in words:
        assert word in done.stderr, (word, done.stderr)


# --------------------------------------------------------------------------------------------------
# model.py
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cuts", [[40], [1] * 40, [7, 1, 20, 12], [39, 1]], ids=["whole", "one-by-one", "ragged", "last"]
)
@pytest.mark.parametrize("per_row", [False, True], ids=["positions-T", "positions-BT"])
def test_cache_equals_no_cache_however_the_prompt_is_cut(cuts, per_row):
    """Decoding and chunked prefill through KVCache == the full forward."""
    config = tiny()
    model, tokens = random_model(config), random_tokens(config, 2, 40)
    full = model(tokens)
    cache, start, parts = M.KVCache(config, 2, 64), 0, []
    for n in cuts:
        positions = torch.arange(start, start + n)
        positions = positions.expand(2, n) if per_row else positions
        parts.append(model(tokens[:, start : start + n], positions, cache.attend))
        start += n
        assert cache.length == start
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-5, atol=1e-5)


def test_cache_rows_may_stand_at_different_positions():
    """Two sequences of different length decode in one batch as they do alone."""
    config = tiny()
    model, tokens = random_model(config), random_tokens(config, 2, 30)
    cache = M.KVCache(config, 2, 64)
    model(tokens[:, :20], torch.arange(20), cache.attend)
    positions = torch.tensor(
        [[20], [12]]
    )  # row 1 goes back to position 12: later slots must not be seen
    new = torch.stack([tokens[0, 20:21], tokens[1, 12:13]])
    got = model(new, positions, cache.attend)
    torch.testing.assert_close(got[0, -1], model(tokens[:1, :21])[0, -1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1, -1], model(tokens[1:, :13])[0, -1], rtol=1e-5, atol=1e-5)


def test_truncate_forgets_and_limit_reads_less():
    """After truncate the cache goes on as if the tokens had never been; a limit changes no
    number."""
    config = tiny()
    model, tokens = random_model(config), random_tokens(config, 1, 30)
    cache = M.KVCache(config, 1, 64)
    model(tokens[:, :25], torch.arange(25), cache.attend)
    cache.truncate(10)
    assert cache.length == 10
    rest = model(
        tokens[:, 10:30].flip(1), torch.arange(10, 30), lambda *a: cache.attend(*a, limit=30)
    )
    whole = model(torch.cat([tokens[:, :10], tokens[:, 10:30].flip(1)], 1))
    torch.testing.assert_close(rest, whole[:, 10:], rtol=1e-5, atol=1e-5)
    assert cache.length == 30


def test_cache_allocates_nothing_after_construction():
    """Static shapes: the tensors written to are the ones made first, whatever is decoded."""
    config = tiny()
    model, cache = random_model(config), M.KVCache(config, 1, 32)
    before = [t.data_ptr() for t in (*cache.k, *cache.v, cache.end)]
    for i in range(32):
        model(random_tokens(config, 1, 1, seed=i), torch.tensor([i]), cache.attend)
    assert before == [t.data_ptr() for t in (*cache.k, *cache.v, cache.end)]
    with pytest.raises(IndexError):
        model(random_tokens(config, 1, 1), torch.tensor([32]), cache.attend)


def test_causality():
    """Changing a later token changes no earlier logit, and does change its own."""
    config = tiny()
    model, tokens = random_model(config), random_tokens(config, 1, 20)
    changed = tokens.clone()
    changed[0, 12] = (tokens[0, 12] + 1) % config.vocab_size
    a, b = model(tokens), model(changed)
    assert torch.equal(a[:, :12], b[:, :12])
    assert (a[:, 12:] - b[:, 12:]).abs().amax(-1).min() > 1e-4


def test_gqa_equals_mha_with_repeated_heads():
    """Grouped-query attention is multi-head attention whose key-value heads are copies."""
    config = tiny(n_heads=6, n_kv_heads=2)
    grouped, tokens = random_model(config), random_tokens(config, 2, 17)
    full = random_model(tiny(n_heads=6, n_kv_heads=6))
    state = grouped.state_dict()
    for name in list(state):
        if "k_proj" in name or "v_proj" in name:
            heads = state[name].view(2, config.head_dim, -1)
            state[name] = heads.repeat_interleave(3, 0).reshape(-1, heads.shape[-1])
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(tokens), full(tokens), rtol=1e-5, atol=1e-5)
    assert sum(t.numel() for t in M.KVCache(config, 1, 8).k) * 3 == sum(
        t.numel() for t in M.KVCache(full.config, 1, 8).k
    )


def test_rope_depends_on_distance_alone():
    """Shifting all positions by any offset changes no logit; shifting some does."""
    config = tiny()
    model, tokens = random_model(config), random_tokens(config, 1, 24)
    base, t = model(tokens), torch.arange(24)
    torch.testing.assert_close(model(tokens, t + 57), base, rtol=1e-4, atol=1e-5)
    assert (model(tokens, torch.where(t < 12, t, t + 5)) - base).abs().max() > 1e-3


def test_rope_is_complex_multiplication():
    """apply_rope == multiplying x_i + j x_{i+D/2} by exp(j * position * theta ** (-2i/D))."""
    config = tiny(rope_theta=500.0)
    x, positions = torch.randn(2, 9, 3, 16, dtype=torch.float64), torch.arange(9)
    angle = positions[:, None] * 500.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    z = torch.complex(x[..., :8], x[..., 8:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    got = M.apply_rope(x.float(), *M.rope_cos_sin(config, positions))
    torch.testing.assert_close(got, torch.cat((z.real, z.imag), -1).float(), rtol=1e-5, atol=1e-5)


def test_stages_with_none_ends_equal_the_whole():
    """A pipeline stage is the model with layers dropped and embed, norm or head None."""
    config = tiny()
    whole, tokens = random_model(config), random_tokens(config, 2, 11)
    first, last = random_model(config), random_model(config)
    first.layers, first.norm, first.head = first.layers[:2], None, None
    last.layers, last.embed = last.layers[2:], None
    assert torch.equal(last(first(tokens)), whole(tokens))
    hidden = whole(tokens, return_hidden=True)
    assert hidden.shape == (2, 11, config.dim) and torch.equal(whole.head(hidden), whole(tokens))


def test_attend_hook_sees_new_rotated_tokens():
    """attend(spec, q, k, v, positions) gets this step's tokens in (B, T, H, D), once per layer, in
    order."""
    config, seen = tiny(), []

    def attend(spec, q, k, v, positions):
        seen.append(
            (spec.index, tuple(q.shape), tuple(k.shape), tuple(v.shape), positions.tolist())
        )
        return M.causal_attention(spec, q, k, v, positions)

    model, tokens = random_model(config), random_tokens(config, 2, 5)
    assert torch.equal(model(tokens, torch.arange(5), attend), model(tokens))
    assert seen == [
        (i, (2, 5, 4, 16), (2, 5, 2, 16), (2, 5, 2, 16), [0, 1, 2, 3, 4]) for i in range(3)
    ]


# --------------------------------------------------------------------------------------------------
# model.py: families, against transformers
# --------------------------------------------------------------------------------------------------

SHAPE = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=48,
    eos_token_id=[2, 5],
)
EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, head_dim=16)
LATENT = dict(
    num_key_value_heads=4,
    moe_intermediate_size=24,
    n_routed_experts=8,
    num_experts_per_tok=3,
    kv_lora_rank=24,
    q_lora_rank=20,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    first_k_dense_replace=1,
)


def rope(kind: str, **more) -> dict:
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=1e4, **more))


YARN = dict(factor=4.0, original_max_position_embeddings=16)
LLAMA3 = dict(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
# name: (transformers' config class, what differs from SHAPE)
FAMILIES = {
    "llama": ("Llama", {}),
    "llama-mha": ("Llama", dict(num_key_value_heads=4)),
    "llama-biases-wide-heads": ("Llama", dict(attention_bias=True, mlp_bias=True, head_dim=24)),
    "llama-tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama-linear": ("Llama", rope("linear", factor=2.5)),
    "llama-dynamic": ("Llama", rope("dynamic", factor=2.0)),
    "llama-llama3": ("Llama", rope("llama3", **LLAMA3)),
    "llama-yarn": ("Llama", rope("yarn", **YARN)),
    "llama-yarn-options": (
        "Llama",
        rope("yarn", **YARN, mscale=1.0, mscale_all_dim=0.5, beta_fast=16, truncate=False),
    ),
    "llama-yarn-attention-factor": ("Llama", rope("yarn", **YARN, attention_factor=0.8)),
    "mistral": ("Mistral", dict(sliding_window=9)),
    "mistral-no-window": ("Mistral", dict(sliding_window=None)),
    "qwen2": ("Qwen2", {}),
    "qwen2-windows": (
        "Qwen2",
        dict(use_sliding_window=True, sliding_window=9, max_window_layers=1),
    ),
    "qwen3": ("Qwen3", dict(head_dim=32)),
    "qwen3-windows": (
        "Qwen3",
        dict(
            head_dim=16,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=9,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "mixtral": ("Mixtral", dict(num_local_experts=4)),
    "mixtral-window": ("Mixtral", dict(num_local_experts=4, sliding_window=9)),
    "qwen3-moe": ("Qwen3Moe", EXPERTS),
    "qwen3-moe-normalised-step": (
        "Qwen3Moe",
        EXPERTS | dict(norm_topk_prob=True, decoder_sparse_step=2),
    ),
    "qwen3-moe-dense-layer-window": (
        "Qwen3Moe",
        EXPERTS | dict(mlp_only_layers=[1], use_sliding_window=True, sliding_window=9),
    ),
    "deepseek-v2-lite": (
        "DeepseekV2",
        LATENT
        | dict(q_lora_rank=None, n_shared_experts=2)
        | rope("yarn", **YARN, mscale=0.707, mscale_all_dim=0.707),
    ),
    "deepseek-v2-groups": (
        "DeepseekV2",
        LATENT
        | dict(topk_method="group_limited_greedy", n_group=4, topk_group=2)
        | dict(routed_scaling_factor=16.0, n_shared_experts=1),
    ),
    "deepseek-v3": (
        "DeepseekV3",
        LATENT
        | dict(n_group=4, topk_group=2, attention_bias=True, num_mtp_layers=0)
        | rope("yarn", **YARN, mscale=1.0, mscale_all_dim=0.6),
    ),
    "deepseek-v3-half-rope": (
        "DeepseekV3",
        LATENT
        | dict(n_group=1, topk_group=1, norm_topk_prob=False, rope_interleave=False)
        | dict(q_lora_rank=None, num_mtp_layers=0),
    ),
}


def transformers_model(name: str):
    """A transformers model of the family: fp32, random weights large enough for mistakes to show,
    routing corrections that change choices."""
    kind, changes = FAMILIES[name]
    config = getattr(transformers(), f"{kind}Config")(**SHAPE | changes)
    torch.manual_seed(0)
    theirs = getattr(transformers(), f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, p in theirs.named_parameters():
            p.normal_(1.0 if "norm" in key else 0.0, 0.15)
        for key, buffer in theirs.named_buffers():
            if "correction" in key:
                buffer.normal_(0.0, 0.3)
    return theirs


@pytest.mark.parametrize("name", FAMILIES)
def test_family_equals_transformers(name, tmp_path):
    """Folder in: all logits equal, past the window and the original rope length; 64 greedy tokens
    equal. Folder out, in shards: every tensor bit-equal there and here, the same config."""
    theirs = transformers_model(name)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = M.load_checkpoint(tmp_path / "theirs")
    assert ours.config.eos_ids == (2, 5)
    tokens = torch.randint(3, 97, (2, 100))
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert relative(ours(tokens), expected) <= 1e-4
        prompt = tokens[:1, :40]
        greedy = theirs.generate(
            prompt,
            max_new_tokens=64,
            min_new_tokens=64,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
        assert greedy_tokens(ours, prompt, 64) == greedy[0, 40:].tolist()

    M.save_checkpoint(ours, tmp_path / "ours", max_shard_bytes=50_000)
    assert len(list((tmp_path / "ours").glob("model-*-of-*.safetensors"))) > 3
    back = type(theirs).from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    for key, value in theirs.state_dict().items():
        assert torch.equal(value, back.state_dict()[key]), key
    with torch.no_grad():
        assert torch.equal(back(tokens).logits, expected)
    again = M.load_checkpoint(tmp_path / "ours")
    assert again.config == ours.config
    for key, value in ours.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key


def greedy_tokens(model: M.Transformer, prompt: torch.Tensor, n: int) -> list[int]:
    """The plain cached loop, one token at a time."""
    cache = M.KVCache(model.config, 1, prompt.shape[1] + n)
    logits, new = model(prompt, attend=cache.attend), []
    for position in range(prompt.shape[1], prompt.shape[1] + n):
        new.append(int(logits[0, -1].argmax()))
        logits = model(torch.tensor([new[-1:]]), torch.tensor([position]), cache.attend)
    return new


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3"])
def test_absorbed_equals_expanded_and_caches_the_latent_alone(name, tmp_path):
    """MLA's two forms give equal logits, whole and over a cache cut into chunks; the cache holds
    kv_lora_rank + rope dims per token and layer, nothing else."""
    transformers_model(name).save_pretrained(tmp_path)
    model = M.load_checkpoint(tmp_path)
    tokens = random_tokens(model.config, 2, 60)

    def logits(absorb_up_to: int, cuts: list[int], limited: bool) -> torch.Tensor:
        for module in model.modules():
            if isinstance(module, M.LatentAttention):
                module.absorb_up_to = absorb_up_to
        cache = M.KVCache(model.config, 2, 64)
        assert cache.v == [] and all(k.shape == (2, 1, 64, 24 + 8) for k in cache.k)
        parts, start = [], 0
        for n in cuts:
            attend = partial(cache.attend, limit=start + n) if limited else cache.attend
            positions = torch.arange(start, start + n)
            parts.append(model(tokens[:, start : start + n], positions, attend))
            start += n
        return torch.cat(parts, 1)

    with torch.no_grad():
        whole = model(tokens)
        for absorb_up_to in (0, 1, 7, 1000):
            for cuts in ([60], [25, 7, 1, 1, 20, 6], [1] * 60):
                for limited in (False, True):
                    assert relative(logits(absorb_up_to, cuts, limited), whole) <= 1e-5


def test_attend_hook_of_latent_attention_is_plain_attention():
    """Whichever form MLA calls in, attention over the very q, k, v that are handed over is right:
    one latent head whose value is a view of the key, or all heads."""
    config = latent()
    model, seen = random_model(config), []

    def attend(spec, q, k, v, positions):
        seen.append((spec.latent_dim, tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        if spec.latent_dim is not None:
            assert v.data_ptr() == k.data_ptr() and spec.latent_dim == v.shape[-1]
        k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], 2) for t in (k, v))
        scores = torch.einsum("bthd,bshd->bhts", q, k) * spec.scale
        future = torch.ones(q.shape[1], q.shape[1]).triu(1).bool()
        return torch.einsum("bhts,bshd->bthd", scores.masked_fill(future, -1e30).softmax(-1), v)

    for n, form in ((1, (24, (2, 1, 4, 32), (2, 1, 1, 32), (2, 1, 1, 24))),
                    (9, (None, (2, 9, 4, 24), (2, 9, 4, 24), (2, 9, 4, 12)))):  # fmt: skip
        tokens = random_tokens(config, 2, n)
        assert relative(model(tokens, attend=attend), model(tokens)) < 1e-5
        assert seen[-1] == form


def test_multi_token_prediction_equals_transformers(tmp_path):
    """The MTP layer is loaded, ignored by plain generation, and as a module gives the hidden states
    of transformers' own MTP model; two depths chain."""
    transformers()
    from transformers.modeling_layers import MtpModel

    ours = random_model(latent(n_mtp_layers=2))
    M.save_checkpoint(ours, tmp_path)
    assert M.load_checkpoint(tmp_path).config == ours.config
    main = transformers().AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3.*", r"model\.layers\.4.*"]
    mtp = MtpModel.from_pretrained(main).eval()  # by those keys: it knows the 61-layer model alone
    tokens = random_tokens(ours.config, 1, 30)
    with torch.no_grad():
        hidden = ours(tokens, return_hidden=True)
        assert relative(ours.head(hidden), main(tokens).logits) <= 1e-4
        theirs = main.model(tokens).last_hidden_state
        ours_k, theirs_k = hidden[:, :-1], theirs[:, :-1]
        for depth in range(2):
            ours_k = ours.predict_further(ours_k, tokens[:, 1:], depth=depth)
            theirs_k = mtp_layer(mtp, depth, theirs_k, tokens[:, 1:])
            assert relative(ours_k, theirs_k) <= 1e-4


def mtp_layer(mtp, depth: int, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """One layer of transformers' MTP model, without its cache."""
    embedded, positions = mtp.embed_tokens(tokens), torch.arange(tokens.shape[1])[None]
    mask = torch.full((1, 1, len(positions[0]), len(positions[0])), -1e30).triu(1)
    return mtp.layers[depth](
        inputs_embeds=embedded,
        previous_hidden_state=hidden,
        position_embeddings=mtp.rotary_emb(embedded, positions),
        attention_mask=mask,
        position_ids=positions,
        past_key_values=None,
    )


def test_mtp_over_a_cache_equals_without_and_leaves_its_length():
    """A draft step over the cache writes slots of its own: same hidden states, length as it was."""
    model, tokens = random_model(latent()), random_tokens(latent(), 1, 12)
    cache = M.KVCache(model.config, 1, 16)
    hidden = model(tokens, attend=cache.attend, return_hidden=True)[:, :-1]
    expected = model.predict_further(hidden, tokens[:, 1:])
    got = [model.predict_further(hidden[:, :7], tokens[:, 1:8], torch.arange(7), cache.attend)]
    for i in range(7, 11):
        step = (hidden[:, i : i + 1], tokens[:, i + 1 : i + 2], torch.tensor([i]), cache.attend)
        got.append(model.predict_further(*step))
    assert relative(torch.cat(got, 1), expected) < 1e-5 and cache.length == 12


def test_routing_is_fp32_under_autocast():
    """Mixed-precision training chooses and weighs experts as fp32 does."""
    moe = random_model(latent()).layers[1].mlp
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    weights, ids = moe.route(x)
    with torch.autocast("cpu", torch.bfloat16):
        again, same = moe.route(x)
    assert again.dtype == torch.float32 and torch.equal(weights, again) and torch.equal(ids, same)


def test_transformers_drops_the_mtp_layer_and_the_folder_still_loads(tmp_path):
    """A DeepSeek-V3 folder rewritten without its MTP tensors loads as what it still holds."""
    model = random_model(latent())
    M.save_checkpoint(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {k: v for k, v in tensors.items() if not k.startswith("model.layers.3.")}
    assert len(kept) < len(tensors)
    save_file(kept, tmp_path / "model.safetensors")
    loaded, tokens = M.load_checkpoint(tmp_path), random_tokens(model.config, 1, 9)
    assert loaded.config.n_mtp_layers == 0 and torch.equal(loaded(tokens), model(tokens))


@pytest.mark.parametrize("kind", ["Glm", "Phi3"])
def test_partial_rotary_in_both_layouts_equals_transformers(kind):
    """Half of each head rotated: interleaved pairs (GLM), and the half layout (Phi-3)."""
    config = getattr(transformers(), f"{kind}Config")(
        **SHAPE | dict(pad_token_id=0),
        partial_rotary_factor=0.5,
        **{"Glm": dict(head_dim=16, attention_bias=True)}.get(kind, {}),
    )
    torch.manual_seed(0)
    theirs = getattr(transformers(), f"{kind}ForCausalLM")(config).eval()
    glm = kind == "Glm"
    ours = M.Transformer(
        tiny(dim=64, ffn_dim=80, rotary_dim=8, rope_interleaved=glm, qkv_bias=glm,
             norm_eps=config.rms_norm_eps, rope_theta=config.rope_parameters["rope_theta"])
    )  # fmt: skip
    state = {}
    for key, value in theirs.state_dict().items():
        if "qkv_proj" in key:
            for part, rows in zip("qkv", value.split((64, 32, 32))):
                state[key.replace("qkv_proj", f"{part}_proj")] = rows
        elif "gate_up_proj" in key:
            for part, rows in zip(("gate", "up"), value.chunk(2)):
                state[key.replace("gate_up_proj", f"{part}_proj")] = rows
        else:
            state[key] = value
    with torch.no_grad():
        for key, target in M.hf_tensors(ours).items():
            target.copy_(state[key])
        tokens = torch.randint(3, 97, (2, 70))
        assert relative(ours(tokens), theirs(tokens).logits) <= 1e-4


@pytest.mark.parametrize("heads", [4, 6])
def test_alibi_equals_transformers_with_its_bias_as_a_mask(heads):
    """ALiBi == transformers' Llama with every position 0 (so nothing rotates) and the bias of
    BLOOM's own formula as an additive mask; cached decode equals the whole forward."""
    transformers()
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    ours = random_model(
        tiny(dim=96, n_heads=heads, n_kv_heads=2, alibi=True, norm_eps=1e-6, family="sheaf")
    )
    theirs = (
        transformers()
        .LlamaForCausalLM(
            transformers().LlamaConfig(
                **SHAPE | dict(hidden_size=96, num_attention_heads=heads, head_dim=16)
            )
        )
        .eval()
    )
    with torch.no_grad():
        names = {k: v for k, v in M.hf_tensors(ours).items()}
        theirs.load_state_dict(names)
        tokens = random_tokens(ours.config, 2, 50)
        bias = build_alibi_tensor(torch.ones(1, 50), heads, torch.float32).view(1, heads, 1, 50)
        mask = torch.full((50, 50), -1e30).triu(1) + bias  # softmax ignores slope * i
        expected = theirs(
            tokens,
            attention_mask=mask.expand(2, -1, -1, -1),
            position_ids=torch.zeros(2, 50).long(),
        ).logits
        assert relative(ours(tokens), expected) <= 1e-4
        cache = M.KVCache(ours.config, 2, 50)
        parts = [ours(tokens[:, :30], attend=cache.attend)]
        for i in range(30, 50):
            parts.append(ours(tokens[:, i : i + 1], torch.tensor([i]), cache.attend))
        assert relative(torch.cat(parts, 1), expected) <= 1e-4


def test_what_no_family_can_say_goes_as_sheaf(tmp_path):
    """A Llama config.json has no word for ALiBi: it is refused, not dropped; family "sheaf" keeps
    every field."""
    model = random_model(tiny(alibi=True, windows=(None, 4, 8)))
    with pytest.raises(ValueError, match="alibi.*sheaf"):
        M.save_checkpoint(model, tmp_path)
    changed = random_model(
        replace(model.config, family="sheaf", rope_scaling={"rope_type": "linear", "factor": 2.0})
    )
    M.save_checkpoint(changed, tmp_path)
    assert M.load_checkpoint(tmp_path).config == changed.config
    hf = changed.config.to_hf()
    for field, value in (("dim", "48"), ("alibi", 1), ("rotary_dim", 2.0), ("vocab_size", None)):
        with pytest.raises(ValueError, match=field):
            M.ModelConfig.from_hf(hf | {"config": hf["config"] | {field: value}})
    with pytest.raises(ValueError, match="vocab_size must be int, not None"):
        M.ModelConfig.from_hf(hf | {"config": {"dim": 48, "n_layers": 3, "n_heads": 4}})


# Config.json files as published, and the number of parameters their models are published with.
PUBLISHED_BY_ALL = dict(
    attention_dropout=0.0,
    hidden_act="silu",
    initializer_range=0.02,
    torch_dtype="bfloat16",
    transformers_version="4.43.0",
    use_cache=True,
)
DEEPSEEK = dict(
    PUBLISHED_BY_ALL,
    attention_bias=False,
    auto_map={"AutoConfig": "x"},
    aux_loss_alpha=0.001,
    bos_token_id=100000,
    eos_token_id=100001,
    ep_size=1,
    kv_lora_rank=512,
    moe_layer_freq=1,
    pretraining_tp=1,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    rms_norm_eps=1e-6,
    rope_theta=10000,
    seq_aux=True,
    tie_word_embeddings=False,
    v_head_dim=128,
)
LLAMA3_SCALING = dict(
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
    rope_type="llama3",
)
LLAMA_3 = dict(
    PUBLISHED_BY_ALL,
    architectures=["LlamaForCausalLM"],
    attention_bias=False,
    bos_token_id=128000,
    max_position_embeddings=131072,
    mlp_bias=False,
    model_type="llama",
    num_attention_heads=32,
    num_key_value_heads=8,
    pretraining_tp=1,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    tie_word_embeddings=False,
    vocab_size=128256,
)
PUBLISHED = {
    "llama-1-7b": (
        dict(
            architectures=["LLaMAForCausalLM"],
            bos_token_id=0,
            eos_token_id=1,
            hidden_act="silu",
            hidden_size=4096,
            intermediate_size=11008,
            initializer_range=0.02,
            max_sequence_length=2048,
            model_type="llama",
            num_attention_heads=32,
            num_hidden_layers=32,
            pad_token_id=-1,
            rms_norm_eps=1e-6,
            torch_dtype="float16",
            transformers_version="4.27.0.dev0",
            use_cache=True,
            vocab_size=32000,
        ),
        6738415616,
    ),
    "llama-3.1-8b": (
        LLAMA_3
        | dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32)
        | dict(eos_token_id=[128001, 128008, 128009], rope_scaling=LLAMA3_SCALING),
        8030261248,
    ),
    "llama-3.2-1b": (
        LLAMA_3
        | dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64)
        | dict(eos_token_id=128001, tie_word_embeddings=True)
        | dict(rope_scaling=LLAMA3_SCALING | dict(factor=32.0)),
        1235814400,
    ),
    "mistral-7b-v0.1": (
        dict(
            architectures=["MistralForCausalLM"],
            bos_token_id=1,
            eos_token_id=2,
            hidden_act="silu",
            hidden_size=4096,
            initializer_range=0.02,
            intermediate_size=14336,
            max_position_embeddings=32768,
            model_type="mistral",
            num_attention_heads=32,
            num_hidden_layers=32,
            num_key_value_heads=8,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            sliding_window=4096,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
            transformers_version="4.34.0.dev0",
            use_cache=True,
            vocab_size=32000,
        ),
        7241732096,
    ),
    "qwen2.5-7b": (
        dict(
            PUBLISHED_BY_ALL,
            architectures=["Qwen2ForCausalLM"],
            bos_token_id=151643,
            eos_token_id=151645,
            hidden_size=3584,
            intermediate_size=18944,
            max_position_embeddings=32768,
            max_window_layers=28,
            model_type="qwen2",
            num_attention_heads=28,
            num_hidden_layers=28,
            num_key_value_heads=4,
            rms_norm_eps=1e-6,
            rope_theta=1000000.0,
            sliding_window=131072,
            tie_word_embeddings=False,
            use_sliding_window=False,
            vocab_size=152064,
        ),
        7615616512,
    ),
    "qwen3-8b": (
        dict(
            PUBLISHED_BY_ALL,
            architectures=["Qwen3ForCausalLM"],
            attention_bias=False,
            bos_token_id=151643,
            eos_token_id=151645,
            head_dim=128,
            hidden_size=4096,
            intermediate_size=12288,
            max_position_embeddings=40960,
            max_window_layers=36,
            model_type="qwen3",
            num_attention_heads=32,
            num_hidden_layers=36,
            num_key_value_heads=8,
            rms_norm_eps=1e-6,
            rope_scaling=None,
            rope_theta=1000000,
            sliding_window=None,
            tie_word_embeddings=False,
            use_sliding_window=False,
            vocab_size=151936,
        ),
        8190735360,
    ),
    "mixtral-8x7b": (
        dict(
            PUBLISHED_BY_ALL,
            architectures=["MixtralForCausalLM"],
            bos_token_id=1,
            eos_token_id=2,
            hidden_size=4096,
            intermediate_size=14336,
            max_position_embeddings=32768,
            model_type="mixtral",
            num_attention_heads=32,
            num_experts_per_tok=2,
            num_hidden_layers=32,
            num_key_value_heads=8,
            num_local_experts=8,
            output_router_logits=False,
            rms_norm_eps=1e-5,
            rope_theta=1000000.0,
            router_aux_loss_coef=0.02,
            sliding_window=None,
            tie_word_embeddings=False,
            vocab_size=32000,
        ),
        46702792704,
    ),
    "qwen3-30b-a3b": (
        dict(
            PUBLISHED_BY_ALL,
            architectures=["Qwen3MoeForCausalLM"],
            attention_bias=False,
            bos_token_id=151643,
            decoder_sparse_step=1,
            eos_token_id=151645,
            head_dim=128,
            hidden_size=2048,
            intermediate_size=6144,
            max_position_embeddings=40960,
            max_window_layers=48,
            mlp_only_layers=[],
            model_type="qwen3_moe",
            moe_intermediate_size=768,
            norm_topk_prob=True,
            num_attention_heads=32,
            num_experts=128,
            num_experts_per_tok=8,
            num_hidden_layers=48,
            num_key_value_heads=4,
            output_router_logits=False,
            rms_norm_eps=1e-6,
            rope_scaling=None,
            rope_theta=1000000.0,
            router_aux_loss_coef=0.001,
            sliding_window=None,
            tie_word_embeddings=False,
            use_sliding_window=False,
            vocab_size=151936,
        ),
        30532122624,
    ),
    "deepseek-v2-lite": (
        dict(
            DEEPSEEK,
            architectures=["DeepseekV2ForCausalLM"],
            first_k_dense_replace=1,
            hidden_size=2048,
            intermediate_size=10944,
            max_position_embeddings=163840,
            model_type="deepseek_v2",
            moe_intermediate_size=1408,
            n_group=1,
            n_routed_experts=64,
            n_shared_experts=2,
            norm_topk_prob=False,
            num_attention_heads=16,
            num_experts_per_tok=6,
            num_hidden_layers=27,
            num_key_value_heads=16,
            q_lora_rank=None,
            rope_scaling=dict(
                beta_fast=32,
                beta_slow=1,
                factor=40,
                mscale=0.707,
                mscale_all_dim=0.707,
                original_max_position_embeddings=4096,
                type="yarn",
            ),
            routed_scaling_factor=1.0,
            scoring_func="softmax",
            topk_group=1,
            topk_method="greedy",
            vocab_size=102400,
        ),
        15706484224,
    ),
    "deepseek-v2": (
        dict(
            DEEPSEEK,
            architectures=["DeepseekV2ForCausalLM"],
            first_k_dense_replace=1,
            hidden_size=5120,
            intermediate_size=12288,
            max_position_embeddings=163840,
            model_type="deepseek_v2",
            moe_intermediate_size=1536,
            n_group=8,
            n_routed_experts=160,
            n_shared_experts=2,
            norm_topk_prob=False,
            num_attention_heads=128,
            num_experts_per_tok=6,
            num_hidden_layers=60,
            num_key_value_heads=128,
            q_lora_rank=1536,
            rope_scaling=dict(
                beta_fast=32,
                beta_slow=1,
                factor=40,
                mscale=0.707,
                mscale_all_dim=0.707,
                original_max_position_embeddings=4096,
                type="yarn",
            ),
            routed_scaling_factor=16.0,
            scoring_func="softmax",
            topk_group=3,
            topk_method="group_limited_greedy",
            vocab_size=102400,
        ),
        235741434880,
    ),
    "deepseek-v3": (
        dict(
            DEEPSEEK,
            architectures=["DeepseekV3ForCausalLM"],
            bos_token_id=0,
            eos_token_id=1,
            first_k_dense_replace=3,
            hidden_size=7168,
            intermediate_size=18432,
            max_position_embeddings=163840,
            model_type="deepseek_v3",
            moe_intermediate_size=2048,
            n_group=8,
            n_routed_experts=256,
            n_shared_experts=1,
            norm_topk_prob=True,
            num_attention_heads=128,
            num_experts_per_tok=8,
            num_hidden_layers=61,
            num_key_value_heads=128,
            num_nextn_predict_layers=1,
            q_lora_rank=1536,
            quantization_config=dict(
                activation_scheme="dynamic",
                fmt="e4m3",
                quant_method="fp8",
                weight_block_size=[128, 128],
            ),
            rope_scaling=dict(
                beta_fast=32,
                beta_slow=1,
                factor=40,
                mscale=1.0,
                mscale_all_dim=1.0,
                original_max_position_embeddings=4096,
                type="yarn",
            ),
            routed_scaling_factor=2.5,
            scoring_func="sigmoid",
            topk_group=4,
            topk_method="noaux_tc",
            vocab_size=129280,
        ),
        671026419200,
    ),
}


# What fine-tunes, exporters and older libraries add to such files, and changes nothing.
HARMLESS = {
    "llama-3.1-8b": dict(unsloth_version="2024.9", pad_token_id=128004, sliding_window=None),
    "llama-3.2-1b": {"rope_interleaved": False, "transformers.js_config": {}, "temperature": 0.6},
    "mistral-7b-v0.1": dict(attention_bias=False, max_length=20, do_sample=False, pruned_heads={}),
    "qwen2.5-7b": dict(use_mrope=False, layer_types=["full_attention"] * 28),
    "qwen3-30b-a3b": dict(use_qk_norm=True, qkv_bias=False, shared_expert_intermediate_size=0),
    "deepseek-v3": dict(
        quantization_config=dict(
            quant_method="fp8", weight_block_size=[128, 128], scale_fmt="ue8m0", dequantize=False
        )
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_additions_change_nothing(name):
    """The same model as from the plain file."""
    hf, _ = PUBLISHED[name]
    assert M.ModelConfig.from_hf(hf | HARMLESS[name]) == M.ModelConfig.from_hf(hf)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_have_the_published_size(name):
    """The real config.json of each family is read, and makes a model of exactly the published
    number of parameters (of DeepSeek-V3, without its MTP layer)."""
    hf, expected = PUBLISHED[name]
    config = M.ModelConfig.from_hf(hf)
    with torch.device("meta"):
        model = M.Transformer(config)
    tensors = M.hf_tensors(model)
    mtp = f"model.layers.{config.n_layers}."
    assert sum(t.numel() for n, t in tensors.items() if not n.startswith(mtp)) == expected
    assert any(n.startswith(mtp) for n in tensors) == (name == "deepseek-v3")
    assert M.ModelConfig.from_hf(config.to_hf()) == config


CONFIG_CHANGES = {
    "hidden_act": "gelu",
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "sliding_window": 4096,
    "layer_types": ["full_attention"] * 3,
    "residual_multiplier": 0.5,
    "num_local_experts": 8,
    "quantization_config": {"quant_method": "gptq", "bits": 4},
    "rope_scaling": {"rope_type": "su", "factor": 2.0},
    "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "short_mscale": 1.0},
    "low_freq_factor": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0}
    | {"high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "partial_rotary_factor": 0.5,
    "vocab_size": 10**30,
    "use_mrope": True,
    "activation_scheme": {"quant_method": "fp8", "weight_block_size": [128, 128]}
    | {"activation_scheme": "static"},
    "max_position_embeddings": 4096.0,
    "rope_theta": "10000",
    "eos_token_id": [1, None],
    "model_type": ["llama"],
}


@pytest.mark.parametrize("field", CONFIG_CHANGES)
def test_no_field_of_config_json_is_ignored_silently(field, tmp_path):
    """Every field is used, listed as harmless, or refused by name."""
    key = {"low_freq_factor": "rope_scaling", "activation_scheme": "quantization_config"}
    hf = tiny().to_hf() | {key.get(field, field): CONFIG_CHANGES[field]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(hf))
    with pytest.raises(ValueError) as e:
        M.read_config(path)
    assert str(path) in str(e.value) and field in str(e.value), e.value


@pytest.mark.parametrize(
    "family, field, value",
    [
        ("DeepseekV2", "topk_method", "noaux_tc"),
        ("DeepseekV2", "scoring_func", "sigmoid"),
        ("DeepseekV2", "norm_topk_prob", True),
        ("DeepseekV2", "moe_layer_freq", 2),
        ("DeepseekV2", "num_key_value_heads", 2),
        ("DeepseekV3", "scoring_func", "softmax"),
        ("DeepseekV3", "topk_method", "greedy"),
        ("DeepseekV3", "num_experts_per_tok", 9),
        ("DeepseekV3", "n_group", 3),
        ("DeepseekV3", "qk_rope_head_dim", 9),
        ("Mixtral", "router_jitter_noise", 0.1),
        ("Mixtral", "num_local_experts", 0),
        ("Qwen2", "layer_types", ["sliding_attention"] * 3),
        ("Qwen3", "layer_types", ["chunked_attention"] * 3),
        ("Qwen3", "use_sliding_window", "yes"),
        ("Qwen3Moe", "decoder_sparse_step", 0),
        ("Mistral", "sliding_window", 0),
        ("Mistral", "layer_types", ["sliding_attention"] * 3),
    ],
)
def test_family_fields_are_strict(family, field, value):
    """A value that a family's code here does not have is refused, and the field named."""
    changes = next(c for k, c in FAMILIES.values() if k == family)
    hf = getattr(transformers(), f"{family}Config")(**SHAPE | changes).to_dict()
    assert M.ModelConfig.from_hf(hf).to_hf()
    with pytest.raises(ValueError, match=field.replace("sliding_window", "sliding.window")):
        M.ModelConfig.from_hf(hf | {field: value})


def test_fp8_weights_are_dequantized_by_their_block_scales(tmp_path):
    """DeepSeek's float8_e4m3fn weights with 128 x 128 block scales == weight * scale, on every
    block, ragged edges too, and for experts; a missing or misshapen scale is refused."""
    config = latent(dim=192, expert_ffn_dim=136, n_mtp_layers=0)
    model = random_model(config).to(torch.bfloat16)
    M.save_checkpoint(model, tmp_path)
    path, rng = tmp_path / "model.safetensors", torch.Generator().manual_seed(0)
    stored, expected = load_file(path), {}
    for name, w in list(stored.items()):
        if "_proj" not in name or min(w.shape) < 100:
            continue
        rows, columns = (-(-n // 128) for n in w.shape)
        scale = torch.rand(rows, columns, generator=rng) + 0.5
        stored[name] = (w.float() / 2).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        expected[name] = stored[name].float() * wide[: w.shape[0], : w.shape[1]]
    assert len(expected) > 20
    save_file(stored, path)
    hf = json.loads((tmp_path / "config.json").read_text())
    fp8 = dict(quant_method="fp8", fmt="e4m3", weight_block_size=[128, 128])
    fp8 |= dict(activation_scheme="dynamic")
    (tmp_path / "config.json").write_text(json.dumps(hf | {"quantization_config": fp8}))
    for dtype in (torch.float32, None):
        tensors = M.hf_tensors(M.load_checkpoint(tmp_path, dtype=dtype))
        for name, value in expected.items():
            assert torch.equal(tensors[name], value.to(dtype or torch.bfloat16)), name

    name = next(iter(expected))
    for spoilt in (
        {k: v for k, v in stored.items() if k != f"{name}_scale_inv"},
        stored | {f"{name}_scale_inv": torch.ones(1, 1)},
    ):
        save_file(spoilt, path)
        with pytest.raises(ValueError, match=f"{name}_scale_inv"):
            M.load_checkpoint(tmp_path)


def test_loading_needs_the_model_and_its_largest_tensor(tmp_path):
    """Peak memory of loading a 0.5 GB checkpoint, in a process of its own, over what it used
    before: at most the model + its largest tensor + 5%."""
    config = tiny(
        vocab_size=16000, dim=1024, n_layers=6, n_heads=8, n_kv_heads=8, head_dim=128,
        ffn_dim=2048, moe_layers=(0, 2, 3, 4, 5), n_experts=6, n_experts_per_token=2,
        expert_ffn_dim=2048, family="qwen3_moe", qk_norm=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = M.Transformer(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    for p in model.parameters():
        p.data.fill_(0.25)
    size = sum(p.nbytes for p in model.parameters())
    largest = max(t.nbytes for t in M.hf_tensors(model).values())
    assert size >= 500e6 and largest < 0.08 * size
    M.save_checkpoint(model, tmp_path, max_shard_bytes=200_000_000)
    program = f"""
import re
from pathlib import Path
import torch
from model import load_checkpoint
status = lambda key: int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
torch.ones(256, 256) @ torch.ones(256, 256)
before = status("VmRSS")
model = load_checkpoint({str(tmp_path)!r})
print((status("VmHWM") - before) * 1024)
"""
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory is read from /proc, which this system does not have")
    done = run("-c", program)
    assert done.returncode == 0, done.stderr
    assert size <= int(done.stdout) <= 1.05 * size + largest


def test_two_spellings_of_rope_agree_or_are_refused():
    """rope_scaling beside rope_parameters: an empty one is none, equal ones are one, others are a
    question that the file must settle."""
    hf, linear = tiny().to_hf(), {"rope_type": "linear", "factor": 2.0}
    expected = M.ModelConfig.from_hf(hf | {"rope_scaling": linear}).rope_scaling
    for parameters in ({}, None, linear):
        both = hf | {"rope_scaling": linear, "rope_parameters": parameters}
        assert M.ModelConfig.from_hf(both).rope_scaling == expected == linear
    with pytest.raises(ValueError, match="rope_parameters and rope_scaling"):
        M.ModelConfig.from_hf(both | {"rope_parameters": linear | {"factor": 4.0}})


SHARD_FAULTS = {
    "swapped": ["mixed up"],
    "index lists what is not there": ["mixed up", "surprise"],
    "tensor in two shards": ["mixed up"],
    "shard missing": ["not there"],
    "int8 weights": ["I8", "known"],
    "untied copy": ["lm_head.weight differs", "tie_word_embeddings"],
}


@pytest.mark.parametrize("how", SHARD_FAULTS)
def test_mixed_up_shards_are_refused(how, tmp_path):
    """One line that names the file and the mend; never a model of the wrong weights."""
    model = random_model(tiny(tie_embeddings=how == "untied copy"))
    M.save_checkpoint(model, tmp_path, max_shard_bytes=60_000)
    a, b, *_ = files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 2
    index = tmp_path / "model.safetensors.index.json"
    about = json.loads(index.read_text())
    if how == "swapped":
        a.rename(tmp_path / "x"), b.rename(a), (tmp_path / "x").rename(b)
    elif how == "index lists what is not there":
        about["weight_map"]["surprise"] = a.name
    elif how == "tensor in two shards":
        name = next(n for n, f in about["weight_map"].items() if f == a.name)
        save_file(load_file(b) | {name: load_file(a)[name]}, b)
        about["weight_map"][name] = b.name
        save_file(load_file(a), a)
    elif how == "shard missing":
        b.unlink()
    elif how == "int8 weights":
        name = next(n for n, f in about["weight_map"].items() if f == a.name)
        save_file(load_file(a) | {name: load_file(a)[name].to(torch.int8)}, a)
    else:
        head = {"lm_head.weight": model.head.weight + 1}
        save_file(load_file(a) | head, a)
        about["weight_map"]["lm_head.weight"] = a.name
    index.write_text(json.dumps(about))
    with pytest.raises(ValueError) as e:
        M.load_checkpoint(tmp_path)
    for word in (str(tmp_path), *SHARD_FAULTS[how]):
        assert word in str(e.value), e.value


def test_a_save_cut_anywhere_is_old_or_new_or_refused(tmp_path):
    """A model with another rope_theta saved over one of the same shapes, and cut at each write and
    each removal: the folder is the old checkpoint, the new one, or refused; never a mixture.
    Somebody else's files stay."""
    old, new = random_model(tiny(), 0), random_model(tiny(rope_theta=77.0), 1)
    tokens = random_tokens(tiny(), 1, 9)
    seen, cut = set(), 0
    while "whole" not in seen:
        folder = tmp_path / str(cut)
        M.save_checkpoint(old, folder, 60_000 if cut % 2 else 10**9)
        (folder / "model_ema.safetensors").write_text("mine")
        steps = 0

        def counted(f):
            def run(*args, **kwargs):
                nonlocal steps
                steps += 1
                if steps > cut // 2:
                    raise InterruptedError
                return f(*args, **kwargs)

            return run

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(M, "write_atomically", counted(M.write_atomically))
            patch.setattr(Path, "unlink", counted(Path.unlink))
            try:
                M.save_checkpoint(new, folder, 60_000)
                seen.add("whole")
            except InterruptedError:
                pass
        try:
            logits = M.load_checkpoint(folder)(tokens)
            assert torch.equal(logits, old(tokens)) or torch.equal(logits, new(tokens))
            seen.add("old" if torch.equal(logits, old(tokens)) else "new")
        except ValueError:
            seen.add("refused")
        assert (folder / "model_ema.safetensors").read_text() == "mine"
        cut += 1
    assert seen == {"whole", "old", "new", "refused"} and cut > 10


def test_saving_over_a_checkpoint_leaves_no_stale_shard(tmp_path):
    """Sharded over single, sharded over sharded and single over sharded: what loads is the last
    one, and no file of the others is left. A save that dies before its index leaves the old one."""
    models = [random_model(tiny(), seed) for seed in range(4)]
    tokens = random_tokens(tiny(), 1, 9)
    for model, limit in zip(models, (10**9, 60_000, 60_000, 10**9)):
        M.save_checkpoint(model, tmp_path, limit)
        assert torch.equal(M.load_checkpoint(tmp_path)(tokens), model(tokens))
        if limit > 10**6:
            assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    M.save_checkpoint(models[0], tmp_path, 60_000)
    with pytest.MonkeyPatch.context() as patch:
        real = M.write_atomically

        def dying(path, write):
            if path.name.endswith("index.json"):
                raise OSError("disk full")
            real(path, write)

        patch.setattr(M, "write_atomically", dying)
        with pytest.raises(OSError):
            M.save_checkpoint(models[1], tmp_path, 60_000)
    assert torch.equal(M.load_checkpoint(tmp_path)(tokens), models[0](tokens))
    M.save_checkpoint(models[2], tmp_path, 60_000)
    assert torch.equal(M.load_checkpoint(tmp_path)(tokens), models[2](tokens))


def test_sharded_folder_and_stored_dtype(tmp_path):
    """Several files with an index load as one; the dtype is the stored one unless asked
    otherwise."""
    model = random_model(tiny()).to(torch.bfloat16)
    M.save_checkpoint(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in parts.items():
        save_file({k: tensors[k] for k in keys}, tmp_path / file)
    index = {"weight_map": {k: file for file, keys in parts.items() for k in keys}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for dtype, expected in ((None, torch.bfloat16), (torch.float32, torch.float32)):
        loaded = M.load_checkpoint(tmp_path, dtype=dtype)
        assert all(
            p.dtype == expected and torch.equal(p, q.to(expected))
            for p, q in zip(loaded.parameters(), model.parameters())
        )


def test_loaded_weights_are_not_views_of_the_file(tmp_path):
    """Overwriting the file in place changes no weight of a model already loaded."""
    model = random_model(tiny())
    M.save_checkpoint(model, tmp_path)
    loaded, path = M.load_checkpoint(tmp_path), tmp_path / "model.safetensors"
    with open(path, "r+b") as f:
        f.write(b"\0" * path.stat().st_size)
    assert all(torch.equal(p, q) for p, q in zip(loaded.parameters(), model.parameters()))


def spoil(folder: Path, how: str) -> None:
    config, weights = folder / "config.json", folder / "model.safetensors"
    hf, tensors = json.loads(config.read_text()), load_file(weights)
    index = folder / "model.safetensors.index.json"
    q = "model.layers.1.self_attn.q_proj.weight"
    match how:
        case "no folder":
            shutil.rmtree(folder)
        case "no config":
            config.unlink()
        case "half a config":
            config.write_text(config.read_text()[:60])
        case "no weights":
            weights.unlink()
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "cut in the header":
            weights.write_bytes(weights.read_bytes()[:30])
        case "empty weights":
            weights.write_bytes(b"")
        case "missing tensor":
            save_file({k: v for k, v in tensors.items() if k != q}, weights)
        case "unexpected tensor":
            save_file(tensors | {"model.layers.0.surprise": torch.ones(2)}, weights)
        case "wrong shape":
            save_file(tensors | {q: torch.ones(3, 5)}, weights)
        case "wrong type":
            config.write_text(json.dumps(hf | {"hidden_size": "48"}))
        case "bool for int":
            config.write_text(json.dumps(hf | {"num_hidden_layers": True}))
        case "missing field":
            config.write_text(json.dumps({k: v for k, v in hf.items() if k != "vocab_size"}))
        case "heads do not divide":
            config.write_text(json.dumps(hf | {"num_key_value_heads": 3}))
        case "unknown type":
            config.write_text(json.dumps(hf | {"model_type": "mamba"}))
        case "unknown field":
            config.write_text(json.dumps(hf | {"sliding_window": 4096}))
        case "unknown rope":
            config.write_text(
                json.dumps(hf | {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}})
            )
        case "bad eos":
            config.write_text(json.dumps(hf | {"eos_token_id": "</s>"}))
        case "not an object":
            config.write_text("[1, 2]")
        case "index outside":
            weights.rename(folder.parent / "secret.safetensors")
            index.write_text(json.dumps({"weight_map": {q: "../secret.safetensors"}}))
        case "index absolute":
            weights.rename(folder / "x.safetensors")
            index.write_text(json.dumps({"weight_map": {q: str(folder / "x.safetensors")}}))
        case "index names nothing":
            weights.unlink()
            index.write_text(json.dumps({"weight_map": {q: "gone.safetensors"}}))
        case "index broken":
            weights.unlink()
            index.write_text('{"weight_map": ')


BAD_FOLDERS = {
    "no folder": ["ckpt", "folder"],
    "no config": ["config.json"],
    "half a config": ["config.json", "JSON"],
    "no weights": ["model.safetensors"],
    "truncated": ["model.safetensors", "truncated"],
    "cut in the header": ["model.safetensors", "truncated"],
    "empty weights": ["model.safetensors"],
    "missing tensor": ["missing", "model.layers.1.self_attn.q_proj.weight"],
    "unexpected tensor": ["unexpected", "model.layers.0.surprise"],
    "wrong shape": ["q_proj", "[3, 5]"],
    "wrong type": ["config.json", "hidden_size", "int"],
    "bool for int": ["num_hidden_layers", "int"],
    "missing field": ["config.json", "vocab_size"],
    "heads do not divide": ["num_key_value_heads"],
    "unknown type": ["model_type", "mamba", "llama"],
    "unknown field": ["sliding_window"],
    "unknown rope": ["rope_type", "longrope"],
    "bad eos": ["eos_token_id"],
    "not an object": ["config.json"],
    "index outside": ["index.json", "../secret.safetensors"],
    "index absolute": ["index.json", "outside"],
    "index names nothing": ["gone.safetensors"],
    "index broken": ["index.json"],
}


@pytest.mark.parametrize("how", BAD_FOLDERS)
def test_bad_checkpoint_folders_are_refused(how, tmp_path, capsys):
    """One line that names the file and the field, exit code 2, through the program itself."""
    folder = tmp_path / "ckpt"
    M.save_checkpoint(random_model(tiny()), folder)
    spoil(folder, how)
    assert G.main(["hi", "--checkpoint", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(tmp_path) in error, error
    assert all(word in error for word in BAD_FOLDERS[how]), error


SAVE_AND_DIE = """
import os, sys, torch, model as M
config = M.ModelConfig(97, 48, 3, 4, 2, 16, 80)
def save(value, folder):
    m = M.Transformer(config)
    for p in m.parameters(): torch.nn.init.constant_(p, value)
    M.save_checkpoint(m, folder)
def deadly(real, halve):
    def call(*a, **k):
        calls.append(real)
        if len(calls) == die_at:
            if halve:  # the file that is being written is half there
                real(*a, **k)
                os.truncate(a[1], os.path.getsize(a[1]) // 2)
            os.kill(os.getpid(), 9)
        return real(*a, **k)
    return call
for die_at in range(1, 20):
    folder, calls = f"{sys.argv[1]}/{die_at}", []
    save(1.0, folder)
    pid = os.fork()
    if pid == 0:
        for where, name in ((M, "save_file"), (os, "chmod"), (os, "fsync"), (os, "replace")):
            setattr(where, name, deadly(getattr(where, name), name == "save_file"))
        save(2.0, folder)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(die_at, status)
    if status == 0: break
"""


def test_kill_in_the_middle_of_a_save_leaves_a_loadable_checkpoint(tmp_path):
    """kill -9 with the file half written, and at each later call: the folder loads, all weights old
    or all new,
    never a mixture."""
    done, outcomes = run("-c", SAVE_AND_DIE, tmp_path), []
    for line in done.stdout.splitlines():
        die_at, status = line.split()
        values = {p.unique().item() for p in M.load_checkpoint(tmp_path / die_at).parameters()}
        assert len(values) == 1, values
        outcomes.append((int(status), values.pop()))
    assert (-9, 1.0) in outcomes and (-9, 2.0) in outcomes and outcomes[-1] == (0, 2.0), (
        outcomes,
        done.stderr,
    )


def test_model_alone_in_an_empty_folder(tmp_path):
    """The copy contract: model.py alone imports, builds, runs, saves and loads."""
    shutil.copy(REPO / "model.py", tmp_path)
    code = """
import sys, torch, model as M
m = M.Transformer(M.CONFIGS["draft"]).eval()
M.save_checkpoint(m, "x")
tokens = torch.randint(0, 4096, (1, 9))
assert torch.equal(m(tokens), M.load_checkpoint("x")(tokens))
print("ran", {"generate", "train", "triton"} & set(sys.modules) or "alone")
"""
    done = run("-c", code, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0 and done.stdout.strip() == "ran alone", done.stderr


# --------------------------------------------------------------------------------------------------
# cpu.py
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(64, 96), (257, 1000), (1030, 33), (3, 5)], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 4, 19])
@torch.no_grad()
def test_cpu_linear_is_nearer_to_exact_than_linear(rows, shape, bias):
    """CPULinear against float64, over the very same parameters: within bf16's final rounding."""
    torch.manual_seed(0)
    plain = torch.nn.Linear(shape[1], shape[0], bias=bias).bfloat16().requires_grad_(False)
    x = torch.randn(2 if rows > 1 else 1, rows, shape[1]).bfloat16()
    exact = F.linear(x.double(), plain.weight.double(), plain.bias.double() if bias else None)
    swapped = cpu.swap_linear_(torch.nn.Sequential(plain))
    assert type(swapped[0]) is cpu.CPULinear and swapped[0].weight is plain.weight
    got = swapped(x).double()
    assert got.shape == exact.shape
    assert relative(got, exact) <= max(2**-8, 1.01 * relative(plain(x).double(), exact))


def test_cpu_linear_leaves_other_dtypes_and_gradients_alone():
    """fp32, and anything under grad mode, goes through F.linear bit for bit, backward included."""
    for dtype in (torch.float32, torch.bfloat16):
        plain, x = torch.nn.Linear(40, 24).to(dtype), torch.randn(1, 40, dtype=dtype)
        plain(x).sum().backward()
        expected, plain.weight.grad = plain.weight.grad, None
        swapped = cpu.swap_linear_(torch.nn.Sequential(plain))
        assert torch.equal(swapped(x), plain(x))
        swapped(x).sum().backward()
        assert torch.equal(swapped[0].weight.grad, expected)


def test_gemv_kernel_is_built_here():
    """With a C compiler there is a kernel, and it multiplies rightly."""
    if not shutil.which(os.environ.get("CC", "cc")):
        pytest.skip("no C compiler on this machine: F.linear serves")
    weight, x = torch.randn(97, 64).bfloat16(), torch.randn(1, 64).bfloat16()
    exact = x.double() @ weight.double().t()
    assert cpu.kernel() is not None and relative(cpu.gemv(weight, x).double(), exact) < 2**-8


@torch.no_grad()
def test_no_compiler_no_kernel(monkeypatch):
    """A machine without a compiler generates all the same."""
    monkeypatch.setenv("CC", "/no/such/compiler")
    assert cpu.kernel.__wrapped__() is None
    monkeypatch.setattr(cpu, "kernel", lambda: None)
    linear = torch.nn.Linear(64, 32, bias=False).bfloat16().requires_grad_(False)
    x = torch.randn(1, 64).bfloat16()
    assert torch.equal(cpu.swap_linear_(torch.nn.Sequential(linear))(x), linear(x))


@torch.inference_mode()
def test_cache_and_model_may_differ_in_dtype():
    """A bf16 model over the default fp32 cache runs, and agrees with a bf16 cache."""
    config = tiny()
    model, tokens = random_model(config).bfloat16(), random_tokens(config, 1, 9)
    wide = model(tokens, torch.arange(9), M.KVCache(config, 1, 16).attend)
    narrow = model(tokens, torch.arange(9), M.KVCache(config, 1, 16, torch.bfloat16).attend)
    assert torch.equal(wide, narrow) and relative(wide.float(), model(tokens).float()) < 0.02


@pytest.mark.parametrize(
    "sheet",
    [
        "sampling",
        "calibrate",
        "gemm",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("cpu", "quantize", "sparse")),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("speculative", "expert_parallel")
        ),
    ],
)
def test_sheet_alone_in_an_empty_folder(sheet, tmp_path):
    """The copy contract: the file alone runs as a program, checks itself and prints its table."""
    shutil.copy(REPO / f"{sheet}.py", tmp_path)
    done = run(f"{sheet}.py", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0 and len(done.stdout.splitlines()) > 4, done.stderr


# --------------------------------------------------------------------------------------------------
# sampling.py
# --------------------------------------------------------------------------------------------------


def specified(logits, how, prompt=(), output=(), eos_ids=()) -> torch.Tensor:
    """The contract read aloud, in float64 and plain Python: one row's distribution."""
    x = [float(v) for v in logits]
    for i in set(prompt) | set(output):
        x[i] = x[i] / how.repetition_penalty if x[i] > 0 else x[i] * how.repetition_penalty
    for i, n in Counter(output).items():
        x[i] -= how.presence_penalty + how.frequency_penalty * n
    for i, b in how.logit_bias:
        x[i] += b
    if len(output) < how.min_new_tokens:
        for i in eos_ids:
            x[i] = -INF
    p = [0.0] * len(x)
    if how.temperature == 0:
        p[x.index(max(x))] = 1.0
        return torch.tensor(p, dtype=torch.float64)
    weight = [math.exp((v - max(x)) / how.temperature) for v in x]
    left = sorted((i for i in range(len(x)) if weight[i] > 0), key=lambda i: (-x[i], i))
    if 0 < how.top_k < len(left):
        last = x[left[how.top_k - 1]]
        left = [i for i in left if x[i] >= last]
    if how.top_p < 1:
        total = sum(weight[i] for i in left)
        for n in range(1, len(left) + 1):  # the smallest number that reaches it
            if sum(weight[i] for i in left[:n]) >= how.top_p * total:
                left = left[:n]
                break
    left = [i for i in left if weight[i] >= how.min_p * weight[left[0]]]
    for i in left:
        p[i] = weight[i] / sum(weight[j] for j in left)
    return torch.tensor(p, dtype=torch.float64)


def p_value(seen: torch.Tensor, p: torch.Tensor) -> float:
    """Of Pearson's chi-square; cells that expect less than 5 are one, an impossible draw is 0."""
    seen, expected = seen.double(), p.double() * seen.sum()
    if seen[p == 0].any():
        return 0.0
    small = (expected < 5) & (p > 0)
    cells = [seen[expected >= 5], seen[small].sum()[None]]
    wanted = [expected[expected >= 5], expected[small].sum()[None]]
    seen, expected = (torch.cat(c[: 1 + int(small.any())]) for c in (cells, wanted))
    chi2 = ((seen - expected) ** 2 / expected).sum()
    freedom = torch.tensor(max(len(seen) - 1, 1), dtype=torch.float64)
    return torch.special.gammaincc(freedom / 2, chi2 / 2).item()


def off_by_5_percent(p: torch.Tensor) -> torch.Tensor:
    """A wrong distribution: the second likeliest token is given 5% too much, of its own."""
    wrong = p.clone()
    wrong[p.topk(2).indices[1]] *= 1.05
    return wrong / wrong.sum()


def frequencies(how, logits, prompt=(), output=(), eos_ids=()) -> torch.Tensor:
    """400,000 draws by a Sampler, every one in the same state but for seed and position."""
    V, rows = len(logits), 1000
    sampler = S.Sampler(how, rows, V, eos_ids=eos_ids)
    for row, h in enumerate(list(sampler.how)):
        sampler.admit(row, h, prompt, output)
    seen, logits = torch.zeros(V, dtype=torch.long), torch.tensor(logits).expand(rows, V)
    for _ in range(400):
        ids = sampler(logits)
        sampler.record(ids, times=-1)
        sampler.position += 1
        seen += ids.bincount(minlength=V)
    return seen


SIXTEEN_LOGITS = torch.randn(16, generator=torch.Generator().manual_seed(11)).mul(0.7).tolist()
SAMPLING_SETTINGS = [
    dict(),
    dict(temperature=0.5),
    dict(temperature=2.0, seed=2**63 - 500),
    dict(top_k=5),
    dict(top_p=0.7),
    dict(min_p=0.2),
    dict(repetition_penalty=1.4),
    dict(presence_penalty=0.8),
    dict(frequency_penalty=0.4),
    dict(logit_bias={0: 1.5, 3: -INF, 9: -2.0}),
    dict(temperature=0.8, top_k=9, top_p=0.9, min_p=0.05),
    dict(repetition_penalty=0.7, presence_penalty=-0.5, frequency_penalty=0.3, temperature=1.3),
    dict(repetition_penalty=1.2, logit_bias={2: 1.0}, top_p=0.85, top_k=12, min_new_tokens=9),
]


@pytest.mark.parametrize("asked", SAMPLING_SETTINGS, ids=lambda a: ",".join(a) or "defaults")
def test_draws_follow_the_specified_distribution(asked):
    """Chi-square of 400,000 draws; the same test rejects a distribution with a 5% error."""
    state = dict(prompt=[1, 4, 4], output=[4, 7, 7, 2], eos_ids=[5])
    if not set(asked) & {"min_new_tokens", *S.PENALTIES}:
        state = {}
    how = S.Sampling(**asked)
    p = specified(SIXTEEN_LOGITS, how, **state)
    seen = frequencies(how, SIXTEEN_LOGITS, **state)
    assert p_value(seen, p) > 1e-3, (seen, p * seen.sum())
    assert p_value(seen, off_by_5_percent(p)) < 1e-6


def test_draws_are_independent_of_steps_rows_and_tokens():
    """Pairs of consecutive draws, of neighbouring rows and seeds, are uniform over all pairs; the
    noise of one token is Exp(1) over positions, over seeds and over the vocabulary."""
    sampler = S.Sampler(S.Sampling(), 512, 8)
    ids = torch.stack([sampler(torch.zeros(512, 8)) for _ in range(400)])
    even = torch.full((64,), 1 / 64)
    for a, b in ((ids[1:], ids[:-1]), (ids[:, 1:], ids[:, :-1]), (ids[2:, 2:], ids[:-2, :-2])):
        assert p_value((a * 8 + b).flatten().bincount(minlength=64), even) > 1e-3
    n = torch.arange(100_000)[:, None]
    zero, edges = torch.zeros_like(n), -torch.log1p(-torch.arange(1, 100) / 100)
    for seed, position, tokens in (
        (zero, n, [1]),
        (n, zero, [1]),
        (n << 40, zero, [3]),  # only bits that torch's own CPU generator does not hear
        (zero[:1], zero[:1], range(1, 100_001)),
    ):
        noise = S.exponential(seed, position, torch.tensor(tokens) * S.GOLDEN)
        cells = torch.bucketize(noise.flatten(), edges).bincount(minlength=100)
        assert p_value(cells, torch.full((100,), 0.01)) > 1e-3


def test_noise_is_splitmix_and_stays_within_bounds(monkeypatch):
    """The generator's published outputs; the extremes of 63 bits give neither 0 nor infinity."""
    steps = torch.arange(1, 6) * S.GOLDEN
    got = [i % 2**64 for i in S.splitmix(torch.tensor([1234567]), steps).tolist()]
    assert got == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    seeds = torch.tensor([[0], [1], [2**32], [2**62], [2**63 - 1]])
    noise = S.exponential(seeds, torch.zeros(5, 1, dtype=torch.long), torch.arange(1, 9) * S.GOLDEN)
    assert len(set(noise.flatten().tolist())) == 40
    for bits, low, high in ((0, 0, 1e-18), (2**63 - 1, 16, 17)):
        monkeypatch.setattr(S, "splitmix", lambda state, steps: torch.full_like(steps, bits))
        noise = S.exponential(seeds, seeds, steps)
        assert ((low < noise) & (noise < high)).all()


def test_probabilities_equal_their_definition():
    """Number or column, ties, -inf and vocabularies of one: the set of tokens exactly, the values
    to rounding."""
    rng = torch.Generator().manual_seed(5)
    uniform = lambda a, b: a + (b - a) * torch.rand((), generator=rng).item()
    for case in range(300):
        V = int(uniform(1, 30)) if case % 3 else int(uniform(1, 4))
        logits = torch.randn(3, V, generator=rng) * 2
        if case % 2:
            logits = (logits * 2).round() / 2  # many ties
        if case % 5 == 0 and V > 1:
            logits[:, V // 2] = -INF
        rows = [
            S.Sampling(
                temperature=uniform(0.2, 2) if case % 7 else 0.0,
                top_k=int(uniform(0, 1.2 * V)),
                top_p=uniform(0.05, 1) if case % 4 else 1.0,
                min_p=uniform(0, 0.5) if case % 6 else 0.0,
            )
            for _ in range(3)
        ]
        got = S.Sampler(rows, 3, V).probabilities(logits)
        for row, how in enumerate(rows):
            p = specified(logits[row], how)
            one = S.probabilities(logits[row], how.temperature, how.top_k, how.top_p, how.min_p)
            for q in (got[row], one):
                assert torch.equal(q > 0, p > 0), (how, logits[row])
                torch.testing.assert_close(q.double(), p, rtol=1e-5, atol=1e-7)


def test_sets_at_their_edges():
    """top-p stops as soon as it is reached and takes lower ids first; top-k and min-p keep ties;
    a top-p that all tokens just reach, or a rounded sum exceeds, keeps them."""
    kept = lambda logits, **how: S.probabilities(logits, **how).nonzero()[:, -1].tolist()
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log2() * math.log(2)
    assert kept(logits, top_p=0.5) == [0] and kept(logits, top_p=0.51) == [0, 1]
    assert kept(logits, top_p=0.8) == [0, 1, 2] and kept(logits, top_k=3) == [0, 1, 2, 3]
    assert kept(logits, min_p=0.49) == [0, 1] and kept(logits, min_p=1.0) == [0]
    assert kept(torch.zeros(4), top_p=0.5) == [0, 1] and kept(torch.zeros(4), min_p=1.0) == [
        *range(4)
    ]
    assert kept(logits, top_p=1e-320) == [0]
    assert kept(logits, top_k=99) == [*range(4)] and kept(torch.zeros(1), top_p=0.1, top_k=1) == [0]
    far = torch.tensor([0.0, -21.0, -22.0])  # in fp32 the first alone is 1
    p = S.Sampler([S.Sampling(), S.Sampling(top_p=0.5)], 2, 3).probabilities(far.expand(2, -1))
    assert torch.equal(p[0], far.softmax(-1)) and (p[0] > 0).all() and p[1].tolist() == [1, 0, 0]
    close = torch.tensor([20.0, 1.0, 1.0 + 1.2e-7])  # distinct, but not after 20 is taken off
    assert kept(close, top_k=2, temperature=0.5) == [0, 2]


def test_rounding_lets_no_crowd_into_the_nucleus():
    """Twelve tokens reach top_p by less than fp32 can tell: the 50,000 others, each far below
    rounding but a thousandth together, stay out."""
    rng, top_p, V = torch.Generator().manual_seed(0), torch.tensor(0.999).item(), 50_000
    for case in range(30):
        each = (1 - top_p) / V * (1 - 3e-5 * torch.rand((), generator=rng).item())
        p = torch.full((V,), each, dtype=torch.float64)
        heavy = torch.rand(12, generator=rng, dtype=torch.float64) + 0.1
        p[100:112] = heavy / heavy.sum() * (1 - each * (V - 12))
        assert (S.probabilities(p.log(), top_p=top_p) > 0).sum() <= 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equal_to_the_processors_of_transformers(dtype):
    """Temperature, top-k, top-p, min-p, repetition, bias and min_new_tokens, one by one and all."""
    P = pytest.importorskip("transformers.generation.logits_process")
    rng = torch.Generator().manual_seed(2)
    B, V = 4, 3000
    prompt = torch.randint(V, (B, 40), generator=rng)
    logits = (torch.randn(B, V, generator=rng) * 3).to(dtype)
    whole = {
        "repetition_penalty": (1.3, lambda v: P.RepetitionPenaltyLogitsProcessor(v)),
        "logit_bias": (
            {7: 4.0, 8: -INF},
            lambda v: P.SequenceBiasLogitsProcessor({(i,): b for i, b in v.items()}),
        ),
        "min_new_tokens": (3, lambda v: P.MinNewTokensLengthLogitsProcessor(40, v, [5, 6])),
        "temperature": (0.6, lambda v: P.TemperatureLogitsWarper(v)),
        "top_k": (40, lambda v: P.TopKLogitsWarper(v)),
        "top_p": (0.9, lambda v: P.TopPLogitsWarper(v)),
        "min_p": (0.03, lambda v: P.MinPLogitsWarper(v)),
    }
    for names in (*([name] for name in whole), list(whole)):
        if "top_p" in names and dtype != torch.float32:
            continue  # of tokens that tie at its edge, transformers' sort keeps any
        theirs = logits.float()
        for name in names:
            value, make = whole[name]
            theirs = make(value)(prompt, theirs)
        how = S.Sampling(**{name: whole[name][0] for name in names})
        sampler = S.Sampler(how, B, V, eos_ids=[5, 6])
        sampler.start(prompt.tolist())
        ours, theirs = sampler.probabilities(logits), theirs.softmax(-1)
        assert torch.equal(ours > 0, theirs > 0), names
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-9)


def test_penalties_count_what_they_should():
    """Repetition looks at prompt and output, presence and frequency at the output alone; what is
    drawn counts from then on, and record(times=-1) undoes it."""
    V = 12
    rows = [S.Sampling(temperature=0, **{name: 2.0}) for name in S.PENALTIES]
    sampler = S.Sampler(rows, 3, V)
    sampler.start([[1, 1, 2]] * 3)
    logits = torch.linspace(-3, 3, V).expand(3, V)
    output = [[], [], []]
    for _ in range(25):
        for row, how in enumerate(rows):
            p = specified(logits[row], replace(how, temperature=1), [1, 1, 2], output[row])
            q = S.probabilities(sampler.process(logits)[row])
            torch.testing.assert_close(q.double(), p, rtol=1e-5, atol=1e-7)
        before = sampler.process(logits)
        for row, i in enumerate(sampler(logits).tolist()):
            assert i == specified(logits[row], rows[row], [1, 1, 2], output[row]).argmax()
            output[row].append(i)
        ids = torch.tensor([3, 4, 5])
        after = sampler.process(logits)
        assert not torch.equal(after, before)
        sampler.record(ids)
        assert not torch.equal(sampler.process(logits), after)
        sampler.record(ids, times=-1)
        assert (
            torch.equal(sampler.process(logits), after)
            and (sampler.position == len(output[0])).all()
        )


def test_greedy_is_exact_and_costs_nothing():
    """argmax, of ties the first, in any dtype and beside rows that draw; without penalties the step
    has no feature but that, with them it is the argmax of what is specified."""
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(64, 500, generator=rng).bfloat16()  # 500 values of 8 bits: ties at the top
    assert (logits == logits.amax(-1, keepdim=True)).sum() > 64
    alone = S.Sampler(S.Sampling(temperature=0, top_k=3, top_p=0.5, min_p=0.1), 64, 500)
    assert alone.features == {"temperature", "greedy"} and alone.process(logits) is logits
    assert torch.equal(alone(logits), logits.float().argmax(-1))
    assert torch.equal(alone.probabilities(logits).argmax(-1), alone(logits))
    mixed = S.Sampler([S.Sampling(temperature=t % 2, top_p=0.9) for t in range(64)], 64, 500)
    for _ in range(5):
        got = mixed(logits)
        assert torch.equal(got[::2], logits[::2].float().argmax(-1))
    assert (got[1::2] != logits[1::2].argmax(-1)).any()
    assert (S.probabilities(logits, 0).max(-1).values == 1).all()


def table_of_logits(V: int, seed: int = 0) -> torch.Tensor:
    """A model: the logits after a token are its row."""
    return torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) * 2


def run_sampler(
    sampler: S.Sampler, table: torch.Tensor, first: list[int], steps: int
) -> list[list[int]]:
    """What a Sampler writes with the table_of_logits model, per row."""
    ids, out = torch.tensor(first), []
    for _ in range(steps):
        ids = sampler(table[ids])
        out.append(ids)
    return torch.stack(out, 1).tolist()


MIXED_SAMPLINGS = [
    S.Sampling(seed=5),
    S.Sampling(temperature=0),
    S.Sampling(temperature=0.7, top_k=6, seed=2**40),
    S.Sampling(top_p=0.8, frequency_penalty=0.2, seed=5),
    S.Sampling(min_p=0.05, repetition_penalty=1.3, logit_bias={3: 2.0, 4: -INF}),
    S.Sampling(temperature=0, presence_penalty=1.5, min_new_tokens=12),
    S.Sampling(temperature=1.5, top_k=3, top_p=0.99, min_p=0.01, seed=2**63 - 1),
]


def test_a_row_is_the_same_alone_and_among_others():
    """Seven different requests in one batch, in another order, and each alone: the same tokens."""
    V, table = 30, table_of_logits(30)
    prompts = [[b, b + 1, 2 * b] for b in range(7)]
    first = [p[-1] for p in prompts]
    alone = []
    for how, prompt in zip(MIXED_SAMPLINGS, prompts):
        one = S.Sampler(how, 1, V, eos_ids=[2])
        one.start([prompt])
        alone += run_sampler(one, table, prompt[-1:], 40)
    for order in (range(7), [6, 2, 0, 5, 1, 4, 3]):
        every = S.Sampler([MIXED_SAMPLINGS[b] for b in order], 7, V, eos_ids=[2])
        every.start([prompts[b] for b in order])
        got = run_sampler(every, table, [first[b] for b in order], 40)
        assert got == [alone[b] for b in order]
    assert alone[0] != alone[3] and 4 not in alone[4] and 2 not in alone[5][:12]


def test_seeds_and_samples():
    """Same seed, same tokens; n rows are n single runs with seed, seed + 1, ...; seeds that differ
    only above bit 32 write differently, and so does the last seed's successor."""
    V, table = 50, table_of_logits(50)
    run = lambda how, n=1: run_sampler(S.Sampler(how, n, V), table, [7] * n, 30)
    for seed in (0, 41, 2**63 - 2):
        rows = run(S.Sampling(seed=seed), 4)
        assert rows == [run(S.Sampling(seed=(seed + b) % 2**63))[0] for b in range(4)]
        assert len(set(map(tuple, rows))) == 4
    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1]
    assert len({tuple(run(S.Sampling(seed=s))[0]) for s in seeds}) == len(seeds)
    sampler = S.Sampler(S.Sampling(repetition_penalty=1.2), 2, V)
    again = []
    for _ in range(2):
        sampler.start([[1, 2], [3]])
        again.append(run_sampler(sampler, table, [2, 3], 20))
    assert again[0] == again[1]


def test_rows_come_and_go():
    """admit: a new sequence in a row writes what it would alone, its neighbour goes on undisturbed,
    and an interrupted one goes on in another row as if it had never stopped."""
    V, table = 30, table_of_logits(30)
    alone, others = [], [*MIXED_SAMPLINGS, S.Sampling(logit_bias={5: 3.0})]
    for how in others:
        one = S.Sampler(how, 1, V, eos_ids=[2])
        one.start([[8, 9]])
        alone += run_sampler(one, table, [9], 30)
    sampler = S.Sampler(S.Sampling(temperature=0), 2, V, eos_ids=[2])
    kept = S.Sampling(seed=77, presence_penalty=0.3)
    neighbour = S.Sampler(kept, 1, V)
    expected = run_sampler(neighbour, table, [1], 30 * len(others))[0]
    sampler.admit(1, kept, [])
    first = [9, 1]
    for number, how in enumerate(others):
        row = number % 2  # the neighbour moves as well
        done = 30 * number
        sampler.admit(1 - row, kept, [], expected[:done])
        sampler.admit(row, how, [8, 9])
        first[1 - row] = expected[done - 1] if done else 1
        first[row] = 9
        got = run_sampler(sampler, table, first, 11)
        sampler.admit(row, how, [8, 9], got[row])  # interrupted
        rest = run_sampler(sampler, table, [got[0][-1], got[1][-1]], 19)
        assert got[row] + rest[row] == alone[number], how
        assert got[1 - row] + rest[1 - row] == expected[done : done + 30], how
    key = sampler.step_key
    sampler.admit(0, S.Sampling(top_p=0.5), [])
    assert sampler.step_key != key


def test_no_end_of_sequence_before_min_new_tokens():
    """Neither of two ends before the fifth token, both likely; then they come. Alone, without ids
    that end a sequence, it asks for nothing."""
    logits = torch.zeros(300, 4)
    logits[:, :2] = 5.0
    for temperature in (0, 1):
        how = S.Sampling(temperature=temperature, min_new_tokens=5)
        sampler = S.Sampler(how, 300, 4, eos_ids=(0, 1))
        steps = [sampler(logits) for _ in range(7)]
        assert all((ids >= 2).all() for ids in steps[:5])
        assert all((ids < 2).sum() > 280 for ids in steps[5:])
    assert "min_new_tokens" not in S.Sampler(S.Sampling(min_new_tokens=5), 1, 4).features


def test_features_that_no_row_uses_are_not_in_the_step():
    """Each field brings what it needs into the step, and nothing else; settings at their defaults
    bring nothing."""
    features = lambda **how: S.Sampler(S.Sampling(**how), 2, 9, eos_ids=[0]).features
    assert features() == {"noise"} == features(top_k=9, top_p=1, seed=3)
    for name in ("temperature", "top_p", "min_p"):
        assert features(**{name: 0.5}) == {"noise", name}
    assert features(top_k=2) == {"noise", "top_k"} and features(logit_bias={1: 1}) == {
        "noise",
        "bias",
    }
    assert features(presence_penalty=1) == {"noise", "presence_penalty", "output"}
    assert features(min_new_tokens=1) == {"noise", "min_new_tokens"}
    assert features(temperature=0, top_p=0.5) == {"temperature", "greedy"}
    names = {"noise", "repetition_penalty", "prompt", "output"}
    assert features(repetition_penalty=2) == names


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_row_with_nothing_to_draw_is_minus_one(temperature):
    """All -inf, a NaN, an infinity: -1, in that row alone, also where penalties count tokens."""
    logits = torch.zeros(5, 6)
    logits[0], logits[1, 3], logits[2, 2], logits[3, 1:] = -INF, math.nan, INF, -INF
    for more in ({}, dict(top_k=2, top_p=0.9, min_p=0.1), dict(repetition_penalty=1.1)):
        sampler = S.Sampler(S.Sampling(temperature=temperature, **more), 5, 6)
        for _ in range(3):
            ids = sampler(logits).tolist()
            assert ids[:4] == [-1, -1, -1, 0] and 0 <= ids[4] < 6
    bad = S.Sampling(temperature=temperature, logit_bias={i: -INF for i in range(1, 6)})
    assert S.Sampler(bad, 5, 6)(logits).tolist() == [-1, -1, -1, 0, 0]


def test_noise_that_is_zero_draws_no_token_that_is_ruled_out():
    """0 / 0 must not win, nor must a row of zeros be a token."""
    probs = torch.tensor([[0.6, 0.4, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    noise = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 1.0]])
    assert S.draw(probs, noise).tolist() == [0, -1]


def test_extremes_of_temperature_and_dtype():
    """Temperatures from 1e-9 to 1e9, logits of 1e4 and of half precision: finite, and as
    specified. torch's default dtype has no say."""
    big = torch.tensor([1e4, 9999.5, -1e4, -INF])
    for temperature, p in (
        (1e-9, [1, 0, 0, 0]),
        (1e-4, [1, 0, 0, 0]),
        (1e9, [1 / 3, 1 / 3, 1 / 3, 0]),
    ):
        got = S.probabilities(big, temperature)
        torch.testing.assert_close(got, torch.tensor(p, dtype=torch.float32), rtol=1e-4, atol=0)
        assert S.Sampler(S.Sampling(temperature=temperature), 1, 4)(big[None]).item() in (0, 1, 2)
    half = torch.tensor([3.0, 2.998, 1.0], dtype=torch.float16)
    before = torch.get_default_dtype()
    for cut in (dict(top_p=0.999), dict(min_p=0.001272, logit_bias={0: 1.001})):
        how = S.Sampling(temperature=0.3, **cut)  # in bf16: 1, 0.001274 and 1
        try:
            torch.set_default_dtype(torch.bfloat16)
            one = S.probabilities(half, how.temperature, how.top_k, how.top_p, how.min_p)
            row = S.Sampler(how, 1, 3).probabilities(half[None])[0]
        finally:
            torch.set_default_dtype(before)
        assert one.dtype == row.dtype == torch.float32
        for got, spec in ((one, replace(how, logit_bias=())), (row, how)):
            torch.testing.assert_close(got.double(), specified(half, spec), rtol=1e-5, atol=0)
    assert S.Sampler(S.Sampling(top_k=7, top_p=0.1), 1, 1)(torch.tensor([[4.0]])).item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logprobs_are_the_models_own(dtype):
    """fp32 log-softmax of the raw logits; the chosen id's, and the largest in order."""
    logits = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(3)).to(dtype)
    ids = logits.argmin(-1)
    chosen, best, where = S.logprobs_of(logits, ids, 40)
    logp = logits.double().log_softmax(-1)
    assert chosen.dtype == best.dtype == torch.float32
    torch.testing.assert_close(chosen.double(), logp.gather(-1, ids[..., None])[..., 0])
    torch.testing.assert_close(best.double().exp().sum(-1), torch.ones(2, 5, dtype=torch.float64))
    torch.testing.assert_close(best.double(), logp.sort(descending=True).values)
    torch.testing.assert_close(best.double(), logp.gather(-1, where))
    some = S.logprobs_of(logits, ids, 3)
    assert torch.equal(some[0], chosen) and torch.equal(some[1], best[..., :3])
    assert S.logprobs_of(logits, ids)[1].shape == (2, 5, 0)
    with pytest.raises(ValueError, match="top must be from 0 to the vocabulary's 40, not 41"):
        S.logprobs_of(logits, ids, 41)


@pytest.mark.parametrize(
    "field, value",
    [
        *[("temperature", v) for v in (-0.1, 1e-10, math.nan, INF, "1", None, True)],
        *[("top_k", v) for v in (-1, 2.0, 2**63, True, None)],
        *[("top_p", v) for v in (0, -0.5, 1.01, math.nan, "0.9")],
        *[("min_p", v) for v in (-0.01, 1.5, math.nan, None)],
        *[("repetition_penalty", v) for v in (0, -1.0, INF, math.nan)],
        *[
            (f"{name}_penalty", v)
            for v in (INF, -INF, math.nan, "2")
            for name in ("presence", "frequency")
        ],
        *[("min_new_tokens", v) for v in (-1, 1.5, math.nan)],
        *[("seed", v) for v in (-1, 2**63, 0.5, None)],
        *[
            ("logit_bias", v)
            for v in (None, 5, {-1: 1.0}, {"5": 1.0}, {1.5: 1.0}, {5: INF}, {5: math.nan})
        ],
        *[
            ("logit_bias", v)
            for v in ({5: None}, {5: True}, {True: 1.0}, [(5, 1.0), (5, 2.0)], [5], "ab")
        ],
    ],
)
def test_bad_values_are_refused_by_name(field, value):
    """Every field: a ValueError with its name, the value and what would be right."""
    with pytest.raises(ValueError, match=f"^{field} .*must ") as e:
        S.Sampling(**{field: value})
    shown = next(iter(value.items())) if isinstance(value, dict) else (value,)
    assert any(repr(v) in str(e.value) for v in shown)


def test_what_only_the_vocabulary_can_tell_is_refused_there():
    """Ids beyond it, rows that forbid all of it, and a wrong number of rows or prompts."""
    refused = lambda message: pytest.raises(ValueError, match=message)
    with refused("logit_bias has token id 70000, but the vocabulary ends at 4095"):
        S.Sampler(S.Sampling(logit_bias={70000: 1.0}), 1, 4096)
    with refused("eos_ids has token id 9, but the vocabulary ends at 8"):
        S.Sampler(S.Sampling(), 1, 9, eos_ids=[2, 9])
    nothing = {i: -INF for i in range(8)}
    with refused("leave no token to draw"):
        S.Sampler(S.Sampling(logit_bias=nothing, min_new_tokens=1), 1, 9, eos_ids=[8])
    with refused("leave no token to draw"):
        S.Sampler(S.Sampling(logit_bias=nothing | {8: -INF}), 1, 9)
    ends = S.Sampler(S.Sampling(logit_bias=nothing), 1, 9, eos_ids=[8])
    assert ends(torch.zeros(1, 9)).item() == 8
    with refused("leave no token to draw"):
        ends.admit(0, S.Sampling(logit_bias=nothing, min_new_tokens=1), [])
    with refused("how must be one Sampling or 3 of them, not 2"):
        S.Sampler([S.Sampling()] * 2, 3, 9)
    sampler = S.Sampler(S.Sampling(repetition_penalty=1.1), 2, 9)
    with refused("prompts must be 2, one per row, not 1"):
        sampler.start([[1]])
    for bad in (-1, 9):
        with refused(f"prompt has token id {bad}, but the vocabulary ends at 8"):
            sampler.start([[1], [2, bad]])


def test_sampling_is_a_value():
    """Frozen, hashable, equal however the bias was written, and replaceable."""
    a = S.Sampling(logit_bias={5: 1.0, 2: -INF})
    assert a == S.Sampling(logit_bias=((2, -INF), (5, 1.0))) == replace(a)
    assert len({a, replace(a, seed=0), replace(a, seed=1)}) == 2
    with pytest.raises(AttributeError):
        a.seed = 1


@pytest.mark.skipif(
    not has_compiler(), reason="torch.compile on CPU needs a C++ compiler, and there is none"
)
def test_compiled_sampler_equals_eager():
    """20 steps of seven different rows, all features on, in one graph without recompiling."""
    V, table = 61, table_of_logits(61)
    first = list(range(7))
    torch._dynamo.reset()
    texts = []
    for compiled in (False, True):
        sampler = S.Sampler(MIXED_SAMPLINGS, 7, V, eos_ids=[2])
        step = torch.compile(sampler, fullgraph=True, dynamic=False) if compiled else sampler
        step(table[torch.tensor(first)])  # on CUDA one warms up too, and then starts
        with torch.compiler.set_stance("fail_on_recompile"):
            sampler.start([[b] for b in first])
            texts.append(run_sampler(step, table, first, 20))
    assert texts[0] == texts[1]
    assert set(S.COLUMNS) | set(S.TABLES) | {"greedy", "noise"} == sampler.features


# --------------------------------------------------------------------------------------------------
# tokenizer.py
# --------------------------------------------------------------------------------------------------

UNKNOWN = "\N{REPLACEMENT CHARACTER}"

HOSTILE = {
    "empty": "",
    "space": " ",
    "lone spaces": " x ",
    "two leading spaces": "  def f(x):\n        return 'ß'  ",
    "long runs": "a" + " " * 300 + "b" + "\n" * 40 + "\t" * 33 + " " * 17,
    "code": "class A:\n\tdef f(self, x=1_000):\r\n\t\treturn {**x, 'y': x @ 2} != None\r\n\r\n",
    "scripts": "naïve Ünïcode, Привет мир, 日本語テキスト, שלום, مرحبا, हिन्दी, ไทย, 한국어",
    "combining": "e\u0301 a\u0308\u0304 Z\u0351\u036b q\u0307\u0323 \u1e9b\u0323 e\u0301! \xe9!",
    "emoji": "🦙🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇯🇵 1️⃣ ☕️",
    "odd characters": "\0 a\0b \u200b\u200d\ufeff\u2028\u00a0\u3000 \U0010fffd \x7f\x85",
    "marks": f"\u2581 a\u2581\u2581b Ġ Ċ Ã {UNKNOWN} {UNKNOWN}{UNKNOWN}",
    "spelled bytes": "<0x41><0xE2> <0x0A>",
    "special": "<s>hi</s> there<s><s> </s>x <unk> <|begin|>a<|end|><|end|> b <|begin",
    "added": "<tool>x</tool> [PAD] <tool> y <mask>  z <mask>z <think>\n</think> <｜tool end｜> y",
    "ligatures": "ﬁne ﬀ ① ｆｕｌｌ ² Ⅷ",
    "numbers": "3.14159 1000000 0x7fff 1e-9 ١٢٣",
    "contractions": "I'm you're WE'LL don't 'tis o'clock",
}


def hostile_corpus() -> list[str]:
    """Code and hostile texts: some of the characters have pieces, some fall back to bytes."""
    return [(REPO / name).read_text(encoding="utf-8") for name in ("cpu.py", "train.py")] + [
        text for name, text in HOSTILE.items() if name not in ("emoji", "special", "added", "marks")
    ]


def write_json(folder: Path, **files) -> Path:
    """A folder of JSON files, by their names without .json."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


# ---- Folders as they are found in the world ----


def sentencepiece_model(**changes) -> bytes:
    """As Llama 2's: BPE, byte fallback, no normalization, a space before the first word."""
    import sentencepiece

    options = dict(
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        character_coverage=0.995,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    out = io.BytesIO()
    lines = (t[i : i + 4000] for t in hostile_corpus() for i in range(0, len(t), 4000))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=out, **options | changes
    )
    return out.getvalue()


def llama2_json(model: bytes):
    """The tokenizer.json Llama 2 comes with, made of the pieces of its tokenizer.model."""
    import sentencepiece
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    vocab = {sp.id_to_piece(i): i for i in range(sp.vocab_size())}
    merges = [
        (vocab[piece], len(piece[:i]), piece[:i], piece[i:])
        for piece in vocab
        for i in range(1, len(piece))
        if piece[:i] in vocab and piece[i:] in vocab
    ]
    tk = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(left, right) for _, _, left, right in sorted(merges)],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tk.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tk.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tk.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tk.add_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return tk


def byte_level_json(bos: str | None = None, **model):
    """As Llama 3's and Qwen's: byte-level BPE behind a regular expression."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers import pre_tokenizers, processors, trainers

    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tk = Tokenizer(models.BPE(**model))
    if bos is None:
        tk.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tk.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(words), "isolated"), byte_level]
    )
    tk.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    tk.train_from_iterator(hostile_corpus(), trainer)
    tk.add_special_tokens(["<|begin|>", "<|end|>", "<|pad|>"])
    plain = ["<think>", "<｜tool end｜>"]  # the second in characters that stand for no byte
    tk.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    if bos is not None:
        template = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tk.token_to_id(bos))],
        )
        tk.post_processor = processors.Sequence([processors.ByteLevel(), template])
    return tk


def saved(tk, folder: Path, **files) -> Path:
    write_json(folder, **files)
    tk.save(str(folder / "tokenizer.json"))
    return folder


LLAMA = {"model_type": "llama"}
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LLAMA2 = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False, **NAMES}
QWEN = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": "<|end|>"}


def declared(content: str, **flags) -> dict:
    """A token of tokenizer_config.json's added_tokens_decoder."""
    off = dict.fromkeys(("special", "normalized", "lstrip", "rstrip", "single_word"), False)
    return {"content": content} | off | flags


ADDED = {
    "0": declared("<unk>", special=True),
    "1": declared("<s>", special=True),
    "2": declared("</s>", special=True),
    "N": declared("[PAD]"),  # special all the same, for it is the pad_token
    "N+1": declared("<tool>"),
    "N+2": declared("</tool>", rstrip=True),
    "N+3": declared("<mask>", lstrip=True, special=True),
    "N+4": declared("<think>", single_word=True),
    "N+5": declared("<tool>x"),
}


@pytest.fixture(scope="module")
def text_folders(tmp_path_factory) -> dict[str, Path]:
    """Hugging Face folders with a tokenizer.json, in the shapes that models are published in."""
    root = tmp_path_factory.mktemp("text")
    model = sentencepiece_model()
    llama2, llama3 = llama2_json(model), byte_level_json("<|begin|>", ignore_merges=True)
    size = llama2.get_vocab_size()
    added = {(str(size + int(k[1:] or 0)) if "N" in k else k): v for k, v in ADDED.items()}
    llama3_config = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    saved(
        llama3,
        root / "llama3",
        config=LLAMA,
        tokenizer_config=llama3_config | {"tokenizer_class": "PreTrainedTokenizerFast"},
    )
    qwen = byte_level_json()
    changed = {str(qwen.token_to_id("<think>")): declared("<think>", special=True, rstrip=True)}
    qwen_config = QWEN | {"added_tokens_decoder": changed}
    saved(qwen, root / "qwen", config=LLAMA, tokenizer_config=qwen_config)
    deepseek = llama3_config | {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}
    saved(byte_level_json(), root / "deepseek", config=LLAMA, tokenizer_config=deepseek)
    saved(
        qwen,
        root / "older files",
        added_tokens={"e\u0301!": qwen.get_vocab_size()},  # to be found in normalized text
        tokenizer_config={"extra_special_tokens": ["[PAD]", "<tool>"]},
        special_tokens_map={
            "eos_token": declared("<|end|>"),
            "pad_token": "<mask>",
            "additional_special_tokens": ["</tool>"],
        },
    )
    saved(llama3, root / "no config")
    for name, changes, config in (
        ("llama2", {}, LLAMA),
        ("llama2 without config.json", {}, {}),
        ("llama2 legacy", {"legacy": True}, LLAMA),
        ("llama2 no prefix", {"add_prefix_space": False}, LLAMA),
        ("llama2 added", {"added_tokens_decoder": added, "pad_token": "[PAD]"}, LLAMA),
        ("llama2 older", {"legacy": None, "unk_token": None}, LLAMA),
        ("mistral", {"legacy": True}, {"model_type": "mistral"}),
        ("llama2 other class", {"tokenizer_class": "PreTrainedTokenizerFast"}, LLAMA),
    ):
        files = {"tokenizer_config": LLAMA2 | changes} | ({"config": config} if config else {})
        if name == "llama2 older":
            files["added_tokens"] = {"</tool>": size + 1, "<tool>": size, "[PAD]": size + 2}
            files["special_tokens_map"] = {"pad_token": declared("[PAD]"), "unk_token": "<unk>"}
        saved(llama2, root / name, **files)
        write_json(root / name / "sentencepiece", **files)
        (root / name / "sentencepiece" / "tokenizer.model").write_bytes(model)
    return {path.name: path for path in root.iterdir()}


JSON_FOLDERS = ["llama3", "qwen", "deepseek", "older files", "no config", "llama2"]
JSON_FOLDERS += ["llama2 without config.json", "llama2 legacy", "llama2 no prefix", "llama2 added"]
JSON_FOLDERS += ["llama2 older", "mistral", "llama2 other class"]
PIECE_FOLDERS = ["llama2", "llama2 without config.json", "llama2 legacy", "llama2 no prefix"]
PIECE_FOLDERS += ["llama2 added", "llama2 older"]


def same_as(theirs, ours: K.Tokenizer) -> None:
    """Ids, with and without what goes around a text, and the text back, for every hostile text."""
    assert ours.vocab_size == len(theirs)
    for name, text in HOSTILE.items():
        ids = ours.encode(text)
        assert ids == theirs.encode(text), name
        assert ours.encode(text, bos=False) == theirs.encode(text, add_special_tokens=False), name
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), name


@pytest.mark.parametrize("name", JSON_FOLDERS)
def test_tokenizer_json_equals_transformers(text_folders, name):
    """tokenizer.json: ids and text of AutoTokenizer, special and added tokens in the text too."""
    theirs = transformers().AutoTokenizer.from_pretrained(text_folders[name])
    same_as(theirs, K.load_tokenizer(text_folders[name]))


@pytest.mark.parametrize("name", PIECE_FOLDERS)
def test_tokenizer_model_equals_transformers(text_folders, name):
    """tokenizer.model alone: the ids of AutoTokenizer on the tokenizer.json of the same pieces."""
    theirs = transformers().AutoTokenizer.from_pretrained(text_folders[name])
    same_as(theirs, K.load_tokenizer(text_folders[name] / "sentencepiece"))


@pytest.mark.parametrize("name", PIECE_FOLDERS)
def test_tokenizer_model_equals_transformers_on_the_same_folder(text_folders, name):
    """The same with transformers reading tokenizer.model itself, for which it needs protobuf."""
    pytest.importorskip("google.protobuf", reason="transformers reads tokenizer.model with it")
    folder = text_folders[name] / "sentencepiece"
    theirs = transformers().AutoTokenizer.from_pretrained(folder)
    same_as(theirs, K.load_tokenizer(folder))


def test_random_ids_decode_as_in_transformers(text_folders):
    """Byte-level ids in any order, broken characters included, give transformers' text."""
    rng = random.Random(0)
    for name in ("llama3", "qwen"):
        theirs = transformers().AutoTokenizer.from_pretrained(text_folders[name])
        ours = K.load_tokenizer(text_folders[name])
        for _ in range(50):
            ids = [rng.randrange(ours.vocab_size) for _ in range(60)]
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_the_shipped_tokenizer_is_sentencepiece_itself(tmp_path):
    """BOS, then the pieces; without tokenizer_config.json the model's own rules hold, the space
    before the first word and the removal of others included."""
    import sentencepiece

    for model in (
        (SMALL / "tokenizer.model").read_bytes(),
        sentencepiece_model(),
        sentencepiece_model(normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True),
    ):
        (tmp_path / "tokenizer.model").write_bytes(model)
        sp = sentencepiece.SentencePieceProcessor(model_proto=model)
        ours = K.load_tokenizer(tmp_path)
        for name in HOSTILE.keys() - {"special", "added"}:
            assert ours.encode(HOSTILE[name]) == [1] + sp.encode(HOSTILE[name]), name
            assert ours.encode(HOSTILE[name], bos=False) == sp.encode(HOSTILE[name]), name
            ids = sp.encode(HOSTILE[name])
            assert ours.decode(ids) == sp.decode(ids), name
        assert (
            ours.encode("a</s> b", bos=False)
            == sp.encode("a") + [2] + ours.encode("<s> b", bos=False)[1:]
        )


def test_bos_and_eos_rules_of_tokenizer_model(tmp_path):
    """tokenizer_config.json's add_bos_token and add_eos_token, else the model's own BOS."""
    (tmp_path / "tokenizer.model").write_bytes((SMALL / "tokenizer.model").read_bytes())
    for config, around in (
        ({}, ([1], [])),
        ({"add_bos_token": False}, ([], [])),
        ({"add_bos_token": True, "add_eos_token": True}, ([1], [2])),
        ({"add_eos_token": True, "eos_token": "<s>"}, ([1], [1])),
        ({"add_bos_token": True, "bos_token": "<new>"}, ([4096], [])),
    ):
        write_json(tmp_path, tokenizer_config=config)
        tokenizer = K.load_tokenizer(tmp_path)
        inner = tokenizer.encode("def f", bos=False)
        assert tokenizer.encode("def f") == [*around[0], *inner, *around[1]], config
        assert tokenizer.vocab_size == 4096 + (around[0] == [4096])
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(bos_id=-1))
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = K.load_tokenizer(tmp_path)
    assert tokenizer.encode("a") == tokenizer.encode("a", bos=False)


def test_ids_past_the_vocabulary_and_special_ones_are_no_text(text_folders, tmp_path):
    """A padded embedding has ids that no token has, a declared id may leave a gap: skipped."""
    gap = tmp_path / "gap"
    write_json(gap, tokenizer_config={"added_tokens_decoder": {"5000": declared("<new>")}})
    shutil.copy(SMALL / "tokenizer.model", gap)
    tokenizer = K.load_tokenizer(gap)
    assert tokenizer.vocab_size == 5001 and tokenizer.encode("<new>") == [1, 5000]
    assert tokenizer.decode([4500, 5000, 4999]) == "<new>" and tokenizer.piece(4500) == "<4500>"
    for folder in (
        text_folders["llama3"],
        text_folders["llama2 added"] / "sentencepiece",
        SMALL,
        gap,
    ):
        tokenizer = K.load_tokenizer(folder)
        ids = tokenizer.encode("hi there")
        past = [tokenizer.vocab_size, tokenizer.vocab_size + 7, 10**9]
        assert tokenizer.decode([*past, *ids, *past]) == "hi there"
        assert tokenizer.piece(past[0]) == f"<{past[0]}>"


def test_pieces_for_display(text_folders):
    """A piece is the text it stands for; special tokens show their names, half characters bytes."""
    for folder in (
        text_folders["llama3"],
        text_folders["llama2"],
        text_folders["llama2"] / "sentencepiece",
    ):
        tokenizer = K.load_tokenizer(folder)
        ids = tokenizer.encode(" def f():\n  return '🦙'")
        pieces = [tokenizer.piece(i) for i in ids]
        assert pieces[0] in ("<|begin|>", "<s>")
        assert "".join(pieces[1:]).replace("<0xF0><0x9F><0xA6><0x99>", "🦙") in (
            " def f():\n  return '🦙'"
        )


def test_no_tokenizer_shows_numbers():
    """Random weights: bytes in, ids out."""
    tokenizer = K.NoTokenizer(100)
    assert tokenizer.encode("aé") == [97, 0xC3 % 100, 0xA9 % 100]
    assert tokenizer.decode([5, 7]) == "<5><7>" and tokenizer.piece(5) == "<5>"


# ---- Streams ----


@pytest.mark.parametrize(
    "name", ["llama3", "qwen", "llama2", "llama2 no prefix", "mistral", "sentencepiece", "shipped"]
)
def test_text_stream_equals_decode_of_the_whole(text_folders, name):
    """Token by token, every prefix of every hostile text is shown as far as its characters are
    whole, and U+FFFD is only shown where the text has one."""
    inside = {"sentencepiece": text_folders["llama2"] / "sentencepiece", "shipped": SMALL}
    tokenizer = K.load_tokenizer(inside[name] if name in inside else text_folders[name])
    for text in HOSTILE.values():
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids)
        stream, shown = K.TextStream(tokenizer), ""
        for token in ids:
            shown += stream.push(token)
            assert whole.startswith(shown)
        assert shown == whole and stream.finish() == ""
        for cut in range(len(ids)):  # a prompt, and its reply
            stream = K.TextStream(tokenizer, ids[:cut])
            reply = "".join(map(stream.push, ids[cut:])) + stream.finish()
            assert whole.endswith(reply)
            if not tokenizer.decode(ids[:cut]).endswith(UNKNOWN):
                assert tokenizer.decode(ids[:cut]) + reply == whole


def test_a_character_is_shown_with_its_last_byte(text_folders):
    """Four bytes of an emoji in four tokens: nothing, nothing, nothing, the emoji; then at once."""
    for folder in (text_folders["llama2"], text_folders["llama2"] / "sentencepiece"):
        tokenizer = K.load_tokenizer(folder)
        byte = [tokenizer.encode("🦙", bos=False)[-4:], tokenizer.encode("a", bos=False)[-1:]]
        stream = K.TextStream(tokenizer, tokenizer.encode("x"))
        assert [stream.push(i) for i in byte[0] + byte[0]] == ["", "", "", "🦙"] * 2
        assert [stream.push(i) for i in byte[0][:2]] == ["", ""]  # cut off by a word
        assert stream.push(byte[1][0]).startswith(UNKNOWN) and stream.finish() == ""
        stream.push(byte[0][0])
        assert stream.finish() == UNKNOWN


def test_a_reply_keeps_its_leading_space_only_after_a_prompt(text_folders):
    """Sentencepiece writes the space before a word into the word's piece."""
    for folder in (text_folders["llama2"], text_folders["llama2"] / "sentencepiece"):
        tokenizer = K.load_tokenizer(folder)
        bos, *reply = tokenizer.encode("return x")
        for prompt, text in (([], "return x"), ([bos], "return x"), ([bos, *reply], " return x")):
            stream = K.TextStream(tokenizer, prompt)
            assert "".join(map(stream.push, reply)) + stream.finish() == text


def first_stop(text: str, stop: list[str]) -> int | None:
    """Where the text is to be cut: brute force."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return min(starts)
    return None


def test_stop_strings_equal_brute_force_however_the_text_is_cut():
    """What is shown after each push is all the text but what could still become a stop string."""
    rng = random.Random(0)
    for _ in range(3000):
        stop = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(0, 3))]
        text = "".join(rng.choices("abc", k=rng.randint(0, 20)))
        stops, shown, seen, found = K.StopStrings(stop), "", "", False
        while len(seen) < len(text) and not found:
            part = text[len(seen) : len(seen) + rng.randint(0, 6)]
            new, found = stops.push(part)
            seen, shown = seen + part, shown + new
            cut = first_stop(seen, stop)
            assert found == (cut is not None)
            held = [n for n in range(len(seen) + 1) if any(s.startswith(seen[n:]) for s in stop)]
            assert shown == seen[: min(held, default=len(seen)) if cut is None else cut]
        shown += stops.finish()
        assert shown == text[: first_stop(text, stop) if found else len(text)]
        if found:
            assert stops.push("more") == ("", True) and stops.finish() == ""


def test_stop_strings_refuse_an_empty_one():
    """An empty stop string would stop before the first character; a bare string is a mistake."""
    for stop in ([""], ["a", ""], "abc", [1]):
        with pytest.raises(ValueError, match="stop must be"):
            K.StopStrings(stop)


# ---- Chat templates ----

CHATML_CHAT = """\
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- if tools %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- tools | tojson(indent=2) }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, seen='') %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and message.content is string %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "tool" and loop.previtem is undefined %}{%- continue %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content is defined %}
        {{- '<think>' + message.reasoning_content + message.thinking + '</think>' }}
    {%- endif %}
    {%- if message.role == 'assistant' and '</think>' in message.content %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- content if loop.index0 < ns.last else message.content }}
    {%- else %}
        {{- message.content | trim }}
    {%- endif %}
    {{- '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA2_CHAT = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
LLAMA3_CHAT = """\
{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {{- '{"name": "' + message.tool_calls[0].name + '"}' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL_CHAT = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {%- generation %}{{- " " + message["content"]|trim + eos_token}}{%- endgeneration %}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, not " + message.role) }}
    {%- endif %}
{%- endfor %}
{{- user_messages | length }} {{ unk_token }}{{ sep_token }}
"""
DEEPSEEK_CHAT = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}"
    "{% endif %}"
    "{% set ns = namespace(is_first=false, is_tool=false, system_prompt='', self=1) %}"
    "{%- for message in messages %}{%- if message['role'] == 'system' %}"
    "{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}"
    "{{bos_token}}{{ns.system_prompt}}{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}"
    "{{'<｜User｜>' + message['content']}}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is not none %}"
    "{% set content = message['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor -%}"
    "{% set extra = dict(a=1, b=[1, 'ü<']) %}{{ extra | tojson }}{{ dict.fromkeys(['k']) }}"
    "{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"
)
PLAIN = """\
{% for message in messages %}
    {% if message.role != "tool" %}
  {{ message.role }}: {{ message.content }}
    {% endif %}
  {# a comment #}
{% endfor %}
"""
TEMPLATES = {
    "plain": PLAIN,
    "chatml": CHATML_CHAT,
    "llama2": LLAMA2_CHAT,
    "llama3": LLAMA3_CHAT,
    "mistral": MISTRAL_CHAT,
    "deepseek": DEEPSEEK_CHAT,
    "list": [
        {"name": "default", "template": "{{ messages[0].content }}"},
        {"name": "tool_use", "template": "tools: {{ tools | tojson }}{{ messages[0].content }}"},
        {"name": "rag", "template": "{% if %}"},
    ],
}


def message(role: str, content: str | None) -> dict:
    return {"role": role, "content": content}


CHATS = [
    [message("user", "  hi 🦙 <b>&'\"\n")],
    [message("system", "Be brief."), message("user", "1 < 2?")],
    [
        message("user", "a"),
        message("assistant", "<think>\nhm\n</think>\n\nb "),
        message("user", "<s>{{ c }}{% d %}"),
    ],
    [message("user", "a"), message("assistant", "b") | {"tool_calls": None, "reasoning": "c"}],
    [
        message("user", "a"),
        message("assistant", None) | {"tool_calls": [{"name": "f"}]},
        message("tool", "3"),
    ],
]
TOOLS = [{"type": "function", "function": {"name": "fü", "parameters": {"a": "<b>"}}}]


def template_folder(folder: Path, template, **more) -> Path:
    """A folder with no tokenizer to speak of, for it is not the text's business."""
    from tokenizers import Tokenizer, models

    config = NAMES | {"sep_token": declared("<sep>") | {"__type": "AddedToken"}}
    tk = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    return saved(tk, folder, tokenizer_config=config | {"chat_template": template} | more)


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_equal_transformers(tmp_path, name):
    """Every template on every conversation: the same text, or refused by both."""
    import jinja2

    folder = template_folder(tmp_path, TEMPLATES[name])
    theirs = transformers().AutoTokenizer.from_pretrained(folder)
    ours = K.load_chat_template(folder)
    rendered = 0
    for messages in CHATS:
        for prompt in (True, False):
            for more in ({}, {"tools": TOOLS}, {"enable_thinking": False, "eos_token": "!"}):
                arguments = dict(add_generation_prompt=prompt, **more)
                try:
                    expected = theirs.apply_chat_template(messages, tokenize=False, **arguments)
                except jinja2.TemplateError:
                    with pytest.raises(ValueError, match="chat template"):
                        ours.render(messages, **arguments)
                    continue
                assert ours.render(messages, **arguments) == expected
                rendered += 1
    assert rendered >= 12


def test_where_a_chat_template_stands(tmp_path):
    """chat_template.jinja before tokenizer_config.json; a folder without one has none."""
    folder = template_folder(tmp_path, "old {{ messages[0].content }}")
    assert K.load_chat_template(folder).render(CHATS[0]) == "old " + CHATS[0][0]["content"]
    (folder / "chat_template.jinja").write_text("new{{ bos_token }}\n")
    theirs = transformers().AutoTokenizer.from_pretrained(folder)
    assert K.load_chat_template(folder).render(CHATS[0]) == "new<s>"
    assert theirs.apply_chat_template(CHATS[0], tokenize=False) == "new<s>"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].type }}")
    assert K.load_chat_template(folder).render(CHATS[0], tools=TOOLS) == "function"
    assert K.load_chat_template(write_json(tmp_path / "none", tokenizer_config=NAMES)) is None


def test_special_tokens_of_the_older_file(tmp_path):
    """special_tokens_map.json gives a template its bos_token and its like too."""
    folder = write_json(
        tmp_path,
        tokenizer_config={"chat_template": "{{ bos_token }}{{ eos_token }}{{ image_token }}"},
        special_tokens_map={"bos_token": declared("<b>"), "eos_token": "<e>", "image_token": "<i>"},
    )
    assert K.load_chat_template(folder).render(CHATS[0]) == "<b><e><i>"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ dict.update(messages[0], role='system') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages | attr('__class__') }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ namespace.__init__ }}",
        "{% generation %}{{ self.__init__ }}{% endgeneration %}",
        "{{ messages['__class__'] }}",
    ],
)
def test_the_sandbox_holds(tmp_path, template):
    """A template that reaches for Python's internals, or would change the messages, is refused."""
    ours = K.load_chat_template(template_folder(tmp_path, template))
    messages = [message("user", "a")]
    with pytest.raises(ValueError, match="sandbox") as e:
        ours.render(messages)
    assert str(tmp_path) in str(e.value) and "\n" not in str(e.value)
    assert messages == [message("user", "a")]


# ---- Bad input ----


def error_of(f, *args, **kwargs) -> str:
    """The one line of the ValueError."""
    with pytest.raises(ValueError) as e:
        f(*args, **kwargs)
    assert "\n" not in str(e.value)
    return str(e.value)


@pytest.mark.parametrize(
    "template, words",
    [
        ("{% if %}", ["line 1", "does not compile", "mend"]),
        ("a\n{{ x | no_such_filter }}", ["line 2", "no_such_filter"]),
        ("{{ " + "(" * 5000, ["does not compile"]),
        ("{{ raise_exception('no\nsystem role') }}", ["refuses", "no system role"]),
        ("{{ 1 + 'a' }}", ["TypeError"]),
        ("{{ messages[0].content.nothing.more }}", ["UndefinedError", "nothing"]),
        ("{{ range(10 ** 9) | list }}", ["OverflowError"]),
        ([{"name": "rag", "template": ""}], ["default", "rag"]),
        ([{"name": "default"}], ["chat_template must be"]),
        (7, ["chat_template must be"]),
    ],
)
def test_bad_chat_templates(tmp_path, template, words):
    """Each is one line with the file and what is wrong."""
    folder = template_folder(tmp_path, template)
    error = error_of(lambda: K.load_chat_template(folder).render(CHATS[0]))
    for word in [str(folder / "tokenizer_config.json"), *words]:
        assert word in error


def test_bad_messages_and_template_files(tmp_path):
    """No messages, messages that are no objects, a template that is not text."""
    ours = K.load_chat_template(template_folder(tmp_path, "x"))
    for messages in ([], ["hi"], [None]):
        assert "messages must be" in error_of(ours.render, messages)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    error = error_of(K.load_chat_template, tmp_path)
    assert "chat_template.jinja" in error and "UTF-8" in error


PIECES = (SMALL / "tokenizer.model").read_bytes()


@pytest.mark.parametrize(
    "file, data, words",
    [
        ("tokenizer.model", b'{"version": "1.0"}', ["JSON", "tokenizer.json"]),
        ("tokenizer.model", b"IQ== 0\nIg== 1\nIw== 2\n", ["tiktoken", "Meta", "tokenizer.json"]),
        ("tokenizer.model", PIECES[:30000], ["cut short", "copy it again"]),
        ("tokenizer.model", PIECES[:-1], ["cut short"]),
        ("tokenizer.model", b"", ["empty"]),
        (
            "tokenizer.model",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
            ["git lfs pull"],
        ),
        ("tokenizer.json", b'{"model_type": "llama"}', ["JSON of another kind"]),
        ("tokenizer.json", b"[]", ["JSON of another kind"]),
        ("tokenizer.json", b'{"version": "1.0", "mod', ["cut short"]),
        ("tokenizer.json", PIECES[:1000], ["copy it again"]),
        ("tokenizer.json", b"", ["empty"]),
    ],
)
def test_a_file_that_is_not_a_tokenizer(tmp_path, file, data, words):
    """The error names the file, what it is and the mend."""
    (tmp_path / file).write_bytes(data)
    error = error_of(K.load_tokenizer, tmp_path)
    for word in [str(tmp_path / file), *words]:
        assert word in error


BAD_FIELDS = [
    ("tokenizer_config", b"{", ["cut short"]),
    ("tokenizer_config", b"[1]", ["not a JSON object"]),
    ("tokenizer_config", b"\xff", ["copy it again"]),
    ("tokenizer_config", b"[" * 100_000, ["tokenizer_config.json"]),
    ("tokenizer_config", {"add_bos_token": "yes"}, ["add_bos_token", "true or false"]),
    ("tokenizer_config", {"bos_token": 3}, ["bos_token", "string"]),
    ("tokenizer_config", {"bos_token": {"text": "<s>"}}, ["bos_token", "content"]),
    ("tokenizer_config", {"added_tokens_decoder": ["<s>"]}, ["added_tokens_decoder"]),
    ("tokenizer_config", {"added_tokens_decoder": {"a": "<s>"}}, ["added_tokens_decoder", "ids"]),
    ("tokenizer_config", {"added_tokens_decoder": {"3": 4}}, ["added_tokens_decoder: 3"]),
    ("tokenizer_config", {"additional_special_tokens": "<s>"}, ["additional_special_tokens"]),
    ("tokenizer_config", {"extra_special_tokens": [1]}, ["extra_special_tokens"]),
    ("tokenizer_config", {"extra_special_tokens": {"a_token": 1}}, ["a_token"]),
    ("special_tokens_map", b"", ["empty"]),
    ("special_tokens_map", {"eos_token": []}, ["eos_token"]),
    ("special_tokens_map", {"eos_token": 5}, ["special_tokens_map.json", "eos_token"]),
    ("added_tokens", {"<a>": "4"}, ["added_tokens.json", "whole number"]),
    ("added_tokens", {"<a>": -4}, ["added_tokens.json", "whole number"]),
    ("added_tokens", b"null", ["not a JSON object"]),
]


@pytest.mark.parametrize("kind", ["tokenizer.model", "tokenizer.json"])
@pytest.mark.parametrize("name, content, words", BAD_FIELDS)
def test_bad_fields_beside_the_tokenizer(text_folders, tmp_path, kind, name, content, words):
    """The error names the file and the field, whichever tokenizer stands beside it."""
    source = SMALL if kind == "tokenizer.model" else text_folders["qwen"]
    shutil.copy(source / kind, tmp_path)
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (tmp_path / f"{name}.json").write_bytes(data)
    error = error_of(K.load_tokenizer, tmp_path)
    for word in [str(tmp_path), f"{name}.json", *words]:
        assert word in error


def test_bos_that_is_not_there(text_folders, tmp_path):
    """add_bos_token without a BOS token, for both kinds of tokenizer."""
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(bos_id=-1))
    write_json(tmp_path, tokenizer_config={"add_bos_token": True})
    assert "add_bos_token" in error_of(K.load_tokenizer, tmp_path)
    shutil.copy(text_folders["qwen"] / "tokenizer.json", tmp_path)
    error = error_of(K.load_tokenizer, tmp_path)
    assert "tokenizer_config.json" in error and "set bos_token" in error
    shutil.copy(text_folders["llama3"] / "tokenizer.json", tmp_path)  # adds one by itself
    assert K.load_tokenizer(tmp_path).piece(K.load_tokenizer(tmp_path).encode("")[0]) == "<|begin|>"


def test_a_folder_without_a_tokenizer(tmp_path):
    """The error names both files."""
    error = error_of(K.load_tokenizer, tmp_path)
    assert "tokenizer.json" in error and "tokenizer.model" in error and str(tmp_path) in error


def test_half_a_surrogate_pair_is_refused(text_folders):
    """What is not Unicode text, as from a command line with broken bytes, is a ValueError."""
    for folder in (SMALL, text_folders["llama3"]):
        assert "surrogate" in error_of(K.load_tokenizer(folder).encode, "a\udcff")


def test_eos_ids(tmp_path):
    """config.json's, then generation_config.json's, int or list, none twice; else refused."""
    assert K.eos_ids(tmp_path, (2,)) == (2,)
    for value, ids in ((5, (2, 5)), ([5, 2, 7, 5], (2, 5, 7)), (None, (2,)), ([], (2,))):
        write_json(tmp_path, generation_config={"eos_token_id": value})
        assert K.eos_ids(tmp_path, (2,)) == ids
    write_json(tmp_path, generation_config={})
    assert K.eos_ids(tmp_path, ()) == ()
    for value in ("2", [1, None], 1.5, True, {"a": 1}):
        write_json(tmp_path, generation_config={"eos_token_id": value})
        error = error_of(K.eos_ids, tmp_path, ())
        assert "generation_config.json" in error and "eos_token_id" in error
    for data in (b"{", b"[2]", b""):
        (tmp_path / "generation_config.json").write_bytes(data)
        assert "generation_config.json" in error_of(K.eos_ids, tmp_path, ())


def test_tokenizer_py_stands_alone(tmp_path):
    """In an empty folder it imports without any of its libraries, and checks itself."""
    shutil.copy(REPO / "tokenizer.py", tmp_path)
    heavy = "{'torch', 'transformers', 'sentencepiece', 'tokenizers', 'jinja2'}"
    code = f"import sys, tokenizer; assert not {heavy} & set(sys.modules)"
    for argv in (["-c", code], ["tokenizer.py"]):
        done = subprocess.run(
            [sys.executable, *argv], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
    assert "us per token" in done.stdout


# --------------------------------------------------------------------------------------------------
# generate.py
# --------------------------------------------------------------------------------------------------


GREEDY = S.Sampling(temperature=0)


def new_tokens(decoder: G.Decoder, prompt: list[int], n: int, eos=(), cached=0) -> list[list[int]]:
    """n steps of the program's own loop: a list of tokens per row."""
    rows = [silent_row(eos) for _ in range(decoder.batch)]
    for _ in G.run_rows(decoder, prompt, rows, n, cached=cached):
        pass
    return [row.tokens for row in rows]


def silent_row(eos=(), stop=()) -> G.Continuation:
    tokenizer = K.NoTokenizer(1000)
    stream, stops = K.TextStream(tokenizer), K.StopStrings(stop)
    return G.Continuation(tokenizer, stream, stops, eos, lambda text: None)


@pytest.mark.parametrize("length", [5, 40])
def test_decoder_equals_the_plain_model(length, monkeypatch):
    """Greedy tokens through prefill, cache and decode == argmax of the full forward, chunked or
    not."""
    config = tiny()
    model, prompt = random_model(config), random_tokens(config, 1, length)
    monkeypatch.setattr(G, "PREFILL_CHUNK", 16)
    [got] = new_tokens(G.Decoder(model, length + 30, GREEDY), prompt[0].tolist(), 30)
    tokens = prompt
    for _ in range(30):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    assert got == tokens[0, length:].tolist()


def test_dynamic_rope_prefills_a_prompt_as_one(monkeypatch):
    """With dynamic NTK the angles follow the length of the call: the prompt is not cut."""
    config = tiny(max_seq_len=16, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    model, prompt = random_model(config), random_tokens(config, 1, 30)
    monkeypatch.setattr(G, "PREFILL_CHUNK", 8)
    logits = G.prefill(model, prompt, M.KVCache(config, 1, 32))
    assert relative(logits, model(prompt)[:, -1]) < 1e-5 and config.context == 32


def test_generation_stops_at_any_eos():
    """The first id of eos_ids ends the text and is its last token; ignored, it is one of many."""
    config = tiny()
    model, prompt = random_model(config), random_tokens(config, 1, 5)[0].tolist()
    decoder = G.Decoder(model, 64, GREEDY)
    [free] = new_tokens(decoder, prompt, 30)
    stop = free[7]
    assert new_tokens(decoder, prompt, 30, (1000, stop)) == [free[: free.index(stop) + 1]]


def test_same_seed_same_tokens():
    """A seed decides the text; another seed gives another; what ran before does not matter."""
    model, prompt = random_model(tiny(), std=0.05), random_tokens(tiny(), 1, 5)[0].tolist()
    first, other, again = (
        new_tokens(G.Decoder(model, 64, S.Sampling(seed=seed)), prompt, 40) for seed in (7, 8, 7)
    )
    assert first == again != other


def test_n_samples_equal_n_runs_alone():
    """n continuations in lockstep over one prefilled prompt == n runs with seed, seed + 1, ...;
    penalties and EOS are each row's own."""
    model, prompt = random_model(tiny(), std=0.05), random_tokens(tiny(), 1, 9)[0].tolist()
    how = S.Sampling(0.9, top_p=0.95, frequency_penalty=0.5, repetition_penalty=1.2, seed=3)
    together = G.Decoder(model, 64, how, batch=4)
    for eos in ((), tuple(range(20, 30))):
        alone = [
            new_tokens(G.Decoder(model, 64, replace(how, seed=3 + b)), prompt, 40, eos)[0]
            for b in range(4)
        ]
        assert new_tokens(together, prompt, 40, eos) == alone
    assert len({len(tokens) for tokens in alone}) > 1  # rows ended at different steps


@pytest.mark.skipif(
    not has_compiler(), reason="torch.compile on CPU needs a C++ compiler, and there is none"
)
@pytest.mark.parametrize("kind", ["greedy", "sampled", "latent-experts"])
def test_compiled_decode_equals_eager(kind):
    """The compiled step (static cache, sampler, absorbed MLA, gathered experts) gives the eager
    tokens, compiled once."""
    torch._dynamo.reset()
    config = latent() if kind == "latent-experts" else tiny()
    how = S.Sampling(0.9, top_k=20, presence_penalty=0.3, seed=5) if kind == "sampled" else GREEDY
    model, batch = random_model(config), 9 if kind == "latent-experts" else 1
    prompts = [random_tokens(config, n, seed=n).tolist() for n in (5, 23)]
    eager = G.Decoder(model, 64, how, batch)
    expected = [new_tokens(eager, p, 30) for p in prompts]
    compiled = G.Decoder(model, 64, how, batch, compiled=True)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert [new_tokens(compiled, p, 30) for p in prompts] == expected


def test_bytes_per_step_counts_what_is_read():
    """Weights that multiply + one embedding row + the used cache; a tied embedding is read as the
    head; of experts those that a token meets; multi-token prediction not."""
    config = tiny()
    model = random_model(config)
    decoder = G.Decoder(model, 64, GREEDY)
    decoder.start(random_tokens(config, 10).tolist())
    weights = sum(p.numel() for p in model.parameters()) - (config.vocab_size - 1) * config.dim
    cache = 2 * config.n_layers * config.n_kv_heads * config.head_dim
    assert decoder.bytes_per_step() == 4 * (weights + cache * 10)
    decoder.next()
    assert decoder.bytes_per_step() == 4 * (weights + cache * 11)
    assert decoder.cache.bytes_read() == 4 * cache * 64
    tied = random_model(tiny(tie_embeddings=True))
    assert G.weight_bytes(tied) == 4 * sum(p.numel() for p in tied.parameters())
    moe = random_model(latent(tie_embeddings=True))
    met = sum(
        p.numel() * (3 / 8 if p.dim() == 3 else 1)
        for name, p in moe.named_parameters()
        if not name.startswith("mtp")
    )
    assert G.weight_bytes(moe) == 4 * met
    one_latent = moe.config.n_layers * (24 + 8)
    assert M.KVCache(moe.config, 1, 64).bytes_read(10) == 4 * 10 * one_latent


def byte_tokenizer(folder: Path) -> Path:
    """A tokenizer.json that knows the letters."""
    from tokenizers import Tokenizer, models

    path = folder / "letters.json"
    Tokenizer(models.BPE({chr(97 + i): i for i in range(26)}, [])).save(str(path))
    return path


def test_logits_that_are_not_finite_are_an_error(tmp_path, capsys):
    """NaN weights end in one clear line, not in token 0."""
    model = random_model(tiny())
    model.norm.weight[3] = math.nan
    for how in (GREEDY, S.Sampling()):
        with pytest.raises(ValueError, match="not finite"):
            G.Decoder(model, 32, how).start([5, 6])
    M.save_checkpoint(model, tmp_path)
    shutil.copy(byte_tokenizer(tmp_path), tmp_path / "tokenizer.json")
    (tmp_path / "text").write_text("abc")
    argv = ["--score", str(tmp_path / "text"), "--checkpoint", str(tmp_path)]
    assert G.main(argv) == 2 and "not finite" in capsys.readouterr().err


@pytest.mark.parametrize("window", [100, 64, 17])
def test_score_is_the_log_probability_of_every_token(window, monkeypatch):
    """--score's numbers == log_softmax of the plain forward; past the window each token has at
    least half a window before it."""
    model = random_model(tiny())
    ids = random_tokens(tiny(), 64).tolist()
    monkeypatch.setattr(G, "PREFILL_CHUNK", 10)
    chosen, best, best_ids = map(torch.cat, zip(*G.score(model, ids, window, top=3)))
    assert chosen.shape == (63,) and best.shape == best_ids.shape == (63, 3)
    done, half = 1, max(1, window // 2)
    while done < 64:
        begin = 0 if done == 1 else done - half
        for i in range(done, min(64, begin + window)):
            logp = model(torch.tensor([ids[begin:i]]))[0, -1].log_softmax(-1)
            assert abs(logp[ids[i]] - chosen[i - 1]) < 1e-4 and i - begin >= min(i, half)
            assert torch.equal(logp.topk(3).indices, best_ids[i - 1])
        done = begin + window


# ---- conversations ----

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat_folder(tmp_path: Path, template: str | None = CHATML) -> Path:
    shutil.copytree(SMALL, tmp_path / "chat")
    if template is not None:
        (tmp_path / "chat" / "chat_template.jinja").write_text(template)
    return tmp_path / "chat"


def a_chat(folder: Path, how: S.Sampling = GREEDY, system: str | None = None) -> G.Chat:
    model, tokenizer = M.load_checkpoint(folder, dtype=torch.float32), K.load_tokenizer(folder)
    decoder = G.Decoder(model, 400, how, 1, (2,))
    return G.Chat(decoder, tokenizer, K.load_chat_template(folder), system)


def ask(chat: G.Chat, line: str, n: int = 12, stop=(), how=GREEDY) -> tuple[int, int, str]:
    """(ids in the prompt, of which the cache held, the reply)."""
    row = G.Continuation(
        chat.tokenizer, K.TextStream(chat.tokenizer), K.StopStrings(stop), (2,), lambda text: None
    )
    steps = chat.ask(line, how, n, row, 400)
    held = next(steps)
    prompt = len(chat.ids_for(line)[1])
    for _ in steps:
        pass
    return prompt, held, row.text


@pytest.mark.parametrize("with_template", [True, False])
def test_chat_prefills_only_what_is_new(with_template, tmp_path):
    """Over four turns the cache keeps all that was said (but its last token, which never ran), and
    each reply is what a fresh cache gives for the same ids."""
    chat = a_chat(chat_folder(tmp_path, CHATML if with_template else None))
    told = 0
    for line in ("class Stack:\n", "def push(self, x):\n", "import os\n", "x = 1\n"):
        _, ids = chat.ids_for(line)
        prompt, held, reply = ask(chat, line)
        assert held == max(0, told - 1) and prompt > held
        fresh = G.Decoder(chat.decoder.model, 400, GREEDY, 1, (2,))
        [expected] = new_tokens(fresh, ids, 12, (2,))
        assert chat.ids == ids + expected
        told = len(chat.ids)
        assert chat.decoder.cache.length == chat.decoder.used == told - 1
    if with_template:
        roles = [m["role"] for m in chat.messages]
        assert roles == ["user", "assistant"] * 4 and chat.messages[-1]["content"] == reply
    chat.reset()
    assert ask(chat, "class Stack:\n")[1] <= 1  # a common BOS at most


def test_chat_whose_template_rewrites_history_stays_right(tmp_path):
    """A template that drops earlier replies: the cache is cut back to what still holds."""
    template = CHATML.replace("{% for", "{% for m in messages if 0 %}{% endfor %}{% for").replace(
        "{{ m.content }}", "{{ m.content if m.role == 'user' else '...' }}"
    )
    chat = a_chat(chat_folder(tmp_path, template), system="be brief")
    for line in ("class Stack:\n", "def push(self, x):\n", "import os\n"):
        _, ids = chat.ids_for(line)
        _, held, _ = ask(chat, line)
        [expected] = new_tokens(G.Decoder(chat.decoder.model, 400, GREEDY), ids, 12)
        assert chat.ids == ids + expected
    assert held > 10  # the first turn's beginning was kept


def test_chat_after_a_stop_string_or_an_interruption_stays_right(tmp_path):
    """What is in the cache and what was said differ after a stop string: the next turn is
    tokenized anew. An abandoned reply is remembered as far as it came."""
    chat = a_chat(chat_folder(tmp_path))
    _, _, reply = ask(chat, "class Stack:\n", 40)
    chat.reset()
    stop = reply[10:14]
    assert ask(chat, "class Stack:\n", 40, [stop])[2] == reply[: reply.index(stop)]
    text, ids = chat.ids_for("more\n")
    assert ids == chat.tokenizer.encode(text, bos=False) and stop not in text

    row = G.Continuation(
        chat.tokenizer, K.TextStream(chat.tokenizer), K.StopStrings(()), (2,), lambda text: None
    )
    steps = chat.ask("more\n", GREEDY, 100, row, 400)
    for _ in range(6):
        next(steps)
    steps.close()  # as Ctrl-C does
    assert row.finish == "interrupted" and len(row.tokens) == 5
    assert chat.messages[-1]["content"] == row.text
    _, ids = chat.ids_for("and more\n")
    ask(chat, "and more\n")
    [expected] = new_tokens(G.Decoder(chat.decoder.model, 400, GREEDY), ids, 12)
    assert chat.ids == ids + expected


@pytest.mark.parametrize("with_template", [True, False])
def test_chat_interrupted_inside_a_layer_stays_right(with_template, tmp_path):
    """Ctrl-C falls into the middle of a step as a rule, some layers' slots written and some not:
    nothing of that step counts as cached. Neither does a prefill that was cut off."""
    chat = a_chat(chat_folder(tmp_path, CHATML if with_template else None))
    layers, calls = chat.decoder.model.layers, []
    model = M.load_checkpoint(SMALL, dtype=torch.float32)

    def interrupt(*args):
        calls.append(1)
        if len(calls) in (1, 8, 17):
            raise KeyboardInterrupt

    layers[3].register_forward_pre_hook(interrupt)
    for line in ("class Stack:\n", "def push(self, x):\n", "import os\n", "x = 1\n"):
        row = G.Continuation(
            chat.tokenizer, K.TextStream(chat.tokenizer), K.StopStrings(()), (2,), lambda text: None
        )
        steps = chat.ask(line, GREEDY, 12, row, 400)
        try:
            for _ in steps:
                pass
        except KeyboardInterrupt:
            pass
        used, cache = chat.decoder.used, M.KVCache(model.config, 1, 400)
        if used:
            model(torch.tensor([chat.ids[:used]]), attend=cache.attend)
        for ours, fresh in zip((*chat.decoder.cache.k, *chat.decoder.cache.v), cache.k + cache.v):
            torch.testing.assert_close(ours[:, :, :used], fresh[:, :, :used], atol=1e-4, rtol=1e-4)
    assert len(calls) == 29 and len(row.tokens) == 12


def test_plain_chat_remembers_after_a_stop_string(tmp_path):
    """Without a template, too, a stop string ends a reply and not the conversation."""
    chat = a_chat(chat_folder(tmp_path, None))
    _, _, whole = ask(chat, "class Stack:\n", 30)
    chat.reset()
    stop = whole[10:14]
    _, _, reply = ask(chat, "class Stack:\n", 30, [stop])
    text, ids = chat.ids_for("more\n")
    assert text == "class Stack:\n" + reply + "more\n" and ids == chat.tokenizer.encode(text)


def test_chat_edge_cases(tmp_path):
    """An empty system message is one; a prompt without a token is a message, not a crash; an EOS
    that is an ordinary token is no part of the text."""
    folder = chat_folder(tmp_path)
    assert a_chat(folder, system="").messages == [{"role": "system", "content": ""}]
    (folder / "chat_template.jinja").write_text("{{ '' }}")
    with pytest.raises(ValueError, match="no tokens"):
        ask(a_chat(folder), "hello")
    row = silent_row(eos=(7,))
    row.push(5), row.push(7)
    assert row.text == "<5>" and row.finish == "eos" and row.tokens == [5, 7]


def test_interactive_as_a_user_runs_it(tmp_path):
    """Lines in, replies out; Ctrl-C stops a reply, the next line is answered; /reset, /quit; a
    full cache is a message, not an end."""
    argv = [sys.executable, REPO / "generate.py", "--interactive", "--max-new-tokens", "100000"]
    argv += ["--checkpoint", chat_folder(tmp_path), "--ignore-eos", "--context", "120"]
    p = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV
    )

    def say(line: str) -> None:
        p.stdin.write(line.encode() + b"\n")
        p.stdin.flush()

    say("class A:")
    first = p.stdout.read(10)  # it has begun
    p.send_signal(signal.SIGINT)
    notes = [p.stderr.readline().decode() for _ in range(2)]
    say("x " * 100)
    notes.append(p.stderr.readline().decode())
    say("/reset")
    say("def f():")
    notes += [p.stderr.readline().decode() for _ in range(2)]
    say("/quit")
    out, err = p.communicate(timeout=60)
    assert p.returncode == 0 and len(first) == 10 and len(out) > 20, err
    assert "120 tokens of context" in notes[0] and "new in" in notes[1]
    assert "/reset" in notes[2] and "forgotten" in notes[3] and " 0 of them" in notes[4]


def test_chat_flag_and_bad_templates(tmp_path, capsys):
    """--chat wraps the prompt; a template that reaches for Python, or refuses: one clear line."""
    folder = chat_folder(tmp_path)
    argv = ["hi", "--chat", "--system", "s", "--checkpoint", str(folder), "--max-new-tokens", "3"]
    assert G.main([*argv, "--json"]) == 0
    wrapped = json.loads(capsys.readouterr().out)["prompt_tokens"]
    text = "<system>s</system>\n<user>hi</user>\n<assistant>"
    assert wrapped == len(K.load_tokenizer(SMALL).encode(text, bos=False))
    for template, words in (
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", ["chat_template.jinja", "sandbox"]),
        ("{{ raise_exception('no system here') }}", ["no system here"]),
        ("{% if %}", ["chat_template.jinja", "compile"]),
    ):
        (folder / "chat_template.jinja").write_text(template)
        assert G.main(argv) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and all(w in error for w in words), error
    (folder / "chat_template.jinja").unlink()
    assert G.main(argv) == 2 and "no chat template" in capsys.readouterr().err


# ---- the program ----


GOLDEN_PROMPT = "def open(self, name, mode='r'):\n"
GOLDEN_TEXT = (
    '    """Print a file-like object.\n'
    "\n"
    "    The file is a file object, and the file is a file object.\n"
    '    """\n'
    "    if mode is None:\n"
    "        return mode\n"
    "\n"
    "    def open(self, mode=None):\n"
    '        """Close the file to open a file.\n'
    "\n"
    "        If mode is"
)


def test_golden_greedy_text():
    """The shipped checkpoint, greedily, writes exactly this: model, loader, tokenizer and decode
    in one line."""
    argv = [GOLDEN_PROMPT, "--temperature", "0", "--max-new-tokens", "64", "--dtype", "fp32"]
    done = run("generate.py", *argv)
    assert done.returncode == 0, done.stderr
    assert done.stdout == GOLDEN_PROMPT + GOLDEN_TEXT + "\n"


KEYWORDS = set("def return if self for in not None raise else class is try import".split())


@pytest.mark.parametrize("folder", [SMALL, MOE], ids=["small", "moe"])
def test_shipped_model_writes_recognisable_python(folder):
    """Eight samples: keywords abound and nearly every line is indented by a multiple of four."""
    model, tokenizer = M.load_checkpoint(folder), K.load_tokenizer(folder)
    decoder = G.Decoder(model, 256, S.Sampling(0.8), batch=8, eos=(2,))
    with torch.inference_mode():
        rows = new_tokens(decoder, tokenizer.encode(G.DEFAULT_PROMPT), 120, (2,))
    text = "\n".join(map(tokenizer.decode, rows))
    words = re.findall(r"[A-Za-z_]+", text)
    keywords = sum(w in KEYWORDS for w in words)
    indents = [len(line) - len(line.lstrip(" ")) for line in text.splitlines() if line.strip()]
    assert keywords / len(words) > 0.12, keywords / len(words)
    assert sum(i % 4 == 0 for i in indents) / len(indents) > 0.8


def test_shipped_checkpoints_share_a_tokenizer():
    """main ~5M, draft ~1M and DeepSeek-form ~4M parameters, one tokenizer, bf16 (but the routing
    corrections), the first two together at most 16 MB, the third at most 8 MB."""
    models = {d: M.load_checkpoint(d) for d in (SMALL, DRAFT, MOE)}
    sizes = {d: sum(p.numel() for p in m.parameters()) for d, m in models.items()}
    assert 4e6 < sizes[SMALL] < 6e6 and 0.8e6 < sizes[DRAFT] < 1.5e6 and 3e6 < sizes[MOE] < 4e6
    assert len({(d / "tokenizer.model").read_bytes() for d in models}) == 1
    disk = {d: sum(f.stat().st_size for f in d.rglob("*") if f.is_file()) for d in models}
    assert disk[SMALL] + disk[DRAFT] <= 16e6 and disk[MOE] <= 8e6
    for model in models.values():
        assert all(p.dtype == torch.bfloat16 for p in model.parameters())
        assert all(b.dtype == torch.float32 for b in model.buffers())


def counting(experts, counts: torch.Tensor):
    """The experts hook, counting what goes through it."""

    def run(x, weights, ids, *matrices):
        counts.add_(ids.flatten().bincount(minlength=len(counts)))
        return experts(x, weights, ids, *matrices)

    return run


def test_shipped_deepseek_form_uses_all_its_parts():
    """On Python it has not seen (this file): the experts are all in use; the MTP layer, told the
    next token, predicts the one after it about as well as the model the next; absorbed ==
    expanded on trained weights."""
    model, tokenizer = M.load_checkpoint(MOE, dtype=torch.float32), K.load_tokenizer(MOE)
    assert model.config.family == "deepseek_v3" and len(model.mtp) == 1
    ids = tokenizer.encode(Path(__file__).read_text())[:512]
    tokens, loads = torch.tensor([ids]), []
    for layer in model.layers:
        if isinstance(layer.mlp, M.MoE):
            loads.append(torch.zeros(model.config.n_experts))
            layer.mlp.experts = counting(layer.mlp.experts, loads[-1])
    with torch.inference_mode():
        hidden = model(tokens, return_hidden=True)
        ahead = model.predict_further(hidden[:, :-1], tokens[:, 1:])
        loss = F.cross_entropy(model.head(hidden[0, :-1]), tokens[0, 1:]).item()
        further = F.cross_entropy(model.head(ahead[0, :-1]), tokens[0, 2:]).item()
        assert loss < 0.7 * math.log(4096) and further < 1.1 * loss, (loss, further)
        assert all((c > 0).all() and c.max() < 4 * c.mean() for c in loads), loads
        cache, parts = M.KVCache(model.config, 1, 64), []
        for i in range(64):
            parts.append(model(tokens[:, i : i + 1], torch.tensor([i]), cache.attend))
        assert relative(torch.cat(parts, 1), model(tokens[:, :64])) <= 1e-5


def test_generate_as_a_user_runs_it():
    """Prompt by argument and by pipe, text on stdout, one line of facts on stderr; the first text
    within 5 s."""
    start = time.perf_counter()
    p = subprocess.Popen(
        [sys.executable, REPO / "generate.py", "--max-new-tokens", "30"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=REPO,
    )
    p.stdout.read(len(G.DEFAULT_PROMPT) + 1)
    waited = time.perf_counter() - start
    out, err = p.communicate(timeout=60)
    assert p.returncode == 0 and waited < 5, (waited, err)
    facts = err.decode().strip().splitlines()
    assert len(facts) == 1 and re.search(
        r"loaded in .* first token after .* tok/s .* GB/s, \d+% of", facts[0]
    ), facts
    by_argument = run("generate.py", "def f(", "--max-new-tokens", "12", "--seed", "3")
    by_pipe = run("generate.py", "--max-new-tokens", "12", "--seed", "3", stdin="def f(")
    assert by_argument.stdout == by_pipe.stdout and by_argument.stdout.startswith("def f(")


def test_generate_json_and_bench():
    """--json prints one object: text, ids, facts; --bench repeats and ignores EOS; --dummy needs
    no files."""
    done = run("generate.py", "import os", "--json", "--max-new-tokens", "9", "--temperature", "0")
    answer = json.loads(done.stdout)
    assert len(answer["tokens"]) == answer["new_tokens"] <= 9
    assert K.load_tokenizer(SMALL).decode(answer["tokens"]) == answer["text"]
    facts = "load_seconds first_token_seconds tokens_per_second gigabytes_per_second"
    for fact in (*facts.split(), "bandwidth_share"):
        assert answer[fact] > 0, fact
    argv = ["--dummy", "draft", "--prompt-tokens", "16", "--bench", "2", "--json"]
    done = run("generate.py", *argv, "--max-new-tokens", "5", "--dtype", "fp32")
    answer = json.loads(done.stdout)
    assert answer["new_tokens"] == 5 and answer["prompt_tokens"] == 16


def through_main(capsys, *argv: str) -> dict:
    """The JSON answer of the program, in this process, in fp32."""
    assert G.main([*argv, "--json", "--device", "cpu", "--dtype", "fp32"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_sampling_flag_reaches_the_sampler(capsys):
    """Each flag changes what it should in the program's answer, and nothing is ignored."""
    base = ["class Stack:\n", "--max-new-tokens", "40"]
    greedy = through_main(capsys, *base, "--temperature", "0")
    first, text = greedy["tokens"][0], greedy["text"]

    banned = through_main(capsys, *base, "--temperature", "0", "--logit-bias", f"{first}:-inf")
    assert first not in banned["tokens"]
    forced = through_main(capsys, *base, "--logit-bias", "2:1000000,5:-3", "--min-new-tokens", "7")
    assert len(forced["tokens"]) == 8 and forced["tokens"][-1] == 2
    assert forced["finish_reason"] == "eos" and 2 not in forced["tokens"][:-1]
    ignored = through_main(capsys, *base, "--logit-bias", "2:1000000", "--ignore-eos")
    assert ignored["tokens"] == [2] * 40 and ignored["finish_reason"] == "length"

    stop = text[20:25]
    stopped = through_main(capsys, *base, "--temperature", "0", "--stop", "\0", "--stop", stop)
    assert stopped["text"] == text[: text.index(stop)] and stopped["finish_reason"] == "stop"

    for flags in (["--top-k", "1"], ["--top-p", "1e-9"], ["--min-p", "1"]):
        assert through_main(capsys, *base, *flags)["tokens"] == greedy["tokens"], flags
    for flag, value in (
        ("--repetition-penalty", "50"),
        ("--presence-penalty", "1000"),
        ("--frequency-penalty", "1000"),
    ):
        tokens = through_main(capsys, *base, "--temperature", "0", flag, value)["tokens"]
        assert len(set(tokens)) == len(tokens) < 1 + len(set(greedy["tokens"])) + 40, flag
        assert tokens != greedy["tokens"]
    hot = [through_main(capsys, *base, "--temperature", "5", "--seed", s)["tokens"] for s in "12"]
    assert hot[0] != hot[1] and len(set(hot[0])) > 30

    three = through_main(capsys, *base, "--n", "3", "--seed", "4")
    alone = [through_main(capsys, *base, "--seed", s)["tokens"] for s in "456"]
    assert [s["tokens"] for s in three["samples"]] == alone and three["tokens"] == alone[0]


def test_logprobs_and_score_agree(capsys, tmp_path):
    """--logprobs of generated tokens == --score's of the same text; the top ones are sorted."""
    argv = ["class Stack:\n", "--max-new-tokens", "30", "--seed", "2", "--ignore-eos"]
    answer = through_main(capsys, *argv, "--logprobs", "3")
    said = answer["logprobs"]
    assert [e["token"] for e in said] == answer["tokens"]
    assert all(len(e["top"]) == 3 and e["logprob"] <= e["top"][0]["logprob"] for e in said)
    ids = [*K.load_tokenizer(SMALL).encode("class Stack:\n"), *answer["tokens"]]
    model = M.load_checkpoint(SMALL, dtype=torch.float32)
    [(chosen, _, _)] = G.score(model, ids, 512)
    for entry, logprob in zip(said, chosen[-30:].tolist()):
        assert abs(entry["logprob"] - logprob) < 1e-3

    text = "import os\nimport sys\n\n\ndef main():\n    pass\n" * 60
    (tmp_path / "text").write_text(text)
    facts = through_main(capsys, "--score", str(tmp_path / "text"), "--logprobs", "0")
    ids = K.load_tokenizer(SMALL).encode(text)
    assert facts["tokens"] == len(ids) - 1 == len(facts["logprobs"]) > 512
    mean = -sum(e["logprob"] for e in facts["logprobs"]) / facts["tokens"]
    assert math.isclose(mean, facts["nats_per_token"], rel_tol=1e-3)
    assert math.isclose(math.exp(mean), facts["perplexity"], rel_tol=1e-2)
    bits = mean * facts["tokens"] / math.log(2) / len(text)
    assert math.isclose(bits, facts["bits_per_byte"], rel_tol=1e-3)


BAD_GENERATE = [
    ([""], "", ["prompt is empty"]),
    (["-"], "", ["prompt is empty"]),
    (["x", "--temperature", "-1"], "", ["--temperature", "-1"]),
    (["x", "--top-p", "0"], "", ["--top-p"]),
    (["x", "--min-p", "1.5"], "", ["--min-p", "1.5"]),
    (["x", "--repetition-penalty", "0"], "", ["--repetition-penalty"]),
    (["x", "--logit-bias", "70000:1"], "", ["--logit-bias", "70000", "4095"]),
    (["x", "--logit-bias=-1:1"], "", ["--logit-bias", "-1"]),
    (["x", "--logit-bias", "5=1"], "", ["--logit-bias", "ID:BIAS", "5=1"]),
    (["x", "--logit-bias", "5:nan"], "", ["--logit-bias", "nan"]),
    (["x", "--logit-bias", "5:1,5:2"], "", ["--logit-bias", "once"]),
    (["--score", "/nowhere", "--temperature", "0"], "", ["--score", "--temperature"]),
    (["--score", "/nowhere", "--n", "2"], "", ["--score", "--n"]),
    (["--score", "/dev/null"], "", ["--score", "too short"]),
    (["--dummy", "draft", "--checkpoint", "x"], "", ["--dummy", "--checkpoint"]),
    (["x", "--dummy", "draft", "--chat"], "", ["--dummy", "--chat"]),
    (["x", "--max-new-tokens", "0"], "", ["--max-new-tokens"]),
    (["x", "--min-new-tokens", "300"], "", ["--min-new-tokens", "300", "200"]),
    (["x", "--n", "0"], "", ["--n"]),
    (["x", "--stop", ""], "", ["--stop", "empty"]),
    (["x", "--checkpoint", str(SMALL / "config.json")], "", ["config.json", "its folder"]),
    (["x", "--checkpoint", "Qwen/Qwen3-8B"], "", ["Qwen/Qwen3-8B", "download it"]),
    (["x", "--logprobs", "2"], "", ["--logprobs", "--json"]),
    (["x", "--logprobs", "5000", "--json"], "", ["--logprobs", "4096", "5000"]),
    (["x", "--system", "s"], "", ["--system", "--chat"]),
    (["x", "--context", "9"], "", ["--context", "--interactive"]),
    (["x", "--interactive"], "", ["--interactive", "prompt"]),
    (["--interactive", "--n", "2"], "", ["--interactive", "--n"]),
    (["--interactive", "--json"], "", ["--interactive", "--json"]),
    (["--interactive", "--system", "s"], "", ["--system", "no chat template"]),
    (["--score", "/nowhere"], "", ["--score /nowhere"]),
    (["x", "--score", "/nowhere"], "", ["--score", "prompt"]),
    (["x", "--device", "cuda:9"], "", ["--device", "cuda:9"]),
    (["x", "--device", "warp"], "", ["--device", "warp"]),
    (["x", "--device", "meta"], "", ["--device", "meta"]),
    (["x", "--seed", "-1"], "", ["--seed"]),
    (["x", "--prompt-tokens", "8"], "", ["--prompt-tokens", "prompt"]),
    (["--prompt-tokens", "1000000000000"], "", ["context", "512"]),
    (["x = 1\n" * 2000], "", ["context", "512", "max_position_embeddings"]),
    (["x", "--dummy", "nothing"], "", ["--dummy", "nothing"]),
]


@pytest.mark.parametrize(
    "argv, stdin, words",
    BAD_GENERATE,
    ids=lambda v: " ".join(map(str, v))[:30] if isinstance(v, list) else "",
)
def test_bad_input_to_generate(argv, stdin, words, capsys, monkeypatch):
    """One clear line, exit code 2."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    assert G.main(argv) == 2
    error = capsys.readouterr().err.splitlines()[-1:]
    assert len(error) == 1 and all(w in error[0] for w in words), error


def test_vocabulary_larger_than_the_embedding_is_refused(tmp_path, capsys):
    """A tokenizer with ids that the embedding lacks is of another model."""
    M.save_checkpoint(random_model(tiny()), tmp_path)
    shutil.copy(SMALL / "tokenizer.model", tmp_path)
    assert G.main(["x", "--checkpoint", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert all(w in error for w in (str(tmp_path), "4096", "97", "vocab_size")), error


@pytest.mark.skipif(not has_compiler(), reason="torch.compile on CPU needs a C++ compiler")
def test_compile_on_the_command_line(tiny_config):
    """--compile in the program, inference mode and cpu.py's layers included, writes the same."""
    argv = ["generate.py", "hello", "--dummy", tiny_config, "--device", "cpu", "--temperature", "0"]
    eager, compiled = run(*argv, "--dtype", "fp32"), run(*argv, "--dtype", "fp32", "--compile")
    assert compiled.returncode == 0 and compiled.stdout == eager.stdout, compiled.stderr


def test_tokenizer_json_and_generation_config(tmp_path, capsys):
    """A folder with tokenizer.json generates, and generation_config.json's EOS ids end the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    config = tiny(eos_ids=())
    M.save_checkpoint(random_model(config), tmp_path)
    letters = {chr(97 + i): i for i in range(26)} | {f"w{i}": i for i in range(26, 97)}
    tk = Tokenizer(models.WordLevel(letters, unk_token="a"))
    tk.pre_tokenizer, tk.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    tk.save(str(tmp_path / "tokenizer.json"))
    argv = ["b c d", "--checkpoint", str(tmp_path), "--temperature", "0"]
    argv += ["--max-new-tokens", "20"]
    free = through_main(capsys, *argv)["tokens"]
    assert len(free) == 20
    stop = free[5]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1000, stop]}))
    assert through_main(capsys, *argv)["tokens"] == free[: free.index(stop) + 1]


def test_a_closed_pipe_is_no_error():
    """`generate.py | head -c 1` ends quietly."""
    p = subprocess.Popen(
        [sys.executable, REPO / "generate.py", "--max-new-tokens", "50"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENV,
    )
    p.stdout.read(1)
    p.stdout.close()
    error = p.stderr.read().decode()
    assert p.wait(60) == 0 and error == "", error


def test_errors_leave_no_traceback():
    """The same through a real process, where nothing catches what main does not."""
    refused(run("generate.py", "x", "--checkpoint", "/nowhere"), "/nowhere", "config.json")
    refused(run("train.py", "--data", "/nowhere", "--out", "/nowhere/out"), "--data", "/nowhere")
    refused(run("train.py", "--steps", "-3"), "--steps", "-3")


# --------------------------------------------------------------------------------------------------
# train.py
# --------------------------------------------------------------------------------------------------


def test_tokenizer_on_the_standard_library():
    """>= 3.2 characters per token on held-out source at 4096 pieces; lossless; indentation is one
    token."""
    docs = T.read_documents(None)
    kept, held = [t for n, t in docs if not T.held_out(n)], [t for n, t in docs if T.held_out(n)]
    assert 0.02 < len(held) / len(docs) < 0.15 and not any(
        "test" in n.split("/") or "site-packages" in n for n, _ in docs
    )
    import sentencepiece

    sp = sentencepiece.SentencePieceProcessor(model_proto=T.train_tokenizer(kept, 4096))
    ids = sp.encode(held)
    assert sp.vocab_size() == 4096
    assert sum(map(len, held)) / sum(map(len, ids)) >= 3.2
    assert sp.decode(ids) == held
    strange = "a  b\t\tc\r\n    ünï 🦙\n\n  "
    assert sp.decode(sp.encode(strange)) == strange
    for spaces in (4, 8, 12, 16):
        assert len(sp.encode(" " * spaces)) == 1
    assert (sp.bos_id(), sp.eos_id()) == (T.BOS, T.EOS)


def test_batches_are_a_pure_function_that_sees_every_window_once():
    """Same (seed, step, index), same sample, alone or in a batch; an epoch repeats no window and
    skips none."""
    tokens, B, S = torch.arange(1000, dtype=torch.int32), 4, 10
    n = (1000 - 1) // S - 1
    whole = torch.cat([T.batch_of(tokens, 5, step, range(B), B, S) for step in range(n // B + 1)])
    assert torch.equal(T.batch_of(tokens, 5, 7, range(2, 3), B, S)[0], whole[7 * B + 2])
    starts = whole[:n, 0]
    assert len(starts.unique()) == n and (starts % S).unique().numel() == 1
    assert torch.equal(whole[:, 1:], whole[:, :1] + torch.arange(1, S + 1))
    assert not torch.equal(T.batch_of(tokens, 6, 0, range(B), B, S), whole[:B])


@pytest.mark.parametrize("micro", [1, 2, 3])
def test_accumulation_is_token_weighted(micro):
    """Micro-batches with unequal token counts leave the gradient of one big batch; a mean of means
    does not."""
    config = tiny()
    model = random_model(config).requires_grad_(True).double()
    batch = random_tokens(config, 6, 21)
    for row, valid in enumerate((20, 3, 11, 1, 17, 6)):
        batch[row, valid + 1 :] = T.IGNORE
    targets = batch[:, 1:]

    def gradients(f):
        model.zero_grad(set_to_none=True)
        value = f()
        return value, torch.cat([p.grad.flatten() for p in model.parameters()])

    def big():
        loss = F.cross_entropy(
            model(batch[:, :-1].clamp(min=0)).flatten(0, 1),
            targets.flatten(),
            ignore_index=T.IGNORE,
        )
        loss.backward()
        return loss.item()

    def mean_of_means():
        for part in batch.split(micro):
            logits = model(part[:, :-1].clamp(min=0)).flatten(0, 1)
            (
                F.cross_entropy(logits, part[:, 1:].flatten(), ignore_index=T.IGNORE) * micro / 6
            ).backward()

    loss, expected = gradients(big)
    got_loss, got = gradients(lambda: T.accumulate(model, batch, micro))
    assert math.isclose(loss, got_loss["loss"], rel_tol=1e-6) and relative(got, expected) < 1e-6
    assert relative(gradients(mean_of_means)[1], expected) > 1e-2


def test_learning_rate_warms_up_and_falls():
    """Linear to the peak over 5% of the steps, cosine to a tenth at the end."""
    rates = [T.learning_rate(s, 1000, 1.0) for s in range(1000)]
    assert rates[0] == 1 / 50 and rates[49] == 1.0 and max(rates) == 1.0
    assert all(a > b for a, b in zip(rates[50:], rates[51:])) and abs(rates[-1] - 0.1) < 1e-4
    assert abs(rates[525] - 0.55) < 1e-2


def test_decay_groups():
    """Matrices decay, norms do not, and no parameter is left out or taken twice."""
    model = M.Transformer(tiny(tie_embeddings=True, qkv_bias=True))
    decay, plain = T.build_optimizer(model).param_groups
    assert decay["weight_decay"] > 0 == plain["weight_decay"]
    assert all(p.dim() == 2 for p in decay["params"]) and all(p.dim() == 1 for p in plain["params"])
    ids = [id(p) for g in (decay, plain) for p in g["params"]]
    assert len(ids) == len(set(ids)) == len(list(model.parameters()))


@pytest.mark.parametrize("kind", ["plain", "tied", "latent-experts"])
def test_flops_per_token_is_what_torch_counts(kind):
    """The formula behind MFU == torch's own count of forward + backward, but for causal
    attention's unused half."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    config = {
        "plain": tiny(),
        "tied": tiny(tie_embeddings=True),
        "latent-experts": latent(n_mtp_layers=0),
    }[kind]
    model, tokens = M.Transformer(config), random_tokens(config, 2, 33)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        T.loss_sums(model, tokens)[0].backward()
    dims = config.head_dim + (config.v_head_dim or config.head_dim)
    unused_half = 3 * config.n_layers * config.n_heads * dims * 32
    assert counter.get_total_flops() == 2 * 32 * (T.flops_per_token(model, 32) + unused_half)


def test_unknown_device_has_no_mfu(monkeypatch):
    """MFU is printed where the peak is known, in bf16, and nowhere else."""
    place = lambda device, dtype="bf16": T.Place(torch.device(device), dtype, 0, 4)
    assert T.peak_flops(place("cpu")) == 0
    for name, peak in (("NVIDIA H200", 989e12), ("NVIDIA H200 NVL", 0), ("Mystery 9000", 0)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert T.peak_flops(place("cuda")) == 4 * peak
        assert T.peak_flops(place("cuda", "fp32")) == 0


WORDS = "the cat sat on a mat and saw the dog run to a log in the fog".split()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A JSONL of made-up sentences, the same every time."""
    rng, path = torch.Generator().manual_seed(0), tmp_path_factory.mktemp("data") / "corpus.jsonl"
    with open(path, "w") as f:
        for _ in range(300):
            picks = torch.randint(len(WORDS), (60,), generator=rng).tolist()
            f.write(json.dumps({"text": " ".join(WORDS[i] for i in picks) + ".\n"}) + "\n")
    return path


@pytest.fixture(scope="module")
def tiny_config(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(
        json.dumps(tiny(vocab_size=4096, dim=32, n_layers=2, n_heads=2, n_kv_heads=1).to_hf())
    )
    return path


def train_argv(corpus, tiny_config, out, *more) -> list:
    return [
        "train.py",
        "--data",
        corpus,
        "--model",
        tiny_config,
        "--out",
        out,
        "--batch-size",
        4,
        "--micro-batch-size",
        3,
        "--seq-len",
        32,
        "--steps",
        12,
        "--save-every",
        4,
        "--eval-every",
        6,
        "--device",
        "cpu",
        "--dtype",
        "fp32",
        *more,
    ]


def metrics(out: Path) -> list[dict]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k != "tokens_per_second"} for r in rows]


def exported(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / T.STATE)


def same_run(a: Path, b: Path) -> None:
    assert metrics(a) == metrics(b) and exported(a) == exported(b)
    assert all(torch.equal(x, weights(b)[name]) for name, x in weights(a).items())


@pytest.fixture(scope="module")
def finished(corpus, tiny_config, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    done = run(*train_argv(corpus, tiny_config, out))
    assert done.returncode == 0, done.stderr
    return out


def test_training_learns_and_its_folder_generates(finished, corpus):
    """Loss falls below the uniform one; metrics.jsonl has a row a step; generate.py opens the
    folder."""
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == list(range(1, 13)) and rows[-1]["loss"] < rows[0][
        "loss"
    ] - 0.5
    assert all({"step", "loss", "grad_norm", "lr", "tokens_per_second"} <= set(r) for r in rows)
    assert [r["step"] for r in rows if "val_loss" in r] == [6, 12]
    done = run("generate.py", "the cat", "--checkpoint", finished, "--max-new-tokens", "5")
    assert done.returncode == 0 and done.stdout.startswith("the cat"), done.stderr


def test_resume_equals_uninterrupted_after_a_signal(finished, corpus, tiny_config, tmp_path):
    """SIGTERM mid-run saves and exits 0; --resume continues to the same losses and weights, to the
    last bit."""
    out = tmp_path / "cut"
    argv = [sys.executable, *map(str, train_argv(corpus, tiny_config, out))]
    p = subprocess.Popen(argv, cwd=REPO, env=ENV, stderr=subprocess.PIPE, text=True)
    while (
        not (out / "metrics.jsonl").exists() or (out / "metrics.jsonl").read_text().count("\n") < 2
    ):
        time.sleep(0.005)
        assert p.poll() is None, p.stderr.read()
    p.send_signal(signal.SIGTERM)
    _, err = p.communicate(timeout=60)
    steps = len(metrics(out))
    assert p.returncode == 0 and steps < 12 and "--resume" in err, (steps, err)
    done = run("train.py", "--out", out, "--resume", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    same_run(out, finished)


def test_resume_equals_uninterrupted_after_a_crash(finished, corpus, tiny_config, tmp_path):
    """kill -9 past a save: the steps since then are made again, identically, and are in
    metrics.jsonl once."""
    out = tmp_path / "killed"
    argv = [sys.executable, *map(str, train_argv(corpus, tiny_config, out))]
    p = subprocess.Popen(argv, cwd=REPO, env=ENV, stderr=subprocess.DEVNULL)
    while not (out / T.STATE).exists():
        time.sleep(0.005)
        assert p.poll() is None
    p.kill()
    p.wait()
    with open(out / "metrics.jsonl", "a") as f:
        f.write('{"step": 5, "loss": 0.0}\n{"step": 6, "lo')  # past the save, and cut in half
    done = run("train.py", "--out", out, "--resume", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    same_run(out, finished)


def test_ranks_equal_one_process(finished, corpus, tiny_config, tmp_path):
    """torchrun with 2 ranks: the losses and weights of one process, up to the order of a sum."""
    out = tmp_path / "ranks"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", 2, "--standalone"]
    done = run(*launcher, *train_argv(corpus, tiny_config, out))
    assert done.returncode == 0, done.stderr
    for a, b in zip(metrics(out), metrics(finished), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5) and a["grad_norm"] == pytest.approx(
            b["grad_norm"], rel=1e-4
        )
    # Adam divides by sqrt(v): rounding in a near-zero gradient is amplified, hence the looser bound
    assert all(
        relative(x, weights(finished)[n]) < 1e-2
        for n, x in weights(out).items()
        if n.startswith("weight.")
    )


def test_full_disk_while_saving_loses_nothing(finished, corpus, tiny_config, tmp_path):
    """A file that cannot grow any more: one line, exit 2, and the checkpoint saved before still
    resumes."""
    import resource

    out = tmp_path / "full"
    shutil.copytree(finished, out)
    before = (out / T.STATE).read_bytes(), (out / "model.safetensors").read_bytes()
    small = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
    done = run(
        "train.py", "--out", out, "--resume", "--steps", 16, "--device", "cpu", preexec_fn=small
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "train.py: error:" in done.stderr and T.STATE in done.stderr, done.stderr
    assert "untouched" in done.stderr, done.stderr
    assert before == ((out / T.STATE).read_bytes(), (out / "model.safetensors").read_bytes())
    assert not list(out.glob("*.tmp")) and not list(out.glob(".*.tmp"))
    done = run("train.py", "--out", out, "--resume", "--steps", 16, "--device", "cpu")
    assert done.returncode == 0 and metrics(out)[-1]["step"] == 16, done.stderr


def test_bad_input_to_train(finished, corpus, tiny_config, tmp_path, capsys):
    """Each mistake is one line that names the flag or the file, exit code 2; a finished run is not
    overwritten."""
    empty, binary, bad = tmp_path / "empty.txt", tmp_path / "binary", tmp_path / "bad.jsonl"
    empty.write_text(" \n")
    binary.mkdir()
    (binary / "x.bin").write_bytes(bytes(range(256)))
    bad.write_text('{"text": "fine"}\n{"txt": "not"}\n')
    short = tmp_path / "short.txt"
    short.write_text("just a few words " * 3)
    new = ["--out", str(tmp_path / "new"), "--device", "cpu"]
    cases = [
        ([*new, "--data", str(empty)], ["empty.txt", "no text"]),
        ([*new, "--data", str(binary)], ["binary", "no text"]),
        ([*new, "--data", str(bad)], ["bad.jsonl", "line 2", "text"]),
        ([*new, "--data", str(short)], ["--data"]),
        ([*new, "--model", "huge"], ["--model", "huge", "small"]),
        ([*new, "--device", "cuda:7"], ["--device", "cuda:7"]),
        ([*new, "--resume"], ["--resume", T.STATE]),
        ([*new, "--lr", "nan"], ["--lr", "nan"]),
        ([*new, "--seed", "-1"], ["--seed"]),
        (["--out", str(SMALL)], ["small", "no run"]),
        ([*new, "--init", str(tmp_path / "none")], ["none"]),
        (["--out", str(finished)], ["whole", "12 steps", "--resume"]),
        (["--out", str(finished), "--resume", "--lr", "0.5"], ["--lr", "0.5"]),
        (["--out", str(tmp_path), "--plot"], ["metrics.jsonl"]),
    ]
    for argv, words in cases:
        assert T.main(argv) == 2, argv
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and all(w in error for w in words), (argv, error)


def test_init_continues_from_a_checkpoint(finished, corpus, tmp_path):
    """--init starts from the folder's weights and tokenizer: the first loss is the trained one,
    not ln V."""
    out = tmp_path / "tuned"
    done = run(
        "train.py",
        "--init",
        finished,
        "--data",
        corpus,
        "--out",
        out,
        "--steps",
        2,
        "--seq-len",
        32,
        "--device",
        "cpu",
    )
    assert done.returncode == 0, done.stderr
    assert metrics(out)[0]["loss"] < metrics(finished)[0]["loss"] - 0.5
    assert (out / "tokenizer.model").read_bytes() == (finished / "tokenizer.model").read_bytes()


def test_plot_draws_or_says_what_is_missing(finished):
    """--plot writes a PNG, or without matplotlib one line that says how to get it."""
    done = run("train.py", "--out", finished, "--plot")
    if importlib.util.find_spec("matplotlib"):
        assert (finished / "metrics.png").read_bytes().startswith(b"\x89PNG"), done.stderr
    else:
        refused(done, "pip install matplotlib")


def test_folder_and_text_file_as_data(tmp_path):
    """--data takes a folder (hidden and binary files skipped, order fixed) and a single text
    file."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    assert T.read_documents(str(tmp_path)) == [("a.md", "first"), ("b/two.txt", "second")]
    (tmp_path / "one.txt").write_text("word " * 5000)
    pieces = T.read_documents(str(tmp_path / "one.txt"))
    assert len(pieces) > 2 and "".join(t for _, t in pieces) == "word " * 5000


def test_bf16_autocast_trains(finished, corpus, tiny_config, tmp_path):
    """--dtype bf16: fp32 weights, bf16 products, losses near fp32's but not equal to them."""
    out = tmp_path / "bf16"
    argv = train_argv(corpus, tiny_config, out)
    argv[argv.index("fp32")] = "bf16"
    done = run(*argv)
    assert done.returncode == 0 and weights(out)["weight.norm.weight"].dtype == torch.float32
    losses, reference = ([r["loss"] for r in metrics(o)] for o in (out, finished))
    assert losses == pytest.approx(reference, rel=0.02) and losses != reference


def test_a_diverged_run_keeps_its_last_checkpoint(corpus, tiny_config, tmp_path):
    """A loss that is no number stops the run with one line; nothing is saved over the good one."""
    out = tmp_path / "wild"
    done = run(*train_argv(corpus, tiny_config, out, "--lr", "1e30", "--save-every", 1))
    assert done.returncode == 2 and "--lr" in done.stderr and "Traceback" not in done.stderr
    assert all(torch.isfinite(t).all() for t in weights(out).values())


def test_jsonl_lines_end_at_newlines_alone(tmp_path):
    """U+2028 inside a text is no line end; half a surrogate pair is refused with its line."""
    path = tmp_path / "x.jsonl"
    path.write_text(
        json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    assert T.read_documents(str(path)) == [("1", "a\u2028b\x85c")]
    path.write_text('{"text": "fine"}\n{"text": "\\ud800"}\n')
    with pytest.raises(ValueError, match="line 2"):
        T.read_documents(str(path))


def test_deepseek_form_trains_and_resumes_equal(corpus, tmp_path):
    """MLA, experts and MTP under train.py: the losses of both fall, experts stay in balance, and a
    run cut in two gives the losses and tensors of one, routing corrections included."""
    (tmp_path / "config.json").write_text(json.dumps(latent(vocab_size=320).to_hf()))
    argv = ["--data", corpus, "--model", tmp_path / "config.json", "--seq-len", 32, "--lr", 5e-3]
    argv += ["--batch-size", 8, "--micro-batch-size", 4, "--eval-every", 1000, "--device", "cpu"]
    argv += ["--dtype", "fp32", "--save-every", 20, "--out"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert T.main([*map(str, [*argv, whole, "--steps", 40])]) == 0
    real = T.save_run

    class Stop(Exception):
        pass

    def save_and_stop(*args):
        real(*args)
        raise Stop

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(T, "save_run", save_and_stop)
        T.main([*map(str, [*argv, parts, "--steps", 40])])
    assert T.main(["--out", str(parts), "--resume"]) == 0
    rows = T.read_metrics(whole / "metrics.jsonl")
    same = ("step", "loss", "mtp_loss", "worst_load")
    assert [[r[k] for k in same] for r in rows] == [
        [r[k] for k in same] for r in T.read_metrics(parts / "metrics.jsonl")
    ]
    a, b = load_file(whole / "model.safetensors"), load_file(parts / "model.safetensors")
    assert all(torch.equal(a[k], b[k]) for k in a) and len(a) == len(b)
    corrections = [v for k, v in a.items() if "correction" in k]
    assert len(corrections) == 3 and all(c.dtype == torch.float32 and c.any() for c in corrections)
    for loss in ("loss", "mtp_loss"):
        assert rows[-1][loss] < 0.9 * rows[0][loss]
    assert M.load_checkpoint(whole).config.n_mtp_layers == 1


def test_training_spares_a_folder_that_is_somebody_elses(corpus, tmp_path, capsys):
    """--out over a sharded checkpoint is refused before anything is written."""
    M.save_checkpoint(random_model(tiny()), tmp_path, 60_000)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert T.main(["--out", str(tmp_path), "--data", str(corpus)]) == 2
    assert "no run here made" in capsys.readouterr().err
    assert before == {p.name: p.read_bytes() for p in tmp_path.iterdir()}


def test_losses_are_of_the_next_token_and_of_those_after_it():
    """loss_sums == cross-entropies written out: the main one of the next token, each MTP depth of
    one token further, their mean."""
    model, batch = random_model(latent(n_mtp_layers=2)), random_tokens(latent(), 3, 20)
    batch[1, 15:] = T.IGNORE
    tokens = batch.clamp(min=0)
    hidden = model(tokens[:, :19], return_hidden=True)
    expected = [F.cross_entropy(model.head(hidden).transpose(1, 2), batch[:, 1:], reduction="sum")]
    for depth in range(2):
        hidden = hidden[:, :-1]
        seen = torch.stack([tokens[:, i + 1 + depth] for i in range(hidden.shape[1])], 1)
        hidden = model.predict_further(hidden, seen, depth=depth)
        logits = model.head(hidden).transpose(1, 2)
        target = torch.stack([batch[:, i + 2 + depth] for i in range(hidden.shape[1])], 1)
        expected.append(F.cross_entropy(logits, target, reduction="sum"))
    main, ahead = T.loss_sums(model, batch)
    torch.testing.assert_close(main, expected[0])
    torch.testing.assert_close(ahead, (expected[1] + expected[2]) / 2)


def test_balance_evens_out_the_experts():
    """The correction moves against the load: a router that favours some experts ends near even."""
    config = latent(n_groups=1, topk_groups=1, group_score_topk=1, n_mtp_layers=0)
    model = random_model(config, std=0.3)
    balance, tokens = T.Balance(model, speed=0.02), random_tokens(config, 4, 64)
    worst = []
    for _ in range(60):
        model(tokens)
        worst.append(balance.update())
    assert worst[0] > 1.4 and max(worst[-10:]) < 1.25, worst


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing(corpus, tiny_config, tmp_path):
    """SIGKILL at random moments, saving after every step, --resume each time: the run ends as the
    uninterrupted one, bit for bit."""
    import random

    def argv(out: Path) -> list:
        return train_argv(corpus, tiny_config, out, "--save-every", 1, "--steps", 120)

    whole, out, rng, kills = tmp_path / "whole", tmp_path / "killed", random.Random(0), 0
    assert run(*argv(whole)).returncode == 0
    for _ in range(40):
        resume = ["--resume"] if (out / T.STATE).exists() else []
        p = subprocess.Popen(
            [sys.executable, *map(str, argv(out)), *resume],
            cwd=REPO,
            env=ENV,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _, error = p.communicate(timeout=rng.uniform(2.0, 6.0))
            assert p.returncode == 0, error
            break
        except subprocess.TimeoutExpired:
            p.kill()
            p.communicate()
            kills += len(resume)
    done = run(*argv(out), "--resume")
    assert done.returncode == 0 and kills >= 2, (kills, done.stderr)
    same_run(out, whole)


# --------------------------------------------------------------------------------------------------
# attention.py: a call, drawn at random or given, its outcome, and what it is compared with
# --------------------------------------------------------------------------------------------------

DEVICE = "cuda" if CUDA else "cpu"
DTYPES = (torch.float16, torch.bfloat16) if CUDA else (torch.float32, torch.float16)
FLOAT = DTYPES[0]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
FUZZ, COST = 200, 6  # combinations; the most 32 x 32 tiles of scores that one may have
HEADS = ((1, 1), (2, 1), (3, 1), (2, 2), (4, 2), (6, 2))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of 16 or 32, so that shapes the interpreter can bear have several."""
    if A.INTERPRET:
        from triton.runtime import interpreter

        tiles = dict(forward=(32, 16, 4, 2, True), decode=(16, 32, 4, 2, False))
        tiles["backward"] = (32, 32, 16, 32, 4, 1)
        monkeypatch.setattr(A, "CONFIGS", {kind: {512: row} for kind, row in tiles.items()})
        patch_once_per_launch(interpreter, monkeypatch)


def patch_once_per_launch(interpreter, monkeypatch) -> None:
    """Triton's interpreter patches its language at each call of a helper; once for each module of
    helpers and launch is enough, and takes half the time."""
    patched, launch = set(), interpreter.GridExecutor.__call__

    def launch_anew(kernel, *args, **more):
        patched.clear()
        return launch(kernel, *args, **more)

    def call(helper, *args, **more):
        if helper.fn.__module__ not in patched:
            interpreter._patch_lang(helper.fn)
            patched.add(helper.fn.__module__)
        return helper.rewrite()(*args, **more)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)


# --------------------------------------------------------------------------------------------------
# A combination of flags: drawn, built, run, compared
# --------------------------------------------------------------------------------------------------


def draw(seed: int) -> dict:
    """Everything that can differ between two calls, by independent coins, in a printable form."""
    r = random.Random(seed)

    def coin(odds=0.5):
        return r.random() < odds

    packed, own_k, square = coin(0.4), coin(0.7), coin(0.4)
    if packed:
        queries, keys, count = (0, 1, 5, 21, 37), (0, 1, 13, 21, 37), r.randint(1, 4)
        sizes = [(r.choice(queries), r.choice(keys)) for _ in range(count)]
    else:
        queries, keys, count = (1, 16, 37, 53, 53, 100), (16, 37, 53, 53, 100), r.choice((1, 1, 2))
        sizes = [(r.choice(queries), r.choice(keys))] * count
    if square or packed and not own_k:
        sizes = [(S, S) for _, S in sizes]
    tiles = sum(-(-T // 32) * -(-S // 32) for T, S in sizes)
    heads, kv_heads = r.choice([h for h in HEADS if h[0] * tiles <= COST] or HEADS[:1])
    dims = (16,) * 6 + (24,) * 2 + (32,) * 4 + (48,) * 2 + (64, 96)
    D, causal, pad = r.choice(dims), coin(0.6), r.choice((0, 0, 3, 17))
    dtype = DTYPES[coin(0.3)]
    return dict(
        seed=seed,
        dtype=dtype,
        extras=dtype if coin() else torch.float32,  # of sinks and bias
        heads=heads,
        kv_heads=kv_heads,
        D=D,
        Dv=D if coin(0.7) else r.choice(dims),
        packed=packed,
        sizes=sizes,
        own_k=own_k,
        pad=pad,
        strided=coin(0.3),
        causal=causal,
        scale=r.choice((None, None, 0.3)),
        window=r.choice((1, 3, 8, 20, 30)) if coin(0.4) else None,
        softcap=r.choice((0.7, 3.0, 20.0)) if coin(0.4) else None,
        alibi=coin(0.4),
        sinks=coin(0.4),
        bias=[coin(0.6) for _ in range(r.randint(1, 3 + (not packed)))] if coin(0.45) else None,
        bias_front=coin(0.3),
        bias_grad=coin(0.7),
        prefix=[r.randint(0, S) for _, S in sizes] if causal and coin(0.45) else None,
        block=None if packed or coin(0.4) else r.choice((16, 32)),
        block_per_head=coin(),
    )


def case(**changes) -> dict:
    """A combination with everything off, but for the changes."""
    base = dict(seed=0, dtype=FLOAT, extras=torch.float32, heads=2, kv_heads=1, D=16, Dv=16)
    base |= dict(packed=False, sizes=[(37, 37)], own_k=True, pad=0, strided=False, causal=True)
    base |= dict(scale=None, window=None, softcap=None, alibi=False, sinks=False, bias=None)
    base |= dict(bias_front=False, bias_grad=True, prefix=None, block=None, block_per_head=False)
    return base | changes


BUSY = dict(window=20, softcap=3.0, alibi=True, sinks=True, prefix=[9], scale=0.3)


def normal(*shape, dtype=None, rng=None) -> torch.Tensor:
    rng = rng or torch.Generator().manual_seed(len(shape) + sum(shape))
    x = torch.randn(shape, generator=rng, dtype=torch.float64)
    return x.to(DEVICE, dtype or FLOAT)


def qkv(T, S, *lead, heads=4, kv_heads=2, D=16, Dv=None, dtype=None, seed=0):
    make = partial(normal, *lead, dtype=dtype, rng=torch.Generator().manual_seed(seed))
    return make(T, heads, D), make(S, kv_heads, D), make(S, kv_heads, Dv or D)


def int32(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def build(p: dict) -> tuple[dict, dict, tuple]:
    """What a combination differentiates, its other arguments, and the weights of the loss."""
    rng = torch.Generator().manual_seed(p["seed"])
    make, packed = partial(normal, rng=rng), p["packed"]
    lead = [] if packed else [len(p["sizes"])]
    T, S = (sum(n) + p["pad"] if packed else n[0] for n in zip(*p["sizes"]))
    heads, kv_heads, full = p["heads"], p["kv_heads"], (*lead, p["heads"], T, S)

    def rows(n, heads, D):
        if p["strided"]:
            return make(*lead, heads, n, D, dtype=p["dtype"]).transpose(-2, -3)
        return make(*lead, n, heads, D, dtype=p["dtype"])

    leaves = dict(
        q=1.5 * rows(T, heads, p["D"]), k=rows(S, kv_heads, p["D"]), v=rows(S, kv_heads, p["Dv"])
    )
    flags = {name: p[name] for name in ("causal", "scale", "window", "softcap")}
    if packed:
        cu_q, cu_k = (int32(0, *accumulate(n)) for n in zip(*p["sizes"]))
        flags |= dict(cu_seqlens_q=cu_q) | (dict(cu_seqlens_k=cu_k) if p["own_k"] else {})
    if p["prefix"]:
        flags["prefix"] = int32(*p["prefix"])
    if p["alibi"]:
        flags["alibi_slopes"] = torch.rand(heads, generator=rng).to(DEVICE) / 4
    if p["block"]:
        tiles = [-(-n // p["block"]) for n in (T, S)]
        visit = torch.rand([heads] * p["block_per_head"] + tiles, generator=rng) < 0.6
        flags["block_mask"] = A.BlockMask(visit.to(DEVICE), p["block"])
    if p["sinks"]:
        leaves["sinks"] = make(heads, dtype=p["extras"])
    if p["bias"]:
        shape = [n if kept else 1 for n, kept in zip(full[-len(p["bias"]) :], p["bias"])]
        bias = make(*shape, dtype=p["extras"])
        bias[torch.rand(shape, generator=rng).to(DEVICE) < 0.1] = -INF
        bias[..., : bias.shape[-1] // 2 * p["bias_front"]] = -INF
        (leaves if p["bias_grad"] else flags)["bias"] = bias
    weights = make(*lead, T, heads, p["Dv"], dtype=p["dtype"]), make(*full[:-1])
    return leaves, flags, weights


def doubled(arguments: dict) -> dict:
    return {
        name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x
        for name, x in arguments.items()
    }


def without(arguments: dict, *names: str) -> dict:
    return {name: x for name, x in arguments.items() if name not in names}


def outcome(attend, leaves: dict, flags: dict, weights: tuple, use_lse=True) -> dict:
    """o, lse and the gradient to each leaf of a random sum of both."""
    leaves = {name: x.clone().requires_grad_() for name, x in leaves.items()}
    more = dict(return_lse=True) if use_lse else {}
    found = attend(**leaves, **flags, **more)
    o, lse = found if use_lse else (found, None)
    loss = (o.double() * weights[0].double()).sum()
    if use_lse:
        loss = loss + (lse.double().masked_fill(lse == -INF, 0) * weights[1].double()).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    values = dict(o=o.detach(), lse=lse.detach()) if use_lse else dict(o=o.detach())
    return values | {f"d{name}": g for name, g in zip(leaves, gradients)}


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, in units of the largest true value or of 1; an infinity that is not
    where it should be is infinitely wrong."""
    assert got.shape == want.shape, (got.shape, want.shape)
    got, want = got.double().flatten(), want.double().flatten()
    off = torch.where(got == want, 0.0, got - want).abs()
    size = want.masked_fill(want == -INF, 0).abs()
    return (F.pad(off, (0, 1)).max() / F.pad(size, (0, 1), value=1.0).max()).item()


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float | None = None) -> None:
    assert error(got, want) <= (TOLERANCE[FLOAT] if tolerance is None else tolerance)


def all_close(got: dict, want: dict, tolerance: float | None = None) -> None:
    assert got.keys() == want.keys()
    for name in want:
        close(got[name], want[name], tolerance)


def allowed(p: dict, leaves: dict, flags: dict, weights: tuple) -> dict:
    """The error granted to o, to lse and to gradients. With CUDA from SDPA's own on these tensors,
    without the flags of which its mask, in half precision, would lose digits."""
    tolerance = TOLERANCE[p["dtype"]]
    if not CUDA or p["dtype"] == torch.float64:
        half = p["dtype"] == torch.float16  # as in any fused kernel, o is rounded before backward
        return {"o": tolerance, "lse": tolerance, "gradient": tolerance * (1 + half)}
    leaves = {name: x.to(p["dtype"]) for name, x in leaves.items()}
    flags = without(flags, "softcap", "alibi_slopes")
    half = outcome(by_sdpa, leaves, flags, weights, use_lse=False)
    true = outcome(by_sdpa, doubled(leaves), doubled(flags), weights, use_lse=False)
    off = {name: error(half[name], true[name]) for name in true}
    eps = torch.finfo(p["dtype"]).eps  # shapes this small may be exact by luck
    o, gradient = max(off.pop("o"), eps), max(*off.values(), 4 * eps)
    return {"o": 1.5 * o, "lse": 1e-3, "gradient": 1.5 * gradient}


def check(attend, p: dict, truth=None, use_lse=True) -> None:
    """attend and the reference in float64 agree on the output, lse and every gradient."""
    leaves, flags, weights = build(p)
    got = outcome(attend, leaves, flags, weights, use_lse)
    truth = truth or A.attention_reference
    want = outcome(truth, doubled(leaves), doubled(flags), weights, use_lse)
    assert got["o"].dtype == leaves["q"].dtype
    bound = allowed(p, leaves, flags, weights)
    off = {name: error(got[name], want[name]) for name in want}
    wrong = {n: e for n, e in off.items() if not e <= bound.get(n, bound["gradient"])}
    assert not wrong, f"\n{wrong}\n{p}"


# --------------------------------------------------------------------------------------------------
# The reference, against what others wrote
# --------------------------------------------------------------------------------------------------


def place(n: int, cu: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence that each of n packed rows is in, one too many past the end, and where in it."""
    rows = torch.arange(n, device=cu.device)
    sequence = torch.bucketize(rows, cu[1:], right=True)
    return sequence, rows - cu[sequence]


def by_sdpa(
    q, k, v, *, causal=True, scale=None, window=None, softcap=None, alibi_slopes=None, sinks=None,
    bias=None, cu_seqlens_q=None, cu_seqlens_k=None, prefix=None, block_mask=None,
):  # fmt: skip
    """Every flag as one dense additive mask for torch's SDPA. The sink, or all that an empty row
    sees, is one more key whose value is zero."""
    packed, dtype = cu_seqlens_q is not None, q.dtype
    q, k, v = (x[None] if packed else x for x in (q, k, v))
    (_, T, heads, D), (S, kv_heads) = q.shape, k.shape[1:3]
    cu_q = (cu_seqlens_q if packed else int32(0, T)).long()
    cu_k = (int32(0, S) if not packed else cu_q if cu_seqlens_k is None else cu_seqlens_k).long()
    (doc_q, i), (doc_k, j) = place(T, cu_q), place(S, cu_k)
    distance = (i + F.pad(cu_k.diff() - cu_q.diff(), (0, 1))[doc_q])[:, None] - j
    see = ((doc_q[:, None] == doc_k) & (doc_q[:, None] < len(cu_q) - 1))[None, None]
    if causal:
        prefix = torch.zeros_like(cu_q[1:]) if prefix is None else prefix
        start = F.pad(prefix, (0, 1))[doc_k] if packed else prefix[:, None, None, None]
        see = see & ((distance >= 0) | (j < start))
    if window is not None:
        see = see & (distance < window)
    if block_mask is not None:
        b, visit = block_mask.block, block_mask.visit
        see = see & visit.repeat_interleave(b, -1).repeat_interleave(b, -2)[..., :T, :S]
    scale, mask = D**-0.5 if scale is None else scale, q.new_zeros(len(q), heads, T, S)
    if softcap is not None:
        dots = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(heads // kv_heads, 2))
        q, mask = q * 0, softcap * torch.tanh(dots * scale / softcap)
    if bias is not None:
        mask = mask + bias
    if alibi_slopes is not None:
        mask = mask - alibi_slopes[:, None, None] * distance
    mask = mask.masked_fill(~see, -INF)
    empty = (mask == -INF).all(-1, keepdim=True)
    last = torch.where(empty, 0.0, -INF) if sinks is None else sinks[:, None, None].expand_as(empty)
    k, v = (F.pad(x, (0, 0, 0, 0, 0, 1)).transpose(1, 2) for x in (k, v))
    mask = torch.cat((mask, last), -1).to(dtype)
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=mask, scale=scale, enable_gqa=True
    ).transpose(1, 2)
    return o[0] if packed else o


def by_plain_sdpa(q, k, v, causal):
    states = (x.transpose(1, 2) for x in (q, k, v))
    o = F.scaled_dot_product_attention(*states, is_causal=causal, enable_gqa=True)
    return o.transpose(1, 2)


def by_hand(
    q, k, v, *, causal, scale, window, softcap, alibi_slopes, sinks, bias, prefix, block_mask
):
    """The definition, one score at a time."""
    (B, T, heads, _), (S, kv_heads) = q.shape, k.shape[1:3]
    o, lse = q.new_zeros(B, T, heads, v.shape[-1]), q.new_full((B, heads, T), -INF)
    for b, h, t in product(range(B), range(heads), range(T)):
        i, g = t + S - T, h // (heads // kv_heads)
        seen = [(sinks[h].item(), 0.0)] if sinks is not None else []
        for j in range(S):
            s = softcap * math.tanh((q[b, t, h] @ k[b, j, g]).item() * scale / softcap)
            s += bias[b, h, t, j].item() - alibi_slopes[h].item() * (i - j)
            visited = block_mask.visit[h, t // block_mask.block, j // block_mask.block]
            if visited and i - j < window and (not causal or j <= i or j < prefix[b]):
                seen += [(s, v[b, j, g])] if s > -INF else []
        if total := sum(math.exp(s) for s, _ in seen):
            o[b, t, h] = sum(math.exp(s) * x for s, x in seen) / total
            lse[b, h, t] = math.log(total)
    return o, lse


@pytest.mark.parametrize("T, S", [(7, 7), (5, 9), (9, 5)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("with_sinks", [True, False])
def test_reference_is_the_definition(T, S, causal, with_sinks):
    """All flags at once == the definition in Python loops."""
    q, k, v = qkv(T, S, 2, D=4, Dv=3, dtype=torch.float64)
    bias = normal(2, 4, T, S, dtype=torch.float64)
    bias[bias > 1] = -INF
    flags = dict(causal=causal, scale=0.7, window=4, softcap=1.5, bias=bias)
    flags |= dict(prefix=int32(3, 0), alibi_slopes=normal(4, dtype=torch.float64).abs())
    flags["sinks"] = normal(4, dtype=torch.float64) if with_sinks else None
    visit = normal(4, -(-T // 2), -(-S // 2)) > -0.7
    flags["block_mask"] = A.BlockMask(visit, 2)
    got = A.attention_reference(q, k, v, **flags, return_lse=True)
    for a, b in zip(got, by_hand(q, k, v, **flags)):
        close(a, b, TOLERANCE[torch.float64])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [6, 3, 1])
def test_reference_is_sdpa(causal, kv_heads):
    """Plain, causal and grouped attention == torch's with its own flags."""
    q, k, v = qkv(13, 13, 2, heads=6, kv_heads=kv_heads, Dv=24, dtype=torch.float64)
    got = A.attention_reference(q, k, v, causal=causal)
    close(got, by_plain_sdpa(q, k, v, causal), TOLERANCE[torch.float64])


@pytest.mark.parametrize("seed", range(0, FUZZ, 4))
def test_reference_is_sdpa_with_a_mask(seed):
    """Any combination == torch's SDPA given all flags as one dense mask, gradients too."""
    double = dict(dtype=torch.float64, extras=torch.float64)
    check(A.attention_reference, draw(seed) | double, by_sdpa, use_lse=False)


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
def test_reference_is_transformers(family):
    """Sinks == gpt-oss's eager attention, the softcap == Gemma-2's."""
    name = f"transformers.models.{family}.modeling_{family}"
    eager = pytest.importorskip(name).eager_attention_forward
    q, k, v = qkv(9, 9, 2, dtype=torch.float64)
    sinks, mask = normal(4, dtype=torch.float64), torch.full((9, 9), -INF, device=DEVICE).triu(1)
    module = SimpleNamespace(sinks=sinks, num_key_value_groups=2, head_dim=16, training=False)
    ours, theirs = {
        "gpt_oss": (dict(sinks=sinks), {}),
        "gemma2": (dict(softcap=1.5), dict(softcap=1.5)),
    }[family]
    states = (x.transpose(1, 2) for x in (q, k, v))
    want, _ = eager(module, *states, mask.double(), scaling=0.3, **theirs)
    close(A.attention_reference(q, k, v, scale=0.3, **ours), want, 1e-6)  # Gemma's softmax is fp32


def test_reference_alibi_is_a_bias():
    """Slopes == the bias -slope * (i - j), causal or not, of either sign of i - j."""
    q, k, v = qkv(5, 9, 2, dtype=torch.float64)
    slopes = normal(4, dtype=torch.float64).abs()
    i, j = torch.arange(5, device=DEVICE)[:, None] + 4, torch.arange(9, device=DEVICE)
    bias = -slopes[:, None, None] * (i - j)
    for causal in (True, False):
        a = A.attention_reference(q, k, v, causal=causal, alibi_slopes=slopes)
        close(a, A.attention_reference(q, k, v, causal=causal, bias=bias), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_reference_keeps_the_dtype(dtype):
    """The reference takes any float and gives o in it, near what float64 gives."""
    q, k, v = qkv(9, 9, 2, dtype=dtype)
    o = A.attention_reference(q, k, v)
    assert o.dtype == dtype
    close(o, A.attention_reference(q.double(), k.double(), v.double()), TOLERANCE[dtype])


# --------------------------------------------------------------------------------------------------
# The ladder: online, chunked, fused
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T, S", [(23, 23), (5, 23), (23, 5), (1, 1)])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_online_is_the_reference(T, S, chunk):
    """Keys taken a few at a time give the softmax over all, whatever the chunk."""
    q, k, v = qkv(T, S, 2, Dv=24, dtype=torch.float64)
    for flags in (dict(), dict(causal=False), dict(scale=0.7)):
        a = A.online_attention(q, k, v, chunk=chunk, **flags)
        close(a, A.attention_reference(q, k, v, **flags), TOLERANCE[torch.float64])


@pytest.mark.parametrize("seed", range(1, FUZZ, 3))
def test_chunked_fuzz(seed):
    """Chunked attention == the reference for any combination, gradients too."""
    check(partial(A.chunked_attention, chunk=(7, 16, 64)[seed % 3 - 1]), draw(seed))


def peak_bytes(run) -> int:
    """The most memory held at once above what was held before, by the allocator's own record."""
    run()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True) as record:
        run()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def test_chunked_memory():
    """Forward and backward of twice the tokens peak at about twice the memory; the reference, with
    its matrix of scores, at four times."""
    growth, busy = {}, case(window=300, softcap=3.0, alibi=True, sinks=True)
    rungs = dict(chunked=partial(A.chunked_attention, chunk=32), reference=A.attention_reference)
    for name, attend in (rungs | (dict(flash=A.flash_attention) if CUDA else {})).items():
        calls = [partial(outcome, attend, *build(busy | dict(sizes=[(n, n)]))) for n in (384, 768)]
        small, large = (peak_bytes(call) for call in calls)
        growth[name] = large / small
    assert growth.pop("reference") > 3.4 and max(growth.values()) < 2.6, growth


@pytest.mark.parametrize("seed", range(FUZZ))
def test_flash_fuzz(seed):
    """The kernels == the reference for any combination: output, lse and every gradient."""
    check(A.flash_attention, draw(seed))


@pytest.mark.skipif(not CUDA, reason="SDPA's kernels need a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("D", [64, 128])
def test_flash_is_as_exact_as_sdpa(dtype, causal, D):
    """At real sizes the error against float64 is at most 1.5 times that of torch's SDPA."""
    leaves = dict(zip("qkv", qkv(512, 512, 2, heads=8, kv_heads=2, D=D, dtype=dtype)))
    runs = dict(
        leaves=leaves, flags=dict(causal=causal), weights=[normal(2, 512, 8, D, dtype=dtype)]
    )
    ours, theirs = (outcome(f, **runs, use_lse=False) for f in (A.flash_attention, by_plain_sdpa))
    true = outcome(by_plain_sdpa, **runs | dict(leaves=doubled(leaves)), use_lse=False)
    for name in true:
        assert error(ours[name], true[name]) <= 1.5 * error(theirs[name], true[name]), name


CORNERS = dict(
    plain=dict(),
    head_dim_128=dict(D=128, Dv=128),
    head_dim_96_to_16=dict(D=96),
    value_dim_96=dict(Dv=96),
    two_groups_of_three=dict(heads=6, kv_heads=2, sizes=[(20, 20)]),
    softcap_saturated=dict(scale=10.0, softcap=3.0),
    decode=dict(sizes=[(1, 53)] * 2),
    chunk_after_cache=dict(sizes=[(20, 53)]),
    empty_rows_first=dict(sizes=[(53, 20)]),
    empty_rows_first_with_sinks=dict(sizes=[(53, 20)], sinks=True),
    one_by_one=dict(sizes=[(1, 1)]),
    no_keys=dict(sizes=[(20, 0)]),
    no_keys_but_sinks=dict(sizes=[(20, 0)], sinks=True),
    no_queries=dict(sizes=[(0, 20)]),
    window_reaches_the_future=dict(sizes=[(20, 37)], causal=False, window=5),
    window_of_one=dict(window=1),
    window_past_everything=dict(window=1000),
    prefix_beyond_the_window=dict(prefix=[30], window=3),
    prefix_of_all=dict(sizes=[(20, 37)], prefix=[37]),
    prefix_sees_ahead_in_alibi=dict(prefix=[30], alibi=True),
    bias_hides_the_first_tiles=dict(bias=[True, True], bias_front=True, causal=False),
    bias_per_key=dict(sizes=[(37, 37)] * 2, bias=[True, False, False, True]),
    bias_of_one_number=dict(bias=[False], seed=3),
    tiles_per_head=dict(block=16, block_per_head=True, causal=False),
    everything=dict(BUSY, bias=[True, True, True], block=16),
    packed_everything=dict(BUSY, bias=[True, True, True], packed=True, pad=5),
    packed_all_empty=dict(packed=True, sizes=[(0, 0), (0, 0)]),
    packed_empty_but_padded=dict(packed=True, sizes=[(0, 0)], pad=3, sinks=True),
    packed_no_keys=dict(packed=True, sizes=[(7, 0), (5, 0)], sinks=True),
    packed_of_ones=dict(packed=True, sizes=[(1, 1)] * 20),
)


@pytest.mark.parametrize("corner", CORNERS)
def test_flash_corners(corner):
    """Edges that a random draw seldom meets."""
    check(A.flash_attention, case(**CORNERS[corner]))


@pytest.mark.parametrize("n", range(17))
def test_every_alignment(n):
    """The diagonal, the window's edge and the prefix's end at every place within a tile."""
    one = dict(heads=1, kv_heads=1)
    check(A.flash_attention, case(sizes=[(33, 33 + n)], **one))
    check(A.flash_attention, case(sizes=[(33, 33)], window=1 + n, prefix=[n], **one))


def test_strides_of_vectors_and_masks_do_not_matter():
    """Expanded and strided sinks, slopes, lengths and block masks are what they say."""
    q, k, v = qkv(20, 37, 2)
    spread = lambda x: torch.stack((x, torch.full_like(x, 7)), -1)[..., 0]
    visit = (normal(3, 2) > -0.7).T  # not row-major
    flags = dict(sinks=torch.zeros(1, device=DEVICE).expand(4), block_mask=A.BlockMask(visit, 16))
    flags["alibi_slopes"] = spread(torch.arange(4.0, device=DEVICE) / 8)
    flags["bias"] = normal(4, 20, 37, dtype=torch.float32)
    all_close(*(outcome(f, dict(q=q, k=k, v=v, bias=flags["bias"]), without(flags, "bias"),
                        (normal(2, 20, 4, 16), normal(2, 4, 20)))
                for f in (A.flash_attention, A.attention_reference)))  # fmt: skip
    for lengths in (spread(int32(20, 9)), int32(30).expand(2)):
        got = A.decode_attention(q[:, :1], k, v, lengths, n_splits=2)
        close(got, A.decode_attention(q[:, :1], k, v, lengths.clone(), n_splits=2))
        assert not torch.equal(got[0], got[1])


def test_plain_attention_is_fp32_under_autocast(monkeypatch):
    """Autocast would run its products in bf16."""
    q, k, v = qkv(20, 37, 1, dtype=torch.float32)
    for attend in (A.attention_reference, A.chunked_attention):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            got = attend(q, k, v)
        assert torch.equal(got, attend(q, k, v))


def test_draw_covers_every_pair():
    """Each flag is drawn often with and without each other."""
    names = "causal window softcap alibi sinks bias prefix packed block strided".split()
    drawn = [{n: bool(p[n]) for n in names} for p in map(draw, range(FUZZ))]
    for a, b in combinations(names, 2):
        for pair in product((False, True), repeat=2):
            count = sum((p[a], p[b]) == pair for p in drawn)
            never = (a, b, *pair) in {
                ("causal", "prefix", False, True),
                ("packed", "block", True, True),
            }
            assert count == 0 if never else count >= 8, (a, b, pair, count)


MISTAKES = dict(
    window=lambda p, a: a | {"window": a["window"] + 1} if p["window"] else None,
    softcap=lambda p, a: a | {"softcap": a["softcap"] * 1.01} if p["softcap"] else None,
    alibi=lambda p, a: a | {"alibi_slopes": -a["alibi_slopes"]} if p["alibi"] else None,
    sinks_twice=lambda p, a: a | {"sinks": a["sinks"] + math.log(2)} if p["sinks"] else None,
    prefix=lambda p, a: a | {"prefix": a["prefix"] + 1} if p["prefix"] else None,
    bias=lambda p, a: a | {"bias": a["bias"].roll(1, -1)} if p["bias"] and p["bias"][-1] else None,
    scale=lambda p, a: a | {"scale": (a["scale"] or p["D"] ** -0.5) * 1.01},
    heads=lambda p, a: a | {n: a[n].roll(1, -2) for n in "kv"} if p["kv_heads"] > 1 else None,
    tiles=lambda p, a: (
        a | {"block_mask": A.BlockMask(a["block_mask"].visit.roll(1, -1), p["block"])}
        if p["block"] and p["sizes"][0][1] > p["block"]
        else None
    ),
    top_left=lambda p, a: (
        a | {"bias": a.get("bias", 0) + torch.full(p["sizes"][0], -INF, device=DEVICE).triu(1)}
        if p["causal"] and not p["packed"] and p["sizes"][0][0] < p["sizes"][0][1]
        else None
    ),
)


def noticed(p: dict, spoil) -> bool:
    """Whether the comparison fails when the truth is given spoilt arguments."""
    try:
        check(A.attention_reference, p, lambda **a: A.attention_reference(**spoil(a)))
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("mistake", MISTAKES)
def test_fuzz_finds(mistake):
    """A mistake on one side fails the comparison in most draws that it concerns."""
    spoils = ((p, partial(MISTAKES[mistake], p)) for p in map(draw, range(FUZZ)))
    concerned = ((p, spoil) for p, spoil in spoils if spoil(build(p)[0] | build(p)[1]))
    found = [noticed(p, spoil) for p, spoil in islice(concerned, 40)]
    assert len(found) >= 10 and sum(found) >= len(found) / 2, found


# --------------------------------------------------------------------------------------------------
# Properties
# --------------------------------------------------------------------------------------------------


def test_one_output_unless_lse_is_asked_for():
    """o alone or (o, lse): float32 of shape (B, Hq, T), and the same o."""
    q, k, v = qkv(5, 9, 2)
    for attend in (A.flash_attention, A.chunked_attention, A.attention_reference):
        o, lse = attend(q, k, v, return_lse=True)
        assert torch.equal(attend(q, k, v), o) and o.shape == q.shape
        assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32


@pytest.mark.parametrize("sinks", [True, False])
def test_rows_that_see_nothing(sinks):
    """Zero output, lse of -inf or the sink, and gradients of exactly zero through them, in rows cut
    off by position, by bias and by tiles alike."""
    q, k, v = (x.requires_grad_() for x in qkv(40, 33, 1))
    bias = torch.zeros(40, 33, device=DEVICE)
    bias[20] = -INF
    visit = torch.ones(3, 3, dtype=torch.bool, device=DEVICE)
    visit[2], visit[:, 1] = False, False
    flags = dict(bias=bias, block_mask=A.BlockMask(visit, 16))
    if sinks:
        flags["sinks"] = normal(4, dtype=torch.float32)
    o, lse = A.flash_attention(q, k, v, **flags, return_lse=True)
    empty = torch.zeros(40, dtype=torch.bool)
    empty[:7] = empty[20] = empty[32:] = True
    assert not o[:, empty].any() and o[:, ~empty].abs().amin() > 0
    want = flags["sinks"][:, None] if sinks else torch.tensor(-INF)
    close(lse[0][:, empty], want.expand(4, int(empty.sum())).to(lse))
    dq, dk, dv = torch.autograd.grad((o + lse.masked_fill(lse == -INF, 0).sum()).sum(), (q, k, v))
    assert not dq[:, empty].any() and not dk[:, 16:32].any() and not dv[:, 16:32].any()
    assert all(g.isfinite().all() and g.any() for g in (dq, dk, dv))


def test_sink_of_minus_infinity_is_none():
    """A sink of -inf takes nothing, in empty rows either, and gets no gradient."""
    leaves, flags, weights = build(case(sizes=[(37, 20)], sinks=True))
    leaves["sinks"] = torch.full_like(leaves["sinks"], -INF)
    got = outcome(A.flash_attention, leaves, flags, weights)
    assert not got.pop("dsinks").any()
    leaves.pop("sinks")
    all_close(got, outcome(A.flash_attention, leaves, flags, weights))


def test_a_mask_of_the_lowest_number_is_a_mask():
    """finfo.min, which transformers adds where keys are hidden, hides them as -inf does."""
    q, k, v = qkv(20, 37, 1)
    hidden = torch.rand(20, 37, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.5
    low, never = (torch.where(hidden, x, 0.0) for x in (torch.finfo(torch.float32).min, -INF))
    a, b = (A.flash_attention(q, k, v, causal=False, bias=x, return_lse=True) for x in (low, never))
    for got, want in zip(a, b):
        close(got, want)


def test_huge_scores():
    """Scores of thousands neither overflow nor vanish."""
    p = case(sizes=[(37, 37)], scale=60.0)
    leaves, flags, weights = build(p)
    got = outcome(A.flash_attention, leaves, flags, weights)
    want = outcome(A.attention_reference, doubled(leaves), doubled(flags), weights)
    assert want["lse"].max() > 1000
    for name in want:
        close(got[name], want[name], 1e-2 if FLOAT == torch.float32 else 5e-2)


SEPARATE = [(20, 20), (0, 5), (13, 37), (4, 0), (1, 1), (21, 9)]


@pytest.mark.parametrize("busy", [False, True])
def test_packed_is_separate(busy):
    """Packed sequences give what each gives alone, gradients too."""
    changes = BUSY | dict(prefix=[9, 2, 30, 0, 1, 3]) if busy else {}
    leaves, flags, weights = build(case(packed=True, sizes=SEPARATE, **changes))
    packed = outcome(A.flash_attention, leaves, flags, weights)
    cu_q, cu_k = flags.pop("cu_seqlens_q").tolist(), flags.pop("cu_seqlens_k").tolist()
    prefix, dsinks = flags.pop("prefix", None), 0
    for n, (a, b, c, d) in enumerate(zip(cu_q, cu_q[1:], cu_k, cu_k[1:])):
        if a == b or c == d:
            assert not packed["o"][a:b].any() and not packed["dk"][c:d].any()
            dsinks = dsinks + weights[1][:, a:b].sum(-1)
            continue
        alone = leaves | dict(q=leaves["q"][None, a:b]) | {x: leaves[x][None, c:d] for x in "kv"}
        more = dict(prefix=prefix[n : n + 1]) if busy else {}
        mine = weights[0][None, a:b], weights[1][None, :, a:b]
        got = outcome(A.flash_attention, alone, flags | more, mine)
        dsinks = dsinks + got.pop("dsinks", 0)
        close(packed["lse"][:, a:b], got.pop("lse")[0])
        for name, x in got.items():
            rows = slice(a, b) if name in ("o", "dq") else slice(c, d)
            close(packed[name][rows], x[0])
    if busy:
        close(packed["dsinks"], dsinks)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cuts", [(1,), (20,), (52,), (7, 30)], ids=str)
def test_merged_parts_are_the_whole(cuts, packed):
    """Attention to parts of the keys, merged, is attention to all, with its lse and gradients; some
    rows see nothing of one part, or of any."""
    T, S, lead = 32, 53, () if packed else (2,)
    leaves = dict(zip("qkv", qkv(T, S, *lead, heads=2, kv_heads=1)))
    i, j = torch.arange(T, device=DEVICE)[:, None] + S - T, torch.arange(S, device=DEVICE)
    hidden = (j > i) | (i - j >= 12) | (i == 30)
    bias = torch.zeros(T, S, device=DEVICE).masked_fill(hidden, -INF)
    weights = normal(*lead, T, 2, 16), normal(*lead, 2, T, dtype=torch.float32)

    def part(q, k, v, a=0, b=S, **more):
        ends = dict(cu_seqlens_q=int32(0, T), cu_seqlens_k=int32(0, b - a)) if packed else {}
        k, v = k[..., a:b, :, :], v[..., a:b, :, :]
        return A.flash_attention(q, k, v, causal=False, bias=bias[:, a:b], **ends, return_lse=True)

    def merged(q, k, v, **more):
        parts = [part(q, k, v, a, b) for a, b in zip((0, *cuts), (*cuts, S))]
        return reduce(lambda x, y: A.merge_attention(*x, *y), parts)

    all_close(outcome(merged, leaves, {}, weights), outcome(part, leaves, {}, weights))


def test_merge_of_nothing():
    """Two empty sets make an empty one, with finite gradients; an empty set adds nothing, on either
    side."""
    o, lse = normal(2, 5, 4, 16), normal(2, 4, 5, dtype=torch.float32)
    zero, never = torch.zeros_like(o), torch.full_like(lse, -INF)
    for a, b in (((o, lse), (zero, never)), ((zero, never), (o, lse))):
        got = A.merge_attention(*a, *b)
        close(got[0], o, 1e-6)
        close(got[1], lse, 1e-6)
    leaves = [x.clone().requires_grad_() for x in (zero, never, zero, never)]
    got, total = A.merge_attention(*leaves)
    assert not got.any() and (total == -INF).all()
    for g in torch.autograd.grad(got.sum() + total.masked_fill(total == -INF, 0).sum(), leaves):
        assert g.isfinite().all()


@pytest.mark.parametrize("packed", [False, True])
def test_same_bits_every_time(packed):
    """Forward and backward, run twice, give the same bits to every gradient."""
    sizes = [(37, 37)] if packed else [(20, 37)] * 2
    p = case(sizes=sizes, packed=packed, heads=3, sinks=True, bias=[False, False, True])
    once, again = (outcome(A.flash_attention, *build(p)) for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)


@pytest.mark.parametrize("where", ["between", "padding"])
def test_poison_stays_where_it_is(where):
    """NaN in one packed sequence, or past the last, changes no bit of another's output and
    gradients."""
    ends, n = (int32(0, 20, 33, 54), 54) if where == "between" else (int32(0, 20, 33), 54)
    bad = slice(20, 33) if where == "between" else slice(33, 54)
    leaves, (w, u) = dict(zip("qkv", qkv(n, n))), (normal(n, 4, 16), normal(4, n))
    w[bad], u[:, bad] = 0, 0
    clean = outcome(A.flash_attention, leaves, dict(cu_seqlens_q=ends), (w, u))
    poisoned = {name: x.clone() for name, x in leaves.items()}
    for x in poisoned.values():
        x[bad] = math.nan
    got = outcome(A.flash_attention, poisoned, dict(cu_seqlens_q=ends), (w, u))
    good = torch.ones(n, dtype=torch.bool)
    good[bad] = False
    assert torch.equal(got.pop("lse")[:, good], clean.pop("lse")[:, good])
    for name in got:
        assert torch.equal(got[name][good], clean[name][good]), name


def test_padding_rows():
    """Rows past the last sequence give 0, lse of -inf even with sinks, and no gradient."""
    leaves, flags, weights = build(case(packed=True, sizes=[(9, 9), (12, 12)], pad=19, sinks=True))
    got = outcome(A.flash_attention, leaves, flags, weights)
    assert (got["lse"][:, 21:] == -INF).all()
    for name in ("o", "dq", "dk", "dv"):
        assert not got[name][21:].any() and got[name][:21].any(), name


@pytest.mark.parametrize("wanted", ["q", "k", "v", "sinks", "bias", "q v", "k bias"])
def test_gradients_asked_for_one_by_one(wanted):
    """A tensor's gradient is the same whichever others are asked for."""
    leaves, flags, weights = build(case(**BUSY, bias=[True, True, True]))
    full = outcome(A.flash_attention, leaves, flags, weights)
    kept = {name: leaves.pop(name) for name in wanted.split()}
    got = outcome(A.flash_attention, kept, flags | leaves, weights)
    all_close(got, {name: full[name] for name in got}, 1e-6)


LAYOUTS = dict(
    fused=lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    head_first=lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    channel_first=lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    every_other=lambda x: torch.stack((x, x), -1)[..., 0],
    one_row_for_all=lambda x: x[:1, :1].expand_as(x),
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_do_not_matter(layout):
    """Views of any strides, inputs and gradients that come in alike, count as their copies."""
    view = LAYOUTS[layout]
    tensors = (*qkv(21, 21, 2, heads=2, kv_heads=1), normal(2, 21, 2, 16))

    def run(copy):
        q, k, v, w = (copy(view(x)) for x in tensors)
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        o = A.flash_attention(q, k, v)
        return (o.detach(), *torch.autograd.grad(o, (q, k, v), w))

    for got, want in zip(run(lambda x: x), run(torch.Tensor.contiguous)):
        close(got, want, 1e-6)


# --------------------------------------------------------------------------------------------------
# Decode
# --------------------------------------------------------------------------------------------------


def check_decode(q, k, v, lengths, n_splits, **flags):
    """decode_attention == the reference row by row, on caches full of NaN past their lengths."""
    used = [k.shape[1]] * len(q) if lengths is None else lengths
    k, v = k.clone(), None if v is None else v.clone()
    for b, n in enumerate(used):
        for cache in (k,) if v is None else (k, v):
            cache[b, n:] = math.nan
    ends = None if lengths is None else int32(*lengths)
    got = A.decode_attention(q, k, v, ends, n_splits=n_splits, return_lse=True, **flags)
    v = k[..., : flags.pop("latent_dim")] if v is None else v
    attend = partial(A.attention_reference, return_lse=True, **doubled(flags))
    rows = [
        attend(*(x[b : b + 1].double() for x in (q, k[:, :n], v[:, :n])))
        for b, n in enumerate(used)
    ]
    assert got[0].dtype == q.dtype
    for x, want in zip(got, zip(*rows)):
        close(x, torch.cat(want), TOLERANCE[q.dtype])


def draw_decode(seed: int) -> dict:
    r = random.Random(seed)

    def coin(odds=0.5):
        return r.random() < odds

    heads, kv_heads = r.choice(HEADS)
    B, S = r.choice((1, 2, 3)), r.choice((5, 37, 64, 100))
    lengths = [r.choice((0, 1, 2, S // 2, r.randint(0, S), S)) for _ in range(B)]
    return dict(
        seed=seed,
        dtype=DTYPES[coin(0.3)],
        B=B,
        T=r.choice((1, 1, 3)),
        S=S,
        heads=heads,
        kv_heads=kv_heads,
        D=r.choice((16, 32, 48)),
        Dv=r.choice((None, None, 24)),
        lengths=lengths if coin(0.8) else None,
        n_splits=r.choice((None, 1, 2, 5, 8)),
        heads_first=coin(),
        causal=coin(0.8),
        window=r.choice((1, 3, 20)) if coin() else None,
        softcap=3.0 if coin(0.3) else None,
        scale=0.3 if coin(0.3) else None,
        alibi=coin(0.4),
        sinks=coin(),
    )


def check_drawn_decode(p: dict) -> None:
    names = ("heads", "kv_heads", "D", "Dv", "dtype", "seed")
    q, k, v = qkv(p["T"], p["S"], p["B"], **{name: p[name] for name in names})
    if p["heads_first"]:
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    flags = {name: p[name] for name in ("causal", "window", "softcap", "scale")}
    if p["alibi"]:
        flags["alibi_slopes"] = torch.arange(1.0, p["heads"] + 1, device=DEVICE) / 20
    if p["sinks"]:
        flags["sinks"] = normal(p["heads"], dtype=torch.float32)
    try:
        check_decode(q, k, v, p["lengths"], p["n_splits"], **flags)
    except AssertionError as failed:
        raise AssertionError(p) from failed


@pytest.mark.parametrize("seed", range(48))
def test_decode_fuzz(seed):
    """Split decoding over ragged caches == the reference for any combination; a sink counts once
    whatever the splits."""
    check_drawn_decode(draw_decode(seed))


@pytest.mark.parametrize("D, rank", [(48, 32), (80, 64)])
@pytest.mark.parametrize("T, n_splits", [(1, 1), (1, 5), (3, 2), (1, None)])
def test_decode_latent(D, rank, T, n_splits):
    """Absorbed MLA: the values are the first columns of the keys, read from one cache."""
    q, k, _ = qkv(T, 53, 2, heads=6, kv_heads=1, D=D)
    check_decode(q, k, None, [53, 17], n_splits, latent_dim=rank, scale=0.2)


def test_decode_in_a_longer_cache():
    """A slice of a larger buffer is a cache too: the slots behind it are not touched or read."""
    q, k, v = qkv(1, 64, 2)
    view = [torch.full((2, 2, 128, 16), math.nan, device=DEVICE, dtype=FLOAT) for _ in "kv"]
    for whole, x in zip(view, (k, v)):
        whole[:, :, 32:96] = x.transpose(1, 2)
    k_view, v_view = (x[:, :, 32:96].transpose(1, 2) for x in view)
    lengths = int32(64, 40)
    for n in (1, 3):
        got = A.decode_attention(q, k_view, v_view, lengths, n_splits=n)
        assert torch.equal(got, A.decode_attention(q, k, v, lengths, n_splits=n))


@pytest.mark.parametrize("n_splits", [1, 2, 5, 8])
@pytest.mark.parametrize("T", [1, 3])
def test_decode_does_not_see_its_batch(T, n_splits):
    """A row's bits are the same alone, among others, and among others in another order."""
    q, k, v = qkv(T, 53, 3, heads=2, kv_heads=1)
    lengths, attend = int32(53, 7, 30), partial(A.decode_attention, n_splits=n_splits, window=25)
    o, lse = attend(q, k, v, lengths, return_lse=True)
    back = attend(q.flip(0), k.flip(0), v.flip(0), lengths.flip(0), return_lse=True)
    assert torch.equal(back[0].flip(0), o) and torch.equal(back[1].flip(0), lse)
    for b in range(3):
        row = slice(b, b + 1)
        alone = attend(q[row], k[row], v[row], lengths[row], return_lse=True)
        assert torch.equal(alone[0], o[row]) and torch.equal(alone[1], lse[row])


# --------------------------------------------------------------------------------------------------
# Patterns and packing
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_q, n_k", [(6, 6), (3, 7), (7, 3)])
@pytest.mark.parametrize(
    "local, global_, stride", [(0, 0, 0), (2, 0, 0), (0, 2, 0), (0, 0, 3), (1, 1, 2)]
)
def test_sparse_blocks(n_q, n_k, local, global_, stride):
    """The pattern is its definition, block by block, blocks aligned at the end."""
    got = A.sparse_blocks(n_q, n_k, local=local, global_=global_, stride=stride)
    assert got.dtype == torch.bool and got.shape == (n_q, n_k)
    for row, kb in product(range(n_q), range(n_k)):
        qb = row + n_k - n_q
        want = abs(qb - kb) < local or kb < global_ or qb < global_
        want = want or stride > 0 and (qb - kb) % stride == 0
        assert got[row, kb].item() == want, (row, kb)


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("T, S", [(53, 53), (37, 80)])
@pytest.mark.parametrize("causal", [True, False])
def test_block_mask_is_a_dense_mask(block, T, S, causal):
    """Visiting a pattern's tiles == masking all other scores, under a window too."""
    visit = A.sparse_blocks(-(-T // block), -(-S // block), local=1, stride=3).to(DEVICE)
    dense = visit.repeat_interleave(block, 0).repeat_interleave(block, 1)[:T, :S]
    bias = torch.zeros(T, S, device=DEVICE).masked_fill(~dense, -INF)
    q, k, v = qkv(T, S, 1, heads=2, kv_heads=1)
    attend = partial(A.flash_attention, q, k, v, causal=causal, window=40, return_lse=True)
    for got, want in zip(attend(block_mask=A.BlockMask(visit, block)), attend(bias=bias)):
        close(got, want)


def test_prefix_joins_causal_and_full():
    """A prefix of nothing is causal, of everything full, and in between the prefix sees itself."""
    q, k, v = qkv(37, 37, 2, heads=2)
    attend = partial(A.flash_attention, q, k, v)
    close(attend(prefix=int32(0, 0)), attend())
    close(attend(prefix=int32(37, 37)), attend(causal=False))
    part, full = attend(prefix=int32(20, 5)), partial(A.flash_attention, causal=False)
    for b, n in enumerate((20, 5)):
        close(part[b, :n], full(*(x[b : b + 1, :n] for x in (q, k, v)))[0])
        close(part[b, n:], attend()[b, n:])


@pytest.mark.parametrize("lengths", [(3, 1, 4), (5,), (2, 0, 3)], ids=str)
def test_pack(lengths):
    """Sequences laid end to end, with positions that start again and the ends between them."""
    sequences = [list(range(10 * n, 10 * n + n)) for n in lengths]
    tokens, positions, ends = A.pack([torch.tensor(s, dtype=torch.long) for s in sequences])
    assert tokens.tolist() == [sum(sequences, [])]
    assert positions.tolist() == [i for n in lengths for i in range(n)]
    assert ends.tolist() == [0, *accumulate(lengths)] and ends.dtype == torch.int32


# --------------------------------------------------------------------------------------------------
# fp8
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("D", [1, 2, 16, 128])
def test_hadamard_matrix(D):
    """Its entries are all of one size and its rows orthonormal."""
    h = A.hadamard_matrix(D).double().cpu()
    close(h @ h.T, torch.eye(D).double(), 1e-6)
    close(h.abs(), torch.full((D, D), D**-0.5).double(), 1e-6)


needs_fp8 = pytest.mark.skipif(
    CUDA and torch.cuda.get_device_capability() < (8, 9), reason="a GPU without e4m3"
)


def fp8_error(outlier: float, **flags) -> float:
    """The relative error on Gaussian data, two of whose channels in q and k are outliers."""
    q, k, v = qkv(160, 160, 1, heads=2, kv_heads=1, D=64, dtype=torch.float16)
    for x in (q, k):
        x[..., [3, 17]] *= outlier
    got = A.flash_attention_fp8(q, k, v, **flags)
    assert got.dtype == torch.float16
    want = by_sdpa(q.double(), k.double(), v.double(), causal=flags.get("causal", True))
    return ((got.double() - want).norm() / want.norm()).item()


@needs_fp8
@pytest.mark.parametrize("causal", [True, False])
def test_fp8_error(causal):
    """Plain data cost what e4m3 must: some 5%, and not so little that nothing was rounded."""
    assert 0.02 < fp8_error(1.0, causal=causal) < 0.065


@needs_fp8
def test_fp8_blocks_have_scales_of_their_own(monkeypatch):
    """Where blocks of 128 rows differ in size, the kernel == its roundings in plain torch, but for
    the running maximum that p is rounded against."""
    states = qkv(160, 160, 1, heads=2, kv_heads=1, D=32, dtype=torch.float32)
    for x, factor in zip(states, (2, 3, 8)):
        x[:, 128:] *= factor
    got = A.flash_attention_fp8(*states, causal=False)
    monkeypatch.setattr(A, "_kernels", lambda *_, **__: False)
    assert relative(got, A.flash_attention_fp8(*states, causal=False)) < 0.03


@needs_fp8
def test_hadamard_spreads_outliers():
    """On data with a few outlier channels the rotation at least halves the error."""
    assert fp8_error(8.0) < 0.5 * fp8_error(8.0, hadamard=False)


# --------------------------------------------------------------------------------------------------
# As part of a program
# --------------------------------------------------------------------------------------------------

GRAPHS = dict(
    plain=dict(),
    busy=dict(BUSY, bias=[True, True, True], block=16),
    packed=dict(packed=True, sizes=[(20, 20), (17, 17)], sinks=True),
)


def tiles_visited(monkeypatch, run) -> int:
    """Tiles of scores that run() computes, counted where every kernel makes them into logits."""
    count, logits = [], A._logits

    def counted(*args, **more):
        count.append(1)
        return logits(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(A, "_logits", counted)
        run()
    return len(count)


@pytest.mark.skipif(not A.INTERPRET, reason="counts Python calls, which a GPU does not make")
def test_only_tiles_that_are_seen_are_computed(monkeypatch):
    """A window costs O(T W) tiles, forward and backward: twice the length, twice the tiles; causal
    attention a little over half of all, a packed row the sum of its sequences, a block mask what it
    lists."""
    monkeypatch.setattr(A, "CONFIGS", {n: {512: (16, 16, 4, 1, False)} for n in ("forward",)})
    A.CONFIGS["backward"] = {512: (16, 16, 16, 16, 4, 1)}

    def count(T, grad=False, packed=False, **flags):
        q, k, v = qkv(T, T, *[1][packed:], heads=1, kv_heads=1)
        q.requires_grad_(grad)
        attend = partial(A.flash_attention, q, k, v, **flags)
        if not grad:
            return tiles_visited(monkeypatch, attend)
        o = attend()
        return tiles_visited(monkeypatch, o.sum().backward)

    assert count(128, causal=False) == 64 and count(128) == 8 * 9 // 2
    for n in (8, 16):  # tiles of queries; a window of 17 reaches back into one tile of keys more
        assert count(16 * n, window=17) == 2 * n - 1
        assert count(16 * n, window=17, grad=True) == 2 * (2 * n - 1)
    ends = dict(cu_seqlens_q=int32(0, 32, 80, 128), packed=True)
    assert count(128, **ends) == 3 + 6 + 6
    visit = A.sparse_blocks(4, 4, local=1, global_=1).tril().to(DEVICE)
    visited = int(visit.sum())  # blocks of 32 x 32: four tiles each
    assert count(128, block_mask=A.BlockMask(visit, 32)) == 4 * visited
    assert count(128, block_mask=A.BlockMask(visit, 32), grad=True) == 8 * visited


@pytest.mark.parametrize("graph", GRAPHS)
def test_compiled_is_the_same(graph):
    """One whole graph, forward and backward, and again for another length."""
    torch.compiler.reset()
    compiled = torch.compile(A.flash_attention, fullgraph=True, backend="aot_eager")
    for sizes in (None, [(21, 21)])[: 2 if graph == "plain" else 1]:
        p = case(**GRAPHS[graph]) | (dict(sizes=sizes) if sizes else {})
        got = outcome(compiled, *build(p))
        all_close(got, outcome(A.flash_attention, *build(p)), 1e-6)


@pytest.mark.parametrize("graph", GRAPHS)
def test_checkpointed_is_the_same(graph):
    """Recomputed in backward, attention has the same bits everywhere."""
    leaves, flags, weights = build(case(**GRAPHS[graph]))
    again = partial(checkpoint, A.flash_attention, use_reentrant=False)
    got, want = (outcome(f, leaves, flags, weights) for f in (again, A.flash_attention))
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_attention_on_a_cpu_is_plain_torch(monkeypatch):
    """Where no kernel can run the same calls give the same, with every flag."""
    monkeypatch.setattr(A, "_kernels", lambda *_, **__: False)
    for seed in range(24):
        check(A.flash_attention, draw(seed))
        check_drawn_decode(draw_decode(seed))


COMPILE = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget
import attention as A

arch, cases = int(sys.argv[1]), sys.argv[2:]
SHARED, built = {80: 166912, 90: 232448, 100: 232448}[arch], []

class Device:
    # what Triton asks a driver for on its way to a launch, of a GPU that is not there
    launcher_cls = lambda self, *_: lambda *args, **more: None
    utils = property(lambda self: self)
    get_current_device = get_current_stream = lambda self, *_: 0
    get_current_target = lambda self: GPUTarget("cuda", arch, 32)
    is_active = lambda self: True
    get_device_properties = lambda self, _: {"max_shared_mem": SHARED}

    def load_binary(self, name, binary, shared, device):
        built.append(name)
        assert shared <= SHARED
        return 0, 0, 0, 0, 1024

triton.runtime.driver.set_active(Device())
A._kernels, A._device = lambda *_, **__: True, lambda _: (132, SHARED, arch // 10)
make = lambda *shape, dtype=torch.bfloat16: torch.randn(*shape, dtype=dtype).requires_grad_()
int32 = lambda *x: torch.tensor(x, dtype=torch.int32)

def flash(D=128, Dv=None, dtype=torch.bfloat16, packed=False, **flags):
    q, k, v = (make(1, 300, h, d, dtype=dtype) for h, d in ((4, D), (2, D), (2, Dv or D)))
    q, k, v = (x[0] if packed else x for x in (q, k, v))
    A.flash_attention(q, k, v, **flags).sum().backward()

def decode(D=128, T=1, Hq=8, Hkv=2, **flags):
    q, k, v = make(2, T, Hq, D), make(2, 300, Hkv, D), make(2, 300, Hkv, D)
    A.decode_attention(q, k, None if "latent_dim" in flags else v, int32(9, 300), **flags)

busy = dict(window=33, softcap=5.0, alibi_slopes=torch.rand(4), sinks=make(4))
busy |= dict(bias=make(4, 300, 300), prefix=int32(7))
for case in cases:
    eval(case)
print(sorted(set(built)))
"""


def compile_kernels(code: str, folder: Path, *argv) -> str:
    """What such a program prints, in a process and with a Triton cache of its own."""
    env = os.environ | dict(TRITON_CACHE_DIR=str(folder), PYTHONPATH=str(REPO))
    argv = [sys.executable, "-c", code, *map(str, argv)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


COMPILED = ["flash()", "decode(n_splits=8)"]
ALL_COMPILED = [
    *COMPILED,
    "flash(packed=True, cu_seqlens_q=int32(0, 300), **busy)",
    *(f"flash({D})" for D in ("16", "64", "96", "192, 128", "256")),
    *(f"flash(64, dtype=torch.{dtype})" for dtype in ("float16", "float32")),
    "flash(causal=False)",
    "flash(block_mask=A.BlockMask(torch.ones(3, 3).bool(), 128), **busy)",
    *(f"decode({D}, T={T})" for D in (64, 256) for T in (1, 128)),
    "decode(576, Hq=128, Hkv=1, latent_dim=512)",
]
SOME_COMPILED = [  # where sizes and code depend on the GPU: fp32, wide heads, all rules at once
    *COMPILED,
    "flash(packed=True, cu_seqlens_q=int32(0, 300), **busy)",
    "flash(64, dtype=torch.float32)",
    "flash(192, 128)",
    "flash(256)",
    "decode(256, T=128)",
    "decode(576, Hq=128, Hkv=1, latent_dim=512)",
]


@pytest.mark.skipif(not A.INTERPRET, reason="where there is a GPU, or no Triton, nothing to learn")
@pytest.mark.parametrize(
    "arch, cases",
    [
        (90, COMPILED),
        pytest.param(90, ALL_COMPILED, marks=pytest.mark.slow),
        *(pytest.param(a, SOME_COMPILED, marks=pytest.mark.slow) for a in (80, 100)),
    ],
    ids=["90", "90-all", "80-some", "100-some"],
)
def test_kernels_compile_for_gpus(arch, cases, tmp_path):
    """What the interpreter forgives a GPU does not: all kernels compile to machine code for Hopper,
    and the largest of them for Ampere and Blackwell, with no GPU at hand, and fit into their shared
    memory."""
    if arch >= 89 and len(cases) > 2:
        cases = [
            *cases,
            "A.flash_attention_fp8(*(make(1, 300, 4, 128).detach() for _ in range(3)))",
        ]
    names = ["_backward", *["_bias"] * (len(cases) > 2), "_combine", "_delta", "_forward"]
    printed = compile_kernels(COMPILE, tmp_path, arch, *cases)
    assert printed.strip() == str([name + "_kernel" for name in names])


@pytest.mark.slow
@pytest.mark.skipif(not A.INTERPRET, reason="where there is a GPU, or no Triton, nothing to learn")
def test_packed_lengths_do_not_recompile(tmp_path):
    """Packed rows of other lengths, and of more sequences, run the kernels that are compiled."""
    packs = """
for ends in ((0, 300), (0, 50, 701), (0, 7, 7, 90, 1003)):
    q, k, v = (make(ends[-1], heads, 64) for heads in (4, 2, 2))
    A.flash_attention(q, k, v, cu_seqlens_q=int32(*ends)).sum().backward()
    print(built.count("_forward_kernel"), built.count("_backward_kernel"))
"""
    printed = compile_kernels(COMPILE + packs, tmp_path, 90)
    counts = [[int(n) for n in line.split()] for line in printed.splitlines()[1:]]
    assert counts == [[1, 1]] * 3, counts


@pytest.mark.parametrize(
    "triton",
    ["missing", *(pytest.param(t, marks=pytest.mark.slow) for t in ("interpreted", "installed"))],
)
def test_attention_alone_in_a_folder(triton, tmp_path):
    """The one file, copied away, checks itself: without Triton, with it, and on its kernels."""
    shutil.copy(REPO / "attention.py", tmp_path)
    code = (
        "import sys; sys.modules['triton'] = None; import attention; attention._self_check('cpu')"
    )
    argv = ["-c", code] if triton == "missing" else ["attention.py"]
    env = os.environ | (dict(TRITON_INTERPRET="1") if triton == "interpreted" else {})
    done = subprocess.run(
        [sys.executable, *argv], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    kind = "Triton" if triton == "interpreted" or CUDA and triton == "installed" else "plain torch"
    assert re.search(rf"flash_attention +{kind} +error", done.stdout), done.stdout
    assert CUDA or triton != "installed" or "SDPA (CPU)" in done.stdout


@pytest.mark.parametrize("op", ["forward", "backward", "decode"])
def test_opcheck(op):
    """The op's schema, fake implementation and autograd registration are what it does."""
    leaves, flags, _ = build(case(**GRAPHS["busy"]))
    q, k, v, f = A._prepare(**leaves, **flags)
    arguments = (q, k, v, *f)
    if op == "backward":
        o, lse = A._forward_op(*arguments)
        arguments = (q, k, v, o, lse, torch.ones_like(o), torch.ones_like(lse), True, *f)
    elif op == "decode":
        q, k, v, f = A._prepare(*qkv(1, 37, 2), lengths=int32(37, 20), window=9)
        arguments = (q, k, v, 0, 2, *f)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(getattr(A, f"_{op}_op"), arguments, test_utils=checks)


# --------------------------------------------------------------------------------------------------
# What is refused
# --------------------------------------------------------------------------------------------------

DENSE = dict(zip("qkv", qkv(7, 9, 2)))
PACKED = dict(zip("qkv", qkv(7, 9)), cu_seqlens_q=int32(0, 3, 7), cu_seqlens_k=int32(0, 4, 9))
CACHE = dict(DENSE, lengths=int32(9, 5))
VISIT = torch.ones(1, 1, dtype=torch.bool, device=DEVICE)
REFUSED = [
    ("heads?|q|k", DENSE, dict(q=normal(2, 7, 3, 16))),
    ("heads?|q|k", PACKED, dict(q=normal(7, 3, 16))),
    ("v", DENSE, dict(v=normal(2, 9, 1, 16))),
    ("v", DENSE, dict(v=normal(2, 8, 2, 16))),
    ("k", DENSE, dict(k=normal(2, 9, 2, 24))),
    ("k", DENSE, dict(k=normal(1, 9, 2, 16), v=normal(1, 9, 2, 16))),
    ("k", DENSE, dict(k=normal(2, 9, 2, 16, dtype=DTYPES[1]))),
    ("v", DENSE, dict(v=normal(2, 9, 2, 16, dtype=DTYPES[1]))),
    ("q", DENSE, dict(q=normal(2, 7, 4, 16).long())),
    ("q", DENSE, {x: DENSE[x].long() for x in "qkv"}),
    ("q|cu_seqlens_q", DENSE, {x: PACKED[x] for x in "qkv"}),
    ("q|cu_seqlens_q", DENSE, dict(cu_seqlens_q=int32(0, 7))),
    ("window", DENSE, dict(window=0)),
    ("window", DENSE, dict(window=-3)),
    ("window", DENSE, dict(window=5.0)),
    ("scale", DENSE, dict(scale=0.0)),
    ("scale", DENSE, dict(scale=-1.0)),
    ("scale", DENSE, dict(scale=math.nan)),
    ("softcap", DENSE, dict(softcap=0.0)),
    ("softcap", DENSE, dict(softcap=-5.0)),
    ("softcap", DENSE, dict(softcap=INF)),
    ("sinks", DENSE, dict(sinks=normal(2))),
    ("sinks", DENSE, dict(sinks=normal(2, 4))),
    ("alibi_slopes", DENSE, dict(alibi_slopes=normal(2))),
    ("bias", DENSE, dict(bias=normal(7, 8))),
    ("bias", DENSE, dict(bias=normal(3, 1, 1, 9))),
    ("bias", DENSE, dict(bias=normal(1, 2, 4, 7, 9))),
    ("bias", PACKED, dict(bias=normal(2, 4, 7, 9))),
    ("prefix", DENSE, dict(prefix=int32(3))),
    ("prefix", DENSE, dict(prefix=int32(3, 3).float())),
    ("prefix", PACKED, dict(prefix=int32(3, 3, 3))),
    ("cu_seqlens_q", PACKED, dict(cu_seqlens_q=PACKED["cu_seqlens_q"].long())),
    ("cu_seqlens_k", PACKED, dict(cu_seqlens_k=PACKED["cu_seqlens_k"].long())),
    ("cu_seqlens_q", PACKED, dict(cu_seqlens_q=PACKED["cu_seqlens_q"][None])),
    ("cu_seqlens_[qk]", PACKED, dict(cu_seqlens_k=int32(0, 9))),
    ("cu_seqlens_[qk]", DENSE, dict(cu_seqlens_k=int32(0, 9))),
    ("block_mask", PACKED, dict(block_mask=A.BlockMask(VISIT, 16))),
    ("block_mask|visit", DENSE, dict(block_mask=A.BlockMask(VISIT.expand(2, 1), 16))),
    ("block_mask|visit", DENSE, dict(block_mask=A.BlockMask(VISIT.expand(3, 1, 1), 16))),
    ("block_mask|visit", DENSE, dict(block_mask=A.BlockMask(VISIT.float(), 16))),
]
REFUSED_DECODE = [
    ("heads?|q|k", dict(q=normal(2, 1, 3, 16))),
    ("k", dict(k=normal(2, 9, 2, 24))),
    ("v", dict(v=normal(2, 8, 2, 16))),
    ("v|latent_dim", dict(v=None)),
    ("latent_dim", dict(v=None, latent_dim=17)),
    ("latent_dim", dict(v=None, latent_dim=0)),
    ("lengths", dict(lengths=int32(9))),
    ("lengths", dict(lengths=int32(9, 5).long())),
    ("window", dict(window=0)),
    ("scale", dict(scale=-1.0)),
    ("softcap", dict(softcap=0.0)),
    ("sinks", dict(sinks=normal(2))),
    ("alibi_slopes", dict(alibi_slopes=normal(5))),
    ("n_splits", dict(n_splits=0)),
    ("block_mask", dict(block_mask=A.BlockMask(VISIT, 16))),
]


def refuses(name: str, attend, arguments: dict) -> None:
    with pytest.raises(ValueError, match=rf"\b({name})\b"):
        attend(**arguments)


@pytest.mark.parametrize("n", range(len(REFUSED)))
def test_mistakes_are_refused(n):
    """A call that cannot be meant is refused, by name, by each of the three."""
    name, base, changes = REFUSED[n]
    for attend in (A.flash_attention, A.chunked_attention, A.attention_reference):
        refuses(name, attend, base | changes)


@pytest.mark.parametrize("n", range(len(REFUSED_DECODE)))
def test_decode_mistakes_are_refused(n):
    """Decoding refuses what cannot be meant."""
    name, changes = REFUSED_DECODE[n]
    refuses(name, A.decode_attention, CACHE | changes)


@pytest.mark.parametrize("D", [0, 24, -8])
def test_hadamard_needs_a_power_of_two(D):
    """There is no such matrix of another size."""
    with pytest.raises(ValueError):
        A.hadamard_matrix(D)


# --------------------------------------------------------------------------------------------------
# attention.py in the model and the programs
# --------------------------------------------------------------------------------------------------


def plain(monkeypatch) -> None:
    """What is proved of the kernels is proved above; here it is the wiring, in plain torch."""
    if not CUDA:
        monkeypatch.setattr(A, "INTERPRET", False)


HOOKED = {
    "gqa": tiny(),
    "windows": tiny(windows=(4, None, 7)),
    "alibi": tiny(alibi=True),
    "alibi and windows": tiny(alibi=True, windows=(5, None, 3)),
    "q norm": tiny(qk_norm=True, n_kv_heads=1),
    "latent": latent(),
}
hooked = pytest.mark.parametrize("config", HOOKED.values(), ids=HOOKED)
absorbing = pytest.mark.parametrize(
    "config, absorb_up_to",
    [(c, n) for c in HOOKED.values() for n in ((0, 1, 9) if c.kv_lora_rank else (1,))],
    ids=[f"{k}-{n}" for k, c in HOOKED.items() for n in ((0, 1, 9) if c.kv_lora_rank else (1,))],
)


def absorb(model: M.Transformer, up_to: int) -> M.Transformer:
    """The model, its latent attention in absorbed form for so many tokens at once."""
    for module in model.modules():
        if isinstance(module, M.LatentAttention):
            module.absorb_up_to = up_to
    return model


@absorbing
def test_flash_attention_in_the_model_equals_its_own(config, absorb_up_to, monkeypatch):
    """Logits, the hidden states of multi-token prediction, and every gradient."""
    plain(monkeypatch)
    model = absorb(random_model(config), absorb_up_to).requires_grad_(True)
    for n in (1, 9, 33):
        tokens = random_tokens(config, 2, n)
        answers = []
        for attend in (M.causal_attention, A.as_attend()):
            hidden = model(tokens, attend=attend, return_hidden=True)
            out = [model.head(hidden)]
            if len(model.mtp):
                out.append(model.predict_further(hidden, tokens, attend=attend))
            model.zero_grad()
            sum(x.square().mean() for x in out).backward()
            grads = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
            answers.append((out, grads))
        (theirs, their_grads), (ours, our_grads) = answers
        assert all(relative(a, b) <= 1e-5 for a, b in zip(ours, theirs))
        assert our_grads.keys() == their_grads.keys()
        size = max(g.norm() for g in their_grads.values())
        for name, g in their_grads.items():  # one token alone has no gradient to its query: noise
            assert (our_grads[name] - g).norm() <= 1e-5 * max(g.norm(), 0.01 * size), name


@absorbing
@pytest.mark.parametrize("limited", [True, False])
def test_flash_attention_over_a_cache_equals_the_caches_own(
    config, absorb_up_to, limited, monkeypatch
):
    """Prefill in chunks, then decode, step by step; the two caches end up holding the same."""
    plain(monkeypatch)
    model, tokens = absorb(random_model(config), absorb_up_to), random_tokens(config, 2, 24)
    ours, theirs = (M.KVCache(config, 2, 32) for _ in range(2))
    start = 0
    for n in (9, 6, 1, 5, 1, 1, 1):
        step = tokens[:, start : start + n], torch.arange(start, start + n)
        start += n
        limit = start if limited else None
        a = model(*step, A.as_attend(ours, limit=limit))
        b = model(*step, partial(theirs.attend, limit=limit))
        assert relative(a, b) <= 1e-5, start
    assert ours.length == theirs.length == start
    assert all(
        (a - b).norm() <= 1e-5 * b.norm() for a, b in zip(ours.k + ours.v, theirs.k + theirs.v)
    )


@absorbing
def test_flash_attention_over_a_ragged_cache_equals_the_caches_own(
    config, absorb_up_to, monkeypatch
):
    """Two rows at positions of their own, several new tokens at once and then one; and a shared
    prompt, one row of tokens that goes into both rows of the cache."""
    plain(monkeypatch)
    model, tokens = absorb(random_model(config), absorb_up_to), random_tokens(config, 2, 30)
    ours, theirs = (M.KVCache(config, 2, 32) for _ in range(2))
    steps = [(tokens[:1, :11], torch.arange(11))]
    for n, a, b in ((4, 11, 3), (1, 15, 7), (1, 16, 8), (6, 17, 9), (1, 23, 15)):
        positions = torch.stack([torch.arange(first, first + n) for first in (a, b)])
        steps.append((tokens.gather(1, positions), positions))
    for new, positions in steps:
        for limit in (None, int(positions.max()) + 1):  # the second writes the same again
            a = model(new, positions, A.as_attend(ours, limit=limit))
            b = model(new, positions, partial(theirs.attend, limit=limit))
            assert relative(a, b) <= 1e-5, positions


@pytest.mark.parametrize("config", [tiny(alibi=True, windows=(5, None, 3)), latent()])
def test_kernels_in_the_model(config):
    """Prefill, absorbed and expanded decode, and gradients through Triton itself."""
    model, tokens = random_model(config).to(DEVICE), random_tokens(config, 1, 9).to(DEVICE)
    cache, want = M.KVCache(config, 1, 12, device=DEVICE), model(tokens)
    got = []
    for cut in (slice(0, 6), slice(6, 8), slice(8, 9)):
        positions = torch.arange(cut.start, cut.stop, device=DEVICE)
        got.append(model(tokens[:, cut], positions, A.as_attend(cache)))
    assert relative(torch.cat(got, 1), want) <= 1e-5
    model.requires_grad_(True)
    grads = []
    for attend in (M.causal_attention, A.as_attend()):
        loss = model(tokens, attend=attend).square().mean()
        grads.append(torch.autograd.grad(loss, model.embed.weight)[0])
    assert relative(*grads) <= 1e-5


@hooked
def test_packed_prompts_give_the_logits_of_each_alone(config, monkeypatch):
    """Three prompts in one row, which cu_seqlens keep apart."""
    plain(monkeypatch)
    model = random_model(config)
    prompts = [random_tokens(config, n, seed=n) for n in (7, 1, 20)]
    tokens, positions, cu_seqlens = A.pack(prompts)
    got = model(tokens, positions, A.as_attend(cu_seqlens=cu_seqlens))[0]
    for prompt, part in zip(prompts, got.split([len(p) for p in prompts])):
        assert relative(part, model(prompt[None])[0]) <= 1e-5


@absorbing
def test_update_answers_with_slots_in_order(config, absorb_up_to):
    """KVCache.update stores, and gives keys and values (B, S, Hkv, D) whose slot is the position:
    views where nothing is expanded or converted."""
    model, tokens = absorb(random_model(config), absorb_up_to), random_tokens(config, 2, 8)
    cache, seen = M.KVCache(config, 2, 16), []

    def attend(spec, q, k, v, positions):
        keys, values = cache.update(spec, k, v, positions, 12)
        seen.append((spec, k, v, keys, values))
        return M.dense_attention(
            spec, q, keys.transpose(1, 2), values.transpose(1, 2), positions, torch.arange(12)
        )

    assert relative(model(tokens, torch.arange(8), attend), model(tokens)) <= 1e-5
    for spec, k, v, keys, values in seen:
        assert keys.shape == (*k.shape[:1], 12, *k.shape[2:]) and values.shape[1] == 12
        assert relative(keys[:, :8], k) <= 1e-6 and relative(values[:, :8], v) <= 1e-6
        if spec.expand is None:
            assert keys.data_ptr() == cache.k[spec.index].data_ptr()
    assert cache.length == 8


def test_attend_of_a_first_chunk_does_not_expand_twice_and_takes_any_order():
    """A prefill of all `limit` slots calls expand nowhere in the cache, also with its positions
    shuffled, and gives what it gives without a limit."""
    config = latent()
    model, tokens, calls = random_model(config), random_tokens(config, 1, 9), []
    for layer in model.layers:
        expand = layer.attention.expand
        layer.attention.expand = lambda x, f=expand: (calls.append(len(calls)), f(x))[1]
    for positions in (
        torch.arange(9),
        torch.randperm(9, generator=torch.Generator().manual_seed(0)),
    ):
        caches = [M.KVCache(config, 1, 16) for _ in range(2)]
        calls.clear()
        got = model(tokens, positions, partial(caches[0].attend, limit=9))
        assert len(calls) == config.n_layers
        assert relative(got, model(tokens, positions, caches[1].attend)) <= 1e-5


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("config", [tiny(alibi=True, windows=(4, None, 7)), latent(moe_layers=())])
def test_compiled_step_over_flash_attention_equals_eager(config, monkeypatch):
    """A decode step is one graph, compiled once, also through as_attend."""
    plain(monkeypatch)
    model, tokens = random_model(config), random_tokens(config, 1, 12)
    torch._dynamo.reset()
    attends = [A.as_attend(M.KVCache(config, 1, 32)) for _ in range(2)]
    step = torch.compile(model, fullgraph=True, dynamic=False)
    with torch.inference_mode(), torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(12):
            new = tokens[:, i : i + 1], torch.tensor([i])
            assert relative(step(*new, attends[0]), model(*new, attends[1])) <= 1e-5


SHORT = ["--temperature", "0", "--max-new-tokens", "20"]


@pytest.mark.parametrize("checkpoint", [SMALL, MOE], ids=lambda path: path.name)
def test_generate_writes_the_same_with_flash_attention(checkpoint, tmp_path, capsys, monkeypatch):
    """Greedy text of several rows, and a score."""
    text = tmp_path / "text.py"
    text.write_text((REPO / "pytest.ini").read_text() * 2)
    plain(monkeypatch)
    answers = []
    for attention in ("sdpa", "flash"):
        for more in (["--score", str(text), "--json", "--dtype", "fp32"], [*SHORT, "--n", "2"]):
            argv = ["--checkpoint", str(checkpoint), "--attention", attention, *more]
            assert G.main(argv) == 0
            answers.append(capsys.readouterr().out)
    score, texts, flash_score, flash_texts = answers
    assert texts == flash_texts and len(texts) > 40
    assert json.loads(score) == pytest.approx(json.loads(flash_score), rel=1e-5)


def test_predicting_further_over_a_cache_with_flash_attention(monkeypatch):
    """Multi-token prediction reads and writes slots of its own through as_attend too."""
    plain(monkeypatch)
    model, tokens = random_model(latent()), random_tokens(latent(), 1, 12)
    attend = A.as_attend(M.KVCache(model.config, 1, 16))
    hidden = model(tokens, attend=attend, return_hidden=True)[:, :-1]
    expected, got = model.predict_further(hidden, tokens[:, 1:]), []
    for cut in (slice(0, 7), *(slice(i, i + 1) for i in range(7, 11))):
        positions = torch.arange(cut.start, cut.stop)
        got.append(model.predict_further(hidden[:, cut], tokens[:, 1:][:, cut], positions, attend))
    assert relative(torch.cat(got, 1), expected) <= 1e-5


def test_generate_runs_the_attention_asked_for(monkeypatch, capsys):
    """Equal text might come of a flag that nobody heard: flash goes through as_attend, in prefill,
    in every step and in a score, sdpa never; a compiled step of sdpa alone reads unused slots."""
    limits = []

    def as_attend(cache, *, limit):
        limits.append(limit)
        return partial(cache.attend, limit=limit)

    monkeypatch.setattr(A, "as_attend", as_attend)
    draw = ["x = 1", "--max-new-tokens", "3", "--ignore-eos"]
    for argv in (draw, ["--score", str(REPO / "pytest.ini")]):
        for attention in ("sdpa", "flash"):
            assert G.main([*argv, "--attention", attention]) == 0
            if attention == "sdpa":
                assert limits == []
        if argv is draw:
            assert limits[1:] == [limits[0] + 1, limits[0] + 2]
        else:
            assert limits
        limits.clear()
    read = []
    for attention in ("sdpa", "flash"):
        decoder = G.Decoder(
            random_model(tiny()), 64, G.Sampling(), attention=G.pick_attention(attention)
        )
        decoder.start([5, 6, 7])
        decoder.compiled = True
        read.append(decoder.bytes_per_step() - decoder.weight_bytes)
    assert read == [decoder.cache.bytes_read(), decoder.cache.bytes_read(3)]


def test_training_hands_attend_to_every_layer():
    """The loss, its validation and every depth of multi-token prediction attend with the argument,
    and flash is attention.py's."""
    config, layers = latent(n_mtp_layers=2), []
    model, batch = random_model(config).requires_grad_(True), random_tokens(config, 2, 12)

    def attend(spec, *qkv_positions):
        layers.append(spec.index)
        return M.causal_attention(spec, *qkv_positions)

    place = T.Place(torch.device("cpu"), "fp32", 0, 1)
    T.accumulate(model, batch, 2, attend=attend)
    assert layers == [0, 1, 2, 3, 4]
    layers.clear()
    T.validate(model, batch.flatten(), 23, 1, place, attend)
    assert layers == [0, 1, 2, 3, 4]
    assert T.attend_of("sdpa") is M.causal_attention
    assert T.attend_of("flash").__module__ == "attention"


def test_generate_refuses_an_unknown_attention():
    """The choices are named."""
    done = run("generate.py", "--attention", "fast")
    assert done.returncode == 2 and "'sdpa', 'flash'" in done.stderr


@pytest.fixture(scope="module")
def latent_config(tmp_path_factory) -> Path:
    config = latent(vocab_size=4096, dim=32, n_layers=2, moe_layers=(1,), n_mtp_layers=1)
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(config.to_hf()))
    return path


def losses(rows: list[dict]) -> list[float]:
    return [row[k] for row in rows for k in ("loss", "mtp_loss", "val_loss") if k in row]


def test_training_with_flash_attention_takes_the_same_course(latent_config, corpus, tmp_path):
    """Training, validation and multi-token prediction; and a resumed run may change over."""
    rows = {}
    for attention in ("sdpa", "flash"):
        out = tmp_path / attention
        argv = train_argv(corpus, latent_config, out, "--steps", 3, "--attention", attention)
        done = run(*argv)
        assert done.returncode == 0, done.stderr
        rows[attention] = metrics(out)
    assert len(rows["sdpa"]) == 3
    assert losses(rows["flash"]) == pytest.approx(losses(rows["sdpa"]), rel=1e-5)
    more = ("--resume", "--steps", 4, "--device", "cpu", "--attention", "flash")
    done = run("train.py", "--out", tmp_path / "sdpa", *more)
    assert done.returncode == 0, done.stderr
    assert T.read_run(tmp_path / "sdpa")[1]["attention"] == "flash"


@pytest.mark.slow
def test_training_in_bf16_with_flash_attention(latent_config, corpus, tmp_path):
    """Under autocast q, k and v may differ in dtype; the losses are near those of fp32."""
    ends = []
    for more in (("--dtype", "bf16", "--attention", "flash"), ("--attention", "sdpa")):
        out = tmp_path / more[-1]
        done = run(*train_argv(corpus, latent_config, out, "--steps", 2, *more))
        assert done.returncode == 0, done.stderr
        ends.append(losses(metrics(out)))
    assert ends[0] == pytest.approx(ends[1], rel=1e-2)


# --------------------------------------------------------------------------------------------------
# calibrate.py
# --------------------------------------------------------------------------------------------------


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class WholeGrid(C.MinMax):
    """A symmetric grid without zeros, one scale for a row (None) or for all (0)."""

    def __init__(self, bits, group_size=None):
        self.top, self.group_size = 2 ** (bits - 1) - 1, group_size

    def find(self, w, ranges="minmax"):
        most = w.abs().amax() if self.group_size == 0 else w.abs().amax(1)
        return (most / self.top).clamp(min=1e-8).view(-1, 1), None

    def encode(self, w, scales, zeros):
        return (w / scales).round().clamp(-self.top, self.top).to(torch.int8)

    def decode(self, codes, scales, zeros):
        return codes * scales


CALIBRATE_GRIDS = [C.MinMax(2, 32), C.MinMax(3, 64), C.MinMax(4, 32), WholeGrid(3), WholeGrid(4, 0)]


def calibrate_layer(seed, N=24, K=192, kind="correlated"):
    """A weight and inputs of a kind that layers have, or that break things."""
    g = seeded(seed)
    W = torch.randn(N, K, generator=g) * torch.rand(N, 1, generator=g)
    rows = {"rank-deficient": K // 4, "one-row": 1}.get(kind, 3 * K)
    x = torch.randn(rows, K, generator=g)
    if kind != "white":
        x = x @ torch.randn(K, K, generator=g) / K**0.5 + 2 * torch.randn(rows, 1, generator=g)
        x *= torch.randn(K, generator=g).exp()
    if kind == "dead":
        x[:, torch.rand(K, generator=g) < 0.3] = 0
    if kind == "silent":
        x.zero_()
    return W, x


def calibrate_error(W, got, x):
    """Squared output error from the inputs themselves, float64."""
    return ((W - got).double() @ x.double().t()).pow(2).sum(1)


# ---- statistics ----


def test_calibrate_observed_statistics_are_those_of_all_inputs():
    """Two calls, one 3-D, equal the formulas over the rows together; what was not asked is None."""
    lin = nn.Linear(5, 3)
    a, b = (
        torch.randn(2, 4, 5, generator=seeded()),
        torch.randn(7, 5, generator=seeded(1)).bfloat16(),
    )
    with C.observe({"x": lin}, *C.STATISTICS) as stats, C.observe({"x": lin}, "absmax") as less:
        lin(a), lin(b.float())
    lin(a)  # after the block nothing is counted
    x, s = torch.cat((a.flatten(0, 1), b.float())), stats["x"]
    assert s.count == 15 and not lin._forward_pre_hooks
    for got, want in (
        (s.hessian, x.t() @ x),
        (s.absmax, x.abs().amax(0)),
        (s.mean_abs, x.abs().mean(0)),
        (s.mean, x.mean(0)),
        (less["x"].absmax, s.absmax),
    ):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want)
    assert less["x"].hessian is None and less["x"].mean is None and less["x"].mean_abs is None
    s = C.Stats("hessian", "mean")
    s.update(b)
    s.update(b[:0])  # an expert nobody chose
    torch.testing.assert_close(s.hessian, b.float().t() @ b.float())
    assert s.count == 7 and C.Stats("mean").mean is None
    with pytest.raises(RuntimeError), C.observe({"x": lin}, "mean"):
        raise RuntimeError  # hooks go all the same
    assert not lin._forward_pre_hooks


def test_calibrate_layer_by_layer_feeds_each_layer_from_the_quantized_ones():
    """Inputs of layer i are the outputs of layers < i as the caller left them; one replay per call;
    the caller's tensors and grad mode are left alone; only one layer's statistics live."""
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    batches = [torch.randn(2, 4, generator=seeded(i)) for i in range(3)]
    before = [b.clone() for b in batches]
    calls = []

    def forward(module, x):
        calls.append(module)
        return torch.tanh(module(x))

    expect = [b.clone() for b in batches]
    for i, module, replay in C.layer_by_layer(layers, batches, forward):
        assert module is layers[i] and torch.is_grad_enabled()
        calls.clear()
        with C.observe({"l": module}, "hessian") as stats:
            replay()
        assert calls == [module] * 3
        x = torch.cat(expect)
        torch.testing.assert_close(stats["l"].hessian, x.t() @ x)
        layers[i] = nn.Linear(4, 4)  # replaced, not only changed
        with torch.no_grad():
            expect = [torch.tanh(layers[i](x)) for x in expect]
    assert i == 2 and all(torch.equal(a, b) for a, b in zip(batches, before))
    with pytest.raises(ValueError, match="inputs has no batches"):
        next(C.layer_by_layer(layers, [], forward))


# ---- GPTQ ----


@pytest.mark.parametrize("block_size", [1, 32, 40, 128, 1000])
@pytest.mark.parametrize("K, grid", [(96, C.MinMax(3, 32)), (192, C.MinMax(2, 64))])
def test_calibrate_gptq_is_the_surgeon(K, grid, block_size):
    """Codes equal those of the update re-solved in float64 column by column, for blocks that do and
    do not divide K or hold a group; rows that fell back to rounding are rounded."""
    W, x = calibrate_layer(5, N=40, K=K)
    H = x.t() @ x
    codes, scales, zeros = C.gptq(W, H, grid, block_size=block_size)
    near = grid.find(W)
    fell = (codes == grid.encode(W, *near)).all(1)
    assert fell.float().mean() < 0.5
    same = (codes == C.surgeon(W, H, grid))[~fell].float().mean()
    assert same > 0.985, same  # a tie that falls the other way changes what follows in its row
    assert torch.equal(scales[fell], near[0][fell]) and torch.equal(zeros[fell], near[1][fell])


def test_calibrate_the_surgeon_is_what_the_paper_solves():
    """Of all changes to the columns left, the update gives the least output error: compared with
    least squares on the first column."""
    W, x = calibrate_layer(1, N=3, K=32, kind="white")
    grid, H = C.MinMax(2, 32), (x.t() @ x).double()
    params = grid.find(W)
    q = grid.decode(grid.encode(W, *params), *params)[:, :1].double()
    rest = W[:, 1:].double() + (W[:, :1] - q) @ H[:1, 1:] @ H[1:, 1:].inverse()
    U = C.inverse_factor(H.float(), 0.0)
    ours = W[:, 1:] - (W[:, :1] - q.float()) / U[0, 0] * U[0, 1:]
    torch.testing.assert_close(ours.double(), rest, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "seeds", [[0], pytest.param([1, 2, 3, 4], marks=pytest.mark.slow)], ids=["0", "1-4"]
)
@pytest.mark.parametrize("grid", CALIBRATE_GRIDS, ids=lambda g: f"{type(g).__name__}{g.group_size}")
@pytest.mark.parametrize(
    "kind", ["white", "correlated", "rank-deficient", "one-row", "dead", "silent"]
)
def test_calibrate_gptq_is_never_worse_than_rounding(kind, grid, seeds):
    """On every row of every layer, in either order; and on ordinary layers it is much better."""
    for seed in seeds:
        W, x = calibrate_layer(seed, kind=kind)
        H = x.t() @ x
        plain = calibrate_error(W, C.nearest(grid, W), x)
        for act_order in (False, True):
            for damp in (0.01, 0.0):
                q = C.gptq(W, H, grid, act_order=act_order, damp=damp, block_size=128)
                ours = calibrate_error(W, grid.decode(*q), x)
                noise = 1e-6 * H.diagonal().sum()  # of fp32 sums, where the error is none at all
                assert (ours <= plain * (1 + 1e-4) + noise).all()
                if kind == "correlated" and damp:
                    assert ours.sum() < 0.8 * plain.sum()
        assert torch.isclose(C.output_error(W, C.nearest(grid, W), H), plain.sum(), rtol=1e-3)


def test_calibrate_rows_that_the_sweep_makes_worse_are_rounded(monkeypatch):
    """With a sweep that is broken on purpose every row comes back rounded to nearest."""
    W, x = calibrate_layer(0)
    grid, sweep = C.MinMax(3, 32), C._sweep
    monkeypatch.setattr(C, "_sweep", lambda *a: sweep(*a) ^ 7)
    codes, scales, zeros = C.gptq(W, x.t() @ x, grid)
    near = grid.find(W)
    assert torch.equal(codes, grid.encode(W, *near))
    assert torch.equal(scales, near[0]) and torch.equal(zeros, near[1])


@pytest.mark.parametrize("grid", [C.MinMax(3, 32), WholeGrid(3)])
def test_calibrate_act_order_is_undone(grid):
    """Codes stand at their own columns, on the scales of the original weight: equal to GPTQ without
    act_order of the permuted layer, whole rows; groups keep the scales found up front."""
    W, x = calibrate_layer(2)
    H = x.t() @ x
    codes, scales, _ = C.gptq(W, H, grid, act_order=True)
    assert torch.equal(scales, grid.find(W)[0])
    assert C.output_error(W, grid.decode(*C.gptq(W, H, grid, act_order=True)), H) < C.output_error(
        W, C.nearest(grid, W), H
    )
    if grid.group_size is None:
        order = H.diagonal().argsort(descending=True, stable=True)
        permuted = C.gptq(W[:, order], H[order][:, order], grid)[0]
        assert torch.equal(codes[:, order], permuted)


def test_calibrate_dead_columns_are_rounded_and_move_nothing():
    """A column without inputs gets its nearest code, and the others the codes they have alone."""
    W, x = calibrate_layer(3, kind="dead")
    grid, H = WholeGrid(4), x.t() @ x
    dead = H.diagonal() == 0
    scales = grid.find(W)[0]
    for act_order in (False, True):
        codes = C.gptq(W, H, grid, act_order=act_order)[0]
        assert torch.equal(codes[:, dead], grid.encode(W, scales, None)[:, dead])
    least = C.inverse_factor(H, 0.01)
    off = least - least.diagonal().diag()
    assert (off[dead] == 0).all() and (off[:, dead] == 0).all()


def test_calibrate_kept_weights_have_no_error_and_no_part_in_the_scales():
    """keep: planted outliers that stretch the grid; kept, the rest is on a fine grid, and the error
    with them put back is at most that of rounding with them kept."""
    W, x = calibrate_layer(4)
    H, grid = x.t() @ x, C.MinMax(2, 32)
    keep = torch.rand(W.shape, generator=seeded()) < 0.02
    W[keep] *= 50
    codes, scales, zeros = C.gptq(W, H, grid, keep=keep)
    found = C.find_without(grid, W, keep)
    plain = torch.where(keep, W, grid.decode(grid.encode(W, *found), *found))
    ours = torch.where(keep, W, grid.decode(codes, scales, zeros))
    assert found[0].amax() < 0.5 * grid.find(W)[0].amax()
    assert (calibrate_error(W, ours, x) <= calibrate_error(W, plain, x) * (1 + 1e-4)).all()
    without = C.output_error(W, grid.decode(*C.gptq(W, H, grid)), H)
    assert C.output_error(W, ours, H) < 0.2 * without
    one = torch.tensor([[1.0, 100.0, 3.0, 8.0]])
    low = C.find_without(C.MinMax(2, 2), one, torch.tensor([[False, True, True, True]]))[0]
    torch.testing.assert_close(low, torch.tensor([[1 / 3, 1e-8]]))


@pytest.mark.parametrize("N", [1, 24])
def test_calibrate_one_row_and_odd_dtypes(N):
    """A single row keeps the scales found on the way; bf16 weights are taken as they are."""
    W, x = calibrate_layer(6, N=N)
    H, grid = x.t() @ x, C.MinMax(3, 32)
    a, b = C.gptq(W.bfloat16(), H, grid), C.gptq(W.bfloat16().float(), H, grid)
    assert all(torch.equal(p, q) for p, q in zip(a, b))
    W = W.bfloat16().float()
    assert C.output_error(W, grid.decode(*b), H) <= C.output_error(W, C.nearest(grid, W), H)


def test_calibrate_gptq_refuses_what_it_cannot_use():
    """ValueError names the field and the mend."""
    W, x = calibrate_layer(0)
    H, grid = x.t() @ x, C.MinMax(3, 32)
    bad = H.clone()
    bad[3, 3] = float("nan")
    for args, kw, words in (
        ((W, bad, grid), {}, "hessian holds NaN or inf; look for"),
        ((W / 0, H, grid), {}, "weight holds NaN"),
        ((W, H[:-1], grid), {}, r"hessian must have shape \[192, 192\]"),
        ((W, -H, grid), {}, "hessian must be positive semi-definite"),
        ((W, H, grid), {"damp": -1.0}, "damp"),
        ((W, H, grid), {"block_size": 0}, "block_size"),
        ((W, H, grid), {"keep": torch.ones(2, 2, dtype=torch.bool)}, "keep must be bool"),
    ):
        with pytest.raises(ValueError, match=words):
            C.gptq(*args, **kw)
    with pytest.raises(ValueError, match="quantized must have shape"):
        C.output_error(W, W[:1], H)


# ---- folds ----


class CalibrateNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(dim, generator=seeded(9)) + 0.5)

    def forward(self, x):
        return self.weight * x * x.pow(2).mean(-1, keepdim=True).rsqrt()


@pytest.mark.parametrize("kind", [CalibrateNorm, nn.LayerNorm])
def test_calibrate_fold_leaves_the_output_alone(kind):
    """A norm before q, k, v, a router and stacked experts: all outputs within 1e-5."""
    torch.manual_seed(0)
    norm = kind(16)
    if kind is nn.LayerNorm:
        nn.init.normal_(norm.bias, generator=seeded())
    g = seeded(1)
    q, k = nn.Linear(16, 8), nn.Linear(16, 4, bias=False)
    router = nn.Parameter(torch.randn(6, 16, generator=g))
    stack = nn.Parameter(torch.randn(6, 10, 16, generator=g))
    x, s = torch.randn(32, 16, generator=g), torch.randn(16, generator=g).exp()

    def outputs():
        h = norm(x)
        return [q(h), k(h), h @ router.t(), torch.einsum("nk,efk->nef", h, stack)]

    before, weight = [o.detach() for o in outputs()], norm.weight.detach().clone()
    C.fold_(norm, [q, k, router, stack], s)
    for a, b in zip(outputs(), before):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()
    torch.testing.assert_close(norm.weight.detach(), weight / s)


def test_calibrate_fold_into_a_linear():
    """Rows and bias of the producer; in bf16 powers of two change no bit of the product."""
    torch.manual_seed(0)
    g = seeded()
    up, down = nn.Linear(8, 12), nn.Linear(12, 8)
    x = torch.randn(20, 8, generator=g)
    s = torch.randn(12, generator=g).exp()
    before = down(up(x)).detach()
    C.fold_(up, [down], s)
    assert (down(up(x)) - before).abs().max() <= 1e-5 * before.abs().max()
    up, down, x = up.bfloat16(), down.bfloat16(), x.bfloat16()
    before = down(up(x)).detach()
    C.fold_(up, [down], s.log2().round().exp2())
    assert torch.equal(down(up(x)), before)


def test_calibrate_fold_refuses_what_it_cannot_use():
    """ValueError names the field, and nothing is written."""
    norm, linear = nn.LayerNorm(4), nn.Linear(4, 2)
    for s in (torch.tensor([1.0, 0, 1, 1]), torch.tensor([1.0, float("nan"), 1, 1])):
        with pytest.raises(ValueError, match="s must be finite and more than 0"):
            C.fold_(norm, [linear], s)
    with pytest.raises(ValueError, match="s has 3 channels"):
        C.fold_(norm, [linear], torch.ones(3))
    with pytest.raises(ValueError, match="producer has no weight"):
        C.fold_(nn.LayerNorm(4, elementwise_affine=False), [linear], torch.ones(4))
    assert torch.equal(norm.weight, torch.ones(4))  # refused before anything is written


def test_calibrate_awq_finds_the_best_alpha():
    """The least output error of 21 alphas, by the inputs themselves; never above rounding's, and
    well below where a few channels are large. One s for all linears that share the input."""
    grid, K = C.MinMax(3, 64), 128
    Ws = [torch.randn(n, K, generator=seeded(n)) for n in (16, 24)]
    x = torch.randn(500, K, generator=seeded())
    x[:, :4] *= 30
    stats = C.Stats("hessian", "mean_abs")
    stats.update(x)

    def error(s):
        return sum(calibrate_error(W, C.nearest(grid, W * s) / s, x).sum() for W in Ws)

    s = C.awq_scales(Ws, stats.mean_abs, stats.hessian, grid)
    every = [stats.mean_abs.pow(i / 20) for i in range(21)]
    every = [t / (t.max() * t.min()).sqrt() for t in every]
    assert error(s) <= min(error(t) for t in every) * (1 + 1e-4)
    assert error(s) < 0.6 * error(torch.ones(K)) and s.min() * s.max() == pytest.approx(1, rel=1e-4)
    x[:, 7:9] = 0  # dead channels, and nothing but dead channels
    for x in (x, x * 0):
        stats = C.Stats("hessian", "mean_abs")
        stats.update(x)
        s = C.awq_scales(Ws, stats.mean_abs, stats.hessian, grid)
        assert s.isfinite().all() and (s > 0).all()
    with pytest.raises(ValueError, match="mean_abs must be 128 values"):
        C.awq_scales(Ws, stats.mean_abs[:3], stats.hessian, grid)
    with pytest.raises(ValueError, match="weights"):
        C.awq_scales([], stats.mean_abs, stats.hessian, grid)


def calibrate_int8(t):
    """Each row of t rounded to int8 and back."""
    scale = t.abs().amax(-1, keepdim=True) / 127
    return (t / scale).round() * scale


def test_calibrate_smoothquant():
    """The formula of the paper; W8A8 with planted outlier channels errs less after the fold."""
    torch.manual_seed(0)
    norm = CalibrateNorm(64)
    Ws = [nn.Linear(64, n, bias=False) for n in (16, 8)]
    with torch.no_grad():
        norm.weight[[3, 40]] *= 60
    x = torch.randn(200, 64, generator=seeded())
    h = norm(x).detach()
    s = C.smooth_scales(h.abs().amax(0), [w.weight for w in Ws], 0.5)
    top = torch.cat([w.weight for w in Ws]).abs().amax(0)
    torch.testing.assert_close(s, (h.abs().amax(0) ** 0.5 / top**0.5).detach())
    s7 = C.smooth_scales(h.abs().amax(0), [w.weight for w in Ws], 0.7)
    torch.testing.assert_close(s7, (h.abs().amax(0) ** 0.7 / top**0.3).detach())
    exact = h @ Ws[0].weight.t()
    before = (calibrate_int8(h) @ calibrate_int8(Ws[0].weight).t() - exact).norm()
    C.fold_(norm, Ws, s)
    after = (calibrate_int8(norm(x)) @ calibrate_int8(Ws[0].weight).t() - exact).norm()
    assert after < 0.3 * before
    absmax = torch.ones(64)
    absmax[0] = 0
    weight = torch.ones(3, 5, 64)  # stacked
    weight[..., 1] = 0
    for alpha in (0.0, 0.5, 1.0):
        assert torch.equal(C.smooth_scales(absmax, [weight], alpha), torch.ones(64))
    with pytest.raises(ValueError, match="alpha"):
        C.smooth_scales(absmax, [weight], 1.5)
    with pytest.raises(ValueError, match="absmax holds NaN"):
        C.smooth_scales(absmax / 0 * 0, [weight])


def test_calibrate_equalization_keeps_swiglu_and_evens_the_ranges():
    """Output of the MLP as before; each channel's range is the same on both sides, sqrt(r1 r2); a
    channel that is all zero is left alone; per-tensor rounding gets better."""
    torch.manual_seed(0)
    g = seeded()
    gate, up, down = nn.Linear(8, 20), nn.Linear(8, 20), nn.Linear(20, 8)
    with torch.no_grad():
        up.weight *= torch.randn(20, 1, generator=g).mul(2).exp()
        up.weight[5] = 0
        down.weight[:, 6] = 0
    x = torch.randn(30, 8, generator=g)

    def mlp():
        return down(F.silu(gate(x)) * up(x)).detach()

    def rounded():
        """Mean relative error of up's rows, of which small ones suffer most."""
        change = (up.weight - C.nearest(WholeGrid(6, 0), up.weight)).norm(dim=1)
        return (change / up.weight.norm(dim=1).clamp(min=1e-9)).mean().item()

    before, coarse = mlp(), rounded()
    r1, r2 = up.weight.abs().amax(1), down.weight.abs().amax(0)
    s = C.equalize_(up, down)
    assert (mlp() - before).abs().max() <= 1e-5 * before.abs().max()
    assert s[5] == s[6] == 1
    rest = [i for i in range(20) if i not in (5, 6)]
    for got in (up.weight.abs().amax(1), down.weight.abs().amax(0)):
        torch.testing.assert_close(got[rest], (r1 * r2).sqrt()[rest])
    assert rounded() < 0.8 * coarse
    with pytest.raises(ValueError, match="first makes 8 channels"):
        C.equalize_(down, down)


def test_calibrate_bias_correction_restores_the_mean():
    """Inputs with a mean: the mean output error goes to ~0, and was not."""
    W = torch.randn(12, 32, generator=seeded())
    x = torch.randn(400, 32, generator=seeded(1)) + 2 * torch.randn(32, generator=seeded(2))
    near = C.nearest(C.MinMax(2, 32), W)
    stats = C.Stats("mean")
    stats.update(x)
    error = (x @ W.t() - x @ near.t()).mean(0)
    bias = C.bias_correction(W, near, stats.mean)
    assert bias.shape == (12,) and error.abs().max() > 0.5
    assert (error - bias).abs().max() < 1e-4


# ---- TaCQ ----


def calibrate_2bit(w):
    return C.nearest(C.MinMax(2, 16), w)


class CalibrateModel(nn.Module):
    """Next-token prediction of a fixed random chain, by an MLP over two tokens."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.up, self.mid, self.head = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 32)

    def forward(self, batch):
        h = F.gelu(self.up(self.embed(batch[:, :2]).flatten(1)))
        return F.cross_entropy(self.head(F.gelu(self.mid(h))), batch[:, 2])


def calibrate_trained(seed=0):
    torch.manual_seed(seed)
    table = torch.randint(32, (32, 32), generator=seeded(seed))
    pairs = torch.cartesian_prod(torch.arange(32), torch.arange(8))  # half seldom, half often
    data = torch.cat((pairs, table[pairs[:, 0], pairs[:, 1]][:, None]), 1)
    model = CalibrateModel()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        model(data).backward()
        optimizer.step()
    for p in model.parameters():
        p.grad = None
    return model, data


def test_calibrate_tacq_keeps_what_matters():
    """2 bits, 5% kept: the loss is below that of random and magnitude picks, on average of models
    and on each against random."""
    totals = dict.fromkeys(("tacq", "magnitude", "random", "none"), 0.0)
    for seed in range(3):
        model, data = calibrate_trained(seed)
        mats = {n: getattr(model, n).weight for n in ("up", "mid", "head")}
        original = {n: w.detach().clone() for n, w in mats.items()}
        scores = {
            "tacq": C.accumulate_saliency(model, mats, model, data.split(16), calibrate_2bit),
            "magnitude": {n: w.abs() for n, w in original.items()},
            "random": {n: torch.rand(w.shape, generator=seeded(seed)) for n, w in original.items()},
            "none": None,
        }
        losses = {}
        for name, score in scores.items():
            picks = C.circuit(score, 0.05) if score else {n: [] for n in mats}
            for n, w in mats.items():
                new = calibrate_2bit(original[n]).flatten()
                new[picks[n]] = original[n].flatten()[picks[n]]
                w.data = new.view_as(w)
            with torch.no_grad():
                losses[name] = model(data).item()
            totals[name] += losses[name]
        assert losses["tacq"] < losses["random"], losses
    assert totals["tacq"] < min(v for k, v in totals.items() if k != "tacq"), totals


def test_calibrate_saliency_is_the_formula_and_frees_gradients():
    """|Q - W| |W| sum of |grad| per batch, not |sum|; nothing is left in .grad, of any parameter,
    requires_grad is as it was, and during the pass only one matrix's gradient is alive."""
    model, data = calibrate_trained()
    model.embed.weight.requires_grad_(False)
    mats = {n: getattr(model, n).weight for n in ("up", "mid", "head")}
    batches = list(data.split(64))
    alive = []

    def loss(batch):
        value = model(batch)
        for p in mats.values():
            p.register_hook(lambda g: alive.append(sum(q.grad is not None for q in mats.values())))
        return value

    mats["up"].grad = torch.ones_like(mats["up"])  # left over from training: not to be counted
    got = C.accumulate_saliency(model, mats, loss, batches, calibrate_2bit)
    assert max(alive) <= 1 and all(p.grad is None for p in model.parameters())
    assert not model.embed.weight.requires_grad and model.mid.bias.requires_grad
    assert not any(p._post_accumulate_grad_hooks for p in mats.values())
    want = {n: 0 for n in mats}
    for batch in batches:
        for n, g in zip(mats, torch.autograd.grad(model(batch), list(mats.values()))):
            want[n] = want[n] + g.abs()
    for n, w in mats.items():
        w = w.detach()
        torch.testing.assert_close(got[n], want[n] * (calibrate_2bit(w) - w).abs() * w.abs())
    frozen = {"mid": nn.Parameter(model.mid.weight.detach(), requires_grad=False)}
    model.mid.weight = frozen["mid"]  # a model loaded for inference
    with torch.no_grad():
        again = C.accumulate_saliency(model, frozen, model, batches, calibrate_2bit)
    torch.testing.assert_close(again["mid"], got["mid"])
    assert not frozen["mid"].requires_grad


def test_calibrate_saliency_refuses_what_it_cannot_use():
    """No batches, a loss of NaN: ValueError, no gradient or hook left."""
    model, data = calibrate_trained()
    mats = {"mid": model.mid.weight}
    with pytest.raises(ValueError, match="batches is empty; give one"):
        C.accumulate_saliency(model, mats, model, [], calibrate_2bit)
    with pytest.raises(ValueError, match="loss of batch 1 is nan"):
        C.accumulate_saliency(
            model, mats, lambda b: model(b) * float("nan"), [data], calibrate_2bit
        )
    assert model.mid.weight.grad is None and not mats["mid"]._post_accumulate_grad_hooks


def test_calibrate_circuit_is_the_global_top_fraction():
    """Equal to sorting all saliencies together; among equals exactly as many as asked."""
    parts = {
        "a": torch.rand(30, 20, generator=seeded()),
        "b": 3 * torch.rand(7, 9, generator=seeded(1)),
        "c": torch.rand(2, 5, 11, generator=seeded(2)).bfloat16(),
    }
    flat = torch.cat([p.flatten().float() for p in parts.values()])
    for fraction in (0.0, 0.001, 0.01, 0.3, 1.0):
        picks = C.circuit(parts, fraction)
        got = torch.cat([parts[n].flatten()[i].float() for n, i in picks.items()])
        want = flat.sort(descending=True).values[: int(fraction * len(flat))]
        assert torch.equal(got.sort(descending=True).values, want)
        assert all(torch.equal(i, i.unique()) and i.dtype == torch.long for i in picks.values())
    equal = C.circuit({"a": torch.ones(10), "b": torch.ones(10)}, 0.6)
    assert equal["a"].tolist() == list(range(10)) and equal["b"].tolist() == [0, 1]
    for fraction in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="fraction must be from 0 to 1"):
            C.circuit(parts, fraction)
    with pytest.raises(ValueError, match=r"saliencies\['a'\] holds NaN"):
        C.circuit({"a": torch.full((3,), float("nan"))}, 0.5)


# ---- the sheet ----


def test_calibrate_statistics_must_be_known():
    """An unknown statistic, or none: ValueError lists those there are."""
    with pytest.raises(ValueError, match="ask for some of hessian"):
        C.Stats("median")
    with pytest.raises(ValueError, match="ask for some"), C.observe({"a": nn.Linear(2, 2)}):
        pass


# --------------------------------------------------------------------------------------------------
# sparse.py
# --------------------------------------------------------------------------------------------------

SPARSE_PATTERNS = [(1, 4), (2, 4), (4, 8), (2, 8), (3, 8), (1, 2), (4, 32), (31, 32), (5, 256)]


def sparse_same(a, b) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def sparse_normal(*shape, seed=0, dtype=torch.float32) -> torch.Tensor:
    return normal(*shape, dtype=dtype, rng=seeded(seed))


def sparse_alike(N, K, seed=0, run=4):
    """Channels whose neighbours are as large as they are: where permutation has most to win."""
    return sparse_normal(N, K, seed=seed) * sparse_normal(
        K // run, seed=seed + 1
    ).exp().repeat_interleave(run)


def sparse_swiglu(dtype=torch.float32, dim=24, hidden=64, bias=True):
    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj = nn.Linear(dim, hidden, bias)
            self.up_proj = nn.Linear(dim, hidden, bias)
            self.down_proj = nn.Linear(hidden, dim, bias)

        def forward(self, x):
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    torch.manual_seed(0)
    return MLP().to(dtype).requires_grad_(False)


class SparseModel(nn.Module):
    """Two layers, an embedding that the head shares, and a subclass of Linear."""

    def __init__(self, dim=16):
        super().__init__()
        self.embed = nn.Embedding(32, dim)
        self.layers = nn.ModuleList(sparse_swiglu(dim=dim, hidden=2 * dim) for _ in range(2))
        self.special = type("Special", (nn.Linear,), {})(dim, dim)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(self.special(x)))


def sparse_model(**to):
    torch.manual_seed(1)
    return SparseModel().to(DEVICE, **to).eval().requires_grad_(False)


# ---- pruning ----


@pytest.mark.parametrize("n, m", SPARSE_PATTERNS)
def test_sparse_prune_keeps_the_largest(n, m):
    """By its definition in plain Python, ties and zeros included: of equals, the first."""
    w = sparse_normal(9, 2 * m).mul(2).round()
    w[3] = 0
    mask = Z.prune(w, n, m)
    for row, kept in zip(w.tolist(), mask.tolist()):
        for g in range(0, 2 * m, m):
            order = sorted(range(g, g + m), key=lambda i: -abs(row[i]))
            assert [i for i in range(g, g + m) if kept[i]] == sorted(order[:n])
    assert Z.is_pruned(mask, n, m) and Z.is_pruned(w * mask, n, m)
    assert mask.sum() == w.numel() // m * n
    if n + 1 < m:
        assert not Z.is_pruned(Z.prune(w, n + 1, m), n, m)


def test_sparse_importance_takes_the_place_of_magnitude():
    """Wanda: |w| * ||x|| keeps small weights of large inputs; the error of the output is less."""
    w, scale = sparse_normal(32, 64), sparse_normal(64, seed=1).exp()
    x = sparse_normal(200, 64, seed=2) * scale
    norms = x.norm(dim=0)
    error = lambda mask: (F.linear(x, w * mask) - F.linear(x, w)).norm()
    wanda = Z.prune(w, 2, 4, importance=w.abs() * norms)
    sparse_same(wanda, Z.prune(w * norms, 2, 4))
    assert error(wanda) < 0.8 * error(Z.prune(w, 2, 4))
    layer = nn.Sequential(nn.Linear(64, 32).to(DEVICE))
    layer[0].weight.data = w
    asked = []
    Z.sparsify_(layer, importance=lambda name, w: asked.append(name) or w.abs() * norms)
    sparse_same(layer[0].weight, w * wanda)
    assert asked == ["0"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("n, m", SPARSE_PATTERNS)
def test_sparse_pack_round_trip(n, m, dtype):
    """Unpacked is the masked weight to the bit, indices ascend, sizes are n / m."""
    w = sparse_normal(7, 3 * m, dtype=dtype)
    mask = Z.prune(w, n, m)
    values, indices = Z.pack(w, n, m)
    assert values.shape == indices.shape == (7, 3 * n) and values.dtype == dtype
    assert indices.dtype == torch.uint8 and indices.int().max() < m
    assert (indices.view(7, 3, n).int().diff(dim=-1) > 0).all()
    sparse_same(Z.unpack(values, indices, n, m), w * mask)
    fewer = mask & (sparse_normal(7, 3 * m, seed=5) > 0)  # a mask need not fill its groups
    values, indices = Z.pack(w, n, m, fewer)
    sparse_same(Z.unpack(values, indices, n, m), w * fewer)


# ---- V:N:M ----


@pytest.mark.parametrize("v, n, m", [(1, 2, 8), (4, 2, 5), (16, 2, 16), (8, 1, 8), (2, 3, 40)])
def test_sparse_venom(v, n, m):
    """Pack, unpack, product and audit against the masked dense weight."""
    w = sparse_normal(16, 3 * m)
    mask = Z.venom_mask(w, v, n, m)
    assert Z.is_venom(mask, v, n, m) and Z.is_pruned(mask, n, m)
    assert mask.sum() == 16 * 3 * n
    packed = Z.pack_venom(w, v, n, m)
    assert packed.values.shape == packed.indices.shape == (16, 3 * n)
    assert packed.columns.shape == (16 // v, 3, 4) and packed.columns.max() < m
    assert packed.indices.max() < 4 and packed.indices.dtype == torch.uint8
    assert (packed.columns.int().diff(dim=-1) > 0).all()
    sparse_same(Z.unpack_venom(packed), w * mask)
    for x in (sparse_normal(3 * m), sparse_normal(2, 5, 3 * m)):
        torch.testing.assert_close(Z.venom_matmul(x, packed), F.linear(x, w * mask))


def test_sparse_venom_chooses_the_columns_of_most_energy():
    """By its definition, block by block; then the largest in a row; importance decides instead."""
    w = sparse_normal(12, 16).mul(3).round()
    mask = Z.venom_mask(w, 6, 2, 8)
    for block in range(2):
        for g in range(2):
            part = w[6 * block :][:6, 8 * g :][:, :8].abs()
            best = sorted(range(8), key=lambda c: -part[:, c].sum().item())[:4]
            for r, row in enumerate(part.tolist()):
                kept = sorted(sorted(best), key=lambda c: -row[c])[:2]
                assert mask[6 * block + r, 8 * g :][:8].nonzero().flatten().tolist() == sorted(kept)
    scores = sparse_normal(12, 16, seed=3).abs()
    sparse_same(Z.venom_mask(w, 6, 2, 8, importance=scores), Z.venom_mask(scores, 6, 2, 8))


def test_sparse_venom_audit_finds_what_is_not():
    """A fifth column in a block, a third weight in a row: each alone is found."""
    mask = Z.venom_mask(sparse_normal(8, 16), 4, 2, 8)
    mask[:4, :8] = False
    mask[0, 0] = mask[1, 1] = mask[2, 2] = mask[3, 3] = True
    assert Z.is_venom(mask, 4, 2, 8)
    fifth, third = mask.clone(), mask.clone()
    fifth[0, 4] = True
    third[0, 1] = third[0, 2] = True
    assert Z.is_pruned(fifth, 2, 8) and not Z.is_venom(fifth, 4, 2, 8)
    assert not Z.is_venom(third, 4, 2, 8)
    assert not Z.is_venom(Z.prune(sparse_normal(8, 16), 2, 8), 8, 2, 8)
    sparse_same(
        Z.unpack_venom(Z.pack_venom(sparse_normal(8, 16), 4, 2, 8, mask)),
        sparse_normal(8, 16) * mask,
    )
    with pytest.raises(ValueError, match="4:2:8"):
        Z.pack_venom(sparse_normal(8, 16), 4, 2, 8, fifth)


# ---- permutation ----


def sparse_kept_by(w, order, n, m):
    w = w.double()
    return Z.retained(w[:, order], Z.prune(w[:, order], n, m))


@pytest.mark.parametrize("n, m", [(1, 2), (2, 4), (1, 4), (3, 4), (4, 8), (2, 8), (4, 32)])
def test_sparse_swaps_never_keep_less(n, m):
    """Round after round what stays only grows, on random and on structured weights; and where
    neighbours are alike it grows much."""
    K = 8 * max(m, 8)
    for seed in range(3):
        for w, much in (
            (sparse_normal(12, K, seed=seed), False),
            (sparse_alike(12, K, seed, run=m), True),
        ):
            last = sparse_kept_by(w, torch.arange(K), n, m)
            first = last
            for rounds in (1, 2, 5, 200):
                order = Z.permute_channels(w, n, m, rounds=rounds)
                assert order.sort().values.tolist() == list(range(K))
                now = sparse_kept_by(w, order, n, m)
                assert now >= last - 1e-12
                last = now
            assert last > first + (0.02 if much else 0)
    sparse_same(order, Z.permute_channels(w, n, m))


def test_sparse_swaps_end_where_no_swap_helps():
    """The table of gains against pruning anew: after the search all swaps are tried by hand."""
    for n, m in ((1, 3), (2, 4)):
        w = sparse_normal(5, 12, seed=n)
        order = Z.permute_channels(w, n, m)
        best = sparse_kept_by(w, order, n, m)
        for i, j in permutations(range(12), 2):
            swapped = order.clone()
            swapped[[i, j]] = order[[j, i]]
            assert sparse_kept_by(w, swapped, n, m) <= best + 1e-12


def test_sparse_swaps_find_the_best_there_is():
    """Large channels in one group, none in the next: nothing of them needs to go."""
    w = torch.ones(6, 16, device=DEVICE)
    w[:, 4:8], w[:, 12:] = 0, 0
    assert sparse_kept_by(w, torch.arange(16), 2, 4) == 0.5
    assert sparse_kept_by(w, Z.permute_channels(w), 2, 4) == 1
    importance = w.roll(2, 0)
    sparse_same(
        Z.permute_channels(sparse_normal(6, 16), importance=importance), Z.permute_channels(w)
    )
    sparse_same(Z.permute_channels(w[:, :4]).cpu(), torch.arange(4))  # one group: nothing to swap
    sparse_same(Z.permute_channels(torch.zeros_like(w)).cpu(), torch.arange(16))


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_sparse_swaps_at_any_scale(scale):
    """No threshold is absolute."""
    w = sparse_alike(12, 32).double()
    sparse_same(Z.permute_channels(w * scale), Z.permute_channels(w))


def test_sparse_folding_changes_nothing():
    """SwiGLU with biases, permuted for its down projection: the same function, and pruned a better
    one. With whole numbers, whose sums round nowhere, and ReLU: the same to the bit."""
    mlp, x = sparse_swiglu(torch.float64).to(DEVICE), sparse_normal(7, 24, dtype=torch.float64)
    mlp.down_proj.weight.mul_(sparse_normal(16, seed=4).exp().repeat_interleave(4))
    before, w = mlp(x), mlp.down_proj.weight.clone()
    order = Z.permute_channels(w)
    Z.fold_permutation_(order, mlp.down_proj, [mlp.gate_proj, mlp.up_proj])
    sparse_same(mlp.down_proj.weight, w[:, order])
    torch.testing.assert_close(mlp(x), before, rtol=1e-13, atol=1e-13)
    pruned = F.linear(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x), w[:, order]) - before
    assert pruned.isfinite().all()

    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5)).to(DEVICE)
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(sparse_normal(*p.shape, seed=i).mul(4).round())
        x = sparse_normal(6, 8).mul(3).round()
        before = net(x)
        Z.fold_permutation_(torch.randperm(32), net[2], net[0])
        sparse_same(net(x), before)


def test_sparse_folding_several_readers_and_a_norm():
    """Two consumers of one permutation, a norm between: its weight and bias are permuted too."""
    torch.manual_seed(0)
    make, norm, a, b = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 3), nn.Linear(16, 4)
    parts = nn.ModuleList([make, norm, a, b]).double().to(DEVICE)
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    x = sparse_normal(5, 6, dtype=torch.float64)
    f = lambda: [reader(norm(make(x))) for reader in (a, b)]
    before = f()
    order = Z.permute_channels(torch.cat([a.weight, b.weight]))
    Z.fold_permutation_(order, (a, b), (make, norm))
    assert parts[0] is make
    torch.testing.assert_close(f(), before, rtol=1e-12, atol=1e-12)


# ---- the kernel ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("n, m", [(1, 4), (2, 4), (2, 8), (4, 32), (3, 8), (2, 3)])
def test_sparse_gather_gemv(n, m, dtype):
    """Kernel == reference == masked dense in fp32, for one to nine rows and odd N and K."""
    tol = dict(rtol=1e-3, atol=1e-3) if dtype == torch.float16 else dict(rtol=1e-5, atol=1e-5)
    for rows in (1, 3, 8, 9):
        N, K = (37, 5 * m) if rows % 2 else (5, 17 * m)
        w = sparse_normal(N, K, dtype=dtype)
        x = sparse_normal(rows, K, seed=rows, dtype=dtype) / K**0.5
        bias = sparse_normal(N, seed=2, dtype=dtype) if rows % 3 else None
        args = (*Z.pack(w, n, m), n, m, bias)
        wide = None if bias is None else bias.float()
        wanted = F.linear(x.float(), (w * Z.prune(w, n, m)).float(), wide).to(dtype)
        torch.testing.assert_close(Z.gather_gemv(x, *args), wanted, **tol)
        torch.testing.assert_close(Z.gather_gemv_reference(x, *args), wanted, **tol)


def test_sparse_gather_gemv_over_several_tiles():
    """K beyond one tile of 512 values, x of any strides and dimensions, pruned inputs not read."""
    w = sparse_normal(6, 2 * 700)
    packed = Z.pack(w, 2, 4)
    x = sparse_normal(2 * 700, 3, seed=1).t() / 30
    wanted = F.linear(x, w * Z.prune(w, 2, 4))
    torch.testing.assert_close(Z.gather_gemv(x, *packed, 2, 4), wanted, rtol=1e-4, atol=1e-5)
    one = Z.gather_gemv(x[0], *packed, 2, 4)
    torch.testing.assert_close(one, wanted[0], rtol=1e-4, atol=1e-5)
    assert Z.gather_gemv(x.reshape(3, 1, -1), *packed, 2, 4).shape == (3, 1, 6)
    unread = sparse_normal(1, 8)
    mask = Z.prune(unread, 2, 4)
    x = torch.where(mask, 1.0, torch.nan)
    assert Z.gather_gemv(x, *Z.pack(unread, 2, 4), 2, 4).isfinite().all()


@pytest.mark.skipif(CUDA, reason="of the CPU alone")
def test_sparse_gather_gemv_where_no_kernel_can_run(monkeypatch):
    """bf16, which the interpreter gets wrong, and fp64: plain torch serves."""
    for dtype, tol in ((torch.bfloat16, 1e-2), (torch.float64, 1e-12)):
        w, x = sparse_normal(5, 24, dtype=dtype), sparse_normal(3, 24, seed=1, dtype=dtype)
        monkeypatch.setattr(Z, "_gather_kernel", None)
        wanted = F.linear(x.double(), (w * Z.prune(w, 2, 8)).double()).to(dtype)
        got = Z.gather_gemv(x, *Z.pack(w, 2, 8), 2, 8)
        torch.testing.assert_close(got, wanted, rtol=tol, atol=tol)


def test_sparse_gather_gemv_operator():
    """The operator that a compiled step calls: its schema and its fake are what it does."""
    w, x = sparse_normal(5, 24), sparse_normal(3, 24)
    arguments = (x, *Z.pack(w, 2, 8), 2, 8, None)
    torch.library.opcheck(Z._gather_op, arguments, test_utils=("test_schema", "test_faketensor"))


# ---- 2:4 on GPUs ----


def test_sparse_semi_structured():
    """On a GPU that has it the product of the masked weight; elsewhere ValueError, or dense."""
    w = sparse_normal(64, 128, dtype=torch.float16)
    w *= Z.prune(w, 2, 4)
    with pytest.raises(ValueError, match="not 2:4: multiply it by prune"):
        Z.semi_structured(w + 1)
    if CUDA and torch.cuda.get_device_capability() >= (8, 0):
        x = sparse_normal(16, 128, seed=1, dtype=torch.float16)
        got = F.linear(x, Z.semi_structured(w))
        torch.testing.assert_close(got, F.linear(x, w), rtol=1e-2, atol=1e-2)
        with pytest.raises(ValueError, match="float16 or bfloat16, N a multiple of 32"):
            Z.semi_structured(w[:, :64][:24])
    else:
        with pytest.raises(ValueError, match="sm_80 or newer; the weight is .* on cpu"):
            Z.semi_structured(w)
    assert Z.semi_structured(w.double(), fallback=True).dtype == torch.float64


# ---- the swap ----


def test_sparse_sparsify():
    """Every Linear and nothing else; == the same model with masked dense weights."""
    dense, sparse = sparse_model(), Z.sparsify_(sparse_model(), 2, 8)
    swapped = [name for name, x in sparse.named_modules() if type(x) is Z.SparseLinear]
    names = ("gate_proj", "up_proj", "down_proj")
    assert swapped == [f"layers.{i}.{name}" for i in range(2) for name in names]
    for name in swapped:
        layer, linear = sparse.get_submodule(name), dense.get_submodule(name)
        assert (layer.in_features, layer.out_features) == (linear.in_features, linear.out_features)
        assert not layer.training and not list(layer.parameters())
        linear.weight *= Z.prune(linear.weight, 2, 8)
        sparse_same(layer.weight, linear.weight)
    assert "2:8" in repr(sparse)
    for shape in ((1, 1), (2, 9)):  # by the kernel, and by the dense product
        tokens = torch.arange(shape[0] * shape[1], device=DEVICE).view(shape)
        torch.testing.assert_close(sparse(tokens), dense(tokens), rtol=1e-4, atol=1e-5)
    assert sparse.layers[0](torch.empty(0, 16, device=DEVICE)).shape == (0, 16)


def test_sparse_linear_uses_the_kernel_for_few_rows(monkeypatch):
    """Up to 8 rows, without a gradient, of the weight's dtype; else the dense product."""
    layer, calls = Z.SparseLinear(nn.Linear(16, 8).to(DEVICE), 2, 4), []
    real = Z.gather_gemv
    monkeypatch.setattr(Z, "gather_gemv", lambda *a: calls.append(1) or real(*a))
    for x, runs in (
        (sparse_normal(8, 16), 1),
        (sparse_normal(9, 16), 0),
        (sparse_normal(2, 4, 16), 1),
    ):
        calls.clear()
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
        assert len(calls) == runs
    x = sparse_normal(2, 16).requires_grad_()
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(2, -1))
    assert len(calls) == 1
    with pytest.raises(RuntimeError):
        layer(sparse_normal(2, 16, dtype=torch.float64))


@pytest.mark.parametrize(
    "skip, n_swapped",
    [((), 6), (["layers.0"], 3), (["down_proj"], 4), (["layers.1.up_proj"], 5), ("layers", 0)]
    + [(["proj"], 6), (["layer"], 6), (["0.up_proj", "norm"], 5)],
)
def test_sparse_sparsify_skips(skip, n_swapped):
    """A name, or a dotted part of one, and not a part of a word."""
    swapped = Z.sparsify_(sparse_model(), skip=skip).modules()
    assert sum(type(x) is Z.SparseLinear for x in swapped) == n_swapped


def test_sparse_sparsify_leaves_what_is_shared():
    """A tied head, one Linear in two places, and two that share a parameter stay dense."""
    a, b, c = (nn.Linear(8, 8) for _ in range(3))
    b.weight = c.weight
    net = Z.sparsify_(nn.Sequential(a, nn.Sequential(a), b, c, nn.Linear(8, 8)))
    assert [type(x) is Z.SparseLinear for x in net] == [False, False, False, False, True]
    tied = Z.sparsify_(sparse_model())
    assert tied.head.weight is tied.embed.weight and type(tied.head) is nn.Linear


def test_sparse_sparsify_on_meta_and_state_dict():
    """A skeleton on the meta device has the buffers of the real one, and loads what it saved."""
    real = Z.sparsify_(sparse_model(dtype=torch.bfloat16), 4, 8)
    with torch.device("meta"):
        skeleton = Z.sparsify_(SparseModel().to(torch.bfloat16), 4, 8)
    saved = real.state_dict()
    shapes = lambda state: {name: (x.shape, x.dtype) for name, x in state.items()}
    assert shapes(skeleton.state_dict()) == shapes(saved)
    assert {"layers.0.up_proj." + x for x in ("values", "indices", "bias")} <= saved.keys()
    assert not any("proj.weight" in name for name in saved)
    skeleton.load_state_dict(saved, assign=True)
    skeleton.head.weight = skeleton.embed.weight
    tokens = torch.arange(20, device=DEVICE)[None]
    sparse_same(skeleton.eval()(tokens), real(tokens))
    copied = Z.sparsify_(sparse_model(dtype=torch.bfloat16).apply(sparse_scramble), 4, 8)
    copied.load_state_dict(saved)
    sparse_same(copied(tokens), real(tokens))


def sparse_scramble(module):
    for p in module.parameters(recurse=False):
        p.data.normal_()


def test_sparse_sparser_is_worse():
    """The denser pattern is nearer to the dense model."""
    tokens = torch.arange(20, device=DEVICE)[None]
    wanted = sparse_model()(tokens)
    error = lambda n, m: (Z.sparsify_(sparse_model(), n, m)(tokens) - wanted).norm()
    assert error(7, 8) < error(2, 4) < error(1, 4)


# ---- bad input ----

SPARSE_CALLS = SimpleNamespace(
    nan=lambda: Z.prune(torch.full((2, 4), torch.nan), 2, 4),
    infinite=lambda: Z.prune(torch.full((2, 4), torch.inf), 2, 4),
    dense=lambda: Z.prune(sparse_normal(2, 4), 4, 4),
    none=lambda: Z.prune(sparse_normal(2, 4), 0, 4),
    floats=lambda: Z.prune(sparse_normal(2, 4), 2.0, 4),
    wide=lambda: Z.prune(sparse_normal(2, 512), 2, 512),
    uneven=lambda: Z.prune(sparse_normal(2, 6), 2, 4),
    three=lambda: Z.prune(sparse_normal(2, 4, 4), 2, 4),
    scores=lambda: Z.prune(sparse_normal(2, 8), 2, 4, sparse_normal(2, 4)),
    bad_scores=lambda: Z.prune(sparse_normal(2, 4), 2, 4, torch.full((2, 4), torch.nan)),
    mask=lambda: Z.pack(sparse_normal(2, 4), 2, 4, torch.ones(2, 4)),
    mask_shape=lambda: Z.pack(sparse_normal(2, 8), 2, 4, torch.zeros(2, 4)),
    blocks=lambda: Z.venom_mask(sparse_normal(6, 8), 4),
    narrow=lambda: Z.venom_mask(sparse_normal(4, 8), 4, 2, 4),
    venom_x=lambda: Z.venom_matmul(sparse_normal(2, 9), Z.pack_venom(sparse_normal(4, 8), 4)),
    permute=lambda: Z.permute_channels(sparse_normal(4, 6)),
    permute_nan=lambda: Z.permute_channels(torch.full((2, 4), torch.nan)),
    fold_twice=lambda: Z.fold_permutation_(torch.tensor([0, 0]), [], []),
    fold_size=lambda: Z.fold_permutation_(torch.arange(3), nn.Linear(4, 4), []),
    fold_rows=lambda: Z.fold_permutation_(torch.arange(3), [], nn.Linear(3, 4)),
    fold_packed=lambda: Z.fold_permutation_(
        torch.arange(4), Z.SparseLinear(nn.Linear(4, 4), 2, 4), []
    ),
    fold_tied=lambda: Z.fold_permutation_(torch.arange(4), [SPARSE_LINEAR], [SPARSE_LINEAR]),
    x=lambda: Z.gather_gemv(sparse_normal(2, 9), *Z.pack(sparse_normal(4, 8), 2, 4), 2, 4),
    x_dtype=lambda: Z.gather_gemv(
        sparse_normal(2, 8).half(), *Z.pack(sparse_normal(4, 8), 2, 4), 2, 4
    ),
    empty=lambda: Z.gather_gemv(sparse_normal(0, 8), *Z.pack(sparse_normal(4, 8), 2, 4), 2, 4),
    indices=lambda: Z.gather_gemv(
        sparse_normal(2, 8), sparse_normal(4, 4), torch.zeros(4, 4, dtype=torch.long), 2, 4
    ),
    bias=lambda: Z.gather_gemv(
        sparse_normal(2, 8), *Z.pack(sparse_normal(4, 8), 2, 4), 2, 4, sparse_normal(3)
    ),
    root=lambda: Z.sparsify_(nn.Linear(4, 4)),
    layer=lambda: Z.sparsify_(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8))),
)
SPARSE_LINEAR = nn.Linear(4, 4)
SPARSE_MESSAGES = dict(
    nan="NaN or an infinity: mend it before pruning",
    infinite="NaN or an infinity",
    dense="1 <= n < m <= 256, as bytes index, not 4:4",
    none="not 0:4",
    floats="not 2.0:4",
    wide="m <= 256, as bytes index, not 2:512",
    uneven=r"m=4 does not divide the weight's 6 columns \(m that do: 2, 3, 6\)",
    three=r"must be \(N, K\), not \(2, 4, 4\)",
    scores=r"importance \(2, 4\) does not fit the weight \(2, 8\)",
    bad_scores="its importance has a NaN",
    mask="keep n=2 of m=4, as prune",
    mask_shape="mask must be as the weight",
    blocks="4:2:8 must have n < 4 < m, and v must divide the weight's 6 rows",
    narrow="4:2:4 must have n < 4 < m",
    venom_x=r"x \(2, 9\) must have 8 columns",
    permute="m=4 does not divide",
    permute_nan="NaN",
    fold_twice="permutation must have each of 0 .. 1 once",
    fold_size=r"consumers\[0\] has weight \(4, 4\), the permutation 3 channels",
    fold_rows=r"producers\[0\] has weight \(4, 3\), the permutation 3 channels",
    fold_packed=r"consumers\[0\] is packed: permute, then sparsify_",
    fold_tied=r"consumers\[0\] has a parameter that is another's too",
    x=r"x must be torch.float32 rows of 8, for 4 values a row of 2:4, not torch.float32 \(2, 9\)",
    x_dtype="not torch.float16",
    empty="x must be",
    indices=r"indices must be uint8 \(4, 4\), as pack makes them",
    bias=r"bias must be \(4,\)",
    root="wrap it in nn.Sequential",
    layer=r'1: m=4 does not divide the weight\'s 6 columns .*; or leave it dense: skip=\["1"\]',
)


@pytest.mark.skipif(CUDA, reason="arguments on the CPU")
@pytest.mark.parametrize("case", SPARSE_MESSAGES)
def test_sparse_bad_input(case):
    """Each names what does not fit, and the mend."""
    assert vars(SPARSE_CALLS).keys() == SPARSE_MESSAGES.keys()
    with pytest.raises(ValueError, match=SPARSE_MESSAGES[case]):
        getattr(SPARSE_CALLS, case)()


def test_sparse_a_failed_call_changes_nothing():
    """sparsify_ and fold_permutation_ check everything before the first change."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(DEVICE)
    net[1].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="^1: the weight .* NaN"):
        Z.sparsify_(net)
    assert type(net[0]) is nn.Linear
    before = net[0].weight.clone()
    with pytest.raises(ValueError, match="producers"):
        Z.fold_permutation_(torch.arange(8).flip(0), net[0], [nn.Linear(3, 4)])
    sparse_same(net[0].weight, before)


# ---- alone, and for GPUs ----


@pytest.mark.parametrize("triton", ["missing", "interpreted"])
def test_sparse_alone_in_a_folder(triton, tmp_path):
    """The one file, copied away, checks itself without Triton, and on its kernel."""
    shutil.copy(REPO / "sparse.py", tmp_path)
    hide = "import sys; sys.modules['triton'] = None; " if triton == "missing" else ""
    env = dict(PYTHONPATH=str(tmp_path), TRITON_INTERPRET=str(int(triton == "interpreted")))
    done = run("-c", hide + "import sparse; sparse.check('cpu')", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr


SPARSE_COMPILE = """
Z._kernel = lambda _: True

def gemv(n=2, m=4, M=1, N=64, K=4096, dtype=torch.bfloat16, bias=None):
    values = torch.zeros(N, K // m * n, dtype=dtype)
    x = torch.zeros(M, K, dtype=dtype)
    Z.gather_gemv(x, values, values.byte(), n, m, bias)
    kernels = Z._gather_kernel.device_caches[0][0].values()
    ptx = [k.asm["ptx"] for k in kernels][-1]
    loads = "ld.global" in ptx and ("v4.b32" in ptx or "v4.u32" in ptx)
    print(n, m, M, str(dtype)[6:], "16-byte loads" if loads else "narrow loads")
"""
SPARSE_COMPILED = ["gemv(2, 4)", "gemv(4, 32)", "gemv(M=8)"]
SPARSE_ALL = [
    *(f"gemv({n}, {m})" for n, m in ((1, 4), (2, 4), (2, 8), (4, 32))),
    *(f"gemv(M={M})" for M in (2, 3, 8, 20)),
    "gemv(dtype=torch.float16, bias=torch.zeros(64, dtype=torch.float16))",
    "gemv(dtype=torch.float32)",
]


@pytest.mark.skipif(not Z.INTERPRET, reason="where there is a GPU, or no Triton, nothing to learn")
@pytest.mark.parametrize(
    "arch, cases",
    [
        (90, SPARSE_COMPILED),
        *(pytest.param(a, SPARSE_ALL, marks=pytest.mark.slow) for a in (80, 90, 100)),
    ],
    ids=["90", "80-all", "90-all", "100-all"],
)
def test_sparse_kernel_compiles_for_gpus(arch, cases, tmp_path):
    """To machine code for Ampere, Hopper and Blackwell; values come in loads of 16 bytes; odd sizes
    compile too, and other sizes of the same kind compile nothing anew."""
    again = ["n = len(built)", "gemv(N=128, K=8192)", "assert len(built) == n"]
    odd = "gemv(3, 8, N=37, K=5 * 8)"
    code = COMPILE.replace("import attention as A\n", "import attention as A, sparse as Z\n")
    code = code.replace("busy = dict", SPARSE_COMPILE + "\nbusy = dict", 1)
    code = code.replace("    eval(case)", "    exec(case)")
    lines = compile_kernels(code, tmp_path, arch, *cases, *again, odd).splitlines()
    assert len(lines) == len(cases) + 3 and lines[-1] == str(["_gather_kernel"])
    assert all("16-byte" in line for line in lines[: len(cases)]), lines


# --------------------------------------------------------------------------------------------------
# gemm.py
# --------------------------------------------------------------------------------------------------

GEMM_LIMITS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
tl = X.triton and X.triton.language  # which a kernel's module must have
# The environment said to interpret while the file was imported, and says so no longer
gemm_jit = InterpretedFunction if X.INTERPRET else X.jit


def gemm_normal(*shape, seed=0):
    return normal(*shape, dtype=torch.float32, rng=seeded(seed + sum(shape)))


def gemm_integers(low, high, *shape, dtype=torch.uint8):
    return torch.randint(low, high, shape, generator=seeded(sum(shape))).to(DEVICE, dtype)


def gemm_stored(N, K, group):
    """qweight, scales, zeros of a random weight: int8 by row, or int4 in groups."""
    if group is None:
        codes = gemm_integers(-128, 128, N, K, dtype=torch.int8)
        return codes, gemm_normal(N, 1).abs() + 0.01, None
    scales = (gemm_normal(N, K // group).abs() + 0.01).bfloat16()
    return gemm_integers(0, 256, N, K // 2), scales, gemm_integers(0, 16, N, K // group)


def gemm_dequantized(q, scales, zeros):
    """Column by column, as the format is written down."""
    if zeros is None:
        return q.float() * scales
    w = torch.empty(len(q), 2 * q.shape[1], device=q.device)
    for j in range(w.shape[1]):
        g = j * zeros.shape[1] // w.shape[1]
        code = q[:, j // 2] // 16 if j % 2 else q[:, j // 2] % 16
        w[:, j] = (code.float() - zeros[:, g].float()) * scales[:, g].float()
    return w


def gemm_near(got, want, limit):
    assert got.isfinite().all() and got.shape == want.shape
    assert relative(got.double(), want.double()) <= limit


@pytest.fixture
def one_processor(monkeypatch):
    """A small GPU, whose tiles have several rows."""
    monkeypatch.setattr(X, "_processors", lambda _: 1)


GEMM_SHAPES = [  # M, N, K, group: ends of tiles, steps and chunks, whole and not
    (1, 50, 96, None), (1, 9, 2064, None), (1, 9, 4096, None), (1, 50, 50, None), (2, 29, 97, None),
    (7, 50, 352, None), (16, 33, 704, None), (33, 50, 256, None), (64, 50, 100, None),
    (70, 17, 128, None), (1, 50, 96, 32), (1, 57, 704, 64), (1, 9, 4224, 128), (1, 17, 4096, 32),
    (1, 9, 6144, 64), (2, 50, 96, 32), (7, 129, 704, 32), (16, 50, 704, 64), (33, 50, 352, 32),
    (64, 33, 384, 128), (70, 17, 256, 64), (17, 50, 256, 128),
]  # fmt: skip


@pytest.mark.parametrize("M, N, K, group", GEMM_SHAPES)
def test_gemm_weight_only(M, N, K, group, one_processor):
    """The kernels for one row of x, few and many, in fp16 and fp32, against the weight written out
    column by column; so too the plain torch beside them."""
    for dtype in (torch.float16, torch.float32):
        x, weight = gemm_normal(M, K).to(dtype), gemm_stored(N, K, group)
        want = x.float() @ gemm_dequantized(*weight).T
        gemm_near(X.weight_only_matmul(x, *weight), want, GEMM_LIMITS[dtype])
        gemm_near(X.weight_only_reference(x, *weight), want, GEMM_LIMITS[dtype])


@pytest.mark.parametrize("n_splits", [1, 2, 3, 4])
@pytest.mark.parametrize("M, group", [(1, None), (1, 32), (7, None), (7, 32), (3, 128)])
def test_gemm_weight_only_in_splits(M, group, n_splits, one_processor):
    """The columns over several programs, some with nothing to do: a bias is added once, and the
    bits are the same again."""
    K = 8448 if M == 1 else 768
    x, weight, bias = gemm_normal(M, K), gemm_stored(3, K, group), 100 * gemm_normal(3)
    want = x @ gemm_dequantized(*weight).T + bias
    got = X.weight_only_matmul(x, *weight, bias, n_splits=n_splits)
    gemm_near(got, want, 1e-5)
    assert torch.equal(got, X.weight_only_matmul(x, *weight, bias, n_splits=n_splits))


def test_gemm_weight_only_of_any_strides_and_bf16(one_processor):
    """Transposed x, more dimensions, strided codes, bf16, and no row at all."""
    weight = gemm_stored(50, 96, 32)
    x = gemm_normal(96, 6).T
    want = x @ gemm_dequantized(*weight).T
    gemm_near(X.weight_only_matmul(x, *weight), want, 1e-5)
    gemm_near(X.weight_only_matmul(x.view(2, 3, 96), *weight), want.view(2, 3, 50), 1e-5)
    loose = tuple(t.T.contiguous().T for t in weight)
    gemm_near(X.weight_only_matmul(x[1], *loose), want[1], 1e-5)
    for x in (x[:1].bfloat16(), x.bfloat16()):
        got = X.weight_only_matmul(x, *weight)
        assert got.dtype == torch.bfloat16
        gemm_near(got, x.float() @ gemm_dequantized(*weight).T, 1e-2)
    assert X.weight_only_matmul(x[:0], *weight).shape == (0, 50)


def test_gemm_weight_only_zeros_stay_zeros(one_processor):
    """A group of one value, q == zero, is exactly 0 whatever x."""
    q, scales, zeros = gemm_stored(8, 64, 32)
    q, zeros = torch.full_like(q, 0x77), torch.full_like(zeros, 7)
    for rows in (1, 2):
        x = torch.full((rows, 64), 6e4, device=DEVICE).half()
        assert X.weight_only_matmul(x, q, scales, zeros).eq(0).all()


@pytest.mark.parametrize("M, group", [(1, None), (5, 32)])
def test_gemm_weight_only_compiles_to_one_graph(M, group, one_processor):
    """torch.compile sees one operator, whose schema and fake are what it does."""
    weight, x = gemm_stored(8, 64, group), gemm_normal(M, 64)
    step = lambda x: 2 * X.weight_only_matmul(2 * x, *weight)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(got, step(x))
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(X._weight_only_op, (x, *weight, None, 0), test_utils=checks)


def test_gemm_weight_only_of_one_number(one_processor):
    """One output: its row is the last of its tile as well as the first."""
    q, scales, _ = gemm_stored(1, 256, None)
    x = gemm_normal(1, 256)
    gemm_near(X.weight_only_matmul(x, q, scales, n_splits=2), x @ (q * scales).T, 1e-5)


def test_gemm_splits_follow_from_the_shape():
    """No more than two tiles for a processor, four steps at least for a program."""
    assert X._n_splits(64, 32, 132) == 4 and X._n_splits(64, 8, 132) == 2
    assert X._n_splits(1000, 99, 132) == 1 and X._n_splits(1, 1, 132) == 1


@pytest.mark.parametrize("broken", ["qweight", "scales", "zeros", "bias", "n_splits", "x"])
def test_gemm_weight_only_refuses(broken):
    """What does not fit is a ValueError with a name, before anything is read."""
    names = ("qweight", "scales", "zeros")
    given = dict(zip(names, gemm_stored(8, 64, 32)), x=gemm_normal(3, 64), bias=gemm_normal(8))
    given[broken] = 0 if broken == "n_splits" else given[broken][..., 1:]
    with pytest.raises(ValueError, match="qweight|bias|n_splits"):
        X.weight_only_matmul(**given)


@pytest.mark.parametrize("scheme, size", [("int8", None), ("int4", 32), ("int4", 16)])
def test_gemm_is_the_product_of_a_models_layers(scheme, size, one_processor):
    """use_product_ puts weight_only_matmul into linears and stacks of experts of a quantized model:
    the logits of quantize.py's own product; of groups it has no kernel for, it says so."""
    widths = dict(q_lora_rank=32, kv_lora_rank=32, v_head_dim=16, ffn_dim=96, expert_ffn_dim=32)
    widths |= dict(n_layers=2, moe_layers=(1,), n_experts_per_token=2)
    model = random_model(latent(**widths)).to(DEVICE)
    Q.quantize_(model, scheme, group_size=size)
    tokens = random_tokens(model.config, 1, 2).to(DEVICE)
    with torch.inference_mode():
        want = model(tokens)
        Q.use_product_(model, X.weight_only_matmul)
        if size == 16:
            with pytest.raises(ValueError, match="groups of 32, 64 or 128"):
                model(tokens)
        else:
            gemm_near(model(tokens), want, 1e-5)


# ---- one product, any epilogue ----


def gemm_operands(M, N, K, dtype):
    a, b = gemm_normal(M, K), gemm_normal(N, K, seed=1)
    scale = 40 if dtype == torch.int8 else 1
    return ((x * scale).clamp(-127, 127).to(dtype) for x in (a, b))


@X.node(lambda x, y: torch.where(x > y, x - y, 0))
@gemm_jit
def gemm_shrink(x, y):
    return tl.where(x > y, x - y, 0.0)


@X.node(lambda x, y, z: x * y + z)
@gemm_jit
def gemm_fma(x, y, z):
    return x * y + z


def gemm_trees(M, N):
    """The tree, and the same without it, of the product p."""
    sa, sb, bias = gemm_normal(M).abs() / 9, gemm_normal(N).abs(), gemm_normal(N, seed=2)
    r, acc, row, col, matrix = gemm_normal(M, N), X.acc, X.row, X.col, X.matrix
    shared = acc * row(sa)
    return {
        "nothing": (acc, lambda p: p),
        "all": (
            X.silu(acc * row(sa) * col(sb) + col(bias)) + matrix(r),
            lambda p: F.silu(p * sa[:, None] * sb + bias) + r,
        ),
        "numbers": (2 + 0.25 * X.relu(acc + -0.5) * 3, lambda p: 2 + F.relu(p - 0.5) * 0.75),
        "gelu, twice": (
            X.gelu(shared) * shared * matrix(r.half()),
            lambda p: F.gelu(p * sa[:, None]) * p * sa[:, None] * r.half().float(),
        ),
        "rounded": (
            X.to_fp16(acc * X.scalar(0.1)) + matrix(r),
            lambda p: (p * 0.1).half().float() + r,
        ),
        "user's": (
            gemm_shrink(gemm_fma(acc, row(sa[:, None]), 0.25), col(sb[None])),
            lambda p: F.relu(p * sa[:, None] + 0.25 - sb),
        ),
    }


@pytest.mark.parametrize("tree", gemm_trees(1, 1))
@pytest.mark.parametrize("M, N, K", [(37, 150, 70), (130, 65, 128)])
def test_gemm_trees(tree, M, N, K):
    """Epilogues of every kind of node, one's own too, against plain torch after the product."""
    a, b = gemm_operands(M, N, K, torch.float32)
    rounds = tree == "rounded"
    tree, plain_torch = gemm_trees(M, N)[tree]
    want = plain_torch((a.double() @ b.double().T).float())
    gemm_near(X.gemm(a, b, tree), want, 1e-3 if rounds else 1e-5)
    gemm_near(X.gemm_reference(a, b, tree), want, 1e-6)


@pytest.mark.filterwarnings("ignore:overflow")  # in silu, rightly
@pytest.mark.parametrize("dtype", [*GEMM_LIMITS, torch.int8, E4M3], ids=str)
@pytest.mark.parametrize("M, N, K", [(3, 5, 7), (70, 131, 300), (129, 40, 256)])
def test_gemm_dtypes(dtype, M, N, K):
    """Each type of operand, with edges and without, against fp64."""
    a, b = gemm_operands(M, N, K, dtype)
    tree, plain_torch = gemm_trees(M, N)["all"]
    want = plain_torch((a.float().double() @ b.float().double().T).float())
    gemm_near(X.gemm(a, b, tree, dtype=torch.float32), want, 1e-5)
    got = X.gemm(a, b, tree)
    assert got.dtype == (dtype if dtype in GEMM_LIMITS else torch.bfloat16)
    gemm_near(got, want, GEMM_LIMITS[got.dtype])


def test_gemm_int8_is_exact():
    """A sum that passes 2^24 on its way to a small number."""
    a, b = (gemm_integers(64, 128, 2, 4096, dtype=torch.int8) for _ in range(2))
    a, b = torch.cat((a, a), 1), torch.cat((b, -b), 1)
    a[:, -1] -= 1
    want = (a.double() @ b.double().T).float()
    assert torch.equal(X.gemm(a, b, dtype=torch.float32).diag(), want.diag())


def test_gemm_of_many_tiles():
    """More rows of tiles than a group of them has."""
    a, b = gemm_operands(700, 150, 16, torch.float32)
    gemm_near(X.gemm(a, b), a @ b.T, 1e-5)


def test_gemm_reads_nothing_past_a_row():
    """A NaN in the next row's first column spoils no product of this one."""
    a, b = gemm_normal(2, 20), gemm_normal(2, 20)
    a[1, 0] = b[1, 0] = math.nan
    assert X.gemm(a, b).isnan().tolist() == [[False, True], [True, True]]


@pytest.mark.filterwarnings("ignore:overflow")  # in silu, rightly
@pytest.mark.parametrize("dtype", [E4M3, torch.int8], ids=str)
@pytest.mark.parametrize("M, N, K", [(3, 130, 128), (70, 257, 300), (129, 40, 520)])
def test_gemm_block_scales(dtype, M, N, K):
    """1 x 128 and 128 x 128, the last block of columns and of rows cut short."""
    a, b = gemm_operands(M, N, K, dtype)
    shapes = dict(a_scale=(M, -(-K // 128)), b_scale=(-(-N // 128), -(-K // 128)))
    scales = {name: gemm_normal(*shape) for name, shape in shapes.items()}
    wide = [x.float().double() for x in (a, b)]
    for j in range(K):
        wide[0][:, j] *= scales["a_scale"][:, j // 128]
        wide[1][:, j] *= scales["b_scale"][torch.arange(N) // 128, j // 128]
    tree, plain_torch = gemm_trees(M, N)["all"]
    want = plain_torch((wide[0] @ wide[1].T).float())
    gemm_near(X.gemm(a, b, tree, dtype=torch.float32, **scales), want, 1e-5)
    gemm_near(X.gemm_reference(a, b, tree, **scales), want, 1e-6)


def test_gemm_multiplies_what_to_fp8_rounds():
    """quantize.py's tiles of 1 x 128 and 128 x 128 are the blocks that gemm takes."""
    x, w = gemm_normal(5, 300), gemm_normal(140, 300)
    (a, sa), (b, sb) = Q.to_fp8(x, "1x128"), Q.to_fp8(w, "128x128")
    got = X.gemm(a, b, a_scale=sa, b_scale=sb, dtype=torch.float32)
    gemm_near(got, Q.from_fp8(a, sa) @ Q.from_fp8(b, sb).T, 1e-5)


def test_gemm_of_any_strides():
    """Operands and residuals that are slices and transposes."""
    a, b = gemm_normal(40, 9).T, gemm_normal(22, 80)[::2, 1::2]
    r = gemm_normal(11, 9).T
    gemm_near(X.gemm(a, b, X.acc + X.matrix(r)), a @ b.T + r, 1e-5)


def test_gemm_refuses():
    """Operands, scales and leaves that do not fit: ValueError, with the name."""
    a, b = gemm_normal(4, 8), gemm_normal(6, 8)
    ones = dict(a_scale=torch.ones(4, 1), b_scale=torch.ones(1, 1))
    two = ones | dict(b_scale=torch.ones(2, 1))
    for call, word in (
        (lambda: X.gemm(a, b.half()), "the same"),
        (lambda: X.gemm(a, b[:, 1:]), "K"),
        (lambda: X.gemm(a.double(), b.double()), "float8_e4m3fn"),
        (lambda: X.gemm(a, b, X.acc + X.row(gemm_normal(6))), "row"),
        (lambda: X.gemm(a, b, X.acc + X.matrix(gemm_normal(6, 4))), "matrix"),
        (lambda: X.gemm(a, b, X.acc + gemm_normal(4)), "wrap"),
        (lambda: X.gemm(a, b, **ones), "8 bits"),
        (lambda: X.gemm(a.to(E4M3), b.to(E4M3), a_scale=torch.ones(4, 1)), "together"),
        (lambda: X.gemm(a.to(E4M3), b.to(E4M3), **two), "b_scale"),
    ):
        with pytest.raises(ValueError, match=word):
            call()


@pytest.mark.parametrize("triton", ["missing", pytest.param("interpreted", marks=pytest.mark.slow)])
def test_gemm_alone_in_a_folder(triton, tmp_path):
    """The one file, copied away, checks itself without Triton, and on its kernels."""
    shutil.copy(REPO / "gemm.py", tmp_path)
    hide = "import sys; sys.modules['triton'] = None; " if triton == "missing" else ""
    env = dict(PYTHONPATH=str(tmp_path), TRITON_INTERPRET=str(int(triton == "interpreted")))
    done = run("-c", hide + "import gemm; gemm.check('cpu')", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr


GEMM_COMPILE = """
X._kernel, X._processors = lambda _: True, lambda _: 132
h, bf, f32, f8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn

def wo(bits, M, group=None, dtype=bf, N=4096, K=4096, bias=None, n_splits=None):
    codes = torch.zeros(N, K, dtype=torch.int8), torch.ones(N, 1), None
    if bits == 4:
        zeros = torch.zeros(N, K // group, dtype=torch.uint8)
        codes = torch.zeros(N, K // 2, dtype=torch.uint8), zeros.bfloat16(), zeros
    X.weight_only_matmul(torch.zeros(M, K, dtype=dtype), *codes, bias, n_splits=n_splits)

def mm(dtype, scales=False, M=256, N=512, K=1024, half=0.5, tree=None):
    a, b, blocks = torch.zeros(M, K).to(dtype), torch.zeros(N, K).to(dtype), -(-K // 128)
    sizes = dict(a_scale=(M, blocks), b_scale=(-(-N // 128), blocks)) if scales else {}
    scales = {name: torch.zeros(size) for name, size in sizes.items()}
    bias, residual = torch.ones(N, dtype=bf), torch.ones(M, N, dtype=bf)
    most = X.silu(X.acc * X.row(torch.ones(M)) + X.col(bias)) * half + X.matrix(residual)
    X.gemm(a, b, most if tree is None else tree, **scales)
"""
GEMM_COMPILED = ["wo(4, 1, 32)", "wo(4, 17, 32, n_splits=2)", "mm(bf)"]
GEMM_ALL = [
    *GEMM_COMPILED,
    *("wo(8, 1)", "wo(8, 1, dtype=h)", "wo(8, 1, K=4112)", "wo(8, 1, dtype=f32)", "wo(4, 1, 128)"),
    *("wo(4, 1, 64, K=11008)", "wo(4, 1, 32, N=1024, n_splits=2, bias=torch.zeros(1024))"),
    *(
        f"wo({b}, {M}, {g}, dtype={d})"
        for b, g in ((8, None), (4, 32), (4, 64), (4, 128))
        for M in (2, 32, 64)
        for d in ("bf", "h")
    ),
    *("wo(8, 16, dtype=f32)", "wo(4, 16, 32, dtype=f32)", "wo(4, 64, 128, dtype=f32)"),
    *("wo(8, 16, K=4100)", "wo(4, 16, 32, K=4128)"),
    *(f"mm({d}, M={M})" for d in ("bf", "h", "f32", "torch.int8") for M in (64, 256)),
    *("mm(torch.int8, True)", "mm(bf, K=1000)", "mm(bf, tree=X.acc)"),
]
GEMM_SOME = [  # each kernel with codes of 8 and 4 bits, few rows and many, and every type of product
    *GEMM_COMPILED,
    *("wo(8, 1)", "wo(8, 1, dtype=f32)", "wo(4, 1, 128)", "wo(8, 1, K=4112)"),
    *(f"wo({b}, {M}, {g})" for b, g in ((8, None), (4, 128)) for M in (2, 64)),
    *("wo(8, 64, dtype=h)", "wo(4, 64, 32, dtype=h)", "wo(4, 64, 128, dtype=f32)"),
    *(f"mm({d})" for d in ("h", "f32", "torch.int8")),
    *("mm(torch.int8, True)", "mm(bf, M=64)", "mm(bf, K=1000)"),
]
GEMM_FP8 = ["mm(f8, True)", "mm(f8)", "mm(f8, M=64)", "mm(f8, True, M=64)", "mm(f8, True, K=1040)"]


@pytest.mark.skipif(not X.INTERPRET, reason="where there is a GPU, or no Triton, nothing to learn")
@pytest.mark.parametrize(
    "arch, cases",
    [
        (90, [*GEMM_COMPILED, *GEMM_FP8[:1]]),
        pytest.param(90, GEMM_ALL + GEMM_FP8, marks=pytest.mark.slow),
        pytest.param(80, GEMM_SOME, marks=pytest.mark.slow),
        pytest.param(100, GEMM_SOME + GEMM_FP8, marks=pytest.mark.slow),
    ],
    ids=["90", "90-all", "80-some", "100-some"],
)
def test_gemm_kernels_compile_for_gpus(arch, cases, tmp_path):
    """To machine code for Ampere, Hopper and Blackwell within their shared memory; other sizes of
    the same kind, and other numbers in an epilogue, compile nothing anew."""
    again = ["n = len(built)", "wo(4, 24, 32, N=8192, K=8192, n_splits=2)"]
    again += ["mm(bf, M=512, K=2048, half=0.25)", "assert len(built) == n, built[n:]"]
    code = COMPILE.replace("import attention as A\n", "import attention as A, gemm as X\n")
    code = code.replace("busy = dict", GEMM_COMPILE + "\nbusy = dict", 1)
    code = code.replace("    eval(case)", "    exec(case)")
    printed = compile_kernels(code, tmp_path, arch, *cases, *again)
    kernels = ("add_splits", "few_rows", "gemm", "gemv")
    assert printed.strip() == str([f"_{name}_kernel" for name in kernels])


# --------------------------------------------------------------------------------------------------
# quantize.py
# --------------------------------------------------------------------------------------------------

QUANTIZE_GROUPED = ("int4", "int3", "int2")
QUANTIZE_SCHEMES = ("int8", *QUANTIZE_GROUPED, "int8-dynamic", "llm.int8", "fp8", "fp8-block")
QUANTIZE_WEIGHT_ONLY = ("int8", *QUANTIZE_GROUPED)
QUANTIZE_ROWWISE = ("int8-dynamic", "fp8", "fp8-block")  # one row of x has nothing of another
QUANTIZE_GRIDS = [  # bits, symmetric, group_size: each of them with each of the others
    *((2, True, None), (2, False, 32), (3, True, 0), (3, False, 32), (4, True, 32), (4, False, 0)),
    *((4, False, 32), (8, True, None), (8, True, 0), (8, False, 32), (8, False, None)),
]
QUANTIZE_PAIRS = [  # every form and every scheme by default, all of them together when asked
    *(("llama", "int4"), ("tied", "int8"), ("qwen2", "fp8"), ("latent", "int3")),
    *(("mixtral", "int2"), ("llama", "llm.int8"), ("latent", "fp8-block")),
    ("mixtral", "int8-dynamic"),
]


def quantize_group(scheme: str, size: int = 8) -> int | None:
    """The group size, where the scheme has one."""
    return size if scheme in QUANTIZE_GROUPED else None


def quantize_normal(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantize_layer(
    scheme: str,
    n: int = 48,
    k: int = 128,
    *,
    dtype=torch.float32,
    bias: bool = False,
    size: int = 32,
    seed: int = 0,
    weight: torch.Tensor | None = None,
) -> Q.QuantizedLinear:
    """One linear layer, quantized."""
    layer = nn.Linear(k, n, bias)
    with torch.no_grad():
        layer.weight.copy_(quantize_normal(n, k, seed=seed) if weight is None else weight)
        if bias:
            layer.bias.copy_(quantize_normal(n, seed=seed + 1))
    model = nn.Sequential(layer).to(dtype).requires_grad_(False)
    return Q.quantize_(model, scheme, group_size=quantize_group(scheme, size))[0]


def quantize_tiny(**changes) -> M.ModelConfig:
    """A Llama whose widths hold groups of 16."""
    return tiny(**dict(dim=64, ffn_dim=96) | changes)


def quantize_config(name: str) -> M.ModelConfig:
    """The forms of model that are loaded and saved; all widths hold groups of 8."""
    return {
        "llama": lambda: tiny(),
        "tied": lambda: tiny(tie_embeddings=True),
        "qwen2": lambda: tiny(family="qwen2", qkv_bias=True, tie_embeddings=True),
        "latent": lambda: latent(q_lora_rank=24),
        "mixtral": lambda: tiny(
            family="mixtral",
            moe_layers=(0, 1, 2),
            n_experts=4,
            n_experts_per_token=2,
            expert_ffn_dim=80,
            norm_topk=True,
        ),
    }[name]()


QUANTIZE_FORMS = ("llama", "tied", "qwen2", "latent", "mixtral")


def quantize_some(names: str, some, *every):
    """The combinations `some`, and slow: all others."""
    some = [(c,) if isinstance(c, str) else c for c in some]
    rest = [pytest.param(*c, marks=pytest.mark.slow) for c in product(*every) if c not in some]
    return pytest.mark.parametrize(names, [*(pytest.param(*c) for c in some), *rest])


quantize_pairs = quantize_some("form,scheme", QUANTIZE_PAIRS, QUANTIZE_FORMS, QUANTIZE_SCHEMES)


def quantize_model(name: str, scheme: str, dtype=torch.float32, **how) -> M.Transformer:
    model = random_model(quantize_config(name))
    for p in model.parameters():  # not the routing corrections: loading keeps them in fp32
        p.data = p.data.to(dtype)
    return Q.quantize_(model, scheme, group_size=quantize_group(scheme), **how)


def quantize_linears(model: nn.Module) -> dict[str, Q.QuantizedLinear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, Q.QuantizedLinear)}


def quantize_stacks(model: nn.Module) -> dict[str, Q.QuantizedStack]:
    return {n: m for n, m in model.named_modules() if isinstance(m, Q.QuantizedStack)}


def quantize_same_state(a: nn.Module, b: nn.Module) -> None:
    """Bit for bit, dtypes too."""
    x, y = a.state_dict(), b.state_dict()
    assert list(x) == list(y)
    for name in x:
        same = x[name].dtype == y[name].dtype and x[name].shape == y[name].shape
        assert same, (name, x[name].dtype, y[name].dtype, x[name].shape, y[name].shape)
        raw = [t[name].contiguous().view(-1).view(torch.uint8) for t in (x, y)]
        assert torch.equal(*raw), name


def quantize_types(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


def quantize_undone(model: M.Transformer) -> M.Transformer:
    """A plain model that holds the dequantized weights."""
    plain = random_model(model.config).to(model.embed.weight.dtype)
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, p in (*plain.named_parameters(), *plain.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        if name in own:
            p.data.copy_(own[name])
        elif leaf in ("w_gate_up", "w_down"):
            stack = model.get_submodule(name)
            p.data.copy_(torch.stack([stack[e] for e in range(len(p))]))
        else:
            p.data.copy_(getattr(model.get_submodule(owner), leaf))
    return plain


def quantize_bf16(x) -> np.ndarray:
    """numpy fp32, rounded to bf16 half to even, by its bits."""
    bits = np.atleast_1d(np.asarray(x, np.float32)).view(np.uint32)
    bits = bits + 0x7FFF + ((bits >> 16) & 1)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def quantize_by_loops(w: torch.Tensor, bits: int, size: int | None, symmetric: bool) -> np.ndarray:
    """w (N, K) -> dequantized, number by number in numpy's fp32: the min-max grid of the white
    paper, 2.2 (symmetric without the lowest code; affine with zero in the range). Scales of groups
    are bf16 numbers, rounded up."""
    w = w.float().numpy()
    out, (n, k) = np.empty_like(w), w.shape
    step = size or k
    f = np.float32
    for i in range(n):
        for j in range(0, k, step):
            part = w[i, j : j + step]
            if symmetric:
                low, high, zero = -(2 ** (bits - 1) - 1), 2 ** (bits - 1) - 1, 0
                scale = f(max(abs(part))) / f(high)
            else:
                low, high = 0, 2**bits - 1
                scale = (max(part.max(), f(0)) - min(part.min(), f(0))) / f(high)
            scale = quantize_bf16(scale * f(1 + 2**-8))[0] if size else f(scale)
            scale = scale if scale > 0 else f(1)
            if not symmetric:
                zero = min(max(int(np.rint(-min(part.min(), f(0)) / scale)), low), high)
            for c in range(step):
                q = int(np.rint(part[c] / scale)) + zero
                out[i, j + c] = f(min(max(q, low), high) - zero) * scale
    return out


def quantize_ends(grid, scales, zeros, shape) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and largest real number of each column's grid."""
    top = 2 ** (grid.bits - 1) - 1 if grid.symmetric else 2**grid.bits - 1
    low, high = (-top, top) if grid.symmetric else (0, top)
    dtype = torch.int8 if grid.symmetric else torch.uint8
    return tuple(
        grid.decode(torch.full(shape, code, dtype=dtype), scales, zeros) for code in (low, high)
    )


def quantize_wide(scales: torch.Tensor, shape) -> torch.Tensor:
    """scales, one for each number of w."""
    return torch.broadcast_to(
        scales.float().repeat_interleave(shape[1] // scales.shape[-1], -1), shape
    )


@pytest.mark.parametrize("bits,symmetric,size", QUANTIZE_GRIDS)
def test_quantize_grid_round_trip_is_within_half_a_step(bits, symmetric, size):
    """A number in the grid's range comes back within scale / 2; one beyond it becomes its end."""
    grid = Q.Grid(bits, size, symmetric)
    w = quantize_normal(24, 96) * torch.logspace(-3, 3, 24)[:, None] + 0.1
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        scales, zeros = grid.find(w.to(dtype))
        codes = grid.encode(w, scales, zeros)
        back = grid.decode(codes, scales, zeros)
        assert codes.dtype == (torch.int8 if symmetric else torch.uint8)
        assert back.dtype == torch.float32 and back.shape == codes.shape == w.shape
        assert scales.dtype == torch.float32 and (zeros is None) == symmetric
        assert zeros is None or zeros.dtype == torch.uint8 and zeros.shape == scales.shape
        low, high = quantize_ends(grid, scales, zeros, w.shape)
        half = quantize_wide(scales, w.shape) * (0.5 + 1e-5)
        inside = (w >= low) & (w <= high)
        assert inside.float().mean() > 0.9  # or nothing is tested
        assert ((back - w).abs() <= half)[inside].all()
        nearest = torch.where(w < low, low, high)
        assert torch.equal(back[~inside], nearest[~inside])
        # what is out of range is out by little: rounding the scale and the zero moves the ends
        room = quantize_wide(scales, w.shape) * (0.51 + 2**bits * 2**-8)
        assert ((w - back).abs() <= room).all()


@pytest.mark.parametrize("bits,symmetric", [(4, True), (4, False), (8, True), (8, False)])
def test_quantize_finer_grids_err_less(bits, symmetric):
    """Per tensor > per channel > per group in squared error, where rows and columns differ."""
    w = quantize_normal(32, 128) * torch.logspace(-1, 1, 32)[:, None]
    w = w * torch.logspace(-1, 1, 128)
    errors = []
    for size in (0, None, 32, 8):
        grid = Q.Grid(bits, size, symmetric)
        scales, zeros = grid.find(w)
        back = grid.decode(grid.encode(w, scales, zeros), scales, zeros)
        errors.append((back - w).square().sum().item())
    assert all(a > 1.4 * b for a, b in zip(errors, errors[1:])), errors


@pytest.mark.parametrize("bits,symmetric,size", QUANTIZE_GRIDS)
def test_quantize_zero_is_exactly_zero(bits, symmetric, size):
    """Padding and pruned weights stay 0, also in rows that have one sign."""
    w = quantize_normal(12, 64)
    w[:4], w[4:8] = w[:4].abs() + 3, -w[4:8].abs() - 3
    w[:, ::5] = 0
    grid = Q.Grid(bits, size, symmetric)
    for ranges in ("minmax", "mse"):
        scales, zeros = grid.find(w, ranges)
        back = grid.decode(grid.encode(w, scales, zeros), scales, zeros)
        assert (back[:, ::5] == 0).all()
        assert relative(back, w) < 1 and back.abs().max() > 3  # and not everything is


@pytest.mark.parametrize("bits,symmetric,size", QUANTIZE_GRIDS)
def test_quantize_mse_ranges_are_never_worse(bits, symmetric, size):
    """The searched range has a squared error <= min-max's in every group, and at few bits a
    smaller sum."""
    w = quantize_normal(16, 64).pow(3)  # heavy tails
    w[3], w[4], w[5] = 0, 0.7, -1e-20
    grid, errors = Q.Grid(bits, size, symmetric), []
    for ranges in ("minmax", "mse"):
        scales, zeros = grid.find(w, ranges)
        back = grid.decode(grid.encode(w, scales, zeros), scales, zeros)
        parts = (back - w).double().square()
        parts = parts.sum()[None] if size == 0 else parts.view(16, -1, size or 64).sum(-1)
        errors.append(parts)
    assert (errors[1] <= errors[0] * (1 + 1e-6)).all()
    assert bits > 4 or errors[1].sum() < 0.995 * errors[0].sum()


def test_quantize_min_max_scales_are_the_papers():
    """Symmetric scale = max |w| / (2^(b-1) - 1); affine (max - min) / (2^b - 1), with 0 within."""
    w = quantize_normal(8, 64)
    scales, _ = Q.Grid(8).find(w)
    torch.testing.assert_close(scales, w.abs().amax(1, keepdim=True) / 127, rtol=1e-6, atol=0)
    scales, _ = Q.Grid(8, 0).find(w)
    torch.testing.assert_close(scales.view(()), w.abs().max() / 127, rtol=1e-6, atol=0)
    scales, zeros = Q.Grid(4, 16, False).find(w)
    part = w.view(8, 4, 16)
    span = part.amax(-1).clamp(min=0) - part.amin(-1).clamp(max=0)
    assert ((span / 15 <= scales) & (scales <= span / 15 * (1 + 2**-7))).all()  # rounded up
    assert torch.equal(scales, scales.bfloat16().float())  # kept in bf16: already such numbers
    assert scales.shape == zeros.shape == (8, 4)


@pytest.mark.parametrize("bits,symmetric,size", QUANTIZE_GRIDS)
def test_quantize_all_zero_group_has_scale_1(bits, symmetric, size):
    """An all-zero channel, group or tensor: scale 1, zeros back, never NaN."""
    grid, w = Q.Grid(bits, size, symmetric), torch.zeros(4, 64)
    for ranges in ("minmax", "mse"):
        scales, zeros = grid.find(w, ranges)
        assert (scales == 1).all()
        back = grid.decode(grid.encode(w, scales, zeros), scales, zeros)
        assert torch.equal(back, torch.zeros(4, 64))
        if size != 0:
            mixed = w.clone()
            mixed[2] = quantize_normal(64)
            scales, _ = grid.find(mixed, ranges)
            assert (scales[[0, 1, 3]] == 1).all() and (scales[2] != 1).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_quantize_grid_refuses_what_is_not_finite(bad):
    """NaN or infinity in a weight is a ValueError for every range setting."""
    w = quantize_normal(4, 32)
    w[2, 17] = bad
    for ranges, symmetric, size in product(("minmax", "mse"), (True, False), (0, None, 16)):
        with pytest.raises(ValueError, match="(?i)nan|inf|finite"):
            Q.Grid(4, size, symmetric).find(w, ranges)


def test_quantize_grid_refuses_what_it_cannot_do():
    """Bits outside 2..8, unknown ranges, a group size that does not divide (the message names
    sizes that do)."""
    w = quantize_normal(4, 48)
    for bits in (0, 1, 9, -4):
        with pytest.raises(ValueError, match="bits"):
            Q.Grid(bits).find(w)
    with pytest.raises(ValueError, match="(?s)minmax.*mse"):
        Q.Grid(8).find(w, "percentile")
    for size in (32, 64, 128):
        with pytest.raises(ValueError) as e:
            Q.Grid(4, size, False).find(w)
        assert str(size) in str(e.value) and "48" in str(e.value)
        assert re.search(r"\b16\b", str(e.value)) and re.search(r"\b8\b", str(e.value))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantize_one_column(bits, symmetric):
    """K = 1: each number is its own channel and comes back to rounding."""
    w = torch.tensor([[3.7], [-0.2], [0.0], [1e-20]])
    grid = Q.Grid(bits, None, symmetric)
    scales, zeros = grid.find(w)
    back = grid.decode(grid.encode(w, scales, zeros), scales, zeros)
    torch.testing.assert_close(back, w, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits,symmetric,size", QUANTIZE_GRIDS[3:])
def test_quantize_huge_and_tiny_weights(bits, symmetric, size):
    """The relative error does not depend on the magnitude, to the ends of fp32; bf16 weights are
    the numbers they are."""
    grid, base = Q.Grid(bits, size, symmetric), quantize_normal(8, 64).clamp(-3, 3)
    for magnitude in (1e-30, 1e-34, 1e30, 7e37):
        errors = []
        for w in (base, base * magnitude, (base * magnitude).bfloat16()):
            scales, zeros = grid.find(w)
            back = grid.decode(grid.encode(w, scales, zeros), scales, zeros)
            assert torch.isfinite(back).all() and torch.isfinite(scales).all()
            errors.append(relative(back.double(), w.double()))
        assert abs(errors[1] / errors[0] - 1) < 0.02 + 0.05 * (size == 32 and bits == 8)
        assert abs(errors[2] / errors[0] - 1) < 0.15


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("value", [1e-44, 3.3e38, 1e-39])
def test_quantize_the_ends_of_fp32_give_no_nan(value, symmetric):
    """Subnormal weights, and those whose max - min overflows: finite numbers or a ValueError,
    never NaN or infinity."""
    w = torch.full((2, 32), value)
    w[:, ::2] *= -1
    for ranges, size in product(("minmax", "mse"), (0, None, 32)):
        grid = Q.Grid(8, size, symmetric)
        try:
            scales, zeros = grid.find(w, ranges)
        except ValueError:
            continue
        assert (scales > 0).all() and torch.isfinite(scales).all()
        back = grid.decode(grid.encode(w, scales, zeros), scales, zeros)
        assert torch.isfinite(back).all()
        assert (back - w).abs().max() <= w.abs().max()


@pytest.mark.parametrize("value", [5.0, -5.0])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantize_constant_rows(value, bits):
    """A row of one value comes back as that value (to the scale's bf16, where there are groups)."""
    w = torch.full((3, 64), value)
    for symmetric in (True, False):
        for size, tolerance in ((0, 1e-6), (None, 1e-6), (32, 2**-7)):
            grid = Q.Grid(bits, size, symmetric)
            scales, zeros = grid.find(w)
            back = grid.decode(grid.encode(w, scales, zeros), scales, zeros)
            torch.testing.assert_close(back, w, rtol=tolerance, atol=0)


def test_quantize_ties_go_to_even_before_the_zero_is_added():
    """round(w / scale) + zero, half to even: an odd zero does not turn the ties around."""
    w = torch.tensor([[-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5, 127.0]])
    grid = Q.Grid(8)
    scales, zeros = grid.find(w)
    assert scales.item() == 1 and zeros is None
    assert grid.encode(w, scales, None).tolist() == [[-2, -2, 0, 0, 2, 2, 4, 127]]
    grid, one = Q.Grid(4, 8, False), torch.ones(1, 1)
    for zero in (6, 7):
        zeros = torch.tensor([[zero]], dtype=torch.uint8)
        want = [zero + i for i in (-2, -2, 0, 0, 2, 2, 4)] + [15]
        codes = grid.encode(w, one, zeros)
        assert codes.tolist() == [want]
        assert grid.decode(codes, one, zeros).tolist() == [[c - zero for c in want]]


def test_quantize_affine_zero_stays_in_its_range():
    """Rows of one sign put the zero at an end of 0..15, and all 16 codes are used."""
    ramp = torch.linspace(0, 15, 16)
    w = torch.stack([-ramp, ramp, ramp - 7, ramp + 100, -ramp - 100])
    grid = Q.Grid(4, 16, False)
    scales, zeros = grid.find(w)
    assert zeros.flatten().tolist() == [15, 0, 7, 0, 15]
    codes = grid.encode(w, scales, zeros)
    assert codes[0].tolist() == list(range(15, -1, -1)) and codes[1].tolist() == list(range(16))
    assert torch.equal(grid.decode(codes, scales, zeros)[:3], w[:3])
    huge = grid.encode(torch.full((1, 16), 1e30), scales[:1], zeros[:1])
    assert (huge == 15).all()
    assert (grid.encode(torch.full((1, 16), -1e30), scales[:1], zeros[:1]) == 0).all()
    assert (
        Q.Grid(8).encode(torch.tensor([[-1e9, 1e9]]), torch.ones(1, 1), None).abs() == 127
    ).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_quantize_a_slice_of_one_group_is_coded_as_in_the_whole(symmetric):
    """GPTQ codes column by column: a group's columns with scales[:, g:g+1] give the same."""
    w, grid = quantize_normal(6, 96), Q.Grid(4, 32, symmetric)
    scales, zeros = grid.find(w)
    codes = grid.encode(w, scales, zeros)
    back = grid.decode(codes, scales, zeros)
    for g in range(3):
        s, z = scales[:, g : g + 1], None if zeros is None else zeros[:, g : g + 1]
        for columns in (slice(32 * g, 32 * g + 32), slice(32 * g + 5, 32 * g + 6)):
            part = grid.encode(w[:, columns], s, z)
            assert torch.equal(part, codes[:, columns])
            assert torch.equal(grid.decode(part, s, z), back[:, columns])


def test_quantize_grid_reads_any_layout():
    """A transposed or strided weight gives what its copy gives, and is not written to."""
    w = quantize_normal(64, 32)
    for odd in (w.t(), w[:, ::2], w.t()[::2], w.expand(2, 64, 32)[1]):
        for grid in (Q.Grid(8), Q.Grid(4, 16, False), Q.Grid(4, 0, False)):
            before = odd.clone()
            scales, zeros = grid.find(odd)
            again, zero = grid.find(before)
            assert torch.equal(scales, again) and (zeros is None or torch.equal(zeros, zero))
            assert torch.equal(grid.encode(odd, scales, zeros), grid.encode(before, again, zero))
            assert torch.equal(odd, before)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_quantize_pack_and_unpack_are_inverse(bits):
    """Any codes, with any leading dims, in exactly K * bits / 8 bytes a row."""
    rng = torch.Generator().manual_seed(bits)
    for lead in ((1,), (5,), (3, 7), (2, 3, 4)):
        for k in (8, 16, 24, 72, 256):
            codes = torch.randint(2**bits, (*lead, k), generator=rng).to(torch.uint8)
            packed = Q.pack(codes, bits)
            assert packed.dtype == torch.uint8 and packed.shape == (*lead, k * bits // 8)
            back = Q.unpack(packed, bits)
            assert back.dtype == torch.uint8 and torch.equal(back, codes)
            strided = torch.stack([codes, codes], -1)[..., 0]
            assert torch.equal(Q.pack(strided, bits), packed)
    for code in range(2**bits):
        codes = torch.full((1, 16), code, dtype=torch.uint8)
        assert torch.equal(Q.unpack(Q.pack(codes, bits), bits), codes)


def test_quantize_pack_writes_these_bytes():
    """int4: byte j holds column 2j in its low half and 2j + 1 in its high one."""
    codes = torch.tensor([[1, 2, 15, 0, 0, 15, 9, 9]], dtype=torch.uint8)
    assert Q.pack(codes, 4).tolist() == [[0x21, 0x0F, 0xF0, 0x99]]
    assert Q.unpack(torch.tensor([[0x21, 0xF0]], dtype=torch.uint8), 4).tolist() == [[1, 2, 0, 15]]


@pytest.mark.parametrize("bits,k", [(4, 7), (2, 6), (3, 12)])
def test_quantize_pack_loses_no_column(bits, k):
    """Columns that do not fill whole bytes are refused or come back, never dropped."""
    codes = torch.full((2, k), 1, dtype=torch.uint8)
    try:
        packed = Q.pack(codes, bits)
    except (ValueError, RuntimeError, AssertionError):
        return
    assert torch.equal(Q.unpack(packed, bits)[..., :k], codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "scheme,bits,size,symmetric",
    [
        ("int8", 8, None, True),
        ("int8-dynamic", 8, None, True),
        ("llm.int8", 8, None, True),
        ("int4", 4, 32, False),
        ("int4", 4, 8, False),
        ("int3", 3, 16, False),
        ("int2", 2, 8, False),
    ],
)
def test_quantize_weights_equal_the_loops_to_the_bit(scheme, bits, size, symmetric, dtype):
    """The dequantized weight == the white paper's formula, number by number in numpy."""
    w = quantize_normal(10, 64, seed=bits) * torch.logspace(-4, 2, 10)[:, None]
    w[3], w[4], w[5], w[6, :32] = 0, w[4].abs(), -w[5].abs(), 0
    layer = quantize_layer(scheme, 10, 64, dtype=dtype, size=size or 0, weight=w)
    want = torch.from_numpy(quantize_by_loops(w.to(dtype), bits, size, symmetric))
    assert layer.weight.dtype == dtype and layer.weight.shape == (10, 64)
    assert torch.equal(layer.weight, want.to(dtype))


@pytest.mark.parametrize("scheme", ["fp8", "fp8-block"])
def test_quantize_fp8_weights_are_near(scheme):
    """e4m3 with a scale per row, or per 128x128 block: within 2^-4 of each number that is not
    small in its block; the largest does not overflow; scales and codes have their shapes."""
    w = quantize_normal(200, 300)
    w[:128, :128] *= 1e4
    w[128:, 128:256] *= 1e-4
    w[7] = 0
    layer = quantize_layer(scheme, 200, 300, weight=w)
    assert layer.qweight.dtype == torch.float8_e4m3fn and layer.qweight.shape == (200, 300)
    assert layer.scales.shape == ((2, 3) if scheme == "fp8-block" else (200, 1))
    assert layer.scales.dtype == torch.float32
    back = layer.weight
    assert torch.isfinite(back).all() and (back[7] == 0).all()
    largest = torch.empty_like(w)
    step = (
        (slice(0, 128), slice(128, 200))
        if scheme == "fp8-block"
        else [slice(i, i + 1) for i in range(200)]
    )
    wide = (
        (slice(0, 128), slice(128, 256), slice(256, 300))
        if scheme == "fp8-block"
        else [slice(0, 300)]
    )
    for r in step:
        for c in wide:
            largest[r, c] = w[r, c].abs().max()
    normal = w.abs() > largest * 2**-14  # e4m3's normal numbers are 448 down to 2^-6
    assert normal.float().mean() > 0.5
    assert ((back - w).abs() <= w.abs() * (2**-4 + 1e-6))[normal].all()
    assert ((back - w).abs() <= largest * 2**-17)[~normal].all()


def test_quantize_schemes_are_listed():
    """One table of names; an unknown one is a ValueError that lists them all."""
    assert set(QUANTIZE_SCHEMES) <= set(Q.SCHEMES)
    for scheme in ("int5", "", "INT8", None, "int8 "):
        for call in (
            lambda: Q.scheme_of(scheme),
            lambda: Q.quantize_(nn.Sequential(nn.Linear(8, 8)), scheme),
        ):
            with pytest.raises(ValueError) as e:
                call()
            assert all(name in str(e.value) for name in Q.SCHEMES)
    for name, scheme in Q.SCHEMES.items():
        assert scheme.name == name and Q.scheme_of(name).name == name


def test_quantize_group_sizes_are_checked():
    """A power of two from 8 on that divides every width; the message names the size."""
    assert Q.scheme_of("int4").grid.group_size == 32
    assert Q.scheme_of("int4", 128).grid.group_size == 128
    for size in (0, 1, 4, 24, -32, 48, 33):
        with pytest.raises(ValueError, match=re.escape(str(size))):
            Q.scheme_of("int4", size)
    with pytest.raises(ValueError, match=r"\b16\b") as e:
        Q.quantize_(nn.Sequential(nn.Linear(48, 8)), "int4", group_size=32)
    assert "48" in str(e.value) and "32" in str(e.value)


@quantize_pairs
def test_quantize_model_equals_one_with_dequantized_weights(form, scheme):
    """Every Linear and every stack of experts is swapped, nothing else; the logits are those of a
    plain model that holds the dequantized weights (weight-only: to rounding)."""
    plain = random_model(quantize_config(form))
    model = copy.deepcopy(plain)
    tied = plain.config.tie_embeddings
    linears = {n for n, m in plain.named_modules() if type(m) is nn.Linear} - (
        {"head"} if tied else set()
    )
    assert Q.quantize_(model, scheme, group_size=quantize_group(scheme)) is model
    assert set(quantize_linears(model)) == linears
    moe = [n for n, m in plain.named_modules() if hasattr(m, "experts")]
    assert set(quantize_stacks(model)) == {f"{n}.{w}" for n in moe for w in ("w_gate_up", "w_down")}
    if tied:
        assert type(model.head) is nn.Linear and model.head.weight is model.embed.weight
    before, after = plain.state_dict(), model.state_dict()
    for name in before:
        stays = "norm" in name or "embed" in name or "router" in name or "correction" in name
        stays |= name.endswith("bias") or (tied and name == "head.weight")
        assert (name in after) == stays, name
        assert not stays or torch.equal(before[name], after[name]), name
    undone, tokens = quantize_undone(model), random_tokens(plain.config, 2, 9)
    assert (
        relative(undone.layers[1].attention.o_proj.weight, plain.layers[1].attention.o_proj.weight)
        < 0.4
    )
    with torch.no_grad():
        got, want = model(tokens), undone(tokens)
    if scheme in QUANTIZE_WEIGHT_ONLY:
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)
    else:
        assert 1e-5 < relative(got, want) < 0.35  # activations are rounded, routing may flip
        assert torch.isfinite(got).all()


@pytest.mark.parametrize("scheme", QUANTIZE_SCHEMES)
def test_quantize_experts_are_read_by_id(scheme):
    """stack[e] == the expert quantized alone; stack[ids] == these stacked; a plain loop, cpu.py's
    and the gathered form give one answer."""
    plain = random_model(quantize_config("latent"))
    layer, experts = copy.deepcopy(plain.layers[1].mlp), plain.layers[1].mlp
    Q.quantize_(layer, scheme, group_size=quantize_group(scheme))
    for name in ("w_gate_up", "w_down"):
        stack, w = getattr(layer, name), getattr(experts, name)
        assert isinstance(stack, Q.QuantizedStack)
        for e in (0, 3, -1):
            alone = quantize_layer(scheme, *w.shape[1:], weight=w[e], size=8)
            assert stack[e].dtype == w.dtype and torch.equal(stack[e], alone.weight)
        ids = torch.tensor([[1, 7], [3, 1]])
        assert torch.equal(
            stack[ids], torch.stack([stack[int(e)] for e in ids.flatten()]).view(2, 2, *w.shape[1:])
        )
        assert torch.equal(stack[torch.tensor(5)], stack[5])
    x = quantize_normal(6, 64)
    with torch.no_grad():
        want = layer(x)
        layer.experts = partial(O.grouped_experts, linear=cpu.expert_linear)
        assert relative(layer(x), want) < (1e-5 if scheme in QUANTIZE_WEIGHT_ONLY else 0.1)
        assert relative(want, experts(x)) < (0.9 if scheme == "int2" else 0.4)


def test_quantize_skip_is_by_dotted_parts():
    """skip names a module or consecutive parts of one: "head" is not "heads", "layers.1" is not
    "layers.10"."""

    def model():
        tree = nn.ModuleDict({n: nn.Linear(8, 8) for n in ("head", "heads", "ahead", "q_proj")})
        tree["layers"] = nn.ModuleList(
            nn.ModuleDict({"q_proj": nn.Linear(8, 8), "k": nn.Linear(8, 8)}) for _ in range(12)
        )
        tree["nest"] = nn.ModuleDict(
            {"head": nn.Linear(8, 8), "x": nn.ModuleDict({"layers": nn.Linear(8, 8)})}
        )
        return tree

    every = {n for n, m in model().named_modules() if type(m) is nn.Linear}
    for skip, stays in (
        (("head",), {"head", "nest.head"}),
        (("layers.1",), {"layers.1.q_proj", "layers.1.k"}),
        (("q_proj", "heads"), {"heads", "q_proj", *(f"layers.{i}.q_proj" for i in range(12))}),
        (("layers.1.k",), {"layers.1.k"}),
        (["nest"], {"nest.head", "nest.x.layers"}),
        ((), set()),
    ):
        got = Q.quantize_(model(), "int8", skip=skip)
        assert {n for n, m in got.named_modules() if type(m) is nn.Linear} == stays, skip
        assert set(quantize_linears(got)) == every - stays
    for skip in (
        ("q_pro",),
        ("proj",),
        ("ayers",),
        ("layers.1.",),
        ("",),
        ("layers.12",),
        ("head", "nope"),
    ):
        tree = model()
        with pytest.raises(ValueError) as e:
            Q.quantize_(tree, "int8", skip=skip)
        assert repr(skip[-1]) in str(e.value) or skip[-1] in str(e.value)
        assert not quantize_linears(tree)
    one = model()  # a bare string is one name, or refused; never its letters
    try:
        Q.quantize_(one, "int8", skip="head")
    except ValueError:
        return
    assert {n for n, m in one.named_modules() if type(m) is nn.Linear} == {"head", "nest.head"}


def test_quantize_skip_reaches_experts_and_layers():
    """Skipping a layer keeps its experts; skipping kv_b_proj keeps that alone."""
    model = quantize_model("latent", "int8", skip=("layers.1", "kv_b_proj"))
    plain = random_model(quantize_config("latent"))
    for name, p in plain.layers[1].named_parameters():
        assert torch.equal(dict(model.layers[1].named_parameters())[name], p)
    for layer in (model.layers[0], model.layers[2]):
        assert type(layer.attention.kv_b_proj) is nn.Linear
        assert isinstance(layer.attention.o_proj, Q.QuantizedLinear)
    assert isinstance(model.layers[2].mlp.w_down, Q.QuantizedStack)


@pytest.mark.parametrize("one,other", [("w_down", "w_gate_up"), ("w_gate_up", "w_down")])
def test_quantize_one_of_the_two_stacks_may_be_skipped(one, other):
    """Experts with one stack as codes and the other plain give what dequantized weights give."""
    model = quantize_model("mixtral", "int8", skip=(one,))
    layer = model.layers[0].mlp
    assert isinstance(getattr(layer, other), Q.QuantizedStack)
    assert isinstance(getattr(layer, one), nn.Parameter)
    undone, tokens = quantize_undone(model), random_tokens(model.config, 1, 6)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), undone(tokens), rtol=2e-4, atol=2e-4)


def test_quantize_swaps_exactly_linear_layers():
    """Subclasses of nn.Linear are somebody's own; cpu.py's swap leaves quantized layers alone, and
    the two together change no product."""

    class Own(nn.Linear):
        pass

    model = nn.Sequential(
        nn.Linear(16, 16), Own(16, 16), cpu.CPULinear(16, 16), nn.Embedding(4, 16)
    )
    before = [copy.deepcopy(m.state_dict()) for m in model[1:]]
    Q.quantize_(model, "int8")
    types = [Q.QuantizedLinear, Own, cpu.CPULinear, nn.Embedding]
    assert [type(m) for m in model] == types
    for m, state in zip(model[1:], before):
        assert all(torch.equal(v, state[k]) for k, v in m.state_dict().items())
    cpu.swap_linear_(model)
    assert [type(m) for m in model] == types

    whole = quantize_model("qwen2", "int8", torch.bfloat16, skip=("o_proj",))
    tokens = random_tokens(whole.config, 1, 7)
    with torch.no_grad():
        want = whole(tokens)
        G.for_cpu_(whole)
        assert type(whole.layers[0].attention.o_proj) is cpu.CPULinear
        assert isinstance(whole.layers[0].mlp.up_proj, Q.QuantizedLinear)
        assert relative(whole(tokens).float(), want.float()) < 0.02
    with pytest.raises(ValueError):  # nothing is left to quantize
        Q.quantize_(cpu.swap_linear_(nn.Sequential(nn.Linear(8, 8))), "int8")


@quantize_some("form,scheme", QUANTIZE_PAIRS[2:4], ["qwen2", "latent"], QUANTIZE_SCHEMES)
def test_quantize_on_meta_has_the_same_tensors(form, scheme):
    """Names, shapes and dtypes on the meta device are those of the real thing, and nothing is
    allocated."""
    for dtype in (torch.float32, torch.bfloat16):
        real = quantize_model(form, scheme, dtype).state_dict()
        with torch.device("meta"):
            model = M.Transformer(quantize_config(form))
        for p in model.parameters():
            p.data = p.data.to(dtype)
        Q.quantize_(model, scheme, group_size=quantize_group(scheme))
        meta = model.state_dict()
        assert list(meta) == list(real)
        for name, t in meta.items():
            assert t.is_meta, name
            assert (t.shape, t.dtype) == (real[name].shape, real[name].dtype), name


@pytest.mark.parametrize("form", ["llama", "latent"])
@pytest.mark.parametrize("what", ["nan", "group", "scheme", "skip", "ranges", "expert-nan"])
def test_quantize_failure_leaves_the_model_as_it_was(what, form):
    """A ValueError from the last layer, after others could have been swapped: every tensor and
    every module is the one it was; the message names the layer."""
    config = quantize_config(form)
    if what == "group":
        config = tiny(ffn_dim=72)  # of all widths only down_proj's has no groups of 16
    if what == "expert-nan" and form == "llama":
        config = quantize_config("mixtral")
    model = random_model(config)
    last = model.layers[-1].mlp
    if what == "nan":
        model.head.weight[3, 5] = math.nan
    if what == "expert-nan":
        last.w_down[-1, 2, 2] = math.nan
    how = {
        "nan": dict(scheme="int8"),
        "expert-nan": dict(scheme="int8"),
        "group": dict(scheme="int4", group_size=16),
        "scheme": dict(scheme="int9"),
        "skip": dict(scheme="int8", skip=("head", "no_such")),
        "ranges": dict(scheme="int8", ranges="no_such"),
    }[what]
    modules, before = dict(model.named_modules()), copy.deepcopy(model)
    tensors = {n: id(t) for n, t in (*model.named_parameters(), *model.named_buffers())}
    with pytest.raises(ValueError) as e:
        Q.quantize_(model, **how)
    assert dict(model.named_modules()) == modules
    assert {n: id(t) for n, t in (*model.named_parameters(), *model.named_buffers())} == tensors
    quantize_same_state(model, before)
    named = {
        "nan": "head",
        "expert-nan": "w_down",
        "group": "down_proj",
        "skip": "no_such",
        "ranges": "no_such",
    }
    assert named.get(what, "int9") in str(e.value)


@pytest.mark.parametrize("form", ["llama", "tied", "latent"])
def test_quantize_twice_is_refused(form):
    """A quantized model has nothing left to quantize: ValueError, and it is as it was; so too for
    a bare Linear and for a module without any."""
    model = quantize_model(form, "int8")
    before = copy.deepcopy(model)
    for scheme in ("int8", "int4"):
        with pytest.raises(ValueError):
            Q.quantize_(model, scheme, group_size=quantize_group(scheme))
    quantize_same_state(model, before)
    for nothing in (nn.Linear(8, 8), nn.Sequential(nn.ReLU()), nn.Embedding(4, 8)):
        with pytest.raises(ValueError):
            Q.quantize_(nothing, "int8")


@pytest.mark.parametrize("scheme", QUANTIZE_SCHEMES)
def test_quantize_layer_keeps_what_a_linear_has(scheme):
    """in_features, out_features, bias, train or eval, the dtype of .weight; and no codes among the
    parameters, nothing that asks for a gradient."""
    layer = nn.Linear(64, 24).bfloat16()
    bias = layer.bias.detach().clone()
    model = nn.Sequential(layer, nn.Linear(24, 8, bias=False).bfloat16()).train()
    model[1].eval()
    Q.quantize_(model, scheme, group_size=quantize_group(scheme))
    a, b = model
    assert (a.in_features, a.out_features, b.in_features, b.out_features) == (64, 24, 24, 8)
    assert a.training and not b.training
    assert b.bias is None and torch.equal(a.bias.detach(), bias) and a.bias.dtype == torch.bfloat16
    assert a.weight.shape == (24, 64) and a.weight.dtype == torch.bfloat16
    assert Q.SCHEMES[scheme].name in (a.scheme, getattr(a.scheme, "name", None))
    assert not a.weight.requires_grad
    codes = {"qweight", "scales", "zeros"}
    assert not codes & {n.split(".")[-1] for n, _ in model.named_parameters()}
    assert codes - {"zeros"} <= {n for n, _ in a.named_buffers()}
    assert (a.zeros is not None) == (scheme in QUANTIZE_GROUPED)
    assert all(p.is_floating_point() for p in model.parameters())
    assert "QuantizedLinear" in repr(a) and "24" in repr(a) and "64" in repr(a)


@pytest.mark.parametrize("scheme", QUANTIZE_SCHEMES)
def test_quantize_buffers_have_the_layout_that_is_stored(scheme):
    """qweight, scales and zeros: the dtypes and shapes of the file format."""
    layer = quantize_layer(scheme, 24, 128, size=16, dtype=torch.bfloat16)
    bits = {"int4": 4, "int3": 3, "int2": 2}.get(scheme)
    if bits:
        assert (layer.qweight.dtype, layer.qweight.shape) == (torch.uint8, (24, 128 * bits // 8))
        assert (layer.scales.dtype, layer.scales.shape) == (torch.bfloat16, (24, 8))
        assert (layer.zeros.dtype, layer.zeros.shape) == (torch.uint8, (24, 8))
        codes = Q.unpack(layer.qweight, bits)
        assert codes.max() == 2**bits - 1 and codes.min() == 0
    else:
        fp8 = scheme.startswith("fp8")
        assert layer.qweight.dtype == (torch.float8_e4m3fn if fp8 else torch.int8)
        assert layer.qweight.shape == (24, 128) and layer.zeros is None
        assert layer.scales.dtype == torch.float32
        assert layer.scales.shape == ((1, 1) if scheme == "fp8-block" else (24, 1))
    size = sum(t.nbytes for t in layer.state_dict().values())
    assert size == 24 * (128 * (bits or 8) // 8 + (8 * 3 if bits else 4)) - (
        23 * 4 if scheme == "fp8-block" else 0
    )


@pytest.mark.parametrize("scheme", QUANTIZE_SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize_copies_give_the_same_answer(scheme, dtype):
    """deepcopy, torch.save of the layer and of its state_dict, before and after a product."""
    layer = quantize_layer(scheme, dtype=dtype, bias=True)
    x = quantize_normal(3, 128, dtype=dtype)
    for used in (False, True):
        if used:
            with torch.inference_mode():
                layer(x), layer(x[:1])
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        fresh = quantize_layer(scheme, dtype=dtype, bias=True, seed=7)
        if used:
            with torch.no_grad():
                fresh(x), fresh(x[:1])  # whatever it prepared for its old codes is of no use
        assert fresh.load_state_dict(torch.load(io.BytesIO(file.getvalue()))).missing_keys == []
        whole = io.BytesIO()
        torch.save(layer, whole)
        whole.seek(0)
        for copied in (copy.deepcopy(layer), torch.load(whole, weights_only=False), fresh):
            quantize_same_state(copied, layer)
            assert torch.equal(copied.weight, layer.weight)
            with torch.no_grad():
                assert torch.equal(copied(x), layer(x))
                assert torch.equal(copied(x[:1]), layer(x[:1]))
        assert list(layer.state_dict()) == list(copied.state_dict())


@pytest.mark.parametrize("scheme", QUANTIZE_SCHEMES)
def test_quantize_codes_written_later_are_used(scheme):
    """Nothing is remembered of the old codes: writing to the buffers in place changes products."""
    for dtype in (torch.float32, torch.bfloat16):
        layer, x = quantize_layer(scheme, dtype=dtype), quantize_normal(2, 128, dtype=dtype)
        other = quantize_layer(scheme, dtype=dtype, seed=3)
        with torch.no_grad():
            layer(x), layer(x[:1])
            layer.qweight.view(torch.uint8).copy_(other.qweight.view(torch.uint8))
            layer.scales.copy_(other.scales)
            if other.zeros is not None:
                layer.zeros.copy_(other.zeros)
            assert torch.equal(layer.weight, other.weight)
            assert torch.equal(layer(x), other(x))
            assert torch.equal(layer(x[:1]), other(x[:1]))


@quantize_some(
    "form,scheme",
    [("qwen2", "fp8"), ("qwen2", "int4"), ("mixtral", "int2"), ("mixtral", "int8-dynamic")],
    ["qwen2", "mixtral"],
    QUANTIZE_SCHEMES,
)
def test_quantize_casts_keep_the_codes(form, scheme):
    """.to(bf16), .half(), .float(), .double(): codes, scales and zeros stay bit for bit, embedding
    and norms are cast, and coming back the weights are what they were."""
    model = quantize_model(form, scheme)
    kept = {
        n: t.clone()
        for n, t in model.state_dict().items()
        if n.endswith(("qweight", "scales", "zeros"))
    }
    assert kept
    w = model.layers[0].attention.q_proj.weight.clone()
    tokens = random_tokens(model.config, 1, 5)
    with torch.no_grad():
        before = model(tokens)
        for cast, dtype in (
            (lambda m: m.to(torch.bfloat16), torch.bfloat16),
            (lambda m: m.half(), torch.float16),
            (lambda m: m.to(device="cpu", dtype=torch.bfloat16), torch.bfloat16),
            (lambda m: m.float(), torch.float32),
        ):
            model = cast(model)
            state = model.state_dict()
            for name, t in kept.items():
                assert state[name].dtype == t.dtype, (name, dtype)
                assert torch.equal(state[name].view(torch.uint8), t.view(torch.uint8)), name
            q = model.layers[0].attention.q_proj
            assert model.embed.weight.dtype == q.weight.dtype == dtype
            assert q.bias is None or q.bias.dtype == dtype
            assert torch.equal(q.weight, w.to(dtype))
            for stack in quantize_stacks(model).values():
                assert stack[0].dtype == dtype
            if dtype != torch.float16 or scheme not in ("fp8", "fp8-block"):
                logits = model(tokens)
                assert logits.dtype == dtype and torch.isfinite(logits).all()
        got = model(tokens)
    assert relative(got, before) < (
        0.2 if "fp8" in scheme else 0.05
    )  # embedding, norms and biases went through bf16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", QUANTIZE_WEIGHT_ONLY)
def test_quantize_gradients_reach_the_input(scheme, dtype):
    """dL/dx == dL/dy @ W with W dequantized, also when the layer was first used in inference
    mode."""
    layer = quantize_layer(scheme, dtype=dtype, bias=True)
    x = quantize_normal(3, 128, dtype=dtype)
    with torch.inference_mode():
        layer(x), layer(x[:1])
    for rows in (1, 3):
        leaf, g = x[:rows].clone().requires_grad_(), quantize_normal(rows, 48, seed=5, dtype=dtype)
        layer(leaf).backward(g)
        want = g.float() @ layer.weight.float()
        assert relative(leaf.grad.float(), want) < (1e-5 if dtype == torch.float32 else 8e-3)


def test_quantize_rounding_by_a_callable():
    """rounding(name, weight fp32) takes the place of find and encode: it is given every layer by
    its name, and its codes are those that are kept."""
    grid = Q.scheme_of("int4", 16).grid
    plain, seen = random_model(quantize_tiny()).bfloat16(), {}

    def nearest(name, w):
        assert w.dtype == torch.float32 and w.dim() == 2
        seen[name] = w.clone()
        scales, zeros = grid.find(w)
        return grid.encode(w, scales, zeros), scales, zeros

    model = Q.quantize_(copy.deepcopy(plain), "int4", group_size=16, rounding=nearest)
    weights = {n: m.weight for n, m in plain.named_modules() if type(m) is nn.Linear}
    assert set(seen) == set(weights)
    assert all(torch.equal(seen[n], w.float()) for n, w in weights.items())
    quantize_same_state(model, Q.quantize_(copy.deepcopy(plain), "int4", group_size=16))

    def zero(name, w):
        codes, scales, zeros = nearest(name, w)
        return zeros.repeat_interleave(16, 1), scales, zeros

    silent = Q.quantize_(copy.deepcopy(plain), "int4", group_size=16, rounding=zero)
    assert all((m.weight == 0).all() for m in quantize_linears(silent).values())


def test_quantize_mse_ranges_reach_the_layers():
    """ranges="mse" gives weights nearer to the original than the default, which is min-max."""
    w = quantize_normal(32, 128).pow(3)
    errors = []
    for how in ({}, {"ranges": "minmax"}, {"ranges": "mse"}):
        model = nn.Sequential(nn.Linear(128, 32))
        model[0].weight.data.copy_(w)
        errors.append(relative(Q.quantize_(model, "int4", **how)[0].weight, w))
    assert errors[0] == errors[1] > 1.005 * errors[2]


@pytest.mark.parametrize("scheme", QUANTIZE_WEIGHT_ONLY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize_kept_weights_are_exact(scheme, dtype):
    """keep(index, weights): these numbers stand in 16 bit beside the codes; .weight and products
    have them, whatever was used before."""
    w = quantize_normal(48, 128, dtype=torch.bfloat16)
    layer = quantize_layer(scheme, dtype=dtype, weight=w.float(), size=16)
    x, old = quantize_normal(3, 128, dtype=dtype), layer.weight.clone()
    with torch.no_grad():
        layer(x), layer(x[:1])
    index = torch.randperm(w.numel(), generator=torch.Generator().manual_seed(0))[:200]
    layer.keep(index, w.flatten()[index])
    new = layer.weight
    assert torch.equal(new.flatten()[index], w.flatten()[index].to(dtype))
    others = torch.ones(w.numel(), dtype=torch.bool).index_fill(0, index, False)
    assert torch.equal(new.flatten()[others], old.flatten()[others])
    assert not torch.equal(new, old)
    for rows in (1, 3):
        with torch.no_grad():
            y = layer(x[:rows])
        want = F.linear(x[:rows].float(), new.float())
        assert relative(y.float(), want) < (1e-5 if dtype == torch.float32 else 8e-3)
    copied = copy.deepcopy(layer)
    assert torch.equal(copied.weight, new)
    assert any("qweight" not in n and t.numel() == 200 for n, t in layer.state_dict().items())


# ---- what comes out ----


@pytest.mark.parametrize(
    "dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)]
)
@pytest.mark.parametrize("scheme", QUANTIZE_WEIGHT_ONLY)
def test_quantize_weight_only_product_is_that_of_the_weights(scheme, dtype, tolerance):
    """y == x @ weight^T + bias for any number of rows and any layout of x, with and without
    gradients recorded."""
    for n, k, size in ((48, 128, 32), (33, 96, 16), (64, 512, 128), (16, 24, 8), (1, 64, 64)):
        layer = quantize_layer(scheme, n, k, dtype=dtype, bias=True, size=size)
        w, b = layer.weight.float(), layer.bias.detach().float()
        wide = quantize_normal(7, 2 * k, dtype=dtype)
        for x in (
            wide[:1, :k],
            wide[:5, :k].contiguous(),
            wide[:, ::2],
            quantize_normal(k, 4, dtype=dtype).t(),
            quantize_normal(2, 3, k, dtype=dtype),
            quantize_normal(2, 3, k, dtype=dtype).transpose(0, 1),
            wide[0, :k],
            quantize_normal(70, k, dtype=dtype),
        ):
            with torch.no_grad():
                y = layer(x)
            want = F.linear(x.float(), w, b)
            assert y.dtype == dtype and y.shape == want.shape
            assert relative(y.float(), want) < tolerance, (n, k, tuple(x.shape))
            assert relative(layer(x).float().detach(), want) < tolerance
    for rows in ((0,), (2, 0)):
        empty = torch.zeros(*rows, 64, dtype=dtype)
        assert layer(empty).shape == (*rows, 1) and layer(empty).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ["int8-dynamic", "llm.int8", "fp8", "fp8-block"])
def test_quantize_activations_cost_so_much(scheme, dtype):
    """Products with rounded activations: off by what 8 bits cost and no more, for any rows."""
    low, high = (2e-3, 1.2e-2) if "int8" in scheme else (1e-2, 4e-2)
    for n, k in ((48, 128), (40, 384), (130, 256)):
        layer = quantize_layer(scheme, n, k, dtype=dtype, bias=True)
        w, b = layer.weight.float(), layer.bias.detach().float()
        for x in (
            quantize_normal(1, k, dtype=dtype),
            quantize_normal(5, k, dtype=dtype),
            quantize_normal(2, 9, k, dtype=dtype).transpose(0, 1),
            quantize_normal(20, 2 * k, dtype=dtype)[:, ::2],
            quantize_normal(k, dtype=dtype),
        ):
            with torch.no_grad():
                y = layer(x)
            want = F.linear(x.float(), w, b)
            assert y.dtype == dtype and y.shape == want.shape
            assert relative(y.float() - b, want - b) < high, (n, k, tuple(x.shape))
        assert relative(y.float() - b, want - b) > low / 4  # they are rounded
        empty = torch.zeros(0, k, dtype=dtype)
        assert layer(empty).shape == (0, n) and layer(empty).dtype == dtype
        zero = torch.zeros(3, k, dtype=dtype)
        with torch.no_grad():
            assert torch.equal(layer(zero), layer.bias.expand(3, n))


@pytest.mark.parametrize("scheme", QUANTIZE_ROWWISE)
def test_quantize_every_row_has_its_own_scale(scheme):
    """Rows of very different size are rounded alike: doubling a row doubles its answer, to the
    last bit; a NaN stays in its row."""
    layer, x = quantize_layer(scheme), quantize_normal(6, 128)
    powers = torch.tensor([-20.0, -7, 0, 3, 11, 20]).exp2()[:, None]
    with torch.no_grad():
        want = layer(x)
        torch.testing.assert_close(layer(x * powers), want * powers, rtol=1e-5, atol=0)
        for i in range(6):
            torch.testing.assert_close(layer(x[i : i + 1])[0], want[i], rtol=1e-5, atol=1e-5)
        sick = x.clone()
        sick[2, 5] = math.nan
        got = layer(sick)
        assert got[2].isnan().all()
        assert torch.equal(got[[0, 1, 3, 4, 5]].isnan(), torch.zeros(5, 48, dtype=torch.bool))
        torch.testing.assert_close(
            got[[0, 1, 3, 4, 5]], want[[0, 1, 3, 4, 5]], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("scheme", ["int8-dynamic", "llm.int8"])
@pytest.mark.parametrize("rows", [1, 4, 40])
def test_quantize_int8_product_is_exact_in_the_integers(scheme, rows):
    """With scales of 1 the answer is the integer product of the codes, though its parts pass 2^24,
    where fp32 sums round."""
    rng, k, n = torch.Generator().manual_seed(0), 4096, 40
    qx = torch.randint(120, 128, (rows, k), generator=rng)
    qw = torch.randint(120, 128, (n, k), generator=rng) * 1
    qw[:, k // 2 :] *= -1
    qx[:, 0] = qw[:, 0] = 127
    layer = quantize_layer(scheme, n, k, weight=qw.float())
    assert (layer.scales == 1).all() and torch.equal(layer.qweight.long(), qw)
    want = qx @ qw.t()
    assert want.abs().max() < 2**24 and (want % 2).any()
    step = 2**-5 if scheme == "llm.int8" else 1.0  # 127 steps stay under its outliers' 6
    with torch.no_grad():
        got = layer(qx.float() * step)
    assert torch.equal((got / step).long(), want)


def test_quantize_int8_dynamic_equals_its_formula():
    """y == (round(x / sx) @ q^T) * sx * sw, sx = max |x| / 127 of the row, the product in int64."""
    layer, x = quantize_layer("int8-dynamic", 64, 512, bias=True), quantize_normal(9, 512)
    x[3] *= 1e-6
    sx = x.abs().amax(1, keepdim=True) / 127
    qx = (x / sx).round().clamp(-127, 127).long()
    acc = (qx @ layer.qweight.long().t()).double()
    want = acc * sx.double() * layer.scales.view(1, -1).double() + layer.bias.detach().double()
    with torch.no_grad():
        torch.testing.assert_close(layer(x).double(), want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("k,count,size", [(2048, 6, 60.0), (4096, 4, 100.0), (4096, 1, 80.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize_llm_int8_survives_outliers(k, count, size, dtype):
    """A few columns of size 60 to 100, as in large models: at least 10 times less error than
    int8-dynamic, against the same weights; against the original ones less too."""
    w = quantize_normal(64, k) * 0.02
    x = quantize_normal(8, k, seed=4)
    columns = torch.randperm(k, generator=torch.Generator().manual_seed(1))[:count]
    x[:, columns] = size * x[:, columns].sign()
    x, errors, real = x.to(dtype), [], []
    for scheme in ("llm.int8", "int8-dynamic"):
        layer = quantize_layer(scheme, 64, k, weight=w)  # fp32: no rounding of y hides the gain
        with torch.no_grad():
            y = layer(x.float())
            errors.append(relative(y, F.linear(x.float(), layer.weight)))
            real.append(relative(y, F.linear(x.float(), w)))
    assert errors[0] * 10 <= errors[1], errors
    assert real[0] * 2 < real[1], real


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize_llm_int8_without_outliers_is_int8_dynamic(dtype):
    """No |x| reaches 6: the same numbers to the bit. One that does is enough to change them."""
    w, x = quantize_normal(40, 256), quantize_normal(5, 256).clamp(-5.9, 5.9).to(dtype)
    a, b = (quantize_layer(s, 40, 256, weight=w, dtype=dtype) for s in ("llm.int8", "int8-dynamic"))
    with torch.no_grad():
        assert torch.equal(a(x), b(x))
        x[1, 17] = 40
        assert not torch.equal(a(x), b(x))
        every = torch.full((2, 256), 50.0, dtype=dtype)  # nothing but outliers
        want = F.linear(every.float(), a.weight.float())
        assert relative(a(every).float(), want) < (1e-5 if dtype == torch.float32 else 5e-3)


def test_quantize_weight_only_function():
    """weight_only on plain tensors == x @ dequantized^T + bias."""
    w, x = quantize_normal(24, 64), quantize_normal(3, 64)
    bias = quantize_normal(24, seed=2)
    for scheme in ("int8", "int4"):
        q = quantize_layer(scheme, 24, 64, weight=w, size=16)
        for b in (None, bias):
            got = Q.weight_only(x, q.qweight, q.scales, q.zeros, b)
            torch.testing.assert_close(got, F.linear(x, q.weight, b), rtol=1e-4, atol=1e-4)


# ---- folders ----


def quantize_saved(folder: Path, name: str, dtype=torch.bfloat16, **how) -> M.ModelConfig:
    """A plain checkpoint of random weights."""
    model = random_model(quantize_config(name)).to(dtype)
    M.save_checkpoint(model, folder, **how)
    return model.config


def quantize_on_load(folder: Path, scheme: str, skip=(), **how) -> M.Transformer:
    spec = Q.scheme_of(scheme, quantize_group(scheme))
    each = lambda name, module: Q.quantize_module(name, module, spec, skip=skip)
    return M.load_checkpoint(folder, each=each, **how)


def quantize_written(model, folder: Path, scheme: str, skip=(), **how) -> dict:
    quantization = Q.to_config(model, scheme, quantize_group(scheme), list(skip))
    M.save_checkpoint(model, folder, quantization=quantization, **how)
    return quantization


def quantize_opened(folder: Path, **how) -> M.Transformer:
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    return M.load_checkpoint(folder, prepare=lambda m: Q.from_config(m, quantization), **how)


@quantize_pairs
def test_quantize_on_load_equals_after_load(form, scheme, tmp_path):
    """Bit for bit, from one file and from many, with a skip, in the stored dtype and in another."""
    quantize_saved(tmp_path / "one", form)
    quantize_saved(tmp_path / "many", form, max_shard_bytes=20_000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    for folder, skip, dtype in (
        ("one", (), None),
        ("many", ("layers.0",), None),
        ("many", ("q_proj",) if form != "latent" else ("kv_b_proj",), torch.float32),
    ):
        got = quantize_on_load(tmp_path / folder, scheme, skip, dtype=dtype)
        want = M.load_checkpoint(tmp_path / folder, dtype=dtype)
        Q.quantize_(want, scheme, skip=skip, group_size=quantize_group(scheme))
        assert quantize_types(got) == quantize_types(want)
        quantize_same_state(got, want)
        assert not got.training and not any(m.training for m in got.modules())
        assert {n for n, _ in got.named_parameters()} == {n for n, _ in want.named_parameters()}
        if want.config.tie_embeddings:
            assert got.head.weight is got.embed.weight
        tokens = random_tokens(want.config, 1, 6)
        with torch.no_grad():
            assert torch.equal(got(tokens), want(tokens))


def test_quantize_on_load_refuses_a_nan_by_its_name(tmp_path):
    """A NaN in the file is a ValueError that names the layer."""
    quantize_saved(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.2.mlp.up_proj.weight"][4, 4] = math.nan
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ValueError, match="up_proj"):
        quantize_on_load(tmp_path, "int8")


QUANTIZE_PEAK = """
import json, resource, sys, torch
import cpu, model as M, quantize as Q
torch.set_num_threads(1)
cpu.keep_freed_memory(False)  # as generate.py --quantize does
def field(name):
    return next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith(name)) * 1024
spec = Q.scheme_of("int4", 32)
Q.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 64)), "int4")  # whatever is imported late
before = max(field("VmHWM"), field("VmRSS"))
model = M.load_checkpoint(sys.argv[1], each=lambda n, m: Q.quantize_module(n, m, spec))
peak = field("VmHWM")
held = sum(t.nbytes for t in model.state_dict().values())
print(json.dumps({"peak": peak - before, "held": held}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_quantize_on_load_is_never_whole_in_bf16(tmp_path):
    """A folder of 200 MB becomes int4 within less than three quarters of that."""
    config = tiny(dim=1024, ffn_dim=4096, n_layers=6, n_heads=16, n_kv_heads=16, head_dim=64)
    with torch.device("meta"):
        model = M.Transformer(config)
    M.allocate(model, "cpu", torch.bfloat16)
    rng = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape[-1], generator=rng).expand(p.shape))
    M.save_checkpoint(model, tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    del model
    assert size > 190e6
    done = run("-c", QUANTIZE_PEAK, tmp_path)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["held"] < 0.32 * size
    assert facts["peak"] < 0.75 * size, facts


@quantize_pairs
def test_quantize_save_and_open_is_bit_equal(form, scheme, tmp_path):
    """Every tensor, the modules, the logits; in one file and in many; a second save writes the
    same bytes."""
    skip = () if form != "latent" else ("kv_b_proj", "layers.0.mlp")
    model = quantize_model(form, scheme, torch.bfloat16, skip=skip)
    written = quantize_written(model, tmp_path / "one", scheme, skip)
    assert json.loads(json.dumps(written)) == written
    assert written["quant_method"] == "sheaf" and written["version"] == 1
    assert written["scheme"] == scheme and sorted(written["skip"]) == sorted(skip)
    if scheme in QUANTIZE_GROUPED:
        assert written["group_size"] == 8
    quantize_written(model, tmp_path / "many", scheme, skip, max_shard_bytes=9_000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    tokens = random_tokens(model.config, 2, 6)
    for name in ("one", "many"):
        again = quantize_opened(tmp_path / name)
        assert again.config == model.config and not again.training
        assert quantize_types(again) == quantize_types(model)
        quantize_same_state(again, model)
        assert not any(t.is_meta for t in again.state_dict().values())
        with torch.no_grad():
            assert torch.equal(again(tokens), model(tokens))
        M.save_checkpoint(again, tmp_path / "again", quantization=written)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "one" / file).read_bytes()


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8-block"])
def test_quantize_open_in_another_dtype(scheme, tmp_path):
    """dtype= casts embedding and norms; codes and scales are those of the file."""
    model = quantize_model("qwen2", scheme, torch.bfloat16)
    quantize_written(model, tmp_path, scheme)
    for dtype in (torch.float32, torch.float16):
        again, want = quantize_opened(tmp_path, dtype=dtype), copy.deepcopy(model).to(dtype)
        quantize_same_state(again, want)
        for a, b in zip(quantize_linears(again).values(), quantize_linears(want).values()):
            assert a.weight.dtype == dtype and torch.equal(a.weight, b.weight)


def test_quantize_kept_weights_are_saved(tmp_path):
    """What TaCQ keeps in 16 bit goes to the folder and comes back, layer by layer as many."""
    model = quantize_model("llama", "int3", torch.bfloat16)
    plain = random_model(quantize_config("llama")).bfloat16()
    kept = {}
    for i, (name, layer) in enumerate(quantize_linears(model).items()):
        if i % 3:
            w = plain.get_submodule(name).weight.flatten()
            kept[name] = index = torch.arange(i, w.numel(), 97)
            layer.keep(index, w[index])
    for how in ({}, {"max_shard_bytes": 9_000}):
        folder = tmp_path / str(len(how))
        quantize_written(model, folder, "int3", **how)
        again = quantize_opened(folder)
        quantize_same_state(again, model)
        for name, layer in quantize_linears(again).items():
            assert torch.equal(layer.weight, model.get_submodule(name).weight)
            if name in kept:
                w = plain.get_submodule(name).weight.flatten()
                assert torch.equal(layer.weight.flatten()[kept[name]], w[kept[name]])
        tokens = random_tokens(model.config, 1, 6)
        with torch.no_grad():
            assert torch.equal(again(tokens), model(tokens))


def test_quantize_folder_opened_plainly_says_how(tmp_path):
    """load_checkpoint without prepare: ValueError with the folder and the mend, never a model."""
    for form in ("llama", "mixtral"):
        model = quantize_model(form, "int8", torch.bfloat16)
        quantize_written(model, tmp_path / form, "int8")
        with pytest.raises(ValueError) as e:
            M.load_checkpoint(tmp_path / form)
        assert "quantiz" in str(e.value) and form in str(e.value)
        assert len(str(e.value)) < 1200


QUANTIZE_CONFIGS = [
    (dict(scheme="int5"), ("int5", "int8", "int4", "llm.int8")),
    (dict(version=2), ("version", "2")),
    (dict(version=None), ("version",)),
    (dict(version="1"), ("version",)),
    (dict(scheme=...), ("scheme",)),
    (dict(scheme=["int4"]), ("scheme",)),
    (dict(group_size=...), ("group_size",)),
    (dict(skip=...), ("skip",)),
    (dict(version=...), ("version",)),
    (dict(group_size=16), ("shape", "scales")),
    (dict(group_size="8"), ("group_size",)),
    (dict(group_size=7), ("group_size", "7")),
    (dict(skip="head"), ("head",)),
    (dict(skip=[3]), ("skip",)),
    (dict(skip=["nowhere"]), ("nowhere",)),
    (dict(mystery=1), ("mystery",)),
    (dict(scheme="int3"), ("shape", "qweight")),
    (dict(scheme="int8"), ("int",)),
    (dict(skip=["head"]), ("lm_head",)),
    (dict(kept={"nowhere": 3}), ("kept", "nowhere")),
    (dict(kept={"norm": 3}), ("kept", "norm")),
    (dict(kept={"head": -1}), ("kept", "head")),
    (dict(kept={"head": "x"}), ("kept", "head")),
    (dict(kept=[1]), ("kept",)),
]


def test_quantize_config_of_another_table_is_refused(tmp_path):
    """quantization_config changed: ValueError that names the field, the file or the tensor."""
    model = quantize_model("llama", "int4", torch.bfloat16)
    quantize_written(model, tmp_path, "int4")
    path = tmp_path / "config.json"
    hf = json.loads(path.read_text())
    for change, words in QUANTIZE_CONFIGS:
        changed = hf["quantization_config"] | change
        changed = {k: v for k, v in changed.items() if v is not ...}
        path.write_text(json.dumps(hf | {"quantization_config": changed}))
        with pytest.raises(ValueError) as e:
            quantize_opened(tmp_path)
        for word in words:
            assert word in str(e.value), (change, word, str(e.value))


@pytest.mark.parametrize("how", ["short", "header", "missing", "dtype", "surprise"])
def test_quantize_folder_that_is_spoilt_is_refused(how, tmp_path):
    """A truncated file, a tensor too few or too many, codes of another dtype: ValueError with the
    name."""
    quantize_written(quantize_model("llama", "int4", torch.bfloat16), tmp_path, "int4")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.self_attn.q_proj.zeros"
    word = name
    if how in ("short", "header"):
        path.write_bytes(path.read_bytes()[: -100 if how == "short" else 30])
        word = "model.safetensors"
    elif how == "missing":
        del tensors[name]
    elif how == "surprise":
        word = "model.layers.1.self_attn.q_proj.mystery"
        tensors[word] = torch.ones(2)
    else:
        tensors[name] = tensors[name].float()
    if how not in ("short", "header"):
        save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ValueError) as e:
        quantize_opened(tmp_path)
    assert word in str(e.value), str(e.value)


def test_quantize_alone_in_a_folder(tmp_path):
    """The one file, copied away, checks itself."""
    shutil.copy(REPO / "quantize.py", tmp_path)
    env = {"PYTHONPATH": str(tmp_path)}
    done = run("-c", "import quantize; quantize.check('cpu')", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr


# ---- composition ----


@pytest.fixture(scope="module")
def quantize_text() -> list[int]:
    """Some two thousand tokens of the standard library."""
    import argparse
    import fractions

    text = "".join(Path(m.__file__).read_text()[2000:6500] for m in (argparse, fractions))
    return K.load_tokenizer(SMALL).encode(text)


def quantize_loss(model: M.Transformer, ids: list[int], length: int = 256) -> float:
    rows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    with torch.no_grad():
        logits = model(rows).float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).item()


@pytest.fixture(scope="module")
def quantize_bf16_loss(quantize_text) -> Callable[[Path], float]:
    return lru_cache(lambda folder: quantize_loss(M.load_checkpoint(folder), quantize_text))


QUANTIZE_8_BITS = ("int8", "int8-dynamic", "llm.int8", "fp8", "fp8-block")


@quantize_some(
    "name,scheme",
    [*(("small", scheme) for scheme in QUANTIZE_8_BITS), ("small", "int4"), ("moe", "int4")],
    ("small", "moe"),
    QUANTIZE_8_BITS,
)
def test_quantize_loss_of_the_shipped_models(name, scheme, quantize_text, quantize_bf16_loss):
    """The trained models lose within half a percent with 8 bits, a few with 4 rounded to
    nearest."""
    assert len(quantize_text) > 2000
    folder, tolerance = REPO / "checkpoints" / name, 0.06 if scheme == "int4" else 0.005
    model = M.load_checkpoint(folder)
    Q.quantize_(model, scheme, group_size=quantize_group(scheme, 32 if folder == SMALL else 8))
    want, got = quantize_bf16_loss(folder), quantize_loss(model, quantize_text)
    assert 0.5 < want < 5 and got != want
    assert abs(got / want - 1) < tolerance, (got, want)


@pytest.mark.parametrize("folder, scheme", [(SMALL, "int4"), (MOE, "int8")], ids=["small", "moe"])
def test_quantize_engine_equals_greedy_decoding(folder, scheme, quantize_text):
    """The paged engine on a quantized model gives, batched, the tokens that model gives alone."""
    model = M.load_checkpoint(folder, dtype=torch.float32)
    Q.quantize_(model, scheme, group_size=quantize_group(scheme, 32 if folder == SMALL else 8))
    cuts = ((0, 9), (50, 81), (200, 217), (300, 301), (400, 440))
    prompts = [quantize_text[a:b] for a, b in cuts]
    with torch.no_grad():
        want = [greedy_tokens(model, torch.tensor([p]), 10) for p in prompts]
    engine = P.Engine(model, num_blocks=64, block_size=16, max_batch_tokens=64)
    got = engine.generate(prompts, greedy(10))
    assert [o.token_ids for o in got] == want
    assert len({tuple(w) for w in want}) > 1


@pytest.mark.parametrize(
    "scheme, skip",
    [*((scheme, ()) for scheme in QUANTIZE_SCHEMES), ("int8-dynamic", ("kv_b_proj",))],
    ids=[*QUANTIZE_SCHEMES, "but kv_b_proj"],
)
def test_quantize_latent_attention_absorbed_equals_expanded(scheme, skip):
    """MLA reads kv_b_proj's weight when absorbed and calls it when expanded: the same answers,
    token by token over a cache too."""
    model = quantize_model("latent", scheme, skip=skip)
    assert (type(model.layers[0].attention.kv_b_proj) is nn.Linear) == bool(skip)
    tokens = random_tokens(model.config, 1, 8)
    exact = bool(skip) or scheme in QUANTIZE_WEIGHT_ONLY
    with torch.no_grad():
        wide, hidden = absorb(model, 0)(tokens), model(tokens, return_hidden=True)
        narrow = absorb(model, 10**6)(tokens)
        absorb(model, 1)
        cache, parts = M.KVCache(model.config, 1, 16), []
        for i in range(8):
            parts.append(model(tokens[:, i : i + 1], torch.tensor([i]), cache.attend))
    # llm.int8 looks for its outliers in all rows of a call: a call of one row may see others
    tolerance = 2e-4 if exact else 0.35 if "fp8" in scheme else 0.1
    assert relative(narrow, wide) < tolerance
    assert relative(torch.cat(parts, 1), wide) < (tolerance if scheme != "llm.int8" else 0.1)
    assert torch.isfinite(hidden).all()


@pytest.mark.parametrize("scheme", QUANTIZE_SCHEMES)
def test_quantize_cache_equals_no_cache(scheme):
    """One token at a time through the cache == the whole forward: a row's answer does not depend
    on how many rows there are."""
    model = quantize_model("qwen2", scheme)
    tokens = random_tokens(model.config, 2, 7)
    with torch.no_grad():
        full = model(tokens)
        cache = M.KVCache(model.config, 2, 8)
        parts = [model(tokens[:, i : i + 1], torch.tensor([i]), cache.attend) for i in range(7)]
    tolerance = 2e-4 if scheme in QUANTIZE_WEIGHT_ONLY else 0.05
    assert relative(torch.cat(parts, 1), full) < tolerance


@pytest.mark.skipif(not has_compiler(), reason="torch.compile on CPU needs a C++ compiler")
@pytest.mark.parametrize(
    "scheme,dtype",
    [("int4", torch.float32), pytest.param("int8", torch.bfloat16, marks=pytest.mark.slow)],
)
def test_quantize_compiles_whole(scheme, dtype):
    """torch.compile(fullgraph=True, dynamic=False) of a quantized model == eager, for one token
    and for several."""
    torch.compiler.reset()
    model = random_model(quantize_tiny(n_layers=1)).to(dtype)
    Q.quantize_(model, scheme, group_size=quantize_group(scheme, 16))
    step = torch.compile(model, fullgraph=True, dynamic=False)
    with torch.inference_mode():
        for n in (1, 5):
            tokens = random_tokens(model.config, 1, n)
            got, want = step(tokens), model(tokens)
            assert relative(got.float(), want.float()) < (1e-5 if dtype == torch.float32 else 2e-2)


@quantize_some("scheme", ["int4", "llm.int8", "fp8-block"], QUANTIZE_SCHEMES)
def test_quantize_traces_without_a_break(scheme):
    """Every scheme is one graph, experts gathered as a compiled step does too."""
    torch.compiler.reset()
    layer = quantize_model("latent", scheme).layers[1].mlp
    layer.experts = G.gathered_if_compiled(layer.experts)
    step = torch.compile(layer, fullgraph=True, dynamic=False, backend="eager")
    x = quantize_normal(1, 3, 64) * 3
    with torch.inference_mode():
        assert relative(step(x), layer(x)) < (1e-4 if scheme in QUANTIZE_WEIGHT_ONLY else 0.1)


def test_quantize_multi_token_prediction():
    """The MTP layer is quantized too and predicts as one with the dequantized weights."""
    model = quantize_model("latent", "int8")
    assert any(n.startswith("mtp.0.") for n in quantize_linears(model))
    assert any(n.startswith("mtp.0.") for n in quantize_stacks(model))
    undone, tokens = quantize_undone(model), random_tokens(model.config, 2, 7)
    with torch.no_grad():
        answers = [
            m.predict_further(m(tokens, return_hidden=True), tokens) for m in (model, undone)
        ]
    torch.testing.assert_close(*answers, rtol=2e-4, atol=2e-4)


def test_quantize_saves_memory():
    """int8 is about half of bf16, int4 in groups of 32 about 0.3: of what is quantized."""
    sizes = {}
    for scheme in (None, "int8", "int4", "int2"):
        model = random_model(quantize_tiny(n_layers=2, dim=256, ffn_dim=512)).bfloat16()
        if scheme:
            Q.quantize_(model, scheme)
        linear = [
            t.nbytes for n, t in model.state_dict().items() if "embed" not in n and "norm" not in n
        ]
        sizes[scheme] = sum(linear)
    assert 0.5 < sizes["int8"] / sizes[None] < 0.52
    assert 0.29 < sizes["int4"] / sizes[None] < 0.30  # 4 + 24 / 32 bits of 16
    assert 0.165 < sizes["int2"] / sizes[None] < 0.18


# ---- generate.py's flags ----

quantize_shipped = lambda *some: quantize_some(
    "name,scheme", some, ("small", "moe"), QUANTIZE_SCHEMES
)


def quantize_main(capsys, *argv) -> str:
    """What the program prints, in this process."""
    code = G.main([str(a) for a in (*argv, "--device", "cpu")])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def quantize_refused(capsys, *argv) -> str:
    """Exit code 2 and one line on stderr, which is returned."""
    assert G.main([str(a) for a in (*argv, "--device", "cpu")]) == 2
    out, err = capsys.readouterr()
    assert len(err.strip().splitlines()) == 1 and "Traceback" not in err, err
    return err


@pytest.fixture(scope="module")
def quantize_file(tmp_path_factory) -> Path:
    import textwrap

    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_text(Path(textwrap.__file__).read_text()[:3000])
    return path


@quantize_shipped(("small", "llm.int8"), ("moe", "int4"))
def test_quantize_flag_scores_a_text(name, scheme, quantize_file, capsys):
    """--quantize SCHEME --score: near the unquantized score, and not equal to it."""
    folder = REPO / "checkpoints" / name
    base = ["--score", quantize_file, "--checkpoint", folder, "--json"]
    size = ["--group-size", "8"] if scheme in QUANTIZE_GROUPED else []
    want = json.loads(quantize_main(capsys, *base))["nats_per_token"]
    got = json.loads(quantize_main(capsys, *base, "--quantize", scheme, *size))["nats_per_token"]
    bound = {"int4": 0.06, "int3": 0.3, "int2": 5.0}.get(scheme, 0.01)
    assert got != want and abs(got / want - 1) < bound, (got, want)


def test_quantize_flag_refuses(quantize_file, tmp_path, capsys):
    """Unknown scheme (the known are listed), a group size that is none or does not divide, a skip
    of nothing, --save or --group-size without --quantize: one line, exit code 2."""
    score = ["--score", quantize_file]
    err = quantize_refused(capsys, *score, "--quantize", "int5")
    assert all(name in err for name in QUANTIZE_SCHEMES)
    assert "7" in quantize_refused(capsys, *score, "--quantize", "int4", "--group-size", "7")
    err = quantize_refused(capsys, *score, "--quantize", "int4", "--checkpoint", MOE)
    assert "72" in err and "8" in err
    err = quantize_refused(capsys, *score, "--quantize", "int8", "--quantize-skip", "nope")
    assert "nope" in err
    out = tmp_path / "out"
    assert "--quantize" in quantize_refused(capsys, "--save", out)
    assert "--quantize" in quantize_refused(capsys, *score, "--group-size", "32")
    assert "--quantize" in quantize_refused(capsys, *score, "--quantize-skip", "head")
    assert not out.exists()


def test_quantize_flag_in_a_process():
    """As a user starts it: the program's own exit code and line."""
    refused(run("generate.py", "--quantize", "int5"), "int5", "llm.int8")


@quantize_shipped(("small", "int4"), ("moe", "fp8-block"))
def test_quantize_saved_folder_generates_the_same(name, scheme, tmp_path, capsys):
    """--save OUT, then OUT as the checkpoint: the greedy text of quantizing on load; quantizing
    it again is refused."""
    size = ["--group-size", "8"] if scheme in QUANTIZE_GROUPED else []
    folder = REPO / "checkpoints" / name
    how = ["--checkpoint", folder, "--quantize", scheme, *size]
    ask = ["def main(", "--max-new-tokens", "12", "--temperature", "0", "--json"]
    want = json.loads(quantize_main(capsys, *how, *ask))
    out = tmp_path / "out"
    quantize_main(capsys, *how, "--save", out)
    got = json.loads(quantize_main(capsys, "--checkpoint", out, *ask))
    assert (got["tokens"], got["text"]) == (want["tokens"], want["text"])
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["scheme"] == scheme and config["quant_method"] == "sheaf"
    stored = (folder / "model.safetensors").stat().st_size
    assert (out / "model.safetensors").stat().st_size < 0.9 * stored
    err = quantize_refused(capsys, "--checkpoint", out, "--quantize", scheme, *ask)
    assert "already" in err or "quantized" in err
    assert (out / "tokenizer.model").read_bytes() == (folder / "tokenizer.model").read_bytes()


def test_quantize_save_spares_another_checkpoint(tmp_path, capsys):
    """--save into a folder that holds a checkpoint is refused and changes no byte of it."""
    shutil.copytree(MOE, tmp_path / "moe")
    before = {p.name: p.read_bytes() for p in (tmp_path / "moe").iterdir()}
    err = quantize_refused(capsys, "--quantize", "int8", "--save", tmp_path / "moe")
    assert str(tmp_path / "moe") in err
    own = ["--checkpoint", tmp_path / "moe", "--quantize", "int8", "--save", tmp_path / "moe"]
    quantize_refused(capsys, *own)
    assert {p.name: p.read_bytes() for p in (tmp_path / "moe").iterdir()} == before
    (tmp_path / "file").write_text("x")
    quantize_refused(capsys, "--quantize", "int8", "--save", tmp_path / "file")


@pytest.mark.parametrize(
    "saved", [pytest.param(False, marks=pytest.mark.slow), True], ids=["loading", "saved"]
)
def test_quantize_goes_with_every_mode(saved, tmp_path, quantize_file, capsys, monkeypatch):
    """--n, --batch, --bench-serving, --kv-dtype, --attention flash, --interactive, --bench, with
    --quantize and with a saved folder."""
    how = ["--quantize", "int4"]
    if saved:
        quantize_main(capsys, "--quantize", "int4", "--save", tmp_path / "out")
        how = ["--checkpoint", tmp_path / "out"]
    ask = ["class Stack:", "--max-new-tokens", "6", "--temperature", "0", "--json"]
    one = json.loads(quantize_main(capsys, *how, *ask))
    flash = json.loads(quantize_main(capsys, *how, *ask, "--attention", "flash", "--dtype", "fp32"))
    plain = json.loads(quantize_main(capsys, *how, *ask, "--dtype", "fp32"))
    assert flash["tokens"] == plain["tokens"] and len(one["tokens"]) == 6
    assert quantize_main(capsys, *how, *ask[:-1], "--n", "2").strip()
    requests = tmp_path / "in.jsonl"
    requests.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("def f(", "class A:")))
    for i, more in enumerate(([], ["--kv-dtype", "int8"])):
        out = tmp_path / f"{i}.jsonl"
        batch = ["--batch", requests, "--out", out, "--max-new-tokens", "5", "--temperature", "0"]
        quantize_main(capsys, *how, *batch, *more)
        assert len(out.read_text().splitlines()) == 2 and "error" not in out.read_text()
    serving = ["--bench-serving", "3", "--input-tokens", "4:6", "--output-tokens", "3:4"]
    assert quantize_main(capsys, *how, *serving).strip()
    quantize_main(capsys, *how, "x = 1", "--bench", "1", "--max-new-tokens", "4")
    score = json.loads(quantize_main(capsys, *how, "--score", quantize_file, "--json"))
    assert math.isfinite(score["perplexity"])


@pytest.mark.skipif(not has_compiler(), reason="torch.compile on CPU needs a C++ compiler")
@pytest.mark.parametrize("scheme", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_quantize_goes_with_compile(scheme, capsys):
    """--compile --quantize: the tokens of the eager run, in fp32."""
    torch.compiler.reset()
    ask = ["import os", "--max-new-tokens", "6", "--temperature", "0", "--json", "--dtype", "fp32"]
    how = ["--quantize", scheme]
    want = json.loads(quantize_main(capsys, *how, *ask))["tokens"]
    got = json.loads(quantize_main(capsys, *how, *ask, "--compile"))["tokens"]
    assert got == want


def test_quantize_skip_flag_keeps_layers(tmp_path, capsys):
    """--quantize-skip NAME,NAME: the saved folder holds those layers in bf16 and opens."""
    out = tmp_path / "out"
    quantize_main(capsys, "--quantize", "int8", "--quantize-skip", "layers.0,o_proj", "--save", out)
    tensors = load_file(out / "model.safetensors")
    assert "model.layers.0.mlp.up_proj.weight" in tensors
    assert tensors["model.layers.3.self_attn.o_proj.weight"].dtype == torch.bfloat16
    assert tensors["model.layers.3.self_attn.q_proj.qweight"].dtype == torch.int8
    assert quantize_main(capsys, "--checkpoint", out, "def", "--max-new-tokens", "3").strip()


# --------------------------------------------------------------------------------------------------
# quantize.py: FP8 and training
# --------------------------------------------------------------------------------------------------

fp8_formats = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
each_recipe = pytest.mark.parametrize("recipe", Q.RECIPES)


def fp8_tiny(**changes) -> M.ModelConfig:
    return tiny(**dict(n_layers=2, ffn_dim=96) | changes)


def fp8_latent(**changes) -> M.ModelConfig:
    moe = dict(moe_layers=(1,), n_experts_per_token=2, expert_ffn_dim=32, n_layers=2, ffn_dim=96)
    return latent(**moe | changes)


def fp8_made(config: M.ModelConfig, seed: int = 0) -> M.Transformer:
    with torch.device("meta"):
        model = M.Transformer(config)
    M.allocate(model, "cpu", torch.float32)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def fp8_apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return relative(a.double(), b.double())


def fp8_exact(x: torch.Tensor, granularity: str, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """What is left of x, in fp64, written out tile by tile."""
    rows, columns = {"tensorwise": (10**9,) * 2, "rowwise": (1, 10**9)}.get(
        granularity, (1, 128) if granularity == "1x128" else (128, 128)
    )
    out = torch.zeros(x.shape, dtype=torch.float64)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            tile = x[i : i + rows, j : j + columns].float()
            scale = tile.abs().max() / torch.finfo(dtype).max
            scale = scale if scale > 0 else torch.tensor(1.0)
            q = Q.round_fp8(tile / scale, dtype, saturate=True)
            out[i : i + rows, j : j + columns] = q.double() * scale.double()
    return out


# ---- FP8 ----


def fp8_same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    nan = ours.isnan()
    numbers = torch.equal(ours[~nan], theirs[~nan])
    signs = torch.equal(ours[~nan].signbit(), theirs[~nan].signbit())
    return torch.equal(nan, theirs.isnan()) and numbers and signs


@fp8_formats
def test_fp8_rounding_is_torchs_cast_to_the_bit(dtype):
    """All fp16 values, random fp32 of every magnitude, every number of the format, every tie
    between two of them and its neighbours: the values and signs of torch's cast. Past the range
    torch before 2.13 gives NaN for e4m3, later ones 448: the flag follows."""
    saturate = dtype == E4M3 and bool(torch.tensor(1e4).to(dtype).float().isfinite())
    half = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    bits = torch.randint(
        -(2**31), 2**31 - 1, (200_000,), generator=torch.Generator().manual_seed(0)
    )
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    grid = codes[codes.isfinite()].unique()
    ties = (grid[1:] + grid[:-1]) / 2
    for x in (
        half,
        half.bfloat16(),
        bits.to(torch.int32).view(torch.float32),
        quantize_normal(100_000) * 300,
        torch.cat((codes, ties, ties.nextafter(grid[1:]), ties.nextafter(grid[:-1]))),
    ):
        assert fp8_same_bits(Q.round_fp8(x, dtype, saturate), x.to(dtype).float())


def test_fp8_rounding_past_the_range():
    """The paper's rules: past 464, the tie above 448, e4m3 has NaN, past 61440 e5m2 infinity;
    saturated, both have their largest number; NaN stays."""
    x = torch.tensor([464.0, 464.1, -1e9, math.inf, math.nan])
    assert str(Q.round_fp8(x, E4M3).tolist()) == "[448.0, nan, nan, nan, nan]"
    assert str(Q.round_fp8(x, E4M3, True).tolist()) == "[448.0, 448.0, -448.0, 448.0, nan]"
    y = torch.tensor([61439.0, 61440.0, -math.inf, math.nan])
    assert str(Q.round_fp8(y, E5M2).tolist()) == "[57344.0, inf, -inf, nan]"
    assert str(Q.round_fp8(y, E5M2, True).tolist()) == "[57344.0, 57344.0, -57344.0, nan]"


@fp8_formats
@pytest.mark.parametrize("granularity", Q.GRANULARITIES)
def test_fp8_scales(granularity, dtype):
    """A tile's largest value takes the format's largest code; edges are tiles of their own; codes
    times scales are the tile-by-tile reference, also of a transpose; no value moves by more than
    half a step; zeros have scale 1."""
    x = quantize_normal(150, 200) * quantize_normal(150, 1, seed=1).exp()
    x[3], x[128:, :128] = 0, 0
    for x in (x, x.t(), x.bfloat16()):
        codes, scale = Q.to_fp8(x, granularity, dtype)
        M_, K = x.shape
        rows, columns = -(-M_ // 128), -(-K // 128)
        shapes = dict(tensorwise=(1, 1), rowwise=(M_, 1))
        shapes |= {"1x128": (M_, columns), "128x128": (rows, columns)}
        assert scale.shape == shapes[granularity] and scale.dtype == torch.float32
        assert codes.shape == x.shape and codes.dtype == dtype and codes.is_contiguous()
        back = Q.from_fp8(codes, scale)
        assert torch.allclose(back.double(), fp8_exact(x, granularity, dtype), rtol=1e-6, atol=0)
        assert back.abs().max() == pytest.approx(x.abs().max().item(), rel=1e-6)
        spread = Q._over_tiles(scale, x.shape).expand(x.shape)
        limits = torch.finfo(dtype)
        half = (x.float().abs() * limits.eps / 2).maximum(
            spread * limits.smallest_normal * limits.eps / 2
        )
        assert ((back - x.float()).abs() <= half * 1.0001).all()
    assert (Q.fp8_scale(torch.zeros(3, 5), granularity) == 1).all()
    assert not Q.from_fp8(*Q.to_fp8(torch.full((2, 3), 1e-44), granularity)).isnan().any()
    for bad in (math.nan, math.inf):
        assert not Q.from_fp8(*Q.to_fp8(torch.tensor([[1.0, bad]]), granularity)).isfinite().all()


@pytest.mark.parametrize(
    "shape", [(1, 16, 16), (5, 48, 32), (3, 130, 129), (64, 200, 300)], ids=str
)
@pytest.mark.parametrize("scheme", [("rowwise",) * 2, ("1x128", "128x128"), ("tensorwise",) * 2])
def test_fp8_linear_is_the_product_of_its_operands(shape, scheme):
    """fp8_linear == fp64's product of the dequantized operands, and so is what tensor cores are
    asked for, scaled_products (here torch's own CPU version of that product)."""
    rows, N, K = shape
    x, weight, bias = (
        quantize_normal(2, rows, K),
        quantize_normal(N, K, seed=1),
        quantize_normal(N, seed=2),
    )
    qweight, scale = Q.to_fp8(weight, scheme[1])
    of_x = "rowwise" if scheme[0] == "tensorwise" else scheme[0]
    truth = fp8_exact(x.flatten(0, 1), of_x) @ fp8_exact(weight, scheme[1]).t() + bias
    y = Q.fp8_linear(x, qweight, scale, None, bias)
    assert y.shape == (2, rows, N) and fp8_apart(y.flatten(0, 1), truth) < 1e-6
    half = Q.fp8_linear(x.bfloat16(), qweight, scale, None, None)
    assert half.dtype == torch.bfloat16 and fp8_apart(half, y - bias) < 6e-2
    a, scale_a = Q.to_fp8(x.flatten(0, 1), scheme[0])
    cores = Q.scaled_products((a, scale_a), (qweight, scale), torch.float32)
    in_rows = scheme[0] == "rowwise" or scheme[0] == "1x128" and K <= 128
    tolerance = 4e-3 if in_rows else 1e-6  # with a scale per row it comes out in bf16
    assert fp8_apart(cores, Q.from_fp8(a, scale_a) @ Q.from_fp8(qweight, scale).t()) < tolerance


def test_fp8_smaller_tiles_stand_outliers_better():
    """One column of outliers costs a tensor's scale most, a row's less, a tile's least, in the
    values below it; DeepSeek-V3's claim, on the product too."""
    x, w = quantize_normal(256, 1024), quantize_normal(256, 1024, seed=1) / 32
    x[::64, 7] = 3e5  # with one scale per tensor the rest is subnormal
    inliers = torch.ones_like(x, dtype=torch.bool).index_fill_(1, torch.tensor([7]), False)
    errors = {
        g: fp8_apart(Q.from_fp8(*Q.to_fp8(x, g))[inliers], x[inliers])
        for g in ("tensorwise", "rowwise", "1x128")
    }
    assert 1.5 * errors["1x128"] < errors["rowwise"] < errors["tensorwise"] / 5, errors
    ours = {r: Q.float8_linear(x, w, recipe=r) for r in Q.RECIPES}
    clean = [i for i in range(256) if i % 64]
    truth = x.double() @ w.double().t()
    products = {r: fp8_apart(y[clean], truth[clean]) for r, y in ours.items()}
    assert products["rowwise"] < 0.05 < products["tensorwise"], products
    assert products["blockwise"] < 0.05


@each_recipe
@pytest.mark.parametrize("tokens", [(3, 50), (1,), (), (128,), (2, 3, 7), (0,)], ids=str)
def test_fp8_training_product_and_its_gradients(recipe, tokens):
    """Output and every gradient == fp64 of the operands rounded along the dimension each product
    sums over; any leading shape, dW in fp32."""
    layer = nn.Sequential(nn.Linear(200, 72))
    plain = copy.deepcopy(layer)
    Q.fp8_training_(layer, recipe)
    x, g = quantize_normal(*tokens, 200).requires_grad_(), quantize_normal(*tokens, 72, seed=3)
    y = layer(x)
    y.backward(g)
    W, of_x, of_w = plain[0].weight.detach(), *Q.RECIPES[recipe]
    flat, gs = x.detach().reshape(-1, 200), g.reshape(-1, 72)
    truth = fp8_exact(flat, of_x) @ fp8_exact(W, of_w).t() + plain[0].bias.double()
    dx = fp8_exact(gs, of_x, E5M2) @ fp8_exact(W.t(), of_w).t()
    dw = fp8_exact(gs.t(), of_x, E5M2) @ fp8_exact(flat.t(), of_x).t()
    assert y.shape == (*tokens, 72) and layer[0].weight.grad.dtype == torch.float32
    if flat.numel():
        assert fp8_apart(y.reshape(-1, 72), truth) < 1e-6
        assert fp8_apart(x.grad.reshape(-1, 200), dx) < 1e-6
        assert fp8_apart(layer[0].weight.grad, dw) < 1e-6
        assert fp8_apart(layer[0].bias.grad, gs.sum(0)) < 1e-5
        wanted = torch.autograd.grad(plain(x), [x, *plain.parameters()], g)
        got = [x.grad, *(p.grad for p in layer.parameters())]
        assert all(fp8_apart(a, b) < 0.1 for a, b in zip(got, wanted))
        assert fp8_apart(got[0], wanted[0]) > 1e-3  # it did round


def fp8_layer(recipe: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layer = Q.fp8_training_(nn.Sequential(nn.Linear(200, 72)), recipe)
    x = quantize_normal(3, 50, 200).requires_grad_()
    return layer, x, quantize_normal(3, 50, 72, seed=3)


@each_recipe
def test_fp8_training_product_under_autocast(recipe):
    """The input is bf16 and so is the output, the product's sums are not. e4m3 gradients are nearer
    than e5m2's."""
    layer, x, g = fp8_layer(recipe)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    of_x, of_w = Q.RECIPES[recipe]
    weight, bias = (p.detach() for p in layer.parameters())
    rows = x.detach().bfloat16().flatten(0, 1)
    truth = fp8_exact(rows, of_x) @ fp8_exact(weight, of_w).t() + bias
    assert fp8_apart(y.flatten(0, 1), truth) < 4e-3
    wrt = [x, *layer.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        grads = torch.autograd.grad(y, wrt, g.bfloat16())
    assert all(grad.dtype == torch.float32 for grad in grads)
    columns = g.bfloat16().flatten(0, 1).t()
    dw = fp8_exact(columns, of_x, E5M2) @ fp8_exact(rows.t(), of_x).t()
    assert fp8_apart(grads[1], dw) < 1e-6
    coarse = torch.autograd.grad(layer(x), wrt, g)
    layer[0].grad_dtype = E4M3
    exact = torch.autograd.grad(F.linear(x, *layer.parameters()), wrt, g)
    for a, b, c in zip(torch.autograd.grad(layer(x), wrt, g)[:2], coarse, exact):
        assert fp8_apart(a, c) < fp8_apart(b, c)


@pytest.mark.skipif(not has_compiler(), reason="torch.compile on CPU needs a C++ compiler")
@quantize_some("recipe", ["blockwise"], Q.RECIPES)
def test_fp8_training_product_compiled(recipe):
    """Compiled without a graph break it gives the same numbers, forward and backward."""
    layer, x, g = fp8_layer(recipe)
    wrt = [x, *layer.parameters()]
    eager = [layer(x), *torch.autograd.grad(layer(x), wrt, g)]
    z = torch.compile(layer, fullgraph=True)(x)
    for a, b in zip([z, *torch.autograd.grad(z, wrt, g)], eager):
        assert fp8_apart(a, b) < 1e-4


def test_fp8_and_qat_swap_and_what_stays():
    """Linear layers and experts change class over the very same parameters; head, embedding, norms,
    router and what skip names stay; a tied head stays in any case; unknown recipes are named."""
    for swap in (
        lambda m, **k: Q.fp8_training_(m, "rowwise", **k),
        lambda m, **k: Q.qat_(m, G8, **k),
    ):
        G8 = Q.Grid(8)
        model = fp8_made(fp8_latent())
        before = dict(model.named_parameters())
        swap(model, skip=("head", "layers.0", "kv_b_proj"))
        after = dict(model.named_parameters())
        assert list(before) == list(after) and all(before[n] is after[n] for n in before)
        kinds = {n: type(m) for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        stays = [n for n, kind in kinds.items() if kind is nn.Linear]
        assert {n for n in kinds if "layers.0" in n or "kv_b" in n or n == "head"} == set(stays)
        assert all(m.experts is not M.loop_experts for m in model.modules() if isinstance(m, M.MoE))
        assert not copy.deepcopy(model).training ^ model.training
        untouched = swap(fp8_made(fp8_tiny()), skip=("proj", "layer", "0.mlp.down"))
        assert not [n for n, m in untouched.layers.named_modules() if type(m) is nn.Linear]
        tied = swap(fp8_made(fp8_tiny(tie_embeddings=True)), skip=())
        assert type(tied.head) is nn.Linear and type(tied.layers[0].mlp.up_proj) is not nn.Linear
        assert type(swap(fp8_made(fp8_tiny()), skip=()).head) is not nn.Linear
    assert type(Q.fp8_training_(fp8_made(fp8_tiny()), "rowwise").head) is nn.Linear
    with pytest.raises(ValueError, match="recipe 'colwise'.*tensorwise, rowwise, blockwise"):
        Q.fp8_training_(fp8_made(fp8_tiny()), "colwise")
    with pytest.raises(ValueError, match="grad_dtype"):
        Q.fp8_training_(fp8_made(fp8_tiny()), "rowwise", grad_dtype=torch.float16)
    with pytest.raises(ValueError, match="granularity '1x64'.*1x128"):
        Q.to_fp8(quantize_normal(2, 3), "1x64")


@each_recipe
def test_fp8_experts(recipe):
    """A mixture's experts multiply in FP8: nearly the plain output and gradients, not quite."""
    model = fp8_made(fp8_latent())
    moe = next(m for m in model.modules() if isinstance(m, M.MoE))
    x = quantize_normal(2, 40, 64)
    wanted = moe(x)
    wanted.sum().backward()
    grads = [moe.w_gate_up.grad, moe.w_down.grad, moe.router.grad]
    moe.zero_grad()
    Q.fp8_training_(model, recipe)
    moe.shared = moe.shared and None
    got = moe.experts(x.flatten(0, 1), *moe.route(x.flatten(0, 1)), moe.w_gate_up, moe.w_down)
    plain = M.loop_experts(x.flatten(0, 1), *moe.route(x.flatten(0, 1)), moe.w_gate_up, moe.w_down)
    assert 1e-3 < fp8_apart(got, plain) < 0.1
    moe.zero_grad()
    got.sum().backward()
    for p, g in zip((moe.w_gate_up, moe.w_down, moe.router), grads):
        assert p.grad.shape == p.shape and fp8_apart(p.grad, g) < 0.6


# ---- training ----


@pytest.fixture(scope="module")
def fp8_text() -> torch.Tensor:
    """Bytes of the standard library, one token each."""
    names = ("argparse.py", "ast.py", "typing.py", "inspect.py", "tarfile.py")
    kept = "".join(text for name, text in T.read_documents(None) if name in names)
    return torch.tensor(list(kept.encode("ascii", "ignore")), dtype=torch.int32)


FP8_BYTES = fp8_tiny(
    vocab_size=128, dim=144, n_layers=1, n_heads=3, n_kv_heads=3, head_dim=48, ffn_dim=288
)


def fp8_trained(text, steps: int, change=lambda model: model) -> tuple[float, float]:
    """Mean loss of the last 20 steps, and validation loss, after train.py's own steps."""
    model = fp8_made(FP8_BYTES)
    change(model)
    optimizer, place = T.build_optimizer(model), T.Place(torch.device("cpu"), "bf16", 0, 1)
    losses = []
    for step in range(steps):
        batch = T.batch_of(text[:-10_000], 0, step, range(4), 4, 64)
        losses.append(T.accumulate(model, batch, 4, place.autocast)["loss"])
        T.update(model, optimizer, T.learning_rate(step, steps, 1e-3))
    return sum(losses[-20:]) / 20, T.validate(model, text[-4097:], 64, 16, place)


@pytest.fixture(scope="module")
def fp8_in_bf16(fp8_text) -> Callable[[int], tuple[float, float]]:
    return lru_cache(lambda steps: fp8_trained(fp8_text, steps))


@quantize_some("recipe,steps", [("rowwise", 60)], Q.RECIPES, [200])
def test_fp8_training_follows_bf16(recipe, steps, fp8_text, fp8_in_bf16):
    """Steps with every linear layer in FP8, of widths that no tile divides: training and validation
    loss within 1% of bf16's, and not the same."""
    loss, val = fp8_trained(fp8_text, steps, lambda model: Q.fp8_training_(model, recipe))
    want, want_val = fp8_in_bf16(steps)
    assert want < (2.6 if steps == 200 else 3.3) and loss != want
    assert abs(loss / want - 1) < 0.01 and abs(val / want_val - 1) < 0.01


QAT_GRIDS = {
    "int8": Q.Grid(8),
    "int4": Q.Grid(4, 32, False),
    "tensor": Q.Grid(4, 0),
    "row": Q.Grid(3),
}


@pytest.mark.parametrize("grid", QAT_GRIDS.values(), ids=QAT_GRIDS)
def test_qat_rounding_goes_straight_through(grid):
    """The forward has exactly the grid's values, the gradient passes as if there were no rounding,
    but for what the range clamps; stacks of experts row by row alike."""
    w = quantize_normal(24, 64).requires_grad_()
    q = Q.fake_quantize(w, grid)
    scales, zeros = grid.find(w.detach())
    assert torch.equal(q, grid.decode(grid.encode(w.detach(), scales, zeros), scales, zeros))
    g = quantize_normal(24, 64, seed=1)
    assert torch.equal(torch.autograd.grad(q, w, g)[0], g)
    assert torch.equal(Q.fake_quantize(w.view(2, 12, 64), grid).view(24, 64), q)
    assert Q.fake_quantize(w.bfloat16(), grid).dtype == torch.bfloat16

    class Narrow(Q.Grid):  # clamps whatever is beyond half the range
        def find(self, w, ranges="minmax"):
            scales, zeros = super().find(w)
            return scales / 2, zeros

    narrow = Narrow(grid.bits, grid.group_size, grid.symmetric)
    got = torch.autograd.grad(Q.fake_quantize(w, narrow), w, g)[0]
    scales, zeros = narrow.find(w.detach())
    codes = w.detach() / quantize_wide(scales, w.shape)
    codes += 0 if zeros is None else quantize_wide(zeros, w.shape)
    low, high = (-(2 ** (grid.bits - 1)) + 1, 2 ** (grid.bits - 1) - 1)
    low, high = (low, high) if grid.symmetric else (0, 2**grid.bits - 1)
    inside = (codes > low - 0.99) & (codes < high + 0.99)
    outside = (codes < low - 1.01) | (codes > high + 1.01)
    assert outside.any() and torch.equal(got[inside], g[inside]) and (got[outside] == 0).all()


def qat_rounded(model: M.Transformer, grid: Q.Grid) -> M.Transformer:
    """Post-training rounding of what qat_ would round."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in Q.replaceable(model).items():
            for w in Q.weights_of(name, module).values():
                w.copy_(Q.fake_quantize(w, grid))
    return model


def qat_trained(change=lambda model: model) -> tuple[M.Transformer, Callable]:
    """The shipped draft model after 25 steps on the text it was made from, and how to score one."""
    import sentencepiece

    folder = DRAFT
    sp = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    docs = T.read_documents(None)
    kept, held = ([d for d in docs if T.held_out(d[0]) is out] for out in (False, True))
    tokens, val = (
        torch.tensor([i for _, text in some for i in sp.encode(text)], dtype=torch.int32)
        for some in (kept[:60], held[:6])
    )
    model = M.load_checkpoint(folder, dtype=torch.float32).train()
    change(model)
    optimizer, place = T.build_optimizer(model), T.Place(torch.device("cpu"), "fp32", 0, 1)
    for step in range(25):
        T.accumulate(model, T.batch_of(tokens, 0, step, range(4), 4, 64), 4)
        T.update(model, optimizer, 3e-4 * (1 - step / 25) * min(1, (step + 1) / 5))
    return model, lambda model: T.validate(model, val[:2049], 64, 16, place)


@pytest.fixture(scope="module")
def qat_plain() -> tuple[M.Transformer, Callable]:
    return qat_trained()


@pytest.mark.parametrize("bits", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_qat_beats_rounding_afterwards(bits, qat_plain):
    """25 steps more on the shipped draft model: the run that rounds its weights in the forward
    loses less by quantization, and what it validates with is what quantization gives."""
    grid, (model, score) = Q.Grid(bits, 32, symmetric=False), qat_plain
    aware, _ = qat_trained(lambda model: Q.qat_(model, grid))
    whole, after, seen = score(model), score(qat_rounded(model, grid)), score(aware)
    assert score(qat_rounded(qat_unswapped(aware), grid)) == seen < whole + 0.8 * (after - whole)


def qat_unswapped(model: M.Transformer) -> M.Transformer:
    plain = fp8_made(model.config)
    plain.load_state_dict(model.state_dict())
    plain.tie()
    return plain


def test_qat_of_experts_and_bad_groups():
    """The stacks of a mixture are rounded in the forward and get gradients; a group that does not
    divide names the layer."""
    grid, model = (
        Q.Grid(4, 16, False),
        fp8_made(fp8_latent(q_lora_rank=32, kv_lora_rank=32, v_head_dim=16)),
    )
    tokens = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(0))
    wanted = qat_rounded(model, grid)(tokens)
    Q.qat_(model, grid)
    got = model(tokens)
    assert torch.equal(got, wanted)
    got.square().sum().backward()
    moe = next(m for m in model.modules() if isinstance(m, M.MoE))
    assert moe.w_gate_up.grad.abs().sum() > 0 and moe.w_down.grad.abs().sum() > 0
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.down_proj: group_size 32 .* 80"):
        Q.qat_(fp8_made(fp8_tiny(dim=64, ffn_dim=80)), Q.Grid(4, 32, False))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.w_down: group_size 32 .* 40"):
        Q.qat_(
            fp8_made(fp8_latent(expert_ffn_dim=40, n_shared_experts=0, **FP8_WIDE)),
            Q.Grid(4, 32, False),
        )


FP8_WIDE = dict(ffn_dim=96, q_lora_rank=32, kv_lora_rank=32, v_head_dim=16)


# ---- train.py --fp8, --qat ----


@pytest.fixture(scope="module")
def fp8_folder(corpus, tmp_path_factory) -> Path:
    """A corpus and four configurations."""
    path = tmp_path_factory.mktemp("training")
    shutil.copy(corpus, path / "corpus.jsonl")
    small = dict(vocab_size=4096, dim=32, n_heads=2, n_kv_heads=1)
    (path / "dense.json").write_text(json.dumps(fp8_tiny(**small).to_hf()))
    (path / "one.json").write_text(json.dumps(fp8_tiny(**small, n_layers=1).to_hf()))
    (path / "odd.json").write_text(json.dumps(fp8_tiny(**small, ffn_dim=80).to_hf()))
    (path / "moe.json").write_text(json.dumps(fp8_latent(vocab_size=4096, **FP8_WIDE).to_hf()))
    return path


def fp8_go(fp8_folder: Path, out: Path, config: str, *more) -> int:
    argv = [
        "--data",
        fp8_folder / "corpus.jsonl",
        "--model",
        fp8_folder / f"{config}.json",
        "--out",
        out,
    ]
    argv += ["--batch-size", 4, "--seq-len", 24, "--steps", 6, "--save-every", 2, "--eval-every", 3]
    return T.main([str(a) for a in (*argv, "--device", "cpu", "--dtype", "bf16", *more)])


FP8_FLAGS = [("--fp8", "rowwise"), ("--fp8", "blockwise"), ("--qat", "int4")]


@quantize_some("config,flags", list(product(["dense"], FP8_FLAGS[1:])), ["dense", "moe"], FP8_FLAGS)
def test_fp8_run_resumes_and_exports(flags, config, fp8_folder, tmp_path, capsys, monkeypatch):
    """--fp8 and --qat are named in the summary and kept by --resume, whose losses and weights equal
    an uninterrupted run's to the last bit; the folder is the ordinary one, in bf16."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert fp8_go(fp8_folder, whole, config, *flags) == 0
    said = capsys.readouterr().err
    assert f"bf16, {flags[0][2:].upper()} {flags[1]} on cpu" in said
    monkeypatch.setattr(T, "any_rank", lambda caught, device: len(metrics(cut)) == 2)
    assert fp8_go(fp8_folder, cut, config, *flags) == 0 and len(metrics(cut)) == 3
    monkeypatch.undo()
    assert T.main(["--out", str(cut), "--resume", "--device", "cpu"]) == 0
    assert metrics(cut) == metrics(whole)
    a, b = (load_file(out / T.STATE) for out in (cut, whole))
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    model = M.load_checkpoint(whole)
    assert model.embed.weight.dtype == torch.bfloat16
    for name, p in model.named_parameters():
        assert torch.equal(p, b[f"weight.{name}"].bfloat16())
    plain = tmp_path / "plain"
    assert fp8_go(fp8_folder, plain, config) == 0
    assert metrics(plain)[-1]["loss"] != metrics(whole)[-1]["loss"]
    assert (
        load_file(plain / "model.safetensors").keys()
        == load_file(whole / "model.safetensors").keys()
    )


def test_fp8_flags_that_contradict(fp8_folder, tmp_path, capsys):
    """Both flags, another recipe under --resume (also of a run older than the flag), a group that
    does not divide: exit 2, and the flag named."""
    said = lambda words: words in capsys.readouterr().err
    out = tmp_path / "run"
    assert fp8_go(fp8_folder, out, "dense", "--fp8", "rowwise", "--qat", "int8") == 2
    assert said("--fp8 and --qat")
    assert fp8_go(fp8_folder, out, "odd", "--qat", "int4") == 2
    assert said("--qat int4, in groups of 32: layers.0.mlp.down_proj: group_size 32")
    assert fp8_go(fp8_folder, out, "dense", "--qat", "int8") == 0
    capsys.readouterr()
    assert T.main(["--out", str(out), "--resume", "--fp8", "rowwise"]) == 2
    assert said("--fp8 rowwise differs from the run's None")
    with safe_open(out / T.STATE, framework="pt") as f:
        about = f.metadata()
    run = {k: v for k, v in json.loads(about["run"]).items() if k not in ("fp8", "qat")}
    save_file(load_file(out / T.STATE), out / T.STATE, about | {"run": json.dumps(run)})
    assert T.main(["--out", str(out), "--resume", "--qat", "int4"]) == 2
    assert said("--qat int4 differs from the run's None")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--fp8", "blockwise"), ("--qat", "int4")])
def test_fp8_compiled_runs(flags, fp8_folder, tmp_path):
    """--compile with either gives the losses of the run without it."""
    for out, more in (("eager", ()), ("compiled", ("--compile",))):
        argv = [fp8_folder, tmp_path / out, "one", *flags, "--dtype", "fp32", *more]
        assert fp8_go(*argv) == 0
    for a, b in zip(metrics(tmp_path / "eager"), metrics(tmp_path / "compiled")):
        assert b["loss"] == pytest.approx(a["loss"], rel=2e-3)


# --------------------------------------------------------------------------------------------------
# compress.py: calibration of whole models, --save, --quantize-report; cpu.py's quantized products
# --------------------------------------------------------------------------------------------------


def compress_args(*argv):
    return G.parse_args([*map(str, argv)])


def compress_draws(sequences, length):
    """Calibration and held-out sequences of the standard library, (1, length) tokens each."""
    model, tokenizer = M.load_checkpoint(DRAFT), K.load_tokenizer(DRAFT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(W, "SEQUENCES", sequences)
        patch.setattr(W, "LENGTH", length)
        args = compress_args("--quantize-report")
        return [W.calibration_text(args, model, tokenizer, held) for held in (False, True)]


@pytest.fixture(scope="module")
def compress_texts():
    return compress_draws(8, 256)


def compress_loss(model, texts):
    with torch.no_grad():
        return W.against(model, model, texts)[0]


def test_compress_losses_on_the_shipped_model(compress_texts):
    """int8 and fp8 within 0.5 % of bf16's loss, int4 by GPTQ within 3 % and better than rounded."""
    texts, held = compress_texts
    plain = compress_loss(M.load_checkpoint(SMALL), held)
    losses = {}
    for scheme, method in (("int8", None), ("fp8", None), ("int4", None), ("int4", "gptq")):
        model = M.load_checkpoint(SMALL)
        if method is None:
            Q.quantize_(model, scheme)
        else:
            W.calibrate_(model, method, Q.scheme_of(scheme), (), texts)
        losses[scheme, method] = compress_loss(model, held) / plain - 1
    assert abs(losses["int8", None]) < 0.005 and abs(losses["fp8", None]) < 0.005, losses
    assert losses["int4", "gptq"] < 0.03 and losses["int4", "gptq"] < losses["int4", None], losses


def test_compress_gptq_is_never_worse_than_rounding_on_a_layer(compress_texts, monkeypatch):
    """Output error of every linear and every expert of a mixture, on what it really gets as input:
    GPTQ's at most rounding's, and lower on most."""
    seen = {}

    def by_gptq(scheme, stats, kept, name, weight):
        found = plain(scheme, stats, kept, name, weight)
        if name in stats and stats[name].count:
            grid, H = scheme.grid, stats[name].hessian
            error = lambda w: C.output_error(weight, w, H).item()
            seen[name] = error(grid.decode(*found)), error(C.nearest(grid, weight))
        return found

    plain = W.by_gptq
    monkeypatch.setattr(W, "by_gptq", by_gptq)
    model = M.load_checkpoint(MOE)
    W.calibrate_(model, "gptq", Q.scheme_of("int4", 8), ("kv_b_proj",), compress_texts[0][:4])
    assert all(ours <= rounded for ours, rounded in seen.values())
    assert sum(ours < 0.9 * rounded for ours, rounded in seen.values()) > 0.6 * len(seen)
    assert any(".w_down." in name for name in seen) and any("shared" in name for name in seen)
    assert not any("kv_b_proj" in name for name in seen)


@pytest.mark.parametrize(
    "bits, folder, draws",
    [
        (2, DRAFT, (8, 256)),
        pytest.param(2, SMALL, (16, 512), marks=pytest.mark.slow),
        pytest.param(3, SMALL, (16, 512), marks=pytest.mark.slow),
    ],
)
def test_compress_task_circuits_beat_random_and_magnitude(bits, folder, draws):
    """At 2 and 3 bits and an equal budget of 1 %, the loss with TaCQ's picks is the lowest."""
    texts, held = compress_draws(*draws)
    scheme = Q.SCHEMES[f"int{bits}"]
    model = M.load_checkpoint(folder).float()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(W, "KEPT", 0.01)
        tacq = {n: i for n, (i, _) in W.picks(model, scheme, (), texts).items()}
    weights = {n: m.weight.detach() for n, m in Q.replaceable(model).items()}
    rng = torch.Generator().manual_seed(0)
    noise = {n: torch.rand(w.shape, generator=rng) for n, w in weights.items()}
    losses = {}
    for name, chosen in (
        ("tacq", tacq),
        ("magnitude", C.circuit({n: w.abs() for n, w in weights.items()}, 0.01)),
        ("random", C.circuit(noise, 0.01)),
    ):
        quantized = Q.quantize_(M.load_checkpoint(folder).float(), scheme.name)
        for n, index in chosen.items():
            quantized.get_submodule(n).keep(index, weights[n].view(-1)[index])
        losses[name] = compress_loss(quantized, held)
    assert losses["tacq"] < min(losses["magnitude"], losses["random"]), losses


@pytest.mark.parametrize("folder", [SMALL, MOE], ids=["llama", "deepseek"])
@pytest.mark.parametrize("method", ["awq", "smoothquant"])
def test_compress_folds_leave_the_model_as_it_was(folder, method, compress_texts):
    """AWQ's and SmoothQuant's scales, folded into norms, routers, experts and linears in fp32, move
    the logits by no more than 1e-5 of them."""
    model, tokens = M.load_checkpoint(folder, dtype=torch.float32), compress_texts[0][:2]
    positions = torch.arange(tokens[0].shape[1])
    scheme = Q.scheme_of("int8-dynamic") if method == "smoothquant" else Q.scheme_of("int4", 8)
    with torch.no_grad():
        before, norms = model(tokens[0]), [p.clone() for p in model.parameters() if p.dim() == 1]
        rope = M.rope_cos_sin(model.config, positions)
        run = lambda block, x: block(x, rope, positions, M.causal_attention)
        states = [model.embed(t) for t in tokens]
        for _, block, replay in C.layer_by_layer(model.layers, states, run):
            W.fold_inputs_(block, method, scheme, replay)
        assert relative(model(tokens[0]), before) < 1e-5
    after = [p for p in model.parameters() if p.dim() == 1]
    assert sum(not torch.equal(a, b) for a, b in zip(norms, after)) > len(norms) // 2


def test_compress_smoothquant_helps_where_activations_have_outliers(compress_texts):
    """Outlier channels planted behind the norms: W8A8 loses less with SmoothQuant than without."""
    texts, held = compress_texts

    def planted():
        model = M.load_checkpoint(DRAFT, dtype=torch.float32)
        rng = torch.Generator().manual_seed(0)
        for block in model.layers:
            for norm, linears, _ in list(W.inputs_of(block))[:2]:
                s = torch.ones(len(norm.weight))
                s[torch.randperm(len(s), generator=rng)[:4]] = 1 / 60
                C.fold_(norm, linears, s)
        return model

    plain, scheme = planted(), Q.scheme_of("int8-dynamic")
    rounded, smooth = Q.quantize_(planted(), "int8-dynamic"), planted()
    W.calibrate_(smooth, "smoothquant", scheme, (), texts)
    with torch.no_grad():
        kl = [W.against(plain, model, held[:4])[1] for model in (rounded, smooth)]
    assert kl[1] < kl[0] / 3, kl


@pytest.mark.parametrize("scheme, method", [("int4", "gptq"), ("int2", "tacq"), ("int8", None)])
def test_compress_saved_folder_is_the_model_that_was_saved(scheme, method, tmp_path, monkeypatch):
    """--save, with and without calibration: the folder opens with the same logits, to the bit, and
    holds the tokenizer; saving into it again is refused."""
    monkeypatch.setattr(W, "SEQUENCES", 2)
    saved, out = {}, tmp_path / "out"
    plain = W.save
    monkeypatch.setattr(W, "save", lambda args, model: saved.update(m=model) or plain(args, model))
    calibrated = [] if method is None else ["--calibrate", method]
    argv = ["--checkpoint", str(DRAFT), "--quantize", scheme, *calibrated, "--save", str(out)]
    assert G.main(argv) == 0
    tokens = random_tokens(M.read_config(DRAFT / "config.json"), 1, 20)
    args = compress_args("--checkpoint", out)
    opened, _ = G.load(args, torch.device("cpu"))
    with torch.inference_mode():
        assert torch.equal(opened(tokens), saved["m"](tokens))
    assert (out / "tokenizer.model").read_bytes() == (DRAFT / "tokenizer.model").read_bytes()
    kept = [m for m in opened.modules() if getattr(m, "kept_index", None) is not None]
    assert bool(kept) == (method == "tacq")
    assert G.main(argv) == 2


@pytest.mark.parametrize(
    "argv, words",
    [
        ("--quantize int4 --calibrate gptq --calibration-text FILE", "fewer than one sequence"),
        ("--quantize int4 --calibrate smoothquant", "int8-dynamic"),
        ("--quantize fp8 --calibrate gptq", "int8 to int2"),
        ("--quantize int8 --calibrate tacq", "int4 to int2"),
        ("--quantize int4 --calibrate gptq --calibration-text nowhere.txt", "no such file"),
        ("--calibrate gptq", "--quantize"),
        ("--calibration-text FILE", "--calibrate"),
        ("--save FILE --quantize int8", "--save"),
        ("--quantize int4 --group-size 7", "--group-size"),
        ("--quantize int8 --group-size 64", "--group-size"),
        ("--quantize int5", "int8-dynamic"),
        ("--quantize int8 --quantize-skip nope", "nope"),
        ("--plot x.png", "--quantize-report"),
        ("--quantize-report --quantize int8", "--quantize"),
    ],
)
def test_compress_says_what_is_wrong(argv, words, tmp_path, capsys):
    """A user's mistake ends in one line that names the flag and the mend."""
    (tmp_path / "FILE").write_text("def f():\n    return 1\n" * 3)
    argv = argv.replace("FILE", str(tmp_path / "FILE")).split()
    assert G.main(["--checkpoint", str(DRAFT), *argv]) == 2
    line = capsys.readouterr().err.strip().splitlines()
    assert len(line) == 1 and words in line[0], line


@pytest.mark.slow
def test_compress_report(monkeypatch, capsys):
    """A row for each scheme: bytes fall, perplexity is of the loss, stars stand where
    bf16 was faster; what does not fit the shapes is left out and said."""
    some = [r for r in W.SCHEMES_REPORTED if r[0] in ("16 bit", "int8", "int4", "int4 gptq")]
    monkeypatch.setattr(W, "SCHEMES_REPORTED", tuple(some))
    monkeypatch.setattr(W, "SEQUENCES", 2)
    monkeypatch.setattr(W, "BATCHES", (1, 2))
    assert G.main(["--checkpoint", str(DRAFT), "--quantize-report", "--json"]) == 0
    rows = {r["scheme"]: r for r in json.loads(capsys.readouterr().out)}
    assert list(rows) == [r[0] for r in some]
    base = rows["16 bit"]
    assert base["kl"] == 0 and base["agreement"] == 1 and base["slower"] == []
    assert base["megabytes"] > rows["int8"]["megabytes"] > rows["int4"]["megabytes"]
    assert rows["int4"]["kl"] > rows["int4 gptq"]["kl"] > rows["int8"]["kl"] > 0
    for row in rows.values():
        assert math.isclose(row["perplexity"], math.exp(row["loss"]))
        for batch, speed in row["tokens_per_second"].items():
            slower = speed < base["tokens_per_second"][batch]
            assert slower == (int(batch) in row["slower"])
    assert G.main(["--checkpoint", str(MOE), "--quantize-report"]) == 0
    shown = capsys.readouterr()
    assert "int4 does not fit this model" in shown.err and "int8" in shown.out
    assert "* slower than 16 bit" in shown.out


@pytest.mark.parametrize("scheme, group_size", [("int8", None), ("int4", 32), ("int4", 256)])
@pytest.mark.parametrize("rows", [1, 2, 5, 9, 64, 65, 130])
def test_cpu_packed_linear_against_float64(scheme, group_size, rows):
    """Every path (one row, a few, many), rows of the weight that fill no tile, columns that fill no
    block, with bias: against float64 of the dequantized weights."""
    if cpu.kernel() is None:
        pytest.skip("no C compiler builds the kernel here")
    rng = torch.Generator().manual_seed(rows)
    for N, columns in ((64, 256), (7, 96), (13, 704), (50, 1024), (1, 32)):
        if columns % (group_size or 1):
            continue
        codes = Q.scheme_of(scheme, group_size).encode(
            torch.randn(N, columns, generator=rng) * 0.02
        )
        weight = Q.scheme_of(scheme, group_size).decode(*codes).double()
        x = torch.randn(rows, columns, generator=rng).bfloat16()
        for bias in (None, torch.randn(N, generator=rng).bfloat16()):
            with torch.inference_mode():
                y = cpu.packed_linear(x, *codes, bias, otherwise=None)
            exact = F.linear(x.double(), weight, None if bias is None else bias.double())
            assert y.dtype == torch.bfloat16 and relative(y.double(), exact) < 4e-3, (N, columns)


def test_cpu_packed_linear_with_outliers_in_x():
    """A column 1000 times the others costs these no accuracy: x is not cut to one scale."""
    if cpu.kernel() is None:
        pytest.skip("no C compiler builds the kernel here")
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(1, 256, generator=rng)
    x[0, 40] = 1000
    for scheme in ("int8", "int4"):
        codes = Q.SCHEMES[scheme].encode(torch.randn(64, 256, generator=rng))
        codes[0][:, 40 if scheme == "int8" else 20] = 0  # of int4 two columns a byte
        with torch.inference_mode():
            y = cpu.packed_linear(x.bfloat16(), *codes, None, otherwise=None).double()
        weight = Q.SCHEMES[scheme].decode(*codes)
        exact = x.bfloat16().double() @ weight.double().t()
        assert relative(y, exact) < 4e-3


def test_cpu_packed_linear_leaves_the_rest_to_its_stand_in():
    """Other dtypes, gradients and small groups go to `otherwise`, with all arguments."""
    codes, small = Q.SCHEMES["int4"].encode(torch.ones(8, 64)), Q.scheme_of("int4", 8)
    calls = []
    otherwise = lambda *args: calls.append(len(args))
    with torch.inference_mode():
        cpu.packed_linear(torch.ones(1, 64), *codes, None, otherwise)
        cpu.packed_linear(
            torch.ones(1, 64).bfloat16(), *small.encode(torch.ones(8, 64)), None, otherwise
        )
        cpu.packed_linear(torch.ones(0, 64).bfloat16(), *codes, None, otherwise)
    cpu.packed_linear(torch.ones(1, 64).bfloat16(), *codes, None, otherwise)  # grad mode is on
    assert calls == [5] * 4


def test_cpu_products_within_a_compiled_graph():
    """torch.compile calls both as they are: a graph of one bf16 and one int4 layer equals eager."""
    if cpu.kernel() is None:
        pytest.skip("no C compiler builds the kernel here")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.SiLU(), torch.nn.Linear(32, 8))
    Q.quantize_(model.bfloat16().requires_grad_(False), "int4", skip="2")
    Q.use_product_(model, partial(cpu.packed_linear, otherwise=None))
    cpu.swap_linear_(model)
    assert isinstance(model[2], cpu.CPULinear) and isinstance(model[0], Q.QuantizedLinear)
    x = torch.randn(1, 64).bfloat16()
    with torch.inference_mode():
        compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
        assert torch.equal(compiled(x), model(x))


# --------------------------------------------------------------------------------------------------
# paged_kv.py: blocks, attention, scheduling, the engine
# --------------------------------------------------------------------------------------------------

POISON = 96  # a token whose embedding is NaN, where a test says so
# logits off by so much, relative to theirs: measured 1.5% (4.2% with MLA, whose latent and rope
# dims share a scale), 5.1% (7.7%) and 0.5%
PAGED_SMALL = {None: 1e-5, "int8": 0.06, "fp8": 0.1, "bf16": 0.01}
PAGED_CONFIGS = {
    "gqa": tiny(),
    "window": tiny(windows=(5, None, 2)),
    "alibi": tiny(alibi=True),
    "alibi+window": tiny(alibi=True, windows=(None, 3, 9)),
    "expanded": latent(),
    "absorbed": latent(),
}


@pytest.fixture(autouse=True)
def paged_plain(monkeypatch):
    """The Engine's steps by plain torch: in the interpreter they would take minutes."""
    monkeypatch.setattr(P, "INTERPRET", False, raising=False)


class PagedProbe(M.Transformer):
    """A model that counts its tokens and may fail, at the call `fail_at` in layer `fail_in`."""

    def forward(self, tokens, positions=None, attend=M.causal_attention, return_hidden=False):
        self.calls.append(tokens.numel())
        self.grads |= torch.is_grad_enabled()
        if len(self.calls) == self.fail_at:

            def failing(spec, *states):
                if spec.index == self.fail_in:
                    raise self.failure
                return attend(spec, *states)

            if self.fail_in < 0:
                raise self.failure
            super().forward(tokens, positions, failing, return_hidden)
            raise self.failure
        return super().forward(tokens, positions, attend, return_hidden)


def paged_probe(model: M.Transformer) -> M.Transformer:
    model.__class__ = PagedProbe
    model.calls, model.grads, model.fail_at, model.fail_in = [], False, None, -1
    model.failure = RuntimeError("the model failed")
    return model


def paged_model(name: str = "gqa", poison: bool = False, seed: int = 0) -> M.Transformer:
    """A random model that probes; "absorbed" takes MLA's absorbed form at any length."""
    model = random_model(PAGED_CONFIGS[name], seed)
    if name == "absorbed":
        for layer in model.layers:
            for module in layer.modules():
                if hasattr(module, "absorb_up_to"):
                    module.absorb_up_to = 10**9
    model.head.weight.data[POISON] = 0  # so that no model says it by itself
    if poison:
        model.embed.weight.data[POISON] = math.nan
    return paged_probe(model)


def paged_plain_forward(model: M.Transformer, tokens: list[int]) -> torch.Tensor:
    """(T, V) logits without a cache, uncounted."""
    calls, fail_at = list(model.calls), model.fail_at
    model.fail_at = None
    with torch.no_grad():
        logits = model(torch.tensor([tokens]))[0]
    model.calls[:], model.fail_at = calls, fail_at
    return logits


def paged_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference over the largest value, or 1."""
    assert got.shape == want.shape, (got.shape, want.shape)
    assert torch.isfinite(got).all()
    return ((got.double() - want.double()).abs().max() / want.abs().max().clamp(min=1)).item()


def paged_greedy(model, prompts, counts, eos=(), rows=400) -> list[list[int]]:
    """Greedy tokens from the model's own KVCache, all rows one position at a time."""
    if len(prompts) > rows:
        first = paged_greedy(model, prompts[:rows], counts[:rows], eos)
        return first + paged_greedy(model, prompts[rows:], counts[rows:], eos)
    tokens = [list(p) for p in prompts]
    done, longest = [False] * len(prompts), max(len(p) + n for p, n in zip(prompts, counts))
    cache = M.KVCache(model.config, len(prompts), longest)
    with torch.no_grad():
        for t in range(longest - 1):
            new = torch.tensor([[row[t] if t < len(row) else 0] for row in tokens])
            attend = partial(cache.attend, limit=t + 1)
            best = M.Transformer.forward(model, new, torch.tensor([t]), attend)[:, 0].argmax(-1)
            for i, token in enumerate(best.tolist()):
                if len(tokens[i]) == t + 1 and not done[i]:
                    tokens[i].append(token)
                    n = len(tokens[i]) - len(prompts[i])
                    done[i] = n == counts[i] or token in eos
    return [row[len(p) :] for row, p in zip(tokens, prompts)]


def paged_prompt(length: int, seed: int, low: int = 3, high: int = 90) -> list[int]:
    r = random.Random(seed)
    return [r.randrange(low, high) for _ in range(length)]


def greedy(new: int = 8, /, **more) -> P.SamplingParams:
    return P.SamplingParams(**dict(temperature=0.0, max_new_tokens=new, ignore_eos=True) | more)


def paged_engine(model, **how) -> P.Engine:
    """An engine whose max_running is no more than its budget, which is what it allows."""
    most = min(64, how.get("max_batch_tokens", 64))
    return P.Engine(model, **dict(block_size=4, max_running=most) | how)


def paged_part(engine, kind):
    """The engine's own allocator or scheduler, by type: their names are nobody's business."""
    seen, todo = set(), [(engine, 0)]
    for x, depth in todo:
        if isinstance(x, kind):
            return x
        if depth < 3 and hasattr(x, "__dict__") and id(x) not in seen:
            seen.add(id(x))
            found = (v for v in vars(x).values() if not isinstance(v, torch.nn.Module))
            todo += [(v, depth + 1) for v in found]
    raise AssertionError(f"no {kind.__name__} in the engine")


def paged_tables(scheduler) -> list[list[int]]:
    return [s.table for s in (*scheduler.running, *scheduler.waiting)]


def paged_check(engine) -> None:
    """Every invariant, between steps."""
    scheduler = paged_part(engine, P.Scheduler)
    paged_part(engine, P.BlockAllocator).check(paged_tables(scheduler))


def paged_idle(engine, num_blocks: int) -> None:
    """Nothing is left of any request."""
    scheduler, allocator = (paged_part(engine, kind) for kind in (P.Scheduler, P.BlockAllocator))
    assert not scheduler.running and not scheduler.waiting
    assert engine.unfinished == 0 and engine.n_waiting == 0
    assert allocator.n_free == num_blocks and not any(allocator.refs)
    allocator.check([])


def paged_run(engine, check=paged_check, limit: int = 5000) -> list:
    """Step until all is done; the outputs that finished, in that order."""
    finished = []
    while engine.unfinished:
        finished += [o for o in engine.step() if o.finished and o not in finished]
        if check:
            check(engine)
        limit -= 1
        assert limit, "the engine does not come to an end"
    return finished


# --------------------------------------------------------------------------------------------------
# paged_attention: kernel and plain torch, against the definition
# --------------------------------------------------------------------------------------------------


def paged_naive(
    q, k, v, table, cu, lengths, *, scale=None, window=None, softcap=None, alibi_slopes=None,
    sinks=None, k_scale=None, v_scale=None, latent_dim=None,
):  # fmt: skip
    """The definition in float64, one query and one head at a time; o (N, Hq, Dv), lse (N, Hq)."""
    block_size, Hkv, D = k.shape[1:]
    N, Hq = q.shape[:2]
    Dv = latent_dim if v is None else v.shape[-1]
    o = torch.zeros(N, Hq, Dv, dtype=torch.float64)
    lse = torch.full((N, Hq), -INF, dtype=torch.float64)
    for r, length in enumerate(lengths.tolist()):
        first, last = cu[r].item(), cu[r + 1].item()
        slots = [(table[r, p // block_size].item(), p % block_size) for p in range(length)]
        for n in range(first, last):
            i = length - (last - n)
            seen = [p for p in range(i + 1) if window is None or i - p < window]
            blocks, offsets = (torch.tensor([slots[p][x] for p in seen]) for x in (0, 1))
            keys = k[blocks, offsets].double()
            if k_scale is not None:
                keys = keys * k_scale[blocks, offsets].double()[..., None]
            if v is None:
                values = keys[..., :latent_dim]
            else:
                values = v[blocks, offsets].double()
                if v_scale is not None:
                    values = values * v_scale[blocks, offsets].double()[..., None]
            for h in range(Hq):
                g = h // (Hq // Hkv)
                s = keys[:, g] @ q[n, h].double() * (D**-0.5 if scale is None else scale)
                if softcap is not None:
                    s = softcap * torch.tanh(s / softcap)
                if alibi_slopes is not None:
                    s = s - alibi_slopes[h].double() * (i - torch.tensor(seen))
                extra = s if sinks is None else torch.cat((s, sinks[h : h + 1].double()))
                lse[n, h] = extra.logsumexp(0)
                o[n, h] = (s - lse[n, h]).exp() @ values[:, g]
    return o, lse


def paged_draw(seed: int, small: bool = False) -> dict:
    r = random.Random(seed)

    def coin(odds=0.5):
        return r.random() < odds

    bs = r.choice((1, 3, 4, 16) if small else (1, 2, 3, 4, 16))
    edges = [0, 1, bs - 1, bs, bs + 1, 2 * bs, 2 * bs + 1, r.randint(0, 37)]
    lengths = [min(37, max(0, r.choice(edges))) for _ in range(r.randint(1, 4))]
    kind = r.choice(("decode", "prefill", "mixed", "mixed"))
    new = {
        "decode": lambda n: min(n, 1),
        "prefill": lambda n: n,
        "mixed": lambda n: min(n, r.choice((0, 1, 1, 3, 20))),
    }[kind]
    mla, kv = coin(0.3), r.choice((None, None, "int8", "fp8"))
    heads, kv_heads = r.choice(((1, 1), (2, 1), (2, 2), (4, 2), (6, 2), (3, 1), (5, 1)))
    return dict(
        seed=seed,
        bs=bs,
        lengths=lengths,
        new=[new(n) for n in lengths],
        heads=heads,
        kv_heads=1 if mla else kv_heads,
        D=24 if mla else r.choice((16, 16, 32, 24)),
        Dv=None if mla else r.choice((None, None, 16, 40)),
        latent=16 if mla else None,
        kv=kv,
        half=coin(0.2),
        shared=coin(0.4),
        strided=coin(0.2),
        scale=0.3 if coin(0.3) else None,
        window=r.choice((1, 2, bs, bs + 1, 9)) if coin(0.4) else None,
        softcap=3.0 if coin(0.3) else None,
        alibi=coin(0.3),
        sinks=coin(0.3),
        n_splits=r.choice((None, None, 1, 2, 5)),
    )


def paged_build(p: dict) -> tuple[tuple, dict]:
    """Arguments for a drawn case: a table over blocks in random order, some of them shared by two
    sequences; all that no query may see is NaN (or, in int8, has a NaN scale)."""
    rng = torch.Generator().manual_seed(p["seed"])
    r, bs = random.Random(p["seed"]), p["bs"]
    need = [-(-n // bs) for n in p["lengths"]]
    width, blocks = max(need) + r.choice((0, 0, 1, 3)), sum(need) + r.randint(1, 4)
    free = list(range(blocks))
    r.shuffle(free)
    junk = free.pop()
    rows: list[list[int]] = []
    for n in need:
        row = [free.pop() for _ in range(n)]
        if p["shared"] and rows:
            other = r.choice(rows)
            same = min(len(other), n)
            row[:same] = other[:same]
        rows.append(row)
    seen = torch.zeros(blocks, bs, dtype=torch.bool)
    for row, n in zip(rows, p["lengths"]):
        for x in range(n):
            seen[row[x // bs], x % bs] = True
    table = torch.tensor([row + [junk] * (width - len(row)) for row in rows], dtype=torch.int32)
    table = table.view(len(rows), width)

    def make(*shape):
        return torch.randn(shape, generator=rng)

    cu = torch.tensor([0, *accumulate(p["new"])], dtype=torch.int32)
    q = 1.5 * make(p["heads"], int(cu[-1]), p["D"]).transpose(0, 1)
    q = q if p["strided"] else q.contiguous()
    flags = {name: p[name] for name in ("scale", "window", "softcap")}
    stored = {}
    for name, dim in (("k", p["D"]), ("v", p["Dv"] or p["D"])):
        x, scales = make(blocks, bs, p["kv_heads"], dim), None
        if p["kv"] is not None:
            top, dtype = {"int8": (127, torch.int8), "fp8": (448, torch.float8_e4m3fn)}[p["kv"]]
            scales = x.abs().amax(-1) / top
            x = x / scales[..., None]
            x = (x.round() if p["kv"] == "int8" else x).to(dtype)
            scales[~seen] = math.nan
        elif p["half"]:
            x = x.half()
        if x.dtype == torch.float8_e4m3fn:
            x = torch.where(seen[..., None, None], x.float(), math.nan).to(x.dtype)
        elif x.is_floating_point():
            x[~seen] = math.nan
        stored[name], flags[f"{name}_scale"] = x, scales
    if p["latent"]:
        stored["v"], flags["v_scale"], flags["latent_dim"] = None, None, p["latent"]
    if p["alibi"]:
        flags["alibi_slopes"] = torch.rand(p["heads"], generator=rng) / 4
    if p["sinks"]:
        flags["sinks"] = make(p["heads"])
    q = q.half() if p["half"] else q
    lengths = torch.tensor(p["lengths"], dtype=torch.int32)
    return (q, stored["k"], stored["v"], table, cu, lengths), flags


def paged_same(attend, p: dict) -> None:
    args, flags = paged_build(p)
    want = paged_naive(*args, **flags)
    got = attend(*args, **flags, n_splits=p["n_splits"], return_lse=True)
    alone = attend(*args, **flags, n_splits=p["n_splits"])
    assert torch.allclose(alone, got[0], atol=1e-5) and alone.dtype == args[0].dtype, p
    tolerance = 3e-3 if p["half"] else 1e-5
    for name, a, b in zip(("o", "lse"), got, want):
        assert a.shape == b.shape, (name, a.shape, b.shape, p)
        if b.numel():
            assert torch.isfinite(a).all(), (name, p)
            off = (a.double() - b).abs().max().item()
            assert off <= tolerance * max(1.0, b.abs().max().item()), (name, off, p)


@pytest.mark.parametrize("seed", range(40))
def test_paged_reference_is_the_definition(seed):
    """Plain torch == the definition for any table, lengths at block edges, and every flag; what
    lies in unseen slots, NaN, is not felt."""
    paged_same(P.paged_attention_reference, paged_draw(seed))


@pytest.mark.parametrize("seed", range(26))
def test_paged_kernel_is_the_definition(seed, monkeypatch):
    """The kernel == the definition for decode, prefill and mixed batches, any flags and splits."""
    monkeypatch.undo()  # in the interpreter, where there is no GPU
    paged_same(P.paged_attention, paged_draw(1000 + seed, small=True))


@pytest.mark.parametrize("seed", range(8))
def test_paged_kernel_over_many_tiles(seed, monkeypatch):
    """Sequences of several tiles of keys and of queries: the kernel == the definition."""
    monkeypatch.undo()
    r, p = random.Random(seed), paged_draw(3000 + seed, small=True)
    p["bs"] = r.choice((4, 16, 32))
    p["lengths"] = [r.choice((64, 65, 127, 128, 129, 150, 200)) for _ in range(r.randint(1, 2))]
    p["new"] = [min(n, r.choice((1, 1, 17, 40))) for n in p["lengths"]]
    p["window"] = p["window"] and r.choice((1, 20, 64, 100))
    paged_same(P.paged_attention, p)


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "kernel"])
@pytest.mark.parametrize("seed", range(4))
def test_paged_unseen_slots_are_not_felt(seed, kernel, monkeypatch):
    """NaN behind a sequence's end and in blocks that are no one's changes nothing."""
    if kernel:
        monkeypatch.undo()
    p = paged_draw(2000 + seed, small=True) | dict(lengths=[9, 5, 2], bs=4, half=False)
    paged_same(P.paged_attention, p | dict(new=[(1, 1, 1), (9, 5, 2), (3, 0, 1), (1, 5, 2)][seed]))


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "kernel"])
def test_paged_attention_does_not_see_its_batch(kernel, monkeypatch):
    """A sequence's output is the same alone, among others, and in other blocks."""
    if kernel:
        monkeypatch.undo()
    p = paged_draw(5) | dict(bs=4, lengths=[9, 5, 8, 1], new=[1, 5, 3, 1], heads=4, kv_heads=2)
    p |= dict(D=16, Dv=None, latent=None, kv=None, half=False, shared=False, n_splits=2, window=6)
    (q, k, v, table, cu, lengths), flags = paged_build(p)
    k, v = k.nan_to_num(9.0), v.nan_to_num(9.0)
    whole = P.paged_attention(q, k, v, table, cu, lengths, **flags)
    for r in range(4):
        rows = slice(int(cu[r]), int(cu[r + 1]))
        one = torch.tensor([0, p["new"][r]], dtype=torch.int32)
        alone = P.paged_attention(q[rows], k, v, table[r : r + 1], one, lengths[r : r + 1], **flags)
        torch.testing.assert_close(alone, whole[rows], rtol=1e-6, atol=1e-6)
    moved = torch.randperm(len(k), generator=torch.Generator().manual_seed(0))
    back = torch.empty_like(k), torch.empty_like(v)
    for new, old in zip(back, (k, v)):
        new[moved] = old
    again = P.paged_attention(q, *back, moved[table.long()].int(), cu, lengths, **flags)
    torch.testing.assert_close(again, whole, rtol=1e-6, atol=1e-6)


# --------------------------------------------------------------------------------------------------
# PagedKVCache: paged == contiguous
# --------------------------------------------------------------------------------------------------


def paged_step(model, cache, chunks) -> list[torch.Tensor]:
    """One model call over the chunks; (n, V) logits of each."""
    step = cache.step(chunks)
    with torch.no_grad():
        logits = model(step.tokens[None], step.positions[None], partial(cache.attend, step=step))[0]
    cu = torch.as_tensor(step.cu_seqlens).tolist()
    assert [b - a for a, b in zip(cu, cu[1:])][: len(chunks)] == [len(c.tokens) for c in chunks]
    return [logits[a:b] for a, b in zip(cu, cu[1:])][: len(chunks)]


def paged_spoil(model, cache, num_blocks: int, block_size: int) -> None:
    """Other tokens' keys and values in every slot of every block."""
    tokens = paged_prompt(num_blocks * block_size, 77)
    paged_step(model, cache, [P.Chunk(tokens, 0, list(range(num_blocks)))])


def paged_interleave(model, cache, sequences, tables, seed, sizes=(1, 1, 2, 3, 5, 9)):
    """Run the sequences in random chunks, in random company; logits of each, whole."""
    r, done = random.Random(seed), [0] * len(sequences)
    logits = [[] for _ in sequences]
    while any(n < len(s) for n, s in zip(done, sequences)):
        chunks, rows = [], []
        for i in r.sample(range(len(sequences)), len(sequences)):
            n = min(r.choice(sizes), len(sequences[i]) - done[i])
            if n and r.random() < 0.7:
                new = sequences[i][done[i] : done[i] + n]
                chunks.append(P.Chunk(new, done[i], tables[i]))
                rows.append(i)
        if chunks:
            for i, found in zip(rows, paged_step(model, cache, chunks)):
                logits[i].append(found)
                done[i] += len(found)
    return [torch.cat(parts) for parts in logits]


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("name", PAGED_CONFIGS)
def test_paged_equals_contiguous(name, block_size):
    """Logits over random tables, chunks and company == the full forward, 1e-5, in fp32, in
    blocks that had other tenants."""
    model = paged_model(name)
    lengths = [1, block_size, block_size + 1, max(1, block_size - 1), 37]
    sequences = [paged_prompt(n, 10 + n + i) for i, n in enumerate(lengths)]
    need = [-(-n // block_size) for n in lengths]
    num_blocks = sum(need) + 2
    free = random.Random(block_size).sample(range(num_blocks), num_blocks)
    tables = [[free.pop() for _ in range(n)] for n in need]
    cache = P.PagedKVCache(model.config, num_blocks, block_size)
    paged_spoil(model, cache, num_blocks, block_size)
    got = paged_interleave(model, cache, sequences, tables, seed=block_size)
    for tokens, logits in zip(sequences, got):
        assert paged_error(logits, paged_plain_forward(model, tokens)) <= 1e-5


@pytest.mark.parametrize("kv_dtype", [None, "int8", "fp8"])
@pytest.mark.parametrize("name", ["gqa", "expanded", "absorbed"])
def test_paged_blocks_shared_copied_and_moved(name, kv_dtype):
    """Two sequences on one prefix, a fork after its copy, and one swapped to the host and back into
    other blocks, from any token on: each == the full forward, and moving changes no bit."""
    model, bs = paged_model(name), 4
    cache = P.PagedKVCache(model.config, 24, bs, kv_dtype=kv_dtype)
    paged_spoil(model, cache, 24, bs)
    prefix, tails = paged_prompt(10, 1), [paged_prompt(7, 2), paged_prompt(9, 3)]
    step = partial(paged_step, model, cache)
    step([P.Chunk(prefix, 0, [7, 3, 9])])  # 10 tokens: the third block is half full
    cache.copy([(9, 0), (9, 20)])
    a, b, c = [7, 3, 9, 12, 1], [7, 3, 0, 11, 2], [7, 3, 20]
    found = step([P.Chunk(tails[0], 10, a), P.Chunk(tails[1], 10, b)])
    for tail, logits in zip(tails, found):
        want = paged_plain_forward(model, prefix + tail)[10:]
        assert ((logits - want).norm() / want.norm()).item() <= PAGED_SMALL[kv_dtype]
    probe = [P.Chunk([5], 17, a), P.Chunk([5], 19, b), P.Chunk([5], 10, c)]
    before = step(probe)
    kept = cache.read(a, 17), cache.read(b, 19)
    paged_spoil(model, cache, 24, bs)
    cache.write([4, 8, 15, 16, 23], 0, kept[0])
    cache.write([4, 8, 10, 13, 14], 8, kept[1])  # its first two blocks are there: shared with a's
    after = step([P.Chunk([5], 17, [4, 8, 15, 16, 23]), P.Chunk([5], 19, [4, 8, 10, 13, 14])])
    for x, y in zip(after, before):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


def paged_bytes(x, depth: int = 0) -> int:
    if torch.is_tensor(x):
        return x.numel() * x.element_size()
    if depth < 3 and isinstance(x, (list, tuple, dict)):
        return sum(paged_bytes(y, depth + 1) for y in (x.values() if isinstance(x, dict) else x))
    return 0


@pytest.mark.parametrize("name", ["gqa", "absorbed"])
def test_paged_memory(name):
    """bytes_per_token is what the formats say, and the tensors are that large and no more."""
    config = PAGED_CONFIGS[name]
    width, heads = config.head_dim, 2 * config.n_kv_heads
    if config.kv_lora_rank:
        width, heads = config.kv_lora_rank + config.qk_rope_head_dim, 1
    want = {
        (torch.float32, None): 4 * width,
        (torch.bfloat16, None): 2 * width,
        (torch.float32, "int8"): width + 4,
        (torch.float32, "fp8"): width + 4,
    }
    for (dtype, kv_dtype), size in want.items():
        cache = P.PagedKVCache(config, 32, 8, dtype, kv_dtype=kv_dtype)
        assert cache.bytes_per_token == config.n_layers * heads * size
        held = sum(paged_bytes(x) for x in vars(cache).values())
        assert held <= (32 + 1) * 8 * cache.bytes_per_token, (dtype, kv_dtype)


@pytest.mark.parametrize("name", ["gqa", "window", "alibi", "expanded", "absorbed"])
@pytest.mark.parametrize("form", ["int8", "fp8", "bf16"])
def test_paged_small_caches_err_little(name, form):
    """int8, FP8 and bf16 caches: logits within named bounds of the exact ones, chunked or whole."""
    model = paged_model(name)
    tokens = paged_prompt(60, 4)
    want = paged_plain_forward(model, tokens)
    kv_dtype, dtype = (None, torch.bfloat16) if form == "bf16" else (form, torch.float32)
    for seed, sizes in ((0, (60,)), (1, (1, 7))):
        cache = P.PagedKVCache(model.config, 20, 3, dtype, kv_dtype=kv_dtype)
        table = random.Random(seed).sample(range(20), 20)
        (got,) = paged_interleave(model, cache, [tokens], [table], seed, sizes)
        off = ((got - want).norm() / want.norm()).item()
        assert 0 < off <= PAGED_SMALL[form], (form, name, off)


# --------------------------------------------------------------------------------------------------
# BlockAllocator
# --------------------------------------------------------------------------------------------------


class PagedLedger:
    """What the allocator must say: who holds which block, and what stands in it."""

    def __init__(self, num_blocks: int, block_size: int, seed: int, prefix_cache: bool = True):
        self.real = P.BlockAllocator(num_blocks, block_size, prefix_cache)
        self.n, self.bs, self.r = num_blocks, block_size, random.Random(seed)
        self.tables: list[list[int]] = []
        self.content: dict[int, tuple] = {}  # block: all tokens up to its end
        self.counts = Counter()

    def check(self) -> None:
        refs = Counter(block for table in self.tables for block in table)
        assert list(self.real.refs) == [refs[b] for b in range(self.n)]
        assert self.real.n_free == self.n - len(refs)
        self.real.check(self.tables)

    def take(self) -> int:
        block = self.real.allocate()
        assert 0 <= block < self.n and not any(block in t for t in self.tables)
        self.content[block] = ()
        return block

    def walk(self, tokens: list[int]) -> tuple[list[int], int]:
        """Share what is cached of these tokens: the blocks and the last one's node."""
        table, node = [], 0
        self.tables.append(table)
        for end in range(self.bs, len(tokens) + 1, self.bs):
            block = self.real.find(node, tuple(tokens[end - self.bs : end]))
            if block is None:
                break
            assert self.content[block] == tuple(tokens[:end]), "another prefix's block"
            assert self.real.share(block) == block
            table.append(block)
            node = self.real.node(block)
            self.counts["hit"] += 1
        return table, node

    def admit(self) -> None:
        tokens = [self.r.randint(0, 1) for _ in range(self.r.randint(1, 5 * self.bs))]
        table, node = self.walk(tokens)
        for start in range(len(table) * self.bs, len(tokens), self.bs):
            if not self.real.n_free:
                return
            self.check()
            block = self.take()
            table.append(block)
            part = tuple(tokens[start : start + self.bs])
            self.content[block] = tuple(tokens[: start + self.bs])
            if node is not None and len(part) == self.bs and self.r.random() < 0.9:
                node = self.real.register(block, node, part)
                self.counts["registered"] += 1
            else:
                node = None

    def operate(self) -> None:
        kind = self.r.choice(("admit", "admit", "release", "release", "fork", "single", "forget"))
        self.counts[kind] += 1
        if kind == "admit":
            self.admit()
        elif kind == "release" and self.tables:
            self.real.release(self.tables.pop(self.r.randrange(len(self.tables))))
        elif kind == "fork" and self.tables:
            table = self.r.choice(self.tables)
            self.tables.append([self.real.share(block) for block in table])
        elif kind == "single" and self.real.n_free:
            self.tables.append([self.take()])
        elif kind == "forget" and self.tables and self.r.random() < 0.3:
            table = self.r.choice(self.tables)
            for block in table[self.r.randrange(len(table) + 1) :][::-1]:
                self.real.forget([block])
                self.content[block] = ("forgotten",)


@pytest.mark.parametrize("num_blocks, block_size", [(1, 1), (7, 1), (12, 2), (30, 3)])
def test_paged_allocator_fuzz(num_blocks, block_size):
    """10,000 and more operations, every invariant after each: counts are who holds what, a found
    block holds just the tokens asked for after just that prefix, nothing leaks."""
    ledger = PagedLedger(num_blocks, block_size, seed=num_blocks)
    for _ in range(2600):
        ledger.operate()
        ledger.check()
    for table in ledger.tables:
        ledger.real.release(table)
    ledger.tables.clear()
    ledger.check()
    assert ledger.real.n_free == num_blocks
    assert num_blocks == 1 or ledger.counts["hit"] > 300, ledger.counts
    blocks = [ledger.real.allocate() for _ in range(num_blocks)]
    assert sorted(blocks) == list(range(num_blocks)) and ledger.real.n_free == 0
    with pytest.raises(Exception):
        ledger.real.allocate()
    ledger.real.check([blocks])


def paged_chain(allocator, parts) -> list[int]:
    """Blocks of one sequence, all registered."""
    node, table = 0, []
    for part in parts:
        table.append(allocator.allocate())
        node = allocator.register(table[-1], node, part)
    return table


def test_paged_eviction():
    """Free blocks go first, then cached ones by last use, children before their parents; a block
    with a reference never."""
    a = P.BlockAllocator(6, 1)
    first, second = paged_chain(a, [(1,), (2,)]), paged_chain(a, [(3,), (4,)])
    held = paged_chain(a, [(5,)])
    a.release(first)
    a.release(second)
    assert a.n_free == 5
    one = a.allocate()  # the one never used
    assert one not in first + second + held
    assert a.find(0, (1,)) == first[0] and a.find(a.node(first[0]), (2,)) == first[1]
    for block in first:
        a.share(block)  # used again: now second is the oldest
    a.release(first)
    order = [a.allocate() for _ in range(4)]
    assert order == [second[1], second[0], first[1], first[0]]
    assert a.n_free == 0 and a.find(0, (5,)) == held[0] and a.find(0, (3,)) is None
    a.check([held, order, [one]])


def test_paged_child_outlives_its_parent():
    """A parent evicted, or forgotten, before its child: the child is not found after a parent of
    other tokens that took its place."""
    for forget in (False, True):
        a = P.BlockAllocator(3, 2)
        parent, child = table = paged_chain(a, [(1, 1), (2, 2)])
        a.share(child)
        a.release(table)
        if forget:
            a.forget([parent])
        others = [a.allocate(), a.allocate()]  # the parent's place is taken
        assert parent in others and a.find(0, (1, 1)) is None
        node = a.register(parent, 0, (9, 9))
        assert a.find(node, (2, 2)) is None and a.find(0, (2, 2)) is None
        other = next(b for b in others if b != parent)
        again = a.register(other, 0, (1, 1))
        assert a.find(again, (2, 2)) in (None, child)
        a.release(others)
        a.release([child])
        assert a.n_free == 3
        assert sorted(a.allocate() for _ in range(3)) == [0, 1, 2]


def test_paged_without_prefix_cache():
    """prefix_cache=False: no token is taken from another, not even from oneself of before."""
    world = PagedWorld(8, 3, 9, prefix=False)
    for _ in range(30):
        world.add([1, 0, 1, 0, 1, 0, 1], 9)
    world.drain()
    assert world.ran > sum(len(s.tokens) - 1 for s in world.finished)
    assert world.scheduler.n_preempted > 3


# --------------------------------------------------------------------------------------------------
# Scheduler, without a model: a simulated cache that knows what each slot holds
# --------------------------------------------------------------------------------------------------


def paged_sequence(tokens, new=4, priority=0, arrival=0, **more) -> P.Sequence:
    return P.Sequence(
        tokens=list(tokens),
        n_prompt=len(tokens),
        params=greedy(new),
        request=None,
        index=0,
        priority=priority,
        arrival=arrival,
        **more,
    )


class PagedWorld:
    """A scheduler, and slots that hold hashes of the tokens they were computed from."""

    def __init__(self, num_blocks, bs, budget, max_running=64, prefix=True, seed=0, **more):
        self.allocator = P.BlockAllocator(num_blocks, bs, prefix)
        kind = more.pop("kind", P.Scheduler)
        max_running = min(max_running, budget)  # more are refused
        self.scheduler = kind(self.allocator, budget, max_running, **more)
        self.bs, self.budget, self.max_running, self.n = bs, budget, max_running, num_blocks
        self.slots: dict[tuple[int, int], int] = {}
        self.r = random.Random(seed)
        self.alive: list[P.Sequence] = []
        self.arrival, self.steps, self.ran = 0, 0, 0
        self.finished: list[P.Sequence] = []
        self.last: list[tuple[P.Sequence, int]] = []

    def add(self, tokens, new=4, priority=0) -> P.Sequence:
        seq = paged_sequence(tokens, new, priority, self.arrival)
        self.arrival += 1
        self.scheduler.add(seq)
        self.alive.append(seq)
        return seq

    def check(self) -> None:
        s = self.scheduler
        self.allocator.check(paged_tables(s))
        assert len(s.running) <= self.max_running or type(s) is not P.Scheduler
        assert {id(x) for x in (*s.running, *s.waiting)} == {id(x) for x in self.alive}
        assert len(s.running) + len(s.waiting) == len(self.alive)
        for x in s.running:
            assert len(x.table) * self.bs - len(x.tokens) < self.bs, "a block wasted"

    @staticmethod
    def marks(tokens) -> list[int]:
        return list(accumulate(tokens, lambda h, t: hash((h, t)), initial=7))[1:]

    def slot(self, seq, position) -> tuple[int, int]:
        return seq.table[position // self.bs], position % self.bs

    def execute(self, plan) -> None:
        """Copies to the host, between blocks all at once, and back; then all writes, then all
        reads, as one model call does."""
        for seq, table, n in plan.swap_out:
            at = [(table[p // self.bs], p % self.bs) for p in range(n)]
            seq.host = SimpleNamespace(n=n, kv=[self.slots.get(slot) for slot in at])
        found = {
            (target, x): self.slots.get((source, x))
            for target, source in plan.copies.items()
            for x in range(self.bs)
        }
        self.slots |= found
        for seq, first in plan.swap_in:
            for p in range(first, seq.host.n):
                self.slots[self.slot(seq, p)] = seq.host.kv[p]
            seq.host = None
        written = {}
        for seq, n in plan.run:
            assert n >= 1 and seq.computed + n <= len(seq.tokens)
            marks = self.marks(seq.tokens)
            for p in range(seq.computed, seq.computed + n):
                at = self.slot(seq, p)
                assert written.setdefault(at, marks[p]) == marks[p], "two write one slot"
        self.slots |= written
        for seq, n in plan.run:
            for p, mark in enumerate(self.marks(seq.tokens)[: seq.computed + n]):
                assert self.slots.get(self.slot(seq, p)) == mark, f"token {p} is not what it read"

    def fail(self, plan) -> None:
        """The model fails: some copies are made, some slots are torn."""
        for target, source in plan.copies.items():
            if self.r.random() < 0.5:
                for x in range(self.bs):
                    self.slots[target, x] = self.slots.get((source, x))
        for seq, n in plan.run:
            if self.r.random() < 0.5:
                for p, mark in enumerate(self.marks(seq.tokens)[: seq.computed + n]):
                    at = self.slot(seq, p)
                    if p >= seq.computed and self.slots.get(at) != mark:
                        self.slots[at] = -1
        self.scheduler.undo(plan)

    def plan(self):
        plan = self.scheduler.schedule()
        tokens = [n for _, n in plan.run]
        assert sum(tokens) <= self.budget
        assert len({id(s) for s, _ in plan.run}) == len(plan.run)
        assert all(s in self.scheduler.running for s, _ in plan.run)
        return plan

    def step(self, forks=0.0, failures=0.0, pick=None) -> list[P.Sequence]:
        """One step; those that got a token."""
        plan = self.plan()
        self.steps += 1
        self.last = list(plan.run)
        if self.r.random() < failures:
            self.fail(plan)
            self.check()
            return []
        self.execute(plan)
        self.scheduler.commit(plan)
        self.ran += sum(n for _, n in plan.run)
        got = []
        for seq, _ in plan.run:
            if seq.computed < len(seq.tokens):
                continue
            row = [seq]
            while self.r.random() < forks and len(self.scheduler.running) < self.max_running:
                row.append(self.scheduler.fork(seq))
                self.alive.append(row[-1])
                self.check()
            for x in row:
                x.tokens.append(pick(x) if pick else self.r.randint(0, 1))
                got.append(x)
                if len(x.output) >= x.params.max_new_tokens:
                    self.end(x)
        self.check()
        return got

    def end(self, seq) -> None:
        self.scheduler.finish(seq)
        self.alive = [s for s in self.alive if s is not seq]
        self.finished.append(seq)

    def drain(self, limit=2000, **how) -> None:
        while self.alive:
            self.step(**how)
            limit -= 1
            assert limit, "the scheduler does not come to an end"
        assert self.allocator.n_free == self.n and not any(self.allocator.refs)
        assert not self.scheduler.running and not self.scheduler.waiting


@pytest.mark.parametrize(
    "num_blocks, bs, budget, max_running, prefix",
    [
        (12, 1, 1, 3, True),
        (8, 3, 5, 64, True),
        (8, 3, 5, 64, False),
        (6, 4, 64, 8, True),
        (24, 1, 7, 64, True),
        (3, 16, 16, 1, True),
        (40, 2, 13, 6, True),
    ],
)
def test_paged_scheduler_fuzz(num_blocks, bs, budget, max_running, prefix):
    """Random arrivals, priorities, forks, aborts and model failures in a cache too small: each
    token is computed from just what stands before it, all budgets hold, all end, nothing leaks."""
    preempted = 0
    for seed in range(4):
        world = PagedWorld(num_blocks, bs, budget, max_running, prefix, seed, swap=seed % 2 == 1)
        r, room = world.r, num_blocks * bs
        family = [[r.randint(0, 1) for _ in range(room)] for _ in range(2)]
        for _ in range(70):
            if r.random() < 0.4:
                new = r.randint(1, max(1, room // 3))
                length = r.choice((1, bs, bs + 1, 2 * bs, r.randint(1, room)))
                length = max(1, min(length, room - new))
                tokens = r.choice(family)[:length]
                world.add(tokens, new, r.choice((0, 0, 0, 1, -1)))
            if world.alive and r.random() < 0.06:
                world.end(r.choice(world.alive))
                world.check()
            world.step(forks=0.15, failures=0.06)
        world.drain(forks=0.1, failures=0.03)
        preempted += world.scheduler.n_preempted
    assert preempted > 0 or max_running == 1


def test_paged_no_progress_is_lost_to_forks():
    """Three forks of a sequence that fills the cache but for its last block: all come to an end,
    though not even one copy has room."""
    for bs in (1, 3, 4):
        for length in range(1, 5 * bs):
            world = PagedWorld(5, bs, 8)
            world.add([1] * length, 5 * bs - length)
            world.step(pick=lambda s: 0)
            for seq in list(world.alive):
                if seq.computed + 1 == len(seq.tokens) and len(seq.output) == 1:
                    for i in range(2):
                        child = world.scheduler.fork(seq)
                        child.tokens[-1] = i + 1
                        world.alive.append(child)
                        world.check()
            world.drain(limit=300)


PAGED_COST = (2.0, 0.1)  # of a step: seconds, and seconds per token


def paged_largest_gap(kind) -> float:
    """The longest pause between two tokens of one sequence, as long prompts keep coming in."""
    world = PagedWorld(2000, 4, budget=32, max_running=16, prefix=False, kind=kind)
    clock, last, gap = 0.0, {}, 0.0
    for step in range(150):
        if step % 5 == 0:
            world.add([world.r.randint(0, 9) for _ in range(200 if step % 3 else 3)], 30)
        got = world.step()
        clock += PAGED_COST[0] + PAGED_COST[1] * sum(n for _, n in world.last)
        for seq in got:
            if id(seq) in last:
                gap = max(gap, clock - last[id(seq)])
            last[id(seq)] = clock
    assert world.scheduler.n_preempted == 0 or kind is not P.Scheduler
    return gap


class PagedPrefillFirst(P.Scheduler):
    """The wrong rule: while there are prompts to run, decodes wait."""

    def schedule(self):
        decodes = [s for s in self.running if len(s.tokens) - s.computed == 1]
        self.running[:] = [s for s in self.running if s not in decodes]
        plan = super().schedule()
        self.running[:] = decodes + self.running
        return plan if plan.run else super().schedule()


def test_paged_largest_gap_is_one_step():
    """Between two tokens of a sequence lies one budgeted step, whatever comes in; a scheduler that
    runs prompts first breaks that."""
    bound = PAGED_COST[0] + PAGED_COST[1] * 32
    assert paged_largest_gap(P.Scheduler) <= bound + 1e-9
    assert paged_largest_gap(PagedPrefillFirst) > 3 * bound


def test_paged_oldest_is_never_starved():
    """A request that needs the whole cache, then a short one at every step for ever: no later one
    delays it by more than those that ran before it."""
    for swap in (False, True):
        world = PagedWorld(10, 2, budget=8, max_running=8, seed=3, swap=swap)
        for i in range(4):
            world.add([i, 5], 6)
        world.step()
        old, steps = world.add([7] * 14, 6), 0
        while old in world.alive:
            world.add([world.r.randint(0, 9), 3, world.steps], 8)
            world.step()
            steps += 1
            assert steps < 40, "starved"


def test_paged_nobody_slips_past_the_first_that_waits():
    """One that does not fit yet holds back those behind it: were they let in, they would be
    preempted for it, their work for nothing."""
    world = PagedWorld(10, 2, budget=16, max_running=8)
    world.add([1, 2], 12)
    world.step()
    large, small = world.add([7] * 16, 4), world.add([3, 4], 12)
    world.step()
    assert large in world.scheduler.waiting
    while large in world.scheduler.waiting:
        assert small in world.scheduler.waiting
        world.step()
    world.drain()
    assert world.scheduler.n_preempted == 0 or world.finished.index(large) < 2


def test_paged_oldest_runs_at_every_step():
    """Once in, the oldest is never preempted, whatever comes later; preempted are the latest."""
    world = PagedWorld(8, 2, budget=16, max_running=8, seed=1, prefix=False)
    preempted = 0
    for step in range(200):
        if step % 2 == 0:
            world.add([world.r.randint(0, 9) for _ in range(world.r.randint(1, 6))], 8)
        oldest = min(world.alive, key=lambda s: s.arrival)
        world.step()
        assert oldest in [s for s, _ in world.last]
        preempted = world.scheduler.n_preempted
    assert preempted > 10


def test_paged_urgent_overtakes():
    """A late urgent request goes before all that wait, and is not the one to be preempted."""
    world = PagedWorld(6, 2, budget=8, max_running=2)
    world.add([1, 2], 8)
    world.add([3, 4], 8)
    world.step()
    late = [world.add([i, i], 2) for i in (5, 6, 7)]
    urgent = world.add([8, 8, 8], 7, priority=-1)
    world.drain()
    assert all(world.finished.index(urgent) < world.finished.index(s) for s in late)
    world = PagedWorld(6, 2, budget=8, max_running=4)
    world.add([1, 2], 10)
    world.step()
    urgent = world.add([3, 4, 5], 8, priority=-1)
    entered = False
    while urgent in world.alive:
        world.step()
        entered |= urgent in world.scheduler.running
        assert not entered or urgent in world.scheduler.running + world.finished
    assert entered and world.scheduler.n_preempted >= 1
    world.drain()


def test_paged_urgent_is_let_in_by_samples_of_one_prompt():
    """What gives way is counted exactly: four forks share all their blocks, and go together; one
    whose blocks the urgent request would find does not go in vain."""
    world = PagedWorld(6, 4, budget=16, max_running=8)
    low = world.add([1] * 15, 8, priority=1)
    world.step()
    forks = [world.scheduler.fork(low) for _ in range(3)]
    world.alive += forks
    urgent = world.add([2] * 16, 4, priority=0)
    world.step()
    assert urgent in world.scheduler.running and world.scheduler.n_preempted >= 1
    world.drain()
    world = PagedWorld(20, 4, budget=99, max_running=8)
    world.add([5] * 26, 4, priority=-1)
    world.add([1] * 28, 4, priority=1)
    world.step()
    urgent = world.add([1] * 28 + [2] * 32, 4, priority=0)
    world.step()
    assert urgent in world.scheduler.running or world.scheduler.n_preempted == 0
    world.drain()


def test_paged_forgetting_is_not_recursive():
    """A chain of 3000 blocks is forgotten from its root on; others stay."""
    allocator = P.BlockAllocator(3010, 1)
    chain, other = paged_chain(allocator, [(i,) for i in range(3000)]), allocator.allocate()
    allocator.register(other, 0, (7,))
    allocator.forget(chain[:1])
    assert allocator.find(0, (0,)) is None and allocator.find(0, (7,)) == other
    assert len(allocator.place) == 1
    allocator.release(chain)
    allocator.release([other])
    allocator.check([])


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("where", ["policy", "clock", "sampler", "fork", "listen"])
def test_paged_interrupted_anywhere(where, swap):
    """Ctrl-C in the policy in the middle of scheduling, at the clock, in the sampler, between two
    forks: the next steps go on, and every sample has the tokens that it would have had."""
    model, (prompts, counts) = paged_model(seed=3), paged_requests(5)
    params = [greedy(n, n=1 + i % 3) for i, n in enumerate(counts)]
    want = paged_greedy(model, prompts, counts)
    for at in range(1, 60, 7 if where == "policy" else 1):
        calls = [0]

        def bomb(*_):
            calls[0] += 1
            if calls[0] == at:
                raise KeyboardInterrupt
            return 0

        more = {"policy": lambda s: bomb() or P.first_come(s)} if where == "policy" else {}
        more |= {"clock": lambda: float(bomb())} if where == "clock" else {}
        if where == "listen":
            more["listen"] = lambda seq: bomb() or PagedListener(seq, [])
        engine = paged_engine(model, num_blocks=9, max_batch_tokens=12, swap=swap, **more)
        outputs = {}
        for i, (prompt, how) in enumerate(zip(prompts, params)):
            while i not in engine.outputs:
                try:
                    engine.add(prompt, how, id=i)
                except KeyboardInterrupt:
                    pass
            outputs[i] = engine.outputs[i]
        if where == "sampler":
            draw = engine.sampler
            engine.sampler = lambda logits, seqs: bomb() or draw(logits, seqs)
        if where == "fork":
            fork = engine.scheduler.fork
            engine.scheduler.fork = lambda seq: bomb() or fork(seq)
        limit = 500
        while engine.unfinished:
            limit -= 1
            assert limit, "it does not come to an end"
            try:
                engine.step()
            except KeyboardInterrupt:
                paged_check(engine)
        for i, output in outputs.items():
            assert [s.token_ids for s in output.samples] == [want[i]] * params[i].n, (where, at, i)
        paged_idle(engine, 9)
        if calls[0] < at:
            break


def test_paged_step_reports_whom_a_listener_ends():
    """An output that ends because another's listener aborts it is among those that step returns."""

    class Aborts(PagedListener):
        def push(self, token):
            super().push(token)
            if self.sequence.request.id == "a":
                engine.abort("b")

    engine = paged_engine(paged_model(), num_blocks=20, listen=lambda s: Aborts(s, []))
    engine.add([5, 6], greedy(2), id="a")
    engine.add([5, 7, 8], greedy(9), id="b")
    assert {o.id for o in engine.step()} == {"a", "b"} and engine.unfinished == 1


def test_paged_what_is_stored_is_not_written_again():
    """A token whose keys others already share, and a padding one, write to nobody's block."""
    cache = P.PagedKVCache(tiny(), num_blocks=6, block_size=4)
    chunks = [P.Chunk([5], 7, [2, 4], 8), P.Chunk([6, 7, 8], 3, [3, 1], 4)]
    step = cache.step(chunks, (6, 4))
    assert [slot // 4 for slot in step.slots.tolist()] == [6, 6, 1, 1, 6, 6]
    assert step.slots[2:4].tolist() == [4, 5]
    assert step.cu_seqlens.tolist() == [0, 1, 4, 4, 4] and step.lengths.tolist() == [8, 6, 0, 0]


def test_paged_a_mixed_step_is_never_taken_for_decoding():
    """Padded, a step is of as many tokens as sequences only if all decode."""
    engine = paged_engine(paged_model(), num_blocks=99, max_running=64, max_batch_tokens=128)
    chunk = lambda n: P.Chunk([5] * n, 0, [0])
    assert engine._shape([chunk(1)] * 60) == (64, 64)
    n, r = engine._shape([chunk(1)] * 60 + [chunk(2)])
    assert n > r == 64


def test_paged_hits_in_flight_are_counted():
    """Two equal prompts in one step: all but the last token of one is a hit; three of four."""
    engine = paged_engine(paged_model(), num_blocks=30, block_size=4, max_batch_tokens=64)
    engine.generate([[7] * 16] * 2, greedy(1))
    assert engine.stats()["hit_rate"] == 15 / 32 and engine.stats()["tokens_run"] == 17


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "kernel"])
def test_paged_any_strides(kernel, monkeypatch):
    """q, keys, values and scales of any layout give what contiguous ones give."""
    monkeypatch.setattr(P, "INTERPRET", kernel and not CUDA)
    g = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 16, generator=g)
    k, v = (torch.randint(-90, 90, (4, 4, 2, 16), generator=g).to(torch.int8) for _ in range(2))
    scales = [torch.rand(4, 4, 2, generator=g) / 50 for _ in range(2)]
    rest = (int32(3, 1, 0, 2).view(2, 2), int32(0, 2, 3), int32(7, 5))
    twisted = lambda x, *dims: x.permute(dims).contiguous().permute(*torch.tensor(dims).argsort())
    want = P.paged_attention_reference(q, k, v, *rest, k_scale=scales[0], v_scale=scales[1])
    got = P.paged_attention(
        twisted(q, 2, 0, 1),
        twisted(k, 3, 0, 1, 2),
        twisted(v, 2, 3, 1, 0),
        *rest,
        k_scale=twisted(scales[0], 2, 0, 1),
        v_scale=twisted(scales[1], 1, 0, 2),
    )
    assert relative(got, want) < 1e-5


def test_paged_given_away():
    """What another engine took is refused by name where it does not fit, and then nothing is
    changed; what fits goes on, and a listener that has heard enough ends it."""
    model = paged_model()
    first = paged_engine(model, num_blocks=40)
    first.add([5] * 30, greedy(20), id="long")
    first.add([5, 6], greedy(9), id="short")
    first.step()
    small = paged_engine(model, num_blocks=3)
    with pytest.raises(ValueError, match="max_new_tokens"):
        small.give(first.take("long"))
    assert small.unfinished == 0 and first.unfinished == 1
    parcel = first.take("short")
    small.give(parcel)
    with pytest.raises(ValueError, match="short"):
        small.give(parcel)
    (output,) = {o.id: o for o in paged_run(small)}.values()
    assert output.token_ids == paged_greedy(model, [[5, 6]], [9])[0]

    class Enough(PagedListener):
        def push(self, token):
            super().push(token)
            self.finish = "stop"

    first.add([5, 6], greedy(9), id="again")
    first.step()
    deaf = paged_engine(model, num_blocks=9, listen=lambda s: Enough(s, []))
    deaf.give(first.take("again"))
    assert not deaf.unfinished
    (output,) = deaf.step()
    assert output.finish_reason == "stop" and len(output.token_ids) == 1


def test_paged_policy_is_a_function():
    """Shortest first, as a function: prompts finish in order of length, not of arrival."""
    world = PagedWorld(64, 2, budget=64, max_running=1, policy=lambda s: (s.n_prompt, s.arrival))
    for length in (9, 3, 7, 1, 5, 3):
        world.add([length] * length, 3)
    world.drain()
    assert [s.n_prompt for s in world.finished] == [1, 3, 3, 5, 7, 9]
    arrivals = [s.arrival for s in world.finished if s.n_prompt == 3]
    assert arrivals == sorted(arrivals)


def test_paged_preempted_in_the_middle_of_a_prefill():
    """A long prompt, half run, gives way to decodes that need its blocks, and still comes right."""
    for prefix in (False, True):
        world, halved = PagedWorld(10, 2, budget=3, max_running=3, prefix=prefix), False
        early = [world.add([i, i + 1], 9) for i in (1, 4)]
        world.step()
        late = world.add([8] * 10, 2)
        while world.alive:
            before = late.computed if late in world.scheduler.running else 0
            world.step()
            halved |= 0 < before < 10 and late in world.scheduler.waiting
        assert world.finished[-1] is late and all(s in world.finished for s in early)
        assert halved


def test_paged_undo():
    """An undone plan loses nothing: blocks are whole, the sequences wait, and the next plan runs
    no less of them; blocks that were never computed are not found by others."""
    for prefix in (False, True):
        world = PagedWorld(20, 2, budget=9, prefix=prefix)
        for _ in range(3):
            world.add([1, 2, 3, 4, 5, 6], 4)
        for _ in range(4):
            plan = world.plan()
            world.scheduler.undo(plan)
            world.check()
            world.add([1, 2, 3, 4, 5, 6], 4)
        world.drain()
        assert all(s.output[:1] for s in world.finished)


def test_paged_one_prefix_is_computed_once():
    """Requests of one prompt in one step: its tokens once, and one more for each further request
    whose prompt ends with a block, else its unfinished block."""
    for bs in (1, 3, 4, 16):
        for length in (1, bs - 1, bs, bs + 1, 2 * bs, 3 * bs - 1):
            if length < 1:
                continue
            for count in (2, 3):
                world = PagedWorld(40 * count, bs, budget=512)
                tokens = list(range(length))
                for _ in range(count):
                    world.add(tokens, 1)
                world.step()
                rest = length % bs or 1
                assert not world.alive and world.ran == length + (count - 1) * rest, (bs, length)


# --------------------------------------------------------------------------------------------------
# Engine: a trained checkpoint, 320 requests, a cache that holds two or three of them
# --------------------------------------------------------------------------------------------------

STORY = """Once upon a time, there was a little girl named Lily. She loved to play in the park with
her dog. One day, she saw a big red ball under a tree. "Look, a ball!" said Lily. Her dog ran fast
and took the ball in his mouth. They played all day until the sun went down. Then mom called them
home. "It is time for dinner," she said. Tom was a boy who liked to build towers. He had blue and
green blocks, and he put one block on the other. The tower was very tall. Suddenly the wind came and
the tower fell. Tom was sad, but his friend helped him to build it again. They were very happy."""


@pytest.fixture(scope="module")
def paged_story():
    """The draft checkpoint, 320 random requests and their greedy tokens from KVCache."""
    model = paged_probe(M.load_checkpoint(DRAFT, dtype=torch.float32).requires_grad_(False))
    ids, r = K.load_tokenizer(DRAFT).encode(STORY), random.Random(0)
    ids = [i for i in ids if i > 2]
    shared = [ids[at : at + n] for at, n in ((0, 11), (40, 8), (90, 5))]
    prompts, counts, ignore = [], [], []
    for i in range(320):
        at, n = r.randrange(len(ids) - 24), r.choice((1, 3, 4, 5, 8, r.randint(1, 15)))
        tail = ids[at : at + n]
        prompts.append(r.choice(shared) + tail[: r.randint(0, 4)] if r.random() < 0.5 else tail)
        counts.append(r.choice((1, 4, 12, 16, 20)))
        ignore.append(r.random() < 0.5)
    free = paged_greedy(model, prompts, counts)
    eos = Counter(i for row in free for i in row).most_common(8)[-1][0]
    want = []
    for tokens, ignored in zip(free, ignore):
        end = tokens.index(eos) + 1 if eos in tokens and not ignored else len(tokens)
        want.append(tokens[:end])
    params = [greedy(n, ignore_eos=x) for n, x in zip(counts, ignore)]
    return model, prompts, params, want, eos


@pytest.mark.parametrize(
    "how",
    [
        dict(prefix_cache=False),
        dict(prefix_cache=False, swap=True, max_batch_tokens=7, max_running=7),
        dict(max_batch_tokens=16),
        dict(swap=True, block_size=3, num_blocks=16),
    ],
    ids=["recompute", "swap-chunked", "prefix-chunked", "prefix-swap"],
)
def test_paged_engine_equals_alone(paged_story, how):
    """320 requests on a trained model, arriving at random, batched, chunked, sharing prefixes and
    preempted again and again == each alone through KVCache, token for token; nothing leaks."""
    model, prompts, params, want, eos = paged_story
    how = dict(num_blocks=12, block_size=4, max_batch_tokens=40, max_running=12) | how
    engine, r, model.calls = paged_engine(model, eos_ids=(eos,), **how), random.Random(1), []
    todo, outputs = list(range(len(prompts)))[::-1], {}
    while todo or engine.unfinished:
        while todo and engine.n_waiting < 6 and r.random() < 0.8:
            i = todo.pop()
            outputs[i] = engine.add(prompts[i], params[i], id=f"request {i}"), i
        for output in engine.step():
            outputs[int(output.id.split()[1])] = output
        paged_check(engine)
    for i, tokens in enumerate(want):
        assert outputs[i].token_ids == tokens, (i, prompts[i])
        assert outputs[i].finished and outputs[i].error is None
        ended = tokens[-1] == eos and not params[i].ignore_eos
        assert outputs[i].finish_reason == ("eos" if ended else "length")
    paged_idle(engine, how["num_blocks"])
    stats = engine.stats()
    assert stats["preemptions"] >= 60, stats
    assert max(model.calls) <= how["max_batch_tokens"]
    prefix = how.get("prefix_cache", True)
    assert (stats["hit_rate"] > 0.2) if prefix else (stats["hit_rate"] == 0), stats


def test_paged_forks_equal_separate(paged_story):
    """n = 3 of greedy requests, forked after one prefill, in a cache that holds two sequences: all
    samples == alone, with and without swap."""
    model, prompts, params, want, eos = paged_story
    for swap in (False, True):
        engine = paged_engine(model, num_blocks=10, max_running=9, swap=swap, eos_ids=(eos,))
        outputs = engine.generate(prompts[:30], [replace(p, n=3) for p in params[:30]])
        for output, tokens in zip(outputs, want):
            assert [s.token_ids for s in output.samples] == [tokens] * 3
        paged_idle(engine, 10)
        assert engine.stats()["preemptions"] > 5


# --------------------------------------------------------------------------------------------------
# Engine: every model's form
# --------------------------------------------------------------------------------------------------


def paged_requests(count=6, seed=0):
    """Prompts on one of two prefixes or on none, and how many tokens each asks for; 29 at most."""
    r = random.Random(seed)
    heads = [paged_prompt(9, 50), paged_prompt(5, 51), []]
    prompts = [r.choice(heads) + paged_prompt(r.randint(1, 4), i) for i in range(count)]
    return prompts, [r.choice((1, 4, 12, 16)) for _ in prompts]


def test_paged_dynamic_rope_does_not_see_its_batch():
    """With dynamic NTK the angles follow the longest position of a call: a sequence past
    max_seq_len must not change the others, or such a model, or request, be refused."""
    rope = {"rope_type": "dynamic", "factor": 4.0}
    model = random_model(tiny(max_seq_len=16, rope_scaling=rope))
    long, short = paged_prompt(40, 1), paged_prompt(6, 2)
    try:
        alone = paged_engine(model, num_blocks=40)
        (want,) = alone.generate([short], greedy(8))
        engine = paged_engine(model, num_blocks=40)
        got = engine.generate([long, short], greedy(8))
    except ValueError as told:
        assert "dynamic" in str(told) or "rope" in str(told)
        return
    assert want.token_ids == paged_greedy(model, [short], [8])[0]
    assert got[1].token_ids == want.token_ids
    assert got[0].error or got[0].token_ids == paged_dynamic(model, long, 8)


def paged_dynamic(model, prompt, n) -> list[int]:
    """Alone: the prompt in one call, then token by token."""
    cache, ids = M.KVCache(model.config, 1, len(prompt) + n), []
    logits = model(torch.tensor([prompt]), torch.arange(len(prompt)), cache.attend)
    for i in range(n):
        ids.append(logits[0, -1].argmax().item())
        logits = model(torch.tensor([ids[-1:]]), torch.tensor([len(prompt) + i]), cache.attend)
    return ids


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("name", PAGED_CONFIGS)
def test_paged_engine_of_every_form(name, block_size):
    """Windows, ALiBi, grouped heads, MLA in both forms: the engine == KVCache, token by token, in
    small blocks and large, chunks of 5, preempted or swapped; after NaN in all blocks."""
    model = paged_model(name, poison=True)
    prompts, counts = paged_requests(8)
    counts = [16] * 8 if block_size == 16 else counts
    want = paged_greedy(model, prompts, counts)
    num_blocks = {1: 29, 3: 10, 16: 3}[block_size]
    for swap in (False, True):
        engine = paged_engine(
            model, num_blocks=num_blocks, block_size=block_size, max_batch_tokens=5, swap=swap
        )
        (bad,) = engine.generate([[POISON] * (num_blocks * block_size - 2)], greedy(2))
        assert bad.finish_reason == "error" and bad.error
        outputs = engine.generate(prompts, [greedy(n) for n in counts])
        assert [o.token_ids for o in outputs] == want
        paged_idle(engine, num_blocks)
        assert engine.stats()["preemptions"] > 0


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["gqa", "absorbed"])
def test_paged_engine_of_small_caches(name, kv_dtype):
    """An int8 or FP8 cache: swapped or recomputed == undisturbed, hit == cold, forked == separate,
    since all read the rounded numbers, no matter who computed them and in which chunk."""
    model = paged_model(name)
    prompts, _ = paged_requests(6)
    params = greedy(14, logprobs=1)
    calm = paged_engine(model, num_blocks=200, kv_dtype=kv_dtype, prefix_cache=False)
    want = [(o.token_ids, o.logprobs) for o in calm.generate(prompts, params)]
    for swap in (False, True):
        busy = paged_engine(model, num_blocks=9, max_batch_tokens=7, kv_dtype=kv_dtype, swap=swap)
        for o, (tokens, logprobs) in zip(busy.generate(prompts, replace(params, n=2)), want):
            for sample in o.samples:
                assert sample.token_ids == tokens
                assert all(abs(a[0] - b[0]) < 1e-3 for a, b in zip(sample.logprobs, logprobs))
        assert busy.stats()["preemptions"] > 3
        paged_idle(busy, 9)


@pytest.mark.parametrize("budget, max_running", [(1, 1), (2, 2), (3, 2), (512, 1)])
def test_paged_engine_smallest_budgets(budget, max_running):
    """A budget of one token and a single running sequence are slow, and right."""
    model = paged_model()
    prompts, counts = paged_requests(5, seed=2)
    want = paged_greedy(model, prompts, counts)
    engine = paged_engine(
        model, num_blocks=9, block_size=4, max_batch_tokens=budget, max_running=max_running
    )
    outputs = engine.generate(prompts, [greedy(n) for n in counts])
    assert [o.token_ids for o in outputs] == want and max(model.calls) <= budget
    assert not model.grads, "the engine's steps record gradients"
    paged_idle(engine, 9)


def test_paged_gradients_are_off():
    """A model whose weights want gradients serves as any other, and no step records one."""
    model = paged_model().requires_grad_(True)
    engine = paged_engine(model, num_blocks=9, block_size=4)
    (output,) = engine.generate([[5, 6, 7]], greedy(3, logprobs=2))
    assert output.token_ids == paged_greedy(model, [[5, 6, 7]], [3])[0] and not model.grads


# --------------------------------------------------------------------------------------------------
# Engine: the prefix cache
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_paged_engine_prefix_counts(block_size):
    """Tokens run: two equal prompts in one step, each prompt's token once and the last one once
    more; a full hit later, one; the next turn of a talk, what is new since the last full block."""
    bs = block_size
    for length in (bs, 2 * bs, 2 * bs + 1, 3 * bs - 1):
        model, prompt, rest = paged_model(), paged_prompt(length, length), length % bs or 1
        engine = paged_engine(model, num_blocks=80, block_size=bs)
        (want,) = paged_greedy(model, [prompt], [1])
        for _ in range(2):
            engine.add(prompt, greedy(1))
        assert [o.token_ids for o in paged_run(engine)] == [want, want]
        assert model.calls == [length + rest]
        model.calls.clear()
        (again,) = engine.generate([prompt], greedy(1))
        assert model.calls == [rest] and again.token_ids == want
        (talk,) = engine.generate([prompt], greedy(9))
        turn = prompt + talk.token_ids + [5]
        known = (len(turn) - 2) // bs * bs  # the last output token was never run
        model.calls.clear()
        (answer,) = engine.generate([turn], greedy(1))
        assert model.calls == [len(turn) - known]
        assert answer.token_ids == paged_greedy(model, [turn], [1])[0]
        paged_idle(engine, 80)


def test_paged_hits_change_no_output():
    """Cold, hit, hit after an eviction of the tail, hit on another's prefix: tokens and their
    log-probabilities are the model's own."""
    model, base = paged_model(), paged_prompt(12, 7)
    prompts = [base, base, base[:8], base[:8] + [4, 4], base + [9], base[:4], base[:11], base]
    engine = paged_engine(model, num_blocks=9, block_size=4)
    for i, prompt in enumerate(prompts * 2):
        (o,) = engine.generate([prompt], greedy(6, logprobs=3))
        paged_check_logprobs(model, prompt, o.samples[0])
        if i % 3 == 2:  # something else takes a part of the blocks
            engine.generate([paged_prompt(9 + i, 100 + i)], greedy(3))
        paged_check(engine)
    assert engine.stats()["hit_rate"] > 0.2


def paged_check_logprobs(model, prompt, sample) -> None:
    """Greedy tokens, and all that was said of them, against one full forward."""
    logits = paged_plain_forward(model, prompt + sample.token_ids)[len(prompt) - 1 : -1]
    logs = logits.log_softmax(-1)
    assert logits.argmax(-1).tolist() == sample.token_ids
    assert len(sample.logprobs) == len(sample.token_ids)
    for row, token, (logprob, ids, values) in zip(logs, sample.token_ids, sample.logprobs):
        assert abs(logprob - row[token].item()) < 1e-4
        best = row.topk(len(ids))
        assert ids == best.indices.tolist()
        torch.testing.assert_close(torch.tensor(values), best.values, rtol=1e-4, atol=1e-4)


def test_paged_hit_rate():
    """0 without a cache or a hit; what was found over what was asked."""
    model, prompt = paged_model(), paged_prompt(32, 1)
    for on in (True, False):
        engine = paged_engine(model, num_blocks=40, block_size=4, prefix_cache=on)
        engine.generate([prompt], greedy(1))
        assert engine.stats()["hit_rate"] == 0
        engine.generate([prompt], greedy(1))
        rate = engine.stats()["hit_rate"]
        assert 0.45 <= rate <= 0.5 if on else rate == 0


# --------------------------------------------------------------------------------------------------
# Engine: sampling
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swap", [False, True])
def test_paged_samples_equal_separate_runs(swap):
    """Sample i of n == a request of its own with seed + i, alone in a large cache: whatever the
    company, the forks' copies, the preemptions."""
    model = paged_model()
    prompts, _ = paged_requests(5, seed=4)
    how = [
        dict(temperature=1.0, top_k=0, top_p=1.0, seed=5),
        dict(temperature=0.7, top_k=5, seed=2**63 - 2),
        dict(temperature=1.3, top_p=0.8, seed=0),
        dict(temperature=0.9, top_k=10**12, top_p=0.5, seed=5),
        dict(temperature=0.0, seed=5),
    ]
    params = [greedy(9, n=3, **x) for x in how]
    engine = paged_engine(
        model, num_blocks=12, block_size=3, max_batch_tokens=8, max_running=7, swap=swap
    )
    outputs = engine.generate(prompts, params)
    assert engine.stats()["preemptions"] > 3
    paged_idle(engine, 12)
    for prompt, param, output in zip(prompts, params, outputs):
        for i, sample in enumerate(output.samples):
            alone = paged_engine(model, num_blocks=99, block_size=16, prefix_cache=False)
            one = replace(param, n=1, seed=(param.seed + i) % 2**63)
            assert alone.generate([prompt], one)[0].token_ids == sample.token_ids, (param, i)
    assert len({tuple(s.token_ids) for s in outputs[0].samples}) == 3
    assert len({tuple(s.token_ids) for s in outputs[4].samples}) == 1


@pytest.mark.parametrize("how", [dict(), dict(top_k=6), dict(top_p=0.6), dict(temperature=0.5)])
def test_paged_default_sampler_draws_from_the_distribution(how):
    """3,000 first tokens of one prompt: the frequencies are those of the definition."""
    model, prompt = paged_model(), paged_prompt(6, 3)
    params = P.SamplingParams(**dict(max_new_tokens=1, ignore_eos=True, n=500) | how)
    engine = paged_engine(
        model, num_blocks=600, block_size=4, max_batch_tokens=512, max_running=500
    )
    counts = Counter()
    for seed in range(6):
        (output,) = engine.generate([prompt], replace(params, seed=seed * 10_000))
        counts.update(s.token_ids[0] for s in output.samples)
    logits = paged_plain_forward(model, prompt)[-1].double() / params.temperature
    p = logits.softmax(-1)
    order = p.argsort(descending=True)
    if params.top_k:
        p[order[params.top_k :]] = 0
    if params.top_p < 1:
        before = p[order].cumsum(0) - p[order]
        p[order[before >= params.top_p]] = 0
    p = p / p.sum()
    assert all(p[i] > 0 for i in counts), "a token that must not be drawn"
    total, chi, cells, few, few_p = sum(counts.values()), 0.0, 0, 0, 0.0
    assert total == 3000
    for i, share in enumerate(p.tolist()):
        if share * total >= 8:
            chi, cells = chi + (counts[i] - share * total) ** 2 / (share * total), cells + 1
        else:
            few, few_p = few + counts[i], few_p + share
    if few_p * total >= 8:
        chi, cells = chi + (few - few_p * total) ** 2 / (few_p * total), cells + 1
    assert chi <= cells + 5 * math.sqrt(2 * cells), (chi, cells)


def test_paged_logprobs():
    """Log-probabilities are of the model's own distribution, for drawn tokens too, with n > 1 and
    preemptions; 0 asks for none but the token's own."""
    model = paged_model()
    prompts, _ = paged_requests(4, seed=6)
    engine = paged_engine(model, num_blocks=10, block_size=4, max_batch_tokens=7)
    params = [
        P.SamplingParams(
            max_new_tokens=8, ignore_eos=True, logprobs=k, n=2, temperature=0.8, top_k=9
        )
        for k in (0, 1, 5, 97)
    ]
    outputs = engine.generate(prompts, params)
    assert engine.stats()["preemptions"] > 0
    for prompt, param, output in zip(prompts, params, outputs):
        for sample in output.samples:
            logits = paged_plain_forward(model, prompt + sample.token_ids)[len(prompt) - 1 : -1]
            assert len(sample.logprobs) == len(sample.token_ids) == 8
            for row, token, entry in zip(logits.log_softmax(-1), sample.token_ids, sample.logprobs):
                logprob, ids, values = entry
                assert abs(logprob - row[token].item()) < 1e-4
                assert len(ids) == len(values) == param.logprobs
                best = row.topk(param.logprobs).values
                torch.testing.assert_close(torch.tensor(values), best, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(row[ids], best, rtol=1e-4, atol=1e-4)
    none = engine.generate([prompts[0]], greedy(2))[0]
    assert not none.logprobs


def test_paged_ends():
    """EOS ends a sample and is its last token, in the prompt it ends nothing, ignored it is a token
    as any; eos_ids replace the model's; one token asked for is one."""
    model, prompt = paged_model(), [2, 5, 2, 7]
    (free,) = paged_greedy(model, [prompt], [12])
    eos = free[5]
    want = free[: free.index(eos) + 1]
    engine = paged_engine(model, num_blocks=9, block_size=4, eos_ids=(eos, 95))
    params = [
        greedy(12, ignore_eos=False),
        greedy(12),
        greedy(1),
        greedy(len(want), ignore_eos=False),
    ]
    got = engine.generate([prompt] * 4, params)
    assert [o.token_ids for o in got] == [want, free, free[:1], want]
    assert [o.finish_reason for o in got][:2] == ["eos", "length"]
    assert got[3].finish_reason == "eos" and got[2].finish_reason in ("length", "eos")
    first = paged_engine(model, num_blocks=9, block_size=4, eos_ids=(free[0],))
    (one,) = first.generate([prompt], greedy(12, ignore_eos=False, n=3))
    assert [s.token_ids for s in one.samples] == [free[:1]] * 3
    assert {s.finish_reason for s in one.samples} == {"eos"}
    paged_idle(first, 9)


def test_paged_sampler_may_write_on_its_logits():
    """Log-probabilities are the model's own whatever a sampler does to the logits it is handed."""

    class Masks(PagedSampler):
        def __call__(self, logits, sequences):
            ids = super().__call__(logits, sequences)
            logits.fill_(-INF)
            return ids

    model, prompt = paged_model(), paged_prompt(9, 1)
    engine = paged_engine(model, num_blocks=9, sampler=Masks())
    (o,) = engine.generate([prompt], greedy(4, logprobs=2))
    paged_check_logprobs(model, prompt, o.samples[0])


class PagedSampler:
    """Greedy, but for what a test makes of it."""

    def __init__(self):
        self.seen, self.fail_at, self.never = [], None, set()

    def check(self, params):
        if params.min_p:
            raise ValueError("min_p is not for this sampler")

    def __call__(self, logits, sequences):
        self.seen.append([(s.request.id, s.index, len(s.output)) for s in sequences])
        if len(self.seen) == self.fail_at:
            raise RuntimeError("the sampler failed")
        assert logits.shape == (len(sequences), 97)
        ids = logits.argmax(-1)
        for row, s in enumerate(sequences):
            if (s.request.id, s.index, len(s.output)) in self.never:
                ids[row] = -1
        return ids


def test_paged_sampler_is_handed_in():
    """A sampler of one's own decides what is allowed and what comes; -1 ends that one sample with
    an error, and no other."""
    model, sampler = paged_model(), PagedSampler()
    prompts, counts = paged_requests(4)
    counts = [9] * 4
    want = paged_greedy(model, prompts, counts)
    sampler.never = {("b", 1, 4), ("c", 0, 0)}
    engine = paged_engine(model, num_blocks=14, block_size=3, sampler=sampler)
    with pytest.raises(ValueError, match="min_p"):
        engine.add(prompts[0], greedy(3, min_p=0.5))
    for id, prompt in zip("abcd", prompts):
        engine.add(prompt, greedy(9, n=2 if id == "b" else 1, repetition_penalty=1.5), id=id)
    done = {o.id: o for o in paged_run(engine)}
    assert done["a"].token_ids == want[0] and done["d"].token_ids == want[3]
    assert done["b"].samples[0].token_ids == want[1]
    assert done["b"].samples[1].token_ids == want[1][:4]
    assert done["b"].samples[1].finish_reason == "error" and done["b"].error
    assert done["c"].token_ids == [] and done["c"].finish_reason == "error" and done["c"].error
    assert done["a"].error is None and done["d"].finish_reason == "length"
    flat = [x for row in sampler.seen for x in row]
    assert len(flat) == len(set(flat)), "a token was drawn twice"
    paged_idle(engine, 14)


# --------------------------------------------------------------------------------------------------
# Engine: what goes wrong
# --------------------------------------------------------------------------------------------------


def paged_survivors(engine, want, ids, limit=400) -> int:
    """Step on through whatever is raised; the samples of `ids` are as wanted; times it raised."""
    live, raised = {}, 0
    while engine.unfinished:
        try:
            live |= {o.id: o for o in engine.step()}
        except (RuntimeError, KeyboardInterrupt):
            raised += 1
        paged_check(engine)
        limit -= 1
        assert limit, "the engine does not come to an end"
    for i in ids:
        for sample in live[i].samples:
            assert sample.token_ids == want[i], (i, raised)
            assert sample.finish_reason == "length"
    return raised


def test_paged_model_fails_at_any_step():
    """The model raises in its k-th call, before, in or after any layer, for every k: it reaches the
    caller, and the next step goes on to the same tokens; nothing leaks."""
    prompts, counts = paged_requests(5, seed=1)
    model = paged_model(seed=3)
    want = paged_greedy(model, prompts, counts)
    for k in range(1, 80):
        model.calls, model.fail_at, model.fail_in = [], k, k % 5 - 1
        model.failure = (RuntimeError("out of memory"), KeyboardInterrupt())[k // 2 % 2]
        engine = paged_engine(model, num_blocks=9, max_batch_tokens=9, swap=k % 2 == 0)
        for i, (prompt, n) in enumerate(zip(prompts, counts)):
            engine.add(prompt, greedy(n, n=1 + i % 2), id=i)
        raised = paged_survivors(engine, want, range(5))
        paged_idle(engine, 9)
        if not raised:
            break
        assert raised == 1
    assert 10 < k < 79


def test_paged_sampler_fails_at_any_step():
    """The sampler raises in its k-th call: the caller sees it, and the next step goes on."""
    prompts, counts = paged_requests(4, seed=1)
    model = paged_model(seed=3)
    want = paged_greedy(model, prompts, counts)
    for k in range(1, 80):
        sampler = PagedSampler()
        sampler.fail_at = k
        engine = paged_engine(model, num_blocks=9, max_batch_tokens=9, sampler=sampler)
        for i, (prompt, n) in enumerate(zip(prompts, counts)):
            engine.add(prompt, greedy(n, n=1 + i % 2), id=i)
        raised = paged_survivors(engine, want, range(4))
        paged_idle(engine, 9)
        if not raised:
            break
    assert 10 < k < 79


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_paged_nan_harms_no_other(temperature):
    """A request whose logits are NaN ends with an error; those beside it, those that get its blocks
    and those that share the part of its prompt that is sound go on as if it had never been."""
    clean, model = paged_model(), paged_model(poison=True)
    prompts, counts = paged_requests(5, seed=3)
    params = [greedy(n, temperature=temperature, seed=4) for n in counts]
    quiet = paged_engine(clean, num_blocks=99, block_size=4, prefix_cache=False)
    want = [o.token_ids for o in quiet.generate(prompts, params)]
    for swap in (False, True):
        engine = paged_engine(model, num_blocks=10, block_size=4, max_batch_tokens=9, swap=swap)
        for turn in range(3):
            bad = [prompts[0][:8] + [POISON], [POISON] + prompts[1], [POISON] * 11]
            ids = [engine.add(p, replace(params[0], max_new_tokens=5, n=2)) for p in bad[:2]]
            good = [engine.add(p, x) for p, x in zip(prompts, params)]
            ids.append(engine.add(bad[2], replace(params[0], n=3)))
            done = {o.id: o for o in paged_run(engine)}
            assert [done[i].token_ids for i in good] == want
            for i in ids:
                assert done[i].error and done[i].token_ids == []
                assert {s.finish_reason for s in done[i].samples} == {"error"}
            paged_idle(engine, 10)


def test_paged_transient_nan_is_not_kept():
    """One call of the model gives NaN, whatever was asked: those in it end with an error or with
    their tokens, and no later request finds what that call wrote."""
    model = paged_model()
    prompts, counts = paged_requests(6)
    want = paged_greedy(model, prompts, counts)
    table, failed = model.embed.weight.data, 0
    for k in range(1, 26):
        engine = paged_engine(model, num_blocks=9, max_batch_tokens=9, swap=k % 2 == 0)
        for i, (prompt, n) in enumerate(zip(prompts, counts)):
            engine.add(prompt, greedy(n), id=i)
        live = {}
        for step in range(1, 100):
            if step == k:
                model.embed.weight.data = torch.full_like(table, math.nan)
            live |= {o.id: o for o in engine.step()}
            model.embed.weight.data = table
            if not engine.unfinished:
                break
        for i, tokens in enumerate(want):
            assert live[i].finish_reason == "error" or live[i].token_ids == tokens
            failed += live[i].finish_reason == "error"
        outputs = engine.generate(prompts, [greedy(n) for n in counts])
        assert [o.token_ids for o in outputs] == want, k
        paged_idle(engine, 9)
    assert failed > 20


@pytest.mark.parametrize("how", ["abort", "sampler", "length"])
def test_paged_nan_is_not_inherited(how):
    """NaN keys and values stay behind in blocks: of a prompt aborted before its first token, of one
    whose sampler draws from NaN as if it were nothing. The next tenants feel nothing of it."""
    model = paged_model(poison=True)
    prompts, counts = paged_requests(6)
    want = paged_greedy(model, prompts, counts)
    sampler = None if how == "abort" else PagedSampler()
    engine = paged_engine(model, num_blocks=9, max_batch_tokens=12, sampler=sampler)
    for _ in range(3):
        engine.add([POISON] * 30, greedy(4), id="bad")
        for _ in range(2):
            engine.step()
        if how == "length":
            paged_run(engine)
        else:
            engine.abort("bad")
        outputs = engine.generate(prompts, [greedy(n) for n in counts])
        assert [o.token_ids for o in outputs] == want
        paged_idle(engine, 9)


@pytest.mark.parametrize("call", ["read", "write", "copy"])
def test_paged_copies_fail(call, monkeypatch):
    """Swapping out, swapping in or copying a block raises, as where host memory ends: the next step
    goes on to the same tokens."""
    model = paged_model()
    prompts, _ = paged_requests(5)
    want, done = paged_greedy(model, prompts, [16] * 5), getattr(P.PagedKVCache, call)
    for k in range(1, 8):
        calls = []

        def fails(cache, *args, **more):
            calls.append(args)
            if len(calls) == k:
                raise RuntimeError("out of host memory")
            return done(cache, *args, **more)

        monkeypatch.setattr(P.PagedKVCache, call, fails)
        engine = paged_engine(model, num_blocks=9, max_batch_tokens=9, swap=True)
        for i, prompt in enumerate(prompts):
            engine.add(prompt, greedy(16, n=2), id=i)
        assert paged_survivors(engine, want, range(5)) == (len(calls) >= k)
        paged_idle(engine, 9)
    assert len(calls) > 3


@pytest.mark.parametrize("seed", range(12))
def test_paged_engine_fuzz(seed):
    """Random requests, NaN in some, priorities, samples, aborts and failures of the model, in any
    block size, budget and mode: every token of everything is greedy's, every invariant holds after
    each step, nothing leaks."""
    model, r = paged_model(poison=True), random.Random(seed)
    pool, _ = paged_requests(12, seed=11)
    pool += [p[:4] for p in pool[:4]] + [p[:8] for p in pool[:4]]
    want = paged_greedy(model, pool, [20] * len(pool))
    pool += [[POISON] + pool[0], [POISON] * 9, [5, POISON] + pool[1]]
    bs, budget = r.choice((1, 2, 3, 4, 5, 16)), r.choice((2, 3, 5, 9, 16, 64))
    num_blocks = -(-r.randint(34, 50) // bs)
    engine = paged_engine(
        model,
        num_blocks=num_blocks,
        block_size=bs,
        max_batch_tokens=budget,
        max_running=r.randint(1, min(8, budget)),
        swap=r.random() < 0.5,
        prefix_cache=r.random() < 0.8,
    )
    most = paged_part(engine, P.Scheduler).max_running
    which, live, turn = {}, {}, 0
    while turn < 60 or engine.unfinished:
        kind, turn, model.fail_at = r.random(), turn + 1, None
        if kind < 0.5 and turn < 60:
            i, p, n = len(which), r.randrange(len(pool)), r.choice((1, 2, 5, 9, 20))
            which[i] = p, n
            engine.add(
                pool[p],
                greedy(n, n=min(most, r.choice((1, 1, 1, 2, 3)))),
                id=i,
                priority=r.choice((0, 0, 0, -1, 2)),
            )
        elif kind < 0.57 and engine.unfinished:
            i = r.choice([i for i in which if i not in live or not live[i].finished])
            live[i] = engine.abort(i)
        elif kind < 0.65:
            model.fail_at, model.fail_in = len(model.calls) + 1, r.randint(-1, 3)
        try:
            live |= {o.id: o for o in engine.step()}
        except RuntimeError:
            assert model.fail_at
        paged_check(engine)
        assert turn < 2000, "the engine does not come to an end"
    for i, (p, n) in which.items():
        for sample in live[i].samples:
            if POISON in pool[p]:
                assert not sample.token_ids and sample.finish_reason in ("abort", "error")
                continue
            whole = n if sample.finish_reason == "length" else len(sample.token_ids)
            assert sample.token_ids == want[p][:whole]
            assert sample.finish_reason in ("abort", "length")
    paged_idle(engine, num_blocks)
    assert max(model.calls) <= budget


@pytest.mark.parametrize("swap", [False, True])
def test_paged_abort_at_any_step(swap):
    """Abort any request, waiting, in prefill, decoding, preempted, forked, or one whose prefix
    another shares, after any number of steps: the others' tokens are the same; nothing leaks."""
    model = paged_model(seed=2)
    shared = paged_prompt(14, 9)
    prompts = [shared, shared + [4], shared, paged_prompt(5, 3), paged_prompt(17, 4)]
    counts = [9, 12, 6, 12, 8]
    want = paged_greedy(model, prompts, counts)
    cut = set()
    for at in range(60):
        engine = paged_engine(
            model, num_blocks=9, block_size=4, max_batch_tokens=9, max_running=6, swap=swap
        )
        live = {}
        for i, (prompt, n) in enumerate(zip(prompts, counts)):
            engine.add(prompt, greedy(n, n=1 + (i == 3)), id=i)
        for _ in range(at):
            live |= {o.id: o for o in engine.step()}
        if not engine.unfinished:
            break
        victim = next(
            i for i in (*range(at % 5, 5), *range(5)) if i not in live or not live[i].finished
        )
        gone = engine.abort(victim)
        paged_check(engine)
        assert (
            gone.finished
            and gone.id == victim
            and "abort" in {s.finish_reason for s in gone.samples}
        )
        assert gone.token_ids == want[victim][: len(gone.token_ids)]
        cut.add(victim)
        with pytest.raises(ValueError):
            engine.abort("nobody")
        live |= {o.id: o for o in paged_run(engine)}
        for i in set(range(5)) - {victim}:
            for sample in live[i].samples:
                assert sample.token_ids == want[i], (at, victim, i)
        paged_idle(engine, 9)
    assert cut == set(range(5)) and 10 < at < 59


def test_paged_abort_all_and_go_on():
    """Abort everything at once, then serve: the engine is as new, and the ids are free again."""
    model = paged_model()
    prompts, counts = paged_requests(6)
    want = paged_greedy(model, prompts, counts)
    engine = paged_engine(model, num_blocks=12, block_size=4, max_batch_tokens=6)
    for steps in range(5):
        for i, prompt in enumerate(prompts):
            engine.add(prompt, greedy(9, n=2), id=i)
        for _ in range(steps):
            engine.step()
        for i in range(6):
            engine.abort(i)
        paged_idle(engine, 12)
        assert {o.finish_reason for o in engine.step()} <= {"abort"}
    outputs = engine.generate(prompts, [greedy(n) for n in counts])
    assert [o.token_ids for o in outputs] == want


# --------------------------------------------------------------------------------------------------
# Engine: listeners, streams, order
# --------------------------------------------------------------------------------------------------


class PagedListener:
    def __init__(self, sequence, log, stop_at=None):
        self.sequence, self.stop_at = sequence, stop_at
        self.tokens, self.ends, self.finish = [], [], None
        log.append(self)

    def push(self, token):
        self.tokens.append(token)
        if len(self.tokens) == self.stop_at:
            self.finish = "stop"

    def end(self, reason):
        self.ends.append(reason)
        self.finish = self.finish or reason


def test_paged_listeners():
    """push hears every token of its sample once and in order, preempted or not; what it says ends
    the sample; end is called once, with the reason, and not after the listener's own."""
    model, log = paged_model(), []
    prompts, _ = paged_requests(5)
    want = paged_greedy(model, prompts, [10] * 5)
    stops = {0: 3, 1: None, 2: 1, 3: None, 4: 10}

    def listen(sequence):
        return PagedListener(sequence, log, stops[sequence.request.id])

    engine = paged_engine(model, num_blocks=9, block_size=4, max_batch_tokens=9, listen=listen)
    for i, prompt in enumerate(prompts):
        engine.add(prompt, greedy(10, n=2, stop=("x",)), id=i)
    for _ in range(6):
        engine.step()
    gone = engine.abort(3)
    paged_run(engine)
    paged_idle(engine, 9)
    heard = {(x.sequence.request.id, x.sequence.index): x for x in log}
    assert len(log) == len(heard) == 10 or len(heard) >= 8  # of 3, perhaps none had begun
    for (i, _), listener in heard.items():
        if i == 3:
            continue
        assert listener.tokens == want[i][: stops[i] or 10]
        assert listener.ends in ([["length"]] if stops[i] is None else [[], ["stop"]])
    for (i, index), listener in heard.items():
        if i == 3:
            assert listener.ends == ["abort"]
            assert listener.tokens == gone.samples[index].token_ids
    assert engine.stats()["preemptions"] > 0
    with pytest.raises(ValueError, match="stop"):
        paged_engine(model, num_blocks=9).add([5], greedy(3, stop=("x",)))


def test_paged_listener_says_eos_and_stop():
    """The reason that a listener gives is the sample's, and its last token stays."""
    model = paged_model()
    (want,) = paged_greedy(model, [[5, 6]], [9])
    for reason in ("stop", "eos"):

        class Ends(PagedListener):
            def push(self, token):
                super().push(token)
                if len(self.tokens) == 4:
                    self.finish = reason

        engine = paged_engine(model, num_blocks=9, listen=lambda s: Ends(s, []))
        (o,) = engine.generate([[5, 6]], greedy(9))
        assert o.token_ids == want[:4] and o.finish_reason == reason


@pytest.mark.parametrize("failure", [RuntimeError("no one listens"), KeyboardInterrupt()])
def test_paged_listener_that_raises(failure):
    """A listener raises at its k-th token: the others get all their tokens, nothing leaks."""
    model = paged_model()
    prompts, _ = paged_requests(4)
    want = paged_greedy(model, prompts, [8] * 4)
    for k in (1, 2, 5, 8):
        log = []

        class Raises(PagedListener):
            def push(self, token):
                super().push(token)
                if self.sequence.request.id == 1 and len(self.tokens) == k:
                    raise failure

        engine = paged_engine(
            model, num_blocks=9, max_batch_tokens=9, listen=lambda s: Raises(s, log)
        )
        for i, prompt in enumerate(prompts):
            engine.add(prompt, greedy(8), id=i)
        paged_survivors(engine, want, (0, 2, 3))
        paged_idle(engine, 9)
        heard = {x.sequence.request.id: x.tokens for x in log}
        assert all(heard[i] == want[i] for i in (0, 2, 3)), "a token heard twice, or never"


@pytest.mark.parametrize("what", ["add", "other", "own", "sibling"])
def test_paged_listener_calls_back(what):
    """From inside push: add a request, abort another, or one's own. The step survives it."""
    model = paged_model()
    prompts, _ = paged_requests(4)
    want, late = paged_greedy(model, prompts, [8] * 4), []

    class Meddler(PagedListener):
        def push(self, token):
            super().push(token)
            if self.sequence.request.id == 1 and len(self.tokens) == 3 and not late:
                late.append(0)
                if what == "add":
                    late.append(engine.add(prompts[3], greedy(8)))
                else:
                    engine.abort({"other": 2, "own": 1, "sibling": 1}[what])

    engine = paged_engine(model, num_blocks=30, listen=lambda s: Meddler(s, []))
    for i in range(3):
        engine.add(prompts[i], greedy(8, n=1 + (i == 1 and what == "sibling")), id=i)
    live = {}
    while engine.unfinished:
        live |= {o.id: o for o in engine.step()}
        paged_check(engine)
    for i in {"add": (0, 1, 2), "other": (0, 1), "own": (0, 2), "sibling": (0, 2)}[what]:
        assert live[i].token_ids == want[i]
    assert what != "add" or live[late[1]].token_ids == want[3]
    paged_idle(engine, 30)


def test_paged_streams():
    """Two streams read in turns, one after a preemption, one begun late: each gives its tokens from
    the first on, once; a stream of an aborted request ends; of an unknown id is refused."""
    model = paged_model()
    prompts, _ = paged_requests(4)
    want = paged_greedy(model, prompts, [10] * 4)
    engine = paged_engine(model, num_blocks=9, block_size=4, max_batch_tokens=9)
    ids = [engine.add(p, greedy(10)) for p in prompts]
    assert len(set(ids)) == 4 and all(isinstance(i, int) for i in ids)
    streams = {i: engine.stream(i) for i in ids[:3]}
    got = {i: [] for i in ids[:3]}
    for turn in range(60):
        i = ids[turn % 3] if turn % 5 else ids[0]
        if turn == 4:
            gone = engine.abort(ids[2])
        token = next(streams[i], None)
        got[i] += [token] if token is not None else []
    assert got[ids[0]] == want[0] and got[ids[1]] == want[1]
    assert gone.token_ids[: len(got[ids[2]])] == got[ids[2]]
    rest = list(engine.stream(ids[3])) if engine.unfinished else want[3]
    assert rest == want[3]
    with pytest.raises(ValueError):
        list(engine.stream("nobody"))
    paged_idle(engine, 9)


def test_paged_step_reports():
    """step() gives the outputs that advanced, live, each once; a finished one in the step in which
    it finished and never again; nothing to do is no call of the model."""
    model = paged_model()
    prompts, counts = paged_requests(6, seed=8)
    engine = paged_engine(model, num_blocks=9, block_size=4, max_batch_tokens=9)
    assert engine.step() == [] and not model.calls and engine.unfinished == 0
    for i, (prompt, n) in enumerate(zip(prompts, counts)):
        engine.add(prompt, greedy(n, n=2), id=i)
    assert engine.unfinished == 6 and engine.n_waiting >= 6
    sizes, finished, objects = Counter(), set(), {}
    while engine.unfinished:
        advanced = engine.step()
        assert len({id(o) for o in advanced}) == len(advanced)
        for o in advanced:
            size = sum(len(s.token_ids) for s in o.samples)
            assert size > sizes[o.id] and o.id not in finished
            assert objects.setdefault(o.id, o) is o
            sizes[o.id] = size
            finished |= {o.id} if o.finished else set()
        for i, o in objects.items():
            assert sum(len(s.token_ids) for s in o.samples) == sizes[i], "not reported"
    assert finished == set(range(6)) and [sizes[i] for i in range(6)] == [2 * n for n in counts]


def test_paged_engine_priorities_and_policy():
    """priority and policy reach the scheduler: an urgent late request ends before earlier ones, and
    shortest-first turns the order round."""
    model = paged_model()
    engine = paged_engine(model, num_blocks=30, block_size=4, max_running=1)
    for id, priority in (("a", 0), ("b", 0), ("c", 5), ("d", -2), ("e", 0)):
        engine.add([5, 6, 7], greedy(3), id=id, priority=priority)
    assert [o.id for o in paged_run(engine)] == ["d", "a", "b", "e", "c"]
    engine = paged_engine(
        model, num_blocks=30, block_size=4, max_running=1, policy=lambda s: s.n_prompt
    )
    for length in (7, 2, 9, 4):
        engine.add([5] * length, greedy(3), id=length)
    assert [o.id for o in paged_run(engine)] == [2, 4, 7, 9]


def test_paged_engine_never_starves():
    """One large request under an endless stream of small ones ends, and soon."""
    model = paged_model()
    engine = paged_engine(model, num_blocks=8, block_size=4, max_batch_tokens=16, max_running=6)
    for i in range(4):
        engine.add([4, i + 5], greedy(6))
    engine.step()
    big, steps = engine.add(paged_prompt(24, 1), greedy(8), id="big"), 0
    (want,) = paged_greedy(model, [paged_prompt(24, 1)], [8])
    while True:
        engine.add(paged_prompt(5, steps), greedy(7))
        done = [o for o in engine.step() if o.id == big and o.finished]
        steps += 1
        if done:
            break
        assert steps < 40, "starved"
    assert done[0].token_ids == want
    paged_run(engine)
    paged_idle(engine, 8)


def test_paged_stats():
    """Statistics are numbers, before the first request and after the last; shares lie in 0..1."""
    model = paged_model()
    engine = paged_engine(model, num_blocks=12, block_size=4, max_batch_tokens=9)
    names = "queue_seconds_p50 ttft_seconds_p50 ttft_seconds_p99 itl_seconds_p50 itl_seconds_p99"
    names = names.split() + ["tokens_per_second", "cache_used", "hit_rate", "preemptions"]
    empty = engine.stats()
    for name in names:
        assert empty[name] is None or math.isfinite(empty[name]), (name, empty)
    prompts, _ = paged_requests(6)
    for prompt in prompts:
        engine.add(prompt, greedy(9))
    for _ in range(4):
        engine.step()
    middle = engine.stats()
    assert 0 < middle["cache_used"] <= 1
    paged_run(engine)
    stats = engine.stats()
    assert all(math.isfinite(stats[name]) and stats[name] >= 0 for name in names), stats
    assert stats["ttft_seconds_p50"] <= stats["ttft_seconds_p99"] < 60
    assert 0 < stats["itl_seconds_p50"] <= stats["itl_seconds_p99"] < 60
    assert stats["queue_seconds_p50"] <= stats["ttft_seconds_p99"]
    assert 0 <= stats["cache_used"] <= 1 and 0 <= stats["hit_rate"] <= 1
    assert 1 < stats["tokens_per_second"] < 1e6
    assert isinstance(stats["preemptions"], int)


# --------------------------------------------------------------------------------------------------
# Engine: bad input
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_p", "x"),
        ("top_p", math.nan),
        ("stop", 5),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("logit_bias", {-1: 0.0}),
        ("min_new_tokens", -1),
        ("seed", -1),
        ("seed", 2**63),
        ("max_new_tokens", -1),
        ("max_new_tokens", 1.5),
        ("n", 0),
        ("n", -2),
        ("n", True),
        ("logprobs", -1),
        ("logprobs", 0.5),
    ],
)
def test_paged_params_are_checked(field, value):
    """A field out of its range is refused by name, when it is made or when it is asked for."""
    engine = paged_engine(paged_model(), num_blocks=9)
    with pytest.raises(ValueError, match=field):
        engine.add([5], P.SamplingParams(**{"max_new_tokens": 3} | {field: value}))
    assert engine.unfinished == 0


def paged_bad(engine) -> list[tuple[str, list, P.SamplingParams, dict]]:
    """(word, prompt, params, more) of requests that must be refused: 12 blocks of 4, context 40."""
    g = greedy(3)
    return [
        ("prompt", [], g, {}),
        ("token", [5, 97], g, {}),
        ("token", [5, -1], g, {}),
        ("token", [5, 2**70], g, {}),
        ("token", [5, 1.5], g, {}),
        ("token", [5, "a"], g, {}),
        ("token", [5, None], g, {}),
        ("max_new_tokens", [5] * 46, g, {}),
        ("max_new_tokens", [5] * 38, g, {}),
        ("max_new_tokens", [5], greedy(40), {}),
        ("max_new_tokens", [5], greedy(10**30), {}),
        ("n", [5], greedy(3, n=7), {}),
        ("id", [5], g, dict(id="taken")),
        ("min_p", [5], greedy(3, min_p=0.1), {}),
        ("repetition_penalty", [5], greedy(3, repetition_penalty=1.1), {}),
        ("presence_penalty", [5], greedy(3, presence_penalty=0.1), {}),
        ("frequency_penalty", [5], greedy(3, frequency_penalty=0.1), {}),
        ("logit_bias", [5], greedy(3, logit_bias={3: 1.0}), {}),
        ("min_new_tokens", [5], greedy(3, min_new_tokens=2), {}),
        ("stop", [5], greedy(3, stop=("x",)), {}),
        ("priority", [5], g, dict(priority="high")),
        ("priority", [5], g, dict(priority=None)),
        ("priority", [5], g, dict(priority=math.nan)),
        ("id", [5], g, dict(id=[1])),
    ]


def test_paged_bad_input_is_refused():
    """Each bad request is a ValueError that names the field, before and in the middle of a run; the
    others end with their tokens; those at the very limit are served."""
    model = random_model(tiny(max_seq_len=40))
    model = paged_probe(model)
    engine = paged_engine(model, num_blocks=12, block_size=4, max_running=6, max_batch_tokens=11)
    prompts, counts = paged_requests(4)
    want = paged_greedy(model, prompts, counts)
    live, cases = {}, paged_bad(engine)
    engine.add(prompts[0], greedy(counts[0]), id="taken")
    for i in range(1, 4):
        engine.add(prompts[i], greedy(counts[i]), id=i)
    for word, prompt, params, more in cases[:10]:
        with pytest.raises(ValueError, match=word):
            engine.add(prompt, params, **more)
    engine.add([5, 6], greedy(9), id="id")
    cases[12] = ("id", [5], greedy(3), dict(id="id"))
    live |= {o.id: o for o in engine.step()}
    for word, prompt, params, more in cases[10:]:
        with pytest.raises(ValueError, match=word):
            engine.add(prompt, params, **more)
    assert engine.unfinished == 5 - sum(o.finished for o in live.values())
    live |= {o.id: o for o in paged_run(engine)}
    assert [live[i].token_ids for i in ("taken", 1, 2, 3)] == want
    paged_idle(engine, 12)
    edge = [[5] * 37, [5], [6] * 39]
    outputs = engine.generate(edge, [greedy(3, n=6), greedy(39), greedy(1)])
    assert [o.error for o in outputs] == [None] * 3
    assert [s.token_ids for s in outputs[0].samples] == paged_greedy(model, edge[:1], [3]) * 6
    assert [o.token_ids for o in outputs[1:]] == paged_greedy(model, edge[1:], [39, 1])
    paged_idle(engine, 12)


def test_paged_cache_filled_to_the_last_slot():
    """A request, and one of four samples, as long as the whole cache: served."""
    model = paged_model()
    for bs, num_blocks in ((1, 12), (3, 4), (4, 3), (12, 1)):
        for swap in (False, True):
            engine = paged_engine(model, num_blocks=num_blocks, block_size=bs, swap=swap)
            (want,) = paged_greedy(model, [[5, 6, 7, 8]], [8])
            for n in (1, 4):
                (o,) = engine.generate([[5, 6, 7, 8]], greedy(8, n=n))
                assert o.error is None and [s.token_ids for s in o.samples] == [want] * n
            (o,) = engine.generate([[5, 6, 7, 8]], greedy(9))
            assert o.error and o.token_ids == []
            paged_idle(engine, num_blocks)


def test_paged_generate_with_bad_ones():
    """Bad prompts among good ones: each says what is wrong with it, the good ones are answered, all
    in order; generate leaves alone what others have added."""
    model = paged_model()
    prompts, counts = paged_requests(4)
    want = paged_greedy(model, prompts, counts)
    engine = paged_engine(model, num_blocks=12, block_size=4, max_running=4)
    engine.add(prompts[0], greedy(counts[0]), id=0)
    engine.add(prompts[0], greedy(counts[0]), id=1)
    bad = [
        ([], greedy(3)),
        ([5, 97], greedy(3)),
        ([5], greedy(3, n=5)),
        ([5], greedy(3, min_p=0.3)),
    ]
    mixed = [x for pair in zip(bad, zip(prompts, map(greedy, counts))) for x in pair]
    outputs = engine.generate([p for p, _ in mixed], [x for _, x in mixed])
    assert [o.token_ids for o in outputs[1::2]] == want
    assert all(o.error is None for o in outputs[1::2])
    for output, word in zip(outputs[::2], ("prompt", "97", "n", "min_p")):
        assert word in output.error and output.token_ids == [] and output.finished
    assert outputs[0].finish_reason == "error"
    paged_run(engine)
    paged_idle(engine, 12)
    assert engine.generate([], greedy(3)) == []
    with pytest.raises(ValueError, match="params"):
        engine.generate([[5], [6]], [greedy(3)])
    assert engine.unfinished == 0


def test_paged_nobodys_list_is_touched():
    """A prompt's list is neither kept nor written to, one list may come twice, a tuple will do, and
    fresh ids are not those that callers took."""
    model, prompt = paged_model(), [5, 6, 7, 8, 9]
    (want,) = paged_greedy(model, [prompt], [6])
    engine = paged_engine(model, num_blocks=12, block_size=4)
    for i in (0, 1, 2, 3):
        engine.add(tuple(prompt), greedy(6), id=i)
    first, second = engine.add(prompt, greedy(6)), engine.add(prompt, greedy(6))
    assert len({0, 1, 2, 3, first, second}) == 6
    prompt.append(97)
    done = {o.id: o for o in paged_run(engine)}
    assert prompt == [5, 6, 7, 8, 9, 97]
    for o in done.values():
        assert o.token_ids == want and list(o.prompt_ids) == prompt[:5]
    engine.add(prompt[:5], greedy(6), id=0)
    assert paged_run(engine)[0].token_ids == want


def test_paged_absurd_but_legal_params():
    """More log-probabilities than there are tokens, top_k of 2**63 - 1, the hottest and the coldest
    temperature: refused by name, or served; never the end of the others."""
    model = paged_model()
    (want,) = paged_greedy(model, [[5, 6]], [6])
    engine = paged_engine(model, num_blocks=40, block_size=4)
    for params in (
        greedy(6, logprobs=10**6),
        greedy(6, temperature=1e9),
        greedy(6, temperature=1e-9),
        greedy(6, temperature=1e-9, top_p=1e-12),
        greedy(6, temperature=1.0, top_p=1e-12),
        greedy(6, temperature=1.0, top_k=2**63 - 1),
        greedy(6, temperature=1.0, top_k=1),
        greedy(6, temperature=1.0, seed=2**63 - 1, n=3),
    ):
        try:
            engine.add([5, 6], params, id=str(params))
        except ValueError as told:
            assert "logprobs" in str(told)
    engine.add([5, 6], greedy(6), id="good")
    done = {o.id: o for o in paged_run(engine)}
    assert done["good"].token_ids == want
    for id, o in done.items():
        assert o.error is None and all(len(s.token_ids) == 6 for s in o.samples), id
        if "temperature=1e-09" in id or "top_k=1," in id or "top_p=1e-12" in id:
            assert o.token_ids == want, id
    paged_idle(engine, 40)


@pytest.mark.parametrize(
    "name, compiled",
    [("gqa", False), ("absorbed", False), pytest.param("gqa", True, marks=pytest.mark.slow)],
)
def test_paged_static_shapes_change_no_token(name, compiled):
    """Steps padded to few shapes, eager or compiled: the same tokens, in a dozen shapes at most."""
    requests, rows = (5, 2) if compiled else (9, 5)  # a shape takes seconds to compile
    model, (prompts, counts) = paged_model(name), paged_requests(requests)
    want = paged_greedy(model, prompts, counts)
    engine = paged_engine(model, num_blocks=20, max_running=rows, compile=compiled, static=True)
    shapes, run = set(), engine.shapes.run
    engine.shapes.run = lambda step: shapes.add(tuple(t.shape for t in step)) or run(step)
    outputs = engine.generate(prompts, [greedy(n) for n in counts])
    assert [o.token_ids for o in outputs] == want
    decode = {s for s in shapes if s[0] == s[-1]}
    assert {s[0][0] for s in decode} <= {1, 2, 4, 8} and len(shapes - decode) <= 2, shapes


PAGED_WORKER = """
import sys, torch, torch.distributed as dist, model as M, paged_kv as P
rank, file, kv_dtype = int(sys.argv[1]), sys.argv[2], {"none": None}.get(sys.argv[3], sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
sizes = dict(vocab_size=97, dim=48, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=80)
model, rng = M.Transformer(M.ModelConfig(**sizes, max_seq_len=99)), torch.Generator().manual_seed(0)
for p in model.parameters():
    torch.nn.init.normal_(p, 0.0, 0.2, rng)
draw = lambda n: torch.randint(97, (n,), generator=rng).tolist()
requests = [([], P.SamplingParams())]
for i in range(12):
    how = dict(max_new_tokens=1 + 3 * i % 17, temperature=float(i % 3), n=1 + i % 2, seed=i)
    requests.append((draw(1 + 7 * i % 30), P.SamplingParams(**how)))
build = lambda n, size: P.Engine(model, num_blocks=n, block_size=size, kv_dtype=kv_dtype)
engine = build(14, 5 + 3 * rank)
if rank == 0:
    P.prefill_worker(engine, requests, 1)
else:
    outputs = P.decode_worker(engine, 0)
    want = build(99, 16).generate(*map(list, zip(*requests)))
    tokens = lambda o: [s.token_ids for s in o.samples]
    assert [tokens(o) for o in outputs] == [tokens(o) for o in want]
    assert [o.error for o in outputs] == [o.error for o in want] and outputs[0].error
assert engine.allocator.n_free == 14 and not engine.unfinished
dist.barrier()
"""


@pytest.mark.parametrize("kv_dtype", ["none", "int8"])
def test_paged_prefill_and_decode_in_two_processes(kv_dtype, tmp_path):
    """Prompts run in one process, tokens come in another, KV goes between them by gloo, from blocks
    of 5 to blocks of 8: every sample's tokens are those of one process, refusals too."""
    argv = [sys.executable, "-c", PAGED_WORKER]
    env = os.environ | dict(PYTHONPATH=str(REPO), OMP_NUM_THREADS="1")
    workers = [
        subprocess.Popen([*argv, str(rank), str(tmp_path / "meet"), kv_dtype], env=env, stderr=-1)
        for rank in range(2)
    ]
    errors = [worker.communicate(timeout=120)[1].decode() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], errors


@pytest.mark.parametrize(
    "triton", ["missing", "interpreted", pytest.param("installed", marks=pytest.mark.slow)]
)
def test_paged_kv_alone_in_a_folder(triton, tmp_path):
    """The one file, copied away, checks itself: without Triton, with it, and on its kernel."""
    shutil.copy(REPO / "paged_kv.py", tmp_path)
    code = (
        "import sys; sys.modules['triton'] = None; import torch, paged_kv as P\n"
        "with torch.inference_mode(): P._check_attention('cpu'), P._check_engine('cpu')"
    )
    argv = ["-c", code] if triton == "missing" else ["paged_kv.py"]
    env = os.environ | (dict(TRITON_INTERPRET="1") if triton == "interpreted" else {})
    done = subprocess.run(
        [sys.executable, *argv], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    kind = "the Triton kernel" if triton == "interpreted" or CUDA else "plain torch"
    assert triton == "missing" or f"{kind} checked" in done.stdout, done.stdout
    assert triton != "installed" or "gather all" in done.stdout, done.stdout


@pytest.mark.parametrize("return_lse", [False, True])
def test_paged_op(return_lse):
    """The operator that a compiled step calls: its schema and its fake are what it does."""
    draws = (paged_build(paged_draw(seed, small=True)) for seed in range(99))
    args, flags = next((a, f) for a, f in draws if a[1].dtype == torch.int8)
    names = ("k_scale", "v_scale", "latent_dim", "scale", "window", "softcap", "alibi_slopes")
    q, pages, rules = P._checked(*args, *(flags.get(name) for name in (*names, "sinks")))
    arguments = (q, *pages, *rules, 2, return_lse)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(P._paged_op, arguments, test_utils=checks)


PAGED_COMPILE = """
P._kernel, P._processors = lambda q: True, lambda _: 132

def paged(D=128, Hq=32, Hkv=8, new=(1, 1), kind=None, dtype=torch.bfloat16, **flags):
    q = torch.randn(sum(new), Hq, D, dtype=dtype)
    kv = torch.zeros(2, Hkv, 64, 16, D).to(kind or dtype).movedim(1, 3)
    scales = [torch.ones(Hkv, 64, 16).movedim(0, 2) if kind else None] * 2
    v, scales[1] = (None, None) if "latent_dim" in flags else (kv[1], scales[1])
    table, cu = torch.zeros(len(new), 20, dtype=torch.int32), int32(0, *new).cumsum(0)
    scales = dict(zip(("k_scale", "v_scale"), scales))
    P.paged_attention(q, kv[0], v, table, cu, int32(*[300] * len(new)), **scales, **flags)

busy = dict(window=33, softcap=5.0, alibi_slopes=torch.rand(32), sinks=torch.rand(32))
mixed = dict(new=(1, 64))
"""
PAGED_COMPILED = ["paged(n_splits=4)", "paged(**mixed)"]
PAGED_ALL = [
    *PAGED_COMPILED,
    "paged(**mixed, **busy)",
    *(f"paged({D}, **{m})" for D in (64, 192, 256) for m in ("{}", "mixed")),
    *(f"paged(576, Hq=128, Hkv=1, latent_dim=512, **{m})" for m in ("{}", "mixed")),
    *(f"paged(dtype=torch.{dtype}, **mixed)" for dtype in ("float16", "float32")),
    "paged(kind=torch.int8)",
    "paged(kind=torch.int8, **mixed)",
]
PAGED_SOME = [  # the most shared memory, all rules at once, codes, and latents
    *PAGED_COMPILED,
    "paged(**mixed, **busy)",
    "paged(256, **mixed)",
    *(f"paged(576, Hq=128, Hkv=1, latent_dim=512, **{m})" for m in ("{}", "mixed")),
    "paged(dtype=torch.float32, **mixed)",
    "paged(kind=torch.int8, **mixed)",
]


@pytest.mark.skipif(not A.INTERPRET, reason="where there is a GPU, or no Triton, nothing to learn")
@pytest.mark.parametrize(
    "arch, cases",
    [
        (90, PAGED_COMPILED),
        pytest.param(90, PAGED_ALL, marks=pytest.mark.slow),
        *(pytest.param(a, PAGED_SOME, marks=pytest.mark.slow) for a in (80, 100)),
    ],
    ids=["90", "90-all", "80-some", "100-some"],
)
def test_paged_kernel_compiles_for_gpus(arch, cases, tmp_path):
    """To machine code for Ampere, Hopper and Blackwell, with no GPU at hand, within their shared
    memory; and other sequences, lengths and tables compile nothing anew."""
    if arch >= 89 and len(cases) > 2:
        fp8 = "kind=torch.float8_e4m3fn"
        cases = [*cases, f"paged({fp8}, **mixed)", f"paged(576, Hkv=1, latent_dim=512, {fp8})"]
    again = ["n = len(built)", "paged(n_splits=4, new=(1,) * 5)", "assert len(built) == n"]
    code = COMPILE.replace("import attention as A\n", "import attention as A, paged_kv as P\n")
    code = code.replace("busy = dict", PAGED_COMPILE + "\nunused = dict", 1)
    code = code.replace("busy |= dict(bias", "unused |= dict(bias")
    code = code.replace("    eval(case)", "    exec(case)")
    printed = compile_kernels(code, tmp_path, arch, *cases, *again)
    assert printed.strip() == str(["_combine_kernel", "_paged_kernel"])


# --------------------------------------------------------------------------------------------------
# serving.py
# --------------------------------------------------------------------------------------------------


def serving_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def serving_file(path: Path, requests: list) -> Path:
    """Objects, or lines as they are."""
    lines = [r if isinstance(r, str) else json.dumps(r) for r in requests]
    path.write_text("\n".join(lines) + "\n")
    return path


def serving_batch(path: Path, *argv) -> dict:
    """`generate.py --batch` in this process, in fp32: the results by line."""
    argv = ["--batch", str(path), "--device", "cpu", "--dtype", "fp32", *map(str, argv)]
    assert G.main(argv) == 0
    results = serving_lines(path.with_suffix(".results.jsonl"))
    by_line = {r["line"]: r for r in results}
    assert len(by_line) == len(results), "a request was answered twice"
    return by_line


SERVING_ALONE = [
    ("class Stack:\n", {}),
    ("class Stack:\n", {"temperature": 0, "max_new_tokens": 40}),
    ("def f(x, y):\n", {"top_k": 5, "seed": 3, "logprobs": 2}),
    ("import os\n", {"top_p": 0.7, "min_p": 0.02, "seed": 2**62, "n": 3}),
    ("import os\n", {"temperature": 1.7, "repetition_penalty": 1.3, "stop": ["\n", "\0"]}),
    ("x = 1\n" * 3, {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 0.5}),
    ("def f(", {"logit_bias": {"2": 1e6, "5": "-inf"}, "min_new_tokens": 7}),
    ("def f(", {"logit_bias": {"2": 1e6}, "min_new_tokens": 7, "ignore_eos": True}),
    ("try:\n", {"temperature": 0, "stop": "    ", "n": 2, "logprobs": 0}),
]


def serving_flags(fields: dict) -> list[str]:
    """The same request as flags of a single run."""
    argv = []
    for name, value in fields.items():
        if name == "logit_bias":
            value = ",".join(f"{token}:{bias}" for token, bias in value.items())
        for v in value if isinstance(value, list) else [value]:
            argv += [G._flag(name)] if v is True else [f"{G._flag(name)}={v}"]
    return argv


SERVING_TIGHT = ["--max-running", "4", "--kv-blocks", "17", "--block-size", "4"]


def test_serving_equals_every_request_alone(tmp_path, capsys, monkeypatch):
    """Each result of a file == generate.py --json of that request: text, tokens, ends, samples,
    log-probabilities, with every sampling field; also in a cache so small that requests wait and
    are preempted, computed again or swapped."""
    monkeypatch.setattr(G, "measured_bandwidth", lambda device: 1.0)
    common, alone = {"max_new_tokens": 30, "seed": 5}, []
    for prompt, fields in SERVING_ALONE:
        alone.append(through_main(capsys, prompt, *serving_flags(common | fields)))
    requests = [{"prompt": p, "id": f"r{i}"} | f for i, (p, f) in enumerate(SERVING_ALONE)]
    for name, flags in (("a", []), ("b", SERVING_TIGHT), ("c", [*SERVING_TIGHT, "--swap"])):
        path = serving_file(tmp_path / f"{name}.jsonl", requests)
        results = serving_batch(path, *serving_flags(common), *flags)
        assert bool(re.search(r" [1-9]\d* preemptions", capsys.readouterr().err)) == bool(flags)
        for line, ((_, fields), expected) in enumerate(zip(SERVING_ALONE, alone), 1):
            serving_compare(results[line], expected, fields)


def serving_compare(got: dict, alone: dict, fields: dict) -> None:
    """A result against what --json printed of the same request."""
    for name in ("text", "tokens", "finish_reason", "prompt_tokens"):
        assert got[name] == alone[name], (fields, name, got, alone)
    assert ("logprobs" in got) == ("logprobs" in fields)
    assert ("samples" in got) == (fields.get("n", 1) > 1) and got.keys() <= {"id", "line", *alone}
    for a, b in zip(alone.get("samples", [alone]), got.get("samples", [got]), strict=True):
        assert all(a[x] == b[x] for x in ("tokens", "text", "finish_reason"))
        for x, y in zip(a.get("logprobs", []), b.get("logprobs", []), strict=True):
            assert (x["token"], x["text"]) == (y["token"], y["text"])
            assert [t["token"] for t in x["top"]] == [t["token"] for t in y["top"]]
            assert abs(x["logprob"] - y["logprob"]) < 1e-3


SERVING_BAD = [
    ('{"prompt": "x = 1", "max_new_to', ["not JSON"]),
    ("[1, 2]", ["object", "list"]),
    ("\udcff{}".encode(errors="surrogateescape"), ["not JSON", "utf-8"]),
    ("[" * 100_000, ["not JSON"]),
    ({"prompt": ""}, ["prompt", "empty"]),
    ({"prompt": 5}, ["prompt", "text"]),
    ({"prompt": "\ud800"}, ["prompt", "surrogates"]),
    ({"prompt_ids": []}, ["no tokens"]),
    ({"prompt_ids": [5, 4096]}, ["4096", "4095"]),
    ({"prompt_ids": [5, True]}, ["prompt_ids", "ids"]),
    ({"id": "none"}, ["prompt", "none of them"]),
    ({"prompt": "x", "prompt_ids": [5]}, ["prompt and prompt_ids"]),
    ({"prompt": "x", "temprature": 1}, ["temprature", "did you mean temperature"]),
    ({"prompt": "x", "zzz": 1}, ["zzz", "max_new_tokens"]),
    ({"prompt": "x", "max_new_tokens": 0}, ["max_new_tokens", "0"]),
    ({"prompt": "x", "max_new_tokens": 4.5}, ["max_new_tokens", "4.5"]),
    ({"prompt": "x", "max_new_tokens": 400}, ["400", "whole cache of 320"]),
    ({"prompt": "x = 1\n" * 200}, ["context of 512"]),
    ({"prompt": "x", "min_new_tokens": 10, "max_new_tokens": 9}, ["min_new_tokens", "10", "9"]),
    ({"prompt": "x", "temperature": "hot"}, ["temperature", "hot"]),
    ({"prompt": "x", "top_p": 0}, ["top_p", "0"]),
    ({"prompt": "x", "seed": -1}, ["seed", "-1"]),
    ({"prompt": "x", "n": 9}, ["n must", "8"]),
    ({"prompt": "x", "stop": [""]}, ["stop", "empty"]),
    ({"prompt": "x", "stop": 5}, ["stop", "5"]),
    ({"prompt": "x", "logprobs": 5000}, ["logprobs", "4096"]),
    ({"prompt": "x", "logit_bias": {"4096": 1}}, ["logit_bias", "4095"]),
    ({"prompt": "x", "logit_bias": {"a": 1}}, ["logit_bias", "a"]),
    ({"prompt": "x", "priority": 1.5}, ["priority", "1.5"]),
    ({"prompt": "x", "id": True}, ["id must"]),
    ({"prompt": "x", "id": "twice"}, None),
    ({"prompt": "y", "id": "twice"}, ["'twice'", "line 31"]),
    ({"messages": [{"role": "user", "content": "x"}]}, ["messages", "chat template"]),
]


def test_serving_answers_what_is_wrong_and_finishes_the_rest(tmp_path, capsys):
    """Every kind of bad line, between good ones: an error that names file, line and field, under
    the request's id; all the others have their results, the same as without it."""
    path, lines = tmp_path / "in.jsonl", []
    for bad, _ in SERVING_BAD:
        bad = bad if isinstance(bad, (str, bytes)) else json.dumps(bad)
        lines.append(bad.encode() if isinstance(bad, str) else bad)
    good = {"prompt": "def f(", "max_new_tokens": 4}
    lines += [b"", b"   \r", json.dumps(good).encode()]
    path.write_bytes(b"\n".join(lines))  # without a last newline
    flags = ["--temperature", 0, "--max-new-tokens", 4, "--kv-blocks", 20, "--max-running", 8]
    results = serving_batch(path, *flags)
    err = capsys.readouterr().err
    n = len(SERVING_BAD)
    assert (
        f"{n + 1} requests, {n - 1} errors" in err and "delete" in err and str(path.parent) in err
    )
    assert sorted(results) == [*range(1, n + 1), n + 3]
    for line, (bad, words) in enumerate(SERVING_BAD, 1):
        id = bad.get("id", line) if isinstance(bad, dict) else line
        got = results[line]
        assert got["id"] == (line if id is True else id)
        if words is None:
            assert len(got["tokens"]) == 4
            continue
        assert set(got) == {"id", "line", "error"} and "\n" not in got["error"]
        for word in (str(path), f"line {line}:", *words):
            assert word in got["error"], (word, got["error"])
    assert (
        results[n + 3]["tokens"]
        == serving_batch(serving_file(tmp_path / "good.jsonl", [good]), "--temperature", 0)[1][
            "tokens"
        ]
    )


def test_serving_takes_a_line_s_number_for_its_id(tmp_path):
    """A line without an id, and one that cannot be read, has its number: no other may take it."""
    lines = ["{", {"id": 1, "prompt": "x"}, {"prompt": "x"}, {"id": 3, "prompt": "y"}]
    got = serving_batch(serving_file(tmp_path / "in.jsonl", lines), "--max-new-tokens", 2)
    assert [r["id"] for r in got.values()].count(3) == 2 and len(got[3]["tokens"]) == 2
    assert "not JSON" in got[1]["error"]
    assert "line 1's" in got[2]["error"] and "line 3's" in got[4]["error"]


def test_serving_lowers_its_default_length_and_refuses_a_request_s_own(tmp_path):
    """Without max_new_tokens a request may fill what room there is; with one it is taken at its
    word."""
    ids = list(range(100, 150))
    asked = [{"prompt_ids": ids}, {"prompt_ids": ids, "max_new_tokens": 15}]
    path = serving_file(tmp_path / "in.jsonl", asked)
    results = serving_batch(path, "--kv-blocks", 4, "--max-running", 2, "--ignore-eos")
    assert len(results[1]["tokens"]) == 14 and "whole cache of 64" in results[2]["error"]


def serving_requests(n: int) -> list[dict]:
    rng = random.Random(n)
    words = ["def f(x):\n", "class A:\n", "import os\n", "x = 1\n", "try:\n"]
    return [
        {
            "id": f"r{i}",
            "prompt": "".join(rng.choices(words, k=3)),
            "max_new_tokens": rng.randint(2, 25),
        }
        for i in range(n)
    ]


def test_serving_resumes_after_a_crash_at_any_byte(tmp_path):
    """A file of results cut anywhere: the torn line goes, whole ones stay as they are, and what is
    missing comes; a second run adds nothing."""
    asked = [*serving_requests(8), "{broken", {"id": "r3", "prompt": "again"}]
    path = serving_file(tmp_path / "in.jsonl", asked)
    flags = ["--temperature", 0, "--checkpoint", DRAFT, "--max-running", 3]
    expected, out = serving_batch(path, *flags), tmp_path / "in.results.jsonl"
    whole = out.read_bytes()
    assert "line 4" in expected[10]["error"] and expected[9]["id"] == 9
    ends = list(accumulate(map(len, whole.splitlines(keepends=True))))
    for cut in (
        0,
        1,
        7,
        ends[2] - 1,
        ends[2],
        ends[2] + 3,
        ends[5] + 40,
        len(whole) - 1,
        len(whole),
    ):
        out.write_bytes(whole[:cut])
        assert serving_batch(path, *flags) == expected, cut
        kept = max([0, *(e for e in ends if e <= cut)])
        assert out.read_bytes().startswith(whole[:kept])
    before = out.read_bytes()
    assert serving_batch(path, *flags) == expected and out.read_bytes() == before


def test_serving_survives_kill_and_ctrl_c(tmp_path):
    """SIGKILL, then Ctrl-C (exit code 130), then to the end: each request is answered once, as in
    an undisturbed run."""
    path = serving_file(tmp_path / "in.jsonl", serving_requests(40))
    flags = ["--temperature", "0", "--checkpoint", DRAFT, "--max-running", "2"]
    flags += ["--dtype", "fp32", "--device", "cpu"]
    out = tmp_path / "in.results.jsonl"
    for sig, enough in ((signal.SIGKILL, 3), (signal.SIGINT, 12)):
        p = subprocess.Popen(
            [sys.executable, REPO / "generate.py", "--batch", path, *flags],
            stderr=subprocess.PIPE,
            env=ENV,
        )
        while p.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < enough):
            time.sleep(0.005)
        p.send_signal(sig)
        err = p.communicate(timeout=60)[1].decode()
        assert p.returncode == (-9 if sig == signal.SIGKILL else 130), err
        assert "Traceback" not in err
        assert enough <= out.read_bytes().count(b"\n") < 40
    assert "same command" in err
    resumed = serving_batch(path, *flags)
    path.with_suffix(".results.jsonl").unlink()
    assert resumed == serving_batch(path, *flags, "--max-running", "16") and len(resumed) == 40


def test_serving_leaves_other_files_alone(tmp_path, capsys):
    """--out that is no file of results, or the requests themselves, is refused and unchanged."""
    path = serving_file(tmp_path / "in.jsonl", serving_requests(1))
    (tmp_path / "notes").write_text("a line\nanother, without an end")
    (tmp_path / "torn").write_text('{"id": 1, "line": 1, "error": ""}\nno JSON')
    for name, words in (
        ("notes", ["notes, line 1", "--out"]),
        ("torn", ["torn, line 2", "--out"]),
        ("in.jsonl", ["in.jsonl", "--out"]),
        ("no/where", ["no/where", "--out"]),
    ):
        out = tmp_path / name
        before = out.read_bytes() if out.exists() else None
        assert G.main(["--batch", str(path), "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and all(word in error for word in words), error
        assert before == (out.read_bytes() if out.exists() else None)
    assert G.main(["--batch", str(tmp_path / "nothing")]) == 2
    assert "--batch" in capsys.readouterr().err


def test_serving_messages_go_through_the_chat_template(tmp_path, capsys):
    """messages == --chat of the same, --system for those without one; a conversation the template
    refuses is that line's error."""
    template = "{% if messages|length > 3 %}{{ raise_exception('too long') }}{% endif %}" + CHATML
    folder = chat_folder(tmp_path, template)
    user = {"role": "user", "content": "hi"}
    asked = [
        {"messages": [user]},
        {"messages": [{"role": "system", "content": "own"}, user]},
        {"messages": [user] * 4},
        {"messages": []},
    ]
    path = serving_file(tmp_path / "in.jsonl", asked)
    flags = ["--checkpoint", str(folder), "--max-new-tokens", "9"]
    results = serving_batch(path, *flags, "--system", "s")
    for line, system in ((1, "s"), (2, "own")):
        alone = through_main(capsys, "hi", "--chat", "--system", system, *flags)
        for name in ("prompt_tokens", "tokens", "text"):
            assert results[line][name] == alone[name]
    assert "too long" in results[3]["error"] and "messages" in results[4]["error"]


def test_serving_reads_ahead_no_more_than_the_engine_needs(tmp_path):
    """Of a long file only a window is in the engine; texts stream, sample by sample, and are the
    results'."""
    path = serving_file(tmp_path / "in.jsonl", [{"prompt_ids": [5, 6], "n": 2}] * 60)
    tokenizer, heard = K.NoTokenizer(97), {}
    service = V.Service(random_model(tiny()), tokenizer, num_blocks=64, max_running=4)
    defaults = P.SamplingParams(max_new_tokens=3)
    requests = V.RequestFile(path, {}, tokenizer, None, None, defaults, 128)
    most, add = [], service.engine.add

    def listening(ids, params, *, id, priority):
        heard[id.line] = ["", ""]

        def show(sample: int, text: str) -> None:
            heard[id.line][sample] += text

        id.show = show
        most.append(service.engine.unfinished)
        return add(ids, params, id=id, priority=priority)

    service.engine.add = listening
    results = list(service.answers(requests))
    assert len(results) == 60 and max(most) <= 4 * 4 + 4
    for r in results:
        assert heard[r["line"]] == [s["text"] for s in r["samples"]] and r["text"]


class ServingTokenizer(K.NoTokenizer):
    """A token's text says what stands before it."""

    def token_bytes(self, id: int, before: int | None) -> bytes:
        return f"{before}>{id} ".encode()


def test_serving_continues_prompts_and_begins_replies(tmp_path):
    """After a prompt, in text or ids, the text goes on where that ends; a reply to messages is a
    text of its own. The smaller priority runs first."""
    asked = [
        {"prompt": "A", "priority": 5},
        {"prompt_ids": [7, 8], "priority": 4},
        {"messages": [{"role": "user", "content": "B"}], "priority": 3},
    ]
    path, tokenizer = serving_file(tmp_path / "in.jsonl", asked), ServingTokenizer(97)
    template = K.ChatTemplate(path, {"default": "{{ messages[0].content }}"}, {})
    service = V.Service(random_model(tiny()), tokenizer, num_blocks=9, max_running=1)
    defaults = P.SamplingParams(temperature=0, max_new_tokens=2, ignore_eos=True)
    requests = V.RequestFile(path, {}, tokenizer, template, None, defaults, 128)
    results = list(service.answers(requests))
    assert [r["line"] for r in results] == [3, 2, 1]
    for r, before in zip(results, (None, 8, ord("A"))):
        a, b = r["tokens"]
        assert r["text"] == f"{before}>{a} {a}>{b} "


def test_serving_rows_that_come_and_go_equal_alone():
    """Sequences that join, leave, are left out of steps, lose their rows or a step draw what each
    draws in a sampler of its own, with every feature."""
    asked = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 3},
        {"top_k": 7, "top_p": 0.8, "seed": 4},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.3},
        {"temperature": 0.0, "repetition_penalty": 2.0, "logit_bias": {5: 3.0}},
        {"min_new_tokens": 9, "logit_bias": {2: 9.0}},
        {"min_new_tokens": 9, "logit_bias": {2: 9.0}, "ignore_eos": True},
        {"min_p": 0.1, "temperature": 1.4, "seed": 2**63 - 1},
    ]
    vocab, rng = 50, random.Random(0)
    table = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(0)).mul(2)
    rows = V.RowSampler(vocab, 3, "cpu", eos=[2, 70])
    rows.part = 2
    seqs = [
        P.Sequence([7, i], 2, P.SamplingParams(**how), index=i % 2) for i, how in enumerate(asked)
    ]
    for _ in range(160):
        step = rng.sample(seqs, rng.randint(1, 3))
        ids = rows(table[[seq.tokens[-1] for seq in step]], step)
        if rng.random() < 0.9:  # else the step was interrupted, and is as if it had not been
            for seq, id in zip(step, ids.tolist()):
                seq.tokens.append(id)
    for seq in seqs:
        how = {name: getattr(seq.params, name) for name in S.Sampling.__dataclass_fields__}
        eos = () if seq.params.ignore_eos else [2]
        alone = S.Sampler(S.Sampling(**how | {"seed": seq.seed}), 1, vocab, eos_ids=eos)
        alone.start([seq.tokens[:2]])
        expected = list(seq.tokens[:2])
        for _ in seq.output:
            expected.append(int(alone(table[expected[-1:]])))
        assert seq.tokens == expected, seq.params
    bad = torch.full((2, vocab), math.nan)
    assert rows(bad, seqs[:2]).tolist() == [-1, -1]
    with pytest.raises(ValueError, match="leave no token"):
        nothing = {i: -math.inf for i in range(vocab) if i != 2}
        rows.check(P.SamplingParams(logit_bias=nothing, min_new_tokens=1))


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 2.0])
def test_serving_arrivals_have_the_rate_and_the_burstiness_asked_for(burstiness):
    """20,000 gaps: mean 1 / rate and coefficient of variation within 5%; at 1 they are a Poisson
    process (as many in a second as vary); same seed, same trace, and another rate stretches it."""
    due = V.arrivals(20_000, 8.0, burstiness, random.Random(1))
    gaps = [b - a for a, b in zip([0.0, *due], due)]
    mean, spread = statistics.fmean(gaps), statistics.pstdev(gaps)
    assert abs(mean * 8 - 1) < 0.05 and abs(spread / mean / burstiness - 1) < 0.05
    assert min(gaps) >= 0 and due == V.arrivals(20_000, 8.0, burstiness, random.Random(1))
    if burstiness == 1:
        counts = [0] * (int(due[-1]) + 1)
        for at in due:
            counts[int(at)] += 1
        assert abs(statistics.pvariance(counts) / statistics.fmean(counts) - 1) < 0.1
    stretched = V.arrivals(20_000, 4.0, burstiness, random.Random(1))
    assert all(math.isclose(2 * a, b) for a, b in zip(due, stretched))


def test_serving_workload_is_a_function_of_its_seed():
    """Lengths within their ranges, both ends met; the shared prefix shared; at another rate the
    same requests come; all at once at infinite rate, evenly at burstiness 0."""
    work = V.Workload(400, input_tokens=(3, 6), output_tokens=(2, 4), shared_prefix=5, seed=9)
    trace = work.trace(97)
    assert {len(a.ids) for a in trace} == {8, 9, 10, 11} and {a.new for a in trace} == {2, 3, 4}
    assert len({tuple(a.ids[:5]) for a in trace}) == 1 < len({tuple(a.ids[5:8]) for a in trace})
    assert {a.due for a in trace} == {0.0} and trace == work.trace(97)
    slow = V.replace(work, rate=2.0, burstiness=0.0).trace(97)
    assert [a.due for a in slow[:3]] == [0.5, 1.0, 1.5]
    assert [(a.ids, a.new) for a in slow] == [(a.ids, a.new) for a in trace]
    assert trace != V.replace(work, seed=10).trace(97)


def test_serving_times_a_request_from_when_it_was_due(monkeypatch):
    """On a clock that stands but for the model (a second a call) and sleep: queue, first token,
    gaps and the whole count from the moment a request was due, though the engine was in a step."""
    now, model = [100.0], random_model(tiny())

    def pass_time(*_):
        now[0] += 1

    model.register_forward_hook(pass_time)
    monkeypatch.setattr(V.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    engine = V.build_engine(model, num_blocks=16, clock=lambda: now[0])
    trace = [V.Arrival(0.5, [5] * 9, 3), V.Arrival(0.75, [6] * 20, 2), V.Arrival(9.0, [7], 1)]
    f = V.replay(engine, trace, P.SamplingParams(temperature=0, ignore_eos=True))
    # the first runs at 0.5, 1.5, 2.5; the second at 1.5, 2.5; the third at 9
    assert (f["requests"], f["prompt_tokens"], f["output_tokens"], f["seconds"]) == (3, 30, 6, 10)
    assert f["output_tokens_per_second"] == 0.6 and f["total_tokens_per_second"] == 3.6
    assert (f["queue_seconds_p50"], f["queue_seconds_p99"]) == (0, 0.75)
    assert (f["ttft_seconds_p50"], f["ttft_seconds_p99"]) == (1, 1.75)
    assert (f["itl_seconds_p50"], f["itl_seconds_p99"]) == (1, 1)
    assert (f["e2e_seconds_p50"], f["e2e_seconds_p99"]) == (2.75, 3)
    assert "first token" in V.facts_table(f)


def test_serving_benchmark_as_a_user_runs_it(capsys):
    """--bench-serving prints a table, with --json one object; the shared prefix is found again."""
    argv = ["generate.py", "--dummy", "draft", "--bench-serving", "12", "--dtype", "fp32"]
    argv += [
        "--rate",
        "200",
        "--output-tokens",
        "2:5",
        "--shared-prefix",
        "64",
        "--kv-blocks",
        "99",
    ]
    done = run(*argv, "--json", "--max-running", "4", "--burstiness", "2")
    facts = json.loads(done.stdout)
    assert done.returncode == 0 and facts["requests"] == 12 and facts["hit_rate"] > 0.3, facts
    assert 24 <= facts["output_tokens"] <= 60 and facts["ttft_seconds_p99"] > 0
    assert G.main(argv[1:]) == 0
    table = capsys.readouterr().out
    assert all(word in table for word in ("tok/s", "p50", "p99", "in the queue", "preemptions"))


def test_serving_draws_as_its_mode_does():
    """--batch draws as a single run does; --bench-serving is greedy unless the flags say how to
    draw."""
    temperature = lambda *argv: G.parse_args(list(argv)).how.temperature
    assert temperature("--batch", "f") == temperature() == G.TEMPERATURE
    assert temperature("--bench-serving") == temperature("--bench-serving", "--seed", "3") == 0
    assert temperature("--bench-serving", "--top-p", "0.9") == G.TEMPERATURE
    assert temperature("--bench-serving", "--temperature", "0.8") == 0.8


BAD_SERVING = [
    (["--batch", "/nowhere"], ["--batch", "/nowhere"]),
    (["--batch", "/"], ["--batch"]),
    (["x", "--batch", "f"], ["--batch", "prompt"]),
    (["--batch", "f", "--json"], ["--batch", "--json"]),
    (["--batch", "f", "--interactive"], ["--batch", "--interactive"]),
    (["--batch", "f", "--bench-serving"], ["--batch", "--bench-serving"]),
    (["--batch", "f", "--attention", "flash"], ["--batch", "--attention"]),
    (["--batch", "f", "--chat"], ["--batch", "--chat"]),
    (["--batch", "f", "--rate", "3"], ["--rate", "--bench-serving"]),
    (["x", "--out", "f"], ["--out", "--batch"]),
    (["x", "--kv-blocks", "9"], ["--kv-blocks", "--batch or --bench-serving"]),
    (["x", "--swap"], ["--swap", "--batch or --bench-serving"]),
    (["--bench-serving", "0"], ["--bench-serving", "0"]),
    (["--bench-serving", "--rate", "0"], ["--rate", "0"]),
    (["--bench-serving", "--burstiness", "-1"], ["--burstiness", "-1"]),
    (["--bench-serving", "--burstiness", "1e-200"], ["--burstiness", "0.01"]),
    (["--bench-serving", "--input-tokens", "9"], ["--input-tokens", "A:B", "9"]),
    (["--bench-serving", "--output-tokens", "9:3"], ["--output-tokens", "9:3"]),
    (["--bench-serving", "--max-new-tokens", "9"], ["--bench-serving", "--max-new-tokens"]),
    (["--bench-serving", "--stop", "x"], ["--bench-serving", "--stop"]),
    (["--bench-serving", "--max-running", "600"], ["--max-running", "600", "512"]),
    (["--bench-serving", "--block-size", "0"], ["--block-size", "0"]),
    (["--bench-serving", "--shared-prefix", "500"], ["--shared-prefix", "692", "512"]),
    (["--bench-serving", "--top-p", "0"], ["--top-p"]),
    (["--bench-serving", "--checkpoint", str(MOE), "--compile"], ["--compile", "experts"]),
]


@pytest.mark.parametrize("argv, words", BAD_SERVING, ids=lambda v: " ".join(v)[:40])
def test_bad_flags_of_serving(argv, words, capsys):
    """One clear line, exit code 2."""
    assert G.main(argv) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and all(word in error[0] for word in words), error


# --------------------------------------------------------------------------------------------------
# speculative.py: the rule, trees, copies, how many
# --------------------------------------------------------------------------------------------------


# A right rule stays above SPEC_RIGHT but for once in a million seeds, and the seeds are fixed;
# a wrong one must fall below SPEC_WRONG, so that no verdict hangs on luck.
SPEC_RIGHT, SPEC_WRONG = 1e-6, 1e-12


def _spec_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _spec_chi(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """The p-value of Pearson's chi-square; 0.0 where something impossible happened."""
    counts, probs = counts.double().flatten(), probs.double().flatten()
    assert counts.shape == probs.shape and abs(probs.sum().item() - 1) < 1e-6
    if counts[probs == 0].any():
        return 0.0
    expected, order = counts.sum() * probs, probs.argsort(descending=True)
    counts, expected = counts[order], expected[order]
    # Cells that expect fewer than 5 go together with the smallest of the others.
    cells = int((expected >= 5).sum())
    assert cells > 0
    counts = torch.cat([counts[: cells - 1], counts[cells - 1 :].sum()[None]])
    expected = torch.cat([expected[: cells - 1], expected[cells - 1 :].sum()[None]])
    if cells == 1:
        return 1.0
    chi = ((counts - expected) ** 2 / expected).sum()
    half = torch.tensor((cells - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(half, chi / 2).item()


def _spec_draw(probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """(B, V) -> (B,), by the inverse of the sum in float64: a token of weight 0 never comes out."""
    total = probs.double().cumsum(-1)
    point = torch.rand(len(probs), 1, generator=generator, dtype=torch.float64) * total[:, -1:]
    return (point >= total).sum(-1).clamp(max=probs.shape[-1] - 1)


def _spec_tables(
    v: int, depth: int, seed: int, keep: int | None = None, sharp: float = 1.2
) -> list[torch.Tensor]:
    """p(next | prefix) for every prefix of 0..depth tokens: (v ** t, v) each; keep: top-k."""
    g, tables = _spec_generator(seed), []
    for t in range(depth + 1):
        logits = torch.randn(v**t, v, generator=g, dtype=torch.float64) * sharp
        if keep is not None:
            low = logits.topk(keep, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < low, -math.inf)
        tables.append(logits.softmax(-1))
    return tables


def _spec_joint(p: list[torch.Tensor], length: int) -> torch.Tensor:
    """The exact probability of every sequence of that length, in the order of its code."""
    joint = p[0].flatten()
    for t in range(1, length):
        joint = (joint[:, None] * p[t]).flatten()
    return joint


def _spec_code(tokens: torch.Tensor, v: int) -> torch.Tensor:
    code = torch.zeros(len(tokens), dtype=torch.long)
    for i in range(tokens.shape[1]):
        code = code * v + tokens[:, i]
    return code


def _spec_valid(rest: torch.Tensor, tol: float = 1e-5) -> None:
    assert rest.isfinite().all() and (rest >= 0).all()
    assert (rest.double().sum(-1) - 1).abs().max() < tol


def _spec_sequences_fit(rule, p, q, k: int, count: int, seed: int) -> float:
    """Sequences of 3 tokens (or K + 1) made by repeated calls of a rule: their joint's p-value.

    rule(target (B,K+1,V), draft (B,K,V), tokens (B,K), uniform (B,K)) -> n (B,), rest (B,V).
    """
    g, v, length = _spec_generator(seed), p[0].shape[-1], max(3, k + 1)
    sequences = torch.zeros(count, length + k + 1, dtype=torch.long)
    made = torch.zeros(count, dtype=torch.long)
    for start in range(length):  # rows are at different lengths: each length is one batch
        rows = (made == start).nonzero()[:, 0]
        if not len(rows):
            continue
        code = _spec_code(sequences[rows, :start], v)
        target, draft, tokens = [p[start][code]], [], []
        for i in range(k):
            draft.append(q[start + i][code])
            tokens.append(_spec_draw(draft[-1], g))
            code = code * v + tokens[-1]
            target.append(p[start + i + 1][code])
        tokens = torch.stack(tokens, 1)
        uniform = torch.rand(len(rows), k, generator=g)
        target, draft = torch.stack(target, 1).float(), torch.stack(draft, 1).float()
        n, rest = rule(target, draft, tokens, uniform)
        assert n.shape == (len(rows),) and (n >= 0).all() and (n <= k).all()
        out = torch.cat([tokens, tokens[:, :1]], 1)
        out.scatter_(1, n.long()[:, None], _spec_draw(rest, g)[:, None])
        sequences[rows, start : start + k + 1] = out
        made[rows] = start + n + 1
    assert (made >= length).all()
    counts = torch.bincount(_spec_code(sequences[:, :length], v), minlength=v**length)
    return _spec_chi(counts, _spec_joint(p, length))


def _spec_rule(target, draft, tokens, uniform, wrong: str = ""):
    """Leviathan's rule in the test's own words, and what people write instead of it."""
    k, rows = tokens.shape[1], torch.arange(len(tokens))
    shift = 1 if wrong == "shifted" else 0
    p = target[:, shift : k + shift].gather(-1, tokens[..., None])[..., 0]
    q = draft.gather(-1, tokens[..., None])[..., 0]
    ratio = {"inverse": q / p, "target alone": p}.get(wrong, p / q)
    n = (uniform < ratio).long().cumprod(1).sum(1)
    at = n.clamp(max=k - 1) if wrong == "bonus from the row before" else n
    p_n = target[rows, at]
    q_n = torch.cat([draft, torch.zeros_like(draft[:, :1])], 1)[rows, at]
    if wrong == "from p":
        return n, p_n
    rest = (p_n - q_n).abs() if wrong == "absolute" else (p_n - q_n).clamp(min=0)
    empty = rest.sum(-1, keepdim=True) == 0
    rest = torch.where(empty, p_n, rest)
    return n, rest / rest.sum(-1, keepdim=True)


def _spec_accept(target, draft, tokens, uniform):
    n, rest = E.accept(target, draft, tokens, uniform)
    _spec_valid(rest)
    return n, rest


def _spec_one_by_one(generator):
    """speculative_sample as a rule: its last token is a certain draw."""

    def rule(target, draft, tokens, uniform):
        n, last = [], []
        for p, q, d in zip(target, draft, tokens, strict=True):
            out = E.speculative_sample(p, q, d, generator=generator)
            assert out.dtype == torch.long and out.ndim == 1 and 1 <= len(out) <= len(d) + 1
            assert torch.equal(out[:-1], d[: len(out) - 1])
            n.append(len(out) - 1)
            last.append(out[-1])
        rest = torch.nn.functional.one_hot(torch.stack(last), target.shape[-1]).float()
        return torch.tensor(n), rest

    return rule


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("keep_p, keep_q", [(None, None), (3, 2), (2, 3), (1, 4), (4, 1)])
def test_spec_accept_leaves_the_distribution_as_it_is(k, keep_p, keep_q):
    """Sequences of three tokens follow the target exactly, whatever is zero in p and in q."""
    p, q = _spec_tables(4, 3 + k, 1, keep_p), _spec_tables(4, 3 + k, 2, keep_q)
    assert _spec_sequences_fit(_spec_accept, p, q, k, 40_000, 3) > SPEC_RIGHT


@pytest.mark.parametrize("k", [1, 2, 3])
def test_spec_accept_many_samples(k):
    """The same with 100,000 sequences over five tokens and a sharp drafter."""
    p, q = _spec_tables(5, 3 + k, 11), _spec_tables(5, 3 + k, 12, sharp=2.0)
    assert _spec_sequences_fit(_spec_accept, p, q, k, 100_000, 13) > SPEC_RIGHT


@pytest.mark.parametrize("keep, k", [(None, 1), (2, 2), (None, 3)])
def test_spec_sample_leaves_the_distribution_as_it_is(k, keep):
    """speculative_sample, called again and again, makes sequences of the target's distribution."""
    p, q = _spec_tables(4, 3 + k, 21, keep), _spec_tables(4, 3 + k, 22)
    rule = _spec_one_by_one(_spec_generator(23))
    assert _spec_sequences_fit(rule, p, q, k, 3_500, 24) > SPEC_RIGHT


@pytest.mark.parametrize("k", [1, 2, 3])
def test_spec_wrong_rules_are_noticed(k):
    """The check passes the rule itself and none of the six that look like it."""
    p, q = _spec_tables(4, 3 + k, 1), _spec_tables(4, 3 + k, 2)
    assert _spec_sequences_fit(_spec_rule, p, q, k, 40_000, 3) > SPEC_RIGHT
    wrongs = ["from p", "inverse", "target alone", "absolute", "bonus from the row before"]
    for wrong in [*wrongs, "shifted"]:

        def rule(*args, wrong=wrong):
            return _spec_rule(*args, wrong=wrong)

        assert _spec_sequences_fit(rule, p, q, k, 40_000, 3) < SPEC_WRONG, wrong


def _spec_random_probs(*shape, seed, sharp=1.5, dtype=torch.float32):
    logits = torch.randn(*shape, generator=_spec_generator(seed), dtype=torch.float64) * sharp
    return logits.softmax(-1).to(dtype)


def _spec_problem(b, k, v, seed, dtype=torch.float32):
    g = _spec_generator(seed)
    target = _spec_random_probs(b, k + 1, v, seed=seed + 1, dtype=dtype)
    # A drafter near the target, so that long prefixes are accepted and short ones too.
    other = _spec_random_probs(b, k, v, seed=seed + 2, dtype=dtype)
    draft = (0.7 * target[:, :k] + 0.3 * other).to(dtype)
    flat = draft.reshape(-1, v)
    tokens = _spec_draw(flat, g).view(b, k) if k else torch.zeros(b, 0, dtype=torch.long)
    return target, draft, tokens, torch.rand(b, k, generator=g)


def _spec_slow_accept(target, draft, tokens, uniform, length):
    """One row, in Python floats: (n, rest)."""
    target = target.double().tolist()
    draft = None if draft is None else draft.double().tolist()
    for i in range(length):
        d, p = int(tokens[i]), target[i]
        q = [float(j == d) for j in range(len(p))] if draft is None else draft[i]
        if p[d] > 0 and (q[d] == 0 or float(uniform[i]) < p[d] / q[d]):
            continue
        rest = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
        return i, [x / sum(rest) for x in rest]
    return length, [x / sum(target[length]) for x in target[length]]


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_spec_accept_equals_a_loop(certain, dtype):
    """accept against the rule in Python, row by row, with and without the drafter's q."""
    seen = Counter()
    for seed, (k, v) in enumerate([(1, 2), (2, 5), (4, 7), (5, 3), (8, 40)]):
        target, draft, tokens, uniform = _spec_problem(60, k, v, 100 * seed, dtype)
        lengths = torch.randint(0, k + 1, (60,), generator=_spec_generator(seed))
        draft = None if certain else draft
        n, rest = E.accept(target, draft, tokens, uniform, lengths)
        assert n.shape == (60,) and rest.shape == (60, v) and not n.dtype.is_floating_point
        _spec_valid(rest)
        for r in range(60):
            q = None if certain else draft[r]
            slow = _spec_slow_accept(target[r], q, tokens[r], uniform[r], int(lengths[r]))
            assert n[r] == slow[0]
            expected = torch.tensor(slow[1], dtype=torch.float64)
            torch.testing.assert_close(rest[r].double(), expected, atol=2e-5, rtol=1e-4)
            seen[("all" if slow[0] == lengths[r] else "some") if slow[0] else "none"] += 1
    assert min(seen[x] for x in ("all", "some", "none")) > 10


@pytest.mark.parametrize("certain", [False, True])
def test_spec_what_is_beyond_a_length_counts_for_nothing(certain):
    """A row of a batch equals the row alone, cut to its length, with NaN in all that is beyond."""
    b, k, v = 48, 5, 6
    target, draft, tokens, uniform = _spec_problem(b, k, v, 7)
    lengths = torch.arange(b) % (k + 1)
    dirty = [x.clone() for x in (target, draft, tokens, uniform)]
    for r, cut in enumerate(lengths.tolist()):
        dirty[0][r, cut + 1 :] = math.nan
        dirty[1][r, cut:] = math.nan
        dirty[2][r, cut:] = (v - 1) * (r % 2)
        dirty[3][r, cut:] = math.nan if r % 3 else 0.0
    q = None if certain else dirty[1]
    n, rest = E.accept(dirty[0], q, dirty[2], dirty[3], lengths)
    _spec_valid(rest)
    full = 0
    for r, cut in enumerate(lengths.tolist()):
        q = None if certain else draft[r : r + 1, :cut]
        row = slice(r, r + 1)
        one = E.accept(target[row, : cut + 1], q, tokens[row, :cut], uniform[row, :cut])
        assert n[r] == one[0][0]
        torch.testing.assert_close(rest[r], one[1][0], atol=1e-6, rtol=1e-5)
        full += int(n[r] == cut)
        if n[r] == cut:
            torch.testing.assert_close(rest[r], target[r, cut], atol=1e-6, rtol=1e-5)
    assert 8 < full < b
    whole = torch.full((b,), k)
    q = None if certain else draft
    a, c = E.accept(target, q, tokens, uniform), E.accept(target, q, tokens, uniform, whole)
    assert torch.equal(a[0], c[0]) and torch.equal(a[1], c[1])


def test_spec_a_length_of_zero_gives_the_first_row():
    """lengths 0 is plain decoding: nothing accepted though u = 0, rest is p_0 itself."""
    target, draft, tokens, uniform = _spec_problem(9, 3, 5, 3)
    lengths = torch.zeros(9, dtype=torch.long)
    for q in (draft, None, torch.full_like(draft, math.nan)):
        n, rest = E.accept(target, q, tokens, uniform * 0, lengths)
        assert not n.any()
        torch.testing.assert_close(rest, target[:, 0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("a", [0.0, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_spec_mean_number_accepted(a, k):
    """With acceptance a = sum(min(p, q)) a step makes (1 - a^(k+1)) / (1 - a) tokens."""
    b, g = 30_000, _spec_generator(31)
    # p and q share the mass a on tokens 0 and 1 and stand apart in the rest.
    p = torch.tensor([0.4 * a, 0.6 * a, 1 - a, 0.0])
    q = torch.tensor([0.4 * a, 0.6 * a, 0.0, 1 - a])
    draft = q.expand(b, k, 4)
    tokens = _spec_draw(draft.reshape(-1, 4), g).view(b, k)
    n, rest = E.accept(p.expand(b, k + 1, 4), draft, tokens, torch.rand(b, k, generator=g))
    _spec_valid(rest)
    expected = k if a == 1 else (1 - a ** (k + 1)) / (1 - a) - 1
    n = n.double()
    error = (n.std() / math.sqrt(b)).item()
    assert abs(n.mean().item() - expected) <= 4 * error + 1e-12
    assert (error > 0) == (0 < a < 1)
    assert (n.mean() < k) == (a < 1) and (n.mean() > 0) == (a > 0)


def test_spec_overlap_is_the_acceptance():
    """Any p and q: the mean accepted of one token is sum(min(p, q)); from p alone it is not."""
    b, g = 50_000, _spec_generator(41)
    for seed in range(4):
        p, q = _spec_random_probs(2, 9, seed=seed, sharp=1.5)
        tokens = _spec_draw(q.expand(b, 9), g)[:, None]
        n, _ = E.accept(p.expand(b, 2, 9), q.expand(b, 1, 9), tokens, torch.rand(b, 1, generator=g))
        a = torch.minimum(p, q).sum().item()
        assert 0.1 < a < 0.9
        assert abs(n.double().mean().item() - a) < 4 * math.sqrt(a * (1 - a) / b)
        n, _ = E.accept(p.expand(b, 2, 9), None, tokens, torch.rand(b, 1, generator=g))
        a = (p.double() * q.double()).sum().item()
        assert abs(n.double().mean().item() - a) < 4 * math.sqrt(a * (1 - a) / b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_spec_equal_distributions_are_all_accepted(dtype):
    """p == q: every token is accepted even at the largest u below 1, and rest is the next p."""
    for v in (1, 2, 7, 1000):
        target = _spec_random_probs(16, 5, v, seed=v, dtype=dtype)
        draft = target[:, :4].clone()
        tokens = _spec_draw(draft.reshape(-1, v), _spec_generator(v)).view(16, 4)
        uniform = torch.full((16, 4), 1 - 2.0**-24)
        n, rest = E.accept(target, draft, tokens, uniform)
        assert (n == 4).all()
        _spec_valid(rest, 1e-5 if dtype != torch.bfloat16 else 2e-2)
        for r in range(16):
            generator = _spec_generator(r)
            out = E.speculative_sample(target[r], draft[r], tokens[r], generator=generator)
            assert torch.equal(out[:4], tokens[r]) and out.shape == (5,) and 0 <= out[4] < v


def test_spec_an_empty_residual_still_gives_a_distribution():
    """p a hair below q everywhere (rounding) and rejected: rest is finite, sums to 1, is p's."""
    q = _spec_random_probs(32, 1, 6, seed=5)
    q[:, :, 4] = 0
    p = torch.cat([q * (1 - 1e-4), q], 1)
    tokens = q[:, 0].argmax(-1, keepdim=True)
    n, rest = E.accept(p, q, tokens, torch.full((32, 1), 1 - 2.0**-24))
    assert not n.any()  # else the residual was never asked for
    _spec_valid(rest)
    assert not rest[:, 4].any()
    for r in range(32):
        for seed in range(4):
            out = E.speculative_sample(p[r], q[r], tokens[r], generator=_spec_generator(seed))
            assert len(out) in (1, 2) and ((out >= 0) & (out < 6) & (out != 4)).all()


def test_spec_probabilities_too_small_for_products():
    """Ratios of tiny numbers are ratios: 1e-44 / 1e-44 is 1, and nothing is flushed to zero."""
    for tiny, most in [(1e-30, 1 - 2.0**-24), (1e-37, 1 - 2.0**-24), (1e-44, 0.6)]:
        p = torch.tensor([[1.0, 0.0, tiny], [0.25, 0.5, 0.25]]).expand(3, 2, 3)
        q = torch.tensor([[0.0, 1.0, tiny]]).expand(3, 1, 3)
        tokens = torch.full((3, 1), 2)
        uniform = torch.tensor([[0.0], [0.5], [most]])
        n, rest = E.accept(p, q, tokens, uniform)
        assert (n == 1).all(), tiny
        torch.testing.assert_close(rest, p[:, 1])
    # A long row of tiny ones: the product of all ratios would underflow, each alone does not.
    k, p = 40, torch.tensor([1e-20, 1 - 1e-20])
    target, draft = p.expand(1, k + 1, 2), torch.tensor([1e-20, 1.0]).expand(1, k, 2)
    n, rest = E.accept(target, draft, torch.zeros(1, k, dtype=torch.long), torch.full((1, k), 0.99))
    assert n.item() == k
    _spec_valid(rest)
    # A half is a half also at 1e-40.
    p = torch.tensor([[0.0, 1.0, 1e-40], [1.0, 0.0, 0.0]]).expand(2, 2, 3)
    q = torch.tensor([[1.0, 0.0, 2e-40]]).expand(2, 1, 3)
    n, rest = E.accept(p, q, torch.full((2, 1), 2), torch.tensor([[0.49], [0.51]]))
    assert n.tolist() == [1, 0]
    assert rest.tolist() == [[1, 0, 0], [0, 1, 0]]


def test_spec_a_token_without_probability_never_comes_out():
    """p(d) = 0 is rejected even at u = 0 and q(d) = 0; q(d) = 0 < p(d) is accepted."""
    p = torch.tensor([[0.0, 0.5, 0.5, 0.0]] * 2).expand(4, 2, 4)
    q = torch.tensor([[0.5, 0.5, 0.0, 0.0]]).expand(4, 1, 4)
    n, rest = E.accept(p, q, torch.tensor([[0], [1], [2], [3]]), torch.zeros(4, 1))
    assert n.tolist() == [0, 1, 1, 0]
    _spec_valid(rest)
    assert rest[0].tolist() == [0, 0, 1, 0]
    assert not rest[:, 0].any() and not rest[:, 3].any()
    n, rest = E.accept(p, None, torch.tensor([[0], [1], [2], [3]]), torch.zeros(4, 1))
    assert n.tolist() == [0, 1, 1, 0]
    assert not rest[:, 0].any() and not rest[:, 3].any()
    n, rest = E.accept(p, None, torch.tensor([[0], [1], [2], [3]]), torch.full((4, 1), 0.75))
    assert not n.any()
    assert rest.tolist() == [[0, 0.5, 0.5, 0], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0.5, 0.5, 0]]
    for seed in range(200):
        g = _spec_generator(seed)
        tokens = torch.tensor([seed % 2])
        out = E.speculative_sample(p[0], q[0], tokens, generator=g)
        assert ((out == 1) | (out == 2)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_spec_greedy_is_one_hot(dtype):
    """One-hot p: accepted iff it is the argmax, for every u, and rest is the argmax."""
    b, k, v, g = 64, 4, 3, _spec_generator(6)
    best = torch.randint(v, (b, k + 1), generator=g)
    target = torch.nn.functional.one_hot(best, v).to(dtype)
    tokens = torch.where(torch.rand(b, k, generator=g) < 0.7, best[:, :k], (best[:, :k] + 1) % v)
    expected = [next((i for i in range(k) if tokens[r, i] != best[r, i]), k) for r in range(b)]
    assert set(expected) == set(range(k + 1))
    for draft in (None, _spec_random_probs(b, k, v, seed=8, dtype=dtype)):
        for u in (0.0, 0.5, 1 - 2.0**-24):
            n, rest = E.accept(target, draft, tokens, torch.full((b, k), u))
            assert n.tolist() == expected
            assert torch.equal(rest.argmax(-1), best[torch.arange(b), n])
            assert ((rest == 0) | (rest == 1)).all()
    for r in range(b):
        q = _spec_random_probs(k, v, seed=r, dtype=dtype)
        out = E.speculative_sample(target[r], q, tokens[r], generator=_spec_generator(r))
        assert out.tolist() == best[r, : expected[r] + 1].tolist()


def test_spec_nothing_drafted():
    """K = 0: accept gives p_0, and speculative_sample draws one token from it, by chi-square."""
    p = _spec_random_probs(1, 5, seed=3)
    none = torch.zeros(0, dtype=torch.long)
    for q in (None, torch.zeros(1, 0, 5)):
        n, rest = E.accept(p[None], q, none[None], torch.zeros(1, 0))
        assert n.tolist() == [0]
        torch.testing.assert_close(rest, p)
        n, rest = E.accept(p[None], q, none[None], torch.zeros(1, 0), torch.tensor([0]))
        torch.testing.assert_close(rest, p)
    g, counts = _spec_generator(4), torch.zeros(5)
    for _ in range(4000):
        out = E.speculative_sample(p, torch.zeros(0, 5), none, generator=g)
        assert out.shape == (1,)
        counts[out] += 1
    assert _spec_chi(counts, p[0].double() / p[0].double().sum()) > SPEC_RIGHT
    uniform = torch.full((5,), 0.2)
    assert _spec_chi(counts, uniform) < SPEC_WRONG  # the p above is far from it
    out = E.speculative_sample(torch.ones(1, 1), torch.zeros(0, 1), none)
    assert out.tolist() == [0]


def test_spec_vocabulary_of_one():
    """V = 1: all is accepted and the one token is all there is."""
    zeros = torch.zeros(3, 4, dtype=torch.long)
    for q in (torch.ones(3, 4, 1), None):
        n, rest = E.accept(torch.ones(3, 5, 1), q, zeros, torch.full((3, 4), 0.999))
        assert n.tolist() == [4] * 3 and rest.tolist() == [[1.0]] * 3
    out = E.speculative_sample(torch.ones(5, 1), torch.ones(4, 1), zeros[0])
    assert out.tolist() == [0] * 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_spec_other_dtypes_keep_the_distribution(dtype):
    """Probabilities that every dtype holds exactly give the same verdicts as float32's."""
    b, g = 20_000, _spec_generator(9)
    p = torch.tensor([[16, 8, 40, 0, 0], [8, 8, 16, 16, 16], [1, 60, 1, 1, 1]]) / 64
    q = torch.tensor([[32, 8, 8, 8, 8], [16, 16, 16, 8, 8]]) / 64
    target, draft = p.expand(b, 3, 5), q.expand(b, 2, 5)
    tokens = _spec_draw(draft.reshape(-1, 5), g).view(b, 2)
    uniform = torch.rand(b, 2, generator=g)
    n, rest = E.accept(target, draft, tokens, uniform)
    m, other = E.accept(target.to(dtype), draft.to(dtype), tokens, uniform)
    # u < p / q in the half's own precision may differ at its edge, and nowhere else.
    assert (n != m).double().mean() < 5e-3
    same = n == m
    torch.testing.assert_close(other[same].float(), rest[same], atol=5e-3, rtol=1e-2)
    first = torch.where(m > 0, tokens[:, 0], _spec_draw(other, g))
    assert _spec_chi(torch.bincount(first, minlength=5), p[0]) > SPEC_RIGHT
    counts = torch.zeros(5)
    for r in range(1500):
        out = E.speculative_sample(p.to(dtype), q.to(dtype), tokens[r], generator=g)
        counts[out[0]] += 1
    assert _spec_chi(counts, p[0]) > SPEC_RIGHT
    assert _spec_chi(counts, q[0]) < SPEC_WRONG


@pytest.mark.parametrize("bad", [math.nan, 0.0])
@pytest.mark.parametrize("certain", [False, True])
def test_spec_a_row_with_nothing_to_draw(bad, certain):
    """n stops before a NaN or zero row, rest says so there; other rows do not notice."""
    b, k, v = 40, 4, 5
    target, draft, tokens, uniform = _spec_problem(b, k, v, 17)
    q = None if certain else draft
    if certain:
        uniform = uniform * 0.3
    n, rest = E.accept(target, q, tokens, uniform)
    broken, stops = target.clone(), 0
    for r in range(0, b, 2):
        broken[r, r // 2 % (k + 1)] = bad
    m, other = E.accept(broken, q, tokens, uniform)
    for r in range(b):
        at = r // 2 % (k + 1) if r % 2 == 0 else k + 1
        if n[r] < at:  # it ended before the broken row, which so counts for nothing
            assert m[r] == n[r]
            torch.testing.assert_close(other[r], rest[r])
        else:
            assert m[r] == at
            assert not other[r].nan_to_num(0.0).any()
            stops += 1
    assert stops > 8


@pytest.mark.parametrize("bad", [math.nan, 0.0])
def test_spec_sample_never_draws_from_nothing(bad):
    """Before a row of NaN or zeros the tokens stand; from it no token is made up."""
    p = torch.eye(3)[[0, 1, 2]].clone()
    q, tokens = torch.eye(3)[[0, 1]], torch.tensor([0, 1])
    p[2] = bad
    try:
        out = E.speculative_sample(p, q, tokens, generator=_spec_generator(0)).tolist()
    except (ValueError, RuntimeError):
        out = [0, 1]
    assert out in ([0, 1], [0, 1, -1])
    p[0], p[1] = torch.tensor([0.0, 0.0, 1.0]), bad  # the first is rejected: the others are beyond
    out = E.speculative_sample(p, q, tokens, generator=_spec_generator(0))
    assert out.tolist() == [2]


def test_spec_generator_decides_alone():
    """Same seed, same tokens; another seed, others; the global RNGs are left alone."""
    target, draft, tokens, uniform = _spec_problem(30, 4, 50, 19)

    def run(seed):
        g = _spec_generator(seed)
        rows = zip(target, draft, tokens, strict=True)
        return [E.speculative_sample(*row, generator=g).tolist() for row in rows]

    before, python = torch.get_rng_state(), random.getstate()
    first = run(1)
    assert run(1) == first
    assert len({str(run(seed)) for seed in range(1, 6)}) == 5
    E.accept(target, draft, tokens, uniform)
    E.matching(tokens[:, [0, 1, 2, 3, 0]], tokens)
    tree = E.Tree.chain(4)
    E.accept_tree(target, None, tokens, uniform, tree)
    E.NGram()([1, 2, 1, 2], 3)
    assert torch.equal(torch.get_rng_state(), before) and random.getstate() == python
    g = _spec_generator(1)
    again = [
        E.speculative_sample(target[0], draft[0], tokens[0], generator=g).tolist()
        for _ in range(20)
    ]
    assert len({str(x) for x in again}) > 1  # the generator moves on
    torch.manual_seed(5)
    one = [E.speculative_sample(target[0], draft[0], tokens[0]).tolist() for _ in range(9)]
    torch.manual_seed(5)
    assert one == [E.speculative_sample(target[0], draft[0], tokens[0]).tolist() for _ in range(9)]


def test_spec_inputs_stay_as_they_were():
    """Nothing is written into the inputs, also strided and under inference_mode and no_grad."""
    target, draft, tokens, uniform = _spec_problem(6, 3, 5, 23)
    lengths = torch.tensor([3, 2, 1, 0, 3, 3])
    tree = E.Tree((-1, -1, 0))
    nodes, drawn = tokens, torch.cat([tokens, tokens[:, :1]], 1)
    every = [target, draft, tokens, uniform, lengths, drawn]
    copies = [x.clone() for x in every]
    plain = E.accept(target, draft, tokens, uniform, lengths)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            inside = E.accept(target, draft, tokens, uniform, lengths)
            assert torch.equal(inside[0], plain[0]) and torch.equal(inside[1], plain[1])
            E.accept(target, None, tokens, uniform)
            E.matching(drawn, tokens, lengths)
            for q in (None, target):
                E.accept_tree(target, q, nodes, uniform, tree)
            E.follow_tree(drawn, nodes, tree)
            g = _spec_generator(2)
            out = E.speculative_sample(target[0], draft[0], tokens[0], generator=g)
            assert 1 <= len(out) <= 4
            made = _spec_problem(2, 3, 5, 29)  # tensors born in the mode
            E.speculative_sample(made[0][0], made[1][0], made[2][0], generator=g)
    for x, before in zip(every, copies, strict=True):
        assert torch.equal(x, before)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in every[:4]]
    assert not strided[0].is_contiguous()
    other = E.accept(*strided, lengths)
    assert torch.equal(other[0], plain[0])
    torch.testing.assert_close(other[1], plain[1])


def test_spec_shapes_that_do_not_fit_are_named():
    """speculative_sample says what does not fit; the batched rules do not broadcast in silence."""
    p, q, d = torch.full((4, 5), 0.2), torch.full((3, 5), 0.2), torch.tensor([0, 1, 2])
    assert 1 <= len(E.speculative_sample(p, q, d)) <= 4
    wrong = [
        (p[:3], q, d),  # no row for the token after the last
        (torch.full((5, 5), 0.2), q, d),
        (p, q[:2], d),
        (p, q[:1], d),  # would broadcast
        (p, q, d[:2]),
        (p, q, d[:1]),
        (p, torch.full((3, 4), 0.25), d),
        (p, torch.full((3, 1), 1.0), d),
        (p[:, :1], q, d),
        (p[0], q, d),
        (p[None], q[None], d[None]),
        (p, q, d[:, None]),
        (p, q[0], d),
    ]
    for case in wrong:
        with pytest.raises(ValueError, match="(?i)target|draft|token") as error:
            E.speculative_sample(*case)
        assert len(str(error.value)) > 15
    b = [x[None].expand(2, *x.shape) for x in (p, q, d)]
    u = torch.rand(2, 3, generator=_spec_generator(0))
    E.accept(*b, u)
    batched = [
        (b[0][:, :3], b[1], b[2], u),
        (b[0], b[1][:, :1], b[2], u),
        (b[0], b[1][..., :4], b[2], u),
        (b[0], b[1], b[2][:, :2], u),
        (b[0], b[1], b[2], u[:, :2]),
        (b[0][:1], b[1], b[2], u),
    ]
    for case in batched:
        with pytest.raises((ValueError, RuntimeError, IndexError)):
            E.accept(*case)


@pytest.mark.parametrize("v", [2, 5])
def test_spec_matching_equals_a_loop(v):
    """The number of leading tokens that are the draft's, also with lengths and K = 0."""
    g, seen = _spec_generator(v), Counter()
    for k in (1, 2, 4, 7):
        for _ in range(4):
            drawn = torch.randint(v, (40, k + 1), generator=g)
            tokens = torch.randint(v, (40, k), generator=g)
            tokens = torch.where(torch.rand(40, k, generator=g) < 0.6, drawn[:, :k], tokens)
            drawn[torch.rand(40, k + 1, generator=g) < 0.05] = -1  # nothing to draw
            lengths = torch.randint(k + 1, (40,), generator=g)
            for cut in (None, lengths):
                n = E.matching(drawn, tokens) if cut is None else E.matching(drawn, tokens, cut)
                assert n.shape == (40,) and not n.dtype.is_floating_point
                for r in range(40):
                    most = k if cut is None else int(cut[r])
                    slow = 0
                    while slow < most and drawn[r, slow] == tokens[r, slow]:
                        slow += 1
                    assert n[r] == slow
                    seen["end" if slow == most else "middle" if slow else "none"] += 1
    assert min(seen[x] for x in ("end", "middle", "none")) > 50
    none = torch.zeros(3, 0, dtype=torch.long)
    assert E.matching(torch.zeros(3, 1, dtype=torch.long), none).tolist() == [0] * 3


def test_spec_matching_leaves_the_distribution_as_it_is():
    """Tokens are drawn as without a draft: the draft decides only how far a step goes."""
    p, v = _spec_tables(4, 4, 51), 4
    g, b = _spec_generator(52), 40_000
    code = torch.zeros(b, dtype=torch.long)
    drafts, drawn = [], []
    for t in range(3):
        drawn.append(_spec_draw(p[t][code], g))
        drafts.append(p[t][code].argmax(-1))
        code = code * v + drafts[-1]  # the target saw the drafts, not what it drew
    tokens, drawn = torch.stack(drafts[:2], 1), torch.stack(drawn, 1)
    n = E.matching(drawn, tokens)
    assert set(n.tolist()) == {0, 1, 2}
    pairs = drawn[n >= 1]  # the first two tokens of the rows that got as far
    first = int(p[0].argmax())
    assert (pairs[:, 0] == first).all()
    counts = torch.bincount(pairs[:, 1], minlength=v)
    assert _spec_chi(counts, p[1][first]) > SPEC_RIGHT
    share = (n >= 1).double().mean().item()
    a = p[0].max().item()
    assert abs(share - a) < 4 * math.sqrt(a * (1 - a) / b)


def _spec_tree(rng: random.Random, nodes: int, fanout: int = 3, depth: int = 9) -> tuple[int, ...]:
    """Parents of a random tree, breadth first: no parent comes before an earlier node's."""
    parents: list[int] = []
    depths = {-1: 0}
    for i in range(nodes):
        low = parents[-1] if parents else -1
        fits = [p for p in range(low, i) if parents.count(p) < fanout and depths[p] < depth]
        if not fits:
            break
        # The nearest parents are likelier, so that the levels fill.
        parents.append(fits[min(int(rng.expovariate(0.8)), len(fits) - 1)])
        depths[i] = depths[parents[-1]] + 1
    return tuple(parents)


def _spec_ancestors(parents, i: int) -> list[int]:
    """Node i (-1 the root), its parent and so on up to the root."""
    out = [i]
    while out[-1] >= 0:
        out.append(parents[out[-1]])
    return out


def _spec_mask(tree) -> torch.Tensor:
    return tree.mask() if callable(tree.mask) else tree.mask


def test_spec_tree_properties():
    """depths, ranks and mask of random trees against their definitions."""
    rng, shapes = random.Random(1), set()
    for _ in range(300):
        parents = _spec_tree(rng, rng.randint(1, 14), rng.randint(1, 4), rng.randint(1, 6))
        tree = E.Tree(parents)
        shapes.add(parents)
        n = len(parents)
        assert tree.parents == parents
        assert tuple(tree.depths) == tuple(len(_spec_ancestors(parents, i)) - 1 for i in range(n))
        assert tuple(tree.ranks) == tuple(parents[:i].count(parents[i]) for i in range(n))
        mask = _spec_mask(tree)
        assert mask.shape == (n + 1, n + 1) and mask.dtype == torch.bool
        slow = [
            [j - 1 in _spec_ancestors(parents, i - 1) for j in range(n + 1)] for i in range(n + 1)
        ]
        assert mask.tolist() == slow
    assert len(shapes) > 100
    assert max(len(x) for x in shapes) > 10


def test_spec_tree_is_checked():
    """A parent that is not there yet, below -1 or out of level order is a ValueError."""
    assert E.Tree((-1, -1, 0, 0, 1, 2)).depths == (1, 1, 2, 2, 2, 3)
    wrong = [
        (0,),  # its own parent
        (-2,),
        (-1, 1),
        (-1, 2, 0),
        (-1, -2),
        (5, -1),
        (-1, 0, -1),  # the root's second child after a grandchild
        (-1, -1, 0, 2, 1),
        (-1, 0, 1, 0),
        (1, -1),
    ]
    for parents in wrong:
        with pytest.raises(ValueError) as error:
            E.Tree(parents)
        assert len(str(error.value)) > 15, parents
    with pytest.raises(FrozenInstanceError):
        E.Tree((-1, 0)).parents = (-1,)
    assert E.Tree((-1, 0, 0)) == E.Tree((-1, 0, 0)) != E.Tree((-1, 0, 1))
    assert len({E.Tree((-1, 0)), E.Tree((-1, 0)), E.Tree((-1, -1))}) == 2


def test_spec_tree_order_within_a_level():
    """Levels in order but their parents not: refused, or else right in ranks and mask."""
    parents = (-1, -1, 1, 0, 1)
    try:
        tree = E.Tree(parents)
    except ValueError:
        return
    assert tuple(tree.depths) == (1, 1, 2, 2, 2) and tuple(tree.ranks) == (0, 1, 0, 0, 1)
    drawn = torch.tensor([[7, 1, 4, 0, 9, 0]])
    path, n = E.follow_tree(drawn, torch.tensor([[3, 7, 2, 6, 4]]), tree)
    assert n.tolist() == [2] and path.tolist() == [[1, 4]]
    mask = _spec_mask(tree)
    assert mask[5].tolist() == [True, False, True, False, False, True]


@pytest.mark.parametrize("k", [1, 2, 5, 9])
def test_spec_chain_is_a_draft(k):
    """Tree.chain(k): one node a level, and its mask is the causal one."""
    tree = E.Tree.chain(k)
    assert tree.parents == tuple(range(-1, k - 1))
    assert tuple(tree.depths) == tuple(range(1, k + 1)) and tuple(tree.ranks) == (0,) * k
    assert torch.equal(_spec_mask(tree), torch.ones(k + 1, k + 1).tril().bool())


def _spec_all_trees(nodes: int, ranks: int, depth: int) -> set[frozenset]:
    """Every prefix-closed, rank-closed set of `nodes` rank paths."""
    sets = {frozenset()}
    for _ in range(nodes):
        grown = set()
        for tree in sets:
            for path in [(), *tree]:
                rank = sum(1 for x in tree if len(x) == len(path) + 1 and x[:-1] == path)
                if rank < ranks and len(path) < depth:
                    grown.add(tree | {(*path, rank)})
        sets = grown
    return sets


def _spec_worth(tree, acceptance) -> float:
    worth = {-1: 1.0}
    for i, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True)):
        worth[i] = worth[parent] * acceptance[rank]
    return sum(worth.values()) - 1


@pytest.mark.parametrize(
    "acceptance",
    [(0.9,), (0.6, 0.3), (0.5, 0.45), (0.7, 0.2, 0.05), (0.34, 0.33, 0.32), (0.9, 0.0)],
)
def test_spec_best_tree_equals_brute_force(acceptance):
    """No prefix-closed tree of as many nodes is worth more; depth is kept."""
    tried = 0
    for nodes in range(1, 7):
        for depth in (None, 1, 2, 3, 4):
            every = _spec_all_trees(nodes, len(acceptance), depth or nodes)
            if not every:
                continue  # no tree has so many nodes in so few levels
            best = max(sum(math.prod(acceptance[r] for r in path) for path in t) for t in every)
            tree = (
                E.best_tree(acceptance, nodes, depth) if depth else E.best_tree(acceptance, nodes)
            )
            assert len(tree.parents) == nodes
            assert max(tree.depths) <= (depth or nodes) and max(tree.ranks) < len(acceptance)
            assert abs(_spec_worth(tree, acceptance) - best) < 1e-9
            tried += 1
    assert tried >= 15


def test_spec_best_tree_when_later_ranks_are_better():
    """Acceptance that rises with the rank: still the best rank-closed tree, or a ValueError."""
    for acceptance in [(0.1, 0.8), (0.2, 0.1, 0.9)]:
        for nodes in range(1, 6):
            every = _spec_all_trees(nodes, len(acceptance), nodes)
            best = max(sum(math.prod(acceptance[r] for r in path) for path in t) for t in every)
            try:
                tree = E.best_tree(acceptance, nodes)
            except ValueError:
                continue
            assert len(tree.parents) == nodes
            assert abs(_spec_worth(tree, acceptance) - best) < 1e-9


def test_spec_best_tree_of_many_nodes():
    """64 nodes: the sum of the 64 largest products; limits below that are kept."""
    acceptance = [0.62, 0.17, 0.08, 0.04]

    def products(depth, least, weight=1.0):
        if depth == 0:
            return []
        out = []
        for a in acceptance:
            if weight * a > least:
                out += [weight * a, *products(depth - 1, least, weight * a)]
        return out

    for depth, limit in [(None, 40), (3, 3), (5, 5)]:
        best = sum(sorted(products(limit, 1e-4), reverse=True)[:64])
        tree = E.best_tree(acceptance, 64, depth)
        assert len(tree.parents) == 64 and max(tree.depths) <= limit
        assert abs(_spec_worth(tree, acceptance) - best) < 1e-9
    a = E.best_tree((0.8,), 5)
    assert a.parents == E.Tree.chain(5).parents
    assert E.best_tree((0.5, 0.3, 0.2), 3, 1).parents == (-1, -1, -1)


def test_spec_best_tree_without_room_ends():
    """More nodes than depth and ranks allow: as many as there are, or a ValueError; no hang."""
    for acceptance, nodes, depth, most in [((0.5,), 5, 2, 2), ((0.5, 0.2), 99, 2, 6)]:
        try:
            tree = E.best_tree(acceptance, nodes, depth)
        except ValueError:
            continue
        assert len(tree.parents) == most and max(tree.depths) == depth


def _spec_tree_rule(target, draft, tokens, uniform, tree, wrong: str = ""):
    """SpecInfer's multi-step rule, node by node in level order, and what is wrong about others."""
    b, v = len(tokens), target.shape[-1]
    p, at = target[:, 0].double(), torch.full((b,), -1)
    q = torch.zeros_like(p) if draft is None else draft[:, 0].double()
    path, n = torch.full((b, max(tree.depths)), -1), torch.zeros(b, dtype=torch.long)
    for i, parent in enumerate(tree.parents):
        child = torch.nn.functional.one_hot(tokens[:, i], v).double()
        proposal = child if draft is None else q
        here = at == parent
        p_c, q_c = (p * child).sum(-1), (proposal * child).sum(-1)
        yes = here & (uniform[:, i] < p_c / q_c)
        no = here & ~yes
        left = (p - proposal).clamp(min=0)
        if wrong != "p not normalised":
            left = left / left.sum(-1, keepdim=True)
        if wrong != "same p":
            p = torch.where(no[:, None], left, p)
        fewer = q if wrong == "with replacement" else q * (1 - child)
        if wrong not in ("q not normalised", "with replacement"):
            fewer = fewer / fewer.sum(-1, keepdim=True).clamp(min=1e-300)
        q = torch.where(no[:, None], fewer, q)
        p = torch.where(yes[:, None], target[:, i + 1].double(), p)
        if draft is not None:
            q = torch.where(yes[:, None], draft[:, i + 1].double(), q)
        path[yes, n[yes]] = i
        n, at = n + yes, torch.where(yes, i, at)
    return path, n, p / p.sum(-1, keepdim=True)


def _spec_tree_rows(tree, p, q, b, g, certain):
    """Rows for a tree: children drawn from q without replacement, or its likeliest ones."""
    v, nodes = p[0].shape[-1], len(tree.parents)
    code = torch.zeros(b, nodes + 1, dtype=torch.long)
    tokens = torch.zeros(b, nodes, dtype=torch.long)
    target, draft = torch.zeros(b, nodes + 1, v), torch.zeros(b, nodes + 1, v)
    for i in range(-1, nodes):
        depth = 0 if i < 0 else tree.depths[i]
        target[:, i + 1] = p[depth][code[:, i + 1]].float()
        weights = q[depth][code[:, i + 1]]
        draft[:, i + 1] = weights.float()
        children = [c for c in range(nodes) if tree.parents[c] == i]
        if not children:
            continue
        score = weights.log()
        if not certain:  # the order of Gumbel-perturbed logs is drawing without replacement
            score = score - torch.empty_like(score).exponential_(generator=g).log()
        picks = score.topk(len(children), -1).indices
        for c, pick in zip(children, picks.T, strict=True):
            tokens[:, c] = pick
            code[:, c + 1] = code[:, i + 1] * v + pick
    return target, None if certain else draft, tokens, torch.rand(b, nodes, generator=g)


def _spec_tree_fit(rule, tree, p, q, b, seed, certain) -> float:
    """The least p-value of the first one, two and three tokens that a step and those after emit."""
    g, v = _spec_generator(seed), p[0].shape[-1]
    target, draft, tokens, uniform = _spec_tree_rows(tree, p, q, b, g, certain)
    path, n, rest = rule(target, draft, tokens, uniform, tree)
    last = _spec_draw(rest.nan_to_num(0.0), g)
    code, fits = torch.zeros(b, dtype=torch.long), []
    for t in range(3):
        token = _spec_draw(p[t][code], g)  # after the step: plain decoding
        token = torch.where(n == t, last, token)
        if t < path.shape[1]:
            accepted = tokens.gather(1, path[:, t : t + 1].clamp(min=0))[:, 0]
            token = torch.where(t < n, accepted, token)
        code = code * v + token
        fits.append(_spec_chi(torch.bincount(code, minlength=v ** (t + 1)), _spec_joint(p, t + 1)))
    return min(fits)


SPEC_TREES = [(-1, -1, 0, 0, 1, 2), (-1, -1, -1, 0, 0, 1, 3), (-1, 0, 0, 0, 1), (-1, -1, -1, -1)]


def _spec_accept_tree(target, draft, tokens, uniform, tree):
    path, n, rest = E.accept_tree(target, draft, tokens, uniform, tree)
    assert path.shape == (len(tokens), max(tree.depths)) and path.dtype == torch.long
    assert n.shape == (len(tokens),) and rest.shape == target[:, 0].shape
    steps = torch.arange(path.shape[1])
    assert ((path >= 0) == (steps < n[:, None])).all() and (path[path < 0] == -1).all()
    parents = torch.tensor(tree.parents)
    before = torch.cat([torch.full_like(path[:, :1], -1), path[:, :-1]], 1)
    assert (parents[path.clamp(min=0)] == before)[path >= 0].all()
    _spec_valid(rest, 1e-4)
    return path, n, rest


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("parents", SPEC_TREES)
@pytest.mark.parametrize("keep_p, keep_q", [(None, None), (3, 4)])
def test_spec_tree_leaves_the_distribution_as_it_is(parents, certain, keep_p, keep_q):
    """First token, first two and first three follow the target exactly, 60,000 rows a tree."""
    p, q = _spec_tables(5, 4, 61, keep_p), _spec_tables(5, 4, 62, keep_q)
    tree = E.Tree(parents)
    assert _spec_tree_fit(_spec_accept_tree, tree, p, q, 60_000, 63, certain) > SPEC_RIGHT


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("parents", SPEC_TREES[:3])
def test_spec_wrong_tree_rules_are_noticed(parents, certain):
    """The check passes SpecInfer's rule and none that forgets to update p or q between siblings."""
    p, q, tree = _spec_tables(5, 4, 61), _spec_tables(5, 4, 62), E.Tree(parents)
    assert _spec_tree_fit(_spec_tree_rule, tree, p, q, 60_000, 63, certain) > SPEC_RIGHT
    wrongs = ["same p", "p not normalised"]
    wrongs += [] if certain else ["q not normalised", "with replacement"]
    for wrong in wrongs:

        def rule(*args, wrong=wrong):
            return _spec_tree_rule(*args, wrong=wrong)

        assert _spec_tree_fit(rule, tree, p, q, 60_000, 63, certain) < SPEC_WRONG, wrong


@pytest.mark.parametrize("certain", [False, True])
def test_spec_accept_tree_equals_node_by_node(certain):
    """Random trees, every row its own p and q: the same path and rest as the slow rule."""
    rng, lengths, kinds = random.Random(7), Counter(), 0
    for seed in range(40):
        parents = _spec_tree(rng, rng.randint(1, 9), 4, 4)
        tree = E.Tree(parents)
        p, q = _spec_tables(6, 4, seed, sharp=2.0), _spec_tables(6, 4, seed)
        rows = _spec_tree_rows(tree, p, q, 100, _spec_generator(seed), certain)
        path, n, rest = _spec_accept_tree(*rows, tree)
        slow = _spec_tree_rule(*rows, tree)
        assert torch.equal(path, slow[0]) and torch.equal(n, slow[1])
        torch.testing.assert_close(rest.double(), slow[2], atol=1e-4, rtol=1e-3)
        lengths.update(n.tolist())
        kinds += max(tree.ranks) > 0 and max(tree.depths) > 1
    assert kinds > 15 and min(lengths[i] for i in range(4)) > 50


@pytest.mark.parametrize("certain", [False, True])
def test_spec_a_chain_tree_is_a_plain_draft(certain):
    """accept_tree over Tree.chain(k) gives accept's n and rest, and the path 0, 1, 2, ..."""
    for k in (1, 3, 6):
        target, draft, tokens, uniform = _spec_problem(200, k, 6, 70 + k)
        n, rest = E.accept(target, None if certain else draft, tokens, uniform)
        # What q stands in the leaf's row is nobody's: it has no children.
        q = None if certain else torch.cat([draft, torch.full_like(draft[:, :1], math.nan)], 1)
        path, m, other = _spec_accept_tree(target, q, tokens, uniform, E.Tree.chain(k))
        assert torch.equal(n, m) and len(set(n.tolist())) > 1
        torch.testing.assert_close(rest, other, atol=1e-5, rtol=1e-4)
        steps = torch.arange(k).expand(200, k)
        assert torch.equal(path, torch.where(steps < n[:, None], steps, -1))


def _spec_slow_follow(drawn, tokens, parents) -> list[int]:
    path, at = [], -1
    while True:
        fits = [c for c, p in enumerate(parents) if p == at and tokens[c] == drawn[at + 1]]
        if not fits:
            return path
        at = fits[0]
        path.append(at)


def test_spec_follow_tree_equals_a_loop():
    """The child that equals what was drawn, down to where none does."""
    rng, lengths = random.Random(3), Counter()
    for seed in range(60):
        parents = _spec_tree(rng, rng.randint(1, 12), 3, 5)
        tree, n = E.Tree(parents), len(parents)
        depth = max(tree.depths)
        tokens = torch.zeros(30, n, dtype=torch.long)
        for r in range(30):  # siblings differ
            for p in {*parents}:
                children = [c for c in range(n) if parents[c] == p]
                for c, token in zip(children, rng.sample(range(4), len(children)), strict=True):
                    tokens[r, c] = token
        drawn = torch.randint(-1, 4, (30, n + 1), generator=_spec_generator(seed))
        path, m = E.follow_tree(drawn, tokens, tree)
        assert path.shape == (30, depth) and path.dtype == torch.long and m.shape == (30,)
        for r in range(30):
            slow = _spec_slow_follow(drawn[r].tolist(), tokens[r].tolist(), parents)
            assert path[r].tolist() == slow + [-1] * (depth - len(slow)) and m[r] == len(slow)
            lengths[len(slow)] += 1
    assert min(lengths[i] for i in range(4)) > 15
    chain = E.Tree.chain(4)
    drawn, tokens = torch.randint(2, (90, 5), generator=_spec_generator(1)), None
    tokens = torch.randint(2, (90, 4), generator=_spec_generator(2))
    n = E.follow_tree(drawn, tokens, chain)[1]
    assert torch.equal(n, E.matching(drawn, tokens)) and set(n.tolist()) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("certain", [False, True])
def test_spec_greedy_follows_the_argmaxes_down_the_tree(certain):
    """One-hot p in the tree: the path of the argmaxes, whatever u and q, and rest the next one."""
    rng, lengths = random.Random(5), Counter()
    for seed in range(25):
        tree = E.Tree(_spec_tree(rng, rng.randint(2, 9), 3, 4))
        p, q = _spec_tables(4, 4, seed, sharp=2.0), _spec_tables(4, 4, seed + 100)
        p = [torch.nn.functional.one_hot(x.argmax(-1), 4).double() for x in p]
        rows = _spec_tree_rows(tree, p, q, 60, _spec_generator(seed), certain)
        drawn = rows[0].argmax(-1)
        path, n = E.follow_tree(drawn, rows[2], tree)
        for u in (torch.zeros_like(rows[3]), rows[3], torch.full_like(rows[3], 1 - 2.0**-24)):
            got, m, rest = _spec_accept_tree(*rows[:3], u, tree)
            assert torch.equal(got, path) and torch.equal(m, n)
            last = torch.where(n > 0, path.gather(1, (n - 1).clamp(min=0)[:, None])[:, 0], -1)
            best = drawn.gather(1, last[:, None] + 1)[:, 0]
            assert torch.equal(rest.argmax(-1), best)
            torch.testing.assert_close(rest.max(-1).values, torch.ones(60))
        lengths.update(n.tolist())
    assert min(lengths[i] for i in range(3)) > 20


def test_spec_a_full_house_of_siblings_accepts_one():
    """All V tokens as children: p's mass is covered, so one is always accepted."""
    p, q, tree = _spec_tables(4, 2, 81), _spec_tables(4, 2, 82), E.Tree((-1,) * 4)
    for certain in (False, True):
        rows = _spec_tree_rows(tree, p, q, 20_000, _spec_generator(1), certain)
        path, n, rest = _spec_accept_tree(*rows, tree)
        assert (n == 1).all() and set(path[:, 0].tolist()) == {0, 1, 2, 3}
        first = rows[2].gather(1, path)[:, 0]
        assert _spec_chi(torch.bincount(first, minlength=4), p[0][0]) > SPEC_RIGHT


def test_spec_tree_with_almost_all_of_q_removed():
    """A sibling that had nearly all of q is gone: what is left is divided by its own sum."""
    target = torch.tensor([0.1, 0.2, 0.3, 0.4]).expand(3, 3, 4)
    draft = torch.tensor([1.0, 1e-9, 3e-9, 0.0]).expand(3, 3, 4)
    tokens = torch.tensor([[0, 1]] * 3)
    uniform = torch.tensor([[0.05, 0.9], [0.5, 0.85], [0.5, 0.92]])
    path, n, rest = _spec_accept_tree(target, draft, tokens, uniform, E.Tree((-1, -1)))
    assert path.tolist() == [[0], [1], [-1]] and n.tolist() == [1, 1, 0]
    torch.testing.assert_close(rest[:2], target[:2, 0])
    torch.testing.assert_close(rest[2], torch.tensor([0.0, 0.0, 0.12, 0.88]), atol=0.13, rtol=0)
    # p' = (0, 2, 3, 4) / 9 and q' = (0, 1, 3, 0) / 4: only token 3 is left of max(p' - q', 0).
    torch.testing.assert_close(rest[2], torch.tensor([0.0, 0.0, 0.0, 1.0]), atol=1e-4, rtol=0)


def test_spec_tree_when_q_runs_out():
    """A sibling that q could not give (all of q was removed) brings no NaN."""
    target = _spec_random_probs(50, 4, 4, seed=91)
    draft = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(50, 4, 4)
    tokens = torch.tensor([[0, 1, 2]] * 50)
    uniform = torch.rand(50, 3, generator=_spec_generator(92))
    uniform[:, 0] = 1 - 2.0**-24
    path, n, rest = _spec_accept_tree(target, draft, tokens, uniform, E.Tree((-1, -1, -1)))
    assert (path[:, 0] != 0).all()
    assert not rest[n == 0][:, 0].any()  # rejected: p(0) < q(0) took all of it


def test_spec_tree_shapes_that_do_not_fit():
    """accept_tree does not broadcast a target, draft or tokens of another tree in silence."""
    tree = E.Tree((-1, -1, 0))
    p, d, u = torch.full((2, 4, 5), 0.2), torch.tensor([[0, 1, 2]] * 2), torch.rand(2, 3)
    E.accept_tree(p, p, d, u, tree)
    for case in [(p[:, :3], None, d, u), (p, p[:, :2], d, u), (p, p, d[:, :2], u)]:
        with pytest.raises((ValueError, RuntimeError, IndexError)):
            E.accept_tree(*case, tree)


def _spec_slow_ngram(context, k, longest, shortest, references=()):
    """All that the definition allows: the context's latest occurrence, a reference's any."""
    n = len(context)
    for size in range(min(longest, n), shortest - 1, -1):
        suffix, allowed = context[n - size :], []
        for start in range(n - size - 1, -1, -1):
            if context[start : start + size] == suffix:
                copy = list(context)
                for i in range(k):
                    copy.append(copy[start + size + i])
                allowed.append(copy[n:])
                break
        for reference in references:
            for start in range(len(reference) - size):  # something must follow it
                if reference[start : start + size] == suffix:
                    allowed.append(reference[start + size : start + size + k])
        if allowed:
            return allowed
    return [[]]


def test_spec_ngram_equals_the_definition():
    """Small alphabets: the longest suffix, its latest occurrence, k tokens from there."""
    rng, seen = random.Random(11), Counter()
    drafters = {
        (longest, shortest): E.NGram(longest, shortest)
        for longest in range(1, 6)
        for shortest in range(1, longest + 1)
    }
    for _ in range(4000):
        (longest, shortest), drafter = rng.choice(list(drafters.items()))
        letters = rng.choice([1, 2, 3, 6])
        context = [rng.randrange(letters) for _ in range(rng.choice([0, 1, 2, 5, 12, 40]))]
        k, before = rng.randint(0, 9), list(context)
        tokens, probs = drafter(context, k)
        assert context == before and probs is None and isinstance(tokens, list)
        assert [tokens] == _spec_slow_ngram(context, k, longest, shortest)
        assert all(type(x) is int for x in tokens)
        seen["none" if not tokens else "some"] += 1
        if tokens and context and k > 4:
            seen["own"] += tokens[: k // 2] == tokens[k // 2 : k // 2 * 2]
    assert seen["none"] > 500 and seen["some"] > 1000 and seen["own"] > 200


def test_spec_ngram_by_hand():
    """a b a b runs on for ever; four to one by default; the latest of two; nothing, nothing."""
    drafter = E.NGram()
    assert drafter([1, 2, 1, 2], 5) == ([1, 2, 1, 2, 1], None)
    assert drafter([7], 3) == ([], None) and drafter([], 3) == ([], None)
    assert drafter([1, 1], 4) == ([1, 1, 1, 1], None)
    assert drafter([1, 2, 3, 4], 2) == ([], None)
    assert drafter([1, 2, 1, 2], 0) == ([], None)
    assert drafter([5, 8, 5, 9, 5], 1) == ([9], None)  # the latest occurrence
    assert drafter([2, 5, 8, 9, 5, 7, 2, 5], 1) == ([8], None)  # a longer one goes before
    # Five in common here, but only four count: the later of the two is meant.
    context = [9, 1, 2, 3, 4, 6, 8, 1, 2, 3, 4, 7, 9, 1, 2, 3, 4]
    assert drafter(context, 1) == ([7], None)
    assert E.NGram(5)(context, 1) == ([6], None)
    assert E.NGram(longest=3, shortest=2)([5, 1, 5], 2) == ([], None)
    assert E.NGram(longest=3, shortest=2)([5, 1, 6, 5, 1], 2) == ([6, 5], None)
    assert drafter([-1, 3, -1], 2) == ([3, -1], None)


def test_spec_ngram_ids_are_numbers_not_bytes():
    """Large ids are found; ids whose bytes, shifted, would look like another's are not."""
    drafter, big = E.NGram(), 2**31 - 1
    assert drafter([big, 0, 255, 256, big], 3) == ([0, 255, 256], None)
    for other in (1 << (31 - 1), 1 << 24, 1 << 16, 256):
        assert drafter([other, 9, 0, 1], 2) == ([], None)
        assert drafter([0, other, 9, 1], 2) == ([], None)
        assert drafter([other, other >> 8, 0, 5], 2) == ([], None)
    # Of ids in four bytes each, two bytes later: 0x00010000 after 0x00020000 holds a 1.
    assert drafter([0x00010000, 0x00020000, 9, 1], 2) == ([], None)
    assert drafter([0x01000000, 0x02000000, 9, 0x00010000, 0x00020000], 2) == ([], None)
    # The bytes of (a, b) stand across (x, y, z) here, and after them, in line, once more.
    context = [0x00050000, 0x00060000, 0x00070000, 3, 5, 6]
    assert drafter(context, 2) == ([], None)
    assert drafter([5, 6, 8, *context], 2) == ([8, 0x00050000], None)


def test_spec_ngram_one_drafter_for_many():
    """Contexts in turn, and one list that grows, shrinks and changes: no memory of the last."""
    rng, drafter = random.Random(12), E.NGram(3, 1)
    contexts = [[rng.randrange(3) for _ in range(20)] for _ in range(6)]
    shared: list[int] = []
    for step in range(1500):
        context = rng.choice(contexts)
        context.append(rng.randrange(3))
        assert [drafter(context, 4)[0]] == _spec_slow_ngram(context, 4, 3, 1)
        what = rng.random()
        if what < 0.7 or len(shared) < 6:
            shared.append(rng.randrange(4))
        elif what < 0.8:
            del shared[-rng.randint(1, 5) :]
        else:
            shared[rng.randrange(len(shared))] = rng.randrange(4)
        assert [drafter(shared, 4)[0]] == _spec_slow_ngram(shared, 4, 3, 1)
    assert step == 1499 and len(shared) > 50


def test_spec_ngram_references():
    """A reference is searched too; the longest match wins, wherever it is."""
    drafter = E.NGram(references=[[1, 2, 3, 4, 5], [8, 9, 7]])
    assert drafter([0, 1, 2, 3], 2) == ([4, 5], None)
    assert drafter([9, 1, 8], 2)[0][:2] == [9, 7]
    assert drafter([6, 3, 0, 2, 3], 1) == ([4], None)  # two ids in the reference before one here
    assert drafter([2, 3, 6, 0, 2, 3], 0) == ([], None)
    assert drafter([3, 6, 2, 3, 9, 6, 2, 3], 1) == ([9], None)  # three here before two there
    assert E.NGram(references=[[1, 2]])([5, 6], 2) == ([], None)
    rng, found = random.Random(13), 0
    for _ in range(1500):
        references = [
            [rng.randrange(4) for _ in range(rng.randint(0, 12))] for _ in range(rng.randint(0, 3))
        ]
        copies = [list(x) for x in references]
        longest = rng.randint(1, 4)
        shortest = rng.randint(1, longest)
        context, k = [rng.randrange(4) for _ in range(rng.randint(0, 10))], rng.randint(1, 6)
        tokens, probs = E.NGram(longest, shortest, references)(context, k)
        allowed = _spec_slow_ngram(context, k, longest, shortest, references)
        assert probs is None and references == copies and len(tokens) <= k
        # What a reference's end leaves open (stop, or go on) stays open here.
        assert any(tokens[: len(x)] == x and bool(x) == bool(tokens) for x in allowed)
        found += allowed not in (_spec_slow_ngram(context, k, longest, shortest), [[]])
    assert found > 300


@pytest.mark.parametrize("kind", ["random", "letters", "nearly", "found first", "one letter"])
def test_spec_ngram_is_quick(kind):
    """32,768 ids: a proposal takes under 5 ms, also where nothing or nearly all matches."""
    rng, n = random.Random(14), 32_768
    context = {
        "random": lambda: [rng.randrange(50_000) for _ in range(n - 1)] + [50_000],
        "letters": lambda: [rng.randrange(4) for _ in range(n)],
        "nearly": lambda: [0, 0, 0, 1] * (n // 4 - 1) + [0, 0, 2, 1],
        "found first": lambda: [5, 6, 7, 8, 9] + [8] * (n - 9) + [5, 6, 7, 8],
        "one letter": lambda: [3] * n,
    }[kind]()
    drafter, seconds = E.NGram(), []
    for _ in range(15):
        start = time.thread_time()
        tokens, _ = drafter(context, 8)
        seconds.append(time.thread_time() - start)
    expected = {
        "random": [],
        "nearly": [0, 0, 2, 1] * 2,
        "found first": [9] + [8] * 7,
        "one letter": [3] * 8,
    }
    if kind in expected:
        assert tokens == expected[kind]
    assert len(tokens) == 8 or kind == "random"
    # The least of many, of this thread alone: others may share the machine.
    assert min(seconds) < 5e-3, f"{min(seconds) * 1e3:.1f} ms"


class _SpecRow:
    """A sequence that is served: its acceptance, and how often its drafter has something."""

    def __init__(self, acceptance: float, drafts: float = 1.0):
        self.acceptance, self.drafts = acceptance, drafts


def _spec_expected(a: float, k: int) -> float:
    return float(k + 1) if a == 1 else (1 - a ** (k + 1)) / (1 - a)


def _spec_serve(policy, rows, costs, steps: int, seed: int = 0, prompt: int = 0):
    """Serve the rows for some steps; yields (ks, expected tokens, seconds) of each step.

    costs: seconds of a step, of each token it runs, of each token drafted. What is counted is
    the expected number of tokens, so that luck in the draws says nothing about the policy.
    """
    base, each, draft = costs
    rng = random.Random(seed)
    for _ in range(steps):
        ks = policy.choose(rows)
        assert len(ks) == len(rows) and all(isinstance(k, int) and k >= 0 for k in ks)
        proposed = [k if rng.random() < row.drafts else 0 for k, row in zip(ks, rows, strict=True)]
        accepted = []
        for k, row in zip(proposed, rows, strict=True):
            n = 0
            while n < k and rng.random() < row.acceptance:
                n += 1
            accepted.append(n)
        tokens = sum(proposed) + len(rows) + (rng.randrange(prompt) if prompt else 0)
        draft_seconds = draft * sum(proposed)
        seconds = base + each * tokens + draft_seconds  # the whole step, as the Engine counts it
        policy.observe(rows, proposed, accepted, tokens, seconds, draft_seconds)
        pairs = zip(proposed, rows, strict=True)
        gain = sum(_spec_expected(row.acceptance, k) for k, row in pairs)
        yield ks, gain, seconds


def _spec_rate(served, skip: int = 0) -> float:
    served = list(served)[skip:]
    return sum(x[1] for x in served) / sum(x[2] for x in served)


def _spec_best_rate(rows, costs, longest: int = 5) -> tuple[float, int]:
    base, each, draft = costs
    b = len(rows)
    return max(
        (
            sum(_spec_expected(row.acceptance, k) for row in rows)
            / (base + each * b * (k + 1) + draft * b * k),
            k,
        )
        for k in range(longest + 1)
    )


SPEC_FREE, SPEC_COSTLY = (20e-3, 0.5e-3, 1e-7), (20e-3, 0.5e-3, 2e-3)


def test_spec_fixed_is_fixed():
    """Fixed(k): k for every row, whatever it is told."""
    rows = [_SpecRow(0.0) for _ in range(3)]
    for k in (0, 1, 7):
        policy = E.Fixed(k)
        assert policy.choose(rows) == [k] * 3 and policy.choose(rows[:1]) == [k]
        assert policy.choose([]) == []
        policy.observe(rows, [k] * 3, [0] * 3, 3 * k + 3, 0.1, 0.1)
        assert policy.choose(rows) == [k] * 3
        served = list(_spec_serve(policy, rows, SPEC_COSTLY, 5))
        assert len(served) == 5 and all(ks == [k] * 3 for ks, _, _ in served)
    # The simulation itself: fixed policies give the rates that the formula says.
    rows = [_SpecRow(0.7) for _ in range(4)]
    rates = [_spec_rate(_spec_serve(E.Fixed(k), rows, SPEC_COSTLY, 3)) for k in range(6)]
    best = _spec_best_rate(rows, SPEC_COSTLY)
    assert math.isclose(max(rates), best[0]) and rates.index(max(rates)) == best[1] == 1


@pytest.mark.parametrize("costs", [SPEC_FREE, SPEC_COSTLY], ids=["free", "costly"])
@pytest.mark.parametrize("b", [1, 16, *(pytest.param(b, marks=pytest.mark.slow) for b in (4, 64))])
def test_spec_goodput_is_near_the_best_fixed(b, costs):
    """Tokens per second within 5% of the best fixed k of 0..5, at every load and acceptance."""
    best_ks = []
    for a in (0.0, 0.2, 0.5, 0.8, 0.95):
        rows = [_SpecRow(a) for _ in range(b)]
        best, k = _spec_best_rate(rows, costs)
        best_ks.append(k)
        served = list(_spec_serve(E.Goodput(5), rows, costs, 500, seed=b))
        assert all(max(ks) <= 5 for ks, _, _ in served)
        rate = _spec_rate(served, skip=100)
        last = sum(sum(ks) / b for ks, _, _ in served[-100:]) / 100
        assert rate > 0.95 * best, f"a {a}, {b} rows: {rate / best:.3f} of k = {k}; k {last:.2f}"
    # No one k is right for all; or, dear drafts and many rows, none is ever worth it.
    assert len(set(best_ks)) >= 3 or best_ks == [0] * 5


def test_spec_goodput_beats_every_one_fixed_k():
    """Over loads and acceptances together no fixed k comes near the adaptive one."""
    cases = [(b, a, c) for b in (1, 64) for a in (0.0, 0.95) for c in (SPEC_FREE, SPEC_COSTLY)]

    def worst(policy):
        ratios = []
        for b, a, costs in cases:
            rows = [_SpecRow(a) for _ in range(b)]
            rate = _spec_rate(_spec_serve(policy(), rows, costs, 200), skip=100)
            ratios.append(rate / _spec_best_rate(rows, costs)[0])
        return min(ratios)

    assert worst(lambda: E.Goodput(5)) > 0.9
    for k in range(6):
        assert worst(lambda k=k: E.Fixed(k)) < 0.9


@pytest.mark.parametrize("b", [1, 16])
def test_spec_goodput_goes_to_zero_and_comes_back(b):
    """Drafts that never fit are given up; when they begin to fit they are taken up again."""
    costs, policy, rows = (20e-3, 0.5e-3, 0.5e-3), E.Goodput(5), [_SpecRow(0.0) for _ in range(b)]
    served = list(_spec_serve(policy, rows, costs, 300))
    drafted = sum(sum(ks) for ks, _, _ in served[-100:]) / (100 * b)
    assert drafted < 0.2  # a probe now and then is what lets it come back
    for row in rows:
        row.acceptance = 0.97
    served = list(_spec_serve(policy, rows, costs, 400, seed=1))
    assert sum(sum(ks) for ks, _, _ in served[-50:]) / (50 * b) > 2
    assert _spec_best_rate(rows, costs)[1] == 5
    for row in rows:
        row.acceptance = 0.0
    served = list(_spec_serve(policy, rows, costs, 400, seed=2))
    assert sum(sum(ks) for ks, _, _ in served[-100:]) / (100 * b) < 0.2


@pytest.mark.parametrize("costs", [SPEC_FREE, SPEC_COSTLY], ids=["free", "costly"])
def test_spec_goodput_follows_the_load(costs):
    """The same acceptance: k falls where tokens make a step dear and rises where not."""
    costs = (costs[0], 2e-3, costs[2])
    few = [_SpecRow(0.6)]
    many = few + [_SpecRow(0.6) for _ in range(63)]
    best = [_spec_best_rate(rows, costs)[1] for rows in (few, many)]
    assert best[0] > best[1] == 0
    policy, seen = E.Goodput(5), []
    for rows in (few, many, few):
        served = list(_spec_serve(policy, rows, costs, 300))
        seen.append(sum(sum(ks) for ks, _, _ in served[-100:]) / (100 * len(rows)))
        assert _spec_rate(served, skip=100) > 0.93 * _spec_best_rate(rows, costs)[0]
    assert seen[0] > seen[1] + 0.7 and seen[2] > seen[1] + 0.7 and seen[1] < 0.3


def test_spec_goodput_rows_differ():
    """Rows that accept and rows that do not, in one batch: each gets its own k."""
    good, bad = [_SpecRow(0.95) for _ in range(8)], [_SpecRow(0.05) for _ in range(8)]
    rows = [row for pair in zip(good, bad, strict=True) for row in pair]
    costs = (20e-3, 1e-3, 0.5e-3)
    served = list(_spec_serve(E.Goodput(5), rows, costs, 400))
    mean = [sum(sum(ks[i::2]) for ks, _, _ in served[-100:]) / 800 for i in (0, 1)]
    assert mean[0] > 3 and mean[1] < 1 and mean[0] > mean[1] + 2.5
    own = 8 * (_spec_expected(0.95, 5) + 1) / (20e-3 + 1e-3 * 56 + 0.5e-3 * 40)
    assert own > 1.05 * _spec_best_rate(rows, costs)[0]  # a k for each is worth having
    assert _spec_rate(served, skip=100) > _spec_best_rate(rows, costs)[0]
    # The same rows in another order, and some of them, keep what is known of them.
    policy = E.Goodput(5)
    list(_spec_serve(policy, rows, costs, 300))
    assert sum(policy.choose(good + bad)[:8]) > 8 + sum(policy.choose(bad + good)[:8])
    assert min(policy.choose(good[:2])) > 1


def test_spec_goodput_rows_come_and_go():
    """Sequences of some sixty tokens, 0 to 24 at once, prompts between: still near the best."""
    rng, policy = random.Random(21), E.Goodput(5)
    costs, gain, seconds, fixed, sizes = (20e-3, 0.5e-3, 0.2e-3), 0.0, 0.0, [0.0] * 6, Counter()
    paid, rows = [0.0] * 6, [_SpecRow(0.8)]
    for step in range(700):
        rows = [row for row in rows if rng.random() > 0.05]
        if rng.random() < 0.6:
            rows += [_SpecRow(0.8) for _ in range(min(rng.randint(1, 3), 24 - len(rows)))]
        sizes[len(rows)] += 1
        if not rows:
            continue
        [(ks, tokens, spent)] = _spec_serve(policy, rows, costs, 1, seed=step, prompt=30)
        assert max(ks) <= 5
        if step < 100:
            continue
        gain, seconds = gain + tokens, seconds + spent
        for k in range(6):
            fixed[k] += len(rows) * _spec_expected(0.8, k)
            paid[k] += costs[0] + costs[1] * (len(rows) * (k + 1) + 15) + costs[2] * len(rows) * k
    best = max(a / b for a, b in zip(fixed, paid, strict=True))
    assert len(sizes) > 12 and best > 1.3 * fixed[0] / paid[0]
    assert gain / seconds > 0.94 * best


def test_spec_goodput_a_drafter_with_nothing_to_say():
    """Nothing proposed though it was asked for: no error, and it goes on when there is."""
    policy, rows = E.Goodput(4), [_SpecRow(0.9, drafts=0.0) for _ in range(5)]
    served = list(_spec_serve(policy, rows, SPEC_FREE, 50))
    assert len(served) == 50 and all(0 <= min(ks) <= max(ks) <= 4 for ks, _, _ in served)
    for row in rows:
        row.drafts = 1.0
    served = list(_spec_serve(policy, rows, (20e-3, 0.1e-3, 1e-7), 300))
    assert sum(sum(ks) for ks, _, _ in served[-50:]) / 250 > 2.5
    # Half the time nothing found, as with n-grams: what is found still fits.
    rows = [_SpecRow(0.9, drafts=0.5) for _ in range(5)]
    served = list(_spec_serve(E.Goodput(4), rows, (20e-3, 0.1e-3, 1e-7), 300))
    assert sum(sum(ks) for ks, _, _ in served[-50:]) / 250 > 2.5


@pytest.mark.parametrize("costs", [(0, 0, 0), (20e-3, 0, 0), (0, 1e-3, 0), (0, 0, 1e-3)])
def test_spec_goodput_takes_times_of_zero(costs):
    """A clock that stands still, in all or in part, is no error, then or when it goes on."""
    for drafts in (0.0, 1.0):
        policy, rows = E.Goodput(4), [_SpecRow(0.9, drafts=drafts) for _ in range(2)]
        served = list(_spec_serve(policy, rows, costs, 60))
        served += _spec_serve(policy, rows, SPEC_FREE, 60)
        assert len(served) == 120 and all(0 <= min(ks) <= max(ks) <= 4 for ks, _, _ in served)


@pytest.mark.parametrize("longest", [0, 1, 3, 8])
def test_spec_goodput_longest_is_kept(longest):
    """longest bounds k, 0 included, however well it goes; a first choice needs no memory."""
    policy, rows = E.Goodput(longest), [_SpecRow(1.0) for _ in range(2)]
    first = policy.choose(rows)
    assert len(first) == 2 and all(0 <= k <= longest for k in first)
    served = list(_spec_serve(policy, rows, (20e-3, 1e-5, 1e-7), 300))
    assert all(0 <= min(ks) <= max(ks) <= longest for ks, _, _ in served)
    assert sum(sum(ks) for ks, _, _ in served[-50:]) / 100 >= 0.85 * longest


# --------------------------------------------------------------------------------------------------
# paged_kv.py: drafts in the steps of the Engine
# --------------------------------------------------------------------------------------------------


class SpecDrafter:
    """Proposes what is known to follow, each token wrong with probability `lie`; where nothing is
    known, anything. ragged: fewer than asked for, at random, also none."""

    def __init__(self, texts, lie=0.0, ragged=False, seed=0, vocab=97):
        self.texts, self.lie, self.ragged, self.vocab = list(texts), lie, ragged, vocab
        self.r, self.asked = random.Random(seed), []

    def __call__(self, tokens, k):
        self.asked.append(k)
        n, at = self.r.randint(0, k) if self.ragged else k, len(tokens)
        known = [text[at : at + n] for text in self.texts if text[:at] == tokens]
        draft = max(known, key=len, default=[])
        draft += [self.r.randrange(self.vocab) for _ in range(n - len(draft))]
        wrong = [self.r.random() < self.lie for _ in draft]
        return [(t + w) % self.vocab for t, w in zip(draft, wrong)], None


class SpecBatch(SpecDrafter):
    """The same for many at once, and it hears all that there is to hear."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.seen, self.over = {}, []

    def __call__(self, tokens, k):
        raise AssertionError("it has many")

    def many(self, sequences, contexts, ks):
        assert len(sequences) == len(set(sequences)) == len(ks) and min(ks) > 0
        assert all(seq.tokens == tokens for seq, tokens in zip(sequences, contexts))
        assert not set(sequences) & set(self.over)
        return [super(SpecBatch, self).__call__(*asked) for asked in zip(contexts, ks)]

    def observe(self, seq, start, hidden):
        assert seq not in self.over and start >= 0 and len(hidden)
        self.seen.setdefault(seq, []).append((start, hidden.clone()))

    def forget(self, seq):
        assert seq not in self.over, "forgotten twice"
        self.over.append(seq)


def spec_texts(prompts, outputs) -> list[list[int]]:
    return [p + s.token_ids for p, o in zip(prompts, outputs) for s in o.samples]


def spec_check(engine, k=5) -> None:
    """Every invariant between steps; no blocks but for a sequence's tokens and k drafted ones."""
    paged_check(engine)
    for seq in engine.scheduler.running:
        assert len(seq.table) <= -(-(len(seq.tokens) + k) // engine.allocator.block_size)
        assert seq.remaining > 0 and seq.stored <= len(seq.tokens)


def spec_generate(engine, prompts, params, priorities=None, check=spec_check) -> list:
    for i, (prompt, how) in enumerate(zip(prompts, params)):
        engine.add(prompt, how, id=i, priority=priorities[i] if priorities else 0)
    outputs = dict(engine.outputs)
    paged_run(engine, check)
    return [outputs[i] for i in range(len(prompts))]


def spec_same(got, want, close=1e-4) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.error == b.error and len(a.times) == len(a.token_ids) + 1
        for x, y in zip(a.samples, b.samples, strict=True):
            assert x.token_ids == y.token_ids and x.finish_reason == y.finish_reason
            for (p, ids, ps), (q, _, qs) in zip(x.logprobs, y.logprobs, strict=True):
                assert abs(p - q) < close and len(ids) == len(ps) == len(qs)
                assert all(abs(s - t) < close for s, t in zip(ps, qs))


@pytest.mark.parametrize("many", [False, True])
def test_engine_spec_oracle_saves_steps(many):
    """Where all that is drafted is right, n tokens take one step for the prompt and one for every
    k + 1 more; all are counted, each has its time."""
    model, prompt = paged_model(), paged_prompt(6, 1)
    (want,) = paged_greedy(model, [prompt], [30])
    kind = SpecBatch if many else SpecDrafter
    for k in (0, 1, 3, 40):
        for new in (1, 2, 4, 5, 6, 30):
            drafter = kind([prompt + want])
            engine = paged_engine(model, num_blocks=20, drafter=drafter, speculate_k=k)
            (output,) = engine.generate([prompt], greedy(new))
            assert output.token_ids == want[:new] and output.finish_reason == "length"
            stats = engine.stats()
            steps = 1 + math.ceil((new - 1) / (k + 1))
            assert stats["steps"] == steps and stats["tokens_new"] == new
            assert stats["proposed"] == stats["accepted"] == new - steps
            assert stats["tokens_run"] == len(prompt) + new - 1
            assert len(output.times) == new + 1 and output.times == sorted(output.times)
            paged_idle(engine, 20)


def test_engine_spec_liar_costs_no_step():
    """Where all is wrong, there are as many steps as without, each token is the same, and prompts
    come in at the same steps; without a cache of prefixes also under pressure."""
    model, (prompts, counts) = paged_model(), paged_requests(9)
    for swap in (False, True):
        how = dict(num_blocks=9, max_batch_tokens=12, swap=swap, prefix_cache=False)
        plain = paged_engine(model, **how)
        want = spec_generate(plain, prompts, [*map(greedy, counts)])
        engine = paged_engine(model, **how, drafter=SpecBatch(spec_texts(prompts, want), lie=1))
        got = spec_generate(engine, prompts, [*map(greedy, counts)])
        spec_same(got, want)
        a, b = plain.stats(), engine.stats()
        assert b["accepted"] == 0 < b["proposed"]
        for name in ("steps", "tokens_new", "preemptions", "hit_rate"):
            assert a[name] == b[name], name
        assert b["tokens_run"] == a["tokens_run"] + b["proposed"] and a["preemptions"] > 2


SPEC_HOWS = {
    "roomy": dict(num_blocks=200, max_batch_tokens=200),
    "recompute": dict(num_blocks=9, max_batch_tokens=16),
    "swap": dict(num_blocks=9, max_batch_tokens=16, swap=True),
    "no-prefix": dict(num_blocks=9, max_batch_tokens=16, prefix_cache=False, swap=True),
    "chunks": dict(num_blocks=12, max_batch_tokens=5),
    "blocks-of-1": dict(num_blocks=33, block_size=1, max_batch_tokens=16),
    "blocks-of-3": dict(num_blocks=11, block_size=3, max_batch_tokens=16, swap=True),
    "blocks-of-16": dict(num_blocks=3, block_size=16, max_batch_tokens=16),
    "static": dict(num_blocks=12, max_batch_tokens=16, static=True),
    "int8": dict(num_blocks=9, max_batch_tokens=16, kv_dtype="int8", swap=True),
}


@pytest.mark.parametrize("how", SPEC_HOWS)
def test_engine_spec_equals_plain(how):
    """Prompts that share prefixes, priorities, two samples of some: with drafts of random length,
    right, wrong and half right, all tokens, ends and log-probabilities are as without, nothing
    leaks and no step is over its budget."""
    model, (prompts, _) = paged_model(), paged_requests(8, seed=5)
    r, options = random.Random(0), SPEC_HOWS[how]
    params = [
        greedy(r.choice((1, 2, 9, 16)), n=1 + (i % 3 == 0), logprobs=i % 2 * 2 if i % 4 else None)
        for i in range(len(prompts))
    ]
    priorities = [r.choice((0, 0, -1, 2)) for _ in prompts]
    calm = dict(num_blocks=200, kv_dtype=options.get("kv_dtype"), prefix_cache=False)
    want = spec_generate(paged_engine(model, **calm), prompts, params)
    for lie in (0, 0.3, 1):
        model.calls, k = [], 3 + (lie == 0)
        drafter = SpecBatch(spec_texts(prompts, want), lie, ragged=lie > 0)
        engine = paged_engine(model, **options, drafter=drafter, speculate_k=k)
        got = spec_generate(engine, prompts, params, priorities)
        spec_same(got, want)
        assert max(model.calls) <= (64 if how == "static" else options["max_batch_tokens"])
        paged_idle(engine, options["num_blocks"])
        stats = engine.stats()
        assert stats["preemptions"] > 0 or how in ("roomy", "chunks", "static")
        assert stats["proposed"] > 0 and (stats["accepted"] > 0) == (lie < 1)
        assert len(drafter.over) == sum(len(o.samples) for o in got)


@pytest.mark.parametrize("name", [name for name in PAGED_CONFIGS if name != "gqa"])
def test_engine_spec_of_every_form(name):
    """Windows, ALiBi, latent attention."""
    model, (prompts, counts) = paged_model(name), paged_requests(6)
    want = paged_greedy(model, prompts, counts)
    drafter = SpecDrafter([p + w for p, w in zip(prompts, want)], 0.3, ragged=True)
    engine = paged_engine(model, num_blocks=9, max_batch_tokens=16, swap=True, drafter=drafter)
    got = spec_generate(engine, prompts, [*map(greedy, counts)])
    assert [o.token_ids for o in got] == want
    stats = engine.stats()
    assert 0 < stats["accepted"] < stats["proposed"]


@pytest.mark.parametrize("rows", [False, True], ids=["Sampler", "RowSampler"])
def test_engine_spec_sampled_text_is_the_same(rows):
    """Drawn with seeds, from the Engine's own sampler and from sampling.py's with penalties, bias
    and a least length: the text with drafts is the text without, token for token."""
    model, (prompts, _) = paged_model(), paged_requests(6)
    more = [dict(top_k=20), dict(top_p=0.7), dict(n=3), dict(temperature=0), {}, dict(seed=7)]
    if rows:
        more = [
            dict(repetition_penalty=1.4),
            dict(presence_penalty=0.5, frequency_penalty=0.3, n=2),
            dict(min_new_tokens=9, logit_bias={5: 1.0}, ignore_eos=False),
            dict(temperature=0, frequency_penalty=0.8),
            dict(min_p=0.02, top_k=30, seed=5),
            {},
        ]
    same = dict(temperature=0.3, max_new_tokens=14, ignore_eos=True, logprobs=0)
    params = [P.SamplingParams(**same | m) for m in more]

    def build(**how):
        sampler = V.RowSampler(97, 8, "cpu", [2]) if rows else None
        return paged_engine(model, max_running=8, sampler=sampler, eos_ids=(2,), **how)

    want = spec_generate(build(num_blocks=200), prompts, params)
    texts = spec_texts(prompts, want)
    for lie, swap in ((0, False), (0.3, True), (1, False)):
        drafter = SpecDrafter(texts, lie, ragged=lie > 0)
        engine = build(num_blocks=10, max_batch_tokens=20, swap=swap, drafter=drafter)
        spec_same(spec_generate(engine, prompts, params), want)
        assert engine.stats()["preemptions"] > 0
        assert (engine.stats()["accepted"] > 20) == (lie < 1)
        paged_idle(engine, 10)


def test_engine_spec_shipped_checkpoints():
    """The draft checkpoint drafts for the small one, in fp32: its greedy text, in fewer steps."""
    small, draft = (M.load_checkpoint(x, dtype=torch.float32) for x in (SMALL, DRAFT))
    prompts = [paged_prompt(n, n, 5, 500) for n in (3, 9, 14)]

    def propose(tokens, k):
        tokens = list(tokens)
        with torch.no_grad():
            for _ in range(k):
                tokens.append(int(draft(torch.tensor([tokens]))[0, -1].argmax()))
        return tokens[-k:], None

    plain = P.Engine(small, num_blocks=40)
    want = plain.generate(prompts, greedy(24))
    engine = P.Engine(small, num_blocks=40, drafter=propose, speculate_k=3)
    spec_same(engine.generate(prompts, greedy(24)), want)
    stats = engine.stats()
    assert stats["accepted"] > 10 and stats["steps"] < plain.stats()["steps"]


# ---- ends ----


def test_engine_spec_ends_inside_an_accepted_run():
    """EOS, a text to stop at and a listener that fails, at each place of a run of accepted tokens:
    the output ends there, the listener has heard just that, nothing is counted beyond."""
    model, prompt = paged_model(), [2, 5, 2, 7]
    (free,) = paged_greedy(model, [prompt], [14])
    for at in range(1, 12):
        eos = free[at]
        end, log = free.index(eos) + 1, []
        engine = paged_engine(
            model, num_blocks=9, eos_ids=(eos,), drafter=SpecBatch([prompt + free], seed=at),
            listen=lambda seq: PagedListener(seq, log),
        )  # fmt: skip
        (output,) = engine.generate([prompt], greedy(14, ignore_eos=False, logprobs=1))
        assert output.token_ids == free[:end] == log[0].tokens and output.finish_reason == "eos"
        assert log[0].ends == ["eos"] and len(output.logprobs) == end == len(output.times) - 1
        assert engine.stats()["tokens_new"] == end
        paged_idle(engine, 9)
        (output,) = engine.generate([prompt], greedy(at))
        assert output.token_ids == free[:at] == log[1].tokens and output.finish_reason == "length"

        class Fails(PagedListener):
            def push(self, token):
                super().push(token)
                if len(self.tokens) == at:
                    raise RuntimeError("no one listens")

        for listen, reason in (
            (lambda seq: PagedListener(seq, log, at), "stop"),
            (lambda seq: Fails(seq, log), "error"),
        ):
            drafter = SpecBatch([prompt + free])
            engine = paged_engine(model, num_blocks=9, drafter=drafter, listen=listen)
            (output,) = engine.generate([prompt], greedy(14))
            assert output.token_ids == free[:at] == log[-1].tokens
            assert output.finish_reason == reason and drafter.over == [log[-1].sequence]
            paged_idle(engine, 9)


def test_engine_spec_nothing_to_draw_inside_a_run():
    """-1 after some accepted tokens: these stay, and the sample ends with an error."""
    model, (prompts, _) = paged_model(), paged_requests(3)
    want = paged_greedy(model, prompts, [9] * 3)
    texts = [p + w for p, w in zip(prompts, want)]
    for at in range(9):
        sampler = PagedSampler()
        sampler.never = {(1, 0, at)}
        engine = paged_engine(model, num_blocks=20, sampler=sampler, drafter=SpecBatch(texts))
        outputs = spec_generate(engine, prompts, [greedy(9)] * 3)
        assert [o.token_ids for o in outputs] == [want[0], want[1][:at], want[2]]
        assert outputs[1].finish_reason == "error" and outputs[1].error and not outputs[0].error
        flat = [x for call in sampler.seen for x in call]
        assert len(flat) == len(set(flat)), "a token was drawn twice"
        paged_idle(engine, 20)


def test_engine_spec_nan_is_not_kept():
    """A call of the model that gives NaN, drafts and all: who was in it ends with an error or with
    the right tokens, and nobody finds what it wrote."""
    model, (prompts, counts) = paged_model(), paged_requests(5)
    want = paged_greedy(model, prompts, counts)
    texts, table = [p + w for p, w in zip(prompts, want)], model.embed.weight.data
    for k in range(1, 14):
        how = dict(num_blocks=9, max_batch_tokens=14, drafter=SpecBatch(texts, 0.2, ragged=True))
        engine = paged_engine(model, **how, swap=k % 2 == 0)
        for i, (prompt, n) in enumerate(zip(prompts, counts)):
            engine.add(prompt, greedy(n), id=i)
        live, step = dict(engine.outputs), 0
        while engine.unfinished:
            step += 1
            model.embed.weight.data = torch.full_like(table, math.nan) if step == k else table
            engine.step()
        model.embed.weight.data = table
        for i, tokens in enumerate(want):
            assert live[i].finish_reason == "error" or live[i].token_ids == tokens
        outputs = engine.generate(prompts, [*map(greedy, counts)])
        assert [o.token_ids for o in outputs] == want, k
        paged_idle(engine, 9)


# ---- what drafter, verifier and speculate_k are told, and what is asked of them ----


def test_engine_spec_drafter_observes_what_is_kept():
    """The hidden states it is shown are, at their positions, those of the text that came out, of
    no token that was dropped; each sequence's from its first run on without a gap, but for what
    the prefix cache had; it is told of each end once and nothing after."""
    model, (prompts, counts) = paged_model(), paged_requests(6)
    want = paged_greedy(model, prompts, counts)
    texts = [p + w for p, w in zip(prompts, want)]
    for prefix, n in ((False, 1), (True, 2)):
        drafter = SpecBatch(texts, 0.3, ragged=True)
        engine = paged_engine(
            model, num_blocks=40, max_batch_tokens=14, prefix_cache=prefix, drafter=drafter
        )
        outputs = spec_generate(engine, prompts, [greedy(c, n=n) for c in counts])
        assert [o.token_ids for o in outputs] == want
        seqs = {(seq.request.id, seq.index): seq for seq in drafter.over}
        assert len(seqs) == len(drafter.over) == n * len(prompts)
        for seq, parts in drafter.seen.items():
            with torch.no_grad():
                text = torch.tensor([prompts[seq.request.id] + want[seq.request.id]])
                whole = M.Transformer.forward(model, text, return_hidden=True)[0]
            assert prefix or parts[0][0] == 0
            assert not seq.index or parts[0][0] == seq.n_prompt
            at = parts[0][0]
            for start, hidden in parts:
                assert start == at and relative(hidden, whole[start : start + len(hidden)]) < 1e-4
                at += len(hidden)
            # the last token's is not needed; a run that ends the text may have been accepted whole
            assert len(seq.tokens) - 1 <= at <= len(seq.tokens)


def test_engine_spec_verifier_sees_its_rows():
    """For each sequence the logits after its last token and after each drafted one, whatever else
    is in the step; the drafts as they were proposed; it is not called where nothing is."""
    model, (prompts, counts) = paged_model(), paged_requests(6)
    want = paged_greedy(model, prompts, counts)
    texts, probs, mixed, called = [p + w for p, w in zip(prompts, want)], {}, 0, []

    class Certain(SpecDrafter):
        def __call__(self, tokens, k):
            draft, _ = super().__call__(tokens, k)
            probs[tuple(tokens)] = torch.full((len(draft), 97), 1 / 97)
            return draft, probs[tuple(tokens)]

    def verify(logits, heads, drafts):
        nonlocal mixed
        assert len(heads) == len(drafts) and any(tokens for tokens, _ in drafts)
        mixed += any(p is None for _, p in drafts)
        row, runs = 0, []
        for seq, (tokens, p) in zip(heads, drafts):
            assert (p is None and tokens == []) or p is probs[tuple(seq.tokens)]
            expected = paged_plain_forward(model, seq.tokens + tokens)[len(seq.tokens) - 1 :]
            mine, row = logits[row : row + len(expected)], row + len(expected)
            assert relative(mine, expected) < 1e-4
            ids = mine.argmax(-1).tolist()
            n = next((i for i, t in enumerate(tokens) if ids[i] != t), len(tokens))
            runs.append(ids[: n + 1])
        assert row == len(logits)
        called.append(sum(len(tokens) for tokens, _ in drafts))
        return runs

    engine = paged_engine(
        model, num_blocks=12, max_batch_tokens=12, drafter=Certain(texts, 0.2, ragged=True),
        verifier=verify,
    )  # fmt: skip
    outputs = spec_generate(engine, prompts, [*map(greedy, counts)])
    assert [o.token_ids for o in outputs] == want and mixed
    assert engine.stats()["steps"] > len(called) and sum(called) == engine.stats()["proposed"]


@pytest.mark.parametrize(
    "found",
    [
        [([1, 2, 3, 4], None)],
        [([97], None)],
        [([-1], None)],
        [([1.0], None)],
        [([True], None)],
        [],
        [([1], None)] * 2,
    ],
)
def test_engine_spec_bad_drafts_are_refused(found):
    """More than asked for, what is no token id, more or fewer drafts than sequences: ValueError
    that names the drafter; with a better one the request goes on."""
    model, prompt = paged_model(), paged_prompt(6, 1)
    (want,) = paged_greedy(model, [prompt], [9])
    drafter = SpecBatch([])
    drafter.many = lambda *_: found
    engine = paged_engine(model, num_blocks=9, drafter=drafter, speculate_k=3)
    engine.add(prompt, greedy(9))
    (output,) = engine.step()
    for _ in range(2):
        with pytest.raises(ValueError, match="drafter"):
            for _ in range(2):  # a step that failed is begun again: its prompt, without drafts
                engine.step()
        paged_check(engine)
    drafter.many = lambda sequences, *_: [([], None)] * len(sequences)
    paged_run(engine)
    assert output.token_ids == want


@pytest.mark.parametrize(
    "answer", [lambda d: [], lambda d: [[]], lambda d: [[*d, 1, 1]], lambda d: [[d[0] + 1, 1]]]
)
def test_engine_spec_bad_verdicts_are_refused(answer):
    """No answer, no token, more than drafted and one, others than drafted before the last."""
    model, prompt = paged_model(), paged_prompt(6, 1)
    (want,) = paged_greedy(model, [prompt], [9])
    engine = paged_engine(
        model, num_blocks=9, drafter=SpecDrafter([prompt + want]), speculate_k=3,
        verifier=lambda logits, heads, drafts: answer(drafts[0][0]),
    )  # fmt: skip
    engine.add(prompt, greedy(9))
    (output,) = engine.step()
    with pytest.raises(ValueError, match="verifier"):
        engine.step()
    engine.verifier = lambda logits, heads, drafts: [[int(logits[0].argmax())]]
    paged_run(engine)
    assert output.token_ids == want


@pytest.mark.parametrize("k", [-1, 1.5, True, None, "4"])
def test_engine_spec_speculate_k_is_checked(k):
    with pytest.raises(ValueError, match="speculate_k"):
        paged_engine(paged_model(), num_blocks=9, drafter=SpecDrafter([]), speculate_k=k)


class SpecChooser:
    def __init__(self, k):
        self.k, self.rows, self.seen = k, [], []

    def choose(self, sequences):
        assert sequences
        self.rows.append(list(sequences))
        return [self.k(seq) for seq in sequences]

    def observe(self, sequences, proposed, accepted, tokens, seconds, draft_seconds):
        self.seen.append((sequences, proposed, accepted, tokens, seconds, draft_seconds))


def test_engine_spec_chooser_is_asked_and_told():
    """Of each sequence that decodes it says how many; what came of it it hears after every step
    that ran one: tokens of the whole step, seconds of the whole step and of the drafter in it."""
    now = [0.0]
    model, (prompts, counts) = paged_model(), paged_requests(6)
    want = paged_greedy(model, prompts, counts)
    drafter = SpecDrafter([p + w for p, w in zip(prompts, want)], 0.3)

    def propose(tokens, k):
        now[0] += 0.25
        return drafter(tokens, k)

    forward = P.Engine._hidden

    class Slow(P.Engine):
        def _hidden(self, step):
            now[0] += 1
            return forward(self, step)

    chooser = SpecChooser(lambda seq: seq.request.id % 4)
    engine = Slow(
        model, num_blocks=30, block_size=4, max_batch_tokens=24, max_running=5, drafter=propose,
        speculate_k=chooser, clock=lambda: now[0],
    )  # fmt: skip
    outputs = spec_generate(engine, prompts, [*map(greedy, counts)])
    assert [o.token_ids for o in outputs] == want
    stats = engine.stats()
    assert sum(sum(x[1]) for x in chooser.seen) == stats["proposed"] == sum(drafter.asked)
    assert sum(sum(x[2]) for x in chooser.seen) == stats["accepted"]
    assert len(chooser.rows) == len(chooser.seen) < stats["steps"]
    assert any(not sum(x[1]) for x in chooser.seen)
    for rows, (seqs, proposed, accepted, tokens, seconds, draft) in zip(chooser.rows, chooser.seen):
        assert rows == seqs and len(proposed) == len(accepted) == len(seqs)
        assert all(a <= p <= s.request.id % 4 for s, p, a in zip(seqs, proposed, accepted))
        assert draft == 0.25 * sum(p > 0 for p in proposed) and seconds == 1 + draft
        assert len(seqs) + sum(proposed) <= tokens <= 24


def test_engine_spec_without_drafts_nothing_changes():
    """No drafter: no clock, no draft, one call of the sampler a step as ever. A drafter that has
    nothing to say, and one that is asked for nothing, change no call of model or sampler."""
    model, (prompts, counts) = paged_model(), paged_requests(6)
    seen = []
    silent = lambda tokens, k: ([], None)
    refuse = lambda *_: pytest.fail("there is nothing to verify")
    for how in ({}, dict(drafter=silent), dict(drafter=refuse, speculate_k=0)):
        model.calls, sampler, ticks = [], PagedSampler(), []
        engine = paged_engine(
            model, num_blocks=9, max_batch_tokens=12, sampler=sampler, swap=True, **how
        )
        engine.verifier = refuse
        engine.clock = lambda: ticks.append(0) or float(len(ticks))
        outputs = spec_generate(engine, prompts, [greedy(n, n=2) for n in counts])
        tokens = [[s.token_ids for s in o.samples] for o in outputs]
        seen.append((model.calls, sampler.seen, tokens))
        if not how:
            assert len(ticks) == len(prompts) + 2 * engine.stats()["steps"]
    assert seen[0] == seen[1] == seen[2]


def test_engine_spec_shapes_are_few():
    """A step with drafts is padded to twice its sequences or its tokens, and not to the mixed
    shape while it is smaller; there are no more such shapes than powers of two."""
    engine = paged_engine(paged_model(), num_blocks=99, max_running=32, max_batch_tokens=256)
    chunk, shapes = lambda n: P.Chunk([5] * n, 0, [0]), set()
    for r in range(1, 33):
        for k in (1, 2, 5, 7):
            chunks = [chunk(1 + k)] + [chunk(1 + (k if r % 2 else 0))] * (r - 1)
            n = sum(len(c.tokens) for c in chunks)
            N, R = engine._shape(chunks, True)
            assert N >= n and R >= r and N > R and (N < 4 * max(n, r) or N <= 64)
            shapes.add((N, R))
    assert engine._shape([chunk(5)], True) == (8, 4) and len(shapes) <= 8
    assert engine._shape([chunk(200)] + [chunk(3)] * 3, True) == (256, 32)
    assert engine._shape([chunk(5)]) == (64, 32)


def test_engine_spec_static_shapes_are_used():
    model, (prompts, counts) = paged_model(), paged_requests(4)
    want = paged_greedy(model, prompts, counts)
    drafter = SpecDrafter([p + w for p, w in zip(prompts, want)], 0.3, ragged=True)
    engine = paged_engine(model, num_blocks=40, static=True, drafter=drafter, max_running=16)
    outputs = spec_generate(engine, prompts, [*map(greedy, counts)])
    assert [o.token_ids for o in outputs] == want and len({*model.calls} - {64}) >= 3
    assert all(n & (n - 1) == 0 for n in model.calls)


def test_engine_spec_two_workers():
    """One engine takes what has its first token or more, another goes on with it: both draft."""
    model, (prompts, _) = paged_model(), paged_requests(6)
    want = paged_greedy(model, prompts, [16] * 6)
    texts = [p + w for p, w in zip(prompts, want)]
    for bs in (1, 3, 4):
        first, second = SpecBatch(texts), SpecBatch(texts, 0.3, ragged=True)
        a = paged_engine(model, num_blocks=99, block_size=bs, drafter=first)
        b = paged_engine(model, num_blocks=-(-36 // bs), block_size=bs, swap=True, drafter=second)
        for i, prompt in enumerate(prompts):
            a.add(prompt, greedy(16, n=1 + i % 2), id=i)
        live = {}
        for turn in range(2):
            a.step()
            for i in range(3 * turn, 3 * turn + 3):
                b.give(a.take(i))
                spec_check(a), spec_check(b)
            live |= {o.id: o for o in b.step()}
        paged_idle(a, 99)
        live |= {o.id: o for o in paged_run(b, spec_check)}
        for i, tokens in enumerate(want):
            assert [s.token_ids for s in live[i].samples] == [tokens] * (1 + i % 2)
        assert len(first.over) == len(second.over) == 9 and a.stats()["accepted"] > 0


# ---- what goes wrong ----


@pytest.mark.parametrize("swap", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "where",
    ["drafter", "verifier", "observe", "forget", "choose", "told", "model", "sampler", "push",
     "clock", "policy"],
)  # fmt: skip
def test_engine_spec_interrupted_anywhere(where, swap):
    """A key pressed at any call of whatever the Engine calls: the next steps go on, every sample
    has the tokens it would have had, each of them once, and the listener has heard them once."""
    model, (prompts, counts) = paged_model(seed=3), paged_requests(4, seed=1)
    params = [greedy(n, n=1 + i % 3) for i, n in enumerate(counts)]
    want = paged_greedy(model, prompts, counts)
    texts = [p + w for p, w in zip(prompts, want)]
    few = where in ("policy", "clock")
    for at in range(1, 400, 9 if few else 2):
        calls, log = [0], []

        def bomb(*_):
            calls[0] += 1
            if calls[0] == at:
                raise KeyboardInterrupt
            return 0.0

        def around(call):
            return lambda *args: bomb() or call(*args)

        class Hears(PagedListener):
            def push(self, token):
                super().push(token)
                bomb() if where == "push" else None

        drafter, chooser = SpecBatch(texts, 0.2, ragged=True, seed=at), SpecChooser(lambda seq: 4)
        how = dict(policy=lambda s: bomb() or P.first_come(s)) if where == "policy" else {}
        engine = paged_engine(
            model, num_blocks=9, max_batch_tokens=14, swap=swap, drafter=drafter,
            speculate_k=chooser, listen=lambda s: Hears(s, log), **how,
        )  # fmt: skip
        for i, (prompt, p) in enumerate(zip(prompts, params)):
            engine.add(prompt, p, id=i)
        outputs = dict(engine.outputs)
        for name, owner, attribute in (
            ("drafter", drafter, "many"),
            ("verifier", engine, "verifier"),
            ("observe", drafter, "observe"),
            ("forget", drafter, "forget"),
            ("choose", chooser, "choose"),
            ("told", chooser, "observe"),
            ("model", engine, "_hidden"),
            ("sampler", engine, "sampler"),
            ("clock", engine, "clock"),
        ):
            if name == where:
                setattr(owner, attribute, around(getattr(owner, attribute)))
        limit = 300
        while engine.unfinished:
            limit -= 1
            assert limit, "it does not come to an end"
            try:
                engine.step()
            except KeyboardInterrupt:
                paged_check(engine)
        for i, output in outputs.items():
            assert [s.token_ids for s in output.samples] == [want[i]] * params[i].n, (where, at, i)
        for heard in log:
            assert heard.tokens == want[heard.sequence.request.id], (where, at)
        paged_idle(engine, 9)
        if calls[0] < at:
            break
    assert at > 3 and calls[0] < at or few


def test_engine_spec_interrupted_between_two_tokens():
    """Even a key pressed just where a token has left the queue and is not yet told."""
    model, prompt = paged_model(), paged_prompt(6, 1)
    (want,) = paged_greedy(model, [prompt], [14])
    for at in range(1, 15):
        engine = paged_engine(model, num_blocks=9, drafter=SpecDrafter([prompt + want]))
        engine.add(prompt, greedy(14), id=0)
        output, append, calls = engine.outputs[0], engine._append, []

        def fails(*args):
            calls.append(0)
            if len(calls) == at:
                raise KeyboardInterrupt
            append(*args)

        engine._append = fails
        while engine.unfinished:
            try:
                engine.step()
            except KeyboardInterrupt:
                paged_check(engine)
        assert output.token_ids == want
        paged_idle(engine, 9)


def test_engine_spec_abort_at_any_step():
    """Abort any request after any step, or from inside a listener in the middle of a run: it keeps
    the right tokens that were told; the others' are the same."""
    model, (prompts, _) = paged_model(seed=2), paged_requests(5)
    want = paged_greedy(model, prompts, [12] * 5)
    texts = [p + w for p, w in zip(prompts, want)]
    for at in range(24):
        victim, log = at % 5, []

        class Aborts(PagedListener):
            def push(self, token):
                super().push(token)
                total = sum(len(x.tokens) for x in log)
                if at % 2 and total >= 2 * at and victim in engine.outputs:
                    engine.abort(victim)

        drafter = SpecBatch(texts, 0.2, ragged=True, seed=at)
        engine = paged_engine(
            model, num_blocks=10, max_batch_tokens=14, swap=at % 3 == 0, drafter=drafter,
            listen=lambda seq: Aborts(seq, log),
        )  # fmt: skip
        for i, prompt in enumerate(prompts):
            engine.add(prompt, greedy(12, n=1 + (i == 3)), id=i)
        outputs = dict(engine.outputs)
        for _ in range(at // 2):
            engine.step()
        if victim in engine.outputs and at % 2 == 0:
            engine.abort(victim)
            spec_check(engine)
        paged_run(engine, spec_check)
        for i, output in outputs.items():
            for sample in output.samples:
                whole = 12 if sample.finish_reason != "abort" else len(sample.token_ids)
                assert sample.token_ids == want[i][:whole]
                assert i == victim or sample.finish_reason == "length"
        for heard in log:
            sample = outputs[heard.sequence.request.id].samples[heard.sequence.index]
            assert heard.tokens == sample.token_ids and heard.ends == [sample.finish_reason]
        assert {*drafter.seen} <= {*drafter.over}
        paged_idle(engine, 10)


@pytest.mark.parametrize("seed", range(8))
def test_engine_spec_fuzz(seed):
    """Random requests, samples, priorities, aborts, failures, in any block size, budget and mode,
    with drafts of any length and worth: every token is greedy's, nothing leaks."""
    model, r = paged_model(), random.Random(seed)
    pool, _ = paged_requests(10, seed=11)
    pool += [p[:4] for p in pool[:3]] + [p[:8] for p in pool[:3]]
    want = paged_greedy(model, pool, [20] * len(pool))
    texts = [p + w for p, w in zip(pool, want)]
    bs, budget = r.choice((1, 2, 3, 4, 5, 16)), r.choice((2, 3, 5, 9, 16, 64))
    num_blocks = -(-r.randint(34, 50) // bs)
    drafter = SpecBatch(texts, r.choice((0, 0.2, 0.6)), ragged=True, seed=seed)
    engine = paged_engine(
        model, num_blocks=num_blocks, block_size=bs, max_batch_tokens=budget,
        max_running=r.randint(1, min(8, budget)), swap=r.random() < 0.5,
        prefix_cache=r.random() < 0.8, drafter=drafter,
        speculate_k=SpecChooser(lambda seq: r.randint(0, 6)),
    )  # fmt: skip
    most, which, live, turn = engine.scheduler.max_running, {}, {}, 0
    while turn < 50 or engine.unfinished:
        kind, turn, model.fail_at = r.random(), turn + 1, None
        if kind < 0.5 and turn < 50:
            i, p, n = len(which), r.randrange(len(pool)), r.choice((1, 2, 5, 9, 20))
            which[i] = p, n
            params = greedy(n, n=min(most, r.choice((1, 1, 1, 2, 3))))
            engine.add(pool[p], params, id=i, priority=r.choice((0, 0, 0, -1, 2)))
        elif kind < 0.57 and engine.unfinished:
            i = r.choice([*engine.outputs])
            live[i] = engine.abort(i)
        elif kind < 0.65:
            model.fail_at, model.fail_in = len(model.calls) + 1, r.randint(-1, 3)
        try:
            live |= {o.id: o for o in engine.step()}
            spec_check(engine, 6)
        except RuntimeError:
            paged_check(engine)
        assert turn < 2000, "the engine does not come to an end"
    for i, (p, n) in which.items():
        for sample in live[i].samples:
            whole = n if sample.finish_reason == "length" else len(sample.token_ids)
            assert sample.token_ids == want[p][:whole]
            assert sample.finish_reason in ("abort", "length")
    paged_idle(engine, num_blocks)
    assert max(model.calls) <= budget and {*drafter.seen} <= {*drafter.over}


# ---- the scheduler alone ----


class SpecWorld(PagedWorld):
    """PagedWorld with drafts: slots for them are written with the marks of what is drafted, and a
    random number of them, at most `right` in each, is accepted."""

    def __init__(self, *args, right=None, wants=4, **more):
        super().__init__(*args, **more)
        self.right, self.wants, self.granted, self.drafted = right, wants, 0, {}
        self.coins = random.Random(1)  # apart, so that a twin without drafts draws the same

    def plan(self):
        s = self.scheduler
        for seq in s.running:
            seq.wants = self.coins.randint(0, self.wants) if seq.width == 1 else 0
        waiting = {seq: seq.wants for seq in s.waiting}
        assert not any(waiting.values()), "who does not run wants nothing"
        wanted = {seq: seq.wants for seq in s.running}
        plan = super().plan()
        self.allocator.check(paged_tables(s))
        lengths = dict(plan.run)
        assert sum(lengths.values()) + sum(plan.drafts.values()) == self.budget - plan.budget
        assert plan.budget >= 0
        for seq, n in plan.drafts.items():
            assert 0 < n <= wanted[seq] and lengths[seq] == 1 and seq.remaining == 1
            assert len(seq.output) + 1 + n <= seq.params.max_new_tokens
            writes = range(len(seq.tokens) // self.bs, -(-(len(seq.tokens) + n) // self.bs))
            for at in writes:
                block = seq.table[at]
                assert self.allocator.refs[block] == 1 and block not in self.allocator.place
        for seq in s.running:
            need = len(seq.tokens) + plan.drafts.get(seq, 0)
            assert 0 <= len(seq.table) * self.bs - need < self.bs, "a block wasted"
        if self.allocator.n_free and plan.budget:  # nobody is refused without a reason
            for seq, n in lengths.items():
                left = seq.params.max_new_tokens - len(seq.output) - 1
                if seq.remaining == 1 and wanted.get(seq):
                    shared = [b for b in seq.table[len(seq.tokens) // self.bs :]
                              if self.allocator.refs[b] > 1]  # fmt: skip
                    want = 0 if shared else min(wanted[seq], left)
                    assert plan.drafts.get(seq, 0) == want
        self.granted += sum(plan.drafts.values())
        return plan

    def execute(self, plan):
        super().execute(plan)
        self.drafted = {}
        for seq, n in plan.drafts.items():
            drafted = [self.coins.randint(0, 1) for _ in range(n)]
            for p, mark in enumerate(self.marks(seq.tokens + drafted)):
                if p >= len(seq.tokens):
                    self.slots[self.slot(seq, p)] = mark
            self.drafted[seq] = drafted

    def check(self):
        s = self.scheduler
        self.allocator.check(paged_tables(s))
        assert {id(x) for x in (*s.running, *s.waiting)} == {id(x) for x in self.alive}

    def step(self, forks=0.0, failures=0.0, pick=None, lost=0.0):
        """lost: the tokens of a sequence do not come: it is interrupted after the model ran."""
        plan = self.plan()
        self.steps, self.last = self.steps + 1, list(plan.run)
        if self.r.random() < failures:
            self.fail(plan)
            self.check()
            return
        self.execute(plan)
        self.scheduler.commit(plan)
        self.ran += sum(n for _, n in plan.run)
        for seq, _ in plan.run:
            if seq.computed < len(seq.tokens):
                continue
            row = [seq]
            while (
                self.r.random() < forks
                and len(self.scheduler.running) < self.max_running
                and seq not in plan.drafts
            ):
                row.append(self.scheduler.fork(seq))
                self.alive.append(row[-1])
            if lost and self.coins.random() < lost:
                continue
            draft = self.drafted.get(seq, [])
            n = self.coins.randint(
                0, len(draft) if self.right is None else min(self.right, len(draft))
            )
            if n:
                self.scheduler.accept(seq, n)
                come = self.coins.randint(0, n) if lost else n
                seq.tokens += draft[:come]
                if come < n:
                    continue  # interrupted in the middle of the run
            for x in row:
                x.tokens.append(pick(x) if pick else self.r.randint(0, 1))
                if len(x.output) >= x.params.max_new_tokens:
                    self.end(x)
        self.check()


SPEC_WORLDS = [
    (12, 1, 4, 3, True),
    (8, 3, 7, 64, True),
    (8, 3, 7, 64, False),
    (6, 4, 64, 8, True),
    (24, 1, 7, 64, True),
    (3, 16, 16, 1, True),
    (40, 2, 13, 6, True),
]


def spec_arrivals(world, seed, turns=60):
    """What happens to a world: (turn, tokens, new, priority), the same for the same seed."""
    r, room, found = random.Random(seed), world.n * world.bs, []
    family = [[r.randint(0, 1) for _ in range(room)] for _ in range(2)]
    for turn in range(turns):
        if r.random() < 0.4:
            new = r.randint(1, max(1, room // 3))
            length = r.choice((1, world.bs, world.bs + 1, 2 * world.bs, r.randint(1, room)))
            length = max(1, min(length, room - new))
            found.append((turn, r.choice(family)[:length], new, r.choice((0, 0, 0, 1, -1))))
    return found


@pytest.mark.parametrize("num_blocks, bs, budget, max_running, prefix", SPEC_WORLDS)
def test_engine_spec_scheduler_fuzz(num_blocks, bs, budget, max_running, prefix):
    """Random arrivals, forks, aborts, failures, interruptions, and drafts of which a random part is
    accepted: each token is computed from just what stands before it; blocks for tokens and drafts
    and none besides; drafts write to nobody else's blocks; budgets hold, all end, nothing leaks."""
    granted = 0
    for seed in range(6):
        world = SpecWorld(num_blocks, bs, budget, max_running, prefix, seed, swap=seed % 2 == 1)
        arrivals = spec_arrivals(world, seed)
        for turn in range(60):
            for _, tokens, new, priority in (a for a in arrivals if a[0] == turn):
                world.add(tokens, new, priority)
            if world.alive and world.r.random() < 0.05:
                world.end(world.r.choice(world.alive))
            world.step(forks=0.1, failures=0.05, lost=0.1 if seed > 2 else 0)
        world.drain(forks=0.1, failures=0.03, lost=0.1 if seed > 2 else 0)
        granted += world.granted
    assert granted > 30


@pytest.mark.parametrize("num_blocks, bs, budget, max_running, prefix", SPEC_WORLDS)
def test_engine_spec_scheduler_takes_from_nobody(num_blocks, bs, budget, max_running, prefix):
    """Where nothing drafted is right, each step runs and preempts just what it would without, and
    admits the same: drafts cost others nothing. (But for cached prefixes that they push out.)"""
    granted = preempted = 0
    for seed in range(4):
        twins = [
            SpecWorld(num_blocks, bs, budget, max_running, False, seed, right=0, wants=wants)
            for wants in (0, 4)
        ]
        for world in twins:
            world.scheduler.swap = seed % 2 == 1
        arrivals = spec_arrivals(twins[0], seed)
        for turn in range(2000):
            runs = []
            for world in twins:
                for _, tokens, new, priority in (a for a in arrivals if a[0] == turn):
                    world.add(tokens, new, priority)
                if world.alive:
                    world.step()
                runs.append([(s.arrival, s.index, n) for s, n in world.last])
            assert runs[0] == runs[1]
            if turn > 60 and not twins[0].alive:
                break
        assert not twins[1].alive
        assert twins[0].scheduler.n_preempted == twins[1].scheduler.n_preempted
        granted, preempted = granted + twins[1].granted, preempted + twins[1].scheduler.n_preempted
        assert not twins[0].granted
    assert granted > 30 and (preempted or max_running < 4)


def test_engine_spec_accepted_tokens_are_found():
    """Blocks that accepted tokens filled are in the prefix tree: the next turn of a talk hits them
    all, whatever part of it was drafted."""
    model, prompt = paged_model(), paged_prompt(9, 7)
    (want,) = paged_greedy(model, [prompt], [16])
    for lie in (0, 0.4, 1):
        drafter = SpecDrafter([prompt + want], lie, seed=3)
        engine = paged_engine(model, num_blocks=30, drafter=drafter)
        engine.generate([prompt], greedy(16))
        turn = prompt + want + [5]
        before = engine.stats()["tokens_run"] - engine.stats()["proposed"]
        (answer,) = engine.generate([turn], greedy(1))
        # of 25 tokens 24 were run and make 6 blocks; what the last run had accepted is not found
        again = engine.stats()["tokens_run"] - engine.stats()["proposed"] - before
        assert again == len(turn) - (24 if lie == 1 else 20)
        assert answer.token_ids == paged_greedy(model, [turn], [1])[0]


def test_engine_spec_taken_after_an_interruption():
    """A key pressed while accepted tokens are told, and the request taken before the next step:
    what had come goes along, and the other engine goes on after it."""
    model, prompt = paged_model(), paged_prompt(6, 1)
    (want,) = paged_greedy(model, [prompt], [14])
    for at in range(1, 10):

        class Interrupts(PagedListener):
            def push(self, token):
                super().push(token)
                if len(self.tokens) == at:
                    raise KeyboardInterrupt

        drafter = SpecDrafter([prompt + want])
        a = paged_engine(
            model, num_blocks=9, drafter=drafter, listen=lambda s: Interrupts(s, []), speculate_k=3
        )
        b = paged_engine(model, num_blocks=9, drafter=drafter)
        a.add(prompt, greedy(14), id=0)
        with pytest.raises(KeyboardInterrupt):
            for _ in range(14):
                a.step()
        parcel = a.take(0)
        assert parcel.output.token_ids == want[: 1 + 4 * -(-(at - 1) // 4)]
        b.give(parcel)
        (output,) = {o.id: o for o in paged_run(b, spec_check)}.values()
        assert output.token_ids == want
        paged_idle(a, 9)


def test_engine_spec_aborted_while_others_fork():
    """A request aborted by the listener of another's sample, in the middle of a step in which it
    has a draft: nothing of it is observed any more."""
    model, (prompts, _) = paged_model(), paged_requests(2)
    (want, other) = paged_greedy(model, prompts, [14] * 2)

    def listen(seq):
        if seq.index == 1 and "a" in engine.outputs:
            engine.abort("a")
        return PagedListener(seq, [])

    drafter = SpecBatch([prompts[0] + want, prompts[1] + other])
    engine = paged_engine(model, num_blocks=30, drafter=drafter, listen=listen)
    engine.add(prompts[0], greedy(14), id="a")
    output = engine.outputs["a"]
    engine.step()
    engine.add(prompts[1], greedy(14, n=2), id="b")
    done = {o.id: o for o in paged_run(engine, spec_check)}
    assert output.token_ids == want[:1] and output.finish_reason == "abort"
    assert [s.token_ids for s in done["b"].samples] == [other] * 2
    paged_idle(engine, 30)


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_engine_spec_none_where_samples_fork(block_size):
    """A prompt whose last token is run by itself, before its samples fork: nothing is drafted until
    they have, and then for each."""
    model, prompt = paged_model(), paged_prompt(8, 4)
    (want,) = paged_greedy(model, [prompt], [12])
    drafter = SpecBatch([prompt + want])
    engine = paged_engine(
        model, num_blocks=60, block_size=block_size, max_batch_tokens=7, drafter=drafter
    )
    engine.add(prompt, greedy(12, n=2), id=0)
    engine.step()
    assert engine.scheduler.running[0].remaining == 1
    engine.step()
    assert not drafter.asked
    (output,) = paged_run(engine, spec_check)
    assert [s.token_ids for s in output.samples] == [want] * 2 and engine.stats()["accepted"] > 4
    paged_idle(engine, 60)


# --------------------------------------------------------------------------------------------------
# train.py --train-draft-head
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def draft_head_targets(corpus, tmp_path_factory) -> Path:
    """Three frozen models: dense, trained for a moment so that there is something to foretell,
    with a tied head; dense with a head of its own, in bf16; MLA with experts and MTP."""
    path = tmp_path_factory.mktemp("targets")
    small = dict(vocab_size=320, dim=32, n_layers=2, n_heads=2, n_kv_heads=1)
    (path / "shape.json").write_text(json.dumps(tiny(**small, tie_embeddings=True).to_hf()))
    argv = ["--data", corpus, "--model", path / "shape.json", "--out", path / "dense"]
    argv += ["--seq-len", 32, "--steps", 80, "--lr", 2e-2, "--device", "cpu", "--dtype", "fp32"]
    assert T.main([str(a) for a in argv]) == 0
    for name, config, dtype in (
        ("untied", tiny(**small), torch.bfloat16),
        ("moe", latent(vocab_size=320, tie_embeddings=True), torch.float32),
    ):
        M.save_checkpoint(random_model(config).to(dtype), path / name)
        shutil.copy(path / "dense" / "tokenizer.model", path / name)
    return path


def draft_head_argv(corpus, init: Path, out: Path, *more) -> list[str]:
    argv = ["--train-draft-head", "--init", init, "--out", out, "--data", corpus, "--steps", 6]
    argv += ["--seq-len", 32, "--batch-size", 4, "--lr", 1e-2, "--eval-every", 3, "--dtype", "fp32"]
    return [str(a) for a in (*argv, "--device", "cpu", *more)]


def draft_head_made(config: M.ModelConfig, seed: int = 0) -> E.DraftHead:
    """One that is no identity."""
    head = T.new_draft_head(config.dim, seed)
    with torch.no_grad():
        head.down.weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(seed))
        for norm in (head.hidden_norm, head.embed_norm):
            norm.weight.normal_(1, 0.2, generator=torch.Generator().manual_seed(seed + 1))
    return head


def draft_head_loaded(out: Path) -> tuple[E.DraftHead, dict]:
    """The file as whoever reads it has to: the shape from its metadata, then the tensors."""
    with safe_open(out / T.DRAFT_HEAD, framework="pt") as f:
        about = {key: json.loads(value) for key, value in f.metadata().items()}
    head = E.DraftHead(about["dim"], about["ffn_dim"])
    head.load_state_dict(load_file(out / T.DRAFT_HEAD))
    return head, about


@pytest.fixture(scope="module")
def draft_head_run(corpus, draft_head_targets, tmp_path_factory) -> Path:
    """A whole run for the dense model, 40 steps."""
    out = tmp_path_factory.mktemp("heads") / "whole"
    more = ("--steps", 40, "--eval-every", 20)
    assert T.main(draft_head_argv(corpus, draft_head_targets / "dense", out, *more)) == 0
    return out


@pytest.mark.parametrize("config", [tiny(), tiny(tie_embeddings=True), latent()])
def test_draft_head_begins_as_the_identity(config):
    """Before the first step each draft's logits are the target's own at the position it began at,
    to the bit; so the loss is the cross-entropy of the target there with the target further on."""
    model, tokens = random_model(config), random_tokens(config, 2, 14)
    target, drafts = T.draft_logits(T.new_draft_head(config.dim, 0), model, tokens)
    torch.testing.assert_close(target, model(tokens), rtol=0, atol=0)
    assert len(drafts) == T.DRAFTED == 4
    for i, draft in enumerate(drafts, 1):
        assert draft.shape == (2, 14 - i, config.vocab_size)
        torch.testing.assert_close(draft, model.head(model(tokens, return_hidden=True)[:, :-i]))


def draft_head_plainly(head, model, tokens) -> torch.Tensor:
    """The loss, position by position and step by step, as its definition says it."""
    terms = {1: [], 2: [], 3: [], 4: []}
    for row in tokens:
        hidden = model(row[None], return_hidden=True)[0]
        for t in range(len(row)):
            g = hidden[t]
            for i in range(1, 5):
                if t + i < len(row):
                    g = head(g, model.embed.weight[row[t + i]])
                    p = model.head(hidden[t + i]).softmax(-1)
                    terms[i].append(-(p * model.head(g).log_softmax(-1)).sum())
    means = [torch.stack(terms[i]).mean() for i in (1, 2, 3, 4)]
    return (8 * means[0] + 4 * means[1] + 2 * means[2] + means[3]) / 15


@pytest.mark.parametrize("config", [tiny(), latent(tie_embeddings=True)])
def test_draft_head_gradient_is_a_plain_loops(config):
    """Loss and gradient == those of a loop over rows, positions and steps, in float64; the model
    gets no gradient."""
    model, tokens = random_model(config).double(), random_tokens(config, 3, 9)
    head = draft_head_made(config).double()
    expected = draft_head_plainly(head, model, tokens)
    wanted = torch.autograd.grad(expected, list(head.parameters()))
    with pytest.MonkeyPatch.context() as patch:  # the programs compute these in fp32
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        loss = T.draft_loss(*T.draft_logits(head, model, tokens))
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for p, grad in zip(head.parameters(), wanted, strict=True):
        assert grad.abs().max() > 1e-4
        torch.testing.assert_close(p.grad, grad)
    assert all(p.grad is None for p in model.parameters())


def test_draft_head_micro_batches_are_one_batch(corpus, draft_head_targets, tmp_path):
    """Losses and gradient norms of a step do not depend on --micro-batch-size, uneven ones
    included, nor does what validation says."""
    rows = []
    for micro in (1, 3, 4):
        out = tmp_path / str(micro)
        more = ("--steps", 3, "--micro-batch-size", micro)
        assert T.main(draft_head_argv(corpus, draft_head_targets / "dense", out, *more)) == 0
        rows.append(metrics(out))
    for others in rows[:2]:
        for a, b in zip(others, rows[2], strict=True):
            for key in b:
                assert a[key] == pytest.approx(b[key], rel=1e-4), key


def test_draft_head_counts_what_decoding_would_take():
    """draft_counts == chains walked one by one on the text: tried where the text's next token is
    the target's choice; step i+1 only if draft, choice and text agreed at i."""
    config = tiny(vocab_size=3)
    model, head = random_model(config, std=0.4), draft_head_made(config)
    tokens = torch.randint(3, (8, 60), generator=torch.Generator().manual_seed(0))
    target, drafts = T.draft_logits(head, model, tokens)
    expected = torch.zeros(2, 4)
    for b, t in product(range(8), range(60 - 1 - 4)):
        live = target[b, t].argmax() == tokens[b, t + 1]
        for i in range(1, 5):
            if live:
                taken = drafts[i - 1][b, t].argmax() == target[b, t + i].argmax()
                expected[0, i - 1] += 1
                expected[1, i - 1] += taken
                live = taken and target[b, t + i].argmax() == tokens[b, t + i + 1]
    counts = T.draft_counts(target, drafts, tokens)
    assert counts.tolist() == expected.tolist() and counts[1, 1] > counts[0, 3] > 0


def test_draft_head_counts_are_greedy_decodings():
    """On a text that the target itself wrote, a chain is tried at every position of it, and the
    counts are those of drafting for real: the head fed with its own tokens, the target run on
    them."""
    config = tiny(vocab_size=7)
    model, head = random_model(config, std=0.4), draft_head_made(config)
    head.down.weight.data *= 3
    tokens = torch.tensor([[1]])
    while tokens.shape[1] < 60:
        choice = model(tokens)[:, -1:].argmax(-1)
        tokens = torch.cat((tokens, choice), 1)
    expected = torch.zeros(2, 4)
    hidden = model(tokens, return_hidden=True)[0]
    for t in range(60 - 1 - 4):
        g, context = hidden[t], tokens[:, : t + 2]
        for i in range(4):
            g = head(g, model.embed(context[0, -1]))
            drafted, expected[0, i] = model.head(g).argmax(), expected[0, i] + 1
            if drafted != model(context)[0, -1].argmax():
                break
            expected[1, i] += 1
            context = torch.cat((context, drafted.view(1, 1)), 1)
    counts = T.draft_counts(*T.draft_logits(head, model, tokens), tokens)
    assert counts.tolist() == expected.tolist() and 0 < counts[1, 3] < counts[1, 0] < counts[0, 0]


def test_draft_head_learns(draft_head_run, capsys):
    """The loss falls, on held-out text too, and more drafts are taken; a row a step, validated
    when it is due; the file says what was measured last. No model and no state in OUT."""
    rows = metrics(draft_head_run)
    assert [r["step"] for r in rows] == list(range(1, 41))
    assert all(set(r) >= {"step", "loss", "grad_norm", "lr"} for r in rows)
    validated = [r for r in rows if "val_loss" in r]
    assert [r["step"] for r in validated] == [20, 40]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.2
    assert validated[-1]["val_loss"] == pytest.approx(rows[-1]["loss"], rel=0.1)
    assert all(len(r["acceptance"]) == 4 and 0 <= min(r["acceptance"]) for r in validated)
    assert validated[-1]["acceptance"][0] > 0.2  # 1 / 320 by chance
    about = draft_head_loaded(draft_head_run)[1]
    assert about == {"dim": 32, "ffn_dim": 64, "steps": 40, "acceptance": rows[-1]["acceptance"]}
    assert {p.name for p in draft_head_run.iterdir()} == {
        *(T.DRAFT_HEAD, "metrics.jsonl", "tokenizer.model", "train.tokens", "val.tokens")
    }


def test_draft_head_file_is_the_head(corpus, draft_head_targets, tmp_path, monkeypatch):
    """What is saved is the trained head rounded to bf16, and opens as one that says the same."""
    heads, new = [], T.new_draft_head
    monkeypatch.setattr(T, "new_draft_head", lambda *a: heads.append(new(*a)) or heads[-1])
    assert T.main(draft_head_argv(corpus, draft_head_targets / "dense", tmp_path / "run")) == 0
    head = heads[0].bfloat16()
    loaded = draft_head_loaded(tmp_path / "run")[0]
    stored = load_file(tmp_path / "run" / T.DRAFT_HEAD)
    assert {t.dtype for t in stored.values()} == {torch.bfloat16} and head.down.weight.any()
    x, e = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(loaded.bfloat16()(x, e), head(x, e))


@pytest.mark.parametrize("name", ["dense", "untied", "moe"])
def test_draft_head_leaves_the_model_as_it_is(
    name, corpus, draft_head_targets, tmp_path, monkeypatch
):
    """Every family trains; the model that was loaded has the checkpoint's parameters and buffers
    to the bit at the end, and its folder its bytes."""
    init, models, load = draft_head_targets / name, [], T.load_checkpoint
    before = {p.name: p.read_bytes() for p in init.iterdir()}
    monkeypatch.setattr(T, "load_checkpoint", lambda *a: models.append(load(*a)) or models[-1])
    assert T.main(draft_head_argv(corpus, init, tmp_path / "run")) == 0
    rows = metrics(tmp_path / "run")
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert before == {p.name: p.read_bytes() for p in init.iterdir()}
    fresh = load(init, "cpu", torch.float32).state_dict()
    for key, tensor in models[0].state_dict().items():
        assert torch.equal(tensor, fresh[key]), key


def test_draft_head_is_a_function_of_the_seed(draft_head_targets, corpus, tmp_path):
    """One seed, one head, to the bit, whatever the global generator has drawn; another, another."""
    files: list[dict] = []
    for i, seed in enumerate((0, 0, 1)):
        torch.manual_seed(i)
        argv = draft_head_argv(corpus, draft_head_targets / "dense", tmp_path / str(i))
        assert T.main([*argv, "--seed", str(seed)]) == 0
        files.append(load_file(tmp_path / str(i) / T.DRAFT_HEAD))
    assert metrics(tmp_path / "0") == metrics(tmp_path / "1")
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())
    assert not torch.equal(files[0]["up.weight"], files[2]["up.weight"])


def test_draft_head_in_bf16(corpus, draft_head_targets, tmp_path, monkeypatch):
    """--dtype bf16 loads the target in bf16, keeps the head in fp32, and takes nearly the course
    of fp32, not the same."""
    rows, dtypes, step = [], set(), T.draft_logits

    def spy(head, model, *more):
        dtypes.update((p.dtype, q.dtype) for p in head.parameters() for q in model.parameters())
        return step(head, model, *more)

    monkeypatch.setattr(T, "draft_logits", spy)
    for dtype in ("bf16", "fp32"):
        argv = draft_head_argv(corpus, draft_head_targets / "moe", tmp_path / dtype)
        assert T.main([*argv, "--dtype", dtype]) == 0
        rows.append(losses(metrics(tmp_path / dtype)))
    assert dtypes == {(torch.float32, torch.bfloat16), (torch.float32, torch.float32)}
    assert rows[0] == pytest.approx(rows[1], rel=2e-2) and rows[0] != rows[1]


def test_draft_head_attends_as_told(corpus, draft_head_targets, tmp_path, monkeypatch):
    """--attention flash reaches every layer of the target, in training and in validation; they
    unroll as many steps as they say."""
    layers, steps, step = [], [], T.draft_logits

    def spy(*args):
        logits = step(*args)
        steps.append(len(logits[1]))
        return logits

    def attend(spec, *more):
        layers.append(spec.index)
        return M.causal_attention(spec, *more)

    monkeypatch.setattr(T, "draft_logits", spy)
    monkeypatch.setattr(T, "as_attend", lambda: attend)
    monkeypatch.setattr(T, "held_out_batches", lambda *a: [torch.ones(2, 33, dtype=torch.long)])
    more = ("--attention", "flash", "--steps", 2, "--micro-batch-size", 4, "--eval-every", 2)
    assert T.main(draft_head_argv(corpus, draft_head_targets / "moe", tmp_path, *more)) == 0
    assert layers == [0, 1, 2] * 3 and steps == [T.UNROLLED, T.UNROLLED, T.DRAFTED]


def test_draft_head_flags_that_contradict(
    draft_head_targets, draft_head_run, corpus, tmp_path, capsys, monkeypatch
):
    """Each is one line that names the flag and the mend, exit 2, before a file is written."""
    init, out = str(draft_head_targets / "dense"), tmp_path / "new"
    head = ["--train-draft-head", "--out", str(out), "--data", str(corpus)]
    ours = [*head, "--init", init]
    bare = tmp_path / "bare"
    shutil.copytree(init, bare, ignore=shutil.ignore_patterns("tokenizer.model", T.STATE))
    again = draft_head_argv(corpus, Path(init), draft_head_run)
    cases = [
        (head, ["--train-draft-head", "--init"]),
        ([*ours, "--model", "small"], ["--train-draft-head", "--model"]),
        ([*ours, "--model=small"], ["--train-draft-head", "--model"]),
        ([*ours, "--fp8", "rowwise"], ["--train-draft-head", "--fp8"]),
        ([*ours, "--qat", "int8"], ["--train-draft-head", "--qat"]),
        ([*ours, "--resume"], ["--resume", "minutes", "another --out"]),
        ([*ours, "--seq-len", "5"], ["--seq-len", "6"]),
        ([*head, "--init", str(tmp_path / "none")], ["--init", "none"]),
        ([*head, "--init", str(bare)], ["tokenizer.model"]),
        ([*ours, "--out", str(bare)], ["bare", "no run here made"]),
        ([*ours, "--out", init], ["dense", "80 steps"]),
        (again, ["whole", "draft head", "another folder"]),
        (["--out", str(draft_head_run), "--data", str(corpus)], ["whole", "draft head"]),
    ]
    kept = (draft_head_run / T.DRAFT_HEAD).read_bytes()
    for argv, words in cases:
        assert T.main(argv) == 2, argv
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and all(w in error for w in words), (argv, error)
        assert not out.exists() or not list(out.iterdir()), argv
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert T.main(ours) == 2
    assert "without torchrun" in capsys.readouterr().err and not (out / "train.tokens").exists()
    assert kept == (draft_head_run / T.DRAFT_HEAD).read_bytes()


def test_draft_head_is_saved_on_sigterm(corpus, draft_head_targets, tmp_path):
    """SIGTERM mid-run: exit 0, the file holds the steps made so far and opens."""
    out = tmp_path / "cut"
    more = ("--steps", 100_000, "--eval-every", 100_000, "--save-every", 100_000)
    argv = ["train.py", *draft_head_argv(corpus, draft_head_targets / "dense", out, *more)]
    p = subprocess.Popen(
        [sys.executable, *argv], cwd=REPO, env=ENV, stderr=subprocess.PIPE, text=True
    )
    while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_text():
        time.sleep(0.005)
        assert p.poll() is None, p.stderr.read()
    p.send_signal(signal.SIGTERM)
    _, err = p.communicate(timeout=60)
    steps = len(metrics(out))
    assert p.returncode == 0 and f"stopped after step {steps}" in err, err
    assert draft_head_loaded(out)[1] == {
        **{"dim": 32, "ffn_dim": 64, "steps": steps, "acceptance": None}
    }


def test_draft_head_killed_while_saving(corpus, draft_head_targets, tmp_path, capsys, monkeypatch):
    """A save that is cut short, the first or a later one, leaves nothing or the file before; what
    lay half-written is swept away by the next run, and a full disk is one line."""
    out, saves, real = tmp_path / "cut", [], T.save_file
    argv = draft_head_argv(corpus, draft_head_targets / "dense", out, "--save-every", "2")

    def killed(tensors, path, about):
        saves.append(about["steps"])
        Path(path).write_bytes(b"half a head")
        if len(saves) == dies:
            raise SystemExit  # nothing that anybody catches, as a kill
        real(tensors, path, about)

    monkeypatch.setattr(T, "save_file", killed)
    dies = 1
    with pytest.raises(SystemExit):
        T.main(argv)
    assert not (out / T.DRAFT_HEAD).exists()
    (out / ".draft_head.safetensors.1.tmp").write_bytes(b"of a real kill")
    saves, dies = [], 2
    with pytest.raises(SystemExit):
        T.main(argv)
    assert saves == ["2", "4"] and draft_head_loaded(out)[1]["steps"] == 2
    assert not list(out.glob(".*.tmp")) and len(metrics(out)) == 4
    full = lambda *a: (_ for _ in ()).throw(SafetensorError("No space left on device"))
    monkeypatch.setattr(T, "save_file", full)
    capsys.readouterr()
    argv[argv.index("--out") + 1] = str(tmp_path / "full")
    assert T.main(argv) == 2
    assert (
        "untouched" in capsys.readouterr().err and not (tmp_path / "full" / T.DRAFT_HEAD).exists()
    )


def test_draft_head_that_diverges_is_not_saved(corpus, draft_head_targets, tmp_path, capsys):
    """A loss that is no number: one line, and the file is of the last good step."""
    out = tmp_path / "wild"
    more = ("--lr", "1e30", "--save-every", "1")
    assert T.main(draft_head_argv(corpus, draft_head_targets / "dense", out, *more)) == 2
    assert "--lr" in capsys.readouterr().err
    assert all(p.isfinite().all() for p in draft_head_loaded(out)[0].parameters())


def test_draft_head_has_a_learning_rate_of_its_own():
    """Where --lr is not given, and there alone."""
    rate = lambda *argv: T.parse_args([*argv]).lr
    ours = ("--train-draft-head", "--init", "x")
    assert rate(*ours) == T.DRAFT_LR != rate() and rate(*ours, "--lr", "0.5") == 0.5


def test_draft_head_is_in_the_help(capsys):
    """--help and the module's own text say that it is there."""
    with pytest.raises(SystemExit):
        T.parse_args(["--help"])
    assert "--train-draft-head" in capsys.readouterr().out and "--train-draft-head" in T.__doc__


@pytest.mark.slow
def test_draft_head_compiled(corpus, draft_head_targets, tmp_path):
    """--compile takes the same course."""
    for out, more in (("eager", ()), ("compiled", ("--compile",))):
        argv = draft_head_argv(corpus, draft_head_targets / "dense", tmp_path / out, *more)
        assert T.main(argv) == 0
    a, b = (losses(metrics(tmp_path / out)) for out in ("eager", "compiled"))
    assert b == pytest.approx(a, rel=1e-4)


# --------------------------------------------------------------------------------------------------
# drafting.py, and speculation in the programs
# --------------------------------------------------------------------------------------------------


KINDS = ("ngram", "draft", "staged", "tree", "exit", "mtp", "head")
SPEC_TEXTS = [
    "def quicksort(a):",
    "import os\n\ndef walk(pa",
    "class Stack:\n    def __init__(self):\n        self",
    "for i in range(10):\n    pri",
    "try:\n    x = 1\nexcept Val",
    "x = [1, 2, 3]\ny = [1, 2, 3]\nz = [1, 2",
    "    return self._na",
    "#",
    "raise TypeError('expec",
    "@property\ndef name(self) -> st",
]


def spec_prompts(n: int) -> list[list[int]]:
    """Prompts of other lengths, most of which end in the middle of a word."""
    tokenizer, rng = K.load_tokenizer(SMALL), random.Random(5)
    source = Path(random.__file__).read_text()
    texts = list(SPEC_TEXTS)
    while len(texts) < n:
        at = rng.randrange(len(source) - 300)
        texts.append(source[at : at + rng.randrange(5, 250)])
    return [tokenizer.encode(text) for text in texts[:n]]


spec_args = lru_cache(lambda *argv: G.parse_args([*argv]))  # the parser is slow to build


def spec_decoder(model, kind, how, max_len, *flags, n=1, draft=None, head=None, keep=False):
    """A Decoder with --speculate kind, and `flags`."""
    argv = ["x", "--speculate", kind, "--n", str(n), *flags]
    if kind in ("draft", "staged", "tree"):
        argv += ["--draft", "given"]
    if kind == "head":
        argv += ["--draft", str(head)]
    args = copy.copy(spec_args(*argv))
    decoder = G.Decoder(model, max_len + D.spare(args), how, n, (), args.compile, keep)
    tokenizer = K.NoTokenizer(model.config.vocab_size)
    load = lambda name: (draft, tokenizer)
    decoder.speculator = D.speculator(args, decoder, tokenizer, load)
    return decoder


@torch.inference_mode()
def spec_run(decoder, ids, new: int) -> list[list[int]]:
    """So many tokens of each row."""
    rows = decoder.start(ids)
    while min(map(len, rows)) < new:
        rows = [row + more for row, more in zip(rows, decoder.next())]
    return [row[:new] for row in rows]


def random_head(folder: Path, dim: int, seed: int = 0) -> Path:
    head = E.DraftHead(dim, 2 * dim)
    with torch.no_grad():
        for p in head.parameters():
            p.normal_(1.0 if p.dim() == 1 else 0.0, 0.1, generator=seeded(seed))
    folder.mkdir(exist_ok=True)
    save_file(head.state_dict(), folder / "draft_head.safetensors")
    return folder


@lru_cache
def spec_target(form: str) -> M.Transformer:
    """A trained model in fp32: dense, its weights in int8, with a window, or MLA with experts."""
    model = M.load_checkpoint(MOE if form == "moe" else SMALL, dtype=torch.float32)
    if form == "window":
        config = replace(model.config, windows=(12,) * model.config.n_layers, family="mistral")
        narrow = M.Transformer(config)
        narrow.load_state_dict(model.state_dict())
        model = narrow.eval()
    if form == "int8":
        model = Q.quantize_(model, "int8", skip=("head",))
    return model.requires_grad_(False)


@lru_cache
def plain_texts(form: str, n: int, new: int) -> list[list[list[int]]]:
    prompts = spec_prompts(n)
    decoder = G.Decoder(spec_target(form), max(map(len, prompts)) + new, GREEDY)
    return [spec_run(decoder, ids, new) for ids in prompts]


def same_text_with_drafts(kind, form, n, new, tmp_path, ks=("4", "auto")):
    """Greedy text of n prompts equals that without drafts, and drafts were kept and refused."""
    prompts = spec_prompts(n)
    model, draft = spec_target(form), M.load_checkpoint(DRAFT, dtype=torch.float32)
    head = random_head(tmp_path / "head", model.config.dim)
    shipped = SMALL / "draft_head.safetensors"
    if kind == "head" and form != "moe" and shipped.exists():
        head = SMALL
    room, tried, kept = max(map(len, prompts)) + new, 0, 0
    for k in ks:
        decoder = spec_decoder(
            model, kind, GREEDY, room, "--speculate-k", k, draft=draft, head=head
        )
        for ids, expected in zip(prompts, plain_texts(form, n, new)):
            assert spec_run(decoder, ids, new) == expected, ids
        tally = decoder.speculator.tally
        tried, kept = tried + sum(tally.tried), kept + sum(tally.kept)
    assert tried > kept and (kept > 0 or kind == "head")


SPEC_CASES = [
    (kind, form)
    for kind in KINDS
    for form in ("dense", "int8", "window", "moe")
    if kind != "mtp" or form == "moe"
]


@pytest.mark.parametrize(
    "kind, form",
    [*product(["draft", "staged", "exit", "head"], ["dense"]), ("ngram", "int8")]
    + [("tree", "window"), ("mtp", "moe"), ("tree", "moe")],
)
def test_spec_greedy_is_plain_greedy(kind, form, tmp_path):
    same_text_with_drafts(kind, form, 4, 16, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind, form", SPEC_CASES)
def test_spec_greedy_is_plain_greedy_100(kind, form, tmp_path):
    same_text_with_drafts(kind, form, 100, 10, tmp_path, ["4"])


@pytest.mark.parametrize("kind", KINDS)
def test_spec_certain_draws_are_the_seeds(kind, tmp_path):
    """--draft-certain: text drawn with penalties, top-p, a bias and a floor on length, three rows
    that part ways, equals that of the same seeds without drafts; log-probabilities too."""
    config = latent(vocab_size=41, n_mtp_layers=1) if kind == "mtp" else tiny(vocab_size=41)
    model = random_model(config)
    draft = random_model(tiny(vocab_size=41, n_layers=1), 5)
    head = random_head(tmp_path / "head", config.dim)
    how = S.Sampling(
        temperature=0.9, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3, seed=7,
        logit_bias=((5, 1.0),), min_new_tokens=9,
    )  # fmt: skip
    ids, n = [3, 9, 4, 3, 9], 1 if kind == "staged" else 3
    plain = G.Decoder(model, 64, how, n, keep_logits=True)
    expected = spec_run(plain, ids, 30)
    assert n == 1 or len({tuple(row) for row in expected}) == 3
    decoder = spec_decoder(
        model, kind, how, 64, "--draft-certain", "--speculate-k", "4",
        n=n, draft=draft, head=head, keep=True,
    )  # fmt: skip
    assert spec_run(decoder, ids, 30) == expected
    assert sum(decoder.speculator.tally.tried) > 20
    for row in range(n):  # each token's logits stand where it was drawn
        text = [*ids, *expected[row]]
        with torch.inference_mode():
            runs, at = decoder.start(ids), len(ids)
            while at < len(ids) + 20:
                logits, tokens = decoder.shown
                run = runs[row]
                assert tokens[row, : len(run)].tolist() == run == text[at : at + len(run)]
                known = model(torch.tensor([text[: at + len(run) - 1]]))[0, at - 1 :]
                assert torch.allclose(logits[row, : len(run)], known, atol=1e-4)
                runs, at = decoder.next(), at + len(run)


def exact_triples(model, how, prompt) -> torch.Tensor:
    """(V ** 3,) probabilities of the next three tokens, from the definition of sampling."""
    V = model.config.vocab_size
    p = {(): 1.0}
    for _ in range(3):
        prefixes = list(p)
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *prefix] for prefix in prefixes]))[:, -1]
        step = {}
        for prefix, row in zip(prefixes, logits):
            each = specified(row, how, prompt, list(prefix))
            step |= {(*prefix, t): p[prefix] * each[t].item() for t in range(V)}
        p = step
    return torch.tensor([p[t] for t in product(range(V), repeat=3)])


def chi_square_of(triples: torch.Tensor, exact: torch.Tensor) -> float:
    """In standard deviations from what it should be; cells that are too rare go together."""
    seen = triples.bincount(minlength=len(exact)).double()
    expected = exact * len(triples)
    assert seen[exact == 0].sum() == 0, "a token came that has no probability"
    rare = expected < 8
    seen = torch.cat((seen[~rare], seen[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    seen, expected = seen[expected > 0], expected[expected > 0]
    chi2 = ((seen - expected) ** 2 / expected).sum().item()
    return (chi2 - len(seen) + 1) / math.sqrt(2 * (len(seen) - 1))


def drawn_triples(kind, samples, tmp_path, *flags, how=None, sabotage=None) -> float:
    """The chi-square of so many samples of three tokens, by the rounds of a Decoder."""
    V, form = 5, dict(vocab_size=5, dim=16, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8)
    small = dict(ffn_dim=24, eos_ids=())
    model = random_model(tiny(**form, **small), 3, 0.5)
    if kind == "mtp":
        mla = dict(kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8)
        mla |= dict(v_head_dim=8, head_dim=16, n_kv_heads=2, moe_layers=(), n_experts=0)
        plain = dict(n_experts_per_token=0, expert_ffn_dim=0, n_shared_experts=0, n_groups=1)
        plain |= dict(topk_groups=1, correction_bias=False, scoring="softmax", norm_topk=False)
        model = random_model(latent(**form | small | mla | plain), 3, 0.5)
    draft = random_model(tiny(**form | dict(n_layers=1), **small), 4, 0.5)
    head = random_head(tmp_path / "head", 16)
    how = how or S.Sampling(temperature=1.1, top_k=4, frequency_penalty=0.5)
    prompt, rows = [1, 4, 0, 4, 1, 4], 1 if kind == "staged" else 4000
    exact, triples = exact_triples(model, how, prompt), []
    for first in range(0, samples, rows):
        decoder = spec_decoder(
            model, kind, replace(how, seed=1 + first), 16, *flags, n=rows, draft=draft, head=head
        )
        if sabotage is not None:
            sabotage(decoder)
        rows_found = torch.tensor(spec_run(decoder, prompt, 3))
        triples.append((rows_found * torch.tensor([V * V, V, 1])).sum(1))
    assert sum(decoder.speculator.tally.tried) > 0
    return chi_square_of(torch.cat(triples), exact)


@pytest.mark.parametrize("kind", ["draft", "tree", "mtp"])
def test_spec_drawn_text_has_the_targets_distribution(kind, tmp_path):
    assert drawn_triples(kind, 12_000, tmp_path, "--speculate-k", "3") < 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_spec_drawn_text_has_the_targets_distribution_120k(kind, tmp_path):
    """120,000 samples; of staged drafts, which go a row at a time, 3,600. What an error adds to the
    chi-square grows with the samples: a bound of 3 sees with these what 5 would with 5/3 of them."""
    samples = 3600 if kind == "staged" else 120_000
    assert drawn_triples(kind, samples, tmp_path, "--speculate-k", "4") < 3


def wrong_residual(p, q, tokens, uniform, lengths):
    n, _ = E.accept(p, q, tokens, uniform, lengths)
    return n, p[torch.arange(len(n)), n]


def wrong_ratio(p, q, tokens, uniform, lengths):
    return E.accept(p, torch.ones_like(q), tokens, uniform, lengths)


@pytest.mark.parametrize(
    "wrong", [wrong_residual, pytest.param(wrong_ratio, marks=pytest.mark.slow)]
)
def test_spec_drawn_wrongly_is_noticed(wrong, tmp_path, monkeypatch):
    """The same test is red for a residual of p itself, and for a ratio without q."""
    monkeypatch.setattr(D, "accept", wrong)
    assert drawn_triples("draft", 12_000, tmp_path, "--speculate-k", "3") > 8


@pytest.mark.slow
def test_spec_trees_drawn_wrongly_are_noticed(tmp_path, monkeypatch):
    """Nor may siblings be decided by one number, or p stay whole after a refusal."""

    def one_number(self, view, tree, R):
        return uniform(self, view, tree, R)[:, :1].expand(-1, len(tree.parents))

    uniform = D.Drawing._uniform
    monkeypatch.setattr(D.Drawing, "_uniform", one_number)
    assert drawn_triples("tree", 12_000, tmp_path, "--speculate-k", "4") > 8
    monkeypatch.undo()
    monkeypatch.setattr(E, "_left", lambda p, q: p)
    assert drawn_triples("tree", 12_000, tmp_path, "--speculate-k", "4") > 8


@pytest.mark.slow
def test_spec_noise_of_drafts_is_their_own(tmp_path, monkeypatch):
    """Drafts drawn with the noise of the target's own tokens, and then verified as if they were
    not, would have another distribution: it is noticed."""
    monkeypatch.setattr(S.Sampler, "draft_noise", S.Sampler.noise)
    assert drawn_triples("draft", 24_000, tmp_path, "--speculate-k", "3") > 8


# ---- in the Engine ----


def spec_engine(model, kind, *flags, draft=None, head=None, **options):
    """An Engine with --speculate kind."""
    options = dict(num_blocks=256, block_size=8, max_running=8) | options
    engine = V.build_engine(model, **options)
    argv = ["--batch", "x", "--speculate", kind, *flags]
    if kind in ("draft", "head"):
        argv += ["--draft", str(head or "given")]
    tokenizer = K.NoTokenizer(model.config.vocab_size)
    V.equip(G.parse_args(argv), engine, tokenizer, lambda name: (draft, tokenizer))
    return engine


def tokens_of(engine, prompts, params) -> list[list[list[int]]]:
    outputs = engine.generate(prompts, params)
    assert all(output.error is None for output in outputs)
    return [[sample.token_ids for sample in output.samples] for output in outputs]


PAGED_CASES = [
    (kind, form)
    for kind in ("ngram", "draft", "exit", "mtp", "head")
    for form in ("dense", "int8", "window", "moe")
    if kind != "mtp" or form == "moe"
]


@lru_cache
def batch_of_prompts(form: str, n: int) -> tuple[list, list, list]:
    """Prompts, what is asked of each, and the tokens that the Engine gives without drafts."""
    prompts, rng = spec_prompts(n), random.Random(1)
    params = [
        P.SamplingParams(
            temperature=(0.0, 0.8)[i % 2], top_p=0.9, frequency_penalty=0.2, seed=i,
            max_new_tokens=rng.randrange(4, 32), n=1 + (i % 5 == 4),
        )
        for i in range(n)
    ]  # fmt: skip
    engine = V.build_engine(spec_target(form), num_blocks=400, max_running=16)
    return prompts, params, tokens_of(engine, prompts, params)


def same_tokens_in_batches(kind, form, n, tmp_path, ks=("3", "auto")):
    """Prompts of other lengths, greedy and drawn, in mixed steps under too few blocks, with k fixed
    and chosen: tokens equal to those of the Engine without drafts, blocks all given back."""
    model, draft = spec_target(form), M.load_checkpoint(DRAFT, dtype=torch.float32)
    head = random_head(tmp_path / "head", model.config.dim) if kind == "head" else None
    prompts, params, expected = batch_of_prompts(form, n)
    for k, options in zip(ks, (dict(num_blocks=90), dict(num_blocks=90, swap=True))):
        flags = ("--draft-certain", "--speculate-k", k)
        engine = spec_engine(model, kind, *flags, draft=draft, head=head, **options)
        assert tokens_of(engine, prompts, params) == expected
        stats = engine.stats()
        assert stats["proposed"] > stats["accepted"] and (stats["accepted"] > 0 or kind == "head")
        assert engine.allocator.n_free == 90
        engine.allocator.check([])


@pytest.mark.parametrize(
    "kind, form",
    [("draft", "dense"), ("head", "dense"), ("mtp", "moe"), ("exit", "window"), ("ngram", "int8")],
)
def test_spec_in_batches_is_without(kind, form, tmp_path):
    same_tokens_in_batches(kind, form, 7, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind, form", PAGED_CASES)
def test_spec_in_batches_is_without_100(kind, form, tmp_path):
    same_tokens_in_batches(kind, form, 100, tmp_path, ["3"])


@pytest.mark.parametrize(
    "kind, samples", [("draft", 6000), pytest.param("draft", 40_000, marks=pytest.mark.slow)]
)
def test_spec_drawn_in_batches_has_the_targets_distribution(kind, samples):
    """Rows of other features beside each other, by the rule: chi-square over three tokens."""
    form = dict(vocab_size=5, dim=16, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, ffn_dim=24)
    model = random_model(tiny(**form, eos_ids=()), 3, 0.5)
    draft = random_model(tiny(**form | dict(n_layers=1), eos_ids=()), 4, 0.5)
    engine = spec_engine(model, "draft", "--speculate-k", "3", draft=draft, max_running=64)
    prompt, triples = [1, 4, 0, 4, 1, 4], {0: [], 1: []}
    hows = [S.Sampling(temperature=1.1, frequency_penalty=0.5), S.Sampling(top_k=4)]
    params = [
        P.SamplingParams(
            temperature=how.temperature, frequency_penalty=how.frequency_penalty, top_k=how.top_k,
            seed=64 * i, max_new_tokens=3, n=32,
        )
        for i, how in enumerate(hows * (samples // 64))
    ]  # fmt: skip
    for i, row in enumerate(tokens_of(engine, [prompt] * len(params), params)):
        triples[i % 2] += [a * 25 + b * 5 + c for a, b, c in row]
    for i, how in enumerate(hows):
        assert chi_square_of(torch.tensor(triples[i]), exact_triples(model, how, prompt)) < 5
    assert 0 < engine.stats()["accepted"] < engine.stats()["proposed"]


# ---- logits, ends, flags ----


@pytest.mark.parametrize("form", ["dense", "window", "moe"])
def test_spec_tree_logits_are_each_paths(form):
    """The logits after every node of a tree, all run at once behind a prompt, equal those of the
    prompt and the node's path run as a text, in rows of other lengths; and when a path was moved to
    its place, those of what comes after it."""
    model, rng = spec_target(form), random.Random(3)
    tree = E.Tree((-1, -1, -1, 0, 0, 1, 3, 3, 5, 6))
    prompts = spec_prompts(3)[:2]
    cache = M.KVCache(model.config, 2, 64)
    for module in model.modules():
        if hasattr(module, "absorb_up_to"):
            module.absorb_up_to = 16
    for row, ids in enumerate(prompts):  # each row by itself: the cache of the other is not touched
        alone = M.KVCache(model.config, 1, 64)
        model(torch.tensor([ids[:-1]]), torch.arange(len(ids) - 1), alone.attend)
        for whole, one in zip((*cache.k, *cache.v), (*alone.k, *alone.v)):
            whole[row] = one[0]
    N = len(tree.parents)
    nodes = torch.tensor([[rng.randrange(3, 4096) for _ in range(N)] for _ in prompts])
    base = torch.tensor([len(ids) - 1 for ids in prompts])
    depths = torch.tensor((0, *tree.depths))
    tokens = torch.cat((torch.tensor([[ids[-1]] for ids in prompts]), nodes), 1)
    attend = E.tree_attend(cache, tree, base, torch.arange(N + 1), int(base.max()) + N + 1)
    logits = model(tokens, base[:, None] + depths, attend)
    for row, ids in enumerate(prompts):
        for node in range(N):
            path = [i for i in range(N) if tree.mask[node + 1, i + 1]]
            text = torch.tensor([ids + nodes[row, path].tolist()])
            close(logits[row, node + 1], model(text)[0, -1], 1e-4)
    path = [1, 5, 8]
    slots = base[:, None] + 1 + torch.tensor(path)
    cache.move(slots, base[:, None] + 1 + torch.arange(3))
    last = torch.tensor([[7], [9]])
    after = model(last, base[:, None] + 4, partial(cache.attend, limit=int(base.max()) + 5))
    for row, ids in enumerate(prompts):
        text = torch.tensor([[*ids, *nodes[row, path].tolist(), int(last[row, 0])]])
        close(after[row, 0], model(text)[0, -1], 1e-4)


def spec_said(argv, capsys) -> tuple[int, str, str]:
    code = G.main([str(a) for a in argv])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_spec_facts_and_ends(capsys):
    """Through the command line: text and tokens as without drafts, ended at a stop string, an EOS
    and a length that lie inside of what was kept; facts as they are; with --bench a speed-up."""
    base = [
        "x = [1, 2, 3]\ny = [1, 2, 3]\nz = [",
        "--temperature",
        "0",
        "--dtype",
        "fp32",
        "--json",
    ]
    base += ["--max-new-tokens", "41"]
    plain = json.loads(spec_said(base, capsys)[1])
    drafts = ["--speculate", "ngram", "--speculate-k", "7"]
    code, out, err = spec_said([*base, *drafts], capsys)
    found = json.loads(out)
    assert code == 0 and found["tokens"] == plain["tokens"] and len(found["tokens"]) == 41
    assert found["text"] == plain["text"] and found["finish_reason"] == "length"
    assert found["tokens_per_verification"] > 1.5 and "tokens per verification, drafts kept" in err
    assert len(found["acceptance"]) == 7 and 0 < found["acceptance"][0] <= 1
    kept = found["verifications"] * (found["tokens_per_verification"] - 1)
    assert kept == pytest.approx(sum(found["acceptance"]) * found["verifications"], rel=0.2)
    for at in (6, 13, 24):
        stop = plain["text"][at : at + 4]
        asked = [*base, "--stop", stop]
        a, b = (json.loads(spec_said(argv, capsys)[1]) for argv in (asked, asked + drafts))
        same = ("text", "tokens", "finish_reason")
        assert [a[name] for name in same] == [b[name] for name in same], stop
        assert (
            a["finish_reason"] == "stop" and a["text"] == plain["text"][: plain["text"].find(stop)]
        )
    code, out, err = spec_said([*base[:-1], "9", "--bench", "2", *drafts], capsys)
    facts = json.loads(out)
    assert (
        facts["speed_up"] > 0 and facts["plain_tokens_per_second"] > 0 and "without drafts" in err
    )


def test_spec_eos_inside_of_a_run():
    """Of a run that was kept whole, nothing behind an end-of-sequence token is heard."""
    model = spec_target("dense")
    tokenizer, ids = K.load_tokenizer(SMALL), spec_prompts(6)[5]
    plain = spec_run(G.Decoder(model, 80, GREEDY), ids, 40)[0]
    ended = 0
    for eos in sorted(set(plain)):
        decoder = spec_decoder(model, "ngram", GREEDY, 80, "--speculate-k", "8")
        row = K.Continuation(
            tokenizer, K.TextStream(tokenizer, ids), K.StopStrings([]), [eos], lambda text: None
        )
        with torch.inference_mode():
            steps = list(G.run_rows(decoder, ids, [row], 40))
        assert row.finish == "eos" and row.tokens == plain[: plain.index(eos) + 1]
        ended += len(steps[-1][0]) > 1 and steps[-1][0][-1] != eos
    assert ended > 0, "no run went on behind the end"


def test_spec_rows_that_part_ways_end_each_at_its_length():
    """Rows of one prompt, of which some run ahead to the end of the cache, equal plain rows."""
    model, ids = random_model(tiny(vocab_size=41)), [3, 9, 4, 3, 9]
    how = S.Sampling(temperature=0.7, seed=5)
    room = len(ids) + 40
    for kind in ("ngram", "draft", "exit"):
        decoder = spec_decoder(
            model, kind, how, room, "--draft-certain", "--speculate-k", "8",
            n=6, draft=random_model(tiny(vocab_size=41), 0, 0.14),
        )  # fmt: skip
        assert spec_run(decoder, ids, 40) == spec_run(G.Decoder(model, room, how, 6), ids, 40)
        assert len({len(c) for c in decoder.speculator.contexts}) == 1  # at their ends
        steps = sum(decoder.speculator.tally.tried[:1])
        assert steps < 6 * 40


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--speculate", "draft", "--checkpoint", MOE], "needs --draft DIR"),
        (["--speculate", "mtp"], "has no multi-token prediction"),
        (["--speculate", "head", "--draft", "."], "there is no draft_head.safetensors"),
        (["--speculate", "head", "--checkpoint", MOE, "--draft", SMALL], "this model is 192 wide"),
        (["--speculate", "exit", "--exit-layers", "6"], "--exit-layers must be from 1 to 5, not 6"),
        (["--speculate", "ngram", "--speculate-k", "0"], "--speculate-k must be from 1 to 64"),
        (["--speculate", "ngram", "--speculate-k", "many"], "--speculate-k must be from 1 to 64"),
        (["--speculate-k", "3"], "--speculate-k needs --speculate"),
        (["--draft", "x"], "--draft needs --speculate"),
        (["--speculate", "ngram", "--draft", "x"], "--draft needs --speculate draft"),
        (["--speculate", "ngram", "--exit-layers", "2"], "--exit-layers needs --speculate exit"),
        (["--speculate", "ngram", "--draft-acceptance", "0.5"], "needs --speculate and --bench"),
        (["--speculate", "staged", "--n", "2"], "--speculate staged"),
        (["--speculate", "ngram", "--score", "README.md"], "does not go together"),
        (["--speculate", "draft", "--draft", "nowhere"], "nowhere"),
    ],
)
def test_spec_mistakes_are_named(argv, words, capsys):
    prompt = [] if "--score" in argv else ["x"]
    code, out, err = spec_said([*prompt, *argv], capsys)
    assert code == 2 and words in err and err.count("\n") == 1, err


def test_spec_vocabularies_must_be_one(tmp_path, capsys):
    """Another size, and another token of the same number, are told apart before anything runs."""
    config = replace(M.read_config(DRAFT / "config.json"), vocab_size=4100)
    M.save_checkpoint(random_model(config).bfloat16(), tmp_path / "size")
    shutil.copy(DRAFT / "tokenizer.model", tmp_path / "size")
    code, _, err = spec_said(["x", "--speculate", "draft", "--draft", tmp_path / "size"], capsys)
    assert code == 2 and "its vocabulary has 4100 tokens and the target's 4096" in err
    shutil.copytree(DRAFT, tmp_path / "token")
    texts = [f"spam {i} eggs {i * i} ham" for i in range(9000)]
    (tmp_path / "token" / "tokenizer.model").write_bytes(T.train_tokenizer(texts, 400))
    code, _, err = spec_said(["x", "--speculate", "draft", "--draft", tmp_path / "token"], capsys)
    assert code == 2 and "and the target's" in err and "same" not in err


def test_spec_dynamic_ntk_is_refused():
    """A model whose keys depend on the length of a call would answer otherwise with drafts."""
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    model = random_model(tiny(rope_scaling=scaling))
    with pytest.raises(ValueError, match="rope_scaling 'dynamic'"):
        spec_decoder(model, "ngram", GREEDY, 32)


def test_spec_chat_keeps_its_cache(capsys):
    """Turns of a conversation with drafts equal those without, cached ids and all."""
    model, tokenizer = spec_target("dense"), K.load_tokenizer(SMALL)
    replies = []
    for decoder in (
        G.Decoder(model, 200, GREEDY),
        spec_decoder(model, "ngram", GREEDY, 200, "--speculate-k", "5"),
        spec_decoder(model, "exit", GREEDY, 200),
    ):
        chat, said = G.Chat(decoder, tokenizer, None), []
        for line in ("x = [1, 2, 3]\ny = [1, 2", "\nfor i in x:\n", "\ndef f(x"):
            row = K.Continuation(
                tokenizer, K.TextStream(tokenizer), K.StopStrings([]), (), lambda text: None
            )
            with torch.inference_mode():
                held, *_ = chat.ask(line, GREEDY, 24, row, 200)
            said.append((held, row.tokens))
        replies.append(said)
    assert replies[0][1][0] > 20
    assert [tokens for _, tokens in replies[1]] == [tokens for _, tokens in replies[0]]
    assert replies[2] == replies[1] or [t for _, t in replies[2]] == [t for _, t in replies[0]]
    assert all(abs(a[0] - b[0]) <= 1 for a, b in zip(replies[1], replies[0]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ngram", "draft", "exit", "mtp", "head"])
def test_spec_compiled_is_eager(kind, tmp_path):
    """--compile: steps that verify, and the drafters' own, in static shapes, give the same text;
    all of them are compiled when the decoder is built."""
    form = "moe" if kind == "mtp" else "dense"
    model, draft = copy.deepcopy(spec_target(form)), M.load_checkpoint(DRAFT, dtype=torch.float32)
    ids, head = spec_prompts(6)[5], random_head(tmp_path / "head", model.config.dim)
    expected = spec_run(G.Decoder(model, 90, GREEDY), ids, 50)
    with torch.inference_mode():  # as generate.py builds it: graphs of another mode are others
        k = "auto" if kind in ("ngram", "mtp") else "4"  # every k is a graph of the target's
        decoder = spec_decoder(
            model, kind, GREEDY, 90, "--speculate-k", k, "--compile", draft=draft, head=head
        )
    torch._dynamo.utils.counters.clear()  # what compiles would be measured as a step
    assert spec_run(decoder, ids, 50) == expected
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    assert sum(decoder.speculator.tally.tried) > 0


@pytest.mark.parametrize("blocks", [14, 18, 26])
def test_spec_exit_writes_nothing_before_it_is_swapped_out(blocks):
    """A drafter over the target's own cache, where sequences give way to each other all the time:
    what one leaves is on the host before another's drafts are written there."""
    model = random_model(tiny(n_layers=4, vocab_size=41))
    prompts = [random_tokens(model.config, 9 + i, seed=i).tolist() for i in range(6)]
    prompts = [[t % 41 for t in ids] for ids in prompts]
    params = P.SamplingParams(temperature=0, max_new_tokens=30)
    alone = V.build_engine(model, num_blocks=200, block_size=4)
    expected = tokens_of(alone, prompts, params)
    engine = spec_engine(
        model, "exit", "--exit-layers", "3", "--speculate-k", "3",
        num_blocks=blocks, block_size=4, swap=True,
    )  # fmt: skip
    assert tokens_of(engine, prompts, params) == expected
    assert engine.stats()["preemptions"] > 0 and engine.stats()["proposed"] > 0


def test_spec_keeps_nothing_of_what_is_over():
    """When requests have ended, neither drafters nor policy remember their sequences."""
    model = random_model(tiny(vocab_size=41))
    for kind in ("ngram", "draft", "exit"):
        engine = spec_engine(model, kind, draft=random_model(tiny(vocab_size=41, n_layers=1)))
        for first in range(3, 30, 3):
            params = P.SamplingParams(temperature=0, max_new_tokens=12)
            tokens_of(engine, [[first, first + 1, first], [first + 2]], params)
        policy = engine.speculate_k
        assert not policy.kept and not policy.tried and not getattr(engine.drafter, "held", {})


# --------------------------------------------------------------------------------------------------
# moe.py: routing, balance, experts
# --------------------------------------------------------------------------------------------------

BACKENDS = ("torch", "triton", "grouped_mm")
MOE_ARGUMENTS = ("x", "weights", "w_gate_up", "w_down")


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=rng(seed))


def says(call, *words: str) -> str:
    """The call is refused by a ValueError of one line that holds the words, as words."""
    with pytest.raises(ValueError) as caught:
        call()
    line = str(caught.value)
    assert line.strip() and "\n" not in line, line
    for word in words:
        assert re.search(rf"(?<![A-Za-z0-9_]){re.escape(word)}(?![A-Za-z0-9_])", line), (word, line)
    return line


# --------------------------------------------------------------------------------------------------
# Routing
# --------------------------------------------------------------------------------------------------


def slow_scores(row: list[float], scoring: str) -> list[float]:
    if scoring == "sigmoid":
        return [1 / (1 + math.exp(-v)) for v in row]
    powers = [math.exp(v - max(row)) for v in row]
    return [p / sum(powers) for p in powers]


def slow_route(row, top_k, scoring, renormalize, bias, n_groups, topk_groups, best, scale) -> dict:
    """The contract read aloud in plain Python for one token: {expert: weight}."""
    scores = slow_scores(row, scoring)
    choice = [s + b for s, b in zip(scores, bias or [0.0] * len(row))]
    size = len(row) // n_groups
    groups = [choice[g * size : (g + 1) * size] for g in range(n_groups)]
    worth = [sum(sorted(group, reverse=True)[:best]) for group in groups]
    open_groups = sorted(range(n_groups), key=lambda g: -worth[g])[:topk_groups]
    allowed = [i for i in range(len(row)) if i // size in open_groups]
    chosen = sorted(allowed, key=lambda i: -choice[i])[:top_k]
    total = sum(scores[i] for i in chosen) + 1e-20 if renormalize else 1.0
    return {i: scores[i] / total * scale for i in chosen}


def as_maps(weights: torch.Tensor, ids: torch.Tensor) -> list[dict]:
    return [dict(zip(i, w)) for i, w in zip(ids.tolist(), weights.tolist())]


def same_maps(got, expected, atol: float = 1e-6) -> None:
    """Per token the same experts with the same weights, in whatever order."""
    order, other = got[1].sort(-1), expected[1].sort(-1)
    assert torch.equal(order.values, other.values), (
        (order.values != other.values).any(-1).nonzero().flatten()[:5]
    )
    a, b = got[0].gather(1, order.indices).float(), expected[0].gather(1, other.indices).float()
    torch.testing.assert_close(a, b, rtol=1e-6, atol=atol)


def random_routing(r: random.Random) -> tuple[torch.Tensor, dict]:
    n_groups, size = r.choice([1, 1, 2, 3, 4, 8]), r.randint(1, 8)
    topk_groups, n = r.randint(1, n_groups), r.randint(1, 6)
    n_experts, g = n_groups * size, rng(r.randrange(10**6))
    dtype = r.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64])
    if dtype in (torch.bfloat16, torch.float16):  # distinct numbers that it can hold: no ties
        logits = torch.stack([torch.randperm(n_experts, generator=g) for _ in range(n)])
        logits = (logits.float() - n_experts / 2) / 8
    else:
        logits = torch.randn(n, n_experts, generator=g) * r.choice([0.3, 1.0, 3.0])
    bias = None
    if r.random() < 0.5:
        bias = torch.randn(n_experts, generator=g) * r.choice([0.05, 1.0, 10.0])
    return logits.to(dtype), dict(
        top_k=r.randint(1, size * topk_groups),
        scoring=r.choice(["softmax", "sigmoid"]),
        renormalize=r.random() < 0.5,
        bias=bias,
        n_groups=n_groups,
        topk_groups=topk_groups,
        group_score_topk=r.randint(1, size),
        scale=r.choice([1.0, 2.5, 16.0]),
    )


def test_route_equals_the_contract_in_plain_python():
    """All options crossed at random, token by token; no token touches more groups than it may."""
    r = random.Random(0)
    for _ in range(300):
        logits, how = random_routing(r)
        top_k = how["top_k"]
        weights, ids = O.route(logits, top_k, **{k: v for k, v in how.items() if k != "top_k"})
        assert weights.shape == ids.shape == (len(logits), top_k)
        assert weights.dtype == torch.float32 and ids.dtype == torch.int64
        size = logits.shape[1] // how["n_groups"]
        bias = None if how["bias"] is None else how["bias"].tolist()
        rows = logits.double().tolist()
        for got, row, row_ids in zip(as_maps(weights, ids), rows, ids.tolist()):
            expected = slow_route(
                row, top_k, how["scoring"], how["renormalize"], bias, how["n_groups"],
                how["topk_groups"], how["group_score_topk"], how["scale"],
            )  # fmt: skip
            assert len(set(row_ids)) == top_k and got.keys() == expected.keys(), how
            assert len({i // size for i in row_ids}) <= how["topk_groups"]
            for i, w in expected.items():
                assert got[i] == pytest.approx(w, rel=3e-6, abs=1e-9), how


def test_route_changes_nothing_it_is_given_and_takes_no_tokens():
    logits, bias = randn(0, 5, 8), randn(1, 8)
    kept = logits.clone(), bias.clone()
    O.route(logits, 2, bias=bias, n_groups=4, topk_groups=2, group_score_topk=2, renormalize=True)
    assert torch.equal(logits, kept[0]) and torch.equal(bias, kept[1])
    weights, ids = O.route(logits[:0], 2, bias=bias, n_groups=4, topk_groups=2)
    assert weights.shape == ids.shape == (0, 2) and ids.dtype == torch.int64
    strided = randn(2, 8, 5).t()
    same_maps(O.route(strided, 3), O.route(strided.contiguous(), 3), 0)


def test_route_has_gradients_through_weights_alone():
    """To the logits as autograd finds for the gathered scores; to the bias none."""
    for scoring in ("softmax", "sigmoid"):
        for renormalize in (False, True):
            logits, bias = randn(3, 9, 12).requires_grad_(), randn(4, 12).requires_grad_()
            weights, ids = O.route(
                logits, 4, scoring=scoring, renormalize=renormalize, bias=bias, n_groups=3,
                topk_groups=2, group_score_topk=2, scale=2.5,
            )  # fmt: skip
            pull = randn(5, 9, 4)
            (weights * pull).sum().backward()
            again = logits.detach().clone().requires_grad_()
            scores = again.softmax(-1) if scoring == "softmax" else again.sigmoid()
            plain = scores.gather(1, ids)
            plain = plain / plain.sum(-1, keepdim=True) if renormalize else plain
            (2.5 * plain * pull).sum().backward()
            assert bias.grad is None and not ids.requires_grad
            torch.testing.assert_close(logits.grad, again.grad, rtol=1e-5, atol=1e-7)


def tied_logits(kind: str, n: int, n_experts: int) -> torch.Tensor:
    g = rng(n_experts)
    normal = torch.randn(n, n_experts, generator=g)
    if kind == "grid":
        return torch.randint(0, 3, (n, n_experts), generator=g) * 0.5
    if kind == "equal":
        return torch.randint(-2, 3, (n, 1), generator=g).float().expand(n, n_experts).clone()
    if kind == "one-high":
        return torch.zeros(n, n_experts).scatter(1, normal.argmax(1, keepdim=True), 1.0)
    if kind == "rounded":
        return (normal * 4).round() / 4
    return normal


HF_SIZES = [  # n_experts, n_groups, topk_groups, top_k: on both sides of torch.topk's k * 64 <= n
    (8, 4, 2, 3), (16, 4, 2, 5), (64, 8, 4, 6), (160, 8, 3, 6), (256, 8, 4, 8), (512, 8, 4, 8),
]  # fmt: skip
MOE_KINDS = ["normal", "rounded", "grid", "one-high", "equal"]


def hf_router(family: str, cls: str, n_experts: int, bias=None, **how) -> nn.Module:
    """A router of transformers whose logits are its hidden states."""
    package = f"transformers.models.{family}.modeling_{family}"
    transformers()
    module = __import__(package, fromlist=[cls])
    sizes = dict(num_experts=n_experts, num_local_experts=n_experts, hidden_size=n_experts)
    router = getattr(module, cls)(SimpleNamespace(**sizes, **how))
    with torch.no_grad():
        router.weight.copy_(torch.eye(n_experts))
        if bias is not None:
            router.e_score_correction_bias.copy_(bias)
    return router


@torch.no_grad()
@pytest.mark.parametrize("kind", MOE_KINDS)
@pytest.mark.parametrize("sizes", HF_SIZES, ids=str)
def test_route_equals_deepseek_of_transformers(sizes, kind):
    """V2 greedy and group-limited, V3 with and without a correction; ties fall the same way."""
    n_experts, n_groups, topk_groups, top_k = sizes
    logits = tied_logits(kind, 60, n_experts)
    base = dict(num_experts_per_tok=top_k, n_group=n_groups, topk_group=topk_groups)
    for method in ("greedy", "group_limited_greedy"):
        more = dict(topk_method=method, routed_scaling_factor=16.0)
        router = hf_router("deepseek_v2", "DeepseekV2TopkRouter", n_experts, **base, **more)
        theirs = router(logits)
        groups = dict(n_groups=n_groups, topk_groups=topk_groups) if method != "greedy" else {}
        same_maps(O.route(logits, top_k, scale=16.0, **groups), theirs[1:])
    steps = torch.randint(-2, 3, (n_experts,), generator=rng(1)) * 0.25
    for bias in (torch.zeros(n_experts), randn(7, n_experts) * 0.1, steps):
        for norm in (True, False):
            more = dict(norm_topk_prob=norm, routed_scaling_factor=2.5)
            router = hf_router(
                "deepseek_v3", "DeepseekV3TopkRouter", n_experts, bias, **base, **more
            )
            ours = O.route(
                logits, top_k, scoring="sigmoid", renormalize=norm, bias=bias, n_groups=n_groups,
                topk_groups=topk_groups, group_score_topk=2, scale=2.5,
            )  # fmt: skip
            same_maps(ours, router(logits)[1:])


@torch.no_grad()
@pytest.mark.parametrize("kind", MOE_KINDS)
@pytest.mark.parametrize("n_experts, top_k", [(8, 2), (8, 8), (60, 4), (128, 8), (512, 8)])
def test_route_equals_mixtral_and_qwen3_of_transformers(n_experts, top_k, kind):
    logits = tied_logits(kind, 60, n_experts)
    router = hf_router("mixtral", "MixtralTopKRouter", n_experts, num_experts_per_tok=top_k)
    for dtype in (torch.float32, torch.bfloat16):
        theirs = router.to(dtype)(logits.to(dtype))
        same_maps(O.route(logits.to(dtype), top_k, renormalize=True), theirs[1:])
    for norm in (True, False):
        router = hf_router(
            "qwen3_moe", "Qwen3MoeTopKRouter", n_experts, num_experts_per_tok=top_k,
            norm_topk_prob=norm,
        )  # fmt: skip
        same_maps(O.route(logits, top_k, renormalize=norm), router(logits)[1:])


ROUTED = {
    "v3": dict(),
    "v3-bare": dict(correction_bias=False, norm_topk=False, routed_scaling=1.0),
    "v2": dict(scoring="softmax", group_score_topk=1, correction_bias=False, norm_topk=False),
    "plain": dict(scoring="softmax", group_score_topk=1, correction_bias=False, n_groups=1,
                  topk_groups=1),
}  # fmt: skip


@pytest.mark.parametrize("changes", ROUTED.values(), ids=ROUTED)
def test_route_equals_the_model(changes):
    """model.py's own routing of random tokens; router_logits is the product before it."""
    config = latent(**dict(routed_scaling=2.5) | changes)
    moe = random_model(config).layers[1].mlp
    if config.correction_bias:
        moe.correction.copy_(randn(3, config.n_experts) * 0.2)
    x = randn(0, 150, config.dim)
    logits = O.router_logits(x, moe.router)
    torch.testing.assert_close(logits, F.linear(x, moe.router))
    ours = O.route(
        logits, config.n_experts_per_token, scoring=config.scoring, renormalize=config.norm_topk,
        bias=moe.correction if config.correction_bias else None, n_groups=config.n_groups,
        topk_groups=config.topk_groups, group_score_topk=config.group_score_topk,
        scale=config.routed_scaling,
    )  # fmt: skip
    same_maps(ours, moe.route(x))


def test_router_logits_are_fp32_also_under_autocast():
    x, w = randn(0, 3, 5, 16), randn(1, 8, 16)
    exact = (x.double() @ w.double().t()).float()
    with torch.autocast("cpu", torch.bfloat16):
        under = O.router_logits(x, w)
    for got in (under, O.router_logits(x, w)):
        assert got.dtype == torch.float32 and got.shape == (3, 5, 8) and relative(got, exact) < 1e-6
    half = O.router_logits(x.bfloat16(), w.bfloat16())
    exact = x.bfloat16().double() @ w.bfloat16().double().t()
    assert half.dtype == torch.float32 and relative(half, exact.float()) < 1e-6
    x.requires_grad_(), w.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        O.router_logits(x, w).square().sum().backward()
    assert x.grad.dtype == torch.float32 and w.grad.shape == w.shape


GRID = torch.zeros(6, 8)
ROUTE_ERRORS = {
    "no-k": (dict(top_k=0), "top_k"),
    "negative-k": (dict(top_k=-1), "top_k"),
    "k-over-all": (dict(top_k=9), "top_k"),
    "k-over-groups": (dict(top_k=5, n_groups=4, topk_groups=2), "top_k"),
    "groups-do-not-divide": (dict(n_groups=3), "n_groups"),
    "no-groups": (dict(n_groups=0), "n_groups"),
    "no-topk-groups": (dict(n_groups=4, topk_groups=0), "topk_groups"),
    "topk-groups-over": (dict(n_groups=4, topk_groups=5), "topk_groups"),
    "topk-groups-of-one": (dict(topk_groups=2), "topk_groups"),
    "group-score-over": (dict(n_groups=4, topk_groups=2, group_score_topk=3), "group_score_topk"),
    "group-score-over-one-group": (dict(group_score_topk=9), "group_score_topk"),
    "scoring": (dict(scoring="relu"), "scoring"),
    "bias-short": (dict(bias=torch.zeros(7)), "bias"),
    "bias-2d": (dict(bias=torch.zeros(6, 8)), "bias"),
    "bias-scalar": (dict(bias=torch.zeros(())), "bias"),
    "bias-one": (dict(bias=torch.zeros(1)), "bias"),
    "logits-1d": (dict(logits=torch.zeros(8)), "logits"),
    "logits-3d": (dict(logits=torch.zeros(2, 3, 8)), "logits"),
}


@pytest.mark.parametrize("changes, word", ROUTE_ERRORS.values(), ids=ROUTE_ERRORS)
def test_route_refuses(changes, word):
    how = dict(logits=GRID, top_k=2) | changes
    says(lambda: O.route(**how), word)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_route_names_the_first_token_that_is_not_finite(value, dtype):
    logits = torch.zeros(40, 8, dtype=dtype)
    logits[37, 2], logits[23, 7] = value, value
    line = says(lambda: O.route(logits, 2), "logits", "23")
    assert "37" not in line


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ((8, 2, 4, 1.0), 4), ((8, 2, 4, 1.25), 5), ((9, 2, 4, 1.0), 5), ((9, 1, 4, 1.0), 3),
        ((1, 1, 64, 1.0), 1), ((1, 1, 64, 0.001), 1), ((0, 2, 4, 1.0), 1), ((8, 2, 4, 0.5), 2),
        ((4096, 8, 256, 2), 256), ((7, 3, 5, 1.5), 7), ((8, 2, 4, 100.0), 400),
    ],
)  # fmt: skip
def test_capacity_of(sizes, expected):
    got = O.capacity_of(*sizes)
    assert got == expected and type(got) is int


@pytest.mark.parametrize("factor", [0, 0.0, -1.0])
def test_capacity_of_refuses(factor):
    says(lambda: O.capacity_of(8, 2, 4, factor), "factor")


def random_slots(seed: int, n: int, k: int, n_experts: int, nobody=0.2, doubles=False):
    """Weights from a grid of few (ties), ids some of which are nobody, perhaps twice in a row."""
    g = rng(seed)
    weights = torch.randint(0, 4, (n, k), generator=g) / 4
    if doubles or k > n_experts:
        ids = torch.randint(0, n_experts, (n, k), generator=g)
    else:
        ids = torch.rand(n, n_experts, generator=g).argsort(1)[:, :k]
    return weights, ids.masked_fill(torch.rand(n, k, generator=g) < nobody, -1)


def slow_limit(weights, ids, n_experts, capacity, by):
    """{(token, k)} of the slots that stay."""
    kept = set()
    for e in range(n_experts):
        slots = [tuple(s) for s in (ids == e).nonzero().tolist()]
        if by == "weight":
            slots.sort(key=lambda s: (-weights[s].item(), s))
        kept |= set(slots[:capacity])
    return kept


@pytest.mark.parametrize("by", ["order", "weight"])
def test_limit_capacity_drops_what_it_says(by):
    """Against a plain reference with many ties; what stays is untouched; nothing where all fits."""
    r = random.Random(1)
    for seed in range(60):
        n, k, n_experts = r.randint(1, 12), r.randint(1, 4), r.randint(1, 7)
        weights, ids = random_slots(seed, n, k, n_experts, doubles=seed % 3 == 0)
        given, capacity = (weights.clone(), ids.clone()), r.randint(1, 5)
        w, i = O.limit_capacity(weights, ids, n_experts, capacity, by=by)
        assert torch.equal(weights, given[0]) and torch.equal(ids, given[1])  # not in place
        assert w.shape == i.shape == ids.shape and w.dtype == weights.dtype and i.dtype == ids.dtype
        kept = slow_limit(weights, ids, n_experts, capacity, by)
        for s in ((a, b) for a in range(n) for b in range(k)):
            if s in kept:
                assert (w[s], i[s]) == (weights[s], ids[s]), (seed, s)
            elif ids[s] >= 0:
                assert w[s] == 0 and i[s] == -1, (seed, s)
            else:
                assert i[s] == -1
        w, i = O.limit_capacity(weights, ids, n_experts, n * k, by=by)
        assert torch.equal(i, ids) and torch.equal(w[ids >= 0], weights[ids >= 0])


@pytest.mark.parametrize("by", ["order", "weight"])
def test_limit_capacity_default_empty_and_gradients(by):
    """By order if not told; no tokens, all nobody's; gradients pass where a slot stays."""
    weights, ids = random_slots(0, 20, 3, 4)
    plain = O.limit_capacity(weights, ids, 4, 3)
    ordered = O.limit_capacity(weights, ids, 4, 3, by="order")
    assert torch.equal(plain[0], ordered[0]) and torch.equal(plain[1], ordered[1])
    w, i = O.limit_capacity(weights[:0], ids[:0], 4, 3, by=by)
    assert w.shape == i.shape == (0, 3)
    w, i = O.limit_capacity(weights, torch.full_like(ids, -1), 4, 1, by=by)
    assert (i == -1).all()
    weights = (weights + 1).requires_grad_()
    w, i = O.limit_capacity(weights, ids, 4, 3, by=by)
    w.sum().backward()
    live = (i >= 0).float()
    assert torch.equal(weights.grad[ids >= 0], live[ids >= 0]) and live.sum() == 12


@pytest.mark.parametrize("scoring", [None, "softmax", "sigmoid"])
def test_expert_choice_equals_plain_python(scoring):
    """Each expert takes exactly its capacity, the best tokens by score; scores are the weights."""
    how = {} if scoring is None else dict(scoring=scoring)
    for seed, (n, n_experts) in enumerate([(1, 1), (9, 4), (17, 6), (5, 16)]):
        logits = randn(seed, n, n_experts) * 2
        scores = [slow_scores(row, scoring or "softmax") for row in logits.double().tolist()]
        for capacity in {1, max(1, n // 2), n}:
            weights, ids = O.expert_choice(logits, capacity, **how)
            assert weights.dtype == torch.float32 and ids.dtype == torch.int64
            assert weights.shape == ids.shape == (n, n_experts)
            for e in range(n_experts):
                best = sorted(range(n), key=lambda t: -scores[t][e])[:capacity]
                for t in range(n):
                    taken = t in best
                    assert ids[t, e] == (e if taken else -1)
                    assert weights[t, e].item() == pytest.approx(
                        scores[t][e] if taken else 0, rel=1e-5
                    )
            assert O.count_experts(ids, n_experts).tolist() == [capacity] * n_experts
    for capacity in (0, -1, n + 1):
        says(lambda: O.expert_choice(logits, capacity, **how), "capacity")


def test_expert_choice_runs_and_trains():
    """Its slots go through the experts; gradients reach the logits as through the plain loop."""
    x, _, _, *stacks = arguments(0, 11, 16, 8, 4, 2)
    found = []
    for experts in (O.grouped_experts, M.loop_experts):
        logits = randn(2, 11, 4).requires_grad_()
        o = experts(x, *O.expert_choice(logits, 5), *stacks)
        o.square().sum().backward()
        found.append((o.detach(), logits.grad))
    assert all(relative(a, b) < 1e-5 for a, b in zip(*found)) and found[0][1].norm() > 0
    bf16, fp32 = (O.expert_choice(logits.detach().to(d), 5) for d in (torch.bfloat16, torch.float))
    assert bf16[0].dtype == torch.float32 and fp32[0].dtype == torch.float32


# --------------------------------------------------------------------------------------------------
# Balancing
# --------------------------------------------------------------------------------------------------


def test_router_probs():
    logits = randn(0, 3, 5, 8) * 3
    sigmoid = logits.double().sigmoid()
    expected = {"softmax": logits.double().softmax(-1)}
    expected["sigmoid"] = sigmoid / sigmoid.sum(-1, keepdim=True)
    torch.testing.assert_close(O.router_probs(logits), O.router_probs(logits, "softmax"))
    for scoring, want in expected.items():
        got = O.router_probs(logits, scoring)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-8)
    half = logits.bfloat16()
    torch.testing.assert_close(
        O.router_probs(half).double(), half.double().softmax(-1), rtol=1e-5, atol=1e-8
    )


def test_router_probs_of_very_low_scores_are_finite():
    """A sigmoid that underflows everywhere leaves neither NaN nor a NaN gradient."""
    logits = torch.full((2, 4), -200.0, requires_grad=True)
    probs = O.router_probs(logits, "sigmoid")
    probs.sum().backward()
    assert probs.isfinite().all() and logits.grad.isfinite().all()


def test_count_experts():
    for shape in ((20, 3), (0, 3), (60,), (4, 5, 3)):
        ids = torch.randint(-1, 6, shape, generator=rng(0))
        got = O.count_experts(ids, 9)
        assert got.dtype == torch.int64 and got.shape == (9,)
        assert got.tolist() == [(ids == e).sum().item() for e in range(9)]
    assert O.count_experts(torch.full((4, 2), -1), 3).tolist() == [0, 0, 0]


def slow_balance(probs: torch.Tensor, ids: torch.Tensor) -> float:
    """probs (N, E), ids (N, K): sum_e f_e P_e by its formula."""
    n, n_experts = probs.shape
    total = 0.0
    for e in range(n_experts):
        f = n_experts / ids.numel() * (ids == e).sum().item()
        total += f * sum(probs[:, e].double().tolist()) / n
    return total


def test_balance_loss_by_hand():
    """The formula; its mean over sequences; 1 when even; E when all goes to one."""
    for seed, (n, n_experts, k) in enumerate([(1, 1, 1), (7, 4, 2), (33, 16, 4), (5, 40, 3)]):
        logits = randn(seed, 3, 2, n, n_experts)
        probs, ids = O.router_probs(logits), logits.topk(k).indices
        one = O.balance_loss(probs[0, 0], ids[0, 0])
        assert one.dim() == 0 and one.dtype == torch.float32
        assert one.item() == pytest.approx(slow_balance(probs[0, 0], ids[0, 0]), rel=1e-5)
        each = [slow_balance(probs[b, c], ids[b, c]) for b in range(3) for c in range(2)]
        whole = O.balance_loss(probs, ids).item()
        assert whole == pytest.approx(sum(each) / 6, rel=1e-5)
    even = torch.arange(8).view(8, 1) % 4
    skewed = randn(9, 8, 4).softmax(-1)
    assert O.balance_loss(torch.full((8, 4), 0.25), even).item() == pytest.approx(1)
    assert O.balance_loss(skewed, even).item() == pytest.approx(1)  # f is 1 for all
    alone = F.one_hot(torch.zeros(8, dtype=torch.long), 4).float()
    assert O.balance_loss(alone, torch.zeros(8, 1, dtype=torch.long)).item() == pytest.approx(4)


def test_balance_loss_sequence_wise_differs_from_batch_wise():
    """Two sequences, each skewed, together even: 1 over the batch, 2 by sequence."""
    ids = torch.tensor([[[0], [0]], [[1], [1]]])
    probs = F.one_hot(ids[..., 0], 2).float()
    assert O.balance_loss(probs, ids).item() == pytest.approx(2)
    assert O.balance_loss(probs.flatten(0, 1), ids.flatten(0, 1)).item() == pytest.approx(1)


def test_balance_loss_takes_counts():
    """Counts of all ranks in place of the ids' own; per sequence too; nobody is not counted."""
    logits = randn(0, 2, 9, 6)
    probs, ids = O.router_probs(logits), logits.topk(2).indices
    counts = torch.stack([O.count_experts(i, 6) for i in ids])
    plain = O.balance_loss(probs, ids)
    torch.testing.assert_close(O.balance_loss(probs, ids, counts), plain)
    torch.testing.assert_close(O.balance_loss(probs, ids, counts=counts * 7), plain)
    other = torch.tensor([[5, 0, 0, 1, 0, 0], [0, 3, 3, 0, 0, 0]])
    want = sum(
        6 * (other[b] / other[b].sum() * probs[b].double().mean(0)).sum().item() for b in (0, 1)
    )
    assert O.balance_loss(probs, ids, counts=other).item() == pytest.approx(want / 2, rel=1e-5)
    assert O.balance_loss(probs, ids, counts=other.float()).item() == pytest.approx(want / 2)
    holes = ids.masked_fill(torch.rand(ids.shape, generator=rng(1)) < 0.3, -1)
    counted = torch.stack([O.count_experts(i, 6) for i in holes])
    torch.testing.assert_close(
        O.balance_loss(probs, holes), O.balance_loss(probs, holes, counts=counted)
    )
    assert O.balance_loss(probs, torch.full_like(ids, -1)).isfinite()


def test_balance_loss_gradient_is_that_of_the_formula():
    """f_e / N on every probability; nothing else has one. It evens a router out."""
    probs = randn(0, 3, 8, 5).softmax(-1).requires_grad_()
    ids = probs.detach().topk(2).indices
    O.balance_loss(probs, ids).backward()
    f = torch.stack([O.count_experts(i, 5) for i in ids]) * 5 / 16
    torch.testing.assert_close(probs.grad, (f / 8 / 3)[:, None].expand(3, 8, 5), rtol=1e-5, atol=0)
    half = probs.detach().bfloat16().requires_grad_()
    loss = O.balance_loss(half, ids)
    loss.backward()
    assert loss.dtype == torch.float32 and half.grad.isfinite().all()
    offsets = torch.linspace(-2, 2, 8).requires_grad_()
    noise = randn(1, 512, 8)
    for _ in range(60):
        logits = noise + offsets
        loss = O.balance_loss(O.router_probs(logits), O.route(logits, 2)[1])
        (grad,) = torch.autograd.grad(loss, offsets)
        with torch.no_grad():
            offsets -= 2.0 * grad
    assert offsets.max() - offsets.min() < 1.0 and loss.item() < 1.05


def test_z_loss():
    logits = randn(0, 4, 7, 9) * 5
    want = logits.double().logsumexp(-1).square().mean().item()
    assert O.z_loss(logits).item() == pytest.approx(want, rel=1e-5) and O.z_loss(logits).dim() == 0
    half = logits.bfloat16()
    want = half.double().logsumexp(-1).square().mean().item()
    assert O.z_loss(half).item() == pytest.approx(want, rel=1e-5)
    large = torch.full((2, 4), 1e4, requires_grad=True)
    O.z_loss(large).backward()
    assert large.grad.isfinite().all() and large.grad.norm() > 0


def test_update_bias_moves_against_the_load_by_its_speed():
    bias = torch.tensor([0.5, -0.25, 0.0, 1.0])
    where = bias.data_ptr()
    assert O.update_bias_(bias, torch.tensor([9, 1, 5, 5]), 0.125) is None
    assert bias.tolist() == [0.375, -0.125, 0.0, 1.0] and bias.data_ptr() == where
    O.update_bias_(bias, torch.tensor([1.5, 2.5, 2.0, 2.0]), 0.125)
    assert bias.tolist() == [0.5, -0.25, 0.0, 1.0]
    O.update_bias_(bias, torch.zeros(4, dtype=torch.int64), 0.125)
    assert bias.tolist() == [0.5, -0.25, 0.0, 1.0]
    weight = nn.Parameter(torch.zeros(2))  # a leaf that takes gradients is updated all the same
    with torch.no_grad():
        O.update_bias_(weight, torch.tensor([1, 0]), 1.0)
    assert weight.tolist() == [-1, 1]


def test_update_bias_sees_small_differences_of_large_counts():
    """A billion tokens, one apart: fp32 would call that even."""
    bias = torch.zeros(2)
    O.update_bias_(bias, torch.tensor([2**30 + 1, 2**30 - 1]), 1.0)
    assert bias.tolist() == [-1, 1]


@pytest.mark.parametrize("speed, steps", [(0.02, 250)])
def test_the_correction_balances_a_skewed_router(speed, steps):
    """Aux-loss-free balancing (arXiv:2408.15664): fixed offsets, fresh noise every step. Before,
    the worst expert has several times the mean; after, under 1.2 times; weights never see it."""
    n_experts, top_k, g = 16, 2, rng(0)
    offsets, bias = torch.randn(n_experts, generator=g), torch.zeros(n_experts)

    def batch(n: int) -> torch.Tensor:
        return offsets + torch.randn(n, n_experts, generator=g)

    def load(logits: torch.Tensor) -> float:
        _, ids = O.route(logits, top_k, scoring="sigmoid", renormalize=True, bias=bias)
        return O.load_statistics(O.count_experts(ids, n_experts))["max_over_mean"]

    assert load(batch(4096)) > 2
    for step in range(steps):
        _, ids = O.route(batch(256), top_k, scoring="sigmoid", renormalize=True, bias=bias)
        O.update_bias_(bias, O.count_experts(ids, n_experts), speed / (1 + 8 * step / steps))
    logits = batch(4096)
    assert load(logits) < 1.2 and bias.abs().max() > 0.1
    weights, ids = O.route(logits, top_k, scoring="sigmoid", renormalize=True, bias=bias)
    scores = logits.sigmoid().gather(1, ids)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True), rtol=1e-5, atol=1e-7)


def test_load_statistics():
    def entropy(counts: list[float]) -> float:
        share = [c / sum(counts) for c in counts if c]
        return -sum(p * math.log(p) for p in share) / math.log(len(counts))

    got = O.load_statistics(torch.tensor([4, 4, 4, 4]))
    assert got == pytest.approx(dict(max_over_mean=1.0, entropy=1.0, dead=0.0))
    assert all(type(v) is float for v in got.values())
    got = O.load_statistics(torch.tensor([8, 0, 0, 0]))
    assert got == pytest.approx(dict(max_over_mean=4.0, entropy=0.0, dead=3.0), abs=1e-6)
    layers = [[5, 3, 1, 7], [2, 2, 2, 2], [0, 9, 8, 0]]
    got = O.load_statistics(torch.tensor(layers))
    worst = dict(max_over_mean=9 / 4.25, entropy=min(map(entropy, layers)), dead=2.0)
    assert got == pytest.approx(worst, abs=1e-6)
    for shape in ((6,), (3, 6)):
        got = O.load_statistics(torch.zeros(shape, dtype=torch.int64))
        assert got == dict(max_over_mean=0.0, entropy=0.0, dead=float(math.prod(shape)))
    got = O.load_statistics(torch.tensor([[0, 0], [3, 1]]))  # a layer that saw nothing
    assert got["dead"] == 2 and all(map(math.isfinite, got.values()))
    got = O.load_statistics(torch.tensor([7]))  # one expert is even
    assert got == pytest.approx(dict(max_over_mean=1.0, entropy=1.0, dead=0.0))
    got = O.load_statistics(torch.tensor([2.5, 1.5]))  # averaged over ranks
    assert got["max_over_mean"] == pytest.approx(1.25)


def test_balancing_by_what_the_model_shows():
    """MoE.observe's logits (B, T, E) and ids (B, T, K) go into the sequence-wise loss as they are;
    its gradient reaches the router."""
    config = latent(n_mtp_layers=0)
    model = random_model(config).requires_grad_(True)
    seen = []
    for layer in model.layers[1:]:
        layer.mlp.observe = lambda logits, ids: seen.append((logits, ids))
    model(random_tokens(config, 2, 11))
    assert [(a.shape, b.shape) for a, b in seen] == [((2, 11, 8), (2, 11, 3))] * 2
    sum(O.balance_loss(O.router_probs(a, "sigmoid"), b) for a, b in seen).backward()
    assert all(layer.mlp.router.grad.norm() > 0 for layer in model.layers[1:])


# --------------------------------------------------------------------------------------------------
# Experts
# --------------------------------------------------------------------------------------------------


def some_ids(pattern: str, n: int, k: int, e: int, g: torch.Generator) -> torch.Tensor:
    if pattern == "one":
        return torch.full((n, k), e // 2)
    if pattern == "last":
        return torch.full((n, k), e - 1)
    if pattern == "none":
        return torch.full((n, k), -1)
    if pattern == "twice":  # every slot of a row is the same expert
        return torch.randint(0, e, (n, 1), generator=g).expand(n, k).clone()
    if pattern == "ends":  # most experts are empty
        return torch.randint(0, 2, (n, k), generator=g) * (e - 1)
    if pattern == "skew":  # nearly all on one, one token each on others
        ids = torch.zeros(n, k, dtype=torch.long)
        ids[: min(n, e), 0] = torch.arange(min(n, e))
        return ids
    ids = torch.rand(n, e, generator=g).argsort(1)[:, :k]
    ids = ids if k <= e else torch.randint(0, e, (n, k), generator=g)
    if pattern == "holes":
        ids = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.4, -1)
    return ids


def arguments(seed: int, n: int, c: int, f: int, e: int, k: int, pattern="random", dtype=None):
    """x, weights (fp32), ids, w_gate_up, w_down; outputs of the size of the inputs."""
    g = rng(seed)
    x = torch.randn(n, c, generator=g)
    weights = torch.rand(n, k, generator=g) + 0.1
    ids = some_ids(pattern, n, k, e, g)
    gate_up = torch.randn(e, 2 * f, c, generator=g) * 2 / c**0.5
    down = torch.randn(e, c, f, generator=g) * 2 / f**0.5
    return [t.to(dtype or t.dtype) if i in (0, 3, 4) else t for i, t in
            enumerate((x, weights, ids, gate_up, down))]  # fmt: skip


def experts_outcome(experts, args, wanted=MOE_ARGUMENTS, pull=None) -> dict:
    """The output and the gradients of a fixed random combination of it."""
    leaves = dict(zip(("x", "weights", "ids", "w_gate_up", "w_down"), args))
    leaves = {k: v.detach().clone() if v.is_contiguous() else v.detach() for k, v in leaves.items()}
    for name in wanted:
        leaves[name].requires_grad_()
    o = experts(*leaves.values())
    assert o.shape == args[0].shape and o.dtype == args[0].dtype
    pull = randn(99, *o.shape).to(o.dtype) if pull is None else pull(o)
    if o.requires_grad:
        o.backward(pull)
    grads = {n: leaves[n].grad for n in wanted}  # None: as good as zeros
    grads = {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in grads.items()}
    return {"o": o.detach()} | grads


def loop_in_fp64(args, wanted=MOE_ARGUMENTS) -> dict:
    """The plain loop in fp64."""
    return experts_outcome(
        M.loop_experts, [t.double() if t.is_floating_point() else t for t in args], wanted
    )


def experts_agree(got: dict, want: dict, limit: float = 1e-5) -> None:
    assert got.keys() == want.keys()
    for name, b in want.items():
        a = got[name]
        assert a.shape == b.shape, name
        if not b.numel():
            continue
        if b.norm() == 0:
            assert (a == 0).all(), name
        else:
            assert relative(a.double(), b.double()) <= limit, (
                name, relative(a.double(), b.double())
            )  # fmt: skip


def grouped_by(backend: str, **more):
    return partial(O.grouped_experts, backend=backend, **more)


@contextlib.contextmanager
def poisoned():
    """Memory that torch.empty gives out holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SHAPES = {  # n, c, f, e, k
    "one": (1, 16, 8, 1, 1),
    "two": (2, 40, 24, 3, 2),
    "ragged": (37, 40, 24, 5, 3),
    "wide": (130, 80, 72, 2, 1),
    "many-experts": (5, 16, 8, 40, 4),
    "dense": (9, 32, 40, 4, 4),
    "one-expert": (21, 16, 24, 1, 1),
    "one-token": (1, 48, 56, 6, 4),
    "narrow": (12, 72, 8, 3, 1),
}
ODD_WIDTHS = {"odd": (37, 18, 10, 3, 2), "prime": (13, 17, 9, 5, 3), "tiny": (3, 1, 1, 2, 2)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_equal_the_loop(backend, shape):
    """Output and all four gradients, in fp32, with memory poisoned."""
    args = arguments(0, *shape)
    with poisoned():
        got = experts_outcome(grouped_by(backend), args)
    experts_agree(got, loop_in_fp64(args))


@pytest.mark.parametrize("shape", ODD_WIDTHS.values(), ids=ODD_WIDTHS)
@pytest.mark.parametrize("backend", ("torch", "triton"))
def test_experts_of_odd_widths_equal_the_loop(backend, shape):
    args = arguments(1, *shape)
    with poisoned():
        got = experts_outcome(grouped_by(backend), args)
    experts_agree(got, loop_in_fp64(args))


@pytest.mark.parametrize("shape", ODD_WIDTHS.values(), ids=ODD_WIDTHS)
def test_grouped_mm_of_odd_widths_is_right_or_refused(shape):
    """torch._grouped_mm wants rows of multiples of 16 bytes: then right, or a ValueError."""
    args = arguments(1, *shape)
    try:
        got = experts_outcome(grouped_by("grouped_mm"), args)
    except ValueError as e:
        assert "\n" not in str(e)
    else:
        experts_agree(got, loop_in_fp64(args))


@pytest.mark.parametrize("pattern", ["one", "last", "none", "twice", "ends", "skew", "holes"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_of_any_load_equal_the_loop(backend, pattern):
    """All tokens on one expert, most experts empty, nobody's slots, one expert for all slots of a
    row. Gradients of experts that no token met are exact zeros; nobody's weights get none."""
    args = arguments(2, 45, 24, 16, 6, 3, pattern)
    with poisoned():
        got = experts_outcome(grouped_by(backend), args)
    experts_agree(got, loop_in_fp64(args))
    unmet = [e for e in range(6) if not (args[2] == e).any()]
    assert all((got[name][unmet] == 0).all() for name in ("w_gate_up", "w_down"))
    assert (got["weights"][args[2] < 0] == 0).all()
    assert (got["o"][(args[2] < 0).all(1)] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_without_tokens(backend):
    """N = 0: an empty output, zero gradients."""
    args = arguments(0, 0, 16, 8, 3, 2)
    with poisoned():
        got = experts_outcome(grouped_by(backend), args)
    assert got["o"].shape == (0, 16) and got["x"].shape == (0, 16)
    assert all((got[name] == 0).all() for name in ("w_gate_up", "w_down"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_graph_is_whole_where_nobody_comes(backend):
    """No tokens, or none that an expert takes: backward runs all the same, as on the ranks that
    wait for this one."""
    for args in (arguments(0, 0, 16, 8, 3, 2), arguments(0, 5, 16, 8, 3, 2, "none")):
        leaves = [t.requires_grad_() if t.is_floating_point() else t for t in args]
        o = grouped_by(backend)(*leaves)
        assert o.requires_grad
        o.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nobodys_slot_adds_nothing_whatever_its_weight(backend):
    """NaN or infinite weights there, NaN in a row of x that no expert takes."""
    args = arguments(3, 20, 16, 8, 4, 2, "holes")
    args[2][5] = -1
    want = loop_in_fp64(args)
    nobody = args[2] < 0
    assert nobody[5].all() and not nobody.all()
    args[1] = args[1].masked_fill(nobody, math.nan)
    args[1][nobody.nonzero()[0, 0], nobody.nonzero()[0, 1]] = math.inf
    args[0][5] = math.nan
    got = experts_outcome(grouped_by(backend), args)
    experts_agree(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_stays_in_its_row(backend):
    """x of one token NaN, the weight of another infinite: all other rows are as they were."""
    args = arguments(4, 33, 16, 24, 3, 2)
    want = grouped_by(backend)(*args)
    args[0][7, 3], args[1][11, 1] = math.nan, math.inf
    got = grouped_by(backend)(*args)
    rest = [i for i in range(33) if i not in (7, 11)]
    assert got[7].isnan().all() and not got[11].isfinite().any()
    torch.testing.assert_close(got[rest], want[rest], rtol=1e-6, atol=1e-6)


def holed(t: torch.Tensor) -> torch.Tensor:
    """The same numbers, each row in memory followed by others."""
    wide = torch.full((*t.shape[:-1], t.shape[-1] + 3), 7).to(t)
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


def turned(t: torch.Tensor) -> torch.Tensor:
    """The same numbers, last two dimensions swapped in memory."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize("layout", [holed, turned])
@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_take_any_strides(backend, layout):
    """Views with gaps, transposed stacks; an output gradient expanded (stride 0) or transposed."""
    plain = arguments(5, 19, 24, 16, 3, 2)
    args = [layout(t) for t in plain]
    assert not any(t.is_contiguous() for t in args)
    want = loop_in_fp64(plain)
    experts_agree(experts_outcome(grouped_by(backend), args), want)
    experts_agree(
        experts_outcome(grouped_by(backend), args, pull=lambda o: turned(randn(99, *o.shape))), want
    )
    ones = experts_outcome(grouped_by(backend), args, pull=lambda o: torch.ones(()).expand(o.shape))
    double = [t.double() if t.is_floating_point() else t for t in plain]
    experts_agree(ones, experts_outcome(M.loop_experts, double, pull=torch.ones_like))


@pytest.mark.parametrize("backend", BACKENDS)
def test_expanded_weights_and_ids(backend):
    """One weight for all slots, one row of ids for all tokens: strides of 0."""
    args = arguments(6, 15, 16, 8, 4, 2)
    args[1] = torch.tensor(0.5).expand(15, 2)
    args[2] = torch.tensor([[2, 0]]).expand(15, 2)
    args[0] = args[0][:1].expand(15, 16)
    plain = [t.contiguous() for t in args]
    o = grouped_by(backend)(*args)
    assert relative(o.double(), loop_in_fp64(plain, ())["o"]) < 1e-5


HALF = {torch.float16: 2e-3, torch.bfloat16: 2e-2}
HALVES = [("triton", torch.float16), ("auto", torch.float16), ("auto", torch.bfloat16)]
HALVES += [(b, d) for b in ("torch", "grouped_mm") for d in HALF]


@pytest.mark.parametrize("routing", ["fp32", "half"])
@pytest.mark.parametrize("backend, dtype", HALVES, ids=lambda v: str(v).removeprefix("torch."))
def test_experts_in_half_precision(backend, dtype, routing):
    """Out comes x's dtype; close to the exact result, near as close as the plain loop; gradients
    in the dtypes of what they belong to."""
    args = arguments(7, 37, 40, 24, 5, 3, dtype=dtype)
    args[1] = args[1].to(dtype) if routing == "half" else args[1]
    want = loop_in_fp64(args)
    got, loop = experts_outcome(grouped_by(backend), args), experts_outcome(M.loop_experts, args)
    leaves = dict(zip(("x", "weights", "ids", "w_gate_up", "w_down"), args))
    assert got["o"].dtype == dtype and all(got[n].dtype == leaves[n].dtype for n in MOE_ARGUMENTS)
    for name, b in want.items():
        error = relative(got[name].double(), b)
        assert error < max(HALF[dtype], 1.5 * relative(loop[name].double(), b)), (name, error)


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_experts_in_fp64(backend):
    """auto takes what its kernels do not."""
    args = [t.double() if t.is_floating_point() else t for t in arguments(8, 12, 16, 8, 3, 2)]
    experts_agree(experts_outcome(grouped_by(backend), args), loop_in_fp64(args), 1e-12)


@pytest.mark.parametrize("backend", ["torch", "grouped_mm", "auto"])
def test_experts_under_autocast(backend):
    """Master weights in fp32 under bf16 autocast, as in train.py: x's dtype out, gradients in
    the dtypes of the parameters, no further from exact than bf16 is."""
    for x_dtype in (torch.float32, torch.bfloat16):
        args = arguments(9, 30, 32, 16, 4, 2)
        args[0] = args[0].to(x_dtype)

        def under(*given):
            with torch.autocast("cpu", torch.bfloat16):
                return grouped_by(backend)(*given)

        got, want = experts_outcome(under, args), loop_in_fp64(args)
        assert got["w_gate_up"].dtype == torch.float32
        for name, b in want.items():
            assert relative(got[name].double(), b) < 2e-2, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_token_is_dropped(backend):
    """Experts that give 1 to every token: the output counts the slots, however skewed the load."""
    n, c, f, e, k = 90 if backend == "triton" else 300, 16, 8, 5, 3
    x = torch.full((n, c), 1 / c)
    gate_up = torch.cat((torch.ones(e, f, c), torch.full((e, f, c), 1 / F.silu(torch.ones(())))), 1)
    down = torch.full((e, c, f), 1 / f)
    for pattern in ("one", "skew", "holes"):
        ids = some_ids(pattern, n, k, e, rng(0))
        o = grouped_by(backend)(x, torch.ones(n, k), ids, gate_up, down)
        slots = (ids >= 0).sum(1, keepdim=True).float().expand(n, c)
        torch.testing.assert_close(o, slots, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_are_deterministic(backend):
    """The same bits twice, forward and backward, with an allocator in another state."""
    args = arguments(10, 61, 24, 16, 3, 2, "holes")
    first = experts_outcome(grouped_by(backend), args)
    held = [torch.full((i * 37 + 5,), 3.0) for i in range(20)]
    second = experts_outcome(grouped_by(backend), args)
    assert len(held) == 20 and all(torch.equal(a, second[name]) for name, a in first.items())


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_in_another_order_give_rows_in_that_order(backend):
    """A row does not depend on its neighbours, nor on the order of its slots."""
    args = arguments(11, 61, 24, 16, 3, 3, "holes")
    order = torch.randperm(61, generator=rng(0))
    o = grouped_by(backend)(*args)
    moved = grouped_by(backend)(*(t[order] for t in args[:3]), *args[3:])
    torch.testing.assert_close(moved, o[order], rtol=1e-6, atol=1e-6)
    if backend == "triton":
        assert torch.equal(moved, o[order])
    flipped = grouped_by(backend)(args[0], args[1].flip(1), args[2].flip(1), *args[3:])
    torch.testing.assert_close(flipped, o, rtol=1e-5, atol=1e-6)
    some = grouped_by(backend)(*(t[17:40] for t in args[:3]), *args[3:])
    torch.testing.assert_close(some, o[17:40], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pattern", ["random", "holes", "twice"])
def test_gradcheck(pattern):
    args = arguments(12, 5, 4, 3, 3, 2, pattern)
    args = [t.double() if t.is_floating_point() else t for t in args]
    leaves = [t.requires_grad_() if t.is_floating_point() else t for t in args]
    assert torch.autograd.gradcheck(grouped_by("torch"), leaves)


def test_experts_under_torch_func():
    """torch.func.grad of the plain backend gives autograd's gradients."""
    x, weights, ids, *stacks = arguments(13, 9, 16, 8, 3, 2)

    def loss(x, weights, gate_up, down):
        return grouped_by("torch")(x, weights, ids, gate_up, down).square().sum()

    got = torch.func.grad(loss, argnums=(0, 1, 2, 3))(x, weights, *stacks)
    leaves = [t.clone().requires_grad_() for t in (x, weights, *stacks)]
    want = torch.autograd.grad(loss(*leaves), leaves)
    assert all(relative(a, b) < 1e-6 for a, b in zip(got, want))


@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_without_gradients(backend):
    """no_grad, inference_mode, tensors made in it, and nothing that asks for gradients."""
    args = arguments(14, 13, 16, 8, 3, 2)
    want = loop_in_fp64(args, ())["o"]
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in args]
    with torch.no_grad():
        o = grouped_by(backend)(*leaves)
    assert not o.requires_grad and relative(o.double(), want) < 1e-5
    with torch.inference_mode():
        o = grouped_by(backend)(*leaves)
        made = grouped_by(backend)(*(t.clone() for t in args))
    assert not o.requires_grad and torch.equal(o, made) and relative(o.double(), want) < 1e-5
    assert not grouped_by(backend)(*args).requires_grad
    assert grouped_by(backend)(*leaves).requires_grad


SUBSETS = [s for n in range(5) for s in combinations(MOE_ARGUMENTS, n)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_some_inputs_alone(backend):
    """Frozen stacks, x from frozen layers, and so on: those asked for are right, others None."""
    args = arguments(15, 18, 16, 24, 4, 2, "holes")
    want = loop_in_fp64(args)
    few = [("x",), ("weights",), ("x", "weights"), ("w_gate_up",), ("w_down",)]
    for wanted in few if backend == "triton" else SUBSETS:
        got = experts_outcome(grouped_by(backend), args, wanted)
        experts_agree(got, {name: want[name] for name in ("o", *wanted)})


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_under_checkpoint(backend, reentrant):
    args = arguments(16, 18, 16, 24, 4, 2)
    got = experts_outcome(
        lambda *a: checkpoint(grouped_by(backend), *a, use_reentrant=reentrant), args
    )
    experts_agree(got, loop_in_fp64(args))


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_calls_in_one_graph(backend):
    """Stacks shared by two layers accumulate; backward through retained graphs gives the same."""
    x, weights, ids, *stacks = arguments(17, 11, 16, 8, 3, 2)

    def loss(experts, cast):
        leaves = [cast(t).requires_grad_() for t in (x, weights, *stacks)]
        y = experts(leaves[0], leaves[1], ids, *leaves[2:])
        total = experts(y, leaves[1], ids.flip(0), *leaves[2:]).square().sum()
        first = torch.autograd.grad(total, leaves, retain_graph=True)
        return first, torch.autograd.grad(total, leaves)

    first, second = loss(grouped_by(backend), torch.clone)
    want, _ = loss(M.loop_experts, torch.Tensor.double)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert all(relative(a.double(), b) < 1e-5 for a, b in zip(first, want))


def test_linear_is_how_experts_multiply():
    """`linear` is called once for each stack of each expert in use, for the rows of its slots."""
    args = arguments(18, 25, 16, 8, 6, 2, "holes")
    args[2][args[2] == 3] = -1
    calls = []

    def linear(rows, stack, e):
        calls.append((int(e), len(rows), stack is args[3]))
        return 2 * F.linear(rows, stack[e])

    got = grouped_by("torch", linear=linear)(*args)
    want = M.loop_experts(*args[:3], 2 * args[3], 2 * args[4])
    assert relative(got, want) < 1e-5
    used = sorted(set(args[2][args[2] >= 0].tolist()))
    assert (
        sorted(e for e, _, up in calls if up) == used == sorted(e for e, _, up in calls if not up)
    )
    assert sum(n for _, n, up in calls if up) == (args[2] >= 0).sum()
    calls.clear()
    try:
        got = grouped_by("auto", linear=linear)(*args)
    except ValueError:
        return
    assert calls and relative(got, want) < 1e-5  # not passed over in silence


def broken(**changes) -> list[torch.Tensor]:
    args = dict(zip(("x", "weights", "ids", "w_gate_up", "w_down"), arguments(0, 6, 16, 8, 3, 2)))
    return list((args | changes).values())


def ids_of(*special: int) -> torch.Tensor:
    ids = torch.zeros(6, 2, dtype=torch.long)
    for i, v in enumerate(special):
        ids[i + 2, 1] = v
    return ids


SHAPE_ERRORS = {
    "x-1d": (dict(x=torch.zeros(16)), "x"),
    "x-3d": (dict(x=torch.zeros(2, 3, 16)), "x"),
    "x-width": (dict(x=torch.zeros(6, 15)), "x|w_gate_up"),
    "x-rows": (dict(x=torch.zeros(7, 16)), "x|weights|ids"),
    "weights-k": (dict(weights=torch.zeros(6, 1)), "weights|ids"),
    "weights-n": (dict(weights=torch.zeros(1, 2)), "weights"),
    "weights-1d": (dict(weights=torch.zeros(6)), "weights"),
    "ids-n": (dict(ids=torch.zeros(5, 2, dtype=torch.long)), "ids|weights"),
    "ids-1d": (dict(ids=torch.zeros(6, dtype=torch.long)), "ids|weights"),
    "both-n": (
        dict(ids=torch.zeros(5, 2, dtype=torch.long), weights=torch.zeros(5, 2)), "ids|weights|x",
    ),
    "odd-gate-up": (dict(w_gate_up=torch.zeros(3, 15, 16)), "w_gate_up"),
    "gate-up-width": (dict(w_gate_up=torch.zeros(3, 16, 15)), "w_gate_up|x"),
    "gate-up-2d": (dict(w_gate_up=torch.zeros(16, 16)), "w_gate_up"),
    "down-width": (dict(w_down=torch.zeros(3, 15, 8)), "w_down"),
    "down-inner": (dict(w_down=torch.zeros(3, 16, 7)), "w_down|w_gate_up"),
    "down-experts": (dict(w_down=torch.zeros(4, 16, 8)), "w_down|w_gate_up"),
    "down-2d": (dict(w_down=torch.zeros(16, 8)), "w_down"),
}  # fmt: skip


@pytest.mark.parametrize("backend", (*BACKENDS, "auto"))
@pytest.mark.parametrize("changes, names", SHAPE_ERRORS.values(), ids=SHAPE_ERRORS)
def test_experts_refuse_shapes(changes, names, backend):
    line = says(lambda: grouped_by(backend)(*broken(**changes)))
    assert re.search(rf"\b({names})\b", line), line


@pytest.mark.parametrize("backend", (*BACKENDS, "auto"))
def test_experts_refuse_ids_and_backends(backend):
    for bad in (3, -2, 1000, -(2**40)):
        says(lambda: grouped_by(backend)(*broken(ids=ids_of(bad))), "ids")
    says(lambda: grouped_by("cuda")(*broken()), "backend")
    says(lambda: grouped_by("")(*broken()), "backend")


NO_TRITON = """
import sys
if {hidden}: sys.modules["triton"] = None
import torch, moe as O
args = [torch.randn(4, 16), torch.rand(4, 2), torch.tensor([[0, 1]] * 4),
        torch.randn(2, 16, 16), torch.randn(2, 16, 8)]
try:
    O.grouped_experts(*args, backend="triton")
except ValueError as e:
    assert "backend" in str(e) or "triton" in str(e), e
    assert "\\n" not in str(e), e
else:
    raise SystemExit("not refused")
auto, plain = (O.grouped_experts(*args, backend=b) for b in ("auto", "torch"))
assert torch.equal(auto, plain)
O.route(torch.randn(4, 8), 2)
print("fine")
"""


@pytest.mark.skipif(CUDA, reason="Triton runs there")
@pytest.mark.parametrize("hidden", [False, True], ids=["no-gpu", "missing"])
def test_triton_is_refused_where_it_cannot_run(hidden, tmp_path):
    """And auto takes plain torch."""
    shutil.copy(REPO / "moe.py", tmp_path)
    env = dict(PYTHONPATH=str(tmp_path), TRITON_INTERPRET="0")
    done = run("-c", NO_TRITON.format(hidden=hidden), cwd=tmp_path, env=env)
    assert done.returncode == 0 and done.stdout.strip() == "fine", done.stderr


@pytest.mark.parametrize("capacity", [1, 2, 7, 60])
def test_padded_experts_equal_grouped_ones_after_the_limit(capacity):
    """The capacity form, value and gradients, slots dropped by order; also without tokens."""
    for pattern in ("random", "holes", "twice", "one", "none"):
        args = arguments(19, 20, 16, 8, 4, 3, pattern)

        def limited(x, weights, ids, *stacks):
            return grouped_by("torch")(x, *O.limit_capacity(weights, ids, 4, capacity), *stacks)

        with poisoned():
            got = experts_outcome(lambda *a: O.padded_experts(*a, capacity), args)
        experts_agree(got, experts_outcome(limited, args))
        if capacity == 60:
            experts_agree(got, loop_in_fp64(args))
    none = arguments(19, 0, 16, 8, 4, 3)
    assert O.padded_experts(*none, capacity).shape == (0, 16)


# ---- quantized stacks ----


class DenseLayer(nn.Module):
    """What quantize_ takes for a mixture of experts."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor):
        super().__init__()
        self.experts = M.loop_experts
        self.w_gate_up, self.w_down = nn.Parameter(gate_up), nn.Parameter(down)


def quantized(scheme: str, args, **how) -> DenseLayer:
    net = nn.ModuleList([DenseLayer(*args[3:])])
    return Q.quantize_(net, scheme, **how)[0]


def decoded(stack) -> torch.Tensor:
    return torch.stack([stack[e] for e in range(stack.shape[0])]).detach()


CODES = {  # scheme, options, (n, c, f, e, k)
    "int8": ("int8", {}, (37, 40, 24, 4, 2)),
    "int8-odd": ("int8", {}, (11, 18, 10, 3, 2)),
    "int8-few": ("int8", {}, (3, 64, 32, 4, 2)),
    "int4": ("int4", {}, (21, 64, 96, 4, 2)),
    "int4-groups-of-8": ("int4", dict(group_size=8), (21, 40, 24, 4, 2)),
    "int4-groups-of-128": ("int4", dict(group_size=128), (5, 128, 128, 2, 1)),
    "fp8": ("fp8", {}, (21, 40, 24, 4, 2)),
    "fp8-odd": ("fp8", {}, (9, 48, 18, 3, 2)),
    "fp8-block": ("fp8-block", {}, (13, 40, 24, 3, 2)),
    "fp8-block-ragged": ("fp8-block", {}, (6, 192, 136, 2, 1)),  # gate ends inside a block
}


@torch.no_grad()
@pytest.mark.parametrize("backend", ["torch", "triton", "auto"])
@pytest.mark.parametrize("scheme, how, shape", CODES.values(), ids=CODES)
def test_quantized_experts_equal_the_loop_on_what_codes_stand_for(scheme, how, shape, backend):
    """int8, int4 and FP8, ragged sizes, nobody's slots. (An FP8 stack's own product rounds x, so
    there the plain backend is told to multiply by the decoded weight.)"""
    args = arguments(20, *shape, "holes")
    layer = quantized(scheme, args, **how)
    stacks = layer.w_gate_up, layer.w_down
    want = loop_in_fp64([*args[:3], *map(decoded, stacks)], ())["o"]
    assert relative(want, loop_in_fp64(args, ())["o"]) > 1e-4  # codes do differ from the weights
    more = {}
    if scheme.startswith("fp8") and backend == "torch":
        more = dict(linear=lambda rows, stack, e: F.linear(rows, stack[e]))
    got = grouped_by(backend, **more)(*args[:3], *stacks)
    assert got.dtype == torch.float32
    limit = 0.1 if scheme.startswith("fp8") and backend == "auto" else 1e-5
    assert relative(got.double(), want) < limit


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8", "fp8-block", "int8-dynamic", "llm.int8"])
def test_quantized_experts_multiply_as_their_stack_does(scheme):
    """The plain backend == quantize.py's own loop over stack.linear, whatever the scheme."""
    args = arguments(21, 25, 64, 32, 4, 2)
    layer = quantized(scheme, args)
    stacks = layer.w_gate_up, layer.w_down
    want = Q.experts_by(Q.expert_linear, *args[:3], *stacks)
    assert relative(grouped_by("torch")(*args[:3], *stacks), want) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("backend", ["triton", "auto"])
@pytest.mark.parametrize("scheme", ["int3", "int2", "int8-dynamic", "llm.int8"])
def test_other_codes_are_refused_or_right(scheme, backend):
    """No codes are read for what they are not."""
    args = arguments(22, 12, 64, 32, 4, 2)
    layer = quantized(scheme, args)
    want = loop_in_fp64([*args[:3], decoded(layer.w_gate_up), decoded(layer.w_down)], ())["o"]
    try:
        got = grouped_by(backend)(*args[:3], layer.w_gate_up, layer.w_down)
    except ValueError as e:
        assert backend == "triton" and "\n" not in str(e)
        return
    assert relative(got.double(), want) < 0.05


@torch.no_grad()
@pytest.mark.parametrize("backend", ["torch", "triton", "auto"])
@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8-block"])
@pytest.mark.parametrize("skip", ["w_gate_up", "w_down"])
def test_one_stack_quantized_the_other_not(scheme, skip, backend):
    args = arguments(23, 12, 64, 32, 4, 2)
    layer = quantized(scheme, args, skip=f"0.{skip}")
    stacks = {name: getattr(layer, name) for name in ("w_gate_up", "w_down")}
    plain = [s if n == skip else decoded(s) for n, s in stacks.items()]
    want = loop_in_fp64([*args[:3], *plain], ())["o"]
    limit = 0.1 if scheme == "fp8-block" and backend != "triton" else 1e-5
    assert relative(grouped_by(backend)(*args[:3], *stacks.values()).double(), want) < limit


@torch.no_grad()
@pytest.mark.parametrize("backend", ["torch", "triton", "auto"])
@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_quantized_experts_without_tokens_or_takers(scheme, backend):
    args = arguments(24, 4, 64, 32, 4, 2, "none")
    layer = quantized(scheme, args)
    stacks = layer.w_gate_up, layer.w_down
    assert (grouped_by(backend)(*args[:3], *stacks) == 0).all()
    assert grouped_by(backend)(*(t[:0] for t in args[:3]), *stacks).shape == (0, 64)


@torch.no_grad()
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_quantized_experts_in_half_precision(scheme, dtype):
    """A model in 16 bit: x's dtype out, as close as 16 bit allows."""
    args = arguments(25, 12, 64, 32, 4, 2)
    layer = quantized(scheme, args).to(dtype)
    x = args[0].to(dtype)
    stacks = layer.w_gate_up, layer.w_down
    want = loop_in_fp64([x, *args[1:3], *map(decoded, stacks)], ())["o"]
    for backend in ("torch", "auto", *(["triton"] if dtype == torch.float16 else [])):
        got = grouped_by(backend)(x, *args[1:3], *stacks)
        limit = 0.1 if scheme == "fp8" and backend != "triton" else 1.5 * HALF[dtype]
        assert got.dtype == dtype and relative(got.double(), want) < limit, backend


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_gradients_pass_quantized_experts_on_torch(scheme):
    """To x and the routing weights (adapters below a quantized mixture); to the codes none."""
    args = arguments(26, 19, 64, 32, 4, 2)
    layer = quantized(scheme, args)
    stacks = layer.w_gate_up, layer.w_down
    got = experts_outcome(
        lambda x, weights, ids, *_: grouped_by("torch")(x, weights, ids, *stacks),
        args,
        MOE_ARGUMENTS[:2],
    )
    experts_agree(got, loop_in_fp64([*args[:3], *map(decoded, stacks)], MOE_ARGUMENTS[:2]))


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8", "fp8-block"])
def test_quantized_model_runs_on_grouped_experts(scheme):
    """A whole model: its own loop over codes against the grouped experts."""
    widths = dict(q_lora_rank=32, kv_lora_rank=32, v_head_dim=16, ffn_dim=96, expert_ffn_dim=32)
    model = Q.quantize_(random_model(latent(**widths)), scheme)
    tokens = random_tokens(model.config, 2, 9)
    want = model(tokens)
    stacks = {id(m.w_gate_up) for m in model.modules() if isinstance(m, M.MoE)}
    assert relative(O.use_grouped_experts(model, backend="torch")(tokens), want) < 1e-4
    got = O.use_grouped_experts(model, backend="triton")(tokens)
    assert relative(got, want) < (0.2 if scheme.startswith("fp8") else 1e-4)
    assert stacks == {id(m.w_gate_up) for m in model.modules() if isinstance(m, M.MoE)}


# ---- the hook ----

MOE_MODELS = {
    "latent": latent(),
    "mixtral": tiny(family="mixtral", moe_layers=(0, 1, 2), n_experts=6, n_experts_per_token=2,
                    expert_ffn_dim=40, norm_topk=True),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, *(dict(backend=b) for b in BACKENDS[::2])], ids=str)
@pytest.mark.parametrize("config", MOE_MODELS.values(), ids=MOE_MODELS)
def test_a_model_on_grouped_experts_gives_the_same_logits(config, options):
    """In every mixture, the MTP layer's too; nothing else of the model changes."""
    model, tokens = random_model(config), random_tokens(config, 2, 13)
    want, keys = model(tokens), list(model.state_dict())
    parts = [m for m in model.modules() if isinstance(m, M.MoE)]
    assert O.use_grouped_experts(model, **options) is model
    assert all(m.experts is not M.loop_experts for m in parts) and len(parts) == 3
    assert list(model.state_dict()) == keys and relative(model(tokens), want) < 1e-5
    twin = copy.deepcopy(model)
    assert torch.equal(twin(tokens), model(tokens))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", MOE_MODELS.values(), ids=MOE_MODELS)
def test_a_model_on_grouped_experts_trains_the_same(config, backend):
    """Gradients of every parameter, against the loop's."""
    found = []
    for swap in (False, True):
        model, tokens = (
            random_model(config).requires_grad_(True).train(),
            random_tokens(config, 1, 10),
        )
        if swap:
            O.use_grouped_experts(model, backend=backend)
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and any("router" in name for name in found[0])
    for name, grad in found[0].items():
        assert relative(found[1][name], grad) < 1e-4, name


def test_a_mixture_itself_and_a_dense_model():
    """A lone MoE is a model too; one without experts is refused, and left as it was."""
    moe = random_model(latent()).layers[1].mlp
    x = randn(0, 2, 5, 64)
    want = moe(x)
    assert O.use_grouped_experts(moe) is moe and relative(moe(x), want) < 1e-5
    assert moe.experts is not M.loop_experts
    says(lambda: O.use_grouped_experts(random_model(tiny())), "experts")
    says(lambda: O.use_grouped_experts(nn.Linear(2, 2)), "experts")


def test_upcycled_experts_are_copies_that_give_the_dense_layer():
    """Shapes, equality for any weights that sum to 1, and memory of their own."""
    c, f, e = 24, 16, 5
    gate, up, down = randn(0, f, c) / 4, randn(1, f, c) / 4, randn(2, c, f) / 4
    stacks = O.upcycled(gate, up, down, e)
    assert [s.shape for s in stacks] == [(e, 2 * f, c), (e, c, f)]
    assert all(s.dtype == torch.float32 and s.is_contiguous() for s in stacks)
    x = randn(3, 30, c)
    want = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    for seed, k in ((0, 1), (1, 2), (2, 5)):
        weights, ids = O.route(randn(seed, 30, e) * 3, k, renormalize=True)
        assert relative(O.grouped_experts(x, weights, ids, *stacks), want) < 1e-5
        assert relative(M.loop_experts(x, weights, ids, *stacks), want) < 1e-5
    before = gate.clone()
    for stack in stacks:
        one = stack[1].clone()
        stack[0] += 1
        assert torch.equal(stack[1], one)
    assert torch.equal(gate, before)
    assert all(
        s.dtype == torch.bfloat16 for s in O.upcycled(*(t.bfloat16() for t in (gate, up, down)), 2)
    )


# ---- alone ----


def test_moe_imports_torch_triton_and_the_standard_library():
    names = set()
    for node in ast.walk(ast.parse((REPO / "moe.py").read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add(node.module.partition(".")[0])
    assert names - {"torch", "triton"} <= set(sys.stdlib_module_names), names


MOE_COMPILE = """
from types import SimpleNamespace

O.uses_kernels = lambda *_: True
bf, h, f32, int8, f8 = torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn

def go(N, K=8, E=16, C=512, F=256, dtype=bf):
    x, w_gate_up, w_down = (make(*n, dtype=dtype) for n in ((N, C), (E, 2 * F, C), (E, C, F)))
    ids = torch.randint(E, (N, K))
    O.grouped_experts(x, make(N, K), ids, w_gate_up, w_down, backend="triton").sum().backward()

def coded(N, scales, dtype=None, E=4, C=512, F=256):
    # codes (E, n, k) of dtype, or of 4 bits, with a scale for so many rows and columns
    def stack(n, k):
        size = E, -(-n // scales[0]), -(-k // scales[1])
        zeros = None if dtype else torch.zeros(size, dtype=torch.uint8)
        q = torch.zeros(E, n, k if dtype else k // 2).to(dtype or torch.uint8)
        held = dict(qweight=q, scales=torch.ones(size), zeros=zeros, scheme=None)
        return SimpleNamespace(shape=(E, n, k), dtype=bf, **held)
    x, ids = torch.zeros(N, C, dtype=bf), torch.randint(E, (N, 2))
    stacks = stack(2 * F, C), stack(C, F)
    O.grouped_experts(x, torch.rand(N, 2), ids, *stacks, backend="triton")
"""
MOE_COMPILED = ["go(8, 2)", "go(64)", "go(2048)", "coded(8, (1, 4096), int8)", "coded(8, (1, 32))"]
MOE_ALL = [
    *MOE_COMPILED,
    *(f"go({N}, dtype={d})" for N in (8, 2048) for d in ("h", "f32")),
    *("go(300, 3, 2, 200, 120)", "coded(8, (1, 128))", "coded(2048, (1, 4096), int8)"),
    "coded(2048, (1, 32))",
]
MOE_FP8 = ["coded(8, (1, 4096), f8)", "coded(8, (128, 128), f8)", "coded(2048, (128, 128), f8)"]


@pytest.mark.slow
@pytest.mark.skipif(not O.INTERPRET, reason="where there is a GPU, or no Triton, nothing to learn")
@pytest.mark.parametrize(
    "arch, cases", [(80, MOE_COMPILED), (90, MOE_ALL + MOE_FP8), (100, MOE_COMPILED)]
)
def test_moe_kernels_compile_for_gpus(arch, cases, tmp_path):
    """To machine code for Ampere, Hopper and Blackwell within their shared memory; another load,
    and more tokens of the same kind, compile nothing anew."""
    again = ["n = len(built)", "go(4096)", "assert len(built) == n, built[n:]"]
    code = COMPILE.replace("import attention as A\n", "import attention as A, moe as O\n")
    code = code.replace("busy = dict", MOE_COMPILE + "\nbusy = dict", 1)
    code = code.replace("    eval(case)", "    exec(case)")
    printed = compile_kernels(code, tmp_path, arch, *cases, *again)
    kernels = ("add_slots", "down_backward", "down", "gate_up", "tiles", "weight_grad")
    assert printed.strip() == str([f"_{name}_kernel" for name in kernels])


@pytest.mark.parametrize(
    "how", ["interpreted", *(pytest.param(h, marks=pytest.mark.slow) for h in ("missing", "plain"))]
)
def test_moe_alone_in_a_folder(how, tmp_path):
    """The copy contract: the one file runs as a program, checks itself, prints its table."""
    shutil.copy(REPO / "moe.py", tmp_path)
    hide = "import sys; sys.modules['triton'] = None; " if how == "missing" else ""
    env = dict(PYTHONPATH=str(tmp_path), TRITON_INTERPRET=str(int(how == "interpreted")))
    program = hide + "import runpy; runpy.run_path('moe.py', run_name='__main__')"
    done = run("-c", program, cwd=tmp_path, env=env)
    lines = len(done.stdout.splitlines())
    assert done.returncode == 0 and (lines == 1 if how == "interpreted" else lines > 4), done.stderr
    assert [p.name for p in tmp_path.iterdir() if p.name != "__pycache__"] == ["moe.py"]


# ---- fuzz ----


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_fuzz(backend, seed):
    """Random sizes, loads, layouts and needs of gradients."""
    r = random.Random(seed)
    step = 8 if backend == "grouped_mm" else 1
    c, f = (r.randint(1, 96 // step) * step for _ in range(2))
    n, e = r.choice([0, 1, 2, r.randint(3, 60), r.randint(60, 200)]), r.choice([1, 2, 5, 17, 40])
    k = r.randint(1, min(e, 6))
    pattern = r.choice(["random", "holes", "one", "last", "none", "twice", "ends", "skew"])
    args = arguments(seed, n, c, f, e, k, pattern)
    given = [r.choice([lambda t: t, holed, turned])(t) for t in args]
    wanted = tuple(name for name in MOE_ARGUMENTS if r.random() < 0.7)
    with poisoned():
        got = experts_outcome(grouped_by(backend), given, wanted)
    want, loop = loop_in_fp64(args, wanted), experts_outcome(M.loop_experts, args, wanted)
    for name, b in want.items():  # few numbers may cancel: then as close as the loop in fp32
        limit = 4 * relative(loop[name].double(), b) if b.norm() > 0 else 0
        experts_agree({name: got[name]}, {name: b}, max(1e-5, limit))


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("seed", range(30))
def test_quantized_experts_fuzz(seed):
    """Random sizes, schemes and group sizes on the kernels, in fp32 and fp16."""
    r = random.Random(seed)
    scheme = r.choice(["int8", "int4", "fp8", "fp8-block"])
    size = r.choice([8, 16, 32, 64]) if scheme == "int4" else r.choice([1, 2, 8])
    c, f = (r.randint(1, 200 // size) * size for _ in range(2))
    n, e = r.choice([1, 2, 9, 70]), r.choice([1, 3, 8])
    args = arguments(seed, n, c, f, e, r.randint(1, e), r.choice(["random", "holes", "one"]))
    how = dict(group_size=size) if scheme == "int4" else {}
    layer = quantized(scheme, args, **how)
    stacks = layer.w_gate_up, layer.w_down
    want = loop_in_fp64([*args[:3], *map(decoded, stacks)], ())["o"]
    got = grouped_by("triton")(*args[:3], *stacks)
    assert relative(got.double(), want) < 1e-5 or want.norm() == got.norm() == 0
    layer.half()
    got = grouped_by("triton")(args[0].half(), *args[1:3], *stacks)
    assert relative(got.double(), want) < 5e-3 or want.norm() == got.norm() == 0


# --------------------------------------------------------------------------------------------------
# expert_parallel.py: four gloo processes run all cases below, one process group per case, and save
# what they got; the tests compare it with model.py's loop in this process
# --------------------------------------------------------------------------------------------------

WORLD, HANG = 4, 12  # processes; seconds until a collective that nobody joins is an error
RANK_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
RANK_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 4e-2}


class Wire:
    """What the collectives carry: wraps them before moe.py is imported, and notes each call."""

    def __init__(self):
        self.reset()
        for name in ("all_to_all_single", "all_to_all", "all_reduce"):
            wrapped = partial(getattr(self, name), getattr(dist, name))
            setattr(dist, name, wrapped)
            setattr(dist.distributed_c10d, name, wrapped)

    def reset(self):
        self.events, self.phase, self.sabotage, self.wide = [], "forward", None, 0

    def note(self, kind, **more):
        self.events.append(dict(kind=kind, phase=self.phase, **more))
        return len(self.events) - 1

    def all_to_all_single(
        self, call, output, input, output_split_sizes=None, input_split_sizes=None, group=None,
        async_op=False,
    ):  # fmt: skip
        peers = dist.get_process_group_ranks(group or dist.group.WORLD)
        row = input.element_size()
        for n in input.shape[1:]:
            row *= n
        splits = input_split_sizes or [input.shape[0] // len(peers)] * len(peers)
        to = {p: n * row for p, n in zip(peers, splits, strict=True)}
        wide = self.wide > 0 and row >= self.wide
        number = self.note("send", to=to, row=row, wide=wide, later=bool(async_op))
        work = call(output, input, output_split_sizes, input_split_sizes, group, async_op)
        mine = wide and sum(e.get("wide", False) for e in self.events) == self.sabotage
        if not async_op:
            if mine:
                output.zero_()
            return work
        return Later(work, lambda: self._arrived(number, output if mine else None))

    def _arrived(self, number, output):
        self.note("wait", of=number)
        if output is not None:
            output.zero_()

    def all_to_all(self, call, outputs, inputs, group=None, async_op=False):
        peers = dist.get_process_group_ranks(group or dist.group.WORLD)
        to = {p: t.numel() * t.element_size() for p, t in zip(peers, inputs, strict=True)}
        self.note("send", to=to, row=0, wide=False, later=bool(async_op))
        return call(outputs, inputs, group, async_op)

    def all_reduce(self, call, tensor, *args, **kwargs):
        self.note("reduce", bytes=tensor.numel() * tensor.element_size())
        return call(tensor, *args, **kwargs)


class Later:
    def __init__(self, work, arrived):
        self.work, self.arrived = work, arrived

    def wait(self, *args):
        ranks_done = self.work.wait(*args)
        self.arrived()
        return ranks_done

    def __getattr__(self, name):
        return getattr(self.work, name)


class Mark(torch.autograd.Function):
    """The identity that notes when its backward runs."""

    @staticmethod
    def forward(ctx, y, wire):
        ctx.wire = wire
        return y.view_as(y)

    @staticmethod
    def backward(ctx, g):
        ctx.wire.note("experts backward")
        return g, None


WIRE: Wire | None = None  # of a rank_child

PLAIN_EXPERTS = partial(O.grouped_experts, backend="torch")


# --------------------------------------------------------------------------------------------------
# The problem: tokens of each rank, one router, one pair of stacks
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    experts: int = 8
    top_k: int = 3
    dim: int = 16
    ffn: int = 12
    counts: tuple = (5, 9, 7, 4)  # tokens of each rank
    choice: str = "router"
    dtype: str = "fp64"
    seed: int = 0
    ones: bool = False  # the loss is the plain sum of the output


def rank_normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stacks_of(spec):
    """w_gate_up (E, 2F, C), w_down (E, C, F)"""
    up = rank_normal(1000 + spec.seed, spec.experts, 2 * spec.ffn, spec.dim) * spec.dim**-0.5
    down = rank_normal(2000 + spec.seed, spec.experts, spec.dim, spec.ffn) * spec.ffn**-0.5
    return up.to(RANK_DTYPES[spec.dtype]), down.to(RANK_DTYPES[spec.dtype])


def share_of(spec, d):
    """x and coefficients of the loss (n, C) of rank d, the router (E, C)"""
    dtype, n = RANK_DTYPES[spec.dtype], spec.counts[d]
    router = rank_normal(3000 + spec.seed, spec.experts, spec.dim).to(dtype)
    x = rank_normal(10_000 + 7 * spec.seed + d, n, spec.dim).to(dtype)
    coef = rank_normal(20_000 + 7 * spec.seed + d, n, spec.dim).to(dtype)
    return x, torch.ones_like(coef) if spec.ones else coef, router


def routed(spec, x, router, d):
    """weights and ids (n, K): differentiable in x and router"""
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = x.to(wide) @ router.to(wide).T
    scores, choice = logits.softmax(-1), logits.detach().clone()
    per = spec.experts // WORLD
    if spec.choice == "unloved":  # rank 1 has nothing to do
        choice[:, per : 2 * per] = -torch.inf
    if spec.choice == "zipf":
        choice += 6 / torch.arange(1, spec.experts + 1)
    if spec.choice == "own":  # no token leaves its rank
        choice[:, torch.arange(spec.experts) // per != d] = -torch.inf
    ids = choice.topk(spec.top_k).indices
    if spec.choice == "one":
        ids = torch.full_like(ids, -1)
        ids[:, -1] = 5
    if spec.choice == "twice":
        ids[:, -1] = ids[:, 0]
    if spec.choice == "holes":
        ids[rank_normal(30_000 + d, *ids.shape) < -0.2] = -1
        ids[len(ids) // 2 :][:2] = -1
    if spec.choice == "nobody":
        ids = torch.full_like(ids, -1)
    return scores.gather(1, ids.clamp(min=0)), ids


def reference(spec):
    """One process, model.py's loop: out, x and router gradients per rank, stacks' gradients"""
    shares = [share_of(spec, d) for d in range(len(spec.counts))]
    xs = [x.clone().requires_grad_() for x, _, _ in shares]
    routers = [r.clone().requires_grad_() for _, _, r in shares]
    up, down = (t.requires_grad_() for t in stacks_of(spec))
    chosen = [routed(spec, x, r, d) for d, (x, r) in enumerate(zip(xs, routers, strict=True))]
    weights, ids = (torch.cat(t) for t in zip(*chosen, strict=True))
    out = M.loop_experts(torch.cat(xs), weights, ids, up, down)
    outs = out.split(list(spec.counts))
    terms = [o * c for o, (_, c, _) in zip(outs, shares, strict=True)]
    loss = sum(t.sum() for t in terms)
    if loss.requires_grad:
        loss.backward()
    grad = lambda t: torch.zeros_like(t) if t.grad is None else t.grad
    return SimpleNamespace(
        out=[o.detach() for o in outs],
        ids=[i for _, i in chosen],
        loss=loss.item(),
        size=sum(t.abs().sum().item() for t in terms),
        x=[grad(x) for x in xs],
        router=[grad(r) for r in routers],
        up=grad(up),
        down=grad(down),
    )


# --------------------------------------------------------------------------------------------------
# Ways to spread the experts: each returns what f, placement, which tokens, and which slices
# --------------------------------------------------------------------------------------------------


def my_group(rank, members):
    """My process group of the lists `members`, all of which every rank must create, and my place"""
    if members == [list(range(WORLD))]:
        return None, rank  # the default group
    groups = [dist.new_group(m) for m in members]
    for m, g in zip(members, groups, strict=True):
        if rank in m:
            return g, m.index(rank)
    return None, None


def placement_of(spec, ranks, redundant):
    if redundant is None:
        return Y.Placement.even(spec.experts, ranks)
    loads = torch.zeros(spec.experts, dtype=torch.int64)
    for d in range(len(spec.counts)):
        x, _, router = share_of(spec, d)
        ids = routed(spec, x, router, d)[1]
        loads += torch.bincount(ids[ids >= 0], minlength=spec.experts)
    return Y.Placement.by_load(loads, ranks, redundant=redundant)


def inner_of(name):
    def logged(x, weights, ids, up, down):
        WIRE.note("experts", rows=len(x))
        return Mark.apply(PLAIN_EXPERTS(x, weights, ids, up, down), WIRE)

    return {"plain": PLAIN_EXPERTS, "loop": M.loop_experts, "logged": logged}[name]


def flat(rank, spec, members=((0, 1, 2, 3),), chunks=1, redundant=None, turn=False, inner="plain"):
    members = [list(m) for m in members]
    group, me = my_group(rank, members)
    if me is None:
        return None
    placement = placement_of(spec, len(members[0]), redundant)
    f = Y.exchanged(inner_of(inner), placement.width, group, chunks=chunks)
    f = Y.placed(f, placement, offset=me if turn else 0)
    return f, placement, me, me, (0, 1), group


def node(rank, spec, chunks=(1, 1), redundant=None, inner="plain"):
    intra, _ = my_group(rank, [[0, 1], [2, 3]])
    inter, _ = my_group(rank, [[0, 2], [1, 3]])
    placement = placement_of(spec, 4, redundant)
    f = Y.exchanged(inner_of(inner), placement.width, intra, chunks=chunks[0])
    f = Y.exchanged(f, placement.width * 2, inter, chunks=chunks[1])
    return Y.placed(f, placement), placement, rank, rank, (0, 1), None


def tensor(rank, spec, chunks=1):
    """2 x 2: ranks 0, 1 have the same tokens and halves of the same experts; so have 2, 3"""
    tp, half = my_group(rank, [[0, 1], [2, 3]])
    ep, place = my_group(rank, [[0, 2], [1, 3]])
    placement = placement_of(spec, 2, None)
    f = Y.exchanged(Y.summed(PLAIN_EXPERTS, tp), placement.width, ep, chunks=chunks)
    return Y.placed(f, placement), placement, place, place, (half, 2), ep


def same(rank, spec, members=((0, 1, 2, 3),), redundant=None, inner="plain"):
    members = [list(m) for m in members]
    group, me = my_group(rank, members)
    if me is None:
        return None
    placement = placement_of(spec, len(members[0]), redundant)
    f = Y.local(inner_of(inner), me * placement.width, placement.width)
    return Y.placed(Y.summed(f, group), placement), placement, me, 0, (0, 1), group


FORMS = dict(flat=flat, node=node, tensor=tensor, same=same)


def cut(spec, placement, place, half):
    """This rank's own stacks, sliced by hand"""
    (t, n), slots = half, list(placement.slots[place])
    up, down = stacks_of(spec)
    width = spec.ffn // n
    rows = torch.arange(t * width, (t + 1) * width)
    up = up[slots][:, torch.cat((rows, rows + spec.ffn))]
    return up.contiguous(), down[slots][:, :, rows].contiguous()


@dataclass(frozen=True)
class Case:
    form: str
    spec: Spec
    options: dict = dataclass_field(default_factory=dict)
    need: tuple = ("x", "router", "stacks")  # what is differentiated
    how: str = ""  # checkpoint, strided, twice (the layer), inference
    sabotage: dict = dataclass_field(
        default_factory=dict
    )  # rank -> which wide transfer arrives as zeros


def solve(rank, case):
    """One case on this rank -> what the parent compares"""
    spec = case.spec
    made = FORMS[case.form](rank, spec, **case.options)
    if made is None:
        return None
    f, placement, place, d, half, group = made
    up, down = cut(spec, placement, place, half)
    x, coef, router = share_of(spec, d)
    x, router = (t.requires_grad_(n in case.need) for t, n in ((x, "x"), (router, "router")))
    up, down = (t.requires_grad_("stacks" in case.need) for t in (up, down))
    weights, ids = routed(spec, x, router, d)
    WIRE.reset()
    WIRE.sabotage, WIRE.wide = case.sabotage.get(rank), spec.dim * x.element_size()
    if case.how == "inference":
        with torch.inference_mode():
            out = f(x, weights, ids, up, down)
    elif case.how == "checkpoint":
        from torch.utils.checkpoint import checkpoint

        out = checkpoint(f, x, weights, ids, up, down, use_reentrant=False)
    elif case.how == "strided":
        out = f(
            x.t().contiguous().t(), weights.t().contiguous().t(), ids.t().contiguous().t(), up, down
        )
    else:
        out = f(x, weights, ids, up, down)
    got = dict(
        out=out.detach().clone(), loss=(out * coef).sum().item(), d=d, half=half, place=place
    )
    got |= dict(slots=[list(s) for s in placement.slots], ids=ids, width=placement.width)
    if case.need:
        WIRE.phase = "backward"
        (out.sum() if spec.ones else (out * coef).sum()).backward()
        WIRE.phase = "after"
        if case.options.get("redundant") is not None and "stacks" in case.need:
            got |= dict(raw=up.grad.clone())
            for g in (up.grad, down.grad):
                Y.add_copies_(g, placement, place, group)
    got |= dict(x=x.grad, router=router.grad, up=up.grad, down=down.grad, held=len(up))
    return got | dict(events=WIRE.events)


# --------------------------------------------------------------------------------------------------
# The cases
# --------------------------------------------------------------------------------------------------

BASE = Spec()
PAIRS, THREE, ALONE = ((0, 2), (1, 3)), ((0, 2, 3),), ((0,), (1,), (2,), (3,))
FOUR_32 = replace(BASE, dtype="fp32")
UNEVEN = replace(BASE, counts=(0, 23, 1, 6), seed=1)
HOT = replace(BASE, counts=(31, 8, 19, 0), choice="zipf", top_k=2, seed=2)
RANK_ODD = replace(BASE, experts=7, counts=(6, 0, 9, 5), top_k=2, seed=3)

EQUAL = {
    "flat fp32": Case("flat", FOUR_32),
    "flat fp64": Case("flat", BASE),
    "flat bf16": Case("flat", replace(BASE, dtype="bf16", counts=(25, 9, 17, 4))),
    "one rank": Case("flat", replace(BASE, counts=(5,)), dict(members=ALONE, chunks=2)),
    "pairs fp64": Case("flat", replace(BASE, counts=(6, 11)), dict(members=PAIRS)),
    "pairs fp32": Case("flat", replace(FOUR_32, counts=(6, 11)), dict(members=PAIRS, chunks=2)),
    "three": Case("flat", replace(BASE, experts=9, counts=(6, 11, 2)), dict(members=THREE)),
    "uneven": Case("flat", UNEVEN),
    "uneven fp32": Case("flat", replace(UNEVEN, dtype="fp32")),
    "empty pair": Case("flat", replace(BASE, counts=(0, 9)), dict(members=PAIRS, chunks=2)),
    "no tokens": Case("flat", replace(BASE, counts=(0, 0, 0, 0))),
    "unloved": Case("flat", replace(BASE, choice="unloved")),
    "unloved loop": Case("flat", replace(BASE, choice="unloved"), dict(inner="loop")),
    "one expert": Case("flat", replace(UNEVEN, choice="one")),
    "one expert K=1": Case("flat", replace(UNEVEN, choice="one", top_k=1)),
    "K=1": Case("flat", replace(BASE, top_k=1)),
    "K=E": Case("flat", replace(BASE, top_k=8)),
    "twice the same": Case("flat", replace(BASE, choice="twice")),
    "holes": Case("flat", replace(BASE, choice="holes")),
    "holes fp32": Case("flat", replace(FOUR_32, choice="holes"), dict(chunks=3)),
    "nobody": Case("flat", replace(BASE, choice="nobody")),
    "own": Case("flat", replace(BASE, choice="own", top_k=2)),
    "one slot a rank": Case("flat", replace(BASE, experts=4, top_k=2)),
    "only stacks": Case("flat", UNEVEN, need=("stacks",)),
    "only stacks unloved": Case("flat", replace(BASE, choice="unloved"), need=("stacks",)),
    "only x": Case("flat", UNEVEN, need=("x",)),
    "only router": Case("flat", UNEVEN, need=("router",)),
    "inference": Case("flat", UNEVEN, need=(), how="inference"),
    "strided": Case("flat", replace(BASE, ones=True), dict(chunks=2), how="strided"),
    "chunks 2": Case("flat", BASE, dict(chunks=2)),
    "chunks 3": Case("flat", BASE, dict(chunks=3)),
    "chunks 5": Case("flat", replace(UNEVEN, choice="holes"), dict(chunks=5)),
    "chunks 40": Case("flat", UNEVEN, dict(chunks=40)),
    "chunks frozen x": Case("flat", UNEVEN, dict(chunks=3), need=("stacks",)),
    "node": Case("node", BASE),
    "node fp32": Case("node", FOUR_32),
    "node uneven": Case("node", replace(UNEVEN, choice="holes")),
    "node one": Case("node", replace(UNEVEN, choice="one")),
    "node unloved": Case("node", replace(BASE, choice="unloved"), need=("stacks",)),
    "node chunks": Case("node", BASE, dict(chunks=(2, 3))),
    "node copies": Case("node", RANK_ODD, dict(redundant=3)),
    "tp": Case("tensor", replace(BASE, counts=(5, 9))),
    "tp fp32": Case("tensor", replace(FOUR_32, counts=(0, 9)), dict(chunks=2)),
    "tp one": Case("tensor", replace(BASE, counts=(5, 9), choice="one")),
    "same": Case("same", replace(BASE, counts=(9,))),
    "same fp32": Case("same", replace(FOUR_32, counts=(9,), choice="holes")),
    "same unloved": Case("same", replace(BASE, counts=(9,), choice="unloved")),
    "same pairs": Case("same", replace(BASE, counts=(1,)), dict(members=PAIRS)),
    "same only stacks": Case("same", replace(BASE, counts=(9,), choice="one"), need=("stacks",)),
    "same only x": Case("same", replace(BASE, counts=(9,), choice="one"), need=("x",)),
    "same unloved loop": Case("same", replace(BASE, counts=(9,), choice="one"), dict(inner="loop")),
    "loop only stacks": Case(
        "flat", replace(UNEVEN, choice="one"), dict(inner="loop"), need=("stacks",)
    ),
    "same copies": Case("same", replace(HOT, counts=(9,)), dict(redundant=3)),
    "same inference": Case("same", replace(BASE, counts=(9,)), need=(), how="inference"),
    "copies 0": Case("flat", RANK_ODD, dict(redundant=0)),
    "copies of 4": Case("flat", HOT, dict(redundant=4)),
    "copies of 4 chunks": Case("flat", HOT, dict(redundant=4, chunks=2, turn=True)),
    "copies uneven": Case("flat", RANK_ODD, dict(redundant=2, turn=True)),
    "copies everywhere": Case("flat", replace(HOT, experts=3), dict(redundant=9)),
    "copies of 2": Case("flat", replace(HOT, counts=(9, 4)), dict(redundant=1, members=PAIRS)),
    "copies of 3": Case(
        "flat", replace(RANK_ODD, counts=(9, 0, 4)), dict(redundant=5, members=THREE)
    ),
    "copies fp32": Case("flat", replace(HOT, dtype="fp32"), dict(redundant=4)),
}  # fmt: skip


def fuzz(seed):
    rng = random.Random(seed)
    form = rng.choice(["flat", "flat", "flat", "node", "tensor", "same"])
    ranks = {"tensor": 2, "same": 1}.get(form, 4)
    counts = tuple(rng.choice([0, 1, 2, 5, 13, 40]) for _ in range(ranks))
    choice = rng.choice(["router", "holes", "zipf", "one", "unloved", "twice"])
    experts = rng.choice([8, 12, 16])
    spec = Spec(
        experts, rng.randint(1, min(6, experts // 2)), rng.choice([1, 8, 16]), rng.choice([2, 6]),
        counts, choice, rng.choice(["fp32", "fp64", "fp64"]), seed,
    )  # fmt: skip
    options = {}
    if form in ("flat", "tensor"):
        options["chunks"] = rng.choice([1, 1, 2, 3, 7])
    if form == "node":
        options["chunks"] = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    if form != "tensor" and rng.random() < 0.5:
        options["redundant"] = rng.randint(0, 2 * experts)
    need = rng.choice([("x", "router", "stacks"), ("x", "router", "stacks"), ("stacks",), ("x",)])
    return Case(form, spec, options, need)


RANK_FUZZ = {f"fuzz {n}": fuzz(n) for n in range(6)}
FUZZ_SLOW = {f"fuzz {n}": fuzz(n) for n in range(6, 120)}
FUZZ_SLOW["checkpoint"] = Case("flat", UNEVEN, dict(chunks=2), how="checkpoint")  # slow to import

WIDE = Spec(16, 6, 256, 4, (40, 13, 0, 27), dtype="fp32", seed=4)
WIRED = {
    "wire flat": Case("flat", WIDE),
    "wire flat chunks": Case("flat", WIDE, dict(chunks=3)),
    "wire node": Case("node", WIDE),
    "wire node chunks": Case("node", WIDE, dict(chunks=(1, 3))),
    "wire holes": Case("node", replace(WIDE, choice="holes")),
    "wire own": Case("flat", replace(WIDE, choice="own", top_k=3)),
}
ORDER = {f"order {n}": Case("flat", WIDE, dict(chunks=n, inner="logged")) for n in (2, 3)}
ORDER |= {"order tp": Case("tensor", replace(WIDE, counts=(9, 14)), dict(chunks=2))}
BROKEN = {
    f"broken {n}": Case("flat", BASE, sabotage={0: n}) for n in (1, 2, 3, 4)
}  # dispatch, return, and backward
SOLVED = EQUAL | RANK_FUZZ | WIRED | ORDER | BROKEN


# The model ---------------------------------------------------------------------------------------


def step(model, tokens, count):
    """logits, and the gradients in the parameters, of the loss summed over tokens / count"""
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / count
    loss.backward()
    return logits.detach(), loss.item()


def is_expert(name):
    return name.endswith(("w_gate_up", "w_down"))


def whole_model(rank, folder, members, steps=1, chunks=1):
    """Data-parallel over 4 ranks, the experts over each list of members"""
    config, state, tokens = torch.load(folder / "model.pt")
    model = M.Transformer(M.ModelConfig(**config))
    model.load_state_dict(state)
    ep, place = my_group(rank, [list(m) for m in members])
    replicas, _ = my_group(rank, [list(r) for r in zip(*members, strict=True)])
    placement = Y.Placement.even(config["n_experts"], len(members[0]))
    for m in model.modules():
        if isinstance(m, M.MoE):
            for name in ("w_gate_up", "w_down"):
                own = Y.held(getattr(m, name).data, placement, place)
                setattr(m, name, nn.Parameter(own.clone()))
            f = Y.exchanged(PLAIN_EXPERTS, placement.width, ep, chunks=chunks)
            m.experts = Y.placed(f, placement)
    mine, count = tokens[2 * rank : 2 * rank + 2], tokens[:, 1:].numel()
    losses, grads = [], {}
    for _ in range(steps):
        model.zero_grad()
        logits, loss = step(model, mine, count)
        losses.append(loss)
        for name, p in model.named_parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            if not is_expert(name):
                dist.all_reduce(p.grad)
            elif len(members) > 1:
                dist.all_reduce(p.grad, group=replicas)
            grads[name] = p.grad.clone()
            p.data -= 0.05 * p.grad
    slots = list(placement.slots[place])
    weights = {n: p.detach() for n, p in model.named_parameters()}
    return dict(losses=losses, logits=logits, grads=grads, weights=weights, slots=slots)


ALL, NODES = ((0, 1, 2, 3),), ((0, 1), (2, 3))
RANK_MODELS = {
    "model ep4": dict(members=ALL),
    "model ep2 dp2": dict(members=NODES, chunks=2),
    "model 3 steps": dict(members=ALL, steps=3),
}


# Others ------------------------------------------------------------------------------------------


def attempt(call):
    try:
        call()
    except Exception as e:  # noqa: BLE001, its type is the result
        return [type(e).__name__, str(e)]
    return ["", ""]


def wrong(rank, what):
    """What this mistake raises, and after how long"""
    spec = replace(BASE, counts=(6, 6, 6, 6))
    members = NODES if what == "small group" else ALL
    group, _ = my_group(rank, [list(m) for m in members])
    placement = Y.Placement.even(8, 4)
    f = Y.exchanged(PLAIN_EXPERTS, placement.width, group)
    if what == "same":
        f = Y.summed(Y.local(PLAIN_EXPERTS, rank * 2, 2), group)
    up, down = cut(spec, placement, rank, (0, 1))
    x, _, router = share_of(spec, rank)
    weights, ids = routed(spec, x, router, rank)
    if what in ("id E", "same") or what == "one rank" and rank == 2:
        ids[3, 1] = 8
    if what == "id -2":
        ids[0, 0] = -2
    if what == "slot":
        ids[0, 0] = 8
    if what == "slot -2":
        ids[0, 0] = -2
    if what == "ids shape":
        ids = ids[:-1]
    f = f if what.startswith("slot") else Y.placed(f, placement)
    start = time.monotonic()
    kind, words = attempt(lambda: f(x, weights, ids, up, down))
    return dict(kind=kind, words=words, seconds=time.monotonic() - start)


WRONG = ("id E", "id -2", "one rank", "same", "slot", "slot -2", "small group", "ids shape")


def weights_of_nobody(rank):
    """NaN and inf as the weight of nobody"""
    spec = replace(BASE, choice="holes")
    placement = Y.Placement.even(8, 4)
    f = Y.placed(Y.exchanged(PLAIN_EXPERTS, 2), placement)
    up, down = cut(spec, placement, rank, (0, 1))
    x, _, router = share_of(spec, rank)
    weights, ids = routed(spec, x, router, rank)
    clean = f(x, weights, ids, up, down)
    weights = weights.clone()
    weights[ids < 0] = torch.nan if rank % 2 else torch.inf
    weights.requires_grad_()
    out = f(x, weights, ids, up, down)
    out.sum().backward()
    return dict(clean=clean, out=out.detach(), grad=weights.grad, ids=ids)


def autocast(rank):
    """fp32 x and stacks under bf16 autocast"""
    spec = replace(FOUR_32, counts=(25, 9, 17, 4))
    placement = Y.Placement.even(8, 4)
    f = Y.placed(Y.exchanged(PLAIN_EXPERTS, 2, chunks=2), placement)
    up, down = (t.requires_grad_() for t in cut(spec, placement, rank, (0, 1)))
    x, coef, router = share_of(spec, rank)
    x.requires_grad_()
    weights, ids = routed(spec, x, router, rank)
    with torch.autocast("cpu", torch.bfloat16):
        out = f(x, weights, ids, up, down)
    (out * coef).sum().backward()
    return dict(out=out.detach(), x=x.grad, up=up.grad, down=down.grad)


def again(rank):
    """Twice the same call: the same bits; the inputs untouched"""
    placement = Y.Placement.even(8, 4)
    f = Y.placed(Y.exchanged(PLAIN_EXPERTS, 2, chunks=2), placement)
    both = []
    for _ in range(2):
        up, down = (t.requires_grad_() for t in cut(BASE, placement, rank, (0, 1)))
        x, coef, router = share_of(BASE, rank)
        x.requires_grad_()
        weights, ids = routed(BASE, x, router, rank)
        before = [t.detach().clone() for t in (x, weights, ids, up, down)]
        out = f(x, weights, ids, up, down)
        (out * coef).sum().backward()
        kept = all(torch.equal(a, b) for a, b in zip(before, (x, weights, ids, up, down)))
        both.append([out.detach(), x.grad, up.grad, down.grad])
    return dict(first=both[0], second=both[1], kept=kept)


def two_layers(rank):
    """The same f in two layers on top of each other, and one more backward (retained graph)"""
    placement = Y.Placement.even(8, 4)
    f = Y.placed(Y.exchanged(PLAIN_EXPERTS, 2, chunks=2), placement)
    up, down = (t.requires_grad_() for t in cut(UNEVEN, placement, rank, (0, 1)))
    x, coef, router = share_of(UNEVEN, rank)
    x.requires_grad_()
    h = x + f(x, *routed(UNEVEN, x, router, rank), up, down)
    out = h + f(h, *routed(UNEVEN, h, router, rank), up, down)
    (out * coef).sum().backward(retain_graph=True)
    once = [t.grad.clone() for t in (x, up, down)]
    (out * coef).sum().backward()
    return dict(out=out.detach(), grads=once, doubled=[t.grad for t in (x, up, down)])


OTHERS = dict(nan=weights_of_nobody, autocast=autocast, again=again, layers=two_layers)
DEFAULT = [*SOLVED, *RANK_MODELS, *(f"wrong {w}" for w in WRONG), *OTHERS]
SLOW = [*FUZZ_SLOW]


# --------------------------------------------------------------------------------------------------
# The processes
# --------------------------------------------------------------------------------------------------


def run_case(rank, name, folder):
    if name in SOLVED or name in FUZZ_SLOW:
        return solve(rank, SOLVED[name] if name in SOLVED else FUZZ_SLOW[name])
    if name in RANK_MODELS:
        return whole_model(rank, folder, **RANK_MODELS[name])
    if name in OTHERS:
        return OTHERS[name](rank)
    return wrong(rank, name.removeprefix("wrong "))


def rank_child(rank, port, folder, names):
    """Every case in a process group of its own: what goes wrong in one leaves the next alone"""
    global WIRE
    WIRE = Wire()
    store = dist.TCPStore("127.0.0.1", port, WORLD, rank == 0, timeout=timedelta(seconds=300))
    for number, name in enumerate(names):
        store.set(f"at{number}.{rank}", "")
        store.wait([f"at{number}.{r}" for r in range(WORLD)])
        start = time.monotonic()
        try:
            dist.init_process_group(
                "gloo", store=dist.PrefixStore(f"case{number}", store), rank=rank, world_size=WORLD,
                timeout=timedelta(seconds=HANG),
            )  # fmt: skip
            WIRE.reset()
            got = run_case(rank, name, folder)
        except Exception:  # noqa: BLE001, the parent shows it
            lines = traceback.format_exc().splitlines()
            places = [n.strip().partition("/")[2] for n in lines if "/expert_parallel.py" in n]
            got = dict(error=" < ".join([lines[-1], *places[::-1]]))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        seconds = time.monotonic() - start
        torch.save((got, seconds), folder / f"{number}.{rank}.tmp")
        (folder / f"{number}.{rank}.tmp").rename(folder / f"{number}.{rank}")
    store.set(f"end{rank}", "")
    if rank == 0:
        store.wait([f"end{r}" for r in range(WORLD)])


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def in_rank_child(rank, port, folder, names):
    """A forked process: it has all modules, and what it says is kept."""
    with open(folder / f"log{rank}", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        rank_child(rank, port, folder, names)


def ranks(folder, names, limit):
    """Runs the cases on WORLD processes -> {name: [result of each rank]}, {name: seconds}"""
    names, start, port = list(names), time.monotonic(), free_port()
    fork = multiprocessing.get_context("fork").Process
    started = [
        fork(target=in_rank_child, args=(r, port, folder, names), daemon=True) for r in range(WORLD)
    ]
    for p in started:
        p.start()
    for p in started:
        p.join(max(1, start + limit - time.monotonic()))
        p.kill()
    logs = [open(folder / f"log{r}") for r in range(WORLD)]
    tails = []
    for f in logs:
        tails.append(f.read()[-1500:])
        f.close()
    results, seconds = {}, {}
    for number, name in enumerate(names):
        files = [folder / f"{number}.{r}" for r in range(WORLD)]
        loaded = [torch.load(f) if f.exists() else (dict(error=f"no result\n{t}"), 0.0)
                  for f, t in zip(files, tails)]  # fmt: skip
        results[name], seconds[name] = [g for g, _ in loaded], max(s for _, s in loaded)
    seconds["all"] = time.monotonic() - start
    return results, seconds


def small_model():
    """test_all.py's latent() and random_model(): here, so that this file stands alone"""
    config = M.ModelConfig(
        vocab_size=97, dim=64, n_layers=3, n_heads=4, n_kv_heads=4, head_dim=24, ffn_dim=80,
        max_seq_len=128, family="deepseek_v3", rope_interleaved=True, kv_lora_rank=24,
        q_lora_rank=20, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, moe_layers=(1, 2),
        n_experts=8, n_experts_per_token=3, expert_ffn_dim=24, n_shared_experts=1,
        scoring="sigmoid", correction_bias=True, n_groups=4, topk_groups=2, group_score_topk=2,
        norm_topk=True,
    )  # fmt: skip
    model, rng = M.Transformer(config), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(1.0 if "norm" in name else 0.0, 0.15, generator=rng)
        for m in model.modules():
            if isinstance(m, M.MoE):
                m.correction.copy_(rank_normal(8, config.n_experts) * 0.1)
    tokens = torch.randint(3, 97, (8, 12), generator=torch.Generator().manual_seed(6))
    return config, model, tokens


def once(tmp_path_factory, name, work):
    """work(folder), done by one of pytest-xdist's workers and read by all."""
    folder = tmp_path_factory.getbasetemp().parent / name
    try:
        folder.mkdir()
    except FileExistsError:
        while not (folder / "result").exists():
            time.sleep(0.2)
        return torch.load(folder / "result")
    result = work(folder)
    torch.save(result, folder / "unfinished")
    (folder / "unfinished").rename(folder / "result")
    return result


@pytest.fixture(scope="module")
def ranks_done(tmp_path_factory):
    def work(folder):
        config, model, tokens = small_model()
        torch.save((asdict(config), model.state_dict(), tokens), folder / "model.pt")
        return ranks(folder, DEFAULT, 240)[0]

    if "PYTEST_XDIST_WORKER" in os.environ:
        return once(tmp_path_factory, "ranks", work)
    return work(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def ranks_done_slow(tmp_path_factory):
    return ranks(tmp_path_factory.mktemp("ranks"), SLOW, 500)[0]


# --------------------------------------------------------------------------------------------------
# The tests
# --------------------------------------------------------------------------------------------------


def ranks_close(got, want, tolerance, what):
    assert got is not None, f"{what}: no value"
    assert got.dtype == want.dtype and got.shape == want.shape, f"{what}: {got.dtype} {got.shape}"
    if want.numel():
        error, size = (got - want).abs().max().item(), want.abs().max().item()
        assert error <= tolerance * size, f"{what}: off by {error:.3g} of {size:.3g}"


def present(results):
    errors = {r: g["error"] for r, g in enumerate(results) if g is not None and "error" in g}
    assert not errors, "\n".join(f"rank {r}: {e}" for r, e in errors.items())
    return [(r, g) for r, g in enumerate(results) if g is not None]


def equal(case, results):
    """Every rank's rows and gradients are those of one process"""
    spec, want = case.spec, reference(case.spec)
    tolerance = RANK_TOLERANCE[RANK_DTYPES[spec.dtype]]
    loss = {}
    for r, got in present(results):
        d, slots = got["d"], got["slots"][got["place"]]
        t, n = got["half"]
        width = spec.ffn // n
        rows = torch.arange(t * width, (t + 1) * width)
        both = torch.cat((rows, rows + spec.ffn))
        assert torch.equal(got["ids"], want.ids[d])
        assert got["held"] == len(slots)
        ranks_close(got["out"], want.out[d], tolerance, f"rank {r} out")
        if "x" in case.need:
            ranks_close(got["x"], want.x[d], tolerance, f"rank {r} x")
        if "router" in case.need:
            ranks_close(got["router"], want.router[d], tolerance, f"rank {r} router")
        if case.options.get("inner") == "loop":  # which leaves None where nobody came
            for key, full in (("up", want.up), ("down", want.down)):
                got[key] = torch.zeros_like(full[slots]) if got[key] is None else got[key]
        if "stacks" in case.need:
            ranks_close(got["up"], want.up[slots][:, both], tolerance, f"rank {r} w_gate_up")
            ranks_close(got["down"], want.down[slots][:, :, rows], tolerance, f"rank {r} w_down")
        loss[d] = got["loss"]
    if len(loss) == len(spec.counts):
        assert abs(sum(loss.values()) - want.loss) <= tolerance * max(want.size, 1e-30)


@pytest.mark.parametrize("name", [*EQUAL, *RANK_FUZZ, *WIRED, *ORDER])
def test_experts_over_ranks_equal_one_process(name, ranks_done):
    """Output, loss, and the gradients of tokens, router and stacks"""
    equal(SOLVED[name], ranks_done[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", FUZZ_SLOW)
def test_ranks_equal_one_process_fuzzed(name, ranks_done_slow):
    equal(FUZZ_SLOW[name], ranks_done_slow[name])


def test_an_exchange_leaves_nothing_behind(tmp_path):
    """After its backward pass the rows that travelled are freed: a transfer that held its own part
    of the graph would be a cycle that Python cannot see."""
    seen = []

    def watching(x, weights, ids, *stacks):
        seen.extend(weakref.ref(t) for t in (x, weights))
        return M.loop_experts(x, weights, ids, *stacks)

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        x, weights = torch.randn(9, 8, requires_grad=True), torch.rand(9, 2, requires_grad=True)
        stacks = torch.randn(4, 12, 8, requires_grad=True), torch.randn(4, 8, 6)
        ids = torch.randint(4, (9, 2))
        Y.exchanged(watching, 4, chunks=2)(x, weights, ids, *stacks).sum().backward()
    finally:
        dist.destroy_process_group()
    gc.collect()
    assert len(seen) == 4 and not any(ref() is not None for ref in seen)
    assert not [o for o in gc.get_objects() if isinstance(o, Y._Transfer)]


@pytest.mark.parametrize("name", EQUAL)
def test_something_was_sent(name, ranks_done):
    """Not vacuous: collectives ran, forward and backward, and a rank holds a part of the experts"""
    case = EQUAL[name]
    for _, got in present(ranks_done[name]):
        slots = got["slots"][got["place"]]
        alone = len(got["slots"]) == 1
        assert alone or len(slots) < case.spec.experts or "everywhere" in name
        kinds = {"same": {"reduce"}, "tensor": {"send", "reduce"}}.get(case.form, {"send"})
        phases = {"forward", "backward"} if "x" in case.need else {"forward"}
        seen = {(e["kind"], e["phase"]) for e in got["events"]}
        assert alone or set(product(kinds, phases)) <= seen, seen


@pytest.mark.parametrize("name", BROKEN)
def test_a_lost_transfer_shows(name, ranks_done):
    """Not vacuous: zeros in place of one transfer, forward or back, and nothing is equal"""
    with pytest.raises(AssertionError, match="off by"):
        equal(BROKEN[name], ranks_done[name])


@pytest.mark.parametrize("a, b", [("flat fp64", "node"), ("flat fp64", "chunks 2"),
    ("flat fp64", "chunks 3"), ("uneven", "chunks 40"), ("node", "node chunks")])  # fmt: skip
def test_forms_agree(a, b, ranks_done):
    for (_, left), (_, right) in zip(present(ranks_done[a]), present(ranks_done[b]), strict=True):
        for key in ("out", "x", "router", "up", "down"):
            ranks_close(left[key], right[key], 1e-12, key)


def hit(ids, slots, of_rank):
    """(tokens, parts): whether a token has an expert in a part; parts are sets of ranks"""
    owner = {e: of_rank(r) for r, held in enumerate(slots) for e in held}
    parts = max(owner.values()) + 1
    table = torch.zeros(len(ids), parts, dtype=torch.bool)
    for n, row in enumerate(ids.tolist()):
        for e in row:
            if e >= 0:
                table[n, owner[e]] = True
    return table


@pytest.mark.parametrize("name", WIRED)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_token_travels_once(name, phase, ranks_done):
    """To every rank (flat) or node (two levels) once, whatever K; and its row comes back once"""
    case, got = WIRED[name], dict(present(ranks_done[name]))
    spec, per = case.spec, 2 if case.form == "node" else 1
    part = lambda r: r // per
    table = [hit(g["ids"], g["slots"], part) for _, g in got.items()]
    row = spec.dim * 4
    for r, g in got.items():
        far = {}
        for e in g["events"]:
            if e["kind"] == "send" and e["phase"] == phase:
                for p, n in e["to"].items():
                    if part(p) != part(r):
                        far[part(p)] = far.get(part(p), 0) + n
        for p in set(map(part, range(WORLD))) - {part(r)}:
            # rows I send to that part, and rows of its tokens that I send back: in two levels
            # they come from the rank of that node with my number
            other = p if per == 1 else p * 2 + r % 2
            rows = table[r][:, p].sum().item() + table[other][:, part(r)].sum().item()
            sides = 2 * spec.top_k * 16 * rows + 16 * 64  # ids, weights, counts
            assert rows * row <= far.get(p, 0) <= rows * row + sides, (r, p, rows, far)
        if g["ids"].numel() and spec.choice == "router":  # a row per slot would have shown
            assert sum(t.sum().item() for t in table) * 1.5 < sum(
                t["ids"].numel() for t in got.values()
            )


@pytest.mark.parametrize("name", ["order 2", "order 3"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_transfers_overlap_experts(name, phase, ranks_done):
    """The second piece is on its way before the first piece's experts run, and is not waited for"""
    kind = "experts" if phase == "forward" else "experts backward"
    for r, got in present(ranks_done[name]):
        chunks = ORDER[name].options["chunks"]
        events = list(enumerate(got["events"]))
        runs = [i for i, e in events if e["kind"] == kind and e["phase"] == phase]
        assert len(runs) >= chunks, f"rank {r}: experts ran {len(runs)} times"
        sends = [i for i, e in events if e.get("wide") and e["phase"] == phase and e["later"]]
        waited = {e["of"]: i for i, e in events if e["kind"] == "wait"}
        begun = [i for i in sends if i < runs[0]]
        assert len(begun) >= 2, f"rank {r}: {len(begun)} transfers before the first experts"
        in_flight = [i for i in begun if waited.get(i, 10**9) > runs[0]]
        assert in_flight, f"rank {r}: all of them waited for before the first experts"
        between = [i for i in sends if i > runs[0] and waited.get(i, 10**9) > runs[1]]
        assert between, f"rank {r}: nothing in flight while the second piece's experts run"
        everything = {i for i, e in events if e["kind"] == "send" and e["later"]}
        assert everything == set(waited), "a transfer that nobody waited for"


def test_hot_experts_spread(ranks_done):
    """Gradients of copies are parts until add_copies_, and then the whole"""
    case = EQUAL["copies of 4"]
    got = dict(present(ranks_done["copies of 4"]))
    slots, want = got[0]["slots"], reference(case.spec)
    copies = torch.bincount(torch.tensor(sum(slots, [])), minlength=case.spec.experts)
    assert copies[0] >= 2 and copies.sum() == case.spec.experts + 4
    total = torch.zeros_like(want.up)
    for r, g in got.items():
        for place, e in enumerate(slots[r]):
            total[e] += g["raw"][place]
            if e == 0:
                assert (g["raw"][place] - want.up[0]).abs().max() > 1e-3 * want.up[0].abs().max()
                assert g["raw"][place].abs().max() > 0
    ranks_close(total, want.up, 1e-12, "the sum of the parts")


@pytest.mark.parametrize("name", RANK_MODELS)
def test_a_model_across_ranks(name, ranks_done):
    """Loss, logits of each share, all gradients and the weights after the steps"""
    _, model, tokens = small_model()
    got, steps = present(ranks_done[name]), RANK_MODELS[name].get("steps", 1)
    tolerance = 2e-5 if steps == 1 else 2e-4
    for n in range(steps):
        model.zero_grad()
        logits, loss = step(model, tokens, tokens[:, 1:].numel())
        assert abs(sum(g["losses"][n] for _, g in got) - loss) < 1e-5 * loss
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad
    for r, g in got:
        ranks_close(g["logits"], logits[2 * r : 2 * r + 2], tolerance, f"rank {r} logits")
        for key, p in model.named_parameters():
            pick = (lambda t: t[g["slots"]]) if is_expert(key) else (lambda t: t)
            assert p.grad.abs().max() > 0
            ranks_close(g["grads"][key], pick(p.grad), tolerance * 5, f"rank {r} gradient of {key}")
            ranks_close(g["weights"][key], pick(p.detach()), tolerance, f"rank {r} {key}")


@pytest.mark.parametrize("what", WRONG)
def test_mistakes_do_not_hang(what, ranks_done):
    """What a rank can see is a ValueError there, before it waits for anyone"""
    for r, got in present(ranks_done[f"wrong {what}"]):
        seen = what != "one rank" or r == 2
        assert got["kind"] == "ValueError" if seen else got["kind"], f"rank {r}: {got}"
        assert got["seconds"] < HANG - 2, f"rank {r}: {got}"
        assert "\n" not in got["words"] or not seen, got["words"]


def test_weight_of_nobody_is_nothing(ranks_done):
    for _, got in present(ranks_done["nan"]):
        ranks_close(got["out"], got["clean"].detach(), 0, "out")
        assert got["grad"].isfinite().all() and (got["grad"][got["ids"] < 0] == 0).all()
        assert (got["ids"] < 0).any()


def test_autocast(ranks_done):
    want = reference(replace(FOUR_32, counts=(25, 9, 17, 4)))
    for r, got in present(ranks_done["autocast"]):
        ranks_close(got["out"], want.out[r], 4e-2, "out")
        ranks_close(got["up"], want.up[2 * r : 2 * r + 2], 4e-2, "w_gate_up")
        ranks_close(got["down"], want.down[2 * r : 2 * r + 2], 4e-2, "w_down")


def test_again_is_the_same(ranks_done):
    for _, got in present(ranks_done["again"]):
        assert got["kept"]
        assert all(torch.equal(a, b) for a, b in zip(got["first"], got["second"], strict=True))


def test_two_layers(ranks_done):
    """A layer on a layer with the same callable; a second backward adds the same once more"""
    spec = UNEVEN
    shares = [share_of(spec, d) for d in range(4)]
    xs = [x.requires_grad_() for x, _, _ in shares]
    up, down = (t.requires_grad_() for t in stacks_of(spec))
    h, coef, router = torch.cat(xs), torch.cat([c for _, c, _ in shares]), shares[0][2]
    for _ in range(2):
        h = h + M.loop_experts(h, *routed(spec, h, router, 0), up, down)
    (h * coef).sum().backward()
    outs = h.detach().split(list(spec.counts))
    for r, got in present(ranks_done["layers"]):
        mine = slice(2 * r, 2 * r + 2)
        ranks_close(got["out"], outs[r], 1e-12, "out")
        want = (xs[r].grad, up.grad[mine], down.grad[mine])
        for a, b, c in zip(got["grads"], want, got["doubled"], strict=True):
            ranks_close(a, b, 1e-12, f"rank {r}")
            ranks_close(c, 2 * b, 1e-12, f"rank {r} again")


# Placements --------------------------------------------------------------------------------------


def zipf(n, seed, power=1.2):
    loads = [int(10_000 / (i + 1) ** power) for i in range(n)]
    random.Random(seed).shuffle(loads)
    return torch.tensor(loads)


def load_sets():
    rng = random.Random(0)
    for seed in range(60):
        n = rng.choice([3, 4, 7, 8, 16, 33, 64])
        size = rng.randint(1, min(n, 9))
        loads = zipf(n, seed) if seed % 2 else torch.tensor([rng.randint(0, 99) for _ in range(n)])
        yield loads, size, rng.choice([0, 0, 1, 2, n // 2, n * (size - 1)])


def copies_of(placement, n):
    return torch.bincount(torch.tensor([e for s in placement.slots for e in s]), minlength=n)


def rank_loads(placement, loads):
    share = loads.double() / torch.as_tensor(placement.copies)
    return [sum(share[e].item() for e in s) for s in placement.slots]


def test_even_placement():
    p = Y.Placement.even(8, 4)
    assert p.slots == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert (p.n_experts, p.ranks, p.width) == (8, 4, 2) and list(p.copies) == [1] * 8
    assert p == Y.Placement.even(8, 4) == Y.Placement(((0, 1), (2, 3), (4, 5), (6, 7)))
    with pytest.raises(FrozenInstanceError):
        p.slots = ()
    assert Y.Placement.even(8, 1).slots == (tuple(range(8)),)
    with pytest.raises(ValueError, match="by_load"):
        Y.Placement.even(10, 4)


def test_placement_by_load():
    """Everyone somewhere, sizes within one, no two copies of one expert on a rank, and the copies
    where they lower the load per copy most"""
    for loads, size, extra in load_sets():
        if not 0 <= extra <= len(loads) * (size - 1):
            continue
        n, p = len(loads), Y.Placement.by_load(loads, size, redundant=extra)
        copies = copies_of(p, n)
        assert (copies >= 1).all() and copies.sum() == n + extra
        assert (
            copies.tolist() == [int(c) for c in p.copies] and p.n_experts == n and p.ranks == size
        )
        sizes = [len(s) for s in p.slots]
        assert max(sizes) - min(sizes) <= 1 and p.width == max(sizes) and len(sizes) == size
        assert all(len(set(s)) == len(s) for s in p.slots), (loads.tolist(), size, extra, p.slots)
        assert isinstance(p.slots, tuple) and all(isinstance(s, tuple) for s in p.slots)
        assert all(type(e) is int for s in p.slots for e in s)
        for a, b in combinations(range(n), 2):  # the hotter has no fewer copies
            a, b = (a, b) if loads[a] > loads[b] else (b, a)
            assert loads[a] == loads[b] or copies[a] >= copies[b] or copies[a] == size
        assert p == Y.Placement.by_load(loads, size, redundant=extra)


def test_placement_is_no_worse_than_contiguous():
    worse = []
    for loads, size, _ in load_sets():
        if len(loads) % size == 0:
            even = max(rank_loads(Y.Placement.even(len(loads), size), loads))
            ours = max(rank_loads(Y.Placement.by_load(loads, size), loads))
            if ours > even:
                worse.append((loads.tolist(), size, ours, even))
    assert not worse, worse[:2]


def test_replicas_are_where_they_help_most():
    """The largest load of a copy is the smallest that so many copies can give (brute force)"""
    rng = random.Random(1)
    for _ in range(60):
        n, size = rng.randint(2, 5), rng.randint(2, 4)
        loads = torch.tensor([rng.choice([1, 2, 5, 30, 100]) for _ in range(n)])
        extra = rng.randint(0, min(4, n * (size - 1)))
        if n + extra < size:
            continue
        best = min(
            max(load / c for load, c in zip(loads.tolist(), how, strict=True))
            for how in product(range(1, size + 1), repeat=n)
            if sum(how) == n + extra
        )
        p = Y.Placement.by_load(loads, size, redundant=extra)
        ours = (loads.double() / copies_of(p, n)).max().item()
        assert ours == pytest.approx(best), (loads.tolist(), size, extra, p.slots)


def test_placement_of_nothing_and_floats():
    zeros = Y.Placement.by_load(torch.zeros(6), 4, redundant=3)
    assert copies_of(zeros, 6).min() >= 1 and sum(map(len, zeros.slots)) == 9
    assert all(len(set(s)) == len(s) for s in zeros.slots)
    whole = Y.Placement.by_load(torch.tensor([5.0, 1.0, 2.5]), 3, redundant=6)
    assert all(sorted(s) == [0, 1, 2] for s in whole.slots)


@pytest.mark.parametrize(
    "loads, size, extra",
    [([1, 2], 3, 0), ([1, 2, 3], 2, -1), ([1, 2, 3], 2, 4), ([1, 2, 3], 1, 1), ([1, 2], 5, 2)],
)
def test_bad_placements(loads, size, extra):
    with pytest.raises(ValueError) as e:
        Y.Placement.by_load(torch.tensor(loads), size, redundant=extra)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("n, size", [(10, 4), (3, 4), (7, 2)])
def test_uneven_even(n, size):
    with pytest.raises(ValueError, match="by_load"):
        Y.Placement.even(n, size)


def test_physical():
    """A slot of the right expert; copy (token + offset) % copies; nobody stays nobody"""
    for loads, size, extra in load_sets():
        if not 0 <= extra <= len(loads) * (size - 1):
            continue
        n, p = len(loads), Y.Placement.by_load(loads, size, redundant=extra)
        rng = torch.Generator().manual_seed(n)
        ids = torch.randint(-1, n, (50, 3), generator=rng)
        before = ids.clone()
        for offset in (0, 1, 5):
            got = p.physical(ids, offset=offset)
            assert got.shape == ids.shape and got.dtype == torch.int64 and torch.equal(ids, before)
            assert torch.equal(got == -1, ids == -1)
            for e, slot in zip(ids.flatten().tolist(), got.flatten().tolist(), strict=True):
                assert e < 0 or p.slots[slot // p.width][slot % p.width] == e
        every = torch.arange(n).expand(12 * size, n)
        slots = p.physical(every)
        for e, r in enumerate(map(int, p.copies)):
            column = slots[:, e].tolist()
            assert len(set(column[:r])) == r and column == [column[i % r] for i in range(12 * size)]
            counts = torch.bincount(slots[: 12 * size - 1, e]).tolist()
            held = [c for c in counts if c]
            assert max(held) - min(held) <= 1
        assert torch.equal(p.physical(every, offset=3)[:-3], slots[3:])
    empty = Y.Placement.even(4, 2).physical(torch.empty(0, 2, dtype=torch.int64))
    assert empty.shape == (0, 2)


@pytest.mark.parametrize("bad", [8, 100, -2])
def test_physical_of_no_such_expert(bad):
    ids = torch.tensor([[0, 1], [2, bad]])
    with pytest.raises(ValueError):
        Y.Placement.even(8, 4).physical(ids)


def test_held():
    for loads, size, extra in load_sets():
        if not 0 <= extra <= len(loads) * (size - 1):
            continue
        p = Y.Placement.by_load(loads, size, redundant=extra)
        stack = rank_normal(1, len(loads), 3, 2)
        for r in range(size):
            assert torch.equal(Y.held(stack, p, r), stack[list(p.slots[r])])


def test_local():
    """Only its own slots, and no process group at all"""
    up, down = stacks_of(BASE)
    x, _, router = share_of(BASE, 1)
    weights, ids = routed(replace(BASE, choice="holes"), x, router, 1)
    assert not dist.is_initialized()
    parts = [
        Y.local(PLAIN_EXPERTS, first, 2)(
            x, weights, ids, up[first : first + 2], down[first : first + 2]
        )
        for first in (0, 2, 4, 6)
    ]
    ranks_close(
        sum(parts), M.loop_experts(x, weights, ids, up, down), 1e-12, "the sum of the shares"
    )
    assert len(parts) == 4 and parts[0].abs().sum() > 0


@pytest.mark.parametrize("chunks", [0, -1])
def test_no_chunks(chunks):
    with pytest.raises(ValueError, match="chunks"):
        Y.exchanged(PLAIN_EXPERTS, 2, None, chunks=chunks)


# --------------------------------------------------------------------------------------------------
# generate.py: --experts
# --------------------------------------------------------------------------------------------------

MIXTURES = [name for name in FAMILIES if name.startswith(("mixtral", "qwen3-moe", "deepseek"))]


def experts_of(model: M.Transformer) -> list[M.MoE]:
    return [m for m in model.modules() if isinstance(m, M.MoE)]


def is_grouped(module: M.MoE) -> bool:
    return getattr(module.experts, "func", None) is O.grouped_experts


@pytest.mark.parametrize("name", MIXTURES)
@torch.no_grad()
def test_experts_grouped_equal_the_loop_in_every_family(name, tmp_path):
    """The same logits as model.py's loop, for a prompt and for one token, multi-token prediction
    too."""
    transformers_model(name).save_pretrained(tmp_path)
    plain, fast = M.load_checkpoint(tmp_path), M.load_checkpoint(tmp_path)
    assert G.fast_(G.parse_args(["x"]), fast) is fast and all(map(is_grouped, experts_of(fast)))
    assert len(experts_of(fast)) >= 1
    for shape in ((2, 100), (1, 1)):
        tokens = random_tokens(plain.config, *shape)
        assert relative(fast(tokens), plain(tokens)) <= 1e-5
    slow = G.fast_(G.parse_args(["x", "--experts", "loop"]), M.load_checkpoint(tmp_path))
    assert all(m.experts is M.loop_experts for m in experts_of(slow))


@torch.no_grad()
def test_cpu_experts_equal_the_plain_loop():
    """Grouped experts that multiply by cpu.py == model.py's loop, for one row and many; in bf16 no
    further from exact. Stacks of codes multiply by what they have of their own."""
    model = random_model(latent())
    layer, x = model.layers[1].mlp, torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    for rows in (1, 9):
        weights, ids = layer.route(x[:rows])
        args = (x[:rows], weights, ids, layer.w_gate_up, layer.w_down)
        exact = M.loop_experts(*args)
        fast = lambda *args: O.grouped_experts(*args, linear=cpu.expert_linear)
        assert relative(fast(*args), exact) < 1e-6
        half = [t.bfloat16() if t.is_floating_point() else t for t in args]
        plain = relative(M.loop_experts(*half).float(), exact)
        assert relative(fast(*half).float(), exact) < max(1.1 * plain, 5e-3)

    Q.quantize_(layer, "int8")
    seen, want = [], layer(x)
    for stack in (layer.w_gate_up, layer.w_down):
        product = stack.product
        stack.product = lambda *a, p=product: seen.append(len(a[0])) or p(*a)
    G.fast_(G.parse_args(["x"]), model)
    assert is_grouped(layer) and relative(layer(x), want) < 1e-5
    assert sum(seen) == 2 * 9 * model.config.n_experts_per_token
    none = torch.full_like(weights.long(), -1)  # nobody, of any token
    empty = layer.experts(x, weights, none, layer.w_gate_up, layer.w_down)
    assert not empty.any() and empty.shape == x.shape


def answers(capsys, *argv, mode=("--temperature", 0, "--max-new-tokens", 24)) -> dict:
    """What generate.py --json says, in this process."""
    argv = [GOLDEN_PROMPT, "--checkpoint", MOE, "--dtype", "fp32", "--json", *mode, *argv]
    assert G.main([str(arg) for arg in argv]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


MODES = {
    "eager": (),
    "several": ("--n", 3, "--temperature", 0.8),
    "mtp": ("--speculate", "mtp"),
    "draft": ("--speculate", "draft", "--draft", str(MOE)),
    "int8": ("--quantize", "int8"),
    "int4": ("--quantize", "int4", "--group-size", 8),
    "llm.int8": ("--quantize", "llm.int8"),
}


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(G, "measured_bandwidth", lambda device: 1e9)


@pytest.mark.parametrize("how", MODES)
def test_experts_write_the_same_text(how, capsys, quick):
    """generate.py --experts grouped and loop, in fp32: the same tokens, whatever else is asked."""
    texts = [
        answers(capsys, *MODES[how], "--experts", kind)["tokens"] for kind in ("grouped", "loop")
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 24


def test_static_experts_are_left_to_the_graph(monkeypatch):
    """Where experts have static shapes (kernels, on CUDA; on a CPU none) a compiled step calls them
    as they are, and an Engine is captured, and compiled if asked; else they are gathered, an Engine
    is not captured, and --compile refused."""
    args = G.parse_args(["--batch", "x", "--compile"])
    model = G.fast_(args, random_model(latent()))
    layer = model.layers[1].mlp
    on_cuda = SimpleNamespace(
        qweight=SimpleNamespace(is_cuda=True, device="cpu"), dtype=torch.float32
    )
    grouped = partial(O.grouped_experts)
    stub = SimpleNamespace(experts=grouped, w_gate_up=on_cuda, w_down=on_cuda)
    for kernels in (True, False):
        with monkeypatch.context() as m:
            m.setattr(O, "uses_kernels", lambda x, stacks: kernels)
            assert O.has_static_shapes(stub) == kernels and not O.has_static_shapes(layer)
            stub.experts = M.loop_experts
            assert not O.has_static_shapes(stub)
            stub.experts = partial(O.grouped_experts, backend="torch")
            assert not O.has_static_shapes(stub)
            stub.experts = grouped
    monkeypatch.setattr(G, "compiled", lambda step, device: step)
    for static in (True, False):
        monkeypatch.setattr(O, "has_static_shapes", lambda module: static)
        G.fast_(args, model)
        G.Decoder(model, 32, S.Sampling(), compiled=True)
        assert all(is_grouped(m) == static for m in experts_of(model))
        args.compile = static
        assert G.engine_options(args, model)["static"] is static
    args.compile = True
    with pytest.raises(ValueError, match="--compile"):
        G.engine_options(args, model)


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="torch.compile on CPU needs a C++ compiler")
@pytest.mark.parametrize("how", ["eager", "int8"])
def test_experts_write_the_same_text_compiled(how, capsys, quick):
    """--compile, in which experts are gathered: the text of the eager step, for both kinds."""
    torch.compiler.reset()
    flags = (*MODES[how], "--max-new-tokens", 12)
    eager = answers(capsys, *flags)["tokens"]
    for kind in ("grouped", "loop"):
        assert answers(capsys, *flags, "--compile", "--experts", kind)["tokens"] == eager


def test_experts_in_the_other_modes(tmp_path, capsys, monkeypatch):
    """--score, --batch, --bench-serving and --interactive run grouped experts as they run the
    loop; so does a folder that --save wrote. --batch --compile stays refused on a CPU."""
    monkeypatch.setattr(P, "_kernel", lambda q: False)  # else Triton's interpreter runs it here
    real, calls = O.grouped_experts, []
    monkeypatch.setattr(O, "grouped_experts", lambda *a, **k: calls.append(1) or real(*a, **k))
    text, lines = tmp_path / "text.py", tmp_path / "requests.jsonl"
    text.write_text("def add(a, b):\n    return a + b\n" * 8)
    prompts = ["def f(", "class A:\n", "import os\n"]
    lines.write_text(
        "".join(json.dumps({"prompt": p, "max_new_tokens": 8}) + "\n" for p in prompts)
    )
    saved = tmp_path / "saved"
    base = ["--checkpoint", MOE, "--dtype", "fp32"]
    assert G.main([*map(str, base), "--quantize", "int8", "--save", str(saved)]) == 0
    capsys.readouterr()
    found = {}
    for kind in ("grouped", "loop"):
        del calls[:]
        outs = []
        for folder in (MOE, saved):
            same = ["--checkpoint", folder, "--dtype", "fp32", "--experts", kind]
            out = tmp_path / f"{kind}-{folder.name}.jsonl"
            greedy = ["--temperature", 0]
            for more in (
                ["--score", text, "--json"],
                ["--batch", lines, "--out", out, *greedy, "--kv-blocks", 64],
            ):
                assert G.main([str(a) for a in (*same, *more)]) == 0, capsys.readouterr().err
            outs.append(json.loads(capsys.readouterr().out)["nats_per_token"])
            results = sorted(map(json.loads, out.read_text().splitlines()), key=lambda r: r["line"])
            outs.append([r["tokens"] for r in results])
            monkeypatch.setattr("sys.stdin", io.StringIO("def f(\n"))
            talk = [*same, "--interactive", "--context", 64, "--max-new-tokens", 8, *greedy]
            assert G.main([str(a) for a in talk]) == 0
            outs.append(capsys.readouterr().out)
        served = [*map(str, base), "--experts", kind, "--bench-serving", "3", "--json"]
        served += ["--kv-blocks", "64", "--input-tokens", "4:9", "--output-tokens", "2:5"]
        assert G.main(served) == 0
        assert json.loads(capsys.readouterr().out)["requests"] == 3
        assert bool(calls) == (kind == "grouped")
        found[kind] = outs
    assert found["grouped"][1::3] == found["loop"][1::3]
    assert found["grouped"][2::3] == found["loop"][2::3]
    assert found["grouped"][::3] == pytest.approx(found["loop"][::3], rel=1e-5)
    assert G.main([str(a) for a in (*base, "--batch", lines, "--out", out, "--compile")]) == 2
    assert "--compile" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# model.py: loading a part of the experts
# --------------------------------------------------------------------------------------------------

HELD = {1: (5, 2), 2: (7, 0, 7), 3: (1,)}  # by layer; in the second a copy, the third is MTP's


def hold(model: M.Transformer, held=HELD) -> None:
    """Cut the stacks of a model on the meta device."""
    for module, own in zip(experts_of(model), held.values(), strict=True):
        module.held = own
        for name in ("w_gate_up", "w_down"):
            stack = getattr(module, name).data[list(own)]
            setattr(module, name, nn.Parameter(stack, requires_grad=False))


def fp8_mixture_folder(folder: Path) -> None:
    """Its experts as DeepSeek stores them, float8 with scales of blocks."""
    path = folder / "model.safetensors"
    stored, rng = load_file(path), torch.Generator().manual_seed(0)
    for name, w in list(stored.items()):
        if ".experts." in name:
            blocks = [-(-n // 128) for n in w.shape]
            stored[name] = (w.float() / 2).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = torch.rand(blocks, generator=rng) + 0.5
    save_file(stored, path)
    config = json.loads((folder / "config.json").read_text())
    fp8 = dict(quant_method="fp8", fmt="e4m3", weight_block_size=[128, 128])
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": fp8}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """One model of DeepSeek-V3's form: in a file, in shards, in FP8, and of codes."""
    root = tmp_path_factory.mktemp("folders")
    model = random_model(latent(expert_ffn_dim=136, dim=192, q_lora_rank=24)).to(torch.bfloat16)
    for name in ("file", "shards", "fp8"):
        M.save_checkpoint(model, root / name, 100_000 if name == "shards" else 10**9)
    fp8_mixture_folder(root / "fp8")
    Q.quantize_(model, "int4", group_size=8, skip=("head",))
    config = Q.to_config(model, "int4", 8, ("head",))
    M.save_checkpoint(model, root / "codes", quantization=config)
    assert len(list((root / "shards").glob("*.safetensors"))) > 10
    return {path.name: path for path in root.iterdir()}


def opener(folder: Path, held=None):
    """How the folder is prepared: its experts cut, its codes swapped in."""
    config = json.loads((folder / "config.json").read_text()).get("quantization_config", {})

    def prepare(model):
        if held is not None:
            hold(model, held)
        if config.get("quant_method") == "sheaf":
            Q.from_config(model, config)

    return prepare


@pytest.mark.parametrize("kind", ["file", "shards", "fp8", "codes"])
def test_held_experts_are_all_that_is_read(kind, folders, monkeypatch):
    """A process that holds some experts has their slices of the whole model, copies too, and all
    other tensors; of the other experts it reads nothing."""
    folder = folders[kind]
    whole = M.load_checkpoint(folder, prepare=opener(folder))
    read, plain = [], M.Stored.read
    monkeypatch.setattr(
        M.Stored, "read", lambda self, *rows: read.append((self.name, *rows)) or plain(self, *rows)
    )
    part = M.load_checkpoint(folder, prepare=opener(folder, HELD))
    theirs, ours = whole.state_dict(), part.state_dict()
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        held = M._held(part, name)
        assert (held is not None) == (".w_" in name)
        want = tensor if held is None else tensor[list(held)]
        assert want.dtype == ours[name].dtype and torch.equal(want, ours[name]), name
    assert all(m.held == held for m, held in zip(experts_of(part), HELD.values()))
    numbers = {
        tuple(map(int, (parts[2], parts[5])))
        for parts in (name.split(".") for name, *_ in read)
        if "experts" in parts
    }
    stacks = [rows for name, *rows in read if ".w_" in name]
    if kind == "codes":
        assert not numbers and sorted(map(str, stacks)) == sorted(
            str([held]) for held in HELD.values() for _ in range(6)
        )
    else:
        assert not stacks and numbers == {(i, e) for i, held in HELD.items() for e in held}


def test_held_experts_quantize_as_they_come(folders):
    """each(): a part that is quantized on load == that part of the model quantized whole."""
    each = lambda name, module: Q.quantize_module(name, module, Q.scheme_of("int8", None))
    whole = M.load_checkpoint(folders["file"], each=each)
    part = M.load_checkpoint(folders["file"], prepare=hold, each=each)
    for a, b, held in zip(experts_of(whole), experts_of(part), HELD.values(), strict=True):
        assert torch.equal(a.w_down.qweight[list(held)], b.w_down.qweight)
        assert torch.equal(a.w_gate_up[list(held)], b.w_gate_up[list(range(len(held)))])


@pytest.mark.parametrize("change", ["lacks", "shape", "more"])
def test_held_experts_do_not_hide_a_wrong_folder(change, folders, tmp_path):
    """An expert that this process does not hold is missed all the same, and an unknown tensor is
    refused: all processes say the same."""
    stored = load_file(folders["file"] / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    if change == "lacks":
        del stored[name]
    else:
        name = name if change == "shape" else name.replace(".3.", ".8.")
        stored[name] = torch.ones(2, 2)
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folders["file"] / "config.json").read_bytes())
    messages = set()
    for prepare in (None, hold):
        with pytest.raises(ValueError, match=name) as e:
            M.load_checkpoint(tmp_path, prepare=prepare)
        messages.add(str(e.value))
    assert len(messages) == 1


@torch.no_grad()
def test_parts_add_up_to_the_whole(folders):
    """Two processes' shares, joined as --ep joins them but by plain addition: the whole layer. And
    a step reads the bytes of its own experts."""
    whole = M.load_checkpoint(folders["file"], dtype=torch.float32)
    placement = Y.Placement.by_load([9, 1, 1, 1, 1, 1, 1, 8], 2, 2)
    x = torch.randn(9, 192, generator=torch.Generator().manual_seed(0))
    total, read, ids = 0, [], whole.layers[1].mlp.route(x)[1]
    for rank in range(2):
        cut = lambda model: hold(model, dict(enumerate([placement.slots[rank]] * 3)))
        part = M.load_checkpoint(folders["file"], dtype=torch.float32, prepare=cut)
        module = part.layers[1].mlp
        experts = Y.placed(
            Y.local(O.grouped_experts, rank * placement.width, placement.width), placement
        )
        weights, again = module.route(x)
        assert torch.equal(ids, again)
        total = total + experts(x, weights, ids, module.w_gate_up, module.w_down)
        read.append(G.weight_bytes(part, 2))
    module = whole.layers[1].mlp
    assert relative(total, M.loop_experts(x, weights, ids, module.w_gate_up, module.w_down)) < 1e-6
    dense = sum(p.nbytes for n, p in whole.named_parameters() if p.dim() < 3 and "mtp" not in n)
    stacks = sum(p.nbytes for n, p in whole.named_parameters() if p.dim() == 3 and "mtp" not in n)
    dense -= whole.embed.weight.nbytes - 2 * whole.embed.weight[0].nbytes
    share = 1 - (1 - 3 / 8) ** 2
    assert G.weight_bytes(whole, 2) == pytest.approx(dense + stacks * share, abs=1)
    assert sum(read) == pytest.approx(2 * dense + stacks * share * 10 / 8, abs=2)


# --------------------------------------------------------------------------------------------------
# generate.py: --ep
# --------------------------------------------------------------------------------------------------

RANK = f"""
import json, os, sys, time
sys.path.insert(0, {str(REPO)!r})
import torch
import torch.distributed as dist
import generate as G
torch.set_num_threads(1)
G.measured_bandwidth = lambda device: 1e9
rank, ranks, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=ranks)
for line in sys.stdin:
    try:
        argv = json.loads(line)
        if argv[0] == "fail":
            G.agreed(lambda: open("nowhere") if str(rank) == argv[1] else None)
        args = G.parse_args(argv)
        with torch.inference_mode():
            (G.score_file if args.score else G.generate)(args)
    except ValueError as e:
        print(json.dumps({{"error": str(e)}}))
    sys.stdout.flush()
dist.barrier()
dist.destroy_process_group()
sys.stderr.flush()
os._exit(0)  # all is said; gloo's threads now and then abort an interpreter that is leaving
"""


def over_ranks(ranks: int, tmp_path: Path, *cases) -> list[dict]:
    """What generate.py --ep --json says of each case: the same on every rank."""
    lines = "".join(
        json.dumps([str(a) for a in (*case, "--ep", "--json")]) + "\n" for case in cases
    )
    store = tmp_path / f"store{ranks}-{time.monotonic_ns()}"
    argv = [sys.executable, "-c", RANK]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    every = [
        subprocess.Popen([*argv, str(r), str(ranks), str(store)], env=env, **pipes)
        for r in range(ranks)
    ]
    try:
        for p in every:
            p.stdin.write(lines)
            p.stdin.close()
        outs = [(p.stdout.read(), p.stderr.read(), p.wait(timeout=120)) for p in every]
    finally:
        for p in every:
            p.kill()
    for out, err, code in outs:
        assert code == 0 and len(out.splitlines()) == len(cases), err[-3000:]
    said = [[json.loads(line) for line in out.splitlines()] for out, _, _ in outs]
    same = ("tokens", "samples", "error", "nats_per_token")
    for other in said[1:]:
        assert [[d.get(k) for k in same] for d in other] == [
            [d.get(k) for k in same] for d in said[0]
        ]
    return said[0]


EP_GREEDY = (GOLDEN_PROMPT, "--checkpoint", MOE, "--dtype", "fp32", "--temperature", 0)
EP_GREEDY += ("--max-new-tokens", 12)
EP_SAMPLED = (*EP_GREEDY, "--temperature", 0.9, "--seed", 7, "--n", 3)


def alone(capsys, case) -> dict:
    assert G.main([str(a) for a in (*case, "--json")]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def check_ranks(ranks, tmp_path, capsys, cases, *others) -> list[dict]:
    """Each case (flags, flags of --ep alone) is as in one process; what is said of the others."""
    found = over_ranks(ranks, tmp_path, *((*case, *more) for case, more in cases), *others)
    for (case, more), got in zip(cases, found):
        want = alone(capsys, case)
        assert [got.get(k) for k in ("tokens", "samples")] == [
            want.get(k) for k in ("tokens", "samples")
        ], (case, more)
        if "nats_per_token" in want:
            assert got["nats_per_token"] == pytest.approx(want["nats_per_token"], rel=1e-5)
    return found[len(cases) :]


def uneven(folder: Path) -> Path:
    """metrics.jsonl as train.py writes it, the last line torn."""
    rows = [
        {"step": 1, "loss": 5.0},
        {"step": 2, "expert_load": [[1] * 8] * 4},
        {"step": 3, "expert_load": [[90, 3, 1, 7, 40, 2, 2, 5], *[[5, 1, 1, 1, 1, 1, 0, 60]] * 3]},
        {"step": 4, "loss": 4.0},
    ]
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 5, "expert_lo')
    return path


def test_ep_two_ranks(tmp_path, capsys, quick):
    """The text of one process, greedy and sampled, with copies, by load, quantized as it loads, of
    random weights, and by the loop; perplexity too. What one rank refuses all refuse, in one line;
    none waits."""
    text = tmp_path / "text.py"
    text.write_text("def add(a, b):\n    return a + b\n" * 4)
    dummy = ("--dummy", "small-moe", "--prompt-tokens", 5, "--dtype", "fp32", "--temperature", 0)
    cases = [
        (EP_GREEDY, ()),
        (EP_SAMPLED, ("--redundant-experts", 3)),
        (EP_GREEDY, ("--expert-load", uneven(tmp_path))),
        ((*EP_GREEDY, "--quantize", "int8"), ("--experts", "loop")),
        ((*dummy, "--max-new-tokens", 8), ()),
        (("--checkpoint", MOE, "--dtype", "fp32", "--score", text), ()),
    ]
    wrong = {
        ("fail", 0): "No such file",
        ("fail", 1): "rank 1: ",
        (*EP_GREEDY, "--redundant-experts", 9): "--redundant-experts: 8 experts",
        (*EP_GREEDY, "--device", "cuda:1"): "give cuda",
        (*EP_GREEDY, "--expert-load", tmp_path / "none"): "--expert-load",
        tuple(SMALL if a == MOE else a for a in EP_GREEDY): "no mixture of experts",
    }
    said = check_ranks(2, tmp_path, capsys, cases, *wrong)
    for words, got in zip(wrong.values(), said, strict=True):
        assert words in got["error"] and "\n" not in got["error"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_ep_more_ranks(ranks, tmp_path, capsys, quick):
    """Three ranks, which hold unequal numbers, and four: the text of one process; a folder of codes
    and FP8 products too."""
    saved = tmp_path / "saved"
    argv = ["--checkpoint", str(MOE), "--dtype", "fp32", "--quantize", "int8", "--save", str(saved)]
    assert G.main(argv) == 0
    capsys.readouterr()
    load = ("--expert-load", uneven(tmp_path))
    codes = tuple(saved if a == MOE else a for a in EP_GREEDY)
    cases = [
        (EP_GREEDY, load),
        (EP_SAMPLED, load),
        (EP_SAMPLED, (*load, "--redundant-experts", 5)),
        (codes, load),
        ((*EP_GREEDY, "--quantize", "int4", "--group-size", 8), (*load, "--redundant-experts", 4)),
        (EP_GREEDY, ("--redundant-experts", 1)),
    ]
    if ranks == 4:
        cases += [(EP_GREEDY, ()), ((*EP_GREEDY, "--quantize", "fp8"), ())]
    check_ranks(ranks, tmp_path, capsys, cases)


def test_ep_ranks_that_do_not_divide_the_experts_are_told():
    """Three ranks and eight experts: refused, with what helps; with loads or copies they do."""
    config = M.read_config(MOE / "config.json")
    shares = G.Shares(G.parse_args(["x", "--ep"]))
    shares.ranks = 3
    with pytest.raises(ValueError, match="^--ep: 8 experts .* 3 ranks.*--expert-load"):
        shares._place(config, 2)
    shares.args.redundant_experts = 1
    assert [p.width for p in shares._place(config, 2)] == [3, 3]


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@pytest.mark.slow
def test_ep_as_a_user_runs_it():
    """torchrun: the prompt by a pipe, the text once, one line of facts; a refusal in one line, and
    exit code 2 of every rank."""
    argv = ["generate.py", *EP_GREEDY[1:], "--ep"]
    done = run(*TORCHRUN, 2, *argv, stdin=GOLDEN_PROMPT)
    assert done.returncode == 0, done.stderr
    plain = run("generate.py", *EP_GREEDY)
    assert done.stdout == plain.stdout
    assert sum("tok/s" in line for line in done.stderr.splitlines()) == 1
    done = run(*TORCHRUN, 3, *argv)
    lines = [line for line in done.stderr.splitlines() if line.startswith("generate.py: error")]
    assert done.returncode != 0 and len(lines) == 1 and "8 experts" in lines[0], done.stderr
    done = run(*TORCHRUN, 2, *argv, "--batch", "x")
    lines = [line for line in done.stderr.splitlines() if line.startswith("generate.py: error")]
    assert len(lines) == 1 and "--batch" in lines[0]


def test_ep_alone_is_the_plain_thing(capsys, quick):
    """One process, with and without --ep."""
    assert alone(capsys, (*EP_GREEDY, "--ep"))["tokens"] == alone(capsys, EP_GREEDY)["tokens"]


@pytest.mark.parametrize(
    "flags, word",
    [
        (("--batch", "x"), "--batch"),
        (("--bench-serving",), "--bench-serving"),
        (("--interactive",), "--interactive"),
        (("--speculate", "ngram"), "--speculate"),
        (("--compile",), "--compile"),
        (("--quantize", "int4", "--calibrate", "gptq"), "--calibrate"),
        (("--quantize", "int4", "--save", "x"), "--save"),
        (("--quantize-report",), "--quantize-report"),
        (("--checkpoint", str(SMALL)), "no mixture of experts"),
        (("--dummy", "small", "--prompt-tokens", "4"), "no mixture of experts"),
        (("--redundant-experts", "1"), "--redundant-experts"),
        (("--redundant-experts", "-1"), "--redundant-experts must be 0 or more"),
        (("--expert-load", "nowhere.jsonl"), "nowhere.jsonl"),
    ],
)
def test_ep_refuses(flags, word, capsys):
    """What cannot be shared out, or would be ignored."""
    more = [] if "--checkpoint" in flags or "--dummy" in flags else ["--checkpoint", str(MOE)]
    assert G.main(["--ep", *more, *flags]) == 2
    err = capsys.readouterr().err
    assert word in err and len(err.splitlines()) == 1


def test_ep_flags_need_ep(capsys):
    for flags in (("--expert-load", "x"), ("--redundant-experts", "1")):
        assert G.main(["x", "--checkpoint", str(MOE), *flags]) == 2
        assert "needs --ep" in capsys.readouterr().err


def test_expert_load_files(tmp_path):
    """The last counts of metrics.jsonl, or a list alone; multi-token prediction may be left out.
    What is of another model is refused, with the file's name."""
    config, path = M.read_config(MOE / "config.json"), uneven(tmp_path)
    found = G.read_loads(path, config, 5)
    assert found[0] == [90, 3, 1, 7, 40, 2, 2, 5] and found[4] == [1.0] * 8 and len(found) == 5
    path.write_text(json.dumps([[1.5] * 8] * 5, indent=2))
    assert G.read_loads(path, config, 5) == [[1.5] * 8] * 5
    path.write_text(json.dumps({"expert_load": [[2] * 8] * 4}))
    assert G.read_loads(path, config, 4) == [[2] * 8] * 4
    for wrong in (
        "", "{}", "[]", "null", "[[1]]", json.dumps([[1] * 8] * 3), json.dumps([[-1] * 8] * 4),
        json.dumps([["1"] * 8] * 4), json.dumps([[math.inf] * 8] * 4), json.dumps([[1] * 7] * 4),
        '{"step": 1}\n{"step": 2}', '{"expert_load": 3}',
    ):  # fmt: skip
        path.write_text(wrong)
        with pytest.raises(ValueError, match="metrics.jsonl: has no list of 8 counts"):
            G.read_loads(path, config, 5)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot be read"):
        G.read_loads(path, config, 5)


# --------------------------------------------------------------------------------------------------
# train.py: mixtures
# --------------------------------------------------------------------------------------------------


def mixtral(**changes) -> M.ModelConfig:
    """A mixture in every layer, without a correction."""
    base = dict(family="mixtral", n_layers=2, moe_layers=(0, 1), n_experts=4, norm_topk=True)
    return tiny(**base | dict(n_experts_per_token=2, expert_ffn_dim=80) | changes)


def mixtures(model: M.Transformer) -> list[M.MoE]:
    return [m for m in model.modules() if isinstance(m, M.MoE)]


def routers(model: M.Transformer) -> torch.Tensor:
    return torch.cat([m.router.grad.flatten() for m in mixtures(model)])


def auxiliary_by_hand(kind: str, config: M.ModelConfig, logits: torch.Tensor, ids: torch.Tensor):
    """One mixture's auxiliary loss, (B, T, E) and (B, T, K), written out with loops."""
    B, length, E = logits.shape
    if kind == "z":
        return (logits.exp().sum(-1).log() ** 2).mean()
    probs = logits.softmax(-1)
    if config.scoring == "sigmoid":
        probs = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    rows = [range(B)] if kind == "aux" else [[b] for b in range(B)]
    total = 0.0
    for row in rows:
        chosen, p = ids[list(row)].flatten(), probs[list(row)].flatten(0, 1)
        share = [(chosen == e).sum().item() * E / len(chosen) for e in range(E)]
        total = total + sum(share[e] * p[:, e].mean() for e in range(E)) / len(rows)
    return total


@pytest.mark.parametrize("kind", ["aux", "seq", "z"])
@pytest.mark.parametrize("config", [mixtral(), latent()], ids=["mixtral", "latent"])
def test_auxiliary_losses_are_their_formulas_and_reach_the_router(kind, config):
    """Each loss of Balance == its definition over every mixture, an MTP layer's included, times its
    coefficient; and what it adds to the routers' gradients is the definition's gradient."""
    model, batch = random_model(config).requires_grad_(True), random_tokens(config, 3, 18)
    seen = []
    for m in mixtures(model):
        m.observe = lambda *routed: seen.append(routed)
    plain = T.accumulate(model, batch, 3)
    assert "aux_loss" not in plain and len(seen) == len(mixtures(model))
    without = routers(model)
    model.zero_grad()
    expected = 0.3 * sum(auxiliary_by_hand(kind, config, *routed) for routed in seen)
    T.loss_sums(model, batch)  # the same forward again, for a graph of its own
    again = 0.3 * sum(auxiliary_by_hand(kind, config, *routed) for routed in seen[len(seen) // 2 :])
    again.backward()
    added = routers(model)
    model.zero_grad()
    row = T.accumulate(model, batch, 3, balance=T.Balance(model, **{kind: 0.3}))
    assert row["aux_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert row["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert added.norm() > 1e-3 and relative(routers(model) - without, added) < 1e-4


def test_auxiliary_means_do_not_depend_on_the_micro_batch():
    """z and the sequence-wise loss: the same number and gradient however a step is cut, to
    rounding. Switch's is a product of means over a micro-batch, and is not."""
    config = mixtral()
    model, batch = random_model(config).requires_grad_(True), random_tokens(config, 4, 17)

    def step(micro, **coefficients):
        model.zero_grad()
        balance = T.Balance(model, **coefficients)
        return T.accumulate(model, batch, micro, balance=balance)["aux_loss"], routers(model)

    for coefficients in (dict(z=0.5), dict(seq=0.5), dict(z=0.1, seq=0.2)):
        whole, gradient = step(4, **coefficients)
        for micro in (1, 2, 3):
            value, got = step(micro, **coefficients)
            assert value == pytest.approx(whole, rel=1e-6) and relative(got, gradient) < 1e-5
    assert abs(step(1, aux=1.0)[0] - step(4, aux=1.0)[0]) > 1e-3


def trained_loads(model: M.Transformer, steps: int, lr: float, speed: float, **coefficients):
    """Max over mean load of every step of a real training run, on random tokens."""
    balance, optimizer = T.Balance(model, speed, **coefficients), T.build_optimizer(model)
    worst = []
    for step in range(steps):
        batch = random_tokens(model.config, 8, 65, seed=step)
        T.accumulate(model, batch, 8, balance=balance)
        T.update(model, optimizer, lr)
        worst.append(balance.update())
    return worst


def skewed(config: M.ModelConfig) -> M.Transformer:
    """Drawn as train.py draws it, but for long router rows and, where there is one, a correction
    that favours the first experts."""
    model = M.Transformer(config)
    model.init_weights(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for m in mixtures(model):
            m.router.mul_(10)
            if config.correction_bias:
                m.correction.copy_(torch.linspace(0.4, 0, config.n_experts))
    return model


def test_the_bias_balances_a_skewed_router_and_leaves_the_weights_alone():
    """A router that favours some experts comes, in training with a moving correction, to a max/mean
    load below 1.2, and not without. The gate weights are the chosen experts' unbiased scores."""
    config = latent(n_groups=1, topk_groups=1, group_score_topk=1, n_mtp_layers=0)
    model = skewed(config)
    worst = trained_loads(model, 60, 1e-4, 0.01)
    assert worst[0] > 1.5 and statistics.mean(worst[-10:]) < 1.2, worst
    assert min(trained_loads(skewed(config), 60, 1e-4, 0.0)[-10:]) > 1.4
    layer, logits = mixtures(model)[0], torch.randn(64, config.n_experts)
    weights, ids = layer.choose(logits)
    scores = logits.sigmoid().gather(1, ids)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))
    unbiased = logits.sigmoid().topk(config.n_experts_per_token).indices
    assert (ids.sort().values != unbiased.sort().values).any()


def test_an_auxiliary_loss_evens_out_a_mixture_without_correction():
    """Left alone a router drifts to its favourites; Switch's loss holds max/mean down, and so does
    the sequence-wise one."""
    config = mixtral(dim=32, ffn_dim=32, expert_ffn_dim=32, n_heads=2, n_kv_heads=1)
    alone, switch, sequence = (
        statistics.mean(trained_loads(skewed(config), 30, 1e-3, 0.0, **coefficient)[-5:])
        for coefficient in ({}, dict(aux=0.1), dict(seq=0.1))
    )
    assert alone > 1.4 and max(switch, sequence) < 1.25, (alone, switch, sequence)


def test_validation_neither_counts_nor_collects():
    """Balance hears training alone; a forward without gradients leaves no trace."""
    config = mixtral()
    model, tokens = random_model(config), random_tokens(config, 2, 200)[0].int()
    balance, place = (
        T.Balance(model, aux=1.0, seq=1.0, z=1.0),
        T.Place(torch.device("cpu"), "fp32", 0, 1),
    )
    T.validate(model, tokens, 32, 2, place)
    assert not balance.counts.any() and not balance.terms
    model(random_tokens(config, 2, 9))
    assert balance.counts.sum(1).tolist() == [2 * 9 * 2] * 2 and len(balance.terms) == 6
    assert balance.take() > 0 and balance.take() == 0


# --- runs


def moe_argv(corpus, config: Path, out: Path, *more) -> list[str]:
    argv = ["--data", corpus, "--model", config, "--out", out, "--batch-size", 4]
    argv += ["--micro-batch-size", 2, "--seq-len", 32, "--steps", 4, "--save-every", 2]
    argv += ["--eval-every", 2, "--device", "cpu", "--dtype", "fp32", *more]
    return [str(a) for a in argv]


@pytest.fixture(scope="module")
def moe_configs(tmp_path_factory) -> Path:
    """deepseek.json: MLA, groups, a correction and an MTP layer; mixtral.json: without one."""
    path = tmp_path_factory.mktemp("mixtures")
    small = dict(vocab_size=320, n_layers=2, n_heads=2, dim=32)
    deepseek = latent(**small, n_kv_heads=2, moe_layers=(1,), expert_ffn_dim=16)
    (path / "deepseek.json").write_text(json.dumps(deepseek.to_hf()))
    plain = mixtral(**small, n_kv_heads=1, ffn_dim=48, expert_ffn_dim=48)
    (path / "mixtral.json").write_text(json.dumps(plain.to_hf()))
    return path


@pytest.mark.parametrize("kind", ["deepseek", "mixtral"])
def test_metrics_tell_the_load_and_the_auxiliary_loss(corpus, moe_configs, tmp_path, kind, capsys):
    """Every row has the load's statistics, validated ones the counts: all slots of the step, none
    of validation. aux_loss is on by default where there is no correction; its coefficient stays
    with the run. Plain experts give the losses of grouped ones. The picture has two panels more."""
    out, loop = tmp_path / "run", tmp_path / "loop"
    assert T.main(moe_argv(corpus, moe_configs / f"{kind}.json", out)) == 0
    rows = T.read_metrics(out / "metrics.jsonl")
    for row in rows:
        assert 1 <= row["worst_load"] <= 8 and 0 < row["load_entropy"] <= 1
        assert row["dead_experts"] in range(17) and ("aux_loss" in row) == (kind == "mixtral")
        assert ("expert_load" in row) == ("val_loss" in row) == (row["step"] % 2 == 0)
    slots = [4 * 32 * 3, 4 * 31 * 3] if kind == "deepseek" else [4 * 32 * 2] * 2
    assert [sum(layer) for layer in rows[-1]["expert_load"]] == slots
    busiest = max(max(layer) * len(layer) / sum(layer) for layer in rows[-1]["expert_load"])
    assert rows[-1]["worst_load"] == pytest.approx(busiest, abs=1e-3)
    assert rows[-1]["dead_experts"] == sum(layer.count(0) for layer in rows[-1]["expert_load"])
    assert T.main(moe_argv(corpus, moe_configs / f"{kind}.json", loop, "--experts", "loop")) == 0
    for a, b in zip(rows, T.read_metrics(loop / "metrics.jsonl"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    default = "0.01" if kind == "mixtral" else "0.0"
    capsys.readouterr()
    assert T.main(["--out", str(out), "--resume", "--aux-loss", "0.5"]) == 2
    assert f"--aux-loss 0.5 differs from the run's {default}" in capsys.readouterr().err
    assert T.main(["--out", str(out), "--resume", "--aux-loss", default]) == 0
    if importlib.util.find_spec("matplotlib"):
        assert T.main(["--out", str(out), "--plot"]) == 0
        png = (out / "metrics.png").read_bytes()
        assert struct.unpack(">2I", png[16:24]) == (960, 1260)
        for row in rows:
            for key in ("worst_load", "load_entropy", "dead_experts", "expert_load"):
                row.pop(key, None)
        (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert T.main(["--out", str(out), "--plot"]) == 0
        png = (out / "metrics.png").read_bytes()
        assert struct.unpack(">2I", png[16:24]) == (960, 720)


@pytest.mark.slow
def test_compiled_mixtures_train_as_they_are(corpus, moe_configs, tmp_path):
    """--compile changes no loss, auxiliary loss or load of a model with mixtures."""
    more = ("--z-loss", 0.1, "--sequence-loss", 0.1)
    for name, flags in (("plain", ()), ("compiled", ("--compile",))):
        argv = moe_argv(corpus, moe_configs / "deepseek.json", tmp_path / name, *more, *flags)
        assert T.main(argv) == 0
    plain, compiled = (
        T.read_metrics(tmp_path / n / "metrics.jsonl") for n in ("plain", "compiled")
    )
    for a, b in zip(plain, compiled, strict=True):
        for key in set(a) - {"tokens_per_second", "expert_load"}:
            assert a[key] == pytest.approx(b[key], rel=1e-5), key
        assert a.get("expert_load") == b.get("expert_load")


# --- upcycling

DENSE_FORMS = {
    "llama": (dict(), "mixtral"),
    "mistral": (dict(family="mistral", windows=(16,) * 2), "mixtral"),
    "qwen3": (dict(family="qwen3", qk_norm=True), "qwen3_moe"),
    "qwen2": (dict(family="qwen2", qkv_bias=True), "sheaf"),
}


@pytest.fixture(scope="module")
def dense_models(corpus, tmp_path_factory) -> Path:
    """A folder per family, with a tokenizer; llama trained for a moment."""
    path = tmp_path_factory.mktemp("dense")
    for family, (more, _) in DENSE_FORMS.items():
        config = tiny(vocab_size=320, n_layers=2, dim=32, n_heads=2, n_kv_heads=1, **more)
        M.save_checkpoint(random_model(config), path / family)
    argv = moe_argv(corpus, path / "llama" / "config.json", path / "run", "--steps", 30)
    assert T.main([*argv, "--save-every", "30", "--eval-every", "30", "--lr", "1e-2"]) == 0
    for family in DENSE_FORMS:
        shutil.copy(path / "run" / "tokenizer.model", path / family)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(path / "run" / name, path / "llama")
    return path


@pytest.mark.parametrize("family", DENSE_FORMS)
def test_upcycled_computes_what_the_dense_model_did(dense_models, tmp_path, family):
    """--upcycle: the same logits (fp32, 1e-5), whatever the router; in the family that can say it,
    read back from its folder as it is."""
    init = dense_models / family
    args = T.parse_args(["--init", str(init), "--upcycle", "4", "--upcycle-top-k", "3"])
    config = T.model_config(args)
    dense = M.load_checkpoint(init, dtype=torch.float32)
    model = T.build_model(args, config, torch.device("cpu")).eval()
    assert config.family == DENSE_FORMS[family][1] and config.moe_layers == (0, 1)
    assert M.ModelConfig.from_hf(config.to_hf()) == config == model.config
    tokens = random_tokens(config, 2, 40)
    with torch.no_grad():
        expected = dense(tokens)
        torch.testing.assert_close(model(tokens), expected, rtol=1e-5, atol=1e-5)
        M.save_checkpoint(model, tmp_path)
        torch.testing.assert_close(M.load_checkpoint(tmp_path)(tokens), model(tokens))
        for m in mixtures(model):
            assert 0.005 < m.router.std() < 0.05
            m.router.normal_(0, 1)
        torch.testing.assert_close(model(tokens), expected, rtol=1e-5, atol=1e-5)


def test_upcycled_model_trains_resumes_and_opens_elsewhere(corpus, dense_models, tmp_path):
    """An upcycled run begins at the dense loss and goes below it, its experts part, --resume goes
    on to the last bit; generate.py and transformers open the folder."""
    out, cut, init = tmp_path / "whole", tmp_path / "cut", dense_models / "llama"
    more = ["--init", str(init), "--upcycle", "4", "--steps", "12", "--lr", "5e-3", "--eval-every"]
    argv = lambda to: [*moe_argv(corpus, Path("none"), to), *more, "12", "--save-every", "6"]
    assert T.main(argv(out)) == 0
    real = T.save_run

    def save_and_stop(*args):
        real(*args)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(T, "save_run", save_and_stop)
        assert T.main(argv(cut)) == 130
    assert T.main(["--out", str(cut), "--resume"]) == 0
    assert (cut / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    rows = T.read_metrics(out / "metrics.jsonl")
    dense = T.read_metrics(dense_models / "run" / "metrics.jsonl")
    assert abs(rows[0]["loss"] - dense[-1]["loss"]) < 0.3 and rows[-1]["loss"] < rows[0]["loss"]
    stacks = [w for name, w in load_file(out / T.STATE).items() if name.endswith("w_gate_up")]
    apart = [relative(w[0], w[1]) for w in stacks]
    assert len(apart) == 6 and min(apart) > 1e-3, apart  # weights and both moments, two layers
    args = G.parse_args(["--checkpoint", str(out), "--device", "cpu", "x"])
    model, tokens = (
        G.load(args, torch.device("cpu"))[0],
        random_tokens(mixtral(vocab_size=320), 1, 20),
    )
    assert model.config.family == "mixtral" and model.config.n_experts == 4
    theirs = transformers().AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ours = M.load_checkpoint(out, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-4, atol=1e-4)


def test_what_mixtures_cannot_is_refused(corpus, moe_configs, dense_models, tmp_path, capsys):
    """Each mistake is one line that names the flag, exit code 2, before anything is written."""
    biased, ahead = tmp_path / "biased", tmp_path / "ahead"
    M.save_checkpoint(random_model(tiny(mlp_bias=True)), biased)
    M.save_checkpoint(random_model(tiny(family="sheaf", n_mtp_layers=1)), ahead)
    M.save_checkpoint(random_model(mixtral()), tmp_path / "mixed")
    dense, up = ["--init", str(dense_models / "llama")], ["--upcycle", "4"]
    deepseek = ["--model", str(moe_configs / "deepseek.json")]
    cases = [
        (up, ["--upcycle", "--init"]),
        ([*dense, *up, "--upcycle-top-k", "5"], ["--upcycle-top-k", "--upcycle 4", "not 5"]),
        ([*dense, *up, "--upcycle-top-k", "1"], ["--upcycle-top-k", "from 2", "not 1"]),
        ([*dense, "--upcycle-top-k", "3"], ["--upcycle-top-k goes with --upcycle"]),
        ([*deepseek, "--ep-chunks", "3"], ["--ep-chunks goes with --ep"]),
        ([*dense, "--upcycle", "0"], ["--upcycle", "positive"]),
        (["--init", str(biased), *up], ["--upcycle", "biased", "mlp_bias"]),
        (["--init", str(ahead), *up], ["--upcycle", "ahead", "multi-token"]),
        (["--init", str(tmp_path / "mixed"), *up], ["--upcycle", "mixed", "mixture"]),
        (["--train-draft-head", *dense, *up], ["--upcycle", "leave"]),
        ([*dense, "--aux-loss", "0.1"], ["--aux-loss", "no mixture"]),
        ([*dense, "--z-loss", "0.1"], ["--z-loss", "no mixture"]),
        ([*dense, "--ep", "2"], ["--ep", "no mixture"]),
        ([*deepseek, "--z-loss", "nan"], ["--z-loss", "nan"]),
        ([*deepseek, "--aux-loss", "-1"], ["--aux-loss", "-1"]),
        ([*deepseek, "--ep", "2"], ["--ep 2", "1 ranks"]),
        ([*deepseek, "--ep", "0"], ["--ep", "positive"]),
        ([*deepseek, "--ep-node-size", "2"], ["--ep-node-size goes with --ep"]),
        ([*deepseek, "--ep-chunks", "0"], ["--ep-chunks", "positive"]),
    ]
    new = ["--out", str(tmp_path / "new"), "--data", str(corpus), "--device", "cpu"]
    for argv, words in cases:
        assert T.main([*new, *argv]) == 2, argv
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and all(w in error for w in words), (argv, error)
    assert not (tmp_path / "new").exists()
    args = T.parse_args([*new, *deepseek, "--ep", "3"])
    with pytest.raises(ValueError, match="--ep 3: 8 experts"):
        T.Layout(args, T.model_config(args), 3)
    args = T.parse_args([*new, *deepseek, "--ep", "4", "--ep-node-size", "3"])
    with pytest.raises(ValueError, match="--ep-node-size 3 must divide --ep 4"):
        T.Layout(args, T.model_config(args), 4)


# --- experts over ranks


@pytest.fixture(scope="module")
def lopsided(corpus, moe_configs, tmp_path_factory) -> Path:
    """What ranks are compared with: two steps in one process, then two more by --resume. The first
    mixture's correction has half of the experts, one rank's of two, chosen by nobody."""
    path = tmp_path_factory.mktemp("lopsided")
    config = M.read_config(moe_configs / "deepseek.json")
    config = M.replace(config, n_groups=1, topk_groups=1, group_score_topk=1, family="sheaf")
    model = M.Transformer(config)
    model.init_weights(torch.Generator().manual_seed(0))
    model.layers[1].mlp.correction[4:] = -9.0
    M.save_checkpoint(model, path / "init")
    argv = moe_argv(corpus, moe_configs / "deepseek.json", path / "made", "--steps", 1)
    assert T.main(argv) == 0
    shutil.copy(path / "made" / "tokenizer.model", path / "init")
    assert T.main(ranks_argv(corpus, path, path / "half", "--steps", 2)) == 0
    shutil.copytree(path / "half", path / "whole")
    assert (
        T.main(["--out", str(path / "whole"), "--resume", "--steps", "4", "--device", "cpu"]) == 0
    )
    return path


def ranks_argv(corpus, path: Path, out: Path, *more) -> list[str]:
    losses = ["--sequence-loss", 0.1, "--z-loss", 0.01]
    return moe_argv(corpus, Path("none"), out, "--init", path / "init", *losses, *more)


def under_torchrun(ranks: int, *argv) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", ranks, "--standalone"]
    done = run(*launcher, "train.py", *argv)
    assert done.returncode == 0, done.stderr


def same_training(out: Path, reference: Path) -> None:
    """Losses, gradient norms and loads of all steps; weights and moments; what was exported."""
    rows, expected = (T.read_metrics(p / "metrics.jsonl") for p in (out, reference))
    exact = ("step", "lr", "worst_load", "load_entropy", "dead_experts", "expert_load")
    for a, b in zip(rows, expected, strict=True):
        assert a.keys() == b.keys() and [a.get(k) for k in exact] == [b.get(k) for k in exact]
        for key in ("loss", "mtp_loss", "aux_loss", "grad_norm"):
            assert a[key] == pytest.approx(b[key], rel=1e-5), (key, a, b)
    got, want = load_file(out / T.STATE), load_file(reference / T.STATE)
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert (got[name] - x).norm() <= 1e-5 * x.norm(), name
    got, want = (load_file(p / "model.safetensors") for p in (out, reference))
    assert {n: x.shape for n, x in got.items()} == {n: x.shape for n, x in want.items()}


def test_experts_over_two_ranks_are_one_process(corpus, lopsided, tmp_path):
    """--ep 2 on 2 ranks, of which one gets no token in one layer: the losses, gradient norms,
    loads, weights and Adam moments of one process (fp32, 1e-5), in a checkpoint of the same
    tensors, which one process goes on from."""
    out = tmp_path / "ep"
    under_torchrun(2, *ranks_argv(corpus, lopsided, out, "--steps", 2, "--ep", 2))
    assert T.read_metrics(out / "metrics.jsonl")[-1]["dead_experts"] >= 4
    same_training(out, lopsided / "half")
    assert T.main(["--out", str(out), "--resume", "--steps", "4", "--device", "cpu"]) == 0
    same_training(out, lopsided / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, flags",
    [
        (2, ("--ep", 2, "--experts", "loop")),
        (4, ("--ep", 2, "--ep-chunks", 3)),
        (4, ("--ep", 4)),
        (4, ("--ep", 4, "--ep-node-size", 2, "--ep-chunks", 2)),
    ],
    ids=["loop", "two-groups", "four", "two-level"],
)
def test_experts_over_ranks_are_one_process(corpus, lopsided, tmp_path, ranks, flags):
    """The same of several groups, of nodes, of pieces and of plain experts; and every one of them
    goes on from one process's checkpoint."""
    out = tmp_path / "from-the-start"
    under_torchrun(ranks, *ranks_argv(corpus, lopsided, out, "--steps", 2, *flags))
    same_training(out, lopsided / "half")
    shutil.copytree(lopsided / "half", tmp_path / "resumed")
    more = ("--resume", "--steps", 4, "--device", "cpu", *flags)
    under_torchrun(ranks, "--out", tmp_path / "resumed", *more)
    same_training(tmp_path / "resumed", lopsided / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--fp8", "rowwise"), ("--qat", "int8")], ids=["fp8", "qat"])
def test_other_products_over_ranks(corpus, lopsided, tmp_path, flags):
    """--fp8 and --qat with --ep: the losses of one process with them."""
    one, two = tmp_path / "one", tmp_path / "two"
    assert T.main(ranks_argv(corpus, lopsided, one, *flags)) == 0
    under_torchrun(2, *ranks_argv(corpus, lopsided, two, *flags, "--ep", 2))
    for a, b in zip(*(T.read_metrics(p / "metrics.jsonl") for p in (one, two)), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
