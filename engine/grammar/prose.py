"""Free text before a trigger: what of it decides the next mask.  Knows no tokens and no matcher.

A tool turn is mostly free text, and its masks are the dearest (the whole vocabulary is walked),
though few of them differ: they depend only on how much of the trigger the text ends with, and on an
unfinished code point.  masks.py keeps them by that key.

A trigger may be a control token: its piece is its name.  Then text never completes it, and all keys
of whole text have the same mask; a text that only looks like it just has its masks computed.
"""

from __future__ import annotations

from dataclasses import dataclass

Key = tuple[int, int]

_NARROW = (0xE0, 0xED, 0xF0, 0xF4)  # lead bytes that allow only some continuations


@dataclass(frozen=True, slots=True)
class Prose:
    """The end of a text that neither holds the trigger nor starts with the opening."""

    trigger: bytes  # empty: only the opening matters
    tail: bytes = b""
    opening: bytes = b""  # not empty while the tail is the whole text and may become this, perhaps
    # behind a line break

    def after(self, piece: bytes) -> Prose | None:
        """The text with `piece` behind it; None when that completes the trigger or the opening."""
        text = self.tail + piece
        if self.trigger and self.trigger in text:
            return None
        if self.opening:
            begun = text.removeprefix(b"\n")
            if begun.startswith(self.opening):
                return None
            if self.opening.startswith(begun):
                return Prose(self.trigger, text, self.opening)
        return Prose(self.trigger, text[-max(len(self.trigger) - 1, 3) :])

    def beyond(self, piece: bytes) -> bytes:
        """What is no free text any more, when `piece` completes the trigger or the opening."""
        text = self.tail + piece
        if self.trigger and self.trigger in text:
            return text.partition(self.trigger)[2]
        return text

    @property
    def key(self) -> Key:
        """Equal for two texts exactly when the same may follow them."""
        if self.opening:
            return (-3 if self.tail[:1] == b"\n" else -2), len(self.tail)
        unfinished = _unfinished(self.tail)
        return (-1, unfinished) if unfinished else (self._overlap(), 0)

    def _overlap(self) -> int:
        """Length of the longest suffix of the text that begins the trigger."""
        for size in range(min(len(self.tail), len(self.trigger) - 1), 0, -1):
            if self.trigger.startswith(self.tail[-size:]):
                return size
        return 0


def _unfinished(tail: bytes) -> int:
    """0 when the text ends with a whole code point, else a number for what must follow."""
    for back in range(1, min(3, len(tail)) + 1):
        lead = tail[-back]
        if lead & 0xC0 == 0x80:
            continue
        size = 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        missing = max(size - back, 0)
        return lead if missing and back == 1 and lead in _NARROW else missing
    return 0
