"""A link to an engine in this process: one thread runs its loop.  Restarts nothing.

The engine is made and used on its thread only; the event loop hears from it by one call a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from engine.messages import (
    Abort,
    Hello,
    Stats,
    Stepping,
    Submit,
    ToGateway,
)
from gateway.link import EngineLost, Mailbox, Mailboxes, Note

log = logging.getLogger("gateway.local_link")

IDLE_S = 0.25  # how long the engine's thread sleeps when nothing happens; a message wakes it
STOP_S = 10.0  # how long stop() waits for the step that runs


class LocalLink:
    """A Link whose engine `build()` makes, on a thread of this process."""

    def __init__(
        self,
        build: Callable[[], Stepping],
        *,
        on_ready: Callable[[Hello], None] | None = None,
        on_down: Callable[[str], None] | None = None,
    ) -> None:
        """The callbacks run on the event loop: the engine is ready; it ended by itself, and why."""
        self.hello: Hello | None = None
        self.restarts = 0
        self.down = ""  # why the engine ended, when it did
        self._build = build
        self._on_ready = on_ready
        self._on_down = on_down
        self._boxes = Mailboxes()
        self._engine: Stepping | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._heard = time.monotonic()
        self._stopping = threading.Event()
        self._settled = asyncio.Event()  # ready, or down
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def stats(self) -> Stats:
        """The newest snapshot."""
        return self._boxes.stats

    @property
    def stats_age_s(self) -> float:
        """Seconds since the engine's thread was last heard of."""
        return time.monotonic() - self._heard

    async def start(self) -> None:
        """Start the engine's thread; return at once."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def ready(self) -> Hello:
        """Wait until the engine is ready; raise EngineLost when it could not be made."""
        await self._settled.wait()
        if self.hello is None:
            raise EngineLost(self.down)
        return self.hello

    def submit(self, submit: Submit) -> Mailbox:
        """Hand over a request; raise EngineLost when there is no engine."""
        if self.hello is None or self._engine is None:
            raise EngineLost(self.down or "The engine is not ready yet; try again in a moment.")
        mailbox = self._boxes.open(submit)
        self._engine.inbox.put(submit)
        return mailbox

    def send(self, message: Note) -> None:
        """Hand over a note; dropped when there is no engine."""
        if self.hello is not None and self._engine is not None:
            self._engine.inbox.put(message)

    def close(self, mailbox: Mailbox) -> None:
        """Forget the mailbox and abort what still runs of it."""
        if self._boxes.close(mailbox):
            self.send(Abort(mailbox.submit.id))

    async def stop(self) -> None:
        """End the engine after the step that runs now."""
        self._stopping.set()
        if self._engine is not None:
            self._engine.inbox.put(Abort(""))  # wakes it
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, STOP_S)
        self._lost("The engine was stopped.")

    def _run(self) -> None:
        """The engine's thread: its whole life."""
        try:
            engine = self._build()
        except BaseException as error:  # a thread's death must reach those who wait for the engine
            log.exception("the engine could not be made")
            self._tell(self._lost, str(error))
            return
        try:
            self._tell(self._made, engine)
            while not self._stopping.is_set():
                engine.wait(IDLE_S)
                if replies := engine.step():
                    self._tell(self._deliver, replies)
        except BaseException:  # as above; what it was goes to the log, never to clients
            log.exception("the engine broke")
            self._tell(self._lost, "The engine broke and cannot go on; restart the server.")
        finally:
            engine.close()

    def _tell(self, what: Callable[[Any], None], value: object) -> None:
        assert self._loop is not None, "the engine's thread runs before start()"
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(what, value)

    def _made(self, engine: Stepping) -> None:
        self._engine = engine
        self.hello = engine.hello
        self._heard = time.monotonic()
        self._settled.set()
        if self._on_ready is not None:
            self._on_ready(engine.hello)

    def _deliver(self, replies: list[ToGateway]) -> None:
        self._heard = time.monotonic()
        self._boxes.deliver(replies)

    def _lost(self, why: str) -> None:
        self.hello = None
        self._settled.set()
        if self._on_down is not None and not self.down and not self._stopping.is_set():
            self._on_down(why)
        self.down = self.down or why
        for box in self._boxes.running():
            box.fail(EngineLost(self.down))
