"""The end of a server: signals against a real process with open streams.  Runs no model."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sse_starlette.sse import AppStatus

from gateway import app, http
from gateway.drain import Drain
from tests.live import Answer, Live, drain, gateway, read_one
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.timed

ROOT = Path(__file__).resolve().parents[2]

# A server with one streaming endpoint that behaves as chat does: it races the drain's end.
PROGRAM = """
import asyncio, sys
from sse_starlette.sse import EventSourceResponse
from starlette.routing import Route
from gateway import app, http
from gateway.errors import Draining
from tests.live import gateway

one = gateway(drain_delay_s=float(sys.argv[1]), drain_timeout_s=float(sys.argv[2]))

async def stream(request):
    async def frames():
        for number in range(int(request.query_params["n"])):
            yield b"data: %d\\n\\n" % number
            if "deaf" in request.query_params:
                await asyncio.sleep(0.05)
                continue
            try:
                await asyncio.wait_for(one.drain.expired.wait(), 0.05)
            except TimeoutError:
                continue
            yield b"data: " + Draining().body() + b"\\n\\ndata: [DONE]\\n\\n"
            return
        yield b"data: [DONE]\\n\\n"
    return EventSourceResponse(frames(), ping=60)

built = app.build(one)
built.router.routes.append(Route("/stream", stream))
sock = http.bind("127.0.0.1", 0)
sys.stdout.write(f"{sock.getsockname()[1]}\\n"); sys.stdout.flush()
sys.exit(http.serve(built, one, sock=sock))
"""


class Process(Live):
    """The program above, running."""

    process: subprocess.Popen[str]

    def open_stream(self, frames: int, more: str = "") -> socket.socket:
        """A connection on which the first frame has come."""
        sock = self.connect(10)
        sock.sendall(f"GET /stream?n={frames}{more} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        seen = b""
        while b"data: 0" not in seen:
            seen += sock.recv(1000)
        return sock

    def signal(self, number: int = signal.SIGTERM) -> float:
        """Send it and return the time."""
        self.process.send_signal(number)
        return time.monotonic()


@contextlib.contextmanager
def program(delay_s: float, timeout_s: float) -> Iterator[Process]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(delay_s), str(timeout_s)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            live = Process(int(process.stdout.readline()), None, None, None)  # type: ignore[arg-type]
            live.process = process
            until = time.monotonic() + PATIENCE_S
            while time.monotonic() < until:
                with contextlib.suppress(OSError, AssertionError):
                    if live.ask("GET", "/ready").status == 200:
                        break
                time.sleep(0.01)
            yield live
        finally:
            process.kill()


def test_a_drain_lets_a_stream_end_refuses_new_work_and_exits_with_zero() -> None:
    with program(0, 10) as live, live.open_stream(22) as stream:
        begin = live.signal()
        time.sleep(0.1)
        ready = live.ask("GET", "/ready")
        assert ready.status == 503 and b"server_draining" in ready.body
        assert live.ask("GET", "/health").status == 200
        refused = live.ask("POST", "/v1/chat/completions", b"{}")
        assert refused.status == 503 and refused.error["code"] == "server_draining"
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["connection"] == "close"
        raw = drain(stream)
        assert b"data: 21\n\n" in raw
        assert raw.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), raw[-200:]
        assert b"error" not in raw
        assert live.process.wait(PATIENCE_S) == 0
        assert 0.8 < time.monotonic() - begin < 4


def test_a_stream_that_outlives_the_drain_gets_a_typed_error_and_done() -> None:
    with program(0, 0.3) as live, live.open_stream(10_000) as stream:
        begin = live.signal()
        raw = drain(stream)
        assert b'"code":"server_draining"' in raw
        assert raw.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), raw[-200:]
        assert live.process.wait(PATIENCE_S) == 0
        assert 0.25 < time.monotonic() - begin < 2.5


def test_a_second_signal_ends_the_server_at_once() -> None:
    with program(0, 60) as live, live.open_stream(10_000, "&deaf=1") as stream:
        live.signal()
        time.sleep(0.2)
        begin = live.signal()
        drain(stream)
        assert live.process.wait(PATIENCE_S) == 0
        assert time.monotonic() - begin < 1.5


def test_an_idle_server_answers_through_the_delay_and_then_goes() -> None:
    with program(0.6, 5) as live, live.connect() as idle:
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert read_one(idle).status == 200
        begin = live.signal()
        time.sleep(0.2)
        assert live.ask("GET", "/ready").status == 503
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = Answer.of(drain(idle))
        assert answer.status == 200 and answer.headers["connection"] == "close"
        assert live.process.wait(PATIENCE_S) == 0
        assert 0.5 < time.monotonic() - begin < 2.5


def test_an_interrupt_from_the_keyboard_skips_the_delay() -> None:
    with program(30, 60) as live:
        begin = live.signal(signal.SIGINT)
        assert live.process.wait(PATIENCE_S) == 0
        assert time.monotonic() - begin < 1.5
        assert live.process.stderr is not None and "Traceback" not in live.process.stderr.read()


def test_a_reader_that_has_stopped_does_not_keep_the_server() -> None:
    with program(0, 0.3) as live, live.connect() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.sendall(b"GET /stream?n=10000 HTTP/1.1\r\nHost: a\r\n\r\n")
        time.sleep(0.2)
        begin = live.signal()
        assert live.process.wait(PATIENCE_S) == 0
        assert time.monotonic() - begin < 0.3 + 2 + 2


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_the_drain_waits_for_work_and_expires_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.drain._POLL_S", 0.001)

    async def course(work: int, delay_s: float, timeout_s: float) -> float:
        clock = Clock()
        one = Drain(clock)
        for _ in range(work):
            one.enter()
        await one.finish(delay_s, timeout_s)
        assert one.draining and one.expired.is_set()
        return clock.now

    assert asyncio.run(course(0, 0, 30)) < 6
    assert 6 < asyncio.run(course(0, 6, 30)) < 12
    assert asyncio.run(course(1, 0, 8)) >= 8
    assert asyncio.run(course(0, 50, 8)) < 15, "the timeout bounds the delay too"


def test_a_server_of_ours_turns_the_libraries_own_cutting_of_streams_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AppStatus, "enable_automatic_graceful_drain", True)
    one = gateway()
    http.server(app.build(one), one)
    assert AppStatus.enable_automatic_graceful_drain is False
    assert AppStatus.should_exit is False


def test_an_engine_that_stays_down_ends_the_server_but_never_twice() -> None:
    async def go() -> None:
        one = gateway()
        server = http.server(app.build(one), one)
        one.drain.enter()
        server.give_up()
        assert one.drain.draining and not one.drain.expired.is_set()
        server.give_up()
        assert not one.drain.expired.is_set() and not server.force_exit
        server.begin_drain(0.0)  # a second signal does end it
        assert one.drain.expired.is_set() and server.force_exit
        one.drain.leave()
        assert server._ending is not None
        await server._ending

    asyncio.run(go())


def test_leaving_more_often_than_entering_is_our_mistake() -> None:
    one = Drain()
    one.enter()
    one.leave()
    with pytest.raises(AssertionError, match="twice"):
        one.leave()
