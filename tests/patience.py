"""How long tests wait for what must happen.  Judges nothing by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable

# Only a failing test waits this long; on a machine that others use a second is soon gone.
PATIENCE_S = 30.0


def until(true: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    """Wait until something holds, or fail."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)
