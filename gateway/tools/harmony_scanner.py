"""The scanner over harmony messages: channels in, reasoning, text and calls out.  No grammar.

analysis is reasoning; final is content, and so is commentary without a recipient; a message to
`functions.N` is a call.  Text that no channel frames is content.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gateway.events import CallArgs, CallEnd, CallStart, Event, Reasoning, Text
from gateway.tools.control import is_control, without
from gateway.tools.held import (
    BACKSLASH,
    NAME_LETTERS,
    NAME_LIMIT,
    NEVER,
    Braces,
    overlap,
    run,
    watch,
)
from gateway.tools.marked import openai_id

_HEADER_LIMIT = 256  # characters between a channel and its message
_CHANNELS = ("analysis", "commentary", "final")
_AUTHOR = "assistant"
_ROLE = " to="
_TO = " to=functions."
_RECIPIENT = NAME_LETTERS | {"."}

Step = Literal["first", "bare", "header", "reasoning", "text", "arguments", "done"]


@dataclass(frozen=True, slots=True)
class Seen:
    """The markers as the scanner sees them."""

    channel: str
    message: str
    start: str
    ends: tuple[str, ...]  # of a message


class HarmonyScanner(Braces):
    """See gateway.tools.Scanner.

    first, bare --channel--> header --message--> reasoning | text | arguments
                                                   `--end--> done --start--> header
    """

    _step: Step

    def __init__(self, seen: Seen) -> None:
        super().__init__("first")
        self._seen = seen

    def close(self) -> list[Event]:
        """No more text comes: what was held back is what its channel says."""
        shown, self._held = without(self._held), ""
        match self._step:
            case "first" | "bare" | "text":
                return [Text(shown)] if shown and not (self._after and shown.isspace()) else []
            case "header" if shown.isspace() or not is_control(self._seen.channel[0]):
                return [Text(shown)]
            case "reasoning":
                return [Reasoning(shown)] if shown else []
            case "arguments":
                return [CallArgs(self._index, shown)] if shown else []
            case _:
                return []

    def _watch(self) -> bytes | None:
        if self._held or (self._after and self._step != "arguments"):
            return None
        if self._step == "arguments":
            return BACKSLASH if self._quoted and not self._escaped else None
        if self._step in ("bare", "text"):
            firsts = {watch(one) for one in (*self._seen.ends, self._seen.channel)} - {NEVER}
            return NEVER if not firsts else firsts.pop() if len(firsts) == 1 else None
        return None

    def _go(self, events: list[Event]) -> bool:
        """One step on; return whether there may be more to scan."""
        match self._step:
            case "first":
                return self._began()
            case "bare":
                return self._bare(events)
            case "header":
                return self._header(events)
            case "arguments":
                return self._arguments(events)
            case "done":
                return self._next()
            case "reasoning" | "text":
                return self._said(events)

    def _began(self) -> bool:
        """The start of the output: a recipient in the role part, or anything."""
        if _ROLE.startswith(self._held[: len(_ROLE)]):
            if len(self._held) < len(_ROLE):
                return False
            self._step = "header"
        else:
            self._step = "bare"
        return True

    def _bare(self, events: list[Event]) -> bool:
        """Text outside of any message, up to a header."""
        heads = (self._seen.channel, self._seen.start)
        at, _ = _first(self._held, heads)
        if at < 0:
            self._emit(events, len(self._held) - max(overlap(self._held, one) for one in heads))
            return False
        self._emit(events, at)
        self._held = self._held[_first(self._held, heads)[0] :]
        self._step = "header"
        return True

    def _header(self, events: list[Event]) -> bool:
        """From the role part or channel to the message."""
        held = self._held
        at = held.find(self._seen.message)
        header = held[:at] if at >= 0 else held
        if len(header) <= _HEADER_LIMIT and self._may_head(header, whole=at >= 0):
            if at < 0:
                return False
            self._held = held[at + len(self._seen.message) :]
            self._enter(events, header)
            return True
        self._step, self._after = "bare", False
        self._emit(events, 1)  # its first letter is text; the rest is scanned again
        return True

    def _may_head(self, header: str, *, whole: bool) -> bool:
        """Whether this is a `whole` header, or may be the start of one."""
        before, marker, name = header.partition(self._seen.channel)
        role = before.removeprefix(self._seen.start)
        if not marker:
            role = role[: len(role) - overlap(role, self._seen.channel)]
        known = name.startswith(_CHANNELS) or (
            not whole and any(one.startswith(name) for one in _CHANNELS)
        )
        if not marker and _AUTHOR.startswith(role):
            return not whole
        return known and _may_address(role.removeprefix(_AUTHOR))

    def _enter(self, events: list[Event], header: str) -> None:
        role, _, channel = header.partition(self._seen.channel)
        name = _called(channel) or (_called(role) if channel.endswith("json") else "")
        if name and not channel.startswith("final"):
            self._index += 1
            self._step = "arguments"
            self._new_object()
            events.append(CallStart(self._index, openai_id(), name))
            return
        hidden = channel.startswith("analysis") or _ROLE in channel
        self._step = "reasoning" if hidden else "text"
        self._after = False

    def _said(self, events: list[Event]) -> bool:
        """A message's text, up to its end."""
        at, marker = _first(self._held, self._seen.ends)
        keep = at
        if at < 0:
            keep = len(self._held) - max(overlap(self._held, one) for one in self._seen.ends)
        if text := without(self._held[:keep]):
            events.append(Reasoning(text) if self._step == "reasoning" else Text(text))
        self._held = self._held[keep:]
        if at >= 0:
            self._ended(marker)
        return at >= 0

    def _ended(self, marker: str) -> None:
        """Behind the end of a message; `start` begins the next one, too."""
        if marker == self._seen.start:
            self._step = "header"
        else:
            self._held = self._held[len(marker) :]
            self._step = "done"

    def _arguments(self, events: list[Event]) -> bool:
        """A call's arguments, up to the end of their JSON."""
        at = self._end_of_object(self._held)
        keep = at if at >= 0 else len(self._held)
        if piece := without(self._held[:keep]):
            events.append(CallArgs(self._index, piece))
        self._held = self._held[keep:]
        if at < 0:
            return False
        events.append(CallEnd(self._index))
        self._step, self._after = "done", True
        return True

    def _next(self) -> bool:
        """Behind a message: the next one's start, or text that no channel frames."""
        held = self._held.lstrip()
        for marker in self._seen.ends[:-1]:
            if held.startswith(marker):
                self._held = held[len(marker) :]
                return True
        if held.startswith(self._seen.start):
            self._held, self._step = held, "header"
            return True
        if any(marker.startswith(held) for marker in self._seen.ends):
            return False
        self._step = "bare"
        return True


def _first(text: str, markers: tuple[str, ...]) -> tuple[int, str]:
    """Where the first of the markers stands, and which; (-1, "") when none does."""
    found = [(at, one) for one in markers if (at := text.find(one)) >= 0]
    return min(found) if found else (-1, "")


def _may_address(text: str) -> bool:
    """Whether a role part ends in nothing, a recipient, or the start of one."""
    if len(text) < len(_ROLE):
        return _ROLE.startswith(text)
    return text.startswith(_ROLE) and run(text, len(_ROLE), _RECIPIENT, len(text)) == len(text)


def _called(part: str) -> str:
    """The function that a part of a header addresses; empty = none."""
    at = part.find(_TO)
    while at >= 0:
        start = at + len(_TO)
        stop = run(part, start, NAME_LETTERS, NAME_LIMIT + 1)
        if 0 < stop - start <= NAME_LIMIT:
            return part[start:stop]
        at = part.find(_TO, start)
    return ""
