"""A server of several gateway processes on one engine: starts them all, restarts, drains.  No HTTP.

    this process --+-- engine (its own connection hears the Stats and keeps the engine alive)
                   +-- worker 0 --.
                   +-- worker 1 --+-- each with a connection to the engine, all on one port

A worker that dies costs its own streams; the others and the engine go on, and it is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import uvloop

from engine.messages import Hello, ToGateway
from gateway.auth import load_secret
from gateway.config import GatewayConfig
from gateway.drain import FAREWELL_S
from gateway.early import Early
from gateway.metrics import EngineTotals
from gateway.sheet import EngineView, Sheet
from gateway.socket_link import SocketLink
from gateway.supervision import Lives, Supervision
from gateway.worker import READY, SERVING, Start

log = logging.getLogger("gateway.workers")

PATIENCE_S = 10.0  # beyond the drain, before a worker that does not end is killed


@dataclass(frozen=True, slots=True)
class Program:
    """A command line, and its environment; None = ours."""

    command: Sequence[str]
    environment: Mapping[str, str] | None = None


class EngineKeeper(SocketLink):
    """The link that runs the engine for all workers, and tells them what it hears."""

    def __init__(
        self, program: Program, sheet: Sheet, rules: Supervision,
        on_ready: Callable[[Hello], None], on_down: Callable[[str], None], early: Early | None,
    ) -> None:
        super().__init__(program.command, rules, environment=program.environment,
                         on_ready=on_ready, on_down=on_down, early=early)
        self._sheet = sheet
        self._totals = EngineTotals()
        self._tell()

    def received(self, messages: list[ToGateway]) -> None:
        """What a Stats says goes to the workers' pages at once."""
        super().received(messages)
        self._tell()

    def _tell(self) -> None:
        self._totals.feed(self.stats)
        heard = time.monotonic() - self.stats_age_s
        view = EngineView(heard, self.restarts, self._totals.totals, self.stats)
        self._sheet.tell_engine(view)

    def _busy(self) -> bool:
        return self._sheet.open > 0


