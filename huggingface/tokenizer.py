"""Tokenizers of Hugging Face folders, and incremental detokenization.

The ids of a text depend on up to six files next to the weights. All must be read as they were when
the model was trained, or the model receives wrong prompts. This file reads:

- `tokenizer.json` (byte-level BPE as in GPT-2 and Llama 3, or BPE on sentencepiece pieces), run by
  the tokenizers library; else `tokenizer.model`, run by sentencepiece. Special tokens in the text
  become their ids; characters without a token fall back to UTF-8 bytes.
- `tokenizer_config.json`, or the older `special_tokens_map.json` and `added_tokens.json`: special
  tokens, add_bos_token, the chat template (for chat_template.py).
- `generation_config.json`: additional EOS ids. A text ends at those of config.json, at those of
  this file and at the tokenizer's eos_token (`eos_ids`, for every program). transformers' generate
  leaves out the last; vLLM, SGLang and llama.cpp do not: chat models tuned from a base need it.

Streaming: a token adds bytes, not characters. `token_bytes` returns the bytes of a token, given the
previous one, and one incremental UTF-8 decoder joins them. So a character is emitted with its last
byte, a real U+FFFD is distinguished from an incomplete character, a token costs O(1), and decoding
a whole text equals streaming it by construction.

Equivalence (test_all.py): ids of transformers 5 (AutoTokenizer), with these intended differences:
- tokenizer.model: without add_bos_token in tokenizer_config.json, a text starts with BOS if the
  model has one (transformers: never). Unless tokenizer_class is LlamaTokenizer, white space is
  handled as in training (transformers: no space before the first word). An added token keeps its
  declared id (transformers: the next free id).
- Invalid UTF-8 gives one U+FFFD per invalid sequence (transformers' byte fallback: one per byte
  of the whole run, even for its valid characters, so a stream would have to retract text).
- The text of an added token is its name, with é too (the library: the byte E9 of its alphabet).
- tokenizer.json is used as it is, except for LlamaTokenizer's prefix space (transformers: some
  other classes replace its rules with their own, equal ones for the models they are made for).
- `split_special_tokens`, special tokens defined only by a tokenizer_class, and folders with only
  vocab.json and merges.txt are not supported.

Entry points: load_tokenizer, TextStream. Needs: tokenizers or sentencepiece, each imported only
where it is used. `python huggingface/tokenizer.py` runs a check and times streaming.
"""

from __future__ import annotations

import codecs
import copy
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

SPACE = "\u2581"  # sentencepiece's symbol for a space
MAX_FILE = 2**28  # bytes; the largest tokenizer.json has some 2**25


# --------------------------------------------------------------------------------------------------
# Tokenizer interface and streaming
# --------------------------------------------------------------------------------------------------


