"""How the gateway reaches an engine: the Link protocol, its mailbox.  Opens no sockets.

One engine step makes one callback into the event loop, which fans out to mailboxes.  A slow reader
makes its waiting outs merge: it gets bigger frames, not more memory.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from engine.messages import (
    Abort,
    Admitted,
    Failed,
    Hello,
    Out,
    Refused,
    SessionEnd,
    Stats,
    Step,
    Submit,
    ToGateway,
    TurnEnd,
)


class EngineLost(Exception):
    """The engine died while this request had tokens out; the stream must end with a typed error."""


class EngineFailed(Exception):
    """The engine ended this request by its own fault; `code` and `message` go to the client."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class SubmitRefused(Exception):
    """The engine would not take the request; `reason` is its Refused message."""

    def __init__(self, reason: Refused) -> None:
        super().__init__(reason.message)
        self.reason = reason


class Mailbox:
    """One request's inbox: admission once, then outs, then an end; a single reader."""

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.admitted: Admitted | None = None
        self.started = False  # an out has been handed to the reader: no silent re-run any more
        self._outs: list[Out] = []
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    def put(self, message: Admitted | Refused | Failed | Out) -> None:
        """Called on the event loop by the link's fan-out."""
        match message:
            case Admitted():
                self.admitted = message
            case Refused():
                self._error = SubmitRefused(message)
            case Failed(code=code, message=text):
                self._error = EngineFailed(code, text)
            case Out():
                self._outs.append(message)
            case _:
                raise TypeError(f"mailbox got {type(message).__name__}")
        self._wake.set()

    def fail(self, error: Exception) -> None:
        """End the stream with `error` after the outs that already arrived."""
        self._error = error
        self._wake.set()

    async def admission(self) -> Admitted:
        """Wait until the engine took it; raise SubmitRefused, EngineFailed or EngineLost."""
        while self.admitted is None:
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        return self.admitted

    async def outs(self) -> list[Out]:
        """Wait for and take all outs that are here (at least one); raise what ended the stream."""
        while not self._outs:
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        taken, self._outs = self._outs, []
        self.started = True
        return taken

    def rewind(self) -> None:
        """Drop outs that nobody has read: another engine starts this request again."""
        assert not self.started, f"request {self.submit.id} was read from; it cannot start again"
        self._outs.clear()

    @property
    def waiting_tokens(self) -> int:
        """Tokens that the reader has not taken yet."""
        return sum(len(out.tokens) for out in self._outs)


class Link(Protocol):
    """One engine, as the gateway sees it.  All methods run on the event loop."""

    hello: Hello | None  # None until the engine is ready
    restarts: int

    @property
    def stats(self) -> Stats:
        """The newest snapshot."""

    @property
    def stats_age_s(self) -> float:
        """Seconds since the engine was heard of: its heartbeat."""

    async def start(self) -> None:
        """Begin to connect; return at once."""

    def submit(self, submit: Submit) -> Mailbox:
        """Send a request; raise EngineLost when no engine is connected."""

    def send(self, message: Abort | TurnEnd | SessionEnd) -> None:
        """Send a note; dropped silently when no engine is connected."""

    def close(self, mailbox: Mailbox) -> None:
        """Forget the mailbox and abort what still runs of it; safe to call twice, never awaits."""

    async def stop(self) -> None:
        """Close the connection and end the engine if this link started it."""


class Mailboxes:
    """The open mailboxes of a link, by request id, and the one fan-out."""

    def __init__(self) -> None:
        self._open: dict[str, Mailbox] = {}
        self._left: dict[str, int] = {}  # choices that have not finished
        self.stats = Stats()

    def open(self, submit: Submit) -> Mailbox:
        """A mailbox for this request; the id must be new."""
        assert submit.id not in self._open, f"request {submit.id} opened twice"
        mailbox = self._open[submit.id] = Mailbox(submit)
        self._left[submit.id] = submit.n
        return mailbox

    def close(self, mailbox: Mailbox) -> bool:
        """Forget it; return whether some choice still ran."""
        self._open.pop(mailbox.submit.id, None)
        return self._left.pop(mailbox.submit.id, 0) > 0

    def deliver(self, messages: list[ToGateway]) -> None:
        """Hand each message to its mailbox; messages for closed ones are dropped."""
        for message in messages:
            match message:
                case Step(outs=outs):
                    for out in outs:
                        self._deliver_out(out)
                case Admitted() | Refused() | Failed():
                    if box := self._open.get(message.id):
                        if not isinstance(message, Admitted):
                            self._left[message.id] = 0
                        box.put(message)
                case Stats():
                    self.stats = message
                case Hello():
                    pass
                case _:
                    raise TypeError(f"gateway got {type(message).__name__}")

    def _deliver_out(self, out: Out) -> None:
        if box := self._open.get(out.id):
            if out.finish:
                self._left[out.id] -= 1
            box.put(out)

    def rewind(self, mailbox: Mailbox) -> None:
        """Back to before the engine took the request: it died, nobody read from the mailbox."""
        mailbox.rewind()
        self._left[mailbox.submit.id] = mailbox.submit.n

    def running(self) -> list[Mailbox]:
        """The open mailboxes of which some choice has not finished."""
        return [box for id, box in self._open.items() if self._left[id] > 0]

    def open_boxes(self) -> list[Mailbox]:
        """All mailboxes that are open now."""
        return list(self._open.values())
