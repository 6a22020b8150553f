"""A string's schema as a Lark expression over its raw text.  Decides no layout.

Lengths, enums, `const`, formats and patterns are enforced by expressions; a pattern that cannot be
one is dropped and named.  The text ends at the first closing literal, so it never contains one:

    value[lazy]: EXPRESSION "</arg_value>"      the first closing literal ends it
"""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from engine.grammar.schema import Dropped
from gateway.tools.values import Node, Schema

ANY = r"/(?s:.*)/"

_DATE = (
    r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_HOUR = r"(?:[01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR}:[0-5][0-9])"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = r"[0-9a-fA-F]{1,4}"
# Each takes only valid values of the format, though not all of them.
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P(?:[0-9]{1,9}W|[0-9]{1,9}D(?:T[0-9]{1,9}[HMS])?|T[0-9]{1,9}[HMS])",
    "email": rf"[a-zA-Z0-9_+-]+(?:\.[a-zA-Z0-9_+-]+)*@{_LABEL}(?:\.{_LABEL})+",
    "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,3}}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": rf"(?:{_HEX}:){{7}}{_HEX}|::(?:{_HEX}(?::{_HEX}){{0,5}})?|{_HEX}::{_HEX}",
    "uuid": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "uri": r"[a-zA-Z][a-zA-Z0-9+.-]*://[a-zA-Z0-9._~:@!$&'()*+,;=/?#%-]+",
}
_CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[a-zA-Z0-9_]", "W": "[^a-zA-Z0-9_]"}
_IN_CLASS = {"d": "0-9", "w": "a-zA-Z0-9_"}
_CLASS_LETTERS = {"/": "\\/", "\n": "\\n", "[": "\\[", "&": "\\&", "~": "\\~"}  # set operators
_DIGITS = {"u": 4, "x": 2}  # of an escape by its letter
_HEX_LETTERS = frozenset(string.hexdigits)
_LITERALS = 4000  # characters of one pattern: longer ones are not even tried


@dataclass(slots=True)
class Texts:
    """Writes the expressions for one layout's texts."""

    end: str  # the closing literal of a text; empty when a control token closes it

    def expression(
        self, schema: Schema, node: Node, pointer: str, dropped: list[Dropped]
    ) -> str:
        """The Lark expression of the texts that `node` allows; what it cannot say is `dropped`."""
        return self._of(schema, node, pointer, dropped) or ANY

    def rule(self, name: str, expression: str, close: str) -> str:
        """The rule for a text and its closing literal `close` (as Lark)."""
        if not self.end:
            return f"{name}: {name.upper()} {close}\n{name.upper()}: {expression}"
        return f"{name}[lazy]: ({expression}) {close}"

    def _of(self, schema: Schema, node: Node, pointer: str, dropped: list[Dropped]) -> str | None:
        parts: list[str] = []
        if "enum" in node:
            parts.append(self._listed([one for one in node["enum"] if isinstance(one, str)]))
        if "const" in node:
            parts.append(self._listed([node["const"]]))
        if "minLength" in node or "maxLength" in node:
            parts.append(self._length(node.get("minLength", 0), node.get("maxLength")))
        if "format" in node:
            parts.append(f"/{_slashed(FORMATS[node['format']])}/")
        if "pattern" in node:
            parts += self._pattern(node["pattern"], pointer, dropped)
        if "$ref" in node:
            parts += _some(self._of(schema, schema.at(node["$ref"]), node["$ref"][1:], dropped))
        for i, part in enumerate(node.get("allOf", ())):
            parts += _some(self._part(schema, part, f"{pointer}/allOf/{i}", dropped))
        for key in ("anyOf", "oneOf"):
            if key in node:
                parts += _some(self._any_of(schema, node[key], f"{pointer}/{key}", dropped))
        return " & ".join(f"({part})" for part in parts) if parts else None

    def _part(
        self, schema: Schema, part: Any, pointer: str, dropped: list[Dropped]
    ) -> str | None:
        return self._of(schema, part, pointer, dropped) if isinstance(part, dict) else None

    def _any_of(
        self, schema: Schema, parts: Sequence[Any], pointer: str, dropped: list[Dropped]
    ) -> str | None:
        """The texts of any alternative that allows strings; None when one allows all of them."""
        found: list[str] = []
        for i, part in enumerate(parts):
            if "string" not in schema.types(part):
                continue
            one = self._part(schema, part, f"{pointer}/{i}", dropped)
            if one is None:
                return None
            found.append(one)
        return " | ".join(f"({one})" for one in found) or None

    def _listed(self, values: Sequence[str]) -> str:
        """These texts; those with the closing literal inside cannot be written."""
        fine = [one for one in values if not self.end or self.end not in one]
        return " | ".join(map(literal, fine)) or '"a" & "b"'

    def _length(self, least: int, most: int | None) -> str:
        """Texts of so many code points.

        The closing literal must not begin within the first `least` ones: lazily it would be passed
        over there.
        """
        rest = ".*" if most is None else f".{{0,{most - least}}}"
        first = f"[^{_in_class(self.end[0])}]" if self.end else "."
        return f"/(?s:{first}{{{least}}}{rest})/" if least else f"/(?s:{rest})/"

    def _pattern(self, pattern: str, pointer: str, dropped: list[Dropped]) -> list[str]:
        """The pattern as an expression that the closing literal cannot be inside; or dropped."""
        found = regex(pattern)
        choices = [] if found is None else [f"/{found}/"]
        if self.end and found is not None:
            end = "".join(f"\\x{ord(letter):02x}" for letter in self.end)
            holds = f"/(?s:.*){end}(?s:.*)/"
            choices = [f"/{found}/ & /[^{_in_class(self.end[0])}]*/", f"/{found}/ & ~{holds}"]
        for choice in choices:
            if works(self.rule("start", choice, literal(self.end) if self.end else '""')):
                return [choice]
        dropped.append(Dropped(pointer, "pattern", "this model's layout cannot enforce it"))
        return []


