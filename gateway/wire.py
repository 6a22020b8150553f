"""A link over a Unix socket: frames, mailboxes, requests that run again.  Starts no process.

When the engine dies, a request whose reader has tokens ends with EngineLost at once; one that has
shown nothing waits, bounded, and is sent again to the next engine: its seed keeps the answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
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

DIAL_S = 0.02  # between attempts to connect to an engine that has not bound its socket yet
NOT_READY = "The engine is not ready; try again in a moment."
DIED = "The engine ended while this request was running; send it again."
STOPPING = "The server is stopping."


class WireLink:
    """What every Link over a socket does; who connects it, and to what, is a subclass's work."""

    def __init__(self, rerun_s: float, on_ready: Callable[[Hello], None] | None) -> None:
        """A request that has shown nothing waits `rerun_s` seconds for the next engine."""
        self.hello: Hello | None = None
        self.restarts = 0
        self.down = ""  # why it stays down, when it does
        self._rerun_s = rerun_s
        self._on_ready = on_ready
        self._boxes = Mailboxes()
        self._wire: Wire | None = None
        self._heard = time.monotonic()
        self._waiting: dict[str, Mailbox] = {}  # to be sent to the next engine
        self._sent_again: set[str] = set()  # once is enough: the request may be what kills engines
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

    # -- for subclasses

    async def _dial(self, path: Path) -> Wire:
        """Connect, however long it takes until somebody listens there."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                _, wire = await loop.create_unix_connection(lambda: Wire(self), str(path))
                return wire  # connected() has been called
            except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                await asyncio.sleep(DIAL_S)

    def _hang_up(self) -> None:
        """Close the connection, if there is one."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    # -- what the wire reports

    def connected(self, wire: Wire) -> None:
        """The engine has bound its socket."""
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
            loop.call_later(self._rerun_s, self._expire, keep)

    def _expire(self, boxes: list[Mailbox]) -> None:
        for box in boxes:
            if self._waiting.get(box.submit.id) is box:
                del self._waiting[box.submit.id]
                box.fail(EngineLost("The engine did not come back in time; send it again."))

    def _fail_waiting(self, why: str) -> None:
        waiting, self._waiting = self._waiting, {}
        for box in waiting.values():
            box.fail(EngineLost(why))


class Wire(asyncio.Protocol):
    """The socket to one engine process: frames in both directions, one callback a read."""

    def __init__(self, link: WireLink) -> None:
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
