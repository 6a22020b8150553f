"""The engine process: one engine, one gateway on a Unix socket, a step loop.  Decides no token.

    gateway -- frames --> reader thread --> engine.inbox
    engine.step() --> Outbox -- frames --> gateway

The engine binds and the gateway connects: so an engine can be started by hand (a debugger, another
shell) and a gateway attached to it.  A gateway that goes away ends the process; one that sends
garbage only loses its connection.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

import msgspec

from engine.checkpoint import Checkpoint, open_checkpoint
from engine.config import EngineConfig
from engine.messages import (
    Abort,
    BadFrame,
    Deframer,
    Failed,
    Refused,
    Step,
    Stepping,
    Submit,
    ToEngine,
    ToGateway,
    frame,
    to_engine,
)
from engine.progress import shown
from engine.timeline import Timeline

log = logging.getLogger("engine.server")

UNSENT_LIMIT = 64 * 1024 * 1024  # bytes; a gateway that leaves more unread is broken
IDLE_S = 0.25  # how long the loop sleeps when nothing happens: bounds the answer to SIGTERM
FLUSH_S = 0.005  # the same while bytes wait for the socket
WAKE = Abort("")  # an id that no request has: only wakes the loop

GONE, GARBAGE, STOPPED, STUCK = "gone", "garbage", "stopped", "stuck"


class GatewayGone(Exception):
    """The gateway closed its end."""


class GatewayStuck(Exception):
    """The gateway has not read for so long that the unsent bytes passed the limit."""


class Outbox:
    """Replies on their way to the gateway.  Never blocks: what the socket refuses waits here."""

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
                f"The gateway left {len(self._unsent):,} bytes unread; the limit is "
                f"{self._limit:,}. The engine ends, so that a working gateway can start another."
            )


class Attachment:
    """One gateway's connection, from Hello until it ends."""

    def __init__(self, engine: Stepping, connection: socket.socket, limit: int) -> None:
        self._engine = engine
        self._connection = connection
        self._outbox = Outbox(connection, limit)
        self._choices_left: dict[str, int] = {}  # of each request that this gateway still waits for
        self._ended = ""

    def serve(self, stop: threading.Event) -> str:
        """Step until the gateway leaves, sends garbage or stops reading, or `stop`: which one."""
        reader = threading.Thread(target=self._read, name="engine-reader", daemon=True)
        try:
            self._outbox.put([self._engine.hello])
            reader.start()
            while not stop.is_set() and not self._ended:
                self._engine.wait(FLUSH_S if self._outbox.waiting else IDLE_S)
                replies = self._engine.step()
                self._forget_finished(replies)
                self._outbox.put(replies)
        except GatewayStuck as error:
            log.error("%s", error)
            self._end(STUCK)
        except GatewayGone as error:
            log.info("connection to the gateway lost: %s", error)
            self._end(GONE)
        finally:
            self._end(STOPPED)
            self._close(reader)
        return self._ended

    def abandon(self) -> int:
        """Drop everything this gateway had running; return how many requests that was."""
        for id in list(self._choices_left):
            self._engine.inbox.put(Abort(id))
        self._engine.step()
        return len(self._choices_left)

    def _read(self) -> None:
        deframer = Deframer()
        try:
            while chunk := self._connection.recv(1 << 16):
                for body in deframer.feed(chunk):
                    message = to_engine(body)
                    self._note(message)
                    self._engine.inbox.put(message)
            self._end(GONE)
        except BadFrame as error:
            log.error("connection dropped: %s", error)
            self._end(GARBAGE)
        except OSError:
            self._end(GONE)
        finally:
            self._engine.inbox.put(WAKE)

    def _note(self, message: ToEngine) -> None:
        match message:
            case Submit(id=id, n=n):
                self._choices_left.setdefault(id, n)  # a second one of this id will be refused
            case Abort(id=id, index=index) if index < 0:
                self._choices_left.pop(id, None)
            case _:
                pass  # neither begins nor ends a request

    def _end(self, how: str) -> None:
        self._ended = self._ended or how  # closing a socket that is stuck also looks like a leaving

    def _forget_finished(self, replies: list[ToGateway]) -> None:
        for reply in replies:
            match reply:
                case Step(outs=outs):
                    for out in outs:
                        if out.finish:
                            self._count_down(out.id)
                case Refused(code="duplicate_request"):
                    pass  # the first request of this id still runs
                case Refused(id=id) | Failed(id=id):
                    self._choices_left.pop(id, None)
                case _:
                    pass  # says nothing about the end of a request

    def _count_down(self, id: str) -> None:
        left = self._choices_left.get(id, 0) - 1
        if left > 0:
            self._choices_left[id] = left
        else:
            self._choices_left.pop(id, None)

    def _close(self, reader: threading.Thread) -> None:
        with contextlib.suppress(OSError):  # the peer may be gone already
            self._connection.shutdown(socket.SHUT_RDWR)
        if reader.ident is not None:
            reader.join()
        self._connection.close()


