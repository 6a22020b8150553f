"""Tokens a second of steps that waited and of steps that ran ahead, as measured.  Decides nothing.

Of the latter those through which a device's draft slept are counted apart: to keep it ready takes a
tenth of a short step, so what waiting gives is to be compared with what is there without.

With many sequences what a step costs is mostly the host's work on each of them, which depends on
what they say and not on how many rows there are.  So both ways are compared by what they gave, at
about the same number of sequences, and neither is believed for long without being seen again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FADE = 1 - 1 / 128  # what a step's count becomes with each later one of its kind
OLD = 0.25  # what is left of a way's count when it is tried
ENOUGH = 4  # steps of a kind that tell something
SIZES = 16  # powers of two that are looked through
RAN, WAITED, SLEPT = range(3)  # ways: ahead with a draft that is ready, not ahead, ahead without
GAIN = 1.03  # waiting must give so much more: it makes streams come in larger pieces


@dataclass(slots=True)
class _Sum:
    tokens: float = 0.0
    seconds: float = 0.0
    steps: int = 0
    seen_at: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Rates:
    """By number of sequences, in powers of two."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], _Sum] = {}
        self._count = 0  # steps observed

    def observe(self, sequences: int, way: int, tokens: int, seconds: float) -> None:
        """A step of so many sequences gave `tokens` in `seconds`."""
        found = self._sums.setdefault((sequences.bit_length(), way), _Sum())
        found.tokens = found.tokens * FADE + tokens
        found.seconds = found.seconds * FADE + seconds
        found.steps += 1
        self._count += 1
        found.seen_at = self._count

    def tried(self, sequences: int, way: int) -> None:
        """A way is about to be seen again: what it gave long ago counts for less than that."""
        if found := self._sums.get((sequences.bit_length(), way)):
            found.tokens *= OLD
            found.seconds *= OLD

    def seen(self, sequences: int, way: int) -> bool:
        """Whether that way is known at this size."""
        return self._at(sequences.bit_length(), way) is not None

    def _ahead(self, size: int) -> float | None:
        """What running ahead gives at its best.

        That is without the draft, unless it was long ago: then what came with it may be more.
        """
        ready, without = self._at(size, RAN), self._at(size, SLEPT)
        if ready is None or without is None:
            found = ready or without
            return None if found is None else found.rate
        if without.seen_at > ready.seen_at:
            return without.rate
        return max(ready.rate, without.rate)

    def _at(self, size: int, way: int) -> _Sum | None:
        found = self._sums.get((size, way))
        return found if found is not None and found.steps >= ENOUGH else None

    def waiting(self, sequences: int) -> float | None:
        """How many times the tokens of running ahead, at its best, waiting gives, or None: unknown.

        Where one way was not seen at this size, both are taken from the nearest at which they were.
        """
        size = sequences.bit_length()
        for away in range(SIZES):
            for near in (size - away, size + away):
                ahead, wait = self._ahead(near), self._at(near, WAITED)
                if wait is None or ahead is None:
                    continue
                if ahead:  # of steps that ran ahead of answers' ends nothing may have come
                    return wait.rate / ahead
                if wait.tokens:
                    return math.inf
        return None
