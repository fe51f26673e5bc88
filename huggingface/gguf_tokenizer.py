"""Tokenizer and chat template of a GGUF file's metadata <-> the files of a Hugging Face folder.

llama.cpp's tokenizer "llama" is sentencepiece's BPE: pieces with scores and types. They become a
tokenizer.model, a protobuf message, which is read and written here without the protobuf package.
"gpt2" is byte-level BPE: tokens, merges, and the name of the regular expressions that split a text
first. They become a tokenizer.json. A name that is unknown here is refused, since other expressions
give other ids.

Equivalence (test_all.py): llama.cpp's ids; written and read again, those of the original. Known
differences: llama.cpp does not normalize to NFC, as Qwen's tokenizer.json does; it writes its space
before every text after a special token, so a tokenizer.model that comes from GGUF does too.
Needs: sentencepiece or tokenizers, through huggingface/tokenizer.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface.chat_template import chat_template_texts
from huggingface.tokenizer import SentencePieceTokenizer, TokenizerConfig, load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types, also sentencepiece's
NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # Hugging Face's, GGUF's
START = "tokenizer.ggml."
EOS = [f"{START}{name}_token_id" for name in ("eos", "eot", "eom")]
FLAGS = ("add_bos_token", "add_eos_token", "add_space_prefix")
# llama.cpp's values of fields that a file lacks (llama-vocab.cpp). Its ids for "gpt2", 11, are none
# of GPT-2's, and are left out
DEFAULT_IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}  # of model "llama"
# llama.cpp ends a text at tokens with these names, too
END_TOKENS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>")
END_IDS = "sheaf.eos_token_ids"  # in a file written here: these and the tokenizer's, by no name

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]", "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED = (  # the letters of DeepSeek's tokenizer.json
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ"
    "ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ"
    "\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
SPLITS: dict[str, tuple[str, ...]] = {  # tokenizer.ggml.pre -> expressions, applied in turn
    "gpt-2": (_GPT2,),
    "llama-bpe": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "qwen2": (_LLAMA3.replace("{1,3}", ""),),
    "tekken": (_TEKKEN,),
    "smollm": (r"\p{N}", _GPT2),
    "deepseek-llm": (
        "[\r\n]", rf"\s?[{_CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$",
        "[一-龥ࠀ-一가-퟿]+", r"\p{N}",
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}  # fmt: skip
SYNONYMS = dict.fromkeys(("llama3", "llama-v3", "falcon3", "pixtral"), "llama-bpe")
SYNONYMS["deepseek-r1-qwen"] = "qwen2"
WHOLE_WORDS = ("llama-bpe", "tekken")  # a word that is a token is not merged; BOS by default


def read(path: Path, metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """The tokenizer files of a Hugging Face folder: name -> content. ValueError names the field."""
    meta = _checked(path, metadata)
    tokens, types = meta["tokens"], meta["token_type"]
    config: dict[str, Any] = {}
    for hf, name in NAMES.items():
        id = meta.get(f"{name}_token_id")
        if id is not None and types[id] not in (NORMAL, BYTE):
            config[f"{hf}_token"] = tokens[id]
    added = config["added_tokens_decoder"] = {
        str(id): {"content": tokens[id], "special": kind != USER_DEFINED}
        for id, kind in enumerate(types)
        if kind in (CONTROL, USER_DEFINED)
    }
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise ValueError(f"{path}: tokenizer.chat_template must be text, not {template!r}")
    if template is not None:
        config["chat_template"] = template
    if meta["model"] == "llama":
        config |= {flag: meta[flag] for flag in FLAGS}
        files = {"tokenizer.model": _pieces_model(meta)}
    else:
        files = {"tokenizer.json": json.dumps(_bpe_json(meta, added)).encode()}
    return files | {"tokenizer_config.json": json.dumps(config).encode()}


def with_defaults(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata with llama.cpp's values of the tokenizer's fields that it lacks, so that all
    readers have the same."""
    meta = {k.removeprefix(START): x for k, x in metadata.items() if k.startswith(START)}
    is_pieces, tokens = meta.get("model") == "llama", meta.get("tokens")
    tokens = tokens if isinstance(tokens, list) else []
    meta["pre"] = SYNONYMS.get(str(meta.get("pre")), meta.get("pre"))
    defaults: dict[str, Any] = {"add_eos_token": False, "add_space_prefix": True}
    defaults["add_bos_token"] = is_pieces or meta["pre"] in WHOLE_WORDS
    if is_pieces:
        named = END_IDS not in metadata  # otherwise what it lacks is not there
        defaults |= {k: id for k, id in DEFAULT_IDS.items() if named and id < len(tokens)}
        defaults["scores"] = [0.0] * len(tokens)
    meta = defaults | meta
    if "token_type" not in meta:
        meta["token_type"] = _token_types(meta, tokens)
    return {**metadata, **{START + name: value for name, value in meta.items()}}


