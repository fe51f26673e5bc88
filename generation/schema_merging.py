"""Merging of the schemas that allOf, anyOf, oneOf and $ref combine, for generation/json_schema.py.

A pattern is made of one schema, whose keywords are known. A JSON schema may instead combine others:
allOf (all are valid), anyOf (at least one), oneOf (exactly one), and $ref, each beside keywords of
its own. `Merger.alternatives` rewrites such a schema as alternatives without these four keywords,
as in the disjunctive normal form of logic: anyOf is the union of its schemas' alternatives; allOf
and keywords beside it are the product of them, of which each pair is merged into one schema that is
valid where both are (types and constants are intersected, bounds are tightened, properties are
united). oneOf is anyOf where no text can be valid under two schemas: they differ in type, in
constants, or in a property that has a constant in each and that a text then always has (pydantic's
discriminated unions).

When it loses: a product of anyOfs grows exponentially, so all work is counted and limited. Refused
in one line: a oneOf of which two schemas may both be valid, recursive $refs, and two values of a
keyword that cannot be merged, such as two patterns.

Equivalence (test_all.py): texts of merged schemas are valid by the jsonschema package.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --json-schema FILE")

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations, count, product
from typing import Any
from urllib.parse import unquote

BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
KEYWORDS = {  # of each type; a schema without a type has each that one of its keywords is of
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": BOUNDS,
    "number": BOUNDS,
} | {"null": set(), "boolean": set()}
COMBINED = ("$ref", "allOf", "anyOf", "oneOf")
KNOWN = {"type", "enum", "const", *COMBINED}.union(*KEYWORDS.values())
IGNORED = "title description default examples deprecated readOnly writeOnly strict $schema $id "
IGNORED = {*(IGNORED + "$comment $defs definitions discriminator").split()}
MAX_BRANCHES = 500  # of a oneOf: each is compared with each
MAX_NODES = 5000  # schemas within one, each as often as it is referred to
MAX_ENTRIES = 100_000  # constants and properties that are compared or merged

Schema = dict[str, Any]
Alternative = tuple[Schema, tuple[str, ...]]  # without COMBINED; the $refs that led to it


@dataclass
class _Branch:
    """An alternative of a oneOf, and by what it may differ from others."""

    index: int  # of the schema that it is an alternative of
    schema: Schema
    kinds: set[str]
    constants: set[str]  # that it has as enum
    tags: dict[str, set[str]]  # properties that have constants -> these


class Merger:
    """The alternatives of one schema and those within it; `root` has its $defs."""

    def __init__(self, root: Any):
        self.root, self.nodes, self.n_entries = root, count(), 0

    def _spend(self, where: str, n_entries: int) -> None:
        """Count work that could take long in one request."""
        self.n_entries += n_entries
        check(self.n_entries <= MAX_ENTRIES, where, "makes it too large")

    def alternatives(self, schema: Any, where: str, refs: tuple[str, ...]) -> list[Alternative]:
        """Schemas without COMBINED: a value is valid if it is so under one of them."""
        check(next(self.nodes) < MAX_NODES, where, "makes it too large")
        if isinstance(schema, bool):
            return [({}, refs)] if schema else []
        check(isinstance(schema, dict), where, f"must be an object, not {schema!r}")
        others = schema.keys() - IGNORED - KNOWN
        check(not others, where, f"has {join_names(others)}")
        check("$id" not in schema or schema is self.root, where, "has $id")  # the base of $refs
        found = [(_plain(schema, where), refs)]
        for keyword in (k for k in COMBINED if k in schema):
            parts, at = schema[keyword], f"{where}.{keyword}"
            if keyword == "$ref":
                check(refs.count(parts) < 2, where, f"has the recursive $ref {parts!r}")
                target = self._resolve(parts, where)
                groups = [self.alternatives(target, f"$ref {parts}", (*refs, parts))]
            else:
                check(isinstance(parts, list) and parts, where, f"has an empty {keyword}")
                each = ((part, f"{at}[{i}]", refs) for i, part in enumerate(parts))
                groups = [self.alternatives(*part) for part in each]
            if keyword == "oneOf":
                self._make_disjoint(groups, where)
            if keyword in ("anyOf", "oneOf"):
                groups = [[alternative for group in groups for alternative in group]]
            for group in groups:
                check(len(found) * len(group) <= MAX_NODES, where, "makes it too large")
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
                constants = {*map(canonical, schema.get("enum", ()))}
                tags = self._tags(schema, where, refs)
                branches.append(_Branch(i, schema, _kinds(schema, where), constants, tags))
        check(len(branches) <= MAX_BRANCHES, where, "makes it too large")
        for a, b in combinations(branches, 2):
            kinds = a.kinds & b.kinds
            have_constants = a.constants and b.constants
            if a.index == b.index or not kinds or have_constants and not a.constants & b.constants:
                continue
            names = [x for x in a.tags if x in b.tags and not a.tags[x] & b.tags[x]]
            both = f"oneOf, of which {a.index} and {b.index} may both be valid; use anyOf"
            check(kinds == {"object"} and names, where, f"has {both}")
            for schema in (a.schema, b.schema):
                required = schema.get("required", [])
                schema["required"] = [*required, *({names[0]} - {*required})]

    def _tags(self, schema: Schema, where: str, refs: tuple[str, ...]) -> dict[str, set[str]]:
        """The properties of an alternative that have constants -> these."""
        found = {}
        for name, member in members_of_schema(schema, where).items():
            if isinstance(member, dict) and {"const", "enum", "$ref", "allOf"} & member.keys():
                each = [a.get("enum") for a, _ in self.alternatives(member, where, refs)]
                if all(each):
                    self._spend(where, sum(map(len, each)))
                    found[name] = {canonical(value) for values in each for value in values}
        return found

    def _resolve(self, ref: Any, where: str) -> Any:
        target, names = self.root, ref.split("/") if isinstance(ref, str) else [ref]
        for name in names[1:]:  # RFC 6901
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list):
                is_index = re.fullmatch("0|[1-9][0-9]{0,8}", name) and int(name) < len(target)
                target = target[int(name)] if is_index else None
            else:
                target = target.get(name) if isinstance(target, dict) else None
        check(names[0] == "#" and target is not None, where, f"refers to nothing here: {ref!r}")
        return target


def _plain(schema: Schema, where: str) -> Schema:
    """A schema without COMBINED and annotations, const as enum."""
    plain = {k: v for k, v in schema.items() if k in KNOWN and k not in COMBINED}
    enum = plain.get("enum", [None])
    check(isinstance(enum, list) and enum, where, "has an empty enum")
    if "const" in plain:
        constant = {"enum": [plain.pop("const")]}
        plain = _merge(plain, constant, where)
        check(plain is not None, where, "has a const that is not in its enum")
    types_of_schema(plain, where)
    members_of_schema(plain, where)
    required = plain.get("required", [])
    ok = isinstance(required, list) and all(isinstance(name, str) for name in required)
    check(ok, where, f"has required {required!r}")
    return plain


def types_of_schema(schema: Schema, where: str) -> list[str]:
    """Of `type`, or those that the keywords are of."""
    types = schema.get("type", [t for t, names in KEYWORDS.items() if schema.keys() & names])
    types = types if isinstance(types, list) else [types]
    ok = all(isinstance(t, str) and t in KEYWORDS for t in types) and (
        types or "type" not in schema
    )
    check(ok, where, f"has type {schema.get('type')!r}")
    return [*dict.fromkeys(types)]


def _kinds(schema: Schema, where: str) -> set[str]:
    """The types of all values that are valid: without `type` the keywords of a type do not concern
    values of the others. An integer is a number."""
    kinds = set().union(*map(types_of_value, schema["enum"])) if "enum" in schema else {*KEYWORDS}
    kinds = {*types_of_schema(schema, where)} if "type" in schema else kinds
    return {"number" if kind == "integer" else kind for kind in kinds}


def members_of_schema(schema: Schema, where: str) -> dict[str, Any]:
    members = schema.get("properties", {})
    check(isinstance(members, dict), where, f"has properties {members!r}")
    return members


def _merge(a: Schema, b: Schema, where: str) -> Schema | None:
    """A schema that is valid where both are; None if nothing is."""
    for x, y in ((a, b), (b, a)):
        ok = "prefixItems" not in x or "items" not in y or "prefixItems" in y
        check(ok, where, "has prefixItems, and items in another schema")
    merged = a | b
    for key in sorted(a.keys() & b.keys() - {"properties", "additionalProperties"}):
        x, y = a[key], b[key]
        if key == "type":
            x, y = types_of_schema(a, where), types_of_schema(b, where)
            x = [*x, "integer"] if "number" in x and "integer" not in x else x
            y = [*y, "integer"] if "number" in y and "integer" not in y else y
            merged[key] = [t for t in x if t in y]
            if "number" in merged[key]:
                merged[key].remove("integer")
        elif key == "enum":
            known = {*map(canonical, y)}
            merged[key] = [value for value in x if canonical(value) in known]
        elif key == "required":
            merged[key] = [*x, *(name for name in y if name not in x)]
        elif key in BOUNDS or key[:3] in ("min", "max"):
            ok = type(x) in (int, float) and type(y) in (int, float)
            check(ok, where, f"has {key} {x!r} and {y!r}")
            merged[key] = max(x, y) if "min" in key.lower() else min(x, y)
        else:
            check(canonical(x) == canonical(y), where, f"has two of {key}: {x!r} and {y!r}")
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
    first, second = members_of_schema(a, where), members_of_schema(b, where)
    names = [*first, *(name for name in second if name not in first)]
    members = {name: both(first.get(name, more[0]), second.get(name, more[1])) for name in names}
    merged = {"properties": members} if members else {}
    return merged | ({"additionalProperties": both(*more)} if more != [True, True] else {})


def check(ok: Any, where: str, why: str) -> None:
    if not ok:
        raise ValueError(f"is not supported: {where} {why}"[:300])


def join_names(keywords: Iterable[str]) -> str:
    """The first few in words."""
    names = sorted(keywords)
    more = [f"{len(names) - 5} more"] if len(names) > 6 else names[5:]
    return " and ".join(names[:5] + more)


def types_of_value(value: Any) -> set[str]:
    """The types that a JSON value has: an integer is also a number."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return {"number", "integer"} if value == value // 1 else {"number"}
    names = {bool: "boolean", str: "string", list: "array", dict: "object"}
    return {names.get(type(value), "null")}


def canonical(value: Any) -> str:
    """Equal for values that are equal in JSON: 1 and 1.0 are, 1 and true are not."""
    as_int = lambda x: int(x) if isinstance(x, float) and x.is_integer() else x
    if isinstance(value, dict):
        items = sorted((json.dumps(key), canonical(x)) for key, x in value.items())
        return f"{{{','.join(':'.join(item) for item in items)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(canonical, value))}]"
    return json.dumps(as_int(value))
