"""dataset.py: what a run of train.py reads, from --data to rows of tokens.

The tokenizer, which is that of --init or is trained on the documents; the token files or, with
--pack, --workers or several sources, the shards of rows, in OUT; of --task sft the conversations,
put through the chat template. data.py does the work; here the flags say of what, and ranks wait for
the first, which writes.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import argparse
import hashlib
import io
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from torch import Tensor

from huggingface.tokenizer import load_chat_template, load_tokenizer
from huggingface.weights import write_atomically
from model import ModelConfig
from parallelism.dist_env import DistEnv, rank0_first
from training import data
from training.data import BOS, EOS, get_batch, read_documents, read_tokens, split, write_tokens

TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
         "added_tokens.json", "chat_template.jinja")  # fmt: skip
# Where --init has no chat template; BOS and EOS become its tokens' names
DEFAULT_CHAT_TEMPLATE = """BOS{% for m in messages %}<{{ m['role'] }}>
{{ m['content'] }}{{ 'EOS' if m['role'] == 'assistant' else '' }}
{% endfor %}{{ '<assistant>\\n' if add_generation_prompt else '' }}"""


def train_tokenizer(texts: list[str], vocab_size: int) -> bytes:
    """A sentencepiece BPE model that gives text back unchanged (but U+2581, its mark for a space).

    Whitespace is kept as it is, and runs of it are pieces: sixteen spaces of indentation, or ":"
    with its newline, cost one token. Unknown characters fall back to bytes.
    """
    pieces = (text[i : i + 4000] for text in texts for i in range(0, len(text), 4000))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=pieces,
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9999,
            split_digits=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=20000,
            hard_vocab_limit=False,
            unk_id=0,
            bos_id=BOS,
            eos_id=EOS,
            pad_id=-1,
            minloglevel=2,
        )
    except RuntimeError as e:
        raise ValueError(
            f"--data: too little text for a tokenizer of {vocab_size} pieces ({e})"
        ) from None
    return model.getvalue()


def prepare_tokenizer(args: argparse.Namespace, texts: Iterable[str], vocab_size: int) -> None:
    """OUT's tokenizer: there already, that of --init, or trained on `texts`."""
    path = args.out / "tokenizer.model"
    if args.resume and any((args.out / name).exists() for name in TOKENIZER_FILES[:2]):
        return
    if args.init is None:
        model = train_tokenizer([*texts], vocab_size)
        write_atomically(path, lambda tmp: tmp.write_bytes(model))
        return
    there = [name for name in TOKENIZER_FILES if (args.init / name).exists()]
    if not {*TOKENIZER_FILES[:2]} & {*there}:
        raise ValueError(
            f"--init {args.init}: has no tokenizer.model to tokenize --data with, nor a "
            "tokenizer.json"
        )
    for name in there:
        content = (args.init / name).read_bytes()
        write_atomically(args.out / name, lambda tmp: tmp.write_bytes(content))


def make_encoder(folder: Path, vocab_size: int) -> Callable[[list[str]], list[list[int]]]:
    """Texts to ids, by the tokenizer in `folder`, nothing put around them. ValueError if it has
    more pieces than the model."""
    path = folder / "tokenizer.model"
    if not path.exists():
        tokenizer = load_tokenizer(folder)
        return lambda texts: [tokenizer.encode(text, bos=False) for text in texts]
    try:
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as e:
        raise ValueError(f"{path}: not a sentencepiece model ({e})") from None
    if pieces.vocab_size() > vocab_size:
        raise ValueError(
            f"{path}: {pieces.vocab_size()} pieces do not fit vocab_size {vocab_size} of "
            "config.json"
        )
    return pieces.encode


Stream = Callable[[int, Sequence[int]], Tensor]  # step, samples of its batch -> rows (n, T + 1)


@dataclass(frozen=True)
class Dataset:
    """What a run reads: rows of the batches, and of validation (R, T + 1), or tokens (n,)."""

    rows: Stream | None
    held: Tensor | None
    size: int | None  # tokens to train on; None: not known (yet)
    mark: Any  # by which a resumed run knows that it is the same; None: not known yet


@dataclass
class NextToken:
    """The objective of texts and chats: what comes next, in `mine` of each batch's rows."""

    rows: Stream
    mine: Sequence[int]
    row = {}  # nothing more to be said

    def batch(self, step: int) -> Tensor:
        return self.rows(step, self.mine)


def prepare_text(args: argparse.Namespace, config: ModelConfig, place: DistEnv) -> Dataset:
    """Documents to rows. The first rank writes OUT's tokenizer and token files; with --workers it
    goes on doing so while steps are made. Collective."""
    paths = [s.path for s in data.parse_sources(args.data or ())] or [None]

    def write() -> None:
        if not (args.resume and (args.out / "val.tokens").exists()):
            write_token_files(args, config, paths)

    rank0_first(place, write)
    held, B, T = open_tokens(args, "val", "held-out"), args.batch_size, args.seq_len
    if args.pack:
        rows = data.Shards(args.out / "data" / "held", shard_metadata(args, "held"))
        held = torch.stack([rows.row(i) for i in range(len(rows))])
    if not args.streamed:
        tokens = open_tokens(args, "train", "training")
        rows = lambda step, i: get_batch(tokens, args.seed, step, i, B, T)
        return Dataset(rows, held, len(tokens), len(tokens))
    folders = {path: args.out / "data" / str(i) for i, path in enumerate(paths)}
    if place.rank == 0:
        write = partial(write_shards, args, config, folders)
        threading.Thread(target=write, daemon=True).start() if args.workers else write()
    # another source may be written first, for long; a writer that fails says so
    opened = [data.Shards(at, shard_metadata(args, path), patience=1e9) for path, at in folders.items()]
    weights = [s.weight for s in data.parse_sources(args.data or ())] or [1]
    stream = data.Stream(opened, weights, args.seed, B)
    whole = all(source.finished for source in opened)
    mark = [len(source) for source in opened] if whole else None
    return Dataset(stream.rows, held, sum(mark) * T if whole else None, mark)


