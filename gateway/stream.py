"""Send a turn as a stream, or gather it for a body.  Knows no endpoint's shape and no frames.

Every stream ends in one of two ways: a finish for each choice (and usage if asked), or one typed
error; then `[DONE]`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Protocol, cast

from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.choices import Said
from gateway.config import GatewayConfig
from gateway.ordinary import Socket
from gateway.protocol import Usage
from gateway.sse import PING, error_frames
from gateway.turn import ClientGone, Turn

CLIENT_GONE = 499  # nobody reads it; the access log does


class Frames(Protocol):
    """ChatFrames or TextFrames."""

    def batch(self, batch: Sequence[Said]) -> bytes:
        """All that is new, as one run of bytes; empty when nothing may leave yet."""

    def around(self, index: int, call: int) -> tuple[bytes, bytes]:
        """What stands before and after the JSON of a frame's only text, or arguments."""

    def end(self, usage: Usage) -> bytes:
        """The end of a stream that went well."""


async def frames_of(
    turn: Turn, frames: Frames, opening: bytes = b""
) -> AsyncGenerator[bytes, None]:
    """The bytes of a whole stream, at most one piece an engine step; closes the turn."""
    shown = False
    try:
        if opening:
            yield opening
        while turn.open:
            piece = frames.batch(await turn.next())
            if not turn.open:
                piece += frames.end(turn.usage())
            if piece:
                if not shown:
                    shown = True
                    turn.shown()
                yield piece
    except ClientGone:
        return
    except Exception as error:
        yield error_frames(turn.typed(error))
    finally:
        turn.close()


class Stream(EventSourceResponse):
    """A turn as an event stream; the turn is closed even if the first byte never leaves."""

    def __init__(
        self,
        turn: Turn,
        frames: Frames,
        config: GatewayConfig,
        headers: dict[str, str],
        opening: bytes = b"",
    ) -> None:
        self._pieces = frames_of(turn, frames, opening)
        super().__init__(
            self._pieces,
            headers=headers,
            ping=config.ping_s,
            # Its type asks for an event object, but bytes pass through as they are.
            ping_message_factory=cast("Callable[[], ServerSentEvent]", lambda: PING),
            send_timeout=config.send_timeout_s,
            sep="\n",
        )
        self._turn = turn
        self._frames = frames
        self._shortcut: Socket | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the stream; a client that stopped reading is dropped without a word."""
        self._turn.listen_no_more()
        self._shortcut = scope.get("slipstream.shortcut")
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            pass
        finally:
            self._turn.close()
            await self._pieces.aclose()  # it awaits nothing when it ends

    async def _stream_response(self, send: Send) -> None:
        """Hand each piece to the socket at once when it has room; only a wait needs a clock."""
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        shortcut = self._shortcut
        if shortcut is not None:
            self._turn.lend(self._tell, shortcut, partial(self._frames.around, 0))
        async for piece in self._pieces:
            if shortcut is not None and shortcut.room():
                shortcut.write(piece)
            else:
                body = {"type": "http.response.body", "body": piece, "more_body": True}
                await self._send_with_timeout(send, body)
        async with self._send_lock:  # no ping after the end
            self.active = False
            end = {"type": "http.response.body", "body": b"", "more_body": False}
            await self._send_with_timeout(send, end)

    def _tell(self, said: Said) -> None:
        """The usual step of a decode, past the generator, which sleeps."""
        piece = self._frames.batch((said,))
        if piece and self._shortcut is not None:
            self._shortcut.write(piece)


async def gathered(turn: Turn) -> list[list[Said]] | Response:
    """All that each choice said, or a response for nobody when the client left; raise ApiError."""
    said: list[list[Said]] = [[] for _ in turn.choices]
    try:
        while turn.open:
            for one in await turn.next():
                if one.anew:
                    said[one.index].clear()
                said[one.index].append(one)
    except ClientGone:
        return Response(status_code=CLIENT_GONE)
    except Exception as error:
        raise turn.typed(error) from None
    finally:
        turn.close()
    return said


async def admitted(turn: Turn, request: Request) -> Response | None:
    """Wait for admission; a response for nobody when the client left meanwhile; raise ApiError."""
    try:
        await turn.admit(request.receive)
    except ClientGone:
        return Response(status_code=CLIENT_GONE)
    return None
