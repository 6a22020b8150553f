"""Run the app under uvicorn with our settings: sockets, signals, the drain.  Knows no routes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from gateway.config import ConfigError, GatewayConfig
from gateway.drain import own_the_shutdown
from gateway.guard import GuardedProtocol
from gateway.ports import EXIT_PORT_TAKEN, PortTaken, bind, bind_shared, check_free
from gateway.state import Gateway

__all__ = [
    "EXIT_PORT_TAKEN", "PortTaken", "QuietPaths", "Server", "bind", "bind_shared", "check_free",
    "quiet", "serve", "server", "settings",
]

_QUIET = ("/health", "/ready", "/metrics", "/v1/models")
_SESSION = re.compile(r"(/sessions/).*", re.DOTALL)  # whose value is never logged
_log = logging.getLogger("slipstream.gateway.http")


def serve(
    app: ASGIApp,
    gateway: Gateway,
    host: str | None = None,
    port: int | None = None,
    *,
    sock: socket.socket | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT has drained the server; return the process's exit code.

    `sock` is one that `bind` gave; without it host and port (or the config's) are bound here.
    """
    config = gateway.config
    if sock is None:
        host = config.host if host is None else host
        try:
            sock = bind(host, config.port if port is None else port, config.backlog)
        except PortTaken as error:
            _log.error("%s", error.strerror)
            return EXIT_PORT_TAKEN
    server(app, gateway).run(sockets=[sock])
    return 0


def server(
    app: ASGIApp, gateway: Gateway, on_started: Callable[[], None] | None = None
) -> Server:
    """The uvicorn server for this app, not yet running; `on_started` is called once it serves."""
    own_the_shutdown()
    return Server(settings(app, gateway), gateway, on_started)


def settings(app: ASGIApp, gateway: Gateway) -> uvicorn.Config:
    """uvicorn's settings: h11 (httptools takes any header size), our guard, our time limits."""
    limits: GatewayConfig = gateway.config
    quiet(logging.getLogger("uvicorn.access"))
    return uvicorn.Config(
        app,
        http=functools.partial(  # type: ignore[arg-type]
            GuardedProtocol, limits=limits, metrics=gateway.metrics
        ),
        ws="none",
        loop="uvloop" if sys.platform != "win32" else "asyncio",
        lifespan="on",
        h11_max_incomplete_event_size=limits.max_header_bytes,
        timeout_keep_alive=limits.keep_alive_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=1,  # streams have ended by then: see drain.py
        access_log=limits.access_log,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        backlog=limits.backlog,
    )


class Server(uvicorn.Server):
    """uvicorn's server with our end: drain first, exit code 0, a second signal ends it at once."""

    def __init__(
        self, config: uvicorn.Config, gateway: Gateway,
        on_started: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._on_started = on_started
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task[None] | None = None

    async def _serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        with self._reload_on_hangup(self._loop):
            await super()._serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn: run the lifespan, then listen."""
        await super().startup(sockets=sockets)
        if self.started and self._on_started is not None:
            self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM and SIGINT; runs between two bytecodes of the main thread."""
        # uvicorn would keep the signal and raise it again at the end: exit code -15 instead of 0.
        if self._loop is None:
            self.should_exit = True
        else:
            delay = 0.0 if sig == signal.SIGINT else self._gateway.config.drain_delay_s
            self._loop.call_soon_threadsafe(self.begin_drain, delay)

    def begin_drain(self, delay_s: float) -> None:
        """Start to end, after `delay_s` at the earliest; the second call ends at once."""
        if self._gateway.drain.draining:
            self.force_exit = self.should_exit = True
            self._gateway.drain.expired.set()
            return
        self._gateway.drain.begin()
        self._ending = asyncio.get_running_loop().create_task(self._end(delay_s))

    def give_up(self) -> None:
        """End because the engine stays down; during a drain this is no second signal."""
        if not self._gateway.drain.draining:
            self.begin_drain(0.0)

    async def _end(self, delay_s: float) -> None:
        drain = self._gateway.drain
        _log.info("draining: %d requests still run", drain.active)
        await drain.finish(delay_s, self._gateway.config.drain_timeout_s)
        self.should_exit = True

    @contextlib.contextmanager
    def _reload_on_hangup(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """SIGHUP reads the API keys again; only possible on the main thread."""
        hangup = getattr(signal, "SIGHUP", None)
        try:
            if hangup is not None:
                loop.add_signal_handler(hangup, self._reload_keys)
        except (NotImplementedError, RuntimeError, ValueError):
            hangup = None
        try:
            yield
        finally:
            if hangup is not None:
                loop.remove_signal_handler(hangup)

    def _reload_keys(self) -> None:
        try:
            _log.info("API keys read again: %d", self._gateway.keys.reload())
        except ConfigError as error:
            _log.error("API keys stay as they were: %s", error)


class QuietPaths(logging.Filter):
    """Drops access lines of probes and scrapes, which would drown the rest; masks sessions."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to keep this line; uvicorn's third argument is the path."""
        arguments = record.args
        if not isinstance(arguments, tuple) or len(arguments) < 3:
            return True
        path = str(arguments[2])
        record.args = (*arguments[:2], _SESSION.sub(r"\1***", path), *arguments[3:])
        return path.partition("?")[0] not in _QUIET


def quiet(logger: logging.Logger) -> None:
    """Add the filter once."""
    if not any(isinstance(one, QuietPaths) for one in logger.filters):
        logger.addFilter(QuietPaths())
