"""Refuse hostile HTTP at the socket, before any request exists.  Knows no routes, reads no bodies.

h11 parses; this adds what it lets through: heads that are large but arrive in one piece, many
headers, two framings at once, folded lines, odd Host values, senders that are slow on purpose.
Every refusal is a JSON error and the end of the connection: nothing after it is read as a request.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from gateway.config import GatewayConfig
from gateway.errors import ApiError, BadRequest, HeadersTooLarge, RequestTimeout, Unavailable
from gateway.metrics import Metrics

# reg-name or IPv4 or [IPv6], and a port; matched in linear time (one character class, no nesting).
_HOST = re.compile(rb"(?:[A-Za-z0-9._~-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
_SWEEP_S = 1.0  # how often an upload's pace is looked at
_LOW_WATER = 0


class Refusal(h11.RemoteProtocolError):
    """A head that h11 accepts and we do not."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message, error_status_hint=error.status)
        self.error = error


class StrictConnection(h11.Connection):
    """An h11 server connection that checks each head's raw bytes as well."""

    def __init__(self, max_bytes: int, max_headers: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=max_bytes)
        self.refused: ApiError | None = None
        self.head_only = False  # the answer to the last request has no body
        self.chunked = False  # the answer's body is being sent, in chunks
        self._max_bytes = max_bytes
        self._max_headers = max_headers

    def next_event(self) -> Any:
        """h11's next event; raise RemoteProtocolError and keep the reason in `refused`."""
        raw = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self.head_only = event.method == b"HEAD"
                self._check(event, raw[: len(raw) - len(self.trailing_data[0])])
        except Refusal as refusal:
            self.refused = refusal.error
            raise
        except h11.RemoteProtocolError as error:
            self.refused = self._worded(error.error_status_hint)
            raise
        return event

    def send(self, event: Any) -> Any:
        """h11's bytes for an event; raise LocalProtocolError."""
        sent = super().send(event)
        if type(event) is h11.Response:
            chunked = b"transfer-encoding: chunked\r\n" in sent.lower()
            self.chunked = chunked and not self.head_only
        elif type(event) is not h11.Data:
            self.chunked = False
        return sent

    def _worded(self, status: int) -> ApiError:
        """h11's complaint as ours; its own text may quote the request, so it is dropped."""
        if status == 431:
            return HeadersTooLarge(
                f"The request head is larger than {self._max_bytes:,} bytes, the limit here. "
                f"Send fewer or shorter headers."
            )
        error = BadRequest(
            "The request is not valid HTTP/1.1. Check its head and framing.", code="bad_http"
        )
        if status == 501:
            error.status = 501
        return error

    def _check(self, request: h11.Request, head: bytes) -> None:
        if len(head) > self._max_bytes:
            raise Refusal(self._worded(431))
        names = [name for name, _ in request.headers]
        if len(names) > self._max_headers:
            raise Refusal(
                HeadersTooLarge(
                    f"The request has {len(names):,} headers; the limit here is "
                    f"{self._max_headers}. Send fewer."
                )
            )
        if request.http_version not in (b"1.0", b"1.1"):
            raise Refusal(_bad("The protocol version is not served. Use HTTP/1.1."))
        if b"transfer-encoding" in names and (
            b"content-length" in names or request.http_version == b"1.0"
        ):
            raise Refusal(
                _bad("Transfer-Encoding cannot stand with Content-Length or HTTP/1.0. Send one.")
            )
        if b"\n " in head or b"\n\t" in head:
            raise Refusal(_bad("A header is folded over lines. Send each header on one line."))
        if head.count(b"\n") != head.count(b"\r\n"):
            raise Refusal(_bad("A line of the head ends without CR. End each line with CR LF."))
        hosts = [value for name, value in request.headers if name == b"host"]
        if len(hosts) != 1 or _HOST.fullmatch(hosts[0]) is None:
            raise Refusal(_bad("The request needs exactly one Host header that names a host."))


def _bad(message: str) -> BadRequest:
    return BadRequest(message, code="bad_http")


class LingeringTransport(asyncio.Transport):
    """A transport whose close lets the answer arrive, although the peer is still sending.

    Closing a socket with unread bytes resets it, and the peer may lose the answer.  So the write
    side ends first, what still comes is dropped, and a timer ends it for good.
    """

    def __init__(self, inner: asyncio.Transport, linger_s: float) -> None:
        super().__init__()
        self._inner = inner
        self._linger_s = linger_s
        self.unread = False  # the protocol knows that more is on its way
        self.lingering = False

    def close(self) -> None:
        """End the connection once what was written has left, at the latest after `linger_s`."""
        if self.lingering or self._inner.is_closing():
            return
        loop = asyncio.get_running_loop()
        if not self.unread or not self._inner.can_write_eof() or not self._linger_s:
            self._inner.close()
            if self._inner.get_write_buffer_size() > _LOW_WATER:  # a peer that reads nothing
                loop.call_later(max(self._linger_s, _SWEEP_S), self._inner.abort)
            return
        self.lingering = True
        self._inner.write_eof()
        self._inner.resume_reading()
        loop.call_later(self._linger_s, self._inner.abort)

    def is_closing(self) -> bool:
        """Whether nothing more will be sent."""
        return self.lingering or self._inner.is_closing()

    def abort(self) -> None:
        """End the connection now."""
        self._inner.abort()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send, unless the end was already sent."""
        if not self.lingering:
            self._inner.write(data)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What the real transport says."""
        return self._inner.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        """Bytes that wait for the peer."""
        return self._inner.get_write_buffer_size()

    def pause_reading(self) -> None:
        """Let the peer wait."""
        if not self.lingering:
            self._inner.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        if not self._inner.is_closing():
            self._inner.resume_reading()


