"""A tool's parameters one by one: which values are raw text, which JSON.  Writes no layout.

Layouts that write each parameter by itself print strings as they are and all else as JSON, so the
schema decides how a value is written and read.  Both sides ask `params` here, and so agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote

from engine.grammar.schema import Dropped, embed

Node = Mapping[str, Any]
Kind = Literal["text", "text or null", "json"]

VISITS = 400  # subschemas looked at to learn the types of one value; beyond, it is JSON
_ROOT = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
)
_TYPES = frozenset({"string", "number", "boolean", "null", "array", "object"})
IN_TAGS = frozenset('<>"\n\r')  # letters of a key that would end it too early
_MAPS = ("properties", "patternProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLES = ("items", "additionalProperties")


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of a tool."""

    name: str
    schema: Node
    required: bool
    kind: Kind


class Schema:
    """A tool's checked parameters, and what its references lead to."""

    def __init__(self, root: Node, forbidden: frozenset[str] = IN_TAGS) -> None:
        """`forbidden`: letters that the layout cannot write in a parameter's name."""
        self._root = root
        self.forbidden = forbidden

    def params(self) -> list[Param]:
        """The parameters that can be written, in schema order; then required undeclared ones."""
        return self.members_of(self._object())

    def members_of(self, node: Node) -> list[Param]:
        """As params(), of an object somewhere inside."""
        properties: Node = node.get("properties", {})
        required = list(node.get("required", ()))
        found = {name: self._as_node(schema) for name, schema in properties.items()}
        for name in required:
            found.setdefault(name, self._as_node(node.get("additionalProperties", {})))
        return [
            Param(name, schema, name in required, self.kind(schema))
            for name, schema in found.items()
            if schema is not None and name and self.forbidden.isdisjoint(name)
        ]

    def unwritable(self) -> Iterator[Dropped]:
        """What of the parameters' object itself no list of parameters can promise."""
        node = self._object()
        why = "this model's layout writes parameters one by one"
        for key in sorted(node.keys() - _ROOT):
            if key == "minProperties" and node[key] <= len(node.get("required", ())):
                continue
            if key == "maxProperties" and node[key] >= len(self.params()):
                continue
            yield Dropped("", key, why)
        for name in node.get("required", ()):
            if not name or not self.forbidden.isdisjoint(name):
                yield Dropped("", "required", "the layout cannot write one of the names")

    def kind(self, node: Node) -> Kind:
        """How values of this subschema are written."""
        types = self.types(node)
        if types == {"string"}:
            return "text"
        return "text or null" if types == {"string", "null"} else "json"

    def types(self, node: object) -> frozenset[str]:
        """The JSON types that a value may have; all of them when that takes too long to tell."""
        budget = [VISITS]
        found = self._types(node, budget)
        return found if budget[0] >= 0 else _TYPES

    def embedded(self, node: Node) -> str:
        """The subschema as text for `%json`, with the definitions that it refers to."""
        names: dict[str, str] = {}
        copy = self._renamed(node, names)
        done: dict[str, Any] = {}
        while len(done) < len(names):
            for target in [*names][len(done) :]:
                done[names[target]] = self._renamed(self.at("#" + target), names)
        return embed({**copy, "$defs": done} if done else copy)

    def at(self, ref: str) -> Any:
        """The subschema that a `$ref` leads to."""
        found: Any = self._root
        for part in unquote(ref[1:]).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            found = found[int(key)] if isinstance(found, list) else found[key]
        return found

    def _object(self) -> Node:
        """The object's own subschema, behind references that say nothing else."""
        node = self._root
        for _ in range(16):
            if "$ref" not in node or "properties" in node:
                break
            behind = self.at(node["$ref"])
            if not isinstance(behind, Mapping):
                break
            others = {k: v for k, v in node.items() if k not in ("$ref", "$defs", "definitions")}
            node = {**behind, **others} if set(others) <= {"type"} else node
            if node.get("$ref") == self._root.get("$ref"):
                break
        return node

    def _as_node(self, schema: object) -> Node | None:
        """A subschema as a mapping; None for `false`, which no value satisfies."""
        return schema if isinstance(schema, Mapping) else {} if schema is True else None

    def _types(self, node: object, budget: list[int]) -> frozenset[str]:
        budget[0] -= 1
        if not isinstance(node, Mapping) or budget[0] < 0:
            return frozenset() if node is False else _TYPES
        found = _TYPES
        if "type" in node:
            named = node["type"] if isinstance(node["type"], list) else [node["type"]]
            found &= {"number" if name == "integer" else name for name in named}
        if "enum" in node:
            found &= {type_of(value) for value in node["enum"]}
        if "const" in node:
            found &= {type_of(node["const"])}
        if "$ref" in node:
            found &= self._types(self.at(node["$ref"]), budget)
        for part in node.get("allOf", ()):
            found &= self._types(part, budget)
        for key in ("anyOf", "oneOf"):
            if key in node:
                parts = [self._types(part, budget) for part in node[key]]
                found &= frozenset().union(*parts)
        return found

    def _renamed(self, node: Any, names: dict[str, str]) -> Any:
        """A copy whose references lead into `$defs`; `names`: pointer -> name there."""
        if not isinstance(node, Mapping):
            return node
        copy: dict[str, Any] = {}
        for key, value in node.items():
            if key == "$ref":
                name = names.setdefault(unquote(value[1:]), f"d{len(names)}")
                copy[key] = f"#/$defs/{name}"
            elif key in _MAPS:
                copy[key] = {one: self._renamed(part, names) for one, part in value.items()}
            elif key in _LISTS:
                copy[key] = [self._renamed(part, names) for part in value]
            elif key in _SINGLES:
                copy[key] = self._renamed(value, names)
            elif key not in ("$defs", "definitions"):
                copy[key] = value
        return copy


def pointer(name: str) -> str:
    """The JSON pointer of a declared parameter in its tool's schema."""
    return "/properties/" + name.replace("~", "~0").replace("/", "~1")


def type_of(value: object) -> str:
    """The JSON type of a value; integers are numbers."""
    match value:
        case str():
            return "string"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case None:
            return "null"
        case list() | tuple():
            return "array"
        case _:
            return "object"


def members(arguments: str) -> Iterator[tuple[str, str]]:
    """(key, value's text as it stands) of a JSON object's text; raise ValueError for other text."""
    decoder = json.JSONDecoder()
    start = at = _skip(arguments, 0)
    if arguments[at : at + 1] != "{":
        raise ValueError("a call's arguments must be a JSON object")
    at = _skip(arguments, at + 1)
    while arguments[at : at + 1] != "}" or arguments[start:at].endswith(","):
        key, at = decoder.raw_decode(arguments, at)
        at = _skip(arguments, at)
        if not isinstance(key, str) or arguments[at : at + 1] != ":":
            raise ValueError("a call's arguments must be a JSON object")
        begin = _skip(arguments, at + 1)
        _, at = decoder.raw_decode(arguments, begin)
        yield key, arguments[begin:at]
        at = _skip(arguments, at)
        if arguments[at : at + 1] == ",":
            at = _skip(arguments, at + 1)


def raw(value: str) -> str:
    """A value's JSON text as tags hold it: a string without its quotes and escapes."""
    if not value.startswith('"'):
        return value
    text: str = json.loads(value)
    return text


def _skip(text: str, at: int) -> int:
    """Past white space."""
    while text[at : at + 1] in (" ", "\n", "\r", "\t"):
        at += 1
    return at
