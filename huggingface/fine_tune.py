"""Tokenizer, chat template and EOS of a fine-tune: which folder they come from.

A LoRA adapter, or a full fine-tune beside its base, is served on the base's tokenizer: one batch
has one vocabulary. Its folder has files of its own all the same: instruction tuning brings a chat
template, often an EOS token, and PEFT's users save the tokenizer with it. One rule holds for every
program (generate.py --adapter, --adapters and --models of --batch and --serve, replicas):

    tokenizer       the base's; one in the fine-tune's folder must give the same ids, or it is
                    refused (`check_same_tokenizer`): the weights were trained on other ids
    chat template   the fine-tune's own, else the base's
    EOS ids         the base's, and those that the fine-tune's files add

Proof (test_all.py): prompts and results of every program with and without a template of its own.
Cost of a folder with a tokenizer: a few seconds for 100,000 tokens, when it is loaded.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from huggingface.chat_template import ChatTemplate, load_chat_template
from huggingface.tokenizer import Tokenizer, TokenizerConfig, eos_ids, load_tokenizer, read_json

RULES = [  # texts that tokenizers of equal tokens encode in several ways
    "  a\u0301\u00e1 \ufb01\u2460\uff21\u00b2 \u00a0\u200b\u3000\u2019s \0\t\t \n \n\n\r\n12345",
    "I'm WE'LL 'S 123\n\n!!\n?!  \n ..\u4e2d\u6587 \U0001f999  ",
    "",
]


@dataclass(frozen=True)
class TextFormat:
    """What turns a conversation into a prompt, and what ends an answer."""

    template: ChatTemplate | None = None
    eos_ids: tuple[int, ...] = ()


class FineTune(NamedTuple):
    """A fine-tune for those that parse requests; the pools of models have more."""

    text_format: TextFormat | None


def template_of(
    name: Any, fine_tunes: Mapping[str, FineTune], default: ChatTemplate | None
) -> ChatTemplate | None:
    """The chat template of a request that names one of the fine-tunes, or the model itself."""
    format = fine_tunes[name].text_format if type(name) is str and name in fine_tunes else None
    return default if format is None else format.template


def load_text_format(
    folder: Path, config_ids: Sequence[int], tokenizer: Tokenizer
) -> TextFormat:  # fmt: skip
    """Of a model's own folder. config_ids: the EOS ids of its config.json. ValueError names the
    file."""
    return TextFormat(load_chat_template(folder), eos_ids(folder, config_ids, tokenizer))


def load_fine_tune_format(
    base: Path, format: TextFormat, tokenizer: Tokenizer, folder: Path
) -> TextFormat:  # fmt: skip
    """Of a fine-tune in `folder`. format, tokenizer: the base's. ValueError names the file, or says
    what differs, without the base's path."""
    config = TokenizerConfig(folder, read_json(base / "config.json"))
    check_same_tokenizer(tokenizer, folder, config)
    template = load_chat_template(folder, TokenizerConfig(base).special_tokens)
    ids = (*format.eos_ids, *eos_ids(folder, (), tokenizer))
    if eos := config.special_tokens.get("eos_token"):
        ids += (_token_ids(tokenizer)[eos],)
    return TextFormat(format.template if template is None else template, (*dict.fromkeys(ids),))


def _token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Of each token; of two with one name, the later, as an added token is."""
    return {tokenizer.id_to_token(id): id for id in range(tokenizer.vocab_size)}


def check_same_tokenizer(tokenizer: Tokenizer, folder: Path, config: TokenizerConfig) -> None:
    """ValueError if a fine-tune's tokenizer files give other ids, or other text, than `tokenizer`,
    the base's. config: of the fine-tune's folder."""
    fix = "remove its tokenizer files if it was trained on the base model's tokens, or merge it"
    if any(os.path.lexists(folder / name) for name in ("tokenizer.json", "tokenizer.model")):
        own = load_tokenizer(folder, config.model)
        if (what := _difference(own, tokenizer)) is not None:
            other = f"its tokenizer has other {what} than the base model's"
            raise ValueError(f"{folder}: {other}; {fix}")
        return
    known = _token_ids(tokenizer)
    for token in config.added_tokens:
        id = known.get(token.content)
        is_special = id is not None and tokenizer.token_bytes(id, id) is None
        if id is None or token.id not in (None, id) or token.special > is_special:
            which = f"{token.content!r} (id {token.id}) is no such token of the base model"
            raise ValueError(f"{config.path}: {which}; {fix}")


def _difference(a: Tokenizer, b: Tokenizer) -> str | None:
    """What differs between two tokenizers; None if nothing does. Beside the tokens and merges, the
    ids of texts with every token after and before a space, a letter, a line's end and nothing, and
    of what normalizers change and pre-tokenizers split: equal rules have several forms, as in
    tokenizer.model."""
    tokens = lambda t: [(t.id_to_token(i), t.token_bytes(i, i)) for i in range(t.vocab_size)]
    if tokens(a) != tokens(b):
        return "tokens"
    if type(a) is type(b) and a.ranks() != b.ranks():
        return "merges"
    pieces = ["", *map(b.piece, range(b.vocab_size)), ""]
    texts = [around.join(pieces) for around in (" ", "", "x", "\n")]
    texts = [*texts, texts[0].swapcase(), *RULES]
    if any(a.encode(text, bos) != b.encode(text, bos) for text in texts for bos in (True, False)):
        return "rules"
    return None
