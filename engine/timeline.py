"""Who took which second of a start.  Measures; starts and stops nothing.

    timeline = Timeline()
    with timeline.span("weights"):       # on any thread; spans may overlap and nest
        ...
    print(timeline.table())
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

Work = ParamSpec("Work")
Result = TypeVar("Result")

SHOWN_S = 0.005  # an overlap or a gap shorter than this is not worth a word
NOBODY = "(nobody)"


@dataclass(frozen=True, slots=True)
class Span:
    """One owner's time, in seconds from the timeline's start; `end` is None while it runs."""

    name: str
    start: float
    end: float | None


class Timeline:
    """Spans of one start; safe to use from several threads."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, origin: float | None = None
    ) -> None:
        """`origin` is the clock's value that counts as 0; without it, now."""
        self._clock = clock
        self._origin = clock() if origin is None else origin
        self._lock = threading.Lock()
        self._spans: list[Span] = []

    @classmethod
    def of_process(cls) -> Timeline:
        """From the start of this process, with a span for what happened until now; Linux only.

        Elsewhere it begins now.  The kernel counts a process's start in hundredths of a second.
        """
        age = _process_age()
        timeline = cls(origin=time.monotonic() - age)
        if age:
            timeline._spans.append(Span("python, imports", 0.0, age))
        return timeline

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """`name` owns the time inside the block, also when the block raises."""
        begun = Span(name, self._now(), None)
        with self._lock:
            place = len(self._spans)
            self._spans.append(begun)
        try:
            yield
        finally:
            with self._lock:
                self._spans[place] = Span(name, begun.start, self._now())

    def run(
        self, name: str, work: Callable[Work, Result], *args: Work.args, **kwargs: Work.kwargs
    ) -> Result:
        """What `work` returns; `name` owns its time."""
        with self.span(name):
            return work(*args, **kwargs)

    def spans(self) -> list[Span]:
        """All so far, the earliest start first."""
        with self._lock:
            return sorted(self._spans, key=lambda span: span.start)

    def gaps(self) -> list[Span]:
        """The times since the start that no span covers, up to the last end (or now)."""
        reached, found = 0.0, []
        for span in self.spans():
            if span.start - reached >= SHOWN_S:
                found.append(Span(NOBODY, reached, span.start))
            reached = max(reached, self._end(span))
        return found

    def total(self) -> float:
        """Seconds until the last end, or until now while a span runs."""
        return max((self._end(span) for span in self.spans()), default=0.0)

    def table(self) -> str:
        """Name, start, end, seconds, and which other spans shared the time; uncovered time too."""
        spans = self.spans()
        rows = sorted([*spans, *self.gaps()], key=lambda span: span.start)
        width = max([len(span.name) for span in rows] + [len("total")])
        lines = [f"{'boot':<{width}}   start     end       s  meanwhile"]
        for span in rows:
            end = self._end(span)
            beside = ", ".join(other.name for other in spans
                               if other is not span and self._shared(span, other) >= SHOWN_S)
            running = " (runs)" if span.end is None else ""
            lines.append(f"{span.name:<{width}} {span.start:>7.2f} {end:>7.2f} "
                         f"{end - span.start:>7.2f}  {beside}{running}".rstrip())
        total = self.total()
        lines.append(f"{'total':<{width}} {0:>7.2f} {total:>7.2f} {total:>7.2f}")
        return "\n".join(lines)

    def _now(self) -> float:
        return self._clock() - self._origin

    def _end(self, span: Span) -> float:
        return self._now() if span.end is None else span.end

    def _shared(self, one: Span, other: Span) -> float:
        return min(self._end(one), self._end(other)) - max(one.start, other.start)


def _process_age() -> float:
    """Seconds since this process was started; 0 where the system does not tell."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        # The name in parentheses may hold blanks; field 22 is the 20th after it.
        started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        ticks = os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / ticks)
    return 0.0
