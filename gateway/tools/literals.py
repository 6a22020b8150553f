"""JSON schemas as a Lark grammar of Python literals.  Reads no output and names no tool.

Strings and numbers are written alike in both, so they stay `%json`.  Objects and arrays become
rules as long as they say no more than their properties, items and lengths; other combinations stay
`%json` as a whole, in which `true` and `null` are written as JSON does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gateway.tools.values import Node, Param, Schema, type_of

RULES = 1_000  # of one tool; what more there is stays JSON
_OBJECT = frozenset({"type", "properties", "required", "additionalProperties"})
_ARRAY = frozenset({"type", "items", "minItems", "maxItems"})
_NARROWS = frozenset({"enum", "const", "$ref", "allOf", "anyOf", "oneOf"})
_MOST = 64  # items of an array that are counted by a rule


class Literals:
    """The rules for one tool's values."""

    def __init__(self, prefix: str, schema: Schema) -> None:
        """`prefix`: of the rules' names."""
        self._prefix = prefix
        self._schema = schema
        self._named: dict[str, str] = {}  # `$ref` -> rule
        self._todo: list[tuple[str, str]] = []  # rules whose `$ref` is still to be written
        self._count = 0
        self._lines: list[str] = []

    def lines(self) -> list[str]:
        """The rules that expressions were made of so far."""
        while self._todo:
            rule, ref = self._todo.pop()
            self._lines.append(f"{rule}: {self.expression(self._schema.at(ref))}")
        return self._lines

    def expression(self, node: object) -> str:
        """The Lark expression of the literals that a subschema allows."""
        self._count += 1
        if not isinstance(node, dict) or self._count > RULES:
            return self._json(node if isinstance(node, dict) else {})
        keys = frozenset(node.keys() - {"$defs", "definitions"})
        if keys == {"$ref"}:
            return self._ref(node["$ref"])
        if keys in ({"anyOf"}, {"oneOf"}):
            parts = [part for one in keys for part in node[one] if part is not False]
            return f"({' | '.join(map(self.expression, parts))})" if parts else self._json(node)
        if keys <= {"enum", "const", "type"} and len(keys & {"enum", "const"}) == 1:
            return self._listed(node, node.get("enum", [node.get("const")]))
        return self._typed(node, keys)

    def _typed(self, node: Node, keys: frozenset[str]) -> str:
        """By the schema's `type`."""
        match node.get("type"):
            case list(types) if types:
                return f"({' | '.join(self.expression({**node, 'type': one}) for one in types)})"
            case "boolean" if _NARROWS.isdisjoint(keys):
                return '("True" | "False")'
            case "null" if _NARROWS.isdisjoint(keys):
                return '"None"'
            case "array" if keys <= _ARRAY and isinstance(node.get("items"), dict):
                return self._array(node)
            case "object" if keys <= _OBJECT and node.get("properties"):
                return self._object(node)
            case _:
                return self._json(node)

    def chain(
        self, rule: str, params: Sequence[Param], opening: Callable[[str], str]
    ) -> Iterator[str]:
        """Rules for `params` in order with ", " between those that are written.

        `rule` is the first one's name; `opening`: what stands before a value, by its name.
        """
        for at, param in enumerate(params):
            value = f"{_quoted(opening(param.name))} {self.expression(param.schema)}"
            first, later = (self._step(rule, at + 1, head) for head in (True, False))
            yield f"{rule}_v{at}: {value}"
            for head in (True, False):
                comma = "" if head else '", " '
                skip = "" if param.required else f" | {first if head else later}"
                yield f"{self._step(rule, at, head)}: {comma}{rule}_v{at} {later}{skip}"
        yield f'{self._step(rule, len(params), True)}: ""'
        yield f'{self._step(rule, len(params), False)}: ""'

    @staticmethod
    def _step(rule: str, at: int, head: bool) -> str:
        """The rule for parameters from `at` on; `head`: none was written before."""
        return rule if head and not at else f"{rule}_{'h' if head else 't'}{at}"

    def _json(self, node: Node) -> str:
        return f"%json {self._schema.embedded(node)}"

    def _ref(self, ref: str) -> str:
        if ref not in self._named:
            self._named[ref] = f"{self._prefix}_r{len(self._named)}"
            self._todo.append((self._named[ref], ref))
        return self._named[ref]

    def _listed(self, node: Node, values: Sequence[Any]) -> str:
        types = self._schema.types(node)
        fine = [literal(one) for one in values if type_of(one) in types]
        return f"({' | '.join(map(_quoted, fine))})" if fine else self._json(node)

    def _array(self, node: Node) -> str:
        least, most = node.get("minItems", 0), node.get("maxItems")
        if least > _MOST or (most is not None and (most > _MOST or most < max(least, 1))):
            return self._json(node)
        item = f"{self._prefix}_i{self._count}"
        self._lines.append(f"{item}: {self.expression(node['items'])}")
        again = f'(", " {item})'
        low = max(least - 1, 0)
        rest = f"{again}{{{low},{'' if most is None else most - 1}}}"
        return f'"[" {item} {rest} "]"' if least else f'("[]" | "[" {item} {rest} "]")'

    def _object(self, node: Node) -> str:
        params = self._schema.members_of(node)
        rule = f"{self._prefix}_o{self._count}"
        self._lines += self.chain(rule, params, lambda name: f"{literal(name)}: ")
        return f'"{{" {rule} "}}"'


def literal(value: object) -> str:
    """A JSON value as a Python literal, with the white space of json.dumps."""
    match value:
        case bool() | None:
            return str(value)
        case list():
            return f"[{', '.join(map(literal, value))}]"
        case dict():
            inside = ", ".join(f"{literal(key)}: {literal(one)}" for key, one in value.items())
            return f"{{{inside}}}"
        case _:
            return json.dumps(value, ensure_ascii=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