def run(
    build: Callable[[], Stepping],
    path: Path,
    stop: threading.Event | None = None,
    unsent_limit: int = UNSENT_LIMIT,
) -> int:
    """Bind `path`, build the engine, serve one gateway at a time; return the process's exit code.

    0 = asked to stop, or the gateway left; 3 = the gateway stopped reading.  What the engine raises
    passes through: a broken engine has nothing left to say, and its supervisor starts another.
    """
    stop = stop or threading.Event()
    with _bind(path) as listener:  # first: a gateway may connect, and wait for Hello, while we load
        engine = build()
        try:
            return _serve(engine, listener, stop, unsent_limit)
        finally:
            engine.close()
            path.unlink(missing_ok=True)


def _serve(
    engine: Stepping, listener: socket.socket, stop: threading.Event, unsent_limit: int
) -> int:
    dropped = 0
    while (connection := _accept(listener, stop)) is not None:
        attachment = Attachment(engine, connection, unsent_limit)
        ended = attachment.serve(stop)
        if ended != GARBAGE:
            log.info("engine ends: %s, connections dropped before: %d", ended, dropped)
            return 3 if ended == STUCK else 0
        dropped += 1
        log.warning("%d connections dropped; %d requests aborted", dropped, attachment.abandon())
    return 0


def _bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path.unlink(missing_ok=True)  # left by a killed engine; the folder is the gateway's
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(1)
    listener.settimeout(IDLE_S)
    return listener


def _accept(listener: socket.socket, stop: threading.Event) -> socket.socket | None:
    while not stop.is_set():
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        connection.settimeout(None)
        return connection
    return None


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` (a process id) dies; Linux only."""
    if not sys.platform.startswith("linux"):
        return
    set_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call above
        sys.exit("The gateway that started this engine is gone.")


def launch(build: Callable[[], Stepping], path: Path, parent: int | None) -> int:
    """`run` as a process: signals, logging, an end with the parent."""
    if parent is not None:
        die_with_parent(parent)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    faulthandler.enable()  # a stuck engine gets SIGABRT: where it hangs goes to the log
    stop = threading.Event()

    def on_term(number: int, at: FrameType | None) -> None:
        stop.set()  # seen within IDLE_S, or after the step that runs now

    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, on_term)
    return run(build, path, stop)


def arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add what every engine process is told: where to listen, whom to outlive not."""
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket to bind")
    parser.add_argument("--parent", type=int, help="process id; the engine dies with it")
    return parser


def command(config: EngineConfig) -> tuple[list[str], dict[str, str]]:
    """The command line (without --socket and --parent) and the environment of an engine process."""
    # -P and a path of our own: an `engine` folder where the user happens to stand is not ours.
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return (
        [sys.executable, "-P", "-m", "engine.server",
         "--config", msgspec.json.encode(config).decode()],
        {**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


def make(
    config: EngineConfig, checkpoint: Checkpoint, timeline: Timeline | None = None
) -> Stepping:
    """The engine that serves this model; loads torch and the weights, logs who took how long."""
    timeline = timeline or Timeline()
    with timeline.span("torch"):  # late: scripted engines and the gateway's process need none
        from engine.loop import Engine
    with shown() as progress:
        engine: Stepping = Engine(config, checkpoint, progress=progress, timeline=timeline)
    log.info("engine is ready\n%s", timeline.table())
    return engine


def main() -> int:
    """`python -m engine.server --socket PATH --config JSON`: serve the configured model."""
    parser = arguments(argparse.ArgumentParser(prog="engine.server", description=__doc__))
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    given = parser.parse_args()
    timeline = Timeline.of_process()
    config = msgspec.json.decode(given.config, type=EngineConfig)

    def build() -> Stepping:
        checkpoint = timeline.run("tokenizer", open_checkpoint, config.model, config.revision)
        return make(config, checkpoint, timeline)

    return launch(build, given.socket, given.parent)


if __name__ == "__main__":
    sys.exit(main())
