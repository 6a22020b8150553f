"""The opposite of a JSON Schema, in keywords that llguidance enforces.  Exact, or there is none.

A schema is the conjunction of its keywords, so its opposite is an `anyOf` of their opposites.  Each
keyword speaks of one type only: the opposite of `minLength: 3` is a string of at most two letters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

Schema = Any  # a JSON Schema: an object, True or False
Node = dict[str, Any]

DEPTH = 8  # schemas within schemas
VISITS = 1_000  # of schemas, for one schema that is rewritten
_LETTERS = 200  # of the strings that a string may not be
_RANGES = 16  # between numbers that a number may not be
_TYPES = ("string", "number", "boolean", "object", "array", "null")
_ANY = r"[\s\S]*"
_MEANS_NOTHING = frozenset(
    {"title", "description", "$comment", "default", "examples", "deprecated", "readOnly",
     "writeOnly", "$defs", "definitions", "$schema", "$id", "$anchor", "nullable"}
)  # fmt: skip
_BOUNDS = {"minimum": "exclusiveMaximum", "maximum": "exclusiveMinimum",
           "exclusiveMinimum": "maximum", "exclusiveMaximum": "minimum"}  # fmt: skip
_LENGTHS = {
    "minLength": ("string", "maxLength", -1), "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1), "maxItems": ("array", "minItems", 1),
}  # fmt: skip


class NoOpposite(Exception):
    """The opposite cannot be said, or would be too large."""


class Opposites:
    """Says opposites; all of them together may look at VISITS schemas."""

    def __init__(self, resolve: Callable[[str], Schema]) -> None:
        """`resolve` finds the schema that a `$ref` leads to, and raises NoOpposite for none."""
        self._resolve = resolve
        self._left = VISITS

    def of(self, schema: Schema, depth: int = 0) -> Schema:
        """The schema of exactly what `schema` does not allow; raise NoOpposite."""
        self._left -= 1
        if isinstance(schema, bool):
            return not schema
        if depth > DEPTH or self._left < 0:
            raise NoOpposite
        ways: list[Schema] = []
        for key, value in schema.items():
            if key not in _MEANS_NOTHING:
                ways += self._of_keyword(key, value, depth + 1)
        return any_of(ways)

    def _of_keyword(self, key: str, value: Any, depth: int) -> list[Schema]:
        """Schemas of which at least one allows what the keyword does not."""
        match key:
            case "required":
                return [{"type": "object", "properties": {name: False}} for name in value]
            case "properties":
                return [_property(name, self.of(part, depth)) for name, part in value.items()]
            case "allOf":
                return [self.of(part, depth) for part in value]
            case "anyOf":
                return [all_of([self.of(part, depth) for part in value])]
            case "not":
                return [value]
            case "$ref":
                return [self.of(self._resolve(value), depth)]
            case "additionalProperties" | "items" if value in (True, {}):
                return []
        return _of_plain(key, value)


def _of_plain(key: str, value: Any) -> list[Schema]:
    """The same for keywords that hold no schemas."""
    if key in _BOUNDS:
        return [{"type": "number", _BOUNDS[key]: value}]
    if key in _LENGTHS:
        kind, other, step = _LENGTHS[key]
        return [{"type": kind, other: int(value) + step}] if value + step >= 0 else []
    if key == "type":
        return [_other_types([value] if isinstance(value, str) else value)]
    if key in ("const", "enum"):
        return [_other_values([value] if key == "const" else value)]
    raise NoOpposite


def any_of(ways: Sequence[Schema]) -> Schema:
    """A schema for what at least one of these allows."""
    if True in ways or {} in ways:
        return True
    left = [way for way in ways if way is not False]
    return {"anyOf": left} if len(left) > 1 else left[0] if left else False


def all_of(parts: Sequence[Schema]) -> Schema:
    """A schema for what all of these allow."""
    if False in parts:
        return False
    left = [part for part in parts if part is not True and part != {}]
    return {"allOf": left} if len(left) > 1 else left[0] if left else True


def _property(name: str, other: Schema) -> Schema:
    if other is False:
        return False
    return {"type": "object", "properties": {name: other}, "required": [name]}


def _other_types(types: Sequence[str]) -> Schema:
    if "integer" in types and "number" not in types:
        raise NoOpposite  # numbers that are not whole
    left = [kind for kind in _TYPES if kind not in types]
    return {"type": left} if left else False


def _other_values(values: Sequence[Any]) -> Schema:
    """What equals none of the values."""
    texts = [value for value in values if isinstance(value, str)]
    numbers = sorted({v for v in values if isinstance(v, int | float) and not isinstance(v, bool)})
    flags = {value for value in values if isinstance(value, bool)}
    if any(isinstance(value, dict | list) for value in values):
        raise NoOpposite
    there = {"string": bool(texts), "number": bool(numbers), "boolean": bool(flags),
             "null": None in values}  # fmt: skip
    ways: list[Schema] = [{"type": [kind for kind in _TYPES if not there.get(kind)]}]
    if texts:
        ways.append({"type": "string", "pattern": _other_texts(texts)})
    if len(flags) == 1:
        ways.append({"const": not flags.pop()})
    if len(numbers) > _RANGES:
        raise NoOpposite
    if numbers:
        ways.append({"type": "number", "exclusiveMaximum": numbers[0]})
        ways += ({"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
                 for low, high in pairwise(numbers))  # fmt: skip
        ways.append({"type": "number", "exclusiveMinimum": numbers[-1]})
    return any_of(ways)


def _other_texts(texts: Sequence[str]) -> str:
    """A pattern for every text but these: each place where one may leave them."""
    if sum(map(len, texts)) > _LETTERS:
        raise NoOpposite
    begun = {text[:at]: set[str]() for text in texts for at in range(len(text) + 1)}
    for text in texts:
        for at, letter in enumerate(text):
            begun[text[:at]].add(letter)
    ways = []
    for start, letters in begun.items():
        spelt = "".join(map(_quoted, start))
        other = "[^" + "".join(map(_quoted, sorted(letters))) + "]" if letters else r"[\s\S]"
        ways.append(spelt + other + _ANY)
        if start not in texts:
            ways.append(spelt)
    return "^(?:" + "|".join(ways) + ")$"


def _quoted(letter: str) -> str:
    plain = letter.isascii() and letter.isalnum()
    return letter if plain else f"\\x{{{ord(letter):x}}}"
