"""Whether a JSON text stands inside a string.  Reads bytes; knows no tokens and no grammar."""

from __future__ import annotations

OUTSIDE, INSIDE, ESCAPED = 0, 1, 2  # ESCAPED: right behind a backslash of a string


def after(lexical: int, text: bytes) -> int:
    """Where the text stands behind these further bytes."""
    if b'"' not in text and b"\\" not in text:
        return INSIDE if lexical == ESCAPED and text else lexical
    for letter in text:
        if lexical == ESCAPED:
            lexical = INSIDE
        elif letter == 0x22:
            lexical = OUTSIDE if lexical == INSIDE else INSIDE
        elif letter == 0x5C and lexical == INSIDE:
            lexical = ESCAPED
    return lexical