class Tokenizer:
    """Tokenizer interface. Subclasses define vocab_size, encode, id_to_token, token_bytes and, for
    training on chats, encode_with_offsets."""

    vocab_size: int  # ids are 0 .. vocab_size - 1, including added tokens
    eos_id: int | None = None  # of its eos_token

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Text -> ids; special tokens in the text become their ids. bos=False adds no
        special tokens (BOS, EOS), for rendered chat templates, which contain them already."""
        raise NotImplementedError

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """encode(text, bos=False), and the span of characters (start, end) of each token. All bytes
        of a character have its span; a token that the tokenizer inserts has an empty one."""
        raise NotImplementedError

    def bos_and_eos(self) -> tuple[list[int], list[int]]:
        """The ids that encode adds before and after a text."""
        own, whole = self.encode("a", bos=False), self.encode("a")
        n = next(i for i in range(len(whole) + 1) if whole[i : i + len(own)] == own)
        return whole[:n], whole[n + len(own) :]

    def id_to_token(self, id: int) -> str:
        """The token as written in the vocabulary; <id> if it is not there."""
        raise NotImplementedError

    def token_bytes(self, id: int, before: int | None) -> bytes | None:
        """The bytes that the token adds after token `before` (None: at the start of the text).
        None for special tokens and ids beyond the vocabulary, which add no text."""
        raise NotImplementedError

    def ranks(self) -> Sequence[Any]:
        """The order in which pieces are merged, beyond the tokens' own, to compare tokenizers of
        one class."""
        return ()

    def encode_continuation(self, text: str) -> list[int]:
        """The ids of text that continues another: no special tokens, no space in front."""
        ids = self.encode(text, bos=False)
        if b"".join(self.token_bytes(id, id) or b"" for id in ids) == text.encode():
            return ids
        return self.encode("\n" + text, bos=False)[len(self.encode("\n", bos=False)) :]

    def decode(self, ids: Sequence[int]) -> str:
        """Ids -> text. Special tokens and ids beyond the vocabulary (padded embedding) are
        skipped."""
        stream = TextStream(self)
        return "".join(map(stream.push, ids)) + stream.finish()

    @cached_property
    def max_token_bytes(self) -> int:
        """Of the longest token: a text of n tokens has at most n times as many."""
        return max(len(self.id_to_token(id).encode()) for id in range(self.vocab_size))

    def encode_prompt(self, text: str, max_bytes: int | None, bos: bool = True) -> list[int]:
        """encode() of a text from a user. ValueError, which the caller puts a name before: it is
        longer than max_bytes (None: no limit), and is not tokenized, or is not valid Unicode."""
        try:
            if len(text.encode()) > (math.inf if max_bytes is None else max_bytes):
                raise ValueError(f"is longer than {max_bytes} bytes, more than the context holds")
            return self.encode(text, bos)
        except UnicodeEncodeError as e:  # JSON can encode lone surrogates
            raise ValueError(f"is not valid Unicode, at character {e.start}") from None

    def piece(self, id: int) -> str:
        """A single token for display: its text, a special token's name, or bytes <0xE2><0x96>."""
        data = self.token_bytes(id, before=id)
        if data is None:
            return self.id_to_token(id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "".join(f"<0x{byte:02X}>" for byte in data)


class TextStream:
    """Incremental detokenizer: ids -> text; an incomplete character is held back.

    With a prompt, the output continues its text: the space before the first word is kept, and bytes
    complete the prompt's last character. Without, the output starts a text, whose first word loses
    its space unless keep_space.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), keep_space: bool = False):
        self.tokenizer, self.keep_space = tokenizer, keep_space
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.before: int | None = None
        for token in prompt:
            self.push(token)

    def push(self, token: int) -> str:
        before = token if self.before is None and self.keep_space else self.before
        data = self.tokenizer.token_bytes(token, before)
        if data is None:
            return ""
        self.before = token
        return self.utf8.decode(data)

    def finish(self) -> str:
        """End of text: U+FFFD if the last character is incomplete, else ""."""
        return self.utf8.decode(b"", final=True)


class StopStrings:
    """Truncates streamed text at the first stop string, which may span tokens.

    The match is the stop string that ends earliest; on a tie, the longest. Special tokens add no
    text, but the name of one in a stop string (`<|im_end|>`) is matched by that token: in `stop`
    and in pushed text it is a mark, a surrogate, which no decoded text has.
    """

    def __init__(self, stop: Sequence[str], tokenizer: Tokenizer | None = None):
        """tokenizer: whose special tokens stop strings may name."""
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise ValueError(f"stop must be a list of non-empty strings, not {stop!r}")
        self.marks: dict[int, str] = {}  # by special token
        self.stop = (
            tuple(stop) if tokenizer is None else tuple(self._mark(s, tokenizer) for s in stop)
        )
        self.hidden = str.maketrans("", "", "".join(self.marks.values()))
        self.pending = ""
        self.found = False

    def _mark(self, stop: str, tokenizer: Tokenizer) -> str:
        for id in tokenizer.encode(stop, bos=False):
            name = tokenizer.id_to_token(id)
            if name in stop and tokenizer.token_bytes(id, id) is None:
                stop = stop.replace(name, self.marks.setdefault(id, chr(0xD800 + len(self.marks))))
        return stop

    def push(self, text: str, may_end: bool = True) -> tuple[str, bool]:
        """Returns (text to emit, whether a stop string was found). Only text that may be the start
        of a stop string is held back; the stop string and text after it are never emitted.
        may_end: whether a stop string may end in this text; else one that does is text."""
        if self.found:
            return "", True
        n_old, text = len(self.pending), self.pending + text
        hits = []
        for s in self.stop:
            start = text.find(s, max(0, n_old + 1 - len(s)))  # of one that ends in the new text
            if may_end and start >= 0:
                hits.append((start + len(s), start))
        if hits:
            self.pending, self.found = "", True
            return text[: min(hits)[1]].translate(self.hidden), True
        end = max(0, len(text) + 1 - max(map(len, self.stop), default=1))
        while end < len(text) and not any(s.startswith(text[end:]) for s in self.stop):
            end += 1
        self.pending = text[end:]
        return text[:end].translate(self.hidden), False

    def finish(self) -> str:
        """End of text: the text that was held back."""
        pending, self.pending = self.pending, ""
        return pending.translate(self.hidden)


@dataclass
class Continuation:
    """The output of one sequence: detokenized text, streamed to on_text, and finish_reason."""

    tokenizer: Tokenizer
    stream: TextStream
    stop: StopStrings
    eos: Sequence[int]
    on_text: Callable[[str], Any]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None  # "eos", "stop" or "length"
    min_tokens: int = 0  # a stop string that ends within the first min_tokens is text

    def push(self, token: int) -> None:
        """Add a token. EOS and stop strings end the text and are not part of it."""
        self.tokens.append(token)
        if token in self.eos:
            return self.end("eos")
        text = self.stop.marks.get(token) or self.stream.push(token)
        text, found = self.stop.push(text, len(self.tokens) > self.min_tokens)
        self._emit(text)
        if found:
            self.end("stop")

    def end(self, reason: str) -> None:
        """No more tokens: emit the text that was held back."""
        if self.finish_reason is None:
            self.finish_reason = reason
            text, _ = self.stop.push(self.stream.finish(), len(self.tokens) > self.min_tokens)
            self._emit(text + self.stop.finish())

    def _emit(self, text: str) -> None:
        self.text += text
        if text:
            self.on_text(text)


def logprob_entry(
    tokenizer: Tokenizer, token: int, logprob: float, best: Sequence[float], ids: Sequence[int]
) -> dict[str, Any]:
    """JSON of a token's log-probability under the model's distribution, and the top tokens."""
    entry = lambda i, lp: {"token": i, "text": tokenizer.piece(i), "logprob": round(lp, 5)}
    return entry(token, logprob) | {"top": [entry(i, lp) for i, lp in zip(ids, best)]}


# --------------------------------------------------------------------------------------------------
# Tokenizer configuration files
# --------------------------------------------------------------------------------------------------


def read_file(path: Path) -> bytes:
    """The bytes of a regular file (to open a FIFO may take for ever). ValueError if it cannot be
    read, or is too large for a tokenizer, a template or a config."""
    if path.exists() and not path.is_dir() and not path.is_file():
        raise ValueError(f"{path}: not a regular file; copy it again")
    try:
        if (size := path.stat().st_size) > MAX_FILE:
            raise ValueError(f"{path}: it has {size} bytes, more than {MAX_FILE}; copy it again")
        return path.read_bytes()
    except OSError as e:
        raise ValueError(f"{path}: cannot be read ({e.strerror}); copy it again") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if the file does not exist."""
    if not os.path.lexists(path):  # a link to a missing file is an error
        return {}
    data = read_file(path)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}: {diagnose_file(data)} ({one_line(e)})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a {type(value).__name__}, not a JSON object; copy it again")
    return value


