"""The drafter of --speculate, and the Speculator that runs it, from the flags of generate.py.

    ngram    what followed the last tokens earlier in the text, or in --reference
    draft    a smaller model with the same vocabulary (--draft-model)
    tree     that model's likeliest continuations as a tree; staged: an n-gram drafter drafts for it
    mtp      the checkpoint's own multi-token prediction layers
    exit     the first layers of the model itself (--set exit_layers)
    head     a head on the hidden states that train.py --task draft-head has trained
    grammar  the tokens that --regex or --json-schema forces, before any of the above

speculative.py has the drafters; they run forwards through a runner and a cache, which differ:
build_speculator gives them contiguous caches for generation/speculation.py, and
serving/paged_drafting.py calls build_drafter with paged ones for the Engine.

Cost: a cache for a draft model, and cache slots that only drafts use (lookahead_slots). What a
model cannot do with drafts is refused here: a ValueError names the flag.

Equivalence (test_all.py): that of speculation.py, for every drafter. Needs: speculative.py,
generation/draft_trees.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from generation.config import GenerateConfig
from generation.draft_trees import TreeDrafter
from generation.early_exit import slice_layers
from generation.prompt import read_text
from generation.speculation import RejectionSampler, Speculator, TreeSpeculator
from generation.speculation_length import Confidence, FixedK, Goodput, TreeGoodput
from generation.structured import MAX_FORCED_TOKENS, ForcedPolicy, ForcedTokens
from huggingface.tokenizer import Tokenizer
from model import KVCache, ModelConfig, Transformer
from speculative import (
    ContiguousRunner,
    DraftHead,
    DraftModel,
    DraftRunner,
    HeadDrafter,
    MTPDrafter,
    NGram,
)  # fmt: skip

MAX_DRAFT_TOKENS = 8  # most drafts per step with --speculate-k auto
MAX_TREE_NODES = 12  # most drafts per step with --speculate tree or staged and --speculate-k auto
MAX_CONFIDENT_TOKENS = 16  # most drafts per step with --speculate-k confidence
TREES = ("tree", "staged")  # --speculate whose drafts are a tree
# Assumed acceptance rate of a draft model's first, second, ... choice before any is measured
RANK_PRIOR = (0.6, 0.15, 0.07, 0.04)

# --------------------------------------------------------------------------------------------------
# How many drafts
# --------------------------------------------------------------------------------------------------


def lookahead_slots(args: GenerateConfig) -> int:
    """Cache slots that only drafts use: their maximum number, twice that with a drafter's own
    guesses or drafts ahead, rounded up to a power of two and at least MAX_TREE_NODES, and one for
    padding."""
    forced = 0 if args.sampling_params.grammar is None else MAX_FORCED_TOKENS
    drafts = max_draft_tokens(args) << (args.speculate == "staged" or args.draft_ahead)
    return 1 + max(1 << (drafts - 1).bit_length(), MAX_TREE_NODES, forced)


def max_draft_tokens(args: GenerateConfig) -> int:
    """The most drafts of a step (nodes of a tree) that --speculate-k allows."""
    if args.speculate_k.isdecimal():
        return int(args.speculate_k)
    if args.speculate_k == "confidence":
        return MAX_CONFIDENT_TOKENS
    return MAX_TREE_NODES if args.speculate in TREES else MAX_DRAFT_TOKENS


def new_policy(args: GenerateConfig, drafter: Any) -> FixedK | Goodput:
    """The policy of --speculate-k, which a drafter that stops by confidence asks too."""
    policies = {"auto": Goodput, "confidence": Confidence}
    policy = policies.get(args.speculate_k, FixedK)(max_draft_tokens(args))
    if args.speculate_k == "confidence":
        drafter.confidence = policy
    return policy


def raise_mla_absorb_limit_(args: GenerateConfig, model: Transformer) -> None:
    """Use absorbed MLA for verification steps as for decode steps. Call before building a
    Decoder."""
    for module in model.modules():
        if hasattr(module, "absorb_up_to"):
            module.absorb_up_to = max(module.absorb_up_to, lookahead_slots(args))


# --------------------------------------------------------------------------------------------------
# The Speculator of a Decoder
# --------------------------------------------------------------------------------------------------


def build_speculator(
    args: GenerateConfig,
    decoder: Any,
    tokenizer: Tokenizer,
    load: Callable[[str], tuple[Transformer, Tokenizer]],
) -> Speculator:
    """The Speculator of --speculate for a Decoder. load: name -> model and tokenizer of
    --draft-model. ValueError names the flag."""
    check_supported(args, decoder)
    verifier = RejectionSampler(decoder.sampler, args.draft_coupled, args.forced_acceptance)
    drafter = build_decoder_drafter(args, decoder, tokenizer, load, verifier)
    max_drafts, slots = max_draft_tokens(args), lookahead_slots(args)
    if args.speculate in TREES:
        is_auto = args.speculate_k == "auto"
        sizes = [2, 4, 8, MAX_TREE_NODES] if is_auto else [max_drafts]
        policy = partial(TreeGoodput, sizes, RANK_PRIOR, not is_auto)
        inner = None
        if args.speculate == "staged":
            inner = NGram(references=references(args, tokenizer))
        drafter = TreeDrafter(drafter, verifier.sample_children, inner)
        return TreeSpeculator(decoder, drafter, policy, verifier, slots)
    policy = partial(new_policy, args, drafter)
    compile_fn = decoder.graph_runner if decoder.compiled else None
    options = verifier, slots, compile_fn, args.draft_ahead
    speculator = Speculator(decoder, drafter, policy, *options)
    if decoder.compiled:
        speculator.warm_up(max_drafts)
    return speculator


def check_supported(args: GenerateConfig, decoder: Any) -> None:
    """ValueError names the flag that the decoder's model or rows exclude."""
    check_rope_scaling(decoder.model)
    option = decoder.model.config.contiguous_only
    if args.speculate in TREES and option:
        raise ValueError(
            f"--speculate {args.speculate} does not support {option}: use --speculate ngram"
        )
    one_row = "--set draft_ahead=true" if args.draft_ahead else "--speculate staged"
    if decoder.batch > 1 and (args.draft_ahead or args.speculate == "staged"):
        raise ValueError(f"{one_row} requires --n 1: it drafts for one row; use --speculate draft")


