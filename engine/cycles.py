"""What a step takes from result to result, the host's part included.  Launches and waits for none.

Where the host works while the device does, neither's time says what a step costs; the time from
the results of one step to those of the next does, if nothing was idle between and both are of a
kind: a step that was launched before the one before it was known overlaps with that.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from engine.proposer import Ran

if TYPE_CHECKING:
    from engine.runner import Flight


class Cycles:
    """Follows the steps of one engine, in order."""

    def __init__(self, piped: bool) -> None:
        """`piped`: steps may run ahead of the host; if none does, a step's own time is enough."""
        self._piped = piped
        self._since = 0.0  # when the newest results came; 0 = nothing can be said of the next step
        self._kind: tuple[bool, bool] | None = None  # of that step: launched alone, masked
        self._guesses, self._chain_s = 0, 0.0  # what the device drafted behind it

    def paused(self) -> None:
        """There was nothing to compute."""
        self._since = 0.0

    def ended(self, flight: Flight, of: int) -> Ran:
        """The results of a step came, with those of `of` in all; `seconds` is 0 if that is moot."""
        plan = flight.plan
        if not self._piped:
            return Ran(plan.tokens, flight.seconds, plan.guesses)
        now, drew = time.perf_counter(), plan.drawing
        kind = flight.alone, 2 * len(plan.masked) > drew
        known = self._since and of == 1 and kind == self._kind
        seconds = now - self._since if known and flight.seconds else 0.0
        ran = Ran(plan.tokens, seconds, self._guesses, self._chain_s, *kind, drew,
                  asleep=plan.asleep and not flight.alone)
        self._since, self._kind = now, kind
        self._guesses, self._chain_s = 0, 0.0
        return ran

    def drafted(self, flight: Flight) -> None:
        """The chains behind the newest step came."""
        self._guesses, self._chain_s = flight.plan.guesses, flight.chain_s
