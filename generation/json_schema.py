"""JSON schemas as regular expressions, for generation/structured.py.

A pattern's texts are JSON values without white space, valid under the schema. A schema may have the
keywords of KEYWORDS, enum, const, anyOf and $refs that are not recursive; `pattern` is of the whole
string, properties come in the schema's order, values of any type are
nested at most two deep. Any other keyword is refused in one line, since a translation that ignores
it gives texts that do not validate: outlines-core's own ignores minimum, uniqueItems and more,
concatenates allOf, and does not escape names.

When it loses: one value has many spellings, and the model may prefer another order, or spaces; n
optional properties in a row take n^2 / 2 terms, and nested ones the product.

Equivalence (test_all.py): random texts of random schemas are JSON and valid by the keywords'
definitions.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --json-schema FILE")

import json
import re
from collections.abc import Iterable
from itertools import count
from typing import Any

from generation.structured import compile_dfa, without_anchors

CHAR = r'(?:[^"\\\x00-\x1f\x7f-\x9f]|\\["\\/bfnrt])'  # of a string
STRING, INTEGER = f'"{CHAR}*"', "-?(?:0|[1-9][0-9]*)"
NUMBER = INTEGER + r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?"
SCALARS = {"null": "null", "boolean": "(?:true|false)", "integer": INTEGER, "number": NUMBER}
DATE = "[1-9][0-9]{3}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])"  # days that every month has
TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?Z"
UUID = "-".join(f"[0-9a-f]{{{n}}}" for n in (8, 4, 4, 4, 12))
FORMATS = {"date": DATE, "time": TIME, "date-time": f"{DATE}T{TIME}", "uuid": UUID}
KEYWORDS = {  # of each type; a schema without a type has each that one of its keywords is of
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
} | {name: set() for name in SCALARS}
IGNORED = "title description default examples deprecated readOnly writeOnly strict $schema $id "
IGNORED = {*(IGNORED + "$comment $defs definitions").split()}


def pattern_of_schema(schema: Any) -> str:
    """JSON schema -> a regular expression that matches JSON values, without white space, which are
    valid under it. ValueError, which the caller puts the setting's name before: what is not
    supported, and where."""
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
    """OpenAI's response_format -> the pattern for SamplingParams.grammar, which a Service compiles
    for its tokenizer; None for {"type": "text"}. ValueError names response_format."""
    given = response_format if isinstance(response_format, dict) else {}
    if given.get("type") == "text":
        return None
    if given.get("type") == "json_object":
        return parse_grammar("response_format", {"type": "object"}, is_schema=True)
    spec = given.get("json_schema") if given.get("type") == "json_schema" else None
    if not isinstance(spec, dict) or "schema" not in spec:
        wanted = '{"type": "text"|"json_object"|"json_schema", "json_schema": {"schema": ...}}'
        raise ValueError(f"response_format must be {wanted}, not {response_format!r}")
    return parse_grammar("response_format: json_schema", spec["schema"], is_schema=True)


class _Translator:
    """Translates one schema; `root` has its $defs."""

    def __init__(self, root: Any):
        self.root, self.nodes, self.refs = root, count(), []

    def pattern(self, schema: Any, where: str) -> str:
        """where: path of the subschema, for errors."""
        _check(isinstance(schema, dict), where, f"must be an object, not {schema!r}")
        _check(next(self.nodes) < 5000, where, "makes it too large")
        keys, kind = schema.keys() - IGNORED, None
        for kind in keys & {"$ref", "const", "enum", "anyOf"}:
            others = keys - {kind, "type"} if kind in ("const", "enum") else keys - {kind}
            _check(not others, where, f"has {' and '.join(sorted(others))} beside {kind}")
        if kind == "$ref":
            ref = schema[kind]
            _check(ref not in self.refs, where, f"has the recursive $ref {ref!r}")
            self.refs.append(ref)
            found = self.pattern(self._resolve(ref, where), f"$ref {ref}")
            self.refs.pop()
            return found
        parts = [schema[kind]] if kind == "const" else schema.get(kind)
        _check(kind is None or (isinstance(parts, list) and parts), where, f"has an empty {kind}")
        if kind == "anyOf":
            return _either(self.pattern(s, f"{where}.anyOf[{i}]") for i, s in enumerate(parts))
        if kind is not None:
            for value in parts:
                ok = "type" not in schema or _type_of(value) & {*_listed(schema["type"])}
                _check(ok, where, f"has {kind} {value!r}, which does not have its type")
            return _either(re.escape(_dumps(value)) for value in parts)
        types = schema.get("type", [t for t, names in KEYWORDS.items() if keys & names])
        types = _listed(types)
        ok = types and all(isinstance(t, str) and t in KEYWORDS for t in types)
        _check(ok, where, f"has type {schema.get('type')!r}")
        others = keys - {"type"}.union(*map(KEYWORDS.get, types))
        _check(not others, where, f"has {' and '.join(sorted(others))}")
        make = {"string": self._string, "array": self._array, "object": self._object}
        return _either(SCALARS.get(t) or make[t](schema, where) for t in types)

    def _resolve(self, ref: Any, where: str) -> Any:
        target, names = self.root, ref.split("/") if isinstance(ref, str) else [ref]
        for name in names[1:]:
            target = target.get(name) if isinstance(target, dict) else None
        _check(names[0] == "#" and target is not None, where, f"has $ref {ref!r} to nothing here")
        return target

    def _string(self, schema: dict[str, Any], where: str) -> str:
        given = KEYWORDS["string"] & schema.keys()
        if not given & {"pattern", "format"}:
            return f'"{CHAR}{_quantifier(schema, "Length", where)}"'
        _check(len(given) == 1, where, f"has {' and '.join(sorted(given))}")
        pattern = schema.get("pattern", FORMATS.get(str(schema.get("format"))))
        _check(isinstance(pattern, str), where, f"has format {schema.get('format')!r}")
        try:
            escaped = (compile_dfa(pattern)[0][:, [*range(32), 34, 92]] >= 0).any()
        except ValueError as e:
            _check(False, where, f"has pattern {pattern!r}, which {e}")
        _check(not escaped, where, f"has pattern {pattern!r} with characters that JSON escapes")
        return f'"(?:{without_anchors(pattern)})"'

    def _object(self, schema: dict[str, Any], where: str) -> str:
        members, required = schema.get("properties", {}), schema.get("required", [])
        ok = isinstance(members, dict) and isinstance(required, list)
        ok = ok and all(isinstance(name, str) and name in members for name in required)
        _check(ok, where, "requires what is not in its properties")
        if not members:
            more = schema.get("additionalProperties", True)
            value = self._or_any(more, f"{where}.additionalProperties")
            return r"\{\}" if more is False else rf"\{{{_sequence(f'{STRING}:{value}')}\}}"
        first, after = "", ""  # the members from some on, as the first ones and after others
        for name in reversed(members):
            member = f"{re.escape(_dumps(name))}:{self.pattern(members[name], f'{where}.{name}')}"
            needed = name in required
            first = member + after if needed else f"(?:{member}{after}|{first})"
            after = (f",{member}" if needed else f"(?:,{member})?") + after
        return rf"\{{{first}\}}"

    def _array(self, schema: dict[str, Any], where: str) -> str:
        low, _, high = _quantifier(schema, "Items", where).strip("*{}").partition(",")
        items, none = schema.get("items", True), high == "0"
        _check(items is not False or low == "0", where, "has minItems, but no items")
        none = none or items is False
        items = self._or_any(items, f"{where}.items")
        return r"\[\]" if none else rf"\[{_sequence(items, int(low or 0), high)}\]"

    def _or_any(self, schema: Any, where: str) -> str:
        """True and False have no keywords: with the latter the caller uses no value."""
        return ANY if isinstance(schema, bool) or schema == {} else self.pattern(schema, where)


def _check(ok: Any, where: str, why: str) -> None:
    if not ok:
        raise ValueError(f"is not supported: {where} {why}"[:300])


def _listed(types: Any) -> list[Any]:
    return types if isinstance(types, list) else [types]


def _type_of(value: Any) -> set[str]:
    """The types that a JSON value has: an integer is also a number."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return {"number", "integer"} if value == value // 1 else {"number"}
    names = {bool: "boolean", str: "string", list: "array", dict: "object"}
    return {names.get(type(value), "null")}


def _dumps(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        raise ValueError(f"is not supported: {value!r} is not a JSON number"[:300]) from None


def _either(patterns: Iterable[str]) -> str:
    found = f"(?:{'|'.join(patterns)})"
    _check(len(found) < 10**6, "the schema", "is too large")  # nesting can multiply its length
    return found


def _quantifier(schema: dict[str, Any], what: str, where: str) -> str:
    """Of minLength and maxLength, or minItems and maxItems."""
    low, high = schema.get(f"min{what}", 0), schema.get(f"max{what}", "")
    ok = type(low) is int and low >= 0 and (high == "" or (type(high) is int and high >= low))
    _check(ok, where, f"has min{what} {low!r} and max{what} {high!r}")
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
