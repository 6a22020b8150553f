"""The engine process from outside: frames, garbage, signals, a gateway that leaves.  No model."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from engine.messages import (
    Abort,
    Admitted,
    Deframer,
    Hello,
    Refused,
    Stats,
    Step,
    Submit,
    ToGateway,
    frame,
    to_gateway,
)
from engine.scripted import ScriptedEngine, letter
from engine.server import Told, run
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.timed


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket path short enough for the kernel, in a folder of mode 0700."""
    with tempfile.TemporaryDirectory(prefix="slip-") as folder:
        yield Path(folder) / "engine.sock"
    while Peer.opened:
        Peer.opened.pop().close()


class Peer:
    """A gateway of few words."""

    opened: ClassVar[list[socket.socket]] = []

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.opened.append(self.socket)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.socket.connect(str(path))
                break
            except (FileNotFoundError, ConnectionRefusedError):
                assert time.monotonic() < deadline, "the engine never bound its socket"
                time.sleep(0.01)
        self.socket.settimeout(PATIENCE_S)
        self.deframer = Deframer()
        self.messages: list[ToGateway] = []

    def next(self) -> ToGateway:
        while not self.messages:
            chunk = self.socket.recv(1 << 16)
            if not chunk:
                raise EOFError
            self.messages += [to_gateway(body) for body in self.deframer.feed(chunk)]
        return self.messages.pop(0)

    def wait_for(self, kind: type[ToGateway]) -> ToGateway:
        while not isinstance(message := self.next(), kind):
            pass
        return message

    def answer(self, submit: Submit) -> list[int]:
        self.socket.sendall(frame(submit))
        tokens: list[int] = []
        while True:
            step = self.wait_for(Step)
            for out in step.outs:
                if out.id == submit.id:
                    tokens += out.tokens
                    if out.finish:
                        return tokens


class Running:
    """`run` on a thread, with the engine it built."""

    def __init__(self, path: Path, engine: ScriptedEngine, **kw) -> None:
        self.engine = engine
        self.stop = threading.Event()
        self.code: int | None = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(path, kw), daemon=True)
        self.thread.start()

    def _run(self, path: Path, kw: dict) -> None:
        try:
            self.code = run(lambda: self.engine, path, self.stop, **kw)
        except RuntimeError as error:
            self.error = error

    def join(self) -> int | None:
        self.thread.join(10)
        assert not self.thread.is_alive()
        return self.code


@pytest.fixture
def serve(path: Path) -> Iterator[object]:
    started: list[Running] = []

    def start(engine: ScriptedEngine | None = None, **kw) -> tuple[Running, Peer]:
        started.append(Running(path, engine or ScriptedEngine(), **kw))
        return started[-1], Peer(path)

    yield start
    for running in started:
        running.stop.set()
        running.join()


def process(path: Path, *options: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "engine.scripted", "--socket", str(path), *options],
        stderr=subprocess.DEVNULL,
    )


def test_hello_comes_first_and_a_request_gets_its_tokens(serve):
    running, peer = serve()
    assert isinstance(peer.next(), Hello)
    assert peer.answer(Submit("a", [1, 2], 30)) == [letter(p) for p in range(30)]
    peer.socket.sendall(frame(Submit("b", [], 3)))
    assert peer.wait_for(Refused).code == "empty_prompt"
    peer.socket.close()
    assert running.join() == 0


def test_a_frame_may_arrive_byte_by_byte(serve):
    _, peer = serve()
    for byte in frame(Submit("a", [1], 3)):
        peer.socket.sendall(bytes([byte]))
    assert peer.wait_for(Admitted).id == "a"


def test_a_gateway_that_leaves_ends_the_engine_and_its_socket(serve, path):
    running, peer = serve(ScriptedEngine(step_s=0.01))
    peer.socket.sendall(frame(Submit("a", [1], 1_000_000)))
    peer.wait_for(Step)
    left = time.monotonic()
    peer.socket.close()
    assert running.join() == 0
    assert time.monotonic() - left < 1
    assert not running.engine._running
    assert not path.exists()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\xc1",
        b"\x03\x00\x00\x00\x92\x01\x05",
        b"\x00\x00\x00\x00",
        frame(Hello(1, "m", 1, 1, 64, 1, [])),
    ],
)
def test_garbage_costs_the_connection_and_its_requests_but_not_the_engine(serve, path, garbage):
    running, bad = serve(ScriptedEngine(step_s=0.005))
    bad.socket.sendall(frame(Submit("a", [1], 1_000_000, n=2)))
    bad.wait_for(Step)
    bad.socket.sendall(garbage)
    with pytest.raises((EOFError, ConnectionResetError)):
        while True:
            bad.next()
    good = Peer(path)
    assert isinstance(good.next(), Hello)
    deadline = time.monotonic() + PATIENCE_S
    while running.engine._running:
        assert time.monotonic() < deadline, "its requests run on"
        time.sleep(0.005)
    assert good.answer(Submit("b", [1], 5)) == [letter(p) for p in range(5)]


