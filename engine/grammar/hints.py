"""Texts out of a grammar that an output may have to hold at some place.  Runs no pattern.

An unanchored pattern (`.*foo.*`), or text up to a closing literal, allows every byte until that is
complete, so that a search by what may come next cannot see the way; planner.py tries these texts.
They may be wrong (lookarounds, classes read loosely): the matcher has the last word.
"""

from __future__ import annotations

import json
import re
from collections import Counter

_PATTERN = re.compile(r'"pattern": ("(?:[^"\\]|\\.)*")')  # as json.dumps prints a schema
_MOST = 64  # patterns of one grammar
_LENGTH = 128  # characters of one text
_DEPTH = 32  # groups within groups
_CLASSES = {"d": "0", "w": "a", "s": " ", "D": "a", "W": "-", "S": "a", "b": "", "B": ""}
_COUNT = re.compile(r"\{(\d*)(,\d*)?\}")


_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')
_LITERALS = 48  # of one grammar
_JSON = json.JSONDecoder()


def literals(lark: str) -> list[bytes]:
    """The literals of the rules, schemas left out; those that come up most often first."""
    found: Counter[str] = Counter()
    for line in lark.splitlines():
        parts = line.split("%json ")
        for part in parts[:1] + [part[_JSON.raw_decode(part)[1] :] for part in parts[1:]]:
            found.update(json.loads(literal) for literal in _LITERAL.findall(part))
    return [text.encode() for text, _ in found.most_common(_LITERALS) if text]


def hints(lark: str) -> list[bytes]:
    """Texts that the patterns of schemas match, as the bytes that a JSON string holds for them."""
    found: dict[bytes, None] = {}
    for match in _PATTERN.finditer(lark):
        text = _Sample(json.loads(match[1])).either(0)
        if 0 < len(text) <= _LENGTH:
            found[json.dumps(text, ensure_ascii=False)[1:-1].encode(errors="replace")] = None
        if len(found) >= _MOST:
            break
    return list(found)


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
            if group := re.compile(r"\?(:|P?<\w+>|<?[=!])").match(self._pattern, self._at):
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