def diagnose_file(data: bytes) -> str:
    """The likely reason why a file cannot be parsed, and the fix."""
    if not data:
        return "it is empty; copy it again"
    if data.startswith(b"version https://git-lfs"):
        return "it is a git-lfs pointer; `git lfs pull` fetches the file itself"
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", data):
        return (
            "it is a tiktoken file (a base64 token and its rank per line), as Meta publishes; use "
            "tokenizer.json from the model's Hugging Face folder"
        )
    return "it is damaged or truncated; copy it again from its source"


def check_utf8(text: str, name: str) -> str:
    """The text, of an argument or stdin, whose bytes were decoded with surrogateescape. ValueError
    names the first byte that is not UTF-8."""
    try:
        text.encode(errors="surrogateescape").decode()
    except UnicodeDecodeError as e:
        at = f"byte 0x{e.object[e.start]:02x} at offset {e.start}"
        raise ValueError(f"{name} is not UTF-8: {at}; convert it") from None
    return text


def one_line(e: object) -> str:
    """The message in one line."""
    return " ".join(str(e).split())


def printable(text: str) -> str:
    """The text in one line, without control characters or lone surrogates: it may come from a
    client, and a terminal obeys escape sequences."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


TOKEN_FIELDS = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")


@dataclass(frozen=True)
class AddedToken:
    """A token that is matched in the text before the rest is tokenized."""

    content: str
    id: int | None = None  # None: its id in the vocabulary, else the next free one
    special: bool = True  # skipped when decoding
    normalized: bool = False  # matched in the normalized text
    lstrip: bool = False  # also matches white space on its left
    rstrip: bool = False
    single_word: bool = False

    @property
    def flags(self) -> dict[str, bool]:
        return {flag: getattr(self, flag) for flag in FLAGS}


def added_token(value: Any, where: str, special: bool = True) -> AddedToken:
    """AddedToken of JSON: a string, or an object with a content. where: file and field, for
    errors."""
    fields = value if isinstance(value, dict) else {"content": value}
    content = fields.get("content")
    if not isinstance(content, str) or re.search("[\ud800-\udfff]", content):
        raise ValueError(
            f"{where} must be Unicode text, or an object with it as content, not {value!r}"
        )
    flags = {"special": special, "normalized": not special} | fields
    return AddedToken(content, **{f: bool(flags[f]) for f in FLAGS if f in flags})


class TokenizerConfig:
    """tokenizer_config.json. Older ones without added_tokens_decoder are completed, as in
    transformers, by special_tokens_map.json and added_tokens.json. model: the content of
    config.json, if the folder does not have it yet."""

    def __init__(self, folder: Path, model: Mapping[str, Any] | None = None):
        self.path = folder / "tokenizer_config.json"
        self.model = read_json(folder / "config.json") if model is None else model
        self.values = read_json(self.path)
        self.sources = dict.fromkeys(self.values, self.path)
        legacy = "added_tokens_decoder" not in self.values
        if legacy:
            path = folder / "special_tokens_map.json"
            self.values |= read_json(path)
            self.sources |= dict.fromkeys(read_json(path), path)
        named, unnamed = self._named_tokens(), self._unnamed_tokens()
        # {"bos_token": "<s>", ...}
        self.special_tokens = {key: token.content for key, token in named.items()}
        listed = [*named.values(), *unnamed]
        if legacy:
            declared = _read_added_tokens(folder / "added_tokens.json", {t.content for t in listed})
        else:
            declared = self._declared_tokens()
        first: dict[str, AddedToken] = {}
        for token in (*declared, *listed):  # declarations take precedence
            first.setdefault(token.content, token)
        first.pop("", None)
        specials = set(self.special_tokens.values())
        self.added_tokens = [
            replace(t, special=t.special or t.content in specials) for t in first.values()
        ]

    def _where(self, key: str) -> str:
        return f"{self.sources[key]}: {key}"

    def _named_tokens(self) -> dict[str, AddedToken]:
        """bos_token, eos_token, ..., then model-specific ones (image_token, ...)."""
        tokens = {key: self.values[key] for key in TOKEN_FIELDS if self.values.get(key) is not None}
        for key, value in self.values.items():
            if key.endswith("_token") and isinstance(value, (str, dict)):
                tokens.setdefault(key, value)
        named = {key: added_token(value, self._where(key)) for key, value in tokens.items()}
        more = self.values.get("extra_special_tokens")
        if isinstance(more, dict):
            where = self._where("extra_special_tokens")
            named |= {key: added_token(value, f"{where}: {key}") for key, value in more.items()}
        return named

    def _unnamed_tokens(self) -> list[AddedToken]:
        """Special tokens without a name: extra_special_tokens, formerly additional_..."""
        new, old = "extra_special_tokens", "additional_special_tokens"
        key = new if self.values.get(new) else old
        tokens = self.values.get(key) or []
        if isinstance(tokens, dict):  # named, see _named_tokens
            return []
        if not isinstance(tokens, list):
            raise ValueError(f"{self._where(key)} must be a list of tokens, not {tokens!r}")
        return [added_token(token, self._where(key)) for token in tokens]

    def _declared_tokens(self) -> list[AddedToken]:
        """added_tokens_decoder, sorted by id."""
        tokens, where = self.values["added_tokens_decoder"], f"{self.path}: added_tokens_decoder"
        if not isinstance(tokens, dict) or not all(re.fullmatch("[0-9]+", id) for id in tokens):
            raise ValueError(f"{where} must be an object with ids as keys; copy the file again")
        ids = sorted(tokens, key=int)
        return [
            replace(added_token(tokens[id], f"{where}: {id}", special=False), id=int(id))
            for id in ids
        ]

    def flag(self, key: str) -> bool | None:
        """A boolean field; None if it is missing."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{self.path}: {key} must be true or false, not {value!r}")
        return value

    def no_such_token(self, flag: str, name: str) -> ValueError:
        return ValueError(
            f"{self.path}: {flag} is true, but neither {name} nor the tokenizer defines the "
            f"token; set {name}, or {flag} to false"
        )

    @property
    def llama_prefix_space(self) -> str | None:
        """Where transformers' LlamaTokenizer adds a prefix space: "first" (start of text), "always"
        (also after every special token) or "never". None: not a LlamaTokenizer.

        The class overrides the setting of tokenizer.model and tokenizer.json. transformers does not
        use it for other model types such as Mistral, even if tokenizer_config.json names it.
        """
        name = self.values.get("tokenizer_class") or self.model.get("tokenizer_class")
        llama = name in ("LlamaTokenizer", "LlamaTokenizerFast")
        if not llama or self.model.get("model_type") not in ("llama", None):
            return None
        if self.flag("add_prefix_space") is False:
            return "never"
        return "always" if self.flag("legacy") else "first"