def _some(found: str | None) -> list[str]:
    return [] if found is None else [found]


def literal(text: str) -> str:
    """A text as Lark."""
    return json.dumps(text, ensure_ascii=False)


def _in_class(letter: str) -> str:
    return {"\n": "\\n"}.get(letter, letter)


def _slashed(expression: str) -> str:
    """A regular expression as it may stand between slashes."""
    shown = {"/": "\\/", "\n": "\\n"}
    return "".join(shown.get(piece, piece) for piece in _pieces(expression))


def _pieces(pattern: str) -> list[str]:
    """The letters of a pattern, each escape as one."""
    pieces: list[str] = []
    at = 0
    while at < len(pattern):
        size = 2 if pattern[at] == "\\" else 1
        count = _DIGITS.get(pattern[at + 1 : at + 2], 0)
        digits = pattern[at + 2 : at + 2 + count]
        if size == 2 and len(digits) == count and _HEX_LETTERS.issuperset(digits):
            size += count
        pieces.append(pattern[at : at + size])
        at += size
    return pieces


def regex(pattern: str) -> str | None:
    """An ECMA pattern, which may match anywhere, as one that matches the whole text.

    None for what has no such form here: look-around, back references, anchors inside.
    """
    if len(pattern) > _LITERALS:
        return None
    tokens = _pieces(pattern)
    starts, ends = tokens[:1] == ["^"], tokens[-1:] == ["$"] and len(tokens) > 0
    inner = tokens[starts : len(tokens) - ends]
    body = _translated(inner, top=not (starts or ends))
    if body is None:
        return None
    before = "" if starts else "(?s:.*)"
    return f"{before}(?:{body}){'' if ends else '(?s:.*)'}"


def _translated(pieces: Sequence[str], top: bool) -> str | None:
    """The pieces in Rust's syntax, for slashes; `top`: alternatives may stand outside of groups."""
    out: list[str] = []
    inside, depth = False, 0  # a class; groups
    for at, piece in enumerate(pieces):
        if piece[0] == "\\":
            if piece[1] in "bB123456789ckpP" or (inside and piece[1] in "DW"):
                return None
            table = _IN_CLASS if inside else _CLASSES
            out.append(table.get(piece[1], "\\/" if piece[1] == "/" else piece))
        elif inside:
            inside = piece != "]"
            out.append(_CLASS_LETTERS.get(piece, piece))
        elif piece in "^$" or (piece == "|" and depth == 0 and not top):
            return None
        elif piece == "(" and pieces[at + 1 : at + 2] == ["?"] and pieces[at + 2 : at + 3] != [":"]:
            return None
        else:
            inside = piece == "["
            depth += (piece == "(") - (piece == ")")
            out.append({"/": "\\/", "\n": "\\n"}.get(piece, piece))
    return "".join(out)


@cache
def _bytes() -> Any:
    return llguidance.LLTokenizer("byte")


@lru_cache(maxsize=4096)
def works(lark: str) -> bool:
    """Whether llguidance compiles the grammar, and some text satisfies it."""
    limits = llguidance.LLParserLimits(verbose_errors=False)
    matcher = llguidance.LLMatcher(_bytes(), lark, log_level=0, limits=limits)
    if matcher.is_error():
        return False
    mask = np.zeros((1, (_bytes().vocab_size + 31) // 32), dtype=np.int32)
    fill_next_token_bitmask(matcher, mask)
    return bool(mask.any()) and not matcher.is_error()
