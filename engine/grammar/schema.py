"""Check a JSON Schema before it becomes a grammar: enforce, drop or refuse.  No torch, no matcher.

Every walk is iterative and bounded, and no pattern of a request is ever run: patterns only go to
llguidance, whose automata are linear.  JSON Schema draft 2020-12; draft-07 tuples are rewritten.
"""

from __future__ import annotations

import json
import math
import threading
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from engine.grammar import work
from engine.grammar.clean import (
    ENFORCED,
    LISTS,
    MAPS,
    SINGLES,
    BadSchema,
    Cleaner,
    Dropped,
    bad_ref,
    drop,
    escape,
)
from engine.grammar.finite import check_finite
from engine.grammar.rewrite import rewrite
from engine.grammar.trial import Bad, Busy, CheckJob, NoRoom, Setup, Trial, Unavailable, plain
from engine.grammar.verdict import Document, Judge, Node, embed
from engine.grammar.wellformed import TYPES, anchor, well_formed

__all__ = ["BadSchema", "Busy", "Checked", "Dropped", "Judge", "NoRoom", "check", "check_apart",
           "embed", "measure"]  # fmt: skip

DEPTH_LIMIT = 64  # nested arrays and objects of the schema's own text
NODE_LIMIT = 5_000  # arrays and objects in it
ENUM_LIMIT = 10_000  # values in all enums together
TEXT_LIMIT = 500_000  # characters of names and values together

_DROPS = 32  # keywords that llguidance may be asked to find in one schema


