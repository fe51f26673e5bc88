"""JSON schemas as regular expressions, for generation/structured.py.

A pattern's texts are JSON values without white space, valid under the schema. A schema may have the
keywords of KEYWORDS, enum, const, and $refs that are not recursive; properties come in the schema's
order; values of any type ({}, true, annotations alone) are nested at most two deep. `pattern` is of
the whole string, in ECMA-262's syntax (generation/ecma_regex.py). allOf, anyOf and keywords beside
them are merged into alternatives without them (generation/schema_merging.py). Any other keyword is
refused in one line, since a translation that ignores it gives texts that do not validate:
outlines-core's own ignores minimum, uniqueItems and more, concatenates allOf, and does not escape
names.

When it loses: one value has many spellings, and the model may prefer another order, or spaces; n
optional properties in a row take n^2 / 2 terms, and nested ones the product.

Equivalence (test_all.py): random texts of random schemas are JSON and valid by the keywords'
definitions.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --json-schema FILE")

import json
import math
import re
from collections.abc import Iterable
from typing import Any

from generation.ecma_regex import json_pattern
from generation.schema_merging import (
    BOUNDS,
    KEYWORDS,
    Merger,
    Schema,
    check,
    join_names,
    members_of_schema,
    types_of_schema,
    types_of_value,
)
from generation.structured import compile_dfa

CHAR = r'(?:[^"\\\x00-\x1f\x7f-\x9f]|\\["\\/bfnrt])'  # of a string
STRING, INTEGER = f'"{CHAR}*"', "-?(?:0|[1-9][0-9]*)"
NUMBER = INTEGER + r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?"
SCALARS = {"null": "null", "boolean": "(?:true|false)"}
DATE = "[1-9][0-9]{3}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])"  # days that every month has
TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?Z"
UUID = "-".join(f"[0-9a-f]{{{n}}}" for n in (8, 4, 4, 4, 12))
FORMATS = {"date": DATE, "time": TIME, "date-time": f"{DATE}T{TIME}", "uuid": UUID}
MAX_PATTERN = 10**6  # characters
MAX_DIGITS = 15  # of a number within limits: more would be rounded, perhaps beyond them


def pattern_of_schema(schema: Any) -> str:
    """JSON schema -> a regular expression that matches JSON values, without white space, which are
    valid under it. ValueError, which the caller puts the setting's name before: what is not
    supported, and where. Nothing is compiled, and all work is limited by counts."""
    try:
        return _Translator(schema).pattern(schema, "the schema")
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def parse_grammar(name: str, value: Any, is_schema: bool) -> str:
    """A regular expression or a schema from a user -> its pattern. ValueError names `name`."""
    try:
        if not is_schema and not isinstance(value, str):
            raise ValueError(f"must be a string, not {value!r}")
        pattern = pattern_of_schema(value) if is_schema else value
        compile_dfa(pattern)
        return pattern
    except ValueError as e:
        raise ValueError(f"{name} {e}") from None


def from_response_format(response_format: Any) -> str | None:
    """OpenAI's response_format -> the pattern for SamplingParams.grammar, to be compiled; None for
    {"type": "text"}. ValueError names response_format."""
    given = response_format if isinstance(response_format, dict) else {}
    if given.get("type") == "text":
        return None
    if given.get("type") == "json_object":
        return pattern_of_schema({"type": "object"})
    spec = given.get("json_schema") if given.get("type") == "json_schema" else None
    if not isinstance(spec, dict) or "schema" not in spec:
        wanted = '{"type": "text"|"json_object"|"json_schema", "json_schema": {"schema": ...}}'
        raise ValueError(f"response_format must be {wanted}, not {response_format!r}")
    try:
        return pattern_of_schema(spec["schema"])
    except ValueError as e:
        raise ValueError(f"response_format: json_schema {e}") from None


class _Translator:
    """Translates one schema; `root` has its $defs."""

    def __init__(self, root: Any):
        self.merger, self.n_pattern_chars = Merger(root), 0

    def pattern(
        self, schema: Any, where: str, refs: tuple[str, ...] = (), optional: bool = False
    ) -> str:
        """where: path of the subschema, for errors; refs: the $refs that led to it; optional: what
        allows no value is ""."""
        found = self.merger.alternatives(schema, where, refs)
        check(found or optional, where, "allows no value")
        return _either(self._pattern(*each, where) for each in found) if found else ""

    def _pattern(self, schema: Schema, refs: tuple[str, ...], where: str) -> str:
        """Of an alternative."""
        types = types_of_schema(schema, where)
        if "enum" in schema:
            others = schema.keys() - {"enum", "type"}
            check(not others, where, f"has {join_names(others)} beside enum")
            for value in schema["enum"]:
                ok = "type" not in schema or types_of_value(value) & {*types}
                check(ok, where, f"has enum {value!r}, which does not have its type")
            return _either(re.escape(_dumps(value)) for value in schema["enum"])
        if not schema:
            return ANY
        others = schema.keys() - {"type"}.union(*map(KEYWORDS.get, types))
        check(not others, where, f"has {join_names(others)}")
        make = {"string": self._string, "array": self._array, "object": self._object}
        make |= {"integer": self._number, "number": self._number}
        return _either(SCALARS.get(t) or make[t](schema, where, refs, t) for t in types)

    def _string(self, schema: Schema, where: str, refs: tuple[str, ...], kind: str) -> str:
        given = KEYWORDS["string"] & schema.keys()
        if not given & {"pattern", "format"}:
            return f'"{CHAR}{_quantifier(schema, "Length", where)}"'
        check(len(given) == 1, where, f"has {' and '.join(sorted(given))}")
        if "format" in given:
            known = isinstance(schema["format"], str) and schema["format"] in FORMATS
            check(known, where, f"has format {schema['format']!r}")
            return f'"{FORMATS[schema["format"]]}"'
        pattern = schema["pattern"]
        check(isinstance(pattern, str), where, f"has pattern {pattern!r}")
        self.n_pattern_chars += len(pattern)  # translating them could take long in one request
        check(self.n_pattern_chars <= MAX_PATTERN, where, "makes it too large")
        try:
            return f'"(?:{json_pattern(pattern)})"'
        except ValueError as e:
            check(False, where, f"has pattern {pattern[:150]!r}, which {e}")

    def _number(self, schema: Schema, where: str, refs: tuple[str, ...], kind: str) -> str:
        if not BOUNDS & schema.keys():
            return INTEGER if kind == "integer" else NUMBER
        for name in sorted(BOUNDS & schema.keys()):
            value = schema[name]
            limit = 20 if kind == "integer" else MAX_DIGITS - 1
            ok = type(value) in (int, float) and abs(value) < 10**limit
            check(ok, where, f"has {name} {value!r}; give a number of at most {limit} digits")
            ok = kind == "integer" or value == value // 1
            check(ok, where, f"has {name} {value!r} for a number; give an integer")
        low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
        above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        found = _range(kind, low, high, above, below)
        check(found, where, f"has {' and '.join(sorted(BOUNDS & schema.keys()))} without a value")
        return found

    def _object(self, schema: Schema, where: str, refs: tuple[str, ...], kind: str) -> str:
        members, required = members_of_schema(schema, where), schema.get("required", [])
        check({*required} <= members.keys(), where, "requires what is not in its properties")
        if not members:
            more = schema.get("additionalProperties", True)
            value = self.pattern(more, f"{where}.additionalProperties", refs, optional=True)
            return rf"\{{{_sequence(f'{STRING}:{value}')}\}}" if value else r"\{\}"
        first, after = "", ""  # the members from some on, as the first ones and after others
        for name in reversed(members):
            needed = name in required
            value = self.pattern(members[name], f"{where}.{name}", refs, optional=not needed)
            if not value:
                continue
            member = f"{re.escape(_dumps(name))}:{value}"
            first = member + after if needed else f"(?:{member}{after}|{first})"
            after = (f",{member}" if needed else f"(?:,{member})?") + after
            check(len(first) < MAX_PATTERN, where, "is too large")
        return rf"\{{{first}\}}"

    def _array(self, schema: Schema, where: str, refs: tuple[str, ...], kind: str) -> str:
        low, _, high = _quantifier(schema, "Items", where).strip("*{}").partition(",")
        prefix, items = schema.get("prefixItems", []), schema.get("items", True)
        check(isinstance(prefix, list), where, f"has prefixItems {prefix!r}")
        if prefix:
            return self._tuple(schema, where, refs, int(low), int(high) if high else math.inf)
        item = "" if high == "0" else self.pattern(items, f"{where}.items", refs, optional=True)
        check(item or low == "0", where, "has minItems, but no items")
        return rf"\[{_sequence(item, int(low), high)}\]" if item else r"\[\]"

    def _tuple(
        self, schema: Schema, where: str, refs: tuple[str, ...], low: int, high: float
    ) -> str:
        """An array of low to high items, of which the first are those of prefixItems."""
        each, n, text = schema["prefixItems"], len(schema["prefixItems"]), ""  # text: of the rest
        if high > n:
            item = self.pattern(schema.get("items", True), f"{where}.items", refs, optional=True)
            check(item or low <= n, where, "has minItems, but no items")
            most = "" if high == math.inf else high - n
            text = f"(?:,{item}){{{max(0, low - n)},{most}}}" if item else ""
        for i in reversed(range(min(n, high))):
            at = f"{where}.prefixItems[{i}]"
            item = self.pattern(each[i], at, refs, optional=low <= i)
            text = f"{',' * (i > 0)}{item}{text}" if item else ""
            text = f"(?:{text})?" if low <= i and text else text
            check(len(text) < MAX_PATTERN, where, "is too large")
        return rf"\[{text}\]"


def _dumps(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        raise ValueError(f"is not supported: {value!r} is not a JSON number"[:300]) from None


def _either(patterns: Iterable[str]) -> str:
    patterns = [*patterns]
    found = f"(?:{'|'.join(patterns)})" if len(patterns) > 1 else patterns[0]
    check(len(found) < MAX_PATTERN, "the schema", "is too large")  # nesting can multiply its length
    return found


def _quantifier(schema: dict[str, Any], what: str, where: str) -> str:
    """Of minLength and maxLength, or minItems and maxItems."""
    low, high = schema.get(f"min{what}", 0), schema.get(f"max{what}", "")
    ok = type(low) is int and low >= 0 and (high == "" or (type(high) is int and high >= low))
    check(ok, where, f"has min{what} {low!r} and max{what} {high!r}")
    return f"{{{low},{high}}}"


def _sequence(item: str, low: int = 0, high: str = "") -> str:
    """low to high items ("": any number) with commas between."""
    some = f"(?:{item},){{{max(0, low - 1)},{high and int(high) - 1}}}{item}"
    return some if low else f"(?:{some})?"


def _any(depth: int) -> str:
    """A JSON value of any type, at most `depth` containers deep."""
    value = _any(depth - 1) if depth else ""
    containers = rf"|\[{_sequence(value)}\]|\{{{_sequence(f'{STRING}:{value}')}\}}"
    return f"(?:{STRING}|{NUMBER}|true|false|null{containers * (depth > 0)})"


ANY = _any(2)


# --------------------------------------------------------------------------------------------------
# Integers and numbers within limits
# --------------------------------------------------------------------------------------------------


def _range(kind: str, low: float, high: float, above: Any, below: Any) -> str:
    """Integers or numbers from low to high, above and below limits that may be None; "" if there
    are none. A number has a fraction of few digits instead of an exponent."""
    low_open, high_open = above is not None and above >= low, below is not None and below <= high
    low, high = above if low_open else low, below if high_open else high
    if kind == "integer":
        low = low if low == -math.inf else math.floor(low) + 1 if low_open else math.ceil(low)
        high = high if high == math.inf else math.ceil(high) - 1 if high_open else math.floor(high)
        low_open = high_open = False
    low, high = (x if math.isinf(x) else int(x) for x in (low, high))
    found = []
    if low < 0 and low <= high:
        at_zero = kind == "integer" and high >= 0  # 0 is not also -0
        near_open = at_zero or (high_open and high <= 0)
        found.append(_magnitudes(kind, max(0, -high), -low, near_open, low_open, "-"))
    if high >= 0 and low <= high:
        found.append(_magnitudes(kind, max(0, low), high, low_open and low >= 0, high_open, ""))
    found = [pattern for pattern in found if pattern]
    return _either(found) if found else ""


def _magnitudes(
    kind: str, low: float, high: float, low_open: bool, high_open: bool, sign: str
) -> str:
    """Integers or numbers from low to high, which are integers from 0, or infinite."""
    n = max(1, MAX_DIGITS - len(str(low if high == math.inf else high)))
    fraction = rf"(?:\.[0-9]{{1,{n}}})?"
    parts = []
    if kind == "integer":
        low += low_open
        parts.append(_digits(low, high) if low <= high else "")
    elif low == high:
        parts.append("" if low_open or high_open else f"{low}")
    else:
        more = rf"\.[0-9]{{0,{n - 1}}}[1-9]"
        parts.append(f"{low}{more if low_open else fraction}")
        parts.append(_digits(low + 1, high - 1) + fraction if low + 1 <= high - 1 else "")
        parts.append("" if high_open or high == math.inf else rf"{high}(?:\.0)?")
    parts = [part for part in parts if part]
    return f"{sign}{_either(parts)}" if parts else ""


def _digits(low: int, high: float) -> str:
    """The integers from low, which is not negative, to high, which may be infinite."""
    n = len(str(low))
    if high == math.inf:
        return f"(?:{_digits(low, 10**n - 1)}|[1-9][0-9]{{{n},}})"
    lengths = range(n, len(str(high)) + 1)  # of numbers without leading zeros
    each = [(max(low, 10 ** (i - 1) * (i > 1)), min(high, 10**i - 1)) for i in lengths]
    return _either(_same_length(str(a), str(b)) for a, b in each)


def _same_length(low: str, high: str) -> str:
    """The numbers from low to high, which have the same number of digits."""
    n = len(low) - 1
    if low == high:
        return low
    if low[1:] == "0" * n and high[1:] == "9" * n:
        return f"[{low[0]}-{high[0]}]" + (f"[0-9]{{{n}}}" if n else "")
    if low[0] == high[0]:
        return low[0] + _same_length(low[1:], high[1:])
    parts = [low[0] + _same_length(low[1:], "9" * n)]
    if int(low[0]) + 1 < int(high[0]):
        parts.append(_same_length(str(int(low[0]) + 1) + "0" * n, str(int(high[0]) - 1) + "9" * n))
    return _either([*parts, high[0] + _same_length("0" * n, high[1:])])
