"""Tokens a second of steps that waited and of steps that ran ahead, as measured.  Decides nothing.

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
GAIN = 1.03  # waiting must give so much more: it makes streams come in larger pieces


@dataclass(slots=True)
class _Sum:
    tokens: float = 0.0
    seconds: float = 0.0
    steps: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Rates:
    """By number of sequences, in powers of two."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, bool], _Sum] = {}

    def observe(self, sequences: int, waited: bool, tokens: int, seconds: float) -> None:
        """A step of so many sequences gave `tokens` in `seconds`."""
        found = self._sums.setdefault((sequences.bit_length(), waited), _Sum())
        found.tokens = found.tokens * FADE + tokens
        found.seconds = found.seconds * FADE + seconds
        found.steps += 1

    def tried(self, sequences: int, waited: bool) -> None:
        """A way is about to be seen again: what it gave long ago counts for less than that."""
        if found := self._sums.get((sequences.bit_length(), waited)):
            found.tokens *= OLD
            found.seconds *= OLD

    def waiting(self, sequences: int) -> float | None:
        """How many times the tokens of running ahead waiting gives, or None: not known.

        Where one way was not seen at this size, both are taken from the nearest at which they were.
        """
        size = sequences.bit_length()
        for away in range(SIZES):
            for near in (size - away, size + away):
                free, wait = self._sums.get((near, False)), self._sums.get((near, True))
                if free is None or wait is None or min(free.steps, wait.steps) < ENOUGH:
                    continue
                if free.tokens:  # of steps that ran ahead of answers' ends nothing may have come
                    return wait.rate / free.rate
                if wait.tokens:
                    return math.inf
        return None
