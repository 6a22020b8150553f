"""Texts out of a grammar that an output may have to hold at some place.  Runs no pattern.

An unanchored pattern (`.*foo.*`), or text up to a closing literal, allows every byte until that is
complete, so that a search by what may come next cannot see the way; planner.py tries these texts.
They may be wrong (lookarounds, classes read loosely): the matcher has the last word.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_PATTERN = re.compile(r'"pattern": ("(?:[^"\\]|\\.)*")')  # as json.dumps prints a schema
_MOST = 64  # patterns of one grammar
_MANY = 32  # with more patterns than these it is also told which property each belongs to
_NAMED = 1_000  # properties of which it is; and of patterns of so many characters:
_READ = 256
_LENGTH = 128  # characters of one text
_DEPTH = 32  # groups within groups
_CLASSES = {"d": "0", "w": "a", "s": " ", "D": "a", "W": "-", "S": "a", "b": "", "B": ""}
_COUNT = re.compile(r"\{(\d*)(,\d*)?\}")
_GROUP = re.compile(r"\?(?:[a-z-]*:|P?<\w+>|<?[=!])")

# Of a line of Lark: a schema, which follows; a literal; an expression, or `~` and one; a token.
_PIECE = re.compile(
    r'(?P<schema>%json )|(?P<literal>"(?:[^"\\]|\\.)*")|(?P<expression>~?/(?:[^/\\]|\\.)+/)'
    r"|<\[(?P<token>\d+)\]>"
)
_ENDED = re.compile(r"^\w+\[lazy\]:|: [A-Z0-9_]+ <\[\d+\]>$")  # a text and what ends it
_LITERALS = 48  # of one grammar
_STOPS = 4  # of each kind
_JSON = json.JSONDecoder()


@dataclass(slots=True)
class Texts:
    """What a grammar says of the texts in its outputs, as bytes; tokens as probe.py writes them."""

    hints: tuple[bytes, ...] = ()  # that its patterns match, as a JSON string or plain text has it
    literals: tuple[bytes, ...] = ()  # of its rules; those that come up most often first
    stops: tuple[bytes, ...] = ()  # what ends text that is no JSON; the most frequent first
    followers: tuple[bytes, ...] = ()  # what comes behind a whole JSON value, likewise
    named: Mapping[bytes, list[str]] = field(default_factory=dict)  # property -> its patterns


def read(lark: str) -> Texts:
    """The texts of a grammar."""
    hints: dict[bytes, None] = {}
    literals: Counter[bytes] = Counter()
    stops: Counter[bytes] = Counter()
    followers: Counter[bytes] = Counter()
    named: dict[bytes, list[str]] = {}
    many = lark.count('"pattern": ') > _MANY
    for line in lark.splitlines():
        last, kind, at = b"", None, 0
        while piece := _PIECE.search(line, at):
            at = piece.end()
            kind, before = piece.lastgroup, kind
            match kind:
                case "schema":
                    start, (schema, at) = at, _JSON.raw_decode(line, at)
                    if many:
                        _name(schema, named)
                    _add_patterns(hints, _PATTERN.finditer(line, start, at))
                case "expression" if not piece["expression"].startswith("~"):
                    _add(hints, _sample(piece["expression"][1:-1]))
                case "literal":
                    last = json.loads(piece["literal"]).encode()
                    literals[last] += 1
                case "token":
                    last = b"\xff[%s]" % piece["token"].encode()
            if before == "schema" and last:
                followers[last] += 1
        if last and _ENDED.search(line):
            stops[last] += 1
    return Texts(
        tuple(hints),
        tuple(text for text, _ in literals.most_common(_LITERALS) if text),
        tuple(text for text, _ in stops.most_common(_STOPS)),
        tuple(text for text, _ in followers.most_common(_STOPS)),
        named,
    )


def _add_patterns(hints: dict[bytes, None], found: Iterator[re.Match[str]]) -> None:
    while len(hints) < _MOST and (one := next(found, None)):
        _add(hints, json.dumps(_sample(json.loads(one[1])), ensure_ascii=False)[1:-1])


def sample(pattern: str) -> bytes:
    """The hint of one pattern, as a JSON string has it; empty when it is too long."""
    text = json.dumps(_sample(pattern), ensure_ascii=False)[1:-1]
    return text.encode(errors="replace") if len(text) <= _LENGTH else b""


def _name(schema: Any, named: dict[bytes, list[str]]) -> None:
    """Note the pattern of each property that states one itself."""
    stack = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack += part
        elif isinstance(part, dict):
            stack += part.values()
            properties = part.get("properties")
            for name, below in properties.items() if isinstance(properties, dict) else ():
                pattern = below.get("pattern") if isinstance(below, dict) else None
                if isinstance(pattern, str) and len(pattern) <= _READ and len(named) < _NAMED:
                    key = json.dumps(name, ensure_ascii=False)[1:-1].encode(errors="replace")
                    named.setdefault(key, []).append(pattern)


def _add(hints: dict[bytes, None], text: str) -> None:
    if 0 < len(text) <= _LENGTH and len(hints) < _MOST:
        hints[text.encode(errors="replace")] = None


def _sample(pattern: str) -> str:
    """A text that the pattern matches, as far as reading it once from the left can tell."""
    return _Sample(pattern).either(0)


class _Sample:
    """Reads a pattern once, from left to right, taking the shortest alternative of each group."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def either(self, depth: int) -> str:
        """The shortest alternative up to the end of the group, behind which it then stands."""
        pattern, shortest = self._pattern, None
        text = ""
        while self._at < len(pattern):
            sign = pattern[self._at]
            self._at += 1
            if sign == ")":
                break
            if sign == "|":
                shortest = text if shortest is None or len(text) < len(shortest) else shortest
                text = ""
            else:
                text = (text + self._times(self._atom(sign, depth)))[: _LENGTH + 1]
        return text if shortest is None or len(text) < len(shortest) else shortest

    def _atom(self, sign: str, depth: int) -> str:
        if sign in "^$":
            return ""
        if sign == ".":
            return "a"
        if sign == "[":
            return self._member()
        if sign == "\\":
            return self._escaped()
        if sign == "(" and depth < _DEPTH:
            if group := _GROUP.match(self._pattern, self._at):
                self._at = group.end()
            return self.either(depth + 1)
        return sign

    def _escaped(self) -> str:
        letter = self._pattern[self._at : self._at + 1]
        self._at += 1
        return _CLASSES.get(letter, letter)

    def _member(self) -> str:
        """One member of the class whose bracket was just read."""
        pattern, first = self._pattern, self._at
        excluded = pattern.startswith("^", first)
        at = first = first + excluded
        while at < len(pattern) and (pattern[at] != "]" or at == first):
            at += 2 if pattern[at] == "\\" else 1
        inside = pattern[first:at]
        self._at = at + 1
        if excluded:
            return next((letter for letter in "a0-~ ." if letter not in inside), "b")
        return _CLASSES.get(inside[1:2], inside[1:2]) if inside[:1] == "\\" else inside[:1]

    def _times(self, text: str) -> str:
        """The text as often as the quantifier that may follow asks for at least."""
        pattern = self._pattern
        count = 1
        if pattern.startswith(("?", "*"), self._at):
            count, self._at = 0, self._at + 1
        elif pattern.startswith("+", self._at):
            self._at += 1
        elif found := _COUNT.match(pattern, self._at):
            count, self._at = min(int(found[1] or 0), _LENGTH + 1), found.end()
        else:
            return text
        if pattern.startswith(("?", "+"), self._at):
            self._at += 1  # lazy or possessive
        return text * count
