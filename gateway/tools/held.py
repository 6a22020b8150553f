"""What a scanner holds back, and what it need not hear of.  Scans nothing itself."""

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
