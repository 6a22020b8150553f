"""How long the host may sleep before a step's results are due.  Sleeps not, and reads no clock.

Waiting for a step costs a whole core if the host spins, and an interrupt if it blocks.  Steps of a
kind take about the same time, so the host sleeps through most of it and waits for the rest.  With a
step in reserve on the device, waking late by less than a step's time delays nothing but the answer.
"""

from __future__ import annotations

from collections.abc import Hashable

LEAST_S = 100e-6  # a shorter sleep is not worth its system call
FIRST_S = 150e-6  # how long before the expected end to wake: a timer may be late by that much
CLOSEST_S, FARTHEST_S = 80e-6, 2e-3  # bounds of that
LATER, SOONER = 1.5, 0.99  # what it is multiplied by after a sleep that was too long, and others
WEIGHT = 0.1  # of a step that took longer than expected; one that was shorter counts at once


class Naps:
    """Learns what steps of each kind take, and how late this machine wakes."""

    def __init__(self) -> None:
        self._expected: dict[Hashable, float] = {}
        self._margin_s = FIRST_S
        self._free_s = 0.0  # when the device ended the last step, or sooner

    def rest(self, kind: Hashable, launched_s: float, now_s: float) -> float:
        """Seconds to sleep before waiting for a step that was launched then; 0 = none.

        A `kind` of None is like no other, also below.
        """
        expected = self._expected.get(kind)
        if expected is None:
            return 0.0
        due = max(launched_s, self._free_s) + expected
        rest = due - self._margin_s - now_s
        return rest if rest > LEAST_S else 0.0

    def woke(self, late: bool) -> None:
        """A sleep is over; `late`: the results were there already."""
        wanted = self._margin_s * (LATER if late else SOONER)
        self._margin_s = min(FARTHEST_S, max(CLOSEST_S, wanted))

    def ended(
        self, kind: Hashable, launched_s: float, now_s: float, took_s: float, *, waited: bool
    ) -> None:
        """A step's results are there, after `took_s` on the device; `waited`: only just now."""
        begun = max(launched_s, self._free_s)
        self._free_s = now_s if waited else min(now_s, begun + took_s)
        if kind is None:
            return
        known = self._expected.get(kind)
        if known is not None and took_s > known:
            took_s = known + WEIGHT * (took_s - known)
        self._expected[kind] = took_s