def check_rope_scaling(model: Transformer) -> None:
    """ValueError for a model whose keys depend on the number of tokens in a forward call."""
    if model.config.has_dynamic_rope:
        raise ValueError(
            "--speculate cannot be combined with rope_scaling 'dynamic': its frequencies depend on "
            "the length of a forward call, which drafts change; remove --speculate"
        )


def build_decoder_drafter(
    args: GenerateConfig,
    decoder: Any,
    tokenizer: Tokenizer,
    load: Callable[[str], tuple[Transformer, Tokenizer]],
    verifier: RejectionSampler,
) -> Any:
    """build_drafter with contiguous caches, as the Decoder's."""
    device, dtype = decoder.token.device, decoder.cache.k[0].dtype

    def sample_draft(logits: Tensor, rows: Sequence[int], i: int) -> tuple[Tensor, Tensor | None]:
        return verifier.sample_draft(logits, None if len(rows) == decoder.batch else rows, i)

    def make_runner(forward: Callable[..., Tensor], cache: KVCache) -> ContiguousRunner:
        static_forward = None
        if decoder.compiled:
            static_forward = decoder.graph_runner(
                lambda tokens, positions, hidden: forward(tokens, positions, cache.attend, hidden)
            )
        return ContiguousRunner(forward, cache, device, decoder.batch, static_forward)

    def new_cache(config: ModelConfig) -> KVCache:
        return KVCache(config, decoder.batch, decoder.cache.max_len, dtype, device)

    return build_drafter(
        args, decoder.model, tokenizer, load, sample_draft, make_runner, decoder.cache, new_cache
    )


def jump_forced_tokens(decoder: Any, slots: int) -> None:
    """Make a Decoder draft the tokens that a grammar forces, before those of --speculate. slots: as
    of lookahead_slots."""
    sampler, speculator = decoder.sampler, decoder.speculator
    if decoder.model.config.has_dynamic_rope:
        return  # see check_rope_scaling: no drafts

    def state_of(row: int) -> tuple[Any, Any]:
        return sampler.grammars[row], sampler.states[row]

    drafter = ForcedTokens(state_of, speculator and speculator.drafter)
    if speculator is None:
        new_policy = partial(ForcedPolicy, drafter)
        decoder.speculator = Speculator(
            decoder, drafter, new_policy, RejectionSampler(sampler), slots
        )
    elif not isinstance(speculator, TreeSpeculator):  # whose step has one tree for all rows
        new_policy = speculator.new_policy
        speculator.drafter = drafter
        speculator.new_policy = lambda: ForcedPolicy(drafter, new_policy())
        speculator.reset()


# --------------------------------------------------------------------------------------------------
# Drafters
# --------------------------------------------------------------------------------------------------


