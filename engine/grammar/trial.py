"""Have a costly schema tried in a process that can be killed.  Compiles nothing itself.

    brief    one job at a time, BRIEF_S of CPU: what is only large is soon through
    long     those that were not, one at a time, up to the limit: they hold up each other only

The process (forks.py) forks once a job, so a job that is killed costs nobody anything.  It starts
with the first job and ends with this process.  Limits are CPU time and memory: a busy machine gives
the same verdict; wall time ends only a job that hangs.  Verdicts are remembered, so a hostile
schema costs once.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

log = logging.getLogger("engine.grammar.trial")

CPU_S = 4.0  # the dearest that is counted as allowed takes 0.5 s on one core of a server
MEMORY_BYTES = 512 << 20  # beside the vocabulary; what is counted as allowed takes 80 MB
BRIEF_S = 0.25
WALL_FACTOR, WALL_S = 20, 30.0  # a child that hangs: this times its CPU time, and this
START_S = 60.0  # until the process is ready; it takes 0.4 s with a vocabulary of 49,152
WAITING, WAITING_LONG = 16, 4  # jobs at once; more are refused, or all could wait for hostile ones
VERDICTS = 1_024  # remembered

# What multiplies when it meets, and how much of it one schema may have to be plain: tools of agents
# have none or one (p99 of BFCL and Glaive: 2), ten at once are allowed and take 5 ms.
_MEETING = ("pattern", "patternProperties", "multipleOf", "format", "allOf", "oneOf", "anyOf",
            "$ref")  # fmt: skip
_MEETINGS, _MEETINGS_ALL = 12, 200  # of a schema; of all of a request
_LENGTH, _LENGTH_ALL = 40_000, 400_000  # characters, likewise
_LARGE = re.compile(r"[0-9]{7}|\{[0-9]*,?[0-9]{3}")  # numbers, and counts in patterns


class Busy(Exception):
    """Too many jobs wait."""

    def __init__(self) -> None:
        super().__init__("Many costly schemas are being tried. Send the request again.")


class NoRoom(Exception):
    """The machine would not let the job run to its end or its limits: nothing is known of it."""

    def __init__(self) -> None:
        super().__init__(
            "The server had no memory, disk or process left to try this costly schema. Send the "
            "request again; if that goes on, give the server more memory."
        )


class Unavailable(Exception):
    """The process cannot be started here, or is closed."""


class Setup(msgspec.Struct, frozen=True, array_like=True):
    """Of the process.  Without a tokenizer it checks schemas; with one it compiles grammars."""

    tokenizer_json: str = ""
    vocab: int = 0
    stop_ids: list[int] = []


class CompileJob(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Compile a grammar as the engine would, to its first mask and its first plan."""

    lark: str
    trigger: str
    opening: str


