"""The scanner over pythonic calls: Python literals in, JSON arguments out.  Evaluates nothing.

Strings leave as they come; numbers and names when they are complete.  Control tokens around a list
have no meaning of their own.  Nothing that was sent is ever taken back.
"""

from __future__ import annotations

import json
import string
from typing import Literal

from gateway.events import CallArgs, CallEnd, CallStart, Event, Text
from gateway.tools.control import without
from gateway.tools.held import (
    BACKSLASH,
    NAME_LETTERS,
    NAME_LIMIT,
    Held,
    blank,
    nearest,
    run,
    watch,
)
from gateway.tools.marked import openai_id
from gateway.tools.tags_scanner import escaped, quoted

NO_KEY = frozenset("=,()[]{}<>\"'#\\")  # nor white space
_KEY_LIMIT = 256
_STARTS = frozenset(string.ascii_letters + string.digits + "\"'[{.-")  # of a value
_NO_WORD = frozenset(",:()[]{}\"'")  # nor white space
_HEX = {"x": 2, "u": 4, "U": 8}  # digits of an escape
_HEX_DIGITS, _OCTAL_DIGITS = frozenset(string.hexdigits), frozenset(string.octdigits)
_NAMED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_OPENERS = {"[": "[", "{": "{", "(": "["}
_CLOSERS = {"]": "]", "}": "}", ")": "]"}

Step = Literal["text", "key", "value", "string", "next"]


class PythonicScanner(Held):
    """See gateway.tools.Scanner."""

    _step: Step
    _calling = "string"

    def __init__(self, names: frozenset[str] = frozenset()) -> None:
        """`names`: of the tools; a list that begins with another one is text.  Empty: any does."""
        super().__init__("text")
        self._names = names
        self._pairs = 0  # of the open call
        self._depth = 0  # brackets open in the value
        self._comma = False  # one is due before the next item
        self._quote = ""  # of the string that is open
        self.watched = self._watch()

    def _watch(self) -> bytes | None:
        if self._held:
            return None
        if self._step == "string":  # escapes and double quotes hold a backslash in JSON
            return BACKSLASH if self._quote == '"' else None
        return watch("[") if self._step == "text" and not self._after else None

    def close(self) -> list[Event]:
        """No more text comes: what was held back is text, or the start of a value that was cut."""
        rest, self._held = without(self._held), ""
        if self._step == "text":
            return [] if not rest or (self._after and rest.isspace()) else [Text(rest)]
        if self._step == "value" and rest[:1].isdigit():
            return [CallArgs(self._index, rest)]
        return []

    def _go(self, events: list[Event]) -> bool:
        """One step on; return whether there may be more to scan."""
        if self._step != "text" and not self._held.isascii():
            self._held = without(self._held)
        match self._step:
            case "text":
                return self._text(events)
            case "key":
                return self._key(events)
            case "next":
                return self._joined(events)
            case "value" | "string":
                return self._value(events)

    def _text(self, events: list[Event]) -> bool:
        """Emit text up to what may begin a list; return whether there may be more to scan."""
        at = self._held.find("[")
        if at < 0:
            self._emit(events, len(self._held))
            return False
        self._emit(events, at)
        at = self._held.find("[")
        name = self._head(at)
        if name is None:
            return False
        if name:
            self._enter(events, name, at + len(name) + 2)
            return True
        self._after = False
        self._emit(events, at + 1)  # its first letter is text; the rest is scanned again
        return True

    def _head(self, at: int) -> str | None:
        """The name that a list of calls at `at` begins with; "" = it is none, None = it may be."""
        held = self._held
        stop = run(held, at + 1, NAME_LETTERS, NAME_LIMIT)
        name = held[at + 1 : stop]
        if stop == len(held):
            return None
        if held[stop] != "(" or not name or (self._names and name not in self._names):
            return ""
        key = end = stop + 1
        if held[key : key + 1] == ")":
            return name
        limit = min(len(held), key + _KEY_LIMIT)
        while end < limit and not held[end].isspace() and held[end] not in NO_KEY:
            end += 1
        if end == len(held) or (end > key and held[end:] == "="):
            return None
        return name if end > key and held[end] == "=" and held[end + 1] in _STARTS else ""

    def _enter(self, events: list[Event], name: str, start: int) -> None:
        self._index += 1
        self._held = without(self._held[start:])
        self._step, self._pairs = "key", 0
        events.append(CallStart(self._index, openai_id(), name))

    def _key(self, events: list[Event]) -> bool:
        """Between values: a parameter's name or the call's end."""
        held, at = self._held, 0
        while at < len(held) and (held[at] == "," or held[at].isspace()):
            at += 1
        if held[at : at + 1] == ")":
            self._held = held[at + 1 :]
            self._step = "next"
            events += (CallArgs(self._index, "}" if self._pairs else "{}"), CallEnd(self._index))
            return True
        equals = held.find("=", at)
        key = held[at : max(equals, at)].rstrip()
        if not key or any(letter.isspace() or letter in NO_KEY for letter in key):
            return False
        self._held = held[equals + 1 :]
        opening = ", " if self._pairs else "{"
        self._pairs += 1
        self._step, self._depth, self._comma = "value", 0, False
        events.append(CallArgs(self._index, f"{opening}{quoted(key)}: "))
        return True

    def _joined(self, events: list[Event]) -> bool:
        """After a call: the next one, the list's end, or something else."""
        held, at = self._held, blank(self._held)
        stop = at
        if held[at : at + 1] == ",":
            start = blank(held, at + 1)
            stop = run(held, start, NAME_LETTERS, NAME_LIMIT)
            if stop > start and held[stop : stop + 1] == "(":
                self._enter(events, held[start:stop], stop + 1)
                return True
        if stop == len(held):
            return False
        self._held = held[at:].removeprefix("]")
        self._step, self._after = "text", True
        return True

    def _value(self, events: list[Event]) -> bool:
        """Emit what is known of a value; return whether it has ended."""
        out: list[str] = []
        go = True
        while go and self._held and self._step != "key":
            go = self._string(out) if self._step == "string" else self._item(out)
        if piece := "".join(out):
            events.append(CallArgs(self._index, piece))
        return go

    def _item(self, out: list[str]) -> bool:
        """Outside of strings: a bracket, a separator, a word, or the start of a string."""
        held, letter = self._held, self._held[0]
        if self._depth == 0 and letter in ",)":
            self._step = "key"
            return True
        end = 0
        while end < len(held) and not held[end].isspace() and held[end] not in _NO_WORD:
            end += 1
        if end:
            if end == len(held):
                return False
            self._due(out)
            out.append(_word(held[:end]))
            self._held = held[end:]
            return True
        self._held = held[1:]
        if letter in "\"'":
            self._due(out)
            self._step, self._quote = "string", letter
            out.append('"')
        elif letter in _OPENERS:
            self._due(out)
            self._depth += 1
            out.append(_OPENERS[letter])
        elif letter in _CLOSERS:
            self._depth -= 1
            self._comma = False  # one before a closing bracket means nothing
            out.append(_CLOSERS[letter])
        elif letter == ",":
            self._comma = True
        elif letter == ":":
            out.append(": ")
        return True

    def _due(self, out: list[str]) -> None:
        """The comma before another item."""
        if self._comma:
            out.append(", ")
        self._comma = False

    def _string(self, out: list[str]) -> bool:
        """Inside a string: its letters as JSON, up to its end."""
        held = self._held
        at = nearest(held, self._quote, 0)
        if at:
            plain = held if at < 0 else held[:at]
            out.append(escaped(plain))
            self._held = held[len(plain) :]
            return True
        if held[0] == self._quote:
            self._held = held[1:]
            self._step = "value"
            out.append('"')
            return True
        length = _escape(held)
        if not length:
            return False
        self._held = held[length:]
        out.append(_unescaped(held[:length]))
        return True