def build_drafter(
    args: GenerateConfig,
    model: Transformer,
    tokenizer: Tokenizer,
    load: Callable[[str], tuple[Transformer, Tokenizer]],
    sample_draft: Callable,
    make_runner: Callable[[Callable[..., Tensor], Any], DraftRunner],
    cache: Any,
    new_cache: Callable[[ModelConfig], Any],
) -> Any:
    """The drafter of --speculate. load: name -> model and tokenizer of --draft-model; make_runner:
    (forward, cache) -> a DraftRunner; cache: the target's; new_cache: config -> a cache for a
    drafter's model. ValueError names the flag."""
    kind = args.speculate
    if kind == "ngram":
        return NGram(references=references(args, tokenizer))
    if kind == "mtp":
        if not len(model.mtp):
            raise ValueError(
                f"--speculate mtp: {args.checkpoint} has no multi-token prediction layers "
                "(num_nextn_predict_layers in config.json); use --speculate ngram"
            )
        return MTPDrafter(make_runner(_mtp_forward(model), cache), model.head, sample_draft)
    if kind == "exit":
        max_layers = model.config.n_layers - 1
        if max_layers < 1:
            raise ValueError("--speculate exit requires a model with two or more layers, not one")
        layers = args.exit_layers or model.config.n_layers // 2
        if layers > max_layers:
            raise ValueError(f"--set exit_layers must be from 1 to {max_layers}, not {layers}")
        early = slice_layers(model, 0, layers)
        runner = make_runner(_base_forward(early), cache)
        return DraftModel(runner, early.head, sample_draft, shared=True)
    if kind == "head":
        if args.draft_model is None and args.dummy is not None:
            raise ValueError("--speculate head with --dummy requires --draft-model DIR")
        head = load_draft_head(args.draft_model or str(args.checkpoint), model)
        return HeadDrafter(head, model.embed, model.head, sample_draft)
    name = args.draft_model
    if name is None and args.dummy is None:
        name = _shipped_draft_model(args.checkpoint)
    if name is None:
        raise ValueError(
            f"--speculate {kind} requires --draft-model DIR, a smaller model with the same "
            "vocabulary"
        )
    draft, draft_tokenizer = load(name)
    check_vocabulary(f"--draft-model {name}", draft, draft_tokenizer, model, tokenizer)
    runner = make_runner(_base_forward(draft), new_cache(draft.config))
    return DraftModel(runner, draft.head, sample_draft)


def references(args: GenerateConfig, tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of --reference."""
    if args.reference is None:
        return []
    return [tokenizer.encode(read_text(args.reference, "--reference"), False)]


def _base_forward(model: Transformer) -> Callable[..., Tensor]:
    return lambda tokens, positions, attend, hidden: model(
        tokens, positions, attend, return_hidden=True
    )


def _mtp_forward(model: Transformer) -> Callable[..., Tensor]:
    return lambda tokens, positions, attend, hidden: model.mtp_forward(
        hidden, tokens, positions, attend
    )


def _shipped_draft_model(checkpoint: Path) -> str | None:
    """The draft model shipped with checkpoints/small."""
    shipped = Path(__file__).resolve().parents[1] / "checkpoints"
    is_small = checkpoint.resolve() == shipped / "small"
    return str(shipped / "draft") if is_small else None


def check_vocabulary(
    what: str,
    draft: Transformer,
    draft_tokenizer: Tokenizer,
    model: Transformer,
    tokenizer: Tokenizer,
) -> None:
    """ValueError if draft and target model do not have the same vocabulary."""
    a, b = draft.config.vocab_size, model.config.vocab_size
    if a != b:
        raise ValueError(
            f"{what}: its vocabulary has {a} tokens and the target's {b}; use a draft model of the "
            "target's family"
        )
    for i in range(tokenizer.vocab_size):
        target_piece, draft_piece = tokenizer.piece(i), draft_tokenizer.piece(i)
        if target_piece != draft_piece:
            raise ValueError(
                f"{what}: its token {i} is {draft_piece!r} and the target's {target_piece!r}; use "
                "a draft model of the target's family"
            )


def load_draft_head(folder: str, model: Transformer) -> DraftHead:
    """The draft head that train.py --task draft-head wrote. ValueError names the file."""
    path = Path(folder) / "draft_head.safetensors"
    if not path.exists():
        raise ValueError(
            f"--speculate head: there is no {path}; train one with train.py --task draft-head, or "
            "give its folder as --draft-model DIR"
        )
    try:
        tensors = load_file(path)
    except Exception as e:
        raise ValueError(f"{path}: not a safetensors file ({e})") from None
    C, weight = model.config.dim, model.embed.weight
    up = tensors.get("up.weight")
    if up is None:
        raise ValueError(f"{path}: not a draft head (no up.weight); train one for this model")
    if up.shape[1] != 2 * C:
        raise ValueError(
            f"{path}: has hidden size {up.shape[1] // 2} and the model's {C}; train a head for it"
        )
    head = DraftHead(C, up.shape[0])
    expected = {name: p.shape for name, p in head.state_dict().items()}
    if expected != {name: t.shape for name, t in tensors.items()}:
        raise ValueError(
            f"{path}: must have exactly the tensors {', '.join(expected)}, in this model's shapes"
        )
    head.load_state_dict(tensors)
    return head.to(weight.device, weight.dtype).eval()
