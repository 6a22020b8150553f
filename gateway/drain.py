"""The end of a server's life: no new work, let streams finish, then tell them.  Handles no signals.

    begin()            expired.set()                       the server stops
    |--- delay .. timeout ---|--- FAREWELL_S: streams send server_draining + [DONE] ---|
       new work gets 503         (skipped when nothing runs any more)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from sse_starlette.sse import AppStatus

FAREWELL_S = 2.0  # for the last frames to reach slow readers
_POLL_S = 0.05


class Drain:
    """Counts the work that runs and knows whether the server is leaving."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.draining = False
        self.expired = asyncio.Event()  # set: every stream must end now, with a typed error
        self.active = 0  # requests inside the app
        self._clock = clock

    def enter(self) -> None:
        """A request came in."""
        self.active += 1

    def leave(self) -> None:
        """A request is done, its response sent or lost."""
        self.active -= 1
        assert self.active >= 0, "a request left twice"

    def begin(self) -> None:
        """From now on /ready says no and new work is refused; safe to call twice."""
        self.draining = True

    async def finish(self, delay_s: float, timeout_s: float) -> None:
        """Wait for running work, at least `delay_s`, at most `timeout_s`; then expire the rest."""
        self.begin()
        start = self._clock()
        while (elapsed := self._clock() - start) < timeout_s:
            if elapsed >= delay_s and not self.active:
                break
            await asyncio.sleep(_POLL_S)
        self.expired.set()
        start = self._clock()
        while self._clock() - start < FAREWELL_S:
            if not self.active:
                break
            await asyncio.sleep(_POLL_S)


def own_the_shutdown() -> None:
    """Stop sse-starlette from cancelling streams on SIGTERM, which cuts them without `[DONE]`."""
    AppStatus.enable_automatic_graceful_drain = False
