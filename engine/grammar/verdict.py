"""llguidance's own verdict on a schema, and which keyword is at fault.  Needs no tokenizer.

llguidance says what it cannot enforce but not where.  Every subschema can be judged alone by a
`$ref` to it, so the fault is found by going down to the smallest subschema that is refused, and
there by leaving out one keyword at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import llguidance

Node = dict[str, Any]

PINNED = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}

_HOLD = "#/$defs/r"  # where the judged document sits while parts of it are judged
_WORK = 20_000_000  # characters of schema text parsed while one fault is searched: about 0.2 s
_LATE = ("type", "properties", "required", "items", "$ref")  # blamed only when nothing else is


def embed(schema: Mapping[str, object]) -> str:
    """The schema as text for `%json`, with white space pinned to what json.dumps prints."""
    return json.dumps({**schema, "x-guidance": PINNED})


def ref(pointer: str) -> str:
    """The value of a `$ref` to this JSON pointer of the same document."""
    return "#" + quote(pointer, "/~$")


def refusal(schema_text: str) -> str:
    """Why llguidance cannot enforce this schema, in its words; empty when it can."""
    message: str = llguidance.LLMatcher.validate_grammar(f"start: %json {schema_text}\n")
    return "" if message.startswith("WARNING") else message


@dataclass(frozen=True, slots=True)
class Document:
    """A cleaned schema and its parts: `nodes` maps a JSON pointer to each subschema (dicts)."""

    root: Node
    nodes: dict[str, Node]
    children: dict[str, list[str]]  # pointer -> pointers of the subschemas directly below
    refs: dict[str, str]  # pointer of a subschema with a `$ref` -> pointer that it leads to


def fault(document: Document) -> tuple[str, str] | None:
    """(pointer, keyword) that keeps the document from being enforced, or None when it can be.

    The keyword is empty when no single one is at fault, or when the search took too long.
    """
    if not refusal(embed(document.root)):
        return None
    return _Search(document).run()


class _Search:
    """Judge parts of one document; its `$ref`s are re-rooted meanwhile and put back at the end."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._holders = [node for node in document.nodes.values() if "$ref" in node]
        self._left = _WORK

    def run(self) -> tuple[str, str]:
        for node in self._holders:
            node["$ref"] = _HOLD + node["$ref"][1:]
        try:
            at = self._smallest()
            return at, self._keyword(at)
        finally:
            for node in self._holders:
                node["$ref"] = "#" + node["$ref"][len(_HOLD) :]

    def _refused(self, pointer: str) -> bool:
        """Whether the subschema is refused on its own; False when the work allowed is used up."""
        text = json.dumps({"$defs": {"r": self._document.root}, "$ref": _HOLD + ref(pointer)[1:]})
        self._left -= len(text) + 1_000
        return self._left > 0 and bool(refusal(text))

    def _smallest(self) -> str:
        at, seen = "", {""}
        while True:
            for below in self._below(at):
                if below not in seen:
                    seen.add(below)
                    if self._refused(below):
                        at = below
                        break
            else:
                return at

    def _below(self, pointer: str) -> Iterator[str]:
        yield from self._document.children.get(pointer, ())
        if "$ref" in self._document.nodes[pointer]:
            yield self._document.refs[pointer]

    def _keyword(self, pointer: str) -> str:
        node = self._document.nodes[pointer]
        whole = dict(node)
        for keyword in sorted(whole, key=lambda key: key in _LATE):
            if keyword in ("$defs", "definitions"):
                continue
            del node[keyword]
            fixed = not self._refused(pointer) and self._left > 0
            node.clear()
            node.update(whole)  # in the old order: it is the order of the output's keys
            if fixed:
                return keyword
        return ""
