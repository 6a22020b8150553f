"""One of several gateway processes: gets its part from the server's, serves, ends.  Starts nobody.

    server's process -- Start --> worker -- SERVING, READY --> server's process
                     -- a line: why no engine will come any more, or the end of the socket

It shares the port by SO_REUSEPORT, the engine by its own connection, counters and limits by shared
memory (sheet.py), and with them the secret that names sessions and cache entries.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from dataclasses import dataclass
from pathlib import Path

import msgspec
from starlette.types import ASGIApp

from gateway import http
from gateway.attached_link import AttachedLink
from gateway.config import GatewayConfig
from gateway.sheet import Share, Sheet
from gateway.state import Gateway, Shared

SERVING = b"serving\n"  # it listens, and can drain
READY = b"ready\n"  # it is connected to an engine; said of every engine
LOST = "The server's own process is gone."
_READ_BYTES = 1 << 16


class Start(msgspec.Struct, frozen=True):
    """A worker's part of the server."""

    number: int  # from 0
    workers: int
    secret: bytes  # the server's
    created: int  # Unix time of the server's start
    engine: str  # its socket's path
    host: str
    port: int
    listener: int  # file descriptor of a listening socket; -1 = bind one
    memory: int  # file descriptor of the sheet
    settings: bytes  # of the program that the worker is, in its own words


@dataclass(frozen=True, slots=True)
class Part:
    """What a worker was told, and the socket that told it."""

    start: Start
    control: socket.socket

    @classmethod
    def receive(cls, control: int) -> Part:
        """Read it from this file descriptor; raise EOFError when the server's process is gone."""
        sock = socket.socket(fileno=control)
        line = b""
        while not line.endswith(b"\n"):
            chunk = sock.recv(_READ_BYTES)
            if not chunk:
                raise EOFError(LOST)
            line += chunk
        return cls(msgspec.json.decode(line, type=Start), sock)

    def link(self) -> AttachedLink:
        """A link to the server's engine, not yet started."""
        return AttachedLink(Path(self.start.engine), on_ready=lambda _: self._say(READY))

    def shared(self) -> Shared:
        """What all workers have in common, for `Gateway.open`."""
        start = self.start
        share = Share(Sheet(start.memory, start.workers), start.number)
        return Shared(share, start.secret, start.created)

    def config(self, config: GatewayConfig) -> GatewayConfig:
        """This worker's settings: connections are a process's own, so it gets its part of them."""
        each = -(-config.max_connections // self.start.workers)
        return dataclasses.replace(config, max_connections=each)

    def serve(self, app: ASGIApp, gateway: Gateway, link: AttachedLink) -> int:
        """Serve until told to end; return the process's exit code.  May raise PortTaken."""
        start = self.start
        if start.listener >= 0:
            sock = socket.socket(fileno=start.listener)
        else:
            # Only now: the kernel gives connections to whoever listens, and this one can answer.
            (sock,) = http.bind_shared(start.host, start.port, 1, gateway.config.backlog)

        def on_started() -> None:
            asyncio.get_running_loop().add_reader(self.control, on_word)
            self._say(SERVING)

        def on_word() -> None:
            asyncio.get_running_loop().remove_reader(self.control)
            link.give_up(self.control.recv(_READ_BYTES).decode().strip() or LOST)
            server.give_up()

        server = http.server(app, gateway, on_started)
        with sock:
            server.run(sockets=[sock])
        return 0

    def _say(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody is left to hear it: on_word will see that
            self.control.send(word)
