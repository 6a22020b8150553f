"""What a guess of some kind was worth so far: chances from counts.  Guesses nothing, has no clock.

A cell is one kind of guess (say: a match of 4 tokens, all voters agree, from the prompt).  Its
chance is the mean of a Beta posterior: (right + weight * prior) / (seen + weight), with counts that
fade, so that a cell follows what comes now.  Counts say how often guesses were right, never what
they were, so all tenants may share them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

WEIGHT = 16.0  # the prior counts as much as so many outcomes
FADE = 1 - 1 / 1024  # an outcome's weight falls to 1/e after so many more in its cell


class Calibration:
    """Cells numbered from 0, each with a chance that is ready to read."""

    __slots__ = ("_priors", "_right", "_seen", "chances")

    def __init__(self, priors: Sequence[float]) -> None:
        """`priors`: each cell's chance before anything was seen."""
        self._priors = array("d", priors)
        self._right = array("d", bytes(8 * len(priors)))
        self._seen = array("d", bytes(8 * len(priors)))
        self.chances = array("d", priors)  # by cell, in (0, 1); read it, never change it

    def learn(self, cell: int, right: bool) -> None:
        """A guess of this kind was looked at, all before it being right."""
        seen = self._seen[cell] = self._seen[cell] * FADE + 1.0
        good = self._right[cell] = self._right[cell] * FADE + right
        self.chances[cell] = (good + WEIGHT * self._priors[cell]) / (seen + WEIGHT)
