"""How many threads torch should use now: those whose cores nobody else is using.  Runs nothing.

A step is hundreds of short parallel regions, and each ends when its last thread does.  A core that
another process holds makes every one of them wait for a time slice: measured on two cores beside
two busy processes, a decode step took 435 ms to seconds with two threads and 26 ms with one (17
with two on a quiet machine).  So every tenth of a second the engine compares the machine's CPU
time with its own.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

WINDOW_S = 0.1
YIELD_AT = 0.35  # of a core: a thread whose core is used that much by others is not worth its waits
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds since some fixed time."""

    at: float  # wall
    machine: float  # CPU seconds of all processes, on the cores that we may use
    own: float  # CPU seconds of this process
    cores: int


def cores() -> frozenset[int]:
    """The numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def read_usage() -> Usage | None:
    """Now; None where the system does not tell."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    ours = {f"cpu{number}" for number in cores()}
    busy = 0
    for fields in (line.split() for line in lines):
        if fields and fields[0] in ours:
            user, nice, system, _idle, _wait, irq, soft, steal = map(int, fields[1:9])
            busy += user + nice + system + irq + soft + steal
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(time.monotonic(), busy / TICKS, used.ru_utime + used.ru_stime, len(ours))


def unseen() -> None:
    """Where it does not matter what others use: the number of threads stays."""


class Threads:
    """Call `update` between steps; it calls `apply(count)` when the number should change."""

    def __init__(
        self,
        limit: int,
        apply: Callable[[int], None],
        read: Callable[[], Usage | None] = read_usage,
    ) -> None:
        self.limit = limit
        self.count = limit
        self._apply = apply
        self._read = read
        self._last = read() if limit > 1 else None
        apply(limit)

    def update(self, now: float) -> None:
        """Look again if a window has passed; `now` is monotonic seconds."""
        last = self._last
        if last is None or now - last.at < WINDOW_S:
            return
        usage = self._last = self._read()
        if usage is None:
            return
        passed = usage.at - last.at
        foreign = ((usage.machine - last.machine) - (usage.own - last.own)) / passed
        spare = usage.cores - max(0.0, foreign)
        count = max(1, min(self.limit, int(spare + YIELD_AT)))
        if count != self.count:
            self.count = count
            self._apply(count)
