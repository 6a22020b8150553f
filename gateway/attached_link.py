"""A link to an engine that another process runs: connects, and connects again.  Supervises nothing.

A gateway worker has one.  The server's own process starts and restarts the engine (workers.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from engine.messages import Hello
from gateway.supervision import Supervision
from gateway.wire import DIAL_S, DIED, STOPPING, WireLink


class AttachedLink(WireLink):
    """A Link to whichever engine listens at a path."""

    def __init__(
        self,
        path: Path,
        supervision: Supervision | None = None,
        *,
        on_ready: Callable[[Hello], None] | None = None,
    ) -> None:
        """`path` is the engine's socket, also of the engines after the first; `on_ready` is called
        for each of them, from the event loop."""
        super().__init__((supervision or Supervision()).rerun_s, on_ready)
        self._path = path
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to connect; return at once."""
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def stop(self) -> None:
        """Close the connection; the engine runs on for others."""
        self._stopping = True
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        self._lost(STOPPING)
        self._fail_waiting(STOPPING)
        self._hang_up()

    def give_up(self, why: str) -> None:
        """No engine will come any more, says who starts them: end what waits for one."""
        self.down = why
        self._fail_waiting(why)
        self._settled.set()

    def _lost(self, why: str) -> None:
        self.restarts += self.hello is not None and not self._stopping
        super()._lost(why)

    async def _keep(self) -> None:
        while not self.down:
            wire = await self._dial(self._path)
            await wire.closed.wait()
            self._lost(DIED)
            self._wire = None
            await asyncio.sleep(DIAL_S)
        self.give_up(self.down)