def _escape(text: str) -> int:
    """Length of the escape that a text begins with, 1 for a backslash that is none; 0 = unknown."""
    kind = text[1:2]
    if kind in _HEX:
        end = run(text, 2, _HEX_DIGITS, _HEX[kind])
        return end if end == 2 + _HEX[kind] else 0 if end == len(text) else 1
    if kind in _OCTAL_DIGITS:
        end = run(text, 1, _OCTAL_DIGITS, 3)
        return 0 if end == len(text) and end < 4 else end
    return 2 if kind else 0


def _unescaped(escape: str) -> str:
    """An escape of a Python string inside a JSON string."""
    kind = escape[1:2]
    if kind == "u":
        return escape  # of JSON too, halves of a pair included
    if kind in _NAMED:
        return escaped(_NAMED[kind])
    if kind in ("\\", "'", '"'):
        return escaped(kind)
    if kind in "xU" and len(escape) > 2:
        return escaped(_letter(int(escape[2:], 16)))
    if kind.isdigit() and kind in "01234567":
        return escaped(_letter(int(escape[1:], 8)))
    return escaped(escape)


def _letter(code: int) -> str:
    return chr(code) if code < 0xD800 or 0xDFFF < code <= 0x10FFFF else "\ufffd"


def _word(word: str) -> str:
    """A number or a name as JSON; what is neither is a string."""
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    try:
        json.loads(word, parse_constant=int)
    except ValueError:
        return _number(word)
    return word


def _number(word: str) -> str:
    """A number that only Python writes so, or a string."""
    try:
        return str(int(word.replace("_", ""), 0))
    except ValueError:
        pass
    try:
        return json.dumps(float(word), allow_nan=False)
    except ValueError:
        return quoted(word)
