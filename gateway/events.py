"""What the model said, as events: text, calls, the end.  Knows no wire format and no tokens.

A format's scanner (gateway/tools/) turns text into these; gateway/sse.py turns these into frames.
Calls never interleave: `CallStart`, any number of `CallArgs`, then the next event of another kind.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Plain content; never half a code point."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thinks before it answers; never content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call opens: its name is whole, its index is dense from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArgs:
    """A piece of the arguments' JSON text, verbatim."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call's closing literal was seen: its arguments are complete."""

    index: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The choice is over: one of stop, length, tool_calls."""

    reason: str


Event = Text | Reasoning | CallStart | CallArgs | CallEnd | Finish