def _read_added_tokens(path: Path, special: set[str]) -> list[AddedToken]:
    """added_tokens.json: token -> id."""
    ids = read_json(path)
    if not all(type(id) is int and id >= 0 for id in ids.values()):
        raise ValueError(f"{path}: must map each token to its id, an integer; copy it again")
    return [
        replace(added_token(text, str(path), text in special), id=id)
        for text, id in sorted(ids.items(), key=lambda item: item[1])
    ]


# --------------------------------------------------------------------------------------------------
# Tokenizers
# --------------------------------------------------------------------------------------------------


class SentencePieceTokenizer(Tokenizer):
    """A `tokenizer.model`, with the added tokens of tokenizer_config.json."""

    def __init__(self, path: Path, config: TokenizerConfig):
        model = read_file(path)
        self.prefix_space = config.llama_prefix_space
        try:
            # The file is a protobuf message; fields appended to it override earlier ones. Field 3
            # is normalizer_spec, with 2 = precompiled_charsmap, 3 = add_dummy_prefix,
            # 4 = remove_extra_whitespaces. LlamaTokenizer disables all three.
            no_prefix, no_normalizer = b"\x1a\x02\x18\x00", b"\x1a\x06\x12\x00\x18\x00\x20\x00"
            override = no_normalizer if self.prefix_space else no_prefix
            self.sp_no_prefix = _sentencepiece(model + override)
            self.sp = self.sp_no_prefix if self.prefix_space else _sentencepiece(model)
        except (RuntimeError, UnicodeDecodeError) as e:
            why = diagnose_file(model)
            if model.lstrip().startswith(b"{"):
                why = "it is JSON; rename it to tokenizer.json"
            raise ValueError(f"{path}: not a sentencepiece model: {why} ({one_line(e)})") from None
        has_prefix = self.sp.normalize("a").startswith(SPACE)
        self.strip_first = has_prefix if self.prefix_space is None else self.prefix_space != "never"
        self.space_after_added = config.flag("add_space_prefix") or False  # of a GGUF file
        self._add_tokens(config.added_tokens)
        self.bos_ids, self.eos_ids = self._bos_and_eos(config)

    def _add_tokens(self, added: list[AddedToken]) -> None:
        sp = self.sp
        self.vocab_size = sp.vocab_size()
        control = [i for i in range(self.vocab_size) if sp.is_control(i) or sp.is_unknown(i)]
        self.special = set(control)
        self.added_tokens = {i: sp.id_to_piece(i) for i in control}
        for token in added:
            known = sp.piece_to_id(token.content)
            if token.id is not None:
                id = token.id
            elif sp.id_to_piece(known) == token.content:
                id = known
            else:
                id = self.vocab_size
            self.added_tokens[id] = token.content
            self.vocab_size = max(self.vocab_size, id + 1)
            if token.special:
                self.special.add(id)
        declared = {token.content: token for token in added}
        longest_first = sorted(self.added_tokens.items(), key=lambda item: -len(item[1]))
        matched = [(id, declared.get(s) or AddedToken(s)) for id, s in longest_first]
        self.matched_tokens = [(id, token.lstrip) for id, token in matched]  # by regex group
        alternatives = (_pattern(token) for _, token in matched)
        self.pattern = re.compile("|".join(alternatives) or "(?!)")

    def _bos_and_eos(self, config: TokenizerConfig) -> tuple[list[int], list[int]]:
        """Ids added before and after a text: by tokenizer_config.json, else the model's BOS."""
        ids = {text: id for id, text in self.added_tokens.items()}
        sides = []
        for name, own in (("bos", self.sp.bos_id()), ("eos", self.sp.eos_id())):
            id = ids.get(config.special_tokens.get(f"{name}_token"), own)
            if name == "eos" and id >= 0:
                self.eos_id = id
            wanted = config.flag(f"add_{name}_token")
            if wanted and id < 0:
                raise config.no_such_token(f"add_{name}_token", f"{name}_token")
            if wanted is None:
                wanted = name == "bos" and id >= 0
            sides.append([id] if wanted else [])
        return sides[0], sides[1]

    def encode(self, text: str, bos: bool = True) -> list[int]:
        ids: list[int] = []
        for start, end, added in self._split(text):
            if added is None:
                sp, part = self._prepare(text[start:end], start == 0)
                ids += sp.encode(part)
            else:
                ids.append(added)
        return [*self.bos_ids, *ids, *self.eos_ids] if bos else ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for start, end, added in self._split(text):
            if added is None:
                sp, part = self._prepare(text[start:end], start == 0)
                first = end - len(part)  # before `start` if a space was put in front
                ids += sp.encode(part)
                spans += [(max(start, first + a), first + b) for a, b in _piece_spans(sp, part)]
            else:
                ids.append(added)
                spans.append((start, end))
        return ids, spans

    def _split(self, text: str) -> Iterator[tuple[int, int, int | None]]:
        """The parts of a text, as (start, end, id of the added token that it is, or None)."""
        text.encode()  # raises UnicodeEncodeError with the position of a lone surrogate
        end = 0
        for match in self.pattern.finditer(text):
            id, lstrip = self.matched_tokens[match.lastindex - 1]
            start = end + len(text[end : match.start()].rstrip()) if lstrip else match.start()
            if end < start:
                yield end, start, None
            yield start, match.end(), id
            end = match.end()
        if end < len(text):
            yield end, len(text), None

    def _prepare(self, text: str, at_start: bool) -> tuple[Any, str]:
        """The processor of text between added tokens, and its input."""
        if self.prefix_space is None:
            prefix = at_start or self.space_after_added
            return (self.sp if prefix else self.sp_no_prefix), text
        prefix = self.prefix_space == "always" or (self.prefix_space == "first" and at_start)
        if prefix and not text.startswith((" ", SPACE)):
            text = " " + text
        return self.sp_no_prefix, text

    def ranks(self) -> Sequence[Any]:
        return [*map(self.sp.get_score, range(self.sp.vocab_size()))]

    def encode_continuation(self, text: str) -> list[int]:
        return self.sp_no_prefix.encode(text)

    def id_to_token(self, id: int) -> str:
        if id in self.added_tokens:
            return self.added_tokens[id]
        return self.sp.id_to_piece(id) if 0 <= id < self.sp.vocab_size() else f"<{id}>"

    def token_bytes(self, id: int, before: int | None) -> bytes | None:
        known = id in self.added_tokens or 0 <= id < self.sp.vocab_size()
        if id in self.special or not known:
            return None
        name = self.id_to_token(id)
        data = _parse_byte_token(name) or name.replace(SPACE, " ").encode()
        return data.removeprefix(b" ") if before is None and self.strip_first else data


