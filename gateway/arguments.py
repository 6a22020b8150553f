"""A call's arguments in history: parsed, but each value knows how it was written.  Renders none.

The next prompt continues the tokens of the last one only if it spells each value as the model did:
`1.0` is not `1.00`, and a template prints `1.0` for both when all that it gets is a float.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.tools.literals import literal

_LEXEME = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[^\s",:]+|[,:]', re.DOTALL)
_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_DECODER = json.JSONDecoder()
DEPTH = 200  # of objects and arrays
_DIGITS = 4_000  # of an integer; Python reads no more than 4,300
_SPELLED = 2  # levels that keep their text: the object, and each argument


class BadArguments(ValueError):
    """The text is not one JSON object."""


class Number(float):
    """A number that Python would write in another way."""

    spelled: str

    def __new__(cls, spelled: str) -> Number:
        made = super().__new__(cls, spelled)
        made.spelled = spelled
        return made

    def __str__(self) -> str:
        return self.spelled


class Word(str):
    """`true`, `false` or `null` as a layout writes it, which Jinja would print as Python does."""

    __slots__ = ()

    @property
    def spelled(self) -> str:
        """Itself, without the quotes of a string."""
        return str(self)

    def __bool__(self) -> bool:
        return self in ("true", "True")


@dataclass(frozen=True, slots=True)
class Style:
    """How a layout writes an argument that a template prints by itself."""

    words: Mapping[str, Any]  # of JSON's three
    python: bool = False  # arrays and objects as Python literals


#: Layouts that write arguments as one JSON object.
PLAIN = Style({"true": True, "false": False, "null": None})
#: Those that write each by itself, as JSON.
BY_JSON = Style({word: Word(word) for word in PLAIN.words})
#: Those that write each as a Python literal.
BY_PYTHON = Style({"true": Word("True"), "false": Word("False"), "null": Word("None")}, True)


class Items(list[Any]):
    """An array, and its text."""

    def __init__(self, items: list[Any], spelled: str) -> None:
        super().__init__(items)
        self.spelled = spelled

    def __str__(self) -> str:
        return self.spelled


class Object(dict[str, Any]):
    """An object, and its text."""

    def __init__(self, fields: Mapping[str, Any], spelled: str) -> None:
        super().__init__(fields)
        self.spelled = spelled

    def __str__(self) -> str:
        return self.spelled


def parsed(text: str, style: Style = PLAIN) -> Object:
    """The object that `text` says; raise BadArguments."""
    try:
        reader = _Reader(text, style)
        value, end = reader.value(reader.skip(0), 0)
    except (ValueError, IndexError, RecursionError):
        raise BadArguments("no JSON") from None
    if not isinstance(value, Object) or text[end:].strip(" \t\n\r"):
        raise BadArguments("no JSON object")
    return value


class _Reader:
    """Reads JSON with Python's own scanner of strings."""

    def __init__(self, text: str, style: Style) -> None:
        self._text = text
        self._style = style

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        """The value that begins at `at`, and where it ends; raise ValueError or IndexError."""
        first = self._text[at]
        if first == '"':
            return self._string(at)
        if first in "{[":
            return self._container(at, depth + 1)
        for spelled, word in self._style.words.items():
            if self._text.startswith(spelled, at):
                return word, at + len(spelled)
        found = _NUMBER.match(self._text, at)
        if found is None:
            raise ValueError("no JSON value")
        return _number(found[0]), found.end()

    def _string(self, at: int) -> tuple[str, int]:
        made: str
        made, end = _DECODER.raw_decode(self._text, at)
        made.encode()  # half of a surrogate pair is a ValueError
        return made, end

    def _container(self, start: int, depth: int) -> tuple[Any, int]:
        if depth > DEPTH:
            raise ValueError("nested too deeply")
        close = "}" if self._text[start] == "{" else "]"
        fields: dict[str, Any] = {}
        items: list[Any] = []
        at = self.skip(start + 1)
        while self._text[at] != close or fields or items:
            if close == "}":
                key, at = self._string(self._sure(at, '"'))
                at = self.skip(self._sure(self.skip(at), ":") + 1)
                fields[key], at = self.value(at, depth)
            else:
                item, at = self.value(at, depth)
                items.append(item)
            at = self.skip(at)
            if self._text[at] == close:
                break
            at = self.skip(self._sure(at, ",") + 1)
        if depth > _SPELLED:
            return (fields if close == "}" else items), at + 1
        if self._style.python and depth > 1:
            spelled = literal_of(fields if close == "}" else items)
        else:
            spelled = respaced(self._text[start : at + 1])
        return (Object(fields, spelled) if close == "}" else Items(items, spelled)), at + 1

    def skip(self, at: int) -> int:
        """Past white space."""
        found = _SPACE.match(self._text, at)
        return found.end() if found else at

    def _sure(self, at: int, letter: str) -> int:
        if self._text[at] != letter:
            raise ValueError(f"{letter} is missing")
        return at


def check(text: str) -> None:
    """Raise BadArguments unless parsed() would take the text.

    msgspec says so of almost all, a hundred times as fast; it has limits of its own for numbers.
    """
    if text.count("{") + text.count("[") <= DEPTH:
        try:
            msgspec.json.decode(text, type=dict[str, object])
            return
        except msgspec.DecodeError:
            pass
    parsed(text)


def _number(spelled: str) -> Any:
    if spelled.lstrip("-").isdecimal() and spelled != "-0" and len(spelled) <= _DIGITS:
        return int(spelled)
    plain = float(spelled)
    return plain if repr(plain) == spelled else Number(spelled)


def respaced(arguments: str) -> str:
    """JSON text with white space as `json.dumps` puts it, and every literal as it was.

    The grammar pins a call's arguments to this spacing, so a client that re-spaced them still
    continues the cached tokens.
    """
    out: list[str] = []
    for lexeme in _LEXEME.findall(arguments):
        out.append(f"{lexeme} " if lexeme in (",", ":") else lexeme)
    return "".join(out)


def literal_of(value: Any) -> str:
    """A parsed value as a Python literal, with the white space of json.dumps."""
    match value:
        case Number() | Word():
            return value.spelled
        case list():
            return f"[{', '.join(map(literal_of, value))}]"
        case dict():
            inside = (f"{literal_of(key)}: {literal_of(one)}" for key, one in value.items())
            return f"{{{', '.join(inside)}}}"
        case _:
            return literal(value)


def meaning(arguments: str) -> str:
    """One text for all JSON texts that say the same: order of keys, numbers, escapes aside."""
    return json.dumps(_plain(parsed(arguments)), sort_keys=True)


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {key: _plain(one) for key, one in value.items()}
        case list():
            return [_plain(one) for one in value]
        case Number() if "." in value.spelled or "e" in value.spelled.lower():
            return _plain(float(value))
        case Number():
            return ["int", value.spelled]
        case float() if value.is_integer() and abs(value) < 2**53:
            return int(value)
        case _:
            return value
