"""Hostile bytes against a real server: every row of the threat table.  Sends no chat."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest
from sse_starlette.sse import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway import app
from tests.live import Answer, Live, drain, gateway, read_one, running, with_echo
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.timed

HOST = b"Host: localhost\r\n"
RAN: list[bytes] = []  # bodies that reached the endpoint, of the test that runs now


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    one = gateway(
        max_body_bytes=64 * 1024, header_timeout_s=0.25, body_timeout_s=0.6, body_grace_s=0.2,
        keep_alive_s=0.5, linger_s=0.5,
    )
    with running(one, with_echo(one, RAN)) as server:
        yield server


@pytest.fixture(autouse=True)
def _no_runs() -> None:
    RAN.clear()


def post(body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST /echo HTTP/1.1", b"Host: localhost", *headers, b"", b""]
    return b"\r\n".join(lines) + body


MALFORMED = {
    "two framings": (b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Length: 4\r\n"
                     b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    "two framings, encoding first": (b"POST /echo HTTP/1.1\r\n" + HOST +
                                     b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n"
                                     b"0\r\n\r\n"),
    "two lengths": post(b"{}", b"Content-Length: 2", b"Content-Length: 3"),
    "a list of lengths": post(b"{}", b"Content-Length: 2, 3"),
    "negative length": post(b"{}", b"Content-Length: -2"),
    "signed length": post(b"{}", b"Content-Length: +2"),
    "hexadecimal length": post(b"{}", b"Content-Length: 0x2"),
    "spaced length": post(b"{}", b"Content-Length: 2 2"),
    "space before the colon": post(b"{}", b"Content-Length : 2"),
    "an encoding in 1.0": (b"POST /echo HTTP/1.0\r\n" + HOST +
                           b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    "folded header": post(b"", b"X-A: 1\r\n 2"),
    "header folded by a tab": post(b"", b"X-A: 1\r\n\t2"),
    "fold before the length": post(b"{}", b"X-A: 1\r\n Content-Length: 2"),
    "two hosts": b"GET /health HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
    "two different hosts": b"GET /health HTTP/1.1\r\n" + HOST + b"Host: b\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "no host in 1.0": b"GET /health HTTP/1.0\r\n\r\n",
    "empty host": b"GET /health HTTP/1.1\r\nHost:\r\n\r\n",
    "host with a path": b"GET /v1/models HTTP/1.1\r\nHost: a/health?x=\r\n\r\n",
    "host with a user": b"GET /v1/models HTTP/1.1\r\nHost: me@a\r\n\r\n",
    "host with a fragment": b"GET /v1/models HTTP/1.1\r\nHost: a#b\r\n\r\n",
    "host with a backslash": b"GET /v1/models HTTP/1.1\r\nHost: a\\b\r\n\r\n",
    "lines without CR": b"GET /health HTTP/1.1\nHost: a\n\n",
    "one line without CR": b"GET /health HTTP/1.1\r\nHost: a\nX-A: 1\r\n\r\n",
    "NUL in a header": post(b"", b"X-A: a\0b"),
    "CR in a header": post(b"", b"X-A: a\rb"),
    "space in a header name": post(b"", b"X A: 1"),
    "header without a name": post(b"", b": 1"),
    "line without a colon": post(b"", b"nothing"),
    "no version": b"GET /health\r\n" + HOST + b"\r\n",
    "odd version": b"GET /health HTTP/3.0\r\n" + HOST + b"\r\n",
    "long version": b"GET /health HTTP/1.11\r\n" + HOST + b"\r\n",
    "two spaces": b"GET  /health HTTP/1.1\r\n" + HOST + b"\r\n",
    "space in the target": b"GET /hea lth HTTP/1.1\r\n" + HOST + b"\r\n",
    "raw bytes in the target": b"GET /\xff HTTP/1.1\r\n" + HOST + b"\r\n",
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 40 + b"\r\n\r\n",
    "an HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a bad chunk size": post(b"zz\r\n{}\r\n0\r\n\r\n", b"Transfer-Encoding: chunked"),
    "a negative chunk size": post(b"-2\r\n{}\r\n0\r\n\r\n", b"Transfer-Encoding: chunked"),
    "a chunk that is too long": post(b"2\r\n{}x\r\n0\r\n\r\n", b"Transfer-Encoding: chunked"),
}


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_request_is_a_400_and_what_follows_never_runs(live: Live, sent: bytes) -> None:
    second = post(b'"smuggled"', b"Content-Length: 10", b"Connection: close")
    raw = live.exchange(sent + second)
    assert raw.count(b"HTTP/1.1 ") == 1, raw
    answer = Answer.of(raw)
    assert answer.status == 400
    assert answer.error["code"] == "bad_http"
    assert answer.headers["connection"] == "close"
    assert answer.headers["x-request-id"].startswith("req_")
    assert RAN == []


@pytest.mark.parametrize(
    "lines",
    [
        [b"Transfer-Encoding: gzip, chunked"],
        [b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity"],
        [b"Transfer-Encoding: xchunked"],
    ],
)
def test_other_transfer_encodings_are_not_implemented(live: Live, lines: list[bytes]) -> None:
    answer = Answer.of(live.exchange(post(b"0\r\n\r\n", *lines)))
    assert answer.status == 501
    assert answer.error["code"] == "bad_http"


@pytest.mark.parametrize("host", ["a", "a.b:80", "127.0.0.1:8000", "[::1]:8000", "xn--bcher-kva.x"])
def test_ordinary_hosts_pass(live: Live, host: str) -> None:
    head = f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    assert Answer.of(live.exchange(head.encode())).status == 200


def test_a_refused_head_request_gets_a_head_only(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    raw = live.exchange(b"HEAD /health HTTP/1.1\r\nHost: a/b\r\n\r\n")
    assert raw.startswith(b"HTTP/1.1 400 Bad Request\r\n") and raw.endswith(b"\r\n\r\n")
    assert "Fatal" not in caplog.text


def test_two_good_requests_in_one_packet_are_both_answered(live: Live) -> None:
    one = post(b"{}", b"Content-Length: 2")
    two = post(b"[]", b"Content-Length: 2", b"Connection: close")
    assert live.exchange(one + two).count(b"HTTP/1.1 200") == 2
    assert RAN == [b"{}", b"[]"]


def test_a_head_over_64_kib_is_a_431_also_when_it_comes_in_one_piece(live: Live) -> None:
    for size in (66_000, 200_000):
        raw = live.exchange(post(b"", b"X-A: " + b"a" * size))
        answer = Answer.of(raw)
        assert answer.status == 431
        assert answer.error["code"] == "headers_too_large"
        assert answer.headers["connection"] == "close"


def test_a_head_just_within_the_limits_passes(live: Live) -> None:
    many = [b"X-%d: 1" % i for i in range(96)]
    big = b"X-A: " + b"a" * 60_000
    raw = live.exchange(post(b"{}", b"Content-Length: 2", b"Connection: close", big, *many))
    assert Answer.of(raw).status == 200


def test_a_header_of_64_megabytes_costs_no_memory(live: Live) -> None:
    before = psutil.Process(os.getpid()).memory_info().rss
    piece = b"a" * 65536
    with live.connect() as sock, contextlib.suppress(ConnectionError):
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nX-A: ")
        for _ in range(1024):
            sock.sendall(piece)
    assert psutil.Process(os.getpid()).memory_info().rss - before < 4 * 1024 * 1024
    assert live.ask("GET", "/health").status == 200


@pytest.mark.parametrize("count", [101, 5000])
def test_too_many_headers_are_a_431(live: Live, count: int) -> None:
    lines = b"".join(b"X-%d: 1\r\n" % i for i in range(count))
    answer = Answer.of(live.exchange(b"GET /health HTTP/1.1\r\n" + HOST + lines + b"\r\n"))
    assert answer.status == 431


def test_a_slow_head_is_closed_with_a_408(live: Live) -> None:
    begin = time.monotonic()
    with live.connect() as sock:
        raw = b""
        for byte in b"GET /health HTTP/1.1\r\nHost: localhost\r\n":
            try:
                sock.sendall(bytes([byte]))
            except ConnectionError:
                break
            sock.settimeout(0.05)
            with contextlib.suppress(TimeoutError, ConnectionError):
                if part := sock.recv(65536):
                    raw += part
                    break
    assert Answer.of(raw).status == 408
    assert 0.2 < time.monotonic() - begin < 2


def test_a_slow_body_is_closed_with_a_408_and_never_runs(live: Live) -> None:
    with live.connect() as sock:
        sock.sendall(post(b"[", b"Content-Length: 5000"))
        answer = Answer.of(drain(sock))
    assert answer.status == 408
    assert answer.error["code"] == "request_timeout"
    assert RAN == []


def test_a_body_at_a_fair_pace_is_cut_only_at_the_time_limit(live: Live) -> None:
    with live.connect() as sock:
        sock.sendall(post(b"[", b"Content-Length: 60000"))
        begin = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - begin < 3:
                sock.sendall(b" " * 100)
                time.sleep(0.02)
                sock.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    if sock.recv(10):
                        break
                sock.setblocking(True)
    assert 0.5 < time.monotonic() - begin < 2
    assert RAN == []


def test_a_slow_body_that_nobody_reads_is_closed_too(live: Live) -> None:
    with live.connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\n" + HOST + b"Content-Length: 5000\r\n\r\n[")
        begin = time.monotonic()
        assert read_one(sock).status == 200
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - begin < 3:  # each byte keeps the connection from idling
                sock.sendall(b" ")
                time.sleep(0.1)
    assert time.monotonic() - begin < 2


def test_an_idle_connection_is_kept_for_the_keep_alive_time_and_no_longer(live: Live) -> None:
    with live.connect() as sock:
        begin = time.monotonic()
        assert drain(sock) == b""
    assert 0.4 < time.monotonic() - begin < 3


def test_an_answered_connection_is_kept_for_the_keep_alive_time(live: Live) -> None:
    with live.connect() as sock:
        for _ in range(2):
            sock.sendall(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
            assert read_one(sock).status == 200
            time.sleep(0.3)  # longer than the head may take, shorter than idling may


def test_a_body_over_the_limit_is_a_413_although_the_sender_goes_on(live: Live) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with live.connect() as sock:
        sock.sendall(post(b"", b"Transfer-Encoding: chunked"))
        for _ in range(40):
            sock.sendall(chunk)  # a reset here would make clients lose the answer
        answer = Answer.of(drain(sock))
    assert answer.status == 413
    assert answer.error["code"] == "payload_too_large"
    assert answer.headers["connection"] == "close"
    assert RAN == []


def test_a_declared_length_over_the_limit_is_a_413_before_any_byte(live: Live) -> None:
    raw = live.exchange(post(b"", b"Content-Length: 1000000", b"Expect: 100-continue"))
    assert b"100 Continue" not in raw
    assert Answer.of(raw).status == 413
    assert Answer.of(live.exchange(post(b"", b"Content-Length: " + b"9" * 19))).status == 413
    assert Answer.of(live.exchange(post(b"", b"Content-Length: " + b"9" * 30))).status == 400


def test_a_client_that_waits_for_100_continue_gets_it(live: Live) -> None:
    with live.connect() as sock:
        sock.sendall(
            post(b"", b"Content-Length: 2", b"Expect: 100-continue", b"Connection: close")
        )
        assert sock.recv(1000).startswith(b"HTTP/1.1 100")
        sock.sendall(b"{}")
        assert Answer.of(drain(sock)).status == 200


def test_an_upgrade_request_is_an_ordinary_request(live: Live) -> None:
    answer = live.ask("GET", "/health", b"", "Upgrade: websocket", "Connection: Upgrade")
    assert answer.status == 200


def test_a_caller_that_leaves_during_the_upload_is_counted_and_costs_nothing(live: Live) -> None:
    counts = live.gateway.metrics._left
    before = counts["upload"]
    with live.connect() as sock:
        sock.sendall(post(b"[1,", b"Content-Length: 100"))
        time.sleep(0.05)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # RST
    until = time.monotonic() + PATIENCE_S
    while counts["upload"] == before and time.monotonic() < until:
        time.sleep(0.01)
    assert counts["upload"] == before + 1
    assert live.gateway.drain.active == 0


def test_connections_over_the_limit_get_a_503() -> None:
    one = gateway(max_connections=2)
    with running(one) as server, server.connect() as first, server.connect() as second:
        for sock in (first, second):
            sock.sendall(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
            assert read_one(sock).status == 200
        with server.connect() as third:
            answer = Answer.of(drain(third))
    assert answer.status == 503
    assert "retry-after" in answer.headers


def test_a_reader_that_has_stopped_is_dropped_with_all_that_waits_for_it() -> None:
    async def flood(request: Request) -> Response:
        async def frames() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * 65536

        return EventSourceResponse(frames(), send_timeout=0.1)

    one = gateway(linger_s=0.1)
    asgi = app.build(one)
    asgi.router.routes.append(Route("/flood", flood))
    with running(one, asgi) as server, server.connect() as sock:
        sock.sendall(b"GET /flood HTTP/1.1\r\n" + HOST + b"\r\n")
        until = time.monotonic() + PATIENCE_S
        while not server.server.server_state.connections and time.monotonic() < until:
            time.sleep(0.01)
        assert server.server.server_state.connections
        while server.server.server_state.connections and time.monotonic() < until:
            time.sleep(0.02)
        assert not server.server.server_state.connections
        assert one.drain.active == 0


def test_hundreds_of_idle_connections_leave_health_quick(live: Live) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(live.connect())
        begin = time.monotonic()
        assert live.ask("GET", "/health").status == 200
        assert time.monotonic() - begin < 0.5
