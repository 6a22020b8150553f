"""llguidance's own verdict on a schema, and which keyword is at fault.  Needs no tokenizer.

llguidance says what it cannot enforce but not where.  Every subschema can be judged alone by a
`$ref` to it, so the fault is found by going down to the smallest subschema that is refused, and
there by leaving out one keyword at a time.  A search finds the faults of all subschemas at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any
from urllib.parse import quote

import llguidance

Node = dict[str, Any]

PINNED = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}

_HOLD = "#/$defs/r"  # where the judged document sits while parts of it are judged
_WORK = 8_000_000  # characters of schema text parsed in search of faults: below half a second
_CALL = 10_000  # as many as these takes a verdict on nothing
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


@dataclass(slots=True)
class _Refused:
    """A subschema that is refused, on the way down to why."""

    pointer: str
    below: Iterator[str]  # subschemas that were not looked at yet
    excused: bool = False  # by one below it that is refused


class Judge:
    """Finds the faults of a document; all its searches share one budget: `left` of it is left."""

    def __init__(self, left: int = _WORK) -> None:
        self.left = left
        self._fine: set[str] = set()  # texts of subschemas without references, found enforceable

    def faults(self, document: Document, most: int) -> list[tuple[str, str]]:
        """(pointer, keyword) of what keeps the document from being enforced; none when it can be.

        At most `most` of them: more may be found once these are gone.  A keyword is empty when no
        single one is at fault, or when the search took too long.
        """
        return self._search(document, most) if refusal(embed(document.root)) else []

    def _search(self, document: Document, most: int) -> list[tuple[str, str]]:
        # Meanwhile the references lead to where the document sits while its parts are judged.
        holders = [node for node in document.nodes.values() if "$ref" in node]
        for node in holders:
            node["$ref"] = _HOLD + node["$ref"][1:]
        try:
            return [
                (at, self._keyword(document, at))
                for at in islice(self._smallest(document), most)
            ]
        finally:
            for node in holders:
                node["$ref"] = "#" + node["$ref"][len(_HOLD) :]

    def _refused(self, document: Document, pointer: str) -> bool:
        """Whether the subschema is refused on its own; False when the work allowed is used up."""
        text = json.dumps(document.nodes[pointer])
        alone = '"$ref"' not in text
        if text in self._fine:
            return False
        if not alone:
            text = json.dumps({"$defs": {"r": document.root}, "$ref": _HOLD + ref(pointer)[1:]})
        self.left -= len(text) + _CALL
        if self.left <= 0:
            return False
        refused = bool(refusal(text))
        if alone and not refused:
            self._fine.add(text)
        return refused

    def _smallest(self, document: Document) -> Iterator[str]:
        """The subschemas that are refused though nothing below them is, in reading order."""
        seen = {"": True}  # pointer -> whether it is refused
        path = [_Refused("", _below(document, ""))]  # each is below the one before it
        while path:
            here = path[-1]
            for below in here.below:
                known = below in seen
                if not known:
                    seen[below] = self._refused(document, below)
                if seen[below] and not any(below == above.pointer for above in path):
                    here.excused = True
                    if not known:
                        path.append(_Refused(below, _below(document, below)))
                        break
            else:
                path.pop()
                if not here.excused:
                    yield here.pointer

    def _keyword(self, document: Document, pointer: str) -> str:
        node = document.nodes[pointer]
        whole = dict(node)
        for keyword in sorted(whole, key=lambda key: key in _LATE):
            if keyword in ("$defs", "definitions"):
                continue
            del node[keyword]
            fixed = not self._refused(document, pointer) and self.left > 0
            node.clear()
            node.update(whole)  # in the old order: it is the order of the output's keys
            if fixed:
                return keyword
        return ""


def _below(document: Document, pointer: str) -> Iterator[str]:
    yield from document.children.get(pointer, ())
    if "$ref" in document.nodes[pointer]:
        yield document.refs[pointer]
