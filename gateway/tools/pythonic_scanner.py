"""The scanner over pythonic calls: Python literals in, JSON arguments out.  Evaluates nothing.

Strings leave as they come; numbers and names when they are complete.  Control tokens around a list
have no meaning of their own.  Nothing that was sent is ever taken back.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from gateway.events import CallArgs, CallEnd, CallStart, Event, Text
from gateway.tools.control import without
from gateway.tools.held import BACKSLASH, watch
from gateway.tools.marked import openai_id
from gateway.tools.tags_scanner import escaped, quoted

_KEY = r"[^\s=,()\[\]{}<>\"'#\\]"
# What may still become the start of a list, and what is one.
_MAYBE = re.compile(rf"\[(?:[a-zA-Z0-9_-]{{1,64}}(?:\((?:\)|{_KEY}{{1,256}}=?)?)?)?")
_IS = re.compile(rf"\[([a-zA-Z0-9_-]{{1,64}})\((?:\)|{_KEY}{{1,256}}=[\"'\[{{0-9a-zA-Z.-])")
_NEXT = re.compile(r"\s*,\s*([a-zA-Z0-9_-]{1,64})\(")
_MAYBE_NEXT = re.compile(r"\s*(?:,\s*(?:[a-zA-Z0-9_-]{1,64})?)?")
_KEYED = re.compile(rf"[\s,]*({_KEY}+)\s*=")
_WORD = re.compile(r"[^\s,:()\[\]{}\"']+")
_PLAIN = {"'": re.compile(r"[^'\\]+"), '"': re.compile(r'[^"\\]+')}
_ESCAPE = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|[^xuU0-7])", re.DOTALL
)
_LONGEST = 10  # characters of an escape
_NAMED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_OPENERS = {"[": "[", "{": "{", "(": "["}
_CLOSERS = {"]": "]", "}": "}", ")": "]"}

Step = Literal["text", "key", "value", "next"]


class PythonicScanner:
    """See gateway.tools.Scanner."""

    def __init__(self, names: frozenset[str] = frozenset()) -> None:
        """`names`: of the tools; a list that begins with another one is text.  Empty: any does."""
        self._names = names
        self._held = ""
        self._step: Step = "text"
        self._index = -1  # of the newest call
        self._after = False  # a list has ended, and nothing but white space since
        self._pairs = 0  # of the open call
        self._depth = 0  # brackets open in the value
        self._comma = False  # one is due before the next item
        self._quote = ""  # of the string that is open
        self.call = -1  # the one whose string is open
        self.watched = self._watch()

    def push(self, text: str) -> list[Event]:
        """Take the next piece of text; return what is certain now."""
        self._held += text if self._step == "text" else without(text)
        events: list[Event] = []
        while self._held and self._go(events):
            pass
        self.call = self._index if self._quote else -1
        self.watched = self._watch()
        return events

    def _watch(self) -> bytes | None:
        if self._held or (self._after and not self._quote):
            return None
        if self._quote:  # escapes and double quotes hold a backslash in JSON
            return BACKSLASH if self._quote == '"' else None
        return watch("[") if self._step == "text" else None

    def close(self) -> list[Event]:
        """No more text comes: what was held back is text, or the start of a value that was cut."""
        rest, self._held = without(self._held), ""
        if self._step == "text":
            return [] if not rest or (self._after and rest.isspace()) else [Text(rest)]
        if self._step == "value" and not self._quote and rest[:1].isdigit():
            return [CallArgs(self._index, rest)]
        return []

    def _go(self, events: list[Event]) -> bool:
        """One step on; return whether there may be more to scan."""
        match self._step:
            case "text":
                return self._text(events)
            case "key":
                return self._key(events)
            case "next":
                return self._joined(events)
            case "value":
                out: list[str] = []
                go = True
                while go and self._held and self._step == "value":
                    go = self._string(out) if self._quote else self._item(out)
                if piece := "".join(out):
                    events.append(CallArgs(self._index, piece))
                return go

    def _text(self, events: list[Event]) -> bool:
        """Emit text up to what may begin a list; return whether there may be more to scan."""
        at = self._held.find("[")
        if at < 0:
            self._emit(events, len(self._held))
            return False
        self._emit(events, at)
        at = self._held.find("[")
        found = _IS.match(self._held, at)
        if found and (not self._names or found[1] in self._names):
            self._enter(events, found[1], at + len(found[1]) + 2)
            return True
        maybe = _MAYBE.match(self._held, at)
        if not found and maybe is not None and maybe.end() == len(self._held):
            return False
        self._after = False
        self._emit(events, at + 1)  # its first letter is text; the rest is scanned again
        return True

    def _enter(self, events: list[Event], name: str, start: int) -> None:
        self._index += 1
        self._held = without(self._held[start:])
        self._step, self._pairs = "key", 0
        events.append(CallStart(self._index, openai_id(), name))

    def _key(self, events: list[Event]) -> bool:
        """Between values: a parameter's name or the call's end."""
        if found := _KEYED.match(self._held):
            self._held = self._held[found.end() :]
            opening = ", " if self._pairs else "{"
            self._pairs += 1
            self._step, self._depth, self._comma = "value", 0, False
            events.append(CallArgs(self._index, f"{opening}{quoted(found[1])}: "))
            return True
        rest = self._held.lstrip(" \t\r\n,")
        if not rest.startswith(")"):
            return False
        self._held = rest[1:]
        self._step = "next"
        events += (CallArgs(self._index, "}" if self._pairs else "{}"), CallEnd(self._index))
        return True

    def _joined(self, events: list[Event]) -> bool:
        """After a call: the next one, the list's end, or something else."""
        if found := _NEXT.match(self._held):
            self._enter(events, found[1], found.end())
            return True
        rest = self._held.lstrip()
        maybe = _MAYBE_NEXT.match(self._held)
        if not rest.startswith("]") and maybe is not None and maybe.end() == len(self._held):
            return False
        self._held = rest.removeprefix("]")
        self._step, self._after = "text", True
        return True

    def _item(self, out: list[str]) -> bool:
        """Outside of strings: a bracket, a separator, a word, or the start of a string."""
        letter = self._held[0]
        if self._depth == 0 and letter in ",)":
            self._step = "key"
            return True
        if found := _WORD.match(self._held):
            if found.end() == len(self._held):
                return False
            self._due(out)
            out.append(_word(found[0]))
            self._held = self._held[found.end() :]
            return True
        self._held = self._held[1:]
        if letter in "\"'":
            self._due(out)
            self._quote = letter
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
        if found := _PLAIN[self._quote].match(self._held):
            out.append(escaped(found[0]))
            self._held = self._held[found.end() :]
            return True
        if self._held[0] == self._quote:
            self._held = self._held[1:]
            self._quote = ""
            out.append('"')
            return True
        found = _ESCAPE.match(self._held)
        taken = found[0] if found else self._held[0]
        octal = taken[1:2].isdigit() and len(taken) < 4 and taken == self._held
        if len(self._held) < _LONGEST and (found is None or octal):
            return False
        self._held = self._held[len(taken) :]
        out.append(_unescaped(taken))
        return True

    def _emit(self, events: list[Event], count: int) -> None:
        """Send the first `count` held characters as text; keep white space after a list."""
        text = without(self._held[:count])
        if self._after and (not text or text.isspace()):
            return
        self._after = False
        self._held = self._held[count:]
        if text:
            events.append(Text(text))


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
