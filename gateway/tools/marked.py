"""Calls written as JSON between fixed literals: their grammar and scanner.  No schema logic.

text  BEGIN HEAD name MIDDLE {arguments} END  JOINT  BEGIN HEAD name MIDDLE {arguments} END
"""

from __future__ import annotations

import functools
import json
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from engine.grammar.schema import embed
from gateway.events import CallArgs, CallEnd, CallStart, Event, Text
from gateway.tools import Choice, Tool

_ID_LETTERS = string.ascii_letters + string.digits
_NAME_LETTERS = frozenset(string.ascii_letters + string.digits + "_-")
_NAME_LIMIT = 64  # characters, as on the wire


def new_id() -> str:
    """A call id: unique, not guessable."""
    return "call_" + "".join(secrets.choice(_ID_LETTERS) for _ in range(24))


@dataclass(frozen=True, slots=True)
class Marks:
    """The literals around a call.

    `end` holds something that JSON strings cannot (a raw newline, a control token), so the first
    one seen closes the arguments whatever they hold.
    """

    begin: str  # the trigger
    head: str  # begin -> name
    middle: str  # name -> the `{` of the arguments
    end: str  # the `}` of the arguments -> after the call
    joint: str  # between two calls

    def write(self, name: str, arguments: str) -> str:
        """One call as text."""
        return f"{self.begin}{self.head}{name}{self.middle}{arguments}{self.end}"


def grammar(
    marks: Marks,
    tools: Sequence[Tool],
    choice: Choice,
    parallel: bool,
    answer: Mapping[str, object] | None,
) -> str:
    """The Lark text of `Format.grammar`.

    The tool's name comes before its `%json`, so that alternatives differ early and each `%json`
    keeps its own `$defs`.  After a call only a joined call or the end may follow: the next turn's
    prompt could not re-print text there in its place.
    """
    begin = _quote(marks.begin)
    more = f"({_quote(marks.joint)} {begin} body)*" if parallel and choice != "named" else ""
    calls = f"{begin} body {more}"
    lines: list[str] = []
    if choice != "auto":
        lines.append(f"start: {calls}")
    elif answer is not None:
        lines += [f"start: {calls} | answer", f"answer: %json {embed(answer)}"]
    else:
        # The lazy rule wins as soon as the trigger is complete; until then both are alive.
        lines += [
            f"start: TEXT | head body {more}",
            "TEXT: /(.|\\n)*/",
            f"head[lazy]: /(.|\\n)*/ {begin}",
        ]
    lines.append("body: " + " | ".join(f"tool_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        opening = _quote(f"{marks.head}{tool.name}{marks.middle}")
        lines.append(f"tool_{i}: {opening} %json {embed(tool.parameters)} {_quote(marks.end)}")
    return "\n".join(lines) + "\n"


def _quote(literal: str) -> str:
    return json.dumps(literal)


class MarkedScanner:
    """The one scanner over marked calls: text in, events out, nothing sent is ever taken back.

    Held back: the longest suffix that may begin a call (in text) or the closing literal (in
    arguments), and white space after a call until it is known whether something follows it.
    """

    def __init__(self, marks: Marks, mint: Callable[[], str] = new_id) -> None:
        self._marks = marks
        self._open = marks.begin + marks.head
        self._mint = mint
        self._held = ""
        self._index = -1  # of the newest call
        self._inside = False  # between a call's name and its closing literal
        self._after = False  # white space since the last call may still turn out to be a joint
        self.call = -1  # the one that is open
        self.watched: bytes | None = _json(self._open[0])

    def push(self, text: str) -> list[Event]:
        """Take the next piece of text; return what is certain now."""
        self._held += text
        events: list[Event] = []
        while self._held and (self._arguments(events) if self._inside else self._prose(events)):
            pass
        self.call = self._index if self._inside else -1
        held = self._held or (self._after and not self._inside)
        watched = self._marks.end if self._inside else self._open
        self.watched = None if held else _json(watched[0])
        return events

    def close(self) -> list[Event]:
        """No more text comes: what was held back is text, or arguments of a call that was cut."""
        rest, self._held = self._held, ""
        if self._inside:
            return [CallArgs(self._index, rest)] if rest else []
        return [] if not rest or (self._after and rest.isspace()) else [Text(rest)]

    def _arguments(self, events: list[Event]) -> bool:
        """Emit arguments; return whether the call closed and there may be more to scan."""
        at = self._held.find(self._marks.end)
        keep = at if at >= 0 else len(self._held) - _overlap(self._held, self._marks.end)
        if keep:
            events.append(CallArgs(self._index, self._held[:keep]))
        if at < 0:
            self._held = self._held[keep:]
            return False
        self._held = self._held[at + len(self._marks.end) :]
        self._inside, self._after = False, True
        events.append(CallEnd(self._index))
        return True

    def _prose(self, events: list[Event]) -> bool:
        """Emit text up to what may begin a call; return whether there may be more to scan."""
        at = self._held.find(self._open)
        if at < 0:
            self._emit(events, len(self._held) - _overlap(self._held, self._open))
            return False
        self._emit(events, at)
        return self._opened(events, self._held.find(self._open))

    def _opened(self, events: list[Event], at: int) -> bool:
        """A call may open at `at`: read its name and enter it, or take it for text."""
        start = at + len(self._open)
        stop = self._held.find('"', start)
        name = self._held[start : stop if stop >= 0 else None]
        middle = self._marks.middle + "{"
        tail = self._held[start + len(name) : start + len(name) + len(middle)]
        if not _may_name(name) or not middle.startswith(tail) or (tail and not name):
            self._after = False
            self._emit(events, at + 1)  # its first letter is text; the rest is scanned again
            return True
        if tail != middle:
            return False
        self._index += 1
        self._inside = True
        self._held = self._held[start + len(name) + len(self._marks.middle) :]
        events.append(CallStart(self._index, self._mint(), name))
        return True

    def _emit(self, events: list[Event], count: int) -> None:
        """Send the first `count` held characters as text; keep white space after a call."""
        text = self._held[:count]
        if self._after and (not text or text.isspace()):
            return
        self._after = False
        self._held = self._held[count:]
        if text:
            events.append(Text(text))


@functools.cache
def _json(letter: str) -> bytes:
    """A letter as it stands in JSON text."""
    return msgspec.json.encode(letter)[1:-1]


def _may_name(text: str) -> bool:
    return len(text) <= _NAME_LIMIT and _NAME_LETTERS.issuperset(text)


def _overlap(text: str, literal: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `literal`."""
    at = text.find(literal[0], max(0, len(text) - len(literal) + 1))
    while at >= 0:
        if literal.startswith(text[at:]):
            return len(text) - at
        at = text.find(literal[0], at + 1)
    return 0
