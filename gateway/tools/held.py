"""What scanners share: what to hold back or not to hear of, letters by class, where JSON ends.

Knows no layout and reads no call.  Letters are looked at one by one or found by `str.find`.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Set

import msgspec

from gateway.events import Event, Text
from gateway.tools.control import is_control, without

NEVER = b"\n"  # in no JSON text of a letter
BACKSLASH = b"\\"  # in the JSON of every letter that needs an escape
NAME_LETTERS = frozenset(string.ascii_letters + string.digits + "_-")  # of a tool, as on the wire
NAME_LIMIT = 64


def run(text: str, at: int, letters: Set[str], most: int) -> int:
    """Where the letters of a class that begin at `at` end, after at most so many."""
    stop = min(len(text), at + most)
    while at < stop and text[at] in letters:
        at += 1
    return at


def blank(text: str, at: int = 0) -> int:
    """Where the white space that begins at `at` ends."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def nearest(text: str, quote: str, at: int) -> int:
    """Where the next `quote` or backslash stands; -1 = nowhere."""
    found = text.find(quote, at)
    slash = text.find("\\", at, found if found >= 0 else len(text))
    return slash if slash >= 0 else found


def overlap(text: str, literal: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `literal`."""
    if not literal:
        return 0
    at = text.find(literal[0], max(0, len(text) - len(literal) + 1))
    while at >= 0:
        if literal.startswith(text[at:]):
            return len(text) - at
        at = text.find(literal[0], at + 1)
    return 0


@functools.cache
def watch(literal: str) -> bytes:
    """The first letter of a literal as it stands in JSON text; NEVER for a control token."""
    if not literal or is_control(literal[0]):
        return NEVER
    return msgspec.json.encode(literal[0])[1:-1]


class Held:
    """A scanner's text that is not yet an event; see gateway.tools.Scanner.

    Plain values only, since scanners are copied.
    """

    _step: str
    _calling = "arguments"  # the step in which a text may be arguments as it is

    def __init__(self, step: str) -> None:
        """`step`: the first one."""
        self._step = step
        self._held = ""
        self._index = -1  # of the newest call
        self._after = False  # white space since the last call may still turn out to be a joint
        self.call = -1  # the one whose arguments come
        self.watched: bytes | None = None

    def push(self, text: str) -> list[Event]:
        """Take the next piece of text; return what is certain now."""
        self._held += text
        events: list[Event] = []
        while self._held and self._go(events):
            pass
        self.call = self._index if self._step == self._calling else -1
        self.watched = self._watch()
        return events

    def _go(self, events: list[Event]) -> bool:
        """One step on; return whether there may be more to scan."""
        raise NotImplementedError

    def _watch(self) -> bytes | None:
        """See Scanner.watched."""
        raise NotImplementedError

    def _emit(self, events: list[Event], count: int) -> None:
        """Send the first `count` held characters as text; keep white space after a call."""
        text = without(self._held[:count])
        if self._after and (not text or text.isspace()):
            return
        self._after = False
        self._held = self._held[count:]
        if text:
            events.append(Text(text))


class Braces(Held):
    """Follows a JSON object to its end, too."""

    _depth = 0  # brackets that are open
    _quoted = _escaped = False  # inside a string; behind its backslash

    def _new_object(self) -> None:
        """An object begins with what comes next."""
        self._depth, self._quoted, self._escaped = 0, False, False

    def _end_of_object(self, text: str) -> int:
        """Where the object ends in its next piece; -1 = not here."""
        for at, letter in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = letter == "\\", letter != '"'
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        return -1
