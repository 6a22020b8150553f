"""How many prompt tokens a step may take beside rows that decode, by the clock.  Reads no clock.

A stream's next token comes when the step that computes it ends, so a prompt's share of that step
is a pause in everybody's text.  The engine reports how long each step took; steps of about the same
size (a bucket of flat tokens) share an average.

The averages are one curve, and two facts hold it together: a larger step does not take less time,
and twice the tokens do not take more than twice the time.  Whatever contradicts the newest average
is moved to the nearest value that does not.  So sizes that were never run have a bound, growth
explores by itself, a change (longer contexts) is known everywhere once it is seen somewhere, and a
stall closes no bucket for ever, though nobody may go back there to measure again.

Of the sizes whose time is within the gap a step takes the one whose token costs least:

    (t(size) - owed * t(decoding)) / (size - owed * decoding)

With owed = 1 that is what a prompt token adds to a step that the streams need anyway: the best
choice while prompts are few (an 8B: 224 tokens beside 32 rows cost 2 ms, 992 cost 16).  Small steps
alone would let the queue grow, though, and every step of a queue is the prompts' own: with owed = 0
it is the mean of all tokens, the best choice for draining.  OWED lies between, less behind a queue.

A size that was not run for a while, or whose cost is in doubt since a measurement was far off,
counts as cheap as the two facts allow.  Either it looks bad even so, or it is run once and known.

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
CALM_S, STRAINED_S = 0.3, 0.85  # work in the queue from which it stretches, and to which
STRETCH = 1.5  # times a step without prompts may take with them, where that is beyond the gap
OWED = 0.75  # the share of a step without prompts that a step with some is not charged for
STALE = 1000  # steps after which a size's cost is no longer believed
SETTLED = 50  # steps for which even a cost in doubt is believed, or doubts would chase each other
WEIGHT = 0.3  # of a new measurement in its bucket's average
DOUBT = 1.2  # times the average, or less than the average by it: the next measurement replaces it
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
        self._steps = 0  # measured ones
        self._ran = [0] * len(sizes)  # the last of them by bucket
        self._own = [0.0] * len(sizes)  # the cost that it left there; 0 = none, or in doubt

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of so many flat tokens took so long on the device; 0 = it was not measured."""
        if not self._gap_s or seconds <= 0:
            return
        at, costs = self._bucket(tokens), self._costs
        self._steps += 1
        self._ran[at] = self._steps
        if not costs:
            size = self._sizes[at]
            self._costs = [seconds * max(1.0, other / size) for other in self._sizes]
            self._own[at] = seconds
            return
        usual, seconds = costs[at], min(seconds, OUTLIER * costs[at])
        known = self._known(at)
        self._fit(at, usual + WEIGHT * (seconds - usual) if known else seconds)
        doubtful = _far(seconds, usual) and (known or seconds > usual)  # below a bound is no wonder
        self._own[at] = 0.0 if doubtful else costs[at]

    def expected(self, tokens: int) -> float:
        """Seconds that a step of so many flat tokens takes, or at most; 0 while none was seen."""
        return self._costs[self._bucket(tokens)] if self._costs else 0.0

    def budget(self, taken: int, backlog: int = 0) -> int:
        """Prompt tokens of a step in which `taken` others (decoded, drafted) are computed.

        `backlog` prompt tokens wait altogether, admitted or not; 0 = many, and the gap is kept.
        Behind a short queue the gap is the bound; a long one stretches it up to STRAIN times,
        because small steps cost more a token, and who waits for a first token waits for all.
        """
        if not self._gap_s:
            return self._most
        if not self._costs:
            return min(self._most, FIRST)
        at, strain = self._bucket(taken), self._strain(backlog)
        alone = self._costs[at] if self._known(at) else 0.0  # a bound must not excuse a long step
        limit = max(MARGIN * self._gap_s * strain, STRETCH * alone)
        most = min(self._most, backlog or self._most)
        size = self._cheapest(taken, taken + most, limit, OWED / strain)
        return min(self._most, max(LEAST, size - taken))

    def _cheapest(self, taken: int, most: int, limit: float, owed: float) -> int:
        """The size within `limit` seconds whose token costs least; 0 = none fits.

        Of a larger size only `most` tokens would be used.
        """
        first = self._bucket(taken + LEAST)
        last = min(bisect_right(self._costs, limit), self._bucket(most) + 1)
        if first >= last:
            return 0
        least = self._least()
        spent, others = owed * least[self._bucket(taken)], owed * taken
        found, lowest = 0, float("inf")
        for size, seconds in zip(self._sizes[first:last], least[first:last], strict=True):
            cost = (seconds - spent) / (min(size, most) - others)
            if cost <= lowest:
                found, lowest = size, cost
        return found

    def _least(self) -> list[float]:
        """Seconds by bucket; of those that were not run lately, the least that they may take."""
        fresh = [self._fresh(i) for i in range(len(self._sizes))]
        least = list(self._costs)
        rate = 0.0
        for i in range(len(least) - 1, -1, -1):
            if fresh[i]:
                rate = least[i] / self._sizes[i]
            else:
                least[i] = rate * self._sizes[i]
        floor = 0.0
        for i, known in enumerate(fresh):
            if known:
                floor = least[i]
            else:
                least[i] = max(least[i], floor)
        return least

    def _fresh(self, at: int) -> bool:
        """Whether a cost is believed: a size that was not run lately may have become cheaper."""
        ran = self._ran[at]
        return ran > 0 and self._steps - ran < (STALE if self._known(at) else SETTLED)

    def _known(self, at: int) -> bool:
        """Whether a cost was measured, not concluded from what others cost."""
        return self._own[at] > 0 and not _far(self._costs[at], self._own[at])

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


def _far(seconds: float, usual: float) -> bool:
    """Whether that is no mere noise."""
    return not usual / DOUBT <= seconds <= usual * DOUBT
