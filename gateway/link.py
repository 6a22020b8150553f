"""How the gateway reaches an engine: the Link protocol, its mailbox.  Opens no sockets.

One engine step makes one callback into the event loop, which fans out to mailboxes.  A slow reader
makes its waiting outs merge, and beyond a bound its request pauses: bigger frames, not more memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from engine.messages import (
    Abort,
    Admitted,
    Failed,
    Hello,
    Out,
    Pause,
    Refused,
    Resume,
    SessionEnd,
    Stats,
    Step,
    Submit,
    ToGateway,
    TurnEnd,
)

CROWDED = 256  # tokens that may wait for a reader before its request pauses

Note = Abort | TurnEnd | SessionEnd | Pause | Resume


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


class Bell:
    """Wakes the one reader of one or several mailboxes; never counts how often it rang."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: asyncio.Future[None] | None = None

    @property
    def asleep(self) -> bool:
        """Whether the reader sleeps: it has taken, and dealt with, all that came before."""
        return self._waiting is not None and not self._waiting.done()

    def ring(self) -> None:
        """Something happened; nobody has to be waiting."""
        waiting = self._waiting
        if waiting is not None:
            self._waiting = None
            if not waiting.done():
                waiting.set_result(None)

    def heard(self) -> asyncio.Future[None]:
        """Await it to sleep until the next ring; look at the mailboxes first."""
        self._waiting = asyncio.get_running_loop().create_future()
        return self._waiting


def _deaf(note: Note) -> None:
    """Where the notes of a mailbox go that nobody watches."""


class Mailbox:
    """One request's inbox: admission once, then outs, then an end; a single reader."""

    __slots__ = (
        "_bell", "_error", "_outs", "_paused", "_send", "admitted", "lives", "running", "sink",
        "started", "submit", "waiting_tokens",
    )  # fmt: skip

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.admitted: Admitted | None = None
        self.started = False  # someone was shown an out: no silent re-run any more
        self.lives = 0  # how often an engine was lost and the request began anew
        self.running = submit.n  # choices that have not finished
        self.waiting_tokens = 0  # that the reader has not taken yet
        #: Gets an out that ends nothing while the reader sleeps; False = the reader must take it.
        self.sink: Callable[[Out], bool] | None = None
        self._outs: list[Out] = []
        self._error: Exception | None = None
        self._paused = False
        self._bell = Bell()
        self._send: Callable[[Note], None] = _deaf

    def watch(self, bell: Bell, send: Callable[[Note], None]) -> None:
        """Ring `bell`, which several mailboxes may share, and send Pause and Resume by `send`."""
        self._bell = bell
        self._send = send

    def put(self, message: Admitted | Refused | Failed) -> None:
        """Called on the event loop by the link's fan-out."""
        match message:
            case Admitted():
                self.admitted = message
            case Refused():
                self._error = SubmitRefused(message)
                self.running = 0
            case Failed(code=code, message=text):
                self._error = EngineFailed(code, text)
                self.running = 0
            case _:
                raise TypeError(f"mailbox got {type(message).__name__}")
        self._bell.ring()

    def put_out(self, out: Out) -> None:
        """The same for what a step gave: the one call a token makes.  Nothing overtakes."""
        sink = self.sink
        if sink is not None and not out.finish and self._bell.asleep and sink(out):
            return
        if out.finish:
            self.running -= 1
        self.waiting_tokens += len(out.tokens)
        if self._paused:
            self._merge(out)
        else:
            self._outs.append(out)
            if self.waiting_tokens > CROWDED and self.running:
                self._pause()
        self._bell.ring()

    def _pause(self) -> None:
        """The reader is slow: one out a choice from here on, and the engine turns to others."""
        self._paused = True
        outs, self._outs = self._outs, []
        for out in outs:
            self._merge(out)
        self._send(Pause(self.submit.id))

    def _merge(self, out: Out) -> None:
        replace = msgspec.structs.replace
        for place, before in enumerate(self._outs):
            if before.index == out.index:
                before.tokens.extend(out.tokens)
                before.logprobs.extend(out.logprobs)
                self._outs[place] = replace(out, tokens=before.tokens, logprobs=before.logprobs)
                return
        # Lists of our own: an engine in this process may still use those that it sent.
        own = replace(out, tokens=list(out.tokens), logprobs=list(out.logprobs))
        self._outs.append(own)

    def fail(self, error: Exception) -> None:
        """End the stream with `error` after the outs that already arrived."""
        self._error = error
        self._bell.ring()

    async def admission(self) -> Admitted:
        """Wait until the engine took it; raise SubmitRefused, EngineFailed or EngineLost."""
        while self.admitted is None:
            if self._error is not None:
                raise self._error
            await self._bell.heard()
        return self.admitted

    def take(self) -> list[Out]:
        """All outs that are here, perhaps none; raise what ended the stream when nothing is left.

        The request can still begin anew (`lives` tells): set `started` once someone was shown it.
        """
        taken = self._outs
        if not taken:
            if self._error is not None:
                raise self._error
            return taken
        self._outs = []
        self.waiting_tokens = 0
        if self._paused:
            self._paused = False
            self._send(Resume(self.submit.id))
        return taken

    async def outs(self) -> list[Out]:
        """Wait for and take all outs that are here (at least one); raise what ended the stream."""
        while not (taken := self.take()):
            await self._bell.heard()
        self.started = True
        return taken

    def rewind(self) -> None:
        """Drop what nobody was shown: another engine starts this request again."""
        assert not self.started, f"request {self.submit.id} was shown; it cannot start again"
        self.lives += 1
        self.running = self.submit.n
        self.waiting_tokens = 0
        self._outs = []
        self._paused = False  # the next engine has heard of no pause


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

    def send(self, message: Note) -> None:
        """Send a note; dropped silently when no engine is connected."""

    def close(self, mailbox: Mailbox) -> None:
        """Forget the mailbox and abort what still runs of it; safe to call twice, never awaits."""

    async def stop(self) -> None:
        """Close the connection and end the engine if this link started it."""


class Mailboxes:
    """The open mailboxes of a link, by request id, and the one fan-out."""

    def __init__(self) -> None:
        self._open: dict[str, Mailbox] = {}
        self.stats = Stats()

    def open(self, submit: Submit) -> Mailbox:
        """A mailbox for this request; the id must be new."""
        assert submit.id not in self._open, f"request {submit.id} opened twice"
        mailbox = self._open[submit.id] = Mailbox(submit)
        return mailbox

    def close(self, mailbox: Mailbox) -> bool:
        """Forget it; return whether it was open and some choice still ran."""
        return self._open.pop(mailbox.submit.id, None) is not None and mailbox.running > 0

    def deliver(self, messages: list[ToGateway]) -> None:
        """Hand each message to its mailbox; messages for closed ones are dropped."""
        find = self._open.get
        for message in messages:
            match message:
                case Step(outs=outs):
                    for out in outs:
                        if box := find(out.id):
                            box.put_out(out)
                case Admitted() | Refused() | Failed():
                    if box := find(message.id):
                        box.put(message)
                case Stats():
                    self.stats = message
                case Hello():
                    pass
                case _:
                    raise TypeError(f"gateway got {type(message).__name__}")

    def rewind(self, mailbox: Mailbox) -> None:
        """Back to before the engine took the request: it died, nobody was shown anything."""
        mailbox.rewind()

    def running(self) -> list[Mailbox]:
        """The open mailboxes of which some choice has not finished."""
        return [box for box in self._open.values() if box.running > 0]

    def open_boxes(self) -> list[Mailbox]:
        """All mailboxes that are open now."""
        return list(self._open.values())
