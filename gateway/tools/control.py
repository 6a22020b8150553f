"""Markers of a layout that a vocabulary has as single control tokens.  Scans and samples nothing.

Text cannot forge a control token, so a scanner must not see it as text either: it sees a stand-in,
one lone surrogate, to which no UTF-8 decodes.  A marker that a vocabulary has not is plain text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_FIRST = 0xD800


@dataclass(frozen=True, slots=True)
class Bound:
    """Which markers of a layout are single control tokens of the model's vocabulary."""

    ids: Mapping[str, int]  # marker -> token id, at most 2,048; empty = all is plain text

    def seen(self, literal: str) -> str:
        """A literal as the scanner sees it: each bound marker is one stand-in."""
        letters = self._letters()
        return "".join(letters.get(part, part) for part in _parts(tuple(self.ids), literal))

    def lark(self, literal: str) -> str:
        """A literal as Lark: quoted text and `<[id]>` in order; nothing for an empty one."""
        return " ".join(
            f"<[{self.ids[part]}]>" if part in self.ids else json.dumps(part)
            for part in _parts(tuple(self.ids), literal)
        )

    def stand_ins(self) -> dict[int, str]:
        """Token id -> its stand-in, for the Detokenizer."""
        return {self.ids[marker]: letter for marker, letter in self._letters().items()}

    def shown(self, text: str) -> str:
        """The text with markers in place of their stand-ins."""
        for marker, letter in self._letters().items():
            text = text.replace(letter, marker)
        return text

    def _letters(self) -> dict[str, str]:
        return {marker: chr(_FIRST + at) for at, marker in enumerate(self.ids)}


UNBOUND = Bound({})


def bind(markers: Iterable[str], special: Mapping[str, int]) -> Bound:
    """Bind those markers that are special tokens; `special`: text -> id of all of them."""
    return Bound({marker: special[marker] for marker in markers if marker in special})


def without(text: str) -> str:
    """The text without stand-ins: control tokens at a place that has no use for them."""
    return text if text.isascii() else text.encode(errors="ignore").decode()


def is_control(letter: str) -> bool:
    """Whether the letter is a stand-in."""
    return "\ud800" <= letter <= "\udfff"


def _parts(markers: tuple[str, ...], literal: str) -> list[str]:
    """The literal cut at its markers, the longest first, as a tokenizer finds its added tokens."""
    ordered = sorted(markers, key=len, reverse=True)
    parts, start, at = list[str](), 0, 0
    while at < len(literal):
        found = next((one for one in ordered if literal.startswith(one, at)), "")
        if found:
            parts += literal[start:at], found
            start = at + len(found)
        at += len(found) or 1
    return [part for part in (*parts, literal[start:]) if part]
