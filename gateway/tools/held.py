"""What scanners share: what to hold back or not to hear of, where JSON ends.  Emits nothing."""

from __future__ import annotations

import functools

import msgspec

from gateway.tools.control import is_control

NEVER = b"\n"  # in no JSON text of a letter
BACKSLASH = b"\\"  # in the JSON of every letter that needs an escape


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


class Braces:
    """Follows a JSON object to its end; plain values only, since scanners are copied."""

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
