"""The one scanner over tagged calls: text in, events out, arguments built as JSON.  No grammar.

Strings leave as they come, escaped; other values when they are complete.  Nothing that was sent is
ever taken back.  A value of a type that no schema tells is a string unless it reads as other JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gateway.events import CallArgs, CallEnd, CallStart, Event, Text
from gateway.tools.control import without
from gateway.tools.held import (
    BACKSLASH,
    NAME_LETTERS,
    NAME_LIMIT,
    NEVER,
    Held,
    nearest,
    overlap,
    run,
    watch,
)
from gateway.tools.marked import openai_id
from gateway.tools.values import Node, Schema

_OTHER = "{[-0123456789tfn"  # first letters of JSON that is no string

Step = Literal["prose", "pairs", "key", "undecided", "text", "other"]


@dataclass(frozen=True, slots=True)
class Seen:
    """The literals of Tags as the scanner sees them."""

    begin: str
    head: str
    named: str
    key: str
    keyed: str
    stop: str
    end: str
    close: str


class TagsScanner(Held):
    """See gateway.tools.Scanner.

    Held back: the longest suffix that may begin a call (in text) or a closing literal (in a
    string), values that are not strings, and white space after a call until it is known whether
    something follows it.
    """

    _step: Step
    _calling = "text"

    def __init__(self, seen: Seen, parameters: Mapping[str, Node]) -> None:
        """`parameters`: tool name -> its checked schema."""
        super().__init__("prose")
        self._seen = seen
        self._parameters = parameters
        self._section = False  # between a call and what closes all of them
        self._known: dict[str, Mapping[str, str]] = {}  # tool -> its parameters' kinds, once asked
        self._kinds: Mapping[str, str] = {}  # parameter of the open call -> how it is written
        self._kind = ""  # of the value at hand; "" = no schema tells
        self._pairs = 0  # of the open call
        self._at = 0  # held characters of a JSON value that were looked at
        self._quoted = False  # inside one of its strings
        # Whether no plain letter begins the end of a string: a line break does, or a control token.
        self._sealed = watch(seen.stop)[:1] in (NEVER, BACKSLASH)
        self.watched = self._watch()

    def _watch(self) -> bytes | None:
        if self._held:
            return None
        if self._step == "text":  # escapes are the only letters that are not sent as they come
            return BACKSLASH if self._sealed else None
        return None if self._after or self._step != "prose" else watch(self._seen.begin)

    def close(self) -> list[Event]:
        """No more text comes: what was held back is text, or a value that was cut."""
        rest, self._held = without(self._held), ""
        match self._step:
            case "prose":
                layout = rest.isspace() or (self._section and self._seen.close.startswith(rest))
                return [] if not rest or (self._after and layout) else [Text(rest)]
            case "undecided" | "text":
                opened = '"' if self._step == "undecided" else ""
                return [CallArgs(self._index, opened + escaped(rest))] if rest else []
            case "other":
                return [CallArgs(self._index, rest)] if rest else []
            case _:
                return []

    def _go(self, events: list[Event]) -> bool:
        """One step on; return whether there may be more to scan."""
        match self._step:
            case "prose":
                return self._in_section(events) if self._section else self._prose(events)
            case "pairs":
                return self._between(events)
            case "key":
                return self._named_key(events)
            case "undecided":
                return self._decide(events)
            case "text":
                return self._text(events)
            case "other":
                return self._other(events)

    def _prose(self, events: list[Event]) -> bool:
        """Emit text up to what may begin a call; return whether there may be more to scan."""
        opening = self._seen.begin + self._seen.head
        at = self._held.find(opening)
        if at < 0:
            self._emit(events, len(self._held) - overlap(self._held, opening))
            return False
        self._emit(events, at)
        return self._opened(events, self._held.find(opening), len(opening))

    def _in_section(self, events: list[Event]) -> bool:
        """After a call, inside of what closes them all: another call, the closing, or text."""
        start = len(self._held) - len(self._held.lstrip())
        rest = self._held[start:]
        close, head = self._seen.close.lstrip(), self._seen.head.lstrip()
        if rest.startswith(close):
            self._held = rest[len(close) :]
            self._section = False
            return True
        if close.startswith(rest) or head.startswith(rest):
            return False
        if rest.startswith(head):
            return self._opened(events, start, len(head))
        self._section = False
        return True

    def _opened(self, events: list[Event], at: int, length: int) -> bool:
        """A call may open at `at`: read its name and enter it, or take it for text."""
        seen, start = self._seen, at + length
        stop = run(self._held, start, NAME_LETTERS, NAME_LIMIT + 1)
        name, tail = self._held[start:stop], self._held[stop:]
        wanted = (seen.named + seen.key, seen.named + seen.end)
        if len(name) <= NAME_LIMIT and (name or not tail):
            if name and tail.startswith(wanted):
                self._enter(events, name, tail[len(seen.named) :])
                return True
            if any(one.startswith(tail) for one in wanted):
                return False
        self._after = self._section = False
        self._emit(events, at + 1)  # its first letter is text; the rest is scanned again
        return True

    def _enter(self, events: list[Event], name: str, rest: str) -> None:
        self._index += 1
        self._held = rest
        self._step = "pairs"
        self._pairs = 0
        if name not in self._known:
            params = Schema(self._parameters.get(name, {})).params()
            self._known[name] = {param.name: param.kind for param in params}
        self._kinds = self._known[name]
        events.append(CallStart(self._index, openai_id(), name))

    def _between(self, events: list[Event]) -> bool:
        """Between values: a key or the call's end; what else there is has no meaning."""
        seen = self._seen
        key, end = self._held.find(seen.key), self._held.find(seen.end)
        if key < 0 and end < 0:
            keep = max(overlap(self._held, seen.key), overlap(self._held, seen.end))
            self._held = self._held[len(self._held) - keep :]
            return False
        if end < 0 or 0 <= key < end:
            self._held = self._held[key + len(seen.key) :]
            self._step = "key"
            return True
        self._held = self._held[end + len(seen.end) :]
        self._step, self._after, self._section = "prose", True, bool(seen.close)
        events += (CallArgs(self._index, "}" if self._pairs else "{}"), CallEnd(self._index))
        return True

    def _named_key(self, events: list[Event]) -> bool:
        at = self._held.find(self._seen.keyed)
        if at < 0:
            return False
        key = without(self._held[:at])
        self._held = self._held[at + len(self._seen.keyed) :]
        self._kind = self._kinds.get(key, "")
        self._step, self._at, self._quoted = "undecided", 0, False
        opening = ", " if self._pairs else "{"
        self._pairs += 1
        if self._kind in ("text", "json"):
            self._step = "text" if self._kind == "text" else "other"
            opening += '"' + escaped(key) + '": ' + ('"' if self._kind == "text" else "")
        else:
            opening += '"' + escaped(key) + '": '
        events.append(CallArgs(self._index, opening))
        return True

    def _decide(self, events: list[Event]) -> bool:
        """Whether the value is a string, from its first letters."""
        if self._kind == "text or null":
            null = "null" + self._seen.stop
            if null.startswith(self._held):
                return False if self._held != null else self._as_other()
            if self._held.startswith(null):
                return self._as_other()
        elif self._held.lstrip() == "":
            return False
        elif self._held.lstrip()[0] in _OTHER:
            return self._as_other()
        self._step = "text"
        events.append(CallArgs(self._index, '"'))
        return True

    def _as_other(self) -> bool:
        self._step = "other"
        return True

    def _text(self, events: list[Event]) -> bool:
        """A string: out with it, but for what may begin its closing literal."""
        stop = self._seen.stop
        at = self._held.find(stop)
        keep = at if at >= 0 else len(self._held) - overlap(self._held, stop)
        piece = escaped(without(self._held[:keep])) + ('"' if at >= 0 else "")
        if piece:
            events.append(CallArgs(self._index, piece))
        self._held = self._held[keep + len(stop) if at >= 0 else keep :]
        self._step = "pairs" if at >= 0 else "text"
        return at >= 0

    def _other(self, events: list[Event]) -> bool:
        """Another value: out with it when its closing literal comes, outside of its strings."""
        stop = self._seen.stop
        end = -1
        while end < 0:
            found = nearest(self._held, '"', self._at)
            if not self._quoted:
                end = self._held.find(stop, self._at, found if found >= 0 else len(self._held))
            if found < 0 and end < 0:
                reach = len(self._held) - (0 if self._quoted else len(stop) - 1)
                self._at = max(self._at, reach)
                return False
            if end < 0:
                escape = self._held[found] == "\\"
                self._at = found + 1 + escape  # past what it escapes, come or not
                self._quoted ^= not escape
        value = without(self._held[:end])
        self._held = self._held[end + len(stop) :]
        self._step = "pairs"
        events.append(CallArgs(self._index, value.strip() if _is_json(value) else quoted(value)))
        return True


def escaped(text: str) -> str:
    """Text as it stands inside a JSON string; pieces of it may be escaped one by one."""
    return quoted(text)[1:-1]


def quoted(text: str) -> str:
    """Text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _no_constant(name: str) -> None:
    raise ValueError(name)
