"""What one gateway process counts, as objects and as a flat list of numbers.  Writes no page.

Every kind that a counter tells apart is known from the start, so the flat list has one length and
one order in all processes of a version: workers lay theirs beside each other (sheet.py) and add.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

PHASES = ("upload", "queued", "prefill", "decode", "end")  # where a client can leave
FINISHES = ("stop", "length", "tool_calls", "abort", "error")
REJECTIONS = (
    "queue_full", "draining", "loading", "engine_unavailable", "engine_restarted",
    "deadline_exceeded", "connections", "other",
)  # fmt: skip
STATUSES = ("1xx", "2xx", "3xx", "4xx", "5xx")
CONSTRAINED = ("tools", "response_format")  # the fields whose schemas may be enforced in part
PLAIN = ("requests", "invalid_sessions", "socket_refusals")

_FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
_GAP = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5,
    7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480,
    960, 1920, 7680,
)  # fmt: skip
_TOKENS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000,
)  # fmt: skip


class Histogram:
    """Counts by upper bound, and a sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(float(bound) for bound in bounds)
        self.counts = [0] * (len(bounds) + 1)  # the last: beyond all bounds
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it) as the page wants them."""
        total = 0
        found: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            found.append(("+Inf" if bound == float("inf") else str(bound), total))
        return found


class Counts:
    """All counters of one process; nothing here ever falls."""

    def __init__(self) -> None:
        self.plain = Counter(dict.fromkeys(PLAIN, 0))
        self.finished = Counter(dict.fromkeys(FINISHES, 0))
        self.rejected = Counter(dict.fromkeys(REJECTIONS, 0))
        self.left = Counter(dict.fromkeys(PHASES, 0))
        self.calls = Counter({"true": 0, "false": 0})
        self.relaxed = Counter(dict.fromkeys(CONSTRAINED, 0))
        self.answers = Counter({"true": 0, "false": 0})
        self.responses = Counter(dict.fromkeys(STATUSES, 0))
        self.first = Histogram(_FIRST)
        self.gap = Histogram(_GAP)
        self.queue = Histogram(_REQUEST)
        self.total = Histogram(_REQUEST)
        self.per_token = Histogram(_GAP)
        self.prompt = Histogram(_TOKENS)
        self.generated = Histogram(_TOKENS)
        self._counters = (
            self.plain, self.finished, self.rejected, self.left, self.calls, self.relaxed,
            self.answers, self.responses,
        )  # fmt: skip
        self._histograms = (
            self.first, self.gap, self.queue, self.total, self.per_token, self.prompt,
            self.generated,
        )  # fmt: skip

    def flat(self) -> list[float]:
        """Every number, in an order that only this class knows."""
        values: list[float] = []
        for counter in self._counters:
            values += counter.values()
        for histogram in self._histograms:
            values += histogram.counts
            values.append(histogram.sum)
        return values

    def add(self, values: Sequence[float]) -> None:
        """Add what another process's `flat` gave."""
        rest = iter(values)
        for counter in self._counters:
            for kind in counter:
                counter[kind] += int(next(rest))
        for histogram in self._histograms:
            histogram.counts = [count + int(next(rest)) for count in histogram.counts]
            histogram.sum += next(rest)
        assert next(rest, None) is None, "two versions of the counters"