def _parse_byte_token(name: str) -> bytes | None:
    """The byte of a byte-fallback token such as <0x0A>."""
    return bytes([int(name[3:5], 16)]) if re.fullmatch("<0x[0-9A-Fa-f]{2}>", name) else None


def _sentencepiece(model: bytes) -> Any:
    import sentencepiece

    sp = sentencepiece.SentencePieceProcessor()
    sp.LoadFromSerializedProto(model)
    return sp


def _piece_spans(sp: Any, text: str) -> Iterator[tuple[int, int]]:
    """The span of characters of each piece of sp.encode(text)."""
    normalized, origin = sp.normalize(text, with_offsets=True)
    chars = [i for i, c in enumerate(normalized) for _ in c.encode()]  # of each byte
    start = 0
    for piece in sp.encode(text, out_type=str):
        end = start + (1 if _parse_byte_token(piece) else len(piece.encode()))
        yield origin[chars[start]], origin[chars[end - 1] + 1]
        start = end


def _pattern(token: AddedToken) -> str:
    r"""A regular expression with one group, the token. White space on its left is stripped after
    the match: a leading \s* would be tried at every space of a run, in quadratic time."""
    left, right = (r"(?<!\w)", r"(?!\w)") if token.single_word else ("", "")
    return f"{left}({re.escape(token.content)}){right}" + (r"\s*" if token.rstrip else "")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's bytes_to_unicode, inverted: printable bytes are themselves, others U+0100 and up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = (b for b in range(256) if b not in printable)
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


