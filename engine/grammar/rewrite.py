"""Say keywords that llguidance lacks in those that it has.  Exact where it does; refuses nothing.

What cannot be said otherwise stays as it is, and clean.py drops or refuses it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import permutations
from math import perm
from typing import Any
from urllib.parse import unquote

from engine.grammar.negate import Node, NoOpposite, Opposites, Schema, all_of, any_of

ALTERNATIVES = 4  # of a `oneOf` that is told apart here
_NAMES = 64  # that one keyword may speak of
_LISTS = 400  # of unique items, in all orders
_LISTING = frozenset({"enum", "type", "title", "description"})
_UNIQUE = frozenset({"enum", "const", "prefixItems", "contains", "unevaluatedItems"})
_IN_PLACE = frozenset({"anyOf", "oneOf", "if", "dependentSchemas", "dependencies", "$dynamicRef",
                       "$recursiveRef"})  # fmt: skip
_KEYED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains")


@dataclass(slots=True)
class Rewritten:
    """A schema, and the keywords of the one that was given that it says otherwise."""

    schema: Node
    keywords: list[tuple[str, str]] = field(default_factory=list)  # (pointer, keyword)
    words: set[tuple[str, str]] = field(default_factory=set)  # all of the given schema, likewise


def rewrite(schema: Node, *, one_of: bool) -> Rewritten:
    """The schema in other words; with `one_of`, of short `oneOf`s too, which llguidance may have.

    The schema is checked already: at most 64 levels, of the words of draft 2020-12.
    """
    result = Rewritten({})
    result.schema = _Rewriter(schema, one_of, result).node("", schema)
    return result


class _Rewriter:
    def __init__(self, root: Node, one_of: bool, result: Rewritten) -> None:
        self._root = root
        self._one_of = one_of
        self._result = result
        self._written: Node = {}  # the subschema at hand, as it was given
        self.against = Opposites(self._resolve).of

    def node(self, pointer: str, schema: Node) -> Node:
        """A subschema with all below it."""
        made = self._below(pointer, schema)
        self._written = schema
        self._result.words.update((pointer, keyword) for keyword in schema)
        for keyword, say in _SAID.items():
            if keyword not in made or (keyword == "oneOf" and not self._one_of):
                continue
            try:
                said = say(self, dict(made))
            except NoOpposite:
                continue
            gone = (word for word in made if word not in said)
            self._result.keywords += ((pointer, word) for word in gone)
            made = said
        return made

    def _below(self, pointer: str, schema: Node) -> Node:
        def inner(at: str, part: Any) -> Any:
            return self.node(f"{pointer}/{at}", part) if isinstance(part, dict) else part

        made: Node = {}
        for key, value in schema.items():
            if key in _KEYED and isinstance(value, dict):
                made[key] = {
                    name: inner(f"{key}/{name.replace('~', '~0').replace('/', '~1')}", part)
                    for name, part in value.items()
                }
            elif key in _LISTED and isinstance(value, list):
                made[key] = [inner(f"{key}/{i}", part) for i, part in enumerate(value)]
            else:
                made[key] = inner(key, value) if key in _SINGLE else value
        return made

    def _resolve(self, ref: str) -> Schema:
        """What a `$ref` by pointer leads to, as it was written."""
        at: Any = self._root
        if not ref.startswith("#") or ref[1:2] not in ("", "/"):
            raise NoOpposite
        for part in unquote(ref[1:]).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(at, list) and name.isdecimal() and int(name) < len(at):
                at = at[int(name)]
            elif isinstance(at, dict) and name in at:
                at = at[name]
            else:
                raise NoOpposite
        if not isinstance(at, dict | bool):
            raise NoOpposite
        return at

    # Each of these takes a copy of a subschema and returns it without the keyword.

    def not_(self, node: Node) -> Node:
        return _also(node, self.against(node.pop("not")))

    def if_(self, node: Node) -> Node:
        condition = node.pop("if")
        then, other = node.pop("then", True), node.pop("else", True)
        if then in (True, {}) and other in (True, {}):
            return node
        met = all_of([condition, then])
        return _also(node, any_of([met, all_of([self.against(condition), other])]))

    def dependent(self, node: Node) -> Node:
        """`dependencies`, `dependentRequired` and `dependentSchemas`, all that are there."""
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            for name, needs in node.pop(keyword, {}).items():
                needed = {"required": needs} if isinstance(needs, list) else needs
                has = {"required": [name]}
                free = [self.against(has)]
                if node.get("type") != "object":
                    free.append(self.against({"type": "object"}))
                node = _also(node, any_of([*free, all_of([has, needed])]))
        return node

    def one_of(self, node: Node) -> Node:
        whole = dict(node)
        ways = node.pop("oneOf")
        if len(ways) > ALTERNATIVES:
            raise NoOpposite
        others = [self.against(way) for way in ways]
        alone = any_of(
            [all_of([way, *others[:i], *others[i + 1 :]]) for i, way in enumerate(ways)]
        )
        if "allOf" in node or isinstance(alone, bool):
            return _also(node, alone)
        return {  # in its place: that orders the output's keys
            "allOf" if key == "oneOf" else key: [alone] if key == "oneOf" else part
            for key, part in whole.items()
        }

    def property_names(self, node: Node) -> Node:
        names = node.pop("propertyNames")
        rest = node.pop("additionalProperties", True)
        if "patternProperties" in node or not isinstance(names, dict):
            raise NoOpposite
        words = names.keys() - {"type", "description", "title"}
        if names.get("type", "string") != "string":
            raise NoOpposite
        if words in ({"enum"}, {"const"}):
            listed = [names["const"]] if "const" in names else names["enum"]
            known = node.get("properties", {})
            allowed = dict.fromkeys((one for one in listed if isinstance(one, str)), rest)
            said = {name: part if name in allowed else False for name, part in known.items()}
            node["properties"] = {**allowed, **said}
        elif "properties" in node:
            raise NoOpposite  # whether a name fits could only be found out by running a pattern
        elif words == {"pattern"}:
            node["patternProperties"] = {names["pattern"]: rest}
        elif words and words <= {"minLength", "maxLength"}:
            least, most = int(names.get("minLength", 0)), names.get("maxLength", "")
            count = f"{least},{most and int(most)}" if most != 0 else "0"
            node["patternProperties"] = {rf"^[\s\S]{{{count}}}$": rest}
        else:
            raise NoOpposite
        return {**node, "additionalProperties": False}

    def unevaluated_properties(self, node: Node) -> Node:
        rest = node.pop("unevaluatedProperties")
        if "additionalProperties" in node:
            return node  # which leaves nothing over
        names, patterns = dict[str, Schema](), dict[str, Schema]()
        for part in self._conjuncts(self._written):
            if "additionalProperties" in part or "unevaluatedProperties" in part:
                return node
            names |= dict.fromkeys(part.get("properties", {}), True)
            patterns |= dict.fromkeys(part.get("patternProperties", {}), True)
        if len(names) > _NAMES:
            raise NoOpposite
        for key, found in (("properties", names), ("patternProperties", patterns)):
            own = node.get(key, {})
            if more := {name: True for name in found if name not in own}:
                node[key] = {**own, **more}
        return {**node, "additionalProperties": rest}

    def unevaluated_items(self, node: Node) -> Node:
        rest = node.pop("unevaluatedItems")
        if any(key in self._written for key in ("items", "contains", "$ref", "allOf", *_IN_PLACE)):
            raise NoOpposite
        return {**node, "items": rest}

    def unique_items(self, node: Node) -> Node:
        """Of a few values: every list of some of them."""
        if node.pop("uniqueItems") is not True or node.get("type") != "array":
            raise NoOpposite
        items = node.pop("items", {})
        plain = isinstance(items, dict) and not items.keys() - _LISTING
        values = items.get("enum") if plain else None
        if values is None or not _UNIQUE.isdisjoint(node):
            raise NoOpposite
        distinct = {json.dumps(value): value for value in values}
        if any(isinstance(value, float | dict | list) for value in values):
            raise NoOpposite  # 1.0 is 1
        least, most = int(node.pop("minItems", 0)), int(node.pop("maxItems", len(distinct)))
        sizes = range(least, min(most, len(distinct)) + 1)
        if sum(perm(len(distinct), size) for size in sizes) > _LISTS:
            raise NoOpposite
        kind = items.get("type", ())
        lists = [list(one) for size in sizes for one in permutations(distinct.values(), size)
                 if not kind or all(_is(value, kind) for value in one)]  # fmt: skip
        return {**node, "enum": lists}

    def _conjuncts(self, node: Node, depth: int = 0) -> Iterator[Node]:
        """The subschemas that hold where this one does; raise NoOpposite when that depends."""
        if depth > 4 or _IN_PLACE.intersection(node):
            raise NoOpposite
        parts = list(node.get("allOf", ()))
        if "$ref" in node:
            parts.append(self._resolve(node["$ref"]))
        for part in parts:
            if isinstance(part, dict):
                yield part
                yield from self._conjuncts(part, depth + 1)

    def contains(self, node: Node) -> Node:
        if node.get("minContains") != 0 or "maxContains" in node:
            raise NoOpposite
        return {key: part for key, part in node.items() if key not in ("contains", "minContains")}


def _also(node: Node, more: Schema) -> Node:
    """The subschema, and `more` beside it; behind it, as the first mention of a key orders it."""
    return node if more is True or more == {} else {**node, "allOf": [*node.get("allOf", ()), more]}


def _is(value: object, kind: object) -> bool:
    """Whether a value has one of the types; only of values that are no numbers with a point."""
    kinds = kind if isinstance(kind, list) else [kind]
    name = {bool: "boolean", int: "integer", str: "string", type(None): "null"}[type(value)]
    return name in kinds or (name == "integer" and "number" in kinds)


_SAID: dict[str, Callable[[_Rewriter, Node], Node]] = {
    "unevaluatedProperties": _Rewriter.unevaluated_properties,  # before what it looks at is gone
    "unevaluatedItems": _Rewriter.unevaluated_items,
    "not": _Rewriter.not_,
    "if": _Rewriter.if_,
    "dependencies": _Rewriter.dependent,
    "dependentRequired": _Rewriter.dependent,
    "dependentSchemas": _Rewriter.dependent,
    "oneOf": _Rewriter.one_of,
    "propertyNames": _Rewriter.property_names,
    "contains": _Rewriter.contains,
    "uniqueItems": _Rewriter.unique_items,
}