def write_token_files(args: argparse.Namespace, config: ModelConfig, paths: Sequence[str | None]) -> None:
    """OUT's tokenizer, and its token files: of what is held out; of all else, unless it goes into
    shards, and then documents are read one by one."""
    if args.streamed:
        each = [data.stream_documents(path) for path in paths]
        held = [text for docs in each for name, text in docs if data.is_validation(name)]
        kept = (text for path in paths for name, text in data.stream_documents(path)
                if not data.is_validation(name))  # fmt: skip
        held = held or [*islice(kept, 1)]
    else:
        kept, held = split(read_documents(paths[0]))
    prepare_tokenizer(args, kept, config.vocab_size)
    how = make_encoder(args.out, config.vocab_size), document_delimiters(config)
    write_tokens(args.out / "val.tokens", how[0], held, how[1])
    if args.pack:
        make, named = partial(make_encoder, args.out, config.vocab_size), [*enumerate(held)]
        rows, about = args.out / "data" / "held", shard_metadata(args, "held")
        data.tokenize(named, make, rows, args.seq_len, True, ends=how[1], about=about)
    if not args.streamed:
        write_tokens(args.out / "train.tokens", how[0], kept, how[1])


def prepare_task(args: argparse.Namespace, config: ModelConfig, place: DistEnv) -> Dataset:
    """The tokenizer and chat template of --init; of --task sft its conversations as rows. What dpo
    and grpo read, `objective_of` does. Collective."""
    for one in args.data:
        if not Path(one).is_file():
            raise ValueError(
                f"--data {one}: --task {args.task} reads a JSONL file, one for a --data"
            )

    def write() -> None:
        prepare_tokenizer(args, (), config.vocab_size)
        if load_chat_template(args.out) is None:
            names = map(load_tokenizer(args.out).name, (config.bos_id or BOS, *config.eos_ids[:1]))
            text = DEFAULT_CHAT_TEMPLATE.replace("BOS", next(names)).replace("EOS", next(names, ""))
            path = args.out / "chat_template.jinja"
            write_atomically(path, lambda tmp: tmp.write_text(text, encoding="utf-8"))

    rank0_first(place, write)
    mark = [hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] for path in args.data]
    if args.task != "sft":
        return Dataset(None, None, None, mark)
    chats = [chat for path in args.data for chat in data.read_conversations(Path(path))]
    kept, held = train_val_split(chats)
    how = *load_chat(args.out), args.seq_len, args.pack
    rows, held = data.chat_rows(kept, *how), data.chat_rows(held, *how)
    stream = data.Stream([data.Rows(rows)], [1], args.seed, args.batch_size)
    return Dataset(stream.rows, held, rows[:, 1:].numel(), mark)


def train_val_split(items: Sequence[Any]) -> tuple[dict[int, Any], dict[int, Any]]:
    """({number from 1: item} to train on, to validate with): one in 16, of few the last. (Of a
    single one, it is both.)"""
    numbers = range(1, 1 + len(items))
    held = [n for n in numbers if data.is_validation(str(n - 1))] or [*numbers][-1:]
    kept = [n for n in numbers if n not in {*held}] or held
    return {n: items[n - 1] for n in kept}, {n: items[n - 1] for n in held}


def load_chat(folder: Path) -> tuple[Callable[..., str], Callable[[str], list[int]]]:
    """(messages, add_generation_prompt) -> text, and text -> ids, as in generate.py --chat."""
    template, tokenizer = load_chat_template(folder), load_tokenizer(folder)

    def render(messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        return template.render(messages, add_generation_prompt=add_generation_prompt)

    return render, partial(tokenizer.encode, bos=False)


def write_shards(
    args: argparse.Namespace, config: ModelConfig, folders: Mapping[str | None, Path]
) -> None:
    """Tokenize each source's training documents into its folder of rows."""
    make = partial(make_encoder, args.out, config.vocab_size)
    for path, folder in folders.items():
        kept = ((n, text) for n, text in data.stream_documents(path) if not data.is_validation(n))
        how = args.seq_len, args.pack, args.workers
        about = shard_metadata(args, path)
        data.tokenize(kept, make, folder, *how, ends=document_delimiters(config), about=about)


def shard_metadata(args: argparse.Namespace, path: str | None) -> dict[str, Any]:
    """What a source's rows are made of."""
    name = next(name for name in TOKENIZER_FILES[:2] if (args.out / name).exists())
    tokenizer = hashlib.sha256((args.out / name).read_bytes()).hexdigest()[:16]
    return {"data": str(path), "tokenizer": tokenizer, "seq_len": args.seq_len, "pack": args.pack}


def document_delimiters(config: ModelConfig) -> data.Ends:
    """What stands around a document: the model's first tokens, if it has them, and its last."""
    begin = [config.bos_id] if config.bos_id is not None else []
    return begin, list(config.eos_ids[:1])


def open_tokens(args: argparse.Namespace, name: str, what: str) -> Tensor:
    """OUT/NAME.tokens. ValueError: there are too few."""
    tokens = read_tokens(args.out / f"{name}.tokens")
    if len(tokens) < args.seq_len + 1:
        raise ValueError(
            f"--data: {len(tokens)} {what} tokens are too few for --seq-len {args.seq_len}; "
            "give more text, or shorter sequences"
        )
    return tokens