def _token_types(meta: Mapping[str, Any], tokens: Sequence[Any]) -> list[int]:
    """The types of a file that has none: by the special ids and the names."""
    is_byte = lambda t: meta.get("model") == "llama" and re.fullmatch("<0x[0-9A-F]{2}>", str(t))
    types = [BYTE if is_byte(t) else CONTROL if t in END_TOKENS else NORMAL for t in tokens]
    for name, kind in (("bos", CONTROL), ("eos", CONTROL), ("unknown", UNKNOWN)):
        id = meta.get(f"{name}_token_id")
        if type(id) is int and 0 <= id < len(types):
            types[id] = kind
    return types


def end_ids(metadata: Mapping[str, Any]) -> list[Any]:
    """config.json's eos_token_id, of metadata with defaults; not checked yet."""
    tokens, ids = metadata.get(f"{START}tokens"), metadata.get(END_IDS)
    given = [metadata[key] for key in EOS if key in metadata]
    if isinstance(ids, list):  # gguf's tools may have changed the others since
        ids = ids + [metadata[key] for key in EOS[1:] if key in metadata]
    else:
        names = enumerate(tokens if isinstance(tokens, list) else ())
        ids = given + [id for id, token in names if token in END_TOKENS]
    return [id for i, id in enumerate(ids) if id not in ids[:i]]


def write_end_ids(ids: Sequence[int], own: int | None = None) -> dict[str, Any]:
    """The metadata of config.json's ids and of the tokenizer's own, which comes first, since chat
    templates write its name: llama.cpp's fields, which are three, and all of them."""
    first = [] if own is None else [own]
    fields = dict(zip(EOS, [*first, *(id for id in ids if id not in first)]))
    return fields | ({END_IDS: [*ids] or first} if ids or first else {})