class CheckJob(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Check a schema as schema.check would."""

    schema: str  # JSON
    strict: bool
    root: Literal["object", "any"]
    left: int  # of the judge's budget


class Order(msgspec.Struct, frozen=True, array_like=True):
    """A job and what it may take."""

    job: CompileJob | CheckJob
    cpu_s: float
    memory_bytes: int  # 0 = as much as there is


class Passed(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """It is fine; of a check what came out."""

    schema: str = ""  # JSON
    dropped: list[tuple[str, str, str]] = []
    rewritten: list[tuple[str, str]] = []
    left: int = 0


class Bad(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """It was refused in words that are fit for the client."""

    code: str
    message: str
    pointer: str = ""
    keyword: str = ""
    left: int = 0


class Died(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The job was ended before it was through."""

    how: str  # "time", "memory", "crash": of the job; "room": ended by the machine, or never begun
    detail: str = ""  # for the log


Answer = Passed | Bad | Died
_ANSWERS = msgspec.msgpack.Decoder(Passed | Bad | Died)


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one job."""

    cpu_s: float = CPU_S
    memory_bytes: int = MEMORY_BYTES


def plain(text: str) -> bool:
    """Whether a grammar or schema, as JSON on one line each, is too small to need a trial."""
    if len(text) > _LENGTH_ALL:
        return False
    every = 0
    for line in text.splitlines():
        found = sum(line.count(f'"{keyword}":') for keyword in _MEETING)
        every += found
        if found > _MEETINGS or len(line) > _LENGTH or every > _MEETINGS_ALL:
            return False
        if _LARGE.search(line):
            return False
    return True


class Trial:
    """Asks one such process; any thread may."""

    def __init__(self, setup: Setup, limits: Limits = Limits()) -> None:
        self.limits = limits
        self._setup = setup
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False
        self._counts = threading.Lock()
        self._waiting = self._waiting_long = 0
        self._brief, self._long = threading.Lock(), threading.Lock()
        self._verdicts: OrderedDict[bytes, Bad | Passed] = OrderedDict()

    def ask(self, job: CompileJob | CheckJob) -> Passed | Bad:
        """The job's outcome, a crossed limit or a crash among the Bad ones.

        Blocks; raise Busy, NoRoom or Unavailable.  A schema that passed a check is not remembered.
        """
        key = hashlib.sha256(msgspec.msgpack.encode(job)).digest()
        if found := self._known(key):
            return found
        with self._place():
            with self._brief:
                answer = self._known(key) or self._tried(job, min(BRIEF_S, self.limits.cpu_s))
            if _crossed(answer) and self.limits.cpu_s > BRIEF_S:
                with self._long_place(), self._long:
                    answer = self._known(key) or self._tried(job, self.limits.cpu_s)
        if isinstance(answer, Died):
            if answer.how == "room":  # which says nothing about the job
                log.warning("the machine had no room to try a schema: %.300s", answer.detail)
                raise NoRoom
            log.warning("a schema was refused for its %s: %.300s", answer.how, answer.detail)
            answer = self._said(answer)
        elif isinstance(job, CheckJob):
            return answer
        with self._counts:
            self._verdicts[key] = answer
            while len(self._verdicts) > VERDICTS:
                self._verdicts.popitem(last=False)
        return answer

    def close(self) -> None:
        """End the process and what it runs; whoever waits gets Unavailable."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()  # first: another thread may hold the lock until it is ready
        with self._lock:
            self._end()

    @property
    def pid(self) -> int | None:
        """Of the process; None before the first job."""
        return self._process.pid if self._process else None

    def _known(self, key: bytes) -> Passed | Bad | None:
        with self._counts:
            return self._verdicts.get(key)

    @contextmanager
    def _place(self) -> Iterator[None]:
        with self._counts:
            if self._waiting >= WAITING:
                raise Busy
            self._waiting += 1
        try:
            yield
        finally:
            with self._counts:
                self._waiting -= 1

    @contextmanager
    def _long_place(self) -> Iterator[None]:
        with self._counts:
            if self._waiting_long >= WAITING_LONG:
                raise Busy
            self._waiting_long += 1
        try:
            yield
        finally:
            with self._counts:
                self._waiting_long -= 1

    def _tried(self, job: CompileJob | CheckJob, cpu_s: float) -> Answer:
        order = msgspec.msgpack.encode(Order(job, cpu_s, self.limits.memory_bytes))
        wall_s = cpu_s * WALL_FACTOR + WALL_S
        for _ in range(2):  # the process itself may have been killed meanwhile
            if (raw := self._exchange(order, wall_s)) is not None:
                answer: Answer = _ANSWERS.decode(raw)
                return answer
        return Died("room", "the process that forks ended twice")

    def _exchange(self, order: bytes, wall_s: float) -> bytes | None:
        """What the job answers; None when the process has ended before."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:  # no descriptor is left
            raise Unavailable from error
        with ours:
            with theirs:
                with self._lock:
                    control = self._started()
                    try:
                        socket.send_fds(control, [struct.pack("!d", wall_s)], [theirs.fileno()])
                    except OSError:
                        self._end()
                        return None
            ours.settimeout(2 * wall_s)  # the process keeps wall_s itself, unless it is stopped
            try:
                send(ours, order)
                return receive(ours)
            except TimeoutError:
                with self._lock:
                    self._end()
                return None
            except OSError:  # it has ended
                return None

    def _started(self) -> socket.socket:
        """The process's control socket; start the process when there is none."""
        if self._closed:
            raise Unavailable
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._control is not None:
            return self._control
        try:
            self._control, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603 our own program
                    [sys.executable, "-P", "-m", "engine.grammar.forks", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()], env=_environment(), start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                )
            atexit.register(self.close)
            self._control.settimeout(START_S)
            send(self._control, msgspec.msgpack.encode(self._setup))
            receive(self._control)  # it is ready
        except OSError as error:
            self._end()
            log.warning("no process to try schemas in: %s", error)
            raise Unavailable from error
        return self._control

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()  # its jobs die with it, on Linux; else at their own limits
            self._process.wait()
            self._process = None
            atexit.unregister(self.close)

    def _said(self, died: Died) -> Bad:
        match died.how:
            case "time":
                most, option = f"{self.limits.cpu_s:g} s of CPU time", "cpu-s"
            case "memory":
                most, option = f"{self.limits.memory_bytes >> 20} MiB", "memory-bytes"
            case _:
                return Bad("grammar_failed", "The grammar compiler breaks on this. Simplify it: "
                           "smaller patterns and ranges, fewer alternatives.")  # fmt: skip
        advice = f", or raise --engine.compile-{option}" if self._setup.vocab else ""
        return Bad("grammar_too_complex", f"Compiling takes more than {most}, which is the limit. "
                   f"Use fewer or smaller patterns, ranges and alternatives{advice}.")  # fmt: skip


def _crossed(answer: Answer) -> bool:
    return isinstance(answer, Died) and answer.how == "time"


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parent.parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",
        "OPENBLAS_NUM_THREADS": "1",  # what forks has one thread
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",  # or each thread's reserve would count as memory
    }


def send(to: socket.socket, raw: bytes) -> None:
    """One frame: its length as u32, and it."""
    to.sendall(struct.pack("!I", len(raw)) + raw)


def receive(where: socket.socket) -> bytes:
    """One frame; raise OSError when the other side ends before it is whole."""
    (length,) = struct.unpack("!I", _exactly(where, 4))
    return _exactly(where, length)


def _exactly(where: socket.socket, count: int) -> bytes:
    raw = bytearray()
    while len(raw) < count:
        piece = where.recv(min(count - len(raw), 1 << 20))
        if not piece:
            raise ConnectionResetError
        raw += piece
    return bytes(raw)
