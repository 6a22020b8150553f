"""When a process of the server counts as dead, and when it is started again.  Starts none.

The engine and the gateway's workers live by the same rules.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Supervision:
    """When an engine counts as dead, and what follows.  All times in seconds."""

    boot_s: float = 900.0  # from its start to Hello
    beat_s: float = 60.0  # silent for so long while requests are open: killed
    rerun_s: float = 60.0  # a request that has shown nothing waits so long for the next engine
    backoff_s: float = 1.0  # before the first restart, then doubled
    backoff_most_s: float = 30.0
    crashes: int = 5  # so many within the window, and it stays down
    window_s: float = 600.0
    term_s: float = 5.0  # from SIGTERM to SIGKILL


class Lives:
    """The lives of one process that have ended, and what that means for the next."""

    def __init__(self, rules: Supervision) -> None:
        self.recent = 0  # that ended within the window
        self._rules = rules
        self._ends: deque[float] = deque(maxlen=rules.crashes)

    def ended(self) -> float | None:
        """Another one has: seconds to wait before the next, None = it stays down."""
        rules, ends = self._rules, self._ends
        ends.append(time.monotonic())
        self.recent = sum(ends[-1] - at < rules.window_s for at in ends)
        if self.recent >= rules.crashes:
            return None
        return min(rules.backoff_s * 2.0 ** (self.recent - 1), rules.backoff_most_s)
