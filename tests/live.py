"""A real server on a loopback port, in a thread, and raw sockets to it.  Runs no model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway import app, http, limits
from gateway.config import GatewayConfig
from gateway.state import Gateway
from tests.patience import PATIENCE_S
from tests.scripted import Script, ScriptedLink


@dataclass
class Live:
    """A running server."""

    port: int
    server: http.Server
    loop: asyncio.AbstractEventLoop
    gateway: Gateway
    _socks: list[socket.socket] = field(default_factory=list)

    def connect(self, timeout_s: float = PATIENCE_S) -> socket.socket:
        """A new connection; one that a failed test forgets is closed with the server."""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s)
        self._socks.append(sock)
        return sock

    def hang_up(self) -> None:
        """Close every connection, so that a test that failed does not fail the next one too."""
        for sock in self._socks:
            sock.close()

    def exchange(self, sent: bytes, timeout_s: float = PATIENCE_S) -> bytes:
        """All bytes that come back for `sent` until the server closes or falls silent for long."""
        with self.connect(timeout_s) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(sent)
            return drain(sock)

    def ask(self, method: str, path: str, body: bytes = b"", *headers: str) -> Answer:
        """One request on its own connection."""
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
        if body:
            lines.append(f"Content-Length: {len(body)}")
        return Answer.of(self.exchange("\r\n".join([*lines, "", ""]).encode() + body))


@dataclass
class Answer:
    """A parsed response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @classmethod
    def of(cls, raw: bytes) -> Answer:
        """Parse one whole response."""
        assert raw.startswith(b"HTTP/1.1 "), raw[:200]
        head, _, body = raw.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        pairs = [line.partition(": ") for line in lines]
        headers = {name.lower(): value for name, _, value in pairs}
        if headers.get("transfer-encoding") == "chunked":
            body = _unchunked(body)
        return cls(int(first.split(" ")[1]), headers, body)

    @property
    def error(self) -> dict[str, object]:
        """The error object; all four keys must be there."""
        found = json.loads(self.body)["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return found


def _unchunked(body: bytes) -> bytes:
    parts: list[bytes] = []
    while body:
        size, _, body = body.partition(b"\r\n")
        parts.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return b"".join(parts)


def drain(sock: socket.socket) -> bytes:
    """Everything until the peer closes, resets, or the socket's timeout passes."""
    parts: list[bytes] = []
    with contextlib.suppress(ConnectionError, TimeoutError):
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts)


def gateway(link: ScriptedLink | None = None, **settings: object) -> Gateway:
    """A gateway over a scripted engine that says "hi", without prompts of its own."""
    link = link or ScriptedLink(lambda _: Script.say("hi"))
    return Gateway.open(GatewayConfig(**settings), link, None, "tiny")  # type: ignore[arg-type]


def with_echo(one: Gateway, ran: list[bytes]) -> ASGIApp:
    """The gateway's app plus POST /echo, which reads bodies as endpoints do, into `ran`."""

    async def echo(request: Request) -> Response:
        body = await limits.read_body(request)
        ran.append(body)
        return Response(body, media_type="application/json")

    built = app.build(one)
    built.router.routes.append(Route("/echo", echo, methods=["POST"]))
    return built


def read_one(sock: socket.socket) -> Answer:
    """One response with a content-length, from a connection that stays open."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        part = sock.recv(65536)
        assert part, raw
        raw += part
    length = int(Answer.of(raw).headers["content-length"])
    while len(raw.partition(b"\r\n\r\n")[2]) < length:
        raw += sock.recv(65536)
    return Answer.of(raw)


@contextlib.contextmanager
def running(gateway: Gateway, asgi: ASGIApp | None = None) -> Iterator[Live]:
    """Serve the gateway's app (or `asgi`) in a thread until the block ends."""
    sock = http.bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    server = http.server(asgi or app.build(gateway), gateway)
    ready = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        ready.set()
        await server.serve(sockets=[sock])

    def body() -> None:
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(main())

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    assert ready.wait(PATIENCE_S)
    until = time.monotonic() + PATIENCE_S
    while not server.started and time.monotonic() < until:
        time.sleep(0.005)
    assert server.started
    live = Live(port, server, loops[0], gateway)
    try:
        yield live
    except BaseException:
        live.hang_up()
        raise
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        live.hang_up()
        assert not thread.is_alive()
