"""The gateways of an engine: whose request is whose, one step loop for all.  Binds no socket.

    gateway -- frames --> reader thread --> engine.inbox
    engine.step() --> each gateway's Outbox -- frames --> gateway

Request ids are one space for all gateways: an id that another gateway has running is refused here,
and nobody can abort, pause or resume what is not his.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from engine.messages import (
    Abort,
    Admitted,
    BadFrame,
    Deframer,
    Failed,
    Hello,
    Out,
    Pause,
    Refused,
    Resume,
    Step,
    Stepping,
    Submit,
    ToEngine,
    ToGateway,
    frame,
    to_engine,
)

log = logging.getLogger("engine.attachments")

UNSENT_LIMIT = 64 * 1024 * 1024  # bytes; a gateway that leaves more unread is broken
IDLE_S = 0.25  # how long the loop sleeps when nothing happens: bounds the answer to SIGTERM
FLUSH_S = 0.005  # the same while bytes wait for a socket
READ_BYTES = 1 << 16
WAKE = Abort("")  # an id that no request has: only wakes the loop

GONE, GARBAGE, STOPPED, STUCK = "gone", "garbage", "stopped", "stuck"


class GatewayGone(Exception):
    """The gateway closed its end."""


class GatewayStuck(Exception):
    """The gateway has not read for so long that the unsent bytes passed the limit."""


class Outbox:
    """Replies on their way to one gateway.  Never blocks: what the socket refuses waits here."""

    def __init__(self, connection: socket.socket, limit: int = UNSENT_LIMIT) -> None:
        self._connection = connection
        self._limit = limit
        self._unsent = bytearray()

    @property
    def waiting(self) -> int:
        """Bytes that the socket has not taken yet."""
        return len(self._unsent)

    def put(self, messages: Iterable[ToGateway]) -> None:
        """Send these after what waits; raise GatewayStuck past the limit, GatewayGone."""
        for message in messages:
            self._unsent += frame(message)
        while self._unsent:
            try:
                sent = self._connection.send(self._unsent, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError as error:
                raise GatewayGone(error.strerror) from error
            del self._unsent[:sent]
        if len(self._unsent) > self._limit:
            raise GatewayStuck(
                f"A gateway left {len(self._unsent):,} bytes unread; the limit is "
                f"{self._limit:,}. Its connection is closed, so that a working one can take over."
            )


class Attachment:
    """One gateway's connection, from Hello until it ends."""

    def __init__(self, connection: socket.socket, unsent_limit: int) -> None:
        self.connection = connection
        self.outbox = Outbox(connection, unsent_limit)
        self.deframer = Deframer()
        self.ended = ""  # how

    def hang_up(self, how: str) -> None:
        """End it from our side; the reader thread sees that and cleans up."""
        self.ended = self.ended or how  # closing a socket that is stuck also looks like a leaving
        with contextlib.suppress(OSError):  # the peer may be gone already
            self.connection.shutdown(socket.SHUT_RDWR)


@dataclass(slots=True)
class _Asked:
    """A request that a gateway waits for."""

    by: Attachment
    choices_left: int


