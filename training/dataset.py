"""The data set of a training run: from --data to batches of token rows.

Prepares the tokenizer (that of --init, or trained on the documents) and, in OUT, the token files
or, with --pack, --workers or several sources, shards of rows; for --task sft, conversations
rendered with the chat template. This file applies the flags to data.py, shards.py and chats.py;
rank 0 writes, the other ranks wait.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import io
import sys
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

from huggingface.chat_template import load_chat_template
from huggingface.tokenizer import Tokenizer, eos_ids, load_tokenizer
from huggingface.weights import write_atomically
from model import ModelConfig
from training import shards
from training.chats import Messages, chat_rows, padding_hint, read_conversations
from training.config import TrainConfig
from training.data import (
    BOS,
    EOS,
    Delimiters,
    document_delimiters,
    get_batch,
    is_padding,
    is_validation,
    list_some,
    read_tokens,
    split_documents,
    stream_documents,
    training_documents,
    validation_documents,
    write_tokens,
)
from training.dist_env import DistEnv, rank0_first, same_on_all_ranks
from training.run_folder import (
    TOKEN_FILES,
    TOKENIZERS,
    checkpoint_files,
    copy_files,
    file_hash,
    folder_hash,
    read_inputs,
    record_files,
    verify_files,
    verify_input,
)

# Used if --init has no chat template; BOS and EOS are replaced by the names of those of documents
DEFAULT_CHAT_TEMPLATE = """BOS{% for m in messages %}<{{ m['role'] }}>
{{ m['content'] }}{{ 'EOS' if m['role'] == 'assistant' else '' }}
{% endfor %}{{ '<assistant>\\n' if add_generation_prompt else '' }}"""


def train_tokenizer(texts: list[str], vocab_size: int) -> bytes:
    """Train a sentencepiece BPE model; returns its serialized bytes. Decoding restores the text
    exactly (except U+2581, sentencepiece's mark for a space).

    Whitespace is kept, and runs of it are pieces: sixteen spaces of indentation, or ":" with its
    newline, cost one token. Unknown characters fall back to bytes.
    """
    pieces = (text[i : i + 4000] for text in texts for i in range(0, len(text), 4000))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=pieces, model_writer=model, model_type="bpe", vocab_size=vocab_size,
            byte_fallback=True, character_coverage=0.9999, split_digits=True,
            normalization_rule_name="identity", add_dummy_prefix=False,
            remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
            max_sentence_length=20000, hard_vocab_limit=False,
            unk_id=0, bos_id=BOS, eos_id=EOS, pad_id=-1, minloglevel=2,
        )  # fmt: skip
    except RuntimeError as e:
        error = f"--data: too little text to train a tokenizer with {vocab_size} pieces ({e})"
        raise ValueError(error) from None
    return model.getvalue()


def prepare_tokenizer(args: TrainConfig, texts: Iterable[str], vocab_size: int) -> None:
    """Write OUT's tokenizer unless --resume finds it: that of --init, or trained on `texts`."""
    if args.resume and any((args.out / name).exists() for name in TOKENIZERS):
        return
    if args.init is None:
        model = train_tokenizer([*texts], vocab_size)
        copy_files(None, args.out)
        write_atomically(args.out / TOKENIZERS[0], lambda tmp: tmp.write_bytes(model))
        return
    if not any((args.init / name).exists() for name in TOKENIZERS):
        raise ValueError(f"--init {args.init}: has neither {' nor '.join(TOKENIZERS)}")
    eos_ids(args.init, ())  # ValueError now, not when OUT has its files
    copy_files(args.init, args.out)


def make_encoder(folder: Path, config: ModelConfig) -> Callable[[list[str]], list[list[int]]]:
    """A function from texts to token ids without BOS and EOS, using the tokenizer in `folder`: the
    ids of generate.py. ValueError if it has more tokens than the model."""
    tokenizer = load_tokenizer(folder, config.to_hf())
    return lambda texts: [tokenizer.encode(text, bos=False) for text in texts]


ReadRows = Callable[[int, Sequence[int]], Tensor]  # step, indices in its batch -> (n, T + 1)


@dataclass(frozen=True)
class Dataset:
    """Training batches and the validation set: rows (R, T + 1), or tokens (n,)."""

    rows: ReadRows | None
    validation: Tensor | None
    size: int | None  # training tokens, of conversations without padding; None: not known yet
    fingerprint: Any  # detects changed data on --resume; None: not known yet
    jobs: Mapping[str, Dataset] | None = None  # of --lora-jobs
    padding: int = 0  # inputs of an epoch that are padding


def build_dataset(args: TrainConfig, config: ModelConfig, env: DistEnv) -> Dataset:
    """The data set of --task, and OUT's tokenizer. Collective."""
    rank0_first(env, lambda: verify_files(args.out) if args.resume else None)
    text = args.task not in ("sft", "dpo", "grpo")  # those read JSONL
    dataset = (prepare_text if text else prepare_task)(args, config, env)
    rank0_first(env, lambda: None if args.resume else record_files(args.out))
    return dataset


def prepare_text(args: TrainConfig, config: ModelConfig, env: DistEnv) -> Dataset:
    """The data set of --task text. Rank 0 writes OUT's tokenizer and token files; with --workers a
    thread continues to tokenize during training. Collective."""
    given = shards.parse_sources(args.data or ())
    paths = [source.path for source in given] or [None]

    def write() -> None:
        for failed in args.out.glob(f"data/*/{shards.FAILED}"):  # of an earlier start
            failed.unlink()
        names = TOKEN_FILES[1:] if args.streamed else TOKEN_FILES
        complete = all((args.out / name).exists() for name in names)
        complete &= not args.pack or shards.read_index(args.out / "data" / "held") is not None
        if not (args.resume and complete):
            write_token_files(args, config, paths)
            verify_files(args.out)  # with --resume: one was missing, and the data must be the same

    rank0_first(env, write)
    validation, B, T = open_tokens(args, "val", "validation"), args.batch_size, args.seq_len
    if args.pack:
        rows = shards.Shards(args.out / "data" / "held", shard_metadata(args, "held"))
        validation = torch.stack([rows.row(i) for i in range(len(rows))])
    if not args.streamed:
        tokens = open_tokens(args, "train", "training")
        rows = lambda step, i: get_batch(tokens, args.seed, step, i, B, T)
        return Dataset(rows, validation, len(tokens), len(tokens))
    folders = {path: args.out / "data" / str(i) for i, path in enumerate(paths)}
    if args.resume and not all(map(shards.read_index, folders.values())):
        rank0_first(env, lambda: verify_input(args, "data"))  # the rest of it will be tokenized
    if env.rank == 0:
        tokenize = partial(write_shards, args, config, folders)
        threading.Thread(target=tokenize, daemon=True).start() if args.workers else tokenize()
    # no timeout: another source may be written first; a failed writer is reported
    open_shards = lambda path: shards.Shards(folders[path], shard_metadata(args, path), timeout=1e9)
    sources = [open_shards(path) for path in folders]
    weights = [source.weight for source in given] or [1]
    stream = shards.Stream(sources, weights, args.seed, B)
    finished = all(source.finished for source in sources)
    fingerprint = [len(source) for source in sources] if finished else None
    size = sum(fingerprint) * T if finished else None
    return Dataset(stream.rows, validation, size, fingerprint)


def write_token_files(args: TrainConfig, config: ModelConfig, paths: Sequence[str | None]) -> None:
    """Write OUT's tokenizer and validation tokens; training tokens too, unless documents are
    streamed into shards."""
    left_out: list[str] = []
    if args.streamed:
        val = [text for path in paths for text in validation_documents(path, left_out.append)]
        train = (text for path in paths for _, text in training_documents(path))
        val = val or [*islice(train, 1)]
    else:
        train, val = split_documents(list(stream_documents(paths[0], left_out.append)))
    if left_out:
        files = list_some(left_out)
        print(f"--data: left out of the text: {files}", file=sys.stderr)
    prepare_tokenizer(args, train, config.vocab_size)
    make = partial(make_encoder, args.out, config)
    encode, delimiters = make(), read_delimiters(args.out, config)
    write_tokens(args.out / "val.tokens", encode, val, delimiters)
    if args.pack:
        folder, about = args.out / "data" / "held", shard_metadata(args, "held")
        settings = dict(delimiters=delimiters, about=about)
        shards.tokenize([*enumerate(val)], make, folder, args.seq_len, True, **settings)
    if not args.streamed:
        write_tokens(args.out / "train.tokens", encode, train, delimiters)


def prepare_task(args: TrainConfig, config: ModelConfig, env: DistEnv) -> Dataset:
    """The data set of --task sft: conversations as rows; for dpo and grpo, which read --data in
    build_objective, only OUT's tokenizer and chat template. Collective."""

    def fingerprints() -> dict[str, str]:
        for path in args.data:
            check_jsonl(path, args.task)
        return {
            f"the content of --data {i + 1}": file_hash(Path(p)) for i, p in enumerate(args.data)
        }

    same_on_all_ranks(env, fingerprints)  # each rank reads them

    def write() -> None:
        prepare_tokenizer(args, (), config.vocab_size)
        if load_chat_template(args.out) is None:
            text, tokenizer = DEFAULT_CHAT_TEMPLATE, load_tokenizer(args.out, config.to_hf())
            for name, ids in zip(("BOS", "EOS"), document_delimiters(tokenizer, config.eos_ids)):
                text = text.replace(name, "".join(map(tokenizer.id_to_token, ids)))
            path = args.out / "chat_template.jinja"
            write_atomically(path, lambda tmp: tmp.write_text(text, encoding="utf-8"))

    rank0_first(env, write)
    fingerprint = [file_hash(Path(path)) for path in args.data]
    if args.task != "sft":
        return Dataset(None, None, None, fingerprint)
    chats = [chat for path in args.data for chat in read_conversations(Path(path))]
    train, val = train_val_split(chats)
    rest = *load_chat(args.out, config), args.seq_len, args.pack
    rows, validation = chat_rows(train, *rest), chat_rows(val, *rest)
    for part, numbers, what in ((rows, train, "training"), (validation, val, "validation")):
        if not len(part):
            items = list_some([str(n) for n in numbers])
            raise ValueError(
                f"--data {' '.join(args.data)}: the chat template leaves nothing to predict in the "
                f"{what} conversations {items}; give the assistant's turns content"
            )
    if env.rank == 0 and (hint := padding_hint(rows, "--pack")):
        print(hint, file=sys.stderr)
    stream = shards.Stream([shards.Rows(rows)], [1], args.seed, args.batch_size)
    padding = int(is_padding(rows).sum())
    size = rows[:, 1:].numel() - padding
    return Dataset(stream.rows, validation, size, fingerprint, padding=padding)


def check_jsonl(path: str, task: str) -> None:
    """ValueError unless a --data of --task sft, dpo or grpo is a file."""
    if Path(path).is_file():
        return
    why = "no such file; if it has moved, give --data its new place"
    if Path(path).exists():
        why = f"must be a JSONL file with --task {task}, not a folder"
    elif Path(path.rpartition("=")[0]).is_file():
        why = f"--task {task} has no weights of sources; give {path.rpartition('=')[0]}"
    raise ValueError(f"--data {path}: {why}")


def train_val_split(items: Sequence[Any]) -> tuple[dict[int, Any], dict[int, Any]]:
    """(training items, validation items), each {number from 1: item}. One in 16 is for validation,
    or the last if there are few; a single item is used for both."""
    numbers = range(1, 1 + len(items))
    val = [n for n in numbers if is_validation(str(n - 1))] or [*numbers][-1:]
    train = [n for n in numbers if n not in {*val}] or val
    return {n: items[n - 1] for n in train}, {n: items[n - 1] for n in val}


def load_chat(
    folder: Path, config: ModelConfig | None = None
) -> tuple[Callable[..., str], Tokenizer]:  # fmt: skip
    """The chat template, (messages, add_generation_prompt, tools) -> text, and the tokenizer, as in
    generate.py --chat. config: of the model, if its config.json is not in the folder yet."""
    template = load_chat_template(folder)
    tokenizer = load_tokenizer(folder, config.to_hf() if config else None)

    def render(messages: Messages, start: bool, tools: list[Any] | None = None) -> str:
        return template.render(messages, add_generation_prompt=start, tools=tools)

    return render, tokenizer


def write_shards(args: TrainConfig, config: ModelConfig, folders: Mapping[Any, Path]) -> None:
    """Tokenize the training documents of each source into its folder of shards."""
    make = partial(make_encoder, args.out, config)
    delimiters, T = read_delimiters(args.out, config), args.seq_len
    for i, (path, folder) in enumerate(folders.items()):
        train = training_documents(path)
        settings = dict(delimiters=delimiters, about=shard_metadata(args, path))
        try:
            shards.tokenize(train, make, folder, T, args.pack, args.workers, **settings)
        except Exception as e:  # the readers of later sources must not wait for them
            for later in [*folders.values()][i + 1 :]:
                later.mkdir(parents=True, exist_ok=True)
                (later / shards.FAILED).write_text(f"{e}\n", encoding="utf-8")
            raise


def shard_metadata(args: TrainConfig, path: str | None) -> dict[str, Any]:
    """What the rows of a source depend on: data, tokenizer, row length, packing."""
    texts = ("chat_template.jinja", "generation_config.json")  # have no effect on rows
    files = [(p.name, p) for p in checkpoint_files(args.out) if p.name not in texts]
    data: Any = str(path)  # of older runs
    if hashes := read_inputs(args.out).get("data"):
        paths = [source.path for source in shards.parse_sources(args.data or ())] or [None]
        data = hashes[paths.index(path)][1] if path in paths else [path, hashes]
    rest = {"seq_len": args.seq_len, "pack": args.pack}
    return {"data": data, "tokenizer": folder_hash(files), **rest}


def read_delimiters(folder: Path, config: ModelConfig) -> Delimiters:
    """Token ids around a document, by the tokenizer in `folder`."""
    return document_delimiters(load_tokenizer(folder, config.to_hf()), config.eos_ids)


def open_tokens(args: TrainConfig, name: str, what: str) -> Tensor:
    """Memory-map OUT/NAME.tokens. ValueError if it is shorter than one row."""
    tokens = read_tokens(args.out / f"{name}.tokens")
    if len(tokens) < args.seq_len + 1:
        few = f"{len(tokens)} {what} tokens are too few for --seq-len {args.seq_len}"
        given = " ".join(("--data", *(args.data or ())))
        raise ValueError(f"{given}: {few}; give more text, or reduce --seq-len")
    return tokens
