"""One pass over a well-formed schema: keep, drop or refuse each keyword.  Asks llguidance nothing.

The tables say what llguidance 1.9.1 does, as measured; what they miss verdict.py finds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from engine.grammar import work
from engine.grammar.formats import NARROWED
from engine.grammar.verdict import Document, Node
from engine.grammar.verdict import ref as ref_to

PATTERN_LIMIT = 4_096  # characters of one pattern
PAIRS_LIMIT = 20_000  # of `oneOf` alternatives in a schema, all told apart by llguidance: 0.05 s
KEY_PAIRS = 6  # as many as these takes a pair of `patternProperties`
REQUIRED_LIMIT = 2_000  # names; llguidance's time grows with their square
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
        self._pairs = 0  # of alternatives that must be told apart
        self._resources: list[str] = []  # pointers of subschemas with an `$id`
        self._document = Document({}, {}, {}, {})

    def run(self) -> Document:
        """The cleaned document; its `$ref`s are pointers that resolve inside it."""
        stack: list[tuple[str, Node, Node]] = [("", self._schema, self._document.root)]
        while stack:
            pointer, source, target = stack.pop()
            self._document.nodes[pointer] = target
            if pointer and "$id" in source:
                self._resources.append(pointer)
            if isinstance(source.get("$anchor"), str) and not self._elsewhere(pointer):
                self._anchors["#" + source["$anchor"]] = "#" + pointer
            below: list[tuple[str, Node, Node]] = []
            for key, value in source.items():
                if self._keeps(pointer, source, key):
                    target[key] = self._copy(pointer, key, value, below)
                elif key == "oneOf" and "anyOf" not in source:
                    target["anyOf"] = self._copy(pointer, "anyOf", value, below)
            self._document.children[pointer] = [entry[0] for entry in below]
            stack += reversed(below)  # so that the first fault in reading order is the one reported
        for node in self._document.nodes.values():  # only now are all of them filled
            _narrow(node)
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
        if key in ENFORCED:
            _check_size(pointer, node, key)
            if key == "patternProperties" and self._too_many_pairs(len(node[key]), KEY_PAIRS):
                raise _too_large(pointer, key, "too many patterns to tell apart")
            why = self._weakness(node, key)
            if not why:
                return not _says_nothing(node, key)
        elif key in _REFUSED and node[key] not in _REFUSED[key]:
            alone = key in _NEEDS and not any(other in node for other in _NEEDS[key])
            why = "" if alone else "it cannot be enforced"
        else:
            why = ""
        if why:
            drop(self._dropped, self._strict, pointer, key, why)
        return False

    def _weakness(self, node: Node, key: str) -> str:
        """Why llguidance would take the keyword and not enforce it, or take too long; mostly ""."""
        value = node[key]
        match key:
            case "format" if value not in _FORMATS and _may_be(node, "string"):
                return f"the format {value[:40]!r} is unknown"
            case "exclusiveMinimum" | "exclusiveMaximum" if _leaks(node, key):
                return "an excluded whole number cannot be kept out of a range narrower than 1"
            case "multipleOf" if work.coefficient(value) > work.DIVISOR_LIMIT:
                return "the number is too large"
            case "oneOf" if self._too_many_pairs(len(value)):
                return "there are too many alternatives to tell apart"
            case "minProperties" if value > max(1, len(set(node.get("required", ())))):
                return "a key that is written twice would count twice"
        return ""

    def _too_many_pairs(self, count: int, weight: int = 1) -> bool:
        self._pairs += weight * count * (count - 1) // 2
        return self._pairs > PAIRS_LIMIT

    def _elsewhere(self, pointer: str) -> bool:
        """Whether references at this place, and names given there, belong to an `$id` of its own.

        Such an `$id` means nothing else, and nothing at all where there are none.
        """
        return any(pointer == at or pointer.startswith(at + "/") for at in self._resources)

    def _check_refs(self) -> None:
        base = str(self._schema.get("$id", "")).partition("#")[0]
        for pointer, node in self._document.nodes.items():
            if "$ref" not in node:
                continue
            if self._elsewhere(pointer):
                why = "an '$id' above it changes what it refers to"
                drop(self._dropped, self._strict, pointer, "$ref", why)
                del node["$ref"]
                continue
            ref: str = node["$ref"]
            if base and ref.partition("#")[0] == base:
                ref = "#" + ref.partition("#")[2]
            ref = self._anchors.get(ref) or ref
            if not ref.startswith("#"):
                raise bad_ref(pointer, "points outside the schema; nothing is ever fetched")
            target = unquote(ref[1:])
            if target not in self._document.nodes:
                raise bad_ref(pointer, f"{ref[:80]!r} does not exist or is no subschema")
            node["$ref"] = ref_to(target)
            self._document.refs[pointer] = target


def _narrow(node: Node) -> None:
    """Put what a format also means beside it; does nothing the second time."""
    for keyword, wanted in NARROWED.get(node.get("format", ""), {}).items():
        has = node.setdefault(keyword, wanted)
        if keyword == "maxLength":
            node[keyword] = min(has, wanted)
        elif has != wanted and {keyword: wanted} not in node.get("allOf", ()):
            node["allOf"] = [*node.get("allOf", ()), {keyword: wanted}]


def bad_ref(pointer: str, what: str) -> BadSchema:
    return BadSchema("invalid_schema", f"at {pointer or '/'}: '$ref' {what}", pointer, "$ref")


def _too_large(pointer: str, keyword: str, what: str) -> BadSchema:
    message = f"at {pointer or '/'}: {keyword!r} has {what}. Make it smaller."
    return BadSchema("invalid_schema", message, pointer, keyword)


def _check_size(pointer: str, node: Node, key: str) -> None:
    size = len(node[key]) if key in ("required", "properties") else 0
    for pattern in [node[key]] if key == "pattern" else _patterns(node, key):
        if len(pattern) > PATTERN_LIMIT:
            raise _too_large(pointer, key, f"a pattern of more than {PATTERN_LIMIT:,} characters")
        if work.least(pattern) > work.LEAST_LIMIT:
            asks = f"a pattern that asks for more than {work.LEAST_LIMIT:,} characters"
            raise _too_large(pointer, key, asks)
    if key == "required" and size > REQUIRED_LIMIT:
        raise _too_large(pointer, key, f"more than {REQUIRED_LIMIT:,} names")
    if key == "properties" and size - len(node.get("required", ())) > OPTIONAL_LIMIT:
        raise _too_large(pointer, key, f"more than {OPTIONAL_LIMIT:,} optional properties")


def _patterns(node: Node, key: str) -> list[str]:
    return list(node[key]) if key == "patternProperties" else []


def _says_nothing(node: Node, key: str) -> bool:
    """Whether an enforced keyword allows everything, or what others beside it allow."""
    match key:
        case "format":
            return node[key] not in _FORMATS
        case "additionalProperties":
            return node[key] is True
        case "minProperties":
            return bool(node[key] <= len(set(node.get("required", ()))))
    return False


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
