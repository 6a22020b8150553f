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
STRAIN = 2.5  # times the gap may be stretched behind a long queue of prompts
CALM_S, STRAINED_S = 0.25, 1.0  # work in the queue from which it stretches, and to which
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

    def budget(self, taken: int, backlog: int = 0) -> int:
        """Prompt tokens of a step in which `taken` others (decoded, drafted) are computed.

        `backlog` prompt tokens wait altogether, admitted or not.  Behind a short queue the gap is
        kept; a long one stretches it up to STRAIN times, because small steps cost more a token, and
        who waits for a first token waits for all of them.
        """
        if not self._gap_s:
            return self._most
        if not self._costs:
            return min(self._most, FIRST)
        at = self._bucket(taken)
        alone = self._costs[at] if self._seen[at] else 0.0  # a bound must not excuse a long step
        limit = max(MARGIN * self._gap_s * self._strain(backlog), STRETCH * alone)
        fits = bisect_right(self._costs, limit)
        room = self._sizes[fits - 1] - taken if fits else 0
        return min(self._most, max(LEAST, room))

    def _strain(self, backlog: int) -> float:
        """How far the gap is stretched: by the seconds that the backlog takes in large steps."""
        waited = backlog * self._costs[-1] / self._sizes[-1]
        share = (waited - CALM_S) / (STRAINED_S - CALM_S)
        return 1.0 + (STRAIN - 1.0) * min(max(share, 0.0), 1.0)

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
