"""JSON schemas as regular expressions, for generation/structured.py.

A pattern's texts are JSON values without white space, valid under the schema. A schema may have the
keywords of KEYWORDS, enum, const, and $refs that are not recursive; properties come in the schema's
order; values of any type ({}, true, annotations alone) are nested at most two deep. `pattern` is of
the whole string, in ECMA-262's syntax (generation/ecma_regex.py). allOf, anyOf and keywords beside
them are merged into alternatives without them. oneOf is anyOf where no text can be valid under two
schemas: they differ in type, in constants, or in a property that has a constant in each and that a
text then always has (pydantic's discriminated unions). Any other keyword is refused in one line,
since a translation that ignores it gives texts that do not validate: outlines-core's own ignores
minimum, uniqueItems and more, concatenates allOf, and does not escape names.

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
from dataclasses import dataclass
from itertools import combinations, count, product
from typing import Any
from urllib.parse import unquote

from generation.ecma_regex import json_pattern
from generation.structured import compile_dfa

CHAR = r'(?:[^"\\\x00-\x1f\x7f-\x9f]|\\["\\/bfnrt])'  # of a string
STRING, INTEGER = f'"{CHAR}*"', "-?(?:0|[1-9][0-9]*)"
NUMBER = INTEGER + r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?"
SCALARS = {"null": "null", "boolean": "(?:true|false)"}
DATE = "[1-9][0-9]{3}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])"  # days that every month has
TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?Z"
UUID = "-".join(f"[0-9a-f]{{{n}}}" for n in (8, 4, 4, 4, 12))
FORMATS = {"date": DATE, "time": TIME, "date-time": f"{DATE}T{TIME}", "uuid": UUID}
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
KEYWORDS = {  # of each type; a schema without a type has each that one of its keywords is of
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": BOUNDS,
    "number": BOUNDS,
} | {name: set() for name in SCALARS}
COMBINED = ("$ref", "allOf", "anyOf", "oneOf")
KNOWN = {"type", "enum", "const", *COMBINED}.union(*KEYWORDS.values())
IGNORED = "title description default examples deprecated readOnly writeOnly strict $schema $id "
IGNORED = {*(IGNORED + "$comment $defs definitions discriminator").split()}
MAX_BRANCHES = 500  # of a oneOf: each is compared with each
MAX_NODES = 5000  # schemas within one, each as often as it is referred to
MAX_ENTRIES = 100_000  # constants and properties that are compared or merged
MAX_PATTERN = 10**6  # characters
MAX_DIGITS = 15  # of a number within limits: more would be rounded, perhaps beyond them

Schema = dict[str, Any]
Alternative = tuple[Schema, tuple[str, ...]]  # without COMBINED; the $refs that led to it


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


@dataclass
class _Branch:
    """An alternative of a oneOf, and by what it may differ from others."""

    index: int  # of the schema that it is an alternative of
    schema: Schema
    kinds: set[str]
    constants: set[str]  # that it has as enum
    tags: dict[str, set[str]]  # properties that have constants -> these


class _Translator:
    """Translates one schema; `root` has its $defs."""

    def __init__(self, root: Any):
        self.root, self.nodes = root, count()
        self.n_entries = self.n_chars = 0

    def _spend(self, where: str, n_entries: int = 0, n_chars: int = 0) -> None:
        """Count work that could take long in one request."""
        self.n_entries, self.n_chars = self.n_entries + n_entries, self.n_chars + n_chars
        ok = self.n_entries <= MAX_ENTRIES and self.n_chars <= MAX_PATTERN
        _check(ok, where, "makes it too large")

    def pattern(
        self, schema: Any, where: str, refs: tuple[str, ...] = (), optional: bool = False
    ) -> str:
        """where: path of the subschema, for errors; refs: the $refs that led to it; optional: what
        allows no value is ""."""
        found = self._alternatives(schema, where, refs)
        _check(found or optional, where, "allows no value")
        return _either(self._pattern(*each, where) for each in found) if found else ""

    def _alternatives(self, schema: Any, where: str, refs: tuple[str, ...]) -> list[Alternative]:
        """Schemas without COMBINED: a value is valid if it is so under one of them."""
        _check(next(self.nodes) < MAX_NODES, where, "makes it too large")
        if isinstance(schema, bool):
            return [({}, refs)] if schema else []
        _check(isinstance(schema, dict), where, f"must be an object, not {schema!r}")
        others = schema.keys() - IGNORED - KNOWN
        _check(not others, where, f"has {_names(others)}")
        _check("$id" not in schema or schema is self.root, where, "has $id")  # the base of $refs
        found = [(_plain(schema, where), refs)]
        for keyword in (k for k in COMBINED if k in schema):
            parts, at = schema[keyword], f"{where}.{keyword}"
            if keyword == "$ref":
                _check(refs.count(parts) < 2, where, f"has the recursive $ref {parts!r}")
                target = self._resolve(parts, where)
                groups = [self._alternatives(target, f"$ref {parts}", (*refs, parts))]
            else:
                _check(isinstance(parts, list) and parts, where, f"has an empty {keyword}")
                each = ((part, f"{at}[{i}]", refs) for i, part in enumerate(parts))
                groups = [self._alternatives(*part) for part in each]
            if keyword == "oneOf":
                self._make_disjoint(groups, where)
            if keyword in ("anyOf", "oneOf"):
                groups = [[alternative for group in groups for alternative in group]]
            for group in groups:
                _check(len(found) * len(group) <= MAX_NODES, where, "makes it too large")
                for key in ("enum", "properties"):
                    sizes = [len(x[0].get(key, ())) for x in (*found, *group)]
                    self._spend(where, sum(sizes) * (keyword != "$ref"))
                found = [
                    (merged, a_refs + b_refs[len(refs) :])
                    for (a, a_refs), (b, b_refs) in product(found, group)
                    if (merged := _merge(a, b, where)) is not None
                ]
        return found

    def _make_disjoint(self, groups: list[list[Alternative]], where: str) -> None:
        """Require the properties by which the schemas of a oneOf differ."""
        branches = []
        for i, group in enumerate(groups):
            for schema, refs in group:
                self._spend(where, len(schema.get("enum", ())))
                constants = {*map(_canonical, schema.get("enum", ()))}
                tags = self._tags(schema, where, refs)
                branches.append(_Branch(i, schema, _kinds(schema, where), constants, tags))
        _check(len(branches) <= MAX_BRANCHES, where, "makes it too large")
        for a, b in combinations(branches, 2):
            kinds = a.kinds & b.kinds
            have_constants = a.constants and b.constants
            if a.index == b.index or not kinds or have_constants and not a.constants & b.constants:
                continue
            names = [x for x in a.tags if x in b.tags and not a.tags[x] & b.tags[x]]
            both = f"oneOf, of which {a.index} and {b.index} may both be valid; use anyOf"
            _check(kinds == {"object"} and names, where, f"has {both}")
            for schema in (a.schema, b.schema):
                required = schema.get("required", [])
                schema["required"] = [*required, *({names[0]} - {*required})]

    def _tags(self, schema: Schema, where: str, refs: tuple[str, ...]) -> dict[str, set[str]]:
        """The properties of an alternative that have constants -> these."""
        found = {}
        for name, member in _members(schema, where).items():
            if isinstance(member, dict) and {"const", "enum", "$ref", "allOf"} & member.keys():
                each = [a.get("enum") for a, _ in self._alternatives(member, where, refs)]
                if all(each):
                    self._spend(where, sum(map(len, each)))
                    found[name] = {_canonical(value) for values in each for value in values}
        return found

    def _pattern(self, schema: Schema, refs: tuple[str, ...], where: str) -> str:
        """Of an alternative."""
        types = _types(schema, where)
        if "enum" in schema:
            others = schema.keys() - {"enum", "type"}
            _check(not others, where, f"has {_names(others)} beside enum")
            for value in schema["enum"]:
                ok = "type" not in schema or _type_of(value) & {*types}
                _check(ok, where, f"has enum {value!r}, which does not have its type")
            return _either(re.escape(_dumps(value)) for value in schema["enum"])
        if not schema:
            return ANY
        others = schema.keys() - {"type"}.union(*map(KEYWORDS.get, types))
        _check(not others, where, f"has {_names(others)}")
        make = {"string": self._string, "array": self._array, "object": self._object}
        make |= {"integer": self._number, "number": self._number}
        return _either(SCALARS.get(t) or make[t](schema, where, refs, t) for t in types)

    def _resolve(self, ref: Any, where: str) -> Any:
        target, names = self.root, ref.split("/") if isinstance(ref, str) else [ref]
        for name in names[1:]:  # RFC 6901
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            else:
                target = target.get(name) if isinstance(target, dict) else None
        _check(names[0] == "#" and target is not None, where, f"has $ref {ref!r} to nothing here")
        return target

    def _string(self, schema: Schema, where: str, refs: tuple[str, ...], kind: str) -> str:
        given = KEYWORDS["string"] & schema.keys()
        if not given & {"pattern", "format"}:
            return f'"{CHAR}{_quantifier(schema, "Length", where)}"'
        _check(len(given) == 1, where, f"has {' and '.join(sorted(given))}")
        if "format" in given:
            known = isinstance(schema["format"], str) and schema["format"] in FORMATS
            _check(known, where, f"has format {schema['format']!r}")
            return f'"{FORMATS[schema["format"]]}"'
        pattern = schema["pattern"]
        _check(isinstance(pattern, str), where, f"has pattern {pattern!r}")
        self._spend(where, n_chars=len(pattern))
        try:
            return f'"(?:{json_pattern(pattern)})"'
        except ValueError as e:
            _check(False, where, f"has pattern {pattern[:150]!r}, which {e}")

    def _number(self, schema: Schema, where: str, refs: tuple[str, ...], kind: str) -> str:
        if not BOUNDS & schema.keys():
            return INTEGER if kind == "integer" else NUMBER
        for name in sorted(BOUNDS & schema.keys()):
            value = schema[name]
            limit = 20 if kind == "integer" else MAX_DIGITS - 1
            ok = type(value) in (int, float) and abs(value) < 10**limit
            _check(ok, where, f"has {name} {value!r}; give a number of at most {limit} digits")
            ok = kind == "integer" or value == value // 1
            _check(ok, where, f"has {name} {value!r} for a number; give an integer")
        low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
        above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        found = _range(kind, low, high, above, below)
        _check(found, where, f"has {' and '.join(sorted(BOUNDS & schema.keys()))} without a value")
        return found

    def _object(self, schema: Schema, where: str, refs: tuple[str, ...], kind: str) -> str:
        members, required = _members(schema, where), schema.get("required", [])
        ok = isinstance(required, list)
        ok = ok and all(isinstance(name, str) and name in members for name in required)
        _check(ok, where, "requires what is not in its properties")
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
            _check(len(first) < MAX_PATTERN, where, "is too large")
        return rf"\{{{first}\}}"

    def _array(self, schema: Schema, where: str, refs: tuple[str, ...], kind: str) -> str:
        low, _, high = _quantifier(schema, "Items", where).strip("*{}").partition(",")
        prefix, items = schema.get("prefixItems", []), schema.get("items", True)
        _check(isinstance(prefix, list), where, f"has prefixItems {prefix!r}")
        if prefix:
            return self._tuple(schema, where, refs, int(low), int(high) if high else math.inf)
        _check(items is not False or low == "0", where, "has minItems, but no items")
        if items is False or high == "0":
            return r"\[\]"
        items = self.pattern(items, f"{where}.items", refs)
        return rf"\[{_sequence(items, int(low or 0), high)}\]"

    def _tuple(
        self, schema: Schema, where: str, refs: tuple[str, ...], low: int, high: float
    ) -> str:
        """An array of low to high items, of which the first are those of prefixItems."""
        each, n, text = schema["prefixItems"], len(schema["prefixItems"]), ""  # text: of the rest
        if high > n:
            item = self.pattern(schema.get("items", True), f"{where}.items", refs, optional=True)
            _check(item or low <= n, where, "has minItems, but no items")
            most = "" if high == math.inf else high - n
            text = f"(?:,{item}){{{max(0, low - n)},{most}}}" if item else ""
        for i in reversed(range(min(n, high))):
            at = f"{where}.prefixItems[{i}]"
            item = self.pattern(each[i], at, refs, optional=low <= i)
            text = f"{',' * (i > 0)}{item}{text}" if item else ""
            text = f"(?:{text})?" if low <= i and text else text
            _check(len(text) < MAX_PATTERN, where, "is too large")
        return rf"\[{text}\]"


# --------------------------------------------------------------------------------------------------
# Schemas without COMBINED
# --------------------------------------------------------------------------------------------------


def _plain(schema: Schema, where: str) -> Schema:
    """A schema without COMBINED and annotations, const as enum."""
    plain = {k: v for k, v in schema.items() if k in KNOWN and k not in COMBINED}
    enum = plain.get("enum", [None])
    _check(isinstance(enum, list) and enum, where, "has an empty enum")
    if "const" in plain:
        constant = {"enum": [plain.pop("const")]}
        plain = _merge(plain, constant, where)
        _check(plain is not None, where, "has a const that is not in its enum")
    _types(plain, where)
    _members(plain, where)
    return plain


def _types(schema: Schema, where: str) -> list[str]:
    """Of `type`, or those that the keywords are of."""
    types = schema.get("type", [t for t, names in KEYWORDS.items() if schema.keys() & names])
    types = types if isinstance(types, list) else [types]
    ok = all(isinstance(t, str) and t in KEYWORDS for t in types) and (
        types or "type" not in schema
    )
    _check(ok, where, f"has type {schema.get('type')!r}")
    return [*dict.fromkeys(types)]


def _kinds(schema: Schema, where: str) -> set[str]:
    """The types of all values that are valid: without `type` the keywords of a type do not concern
    values of the others. An integer is a number."""
    kinds = set().union(*map(_type_of, schema["enum"])) if "enum" in schema else {*KEYWORDS}
    kinds = {*_types(schema, where)} if "type" in schema else kinds
    return {"number" if kind == "integer" else kind for kind in kinds}


def _members(schema: Schema, where: str) -> dict[str, Any]:
    members = schema.get("properties", {})
    _check(isinstance(members, dict), where, f"has properties {members!r}")
    return members


def _merge(a: Schema, b: Schema, where: str) -> Schema | None:
    """A schema that is valid where both are; None if nothing is."""
    for x, y in ((a, b), (b, a)):
        ok = "prefixItems" not in x or "items" not in y or "prefixItems" in y
        _check(ok, where, "has prefixItems, and items in another schema")
    merged = a | b
    for key in sorted(a.keys() & b.keys() - {"properties", "additionalProperties"}):
        x, y = a[key], b[key]
        if key == "type":
            x, y = _types(a, where), _types(b, where)
            x = [*x, "integer"] if "number" in x and "integer" not in x else x
            y = [*y, "integer"] if "number" in y and "integer" not in y else y
            merged[key] = [t for t in x if t in y]
            if "number" in merged[key]:
                merged[key].remove("integer")
        elif key == "enum":
            known = {*map(_canonical, y)}
            merged[key] = [value for value in x if _canonical(value) in known]
        elif key == "required":
            _check(
                isinstance(x, list) and isinstance(y, list), where, "has required that is no list"
            )
            merged[key] = [*x, *(name for name in y if name not in x)]
        elif key in BOUNDS or key[:3] in ("min", "max"):
            ok = type(x) in (int, float) and type(y) in (int, float)
            _check(ok, where, f"has {key} {x!r} and {y!r}")
            merged[key] = max(x, y) if "min" in key.lower() else min(x, y)
        else:
            _check(_canonical(x) == _canonical(y), where, f"has two of {key}: {x!r} and {y!r}")
    if {"properties", "additionalProperties"} & a.keys() & b.keys() or (
        {"properties", "additionalProperties"} <= merged.keys()
    ):
        merged |= _merge_members(a, b, where)
    return merged if merged.get("type") != [] and merged.get("enum") != [] else None


def _merge_members(a: Schema, b: Schema, where: str) -> Schema:
    """properties and additionalProperties of two schemas, of which the latter concern names that
    only the other one has."""
    more = [x.get("additionalProperties", True) for x in (a, b)]
    both = lambda x, y: x if y is True else y if x is True else {"allOf": [x, y]}
    first, second = _members(a, where), _members(b, where)
    names = [*first, *(name for name in second if name not in first)]
    members = {name: both(first.get(name, more[0]), second.get(name, more[1])) for name in names}
    merged = {"properties": members} if members else {}
    return merged | ({"additionalProperties": both(*more)} if more != [True, True] else {})


def _check(ok: Any, where: str, why: str) -> None:
    if not ok:
        raise ValueError(f"is not supported: {where} {why}"[:300])


def _names(keywords: Iterable[str]) -> str:
    """The first few in words."""
    names = sorted(keywords)
    more = [f"{len(names) - 5} more"] if len(names) > 6 else names[5:]
    return " and ".join(names[:5] + more)


def _type_of(value: Any) -> set[str]:
    """The types that a JSON value has: an integer is also a number."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return {"number", "integer"} if value == value // 1 else {"number"}
    names = {bool: "boolean", str: "string", list: "array", dict: "object"}
    return {names.get(type(value), "null")}


