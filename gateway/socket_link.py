"""A link to an engine process: starts it, watches it, starts it again.  Knows no HTTP and no model.

What becomes of the requests of an engine that died is wire.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from engine.messages import Hello
from gateway.early import Early
from gateway.supervision import Lives, Supervision
from gateway.wire import DIED, STOPPING, WireLink

log = logging.getLogger("gateway.socket_link")

SILENT = "silent"


class SocketLink(WireLink):
    """A Link to the process `command --socket PATH --parent PID`."""

    def __init__(
        self,
        command: Sequence[str],
        supervision: Supervision | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        on_ready: Callable[[Hello], None] | None = None,
        on_down: Callable[[str], None] | None = None,
        early: Early | None = None,
    ) -> None:
        """`environment` of the process; None = ours.  `on_ready` is called for each engine that is
        ready, `on_down` once, with why, when no further restart will be tried; both from the event
        loop, soon after, so that what they raise harms nobody.  `early` is the first process, where
        it runs already."""
        self._rules = supervision or Supervision()
        super().__init__(self._rules.rerun_s, on_ready)
        self.process: Process | Early | None = None
        self._early = early
        self._command = tuple(command)
        self._environment = environment
        self._on_down = on_down
        self._folder: Path | None = None
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def path(self) -> Path:
        """The engine's socket; start() makes its folder."""
        assert self._folder is not None, "start() comes first"
        return self._folder / "engine.sock"

    async def start(self) -> None:
        """Start the supervisor; return at once."""
        self._folder = (Path(tempfile.mkdtemp(prefix="slipstream-"))  # mode 0700
                        if self._early is None else self._early.folder)
        self._supervisor = asyncio.get_running_loop().create_task(self._supervise())

    async def stop(self) -> None:
        """End the engine: by closing its socket, then SIGTERM, then SIGKILL; remove the socket."""
        self._stopping = True
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        self._lost(STOPPING)
        self._fail_waiting(STOPPING)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # -- the supervisor

    async def _supervise(self) -> None:
        lives = Lives(self._rules)
        while True:
            try:
                why = await self._one_life()
            except OSError as error:  # no memory, no file descriptor, no such program
                why = f"its process could not be run: {error}"
            log.error("engine ended: %s", why)
            if not self._settled.is_set():  # bad weights, no memory: the next would end alike
                self.down = self.down or f"The engine could not start ({why}); see its log above."
            delay = lives.ended()
            if self.down or delay is None:
                self._give_up(self.down or f"The engine ended {lives.recent} times within "
                              f"{self._rules.window_s:.0f} s (last: {why}); see its log above.")
                return
            log.warning("starting the engine again in %.1f s", delay)
            await asyncio.sleep(delay)
            self.restarts += 1

    async def _one_life(self) -> str:
        """Start a process, connect, watch until it ends; return why it ended."""
        process = self.process = await self._begun()
        self._heard = time.monotonic()
        exited = asyncio.ensure_future(process.wait())
        watch = asyncio.ensure_future(self._watch(self.path))
        why = ""
        try:
            await asyncio.wait({exited, watch}, return_when=asyncio.FIRST_COMPLETED)
            why = watch.result() if watch.done() else ""
        finally:
            watch.cancel()
            self._lost(DIED)
            self._hang_up()
            # A silent engine dumps the stacks of its threads on SIGABRT (faulthandler).
            first = signal.SIGABRT if why.startswith(SILENT) else signal.SIGTERM
            code = await self._end(process, exited, first)
        return why or f"exit code {code}"

    async def _begun(self) -> Process | Early:
        """A process that makes an engine."""
        early, self._early = self._early, None
        if early is not None:
            early.go()
            return early
        path = self.path
        path.unlink(missing_ok=True)
        # Its own process group: Ctrl-C in the terminal reaches the gateway only, which then drains.
        return await asyncio.create_subprocess_exec(
            *self._command, "--socket", str(path), "--parent", str(os.getpid()),
            start_new_session=True, env=self._environment,
        )

    async def _watch(self, path: Path) -> str:
        """Connect, wait for Hello, then look at the heartbeat; return what is wrong."""
        wire = await self._dial(path)
        while not wire.closed.is_set():
            limit = self._rules.boot_s if self.hello is None else self._rules.beat_s
            if self.stats_age_s > limit and (self.hello is None or self._busy()):
                return f"{SILENT} for {self.stats_age_s:.1f} s; the limit is {limit:g} s"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(wire.closed.wait(), self._rules.beat_s / 8)
        return wire.fault

    def _busy(self) -> bool:
        """Whether somebody waits for the engine: only then its silence counts."""
        return bool(self._boxes.running())

    async def _end(
        self, process: Process | Early, exited: asyncio.Future[int], first: int
    ) -> int:
        """Make sure that the process is gone, by `first` and then SIGKILL; its exit code."""
        for number in (first, signal.SIGKILL):
            # A dying process closes its socket before it can be waited for: no signal needed then.
            done, _ = await asyncio.wait({exited}, timeout=0.2)
            if done:
                break
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            await asyncio.wait({exited}, timeout=self._rules.term_s)
        return await exited

    def _give_up(self, why: str) -> None:
        self.down = why
        log.critical("%s", why)
        self._fail_waiting(why)
        self._settled.set()
        if self._on_down is not None:
            asyncio.get_running_loop().call_soon(self._on_down, why)
