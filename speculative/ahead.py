"""How long the chains are that a device drafts, decided before it drafts them.  Guesses none.

A host's guess is there before its length is chosen (length.py); a device's costs time to make, in
the step before the one that verifies it.  So its length is one for the whole batch, of a few that
graphs are made for, by the mean chance of each place and by measured times.  0 is an answer like
any other: then the next step need not wait for this one.
"""

from __future__ import annotations

from collections.abc import Sequence

from speculative.length import MARGIN, PROMPT, StepTimes

LENGTHS = (0, 1, 2, 3, 5, 7)
TOKEN = 0.07  # what a token of a chain costs until it is measured, of a step with one row
FOLLOW = 0.1  # how fast that follows what is seen
FIRST = 8  # steps without a chain at the start: they tell what a step costs by itself
LOOK = 64  # then one in so many
TRY = 16  # of those looks one in so many is a short chain, where none seems to be worth it


class Ahead:
    """Chooses lengths, and learns what they cost."""

    def __init__(self, times: StepTimes) -> None:
        """`times` of steps that draft nothing; learned here."""
        self._times = times
        self._token = 0.0  # seconds a token of a chain; 0 = not measured
        self._turn = 0

    def observe(self, rows: int, seconds: float, guesses: int) -> None:
        """A step of `rows` rows, in which chains of `guesses` tokens were drafted, took so long."""
        if not guesses:
            self._times.observe(rows, seconds)
            return
        known = self._token or TOKEN * self._times(1)
        seen = min(max(seconds - self._times(rows), 0.0) / guesses, self._times(1))
        self._token = known + FOLLOW * (seen - known)

    def choose(self, chances: Sequence[float], count: int, beside: int, most: int) -> int:
        """The length for `count` sequences; `chances` of each place, all before it being right."""
        self._turn += 1
        if self._turn <= FIRST or self._turn % LOOK == 0:
            return 0
        found = self._best(chances, count, beside, most)
        if not found and self._turn % (LOOK * TRY) == 1:
            return min(1, most)
        return found

    def _best(self, chances: Sequence[float], count: int, beside: int, most: int) -> int:
        times, token = self._times, self._token or TOKEN * self._times(1)
        base = count + PROMPT * beside
        best, found = base / times(count + beside) * (1 + MARGIN), 0
        gained, alive = base, float(count)
        for place in range(most):
            alive *= chances[min(place, len(chances) - 1)]
            gained += alive
            if (length := place + 1) not in LENGTHS:
                continue
            rate = gained / (times(count * (1 + length) + beside) + token * length)
            if rate > best:
                best, found = rate, length
        return found