_MEANT = {  # names of other languages, as tool lists and benchmarks write them
    "dict": "object", "map": "object", "struct": "object", "hashmap": "object",
    "list": "array", "tuple": "array", "set": "array", "arraylist": "array",
    "float": "number", "double": "number", "decimal": "number",
    "int": "integer", "long": "integer", "short": "integer", "byte": "integer",
    "str": "string", "char": "string", "text": "string", "date": "string", "datetime": "string",
    "bool": "boolean", "none": "null", "nil": "null", "nonetype": "null", "undefined": "null",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Checked:
    """A schema of which every keyword is enforced; keys in their order, annotations left out."""

    schema: Node
    dropped: tuple[Dropped, ...]
    rewritten: tuple[tuple[str, str], ...] = ()  # (pointer, keyword) that is said otherwise


def check(
    schema: object,
    *,
    strict: bool,
    root: Literal["object", "any"] = "object",
    judge: Judge | None = None,
) -> Checked:
    """Check a tool's parameters (`root="object"`, None = no arguments) or an answer's ("any").

    Strict: BadSchema for any keyword that cannot be enforced.  Otherwise those keywords are dropped
    and listed.  A malformed schema, or a `$ref` that leads nowhere or outside, is always BadSchema.
    The schemas of one request share a judge, and with it what a search for faults may cost.
    """
    if root == "object" and (schema is None or schema == {}):
        schema = {"type": "object", "properties": {}}
    measure(schema)
    if not isinstance(schema, dict):
        raise BadSchema("invalid_schema", "A schema must be a JSON object.", "", "type")
    written = modern(schema)
    _meta_check(written)
    if root == "object":
        written = _object_root(written)
    judge = judge or Judge()
    try:
        if found := _otherwise(written, strict, root, judge):
            return found
        return _enforced(written, strict, root, judge)
    except RecursionError:  # in llguidance's or json's own walks
        raise _too_big("deep", f"{DEPTH_LIMIT} levels") from None


_starting = threading.Lock()  # `cache` alone would let two threads make one each


def _trial() -> Trial:
    with _starting:
        return _only_trial()


@cache
def _only_trial() -> Trial:
    return Trial(Setup())


def check_apart(
    schema: object, *, strict: bool, root: Literal["object", "any"], judge: Judge
) -> Checked:
    """`check`; of a schema that is not plain in a process that can be killed (trial.py).

    Raise Busy when many others wait for it, NoRoom when the machine ends it.
    """
    measure(schema)
    try:
        text = json.dumps(schema)
        if plain(text):
            raise Unavailable
        said = _trial().ask(CheckJob(text, strict, root, judge.left))
    except (Unavailable, ValueError):  # a number that json will not write
        return check(schema, strict=strict, root=root, judge=judge)
    if isinstance(said, Bad):
        judge.left = said.left or judge.left
        raise BadSchema(said.code, said.message, said.pointer, said.keyword)
    judge.left = said.left
    dropped = tuple(Dropped(*gone) for gone in said.dropped)
    return Checked(json.loads(said.schema), dropped, tuple(said.rewritten))


def _enforced(written: Node, strict: bool, root: str, judge: Judge) -> Checked:
    """What of the schema as it stands can be enforced."""
    dropped: list[Dropped] = []
    document = Cleaner(written, strict, dropped).run()
    _check_cycles(document)
    check_finite(document)
    document = _uncrowded(document, strict, dropped)
    settled = _settle(document, strict, root, dropped, judge)
    return Checked(settled, tuple(dropped))


def _otherwise(written: Node, strict: bool, root: str, judge: Judge) -> Checked | None:
    """What can be enforced of the schema in other words; None when they are of no use.

    Blames only keywords that the schema has: None too where another one would be at fault.
    """
    best: Checked | None = None
    fault: BadSchema | None = None
    for one_of in (False, True):
        said = rewrite(written, one_of=one_of)
        if not said.keywords:
            continue
        try:
            measure(said.schema)
            found = _enforced(said.schema, strict, root, judge)
        except BadSchema as bad:
            if (bad.pointer, bad.keyword) in said.words.difference(said.keywords):
                fault = bad
            continue
        blamed = {(gone.pointer, gone.keyword) for gone in found.dropped}
        if blamed <= said.words and (best is None or len(found.dropped) < len(best.dropped)):
            best = replace(found, rewritten=tuple(said.keywords))
        if not blamed:
            break
    if best is None and fault is not None:
        raise fault
    return best


def measure(schema: object) -> int:
    """Count arrays and objects; refuse what is too deep or large before recursion meets it.

    What takes llguidance long counts as many as take that time (work.py).
    """
    nodes = values = text = 0
    stack: list[tuple[object, int, str]] = [(schema, 1, "")]
    while stack:
        value, depth, key = stack.pop()
        if isinstance(value, dict | list):
            nodes += 1
            values += len(value) if key == "enum" and isinstance(value, list) else 0
            if depth > DEPTH_LIMIT:
                raise _too_big("deep", f"{DEPTH_LIMIT} levels")
            if isinstance(value, dict):
                text += sum(map(len, value))
                stack.extend((below, depth + 1, name) for name, below in value.items())
            else:
                stack.extend((below, depth + 1, "") for below in value)
        elif isinstance(value, str):
            text += len(value) if key not in ("description", "title", "$comment") else 0
            nodes += work.units(key, value)
        elif isinstance(value, int | float):
            _check_finite(value)
            nodes += work.units(key, value)
        if nodes > NODE_LIMIT or len(stack) > 20 * NODE_LIMIT:
            raise _too_big("large", f"{NODE_LIMIT:,} objects and arrays")
        if values > ENUM_LIMIT:
            raise _too_big("large", f"{ENUM_LIMIT:,} enum values")
        if text > TEXT_LIMIT:
            raise _too_big("large", f"{TEXT_LIMIT:,} characters of names and values")
    return nodes


def _check_finite(value: float) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise BadSchema("invalid_schema", "A schema may hold only finite numbers.")


def _too_big(how: str, limit: str) -> BadSchema:
    return BadSchema("invalid_schema", f"The schema is too {how}: at most {limit}. Split it.")


def modern(schema: Node) -> Node:
    """A copy down to the subschemas, in the words of draft 2020-12.

    Draft-07's `items: [...]` becomes `prefixItems`; its `$id: "#name"` becomes an `$anchor`.
    """
    root: Node = {}
    stack: list[tuple[Node, Node]] = [(schema, root)]
    while stack:
        source, target = stack.pop()
        tuple_form = isinstance(source.get("items"), list)
        for key, value in source.items():
            if tuple_form and key == "items":
                key = "prefixItems"
            elif tuple_form and key == "additionalItems":
                key = "items"
            elif key == "$id" and isinstance(value, str) and value.startswith("#"):
                key, value = "$anchor", value[1:]
                if not anchor(value):
                    continue  # "#/properties/x", as a generator writes it: refers to nothing
            target[key] = _copied(key, value, stack)
    return root


def _copied(key: str, value: Any, stack: list[tuple[Node, Node]]) -> Any:
    """The value with its subschemas replaced by copies that are filled later, from the stack."""

    def later(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        copy: Node = {}
        stack.append((part, copy))
        return copy

    if key in MAPS and isinstance(value, dict):
        named = key in ("$defs", "definitions")  # a reference needs a subschema to lead to
        return {
            name: later({} if named and part is True else part) for name, part in value.items()
        }
    if key in LISTS and isinstance(value, list):
        return [later(part) for part in value]
    return later(value) if key in SINGLES else value


@cache
def _meta() -> Draft202012Validator:
    """The meta-schema's validator; without formats: `regex` would compile a request's patterns."""
    return Draft202012Validator(Draft202012Validator.META_SCHEMA)


def _meta_check(schema: Node) -> None:
    if well_formed(schema):
        return
    try:
        error = best_match(_meta().iter_errors(schema))
    except RecursionError:
        raise _too_big("deep", f"{DEPTH_LIMIT} levels") from None
    if error is None:
        return
    path = [str(part) for part in error.absolute_path]
    pointer = "".join("/" + escape(part) for part in path[:-1])
    keyword = path[-1] if path else ""
    value = repr(error.instance)
    shown = value if len(value) <= 60 else value[:60] + "..."
    hint = _meant(error.instance) if "type" in path[-2:] else ""
    raise BadSchema(
        "invalid_schema",
        f"at {pointer or '/'}: {keyword!r} may not be {shown} in JSON Schema draft 2020-12.{hint}",
        pointer,
        keyword,
    )


def _meant(value: object) -> str:
    """What somebody may have meant by a `type` that JSON Schema does not have, as a sentence."""
    for word in value if isinstance(value, list) else [value]:
        if isinstance(word, str) and word not in TYPES:
            name = word.lower()
            if name == "any":
                return " Leave 'type' out to allow anything."
            near = [_MEANT[name]] if name in _MEANT else get_close_matches(name, TYPES, 1)
            return f" Did you mean {near[0]!r}?" if near else f" Use one of {', '.join(TYPES)}."
    return ""


def _object_root(schema: Node) -> Node:
    """The same schema, saying that it is an object; refuse one that cannot be."""
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise BadSchema(
            "invalid_schema",
            f"at /: 'type' of parameters must be 'object', not {kind!r}. Wrap it in an object.",
            "",
            "type",
        )
    schema = {**schema, "type": "object"}
    declared = schema.keys() & (ENFORCED - {"type"})
    if declared == {"properties"} and not schema["properties"]:
        schema["additionalProperties"] = False  # "no parameters", as everybody writes it
    return schema


def _check_cycles(document: Document) -> None:
    """Refuse a `$ref` that leads only to itself: no value is described by it."""
    fine: set[str] = set()
    for start in document.refs:
        seen, at = {start}, start
        while at in document.refs and at not in fine:
            at = document.refs[at]
            if at in seen:
                raise bad_ref(start, "leads only to itself")
            seen.add(at)
        fine |= seen


def _uncrowded(document: Document, strict: bool, dropped: list[Dropped]) -> Document:
    """The document without what llguidance would never be done with."""
    crowds = list(work.crowds(document))
    for pointer, keyword in crowds:
        why = (
            f"more than {work.AT_ONCE} patterns, formats and lengths would hold for one text, or "
            f"more than {work.WAYS_LIMIT:,} combinations of alternatives"
        )
        drop(dropped, strict, pointer, keyword, why)
        del document.nodes[pointer][keyword]
    return Cleaner(document.root, strict, dropped).run() if crowds else document


def _settle(
    document: Document, strict: bool, root: str, dropped: list[Dropped], judge: Judge
) -> Node:
    """The schema without what llguidance still refuses."""
    left = _DROPS
    while left > 0:
        faults = judge.faults(document, 1 if strict else left)
        if not faults:
            return document.root
        for pointer, keyword in faults:
            why = "it cannot be enforced as it stands here"
            drop(dropped, strict, pointer, keyword or "*", why)
            _leave_out(document.nodes[pointer], keyword)
        left -= len(faults)
        if root == "object":
            document.root["type"] = "object"
        document = Cleaner(document.root, strict, dropped).run()  # some parts are gone
    drop(dropped, strict, "", "*", "too many keywords cannot be enforced")
    return {"type": "object"} if root == "object" else {}


def _leave_out(node: Node, keyword: str) -> None:
    """Take a keyword out so that the node allows more, never less."""
    if keyword == "":
        node.clear()
        return
    if keyword == "oneOf" and "anyOf" not in node:  # in its place: that orders the output's keys
        whole = {"anyOf" if key == "oneOf" else key: value for key, value in node.items()}
        node.clear()
        node.update(whole)
        return
    del node[keyword]
    if keyword in ("properties", "patternProperties"):
        node.pop("additionalProperties", None)
    if keyword == "prefixItems":
        node.pop("items", None)