def _canonical(value: Any) -> str:
    """Equal for values that are equal in JSON: 1 and 1.0 are, 1 and true are not."""
    as_int = lambda x: int(x) if isinstance(x, float) and x.is_integer() else x
    if isinstance(value, dict):
        items = sorted((json.dumps(key), _canonical(x)) for key, x in value.items())
        return f"{{{','.join(':'.join(item) for item in items)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    return json.dumps(as_int(value))


def _dumps(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        raise ValueError(f"is not supported: {value!r} is not a JSON number"[:300]) from None


def _either(patterns: Iterable[str]) -> str:
    patterns = [*patterns]
    found = f"(?:{'|'.join(patterns)})" if len(patterns) > 1 else patterns[0]
    _check(
        len(found) < MAX_PATTERN, "the schema", "is too large"
    )  # nesting can multiply its length
    return found


def _quantifier(schema: dict[str, Any], what: str, where: str) -> str:
    """Of minLength and maxLength, or minItems and maxItems."""
    low, high = schema.get(f"min{what}", 0), schema.get(f"max{what}", "")
    ok = type(low) is int and low >= 0 and (high == "" or (type(high) is int and high >= low))
    _check(ok, where, f"has min{what} {low!r} and max{what} {high!r}")
    return f"{{{low},{high}}}"


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
