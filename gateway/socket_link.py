"""A link to an engine process: starts it, watches it, starts it again.  Knows no HTTP and no model.

When the process dies, a request whose reader has tokens ends with EngineLost at once; one that has
shown nothing waits, bounded, and is sent again to the next engine: its seed keeps the answer.
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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from engine.messages import (
    PROTOCOL,
    Abort,
    BadFrame,
    Deframer,
    Hello,
    Stats,
    Submit,
    ToEngine,
    ToGateway,
    frame,
    to_gateway,
)
from gateway.link import EngineLost, Mailbox, Mailboxes

log = logging.getLogger("gateway.socket_link")

DIAL_S = 0.02  # between attempts to connect to an engine that has not bound its socket yet
NOT_READY = "The engine is not ready; try again in a moment."
DIED = "The engine ended while this request was running; send it again."
SILENT = "silent"


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


class SocketLink:
    """A Link to the process `command --socket PATH --parent PID`."""

    def __init__(
        self,
        command: Sequence[str],
        supervision: Supervision | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        on_ready: Callable[[Hello], None] | None = None,
        on_down: Callable[[str], None] | None = None,
    ) -> None:
        """`environment` of the process; None = ours.  `on_ready` is called for each engine that is
        ready, `on_down` once, with why, when no further restart will be tried; both from the event
        loop, soon after, so that what they raise harms nobody."""
        self.hello: Hello | None = None
        self.restarts = 0
        self.down = ""  # why it stays down, when it does
        self.process: Process | None = None
        self._command = tuple(command)
        self._rules = supervision or Supervision()
        self._environment = environment
        self._on_ready = on_ready
        self._on_down = on_down
        self._boxes = Mailboxes()
        self._wire: Wire | None = None
        self._heard = time.monotonic()
        self._waiting: dict[str, Mailbox] = {}  # to be sent to the next engine
        self._sent_again: set[str] = set()  # once is enough: the request may be what kills engines
        self._folder: Path | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()  # ready for the first time, or down
        self._stopping = False

    @property
    def stats(self) -> Stats:
        """The newest snapshot."""
        return self._boxes.stats

    @property
    def stats_age_s(self) -> float:
        """Seconds since the engine was last heard of, by the monotonic clock."""
        return time.monotonic() - self._heard

    async def start(self) -> None:
        """Start the supervisor; return at once."""
        self._folder = Path(tempfile.mkdtemp(prefix="slipstream-"))  # mode 0700
        self._supervisor = asyncio.get_running_loop().create_task(self._supervise())

    async def ready(self) -> Hello:
        """Wait until an engine is ready; raise EngineLost when it stays down."""
        await self._settled.wait()
        if self.hello is None:
            raise EngineLost(self.down or NOT_READY)
        return self.hello

    def submit(self, submit: Submit) -> Mailbox:
        """Send a request; raise EngineLost when no engine is connected."""
        if self.hello is None or self._wire is None:
            raise EngineLost(self.down or NOT_READY)
        mailbox = self._boxes.open(submit)
        self._wire.send(submit)
        return mailbox

    def send(self, message: ToEngine) -> None:
        """Send a note; dropped when no engine is connected."""
        if self.hello is not None and self._wire is not None:
            self._wire.send(message)

    def close(self, mailbox: Mailbox) -> None:
        """Forget the mailbox and abort what still runs of it."""
        id = mailbox.submit.id
        self._sent_again.discard(id)
        if self._boxes.close(mailbox) and self._waiting.pop(id, None) is None:
            self.send(Abort(id))

    async def stop(self) -> None:
        """End the engine: by closing its socket, then SIGTERM, then SIGKILL; remove the socket."""
        self._stopping = True
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        self._lost("The server is stopping.")
        self._fail_waiting("The server is stopping.")
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # -- the supervisor

    async def _supervise(self) -> None:
        crashes: deque[float] = deque(maxlen=self._rules.crashes)
        while True:
            try:
                why = await self._one_life()
            except OSError as error:  # no memory, no file descriptor, no such program
                why = f"its process could not be run: {error}"
            log.error("engine ended: %s", why)
            if not self._settled.is_set():  # bad weights, no memory: the next would end alike
                self.down = self.down or f"The engine could not start ({why}); see its log above."
            crashes.append(time.monotonic())
            recent = sum(crashes[-1] - at < self._rules.window_s for at in crashes)
            if self.down or recent >= self._rules.crashes:
                self._give_up(self.down or f"The engine ended {recent} times within "
                              f"{self._rules.window_s:.0f} s (last: {why}); see its log above.")
                return
            delay = min(self._rules.backoff_s * 2 ** (recent - 1), self._rules.backoff_most_s)
            log.warning("starting the engine again in %.1f s", delay)
            await asyncio.sleep(delay)
            self.restarts += 1

    async def _one_life(self) -> str:
        """Start a process, connect, watch until it ends; return why it ended."""
        assert self._folder is not None, "start() comes first"
        path = self._folder / "engine.sock"
        path.unlink(missing_ok=True)
        # Its own process group: Ctrl-C in the terminal reaches the gateway only, which then drains.
        process = self.process = await asyncio.create_subprocess_exec(
            *self._command, "--socket", str(path), "--parent", str(os.getpid()),
            start_new_session=True, env=self._environment,
        )
        self._heard = time.monotonic()
        exited = asyncio.ensure_future(process.wait())
        watch = asyncio.ensure_future(self._watch(path))
        why = ""
        try:
            await asyncio.wait({exited, watch}, return_when=asyncio.FIRST_COMPLETED)
            why = watch.result() if watch.done() else ""
        finally:
            watch.cancel()
            self._lost(DIED)
            if self._wire is not None:
                self._wire.close()
                self._wire = None
            # A silent engine dumps the stacks of its threads on SIGABRT (faulthandler).
            first = signal.SIGABRT if why.startswith(SILENT) else signal.SIGTERM
            code = await self._end(process, exited, first)
        return why or f"exit code {code}"

    async def _watch(self, path: Path) -> str:
        """Connect, wait for Hello, then look at the heartbeat; return what is wrong."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                _, wire = await loop.create_unix_connection(lambda: Wire(self), str(path))
                break  # connected() has been called
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(DIAL_S)
        while not wire.closed.is_set():
            limit = self._rules.boot_s if self.hello is None else self._rules.beat_s
            if self.stats_age_s > limit and (self.hello is None or self._boxes.running()):
                return f"{SILENT} for {self.stats_age_s:.1f} s; the limit is {limit:g} s"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(wire.closed.wait(), self._rules.beat_s / 8)
        return wire.fault

    async def _end(self, process: Process, exited: asyncio.Future[int], first: int) -> int:
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

    # -- what the wire reports

    def connected(self, wire: Wire) -> None:
        """The engine has bound its socket and we are the one gateway."""
        self._wire = wire

    def received(self, messages: list[ToGateway]) -> None:
        """All messages of one read."""
        self._heard = time.monotonic()
        if self.hello is None and messages:
            self._greeted(messages[0])
        self._boxes.deliver(messages)

    def disconnected(self, wire: Wire) -> None:
        """The engine's end of the socket is closed: it is dying or dead."""
        if wire is self._wire:
            self._lost(DIED)

    def _greeted(self, hello: ToGateway) -> None:
        if not isinstance(hello, Hello):
            self._refuse(f"The engine's first message is {type(hello).__name__}, not Hello.")
        elif hello.protocol != PROTOCOL:
            self._refuse(
                f"The engine speaks protocol {hello.protocol}, this gateway {PROTOCOL}. "
                "Install the same version of Slipstream for both."
            )
        else:
            self.hello = hello
            self._settled.set()
            waiting, self._waiting = self._waiting, {}
            for mailbox in waiting.values():
                self._sent_again.add(mailbox.submit.id)
                self._wire_now().send(mailbox.submit)
            if self._on_ready is not None:
                asyncio.get_running_loop().call_soon(self._on_ready, hello)

    def _wire_now(self) -> Wire:
        assert self._wire is not None, "no connection"
        return self._wire

    def _refuse(self, why: str) -> None:
        self.down = why  # the same program would say the same again: no restart
        self._wire_now().close()

    def _lost(self, why: str) -> None:
        """No engine now: end what has shown something, keep the rest for the next engine."""
        if self.hello is None:
            return
        self.hello = None
        keep: list[Mailbox] = []
        for box in self._boxes.running():
            if box.started or self._stopping or box.submit.id in self._sent_again:
                box.fail(EngineLost(why))
            else:
                self._boxes.rewind(box)
                self._waiting[box.submit.id] = box
                keep.append(box)
        if keep:
            loop = asyncio.get_running_loop()
            loop.call_later(self._rules.rerun_s, self._expire, keep)

    def _expire(self, boxes: list[Mailbox]) -> None:
        for box in boxes:
            if self._waiting.get(box.submit.id) is box:
                del self._waiting[box.submit.id]
                box.fail(EngineLost("The engine did not come back in time; send it again."))

    def _fail_waiting(self, why: str) -> None:
        waiting, self._waiting = self._waiting, {}
        for box in waiting.values():
            box.fail(EngineLost(why))

    def _give_up(self, why: str) -> None:
        self.down = why
        log.critical("%s", why)
        self._fail_waiting(why)
        self._settled.set()
        if self._on_down is not None:
            asyncio.get_running_loop().call_soon(self._on_down, why)


class Wire(asyncio.Protocol):
    """The socket to one engine process: frames in both directions, one callback a read."""

    def __init__(self, link: SocketLink) -> None:
        self.closed = asyncio.Event()
        self.fault = ""  # what the engine sent wrong
        self._link = link
        self._deframer = Deframer()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: connected."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._link.connected(self)

    def data_received(self, data: bytes) -> None:
        """asyncio: decode every frame that is whole, hand them over together."""
        try:
            messages = [to_gateway(body) for body in self._deframer.feed(data)]
        except BadFrame as error:
            self.fault = f"sent garbage: {error}"
            self.close()
            return
        self._link.received(messages)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the other end is gone, or we closed."""
        self.closed.set()
        self._link.disconnected(self)

    def send(self, message: ToEngine) -> None:
        """Write one message; asyncio keeps what the socket does not take at once."""
        assert self._transport is not None, "not connected"
        self._transport.write(frame(message))

    def close(self) -> None:
        """Close without waiting for what is unsent."""
        if self._transport is not None:
            self._transport.abort()
