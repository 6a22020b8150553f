"""How many prompt tokens a step may take beside rows that decode, by the clock.  Reads no clock.

A stream's next token comes when the step that computes it ends, so a prompt's share of that step
is a pause in everybody's text.  The engine reports how long each step took; steps of about the same
size (a bucket of flat tokens) share an average.

The averages are one curve, and two facts hold it together: a larger step does not take less time,
and twice the tokens do not take more than twice the time.  Whatever contradicts the newest average
is moved to the nearest value that does not.  So sizes that were never run have a bound, growth
explores by itself, a change (longer contexts) is known everywhere once it is seen somewhere, and a
stall closes no bucket for ever, though nobody may go back there to measure again.

A fixed budget, as in Agrawal et al., Sarathi-Serve (2024), has to be chosen for model and device;
the bound on the time between tokens that it stands for is what is asked for here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise

FIRST = 512  # prompt tokens while nothing has been measured
LEAST = 64  # prompt tokens of a step, however slow: a prompt that waits must get on
MARGIN = 0.9  # of the gap is planned for: the average step is no bound for the slow ones
STRETCH = 1.5  # times a step without prompts may take with them, where that is beyond the gap
WEIGHT = 0.3  # of a new measurement in its bucket's average
OUTLIER = 3.0  # times the expected: what a measurement counts at most


class Pace:
    """Learns what steps cost; says how large the next one may be."""

    def __init__(self, sizes: list[int], gap_s: float, most: int) -> None:
        """`sizes`: flat tokens that steps are grouped by, ascending, the last one the largest step.

        At most `most` tokens are of prompts; with `gap_s` 0 that is always the answer.
        """
        assert sizes and all(one < two for one, two in pairwise(sizes)), f"sizes {sizes}"
        self._sizes, self._gap_s, self._most = sizes, gap_s, most
        self._costs: list[float] = []  # seconds by bucket, never falling; empty = nothing is known
        self._seen = [False] * len(sizes)  # else the cost is a bound

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of so many flat tokens took so long on the device; 0 = it was not measured."""
        if not self._gap_s or seconds <= 0:
            return
        at, costs = self._bucket(tokens), self._costs
        if not costs:
            size = self._sizes[at]
            self._costs = [seconds * max(1.0, other / size) for other in self._sizes]
        else:
            seconds = min(seconds, OUTLIER * costs[at])
            if self._seen[at]:
                seconds = costs[at] + WEIGHT * (seconds - costs[at])
            self._fit(at, seconds)
        self._seen[at] = True

    def expected(self, tokens: int) -> float:
        """Seconds that a step of so many flat tokens takes, or at most; 0 while none was seen."""
        return self._costs[self._bucket(tokens)] if self._costs else 0.0

    def budget(self, taken: int) -> int:
        """Prompt tokens of a step in which `taken` others (decoded, drafted) are computed."""
        if not self._gap_s:
            return self._most
        if not self._costs:
            return min(self._most, FIRST)
        at = self._bucket(taken)
        alone = self._costs[at] if self._seen[at] else 0.0  # a bound must not excuse a long step
        limit = max(MARGIN * self._gap_s, STRETCH * alone)
        fits = bisect_right(self._costs, limit)
        room = self._sizes[fits - 1] - taken if fits else 0
        return min(self._most, max(LEAST, room))

    def _bucket(self, tokens: int) -> int:
        return min(bisect_left(self._sizes, tokens), len(self._sizes) - 1)

    def _fit(self, at: int, seconds: float) -> None:
        """Put a cost into the curve and move what contradicts it.

        Both facts held before, so what contradicts lies next to `at`, without a break.
        """
        sizes, costs = self._sizes, self._costs
        rate = seconds / sizes[at]
        costs[at] = seconds
        for i in range(at + 1, len(costs)):
            fit = min(max(costs[i], seconds), rate * sizes[i])
            if fit == costs[i]:
                break
            costs[i] = fit
        for i in range(at - 1, -1, -1):
            fit = min(max(costs[i], rate * sizes[i]), seconds)
            if fit == costs[i]:
                break
            costs[i] = fit
