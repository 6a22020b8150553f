"""The one scanner over marked calls: text in, events out.  Knows no schema and no vocabulary.

Arguments end where a literal says so that JSON cannot hold; where there is none, with their object.
Nothing that was sent is ever taken back.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.events import CallArgs, CallEnd, CallStart, Event, Text
from gateway.tools.control import is_control, without
from gateway.tools.held import BACKSLASH, NAME_LIMIT, Braces, overlap, run, watch

ID = "{id}"


@dataclass(frozen=True, slots=True)
class Span:
    """`low` to `high` letters of a class, as many as there are."""

    letters: str  # as in a class of Lark's: "a-zA-Z0-9_-", of these ranges and single letters
    low: int
    high: int

    def reach(self, text: str, at: int) -> int:
        """Where the letters that begin at `at` end."""
        return run(text, at, _class(self.letters), self.high)


Part = str | Span

NAME = Span("a-zA-Z0-9_-", 1, NAME_LIMIT)


@dataclass(frozen=True, slots=True)
class Path:
    """Where calls stand, in literals as the scanner sees them."""

    begin: str  # what ends free text, "" = no text goes before calls
    openings: tuple[str, ...]  # begin -> the first name, in any way
    first: str  # the start of the message -> the first name, "" = only `begin` opens calls
    again: str  # after a call -> the next name
    close: str  # after the last call
    between: tuple[Part, ...]  # name -> the arguments, with their `{`
    ends: tuple[tuple[Part, ...], ...]  # the `}` of the arguments -> after the call, in any way
    id_shape: str

    @property
    def seal(self) -> str:
        """The end, if JSON cannot hold it: a control token or a raw control character; else ""."""
        (end, *_), *others = self.ends
        assert isinstance(end, str), "the first way to end is a literal"
        return end if not others and any(c < " " or is_control(c) for c in end) else ""


class MarkedScanner(Braces):
    """See gateway.tools.Scanner.

    start --first--> arguments --object or seal--> end --> after --again--> arguments
      `--else--> text --begin--> arguments                   `--close, else--> text

    Held back: the longest suffix that may begin a call (in text) or the closing literal (in
    arguments), and white space after a call until it is known whether something follows it.
    """

    _step: Literal["start", "text", "arguments", "end", "after"]

    def __init__(self, path: Path, mint: Callable[[], str]) -> None:
        """`mint` makes ids for calls that bring none of their own."""
        super().__init__("start" if path.first else "text")
        self._path = path
        self._seal = path.seal
        self._mint = mint
        self._ids: frozenset[str] = frozenset()
        self.watched = self._watch()

    def close(self) -> list[Event]:
        """No more text comes: what was held back is text, or arguments of a call that was cut."""
        rest, self._held = without(self._held), ""
        if self._step == "arguments":
            return [CallArgs(self._index, rest)] if rest else []
        if self._step == "end" or not rest or (self._after and rest.isspace()):
            return []
        return [Text(rest)]

    def _watch(self) -> bytes | None:
        match self._step:
            case "text" if not self._held and not self._after:
                return watch(self._path.begin)
            case "arguments" if self._seal:
                return None if self._held else watch(self._seal)
            case "arguments" if self._quoted and not self._escaped:
                return BACKSLASH
            case _:
                return None

    def _go(self, events: list[Event]) -> bool:
        """Go one arrow of the picture; return whether there may be more to scan."""
        match self._step:
            case "arguments":
                return self._arguments(events)
            case "text":
                return self._prose(events)
            case "end":
                return self._ended(events)
            case "after":
                return self._joined(events)
            case "start":
                return self._began(events)

    def _arguments(self, events: list[Event]) -> bool:
        """Emit arguments up to their end."""
        if self._seal:
            at = self._held.find(self._seal)
            keep = at if at >= 0 else len(self._held) - overlap(self._held, self._seal)
        else:
            at = self._end_of_object(self._held)
            keep = at if at >= 0 else len(self._held)
        if piece := without(self._held[:keep]):
            events.append(CallArgs(self._index, piece))
        self._held = self._held[keep:]
        if at < 0:
            return False
        self._step = "end"
        return self._ended(events)  # there may be nothing to wait for

    def _ended(self, events: list[Event]) -> bool:
        """Pass what closes a call; what cannot be that closes it too, and is read on as it is."""
        fits = [fit for end in self._path.ends if (fit := follow(end, self._held, 0))]
        if fits and not any(fit.known for fit in fits):
            return False
        self._held = self._held[max((fit.end for fit in fits), default=0) :]
        events.append(CallEnd(self._index))
        self._step, self._after = "after", True
        return True

    def _began(self, events: list[Event]) -> bool:
        """The start of the message: a call, or text."""
        fit = self._call_at(self._path.first, 0)
        if fit is None:
            self._step = "text"
            return True
        return self._enter(events, fit)

    def _joined(self, events: list[Event]) -> bool:
        """After a call: the next one, what closes them all, or text."""
        path = self._path
        fit = self._call_at(path.again, 0)
        if fit is not None and fit.known:
            return self._enter(events, fit)
        closed = follow((path.close,), self._held, 0) if path.close else None
        if closed is not None and closed.known:
            self._held = self._held[closed.end :]
        elif fit is not None or closed is not None:
            return False
        self._step = "text"
        return True

    def _prose(self, events: list[Event]) -> bool:
        """Emit text up to what may begin a call; return whether there may be more to scan."""
        begin = self._path.begin
        at = self._held.find(begin) if begin else -1
        if at < 0:
            self._emit(events, len(self._held) - overlap(self._held, begin))
            return False
        self._emit(events, at)
        at = self._held.find(begin)
        fits = [fit for way in self._path.openings if (fit := self._call_at(begin + way, at))]
        if fits:
            return self._enter(events, max(fits, key=lambda fit: fit.end))
        self._after = False
        self._emit(events, at + 1)  # its first letter is text; the rest is scanned again
        return True

    def _call_at(self, opening: str, at: int) -> Fit | None:
        return follow((opening, NAME, *self._path.between), self._held, at)

    def _enter(self, events: list[Event], fit: Fit) -> bool:
        """Open a call, unless it is not yet known to be one; return whether it is."""
        if not fit.known:
            return False
        name, *written = fit.found
        self._index += 1
        self._held = self._held[fit.end - 1 :]  # from the `{` on
        self._step = "arguments"
        self._new_object()
        events.append(CallStart(self._index, self._id(name, *written), name))
        return True

    def _id(self, name: str, written: str | None = None) -> str:
        """The id that the model wrote, unless it wrote the same before."""
        if written is None:
            return self._mint()
        while (found := _shaped(self._path.id_shape, name, written)) in self._ids:
            if not written.isdigit():
                return self._mint()
            written = str(int(written) + 1).zfill(len(written))
        self._ids |= {found}
        return found


@dataclass(frozen=True, slots=True)
class Fit:
    """How far a text follows some parts."""

    end: int  # behind the last part; -1: the text is too short to know
    found: tuple[str, ...] = ()  # what stands for each Span

    @property
    def known(self) -> bool:
        """Whether the text holds all parts."""
        return self.end >= 0


def follow(parts: Sequence[Part], text: str, at: int) -> Fit | None:
    """Follow the parts in the text from `at` on; None when something else stands there."""
    found: list[str] = []
    for part in parts:
        if isinstance(part, str):
            stop = at + len(part)
            here = text[at:stop]
            if not part.startswith(here):
                return None
            if here != part:
                return Fit(-1)
        else:
            stop = part.reach(text, at)
            if stop == len(text) and stop - at < part.high:
                return Fit(-1)
            if stop - at < part.low:
                return None
            found.append(text[at:stop])
        at = stop
    return Fit(at, tuple(found))


def _shaped(shape: str, name: str, written: str) -> str:
    return shape.replace("{name}", name).replace("{id}", written)


@functools.cache
def _class(letters: str) -> frozenset[str]:
    """The letters of a class."""
    for name in (string.ascii_lowercase, string.ascii_uppercase, string.digits):
        letters = letters.replace(f"{name[0]}-{name[-1]}", name)
    return frozenset(letters)