BYTE_LEVEL_ALPHABET = _byte_alphabet()


class JSONTokenizer(Tokenizer):
    """A `tokenizer.json`, run by the tokenizers library.

    The file itself defines the tokens added around a text; as in transformers 5, add_bos_token of
    tokenizer_config.json does not change it.
    """

    def __init__(self, path: Path, config: TokenizerConfig):
        import tokenizers

        data = read_file(path)
        try:
            self.tk = tokenizers.Tokenizer.from_buffer(data)
        except Exception as e:  # the Rust library raises plain Exception
            why = diagnose_file(data)
            if _is_json(data):
                why = "it is other JSON, or of a newer version; copy it, or upgrade tokenizers"
            raise ValueError(
                f"{path}: not a tokenizer of the tokenizers library: {why} ({one_line(e)})"
            ) from None
        self.tk.no_truncation()
        self.tk.no_padding()
        if config.llama_prefix_space and b'"ByteLevel"' not in data:
            self._use_llama_prefix_space(config.llama_prefix_space)
        self._add_tokens(config.added_tokens)
        if (eos := config.special_tokens.get("eos_token")) is not None:
            self.eos_id = self.tk.token_to_id(eos)
        adds_nothing = not self.tk.encode("").ids
        no_bos = "bos_token" not in config.special_tokens and adds_nothing
        if config.flag("add_bos_token") and no_bos:
            raise config.no_such_token("add_bos_token", "bos_token")
        decoder = self.tk.decoder.__getstate__() if self.tk.decoder else b""
        self.byte_level = b'"ByteLevel"' in decoder
        self.byte_fallback = b'"ByteFallback"' in decoder
        self.strip_first = b'"Strip"' in decoder

    def _use_llama_prefix_space(self, scheme: str) -> None:
        from tokenizers import decoders, pre_tokenizers

        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if scheme != "never":
            steps.append(decoders.Strip(" ", 1, 0))
        self.tk.normalizer = None
        self.tk.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme, split=False)
        self.tk.decoder = decoders.Sequence(steps)

    def _add_tokens(self, added: list[AddedToken]) -> None:
        from tokenizers import AddedToken as Added

        known = {token.content for token in self.tk.get_added_tokens_decoder().values()}
        new = [token for token in added if token.content not in known or token.id is not None]
        self.tk.add_tokens([Added(token.content, **token.flags) for token in new])
        self.added_tokens = self.tk.get_added_tokens_decoder()
        self.special = {i for i, t in self.added_tokens.items() if t.special}
        self.vocab_size = max(self.tk.get_vocab().values(), default=-1) + 1

    def encode(self, text: str, bos: bool = True) -> list[int]:
        text.encode()  # raises UnicodeEncodeError with the position of a lone surrogate
        return self.tk.encode(text, add_special_tokens=bos).ids

    @cached_property
    def _without_post_processor(self) -> Any:
        """A copy without what adds BOS, and takes the spaces off the offsets of tokens."""
        copied = copy.deepcopy(self.tk)
        copied.post_processor = None
        return copied

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        text.encode()  # as in encode
        encoding = self._without_post_processor.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def ranks(self) -> Sequence[Any]:
        model = json.loads(self.tk.to_str())["model"]
        return [model["type"], *model.get("merges", ())]

    def _name(self, id: int) -> str | None:
        return self.tk.id_to_token(id) if 0 <= id < self.vocab_size else None

    def id_to_token(self, id: int) -> str:
        return self._name(id) or f"<{id}>"

    def token_bytes(self, id: int, before: int | None) -> bytes | None:
        name = self._name(id)
        if id in self.special or name is None:
            return None
        if self.byte_level:
            # the name of an added token is plain text, as in llama.cpp; the library's decoder takes
            # "é" for the byte E9 (tokenizers issue 1996)
            if id in self.added_tokens or not set(name) <= BYTE_LEVEL_ALPHABET.keys():
                return name.encode()
            return bytes(BYTE_LEVEL_ALPHABET[c] for c in name)
        if self.byte_fallback and (data := _parse_byte_token(name)):
            return data.removeprefix(b" ") if before is None and self.strip_first else data
        if before is None:
            return self.tk.decode([id]).encode()
        return self.tk.decode([before, id])[len(self.tk.decode([before])) :].encode()


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


