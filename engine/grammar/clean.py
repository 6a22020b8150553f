"""One pass over a well-formed schema: keep, drop or refuse each keyword.  Asks llguidance nothing.

The tables say what llguidance 1.9.1 does, as measured; what they miss verdict.py finds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from engine.grammar.verdict import Document, Node
from engine.grammar.verdict import ref as ref_to

PATTERN_LIMIT = 4_096  # characters of one pattern
OPTIONAL_LIMIT = 900  # of one object: above 1,000 the matcher's own limit ends the request instead

MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
SINGLES = frozenset({"items", "additionalProperties"})
_COUNTS = frozenset(
    {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
)
_PLAIN = frozenset(
    {"type", "enum", "const", "required", "pattern", "multipleOf", "format", "$ref"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
)
ENFORCED = MAPS | LISTS | SINGLES | _COUNTS | _PLAIN

# Keywords that mean something and that llguidance 1.9.1 refuses, with the values that mean nothing.
_REFUSED: dict[str, tuple[object, ...]] = {
    "not": (False,),
    "if": (),
    "then": (True, {}),
    "else": (True, {}),
    "uniqueItems": (False,),
    "contains": (),
    "minContains": (),
    "maxContains": (),
    "propertyNames": (True, {}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "$dynamicRef": (),
    "$recursiveRef": (),
}
_NEEDS = {  # means nothing without one of these beside it
    "if": ("then", "else"),
    "then": ("if",),
    "else": ("if",),
    "minContains": ("contains",),
    "maxContains": ("contains",),
}
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)


class BadSchema(ValueError):
    """The schema cannot be used: `pointer` and `keyword` say where, `param` in which field."""

    def __init__(self, code: str, message: str, pointer: str = "", keyword: str = "") -> None:
        super().__init__(message)
        self.code = code  # invalid_schema, or unsupported_schema_keyword when strict
        self.message = message
        self.pointer = pointer
        self.keyword = keyword
        self.param = ""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A keyword that is not enforced, and why."""

    pointer: str  # of the subschema that held it
    keyword: str  # "*" when the whole subschema was dropped
    why: str


def escape(part: str) -> str:
    return part.replace("~", "~0").replace("/", "~1")


class Cleaner:
    """One pass over a well-formed schema: copy what is enforced, drop or refuse what is not."""

    def __init__(self, schema: Node, strict: bool, dropped: list[Dropped]) -> None:
        self._schema = schema
        self._strict = strict
        self._dropped = dropped
        self._anchors: dict[str, str] = {}
        self._document = Document({}, {}, {}, {})

    def run(self) -> Document:
        """The cleaned document; its `$ref`s are pointers that resolve inside it."""
        stack: list[tuple[str, Node, Node]] = [("", self._schema, self._document.root)]
        while stack:
            pointer, source, target = stack.pop()
            self._document.nodes[pointer] = target
            if isinstance(source.get("$anchor"), str):
                self._anchors["#" + source["$anchor"]] = "#" + pointer
            below: list[tuple[str, Node, Node]] = []
            for key, value in source.items():
                if self._keeps(pointer, source, key):
                    target[key] = self._copy(pointer, key, value, below)
            self._document.children[pointer] = [entry[0] for entry in below]
            stack += reversed(below)  # so that the first fault in reading order is the one reported
        self._check_refs()
        return self._document

    def _copy(self, pointer: str, key: str, value: Any, below: list[tuple[str, Node, Node]]) -> Any:
        def later(at: str, part: Any) -> Any:
            if not isinstance(part, dict):
                return part
            copy: Node = {}
            below.append((at, part, copy))
            return copy

        here = f"{pointer}/{escape(key)}"
        if key in MAPS:
            return {name: later(f"{here}/{escape(name)}", part) for name, part in value.items()}
        if key in LISTS:
            return [later(f"{here}/{i}", part) for i, part in enumerate(value)]
        return later(here, value) if key in SINGLES else int(value) if key in _COUNTS else value

    def _keeps(self, pointer: str, node: Node, key: str) -> bool:
        """Whether the keyword goes into the grammar; one that should but cannot is dropped."""
        why = ""
        if key in _REFUSED:
            means = node[key] not in _REFUSED[key]
            if means and (key not in _NEEDS or any(other in node for other in _NEEDS[key])):
                why = "it cannot be enforced"
        elif key == "$id":
            why = "only the root may have one" if pointer else ""
        elif key == "pattern" and len(node[key]) > PATTERN_LIMIT:
            raise _too_large(pointer, key, f"more than {PATTERN_LIMIT:,} characters")
        elif (
            key == "properties" and len(node[key]) - len(node.get("required", ())) > OPTIONAL_LIMIT
        ):
            raise _too_large(pointer, key, f"more than {OPTIONAL_LIMIT:,} optional properties")
        elif key == "format" and node[key] not in _FORMATS:
            why = f"the format {node[key][:40]!r} is unknown" if _may_be(node, "string") else ""
        elif key in ("exclusiveMinimum", "exclusiveMaximum") and _leaks(node, key):
            why = "an excluded whole number cannot be kept out of a range narrower than 1"
        elif key in ENFORCED:
            return not (key == "additionalProperties" and node[key] is True)
        if why:
            drop(self._dropped, self._strict, pointer, key, why)
        return False

    def _check_refs(self) -> None:
        for pointer, node in self._document.nodes.items():
            if "$ref" not in node:
                continue
            ref: str = self._anchors.get(node["$ref"]) or node["$ref"]
            if not ref.startswith("#"):
                raise bad_ref(pointer, "points outside the schema; nothing is ever fetched")
            target = unquote(ref[1:])
            if target not in self._document.nodes:
                raise bad_ref(pointer, f"{ref[:80]!r} does not exist or is no subschema")
            node["$ref"] = ref_to(target)
            self._document.refs[pointer] = target


def bad_ref(pointer: str, what: str) -> BadSchema:
    return BadSchema("invalid_schema", f"at {pointer or '/'}: '$ref' {what}", pointer, "$ref")


def _too_large(pointer: str, keyword: str, what: str) -> BadSchema:
    message = f"at {pointer or '/'}: {keyword!r} has {what}. Make it smaller."
    return BadSchema("invalid_schema", message, pointer, keyword)


def _may_be(node: Node, kind: str) -> bool:
    """Whether the node's own `type` allows this type."""
    types = node.get("type", kind)
    return kind in types if isinstance(types, list) else kind == types


def _leaks(node: Node, key: str) -> bool:
    """Measured: with both bounds inside one unit, llguidance lets an excluded integer through."""
    low = max(node.get("minimum", -math.inf), node.get("exclusiveMinimum", -math.inf))
    high = min(node.get("maximum", math.inf), node.get("exclusiveMaximum", math.inf))
    try:
        return float(node[key]).is_integer() and high - low < 1 and _may_be(node, "number")
    except OverflowError:  # a whole number beyond floats
        return True


def drop(dropped: list[Dropped], strict: bool, pointer: str, keyword: str, why: str) -> None:
    """Note a keyword that is not enforced; raise BadSchema when strict."""
    if strict:
        raise BadSchema(
            "unsupported_schema_keyword",
            f"at {pointer or '/'}: keyword {keyword!r} is not supported in strict mode: {why}. "
            "Remove it, or set strict to false to have it checked after the fact.",
            pointer,
            keyword,
        )
    dropped.append(Dropped(pointer, keyword, why))