def _checked(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the tokenizer. ValueError names the field unless it is complete and known."""
    meta = {k.removeprefix(START): x for k, x in with_defaults(metadata).items() if START in k}
    is_pieces = meta.get("model") == "llama"
    n = len(meta["tokens"]) if isinstance(meta.get("tokens"), list) else 0
    good = {"model": meta.get("model") in ("llama", "gpt2")}
    good["pre"] = is_pieces or meta["pre"] in list(SPLITS)
    lists = {"tokens": str, "token_type": int}
    lists |= {"scores": float} if is_pieces else {"merges": str}
    for name, kind in lists.items():
        value = meta.get(name)
        good[name] = isinstance(value, list) and all(type(item) is kind for item in value)
        if good[name] and name != "merges":
            good[name] = len(value) == n > 0
    good["tokens"] = good["tokens"] and len(set(meta["tokens"])) == n
    good |= {name: isinstance(meta[name], bool) for name in FLAGS}
    for name in (*NAMES.values(), "eot", "eom"):
        id = meta.get(f"{name}_token_id", 0)
        good[f"{name}_token_id"] = type(id) is int and 0 <= id < n
    known = {"model": "; known: llama, gpt2", "pre": f"; known: {', '.join(SPLITS)}"}
    for name, is_good in good.items():
        if not is_good:
            value = meta.get(name)
            value = f"a list of {len(value)}" if isinstance(value, list) else repr(value)
            raise ValueError(
                f"{path}: tokenizer.ggml.{name} is {value}, which does not fit its {n} tokens"
                f"{known.get(name, '')}"
            )
    return meta


def _bpe_json(meta: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer.json of the tokenizers library."""
    vocab = {token: id for id, token in enumerate(meta["tokens"])}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    split = lambda regex: {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated",
                           "invert": False}  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps = [*map(split, SPLITS[meta["pre"]]), level | {"use_regex": False}]
    around: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    specials = {}
    for name, at in (("bos", 0), ("eos", 2)):
        if meta[f"add_{name}_token"] and f"{name}_token_id" in meta:
            token = meta["tokens"][meta[f"{name}_token_id"]]
            around.insert(at, {"SpecialToken": {"id": token, "type_id": 0}})
            specials[token] = {"id": token, "ids": [vocab[token]], "tokens": [token]}
    template = {"type": "TemplateProcessing", "single": around, "pair": around}
    return {
        "version": "1.0",
        "added_tokens": [{"id": int(id), **flags, **token} for id, token in added.items()],
        "normalizer": {"type": "NFC"} if meta["pre"] == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": template | {"special_tokens": specials},
        "decoder": level | {"use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": meta["merges"],
                  "ignore_merges": meta["pre"] in WHOLE_WORDS},
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------
# sentencepiece's tokenizer.model: ModelProto of sentencepiece_model.proto
# --------------------------------------------------------------------------------------------------

# fields: ModelProto 1 pieces, 2 trainer_spec, 3 normalizer_spec; SentencePiece 1 piece, 2 score,
# 3 type; TrainerSpec 3 model_type (2: BPE), 35 byte_fallback, 40-43 unk, bos, eos, pad id, 45-48
# their pieces; NormalizerSpec 2 precompiled_charsmap, 3 add_dummy_prefix,
# 4 remove_extra_whitespaces


def _varint(n: int) -> bytes:
    out, n = bytearray(), n % 2**64
    while n > 127:
        out.append(n % 128 + 128)
        n //= 128
    return bytes([*out, n])


def _field(number: int, value: int | float | bytes) -> bytes:
    """A protobuf field: a varint, a float32 or bytes."""
    if isinstance(value, bytes):
        return _varint(number * 8 + 2) + _varint(len(value)) + value
    if isinstance(value, float):
        return _varint(number * 8 + 5) + struct.pack("<f", value)
    return _varint(number * 8) + _varint(value)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a protobuf message."""
    at = 0

    def varint() -> int:
        nonlocal at
        n = shift = 0
        while True:
            byte, at = data[at], at + 1
            n |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return n

    while at < len(data):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            yield number, varint()
            continue
        size = varint() if wire == 2 else 8 if wire == 1 else 4
        value, at = data[at : at + size], at + size
        yield number, struct.unpack("<f", value)[0] if wire == 5 else value


def _pieces_model(meta: Mapping[str, Any]) -> bytes:
    """A tokenizer.model of the pieces, without normalization."""
    rows = zip(meta["tokens"], meta["scores"], meta["token_type"])
    pieces = (_field(1, t.encode()) + _field(2, score) + _field(3, kind) for t, score, kind in rows)
    trainer = _field(3, 2) + _field(35, int(BYTE in meta["token_type"]))
    for i, name in enumerate(("unk", "bos", "eos", "pad")):
        id = meta.get(f"{NAMES[name]}_token_id", -1)
        trainer += _field(40 + i, id)
        trainer += b"" if id < 0 else _field(45 + i, meta["tokens"][id].encode())
    prefix = _field(3, int(meta["add_space_prefix"]))
    normalizer = _field(1, b"identity") + prefix + _field(4, 0) + _field(5, 1)
    return b"".join(_field(1, p) for p in pieces) + _field(2, trainer) + _field(3, normalizer)


# --------------------------------------------------------------------------------------------------
# Writing
# --------------------------------------------------------------------------------------------------


def write(folder: Path, vocab_size: int) -> dict[str, Any]:
    """The metadata of a folder's tokenizer and chat template, padded to vocab_size tokens.
    ValueError if llama.cpp has no such tokenizer."""
    config, path = TokenizerConfig(folder), folder / "tokenizer.model"
    if path.exists():
        meta = _write_pieces(path, config)
    else:
        tokenizer = load_tokenizer(folder)
        meta = _write_bpe(folder / "tokenizer.json", json.loads(tokenizer.tk.to_str()))
        around = [meta["tokens"][id] for id in tokenizer.encode("")]
        for name in ("bos", "eos"):
            meta[f"add_{name}_token"] = config.special_tokens.get(f"{name}_token") in around
    padding = range(len(meta["tokens"]), vocab_size)
    meta["tokens"] += [f"[PAD{i}]" for i in padding]
    meta["token_type"] += [UNUSED] * len(padding)
    if "scores" in meta:
        meta["scores"] += [-1e4] * len(padding)
    ids = {token: id for id, token in enumerate(meta["tokens"])}
    for hf, name in NAMES.items():
        if (id := ids.get(config.special_tokens.get(f"{hf}_token"))) is not None:
            meta[f"{name}_token_id"] = id
    written = {f"tokenizer.ggml.{name}": value for name, value in meta.items()}
    _, templates = chat_template_texts(folder, config)
    if "default" in templates:
        written["tokenizer.chat_template"] = templates["default"]
    return written


def _write_pieces(path: Path, config: TokenizerConfig) -> dict[str, Any]:
    """Of a tokenizer.model."""
    tokenizer = SentencePieceTokenizer(path, config)
    message = list(_fields(path.read_bytes()))
    pieces = [{2: 0.0, 3: NORMAL} | dict(_fields(piece)) for n, piece in message if n == 1]
    trainer, normalizer = (dict(_fields(dict(message).get(n, b""))) for n in (2, 3))
    normalizes = normalizer.get(2) or normalizer.get(4, 1)
    if trainer.get(3, 1) != 2 or (normalizes and tokenizer.prefix_space is None):
        why = "it normalizes text" if trainer.get(3, 1) == 2 else "it is a unigram model"
        raise ValueError(f"{path}: llama.cpp's tokenizer is BPE without normalization, but {why}")
    more = range(len(pieces), tokenizer.vocab_size)
    tokens = [piece[1].decode() for piece in pieces]
    tokens += [tokenizer.added_tokens.get(id, f"[PAD{id}]") for id in more]
    scores = [piece[2] for piece in pieces] + [-1e4] * len(more)
    types = [piece[3] for piece in pieces] + [UNUSED] * len(more)
    for id in tokenizer.added_tokens:
        if types[id] != UNKNOWN:
            types[id] = CONTROL if id in tokenizer.special else USER_DEFINED
    prefix = normalizer.get(3, 1) if tokenizer.prefix_space is None else tokenizer.prefix_space
    sp = tokenizer.sp
    ids = {"bos": sp.bos_id(), "eos": sp.eos_id(), "unknown": sp.unk_id()}
    return {f"{name}_token_id": id for name, id in ids.items() if id >= 0} | {
        "model": "llama", "pre": "default", "tokens": tokens, "scores": scores,
        "token_type": types, "add_space_prefix": prefix not in (0, "never"),
        "add_bos_token": bool(tokenizer.bos_ids), "add_eos_token": bool(tokenizer.eos_ids),
    }  # fmt: skip


def _write_bpe(path: Path, tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Of a parsed tokenizer.json."""
    model = tokenizer["model"]
    found = _splits(tokenizer["pre_tokenizer"]), bool(model.get("ignore_merges"))
    known = {name: (splits, name in WHOLE_WORDS) for name, splits in SPLITS.items()}
    pre = next((name for name in known if known[name] == found), None)
    normalizer = tokenizer["normalizer"] or {"normalizers": []}
    normalizers = [step["type"] for step in normalizer.get("normalizers", [normalizer])]
    if model["type"] != "BPE" or pre is None or normalizers not in ([], ["NFC"]):
        raise ValueError(
            f"{path}: llama.cpp has no such tokenizer; known: tokenizer.model, and byte-level BPE "
            f"with the pre-tokenizer and ignore_merges of {', '.join(SPLITS)}"
        )
    rows = {id: (token, NORMAL) for token, id in model["vocab"].items()}
    for t in tokenizer["added_tokens"]:
        rows[t["id"]] = t["content"], CONTROL if t["special"] else USER_DEFINED
    rows = [rows.get(id, (f"[PAD{id}]", UNUSED)) for id in range(max(rows) + 1)]
    tokens, types = map(list, zip(*rows))
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges}


def _splits(step: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    """The regular expressions of a pre-tokenizer; None if it is of another kind."""
    steps = (step or {}).get("pretokenizers", [step])
    found: list[str] = []
    for step in steps:
        kind = step and step["type"]
        if kind == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            found.append(step["pattern"].get("Regex"))
        elif kind == "Digits" and step["individual_digits"]:
            found.append(r"\p{N}")
        elif kind == "ByteLevel" and not step["add_prefix_space"]:
            found += [_GPT2] if step["use_regex"] else []
        else:
            return None
    return tuple(found)