@dataclass(slots=True)
class _Running:
    """A worker's process."""

    process: Process
    control: asyncio.StreamWriter
    serving: bool = False

    def signal(self, number: int) -> None:
        """Send it; a worker that cannot drain yet is ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number if self.serving else signal.SIGTERM)


class Workers:
    """The processes of one server."""

    def __init__(
        self,
        config: GatewayConfig,
        engine: Program,
        worker: Program,
        sockets: Sequence[socket.socket],
        *,
        settings: bytes = b"",
        rules: Supervision | None = None,
        on_ready: Callable[[Hello], None] | None = None,
        early: Early | None = None,
    ) -> None:
        """One worker for each of `sockets`, which `http.bind_shared` gave and which become theirs.

        `worker` is run with `--control FD` and finds `settings` in its Start.  `on_ready` is called
        when the engine and, the first time, all workers are ready.  `early` is the engine's first
        process, where it runs already.  Raise ConfigError.
        """
        self.failed = ""  # why the server gave up
        self.restarts = 0  # of workers
        self._config = config
        self._worker = worker
        self._settings = settings
        self._sockets = list(sockets)
        self._address = sockets[0].getsockname()[:2]
        self._secret = load_secret(config.secret_file)
        self._created = int(time.time())
        self._rules = rules or Supervision()
        self._on_ready = on_ready
        self._sheet = Sheet.make(len(sockets))
        self.link = EngineKeeper(engine, self._sheet, self._rules, self._engine_ready,
                                  self.give_up, early)
        self._running: dict[int, _Running] = {}
        self._served: set[int] = set()  # workers that have listened at least once
        self._proven: set[int] = set()  # and had an engine
        self._all_ready = asyncio.Event()
        self._ending = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self) -> int:
        """Serve until a signal has drained the server; 0 = drained, 1 = it gave up."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(self._serve())

    def give_up(self, why: str) -> None:
        """End everything, because something stays down."""
        if self._ending.is_set():
            return
        log.critical("%s", why)
        self.failed = why
        self._end()
        for worker in self._running.values():
            if worker.serving:  # it tells those who wait why, and drains
                worker.control.write(" ".join(why.splitlines()).encode() + b"\n")
            else:
                worker.signal(signal.SIGTERM)

    async def _serve(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        await self.link.start()
        try:
            await asyncio.gather(*[
                self._keep(number, sock) for number, sock in enumerate(self._sockets)
            ])
        finally:
            self._kill()
            await self.link.stop()
        return 1 if self.failed else 0

    # -- one worker

    async def _keep(self, number: int, listener: socket.socket | None) -> None:
        """Run a worker, again and again; return when the server ends."""
        lives = Lives(self._rules)
        while not self._ending.is_set():
            try:
                why = await self._one_life(number, listener)
            except OSError as error:  # no memory, no file descriptor, no such program
                why = f"its process could not be run: {error}"
            listener = None  # it died with the worker; the next one binds its own
            if self._ending.is_set():
                return
            log.error("worker %d ended: %s", number, why)
            delay = lives.ended()
            if number not in self._served:
                self.give_up(f"A gateway worker could not start ({why}); see its log above.")
            elif delay is None:
                self.give_up(f"A gateway worker ended {lives.recent} times within "
                             f"{self._rules.window_s:.0f} s (last: {why}); see its log above.")
            else:
                log.warning("starting worker %d again in %.1f s", number, delay)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), delay)
                self.restarts += 1

    async def _one_life(self, number: int, listener: socket.socket | None) -> str:
        """Start a worker's process and wait until it ends; return how."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as kept:
            given = [theirs.fileno(), self._sheet.fd]
            if listener is not None:
                given.append(kept.enter_context(listener).fileno())
            # Its own process group: Ctrl-C in the terminal reaches only us, and we pass it on.
            process = await asyncio.create_subprocess_exec(
                *self._worker.command, "--control", str(theirs.fileno()),
                pass_fds=given, start_new_session=True, env=self._worker.environment,
            )
            start = self._start(number, -1 if listener is None else listener.fileno())
        reader, writer = await asyncio.open_connection(sock=ours)
        worker = self._running[number] = _Running(process, writer)
        writer.write(msgspec.json.encode(start) + b"\n")
        if self._ending.is_set():
            worker.signal(signal.SIGTERM)
        hearing = asyncio.ensure_future(self._hear(number, worker, reader))
        try:
            code = await process.wait()
        finally:
            hearing.cancel()
            writer.close()
            self._sheet.bury(number)
            del self._running[number]
        return f"exit code {code}"

    def _start(self, number: int, listener: int) -> Start:
        host, port = self._address
        return Start(
            number, len(self._sockets), self._secret, self._created, str(self.link.path),
            host, port, listener, self._sheet.fd, self._settings,
        )

    async def _hear(self, number: int, worker: _Running, reader: asyncio.StreamReader) -> None:
        """Note what it says of itself, until it ends."""
        with contextlib.suppress(ConnectionError):
            while word := await reader.readline():
                if word == SERVING:
                    worker.serving = True
                    self._served.add(number)
                elif word == READY:
                    self._proven.add(number)
                    if len(self._proven) == len(self._sockets):
                        self._all_ready.set()

    # -- the engine, signals, the end

    def _engine_ready(self, hello: Hello) -> None:
        if self._on_ready is not None:
            self._tasks.add(task := asyncio.ensure_future(self._tell_ready(hello)))
            task.add_done_callback(self._tasks.discard)

    async def _tell_ready(self, hello: Hello) -> None:
        await self._all_ready.wait()
        if self._on_ready is not None:
            self._on_ready(hello)

    def _signalled(self, number: int) -> None:
        """The first one drains every worker, the second one ends them at once."""
        log.info("%s: draining %d workers", signal.Signals(number).name, len(self._running))
        self._end()
        for worker in self._running.values():
            worker.signal(number)

    def _reload(self) -> None:
        """SIGHUP: every worker reads the API keys again."""
        for worker in self._running.values():
            if worker.serving:
                worker.signal(signal.SIGHUP)

    def _end(self) -> None:
        if not self._ending.is_set():
            self._ending.set()
            config = self._config
            drain = max(config.drain_delay_s, config.drain_timeout_s) + FAREWELL_S
            asyncio.get_running_loop().call_later(drain + PATIENCE_S, self._kill)

    def _kill(self) -> None:
        for worker in self._running.values():
            log.error("process %d did not end; it is killed", worker.process.pid)
            with contextlib.suppress(ProcessLookupError):
                worker.process.kill()
