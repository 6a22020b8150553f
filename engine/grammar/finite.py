"""Whether some finite value can satisfy a schema, as far as its recursion tells.  Compiles nothing.

A subschema is founded when a value of it can be built from founded ones: the least fixed point of
that rule.  What is not founded asks for itself without an end, as a list that requires its own tail
does; a model could only write it until its tokens end.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.grammar.clean import BadSchema, escape
from engine.grammar.verdict import Document

_HOLDERS = frozenset({"object", "array"})  # types whose values may need others


def check_finite(document: Document) -> None:
    """Raise BadSchema that names where the schema asks for itself."""
    founded: set[str] = set()
    order = list(_below_first(document))
    left = order
    while left:
        still = [at for at in left if _missing(document, at, founded) is not None]
        founded.update(set(left).difference(still))
        if len(still) == len(left):
            break
        left = still
    if "" in founded:
        return
    pointer, seen = "", set[str]()
    keyword = ""
    while pointer not in seen:  # down to what asks for itself
        seen.add(pointer)
        found = _missing(document, pointer, founded)
        assert found is not None, "what is not founded lacks something"
        keyword, below = found
        if below is None:
            break
        pointer = below
    raise BadSchema(
        "invalid_schema",
        f"at {pointer or '/'}: no finite value satisfies it: its {keyword!r} leads to itself again "
        "without an end, or to what allows nothing. Make a property optional, let an array be "
        "empty, or allow null.",
        pointer, keyword,
    )  # fmt: skip


def _below_first(document: Document) -> Iterator[str]:
    """Every pointer that the root reaches, what it consists of before it as far as that goes."""
    known: set[str] = set()
    stack = [("", False)]
    while stack:
        pointer, ready = stack.pop()
        if ready:
            yield pointer
        elif pointer not in known:
            known.add(pointer)
            stack.append((pointer, True))
            stack += ((at, False) for at in document.children.get(pointer, ()))
            if pointer in document.refs:
                stack.append((document.refs[pointer], False))


def _missing(document: Document, pointer: str, founded: set[str]) -> tuple[str, str | None] | None:
    """(keyword, pointer) of a part without which it has no value; None when it has one."""
    node = document.nodes[pointer]
    if pointer in document.refs and document.refs[pointer] not in founded:
        return "$ref", document.refs[pointer]
    for i, part in enumerate(node.get("allOf", ())):
        if (gone := _gone(document, part, f"{pointer}/allOf/{i}", founded)) is not None:
            return "allOf", gone or None
    for key in ("anyOf", "oneOf"):
        parts = [
            _gone(document, part, f"{pointer}/{key}/{i}", founded)
            for i, part in enumerate(node.get(key, ()))
        ]
        if parts and None not in parts:
            return key, next((one for one in parts if one), None)
    if "const" in node or "enum" in node:
        return None
    kinds = node.get("type", ())
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    if not kinds or not kinds <= _HOLDERS:
        return None
    lacks = {"object": _property, "array": _item}
    found = [lacks[kind](document, pointer, founded) for kind in sorted(kinds)]
    return None if None in found else found[0]


def _gone(document: Document, part: object, pointer: str, founded: set[str]) -> str | None:
    """The pointer of a part without a value, "" for `false`; None for one with a value.

    Parts that no schema of a request wrote are none of the document's: rules for texts.
    """
    if isinstance(part, dict):
        return None if pointer in founded or pointer not in document.nodes else pointer
    return "" if part is False else None


def _property(
    document: Document, pointer: str, founded: set[str]
) -> tuple[str, str | None] | None:
    node = document.nodes[pointer]
    named = node.get("properties", {})
    assert isinstance(named, dict), "a well-formed schema"
    required = node.get("required", ())
    assert isinstance(required, list | tuple), "a well-formed schema"
    for name in required:
        at, part = f"{pointer}/properties/{escape(name)}", named.get(name, True)
        if name not in named and "patternProperties" not in node:
            at, part = f"{pointer}/additionalProperties", node.get("additionalProperties", True)
        if (gone := _gone(document, part, at, founded)) is not None:
            return "required", gone or None
    return None


def _item(
    document: Document, pointer: str, founded: set[str]
) -> tuple[str, str | None] | None:
    node = document.nodes[pointer]
    least, first = node.get("minItems", 0), node.get("prefixItems", [])
    assert isinstance(least, int) and isinstance(first, list), "a well-formed schema"
    for i, part in enumerate(first[:least]):
        if (gone := _gone(document, part, f"{pointer}/prefixItems/{i}", founded)) is not None:
            return "minItems", gone or None
    if least > len(first):
        gone = _gone(document, node.get("items", True), f"{pointer}/items", founded)
        return None if gone is None else ("minItems", gone or None)
    return None