def test_random_bytes_never_end_the_engine(serve, path):
    running, peer = serve()
    dice = random.Random(5)
    body = frame(Submit("a", [1, 2, 3], 4, stop_ids=[7]))
    for _ in range(60):
        spoiled = bytearray(body)
        for _ in range(dice.randint(1, 4)):
            spoiled[dice.randrange(4, len(spoiled))] = dice.randrange(256)  # the length stays
        try:
            peer.socket.sendall(bytes(spoiled) + b"\xc1" * 8 + b"\xff" * 8)
            while True:
                peer.next()
        except (EOFError, ConnectionResetError, BrokenPipeError):
            peer.socket.close()
        assert running.thread.is_alive()
        peer = Peer(path)
    assert peer.answer(Submit("z", [1], 2)) == [letter(0), letter(1)]


def test_a_gateway_that_never_reads_ends_the_engine_and_does_not_stop_its_steps(serve):
    running, peer = serve(ScriptedEngine(), unsent_limit=1 << 16)
    for i in range(50):
        peer.socket.sendall(frame(Submit(f"r{i}", [1], 1_000_000)))
    assert running.join() == 3
    assert running.engine._step > 10


def test_what_the_socket_refused_is_sent_when_the_gateway_reads_again(serve):
    _, peer = serve(ScriptedEngine(), unsent_limit=1 << 26)
    peer.socket.sendall(frame(Submit("a", [1], 15_000)))
    time.sleep(0.3)  # far more than the socket's own buffer is waiting by now
    tokens: list[int] = []
    while len(tokens) < 15_000:
        tokens += [t for out in peer.wait_for(Step).outs for t in out.tokens]
    assert tokens == [letter(p) for p in range(15_000)]


def test_an_idle_engine_beats_once_a_second(serve):
    _, peer = serve()
    peer.wait_for(Stats)
    at = time.monotonic()
    peer.wait_for(Stats)
    assert 0.5 < time.monotonic() - at < 3.0


def test_a_broken_engine_says_nothing_and_the_error_leaves_run(path):
    class Breaks(ScriptedEngine):
        def step(self) -> list[ToGateway]:
            replies = super().step()
            if self._step:
                raise RuntimeError("broken")
            return replies

    running = Running(path, Breaks())
    peer = Peer(path)
    peer.socket.sendall(frame(Submit("a", [1], 3)))
    with pytest.raises(EOFError):
        peer.wait_for(Step)
    running.join()
    assert str(running.error) == "broken"


@pytest.mark.parametrize("when", ["loading", "alone", "serving"])
def test_sigterm_ends_the_process_with_code_0(path, when):
    child = process(path, "--boot-ms", "300" if when == "loading" else "0", "--step-ms", "5")
    try:
        if when == "loading":
            time.sleep(0.25)
            while not path.exists():
                time.sleep(0.01)
        if when == "serving":
            peer = Peer(path)
            peer.socket.sendall(frame(Submit("a", [1], 1_000_000)))
            peer.wait_for(Step)
        if when == "alone":
            while not path.exists():
                time.sleep(0.01)
            time.sleep(0.1)
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE_S) == 0
        assert not path.exists()
    finally:
        child.kill()
        child.wait()


PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-m", "engine.scripted", "--socket", sys.argv[1],
                          "--parent", str(os.getpid())])
print(child.pid, flush=True)
time.sleep(30)
"""


def test_an_engine_dies_with_the_process_that_started_it(path):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    while not path.exists():
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            with open(f"/proc/{child}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                    break
        except FileNotFoundError:
            break
        assert time.monotonic() < deadline, "the engine is an orphan"
        time.sleep(0.01)


def test_an_engine_whose_parent_is_another_process_refuses_to_live(path):
    child = process(path, "--parent", str(os.getpid() + 100_000_000))
    assert child.wait(PATIENCE_S) == 1


def test_a_socket_left_by_a_killed_engine_is_replaced(path):
    child = process(path)
    while not path.exists():
        time.sleep(0.01)
    child.kill()
    child.wait()
    assert path.exists()
    again = process(path)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                peer = Peer(path)
                assert isinstance(peer.next(), Hello)
                break
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
        peer.socket.sendall(frame(Abort("nobody")))
    finally:
        again.kill()
        again.wait()


def test_an_engine_goes_on_when_it_is_told_to_and_ends_when_nobody_can():
    Told(None)()
    read, write = os.pipe()
    os.write(write, b"\n")
    told = Told(read)
    told()
    os.close(write)
    told()  # said once, it holds
    read, write = os.pipe()
    os.close(write)
    with pytest.raises(SystemExit) as ended:
        Told(read)()
    assert ended.value.code == 0