class DummyTokenizer(Tokenizer):
    """For dummy weights: encodes text as bytes, decodes ids as <id>."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def encode(self, text: str, bos: bool = True) -> list[int]:
        return [byte % self.vocab_size for byte in text.encode()]

    def id_to_token(self, id: int) -> str:
        return f"<{id}>"

    def token_bytes(self, id: int, before: int | None) -> bytes | None:
        return self.id_to_token(id).encode()


# Tokenizers in other formats: Mistral's, Kimi's and Qwen's, GPT-2's
OTHER_TOKENIZERS = ("tekken.json", "tokenizer.model.v*", "*tiktoken*", "vocab.json", "vocab.txt")


def load_tokenizer(
    folder: str | os.PathLike, config: Mapping[str, Any] | None = None
) -> Tokenizer:  # fmt: skip
    """The tokenizer of a Hugging Face folder: tokenizer.json if it exists, else tokenizer.model.

    config: the content of config.json, if the folder does not have it yet. ValueError if the
    tokenizer has more tokens than its vocab_size."""
    folder = Path(folder)
    kinds = {"tokenizer.json": JSONTokenizer, "tokenizer.model": SentencePieceTokenizer}
    for name, kind in kinds.items():
        if os.path.lexists(folder / name):
            settings = TokenizerConfig(folder, config)
            tokenizer, size = kind(folder / name, settings), settings.model.get("vocab_size")
            if isinstance(size, int) and tokenizer.vocab_size > size:
                raise ValueError(
                    f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, but vocab_size in "
                    f"config.json is {size}; use the model's own tokenizer, or resize its embedding"
                )
            return tokenizer
    fix = "copy one from the model's source"
    if found := [path.name for pattern in OTHER_TOKENIZERS for path in folder.glob(pattern)]:
        fix = f"{found[0]} is not read: copy or make a tokenizer.json of it"
    raise ValueError(f"{folder}: holds neither {' nor '.join(kinds)}; {fix}")


def eos_ids(
    folder: Path, config_ids: Sequence[int], tokenizer: Tokenizer | None = None
) -> tuple[int, ...]:
    """All ids that end a text: of config.json (config_ids), of generation_config.json, then the
    tokenizer's eos_token. tokenizer: the folder's, if it is loaded already. ValueError names the
    file and the field."""
    path = folder / "generation_config.json"
    more = read_json(path).get("eos_token_id")
    more = [] if more is None else more if isinstance(more, list) else [more]
    if not all(type(id) is int for id in more):
        raise ValueError(f"{path}: eos_token_id must be an int or a list of ints, not {more!r:.60}")
    size = read_json(folder / "config.json").get("vocab_size", 2**31)
    if more and not any(0 <= id < size for id in more):  # some may be of a larger model's tokens
        raise ValueError(f"{path}: eos_token_id is {more!r:.60}, but the model has {size} tokens")
    own = (load_tokenizer(folder) if tokenizer is None else tokenizer).eos_id
    return tuple(dict.fromkeys((*config_ids, *more, *(() if own is None else (own,)))))


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


class _ByteTokenizer(Tokenizer):
    """A token is a byte."""

    vocab_size = 256

    def encode(self, text: str, bos: bool = True) -> list[int]:
        return list(text.encode())

    def token_bytes(self, id: int, before: int | None) -> bytes | None:
        return bytes([id])


def check() -> None:
    """Streaming must equal decoding the whole text."""
    text = "naïve 日本語 🦙 \N{REPLACEMENT CHARACTER} e\u0301"
    tokenizer = _ByteTokenizer()
    stream = TextStream(tokenizer)
    shown = [stream.push(byte) for byte in tokenizer.encode(text)]
    assert "".join(shown) + stream.finish() == text == tokenizer.decode(tokenizer.encode(text))
    assert [s for s in shown if s] == list(text)
    stop = StopStrings(["</s>", "<|end|>"])
    assert [stop.push(c)[0] for c in "a<|s</s>b"] == ["a", "", "", "<|s", "", "", "", "", ""]
    assert stop.found


def benchmark(tokens: int = 200_000) -> None:
    """Microseconds per token of detokenization and stop strings."""
    tokenizer = _ByteTokenizer()
    ids = tokenizer.encode("def quicksort(items): ...\n" * (tokens // 26))
    for name, stop in (("TextStream", []), ("and two StopStrings", ["</s>", "\nclass "])):
        stream, stops = TextStream(tokenizer), StopStrings(stop)
        start = time.perf_counter()
        for id in ids:
            stops.push(stream.push(id))
        print(f"{name:>20}: {(time.perf_counter() - start) / len(ids) * 1e6:.2f} us per token")


if __name__ == "__main__":
    check()
    benchmark()
