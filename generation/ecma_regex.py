"""ECMA-262 regular expressions, which JSON Schema's `pattern` has, as patterns of JSON strings.

generation/structured.py compiles Rust's syntax, where the same characters mean other texts: `\\d`
is any script's digits, `[a&&b]` an intersection, `[0-9--5]` a difference, `[^[]` an error. So each
atom is read as ECMA-262 defines it with the u flag (section 22.2; JSON Schema's core, 6.4), and is
written as ranges of characters. One that JSON escapes in a string is written as its escape, so that
`[^,]` may be `\\n`, and a pattern needs no check after it is compiled.

A pattern matches a whole string: ^ and $ may stand where they change nothing. Refused by name are
what no finite automaton has (look-ahead, look-behind, back-references), what depends on the
neighbours of a character (\\b), and what the u flag refuses since other dialects read it
differently ({,2}, \\A, \\h).
Equivalence (test_all.py): texts match as in a table that node made of new RegExp(pattern, "u").
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache

MAX_LENGTH = 20_000  # characters of a pattern

Ranges = list[tuple[int, int]]  # of code points, both ends included

DIGITS: Ranges = [(0x30, 0x39)]
WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
SPACE: Ranges = [(0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
                 (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000),
                 (0xFEFF, 0xFEFF)]  # fmt: skip
LINE_ENDS: Ranges = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
SURROGATES: Ranges = [(0xD800, 0xDFFF)]
ESCAPED: Ranges = [(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]  # in JSON strings
SHORT = [0x22, 0x5C, 0x08, 0x0C, 0x0A, 0x0D, 0x09]  # ESCAPED with a short escape, such as \n
CLASSES = {"d": DIGITS, "w": WORD, "s": SPACE}
CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "0": 0x00}

ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}"
    r"|u\{[0-9a-fA-F]{1,9}\}|x[0-9a-fA-F]{2}|c[A-Za-z]|0[0-9]+|[pP]\{[\w=]+\}|.?)",
    re.DOTALL,
)
TOKEN = re.compile(
    rf"""(?P<anchor>[\^$]) | (?P<either>\|) | (?P<close>\))
    | (?P<open>\((?:\?:|\?<[A-Za-z_$][\w$]*>|(?!\?)))
    | (?P<repeat>(?:[*+?]|\{{(?P<low>[0-9]+)(?:,(?P<high>[0-9]*))?\}})\??)
    | (?P<class>\[(?:\\.|[^\]\\])*\]) | (?P<escape>{ESCAPE.pattern}) | (?P<char>.)""",
    re.DOTALL | re.VERBOSE,
)
CLASS_ITEM = re.compile(f"{ESCAPE.pattern}|.", re.DOTALL)
REFUSED = {  # what begins where no token does
    re.compile(r"\(\?<?[=!]"): "look-ahead or look-behind",
    re.compile(r"\(\?"): "a group that ECMA-262 does not have",
    re.compile(r"\{,"): "{,n}, which ECMA-262 does not have; write {0,n}",
    re.compile(r"\(|\["): "a group or class that does not end",
}


@dataclass
class _Group:
    """An open group, or the whole pattern."""

    starts: bool  # nothing precedes it
    ended: bool = False  # an alternative of it ends with $
    anchored: bool = False  # it has a ^ or $, so it cannot be repeated


def json_pattern(pattern: str) -> str:
    """An ECMA-262 regular expression -> a pattern, in Rust's syntax, of what stands between the
    quotes of the JSON strings that match it as a whole. ValueError, without the pattern, which the
    caller puts before it: "has look-ahead or look-behind"."""
    _check(len(pattern) <= MAX_LENGTH, f"over {MAX_LENGTH} characters")
    out, groups = [], [_Group(starts=True)]
    starts, ended, repeatable = True, False, False  # of an alternative, up to the token
    for token in TOKEN.finditer(pattern):
        kind, text = token.lastgroup, token.group()
        _check(not ended or kind in ("anchor", "either", "close"), "$ before its end")
        if kind == "anchor":
            _check(starts or text == "$", "^ after its start")
            ended, repeatable, groups[-1].anchored = ended or text == "$", False, True
        elif kind == "open":
            out.append("(?:")
            groups.append(_Group(starts))
            repeatable = False
        elif kind == "either":
            out.append("|")
            groups[-1].ended |= ended
            starts, ended, repeatable = groups[-1].starts, False, False
        elif kind == "close":
            out.append(")")
            group = groups.pop()
            _check(groups, "a group that is not open")
            groups[-1].anchored |= group.anchored
            starts, ended, repeatable = False, ended or group.ended, not group.anchored
        elif kind == "repeat":
            _check(repeatable, f"{text} where nothing can be repeated")
            low, high = token["low"] or "0", token["high"] or ""
            _check(not high or int(low) <= int(high), f"{text}, which is out of order")
            out.append(text.removesuffix("?") if len(text) > 1 else text)
            repeatable = False
        else:
            if kind == "char" and text in "([{":
                _check_literal(pattern, token.start())
            out.append(_atom(kind, text))
            starts, repeatable = False, True
    _check(len(groups) == 1, "a group that does not end")
    return "".join(out)


def _check_literal(pattern: str, at: int) -> None:
    """ValueError for a ( or [ that no token begins with, and for {,n}."""
    for start, what in REFUSED.items():
        _check(not start.match(pattern, at), what)


@lru_cache(1024)
def _atom(kind: str, text: str) -> str:
    """What matches one character: a class, an escape, or itself."""
    if kind == "char" and text != ".":
        return _write([(ord(text), ord(text))], [])
    if kind != "class":
        ranges, properties = ([], []) if text == "." else _escape(text, in_class=False)
        return _write(_complement(LINE_ENDS) if text == "." else ranges, properties)
    negated, inner = text[1:2] == "^", text[1:-1].removeprefix("^")
    ranges, properties = _class(inner)
    if not negated:
        return _write(ranges, properties)
    return _write(ranges, properties, True) if properties else _write(_complement(ranges), [])


def _class(inner: str) -> tuple[Ranges, list[str]]:
    """The items of a class -> its ranges, and its properties such as \\p{L}."""
    items = [_escape(m.group(), True) for m in CLASS_ITEM.finditer(inner)]
    ranges: Ranges = []
    properties: list[str] = []
    i = 0
    while i < len(items):
        single = [len(r) == 1 and r[0][0] == r[0][1] for r, _ in items[i : i + 3]]
        if len(single) == 3 and all(single) and items[i + 1][0] == [(0x2D, 0x2D)]:
            (low, _), (high, _) = items[i][0][0], items[i + 2][0][0]
            _check(low <= high, f"the range {chr(low)}-{chr(high)}, which is out of order")
            ranges.append((low, high))
            i += 3
            continue
        ranges += items[i][0]
        properties += items[i][1]
        i += 1
    return ranges, properties


def _escape(text: str, in_class: bool) -> tuple[Ranges, list[str]]:
    """A character, or an escape -> its ranges, and its properties."""
    if not text.startswith("\\"):
        return [(ord(text), ord(text))], []
    name, digits = text[1:2], text[2:].strip("{}")
    if name in ("p", "P") and digits:
        return [], [text]
    if name and name in "dwsDWS":
        ranges = CLASSES[name.lower()]
        return (ranges if name.islower() else _complement(ranges)), []
    if name in ("u", "x") and digits:
        low = digits.partition("\\u")[2]  # of a surrogate pair
        code = int(digits[:4] if low else digits, 16)
        code = 0x10000 + (code - 0xD800) * 0x400 + int(low, 16) - 0xDC00 if low else code
        _check(code <= 0x10FFFF, f"{text}, which is no character")
    elif name == "c" and digits:
        code = ord(digits) % 32
    elif name == "b" and in_class:
        code = 0x08
    elif name in CONTROLS and not digits:
        code = CONTROLS[name]
    else:
        why = "a \\b or \\B" if name in ("b", "B") else f"{text}, which has no meaning here"
        why = f"the back-reference {text}" if name.isdigit() or name == "k" else why
        _check(name and not (name.isascii() and name.isalnum()), why)
        code = ord(name)
    return [(code, code)], []


def _complement(ranges: Ranges) -> Ranges:
    """All other characters."""
    out, at = [], 0
    for low, high in sorted(ranges + SURROGATES):
        if at < low:
            out.append((at, low - 1))
        at = max(at, high + 1)
    return [*out, (at, 0x10FFFF)] if at <= 0x10FFFF else out


def _write(ranges: Ranges, properties: list[str], negated: bool = False) -> str:
    """A pattern of the JSON text of one character. Control characters are spelled \\u00XX only if
    nothing else matches. properties: for Rust, without those that JSON escapes."""
    plain = _complement(_complement(ranges) + ESCAPED)
    text = "".join(_char(a) if a == b else f"{_char(a)}-{_char(b)}" for a, b in plain)
    if properties:
        items = "".join([*(_range(r) for r in ranges), *properties])
        return rf'[[{"^" * negated}{items}]&&[^"\\\x00-\x1f]]'
    escaped = [c for c in range(0x5D) if _contains(ranges, c) and _contains(ESCAPED, c)]
    short = [c for c in escaped if c in SHORT]
    if plain or short:
        escaped = short
    found = []
    if plain:
        found.append(f"[{text}]" if "-" in text or len(plain) > 1 else text)
    found += [re.escape(json.dumps(chr(c))[1:-1]) for c in escaped]
    _check(found, "a class that no character is in")
    return f"(?:{'|'.join(found)})" if escaped else found[0]


def _contains(ranges: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)


def _range(ends: tuple[int, int]) -> str:
    return "-".join(map(_char, ends))


def _char(code: int) -> str:
    """A character of a class, as Rust and Python spell it."""
    if chr(code).isascii() and chr(code).isalnum():
        return chr(code)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _check(ok: object, what: str) -> None:
    if not ok:
        raise ValueError(f"has {what}")