class Shortcut:
    """One stream's way to the socket past ASGI and h11, without an await.

    h11 walks its whole state machine for each piece: more than the rest of a token's way.
    """

    __slots__ = ("_conn", "_cycle", "_flow", "_transport")

    def __init__(self, protocol: GuardedProtocol, cycle: RequestResponseCycle) -> None:
        self._conn = protocol.conn
        self._flow = protocol.flow
        self._transport = protocol.transport
        self._cycle = cycle

    def room(self) -> bool:
        """Whether a piece may be written now; if not, `send` it, which may have to wait."""
        cycle = self._cycle
        return (
            self._conn.chunked
            and not self._flow.write_paused
            and not cycle.disconnected
            and not cycle.response_complete
        )

    def write(self, data: bytes) -> None:
        """Send a piece, not an empty one, as one chunk: the bytes that h11 would make of it."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class GuardedProtocol(H11Protocol):
    """uvicorn's h11 protocol with limits and clocks.

    idle ..keep_alive_s.. first byte ..header_timeout_s.. head ..body_timeout_s, pace.. body
    """

    transport: LingeringTransport  # type: ignore[assignment]
    conn: StrictConnection

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: GatewayConfig,
        metrics: Metrics,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._metrics = metrics
        self.conn = StrictConnection(limits.max_header_bytes, limits.max_headers)
        self._clock: asyncio.TimerHandle | None = None  # runs while a request is incomplete
        self._phase_since = 0.0  # loop time at which the head or the body began
        self._phase: Any = None  # h11.IDLE or h11.SEND_BODY while the clock runs
        self._received = 0  # body bytes
        self._asgi = self.app
        self.app = self._served

    async def _served(self, scope: Any, receive: Any, send: Any) -> None:
        """The app, with a shortcut to the socket for streams: `scope["slipstream.shortcut"]`."""
        scope["slipstream.shortcut"] = Shortcut(self, self.cycle)
        await self._asgi(scope, receive, send)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A new peer: over the connection limit it is told so and closed."""
        super().connection_made(LingeringTransport(transport, self._limits.linger_s))
        if len(self.connections) > self._limits.max_connections:
            self._metrics.rejected("connections")
            self.refuse(Unavailable("The server has no free connection. Try again soon."))
            return
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """The peer is gone."""
        self._stop_clock()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves it running after a reset

    def data_received(self, data: bytes) -> None:
        """Bytes of a request, or leftovers after a refusal."""
        if self.transport.lingering:
            return
        if self._phase is h11.SEND_BODY:
            self._received += len(data)
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """A response is out; the next request may already lie in the buffer."""
        super().on_response_complete()
        self._watch()

    def _should_upgrade(self) -> bool:
        return False  # no WebSockets here: such a request is an ordinary one

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Never called: see _should_upgrade."""
        raise AssertionError("a websocket upgrade passed the guard")

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn when the parser refuses; the reason is the connection's."""
        self.refuse(self.conn.refused or _bad("The request is not valid HTTP/1.1."))

    def refuse(self, error: ApiError) -> None:
        """Answer with `error` if no response has begun, and end the connection either way."""
        self._stop_clock()
        self._unset_keepalive_if_required()
        self._metrics.refused_at_socket()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the app's own answer must not follow ours
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._metrics.response(error.status)
            body = error.body()
            headers = error.headers | {
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
                "x-request-id": "req_" + secrets.token_hex(12),
            }
            raw = [(name.encode(), value.encode()) for name, value in headers.items()]
            phrase = HTTPStatus(error.status).phrase.encode()
            head = h11.Response(status_code=error.status, headers=raw, reason=phrase)
            data = h11.Data(data=b"" if self.conn.head_only else body)
            for part in (head, data, h11.EndOfMessage()):
                self.transport.write(self.conn.send(part) or b"")
        self.transport.unread = True
        self.transport.close()

    def _watch(self) -> None:
        """Start, keep or stop the clock of an incomplete request."""
        state = self.conn.their_state
        incomplete = state is h11.SEND_BODY or (state is h11.IDLE and self.conn.trailing_data[0])
        self.transport.unread = bool(incomplete)
        if not incomplete or self.transport.is_closing():
            self._stop_clock()
        elif self._phase is not state:
            self._stop_clock()
            self._phase = state
            self._phase_since = self.loop.time()
            self._received = 0
            self._clock = self.loop.call_later(self._next_look(), self._look)

    def _next_look(self) -> float:
        if self._phase is h11.IDLE:
            return self._limits.header_timeout_s
        return min(_SWEEP_S, self._limits.body_grace_s, self._limits.body_timeout_s)

    def _look(self) -> None:
        """Is the sender slow?"""
        limits, elapsed = self._limits, self.loop.time() - self._phase_since
        if self._phase is h11.IDLE:
            self.refuse(
                RequestTimeout(
                    f"The request head took longer than {limits.header_timeout_s:g} s. "
                    f"Send it without pauses."
                )
            )
        elif self.flow.read_paused:  # we do not read: the pace is ours, not the sender's
            self._phase_since += self._next_look()
            self._clock = self.loop.call_later(self._next_look(), self._look)
        elif elapsed >= limits.body_timeout_s or (
            elapsed >= limits.body_grace_s and self._received < limits.body_bytes_per_s * elapsed
        ):
            self.refuse(
                RequestTimeout(
                    f"The request body came too slowly. Send it within "
                    f"{limits.body_timeout_s:g} s, at {limits.body_bytes_per_s:,} bytes/s or more."
                )
            )
        else:
            self._clock = self.loop.call_later(self._next_look(), self._look)

    def _stop_clock(self) -> None:
        self._phase = None
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
