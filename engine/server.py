"""The engine process: one engine on a Unix socket, with its signals and its end.  Decides no token.

The engine binds and its gateways connect (attachments.py): so an engine can be started by hand (a
debugger, another shell) and gateways attached to it.  The process ends when the last gateway goes
away; one that sends garbage only loses its connection.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec

from engine.attachments import STUCK, UNSENT_LIMIT, Attachments
from engine.checkpoint import BadCheckpoint, Checkpoint, local, open_checkpoint
from engine.config import EngineConfig
from engine.context import load_beside, open_beside
from engine.messages import Stepping
from engine.parent import die_with_parent
from engine.progress import shown
from engine.timeline import Timeline

log = logging.getLogger("engine.server")

BACKLOG = 128  # gateways that may wait for Hello while the engine loads


def run(
    build: Callable[[], Stepping],
    path: Path,
    stop: threading.Event | None = None,
    unsent_limit: int = UNSENT_LIMIT,
) -> int:
    """Bind `path`, build the engine, serve its gateways; return the process's exit code.

    0 = asked to stop, or the last gateway left; 3 = the last one stopped reading.  What the engine
    raises passes through: a broken engine has nothing left to say, and its supervisor starts
    another.
    """
    stop = stop or threading.Event()
    with _bind(path) as listener:  # first: a gateway may connect, and wait for Hello, while we load
        engine = build()
        try:
            attachments = Attachments(engine, listener, unsent_limit)
            ended = attachments.serve(stop)
            log.info("engine ends: %s, connections dropped before: %d", ended, attachments.dropped)
            return 3 if ended == STUCK else 0
        finally:
            engine.close()
            path.unlink(missing_ok=True)


def _bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path.unlink(missing_ok=True)  # left by a killed engine; the folder is the gateway's
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(BACKLOG)
    return listener


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


class Told:
    """Waits until whoever started this process says to go on, the first time it is called."""

    def __init__(self, after: int | None) -> None:
        """`after`: where a byte will come; None = go on at once."""
        self._after = after

    def __call__(self) -> None:
        """Return, or end this process quietly when nobody is there any more to say it."""
        if self._after is None:
            return
        with open(self._after, "rb", buffering=0) as word:
            self._after = None
            if not word.read(1):
                sys.exit(0)


def make(
    config: EngineConfig, checkpoint: Checkpoint, timeline: Timeline | None = None,
    told: Callable[[], None] = lambda: None,
) -> Stepping:  # fmt: skip
    """The engine that serves this model; loads torch and the weights, logs who took how long.

    `told` is called between the two.
    """
    timeline = timeline or Timeline()
    with timeline.span("torch"):  # late: scripted engines and the gateway's process need none
        from engine.loop import Engine
    told()
    with shown() as progress:
        engine: Stepping = Engine(config, checkpoint, progress=progress, timeline=timeline)
    # What is alive now lives as long as the process.  A full collection over it took 130 ms, in the
    # middle of everybody's stream; frozen, it is not looked at again.
    with timeline.span("freeze"):
        gc.collect()
        gc.freeze()
    log.info("engine is ready\n%s", timeline.table())
    return engine


def main() -> int:
    """`python -m engine.server --socket PATH --config JSON`: serve the configured model."""
    parser = arguments(argparse.ArgumentParser(prog="engine.server", description=__doc__))
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--after", type=int, help="file descriptor: a byte in it says to go on")
    given = parser.parse_args()
    timeline = Timeline.of_process()
    config = msgspec.json.decode(given.config, type=EngineConfig)
    open_beside(config.device, timeline)
    load_beside(timeline)
    # Triton keeps only what runs: else a start reads five texts a kernel that nobody looks at.
    os.environ.setdefault("TRITON_STORE_BINARY_ONLY", "1")
    told = Told(given.after)

    def build() -> Stepping:
        try:
            if not local(config.model):  # to be fetched: once, by who started us
                told()
            checkpoint = timeline.run("tokenizer", open_checkpoint, config.model, config.revision)
        except BadCheckpoint:
            told()  # who started us has seen it too, and ends us
            raise
        return make(config, checkpoint, timeline, told)

    return launch(build, given.socket, given.parent)


if __name__ == "__main__":
    sys.exit(main())