class Attachments:
    """All gateways of an engine.  `serve` is the step loop; one more thread accepts and reads."""

    def __init__(
        self, engine: Stepping, listener: socket.socket, unsent_limit: int = UNSENT_LIMIT
    ) -> None:
        self.dropped = 0  # connections that sent garbage
        self.ended = ""  # why no gateway is left to serve
        self._engine = engine
        self._listener = listener
        self._unsent_limit = unsent_limit
        self._asked: dict[str, _Asked] = {}  # every request that some gateway still waits for
        self._attached: list[Attachment] = []  # greeted; the loop's own
        self._posted: deque[tuple[Attachment, Hello | Refused]] = deque()  # reader to loop
        self._several = False  # there was more than one: outs may be of one that has left
        self._waiting = False  # bytes that some socket has not taken
        self._held: list[ToGateway] = []  # to be told once the device has its next step
        self._reader = threading.Thread(target=self._read, name="engine-reader", daemon=True)
        self._bell, self._ringer = socket.socketpair()  # ends the reader's sleep

    # -- the loop

    def serve(self, stop: threading.Event) -> str:
        """Step until the last gateway leaves or stops reading, or `stop`: which one.

        One that sends garbage loses its connection; another may take its place.
        """
        self._reader.start()
        engine = self._engine
        engine.meanwhile = self._tell
        try:
            while not stop.is_set() and not self.ended:
                engine.wait(FLUSH_S if self._waiting else IDLE_S)
                replies = engine.step()
                # After the step: it may have answered a gateway that came while it ran.
                if self._posted:
                    self._post()
                if engine.exposed:
                    self._held += replies
                else:
                    self._tell()
                    self._send(replies)
        finally:
            self._tell()
            self.ended = self.ended or STOPPED
            self._ringer.close()
            self._reader.join()
        return self.ended

    def _tell(self) -> None:
        """Send what was held back."""
        held, self._held = self._held, []
        if held:
            self._send(held)

    def _post(self) -> None:
        while self._posted:
            attachment, message = self._posted.popleft()
            if isinstance(message, Hello):
                self._attached.append(attachment)
                self._several = self._several or len(self._attached) > 1
            self._put(attachment, [message])

    def _send(self, replies: list[ToGateway]) -> None:
        attached = self._attached
        if len(attached) == 1 and not self._several:  # all is for the only one: nothing is copied
            self._forget_finished(replies)
            self._put(attached[0], replies)
        else:
            shares = self._shared_out(replies)
            for attachment in attached:
                self._put(attachment, shares[attachment])
        self._waiting = False
        for attachment in attached:
            if attachment.ended:
                self._attached = [one for one in self._attached if one is not attachment]
            elif attachment.outbox.waiting:
                self._waiting = True

    def _put(self, attachment: Attachment, messages: list[ToGateway]) -> None:
        try:
            attachment.outbox.put(messages)
        except GatewayStuck as error:
            log.error("%s", error)
            attachment.hang_up(STUCK)
        except GatewayGone as error:
            log.info("connection to a gateway lost: %s", error)
            attachment.hang_up(GONE)

    def _shared_out(self, replies: list[ToGateway]) -> dict[Attachment, list[ToGateway]]:
        """What each gateway gets: of a Step its own outs, of Stats the same."""
        shares: dict[Attachment, list[ToGateway]] = {one: [] for one in self._attached}
        for reply in replies:
            match reply:
                case Step(number=number, outs=outs):
                    for attachment, own in self._outs_of_each(outs).items():
                        if attachment in shares:  # else it has just left
                            shares[attachment].append(Step(number, own))
                case Admitted(id=request) | Refused(id=request) | Failed(id=request):
                    asked = self._asked.get(request)
                    if asked is not None and asked.by in shares:
                        shares[asked.by].append(reply)
                case _:
                    for share in shares.values():
                        share.append(reply)
        self._forget_finished(replies)
        return shares

    def _outs_of_each(self, outs: list[Out]) -> dict[Attachment, list[Out]]:
        find = self._asked.get
        shares: dict[Attachment, list[Out]] = {}
        for out in outs:
            asked = find(out.id)
            if asked is None:  # its gateway has left, or aborted it while this step ran
                continue
            if asked.by in shares:
                shares[asked.by].append(out)
            else:
                shares[asked.by] = [out]
        return shares

    # -- whose request is whose

    def _forget_finished(self, replies: list[ToGateway]) -> None:
        for reply in replies:
            match reply:
                case Step(outs=outs):
                    for out in outs:
                        if out.finish:
                            self._count_down(out.id)
                case Refused(code="duplicate_request"):
                    pass  # the first request of this id still runs
                case Refused(id=request) | Failed(id=request):
                    self._asked.pop(request, None)
                case _:
                    pass  # says nothing about the end of a request

    def _count_down(self, request: str) -> None:
        asked = self._asked.get(request)
        if asked is not None:
            asked.choices_left -= 1
            if asked.choices_left < 1:
                self._asked.pop(request, None)

    def _take(self, attachment: Attachment, message: ToEngine) -> None:
        """Hand a message to the engine, unless it is about another gateway's request."""
        match message:
            case Submit(id=request, n=n):
                asked = self._asked.setdefault(request, _Asked(attachment, n))
                if asked.by is not attachment:
                    text = f"Request id {request} is running. Use another."
                    self._post_later(attachment, Refused(request, "duplicate_request", text))
                    return
            case Abort(id=request) | Pause(id=request) | Resume(id=request):
                asked = self._asked.get(request, _Asked(attachment, 0))
                if asked.by is not attachment:
                    return
                if isinstance(message, Abort) and message.index < 0:
                    self._asked.pop(request, None)
            case _:
                pass  # about a session, which any gateway of the server may speak for
        self._engine.inbox.put(message)

    def _post_later(self, attachment: Attachment, message: Hello | Refused) -> None:
        self._posted.append((attachment, message))
        self._engine.inbox.put(WAKE)

    # -- the reader's thread

    def _read(self) -> None:
        try:
            with selectors.DefaultSelector() as selector, self._bell, self._listener:
                self._listener.setblocking(False)
                selector.register(self._listener, selectors.EVENT_READ)
                selector.register(self._bell, selectors.EVENT_READ)
                while not self.ended:
                    self._listen(selector)
                for key in selector.get_map().values():
                    if key.data is not None:
                        key.data.hang_up(STOPPED)
                        key.data.connection.close()
        finally:
            self.ended = self.ended or STOPPED  # nobody is heard any more, whatever went wrong
            self._engine.inbox.put(WAKE)

    def _listen(self, selector: selectors.BaseSelector) -> None:
        """Sleep until somebody comes, speaks or leaves."""
        keys = [key for key, _ in selector.select()]
        # Those who come before those who leave: the engine ends with the last one.
        if any(key.fileobj is self._listener for key in keys):
            self._accept(selector)
        for key in keys:
            if key.data is not None and (how := self._hear(key.data)):
                self._leave(selector, key.data, how)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(True)
                attachment = Attachment(connection, self._unsent_limit)
                selector.register(connection, selectors.EVENT_READ, attachment)
                self._post_later(attachment, self._engine.hello)

    def _hear(self, attachment: Attachment) -> str:
        """Take what a gateway sent; return how it ended, "" if it did not."""
        try:
            chunk = attachment.connection.recv(READ_BYTES)
            for body in attachment.deframer.feed(chunk):
                self._take(attachment, to_engine(body))
        except BadFrame as error:
            log.error("connection dropped: %s", error)
            return GARBAGE
        except OSError:
            return attachment.ended or GONE
        return "" if chunk else attachment.ended or GONE

    def _leave(self, selector: selectors.BaseSelector, attachment: Attachment, how: str) -> None:
        """Abort what a gateway had running; the engine ends when it was the last one."""
        selector.unregister(attachment.connection)
        own = [name for name, asked in list(self._asked.items()) if asked.by is attachment]
        for request in own:
            self._asked.pop(request, None)
            self._engine.inbox.put(Abort(request))
        attachment.hang_up(how)
        attachment.connection.close()
        others = sum(key.data is not None for key in selector.get_map().values())
        self.dropped += how == GARBAGE
        log.info("a gateway left (%s): %d requests aborted, %d gateways attached, %d dropped "
                 "so far", how, len(own), others, self.dropped)
        if how != GARBAGE and not others:
            self.ended = how
            self._engine.inbox.put(WAKE)
